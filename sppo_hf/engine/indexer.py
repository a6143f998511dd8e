"""Indexers, which choose the keys that each query of a sparse attention reads.

Before attention an indexer (DeepSeek V3.2's, GLM 5's and those like them) scores all earlier tokens
for every query, by queries and keys of its own, and returns the numbers of the `index_topk` best.
Transformers' attention takes these as `indices`, as `attention_interface` does. Nothing of this has
a gradient.

The untouched code of an indexer computes a matrix of scores for each of its heads, `[B, C, heads,
T]` in float32: 16 GiB for 8,192 tokens and 64 heads. So it is called on a few queries at a time,
with the mask that Transformers would have made of these, and a cache (`IndexKeys`) by which it gets
the index keys of the chunks before.

A layer that is rerun does not choose again: its choice is saved, since another order of sums might
choose other keys than those that attention has read. Where a query sees no more keys than it may
read, there is no choice and nothing is saved.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sppo_hf.attention.segments import RowSpans
from sppo_hf.engine.attention_interface import MaskMeaning
from sppo_hf.engine.chunk_context import current
from sppo_hf.engine.model_parts import CACHE_ARGUMENTS, all_modules, patched_attribute
from sppo_hf.planning.tile_sizes import index_tile_tokens

CHOSEN = "prev_topk_indices"
"""Argument of a layer with what the indexer of an earlier layer has chosen."""

# B batch rows, C tokens of a chunk, c of a tile, T tokens so far, D size of an index key, S keys
# that a query may read.


def indexers_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Indexers in `module`: what attention has under that name, if it chooses a number of keys."""
    found = (getattr(child, "indexer", None) for child in all_modules(module))
    return tuple(x for x in found if isinstance(x, nn.Module) and hasattr(x, "index_topk"))


class IndexKeys:
    """The index keys of one layer, of all its chunks so far; the cache that its indexer sees."""

    def __init__(self, total_tokens: int) -> None:
        """Prepare for keys of `total_tokens` in all."""
        self._total_tokens = total_tokens
        self._keys: Tensor | None = None
        self._num_tokens = 0

    def update_indexer(self, keys_BcD: Tensor, _layer: int) -> Tensor:
        """Add the keys of the next tokens, and return all so far, `[B, T, D]`."""
        rows, tokens, size = keys_BcD.shape
        if self._keys is None:
            self._keys = keys_BcD.new_empty(rows, self._total_tokens, size)
        start, self._num_tokens = self._num_tokens, self._num_tokens + tokens
        self._keys[:, start : self._num_tokens] = keys_BcD
        if self._num_tokens == self._total_tokens:  # the last tokens: nobody asks again
            keys, self._keys = self._keys, None
            return keys
        return self._keys[:, : self._num_tokens]


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
    """Return the numbers of the keys that each query reads, `[B, C, S]` int32.

    None in a rerun where each query reads all keys that it sees.
    """
    context = current()
    assert context is not None, "indexers run in decoder layers"
    stash, keys = context.stash, context.index_keys
    if stash is not None and stash.is_recompute:
        return stash.chosen()
    if stash is not None:
        stash.begin_choice()
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    rows, tokens = hidden.shape[:2]
    assert keys is not None, "a layer with an indexer has a store of index keys"
    cache = {name: keys for name in CACHE_ARGUMENTS if name in kwargs}
    tile = index_tile_tokens(rows, indexer.n_heads, context.end)
    chosen: list[Tensor] = []
    for start in range(0, tokens, tile):
        end = min(start + tile, tokens)

        queries = range(context.start + start, context.start + end)
        visible = _visible(queries, context.rows, hidden.device)

        def cut(x: Any, at: slice = slice(start, end), visible: Tensor = visible) -> Tensor:
            if isinstance(x, MaskMeaning):
                return visible
            return x[:, at] if x.ndim > 1 and x.shape[1] == tokens else x

        tile_args, tile_kwargs = tree_map_only((Tensor, MaskMeaning), cut, (args, kwargs))
        chosen.append(forward(*tile_args, **{**tile_kwargs, **cache}))
    width = chosen[-1].shape[-1]
    # Earlier queries see fewer keys than they may read: all of these, and one of them repeatedly.
    chosen = [torch.cat([x, x[..., -1:].expand(-1, -1, width - x.shape[-1])], -1) for x in chosen]
    indices_BCS = torch.cat(chosen, dim=1)
    if stash is not None:
        stash.end_choice(indices_BCS if width < context.end else None)
    return indices_BCS


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
