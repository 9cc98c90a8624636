"""`xjax convert` on the command line: what goes where, and the exit codes."""

import pytest

from tests.engine.tiny_folder import write_folder
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.weights.saved import orbax as saving
from xjax_server.cli import main

pytestmark = pytest.mark.device


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XJAX_HOME", str(tmp_path / "home"))
    return write_folder(tmp_path / "source")


def test_path_goes_to_stdout(source, tmp_path, capsys):
    out = tmp_path / "saved"
    assert main(["convert", str(source), str(out), "--dtype", "float32"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert said.err == "xjax: loading weights\nxjax: writing weights\n"
    assert open_checkpoint(out).saved is not None


def test_existing_folder(source, tmp_path, capsys):
    arguments = ["convert", str(source), str(tmp_path / "saved")]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        f"xjax: error: {tmp_path}/saved: exists already; --overwrite replaces it\n"
    )
    assert main([*arguments, "--force"]) == main([*arguments, "--overwrite"]) == 0


def test_wrong_arguments(source, tmp_path, capsys):
    assert main(["convert", str(source)]) == 2
    assert "Missing argument 'out'" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "saved"), "--dtype", "int8"]) == 2
    assert "'int8' is not one of" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "saved")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert not (tmp_path / "saved").exists()


def test_interrupt(source, tmp_path, capsys, monkeypatch):
    def interrupt(part, folder, where):
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "_save_part", interrupt)
    assert main(["convert", str(source), str(tmp_path / "out" / "saved")]) == 130
    assert list((tmp_path / "out").iterdir()) == []
    assert "error" not in capsys.readouterr().err
