"""Frames give everything back: after a step, a dropped graph, an exception, 200 steps."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.copy_streams import StreamCopier, StreamTicket
from sppo_hf.offload.engine import OffloadEngine, make_engine
from sppo_hf.offload.host_memory import HostPool
from sppo_hf.offload.layer_offload import LayerOffload, PrefetchOrder
from tests.fakes.device import FakeDevice, RaceError
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


def _assert_steps_do_not_race_on_the_fake_device() -> None:
    # Time stands still for the host: sources are freed by waits of the compute stream alone.
    device = FakeDevice(lambda stream, num_bytes: 5.0)
    engine = OffloadEngine(StreamCopier(device), HostPool(SLAB_BYTES), min_offload_elements=8)
    blocks, hidden_CD = make_blocks(), torch.rand(TOKENS, WIDTH)

    def adopted(tensor: Tensor) -> None:
        # Called just before a tensor moves, so that the device knows all that autograd saves.
        device.adopt(tensor)

    def gradients(with_engine: OffloadEngine | None) -> list[Tensor]:
        blocks.zero_grad()
        loss_of(blocks, hidden_CD, with_engine, adopted).backward()
        return [parameter.grad for parameter in blocks.parameters()]

    plain = gradients(None)
    for _ in range(3):
        assert_same(gradients(engine), plain)
        engine.assert_drained()
    assert engine.stats().h2d_bytes > 0
    assert device.peak_device_bytes > 0
    engine.close()
    device.look_for_freed()
    assert engine.pool.used_bytes == 0
    assert device.device_bytes == hidden_CD.untyped_storage().nbytes()


def test_autograd_on_the_fake_device_never_races() -> None:
    _assert_steps_do_not_race_on_the_fake_device()


def test_the_fake_device_sees_a_source_freed_under_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StreamTicket, "ordered", property(lambda self: True))
    with pytest.raises(RaceError):
        _assert_steps_do_not_race_on_the_fake_device()


def test_two_forwards_before_one_backward() -> None:
    engine, blocks = cpu_engine(), make_blocks()
    inputs = [torch.rand(TOKENS, WIDTH) for _ in range(2)]

    def gradients(with_engine: OffloadEngine | None) -> list[Tensor]:
        blocks.zero_grad()
        first, second = (loss_of(blocks, one, with_engine) for one in inputs)
        (first * second).backward()
        return [parameter.grad for parameter in blocks.parameters()]

    assert_same(gradients(engine), gradients(None))
    engine.assert_drained()


def test_a_graph_dropped_without_backward_gives_its_bytes_back() -> None:
    engine, blocks = cpu_engine(), make_blocks()
    loss = loss_of(blocks, torch.rand(TOKENS, WIDTH), engine)
    assert engine.stats().host_used_bytes > 0
    with pytest.raises(OffloadError, match="delete its loss"):
        engine.assert_drained()
    del loss
    engine.assert_drained()
    assert engine.stats().host_used_bytes == 0


def test_a_graph_kept_for_a_second_backward_stays_exact() -> None:
    engine, blocks = cpu_engine(), make_blocks()
    loss = loss_of(blocks, torch.rand(TOKENS, WIDTH), engine)
    parameters = list(blocks.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert_same(list(second), list(first))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, parameters)
    engine.assert_drained()


def test_a_graph_of_an_abandoned_step_says_so() -> None:
    engine, blocks = cpu_engine(), make_blocks()
    loss = loss_of(blocks, torch.rand(TOKENS, WIDTH), engine)
    engine.abandon()
    assert engine.stats().host_used_bytes == 0
    with pytest.raises(OffloadError, match=r"of layer 3.*earlier step failed"):
        loss.backward()
    del loss
    assert_same(gradients_of(blocks, engine), gradients_of(blocks, None))
    engine.assert_drained()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, in_forward: bool) -> Tensor:
        if in_forward:
            raise ValueError("as injected")
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise ValueError("as injected")


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("in_forward", [True, False])
def test_an_exception_leaves_the_pool_clean(layer: int, in_forward: bool) -> None:
    engine, blocks = cpu_engine(), make_blocks()
    plain = gradients_of(blocks, None)

    def fail(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return _Fails.apply(output, in_forward)

    hook = blocks[layer].fused.register_forward_hook(fail)
    with pytest.raises(ValueError, match="as injected"):
        gradients_of(blocks, engine)
    hook.remove()
    gc.collect()
    engine.assert_drained()
    assert engine.stats().host_used_bytes == 0
    # The hooks of the frame that was open are gone: this saves nothing through them.
    before = engine.stats().d2h_bytes
    torch.rand(1000, requires_grad=True).exp()
    assert engine.stats().d2h_bytes == before
    assert_same(gradients_of(blocks, engine), plain)


def test_a_spent_budget_ends_the_step_and_not_the_engine() -> None:
    blocks = make_blocks()
    engine = cpu_engine(budget_bytes=SLAB_BYTES // 4)
    with pytest.raises(BudgetError, match="host_memory"):
        gradients_of(blocks, engine)
    engine.assert_drained()
    assert engine.stats().host_bytes <= SLAB_BYTES // 4
    assert_same(gradients_of(blocks[:1], engine), gradients_of(blocks[:1], None))


def test_in_place_changes_of_what_stays_are_refused() -> None:
    engine = cpu_engine()
    prefetch_order = PrefetchOrder(engine)
    weight = nn.Parameter(torch.rand(100))
    loss = in_a_frame(engine, prefetch_order, lambda: (weight * torch.rand(100)).sin().sum())
    loss.backward()
    scale = torch.rand(4)
    small = torch.rand(4, requires_grad=True)
    loss = in_a_frame(engine, PrefetchOrder(engine), lambda: (small * scale).sum())
    scale.add_(1.0)
    with pytest.raises(OffloadError, match="modified in place"):
        loss.backward()


def test_frames_open_and_close_once() -> None:
    engine = cpu_engine()
    frame = LayerOffload(engine, PrefetchOrder(engine))
    with pytest.raises(AssertionError, match="while it is open"):
        frame.close()
    frame.open()
    assert frame.is_open
    with pytest.raises(AssertionError, match="while it is open"):
        frame.open()
    frame.close()
    assert not frame.is_open
    with pytest.raises(AssertionError, match="after it has closed"):
        frame.open()


def test_200_steps_hold_no_more_than_the_first() -> None:
    engine, blocks = cpu_engine(), make_blocks(3)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-2)
    after_step: list[int] = []
    peaks: list[int] = []
    moved: list[int] = []
    for step in range(200):
        # Every tenth graph is dropped without backward, as an evaluation under grad would.
        loss = loss_of(blocks, torch.rand(TOKENS, WIDTH), engine)
        if step % 10:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        del loss
        engine.assert_drained()
        stats = engine.take_stats()
        after_step.append(stats.host_bytes)
        peaks.append(engine.pool.peak_bytes)
        moved.append(stats.d2h_bytes)
        assert stats.host_used_bytes == stats.live_handles == 0
    assert len(set(after_step)) == len(set(peaks)) == len(set(moved)) == 1
    assert not engine._registry
    assert not engine._live
    assert engine.pool.fragmentation == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("use_streams", [True, False])
@pytest.mark.parametrize("use_pin_memory", [True, False])
def test_gradients_are_equal_and_memory_is_flat_on_cuda(
    use_streams: bool, use_pin_memory: bool
) -> None:
    device = torch.device("cuda")
    blocks = make_blocks(6).to(device)
    engine = make_engine(
        device,
        use_streams=use_streams,
        use_pin_memory=use_pin_memory,
        min_offload_elements=8,
        slab_bytes=2**24,
    )
    hidden_CD = torch.rand(4096, WIDTH, device=device)
    allocated: list[int] = []
    for _ in range(30):
        gradients: list[list[Tensor]] = []
        for with_engine in (None, engine):
            blocks.zero_grad()
            loss_of(blocks, hidden_CD, with_engine).backward()
            gradients.append([parameter.grad.clone() for parameter in blocks.parameters()])
        assert_same(gradients[1], gradients[0])
        engine.assert_drained()
        engine.close()
        del gradients
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[5:])) == 1
    assert engine.stats().stall_seconds >= 0.0
    assert engine.pool.used_bytes == 0
