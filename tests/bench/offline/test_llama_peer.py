"""llama.cpp as a peer, with programs that print what the real ones print."""

import json
import sys
from pathlib import Path

import pytest

from xjax.errors import EngineError, LoadError
from xjax_server.bench.offline import peers
from xjax_server.bench.offline.llama_peer import LlamaPeer, batch_seconds, bench_entry, missing
from xjax_server.bench.offline.worker import Worker, command

FAKE = Path(__file__).with_name("fake_llama.py")


@pytest.fixture
def program(tmp_path):
    """A folder with both programs, and what CMake leaves where they were built."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("llama-bench", "llama-batched-bench"):
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{FAKE.read_text(encoding='utf-8')}", encoding="utf-8")
        path.chmod(0o755)
    (tmp_path / "CMakeCache.txt").write_text(
        "GGML_NATIVE:BOOL=ON\nGGML_AVX2:BOOL=OFF\nCMAKE_BUILD_TYPE:STRING=Release\n"
    )
    entry = {"file": "/a/ggml-cpu/ggml-cpu.c", "command": "cc -O3 -march=native -DX -c ggml-cpu.c"}
    (tmp_path / "compile_commands.json").write_text(json.dumps([{"file": "/a/other.c"}, entry]))
    return str(folder / "llama-bench")


def _calls(program):
    return (Path(program).parent / "calls").read_text().splitlines()


def test_times_are_those_that_the_programs_tell(program):
    peer = LlamaPeer("m.gguf", threads=2, path=program)
    assert peer.prefill([7] * 512) == {"seconds": [pytest.approx(0.512)]}
    assert peer.decode([[7] * 64], 12) == {"seconds": [pytest.approx(0.010)] * 3}
    assert peer.decode([[7] * 64] * 8, 12) == {"seconds": [pytest.approx(0.016)] * 2}
    assert _calls(program) == [
        "llama-bench -m m.gguf -t 2 -r 1 -o json -p 512 -n 0",
        "llama-bench -m m.gguf -t 2 -r 3 -o json -p 0 -n 12 -d 64",
        *["llama-batched-bench -m m.gguf -t 2 -tb 2 -c 2048 -npp 64 -ntg 12 -npl 8,8,1 --output-format jsonl"]
        * 2,
    ]


@pytest.mark.parametrize(("rows", "tokens", "count"), [(1, 512, 6), (1, 0, 6), (8, 0, 7)])
def test_the_fastest_setting_is_measured(program, rows, tokens, count):
    peer = LlamaPeer("m.gguf", threads=2, path=program)
    found = peer.tune(rows=rows, tokens=tokens, context=64, num_tokens=4)
    assert found["setting"] == "flash attention"
    assert len(found["tried"]) == count
    refused = next(item for item in found["tried"] if item["name"] == "8-bit cache")
    assert refused["seconds"] is None and "failed to load model" in refused["error"]
    if tokens:
        peer.prefill([7] * tokens)
    else:
        peer.decode([[7] * 64] * rows, 4)
    assert _calls(program)[-1].endswith("-fa on")
    # Another case keeps its own setting.
    assert peer.prefill([7] * 100) == {"seconds": [pytest.approx(0.1)]}


def test_build_and_bytes(program):
    found = LlamaPeer("m.gguf", threads=2, path=program).describe()
    assert found["read_bytes"] == 96576768
    assert found["build"] == {
        "build": "0.5.0-dev (build 1, commit 0c1e57098) built with GNU 12.2.0 for Linux x86_64",
        "CMAKE_BUILD_TYPE": "Release",
        "GGML_NATIVE": "ON",
        "flags of the kernels": "-O3 -march=native",
    }


def test_a_file_that_cannot_be_run_says_why(program):
    peer = LlamaPeer("absent.gguf", threads=2, path=program)
    with pytest.raises(EngineError, match=r"llama-bench ended with code 1: .*failed to load model 'absent"):
        peer.check([1], 8)
    with pytest.raises(EngineError, match="failed to load model"):
        peer.tune(rows=1, tokens=16, context=0, num_tokens=0)


def test_without_the_batched_program_rows_are_refused(program):
    Path(program).with_name("llama-batched-bench").unlink()
    peer = LlamaPeer("m.gguf", threads=2, path=program)
    with pytest.raises(EngineError, match="needs llama-batched-bench beside"):
        peer.decode([[7] * 64] * 8, 12)


@pytest.mark.parametrize("printed", ["", "[", "{}", "[]", "[1]", "[{}, {}]", "usage: llama-bench"])
def test_what_is_no_result_is_refused(printed):
    with pytest.raises(EngineError, match="llama-bench printed no"):
        bench_entry(printed)


@pytest.mark.parametrize("times", [None, [], [0], ["fast"], 3])
def test_a_result_without_times_is_refused(program, monkeypatch, times):
    peer = LlamaPeer("m.gguf", threads=2, path=program)
    monkeypatch.setattr(peer, "_bench", lambda flags, setting: {"samples_ns": times})
    with pytest.raises(EngineError, match="told no times"):
        peer.prefill([1])


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "no JSON",
        '{"pl": 4, "tg": 12, "t_tg": 1.0}',
        '{"pl": 8, "tg": 12}',
        '{"pl": 8, "tg": 12, "t_tg": 0.0}',
    ],
)
def test_a_batch_without_its_line_is_refused(printed):
    with pytest.raises(EngineError, match="told no time of 12 tokens of 8 rows"):
        batch_seconds(printed, 8, 12)


def test_absent_program():
    assert missing("/nowhere/llama-bench") == "/nowhere/llama-bench is no program"
    with pytest.raises(LoadError, match="cannot run: /nowhere"):
        LlamaPeer("m.gguf", threads=2, path="/nowhere/llama-bench")


def test_tuning_through_a_worker(program):
    child = Worker("llama-bench", command("llama-bench", "m.gguf", threads=2, path=program))
    assert child.ask("check", prompt=[1], num_tokens=8) == {"ids": None}
    assert child.ask("tune", rows=8, tokens=0, context=64, num_tokens=4)["setting"] == "flash attention"
    assert child.ask("decode", prompts=[[7] * 64] * 8, num_tokens=4) == {
        "seconds": [pytest.approx(0.008)] * 2
    }
    child.close()


def test_names_of_peers():
    assert peers.peers_of("transformers,llama-bench=/a/b") == {"transformers": "", "llama-bench": "/a/b"}
    assert peers.peers_of("") == {}
    with pytest.raises(
        Exception, match="no peer is called 'llama.cpp'; expected transformers or llama-bench=PATH"
    ):
        peers.peers_of("llama.cpp")
    assert set(peers.TUNED) <= set(peers.MISSING)
