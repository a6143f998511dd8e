"""Reading a model's `config.json` without Transformers, and refusing models by it.

Commands that only plan a model with a known profile start in a fraction of the time that importing
Transformers takes. `check_config` refuses families that cannot run chunk by chunk before weights
are downloaded; the engine sees the loaded model and refuses more. Tests compare the lists here with
Transformers' classes.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.rules import refuse, show
from sppo_hf.text_files import MAX_JSON_BYTES, parse_json, read_text

# Sub-configurations of multimodal models; other nested objects (rotary parameters) stay dicts.
_ENCODERS = ("vision_config", "audio_config")
_SUB_CONFIGS = ("text_config", *_ENCODERS)

# Settings with an entry for each layer behind which a decoder adds features of images (DeepStack,
# arXiv 2406.04334).
_LAYERS_ADDED_TO = ("deepstack_visual_indexes", "deepstack_layer_map", "spatial_target_layers")

MAX_MODULES = 2048
"""Most layers, or experts of a layer, that a model may have where it is built.

Known models have a few hundred; each is a module that Python makes, also without memory.
"""

# Settings that count modules: num_hidden_layers, n_layer, encoder_layers, moe_num_experts, depth.
_COUNTS = re.compile(r"(?:^|_)(?:num|n)_\w*(?:layer|expert|block)|(?:^|_)layers$|^depth$")
_SIZES = re.compile(r"_(?:size|dim|heads|layers|experts)$|^n_(?:embd|head|layer)$|^d_model$")
_AT_LEAST_ONE = frozenset(
    "vocab_size hidden_size num_hidden_layers num_attention_heads n_embd n_layer n_head".split()
)


CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""Kinds of models whose head is no language model's, as Transformers names their losses."""


@cache
def shipped_models() -> dict[str, Path]:
    """Returns the configurations that come with the package, by name ("llama-3.1-8b")."""
    folder = Path(str(resources.files("sppo_hf.planning").joinpath("models")))
    return {file.stem: file for file in sorted(folder.glob("*.json"))}


def find_config(path: str | Path) -> Path:
    """Returns the file that a user means.

    Args:
        path: a `config.json`, a folder that holds one, or, where there is no such path, the name
            of a shipped configuration in any case ("Llama-3.1-8B").

    Returns:
        A path, which need not exist.
    """
    file = Path(os.path.expanduser(path))
    if not os.path.exists(file):
        return shipped_models().get(str(path).lower(), file)
    return file / "config.json" if os.path.isdir(file) else file


def load_config(path: str | Path) -> object:
    """Reads a model's configuration.

    Returns:
        A namespace of the file's fields; `text_config` and its like are namespaces too.

    Raises:
        ConfigError: there is no such file, it is no regular file, it has more than 4 MiB, it holds
            no JSON object, or it names no `model_type`.
    """
    return to_namespace(read_fields(path))


def read_fields(path: str | Path) -> dict[str, Any]:
    """Reads a model's configuration as the JSON object that it is.

    Raises:
        ConfigError: as `load_config`.
    """
    file = find_config(path)
    text = read_text(
        file,
        what="model configuration",
        max_bytes=MAX_JSON_BYTES,
        remedy="give a model's config.json, the folder that holds it (the model's page on the "
        f"Hugging Face hub has the file), or one of {', '.join(shipped_models())}",
    )
    try:
        fields: Any = parse_json(text)
    except ConfigError as error:
        raise ConfigError(
            f"{file} is not valid JSON: {error}. Fetch the file again, or mend it there"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{file} holds a JSON {type(fields).__name__} where a model's configuration is an "
            "object; give the config.json of a model"
        )
    known = cast("dict[str, Any]", fields)
    if not isinstance(known.get("model_type"), str):
        raise ConfigError(
            f"{file} names no model_type (it has {show(sorted(known)[:5]) if known else 'nothing'}"
            " ...), so it is not a Transformers configuration. Other JSON files beside it "
            "(generation_config.json, adapter_config.json) will not do; give config.json"
        )
    return known


