"""Autocast's casts of weights: known when autograd saves one, and made again when backward asks.

Under autocast every product casts its float32 weight, and autograd saves the cast as it would save
an activation. Kept or offloaded, a layer's weights would be there once for every chunk. A cast is
cheap to repeat and the weight is there anyway, so backward repeats it: the bits are the same.

There are two kinds. Autocast remembers casts of trained weights until it ends, and the cast's
`grad_fn` leads to the weight. Casts of frozen weights, and of parts of a weight (one expert's), it
makes anew for every product and leaves no trace of; those are seen as they are made, by a dispatch
mode.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf.offload.storage import SavedWeight

# Of a layer whose casts are fewer than this share of its weights (adapters) they stay.
_WORTH = 0.125


class WeightCasts(TorchDispatchMode):
    """Knows casts of weights among what is saved between `start` and `stop`.

    Args:
        watch: whether there are casts that autocast does not remember.
        label: whose weights they are, for messages.
    """

    def __init__(self, *, watch: bool, label: object = None) -> None:
        super().__init__()
        self._watch = watch
        self._label = label
        # A weak reference keeps a storage's identity from being given to another.
        self._seen: dict[int, tuple[StorageWeakRef, Tensor, int]] = {}

    @classmethod
    def of(cls, layer: nn.Module, device_type: str, label: object = None) -> WeightCasts | None:
        """For one forward of `layer`; None where autocast casts little of its weights or nothing.

        Args:
            layer: the module that runs.
            device_type: of the device that it runs on, "cuda".
            label: whose weights they are, for messages.
        """
        if not torch.is_autocast_enabled(device_type):
            return None
        dtype = torch.get_autocast_dtype(device_type)
        weights = list(layer.parameters())
        cast = [p for p in weights if p.dim() > 1 and _is_cast(p, dtype)]
        if sum(p.numel() for p in cast) <= _WORTH * sum(p.numel() for p in weights):
            return None
        remembered = all(p.requires_grad and p.dim() == 2 for p in cast)
        return cls(watch=not remembered, label=label)

    def start(self) -> None:
        """Begin to look for casts; costs time per operation only where autocast forgets some."""
        if self._watch:
            self.__enter__()

    def stop(self) -> None:
        """Look no more; in the thread of `start`."""
        if self._watch:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Run the operation, and remember the result of a cast of a weight."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _is_weight(args[0]):
            storage = result.untyped_storage()
            # Not detached: here, below autograd, that would count its own versions.
            self._seen[storage._cdata] = StorageWeakRef(storage), args[0], result._version
        return result

    def cast_of(self, saved: Tensor) -> SavedWeight | None:
        """What stands for `saved` if it is a cast of a weight, or a view of one; else None."""
        if type(saved) is not Tensor or not saved.is_floating_point():
            return None
        seen = self._seen.get(saved.untyped_storage()._cdata)
        weight = _remembered(saved) if seen is None else seen[1]
        # What somebody has written into is no longer the cast.
        if weight is None or saved._version != (0 if seen is None else seen[2]):
            return None
        if weight.device != saved.device or not _is_cast(weight, saved.dtype):
            return None
        known = weight if type(weight) is Parameter else weight.detach()
        return SavedWeight.of(known, saved, self._label)


def _is_cast(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.is_floating_point() and weight.dtype not in (dtype, torch.float64)


def _is_weight(tensor: Tensor) -> bool:
    return type(tensor) is Parameter or type(tensor._base) is Parameter


def _remembered(saved: Tensor) -> Tensor | None:
    """The weight whose whole cast `saved` views, as autograd's graph tells."""
    cast = saved if saved._base is None else saved._base
    node = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    return leaf if type(leaf) is Parameter else None
