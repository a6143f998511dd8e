"""The shape of one decoder layer, in numbers: weights, FLOPs and elements per token.

Knows nothing of Transformers' configs (see `reader`), of devices, or of what is kept where.
Elements are counted here; `ModelShape` turns them into bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo_hf.planning.families import FamilyTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One decoder layer. Sizes are elements; weights count matrix entries, biases left out."""

    hidden_size: int
    """Width of the residual stream."""

    num_heads: int
    """Query heads."""

    num_kv_heads: int
    """Key and value heads as the KV store keeps them (MLA: expanded, so all heads)."""

    qk_head_size: int
    """Elements of one query or key head."""

    v_head_size: int
    """Elements of one value head."""

    window: int | None
    """Keys a query sees, its own included; None sees all before it."""

    attention_weights: int
    """Entries of all attention projections, low-rank ones included."""

    mlp_weights: int
    """Entries of the MLP matrices one token meets: active and shared experts, and the router."""

    total_mlp_weights: int
    """The same over all experts, active or not."""

    mlp_width: int
    """Intermediate elements one token produces: the sum over its active and shared experts."""

    routed_experts: int
    """Routed experts one token meets; 0 in a dense layer."""

    traits: FamilyTraits
    """What its family's modelling code adds to these sizes."""

    latent_size: int = 0
    """Ranks of MLA's latents, each normalised on its way; 0 elsewhere."""

    @property
    def linear_flops_per_token(self) -> int:
        """Forward FLOPs of all projections for one token: 2 per matrix entry it meets."""
        return 2 * (self.attention_weights + self.mlp_weights)

    @property
    def attention_flops_per_key(self) -> int:
        """Forward FLOPs for one (query token, visible key) pair: `q k^T` and `p v`, all heads."""
        return 2 * self.num_heads * (self.qk_head_size + self.v_head_size)

    @property
    def kv_elements(self) -> int:
        """Key and value elements of one token."""
        return self.num_kv_heads * (self.qk_head_size + self.v_head_size)

    @property
    def q_elements(self) -> int:
        """Query elements of one token."""
        return self.num_heads * self.qk_head_size

    @property
    def attention_output_elements(self) -> int:
        """Attention output elements of one token, before the output projection."""
        return self.num_heads * self.v_head_size

    @property
    def total_weights(self) -> int:
        """All matrix entries of the layer and its full-width norms, every expert counted."""
        norms = self.traits.full_width_norms * self.hidden_size
        return self.attention_weights + self.total_mlp_weights + norms