def check_sizes(settings: Mapping[str, Any]) -> None:
    """Refuses sizes of which no model can be built: nonsense, and too many layers or experts.

    Raises:
        ConfigError: naming the setting.
    """
    remedy = "correct it in the configuration"
    for path, value in iter_settings(settings):
        name = path.rpartition(".")[2]
        if isinstance(value, str) and value.isdigit() and _SIZES.search(name):
            refuse(path, value, allowed="a whole number", remedy="take the quotation marks off")
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if value < 1 and name in _AT_LEAST_ONE:
            refuse(path, value, allowed="a whole number from 1", remedy=remedy)
        if _COUNTS.search(name) and value > MAX_MODULES:
            allowed = f"at most {MAX_MODULES:,} (known models have a few hundred)"
            refuse(path, value, allowed=allowed, remedy=remedy)


def iter_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting and its dotted name, those of nested configurations too."""
    for name, value in settings.items():
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from iter_settings(cast("Mapping[str, Any]", value), f"{prefix}{name}.")


def to_fields(config: object) -> dict[str, Any]:
    """Returns a copy of the JSON object that `load_config` made a namespace of."""
    return {
        name: to_fields(value) if isinstance(value, SimpleNamespace) else copy.deepcopy(value)
        for name, value in vars(config).items()
    }


def to_namespace(fields: dict[str, Any]) -> SimpleNamespace:
    """Makes of a configuration's JSON object what `load_config` returns."""
    for name in _SUB_CONFIGS:
        if isinstance(fields.get(name), dict):
            fields = {**fields, name: to_namespace(cast("dict[str, Any]", fields[name]))}
    return SimpleNamespace(**fields)


def text_config(config: object) -> object:
    """Returns the decoder's own config: multimodal configs keep it one level down."""
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else getattr(config, "text_config", None) or config


def has_encoders(config: object) -> bool:
    """Whether a model has encoders of images or sound, by the settings that these have."""
    return any(getattr(config, name, None) is not None for name in _ENCODERS)


def count_embedded(config: object) -> int:
    """Returns how many tensors as wide as its layers a decoder is given for rows with images.

    Embeddings of all tokens, and features that are added behind some layers, if settings name them.
    """
    owners = config, getattr(config, "vision_config", None)
    named = (getattr(owner, name, None) or () for owner in owners for name in _LAYERS_ADDED_TO)
    return 1 + sum(map(len, named))


def classifier_kind(config: object) -> str | None:
    """Returns which of `CLASSIFIERS` a config was saved with; None for other models."""
    names: list[str] = getattr(config, "architectures", None) or []
    return next((kind for kind in CLASSIFIERS for name in names if name.endswith(kind)), None)


def classifier_outputs(config: object) -> int | None:
    """Returns the outputs of the head if a config is a classifier's; None for other models."""
    kind = classifier_kind(config)
    if kind is None or kind == "ForQuestionAnswering":
        return kind and 2  # where a span begins and ends
    labels: dict[str, str] | None = getattr(config, "id2label", None)
    return len(labels) if labels else 2


def find_int(config: object, *names: str) -> int | None:
    """Returns the first of the named attributes that is not None; None where there is none.

    Raises:
        ConfigError: it is no whole number from 1 to below 2**31.
    """
    for name in names:
        value: object = getattr(config, name, None)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31:
            return value
        allowed = f"a whole number, 1 to {2**31 - 1:,}"
        refuse(name, value, allowed=allowed, remedy="mend the model's config.json")
    return None


def family(config: object) -> str:
    """Returns the config's `model_type`, or an empty string."""
    return str(getattr(config, "model_type", "") or "")


