"""Where things are in a Hugging Face causal language model, and whether we can train it exactly.

And which of Transformers' automatic classes makes one of a configuration.

Finds the parts the engine needs (base model, decoder layers, the configs that attention reads, the
head) in a bare model or inside a PEFT wrapper, and refuses, with the reason and the remedy, what
would not be exact chunk by chunk. It looks at modules and configs only; it runs nothing, and
changes nothing but the model's own activation checkpointing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from sppo_hf.engine.versions import ReadTensors
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.planning.config_file import (
    LAYER_TYPES,
    NO_LAYERS,
    OWN_STATE,
    STATE_LAYER_TYPES,
    STATE_REASONS,
    WITHOUT_ATTENTION,
    indexer_reason,
)

logger = logging.getLogger(__name__)

ATTENTION_DROPOUT_FIELDS = (
    *("attention_dropout", "attn_pdrop", "attn_dropout"),
    "attention_dropout_prob",
)
"""How configs call the share of attention probabilities that is dropped."""

CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
"""What a forward calls its cache: since Transformers 5.24; before that, in Mamba; in all others."""


_WRITES = frozenset(("update_conv_state", "update_recurrent_state"))


def mixers_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules in `module` that carry a state: those whose code writes it into a cache."""
    return tuple(child for child in module.modules() if _WRITES & referenced_names(type(child)))


@functools.cache
def referenced_names(kind: type[nn.Module]) -> frozenset[str]:
    """The globals and attributes that methods of a class, not of its bases, refer to."""
    methods = (inspect.unwrap(value) for value in vars(kind).values() if inspect.isroutine(value))
    codes = (getattr(method, "__code__", None) for method in methods)
    return frozenset(name for code in codes if code is not None for name in code.co_names)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of one causal language model."""

    causal_lm: PreTrainedModel
    """The model with the language-model head; its `forward` is the one the engine takes over."""
    base: nn.Module
    """All that runs before the head; returns `last_hidden_state`."""
    decoder: nn.Module
    """Embedding, decoder layers and final norm: `base` itself, or the text decoder inside it where
    `base` is multimodal."""
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

    @property
    def has_recurrent_state(self) -> bool:
        """Whether states go from chunk to chunk beside keys and values."""
        return any(self.has_state(layer) for layer in range(len(self.layers)))

    def has_state(self, layer: int) -> bool:
        """Whether a recurrent or convolutional mixer is in decoder layer `layer`."""
        return bool(mixers_of(self.layers[layer]))

    def attending_layers(self) -> frozenset[int]:
        """Decoder layers with keys and values: all but recurrent ones and those of an MLP alone."""
        # What a layer keeps for generation, Transformers itself knows best; but layers that read
        # another layer's keys keep nothing either.
        kept = DynamicCache(config=self.text_config).layers
        kinds = getattr(self.text_config, "layer_types", None)
        return frozenset(range(len(self.layers))) - {
            index
            for index, layer in enumerate(kept)
            if not isinstance(layer, CacheLayerMixin)
            and (kinds is None or kinds[index] in WITHOUT_ATTENTION)
        }

    def base_arguments(self) -> frozenset[str]:
        """Names of the parameters of the base model's forward."""
        return frozenset(inspect.signature(self.base.forward).parameters)

    def cache_argument(self) -> str:
        """What the base model's forward calls its cache: `CACHE_ARGUMENTS` says since when."""
        names = self.base_arguments()
        return next((name for name in CACHE_ARGUMENTS if name in names), CACHE_ARGUMENTS[-1])

    @property
    def model_type(self) -> str:
        """Transformers' name of the family: of the whole model where it is multimodal."""
        config: PreTrainedConfig = self.causal_lm.config
        return (config if self.is_multimodal else self.text_config).model_type

    @property
    def is_multimodal(self) -> bool:
        """Whether there are encoders beside the text decoder: its config is then a nested one."""
        return self.text_config is not self.causal_lm.config

    @property
    def reads_ids(self) -> bool:
        """Whether more than the embedding reads `input_ids`.

        Tables of every layer's own do (Gemma 3n and 4), and what looks for tokens of images.
        """
        own_tables = getattr(self.text_config, "hidden_size_per_layer_input", None)
        return bool(own_tables) or self.is_multimodal

    def embed_sequence(self, tokens: Mapping[str, Tensor]) -> Tensor | None:
        """Embeddings `[B, T, D]` of the whole sequence, where chunks are to be cut from them.

        The gradient of an embedding is as large as the vocabulary, so on a CPU, where that costs
        seconds, tokens are embedded once and not chunk by chunk. On a GPU it costs nothing, and
        embeddings of the whole sequence would stay on the device until its end.
        """
        embedding, ids = self.causal_lm.get_input_embeddings(), tokens.get("input_ids")
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in embedding.parameters())
        if ids is None or ids.device.type != "cpu" or not trained or self.reads_ids:
            return None
        return embedding(ids)

    def final_norm(self) -> nn.Module | None:
        """The first norm defined behind the decoder layers; None where there is none."""
        layers = set(self.layers)
        behind = False
        for child in self.decoder.children():
            behind = behind or not layers.isdisjoint(child.children())
            if behind and "norm" in type(child).__name__.lower():
                return child
        return None

    @property
    def head_owner(self) -> nn.Module:
        """The module that has `base` and the head as its children; `causal_lm` in most families."""
        for module in self.causal_lm.modules():
            if any(child is self.base for child in module.children()):
                return module
        raise AssertionError("the base is a part of the model")

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
            for child in self.head_owner.children()
            if child is not self.base
            for module in child.modules()
        )

    def head_parameters(self) -> list[nn.Parameter]:
        """Parameters that logits depend on beyond the base model's hidden states."""
        seen: dict[int, nn.Parameter] = {}
        for child in self.head_owner.children():
            if child is not self.base:
                for parameter in child.parameters():
                    seen.setdefault(id(parameter), parameter)
        for parameter in self.causal_lm.parameters(recurse=False):
            seen.setdefault(id(parameter), parameter)
        return list(seen.values())

    def head_reads(self) -> ReadTensors:
        """What logits depend on beyond the base model's hidden states, settings included."""
        return ReadTensors.of_module(self.causal_lm, self.base)


