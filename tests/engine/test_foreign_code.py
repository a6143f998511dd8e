"""Modules of the user's own inside a stock model: exact, or refused at conversion by name."""

import copy
import gc
import random
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma3n.modeling_gemma3n import (
    Gemma3nForCausalLM,
    Gemma3nTextAttention,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
)

from sppo_hf import SPPOConfig, UnsupportedModelError
from sppo_hf.engine import foreign_code
from sppo_hf.engine.convert import check_convertible, convert, is_converted, revert
from sppo_hf.engine.foreign_code import check_foreign_code
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.stages import StageCut, StagedModel
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.sweeps import KINDS, sample, turn

TOKENS = 24
ORDERS: dict[str, dict[str, Any]] = {
    "by_chunk": {"num_chunks": 3, "order": "by_chunk"},
    "by_layer": {"num_chunks": 3, "order": "by_layer", "recompute": "full"},
    "tiles": {"num_chunks": 1, "order": "by_layer", "recompute": "full", "layer_tile_tokens": 8},
}


def _config(order: str = "by_chunk") -> SPPOConfig:
    return SPPOConfig(show_plan=False, show_progress=False, **ORDERS[order])


# -- modules that are token-wise -------------------------------------------------------------------


class _OwnMLP(nn.Module):
    """Token-wise, with dropout, a buffer that counts, and an attribute that does."""

    def __init__(self, config: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 40, dtype=dtype)
        self.down = nn.Linear(40, config.hidden_size, dtype=dtype)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls = 0
        self.lengths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[1]
        self.calls += 1
        self.lengths.append(x.shape[1])
        return self.down(self.drop(F.gelu(self.up(x))))


class _OwnNorm(LlamaRMSNorm):
    pass


class _OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.25


