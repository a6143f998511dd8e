"""What a Transformers config does not say about its family's modelling code.

One table, by `model_type`. It holds only what differs from the common case (Llama: two RMSNorms,
separate projections, rotary embedding, SwiGLU), and only facts that FLOPs, parameters and saved
bytes depend on; a family that is missing is taken for the common case. Tests hold it against what
autograd really saves, family by family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["rms", "rms_wide", "rms_unit", "rms_power", "layer", "layer_unit", "centred"]
"""How a norm is computed.

"rms": RMSNorm in float32, scaled in the model's dtype (Llama). "rms_wide": scaled in float32 too.
"rms_unit": RMSNorm without a scale. "rms_power": "rms_wide" by a power, not by a reciprocal root.
"layer": torch's LayerNorm. "layer_unit": the same in float32 without a scale. "centred": LayerNorm
in float32, operation by operation.
"""

Placement = Literal["before", "after", "both", "shared", "parallel"]
"""Where norms stand: before attention and MLP, after both of them, before and after; "shared" and
"parallel" are layers whose attention and MLP read the same input, through one norm or one each."""

Router = Literal["softmax", "sigmoid", "softmax_of_chosen"]
"""Scores of experts: over all of them, or over the chosen ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearNames:
    """Names of a layer's linear modules, which LoRA's targets refer to; empty if not a module."""

    q: str = "q_proj"
    """Query projection."""

    k: str = "k_proj"
    """Key projection."""

    v: str = "v_proj"
    """Value projection."""

    qkv: str = "qkv_proj"
    """The three of them where fused."""

    out: str = "o_proj"
    """Attention's output projection."""

    gate: str = "gate_proj"
    """The MLP's gate."""

    up: str = "up_proj"
    """The MLP's first projection."""

    gate_up: str = "gate_up_proj"
    """Both of them where fused."""

    down: str = "down_proj"
    """The MLP's last projection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """How a family's decoder layer is built."""

    norm: Norm = "rms"
    """All its norms."""

    placement: Placement = "before"
    """Where they stand."""

    head_norm: Literal["", "head", "all"] = ""
    """Queries and keys are normalised too, head by head or over all heads at once."""

    head_norm_switch: str = ""
    """Config field that turns this on; always on without one."""

    value_norm: bool = False
    """Values are normalised too, without a scale."""

    inner_norms: bool = False
    """Norms stand before the last projection of attention and of the MLP."""

    rotary: bool = True
    """Queries and keys are rotated, which gives them memory of their own."""

    own_tables: float = 0
    """Rotary tables that each layer makes and saves for itself, in head sizes; they are shared by
    all layers elsewhere."""

    own_tables_wide: bool = False
    """These are float32."""

    heads_first: bool = False
    """Queries reach attention with heads before tokens in memory (parts were concatenated), so
    its output has to be copied for the output projection."""

    fused_qkv: bool = False
    """One matrix makes queries, keys and values."""

    attention_gate: Literal["", "head", "element"] = ""
    """Attention's output is multiplied by a gate, one per head or one per element."""

    attention_experts: bool = False
    """Queries and attention's output go through experts (JetMoE)."""

    gated: bool = True
    """The MLP multiplies an activated gate with a second projection (SwiGLU, GeGLU)."""

    fused_gate: bool = False
    """One matrix makes both."""

    activation: str = "silu"
    """Of the MLP, where the config names none."""

    clamped_experts: bool = False
    """Routed experts clamp and shift what they multiply (GPT-OSS)."""

    router: Router = "softmax"
    """How experts are scored."""

    router_wide: bool = False
    """The router's matrix product is in float32, for which its input is copied."""

    router_name: str = ""
    """The router's module where it is a linear one, for LoRA."""

    routing_wide: bool = False
    """Routing weights stay float32."""

    looped_experts: bool = False
    """Experts run in a loop of the family's own, not by Transformers' grouped products."""

    shared_gate: str = ""
    """The linear module whose output weights the shared expert."""

    shared_first: bool = False
    """Shared experts run before the routed ones."""

    names: LinearNames = LinearNames()
    """Names of its linear modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """What autograd saves of an activation, in tensors of its width."""

    saves_input: bool = True
    """Its input."""

    saves_result: bool = False
    """Its result, which what follows may save too."""

    own: int = 0
    """Tensors of its own, where it is composed of several operations."""

    own_trained: int = 0
    """More of them where its own parameters are trained."""

    masks: int = 0
    """Masks of one byte per element."""


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(saves_input=False, saves_result=True),
    "relu2": Activation(saves_input=False, own=1),
    "sigmoid": Activation(saves_input=False, saves_result=True),
    "tanh": Activation(saves_input=False, saves_result=True),
    "gelu_new": Activation(own=3),
    "quick_gelu": Activation(own=1),
    "xielu": Activation(own=2, own_trained=1, masks=1),
}
"""By Transformers' name; what is missing saves its input alone, as silu and gelu do."""

