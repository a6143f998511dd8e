"""Rotary embedding by Liger's kernel: exact, only in chunks of models for which it is right.

A stand-in writes in place, where Liger's kernel does.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sppo_hf import SPPOConfig
from sppo_hf.engine import layer_kernels
from sppo_hf.engine.chunk_context import ChunkContext
from sppo_hf.engine.convert import convert, revert
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.recompute import RecomputedLayer
from sppo_hf.testing.exactness import compare_drift, parameter_errors, run_batch, run_reference
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.sweeps import turn

CPU = torch.device("cpu")
LAYERS = 3
LENGTHS = (9, 1, 13)
LONGER = 2
"""Chunks of more than one token, which take the kernel."""
TRIED = {"forward": 1, "backward": 1}
BATCH = make_batch(rows=2, tokens=sum(LENGTHS))


def rotate(x_BNCH: Tensor, cos: Tensor, sin: Tensor, width: int) -> None:
    """Rotate in place, unseen by autograd, and only in the layout in which Liger does."""
    x_BCNH = x_BNCH.transpose(1, 2).contiguous()
    half, cos, sin = width // 2, cos.unsqueeze(2), sin.unsqueeze(2)
    left, right = x_BCNH.data[..., :half].clone(), x_BCNH.data[..., half:width].clone()
    cos, sin = cos[..., :half], sin[..., :half]
    x_BCNH.data[..., :half] = left * cos - right * sin
    x_BCNH.data[..., half:width] = right * cos + left * sin


class Rope:
    """Stands for `liger_kernel.ops.rope`; counts its calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def rope_forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None = None
    ) -> tuple[Tensor, ...]:
        self.calls["forward"] += 1
        for x in (q, k):
            rotate(x, cos, sin, cos.shape[-1])
        return q, k, cos, sin

    def rope_backward(
        self, dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None = None
    ) -> tuple[Tensor, ...]:
        self.calls["backward"] += 1
        for x in (dq, dk):
            rotate(x, cos, -sin, cos.shape[-1])
        return dq, dk


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of the functions that are replaced in a test; undone after it."""
    names: set[str] = set()
    undo: list[Callable[[], None]] = []
    own = layer_kernels.replace_by_choice

    def replace(module: dict[str, Any], name: str, choose: Any) -> None:
        function = module[name]
        undo.append(lambda: module.__setitem__(name, function))
        names.add(name)
        own(module, name, choose)

    monkeypatch.setattr(layer_kernels, "replace_by_choice", replace)
    yield names
    for one in reversed(undo):
        one()


@pytest.fixture
def rope(monkeypatch: pytest.MonkeyPatch, replaced: set[str]) -> Rope:
    """A stand-in for Liger's rotary embedding, and no other kernels."""
    made = Rope()
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rope", made)
    monkeypatch.setattr(layer_kernels, "liger_runs_on", lambda device: True)
    monkeypatch.setattr(layer_kernels, "_is_candidate", lambda module: False)
    # So that exactness can be seen to twelve digits.
    monkeypatch.setattr(layer_kernels, "_DTYPES", (torch.float64, torch.float32, torch.bfloat16))
    monkeypatch.setitem(layer_kernels._ROUNDING, torch.float64, 1e-6)
    return made


def config(**others: Any) -> SPPOConfig:
    return SPPOConfig(
        **{"chunk_lengths": LENGTHS, "offload": "none", "show_plan": False, "min_offload_size": 1}
        | others
    )


def check(model: nn.Module, batch: dict[str, Tensor] = BATCH, **settings: Any) -> None:
    """Compare a converted copy with the unmodified model."""
    expected = run_reference(model, batch, hooks=False)
    ours = copy.deepcopy(model).train()
    convert(ours, config(**settings))
    found = run_batch(ours, batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert parameter_errors(found, expected)[0].error < 1e-9


RERUN = {"none": 0, "selective": 1, "full": 1}


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *(("llama", recompute) for recompute in RERUN),
        *(
            (family, recompute)
            for index, family in enumerate(["qwen3", "phi3", "nemotron", "llama-dynamic-rope"])
            for recompute in turn(list(RERUN), 3, index)
        ),
    ],
)
def test_loss_and_gradients_are_those_of_the_models_own_code(
    rope: Rope, family: str, recompute: str
) -> None:
    """Fused projections (phi3) and tables of a part of the head (nemotron) among them."""
    check(build_tiny_model(family), recompute=recompute)
    runs = LAYERS * LONGER
    assert rope.calls == {
        "forward": TRIED["forward"] + runs * (1 + RERUN[recompute]),
        "backward": TRIED["backward"] + runs,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "full", "offload": "full", "offload_kv": "full", "order": "by_chunk"},
        {"recompute": "none", "offload": "full", "order": "by_layer"},
        {"recompute": "selective", "offload": "full", "order": "by_layer"},
    ],
)
def test_other_ways_to_keep_activations(rope: Rope, settings: dict[str, Any]) -> None:
    check(add_lora(build_tiny_model("llama")), **settings)
    assert rope.calls["backward"] == TRIED["backward"] + LAYERS * LONGER


