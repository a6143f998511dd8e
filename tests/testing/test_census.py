"""Every language model of the installed Transformers: exact, refused, or not tried, and why.

Those of `tiny_families` are in test_exactness.py, with more settings.
"""

from collections import Counter

import pytest

from recipes.tools.census import TYPES, census
from sppo_hf.testing.tiny_families import FAMILIES
from tests.sweeps import ALL, sample


def test_each_has_an_outcome_and_says_why() -> None:
    classifiers = ["llama ForSequenceClassification", "bert ForTokenClassification"]
    found = census(["llama", "rwkv", "whisper", *classifiers])
    assert {name: status for name, (status, _) in found.items()} == {
        "llama": "exact",
        classifiers[0]: "exact",
        classifiers[1]: "refused",
        "rwkv": "refused",
        "whisper": "not tried",
    }
    assert float(found["llama"][1]) < 1e-9
    assert "state" in found["rwkv"][1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # families warn at their first import
def test_every_other_type_is_exact_or_refused_or_not_tried() -> None:
    elsewhere = {family.model_type for family in FAMILIES.values()}
    found = census(sample([name for name in TYPES if name not in elsewhere], 18))
    counts = Counter(status for status, _ in found.values())
    wrong = {name: found[name] for name in found if found[name][0] == "not exact"}
    assert not wrong
    assert all(detail for _, detail in found.values()), "whatever is not exact says why"
    assert counts["exact"] >= (40 if ALL else 2), counts
