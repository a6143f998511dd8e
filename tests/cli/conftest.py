"""Answers that tests of commands share: what is printed of one as a table, another has as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sppo_hf.planning.cluster import solve_cluster
from sppo_hf.planning.feasibility import assess_request

_answers: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _same_answer_to_the_same_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sppo_hf.cli.estimate.assess_request", _once(assess_request))
    monkeypatch.setattr("sppo_hf.cli.plan.assess_request", _once(assess_request))
    monkeypatch.setattr("sppo_hf.cli.plan.solve_cluster", _once(solve_cluster))


def _once(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Questions and answers are values, and what a question holds it also shows."""

    def answered(question: Any, **settings: Any) -> Any:
        asked = repr((question, settings))
        if asked not in _answers:
            _answers[asked] = answer(question, **settings)
        return _answers[asked]

    return answered
