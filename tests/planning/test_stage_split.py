"""Stages: balanced as well as can be, and every parameter on one stage (tied ones on two)."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ConfigError
from sppo_hf.planning.chunk_bounds import even_bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.lora import LoraShape
from sppo_hf.planning.model_profile import Training
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.stage_split import StageWeights, balanced_stages, split_layers
from tests.planning.profiles import PROFILE
from tests.planning.shapes import by_hand, llama_config, shape_of


def brute_force(costs: list[int], num_stages: int, first: int, last: int) -> int:
    """The least maximum over all cuts."""
    best = None
    for cuts in combinations(range(1, len(costs)), num_stages - 1):
        bounds = [0, *cuts, len(costs)]
        stages = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        stages[0] += first
        stages[-1] += last
        best = max(stages) if best is None else min(best, max(stages))
    assert best is not None
    return best


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_no_cut_is_better(costs: list[int], num_stages: int, first: int, last: int) -> None:
    if num_stages > len(costs):
        return
    stages = split_layers(costs, num_stages, first=first, last=last)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert len(stages) == num_stages
    held = [sum(costs[layer] for layer in stage) for stage in stages]
    held[0] += first
    held[-1] += last
    assert max(held) == brute_force(costs, num_stages, first, last)
    assert all(len(stage) >= 1 for stage in stages)


def test_equal_layers_are_spread_evenly() -> None:
    assert [len(stage) for stage in split_layers([1.0] * 32, 4)] == [8, 8, 8, 8]
    # 10 over 4 with a maximum of 3: two stages of 3 and two of 2, not 3 3 3 1.
    assert sorted(len(stage) for stage in split_layers([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_a_dear_head_shortens_the_last_stage() -> None:
    assert [len(s) for s in split_layers([1.0] * 32, 4, last=4.0)] == [9, 9, 9, 5]
    assert [len(s) for s in split_layers([1.0] * 32, 4, first=4.0)] == [5, 9, 9, 9]


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
