"""The shape of one decoder layer, in numbers: heads, widths, experts, and what they amount to.

Knows nothing of Transformers' configs (see `reader`), of devices, or of what is kept where.
Elements are counted here; `blocks` turns a shape into FLOPs and bytes of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo_hf.planning.families import FamilyTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention: low-rank projections, each rank normalised on its way."""

    q_rank: int | None
    """Rank of the queries' latent; None where queries are projected at once."""

    kv_rank: int
    """Rank of the latent that keys and values share."""

    rope_size: int
    """Elements of a head that are rotated; for keys one set that all heads share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Routed experts of one layer."""

    count: int
    """Experts there are."""

    active: int
    """Experts one token meets."""

    width: int
    """Intermediate elements of one expert."""

    biased: bool = False
    """Expert matrices have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerShape:
    """A recurrent or convolutional mixer: what it projects, convolves, scans and carries.

    What its scan computes and saves is an estimate from sizes, not counted from its code.
    """

    in_elements: int
    """What is projected from the layer's input."""

    conv_elements: int
    """Of these, channels that a causal convolution runs over."""

    conv_kernel: int
    """Tokens that the convolution sees."""

    out_elements: int
    """What the output projection takes."""

    state_elements: int = 0
    """Of the recurrent state, in float32; 0 for a convolution alone."""

    scan_flops: int = 0
    """Forward FLOPs of the scan for one token."""

    scan_elements: int = 0
    """Float32 elements that autograd saves of the scan for one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One decoder layer. Sizes are elements."""

    hidden_size: int
    """Width of the residual stream."""

    num_heads: int
    """Query heads; 0 in a layer without attention."""

    num_kv_heads: int
    """Key and value heads as the KV store keeps them (MLA: expanded, so all heads)."""

    qk_head_size: int
    """Elements of one query or key head."""

    v_head_size: int
    """Elements of one value head."""

    window: int | None
    """Keys a query sees, its own included; None sees all before it."""

    traits: FamilyTraits
    """How its family's modelling code computes it."""

    latent: LatentShape | None = None
    """MLA's ranks; None elsewhere."""

    head_norm: bool = False
    """Whether queries and keys are normalised, in the way `traits` says."""

    clipped: bool = False
    """Queries, keys and values are clipped, in place, so copies of them are saved (OLMo)."""

    shared_keys: bool = False
    """Values are the key projection's output; there is no value projection (Gemma 4)."""

    borrows_keys: bool = False
    """Keys and values are an earlier layer's, in whose store they are (Gemma 3n, Gemma 4)."""

    dense_width: int = 0
    """Intermediate elements of the dense MLP or of the shared experts; 0 where there are none."""

    experts: ExpertShape | None = None
    """Routed experts; None in a dense layer."""

    activation: str = "silu"
    """The MLP's activation by Transformers' name."""

    per_layer_input: int = 0
    """Width of Gemma 4's per-layer embeddings; 0 elsewhere."""

    mixer: MixerShape | None = None
    """A recurrent or convolutional mixer, in place of attention (no heads then) or beside it."""

    @property
    def mlp_width(self) -> int:
        """Intermediate elements one token produces, over its active and shared experts."""
        routed = 0 if self.experts is None else self.experts.active * self.experts.width
        return self.dense_width + routed

    @property
    def routed_experts(self) -> int:
        """Routed experts one token meets; 0 in a dense layer."""
        return 0 if self.experts is None else self.experts.active

    @property
    def attention_flops_per_key(self) -> int:
        """Forward FLOPs for one (query token, visible key) pair: `q k^T` and `p v`, all heads."""
        return 2 * self.num_heads * (self.qk_head_size + self.v_head_size)

    @property
    def kv_elements(self) -> int:
        """Key and value elements of one token; 0 where another layer keeps them."""
        if self.borrows_keys:
            return 0
        return self.num_kv_heads * (self.qk_head_size + self.v_head_size)

    @property
    def q_elements(self) -> int:
        """Query elements of one token."""
        return self.num_heads * self.qk_head_size

    @property
    def attention_output_elements(self) -> int:
        """Attention output elements of one token, before the output projection."""
        return self.num_heads * self.v_head_size
