"""What torch's operations do, as far as recording and replaying matrix products must know it.

All it says follows from an operation's name and signature.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["THIN", "Operation", "operation", "storage_key", "tensors_in"]

THIN = 8
"""A product is thin if it sums over at most the layer's width divided by this."""

_LEFT_FACTOR = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::linear", "aten::matmul"), 0),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmv"), 1),
    **dict.fromkeys(("aten::_grouped_mm", "transformers::grouped_mm_fallback"), 0),
    **dict.fromkeys(("aten::_scaled_mm", "aten::_scaled_mm_v2"), 0),
    **dict.fromkeys(("aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"), 0),
    **dict.fromkeys(("aten::_int_mm", "aten::_mixed_dtypes_linear"), 0),
    **dict.fromkeys(("aten::_weight_int4pack_mm", "aten::_weight_int8pack_mm"), 0),
    **dict.fromkeys(("bitsandbytes::int8_scaled_mm", "bitsandbytes::int8_linear_matmul"), 0),
    **dict.fromkeys(("bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"), 0),
}
"""Matrix products, by the position of the argument over whose last dim they sum."""

_EMPTY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "new_empty", "empty_like", "empty_permuted"),
        *("empty_strided", "new_empty_strided"),
    )
)
_FILLED = frozenset(
    f"aten::{name}"
    for kind in ("zeros", "ones", "full")
    for name in (kind, f"new_{kind}", f"{kind}_like")
)
_ALLOCATES: dict[str, Literal["empty", "constant"]] = {
    **dict.fromkeys(_EMPTY, "empty"),
    **dict.fromkeys(_FILLED, "constant"),
}

_REDRAWN = frozenset(
    f"aten::{name}_" for name in ("bernoulli", "uniform", "normal", "random", "exponential", "copy")
)

_REVEALING = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


@dataclass(frozen=True, slots=True)
class Operation:
    """What is to be known of an operation; see `operation`."""

    name: str
    left_factor: int | None
    writes: tuple[tuple[int, str], ...]
    """Position and name of arguments that it writes into."""
    allocates: Literal["nothing", "empty", "constant"]
    """What is in the memory that it allocates, if that is all it does."""
    redraws: bool
    """Whether it gives all elements of its first argument new values, whatever was there."""
    reveals: bool
    """Whether Python sees values of its arguments: as a number, or by its result's shape."""

    def is_product(self, args: Sequence[Any], width: int) -> bool:
        """Whether it is a thick matrix product."""
        if self.left_factor is None or len(args) <= self.left_factor:
            return False
        return THIN * args[self.left_factor].shape[-1] > width

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """The tensors that it writes into."""
        for position, name in self.writes:
            value = args[position] if position < len(args) else kwargs.get(name)
            yield from tensors_in((value,))


@functools.cache
def operation(func: Any) -> Operation:
    """Reads the signature of `func`, one overload of an operation, once."""
    schema = func._schema
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return Operation(
        name=schema.name,
        # A result written into given memory is somebody's else.
        left_factor=None if writes else _LEFT_FACTOR.get(schema.name),
        writes=writes,
        allocates=_ALLOCATES.get(schema.name, "nothing"),
        redraws=schema.name in _REDRAWN,
        reveals=not _REVEALING.isdisjoint(func.tags),
    )


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among `values` and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def storage_key(tensor: Tensor) -> int | None:
    """Identity of the tensor's memory; None for sparse tensors and the like."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
