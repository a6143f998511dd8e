"""The shape of a live model: what is trained of it, by which adapters, in which dtype."""

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf.engine.device_facts import model_shape
from sppo_hf.engine.structure import find_parts, quiet_peft
from sppo_hf.planning.model_profile import LoraShape
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch

pytestmark = pytest.mark.fake


def adapted(dtype: torch.dtype, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    model = build_tiny_model("llama", dtype=dtype)
    with quiet_peft():
        return peft.get_peft_model(model, peft.LoraConfig(**settings))


def test_without_adapters_all_is_trained() -> None:
    shape = model_shape(find_parts(build_tiny_model("llama", dtype=torch.bfloat16)))
    assert shape.lora is None
    assert shape.trainable_fraction == 1
    assert (shape.dtype_bytes, shape.parameter_bytes) == (2, 2)


def test_adapters_are_found_with_rank_targets_dtype_and_dropout() -> None:
    model = adapted(torch.bfloat16, r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    shape = model_shape(find_parts(model))
    targets = ("down_proj", "q_proj")
    assert shape.lora == LoraShape(rank=4, targets=targets, dtype_bytes=4, dropout=0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert shape.trainable_parameters == sum(p.numel() for p in trained)
    assert shape.gradient_bytes == sum(p.numel() * 4 for p in trained)


def test_adapters_that_do_not_train_are_none() -> None:
    model = adapted(torch.float32, r=4, target_modules=["q_proj"])
    model.requires_grad_(False)
    assert model_shape(find_parts(model)).lora is None


def test_under_autocast_products_are_narrower_than_weights() -> None:
    parts = find_parts(build_tiny_model("llama", dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shape = model_shape(parts)
    assert (shape.dtype_bytes, shape.parameter_bytes) == (2, 4)
    assert shape.kv_bytes_per_token(0) * 2 == model_shape(parts).kv_bytes_per_token(0)


@pytest.mark.parametrize("adapters", [False, True])
def test_autocast_keeps_as_many_bytes_of_casts_as_are_counted(adapters: bool) -> None:
    model: Any = build_tiny_model("llama", dtype=torch.float32)
    model = add_lora(model) if adapters else model

    weights: list[tuple[StorageWeakRef, int]] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
                weights.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
            return result

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        shape = model_shape(find_parts(model))
        with Casts():
            model(**make_batch(tokens=7))
        kept = sum(size for reference, size in weights if not reference.expired())
    kept -= 0 if shape.lora is None else shape.lora_bytes // 2  # too small to be counted
    assert kept == pytest.approx(shape.cached_cast_bytes, rel=0.01), "norms are counted, not cast"
