"""`xjax pull` and `xjax models`, with the downloads replaced."""

from pathlib import Path

import pytest

from xjax.checkpoints import hub
from xjax.errors import LoadError
from xjax_server.cli import main


@pytest.fixture
def pulled(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setenv("XJAX_HOME", str(tmp_path))

    def pull(name, *, revision, cache_dir, progress):
        calls.append((name, revision, cache_dir))
        if name == "no/where":
            raise LoadError("cannot fetch 'no/where': tried the hub (offline)")
        progress(5, 10, "downloading it")
        return cache_dir / "models" / "it.gguf"

    monkeypatch.setattr(hub, "pull", pull)
    return calls


def test_path_goes_to_stdout(pulled, capsys, tmp_path):
    assert main(["pull", "user/repo", "--revision", "v1"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/models/it.gguf\n"
    assert err == "xjax: downloading it\n"
    assert pulled == [("user/repo", "v1", tmp_path)]


def test_no_name_is_the_default_model(pulled):
    assert main(["pull"]) == 0
    assert pulled[0][0] is None


def test_failure_is_one_line(pulled, capsys):
    assert main(["pull", "no/where"]) == 2
    assert capsys.readouterr().err == "xjax: error: cannot fetch 'no/where': tried the hub (offline)\n"


def test_models_are_a_table(monkeypatch, capsys, tmp_path):
    path = Path("/a/very/long/path" * 20) / "it.gguf"
    entry = hub.ModelEntry(name="user/[red]repo", path=path, size=98_400_000, kind="gguf")
    monkeypatch.setattr(hub, "list_models", lambda cache_dir: [entry])
    assert main(["models"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "kind", "size", "path"]
    assert row.split() == ["user/[red]repo", "gguf", "98", "MB", str(path)]


def test_no_models_yet(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XJAX_HOME", str(tmp_path))
    assert main(["models"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "xjax pull NAME" in err
