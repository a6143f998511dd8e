"""How long page-locked host memory takes to get, and what copies from and into it reach.

    python recipes/benchmarks/pinning.py [GIB]

Every training with offload locks tens of GiB before its first step. PyTorch takes such memory from
cudaHostAlloc, in one thread; `sppo_hf.offload.host_memory` has several write to its pages before
the driver locks them. This says what each costs here, and whether the memory is as fast. Without a
GPU it says so.

Before that it uses most of the host's free memory and gives it back. A virtual machine may have
been given little so far and get more as it uses it; a plan counts on what is there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.copy_streams import CudaRuntime
from sppo_hf.offload.host_memory import host_memory
from sppo_hf.planning.machine import free_host_memory_bytes, host_memory_bytes

PIECES = 4
MOST_USED_BYTES = 96 << 30
LEFT_BYTES = 4 << 30
"""Host memory that is left alone."""


def use_host_memory(most_bytes: int, *, most_seconds: float = 15.0) -> None:
    """Says what memory the host has before and after up to `most_bytes` of it were in use."""
    start_seconds, pieces = time.perf_counter(), list[Tensor]()
    before_bytes = host_memory_bytes()
    while (
        free_host_memory_bytes() > LEFT_BYTES
        and len(pieces) << 30 < most_bytes
        and time.perf_counter() - start_seconds < most_seconds
    ):
        pieces.append(torch.ones(1 << 30, dtype=torch.uint8))  # pages that are written to
    print(
        f"host memory: {before_bytes >> 30} GiB, {host_memory_bytes() >> 30} GiB after "
        f"{len(pieces)} of them were used at once, in {time.perf_counter() - start_seconds:.1f} s"
    )


def copy_rates(host: Tensor) -> tuple[float, float]:
    """Bytes per second from the device to `host`, uint8 [n], and back."""
    device = torch.empty_like(host, device="cuda")
    rates = []
    for target, source in ((host, device), (device, host)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        target.copy_(source, non_blocking=True)
        start.record()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(4 * host.numel() / (start.elapsed_time(end) / 1e3))
    return rates[0], rates[1]


def report(name: str, make: Callable[[], list[Tensor]]) -> None:
    """Says how long some memory takes to get, to copy from and into, and to give back."""
    start_seconds = time.perf_counter()
    pieces = make()
    seconds = time.perf_counter() - start_seconds
    gib = sum(piece.numel() for piece in pieces) / 2**30
    assert all(piece.is_pinned() for piece in pieces), "copies would block the host"
    out, into = copy_rates(pieces[0][: 1 << 30])
    start_seconds = time.perf_counter()
    pieces.clear()
    back_seconds = time.perf_counter() - start_seconds
    print(
        f"{name}: {gib:.0f} GiB in {seconds:.2f} s ({gib / seconds:.1f} GiB/s), "
        f"back in {back_seconds:.2f} s; {out / 1e9:.1f} GB/s out, {into / 1e9:.1f} GB/s in"
    )


def main(gib: int) -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is pinned")
        return
    torch.cuda.init()
    use_host_memory(MOST_USED_BYTES)
    sizes = [(gib << 30) // PIECES] * PIECES
    runtime = CudaRuntime(torch.device("cuda"))
    try:
        for threads in (1, 4, 8):
            report(f"{threads} threads", lambda: [*host_memory(sizes, runtime, threads=threads)])  # noqa: B023
    except OffloadError as error:
        print(f"not all is measured: {error}")
        return
    # Last, for PyTorch keeps what it was given.
    report(
        "cudaHostAlloc", lambda: [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in sizes]
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
