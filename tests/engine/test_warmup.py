"""The table of programs and its cache on disk: hits, misses, foreign and broken files, other processes."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from tests.engine.tiny import Client, make_kit, tiny_llama
from xjax.engine import warmup
from xjax.engine.pack import shapes_of
from xjax.engine.warmup import ProgramCache, ProgramTable, cost, fits
from xjax.errors import EngineError
from xjax.request import SamplingParams
from xjax.state.batch import BatchShape

pytestmark = pytest.mark.device

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import json, sys
from tests.engine.null_family import null_model
from tests.engine.tiny import Client, make_kit, tiny_llama
from xjax.request import SamplingParams
model, folder = {"llama": tiny_llama, "null": null_model}[sys.argv[1]](), sys.argv[2]
engine = make_kit(model, rows=(4,), cache=folder).engine()
ids = Client(engine).run(list(range(9)), SamplingParams(temperature=0, max_tokens=12)).token_ids
print(json.dumps([ids, dict(engine.stats())]))
"""


def run_process(model, folder, jax_cache="", end="engine.close()"):
    """Run a request in a process of its own; its tokens, and how many programs it compiled and loaded."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    environment["JAX_COMPILATION_CACHE_DIR"] = str(jax_cache)
    command = [sys.executable, "-c", SCRIPT + end, model, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    ids, stats = json.loads(done.stdout.splitlines()[-1])
    return ids, (stats["programs_compiled"], stats["programs_loaded"])


@pytest.fixture(scope="module")
def expected(llama_kit):
    engine = llama_kit.engine()
    ids = Client(engine).run(list(range(9)), SamplingParams(temperature=0, max_tokens=12)).token_ids
    engine.close()
    return ids


@pytest.fixture(scope="module")
def filled(tmp_path_factory, expected):
    """A folder of programs that another process has saved."""
    folder = tmp_path_factory.mktemp("programs")
    assert run_process("llama", folder) == (expected, (2, 0))
    assert len(list(folder.iterdir())) == 2
    return folder


def copied(filled, folder):
    folder.mkdir()
    for path in filled.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_second_process_loads_what_the_first_compiled(filled, expected):
    assert run_process("llama", filled) == (expected, (0, 2))
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in filled.iterdir())


def test_with_the_cache_of_jax_on_as_well(tmp_path):
    """An executable out of that cache cannot be saved again: it would load, and fail when it runs."""
    jax_cache, folder, other = tmp_path / "jax", tmp_path / "first", tmp_path / "second"
    ids = list(range(9, 21))
    assert run_process("null", folder, jax_cache) == (ids, (2, 0))
    assert run_process("null", folder, jax_cache) == (ids, (0, 2))
    assert run_process("null", other, jax_cache) == (ids, (2, 0))
    assert not other.exists() or not list(other.iterdir())


def test_a_process_that_forgets_to_close_ends(tmp_path):
    end = "engine.table.prepare([])"
    assert run_process("null", tmp_path / "programs", end=end)[1] == (2, 0)


@pytest.mark.parametrize("harm", ["truncated", "flipped", "empty", "no executable", "another program"])
def test_a_bad_file_is_a_miss_and_goes_away(harm, filled, tmp_path):
    folder = copied(filled, tmp_path / "copy")
    path = next(iter(folder.iterdir()))
    data = bytearray(path.read_bytes())
    if harm == "truncated":
        data = data[:-1]
    elif harm == "flipped":
        data[len(data) // 2] ^= 1
    elif harm == "empty":
        data = bytearray()
    elif harm == "another program":
        data = bytearray(next(other for other in folder.iterdir() if other != path).read_bytes())
    else:
        data = bytearray(warmup._digest(path.name, b"junk") + b"junk")
    path.write_bytes(data)
    assert ProgramCache(folder).load(path.name, None, None, jax.devices()[:1]) is None
    assert not path.exists()


def test_a_foreign_or_missing_file_is_a_miss(filled, tmp_path, monkeypatch):
    folder = copied(filled, tmp_path / "copy")
    name = next(iter(folder.iterdir())).name
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    assert ProgramCache(folder).load(name, None, None, jax.devices()[:1]) is None
    assert (folder / name).exists()
    assert ProgramCache(folder).load("nothing", None, None, jax.devices()[:1]) is None
    assert ProgramCache(tmp_path / "no folder").load(name, None, None, jax.devices()[:1]) is None


class Payload:
    """Stands for a compiled program."""


@pytest.fixture
def saved(monkeypatch):
    monkeypatch.setattr(warmup.serialize_executable, "serialize", lambda compiled: (b"payload", None, None))


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, saved):
    (tmp_path / "file").write_text("in the way")
    ProgramCache(tmp_path / "file" / "below").save("key", Payload())
    ProgramCache(tmp_path / "file").save("key", Payload())


def test_nothing_half_written_stays(tmp_path, saved, monkeypatch):
    def no_space(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_space)
    ProgramCache(tmp_path).save("key", Payload())
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_kill_are_removed(tmp_path, saved):
    old, fresh = tmp_path / "a.1.2.tmp", tmp_path / "b.1.2.tmp"
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    ProgramCache(tmp_path).save("key", Payload())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.1.2.tmp", "key"]


def test_programs_that_nobody_loads_any_more_are_removed(filled, tmp_path, saved):
    folder = copied(filled, tmp_path / "copy")
    unused, month_ago = folder / "unused", time.time() - 31 * 86400
    unused.write_bytes(b"of another jaxlib")
    for path in folder.iterdir():
        os.utime(path, (month_ago, month_ago))
    assert run_process("llama", folder)[1] == (0, 2)
    ProgramCache(folder).save("key", Payload())
    assert len(list(folder.iterdir())) == 3 and not unused.exists()


def test_what_cannot_be_serialized_is_not_kept(tmp_path, monkeypatch):
    def refuse(compiled):
        raise ValueError("not supported")

    monkeypatch.setattr(warmup.serialize_executable, "serialize", refuse)
    ProgramCache(tmp_path).save("key", Payload())
    assert list(tmp_path.iterdir()) == []


def test_the_key_changes_with_sources_and_machine(llama_kit, monkeypatch):
    def fixed():
        return ProgramTable(llama_kit.table._spec, llama_kit.model.params, llama_kit.table._state)._fixed

    base = fixed()
    assert fixed() == base
    for name in ("source_digest", "_machine", "version"):
        with monkeypatch.context() as patch:
            patch.setattr(warmup, name, lambda *_: "other")
            assert fixed() != base
    for name, value in (("PJRT_NPROC", "1"), ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert fixed() != base
    with jax.default_matmul_precision("highest"):
        assert fixed() != base
    assert fixed() == base
    config = replace(llama_kit.model.config, norm_eps=1e-4)
    spec = replace(llama_kit.table._spec, config=config)
    assert ProgramTable(spec, llama_kit.model.params, llama_kit.table._state)._fixed != base


def test_the_digest_covers_what_a_step_is_made_from(tmp_path, monkeypatch):
    package = tmp_path / "xjax"
    for name in (
        "engine/step.py",
        "engine/warmup.py",
        "kernels/a/b.py",
        "models/c.py",
        "sampling/d.py",
        "state/e.py",
        "engine/llm.py",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    monkeypatch.setattr(warmup, "__file__", str(package / "engine" / "warmup.py"))
    seen = [warmup.source_digest()]
    for name in ("engine/step.py", "kernels/a/b.py", "models/c.py", "sampling/d.py", "state/e.py"):
        (package / name).write_text("changed")
        seen.append(warmup.source_digest())
    assert len(set(seen)) == 6
    (package / "engine/llm.py").write_text("changed")
    assert warmup.source_digest() == seen[-1]


# ---- which shape serves which ------------------------------------------------------------


def shape(rows, prefill=0, tile=1, *, full=False, scored=0):
    return BatchShape(
        num_rows=rows, num_decode=rows, num_prefill=prefill, tile=tile, num_groups=1, max_pages=8,
        num_sampled=rows + scored, trash_row=rows, full=full,
    )  # fmt: skip


def test_larger_shapes_fit():
    assert fits(shape(1), shape(4)) and not fits(shape(4), shape(1))
    assert fits(shape(4), shape(4, full=True)) and not fits(shape(4, full=True), shape(4))
    assert not fits(shape(4), shape(4, 64, 32)) and not fits(shape(4, 64, 32), shape(4))
    assert fits(shape(4, 32, 32), shape(4, 64, 32))
    assert not fits(shape(4, 64, 16), shape(4, 64, 32)), "four short prompts need four tiles"
    assert not fits(shape(4, 64, 32), shape(4, 128, 16)), "a chunk would need two of its tiles"
    assert not fits(shape(4, 64, 32, full=True, scored=16), shape(4, 128, 32, full=True, scored=8))
    assert min([shape(16), shape(4, full=True), shape(4)], key=cost) == shape(4)


# ---- the table ---------------------------------------------------------------------------


@pytest.fixture
def table(llama_kit, monkeypatch):
    """A table that makes programs when told so."""
    table = ProgramTable(llama_kit.table._spec, llama_kit.model.params, llama_kit.table._state)
    table.gate, table.made = threading.Event(), []

    def make(shape):
        assert table.gate.wait(20)
        table.made.append(shape)
        if shape.num_rows == 13:
            raise EngineError("thirteen")
        return warmup.Program(shape, lambda: None, 0.0, False)

    monkeypatch.setattr(table, "_make", make)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    yield table
    table.gate.set()
    table.close()


def test_what_a_step_waits_for_is_made_next(table):
    table.prepare([shape(n) for n in (1, 2, 4)])
    time.sleep(0.05)  # the first is under way
    assert table.find(shape(4)) is None and table.find(shape(8)) is None
    table.gate.set()
    table.wait([shape(n) for n in (1, 2, 4, 8)])
    assert [made.num_rows for made in table.made] == [1, 8, 4, 2]


def test_a_shape_does_not_wait_for_a_busy_thread_while_processors_are_free(table, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    started = []
    make = table._make
    monkeypatch.setattr(table, "_make", lambda shape: started.append(shape) or make(shape))
    for rows in (1, 2, 4):
        table.prepare([shape(rows)])
        time.sleep(0.05)
    assert started == [shape(1), shape(2)]
    table.gate.set()
    table.wait([shape(4)])
    assert started == [shape(1), shape(2), shape(4)]


def test_a_larger_ready_shape_serves_until_the_own_is_worth_it(table):
    table.gate.set()
    table.wait([shape(16), shape(8)])
    served = Counter(table.find(shape(4)).shape.num_rows for _ in range(warmup._MISSES_TO_COMPILE - 1))
    assert served == {8: warmup._MISSES_TO_COMPILE - 1} and len(table.made) == 2
    table.find(shape(4))
    table.wait([shape(4)])
    assert table.find(shape(4)).shape == shape(4)


def test_a_failure_is_raised_and_tried_again(table):
    table.gate.set()
    for _ in range(2):
        with pytest.raises(EngineError, match="thirteen"):
            table.get(shape(13))
        with pytest.raises(EngineError, match="thirteen"):
            table.find(shape(13))
    assert len(table.made) == 2
    table.wait([shape(16)])
    assert table.find(shape(13)).shape == shape(16)


def test_threads_end_with_the_work(table):
    table.prepare([shape(1), shape(2)])
    assert any(thread.name == "xjax-compile" for thread in threading.enumerate())
    table.gate.set()
    table.wait([shape(1), shape(2)])
    for _ in range(200):
        if not any(thread.name == "xjax-compile" for thread in threading.enumerate()):
            break
        time.sleep(0.01)
    else:
        pytest.fail("a compile thread stays")


def test_the_process_waits_for_a_compilation_that_the_engine_began(table):
    engine = threading.Thread(target=lambda: table.find(shape(1)), daemon=True)
    engine.start()
    engine.join()
    compiling = [thread for thread in threading.enumerate() if thread.name == "xjax-compile"]
    assert compiling and not any(thread.daemon for thread in compiling)
    table.gate.set()


def test_a_closed_table_cancels_what_waits(table):
    table.prepare([shape(1), shape(2)])
    time.sleep(0.05)
    waiter = threading.Timer(0.05, table.close)
    waiter.start()
    with pytest.raises(EngineError, match="closed"):
        table.get(shape(2))
    table.gate.set()
    table.wait([shape(1)])
    with pytest.raises(EngineError, match="closed"):
        table.wait([shape(4)])


def test_compiling_is_told_and_loading_is_not(llama_kit, tmp_path, monkeypatch):
    monkeypatch.setattr(ProgramTable, "_compile", lambda *_: (lambda: None, False))
    seen = []
    table = ProgramTable(
        llama_kit.table._spec, llama_kit.model.params, llama_kit.table._state,
        cache=ProgramCache(tmp_path), progress=lambda *stage: seen.append(stage),
    )  # fmt: skip
    first, second, third = shapes_of(llama_kit.plan.scheduler)[:3]
    table.wait([first])
    assert seen == [("compile", 0, 1), ("compile", 1, 1)]
    monkeypatch.setattr(ProgramCache, "load", lambda *_: lambda: None)
    table.wait([second])
    assert len(seen) == 2
    monkeypatch.setattr(ProgramCache, "load", lambda *_: None)
    table.wait([third])
    assert seen[2:] == [("compile", 1, 2), ("compile", 2, 2)]


def test_make_kit_is_cheap_until_asked():
    kit = make_kit(tiny_llama())
    assert kit.table.ready == [] and kit.table.stats() == {"programs_compiled": 0, "programs_loaded": 0}
