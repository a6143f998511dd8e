"""Options that are called as the setting they stand for, and were called otherwise before.

An old name still works and is shown nowhere.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

OLD_NAMES = {
    "--disk": "--disk-memory",
    "--policy": "--offload",
    "--rows": "--micro-batch-size",
    "--schedule": "--pp-schedule",
    "--stages": "--pp-size",
    "--virtual": "--pp-virtual-stages",
    "--chunks": "--num-chunks",
}
"""Old name to new one, for every command that has the new one."""


class RenamedOptions(TyperCommand):
    """A command that takes the old names of its options too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put new names for old ones, where this command has the new one."""
        known = {name for parameter in self.params for name in parameter.opts}
        return super().parse_args(ctx, [_renamed(word, known) for word in args])


def _renamed(word: str, known: set[str]) -> str:
    name, equals, value = word.partition("=")
    new = OLD_NAMES.get(name)
    return word if new not in known or name in known else f"{new}{equals}{value}"
