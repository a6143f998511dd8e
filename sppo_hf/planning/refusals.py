"""What a config alone tells of models that cannot be run chunk by chunk.

The engine has the last word: it sees the loaded model, and refuses more than a file can tell. This
list lets `sppo estimate` refuse the well-known ones before a byte of them is downloaded. Knows
nothing of torch; tests hold the names against what Transformers says of its classes.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from sppo_hf.errors import UnsupportedModelError
from sppo_hf.planning.config_file import family, find_int, text_config
from sppo_hf.rules import refuse, show

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
    seconds.

    Args:
        name: the family, `model_type` of its config.
    """
    if name not in OWN_ATTENTION:
        return False
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return True
    module = name.replace("-", "_")
    path = Path(spec.origin).with_name("models") / module / f"modeling_{module}.py"
    if not path.is_file():
        return True
    return "_supports_attention_backend = True" not in path.read_text(encoding="utf-8")


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

ATTENTION_LAYER_TYPES = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention"}
)
"""Entries of `layer_types` that are softmax attention over earlier keys: all of them, a window, or
those of the query's own block; "attention" is what older files say for all."""


def indexer_reason(text: object) -> str | None:
    """Why sparse attention whose keys an indexer chooses (DeepSeek V3.2, GLM 5) is refused.

    Within `index_topk` tokens it would choose all keys; but its scores of all pairs, and the mask
    that it makes of them, are the family's own code, which computes with whole masks. A length at
    which it chooses at all needs the indexer's keys of all chunks before.

    Args:
        text: the decoder's config.
    """
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

_SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
)


def check_config(config: object) -> None:
    """Refuses a config whose family or layers are known not to run chunk by chunk.

    Args:
        config: of Transformers, or an object with the fields of a `config.json`.

    Raises:
        UnsupportedModelError: naming the reason and the remedy.
        ConfigError: a size is no number of anything.
    """
    for name in _SIZES:
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
    if foreign and indexed:
        return indexed
    if foreign:
        seen = ", ".join(map(str, foreign[:5]))
        return f"it has layers of type {seen}, which are not known to be exact"
    if any(bypasses_attention_interface(name) for name in families):
        return "its attention bypasses Transformers' AttentionInterface, where chunks are joined"
    return next((OTHER_FAMILIES[name] for name in families if name in OTHER_FAMILIES), None)
