"""A layer's numbers, worked out by hand."""

from tests.planning.shapes import tiny_shape


def test_flops_and_elements_by_hand() -> None:
    layer = tiny_shape().layers[0]
    # q and o: 8 x 8 each; k and v: 8 x 4 each; gate, up and down: 8 x 16 each.
    assert layer.attention_weights == 2 * 64 + 2 * 32
    assert layer.mlp_weights == 3 * 128
    assert layer.linear_flops_per_token == 2 * (192 + 384)
    # Two heads of four: 2 FLOPs for each entry of q k^T and again of p v.
    assert layer.attention_flops_per_key == 2 * 2 * (4 + 4)
    assert layer.kv_elements == 8
    assert layer.q_elements == layer.attention_output_elements == 8
    assert layer.total_weights == 192 + 384 + 2 * 8
