"""The validator: whether a schedule is whole, in a right order, and can run to its end.

What actions need of each other is what simulation waits for (`dependencies`); here it must also be
listed first on each rank. An error names the action, its rank and step, what is wrong and what is
allowed, and shows the grid around it.

Nearly every schedule is right and of whole units, and every one is validated before it is run, so
that is found out first, on arrays: `is_plainly_right`. Only what it does not pass, a wrong schedule
or one whose units are shared or whose keys and values wait elsewhere, is gone through action by
action, which alone may refuse it.

[Note: why chunks run backward in reverse] A chunk's queries attend to the keys and values of all
chunks before it, so its backward adds to their gradients. Those of a chunk are complete only once
the backward of every later chunk of the same micro-batch has run on the same stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import (
    COMPUTE_KINDS,
    KIND_NAMES,
    Action,
    Kind,
    is_stream,
    share_part,
    stream_share,
    stream_way,
)
from sppo_hf.schedule.dependencies import DependencyGraph
from sppo_hf.schedule.messages import SENDS, TRANSFERS, Message, messages
from sppo_hf.schedule.schedule import Schedule, show_marked
from sppo_hf.schedule.simulate import DeadlockError, simulate_positions

_ENDS: frozenset[Kind] = frozenset({"B", "W"})
_UNIT: tuple[Kind, ...] = ("F", "B", "I", "W")
_PLAIN: tuple[Kind, ...] = (
    *("F", "B", "I", "W", "D", "H", "S", "L"),
    *("SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD"),
)
"""Kinds that a schedule of whole units has."""
_NUMBER = {kind: number for number, kind in enumerate(_PLAIN)}
_COMPUTES = np.array([kind in COMPUTE_KINDS for kind in _PLAIN])
_Steps = NDArray[np.int64]
"""[stage, unit] at which step of its rank an action is listed; -1 where there is none."""


def validate(schedule: Schedule) -> None:
    """Checks a schedule of any origin.

    Sends and receives must be there wherever stages are on different ranks, or nowhere: then the
    schedule is one of compute, and what a rank computes counts as at hand on all. The same goes for
    backwards (a schedule of forwards alone is an evaluation) and for reductions.

    Raises:
        ScheduleError: something is missing, there twice, on a wrong rank or in a wrong order; sends
            and receives do not match; or ranks wait for each other.
    """
    if not is_plainly_right(schedule):
        explain(schedule)


def explain(schedule: Schedule) -> None:
    """Does what `validate` does, action by action: ten times slower, for every schedule.

    Raises:
        ScheduleError: as there.
    """
    check = _Check(schedule)
    check.stages()
    for rank in range(schedule.num_ranks):
        check.order(rank)
    check.whole()
    check.links()
    check.runs()


def is_plainly_right(schedule: Schedule) -> bool:
    """Whether a schedule has whole units only and breaks no rule.

    Where this is false nothing is said yet; `explain` decides. About 0.3 microseconds an action.
    """
    steps = _PlainSteps.of(schedule)
    return (
        steps is not None
        and steps.whole()
        and steps.in_order()
        and (not steps.transfers or steps.links_keep_order())
        and steps.runs()
    )


class _PlainSteps:
    """Where a schedule of whole units lists everything: its rules as comparisons of arrays."""

    def __init__(
        self,
        steps: NDArray[np.int64],
        homes: NDArray[np.int64],
        computes: list[NDArray[np.int64]],
        starts: Sequence[int],
    ) -> None:
        self._at: dict[Kind, _Steps] = dict(zip(_PLAIN, steps, strict=True))
        self._homes = homes
        """[stage] its rank."""
        self._computes = computes
        """By rank, the steps of what occupies it."""
        self._follows = np.ones(steps.shape[2], bool)
        self._follows[list(starts)] = False
        """[unit] Whether it has a chunk before it in its micro-batch."""
        forward, whole, inputs = (self._at[kind] for kind in ("F", "B", "I"))
        self._backward = np.maximum(whole, inputs)
        """Whole or split, it is a backward's first part that others wait for."""
        crosses = (homes[1:] != homes[:-1])[:, None] & np.ones(forward.shape[1], bool)
        self._crosses = crosses
        """[stage - 1, unit] Whether what passes between two stages passes between ranks."""
        self.transfers = any((self._at[kind] >= 0).any() for kind in _PLAIN if kind in TRANSFERS)
        self._training = bool((self._backward >= 0).any() or (self._at["W"] >= 0).any())

    @classmethod
    def of(cls, schedule: Schedule) -> _PlainSteps | None:
        """Returns the steps of a schedule, or None where they cannot be written as arrays.

        That is where units are shared, layers named or kinds unknown, an action is there twice, a
        stage on two ranks, a micro-batch not whole, or a number larger than in any whole schedule
        of that length.
        """
        count = sum(map(len, schedule.ranks))
        filled = [actions for actions in schedule.ranks if actions]
        if not count:
            return None
        columns = [tuple(zip(*actions, strict=True)) for actions in filled]
        for kinds, stages, units, layers, parts in columns:
            if {*layers, *parts} != {None} or not _NUMBER.keys() >= set(kinds):
                return None
            if min(min(stages), min(units)) < 0 or max(max(stages), max(units)) >= count:
                return None
        kind, stage, unit = (
            np.fromiter(chain.from_iterable(column), np.int64, count)
            for column in (
                (map(_NUMBER.__getitem__, kinds) for kinds, *_ in columns),
                (stages for _, stages, *_ in columns),
                (units for _, _, units, *_ in columns),
            )
        )
        num_stages, num_units = int(stage.max()) + 1, int(unit.max()) + 1
        counts = schedule.chunks
        if isinstance(counts, int):
            counts = (counts,) * (num_units // counts) if counts > 0 else ()
        if min(counts, default=0) < 1 or sum(counts) != num_units or num_stages * num_units > count:
            return None  # A micro-batch is not whole, or not every unit has a forward.
        lengths = np.array(list(map(len, schedule.ranks)))
        ends = np.cumsum(lengths)
        rank = np.repeat(np.arange(len(lengths)), lengths)
        step = np.arange(count) - (ends - lengths)[rank]
        homes = np.full(num_stages, -1)
        homes[stage] = rank
        steps = np.full(len(_PLAIN) * num_stages * num_units, -1)
        steps[(kind * num_stages + stage) * num_units + unit] = step
        if (homes[stage] != rank).any() or (homes < 0).any() or (steps >= 0).sum() != count:
            return None
        computes = np.split(np.where(_COMPUTES[kind], step, -1), ends[:-1])
        return cls(
            steps.reshape(len(_PLAIN), num_stages, num_units),
            homes,
            [steps[steps >= 0] for steps in computes],
            list(accumulate(counts[:-1], initial=0)),
        )

    def whole(self) -> bool:
        """Whether every stage carries out every unit of whole micro-batches, forward and back."""
        forward, whole, inputs, weights = (self._at[kind] >= 0 for kind in _UNIT)
        if self._training and not ((whole != inputs) & (inputs == weights)).all():
            return False
        reduced = (self._at["REDUCE_GRAD"] >= 0).sum(axis=1)
        once = (reduced == 1).all() and self._training
        return bool(forward.all() and (once or not reduced.any()))

    def in_order(self) -> bool:
        """Whether all that an action needs of its own rank is listed before it."""
        at, backward = self._at, self._backward
        forward, crosses = at["F"], self._crosses
        if self.transfers:
            # Ends of messages are there where something passes between ranks, and nowhere else.
            sent = crosses & (backward[1:] >= 0)
            for first, then, needed in (
                (at["SEND_F"][:-1], at["RECV_F"][1:], crosses),
                (at["SEND_B"][1:], at["RECV_B"][:-1], sent),
            ):
                if not (((first >= 0) == needed) & ((then >= 0) == needed)).all():
                    return False
            ends = (at["SEND_F"][-1], at["RECV_F"][0], at["SEND_B"][0], at["RECV_B"][-1])
            if any((end >= 0).any() for end in ends):
                return False
        follows = self._follows[1:]
        kept = at["D"] < 0
        near = (
            (forward[:-1], forward[1:], ~crosses),
            (forward[:, :-1], forward[:, 1:], follows),
            (forward, at["D"], ~kept),
            (at["D"], at["H"], at["H"] >= 0),
            (at["D"], at["S"], at["S"] >= 0),
            (at["S"], at["L"], at["L"] >= 0),
            (at["L"], at["H"], (at["L"] >= 0) & (at["H"] >= 0)),
        )
        back = (
            (forward, backward, True),
            (backward[1:], backward[:-1], ~crosses),
            (backward[:, 1:], backward[:, :-1], follows),
            (at["H"], backward, ~kept),
            (at["I"], at["W"], at["W"] >= 0),
            (
                np.maximum(at["B"], at["W"]).max(axis=1),
                at["REDUCE_GRAD"].max(axis=1),
                self._reduces,
            ),
        )
        passed = (
            (at["RECV_F"][1:], forward[1:], crosses),
            (forward, at["SEND_F"], at["SEND_F"] >= 0),
            (at["RECV_B"], backward, at["RECV_B"] >= 0),
            (backward, at["SEND_B"], at["SEND_B"] >= 0),
        )
        rules = (*near, *(back if self._training else ()), *(passed if self.transfers else ()))
        return all(_listed(first, then, where) for first, then, where in rules)

    @property
    def _reduces(self) -> bool:
        return bool((self._at["REDUCE_GRAD"] >= 0).any())

    def links_keep_order(self) -> bool:
        """Whether what one rank sends another is received in the same order."""
        here, there = self._homes[:-1, None], self._homes[1:, None]
        ends: list[list[NDArray[np.int64]]] = [[], [], []]
        size = len(self._computes)
        for first, then, link in (
            (self._at["SEND_F"][:-1], self._at["RECV_F"][1:], here * size + there),
            (self._at["SEND_B"][1:], self._at["RECV_B"][:-1], there * size + here),
        ):
            sent = first >= 0
            ends[0].append(first[sent])
            ends[1].append(then[sent])
            ends[2].append(np.broadcast_to(link, sent.shape)[sent])
        sends, receives, links = map(np.concatenate, ends)
        return np.array_equal(np.lexsort((sends, links)), np.lexsort((receives, links)))

    def runs(self) -> bool:
        """Whether no ranks wait for each other.

        What runs beside compute needs only what is listed before it on its rank, but for transfers:
        a receive awaits its send, and that begins once all computes listed before it are done. So
        each compute needs the one before it and, where something comes from another rank, so many
        of that rank's computes.
        """
        counts = [np.zeros(len(steps), np.int64) for steps in self._computes]
        sources = [np.zeros(len(steps), np.int64) for steps in self._computes]
        homes: list[int] = self._homes.tolist()
        ways: list[tuple[Kind, _Steps, int]] = [("SEND_F", self._at["F"], 1)]
        if self._training:
            ways.append(("SEND_B", self._backward, -1))
        for send, made, way in ways:
            for stage, source in enumerate(homes):
                to = stage + way
                if not 0 <= to < len(homes) or homes[to] == source:
                    continue
                target = homes[to]
                needed: NDArray[np.int64] = made[to]
                turns = np.searchsorted(self._computes[target], needed)
                # Without transfers what is made is at hand once it is done.
                until = self._at[send][stage] if self.transfers else made[stage] + 1
                counts[target][turns] = np.searchsorted(self._computes[source], until)
                sources[target][turns] = source
        return _play([rank.tolist() for rank in counts], [rank.tolist() for rank in sources])


def _listed(first: _Steps, then: _Steps, where: NDArray[np.bool_] | bool) -> bool:
    """Whether `first` is there and listed before `then`, wherever that is asked."""
    return bool((((first >= 0) & (first < then)) | np.logical_not(where)).all())


def _play(counts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]]) -> bool:
    """Whether all ranks come to their end.

    Args:
        counts: [rank, compute] how many computes another rank must have done before; 0: none.
        sources: [rank, compute] which rank that is.
    """
    done = [0] * len(counts)
    waiting: list[list[int]] = [[] for _ in counts]
    """By rank, those that wait for it."""
    runnable = list(range(len(counts)))
    while runnable:
        rank = runnable.pop()
        count, source, at = counts[rank], sources[rank], done[rank]
        while at < len(count) and done[source[at]] >= count[at]:
            at += 1
        if at < len(count):
            waiting[source[at]].append(rank)
        if at > done[rank]:
            done[rank] = at
            runnable += waiting[rank]
            waiting[rank] = []
    return all(at == len(needed) for at, needed in zip(done, counts, strict=True))


