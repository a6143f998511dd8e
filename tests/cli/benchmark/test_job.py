"""Jobs as text: there and back, and what makes two of them the same measurement."""

import json

from sppo_hf.cli.benchmark.job import Job
from tests.cli.benchmark.made_rows import JOB


def test_there_and_back() -> None:
    job = JOB.replace(device_memory="40GiB", trace="x.json.gz", layers=2)
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    assert Job.from_dict({**job.to_dict(), "of_another_version": 1}) == job


def test_what_is_watched_makes_no_other_measurement() -> None:
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
