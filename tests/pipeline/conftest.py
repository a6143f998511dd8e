"""Profiles of tiny models are quickly traced in every test here."""

import pytest


@pytest.fixture(autouse=True)
def _traced_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.forced_plans import trace_on_cpu

    trace_on_cpu(monkeypatch)
