"""Profiles of layers with Liger's kernels against what such layers save, keep and make again.

Liger needs a GPU; stand-ins save what its functions save (see `tests.fakes.liger`).
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.cpu_heap import CpuChunkArena
from sppo_hf.engine.device_facts import model_shape
from sppo_hf.engine.model_parts import find_parts, suppress_peft_warnings
from sppo_hf.engine.recompute import RecomputedLayer
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.planning.activation_modes import Saved, mode_of
from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.lowering import estimate
from sppo_hf.planning.memory import CONTEXT_BYTES
from sppo_hf.planning.model_profile import LoraShape, Training
from sppo_hf.planning.model_shape import ModelShape
from tests.engine.measuring import SETTINGS, TOKENS, run, saved_bytes, sized_config
from tests.fakes.liger import SiLUMul, install

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def liger(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Liger's functions, for a model on the CPU."""
    return install(monkeypatch)


def built(
    family: str,
    dtype: torch.dtype,
    *,
    lora: bool = False,
    in_float32: bool = False,
    **settings: Any,
) -> nn.Module:
    """A converted model whose sizes are all different."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(sized_config(family)).to(dtype).train()
    if lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        with suppress_peft_warnings():
            model = get_peft_model(model, adapters, autocast_adapter_dtype=in_float32)
    config = SETTINGS.replace(**{"layer_kernels": "auto", **settings})
    return convert(model, config)


CASES = [
    ("llama", torch.bfloat16, True),
    ("qwen3", torch.float32, False),
    ("gemma2", torch.bfloat16, False),
]


@pytest.mark.parametrize(("family", "dtype", "lora"), CASES)
def test_saved_bytes_are_those_of_the_kernels(family: str, dtype: torch.dtype, lora: bool) -> None:
    model = built(family, dtype, lora=lora)
    without = model_shape(find_parts(model))
    assert not without.layer_kernels, "until the kernels have been tried"
    run(model)
    shape = model_shape(find_parts(model))
    assert shape.layer_kernels
    engine = get_engine(model)
    assert engine is not None
    assert all(plan.shape.layer_kernels for plan in engine.plans._plans.values())
    measured, _ = saved_bytes(model)
    for index, num_bytes in measured.items():
        whole = shape.activation_bytes_per_token(index)
        assert whole == pytest.approx(num_bytes, rel=0.01)
        assert whole < 0.95 * without.activation_bytes_per_token(index)


def test_saved_bytes_of_adapters_in_float32_under_autocast() -> None:
    model = built("llama", torch.bfloat16, lora=True, in_float32=True)
    with torch.autocast("cpu", torch.bfloat16):
        run(model)
        shape = model_shape(find_parts(model))
        measured, _ = saved_bytes(model)
    assert shape.layer_kernels
    for index, num_bytes in measured.items():
        assert shape.activation_bytes_per_token(index) == pytest.approx(num_bytes, rel=0.01)


@pytest.mark.parametrize("saved", ["inputs", "matmuls"])
@pytest.mark.parametrize(("family", "dtype", "lora"), CASES)
def test_what_is_kept_and_made_again_is_what_the_profile_says(
    family: str, dtype: torch.dtype, lora: bool, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matmuls only what the kernels depend on is kept: no keys and values."""
    kept: dict[str, dict[int, Tensor]] = {}  # held, so that no other tensor gets their addresses
    made: dict[str, int] = {}
    hold, check = RecomputedLayer._hold, RecomputedLayer._check_repeated

    def held(layer: RecomputedLayer, kind: str, tensor: Tensor) -> Any:
        kept.setdefault(layer.label, {})[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return hold(layer, kind, tensor)

    def noted(layer: RecomputedLayer, again: list[Tensor]) -> None:
        check(layer, again)
        storages = {x.untyped_storage().data_ptr(): x for x in again}
        known = {*kept[layer.label], *others}
        sizes = (x.untyped_storage().nbytes() for at, x in storages.items() if at not in known)
        made[layer.label] = sum(size for size in sizes if size % TOKENS == 0)

    monkeypatch.setattr(RecomputedLayer, "_hold", held)
    monkeypatch.setattr(RecomputedLayer, "_check_repeated", noted)
    # Slabs of all layers would count as one layer's.
    monkeypatch.setattr(CpuChunkArena, "keep", lambda _self, _kind, tensor: tensor.detach())
    recompute = "full" if saved == "inputs" else "selective"
    model = built(family, dtype, lora=lora, recompute=recompute)
    others = {p.untyped_storage().data_ptr() for p in model.parameters()}
    run(model).backward()  # the first forward of a kind copies what may be written into
    kept.clear()
    run(model).backward()
    layer = model_shape(find_parts(model)).layers[1]
    label = "layer 1, chunk 0"
    sizes = {"inputs": layer.inputs_bytes, "matmuls": layer.matmuls_bytes}
    num_bytes = sum(tensor.nbytes for tensor in kept[label].values())
    assert num_bytes == pytest.approx(sizes[saved] * TOKENS, rel=0.01)
    rerun, _ = layer.rerun_bytes(saved)
    tables = 2 * TOKENS * 24 * dtype.itemsize  # rotary ones, which layers share
    assert made[label] == pytest.approx(rerun * TOKENS, rel=0.01, abs=tables)


WORDS = {"inputs": mode_of("inputs", "device"), "matmuls": mode_of("matmuls", "device")}
WORDS |= {"whole": mode_of("whole", "device"), "INPUTS": mode_of("inputs", "host")}
WORDS |= {"MATMULS": mode_of("matmuls", "host")}
"""Modes by what is saved; in capitals where it is offloaded."""


def ran(layers: dict[str, int], chunks: int, *, last: str, copies_bytes: int) -> Decisions:
    """A step of Llama-3.1-8B by layer in chunks of 16,384 tokens: so many layers in each mode.

    `last` is the mode of the last chunk of the layers of the first mode.
    """
    names = [name for name, count in layers.items() for _ in range(count)]
    row = tuple(WORDS[name] for name in names)
    final = tuple(WORDS[last] if name == names[0] else WORDS[name] for name in names)
    return Decisions(
        bounds=tuple((16_384 * chunk, 16_384 * (chunk + 1)) for chunk in range(chunks)),
        layer_modes=(row,) * (chunks - 1) + (final,),
        order="by_layer",
        batch_rows=1,
        tile_tokens=512,
        training=True,
        max_pending_d2h_bytes=copies_bytes,
        max_prefetch_bytes=copies_bytes,
    )


def test_estimates_of_steps_that_ran_on_an_h200() -> None:
    """Never below what PyTorch's allocator had reserved, and at most 5% above.

    Rows of `recipes/benchmarks/results/h200.jsonl`, with the plans that they ran; of the one with
    139 GiB its first, which takes most. Their layers kept keys and values among the matmuls, which
    they do no longer: 32 MiB a unit, or half of that in the store of K/V.
    """
    pytest.importorskip("peft")
    lora = LoraShape(rank=16, dtype_bytes=2)
    training = Training(dtype_bytes=2, parameter_bytes=2, lora=lora, layer_kernels=True)
    profile = trace_config(load_config("llama-3.1-8b"), training)
    shape = ModelShape.from_profile(profile)
    # AdamW's states have the dtype of the adapters.
    shape = dataclasses.replace(shape, optimizer_bytes=4 * shape.trainable_parameters)
    short = ran({"MATMULS": 31, "matmuls": 1}, 2, last="matmuls", copies_bytes=2_964_324_352)
    long = ran(
        {"INPUTS": 22, "inputs": 9, "matmuls": 1}, 8, last="INPUTS", copies_bytes=2_164_260_864
    )
    large = ran({"whole": 7, "matmuls": 25}, 2, last="whole", copies_bytes=0)
    # In one of these layers, of the first chunk alone.
    first = tuple(
        WORDS["matmuls"] if at == 6 else mode for at, mode in enumerate(large.layer_modes[1])
    )
    large = dataclasses.replace(large, layer_modes=(large.layer_modes[0], first))
    reserved = {76_109_840_384: short, 76_361_498_624: long, 128_922_419_200: large}
    for measured, decisions in reserved.items():
        planned = estimate(shape, decisions).device.total - CONTEXT_BYTES["cuda"]
        assert measured <= planned <= 1.05 * measured


def test_a_module_without_a_kernel_makes_the_whole_profile_one_without(
    liger: SimpleNamespace,
) -> None:
    class Broken(SiLUMul):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            raise RuntimeError("no compiler")

    liger.LigerSiLUMulFunction = Broken
    model = built("llama", torch.float32)
    run(model)
    assert not model_shape(find_parts(model)).layer_kernels


def test_a_setting_keeps_the_profile_of_the_models_own_code() -> None:
    model = built("llama", torch.float32, layer_kernels="none")
    run(model)
    assert not model_shape(find_parts(model)).layer_kernels
