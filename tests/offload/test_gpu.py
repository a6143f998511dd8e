"""Offloading on CUDA with random pauses, and of tensors past 2^31 bytes; the same on the CPU.

Sizes are small but where a test says so, so that `compute-sanitizer` can run it:

    compute-sanitizer --tool memcheck python -m pytest -m gpu tests/offload/test_gpu.py
"""

from __future__ import annotations

import psutil
import pytest
import torch
from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.copy_streams import CudaRuntime, StreamCopier, StreamTicket
from sppo_hf.offload.engine import OffloadEngine, make_engine
from sppo_hf.offload.host_memory import HostPool, host_memory, locked_bytes
from tests.fakes.delays import DelayedRuntime, delayed_cuda, delayed_fake
from tests.fakes.device import FakeDevice, RaceError
from tests.offload.small_stack import SLAB_BYTES, TOKENS, WIDTH, assert_same, loss_of, make_blocks

SLOW_COPIES = (10**7,)
"""Cycles: some milliseconds a copy, while compute goes on."""


def check_offload(
    runtime: DelayedRuntime, device: torch.device, *, own_streams: bool = True, locked: bool = True
) -> OffloadEngine:
    """Check that gradients of an offloaded stack of layers are bitwise equal in every step."""
    pool = HostPool(SLAB_BYTES, locker=runtime if locked else None)
    copier = StreamCopier(runtime, own_streams=own_streams)
    engine = OffloadEngine(copier, pool, min_offload_elements=8)
    torch.manual_seed(5)
    blocks, hidden_CD = make_blocks(6).to(device), torch.rand(TOKENS, WIDTH).to(device)

    def gradients(with_engine: OffloadEngine | None) -> list[Tensor]:
        blocks.zero_grad()
        loss_of(blocks, hidden_CD, with_engine, spoil).backward()
        return [parameter.grad for parameter in blocks.parameters()]

    def spoil(tensor: Tensor) -> None:
        """Called before a tensor is offloaded: memory freed under its copy is overwritten here."""
        if device.type == "cuda":
            for rows in (1, 2, 4):
                torch.full((TOKENS, rows * WIDTH), float("nan"), device=device)
        elif isinstance(runtime.inner, FakeDevice):
            runtime.inner.adopt(tensor)

    plain = gradients(None)
    for _ in range(4):
        assert_same(gradients(engine), plain)
        engine.assert_drained()
    stats = engine.stats()
    assert stats.h2d_bytes > 0
    assert stats.pinned_bytes > 0
    if isinstance(runtime.inner, FakeDevice):
        assert runtime.inner.locked
        assert runtime.inner.host_waits == 0
    engine.close()
    return engine


@pytest.mark.gpu
@pytest.mark.parametrize("own_streams", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_offload_on_cuda(seed: int, own_streams: bool) -> None:
    engine = check_offload(delayed_cuda(seed), torch.device("cuda"), own_streams=own_streams)
    torch.cuda.synchronize()
    stats = engine.stats()
    assert stats.host_used_bytes == stats.live_handles == 0


@pytest.mark.parametrize("own_streams", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_offload_on_the_fake_device(seed: int, own_streams: bool) -> None:
    device = FakeDevice(lambda stream, num_bytes: 0.5)
    engine = check_offload(delayed_fake(device, seed), torch.device("cpu"), own_streams=own_streams)
    device.finish()
    stats = engine.stats()
    assert stats.host_used_bytes == stats.live_handles == stats.pinned_bytes == 0
    assert not device.locked


def _break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamTicket, "wait", lambda self: None)


@pytest.mark.gpu
def test_a_lost_wait_shows_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch)
    try:
        with pytest.raises(AssertionError):
            check_offload(delayed_cuda(0, SLOW_COPIES, only_copies=True), torch.device("cuda"))
    finally:
        torch.cuda.synchronize()


def test_a_lost_wait_shows_on_the_fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch)
    with pytest.raises(RaceError):
        # Not locked: what fails is never closed, and its memory would be unlocked at any time.
        check_offload(delayed_fake(FakeDevice(), 0), torch.device("cpu"), locked=False)


@pytest.mark.gpu
def test_locked_memory_on_cuda() -> None:
    """Memory counts as pinned while a tensor holds it; a refusal leaves no CUDA error here."""
    runtime = CudaRuntime(torch.device("cuda"))

    class Twice:
        """Locks memory that is locked already, which the driver refuses."""

        def lock_pages(self, address: int, num_bytes: int) -> None:
            runtime.lock_pages(address, num_bytes)
            try:
                runtime.lock_pages(address, num_bytes)
            finally:
                runtime.unlock_pages(address)

        def unlock_pages(self, address: int) -> None:
            raise AssertionError("it was never locked")

    pieces = list(host_memory([2**20, 3 * 2**20 + 512], runtime))
    with pytest.raises(OffloadError, match="pinning a host slab"):
        next(host_memory([2**20], Twice()))
    assert int(torch.ones(1, device="cuda")) == 1
    copier = StreamCopier(runtime)
    for memory in pieces:
        assert memory.is_pinned()
        assert memory[512:].is_pinned()
        source = torch.randint(255, memory.shape, dtype=torch.uint8, device="cuda")
        out = copier.start_d2h(source, memory)
        back, ticket = copier.start_h2d(memory, after=out)
        ticket.wait()
        assert torch.equal(back, source)
    held_bytes = locked_bytes()
    del memory
    pieces.clear()
    assert held_bytes - locked_bytes() == 2**22 + 512


def check_round_trip(device: torch.device, *, num_elements: int, pin: bool) -> None:
    """Copy a tensor of 16-bit numbers to the host and back; check both ends and the middle."""
    engine = make_engine(device, use_pin_memory=pin)
    values = torch.zeros(num_elements, dtype=torch.int16, device=device)
    marks = [0, num_elements // 2 - 1, num_elements // 2, num_elements - 1]
    for number, at in enumerate(marks):
        values[at] = number + 1
    handle = engine.start_offload(values)
    del values
    engine.limit_pending_d2h(0)
    back = engine.wait_for(handle)
    assert [int(back[at]) for at in marks] == [1, 2, 3, 4]
    assert int(back.count_nonzero()) == 4
    assert engine.stats().h2d_bytes == 2 * num_elements
    engine.release(handle)
    del back, handle
    engine.assert_drained()
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [True, False])
def test_more_than_2_31_elements_are_offloaded(pin: bool) -> None:
    num_elements = 2**31 + 12345  # 4 GiB, and past every 32-bit count of elements or bytes
    if torch.cuda.mem_get_info()[0] < 14 * 2**30 or psutil.virtual_memory().available < 12 * 2**30:
        pytest.skip("needs 14 GiB of free device memory and 12 GiB of host memory")
    check_round_trip(torch.device("cuda"), num_elements=num_elements, pin=pin)
    torch.cuda.empty_cache()


def test_some_elements_are_offloaded_on_the_cpu() -> None:
    check_round_trip(torch.device("cpu"), num_elements=12345, pin=False)
