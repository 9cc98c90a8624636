"""The hub client as a real process, against a small server of the test's own on this machine."""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from xjax.checkpoints import hub
from xjax.checkpoints.fetch import attempt, repository
from xjax.checkpoints.fetch.attempt import AttemptError
from xjax.checkpoints.hub import list_models, pull, resolve
from xjax.errors import LoadError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["X"]}',
    "model.safetensors": b"weights" * 100_000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "gguf/m-Q4_0.gguf": b"GGUF" * 1000,
}


class _Hub(BaseHTTPRequestHandler):
    """The few requests that a download makes: list a repository, head and get a file."""

    files = FILES
    commit, listed_commit = COMMIT, ""
    hangs_on = ""
    served: list[str] = []

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            half = len(body) // 2
            self.wfile.write(body[:half])
            if self.hangs_on and self.path.endswith(self.hangs_on):
                self.wfile.flush()
                time.sleep(20)
            self.wfile.write(body[half:])

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/user/repo"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            body = json.dumps(
                {"id": "user/repo", "sha": self.listed_commit or self.commit, "siblings": siblings}
            ).encode()
            self._answer(200, body, {"Content-Type": "application/json"})
        elif path.startswith("/user/repo/resolve/"):
            name = path.split("/", 5)[5]
            data = self.files[name]
            if self.command == "GET":
                self.served.append(name)
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self._answer(200, data, {"ETag": etag, "X-Repo-Commit": self.commit})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    """Start the server and make it the hub of every client process; its cache is the test's own."""
    handler = type("Handler", (_Hub,), {"served": [], "files": dict(FILES)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_folder_is_downloaded_recorded_and_found_again(tmp_path: Path, served: type[_Hub]) -> None:
    cache = tmp_path / "cache"
    seen: list[tuple[int, int | None, str]] = []
    path = resolve("user/repo", cache_dir=cache, progress=lambda *args: seen.append(args))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    total = sum(file.stat().st_size for file in path.iterdir())
    assert all(0 <= done <= size == total and label == "downloading user/repo" for done, size, label in seen)
    assert sorted(served.served) == ["config.json", "model.safetensors", "tokenizer.json"]
    served.served.clear()
    assert (
        resolve("user/repo", cache_dir=cache) == resolve("user/repo", cache_dir=cache, offline=True) == path
    )
    assert served.served == []
    (entry,) = list_models(cache)
    assert (entry.name, entry.path, entry.size, entry.kind) == ("user/repo", path, total, "hf")
    (path / "tokenizer.json").unlink()  # a copy that is no longer whole is no model
    assert list_models(cache) == []
    assert resolve("user/repo", cache_dir=cache) == path
    assert (path / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]


def test_one_gguf_file_by_tag_and_by_name(tmp_path: Path, served: type[_Hub]) -> None:
    for name in ("user/repo:Q4_0", "user/repo/gguf/m-Q4_0.gguf"):
        path = resolve(name, cache_dir=tmp_path / "cache", revision="main")
        assert path.name == "m-Q4_0.gguf"
        assert path.read_bytes() == FILES["gguf/m-Q4_0.gguf"]
    assert served.served == ["gguf/m-Q4_0.gguf"]
    kinds = {entry.name: entry.kind for entry in list_models(tmp_path / "cache")}
    assert kinds == {"user/repo:Q4_0": "gguf", "user/repo/gguf/m-Q4_0.gguf": "gguf"}


def test_pull_asks_the_hub_for_a_newer_commit(tmp_path: Path, served: type[_Hub]) -> None:
    name, cache = "user/repo:Q4_0", tmp_path / "cache"
    first = resolve(name, cache_dir=cache)
    served.commit = "f" * 40
    served.files["gguf/m-Q4_0.gguf"] = b"GGUF newer"
    assert resolve(name, cache_dir=cache) == first
    second = pull(name, cache_dir=cache)
    assert second.read_bytes() == b"GGUF newer"
    assert resolve(name, cache_dir=cache) == second != first


def test_a_repository_that_changes_during_the_download(tmp_path: Path, served: type[_Hub]) -> None:
    served.listed_commit = "e" * 40
    with pytest.raises(LoadError, match="changed during the download; try again; .*not whole"):
        resolve("user/repo", cache_dir=tmp_path / "cache")


def test_what_another_program_downloaded_is_found_offline(tmp_path: Path, served: type[_Hub]) -> None:
    resolve("user/repo", cache_dir=tmp_path / "one")
    path = resolve("user/repo", cache_dir=tmp_path / "two", offline=True)
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert [entry.name for entry in list_models(tmp_path / "two")] == ["user/repo"]
    (path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="tried the hub's cache on this machine: .*not whole"):
        resolve("user/repo", cache_dir=tmp_path / "three", offline=True)


def test_a_missing_repository_and_an_offline_environment(
    tmp_path: Path, served: type[_Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LoadError, match="tried the hub: there is no such repository, or HF_TOKEN") as caught:
        resolve("user/other", cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LoadError, match="HF_HUB_OFFLINE forbids it; .*: it is not there"):
        resolve("user/other", cache_dir=tmp_path / "cache")


def test_a_download_that_stalls_ends_and_the_next_one_is_whole(
    tmp_path: Path, served: type[_Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.hangs_on = "model.safetensors"
    start = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(attempt, "STALL_SECONDS", 3.0)
        with pytest.raises(LoadError, match="tried the hub: no progress for 3 s"):
            resolve("user/repo", cache_dir=tmp_path / "cache")
    assert time.monotonic() - start < 19  # the server would go on after 20
    assert "model.safetensors" in served.served
    assert list_models(tmp_path / "cache") == []
    served.hangs_on = ""
    for partial in (tmp_path / "hub").rglob("*.incomplete"):
        os.utime(partial, (0, 0))
    path = resolve("user/repo", cache_dir=tmp_path / "cache")
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not list((tmp_path / "hub").rglob("*.incomplete"))


# ---- answers that cannot be trusted, without a process -------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each command of the client answers; an exception is raised."""
    prepared: dict[str, Any] = {"local": AttemptError("not there")}

    def call(command: str, arguments: Any, **rest: Any) -> Any:
        answer = prepared[command]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(repository, "call_client", call)
    return prepared


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "list of files cannot be understood"),
        ({"commit": "c", "files": []}, "list of files cannot be understood"),
        ({"commit": "../c", "files": {"config.json": 2}}, "which commit"),
        ({"commit": None, "files": {}}, "which commit"),
        ({"commit": "c", "files": {"../config.json": 2, "model.safetensors": "9"}}, "neither config.json"),
    ],
)
def test_strange_answers(tmp_path: Path, answers: dict[str, Any], answer: Any, message: str) -> None:
    answers["list"] = answer
    with pytest.raises(LoadError, match=message):
        resolve("user/repo", cache_dir=tmp_path)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"folder": 1}', '{"folder": "/", "files": {"x": 1}}'])
def test_a_damaged_record_is_no_model(tmp_path: Path, damage: str) -> None:
    (tmp_path / "models" / "hub").mkdir(parents=True)
    (tmp_path / "models" / "hub" / "x.json").write_text(damage)
    assert list_models(tmp_path) == []


@pytest.mark.parametrize(
    "index", ["", "{}", '{"weight_map": []}', '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}']
)
def test_a_local_copy_without_all_shards(tmp_path: Path, answers: dict[str, Any], index: str) -> None:
    name = "model.safetensors.index.json"
    (tmp_path / name).write_text(index)
    files = {"config.json": 2, name: len(index), "model-00001-of-00002.safetensors": 1}
    answers["local"] = {"folder": str(tmp_path), "files": files}
    with pytest.raises(
        LoadError, match="its model.safetensors.index.json cannot be read|the copy here lacks"
    ):
        resolve("user/repo", cache_dir=tmp_path / "cache", offline=True)


def test_what_the_client_says_when_it_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = tmp_path / "client.py"
    monkeypatch.setattr(repository, "_CLIENT", client)
    for body, message in {
        "raise ValueError('some reason')": "^ValueError: some reason$",
        "print('no JSON')": "gave no answer",
        "pass": "gave no answer",
        "import sys; sys.exit('in words')": "^in words$",
        "import os; os.abort()": "without a message",
    }.items():
        client.write_text(body)
        with pytest.raises(AttemptError, match=message):
            repository.call_client("list", {}, folder=tmp_path)


def test_only_one_line_of_a_long_complaint(tmp_path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        assert "\n" not in attempt._reason("a\nb\n" + "E" * 1000)
    assert len(attempt._reason("x" * 1000)) == 300
    assert hub.DEFAULT_MODEL.name
