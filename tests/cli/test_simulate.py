"""`sppo simulate`: numbers as JSON and as a table, with given seconds or a model's; refusals."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sppo_hf.cli import app
from sppo_hf.schedule.generate import GENERATORS, Size, generate
from sppo_hf.schedule.lower import lower
from tests.cli.configs import LLAMA_8B, TINY, write_config


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments], terminal_width=120)
    return result.exit_code, result.stdout, result.stderr


def read_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, err = run(*arguments, "--json")
    assert err == ""
    return code, json.loads(out)


def size_of(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[str, ...]:
    numbers = ("--stages", ranks, "--micro-batches", micro_batches, "--chunks", chunks)
    return tuple(map(str, numbers))


def test_the_example_of_the_readme() -> None:
    code, result = read_json("--schedule", "seq1f1b", *size_of(4, 8, 4))
    assert code == 0
    assert result["bubble_fraction"] == 3 / 35
    assert result["step_seconds"] == 105.0
    assert result["peak_units"] == [7, 6, 5, 4]
    assert result["peak_bytes"] is None
    assert result["actions"] == lower(generate("seq1f1b", Size(4, 8, 4))).texts()
    assert set(result) == {
        *("bubble_fraction", "step_seconds", "peak_units", "peak_bytes", "actions")
    }


@pytest.mark.parametrize("name", GENERATORS)
def test_every_schedule(name: str) -> None:
    code, result = read_json("--schedule", name, *size_of(2, 4, 2))
    assert code == 0
    assert 0 < result["bubble_fraction"] < 1
    assert len(result["actions"]) == len(result["peak_units"]) == 2


def test_virtual_stages() -> None:
    virtual = ("--schedule", "interleaved_seq1f1b", *size_of(4, 8, 4), "--virtual", "2")
    code, result = read_json(*virtual)
    assert code == 0
    assert result["bubble_fraction"] == 3 / 67
    assert result["peak_units"] == [14, 12, 10, 8]


def test_given_seconds_are_simulated() -> None:
    plain = ("--schedule", "zb_seq1f1b", *size_of(3, 4))
    _, result = read_json(*plain, "--forward", "3", "--backward", "7", "--weight", "2")
    # (P - 1)(F + I - W) beside M (F + I + W).
    assert result["step_seconds"] == 4 * 10 + 2 * (3 + 5 - 2)
    _, sent = read_json("--schedule", "gpipe", *size_of(3, 1), "--send", "0.5")
    assert sent["step_seconds"] == 3 * 3 + 4 * 0.5
    # What is listed is what a rank does, messages included.
    assert sent["actions"][1] == "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0".split()


def test_a_model_on_a_machine(tmp_path: Path) -> None:
    model = ("--model", write_config(tmp_path, LLAMA_8B), "--seq-len", "64K", "--hardware", "h100")
    plain = ("--schedule", "seq1f1b", *size_of(4, 2, 8), *model)
    code, result = read_json(*plain)
    assert code == 0
    assert len(result["peak_bytes"]) == 4
    assert all(isinstance(num_bytes, int) for num_bytes in result["peak_bytes"])
    # Rank 0 holds most units; every rank holds its share of 16 GB of weights, and three times as
    # much again for gradients and the optimizer's states.
    assert min(result["peak_bytes"]) > 8e9 * 12 / 4
    away = read_json(*plain, "--offload", "full")[1]
    assert max(away["peak_bytes"]) < 0.8 * max(result["peak_bytes"])
    recomputed = read_json(*plain, "--recompute")[1]
    assert recomputed["step_seconds"] > result["step_seconds"]
    assert max(recomputed["peak_bytes"]) < 0.6 * max(result["peak_bytes"])
    even = read_json(*plain, "--partition", "even")[1]
    assert even["bubble_fraction"] > result["bubble_fraction"]
    adapters = read_json(*plain, "--recompute", "--lora", "16")[1]
    assert max(adapters["peak_bytes"]) < max(recomputed["peak_bytes"]) - 8e9 * 8 / 4
    far = read_json(*plain, "--link", "100MB")[1]
    assert far["step_seconds"] > result["step_seconds"]


def test_the_table(tmp_path: Path) -> None:
    code, out, err = run("--schedule", "1f1b", *size_of(2, 2))
    assert (code, err) == (0, "")
    assert "1f1b, 2 ranks, 2 micro-batches of 1 chunks" in out
    assert "a step takes 9 seconds, ranks idle 33.33% of it" in out
    assert "rank 0  0F0 0F1 .   .   0B0 =   .   0B1 =" in out
    model = ("--model", write_config(tmp_path, TINY), "--seq-len", "8K")
    code, out, err = run("--schedule", "1f1b", *size_of(2, 2), *model)
    assert (code, err) == (0, "")
    assert "peak memory" in out
    # Long ones are left to --figure.
    assert "rank 0  " not in run("--schedule", "1f1b", *size_of(2, 99))[1]


def test_the_picture_and_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure, trace = tmp_path / "timeline.svg", tmp_path / "trace.json"
    files = ("--figure", str(figure), "--trace", str(trace))
    code, out, err = run("--schedule", "seq1f1b", *size_of(2, 2, 2), "--send", "0.1", *files)
    assert (code, err) == (0, "")
    assert out
    assert "<svg" in figure.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    named = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(0, "compute"), (0, "send 1"), (1, "compute"), (1, "recv 0")} <= named
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 1}
    ran = [e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["cat"]) == (1, "forward")]
    assert ran == ["1F0", "1F1", "1F2", "1F3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedule", "pipedream"), "no schedule 'pipedream'. Allowed: gpipe, 1f1b"),
        (("--schedule", "gpipe", "--micro-batches", "0"), "micro-batches = 0. Allowed: 1 or more"),
        (("--schedule", "gpipe", "--chunks", "-2"), "chunks = -2"),
        (("--schedule", "gpipe", "--virtual", "2"), "only interleaved_seq1f1b"),
        (("--schedule", "gpipe", "--forward", "-1"), "--forward is -1.0. Allowed: seconds"),
        (("--schedule", "gpipe", "--backward", "inf"), "--backward is inf"),
        (("--schedule", "gpipe", "--weight", "3"), "--weight is 3.0, more than --backward, 2.0"),
        (("--schedule", "gpipe", "--seq-len", "8K"), "--seq-len was given. Allowed: only with"),
        (("--schedule", "gpipe", "--offload", "full"), "--offload was given"),
        (("--schedule", "gpipe", "--figure", "a.gif"), "--figure is 'a.gif'"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run("--stages", "2", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    code, result = read_json("--stages", "2", *arguments)
    assert code == 2
    assert result["status"] == "bad input"
    assert message in result["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--model was given without --seq-len"),
        (("--seq-len", "8K", "--forward", "1"), "--forward was given. Allowed: only without"),
        (("--seq-len", "8K", "--link", "fast"), "--link is 'fast'"),
        (("--seq-len", "8K", "--stages", "3"), "3 stages were asked for of a model with 2 layers"),
        (("--seq-len", "8", "--chunks", "9"), "num_chunks=9 is more than the 8 tokens"),
        (("--seq-len", "8K", "--hardware", "abacus"), "hardware='abacus'"),
    ],
)
def test_bad_input_with_a_model(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    model = ("--model", write_config(tmp_path, TINY))
    code, out, err = run("--schedule", "gpipe", "--stages", "2", *model, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "trace.json"
    code, out, err = run("--schedule", "gpipe", "--stages", "2", "--trace", str(missing))
    assert (code, out) == (2, "")
    assert "cannot be written" in err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--stages", "1000000000"),
        ("--micro-batches", "1000000000"),
        ("--chunks", "9" * 4000),
        ("--virtual", "1000000000"),
    ],
)
def test_sizes_that_take_minutes_are_refused(option: str, value: str) -> None:
    size = {"--stages": "2", "--micro-batches": "2", option: value}
    words = [word for pair in size.items() for word in pair]
    code, out, err = run("--schedule", "interleaved_seq1f1b", *words)
    assert (code, out) == (2, "")
    assert "Allowed: a product of at most 32,768" in err
    assert "Remedy" in err


def test_the_product_of_all_sizes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sppo_hf.cli.simulate._MAX_UNITS", 512)
    code, _ = read_json("--schedule", "gpipe", *size_of(8, 16, 4))
    assert code == 0
    code, out, _ = run("--schedule", "gpipe", *size_of(8, 16, 5))
    assert (code, out) == (2, "")
    model = ("--model", write_config(tmp_path, TINY), "--seq-len", "8K")
    code, _, err = run("--schedule", "gpipe", *size_of(16, 64, 17), *model)
    assert code == 2
    assert "16,384 with --model" in err


@pytest.mark.parametrize("value", ["1e308", "1e-300", "-1", "nan", "inf"])
@pytest.mark.parametrize("option", ["--forward", "--send"])
def test_seconds_that_overflow_are_refused(option: str, value: str) -> None:
    code, out, err = run("--schedule", "gpipe", "--stages", "2", option, value)
    assert (code, out) == (2, "")
    assert f"{option} is" in err


def test_a_long_step_is_not_drawn_second_by_second() -> None:
    times = ("--forward", "1e9", "--backward", "1e9")
    code, out, _ = run("--schedule", "gpipe", "--stages", "2", *times)
    assert code == 0
    assert "rank 0" not in out


_START = """
import sys, time
from sppo_hf.cli import app
size = ["--stages", "4", "--micro-batches", "8", "--chunks", "4"]
model = ["--model", sys.argv[1], "--seq-len", "64K"]
try:
    app(["simulate", "--schedule", "seq1f1b", *size, *model, "--json"])
