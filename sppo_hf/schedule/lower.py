"""Lowering: passes that add transfers, copies and reductions to a schedule of compute.

Each takes a Schedule and returns a longer one; compute actions keep their order. Which units are
offloaded is decided by the caller.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import accumulate, chain

from sppo_hf.schedule.actions import COMPUTE_KINDS, Action, Kind, kv_copy_part, store_part
from sppo_hf.schedule.dependencies import DependencyGraph
from sppo_hf.schedule.messages import Message, messages
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import simulate_positions

UnitTest = Callable[[int, int], bool]
"""Takes (stage, unit); returns whether something is to be done with that unit."""

_BACKWARDS: tuple[Kind, ...] = ("B", "I")

KVCopy = tuple[Kind, int, int, int]
"""Copy of K/V beside a unit: (kind, stage, chunk, part) with kind "K", "O" and, for tiers behind
the host, "S", "L"; see `actions.kv_copy_part`."""

KVCopies = Container[KVCopy]


def lower(
    schedule: Schedule,
    *,
    offloaded: UnitTest = lambda stage, unit: False,
    stored: UnitTest = lambda stage, unit: False,
    kv_copies: KVCopies = (),
    reduce: bool = False,
) -> Schedule:
    """Returns a schedule of compute with everything that runs beside it.

    Args:
        schedule: compute alone, as the generators make it.
        offloaded: whether any of a unit's saved activations are offloaded; none by default.
        stored: whether any of those are stored on a tier behind the host.
        kv_copies: copies of K/V beside units.
        reduce: whether gradients are reduced over data-parallel replicas of the pipeline.
    """
    schedule = add_kv_copies(add_offload(schedule, offloaded, stored), kv_copies)
    return add_transfers(add_reductions(schedule) if reduce else schedule)


def add_transfers(schedule: Schedule, *, receives_ahead: int = 1) -> Schedule:
    """Adds a send after what another rank needs, and a receive before it is needed there.

    A link carries messages in the order in which they are sent, so receives of one link are listed
    in that order: some earlier than their own use would have it. A receive is listed after all that
    its message waits for on its own rank: on a GPU whatever waits for the device waits for started
    receives, too, and a rank that does so before it has sent what they wait for would never end.

    Args:
        schedule: without sends and receives.
        receives_ahead: how many compute actions before its use a receive is listed, so that its
            buffer is there and the transfer runs beside them. Receives are started where they are
            listed, and awaited by what needs them. With 0 a rank may as well wait at each receive:
            that costs the time of every transfer, and saves a unit's buffer.
    """
    places = _Places(schedule)
    links: dict[tuple[int, int], list[Message]] = {}
    for message in messages(schedule).values():
        links.setdefault((message.source, message.target), []).append(message)
    many = Counter(m.producer for m in chain(*links.values()) if m.send.kind == "SEND_DKV")
    # Only delayed messages depend on when computes run.
    turns = _compute_turns(schedule) if max(many.values(), default=0) > 2 else {}
    latest_computes = _latest_computes(schedule, chain(*links.values()))
    for (source, target), sent in links.items():
        made = dict(zip(sent, _sending_steps(places, source, sent, turns), strict=True))
        if len(made) > 1:
            sent.sort(key=lambda message: made[message])
        steps = _receiving_steps(places, target, sent, receives_ahead)
        for at, message in enumerate(sent):
            last = schedule.ranks[source][made[message]]
            if last in latest_computes:
                own = latest_computes[last][target] + 1
                steps[at] = max(steps[at], places.compute(target, own, message.consumer))
        # Receives keep the order of the sends, so each is listed no later than those after it.
        latest = list(accumulate(reversed(steps), min))[::-1]
        for message, step in zip(sent, latest, strict=True):
            places.add_after(source, made[message], message.send)
            places.add_before(target, step, message.receive)
    return places.schedule()


def _compute_turns(schedule: Schedule) -> dict[Action, float]:
    """Returns each compute's start if all take one unit of time, which orders dependent ones."""
    graph = DependencyGraph(schedule.keep(lambda action: action.kind in COMPUTE_KINDS))
    seconds = [1.0] * len(graph.actions)
    timeline = simulate_positions(graph.resources, seconds=seconds, needs=graph.needs)
    return {
        span.action: span.start_seconds
        for resource in timeline.resources
        for span in timeline.spans(resource)
    }


def _sending_steps(
    places: _Places, source: int, sent: Sequence[Message], turns: Mapping[Action, float]
) -> list[int]:
    """Returns the step after which each message of a link is sent: its producer's, mostly.

    A backward may produce many dK/dV sums at once, which are needed one by one: the first two are
    sent at once, the others one compute later each, to bound the receiver's buffers; but never
    after a compute that starts with the message's consumer or later, which might wait for it.
    """
    before: dict[Action, int] = {}
    steps: list[int] = []
    for message in sent:
        if message.send.kind != "SEND_DKV":
            steps.append(places.step(source, message.producer))
            continue
        count = before[message.producer] = before.get(message.producer, -1) + 1
        late = max(0, count - 1)
        steps.append(places.last_before(source, message.producer, late, message.consumer, turns))
    return steps


