"""The parts of a Hugging Face causal language model, and checks that it can be trained exactly.

Finds the parts that the engine needs (base model, decoder layers, head, the configs that attention
reads) in a bare model or in a PEFT wrapper, and refuses what would not be exact in chunks, with the
reason and a remedy. It inspects modules and configs, runs no forward, and changes nothing but the
model's own activation checkpointing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import re
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing

from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.planning.config_file import (
    CLASSIFIERS,
    INDEXED_LAYER_TYPES,
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
"""Names of the config field with the dropout rate of attention probabilities."""

CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
"""Names of a forward's cache argument: since Transformers 5.24; before that in Mamba; in others."""

# Transformers sets this attribute on a model when it hooks layers and routers to collect their
# outputs, at the first call that requests them. That must not be one in which layers do not run.
CAPTURES = "_output_capturing_hooks_installed"

ROUTER_SWITCH = "output_router_logits"
"""Name of the argument of a forward, and of the config's field, that asks for a loss of routers."""


def classifier_kind(model: nn.Module) -> str | None:
    """The one of `CLASSIFIERS` that a model is; None for others.

    Transformers finds the loss by the class's name, which is another in a subclass of the user's.
    """
    names = [getattr(model, "loss_type", None) or "", *(c.__name__ for c in type(model).__mro__)]
    return next((kind for name in names for kind in CLASSIFIERS if kind in name), None)


_STATE_UPDATES = frozenset(("update_conv_state", "update_recurrent_state"))


def all_modules(root: nn.Module, *without: nn.Module) -> list[nn.Module]:
    """All modules in `root`, except `without` and what only they contain, in torch's order.

    For what every step looks at: `nn.Module.modules` passes each module through a generator for
    every level above it, which takes three times as long.
    """
    found: list[nn.Module] = []
    seen: set[nn.Module | None] = {None, *without}
    waiting: list[Any] = [root]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            found.append(module)
            if module._modules:
                waiting += reversed(module._modules.values())
    return found


def own_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Parameters that `modules` themselves have, each once, in their order."""
    found = {
        id(parameter): parameter
        for module in modules
        if module._parameters
        for parameter in module._parameters.values()
        if parameter is not None
    }
    return list(found.values())


def are_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether FSDP2 shards any of `modules`: the classes that it gives them have `unshard`."""
    return any(callable(getattr(kind, "unshard", None)) for kind in set(map(type, modules)))


def mixers_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Recurrent and convolutional mixers in `module`: those whose code writes states to a cache."""
    return tuple(child for child in all_modules(module) if is_mixer(child))


def have_mixers(modules: Iterable[nn.Module]) -> bool:
    """Whether any of `modules` is a mixer."""
    return any(map(_writes_states, set(map(type, modules))))


def is_mixer(module: nn.Module) -> bool:
    """Whether a module's own code writes states to a cache."""
    return _writes_states(type(module))


@functools.cache
def _writes_states(kind: type[nn.Module]) -> bool:
    return bool(_STATE_UPDATES & referenced_names(kind))


@functools.cache
def referenced_names(kind: type[nn.Module]) -> frozenset[str]:
    """Names of globals and attributes that a class's own methods refer to."""
    methods = (inspect.unwrap(value) for value in vars(kind).values() if inspect.isroutine(value))
    codes = (getattr(method, "__code__", None) for method in methods)
    return frozenset(name for code in codes if code is not None for name in code.co_names)


def own_class(module: nn.Module) -> Any:
    """Class of a module, without the subclass that FSDP2 creates."""
    return next(kind for kind in type(module).__mro__ if not hasattr(kind, "unshard"))


