"""The `sppo` command line.

Each command is a module, imported when the command is called; `sppo --help` reads the docstrings
from the modules' source. Torch and Transformers are imported by commands that need them, when they
run.
"""

from __future__ import annotations

import ast
import gc
import importlib
from pathlib import Path
from typing import Any

import typer
import typer.core

_COMMANDS = ("bench", "calibrate", "check", "config", "estimate", "plan", "simulate")
"""Each is a function in the module of the same name."""

_OLD_NAMES = {
    "--disk": "--disk-memory",
    "--policy": "--offload",
    "--rows": "--micro-batch-size",
    "--schedule": "--pp-schedule",
    "--stages": "--pp-size",
    "--virtual": "--pp-virtual-stages",
    "--chunks": "--num-chunks",
}
"""Former names of options, which are now called as the settings that they stand for. They are still
accepted by every command that has the new option, and not shown by --help."""


class _Command(typer.core.TyperCommand):
    """A command that accepts the former names of its options too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace former names of options by the present ones."""
        known = {name for parameter in self.params for name in parameter.opts}
        return super().parse_args(ctx, [_renamed(word, known) for word in args])


def _renamed(word: str, known: set[str]) -> str:
    name, equals, value = word.partition("=")
    new = _OLD_NAMES.get(name)
    return word if new not in known or name in known else f"{new}{equals}{value}"


class _Commands(typer.core.TyperGroup):
    """All commands by name; each is a placeholder until it is called."""

    _listing = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, imported unless only listed; None if there is none of this name."""
        found = super().get_command(ctx, cmd_name)
        return found if found is None or self._listing else _imported(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of `sppo` itself."""
        self._listing = True
        for name, command in self.commands.items():
            command.help = _summary(name)
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def _imported(name: str) -> Any:
    from sppo_hf.cli.common import bad_input
    from sppo_hf.registry import import_entry_points

    with bad_input(as_json=False):
        import_entry_points()
    function = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, cls=_Command)(function)
    return typer.main.get_command(single)


def _summary(name: str) -> str:
    """Read the docstring of a command's function from its source."""
    text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    return ast.get_docstring(next(node for node in functions if node.name == name)) or ""


app = typer.Typer(
    name="sppo",
    cls=_Commands,
    help="Exact long-context fine-tuning of Hugging Face models, chunk by chunk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name in _COMMANDS:
    app.command(_name)(lambda: None)  # never called: `get_command` gives the real one


def main() -> None:
    """Entry point of the console script."""
    # Plans are many small objects without reference cycles: collecting less often saves time.
    gc.set_threshold(50_000)
    app()
