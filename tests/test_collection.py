"""The suite is collected whatever optional package is missing; what needs it is skipped."""

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
options = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
sys.exit(pytest.main(options))
"""


@pytest.mark.process
@pytest.mark.slow
def test_gpu_tests_are_found_without_optional_packages():
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, ",".join(OPTIONAL)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "tests/attention/backends/test_gpu.py::test_on_cuda" in done.stdout