@contextlib.contextmanager
def patched_attribute(name: str, values: Mapping[Any, Any]) -> Iterator[None]:
    """Let objects have this attribute on the instance (a forward, say); at exit as before."""
    before = {owner: owner.__dict__.get(name) for owner in values}
    try:
        for owner, value in values.items():
            owner.__dict__[name] = value
        yield
    finally:
        for owner, own in before.items():
            owner.__dict__.pop(name, None)
            if own is not None:
                owner.__dict__[name] = own


@contextlib.contextmanager
def swapped_modules(
    places: Sequence[tuple[nn.Module, str, nn.Module | None]],
) -> Iterator[None]:
    """Let other modules stand in these places, each (parent, name, module); at exit as before."""
    before = [parent._modules[name] for parent, name, _ in places]
    for parent, name, module in places:
        parent._modules[name] = module
    try:
        yield
    finally:
        for (parent, name, _), own in zip(places, before, strict=True):
            parent._modules[name] = own


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
    base = _base_of(causal_lm)
    if causal_lm.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no language-model head on top of a base model. Load it with "
            "AutoModelForCausalLM; classifiers and reward models train without sppo_hf."
        )
    if base is causal_lm:
        raise UnsupportedModelError(
            f"{name} cannot be trained chunk by chunk: its class names no base model beside the "
            "head (base_model_prefix). Train it without sppo_hf."
        )
    nested = causal_lm.config.get_text_config(decoder=True) is not causal_lm.config
    decoder = _text_decoder(causal_lm) if nested and not _decoder_layers(base) else base
    _refuse_architecture(causal_lm, decoder, name)
    layers = _decoder_layers(decoder)
    if not layers:
        raise UnsupportedModelError(
            f"{name} cannot be trained chunk by chunk: {NO_LAYERS} (in {type(base).__name__}). "
            "Train it without sppo_hf, or choose a family that `sppo check --list` names."
        )
    configs: dict[int, PreTrainedConfig] = {}
    for module in causal_lm.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs.setdefault(id(config), config)
    return ModelParts(causal_lm, base, decoder, layers, tuple(configs.values()))


