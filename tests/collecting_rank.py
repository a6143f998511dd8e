"""A job of test_collection.py: collect tests, in a process in which `missing` packages raise.

What is imported from the package and its tests is forgotten, and imported anew without them.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest


class Methods:
    """Says what time limits the tests have."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """See the docstring of the class."""
        marks = [item.get_closest_marker("timeout") for item in session.items]
        # Each has a limit, which conftest gives it.
        methods = sorted({mark.kwargs.get("method") if mark else "none" for mark in marks})
        longest = max(mark.args[0] for mark in marks if mark and mark.args)
        sys.stdout.write(f"methods: {methods}\nlongest: {longest}\n")


def main(job: dict[str, Any]) -> None:
    """Collect the tests that need a GPU."""
    missing = set(job["missing"])
    for name in list(sys.modules):
        if name.partition(".")[0] in {*missing, "sppo_hf", "tests"}:
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(missing))  # type: ignore[arg-type]
    os.chdir(Path(__file__).parents[1])
    options = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--assert=plain"]
    sys.exit(pytest.main(options, plugins=[Methods()]))
