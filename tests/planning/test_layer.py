"""A layer's numbers, worked out by hand."""

from tests.planning.shapes import tiny_shape


def test_flops_and_elements_by_hand() -> None:
    layer = tiny_shape().layers[0]
    # Two heads of four: 2 FLOPs for each entry of q k^T and again of p v.
    assert layer.attention_flops_per_key == 2 * 2 * (4 + 4)
    assert layer.kv_elements == 8
    assert layer.q_elements == layer.attention_output_elements == 8
    assert (layer.mlp_width, layer.routed_experts) == (16, 0)


def test_active_experts_count_beside_shared_ones() -> None:
    layer = tiny_shape(
        num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, n_shared_experts=3
    ).layers[0]
    assert (layer.mlp_width, layer.routed_experts) == (2 * 6 + 3 * 6, 2)
