"""Prints which requirements of pyproject.toml this Python lacks.

    python recipes/benchmarks/lacking.py sppo-hf peft pytest

"sppo-hf" stands for the package's own requirements. Each line has the requested name and what is
missing: "sppo-hf psutil", "peft peft>=0.18". Needs only the standard library and `packaging`, which
comes with Transformers.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def lacking(names: list[str]) -> Iterator[tuple[str, Requirement]]:
    """Yield each requested name with a requirement of it that is not installed."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    optional = [text for extra in project["optional-dependencies"].values() for text in extra]
    known = {one.name: one for one in map(Requirement, optional)}
    own = [*map(Requirement, project["dependencies"])]
    for name in names:
        for wanted in own if name == project["name"] else [known.get(name, Requirement(name))]:
            try:
                is_installed = wanted.specifier.contains(version(wanted.name), prereleases=True)
            except PackageNotFoundError:
                is_installed = False
            if not is_installed:
                yield name, wanted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="distributions, sppo-hf for what it requires")
    for name, requirement in lacking(parser.parse_args().names):
        print(name, str(requirement).replace(" ", ""))
