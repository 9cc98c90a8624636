"""The lasting namespace: every setting and every weight byte counts, names, paths and processes do not."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from xjax.cache.identity import LateNamespace, PageIdentity, canonical
from xjax.cache.keys import KEY_BYTES, KeyChain, page_tokens
from xjax.checkpoints import digest
from xjax.checkpoints.digest import WeightFiles
from xjax.config import PagedLayer, RecurrentLayer
from xjax.errors import LoadError

PROGRAM = """
import dataclasses
from xjax.cache.identity import PageIdentity
from xjax.config import PagedLayer, RecurrentLayer


@dataclasses.dataclass(frozen=True)
class Rope:
    dim: int = 16
    theta: float = 10000.0
    factors: tuple = (1.0, 2.5)


@dataclasses.dataclass(frozen=True)
class Config:
    num_heads: int = 4
    norm_eps: float = 1e-6
    tied: bool = False
    soft_cap: object = None
    rope: object = Rope()
    dense_layers: object = frozenset({"a", "b", "c", "d"})


IDENTITY = PageIdentity(
    family="llama", config=Config(), coding={"method": "gptq", "bits": 4, "groups": {"x": [1], "y": None}},
    layers=(PagedLayer(2, 16), PagedLayer(2, 16, 12)), page_dtype="float32", page_size=16, layout=1,
    dtype="float32", kernels="numba", arithmetic=("sources", "0.10"),
)
"""
exec(PROGRAM)  # what other processes run, too
IDENTITY: PageIdentity = globals()["IDENTITY"]
Rope, Config = globals()["Rope"], globals()["Config"]
WEIGHTS = "ab" * 32

# For each field, values that are all different from the one above and from each other.
CHANGES = {
    "family": ["qwen3"],
    "config": [
        *(dataclasses.replace(IDENTITY.config, **change) for change in (
            {"num_heads": 2}, {"norm_eps": 1e-5}, {"tied": True}, {"tied": 0}, {"soft_cap": 0.0},
            {"rope": Rope(dim=8)}, {"rope": Rope(theta=10001.0)}, {"rope": Rope(theta=10000)},
            {"rope": Rope(factors=(1.0,))}, {"rope": None}, {"dense_layers": frozenset("abc")},
        )),
        Rope(),
    ],
    "coding": [{}, {"method": "gptq", "bits": 8, "groups": {"x": [1], "y": None}}],
    "layers": [
        IDENTITY.layers[:1], IDENTITY.layers[::-1], (PagedLayer(1, 16), IDENTITY.layers[1]),
        (PagedLayer(2, 8), IDENTITY.layers[1]), (PagedLayer(2, 16), PagedLayer(2, 16, 13)),
        (RecurrentLayer(2, 16, 12), IDENTITY.layers[1]),
    ],
    "page_dtype": ["uint16"],
    "scale_form": ["page"],
    "page_size": [32],
    "layout": [2],
    "sharding": [(("x", 2),), (("x", 4),), (("y", 2),)],
    "adapter": ["one"],
    "dtype": ["bfloat16"],
    "kernels": ["xla"],
    "arithmetic": [("sources", "0.11"), ("source", "s0.10"), ("sources",)],
}  # fmt: skip


def test_every_field_counts():
    assert CHANGES.keys() == {item.name for item in dataclasses.fields(PageIdentity)}
    found = [IDENTITY.namespace(WEIGHTS), IDENTITY.namespace("ac" * 32)]
    for name, values in CHANGES.items():
        found += [dataclasses.replace(IDENTITY, **{name: value}).namespace(WEIGHTS) for value in values]
    assert len(set(found)) == len(found) == 2 + sum(map(len, CHANGES.values()))
    assert {len(item) for item in found} == {KEY_BYTES}


def test_what_is_equal_is_written_in_any_order():
    other = dataclasses.replace(
        IDENTITY, coding={"groups": {"y": None, "x": [1]}, "bits": 4, "method": "gptq"}
    )
    assert other.namespace(WEIGHTS) == IDENTITY.namespace(WEIGHTS)


def test_what_has_no_plain_form_is_refused():
    for value in (object(), IDENTITY.config.__class__, [1, {2: object()}], 1j):
        with pytest.raises(TypeError, match="identity"):
            canonical(value)


def test_processes_with_other_hash_seeds_make_the_same_namespace():
    show = PROGRAM + f"\nprint(IDENTITY.namespace({WEIGHTS!r}).hex())\nprint(hash('salt'))"
    lines = [
        subprocess.run(
            [sys.executable, "-c", show], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert lines[0][0] == lines[1][0] == IDENTITY.namespace(WEIGHTS).hex()
    assert lines[0][1] != lines[1][1]  # the seeds were really different


# ---- weights -----------------------------------------------------------------------------


def write(folder, parts):
    """Weight files that are no news."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, data in parts.items():
        (folder / name).write_bytes(data)
        os.utime(folder / name, ns=(0, int((time.time() - 100) * 1e9)))
        files.append(folder / name)
    return WeightFiles.of(files)


