"""The file of rows: kept at once, read again, mended where it was cut off, grouped to compare."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sppo_hf.cli.benchmark.results import Job, Numbers, ResultFile, Row, best_environment, groups
from sppo_hf.errors import ConfigError
from tests.cli.benchmark.made_rows import ENVIRONMENT, JOB, ended_row, many_rows, speed_row


def test_rows_are_read_from_the_file(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "new folder")
    for row in many_rows():
        file.add(row)
    assert ResultFile(tmp_path / "new folder").rows() == many_rows()
    lines = file.path.read_text().splitlines()
    assert len(lines) == len(many_rows())
    assert all(json.loads(line)["job"]["model"] == "llama-3.1-8b" for line in lines)


def test_unknown_numbers_are_not_written(tmp_path: Path) -> None:
    row = ended_row("plain", 8192, "killed", "a signal").to_dict()
    assert row["numbers"] == {}
    assert Row.from_dict(row).numbers == Numbers()


def test_the_newest_row_of_a_job_counts(tmp_path: Path) -> None:
    file = ResultFile(tmp_path)
    file.add(speed_row("plain", 8192, 2.0))
    file.add(speed_row("plain", 8192, 1.0))
    assert len(file.path.read_text().splitlines()) == 2
    for seen in (file, ResultFile(tmp_path)):
        (row,) = seen.rows("speed")
        assert row.numbers.median_step_seconds == 1.0
        assert seen.find("speed", row.job) == row
        assert seen.find("try", row.job) is None


def test_jobs_that_did_not_run_are_written_once(tmp_path: Path) -> None:
    file = ResultFile(tmp_path)
    for _ in range(2):
        file.add(ended_row("plain+liger", 8192, "not available", "liger-kernel is not installed"))
    assert len(file.path.read_text().splitlines()) == 1


def test_a_job_with_a_cut_off_line_is_run_again(tmp_path: Path) -> None:
    file = ResultFile(tmp_path)
    file.add(speed_row("plain", 8192, 1.0))
    file.add(speed_row("ideal", 8192, 1.0))
    file.path.write_text(file.path.read_text()[:-50])
    mended = ResultFile(tmp_path)
    assert [row.job.contender for row in mended.rows()] == ["plain"]
    mended.add(speed_row("ideal", 8192, 3.0))
    assert [row.job.contender for row in ResultFile(tmp_path).rows()] == ["plain", "ideal"]


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"some": "thing"}\n')
    with pytest.raises(ConfigError, match=r"line 1 of .* is no row"):
        ResultFile(tmp_path)


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        ResultFile(tmp_path)
    file = ResultFile(tmp_path / "folder")
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(ConfigError, match="--output"):
        file.add(speed_row("plain", 1, 1.0))


def test_only_comparable_rows_are_grouped() -> None:
    rows = [
        speed_row("plain", 8192, 1.0),
        speed_row("ideal", 32_768, 1.0),
        speed_row("plain", 8192, 1.0, job={"lora_rank": None}),
        dataclasses.replace(
            speed_row("plain", 8192, 1.0), environment={**ENVIRONMENT, "device_name": "Other"}
        ),
    ]
    nothing_ran = Row(status="not available", job=JOB.replace(lora_rank=None, contender="ideal"))
    found = groups([*rows, nothing_ran])
    assert [[row.job.contender for row in group] for group in found] == [
        ["plain", "ideal"],
        ["plain", "ideal"],
        ["plain"],
    ]
    assert best_environment([nothing_ran]) == {}
    failed = dataclasses.replace(nothing_ran, environment={"command": "sppo bench"})
    assert best_environment([failed]) == {}, "it has not said on which machine it ran"
    assert best_environment([rows[-1], nothing_ran, failed])["device_name"] == "Other"


def test_rows_and_jobs_survive_json() -> None:
    job = JOB.replace(device_memory="40GiB", trace="x.json.gz", layers=2)
    assert Job.from_dict(json.loads(json.dumps(dataclasses.asdict(job)))) == job
    assert Job.from_dict({**dataclasses.asdict(job), "of_another_version": 1}) == job


def test_traces_do_not_change_the_key_of_a_job() -> None:
    assert JOB.replace(trace="x", predict=True).key() == JOB.key()
    for changes in (
        {"total_tokens": 1},
        {"lora_rank": None},
        {"steps": 9},
        {"device_name": "H200"},
    ):
        assert JOB.replace(**changes).key() != JOB.key()


def test_settings_are_what_contenders_and_lengths_share() -> None:
    other = JOB.replace(contender="ideal", total_tokens=1, layers=2, steps=1, warm_up=0)
    assert other.settings() == JOB.settings()
    assert JOB.replace(dtype="float32").settings() != JOB.settings()
    assert JOB.replace(attention="sdpa").settings() != JOB.settings()
