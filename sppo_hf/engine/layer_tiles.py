"""Token-wise modules of a decoder layer, run in tiles over the tokens, forward and backward.

A layer over all tokens calls attention once, at its kernel's best; what is heavy then are the
temporaries of everything else: the MLP's intermediates, norms in float32, what adapters compute. A
module that treats each token by itself gives the same on a part of them, so it runs tile by tile,
and each tile's temporaries are gone before the next one begins. Where the layer is recomputed, each
tile is a frame of its own (`recompute.RecomputedTile`): in backward the layer runs again without these
modules, and then one tile at a time.

[Note: which modules are token-wise] No family is known here. The largest modules are looked for
that take `[B, T, D]` alone and return tensors with as many tokens; each runs once on a few random
tokens, many of which are alike (experts with a limited capacity overflow), at once and in parts,
and what comes out must be the same. A module that knows its place in the stack of layers has
attention or a recurrence in it and is only searched. One product of a plain `nn.Linear` has no
temporaries; and where others have hooks inside a module, they are to see calls over all tokens.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sppo_hf.engine.recompute import RecomputedLayer, is_compiled
from sppo_hf.engine.sliced_calls import Pieces, TokenJoin
from sppo_hf.engine.structure import patched_attribute
from sppo_hf.errors import SPPOError
from sppo_hf.planning.chunk_bounds import Bounds

# B batch rows, T tokens, M = B * T tokens of all rows, D width of a module's input.

_PROBE_TOKENS = 34
"""Twice a prime number: no size of a model."""
_ALIKE = 24
"""Tokens of the probe that are the same."""
_SPLIT = 5
"""Where it is cut."""

_MIN_TOKENS = 4
"""More than the example of a call has."""

_DOES_NOT_TAKE_TOKENS = (
    *(TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError),
    *(NotImplementedError, SPPOError),
)


class NotTokenWise(Exception):
    """A module mixes tokens; the message is the reason, as a part of a sentence."""


@dataclass(frozen=True, slots=True)
class TokenWise:
    """A module that gives the same on a part of the tokens."""

    name: str
    module: nn.Module
    spec: TreeSpec
    """Of what it returns."""
    dims: tuple[int, ...]
    """Of each tensor in it the dim of the tokens: 1 of `[B, T, ...]`, 0 of `[M, ...]`."""


_found: weakref.WeakKeyDictionary[nn.Module, tuple[object, tuple[TokenWise, ...]]]
_found = weakref.WeakKeyDictionary()


def token_wise(layer: nn.Module, hidden: Tensor) -> tuple[TokenWise, ...]:
    """The token-wise modules of a layer that is about to get `hidden`; probed the first time.

    Raises:
        NotTokenWise: A module takes hidden states alone, and mixes tokens.
    """
    state = tuple((id(module), _is_hooked(module)) for module in layer.modules())
    known = _found.get(layer)
    if known is None or known[0] != state:
        children = layer.named_children()
        probe = _Probe(hidden)
        found = tuple(x for name, child in children for x in _search(name, child, probe))
        known = _found[layer] = (state, found)
    return known[1]


def is_searched(module: nn.Module) -> bool:
    """Whether a module cannot run in tiles as a whole, though parts of it may."""
    return any("layer_idx" in part.__dict__ for part in module.modules()) or any(
        map(_is_hooked, itertools.islice(module.modules(), 1, None))
    )


def is_worth_tiles(module: nn.Module) -> bool:
    """Whether a module has temporaries that are worth it; see the note above."""
    product = type(module) is nn.Linear or type(module).__name__ == "Conv1D"
    return not product and any(True for _ in module.parameters())


def _is_hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks)


def _search(name: str, module: nn.Module, probe: _Probe) -> Iterator[TokenWise]:
    if not is_worth_tiles(module):
        return
    if not is_searched(module):
        found = probe.of(name, module)
        if found is not None:
            yield found
            return
    for child_name, child in module.named_children():
        yield from _search(f"{name}.{child_name}" if name else child_name, child, probe)


def input_width(module: nn.Module, width: int) -> int:
    """Width of a module's input in a layer of `width`."""
    own = getattr(module, "in_features", None)
    if isinstance(own, int):
        return own
    parameters = list(module.parameters())
    is_norm = bool(parameters) and all(p.ndim == 1 for p in parameters)
    return parameters[0].shape[0] if is_norm else width


