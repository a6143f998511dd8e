"""A chunk of queries against the keys before it, of random numbers: what backends are timed on.

Says how much work it is and how many bytes, and makes its tensors. Knows nothing of clocks, and
leaves the user's random numbers alone.

Shapes: B batch (always 1), N query heads, K key/value heads, C query tokens, T key tokens, H head
size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sppo_hf.attention.backends.base import Attended, Backend, CausalBand, Gradients, Requirement

BACKWARD_FORWARDS = 2.5
"""FLOPs of a backward by those of its forward: five matrix products instead of two."""

SOFTCAP = 50.0
"""Of the scores where the requirement caps them (Gemma 2 has this one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of one attention."""

    requirement: Requirement
    """Dtype, head sizes and features."""

    query_heads: int
    """N; a multiple of the requirement's `gqa_ratio`."""

    chunk_tokens: int
    """C, at least 1."""

    prefix_tokens: int
    """Keys before the chunk's own; may be 0."""

    window_tokens: int | None = None
    """Keys that a query sees, its own included; None for all before it."""

    def __post_init__(self) -> None:
        """Refuse heads that cannot be shared out."""
        whole = self.query_heads % self.requirement.gqa_ratio == 0
        assert whole, f"{self.query_heads} heads for groups of {self.requirement.gqa_ratio}"

    def __str__(self) -> str:
        """Its tokens in words: "4K x 32K", "512 x 0, window 1K"."""
        text = f"{short(self.chunk_tokens)} x {short(self.prefix_tokens)}"
        window = self.window_tokens
        return text if window is None else f"{text}, window {short(window)}"

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.query_heads // self.requirement.gqa_ratio

    @property
    def num_keys(self) -> int:
        """T: the prefix and the chunk itself."""
        return self.prefix_tokens + self.chunk_tokens

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        rows, before = self.chunk_tokens, self.prefix_tokens
        causal = rows * before + rows * (rows + 1) // 2
        if self.window_tokens is None:
            return causal
        # Row i has before + 1 + i keys; from row `full` on, more than the window lets it see.
        full = min(max(self.window_tokens - before, 0), rows)
        short_rows = full * before + full * (full + 1) // 2
        return short_rows + (rows - full) * self.window_tokens

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward; only visible pairs count, so the causal half counts once."""
        sizes = self.requirement.qk_head_size + self.requirement.v_head_size
        return 2.0 * self.visible_pairs * self.query_heads * sizes

    @property
    def backward_flops(self) -> float:
        """FLOPs of the backward; its own recomputation of scores is one of the five products."""
        return BACKWARD_FORWARDS * self.forward_flops

    @property
    def num_bytes(self) -> int:
        """Bytes of inputs, results and gradients, those of keys in float32; not a kernel's own."""
        sizes = self.requirement.qk_head_size + self.requirement.v_head_size
        itemsize = self.requirement.dtype.itemsize
        rows = self.query_heads * self.chunk_tokens * (2 * sizes * itemsize + 4)
        return rows + self.kv_heads * self.num_keys * sizes * (itemsize + max(4, itemsize))

    def shortened(self, most_bytes: int, *, least_tokens: int = 1024) -> Workload:
        """The same with a shorter prefix, and then a shorter chunk, so that it fits.

        Args:
            most_bytes: what `num_bytes` may be.
            least_tokens: shorter than this nothing becomes, whatever its bytes.
        """
        load = self
        while load.num_bytes > most_bytes and load.prefix_tokens > least_tokens:
            load = replace(load, prefix_tokens=max(least_tokens, load.prefix_tokens // 2))
        while load.num_bytes > most_bytes and load.chunk_tokens > least_tokens:
            load = replace(load, chunk_tokens=max(least_tokens, load.chunk_tokens // 2))
        return load

    def make(self, device: torch.device, *, seed: int = 0) -> MadeWorkload:
        """Its tensors on `device`, from a generator of their own."""
        return MadeWorkload(self, device, seed)


class MadeWorkload:
    """The tensors of a workload, laid out as models do: views of [B, tokens, heads, H]."""

    def __init__(self, load: Workload, device: torch.device, seed: int) -> None:
        """See `Workload.make`."""
        needs = load.requirement
        generator = torch.Generator(device).manual_seed(seed)

        def random(heads: int, tokens: int, size: int) -> Tensor:
            shape = (1, tokens, heads, size)
            x = torch.randn(shape, generator=generator, device=device, dtype=needs.dtype)
            return x.transpose(1, 2)

        self.load = load
        self.q_BNCH = random(load.query_heads, load.chunk_tokens, needs.qk_head_size)
        self.k_BKTH = random(load.kv_heads, load.num_keys, needs.qk_head_size)
        self.v_BKTH = random(load.kv_heads, load.num_keys, needs.v_head_size)
        self.dout_BNCH = random(load.query_heads, load.chunk_tokens, needs.v_head_size)
        self._band = CausalBand(load.prefix_tokens, load.window_tokens)
        self._scale = needs.qk_head_size**-0.5
        self._softcap = SOFTCAP if needs.softcap else None

    def forward(self, backend: Backend) -> Attended:
        """Attend with `backend`."""
        return backend.forward(
            self.q_BNCH,
            self.k_BKTH,
            self.v_BKTH,
            band=self._band,
            scale=self._scale,
            softcap=self._softcap,
        )

    def backward(self, backend: Backend, attended: Attended) -> Gradients:
        """Gradient of `forward` given its results."""
        return backend.backward(
            self.dout_BNCH,
            self.q_BNCH,
            self.k_BKTH,
            self.v_BKTH,
            *attended,
            band=self._band,
            scale=self._scale,
            softcap=self._softcap,
        )

    def work(self, backend: Backend) -> tuple[Callable[[], object], Callable[[], object]]:
        """Forward and backward as functions without arguments; runs the forward once."""
        attended = self.forward(backend)
        return lambda: self.forward(backend), lambda: self.backward(backend, attended)


def short(tokens: int) -> str:
    """Writes tokens as people say them: "512", "4K", "1M", "1,536"."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"
