"""Profiles of tiny models are quickly traced in every test here, as ranks of the fork server do."""

import pytest

from tests.engine.forced_plans import trace_on_cpu


@pytest.fixture(autouse=True)
def _traced_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_on_cpu(monkeypatch)