class _OwnAttention(LlamaAttention):
    """Attends as Transformers does, and scales what comes out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return out * 0.75, weights


class _OwnLayer(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 1.5


class _OwnEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


def _with_all_kinds() -> Any:
    model: Any = build_tiny_model("llama")
    first, second, third = model.model.layers
    first.mlp = _OwnMLP(model.config)
    first.input_layernorm.__class__ = _OwnNorm
    first.self_attn.__class__ = _OwnAttention
    second.__class__ = _OwnLayer
    third.mlp.down_proj.__class__ = _OwnLinear
    own_forward = third.post_attention_layernorm.forward
    third.post_attention_layernorm.forward = lambda x: own_forward(x) * 1.1
    model.model.embed_tokens.__class__ = _OwnEmbedding
    model.model.norm.__class__ = _OwnNorm
    model.lm_head.__class__ = _OwnLinear
    return model


@pytest.mark.parametrize(
    ("order", "lora"),
    [(order, lora) for i, order in enumerate(ORDERS) for lora in turn([False, True], 2, i)],
)
def test_token_wise_modules_of_the_users_own_are_exact(order: str, lora: bool) -> None:
    model = _with_all_kinds()
    model = add_lora(model) if lora else model
    report = compare(model, make_batch(rows=2, tokens=TOKENS, padding=(0, 5)), _config(order))
    assert report.exact, str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_accepted_in_other_dtypes(dtype: torch.dtype) -> None:
    model = _with_all_kinds().to(dtype)
    assert is_converted(convert(model, _config()))


def _in_tf32(x: Tensor) -> Tensor:
    """Round to TF32's 10 bits of mantissa."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class _InTF32(nn.Linear):
    """Multiplies few tokens in TF32 and more of them not, as kernels may where TF32 is allowed."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 8:
            return super().forward(x)
        return F.linear(_in_tf32(x), _in_tf32(self.weight))


def test_rounding_to_tf32_is_no_mixing_of_tokens_where_it_is_allowed() -> None:
    model: Any = build_tiny_model("llama", dtype=torch.float32)
    model.model.layers[0].mlp.down_proj.__class__ = _InTF32
    with pytest.raises(UnsupportedModelError, match="_InTF32"):
        convert(model, _config())
    matmuls = torch.backends.mkldnn.matmul
    before, matmuls.fp32_precision = matmuls.fp32_precision, "tf32"
    try:
        assert is_converted(convert(model, _config()))
    finally:
        matmuls.fp32_precision = before


class _ConvolvesInTF32(_InTF32):
    """A pointwise convolution by cuDNN, for which TF32 is allowed unless it is forbidden."""

    def forward(self, x: Tensor) -> Tensor:
        conv: Any = torch.backends.cudnn.conv
        allowed = conv.fp32_precision == "tf32"
        assert torch.backends.cudnn.allow_tf32 == allowed, "the older flag can be read"
        return super().forward(x) if allowed else F.linear(x, self.weight)


def test_convolutions_are_tried_without_tf32_which_is_allowed_them_by_default() -> None:
    conv: Any = torch.backends.cudnn.conv
    before = conv.fp32_precision, torch.backends.cudnn.allow_tf32
    assert before == ("tf32", True)
    model: Any = build_tiny_model("llama", dtype=torch.float32)
    model.model.layers[0].mlp.down_proj.__class__ = _ConvolvesInTF32
    assert is_converted(convert(model, _config()))
    assert (conv.fp32_precision, torch.backends.cudnn.allow_tf32) == before


def _make_own(module: nn.Module) -> None:
    kind = type(module)
    module.__class__ = type(f"Own{kind.__name__}", (kind,), {"__module__": __name__})


@pytest.mark.parametrize("family", ["llama", *sample(sorted(KINDS - {"gemma4_text"}), 3)])
def test_a_subclass_of_every_module_is_accepted(family: str) -> None:
    """Layers of all families can be tried: whatever they are called with, and return."""
    model = build_tiny_model(family)
    for layer in find_parts(model).layers:
        shares = getattr(getattr(layer, "self_attn", None), "is_kv_shared_layer", False)
        for name, module in list(layer.named_modules())[1:]:
            # A layer that reads another layer's keys does not run alone; its modules do.
            if not isinstance(module, nn.ModuleList) and not (shares and name == "self_attn"):
                _make_own(module)
    check_foreign_code(find_parts(model))


@pytest.mark.parametrize("family", ["bamba", "lfm2"])
def test_modules_around_and_inside_mixers_are_tried_and_mixers_refused(family: str) -> None:
    model: Any = build_tiny_model(family)
    layer = model.model.layers[0]
    mixer = layer.mamba if family == "bamba" else layer.conv
    _make_own(layer.feed_forward)
    _make_own(mixer.in_proj)
    check_foreign_code(find_parts(model))
    own_forward = mixer.in_proj.forward
    mixer.in_proj.forward = lambda x: own_forward(x + x.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\..*\.in_proj .*depends on other"):
        check_foreign_code(find_parts(model))
    del mixer.in_proj.forward
    kind = type(mixer)
    mixer.__class__ = type("OwnMixer", (kind,), {"__module__": __name__, "forward": kind.forward})
    with pytest.raises(UnsupportedModelError, match=r"\(OwnMixer\).*model class of your own"):
        check_foreign_code(find_parts(model))


def test_stock_models_and_adapters_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_code, "_record_calls", lambda *_: pytest.fail("tried"))
    for family in ("llama", "bamba", "qwen3_moe", "gpt2"):
        check_foreign_code(find_parts(build_tiny_model(family)))
    check_foreign_code(find_parts(add_lora(build_tiny_model("llama"))))


# -- modules that mix tokens -----------------------------------------------------------------------


class _Convolution(nn.Module):
    """A causal convolution over the sequence that starts as the identity, around an MLP."""

    def __init__(self, mlp: nn.Module, width: int) -> None:
        super().__init__()
        self.mlp = mlp
        self.weight = nn.Parameter(torch.zeros(width, 1, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x.transpose(1, 2), (3, -1))
        return self.mlp(x + F.conv1d(before, self.weight, groups=x.shape[-1]).transpose(1, 2))


class _Function(nn.Module):
    def __init__(self, module: nn.Module, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.module(self.change(self, x))


def _cumulative_mean(_: nn.Module, x: Tensor) -> Tensor:
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def _from_the_end(_: nn.Module, x: Tensor) -> Tensor:
    return x + 0.01 * x.flip(1).cumsum(1).flip(1)


def _by_place(_: nn.Module, x: Tensor) -> Tensor:
    return x * torch.linspace(0.5, 1.5, 4096)[: x.shape[1], None]


def _by_length(_: nn.Module, x: Tensor) -> Tensor:
    return x / x.shape[1]


def _token_shift(self: Any, x: Tensor) -> Tensor:
    last = getattr(self, "last", None)
    before = torch.zeros_like(x[:, :1]) if last is None else last
    self.last = x[:, -1:].detach()
    return x + torch.cat([before, x[:, :-1]], 1)


def _only_in_training(self: nn.Module, x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True) if self.training else x


FUNCTIONS = {
    "cumulative mean": _cumulative_mean,
    "from the end": _from_the_end,
    "by place": _by_place,
    "by length": _by_length,
    "in training": _only_in_training,
}


class _ConvolvesKeys(LlamaAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        own = self.k_proj.forward
        self.k_proj.forward = lambda x: own(x) + own(x).roll(1, 1)


class _OwnKernel(LlamaAttention):
    """Attends without Transformers' interface."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        q = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = (
            proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def _that_shifts_tokens() -> Any:
    model: Any = build_tiny_model("llama")
    model.model.layers[2].mlp = _Function(model.model.layers[2].mlp, _token_shift)
    return model


