"""`sppo plan`: the plan, chunk by chunk, policies with the winner first, pictures and traces."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sppo_hf.cli import app
from sppo_hf.cli.plan import PlanArguments, actions_of_layout
from sppo_hf.config import SPPOConfig
from sppo_hf.errors import BudgetError, ConfigError
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.planning.choices import DeviceFacts
from sppo_hf.planning.chunk_bounds import chunk_bounds
from sppo_hf.planning.cluster import (
    ClusterRequest,
    ClusterResult,
    simulate_layout,
    solve_cluster,
)
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.feasibility import PlanResult, assess_request
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.layouts import Layout
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.model_profile import LoraShape
from sppo_hf.planning.plan import Plan, PlanRequest, make_plan, other_plan_warnings, planned_for
from sppo_hf.planning.stages import stage_shape
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.simulate import fixed_seconds, peak_units, simulate_pipeline
from tests.cli.configs import LLAMA_8B, TINY, answer_with, write_config
from tests.planning.shapes import llama_config, shape_of
from tests.sweeps import sample

MACHINE = ("--device-memory", "40GiB", "--host-memory", "64GiB", "--lora", "16")
TINY_MACHINE = ("--device-memory", "2GiB", "--host-memory", "1GiB")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], terminal_width=120)
    return result.exit_code, result.stdout, result.stderr


def read_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(*arguments, "--json")
    return code, json.loads(out)


def test_the_plan_of_an_8b_model(tmp_path: Path) -> None:
    code, out, err = run(write_config(tmp_path, LLAMA_8B), "--seq-len", "32K", *MACHINE)
    assert (code, err) == (0, "")
    flat = " ".join(out.split())
    for said in ("SPPO plan", "fits yes", "chunk tokens layers", "policy recompute", "auto mixed"):
        assert said in flat
    assert "recomputation not counted" in flat


@pytest.mark.parametrize("length", sample(["32K", "8K"], 2))
def test_auto_is_at_least_as_fast_as_every_policy_that_fits(tmp_path: Path, length: str) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    code, result = read_json(model, "--seq-len", length, *MACHINE)
    assert code == 0
    policies = result["policies"]
    assert policies[0]["policy"] == "auto"
    assert policies[0]["tokens_per_second"] == pytest.approx(result["tokens_per_second"])
    speeds = [policy["tokens_per_second"] for policy in policies if policy["fits"]]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize("policy", ["none", "full", "sppo"])
def test_fixed_policies(tmp_path: Path, policy: str) -> None:
    model = write_config(tmp_path, TINY)
    cut = ("--seq-len", "16K", "--num-chunks", "4", *TINY_MACHINE)
    code, result = read_json(model, *cut, "--policy", policy)
    assert code == 0
    chunks = result["chunks"]
    assert all(chunk["recompute_layers"] == 0 for chunk in chunks)
    leaving = [chunk["offload_layers"] for chunk in chunks]
    assert {"none": leaving == [0] * 4, "full": leaving == [2] * 4, "sppo": leaving[-1] == 0}[
        policy
    ]
    (actions,) = result["actions"]
    assert actions[:1] + actions[-1:] == ["0F0.0", "0B0.0"]
    assert sum("H" in action for action in actions) == sum(leaving)
    recomputed = read_json(model, *cut, "--policy", policy, "--recompute", "full")[1]
    assert all(chunk["recompute_layers"] == 2 for chunk in recomputed["chunks"])


def test_a_policy_that_does_not_fit(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    code, result = read_json(model, "--seq-len", "32K", *MACHINE, "--policy", "none")
    assert code == 1
    assert result["fits"] is False
    assert result["first_limit"]["tier"] == "device"
    assert result["policies"][0]["policy"] == "auto"
    assert result["policies"][0]["fits"] is True


def test_the_picture_and_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = write_config(tmp_path, TINY)
    figure, trace = tmp_path / "plan.svg", tmp_path / "trace.json"
    files = ("--figure", str(figure), "--trace", str(trace))
    code, out, err = run(model, "--seq-len", "8K", "--num-chunks", "4", *TINY_MACHINE, *files)
    assert (code, err) == (0, "")
    assert out
    assert "<svg" in figure.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"compute"} <= {e["args"].get("name") for e in events if e["ph"] == "M"}
    assert any(event["ph"] == "C" and event["name"] == "device memory" for event in events)


def test_a_plan_that_does_not_fit_is_not_drawn(tmp_path: Path) -> None:
    figure = tmp_path / "plan.png"
    model = write_config(tmp_path, LLAMA_8B)
    code, _, err = run(model, "--seq-len", "1K", *TINY_MACHINE, "--figure", str(figure), "--json")
    assert code == 1
    assert "no plan to draw" in err
    assert not figure.exists()


@pytest.mark.parametrize("option", ["--figure", "--trace"])
def test_files_that_cannot_be_written(tmp_path: Path, option: str) -> None:
    model = write_config(tmp_path, TINY)
    missing = tmp_path / "missing" / "plan.svg"
    code, out, err = run(model, "--seq-len", "1K", *TINY_MACHINE, option, str(missing))
    assert (code, out) == (2, "")
    assert "plan.svg" in err
    assert "cannot be written" in err


def test_a_picture_of_an_unknown_kind(tmp_path: Path) -> None:
    code, _, err = run(write_config(tmp_path, TINY), "--seq-len", "1K", "--figure", "plan.gif")
    assert code == 2
    assert ".svg" in err


MODEL: dict[str, Any] = {**LLAMA_8B, "num_hidden_layers": 8, "vocab_size": 32_000}


def test_the_best_five_and_why(tmp_path: Path) -> None:
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "2", "--seq-len", "64K", "--host-memory", "512GiB")
    code, out, err = run(*question, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["fits"] is True
    assert len(result["plans"]) == 5
    seconds = [float(f"{plan['step_seconds']:.4g}") for plan in result["plans"]]
    assert seconds == sorted(seconds)
    best = result["plans"][0]
    assert best["stages"] * best["replicas"] * best["sp"] == 2
    assert sum(best["chunk_lengths"]) == 65_536
    assert best["layers"][0][0] == 0
    assert best["layers"][-1][1] == 8
    assert best["why"].startswith("idle ")
    code, out, err = run(*question)
    assert (code, err) == (0, "")
    assert f"{best['tokens_per_second']:,.0f}" in out
    assert "layouts were simulated" in out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_layouts_that_offload_nothing_are_not_called_offloaded(tmp_path: Path) -> None:
    """Nor shown beside the same layout without. By layer even of one token something is."""
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "2", "--micro-batch-size", "2", "--seq-len", "1")
    code, out, _ = run(*question)
    assert code == 0
    assert "full, offloaded" not in out
    plans = json.loads(run(*question, "--json")[1])["plans"]
    assert all(plan["host_bytes"] > 0 for plan in plans if plan["offload"] != "none")
    # Of equals the first moves nothing.
    assert plans[0]["kv_tier"] == "device"


def test_stages_share_units_where_the_runtime_can(tmp_path: Path) -> None:
    """One long row over two stages: they fill and drain together, and the files say so."""
    model = write_config(tmp_path, {**MODEL, "num_hidden_layers": 4})
    question = (model, "--gpus", "2", "--seq-len", "256K", "--host-memory", "512GiB")
    question += ("--lora", "16", "--gpus-per-node", "1")
    code, out, _ = run(*question, "--write", str(tmp_path / "run"))
    assert code == 0
    assert "msp: ranks share the units that fill and drain the pipeline (pp_msp: on)." in flat(out)
    assert "msp 1/2/1" in flat(out)
    settings = yaml.safe_load((tmp_path / "run" / "sppo.yaml").read_text())
    assert settings["pp_msp"] == "on"
    assert settings["pp_size"] == 2
    assert "pp_schedule" not in settings


def test_a_disk_is_used_where_it_is_allowed_and_nothing_else_fits(tmp_path: Path) -> None:
    model = write_config(tmp_path, {**MODEL, "num_hidden_layers": 4})
    question = (model, "--gpus", "2", "--seq-len", "128K", "--lora", "16")
    question += ("--device-memory", "9GiB", "--host-memory", "2GiB")
    code, out, _ = run(*question, "--json")
    assert (code, json.loads(out)["plans"]) == (1, [])
    disk = ("--disk-memory", "4TiB", "--offload-dir", "/fast")
    code, out, _ = run(*question, *disk, "--json", "--write", str(tmp_path / "run"))
    best = json.loads(out)["plans"][0]
    assert (code, best["frame_tier"]) == (0, "disk")
    assert best["host_bytes"] <= 2 * 2**30 < best["disk_bytes"]
    settings = yaml.safe_load((tmp_path / "run" / "sppo.yaml").read_text())
    assert (settings["offload_tier"], settings["offload_dir"]) == ("disk", "/fast")
    # Two processes of one machine share what it has; stages of a pipeline do not peak together.
    assert best["stages"] == 1
    assert (settings["disk_memory"], settings["host_memory"]) == (2 * 2**40, 2**30)
    code, out, _ = run(*question, "--disk-memory", "4TiB", "--json")
    assert (code, json.loads(out)["plans"][0]["frame_tier"]) == (0, "disk")


def flat(text: str) -> str:
    return " ".join(text.split())


def test_layouts_that_do_not_fit(tmp_path: Path) -> None:
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "2", "--seq-len", "64K", "--device-memory", "8GiB")
    code, out, _ = run(*question, "--json")
    assert code == 1
    result = json.loads(out)
    assert (result["fits"], result["plans"]) == (False, [])
    assert result["closest"]["missing_bytes"] > 0
    code, out, _ = run(*question)
    assert code == 1
    assert "None fits; the one shown comes closest and lacks" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-chunks", "4"), "--num-chunks was given with --gpus 2"),
        (("--partition", "even"), "--partition was given"),
        (("--policy", "full"), "--offload was given"),
        (("--figure", "a.png"), "a.png was requested with --gpus 2"),
        (("--link", "fast"), "--link is 'fast'"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    model = write_config(tmp_path, TINY)
    code, out, err = run(model, "--gpus", "2", "--seq-len", "8K", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def written(folder: Path) -> tuple[dict[str, Any], SPPOConfig]:
    launch = yaml.safe_load((folder / "accelerate.yaml").read_text())
    return launch, SPPOConfig.from_yaml(folder / "sppo.yaml")


def test_one_device(tmp_path: Path) -> None:
    model = write_config(tmp_path, TINY)
    question = (model, "--seq-len", "16K", "--hardware", "h100", "--device-memory", "2GiB")
    code, out, err = run(*question, "--write", str(tmp_path / "run"))
    assert (code, err) == (0, "")
    launch, config = written(tmp_path / "run")
    assert (launch["distributed_type"], launch["num_processes"]) == ("NO", 1)
    assert launch["mixed_precision"] == "bf16"
    assert (config.hardware, config.device_memory) == ("h100", 2 * 2**30)
    assert sum(config.chunk_lengths or ()) == 16_384
    assert config == SPPOConfig(
        chunk_lengths=config.chunk_lengths,
        hardware="h100",
        device_memory=2 * 2**30,
        planned_for=config.planned_for,
    )
    flat = " ".join(out.split())
    assert f"accelerate launch --config_file {tmp_path / 'run' / 'accelerate.yaml'}" in out
    assert "Launch, with per_device_train_batch_size 1:" in flat


def test_a_pipeline_over_nodes(tmp_path: Path) -> None:
    model = write_config(tmp_path, {**LLAMA_8B, "num_hidden_layers": 32})
    question = (model, "--seq-len", "512K", "--gpus", "16", "--rows", "1", "--lora", "16")
    code, out, _ = run(*question, "--write", str(tmp_path), "--json")
    assert code == 0
    answer = json.loads(out)
    best = answer["plans"][0]
    launch, config = written(tmp_path)
    sharing = best["stages"] * best["sp"]
    assert launch["num_processes"] == sharing * best["replicas"]
    assert (config.pp_size, config.sp_size) == (best["stages"], best["sp"])
    assert launch["num_machines"] == -(-launch["num_processes"] // 8)
    assert list(config.chunk_lengths or ()) == best["chunk_lengths"]
    assert list(config.pp_layers or ()) == [end - start for start, end in best["layers"]]
    if best["schedule"] == "msp":
        assert (config.pp_schedule, config.pp_msp) == ("auto", "on")
    else:
        assert config.pp_schedule == best["schedule"]
    assert config.recompute != "auto"
    assert config.offload == best["offload"]
    assert len(answer["actions"]) == sharing
    assert ("--machine_rank" in answer["launch"]) == (launch["num_machines"] > 1)


def test_fsdp2_where_no_copy_of_the_model_fits(tmp_path: Path) -> None:
    """All weights of a model of eight layers, of which a device could not hold the optimizer."""
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "8", "--seq-len", "128K", "--device-memory", "20GiB")
    code, out, err = run(*question, "--write", str(tmp_path / "run"), "--json")
    assert (code, err) == (0, "")
    best = json.loads(out)["plans"][0]
    assert best["name"] == "FSDP2 with sequence parallelism of 8"
    assert (best["sharded"], best["order"]) == (True, "by_layer")
    launch, config = written(tmp_path / "run")
    assert (launch["distributed_type"], launch["num_processes"]) == ("FSDP", 8)
    assert launch["fsdp_config"]["fsdp_version"] == 2
    assert (config.sp_size, config.order) == (8, "by_layer")
    out = flat(run(*question)[1])
    assert "FSDP2 1/1/8" in out
    assert "sharded over all GPUs (PyTorch 2.13 or newer)" in out


def test_fsdp2_is_shown_beside_what_is_faster(tmp_path: Path) -> None:
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "2", "--rows", "2", "--seq-len", "8K", "--lora", "16")
    question += ("--gpus-per-node", "1")
    code, out, _ = run(*question, "--json")
    answer = json.loads(out)
    assert code == 0
    assert {plan["sharded"] for plan in answer["plans"]} == {False}
    assert answer["fsdp2"]["name"].startswith("FSDP2")
    assert answer["fsdp2"]["step_seconds"] > answer["plans"][0]["step_seconds"]
    assert "Last row, to compare: FSDP2 is slower." in flat(run(*question)[1])


STORED = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}


@pytest.mark.parametrize(("storage", "offered"), [("uint8", False), ("bfloat16", True)])
def test_fsdp2_is_offered_for_quantized_weights_that_it_shards(
    tmp_path: Path, storage: str, offered: bool
) -> None:
    settings = {"quantization_config": {**STORED, "bnb_4bit_quant_storage": storage}}
    model = write_config(tmp_path, {**MODEL, **settings})
    question = (model, "--gpus", "8", "--seq-len", "128K", "--lora", "16", "--host-memory", "1TiB")
    answer = json.loads(run(*question, "--json")[1])
    shown = [*answer["plans"], *([answer["fsdp2"]] if answer["fsdp2"] else [])]
    assert any(plan["sharded"] for plan in shown) == offered
    assert (answer["fsdp2_refusal"] is None) == offered
    said = "FSDP2 was left out: this checkpoint's weights are quantized"
    assert (said in flat(run(*question)[1])) != offered


def test_adapters_are_planned_as_fsdp2_gathers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ClusterRequest] = []

    def solve(request: ClusterRequest, **options: Any) -> ClusterResult:
        asked.append(request)
        return solve_cluster(request, **options)

    monkeypatch.setattr("sppo_hf.cli.plan.solve_cluster", solve)
    question = (write_config(tmp_path, MODEL), "--gpus", "2", "--seq-len", "8K", "--lora", "16")
    assert run(*question)[0] == 0
    (request,) = asked
    layout = Layout("seq1f1b", 1, 1, 1, 4, "flops", "whole", "none", sp=2, order="by_layer")
    shapes = [
        request.bounds_of_layout.cost(layout._replace(sharded=sharded)).shape
        for sharded in (False, True)
    ]
    assert [(s.lora.dtype_bytes, s.lora.autocast) for s in shapes if s.lora] == [
        (4, True),
        (2, False),
    ]
    shapes.append(PlanArguments(model=question[0], seq_len="8K", lora=16).plan_request().shape)
    autocast, gathered, wide = (shape.activation_bytes_per_token(1) for shape in shapes)
    assert gathered < 0.9 * autocast < 0.7 * wide


def test_a_written_plan_of_one_device_counts_adapters_as_the_launch_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PlanRequest] = []

    def assess(request: PlanRequest) -> PlanResult:
        asked.append(request)
        return assess_request(request)

    monkeypatch.setattr("sppo_hf.cli.plan.assess_request", assess)
    question = (write_config(tmp_path, MODEL), "--seq-len", "8K", "--lora", "16")
    question += ("--host-memory", "64GiB")
    for written in ((), ("--write", str(tmp_path / "run"))):
        assert run(*question, *written)[0] == 0
    assert "mixed_precision: bf16" in (tmp_path / "run" / "accelerate.yaml").read_text()
    assert [request.shape.lora and request.shape.lora.autocast for request in asked] == [
        False,
        True,
    ]


@pytest.mark.parametrize(("installed", "old"), [("2.12.1", True), ("2.13.0", False), ("", False)])
def test_the_pytorch_that_fsdp2_needs_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, old: bool
) -> None:
    def version(name: str) -> str:
        assert name == "torch"
        if not installed:
            raise metadata.PackageNotFoundError
        return installed

    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "8", "--seq-len", "128K", "--device-memory", "20GiB")
    answer = json.loads(run(*question, "--json", "--write", str(tmp_path / "run"))[1])
    assert {(plan["sharded"], plan["needs"]) for plan in answer["plans"]} == {
        (True, "PyTorch 2.13 or newer")
    }
    assert "Needs PyTorch 2.13 or newer." in (tmp_path / "run" / "accelerate.yaml").read_text()
    found = SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError)
    monkeypatch.setattr("sppo_hf.cli.plan.metadata", found)
    out = flat(run(*question)[1])
    assert ("(PyTorch 2.13 or newer; 2.12.1 is installed here)" in out) == old
    assert ("(PyTorch 2.13 or newer)" in out) != old


def test_stages_of_a_tight_host_do_not_share_it_as_if_all_were_at_their_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they fit; each with half of the host, which the files do not name, they do not."""
    layout = Layout("interleaved_seq1f1b", 2, 1, 4, 32, "flops", "inputs", "full", "host")
    answer_with(monkeypatch, layout)
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "2", "--seq-len", "256K", "--rows", "4", "--lora", "16")
    tight = ("--device-memory", "22GiB", "--host-memory", "48GiB")
    code, out, _ = run(*question, *tight, "--json", "--write", str(tmp_path / "run"))
    best = json.loads(out)["plans"][0]
    assert code == 0
    assert 46 * 2**30 < best["host_bytes"] <= 48 * 2**30
    _, config = written(tmp_path / "run")
    assert (config.device_memory, config.host_memory) == (22 * 2**30, None)

    shape = shape_of(
        llama_config(num_hidden_layers=8, vocab_size=32_000), lora=LoraShape(rank=16, dtype_bytes=4)
    )
    bounds = tuple(itertools.pairwise(itertools.accumulate(config.chunk_lengths or (), initial=0)))
    schedule = generate(config.pp_schedule, Size(2, 4, len(bounds), config.pp_virtual_stages))
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds())

    def first_stage(**budgets: Any) -> Plan:
        # As `sppo_hf.pipeline.stage_plans` asks for it.
        return make_plan(
            PlanRequest(
                config=config.replace(**budgets),
                shape=stage_shape(shape, range(*best["layers"][0]), last=False),
                device=DeviceFacts(
                    kind="cuda",
                    name="a GPU",
                    memory_bytes={"device": 80 * 2**30, "host": 24 * 2**30},
                    profile=load_profile("h100"),
                ),
                total_tokens=bounds[-1][1],
                bounds=bounds,
                alive=peak_units(schedule, timeline)[0] / len(bounds),
            )
        )

    assert {mode for row in first_stage().layer_modes for mode in row} == {
        mode_of("inputs", "host")
    }
    with pytest.raises(BudgetError, match="host"):
        first_stage(host_memory=24 * 2**30)


