"""Plans of a stage: chunks from the whole model alone, its own layers, its share of the memory."""

import itertools
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import KEEP, mode_of
from sppo_hf.planning.chunk_bounds import Bounds, chunk_bounds, even_bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.lowering import StepProgram
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.model_profile import LoraShape, Training
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.stages import (
    StageWeights,
    balanced_stages,
    budgets_per_micro_batch,
    pipeline_bounds,
    split_layers,
    stage_shape,
    with_copies_by_unit,
)
from tests.planning.profiles import PROFILE
from tests.planning.shapes import by_hand, llama_config, shape_of, tiny_shape

SHAPE = tiny_shape(num_hidden_layers=4)


def bounds(
    tokens: int = 4096,
    *,
    stages: int = 2,
    micro_batches: int = 1,
    on: str = "cpu",
    **settings: object,
) -> Bounds:
    config = SPPOConfig(pp_size=stages, **settings)  # type: ignore[arg-type]
    return pipeline_bounds(
        config, SHAPE, tokens, stages=stages, micro_batches=micro_batches, device_kind=on
    )


def lengths(made: Bounds) -> list[int]:
    return [end - start for start, end in made]


@pytest.mark.parametrize(
    "settings",
    [{"num_chunks": 3}, {"chunk_lengths": (4000, 96)}, {"chunk_tokens": 1500}, {"num_chunks": 1}],
)
@pytest.mark.parametrize("micro_batches", [1, 16])
def test_what_settings_say_about_chunks_is_done(
    settings: dict[str, object], micro_batches: int
) -> None:
    plain = SPPOConfig(**settings)  # type: ignore[arg-type]
    wanted = chunk_bounds(plain, SHAPE, 4096, device_kind="cpu", stages=4)
    assert bounds(stages=4, micro_batches=micro_batches, **settings) == wanted


@pytest.mark.parametrize(("stages", "micro_batches", "least"), [(2, 1, 8), (4, 1, 16), (4, 4, 4)])
def test_without_a_word_a_pipeline_has_four_units_per_stage(
    stages: int, micro_batches: int, least: int
) -> None:
    made = bounds(stages=stages, micro_batches=micro_batches)
    alone = chunk_bounds(SPPOConfig(), SHAPE, 4096, device_kind="cpu")
    assert len(made) == max(least, len(alone))
    assert made[0][0] == 0
    assert made[-1][1] == 4096
    assert all(before[1] == after[0] for before, after in itertools.pairwise(made))


def test_many_micro_batches_need_no_more_chunks_than_one_device() -> None:
    alone = chunk_bounds(SPPOConfig(partition="flops"), SHAPE, 4096, device_kind="cpu")
    assert bounds(micro_batches=64) == alone


@pytest.mark.parametrize(
    ("on", "tokens", "most"), [("cpu", 64, 4), ("cuda", 8192, 4), ("cpu", 5, 1)]
)
def test_chunks_do_not_get_too_short_for_kernels(on: str, tokens: int, most: int) -> None:
    assert len(bounds(tokens, stages=8, on=on)) == most


def test_partitions_keep_their_form() -> None:
    even = lengths(bounds(stages=4, partition="even"))
    assert max(even) - min(even) <= 1
    by_work = lengths(bounds(4096, stages=4))
    assert len(by_work) == 16
    assert by_work[0] > by_work[-1], "later chunks attend to more, so they are shorter"


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="chunk_lengths"):
        bounds(100, chunk_lengths=(50, 49))


def test_a_stage_has_its_layers_and_the_last_the_head() -> None:
    shape = tiny_shape(num_hidden_layers=4, vocab_size=10)
    first = stage_shape(shape, range(0, 3), last=False)
    last = stage_shape(shape, range(3, 4), last=True)
    assert first.layers + last.layers == shape.layers
    assert (len(first.layers), len(last.layers)) == (3, 1)
    assert (first.vocab_size, last.vocab_size) == (1, 10)
    assert first.hidden_size == last.hidden_size == shape.hidden_size


def test_weights_are_there_once_and_the_rest_is_shared() -> None:
    budgets = Budgets(device=1000, host=600, disk=50)
    shared = budgets_per_micro_batch(budgets, standing_bytes=400, alive=3.0)
    assert shared == Budgets(device=600, host=200, disk=17)
    # What does not hold the weights does not hold a share either; the planner says so.
    assert budgets_per_micro_batch(budgets, standing_bytes=1200, alive=3.0).device == 1000


def test_no_budget_is_no_share_and_less_than_one_is_one() -> None:
    none = Budgets(device=None, host=None)
    assert budgets_per_micro_batch(none, standing_bytes=400, alive=3.0) == none
    budgets = Budgets(device=1000, host=600)
    assert budgets_per_micro_batch(budgets, standing_bytes=400, alive=0.25) == budgets


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12), st.floats(1.0, 64.0))
def test_shares_together_fit(device: int, host: int, standing: int, alive: float) -> None:
    shared = budgets_per_micro_batch(
        Budgets(device=device, host=host), standing_bytes=standing, alive=alive
    )
    assert shared.device is not None
    assert shared.host is not None
    assert shared.device <= device
    used = max(0, shared.device - standing) * alive
    assert used <= max(0, device - standing) + alive
    assert shared.host * alive <= host + alive


