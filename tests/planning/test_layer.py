"""A layer's numbers, worked out by hand."""

from tests.planning.shapes import tiny_shape


def test_flops_and_elements_by_hand() -> None:
    shape = tiny_shape()
    layer, work = shape.layers[0], shape.work(0)
    # q and o: 8 x 8 each; k and v: 8 x 4 each; gate, up and down: 8 x 16 each.
    assert work.forward_flops == 2 * (192 + 384)
    # Recomputing stops before the down projection.
    assert work.skeleton_recompute_flops == 2 * (192 + 384 - 128)
    # Two heads of four: 2 FLOPs for each entry of q k^T and again of p v.
    assert layer.attention_flops_per_key == 2 * 2 * (4 + 4)
    assert layer.kv_elements == 8
    assert layer.q_elements == layer.attention_output_elements == 8
    assert work.total_weights == 192 + 384 + 2 * 8
