"""Every notebook runs from top to bottom on a tiny model, and is kept without outputs."""

from pathlib import Path

import pytest

from tests.recipes.tiny import save_tiny_model

nbformat = pytest.importorskip("nbformat", reason="needs the extra `test`")
nbclient = pytest.importorskip("nbclient", reason="needs the extra `test`")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


def _run(path, tmp_path, monkeypatch, family=None):
    monkeypatch.setenv("SPPO_NOTEBOOK_TOKENS", "100")
    monkeypatch.setenv("SPPO_NOTEBOOK_MODEL", str(save_tiny_model(tmp_path / "model", family)))
    monkeypatch.setenv("SPPO_RECIPES", str(ROOT / "recipes"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)

    # Raises CellExecutionError, which shows the cell and its traceback.
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, resources=place).execute()


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path, tmp_path, monkeypatch):
    _run(path, tmp_path, monkeypatch)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_notebook_takes_a_hybrid(tmp_path, monkeypatch):
    _run(NOTEBOOKS[0], tmp_path, monkeypatch, family="qwen3_5_text")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)
