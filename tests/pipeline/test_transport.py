"""Messages: by key, in a buffer of their own, kept until sent; what nobody takes is an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sppo_hf.errors import PipelineError
from sppo_hf.pipeline import transport as module
from sppo_hf.pipeline.executor import Transport


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
    """What is asked of torch.distributed, which is replaced; sent tensors are kept by peer."""
    lines: list[str] = []

    def isend(tensor: Tensor, rank: int, *, group: str) -> Work:
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        lines.append(f"isend to {rank} by {group}")
        return Work(lines, "send")

    def irecv(tensor: Tensor, rank: int, *, group: str) -> Work:
        lines.append(f"irecv from {rank} by {group}")
        return Work(lines, "receive", lambda: tensor.fill_(rank))

    monkeypatch.setattr(module, "dist", SimpleNamespace(isend=isend, irecv=irecv))
    return lines


def make() -> Transport:
    # Ranks 4 to 7 of all are a pipeline of four; this is its rank 1.
    links = {(a, b): f"{a}>{b}" for a in range(4) for b in range(4)}
    mesh = SimpleNamespace(
        pp_rank=1, links=links, device=torch.device("cpu"), world_rank=lambda rank: 4 + rank
    )
    return Transport(mesh)  # type: ignore[arg-type]


def test_sends_and_receives_go_by_the_groups_of_their_direction(log: list[str]) -> None:
    transport = make()
    transport.send(torch.ones(3, 2).T.requires_grad_(), 2)
    transport.send(torch.ones(2), 0)
    transport.receive("a", (2, 3), torch.float64, 0)
    transport.receive("b", (1,), torch.float32, 2)
    assert log == [
        *("isend to 6 by 1>2", "isend to 4 by 1>0"),
        *("irecv from 4 by 0>1", "irecv from 6 by 2>1"),
    ]


def test_a_message_is_awaited_by_who_takes_it(log: list[str]) -> None:
    transport = make()
    transport.receive("a", (2, 3), torch.float64, 0)
    transport.receive("b", (1,), torch.float32, 2)
    assert "wait receive" not in log
    taken = transport.take("b")
    assert log.count("wait receive") == 1
    assert torch.equal(taken, torch.tensor([6.0]))
    taken = transport.take("a")
    assert torch.equal(taken, torch.full((2, 3), 4.0, dtype=torch.float64))
    transport.finish()


def test_what_nobody_started_to_receive_cannot_be_taken(log: list[str]) -> None:
    transport = make()
    transport.receive("a", (1,), torch.float32, 0)
    transport.take("a")
    for key in ("a", "b"):
        with pytest.raises(PipelineError, match=f"{key} is needed before its receive was started"):
            transport.take(key)


def test_what_nobody_took_is_an_error(log: list[str]) -> None:
    transport = make()
    transport.receive("a", (1,), torch.float32, 0)
    with pytest.raises(PipelineError, match=r"received and never used: \['a'\]"):
        transport.finish()


def test_all_sends_are_awaited_once(log: list[str]) -> None:
    transport = make()
    for _ in range(3):
        transport.send(torch.ones(2), 2)
    transport.finish()
    transport.finish()
    assert log.count("wait send") == 3
