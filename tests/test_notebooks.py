"""Every notebook runs from top to bottom on the CPU, and is stored without results."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.sources import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 240  # a stuck cell; a whole notebook is meant to take less than one minute


def _read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_results(path):
    cells = [cell for cell in _read(path).cells if cell.cell_type == "code"]
    assert cells
    assert [cell.outputs for cell in cells] == [[]] * len(cells)
    assert [cell.execution_count for cell in cells] == [None] * len(cells)
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", path.read_text(encoding="utf-8"))


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, smollm2_path, tmp_path, monkeypatch):
    models = tmp_path / "models"
    models.mkdir()
    (models / smollm2_path.name).symlink_to(smollm2_path)
    monkeypatch.setenv("XJAX_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "server")]))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    # Nothing of the user's own IPython set-up takes part.
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = _read(path)
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    # Paths of this machine in the results would end up in whatever a user shares.
    texts = [output.get("text", "") for output in outputs]
    assert not [text for text in texts if str(tmp_path) in text]


def test_a_notebook_is_there():
    assert [path.name for path in NOTEBOOKS][:2] == ["01_one_request.ipynb", "02_prefix_cache.ipynb"]
