"""Predicted bytes: by hand for two chunks, by law for any."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import BudgetError
from sppo_hf.planning.activation_modes import KEEP, SAVED, ActivationMode, Saved, all_modes
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.decisions import Batch, Decisions, Order
from sppo_hf.planning.lowering import StepProgram, estimate
from sppo_hf.planning.memory import (
    GRAPH_NODE_BYTES,
    Cause,
    MemoryEstimate,
    byte_tables,
    check_budget,
    most_piece_bytes,
)
from sppo_hf.planning.model_profile import LoraShape, Training
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.policies import uniform_modes
from sppo_hf.planning.tile_sizes import loss_tile_tokens
from tests.planning.modes import OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD
from tests.planning.moments import moments_of
from tests.planning.shapes import by_hand, llama_config, shape_of, tiny_shape
from tests.planning.situations import on_host, small_shape

BOUNDS: Bounds = ((0, 600), (600, 1000))
# Few parameters train, so that gradients decide no peak.
SHAPE = shape_of(llama_config(), dtype_bytes=2, trainable_parameters=1000)


def predict(
    mode: ActivationMode, bounds: Bounds = BOUNDS, rows: int = 1, training: bool = True
) -> MemoryEstimate:
    return estimate(SHAPE, decided(mode, bounds, rows=rows, training=training))


def decided(
    mode: ActivationMode,
    bounds: Bounds = BOUNDS,
    *,
    layers: int = 32,
    rows: int = 1,
    training: bool = True,
    **others: Any,
) -> Decisions:
    settings: dict[str, Any] = {"tile_tokens": 64, **others}
    return Decisions(
        batch_rows=rows,
        bounds=bounds,
        layer_modes=uniform_modes(len(bounds), layers, mode),
        training=training,
        **settings,
    )


def test_standing_bytes() -> None:
    both = [moments_of(estimate(SHAPE, decided(KEEP, training=t))) for t in (True, False)]
    assert [moments[0].device["weights"] for moments in both] == [SHAPE.weight_bytes] * 2
    assert [moments[-1].device["gradients"] for moments in both] == [2000, 0]
    assert [moments[-1].device["optimizer"] for moments in both] == [8000, 0]
    assert both[0][0].device["logits_tile"] == 64 * 128_256 * (2 + 4 + 2)
    assert both[0][-1].device["logits_tile"] == 0, "the loss has its gradient in forward"


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_come_with_the_first_backward_and_stay(accumulates: bool) -> None:
    shape = shape_of(llama_config(), dtype_bytes=2)
    what = decided(KEEP, accumulates=accumulates)
    gradients = [m.device["gradients"] for m in moments_of(estimate(shape, what))]
    before = shape.gradient_bytes if accumulates else 0
    head = 128_256 * 4096 * 4  # summed in float32 while the loss is computed
    batch = before + shape.gradient_bytes
    # The last chunk's backward, which comes first, writes them layer by layer.
    assert gradients[:2] == [before + head] * 2
    assert gradients[2] == pytest.approx(before + head + (shape.gradient_bytes - head) / 32, abs=1)
    assert gradients[3:] == [batch] * 3


def test_a_classifiers_head_is_narrow_and_takes_the_hidden_states_of_whole_rows() -> None:
    token_bytes = 2 * SHAPE.hidden_size
    for training, more in ((True, 3 * 1000 * token_bytes), (False, 0)):
        decisions = decided(KEEP, training=training)
        whole, narrow = (
            byte_tables(shape, decisions, device_kind="cuda")
            for shape in (SHAPE, replace(SHAPE, head_width=2))
        )
        assert sum(whole.hidden[0]) == more * 2 // 3
        assert sum(narrow.hidden[0]) == more
        # Of two ranks that share the sequence each has half the norm's input and all of its output.
        shared = byte_tables(replace(SHAPE, head_width=2, sp=2), decisions, device_kind="cuda")
        assert sum(shared.hidden[0]) == more * 5 // 6
        # A tile of 64 tokens in 16 bits, in float32, and its gradient.
        assert list(narrow.logits) == [64 * 2 * (2 + 4 + 2)] * 2
        assert list(whole.logits) == [64 * SHAPE.vocab_size * (2 + 4 + 2)] * 2


@pytest.mark.parametrize("order", ["by_chunk", "by_layer"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_embeddings_with_images_are_held_for_all_tokens(order: Order, device: str) -> None:
    """By layer their gradient is that of the first layer's input, which is there anyway."""
    bounds = ((0, 40), (40, 64))
    batch = Batch(batch_rows=2, tile_tokens=16, training=True)
    decisions = batch.decisions(bounds, SHAPE.num_layers, order)
    frozen = replace(SHAPE, trainable_parameters=0)
    held: dict[bool, Any] = {}
    for encoded in (False, True):
        shape = replace(frozen, encoded_token_bytes=(50, 90)) if encoded else frozen
        program = StepProgram(decisions, shape, device)
        held[encoded] = program.levels["device"][Cause.HIDDEN].during
    more, forwards = held[True] - held[False], program.points.num_forward
    assert set(more[:forwards]) == {2 * 64 * 50}
    assert set(more[forwards:]) == {2 * 64 * 90 if order == "by_chunk" else 0}


