"""Units run by hand: two stages cut out of two copies of a model, in one process.

Hidden states and their gradients are passed on as a schedule over ranks would do, in any order that
is allowed; loss and gradients are the unmodified model's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.forward_calls import read_call
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.stages import StagedModel
from sppo_hf.errors import BudgetError, SPPOError
from sppo_hf.pipeline.convert import choose_cut
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.stage_plans import PreparedStep
from sppo_hf.pipeline.stage_runner import StageRunner
from sppo_hf.schedule.messages import ChunkRun
from sppo_hf.testing.exactness import Gradients, float64_everywhere, parameter_errors, run_reference
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.engine.forced_plans import trace_short_scans
from tests.sweeps import ALL, turn

TOKENS = 23
LENGTHS = (1, 15, 7)
CHUNKS = len(LENGTHS)
STATES = ("qwen3_next", "bamba", "lfm2", "falcon_h1")
FAMILIES = ("llama", "llama-bias-tied", "gemma2", "gpt2", "mistral", "qwen3_moe", *STATES)
MORE_THAN_HIDDEN = ("gemma4_text", "gemma4_text-shared-kv", "gemma3n_text")
"""Families whose stages give on per-layer inputs, or these and keys, or several hidden states."""
EVERY = [*FAMILIES, *MORE_THAN_HIDDEN] if ALL else ["llama", "mistral", "lfm2", "gemma3n_text"]
"""Or one of each kind: test_pipeline_exactness.py has the others."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other rank to agree on chunks with, or to hear the other stage's speed from."""
    trace_short_scans(monkeypatch)
    monkeypatch.setattr("sppo_hf.pipeline.stage_plans.make_on_first_rank", lambda _, make: make())

    def make_alone(make: Any, _: Any, *, share: Any) -> Any:
        made = make()
        return made, [share(made)._replace(seconds=None)]

    monkeypatch.setattr("sppo_hf.pipeline.stage_plans.make_on_all_ranks", make_alone)


class Stage:
    """One stage, and the units of one batch on it."""

    def __init__(
        self, model: nn.Module, rank: int, batch: dict[str, Tensor], split: bool, **settings: Any
    ) -> None:
        config = SPPOConfig(pp_size=2, chunk_lengths=LENGTHS, show_plan=False, **settings)
        parts = find_parts(model)
        self.model = model
        self.staged = StagedModel(parts, choose_cut(parts, config, rank))
        make = functools.partial(
            PipelineEngine,
            staged=self.staged,
            mesh=PipelineMesh(2, 1, rank, 0, torch.device("cpu")),
            watchdog=SimpleNamespace(set_activity=lambda what: None),  # type: ignore[arg-type]
        )
        convert(model, config, make_engine=make)
        engine = get_engine(model)
        assert isinstance(engine, PipelineEngine)
        self.engine = engine
        self.units = self._make_units(batch, split)

    def _make_units(self, batch: dict[str, Tensor], split: bool) -> StageRunner:
        engine = self.engine
        call = read_call(engine.parts, engine.original_forward, (), dict(batch))
        layout = call.layout()
        rows = [(row, row + 1) for row in range(call.batch_rows)]
        plans = engine._stage_plans.get(1, TOKENS, call.device, micro_batches=len(rows))
        every = {(s, u) for s in range(2) for u in range(len(rows) * CHUNKS)}
        runs = {(s, c): ChunkRun(range(CHUNKS), (s,)) for s in range(2) for c in range(CHUNKS)}
        step: Any = SimpleNamespace(splits_backward=split, offloaded_units=every, runs=runs)
        prepared = PreparedStep(call, layout, rows, plans, plans.bounds, step)
        has_last = self.staged.cut.has_last
        add_loss = engine._make_label_loss(prepared) if has_last else None
        return engine._make_stage_runner(prepared, add_loss)

    @property
    def grads(self) -> dict[str, Tensor | None]:
        return {n: p.grad for n, p in self.model.named_parameters() if p.requires_grad}


