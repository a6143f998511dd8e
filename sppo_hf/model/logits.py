"""What becomes of the logits of one forward call, for those who want more than the loss.

The loss computes logits tile by tile and drops them. A `LogitsCollector` sees each tile and keeps
it, or keeps what a function makes of it, and joins the parts to what the unmodified model's whole
logits would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# B batch rows, C tokens of a chunk, M tokens of a tile, T tokens of the sequence, V vocabulary.

Reduce = Callable[[Tensor, Tensor], Any]
"""Maps logits `[1, M, V]` and labels `[1, M]` (not shifted) to tensors that begin with `[1, M]`, or
to lists, tuples and dicts of such."""


@dataclass(slots=True)
class LogitsRequest:
    """What a call in evaluation is to do with logits besides computing the loss."""

    whole: bool
    """Whether the output carries the logits of every token."""
    asked_by: str = ""
    """Who wants whole logits, for a warning of their size; "" for none."""
    reduce: Reduce | None = None
    """Called tile by tile, if the call has labels of the inputs' shape; else `whole` holds."""
    reduced: Any = None
    """What it returned, joined to `[B, T, ...]`; None while no call has been made."""
    logits_tokens: int = 0
    """T of that call."""
    vocab_size: int = 0
    """V of that call."""


class NotTokenWise(Exception):
    """The parts that a function returned cannot be joined along the tokens."""


class LogitsCollector:
    """Joins logits, or what a function makes of them, over tiles, chunks and groups of rows.

    Args:
        reduce: Is given each tile; None keeps the logits themselves.
    """

    def __init__(self, reduce: Reduce | None = None) -> None:
        self._reduce = reduce
        self._labels_BC = torch.empty(0, 0)
        self._tiles: list[Any] = []
        self._chunks: list[Any] = []
        self._groups: list[Any] = []
        self.vocab_size = 0

    def begin_group(self) -> None:
        """The chunks of other rows come next."""
        self._end_chunk()
        if self._chunks:
            self._groups.append(join(self._chunks, dim=1))
        self._chunks = []

    def begin_chunk(self, labels_BC: Tensor) -> None:
        """The tiles of a chunk come next.

        Args:
            labels_BC: Its labels as the caller gave them; of a collector without `reduce` only the
                shape counts.
        """
        self._end_chunk()
        self._labels_BC = labels_BC

    def add(self, logits_MV: Tensor, tile: slice) -> None:
        """Take the logits of some tokens of the chunk, whose rows lie one behind the other."""
        logits_1MV = logits_MV.detach()[None]
        self.vocab_size = logits_1MV.shape[-1]
        if self._reduce is None:
            self._tiles.append(logits_1MV)
            return
        labels_1M = self._labels_BC.reshape(1, -1)[:, tile]
        # The caller's function runs outside of autocast, as it does on whole logits.
        with torch.autocast(logits_1MV.device.type, enabled=False):
            self._tiles.append(self._reduce(logits_1MV, labels_1M))
        check_leading(self._tiles[-1], labels_1M.shape)

    def result(self) -> Any:
        """What was kept, `[B, T, ...]`: a tensor, or a nest of tensors as the function's."""
        self.begin_group()
        return join(self._groups, dim=0)

    def _end_chunk(self) -> None:
        if not self._tiles:
            return
        shape = self._labels_BC.shape
        flat = join(self._tiles, dim=1)
        self._chunks.append(map_tensors(lambda x: x.reshape(*shape, *x.shape[2:]), flat))
        self._tiles = []


def check_leading(nest: Any, shape: Sequence[int]) -> None:
    """Check that all tensors of a nest begin with `shape`.

    Raises:
        NotTokenWise: One does not, or there is something else than tensors.
    """

    def check(x: Tensor) -> Tensor:
        if tuple(x.shape[:2]) != tuple(shape):
            raise NotTokenWise(
                f"of logits of {tuple(shape)} rows and tokens it made a tensor of {tuple(x.shape)}"
            )
        return x

    map_tensors(check, nest)


def map_tensors(function: Callable[..., Any], nest: Any, *more: Any) -> Any:
    """Apply a function to the tensors of a nest of tuples, lists and dicts, or of several alike.

    Raises:
        NotTokenWise: There is something else in it, or the nests differ.
    """
    if isinstance(nest, Tensor) and all(isinstance(x, Tensor) for x in more):
        return function(nest, *more)
    if any(type(x) is not type(nest) for x in more):
        raise NotTokenWise(f"it made a {type(nest).__name__} of one part and not of another")
    if isinstance(nest, Mapping):
        if any(x.keys() != nest.keys() for x in more):
            raise NotTokenWise("it made other keys of one part than of another")
        return {k: map_tensors(function, v, *(x[k] for x in more)) for k, v in nest.items()}
    if isinstance(nest, list | tuple):
        if any(len(x) != len(nest) for x in more):
            raise NotTokenWise("it made other lengths of one part than of another")
        mapped = [map_tensors(function, *items) for items in zip(nest, *more, strict=True)]
        if hasattr(nest, "_fields"):
            return type(nest)(*mapped)
        return type(nest)(mapped)
    raise NotTokenWise(f"it made a {type(nest).__name__}, not a tensor")


def join(parts: Sequence[Any], *, dim: int) -> Any:
    """Concatenate nests of tensors."""
    if len(parts) == 1:
        return parts[0]
    return map_tensors(lambda *tensors: torch.cat(tensors, dim=dim), *parts)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two nests hold the same numbers: integers exactly, floats up to rounding."""

    def check(x: Tensor, y: Tensor) -> Tensor:
        alike = x.shape == y.shape and x.dtype == y.dtype
        if alike and x.is_floating_point():
            near = 64 * torch.finfo(x.dtype).eps
            alike = torch.allclose(x, y, rtol=near, atol=near, equal_nan=True)
        elif alike:
            alike = torch.equal(x, y)
        if not alike:
            raise NotTokenWise("its parts differ from the whole")
        return x

    try:
        map_tensors(check, ours, theirs)
    except NotTokenWise:
        return False
    return True
