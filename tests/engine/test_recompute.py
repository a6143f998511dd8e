"""Recomputed layers: what repeats itself, what is computed again and kept, and failures.

That they are exact in every mode, `test_exactness_plans.py` has.
"""

import copy
import gc
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from sppo_hf import SPPOConfig, SPPOError
from sppo_hf.engine import recompute
from sppo_hf.engine.convert import convert
from sppo_hf.engine.recompute import RecomputedLayer, SavedTensor
from sppo_hf.planning.activation_modes import ActivationMode, mode_of
from sppo_hf.testing.exactness import compare, run_batch, run_reference
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.engine.forced_plans import force_modes
from tests.engine.measuring import MatmulCounter
from tests.sweeps import sample

TOKENS = 23
LAYERS = 3
PRODUCTS = mode_of("matmuls", "device")


def _config(**others: Any) -> SPPOConfig:
    return SPPOConfig(
        **{"chunk_lengths": (9, 1, 13), "min_offload_size": 1, "show_plan": False, **others}
    )


def _always(mode: ActivationMode) -> Callable[[int, int], ActivationMode]:
    return lambda chunk, layer: mode


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_multiplied_together_are_exact(
    monkeypatch: pytest.MonkeyPatch, family: str, implementation: str
) -> None:
    force_modes(monkeypatch, _always(PRODUCTS))
    model = build_tiny_model(family, dtype=torch.float32)
    model.set_experts_implementation(implementation)
    report = compare(model, make_batch(tokens=TOKENS), _config())
    assert report.exact, str(report)


