"""Layer by layer: how calls are cut along the tokens, and whose hooks see what."""

from __future__ import annotations

import copy
import dataclasses
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sppo_hf.attention.kv_cache import LayerKV
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.chunk_runner import ChunkRunner
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.recompute import RecomputedLayer
from sppo_hf.engine.sliced_calls import (
    CannotRunByLayer,
    PrefixLength,
    SlicedCall,
    layer_calls,
)
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.errors import UnsupportedModelError
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.planning.activation_modes import ActivationMode, mode_of
from sppo_hf.planning.decisions import KVMode
from sppo_hf.planning.memory import Cause
from sppo_hf.planning.plan import Plan
from sppo_hf.testing.exactness import compare, float64_everywhere
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.engine.forced_plans import change_plans
from tests.engine.measuring import MatmulCounter

BOUNDS = ((0, 3), (3, 7), (7, 8))


def _cut(args: tuple[Any, ...], few: tuple[Any, ...], **kwargs: Any) -> SlicedCall:
    return SlicedCall(args, kwargs, bounds=BOUNDS, example=(few, kwargs), where="layer 0")


def _config(**settings: Any) -> SPPOConfig:
    return SPPOConfig(**{"chunk_lengths": (9, 1, 13), "order": "by_layer", **settings})


def test_parts_and_their_gradients_are_those_of_the_whole() -> None:
    hidden = torch.randn(2, 8, 5, dtype=torch.float64, requires_grad=True)
    cut = _cut((hidden,), (hidden[:, :2],))
    for index, (start, end) in enumerate(BOUNDS):
        ((part,), _) = cut.take(index)
        assert torch.equal(part, hidden[:, start:end])
        assert part.is_contiguous(), "layers may take views"
        cut.put(index, part * (1 + index))
    joined = cut.joined()
    weight = torch.randn_like(joined)
    (grad,) = torch.autograd.grad((joined * weight).sum(), hidden)
    factor = torch.repeat_interleave(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3, 4, 1]))
    torch.testing.assert_close(joined, hidden * factor[:, None])
    torch.testing.assert_close(grad, weight * factor[:, None])


def test_a_part_that_nobody_used_has_no_gradient() -> None:
    hidden = torch.randn(1, 8, 5, requires_grad=True)
    cut = _cut((hidden,), (hidden[:, :2],))
    parts = [cut.take(index)[0][0] for index in range(3)]
    (grad,) = torch.autograd.grad(parts[1].sum(), hidden)
    assert grad[:, 3:7].eq(1).all()
    assert grad.sum() == 4 * 5


def test_a_size_that_happens_to_be_the_number_of_tokens_is_left_alone() -> None:
    """Eight tokens, and eight wide: only the example tells one from the other."""
    hidden, table, bias = torch.randn(1, 8, 8), torch.randn(1, 8, 8), torch.randn(8)
    cut = _cut((hidden, table, bias), (hidden[:, :2], table[:, :, :2], bias))
    (part, of_table, of_bias), _ = cut.take(0)
    assert part.shape == (1, 3, 8)
    assert of_table.shape == (1, 8, 3)
    assert of_bias is bias


def test_what_is_no_tensor_goes_to_every_chunk() -> None:
    hidden, shared = torch.randn(1, 8, 4), object()
    cut = _cut((hidden, shared, PrefixLength(0)), (hidden[:, :2], shared, PrefixLength(0)))
    cut.take(0)
    (_, seen, prefix), _ = cut.take(1)
    assert seen is shared
    assert prefix.get_seq_length() == 3


@pytest.mark.parametrize(
    ("other", "few"),
    [((1, 8, 8), (1, 2, 2)), ((16, 3), (4, 3)), ((1, 7, 3), (1, 2, 3)), ((8,), (1, 2))],
    ids=["two dims", "rows and tokens in one dim", "fewer than all", "other dims"],
)
def test_a_tensor_without_one_dim_of_tokens_is_refused(other: Any, few: Any) -> None:
    hidden = torch.randn(1, 8, 4)
    with pytest.raises(CannotRunByLayer, match="no dim"):
        _cut((hidden, torch.zeros(other)), (hidden[:, :2], torch.zeros(few)))


@pytest.mark.parametrize(("mask", "few"), [(None, torch.ones(1, 2)), (torch.ones(1, 8), None)])
def test_a_tensor_that_is_given_for_some_lengths_alone_is_refused(mask: Any, few: Any) -> None:
    hidden = torch.randn(1, 8, 4)
    with pytest.raises(CannotRunByLayer, match="with other arguments for fewer tokens"):
        _cut((hidden, mask), (hidden[:, :2], few))