def check_trainable(parts: ModelParts) -> None:
    """Refuse settings that matter in training only: dropout in attention, noise.

    Activation checkpointing of the model's own, that somebody switched on after the conversion, is
    switched off again.

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
    embedding = parts.causal_lm.get_input_embeddings()
    if getattr(embedding, "neftune_noise_alpha", None):
        raise UnsupportedModelError(
            "neftune_noise_alpha scales its noise by the length of what is embedded, which would "
            "be the chunk and not the sequence. Train without NEFTune."
        )
    layers = (parts.decoder, *parts.layers)
    if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        disable_gradient_checkpointing(parts.causal_lm)


def disable_gradient_checkpointing(model: nn.Module) -> bool:
    """Switch the model's own activation checkpointing off, and say so.

    Under SPPO it would run attention a second time and hide the layers' insides from the engine;
    what a user wants by it, less memory, is what SPPO's `recompute` and `offload` give.

    Returns:
        Whether it was on.
    """
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return False
    # The old name is deprecated in newer releases of Transformers, the new one unknown to older.
    switch_off = getattr(model, "activation_checkpointing_disable", None) or getattr(
        model, "gradient_checkpointing_disable", None
    )
    if switch_off is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has gradient checkpointing on and no method to switch it off. "
            "Remedy: build the model without gradient checkpointing; SPPO recomputes by itself."
        )
    switch_off()
    logger.warning(
        "gradient_checkpointing is on; SPPO switched it off in the model and recomputes by itself "
        "(settings: recompute, offload). Drop gradient_checkpointing to silence this."
    )
    return True


def check_layers(parts: ModelParts) -> None:
    """Refuse a model whose decoder layers are not those that were converted.

    Raises:
        ConfigError: Some were added, taken away or replaced.
    """
    now = _decoder_layers(parts.decoder)
    known = set(map(id, parts.layers))
    if known == set(map(id, now)):
        return
    if len(now) in (0, len(known)) and known <= set(map(id, parts.decoder.modules())):
        return  # inside of wrappers, such as a compiler's
    raise ConfigError(
        f"{parts.name} had {len(known)} decoder layers when SPPO converted it; now it has "
        f"{len(now)}, of which {sum(id(layer) not in known for layer in now)} are new. Allowed: "
        "those that were converted. Remedy: plugin.revert(model) and plugin.convert(model) once "
        "more, or change the layers before the model is prepared."
    )


def check_adapters(parts: ModelParts) -> None:
    """Refuse adapters of PEFT whose place in the sequence is counted from its end (aLoRA).

    Asked at every call, in evaluation too: adapters come and go after the conversion.

    Raises:
        UnsupportedModelError: One is active.
    """
    configs: Any = getattr(parts.causal_lm, "peft_config", None) or {}
    invoked = {n for n, c in configs.items() if getattr(c, "alora_invocation_tokens", None)}
    if not invoked:
        return
    for layer in parts.causal_lm.modules():
        active: Any = getattr(layer, "active_adapters", ()) if hasattr(layer, "lora_A") else ()
        if not invoked.isdisjoint(active) and not getattr(layer, "disable_adapters", False):
            names = ", ".join(map(repr, sorted(invoked.intersection(active))))
            raise UnsupportedModelError(
                f"{parts.name}: adapter {names} has alora_invocation_tokens. PEFT counts from the "
                "end of the sequence where it begins, which would be the end of the chunk. "
                "Allowed: LoRA on all tokens. Remedy: alora_invocation_tokens=None in LoraConfig, "
                "or train it without sppo_hf."
            )


def _refuse_architecture(causal_lm: PreTrainedModel, decoder: nn.Module, name: str) -> None:
    config: Any = causal_lm.config.get_text_config(decoder=True)
    layer_types: set[str] = set(getattr(config, "layer_types", None) or ())
    # Layers of another stage stand for what they are.
    mixed = bool(mixers_of(causal_lm)) or any(
        getattr(module, "carries_state", False) for module in causal_lm.modules()
    )
    recurrent = getattr(causal_lm, "_is_stateful", False)
    reason = None
    if causal_lm.config.is_encoder_decoder:
        reason = "it is an encoder-decoder; only decoder-only models run chunk by chunk"
    elif config.model_type in STATE_REASONS:
        reason = STATE_REASONS[config.model_type]
    elif foreign := sorted(layer_types - LAYER_TYPES):
        seen = f"it has layers of type {', '.join(foreign)}, which are not known to be exact"
        reason = indexer_reason(config) or seen
    elif (recurrent or layer_types & STATE_LAYER_TYPES) and not mixed:
        reason = OWN_STATE
    elif not getattr(decoder, "_supports_attention_backend", False) and not mixed:
        reason = "its attention bypasses Transformers' AttentionInterface, where chunks are joined"
    if reason is not None:
        raise UnsupportedModelError(
            f"{name} cannot be trained chunk by chunk: {reason}. Train it without sppo_hf, or "
            "choose a family that `sppo check --list` names (`sppo check MODEL` tests one)."
        )


def _base_of(causal_lm: PreTrainedModel) -> nn.Module:
    """What runs before the head; `causal_lm` itself where that cannot be told."""
    if causal_lm.base_model is not causal_lm:
        return causal_lm.base_model
    # Llama 4 names an attribute that its language models do not have, and Llama 4 with images has
    # a language model with a head inside.
    head = causal_lm.get_output_embeddings()
    bodies = [child for child in causal_lm.children() if isinstance(child, PreTrainedModel)]
    with_head = [body for body in bodies if any(head is module for module in body.modules())]
    if head is not None and len(with_head) == 1:
        inner = _base_of(with_head[0])
        return causal_lm if inner is with_head[0] else inner
    return bodies[0] if len(bodies) == 1 and not with_head else causal_lm


def _text_decoder(causal_lm: PreTrainedModel) -> nn.Module:
    """The text decoder inside a multimodal model, without a head of its own."""
    decoder: Any = causal_lm.get_decoder()
    return getattr(decoder, "base_model", decoder)


def _decoder_layers(base: nn.Module) -> tuple[nn.Module, ...]:
    best: tuple[nn.Module, ...] = ()
    for child in base.children():
        if isinstance(child, nn.ModuleList) and len(child) > len(best):
            if all(isinstance(layer, GradientCheckpointingLayer) for layer in child):
                best = tuple(child)
    return best


@contextlib.contextmanager
def suppress_peft_warnings() -> Iterator[None]:
    """Context for PEFT's `get_peft_model` and `from_pretrained`.

    PEFT asks models for `is_gradient_checkpointing`, a name that newer releases of Transformers
    call deprecated. Nothing else is silenced.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


