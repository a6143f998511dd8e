"""The suite is collected whatever optional package is missing; what needs it is skipped."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.fork_server import fork_server
from tests.sweeps import ALL, one_in

ROOT = Path(__file__).parents[1]
OPTIONAL = (
    *("bitsandbytes", "datasets", "gguf", "importlinter", "liger_kernel", "matplotlib"),
    *("nbclient", "nbformat", "peft", "trl"),
)
STARTED = "import sys; from tests.collecting_rank import main; main({'missing': sys.argv[1:]})"


@pytest.mark.parametrize("script", ["tests/run.sh", ".ci/run"])
def test_the_files_that_a_script_names_are_there(script):
    lines = (ROOT / script).read_text().splitlines()
    code = "\n".join(line for line in lines if not line.startswith("#"))
    patterns = re.findall(r"(?<![\w/])tests/[\w/{},]+(?:\.\w+)?", code)
    assert len(patterns) > 5
    for pattern in patterns:
        before, _, rest = pattern.partition("{")
        names, _, after = rest.partition("}")
        for name in names.split(","):
            assert (ROOT / f"{before}{name}{after}").exists(), f"{before}{name}{after}"


def test_a_sample_has_cases_of_every_test_and_each_from_another_on():
    names = ["a", *(f"{test}[{case}]" for test in "bcd" for case in range(7)), "e[0]", "e[1]"]
    assert one_in(1, names) == set(names)
    kept = one_in(3, names)
    assert {name for name in kept if name[0] in "ae"} == {"a", "e[0]"}
    chosen = {test: {int(name[2]) for name in kept if name[0] == test} for test in "bcd"}
    assert chosen == {"b": {1, 4}, "c": {2, 5}, "d": {0, 3, 6}}


@pytest.mark.process
@pytest.mark.slow
def test_gpu_tests_are_found_without_optional_packages_and_interrupted_when_late(tmp_path):
    """In an interpreter with everything asked for; else in a fork of one that has torch already."""
    if ALL:
        done = subprocess.run(
            [sys.executable, "-c", STARTED, *OPTIONAL],
            cwd=ROOT, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        status, printed = done.returncode, done.stdout + done.stderr
    else:
        ended = fork_server().launch(
            "tests.collecting_rank", {"missing": OPTIONAL}, ranks=1, folder=tmp_path, limit=100
        )
        (status,), (printed,) = ended.codes, ended.logs
    assert status == 0, printed[-6000:]
    assert "tests/attention/backends/test_gpu.py::test_on_cuda" in printed
    assert "methods: ['signal']" in printed
    longest = float(printed.split("longest: ")[1].split()[0])
    assert longest < 900, "not yet late when conftest's LOST_SECONDS are over"
