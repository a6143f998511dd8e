"""Tiny random causal language models of any Transformers family, for comparisons.

A family's default configuration is shrunk to a few thousand weights, its special features are
turned on (see `tiny_families`), and all parameters are random, including sinks, biases, router
parameters and norm weights, which Transformers initialises to zero or one. So attention scores,
soft caps and routing are far from degenerate, and no gradient is zero by accident.

A model is first built on the meta device, and refused if its weights would take more than 256 MiB,
with the names of the settings that make it large.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import operator
import sys
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from sppo_hf.engine.model_parts import (
    BUILD_ERRORS,
    auto_class_of,
    classifier_kind,
    decoder_config,
    suppress_peft_warnings,
)
from sppo_hf.errors import ConfigError, first_line
from sppo_hf.planning.config_file import MAX_MODULES, check_sizes, iter_settings
from sppo_hf.rules import format_bytes
from sppo_hf.testing.tiny_families import FAMILIES, UNLISTED, TinyFamily

VOCAB_SIZE = 97
"""Vocabulary of tiny models; a prime, so that no other size divides it."""

LARGEST_BYTES = 256 * 2**20
"""Largest size of a tiny model's weights; larger models are refused before they are built."""

_LAYERS = 3
_MOST_KINDS = 6
# Lists of layer numbers, not of what each layer is.
_INDEX_LISTS = ("idxs", "indices")
# Of these, the ones whose numbers are decoder layers' (Zamba 2's `hybrid_layer_ids`).
_LAYER_NUMBERS = ("layer_ids", "layer_indices")
_HEAD_SIZE = 8
_WINDOW_TOKENS = 8
_ORIGINAL_TOKENS = 16

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "kv_channels": 8,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "kv_n_heads": 2,
    "max_position_embeddings": 512,
    # Experts: few, and two of them active, so that most see some tokens.
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "router_hidden_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "output_router_logits": False,
    # Multi-head latent attention: value heads of another size than query and key heads.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    # Indexers: few keys chosen, and heads enough that hardly a score is zero, as equal scores leave
    # open which keys are chosen.
    "index_topk": 8,
    "index_kpool": 4,
    "index_n_heads": 16,
    "index_head_dim": 16,
    # State-space and linear-attention families: scans of several blocks, of few tokens each.
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "state_size": 4,
    "ssm_state_size": 4,
    "mamba_d_state": 4,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_mamba_heads": 2,
    "mamba_headdim": 32,
    "n_groups": 2,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": 32,
    # Tables of embeddings by something else than tokens.
    "encoder_hash_byte_group_vocab": VOCAB_SIZE,
    "shape_vocab_size": VOCAB_SIZE,
    "pronunciation_vocab_size": VOCAB_SIZE,
    # Encoders of images.
    "mm_tokens_per_image": 4,
    "depth": 2,
    "out_hidden_size": 32,
    "projection_hidden_size": 32,
    "mm_embed_dim": 32,
    "mm_posemb_size": 16,
    "output_proj_dims": 32,
    "projector_patch_to_query_dict": {16: 4},
    # Per-layer embeddings of the Gemma 3n/4 line.
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 0,
}
_PATCHES = 4
"""Patches along a side of a tiny image."""
_TILES = 3
"""Tiles of a tiny image of `image_grid_pinpoints`: at most two, and the whole."""
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings that make `config` tiny and keep its features; `config` is not changed.

    Returns:
        Keyword arguments for the same configuration class: few layers (of every kind of the
        original), few heads and experts, windows of 8 tokens, rotary scaling past 16 tokens, no
        dropout. Nested configurations (of attention, or of an encoder) are shrunk as well.
    """
    original = config.to_dict()
    settings = {
        _stored_name(config, name): value
        for name, value in _SIZES.items()
        if _stored_name(config, name) in original
    }
    for name, value in original.items():
        is_rate = "dropout" in name or name.endswith(("pdrop", "drop_path_rate", "jitter_noise"))
        if is_rate and isinstance(value, (int, float)) and not isinstance(value, bool):
            settings[name] = type(value)(0)
        if name in ("sliding_window", "attention_chunk_size") and isinstance(value, int):
            settings[name] = min(value, _WINDOW_TOKENS)
        if name == "num_experts_per_tok" and value == 1:
            # Some routers support no other number.
            settings[name] = 1
        nested = vars(config).get(name)
        if isinstance(nested, PreTrainedConfig):
            stated = {key: item for key, item in nested.to_diff_dict().items() if item != ""}
            settings[name] = {**_without_bookkeeping(stated), **shrink(nested)}
            if "vocab_size" in settings[name] and "pad_token_id" in settings[name]:
                # Multimodal models embed it in place of image tokens.
                settings[name]["pad_token_id"] = 0
    settings |= _shrink_images(original, settings)
    for name in _TOKEN_IDS:
        if name in original:
            settings[name] = None if _optional(config, name) else 0
    settings |= _shrink_heads(original)
    settings |= _shrink_layers(original, getattr(config, "num_hidden_layers", None))
    if indexers := settings.get("indexer_types"):
        settings["indexer_types"] = ["full", *indexers[1:]]  # a first layer has none to share
    rope = original.get("rope_parameters")
    if isinstance(rope, dict):
        settings["rope_parameters"] = _shrink_rope(rope)
    return settings


def _first_of(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) else value


def _shrink_images(original: Mapping[str, Any], shrunk: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of images, and the layers of their encoder that are read."""
    settings: dict[str, Any] = {}
    if original.get("patch_size") and original.get("image_size"):
        sides = original["image_size"], original["patch_size"]
        several = isinstance(sides[0], (list, tuple))
        side = _PATCHES * _first_of(sides[1])
        settings["image_size"] = [side] * len(sides[0]) if several else side
    if pinpoints := original.get("image_grid_pinpoints"):
        # Sizes of images that are cut into tiles, each of which the encoder takes as an image.
        before, after = (config["vision_config"]["image_size"] for config in (original, shrunk))
        scaled = [[side * after // before for side in sides] for sides in pinpoints]
        settings["image_grid_pinpoints"] = scaled
    for name in ("vision_feature_layer", "vision_feature_layers"):  # the latter before 5.24
        if isinstance(layers := original.get(name), (list, tuple)):
            settings[name] = [-2] * len(layers)
    return settings


def _shrink_heads(original: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if "head_dim" in original:
        # In latent attention it may be the size of the rotary part or of the whole head.
        both = (original["head_dim"] or 0) > (original.get("qk_rope_head_dim") or math.inf)
        settings["head_dim"] = 2 * _HEAD_SIZE if both else _HEAD_SIZE
    if "expand" in original and "num_heads" in original:
        settings["num_heads"] = 8  # of 8 each: twice the width
    # Latent attention has a key for each head, and such adapters add as much to keys as to queries.
    if "kv_lora_rank" in original or original.get("use_shared_attention_adapter"):
        settings["num_key_value_heads"] = _SIZES["num_attention_heads"]
    return settings


def _without_bookkeeping(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a configuration's class takes as arguments."""
    bookkeeping = ("architectures", "transformers_version", "dtype", "torch_dtype")
    return {name: value for name, value in stated.items() if name not in bookkeeping}


def _stored_name(config: PreTrainedConfig, name: str) -> str:
    """The field behind an alias such as GPT-2's `hidden_size`; setting both would conflict."""
    return config.attribute_map.get(name, name)


def _optional(config: PreTrainedConfig, name: str) -> bool:
    """Whether a field may be None; configurations that are no dataclasses take anything."""
    field = getattr(type(config), "__dataclass_fields__", {}).get(name)
    return field is None or "None" in str(field.type)


def _shrink_layers(original: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """Per-layer settings of one layer of each kind, and of at least three layers.

    Layers that differ in any per-layer list or override are of different kinds. The kinds keep
    their order, and the last layer keeps its kind, which some families require.
    """
    if not layers:
        return {}
    lists = _per_layer(original, layers)
    own = {int(key): value for key, value in (original.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}
    described = ""
    for layer in range(layers):
        described = repr([values[layer] for values in lists.values()] + [own.get(layer)])
        kinds.setdefault(described, layer)
    last = list(kinds).index(described)
    first_of_kind = list(kinds.values())[:_MOST_KINDS]
    count = max(_LAYERS, len(first_of_kind))
    shift = min(last, len(first_of_kind) - 1) - (count - 1)
    chosen = [first_of_kind[(index + shift) % len(first_of_kind)] for index in range(count)]
    settings: dict[str, Any] = {"num_hidden_layers": count} if count > _LAYERS else {}
    for name, values in lists.items():
        same = name in _SIZES
        chosen_values = [_SIZES[name] if same else values[layer] for layer in chosen]
        settings[name] = _as_stored(name, chosen_values)
    if "per_layer_config" in original:  # an empty one is not what a class puts in its place
        settings["per_layer_config"] = {
            index: _shrink_own(own[layer]) for index, layer in enumerate(chosen) if layer in own
        }
    return settings


def _resized(settings: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Per-layer settings for another number of layers, of which the last keeps its kind."""
    usual = settings.get("num_hidden_layers", _LAYERS)
    lists = _per_layer(settings, usual)
    resized: dict[str, Any] = {
        name: _as_stored(name, [values[at % usual] for at in range(-layers, 0)])
        for name, values in lists.items()
    }
    if own := settings.get("per_layer_config"):
        resized["per_layer_config"] = {at: each for at, each in own.items() if at < layers}
    return resized


def _per_layer(original: Mapping[str, Any], layers: int | None) -> dict[str, list[Any]]:
    """Settings that are lists with a value for each layer; for lists of layers, who is in them."""
    found: dict[str, list[Any]] = {}
    for name, value in original.items():
        if isinstance(value, list) and name.endswith(_LAYER_NUMBERS):
            found[name] = [layer in value for layer in range(layers or 0)]
        elif isinstance(value, list) and len(value) == layers and not name.endswith(_INDEX_LISTS):
            found[name] = value
    return found


def _as_stored(name: str, values: list[Any]) -> list[Any]:
    """A setting of `_per_layer` as a configuration has it."""
    if name.endswith(_LAYER_NUMBERS):
        return [layer for layer, is_in in enumerate(values) if is_in]
    return values


def _shrink_own(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """One layer's own settings: heads twice as large as in others, and half as many K/V heads."""
    sizes = {**_SIZES, "head_dim": 2 * _HEAD_SIZE, "num_key_value_heads": 1}
    if "kv_lora_rank" in overrides:
        sizes["num_key_value_heads"] = _SIZES["num_attention_heads"]
    return {name: sizes.get(name, value) for name, value in overrides.items()}


def _shrink_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters for heads of 8 elements and an original length of 16 tokens."""
    shrunk: dict[str, Any] = {}
    pairs = int(_HEAD_SIZE * rope.get("partial_rotary_factor", 1.0)) // 2
    for name, value in rope.items():
        if isinstance(value, Mapping):
            shrunk[name] = _shrink_rope(value)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            shrunk[name] = [value[index * len(value) // pairs] for index in range(pairs)]
        elif name == "mrope_section" and isinstance(value, list):
            edges = [index * pairs // len(value) for index in range(len(value) + 1)]
            shrunk[name] = [stop - start for start, stop in pairwise(edges)]
        elif name == "original_max_position_embeddings":
            shrunk[name] = _ORIGINAL_TOKENS
        else:
            shrunk[name] = value
    return shrunk


def _check_causal(config: PreTrainedConfig) -> None:
    if auto_class_of(config) is None or config.is_encoder_decoder:
        raise ConfigError(
            f"model type {config.model_type!r} has no causal language model in Transformers;"
            " only decoder-only causal language models can be fine-tuned"
        )


def shrunk_config(
    config: PreTrainedConfig, model_class: type[PreTrainedModel] | None = None
) -> PreTrainedConfig:
    """A tiny configuration with the features of `decoder_config(config)`; see `shrink`.

    For a `model_class` with those of `config` itself.

    Raises:
        ConfigError: the shrunk settings do not fit together, or `config` counts more than
            `MAX_MODULES` layers or experts.
    """
    if model_class is None:
        config = decoder_config(config)
        _check_causal(config)
    check_sizes(config.to_dict())
    stated = _without_bookkeeping(config.to_diff_dict())
    stated.pop("model_type", None)
    small = shrink(config)
    text = config.get_text_config(decoder=True)
    owner = small if text is config else small.get("text_config", {})
    if getattr(text, "output_router_logits", False):
        owner["output_router_logits"] = True  # it adds a loss
    try:
        return AutoConfig.for_model(
            config.model_type, **_not_derived(config, stated, small), **small
        )
    except BUILD_ERRORS as error:
        raise _not_buildable(config.model_type, error) from error


def _not_derived(
    config: PreTrainedConfig, stated: Mapping[str, Any], small: Mapping[str, Any]
) -> dict[str, Any]:
    """Of settings that `config` states and `small` does not, those that the class does not derive.

    Zamba 2's stores sizes that follow from others, and would take them back as they were.
    """
    stated = {name: value for name, value in stated.items() if name not in small}
    fields = type(config).__dataclass_fields__.keys()
    if type(config).__module__.partition(".")[0] != "transformers" or stated.keys() <= fields:
        return stated
    taken = {name: value for name, value in stated.items() if name in fields}
    built = AutoConfig.for_model(config.model_type, **taken, **small)
    return {name: v for name, v in stated.items() if name in taken or not hasattr(built, name)}


def tiny_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """The tiny configuration of a family.

    If a multimodal type has no language model as a whole, it is that of its text decoder.

    Args:
        name: an entry of `tiny_families.FAMILIES`, or any Transformers `model_type`.
        **overrides: fields set last.

    Raises:
        ConfigError: Transformers has no such model type.
    """
    key = repr((name, overrides))
    if key not in _configs:
        _configs[key] = _make_config(name, overrides)
    return copy.deepcopy(_configs[key])


_configs: dict[str, PreTrainedConfig] = {}
"""Configurations made so far; making one takes as long as building its model."""


def _make_config(name: str, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    family = FAMILIES.get(name) or UNLISTED.get(name) or TinyFamily(model_type=name)
    if family.model_type not in CONFIG_MAPPING_NAMES:
        raise ConfigError(
            f"no model type of the installed Transformers is called {family.model_type!r}; give one"
            " such as 'llama' or 'qwen3', or the path of a model or of a config.json"
        )
    try:
        default = AutoConfig.for_model(family.model_type)
    except BUILD_ERRORS as error:
        raise _not_buildable(family.model_type, error) from error
    decoder = decoder_config(default)
    if decoder is not default:
        return _make_config(decoder.model_type, overrides)
    _check_causal(default)
    try:
        settings = shrink(default)
        if isinstance(getattr(default, "is_decoder", None), bool):
            # Families that also have bidirectional models.
            settings["is_decoder"] = True
        for changes in (family.overrides, overrides):
            if changes is overrides and "num_hidden_layers" in changes:
                settings |= _resized(settings, changes["num_hidden_layers"])
            for field, value in changes.items():
                stored = _stored_name(default, field)
                if isinstance(vars(default).get(stored), PreTrainedConfig):
                    value = {**settings[stored], **value}
                settings[stored] = value
        return AutoConfig.for_model(family.model_type, **settings)
    except BUILD_ERRORS as error:
        raise _not_buildable(family.model_type, error) from error


def build_tiny_model(
    model_type: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **overrides: Any,
) -> PreTrainedModel:
    """A tiny random model of a family, in training mode, on the CPU.

    Args:
        model_type: an entry of `tiny_families.FAMILIES`, or any Transformers `model_type`.
        seed: seed of the weights; the global random state is not changed.
        dtype: dtype of the weights. They are drawn in float64 and rounded, so that models of two
            dtypes from one seed are the same model.
        **overrides: configuration fields set last.

    Raises:
        ConfigError: Transformers has no such model type, or no causal language model for it.
    """
    if torch.is_inference_mode_enabled() or _get_current_dispatch_mode() is not None:
        return model_from_config(tiny_config(model_type, **overrides), seed=seed, dtype=dtype)
    key = (repr((model_type, overrides)), seed, dtype, torch.get_default_dtype())
    code, kept = _built.pop(key, ((), None))
    if kept is None or not _is_same(code, _code_of(kept)):
        kept = model_from_config(tiny_config(model_type, **overrides), seed=seed, dtype=dtype)
        code = _code_of(kept)
    _built[key] = code, kept
    if len(_built) > _MOST_BUILT:
        del _built[next(iter(_built))]
    return copy_of(kept)


def build_tiny_classifier(
    model_type: str, kind: str, *, dtype: torch.dtype = torch.float64, **overrides: Any
) -> PreTrainedModel:
    """A tiny random classifier of a family; arguments as for `build_tiny_model`.

    `kind` is one of `CLASSIFIERS`; it tells three classes apart unless `num_labels` is given.

    Raises:
        ConfigError: Transformers has no such classifier of this type, or no tiny one can be built.
    """
    config = tiny_config(model_type, **{"num_labels": 3, **overrides})
    return model_from_config(config, model_class=classifier_class(config, kind), dtype=dtype)


def classifier_class(config: PreTrainedConfig, kind: str) -> type[PreTrainedModel]:
    """Transformers' class of a kind of `CLASSIFIERS` for a configuration.

    Raises:
        ConfigError: there is none.
    """
    classes = getattr(transformers, f"AutoModel{kind}")._model_mapping
    if type(config) not in classes:
        raise ConfigError(f"Transformers has no {kind} of model type {config.model_type!r}")
    found: type[PreTrainedModel] = classes[type(config)]
    return found


_MOST_BUILT = 32

_built: dict[tuple[Any, ...], tuple[Sequence[object], PreTrainedModel]] = {}
"""Models used last, with their code; a copy takes a fifth of the time that building one takes."""


def _code_of(model: nn.Module) -> Sequence[object]:
    """All that the modules with the code of `model` define; what replaces a part is another one."""
    names = sorted({type(module).__module__ for module in model.modules()})
    modules = [sys.modules[name] for name in names if name in sys.modules]
    values = [value for module in modules for value in vars(module).values()]
    return [*values, *(vars(value).get("__init__") for value in values if isinstance(value, type))]


def _is_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def copy_of(model: ModuleT) -> ModuleT:
    """A deep copy, made in half the time or less by copying the modules' tables directly."""
    modules = list(model.modules())
    if any(map(_is_copied_in_its_own_way, {type(module) for module in modules})):
        return copy.deepcopy(model)
    twins: dict[int, Any] = {id(module): type(module).__new__(type(module)) for module in modules}
    for module in modules:
        state = module.__getstate__()
        for name, value in state.items():
            kind = type(value)
            if kind in _TABLES and not value:
                state[name] = kind()
            elif kind not in _ATOMS:
                state[name] = copy.deepcopy(value, twins)
        twins[id(module)].__setstate__(state)
    return twins[id(model)]


def _is_copied_in_its_own_way(kind: type[nn.Module]) -> bool:
    methods = ("__reduce__", "__reduce_ex__", "__getstate__")
    is_usual = all(getattr(kind, name) is getattr(nn.Module, name) for name in methods)
    return not is_usual or hasattr(kind, "__deepcopy__")


_ATOMS = (bool, int, float, str, type(None))
_TABLES = (dict, set, OrderedDict)


def model_from_config(
    config: PreTrainedConfig,
    *,
    model_class: type[PreTrainedModel] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> PreTrainedModel:
    """A random causal language model of `config`; see `build_tiny_model`.

    Args:
        config: its configuration.
        model_class: its class; None takes that of Transformers' auto classes.
        seed: seed of the weights.
        dtype: dtype of the weights.

    Raises:
        ConfigError: there is no such model, or its weights would take more than `LARGEST_BYTES`.
    """
    _check_bytes(config, model_class)
    # Not on what `torch.set_default_device` says, whose random numbers are others.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` seeds every device
        model = _construct(config, model_class)
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0  # classifiers have one that no setting names
            if isinstance(part, PreTrainedModel) and part._can_set_experts_implementation():
                # Grouped matrix products exist in few dtypes; the plain loop over experts in all.
                part.set_experts_implementation("eager")
        randomise(model)
    cast("nn.Module", model).to(dtype).train()
    return model


def weights_bytes(
    config: PreTrainedConfig, model_class: type[PreTrainedModel] | None = None
) -> int:
    """Bytes of the weights of a model of `config` in float64, counted without memory.

    Raises:
        ConfigError: there is no such model, or it has too many layers.
    """
    return _bytes_of(_without_memory(config, model_class))


_counted: set[tuple[type, type | None, str]] = set()
"""Configurations whose models were found to be small."""


def _check_bytes(
    config: PreTrainedConfig, model_class: type[PreTrainedModel] | None = None
) -> None:
    key = (type(config), model_class, str(config.to_dict()))
    if key in _counted:
        return
    tensors = _without_memory(config, model_class)
    total_bytes = _bytes_of(tensors)
    if total_bytes <= LARGEST_BYTES:
        _counted.add(key)
        return
    name, largest = max(tensors, key=lambda item: item[1].numel())
    sizes = {size for size in largest.shape if size >= MAX_MODULES} or set(largest.shape)
    causes = ", ".join(
        f"{setting}={value}"
        for setting, value in iter_settings(config.to_dict())
        if isinstance(value, int) and value in sizes
    )
    shape = " x ".join(map(str, largest.shape))
    raise ConfigError(
        f"a tiny {config.model_type!r} would take {format_bytes(total_bytes)} of weights in"
        f" float64. Allowed: {format_bytes(LARGEST_BYTES)}. The largest is {name} ({shape}), by"
        f" {causes or 'settings that are no numbers'}. Remedy: save a small model of it and give"
        " its folder"
    )


def _without_memory(
    config: PreTrainedConfig, model_class: type[PreTrainedModel] | None = None
) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a model of `config` on the meta device."""
    check_sizes(config.to_dict())
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = _construct(config, model_class)
    return [*model.named_parameters(), *model.named_buffers()]


def _bytes_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> int:
    return sum(tensor.numel() for _, tensor in tensors) * torch.float64.itemsize


def _construct(
    config: PreTrainedConfig, model_class: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """The causal language model of `config` in float64, on the device of the context."""
    if model_class is None:
        _check_causal(config)
    try:
        if model_class is not None:
            return model_class._from_config(config, dtype=torch.float64)
        model: PreTrainedModel = auto_class_of(config).from_config(config, dtype=torch.float64)
        return model
    except BUILD_ERRORS as error:
        raise _not_buildable(config.model_type, error) from error


def _not_buildable(model_type: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"no tiny {model_type!r} can be built from shrunk settings ({first_line(error)}); save a"
        " small model of it and give its folder"
    )


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Draw all parameters (and routing biases) from the global random state.

    Matrices have a standard deviation of 1/sqrt(fan in), so that activations keep unit size and
    attention is far from uniform; vectors get noise of 0.3 added to their initial values.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn_like(parameter)
        if "embed" in name and parameter.dim() == 2:
            parameter.copy_(0.3 * noise)
        elif parameter.dim() >= 2:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(0.3 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn_like(buffer))


def make_batch(
    *,
    rows: int = 1,
    tokens: int = 23,
    vocab_size: int = VOCAB_SIZE,
    padding: Sequence[int] = (),
    left_padding: Sequence[int] = (),
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """A random batch of `[rows, tokens]` ids and labels; a tenth of the labels is masked.

    Args:
        rows: number of rows.
        tokens: length of each row, padding included.
        vocab_size: upper limit of ids, exclusive.
        padding: number of padding tokens at the end of each row; if given, the batch has an
            `attention_mask`, and padding has no labels.
        left_padding: number of padding tokens at the beginning of each row; the first real token,
            which padding would predict, has no label either.
        seed: seed of ids and masks; the global random state is not changed.
    """
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(seed)
        input_ids = torch.randint(0, vocab_size, (rows, tokens), generator=generator)
        hidden = torch.rand((rows, tokens), generator=generator) < 0.1
        batch = {"input_ids": input_ids, "labels": input_ids.masked_fill(hidden, -100)}
        if padding or left_padding:
            at = torch.arange(tokens)[None, :]
            end = tokens - torch.tensor(padding or [0] * rows)[:, None]
            start = torch.tensor(left_padding or [0] * rows)[:, None]
            mask = (at < end) & (at >= start)
            batch["attention_mask"] = mask.long()
            predicted = mask & ((at > start) | (start == 0))
            batch["labels"] = batch["labels"].masked_fill(~predicted, -100)
    return batch


def add_images(
    model: PreTrainedModel, batch: Mapping[str, torch.Tensor], *, images: int = 2, seed: int = 0
) -> dict[str, Any]:
    """A batch of `make_batch` with random images, one after the other in turn in its rows.

    Each has its tokens, of a type of their own in `model.config`, which have no labels. They begin
    behind the first token, and there are five tokens of text between two images of a row.

    Raises:
        ConfigError: how the model takes images was not found out, or rows are too short for them.
    """
    pixels, tokens = _find_pixels(model, images, seed)
    ids, labels = batch["input_ids"].clone(), batch["labels"].clone()
    if len(ids[0]) < (need := 1 + -(-images // len(ids)) * (tokens + 5)):
        raise ConfigError(f"tokens is {len(ids[0])}; {images} images of {tokens} need {need}")
    for name in ("image_token_id", "image_token_index", "media_placeholder_token_id"):
        if hasattr(model.config, name):
            setattr(model.config, name, IMAGE_TOKEN)
    ids[ids == IMAGE_TOKEN] += 1
    # Not in padding, which may be on the left.
    mask = batch.get("attention_mask", torch.ones_like(ids))
    begins = mask.argmax(1).tolist()
    for image in range(images):
        row, at = image % len(ids), image // len(ids)
        begin = begins[row] + 1 + at * (tokens + 5)
        ids[row, begin : begin + tokens] = IMAGE_TOKEN
        labels[row, begin : begin + tokens] = -100
    with_types = {**batch, **pixels, "input_ids": ids, "labels": labels}
    # By the names that the model's processor gives them, which its forward takes.
    for name in inspect.signature(model.base_model.forward).parameters:
        if name.endswith("token_type_ids"):
            with_types[name] = (ids == IMAGE_TOKEN).long()
    return with_types


IMAGE_TOKEN = 3
"""Stands for a part of an image in the batches of `add_images`."""


def image_batch(model: PreTrainedModel, *, seed: int = 0) -> dict[str, Any]:
    """Two rows with three images, of the fewest tokens that hold them; the last row is padded.

    Raises:
        ConfigError: as `add_images`.
    """
    tokens = 1 + 2 * (_find_pixels(model, 3, seed)[1] + 5)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    sizes: dict[str, Any] = {"rows": 2, "tokens": tokens, "vocab_size": vocab_size}
    return add_images(
        model, make_batch(**sizes, padding=(0, tokens // 3), seed=seed), images=3, seed=seed
    )


def takes_images(model: PreTrainedModel) -> bool:
    """Whether a model has an encoder of images of its own."""
    return any("pixel" in name for name in inspect.signature(model.base_model.forward).parameters)


def _find_pixels(
    model: PreTrainedModel, images: int, seed: int
) -> tuple[dict[str, torch.Tensor], int]:
    """Images in the first form that the model's encoder takes, and tokens for each of them."""
    base: Any = model.base_model
    if not (takes_images(model) and hasattr(base, "get_image_features")):
        raise ConfigError(f"{type(model).__name__} has no encoder of images that is known")
    taken = inspect.signature(base.get_image_features).parameters
    for form in _image_forms(model, taken, images, torch.Generator().manual_seed(seed)):
        needed = {name for name in taken if taken[name].default is inspect.Parameter.empty}
        for names in (needed | {"pixel_values"}, taken):
            given = {name: tensor for name, tensor in form.items() if name in names}
            # Other models' forms raise any error.
            with contextlib.suppress(Exception), torch.no_grad():
                found = base.get_image_features(**given, return_dict=True)
                pooled = getattr(found, "pooler_output", found)
                found = found.last_hidden_state if pooled is None else pooled
                found = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
                tokens, rest = divmod(found.numel() // found.shape[-1], images)
                if not rest:
                    return given, tokens
    raise ConfigError(f"{type(model).__name__} takes images in no form that is known")


def _image_forms(
    model: PreTrainedModel, taken: Container[str], images: int, generator: torch.Generator
) -> Iterator[dict[str, torch.Tensor]]:
    """Images of one size as models' processors give them, with all that may go with them."""
    vision = getattr(model.config, "vision_config", None) or model.config

    def setting(names: Sequence[str], default: int) -> int:
        return next((first for n in names if (first := _first_of(getattr(vision, n, 0)))), default)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(model.dtype)

    patch = setting(("model_patch_size", "patch_size"), _PATCHES)
    side = setting(("image_size",), 2 * _PATCHES * patch)
    merges = ("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size")
    merged = setting(merges, 2)
    frames = setting(("temporal_patch_size", "patch_temporal"), 1)
    across = 2 * merged
    count = across**2
    places = torch.cartesian_prod(torch.arange(across), torch.arange(across))
    grid = torch.full((images, 2), across)
    high = getattr(getattr(model.config, "high_res_vision_config", None), "image_size", side)
    known = {
        "image_grid_thw": F.pad(grid, (1, 0), value=1),
        **dict.fromkeys(("image_grid_hw", "spatial_shapes", "target_sizes"), grid),
        "image_merge_sizes": torch.full((images,), merged),
        "image_position_ids": places.repeat(images, 1, 1),
        "image_sizes": torch.full((images, 2), side),
        "high_res_pixel_values": random(images, 3, high, high),
    }
    beside = {name: tensor for name, tensor in known.items() if name in taken}
    # Patches of all images or of each, in a line, or whole images, or tiles of each.
    of_all, of_each = (images * count, 3 * frames * patch**2), (images, count, 3 * patch**2)
    shapes: list[tuple[int, ...]]
    if "image_grid_thw" in taken or "image_grid_hw" in taken:
        shapes = [of_all, (images * count, 3, patch, patch)]
    elif "spatial_shapes" in taken or "image_position_ids" in taken:
        shapes = [of_each]
    elif "target_sizes" in taken:
        shapes = [(1, 3, patch, images * count * patch)]
    else:
        whole = (3, side, side)
        shapes = [(images, *whole), (1, images, *whole), (images, _TILES, *whole), of_each]
    for shape in shapes:
        mask = torch.ones(shape[:2], dtype=torch.bool)
        yield {"pixel_values": random(*shape), "pixel_attention_mask": mask, **beside}


def batch_for(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A batch of `make_batch` with labels of the kind that `model` takes.

    Language models keep theirs. Those of classifiers are made of them: of rows, tokens or spans. A
    classifier without a padding token, which takes one row at a time, gets one.
    """
    labels = batch["labels"]
    kind, classes = classifier_kind(model), getattr(model.config, "num_labels", 2)
    if kind is None:
        return dict(batch)
    if kind == "ForTokenClassification":
        return {**batch, "labels": torch.where(labels == -100, labels, labels % classes)}
    if kind == "ForQuestionAnswering":
        others = {name: value for name, value in batch.items() if name != "labels"}
        places = torch.arange(len(labels)) % labels.shape[1]
        return {**others, "start_positions": places, "end_positions": places + 1}
    text = model.config.get_text_config(decoder=True)
    if text.pad_token_id is None:
        text.pad_token_id = 0
    if "attention_mask" in batch:
        ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, text.pad_token_id)
        batch = {**batch, "input_ids": ids}
    rows = torch.arange(len(labels)) % classes
    several = model.config.problem_type == "multi_label_classification"
    if several:
        return {**batch, "labels": F.one_hot(rows, classes).to(model.dtype)}
    is_number = classes == 1 or model.config.problem_type == "regression"
    return {**batch, "labels": rows.to(model.dtype) + 0.5 if is_number else rows}


def add_lora(model: PreTrainedModel, *, rank: int = 4, seed: int = 0) -> nn.Module:
    """Wrap `model` by PEFT with LoRA on every linear layer, with random adapters.

    PEFT initialises one factor to zero, so that the other one's gradient would be zero. It cannot
    wrap routers that are linear layers and return more than one tensor (Llama 4's).

    Raises:
        ConfigError: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("LoRA needs PEFT, which is not installed: pip install peft") from error
    dtype = model.dtype
    routers = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "Router" in type(module).__name__
    }
    settings = LoraConfig(
        r=rank,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules="all-linear",
        exclude_modules=sorted(routers) or None,
        bias="none",
    )
    with suppress_peft_warnings():
        wrapped = get_peft_model(model, settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` seeds every device
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return wrapped.to(dtype).train()
