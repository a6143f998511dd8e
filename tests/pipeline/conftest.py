"""Profiles of tiny models are quickly traced in every test here, as ranks of the fork server do."""

import pytest

from tests.engine.forced_plans import trace_few_tokens


@pytest.fixture(autouse=True)
def _traced_over_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_few_tokens(monkeypatch)
