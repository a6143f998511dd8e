"""A clock that only moves when work says so."""

from collections.abc import Callable

import torch

from sppo_hf.profiling.calibrate import BenchTimer

CPU = torch.device("cpu")


class FakeClock:
    """Seconds that pass because somebody advances them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def __call__(self) -> float:
        return self.now

    def work(self, *seconds: float) -> Callable[[], None]:
        """Work whose calls take `seconds` in turn, the last one from then on."""
        left = list(seconds)

        def run() -> None:
            self.calls += 1
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run

    def watch(
        self, *, repeats: int = 5, most_seconds: float = 1.0, load_seconds: float = 0.0
    ) -> BenchTimer:
        """A stopwatch that reads this clock."""
        return BenchTimer(
            CPU,
            repeats=repeats,
            most_seconds=most_seconds,
            load_seconds=load_seconds,
            clock=self,
        )