def _mixing(kind: str) -> tuple[Any, str]:
    """A model in which the user has put something that mixes tokens, and what it is called."""
    model: Any = build_tiny_model("llama")
    layer, width = model.model.layers[1], model.config.hidden_size
    if kind in FUNCTIONS:
        layer.mlp = _Function(layer.mlp, FUNCTIONS[kind])
        return model, r"model\.layers\.1\.mlp \(_Function\)"
    if kind == "convolution":
        layer.mlp = _Convolution(layer.mlp, width)
        return model, r"model\.layers\.1\.mlp \(_Convolution\)"
    if kind == "batch norm":
        # Torch's own, which no stock layer contains.
        norm = nn.BatchNorm1d(width, dtype=torch.float64)
        layer.mlp = nn.Sequential(nn.Flatten(0, 1), norm, nn.Unflatten(0, (1, -1)))
        return model, r"model\.layers\.1\.mlp\.1 \(BatchNorm1d\)"
    if kind == "keys":
        layer.self_attn = _ConvolvesKeys(model.config, 1).double()
        return model, r"model\.layers\.1\.self_attn \(_ConvolvesKeys\)"
    if kind == "kernel":
        layer.self_attn.__class__ = _OwnKernel
        return model, r"model\.layers\.1\.self_attn \(_OwnKernel\)"
    if kind == "forward":
        own = layer.mlp.forward
        layer.mlp.forward = lambda x: own(x + x.mean(1, keepdim=True))
        return model, r"model\.layers\.1\.mlp \(LlamaMLP with a forward of its own\)"
    if kind == "head":
        model.lm_head = _Function(model.lm_head, _cumulative_mean)
        model.get_output_embeddings = lambda: model.lm_head
        return model, r"lm_head \(_Function\)"
    if kind == "norm":
        model.model.norm = _Function(model.model.norm, _cumulative_mean)
        return model, r"model\.norm \(_Function\)"
    assert kind == "embedding"
    model.model.embed_tokens.__class__ = type(
        "Shifting", (nn.Embedding,), {"__module__": __name__, "forward": _embed_two}
    )
    return model, r"model\.embed_tokens \(Shifting\)"


def _embed_two(self: nn.Embedding, ids: Tensor) -> Tensor:
    found = F.embedding(ids, self.weight)
    return found + 0.5 * F.pad(found, (0, 0, 1, -1))


MIXING = [
    *(*FUNCTIONS, "convolution", "batch norm", "keys", "kernel", "forward"),
    *("head", "norm", "embedding"),
]


@pytest.mark.parametrize("kind", MIXING)
def test_modules_that_mix_tokens_are_refused_by_name(kind: str) -> None:
    model, name = _mixing(kind)
    with pytest.raises(UnsupportedModelError) as refused:
        convert(model, _config())
    message = str(refused.value)
    assert message.startswith("LlamaForCausalLM cannot be trained chunk by chunk: what ")
    assert re.search(name, message), message
    assert "depends on other tokens" in message
    assert "replace this module, or train without sppo_hf" in message
    assert not is_converted(model)


