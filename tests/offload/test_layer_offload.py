"""Frames around real layers: gradients equal to the bit, each storage moved once, nothing left."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from sppo_hf.offload.copy_streams import HostCopier
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.host_memory import HostPool
from sppo_hf.offload.layer_offload import LayerOffload, PrefetchOrder
from sppo_hf.offload.storage import OffloadedTensor
from tests.offload.small_stack import (
    SLAB_BYTES,
    TOKENS,
    WIDTH,
    assert_same,
    cpu_engine,
    gradients_of,
    in_a_frame,
    loss_of,
    make_blocks,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_equal_to_the_bit(dtype: torch.dtype) -> None:
    blocks, engine = make_blocks().to(dtype), cpu_engine()
    hidden_CD = torch.rand(TOKENS, WIDTH, dtype=dtype)

    def gradients(with_engine: OffloadEngine | None) -> list[Tensor]:
        blocks.zero_grad()
        loss_of(blocks, hidden_CD, with_engine).backward()
        return [parameter.grad for parameter in blocks.parameters()]

    assert_same(gradients(engine), gradients(None))
    stats = engine.stats()
    assert stats.d2h_bytes == stats.h2d_bytes > 0
    assert stats.stall_seconds > 0.0
    engine.assert_drained()
    assert stats.host_used_bytes == 0


def test_gradients_are_equal_under_autocast() -> None:
    blocks, engine = make_blocks(), cpu_engine()
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients_of(blocks, None)
        ours = gradients_of(blocks, engine)
    assert_same(ours, plain)
    engine.assert_drained()


def test_aliases_move_once() -> None:
    engine = cpu_engine()
    prefetch_order = PrefetchOrder(engine)
    hidden = torch.rand(50, 30, requires_grad=True)
    with LayerOffload(engine, prefetch_order):
        whole = hidden.sigmoid()  # saves its result
        parts = whole.split(10, dim=1)
        # Each product saves both its operands: views of the same storage.
        loss = (parts[0] * parts[1] * parts[1] * whole.t()[:10].t()).sum()
    product_bytes = 50 * 10 * 4
    assert engine.stats().d2h_bytes == 50 * 30 * 4 + 2 * product_bytes
    loss.backward()
    assert engine.stats().h2d_bytes == engine.stats().d2h_bytes
    engine.assert_drained()


def test_what_one_frame_hands_to_the_next_moves_once() -> None:
    engine = cpu_engine()
    prefetch_order = PrefetchOrder(engine)
    hidden = torch.rand(100, requires_grad=True)
    with LayerOffload(engine, prefetch_order):
        hidden = hidden.exp()
    with LayerOffload(engine, prefetch_order):
        hidden = hidden.square()
    assert engine.stats().d2h_bytes == 400
    hidden.sum().backward()
    assert engine.stats().h2d_bytes == 400


def test_parameters_and_their_views_never_move() -> None:
    engine = cpu_engine()
    prefetch_order = PrefetchOrder(engine)
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    hidden = torch.rand(TOKENS, WIDTH, requires_grad=True)
    with LayerOffload(engine, prefetch_order):
        loss = linear(hidden).sum() + (linear.weight.t() * linear.weight).sum()
    # The layer's input is all that moves.
    assert engine.stats().d2h_bytes == TOKENS * WIDTH * 4
    loss.backward()
    assert hidden.grad is not None


def test_small_tensors_stay() -> None:
    engine = OffloadEngine(HostCopier(), HostPool(SLAB_BYTES), min_offload_elements=100)
    prefetch_order = PrefetchOrder(engine)
    small = torch.rand(99, requires_grad=True)
    loss = in_a_frame(engine, prefetch_order, lambda: small.sin().sum())
    assert engine.stats().d2h_bytes == 0
    loss.backward()
    assert torch.equal(small.grad, small.detach().cos())


def test_frames_come_back_one_ahead() -> None:
    engine, blocks = cpu_engine(), make_blocks()
    prefetch_order = PrefetchOrder(engine)
    hidden_CD = torch.rand(TOKENS, WIDTH)
    log: list[str] = []
    activation_bytes = [0]
    prefetch = engine.prefetch

    def logged(handle: OffloadedTensor) -> None:
        if engine.bytes_to_prefetch([handle]):
            log.append(f"prefetch {handle.label}")
        prefetch(handle)

    engine.prefetch = logged  # type: ignore[method-assign]
    for number, block in enumerate(blocks):
        frame = LayerOffload(engine, prefetch_order, label=number, number=number)
        with frame:
            hidden_CD = block(hidden_CD)
        hidden_CD.register_hook(lambda gradient, number=number: log.append(f"backward {number}"))
        activation_bytes.append(engine.stats().d2h_bytes)
    hidden_CD.sum().backward()
    assert all(one < other for one, other in pairwise(activation_bytes))
    assert [entry for entry, _ in groupby(log)] == [
        "backward 3", "prefetch 3", "prefetch 2",
        "backward 2", "prefetch 1",
        "backward 1", "prefetch 0",
        "backward 0",
    ]  # fmt: skip


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_a_frame(reentrant: bool) -> None:
    engine, blocks = cpu_engine(), make_blocks(2)
    hidden_CD = torch.rand(TOKENS, WIDTH, requires_grad=True)

    def gradients(with_engine: OffloadEngine | None) -> list[Tensor]:
        blocks.zero_grad()
        prefetch_order = (
            PrefetchOrder(cpu_engine()) if with_engine is None else PrefetchOrder(with_engine)
        )
        out = hidden_CD
        for block in blocks:
            if with_engine is None:
                out = block(out)
            else:
                with LayerOffload(with_engine, prefetch_order):
                    out = checkpoint(block, out, use_reentrant=reentrant)
        out.sum().backward()
        return [parameter.grad for parameter in blocks.parameters()]

    assert_same(gradients(engine), gradients(None))
    engine.assert_drained()


def test_hooks_of_others_around_and_inside() -> None:
    engine, blocks = cpu_engine(), make_blocks(2)
    plain = gradients_of(blocks, None)
    with save_on_cpu():
        assert_same(gradients_of(blocks, engine), plain)
    seen: list[int] = []
    original = blocks[0].down.forward

    def with_own_hooks(tensor: Tensor) -> Tensor:
        keep = lambda saved: (seen.append(saved.numel()), saved.detach())[1]  # noqa: E731
        with saved_tensors_hooks(keep, lambda saved: saved):
            return original(tensor)

    blocks[0].down.forward = with_own_hooks  # type: ignore[method-assign]
    assert_same(gradients_of(blocks, engine), plain)
    assert seen
    engine.assert_drained()


def test_a_saved_tensor_may_be_read_twice() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor: Tensor) -> Tensor:
            ctx.save_for_backward(tensor)
            return tensor.square()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            (one,) = ctx.saved_tensors
            (two,) = ctx.saved_tensors
            assert one.data_ptr() == two.data_ptr()
            return gradient * (one + two)

    engine = cpu_engine()
    tensor = torch.rand(100, requires_grad=True)
    loss = in_a_frame(engine, PrefetchOrder(engine), lambda: Twice.apply(tensor).sum())
    loss.backward()
    assert torch.equal(tensor.grad, 2 * tensor.detach())
    assert engine.stats().h2d_bytes == 400


def test_a_gradient_taken_inside_the_frame() -> None:
    engine = cpu_engine()
    prefetch_order = PrefetchOrder(engine)
    tensor = torch.rand(100, requires_grad=True)
    with LayerOffload(engine, prefetch_order):
        out = tensor.exp()
        (inner,) = torch.autograd.grad(out.sum(), tensor, create_graph=True)
        loss = (inner * out).sum()
    loss.backward()
    torch.testing.assert_close(tensor.grad, 2 * (2 * tensor.detach()).exp())
    engine.assert_drained()