def test_a_vocabulary_gradient_is_made_before_it_is_added() -> None:
    shape = shape_of(llama_config(), dtype_bytes=2)
    size = 128_256 * 4096 * 2
    moments = moments_of(estimate(shape, decided(KEEP, ((0, 64), (64, 128)))))
    tile = 64 * 128_256 * (2 + 4 + 2)
    # The head's of the first tile is the sum itself; the embedding's comes chunk by chunk.
    assert [m.device["logits_tile"] for m in moments[:2]] == [tile, tile + size]
    assert [m.device["workspace"] >= size for m in moments] == [False] * 3 + [True, False, True]
    on_cpu = moments_of(estimate(shape, decided(KEEP, ((0, 64), (64, 128))), device_kind="cpu"))
    assert [m.device["workspace"] >= size for m in on_cpu] == [False] * 5 + [True]


@pytest.mark.parametrize(("device", "more"), [("cpu", 0), ("cuda", 128_256 * 4096 * 4)])
def test_on_a_cpu_a_wide_heads_gradient_is_added_on_the_spot(device: str, more: int) -> None:
    shape = shape_of(llama_config(), dtype_bytes=4)
    moments = moments_of(estimate(shape, decided(KEEP, ((0, 64), (64, 128))), device_kind=device))
    tile = 64 * 128_256 * (4 + 4)
    assert [m.device["logits_tile"] for m in moments[:2]] == [tile, tile + more]


def test_kept_frames_peak_where_forward_ends() -> None:
    predicted = estimate(SHAPE, decided(KEEP, tile_tokens=16))
    shape = SHAPE
    assert predicted.moment == "start of backward of chunk 2 of 2"
    assert predicted.device["frames"] == 32 * 1000 * shape.activation_bytes_per_token(0)
    assert predicted.device["kv"] == 1000 * 32 * shape.kv_bytes_per_token(0)
    # Of the layer whose backward begins, the keys of the chunk before.
    assert predicted.device["dkv"] == 600 * shape.dkv_bytes_per_token(0)
    assert predicted.device["skeletons"] == predicted.host.total == 0


def test_offloaded_skeletons_leave_kv_and_dkv_on_the_device() -> None:
    predicted = predict(RECOMPUTE_OFFLOAD, ((0, 500), (500, 1000)))
    shape = SHAPE
    # Nothing shrinks while the last chunk goes backward, so its end is the peak: by then all
    # layers hold dK/dV of the 500 tokens before it.
    assert predicted.moment == "end of backward of chunk 2 of 2"
    assert predicted.device["dkv"] == 500 * 32 * shape.dkv_bytes_per_token(0)
    assert predicted.device["frames"] == predicted.device["skeletons"] == 0
    assert predicted.host["skeletons"] == 32 * 1000 * shape.layers[0].inputs_bytes
    assert predicted.host["frames"] == 0


def test_modes_order_as_they_should() -> None:
    device = {mode: predict(mode).device.total for mode in all_modes()}
    host = {mode: predict(mode).host.total for mode in all_modes()}
    assert device[KEEP] > device[RECOMPUTE] > device[RECOMPUTE_OFFLOAD]
    assert device[KEEP] > device[OFFLOAD]
    assert host[OFFLOAD] > host[RECOMPUTE_OFFLOAD] > host[KEEP] == host[RECOMPUTE] == 0


