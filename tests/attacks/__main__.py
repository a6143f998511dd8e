"""`python -m tests.attacks [AREA …] --count N --seed S`: the table, and every defect."""

import argparse
import importlib
import sys

from tests.attacks.outcomes import DEFECTS, attempt_all, table
from tests.attacks.test_attacks import AREAS


def main() -> int:
    """Try all areas that are named (all, if none is); 1 if anything is a defect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", help=f"any of {', '.join(AREAS)}")
    parser.add_argument("--count", type=int, default=200, help="cases of each area")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    unknown = set(options.areas) - set(AREAS)
    if unknown:
        parser.error(f"no area {', '.join(sorted(unknown))}; there are {', '.join(AREAS)}")
    tried = {}
    for area in options.areas or AREAS:
        module = importlib.import_module(f"tests.attacks.{area}")
        tried[area] = attempt_all(module.cases(options.count, options.seed))
    print(table(tried))
    defects = [a for attempts in tried.values() for a in attempts if a.outcome in DEFECTS]
    for defect in defects:
        print(f"{defect.outcome.value}: {defect.name}\n    {defect.seen}")
    return bool(defects)


if __name__ == "__main__":
    sys.exit(main())
