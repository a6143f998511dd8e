"""What every test gets: one tier, few threads, no network, and upstream deprecations as failures.

A test belongs to one tier (`pure`, `fake`, `process`, `gpu`). Tests of the torch-free rooms are
`pure` and all others `fake` unless they say otherwise. This file imports neither torch nor the
package, so that the pure tier stays fast.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Set before torch is first imported, and inherited by every process that a test starts. Two xdist
# workers with one thread each fill two cores; more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests build their models; one that reaches for a hub is a mistake and should fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A machine whose speed somebody calibrated must not change any test's plan. One folder for all
# workers of xdist, which inherit it.
os.environ["HF_HOME"] = os.environ.setdefault(
    "SPPO_TESTS_HF_HOME", tempfile.mkdtemp(prefix="sppo-tests-")
)

# Whatever the machine's speed, an example is no slower than the test's own time limit allows; and
# the same examples on every run, so that a red CI is red on the next machine too.
settings.register_profile(
    "sppo", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("sppo")

TIERS = ("pure", "fake", "process", "gpu")
TORCH_FREE = (
    *("test_architecture.py", "test_errors.py", "test_rules.py", "test_config.py"),
    *("planning", "schedule"),
)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its tier, and skip the gpu tier on machines without one."""
    for item in items:
        own = [tier for tier in TIERS if item.get_closest_marker(tier)]
        assert len(own) <= 1, f"{item.nodeid} is marked {own}; a test belongs to one tier"
        if not own:
            first = item.path.relative_to(HERE).parts[0]
            item.add_marker("pure" if first in TORCH_FREE else "fake")
        if own == ["gpu"] and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
