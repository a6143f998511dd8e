"""Parts of layers that no small model can show, by differences between two layers."""

from dataclasses import replace

from sppo_hf.planning.blocks import work_of
from sppo_hf.planning.ledger import Training
from tests.planning.shapes import tiny_shape

HALF = Training(dtype_bytes=2, parameter_bytes=2)


def test_work_is_remembered() -> None:
    layer = tiny_shape().layers[0]
    assert work_of(layer, HALF) is work_of(replace(layer), HALF)


def test_saved_bytes_of_experts_follow_the_active_ones_only() -> None:
    few = tiny_shape(num_local_experts=4, num_experts_per_tok=2).layers[0]
    many = tiny_shape(num_local_experts=400, num_experts_per_tok=2).layers[0]
    # The router has a score more per expert, in float32.
    extra = 396 * 4
    assert work_of(many, HALF).whole_bytes - work_of(few, HALF).whole_bytes == extra
    more = tiny_shape(num_local_experts=4, num_experts_per_tok=3).layers[0]
    # Input row and unweighted output; both halves, the activated one and the product; three
    # indices and one of the choice; the weight, before and after it is normalised.
    row = 2 * 8 * 2 + 4 * 16 * 2 + 4 * 8 + 4 + 2
    assert work_of(more, HALF).whole_bytes - work_of(few, HALF).whole_bytes == row


def test_a_window_changes_nothing_per_token() -> None:
    full, windowed = tiny_shape().layers[0], tiny_shape(sliding_window=4).layers[0]
    assert work_of(full, HALF) == work_of(windowed, HALF)


def test_the_activations_name_decides_what_is_saved() -> None:
    sizes = {
        name: work_of(tiny_shape(hidden_act=name).layers[0], HALF).whole_bytes
        for name in ("silu", "relu", "gelu_new")
    }
    width = 16 * 2
    # ReLU keeps its result, which the gating product keeps anyway.
    assert sizes["silu"] - sizes["relu"] == width
    assert sizes["gelu_new"] - sizes["silu"] == 3 * width
