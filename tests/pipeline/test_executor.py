"""The executor: streams of copies, times, failures named; nothing left over."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sppo_hf.errors import PipelineError
from sppo_hf.pipeline import executor
from sppo_hf.pipeline.executor import Executor, Transport
from sppo_hf.pipeline.unit_tensors import UnitTensors
from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.messages import chunk_runs, messages
from sppo_hf.schedule.schedule import Schedule

CHUNKS = 2
SCALE = torch.tensor(0.5)


def _message(number: float, chunk: int) -> Tensor:
    return torch.full((1, chunk + 1, 8), float(number))


class FakeUnits:
    """Notes down what it is asked for; hidden states are numbers that say whose they are."""

    def __init__(self, log: list[str], num_stages: int, *, left: bool = False) -> None:
        self.log = log
        self.last = num_stages - 1
        self.left = left
        self.dtype = torch.float32

    def forward(
        self, stage: int, micro_batch: int, chunk: int, received: Tensor | None
    ) -> Tensor | None:
        assert (received is None) == (stage == 0)
        got = "" if received is None else f" of {received.mean():g}"
        self.log.append(f"forward {stage} {micro_batch}.{chunk}{got}")
        number = 100.0 * stage + CHUNKS * micro_batch + chunk
        return None if stage == self.last else _message(number, chunk).to(self.dtype)

    def before_backward(self) -> None:
        """Adds up nothing."""

    def backward(
        self, stage: int, micro_batch: int, chunk: int, grad: Tensor | None, *, scale: Tensor
    ) -> Tensor | None:
        assert scale is SCALE
        assert (grad is None) == (stage == self.last)
        got = "" if grad is None else f" of {grad.mean():g}"
        self.log.append(f"backward {stage} {micro_batch}.{chunk}{got}")
        number = -100.0 * stage - CHUNKS * micro_batch - chunk
        return None if stage == 0 else _message(number, chunk)

    def chunk_runner(self, stage: int, micro_batch: int, chunk: int) -> Any:
        def begin_stream(of: int, *, backward: bool) -> None:
            assert of == chunk
            self.log.append(f"begin {'backward' if backward else 'forward'} {stage} {chunk}")

        return SimpleNamespace(begin_stream=begin_stream)

    def end_stream(self, stage: int, micro_batch: int, chunk: int) -> None:
        self.log.append(f"end {stage} {chunk}")

    @property
    def is_finished(self) -> bool:
        return not self.left


class FakeTransport:
    """Hands out what the other rank would have sent, and notes down what is sent."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.coming: dict[Any, Tensor] = {}
        self.ended = False

    def send(self, tensor: Tensor, target: int) -> None:
        self.log.append(f"send {tensor.mean():g} to {target}")

    def receive(self, key: Action, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> None:
        assert shape == (1, key.unit % CHUNKS + 1, 8)
        assert dtype == torch.float32
        self.log.append(f"receive {key} from {source}")
        sender = key.stage - 1 if key.kind == "RECV_F" else key.stage + 1
        sign = 1.0 if key.kind == "RECV_F" else -1.0
        self.coming[key] = _message(sign * (100 * sender + key.unit), key.unit % CHUNKS)

    def take(self, key: Action) -> Tensor:
        return self.coming.pop(key)

    def finish(self) -> None:
        self.ended = True


def make(
    schedule: Schedule, rank: int, *, units: FakeUnits, transport: FakeTransport
) -> tuple[Executor, list[Action]]:
    told: list[Action] = []

    def tell(action: Action, words: str) -> None:
        number = len(told)
        assert words.startswith(f"action {number} ({action}: ")
        told.append(action)

    step = SimpleNamespace(
        schedule=schedule, messages=messages(schedule), runs=chunk_runs(schedule)
    )
    prepared: Any = SimpleNamespace(
        step=step,
        bounds=((0, 1), (1, 3)),
        rows=[(row, row + 1) for row in range(schedule.num_micro_batches)],
        plans=SimpleNamespace(dtype=torch.float32),
        weights=None,
    )
    nothing: Any = None
    executor = Executor(
        units,  # type: ignore[arg-type]
        UnitTensors(
            prepared,
            rank,
            transport,  # type: ignore[arg-type]
            message_width=lambda stage: 8,
            group=None,
            layers=nothing,
            head_blocks=None,
            kv_dtype=torch.float32,
            stores=nothing,
        ),
        scale=SCALE,
        reduce=lambda stage: units.log.append(f"reduce {stage}"),
        on_action=tell,
    )
    return executor, told


def test_copies_of_keys_begin_and_end_the_stream_of_their_pass() -> None:
    ways: list[tuple[Kind, int]] = [("L", 1), ("K", 0), ("O", 0), ("S", 1)]
    ways += [("L", 2), ("K", 1), ("O", 1), ("S", 2)]
    copies = {(kind, 1, 1, part) for kind, part in ways}
    schedule = lower(generate("seq1f1b", Size(3, 1, CHUNKS)), kv_copies=copies)
    log: list[str] = []
    units, transport = FakeUnits(log, schedule.num_stages), FakeTransport(log)
    executor, _ = make(schedule, 1, units=units, transport=transport)
    done = executor.run()
    seen = [
        (one.action.kind, one.action.part, line)
        for one, line in zip(done, log, strict=True)
        if one.action.kind in ("L", "K", "O", "S")
    ]
    words = {"L": "begin {} 1 1", "K": "begin {} 1 1", "O": "end 1 1", "S": "end 1 1"}
    passes = [*["forward"] * 4, *["backward"] * 4]
    assert seen == [
        (kind, part, words[kind].format(one))
        for (kind, part), one in zip(ways, passes, strict=True)
    ]


def test_a_wait_is_no_part_of_the_units_own_time() -> None:
    class Late(FakeTransport):
        def take(self, key: Action) -> Tensor:
            time.sleep(0.02)
            return super().take(key)

    schedule = lower(generate("gpipe", Size(2, 1, CHUNKS)))
    log: list[str] = []
    transport = Late(log)
    executor, told = make(schedule, 1, units=FakeUnits(log, 2), transport=transport)
    done = executor.run()
    for one in done:
        waited = one.ready_seconds - one.start_seconds
        assert (waited >= 0.02) == (one.action.kind == "F")
    for one, after in itertools.pairwise(done):
        assert one.start_seconds <= one.ready_seconds <= one.end_seconds <= after.start_seconds
    assert told == [one.action for one in done] == list(schedule.ranks[1])
    assert transport.ended


def test_an_action_that_fails_was_told_in_words() -> None:
    class Broken(FakeUnits):
        def backward(self, *place: Any, **others: Any) -> Tensor | None:
            raise ValueError("a bad number")

    schedule = lower(generate("seq1f1b", Size(2, 2, CHUNKS)))
    executor, _ = make(schedule, 1, units=Broken([], 2), transport=FakeTransport([]))
    said: list[str] = []
    executor.on_action = lambda _, words: said.append(words)
    with pytest.raises(ValueError, match="a bad number"):
        executor.run()
    step = len(said) - 1
    expected = f"action {step} (1B1: backward of stage 1, micro-batch 0, chunk 1)"
    assert said[-1] == expected


def test_an_interrupt_is_raised_unchanged() -> None:
    class Stopped(FakeUnits):
        def forward(self, *place: Any) -> Tensor | None:
            raise KeyboardInterrupt

    schedule = lower(generate("gpipe", Size(2, 1, CHUNKS)))
    executor, _ = make(schedule, 0, units=Stopped([], 2), transport=FakeTransport([]))
    with pytest.raises(KeyboardInterrupt):
        executor.run()


def test_work_left_over_is_an_error() -> None:
    schedule = lower(generate("gpipe", Size(2, 1, CHUNKS)))
    units = FakeUnits([], 2, left=True)
    executor, _ = make(schedule, 0, units=units, transport=FakeTransport([]))
    with pytest.raises(PipelineError, match="rank 0 of the pipeline has work left"):
        executor.run()


def test_hidden_states_that_nobody_sends_are_an_error() -> None:
    whole = lower(generate("gpipe", Size(2, 1, CHUNKS)))
    schedule = whole.keep(lambda action: str(action) != "0SEND_F1")
    executor, _ = make(schedule, 0, units=FakeUnits([], 2), transport=FakeTransport([]))
    with pytest.raises(PipelineError, match="has work left after its last action"):
        executor.run()


def test_hidden_states_of_another_dtype_are_refused() -> None:
    schedule = lower(generate("gpipe", Size(2, 1, CHUNKS)))
    units = FakeUnits([], 2)
    units.dtype = torch.float64
    executor, _ = make(schedule, 0, units=units, transport=FakeTransport([]))
    with pytest.raises(PipelineError, match=r"stage 0 returns hidden states.*float64, .*float32"):
        executor.run()


class Work:
    """A transfer that is done when somebody waited for it."""

    def __init__(self, log: list[str], name: str, arrive: Any = None) -> None:
        self.log, self.name, self.arrive, self.done = log, name, arrive, False

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        if self.arrive is not None:
            self.arrive()
        self.done = True

    def is_completed(self) -> bool:
        return self.done


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log of the calls of torch.distributed, which is replaced."""
    lines: list[str] = []

    def isend(tensor: Tensor, rank: int, *, group: str) -> Work:
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        lines.append(f"isend to {rank} by {group}")
        return Work(lines, "send")

    def irecv(tensor: Tensor, rank: int, *, group: str) -> Work:
        lines.append(f"irecv from {rank} by {group}")
        return Work(lines, "receive", lambda: tensor.fill_(rank))

    monkeypatch.setattr(executor, "dist", SimpleNamespace(isend=isend, irecv=irecv))
    return lines


def make_transport() -> Transport:
    # Ranks 4 to 7 of all are a pipeline of four; this is its rank 1.
    links = {(a, b): f"{a}>{b}" for a in range(4) for b in range(4)}
    mesh = SimpleNamespace(
        pp_rank=1, links=links, device=torch.device("cpu"), world_rank=lambda rank: 4 + rank
    )
    return Transport(mesh)  # type: ignore[arg-type]


def test_sends_and_receives_go_by_the_groups_of_their_direction(log: list[str]) -> None:
    transport = make_transport()
    transport.send(torch.ones(3, 2).T.requires_grad_(), 2)
    transport.send(torch.ones(2), 0)
    transport.receive("a", (2, 3), torch.float64, 0)
    transport.receive("b", (1,), torch.float32, 2)
    assert log == [
        *("isend to 6 by 1>2", "isend to 4 by 1>0"),
        *("irecv from 4 by 0>1", "irecv from 6 by 2>1"),
    ]


def test_a_message_is_waited_for_when_it_is_taken(log: list[str]) -> None:
    transport = make_transport()
    transport.receive("a", (2, 3), torch.float64, 0)
    transport.receive("b", (1,), torch.float32, 2)
    assert "wait receive" not in log
    taken = transport.take("b")
    assert log.count("wait receive") == 1
    assert torch.equal(taken, torch.tensor([6.0]))
    taken = transport.take("a")
    assert torch.equal(taken, torch.full((2, 3), 4.0, dtype=torch.float64))
    transport.finish()


def test_a_message_whose_receive_was_not_started_is_an_error(log: list[str]) -> None:
    transport = make_transport()
    transport.receive("a", (1,), torch.float32, 0)
    transport.take("a")
    for key in ("a", "b"):
        with pytest.raises(PipelineError, match=f"{key} is needed before its receive was started"):
            transport.take(key)


def test_a_received_message_that_is_not_taken_is_an_error(log: list[str]) -> None:
    transport = make_transport()
    transport.receive("a", (1,), torch.float32, 0)
    with pytest.raises(PipelineError, match=r"received and never used: \['a'\]"):
        transport.finish()


def test_all_sends_are_awaited_once(log: list[str]) -> None:
    transport = make_transport()
    for _ in range(3):
        transport.send(torch.ones(2), 2)
    transport.finish()
    transport.finish()
    assert log.count("wait send") == 3
