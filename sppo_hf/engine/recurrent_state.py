"""States that recurrent and convolutional layers pass from chunk to chunk.

Transformers' own code carries such states for generation: a mixer (Mamba2, gated delta net, short
convolution, ...) reads what a `Cache` holds of the tokens before and gives back what the tokens
after need. `StateCache` is a cache whose states are ordinary tensors of the autograd graph: reading
returns a copy, and nothing is detached or written in place. So the
untouched code carries states through training, and their gradients flow from the last chunk back to
the first, as those of keys and values do.

The cache itself holds nothing. The states of the running (layer, chunk) are in the `LayerStates` of
its `ChunkContext`, so a rerun layer reads the states that it read in forward, and what it writes
then is dropped. `family_guard` checks whether a family computes the same with states as without.

[Note: chunks of one token] A single token with a state is a step of generation, for which mixers
have another branch. It writes into states in place, by kernels that autograd does not see. So only
the first chunk of such models may have one token (see `planning.chunk_bounds`).

[Note: packed documents] The torch code of mixers treats a row as one document, whatever its
positions are, and given a state the kernels take no offsets of documents. So where documents begin
inside a row, a mixer is called once for each document of each row, the first with the row's state
and the others without. The last token of a document may be alone in its chunk; it is repeated, and
output and state of the repetition are dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from sppo_hf.attention.segments import RowSpans
from sppo_hf.engine.chunk_context import current
from sppo_hf.engine.model_parts import mixers_of, patched_attribute
from sppo_hf.errors import UnsupportedModelError

# B batch rows, C tokens of a chunk or document, D model width, E channels, K kernel size.


StateKey = tuple[str, int, int]
"""Kind ("conv" or "recurrent"), index of the layer, and index among its states of that kind."""

States = Mapping[StateKey, Tensor]
"""States after some chunk, each `[B, ...]`."""

Spans = tuple[tuple[int, int, bool], ...]
"""Documents in one row of a chunk: start, end, and whether it began in an earlier chunk."""


class LayerStates:
    """States of one layer before and after one chunk."""

    def __init__(self, before: States, documents: tuple[Spans, ...] | None = None) -> None:
        """Begin a chunk with the states `before` it; none in the first chunk.

        `documents` are the documents of every row; None where each row is one document.
        """
        self.documents = documents
        self.after: dict[StateKey, Tensor] = {}
        self.before = before

    @property
    def begun(self) -> bool:
        """Whether this is not the first chunk."""
        return bool(self.before)

    def read(self, key: StateKey) -> Tensor | None:
        """Return a copy of the state before the chunk; None in the first chunk."""
        state = self.before.get(key)
        return None if state is None else state.clone()

    def write_conv(self, key: StateKey, x_BEC: Tensor, kernel: int | None) -> Tensor:
        """Append a chunk's inputs of a causal convolution to those before, and return all.

        The last `kernel` inputs are kept; None: as many as were kept before, or all of the first
        chunk.
        """
        before = self.before.get(key)
        if before is not None:
            kernel = before.shape[-1]
            x_BEC = torch.cat([before, x_BEC], dim=-1)
        kernel = x_BEC.shape[-1] if kernel is None else kernel
        if x_BEC.shape[-1] < kernel:
            x_BEC = nn.functional.pad(x_BEC, (kernel - x_BEC.shape[-1], 0))
        self.after[key] = x_BEC[..., -kernel:].clone()  # a view would keep the whole chunk's inputs
        return x_BEC

    def write_recurrent(self, key: StateKey, state: Tensor) -> Tensor:
        """Keep and return the state after the chunk's last token."""
        whole = state.untyped_storage().nbytes() <= state.nbytes
        self.after[key] = state if whole else state.clone()
        return state

    def without_tensors(self) -> LayerStates:
        """Return the documents alone."""
        return LayerStates({}, self.documents)

    def rows(self, row: int, *, fresh: bool) -> LayerStates:
        """Return states for one document of `row`: the row's, or none if it is `fresh`."""
        if fresh:
            return LayerStates({})
        return LayerStates({key: state[row : row + 1] for key, state in self.before.items()})


class _CacheLayer:
    """A layer of the cache, as older releases of Transformers read it."""

    record_past = False

    def __init__(self, cache: StateCache, layer: int) -> None:
        self._cache = cache
        self._layer = layer
        self.conv_states = _StatesByIndex(functools.partial(cache.get_conv_state, layer))
        self.recurrent_states = _StatesByIndex(functools.partial(cache.get_recurrent_state, layer))

    def get_seq_length(self) -> int:
        """Tokens of keys in the cache: none, attention has a store of its own."""
        return 0


