"""A model as numbers: FLOPs, weights and bytes per token, layer by layer.

Knows nothing of torch, devices or plans. FLOPs count a multiply-add as two and leave out what is
elementwise. Bytes are those of one token of one row.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo_hf.planning.families import LEARNED_POSITIONS
from sppo_hf.planning.layer import LayerShape
from sppo_hf.planning.lora import LoraShape
from sppo_hf.planning.reader import (
    family,
    find_int,
    need_int,
    read_layers,
    rotary_limit_tokens,
    text_config,
)

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a causal language model that costs and memory follow from."""

    layers: tuple[LayerShape, ...]
    """One entry per decoder layer, first to last."""

    vocab_size: int
    """Rows of the embedding and of the head."""

    tied: bool
    """Embedding and head share one matrix."""

    dtype_bytes: int
    """Bytes of one activation element."""

    total_parameters: int
    """Parameters of the model as it is trained, adapters included."""

    trainable_parameters: int
    """Of these, the ones that receive gradients."""

    weight_bytes: int
    """Bytes of all parameters. Not `total_parameters * dtype_bytes` for quantised models."""

    gradient_bytes: int
    """Bytes of all gradients: of the trainable parameters, in their own dtype."""

    max_positions_tokens: int | None = None
    """Longest sequence the position encoding was made for, None where it has no end."""

    family: str = ""
    """The config's `model_type`."""

    @classmethod
    def from_config(
        cls,
        config: object,
        *,
        dtype_bytes: int,
        lora: LoraShape | None = None,
        total_parameters: int | None = None,
        trainable_parameters: int | None = None,
        weight_bytes: int | None = None,
        gradient_bytes: int | None = None,
    ) -> ModelShape:
        """Reads the shape off a Transformers config (or anything with its attributes).

        Args:
            config: of a causal language model, or of a multimodal model that holds one.
            dtype_bytes: bytes of one activation element, 2 for bf16.
            lora: adapters on frozen weights; None to train the weights.
            total_parameters: counted on the live model; derived from the shape when None.
            trainable_parameters: those that require gradients; all of them when None.
            weight_bytes: measured on the live model; `total_parameters * dtype_bytes` when None.
            gradient_bytes: `trainable_parameters * dtype_bytes` when None.

        Raises:
            UnsupportedModelError: the config lacks a size that every decoder has.
        """
        text = text_config(config)
        layers = read_layers(text)
        vocab_size = need_int(text, "vocab_size")
        tied = bool(getattr(text, "tie_word_embeddings", True))
        if total_parameters is None:
            hidden_size = layers[0].hidden_size
            total_parameters = (
                sum(layer.total_weights for layer in layers)
                + (1 if tied else 2) * vocab_size * hidden_size
                + hidden_size
                + _learned_positions(text) * hidden_size
            )
        if trainable_parameters is None and lora is not None:
            trainable_parameters = sum(
                lora.rank
                * (
                    4 * layer.hidden_size
                    + 2 * layer.q_elements
                    + layer.kv_elements
                    + 3 * (layer.hidden_size + layer.mlp_width)
                )
                for layer in layers
            )
            gradient_bytes = trainable_parameters * lora.dtype_bytes
        if trainable_parameters is None:
            trainable_parameters = total_parameters
        return cls(
            layers=layers,
            vocab_size=vocab_size,
            tied=tied,
            dtype_bytes=dtype_bytes,
            total_parameters=total_parameters,
            trainable_parameters=trainable_parameters,
            weight_bytes=total_parameters * dtype_bytes if weight_bytes is None else weight_bytes,
            gradient_bytes=(
                trainable_parameters * dtype_bytes if gradient_bytes is None else gradient_bytes
            ),
            max_positions_tokens=rotary_limit_tokens(text),
            family=family(text),
        )

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.layers[0].hidden_size

    @property
    def trainable_fraction(self) -> float:
        """Share of the parameters that receive gradients, 0 to 1."""
        return min(1.0, self.trainable_parameters / max(1, self.total_parameters))

    def linear_flops_per_token(self, layer: int | None = None) -> int:
        """Forward FLOPs of all matrix products but attention's, for one token.

        Args:
            layer: one decoder layer; None for the whole model with its head.
        """
        if layer is not None:
            return self.layers[layer].linear_flops_per_token
        return sum(s.linear_flops_per_token for s in self.layers) + self.head_flops_per_token

    def attention_flops_per_key(self, layer: int | None = None) -> int:
        """Forward FLOPs of one (token, visible key) pair; None sums over all layers.

        With windows, layers see different numbers of keys: multiply layer by layer.
        """
        if layer is not None:
            return self.layers[layer].attention_flops_per_key
        return sum(s.attention_flops_per_key for s in self.layers)

    @property
    def head_flops_per_token(self) -> int:
        """Forward FLOPs of the output head for one token."""
        return 2 * self.hidden_size * self.vocab_size

    def kv_bytes_per_token(self, layer: int | None = None) -> int:
        """K and V of one token as the KV store keeps them; None sums over all layers."""
        if layer is not None:
            return self.layers[layer].kv_elements * self.dtype_bytes
        return sum(s.kv_elements for s in self.layers) * self.dtype_bytes

    def dkv_bytes_per_token(self, layer: int | None = None) -> int:
        """Accumulators of dK and dV of one token, float32 (float64 in a float64 model)."""
        return (
            self.kv_bytes_per_token(layer)
            // self.dtype_bytes
            * max(FLOAT32_BYTES, self.dtype_bytes)
        )

    def skeleton_bytes_per_token(self, layer: int) -> int:
        """What recomputation starts from: layer input, attention output, log-sum-exp.

        `(hidden + heads * v_head_size) * dtype_bytes + heads * 4`.
        """
        shape = self.layers[layer]
        elements = shape.hidden_size + shape.attention_output_elements
        return elements * self.dtype_bytes + self._lse_bytes(shape)

    lora_bytes = property(lambda self: 0)
    embedding_trained = property(lambda self: self.trainable_fraction > 0.5)
    head_trainable = property(lambda self: float(self.trainable_fraction > 0.5))

    def recompute_flops_per_token(self, layer, saved):
        s = self.layers[layer]
        return (
            s.linear_flops_per_token - 2 * s.mlp_width * s.hidden_size if saved == "skeleton" else 0
        )

    def backward_linear_flops_per_token(self, layer):
        return (1 + self.trainable_fraction) * self.linear_flops_per_token(layer)

    def frame_bytes_per_token(self, layer, saved="whole"):
        if saved == "skeleton":
            return self.skeleton_bytes_per_token(layer)
        if saved == "products":
            return self.skeleton_bytes_per_token(layer) + self.dtype_bytes * (
                self.layers[layer].q_elements
                + self.layers[layer].kv_elements
                + self.layers[layer].hidden_size
                + 2 * self.layers[layer].mlp_width
            )
        return self._whole(layer)

    def _whole(self, layer: int) -> int:
        """What autograd saves of one layer when nothing is dropped, K and V left out.

        An estimate for Transformers' own modules: each projection saves its input once, the
        activation and the gating product save theirs, norms save what `FamilyTraits` says,
        attention saves q, its output and its log-sum-exp. Frozen projections save no input, so
        for LoRA it is an upper bound.
        """
        shape = self.layers[layer]
        traits, size = shape.traits, self.dtype_bytes
        # q, the attention output (also the input of its projection), and the log-sum-exp.
        attention = (shape.q_elements + shape.attention_output_elements) * size
        attention += self._lse_bytes(shape)
        normed = traits.full_width_norms * shape.hidden_size + shape.latent_size
        if traits.head_norms:
            normed += (shape.num_heads + shape.num_kv_heads) * shape.qk_head_size
        float32_bytes = max(FLOAT32_BYTES, size)
        norms = normed * (
            traits.norm_float32_copies * float32_bytes + traits.norm_native_copies * size
        )
        # Inputs of the projections: q, k and v share one, the MLP has one (parallel layers share
        # it), each routed expert has its own and saves its output to be weighted.
        inputs = min(2, traits.full_width_norms) + 2 * shape.routed_experts
        widths = (inputs * shape.hidden_size + shape.latent_size) * size
        return attention + norms + widths + traits.mlp_copies * shape.mlp_width * size

    def _lse_bytes(self, shape: LayerShape) -> int:
        return shape.num_heads * max(FLOAT32_BYTES, self.dtype_bytes)


def _learned_positions(config: object) -> int:
    """Rows of a learned position table; 0 for rotary models."""
    if family(config) not in LEARNED_POSITIONS:
        return 0
    return find_int(config, "n_positions", "max_position_embeddings") or 0
