"""Every language model of the installed Transformers: exact, refused, or not tried, and why.

Those of `tiny_families` are in test_exactness.py, with more settings.
"""

from collections import Counter

import pytest

from recipes.tools.census import TYPES, Outcome, census, with_images
from recipes.tools.family_table import images_markdown
from sppo_hf.testing.check import ImagesResult
from sppo_hf.testing.tiny_families import FAMILIES
from tests.sweeps import ALL, sample


def test_each_has_an_outcome_and_says_why() -> None:
    classifiers = ["llama ForSequenceClassification", "bert ForTokenClassification"]
    found = census(["llama", "rwkv", "whisper", *classifiers])
    assert {name: outcome.status for name, outcome in found.items()} == {
        "llama": "exact",
        classifiers[0]: "exact",
        classifiers[1]: "refused",
        "rwkv": "refused",
        "whisper": "not tried",
    }
    assert float(found["llama"][1]) < 1e-9
    assert "state" in found["rwkv"].detail
    assert not any(outcome.images for outcome in found.values())


@pytest.mark.filterwarnings("ignore")  # families warn at their first import
def test_types_that_take_images_are_tried_with_them() -> None:
    found = census(["llava", "gemma4-bidirectional", "paligemma", "mllama", "florence2"])
    page = images_markdown(with_images(found))
    rows = dict(line.strip("| ").split(" | ") for line in page.splitlines()[2:])
    assert rows[next(key for key in rows if "2 exact: worst error " in key)] == (
        "gemma4-bidirectional, llava"
    )
    assert rows["1 refused: on text, too"] == "paligemma"
    assert rows["1 not tried: has no encoder of images that is known"] == "mllama"
    assert rows["1 not tried: nor on text"] == "florence2"
    assert sum(int(key.split()[0]) for key in rows) == len(found)


def test_types_with_one_outcome_share_a_row() -> None:
    exact = {
        name: Outcome("exact", "", ImagesResult(status="exact", error=error))
        for name, error in (("b", 3e-14), ("a", 1e-15))
    }
    wrong = Outcome("not exact", "", ImagesResult(status="not exact", reason="in w", error=0.5))
    groups = with_images({**exact, "c": wrong, "text": Outcome("exact", "1e-15")})
    assert [(group["status"], group["types"]) for group in groups] == [
        ("exact", ["a", "b"]),
        ("not exact", ["c"]),
    ]
    assert "| 2 exact: worst error 3e-14 | a, b |" in images_markdown(groups)
    assert "| 1 not exact: worst error 5e-01 | c |" in images_markdown(groups)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # families warn at their first import
def test_every_other_type_is_exact_or_refused_or_not_tried() -> None:
    elsewhere = {family.model_type for family in FAMILIES.values()}
    found = census(sample([name for name in TYPES if name not in elsewhere], 30))
    counts = Counter(outcome.status for outcome in found.values())
    wrong = {name: outcome for name, outcome in found.items() if outcome.status == "not exact"}
    assert not wrong
    assert all(outcome.detail for outcome in found.values()), "whatever is not exact says why"
    assert counts["exact"] >= (40 if ALL else 1), counts
    images = Counter(outcome.images.status for outcome in found.values() if outcome.images)
    assert images["exact"] >= (25 if ALL else 0), images
