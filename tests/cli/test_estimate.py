"""`sppo estimate`: verdict, exit code, JSON and nothing else, bad input, and a quick start."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sppo_hf.cli import app
from tests.cli.configs import LLAMA_8B, TINY, write_config

# Limits are found sooner on a small one and in few chunks.
SMALL = ("--device-memory", "40GiB", "--host-memory", "64GiB", "--lora", "16")
TOO_LONG = ("--seq-len", "256K", "--num-chunks", "8", "--device-memory", "40GiB", "--lora", "16")
TOO_LONG += ("--host-memory", "32GiB")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["estimate", *arguments], terminal_width=120)
    return result.exit_code, result.stdout, result.stderr


def read_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, err = run(*arguments, "--json")
    assert err == ""
    assert out.count("\n") == 1, "one object and nothing else"
    return code, json.loads(out)


def test_all_of_an_8b_model_is_trained_with_its_optimizer_on_the_host(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    question = (model, "--seq-len", "32K", "--device-memory", "80GiB", "--host-memory", "512GiB")
    chunks = ("--num-chunks", "4")
    assert run(*question, *chunks, "--optimizer", "device")[0] == 1
    code, result = read_json(*question, *chunks)
    assert code == 0
    assert (result["weights"], result["optimizer"]) == ("device", "host")
    # Weights and gradients in bf16, and two moments in float32.
    assert result["peak_bytes"]["host"] > (2 + 2 + 8) * 8.03e9
    assert 0 < result["update_seconds"] < result["step_seconds"]
    _, out, _ = run(*question, "--weights", "host")
    flat = " ".join(out.split())
    assert "weights on the host, two layers on the device set by the user" in flat
    assert "optimizer on the host set by the user; its update takes" in flat


def test_an_8b_model_fits(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    code, out, err = run(model, "--seq-len", "32K", *SMALL)
    assert (code, err) == (0, "")
    flat = " ".join(out.split())
    assert "fits yes" in flat
    assert "32,768 tokens" in flat
    assert "of 40.0 GiB" in flat
    assert "recomputation not counted" in flat
    assert "measured on one, disk and links estimated from public figures" in flat
    code, result = read_json(model, "--seq-len", "32768", *SMALL)
    assert code == 0
    assert result["fits"] is True
    assert result["peak_bytes"]["device"] <= 40 * 2**30
    assert result["peak_bytes"]["host"] <= 64 * 2**30
    assert f"longest {result['max_seq_len']:,} tokens" in flat


def test_speed_falls_and_time_grows_with_length(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    results = [read_json(model, "--seq-len", length, *SMALL)[1] for length in ("32K", "128K")]
    assert results[0]["max_seq_len"] == results[1]["max_seq_len"] >= 131_072
    assert results[0]["tokens_per_second"] > results[1]["tokens_per_second"]
    assert results[0]["step_seconds"] < results[1]["step_seconds"]
    assert all(0.1 < result["mfu"] < 0.7 for result in results)


def test_lengths_that_are_too_long(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    code, result = read_json(model, *TOO_LONG)
    assert code == 1
    assert result["fits"] is False
    assert result["first_limit"]["missing_bytes"] > 0
    assert result["chunks"] == []
    code, out, _ = run(model, *TOO_LONG)
    assert code == 1
    assert "fits no" in " ".join(out.split())


def test_suggested_remedies_work(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    _, out, _ = run(model, *TOO_LONG)
    sizes = dict(re.findall(r"([\d.]+ [GT]iB) of (host memory|fast disk)", out))
    assert sorted(sizes.values()) == ["fast disk", "host memory"]
    for size, what in sizes.items():
        option = "--host-memory" if what == "host memory" else "--disk-memory"
        number, unit = size.split()
        # What is shown is rounded to three digits.
        enough = f"{float(number) * 1.01:.2f}{unit}"
        assert read_json(model, *TOO_LONG, option, enough)[0] == 0, option


def test_adapters_are_named_where_all_weights_do_not_fit(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    code, out, _ = run(model, "--seq-len", "4K", "--num-chunks", "2", "--optimizer", "device")
    assert code == 1
    assert "--lora 16" in out
    assert run(model, "--seq-len", "4K", "--num-chunks", "2", "--lora", "16")[0] == 0
    small = ("--device-memory", "8GiB", "--weights", "device", "--optimizer", "device")
    code, out, _ = run(model, "--seq-len", "4K", *small, "--lora", "16")
    assert code == 1
    assert "neither" in out
    assert "several GPUs" in " ".join(out.split())


def test_assumed_host_memory_is_a_limit_and_is_named(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    lengths = []
    for host in ((), ("--host-memory", "128GiB"), ("--host-memory", "256GiB")):
        question = (model, "--seq-len", "8K", "--lora", "16", "--num-chunks", "8")
        flat = " ".join(run(*question, *host)[1].split())
        assert ("128GiB is assumed; --host-memory" in flat) == (not host)
        (longest,) = re.findall(r"longest ([\d,]+) tokens", flat)
        lengths.append(int(longest.replace(",", "")))
    assert lengths[0] == lengths[1] < lengths[2]


def test_old_names_of_options_still_work(tmp_path: Path) -> None:
    model = write_config(tmp_path, TINY)
    words = ("--seq-len", "4K", "--device-memory", "2GiB", "--num-chunks", "2")
    new = read_json(model, *words, "--micro-batch-size", "2", "--disk-memory=4GiB")
    assert read_json(model, *words, "--rows", "2", "--disk=4GiB") == new
    assert "--rows" not in run("--help")[1]


def test_settings_reach_the_plan(tmp_path: Path) -> None:
    model = write_config(tmp_path, TINY)
    machine = ("--device-memory", "2GiB", "--host-memory", "1GiB")
    fixed = (*machine, "--num-chunks", "4", "--partition", "even", "--recompute", "full")
    code, result = read_json(model, "--seq-len", "4K", *fixed, "--offload-kv", "full")
    assert code == 0
    assert [chunk["tokens"] for chunk in result["chunks"]] == [1024] * 4
    assert all(chunk["recompute_layers"] == 2 for chunk in result["chunks"])
    assert result["kv_tier"] == "host"
    rows = read_json(model, "--seq-len", "4K", *fixed, "--micro-batch-size", "2")[1]
    assert rows["tokens_per_second"] == pytest.approx(2 * 4096 / rows["step_seconds"])
    other = read_json(model, "--seq-len", "4K", *fixed, "--hardware", "a100")[1]
    assert "A100" in other["hardware"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len", "12G"], "128K"),
        (["--seq-len", "1K", "--device-memory", "80"], "80GiB"),
        (["--seq-len", "1K", "--host-memory", "80GX"], "--host-memory"),
        (["--seq-len", "1K", "--hardware", "h900"], "h100"),
        (["--seq-len", "1K", "--num-chunks", "some"], "--num-chunks"),
        (["--seq-len", "1K", "--num-chunks", "2000"], "num_chunks=2000"),
        (["--seq-len", "1K", "--lora", "0"], "rank"),
        (["--seq-len", "1K", "--disk", "0.5"], "--disk"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], message: str) -> None:
    model = write_config(tmp_path, TINY)
    code, out, err = run(model, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    code, result = read_json(model, *arguments)
    assert code == 2
    assert result["status"] == "bad input"
    assert message in result["reason"]


def test_models_that_cannot_be_read_or_run(tmp_path: Path) -> None:
    code, _, err = run(str(tmp_path / "nothing"), "--seq-len", "1K")
    assert code == 2
    assert "no file or folder" in err
    code, _, err = run(write_config(tmp_path, TINY, model_type="mamba"), "--seq-len", "1K")
    assert code == 2
    assert "recurrent layers" in err


_START = """
import sys, time
from sppo_hf.cli import app, estimate
ask, solving = estimate.assess_request, []
def timed(question):
    begin = time.process_time()
    answer = ask(question)
    solving.append(time.process_time() - begin)
    return answer
