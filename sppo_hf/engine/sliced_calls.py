"""Module calls over all tokens, run slice by slice along the tokens.

With order "by_layer" the untouched base model runs once over the whole sequence, and each decoder
layer's hooks run the layer's forward chunk by chunk. `layer_calls` finds which dims of a layer's
arguments are the tokens; `SlicedCall` cuts whole tensors into chunks and joins the outputs.

A layer over all tokens calls attention once, which is when its kernel is fastest. Memory then goes
to temporaries of everything else: the MLP's intermediates, norms in float32, adapters. A module
that treats each token by itself returns the same on a part of the tokens, so `LayerTiles` runs it
tile by tile, and a tile's temporaries are freed before the next tile begins. If the layer is
recomputed, each tile has its own saved activations (`recompute.RecomputedTile`): in backward the
layer is rerun without these modules, and then each module is rerun one tile at a time.

[Note: which dims are the tokens] The size of a dim is not enough, as a width or a number of heads
may happen to equal the number of tokens. So the model's own code is run on two tokens (three where
T is two), with layers that only return their input: a dim that is two there and T in the real call
is the tokens. A layer must return hidden states in the form of its input, alone or as the only
element of a tuple. Other outputs cannot be joined, and such a model runs chunk by chunk. One of the
tokens is padding if any is, as models may leave a mask of ones out.

[Note: hidden states between layers] A layer has one buffer `[B, T, D]` for its input and one for
its output. A chunk's output is copied into the buffer as soon as it is computed; a gradient is read
from a buffer's slice when a chunk's backward needs it, and written into one when it is computed. So
the tensors of all chunks never exist beside the buffer into which they are joined. Between a
chunk's tensors and the buffers, autograd sees empty tensors that only express the order.

[Note: which modules are token-wise] Nothing here depends on the model's family. Candidates are the
largest modules that take `[B, T, D]` alone and return tensors with the same number of tokens. Each
runs once on a few random tokens, as a whole and in parts, and the results must be the same; many of
the tokens are equal, so that experts with a limited capacity overflow. A module that has its index
in the stack of layers contains attention or a recurrence, so only its submodules are candidates. A
plain `nn.Linear` is no candidate, as one matmul has no temporaries; nor is a module whose
submodules have hooks, as these must see calls over all tokens. Hooks by which Transformers collects
what routers give only look: they are called once, with what all tiles gave, joined.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.utils.output_capturing import _active_collector

from sppo_hf.engine.model_parts import (
    CAPTURES,
    ModelParts,
    all_modules,
    captures,
    has_hooks,
    is_compiled,
    patched_attribute,
)
from sppo_hf.engine.recompute import RecomputedLayer, RecomputedTile, SavedTensor
from sppo_hf.engine.stages import AbsentLayer, as_returned, returned_values
from sppo_hf.engine.unit_graph import GraphNode
from sppo_hf.errors import SPPOError, first_line
from sppo_hf.planning.chunk_bounds import Bounds

# B batch rows, C tokens of a chunk, T tokens of the sequence, M = B * T tokens of all rows, D model
# width.


def example_tokens(tokens: int) -> int:
    """Tokens of the call that shows which dims are the `tokens` of the real call."""
    return 3 if tokens == 2 else 2


class CannotRunByLayer(Exception):
    """The model cannot run layer by layer; the message is the reason, as a part of a sentence."""


class EngineHook(partial[Any]):
    """One of our hooks; its first argument is the engine.

    A copy of the whole model gets hooks of the copied engine. A module that is copied by itself
    (PEFT does so with those that it saves) must not copy engine and model: its hook does nothing.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineHook:
        engine = self.args[0] if self.args else None
        if engine is None or not {id(engine), id(engine.parts.causal_lm)} & memo.keys():
            return type(self)(_no_hook)
        return type(self)(self.func, *copy.deepcopy(self.args, memo))


def _no_hook(*_: object) -> None:
    """Hook of a module that was copied by itself."""


