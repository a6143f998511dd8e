"""Attacks on ranks: one is killed, stopped, raises or exits, in every phase of training.

Right: every other rank ends in time, and what it printed names the rank that failed, and where.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.attacks.failing_training import FAULTS, PHASES
from tests.attacks.outcomes import Case, Outcome
from tests.pipeline.fork_server import Ended, ForkServer, fork_server

TIMEOUT_SECONDS = 8
LIMIT_SECONDS = {"stop": 30.0}
"""Longest time from a fault until the last rank ends; a stopped rank is noticed late."""
LIMIT_OF_OTHERS = 20.0

LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "pp2": ({"pp_size": 2}, 2),
    "pp3": ({"pp_size": 3}, 3),
    "dp2xpp2": ({"pp_size": 2}, 4),
    "sp2": ({"sp_size": 2}, 2),
    "pp2xsp2": ({"pp_size": 2, "sp_size": 2}, 4),
}
"""Sizes and number of ranks."""

_BLAMES = re.compile(r"lost rank (\d+)|\brank (\d+) (?:failed|ended) (?!because)")


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` cases: all faults, phases, layouts and ranks, in a random order.

    The first ones differ in fault, phase and layout.
    """
    draw = random.Random(seed)
    faults, phases, layouts = list(FAULTS), list(PHASES), list(LAYOUTS)
    for items in (faults, phases, layouts):
        draw.shuffle(items)
    server = fork_server()
    for number in range(count):
        phase = phases[number % len(phases)]
        fault = faults[(number + number // len(phases)) % len(faults)]
        layout = layouts[(number + number // len(phases)) % len(layouts)]
        rank = draw.randrange(LAYOUTS[layout][1])
        yield _case(server, layout, rank, fault, phase)


def _case(server: ForkServer, layout: str, rank: int, fault: str, phase: str) -> Case:
    sizes, ranks = LAYOUTS[layout]
    job = {"sizes": sizes, "rank": rank, "how": fault, "phase": phase}
    job["timeout"] = TIMEOUT_SECONDS

    def attempt() -> tuple[Outcome, str]:
        limit = LIMIT_SECONDS.get(fault, LIMIT_OF_OTHERS)
        with tempfile.TemporaryDirectory() as folder:
            module = "tests.attacks.failing_training"
            ended = server.launch(module, job, ranks=ranks, folder=Path(folder), limit=limit)
        return judge(ended, rank, phase, fault, limit)

    return Case(f"ranks: {layout}, rank {rank}, {fault} in {phase}", attempt)


def judge(ended: Ended, rank: int, phase: str, fault: str, limit: float) -> tuple[Outcome, str]:
    """Judge how a launch ended in which `rank` failed.

    Returns:
        The outcome, and what was seen: seconds, and the words of each other rank.
    """
    others = {r: log for r, log in enumerate(ended.logs) if r != rank}
    blamed = {r: {int(a or b) for a, b in _BLAMES.findall(log)} for r, log in others.items()}
    words = {r: _last_words(log) for r, log in others.items()}
    seen = f"{ended.seconds:.1f} s, codes {ended.codes}; " + "; ".join(
        f"rank {r}: {said}" for r, said in words.items()
    )
    if any(ended.codes[r] is None for r in others) or ended.seconds > limit:
        return Outcome.OVER_LIMIT, seen
    if any(names - {rank} for names in blamed.values()):
        return Outcome.WRONG, seen
    if any(ended.codes[r] == 0 for r in others):
        return Outcome.WRONG, seen
    if any(not names for names in blamed.values()):
        return Outcome.RAW, seen
    expected = [PHASES[phase]]
    if fault in ("raise", "interrupt"):
        expected.append("KeyError: 'sabotage'" if fault == "raise" else "KeyboardInterrupt")
    if any(not re.search(e, said) for e in expected for said in words.values()):
        return Outcome.WRONG, seen
    return Outcome.RIGHT, seen


def _last_words(log: str) -> str:
    """The last line that blames somebody, or the last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    blaming = [line for line in lines if _BLAMES.search(line)]
    return [*lines[-1:], *blaming[-1:]][-1][-600:] if lines else "nothing"