class _Probe:
    """Runs modules on a few random tokens."""

    def __init__(self, like: Tensor) -> None:
        self._like = like

    def of(self, name: str, module: nn.Module) -> TokenWise | None:
        """What `module` returns; None if it does not take hidden states alone."""
        if is_compiled(module):
            return None
        like = self._like
        shape = (1, _PROBE_TOKENS, input_width(module, like.shape[-1]))
        generator = torch.Generator(like.device).manual_seed(0)
        x_1MD = torch.randn(shape, device=like.device, dtype=like.dtype, generator=generator)
        x_1MD[:, -_ALIKE:] = x_1MD[:, -1:]
        with torch.no_grad(), torch.random.fork_rng(_cuda(like)), _without_dropout(module):
            try:
                leaves, spec = tree_flatten(module.forward(x_1MD))
            except _DOES_NOT_TAKE_TOKENS:
                return None
            dims = tuple(_token_dim(leaf) for leaf in leaves)
            if not leaves or any(dim is None for dim in dims):
                return None
            found = TokenWise(name, module, spec, tuple(dim or 0 for dim in dims))
            for parts in _ways_to_cut(x_1MD):
                self._compare(found, leaves, [module.forward(part) for part in parts])
        return found

    def _compare(self, found: TokenWise, whole: list[Tensor], parts: list[Any]) -> None:
        leaves = zip(*(tree_flatten(part)[0] for part in parts), strict=True)
        for expected, given, dim in zip(whole, leaves, found.dims, strict=True):
            # Rows of tokens become one row.
            joined = torch.cat([x.flatten(0, 1)[None] if dim else x for x in given], dim)
            if not _is_close(joined, expected):
                raise NotTokenWise(f"{_named(found)} gives something else on a part of the tokens")


