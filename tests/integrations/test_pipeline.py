"""Ranks that share batches, by the standard Trainer and a raw loop, see what one process sees."""

from pathlib import Path

import pytest
import torch

from sppo_hf import SPPOPlugin
from sppo_hf.engine.convert import get_engine
from sppo_hf.errors import ConfigError
from sppo_hf.integrations import accelerator
from sppo_hf.integrations.accelerator import (
    gather_objects,
    keep_one_per_batch,
    keep_own_parameters,
    pipeline_engine_of,
)
from sppo_hf.pipeline.mesh import PipelineMesh
from tests.integrations.launch import NEAR, assert_same_run, run_job, series
from tests.integrations.training import FSDP2, make_model, needs_fsdp2
from tests.pipeline.test_pipeline_engine import make
from tests.sweeps import ALL

PIPELINE = {"pp_size": 2, "num_chunks": 3}
SHARED = {"sp_size": 2, "num_chunks": 3}
BOTH = {**PIPELINE, **SHARED}
SHARED_UNITS = {**PIPELINE, "pp_msp": "on"}
ZERO_BUBBLE = {"pp_schedule": "zb_seq1f1b", "micro_batch_size": 2}
OFFLOADED = {"offload": "full", "min_offload_size": 1}
ACCUMULATED = {"gradient_accumulation_steps": 2}
COUNTED_ALONE = {"average_tokens_across_devices": False}
"""Each rank's labels are counted by itself; of one replica they are all labels."""
CLIPPED = {"max_grad_norm": 1e-4, "optim": "sgd", "learning_rate": 3e3}
"""Gradients of fresh adapters are small, and Adam would take the same steps along longer ones."""


def _job(steps: int, last: int) -> dict:
    """So many steps, evaluated every `last` of them, and saved before as many."""
    return {
        "kind": "ddp",
        "float64": True,
        "tied": True,
        # The Trainer weighs evaluation batches by rows, and the ranks of a batch by labels: only
        # with as many labels in every row is an evaluation loss the same on every layout.
        "eval_labels": 17,
        "arguments": {
            "max_steps": steps,
            "eval_steps": last,
            "save_strategy": "steps",
            "save_steps": steps - last,
        },
    }


