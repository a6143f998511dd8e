"""Registries of what is chosen by name: attention backends, schedules, offload policies, tiers.

An entry is a decorated class or function, such as `@register_backend("cudnn", ...)`; nothing else
has to change. Settings, `--help` and errors list the names without importing the modules that
define the entries, some of which import torch. So names and keywords are parsed from the source of
the decorators and must be literals. Entries of a user's own package exist once it is imported; for
the `sppo` command and for settings in files, it names the modules to import as entry points:

    [project.entry-points.sppo_hf]
    zip = "my_package.zip_tier"
"""

from __future__ import annotations

import ast
import difflib
import importlib
import math
import re
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from sppo_hf.errors import ConfigError, SPPOError, first_line

T = TypeVar("T")

_PACKAGE = Path(__file__).parent


class Registry(dict[str, T], Generic[T]):
    """Entries by name, filled by a decorator when the modules that define them are imported.

    Args:
        decorator: name of the decorator that adds entries.
        paths: files and folders of this package whose source is searched for the decorator.
        order: keyword of the decorator by which entries are sorted; those without it come last.
    """

    def __init__(self, decorator: str, *paths: str, order: str = "") -> None:
        super().__init__()
        self._decorator = decorator
        self._paths = [_PACKAGE / path for path in paths]
        self._order = order
        self._added: dict[str, dict[str, Any]] = {}

    def add(self, name: str, entry: T, **facts: Any) -> None:
        """Register an entry; called by the decorator.

        Args:
            name: name that settings choose it by.
            entry: the registered object.
            facts: properties that can be asked for without importing the entry; see `facts`.

        Raises:
            SPPOError: the name is taken.
        """
        if name in self:
            raise SPPOError(
                f"@{self._decorator}({name!r}) was used before. Allowed: one entry per name. "
                "Remedy: choose another name."
            )
        self._added[name] = facts
        self[name] = entry
        self._sort()

    def remove(self, name: str) -> None:
        """Forget an entry of a user's own package."""
        del self[name], self._added[name]

    def names(self) -> tuple[str, ...]:
        """Return all names, whether or not their modules are imported yet."""
        names = {**self._written, **self._added}
        return tuple(sorted(names, key=lambda name: self.facts(name).get(self._order, math.inf)))

    def facts(self, name: str) -> Mapping[str, Any]:
        """Return the keywords of an entry's decorator; empty for an unknown name."""
        return self._added.get(name) or self._written.get(name) or {}

    def names_with(self, fact: str) -> tuple[str, ...]:
        """Return the names of entries whose keyword `fact` is true."""
        return tuple(name for name in self.names() if self.facts(name).get(fact))

    def load(self) -> Registry[T]:
        """Import all modules that define entries, so that this mapping is complete."""
        for path in self._files:
            parts = path.relative_to(_PACKAGE).with_suffix("").parts
            importlib.import_module(".".join((_PACKAGE.name, *parts)))
        self._sort()
        return self

    def _sort(self) -> None:
        """Put entries into the same order, whichever module was imported first."""
        for name in self.names():
            if name in self:
                self[name] = self.pop(name)

    def nearest(self, name: str) -> str | None:
        """Return the most similar name for an error message, or None."""
        return next(iter(difflib.get_close_matches(name, self.names(), n=1)), None)

    @cached_property
    def _files(self) -> tuple[Path, ...]:
        files = [
            file
            for path in self._paths
            for file in ([path] if path.suffix else sorted(path.glob("*.py")))
        ]
        return tuple(file for file in files if f"\n@{self._decorator}(" in file.read_text())

    @cached_property
    def _written(self) -> dict[str, dict[str, Any]]:
        """Names and keywords parsed from the source of the decorators."""
        found: dict[str, dict[str, Any]] = {}
        # A decorator's call ends where the next decorator, class or function begins.
        pattern = rf"^@{self._decorator}(\(.*?\))\n(?=@|class |def )"
        for path in self._files:
            for call in re.findall(pattern, path.read_text(), re.DOTALL | re.MULTILINE):
                node = ast.parse(f"_{call}", mode="eval").body
                assert isinstance(node, ast.Call), "a decorator with arguments is a call"
                name = ast.literal_eval(node.args[0])
                assert name not in found, f"@{self._decorator}({name!r}) is written twice"
                found[name] = {one.arg or "": ast.literal_eval(one.value) for one in node.keywords}
        return found


_imported: set[EntryPoint] = set()


def import_entry_points() -> None:
    """Import the modules of installed packages that register entries, each once per process.

    Raises:
        ConfigError: one cannot be imported.
    """
    for point in entry_points(group="sppo_hf"):
        if point in _imported:
            continue
        _imported.add(point)  # first, because it may make settings itself
        try:
            point.load()
        except Exception as error:
            raise ConfigError(
                f"the entry point {point.name} = {point.value!r} of the group sppo_hf cannot be "
                f"imported ({type(error).__name__}: {first_line(error)}). Allowed: a module that "
                "registers tiers, backends, schedules or policies. Remedy: mend or uninstall the "
                "package that names it."
            ) from error


ATTENTION_BACKENDS: Registry[Any] = Registry("register_backend", "attention/backends")
"""Attention kernels; the interface and decorator are in `attention/backends/base.py`."""

SCHEDULES: Registry[Any] = Registry("register_schedule", "schedule/generate.py")
"""Pipeline schedules; the decorator is in `schedule/generate.py`."""

OFFLOAD_POLICIES: Registry[Any] = Registry("register_policy", "planning/policies.py")
"""Rules that say which saved activations are offloaded; see `planning/policies.py`."""

TIERS: Registry[Any] = Registry("register_tier", "planning/tiers.py", "offload", order="distance")
"""Memory tiers, nearest to the device first; the decorator is in `planning/tiers.py`."""
