"""Schedules drawn at random, and the slow, plain answer to compare the simulator with."""

from dataclasses import dataclass

from hypothesis import strategies as st

from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.simulate import Change
from sppo_hf.schedule.timeline import Timeline
from tests.schedule.simulated import simulate

KINDS: tuple[Kind, ...] = ("F", "B", "D", "H")


@dataclass(frozen=True)
class RandomSchedule:
    """Resources, and what `simulate` asks for, as tables."""

    resources: dict[str, tuple[Action, ...]]
    seconds: dict[Action, float]
    after: dict[Action, tuple[Action, ...]]
    changes: dict[Action, tuple[Change, ...]]

    def simulate(self) -> Timeline:
        """Run the simulator on the tables."""
        return simulate(
            self.resources,
            seconds=self.seconds.__getitem__,
            after=self.after.__getitem__,
            changes=self.changes.__getitem__,
        )

    def needs(self, action: Action) -> tuple[Action, ...]:
        """All that an action waits for: its dependencies and its predecessor on its resource."""
        (resource,) = (resource for resource in self.resources.values() if action in resource)
        step = resource.index(action)
        return (*self.after[action], *resource[max(step - 1, 0) : step])


def relaxed(schedule: RandomSchedule) -> dict[Action, tuple[float, float]]:
    """Find (start, end) of every action by pushing all of them later until nothing moves."""
    times = {action: (0.0, 0.0) for action in schedule.seconds}
    while True:
        moved = False
        for action, took in schedule.seconds.items():
            start = max((times[other][1] for other in schedule.needs(action)), default=0.0)
            if times[action] != (start, start + took):
                times[action] = (start, start + took)
                moved = True
        if not moved:
            return times


@st.composite
def schedules(draw: st.DrawFn, *, cyclic: bool = False) -> RandomSchedule:
    """Draw up to 4 resources of up to 16 actions in all.

    Actions wait for those drawn before them, so that every schedule ends; with `cyclic`, for any,
    so that some do not.
    """
    count = draw(st.integers(0, 16))
    names = ("compute", "d2h", "1.compute", "h2d")[: draw(st.integers(1, 4))]
    actions = [Action(KINDS[i % 4], i % 3, i, None if i % 2 else i) for i in range(count)]
    resources: dict[str, list[Action]] = {name: [] for name in names}
    after: dict[Action, tuple[Action, ...]] = {}
    changes: dict[Action, tuple[Change, ...]] = {}
    held: list[Change] = []
    for i, action in enumerate(actions):
        resources[draw(st.sampled_from(names))].append(action)
        others = actions if cyclic else actions[:i]
        chosen = draw(st.lists(st.sampled_from(others), max_size=3)) if others else []
        after[action] = tuple(chosen)
        taken = Change(
            draw(st.sampled_from(["device", "host"])),
            draw(st.sampled_from(["frames", "kv"])),
            draw(st.integers(0, 5)),
            draw(st.sampled_from(["start", "end"])),
        )
        returned = [c for c in held if draw(st.booleans())]
        held = [c for c in held if c not in returned] + [taken]
        changes[action] = (taken, *(c._replace(num_bytes=-c.num_bytes) for c in returned))
    # Few values, so that many instants coincide; a third of an hour is not exact in binary.
    durations = st.sampled_from([0.0, 1.0, 0.1, 1 / 3, 2.0])
    return RandomSchedule(
        {name: tuple(resource) for name, resource in resources.items()},
        {action: draw(durations) for action in actions},
        after,
        changes,
    )
