"""The running model, layer and chunk: one value, read by hooks, attention and mixers.

Transformers calls layers, attention and caches with its own arguments, and some families do not
pass unknown ones through. So what belongs to the running (layer, chunk) is in one ContextVar. A
`ChunkRunner` enters a context around the base model, through which the hooks of the model's layers
find the runner, and another around each chunk of each layer, with that chunk's keys, values and
states.

[Note: backward has no context] A ContextVar belongs to a thread. Autograd runs the backward of CUDA
on a thread of its own, and a caller may call `backward` on any: there is no context there, or
another one. So the rerun of a layer enters a context itself, made of what its saved activations
kept of the first one (`ChunkContext.for_recompute`), and each forward has its own keys and values:
two forwards before one backward do not mix.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch import Tensor

from sppo_hf.attention.backends.base import AttentionSpec, Backend
from sppo_hf.attention.chunk_attention import Stash
from sppo_hf.attention.kv_cache import Keep, KVOwners, KVStore
from sppo_hf.attention.segments import RowSpans
from sppo_hf.engine.model_parts import ModelParts
from sppo_hf.engine.sequence_group import RecomputeExchanges, SequenceGroup

if TYPE_CHECKING:
    from sppo_hf.engine.chunk_runner import ChunkRunner
    from sppo_hf.engine.indexer import IndexKeys
    from sppo_hf.engine.recurrent_state import LayerStates

ChooseBackend = Callable[[AttentionSpec], Backend]


@dataclasses.dataclass(slots=True)
class Attended:
    """What attention writes into the context of its layer and chunk."""

    times: int = 0
    """Number of calls."""
    link: Tensor | None = None
    """This chunk's link, for the layer's next chunk (see `chunk_attention`)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkContext:
    """One chunk in one layer; with `layer=None`, between the layers of the base model's forward."""

    model: ModelParts
    runner: ChunkRunner | None = None
    """Called by the hooks of the model's layers; None where a layer is rerun without hooks."""
    last_position: Tensor | None = None
    """Largest position of the whole sequence, `[1, 1]`."""
    rows: tuple[RowSpans, ...] | None = None
    """Documents and padding per row; None for plain causal rows."""
    choose_backend: ChooseBackend | None = None
    """Picks the attention backend for a layer's attention."""
    counters: dict[str, int] = dataclasses.field(default_factory=dict)
    group: SequenceGroup | None = None
    """The ranks that share the chunk; None where this one has all of it."""
    owners: KVOwners = dataclasses.field(default_factory=dict)
    """Which layer has stored which keys in this chunk; a layer that is rerun does not know."""

    layer: int | None = None
    chunk: int = 0
    start: int = 0
    end: int = 0
    """The chunk is the tokens `[start, end)`."""
    kv: KVStore | None = None
    """Keys and values of the layer; None in one without attention."""
    states: LayerStates | None = None
    """None in a model without recurrent or convolutional layers."""
    index_keys: IndexKeys | None = None
    """Index keys of the layer, if its indexer chooses the keys that queries read; not in a
    rerun."""
    link: Tensor | None = None
    """The link of the layer's previous chunk."""
    stash: Stash | None = None
    """Saved activations of a recomputed layer: they keep attention's results in the first forward
    and provide them in the rerun."""
    keep: Keep | None = None
    """Maps (kind, tensor) to the tensor that is kept on the device: itself, or a copy."""
    on_kv: Callable[[Tensor, Tensor], None] | None = None
    """Gets keys and values, BKCH, and ends the rerun, where a layer is rerun for these alone."""
    exchanged: RecomputeExchanges | None = None
    """What ranks exchange in the rerun of a layer of a shared chunk."""
    attended: Attended = dataclasses.field(default_factory=Attended)

    def for_recompute(self) -> ChunkContext:
        """Return what saved activations keep of it, to rerun the layer.

        See [Note: what saved activations must not hold] in `chunk_runner`.
        """
        states = None if self.states is None else self.states.without_tensors()
        return dataclasses.replace(
            self,
            runner=None,
            owners={},
            states=states,
            index_keys=None,
            link=None,
            stash=None,
            keep=None,
            attended=Attended(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this `current()`; at exit the previous context is restored."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[ChunkContext | None] = ContextVar("sppo_chunk", default=None)


def current() -> ChunkContext | None:
    """Return the context of this thread; None where no chunk runs."""
    return _current.get()


def current_of(model: ModelParts) -> ChunkContext | None:
    """Return `current()` if it is of `model`; models may run inside of each other."""
    context = _current.get()
    return context if context is not None and context.model is model else None