def depends_on_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding that depends on the sequence's length."""
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any("dynamic" in str(name) or name == "longrope" for name in kinds)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of one causal language model."""

    causal_lm: PreTrainedModel
    """The model with its head (a language model's or a classifier's), whose `forward` the engine
    replaces."""
    base: nn.Module
    """The model without the head; returns `last_hidden_state`."""
    decoder: nn.Module
    """Embedding, decoder layers and final norm: `base`, or its text decoder if it is multimodal."""
    layers: tuple[nn.Module, ...]
    configs: tuple[PreTrainedConfig, ...]
    """Every config object in which an attention module may look up its implementation."""

    @property
    def name(self) -> str:
        """Class name of the model, for messages."""
        return type(self.causal_lm).__name__

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """Class of the model, without the subclass that FSDP2 creates."""
        return own_class(self.causal_lm)

    @property
    def is_stock(self) -> bool:
        """Whether model, decoder and layers run Transformers' own code, not a user's subclass."""
        modules = (self.causal_lm, self.base, self.decoder, *self.layers)
        classes = {own_class(module) for module in modules}
        # Ours stand for the layers of other ranks.
        ours = ("transformers.", "sppo_hf.")
        return all(kind.__module__.startswith(ours) for kind in classes)

    @property
    def text_config(self) -> PreTrainedConfig:
        """The config that describes the decoder."""
        return self.causal_lm.config.get_text_config(decoder=True)

    @property
    def classifier_kind(self) -> str | None:
        """See `classifier_kind`."""
        return classifier_kind(self.causal_lm)

    @property
    def is_classifier(self) -> bool:
        """Whether the head classifies rows, tokens or spans: `CLASSIFIERS`, reward models too.

        Its own code runs on the hidden states of whole rows; it has no loss of routers.
        """
        return self.classifier_kind is not None

    def has_router_loss(self, given: bool | None = None) -> bool:
        """Whether a call asks for a loss of routers, by its argument `given` or else the config."""
        if self.is_classifier:
            return False
        if given is None:
            given = getattr(self.text_config, ROUTER_SWITCH, False)
        return bool(given)

    @property
    def has_recurrent_state(self) -> bool:
        """Whether recurrent states are passed from chunk to chunk, beside K/V."""
        return any(self.has_state(layer) for layer in range(len(self.layers)))

    def has_state(self, layer: int) -> bool:
        """Whether decoder layer `layer` has a recurrent or convolutional mixer."""
        return have_mixers(all_modules(self.layers[layer]))

    def attending_layers(self) -> frozenset[int]:
        """Decoder layers with attention: all but recurrent ones and those with an MLP only."""
        # By what Transformers caches for a layer. Layers that read another layer's K/V cache none.
        cached = DynamicCache(config=self.text_config).layers
        kinds = getattr(self.text_config, "layer_types", None)
        return frozenset(range(len(self.layers))) - {
            index
            for index, layer in enumerate(cached)
            if not isinstance(layer, CacheLayerMixin)
            and (kinds is None or kinds[index] in WITHOUT_ATTENTION)
        }

    def base_arguments(self) -> frozenset[str]:
        """Names of the parameters of the base model's forward."""
        return frozenset(inspect.signature(self.base.forward).parameters)

    def cache_argument(self) -> str:
        """Name of the base model's cache argument; see `CACHE_ARGUMENTS`."""
        names = self.base_arguments()
        return next((name for name in CACHE_ARGUMENTS if name in names), CACHE_ARGUMENTS[-1])

    @property
    def model_type(self) -> str:
        """Transformers' model type, of the whole model if it is multimodal."""
        config: PreTrainedConfig = self.causal_lm.config
        return (config if self.is_multimodal else self.text_config).model_type

    @property
    def is_multimodal(self) -> bool:
        """Whether the model has encoders beside its text decoder, whose config is then nested."""
        return self.text_config is not self.causal_lm.config

    @property
    def reads_ids(self) -> bool:
        """Whether other modules than the embedding read `input_ids`.

        Per-layer embeddings do (Gemma 3n and 4), and code that looks for image tokens.
        """
        own_tables = getattr(self.text_config, "hidden_size_per_layer_input", None)
        return bool(own_tables) or self.is_multimodal

    def embed_sequence(self, tokens: Mapping[str, Tensor]) -> Tensor | None:
        """Embeddings `[B, T, D]` of the whole sequence; None if each chunk embeds its own tokens.

        The gradient of an embedding is as large as its table. On a CPU that costs seconds, so
        tokens are embedded once. On a GPU it is cheap, and embeddings of the whole sequence would
        take memory until the end of the step.
        """
        embedding, ids = self.causal_lm.get_input_embeddings(), tokens.get("input_ids")
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in embedding.parameters())
        if ids is None or ids.device.type != "cpu" or not trained or self.reads_ids:
            return None
        return embedding(ids)

    def noise_of_sequence(
        self, tokens: int, total_tokens: int
    ) -> contextlib.AbstractContextManager[None]:
        """Context in which NEFTune's noise on `tokens` is that on rows of `total_tokens`.

        Transformers' hook of the embedding divides `neftune_noise_alpha` by the root of the number
        of tokens that it sees (arXiv 2310.05914).
        """
        share = math.sqrt(tokens / total_tokens)
        # The hook may be of a module that PEFT has wrapped since.
        scaled = {
            module: alpha * share
            for module in self.causal_lm.get_input_embeddings().modules()
            if (alpha := module.__dict__.get("neftune_noise_alpha")) is not None
        }
        return patched_attribute("neftune_noise_alpha", scaled)

    def final_norm(self) -> nn.Module | None:
        """The first norm defined after the decoder layers; None if there is none."""
        layers = set(self.layers)
        behind = False
        for child in self.decoder.children():
            behind = behind or not layers.isdisjoint(child.children())
            if behind and "norm" in type(child).__name__.lower():
                return child
        return None

    def learned_positions(self) -> tuple[str, int] | None:
        """Name of a table with a learned vector for each position (GPT-2's), and how many it has.

        None for other models.
        """
        for name, table in self.decoder.named_children():
            if isinstance(table, nn.Embedding) and re.search("wpe|position", name):
                return name, table.num_embeddings
        return None

    @property
    def head_owner(self) -> nn.Module:
        """The module whose children are `base` and the head; `causal_lm` in most families."""
        for module in self.causal_lm.modules():
            if any(child is self.base for child in module.children()):
                return module
        raise AssertionError("the base is a part of the model")

    def num_shards(self) -> int:
        """Number of ranks over which FSDP2 shards the model; 1 if it does not."""
        meshes = (getattr(p, "device_mesh", None) for p in self.causal_lm.parameters())
        mesh = next((mesh for mesh in meshes if mesh is not None), None)
        # Of two axes the first replicates.
        return 1 if mesh is None else mesh.size(mesh.ndim - 1)

    def whole_bytes(self) -> int:
        """Bytes of parameters that every rank has whole although FSDP2 shards the model.

        Accelerate leaves out bitsandbytes' 4-bit weights unless `bnb_4bit_quant_storage` is a
        floating dtype.
        """
        if self.num_shards() == 1:
            return 0
        return sum(p.nbytes for p in self.causal_lm.parameters() if not hasattr(p, "device_mesh"))

    def gathered_elements(self) -> tuple[int, ...]:
        """Elements of each layer that FSDP2 gathers: of 4-bit weights those that hold them, packed.

        What every rank has whole is not among them.
        """
        return tuple(
            sum(p.numel() for p in layer.parameters() if hasattr(p, "device_mesh"))
            for layer in self.layers
        )

    def gathered_dtype(self) -> torch.dtype | None:
        """Dtype in which FSDP2 gathers weights; None where it is their own, or nothing is sharded.

        Autocast need not be on then: what a layer is called with is cast, too.
        """
        for module in all_modules(self.causal_lm):
            if are_sharded([module]):
                state: Any = cast("Any", module)._get_fsdp_state()
                return state._mp_policy.param_dtype
        return None

    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the model or a part of it; see `are_sharded`."""
        return are_sharded(all_modules(self.causal_lm))

    def head_modules(self) -> list[nn.Module]:
        """All modules of the head."""
        heads = (child for child in self.head_owner.children() if child is not self.base)
        return [module for child in heads for module in child.modules()]

    def head_width(self) -> int:
        """Rows of the matrices of a classifier's head, at least 1: a head may have none."""
        return max(1, sum(p.shape[0] for p in own_parameters(self.head_modules()) if p.ndim == 2))

    def head_is_hooked(self) -> bool:
        """Whether the head's modules have forward or backward hooks."""
        return any(map(has_hooks, self.head_modules()))

    def head_parameters(self) -> list[nn.Parameter]:
        """Parameters of the head: those that logits depend on beside hidden states."""
        return own_parameters((*self.head_modules(), self.causal_lm))


