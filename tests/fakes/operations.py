"""PyTorch's own operations as work on the fake device, so that ordinary code is checked for races.

While `Operations` is active, every operation is a kernel on the device's current stream: what it
returns anew is allocated there, what it reads and writes is accessed. Views cost nothing. Tensors
from before, and those that no operation has written, are host memory to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.fakes.device import FakeDevice

_ONLY_NAMES_MEMORY = (torch.ops.aten.empty, torch.ops.aten.set_, torch.ops.aten.detach)


class OperatingDevice(FakeDevice):
    """A fake device whose own tensor operations are not counted as the program's."""

    def empty_bytes(self, num_bytes: int) -> Tensor:
        """See `FakeDevice.empty_bytes`."""
        with _disable_current_modes():
            return super().empty_bytes(num_bytes)

    def copy_bytes(self, destination: Tensor, source: Tensor) -> None:
        """See `FakeDevice.copy_bytes`."""
        with _disable_current_modes():
            super().copy_bytes(destination, source)


class Operations(TorchDispatchMode):
    """See the module.

    Args:
        device: gets the operations.
        seconds: duration of each.
    """

    def __init__(self, device: OperatingDevice, *, seconds: float = 0.0) -> None:
        super().__init__()
        self._device = device
        self._seconds = seconds
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ONLY_NAMES_MEMORY:
            return result
        reads = list(_tensors((args, kwargs)))
        known = {tensor.untyped_storage()._cdata for tensor in reads}
        new = [x for x in _tensors(result) if x.untyped_storage()._cdata not in known]
        written = [
            tensor
            for argument, tensor in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(tensor)
        ]
        if not new and not written:
            return result  # a view
        for tensor in new:
            self._device.adopt(tensor)
        self._device.kernel(reads=reads, writes=[*written, *new], seconds=self._seconds)
        self.count += 1
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.numel())
