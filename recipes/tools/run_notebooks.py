"""Run the notebooks from top to bottom and keep what they show.

    python recipes/tools/run_notebooks.py                    # all of notebooks/
    python recipes/tools/run_notebooks.py notebooks/03*.ipynb

No clock is kept, and nothing that libraries say to the error output, which names places on this
machine. Pictures are stored with 64 colours, for they are stored again with every change.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


def run(
    path: Path,
    folder: Path,
    *,
    timeout_seconds: int = 600,
    kernel: AsyncKernelManager | None = None,
) -> NotebookNode:
    """Execute a notebook.

    Args:
        path: the notebook, which stays as it is.
        folder: where its kernel works and writes its files.
        timeout_seconds: of each cell.
        kernel: executes it, whether it runs already or not, and goes on; what other notebooks have
            named in it is forgotten, what they have imported is not imported again. None for one
            of its own.

    Returns:
        The notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; it shows the cell and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    if kernel is not None:
        notebook.cells.insert(0, new_code_cell("%reset -f"))
    NotebookClient(
        notebook, kernel, timeout=timeout_seconds, resources=place, record_timing=False
    ).execute()
    if kernel is not None:
        del notebook.cells[0]
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _kept(cell.outputs)
    return notebook


def _kept(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Choose what is kept, with what came in pieces by chance joined."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if "text" in output:
            output.text = output.text.replace("\r\n", "\n")
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = _smaller(output.data["image/png"])
        if kept and output.get("name") == kept[-1].get("name") == "stdout":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def _smaller(picture: str) -> str:
    """Store a PNG, in base64, with a palette."""
    smaller = io.BytesIO()
    opened = Image.open(io.BytesIO(base64.b64decode(picture)))
    opened.convert("RGB").quantize(64).save(smaller, "PNG", optimize=True)
    return base64.b64encode(smaller.getvalue()).decode()


def main() -> None:
    """Run the notebooks of the command line, or all, and write them back."""
    parser = argparse.ArgumentParser(description="Run notebooks and keep what they show.")
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; by default all")
    paths: list[Path] = parser.parse_args().paths
    # The notebooks call `sppo`, which is installed beside this Python.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for path in paths or sorted((ROOT / "notebooks").glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = run(path, Path(folder))
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main()
