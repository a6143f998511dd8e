"""Collects logits of one forward call, for callers that want more than the loss.

The loss computes logits tile by tile and drops them. A `LogitsCollector` gets each tile, keeps the
tile or the result of a function of it, and joins the parts. The result is the same as from the
unmodified model's whole logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

# B batch rows, C tokens of a chunk, M tokens of a tile, T tokens of the sequence, V vocabulary.

Reduce = Callable[[Tensor, Tensor], Any]
"""Maps logits `[1, M, V]` and labels `[1, M]` (not shifted) to tensors `[1, M, ...]`, or to lists,
tuples and dicts of such tensors."""


@dataclass(slots=True)
class LogitsRequest:
    """Request for the use of logits, besides the loss, in a call in evaluation."""

    whole: bool
    """Whether the output carries the logits of every token."""
    requested_by: str = ""
    """Who requested whole logits, for a warning of their size; "" for no warning."""
    reduce: Reduce | None = None
    """Called tile by tile if the call has labels of the inputs' shape; else `whole` applies."""
    reduced: Any = None
    """Output: what `reduce` returned, joined to `[B, T, ...]`; None before the call."""
    failure: str = ""
    """Output: why the results could not be joined; "" if they were."""
    logits_tokens: int = 0
    """Output: tokens of the call's sequence; 0 before the call."""
    vocab_size: int = 0
    """Output: size of the call's vocabulary; 0 before the call."""
    logits_dtype: torch.dtype | None = None
    """Output: dtype of the call's logits."""


class NotJoinable(Exception):
    """Results of a function on parts of the logits cannot be joined along the tokens."""


class LogitsCollector:
    """Joins logits, or a function's results on them, over tiles, chunks and groups of rows.

    Args:
        reduce: Called with each tile; None keeps the logits themselves. Once it raises
            `NotJoinable`, or its results cannot be joined, nothing more is collected.
    """

    def __init__(self, reduce: Reduce | None = None) -> None:
        self._reduce = reduce
        self._labels_BC = torch.empty(0, 0, device="cpu")
        self._tiles: list[Any] = []
        self._chunks: list[Any] = []
        self._groups: list[Any] = []
        self.vocab_size = 0
        self.logits_dtype: torch.dtype | None = None
        self.failure = ""
        """Reason why results cannot be joined; "" if they can."""

    def begin_group(self) -> None:
        """Begin the chunks of other rows."""
        self._end_chunk()
        if self._chunks:
            self._groups.append(self._join(self._chunks, dim=1))
        self._chunks = []

    def begin_chunk(self, labels_BC: Tensor) -> None:
        """Begin a chunk with the caller's labels; without `reduce` only their shape is used."""
        self._end_chunk()
        self._labels_BC = labels_BC

    def add(self, logits_MV: Tensor, tile: slice) -> None:
        """Add the logits of a slice of the chunk's tokens, flattened over rows."""
        logits_1MV = logits_MV[None]
        self.vocab_size, self.logits_dtype = logits_1MV.shape[-1], logits_1MV.dtype
        if self._reduce is None:
            self._tiles.append(logits_1MV)
        elif not self.failure:
            self._tiles.append(self._reduced(logits_1MV, self._labels_BC.reshape(1, -1)[:, tile]))

    def result(self) -> Any:
        """Return the joined tensor `[B, T, ...]`, or a nest of such; None if not joinable."""
        self.begin_group()
        joined = self._join(self._groups, dim=0)
        return None if self.failure else joined

    def _reduced(self, logits_1MV: Tensor, labels_1M: Tensor) -> Any:
        assert self._reduce is not None, "called only where there is one"
        try:
            # The caller's function runs outside of autocast, as it does on whole logits.
            with torch.autocast(logits_1MV.device.type, enabled=False):
                reduced = self._reduce(logits_1MV, labels_1M)
            _check_leading(reduced, labels_1M.shape)
        except NotJoinable as error:
            self.failure = str(error)
            return None
        return reduced

    def _end_chunk(self) -> None:
        if not self._tiles:
            return
        shape = self._labels_BC.shape
        flat = self._join(self._tiles, dim=1)
        if not self.failure:
            self._chunks.append(map_tensors(lambda x: x.reshape(*shape, *x.shape[2:]), flat))
        self._tiles = []

    def _join(self, parts: Sequence[Any], *, dim: int) -> Any:
        if self.failure:
            return None
        try:
            return join(parts, dim=dim)
        except NotJoinable as error:
            self.failure = str(error)
            return None