def test_mixed_modes_split_between_tiers() -> None:
    shape = SHAPE
    rows = ((KEEP, OFFLOAD, *[KEEP] * 30), (KEEP,) * 32)
    predicted = estimate(shape, replace(decided(KEEP), layer_modes=rows))
    frame = shape.activation_bytes_per_token(0)
    assert predicted.host["frames"] == 600 * frame
    assert predicted.device["frames"] == (32 * 1000 - 600) * frame


def test_pieces_that_find_a_place_fit_the_budget() -> None:
    for budget in (0, 10**6, 2**28, 5 * 2**30 + 7, 2**33, 2**33 + 2**28, 114_925_421_069, 2**41):
        pieces = most_piece_bytes(budget)
        assert 0.98 * (budget - 2**28) <= pieces <= budget
        assert pieces <= 0.991 * budget or budget <= 2**33 + 2**28


def test_what_the_host_holds_is_not_what_its_slabs_have_left() -> None:
    host = estimate(SHAPE, decided(OFFLOAD), device_kind="cuda").host
    assert 0 < host["slabs"] < host["frames"]
    assert host.held == host["frames"] == host.total - host["slabs"]


def test_evaluation_holds_no_frames() -> None:
    device = predict(KEEP, training=False).device
    assert device["frames"] == device["dkv"] == device["gradients"] == 0
    assert predict(OFFLOAD, training=False).host.total == 0
    assert predict(KEEP, training=False).moment == "loss of chunk 2 of 2"


def test_returned_logits_are_counted_whole() -> None:
    shape = tiny_shape()
    sizes = [
        estimate(
            shape,
            decided(KEEP, ((0, 10),), layers=2, rows=2, tile_tokens=4, return_logits=asked),
        ).device["logits_tile"]
        for asked in (False, True)
    ]
    assert sizes[1] - sizes[0] == 2 * 10 * 10 * 4


@given(
    ends=st.lists(st.integers(1, 5000), min_size=1, max_size=6, unique=True).map(sorted),
    rows=st.integers(1, 4),
    mode=st.sampled_from(all_modes()),
)
def test_rows_scale_what_rows_hold(ends: list[int], rows: int, mode: ActivationMode) -> None:
    bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
    one, many = predict(mode, bounds), predict(mode, bounds, rows=rows)
    for a, b in zip(moments_of(one), moments_of(many), strict=True):
        for cause in ("kv", "dkv", "frames", "skeletons", "workspace", "copies", "hidden"):
            assert b.device[Cause(cause)] == rows * a.device[Cause(cause)]
    # Slabs, and what passes through to the disk, are as large whatever comes.
    frames = [
        max(
            m.host["frames"] + m.host["products"] + m.host["skeletons"]
            for m in moments_of(predicted)
        )
        for predicted in (one, many)
    ]
    assert frames[1] == rows * frames[0]
    assert many.device["weights"] == one.device["weights"]


def test_each_row_saves_the_states_of_a_chunk() -> None:
    layers = tuple(replace(layer, state_bytes=4096) for layer in SHAPE.layers)
    shapes = SHAPE, replace(SHAPE, layers=layers)
    plain, recurrent = (byte_tables(s, decided(KEEP, rows=2), "cuda").saved for s in shapes)
    assert (recurrent - plain == 2 * 4096).all()


def test_attentions_backward_on_cuda() -> None:
    """Shared keys have gradients for every query head, of the larger of the two calls."""
    grouped = shape_of(llama_config(), dtype_bytes=2)
    # As many key heads as query heads: their gradients are what the kernel writes.
    single = shape_of(llama_config(num_key_value_heads=32), dtype_bytes=2)
    bounds = tuple((start, start + 512) for start in range(0, 64_512, 512))
    earlier, queries = 64_000, 32 * 128

    def workspace(shape: ModelShape, **others: Any) -> int:
        tables = byte_tables(shape, decided(OFFLOAD, bounds, **others), "cuda")
        return int(tables.workspace_backward[0, SAVED.index("whole"), -1])

    for shape, kv_heads in ((grouped, 8), (single, 32)):
        kv = 2 * kv_heads * 128
        # K/V and their gradients joined, and the gradients of the keys before the chunk.
        joined = 2 * kv * 64_512 + kv * earlier
        joined += 2 * queries * earlier * (kv_heads < 32)
        # Queries, output and gradients; dQ in float32, of the kernel and over both calls.
        own = 512 * (2 * 2 * queries + 4 * 4096 + 2 * queries * 2)
        assert workspace(shape) == 2 * (joined + own)
    streamed = workspace(grouped, kv_tier="host", kv_block_tokens=4096)
    assert streamed < workspace(grouped) - 2 * 2 * 50_000 * queries