LONG_STEPS, LONG_LAST = (50, 10) if ALL else (20, 5)
LONG = {**_job(LONG_STEPS, LONG_LAST), "eval_rows": 4}
"""More than an epoch, which ends between the checkpoint and the end."""
STEPS, LAST = (50, 10) if ALL else (4, 2)
MANY = {**_job(STEPS, LAST), "rows": 2, "eval_rows": 4}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Many steps on one process without SPPO."""
    result = run_job(MANY, 1, tmp_path_factory.mktemp("many") / "one")
    assert len(series(result, "loss")) == STEPS
    return result


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(240)
def test_many_steps_by_the_trainer_and_the_last_on_another_layout(tmp_path: Path):
    """Two ranks from the start; from their checkpoint, two replicas of two ranks."""
    plain = run_job({**LONG, "rows": 2}, 1, tmp_path / "one")
    assert len(series(plain, "loss")) == LONG_STEPS
    two = run_job({**LONG, "settings": PIPELINE, "rows": 2}, 2, tmp_path / "two")
    assert_same_run(two, plain, ("loss", "grad_norm", "epoch", "eval_loss"))
    job = {**LONG, "settings": PIPELINE, "rows": 1}
    resume = str(tmp_path / "two" / f"checkpoint-{LONG_STEPS - LONG_LAST}")
    four = run_job({**job, "resume": resume}, 4, tmp_path / "resumed")
    assert_same_run(four, plain, ("loss", "grad_norm", "epoch", "eval_loss"))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(360)
def test_many_steps_on_shared_sequences_and_the_last_on_other_layouts(tmp_path: Path, plain):
    """Two ranks; other layouts repeat the last steps from their checkpoint."""
    names = ("loss", "grad_norm", "epoch", "eval_loss")
    two = run_job({**MANY, "settings": SHARED}, 2, tmp_path / "two")
    assert two["wrapper"] == "DistributedDataParallel"
    assert_same_run(two, plain, names)
    job = {**MANY, "resume": str(tmp_path / "two" / f"checkpoint-{STEPS - LAST}")}
    for name, settings, rows, ranks in (
        ("both", BOTH, 2, 4),
        ("one", {"num_chunks": 3}, 2, 1),
        *([("four", SHARED, 1, 4), ("pipeline", PIPELINE, 2, 2)] if ALL else []),
    ):
        resumed = run_job({**job, "settings": settings, "rows": rows}, ranks, tmp_path / name)
        assert_same_run(resumed, plain, names)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(360)
def test_many_steps_on_sequences_that_stages_share(tmp_path: Path, plain):
    """Two stages of two ranks; one process repeats the last steps from their checkpoint."""
    names = ("loss", "grad_norm", "epoch", "eval_loss")
    four = run_job({**MANY, "settings": BOTH}, 4, tmp_path / "four")
    assert_same_run(four, plain, names)
    job = {**MANY, "resume": str(tmp_path / "four" / f"checkpoint-{STEPS - LAST}")}
    one = run_job({**job, "settings": {"num_chunks": 3}}, 1, tmp_path / "one")
    assert_same_run(one, plain, names)


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "lora"),
    [(ACCUMULATED, False), (CLIPPED, True)] if ALL else [({**ACCUMULATED, **CLIPPED}, True)],
)
def test_shared_units_by_the_trainer(tmp_path: Path, arguments, lora):
    job = {"kind": "ddp", "arguments": arguments, "lora": lora, "rows": 2, "eval_rows": 4}
    ours = run_job({**job, "settings": SHARED_UNITS}, 2, tmp_path / "two")
    plain = run_job(job, 1, tmp_path / "one")
    assert_same_run(ours, plain, ("loss", "grad_norm", "eval_loss"))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(240)
def test_many_steps_on_shared_units_and_the_last_in_one_process(tmp_path: Path, plain):
    names = ("loss", "grad_norm", "epoch", "eval_loss")
    two = run_job({**MANY, "settings": SHARED_UNITS}, 2, tmp_path / "two")
    assert_same_run(two, plain, names)
    job = {**MANY, "resume": str(tmp_path / "two" / f"checkpoint-{STEPS - LAST}")}
    one = run_job({**job, "settings": {"num_chunks": 3}}, 1, tmp_path / "one")
    assert_same_run(one, plain, names)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "lora"),
    [(ACCUMULATED, False), ({**COUNTED_ALONE, **CLIPPED}, True)]
    if ALL
    else [({**ACCUMULATED, **COUNTED_ALONE, **CLIPPED}, True)],
)
def test_shared_sequences_by_the_trainer(tmp_path: Path, arguments, lora):
    job = {"kind": "ddp", "arguments": arguments, "lora": lora, "rows": 2, "eval_rows": 4}
    ours = run_job({**job, "settings": SHARED}, 2, tmp_path / "two")
    plain = run_job(job, 1, tmp_path / "one")
    assert_same_run(ours, plain, ("loss", "grad_norm", "eval_loss"))
    entry = next(entry for entry in ours["history"] if "loss" in entry)
    # Each rank counts its share of the tokens, so that the sum counts every token once.
    one = entry["sppo/tokens_per_second_per_device"]
    assert entry["sppo/tokens_per_second"] == pytest.approx(2 * one)


@needs_fsdp2
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(200)
def test_shared_sequences_by_the_trainer_under_fsdp2_and_resumed(tmp_path: Path):
    """Two ranks; resumed from their checkpoint at 2, sharing sequences and with own sequences."""
    arguments = {"max_steps": 4, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    job = {"kind": "ddp", "tied": True, "eval_labels": 17, "rows": 2, "eval_rows": 4}
    plain = run_job({**job, "arguments": arguments}, 1, tmp_path / "one")
    job |= {"settings": SHARED, "arguments": {**arguments, **FSDP2}}
    ours = run_job(job, 2, tmp_path / "two")
    assert ours["wrapper"].startswith("FSDP")
    assert_same_run(ours, plain, ("loss", "grad_norm", "eval_loss"))
    job["resume"] = str(tmp_path / "two" / "checkpoint-2")
    for name, changes in (("again", {}), ("apart", {"settings": {"num_chunks": 3}, "rows": 1})):
        resumed = run_job({**job, **changes}, 2, tmp_path / name)
        assert_same_run(resumed, plain, ("loss", "grad_norm", "eval_loss"))


@needs_fsdp2
@pytest.mark.slow
@pytest.mark.process
def test_shared_sequences_of_a_model_that_fsdp2_shards(tmp_path: Path):
    """Over the ranks of two sequences; over those of one: test_distributed.py."""
    job = {"kind": "fsdp2", "tied": True}
    settings = {**SHARED, "recompute": "full"}
    ours = run_job({**job, "settings": settings, "rows": 1}, 4, tmp_path / "ours")
    plain = run_job({**job, "rows": 2}, 1, tmp_path / "one")
    assert ours["wrapper"].startswith("FSDP")
    assert ours["mesh"] == ["dp_shard"]
    assert_same_run(ours, plain, ("loss", "grad_norm", "lr"))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("settings", "arguments", "lora"),
    [
        (ZERO_BUBBLE, COUNTED_ALONE, False),
        ({"pp_schedule": "gpipe"}, ACCUMULATED, False),
        (OFFLOADED, CLIPPED, True),
    ]
    if ALL
    else [({**ZERO_BUBBLE, **OFFLOADED}, {**ACCUMULATED, **COUNTED_ALONE, **CLIPPED}, True)],
)
def test_settings_by_the_trainer(tmp_path: Path, settings, arguments, lora):
    job = {"kind": "ddp", "arguments": arguments, "lora": lora, "rows": 4}
    ours = run_job({**job, "settings": {**PIPELINE, **settings}}, 2, tmp_path / "two")
    plain = run_job(job, 1, tmp_path / "one")
    assert_same_run(ours, plain, ("loss", "grad_norm", "eval_loss"))


@pytest.mark.slow
@pytest.mark.process
def test_evaluation_counts_every_row_once(tmp_path: Path):
    """Seven rows over two replicas of a pipeline, as over two processes without one."""
    arguments = {"max_steps": 1, "eval_steps": 1}
    job = {"kind": "ddp", "rows": 2, "eval_rows": 7, "arguments": arguments}
    ours = run_job({**job, "settings": PIPELINE}, 4, tmp_path / "four")
    plain = run_job(job, 2, tmp_path / "two")
    assert series(ours, "eval_loss") == pytest.approx(series(plain, "eval_loss"), abs=NEAR)


@pytest.mark.slow
@pytest.mark.process
def test_early_stopping_and_predicted_losses(tmp_path: Path):
    """Steps too large to learn: all ranks stop where one process does, and load the best model."""
    arguments = {
        "learning_rate": 0.5,
        "max_steps": 20,
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "prediction_loss_only": True,
    }
    job = {"kind": "ddp", "rows": 2, "arguments": arguments, "patience": 2, "predict": True}
    job["eval_rows"] = 4
    ours = run_job({**job, "settings": PIPELINE}, 2, tmp_path / "two")
    plain = run_job(job, 1, tmp_path / "one")
    assert ours["steps"] == plain["steps"] < 20
    assert ours["predicted_loss"] == pytest.approx(plain["predicted_loss"], abs=NEAR)
    best = min(series(plain, "eval_loss"))
    assert ours["predicted_loss"] == pytest.approx(best, abs=NEAR)


@pytest.mark.slow
@pytest.mark.process
def test_a_raw_loop(tmp_path: Path):
    job = {"kind": "raw"}
    ours = run_job({**job, "settings": PIPELINE, "rows": 2}, 4, tmp_path / "four")
    plain = run_job({**job, "rows": 4}, 1, tmp_path / "one")
    assert_same_run(ours, plain, ("loss", "grad_norm", "lr"))


@pytest.mark.process
def test_what_a_pipeline_cannot_do_is_refused_and_ranks_see_the_same(tmp_path: Path):
    seen = run_job({"kind": "refusals", "settings": PIPELINE}, 2, tmp_path)
    said = seen["said"]
    assert "generate" in said["generate"]
    assert "without labels" in said["generate"]
    assert "without labels" in said["logits"]
    assert "output_hidden_states" in said["hidden"]
    assert "would be a copy of one part" in said["copy"]
    assert "dispatch_batches=True" in said["dispatch"]
    assert "auto_find_batch_size=True" in said["search"]
    assert "include_num_input_tokens_seen='all'" in said["count"]
    assert "was cut into stages and then reverted" in said["reverted"]
    first, second = seen["orders"][:8], seen["orders"][8:]
    assert first == second
    assert [row for batch in first for row in batch] != list(range(16))
    assert seen["metrics"] == ["a", "b"]
    assert seen["tensors"] == [[0, 1, 2], 7]


@pytest.mark.process
def test_stages_agree_on_an_overflow(tmp_path: Path):
    result = run_job({"kind": "scaler", "settings": PIPELINE}, 2, tmp_path)
    first, second, third = result["sums"]
    # Only the last rank overflowed, and neither took the step; the scale fell on both.
    assert first == second
    assert all(a != b for a, b in zip(second, third, strict=True))
    assert result["scales"] == [[1024.0, 1024.0], [512.0, 512.0], [512.0, 512.0]]
    # The schedule ran at the scaler's own scale from the first step on.
    assert result["unscaled"] == 1.0
    assert result["losses"][1] == result["losses"][2] < result["losses"][0]


@pytest.mark.parametrize("name", ["pp_size", "sp_size"])
def test_a_single_process_gets_the_launch_command(name: str):
    from accelerate import Accelerator

    with pytest.raises(ConfigError, match=f"{name}=2 .*num_processes 2"):
        Accelerator(cpu=True, parallelism_config=SPPOPlugin(**{name: 2}))


def test_sizes_of_shared_sequences_come_from_arguments_files_and_launchers(monkeypatch):
    given = SPPOPlugin(sp_size=2)
    # Accelerate's own field would mean DeepSpeed's.
    assert (given.config.sp_size, given.sp_size, given.to_json()["sp_size"]) == (2, 1, 2)
    assert SPPOPlugin({"sp_size": 2}) == given != SPPOPlugin()
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    assert SPPOPlugin() == given
    assert SPPOPlugin({"sp_size": 4}).config.sp_size == 4
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "x")
    with pytest.raises(ConfigError, match="sp_size is 'x'"):
        SPPOPlugin()


def test_foreign_parameters_leave_the_optimizer_and_groups_stay():
    model = make_model()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "lr": 1.0}, {"params": rest, "lr": 2.0}])
    keep_own_parameters(optimizer, [model.model.layers[0]])
    own = {id(p) for p in model.model.layers[0].parameters()}
    left = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in left} == own
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0]


def test_norms_are_of_the_model_that_is_trained_not_of_a_reference_beside_it():
    reference, trained = make(), make()
    models = [torch.nn.Linear(1, 1), reference, trained]
    assert pipeline_engine_of(models) is get_engine(reference)
    assert pipeline_engine_of(models, trained.parameters()) is get_engine(trained)
    # A rank may hold nothing of what is trained, and takes part in the sum all the same.
    assert pipeline_engine_of(models, []) is get_engine(trained)
    assert pipeline_engine_of(models[:1], trained.parameters()) is None


def test_gathered_metrics_are_taken_once_per_pipeline():
    mesh = PipelineMesh(2, 2, 0, 0, torch.device("cpu"))
    gathered = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3])
    assert keep_one_per_batch(mesh, gathered).tolist() == [0, 1, 2, 3]
    assert keep_one_per_batch(mesh, {"a": (gathered,)})["a"][0].tolist() == [0, 1, 2, 3]


def test_gathered_objects_are_taken_once_per_pipeline(monkeypatch):
    """Replicas may have different numbers of them."""
    mesh = PipelineMesh(2, 2, 0, 0, torch.device("cpu"))
    by_rank = [["a", torch.arange(3)], ["a", torch.arange(3)], ["b"], ["b"]]
    monkeypatch.setattr(accelerator, "gather_object", lambda own: by_rank if own == [["a"]] else [])
    first, whole, second = gather_objects(mesh, ["a"])
    assert (first, whole.tolist(), second) == ("a", [0, 1, 2], "b")