@pytest.mark.parametrize("order", ["by_layer", "tiles"])
@pytest.mark.parametrize("kind", ["norm", "head"])
def test_they_are_refused_in_other_orders(order: str, kind: str) -> None:
    model, _ = _mixing(kind)
    with pytest.raises(UnsupportedModelError, match="depends on other tokens"):
        convert(model, _config(order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_that_starts_as_the_identity_is_found_in_any_dtype(
    dtype: torch.dtype,
) -> None:
    model, name = _mixing("convolution")
    with pytest.raises(UnsupportedModelError, match=name):
        check_convertible(model.to(dtype))


def test_a_forward_that_was_replaced_for_the_whole_class_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, _cumulative_mean(self, x)))
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mlp \(LlamaMLP\)"):
        convert(build_tiny_model("llama"), _config())


def test_a_base_model_of_the_users_own_is_refused() -> None:
    model: Any = build_tiny_model("llama")
    model.model.__class__ = type("OwnModel", (LlamaModel,), {"__module__": __name__})
    with pytest.raises(UnsupportedModelError, match=r"model \(OwnModel\) was put in place after"):
        convert(model, _config())


# -- modules that cannot be tried ------------------------------------------------------------------


class _InGroups(nn.Module):
    """Takes tokens in groups of eight."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:1], -1, 8, x.shape[-1]).flip(2).view(x.shape)


class _Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class _Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.bfloat16
        return x * 2


class _NoiseInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_InGroups, r"on 5 tokens it fails \(RuntimeError: .*"),
        (_Noise, "called once more, in eval mode, too"),
    ],
)
def test_modules_that_cannot_be_tried_are_refused(kind: type[nn.Module], reason: str) -> None:
    model: Any = build_tiny_model("llama")
    model.model.layers[2].mlp = kind()
    with pytest.raises(
        UnsupportedModelError,
        match=rf"model\.layers\.2\.mlp \({kind.__name__}\) is your own code.*: {reason}.*"
        "Remedy: build it in a model class of your own, a subclass of LlamaForCausalLM",
    ):
        convert(model, _config())


def test_a_module_that_keeps_a_state_from_call_to_call_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="called once more, in eval mode, too"):
        convert(_that_shifts_tokens(), _config())


def test_noise_in_training_alone_is_no_reason() -> None:
    model: Any = build_tiny_model("llama")
    model.model.layers[2].mlp = _NoiseInTraining()
    assert is_converted(convert(model, _config()))


def test_a_module_of_sixteen_bits_alone_is_tried_in_them() -> None:
    model: Any = build_tiny_model("llama", dtype=torch.bfloat16)
    model.model.layers[2].mlp = _Narrow()
    assert is_converted(convert(model, _config()))


class _Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) * 2


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def test_generated_code_is_tried() -> None:
    model: Any = build_tiny_model("llama")
    model.model.layers[1].mlp = torch.fx.symbolic_trace(_Gelu())
    assert is_converted(convert(model, _config()))
    revert(model)
    model.model.layers[2].mlp = torch.fx.symbolic_trace(_Mean())
    with pytest.raises(UnsupportedModelError, match=r"layers\.2\.mlp .*depends on other tokens"):
        convert(model, _config())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.jit.trace(_Gelu(), torch.ones(1, 2, 3)), "TorchScript's modules cannot"),
        (lambda: nn.Sequential(_Gelu(), nn.LazyLinear(64)), "parameters have no shape"),
    ],
    ids=["TorchScript", "lazy"],
)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Lazy modules"
)
def test_modules_that_have_no_weights_to_replace_are_refused(
    make: Callable[[], nn.Module], reason: str
) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model: Any = build_tiny_model("llama")
    model.model.layers[2].mlp = Around()
    with pytest.raises(UnsupportedModelError, match=rf"layers\.2\.mlp .*: .*{reason}"):
        check_convertible(model)


def test_in_a_large_layer_the_users_modules_are_tried_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreign_code, "_MOST_PARAMETERS", 100)
    model: Any = build_tiny_model("llama")
    model.model.layers[1].mlp = _Gelu()
    run, ran = foreign_code._Trial._compare_with, []
    monkeypatch.setattr(
        foreign_code._Trial,
        "_compare_with",
        lambda trial, setting: (ran.append(trial.root), run(trial, setting)),
    )
    check_convertible(model)
    assert ran == [model.model.layers[1].mlp]
    model.model.layers[2].mlp = _Mean()
    with pytest.raises(UnsupportedModelError, match=r"layers\.2\.mlp .*depends on other tokens"):
        check_convertible(model)


def test_a_compiled_module_is_not_compiled_for_the_trial() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model: Any = build_tiny_model("llama")
    model.model.layers[1].mlp = torch.compile(_Gelu(), backend=backend)
    check_convertible(model)
    assert not compiled
    model.model.layers[1].mlp(torch.ones(1, 2, 3))
    assert compiled


def test_a_model_class_that_builds_what_cannot_be_tried_is_tried_whole() -> None:
    """The remedy that the error names."""

    class OwnAttention(Gemma3nTextAttention):
        pass

    class OwnGemma(Gemma3nForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.self_attn.__class__ = OwnAttention

    # Its last layers read keys that others have made, and do not run alone.
    model: Any = build_tiny_model("gemma3n_text")
    model.model.layers[-1].self_attn.__class__ = OwnAttention
    with pytest.raises(
        UnsupportedModelError, match=r"OwnAttention\).* subclass of Gemma3nForCausal"
    ):
        convert(model, _config())
    own: Any = OwnGemma(model.config)
    assert is_converted(convert(own, _config()))
    revert(own)
    own.model.layers[0].mlp = _Function(own.model.layers[0].mlp, _cumulative_mean)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mlp \(_Function\)"):
        convert(own, _config())


# -- what a trial leaves behind --------------------------------------------------------------------


def _everything(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, dict):
                value = {
                    k: (id(v), getattr(v, "_version", 0)) if isinstance(v, Tensor) else id(v)
                    for k, v in value.items()
                }
            found[f"{name}:{key}"] = list(value) if isinstance(value, list) else value
    return found


def test_hooks_of_others_are_named_once(recwarn: pytest.WarningsRecorder) -> None:
    model = build_tiny_model("llama")
    model.enable_input_require_grads()  # a hook of Transformers
    revert(convert(model, _config()))
    assert not [one for one in recwarn if "forward hooks" in str(one.message)]
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    model.lm_head.register_forward_pre_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp \(LlamaMLP\) \(and 1 more\) may be"):
        revert(convert(model, _config()))
    recwarn.clear()
    convert(model, _config())
    assert not [one for one in recwarn if "forward hooks" in str(one.message)]


def test_a_trial_leaves_nothing_behind() -> None:
    model = _with_all_kinds().train()
    model.model.layers[0].mlp.drop.p = 0.5
    model.model.layers[1].mlp.eval()
    seen: list[Tensor] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *given: seen.append(given[-1]))
    model.model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("a user's hook ran"))
    before, weights = _everything(model), {n: p.clone() for n, p in model.state_dict().items()}
    torch.manual_seed(77), random.seed(77), np.random.seed(77)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    check_convertible(model)
    assert _everything(model) == before
    assert all(torch.equal(weights[name], now) for name, now in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert not seen
    revert(convert(model, _config()))
    assert _everything(model) == before


def test_weights_of_a_trial_that_failed_are_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build_tiny_model("llama", dtype=torch.bfloat16)
    model.model.layers[2].mlp = _Narrow()
    drawn: list[weakref.ref[Tensor]] = []
    draw = foreign_code._draw

    def watched(*given: Any) -> Tensor:
        tensor = draw(*given)
        drawn.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(foreign_code, "_draw", watched)
    gc.collect()
    gc.disable()
    try:
        check_convertible(model)
        assert drawn
        assert not any(tensor() is not None for tensor in drawn)
    finally:
        gc.enable()


def test_other_devices_keep_their_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.manual_seed` seeds beside the CPU is not restored."""
    model = _with_all_kinds()
    monkeypatch.setattr(torch, "manual_seed", lambda *_: pytest.fail("all devices are seeded"))
    check_convertible(model)


