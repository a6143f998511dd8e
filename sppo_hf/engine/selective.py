"""Outputs of a layer's matrix products: recorded in its first forward, played back in its second.

Both are dispatch modes: they see every operation below autograd, so the graph that autograd builds
above them is the usual one, and it does not matter who multiplies: `nn.Linear`, GPT-2's `Conv1D`,
a loop over experts, a grouped product, LoRA, or a quantised layer's own autograd function. Hooks on
modules would miss most of these.

Attention's own products are its backend's affair: the recorder is paused while it runs, and in the
second forward it does not run (where it does, nothing is recorded or played back).

[Note: which products are kept]
1. *Thick* ones. A product that sums over at most an eighth of the layer's width (LoRA's second
   factor, say) costs little more than writing its output, so it is computed again.
2. Those of activations. A product of weights alone (an adapter merged on the fly) is as large as a
   weight, so it is computed again too.
3. Those that a saved tensor, or a value that Python asks for, depends on otherwise than through
   another product or through attention. Key and value projections serve attention alone, and the
   last projection of a layer serves the next layer, so their outputs are not kept (a key norm,
   which saves its input, changes that). In the second forward zeros stand for them.

What depends on what is followed from operation to operation, by storage. A kernel that torch does
not see (Triton's) leaves no trace, but it writes into memory that torch has allocated; so whatever
is in freshly allocated memory is taken to depend on all products so far. Memory filled with a
constant stops being suspect when torch itself writes into it, as scattering into zeros does.

[Note: writing into a product]
A kept product must be what the product returned, and not what became of it. If an operation is
about to write into it, a copy is kept instead. A kernel that torch does not see may do so too
(rotary embedding in place, say). Therefore the first recorder of a kind of layer copies all
products at once and compares in the end, which the host waits for; where something has changed, all
recorders of such layers copy from then on. Not the first of each layer: the last one's copies would
come when the device is full.

[Note: needless products]
Where no product is kept, the second forward computes them, but not all are needed: key and value
projections serve attention alone, which is not repeated, and an adapter's frozen product comes
before the last values that autograd saves (the input of the adapter's second factor), though none
of them depends on it. The first second forward of a layer finds those that no saved tensor depends
on, in however many steps; from then on zeros stand for them. A layer that asks for values, or
writes into what lasts longer than itself, keeps all. What was found holds for layers that save the
same and multiply in the same order between the same saved tensors; this is checked product by
product, and where it is not so the layer runs once more, with all of its products.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf.errors import SPPOError

if TYPE_CHECKING:
    from sppo_hf.engine.recompute import SavedTensor


# Sets of products are bits of an integer: a union is one operation, for 400 products too. The
# lowest bit stands for the layer's input and for attention's output, product n for bit n + 1.
_ACTIVATION = 1
_EVERYTHING = -1
"""In place of a set: all products recorded when it is read."""
_CONSTANT = -2
"""The same, until torch writes into it."""

_ALLOCATED = {"empty": _EVERYTHING, "constant": _CONSTANT}

_written_unseen: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, bool]]
_written_unseen = weakref.WeakKeyDictionary()
"""By model and kind of layer: whether something torch does not see writes into products; see the
note."""


_kinds: weakref.WeakKeyDictionary[nn.Module, Hashable] = weakref.WeakKeyDictionary()


def _kind_of(layer: nn.Module) -> Hashable:
    """What is the same for layers of a model that run the same code, whatever their number is."""
    if layer not in _kinds:
        _kinds[layer] = tuple(
            (type(module), "forward" in module.__dict__, tuple(_settings(module)))
            for module in layer.modules()
        )
    return _kinds[layer]


def _settings(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Attributes that may make one layer of a class another one: a window, no rotary embedding."""
    for name, value in vars(module).items():
        if name != "layer_idx" and isinstance(value, bool | int | float | str):
            yield name, value


_UNSEEN = "a module in tiles"
"""In place of an operation's name: what ran while nobody watched."""


@dataclass(slots=True)
class Matmul:
    """One matrix product of a layer's first forward."""

    name: str
    """Of the operation."""
    shapes: tuple[torch.Size, ...]
    """Of its arguments."""
    blank: Callable[[], Tensor]
    """Makes zeros of the output's layout."""
    holder: SavedTensor | None = None
    """The output, if it is needed again."""
    of_weights: bool = False
    """Whether no activation took part: computed again."""


@dataclass(slots=True)
class _Fresh:
    """What a recorder knows of a product's output until it stops."""

    output: Tensor
    copy: Tensor | None
    written: bool = False


class LightDispatchMode(TorchDispatchMode):
    """A dispatch mode that does not ask torch.compile to leave its code alone.

    That takes a fifth of what a mode costs each operation, and there is nothing to leave alone: no
    mode of ours runs beside compiled layers.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


RunOperation = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
"""Runs an operation on arguments, by position and by name."""


def run_operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operation, watched by nobody."""
    return func(*args, **kwargs)


