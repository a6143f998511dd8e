"""Run an unchanged training program with SPPO switched on.

    accelerate launch --config_file a.yaml -m sppo_hf.run --config sppo.yaml train.py --lr 1e-5
    python -m sppo_hf.run train.py --lr 1e-5
    python -m sppo_hf.run -m package.train --lr 1e-5
    python -m sppo_hf.run trl sft --learning_rate 1e-5

The program is a file, a module as for `python -m`, or an installed command. While it runs,
TrainingArguments and Accelerators that are made without a parallelism_config get the plugin; a
config that the program passes itself is respected, with a warning if it is not SPPO's. The same
holds in Python processes that the program starts, by `accelerate launch`, `torchrun` or in any
other way, as the commands of TRL, Axolotl, ms-swift and LLaMA-Factory do: they inherit it through
environment variables (`inherited/sitecustomize.py`). Nothing else in this package changes defaults
of other packages.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib.util
import logging
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sppo_hf.errors import ConfigError
from sppo_hf.planning.machine import request_expandable_segments, set_max_connections
from sppo_hf.rules import show

if TYPE_CHECKING:
    from sppo_hf.integrations.plugin import SPPOPlugin

logger = logging.getLogger(__name__)

_MAX_WAIT_SECONDS = 5.0
"""Longest time that an ending process waits for Gloo's threads."""

_CHILD_CONFIG = "SPPO_RUN_CONFIG"
"""Variable for child processes: the settings file; empty for default settings."""

_CHILD_MARKER = "SPPO_RUN_MARKER"
"""Variable for child processes: a file that they write to when they use the plugin, or empty."""


@dataclass(slots=True)
class _Uses:
    """Whether the program used the plugin."""

    here: bool = False
    """Whether TrainingArguments or an Accelerator were made in this process."""
    in_children: bool = False
    """Whether they were made in a process that the program started."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a program as the interpreter or the shell would, with the plugin as default.

    Args:
        argv: Command line without this module's name; None takes the process's own.

    Returns:
        Exit status 0. The program's own `SystemExit` and its errors pass through.

    Raises:
        SystemExit: With status 2: the command line, the program or the settings file is wrong.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    request_expandable_segments(os.environ)
    set_max_connections(os.environ)
    with _program_environment(options.program, options.arguments, is_module=options.module):
        run = _find(parser, options.program, is_module=options.module)
        plugin = _plugin(parser, options.config)
        with plugin_by_default(plugin) as uses, _children_with_plugin(options.config, uses):
            status = _run_to_exit_status(run)
    if not uses.here and not uses.in_children:
        logger.warning(
            "%s made neither TrainingArguments nor an Accelerator, in this process or in Python "
            "processes that inherit its environment, so SPPO was not used. Call plugin.convert("
            "model) in the program, or start sppo_hf.run in the processes that train.",
            options.program,
        )
    if status not in (None, 0):
        raise SystemExit(status)
    _leave_process_group()
    return 0


def _run_to_exit_status(run: Callable[[], object]) -> object:
    """Run the program; one that ends by `sys.exit(0)` ends like one that returns."""
    try:
        return run()
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
        return None


def _plugin(parser: argparse.ArgumentParser, config: str | None) -> SPPOPlugin:
    from sppo_hf.integrations.plugin import CONFIG_VARIABLE, SPPOPlugin

    try:
        if config is not None:
            return SPPOPlugin.from_yaml(config)
        return SPPOPlugin.from_env() if CONFIG_VARIABLE in os.environ else SPPOPlugin()
    except ConfigError as error:
        hint = "" if config is not None else " Or name a settings file by --config FILE."
        parser.error(f"{error}{hint}")


def _find(
    parser: argparse.ArgumentParser, program: str, *, is_module: bool
) -> Callable[[], object]:
    """Return a function that runs the program and returns its exit status, or None."""
    if is_module:
        _check_module(parser, program)
        return lambda: _no_status(runpy.run_module(program, run_name="__main__", alter_sys=True))
    path = Path(program)
    if os.path.isfile(path):  # unlike Path.is_file, takes names of any length
        return lambda: _no_status(runpy.run_path(str(path), run_name="__main__"))
    commands = entry_points(group="console_scripts", name=program)
    if os.path.isdir(path) or not commands:
        found = "does not exist, nor does such a command"
        found = "is a directory" if os.path.isdir(path) else found
        parser.error(
            f"the script {show(program)} {found}; give the path of a Python file, -m and the name "
            "of a module, or the name of an installed command"
        )
    command = next(iter(commands))
    return lambda: command.load()()


def _no_status(_: object) -> None:
    """Drop the globals that `runpy` returns: a file or module that ends has no exit status."""


def _check_module(parser: argparse.ArgumentParser, name: str) -> None:
    missing = f"there is no module {show(name)}"
    if os.path.isfile(name):  # first, because find_spec("train.py") would run train.py
        parser.error(f"{missing}; it is a file, so leave -m out")
    try:
        spec = None if name.startswith(".") else importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            missing = f"{name!r} is a package that has no __main__, so it cannot be run"
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        # An import that fails inside of the module's packages is the program's own error.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:  # an empty name, or a module without a spec
        spec = None
    if spec is None:
        parser.error(missing)


def _leave_process_group() -> None:
    """Destroy the process group, if the program has not, and wait for Gloo's threads.

    Gloo's threads free the tensors of the last collective a little later, for which they take the
    interpreter's lock; if the interpreter is shutting down by then, the process is aborted, with or
    without SPPO (PyTorch 2.13). Destroying the group does not end them. So all ranks are waited
    for, because a thread may wait for another rank's data, and then the threads, until they sleep.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    uses_gloo = distributed.get_backend() == "gloo"
    if uses_gloo:
        barrier = distributed.barrier(async_op=True)
        while not barrier.is_completed() and time.monotonic() < deadline:
            time.sleep(0.01)  # releases the interpreter's lock, which the threads may wait for
    distributed.destroy_process_group()
    num_idle_polls = 0
    while uses_gloo and num_idle_polls < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
        num_idle_polls = 0 if _gloo_is_running() else num_idle_polls + 1