class _StatesByIndex:
    def __init__(self, get: Callable[[int], Tensor | None]) -> None:
        self._get = get

    def __getitem__(self, index: int) -> Tensor | None:
        return self._get(index)


class StateCache(Cache):
    """The running layer's states in the interface of Transformers' caches; K/V pass through."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_CacheLayer(self, layer) for layer in range(num_layers)])  # type: ignore[misc]

    def _states(self) -> LayerStates:
        context = current()
        assert context is not None, "states are read and written by mixers, in decoder layers"
        assert context.states is not None, "states are read and written by mixers"
        return context.states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution, `[B, E, K]`; None in the first chunk."""
        return self._states().read(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrent state before the chunk, `[B, ...]`; None in the first chunk."""
        return self._states().read(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Keep a chunk's inputs `[B, E, C]`; returns them appended to those before."""
        key = ("conv", layer_idx, state_idx)
        return self._states().write_conv(key, conv_states, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep and return the state after a chunk."""
        return self._states().write_recurrent(("recurrent", layer_idx, state_idx), recurrent_states)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether the running layer has states of earlier chunks."""
        context = current()
        return context is not None and context.states is not None and context.states.begun

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        """Return False: states are cut to what the next token needs."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged: chunked attention has a store of its own."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of keys in the cache: none."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys of a mask: those of the chunk."""
        return query_length, 0


def documents_in_chunk(
    rows: tuple[RowSpans, ...] | None, start: int, end: int
) -> tuple[Spans, ...] | None:
    """Return the documents of every row in the chunk `[start, end)`, counted from its start.

    None where every row of the sequence is one document.
    """
    if rows is None or all(len(row.documents) == 1 for row in rows):
        return None
    return tuple(
        tuple(
            (max(first, start) - start, min(last, end) - start, first < start)
            for first, last in row.documents
            if first < end and last > start
        )
        for row in rows
    )


@contextlib.contextmanager
def separate_documents(layer: nn.Module, states: LayerStates | None) -> Iterator[None]:
    """Make the mixers of `layer` run on one document at a time; see [Note: packed documents].

    Nothing changes where the states name no documents.
    """
    if states is None or states.documents is None:
        yield
        return
    mixers = mixers_of(layer)
    by_document = {mixer: functools.partial(_by_document, mixer.forward) for mixer in mixers}
    with patched_attribute("forward", by_document):
        yield


def _by_document(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Call a mixer's `forward` for each document of each row; returns `[B, C, D]` as it would."""
    hidden = args[0] if args else kwargs["hidden_states"]
    context = current()
    assert context is not None, "mixers run in decoder layers"
    states = context.states
    assert states is not None, "mixers have states"
    assert states.documents is not None, "the layer's documents are known"
    rows: list[Tensor] = []
    after: dict[StateKey, list[Tensor]] = {}
    for row, documents in enumerate(states.documents):
        outputs: list[Tensor] = []
        for start, end, is_continued in documents:
            # One token with a state; see [Note: chunks of one token].
            doubled = is_continued and end - start == 1
            at = slice(start, end)

            def cut(x: Any, row: int = row, at: slice = at, doubled: bool = doubled) -> Any:
                if not isinstance(x, Tensor) or x.shape[:2] != hidden.shape[:2]:
                    return x
                # Not by a list of indices, which the host would copy to the device and wait for.
                part = x[row : row + 1, at]
                return part.repeat_interleave(2, dim=1) if doubled else part

            part = states.rows(row, fresh=not is_continued)
            with dataclasses.replace(context, states=part).entered():
                output = forward(*map(cut, args), **{name: cut(x) for name, x in kwargs.items()})
            if not isinstance(output, Tensor):
                raise UnsupportedModelError(
                    "packed documents cannot be kept apart in this model: a mixer returns "
                    f"{type(output).__name__}, not hidden states alone. Pad the documents to rows "
                    "of their own."
                )
            outputs.append(output[:, : end - start])
        for key, state in part.after.items():
            after.setdefault(key, []).append(state)
        rows.append(torch.cat(outputs, dim=1))
    states.after |= {key: torch.cat(parts) for key, parts in after.items()}
    return torch.cat(rows)
