"""The lanes of a Schedule over many ranks, and what each action on them waits for.

Knows what actions mean to each other; nothing of seconds or bytes.

[Note: what an action waits for] A rank carries out its list in order, but only compute occupies it:
copies, sends, receives and reductions are started where they are listed (when the compute listed
before them is done) and run beside what follows. Besides:
a forward needs the activation of the stage before and, for keys and values, the chunk before;
a backward needs its forward, the gradient of the stage behind, its frame (if that left the device)
and, for the gradients of keys and values, the chunk behind;
a weight gradient needs its input gradient; a receive needs its send, and a send that the receiver
has come to the receive, so that buffers are taken no earlier than listed;
and one frame is on its way out while a unit computes, no more: the unit after next waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import COMPUTE_KINDS, KIND_NAMES, Action, Kind
from sppo_hf.schedule.schedule import Schedule

COMPUTE = ".compute"
"""What the name of each rank's compute lane ends in: rank 3's is "3.compute"."""

_BESIDE: dict[Kind, str] = {"D": "d2h", "H": "h2d", "REDUCE_GRAD": "reduce"}
_PEERS: dict[Kind, tuple[str, int]] = {
    "SEND_F": ("send", 1),
    "RECV_F": ("recv", -1),
    "SEND_B": ("send", -1),
    "RECV_B": ("recv", 1),
}
"""Which way a transfer goes, and where its other end is, in stages."""
_NOWHERE = -1


class Waits:
    """What `simulate_positions` asks for, of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        """Sort the actions by lane and find all that they wait for.

        Raises:
            ScheduleError: an action needs one that no rank has, or has no place in a pipeline.
        """
        self.lanes: dict[str, list[Action]] = {}
        """Actions by lane."""
        self._stage_ranks = schedule.stage_ranks
        self._num_units = schedule.num_units
        self._num_chunks = schedule.num_chunks
        self._gates: dict[Action, Action] = {}
        """By action beside compute: the compute that it is listed after."""
        self._left: dict[Action, Action] = {}
        """By compute: the last copy out that must have ended."""
        for rank, actions in enumerate(schedule.ranks):
            self._sort(rank, actions)
        self._actions = [action for lane in self.lanes.values() for action in lane]
        self._nothing = [_NOWHERE] * (self._num_units * len(self._stage_ranks))
        self._at: dict[Kind, list[int]] = {}
        """Positions by kind, and then by stage and unit."""
        for position, (kind, stage, unit, _, _) in enumerate(self._actions):
            if kind not in self._at:
                self._at[kind] = self._nothing.copy()
            self._at[kind][stage * self._num_units + unit] = position
        # Whole or split, it is a backward's first part that others wait for.
        self._at_backward = list(map(max, self._of("B"), self._of("I")))
        self.needs: list[list[int]] = [self._needs(action) for action in self._actions]
        """By position: the positions of what must be done before."""
        if any(_NOWHERE in needed for needed in self.needs):
            raise ScheduleError(self._missing())

    def _sort(self, rank: int, actions: Sequence[Action]) -> None:
        compute = self.lanes.setdefault(f"{rank}{COMPUTE}", [])
        left = newly_left = None
        for action in actions:
            if action.kind in COMPUTE_KINDS:
                if left is not None:
                    self._left[action] = left
                left = newly_left
                compute.append(action)
                continue
            if compute:
                self._gates[action] = compute[-1]
            if action.kind == "D":
                newly_left = action
            self.lanes.setdefault(f"{rank}.{self._lane(action)}", []).append(action)

    def _lane(self, action: Action) -> str:
        kind, stage = action.kind, action.stage
        if kind in _BESIDE:
            return _BESIDE[kind]
        if kind not in _PEERS:
            allowed = (*sorted(COMPUTE_KINDS), *_BESIDE, *_PEERS)
            raise ScheduleError(
                f"{action} ({KIND_NAMES[kind]}) has no place in a pipeline. Allowed: "
                f"{', '.join(allowed)}."
            )
        word, step = _PEERS[kind]
        if not 0 <= stage + step < len(self._stage_ranks):
            raise ScheduleError(
                f"{action} ({KIND_NAMES[kind]}) has no other end: there is no stage {stage + step}."
            )
        return f"{word} {self._stage_ranks[stage + step]}"

    def _of(self, kind: Kind) -> list[int]:
        return self._at.get(kind, self._nothing)

    def _needs(self, action: Action) -> list[int]:
        kind, stage, unit, _, _ = action
        num_units, at = self._num_units, self._at
        here = stage * num_units + unit
        if kind == "F":
            needed: list[int] = []
            if stage:
                received = at["RECV_F"][here] if "RECV_F" in at else _NOWHERE
                needed.append(at["F"][here - num_units] if received < 0 else received)
            if unit % self._num_chunks:
                needed.append(at["F"][here - 1])
        elif kind == "B" or kind == "I":
            needed = [self._of("F")[here]]
            if stage + 1 < len(self._stage_ranks):
                received = at["RECV_B"][here] if "RECV_B" in at else _NOWHERE
                needed.append(self._at_backward[here + num_units] if received < 0 else received)
            if (unit + 1) % self._num_chunks and unit + 1 < num_units:
                needed.append(self._at_backward[here + 1])
            if "D" in at and at["D"][here] >= 0:
                needed.append(self._of("H")[here])
        else:
            return [self._of_needed(other) for other in self._others(action)]
        if action in self._left:
            needed.append(self._of_needed(self._left[action]))
        return needed

    def _others(self, action: Action) -> Iterator[Action]:
        """What actions other than forward and backward need."""
        kind, stage, unit, _, _ = action
        if action in self._gates:
            yield self._gates[action]
        if action in self._left:
            yield self._left[action]
        if kind == "W":
            yield Action("I", stage, unit)
        elif kind in ("D", "SEND_F", "R"):
            yield Action("F", stage, unit)
        elif kind == "H":
            yield Action("D", stage, unit)
        elif kind == "RECV_F":
            yield Action("SEND_F", stage - 1, unit)
        elif kind == "RECV_B":
            yield Action("SEND_B", stage + 1, unit)
        if kind == "SEND_B":
            split = self._of("B")[stage * self._num_units + unit] < 0
            yield Action("I" if split else "B", stage, unit)
        if kind in ("SEND_F", "SEND_B"):
            other = Action(
                "RECV_F" if kind == "SEND_F" else "RECV_B", stage + _PEERS[kind][1], unit
            )
            if self._of_needed(other) >= 0 and other in self._gates:
                yield self._gates[other]

    def _of_needed(self, action: Action) -> int:
        return self._of(action.kind)[action.stage * self._num_units + action.unit]

    def _missing(self) -> str:
        """Says what is needed and not there."""
        position = next(at for at, needed in enumerate(self.needs) if _NOWHERE in needed)
        action = self._actions[position]
        return (
            f"{action} needs an action that no rank has: its forward, its chunk's neighbour, the "
            "stage next to it or its transfer. `validate` says which."
        )
