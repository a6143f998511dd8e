"""Run a training script that was never changed, with SPPO switched on.

    accelerate launch --config_file a.yaml -m sppo_hf.run --config sppo.yaml train.py --lr 1e-5
    python -m sppo_hf.run --config sppo.yaml train.py --lr 1e-5

While the script runs, TrainingArguments and Accelerators that are made without a parallelism_config
get the plugin; one that the script passes by itself is respected, with a warning if it is not
SPPO's. This is the only place of the package that changes what other packages do by default.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sppo_hf.errors import ConfigError
from sppo_hf.planning.machine import expand_segments
from sppo_hf.rules import show

if TYPE_CHECKING:
    from sppo_hf.integrations.plugin import SPPOPlugin

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script as `python script.py args…` would, with the plugin as default.

    Args:
        argv: Command line without the program's name; None takes the process's own.

    Returns:
        Exit status 0; the script's own `SystemExit` passes through.

    Raises:
        SystemExit: Status 2 if the command line, the script or the settings file is wrong.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    script = Path(options.script)
    if not os.path.isfile(script):
        found = "is no regular file" if os.path.exists(script) else "does not exist"
        found = "is a directory" if os.path.isdir(script) else found
        parser.error(f"the script {show(options.script)} {found}; give the path of a Python file")
    expand_segments(os.environ)
    from sppo_hf.integrations.plugin import SPPOPlugin

    try:
        plugin = SPPOPlugin.from_yaml(options.config) if options.config else SPPOPlugin.from_env()
    except ConfigError as error:
        parser.error(str(error))
    with plugin_by_default(plugin), _as_if_started(script, options.arguments):
        runpy.run_path(str(script), run_name="__main__")
    _leave_group()
    return 0


def _leave_group() -> None:
    """Leave the process group, if the script has not, as a script that ends well should.

    Gloo's threads drop the tensors of a last collective a little later, for which they ask for the
    interpreter; when that is shutting down by then, the process is aborted (seen with PyTorch 2.13,
    about one exit in ten of two ranks, whether SPPO is on or not).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def plugin_by_default(plugin: SPPOPlugin) -> Iterator[None]:
    """Give the plugin to every TrainingArguments and Accelerator made without one, in this block.

    Args:
        plugin: The plugin.
    """
    from accelerate import Accelerator
    from transformers import TrainingArguments

    finish_arguments, make_accelerator = TrainingArguments.__post_init__, Accelerator.__init__

    @functools.wraps(finish_arguments)
    def with_plugin(self: TrainingArguments, *args: Any, **kwargs: Any) -> None:
        self.parallelism_config = _default(self.parallelism_config, plugin)
        finish_arguments(self, *args, **kwargs)

    TrainingArguments.__post_init__ = with_plugin
    Accelerator.__init__ = _with_default(make_accelerator, plugin)
    try:
        yield
    finally:
        TrainingArguments.__post_init__ = finish_arguments
        Accelerator.__init__ = make_accelerator


def _with_default(make_accelerator: Callable[..., None], plugin: SPPOPlugin) -> Callable[..., None]:
    """Wrap `Accelerator.__init__`, whose parallelism_config can only sensibly come by keyword."""

    @functools.wraps(make_accelerator)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["parallelism_config"] = _default(kwargs.get("parallelism_config"), plugin)
        make_accelerator(self, *args, **kwargs)

    return make


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
def _as_if_started(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` to what the interpreter gives a script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    # In front of, not instead of, what is there: the package may be importable from there alone.
    sys.path.insert(0, os.fspath(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sppo_hf.run",
        description="Run an unchanged training script chunk by chunk along the sequence.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="settings file (YAML); without it, SPPO_CONFIG names one"
    )
    parser.add_argument("script", help="Python file that trains with a Trainer or an Accelerator")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


if __name__ == "__main__":
    sys.exit(main())