class _Fault(NamedTuple):
    wrong: str
    """What is wrong with an action, to follow its name."""
    allowed: str
    """What would be right."""


class _Check:
    """A validation under way."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._where: dict[Action, tuple[int, int]] = {}
        """(rank, step) of every action."""
        for rank, actions in enumerate(schedule.ranks):
            for step, action in enumerate(actions):
                if action in self._where:
                    self._fail(
                        action, (rank, step), self._twice(action), "each action once", also=[action]
                    )
                self._where[action] = rank, step
        kinds = {action.kind for action in self._where}
        self._transfers = bool(kinds & TRANSFERS)
        self._training = bool(kinds & {"B", "I", "W"})
        self._done: set[Action] = set()
        self._reduced: set[int] = set()
        """Stages whose reduction is done."""
        self._rules: dict[Kind, Callable[[Action], Iterator[_Fault]]] = {
            "F": self._needs,
            "B": self._backward,
            "I": self._backward,
            "W": self._needs,
            "R": self._needs,
            "D": self._needs,
            "H": self._needs,
            **dict.fromkeys(("S", "L", "K", "O"), self._beside),
            **dict.fromkeys(TRANSFERS, self._transfer),
            "REDUCE_GRAD": self._reduction,
        }

    # -- whole schedule ------------------------------------------------------------------------

    def stages(self) -> None:
        """Checks that every stage is on one rank, and that no chunk is left out at the end."""
        home: dict[int, Action] = {}
        for action, (rank, _) in self._where.items():
            if action.part is not None:
                continue
            first = home.setdefault(action.stage, action)
            if self._where[first][0] != rank:
                wrong = f"is on rank {rank}, but stage {action.stage} is on {self._place(first)}"
                self._fail(action, self._where[action], wrong, "all of a stage on one rank")
        # Refuses gaps in the numbers of stages, and of shares.
        self._ranks = self._schedule.stage_ranks
        self._messages = messages(self._schedule)
        self._received = {message.receive: message for message in self._messages.values()}
        self._used: dict[Action, list[Message]] = {}
        for message in self._messages.values():
            self._used.setdefault(message.used, []).append(message)
        for action, place in self._where.items():
            if action.kind not in self._rules or action.layer is not None:
                wrong = "has no place in a schedule over ranks"
                allowed = f"whole stages and units, and kinds {', '.join(self._rules)}"
                self._fail(action, place, wrong, allowed)
            if action.kind in TRANSFERS and not self._message(action):
                fault = self._unpaired(action)
                self._fail(action, place, fault.wrong, fault.allowed)
            self._part(action, place)
        first = self._schedule.first_units
        if self._schedule.num_units not in (first[-1], 0):
            last = max(self._where, key=lambda action: action.unit)
            self._fail(
                last,
                self._where[last],
                f"is of the highest unit, so that there are {self._schedule.num_units} units",
                f"{first[-1]}, so that {len(first) - 1} micro-batches have all their chunks",
            )

    def _part(self, action: Action, place: tuple[int, int]) -> None:
        """Checks that shares are of units that are shared as they are, and others of whole ones."""
        shared = self._schedule.shared_units.get(action[1:3])
        if is_stream(action):
            share, ranks = stream_share(action), shared or (self._ranks[action.stage],)
            if share >= len(ranks) or ranks[share] != place[0]:
                wrong = "is not of a unit of this rank, or not of its share"
                self._fail(action, place, wrong, "K/V beside what the rank computes")
        elif action.part is None or action.kind in TRANSFERS:
            if action.part is None and shared and action.kind != "REDUCE_GRAD":
                self._fail(action, place, "is of a shared unit", "one action for each #part")
        else:
            share = share_part(action) or 0
            if shared is None or share >= len(shared) or shared[share] != place[0]:
                wrong = "is no share of a unit whose forward this rank shares as that part"
                self._fail(action, place, wrong, "the same ranks and parts in all of a unit")

    def order(self, rank: int) -> None:
        """Checks that all that an action needs of its own rank is listed before it."""
        self._done = set()
        for step, action in enumerate(self._schedule.ranks[rank]):
            rule = self._rules[action.kind]
            for fault in rule(action):
                self._fail(action, (rank, step), fault.wrong, fault.allowed)
            self._done.add(action)

    def whole(self) -> None:
        """Checks that every stage carries out every unit, forward and back."""
        reduced = {a.stage for a in self._where if a.kind == "REDUCE_GRAD"}
        shared = self._schedule.shared_units
        there: dict[Kind, set[tuple[int, int]]] = {kind: set() for kind in _UNIT}
        for kind, stage, unit, _, part in self._where:
            if part is None and kind in there:
                there[kind].add((stage, unit))
        for stage, unit in shared:
            for kind in _UNIT:
                shares = self._schedule.unit_actions(kind, stage, unit)
                if all(share in self._where for share in shares):
                    there[kind].add((stage, unit))
        for stage, rank in enumerate(self._ranks):
            for unit in range(self._schedule.num_units):
                found = "".join([kind for kind in _UNIT if (stage, unit) in there[kind]])
                right = ("FB", "FIW") if self._training else ("F",)
                if found not in right:
                    self._absent(
                        rank,
                        f"Unit {unit} of stage {stage} has {' and '.join(found) or 'no action'}",
                        " or ".join(" and ".join(kinds) for kinds in right)
                        + (", as gradients are computed" if self._training else ""),
                    )
            if reduced and stage not in reduced:
                self._absent(
                    rank,
                    f"The gradients of stage {stage} are not reduced, those of stage "
                    f"{min(reduced)} are",
                    "a REDUCE_GRAD of every stage, or of none",
                )

    def links(self) -> None:
        """Checks that what one rank sends another is received in the same order."""
        sent: dict[tuple[int, int], list[Action]] = {}
        received: dict[tuple[int, int], list[Action]] = {}
        for action, (rank, _) in self._where.items():
            if action.kind in SENDS:
                message = self._messages[action]
                sent.setdefault((rank, message.target), []).append(message.receive)
            elif action.kind in TRANSFERS:
                received.setdefault((self._received[action].source, rank), []).append(action)
        for link, order in received.items():
            for expected, action in zip(sent[link], order, strict=True):
                if action != expected:
                    self._fail(
                        action,
                        self._where[action],
                        f"is received from rank {link[0]} where that rank sends "
                        f"{self._received[expected].send}",
                        "receives in the order of the sends, for a link keeps it",
                        also=[self._received[expected].send],
                    )

    def runs(self) -> None:
        """Checks that no ranks wait for each other."""
        waits = self._graph
        if any(needed and min(needed) < 0 for needed in waits.needs):
            waits = DependencyGraph(self._schedule)  # says what is missing
        try:
            simulate_positions(waits.resources, seconds=[0.0] * len(waits.needs), needs=waits.needs)
        except DeadlockError as error:
            lines = [
                f"  {self._place(action)}: {action} waits for {other}, {self._place(other)}"
                for action, other in error.stuck
            ]
            marks = [self._where[action] for action, _ in error.stuck]
            raise ScheduleError(
                f"{len(lines)} actions wait for each other, a deadlock:\n"
                + "\n".join(lines)
                + "\nAllowed: an order in which each action waits for earlier ones only.\n"
                + show_marked(self._schedule, marks)
            ) from error

    # -- one action ----------------------------------------------------------------------------

    @cached_property
    def _graph(self) -> DependencyGraph:
        return DependencyGraph(self._schedule, complete=False, sent=self._messages)

    @cached_property
    def _needs_of(self) -> dict[Action, list[int]]:
        """What each action waits for, as the graph numbers it."""
        return dict(zip(self._graph.actions, self._graph.needs, strict=True))

    @cached_property
    def _ends(self) -> dict[int, list[Action]]:
        """By stage, what completes its gradients."""
        found: dict[int, list[Action]] = {}
        for action in self._where:
            if action.kind in _ENDS:
                found.setdefault(action.stage, []).append(action)
        return found

    def _needs(self, action: Action) -> Iterator[_Fault]:
        done, where, actions = self._done, self._where, self._graph.actions
        for found in self._needs_of[action]:
            needed = actions[found] if found >= 0 else self._graph.needed(found)
            # Looked up first: nearly all are there, and words for the others take time.
            if needed in done:
                continue
            if needed not in where or where[needed][0] == where[action][0]:
                yield from self._listed(needed, self._why(action, needed))
        # What others have is received, where anything is.
        for message in self._used.get(action, ()) if self._transfers else ():
            if message.receive not in done:
                yield from self._listed(message.receive, self._why(action, message.receive))

    def _beside(self, action: Action) -> Iterator[_Fault]:
        """Keys and values come before their unit and leave behind it."""
        if not is_stream(action):
            yield from self._needs(action)
            return
        way = -1 if action.part is None else stream_way(action) - (action.kind in ("S", "L"))
        kinds: tuple[Kind, ...] = ("F",) if way == 0 else ("B", "I")
        units = [
            self._schedule.unit_action(kind, *action[1:3], stream_share(action)) for kind in kinds
        ]
        if way not in (0, 1) or not any(unit in self._where for unit in units):
            yield _Fault("is beside no unit", "part 0 of a forward and 1 of a backward")
        comes, ran = action.kind in ("K", "L"), any(unit in self._done for unit in units)
        if comes == ran:
            when = "before" if comes else "after"
            yield _Fault("is on the wrong side of its unit", f"{action.kind} {when} it")

    def _why(self, action: Action, needed: Action) -> str:
        """What an action needs another for."""
        if needed.kind in TRANSFERS:
            what = {
                "RECV_F": "its activation",
                "RECV_B": "its gradient",
                "RECV_KV": "keys and values of an earlier chunk",
            }.get(needed.kind, "gradients of its keys and values")
            return f"{what} from rank {self._received[needed].source}"
        if action.kind in ("D", "H", "S", "L"):
            return "what it copies"
        if needed.kind == "H":
            return "its frame, which left the device"
        if needed[1:3] == action[1:3]:
            return f"its {KIND_NAMES[needed.kind]}"
        if needed.stage != action.stage:
            return "its activation" if action.kind == "F" else "its gradient"
        if action.kind == "F":
            return "the keys and values of the chunk before it"
        return "which completes the gradients of its keys and values (chunks run in reverse)"

    def _backward(self, action: Action) -> Iterator[_Fault]:
        if self._other_half(action) in self._done:
            yield _Fault("comes beside another backward of its unit", "B, or I and W")
        yield from self._needs(action)

    def _transfer(self, action: Action) -> Iterator[_Fault]:
        """The other end of a transfer is on another rank, which lists it too."""
        message = self._message(action)
        assert message is not None, "those without one were refused"
        sends = action == message.send
        rank, other = self._where[action][0], message.receive if sends else message.send
        if rank != (message.source if sends else message.target):
            yield _Fault(f"is on rank {rank}", f"rank {message.source} sends to {message.target}")
        elif other not in self._where:
            yield _Fault(f"has no match: no rank has {other}", "sends and receives in pairs")
        elif sends:
            yield from self._listed(message.made, "what it sends")

    def _message(self, action: Action) -> Message | None:
        """What a transfer is an end of."""
        return self._messages.get(action) or self._received.get(action)

    def _unpaired(self, action: Action) -> _Fault:
        """Why a transfer is none that this schedule has."""
        word, _, letter = action.kind.partition("_")
        stage = action.stage + (1 if (word == "SEND") == (letter == "F") else -1)
        if letter in ("F", "B") and not 0 <= stage < len(self._ranks):
            return _Fault(f"has no other end: there is no stage {stage}", "stages that exist")
        if letter in ("F", "B") and self._ranks[stage] == self._ranks[action.stage]:
            return _Fault(
                f"has its other end, stage {stage}, on the same rank",
                "transfers between ranks; on one rank the next stage finds what it needs",
            )
        if word == "SEND":
            return _Fault("sends what no other rank needs", "what the next unit needs")
        return _Fault("receives what no other rank makes", "what this rank's units need")

    def _reduction(self, action: Action) -> Iterator[_Fault]:
        stage = action.stage
        ends = self._ends.get(stage, [])
        rank = self._ranks[stage]
        late = [str(a) for a in ends if a not in self._done and self._where[a][0] == rank]
        if late or not ends:
            which = f"{', '.join(late[:3])}{' ...' if len(late) > 3 else ''}" or "any backward"
            yield _Fault(
                f"comes before {which}, whose gradients it lacks",
                f"after every B and W of stage {stage}",
            )
        if stage in self._reduced:
            yield _Fault("is the second of its stage", "one REDUCE_GRAD of each stage")
        self._reduced.add(stage)

    def _listed(self, needed: Action, what: str) -> Iterator[_Fault]:
        if needed in self._done:
            return
        where = f"at {self._place(needed)}" if needed in self._where else "nowhere"
        yield _Fault(f"needs {needed}, {what}; that is {where}", f"{needed} earlier on its rank")

    # -- words ---------------------------------------------------------------------------------

    def _other_half(self, action: Action) -> Action:
        return Action("I" if action.kind == "B" else "B", *action[1:])

    def _place(self, action: Action) -> str:
        if action not in self._where:
            return "which is nowhere"
        rank, step = self._where[action]
        return f"rank {rank}, step {step}"

    def _twice(self, action: Action) -> str:
        return f"is there twice, first at {self._place(action)}"

    def _absent(self, rank: int, wrong: str, allowed: str) -> NoReturn:
        end = len(self._schedule.ranks[rank])
        raise ScheduleError(
            f"{wrong} (rank {rank}, {end} steps). Allowed: {allowed}.\n"
            + show_marked(self._schedule, [(rank, end)])
        )

    def _fail(
        self,
        action: Action,
        place: tuple[int, int],
        wrong: str,
        allowed: str,
        *,
        also: Collection[Action] = (),
    ) -> NoReturn:
        rank, step = place
        marks = [place, *(self._where[other] for other in also if other in self._where)]
        raise ScheduleError(
            f"Rank {rank}, step {step}: {action} ({KIND_NAMES[action.kind]}) {wrong}. "
            f"Allowed: {allowed}.\n" + show_marked(self._schedule, marks)
        )
