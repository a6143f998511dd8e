"""The table of checkpoints: sizes written by hand add up, and what ships is what is planned."""

import json
import re

import pytest

from recipes.tools.checkpoint_table import CONFIGS, table
from recipes.tools.family_table import LONGEST, PAGE, ROOT, checkpoints_markdown

SHIPPED = json.loads((ROOT / LONGEST).read_text(encoding="utf-8"))["checkpoints"]


def test_sizes_add_up_to_what_the_name_says() -> None:
    assert {row["name"] for row in SHIPPED} == set(json.loads(CONFIGS.read_text(encoding="utf-8")))
    for row in SHIPPED:
        said = re.search(r"-(\d+(?:\.\d+)?)([BbM])\b", row["name"])
        if said is not None:
            size = float(said[1]) * (1e6 if said[2] == "M" else 1e9)
            # Names are rounded: Llama-3.2-1B has 1.24B.
            assert row["parameters"] == pytest.approx(size, rel=0.25), row["name"]
    # Weights of more than 80 GB rest on the host.
    assert all(row["longest_tokens"] for row in SHIPPED)


def test_the_shipped_table_and_the_page_are_what_the_planner_says_now() -> None:
    found = table(["gpt-oss-20b"])
    (row,) = (row for row in SHIPPED if row["name"] == "openai/gpt-oss-20b")
    assert found["checkpoints"] == [row], (
        "make it anew: python recipes/tools/checkpoint_table.py --write"
    )
    assert checkpoints_markdown(found).splitlines()[-1] in (ROOT / PAGE).read_text(encoding="utf-8")