def _receiving_steps(
    places: _Places, target: int, sent: Sequence[Message], ahead: int
) -> list[int]:
    """Returns the step before which each message of a link would be received by itself.

    Of several messages for one consumer (K/V of many chunks for the first shared one) the last is
    received `ahead` computes before it, each other one compute earlier.
    """
    later: dict[Action, int] = {}
    steps: list[int] = []
    for message in reversed(sent):
        count = later[message.consumer] = later.get(message.consumer, 0) + 1
        steps.append(places.receive(target, message.consumer, ahead + count - 1))
    return steps[::-1]


def _latest_computes(schedule: Schedule, sent: Iterable[Message]) -> dict[Action, list[int]]:
    """Returns, for each compute, the last compute of every rank that must begin before it ends.

    By its turn among the rank's computes, -1 if there is none. A consumer waits for its messages'
    producers, a share of a unit for the others. What waits in a deadlock is left out.
    """
    producers: dict[Action, list[Action]] = defaultdict(list)
    for message in sent:
        producers[message.consumer].append(message.producer)
    waiting = [deque(a for a in rank if a.kind in COMPUTE_KINDS) for rank in schedule.ranks]
    turns = [-1] * schedule.num_ranks
    reached = [turns.copy() for _ in turns]
    found: dict[Action, list[int]] = {}
    advances = True
    while advances:
        advances = False
        for rank, queue in enumerate(waiting):
            while queue:
                unit, shared = queue[0][:3], queue[0].part is not None
                ranks = schedule.unit_ranks(*unit[1:]) if shared else (rank,)
                shares = [waiting[one][0] for one in ranks if waiting[one]]
                needed = [one for share in shares for one in producers.get(share, ())]
                begins = [share[:3] for share in shares] == [unit] * len(ranks)
                if not begins or any(one not in found for one in needed):
                    break
                before = [*(reached[one] for one in ranks), *(found[one] for one in needed)]
                latest = [max(of_rank) for of_rank in zip(*before, strict=True)]
                for one, share in zip(ranks, shares, strict=True):
                    waiting[one].popleft()
                    turns[one] = latest[one] = turns[one] + 1
                    found[share] = reached[one] = latest
                advances = True
    return found


def add_reductions(schedule: Schedule) -> Schedule:
    """Adds each stage's gradient reduction where its gradients are complete.

    That is after the last of its backwards (weight gradients where they are split), so that the
    first stages to end reduce while others still compute.
    """
    places = _Places(schedule)
    for rank, actions in enumerate(schedule.ranks):
        last = {a.stage: (step, a) for step, a in enumerate(actions) if a.kind in ("B", "W")}
        for stage, (step, action) in last.items():
            # Ranks that share a stage's units send weight gradients to the stage's own rank.
            if schedule.stage_ranks[stage] == rank:
                places.add_after(rank, step, Action("REDUCE_GRAD", stage, action.unit))
    return places.schedule()


def add_kv_copies(schedule: Schedule, kv_copies: KVCopies) -> Schedule:
    """Adds copies of K/V beside their units: in before the unit, out after it.

    Each rank that shares a unit has copies of its own heads. `dependencies` says when they run.
    """
    if not kv_copies:
        return schedule
    ranks: list[tuple[Action, ...]] = []
    for actions in schedule.ranks:
        longer: list[Action] = []
        for action in actions:
            if action.kind not in ("F", *_BACKWARDS):
                longer.append(action)
                continue
            _, stage, unit, _, part = action
            chunk, way = schedule.chunk(action), 0 if action.kind == "F" else 1
            kinds: tuple[tuple[Kind, int], ...]
            kinds = (("L", way + 1), ("K", way), ("O", way), ("S", way + 1))
            beside = [
                Action(kind, stage, unit, None, kv_copy_part(at, part))
                for kind, at in kinds
                if (kind, stage, chunk, at) in kv_copies
            ]
            coming = sum(one.kind in ("L", "K") for one in beside)
            longer += [*beside[:coming], action, *beside[coming:]]
        ranks.append(tuple(longer))
    return Schedule(tuple(ranks), schedule.chunks)