@contextlib.contextmanager
def patched_attribute(name: str, values: Mapping[Any, Any]) -> Iterator[None]:
    """Context in which objects have another value of an instance attribute, such as `forward`."""
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
def without_cached_weights() -> Iterator[None]:
    """Context in which `torch.nn.utils.parametrize.cached()` of the caller has no effect.

    One cached weight would be in the graphs of all chunks, of which each is freed by its own
    backward, and a layer that is rerun would find it where its forward had computed it.
    """
    enabled = vars(parametrize).get("_cache_enabled")
    with patched_attribute("_cache_enabled", {parametrize: 0} if enabled else {}):
        yield


@contextlib.contextmanager
def swapped_modules(
    places: Sequence[tuple[nn.Module, str, nn.Module | None]],
) -> Iterator[None]:
    """Context in which other modules are in these places, each (parent, name, module)."""
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
        "PreTrainedModel with a head (AutoModelForCausalLM, or a classifier), bare or in PEFT. "
        "Train other modules without sppo_hf, or convert the language model in them: "
        "plugin.convert, in a training loop of your own."
    )


def find_parts(model: nn.Module) -> ModelParts:
    """Find the parts of `model`, and check that its architecture can run in chunks exactly.

    Raises:
        UnsupportedModelError: It cannot; names the model, the reason and a remedy.
    """
    causal_lm = find_causal_lm(model)
    name = type(causal_lm).__name__
    base = _base_of(causal_lm)
    if causal_lm.get_output_embeddings() is None and classifier_kind(causal_lm) is None:
        raise UnsupportedModelError(
            f"{name} has no head on top of a base model that SPPO knows. Load it with "
            f"AutoModelForCausalLM, or AutoModel{', AutoModel'.join(CLASSIFIERS)}. A class of your "
            f"own is known by its name, or one that it derives from: My{CLASSIFIERS[0]}, for one."
        )
    if base is causal_lm:
        raise UnsupportedModelError(
            f"{name} cannot be trained chunk by chunk: its class names no base model beside the "
            "head (base_model_prefix). Train it without sppo_hf."
        )
    nested = causal_lm.config.get_text_config(decoder=True) is not causal_lm.config
    decoder = _text_decoder(causal_lm) if nested and not len(layer_list(base)[1]) else base
    _refuse_architecture(causal_lm, decoder, name)
    layers = tuple(layer_list(decoder)[1])
    if not layers:
        raise UnsupportedModelError(
            f"{name} cannot be trained chunk by chunk: {NO_LAYERS} (in {type(base).__name__}). "
            "Train it without sppo_hf, or choose a family that `sppo check --list` names."
        )
    if len(set(map(id, layers))) < len(layers):
        raise UnsupportedModelError(
            f"{name} cannot be trained chunk by chunk: it runs the same decoder layer more than "
            "once, so keys and values of its calls could not be told apart. Give each place a "
            "layer of its own (its parameters may be those of another), or train it without "
            "sppo_hf."
        )
    configs: dict[int, PreTrainedConfig] = {}
    for module in causal_lm.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs.setdefault(id(config), config)
    return ModelParts(causal_lm, base, decoder, layers, tuple(configs.values()))