estimate.assess_request = timed
try:
    app(["estimate", sys.argv[1], "--seq-len", "8K", "--lora", "16", "--json"])
except SystemExit as exit:
    assert exit.code == 0
unused = ("sppo_hf.cli.bench", "sppo_hf.cli.plan", "sppo_hf.planning.cluster", "requests", "jinja2")
for absent in ("torch", "transformers", "accelerate", "matplotlib", "huggingface_hub", *unused):
    assert absent not in sys.modules, absent
seconds = time.process_time() - solving[0]
assert seconds < 2, f"{seconds} seconds of CPU beside the solving"
"""


_HELP = """
import sys
from sppo_hf import cli
def ask(*words):
    try:
        cli.app([*words, "--help"])
    except SystemExit as exit:
        assert exit.code == 0
ask()
for absent in ("torch", "numpy", "yaml", "sppo_hf.config", "sppo_hf.cli.estimate"):
    assert absent not in sys.modules, absent
for command in cli._COMMANDS:
    ask(command)
    assert not {"torch", "transformers"} & {*sys.modules}, command
"""


@pytest.mark.process
def test_the_list_of_commands_imports_none_of_them_and_their_help_no_torch() -> None:
    command = [sys.executable, "-c", _HELP]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for name, said in (("bench", "Measure MODEL"), ("estimate", "Say whether training MODEL")):
        assert any(name in line and said in line for line in done.stdout.splitlines()), name


def test_a_name_that_no_command_has_is_answered_with_one_that_is_close() -> None:
    result = CliRunner().invoke(app, ["estimat"])
    assert result.exit_code == 2
    assert "estimate" in result.output


@pytest.mark.process
def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    ran = subprocess.run([sys.executable, "-c", _START, model], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()


def test_what_rows_with_images_hold_is_counted(tmp_path: Path) -> None:
    """Embeddings and DeepStack's tensors of all tokens."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {**TINY, "model_type": "qwen3_vl_text", "rope_parameters": rope}
    for name in ("architectures", "rope_scaling", "rope_theta"):
        del text[name]
    vision = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "depth": 2}
    vision |= {"num_heads": 2, "deepstack_visual_indexes": [0, 1]}
    fields = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    model = write_config(tmp_path, fields)
    question = (model, "--seq-len", "4096", "--micro-batch-size", "2", "--num-chunks", "4")
    question += ("--device-memory", "2GiB", "--host-memory", "1GiB")
    run(*question)  # traces the model, at which libraries may print
    (_, without), (_, with_images) = (read_json(*question, *m) for m in ((), ("--images",)))
    hidden = [one["peak_by_cause"]["device"]["hidden"] for one in (without, with_images)]
    assert hidden[1] - hidden[0] == 3 * 2 * 4096 * 64 * 2
    code, out, _ = run(*question, "--images")
    assert code == 0
    flat = " ".join(out.split())
    assert "rows with images" in flat
    assert "What the encoders themselves need is not counted" in flat
    code, _, err = run(write_config(tmp_path, TINY), "--seq-len", "1K", "--images")
    assert code == 2
    assert "--images is set, but this model's configuration has no encoder" in " ".join(err.split())
