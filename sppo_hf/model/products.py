"""Outputs of a layer's matrix products: recorded in its first forward, played back in its second.

Both are dispatch modes: they see every operation below autograd, so the graph that autograd builds
above them is the usual one, and it does not matter who multiplies: `nn.Linear`, GPT-2's `Conv1D`,
a loop over experts, a grouped product, LoRA, or a quantised layer's own autograd function. Hooks on
modules would miss most of these.

They know nothing of frames, chunks or tiers. Attention's own products are its backend's affair: the
recorder is paused while it runs, and in the second forward it does not run.

[Note: which products are kept]
1. *Thick* ones. A product that sums over at most an eighth of the layer's width (LoRA's second
   factor, say) costs little more than writing its output, so it is computed again.
2. Those that a saved tensor depends on, otherwise than through another kept product or through
   attention. Key and value projections serve attention alone, and the last projection of a layer
   serves the next layer, so their outputs are not kept (a key norm, which saves its input, changes
   that). In the second forward zeros stand for them.

What depends on what is followed from operation to operation, by storage. A kernel that torch does
not see (Triton's) leaves no trace, but it writes into memory that torch has allocated; so whatever
is in freshly allocated memory is taken to depend on all products so far.

[Note: writing into a product]
A kept product must be what the product returned, and not what became of it. If an operation is
about to write into it, a copy is kept instead. A kernel that torch does not see may do so too
(rotary embedding in place, say). Therefore a layer's first recorder copies all products at once and
compares in the end; where something has changed, all recorders of that layer copy from then on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf.errors import SPPOError
from sppo_hf.model.holders import Holder

__all__ = ["THIN", "Product", "ProductPlayer", "ProductRecorder"]

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

_BLANK = frozenset(
    f"aten::{prefix}{name}"
    for name in ("empty", "zeros", "ones", "full")
    for prefix in ("", "new_")
) | frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("empty_strided", "new_empty_strided", "empty_permuted"),
    )
)
"""Memory that anybody may write into."""

_REDRAWN = frozenset(
    f"aten::{name}_" for name in ("bernoulli", "uniform", "normal", "random", "exponential", "copy")
)
"""Operations that give all elements new values, whatever was there."""

_EVERYTHING = -1
"""In place of a set of products: all that were recorded when it is read."""

_written_unseen: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""By layer: whether something torch does not see writes into products; see the note."""


@dataclass(slots=True)
class Product:
    """One matrix product of a layer's first forward."""

    name: str
    """Of the operation."""
    shapes: tuple[torch.Size, ...]
    """Of its arguments."""
    blank: Callable[[], Tensor]
    """Makes zeros of the output's layout."""
    holder: Holder | None = None
    """The output, if it is needed again."""


@dataclass(slots=True)
class _Fresh:
    """What a recorder knows of a product's output until it stops."""

    output: Tensor
    copy: Tensor | None
    written: bool = False


class ProductRecorder(TorchDispatchMode):
    """Records a layer's matrix products and holds the outputs that are needed again.

    Use: `start()`, the layer's forward with `saved` called for all that autograd saves, `stop()`;
    all in one thread.
    """

    def __init__(
        self, layer: nn.Module, *, width: int, hold: Callable[[str, Tensor], Holder]
    ) -> None:
        """Prepare.

        Args:
            layer: What runs; only remembered, see [Note: writing into a product].
            width: Size of the layer's input, against which products are thin.
            hold: Gives an output its place until backward; called with a name that is the same
                in every layer of the same kind, at most once for a name unless an output is
                written into.
        """
        super().__init__()
        self._layer = layer
        self._width = width
        self._hold = hold
        self._copies = _written_unseen.get(layer, True)
        self._products: list[Product] = []
        self._fresh: list[_Fresh] = []
        self._index_of: dict[int, int] = {}
        # Sets of products are bits of an integer: a union is one operation, for 400 products too.
        self._depends: dict[int, int] = {}
        self._needed = 0
        self._running = False

    # -- what the layer's frame calls --------------------------------------------------------

    def start(self) -> None:
        """Watch all operations of this thread."""
        self.__enter__()
        self._running = True

    def pause(self) -> None:
        """Let operations pass unseen, as attention's are."""
        current = _python_dispatch._get_current_dispatch_mode()
        assert current is self, "who enters a dispatch mode within a layer leaves it there too"
        self.__exit__(None, None, None)
        self._running = False

    def resume(self, *independent: Tensor) -> None:
        """Go on watching; `independent` come from elsewhere when the layer runs again."""
        self.start()
        for tensor in independent:
            self._set(tensor, 0)

    def saved(self, tensor: Tensor) -> None:
        """Hold the products that `tensor`, which autograd saves, depends on."""
        depends = self._read(tensor) & ~self._needed
        if not depends:
            return
        self.pause()  # what moves a tensor is not the layer's work
        for index in _bits(depends):
            self._keep(index)
        self.resume()

    def stop(self) -> tuple[Product, ...]:
        """Stop watching; returns all products in order."""
        self.abandon()
        if self._layer not in _written_unseen:
            _written_unseen[self._layer] = any(
                not fresh.written and fresh.copy is not None and _differ(fresh.output, fresh.copy)
                for fresh in self._fresh
            )
        self._fresh.clear()
        return tuple(self._products)

    def abandon(self) -> None:
        """Stop watching after an exception."""
        if self._running:
            self.pause()

    # -- what torch calls --------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note which products its results depend on."""
        kwargs = kwargs or {}
        kind = _kind(func)
        depends = 0
        for tensor in _tensors(args):
            depends |= self._read(tensor)
        for tensor in _tensors(kwargs.values()):
            depends |= self._read(tensor)
        if kind.writes:
            self._before_writing(kind, args, kwargs)
        output = func(*args, **kwargs)
        if kind.is_product(args, self._width) and isinstance(output, Tensor):
            self._record(kind.name, args, output)
        elif kind.writes:
            self._after_writing(kind, args, kwargs, depends)
        else:
            for tensor in _tensors((output,)):
                self._set(tensor, _EVERYTHING if kind.blank else depends)
        return output

    def _record(self, name: str, args: Sequence[Any], output: Tensor) -> None:
        index = len(self._products)
        self._products.append(Product(name, _shapes(args), _zeros_like(output)))
        # Detached: the output itself is about to become part of the graph.
        self._fresh.append(_Fresh(output.detach(), output.clone() if self._copies else None))
        self._set(output, 1 << index)
        storage = _storage(output)
        if storage is not None:
            self._index_of[storage] = index
        if type(output) is not Tensor:
            self._keep(index)  # zeros could not stand for it

    def _before_writing(self, kind: _Kind, args: Any, kwargs: Any) -> None:
        for tensor in kind.written(args, kwargs):
            index = self._index_of.get(_storage(tensor) or 0)
            if index is not None and not self._fresh[index].written:
                fresh = self._fresh[index]
                fresh.copy = fresh.output.clone() if fresh.copy is None else fresh.copy
                fresh.written = True
                self._keep(index)

    def _after_writing(self, kind: _Kind, args: Any, kwargs: Any, depends: int) -> None:
        redrawn = kind.redraws and _is_whole(args[0])
        if redrawn:
            depends = 0
            for tensor in _tensors(args[1:]):
                depends |= self._read(tensor)
        for tensor in kind.written(args, kwargs):
            before = self._depends.get(_storage(tensor) or 0, 0)
            self._set(tensor, before if before == _EVERYTHING and not redrawn else depends)

    def _keep(self, index: int) -> None:
        """Hold product `index`, in place of what was held of it before."""
        product, fresh = self._products[index], self._fresh[index]
        if product.holder is not None:
            product.holder.drop()
        value = fresh.output if fresh.copy is None else fresh.copy
        product.holder = self._hold(f"product {index}", value)
        self._needed |= 1 << index

    def _read(self, tensor: Tensor) -> int:
        storage = _storage(tensor)
        depends = _EVERYTHING if storage is None else self._depends.get(storage, 0)
        return (1 << len(self._products)) - 1 if depends == _EVERYTHING else depends

    def _set(self, tensor: Tensor, depends: int) -> None:
        storage = _storage(tensor)
        if storage is not None:
            self._depends[storage] = depends


