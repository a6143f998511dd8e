"""The picture, from rows alone: which lines there are, and that a file comes of them."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from sppo_hf.cli.benchmark.picture import draw, lines
from sppo_hf.errors import ConfigError
from tests.cli.benchmark.made_rows import ended_row, many_rows, speed_row


def test_a_line_for_everyone_who_trained() -> None:
    found = {line.contender: line for line in lines(many_rows(), "tokens_per_second")}
    assert list(found) == ["plain", "checkpointing", "sppo-auto", "ideal"]
    assert [tokens for tokens, _ in found["checkpointing"].points] == [8192, 32_768, 65_536]
    assert found["ideal"].extrapolated == {32_768, 65_536, 131_072}
    assert found["sppo-auto"].extrapolated == frozenset()
    speeds = [speed for _, speed in found["sppo-auto"].points]
    assert speeds == sorted(speeds, reverse=True)


def test_every_group_gets_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    other = speed_row("plain", 4096, 1.0, job={"lora_rank": None}, host_peak_bytes=2**30)
    files = draw([*many_rows(), other], tmp_path / "new")
    assert [file.name for file in files] == ["results.png", "results-2.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size > 20_000


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert draw([ended_row("plain", 64, "failed", "x")], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return own(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match="--no-picture"):
        draw([speed_row("plain", 64, 1.0)], tmp_path)
