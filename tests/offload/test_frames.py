"""Frames around real layers: gradients equal to the bit, each storage moved once, nothing left."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.engine import OffloadEngine, make_engine
from sppo_hf.offload.frames import OffloadFrame
from sppo_hf.offload.lanes import HostCopier, StreamCopier, StreamTicket
from sppo_hf.offload.pool import HostPool
from sppo_hf.offload.tape import Tape
from tests.fakes.device import FakeDevice, RaceError

WIDTH = 16
TOKENS = 12
SLAB_BYTES = 2**16
Pin = Callable[[Tensor], bool]


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


def _blocks(num_layers: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(num_layers))


def _engine(budget_bytes: int | None = None) -> OffloadEngine:
    pool = HostPool(SLAB_BYTES, budget_bytes=budget_bytes)
    return OffloadEngine(HostCopier(), pool, min_offload_elements=8)


def _loss(
    blocks: nn.ModuleList,
    hidden_CD: Tensor,
    engine: OffloadEngine | None,
    pin: Pin | None = None,
) -> Tensor:
    tape = engine.new_tape() if engine is not None else None
    for number, block in enumerate(blocks):
        if engine is None or tape is None:
            hidden_CD = block(hidden_CD)
        else:
            with OffloadFrame(engine, tape, pin, label=f"layer {number}"):
                hidden_CD = block(hidden_CD)
    return hidden_CD.square().mean()


def _gradients(blocks: nn.ModuleList, engine: OffloadEngine | None) -> list[Tensor]:
    hidden_CD = torch.linspace(-1, 1, TOKENS * WIDTH).reshape(TOKENS, WIDTH).requires_grad_()
    blocks.zero_grad()
    _loss(blocks, hidden_CD, engine).backward()
    return [hidden_CD.grad, *(parameter.grad for parameter in blocks.parameters())]


def _assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


def _sees_everything(engine: OffloadEngine, tape: Tape, body: Callable[[], Tensor]) -> Tensor:
    with OffloadFrame(engine, tape):
        return body()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_equal_to_the_bit(dtype: torch.dtype) -> None:
    blocks, engine = _blocks().to(dtype), _engine()
    hidden_CD = torch.rand(TOKENS, WIDTH, dtype=dtype)

    def gradients(with_engine: OffloadEngine | None) -> list[Tensor]:
        blocks.zero_grad()
        _loss(blocks, hidden_CD, with_engine).backward()
        return [parameter.grad for parameter in blocks.parameters()]

    _assert_same(gradients(engine), gradients(None))
    stats = engine.stats()
    assert stats.d2h_bytes == stats.h2d_bytes > 0
    assert stats.stall_seconds > 0.0
    engine.assert_drained()
    assert stats.host_used_bytes == 0


def test_gradients_are_equal_under_autocast() -> None:
    blocks, engine = _blocks(), _engine()
    with torch.autocast("cpu", torch.bfloat16):
        plain = _gradients(blocks, None)
        ours = _gradients(blocks, engine)
    _assert_same(ours, plain)
    engine.assert_drained()


def _steps_on_the_fake_device() -> None:
    # Time stands still for the host: sources are freed by waits of the compute stream alone.
    device = FakeDevice(lambda stream, num_bytes: 5.0)
    engine = OffloadEngine(StreamCopier(device), HostPool(SLAB_BYTES), min_offload_elements=8)
    blocks, hidden_CD = _blocks(), torch.rand(TOKENS, WIDTH)

    def gradients(with_engine: OffloadEngine | None) -> list[Tensor]:
        blocks.zero_grad()
        # Every tensor that autograd saves is one of the device, asked for just before it moves.
        _loss(blocks, hidden_CD, with_engine, lambda tensor: bool(device.adopt(tensor))).backward()
        return [parameter.grad for parameter in blocks.parameters()]

    plain = gradients(None)
    for _ in range(3):
        _assert_same(gradients(engine), plain)
        engine.assert_drained()
    assert engine.stats().h2d_bytes > 0
    assert device.peak_device_bytes > 0
    engine.close()
    device.look_for_freed()
    assert engine.pool.used_bytes == 0
    assert device.device_bytes == hidden_CD.untyped_storage().nbytes()


def test_autograd_on_the_fake_device_never_races() -> None:
    _steps_on_the_fake_device()


def test_the_fake_device_sees_a_source_freed_under_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StreamTicket, "ordered", property(lambda self: True))
    with pytest.raises(RaceError):
        _steps_on_the_fake_device()


def test_aliases_move_once() -> None:
    engine = _engine()
    tape = engine.new_tape()
    hidden = torch.rand(50, 30, requires_grad=True)
    with OffloadFrame(engine, tape):
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
    engine = _engine()
    tape = engine.new_tape()
    hidden = torch.rand(100, requires_grad=True)
    with OffloadFrame(engine, tape):
        hidden = hidden.exp()
    with OffloadFrame(engine, tape):
        hidden = hidden.square()
    assert engine.stats().d2h_bytes == 400
    hidden.sum().backward()
    assert engine.stats().h2d_bytes == 400


def test_parameters_and_what_belongs_to_others_never_move() -> None:
    engine = _engine()
    tape = engine.new_tape()
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    table = torch.rand(TOKENS, WIDTH)
    hidden = torch.rand(TOKENS, WIDTH, requires_grad=True)
    seen: list[int] = []

    def is_table(tensor: Tensor) -> bool:
        seen.append(tensor.data_ptr())
        return tensor.untyped_storage()._cdata == table.untyped_storage()._cdata

    with OffloadFrame(engine, tape, is_table):
        loss = (linear(hidden) * table).sum() + (linear.weight.t() * linear.weight).sum()
    # The layer's input is all that moves: the product saves the table alone.
    assert engine.stats().d2h_bytes == TOKENS * WIDTH * 4
    assert table.data_ptr() in seen
    loss.backward()
    assert hidden.grad is not None


def test_small_tensors_stay() -> None:
    engine = OffloadEngine(HostCopier(), HostPool(SLAB_BYTES), min_offload_elements=100)
    tape = engine.new_tape()
    small = torch.rand(99, requires_grad=True)
    loss = _sees_everything(engine, tape, lambda: small.sin().sum())
    assert engine.stats().d2h_bytes == 0
    loss.backward()
    assert torch.equal(small.grad, small.detach().cos())


def test_frames_come_back_one_ahead() -> None:
    engine, blocks = _engine(), _blocks()
    tape = engine.new_tape()
    hidden_CD = torch.rand(TOKENS, WIDTH)
    log: list[str] = []
    frame_bytes = [0]
    for number, block in enumerate(blocks):
        frame = OffloadFrame(engine, tape, label=number)
        frame.prefetch = _logged(frame.prefetch, log, f"prefetch {number}")  # type: ignore
        with frame:
            hidden_CD = block(hidden_CD)
        hidden_CD.register_hook(lambda gradient, number=number: log.append(f"backward {number}"))
        frame_bytes.append(engine.stats().d2h_bytes)
    hidden_CD.sum().backward()
    assert all(one < other for one, other in pairwise(frame_bytes))
    assert log == [
        "backward 3", "prefetch 3", "prefetch 2",
        "backward 2", "prefetch 1",
        "backward 1", "prefetch 0",
        "backward 0",
    ]  # fmt: skip


def _logged(call: Callable[[], None], log: list[str], entry: str) -> Callable[[], None]:
    def logged() -> None:
        log.append(entry)
        call()

    return logged


def test_two_forwards_before_one_backward() -> None:
    engine, blocks = _engine(), _blocks()
    inputs = [torch.rand(TOKENS, WIDTH) for _ in range(2)]

    def gradients(with_engine: OffloadEngine | None) -> list[Tensor]:
        blocks.zero_grad()
        first, second = (_loss(blocks, one, with_engine) for one in inputs)
        (first * second).backward()
        return [parameter.grad for parameter in blocks.parameters()]

    _assert_same(gradients(engine), gradients(None))
    engine.assert_drained()


def test_a_graph_dropped_without_backward_gives_its_bytes_back() -> None:
    engine, blocks = _engine(), _blocks()
    loss = _loss(blocks, torch.rand(TOKENS, WIDTH), engine)
    assert engine.stats().host_used_bytes > 0
    with pytest.raises(OffloadError, match="delete its loss"):
        engine.assert_drained()
    del loss
    engine.assert_drained()
    assert engine.stats().host_used_bytes == 0


def test_a_graph_kept_for_a_second_backward_stays_exact() -> None:
    engine, blocks = _engine(), _blocks()
    loss = _loss(blocks, torch.rand(TOKENS, WIDTH), engine)
    parameters = list(blocks.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    _assert_same(list(second), list(first))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, parameters)
    engine.assert_drained()


def test_a_graph_of_an_abandoned_step_says_so() -> None:
    engine, blocks = _engine(), _blocks()
    loss = _loss(blocks, torch.rand(TOKENS, WIDTH), engine)
    engine.abandon()
    assert engine.stats().host_used_bytes == 0
    with pytest.raises(OffloadError, match=r"of layer 3.*earlier step failed"):
        loss.backward()
    del loss
    _assert_same(_gradients(blocks, engine), _gradients(blocks, None))
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
    engine, blocks = _engine(), _blocks()
    plain = _gradients(blocks, None)

    def fail(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return _Fails.apply(output, in_forward)

    hook = blocks[layer].fused.register_forward_hook(fail)
    with pytest.raises(ValueError, match="as injected"):
        _gradients(blocks, engine)
    hook.remove()
    gc.collect()
    engine.assert_drained()
    assert engine.stats().host_used_bytes == 0
    # The hooks of the frame that was open are gone: this saves nothing through them.
    before = engine.stats().d2h_bytes
    torch.rand(1000, requires_grad=True).exp()
    assert engine.stats().d2h_bytes == before
    _assert_same(_gradients(blocks, engine), plain)


def test_a_spent_budget_ends_the_step_and_not_the_engine() -> None:
    blocks = _blocks()
    engine = _engine(budget_bytes=SLAB_BYTES // 4)
    with pytest.raises(BudgetError, match="host_memory"):
        _gradients(blocks, engine)
    engine.assert_drained()
    assert engine.stats().host_bytes <= SLAB_BYTES // 4
    _assert_same(_gradients(blocks[:1], engine), _gradients(blocks[:1], None))


def test_in_place_changes_of_what_stays_are_refused() -> None:
    engine = _engine()
    tape = engine.new_tape()
    weight = nn.Parameter(torch.rand(100))
    loss = _sees_everything(engine, tape, lambda: (weight * torch.rand(100)).sin().sum())
    loss.backward()
    scale = torch.rand(4)
    small = torch.rand(4, requires_grad=True)
    loss = _sees_everything(engine, engine.new_tape(), lambda: (small * scale).sum())
    scale.add_(1.0)
    with pytest.raises(OffloadError, match="modified in place"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_a_frame(reentrant: bool) -> None:
    engine, blocks = _engine(), _blocks(2)
    hidden_CD = torch.rand(TOKENS, WIDTH, requires_grad=True)

    def gradients(with_engine: OffloadEngine | None) -> list[Tensor]:
        blocks.zero_grad()
        tape = _engine().new_tape() if with_engine is None else with_engine.new_tape()
        out = hidden_CD
        for block in blocks:
            if with_engine is None:
                out = block(out)
            else:
                with OffloadFrame(with_engine, tape):
                    out = checkpoint(block, out, use_reentrant=reentrant)
        out.sum().backward()
        return [parameter.grad for parameter in blocks.parameters()]

    _assert_same(gradients(engine), gradients(None))
    engine.assert_drained()


def test_hooks_of_others_around_and_inside() -> None:
    engine, blocks = _engine(), _blocks(2)
    plain = _gradients(blocks, None)
    with save_on_cpu():
        _assert_same(_gradients(blocks, engine), plain)
    seen: list[int] = []
    original = blocks[0].down.forward

    def with_own_hooks(tensor: Tensor) -> Tensor:
        keep = lambda saved: (seen.append(saved.numel()), saved.detach())[1]  # noqa: E731
        with saved_tensors_hooks(keep, lambda saved: saved):
            return original(tensor)

    blocks[0].down.forward = with_own_hooks  # type: ignore[method-assign]
    _assert_same(_gradients(blocks, engine), plain)
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

    engine = _engine()
    tensor = torch.rand(100, requires_grad=True)
    loss = _sees_everything(engine, engine.new_tape(), lambda: Twice.apply(tensor).sum())
    loss.backward()
    assert torch.equal(tensor.grad, 2 * tensor.detach())
    assert engine.stats().h2d_bytes == 400


def test_a_gradient_taken_inside_the_frame() -> None:
    engine = _engine()
    tape = engine.new_tape()
    tensor = torch.rand(100, requires_grad=True)
    with OffloadFrame(engine, tape):
        out = tensor.exp()
        (inner,) = torch.autograd.grad(out.sum(), tensor, create_graph=True)
        loss = (inner * out).sum()
    loss.backward()
    torch.testing.assert_close(tensor.grad, 2 * (2 * tensor.detach()).exp())
    engine.assert_drained()


def test_frames_open_and_close_once() -> None:
    engine = _engine()
    frame = OffloadFrame(engine, engine.new_tape())
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
    engine, blocks = _engine(), _blocks(3)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-2)
    after_step: list[int] = []
    peaks: list[int] = []
    moved: list[int] = []
    for step in range(200):
        # Every tenth graph is dropped without backward, as an evaluation under grad would.
        loss = _loss(blocks, torch.rand(TOKENS, WIDTH), engine)
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
    assert not engine._origins
    assert not engine._live
    assert engine.pool.fragmentation == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("use_streams", [True, False])
@pytest.mark.parametrize("use_pin_memory", [True, False])
def test_gradients_are_equal_and_memory_is_flat_on_cuda(
    use_streams: bool, use_pin_memory: bool
) -> None:
    device = torch.device("cuda")
    blocks = _blocks(6).to(device)
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
            _loss(blocks, hidden_CD, with_engine).backward()
            gradients.append([parameter.grad.clone() for parameter in blocks.parameters()])
        _assert_same(gradients[1], gradients[0])
        engine.assert_drained()
        engine.close()
        del gradients
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[5:])) == 1
    assert engine.stats().stall_seconds >= 0.0
    assert engine.pool.used_bytes == 0
