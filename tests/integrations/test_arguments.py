"""SPPOArguments: one option per setting, read as in YAML, on top of a file."""

from dataclasses import fields
from pathlib import Path

import pytest
from transformers import HfArgumentParser, TrainingArguments

from sppo_hf import ConfigError, SPPOArguments, SPPOConfig, SPPOPlugin
from sppo_hf.config import field_help


def _parse(*words: str) -> SPPOArguments:
    (arguments,) = HfArgumentParser(SPPOArguments).parse_args_into_dataclasses(list(words))
    return arguments


def test_every_setting_is_an_option_with_its_own_help():
    options = {field.name: field for field in fields(SPPOArguments)}
    for field in fields(SPPOConfig):
        assert options.pop(f"sppo_{field.name}").metadata["help"] == field_help(field.name)
    assert set(options) == {"sppo_config"}


def test_the_help_page_can_be_printed(capsys):
    # argparse formats help with %, so a stray one in a setting's help would raise here.
    with pytest.raises(SystemExit):
        _parse("--help")
    assert "--sppo_num_chunks" in capsys.readouterr().out


def test_no_options_mean_defaults():
    assert _parse().to_config() == SPPOConfig()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--sppo_num_chunks", "8"], "num_chunks", 8),
        (["--sppo_num_chunks", "auto"], "num_chunks", "auto"),
        (["--sppo_chunk_lengths", "3,5"], "chunk_lengths", (3, 5)),
        (["--sppo_chunk_lengths", "[3, 5]"], "chunk_lengths", (3, 5)),
        (["--sppo_chunk_lengths", "7"], "chunk_lengths", (7,)),
        (["--sppo_chunk_lengths", "null"], "chunk_lengths", None),
        (["--sppo_device_memory", "80GiB"], "device_memory", "80GiB"),
        (["--sppo_device_memory", "0.9"], "device_memory", 0.9),
        (["--sppo_use_streams", "false"], "use_streams", False),
        (["--sppo_offload=none"], "offload", "none"),
    ],
)
def test_values_are_read_as_in_yaml(words, name, value):
    assert getattr(_parse(*words).to_config(), name) == value


def test_options_override_the_file(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("num_chunks: 4\noffload: none\n")
    config = _parse("--sppo_config", str(file), "--sppo_num_chunks", "8").to_config()
    assert (config.num_chunks, config.offload) == (8, "none")


def test_an_option_can_clear_what_the_file_says(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("chunk_tokens: 512\n")
    words = ["--sppo_config", str(file), "--sppo_chunk_tokens", "null", "--sppo_num_chunks", "8"]
    assert _parse(*words).to_config().num_chunks == 8


def test_a_wrong_value_names_the_option():
    with pytest.raises(ConfigError, match=r"--sppo_offload.*disk"):
        _parse("--sppo_offload", "disk").to_config()
    with pytest.raises(ConfigError, match="--sppo_num_chunks"):
        _parse("--sppo_num_chunks", "[1").to_config()


def test_arguments_make_a_plugin_beside_training_arguments(tmp_path: Path):
    parser = HfArgumentParser((TrainingArguments, SPPOArguments))
    _, ours = parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--sppo_num_chunks", "8"]
    )
    assert ours.to_plugin() == SPPOPlugin(num_chunks=8)