class CollectedLogits:
    """What one call collects for a `LogitsRequest`; false if that is nothing."""

    def __init__(self, request: LogitsRequest) -> None:
        self._request = request
        self._whole = LogitsCollector() if request.whole else None
        self._reduced = None if request.reduce is None else LogitsCollector(request.reduce)
        self._collectors = [one for one in (self._whole, self._reduced) if one is not None]

    def __bool__(self) -> bool:
        return bool(self._collectors)

    def begin_group(self) -> None:
        """Begin the chunks of other rows."""
        for collector in self._collectors:
            collector.begin_group()

    def begin_chunk(self, labels_BC: Tensor) -> None:
        """Begin a chunk with the caller's labels."""
        for collector in self._collectors:
            collector.begin_chunk(labels_BC)

    def add(self, logits_MV: Tensor, tile: slice) -> None:
        """Add the logits of a slice of the chunk's tokens, flattened over rows."""
        for collector in self._collectors:
            collector.add(logits_MV, tile)

    def finish(self, total_tokens: int) -> Tensor | None:
        """Set the outputs of the request; return whole logits `[B, T, V]` if they are requested."""
        request, reduced = self._request, self._reduced
        if reduced is not None:
            request.reduced, request.failure = reduced.result(), reduced.failure
            request.logits_tokens = total_tokens
            request.vocab_size, request.logits_dtype = reduced.vocab_size, reduced.logits_dtype
        return None if self._whole is None else self._whole.result()


def _check_leading(nest: Any, shape: Sequence[int]) -> None:
    """Check that all tensors of a nest begin with `shape`."""

    def check(x: Tensor) -> Tensor:
        if tuple(x.shape[:2]) != tuple(shape):
            raise NotJoinable(
                f"of logits of {tuple(shape)} rows and tokens it made a tensor of {tuple(x.shape)}"
            )
        return x

    map_tensors(check, nest)


def map_tensors(function: Callable[..., Any], nest: Any, *more: Any) -> Any:
    """Map the tensors of nests of tuples, lists and dicts, several at a time if `more` are given.

    Raises:
        NotJoinable: A leaf is not a tensor, or the nests differ.
    """
    leaves, specs = zip(*map(tree_flatten, (nest, *more)), strict=True)
    others = [leaf for one in leaves for leaf in one if not isinstance(leaf, Tensor)]
    if others:
        raise NotJoinable(f"it made a {type(others[0]).__name__}, not a tensor")
    if any(spec != specs[0] for spec in specs):
        raise NotJoinable("it made something else of one part than of another")
    return tree_unflatten(map(function, *leaves), specs[0])


def join(parts: Sequence[Any], *, dim: int) -> Any:
    """Concatenate nests of tensors.

    Raises:
        NotJoinable: The nests differ, or their tensors differ in another dim than `dim`.
    """

    def concatenate(*tensors: Tensor) -> Tensor:
        rests = {(*x.shape[:dim], None, *x.shape[dim + 1 :]) for x in tensors if x.ndim > dim}
        if len(rests) != 1 or any(x.ndim <= dim for x in tensors):
            raise NotJoinable("it made tensors of other shapes of one part than of another")
        return torch.cat(tensors, dim=dim)

    return parts[0] if len(parts) == 1 else map_tensors(concatenate, *parts)


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
            raise NotJoinable("its parts differ from the whole")
        return x

    try:
        map_tensors(check, ours, theirs)
    except NotJoinable:
        return False
    return True