def rotary_limit_tokens(config: object) -> int | None:
    """Returns the longest sequence the position encoding was made for; None where it has no end."""
    limit = find_int(config, "max_position_embeddings", "n_positions", "n_ctx")
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if limit is None or not isinstance(scaling, dict):
        return limit
    rope = cast("dict[str, Any]", scaling)
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "dynamic":
        return None
    if kind == "llama3":
        return limit  # of the scaled positions; the factor is of low frequencies alone
    if isinstance(original, int) and isinstance(factor, (int, float)):
        # Also false of NaN.
        if not 0 < factor < 2**31 or not 0 < original < 2**31:
            seen = {"original_max_position_embeddings": original, "factor": factor}
            refuse(
                "rope_parameters",
                seen,
                allowed="numbers above zero and below 2**31",
                remedy="mend the model's config.json",
            )
        return max(limit, int(original * factor))
    return limit


_MAMBA1 = (
    "its recurrent layers (Mamba) begin every call with a state of zeros: the code of their scan "
    "takes none from the chunk before"
)
STATE_REASONS = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), _MAMBA1),
    "minimax": (
        "with a state from the chunk before, its lightning attention goes on token by token, and "
        "autograd would keep a state of every token"
    ),
    "recurrent_gemma": (
        "the convolutions of its recurrent layers begin every call of several tokens with zeros"
    ),
    "rwkv": "it writes each state in place over the one before, which backward needs",
    "xlstm": "it copies each state in place over the one before, which backward needs",
}
"""Recurrent families whose own code does not take a state from chunk to chunk, and why."""

OWN_STATE = (
    "it carries a state from token to token that its code does not hand over in a cache of "
    "convolutional and recurrent states, so it cannot go from chunk to chunk"
)
"""Why recurrent families that nobody has looked at are refused."""

OWN_ATTENTION = frozenset(
    (
        "big_bird biogpt bloom blt codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj "
        "megatron-bert mpt openai-gpt reformer rembert roformer stablelm trocr xglm xlm xlnet"
    ).split()
)
"""Families whose attention bypasses AttentionInterface, in this or an older Transformers."""


@functools.cache
def bypasses_attention_interface(name: str) -> bool:
    """Whether a family's attention does not go through AttentionInterface.

    One release of Transformers after another moves old families onto it (5.24: GPT-J and CodeGen),
    so of those that are known the installed model file is read, as text: importing it would take
    seconds. A family's name is the `model_type` of its config.
    """
    if name not in OWN_ATTENTION:
        return False
    code = _model_code(name)
    return code is None or "_supports_attention_backend = True" not in code


@functools.cache
def _model_code(name: str) -> str | None:
    """The installed model file of a family, as text; None if there is none."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    models = Path(spec.origin).with_name("models")
    # The type of a text decoder ends with "_text".
    modules = (name.replace("-", "_"), name.replace("-", "_").removesuffix("_text"))
    paths = (models / module / f"modeling_{module}.py" for module in modules)
    found = next((path for path in paths if path.is_file()), None)
    return None if found is None else found.read_text(encoding="utf-8")


NO_LAYERS = (
    "no list of decoder layers was found that derive from Transformers' GradientCheckpointingLayer"
)
"""Why older families, whose layers are written otherwise, are refused."""

OTHER_FAMILIES = {
    **dict.fromkeys(
        (
            "bert bert-generation camembert ctrl data2vec-text electra ernie hrm_text opt roberta "
            "roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod"
        ).split(),
        NO_LAYERS,
    ),
    **dict.fromkeys(("diffllama", "longcat_flash"), "one of its decoder layers attends twice"),
    **dict.fromkeys(
        ("deepseek_v4", "qwen4_exp", "qwen4_exp_text"),
        "an indexer or a compressor chooses the keys that its layers see",
    ),
    "doge": "its own code reads its attention mask, and there is none while chunks run",
}
"""Families that are refused for a reason of their own, and the reason."""

INDEXED_LAYER_TYPES = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""Entries of `layer_types` that are attention to keys that an indexer chooses; in older releases of
Transformers the latter."""

ATTENTION_LAYER_TYPES = INDEXED_LAYER_TYPES | {
    *("full_attention", "sliding_attention", "chunked_attention", "attention"),
}
"""Those that are softmax attention over earlier keys: chosen ones, all of them, a window, or those
of the query's own block; "attention" is what older files say for all."""


