"""What every test gets: one mark, few threads, no network, and upstream deprecations as failures.

A test has one of the marks (`pure`, `fake`, `process`, `gpu`). Tests of the torch-free folders are
`pure` and all others `fake` unless they say otherwise. This file imports neither torch nor the
package, so that pure tests start at once.
"""

import faulthandler
import functools
import gc
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.sweeps import ALL, one_in

_NOT_COMPILED = "TORCHDYNAMO_DISABLE"

# Set before torch is first imported, and inherited by every process that a test starts. Two xdist
# workers with one thread each fill two cores; more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests build their models; one that reaches for a hub is a mistake and should fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A machine whose speed somebody calibrated must not change any test's plan. One folder for all
# workers of xdist, which inherit it.
_OWN_HOME = "SPPO_TESTS_HF_HOME" not in os.environ
if _OWN_HOME:
    os.environ["SPPO_TESTS_HF_HOME"] = tempfile.mkdtemp(prefix="sppo-tests-")
os.environ["HF_HOME"] = os.environ["SPPO_TESTS_HF_HOME"]

# PEFT imports bitsandbytes, and that the compiler, to compile a few functions of its own that no
# test is about. Until all is collected only, so that what tests compile is compiled.
os.environ[_NOT_COMPILED] = "1"

# Whatever the machine's speed, an example is no slower than the test's own time limit allows; and
# the same examples on every run, so that a red CI is red on the next machine too. Where everything
# is asked for there are more of them, see `sweeps`.
settings.register_profile(
    "sppo",
    deadline=None,
    derandomize=True,
    max_examples=100 if ALL else 30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("sppo")

TIERS = ("pure", "fake", "process", "gpu")
TORCH_FREE = (
    *("test_architecture.py", "test_errors.py", "test_rules.py", "test_config.py"),
    "test_text_files.py",
    *("planning", "reporting", "schedule"),
)
HERE = Path(__file__).parent

LOST_SECONDS = 900.0
"""Of one gpu test; more than any of them may take before a signal interrupts it."""

_imported = 0
"""Modules that there were when collections of garbage were last told to pass over them."""

_file: Path | None = None
"""Of the test that runs."""

_error_output = 2
"""Descriptor that is shown even while a test's output is captured; set by `pytest_configure`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for samples of tests that are not sampled already, or more than by default."""
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run every N-th case of each test, and one where it has fewer",
    )


class _OneIn:
    """Leaves out cases of tests, of those that other options have left."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep every so many-th case."""
        kept = one_in(config.getoption("--one-in"), [item.nodeid for item in items])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its tier, and let files with slow tests come first: at the end all work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        own = [tier for tier in TIERS if item.get_closest_marker(tier)]
        assert len(own) <= 1, f"{item.nodeid} is marked {own}; a test belongs to one tier"
        if not own:
            first = item.path.relative_to(HERE).parts[0]
            item.add_marker("pure" if first in TORCH_FREE else "fake")
        if own == ["gpu"]:
            _interrupt_when_late(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module, name: str, obj: object
) -> pytest.Function | None:
    """Make one skipped test of each gpu test with all its cases, which are two thousand."""
    marks = getattr(obj, "pytestmark", ())
    if not name.startswith("test_") or "gpu" not in {mark.name for mark in marks} or _has_gpu():
        return None
    item: pytest.Function = pytest.Function.from_parent(collector, name=name, callobj=lambda: None)
    for mark in marks:
        if mark.name not in ("parametrize", "usefixtures"):
            item.add_marker(getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs))
    cases = math.prod(len(mark.args[1]) for mark in marks if mark.name == "parametrize")
    item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device ({cases} cases)"))
    return item


def _interrupt_when_late(item: pytest.Item) -> None:
    """Let a gpu test that is too slow fail by a signal, and the next one run.

    All others keep pyproject's method, which ends the process. That is surer, since their threads
    may be what hangs, but on a slow card it would take all results with it.
    """
    late = item.get_closest_marker("timeout")
    args, kwargs = (late.args, late.kwargs) if late else ((), {})
    item.add_marker(pytest.mark.timeout(*args, **{"method": "signal", **kwargs}), append=False)


def pytest_configure(config: pytest.Config) -> None:
    """Keep what is the error output now: while a test runs, it is captured.

    While tests are collected no garbage is: looking through all that is imported again and again
    takes four seconds in each worker.
    """
    global _error_output
    _error_output = os.dup(2)
    if config.getoption("--one-in", 1) > 1:
        config.pluginmanager.register(_OneIn())
    gc.disable()


def pytest_unconfigure() -> None:
    """Remove the folder of profiles, in the process that has made it."""
    if _OWN_HOME:
        shutil.rmtree(os.environ["SPPO_TESTS_HF_HOME"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over what was imported: many tests ask for some.

    They come by themselves as rarely as in our commands: as often as by default they take a
    twentieth of the tests' CPU time.
    """
    os.environ.pop(_NOT_COMPILED, None)
    gc.enable()
    gc.set_threshold(50_000)
    _pass_over_imports()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same of what tests have imported since (families, TRL), and of what other files left."""
    global _file
    if item.path != _file or len(sys.modules) > _imported + 100:
        _file = item.path
        _pass_over_imports()


def _pass_over_imports() -> None:
    global _imported
    _imported = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """End the process after `LOST_SECONDS` of a gpu test: a signal is no use inside a library."""
    if not item.get_closest_marker("gpu"):
        return (yield)
    faulthandler.dump_traceback_later(LOST_SECONDS, exit=True, file=_error_output)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@functools.cache
def _has_gpu() -> bool:
    """Whether CUDA can be used; torch is asked only where a driver is installed."""
    if shutil.which("nvidia-smi") is None:
        return False
    import torch

    return torch.cuda.is_available()


class _Deprecations(logging.Handler):
    """Collects what the libraries below us log (rather than warn) about deprecated use."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record that speaks of deprecation."""
        message = record.getMessage()
        if "deprecated" in message.lower():
            self.messages.append(f"{record.name}: {message}")


@pytest.fixture(autouse=True)
def _no_logged_deprecation() -> Iterator[None]:
    """Fail a test whose code made Transformers or Accelerate log a deprecation.

    They log most of theirs, so the warning filters in pyproject.toml do not see them.
    """
    handler = _Deprecations()
    loggers = [logging.getLogger(name) for name in ("transformers", "accelerate")]
    for logger in loggers:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)
    assert not handler.messages, f"deprecated use of a library: {handler.messages}"