def test_nothing_is_left_behind_by_a_refusal() -> None:
    model = _that_shifts_tokens()
    before = _everything(model)
    with pytest.raises(UnsupportedModelError):
        check_convertible(model)
    assert _everything(model) == before


def test_a_model_is_tried_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _with_all_kinds()
    check_convertible(model)
    with monkeypatch.context() as patched:
        patched.setattr(foreign_code, "_record_calls", lambda *_: pytest.fail("tried again"))
        convert(model, _config())
    revert(model)
    model.model.layers[1].mlp = _Function(model.model.layers[1].mlp, _cumulative_mean)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1"):
        convert(model, _config())


# -- where weights are elsewhere -------------------------------------------------------------------


def test_a_rank_of_a_pipeline_tries_its_own_layers() -> None:
    cut = StageCut((range(1), range(1, 3)), (1,))
    for kind, own in (("cumulative mean", True), ("embedding", False)):
        model, name = _mixing(kind)
        StagedModel(find_parts(model), cut)
        if own:
            with pytest.raises(UnsupportedModelError, match=name):
                check_foreign_code(find_parts(model))
        else:
            check_foreign_code(find_parts(model))


def test_weights_that_are_not_here_are_not_tried() -> None:
    """Another rank has them, and tries."""
    model, _ = _mixing("convolution")
    check_foreign_code(find_parts(model.to("meta")))


