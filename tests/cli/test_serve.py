"""`xjax serve`: flags, their other spellings, and what is refused before anything is loaded."""

import logging
from pathlib import Path

import pytest

import xjax
from tests.server.program import FakeLLM
from xjax_server import app, lifecycle
from xjax_server.cli import main
from xjax_server.cli.serve import MAX_QUEUE


class Started:
    """What a command would have served."""

    def __init__(self, monkeypatch):
        self.place = self.plan = self.access = self.options = None
        monkeypatch.setattr(lifecycle, "run", self._run)
        monkeypatch.setattr(app, "build_app", self._build)
        monkeypatch.setattr(lifecycle, "listen", self._listen)
        monkeypatch.setitem(vars(xjax), "LLM", self._make)

    def _listen(self, *place):
        self.place = place
        return _Listener()

    def _build(self, service, routes, **access):
        self.access = access

    def _make(self, model=None, **options):
        self.options = options
        return FakeLLM(model or "default", **options)

    def _run(self, plan, listener):
        self.plan = plan
        plan.make_app(None)
        self.model = plan.load()
        return True


class _Listener:
    family = None

    def getsockname(self):
        return ("127.0.0.1", 1)


@pytest.fixture
def started(monkeypatch):
    levels = {
        name: logging.getLogger(name) for name in ("xjax", "xjax_server", "uvicorn.error", "uvicorn.access")
    }
    before = {name: (item.level, item.handlers[:], item.propagate) for name, item in levels.items()}
    monkeypatch.delenv("XJAX_API_KEY", raising=False)
    yield Started(monkeypatch)
    for name, item in levels.items():
        item.level, item.handlers[:], item.propagate = before[name]


def test_defaults(started):
    assert main(["serve"]) == 0
    assert started.place == ("127.0.0.1", 8000, None)
    assert started.access == {"api_keys": [], "cors": [], "shares_cache": False}
    assert started.options["max_queue"] == MAX_QUEUE
    assert started.options["max_num_seqs"] == 32
    assert started.options["compile_cache"] == "auto"
    assert started.model.names == ("smollm2-135m-instruct",) or "smollm2" in started.model.names[0].lower()
    assert started.plan.limits.request_timeout is None
    assert started.plan.drain_timeout == 30


@pytest.mark.parametrize(
    ("arguments", "host"),
    [([], "127.0.0.1"), (["--api-key", "k"], "0.0.0.0"), (["--api-key", "k", "--host", "::1"], "::1"),
     (["--host", "0.0.0.0"], "0.0.0.0")],
)  # fmt: skip
def test_the_world_may_ask_only_with_a_key_or_when_told_so(started, arguments, host):
    assert main(["serve", *arguments]) == 0
    assert started.place[0] == host


def test_keys_of_both_sources(started, monkeypatch):
    monkeypatch.setenv("XJAX_API_KEY", "c")
    assert main(["serve", "--api-key", "a", "--api-key", "b"]) == 0
    assert started.access["api_keys"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cors", "https://a", "--cors", "https://b"],
        ["--allowed-origins", '["https://a", "https://b"]'],
        ["--cors=https://a", '--allowed_origins=["https://b"]'],
    ],
)
def test_origins(started, arguments):
    assert main(["serve", *arguments]) == 0
    assert started.access["cors"] == ["https://a", "https://b"]


@pytest.mark.parametrize("arguments", [
    ["serve", "a/b"], ["serve", "--model", "a/b"], ["serve", "--m", "a/b"], ["serve", "--w", "a/b"],
    ["serve", "a/b", "--server"],
])  # fmt: skip
def test_spellings_of_the_model(started, arguments):
    assert main(arguments) == 0
    assert started.model.names == ("a/b",)


def test_a_file_of_a_repository_named_apart(started):
    assert main(["serve", "--m", "a/b", "--f", "c.gguf"]) == 0
    assert started.model.names == ("a/b/c.gguf",)


def test_names(started, tmp_path, monkeypatch):
    assert main(["serve", "a/b", "--served-model-name", "x", "--served-model-name", "y"]) == 0
    assert started.model.names == ("x", "y")
    file = tmp_path / "small-q4.gguf"
    file.touch()
    monkeypatch.setattr("xjax.checkpoints.checkpoint.open_checkpoint", lambda path: None)
    assert main(["serve", str(file)]) == 0
    assert started.model.names == ("small-q4", str(file))
    assert main(["serve", str(tmp_path)]) == 0
    assert started.model.names == (Path(tmp_path).name, str(tmp_path))


def test_keys_may_share_the_cache(started):
    assert main(["serve", "--api-key", "a", "--api-key", "b", "--share-prefix-cache"]) == 0
    assert started.access["shares_cache"] is True


def test_limits_and_engine_flags(started):
    arguments = (
        "--request-timeout 5 --queue-timeout 3 --max-body 1000 --drain-timeout 2 --seed 7 --max-queue 3"
    )
    arguments += " --max-num-batched-tokens 64 --gpu-memory-utilization 0.5 --port 9 --log-level info"
    assert main(["serve", *arguments.split()]) == 0
    limits = started.plan.limits
    assert (limits.request_timeout, limits.max_body, started.plan.drain_timeout) == (5, 1000, 2)
    assert limits.queue_timeout == 3
    assert started.place[1] == 9
    wanted = {"seed": 7, "max_queue": 3, "prefill_chunk_size": 64, "kv_fraction": 0.5}
    assert started.options.items() >= wanted.items()
    assert started.model.seed == 7


@pytest.mark.parametrize(("level", "ours", "access"), [
    ("debug", logging.DEBUG, True), ("trace", logging.DEBUG, True), ("error", logging.ERROR, False),
    ("warning", logging.WARNING, False),
])  # fmt: skip
def test_log_levels(started, level, ours, access):
    assert main(["serve", "--uvicorn-log-level", level]) == 0
    assert logging.getLogger("xjax_server").level == ours
    assert started.plan.access_log == access


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["./nothing"], "no such file or folder"),
        (["nothing"], "no such file or folder"),
        (["a/b", "--model", "c/d"], "named twice"),
        (["a/b", "--m", "c/d", "--f", "e.gguf"], "named twice"),
        (["--f", "nothing.gguf"], "no such file or folder"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "k", "--api-key", " "], "--api-key"),
        (["--port", "70000"], "--port"),
        (["--port", "x"], "--port"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--log-level", "loud"], "--log-level"),
        (["--cors", "[1"], "--cors"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--temperature", "1"], "--temperature"),
        (["--compile-cache", "programs"], "--compile-cache must be an absolute folder"),
        (["--chat-template", "/nothing/here"], "--chat-template /nothing/here: No such file"),
        (["/dev"], "/dev: expected config.json and weights, or one GGUF file"),
        (["/dev/null"], "/dev/null"),
        (["--served-model-name", ""], "--served-model-name"),
        (["--uds", "/tmp/x", "--port", "8000"], "--uds"),
    ],
)
def test_what_is_wrong_is_a_line_before_anything_starts(started, capsys, arguments, line):
    assert main(["serve", *arguments]) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and line in seen.err
    assert len(seen.err.strip().splitlines()) == 1
    assert started.place is None