def test_a_sequence_shared_between_nodes_is_allowed_where_nothing_else_fits(tmp_path: Path) -> None:
    model = write_config(tmp_path, {**TINY, "num_hidden_layers": 1})
    question = (model, "--seq-len", "16K", "--gpus", "2", "--rows", "1")
    for per_node, across in (("1", True), ("2", False)):
        folder = tmp_path / per_node
        code, _, _ = run(*question, "--gpus-per-node", per_node, "--write", str(folder))
        assert code == 0
        launch, config = written(folder)
        assert (config.sp_size, config.sp_across_nodes) == (2, across)
        assert launch["num_machines"] == 2 // int(per_node)


def test_ranks_of_one_stage_have_their_weights_on_the_device() -> None:
    """One of several processes cannot move them to the host by itself, even where nothing fits."""
    config = SPPOConfig(num_chunks=2)
    device = DeviceFacts(
        kind="cuda",
        name="a GPU",
        memory_bytes={"device": 4 * 2**30, "host": 64 * 2**30},
        profile=load_profile("h100"),
    )
    single = PlanRequest(
        shape=shape_of(llama_config(num_hidden_layers=2)),
        config=config,
        device=device,
        total_tokens=4096,
    )
    cost = ModelCost(shape=single.shape, profile=load_profile("h100"), dtype_name="bfloat16")
    question = ClusterRequest(
        cost=cost,
        total_tokens=4096,
        rows=2,
        gpus=2,
        budgets=Budgets(device=None, host=None),
    )
    layout = Layout("seq1f1b", 1, 2, 1, 2, "flops", "inputs", "none", order="by_layer")
    launch: Any = SimpleNamespace(config=config, accumulated=1)
    actions = actions_of_layout(question, single, launch, simulate_layout(question, layout))
    assert actions is not None
    assert not {Action.parse(text).kind for text in actions[0]} & {"P", "G", "U"}


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    model = write_config(tmp_path, TINY)
    (tmp_path / "sppo.yaml").write_text("num_chunks: 3\n")
    question = (model, "--seq-len", "8K", "--write", str(tmp_path))
    code, out, err = run(*question)
    assert (code, out) == (2, "")
    said = " ".join(err.split())
    assert "which has another sppo.yaml. Allowed: a folder without" in said
    assert "Remedy" in said
    assert (tmp_path / "sppo.yaml").read_text() == "num_chunks: 3\n"
    assert not (tmp_path / "accelerate.yaml").exists()
    (tmp_path / "sppo.yaml").unlink()
    assert run(*question)[0] == 0
    assert run(*question)[0] == 0, "the same files may be there"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--disk-memory", "1TiB"), 2, "--write was given with --disk-memory, but without a"),
        (
            ("--device-memory", "1MiB", "--num-chunks", "2"),
            1,
            "Nothing fits, so there is nothing to write",
        ),
    ],
)
def test_plans_that_cannot_be_written(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    model = write_config(tmp_path, TINY)
    folder = tmp_path / "run"
    found, _, err = run(model, "--seq-len", "8K", *arguments, "--write", str(folder))
    assert found == code
    assert message in " ".join(err.split())
    assert not folder.exists()


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    model = write_config(tmp_path, TINY)
    code, _, err = run(model, "--seq-len", "8K", "--write", model)
    assert code == 2
    assert "cannot be used" in err


def test_other_models_and_lengths_than_planned_warn(tmp_path: Path) -> None:
    model = write_config(tmp_path, TINY)
    question = (model, "--seq-len", "2K", "--hardware", "h100", "--write", str(tmp_path / "run"))
    assert run(*question)[0] == 0
    _, config = written(tmp_path / "run")
    shape = shape_of(SimpleNamespace(**TINY))
    assert config.planned_for == planned_for(shape, 2048)
    assert list(other_plan_warnings(config, shape, 2048, training=True)) == []
    assert list(other_plan_warnings(SPPOConfig(), shape, 1024, training=True)) == []
    (longer,) = other_plan_warnings(config, shape, 4096, training=True)
    assert "rows of 2048 tokens; these have 4096" in longer
    assert "write it again" in longer
    (other,) = other_plan_warnings(config, replace(shape, vocab_size=77), 512, training=False)
    assert f"this one has {shape.num_layers} layers of {shape.hidden_size}, vocabulary 77" in other
    with pytest.raises(ConfigError, match=r"4,096 tokens long.* --seq-len 4096 --write"):
        chunk_bounds(config, shape, 4096, device_kind="cuda")
    path = tmp_path / "run" / "sppo.yaml"
    text = path.read_text()
    path.write_text(text.replace("plan 1:", "plan 2:"))
    with pytest.raises(ConfigError, match=r"sppo.yaml: planned_for .* version 2 .*write it again"):
        SPPOConfig.from_yaml(path)
    path.write_text(text.replace("plan 1:", "a plan"))
    with pytest.raises(ConfigError, match="drop planned_for"):
        SPPOConfig.from_yaml(path)