class ProductPlayer(TorchDispatchMode):
    """Answers a layer's matrix products, in order, by what a recorder held."""

    def __init__(self, products: Sequence[Product], *, width: int, label: str) -> None:
        """Prepare to play `products` of a layer of `width`; `label` names it in errors."""
        super().__init__()
        self._products = products
        self._width = width
        self._label = label
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it is a product.

        Raises:
            SPPOError: The layer multiplies what it did not multiply in its first forward.
        """
        kind = _kind(func)
        if not kind.is_product(args, self._width):
            return func(*args, **(kwargs or {}))
        index, self._next = self._next, self._next + 1
        expected = self._products[index] if index < len(self._products) else None
        if expected is None or (expected.name, expected.shapes) != (kind.name, _shapes(args)):
            before = f"{expected.name} of {_listed(expected.shapes)}" if expected else "not there"
            raise SPPOError(
                f"{self._label}: matrix product {index} was {before} in forward, and is "
                f"{kind.name} of {_listed(_shapes(args))} when recomputed. The layer's forward "
                "depends on something that changed in between. Set recompute='none' for this model."
            )
        # Detached: autograd makes a result its own, and must not meet a view of something else.
        return expected.blank() if expected.holder is None else expected.holder.take().detach()


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is to be known of an operation."""

    name: str
    left_factor: int | None
    writes: tuple[tuple[int, str], ...]
    """Position and name of arguments that it writes into."""
    blank: bool
    redraws: bool

    def is_product(self, args: Sequence[Any], width: int) -> bool:
        """Whether it is a thick matrix product."""
        if self.left_factor is None:
            return False
        return THIN * args[self.left_factor].shape[-1] > width

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """The tensors that it writes into."""
        for position, name in self.writes:
            value = args[position] if position < len(args) else kwargs.get(name)
            yield from _tensors((value,))


@functools.cache
def _kind(func: Any) -> _Kind:
    schema = func._schema
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return _Kind(
        name=schema.name,
        # A result written into given memory is somebody's else.
        left_factor=None if writes else _LEFT_FACTOR.get(schema.name),
        writes=writes,
        blank=schema.name in _BLANK,
        redraws=schema.name in _REDRAWN,
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _shapes(args: Sequence[Any]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in _tensors(args))


def _listed(shapes: Sequence[torch.Size]) -> str:
    return " and ".join(str(tuple(shape)) for shape in shapes)


def _storage(tensor: Tensor) -> int | None:
    """Identity of the tensor's memory; None for sparse tensors and the like."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _is_whole(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _zeros_like(tensor: Tensor) -> Callable[[], Tensor]:
    size, stride = tensor.shape, tensor.stride()
    dtype, device = tensor.dtype, tensor.device
    return lambda: torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether any bit differs; NaNs are equal to themselves here."""
    if type(one) is not Tensor:
        return not torch.equal(one, other)
    bits = (x.contiguous().view(torch.uint8) for x in (one, other))
    return not torch.equal(*bits)
