"""The resources of a Schedule over many ranks, and what each action on them waits for.

Simulation and validation both read these rules; there are no others.

[Note: what an action waits for] A rank carries out its list in order, but only compute occupies it.
Copies, sends, receives and reductions start where they are listed (when the compute listed before
them has ended) and run beside the compute that follows. In addition:

- A forward waits for the activation of the previous stage and, because of K/V, for the previous
  chunk.
- A backward waits for its forward, the gradient from the next stage, its saved activations (if they
  were offloaded) and, because of dK/dV, for the next chunk.
- Both wait for K/V, or for sums of dK/dV, that other ranks send.
- A store behind the host waits for its copy to the host, a load for its store, and the copy back to
  the device for its load. A copy to the host waits until all stores before it but the last have
  ended, so that host memory is bounded.
- A weight gradient waits for its input gradient.
- A receive waits for its send. A send waits until the receiver has reached its receive, so that
  buffers are allocated no earlier than listed.
- At most one unit is copied to the host while another computes: the unit after next waits for it.
- K/V that are not on the device are copied beside the unit whose attention reads them, in blocks,
  on the resources of copies. The copies listed for the unit (K and O; L and S behind the host) may
  begin when the unit may. The rank's next compute, and the unit's sends, wait for all of them.
- Ranks that share a unit exchange tokens and heads in each layer. So their shares begin together,
  when all of these ranks are free and the dependencies of every share are met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import (
    COMPUTE_KINDS,
    KIND_NAMES,
    Action,
    Kind,
    is_kv_copy,
    store_part,
    unit_share,
)
from sppo_hf.schedule.messages import TRANSFERS, Message, messages
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.timeline import COMPUTE

_BESIDE: dict[Kind, str] = {
    **{"D": "d2h", "H": "h2d", "S": "store", "L": "load", "K": "h2d", "O": "d2h"},
    "REDUCE_GRAD": "reduce",
}
_PLAIN: frozenset[Kind] = frozenset({"K", "O", "S", "L"})
"""Kinds whose part is not a share of a unit."""
_PEERS: dict[Kind, tuple[str, int]] = {
    "SEND_F": ("send", 1),
    "RECV_F": ("recv", -1),
    "SEND_B": ("send", -1),
    "RECV_B": ("recv", 1),
}
"""Direction of a transfer, and the distance in stages to its other end."""
_KEYS: frozenset[Kind] = frozenset({"SEND_KV", "RECV_KV", "SEND_DKV", "RECV_DKV"})
"""Kinds of messages whose pieces may belong to different units."""
_KINDS: tuple[Kind, ...] = tuple(KIND_NAMES)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}
_NOWHERE = -1


class DependencyGraph:
    """The actions of a schedule by resource, and their dependencies, for `simulate_positions`.

    An action's position is its index when all resources' lists are joined in order.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        complete: bool = True,
        sent: Mapping[Action, Message] | None = None,
    ) -> None:
        """Sort the actions by resource and find their dependencies.

        Args:
            schedule: a schedule of compute actions alone, or a lowered one.
            complete: whether to refuse actions that depend on one that no rank has. If not, such
                dependencies are negative numbers in `needs`, which `needed` decodes.
            sent: `messages(schedule)`, if already known.

        Raises:
            ScheduleError: an action depends on one that no rank has, or its kind does not belong in
                a pipeline.
        """
        self.resources: dict[str, list[Action]] = {}
        """Actions of each resource, in order."""
        self._stage_ranks = schedule.stage_ranks
        self._num_units = schedule.num_units
        self._size = self._num_units * len(self._stage_ranks)
        shared = schedule.shared_units
        self._messages: dict[Action, Message] = {}
        """Message of each send and each receive; empty if no units are shared."""
        if shared and sent is None:
            sent = messages(schedule)
        for message in sent.values() if shared and sent else ():
            self._messages[message.send] = self._messages[message.receive] = message
        first = frozenset(schedule.first_units)
        self._first = [unit in first for unit in range(self._num_units + 1)]
        """Whether each unit is the first chunk of a micro-batch, [units + 1]."""
        self._places: dict[str, list[int]] = {}
        """For each action of each resource, the index on another resource of the same rank of an
        action that must end before it: for compute, of a copy to the host; for all else, of the
        compute listed before it. `_NOWHERE` if there is none."""
        self._streams: dict[Action, list[Action]] = {}
        """Copies of K/V beside each compute action."""
        self._awaited: dict[Action, list[Action]] = {}
        """Copies of K/V that each compute action waits for: those beside the one before it."""
        self._room: dict[Action, Action] = {}
        """Store that must end before each copy to the host, so that host memory is free."""
        for rank, actions in enumerate(schedule.ranks):
            self._sort(rank, actions)
        self.actions = [action for resource in self.resources.values() for action in resource]
        """All actions, by position."""
        self._at: dict[Kind, list[int]] = {}
        """Position of each kind's action at index `stage * num_units + unit`; of a shared unit,
        that of any of its shares."""
        self._groups: dict[tuple[Kind, int], list[int]] = {}
        """Positions of all shares or pieces, by kind and `stage * num_units + unit`."""
        self._alone: dict[Action, int] = {}
        """Position of each action with a `part`: shares, pieces and copies of K/V."""
        self._number_actions()
        # Dependents wait for a whole backward, or for the input gradient of a split one.
        self._at_backward = list(map(max, self._of("B"), self._of("I")))
        self._waited = self._positions()
        self.needs: list[list[int]] = [
            self._needs(position, action) for position, action in enumerate(self.actions)
        ]
        """Positions of the actions that must end before each action, by its position."""
        for receive in self._alone if self._messages else ():
            if receive.kind in ("RECV_KV", "RECV_DKV") and receive in self._messages:
                used = self._position(self._messages[receive].consumer)
                if used >= 0:
                    self.needs[used].append(self._alone[receive])
        for action, streams in self._awaited.items():
            self.needs[self._position(action)] += map(self._position, streams)
        for action, streams in self._streams.items():
            for stream in streams:
                self.needs[self._position(stream)] += self.needs[self._position(action)]
        if self._groups:
            self._share()
        if complete and any(needed and min(needed) < 0 for needed in self.needs):
            raise ScheduleError(self._missing())

    def _number_actions(self) -> None:
        for position, action in enumerate(self.actions):
            kind, stage, unit, _, part = action
            if kind not in self._at:
                self._at[kind] = self._nothing(kind)
            here = stage * self._num_units + unit
            if part is None or kind not in _PLAIN:
                self._at[kind][here] = position
            if part is not None:
                self._alone[action] = position
                if kind not in _PLAIN and kind not in _KEYS:
                    self._groups.setdefault((kind, here), []).append(position)

    def needed(self, found: int) -> Action:
        """Returns the action of an entry of `needs`; a negative entry is an action on no rank."""
        if found >= 0:
            return self.actions[found]
        number, here = divmod(-2 - found, self._size)
        return Action(_KINDS[number], *divmod(here, self._num_units))

    def _nothing(self, kind: Kind) -> list[int]:
        """Returns entries for missing actions of a kind, [stages * units]; see `needed`."""
        last = -2 - _NUMBER[kind] * self._size
        return list(range(last, last - self._size, -1))

    def _share(self) -> None:
        """Makes an action that waits for one share of a unit wait for all of its shares."""
        group_of = {position: group for group in self._groups.values() for position in group}
        spread: list[list[int]] = []
        for needed in self.needs:
            all_of: dict[int, None] = {}
            for found in needed:
                all_of.update(dict.fromkeys(group_of.get(found, (found,))))
            spread.append(list(all_of))
        self.needs = spread
        starts = frozenset(accumulate(map(len, self.resources.values()), initial=0))
        for (kind, _), group in self._groups.items():
            if kind in COMPUTE_KINDS:
                # Shares begin together, once the actions listed before each of them have ended.
                before = [position - 1 for position in group if position not in starts]
                together = dict.fromkeys(p for at in group for p in self.needs[at])
                together.update(dict.fromkeys(before))
                for position in group:
                    self.needs[position] = list(together)

    def _sort(self, rank: int, actions: Sequence[Action]) -> None:
        compute, computed = self._resource_queue(f"{rank}{COMPUTE}")
        resources: dict[tuple[Kind, int], tuple[list[Action], list[int]]] = {}
        left, newly_left = _NOWHERE, _NOWHERE
        stored: list[Action] = []
        coming: list[Action] = []
        for action in actions:
            kind = action.kind
            if kind in COMPUTE_KINDS:
                if compute and compute[-1] in self._streams:
                    self._awaited[action] = self._streams[compute[-1]]
                if coming:
                    self._streams[action], coming = coming, []
                compute.append(action)
                computed.append(left)
                left = newly_left
                continue
            if action.part is not None and kind in TRANSFERS:
                resource, places = self._resource_queue(f"{rank}.{self._resource_name(action)}")
            else:
                key = (kind, action.stage)
                if key not in resources:
                    resources[key] = self._resource_queue(f"{rank}.{self._resource_name(action)}")
                resource, places = resources[key]
            resource.append(action)
            streams = action.part is not None and is_kv_copy(action)
            if streams and kind in ("O", "S") and compute:
                # These run beside the last compute, so they wait for the compute before that.
                self._streams.setdefault(compute[-1], []).append(action)
                places.append(len(compute) - 2)
                continue
            places.append(len(compute) - 1)
            if streams and kind in ("K", "L"):
                coming.append(action)
            elif kind == "D":
                newly_left = len(resource) - 1
                if len(stored) > 1:
                    self._room[action] = stored[-2]
            elif kind == "S" and not streams:
                stored.append(action)

    def _resource_queue(self, name: str) -> tuple[list[Action], list[int]]:
        return self.resources.setdefault(name, []), self._places.setdefault(name, [])

    def _positions(self) -> list[int]:
        """Returns `_places` as positions: by position, a position or `_NOWHERE`."""
        starts = dict(
            zip(
                self.resources,
                accumulate(map(len, self.resources.values()), initial=0),
                strict=False,
            )
        )
        found: list[int] = []
        for name, places in self._places.items():
            rank = name.partition(".")[0]
            other = f"{rank}.{_BESIDE['D']}" if name.endswith(COMPUTE) else f"{rank}{COMPUTE}"
            start = starts.get(other, 0)
            found += [start + place if place >= 0 else _NOWHERE for place in places]
        return found

    def _resource_name(self, action: Action) -> str:
        kind, stage = action.kind, action.stage
        if kind in _BESIDE:
            return _BESIDE[kind]
        message = self._messages.get(action)
        if message is not None:
            sends = action == message.send
            return f"send {message.target}" if sends else f"recv {message.source}"
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
        if kind not in self._at:
            self._at[kind] = self._nothing(kind)
        return self._at[kind]

    def _needs(self, position: int, action: Action) -> list[int]:
        kind, stage, unit, _, part = action
        num_units, at = self._num_units, self._at
        here = stage * num_units + unit
        waited = self._waited[position]
        needed: list[int] = []
        if kind == "F":
            if stage:
                received = at["RECV_F"][here] if "RECV_F" in at else _NOWHERE
                needed.append(at["F"][here - num_units] if received < 0 else received)
            if not self._first[unit]:
                needed.append(at["F"][here - 1])
        elif kind == "B" or kind == "I":
            needed.append(self._of("F")[here])
            if stage + 1 < len(self._stage_ranks):
                received = at["RECV_B"][here] if "RECV_B" in at else _NOWHERE
                needed.append(self._at_backward[here + num_units] if received < 0 else received)
            if not self._first[unit + 1] and unit + 1 < num_units:
                needed.append(self._at_backward[here + 1])
            if "D" in at and at["D"][here] >= 0:
                needed.append(self._of("H")[here])
        else:
            if part is None:
                self._add_others(needed, kind, here)
            elif kind not in _PLAIN or not is_kv_copy(action):
                self._add_parts(needed, action)
            if kind == "D" and action in self._room:
                needed.append(self._position(self._room[action]))
        if waited >= 0:
            needed.append(waited)
        return needed

    def _add_others(self, needed: list[int], kind: Kind, here: int) -> None:
        """Adds the dependencies of actions other than forward and backward."""
        if kind == "RECV_F":
            needed.append(self._of("SEND_F")[here - self._num_units])
        elif kind == "RECV_B":
            needed.append(self._of("SEND_B")[here + self._num_units])
        elif kind == "W":
            needed.append(self._of("I")[here])
        elif kind == "H":
            needed.append(self._of("D")[here])
            if "L" in self._at and self._at["L"][here] >= 0:
                needed.append(self._at["L"][here])
        elif kind == "S":
            needed.append(self._of("D")[here])
        elif kind == "L":
            needed.append(self._of("S")[here])
        elif kind in ("D", "SEND_F"):
            needed.append(self._of("F")[here])
        elif kind == "SEND_B":
            needed.append(self._at_backward[here])
        if kind in ("SEND_F", "SEND_B"):
            self._add_link(needed, kind, here)

    def _add_link(self, needed: list[int], kind: Kind, here: int) -> None:
        """Adds a send's other dependencies: its unit's copies of K/V, and the receiver."""
        made = self._of("F")[here] if kind == "SEND_F" else self._at_backward[here]
        if self._streams and made >= 0:
            needed += map(self._position, self._streams.get(self.actions[made], ()))
        step = _PEERS[kind][1] * self._num_units
        receive = self._of("RECV_F" if kind == "SEND_F" else "RECV_B")[here + step]
        if receive >= 0 and self._waited[receive] >= 0:
            needed.append(self._waited[receive])

    def _add_parts(self, needed: list[int], action: Action) -> None:
        """Adds the dependencies of one rank's share of a unit, or of a piece of a message."""
        kind, stage, unit = action[:3]
        message = self._messages.get(action)
        if message is None:
            share = unit_share(action)
            if kind in ("H", "L"):
                behind = Action("L" if kind == "H" else "S", stage, unit, None, store_part(share))
                if kind == "L" or behind in self._alone:
                    needed.append(self._position(behind))
            if kind != "L":
                sources: dict[Kind, Kind] = {"W": "I", "H": "D", "S": "D"}
                source = sources.get(kind, "F")
                needed.append(self._position(Action(source, stage, unit, None, share)))
        elif action == message.receive:
            needed.append(self._position(message.send))
        else:
            needed.append(self._position(message.producer))
            needed += map(self._position, self._streams.get(message.producer, ()))
            receive = self._alone.get(message.receive, _NOWHERE)
            if receive >= 0 and self._waited[receive] >= 0:
                needed.append(self._waited[receive])

    def _position(self, action: Action) -> int:
        here = action.stage * self._num_units + action.unit
        if action.part is None:
            return self._of(action.kind)[here]
        # A missing action is encoded without its part.
        return self._alone.get(action, -2 - _NUMBER[action.kind] * self._size - here)

    def _missing(self) -> str:
        """Returns the error message for the first dependency that no rank has."""
        position = next(at for at, needed in enumerate(self.needs) if needed and min(needed) < 0)
        action = self.actions[position]
        return (
            f"{action} needs an action that no rank has: its forward, its chunk's neighbour, the "
            "stage next to it or its transfer. `validate` says which."
        )
