"""Refusals before anything is sent; test_pipeline_exactness.py has what runs."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.forward_calls import read_call
from sppo_hf.engine.layer_kernels import restore_layers
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.step_observer import StepRecord
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.offload.engine import OffloadStats
from sppo_hf.pipeline import pipeline_engine
from sppo_hf.pipeline.convert import staged_model
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.pipeline.pipeline_engine import (
    PipelineEngine,
    PreparedStep,
    _check_router_schedule,
    _micro_batches,
    refuse_call,
)
from sppo_hf.pipeline.step_schedule import step_schedule
from sppo_hf.planning.model_shape import forward_flops, step_flops
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.measured_timeline import ActionRecord
from sppo_hf.testing.tiny_models import add_images, add_lora, build_tiny_model, make_batch
from tests.planning.shapes import tiny_shape


class Watched:
    """Fails a test whose call gets as far as to the other ranks."""

    def collective_section(self, what: str) -> None:
        raise AssertionError(f"went on to run: {what}")


def make(
    num_layers: int = 3, *, of: Any = None, lora: bool = False, rank: int = 0, **settings: Any
) -> Any:
    config = SPPOConfig(pp_size=2, show_plan=False, **settings)
    model = build_tiny_model("llama", num_hidden_layers=num_layers) if of is None else of
    model = add_lora(model) if lora else model
    make_engine = functools.partial(
        PipelineEngine,
        staged=staged_model(find_parts(model), config, rank),
        mesh=PipelineMesh(2, 1, rank, 0, torch.device("cpu")),
        watchdog=Watched(),  # type: ignore[arg-type]
    )
    return convert(model, config, make_engine=make_engine)


def test_calls_without_labels() -> None:
    model, batch = make(), make_batch()
    del batch["labels"]
    with pytest.raises(
        ConfigError, match=r"2 stages \(pp_size\).*without labels.*Remedy"
    ) as caught:
        model(**batch)
    assert "generate()" in str(caught.value)
    with pytest.raises(ConfigError, match="without labels"), torch.no_grad():
        model(**batch)


def test_logits() -> None:
    with pytest.raises(ConfigError, match=r"return_logits=True.*drop return_logits"):
        make(return_logits=True)(**make_batch())


@pytest.mark.parametrize("leaf", [True, False])
def test_embeddings_that_need_a_gradient(leaf: bool) -> None:
    batch = make_batch()
    embeds = torch.randn(*batch.pop("input_ids").shape, 32, dtype=torch.float64)
    embeds.requires_grad_()
    inputs = embeds if leaf else 2 * embeds
    model = make()
    with pytest.raises(ConfigError, match=r"inputs_embeds that need a gradient.*pp_size=1"):
        model(inputs_embeds=inputs, **batch)
    for allowed in (torch.enable_grad, torch.no_grad):
        given = inputs.detach() if allowed is torch.enable_grad else inputs
        with allowed(), pytest.raises(AssertionError, match="went on to run"):
            model(inputs_embeds=given, **batch)


def test_images() -> None:
    config = SPPOConfig(pp_size=2)
    model = build_tiny_model("qwen3_vl")
    batch = add_images(model, make_batch(tokens=40))
    call = read_call(find_parts(model), model.forward, (), batch)
    with pytest.raises(ConfigError, match=r"2 stages.*pixel_values is not.*Remedy: pp_size=1"):
        refuse_call(find_parts(model), config, call)


def test_other_losses() -> None:
    model = make()
    model.loss_function = lambda *args, **kwargs: None
    with pytest.raises(UnsupportedModelError, match=r"outside the standard one.*pp_size=1"):
        model(**make_batch())


def test_weights_that_stages_share_are_refused_when_they_are_unfrozen() -> None:
    model = build_tiny_model("llama", num_hidden_layers=3)
    shared = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.model.layers[2].mlp.up_proj.weight = shared
    model = make(of=model)
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine)
    for trains in (False, True, False):
        shared.requires_grad_(trains)
        with pytest.raises(AssertionError, match="went on to run"):
            model(**make_batch())
        said = str(engine._model_error or "")
        assert ("layers 0 and 2 share model.layers.0.mlp.up_proj.weight" in said) is trains


def test_untrainable_models_are_refused_only_in_training() -> None:
    """In training the other ranks are asked first, to which the refusal is told (`_prepare`)."""
    model = make()
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine)
    model.config.attention_dropout = 0.1
    with pytest.raises(AssertionError, match="to run: in forward pass 1"):
        model(**make_batch())
    assert "attention_dropout=0.1" in str(engine._model_error)
    with torch.no_grad(), pytest.raises(AssertionError, match="to run: in evaluation pass 2"):
        model(**make_batch())
    assert engine._model_error is None


def test_modules_put_into_a_stage_after_the_conversion_are_tried() -> None:
    """As one device does; the other ranks are told by `_prepare`."""
    model, batch = make(), make_batch()
    engine, layers = get_engine(model), model.model.layers
    assert isinstance(engine, PipelineEngine)
    tokens_meet = torch.nn.Conv1d(32, 32, 3, padding=1, dtype=torch.float64)
    before = layers[0].mlp

    def mixing(_: Any, x: torch.Tensor) -> torch.Tensor:
        return tokens_meet(x.mT).mT

    for module, said in (
        (
            type("Own", (type(before),), {"forward": mixing}),
            r"layers\.0\.mlp \(Own\).*other tokens",
        ),
        (type("Own", (type(before),), {}), None),
    ):
        layers[0].mlp = module(model.config).double()
        with pytest.raises(AssertionError, match="to run: in forward pass"):
            model(**batch)
        assert (engine._model_error is None) == (said is None)
        assert said is None or re.search(said, str(engine._model_error))
    with pytest.raises(ConfigError, match=r"added or replaced after .*pp_msp='off'"):
        engine.remote_weights()
    layers[1] = type(layers[1])(model.config, 1)
    with pytest.raises(AssertionError, match="to run: in forward pass"):
        model(**batch)
    assert "of which 1 are new" in str(engine._model_error)


def test_a_valid_call_reaches_the_other_ranks() -> None:
    with pytest.raises(AssertionError, match="went on to run: in forward pass 1"):
        make()(**make_batch())


def test_layers_of_a_stage_take_kernels_too() -> None:
    pytest.importorskip("peft")
    model = make(4, lora=True)
    engine = get_engine(model)
    assert engine is not None
    engine._check_kernels(torch.device("cpu"))
    taken = [
        sum(module.__dict__.get("forward") is not None for module in layer.modules())
        for layer in engine.parts.layers
    ]
    assert taken == [7, 7, 0, 0]
    restore_layers(engine.parts)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_averaged_with_the_stage_that_computes_them(tied: bool) -> None:
    """Once each; what both ends hold comes after all stages."""
    found: dict[int, set[str]] = {}
    for rank in range(2):
        model = build_tiny_model("llama", num_hidden_layers=4, tie_word_embeddings=tied)
        config = SPPOConfig(pp_size=2, pp_virtual_stages=2, pp_schedule="interleaved_seq1f1b")
        staged = staged_model(find_parts(model), config, rank)
        mesh = SimpleNamespace(embedding_group="both ends")
        engine: Any = SimpleNamespace(staged=staged, parts=staged.parts, mesh=mesh)
        engine.shared_parameters = functools.partial(PipelineEngine.shared_parameters, engine)
        names = {id(p): name for name, p in model.named_parameters()}
        for stage in staged.cut.own:
            parameters = PipelineEngine._parameters_of(engine, stage)
            found[stage] = {names[id(p)] for p in parameters}
            assert len(found[stage]) == len(parameters)
    layers = [{n for n in found[at] if n.startswith(f"model.layers.{at}.")} for at in range(4)]
    assert all(layers)
    others = [found[at] - layers[at] for at in range(4)]
    embedding, head = (
        (set(), set()) if tied else ({"model.embed_tokens.weight"}, {"lm_head.weight"})
    )
    assert others == [embedding, set(), set(), {"model.norm.weight"} | head]


@pytest.mark.parametrize(("rank", "fails"), [(0, False), (1, True)])
def test_a_schedule_leaves_earlier_gradients_also_where_it_fails(
    rank: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(rank=rank)
    engine: Any = get_engine(model)
    before = [torch.ones_like(p) for p in model.parameters()]
    for parameter, grad in zip(model.parameters(), before, strict=True):
        parameter.grad = grad
    events: list[str] = []

    def noted(event: str) -> Any:
        return lambda *args, **kwargs: events.append(event)

    @contextlib.contextmanager
    def running(stage: int) -> Iterator[None]:
        events.append(f"stage {stage}")
        yield

    def execute(*args: Any) -> None:
        assert all(p.grad is None for p in model.parameters())
        if fails:
            raise KeyError

    weights = SimpleNamespace(end_step=noted("ended"), drop_gradients=noted("dropped"))
    prepared = SimpleNamespace(plans=None, step=SimpleNamespace(name="seq1f1b"), weights=weights)
    monkeypatch.setattr(engine, "_prepare", lambda *args, **kwargs: prepared)
    monkeypatch.setattr(engine, "_make_stage_runner", noted("runner"))
    monkeypatch.setattr(engine, "_step_rows", noted("rows"))
    monkeypatch.setattr(engine.plans, "warm_up_attention", noted("warm"))
    monkeypatch.setattr(engine, "_execute", execute)
    monkeypatch.setattr(engine.staged, "running", running)
    call: Any = SimpleNamespace(device=torch.device("cpu"))
    arguments = (call, None, noted("loss"))
    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        engine.run_schedule(*arguments, scale=torch.ones(()), records=False)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    loss = ["stage 1", "loss"] if rank else []
    assert events == [*loss, "runner", "rows", "warm", "dropped" if fails else "ended"]


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        (3, None, [(0, 1), (1, 2), (2, 3)]),
        (5, 2, [(0, 2), (2, 4), (4, 5)]),
        (2, 8, [(0, 2)]),
        (1, None, [(0, 1)]),
    ],
)
def test_rows_are_the_micro_batches(
    rows: int, size: int | None, expected: list[tuple[int, int]]
) -> None:
    assert _micro_batches(rows, SPPOConfig(pp_size=2, micro_batch_size=size)) == expected


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "seq1f1b", "zb_seq1f1b"])
def test_a_loss_of_routers_needs_all_forwards_first(name: str) -> None:
    def check(rows: int, *, forward_only: bool = False, virtual: int = 1) -> None:
        config = SPPOConfig(pp_size=3, pp_virtual_stages=virtual, pp_schedule=name)
        step = step_schedule(config, name, rows, 4, forward_only=forward_only, reduce=True)
        _check_router_schedule("M", step, rows)

    check(1)
    check(5, forward_only=True)
    if name == "gpipe":
        check(5)
        return
    with pytest.raises(ConfigError, match=rf"'{name}' begins.*Remedy: micro_batch_size=5,.*gpipe"):
        check(5)


@pytest.mark.parametrize("training", [True, False])
def test_records_of_all_ranks_add_up_to_the_batch(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_engine, "time", SimpleNamespace(perf_counter=lambda: 110.0))
    spans = (("0F0", 101.0, 103.0), ("0B0", 103.0, 104.0), ("0F1", 104.5, 105.5))
    executed = [ActionRecord(Action.parse(text), at, end, at) for text, at, end in spans]
    shape = tiny_shape()
    call: Any = SimpleNamespace(batch_rows=2, total_tokens=7)
    layout: Any = None
    prepared: Any = PreparedStep(
        call,
        layout,
        [],
        plans=SimpleNamespace(step=SimpleNamespace(step_seconds=9.0)),  # type: ignore[arg-type]
        bounds=(),
        step=SimpleNamespace(schedule=SimpleNamespace(num_chunks=4)),  # type: ignore[arg-type]
    )
    records: list[StepRecord] = []
    for rank in range(3, 6):
        engine: Any = SimpleNamespace(
            executed=executed,
            mesh=SimpleNamespace(rank=rank, sharing_ranks=(3, 4, 5)),
            observer=SimpleNamespace(on_record=records.append),
            take_stats=OffloadStats,
            shape=lambda: shape,
        )
        PipelineEngine._record_step(engine, prepared, training=training, began_seconds=100.0)
    assert sum(record.tokens for record in records) == 2 * 7
    flops = (step_flops if training else forward_flops)(shape, 2, 7)
    assert sum(record.model_flops for record in records) == pytest.approx(flops)
    for record in records:
        # What is no forward, waiting included, is called backward.
        assert (record.forward_seconds, record.backward_seconds) == (3.0, 7.0)
        assert (record.batch_rows, record.total_tokens, record.num_chunks) == (2, 7, 4)