def space(files, cache):
    return LateNamespace(lambda: IDENTITY, files, cache).get()


def test_one_changed_weight_byte_never_matches_and_names_do_not_count(tmp_path):
    data = bytes(np.random.default_rng(0).integers(0, 256, 600, np.uint8))
    parts = {"a.safetensors": data[:400], "b.safetensors": data[400:]}
    first = space(write(tmp_path / "one", parts), tmp_path)
    again = space(write(tmp_path / "other" / "name", dict(zip("xy", parts.values(), strict=True))), tmp_path)
    assert first == again
    tokens = page_tokens(np.arange(64, dtype=np.int32), 16)

    def keys(namespace):
        found: list[bytes] = []
        KeyChain(namespace, 16).extend(found, tokens)
        return set(found)

    for place in (0, 1, 255, 399, 400, 599):
        changed = bytearray(data)
        changed[place] ^= 1
        parts = {"a.safetensors": bytes(changed[:400]), "b.safetensors": bytes(changed[400:])}
        other = space(write(tmp_path / str(place), parts), tmp_path)
        assert other != first and keys(other).isdisjoint(keys(first))
    swapped = {"a.safetensors": data[400:], "b.safetensors": data[:400]}
    assert space(write(tmp_path / "swapped", swapped), tmp_path) != first


def test_a_file_that_changed_since_it_was_opened_names_no_page(tmp_path):
    files = write(tmp_path / "model", {"w": b"what was read"})
    space(files, tmp_path)
    write(tmp_path / "new", {"w": b"what is there"})
    os.replace(tmp_path / "new" / "w", tmp_path / "model" / "w")
    late = LateNamespace(lambda: IDENTITY, files, tmp_path)
    with pytest.raises(LoadError, match="changed since it was opened"):
        late.get()
    assert isinstance(late.start().exception(), LoadError)
    (tmp_path / "model" / "w").unlink()
    with pytest.raises(LoadError, match="cannot be read"):
        space(files, tmp_path)


def test_it_is_found_out_once_on_another_thread_and_only_when_asked(tmp_path, monkeypatch):
    read, seen, gate = digest._hash, [], threading.Event()

    def slow(path):
        seen.append(threading.current_thread())
        gate.wait(20)
        return read(path)

    monkeypatch.setattr(digest, "_hash", slow)
    late = LateNamespace(lambda: IDENTITY, write(tmp_path / "model", {"w": b"data"}), tmp_path)
    assert seen == []
    future = late.start()
    assert late.start() is future and not future.done()  # nobody waits
    gate.set()
    assert (
        late.get()
        == future.result(20)
        == IDENTITY.namespace(WeightFiles.of([tmp_path / "model" / "w"]).digest(tmp_path))
    )
    assert len(seen) == 1 and seen[0] is not threading.main_thread()


def test_nobody_waits_for_ever(tmp_path, monkeypatch):
    seen = threading.Semaphore(0)
    monkeypatch.setattr(threading, "excepthook", lambda given: seen.release())
    late = LateNamespace(lambda: 1 / 0, write(tmp_path / "model", {"w": b"data"}), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(CancelledError):
        late.start().result(20)
    assert seen.acquire(timeout=20)  # and it is told of