@pytest.mark.parametrize("order", ["by_chunk", "by_layer"])
@pytest.mark.parametrize("saved", ["inputs", "matmuls"])
def test_recomputed_layers_need_either_what_a_rerun_makes_or_attention(
    saved: Saved, order: Order
) -> None:
    for tokens in (2**14, 2**17):
        shape = shape_of(llama_config(), dtype_bytes=2)
        bounds = tuple((start, start + 8192) for start in range(0, tokens, 8192))
        what = decided(OFFLOAD, bounds, order=order)
        tables = byte_tables(shape, what, "cuda")
        layer, at = shape.layers[0], SAVED.index(saved)
        rerun, early = layer.rerun_bytes(saved)
        kept, again = tables.workspace_backward[0, [SAVED.index("whole"), at], -1]
        gradients = 2 * (4 * 14_336 + 4 * 4096)
        long = tokens == 2**17
        most = kept + 8192 * early if long else 8192 * (rerun + gradients)
        assert again == most
        on_cpu = byte_tables(shape, what, "cpu").workspace_backward[0, [0, at], -1]
        assert on_cpu[1] - on_cpu[0] == 8192 * layer.whole_bytes


def test_streamed_keys_and_values_are_the_block_in_use_the_next_one_and_the_chunks_own() -> None:
    bounds = ((0, 512), (512, 1024), (1024, 1536), (1536, 2048))
    what = decided(OFFLOAD, bounds, kv_tier="host", kv_block_tokens=1024)
    forward, backward, sums = byte_tables(SHAPE, what, "cuda").kv_in_transit
    kv, dkv = SHAPE.kv_bytes_per_token(0), SHAPE.dkv_bytes_per_token(0)
    # Blocks of two chunks from the third chunk on, which are joined in a tensor of their own.
    blocks, joined = (512, 512, 1024, 1024), (0, 0, 1024, 1024)
    whole = [kv * (2 * block + both + 512) for block, both in zip(blocks, joined, strict=True)]
    assert forward.tolist() == backward.tolist() == whole
    # Sums of both blocks and of the one before them, and a gradient that is not yet added.
    assert sums.tolist() == [dkv * (3 * block + 512) + kv * block for block in blocks]


def test_tile_fits_its_bytes() -> None:
    shape = shape_of(llama_config(), dtype_bytes=2)
    assert loss_tile_tokens(shape, device_kind="cuda") == 512
    assert loss_tile_tokens(shape, device_kind="cpu") == 256


@pytest.mark.parametrize(
    ("lora", "kind", "gib", "tokens"),
    [
        (None, "cuda", 79, 2048),
        (None, "cuda", 24, 768),
        (None, "cuda", 8, 512),
        (LoraShape(rank=8), "cuda", 79, 512),
        (None, "cpu", 79, 256),
    ],
)
def test_tiles_of_a_head_that_trains_are_longer(
    lora: LoraShape | None, kind: str, gib: int, tokens: int
) -> None:
    shape = shape_of(llama_config(), dtype_bytes=2, lora=lora)
    assert loss_tile_tokens(shape, device_kind=kind, device_bytes=gib * 2**30) == tokens


def test_budget_error_names_tier_need_have_and_remedy() -> None:
    check_budget("device", "the weights", need_bytes=10, have_bytes=10, remedy="")
    with pytest.raises(
        BudgetError, match=r"device memory cannot hold the weights: 4,000 bytes.*3,000.*1,000.*Buy"
    ):
        check_budget("device", "the weights", need_bytes=4000, have_bytes=3000, remedy="Buy more.")


def test_under_lora_the_first_layer_does_not_speak_for_the_others() -> None:
    shape = shape_of(llama_config(), dtype_bytes=2, lora=LoraShape(rank=16))
    frames = [shape.activation_bytes_per_token(layer) for layer in range(32)]
    assert frames[0] < frames[1] == frames[31]
    assert estimate(shape, decided(KEEP)).device["frames"] == 1000 * sum(frames)