@pytest.mark.parametrize("padding", ["padding", "left_padding"])
def test_rows_with_tables_of_their_own(rope: Rope, padding: str) -> None:
    """With padding on the left positions differ; a row's first chunk has nothing else."""
    given: dict[str, Any] = {padding: (0, 9)}
    batch = make_batch(rows=2, tokens=sum(LENGTHS), **given)
    if padding == "left_padding":
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    check(build_tiny_model("llama"), batch, recompute="full")
    assert rope.calls["backward"] > TRIED["backward"]


def test_only_chunks_of_a_model_that_takes_it_run_the_kernel(rope: Rope) -> None:
    model, other = (build_tiny_model("llama").train() for _ in range(2))
    untouched = build_tiny_model("llama").train()
    convert(model, config(recompute="full"))
    convert(other, config(recompute="full", layer_kernels="none"))
    run_batch(model, BATCH)
    assert rope.calls["forward"] > TRIED["forward"]
    rope.calls.clear()
    for each in (other, untouched):
        run_batch(each, BATCH)
    with torch.no_grad():
        model.eval()(input_ids=BATCH["input_ids"])  # without labels: not in chunks
    assert not rope.calls
    model.train()
    run_batch(model, BATCH)
    assert rope.calls == {"forward": 2 * LAYERS * LONGER, "backward": LAYERS * LONGER}
    rope.calls.clear()
    revert(model)
    run_batch(model, BATCH)
    assert not rope.calls
    assert find_parts(model).causal_lm not in layer_kernels._rotary


class Sign(Rope):
    def rope_forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> Any:
        return super().rope_forward(q, k, cos, -sin)


