"""The recipe is `sppo bench` with defaults that the command line overrides."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipes.benchmarks.long_context import arguments
from sppo_hf.cli import app
from sppo_hf.cli.benchmark.results import ResultFile
from tests.cli.benchmark.made_rows import many_rows


def test_defaults_and_what_comes_before_them() -> None:
    line = arguments([])
    assert line[:2] == ["bench", "llama-3.1-8b"]
    assert line[line.index("--seq-lens") + 1] == "8K,32K,64K,128K,256K"
    assert line[line.index("--lora") + 1] == "16"
    assert arguments(["qwen3-4b", "--lora", "full"])[1] == "qwen3-4b"
    assert arguments(["--lora", "full"])[-2:] == ["--lora", "full"]
    assert "--seq-lens" not in arguments(["--longest"])


@pytest.mark.parametrize("bad", [["--seq-lens", "none"], ["nothing/at/all"]])
def test_the_command_takes_them(tmp_path: Path, bad: list[str]) -> None:
    file = ResultFile(tmp_path)
    for row in many_rows():
        file.add(row)
    result = CliRunner().invoke(app, arguments(["--show", str(tmp_path), "--no-picture"]))
    assert result.exit_code == 0
    assert "sppo-auto" in result.stdout
    # The last of two options wins, so what is given reaches the command.
    assert CliRunner().invoke(app, arguments(bad)).exit_code == 2
