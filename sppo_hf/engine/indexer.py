"""Indexers, which choose the keys that each query of a sparse attention reads.

Before attention an indexer (DeepSeek V3.2's, GLM 5's and those like them) scores all earlier tokens
for every query, by queries and keys of its own, and returns the numbers of the `index_topk` best.
Transformers' attention takes these as `indices`, as `attention_interface` does. Nothing of this has
a gradient.

The untouched code of an indexer computes a matrix of scores for each of its heads, `[B, C, heads,
T]` in float32: 16 GiB for 8,192 tokens and 64 heads. So it is called on a few queries at a time,
with the mask that Transformers would have made of these, and a cache by which it gets the index
keys of the chunks before (`IndexKeys`). Ranks that share a sequence gather their index keys, and
each chooses for its own tokens' queries; attention gathers the choices.

A layer that is rerun does not choose again: its choice is saved, since another order of sums might
choose other keys than those that attention has read. Where a query sees no more keys than it may
read, there is no choice and nothing is saved.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sppo_hf.attention.segments import RowSpans
from sppo_hf.engine.attention_interface import MaskMeaning
from sppo_hf.engine.chunk_context import current
from sppo_hf.engine.model_parts import CACHE_ARGUMENTS, all_modules, patched_attribute
from sppo_hf.engine.sequence_group import rank_tokens
from sppo_hf.planning.tile_sizes import index_tile_tokens

CHOSEN = "prev_topk_indices"
"""Argument of a layer with what the indexer of an earlier layer has chosen."""

# B batch rows, c tokens of a chunk, of a rank's part of it or of a tile, T tokens so far, D size of
# an index key, S keys that a query may read.


_found: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module, ...]] = weakref.WeakKeyDictionary()
"""Indexers of layers. They are asked for in every chunk, which is too often to look for them."""


def indexers_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Indexers in `module`: what attention has under that name, if it chooses a number of keys."""
    if module not in _found:
        found = (child._modules.get("indexer") for child in all_modules(module))
        _found[module] = tuple(x for x in found if hasattr(x, "index_topk") and x is not None)
    return _found[module]


class IndexKeys:
    """The index keys of one layer, of all its chunks so far."""

    def __init__(self, total_tokens: int) -> None:
        """Prepare for keys of `total_tokens` in all."""
        self._total_tokens = total_tokens
        self._keys: Tensor | None = None
        self._num_tokens = 0

    def add(self, keys_BcD: Tensor) -> None:
        """Add the keys of the next tokens."""
        rows, tokens, size = keys_BcD.shape
        if self._keys is None:
            self._keys = keys_BcD.new_empty(rows, self._total_tokens, size)
        start, self._num_tokens = self._num_tokens, self._num_tokens + tokens
        self._keys[:, start : self._num_tokens] = keys_BcD

    def first(self, tokens: int) -> Tensor:
        """Return the keys of the first `tokens` tokens, `[B, T, D]`."""
        assert self._keys is not None, "keys were added"
        assert tokens <= self._num_tokens, "keys of all these tokens were added"
        return self._keys[:, :tokens]


@dataclass(frozen=True, slots=True)
class _Cache:
    """The cache that an indexer gets: maps keys of its tokens to those of all tokens so far."""

    all_keys: Callable[[Tensor], Tensor]

    def update_indexer(self, keys_BcD: Tensor, _layer: int) -> Tensor:
        """Return the keys of all tokens so far."""
        return self.all_keys(keys_BcD)


class _KeysFound(Exception):
    """Ends an indexer's forward at its keys."""

    def __init__(self, keys_BcD: Tensor) -> None:
        super().__init__("the indexer was run for its keys alone")
        self.keys_BcD = keys_BcD


@contextlib.contextmanager
def indexers_in_tiles(layer: nn.Module) -> Iterator[None]:
    """Make the indexers of `layer` run on a few queries at a time, and in its first run alone."""
    indexers = indexers_of(layer)
    if not indexers:
        yield
        return
    in_tiles = {x: functools.partial(_choose, x, x.forward) for x in indexers}
    with patched_attribute("forward", in_tiles):
        yield


