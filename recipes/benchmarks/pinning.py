"""Measures how long page-locked host memory takes to allocate, and how fast copies with it are.

    python recipes/benchmarks/pinning.py [GIB]

Every training with offload locks tens of GiB before its first step. PyTorch takes such memory from
cudaHostAlloc, in one thread; `sppo_hf.offload.host_memory` has several write to its pages before
the driver locks them. This measures both ways, and the copies. Without a GPU it only says so.

First it uses most of the host's free memory and releases it, because a virtual machine may get its
memory only as it uses it, and a plan relies on all of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.copy_streams import CudaRuntime
from sppo_hf.offload.host_memory import host_memory
from sppo_hf.planning.machine import free_host_memory_bytes, host_memory_bytes

PIECES = 4
MAX_USED_BYTES = 96 << 30
RESERVED_BYTES = 4 << 30
"""Free host memory that is not used."""


def use_host_memory(max_bytes: int, *, max_seconds: float = 15.0) -> None:
    """Use up to `max_bytes` of host memory; print what the host has before and after."""
    start_seconds, pieces = time.perf_counter(), list[Tensor]()
    before_bytes = host_memory_bytes()
    while (
        free_host_memory_bytes() > RESERVED_BYTES
        and len(pieces) << 30 < max_bytes
        and time.perf_counter() - start_seconds < max_seconds
    ):
        pieces.append(torch.ones(1 << 30, dtype=torch.uint8))  # pages that are written to
    print(
        f"host memory: {before_bytes >> 30} GiB, {host_memory_bytes() >> 30} GiB after "
        f"{len(pieces)} of them were used at once, in {time.perf_counter() - start_seconds:.1f} s"
    )


def copy_rates(host: Tensor) -> tuple[float, float]:
    """Return bytes per second from the device to `host`, uint8 [n], and back."""
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
    """Print how long memory takes to allocate and to free, and how fast copies with it are."""
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
    use_host_memory(MAX_USED_BYTES)
    sizes = [(gib << 30) // PIECES] * PIECES
    runtime = CudaRuntime(torch.device("cuda"))
    try:
        for threads in (1, 4, 8):
            report(f"{threads} threads", lambda: [*host_memory(sizes, runtime, threads=threads)])  # noqa: B023
    except OffloadError as error:
        print(f"not all is measured: {error}")
        return
    # Last, because PyTorch does not free this memory.
    report(
        "cudaHostAlloc", lambda: [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in sizes]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gib", nargs="?", type=int, default=8, metavar="GIB", help="default 8")
    main(parser.parse_args().gib)