@pytest.mark.parametrize(
    "returned", [lambda x: (x, x), lambda x: x[:, :1], lambda x: {"hidden": x}]
)
def test_an_output_that_is_not_hidden_states_alone_is_refused(returned: Any) -> None:
    hidden = torch.randn(1, 8, 4)
    cut = _cut((hidden,), (hidden[:, :2],))
    ((part,), _) = cut.take(0)
    with pytest.raises(CannotRunByLayer, match="returns"):
        cut.put(0, returned(part))


# Tokens that are as many as the model is wide, as a head, as there are heads.
@pytest.mark.parametrize("tokens", [32, 8, 4, 2])
def test_exact_where_sizes_are_the_number_of_tokens(tokens: int) -> None:
    model = build_tiny_model("llama")
    assert model.config.hidden_size == 32
    assert model.config.head_dim == 8
    lengths = (tokens // 2, tokens - tokens // 2)
    report = compare(model, make_batch(rows=2, tokens=tokens), _config(chunk_lengths=lengths))
    assert report.exact, str(report)


def test_a_model_that_cannot_goes_chunk_by_chunk_with_a_warning() -> None:
    model = build_tiny_model("llama")
    layer: Any = model.model.layers[1]
    layer.register_full_backward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="order: by_chunk, because layer 1 .* backward hooks"):
        report = compare(model, make_batch(tokens=23), _config())
    assert report.exact, str(report)
    assert report.attention_forwards == 3 + 9, "one layer, and then all of them chunk by chunk"


def test_layers_that_are_told_of_padding_run_by_layer() -> None:
    """Of a batch without padding the model gives them no mask."""
    batch = make_batch(rows=2, tokens=23, padding=[0, 12])
    del batch["labels"]
    plain = build_tiny_model("granitemoehybrid")
    model = convert(copy.deepcopy(plain), _config(chunk_lengths=(9, 14)))
    with float64_everywhere():
        for one in (plain, model):
            one(**batch, use_cache=False).logits.square().mean().backward()
    engine = get_engine(model)
    assert engine is not None
    assert not engine.plans.is_by_chunk
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_a_model_may_read_the_weights_of_its_norm_and_layers() -> None:
    """Zaya's casts hidden states to the dtype of its final norm's weight."""
    model = convert(build_tiny_model("llama"), _config())
    engine = get_engine(model)
    assert engine is not None
    own = model.model.norm.weight, model.model.layers[0].mlp.up_proj.weight
    read: list[Tensor] = []

    def run_base() -> None:
        read.extend((model.model.norm.weight, model.model.layers[0].mlp.up_proj.weight))

    assert layer_calls(engine.parts, run_base) == {}
    assert [a is b for a, b in zip(read, own, strict=True)] == [True, True]


def test_no_memory_is_no_reason_against_an_order() -> None:
    """The engine plans with less then, where that helps; the next batch goes by layer again."""
    model = convert(build_tiny_model("llama"), _config())
    engine = get_engine(model)
    assert engine is not None

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        layer_calls(engine.parts, run_out)
    with pytest.raises(CannotRunByLayer, match=r"ValueError: .*odd"):
        layer_calls(engine.parts, lambda: int("odd"))


def test_a_model_that_runs_in_no_order_is_refused_and_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def refuse(runner: ChunkRunner, *_: Any, **__: Any) -> Any:
        tried.append(runner.plan.order)
        assert len(tried) < 5, "it is tried for ever"
        raise CannotRunByLayer("its layers return strings")

    monkeypatch.setattr(ChunkRunner, "run", refuse)
    model = convert(build_tiny_model("llama"), _config())
    with (
        pytest.raises(
            UnsupportedModelError, match=r"cannot run in parts: its layers .* Set layer_"
        ),
        pytest.warns(UserWarning, match="order: by_chunk"),
    ):
        model(**make_batch(tokens=23))
    assert tried == ["by_layer", "by_chunk"]