_NEOX_NAMES = LinearNames(
    qkv="query_key_value", out="dense", up="dense_h_to_4h", down="dense_4h_to_h"
)
_GPT2_NAMES = LinearNames(qkv="c_attn", out="c_proj", up="c_fc", down="c_proj")
_FC_NAMES = LinearNames(up="fc1", down="fc2")

_HEAD_NORMS = FamilyTraits(head_norm="head")
_QWEN3_NEXT = FamilyTraits(
    head_norm="head", attention_gate="element", shared_gate="shared_expert_gate", shared_first=True
)
_GEMMA = FamilyTraits(norm="rms_wide", activation="gelu_pytorch_tanh")
_GEMMA4 = FamilyTraits(
    norm="rms_power",
    placement="both",
    head_norm="head",
    value_norm=True,
    activation="gelu_pytorch_tanh",
)
_OLMO2 = FamilyTraits(norm="rms_wide", placement="after", head_norm="all")
_GLM4 = FamilyTraits(placement="both", own_tables=1, heads_first=True, fused_gate=True)
_LATENT = FamilyTraits(heads_first=True, router="sigmoid", router_wide=True, routing_wide=True)
_GROUPED = FamilyTraits(router="sigmoid", router_wide=True, routing_wide=True)
_GROUPED_HEAD_NORMS = FamilyTraits(
    head_norm="head", router="sigmoid", router_wide=True, routing_wide=True
)