@pytest.mark.parametrize("saved", ["matmuls", "inputs"])
def test_autocast_is_the_same_the_second_time(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    batch = make_batch(rows=2, tokens=TOKENS)

    def gradients(mode: ActivationMode) -> dict[str, Tensor | None]:
        with pytest.MonkeyPatch.context() as inner:
            force_modes(inner, _always(mode))
            model = convert(build_tiny_model("qwen3", dtype=torch.float32), _config())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            return {name: p.grad for name, p in model.named_parameters()}

    expected = gradients(mode_of("whole", "device"))
    for name, gradient in gradients(mode_of(saved, "device")).items():
        assert gradient is not None
        assert torch.equal(gradient, expected[name]), name


# -- what is computed, and what is kept ----------------------------------------------------------


def _products_in_backward(mode: ActivationMode, family: str, *, lora: bool = False) -> int:
    model: nn.Module = build_tiny_model(family, dtype=torch.float32, num_hidden_layers=2)
    if lora:
        model = add_lora(model, rank=2)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as monkeypatch:
        force_modes(monkeypatch, _always(mode))
        loss = convert(model, _config())(**make_batch(tokens=TOKENS)).loss
        with MatmulCounter() as multiplications:
            loss.backward()
    return multiplications.count


@pytest.mark.parametrize(
    ("family", "products", "needed"),
    # Without keys and values; a fused projection has the queries in it.
    [("llama", 6, 4), ("gpt2", 3, 3)],
)
def test_no_kept_product_is_computed_twice(family: str, products: int, needed: int) -> None:
    whole = _products_in_backward(mode_of("whole", "device"), family)
    calls = 2 * 3
    for tier in ("device", "host"):
        kept = mode_of("matmuls", tier)  # type: ignore[arg-type]
        inputs = mode_of("inputs", tier)  # type: ignore[arg-type]
        assert _products_in_backward(kept, family) == whole
        # All but the layer's last matmul run while unused ones are searched: in the last chunk of
        # the two layers, and in that of a single token.
        learning = 4
        computed = learning * products + (calls - learning) * needed
        assert _products_in_backward(inputs, family) == whole + computed


def test_adapters_frozen_products_are_computed_once_where_nobody_needs_them() -> None:
    """Base and both factors of seven modules: of k and v the base, and down's base are needless."""
    whole = _products_in_backward(mode_of("whole", "device"), "llama", lora=True)
    inputs = _products_in_backward(mode_of("inputs", "device"), "llama", lora=True)
    # The first layer, whose input needs no gradient, learns apart; of a single token only one chunk
    # comes.
    learning, played = 7 * 3, 7 * 3 - 3
    assert inputs == whole + 4 * learning + 2 * played


def test_a_layer_that_changed_its_products_is_run_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused matmuls that were found earlier do not count when weights have other shapes."""
    force_modes(monkeypatch, _always(mode_of("inputs", "device")))
    model = build_tiny_model("llama")
    batch = make_batch(tokens=TOKENS)
    ours = convert(copy.deepcopy(model), _config())
    for narrower in (False, True):
        for one in (ours, model) if narrower else ():
            mlp = one.model.layers[1].mlp
            for linear in (mlp.gate_proj, mlp.up_proj):
                linear.weight = nn.Parameter(linear.weight.detach()[::2].clone())
            mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight.detach()[:, ::2].clone())
            one.zero_grad()
        gradients = run_batch(ours, batch).by_name
        for name, expected in run_reference(model, batch, hooks=False).by_name.items():
            torch.testing.assert_close(gradients[name], expected, rtol=1e-9, atol=1e-12)
        found = recompute._unused_matmuls(ours.model.layers[1]).values()
        assert (None in found) == narrower


@pytest.mark.slow
@pytest.mark.parametrize("saved", sample(["inputs", "matmuls", "whole"], 3))
def test_layers_with_compiled_parts(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    """Their second forward must be compiled as their first was."""
    torch._dynamo.reset()  # what others compiled of the class counts towards the compiler's limit
    force_modes(monkeypatch, _always(mode_of(saved, "device")))
    model = build_tiny_model("llama", num_hidden_layers=2)
    batch = make_batch(tokens=TOKENS)
    expected = run_reference(model, batch, hooks=False)
    convert(model, _config())
    run_batch(model, batch)  # what is found out of layers holds until they are compiled
    for layer in model.model.layers:
        norm = layer.input_layernorm
        norm.forward = torch.compile(norm.forward, backend="aot_eager", dynamic=True)
        layer.post_attention_layernorm.compile(backend="aot_eager", dynamic=True)
        layer.mlp.compile(backend="aot_eager", dynamic=True)
    for _ in range(2):
        model.zero_grad()
        ours = run_batch(model, batch)
        for name, gradient in expected.by_name.items():
            torch.testing.assert_close(ours.by_name[name], gradient, rtol=1e-9, atol=1e-12)
    torch._dynamo.reset()


class _Bytes:
    """Counts the bytes that recomputed layers hold, by kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_kind: dict[str, int] = {}
        hold = RecomputedLayer._hold

        def counted(saved: RecomputedLayer, kind: str, tensor: Tensor) -> recompute.SavedTensor:
            name = kind.split()[0]
            self.by_kind[name] = self.by_kind.get(name, 0) + tensor.nbytes
            return hold(saved, kind, tensor)

        monkeypatch.setattr(RecomputedLayer, "_hold", counted)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_products_of_a_llama_layer(monkeypatch: pytest.MonkeyPatch, tier: Any) -> None:
    force_modes(monkeypatch, _always(mode_of("matmuls", tier)))
    held = _Bytes(monkeypatch)
    model = convert(build_tiny_model("llama", dtype=torch.float32, num_hidden_layers=2), _config())
    model(**make_batch(tokens=TOKENS))
    width, heads, inner = 32, 4, 48
    per_token = {
        "inputs": width,
        "outputs": width,
        "sums": heads,
        # Queries, attention's projection, gate and up; keys and values serve attention only.
        "matmul": width + width + 2 * inner,
    }
    expected = {name: 2 * TOKENS * 4 * size for name, size in per_token.items()}
    expected["inputs"] += TOKENS * 4 * width  # the final norm's
    assert held.by_kind == expected


# -- failures ------------------------------------------------------------------------------------


def test_a_layer_that_multiplies_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    force_modes(monkeypatch, _always(PRODUCTS))
    model = convert(build_tiny_model("llama", dtype=torch.float32), _config())
    loss = model(**make_batch(tokens=TOKENS)).loss
    mlp = model.model.layers[1].mlp
    monkeypatch.setattr(mlp, "forward", lambda x: mlp.down_proj(mlp.down_proj(mlp.gate_proj(x))))
    with pytest.raises(SPPOError, match=r"layer 1, chunk 2: .*when recomputed"):
        loss.backward()


def test_a_rerun_that_cannot_begin_releases_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    force_modes(monkeypatch, _always(mode_of("inputs", "host")))
    model = convert(build_tiny_model("llama", dtype=torch.float32), _config())
    loss = model(**make_batch(tokens=TOKENS)).loss
    failed: list[RecomputedLayer] = []

    find_mode = RecomputedLayer._unused_matmuls_mode

    def fail(saved: RecomputedLayer, hidden: Tensor, kind: Hashable) -> Any:
        if saved._attention_results is None:
            return find_mode(saved, hidden, kind)  # the final norm
        failed.append(saved)
        raise ValueError("no mode")

    monkeypatch.setattr(RecomputedLayer, "_unused_matmuls_mode", fail)
    with pytest.raises(ValueError, match="no mode"):
        loss.backward()
    (saved,) = failed
    assert saved._attention_results is None
    assert not list(saved.handles())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["self_attn.k_proj", "mlp.up_proj"])
