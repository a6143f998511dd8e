"""Layer kernels: Liger's only where they compute the same, compiled ones, exact, and taken off.

Liger needs a GPU (Triton's interpreter has none of CUDA's mathematical functions, which its kernels
call); stand-ins compute what its functions compute, and write where they write.
"""

from __future__ import annotations

import copy
import importlib
import shutil
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sppo_hf import ConfigError, SPPOConfig
from sppo_hf.engine import layer_kernels
from sppo_hf.engine.convert import convert, get_engine, revert
from sppo_hf.engine.layer_kernels import liger_runs_on
from sppo_hf.engine.model_parts import find_parts, suppress_peft_warnings
from sppo_hf.planning.choices import DeviceFacts, read_choices
from sppo_hf.testing.exactness import float64_everywhere
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.fakes.liger import RMSNorm, SiLUMul, calls, install
from tests.sweeps import ALL, sample, turn

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def liger(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for Liger, for a model on the CPU."""
    # So that exactness can be seen to twelve digits.
    monkeypatch.setattr(layer_kernels, "_DTYPES", (torch.float64, torch.float32, torch.bfloat16))
    monkeypatch.setitem(layer_kernels._ROUNDING, torch.float64, 1e-6)
    return install(monkeypatch)


@pytest.mark.parametrize("installed", [{"liger_kernel"}, {"triton"}, {"liger_kernel", "triton"}])
def test_liger_needs_triton_and_a_gpu(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name in installed else None
    )
    assert liger_runs_on(torch.device("cuda")) == (len(installed) == 2)
    assert not liger_runs_on(CPU)


def used(model: nn.Module) -> Counter[str]:
    """Use kernels; returns how many modules have one, by its name."""
    layer_kernels.use_layer_kernels(find_parts(model), CPU)
    return Counter(filter(None, map(layer_kernels._mark, model.modules())))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"norm": 3 * 2 + 1, "gated product": 3}),
        ("gemma2", {"norm": 3 * 4 + 1, "gated product": 3}),
        ("phi", {}),
    ],
)
def test_kernels_are_used_for_a_familys_norms_and_gates(
    family: str, expected: dict[str, int]
) -> None:
    model = build_tiny_model(family, dtype=torch.float64)
    assert used(model) == expected
    before = dict(calls)
    layer_kernels.restore_layers(find_parts(model))
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert calls == before


MODES = {
    "kept": {"offload": "none", "recompute": "none"},
    "recomputed": {"offload": "none", "recompute": "full"},
    "offloaded": {"offload": "full", "recompute": "none", "min_offload_size": 1},
    "recomputed, offloaded": {"offload": "full", "recompute": "full", "min_offload_size": 1},
    "selective": {"offload": "none", "recompute": "selective"},
    "selective, offloaded": {"offload": "full", "recompute": "selective", "min_offload_size": 1},
}


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        (family, mode)
        for index, family in enumerate(["llama", "gemma2"])
        for mode in turn(list(MODES), 2, index)
    ],
)
def test_loss_and_gradients_are_those_of_the_models_own_code(family: str, mode: str) -> None:
    model = build_tiny_model(family, dtype=torch.float64).train()
    ids = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")  # others leave out Gemma 2's soft cap
    with float64_everywhere():
        expected = step(model, ids)
    counted = used(model)
    convert(model, SPPOConfig(num_chunks=3, show_plan=False, **MODES[mode]))
    with float64_everywhere():
        ours = step(model, ids)
    assert calls["norm"] >= 3 * counted["norm"]
    assert calls["gelu" if family == "gemma2" else "silu"] >= 3 * counted["gated product"]
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    revert(model)
    calls.clear()
    step(model, ids)
    assert not calls


def step(model: nn.Module, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_hooks_on_an_activation_are_called() -> None:
    model = build_tiny_model("llama", dtype=torch.float32).train()
    ids = torch.randint(0, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    convert(model, SPPOConfig(num_chunks=1, show_plan=False, recompute="none"))
    step(model, ids)
    mlp: Any = model.model.layers[1].mlp
    assert "forward" in mlp.__dict__
    seen: list[torch.Size] = []
    mlp.act_fn.register_forward_hook(lambda _, args, output: seen.append(output.shape))
    step(model, ids)
    assert seen == [torch.Size((1, 12, mlp.gate_proj.out_features))]


@pytest.mark.parametrize(("setting", "taken"), [("auto", True), ("none", False)])
def test_a_setting_keeps_the_models_own_code(setting: str, taken: bool) -> None:
    model = build_tiny_model("llama", dtype=torch.float32).train()
    ids = torch.randint(0, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    convert(model, SPPOConfig(num_chunks=2, show_plan=False, layer_kernels=setting))
    assert not any("forward" in layer.mlp.__dict__ for layer in model.model.layers)
    step(model, ids)
    assert all(("forward" in layer.mlp.__dict__) == taken for layer in model.model.layers)


class _Clamps(SiLUMul):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return SiLUMul.forward(ctx, a, b).clamp(max=1.0)


class _Forgets(SiLUMul):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        da, db = SiLUMul.backward(ctx, *grads)
        return da, None if db is None else torch.zeros_like(db)


class _Breaks(SiLUMul):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("wrong", [_Clamps, _Forgets, _Breaks])
def test_a_kernel_that_differs_is_not_used(
    liger: SimpleNamespace, caplog: pytest.LogCaptureFixture, wrong: type
) -> None:
    liger.LigerSiLUMulFunction = wrong
    model = build_tiny_model("llama", dtype=torch.float32)
    assert used(model) == {"norm": 2 * len(model.model.layers) + 1}
    if wrong is _Breaks:
        (line,) = caplog.messages
        assert line.startswith("LlamaMLP keeps its own code")
        assert "RuntimeError: no kernel image is available" in line
    else:
        assert not caplog.messages, "a kernel that differs is nothing to report"


def test_a_module_that_does_more_than_a_norm_keeps_its_own_code() -> None:
    model = build_tiny_model("llama", dtype=torch.float32)
    layer = model.model.layers[0]

    class Scales(type(layer.mlp)):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 0.5)

    layer.mlp.__class__ = Scales
    layer.input_layernorm.forward = layer.input_layernorm.forward  # as a wrapper would
    assert used(model) == {"norm": 6, "gated product": 2}


def test_a_gate_of_unknown_width_keeps_its_own_code() -> None:
    """It cannot be compared, for all MLPs of its kind."""
    model = build_tiny_model("llama", dtype=torch.float32)
    mlp: Any = model.model.layers[0].mlp
    mlp.gate_proj = nn.Sequential(mlp.gate_proj)
    assert "gated product" not in used(model)


def test_a_bfloat16_kernel_may_not_be_farther_from_float32(liger: SimpleNamespace) -> None:
    class Rounds(SiLUMul):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return (SiLUMul.forward(ctx, a, b).float() * (1 + 2**-7)).to(a.dtype)

    model = build_tiny_model("llama", dtype=torch.bfloat16)
    assert "gated product" in used(model)
    layer_kernels.restore_layers(find_parts(model))
    liger.LigerSiLUMulFunction = Rounds
    assert "gated product" not in used(model)


def graph_counts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make torch.compile return its argument, and count the calls of that."""
    called: list[Any] = []

    def compiled(function: Any, **settings: Any) -> Any:
        return lambda *args, **kwargs: called.append(function) or function(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compiled)
    return called


def test_norms_and_mlps_are_compiled_until_revert(monkeypatch: pytest.MonkeyPatch) -> None:
    called = graph_counts(monkeypatch)
    model = build_tiny_model("llama", dtype=torch.float32).train()
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    ids = torch.randint(0, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    plan = convert(model, SPPOConfig(num_chunks=2, show_plan=False, compile=True))
    step(model, ids)
    compiled = [name for name, m in model.named_modules() if m._compiled_call_impl is not None]
    assert len(compiled) == 3 * 2 + 2, "the final norm and one MLP have hooks"
    assert not any("self_attn" in name for name in compiled)
    assert "silu" not in calls, "one kernel or the other"
    before = len(called)
    assert before >= 2 * len(compiled)
    revert(plan)
    handle.remove()
    step(model, ids)
    assert len(called) == before
    assert not any(m._compiled_call_impl for m in model.modules())


def test_without_a_compiler_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, **settings: Any) -> Any:
        raise RuntimeError("no C++ compiler was found")

    monkeypatch.setattr(torch, "compile", broken)
    model = build_tiny_model("llama", dtype=torch.float32).train()
    ids = torch.randint(0, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    convert(model, SPPOConfig(num_chunks=2, show_plan=False, compile=True))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler was found.*drop compile"):
        model(input_ids=ids, labels=ids)
    assert not any(m._compiled_call_impl for m in model.modules())


def test_compiled_layers_save_no_matmuls_alone() -> None:
    facts = DeviceFacts(kind="cuda", name="a card")
    assert "matmuls" in read_choices(SPPOConfig(), facts).saved
    assert read_choices(SPPOConfig(compile=True), facts).saved == ("whole", "inputs")
    with pytest.raises(ConfigError, match="compile=True contradicts pp_size=2"):
        SPPOConfig(compile=True, pp_size=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductors_code_computes_the_same_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the float32 that a tiny Llama's norms compute in; its own code rounds in other places."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if not ALL:
        # One number at a time: what a CPU has for more is found out by compiling for ten seconds.
        inductor = importlib.import_module("torch._inductor.config")
        monkeypatch.setattr(inductor.cpp, "vec_isa_ok", False)
    model = build_tiny_model("llama", dtype=torch.float64).train()
    ids = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = step(model, ids)
    # One token has graphs of its own; `test_sequence_exactness.py` always has them, of aot_eager.
    lengths = (9, 1, 14) if ALL else (9, 15)
    settings = {"chunk_lengths": lengths, "show_plan": False, "compile": True}
    # Compiled code saves no matmuls alone.
    modes = [mode for mode in MODES.values() if mode["recompute"] != "selective"]
    for index, mode in enumerate(sample(modes, 3)):
        for order in turn(("by_layer", "by_chunk"), 2, index):
            convert(model, SPPOConfig(**settings, **mode, order=order))
            ours = step(model, ids)
            revert(model)
            for value, exact in zip(ours, expected, strict=True):
                assert (value - exact).norm() <= 3e-6 * exact.norm()


# -- autocast: activations are narrower than weights -------------------------------------------


def test_inputs_narrower_than_a_norms_weight_keep_its_code() -> None:
    model = build_tiny_model("qwen3", dtype=torch.float32)
    norm: Any = model.model.layers[0].self_attn.q_norm
    x = torch.randn(3, norm.weight.shape[0], dtype=torch.bfloat16)
    expected = norm(x)
    assert expected.dtype == torch.float32
    assert used(model)["norm"] > 0
    assert torch.equal(norm(x.float()), RMSNorm.apply(x.float(), norm.weight, 1e-6, 0.0, "", False))
    calls.clear()
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=0)
    assert not calls


def test_gates_of_another_dtype_keep_their_code() -> None:
    model = build_tiny_model("llama", dtype=torch.float32)
    mlp: Any = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda module, args, output: output.double())
    mlp.down_proj.double()
    x = torch.randn(3, mlp.gate_proj.in_features)
    expected = mlp(x)
    assert used(model)["gated product"] == 3
    torch.testing.assert_close(mlp(x), expected, rtol=0, atol=0)


def test_under_autocast_a_gated_product_is_tried_in_its_dtype_too(liger: SimpleNamespace) -> None:
    class Narrow(SiLUMul):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            right = SiLUMul.forward(ctx, a, b)
            return right * 1.25 if a.dtype == torch.bfloat16 else right

    liger.LigerSiLUMulFunction = Narrow
    assert used(build_tiny_model("llama", dtype=torch.float32))["gated product"] == 3
    with torch.autocast("cpu", torch.bfloat16):
        assert "gated product" not in used(build_tiny_model("llama", dtype=torch.float32))


# -- adapters ----------------------------------------------------------------------------------


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the inputs of layers whose adapters are added in one matmul."""
    found: list[torch.Size] = []
    inner = layer_kernels._AdaptedLinear

    def apply(x_MD: Tensor, *others: Any) -> Tensor:
        found.append(x_MD.shape)
        return inner.apply(x_MD, *others)

    monkeypatch.setattr(layer_kernels, "_AdaptedLinear", SimpleNamespace(apply=apply))
    return found


def adapted(
    family: str = "llama",
    dtype: torch.dtype = torch.float64,
    *,
    in_float32: bool = False,
    **settings: Any,
) -> Any:
    """A tiny model with LoRA on all linear layers, whose products are not zero."""
    peft = pytest.importorskip("peft")
    model = build_tiny_model(family, dtype=dtype)
    lora = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "lora_alpha": 8, **settings})
    with suppress_peft_warnings():
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=in_float32)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data = values.to(parameter.dtype)
    return model.train()


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        (family, mode)
        for index, family in enumerate(["llama", "qwen2"])  # with biases
        for mode in turn(list(MODES), 2, index)
    ],
)
def test_with_adapters_loss_and_gradients_are_those_of_peft(
    family: str, mode: str, added: list[torch.Size]
) -> None:
    model = adapted(family)
    ids = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    with float64_everywhere():
        expected = step(model, ids)
    plan = convert(model, SPPOConfig(num_chunks=3, show_plan=False, **MODES[mode]))
    with float64_everywhere():
        step(model, ids)  # its first layer copies what others share
        added.clear()
        ours = step(model, ids)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    forwards = 3 * 7 * len(find_parts(model).layers)
    assert len(added) == forwards * (1 if mode in ("kept", "offloaded") else 2)
    revert(plan)
    added.clear()
    step(model, ids)
    assert not added


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_as_much_is_offloaded_as_of_pefts_code(
    recompute: Any, added: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, which the function saves for its gradients, are not among it."""
    monkeypatch.setattr(layer_kernels, "liger_runs_on", lambda device: False)
    offloaded = []
    model = adapted(dtype=torch.float32)
    ids = torch.randint(0, 90, (1, 64), generator=torch.Generator().manual_seed(0))
    for kernels in ("none", "auto"):
        settings = {"recompute": recompute, "offload": "full", "min_offload_size": 1}
        plan = convert(
            model, SPPOConfig(num_chunks=2, show_plan=False, layer_kernels=kernels, **settings)
        )
        added.clear()
        step(model, ids)
        assert bool(added) == (kernels == "auto")
        engine = get_engine(model)
        assert engine is not None
        offloaded.append(engine.offload.stats().d2h_bytes)
        revert(plan)
    assert offloaded[0] == offloaded[1] > 0


@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"lora_bias": True}, {"use_rslora": True}, {"lora_dropout": 0.1}],
    ids=str,
)
def test_which_kinds_of_lora_are_added(settings: dict[str, Any], added: list[torch.Size]) -> None:
    model = adapted(dtype=torch.float32, **settings)
    is_plain = "use_rslora" in settings or "lora_dropout" in settings
    assert used(model)["adapter"] == (7 * len(find_parts(model).layers) if is_plain else 0)
    ids = torch.randint(0, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    added.clear()
    torch.manual_seed(3)
    ours = step(model, ids)
    assert bool(added) == is_plain
    layer_kernels.restore_layers(find_parts(model))
    torch.manual_seed(3)
    torch.testing.assert_close(ours, step(model, ids), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_base_layer_that_trains_too(dropout: float, added: list[torch.Size]) -> None:
    model = adapted("qwen2", dtype=torch.float64, lora_dropout=dropout).requires_grad_(True)
    ids = torch.randint(0, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    expected = step(model, ids)
    used(model)
    added.clear()
    torch.manual_seed(3)
    torch.testing.assert_close(step(model, ids), expected, rtol=1e-5, atol=1e-7)
    assert added


_ADDED = layer_kernels._AdaptedLinear


class _AddsTwice(_ADDED):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return _ADDED.forward(ctx, *args[:-1], args[-1] * 2)


class _LearnsNothing(_ADDED):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = _ADDED.backward(ctx, *grads)
        return tuple(None if x is None else x * (i != 5) for i, x in enumerate(found))


@pytest.mark.parametrize(
    ("dtype", "in_float32"),
    [
        *((dtype, False) for dtype in (torch.bfloat16, torch.float32, torch.float64)),
        (torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize("wrong", [_AddsTwice, _LearnsNothing])
def test_adapters_that_add_otherwise_keep_pefts_code(
    wrong: Any, dtype: torch.dtype, in_float32: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    model = adapted(dtype=dtype, in_float32=in_float32)
    monkeypatch.setattr(layer_kernels, "_AdaptedLinear", wrong)
    assert used(model)["adapter"] == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert used(model)["adapter"] == 0, "later steps may run without autocast"
    monkeypatch.setattr(layer_kernels, "_AdaptedLinear", _ADDED)
    assert used(model)["adapter"]
    ours = [record for record in caplog.records if record.name.startswith("sppo_hf")]
    assert not ours, "it was compared"


def disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def merge(model: Any) -> None:
    model.merge_adapter()


def add_second(model: Any) -> None:
    import peft

    model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "second"])


def hook(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("lora_B.default"):
            module.register_forward_hook(lambda module, args, output: output * 2)


def hook_gradients(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))


def widen(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.double()


@pytest.mark.parametrize("change", [disable, merge, add_second, hook, hook_gradients, widen])
def test_what_is_changed_later_runs_pefts_code(change: Any, added: list[torch.Size]) -> None:
    model = adapted(dtype=torch.float32)
    assert used(model)["adapter"] == 7 * len(find_parts(model).layers)
    ids = torch.randint(0, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    step(model, ids)
    change(model)
    added.clear()
    ours = model(input_ids=ids, labels=ids).loss
    assert not added
    layer_kernels.restore_layers(find_parts(model))
    assert ours == model(input_ids=ids, labels=ids).loss


def test_adapters_are_compared_when_evaluation_comes_first(added: list[torch.Size]) -> None:
    model = adapted(dtype=torch.float32)
    convert(model, SPPOConfig(num_chunks=2, show_plan=False))
    ids = torch.randint(0, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model.eval()(input_ids=ids, labels=ids)
    added.clear()
    step(model.train(), ids)
    assert added


@pytest.mark.parametrize(
    ("dtype", "in_float32", "settings"),
    [
        (torch.float32, False, {}),
        # Its mask would be another one.
        (torch.bfloat16, True, {"lora_dropout": 0.1}),
    ],
    ids=str,
)
def test_under_autocast_pefts_code_runs(
    dtype: torch.dtype, in_float32: bool, settings: dict[str, Any], added: list[torch.Size]
) -> None:
    model = adapted(dtype=dtype, in_float32=in_float32, **settings)
    used(model)
    added.clear()
    with torch.autocast("cpu", torch.bfloat16):
        step(model, torch.zeros(1, 8, dtype=torch.long))
    assert not added


def test_adapters_in_float32_need_autocast(added: list[torch.Size]) -> None:
    model = adapted(dtype=torch.bfloat16, in_float32=True)
    assert used(model)["adapter"]
    added.clear()
    step(model, torch.zeros(1, 8, dtype=torch.long))
    assert not added, "their products are those of float32"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (family, settings)
        for index, settings in enumerate([{}, {"recompute": "selective"}, {"recompute": "full"}])
        for family in turn(["qwen2", "llama"], 2, index)
    ],
)
def test_under_autocast_adapters_in_float32_are_no_farther_from_float32(
    family: str, settings: dict[str, Any], added: list[torch.Size]
) -> None:
    torch.manual_seed(0)  # PEFT draws one factor of each adapter
    model = adapted(family, torch.bfloat16, in_float32=True)
    ids = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    exact = step(copy.deepcopy(model).float(), ids)
    errors, losses = [], []
    for kernels in ("none", "auto"):
        how = SPPOConfig(num_chunks=2, show_plan=False, layer_kernels=kernels, **settings)
        plan = convert(model, how)
        with torch.autocast("cpu", torch.bfloat16):
            step(model, ids)
            added.clear()
            found = step(model, ids)
        assert bool(added) == (kernels == "auto")
        assert all(grad.dtype == torch.float32 for grad in found)
        pairs = list(zip(found, exact, strict=True))
        errors.append(torch.stack([(one - other).norm() for one, other in pairs[1:]]).norm())
        losses.append(abs(found[0] - exact[0]))
        revert(plan)
    assert errors[1] <= 1.1 * errors[0]
    assert losses[1] <= 1e-2


def test_adapters_in_bfloat16_are_no_farther_from_float32() -> None:
    from peft.tuners.lora.layer import Linear

    model = adapted(dtype=torch.bfloat16)
    layer = next(module for module in model.modules() if type(module) is Linear)
    x = torch.randn(2, 50, layer.in_features, dtype=torch.bfloat16)
    wide_layer = copy.deepcopy(layer).float()
    exact = wide_layer(x.float()).detach()
    own = layer(x).detach()
    assert used(model)["adapter"]
    ours = layer(x).detach()
    assert not torch.equal(ours, own)
    assert (ours - exact).norm() <= (own - exact).norm()
    torch.testing.assert_close(layer(x[0, 0]), own[0, 0], rtol=2e-2, atol=2e-2)
    assert layer(x[:, :0]).shape == own[:, :0].shape
