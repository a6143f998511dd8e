"""Every script answers `--help` with what its docstring says, and does nothing else."""

import runpy
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPTS = [
    path
    for path in sorted(RECIPES.rglob("*.py"))
    # One that other scripts start for each measurement.
    if '__name__ == "__main__"' in path.read_text() and path.name != "measuring.py"
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_has_help(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.syspath_prepend(RECIPES)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
