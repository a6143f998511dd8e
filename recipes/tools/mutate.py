"""Break the package in many places, one at a time, and see whether its tests notice.

    git worktree add --detach ../broken && cd ../broken
    python ../sppo_hf/recipes/tools/mutate.py --root . --count 40 --seed 1 --output table.md

Works on a checkout that nobody else uses: each mutant is written into its file and meets tests
until one notices, the nearest first: those that belong to its module; of engine and pipeline those
of several processes; all of its folder. Then the file is put back. `--near` leaves it at the first
kind. A mutant is one change of an operator, a constant or a condition, or a statement left out;
places are drawn at random from the code of all folders asked for, by lines, so long files get more.
Text that only people read (docstrings, messages of errors and warnings) is left alone.

A survivor is a hole in the tests, or a change that changes nothing (a bound that is never met, a
speed that is not tested): somebody has to look.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

# What the package stands on, not the package itself, which every fork imports broken.
import accelerate  # noqa: F401
import peft  # noqa: F401
import pytest
import torch  # noqa: F401
import transformers  # noqa: F401

FOLDERS = ("planning", "offload", "attention", "pipeline", "engine", "integrations")
ALWAYS: dict[str, tuple[str, ...]] = {
    "attention": ("tests/attention/test_streamed_kv.py", "tests/engine/test_exactness.py"),
    "engine": ("tests/engine/test_engine.py", "tests/engine/test_exactness.py"),
    "offload": ("tests/offload/test_engine.py", "tests/offload/test_layer_offload.py"),
    "planning": ("tests/planning/test_lowering.py", "tests/planning/test_plan.py"),
    "integrations": (
        "tests/integrations/test_trainer.py",
        "tests/integrations/test_trainer_step.py",
    ),
    "pipeline": ("tests/pipeline/test_executor.py", "tests/pipeline/test_pipeline_engine.py"),
}
"""Tests of a folder that run after a module's own tests and before those of its users."""

NEAR = ("-m", "not slow and not gpu and not process")
NEAR += ("-k", "not test_exactness.py or llama- or gpt_oss-")
PROCESSES = ("-m", "process and not slow and not gpu", "tests/pipeline")
"""Tests of several ranks, which also run for modules of `engine` and `pipeline`."""
FOLDER = ("-m", "not process and not slow and not gpu")
MOST_FILES = 5
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


class Mutant(NamedTuple):
    """One change to one file."""

    file: Path
    line: int
    start: int
    end: int
    before: str
    after: str
    kind: str


def mutants(file: Path) -> Iterator[Mutant]:
    """Yield all changes of a file."""
    source = file.read_text(encoding="utf-8")
    # Positions of the syntax tree count bytes; ours is all ASCII but for a few comments.
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    for node, changed, kind in _changes(ast.parse(source)):
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = source.encode()[start:end].decode()
        after = ast.unparse(changed) if changed is not None else "pass"
        yield Mutant(file, node.lineno, start, end, before, after, kind)


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST | None, str]]:
    for node in _code(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
            first, *rest = node.ops
            ops = [_COMPARISONS[type(first)](), *rest]
            yield node, ast.Compare(node.left, ops, node.comparators), "comparison"
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield node, ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right), "operator"
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, ast.BoolOp(other, node.values), "and / or"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, ast.Constant(not node.value), "constant"
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, ast.Constant(node.value + 1), "off by one"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, None, "left out"
        elif isinstance(node, ast.AugAssign):
            yield node, None, "left out"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, node.operand, "negation"


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs and is not said to people, without types, asserts and f-strings."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            skipped = ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom
            if not isinstance(child, ast.AST) or isinstance(child, skipped):
                continue
            if field in ("annotation", "returns", "decorator_list") or _speaks(child):
                continue
            if isinstance(node, ast.If) and _is_for_types(node):
                continue
            yield child
            yield from _code(child)


def _speaks(node: ast.AST) -> bool:
    """Whether a statement warns, logs, or is a docstring."""
    if not isinstance(node, ast.Expr):
        return False
    called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
    return isinstance(node.value, ast.Constant) or "warn" in called or "logger" in called


def _is_for_types(node: ast.If) -> bool:
    return ast.unparse(node.test) == "TYPE_CHECKING"


