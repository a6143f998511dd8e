"""Failures that a report names, and the files that it leaves."""

import importlib
import json
import sys
from pathlib import Path

import pytest

RECIPES = str(Path(__file__).parents[2] / "recipes")


@pytest.fixture
def reporting(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES)
    yield importlib.import_module("report")
    sys.modules.pop("report")


def make(reporting, **changes):
    facts = dict(
        model="m",
        dataset="d",
        device="CPU",
        sppo_enabled=True,
        row_tokens=8,
        train_rows=3,
        held_out_rows=1,
        steps=2,
        train_losses=(3.0, 2.5),
        loss_before=3.0,
        loss_after=2.0,
        loss_reloaded=2.0,
        reload_tolerance=1e-4,
        train_seconds=1.0,
        tokens_per_second=16.0,
        loaded_host_bytes=1 << 30,
        peak_host_bytes=3 << 30,
        peak_device_bytes=0,
        saved_to="here",
    )
    return reporting.Report(**(facts | changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loss_after": 3.0, "loss_reloaded": 3.0}, "did not fall"),
        ({"loss_after": float("nan"), "loss_reloaded": None}, "did not fall"),
        ({"loss_reloaded": 2.001}, "another held-out loss"),
        ({"loss_reloaded": float("nan")}, "another held-out loss"),
    ],
)
def test_what_must_hold_and_does_not_is_said(reporting, changes, sentence):
    (failure,) = make(reporting, **changes).failures()
    assert sentence in failure


@pytest.mark.parametrize("changes", [{}, {"loss_reloaded": 2.0001}, {"loss_reloaded": None}])
def test_a_good_run_has_no_failures(reporting, changes):
    assert make(reporting, **changes).failures() == []


def test_numbers_and_picture_are_written_and_the_table_is_printed(reporting, tmp_path, capsys):
    reporting.show(make(reporting), tmp_path)

    numbers = json.loads((tmp_path / "report.json").read_text())
    assert numbers["train_losses"] == [3.0, 2.5]
    assert numbers["failures"] == []
    assert (tmp_path / "loss.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "2.0000 (-1.0000) in 2 steps" in printed
    assert "3.00 GiB (2.00 GiB above" in printed