def is_of_a_copy(hook: object) -> bool:
    """Whether a hook is what is left of one of ours in a module that was copied by itself."""
    return isinstance(hook, EngineHook) and hook.func is _no_hook


class LengthHook(EngineHook):
    """A hook of a rotary embedding that depends on the sequence's length."""


class InnermostHook(EngineHook):
    """A hook of ours which must run closer to a layer's forward than other hooks.

    Other hooks are for the call over all tokens: FSDP2's gather and free the layer's weights. And a
    rerun calls the layer's forward without its hooks, so it has to begin with what other hooks
    before the layer returned, and what other hooks after the layer save is not part of it.
    """


def move_hooks_innermost(module: nn.Module) -> None:
    """Reorder hooks of `module` so that ours run last before forward and first after it."""
    for hooks, last in ((module._forward_pre_hooks, True), (module._forward_hooks, False)):
        ours = [key for key, hook in hooks.items() if isinstance(hook, InnermostHook)]
        for key in ours:
            hooks.move_to_end(key, last=last)  # type: ignore[attr-defined]


class PrefixLength:
    """A K/V cache without K/V that reports the number of tokens before the chunk.

    Llama 4 scales queries by their index, which it counts from the length of its cache.
    """

    is_compileable = False

    def __init__(self, tokens: int) -> None:
        """Report `tokens` tokens before the chunk."""
        self._tokens = tokens

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Number of tokens before the chunk."""
        return self._tokens

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: Any, *_: Any, **__: Any) -> tuple[Any, int]:
        """Return the number of keys and the index of the first one."""
        return self._tokens + query_length, 0

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the chunk's K/V unchanged, as attention has its own store of K/V."""
        return keys, values


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a call."""


NORM = -1
"""Key of the final norm in `layer_calls`; layers have their index."""


def layer_calls(parts: ModelParts, run_base: Callable[[], object]) -> dict[int, Call]:
    """Return the arguments of each decoder layer, and of the final norm, without running them.

    `run_base` runs the base model; layers return their hidden states, and their hooks do not run.

    Raises:
        CannotRunByLayer: The base model does not run without its layers.
    """
    calls: dict[int, Call] = {}

    def recorder(index: int, module: nn.Module) -> Callable[..., Any]:
        values = None  # a tensor, as norms and most layers return
        with contextlib.suppress(OSError):
            values = None if index == NORM else returned_values(type(module).forward)

        def called(*args: Any, **kwargs: Any) -> Any:
            calls[index] = args, kwargs
            return as_returned(args[0] if args else kwargs["hidden_states"], values)

        return called

    recorders = {
        layer: recorder(index, layer)
        for index, layer in enumerate(parts.layers)
        if not isinstance(layer, AbsentLayer)
    }
    norm = parts.final_norm()
    if norm is not None:
        recorders[norm] = recorder(NORM, norm)
    captures = dict.fromkeys((parts.base, parts.decoder), True)
    try:
        with (
            patched_attribute("forward", recorders),
            patched_attribute("_call_impl", recorders),
            patched_attribute(CAPTURES, captures),
            patched_attribute("gradient_checkpointing", dict.fromkeys(parts.layers, False)),
        ):
            run_base()
    except torch.OutOfMemoryError:
        raise  # not the model's fault
    # The model's code gets hidden states that no layer has computed, and may raise any exception.
    except Exception as error:
        raise CannotRunByLayer(
            f"how {parts.name} calls its layers cannot be seen without running them "
            f"({first_line(error)})"
        ) from error
    return calls


class SlicedCall:
    """One call of a module over all tokens, cut into chunks, and its joined output."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        bounds: Bounds,
        first_tokens: Sequence[int] | None = None,
        example: Call,
        where: str,
    ) -> None:
        """Prepare to cut a call into the chunks of `bounds`, in tokens.

        `first_tokens` are the places of the chunks' first tokens in the sequence, if they differ
        from `bounds`, and `example` is a call of the module for `example_tokens` tokens. A call of
        one chunk is only checked, as if it were cut.

        Raises:
            CannotRunByLayer: It is unclear which dims of the arguments are the tokens.
        """
        self.bounds = bounds
        self._where = where
        leaves, self._spec = tree_flatten((args, kwargs))
        examples, known_spec = tree_flatten(example)
        kinds, known_kinds = ([isinstance(x, Tensor) for x in xs] for xs in (leaves, examples))
        if (self._spec, kinds) != (known_spec, known_kinds):
            raise CannotRunByLayer(f"{where} is called with other arguments for fewer tokens")
        tokens = bounds[-1][1]
        hidden = args[0] if args else kwargs.get("hidden_states")
        dims = [_token_dim(*pair, tokens) for pair in zip(leaves, examples, strict=True)]
        unclear = [leaf for leaf, dim in zip(leaves, dims, strict=True) if dim == _UNCLEAR]
        if unclear:
            raise CannotRunByLayer(
                f"{where} is given a tensor of shape {tuple(unclear[0].shape)}, which has no dim "
                f"that is the {tokens} tokens alone"
            )
        dim = next((d for x, d in zip(leaves, dims, strict=True) if x is hidden), None)
        if dim is None:
            raise CannotRunByLayer(f"{where} is given hidden states without a dim of tokens")
        self._is_cut = len(bounds) > 1
        if not self._is_cut:
            dims = [None] * len(dims)
        self._cuts = [_cut(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
        self._first_tokens = first_tokens or [start for start, _ in bounds]
        self._join = TokenJoin(dim, tokens, len(bounds))

    def take(self, index: int) -> Call:
        """Return the arguments of the `index`-th chunk; chunks are taken in order, each once."""
        start, end = self.bounds[index]
        leaves = [cut(start, end) for cut in self._cuts]
        leaves = [
            PrefixLength(self._first_tokens[index]) if isinstance(leaf, PrefixLength) else leaf
            for leaf in leaves
        ]
        if index == len(self.bounds) - 1:
            self._cuts = []  # do not keep the whole tensors alive
        args, kwargs = tree_unflatten(leaves, self._spec)
        self._hidden_shape = (args[0] if args else kwargs["hidden_states"]).shape
        return args, kwargs

    def put(self, index: int, output: Any) -> None:
        """Add the output of the `index`-th chunk, which was taken last.

        Raises:
            CannotRunByLayer: It contains other tensors besides hidden states.
        """
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if returns_more(output):
            raise CannotRunByLayer(f"{self._where} returns more than hidden states")
        if not isinstance(hidden, Tensor) or hidden.shape != self._hidden_shape:
            raise CannotRunByLayer(
                f"{self._where} returns hidden states of another shape than it gets"
            )
        self._others = tuple(others) if isinstance(output, tuple) else None
        if self._is_cut:
            self._join.put(hidden, *self.bounds[index])

    def joined(self) -> Any:
        """Return the module's output over all tokens; None where one chunk has given it."""
        if not self._is_cut:
            return None
        hidden = self._join.close()
        return hidden if self._others is None else (hidden, *self._others)


def returns_more(output: Any) -> bool:
    """Whether a layer's output contains other tensors besides hidden states."""
    others = output[1:] if isinstance(output, tuple) else ()
    return any(isinstance(leaf, Tensor) for leaf in tree_flatten(others)[0])


_UNCLEAR = -1


def _token_dim(leaf: Any, example: Any, tokens: int) -> int | None:
    """Return the dim of `leaf` that is the tokens; None for none, `_UNCLEAR` if it is ambiguous.

    See [Note: which dims are the tokens].
    """
    if not isinstance(leaf, Tensor):
        return None
    if example.ndim != leaf.ndim:
        return _UNCLEAR
    changed = [dim for dim in range(leaf.ndim) if example.shape[dim] != leaf.shape[dim]]
    if not changed:
        return None
    dim = changed[0]
    clear = (
        len(changed) == 1
        and example.shape[dim] == example_tokens(tokens)
        and leaf.shape[dim] == tokens
    )
    return dim if clear else _UNCLEAR


def _cut(leaf: Any, dim: int | None) -> Callable[[int, int], Any]:
    """Return a function that cuts tokens `[start, end)` out of a leaf."""
    if dim is None:
        return lambda *_: leaf
    return TokenSlices(leaf, dim).take


def _slice(x: Tensor, dim: int, start: int, end: int) -> Tensor:
    """Return tokens `[start, end)`, contiguous if `x` is: layers take views of their input."""
    part = x.narrow(dim, start, end - start)
    return part.contiguous() if x.is_contiguous() else part


class TokenSlices:
    """A tensor that is cut along the tokens; see [Note: hidden states between layers]."""

    def __init__(self, whole: Tensor, dim: int) -> None:
        """Prepare to cut `whole` along its dim `dim`."""
        self._whole = whole.detach()
        self._dim = dim
        self._gradient = _GradientBuffer(dim, whole.shape)
        self._link: Tensor | None = None
        if whole.requires_grad and torch.is_grad_enabled():
            self._link = GraphNode.apply(
                lambda: whole.new_empty(0), self._gradient.take_whole, whole
            )

    def take(self, start: int, end: int) -> Tensor:
        """Return tokens `[start, end)`."""
        cut = partial(_slice, self._whole, self._dim, start, end)
        if self._link is None:
            return cut()
        return GraphNode.apply(cut, partial(self._gradient.add, start, end), self._link)


class TokenJoin:
    """Joins chunks' tensors into one over all tokens."""

    def __init__(self, dim: int, tokens: int, num_chunks: int) -> None:
        """Prepare to join `num_chunks` tensors along `dim`, which will be `tokens` long."""
        self._dim = dim
        self._tokens = tokens
        self._whole: Tensor | None = None
        self._gradient: _GradientBuffer | None = None
        self._links: list[Tensor] = []
        self._num_chunks = num_chunks

    def put(self, part: Tensor, start: int, end: int) -> None:
        """Copy tokens `[start, end)` into the whole tensor."""
        if self._whole is None or self._gradient is None:
            shape = torch.Size(
                (*part.shape[: self._dim], self._tokens, *part.shape[self._dim + 1 :])
            )
            self._whole = part.new_empty(shape)
            self._gradient = _GradientBuffer(self._dim, shape, uses=self._num_chunks)
        self._whole.narrow(self._dim, start, end - start).copy_(part.detach())
        if part.requires_grad and torch.is_grad_enabled():
            gradient = partial(self._gradient.part, start, end)
            self._links.append(GraphNode.apply(lambda: part.new_empty(0), gradient, part))

    def close(self) -> Tensor:
        """Return the whole tensor, after all slices were put into it."""
        whole, self._whole = self._whole, None
        assert whole is not None, "something was put in"
        links, self._links = self._links, []
        if not links or self._gradient is None:
            return whole
        return GraphNode.apply(lambda: whole, partial(self._gradient.put_whole, len(links)), *links)


class _GradientBuffer:
    """The gradient of a whole tensor, while backward runs through its slices.

    Its methods are the backward of nodes: each gets the gradient of a node's output last.
    """

    def __init__(self, dim: int, shape: torch.Size, *, uses: int = 0) -> None:
        self.value: Tensor | None = None
        self._dim = dim
        self._shape = shape
        self._uses = uses

    def add(self, start: int, end: int, part: Tensor | None) -> tuple[Tensor | None]:
        """Write the gradient of tokens `[start, end)`; it is zero where none is written."""
        if part is None:
            return (None,)
        if self.value is None:
            self.value = part.new_zeros(self._shape)
        self.value.narrow(self._dim, start, end - start).copy_(part)
        return (part.new_empty(0),)

    def take_whole(self, _: object) -> tuple[Tensor | None]:
        """Return all of it, after `add`, and forget it."""
        whole, self.value = self.value, None
        return (whole,)

    def put_whole(self, num_links: int, whole: Tensor | None) -> tuple[Tensor | None, ...]:
        """Take all of it, to give it out by `part`."""
        self.value = whole
        return (None if whole is None else whole.new_empty(0),) * num_links

    def part(self, start: int, end: int, _: object) -> tuple[Tensor | None]:
        """Return the gradient of tokens `[start, end)`; the last use frees the buffer."""
        whole, self._uses = self.value, self._uses - 1
        if self._uses == 0:
            self.value = None
        return (None if whole is None else _slice(whole, self._dim, start, end),)


_PROBE_TOKENS = 34
"""Tokens on which a module is probed: twice a prime number, unlikely as a size of a model."""
_NUM_EQUAL_TOKENS = 24
"""Number of probe tokens that are equal."""
_SPLIT_TOKENS = 5
"""Tokens in the first of the two parts of a probe."""

_MIN_TILE_TOKENS = 4
"""Minimum tokens of a tile of each row; more than `example_tokens`."""

_DOES_NOT_TAKE_TOKENS = (
    *(TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError),
    *(NotImplementedError, SPPOError),
)


class NotTokenWise(Exception):
    """A module mixes tokens; the message is the reason, as a part of a sentence."""


@dataclass(frozen=True, slots=True)
class TokenWise:
    """A module whose output for a token does not depend on other tokens."""

    name: str
    module: nn.Module
    spec: TreeSpec
    """Structure of what it returns."""
    dims: tuple[int, ...]
    """Dim of the tokens in each returned tensor: 1 for `[B, T, ...]`, 0 for `[M, ...]`."""
    collected_dims: tuple[int, ...]
    """Dim of the tokens in each tensor that hooks of Transformers collect from its routers."""


_found: weakref.WeakKeyDictionary[nn.Module, tuple[object, tuple[TokenWise, ...]]]
_found = weakref.WeakKeyDictionary()


def token_wise(layer: nn.Module, hidden: Tensor) -> tuple[TokenWise, ...]:
    """Return the token-wise modules of a layer with input `hidden`; probes them at the first call.

    Raises:
        NotTokenWise: A module takes hidden states alone and mixes tokens.
    """
    state = tuple(map(_state, layer.modules()))
    known = _found.get(layer)
    if known is None or known[0] != state:
        children = layer.named_children()
        found = tuple(x for name, child in children for x in _search(name, child, hidden))
        known = _found[layer] = (state, found)
    return known[1]


def _state(module: nn.Module) -> tuple[object, ...]:
    own = captures(module)
    return id(module), bool(own), has_hooks(module, besides=own), is_compiled(module)


def is_searched(module: nn.Module) -> bool:
    """Whether a module cannot run in tiles as a whole, although its submodules may."""
    return any("layer_idx" in part.__dict__ for part in module.modules()) or any(
        has_hooks(part, besides=captures(part))
        for part in itertools.islice(module.modules(), 1, None)
    )


def is_worth_tiles(module: nn.Module) -> bool:
    """Whether a module has temporaries, so that tiles save memory; a plain `nn.Linear` has none."""
    is_matmul = type(module) is nn.Linear or type(module).__name__ == "Conv1D"
    return not is_matmul and next(module.parameters(), None) is not None


def _search(name: str, module: nn.Module, hidden: Tensor) -> Iterator[TokenWise]:
    if not is_worth_tiles(module) or is_compiled(module):  # a compiler would trace the tiles
        return
    # A router of a parent that cannot run in tiles takes what that makes of the tokens.
    if "." in name and captures(module) and not is_searched(module):
        return
    if not is_searched(module):
        found = _probe(name, module, hidden)
        if found is not None:
            yield found
            return
    for child_name, child in module.named_children():
        yield from _search(f"{name}.{child_name}" if name else child_name, child, hidden)


def input_width(module: nn.Module, width: int) -> int:
    """Return the width of a module's input in a layer of `width`."""
    own = getattr(module, "in_features", None)
    if isinstance(own, int):
        return own
    parameters = list(module.parameters())
    is_norm = bool(parameters) and all(p.ndim == 1 for p in parameters)
    return parameters[0].shape[0] if is_norm else width


def _probe(name: str, module: nn.Module, like: Tensor) -> TokenWise | None:
    """Run a module on a few random tokens, as a whole and in parts, in the layer's dtype.

    Returns:
        Structure of its output; None if it does not take hidden states alone, or if what is
        collected inside of it is not by tokens.

    Raises:
        NotTokenWise: The parts differ from the whole.
    """
    if any(map(is_compiled, all_modules(module))):
        return None
    width = input_width(module, like.shape[-1])
    x_1MD = torch.randn(
        (1, _PROBE_TOKENS, width),
        device=like.device,
        dtype=like.dtype,
        generator=torch.Generator(like.device).manual_seed(0),
    )
    x_1MD[:, -_NUM_EQUAL_TOKENS:] = x_1MD[:, -1:]
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), WithoutDropout():
        try:
            output, collected = _collecting(module.forward, x_1MD)
        except _DOES_NOT_TAKE_TOKENS:
            return None
        leaves, spec = tree_flatten(output)
        dims = [_probed_token_dim(leaf) for leaf in (*leaves, *collected)]
        if not leaves or any(dim is None for dim in dims):
            return None
        known = [dim or 0 for dim in dims]
        found = TokenWise(
            *(name, module, spec, tuple(known[: len(leaves)])),
            tuple(known[len(leaves) :]),
        )
        for parts in (
            (x_1MD[:, :_SPLIT_TOKENS], x_1MD[:, _SPLIT_TOKENS:]),
            (x_1MD.reshape(2, -1, width),),
        ):
            given = [_leaves(module.forward, part) for part in parts]
            _compare(found, [*leaves, *collected], given)
    return found


_COLLECTED = "router_logits"
"""What Transformers collects by hooks inside of token-wise modules."""


def _collecting(forward: Callable[..., Any], x: Tensor) -> tuple[Any, list[Any]]:
    """Run a module; returns its output, and what Transformers' hooks inside collected of it."""
    collected: list[Any] = []
    token = _active_collector.set({_COLLECTED: collected})
    try:
        return forward(x), collected
    finally:
        _active_collector.reset(token)


def _leaves(forward: Callable[..., Any], x: Tensor) -> list[Any]:
    """Run a module; returns the leaves of its output, then what is collected."""
    output, collected = _collecting(forward, x)
    return tree_flatten(output)[0] + collected


def _compare(found: TokenWise, whole: list[Tensor], parts: list[list[Any]]) -> None:
    dims = (*found.dims, *found.collected_dims)
    for expected, given, dim in zip(whole, zip(*parts, strict=True), dims, strict=True):
        # Rows of tokens become one row.
        joined = torch.cat([x.flatten(0, 1)[None] if dim else x for x in given], dim)
        if not _is_close(joined, expected):
            raise NotTokenWise(
                f"{found.name} ({type(found.module).__name__}) gives something else on a part of "
                "the tokens"
            )


def _probed_token_dim(leaf: Any) -> int | None:
    if not isinstance(leaf, Tensor):
        return None
    if leaf.ndim > 1 and leaf.shape[:2] == (1, _PROBE_TOKENS):
        return 1
    return 0 if leaf.ndim > 0 and leaf.shape[0] == _PROBE_TOKENS else None


def may_narrow_float32(device: torch.device) -> bool:
    """Whether matmuls of float32 may round what they multiply, to TF32 or bfloat16.

    `TrainingArguments(tf32=True)` and `torch.set_float32_matmul_precision` allow it. Which kernels
    then do so depends on the number of tokens.
    """
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("tf32", "bf16")


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    narrow = one.element_size() < 4 or torch.is_autocast_enabled(one.device.type)
    narrow = narrow or (one.dtype == torch.float32 and may_narrow_float32(one.device))
    # Matmuls of other sizes may sum over the layer's width in another order.
    rounding = 0.125 if narrow else 1024 * torch.finfo(one.dtype).eps
    difference = (one - other).abs().max()
    return bool(difference <= rounding * other.abs().max())


class WithoutDropout(TorchFunctionMode):
    """Mode in which torch's dropout returns its input, in training too."""

    _DROPOUT = frozenset(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, or return the input of a dropout."""
        kwargs = kwargs or {}
        if func in self._DROPOUT:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


class LayerTiles:
    """Runs token-wise modules of layers in tiles."""

    def __init__(self, tile_tokens: int) -> None:
        """Prepare for tiles of `tile_tokens` tokens, over all rows; 0 for no tiles."""
        self._tile_tokens = tile_tokens

    def bounds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bounds:
        """Return bounds of tiles, in tokens of each row, for a call of a token-wise module.

        There is one tile if the call is not cut, or has other arguments than `[B, T, D]` alone.
        """
        (x, *others), tiles = args or (None,), 1
        if not isinstance(x, Tensor) or x.ndim != 3 or others or kwargs:
            return ((0, 0),)
        tokens = x.shape[1]
        if self._tile_tokens:
            tiles = min(-(-x.shape[0] * tokens // self._tile_tokens), tokens // _MIN_TILE_TOKENS)
        return _even_bounds(tokens, max(tiles, 1))

    @contextlib.contextmanager
    def inside(
        self, layer: nn.Module, hidden: Tensor, activations: RecomputedLayer | None
    ) -> Iterator[None]:
        """Make a context in which token-wise modules of `layer` run in tiles.

        `activations` recomputes the layer; None if autograd keeps all saved tensors.

        Raises:
            NotTokenWise: See `token_wise`.
        """
        if not self._tile_tokens or hidden.shape[:-1].numel() <= self._tile_tokens:
            yield
            return
        tiled = {
            part.module: self._tiled(part, part.module.forward, activations)
            for part in token_wise(layer, hidden)
        }
        with patched_attribute("forward", tiled):
            yield

    def _tiled(
        self, part: TokenWise, forward: Callable[..., Any], activations: RecomputedLayer | None
    ) -> Callable[..., Any]:
        def tiled(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs or args[0].ndim != 3:
                return forward(*args, **kwargs)
            call = _TiledCall(part, forward, args[0], self._tile_tokens)
            if call.needs_grad and activations is not None:
                return call.run_recomputed(activations)
            return call.run()

        return tiled


def _even_bounds(tokens: int, tiles: int) -> Bounds:
    ends = (tokens * tile // tiles for tile in range(tiles + 1))
    return tuple(itertools.pairwise(ends))


class _TiledCall:
    """One call of a token-wise module, in tiles."""

    def __init__(
        self, part: TokenWise, forward: Callable[..., Any], x_BTD: Tensor, tile_tokens: int
    ) -> None:
        self._part = part
        self._forward = forward
        self._x = x_BTD.detach()
        self._rows = x_BTD.shape[:2]
        tokens = self._rows.numel()
        self._bounds = _even_bounds(tokens, -(-tokens // tile_tokens))
        self.needs_grad = torch.is_grad_enabled() and (
            x_BTD.requires_grad or any(p.requires_grad for p in part.module.parameters())
        )
        pieces = TokenSlices(x_BTD.reshape(1, tokens, -1), 1)
        self._tiles = [pieces.take(*bounds) for bounds in self._bounds]

    def run(self) -> Any:
        """Return the module's output; autograd keeps the saved tensors of all tiles."""
        return self._shaped(self._run(self._forward, collect=True))

    def run_recomputed(self, activations: RecomputedLayer) -> Any:
        """Return the module's output; each tile is recomputed separately in backward.

        In a rerun of the layer the output has no graph, since only the layer's own saved tensors
        are needed.
        """
        # All inputs are saved before the first tile runs; often a rerun needs nothing more.
        anchor = torch.empty(0, device=self._tiles[0].device, requires_grad=True)
        saved = [_SaveInGraph.apply(anchor, tile.detach()) for tile in self._tiles]
        num_outputs = len(self._part.dims)
        if not activations.is_open:
            outputs, need_grads = activations.run_tiles(
                lambda: self._run(self._forward, collect=False), self._x, num_outputs
            )
            return self._shaped(
                [
                    # By a function: as an argument it could not be written into afterwards.
                    GraphNode.apply(lambda x=x: x, _never_run, anchor) if needs_grad else x
                    for x, needs_grad in zip(outputs, need_grads, strict=True)
                ]
            )
        numbered = iter(enumerate(saved))

        def run(x_1MD: Tensor) -> Any:
            index, input_of_tile = next(numbered)
            label = f"{self._part.name}, tile {index}"
            saved_input = _SavedInGraph(input_of_tile)
            tile = RecomputedTile(activations, self._part.module, label, saved_input)
            tile.open((x_1MD,), {})
            try:
                output = self._forward(x_1MD)
            except BaseException:
                tile.cancel()
                raise
            tile.close()
            return output

        outputs, _ = activations.run_tiles(
            lambda: self._run(run, collect=True), self._x, num_outputs
        )
        return self._shaped(outputs)

    def _run(self, forward: Callable[[Tensor], Any], *, collect: bool) -> list[Tensor]:
        """Run all tiles; returns the leaves of the output.

        With `collect`, what hooks of Transformers collected of all tiles is joined and handed on to
        who asked for it; a rerun collects nothing.
        """
        part = self._part
        asked: list[Tensor] | None = None
        if collect:
            asked = (_active_collector.get() or {}).get(_COLLECTED)
        dims = part.dims if asked is None else part.dims + part.collected_dims
        tokens, tiles = self._bounds[-1][1], len(self._tiles)
        joints = [TokenJoin(dim, tokens, tiles) for dim in dims]
        for (start, end), tile in zip(self._bounds, self._tiles, strict=True):
            leaves = _leaves(forward, tile)[: len(dims)]
            for joint, leaf in zip(joints, leaves, strict=True):
                joint.put(leaf, start, end)
            del leaves
        self._tiles = []
        outputs = [joint.close() for joint in joints]
        if asked is not None:
            asked += self._in_rows(outputs[len(part.dims) :], part.collected_dims)
        return outputs[: len(part.dims)]

    def _shaped(self, leaves: list[Tensor]) -> Any:
        return tree_unflatten(self._in_rows(leaves, self._part.dims), self._part.spec)

    def _in_rows(self, leaves: list[Tensor], dims: tuple[int, ...]) -> list[Tensor]:
        return [
            leaf.reshape(*self._rows, *leaf.shape[2:]) if dim else leaf
            for leaf, dim in zip(leaves, dims, strict=True)
        ]


class _SaveInGraph(torch.autograd.Function):
    """Saves a tensor in autograd's graph, as the layer's own operations do, for `_SavedInGraph`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:  # type: ignore[override]
        raise AssertionError("no gradient reaches what only saves a tensor")


def _never_run(_: object) -> tuple[None]:
    raise AssertionError("the graph of a recomputed layer is never run backward")


class _SavedInGraph(SavedTensor):
    """A tensor that `_SaveInGraph` saved; the layer's activation mode keeps or recomputes it.

    Holds the output rather than its node, because before PyTorch 2.13 a node drops its saved
    tensors when its output is freed.
    """

    def _on_device(self) -> Tensor:
        (x,) = super()._on_device().grad_fn.saved_tensors  # type: ignore[union-attr]
        return x
