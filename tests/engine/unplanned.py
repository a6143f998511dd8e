"""Finds shapes that attention gets in steps and that `WarmUp` has not run before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from sppo_hf.attention.backends.aten import CPUFlash
from sppo_hf.attention.backends.base import Backend
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.warm_up import WarmUp


@contextmanager
def unplanned_shapes() -> Iterator[list[str]]:
    """Make the CPU's kernels claim to plan each shape; yields shapes that were not warmed up."""
    met: set[Any] = set()
    unplanned: list[str] = []
    running: list[bool] = []
    run = WarmUp.run

    def warm_up(*args: Any, **kwargs: Any) -> int:
        running.append(True)
        try:
            return run(*args, **kwargs)
        finally:
            running.pop()

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *tensors: Any, band: Any, **how: Any) -> Any:
            shapes = tuple(tuple(x.shape) for x in tensors[name == "backward" :][:3])
            key = (name, shapes, str(band))
            if running:
                met.add(key)
            elif key not in met:
                unplanned.append(str(key))
            return method(self, *tensors, band=band, **how)

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Backend, "plans_each_shape", True))
        stack.enter_context(mock.patch.object(WarmUp, "run", warm_up))
        for kernel in (CPUFlash, Reference):
            for name in ("forward", "backward"):
                method = noted(name, getattr(kernel, name))
                stack.enter_context(mock.patch.object(kernel, name, method))
        yield unplanned