def check_trainable(parts: ModelParts) -> None:
    """Refuse settings that matter in training only: dropout in attention.

    Also switches off activation checkpointing that was enabled after the conversion.

    Raises:
        UnsupportedModelError: Names the setting and a remedy.
    """
    config = parts.text_config
    for field in ATTENTION_DROPOUT_FIELDS:
        if (getattr(config, field, None) or 0) > 0:
            raise UnsupportedModelError(
                f"{parts.name}: config.{field}={getattr(config, field)} drops attention "
                "probabilities, which chunked attention does not do. Set it to 0.0 (dropout in "
                "other places, LoRA dropout included, is fine)."
            )
    layers = (parts.decoder, *parts.layers)
    if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        disable_gradient_checkpointing(parts.causal_lm)


def disable_gradient_checkpointing(model: nn.Module) -> bool:
    """Switch off the model's own activation checkpointing, with a warning.

    It would run attention a second time, and the engine would not see what the layers save. SPPO's
    `recompute` and `offload` save memory instead.

    Returns:
        Whether it was on.
    """
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return False
    # The old name is deprecated in newer releases of Transformers, the new one unknown to older.
    new = hasattr(model, "activation_checkpointing_disable")
    name = "activation_checkpointing" if new else "gradient_checkpointing"
    switch_off = getattr(model, f"{name}_disable", None)
    if switch_off is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has gradient checkpointing on and no method to switch it off. "
            "Remedy: build the model without gradient checkpointing; SPPO recomputes by itself."
        )
    switch_off()
    logger.warning(
        "%s is on; SPPO switched it off in the model and recomputes by itself (settings: "
        "recompute, offload). Set %s=False to silence this (TRL's default is True).",
        *(name, name),
    )
    return True