def _ways_to_cut(x_1MD: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield x_1MD[:, :_SPLIT], x_1MD[:, _SPLIT:]
    yield (x_1MD.reshape(2, -1, x_1MD.shape[-1]),)


def _named(found: TokenWise) -> str:
    return f"{found.name} ({type(found.module).__name__})"


def _cuda(like: Tensor) -> list[torch.device]:
    return [like.device] if like.device.type == "cuda" else []


def _token_dim(leaf: Any) -> int | None:
    if not isinstance(leaf, Tensor):
        return None
    if leaf.ndim > 1 and leaf.shape[:2] == (1, _PROBE_TOKENS):
        return 1
    return 0 if leaf.ndim > 0 and leaf.shape[0] == _PROBE_TOKENS else None


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    narrow = one.element_size() < 4 or torch.is_autocast_enabled(one.device.type)
    # Products over as many elements as a layer is wide, summed in another order.
    rounding = 0.125 if narrow else 1024 * torch.finfo(one.dtype).eps
    difference = (one - other).abs().max()
    return bool(difference <= rounding * other.abs().max())


@contextlib.contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    drops = [part for part in module.modules() if isinstance(part, nn.Dropout)]
    before = [part.p for part in drops]
    try:
        for part in drops:
            part.p = 0.0
        yield
    finally:
        for part, p in zip(drops, before, strict=True):
            part.p = p


class LayerTiles:
    """Runs token-wise modules of layers in tiles."""

    def __init__(self, tile_tokens: int) -> None:
        """Prepare for tiles of so many tokens, over all rows; 0 leaves everything as it is."""
        self._tile_tokens = tile_tokens

    def bounds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bounds:
        """Bounds of tiles, in tokens of each row, for a token-wise call; one where none are made.

        A token-wise call has `[B, T, D]` alone as its argument.
        """
        (x, *others), tiles = args or (None,), 1
        if not isinstance(x, Tensor) or x.ndim != 3 or others or kwargs:
            return ((0, 0),)
        tokens = x.shape[1]
        if self._tile_tokens:
            tiles = min(-(-x.shape[0] * tokens // self._tile_tokens), tokens // _MIN_TOKENS)
        return _even_bounds(tokens, max(tiles, 1))

    @contextlib.contextmanager
    def inside(
        self, layer: nn.Module, hidden: Tensor, frame: RecomputedLayer | None
    ) -> Iterator[None]:
        """Let token-wise modules of `layer` run in tiles, for the first time or again.

        `frame` recomputes the layer; None where autograd keeps what it saves.

        Raises:
            NotTokenWise: See `token_wise`.
        """
        if not self._tile_tokens or hidden.shape[:-1].numel() <= self._tile_tokens:
            yield
            return
        tiled = {
            part.module: self._tiled(part, part.module.forward, frame)
            for part in token_wise(layer, hidden)
        }
        with patched_attribute("forward", tiled):
            yield

    def _tiled(
        self, part: TokenWise, forward: Callable[..., Any], frame: RecomputedLayer | None
    ) -> Callable[..., Any]:
        def tiled(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs or args[0].ndim != 3:
                return forward(*args, **kwargs)
            call = _TiledCall(part, forward, args[0], self._tile_tokens)
            if call.needs_grad and frame is not None:
                return call.recomputed(frame)
            return call.kept()

        return tiled


def _even_bounds(tokens: int, tiles: int) -> Bounds:
    ends = (tokens * tile // tiles for tile in range(tiles + 1))
    return tuple(itertools.pairwise(ends))


class _TiledCall:
    """One call of a token-wise module."""

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
        pieces = Pieces(x_BTD.reshape(1, tokens, -1), 1)
        self._tiles = [pieces.take(*bounds) for bounds in self._bounds]

    def kept(self) -> Any:
        """Its result, with whatever autograd saves of each tile."""
        return self._shaped(self._run(self._forward))

    def recomputed(self, frame: RecomputedLayer) -> Any:
        """Its result; each tile is recomputed by itself. In a second forward, its value alone."""
        # All before the first tile runs: often a second forward needs nothing more.
        anchor = torch.empty(0, device=self._tiles[0].device, requires_grad=True)
        saved = [_Save.apply(anchor, tile.detach()) for tile in self._tiles]
        count = len(self._part.dims)
        if not frame.is_open:
            outputs, need_grads = frame.run_unseen(lambda: self._run(self._forward), self._x, count)
            return self._shaped(
                [
                    _Stand.apply(anchor, functools.partial(_itself, x)) if needs_grad else x
                    for x, needs_grad in zip(outputs, need_grads, strict=True)
                ]
            )
        numbered = iter(enumerate(saved))

        def run(x_1MD: Tensor) -> Any:
            index, input_of_tile = next(numbered)
            inner = frame.part(
                self._part.module, f"{self._part.name}, tile {index}", _OfGraph(input_of_tile)
            )
            inner.open((x_1MD,), {})
            try:
                output = self._forward(x_1MD)
            except BaseException:
                inner.cancel()
                raise
            inner.close()
            return output

        outputs, _ = frame.run_unseen(lambda: self._run(run), self._x, count)
        return self._shaped(outputs)

    def _run(self, forward: Callable[[Tensor], Any]) -> list[Tensor]:
        tokens, tiles = self._bounds[-1][1], len(self._tiles)
        joints = [TokenJoin(dim, tokens, tiles) for dim in self._part.dims]
        for (start, end), tile in zip(self._bounds, self._tiles, strict=True):
            leaves, _ = tree_flatten(forward(tile))
            for joint, leaf in zip(joints, leaves, strict=True):
                joint.put(leaf, start, end)
            del leaves
        self._tiles = []
        return [joint.close() for joint in joints]

    def _shaped(self, leaves: list[Tensor]) -> Any:
        shaped = [
            leaf.reshape(*self._rows, *leaf.shape[2:]) if dim else leaf
            for leaf, dim in zip(leaves, self._part.dims, strict=True)
        ]
        return tree_unflatten(shaped, self._part.spec)


def _itself(x: Tensor) -> Tensor:
    return x


class _Save(torch.autograd.Function):
    """Saves a tensor as the layer's own operations do, for `_OfGraph` to ask for."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:  # type: ignore[override]
        raise AssertionError("nothing comes behind what is saved here")


class _Stand(torch.autograd.Function):
    """Lets what was computed without gradients look as if it needed one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        return made()  # were it an argument, nobody could write into it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:  # type: ignore[override]
        raise AssertionError("the graph of a recomputed layer is never run backward")


class _OfGraph:
    """A tensor that `_Save` has saved, or that the layer's frame makes again."""

    def __init__(self, output: Tensor) -> None:
        # Not its node: before PyTorch 2.13 a node lets go of what it saved when its output is gone.
        self._output: Tensor | None = output

    def handles(self) -> tuple[()]:
        """What is away is the layer's."""
        return ()

    def take(self) -> Tensor:
        assert self._output is not None, "a tensor is taken once"
        (x,) = self._output.grad_fn.saved_tensors  # type: ignore[union-attr]
        self.drop()
        return x

    def borrow(self) -> contextlib.AbstractContextManager[Tensor]:
        raise AssertionError("a part of a layer has no keys")

    def drop(self) -> None:
        self._output = None