class Pair:
    """Both stages, and the unmodified model beside them."""

    def __init__(
        self,
        family: str = "llama",
        *,
        rows: int = 1,
        split: bool = False,
        lora: bool = False,
        **settings: Any,
    ) -> None:
        model: nn.Module = build_tiny_model(family)
        if lora:
            model = add_lora(model)  # type: ignore[arg-type]
        self.batch = make_batch(rows=rows, tokens=TOKENS)
        self.reference = run_reference(model, self.batch, hooks=False)
        self.first = Stage(copy.deepcopy(model), 0, self.batch, split, **settings)
        self.last = Stage(copy.deepcopy(model), 1, self.batch, split, **settings)
        count = (self.batch["labels"][:, 1:] != -100).sum()
        self.scale = 1.0 / count.double()

    def forward(self, micro_batch: int, chunk: int) -> None:
        with float64_everywhere():
            given = self.first.units.forward(0, micro_batch, chunk, None)
        assert given is not None
        assert not given.requires_grad
        width = self.last.engine.messages().width(self.last.staged.cut.layers[1].start)
        assert given.shape == (1, LENGTHS[chunk], width)
        with float64_everywhere():
            assert self.last.units.forward(1, micro_batch, chunk, given) is None

    def backward(self, micro_batch: int, chunk: int) -> None:
        with float64_everywhere():
            grad = self.last.units.backward(1, micro_batch, chunk, None, scale=self.scale)
        assert grad is not None
        assert grad.shape[:2] == (1, LENGTHS[chunk])
        with float64_everywhere():
            first = self.first.units
            assert first.backward(0, micro_batch, chunk, grad, scale=self.scale) is None

    def weights(self, micro_batch: int, chunk: int) -> None:
        for stage, one in enumerate((self.first, self.last)):
            one.units.backward_weights(stage, micro_batch, chunk)

    def assert_exact(self) -> None:
        loss = torch.stack(self.last.units.losses).sum() * self.scale
        assert loss.item() == pytest.approx(self.reference.loss, rel=1e-12)
        shared = self.first.staged.shared_names
        grads = dict(self.first.grads)
        for name, grad in self.last.grads.items():
            assert (name in grads) == (name in shared)
            grads[name] = grads[name] + grad if name in shared else grad  # type: ignore[operator]
        worst = parameter_errors(Gradients(0.0, grads), self.reference)[0]
        assert worst.error < 1e-9, worst
        assert self.first.units.is_finished
        assert self.last.units.is_finished


def backwards(micro_batches: list[int]) -> Iterator[tuple[int, int]]:
    return ((m, c) for m in micro_batches for c in reversed(range(CHUNKS)))


@pytest.mark.parametrize(
    ("family", "split"),
    [
        (family, split)
        for index, family in enumerate(EVERY)
        for split in turn([True, False], 2, index)
    ],
)
def test_two_stages_are_the_model(family: str, split: bool) -> None:
    pair = Pair(family, rows=2, split=split)
    for micro_batch in range(2):
        for chunk in range(CHUNKS):
            pair.forward(micro_batch, chunk)
    for place in backwards([0, 1]):
        pair.backward(*place)
    if split:
        assert not pair.first.units.is_finished
        for place in backwards([0, 1]):
            pair.weights(*place)
    pair.assert_exact()


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_adapters_of_two_stages(split: bool) -> None:
    pair = Pair(split=split, lora=True)
    for chunk in range(CHUNKS):
        pair.forward(0, chunk)
    for place in backwards([0]):
        pair.backward(*place)
        if split:
            pair.weights(*place)
    pair.assert_exact()


def test_micro_batches_come_back_in_any_order() -> None:
    pair = Pair(rows=3)
    for chunk in range(CHUNKS):
        for micro_batch in (1, 0):
            pair.forward(micro_batch, chunk)
    pair.backward(0, CHUNKS - 1)
    for place in backwards([1]):
        pair.backward(*place)
    for chunk in range(CHUNKS):
        pair.forward(2, chunk)
    pair.backward(2, CHUNKS - 1)
    for chunk in reversed(range(CHUNKS - 1)):
        pair.backward(0, chunk)
        pair.backward(2, chunk)
    pair.assert_exact()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_backward_copies_nothing_after_a_prefetch(recompute: str) -> None:
    """All of the unit's bytes, of the first backward as of the others, and none of another's."""
    settings = {"offload": "full", "recompute": recompute, "min_offload_size": 1}
    pair = Pair(rows=2, **settings)
    for micro_batch in range(2):
        for chunk in range(CHUNKS):
            pair.forward(micro_batch, chunk)
            pair.first.units.copy("D", 0, micro_batch, chunk)
    copied = [0]
    for place in backwards([1, 0]):
        for stage, one in enumerate((pair.first, pair.last)):
            one.units.copy("H", stage, *place)
        copied.append(pair.first.engine.offload.stats().h2d_bytes)
        pair.backward(*place)
        assert pair.first.engine.offload.stats().h2d_bytes == copied[-1]
    assert all(one < other for one, other in pairwise(copied))
    assert copied[-1] == pair.first.engine.offload.stats().d2h_bytes
    pair.assert_exact()


