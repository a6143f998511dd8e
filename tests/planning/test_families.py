"""The table of family traits against what autograd really saves in one decoder layer."""

from typing import Any

import pytest

from sppo_hf.planning.families import FAMILIES, FamilyTraits, traits_of
from sppo_hf.planning.shape import ModelShape

pytestmark = pytest.mark.fake

TOKENS = 40
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "head_dim": 16,
}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 16},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "starcoder2": {"bos_token_id": 1, "eos_token_id": 2},
    "cohere2": {"sliding_window": 16},
    "smollm3": {},
    "glm4": {},
    "gpt2": {"n_inner": 160, "bos_token_id": 1, "eos_token_id": 2},
}


def test_an_unlisted_family_is_the_common_case() -> None:
    assert traits_of("never heard of") == FamilyTraits()
    assert FAMILIES["gemma2"].full_width_norms == 4


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", DENSE)
def test_frame_bytes_against_autograd(family: str, dtype_name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    dtype = getattr(torch, dtype_name)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **DENSE[family]})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(dtype).eval()
    shape = ModelShape.from_config(config, dtype_bytes=dtype.itemsize)

    saved_bytes = _saved_bytes(model, torch)
    # Eager attention saves K and V repeated for every query head and no log-sum-exp; the KV store
    # and our attention do it the other way round.
    layer = shape.layers[-1]
    repeated_kv = shape.kv_bytes_per_token(1) * layer.num_heads // layer.num_kv_heads
    lse = layer.num_heads * 4
    expected = shape.frame_bytes_per_token(1) + repeated_kv - lse
    assert saved_bytes / TOKENS == pytest.approx(expected, rel=0.02)


def _saved_bytes(model: Any, torch: Any) -> int:
    """Bytes of all storages the last layer saves, without what is not its frame.

    Left out: parameters, the rotary tables that all layers share, and the TOKENS x TOKENS scores,
    which only eager attention has.
    """
    not_ours = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, Any] = {}
    inside = False

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        rotary = tensor.dim() == 4 and tuple(tensor.shape[:2]) == (1, 1)
        scores = tuple(tensor.shape[-2:]) == (TOKENS, TOKENS)
        if inside and TOKENS in tensor.shape and not (rotary or scores):
            seen[storage.data_ptr()] = tensor
        return tensor

    base = model.base_model
    layer = (base.layers if hasattr(base, "layers") else base.h)[-1]
    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=torch.arange(TOKENS).unsqueeze(0) + 3, use_cache=False)
    assert output.logits.requires_grad
    return sum(
        tensor.untyped_storage().nbytes() for at, tensor in seen.items() if at not in not_ours
    )
