"""The suite is collected whatever optional package is missing; what needs it is skipped."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = (
    *("bitsandbytes", "datasets", "gguf", "importlinter", "liger_kernel", "matplotlib"),
    *("nbclient", "nbformat", "peft", "trl"),
)
COLLECT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # importing any of these raises
import pytest

class Methods:
    def pytest_collection_finish(self, session):
        marks = [item.get_closest_marker("timeout") for item in session.items]
        print("methods:", sorted({mark.kwargs.get("method") for mark in marks}))
        print("longest:", max(mark.args[0] for mark in marks if mark.args))

options = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--assert=plain"]
sys.exit(pytest.main(options, plugins=[Methods()]))
"""


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


@pytest.mark.process
@pytest.mark.slow
def test_gpu_tests_are_found_without_optional_packages_and_interrupted_when_late():
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, ",".join(OPTIONAL)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "tests/attention/backends/test_gpu.py::test_on_cuda" in done.stdout
    assert "methods: ['signal']" in done.stdout
    longest = float(done.stdout.split("longest: ")[1].split()[0])
    assert longest < 900, "not yet late when conftest's LOST_SECONDS are over"
