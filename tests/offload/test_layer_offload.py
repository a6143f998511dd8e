"""Saved tensors are offloaded, prefetched in order, and freed with their graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from sppo_hf import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.copy_streams import HostCopier, StreamCopier, StreamTicket
from sppo_hf.offload.engine import OffloadEngine, make_engine
from sppo_hf.offload.host_memory import HostPool
from sppo_hf.offload.layer_offload import LayerOffload, PrefetchOrder, WeightCasts
from sppo_hf.offload.storage import OffloadedTensor
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.engine.forced_plans import force_modes
from tests.fakes.device import FakeDevice, RaceError
from tests.offload.orders import asked_within
from tests.offload.small_stack import (
    SLAB_BYTES,
    TOKENS,
    WIDTH,
    assert_same,
    cpu_engine,
    gradients_of,
    loss_of,
    make_blocks,
    offload_computation,
)
from tests.sweeps import turn


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_bitwise_equal(dtype: torch.dtype) -> None:
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


def test_aliases_are_copied_once() -> None:
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


def test_a_tensor_saved_by_two_layers_is_copied_once() -> None:
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


def test_parameters_and_their_views_are_never_offloaded() -> None:
    engine = cpu_engine()
    prefetch_order = PrefetchOrder(engine)
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    hidden = torch.rand(TOKENS, WIDTH, requires_grad=True)
    with LayerOffload(engine, prefetch_order):
        loss = linear(hidden).sum() + (linear.weight.t() * linear.weight).sum()
    # Only the layer's input is offloaded.
    assert engine.stats().d2h_bytes == TOKENS * WIDTH * 4
    loss.backward()
    assert hidden.grad is not None


def test_small_tensors_are_kept() -> None:
    engine = OffloadEngine(HostCopier(), HostPool(SLAB_BYTES), min_offload_elements=100)
    prefetch_order = PrefetchOrder(engine)
    small = torch.rand(99, requires_grad=True)
    loss = offload_computation(engine, prefetch_order, lambda: small.sin().sum())
    assert engine.stats().d2h_bytes == 0
    loss.backward()
    assert torch.equal(small.grad, small.detach().cos())


def test_layers_are_prefetched_one_ahead() -> None:
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
        group = LayerOffload(engine, prefetch_order, label=number, number=number)
        with group:
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
def test_checkpoints_inside_a_layer(reentrant: bool) -> None:
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
    loss = offload_computation(engine, PrefetchOrder(engine), lambda: Twice.apply(tensor).sum())
    loss.backward()
    assert torch.equal(tensor.grad, 2 * tensor.detach())
    assert engine.stats().h2d_bytes == 400


def test_a_gradient_taken_inside_the_layer() -> None:
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


class _Handle:
    def __init__(self, name: int, num_bytes: int) -> None:
        self.name = name
        self.num_bytes = num_bytes


class _Group:
    def __init__(self, name: int, num_bytes: int) -> None:
        self.handle = _Handle(name, num_bytes)

    def handles(self) -> tuple[_Handle, ...]:
        return (self.handle,)


class _Engine:
    """Stands for the engine: records what is prefetched, each handle once."""

    reads_ahead = True

    def __init__(self) -> None:
        self.log: list[int] = []
        self.read: list[int] = []
        self.num_reads_allowed = 0
        self.closed: list[int | None] = []

    def limit_pending_d2h(self, max_pending_d2h_bytes: int | None = None) -> None:
        self.closed.append(max_pending_d2h_bytes)

    def prefetch(self, handle: _Handle) -> None:
        if handle.name not in self.log and handle.num_bytes:
            self.log.append(handle.name)

    def read_ahead(self, handle: _Handle) -> bool:
        if self.num_reads_allowed == 0:
            return False
        self.num_reads_allowed -= 1
        self.read.append(handle.name)
        return True


def _prefetch_order(
    sizes: list[int], asked: list[int] | None = None
) -> tuple[PrefetchOrder, list[_Group], list[int]]:
    engine = _Engine()
    prefetch_order = PrefetchOrder(engine, max_pending_d2h_bytes=7, lowest_prefetched=asked)
    groups = [_Group(name, num_bytes) for name, num_bytes in enumerate(sizes)]
    for number, group in enumerate(groups):
        prefetch_order.record(group, number)
    assert len(prefetch_order) == len(sizes)
    assert engine.closed == [7] * len(sizes)
    return prefetch_order, groups, engine.log


def _read_backward(
    prefetch_order: PrefetchOrder, groups: list[_Group], log: list[int]
) -> list[list[int]]:
    seen: list[list[int]] = []
    for group in reversed(groups):
        prefetch_order.on_backward(group)
        seen.append(list(log))
        prefetch_order.on_backward(group)
        assert log == seen[-1], "a second call changes nothing"
    return seen


def test_without_a_list_one_group_is_prefetched_ahead() -> None:
    prefetch_order, groups, log = _prefetch_order([5] * 4)
    assert _read_backward(prefetch_order, groups, log) == [
        [3, 2],
        [3, 2, 1],
        [3, 2, 1, 0],
        [3, 2, 1, 0],
    ]


def test_groups_beyond_the_list_are_prefetched_one_by_one() -> None:
    prefetch_order, groups, log = _prefetch_order([5] * 3, [])
    prefetch_order.prefetch([1, 0])
    assert log == [1, 0]
    assert _read_backward(prefetch_order, groups, log) == [[1, 0, 2]] * 3


def test_prefetches_are_reported_once_by_number() -> None:
    engine, told = _Engine(), list[int]()
    prefetch_order = PrefetchOrder(engine, lowest_prefetched=[0, 0, 1], on_prefetch=told.append)
    groups = [_Group(name, 5) for name in range(3)]
    for number, group in enumerate(groups):
        prefetch_order.record(group, number)
    for group in (*reversed(groups), groups[0]):
        prefetch_order.on_backward(group)
    assert told == [2, 1, 0]


def test_a_group_without_a_number_prefetches_itself_alone() -> None:
    prefetch_order, groups, log = _prefetch_order([5] * 2)
    norm = _Group(7, 5)
    prefetch_order.record(norm)
    prefetch_order.on_backward(norm)
    assert log == [7]
    prefetch_order.on_backward(groups[1])
    assert log == [7, 1, 0]


def test_prefetches_of_missing_groups_fall_to_the_next() -> None:
    engine = _Engine()
    prefetch_order = PrefetchOrder(engine, lowest_prefetched=[0, 0, 0, 1, 3])
    groups = [_Group(name, 5) for name in range(3)]
    for number, group in enumerate(groups):
        prefetch_order.record(group, number)
    prefetch_order.on_backward(groups[2])
    assert engine.log == [2, 1, 0]


def test_a_jump_prefetches_only_what_is_listed_with_its_target() -> None:
    prefetch_order, groups, log = _prefetch_order([5] * 6)
    prefetch_order.on_backward(groups[5])
    prefetch_order.on_backward(groups[1])
    assert log == [5, 4, 1, 0]


def test_a_jump_back_up_goes_on_from_there() -> None:
    prefetch_order, groups, log = _prefetch_order([5] * 6)
    prefetch_order.on_backward(groups[1])
    prefetch_order.on_backward(groups[0])
    prefetch_order.on_backward(groups[5])
    assert log == [1, 0, 5, 4]


def test_the_last_group_can_be_started_before_backward() -> None:
    prefetch_order, groups, log = _prefetch_order([5] * 3)
    prefetch_order.start_backward(2)
    assert log == [2, 1]
    prefetch_order.on_backward(groups[2])
    assert log == [2, 1]
    prefetch_order.on_backward(groups[1])
    assert log == [2, 1, 0]
    _prefetch_order([])[0].start_backward(3)


def test_a_group_is_recorded_once_and_before_its_use() -> None:
    prefetch_order, groups, _ = _prefetch_order([5])
    with pytest.raises(AssertionError, match="recorded once"):
        prefetch_order.record(groups[0])
    with pytest.raises(AssertionError, match="after it was recorded"):
        prefetch_order.on_backward(_Group(1, 5))


def test_the_prefetch_order_keeps_no_group_alive() -> None:
    prefetch_order, groups, log = _prefetch_order([5] * 3)
    first, second, third = groups
    dropped = weakref.ref(second)
    groups.clear()
    gc.disable()
    try:
        del second
        assert dropped() is None
    finally:
        gc.enable()
    prefetch_order.on_backward(third)
    assert log == [2]
    prefetch_order.on_backward(first)
    assert log == [2, 0]


def test_reads_run_ahead_of_prefetches_as_space_allows() -> None:
    engine = _Engine()
    prefetch_order = PrefetchOrder(engine, lowest_prefetched=asked_within([5] * 12, 10))
    groups = [_Group(name, 5) for name in range(12)]
    for number, group in enumerate(groups):
        prefetch_order.record(group, number)
    engine.num_reads_allowed = 3
    prefetch_order.on_backward(groups[11])
    assert (engine.log, engine.read) == ([11, 10, 9], [8, 7, 6])
    prefetch_order.on_backward(groups[10])
    assert engine.read == [8, 7, 6], "no room"
    engine.num_reads_allowed = 2
    prefetch_order.on_backward(groups[9])
    assert (engine.log[-1], engine.read) == (7, [8, 7, 6, 5, 4])
    engine.num_reads_allowed = 9
    prefetch_order.on_backward(groups[3])  # a jump
    assert (engine.log[-3:], engine.read[5:]) == ([3, 2, 1], [0])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_any_list_is_followed(sizes: list[int], data: st.DataObject) -> None:
    asked = [data.draw(st.integers(0, number)) for number in range(len(sizes))]
    prefetch_order, groups, log = _prefetch_order(sizes, asked)
    expected: list[int] = []
    for number in _down(len(sizes)):
        prefetch_order.on_backward(groups[number])
        expected += [one for one in _down(number + 1) if one >= asked[number]]
        expected = list(dict.fromkeys(one for one in expected if sizes[one]))
        assert log == expected


def _down(count: int) -> Iterator[int]:
    return iter(range(count - 1, -1, -1))


def _assert_steps_do_not_race_on_the_fake_device() -> None:
    # Time stands still for the host: sources are freed by waits of the compute stream alone.
    device = FakeDevice(lambda stream, num_bytes: 5.0)
    engine = OffloadEngine(StreamCopier(device), HostPool(SLAB_BYTES), min_offload_elements=8)
    blocks, hidden_CD = make_blocks(), torch.rand(TOKENS, WIDTH)

    def adopted(tensor: Tensor) -> None:
        # Called before a tensor is offloaded, so that the device knows all that autograd saves.
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


def test_the_fake_device_detects_a_source_freed_under_autograd(
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


def test_a_graph_dropped_without_backward_frees_its_bytes() -> None:
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


def test_a_graph_of_an_abandoned_step_is_refused() -> None:
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
    # The hooks of the open layer are removed: this saves nothing through them.
    before = engine.stats().d2h_bytes
    torch.rand(1000, requires_grad=True).exp()
    assert engine.stats().d2h_bytes == before
    assert_same(gradients_of(blocks, engine), plain)


def test_an_exhausted_budget_ends_the_step_and_not_the_engine() -> None:
    blocks = make_blocks()
    engine = cpu_engine(budget_bytes=SLAB_BYTES // 4)
    with pytest.raises(BudgetError, match="host_memory"):
        gradients_of(blocks, engine)
    engine.assert_drained()
    assert engine.stats().host_bytes <= SLAB_BYTES // 4
    assert_same(gradients_of(blocks[:1], engine), gradients_of(blocks[:1], None))


def test_in_place_changes_of_kept_tensors_are_refused() -> None:
    engine = cpu_engine()
    prefetch_order = PrefetchOrder(engine)
    weight = nn.Parameter(torch.rand(100))
    loss = offload_computation(
        engine, prefetch_order, lambda: (weight * torch.rand(100)).sin().sum()
    )
    loss.backward()
    scale = torch.rand(4)
    small = torch.rand(4, requires_grad=True)
    loss = offload_computation(engine, PrefetchOrder(engine), lambda: (small * scale).sum())
    scale.add_(1.0)
    with pytest.raises(OffloadError, match="modified in place"):
        loss.backward()


def test_a_layer_opens_and_closes_once() -> None:
    engine = cpu_engine()
    group = LayerOffload(engine, PrefetchOrder(engine))
    with pytest.raises(AssertionError, match="while it is open"):
        group.close()
    group.open()
    assert group.is_open
    with pytest.raises(AssertionError, match="while it is open"):
        group.open()
    group.close()
    assert not group.is_open
    with pytest.raises(AssertionError, match="after it has closed"):
        group.open()


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


CHUNKS = (9, 1, 13)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _run(
    monkeypatch: pytest.MonkeyPatch, family: str, tier: Any, *, lora: bool, casts: bool
) -> tuple[dict[str, Tensor | None], int]:
    """Gradients of a float32 model under autocast, and the bytes copied to the host."""
    with monkeypatch.context() as inner:
        inner.setattr(
            "sppo_hf.engine.chunk_runner.WeightCasts.of", WeightCasts.of if casts else _none
        )
        force_modes(inner, lambda chunk, layer: mode_of("whole", tier))
        model: nn.Module = build_tiny_model(family, dtype=torch.float32)
        model = add_lora(model) if lora else model  # type: ignore[arg-type]
        config = SPPOConfig(chunk_lengths=CHUNKS, min_offload_size=1, show_plan=False)
        model = convert(model, config)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**make_batch(tokens=sum(CHUNKS))).loss
        loss.backward()
        engine = get_engine(model)
        assert engine is not None
        moved_bytes = engine.offload.stats().d2h_bytes
        engine.offload.assert_drained()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}, moved_bytes


def _none(*_: object) -> None:
    return None


@pytest.mark.parametrize(
    ("family", "lora", "tier"),
    [
        (family, lora, tier)
        for index, family in enumerate(["llama", "gpt2", "mixtral"])
        for lora in turn([False, True], 2, index)
        for tier in turn(["host", "device"], 2, index // 2)
    ],
)
def test_gradients_are_those_of_casts_that_were_saved(
    monkeypatch: pytest.MonkeyPatch, family: str, lora: bool, tier: str
) -> None:
    theirs, _ = _run(monkeypatch, family, tier, lora=lora, casts=False)
    ours, _ = _run(monkeypatch, family, tier, lora=lora, casts=True)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient is None or torch.equal(ours[name], gradient), name


@pytest.mark.parametrize("lora", [False, True], ids=["trained", "frozen"])
def test_no_cast_of_a_weight_is_offloaded(monkeypatch: pytest.MonkeyPatch, lora: bool) -> None:
    _, with_casts = _run(monkeypatch, "llama", "host", lora=lora, casts=False)
    _, without = _run(monkeypatch, "llama", "host", lora=lora, casts=True)
    sizes = [
        2 * p.numel()
        for name, p in build_tiny_model("llama").named_parameters()
        if name.rpartition(".")[0].endswith(PROJECTIONS)
    ]
    # Frozen ones were cast and moved for every chunk, trained ones once. Adapters are cast too, and
    # the first layer saves no frozen weight that its input meets.
    about = sum(sizes) * (len(CHUNKS) if lora else 1)
    assert 0.8 * about <= with_casts - without <= 1.2 * about


def _offload(weight: nn.Parameter, x: Tensor, body: Any) -> Tensor:
    engine = cpu_engine()
    with (
        torch.autocast("cpu", torch.bfloat16),
        LayerOffload(engine, PrefetchOrder(engine), casts=WeightCasts(watch=True, label="layer 3")),
    ):
        return body(x, weight)


def test_a_changed_weight_is_refused() -> None:
    weight = nn.Parameter(torch.rand(16, 16), requires_grad=False)
    y = _offload(weight, torch.rand(8, 16, requires_grad=True), nn.functional.linear)
    with torch.no_grad():
        weight += 1
    with pytest.raises(OffloadError, match=r"weight of layer 3.*modified in place"):
        y.sum().backward()


def test_a_cast_that_was_written_into_is_an_activation() -> None:
    weight = nn.Parameter(torch.rand(16, 16), requires_grad=False)
    x = torch.rand(8, 16, requires_grad=True)

    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight.to(torch.bfloat16).mul_(3))

    _offload(weight, x, scaled).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(scaled(x, weight).sum(), x)
    assert torch.equal(x.grad, expected[0])


def test_an_activation_at_the_address_of_a_freed_cast_is_no_cast() -> None:
    weight = nn.Parameter(torch.rand(16, 16), requires_grad=False)
    x = torch.rand(16, 16, requires_grad=True)

    def many(x: Tensor, weight: Tensor) -> Tensor:
        total = x
        for _ in range(20):
            weight.to(torch.bfloat16)  # freed at once
            half = (2 * total).to(torch.bfloat16)
            total = (half * half).float()
        return total

    _offload(weight, x, many).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(many(x, weight).sum(), x)
    assert torch.equal(x.grad, expected[0])
