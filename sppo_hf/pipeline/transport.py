"""Messages between the ranks of a pipeline: hidden states one way, their gradients the other.

Both ends know shapes from the plan. A send is started when its tensor is there and kept until it
has arrived; a receive is started when the schedule lists it, into a buffer made then, and awaited
by whoever takes it. On CUDA all of it is ordered on streams and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from sppo_hf.errors import PipelineError
from sppo_hf.pipeline.mesh import PipelineMesh


class Transport:
    """The messages of one step, of one rank."""

    def __init__(self, mesh: PipelineMesh) -> None:
        self._mesh = mesh
        self._sending: list[tuple[Any, Tensor]] = []
        self._coming: dict[Hashable, tuple[Any, Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """Where messages arrive."""
        return self._mesh.device

    def send(self, tensor: Tensor, target: int) -> None:
        """Start sending to a rank of the pipeline; the tensor must not be written to any more."""
        # Gloo says so only when it is waited for; there, sent tensors stay until the step's end.
        self._sending = [(work, x) for work, x in self._sending if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        group = self._mesh.links[self._mesh.pp_rank, target]
        work = dist.isend(tensor, self._mesh.world_rank(target), group=group)
        self._sending.append((work, tensor))

    def receive(
        self, key: Hashable, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> None:
        """Start receiving from a rank of the pipeline; `take` it by `key`."""
        buffer = torch.empty(shape, dtype=dtype, device=self._mesh.device)
        group = self._mesh.links[source, self._mesh.pp_rank]
        work = dist.irecv(buffer, self._mesh.world_rank(source), group=group)
        self._coming[key] = (work, buffer)

    def take(self, key: Hashable) -> Tensor:
        """The message of `key`, once it is here.

        Raises:
            PipelineError: Nobody started to receive it: the schedule is wrong.
        """
        if key not in self._coming:
            raise PipelineError(f"{key} is needed before its receive was started.")
        work, buffer = self._coming.pop(key)
        work.wait()
        return buffer

    def finish(self) -> None:
        """Wait until everything has been sent.

        Raises:
            PipelineError: Something came that nobody took.
        """
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        if self._coming:
            raise PipelineError(f"received and never used: {sorted(map(str, self._coming))}.")