def test_a_forward_that_fails_leaves_no_mode_behind(
    monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    force_modes(monkeypatch, _always(PRODUCTS))
    model = build_tiny_model("llama")
    batch = make_batch(tokens=TOKENS)
    expected = run_reference(model, batch, hooks=False)
    convert(model, _config())

    cancelled: list[RecomputedLayer] = []
    cancel = RecomputedLayer.cancel

    def noted(saved: RecomputedLayer) -> None:
        cancelled.append(saved)
        cancel(saved)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(RecomputedLayer, "cancel", noted)
    hook = model.model.layers[1].get_submodule(where).register_forward_hook(fail)
    with pytest.raises(error):
        model(**batch)
    assert _get_current_dispatch_mode() is None
    (saved,) = cancelled
    assert not [*saved._saved_tensors()]
    hook.remove()
    again = run_batch(model, batch)
    for name, gradient in expected.by_name.items():
        torch.testing.assert_close(again.by_name[name], gradient, rtol=1e-9, atol=1e-12)


class OneTensorEngine:
    """An offload engine of one tensor, which is on the device or not."""

    def __init__(self) -> None:
        """Begin without a tensor."""
        self.tensor: Tensor | None = None
        self.here = False

    def start_offload(self, tensor: Tensor, *, tier: str) -> "OneTensorEngine":
        self.tensor = tensor
        return self

    def bytes_to_prefetch(self, handles: Iterable["OneTensorEngine"]) -> int:
        return sum(not handle.here for handle in handles)

    def wait_for(self, handle: "OneTensorEngine") -> Tensor | None:
        handle.here = True
        return handle.tensor

    def evict(self, handle: "OneTensorEngine") -> None:
        handle.here = False


def test_a_borrowed_tensor_goes_back_to_where_it_was() -> None:
    tensor = torch.ones(2)
    for was_here in (False, True):
        engine: Any = OneTensorEngine()
        saved = SavedTensor(tensor, engine, "host")
        engine.here = was_here
        with saved.borrow() as borrowed:
            assert borrowed is tensor
            assert engine.here
        assert engine.here == was_here
    for engine in (None, OneTensorEngine()):
        kept = SavedTensor(tensor, engine)
        with kept.borrow() as borrowed:
            assert borrowed is tensor
        assert kept.take() is tensor


def test_recomputed_layers_that_share_keys_are_freed_without_a_backward() -> None:
    """Saved activations that held the keys would, through the keys' graph, hold themselves."""
    model = convert(build_tiny_model("gemma4_text-shared-kv"), _config(recompute="full"))
    # Failed forwards of other tests may still hold some.
    there = {id(x) for x in gc.get_objects() if type(x) is RecomputedLayer}
    loss = model(**make_batch(tokens=TOKENS)).loss
    saved = [
        weakref.ref(x)
        for x in gc.get_objects()
        if type(x) is RecomputedLayer and id(x) not in there
    ]
    assert saved
    del loss
    gc.collect()
    assert not any(reference() for reference in saved)


def test_the_garbage_collector_visits_no_shapes_of_what_is_saved() -> None:
    """There are several for each operation; see [Note: why objects are frozen]."""

    def num_visited() -> int:
        gc.collect()
        return sum(type(x) is torch.Size for x in gc.get_objects())

    model = convert(build_tiny_model("llama"), _config(recompute="selective"))
    run_batch(model, make_batch(tokens=TOKENS))  # plans
    before = num_visited()
    loss = model(**make_batch(tokens=TOKENS)).loss
    num_layer_runs = 3 * LAYERS
    assert num_visited() - before <= 3 * num_layer_runs  # of their inputs alone
    del loss
