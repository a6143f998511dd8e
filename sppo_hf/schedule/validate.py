"""The validator: whether a schedule is whole, in a right order, and can run to its end.

What actions need of each other is what simulation waits for (`dependencies`); here it must also be
listed first on each rank. An error names the action, its rank and step, what is wrong and what is
allowed, and shows the grid around it.

[Note: why chunks run backward in reverse] A chunk's queries attend to the keys and values of all
chunks before it, so its backward adds to their gradients. Those of a chunk are complete only once
the backward of every later chunk of the same micro-batch has run on the same stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import NamedTuple, NoReturn

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import (
    KIND_NAMES,
    Action,
    Kind,
    is_stream,
    share_part,
    stream_share,
    stream_way,
)
from sppo_hf.schedule.dependencies import DependencyGraph
from sppo_hf.schedule.grid import show_marked
from sppo_hf.schedule.messages import SENDS, TRANSFERS, Message, messages
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import DeadlockError, simulate_positions

_ENDS: frozenset[Kind] = frozenset({"B", "W"})
_UNIT: tuple[Kind, ...] = ("F", "B", "I", "W")


def validate(schedule: Schedule) -> None:
    """Checks a schedule of any origin.

    Sends and receives must be there wherever stages are on different ranks, or nowhere: then the
    schedule is one of compute, and what a rank computes counts as at hand on all. The same goes for
    backwards (a schedule of forwards alone is an evaluation) and for reductions.

    Raises:
        ScheduleError: something is missing, there twice, on a wrong rank or in a wrong order; sends
            and receives do not match; or ranks wait for each other.
    """
    check = _Check(schedule)
    check.stages()
    for rank in range(schedule.num_ranks):
        check.order(rank)
    check.whole()
    check.links()
    check.runs()


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
            simulate_positions(waits.lanes, seconds=[0.0] * len(waits.needs), needs=waits.needs)
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
