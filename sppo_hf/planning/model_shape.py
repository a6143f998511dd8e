"""ModelShape: FLOPs, weights and bytes per token of a whole model, and FLOPs of a step.

It adds embedding, head and parameter counts to what a `model_profile` says of the layers. FLOPs
count a multiply-add as two and leave out elementwise work. Bytes are those of one token of one row.

Model FLOPs utilisation is `step_flops / (step_seconds * peak_flops)` (`hardware.peak_flops`):
`step_flops` counts one forward and one backward, attention over visible pairs only, and no
recomputation, so that recomputing never looks like progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sppo_hf.planning.activation_modes import Saved
from sppo_hf.planning.model_profile import FLOAT32_BYTES, LayerProfile, LoraShape, ModelProfile

# Below this trained share of the parameters, embedding and head are taken to be frozen.
_MOSTLY = 0.5


def arriving_bytes(layer_gradient_bytes: Sequence[int], outer_gradient_bytes: int) -> int:
    """Bytes of host staging for gradients that are added to those of earlier batches there."""
    return max(2 * max(layer_gradient_bytes, default=0), outer_gradient_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResident:
    """Bytes of weights, gradients and optimizer states on the host (`sppo_hf.offload.weights`)."""

    layer_bytes: tuple[int, ...]
    """Weight bytes of each layer, copied to the device for its forward and for its backward."""

    outer_bytes: int
    """Weights outside the layers; on the device from start of forward to end of backward."""

    keeps_device_copies: bool
    """Whether layers' weights stay on the device from forward to backward."""

    layer_gradient_bytes: tuple[int, ...]
    """Gradient bytes of each layer, copied to the host when they are complete."""

    outer_gradient_bytes: int
    """Gradient bytes of weights outside the layers."""

    optimizer_bytes: int
    """Optimizer states on the host."""

    @property
    def weight_bytes(self) -> int:
        """All weights on the host."""
        return sum(self.layer_bytes) + self.outer_bytes

    @property
    def gradient_bytes(self) -> int:
        """All gradients on the host."""
        return sum(self.layer_gradient_bytes) + self.outer_gradient_bytes

    @property
    def held_bytes(self) -> int:
        """All bytes on the host in training."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def arriving_bytes(self) -> int:
        """Additional pinned memory where gradients of several batches are accumulated."""
        return arriving_bytes(self.layer_gradient_bytes, self.outer_gradient_bytes)

    @property
    def update_bytes(self) -> int:
        """Bytes that an update reads and writes: weights and states both, gradients read only.

        Trained weights have as many bytes as their gradients.
        """
        return 3 * self.gradient_bytes + 2 * self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a causal language model from which costs and memory are computed."""

    layers: tuple[LayerProfile, ...]
    """One entry per decoder layer, first to last; layers that are alike are equal."""

    vocab_size: int
    tied: bool
    dtype_bytes: int
    """Bytes of one activation element."""

    total_parameters: int
    """Parameters of the model as it is trained, adapters included."""

    trainable_parameters: int
    """Parameters that receive gradients."""

    weight_bytes: int
    """Bytes of all parameters. Not `total_parameters * dtype_bytes` for quantised models."""

    gradient_bytes: int
    """Bytes of all gradients: of the trainable parameters, in their own dtype."""

    max_positions_tokens: int | None = None
    """Longest sequence the position encoding was made for, None where it has no end."""

    lora: LoraShape | None = None
    """Adapters; all other weights are then frozen. None where the model's own weights train."""

    parameter_bytes: int | None = None
    """Bytes of one weight where they are not `dtype_bytes`: 4 for a float32 model under autocast.
    The residual stream and norms then stay as wide as the weights."""

    optimizer_bytes: int | None = None
    """States of the optimizer; None where it is not known: AdamW's, two float32 of a parameter."""

    host_resident: HostResident | None = None
    """Weights, gradients and optimizer states in host memory; `weight_bytes` and `gradient_bytes`
    are then those on the device during a step. None if everything is on the device."""

    message_elements: tuple[int, ...] = ()
    """Elements per token that a pipeline stage receives if it begins with a layer, for each layer;
    empty if that is the hidden state."""

    cpu_threads: int = 1
    """CPU threads of attention; where they outnumber K/V heads, these are repeated
    (`parallel_heads`)."""

    router_loss: bool = False
    """Whether a loss of routers keeps what they give."""

    encoded_token_bytes: tuple[int, int] = (0, 0)
    """Bytes held for each token of rows with images or sound, from the first chunk to the last: in
    forward the embeddings, in which these are, and in backward their gradients."""

    head_width: int | None = None
    """Outputs of a classifier's head for a token, which runs on the hidden states of whole rows;
    None for a language model's head, which has `vocab_size` and runs in tiles."""

    layer_kernels: bool = False
    """Whether Liger's kernels run in layers, see `Training.layer_kernels`."""

    sp: int = 1
    """Sequence-parallel ranks that share every chunk. FLOPs are the sum over them, weights and
    gradients are on each; `per_rank` has the bytes per token of one rank."""

    head_blocks: int | None = None
    """Number of runs of heads that these ranks do not divide further; None where heads are divided
    evenly."""

    shards: int = 1
    """Devices over which FSDP2 shards the model. Bytes of weights, gradients and optimizer are then
    those on one of them, `weight_bytes` with what is gathered or reduced at a time."""

    gathered_elements: tuple[int, ...] = ()
    """Elements of each layer that FSDP2 gathers; empty if it does all of its weights. Packed 4-bit
    weights are fewer, and those that are whole on every device are not gathered."""

    unsharded_gradient_bytes: int = 0
    """Bytes of all gradients before FSDP2 has reduced them, if it shards the model. Each device has
    them all by chunk, or while gradients are accumulated."""

    @classmethod
    def from_profile(
        cls,
        profile: ModelProfile,
        *,
        total_parameters: int | None = None,
        trainable_parameters: int | None = None,
        weight_bytes: int | None = None,
        gradient_bytes: int | None = None,
    ) -> ModelShape:
        """Sums up the profile of a model as it is trained.

        What is not counted on the live model is derived from the profile: the trainable parameters
        are the adapters, or all of them without adapters.
        """
        lora, size = profile.training.lora, profile.training.parameter_bytes
        adapters = profile.outer_adapter_weights
        adapters += sum(layer.adapter_weights for layer in profile.layers)
        adapter_bytes = 0 if lora is None else adapters * lora.dtype_bytes
        if total_parameters is None:
            weights = profile.outer_weights + sum(layer.total_weights for layer in profile.layers)
            total_parameters = weights + adapters
            if trainable_parameters is None and lora is None:
                # No batch of text gives encoders gradients.
                trainable_parameters = total_parameters - profile.encoder_weights
        if trainable_parameters is None:
            trainable_parameters = total_parameters if lora is None else adapters
        if weight_bytes is None:
            weight_bytes = (total_parameters - adapters) * size + adapter_bytes
        if gradient_bytes is None:
            gradient_bytes = trainable_parameters * size if lora is None else adapter_bytes
        return cls(
            layers=profile.layers,
            vocab_size=profile.vocab_size,
            tied=profile.tied,
            dtype_bytes=profile.training.dtype_bytes,
            total_parameters=total_parameters,
            trainable_parameters=trainable_parameters,
            weight_bytes=weight_bytes,
            gradient_bytes=gradient_bytes,
            max_positions_tokens=profile.max_positions_tokens,
            lora=lora,
            parameter_bytes=size,
            message_elements=profile.message_elements,
            layer_kernels=profile.training.layer_kernels,
        )

    def with_classifier(self, outputs: int) -> ModelShape:
        """Returns the shape with a classifier's head, of `outputs` numbers a token, for its own."""
        more = self.hidden_size * (outputs - (0 if self.tied else self.vocab_size))
        trained = 0 if self.lora is not None else more
        size = self._parameter_bytes
        return replace(
            self,
            head_width=outputs,
            tied=False,
            total_parameters=self.total_parameters + more,
            trainable_parameters=self.trainable_parameters + trained,
            weight_bytes=self.weight_bytes + more * size,
            gradient_bytes=self.gradient_bytes + trained * size,
        )

    def with_host_residents(self, *, weights: bool, optimizer: bool) -> ModelShape:
        """Returns the shape of a model with a part of it in host memory.

        Args:
            weights: layers' weights are copied to the device for their forward and backward, two
                layers at a time; trained weights stay on the device where the optimizer does.
            optimizer: trained weights are there with optimizer states and gradients; without
                `weights` all of them are on the device during a whole step.
        """
        if self.host_resident is not None or not (weights or optimizer):
            return self
        size = self._parameter_bytes
        base = [layer.total_weights * size for layer in self.layers]
        own = 0 if self.lora is None else self.lora.dtype_bytes
        adapters = [layer.adapter_weights * own for layer in self.layers]
        trained = base if self.lora is None else adapters
        if sum(trained) > self.gradient_bytes:
            # It is not known which of a layer's weights are frozen.
            share = self.gradient_bytes / sum(trained)
            trained = [int(share * num_bytes) for num_bytes in trained]
        gradients = trained if optimizer else [0 for _ in trained]
        moved = gradients
        if weights and optimizer:
            moved = [one + more for one, more in zip(base, adapters, strict=True)]
        elif weights:
            moved = [0 for _ in base] if self.lora is None else base
        if not any(moved):
            return self
        # The layer in use and the next one.
        on_device = min(sum(moved), 2 * max(moved))
        outer = self.gradient_bytes - sum(trained) if optimizer else 0
        return replace(
            self,
            weight_bytes=self.weight_bytes - (sum(moved) - on_device if weights else 0),
            gradient_bytes=(
                min(self.gradient_bytes, 2 * max(trained)) if optimizer else self.gradient_bytes
            ),
            host_resident=HostResident(
                layer_bytes=tuple(moved),
                outer_bytes=outer,
                keeps_device_copies=not weights,
                layer_gradient_bytes=tuple(gradients),
                outer_gradient_bytes=outer,
                optimizer_bytes=self.states_bytes if optimizer else 0,
            ),
        )

    def with_float32_masters(self) -> ModelShape:
        """Returns the shape with trained weights and their gradients in float32, all others as are.

        So Accelerate keeps them under FSDP2 and mixed precision, and gathers them in its dtype.
        """
        wide = FLOAT32_BYTES * self.trainable_parameters
        weight_bytes = self.weight_bytes - self.gradient_bytes + wide
        return replace(self, weight_bytes=weight_bytes, gradient_bytes=wide)

    def with_shards(
        self, shards: int, *, whole_bytes: int = 0, gathered_elements: tuple[int, ...] = ()
    ) -> ModelShape:
        """Returns the shape of a model that FSDP2 shards over that many devices, layer by layer.

        Of its weights `whole_bytes` are whole on every device.

        Gathered are the running layer and the next one, which also has a buffer that its weights
        arrive in, and norm and head; as whole are the gradients of one layer, or of the head, and
        the copy that is reduced. All of these are in the dtype of compute.
        """
        if shards == 1 or self.shards > 1:
            return self
        layers = range(self.num_layers)
        shape = replace(self, gathered_elements=gathered_elements)
        gathered = 3 * max(map(shape.gathered_bytes, layers)) + shape.gathered_bytes(None)
        reduced = max(map(self.reduced_bytes, [*layers, None]))
        return replace(
            shape,
            shards=shards,
            weight_bytes=-(-(self.weight_bytes - whole_bytes) // shards)
            + whole_bytes
            + gathered
            + 2 * reduced,
            gradient_bytes=-(-self.gradient_bytes // shards),
            optimizer_bytes=-(-self.states_bytes // shards),
            unsharded_gradient_bytes=self.trainable_parameters * self.dtype_bytes,
        )

    def gathered_bytes(self, layer: int | None) -> int:
        """Bytes of a layer's weights in the dtype of compute; None: those of the head."""
        if layer is None:
            return self.num_logits * self.hidden_size * self.dtype_bytes
        if self.gathered_elements:
            return self.gathered_elements[layer] * self.dtype_bytes
        held = self.layers[layer]
        return (held.total_weights + held.adapter_weights) * self.dtype_bytes

    def reduced_bytes(self, layer: int | None) -> int:
        """Bytes of a layer's gradients in the dtype of compute; None: those of the head."""
        if layer is None:
            return self.gathered_bytes(None) if self.embedding_trained else 0
        held = self.layers[layer]
        if self.lora is not None:
            return held.adapter_weights * self.dtype_bytes
        return round(self.trainable_fraction * held.total_weights) * self.dtype_bytes

    @property
    def states_bytes(self) -> int:
        """Bytes of optimizer states, on any tier."""
        if self.optimizer_bytes is not None:
            return self.optimizer_bytes
        return 2 * FLOAT32_BYTES * self.trainable_parameters

    @property
    def standing_bytes(self) -> int:
        """Weights, gradients and optimizer states on the device."""
        away = 0 if self.host_resident is None else self.host_resident.optimizer_bytes
        return self.weight_bytes + self.gradient_bytes + self.states_bytes - away

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

    @property
    def lora_bytes(self) -> int:
        """Bytes of all adapters' weights."""
        if self.lora is None:
            return 0
        return sum(layer.adapter_weights for layer in self.layers) * self.lora.dtype_bytes

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """For each layer the index of the first one that costs and saves the same."""
        first: dict[object, int] = {}
        return tuple(first.setdefault(layer, index) for index, layer in enumerate(self.layers))

    @property
    def by_layer_refusal(self) -> str | None:
        """Why several chunks cannot go layer by layer, as part of a sentence; None if they can."""
        found = (index for index, layer in enumerate(self.layers) if layer.returns_more)
        index = next(found, None)
        return None if index is None else f"layer {index} returns more than hidden states"

    @property
    def stages_refusal(self) -> str | None:
        """Why the layers cannot be cut into stages, as part of a sentence; None if they can."""
        for index, layer in enumerate(self.layers):
            if layer.takes_more:
                return f"layer {index} takes the embeddings, too, or other hidden states of before"
            if layer.returns_more:
                return f"layer {index} returns more than hidden states, which the next layer takes"
        return None

    @property
    def embedding_trained(self) -> bool:
        """Whether embedding and head receive a gradient: not where only adapters train."""
        return self.lora is None and self.trainable_fraction > _MOSTLY

    # -- FLOPs -------------------------------------------------------------------------------

    def linear_flops_per_token(self, layer: int | None = None) -> int:
        """Forward FLOPs of all matrix products but attention's, for one token.

        With an index those of one decoder layer, with None those of the whole model with its head.
        """
        if layer is not None:
            return self.layers[layer].forward_flops
        return sum(layer.forward_flops for layer in self.layers) + self.head_flops_per_token

    def backward_linear_flops_per_token(self, layer: int | None = None) -> int:
        """Backward FLOPs of all matrix products but attention's, for one token.

        The gradient of each input that needs one, and of each weight that is trained. Without
        adapters but with frozen parameters (it is not known which), the latter are counted by the
        trained share of all parameters. With an index those of one decoder layer, with None those
        of the whole model with its head.
        """
        if layer is not None:
            return self._backward_flops(self.layers[layer])
        head = self.head_flops_per_token
        trained_head = 0 if self.lora is not None else int(self.trainable_fraction * head)
        return sum(map(self._backward_flops, self.layers)) + head + trained_head

    def recompute_flops_per_token(self, layer: int, saved: Saved) -> int:
        """FLOPs of the matrix products that backward runs again, for one token.

        Recomputation stops at the last value that autograd saves and leaves out what serves none:
        keys and values, a frozen product beside an adapter, the last product where no norm stands
        behind it. With the products kept it is the few that cost less than their output's bytes;
        attention is never among them.
        """
        if saved == "whole":
            return 0
        work = self.layers[layer]
        if saved == "matmuls":
            return work.matmuls_recompute_flops
        return work.inputs_recompute_flops

    @property
    def num_logits(self) -> int:
        """Outputs of the head for a token."""
        return self.vocab_size if self.head_width is None else self.head_width

    @property
    def head_flops_per_token(self) -> int:
        """Forward FLOPs of the output head for one token."""
        return 2 * self.hidden_size * self.num_logits

    # -- bytes -------------------------------------------------------------------------------

    def kv_bytes_per_token(self, layer: int) -> int:
        """K and V of one token of a layer as the KV store keeps them.

        If ranks share a sequence, each has its heads of every token.
        """
        return self.per_rank.layers[layer].kv_elements // self.sp * self.dtype_bytes

    def dkv_bytes_per_token(self, layer: int) -> int:
        """Accumulators of dK and dV of one token, float32 (float64 in a float64 model)."""
        return (
            self.kv_bytes_per_token(layer)
            // self.dtype_bytes
            * max(FLOAT32_BYTES, self.dtype_bytes)
        )

    def activation_bytes_per_token(self, layer: int, saved: Saved = "whole") -> int:
        """Bytes that one layer keeps from forward to backward, without keys and values.

        Args:
            layer: its index. Under LoRA the first layer saves less than the others.
            saved: "inputs" what recomputation starts from: layer input, attention output,
                log-sum-exp (`hidden * parameter_bytes + heads * v_head_size * dtype_bytes +
                heads * 4`); "matmuls" these and the outputs of the matrix products that backward
                needs and that are worth keeping; "hidden" the layer input alone; "whole" all that
                autograd saves, each piece of memory once, without the rotary tables, which all
                layers of a chunk share.
        """
        work = self.layers[layer]
        if saved == "whole":
            return work.whole_bytes
        if saved == "hidden":
            sums = work.num_heads * max(FLOAT32_BYTES, self.dtype_bytes)
            return work.inputs_bytes - work.attention_output_elements * self.dtype_bytes - sums
        return work.matmuls_bytes if saved == "matmuls" else work.inputs_bytes

    def tokens_per_rank(self, tokens: int) -> int:
        """Returns how many of a chunk's tokens one of the ranks that share it has, at most."""
        return -(-tokens // self.sp)

    @cached_property
    def per_rank(self) -> ModelShape:
        """The shape of one of the ranks that share every chunk, in bytes per token of its own.

        Keys and values are held by heads: a token of its share stands for the heads that it holds
        of n tokens, and a window is as many times shorter. What attention returns is saved twice,
        as its heads of all tokens and as all heads of its tokens; so is what indexers choose, and
        every rank has all index keys. FLOPs are not divided.
        """
        if self.sp == 1:
            return self
        made: dict[LayerProfile, LayerProfile] = {}
        for layer in self.layers:
            if layer not in made:
                heads = (
                    self.sp * layer.heads_of(self.sp, self.head_blocks) if layer.num_heads else 0
                )
                returned = heads * layer.v_head_size * self.dtype_bytes
                gathered = self.sp * layer.chosen_bytes
                index_keys = (self.sp - 1) * layer.index_head_size * self.dtype_bytes
                made[layer] = replace(
                    layer,
                    num_kv_heads=self.sp * layer.kv_heads_of(self.sp, self.head_blocks),
                    window=None if layer.window is None else -(-layer.window // self.sp),
                    whole_bytes=layer.whole_bytes + returned + gathered,
                    index_bytes=layer.index_bytes + index_keys,
                )
        return replace(self, layers=tuple(made[layer] for layer in self.layers), sp=1)

    def message_bytes_per_token(self, layer: int) -> int:
        """Bytes per token that a stage receives if it begins with this layer."""
        elements = self.message_elements[layer] if self.message_elements else self.hidden_size
        return elements * (self.parameter_bytes or self.dtype_bytes)

    def state_bytes(self, layer: int) -> int:
        """Recurrent states of one row that a chunk takes from the one before and saves."""
        return self.layers[layer].state_bytes

    @property
    def has_recurrent_state(self) -> bool:
        """Whether any layer carries a state from chunk to chunk."""
        return any(layer.state_bytes for layer in self.layers)

    @property
    def units_can_be_shared(self) -> bool:
        """Whether ranks of a pipeline may share units: not with a state, nor with indexers."""
        return not any(layer.state_bytes or layer.chosen for layer in self.layers)

    def cast_bytes(self, layer: int) -> int:
        """Bytes of autocast copies of a layer's weights; 0 without autocast."""
        casts = self._parameter_bytes > self.dtype_bytes
        return self.layers[layer].total_weights * self.dtype_bytes if casts else 0

    @property
    def cached_cast_bytes(self) -> int:
        """Bytes of casts that autocast caches until forward ends: of trained layers and the head.

        Casts of frozen weights are freed after their use; the embedding is not cast.
        """
        if self.lora is not None or self._parameter_bytes <= self.dtype_bytes:
            return 0
        layers = sum(map(self.cast_bytes, range(self.num_layers)))
        head = self.num_logits * self.hidden_size * self.dtype_bytes
        return int(self.trainable_fraction * (layers + head))

    @property
    def _parameter_bytes(self) -> int:
        return self.dtype_bytes if self.parameter_bytes is None else self.parameter_bytes

    def _backward_flops(self, work: LayerProfile) -> int:
        weights = work.weight_gradient_flops
        if self.lora is None:
            weights = int(self.trainable_fraction * weights)
        return work.input_gradient_flops + weights


def visible_pairs(total_tokens: int, window: int | None) -> int:
    """Number of (query, visible key) pairs of a causal sequence, each token seeing itself.

    `window` are the keys that a query sees at most, its own included; None sees all before it.
    """
    seen = total_tokens if window is None else min(window, total_tokens)
    return seen * (seen + 1) // 2 + (total_tokens - seen) * seen


def forward_flops(shape: ModelShape, batch_rows: int, total_tokens: int) -> int:
    """Model FLOPs of one forward over `batch_rows` rows of `total_tokens` tokens."""
    attention = sum(
        (layer.attention_flops_per_key + layer.index_flops_per_key)
        * visible_pairs(total_tokens, layer.window)
        for layer in shape.layers
    )
    return batch_rows * (shape.linear_flops_per_token() * total_tokens + attention)


def step_flops(shape: ModelShape, batch_rows: int, total_tokens: int) -> int:
    """Model FLOPs of one forward and one backward over `batch_rows` rows of `total_tokens` tokens.

    Linear: forward, the gradient of the input, and the gradient of what is trained of the weights;
    `ModelShape.backward_linear_flops_per_token` says which. Attention has no weights and twice its
    forward in backward. Recomputation is not counted.
    """
    attention = sum(
        layer.attention_flops_per_key * visible_pairs(total_tokens, layer.window)
        for layer in shape.layers
    )
    backward = shape.backward_linear_flops_per_token() * total_tokens + 2 * attention
    return forward_flops(shape, batch_rows, total_tokens) + backward * batch_rows


def layer_step_flops(shape: ModelShape, total_tokens: int) -> tuple[list[int], int]:
    """FLOPs of a training step of one row, layer by layer, and of the head."""
    layers = [
        step_flops(replace(shape, layers=(layer,), vocab_size=0), 1, total_tokens)
        for layer in shape.layers
    ]
    return layers, step_flops(shape, 1, total_tokens) - sum(layers)
