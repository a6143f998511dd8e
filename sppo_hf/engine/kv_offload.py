"""Keys and values (K/V) that are offloaded or recomputed, as the plan says.

`sppo_hf.attention` walks over blocks of K/V and gets them from a `KVTransfer`; `sppo_hf.offload`
copies tensors and knows no attention. `EngineTransfer` adapts one to the other, for K/V that stream
while a layer runs. In the order by layer, a layer's K/V are needed again only in its backward:
until then they are on another tier (`OffloadedKV`), or are dropped and recomputed from the layer's
saved inputs (`recompute_kv`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from sppo_hf.attention.kv_cache import KVTransfer, LayerKV
from sppo_hf.engine.cpu_heap import return_free_heap
from sppo_hf.engine.recompute import RecomputedLayer
from sppo_hf.errors import SPPOError
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.offload.storage import OffloadedTensor
from sppo_hf.planning.tiers import OffloadTier

LABEL = "keys, values or their gradients"

TRIM_BYTES = 32 << 20
"""On a CPU, free heap is returned to the system after this many bytes were fetched.

K/V that come and go fragment the C library's heap (see `return_free_heap`), per chunk by as many
bytes as the whole prefix has. Measured at 8,192 tokens with 16 layers of 4 KiB of K/V per token, on
disk: 131 KiB of memory per token without returning it, 63 with, of which 48 are layer inputs.
"""


@dataclass(eq=False)
class EngineTransfer(KVTransfer):
    """`KVTransfer` by an offload engine."""

    engine: OffloadEngine
    """Copies the tensors."""
    _: KW_ONLY
    tier: OffloadTier
    """Where they are offloaded to."""
    max_pending_d2h_bytes: int | None
    """Bound on the D2H copies pending after `settle`; None for those of the last block."""

    def __post_init__(self) -> None:
        self._returns_free_heap = self.engine.device.type == "cpu"
        self._fetched_bytes = 0
        self.fetches = 0
        """Number of calls of `fetch` so far."""
        self.sends = 0
        """Number of calls of `send` so far."""

    def send(self, tensor: Tensor) -> OffloadedTensor:
        """Start offloading a tensor."""
        self.sends += 1
        return self.engine.start_offload(tensor, label=LABEL, tier=self.tier)

    def prefetch(self, handle: OffloadedTensor) -> None:
        """Start bringing a tensor back."""
        self.engine.prefetch(handle)

    def fetch(self, handle: OffloadedTensor) -> Tensor:
        """Return the tensor on the device, behind its copy."""
        tensor = self.engine.wait_for(handle)
        self.fetches += 1
        self._fetched_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def evict(self, handle: OffloadedTensor) -> None:
        """Free the device bytes; the tensor can be fetched again."""
        self.engine.evict(handle)
        if self._returns_free_heap and self._fetched_bytes >= TRIM_BYTES:
            self._fetched_bytes = 0
            return_free_heap()

    def release(self, handle: OffloadedTensor) -> None:
        """Free the tensor."""
        self.engine.release(handle)

    def settle(self) -> None:
        """Make compute wait until few enough D2H copies are pending."""
        self.engine.limit_pending_d2h(self.max_pending_d2h_bytes)


def recompute_kv(
    where: str,
    activations: weakref.ref[RecomputedLayer] | None,
    before: Callable[[], object] | None,
) -> tuple[Tensor, Tensor]:
    """Rerun a layer on a chunk up to its attention; returns its keys and values, BKCH.

    `activations` has the saved inputs. Weakly: the graph owns it, and it refers to the K/V store,
    which refers to this call.

    Raises:
        SPPOError: The inputs are not saved any more.
    """
    recomputed = None if activations is None else activations()
    if recomputed is None:
        raise SPPOError(
            f"keys and values of {where} were dropped to be recomputed, but the inputs of the "
            "layer are not saved any more: another layer reads them, or this part of the graph "
            "was dropped."
        )
    if before is not None:
        before()
    return recomputed.recompute_kv()


@dataclass(eq=False)
class OffloadedKV:
    """K/V of one layer on another tier; one group of the prefetch order."""

    engine: OffloadEngine
    prefetch_order: PrefetchOrder
    tier: OffloadTier
    label: str

    def __post_init__(self) -> None:
        self._handles: dict[int, tuple[OffloadedTensor, OffloadedTensor]] = {}

    def add(self, chunk: int, store: LayerKV) -> None:
        """Start offloading the K/V of `chunk`; `store` loads them when they are read again."""
        k_BKCH, v_BKCH = store.offload_chunk(chunk, functools.partial(self._load, chunk))
        k, v = (
            self.engine.start_offload(x, label=self.label, tier=self.tier) for x in (k_BKCH, v_BKCH)
        )
        self._handles[chunk] = k, v

    def prefetch_before_backward(self, hidden: Tensor) -> None:
        """Prefetch when the gradient of `hidden` [B, C, D] is there, before the layer's backward.

        The hook has no strong reference to the K/V: see [Note: what saved activations must not
        hold] in `chunk_runner`.
        """
        hidden.register_hook(
            functools.partial(_prefetch_kv, self.prefetch_order, weakref.ref(self))
        )

    def handles(self) -> Iterator[OffloadedTensor]:
        """The handles of all chunks that were not loaded yet."""
        for pair in self._handles.values():
            yield from pair

    def _load(self, chunk: int) -> tuple[Tensor, Tensor]:
        self.prefetch_order.on_backward(self)
        k, v = (self.engine.wait_for(handle) for handle in self._handles[chunk])
        for handle in self._handles.pop(chunk):
            self.engine.release(handle)
        return k, v


def _prefetch_kv(order: PrefetchOrder, reference: weakref.ref[OffloadedKV], _: Tensor) -> None:
    kv = reference()
    if kv is not None:
        order.on_backward(kv)