def test_hooks_of_others_see_the_layers_call_over_all_tokens() -> None:
    model = build_tiny_model("llama")
    layer: nn.Module = model.model.layers[1]
    seen: list[tuple[str, int]] = []

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(("before", args[0].shape[1]))
        return (args[0] * 2, *args[1:])

    def after(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        seen.append(("after", output.shape[1]))
        return output * 3

    reference = build_tiny_model("llama")
    batch = make_batch(tokens=23)
    layer.register_forward_hook(after)
    convert(model, _config())
    layer.register_forward_pre_hook(before)  # behind ours, until a forward begins
    for hooked in (reference.model.layers[1],):
        hooked.register_forward_pre_hook(before)
        hooked.register_forward_hook(after)
    with float64_everywhere():
        ours = model(**batch).loss
    assert seen == [("before", 23), ("after", 23)]
    with float64_everywhere():
        torch.testing.assert_close(ours, reference(**batch).loss, rtol=1e-9, atol=0.0)


def test_a_backward_hook_that_comes_later_ends_the_order() -> None:
    model = build_tiny_model("llama")
    batch = make_batch(tokens=23)
    convert(model, _config())
    with float64_everywhere():
        before = model(**batch).loss
        model.model.layers[0].register_full_backward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match="order: by_chunk"):
            after = model(**batch).loss
    torch.testing.assert_close(after, before, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("order", ["by_layer", "by_chunk"])
def test_several_forwards_before_their_backwards(order: Any) -> None:
    model, plain = build_tiny_model("llama"), build_tiny_model("llama")
    batches = [make_batch(tokens=23, seed=seed) for seed in (1, 2)]
    convert(model, _config(order=order, micro_batch_size=1))
    with float64_everywhere():
        losses = [model(**batch).loss for batch in batches]
        for loss in losses:
            loss.backward()
        for batch in batches:
            plain(**batch).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    engine = get_engine(model)
    assert engine is not None
    engine.offload.assert_drained()


def _force(
    patch: pytest.MonkeyPatch, mode: ActivationMode, kv: KVMode, **others: Any
) -> list[LayerKV]:
    """Let plans go by layer with one mode for all; returns the stores that will be made."""
    new_store = ChunkRunner._new_store
    stores: list[LayerKV] = []

    def forced(plan: Plan) -> Plan:
        return dataclasses.replace(
            plan,
            order="by_layer",
            layer_modes=((mode,) * plan.num_layers,) * plan.num_chunks,
            kv_modes=(kv,) * plan.num_layers,
            **others,
        )

    def noted(sequence: ChunkRunner) -> Any:
        stores.append(new_store(sequence))  # type: ignore[arg-type]
        return stores[-1]

    change_plans(patch, forced)
    patch.setattr(ChunkRunner, "_new_store", noted)
    return stores


@pytest.mark.parametrize("kv", ["device", "host", "recompute"])
def test_keys_of_a_layer_are_there_while_it_runs_and_their_gradients_of_one_layer_alone(
    monkeypatch: pytest.MonkeyPatch, kv: KVMode
) -> None:
    stores = _force(monkeypatch, mode_of("inputs", "host"), kv)
    model = build_tiny_model("llama")
    convert(model, _config(min_offload_size=1))
    most_with_keys, most_with_gradients = 0, 0
    put, add = LayerKV.put, LayerKV.add_gradient

    def noted_put(store: LayerKV, *args: Any, **kwargs: Any) -> None:
        nonlocal most_with_keys
        put(store, *args, **kwargs)
        most_with_keys = max(most_with_keys, sum(store.kv_bytes > 0 for store in stores))

    def noted_add(store: LayerKV, *args: Any, **kwargs: Any) -> None:
        nonlocal most_with_gradients
        add(store, *args, **kwargs)
        most_with_gradients = max(
            most_with_gradients, sum(store.gradient_bytes > 0 for store in stores)
        )

    monkeypatch.setattr(LayerKV, "put", noted_put)
    monkeypatch.setattr(LayerKV, "add_gradient", noted_add)
    loss = model(**make_batch(tokens=23)).loss
    assert sum(store.kv_bytes > 0 for store in stores) == (3 if kv == "device" else 0)
    loss.backward()
    assert most_with_keys == (3 if kv == "device" else 1)
    assert most_with_gradients == 1
    assert all(store.kv_bytes == store.gradient_bytes == 0 for store in stores)
    engine = get_engine(model)
    assert engine is not None
    engine.offload.assert_drained()


def test_keys_that_are_made_again_need_no_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    _force(monkeypatch, mode_of("inputs", "device"), "recompute")
    products: list[int] = []

    recompute_kv = RecomputedLayer.recompute_kv

    def counted(saved: RecomputedLayer) -> tuple[torch.Tensor, torch.Tensor]:
        with MatmulCounter() as counter:  # sees what the rerun's own mode lets through
            kv = recompute_kv(saved)
        products.append(counter.count)
        return kv

    monkeypatch.setattr(RecomputedLayer, "recompute_kv", counted)
    model = build_tiny_model("llama")
    convert(model, _config())
    model(**make_batch(tokens=23)).loss.backward()
    # The first of each kind finds out what keys hang on; a chunk of one token is of another kind.
    assert products == [3, 3, 2] * 3


@pytest.mark.parametrize("kv", ["host", "recompute"])
def test_a_dropped_graph_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, kv: KVMode) -> None:
    stores = _force(monkeypatch, mode_of("inputs", "host"), kv)
    model = build_tiny_model("llama")
    convert(model, _config(min_offload_size=1))
    loss = model(**make_batch(tokens=23)).loss
    engine = get_engine(model)
    assert engine is not None
    assert engine.offload.stats().live_handles > 0
    stores.clear()
    gc.disable()
    try:
        del loss
        assert engine.offload.stats().live_handles == 0, "something waits for the collector"
    finally:
        gc.enable()


