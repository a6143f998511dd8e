"""The table of families: what is exact, what is refused and why, and the exit code."""

import json
import re
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from recipes.tools import family_table
from recipes.tools.family_table import Row, line_of_code, main, markdown
from sppo_hf.errors import ConfigError
from sppo_hf.testing.tiny_families import FAMILIES


def test_exact_and_refused_families_get_their_tables(tmp_path: Path) -> None:
    for path in (family_table.PAGE, family_table.LIST):
        (tmp_path / path).parent.mkdir(parents=True)
    assert main(["llama", "falcon", "t5", "--write", "--root", str(tmp_path)]) == 0
    text = (tmp_path / family_table.PAGE).read_text()
    assert "| llama | GQA | " in text
    assert "e-15 |" in text or "e-16 |" in text or "e-14 |" in text
    assert "| falcon | its attention bypasses" in text
    assert "| t5 | model type 't5' has no causal language model" in text
    listed = json.loads((tmp_path / family_table.LIST).read_text())["families"]
    assert [(row["name"], row["status"]) for row in listed] == [
        ("llama", "exact"),
        ("falcon", "refused"),
        ("t5", "refused"),
    ]


def test_rows_of_some_families_replace_theirs_and_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        family_table, "check_family", lambda name: Row(name, "", "exact", 1e-15, "", [name])
    )
    for path in (family_table.PAGE, family_table.LIST):
        (tmp_path / path).parent.mkdir(parents=True)
    mistral = Row("mistral", "window", "exact", 1e-15, "", ["mistral"])._asdict()
    falcon = Row("falcon", "an old row", "NOT EXACT", 1.0, "")._asdict()
    versions = {"transformers": transformers.__version__}
    known = json.dumps(versions | {"families": [mistral, falcon]})
    (tmp_path / family_table.LIST).write_text(known)
    assert main(["falcon", "llama", "--write", "--root", str(tmp_path)]) == 0
    listed = json.loads((tmp_path / family_table.LIST).read_text())["families"]
    assert [(row["name"], row["proved"]) for row in listed] == [
        ("llama", ["llama"]),
        ("mistral", ["mistral"]),
        ("falcon", ["falcon"]),
    ]
    (tmp_path / family_table.LIST).write_text(known.replace(transformers.__version__, "5.0.0"))
    with pytest.raises(ConfigError, match="made with Transformers 5\\.0\\.0"):
        main(["falcon", "--write", "--root", str(tmp_path)])


def test_conversion_tries_families_with_states_and_refused_ones() -> None:
    assert family_table._proved("gemma3", "exact") == ["gemma3", "gemma3_text"]
    assert family_table._proved("bamba", "exact") == []
    assert family_table._proved("falcon", "refused") == []


def test_a_family_that_is_not_exact_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        family_table, "check_family", lambda name: Row(name, "", "NOT EXACT", 1e-3, "")
    )
    assert main(["llama"]) == 1
    assert "| 1e-03 **NOT EXACT** |" in capsys.readouterr().out


def test_reasons_lose_the_remedy_and_keep_the_table_whole() -> None:
    reason = "XForCausalLM cannot be trained chunk by chunk: it is a|b. Train it without sppo_hf."
    assert family_table.short_reason(reason) == "it is a|b"
    assert markdown([Row("x", "", "refused", 0.0, "it is a|b")]).endswith("| x | it is a\\|b |\n")


def test_the_code_that_makes_a_family_impossible_is_there() -> None:
    present = [n for n in family_table.CODE if FAMILIES[n].model_type in CONFIG_MAPPING_NAMES]
    for name in present:
        assert re.search(r" \(modeling_\w+\.py, line \d+: `.+`\)$", line_of_code(name))
    assert line_of_code("llama") == ""


def test_unknown_families_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no_such_family"])
    assert "no_such_family" in capsys.readouterr().err