def _choose(
    indexer: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor | None:
    """Return the numbers of the keys that each of this rank's queries reads, `[B, c, S]` int32.

    None in a rerun where each query reads all keys that it sees.
    """
    context = current()
    assert context is not None, "indexers run in decoder layers"
    stash, keys, group = context.stash, context.index_keys, context.group
    if stash is not None and stash.is_recompute:
        return stash.chosen()
    if stash is not None:
        stash.begin_choice()
    assert keys is not None, "a layer with an indexer has a store of index keys"
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    rows, tokens = hidden.shape[:2]
    caches = [name for name in CACHE_ARGUMENTS if name in kwargs]
    own = range(context.start, context.end)
    if group is not None:
        own = range(*rank_tokens(context.start, context.end, group.rank, group.size))
        keys_BcD = _keys_alone(forward, args, {**kwargs, **dict.fromkeys(caches, _KEYS_ALONE)})
        keys.add(group.gather_tokens(keys_BcD, context.end - context.start))
    width = min(indexer.index_topk, context.end)
    # A rank without tokens has one that is not of the sequence.
    chosen = [] if own else [hidden.new_zeros(rows, tokens, width, dtype=torch.int32)]
    tile = index_tile_tokens(rows, indexer.n_heads, context.end)
    for start in range(0, len(own), tile):
        queries = own[start : start + tile]
        visible = _visible(queries, context.rows, hidden.device)

        def all_keys(keys_BcD: Tensor, end: int = queries.stop) -> Tensor:
            if group is None:
                keys.add(keys_BcD)
            return keys.first(end)

        def cut(x: Any, at: slice = slice(start, start + tile), visible: Tensor = visible) -> Any:
            if isinstance(x, MaskMeaning):
                return visible
            return x[:, at] if x.ndim > 1 and x.shape[1] == tokens else x

        tile_args, tile_kwargs = tree_map_only((Tensor, MaskMeaning), cut, (args, kwargs))
        tile_kwargs |= dict.fromkeys(caches, _Cache(all_keys))
        indices_BcS = forward(*tile_args, **tile_kwargs)
        # A query that sees fewer keys than it may read reads them all, one of them repeatedly.
        missing = width - indices_BcS.shape[-1]
        repeated = indices_BcS[..., -1:].expand(-1, -1, missing)
        chosen.append(torch.cat([indices_BcS, repeated], dim=-1))
    indices_BcS = torch.cat(chosen, dim=1)
    if stash is not None:
        stash.end_choice(indices_BcS if width < context.end else None)
    return indices_BcS


def _raise_found(keys_BcD: Tensor) -> Tensor:
    raise _KeysFound(keys_BcD)


_KEYS_ALONE = _Cache(_raise_found)


def _keys_alone(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return the keys of an indexer whose cache is `_KEYS_ALONE`."""
    try:
        forward(*args, **kwargs)
    except _KeysFound as found:
        return found.keys_BcD
    raise AssertionError("an indexer asks its cache for the keys of all tokens")


def _visible(queries: range, rows: tuple[RowSpans, ...] | None, device: torch.device) -> Tensor:
    """Return the causal mask of the queries within their documents, `[B or 1, c, T]`."""
    query_c = torch.arange(queries.start, queries.stop, device=device)
    key_T = torch.arange(queries.stop, device=device)
    visible_cT = key_T <= query_c[:, None]
    if rows is None:
        return visible_cT[None]
    by_row: list[Tensor] = []
    for row in rows:
        # From numbers alone: a list of them would be copied to the device, and waited for.
        first_c = torch.zeros_like(query_c)
        for start, end in row.documents:
            if start < queries.stop and end > queries.start:
                first_c.masked_fill_(query_c >= start, start)
        in_row_cT = (key_T >= first_c[:, None]) & (key_T < row.valid_tokens)
        by_row.append(visible_cT & in_row_cT)
    return torch.stack(by_row)