class BackwardSign(Rope):
    def rope_backward(self, dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> Any:
        return super().rope_backward(dq, dk, cos, -sin)


class KeysAlone(Rope):
    def rope_forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> Any:
        return super().rope_forward(q.clone(), k, cos, sin)


class Breaks(Rope):
    def rope_forward(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("wrong", [Sign, BackwardSign, KeysAlone, Breaks])
def test_a_kernel_that_differs_is_not_used(
    rope: Rope,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wrong: type[Rope],
) -> None:
    made = wrong()
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rope", made)
    check(build_tiny_model("llama"), recompute="full")
    assert made.calls == ({} if wrong is Breaks else TRIED)
    if wrong is Breaks:
        (line,) = caplog.messages
        assert line.startswith("Rotary embedding keeps the model's own code")
        assert "RuntimeError: no kernel image is available" in line
    else:
        assert not caplog.messages, "a kernel that differs is nothing to report"


@pytest.mark.parametrize("family", ["cohere", "glm", "gpt_oss", "gemma3n_text"])
def test_another_rotary_embedding_keeps_its_own_code(rope: Rope, family: str) -> None:
    """Interleaved; of tables of half the width; one tensor at a time."""
    check(build_tiny_model(family), recompute="full")
    assert rope.calls["forward"] <= TRIED["forward"]


def test_tables_whose_halves_differ_keep_the_models_own_code(rope: Rope) -> None:
    model = build_tiny_model("llama")
    size = model.model.layers[0].self_attn.head_dim
    factor = torch.linspace(0.5, 1.5, size, dtype=torch.float64)
    model.model.rotary_emb.register_forward_hook(lambda *call: (call[2][0] * factor, call[2][1]))
    check(model, recompute="full")
    assert not rope.calls


def test_a_release_without_the_kernel(rope: Rope, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rope", SimpleNamespace(rope_forward=None))
    check(build_tiny_model("llama"), recompute="full")
    monkeypatch.delitem(sys.modules, "liger_kernel.ops.rope")
    check(build_tiny_model("llama"), recompute="full")
    assert not rope.calls


def test_it_needs_no_weights_that_fsdp2_would_shard(
    rope: Rope, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = find_parts(build_tiny_model("llama"))
    monkeypatch.setattr(type(parts), "is_sharded", lambda self: True)
    layer_kernels.use_layer_kernels(parts, CPU)
    assert parts.causal_lm in layer_kernels._rotary


def test_a_release_that_knows_no_parts_of_heads(
    rope: Rope, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = SimpleNamespace(
        rope_forward=lambda q, k, cos, sin: rope.rope_forward(q, k, cos, sin),
        rope_backward=rope.rope_backward,
    )
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rope", release)
    check(build_tiny_model("nemotron"), recompute="full")
    assert not rope.calls


def test_results_of_another_dtype_keep_the_models_own_code(rope: Rope) -> None:
    """Under autocast: queries in bfloat16 times tables in float32 are float32."""
    losses = []
    for setting in ("auto", "none"):
        model = build_tiny_model("llama", dtype=torch.float32).train()
        convert(model, config(recompute="full", layer_kernels=setting))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**BATCH).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert rope.calls == TRIED


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_no_more_matmuls_are_kept(rope: Rope, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Counter[tuple[str, str]] = Counter()
    own = RecomputedLayer._hold_matmul
    setting = ""

    def hold(self: RecomputedLayer, kind: str, tensor: Tensor) -> Any:
        kept[setting, kind] += 1
        return own(self, kind, tensor)

    monkeypatch.setattr(RecomputedLayer, "_hold_matmul", hold)
    for setting in ("auto", "none"):
        check(build_tiny_model(family), recompute="selective", layer_kernels=setting)
    by_setting = [{k: n for (s, k), n in kept.items() if s == each} for each in ("auto", "none")]
    assert by_setting[0] == by_setting[1]
    assert by_setting[0]
    assert rope.calls["backward"] > TRIED["backward"]


# -- the kernel alone --------------------------------------------------------------------------

B, C, H = 2, 5, 8


def tables(rows: int = 1) -> tuple[Tensor, Tensor]:
    half = torch.randn(rows, C, H // 2, generator=torch.Generator().manual_seed(1)).double()
    angles = torch.cat((half, half), dim=-1)
    return angles.cos(), angles.sin()


def own_code(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.llama import modeling_llama

    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)


def kernel_of(rope: Rope) -> Any:
    return layer_kernels._RotaryKernel(rope.rope_forward, rope.rope_backward, CPU)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LAYOUTS: dict[str, Callable[[], list[Tensor]]] = {
    "of projections": lambda: [drawn(B, C, n, H).transpose(1, 2) for n in (4, 2)],
    "of one projection": lambda: [
        x.transpose(1, 2) for x in drawn(B, C, 6, H).split((4, 2), dim=2)
    ],
    "head by head": lambda: [drawn(B, n, C, H) for n in (4, 2)],
    "one key for all rows": lambda: [drawn(B, 4, C, H), drawn(1, 2, C, H).expand(B, -1, -1, -1)],
}


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_neither_inputs_nor_gradients_are_written(rope: Rope, layout: str, rows: int) -> None:
    q, k = (x.requires_grad_() for x in LAYOUTS[layout]())
    before = [q.detach().clone(), k.detach().clone()]
    versions = [q._version, k._version]
    rotated = kernel_of(rope)(q, k, *tables(rows))
    expected = own_code(q, k, *tables(rows))
    torch.testing.assert_close(rotated, expected)
    torch.testing.assert_close([q.detach(), k.detach()], before, rtol=0, atol=0)
    # Each in memory of its own, and one shared by all tokens.
    for grads in ([drawn(B, 4, C, H), drawn(B, 2, C, H)], [drawn(B, n, 1, H) for n in (4, 2)]):
        given = [grad.expand(x.shape) for grad, x in zip(grads, rotated, strict=True)]
        unchanged = [grad.clone() for grad in given]
        found = torch.autograd.grad(rotated, (q, k), given, retain_graph=True)
        torch.testing.assert_close(
            found, torch.autograd.grad(expected, (q, k), given, retain_graph=True)
        )
        torch.testing.assert_close(given, unchanged, rtol=0, atol=0)
    assert [q._version, k._version] == versions


def test_what_follows_may_write_into_the_result(rope: Rope) -> None:
    q, k = (x.requires_grad_() for x in LAYOUTS["of projections"]())
    rotated, _ = kernel_of(rope)(q, k, *tables())
    rotated *= 2
    (found,) = torch.autograd.grad(rotated.sum(), q)
    (expected,) = torch.autograd.grad(2 * own_code(q, k, *tables())[0].sum(), q)
    torch.testing.assert_close(found, expected)


def test_one_of_both_may_need_no_gradient(rope: Rope) -> None:
    q, k = LAYOUTS["of projections"]()
    k.requires_grad_()
    (found,) = torch.autograd.grad(kernel_of(rope)(q, k, *tables())[1].sum(), k)
    (expected,) = torch.autograd.grad(own_code(q, k, *tables())[1].sum(), k)
    torch.testing.assert_close(found, expected)


def test_other_calls_run_the_models_own_code(rope: Rope) -> None:
    q, k = LAYOUTS["of projections"]()
    cos, sin = tables()
    can_run = kernel_of(rope).can_run
    assert can_run(q, k, cos, sin)
    assert not can_run(q, k.float(), cos, sin)
    assert not can_run(q.half(), k.half(), cos, sin), "not among the dtypes of this test"
    assert not can_run(q[:, :, :1], k[:, :, :1], cos[:, :1], sin[:, :1])
    assert not can_run(q, k, cos[0], sin[0])
    assert not can_run(q, k, cos.clone().requires_grad_(), sin)
    assert not can_run(q[..., :4], k[..., :4], cos, sin), "tables wider than heads"
    odd = (x[..., :5] for x in (q, k, cos, sin))
    assert not can_run(*odd), "no two halves to rotate"
    assert not can_run(q.to("meta"), k.to("meta"), cos.to("meta"), sin.to("meta"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in (q, k, cos, sin)]
    assert not can_run(*fake)


def test_what_was_not_tried_in_forward_is_not_tried_in_a_rerun(rope: Rope) -> None:
    from transformers.models.llama import modeling_llama

    model = build_tiny_model("llama")
    parts = find_parts(model)
    layer_kernels.use_layer_kernels(parts, CPU)
    q, k = LAYOUTS["of projections"]()
    with ChunkContext(model=parts, layer=0).entered():
        rotated = modeling_llama.apply_rotary_pos_emb(q, k, *tables())
    assert not rope.calls
    torch.testing.assert_close(rotated, own_code(q, k, *tables()), rtol=0, atol=0)


def test_compilers_see_the_models_own_code(rope: Rope) -> None:
    from transformers.models.llama import modeling_llama

    layer_kernels.use_layer_kernels(find_parts(build_tiny_model("llama")), CPU)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)

    q, k = LAYOUTS["of projections"]()
    compiled = torch.compile(rotated, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, *tables()), own_code(q, k, *tables()))


def test_the_package_kernels_makes_modules_of_functions() -> None:
    class Func(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int = 1) -> None:
            pass

    assert layer_kernels._is_rotary(Func())
    assert not layer_kernels._is_rotary(Func)
    assert not layer_kernels._is_rotary(nn.Linear(2, 2))


# -- Liger's own -------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
}


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", RERUN)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ligers_kernel(
    family: str, recompute: str, replaced: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No farther from float32 than the unmodified model in bfloat16, with some slack."""
    liger = pytest.importorskip("liger_kernel.ops.rope")
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        own = getattr(liger, name)

        def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            calls[name] += 1
            rotated = own(q, k, cos, sin)
            assert rotated[0].data_ptr() == q.data_ptr(), "it writes in place"
            return rotated

        return run

    for name in ("rope_forward", "rope_backward"):
        monkeypatch.setattr(liger, name, counted(name))
    torch.manual_seed(0)
    model: Any = build_tiny_model(family, dtype=torch.float32, **SIZES)
    model.to("cuda").train()
    ids = torch.randint(0, 97, (1, 2000), device="cuda")
    batches = [{"input_ids": ids, "labels": ids}]
    settings = config(chunk_lengths=(700, 1, 1299), recompute=recompute)
    report = compare_drift(model, batches, settings, dtype=torch.bfloat16)
    assert report.drift <= report.allowed_drift, report
    runs = LAYERS * LONGER
    assert calls["rope_backward"] == 1 + runs
    assert calls["rope_forward"] == 1 + runs * (1 + RERUN[recompute])
    assert replaced == {"apply_rotary_pos_emb"}
