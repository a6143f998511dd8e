"""Two gloo ranks with the plugin see what one process without it sees on the same batch."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from sppo_hf.config import SPPOConfig
from tests.integrations.launch import ROOT, assert_same_run, run_job, series
from tests.integrations.training import needs_fsdp2
from tests.sweeps import ALL

pytestmark = pytest.mark.process

SETTINGS = {"num_chunks": 3}
OFFLOADED = {**SETTINGS, "recompute": "none", "offload": "full", "min_offload_size": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "arguments", "lora"),
    [
        (OFFLOADED, {"gradient_accumulation_steps": 2}, False),
        (SETTINGS, {"ddp_find_unused_parameters": False}, True),
    ],
    ids=["offload, accumulation", "lora"],
)
def test_ddp_by_the_trainer(tmp_path: Path, settings, arguments, lora):
    job = {"kind": "ddp", "arguments": arguments, "lora": lora}
    ours = run_job({**job, "settings": settings, "rows": 2}, 2, tmp_path / "two")
    plain = run_job({**job, "rows": 4}, 1, tmp_path / "one")
    assert ours["wrapper"] == "DistributedDataParallel"
    assert_same_run(ours, plain, ("loss", "grad_norm", "eval_loss"))
    entry = next(entry for entry in ours["history"] if "loss" in entry)
    # Both ranks carry rows of the same length, so together they do twice what one does.
    one = entry["sppo/tokens_per_second_per_device"]
    assert entry["sppo/tokens_per_second"] == pytest.approx(2 * one)
    # The launch's sizes stay out of what is stored: one process can load it.
    stored = torch.load(tmp_path / "two" / "training_args.bin", weights_only=False)
    assert stored.parallelism_config.config.num_chunks == 3
    assert stored.parallelism_config.total_size == 1


@needs_fsdp2
@pytest.mark.slow
def test_fsdp2_by_a_raw_loop(tmp_path: Path):
    job = {"kind": "fsdp2", "tied": True}
    settings = {**OFFLOADED, "loss_tile_tokens": 3}
    ours = run_job({**job, "settings": settings, "rows": 2}, 2, tmp_path / "two")
    plain = run_job({**job, "rows": 4}, 1, tmp_path / "one")
    assert ours["wrapper"].startswith("FSDP")
    assert ours["mesh"] == ["dp_shard"]
    assert_same_run(ours, plain, ("loss", "grad_norm"))


@needs_fsdp2
@pytest.mark.parametrize("settings", [{}, {"recompute": "none"}], ids=["recompute", "keep"])
def test_by_layer_fsdp2_gathers_each_layer_once_a_pass(tmp_path: Path, settings):
    pair = SPPOConfig.from_yaml(ROOT / "recipes" / "configs" / "8_gpus_fsdp2" / "sppo.yaml")
    settings = {**SETTINGS, **settings, "order": pair.order}
    ours = run_job({"kind": "fsdp2", "settings": settings, "rows": 2}, 2, tmp_path / "two")
    plain = run_job({"kind": "fsdp2", "rows": 2}, 2, tmp_path / "plain")
    assert_same_run(ours, plain, ("loss", "grad_norm"))
    for seen, without_chunks in zip(
        series(ours, "gathered"), series(plain, "gathered"), strict=True
    ):
        assert _of_layers(seen) == _of_layers(without_chunks)
        assert len(_of_layers(seen)) == 2 * len(set(_of_layers(seen))) > 0, "forward and backward"
        # The head, in tiles, runs again in backward, and is kept for that.
        assert sorted(set(seen)) == sorted(set(without_chunks))
        assert seen.count("model.norm.weight") == 1


@needs_fsdp2
@pytest.mark.parametrize(
    ("settings", "times"),
    [({"order": "by_chunk"}, 3), ({"sp_size": 2, "order": "by_chunk"}, 3), ({"sp_size": 2}, 1)],
    ids=["by chunk", "shared by chunk", "shared"],
)
def test_by_chunk_fsdp2_gathers_for_every_chunk_and_reduces_once(tmp_path: Path, settings, times):
    """As `sppo_hf.planning` counts it: autograd sums a gradient over all chunks before.

    Layer by layer, as ranks that share sequences then go, weights are gathered once each way.
    """
    job = {"kind": "fsdp2", "settings": {**settings, "num_chunks": 3}, "rows": 2}
    ran = run_job({**job, "precision": "bf16"}, 2, tmp_path)
    # The plan counts a rank's part of the model, and weights as they are gathered.
    assert (ran["shards"], ran["dtype_bytes"]) == (2, 2)
    for seen in ran["history"]:
        layers = _of_layers(seen["gathered"])
        assert Counter(layers) == dict.fromkeys(layers, 2 * times)
        assert len(set(layers)) == 2
        # Norm and head stay from the first chunk's forward to the last one's backward.
        assert seen["gathered"].count("model.norm.weight") == times
        assert Counter(seen["reduced"]) == dict.fromkeys(seen["gathered"], 1)


@needs_fsdp2
@pytest.mark.parametrize(
    ("settings", "lengths", "lora"),
    [
        # One tile of the loss, of a rank without a second token, beside several; two ranks of one
        # sequence have 12 and 11 tokens of each of two rows.
        ({"loss_tile_tokens": 8}, [24, 2], False),
        ({"sp_size": 2, "num_chunks": 1, "loss_tile_tokens": 22}, [23, 23], False),
        # Of some chunks one rank has two tiles, and of some both.
        ({"sp_size": 2, "num_chunks": 5, "loss_tile_tokens": 5}, [23, 23], False),
        # Chunks of padding.
        ({"order": "by_chunk", "num_chunks": 3, "loss_tile_tokens": 3}, [24, 7], False),
        # As many chunks, of other lengths: two tiles of most beside one.
        ({"order": "by_chunk", "num_chunks": 5, "loss_tile_tokens": 4}, [24, 7], False),
        # The head is sharded by itself, and the embedding is not trained.
        ({"chunk_tokens": 8, "loss_tile_tokens": 5}, [24, 7], True),
    ],
    ids=["tiles", "shared", "chunks", "padding", "lengths", "lora"],
)
def test_fsdp2_gathers_weights_as_often_on_ranks_with_less_to_do(
    tmp_path: Path, settings, lengths, lora
):
    """A rank that gathers weights once more waits for the others, or takes what they send next."""
    job = {
        "kind": "fsdp2",
        "lengths": lengths,
        "pads": settings.get("num_chunks") == 3,
        "lora": lora,
    }
    shares = settings.get("sp_size", 1)
    ours = run_job({**job, "settings": settings, "rows": shares}, 2, tmp_path / "two")
    plain = run_job({**job, "rows": 2}, 1, tmp_path / "one")
    assert_same_run(ours, plain, ("loss", "grad_norm"))


@needs_fsdp2
@pytest.mark.parametrize("short", [7, 1])
def test_fsdp2_ranks_find_alike_that_a_model_cannot_run_by_layer(tmp_path: Path, short: int):
    """One chunk could: but the other rank cuts its row, and gathers weights for every chunk."""
    job = {"kind": "fsdp2", "lengths": [24, short], "hooked": True, "rows": 1}
    ours = run_job({**job, "settings": {"chunk_tokens": 8, "order": "by_layer"}}, 2, tmp_path)
    assert "different numbers of chunks: 3 on rank 0, 1 on rank 1" in ours["refused"]


@needs_fsdp2
@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float32", "uint8"] if ALL else ["float32"])
def test_fsdp2_with_adapters_on_4_bit_weights(tmp_path: Path, storage):
    """Stored as floats they are sharded; as integers every rank has all of them."""
    pytest.importorskip("bitsandbytes")
    job = {"kind": "fsdp2", "lora": True}
    settings = {**SETTINGS, "order": "by_layer"}
    ours = run_job(
        {**job, "storage": storage, "settings": settings, "rows": 2}, 2, tmp_path / "two"
    )
    plain = run_job({**job, "storage": "uint8", "rows": 4}, 1, tmp_path / "one")
    ours["weights"] = {name: x for name, x in ours["weights"].items() if "lora" in name}
    assert_same_run(ours, plain, ("loss", "grad_norm"))
    # Of two layers: attention's projections and the MLP's, two weights to a byte.
    linears = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 64
    assert ours["whole_bytes"] == (2 * linears // 2 if storage == "uint8" else 0)
    # A layer's are gathered packed, eight in a float32, with two norms and an adapter of rank 8.
    packed = linears // 8 if storage == "float32" else 0
    assert ours["gathered"] == [packed + 2 * 64 + 8 * (64 + 64)] * 2


@needs_fsdp2
def test_fsdp2_gathers_weights_as_often_for_every_group_of_rows(tmp_path: Path):
    """Also on a rank of whose second row all labels are in one of two chunks."""
    job = {"kind": "fsdp2", "lengths": [24, 24, 7, 2]}
    settings = {"num_chunks": 2, "micro_batch_size": 1}
    ours = run_job({**job, "settings": settings, "rows": 2}, 2, tmp_path / "two")
    plain = run_job({**job, "rows": 4}, 1, tmp_path / "one")
    assert_same_run(ours, plain, ("loss", "grad_norm"))


@needs_fsdp2
@pytest.mark.parametrize(
    ("settings", "kind", "family"),
    [
        ({"order": "by_layer"}, "fsdp2", "qwen3_vl"),
        ({"order": "by_chunk", "num_chunks": 3}, "fsdp2", "gemma3"),
        ({"sp_size": 2, "num_chunks": 3}, "fsdp2", "qwen3_vl"),
        ({"num_chunks": 3}, "raw", "qwen3_vl"),
    ],
    ids=["by layer", "by chunk", "shared", "ddp"],
)
def test_images_on_two_ranks(tmp_path: Path, settings, kind, family):
    """Encoders train, sharded by layer; each rank has other images, and one of them a row less."""
    job = {"kind": kind, "images": [0, 1, 2, 4, 5, 7], "family": family}
    shares = settings.get("sp_size", 1)
    ours = run_job({**job, "settings": settings, "rows": 2 * shares}, 2, tmp_path / "two")
    plain = run_job({**job, "rows": 4}, 1, tmp_path / "one")
    assert_same_run(ours, plain, ("loss", "grad_norm"))


@needs_fsdp2
@pytest.mark.parametrize("order", ["by_layer", "by_chunk"])
def test_fsdp2_refuses_images_on_some_ranks(tmp_path: Path, order):
    job = {"kind": "fsdp2", "images": [1], "rows": 1, "settings": {"order": order, "num_chunks": 2}}
    seen = run_job(job, 2, tmp_path)
    assert "images or sound on rank 1, but not on rank 0. Allowed" in seen["refused"]


@needs_fsdp2
def test_fsdp2_by_chunk_refuses_other_numbers_of_chunks(tmp_path: Path):
    """Ranks gather all weights for every chunk, so one with more chunks would wait forever."""
    settings = {"order": "by_chunk", "chunk_tokens": 8}
    job = {"kind": "fsdp2", "settings": settings, "rows": 1, "lengths": [24, 7]}
    seen = run_job(job, 2, tmp_path)
    assert "3 on rank 0, 1 on rank 1." in seen["refused"]


@needs_fsdp2
@pytest.mark.parametrize(
    ("settings", "family", "bad", "reason"),
    [
        ({"order": "by_chunk"}, None, "labels", "ConfigError: labels has shape"),
        ({"micro_batch_size": 1}, None, "labels", "ConfigError: labels has shape"),
        ({"order": "by_layer"}, "gemma3", "image", "ConfigError: 24 tokens in 2 chunks: "),
        ({"order": "by_chunk"}, "gemma3", "packed", "UnsupportedModelError: FSDPGemma3"),
        ({"sp_size": 2}, "gemma3", "image", "ConfigError: 24 tokens in 2 chunks: "),
        ({"order": "by_chunk"}, "gemma3", "pixels", "RuntimeError: "),
    ],
    ids=["by chunk", "groups of rows", "too large an image", "packed images", "shared", "encoder"],
)
def test_fsdp2_ranks_that_compare_plans_hear_what_one_refuses(
    tmp_path: Path, settings, family, bad, reason
):
    """Else they would wait for it; or, where a script goes on, be a batch ahead.

    Of what fails in an encoder, too, which FSDP2 does not wrap.
    """
    job = {"kind": "fsdp2", "rows": 2, "bad": bad, "settings": {"num_chunks": 2, **settings}}
    if family is not None:
        wraps = 1 if bad == "pixels" else 2
        job |= {"family": family, "images": list(range(8)), "wraps": wraps}
    shares = settings.get("sp_size", 1)
    refused, step = run_job(job, 2 * shares, tmp_path)["history"]
    message = f"PipelineError: This batch is run by no rank, because rank {shares} refuses it: "
    assert refused["refused"].startswith(message + reason)
    assert step["loss"] > 0


def _of_layers(gathered: list[str]) -> list[str]:
    """Without the group of norm and head: the head, in tiles, runs again in backward."""
    return [name for name in gathered if ".layers." in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sp_size", "names"),
    [(1, ("token_wise", "on_one_rank", "whole")), (2, ("token_wise", "whole"))],
)
def test_predictions_of_two_ranks(tmp_path: Path, sp_size, names):
    """Of rows of other lengths on each; and of the same rows, where they share sequences."""
    job = {"kind": "predictions"}
    settings = {**SETTINGS, "loss_tile_tokens": 5, "sp_size": sp_size}
    ours = run_job({**job, "settings": settings}, 2, tmp_path / "ours")
    plain = run_job(job, 2 // sp_size, tmp_path / "plain")
    for name in names:
        for (shape, total), (expected, expected_total) in zip(ours[name], plain[name], strict=True):
            assert shape == expected
            assert total == pytest.approx(expected_total, rel=1e-5)