def check_layers(parts: ModelParts) -> None:
    """Refuse a model whose decoder layers have changed since the conversion.

    Raises:
        ConfigError: Layers were added, removed or replaced.
    """
    now = layer_list(parts.decoder)[1]
    known = set(map(id, parts.layers))
    if known == set(map(id, now)):
        return
    if len(now) in (0, len(known)) and known <= set(map(id, parts.decoder.modules())):
        return  # inside wrappers, such as torch.compile's
    raise ConfigError(
        f"{parts.name} had {len(known)} decoder layers when SPPO converted it; now it has "
        f"{len(now)}, of which {sum(id(layer) not in known for layer in now)} are new. Allowed: "
        "those that were converted. Remedy: plugin.revert(model) and plugin.convert(model) once "
        "more, or change the layers before the model is prepared."
    )


def check_adapters(parts: ModelParts) -> None:
    """Refuse PEFT adapters that compute something else on a chunk than on the whole sequence.

    Called in every forward, also in evaluation, since adapters may be added at any time.

    Raises:
        UnsupportedModelError: Such an adapter is active.
    """
    configs: Any = getattr(parts.causal_lm, "peft_config", None) or {}
    training = parts.causal_lm.training
    reasons = {name: _reason_against_adapter(one, training) for name, one in configs.items()}
    if not any(reasons.values()):
        return
    for layer in parts.causal_lm.modules():
        # Only PEFT's layers have `adapter_layer_names`; models have a method `active_adapters`.
        active: Any = getattr(layer, "active_adapters", ()) if _is_adapted(layer) else ()
        refused = sorted(name for name in active if reasons.get(name))
        if refused and not getattr(layer, "disable_adapters", False):
            raise UnsupportedModelError(
                f"{parts.name}: adapter {refused[0]!r} {reasons[refused[0]]}, or train it without "
                "sppo_hf."
            )


def _is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer of PEFT's that holds adapters."""
    return hasattr(module, "adapter_layer_names")


_WEIGHT_DROPOUTS = ("rank_dropout", "module_dropout", "boft_dropout")
"""Fields of PEFT's configs with dropout of an adapter's weights, not of its input."""


def _reason_against_adapter(config: Any, training: bool) -> str:
    """What is wrong with an adapter in chunks, and the remedy; "" for adapters that are exact."""
    velora = getattr(config, "velora_config", None)
    if getattr(config, "alora_invocation_tokens", None):
        return (
            "has alora_invocation_tokens. PEFT counts from the end of the sequence where it "
            "begins, which would be the end of the chunk. Allowed: LoRA on all tokens. Remedy: "
            "alora_invocation_tokens=None in LoraConfig"
        )
    if getattr(config, "peft_type", None) == "LILY":
        return (
            "is Lily's, whose router averages over all tokens that it is given, which would be "
            "those of a chunk. Allowed: adapters that treat every token by itself. Remedy: LoRA"
        )
    if getattr(config, "monteclora_config", None) is not None:
        return (
            "has a monteclora_config. It draws other weights at every call of a layer, so every "
            "chunk and its recomputation would have weights of their own. Allowed: LoRA with the "
            "same weights for all tokens. Remedy: monteclora_config=None in LoraConfig"
        )
    if training and getattr(config, "peft_type", None) == "POLY":
        return (
            "is Poly's, whose router draws a mix of skills at every call of a layer, so every "
            "chunk would have another one. Allowed: adapters with the same weights for all tokens. "
            "Remedy: LoRA"
        )
    for name in _WEIGHT_DROPOUTS if training else ():
        if rate := getattr(config, name, 0.0):
            return (
                f"has {name}={rate}. It drops other weights at every call of a layer, so every "
                f"chunk would have weights of its own. Allowed: 0.0. Remedy: {name}=0.0 in "
                f"{type(config).__name__} (dropout of inputs, such as LoRA's, is fine)"
            )
    if velora is not None and velora.init_type != "random":
        return (
            f"has velora_config.init_type={velora.init_type!r}. It projects on the mean of all "
            "tokens that it is given, which would be those of a chunk. Allowed: a projection that "
            "does not depend on tokens. Remedy: init_type='random' in VeloraConfig"
        )
    return ""


