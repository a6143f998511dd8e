"""Deprecations in another process's output are found, and nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deprecations import assert_no_deprecation

TORCH = "/lib/site-packages/torch/x.py:3:"


def test_deprecations_of_the_libraries_below_are_found() -> None:
    with pytest.raises(AssertionError, match=r"torch/x\.py:3"):
        assert_no_deprecation(f"fine\n{TORCH} FutureWarning: old\nfine")


def test_other_warnings_are_left_alone() -> None:
    assert_no_deprecation("/lib/site-packages/peft/x.py:3: FutureWarning: old")
    assert_no_deprecation(f"{TORCH} UserWarning: odd\nFutureWarning: said by nobody")


PYNVML = "The pynvml package is deprecated. Please install nvidia-ml-py instead."


@pytest.mark.process
def test_torch_can_be_imported_where_a_deprecated_package_is_installed(tmp_path: Path) -> None:
    """PyTorch imports it and is blamed for it: as an error, that would end every test."""
    assert_no_deprecation(f"{TORCH} FutureWarning: {PYNVML}")
    warn = f"import warnings\nwarnings.warn({PYNVML!r}, FutureWarning, stacklevel=2)\n"
    (tmp_path / "pynvml.py").write_text(warn)
    # In PyTorch's place, for that takes seconds to be imported.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import torch.cuda\n")
    (tmp_path / "torch" / "cuda.py").write_text("import pynvml\n")
    (tmp_path / "test_import.py").write_text("import torch\n\n\ndef test():\n    pass\n")
    settings = Path(__file__).parents[1] / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", settings]
    done = subprocess.run(
        [*map(str, command), str(tmp_path / "test_import.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
