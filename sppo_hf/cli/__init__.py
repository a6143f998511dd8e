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

_RENAMED = frozenset({"estimate", "plan", "simulate"})
"""Commands whose options had other names before."""
_COMMANDS = ("bench", "calibrate", "check", "config", *sorted(_RENAMED))
"""Each is the function of its name in the module of its name."""


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
    single, cls = typer.Typer(add_completion=False, pretty_exceptions_enable=False), None
    if name in _RENAMED:
        from sppo_hf.cli.renamed import RenamedOptions

        cls = RenamedOptions
    single.command(name, cls=cls)(function)
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


@app.callback()
def _root() -> None:
    """Keeps `check` a subcommand while it is the only one."""


def main() -> None:
    """Entry point of the console script."""
    # Plans are many small objects and no circles: to look for these less often saves time.
    gc.set_threshold(50_000)
    app()
