"""Every test here starts with Accelerate's process-wide state empty, and leaves it so.

Profiles of tiny models are quickly traced, as in `tests/pipeline`.
"""

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState

from tests.engine.forced_plans import trace_few_tokens


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _traced_over_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_few_tokens(monkeypatch)