def test_autocast_keeps_casts_of_trained_weights_until_forward_ends() -> None:
    shape = ModelShape.from_profile(
        by_hand(llama_config(), Training(dtype_bytes=2, parameter_bytes=4))
    )
    moments = moments_of(estimate(shape, decided(KEEP)))
    # Half as many bytes again as the float32 weights, but for the embedding's rows and norms.
    casts = 2 * (shape.total_parameters - 128_256 * 4096 - 4096)
    assert moments[0].device["weights"] - shape.weight_bytes == casts
    assert moments[-1].device["weights"] == shape.weight_bytes


def test_autocast_leaves_hidden_states_as_wide_as_the_weights() -> None:
    training = Training(dtype_bytes=2, parameter_bytes=4)
    wide = ModelShape.from_profile(by_hand(llama_config(), training))
    for head_width, tensors in ((None, 2), (3, 3)):
        tables = byte_tables(replace(wide, head_width=head_width), decided(KEEP), "cpu")
        hidden, embedded, embedded_back = tables.hidden
        assert sum(hidden) == tensors * 1000 * 4 * 4096
        assert (embedded, embedded_back) == (1000 * 4 * 4096, 2 * 1000 * 4 * 4096)


def test_wide_adapters_compute_beside_what_they_are_added_to() -> None:
    def workspace(**lora: Any) -> int:
        shape = shape_of(llama_config(), lora=LoraShape(rank=16, **lora))
        held = StepProgram(decided(KEEP), shape, "cuda").levels["device"]
        return int(held[Cause.WORKSPACE].during[0])

    narrow, wide = workspace(dtype_bytes=2), workspace()
    assert narrow == 600 * 2 * (2 * 14_336 + 2 * 4096)
    assert wide == narrow + 600 * 3 * 4 * 14_336
    assert workspace(autocast=True) == workspace(targets=("q_proj",)) == narrow


def test_the_graph_takes_memory_of_a_cpu_from_forward_to_backward() -> None:
    """Whatever becomes of the tensors, and however many rows there are."""
    layers = tuple(
        replace(layer, graph_nodes=400, graph_nodes_per_1024=256) for layer in SHAPE.layers
    )
    shape = replace(SHAPE, layers=layers)
    bounds = ((0, 512), (512, 1536))
    nodes = (400 + 128, 400 + 256)

    def held(kind: str, **others: Any) -> list[int]:
        what = decided(RECOMPUTE, bounds, **others)
        moments = moments_of(estimate(shape, what, device_kind=kind))
        return [moment.device[Cause.GRAPH] for moment in moments]

    first, both = (GRAPH_NODE_BYTES * 32 * n for n in (nodes[0], sum(nodes)))
    last = GRAPH_NODE_BYTES * nodes[0]
    # Both forwards, begin and end of the second's backward, begin and end of the first's.
    expected = [first, both, both, first + GRAPH_NODE_BYTES * nodes[1], first, last]
    assert held("cpu") == held("cpu", rows=3) == expected
    assert not any(held("cuda"))
    assert not any(held("cpu", training=False))


def test_tables_are_kept_by_all_of_a_batch() -> None:
    """A decision that the tables read later must not get those of a batch without it."""
    what = decided(KEEP)
    tables = byte_tables(SHAPE, what, "cuda")
    assert byte_tables(SHAPE, replace(what, layer_modes=decided(OFFLOAD).layer_modes), "cuda") is (
        tables
    )
    for field in fields(Batch):
        was = getattr(what, field.name)
        other = replace(what, **{field.name: not was if isinstance(was, bool) else was + 1})
        assert byte_tables(SHAPE, other, "cuda") is not tables, field.name


def test_gradients_that_add_up_on_the_host_have_room_to_arrive() -> None:
    shape = on_host(small_shape(), weights=True)
    assert shape.host_resident is not None
    layer, outer = (
        shape.host_resident.layer_gradient_bytes[0],
        shape.host_resident.outer_gradient_bytes,
    )

    def held(kind: str, *, accumulates: bool) -> int:
        what = decided(KEEP, layers=shape.num_layers, accumulates=accumulates)
        return estimate(shape, what, device_kind=kind).host[Cause.GRADIENTS]

    assert held("cuda", accumulates=False) == shape.host_resident.gradient_bytes
    more = held("cuda", accumulates=True) - shape.host_resident.gradient_bytes
    assert more == max(2 * layer, outer)
    # On a CPU each is added as soon as it is there.
    assert held("cpu", accumulates=True) == shape.host_resident.gradient_bytes
