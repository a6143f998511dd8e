"""Backward on a thread of its own, as autograd runs it for nodes on CUDA.

On a CPU autograd runs backward in the thread that asks for it, so that whatever belongs to a
thread is there by accident: context variables, thread-local values, the dtype of autocast. On CUDA
a thread of the device runs it, the same one in every step, and autograd takes nothing along but its
own state: which dispatch keys are on, autocast's among them, but not the dtype that it casts to.
`on_a_thread` has every backward run so, those that begin inside a forward included.

What begins inside of a backward stays on its thread, as it does on CUDA.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch


class DeviceThread:
    """A thread that runs backwards, and how many it has run."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "device")
        self._here = threading.local()
        self.backwards = 0
        """Number of backwards that began on another thread."""

    def run_backward(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Run autograd's `_engine_run_backward` on the thread; the caller waits."""
        # Tensors without memory, with which models are traced, are the CPU's everywhere.
        if getattr(self._here, "inside", False) or torch._C._len_torch_dispatch_stack():
            return run(*args, **kwargs)
        self.backwards += 1
        included = torch._C._dispatch_tls_local_include_set()
        excluded = torch._C._dispatch_tls_local_exclude_set()

        def on_the_thread() -> Any:
            self._here.inside = True
            with torch._C._ForceDispatchKeyGuard(included, excluded):
                return run(*args, **kwargs)

        return self._pool.submit(on_the_thread).result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


@contextlib.contextmanager
def on_a_thread() -> Iterator[DeviceThread]:
    """Run every backward inside the context on one thread other than its caller's."""
    thread, run = DeviceThread(), torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        return thread.run_backward(run, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "_engine_run_backward", run_backward)
        try:
            yield thread
        finally:
            thread.close()
