"""Which requirements this Python lacks, as pyproject.toml has them.

    python recipes/benchmarks/lacking.py sppo-hf peft pytest

"sppo-hf" stands for what the package itself requires. Prints lines of two words, what was asked for
and what is missing: "sppo-hf psutil", "peft peft>=0.18". Needs nothing but the standard library and
`packaging`, which comes with Transformers.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def lacking(names: list[str]) -> Iterator[tuple[str, Requirement]]:
    """Yields what was asked for, and a requirement of it that is not there."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    optional = [text for extra in project["optional-dependencies"].values() for text in extra]
    known = {one.name: one for one in map(Requirement, optional)}
    own = [*map(Requirement, project["dependencies"])]
    for name in names:
        for wanted in own if name == project["name"] else [known.get(name, Requirement(name))]:
            try:
                there = wanted.specifier.contains(version(wanted.name), prereleases=True)
            except PackageNotFoundError:
                there = False
            if not there:
                yield name, wanted


if __name__ == "__main__":
    for asked, requirement in lacking(sys.argv[1:]):
        print(asked, str(requirement).replace(" ", ""))
