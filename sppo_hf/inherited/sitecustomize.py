"""Gives SPPO's plugin to Python processes that a program under `sppo_hf.run` starts.

`sppo_hf.run` puts this folder first on PYTHONPATH, so that every Python process that inherits its
environment imports this file when it starts: a launcher's ranks, or what replaces the program by
`os.exec`. Nothing of this package, and nothing that is heavy, is imported before the process itself
imports Accelerate's or Transformers' classes that take the plugin.

Another `sitecustomize` that this file hides is run as if this one were not there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PATCHED_MODULES = ("accelerate.accelerator", "transformers.training_args")


class _PatchingFinder(MetaPathFinder):
    """Finds the patched modules as ever, and patches each when its code has run."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that patches; None for other modules."""
        if fullname not in _PATCHED_MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                _patch(module)

            spec.loader.exec_module = execute_and_patch
        return spec


def _patch(module: ModuleType) -> None:
    if find_spec("sppo_hf") is None:  # not installed: the program was started inside of a clone
        sys.path.append(os.path.dirname(os.path.dirname(_FOLDER)))
    try:
        from sppo_hf.run import give_plugin_in_child
    except (ImportError, SyntaxError) as error:
        sys.stderr.write(
            f"SPPO is not used in this process (sys.executable is {sys.executable}): sppo_hf "
            f"cannot be imported: {error}\n"
        )
        return
    give_plugin_in_child(module)


def _run_hidden_sitecustomize() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _forget_marker_if_parent_is_gone() -> None:
    """Remove the file that says whether SPPO was used, if this process took its reader's place."""
    marker = os.environ.get("SPPO_RUN_MARKER", "")
    if os.path.basename(marker).startswith(f"sppo-run-{os.getpid()}-"):
        os.environ["SPPO_RUN_MARKER"] = ""
        if os.path.exists(marker):
            os.unlink(marker)


_forget_marker_if_parent_is_gone()
sys.meta_path.insert(0, _PatchingFinder())
_run_hidden_sitecustomize()