def tests_of(root: Path, file: Path) -> list[str]:
    """Return the tests that belong to a module, its own first."""
    folder, name = file.parent.name, file.stem
    dotted = f"sppo_hf.{folder}.{name}"
    own = [root / "tests" / folder / f"test_{name}.py"]
    others = sorted((root / "tests" / folder).glob("test_*.py"))
    importing = [path for path in others if dotted in path.read_text(encoding="utf-8")]
    users = [path for path in sorted(file.parent.glob("*.py")) if dotted in path.read_text()]
    theirs = [root / "tests" / folder / f"test_{path.stem}.py" for path in users]
    always = [root / path for path in ALWAYS[folder]]
    found = dict.fromkeys(path for path in [*own, *always, *importing, *theirs] if path.exists())
    return [str(path.relative_to(root)) for path in found][:MOST_FILES]


class _FirstFailure:
    """A plugin of pytest that writes the name of the first test that fails."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write it; pytest ends then."""
        if report.failed:
            os.write(self._descriptor, f"{report.nodeid}\n".encode())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """The same of a file that cannot even be imported."""
        if report.failed:
            os.write(self._descriptor, f"{report.nodeid} cannot be imported\n".encode())


def survives(root: Path, mutant: Mutant, seconds: float, *, near: bool = False) -> str:
    """Run the tests on a mutant; returns who noticed it, "survived" or "too slow".

    Args:
        root: The checkout.
        mutant: The change.
        seconds: For the nearest tests; others have more.
        near: Whether these are all.
    """
    source = mutant.file.read_bytes()
    changed = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
    folder = mutant.file.parent.name
    rounds = [([*NEAR, *tests_of(root, mutant.file)], seconds)]
    if not near and folder in ("engine", "pipeline"):
        rounds.append(([*PROCESSES], 2 * seconds))
    if not near:
        rounds.append(([*FOLDER, f"tests/{folder}"], 4 * seconds))
    try:
        mutant.file.write_bytes(changed)
        results = (_noticed(root, words, limit) for words, limit in rounds)
        return next((result for result in results if result != "survived"), "survived")
    finally:
        mutant.file.write_bytes(source)


def _noticed(root: Path, words: Sequence[str], seconds: float) -> str:
    """Run pytest in a fork of this process, so that the libraries below are imported once."""
    seen, noticed = os.pipe()
    child = os.fork()
    if not child:
        _test(root, words, noticed)
    os.close(noticed)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            with os.fdopen(seen, "rb") as pipe:
                name = pipe.read().decode().partition("\n")[0]
            # A test that runs past its own limit ends all of pytest before it is reported.
            code = os.waitstatus_to_exitcode(status)
            return "survived" if code == 0 else name or f"exit status {code}"
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too slow"


def _test(root: Path, words: Sequence[str], noticed: int) -> NoReturn:
    """Run tests until one fails, whose name goes to `noticed`; the exit code is pytest's."""
    os.setsid()  # so that a test's own processes end with it
    os.chdir(root)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    always = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    code = 3
    try:
        code = int(pytest.main([*always, *words], plugins=[_FirstFailure(noticed)]))
    finally:
        os._exit(code)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw, break, test, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="a checkout nobody else uses")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="places in front that were tried")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, choices=FOLDERS)
    parser.add_argument("--seconds", type=float, default=300.0, help="for the tests of one mutant")
    parser.add_argument("--near", action="store_true", help="run the nearest tests alone")
    parser.add_argument("--output", type=Path, help="Markdown; printed as well")
    given = parser.parse_args(argv)
    root = given.root.resolve()
    files = [
        file
        for folder in given.folders
        for file in sorted((root / "sppo_hf" / folder).glob("*.py"))
    ]
    everything = [mutant for file in files for mutant in mutants(file)]
    chosen = random.Random(given.seed).sample(everything, given.count)
    # Folders in the order given, so that those with quick tests can come first.
    chosen.sort(key=lambda mutant: given.folders.index(mutant.file.parent.name))
    lines = ["| module, line | change | of | into | |", "|---|---|---|---|---|"]
    for mutant in chosen[given.skip :]:
        began = time.monotonic()
        result = survives(root, mutant, given.seconds, near=given.near)
        place = f"{mutant.file.relative_to(root / 'sppo_hf')}:{mutant.line}"
        of, into = (_short(text) for text in (mutant.before, mutant.after))
        lines.append(f"| {place} | {mutant.kind} | `{of}` | `{into}` | {result} |")
        print(lines[-1], f"{time.monotonic() - began:.0f} s", flush=True)
        if given.output is not None:
            given.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _short(text: str) -> str:
    flat = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return flat if len(flat) <= 60 else f"{flat[:57]}..."


if __name__ == "__main__":
    main()
