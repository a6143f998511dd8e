"""A small stack of layers, run with and without offload; shared by tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sppo_hf.offload.copy_streams import HostCopier
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.host_memory import HostPool
from sppo_hf.offload.layer_offload import LayerOffload, PrefetchOrder

WIDTH = 16
TOKENS = 12
SLAB_BYTES = 2**16
BeforeMove = Callable[[Tensor], object]


class Block(nn.Module):
    """A small layer with fused, sliced, shared and in-place parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_CD: Tensor) -> Tensor:
        gate, up = self.fused(self.norm(hidden_CD)).chunk(2, dim=-1)
        mixed = torch.softmax(gate @ gate.transpose(-1, -2), dim=-1) @ up
        return hidden_CD + self.down(nn.functional.silu(gate).add_(mixed))


def make_blocks(num_layers: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(num_layers))


def cpu_engine(budget_bytes: int | None = None) -> OffloadEngine:
    pool = HostPool(SLAB_BYTES, budget_bytes=budget_bytes)
    return OffloadEngine(HostCopier(), pool, min_offload_elements=8)


class _Watched(LayerOffload):
    """Calls `before_move` with each tensor before it is offloaded."""

    before_move: BeforeMove | None = None

    def _pack(self, tensor: Tensor) -> Any:
        of_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if self.before_move is not None and not of_weight:
            self.before_move(tensor)
        return super()._pack(tensor)


def loss_of(
    blocks: nn.ModuleList,
    hidden_CD: Tensor,
    engine: OffloadEngine | None,
    before_move: BeforeMove | None = None,
    tiers: tuple[str, ...] = ("host",),
) -> Tensor:
    prefetch_order = PrefetchOrder(engine) if engine is not None else None
    for number, block in enumerate(blocks):
        if engine is None or prefetch_order is None:
            hidden_CD = block(hidden_CD)
        else:
            tier = tiers[number % len(tiers)]
            group = _Watched(
                engine, prefetch_order, label=f"layer {number}", tier=tier, number=number
            )
            group.before_move = before_move
            with group:
                hidden_CD = block(hidden_CD)
    return hidden_CD.square().mean()


def gradients_of(blocks: nn.ModuleList, engine: OffloadEngine | None) -> list[Tensor]:
    hidden_CD = torch.linspace(-1, 1, TOKENS * WIDTH).reshape(TOKENS, WIDTH).requires_grad_()
    blocks.zero_grad()
    loss_of(blocks, hidden_CD, engine).backward()
    return [hidden_CD.grad, *(parameter.grad for parameter in blocks.parameters())]


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


def offload_computation(
    engine: OffloadEngine, prefetch_order: PrefetchOrder, body: Callable[[], Tensor]
) -> Tensor:
    with LayerOffload(engine, prefetch_order):
        return body()
