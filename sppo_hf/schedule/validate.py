"""Validation of a schedule: it is complete, in a correct order, and runs to its end.

The rules of what needs what are those of simulation (`dependencies`). Here a dependency on the same
rank must also be listed earlier. An error names the action, its rank and step, what is wrong and
what is allowed, and shows the grid around it. Takes 10 to 15 microseconds an action; every schedule
is validated once before it is run.

[Note: why chunks run backward in reverse] A chunk's queries attend to the keys and values of all
chunks before it, so its backward adds to their gradients. Those of a chunk are complete only once
the backward of every later chunk of the same micro-batch has run on the same stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import NamedTuple, NoReturn

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import (
    KIND_NAMES,
    Action,
    Kind,
    is_kv_copy,
    kv_copy_pass,
    kv_copy_share,
    unit_share,
)
from sppo_hf.schedule.dependencies import DependencyGraph
from sppo_hf.schedule.messages import SENDS, TRANSFERS, Message, messages
from sppo_hf.schedule.schedule import Schedule, show_marked
from sppo_hf.schedule.simulate import DeadlockError, simulate_positions

_UNIT_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


def validate(schedule: Schedule) -> None:
    """Checks a schedule of any origin.

    Three things are in all places or in none: sends and receives between ranks (without them the
    output of one rank counts as available on all), backwards (a schedule of forwards alone is an
    evaluation), and gradient reductions.

    Raises:
        ScheduleError: an action is missing, repeated, on a wrong rank or in a wrong order; sends
            and receives do not match; or ranks wait for each other.
    """
    validator = _Validator(schedule)
    validator.check_places()
    for rank in range(schedule.num_ranks):
        validator.check_order(rank)
    validator.check_complete()
    validator.check_links()
    validator.check_deadlock()


class _Fault(NamedTuple):
    wrong: str
    """Error of an action; follows its name in the message."""
    allowed: str
    """Description of what would be accepted."""


class _Validator:
    """One validation; the checks are called in the order in which `validate` lists them."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._where: dict[Action, tuple[int, int]] = {}
        """(rank, step) of every action."""
        for rank, actions in enumerate(schedule.ranks):
            for step, action in enumerate(actions):
                if action in self._where:
                    wrong = f"is there twice, first at {self._place(action)}"
                    self._fail(action, (rank, step), wrong, "each action once", also=[action])
                self._where[action] = rank, step
        kinds = {action.kind for action in self._where}
        self._has_transfers = bool(kinds & TRANSFERS)
        self._has_backward = bool(kinds & {"B", "I", "W"})
        self._listed: set[Action] = set()
        """Actions of the rank under `check_order` that are listed before the current one."""
        self._reduced_stages: set[int] = set()
        self._rules: dict[Kind, Callable[[Action], Iterator[_Fault]]] = {
            **dict.fromkeys(("F", "W", "D", "H"), self._dependency_faults),
            **dict.fromkeys(("B", "I"), self._backward_faults),
            **dict.fromkeys(("S", "L", "K", "O"), self._copy_faults),
            **dict.fromkeys(TRANSFERS, self._transfer_faults),
            "REDUCE_GRAD": self._reduction_faults,
        }

    # -- the whole schedule --------------------------------------------------------------------

    def check_places(self) -> None:
        """Checks that each action is of a known kind, on its stage's rank, of a whole micro-batch.

        Sets what the other checks read: the stages' ranks and the messages.
        """
        first_of_stage: dict[int, Action] = {}
        for action, (rank, _) in self._where.items():
            if action.part is not None:
                continue
            first = first_of_stage.setdefault(action.stage, action)
            if self._where[first][0] != rank:
                wrong = f"is on rank {rank}, but stage {action.stage} is on {self._place(first)}"
                self._fail(action, self._where[action], wrong, "all of a stage on one rank")
        # Raises where numbers of stages, or of a unit's shares, have gaps.
        self._stage_ranks = self._schedule.stage_ranks
        self._messages = messages(self._schedule)
        self._received = {message.receive: message for message in self._messages.values()}
        self._consumed = defaultdict[Action, list[Message]](list)
        for message in self._messages.values():
            self._consumed[message.consumer].append(message)
        for action, place in self._where.items():
            if action.kind not in self._rules or action.layer is not None:
                wrong = "has no place in a schedule over ranks"
                allowed = f"whole stages and units, and kinds {', '.join(self._rules)}"
                self._fail(action, place, wrong, allowed)
            if action.kind in TRANSFERS and self._message(action) is None:
                self._fail(action, place, *self._unmatched_fault(action))
            self._check_share(action, place)
        first_units = self._schedule.first_units
        if self._schedule.num_units not in (first_units[-1], 0):
            last = max(self._where, key=lambda action: action.unit)
            self._fail(
                last,
                self._where[last],
                f"is of the highest unit, so that there are {self._schedule.num_units} units",
                f"{first_units[-1]}, so that {len(first_units) - 1} micro-batches have all their "
                "chunks",
            )

    def _check_share(self, action: Action, place: tuple[int, int]) -> None:
        """Checks that an action with a part is this rank's share of a shared unit, and only those.

        A unit's shares, and which ranks have them, are those of its forward.
        """
        shared = self._schedule.shared_units.get(action[1:3])
        if action.part is None:
            if shared and action.kind not in TRANSFERS and action.kind != "REDUCE_GRAD":
                self._fail(action, place, "is of a shared unit", "one action for each #part")
            return
        if action.kind in TRANSFERS:
            return
        if is_kv_copy(action):
            share, ranks = kv_copy_share(action), shared or (self._stage_ranks[action.stage],)
            wrong = "is not of a unit of this rank, or not of its share"
            allowed = "K/V beside what the rank computes"
        else:
            share, ranks = unit_share(action) or 0, shared or ()
            wrong = "is no share of a unit whose forward this rank shares as that part"
            allowed = "the same ranks and parts in all of a unit"
        if share >= len(ranks) or ranks[share] != place[0]:
            self._fail(action, place, wrong, allowed)

    def check_order(self, rank: int) -> None:
        """Checks that every dependency of an action on its own rank is listed before it."""
        self._listed = set()
        for step, action in enumerate(self._schedule.ranks[rank]):
            for fault in self._rules[action.kind](action):
                self._fail(action, (rank, step), *fault)
            self._listed.add(action)

    def check_complete(self) -> None:
        """Checks that every stage has every unit's forward and, in training, backward."""
        reduced = {action.stage for action in self._where if action.kind == "REDUCE_GRAD"}
        present = {
            (kind, stage, unit) for kind, stage, unit, _, part in self._where if part is None
        }
        for stage, unit in self._schedule.shared_units:
            for kind in _UNIT_KINDS:
                shares = self._schedule.unit_actions(kind, stage, unit)
                if all(share in self._where for share in shares):
                    present.add((kind, stage, unit))
        complete = ("FB", "FIW") if self._has_backward else ("F",)
        for stage, rank in enumerate(self._stage_ranks):
            for unit in range(self._schedule.num_units):
                found = "".join([k for k in _UNIT_KINDS if (k, stage, unit) in present])
                if found not in complete:
                    self._fail_at_end(
                        rank,
                        f"Unit {unit} of stage {stage} has {' and '.join(found) or 'no action'}",
                        " or ".join(" and ".join(kinds) for kinds in complete)
                        + (", as gradients are computed" if self._has_backward else ""),
                    )
            if reduced and stage not in reduced:
                self._fail_at_end(
                    rank,
                    f"The gradients of stage {stage} are not reduced, those of stage "
                    f"{min(reduced)} are",
                    "a REDUCE_GRAD of every stage, or of none",
                )

    def check_links(self) -> None:
        """Checks that messages from one rank to another are received in the order of their sends.

        A link between two ranks is first in, first out.
        """
        expected = defaultdict[tuple[int, int], list[Action]](list)
        received = defaultdict[tuple[int, int], list[Action]](list)
        for action, (rank, _) in self._where.items():
            if action.kind in SENDS:
                message = self._messages[action]
                expected[rank, message.target].append(message.receive)
            elif action.kind in TRANSFERS:
                received[self._received[action].source, rank].append(action)
        for link, actions in received.items():
            for due, action in zip(expected[link], actions, strict=True):
                if action != due:
                    send = self._received[due].send
                    self._fail(
                        action,
                        self._where[action],
                        f"is received from rank {link[0]} where that rank sends {send}",
                        "receives in the order of the sends, for a link keeps it",
                        also=[send],
                    )

    def check_deadlock(self) -> None:
        """Checks that no ranks wait for each other."""
        graph = self._graph
        if any(needed and min(needed) < 0 for needed in graph.needs):
            graph = DependencyGraph(self._schedule)  # raises, and names what is missing
        try:
            simulate_positions(graph.resources, seconds=[0.0] * len(graph.needs), needs=graph.needs)
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
    def _needs(self) -> dict[Action, list[int]]:
        """Entries of `DependencyGraph.needs`, by action."""
        return dict(zip(self._graph.actions, self._graph.needs, strict=True))

    @cached_property
    def _last_backwards(self) -> dict[int, list[Action]]:
        """Whole backwards and weight gradients of each stage, which complete its gradients."""
        found = defaultdict[int, list[Action]](list)
        for action in self._where:
            if action.kind in ("B", "W"):
                found[action.stage].append(action)
        return found

    def _dependency_faults(self, action: Action) -> Iterator[_Fault]:
        listed, where, actions = self._listed, self._where, self._graph.actions
        for found in self._needs[action]:
            needed = actions[found] if found >= 0 else self._graph.needed(found)
            # Looked up first: nearly all are there, and making the message takes time.
            if needed in listed:
                continue
            if needed not in where or where[needed][0] == where[action][0]:
                yield from self._unlisted(needed, self._purpose(action, needed))
        # Where transfers are listed at all, input of other ranks must have been received.
        for message in self._consumed.get(action, ()) if self._has_transfers else ():
            if message.receive not in listed:
                yield from self._unlisted(message.receive, self._purpose(action, message.receive))

    def _backward_faults(self, action: Action) -> Iterator[_Fault]:
        if Action("I" if action.kind == "B" else "B", *action[1:]) in self._listed:
            yield _Fault("comes beside another backward of its unit", "B, or I and W")
        yield from self._dependency_faults(action)

    def _copy_faults(self, action: Action) -> Iterator[_Fault]:
        """K/V are copied in before their unit and out after it."""
        if not is_kv_copy(action):
            yield from self._dependency_faults(action)
            return
        # 0 beside a forward and 1 beside a backward; "S" and "L" count one more.
        of_pass = -1 if action.part is None else kv_copy_pass(action) - (action.kind in ("S", "L"))
        kinds: tuple[Kind, ...] = ("F",) if of_pass == 0 else ("B", "I")
        units = [
            self._schedule.unit_action(kind, *action[1:3], kv_copy_share(action)) for kind in kinds
        ]
        if of_pass not in (0, 1) or not any(unit in self._where for unit in units):
            yield _Fault("is beside no unit", "part 0 of a forward and 1 of a backward")
        copies_in = action.kind in ("K", "L")
        if copies_in == any(unit in self._listed for unit in units):
            when = "before" if copies_in else "after"
            yield _Fault("is on the wrong side of its unit", f"{action.kind} {when} it")

    def _transfer_faults(self, action: Action) -> Iterator[_Fault]:
        """The other end of a transfer is on another rank, which lists it too."""
        message = self._message(action)
        assert message is not None, "`check_places` refuses transfers without a message"
        sends = action == message.send
        rank, other = self._where[action][0], message.receive if sends else message.send
        if rank != (message.source if sends else message.target):
            yield _Fault(f"is on rank {rank}", f"rank {message.source} sends to {message.target}")
        elif other not in self._where:
            yield _Fault(f"has no match: no rank has {other}", "sends and receives in pairs")
        elif sends:
            yield from self._unlisted(message.producer, "what it sends")

    def _reduction_faults(self, action: Action) -> Iterator[_Fault]:
        stage = action.stage
        backwards, rank = self._last_backwards.get(stage, []), self._stage_ranks[stage]
        late = [
            str(backward)
            for backward in backwards
            if backward not in self._listed and self._where[backward][0] == rank
        ]
        if late or not backwards:
            which = f"{', '.join(late[:3])}{' ...' if len(late) > 3 else ''}" or "any backward"
            yield _Fault(
                f"comes before {which}, whose gradients it lacks",
                f"after every B and W of stage {stage}",
            )
        if stage in self._reduced_stages:
            yield _Fault("is the second of its stage", "one REDUCE_GRAD of each stage")
        self._reduced_stages.add(stage)

    def _message(self, action: Action) -> Message | None:
        """The message that a transfer is an end of."""
        return self._messages.get(action) or self._received.get(action)

    def _unmatched_fault(self, action: Action) -> _Fault:
        """Explains why no message of this schedule has such an end."""
        word, _, letter = action.kind.partition("_")
        if letter in ("F", "B"):
            other = action.stage + (1 if (word == "SEND") == (letter == "F") else -1)
            if not 0 <= other < len(self._stage_ranks):
                return _Fault(f"has no other end: there is no stage {other}", "stages that exist")
            if self._stage_ranks[other] == self._stage_ranks[action.stage]:
                return _Fault(
                    f"has its other end, stage {other}, on the same rank",
                    "transfers between ranks; on one rank the next stage finds what it needs",
                )
        if word == "SEND":
            return _Fault("sends what no other rank needs", "what the next unit needs")
        return _Fault("receives what no other rank makes", "what this rank's units need")

    # -- messages to the user ------------------------------------------------------------------

    def _purpose(self, action: Action, needed: Action) -> str:
        """Describes what an action needs another one for."""
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
            return "its saved activations, which are offloaded"
        if needed[1:3] == action[1:3]:
            return f"its {KIND_NAMES[needed.kind]}"
        if needed.stage != action.stage:
            return "its activation" if action.kind == "F" else "its gradient"
        if action.kind == "F":
            return "the keys and values of the chunk before it"
        return "which completes the gradients of its keys and values (chunks run in reverse)"

    def _unlisted(self, needed: Action, purpose: str) -> Iterator[_Fault]:
        if needed in self._listed:
            return
        where = f"at {self._place(needed)}" if needed in self._where else "nowhere"
        yield _Fault(f"needs {needed}, {purpose}; that is {where}", f"{needed} earlier on its rank")

    def _place(self, action: Action) -> str:
        if action not in self._where:
            return "which is nowhere"
        rank, step = self._where[action]
        return f"rank {rank}, step {step}"

    def _fail_at_end(self, rank: int, wrong: str, allowed: str) -> NoReturn:
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
