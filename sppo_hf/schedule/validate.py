"""The validator: whether a schedule is whole, in a right order, and can run to its end.

Knows what actions need of each other; nothing of seconds or bytes. An error names the action, its
rank and step, what is wrong and what is allowed, and shows the grid around it.

[Note: why chunks run backward in reverse] A chunk's queries attend to the keys and values of all
chunks before it, so its backward adds to their gradients. Those of a chunk are complete only once
the backward of every later chunk of the same micro-batch has run on the same stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, NoReturn

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import KIND_NAMES, Action, Kind
from sppo_hf.schedule.grid import show_marked
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import DeadlockError, simulate_positions
from sppo_hf.schedule.waits import Waits

_TRANSFERS: frozenset[Kind] = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
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
        self._transfers = bool(kinds & _TRANSFERS)
        self._training = bool(kinds & {"B", "I", "W"})
        self._done: set[Action] = set()
        self._rules: dict[Kind, Callable[[Action], Iterator[_Fault]]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weight,
            "R": self._weight,
            "D": self._copy,
            "H": self._copy,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._receive,
            "RECV_B": self._receive,
            "REDUCE_GRAD": self._reduction,
        }

    # -- whole schedule ------------------------------------------------------------------------

    def stages(self) -> None:
        """Checks that every stage is on one rank, and that no chunk is left out at the end."""
        home: dict[int, Action] = {}
        for action, (rank, _) in self._where.items():
            first = home.setdefault(action.stage, action)
            if self._where[first][0] != rank:
                wrong = f"is on rank {rank}, but stage {action.stage} is on {self._place(first)}"
                self._fail(action, self._where[action], wrong, "all of a stage on one rank")
        # Refuses gaps in the numbers of stages.
        self._ranks = self._schedule.stage_ranks
        first = self._schedule.first_units
        if self._schedule.num_units not in (first[-1], 0):
            last = max(self._where, key=lambda action: action.unit)
            self._fail(
                last,
                self._where[last],
                f"is of the highest unit, so that there are {self._schedule.num_units} units",
                f"{first[-1]}, so that {len(first) - 1} micro-batches have all their chunks",
            )

    def order(self, rank: int) -> None:
        """Checks that all that an action needs of its own rank is listed before it."""
        self._done = set()
        for step, action in enumerate(self._schedule.ranks[rank]):
            rule = self._rules.get(action.kind)
            if rule is None or action.layer is not None or action.part is not None:
                self._fail(
                    action,
                    (rank, step),
                    "has no place in a schedule over ranks",
                    f"whole stages and units, and kinds {', '.join(self._rules)}",
                )
            for fault in rule(action):
                self._fail(action, (rank, step), fault.wrong, fault.allowed)
            self._done.add(action)

    def whole(self) -> None:
        """Checks that every stage carries out every unit, forward and back."""
        reduced = {a.stage for a in self._where if a.kind == "REDUCE_GRAD"}
        for stage, rank in enumerate(self._ranks):
            for unit in range(self._schedule.num_units):
                found = "".join(k for k in _UNIT if Action(k, stage, unit) in self._where)
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
            if action.kind in _TRANSFERS:
                other = self._other_end(action)
                peer = self._ranks[other.stage]
                if action.kind.startswith("SEND"):
                    sent.setdefault((rank, peer), []).append(other)
                else:
                    received.setdefault((peer, rank), []).append(action)
        for link, order in received.items():
            for expected, action in zip(sent[link], order, strict=True):
                if action != expected:
                    self._fail(
                        action,
                        self._where[action],
                        f"is received from rank {link[0]} where that rank sends "
                        f"{self._other_end(expected)}",
                        "receives in the order of the sends, for a link keeps it",
                        also=[self._other_end(expected)],
                    )

    def runs(self) -> None:
        """Checks that no ranks wait for each other."""
        waits = Waits(self._schedule)
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

    def _forward(self, action: Action) -> Iterator[_Fault]:
        _, stage, unit, _, _ = action
        if self._schedule.chunk(action):
            before = action._replace(unit=unit - 1)
            yield from self._listed(before, "the keys and values of the chunk before it")
        if stage:
            yield from self._input(action, action._replace(stage=stage - 1), "RECV_F", "activation")

    def _backward(self, action: Action) -> Iterator[_Fault]:
        _, stage, unit, _, _ = action
        if self._other_half(action) in self._done:
            yield _Fault("comes beside another backward of its unit", "B, or I and W")
        yield from self._listed(Action("F", stage, unit), "its forward")
        if not self._schedule.ends_micro_batch(action):
            behind = self._backward_of(stage, unit + 1)
            what = "which completes the gradients of its keys and values (chunks run in reverse)"
            yield from self._listed(behind, what)
        if stage + 1 < len(self._ranks):
            made = self._backward_of(stage + 1, unit)
            yield from self._input(action, made, "RECV_B", "gradient")
        if Action("D", stage, unit) in self._done:
            yield from self._listed(Action("H", stage, unit), "its frame, which left the device")

    def _weight(self, action: Action) -> Iterator[_Fault]:
        needed = action._replace(kind="I" if action.kind == "W" else "F")
        yield from self._listed(needed, f"its {KIND_NAMES[needed.kind]}")

    def _copy(self, action: Action) -> Iterator[_Fault]:
        needed = action._replace(kind="F" if action.kind == "D" else "D")
        yield from self._listed(needed, "what it copies")
        backward = self._backward_of(action.stage, action.unit)
        if backward in self._done:
            yield _Fault(f"comes after {backward}, which used the frame up", "copies before that")

    def _send(self, action: Action) -> Iterator[_Fault]:
        yield from self._peer(action)
        made = Action("F", action.stage, action.unit)
        if action.kind == "SEND_B":
            made = self._backward_of(action.stage, action.unit)
        yield from self._listed(made, "what it sends")

    def _receive(self, action: Action) -> Iterator[_Fault]:
        yield from self._peer(action)
        kind: Kind = "F"
        used = Action(kind, action.stage, action.unit)
        if action.kind == "RECV_B":
            used = self._backward_of(action.stage, action.unit)
        if used not in self._where:
            yield _Fault(f"is used by nobody: there is no {used}", "receives that are used")

    def _reduction(self, action: Action) -> Iterator[_Fault]:
        stage = action.stage
        ends = [a for a in self._where if a.kind in _ENDS and a.stage == stage]
        late = [str(a) for a in ends if a not in self._done]
        if late or not ends:
            which = f"{', '.join(late[:3])}{' ...' if len(late) > 3 else ''}" or "any backward"
            yield _Fault(
                f"comes before {which}, whose gradients it lacks",
                f"after every B and W of stage {stage}",
            )
        if any(a.kind == "REDUCE_GRAD" and a.stage == stage for a in self._done):
            yield _Fault("is the second of its stage", "one REDUCE_GRAD of each stage")

    def _input(self, action: Action, made: Action, receive: Kind, what: str) -> Iterator[_Fault]:
        """An action's input from the stage next to it, on this rank or received from another."""
        if self._ranks[made.stage] == self._ranks[action.stage]:
            yield from self._listed(made, f"its {what}")
        elif self._transfers:
            received = action._replace(kind=receive)
            yield from self._listed(received, f"its {what} from rank {self._ranks[made.stage]}")
        elif made not in self._where:
            yield _Fault(f"needs {made}, which no rank has", f"its {what} from stage {made.stage}")

    def _peer(self, action: Action) -> Iterator[_Fault]:
        """The other end of a transfer: a stage on another rank, which lists it too."""
        other = self._other_end(action)
        if not 0 <= other.stage < len(self._ranks):
            yield _Fault(f"has no other end: there is no stage {other.stage}", "stages that exist")
        elif self._ranks[other.stage] == self._ranks[action.stage]:
            yield _Fault(
                f"has its other end, stage {other.stage}, on the same rank",
                "transfers between ranks; on one rank the next stage finds what it needs",
            )
        elif other not in self._where:
            yield _Fault(f"has no match: no rank has {other}", "sends and receives in pairs")

    def _listed(self, needed: Action, what: str) -> Iterator[_Fault]:
        if needed in self._done:
            return
        where = f"at {self._place(needed)}" if needed in self._where else "nowhere"
        yield _Fault(f"needs {needed}, {what}; that is {where}", f"{needed} earlier on its rank")

    # -- words ---------------------------------------------------------------------------------

    def _backward_of(self, stage: int, unit: int) -> Action:
        split = Action("I", stage, unit)
        return split if split in self._where else Action("B", stage, unit)

    def _other_half(self, action: Action) -> Action:
        return action._replace(kind="I" if action.kind == "B" else "B")

    def _other_end(self, action: Action) -> Action:
        word, _, letter = action.kind.partition("_")
        step = 1 if (word == "SEND") == (letter == "F") else -1
        kinds: dict[str, Kind] = {
            "SEND_F": "RECV_F",
            "RECV_F": "SEND_F",
            "SEND_B": "RECV_B",
            "RECV_B": "SEND_B",
        }
        return Action(kinds[action.kind], action.stage + step, action.unit)

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
