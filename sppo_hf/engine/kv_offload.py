"""Keys and values that wait where the plan says, moved by the offload engine.

The attention room walks over blocks and asks a `KVTransfer` for them; the offload room moves
tensors and knows no attention. Here is the adapter between the two (`EngineTransfer`), for keys
that stream while a layer runs. Layer by layer, a layer's keys and values may wait for its backward:
on another tier (`OffloadedKV`), or to be made again from what its frames keep (`RecomputedKV`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator

from torch import Tensor

from sppo_hf.attention.kv_cache import LayerKV
from sppo_hf.attention.segments import RowSpans
from sppo_hf.attention.streamed_kv import KVStream, KVTransfer
from sppo_hf.engine.cpu_heap import return_free_heap
from sppo_hf.engine.recompute import RecomputedLayer
from sppo_hf.errors import SPPOError
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.offload.storage import OffloadedTensor
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import OffloadTier

LABEL = "keys, values or their gradients"

TRIM_BYTES = 32 << 20
"""On a CPU: bytes that come back between two times that free heap is returned to the system.

What comes and goes leaves holes in the C library's heap (see `return_free_heap`), per chunk as many
bytes as the whole prefix has. Measured at 8,192 tokens with 16 layers of 4 KiB of keys and values
per token, on disk: 131 KiB of memory per token without, 63 with, of which 48 are layer inputs.
"""


class EngineTransfer(KVTransfer):
    """An offload engine as the attention room sees it."""

    def __init__(
        self,
        engine: OffloadEngine,
        *,
        tier: OffloadTier = "host",
        max_pending_d2h_bytes: int | None = None,
    ) -> None:
        """Adapt `engine`.

        Args:
            engine: Moves the tensors.
            tier: Where they wait.
            max_pending_d2h_bytes: The most device bytes on their way out after `settle`; None lets
                those of the last block be on their way.
        """
        self._engine = engine
        self._tier: OffloadTier = tier
        self._leave_bytes = max_pending_d2h_bytes
        self._trims = engine.device.type == "cpu"
        self._fetched_bytes = 0
        self.fetches = 0
        """How often something was fetched so far."""
        self.sends = 0
        """How often something was sent away."""

    def send(self, tensor: Tensor) -> OffloadedTensor:
        """See `KVTransfer.send`."""
        self.sends += 1
        return self._engine.start_offload(tensor, label=LABEL, tier=self._tier)

    def prefetch(self, handle: OffloadedTensor) -> None:
        """See `KVTransfer.prefetch`."""
        self._engine.prefetch(handle)

    def fetch(self, handle: OffloadedTensor) -> Tensor:
        """See `KVTransfer.fetch`."""
        tensor = self._engine.wait_for(handle)
        self.fetches += 1
        self._fetched_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def evict(self, handle: OffloadedTensor) -> None:
        """See `KVTransfer.evict`."""
        self._engine.evict(handle)
        if self._trims and self._fetched_bytes >= TRIM_BYTES:
            self._fetched_bytes = 0
            return_free_heap()

    def release(self, handle: OffloadedTensor) -> None:
        """See `KVTransfer.release`."""
        self._engine.release(handle)

    def settle(self) -> None:
        """Let compute wait until few enough bytes are on their way out."""
        self._engine.limit_pending_d2h(self._leave_bytes)


def kv_stream(
    plan: Plan,
    engine: OffloadEngine,
    *,
    rows: tuple[RowSpans, ...] | None,
    linked: bool = True,
) -> KVStream | None:
    """The stream for one sequence under `plan`; None where keys and values stay on the device.

    Args:
        plan: Bounds of the chunks, tier and block size of keys and values.
        engine: Moves them.
        rows: Documents and padding per row, or None for plain causal rows.
        linked: See `KVStream`.
    """
    if plan.kv_tier == "device":
        return None
    return KVStream(
        EngineTransfer(engine, tier=plan.kv_tier, max_pending_d2h_bytes=plan.max_pending_d2h_bytes),
        plan.bounds,
        rows=rows,
        block_tokens=plan.kv_block_tokens,
        linked=linked,
    )


class RecomputedKV:
    """Makes keys and values of one (layer, chunk) again from what its frame keeps."""

    def __init__(
        self,
        layer: int,
        chunk: int,
        frame: weakref.ref[RecomputedLayer] | None,
        noted: Callable[[], None] | None = None,
    ) -> None:
        self._where = f"layer {layer}, chunk {chunk}"
        self._noted = noted
        self._frame = frame  # weakly: the graph owns it, and it has the store that has this

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Run the layer again up to its attention; its keys and values, BKCH."""
        frame = None if self._frame is None else self._frame()
        if frame is None:
            raise SPPOError(
                f"keys and values of {self._where} were dropped, and what they are made from is "
                "gone: another layer reads them, or this part of the graph was dropped."
            )
        if self._noted is not None:
            self._noted()
        return frame.recompute_kv()


class OffloadedKV:
    """Keys and values of one layer on another tier, as one frame of the prefetch order."""

    def __init__(
        self, engine: OffloadEngine, prefetch_order: PrefetchOrder, tier: OffloadTier, label: str
    ) -> None:
        self._engine = engine
        self._prefetch_order = prefetch_order
        self._tier: OffloadTier = tier
        self._label = label
        self._handles: dict[int, tuple[OffloadedTensor, OffloadedTensor]] = {}

    def add(self, chunk: int, store: LayerKV) -> None:
        """Send those of `chunk` away."""
        k_BKCH, v_BKCH = store.offload_chunk(chunk, functools.partial(self._bring, chunk))
        self._handles[chunk] = (self._send(k_BKCH), self._send(v_BKCH))

    def prefetch_before_backward(self, hidden: Tensor) -> None:
        """Come back when the gradient of `hidden` `[B, C, D]` is there: before the layer's frames.

        The hook has no reference to what is away: see [Note: what saved activations must not hold].
        """
        hidden.register_hook(
            functools.partial(_enter_keys, self._prefetch_order, weakref.ref(self))
        )

    def _send(self, x: Tensor) -> OffloadedTensor:
        return self._engine.start_offload(x, label=self._label, tier=self._tier)

    def handles(self) -> Iterator[OffloadedTensor]:
        """See `sppo_hf.offload.layer_offload.PrefetchGroup`."""
        for pair in self._handles.values():
            yield from pair

    def _bring(self, chunk: int) -> tuple[Tensor, Tensor]:
        self._prefetch_order.on_backward(self)
        k, v = (self._engine.wait_for(handle) for handle in self._handles[chunk])
        for handle in self._handles.pop(chunk):
            self._engine.release(handle)
        return k, v


def _enter_keys(prefetch_order: PrefetchOrder, away: weakref.ref[OffloadedKV], _: Tensor) -> None:
    keys = away()
    if keys is not None:
        prefetch_order.on_backward(keys)
