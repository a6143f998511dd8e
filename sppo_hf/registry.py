"""What can be had by name: attention backends, schedules, offload policies.

An entry is a decorated class or function, `@register_backend("cudnn", ...)`, in one file of its
room; nothing else has to be changed. Settings, `--help` and errors ask which names there are before
any room is imported, and some rooms import torch, so names are read from the decorators' text:
name and keywords must be written out as literals. What a user's own package registers counts from
its import on.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from sppo_hf.errors import SPPOError

T = TypeVar("T")

_PACKAGE = Path(__file__).parent


class Registry(dict[str, T], Generic[T]):
    """Entries by name, filled by a decorator when their files are imported.

    Args:
        decorator: name of the function that adds entries, as it is written above them.
        room: file or folder below this package whose files are read for it.
    """

    def __init__(self, decorator: str, room: str) -> None:
        super().__init__()
        self._decorator = decorator
        self._path = _PACKAGE / room
        self._added: dict[str, dict[str, Any]] = {}

    def add(self, name: str, entry: T, **facts: Any) -> None:
        """Register an entry; called by the decorator.

        Args:
            name: what it is asked for by.
            entry: what is registered.
            facts: what can be said of it without importing it; see `facts`.

        Raises:
            SPPOError: the name is taken.
        """
        if name in self:
            raise SPPOError(
                f"@{self._decorator}({name!r}) was used before. Allowed: one entry of a name. "
                "Remedy: take another name."
            )
        self._added[name] = facts
        self[name] = entry

    def names(self) -> tuple[str, ...]:
        """Names that there are, whether or not their files were imported yet."""
        return tuple({**self._written, **self._added})

    def facts(self, name: str) -> Mapping[str, Any]:
        """Keywords of an entry's decorator; none for a name that there is not."""
        return self._added.get(name) or self._written.get(name) or {}

    def names_with(self, fact: str) -> tuple[str, ...]:
        """Names of entries of which a fact is true."""
        return tuple(name for name in self.names() if self.facts(name).get(fact))

    def load(self) -> Registry[T]:
        """Import all files that have entries, so that this mapping is complete."""
        for path in self._files:
            parts = path.relative_to(_PACKAGE).with_suffix("").parts
            importlib.import_module(".".join((_PACKAGE.name, *parts)))
        for name in self.names():  # whichever was imported first, the order is one
            self[name] = self.pop(name)
        return self

    def nearest(self, name: str) -> str | None:
        """The name that was perhaps meant, for errors."""
        return next(iter(difflib.get_close_matches(name, self.names(), n=1)), None)

    @cached_property
    def _files(self) -> tuple[Path, ...]:
        paths = [self._path] if self._path.suffix else sorted(self._path.glob("*.py"))
        return tuple(path for path in paths if f"\n@{self._decorator}(" in path.read_text())

    @cached_property
    def _written(self) -> dict[str, dict[str, Any]]:
        """Names and facts as they are written above entries."""
        found: dict[str, dict[str, Any]] = {}
        # A decorator's call ends where the next decorator, or what is decorated, begins.
        pattern = rf"^@{self._decorator}(\(.*?\))\n(?=@|class |def )"
        for path in self._files:
            for call in re.findall(pattern, path.read_text(), re.DOTALL | re.MULTILINE):
                node = ast.parse(f"_{call}", mode="eval").body
                assert isinstance(node, ast.Call), "a decorator with arguments is a call"
                name = ast.literal_eval(node.args[0])
                assert name not in found, f"@{self._decorator}({name!r}) is written twice"
                found[name] = {one.arg or "": ast.literal_eval(one.value) for one in node.keywords}
        return found


ATTENTION_BACKENDS: Registry[Any] = Registry("register_backend", "attention/backends")
"""Ways to compute attention; `attention/backends/base.py` says what one is."""

SCHEDULES: Registry[Any] = Registry("register_schedule", "schedule/generate.py")
"""Orders of a pipeline's units; `schedule/generate.py` has the decorator."""

OFFLOAD_POLICIES: Registry[Any] = Registry("register_policy", "planning/policies.py")
"""Rules that say which saved activations leave; `planning/policies.py` has the decorator."""

TIERS: Registry[Any] = Registry("register_tier", "planning/tiers.py")
"""Where bytes wait, nearest first; `planning/tiers.py` has the decorator."""
