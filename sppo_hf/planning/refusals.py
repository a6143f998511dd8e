"""What a config alone tells of models that cannot be run chunk by chunk.

The engine has the last word: it sees the loaded model, and refuses more than a file can tell. This
list lets `sppo estimate` refuse the well-known ones before a byte of them is downloaded. Knows
nothing of torch; tests hold the names against what Transformers says of its classes.
"""

from __future__ import annotations

from typing import cast

from sppo_hf.errors import UnsupportedModelError
from sppo_hf.planning.reader import family, find_int, text_config
from sppo_hf.rules import refuse, show

RECURRENT = frozenset(
    (
        "bailing_hybrid bamba deepseek_v4 falcon_h1 falcon_mamba granitemoehybrid jamba "
        "kimi_linear mamba mamba2 nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text "
        "qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 "
        "zaya"
    ).split()
)
"""Families that carry a state from token to token beside keys and values."""

OWN_ATTENTION = frozenset(
    (
        "big_bird biogpt bloom blt codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj "
        "megatron-bert mpt openai-gpt reformer rembert roformer stablelm trocr xglm xlm xlnet"
    ).split()
)
"""Families whose attention does not go through Transformers' AttentionInterface."""

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
        ("mllama", "mllama_text_model"), "its class names no base model beside the head"
    ),
    "doge": "its own code reads its attention mask, and there is none while chunks run",
    "gemma3n_text": "a tiny random gemma3n_text model was not exact when it was tried",
}
"""Families that are refused for a reason of their own, and the reason."""

MULTIMODAL_FIELDS = (
    *("text_config", "vision_config", "audio_config", "vq_config", "codec_config"),
    *("thinker_config", "perceiver_config", "protein_encoder_config"),
)
"""Configurations inside another one that say that text is not all a model reads."""

LOADED_AS_TEXT = frozenset("dots3_note emu3 llama4 mllama qwen3_5 qwen3_5_moe qwen4_exp".split())
"""Types with such a configuration of which AutoModelForCausalLM loads the text decoder alone."""

READS_TEXT = frozenset(("gemma4_assistant", "gemma4_unified_assistant", "phi4_multimodal"))
"""Types with such a configuration whose class is one decoder, like any other without images."""

TEXT_DECODERS = frozenset(
    (
        "aria_text deepseek_v3 exaone4 gemma gemma3_text gemma4_text gemma4_unified_text granite "
        "hyperclovax llama ministral ministral3 mistral persimmon qwen2 qwen3"
    ).split()
)
"""Types of text decoders that are exact as causal language models of their own.

Cohere 2 is not among them: inside a multimodal model its logits are not scaled.
"""

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Entries of `layer_types` that are softmax attention over all earlier keys or a window of them."""

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
        find_int(text_config(config), name)
    if family(config) not in LOADED_AS_TEXT:
        refuse_multimodal(config, f"Models of type {family(config)!r}")
    reason = _reason(config)
    if reason is not None:
        raise UnsupportedModelError(
            f"Models of type {show(family(config) or family(text_config(config)))} cannot be "
            f"trained chunk by chunk: {reason}. Train it without sppo_hf, or choose a family from "
            "the README's table (run `sppo check MODEL` to test one)."
        )


def is_multimodal(config: object) -> bool:
    """Whether a model with this very config has encoders of images or sound beside its decoder."""
    if getattr(config, "is_encoder_decoder", False) is True or family(config) in READS_TEXT:
        return False
    return any(getattr(config, field, None) is not None for field in MULTIMODAL_FIELDS)


def refuse_multimodal(config: object, name: str) -> None:
    """Refuses a multimodal model, and says how to train its text decoder alone if that works.

    Args:
        config: as for `check_config`.
        name: the model, for the message.

    Raises:
        UnsupportedModelError: it is multimodal.
    """
    if not is_multimodal(config):
        return
    text = family(text_config(config))
    if text in TEXT_DECODERS:
        remedy = (
            f"Remedy: train the text decoder ({text}) alone, which is exact on batches of text and "
            "shares the weights of the model that you loaded:\n"
            "    with torch.device('meta'):\n"
            "        text = AutoModelForCausalLM.from_config(model.config.get_text_config())\n"
            "    text.model, text.lm_head = model.get_decoder(), model.get_output_embeddings()\n"
            "text.save_pretrained(folder) writes a text-only checkpoint, which "
            "AutoModelForCausalLM and `sppo estimate` read."
        )
    else:
        remedy = (
            "Its text decoder cannot be taken out for sppo_hf. Remedy: start from a text-only "
            "checkpoint of a family in the README's table, or train without sppo_hf."
        )
    raise UnsupportedModelError(
        f"{name} cannot be trained chunk by chunk: multimodal, with images or sound beside text, "
        f"which is not supported. {remedy}"
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
    foreign = sorted(names - ATTENTION_LAYER_TYPES)
    if getattr(config, "is_encoder_decoder", False) is True:
        return "it is an encoder-decoder; only decoder-only models run chunk by chunk"
    if families & RECURRENT:
        return "it has recurrent layers, whose state would have to be carried between chunks"
    if foreign:
        seen = ", ".join(map(str, foreign[:5]))
        return f"it has layers of type {seen}; only softmax attention is exact"
    if families & OWN_ATTENTION:
        return "its attention bypasses Transformers' AttentionInterface, where chunks are joined"
    if find_int(text, "num_kv_shared_layers", least=0):
        return "some of its layers read the keys of another layer (num_kv_shared_layers)"
    return next((OTHER_FAMILIES[name] for name in families if name in OTHER_FAMILIES), None)
