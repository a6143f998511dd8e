"""Sparse attention whose keys an indexer chooses: the choice itself, its memory, its packed rows.

That families are exact in each setting is in `test_exactness.py`, over stages in `tests/pipeline`.
"""

import dataclasses
import functools
import itertools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import indexer
from sppo_hf.engine.convert import convert
from sppo_hf.engine.device_facts import model_shape
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.engine.indexer import IndexKeys, indexers_of
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.errors import UnsupportedModelError
from sppo_hf.pipeline.multiplex import check_shareable_units
from sppo_hf.planning.activation_modes import SAVED
from sppo_hf.planning.config_file import check_config
from sppo_hf.planning.decisions import Batch
from sppo_hf.planning.memory import ByteTables, Cause
from sppo_hf.planning.plan import Plan
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_families import INDEXED, MULTIMODAL
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch, tiny_config
from tests.sweeps import turn

TOKENS = 29
FEW, ALL_KEYS = {"index_topk": 3}, {"index_topk": TOKENS}
SHARED: dict[str, Any] = {"indexer_types": ["full", "shared", "shared"]}
FAMILIES = sorted((INDEXED - MULTIMODAL) & CONFIG_MAPPING_NAMES.keys())


@functools.cache
def _model(family: str, **changes: Any) -> Any:
    model = build_tiny_model(family, **changes)
    model.config.use_cache = False  # with a cache Transformers does not look for documents
    return model


def _packed(*rows: tuple[int, ...]) -> dict[str, torch.Tensor]:
    batch = make_batch(rows=len(rows), tokens=TOKENS)
    positions = [list(itertools.chain(*map(range, row))) for row in rows]
    return {**batch, "position_ids": torch.tensor(positions)}


BATCHES = {
    "packed": _packed((3, 1, 14, 11), (20, 9)),
    "padding": make_batch(rows=2, tokens=TOKENS, padding=(11, 0), left_padding=(0, 6)),
}
SETTINGS = [
    {"order": "by_chunk", "recompute": "full", "offload": "full", "offload_kv": "full"},
    {"order": "by_layer", "recompute": "none", "offload": "full"},
    {"order": "by_layer", "recompute": "selective", "offload_kv": "full"},
    {"order": "by_chunk", "recompute": "none", "micro_batch_size": 1},
]


@pytest.mark.parametrize(
    ("family", "batch", "settings"),
    [
        pytest.param(family, batch, settings, id=f"{family}-{batch}-{number}")
        for index, (family, batch) in enumerate(itertools.product(FAMILIES, BATCHES))
        for number, settings in turn(list(enumerate(SETTINGS)), 4, index)
    ],
)
def test_rows_with_documents_and_padding(family: str, batch: str, settings: Any) -> None:
    config = SPPOConfig(chunk_lengths=(9, 1, 5, 14), min_offload_size=1, **settings)
    with family_check_disabled():
        report = compare(_model(family), BATCHES[batch], config)
    assert report.exact, str(report)