def indexer_reason(text: object) -> str | None:
    """Why sparse attention is refused whose keys an indexer chooses; None where it is not.

    DeepSeek V3.2's and those like it give attention the chosen keys' numbers as `indices`, which
    `sppo_hf.engine.indexer` takes. In others the model's own code makes a mask of its choice, or a
    choice of blocks. `text` is the decoder's config.
    """
    code = _model_code(family(text))
    if code is not None and "update_indexer" in code and re.search(r"\bindices=", code):
        sources: list[int] = getattr(text, "kv_source_layers", None) or []
        if sources != list(range(len(sources))):
            return (
                "some of its layers make keys of their own from what another layer has stored "
                f"(kv_source_layers={show(sources)})"
            )
        return None
    for field in ("index_topk", "index_topk_blocks", "indexer_budget"):
        value = getattr(text, field, None)
        if isinstance(value, int) and value > 0:
            return (
                f"an indexer of its own chooses the keys that a query reads ({field}={value}) by "
                "scores against all earlier tokens, and computes with its whole attention mask"
            )
    return None


STATE_LAYER_TYPES = frozenset({"linear_attention", "conv", "mamba"})
"""Those that carry a recurrent or convolutional state; "mamba" is what older files say."""

WITHOUT_ATTENTION = STATE_LAYER_TYPES | {"moe", "mlp"}
"""Those without keys and values: also layers that are an MLP alone."""

LAYER_TYPES = ATTENTION_LAYER_TYPES | WITHOUT_ATTENTION | {"hybrid", "hybrid_sliding"}
"""Those that may be exact: also layers with attention and a state, and those of an MLP alone."""

_SIZE_FIELDS = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
)


def check_config(config: object) -> None:
    """Refuses a config whose family or layers are known not to run chunk by chunk.

    Raises:
        UnsupportedModelError: naming the reason and the remedy.
        ConfigError: a size is no number of anything.
    """
    for name in _SIZE_FIELDS:
        size = cast("object", getattr(text_config(config), name, None))
        sizes: list[object] = [size]
        if isinstance(size, list) and name == "intermediate_size":
            # Gemma 3n has an MLP of another width in every layer.
            sizes = cast("list[object]", size)
        for one in sizes:
            find_int(SimpleNamespace(**{name: one}), name)
    reason = _reason(config)
    if reason is not None:
        raise UnsupportedModelError(
            f"Models of type {show(family(config) or family(text_config(config)))} cannot be "
            f"trained chunk by chunk: {reason}. Train it without sppo_hf, or choose a family of "
            "those that `sppo check --list` names (`sppo check MODEL` tests one)."
        )


def _reason(config: object) -> str | None:
    text = text_config(config)
    families = {family(config), family(text)}
    layer_types: object = getattr(text, "layer_types", None) or []
    if not isinstance(layer_types, list | tuple):
        allowed = "a list of texts, one for each layer"
        refuse("layer_types", layer_types, allowed=allowed, remedy="mend the model's config.json")
    names = {
        kind if isinstance(kind, str) else show(kind) for kind in cast("list[object]", layer_types)
    }
    foreign = sorted(names - LAYER_TYPES)
    if getattr(config, "is_encoder_decoder", False) is True:
        return "it is an encoder-decoder; only decoder-only models run chunk by chunk"
    if known := next((STATE_REASONS[name] for name in families if name in STATE_REASONS), None):
        return known
    indexed = indexer_reason(text)
    if indexed and (foreign or names & INDEXED_LAYER_TYPES):
        return indexed
    if foreign:
        seen = ", ".join(map(str, foreign[:5]))
        return f"it has layers of type {seen}, which are not known to be exact"
    if any(bypasses_attention_interface(name) for name in families):
        return "its attention bypasses Transformers' AttentionInterface, where chunks are joined"
    return next((OTHER_FAMILIES[name] for name in families if name in OTHER_FAMILIES), None)
