"""The house rules that a linter cannot state: who may import what, no circles, docstrings."""

import ast
import contextlib
import functools
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sppo_hf
from tests.imports import circles, import_graph, module_name

importlinter = pytest.importorskip("importlinter.cli")

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sppo_hf"
MODULES = sorted(PACKAGE.rglob("*.py"))
TORCH_FREE = ("errors", "registry", "rules", "config", "schedule", "planning", "reporting")
KNOWS_DISTRIBUTED = ("pipeline", "integrations")


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the code of a file."""
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, and those that it reaches `distributed` by."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            yield ast.unparse(node)


@contextlib.contextmanager
def loggers_kept() -> Iterator[None]:
    """Undo what import-linter does to logging: it disables all loggers that others have made.

    Tests that look at what is logged would fail in a process that ran this file before them.
    """
    made = [one for one in logging.root.manager.loggerDict.values() if hasattr(one, "disabled")]
    before = [one.disabled for one in made]
    try:
        yield
    finally:
        for one, disabled in zip(made, before, strict=True):
            one.disabled = disabled


def test_import_contracts_hold(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("sppo_hf.made_before")
    with loggers_kept():
        status = importlinter.lint_imports(
            config_filename=str(ROOT / "pyproject.toml"), no_cache=True, is_debug_mode=False
        )
    assert status == 0, capsys.readouterr().out
    assert not logger.disabled


def test_no_modules_import_each_other() -> None:
    graph = import_graph(ROOT)
    assert len(graph) > 50
    assert circles(graph) == []
    # One arrow back, and the search sees it.
    used = next(name for name, found in graph.items() if len(found) > 2)
    graph[min(graph[used])].add(used)
    assert used in circles(graph)[0]


def test_only_pipeline_and_integrations_touch_torch_distributed() -> None:
    guilty = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0] not in KNOWS_DISTRIBUTED
        for name in imported(path)
        if name.startswith("torch.distributed")
    ]
    assert not guilty


def test_import_of_the_package_and_the_torch_free_rooms_leaves_torch_out() -> None:
    rooms = [path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES]
    free = ("__init__", *TORCH_FREE)
    names = [
        module_name(path, ROOT) for path, room in zip(MODULES, rooms, strict=True) if room in free
    ]
    assert len(names) > 5
    heavy = "{'torch', 'transformers', 'accelerate', 'highspy'} & set(sys.modules)"
    script = f"import sys, {', '.join(names)}; sys.exit(str({heavy}) if {heavy} else 0)"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.fake
def test_every_public_name_can_be_had() -> None:
    assert set(sppo_hf.__all__) <= set(dir(sppo_hf))
    for name in sppo_hf.__all__:
        assert getattr(sppo_hf, name) is not None


def test_every_module_says_what_it_is() -> None:
    silent = [module_name(p, ROOT) for p in MODULES if not ast.get_docstring(parsed(p))]
    assert not silent