def add_offload(
    schedule: Schedule, offloaded: UnitTest, stored: UnitTest = lambda stage, unit: False
) -> Schedule:
    """Adds a copy to the host after each offloaded unit's forward, and a prefetch before backward.

    The prefetch begins one backward of its rank early, so that saved activations of one unit are on
    the device beside those in use. Costs decide how many bytes of a unit are copied. A unit whose
    backward follows its forward at once is not offloaded.

    Args:
        schedule: with backwards.
        offloaded: whether a unit is offloaded.
        stored: whether an offloaded unit is stored on a tier behind the host; it is read from there
            one unit before it is copied back.
    """
    places = _Places(schedule)
    for rank, actions in enumerate(schedule.ranks):
        backwards = [action for action in actions if action.kind in _BACKWARDS]
        turns = {action[1:3]: turn for turn, action in enumerate(backwards)}
        for action in actions:
            turn = turns.get(action[1:3])
            if action.kind != "F" or turn is None or not offloaded(*action[1:3]):
                continue
            # The compute before the first backward counts as one.
            ahead, early = backwards[max(turn - 1, 0)], int(turn == 0)
            fetched = places.compute_before(rank, ahead, early)
            used = places.step(rank, backwards[turn])
            # Prefetched only after it was copied out, beside at least one unit.
            begin = max(fetched, places.compute_after(rank, action, 2))
            if places.compute_after(rank, action, 1) >= used:
                continue
            places.add_after(rank, places.step(rank, action), _like(action, "D"))
            if stored(*action[1:3]):
                store = _like(action, "S")._replace(part=store_part(action.part))
                places.add_after(rank, places.step(rank, action), store)
                read = places.compute_before(rank, ahead, early + 1)
                read = max(read, places.compute_after(rank, action, 1))
                places.add_before(rank, min(read, begin, used), _like(store, "L"))
            places.add_before(rank, min(begin, used), _like(action, "H"))
    return places.schedule()


class _Places:
    """A schedule, and the actions to insert before and after each of its steps."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._before: list[dict[int, list[Action]]] = [{} for _ in schedule.ranks]
        self._after: list[dict[int, list[Action]]] = [{} for _ in schedule.ranks]
        self._compute: list[list[int]] = []
        """Steps of the compute actions, by rank."""
        self._turns: dict[Action, int] = {}
        """Index of each compute action among those of its rank."""
        for rank in schedule.ranks:
            steps = [step for step, action in enumerate(rank) if action.kind in COMPUTE_KINDS]
            self._turns.update((rank[step], turn) for turn, step in enumerate(steps))
            self._compute.append(steps)

    def step(self, rank: int, compute: Action) -> int:
        """Returns a compute's place in its rank's list."""
        return self._compute[rank][self._turns[compute]]

    def receive(self, rank: int, used: Action, ahead: int) -> int:
        """Returns before which step a receive is listed: not before its unit's own forward."""
        step = self.compute_before(rank, used, ahead)
        if used.kind == "F":
            return step
        forward = _like(used, "F")
        return max(step, self.compute_after(rank, forward, 1)) if forward in self._turns else step

    def compute_before(self, rank: int, compute: Action, count: int) -> int:
        """Returns the step of the compute `count` before a compute, or of the rank's first."""
        return self._compute[rank][max(self._turns[compute] - count, 0)]

    def compute_after(self, rank: int, compute: Action, count: int) -> int:
        """Returns the step of the compute `count` after a compute, or of the rank's last."""
        steps = self._compute[rank]
        return steps[min(self._turns[compute] + count, len(steps) - 1)]

    def compute(self, rank: int, turn: int, latest: Action) -> int:
        """Returns the step of the rank's compute of a turn, or of `latest` if that is before it."""
        return self._compute[rank][min(turn, self._turns[latest])]

    def last_before(
        self, rank: int, compute: Action, count: int, used: Action, turns: Mapping[Action, float]
    ) -> int:
        """Returns the step of the compute `count` after a compute, or of one whose turn is early.

        That is the last one, not before `compute`, whose turn is over when `used` begins.
        """
        steps, first = self._compute[rank], self._turns[compute]
        last = min(first + count, len(steps) - 1)
        actions = self._schedule.ranks[rank]
        while last > first and turns[actions[steps[last]]] >= turns[used]:
            last -= 1
        return steps[last]

    def add_after(self, rank: int, step: int, action: Action) -> None:
        """Lists an action behind a step's, and behind what was put there before."""
        self._after[rank].setdefault(step, []).append(action)

    def add_before(self, rank: int, step: int, action: Action) -> None:
        """Lists an action ahead of a step's compute, and behind what was put there before."""
        self._before[rank].setdefault(step, []).append(action)

    def schedule(self) -> Schedule:
        """Returns the longer schedule."""
        ranks: list[tuple[Action, ...]] = []
        for actions, before, after in zip(
            self._schedule.ranks, self._before, self._after, strict=True
        ):
            longer: list[Action] = []
            for step, action in enumerate(actions):
                if step in before:
                    longer += before[step]
                longer.append(action)
                if step in after:
                    longer += after[step]
            ranks.append(tuple(longer))
        return Schedule(tuple(ranks), self._schedule.chunks)


def _like(action: Action, kind: Kind) -> Action:
    """Returns the same action with another kind; several times faster than `_replace`."""
    return Action(kind, action[1], action[2], action[3], action[4])
