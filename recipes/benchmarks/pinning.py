"""How long page-locked host memory takes to get, and whether its place in a page matters to copies.

    python recipes/benchmarks/pinning.py

Every training with offload pins tens of GiB before its first step. PyTorch takes them from
cudaHostAlloc, in one thread, or, told so, faults pages in by several threads and registers them;
that need not begin with a page. This says what each costs here. Without a GPU it says so.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

THREADED = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


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


def main(gib: int) -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is pinned")
        return
    torch.cuda.init()
    settings = {"cudaHostAlloc": None, "threads": THREADED}
    kept = []  # or the second would be given the first one's memory
    for name, setting in settings.items():
        if setting is not None:
            torch._C._accelerator_setAllocatorSettings(setting)
        start_seconds = time.perf_counter()
        memory = torch.empty(gib << 30, dtype=torch.uint8, pin_memory=True)
        seconds = time.perf_counter() - start_seconds
        print(f"{name}: {gib} GiB in {seconds:.2f} s, at byte {memory.data_ptr() % 4096} of a page")
        for skip in (0, 16):
            out, into = copy_rates(memory[skip : skip + (1 << 30)])
            print(f"  from byte {skip} on: {out / 1e9:.1f} GB/s out, {into / 1e9:.1f} GB/s in")
        kept.append(memory)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