def _gloo_is_running() -> bool:
    """Whether a thread of Gloo is not asleep; False on systems without /proc."""
    for path in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, state = path.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        if "gloo" in name and not state.lstrip().startswith("S"):
            return True
    return False


@contextmanager
def plugin_by_default(plugin: SPPOPlugin) -> Iterator[_Uses]:
    """In this block, give the plugin to TrainingArguments and Accelerators made without one."""
    uses = _Uses()
    from accelerate import Accelerator
    from transformers import TrainingArguments

    def use() -> SPPOPlugin:
        uses.here = True
        return plugin

    post_init, init = TrainingArguments.__post_init__, Accelerator.__init__
    _patch_arguments(TrainingArguments, use)
    _patch_accelerator(Accelerator, use)
    try:
        yield uses
    finally:
        TrainingArguments.__post_init__ = post_init
        Accelerator.__init__ = init


def _patch_arguments(kind: Any, use: Callable[[], SPPOPlugin]) -> None:
    """Give the plugin to `TrainingArguments` that are made without a parallelism_config."""
    post_init = kind.__post_init__

    @functools.wraps(post_init)
    def with_plugin(self: Any, *args: Any, **kwargs: Any) -> None:
        self.parallelism_config = _default(self.parallelism_config, use())
        post_init(self, *args, **kwargs)

    kind.__post_init__ = with_plugin


def _patch_accelerator(kind: Any, use: Callable[[], SPPOPlugin]) -> None:
    """Give the plugin to an `Accelerator` made without a parallelism_config, given by keyword."""
    init = kind.__init__

    @functools.wraps(init)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["parallelism_config"] = _default(kwargs.get("parallelism_config"), use())
        init(self, *args, **kwargs)

    kind.__init__ = make


def _default(given: object, plugin: SPPOPlugin) -> object:
    from sppo_hf.integrations.plugin import SPPOPlugin

    if given is None:
        return plugin
    if not isinstance(given, SPPOPlugin):
        logger.warning(
            "The script passes its own parallelism_config, %r, so SPPO stays out of it. Drop it "
            "from the script, or pass its sizes to SPPOPlugin there.",
            given,
        )
    return given


@contextmanager
def _children_with_plugin(config: str | None, uses: _Uses) -> Iterator[None]:
    """In this block, have Python processes that inherit the environment use the plugin too."""
    from sppo_hf.integrations.plugin import CONFIG_VARIABLE

    config = config or os.environ.get(CONFIG_VARIABLE)
    # The process's number tells a child from what replaces this process by `os.exec`.
    handle, marker = tempfile.mkstemp(prefix=f"sppo-run-{os.getpid()}-")
    os.close(handle)
    search_path = [str(Path(__file__).with_name("inherited")), os.environ.get("PYTHONPATH")]
    changed = {
        "PYTHONPATH": os.pathsep.join(entry for entry in search_path if entry),
        _CHILD_CONFIG: os.path.abspath(config) if config else "",
        _CHILD_MARKER: marker,
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        uses.in_children = os.path.getsize(marker) > 0
        os.unlink(marker)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def give_plugin_in_child(module: ModuleType) -> None:
    """Give the plugin by default, in a process that a program under this module has started.

    Args:
        module: `accelerate.accelerator` or `transformers.training_args`, just imported.
    """
    if module.__name__ == "accelerate.accelerator":
        _patch_accelerator(module.Accelerator, _use_in_child)
    else:
        _patch_arguments(module.TrainingArguments, _use_in_child)


@functools.cache
def _use_in_child() -> SPPOPlugin:
    """Make the plugin of a child process, once, and tell the parent that it is used."""
    from sppo_hf.integrations.plugin import SPPOPlugin

    config, marker = os.environ.get(_CHILD_CONFIG), os.environ.get(_CHILD_MARKER)
    if marker and os.path.exists(marker):  # else the parent has ended
        Path(marker).write_text("used")
    atexit.register(_leave_process_group_unless_failed)
    return SPPOPlugin.from_yaml(config) if config else SPPOPlugin()


def _leave_process_group_unless_failed() -> None:
    """Leave the process group as `main` does; a failed rank would wait for the others in vain."""
    if not hasattr(sys, "last_value"):
        _leave_process_group()


@contextmanager
def _program_environment(
    program: str, arguments: Sequence[str], *, is_module: bool
) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as the interpreter or the shell would for the program."""
    argv, path = sys.argv, list(sys.path)
    script = Path(program)
    is_file = os.path.isfile(script) and not is_module
    # For a module, `runpy` sets argv[0] to its file.
    command = None if is_module or is_file else shutil.which(program)
    sys.argv = [command or program, *arguments]
    if not sys.flags.safe_path and (is_file or is_module):
        # Added in front, because this package may be importable from the present first entry only.
        folder = os.fspath(script.resolve().parent) if is_file else os.getcwd()
        if sys.path[:1] != [folder]:
            sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sppo_hf.run",
        description="Run an unchanged training program chunk by chunk along the sequence.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings file (YAML); by default the one that SPPO_CONFIG names, or default settings",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="the program is a module, as for python -m"
    )
    parser.add_argument(
        "program",
        help="Python file, module or installed command, which trains with a Trainer or an "
        "Accelerator",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    return parser


if __name__ == "__main__":
    sys.exit(main())
