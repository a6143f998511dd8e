"""Where things are in a Hugging Face causal language model, and whether we can train it exactly.

Finds the parts the engine needs (base model, decoder layers, the configs that attention reads, the
head) in a bare model or inside a PEFT wrapper, and refuses, with the reason and the remedy, what
would not be exact chunk by chunk. It looks at modules and configs only; it runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sppo_hf.errors import UnsupportedModelError
from sppo_hf.planning.refusals import ATTENTION_LAYER_TYPES, NO_LAYERS, refuse_multimodal

ATTENTION_DROPOUT_FIELDS = (
    *("attention_dropout", "attn_pdrop", "attn_dropout"),
    "attention_dropout_prob",
)
"""How configs call the share of attention probabilities that is dropped."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of one causal language model."""

    causal_lm: PreTrainedModel
    """The model with the language-model head; its `forward` is the one the engine takes over."""
    base: nn.Module
    """Embedding, decoder layers and final norm; returns `last_hidden_state`."""
    layers: tuple[nn.Module, ...]
    configs: tuple[PreTrainedConfig, ...]
    """Every config object in which an attention module may look up its implementation."""

    @property
    def name(self) -> str:
        """Class name of the model, for messages."""
        return type(self.causal_lm).__name__

    @property
    def text_config(self) -> PreTrainedConfig:
        """The config that describes the decoder."""
        return self.causal_lm.config.get_text_config(decoder=True)

    def final_norm(self) -> nn.Module | None:
        """The first norm defined behind the decoder layers; None where there is none."""
        layers = set(self.layers)
        behind = False
        for child in self.base.children():
            behind = behind or not layers.isdisjoint(child.children())
            if behind and "norm" in type(child).__name__.lower():
                return child
        return None

    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the model; it gives the modules it manages an `unshard` method."""
        return any(callable(getattr(m, "unshard", None)) for m in self.causal_lm.modules())

    def head_is_hooked(self) -> bool:
        """Whether somebody's hooks on the head's modules see or change what passes through it."""
        return any(
            module._backward_hooks
            or module._backward_pre_hooks
            or module._forward_hooks
            or module._forward_pre_hooks
            for child in self.causal_lm.children()
            if child is not self.base
            for module in child.modules()
        )

    def head_parameters(self) -> list[nn.Parameter]:
        """Parameters that logits depend on beyond the base model's hidden states."""
        seen: dict[int, nn.Parameter] = {}
        for child in self.causal_lm.children():
            if child is not self.base:
                for parameter in child.parameters():
                    seen.setdefault(id(parameter), parameter)
        for parameter in self.causal_lm.parameters(recurse=False):
            seen.setdefault(id(parameter), parameter)
        return list(seen.values())


def find_causal_lm(model: nn.Module) -> PreTrainedModel:
    """Return the causal language model inside `model` (itself, or what PEFT or DDP wraps).

    Raises:
        UnsupportedModelError: If there is none.
    """
    seen: Any = model
    for _ in range(4):
        if isinstance(seen, PreTrainedModel):
            return seen
        inner = getattr(seen, "get_base_model", None)
        if callable(inner):
            seen = inner()
        elif isinstance(getattr(seen, "module", None), nn.Module):
            seen = seen.module
        else:
            break
    raise UnsupportedModelError(
        f"{type(model).__name__} is not a Transformers causal language model. sppo_hf converts a "
        "PreTrainedModel with a language-model head (AutoModelForCausalLM), bare or in PEFT."
    )


def find_parts(model: nn.Module) -> ModelParts:
    """Find the parts of `model` and check that its architecture can be chunked exactly.

    Raises:
        UnsupportedModelError: Naming the model, the reason and what to do.
    """
    causal_lm = find_causal_lm(model)
    name = type(causal_lm).__name__
    _refuse_architecture(causal_lm, name)
    base = causal_lm.base_model
    if causal_lm.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no language-model head on top of a base model. Load it with "
            "AutoModelForCausalLM."
        )
    if base is causal_lm:
        raise UnsupportedModelError(
            f"{name} cannot be trained chunk by chunk: its class names no base model beside the "
            "head (base_model_prefix). Train it without sppo_hf."
        )
    layers = _decoder_layers(base)
    if not layers:
        raise UnsupportedModelError(
            f"{name} cannot be trained chunk by chunk: {NO_LAYERS} (in {type(base).__name__}). "
            "Train it without sppo_hf, or choose a family from the README's table."
        )
    configs: dict[int, PreTrainedConfig] = {}
    for module in causal_lm.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs.setdefault(id(config), config)
    return ModelParts(causal_lm, base, layers, tuple(configs.values()))


def check_trainable(parts: ModelParts) -> None:
    """Refuse settings that matter in training only: dropout in attention, auxiliary losses, noise.

    Raises:
        UnsupportedModelError: Naming the setting and the remedy.
    """
    config = parts.text_config
    for field in ATTENTION_DROPOUT_FIELDS:
        if (getattr(config, field, None) or 0) > 0:
            raise UnsupportedModelError(
                f"{parts.name}: config.{field}={getattr(config, field)} drops attention "
                "probabilities, which chunked attention does not do. Set it to 0.0 (dropout in "
                "other places, LoRA dropout included, is fine)."
            )
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{parts.name}: config.output_router_logits=True adds a load-balancing loss that is "
            "not a sum over tokens, so it cannot be computed chunk by chunk. Set "
            "model.config.output_router_logits = False to train without the auxiliary loss."
        )
    embedding = parts.causal_lm.get_input_embeddings()
    if getattr(embedding, "neftune_noise_alpha", None):
        raise UnsupportedModelError(
            "neftune_noise_alpha scales its noise by the length of what is embedded, which would "
            "be the chunk and not the sequence. Train without NEFTune."
        )


def _refuse_architecture(causal_lm: PreTrainedModel, name: str) -> None:
    refuse_multimodal(causal_lm.config, name)
    config: Any = causal_lm.config.get_text_config(decoder=True)
    reason = None
    if causal_lm.config.is_encoder_decoder:
        reason = "it is an encoder-decoder; only decoder-only models run chunk by chunk"
    elif getattr(causal_lm, "_is_stateful", False):
        reason = "it has recurrent layers, whose state would have to be carried between chunks"
    elif foreign := sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYER_TYPES):
        reason = f"it has layers of type {', '.join(foreign)}; only softmax attention is exact"
    elif not getattr(causal_lm, "_supports_attention_backend", False):
        reason = "its attention bypasses Transformers' AttentionInterface, where chunks are joined"
    elif (getattr(config, "num_kv_shared_layers", 0) or 0) > 0:
        reason = "some of its layers read the keys of another layer (num_kv_shared_layers)"
    if reason is not None:
        raise UnsupportedModelError(
            f"{name} cannot be trained chunk by chunk: {reason}. Train it without sppo_hf, or "
            "choose a family from the README's table (run `sppo check MODEL` to test one)."
        )


def _decoder_layers(base: nn.Module) -> tuple[nn.Module, ...]:
    best: tuple[nn.Module, ...] = ()
    for child in base.children():
        if isinstance(child, nn.ModuleList) and len(child) > len(best):
            if all(isinstance(layer, GradientCheckpointingLayer) for layer in child):
                best = tuple(child)
    return best