@pytest.mark.parametrize("changes", [FEW, ALL_KEYS], ids=["few", "all"])
@pytest.mark.parametrize("tile_bytes", [1, 9 * 16 * TOKENS * 4])
def test_a_choice_in_tiles_is_that_of_all_queries_at_once(
    changes: dict[str, int], tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sppo_hf.planning.tile_sizes.INDEX_TILE_BYTES", tile_bytes)
    config = SPPOConfig(chunk_lengths=(2, 16, 11), recompute="full")
    report = compare(_model("deepseek_v32", **changes), make_batch(tokens=TOKENS), config)
    assert report.exact, str(report)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_rerun_does_not_choose_again(recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model("deepseek_v32")
    convert(model, SPPOConfig(num_chunks=3, recompute=recompute, order="by_chunk"))
    model(**make_batch(tokens=TOKENS)).loss.backward()  # what is traced before is not counted
    num_chosen, tile_tokens = [0], indexer.index_tile_tokens

    def counted(*sizes: int) -> int:
        num_chosen[0] += 1
        return tile_tokens(*sizes)

    monkeypatch.setattr(indexer, "index_tile_tokens", counted)
    model(**make_batch(tokens=TOKENS)).loss.backward()
    assert num_chosen == [len(indexers_of(model)) * 3]


@pytest.mark.parametrize("order", ["by_layer", "by_chunk"])
def test_index_keys_are_freed_after_the_last_chunk(
    order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[IndexKeys] = weakref.WeakSet()
    most = [0]

    def add(self: IndexKeys, keys_BcD: torch.Tensor) -> None:
        alive.add(self)
        most[0] = max(most[0], len(alive))
        IndexKeys.add(self, keys_BcD)

    kind = type("Watched", (IndexKeys,), {"add": add})
    monkeypatch.setattr("sppo_hf.engine.chunk_runner.IndexKeys", kind)
    model = convert(build_tiny_model("deepseek_v32"), SPPOConfig(num_chunks=3, order=order))
    loss = model(**make_batch(tokens=TOKENS)).loss
    assert (len(alive), most) == (0, [1 if order == "by_layer" else 3])
    loss.backward()


def test_the_plan_counts_keys_and_choices() -> None:
    """A choice beside a layer's inputs; index keys, and a choice that later layers get, apart."""
    # Not as many keys as other tests take, which trace, for all processes, in float64 throughout.
    few, all_keys = (
        model_shape(find_parts(_model("deepseek_v32", index_topk=keys))).layers[2]
        for keys in (4, 30)
    )
    more = {"whole_bytes", "matmuls_bytes", "inputs_bytes", "chosen_bytes"}
    differing = {
        field.name: getattr(all_keys, field.name) - getattr(few, field.name)
        for field in dataclasses.fields(few)
        if getattr(all_keys, field.name) != getattr(few, field.name)
    }
    assert differing == dict.fromkeys(more, 4 * (30 - 4))
    assert (few.index_heads, few.index_head_size, few.index_bytes) == (16, 16, 16 * 8)

    without = model_shape(find_parts(build_tiny_model("deepseek_v3"))).layers[1]
    assert without.mlp_width == few.mlp_width
    assert few.inputs_bytes - without.inputs_bytes == 4 * 4
    # Not rerun, and without a gradient.
    weights = 16 * 16 * 16 + 32 * 16 + 32 * 16  # of queries, keys and heads
    assert few.forward_flops - without.forward_flops == 2 * weights
    assert few.inputs_recompute_flops == without.inputs_recompute_flops
    assert few.input_gradient_flops == without.input_gradient_flops

    owner, reader, _ = model_shape(find_parts(build_tiny_model("glm_moe_dsa", **SHARED))).layers
    assert (owner.index_heads, owner.index_bytes) == (16, 16 * 8)
    assert (reader.index_heads, reader.index_bytes) == (0, 0)
    chosen = [(x.chosen_bytes, x.passed_on_bytes) for x in (owner, reader)]
    assert chosen == [(4 * 8, 4 * 8), (4 * 8, 0)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("family", "settings", "layer_bytes"),
    [
        ("deepseek_v32", {"order": "by_chunk", "num_chunks": 2}, 3 * 16 * 8),
        # One layer's keys are among its temporaries.
        ("deepseek_v32", {"order": "by_layer", "num_chunks": 2}, 0),
        # Choices of two of the three layers, which later ones get.
        ("glm_moe_dsa", {"order": "by_layer", "num_chunks": 1}, 2 * 4 * 8),
        ("glm_moe_dsa", {"order": "by_chunk", "num_chunks": 2}, 2 * (16 * 8 + 4 * 8)),
    ],
)
def test_keys_of_all_layers_are_held_by_chunk_and_of_one_by_layer(
    family: str, settings: Any, layer_bytes: int, training: bool
) -> None:
    observer = _Plans()
    model = convert(build_tiny_model(family), SPPOConfig(**settings), observer=observer)
    with torch.set_grad_enabled(training):
        model(**make_batch(rows=2, tokens=TOKENS))
    assert observer.plan.estimate.most_bytes(Cause.INDEX) == 2 * TOKENS * layer_bytes


@pytest.mark.parametrize(("order", "keys"), [("by_layer", TOKENS), ("by_chunk", 0)])
def test_keys_of_a_layer_that_runs_by_layer_are_among_its_temporaries(
    order: Any, keys: int
) -> None:
    shape = model_shape(find_parts(_model("deepseek_v32")))
    batch = Batch(batch_rows=2, training=True, tile_tokens=TOKENS)
    decisions = batch.decisions(((0, 9), (9, TOKENS)), len(shape.layers), order)
    layers = tuple(dataclasses.replace(x, index_bytes=x.index_bytes + 10**6) for x in shape.layers)
    less, more = (
        ByteTables(x, decisions, "cpu").workspace_forward
        for x in (shape, dataclasses.replace(shape, layers=layers))
    )
    # From the first chunk on keys of all tokens; token-wise modules may need more than `less` has.
    assert np.all(more - less <= 2 * keys * 10**6)
    assert np.all(more - less >= 2 * keys * 10**6 - less)


def test_attention_to_chosen_keys_sums_gradients_beside_those_of_a_call() -> None:
    """On a GPU K/V once more, what a call gives back, and sums of that in float32; of all keys."""
    shape = dataclasses.replace(model_shape(find_parts(_model("deepseek_v32"))), dtype_bytes=2)
    batch = Batch(batch_rows=2, training=True, tile_tokens=TOKENS)
    # Of a short chunk hardly anything else.
    decisions = batch.decisions(((0, 28), (28, TOKENS)), len(shape.layers))
    held = ByteTables(shape, decisions, "cuda").workspace_backward[:, SAVED.index("whole"), -1]
    wanted = 2 * TOKENS * shape.layers[0].kv_elements * (2 + 2 + 4)
    assert np.all((wanted <= held) & (held < 1.1 * wanted))


class _Plans(StepObserver):
    plan: Plan

    def on_plan(self, plan: Plan, model_name: str) -> None:
        self.plan = plan


def test_units_cannot_be_shared_among_stages() -> None:
    for family in FAMILIES:
        parts = find_parts(build_tiny_model(family))
        with pytest.raises(UnsupportedModelError, match=r"have indexers.*Remedy: pp_msp='off'"):
            check_shareable_units(parts, (), 2)
        assert not model_shape(parts).units_can_be_shared
    assert model_shape(find_parts(build_tiny_model("llama"))).units_can_be_shared


@pytest.mark.skipif("mistral_large4" not in CONFIG_MAPPING_NAMES, reason="newer Transformers")
def test_layers_that_make_keys_of_what_others_store_are_refused() -> None:
    changes = {"kv_source_layers": [0, 0, 0, 3, 3, 5]}
    model = build_tiny_model("mistral_large4", text_config=changes)
    said = r"make keys of their own from what another layer has stored \(kv_source_layers=\[0, 0"
    with pytest.raises(UnsupportedModelError, match=said):
        convert(model, SPPOConfig())
    with pytest.raises(UnsupportedModelError, match=said):
        check_config(tiny_config("mistral_large4", text_config=changes))
