"""Every notebook runs from top to bottom and shows the outputs that are stored in it."""

import ast
import functools
import re
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

import sppo_hf
from tests.pipeline.forked_python import write_interpreter
from tests.recipes.tiny import save_tiny_model
from tests.sweeps import ALL

nbformat = pytest.importorskip("nbformat", reason="needs the extra `test`")
run_sync = pytest.importorskip("nbclient.util", reason="needs the extra `test`").run_sync
tools = import_module("recipes.tools.run_notebooks")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]\d+)?")
UNIT = re.compile(r"# (?:B|[KMGT]iB)\b")
MACHINE = re.compile(
    r"(?<![\w.])(?:/(?:home|root|tmp|work|usr|opt|mnt|Users|var)/|[A-Z]:\\)|site-packages"
)
CLOCK = re.compile(r"perf_counter|import time\b|%time|_seconds\b.*record|record\.\w*seconds")


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def said(cell):
    """The text of a cell's outputs, whether printed or returned."""
    texts = (out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)
    return "\n".join(texts)


def shape(cell):
    """Return a cell's text, with numbers and spaces masked, and its kinds of pictures."""
    kinds = [sorted(out.get("data", ())) for out in cell.outputs]
    masked = UNIT.sub("# bytes", NUMBER.sub("#", said(cell)))
    return [" ".join(line.split()) for line in masked.splitlines()], kinds


def code(path):
    """The Python of a notebook, without what goes to the shell."""
    lines = "\n".join(cell.source for cell in code_cells(path)).splitlines()
    return "\n".join(
        "pass" if line.startswith("!") else line for line in lines if not line.startswith("    --")
    )


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a notebook in a kernel that the notebooks share, with its imports; it is forked."""
    folder = tmp_path_factory.mktemp("notebooks")
    # Over files: a port that is drawn may be another test's by the time the kernel binds it. Their
    # names have 107 characters at most.
    short = "/tmp" if len(str(folder)) > 90 else folder
    with (
        tempfile.TemporaryDirectory(dir=short, prefix="kernel-") as files,
        pytest.MonkeyPatch.context() as patch,
    ):
        kernel = tools.AsyncKernelManager(transport="ipc", ip=f"{files}/k")
        kernel.kernel_spec.argv[0] = write_interpreter(Path(files) / "python")
        for name, value in _settings(folder).items():
            patch.setenv(name, value)
        yield functools.partial(_run, folder=folder, kernel=kernel)
        if kernel.has_kernel:
            run_sync(kernel.shutdown_kernel)()


def _settings(folder, family=None):
    return {
        "SPPO_NOTEBOOK_TOKENS": "96",
        "SPPO_NOTEBOOK_MODEL": str(save_tiny_model(folder / "model", family)),
        "HF_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        # The compiler, which PEFT's imports ask for, takes a kernel two seconds.
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": str(ROOT),
    }


def _run(path, folder, kernel=None):
    ran = tools.run(path, folder, timeout_seconds=240, kernel=kernel)
    return [cell for cell in ran.cells if cell.cell_type == "code"]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="a second run of a notebook; bash tests/run.sh --all")
@pytest.mark.timeout(300)
def test_the_first_notebook_takes_a_hybrid(tmp_path, monkeypatch):
    for name, value in _settings(tmp_path, "qwen3_5_text").items():
        monkeypatch.setenv(name, value)
    shown = _run(NOTEBOOKS[0], tmp_path)
    assert any("gradients, the worst relative difference is" in said(cell) for cell in shown)


@pytest.mark.process
@pytest.mark.timeout(300)
@each_notebook
def test_a_notebook_runs_to_its_end_and_shows_what_is_kept(path, run):
    shown = run(path)
    for kept, cell in zip(code_cells(path), shown, strict=True):
        assert shape(cell) == shape(kept), kept.source


@each_notebook
def test_a_notebook_keeps_the_outputs_of_one_run(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [out for cell in cells for out in cell.outputs]
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert any(said(cell).strip() for cell in cells)
    assert {out.output_type for out in outputs} <= {"stream", "execute_result", "display_data"}
    assert path.stat().st_size < 200_000


@each_notebook
def test_what_is_kept_names_no_place_and_reads_no_clock(path):
    cells = code_cells(path)
    assert not [found[0] for cell in cells if (found := MACHINE.search(said(cell)))]
    assert not [out for cell in cells for out in cell.outputs if out.get("name") == "stderr"]
    # Seconds that a shared machine took would mislead; simulated ones come from `sppo`.
    assert not CLOCK.search("\n".join(cell.source for cell in cells))
    assert not [cell.metadata for cell in cells if "execution" in cell.metadata]


@each_notebook
def test_a_notebook_uses_public_names_alone(path):
    imports = [n for n in ast.walk(ast.parse(code(path))) if isinstance(n, ast.ImportFrom)]
    ours = [n for n in imports if n.module and n.module.split(".")[0] == "sppo_hf"]
    names = {(n.module, alias.name) for n in ours for alias in n.names}
    assert names
    for module, name in names:
        public = name in sppo_hf.__all__ if module == "sppo_hf" else name[0] != "_"
        # Schedules are plain data, and the modules of that folder are documented for users.
        assert public, name
        assert module.split(".")[1:2] in ([], ["schedule"], ["reporting"]), module
    assert "sys.path" not in code(path)


def test_a_place_on_a_machine_is_found():
    assert MACHINE.search('File "/home/me/run.py"')
    assert MACHINE.search("C:\\Users\\me")
    assert not MACHINE.search("recipes/tmp/x, 3/4, sppo_hf/work")
