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

from collections.abc import Sequence
from itertools import accumulate

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import COMPUTE_KINDS, KIND_NAMES, Action, Kind
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.timeline import COMPUTE

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
        first = frozenset(schedule.first_units)
        self._first = [unit in first for unit in range(self._num_units + 1)]
        """By unit: whether a micro-batch begins with it, and so the one before it ends another."""
        self._places: dict[str, list[int]] = {}
        """By lane, for each of its actions, a place on another lane of its rank: for compute, of
        the copy out that must have ended; for what runs beside, of the compute listed before."""
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
        self._waited = self._positions()
        self.needs: list[list[int]] = [
            self._needs(position, action) for position, action in enumerate(self._actions)
        ]
        """By position: the positions of what must be done before."""
        if any(_NOWHERE in needed for needed in self.needs):
            raise ScheduleError(self._missing())

    def _sort(self, rank: int, actions: Sequence[Action]) -> None:
        compute, computed = self._lane_of(f"{rank}{COMPUTE}")
        lanes: dict[tuple[Kind, int], tuple[list[Action], list[int]]] = {}
        copies, left, newly_left = 0, _NOWHERE, _NOWHERE
        for action in actions:
            kind = action.kind
            if kind in COMPUTE_KINDS:
                compute.append(action)
                computed.append(left)
                left = newly_left
                continue
            key = (kind, action.stage)
            if key not in lanes:
                lanes[key] = self._lane_of(f"{rank}.{self._lane(action)}")
            lane, places = lanes[key]
            lane.append(action)
            places.append(len(compute) - 1)
            if kind == "D":
                newly_left = copies
                copies += 1

    def _lane_of(self, name: str) -> tuple[list[Action], list[int]]:
        return self.lanes.setdefault(name, []), self._places.setdefault(name, [])

    def _positions(self) -> list[int]:
        """By position: that of the action whose place is noted, or nowhere."""
        starts = dict(
            zip(self.lanes, accumulate(map(len, self.lanes.values()), initial=0), strict=False)
        )
        found: list[int] = []
        for name, places in self._places.items():
            rank = name.partition(".")[0]
            other = f"{rank}.{_BESIDE['D']}" if name.endswith(COMPUTE) else f"{rank}{COMPUTE}"
            start = starts.get(other, 0)
            found += [start + place if place >= 0 else _NOWHERE for place in places]
        return found

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

    def _needs(self, position: int, action: Action) -> list[int]:
        kind, stage, unit, _, _ = action
        num_units, at = self._num_units, self._at
        here = stage * num_units + unit
        waited = self._waited[position]
        if kind == "F":
            needed: list[int] = []
            if stage:
                received = at["RECV_F"][here] if "RECV_F" in at else _NOWHERE
                needed.append(at["F"][here - num_units] if received < 0 else received)
            if not self._first[unit]:
                needed.append(at["F"][here - 1])
        elif kind == "B" or kind == "I":
            needed = [self._of("F")[here]]
            if stage + 1 < len(self._stage_ranks):
                received = at["RECV_B"][here] if "RECV_B" in at else _NOWHERE
                needed.append(self._at_backward[here + num_units] if received < 0 else received)
            if not self._first[unit + 1] and unit + 1 < num_units:
                needed.append(self._at_backward[here + 1])
            if "D" in at and at["D"][here] >= 0:
                needed.append(self._of("H")[here])
        else:
            needed = [] if waited < 0 else [waited]
            self._add_others(needed, kind, here)
            return needed
        if waited >= 0:
            needed.append(waited)
        return needed

    def _add_others(self, needed: list[int], kind: Kind, here: int) -> None:
        """What actions other than forward and backward need, besides what they are listed after."""
        if kind == "RECV_F":
            needed.append(self._of("SEND_F")[here - self._num_units])
        elif kind == "RECV_B":
            needed.append(self._of("SEND_B")[here + self._num_units])
        elif kind == "W":
            needed.append(self._of("I")[here])
        elif kind == "H":
            needed.append(self._of("D")[here])
        elif kind in ("D", "SEND_F", "R"):
            needed.append(self._of("F")[here])
        elif kind == "SEND_B":
            needed.append(self._at_backward[here])
        if kind in ("SEND_F", "SEND_B"):
            step = _PEERS[kind][1] * self._num_units
            receive = self._of("RECV_F" if kind == "SEND_F" else "RECV_B")[here + step]
            if receive >= 0 and self._waited[receive] >= 0:
                needed.append(self._waited[receive])

    def _missing(self) -> str:
        """Says what is needed and not there."""
        position = next(at for at, needed in enumerate(self.needs) if _NOWHERE in needed)
        action = self._actions[position]
        return (
            f"{action} needs an action that no rank has: its forward, its chunk's neighbour, the "
            "stage next to it or its transfer. `validate` says which."
        )
