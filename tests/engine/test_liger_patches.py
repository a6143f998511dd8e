"""Models that Liger's own patches have changed, as `TrainingArguments(use_liger_kernel=True)` does.

A stand-in package replaces what Liger replaces: classes and functions of Llama's module, and the
forwards of a model's norms, MLPs and head. For its kernels see `tests.fakes.liger`; that of rotary
embedding writes into queries and keys.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from sppo_hf import SPPOConfig, UnsupportedModelError
from sppo_hf.engine import device_facts, layer_kernels, trace_profile
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.cpu_heap import CpuChunkArena
from sppo_hf.engine.device_facts import model_profile, model_shape
from sppo_hf.engine.family_guard import check_family
from sppo_hf.engine.model_parts import find_parts, suppress_peft_warnings
from sppo_hf.engine.recompute import RecomputedLayer
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.planning.model_profile import LayerProfile, Training
from tests.engine.measuring import SETTINGS, TOKENS, run, saved_bytes, sized_config
from tests.fakes.liger import RMSNorm, SiLUMul, calls, install, write
from tests.sweeps import turn

pytestmark = pytest.mark.fake


class Rope(torch.autograd.Function):
    """As `LigerRopeFunction`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> Any:
        calls["rope"] += 1
        ctx.save_for_backward(cos, sin)
        return turned(q, cos, sin), turned(k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *(turned(grad, cos, -sin) for grad in grads), None, None, None, None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.transpose(1, 2).contiguous()
    left, right = x.chunk(2, -1)
    half = torch.cat((-right, left), -1)
    return write(x, lambda: x * cos[:, :, None] + half * sin[:, :, None]).transpose(1, 2)


class FusedMoE(torch.autograd.Function):
    """As `LigerFusedMoEFunction`, which is only traced here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        return write(torch.empty_like(x), lambda: x)


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return RMSNorm.apply(
        *(hidden_states, self.weight, self.variance_epsilon, 0.0, "llama", True, None)
    )


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(SiLUMul.apply(self.gate_proj(x), self.up_proj(x), 1.0, 1.0))


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return Rope.apply(q, k, cos, sin, None, unsqueeze_dim, None)


def experts_forward(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return FusedMoE.apply(
        hidden, self.gate_up_proj, self.down_proj, chosen.to(torch.int32), weights
    )


def lce_forward(self: Any, *, labels: Tensor | None = None, **inputs: Any) -> Any:
    """As Liger's forward of a causal LM, which makes no logits where there are labels."""
    assert labels is None, "sppo computes the loss"
    hidden = self.model(**inputs)[0]
    return modeling_llama.CausalLMOutputWithPast(logits=self.lm_head(hidden))


for code in (norm_forward, mlp_forward, rotary, experts_forward, lce_forward):
    code.__module__ = "liger_kernel.transformers"
# The forward of a model is known by the module of its code.
_lce_options = lce_forward.__kwdefaults__
lce_forward = types.FunctionType(
    lce_forward.__code__, {**globals(), "__name__": "liger_kernel.transformers"}
)
lce_forward.__kwdefaults__ = _lce_options


@pytest.fixture(autouse=True)
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Liger as it is after its import, and Llama's module as it was."""
    ops = install(monkeypatch, watched=True)
    ops.LigerRopeFunction, ops.LigerFusedMoEFunction = Rope, FusedMoE
    monkeypatch.setattr(layer_kernels, "liger_runs_on", lambda device: False)
    monkeypatch.setattr(device_facts, "_profiles", {})
    yield
    for function in vars(ops).values():
        if "apply" in vars(function):
            del function.apply


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Liger's patch of Llama's module and of a model, as `_apply_liger_kernel_to_instance`."""

    def replaced(module: Any, name: str, forward: Any) -> None:
        kind = type(f"Liger{name}", (getattr(module, name),), {"forward": forward})
        kind.__module__ = "liger_kernel.transformers"
        monkeypatch.setattr(module, name, kind)

    def patch(model: Any) -> None:
        replaced(modeling_llama, "LlamaRMSNorm", norm_forward)
        replaced(modeling_llama, "LlamaMLP", mlp_forward)
        replaced(modeling_mixtral, "MixtralRMSNorm", norm_forward)
        replaced(modeling_mixtral, "MixtralExperts", experts_forward)
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary)
        monkeypatch.setattr(modeling_mixtral, "apply_rotary_pos_emb", rotary)
        model.forward = types.MethodType(lce_forward, model)
        forwards = {"RMSNorm": norm_forward, "LlamaMLP": mlp_forward, "Experts": experts_forward}
        for module in model.modules():
            for name, forward in forwards.items():
                if type(module).__name__.endswith(name):
                    module.forward = types.MethodType(forward, module)

    return patch


def built(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(sized_config(family)).to(dtype).train()


def layer_of(model: nn.Module) -> LayerProfile:
    return model_profile(find_parts(model)).layers[1]


def is_equal(one: LayerProfile, other: LayerProfile) -> bool:
    """Whether profiles are equal but for the nodes of rotary embedding, which Liger's has fewer."""
    return one == dataclasses.replace(other, graph_nodes=one.graph_nodes)


KERNELS = Training(dtype_bytes=2, parameter_bytes=2, layer_kernels=True)


@pytest.mark.parametrize("kind", ["fake", "zeros"])
def test_a_patched_model_is_traced_without_its_kernels(
    kind: str, patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers save what those of a model do to which the engine gives Liger's kernels."""
    monkeypatch.setattr(trace_profile, "_TINY_ELEMENTS", 0 if kind == "fake" else 2**30)
    model = built()
    without, expected = layer_of(model), trace_config(sized_config("llama"), KERNELS).layers[1]
    patch(model)
    profile = model_profile(find_parts(model))
    assert profile.training == KERNELS
    assert is_equal(profile.layers[1], expected)
    assert expected.whole_bytes < 0.8 * without.whole_bytes
    assert not calls


def test_a_model_built_of_patched_classes_is_one_too(patch: Any) -> None:
    patch(built())
    model = built()
    assert "forward" not in model.model.layers[0].mlp.__dict__
    profile = model_profile(find_parts(model))
    assert profile.training == KERNELS
    assert is_equal(profile.layers[1], trace_config(sized_config("llama"), KERNELS).layers[1])


def test_a_patched_models_profile_is_not_that_of_its_family(
    patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither shipped or stored profiles, nor what this process has traced before."""
    with monkeypatch.context() as patched:
        model = built()
        before = model_profile(find_parts(model))
        patched.setattr(device_facts, "find_profile", lambda *_: pytest.fail("would be stored"))
        patch(model)
        assert model_profile(find_parts(model)).layers != before.layers
    found: list[Any] = []
    monkeypatch.undo()
    monkeypatch.setattr(device_facts, "find_profile", lambda *args: found.append(args))
    monkeypatch.setattr(device_facts, "_profiles", {})
    model_profile(find_parts(built()))
    assert found


def test_experts_in_one_kernel(patch: Any) -> None:
    """The products within it are counted, and no rerun can keep their outputs."""
    model = built("mixtral")
    without = layer_of(model)
    patch(model)
    layer = layer_of(model)
    assert layer.forward_flops == without.forward_flops
    assert layer.weight_gradient_flops == without.weight_gradient_flops
    assert layer.input_gradient_flops == without.input_gradient_flops
    config = sized_config("mixtral")
    width, choices = config.intermediate_size, config.num_experts_per_tok
    products = 2 * 3 * config.hidden_size * width * choices
    assert layer.matmuls_recompute_flops == products
    assert layer.matmuls_bytes < without.matmuls_bytes - 2 * 2 * width * choices
    assert layer.whole_bytes < without.whole_bytes


@pytest.mark.parametrize("kind", ["fake", "zeros"])
def test_experts_in_one_kernel_under_autocast(
    kind: str, patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves its product in the dtype of its input, which a norm in float32 gives it."""
    monkeypatch.setattr(trace_profile, "_TINY_ELEMENTS", 0 if kind == "fake" else 2**30)
    patch(built("mixtral"))
    config = sized_config("mixtral")
    width, choices = config.intermediate_size, config.num_experts_per_tok
    make = type(built("mixtral"))._from_config
    without, autocast = (
        trace_profile.trace_model(
            config, Training(dtype_bytes=2, parameter_bytes=size, layer_kernels=True), make
        ).layers[1]
        for size in (2, 4)
    )
    product_bytes = 2 * width * choices * 4
    assert product_bytes < autocast.whole_bytes
    # Half of all that it saves in the weights' dtype, and what is in that of the products alone.
    assert autocast.whole_bytes > without.whole_bytes + product_bytes / 2
    assert autocast.forward_flops == without.forward_flops


@pytest.mark.parametrize("kernels", ["auto", "none"])
def test_layers_save_and_keep_what_the_profile_says(
    kernels: str, patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matmuls only what Liger's functions depend on is kept: no keys and values."""
    model = built()
    patch(model)
    convert(model, SETTINGS.replace(layer_kernels=kernels))
    run(model)
    shape = model_shape(find_parts(model))
    assert shape.layer_kernels
    measured, _ = saved_bytes(model)
    for index, num_bytes in measured.items():
        assert shape.activation_bytes_per_token(index) == pytest.approx(num_bytes, rel=0.01)
    kept: dict[str, dict[int, Tensor]] = {}
    hold = RecomputedLayer._hold

    def held(layer: RecomputedLayer, kind: str, tensor: Tensor) -> Any:
        kept.setdefault(layer.label, {})[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return hold(layer, kind, tensor)

    monkeypatch.setattr(RecomputedLayer, "_hold", held)
    # Slabs of all layers would count as one layer's.
    monkeypatch.setattr(CpuChunkArena, "keep", lambda _self, _kind, tensor: tensor.detach())
    other = built()
    patch(other)
    convert(other, SETTINGS.replace(layer_kernels=kernels, recompute="selective"))
    run(other)
    num_bytes = sum(tensor.nbytes for tensor in kept["layer 1, chunk 0"].values())
    assert num_bytes == pytest.approx(shape.layers[1].matmuls_bytes * TOKENS, rel=0.01)


MODES: dict[str, dict[str, Any]] = {
    "kept": {"recompute": "none"},
    "recomputed": {"recompute": "full"},
    "matmuls kept": {"recompute": "selective"},
    "matmuls offloaded": {"recompute": "selective", "offload": "full", "min_offload_size": 1},
    "by layer": {"recompute": "selective", "order": "by_layer"},
}


@pytest.mark.parametrize(
    ("mode", "lora"),
    [(mode, lora) for index, mode in enumerate(MODES) for lora in turn([False, True], 2, index)],
)
def test_loss_and_gradients_are_those_of_the_model_without_the_patch(
    mode: str, lora: bool, patch: Any
) -> None:
    model = built(dtype=torch.float32)
    causal_lm = model
    if lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        with suppress_peft_warnings():
            model = get_peft_model(model, adapters)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = step(model, ids)
    patch(causal_lm)
    settings = {"offload": "none", "num_chunks": 3, "show_plan": False}
    convert(model, SPPOConfig(**{**settings, **MODES[mode]}))
    for _ in range(2):  # the first forward of a kind copies what may be written into
        torch.testing.assert_close(step(model, ids), expected, rtol=1e-3, atol=1e-5)
    assert {"norm", "silu", "rope"} <= set(calls)
    engine = get_engine(model)
    assert engine is not None
    assert all(plan.shape.layer_kernels for plan in engine.plans._plans.values())


def step(model: nn.Module, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_users_class_is_proved_on_a_tiny_copy_without_the_kernels(patch: Any) -> None:
    class Mine(LlamaForCausalLM):
        pass

    model = Mine(sized_config("llama")).train()
    patch(model)
    check_family(find_parts(model))
    assert not calls


def test_a_module_that_cannot_be_traced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            raise ValueError("cannot be accessed from Triton")

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Kernel)
    monkeypatch.setattr(
        device_facts, "find_profile", lambda config, training, make: make(config, training)
    )
    with pytest.raises(UnsupportedModelError, match=r"Kernel failed.*Triton.*use_liger_kernel"):
        model_profile(find_parts(built()))