def test_a_stage_that_cannot_fit_says_which_and_what_it_shares() -> None:
    settings = {"device_memory": "60KiB", "hardware": "h100"}
    with pytest.raises(BudgetError, match=r"stage 0 of 2, of which 1 micro-batches .*missing"):
        Pair(rows=1, **settings)


def test_copies_out_of_order_are_errors() -> None:
    pair = Pair(offload="full", recompute="full", min_offload_size=1)
    pair.forward(0, 0)
    with pytest.raises(SPPOError, match=r"device to host of stage 0.* chunk 1, but chunk 0 is due"):
        pair.first.units.copy("D", 0, 0, 1)
    with pytest.raises(SPPOError, match=r"host to device of stage 0.* chunk 2, but chunk 0 is due"):
        pair.first.units.copy("H", 0, 0, 2)


def test_weight_gradients_wait_until_they_are_asked_for() -> None:
    pair = Pair(split=True)
    for chunk in range(CHUNKS):
        pair.forward(0, chunk)
    for place in backwards([0]):
        pair.backward(*place)
    late = [name for name, grad in pair.first.grads.items() if grad is None]
    assert len(late) == 7 * len(pair.first.staged.cut.layers[0])
    assert all("proj" in name for name in late)
    # In any order, and each once.
    for chunk in range(CHUNKS):
        pair.weights(0, chunk)
    pair.assert_exact()
    with pytest.raises(SPPOError, match=r"stage 0, micro-batch 0, chunk 0 were asked for before"):
        pair.weights(0, 0)


def test_weights_before_their_backward_are_an_error() -> None:
    pair = Pair(split=True)
    pair.forward(0, 0)
    with pytest.raises(SPPOError, match=r"asked for before its backward\. The schedule"):
        pair.first.units.backward_weights(0, 0, 0)


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_forward_out_of_order_is_an_error(chunk: int) -> None:
    pair = Pair()
    with pytest.raises(SPPOError, match=f"with chunk {chunk}, but chunk 0 is due"):
        pair.first.units.forward(0, 0, chunk, None)


def test_a_forward_twice_is_an_error() -> None:
    pair = Pair()
    pair.forward(0, 0)
    with pytest.raises(SPPOError, match="with chunk 0, but chunk 1 is due"):
        pair.first.units.forward(0, 0, 0, None)


def test_a_backward_out_of_order_is_an_error() -> None:
    pair = Pair(rows=2)

    def ask(micro_batch: int, chunk: int, words: str) -> None:
        with pytest.raises(SPPOError, match=words):
            pair.last.units.backward(1, micro_batch, chunk, None, scale=pair.scale)

    ask(0, 0, "with chunk 0, but none is due yet")
    for chunk in range(CHUNKS - 1):
        pair.forward(0, chunk)
    # Later chunks attend to these keys: their gradients are not complete.
    ask(0, CHUNKS - 2, "but none is due yet")
    pair.forward(0, CHUNKS - 1)
    ask(0, 0, f"backward of stage 1, micro-batch 0 .* with chunk 0, but chunk {CHUNKS - 1} is due")
    ask(1, CHUNKS - 1, "micro-batch 1 .* none is due yet")
    pair.backward(0, CHUNKS - 1)
    ask(0, CHUNKS - 1, f"but chunk {CHUNKS - 2} is due")


def test_without_gradients_nothing_is_kept() -> None:
    pair = Pair(rows=2)
    with torch.no_grad():
        for micro_batch in range(2):
            for chunk in range(CHUNKS):
                pair.forward(micro_batch, chunk)
    loss = torch.stack(pair.last.units.losses).sum() * pair.scale
    assert loss.item() == pytest.approx(pair.reference.loss, rel=1e-12)
    assert pair.first.units.is_finished
    assert pair.last.units.is_finished
    assert all(grad is None for grad in pair.last.grads.values())
