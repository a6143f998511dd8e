"""TierBytes: what one tier holds at one moment of a step, cause by cause.

Knows nothing of models, plans or how the figures come about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """Bytes on one tier, by cause."""

    weights: int = 0
    """All parameters, adapters left out."""

    lora: int = 0
    """Adapters."""

    gradients: int = 0
    """Gradients of the trainable parameters, in their own dtype."""

    optimizer: int = 0
    """An assumption: AdamW, two float32 states per trainable parameter."""

    kv: int = 0
    """Keys and values of the chunks so far; where they are streamed, the blocks in use."""

    dkv: int = 0
    """Gradient sums of earlier chunks' keys and values, float32."""

    frames: int = 0
    """Frames saved whole."""

    products: int = 0
    """Frames reduced to layer input, attention and matrix products' outputs."""

    skeletons: int = 0
    """Frames reduced to layer input, attention output and log-sum-exp."""

    hidden: int = 0
    """Inputs of the final norm and gradients at the loss; on a CPU, embeddings."""

    logits_tile: int = 0
    """Logits and their gradient while one tile of the loss is computed."""

    workspace: int = 0
    """An estimate: the running layer's temporaries."""

    copies: int = 0
    """Bytes that wait for a copy, or have come back before their use; on the host, what passes
    through on its way to the disk and back."""

    slabs: int = 0
    """Host slabs' unused rest."""

    reserve: int = 0
    """An assumption: the device's context, and a share for fragmentation."""

    @property
    def total(self) -> int:
        """Sum over all causes."""
        return sum(_values(self))

    @property
    def held(self) -> int:
        """What stays for its backward: neither passing through nor a slab's unused rest."""
        return self.total - self.copies - self.slabs

    def items(self) -> Iterator[tuple[str, int]]:
        """Returns (cause, bytes) pairs in the order of the fields."""
        return zip(_NAMES, _values(self), strict=True)


_NAMES = tuple(field.name for field in fields(TierBytes))
# A plan is chosen among thousands of estimates, each of hundreds of these.
_values = attrgetter(*_NAMES)