def _refuse_architecture(causal_lm: PreTrainedModel, decoder: nn.Module, name: str) -> None:
    config: Any = causal_lm.config.get_text_config(decoder=True)
    layer_types: set[str] = set(getattr(config, "layer_types", None) or ())
    foreign, indexed = sorted(layer_types - LAYER_TYPES), indexer_reason(config)
    # Replacements of other stages' layers carry the flag of the layer.
    mixed = bool(mixers_of(causal_lm)) or any(
        getattr(module, "carries_state", False) for module in causal_lm.modules()
    )
    recurrent = getattr(causal_lm, "_is_stateful", False)
    reason = None
    if causal_lm.config.is_encoder_decoder:
        reason = "it is an encoder-decoder; only decoder-only models run chunk by chunk"
    elif config.model_type in STATE_REASONS:
        reason = STATE_REASONS[config.model_type]
    elif indexed and (foreign or layer_types & INDEXED_LAYER_TYPES):
        reason = indexed
    elif foreign:
        reason = f"it has layers of type {', '.join(foreign)}, which are not known to be exact"
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
    """The model without the head; `causal_lm` itself if that cannot be told."""
    if causal_lm.base_model is not causal_lm:
        return causal_lm.base_model
    # Llama 4's `base_model_prefix` names an attribute that its language models do not have, and its
    # multimodal model contains a language model with a head.
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


def layer_list(decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers: the longest list of layers; empty if there is none."""
    lists = [
        (name, child)
        for name, child in decoder.named_children()
        if isinstance(child, nn.ModuleList)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in child)
    ]
    return max(lists, key=lambda found: len(found[1]), default=("", nn.ModuleList()))


@contextlib.contextmanager
def suppress_peft_warnings() -> Iterator[None]:
    """Context without the warning about `is_gradient_checkpointing`, which PEFT still reads.

    Newer releases of Transformers deprecate that name. For `get_peft_model`, `from_pretrained`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


BUILD_ERRORS = (
    *(ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, ImportError, OSError, StrictDataclassError),
)
"""Errors that model and configuration classes raise if settings do not fit together, or if some of
them cannot be found on the hub."""


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration to build a language model of: `config`, or that of its text decoder.

    The latter if Transformers has no language model for `config` as a whole, encoders included, but
    has one for its text decoder.
    """
    text = config.get_text_config(decoder=True)
    if auto_class_of(config) is None and auto_class_of(text) is not None:
        return text
    return config


def auto_class_of(config: PreTrainedConfig) -> Any:
    """The Auto class that builds a language model of this very configuration, or None."""
    for loader in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        if type(config) not in loader._model_mapping:
            continue
        model_class: Any = loader._model_mapping[type(config)]
        # For some types AutoModelForCausalLM builds the text decoder only, from the nested
        # configuration. Draft models have the configuration of their whole model.
        inner = getattr(config, "sub_configs", {}).get("text_config")
        if inner is None or model_class.config_class is not inner:
            return loader
    return None


@contextlib.contextmanager
def without_parameter_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context without the hooks on `parameters`; hooks added inside are kept."""
    removed: list[tuple[Any, dict[int, Any]]] = []
    for parameter in parameters:
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if hooks:
                # Emptied in place: autograd and the hooks' handles refer to the mapping.
                removed.append((hooks, dict(hooks)))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, before in removed:
            added = dict(hooks)
            hooks.clear()
            hooks.update(before | added)


def has_hooks(module: nn.Module, *, besides: Container[int] = ()) -> bool:
    """Whether a module itself has forward or backward hooks, besides those of these keys."""
    return bool(
        module._forward_pre_hooks
        or any(key not in besides for key in module._forward_hooks)
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def captures(module: nn.Module) -> set[int]:
    """Return the keys of forward hooks by which Transformers collects what a module returns.

    They change nothing, and do nothing unless the outer call asks for what they collect.
    """
    return {
        key
        for key, hook in module._forward_hooks.items()
        if getattr(hook, "__module__", None) == output_capturing.__name__
    }


def collected_routers(parts: ModelParts) -> dict[type[nn.Module], int]:
    """Return the classes of modules that Transformers asks for the routers' logits, if any.

    Each with the place of the logits among what the module returns.
    """
    recorders = (getattr(parts.decoder, "_can_record_outputs", None) or {}).get("router_logits", ())
    several = recorders if isinstance(recorders, (list, tuple)) else (recorders,)
    return {getattr(one, "target_class", one): getattr(one, "index", 1) for one in several}


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` compiled a module, with all that is inside of it.

    Under a dispatch mode it would run in eager mode, from then on for good, and save other tensors.
    """
    return (
        # By name: importing its class takes seconds.
        type(module).__name__ == "OptimizedModule"
        or module._compiled_call_impl is not None
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def has_parameter_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any of `parameters` has a hook."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