except SystemExit as exit:
    assert exit.code in (0, None)
for absent in ("torch", "transformers", "accelerate", "matplotlib", "huggingface_hub"):
    assert absent not in sys.modules, absent
assert time.process_time() < 2, f"{time.process_time()} seconds of CPU"
"""


@pytest.mark.process
def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    ran = subprocess.run([sys.executable, "-c", _START, model], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()


def test_shared_units(tmp_path: Path) -> None:
    arguments = ("--pp-schedule", "msp", "--pp-size", "4", "--num-chunks")
    code, out, err = run(*arguments, "8", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    # Forward takes 8 + 1/3 units, backward twice that; ranks work for 8 units each.
    assert result["step_seconds"] == pytest.approx(25)
    assert result["bubble_fraction"] == pytest.approx(1 - 24 / 25)
    assert result["peak_units"][1] == pytest.approx(8 + 1 / 3)
    assert [action for action in result["actions"][0] if "_" not in action][:3] == [
        "0F0#0",
        "0F1#0",
        "0F2#0",
    ]
    code, out, err = run(*arguments, "2")
    assert (code, out) == (2, "")
    assert "asked for with 2 chunks on 4 ranks" in err
    model = write_config(tmp_path, LLAMA_8B)
    code, out, _ = run(*arguments, "8", "--model", model, "--seq-len", "256K", "--json")
    assert code == 0
    plain = json.loads(
        run(
            "--pp-schedule",
            "seq1f1b",
            *arguments[2:],
            "8",
            "--model",
            model,
            "--seq-len",
            "256K",
            "--json",
        )[1]
    )
    assert json.loads(out)["step_seconds"] < plain["step_seconds"]
