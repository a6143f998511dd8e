"""Outcomes of an attack, and the limits on its seconds and its memory."""

import enum
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SECONDS = 5.0
"""No input may take longer to be refused or answered, beyond what starting Python takes."""

MIB = 500.0
"""No input may take more memory to be refused or answered, above what the process had."""


class Outcome(enum.Enum):
    """Outcome of one attempt; the last three are defects."""

    RIGHT = "right"
    REFUSED = "refused clearly"
    WRONG = "wrong"
    RAW = "raw error"
    OVER_LIMIT = "over limit"


DEFECTS = (Outcome.WRONG, Outcome.RAW, Outcome.OVER_LIMIT)


@dataclass(frozen=True)
class Case:
    """One attack.

    Attributes:
        name: What it is, so that a failure can be repeated: `settings: num_chunks='!!int foo'`.
        attempt: Does it, and says what it came to and what was seen (an error's words).
    """

    name: str
    attempt: Callable[[], tuple[Outcome, str]]


@dataclass(frozen=True)
class Attempt:
    """A case that was tried, with its outcome."""

    name: str
    outcome: Outcome
    seen: str


def answered_in_process(
    ask: Callable[[], object],
    *,
    refusals: tuple[type[BaseException], ...],
    right: Callable[[object], bool] = lambda _: True,
    seconds: float = SECONDS,
) -> tuple[Outcome, str]:
    """Ask something in this process and judge the answer, its time and the growth of its memory.

    Args:
        ask: Returns the answer or raises.
        refusals: Errors that count as a clear refusal; any other is a raw one.
        right: Whether an answer is right.
        seconds: How long it may take.
    """
    before, start, computed = peak_mib(), time.monotonic(), time.process_time()
    try:
        answer = ask()
    except refusals as error:
        outcome, seen = Outcome.REFUSED, f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - a raw error is what is being looked for
        outcome, seen = Outcome.RAW, f"{type(error).__name__}: {error}"
    else:
        outcome, seen = (Outcome.RIGHT if right(answer) else Outcome.WRONG), repr(answer)[:200]
    # Others' work on a shared machine is no fault of the answer; waiting for nothing is.
    took = max(time.process_time() - computed, (time.monotonic() - start) / 5)
    mib = peak_mib() - before
    if took > seconds or mib > MIB:
        return Outcome.OVER_LIMIT, f"{took:.1f} s, {mib:.0f} MiB; {seen}"
    return outcome, seen


def peak_mib() -> float:
    """Highest resident memory of this process so far, in MiB; it never falls."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def attempt_all(cases: Iterable[Case]) -> list[Attempt]:
    """Try all cases in order."""
    return [Attempt(case.name, *case.attempt()) for case in cases]


def table(by_area: dict[str, list[Attempt]]) -> str:
    """Markdown: one line per area, one column per outcome."""
    head = ["attack", "attempts", *(o.value for o in Outcome)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for area, attempts in by_area.items():
        counts = Counter(a.outcome for a in attempts)
        cells = [area, len(attempts), *(counts[o] for o in Outcome)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
