"""Keys and values that wait where the plan says, moved by the offload engine.

The attention room walks over blocks and asks a `KVTransfer` for them; the offload room moves
tensors and knows no attention. This is the adapter between the two, and knows neither layers nor
chunks.
"""

from __future__ import annotations

from torch import Tensor

from sppo_hf.attention.segments import RowSpans
from sppo_hf.attention.streamed_kv import KVStream
from sppo_hf.attention.transfer import KVTransfer
from sppo_hf.engine.cpu_heap import return_free_heap
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.handles import OffloadedTensor
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import AwayTier

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
        tier: AwayTier = "host",
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
        self._tier: AwayTier = tier
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
        self._engine.close_frame(self._leave_bytes)


def kv_stream(
    plan: Plan,
    engine: OffloadEngine,
    *,
    rows: tuple[RowSpans, ...] | None,
    max_pending_d2h_bytes: int | None = None,
    linked: bool = True,
) -> KVStream | None:
    """The stream for one sequence under `plan`; None where keys and values stay on the device.

    Args:
        plan: Bounds of the chunks, tier and block size of keys and values.
        engine: Moves them.
        rows: Documents and padding per row, or None for plain causal rows.
        max_pending_d2h_bytes: See `EngineTransfer`.
        linked: See `KVStream`.
    """
    if plan.kv_tier == "device":
        return None
    return KVStream(
        EngineTransfer(engine, tier=plan.kv_tier, max_pending_d2h_bytes=max_pending_d2h_bytes),
        plan.bounds,
        rows=rows,
        block_tokens=plan.kv_block_tokens,
        linked=linked,
    )
