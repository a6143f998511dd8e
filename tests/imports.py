"""Who imports whom in the package, wherever in a file, but for annotations alone.

What is imported by name (`importlib`) is not seen: so the guard of unknown families calls the
harness.

`python tests/imports.py [ROOT]` prints lines, modules, modules that one other imports, and circles.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


def import_graph(root: Path) -> dict[str, set[str]]:
    """Returns, by each module's dotted name, the modules of the package that it imports."""
    files = {module_name(path, root): path for path in sorted((root / "sppo_hf").rglob("*.py"))}
    return {
        name: {_module(one, files) for one in _imported(ast.parse(path.read_text()))} - {name, ""}
        for name, path in files.items()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the groups of modules that import each other, directly or not."""
    reached = {name: _reach(name, graph) for name in graph}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def module_name(path: Path, root: Path) -> str:
    """Returns the dotted name of a module of the package."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module(imported: str, files: dict[str, Path]) -> str:
    """The module that a dotted name is in; "" for what is of another package."""
    while imported and imported not in files:
        imported = imported.rpartition(".")[0]
    return imported


def _imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.expr) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        ):
            continue  # no expression has an import in it
        else:
            yield from _imported(child)


def _reach(name: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = list(graph[name])
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += graph[one]
    return found


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    graph = import_graph(root)
    importers = {name: [one for one in graph if name in graph[one]] for name in graph}
    lines = sum(len(path.read_text().splitlines()) for path in (root / "sppo_hf").rglob("*.py"))
    single = sum(len(found) == 1 for found in importers.values())
    sys.stdout.write(
        f"{lines} lines, {len(graph)} modules, {single} imported by one other, "
        f"{len(circles(graph))} circles {circles(graph) or ''}\n"
    )
