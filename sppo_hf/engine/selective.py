"""Matmul outputs of a layer: recorded in its first forward, replayed when it is rerun.

Recorder and replayer are dispatch modes: they see every operation below autograd. So the graph that
autograd builds above them is the usual one, and all callers of matmuls are covered: `nn.Linear`,
GPT-2's `Conv1D`, a loop over experts, a grouped matmul, LoRA, or a quantised layer's own autograd
function. Hooks on modules would miss most of these. Matmuls inside attention belong to its backend:
the recorder is paused while attention runs, and a rerun that replays does not run attention.

[Note: which matmuls are kept]
Outputs are saved of matmuls that meet all of these conditions:
1. *Thick*: they sum over more than an eighth of the layer's width. Thin ones (LoRA's second factor,
   say) cost little more than writing their output, so they are recomputed.
2. Of activations: a product of weights alone (an adapter merged on the fly) is as large as a
   weight, so it is recomputed too.
3. Needed: a saved tensor, or a value that Python reads, depends on the output other than through
   another matmul or attention. Outputs of key and value projections are read by attention alone,
   and that of a layer's last projection by the next layer, so they are not saved (unless there is a
   key norm, which saves its input). In the rerun zeros take their place.

Dependencies are followed from operation to operation, by storage. A kernel that torch does not see
(Triton's) is not tracked, but it writes into memory that torch has allocated; so freshly allocated
memory is assumed to depend on all earlier matmuls. For memory filled with a constant this ends when
torch itself writes into it, as scattering into zeros does.

[Note: writing into a matmul's output]
The saved output must be what the matmul returned, even if it is modified later. If an operation is
about to write into it, a copy is saved instead; but if the operation adds another product before
anything has read it, as LoRA layers do (see `layer_kernels`), the sum is saved, and the rerun
leaves out both. A kernel that torch does not see may write too (rotary embedding in place, say). So
the first recorder for a kind of layer copies all outputs at once and compares them at the end, for
which the host waits; if any has changed, all later recorders for such layers copy. Layers of one
kind are checked once and not each, because the last layers' copies would be made when the device is
full.

[Note: unused matmuls]
If no outputs are saved, a rerun computes the matmuls again, but not all of them are needed. Key and
value projections are read by attention alone, which is not repeated. An adapter's frozen matmul
runs before autograd's last saved tensors (the input of the adapter's second factor), but none of
them depends on it. The first rerun of a layer finds the matmuls on which no saved tensor depends,
directly or indirectly; in later reruns zeros take the place of their outputs. If a layer reads
values, or writes into tensors that outlive its forward, all matmuls run. The result is valid for
reruns that save the same tensors and run the same matmuls in the same order between them. This is
checked matmul by matmul; if it does not hold, the layer is rerun once more with all its matmuls.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf.errors import SPPOError

if TYPE_CHECKING:
    from sppo_hf.engine.recompute import SavedTensor


class LightDispatchMode(TorchDispatchMode):
    """A dispatch mode without torch's guard against torch.compile.

    The guard is a fifth of a mode's cost per operation. It is not needed, as these modes never run
    around compiled layers.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextlib.contextmanager
def made_of(*tensors: Tensor) -> Iterator[None]:
    """Context of a kernel that writes into new memory what it computes from `tensors` alone.

    A kernel that is no operation of torch's is not seen by dispatch modes. Memory that it fills
    would count as made of all matmuls so far, and all of these would be kept for a rerun.
    """
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    with contextlib.ExitStack() as contexts:
        for mode in modes:
            if isinstance(mode, DependencyTracker):
                contexts.enter_context(mode.made_of(tensors))
        yield


RunOperation = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
"""Function that runs an operation, given its positional and keyword arguments."""


