"""A few cases of every area, in CI; none may be wrong, raw or over its limit."""

import importlib

import pytest

from tests.attacks.outcomes import (
    DEFECTS,
    Case,
    Outcome,
    answered_in_process,
    attempt_all,
    table,
)
from tests.sweeps import ALL

AREAS: dict[str, int] = {
    "batches": 180 if ALL else 60,
    "checkpoints": 24,
    "commands": 32 if ALL else 16,
    "disk": 20 if ALL else 9,
    "models": 24 if ALL else 6,
    "ranks": 3 if ALL else 2,
    "settings": 200 if ALL else 60,
}
"""Module of this folder, and how many of its cases CI tries."""


SLOW = {"ranks": (pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240))}
"""Areas whose few cases take more than ten seconds."""


@pytest.mark.parametrize("area", [pytest.param(a, marks=SLOW.get(a, ())) for a in AREAS])
def test_no_attack_of(area: str) -> None:
    module = importlib.import_module(f"tests.attacks.{area}")
    attempts = attempt_all(module.cases(AREAS[area], seed=0))
    assert len(attempts) >= AREAS[area] // 2
    assert [a for a in attempts if a.outcome in DEFECTS] == []


def test_outcomes_are_told_apart() -> None:
    def refuse() -> None:
        raise ValueError("no")

    def fall() -> None:
        raise KeyError("oops")

    def attempt(ask, right=True):
        return answered_in_process(ask, refusals=(ValueError,), right=lambda _: right)[0]

    assert attempt(lambda: 1) is Outcome.RIGHT
    assert attempt(lambda: 1, right=False) is Outcome.WRONG
    assert attempt(refuse) is Outcome.REFUSED
    assert attempt(fall) is Outcome.RAW


def test_table_counts() -> None:
    tried = attempt_all(
        [Case("a", lambda: (Outcome.RIGHT, "")), Case("b", lambda: (Outcome.RAW, ""))]
    )
    assert table({"batches": tried}).splitlines()[-1] == "| batches | 2 | 1 | 0 | 0 | 1 | 0 |"