def test_a_stage_asks_for_whole_units_one_ahead() -> None:
    """Four chunks of three layers: entering a chunk finds it and the one used next on their way."""
    cuts = tuple((at * 64, (at + 1) * 64) for at in range(4))
    shape = tiny_shape(num_hidden_layers=3)
    away = mode_of("whole", "host")
    rows = ((KEEP,) * 3, *((away, away, KEEP),) * 3)
    decisions = Decisions(
        batch_rows=1, bounds=cuts, layer_modes=rows, training=True, tile_tokens=64
    )
    made = with_copies_by_unit(decisions, shape, "cuda")
    program = StepProgram(made, shape, "cuda")
    # In backward the last chunk comes first; layers count from the top.
    assert program.num_prefetched.tolist() == [6] * 3 + [9] * 3 + [12] * 6
    assert made.max_pending_d2h_bytes == program.offloaded_bytes[1].sum()
    assert (
        program.estimate.device.total >= StepProgram(decisions, shape, "cuda").estimate.device.total
    )
    kept = replace(decisions, layer_modes=((KEEP,) * 3,) * 4)
    assert with_copies_by_unit(kept, shape, "cuda") is kept


def test_the_first_of_a_stage_to_read_keys_of_another_stage_stores_them() -> None:
    layer = SHAPE.layers[0]
    local, reads = replace(layer, window=16), replace(layer, borrows_keys=True)
    local_reads = replace(local, borrows_keys=True)
    shape = replace(SHAPE, layers=(local, layer, local_reads, reads, local_reads, reads))
    kept = [
        [layer.borrows_keys for layer in stage_shape(shape, layers, last=False).layers]
        for layers in (range(3), range(3, 6))
    ]
    assert kept == [[False, False, True], [False, False, True]]


def brute_force(costs: list[int], num_stages: int, last: int) -> int:
    """The least maximum over all cuts."""
    best = None
    for cuts in combinations(range(1, len(costs)), num_stages - 1):
        bounds = [0, *cuts, len(costs)]
        stages = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        stages[-1] += last
        best = max(stages) if best is None else min(best, max(stages))
    assert best is not None
    return best


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(0, 30),
)
def test_no_cut_is_better(costs: list[int], num_stages: int, last: int) -> None:
    if num_stages > len(costs):
        return
    stages = split_layers(costs, num_stages, last=last)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert len(stages) == num_stages
    held = [sum(costs[layer] for layer in stage) for stage in stages]
    held[-1] += last
    assert max(held) == brute_force(costs, num_stages, last)
    assert all(len(stage) >= 1 for stage in stages)


def test_equal_layers_are_spread_evenly() -> None:
    assert [len(stage) for stage in split_layers([1.0] * 32, 4)] == [8, 8, 8, 8]
    # 10 over 4 with a maximum of 3: two stages of 3 and two of 2, not 3 3 3 1.
    # The longer ones come last: earlier ranks hold more units.
    assert [len(stage) for stage in split_layers([1.0] * 10, 4)] == [2, 2, 3, 3]


def test_a_dear_head_shortens_the_last_stage() -> None:
    assert [len(s) for s in split_layers([1.0] * 32, 4, last=4.0)] == [9, 9, 9, 5]


@pytest.mark.parametrize("num_stages", [0, 3])
def test_more_stages_than_layers_are_refused(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_stages} stages .* 2 layers. Allowed: 1 to 2"):
        split_layers([1.0, 1.0], num_stages)


def test_a_models_stages_count_its_head() -> None:
    # A vocabulary of 128K against layers of hidden size 1024 is worth several of them.
    shape = shape_of(llama_config(hidden_size=1024, intermediate_size=3072), dtype_bytes=2)
    cost = ModelCost(shape=shape, profile=PROFILE, dtype_name="bfloat16")
    stages = balanced_stages(cost, even_bounds(8192, 4), 4)
    lengths = [len(stage) for stage in stages]
    assert lengths[-1] < min(lengths[:-1])
    assert max(lengths[:-1]) - min(lengths[:-1]) <= 1


@pytest.mark.parametrize("num_stages", [1, 2, 5, 32])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [None, 16])
def test_stages_hold_the_whole_model(num_stages: int, tied: bool, rank: int | None) -> None:
    lora = None if rank is None else LoraShape(rank=rank)
    config = llama_config(tie_word_embeddings=tied)
    shape = shape_of(config, dtype_bytes=2, lora=lora)
    held = [StageWeights.of(shape, s) for s in split_layers([1.0] * 32, num_stages)]
    table = 2 * 128_256 * 4096
    twice = table if tied and num_stages > 1 else 0
    assert sum(stage.weights for stage in held) == pytest.approx(shape.weight_bytes + twice, abs=9)
    # The copy of a tied table trains too.
    trained_twice = twice if rank is None else 0
    assert sum(stage.gradients for stage in held) == pytest.approx(
        shape.gradient_bytes + trained_twice, abs=9
    )
    assert sum(stage.optimizer for stage in held) == pytest.approx(
        8 * shape.trainable_parameters + 4 * trained_twice, abs=9
    )


def test_positions_stand_on_the_first_stage() -> None:
    config = llama_config(
        hidden_size=64, num_hidden_layers=4, vocab_size=100, tie_word_embeddings=True
    )
    profile = by_hand(config, Training(dtype_bytes=2, parameter_bytes=2))
    table = 1000 * config.hidden_size
    shape = ModelShape.from_profile(replace(profile, outer_weights=profile.outer_weights + table))
    first, last = (StageWeights.of(shape, stage) for stage in (range(2), range(2, 4)))
    # The head is tied, so both hold the table; the last one has a final norm besides.
    assert first.weights - last.weights == 2 * (1000 * 64 - 64)
