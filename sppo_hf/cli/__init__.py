"""The `sppo` command line; nothing may import it, and it does its work through the rooms below.

A command's module is imported when the command is called: `sppo --help` reads what each does from
its text. Commands import torch and Transformers when they run.
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
"""Each is the function of its name in the module of its name."""

_OLD_NAMES = {
    "--disk": "--disk-memory",
    "--policy": "--offload",
    "--rows": "--micro-batch-size",
    "--schedule": "--pp-schedule",
    "--stages": "--pp-size",
    "--virtual": "--pp-virtual-stages",
    "--chunks": "--num-chunks",
}
"""Of options that are called as the setting they stand for, and were called otherwise before: still
taken by every command that has the new one, and shown nowhere."""


class _Command(typer.core.TyperCommand):
    """A command that takes the old names of its options too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put new names for old ones, where this command has the new one."""
        known = {name for parameter in self.params for name in parameter.opts}
        return super().parse_args(ctx, [_renamed(word, known) for word in args])


def _renamed(word: str, known: set[str]) -> str:
    name, equals, value = word.partition("=")
    new = _OLD_NAMES.get(name)
    return word if new not in known or name in known else f"{new}{equals}{value}"


class _Commands(typer.core.TyperGroup):
    """All commands by name; in place of each stands one that does nothing until it is called."""

    _listing = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command, imported unless it is only listed; None where there is none."""
        found = super().get_command(ctx, cmd_name)
        return found if found is None or self._listing else _imported(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help of `sppo` itself."""
        self._listing = True
        for name, command in self.commands.items():
            command.help = _summary(name)
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def _imported(name: str) -> Any:
    function = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, cls=_Command)(function)
    return typer.main.get_command(single)


def _summary(name: str) -> str:
    """The docstring of a command's function, read from its file."""
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
    # Plans are many small objects and no circles: to look for these less often saves time.
    gc.set_threshold(50_000)
    app()