class DependencyTracker(LightDispatchMode):
    """Follows, by storage, which of a layer's products each tensor depends on."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._width = hidden.shape[-1]
        self._depends: dict[int, int] = {}
        self._num_products = 0
        self._set(hidden, _ACTIVATION)

    def given(self, *tensors: Tensor) -> None:
        """`tensors` come from elsewhere when the layer runs again."""
        for tensor in tensors:
            self._set(tensor, _ACTIVATION)

    def _product(
        self, func: Any, op: Operation, args: Sequence[Any], output: Tensor, depends: int
    ) -> None:
        """A product has run on what depends on `depends`; it gets its bit, or not."""
        raise NotImplementedError

    def _need(self, depends: int) -> None:
        """Something outside the layer sees what depends on `depends`."""
        raise NotImplementedError

    def _before_write(self, tensor: Tensor) -> None:
        """`tensor` is about to be written into."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; see `watch`."""
        return self.watch(run_operation, func, args, kwargs or {})

    def watch(
        self, run: RunOperation, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Let `run` run the operation, and note which products its results depend on."""
        op = operation(func)
        if op.writes:
            return self._write(run, func, op, args, kwargs)
        depends = 0
        for tensor in tensors_in((*args, *kwargs.values())):
            depends |= self._read(tensor)
        output = run(func, args, kwargs)
        if op.reveals:  # the layer may do one thing or another because of it
            self._need(depends)
        if op.is_product(args, self._width):
            self._product(func, op, args, output, depends)
        else:
            for tensor in tensors_in((output,)):
                self._set(tensor, _ALLOCATED.get(op.allocates, depends))
        return output

    def _write(self, run: RunOperation, func: Any, op: Operation, args: Any, kwargs: Any) -> Any:
        written = tuple(op.written(args, kwargs))
        for tensor in written:
            self._before_write(tensor)
        redrawn = op.redraws and _is_whole(args[0])
        before = [self._depends.get(storage_key(tensor) or 0, 0) for tensor in written]
        # What a constant, or what is replaced altogether, held before does not count.
        gone = {
            storage_key(tensor)
            for tensor, depends in zip(written, before, strict=True)
            if redrawn or depends == _CONSTANT
        }
        depends = 0
        for tensor in tensors_in((*args, *kwargs.values())):
            if storage_key(tensor) not in gone:
                depends |= self._read(tensor)
        output = run(func, args, kwargs)
        for tensor, was in zip(written, before, strict=True):
            self._set(tensor, was if was == _EVERYTHING and not redrawn else depends)
        return output

    def _read(self, tensor: Tensor) -> int:
        storage = storage_key(tensor)
        depends = _EVERYTHING if storage is None else self._depends.get(storage, 0)
        return depends if depends >= 0 else (2 << self._num_products) - 1

    def _set(self, tensor: Tensor, depends: int) -> None:
        storage = storage_key(tensor)
        if storage is not None:
            self._depends[storage] = depends


class SelectiveRecorder(DependencyTracker):
    """Records a layer's matrix products and holds the outputs that are needed again.

    Use: `start()`, the layer's forward with `saved` called for all that autograd saves, `stop()`;
    all in one thread.
    """

    def __init__(
        self,
        layer: nn.Module,
        hidden: Tensor,
        *,
        hold: Callable[[str, Tensor], SavedTensor],
        model: nn.Module | None = None,
        without_memory: bool = False,
    ) -> None:
        """Prepare.

        Args:
            layer: What runs; only its kind is asked for, see [Note: writing into a product].
            hidden: The layer's input `[..., D]`.
            hold: Gives an output its place until backward; called with a name that is the same
                in every layer of the same kind, at most once for a name unless an output is
                written into.
            model: Whose layers of a kind run the same code; None where this one is alone.
            without_memory: Whether tensors are fake: nothing is written into them unseen, and
                they are no more than their shape.
        """
        super().__init__(hidden)
        self._kind = _kind_of(layer)
        self._written_unseen = _written_unseen.setdefault(layer if model is None else model, {})
        self._hold = hold
        self._without_memory = without_memory
        self._copies = not without_memory and self._written_unseen.get(self._kind, True)
        self._products: list[Matmul] = []
        self._fresh: list[_Fresh] = []
        self._index_of: dict[int, int] = {}
        self._needed = 0
        self._running = False

    # -- what the layer's frame calls --------------------------------------------------------

    def start(self, *given: Tensor) -> None:
        """Watch all operations of this thread; `given` are there when the layer runs again."""
        self.given(*given)
        self._begin()
        self._running = True

    def pause(self) -> None:
        """Let operations pass unseen, as attention's are."""
        self._end()
        self._running = False

    @property
    def is_running(self) -> bool:
        """Whether operations are watched now."""
        return self._running

    def _begin(self) -> None:
        self.__enter__()

    def _end(self) -> None:
        current = _python_dispatch._get_current_dispatch_mode()
        assert current is self, "who enters a dispatch mode within a layer leaves it there too"
        self.__exit__(None, None, None)

    def resume(self, *given: Tensor) -> None:
        """Go on watching; `given` come from elsewhere when the layer runs again."""
        self.start(*given)

    def saved(self, tensor: Tensor) -> None:
        """Hold the products that `tensor`, which autograd saves, depends on."""
        depends = self._read(tensor)
        if depends >> 1 & ~self._needed:
            self.pause()  # what moves a tensor is not the layer's work
            self._need(depends)
            self.resume()

    def stop(self) -> tuple[Matmul, ...]:
        """Stop watching; returns all products in order."""
        self.abandon()
        if self._kind not in self._written_unseen and not self._without_memory:
            self._written_unseen[self._kind] = any(
                not fresh.written and fresh.copy is not None and _differ(fresh.output, fresh.copy)
                for fresh in self._fresh
            )
        self._fresh.clear()
        return tuple(self._products)

    def abandon(self) -> None:
        """Stop watching after an exception."""
        if self._running:
            self.pause()

    def add_unseen(self, given: Tensor, outputs: Sequence[Tensor], *, as_products: bool) -> None:
        """Take note of what ran unseen on `given` and returned `outputs`.

        They are held like products, or made again.
        """
        depends = self._read(given)
        for output in outputs:
            if as_products:
                self._add(Matmul(_UNSEEN, (), _zeros_like(output)), output)
            else:
                self._set(output, depends)

    # -- what torch calls --------------------------------------------------------------------

    def _product(
        self, func: Any, op: Operation, args: Sequence[Any], output: Tensor, depends: int
    ) -> None:
        product = Matmul(op.name, _shapes(args), _zeros_like(output), of_weights=depends == 0)
        self._add(product, output)

    def _add(self, product: Matmul, output: Tensor) -> None:
        index = self._num_products
        self._products.append(product)
        self._num_products += 1
        if product.of_weights:
            self._fresh.append(_Fresh(output.new_empty(0), None))
            self._set(output, 0)
            return
        # Detached: the output itself is about to become part of the graph.
        self._fresh.append(_Fresh(output.detach(), output.clone() if self._copies else None))
        self._set(output, 2 << index)
        storage = storage_key(output)
        if storage is not None:
            self._index_of[storage] = index
        if type(output) is not Tensor and not self._without_memory:
            self._keep(index)  # zeros could not stand for it

    def _before_write(self, tensor: Tensor) -> None:
        index = self._index_of.get(storage_key(tensor) or 0)
        if index is not None and not self._fresh[index].written:
            fresh = self._fresh[index]
            fresh.copy = fresh.output.clone() if fresh.copy is None else fresh.copy
            fresh.written = True
            self._keep(index)

    def _need(self, depends: int) -> None:
        for index in _bits(depends >> 1 & ~self._needed):
            self._keep(index)

    def _keep(self, index: int) -> None:
        """Hold product `index`, in place of what was held of it before."""
        product, fresh = self._products[index], self._fresh[index]
        if product.holder is not None:
            product.holder.drop()
        value = fresh.output if fresh.copy is None else fresh.copy
        product.holder = self._hold(f"product {index}", value)
        self._needed |= 1 << index


class SelectiveReplayer(LightDispatchMode):
    """Answers a layer's matrix products, in order, by what a recorder held."""

    def __init__(self, products: Sequence[Matmul], *, width: int, label: str) -> None:
        """Prepare to play `selective` of a layer of `width`; `label` names it in errors."""
        super().__init__()
        self._products = products
        self._width = width
        self._label = label
        self._next = 0

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves `tensor`, as it did before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it is a product.

        Raises:
            SPPOError: The layer multiplies what it did not multiply in its first forward.
        """
        op = operation(func)
        if not op.is_product(args, self._width):
            return func(*args, **(kwargs or {}))
        expected = self._expect(op.name, _shapes(args))
        return func(*args, **(kwargs or {})) if expected.of_weights else _played(expected)

    def unseen(self, count: int) -> list[Tensor]:
        """What the next thing that ran unseen returned, `count` tensors; zeros if not needed."""
        return [_played(self._expect(_UNSEEN, ())) for _ in range(count)]

    def _expect(self, name: str, shapes: tuple[torch.Size, ...]) -> Matmul:
        index, self._next = self._next, self._next + 1
        expected = self._products[index] if index < len(self._products) else None
        if expected is None or (expected.name, expected.shapes) != (name, shapes):
            before = f"{expected.name} of {_listed(expected.shapes)}" if expected else "not there"
            raise SPPOError(
                f"{self._label}: matrix product {index} was {before} in forward, and is "
                f"{name} of {_listed(shapes)} when recomputed. The layer's forward "
                "depends on something that changed in between. Set recompute='none' for this model."
            )
        return expected


def _played(product: Matmul) -> Tensor:
    # Detached: autograd makes a result its own, and must not meet a view of something else.
    return product.blank() if product.holder is None else product.holder.take().detach()


@dataclass(frozen=True, slots=True)
class UnusedMatmuls:
    """Which of the products of a layer's second forward nothing depends on that backward reads."""

    signatures: tuple[Hashable, ...]
    """Of all thick products, in order."""
    blank: tuple[bool, ...]
    """Whether zeros can stand for the product."""


class UnusedMatmulFinder(DependencyTracker):
    """Finds, while a layer runs for the second time, which of its products nobody needs.

    See [Note: needless products]. Use as a context; call `saved` for all that autograd saves.
    """

    def __init__(self, hidden: Tensor, *, without_memory: bool = False) -> None:
        """Prepare for a layer with input `hidden`, `[..., D]`; see `SelectiveRecorder`."""
        super().__init__(hidden)
        self._without_memory = without_memory
        self._signatures: list[Hashable] = []
        self._of_inputs: list[int] = []
        self._always: int = 0
        self._num_saved = 0
        self._reveals = False

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves `tensor`."""
        self._always |= self._read(tensor)
        self._num_saved += 1

    def result(self) -> UnusedMatmuls | None:
        """What was found; None if there is nothing to save, or the layer decides by values."""
        needed, seen = self._always >> 1, 0
        while fresh := needed & ~seen:
            seen |= fresh
            for index in _bits(fresh):
                needed |= self._of_inputs[index] >> 1
        blank = tuple(not needed >> index & 1 for index in range(self._num_products))
        if self._reveals or not any(blank):
            return None
        return UnusedMatmuls(tuple(self._signatures), blank)

    def _product(
        self, func: Any, op: Operation, args: Sequence[Any], output: Tensor, depends: int
    ) -> None:
        index = self._num_products
        self._signatures.append(_signature(func, args, self._num_saved))
        self._of_inputs.append(depends)
        self._num_products += 1
        self._set(output, 2 << index)
        if func not in _BLANKS or not (self._without_memory or _is_plain(args)):
            self._always |= 2 << index

    def _before_write(self, tensor: Tensor) -> None:
        if (storage_key(tensor) or 0) not in self._depends:
            self._reveals = True  # into what was there before the layer, and may be there after it

    def _need(self, depends: int) -> None:
        self._always |= depends
        self._reveals = self._reveals or depends > 0


class MatmulsChanged(Exception):
    """The layer's products are not those that a `UnusedMatmuls` was found for."""


class UnusedMatmulSkipper(LightDispatchMode):
    """Lets zeros stand for needless products; a context for a layer's second forward."""

    def __init__(self, needless: UnusedMatmuls, *, width: int) -> None:
        super().__init__()
        self._needless = needless
        self._width = width
        self._next = 0
        self._num_saved = 0

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves `tensor`."""
        self._num_saved += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it is a needless product.

        Raises:
            MatmulsChanged: The product is another one than was recorded.
        """
        if not operation(func).is_product(args, self._width):
            return func(*args, **(kwargs or {}))
        index, self._next = self._next, self._next + 1
        signatures = self._needless.signatures
        if index >= len(signatures) or signatures[index] != _signature(func, args, self._num_saved):
            raise MatmulsChanged
        if not self._needless.blank[index] or not _is_plain(args):
            return func(*args, **(kwargs or {}))
        left, right = _BLANKS[func](args)
        return left.new_zeros(*left.shape[:-1], right.shape[-1])


_BLANKS: dict[Any, Callable[[Sequence[Any]], tuple[Tensor, Tensor]]] = {
    torch.ops.aten.mm.default: lambda args: (args[0], args[1]),
    torch.ops.aten.addmm.default: lambda args: (args[1], args[2]),
    torch.ops.aten.bmm.default: lambda args: (args[0], args[1]),
}
"""Products whose output is known without computing it, with their two factors."""


def _signature(func: Any, args: Sequence[Any], num_saved: int) -> Hashable:
    """What is the same for every number of tokens."""
    return func, tuple(tensor.shape[-1:] for tensor in tensors_in(args)), num_saved


def _is_plain(args: Sequence[Any]) -> bool:
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors_in(args))


def _shapes(args: Sequence[Any]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors_in(args))


def _listed(shapes: Sequence[torch.Size]) -> str:
    return " and ".join(str(tuple(shape)) for shape in shapes)


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


# -- what operations do ------------------------------------------------------------------------

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