def _drop_connect(module: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (nn.utils.parametrizations.spectral_norm, r"parametrization of its weight \(_Spectral"),
        (nn.utils.spectral_norm, "has torch's spectral_norm"),
        (_drop_connect, r"parametrization of its weight \(Dropout\)"),
    ],
)
def test_weights_that_change_at_every_call_are_refused(
    change: Callable[[nn.Module], Any], reason: str
) -> None:
    model = build_tiny_model("llama").eval()
    change(model.model.layers[1].mlp.up_proj)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match=rf"layers\.1\.mlp\.up_proj .* {reason}"):
        convert(model, _config())
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_weights_that_are_parametrized_are_exact() -> None:
    model = build_tiny_model("llama").train()
    nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)
    assert compare(model, make_batch(rows=1, tokens=TOKENS), _config()).exact


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_weights_that_the_caller_caches_are_computed_for_every_chunk(recompute: str) -> None:
    """Of one cached weight a chunk's backward would free the graph that the others need."""
    model, batch = build_tiny_model("llama").train(), make_batch(rows=1, tokens=TOKENS)
    for module in (model.model.layers[1].mlp.up_proj, model.lm_head):
        nn.utils.parametrizations.weight_norm(module)
    plain = copy.deepcopy(model)
    plain(**batch).loss.backward()
    convert(model, _config().replace(recompute=recompute))
    for within in (True, False):
        model.zero_grad()
        with nn.utils.parametrize.cached():
            loss = model(**batch).loss
            if within:
                loss.backward()
        if not within:
            loss.backward()
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-5, atol=1e-6)


# -- changes after the conversion ------------------------------------------------------------------


def test_spectral_norm_after_the_conversion_is_refused() -> None:
    """It is a hook and adds no module."""
    model = build_tiny_model("llama").train()
    batch = make_batch(rows=1, tokens=TOKENS)
    convert(model, _config())
    model(**batch).loss.backward()
    nn.utils.spectral_norm(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj .* spectral_norm"):
        model(**batch)
    nn.utils.remove_spectral_norm(model.model.layers[1].mlp.up_proj)
    model(**batch).loss.backward()


def test_modules_put_in_after_the_conversion_are_tried_before_the_next_step() -> None:
    model = build_tiny_model("llama").train()
    batch = make_batch(rows=1, tokens=TOKENS)
    convert(model, _config())
    model(**batch).loss.backward()
    mlp = model.model.layers[1].mlp
    model.model.layers[1].mlp = _Convolution(mlp, model.config.hidden_size)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp \(_Convolution\)"):
        model(**batch)
    model.model.layers[1].mlp = mlp
    model(**batch).loss.backward()


def test_a_rotary_table_that_depends_on_the_length_is_not_put_in_after_the_conversion() -> None:
    model = build_tiny_model("llama").train()
    batch = make_batch(rows=1, tokens=TOKENS)
    convert(model, _config())
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    model.config.rope_parameters["factor"] = 2.0
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with pytest.raises(UnsupportedModelError, match=r"rotary_emb .*plugin\.revert\(model\)"):
        model(**batch)
    convert(revert(model), _config())
    model(**batch).loss.backward()


def test_a_forward_of_the_users_own_is_put_around_a_converted_model_only() -> None:
    def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            output.loss = 2 * output.loss
            return output

        return run

    model, batch = build_tiny_model("llama").train(), make_batch(rows=1, tokens=TOKENS)
    expected = 2 * model(**batch).loss.item()
    own = model.forward
    model.forward = doubled(own)
    with pytest.raises(UnsupportedModelError, match="forward was replaced in this model"):
        convert(model, _config())
    del model.forward
    convert(model, _config())
    model.forward = doubled(model.forward)
    assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-5)
