"""Binding this process to the processors next to its device, so that pinned memory is near it too.

A page lies on the NUMA node of the processor that first touches it, and a copy that crosses the
link between sockets is slower by a third or more; so processes are bound before they pin memory.

Accelerate's `set_numa_affinity` does the same through NVML, which needs a package that may be
absent, counts devices regardless of CUDA_VISIBLE_DEVICES, and widens an affinity that a launcher or
a batch system has narrowed. This reads the node by the device's bus address and only ever narrows;
after Accelerate's it changes nothing. Not covered: binding memory of threads that run elsewhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from sppo_hf.engine.device_facts import device_numa_node
from sppo_hf.planning.machine import node_cpus

_THREADS = Path("/proc/self/task")


def bind_to_device(device: torch.device) -> frozenset[int] | None:
    """Run all threads of this process on the processors of the device's NUMA node from now on.

    Args:
        device: any; only a CUDA device has a node.

    Returns:
        The processors that were allowed before, for `run_on`; None where nothing was changed:
        the node is not known or the only one, all allowed processors are on it already, or none is.
    """
    node = device_numa_node(device)
    if node is None or not hasattr(os, "sched_setaffinity"):
        return None
    allowed = frozenset(os.sched_getaffinity(0))
    near = allowed & node_cpus(node)
    if not near or near == allowed:
        return None
    run_on(near)
    return allowed


def run_on(processors: frozenset[int]) -> None:
    """Let all threads of this process, and those they will start, run on these processors."""
    for entry in list(_THREADS.iterdir()):
        # A thread may end between the listing and the call.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(entry.name), processors)


@contextlib.contextmanager
def near_device(device: torch.device) -> Iterator[None]:
    """Be bound to the device's node for a while; see `bind_to_device`."""
    before = bind_to_device(device)
    try:
        yield
    finally:
        if before is not None:
            run_on(before)