def test_activations_are_prefetched_in_the_order_of_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _force(monkeypatch, mode_of("whole", "host"), "host")
    asked: list[str] = []
    on_backward = PrefetchOrder.on_backward

    def noted(prefetch_order: PrefetchOrder, group: Any) -> None:
        if not asked or asked[-1] != group.label:
            asked.append(group.label)
        on_backward(prefetch_order, group)

    monkeypatch.setattr(PrefetchOrder, "on_backward", noted)
    model = build_tiny_model("llama")
    convert(model, _config(min_offload_size=1))
    model(**make_batch(tokens=23)).loss.backward()
    layers = [label for label in asked if label.startswith("layer")]
    assert list(dict.fromkeys(layers)) == [
        f"layer {layer}, chunk {chunk}" for layer in (2, 1, 0) for chunk in (2, 1, 0)
    ]
    keys = [label for label in asked if label.startswith("keys")]
    assert list(dict.fromkeys(keys)) == [f"keys and values of layer {n}" for n in (2, 1, 0)]


def test_units_are_reported_layer_by_layer() -> None:
    class Units(StepObserver):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int, int]] = []

        def on_unit(self, direction: str, chunk: int, num_chunks: int) -> None:
            self.seen.append((direction, chunk, num_chunks))

    units = Units()
    model = convert(build_tiny_model("llama"), _config(), observer=units)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**make_batch(tokens=23)).loss.backward()
    assert units.seen == [
        *(("forward", unit, 9) for unit in range(9)),
        *(("backward", unit, 9) for unit in reversed(range(9))),
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3n_text", "gemma4_text"])
def test_plans_count_what_layers_are_given_of_all_tokens(family: str) -> None:
    """Gemma 3n's several hidden states, and inputs of all layers that are cut from one tensor."""
    model = build_tiny_model(family)
    layers = find_parts(model).layers
    given: list[list[Tensor]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        width = getattr(model.config, "hidden_size_per_layer_input", None)
        given.append([x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][:2])
        given[-1][1:] = [x for x in given[-1][1:] if x.shape[-1] == width]

    layers[1].register_forward_pre_hook(note, with_kwargs=True)
    plans: list[Plan] = []

    class Told(StepObserver):
        def on_plan(self, plan: Plan, model_name: str) -> None:
            plans.append(plan)

    gradients: list[int] = []
    for name, module in model.named_modules():
        if name.endswith("per_layer_projection_norm"):
            module.register_full_backward_hook(lambda *x: gradients.append(x[-1][0].nbytes))
    convert(model, _config(show_plan=False), observer=Told())
    model(**make_batch(rows=2, tokens=23)).loss.backward()
    ((hidden, *beside),) = given
    assert hidden.shape[-2:] == (23, model.config.hidden_size)
    assert hidden.ndim == (4 if family == "gemma3n_text" else 3)
    assert len(beside) == (family != "llama")
    (plan,) = plans
    program = plan.program()
    held = program.levels["device"][Cause.HIDDEN].during
    # Input and output of the layer.
    wanted = 2 * hidden.nbytes + sum(x.untyped_storage().nbytes() for x in beside)
    assert set(held[: 3 * len(layers)]) == {wanted}
    assert held[program.points.num_forward] == wanted + sum(gradients)