FAMILIES: dict[str, FamilyTraits] = {
    "afmoe": FamilyTraits(
        norm="rms_wide",
        placement="both",
        head_norm="head",
        attention_gate="element",
        router="sigmoid",
        router_name="gate",
        routing_wide=True,
        shared_first=True,
    ),
    "apertus": FamilyTraits(head_norm="head", gated=False, activation="xielu"),
    "arcee": FamilyTraits(gated=False, activation="relu2"),
    "bitnet": FamilyTraits(inner_norms=True, activation="relu2"),
    "cohere": FamilyTraits(
        norm="centred", placement="shared", head_norm="head", head_norm_switch="use_qk_norm"
    ),
    "cohere2": FamilyTraits(norm="centred", placement="shared"),
    "cohere_compass_text": FamilyTraits(norm="centred", placement="shared"),
    "deepseek_v2": FamilyTraits(heads_first=True, router_wide=True, routing_wide=True),
    "deepseek_v3": _LATENT,
    "dots1": _GROUPED_HEAD_NORMS,
    "ernie4_5": FamilyTraits(own_tables=2, own_tables_wide=True),
    "ernie4_5_moe": FamilyTraits(
        own_tables=2, own_tables_wide=True, router_wide=True, shared_first=True
    ),
    "exaone4": FamilyTraits(placement="after", head_norm="head"),
    "exaone_moe": _GROUPED_HEAD_NORMS,
    "flex_olmo": _OLMO2,
    "gemma": _GEMMA,
    "gemma2": FamilyTraits(norm="rms_wide", placement="both", activation="gelu_pytorch_tanh"),
    "gemma3_text": FamilyTraits(
        norm="rms_wide", placement="both", head_norm="head", activation="gelu_pytorch_tanh"
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm": FamilyTraits(own_tables=1, heads_first=True, fused_gate=True),
    "glm4": _GLM4,
    "glm4v_text": _GLM4,
    "glm4_moe": FamilyTraits(
        head_norm="head",
        head_norm_switch="use_qk_norm",
        heads_first=True,
        router="sigmoid",
        router_wide=True,
        routing_wide=True,
    ),
    "glm4_moe_lite": _LATENT,
    "gpt2": FamilyTraits(
        norm="layer",
        rotary=False,
        fused_qkv=True,
        gated=False,
        activation="gelu_new",
        names=_GPT2_NAMES,
    ),
    "gpt_bigcode": FamilyTraits(
        norm="layer",
        rotary=False,
        fused_qkv=True,
        gated=False,
        activation="gelu_pytorch_tanh",
        names=_GPT2_NAMES,
    ),
    "gpt_neox": FamilyTraits(
        norm="layer",
        placement="parallel",
        heads_first=True,
        fused_qkv=True,
        gated=False,
        activation="gelu",
        names=_NEOX_NAMES,
    ),
    "gpt_oss": FamilyTraits(
        norm="rms_wide",
        heads_first=True,
        clamped_experts=True,
        router="softmax_of_chosen",
    ),
    "granitemoe": FamilyTraits(router="softmax_of_chosen"),
    "helium": FamilyTraits(norm="rms_wide", own_tables=2),
    "hunyuan_v1_dense": _HEAD_NORMS,
    "hunyuan_v1_moe": FamilyTraits(head_norm="head", router_name="wg", shared_first=True),
    "hyperclovax": FamilyTraits(placement="both"),
    "jais2": FamilyTraits(norm="layer", gated=False, activation="relu2"),
    "jetmoe": FamilyTraits(
        attention_experts=True,
        router="softmax_of_chosen",
        router_name="layer",
        looped_experts=True,
    ),
    "laguna": FamilyTraits(
        head_norm="head",
        heads_first=True,
        attention_gate="head",
        router="sigmoid",
        shared_first=True,
    ),
    "mellum": _HEAD_NORMS,
    "mimo_v2_flash": FamilyTraits(
        heads_first=True, router="sigmoid", router_wide=True, routing_wide=True
    ),
    "minicpm3": FamilyTraits(heads_first=True),
    "minimax_m2": FamilyTraits(
        head_norm="all", heads_first=True, router="sigmoid", routing_wide=True
    ),
    "mixtral": FamilyTraits(routing_wide=True),
    "nanochat": FamilyTraits(
        norm="rms_unit", head_norm="head", gated=False, activation="relu2", names=_FC_NAMES
    ),
    "nemotron": FamilyTraits(norm="layer", heads_first=True, gated=False, activation="relu2"),
    "nemotron_h": FamilyTraits(gated=False, activation="relu2"),
    "olmo": FamilyTraits(norm="layer_unit"),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": FamilyTraits(head_norm="all"),
    "persimmon": FamilyTraits(
        norm="layer",
        head_norm="head",
        head_norm_switch="qk_layernorm",
        heads_first=True,
        fused_qkv=True,
        gated=False,
        activation="relu2",
        names=_NEOX_NAMES,
    ),
    "phi": FamilyTraits(
        norm="layer",
        placement="shared",
        head_norm="head",
        head_norm_switch="qk_layernorm",
        heads_first=True,
        gated=False,
        activation="gelu_new",
        names=LinearNames(out="dense", up="fc1", down="fc2"),
    ),
    "phi3": FamilyTraits(heads_first=True, fused_qkv=True, fused_gate=True),
    "qwen2_moe": FamilyTraits(shared_gate="shared_expert_gate", shared_first=True),
    "qwen3": _HEAD_NORMS,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_moe": _HEAD_NORMS,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_vl_moe_text": _HEAD_NORMS,
    "qwen3_vl_text": _HEAD_NORMS,
    "solar_open": _GROUPED,
    "starcoder2": FamilyTraits(
        norm="layer",
        gated=False,
        activation="gelu_pytorch_tanh",
        names=LinearNames(up="c_fc", down="c_proj"),
    ),
    "vaultgemma": _GEMMA,
    "youtu": FamilyTraits(heads_first=True),
}

_COMMON = FamilyTraits()


def traits_of(family: str) -> FamilyTraits:
    """Returns the traits of a `model_type`, the common case where it is not listed."""
    return FAMILIES.get(family, _COMMON)
