"""Small models of every family whose sizes are all different; their saved bytes, FLOPs, matmuls.

Sizes are large enough that what does not grow with the tokens hardly counts, and no two widths are
equal by chance. Imported only by tests that need torch and Transformers.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert
from sppo_hf.engine.model_parts import find_parts, suppress_peft_warnings
from sppo_hf.offload.layer_offload import WeightCasts
from sppo_hf.testing.tiny_families import FAMILIES
from sppo_hf.testing.tiny_models import tiny_config

TOKENS = 61
"""A prime, so that memory whose size is divisible by it grows with the tokens."""

RANK = 4

_SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "word_embed_proj_dim": 160,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "kv_channels": 24,
    "moe_intermediate_size": 112,
    "shared_expert_intermediate_size": 176,
    "shared_intermediate_size": 176,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "q_lora_rank": 56,
    "kv_lora_rank": 88,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    # Wider than the tokens, and no soft cap: then the CPU's fused kernel attends in one call, as
    # the kernels on a GPU do, and its products are not counted as the model's.
    "sliding_window": 4096,
    "attn_logit_softcapping": None,
    "max_position_embeddings": 2048,
}
_ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj"),
    *("kv_a_proj_with_mqa", "kv_b_proj", "kv_proj"),
)
# Profiles are of the code of Transformers and PEFT.
SETTINGS = SPPOConfig(
    layer_kernels="none",
    recompute="none",
    offload="none",
    num_chunks=1,
    show_plan=False,
    show_progress=False,
)


_MATMULS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm"))


class OperationNames(TorchDispatchMode):
    """Keeps the names of all operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class MatmulCounter(TorchDispatchMode):
    """Counts the matmuls that are computed, those of attention's reference backend among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in _MATMULS
        return func(*args, **(kwargs or {}))


def sized_config(name: str) -> Any:
    """The configuration of `tiny_families.FAMILIES[name]` with sizes that are all different."""
    default = AutoConfig.for_model(FAMILIES[name].model_type)
    fields, names = default.to_dict(), default.attribute_map
    sizes = {
        field: value
        for field, value in _SIZES.items()
        if fields.get(names.get(field, field)) is not None or _asked_for(name, field)
    }
    if "kv_lora_rank" in sizes:
        sizes |= {"num_key_value_heads": 8, "q_lora_rank": _SIZES["q_lora_rank"]}
        sizes |= {"head_dim": 8} if "head_dim" in sizes else {}
    if name == "helium":
        sizes["head_dim"] = 20  # its output projection takes heads to be hidden_size wide together
    return tiny_config(name, **sizes)


def build(name: str, dtype: torch.dtype, *, lora: bool = False) -> nn.Module:
    """A converted random model of `sized_config(name)`.

    PEFT turns "all-linear" into merged expert weights for families with experts, so there only
    attention is adapted.
    """
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(sized_config(name)).to(dtype).train()
    if lora:
        sparse = any("expert" in child for child, _ in model.named_modules())
        modules = {child.rpartition(".")[2] for child, _ in model.named_modules()}
        found = [target for target in _ATTENTION if target in modules]
        model = _add_lora(model, found if sparse else "all-linear")
    return convert(model, SETTINGS)


def to_bfloat16(model: nn.Module) -> nn.Module:
    """The model in bfloat16, its adapters float32 as PEFT makes them for such a model."""
    model = model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return model


def run(model: nn.Module, tokens: int = TOKENS) -> Tensor:
    """The loss over a batch of one row."""
    ids = torch.arange(tokens).view(1, tokens) % 90 + 3
    return model(input_ids=ids, labels=ids).loss


def saved_bytes(model: nn.Module) -> tuple[dict[int, float], float]:
    """Bytes per token that autograd saves, by layer, and those that layers share.

    Every piece of memory counts once; parameters and what does not grow with the tokens are left
    out. Layers share what a rotary module returns.
    """
    layers, tables = _saved(model, TOKENS)

    def per_token(tensors: Iterable[Tensor]) -> float:
        return sum(_bytes(x) for x in tensors if _bytes(x) % TOKENS == 0) / TOKENS

    own = {index: per_token(tensors) for index, tensors in layers.items()}
    return own, per_token(tables)


def growing_bytes(model: nn.Module, lengths: tuple[int, int]) -> list[float]:
    """The same without what layers share, from two lengths; also of layers that scan in blocks."""
    short, long = (_saved(model, tokens)[0].values() for tokens in lengths)
    return [
        (sum(map(_bytes, more)) - sum(map(_bytes, few))) / (lengths[1] - lengths[0])
        for few, more in zip(short, long, strict=True)
    ]


def _saved(model: nn.Module, tokens: int) -> tuple[dict[int, list[Tensor]], list[Tensor]]:
    """Tensors that autograd saves, by layer, and rotary tables among them, which layers share."""
    parts = find_parts(model)
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    seen: dict[int, dict[int, Tensor]] = defaultdict(dict)
    running: list[int] = []
    tables: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        at = tensor.untyped_storage().data_ptr()
        if running and at not in own:
            seen[running[-1]].setdefault(at, tensor)
        return tensor

    handles: list[Any] = []
    for index, layer in enumerate(parts.layers):
        handles.append(layer.register_forward_pre_hook(lambda *_, i=index: running.append(i)))
        handles.append(layer.register_forward_hook(lambda *_: running.clear()))
    for module in model.modules():
        if "Rotary" in type(module).__name__:
            handles.append(module.register_forward_hook(lambda *args: tables.extend(args[-1])))
    # Under autocast a layer that is kept has saved-tensor hooks of its own, which would hide these.
    without_casts = unittest.mock.patch.object(WeightCasts, "of", return_value=None)
    with without_casts, saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run(model, tokens)
    for handle in handles:
        handle.remove()
    assert loss.requires_grad
    rotary = {table.untyped_storage().data_ptr() for table in tables}
    layers = {
        index: [x for at, x in tensors.items() if at not in rotary]
        for index, tensors in seen.items()
    }
    everything = {at: x for tensors in seen.values() for at, x in tensors.items()}
    return layers, [x for at, x in everything.items() if at in rotary]


@contextlib.contextmanager
def counted_flops() -> Iterator[FlopCounterMode]:
    """Counts matrix products, those over groups of rows too; fused attention it does not see."""

    def grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
        if len(a) == len(b) == 2:
            # Gradients of weights: the groups are runs of the summed dim.
            return 2 * a[0] * a[1] * b[1]
        return 2 * a[-2] * a[-1] * b[-1]

    def none(*_: Any, **__: Any) -> int:
        return 0

    # From 2.15 on it sees one, and counts a backward of it that is none.
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    fused = (getattr(torch.ops.aten, name) for name in (attention, f"{attention}_backward"))
    products = {torch.ops.aten._grouped_mm: grouped, **dict.fromkeys(fused, none)}
    with FlopCounterMode(display=False, custom_mapping=products) as counter:
        yield counter


def _asked_for(name: str, field: str) -> bool:
    return field in FAMILIES[name].overrides


def _add_lora(model: nn.Module, targets: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with suppress_peft_warnings():
        return get_peft_model(model, LoraConfig(r=RANK, target_modules=targets)).train()


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