BUILD_ERRORS = (
    *(ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, ImportError, OSError, StrictDataclassError),
)
"""What model and configuration classes raise where settings do not fit together, or where some of
them are looked up on the hub."""


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a causal language model: `config`, or that of its text decoder alone.

    Returns:
        `config` itself if Transformers has a language model of it as a whole, encoders of images
        and sound included, or if its text decoder has none of its own.
    """
    text = config.get_text_config(decoder=True)
    if auto_class_of(config) is None and auto_class_of(text) is not None:
        return text
    return config


def auto_class_of(config: PreTrainedConfig) -> Any:
    """The automatic class that makes a language model of this very configuration, or None."""
    for loader in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        if type(config) not in loader._model_mapping:
            continue
        model_class: Any = loader._model_mapping[type(config)]
        # Of some types AutoModelForCausalLM loads the text decoder alone, by the configuration
        # inside; draft models are described by their model's configuration.
        inner = getattr(config, "sub_configs", {}).get("text_config")
        if inner is None or model_class.config_class is not inner:
            return loader
    return None


@contextlib.contextmanager
def without_parameter_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which backward runs no hook that was set on `parameters` before it."""
    aside: list[tuple[Any, dict[int, Any]]] = []
    for parameter in parameters:
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if hooks:
                # The mapping itself belongs to autograd and to the handles that remove hooks.
                aside.append((hooks, dict(hooks)))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, before in aside:
            since = dict(hooks)
            hooks.clear()
            hooks.update(before | since)


def has_parameter_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a hook is set on any of `parameters`."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