def run_operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation without tracking it."""
    return func(*args, **kwargs)


# -- which matmuls a tensor depends on ---------------------------------------------------------

# A set of matmuls is an integer, so a union is one operation even for 400 matmuls. The lowest bit
# stands for the layer's input and attention's output, bit n + 1 for matmul n.
_ACTIVATION = 1
_EVERYTHING = -1
"""Set of all matmuls that are recorded by the time at which the set is read."""
_CONSTANT = -2
"""Like `_EVERYTHING`, for memory filled with a constant, until torch writes into it."""


class DependencyTracker(LightDispatchMode):
    """Follows, by storage, which of a layer's matmuls each tensor depends on."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._width = hidden.shape[-1]
        self._depends: dict[int, int] = {}
        self._read_so_far = 0
        """Set of all matmuls on which something depends that was read."""
        self._num_matmuls = 0
        self._allocated: int | None = None
        """Set on which newly allocated memory depends; None if that is not known."""
        self._set(hidden, _ACTIVATION)

    @contextlib.contextmanager
    def made_of(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """See the function `made_of`."""
        before, self._allocated = self._allocated, self._read_all(tensors)
        try:
            yield
        finally:
            self._allocated = before

    def add_inputs(self, *tensors: Tensor) -> None:
        """Treat `tensors` as inputs of the layer, which a rerun gets too."""
        for tensor in tensors:
            self._set(tensor, _ACTIVATION)

    def _on_matmul(
        self, func: Any, op: Operation, args: Sequence[Any], output: Tensor, depends: int
    ) -> None:
        """Record a matmul that has run; `depends` is the set on which its arguments depend."""
        raise NotImplementedError

    def _need(self, depends: int) -> None:
        """Record that a value that depends on the set `depends` is read outside of the layer."""
        raise NotImplementedError

    def _before_write(self, tensor: Tensor) -> None:
        """Called when `tensor` is about to be written into."""

    def _add_product(self, run: RunOperation, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that adds a product, if its result stands for a matmul's output.

        Returns:
            The operation's result; None if it was not run.
        """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and track the operation."""
        return self.watch(run_operation, func, args, kwargs or {})

    def watch(
        self, run: RunOperation, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run the operation by `run`, and record the matmuls on which its results depend."""
        op = operation(func)
        if op.writes:
            return self._write(run, func, op, args, kwargs)
        depends = self._read_all(args) | self._read_all(kwargs.values())
        output = run(func, args, kwargs)
        if op.reveals:  # the layer may branch on it
            self._need(depends)
        if op.is_thick_matmul(args, self._width):
            self._on_matmul(func, op, args, output, depends)
        else:
            if op.allocates is not None:
                depends = op.allocates if self._allocated is None else self._allocated
            for tensor in (output,) if isinstance(output, Tensor) else tensors_in((output,)):
                self._set(tensor, depends)
        return output

    def _write(self, run: RunOperation, func: Any, op: Operation, args: Any, kwargs: Any) -> Any:
        if op.adds_product:
            output = self._add_product(run, func, args, kwargs)
            if output is not None:
                return output
        written = tuple(op.written(args, kwargs))
        for tensor in written:
            self._before_write(tensor)
        # Unless it reads what it replaces, as a copy of memory onto itself does.
        others = {storage_key(tensor) for tensor in tensors_in((*args[1:], *kwargs.values()))}
        overwrites = op.overwrites and _is_whole(args[0]) and storage_key(args[0]) not in others
        before = [self._depends.get(storage_key(tensor) or 0, 0) for tensor in written]
        # Earlier contents count neither for constants nor for memory that is overwritten entirely.
        ignored = {
            storage_key(tensor)
            for tensor, depends in zip(written, before, strict=True)
            if overwrites or depends == _CONSTANT
        }
        depends = 0
        for tensor in tensors_in((*args, *kwargs.values())):
            if storage_key(tensor) not in ignored:
                depends |= self._read(tensor)
        output = run(func, args, kwargs)
        for tensor, old in zip(written, before, strict=True):
            self._set(tensor, old if old == _EVERYTHING and not overwrites else depends)
        return output

    def _read_all(self, values: Iterable[Any]) -> int:
        """Return the set on which tensors among `values`, and in lists among them, depend."""
        depends = 0
        for value in values:
            if isinstance(value, Tensor):
                depends |= self._read(value)
            elif isinstance(value, (list, tuple)):
                depends |= self._read_all(value)
        return depends

    def _read(self, tensor: Tensor) -> int:
        storage = storage_key(tensor)
        depends = _EVERYTHING if storage is None else self._depends.get(storage, 0)
        depends = depends if depends >= 0 else (2 << self._num_matmuls) - 1
        self._read_so_far |= depends
        return depends

    def _set(self, tensor: Tensor, depends: int) -> None:
        storage = storage_key(tensor)
        if storage is not None:
            self._depends[storage] = depends


# -- outputs that are kept ---------------------------------------------------------------------

_TILES = "a module in tiles"
"""Name, in place of an operation's, for outputs of a module that ran in tiles."""

# No torch.Size: Python's garbage collector forgets tuples of numbers, but visits torch.Size.
_Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Matmul:
    """One matmul of a layer's first forward, or one output of a module that ran in tiles."""

    name: str
    """Name of the operation."""
    shapes: _Shapes
    """Shapes of its arguments."""
    make_zeros: Callable[[], Tensor]
    """Returns zeros with the output's shape, strides, dtype and device."""
    output: SavedTensor | None = None
    """The output; None if a rerun does not need it."""
    of_weights: bool = False
    """Whether it multiplies weights alone; it is then recomputed."""
    num_added: int = 0
    """How many products were added into the output; a rerun leaves them out."""


@dataclass(slots=True)
class _FreshOutput:
    """Output of a matmul while its recorder runs."""

    output: Tensor
    copy: Tensor | None
    is_written: bool = False


_must_copy: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, bool]]
_must_copy = weakref.WeakKeyDictionary()
"""Whether kernels that torch does not see write into outputs, by model and by kind of layer."""

_kinds: weakref.WeakKeyDictionary[nn.Module, Hashable] = weakref.WeakKeyDictionary()


def _kind_of(layer: nn.Module) -> Hashable:
    """Return a key that is equal for a model's layers that run the same code."""
    if layer not in _kinds:
        _kinds[layer] = tuple(
            (type(module), "forward" in module.__dict__, tuple(_settings(module)))
            for module in layer.modules()
        )
    return _kinds[layer]


def _settings(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield attributes that may differ between layers of a class: a window, rotary embedding."""
    for name, value in vars(module).items():
        if name != "layer_idx" and isinstance(value, bool | int | float | str):
            yield name, value


class SelectiveRecorder(DependencyTracker):
    """Records a layer's matmuls and holds the outputs that a rerun needs.

    Use: `start()`, the layer's forward with `on_saved` called for all that autograd saves,
    `stop()`; all in one thread.
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
        """Prepare for one forward.

        Args:
            layer: The layer that runs; only its kind is used, see [Note: writing into a matmul's
                output].
            hidden: The layer's input `[..., D]`.
            hold: Saves an output until backward; called with a name that is the same in every layer
                of a kind, at most once for a name unless an output is written into.
            model: The model that `layer` belongs to; None for a layer alone.
            without_memory: Whether this is a trace, in which values do not matter: no output is
                copied, and operations are passed to `watch` rather than seen as a mode.
        """
        super().__init__(hidden)
        self._kind = _kind_of(layer)
        self._must_copy = _must_copy.setdefault(layer if model is None else model, {})
        self._hold = hold
        self._without_memory = without_memory
        self._copies = not without_memory and self._must_copy.get(self._kind, True)
        self._matmuls: list[Matmul] = []
        self._fresh: list[_FreshOutput] = []
        self._index_of: dict[int, int] = {}
        self._needed = 0
        self._running = False

    # -- called by the layer's saved activations -----------------------------------------------

    def start(self, *inputs: Tensor) -> None:
        """Begin to track operations of this thread, or continue after `pause`.

        `inputs` are treated as inputs of the layer, which a rerun gets too.
        """
        self.add_inputs(*inputs)
        self._running = True
        if not self._without_memory:
            self.__enter__()

    def pause(self) -> None:
        """Stop tracking operations until `start`."""
        self._running = False
        if not self._without_memory:
            current = _python_dispatch._get_current_dispatch_mode()
            assert current is self, "who enters a dispatch mode within a layer leaves it there too"
            self.__exit__(None, None, None)

    def on_saved(self, tensor: Tensor) -> None:
        """Hold the outputs of the matmuls on which `tensor`, which autograd saves, depends."""
        depends = self._read(tensor)
        if depends >> 1 & ~self._needed:
            self.pause()  # what moves a tensor is not the layer's work
            self._need(depends)
            self.start()

    def stop(self) -> tuple[Matmul, ...]:
        """Stop tracking; returns all matmuls in order."""
        self.abandon()
        if self._kind not in self._must_copy and not self._without_memory:
            self._must_copy[self._kind] = any(
                not x.is_written and x.copy is not None and _differ(x.output, x.copy)
                for x in self._fresh
            )
        self._fresh.clear()
        return tuple(self._matmuls)

    def abandon(self) -> None:
        """Stop tracking after an exception."""
        if self._running:
            self.pause()

    def add_tiles(self, hidden: Tensor, outputs: Sequence[Tensor], *, as_matmuls: bool) -> None:
        """Record a module that ran in tiles, untracked, on `hidden` and returned `outputs`.

        With `as_matmuls` the outputs are held like those of matmuls; else they are recomputed.
        """
        depends = self._read(hidden)
        for output in outputs:
            if as_matmuls:
                self._add(Matmul(_TILES, (), _zeros_like(output)), output)
            else:
                self._set(output, depends)

    # -- called by torch -----------------------------------------------------------------------

    def _on_matmul(
        self, func: Any, op: Operation, args: Sequence[Any], output: Tensor, depends: int
    ) -> None:
        shapes, zeros = _shapes(args), _zeros_like(output)
        self._add(Matmul(op.name, shapes, zeros, of_weights=depends == 0), output)

    def _add(self, matmul: Matmul, output: Tensor) -> None:
        index = self._num_matmuls
        self._matmuls.append(matmul)
        self._num_matmuls += 1
        if matmul.of_weights:
            self._fresh.append(_FreshOutput(output.new_empty(0), None))
            self._set(output, 0)
            return
        # Detached, as the output itself becomes part of the graph.
        copy = output.clone() if self._copies else None
        self._fresh.append(_FreshOutput(output.detach(), copy))
        self._set(output, 2 << index)
        storage = storage_key(output)
        if storage is not None:
            self._index_of[storage] = index
        if type(output) is not Tensor and not self._without_memory:
            self._keep(index)  # zeros could not take its place

    def _before_write(self, tensor: Tensor) -> None:
        index = self._index_of.get(storage_key(tensor) or 0)
        if index is not None and not self._fresh[index].is_written:
            fresh = self._fresh[index]
            fresh.copy = fresh.output.clone() if fresh.copy is None else fresh.copy
            fresh.is_written = True
            self._keep(index)

    def _add_product(self, run: RunOperation, func: Any, args: Any, kwargs: Any) -> Any:
        index = self._index_of.get(storage_key(args[0]) or 0)
        if index is None or self._fresh[index].is_written or self._needed >> index & 1:
            return None
        if self._read_so_far >> index + 1 & 1:
            return None  # what was read is the product without what is added
        output = run(func, args, kwargs)
        self._matmuls[index].num_added += 1
        if self._fresh[index].copy is not None:
            self._fresh[index].copy = self._fresh[index].output.clone()
        return output

    def _need(self, depends: int) -> None:
        for index in _bits(depends >> 1 & ~self._needed):
            self._keep(index)

    def _keep(self, index: int) -> None:
        """Hold the output of matmul `index`, replacing one that was held before."""
        matmul, fresh = self._matmuls[index], self._fresh[index]
        if matmul.output is not None:
            matmul.output.drop()
        value = fresh.output if fresh.copy is None else fresh.copy
        matmul.output = self._hold(f"matmul {index}", value)
        self._needed |= 1 << index


class SelectiveReplayer(LightDispatchMode):
    """Returns the outputs that a recorder held in place of running a layer's matmuls, in order."""

    def __init__(self, matmuls: Sequence[Matmul], *, width: int, label: str) -> None:
        """Prepare to replay matmuls of a layer of `width`; `label` names it in errors."""
        super().__init__()
        self._matmuls = matmuls
        self._width = width
        self._label = label
        self._next = 0
        self._added: dict[int, int] = {}
        """By output: how many products it has in it that the layer is yet to add."""

    def on_saved(self, tensor: Tensor) -> None:
        """Do nothing: saved tensors were already seen in the first forward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it is a thick matmul.

        Raises:
            SPPOError: The layer runs a matmul that it did not run in its first forward.
        """
        op = operation(func)
        if op.adds_product:
            storage = storage_key(args[0]) or 0
            if self._added.get(storage, 0):
                self._added[storage] -= 1
                return args[0]
        if not op.is_thick_matmul(args, self._width):
            return func(*args, **(kwargs or {}))
        matmul = self._expect(op.name, _shapes(args))
        if matmul.of_weights:
            return func(*args, **(kwargs or {}))
        output = _take_output(matmul)
        if matmul.num_added:
            self._added[storage_key(output) or 0] = matmul.num_added
        return output

    def replay_tiles(self, num_outputs: int) -> list[Tensor]:
        """Return the outputs of the next module that ran in tiles; zeros for unused ones."""
        return [_take_output(self._expect(_TILES, ())) for _ in range(num_outputs)]

    def _expect(self, name: str, shapes: _Shapes) -> Matmul:
        index, self._next = self._next, self._next + 1
        expected = self._matmuls[index] if index < len(self._matmuls) else None
        if expected is None or (expected.name, expected.shapes) != (name, shapes):
            first = f"{expected.name} of {_listed(expected.shapes)}" if expected else "not there"
            raise SPPOError(
                f"{self._label}: matmul {index} was {first} in forward, and is {name} of "
                f"{_listed(shapes)} when recomputed. The layer's forward depends on something that "
                "changed in between. Set recompute='none' for this model."
            )
        return expected


def _take_output(matmul: Matmul) -> Tensor:
    # Detached: autograd takes over an operation's result, which must not be a view.
    return matmul.make_zeros() if matmul.output is None else matmul.output.take().detach()


# -- unused outputs ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnusedMatmuls:
    """Unused matmuls of a layer's rerun: no tensor that backward reads depends on them."""

    signatures: tuple[Hashable, ...]
    """A signature of every thick matmul, in order; see `_signature`."""
    is_unused: tuple[bool, ...]
    """For every thick matmul, whether zeros can take the output's place."""


class UnusedMatmulFinder(DependencyTracker):
    """Finds which matmuls of a layer's rerun are unused; see [Note: unused matmuls].

    Use: as a context around the rerun, with `on_saved` called for all that autograd saves.
    """

    def __init__(self, hidden: Tensor, *, without_memory: bool = False) -> None:
        """Prepare for a layer with input `hidden`, `[..., D]`; see `SelectiveRecorder`."""
        super().__init__(hidden)
        self._without_memory = without_memory
        self._signatures: list[Hashable] = []
        self._inputs_depend: list[int] = []
        """For every matmul, the set on which its inputs depend."""
        self._always_needed = 0
        self._num_saved = 0
        self._reveals = False

    def on_saved(self, tensor: Tensor) -> None:
        """Record that the matmuls on which `tensor`, which autograd saves, depends are needed."""
        self._always_needed |= self._read(tensor)
        self._num_saved += 1

    def result(self) -> UnusedMatmuls | None:
        """Return what was found; None if all matmuls are used, or the layer branches on values."""
        needed, seen = self._always_needed >> 1, 0
        while fresh := needed & ~seen:
            seen |= fresh
            for index in _bits(fresh):
                needed |= self._inputs_depend[index] >> 1
        is_unused = tuple(not needed >> index & 1 for index in range(self._num_matmuls))
        if self._reveals or not any(is_unused):
            return None
        return UnusedMatmuls(tuple(self._signatures), is_unused)

    def _on_matmul(
        self, func: Any, op: Operation, args: Sequence[Any], output: Tensor, depends: int
    ) -> None:
        index = self._num_matmuls
        self._signatures.append(_signature(func, args, self._num_saved))
        self._inputs_depend.append(depends)
        self._num_matmuls += 1
        self._set(output, 2 << index)
        if func not in _FACTORS or not (self._without_memory or _is_plain(args)):
            self._always_needed |= 2 << index

    def _before_write(self, tensor: Tensor) -> None:
        if (storage_key(tensor) or 0) not in self._depends:
            self._reveals = True  # the memory is older than the layer's forward, and may outlive it

    def _need(self, depends: int) -> None:
        self._always_needed |= depends
        self._reveals = self._reveals or depends > 0


class MatmulsChanged(Exception):
    """The layer's matmuls differ from those among which unused ones were found."""


class UnusedMatmulSkipper(LightDispatchMode):
    """Returns zeros for unused matmuls of a layer's rerun."""

    def __init__(self, unused: UnusedMatmuls, *, width: int) -> None:
        super().__init__()
        self._unused = unused
        self._width = width
        self._next = 0
        self._num_saved = 0

    def on_saved(self, tensor: Tensor) -> None:
        """Count what autograd saves."""
        self._num_saved += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it is an unused matmul.

        Raises:
            MatmulsChanged: The matmul differs from that of the rerun in which unused ones were
                found.
        """
        if not operation(func).is_thick_matmul(args, self._width):
            return func(*args, **(kwargs or {}))
        index, self._next = self._next, self._next + 1
        signatures = self._unused.signatures
        if index >= len(signatures) or signatures[index] != _signature(func, args, self._num_saved):
            raise MatmulsChanged
        if not self._unused.is_unused[index] or not _is_plain(args):
            return func(*args, **(kwargs or {}))
        first = _FACTORS[func]
        left, right = args[first], args[first + 1]
        return left.new_zeros(*left.shape[:-1], right.shape[-1])


_FACTORS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.bmm.default: 0,
}
"""Matmuls that may be skipped, by the position of the first of their two factors."""


def _signature(func: Any, args: Sequence[Any], num_saved: int) -> Hashable:
    """Return a key of a matmul of a rerun that does not depend on the number of tokens."""
    return func, tuple(tensor.shape[-1:] for tensor in tensors_in(args)), num_saved


def _is_plain(args: Sequence[Any]) -> bool:
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors_in(args))


def _shapes(args: Sequence[Any]) -> _Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(args))


def _listed(shapes: _Shapes) -> str:
    return " and ".join(map(str, shapes))


def _is_whole(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _zeros_like(tensor: Tensor) -> Callable[[], Tensor]:
    # A partial, and no closure with its cells: there is one for every matmul of the model.
    return functools.partial(
        _zeros, tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _zeros(size: tuple[int, ...], stride: tuple[int, ...], **options: Any) -> Tensor:
    return torch.empty_strided(size, stride, **options).zero_()


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether any bit differs; NaNs are equal to themselves here."""
    if type(one) is not Tensor:
        return not torch.equal(one, other)
    return not torch.equal(*(x.contiguous().view(torch.uint8) for x in (one, other)))


# -- operations --------------------------------------------------------------------------------

THIN = 8
"""A matmul is thin if it sums over at most the layer's width divided by this."""

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
"""Position of the argument over whose last dim a matmul sums, by the matmul's name."""

_ALLOCATES = {
    **dict.fromkeys(
        (
            *("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_permuted"),
            *("aten::empty_strided", "aten::new_empty_strided"),
        ),
        _EVERYTHING,
    ),
    **{
        f"aten::{name}": _CONSTANT
        for kind in ("zeros", "ones", "full")
        for name in (kind, f"new_{kind}", f"{kind}_like")
    },
}
"""What memory depends on that an operation only allocates, by the operation's name."""

_OVERWRITING = frozenset(
    f"aten::{name}_" for name in ("bernoulli", "uniform", "normal", "random", "exponential", "copy")
)

_REVEALING = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


@dataclass(frozen=True, slots=True)
class Operation:
    """Properties of an operation that follow from its signature."""

    name: str
    left_factor: int | None
    """Position of the argument over whose last dim a matmul sums; None for other operations."""
    writes: tuple[tuple[int, str], ...]
    """Position and name of the arguments that it writes into."""
    allocates: int | None
    """Set on which the memory that it allocates depends; None unless it only allocates memory."""
    overwrites: bool
    """Whether it replaces all elements of its first argument, whatever their old values."""
    reveals: bool
    """Whether it gives Python values of its arguments: as a number, or as its result's shape."""
    adds_product: bool
    """Whether it adds a product of matrices into its first argument."""

    def is_thick_matmul(self, args: Sequence[Any], width: int) -> bool:
        """Whether it is a matmul that sums over more than an eighth of `width`."""
        if self.left_factor is None or len(args) <= self.left_factor:
            return False
        return THIN * args[self.left_factor].shape[-1] > width

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """Yield the tensors that it writes into."""
        for position, name in self.writes:
            value = args[position] if position < len(args) else kwargs.get(name)
            yield from tensors_in((value,))


@functools.cache
def operation(func: Any) -> Operation:
    """Read the signature of `func`, one overload of an operation; cached."""
    schema = func._schema
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return Operation(
        name=schema.name,
        # Outputs that are written into the caller's memory are not held.
        left_factor=None if writes else _LEFT_FACTOR.get(schema.name),
        writes=writes,
        allocates=_ALLOCATES.get(schema.name),
        overwrites=schema.name in _OVERWRITING,
        reveals=not _REVEALING.isdisjoint(func.tags),
        adds_product=schema.name == "aten::addmm_",
    )


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors among `values` and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def storage_key(tensor: Tensor) -> int | None:
    """Return the identity of the tensor's memory; None for sparse tensors and the like."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
