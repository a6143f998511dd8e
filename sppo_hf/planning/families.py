"""What a Transformers config does not say about its family's modelling code.

One table, by `model_type`. It holds only what differs from the common case (two RMSNorms, a gated
MLP) and only numbers that estimates need; a family that is missing is taken for the common case.
Tests hold it against what autograd really saves.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """How a family's decoder layer is built, as far as FLOPs and saved bytes depend on it."""

    gated: bool = True
    """The MLP multiplies an activated gate with a second projection (SwiGLU, GeGLU)."""

    full_width_norms: int = 2
    """Norms over the residual width: 1 where attention and MLP share one, 4 around both."""

    head_norms: bool = False
    """Queries and keys are normalised too."""

    norm_float32_copies: int = 1
    """Float32 tensors that autograd saves per norm: RMSNorm's input."""

    norm_native_copies: int = 1
    """Tensors in the model's dtype that it saves per norm: the normalised value to be scaled."""

    mlp_copies: int = 4
    """Tensors of the intermediate width saved: gate, activated gate, up and their product."""


_COMMON = FamilyTraits()
# LayerNorm is one operation that saves its input; a plain MLP saves its activation's both ends.
_LAYER_NORM = FamilyTraits(gated=False, norm_float32_copies=0, norm_native_copies=1, mlp_copies=2)
# gelu_new is composed of elementwise operations, three of which save a tensor more.
_GPT2 = FamilyTraits(gated=False, norm_float32_copies=0, norm_native_copies=1, mlp_copies=5)
_GPTJ = FamilyTraits(
    gated=False, full_width_norms=1, norm_float32_copies=0, norm_native_copies=1, mlp_copies=5
)
_LAYER_NORM_PARALLEL = FamilyTraits(
    gated=False, full_width_norms=1, norm_float32_copies=0, norm_native_copies=1, mlp_copies=2
)
_COHERE = FamilyTraits(full_width_norms=1, norm_float32_copies=3, norm_native_copies=0)

_RMS_NORM_PLAIN = FamilyTraits(gated=False, mlp_copies=2)

FAMILIES: dict[str, FamilyTraits] = {
    "apertus": FamilyTraits(gated=False, head_norms=True, mlp_copies=2),
    "arcee": _RMS_NORM_PLAIN,
    "biogpt": _LAYER_NORM,
    "bloom": _LAYER_NORM,
    "codegen": _GPTJ,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "falcon": _LAYER_NORM_PARALLEL,
    "gemma": FamilyTraits(norm_float32_copies=2, norm_native_copies=0),
    "gemma2": FamilyTraits(full_width_norms=4, norm_float32_copies=2, norm_native_copies=0),
    "gemma3_text": FamilyTraits(
        full_width_norms=4, head_norms=True, norm_float32_copies=2, norm_native_copies=0
    ),
    "glm4": FamilyTraits(full_width_norms=4),
    "gpt2": _GPT2,
    "gpt_bigcode": _LAYER_NORM,
    "gpt_neo": _GPT2,
    "gpt_neox": _LAYER_NORM,
    # Clamps and the shifted product save three tensors more than SwiGLU.
    "gpt_oss": FamilyTraits(norm_float32_copies=2, norm_native_copies=0, mlp_copies=7),
    "gptj": _GPTJ,
    "mpt": _LAYER_NORM,
    "nanochat": FamilyTraits(gated=False, head_norms=True, mlp_copies=2),
    "nemotron": _RMS_NORM_PLAIN,
    "olmo2": FamilyTraits(head_norms=True, norm_float32_copies=2, norm_native_copies=0),
    "olmo3": FamilyTraits(head_norms=True, norm_float32_copies=2, norm_native_copies=0),
    "opt": _LAYER_NORM,
    "persimmon": _LAYER_NORM,
    "phi": _LAYER_NORM_PARALLEL,
    "qwen3": FamilyTraits(head_norms=True),
    "qwen3_moe": FamilyTraits(head_norms=True),
    "starcoder2": _LAYER_NORM,
}

# Families with a learned table of positions, which counts among their parameters.
LEARNED_POSITIONS = frozenset({"biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "opt"})


def traits_of(family: str) -> FamilyTraits:
    """Returns the traits of a `model_type`, the common case where it is not listed."""
    return FAMILIES.get(family, _COMMON)
