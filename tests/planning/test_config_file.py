"""Reading a `config.json`: as attributes, nested configs too, and errors that name the file."""

import json
from pathlib import Path

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.planning.config_file import load_config


def test_a_folder_and_a_file_say_the_same(tmp_path: Path) -> None:
    fields = {"model_type": "llama", "rope_scaling": {"factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config(tmp_path)
    assert config == load_config(tmp_path / "config.json")
    assert config.model_type == "llama"
    assert config.rope_scaling == {"factor": 8.0}


def test_the_language_model_within_a_multimodal_one(tmp_path: Path) -> None:
    fields = {"model_type": "gemma3", "text_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_config(tmp_path).text_config.hidden_size == 8


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ("[]", "list"), (None, "read")])
def test_files_that_are_no_config(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said) as raised:
        load_config(tmp_path)
    assert "config.json" in str(raised.value)
