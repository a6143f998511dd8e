"""SPPOConfig: what it takes, what it refuses and how it says so, and that files bring it back."""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.config import SPPOConfig, field_help
from sppo_hf.errors import ConfigError, SPPOError
from sppo_hf.registry import ATTENTION_BACKENDS, OFFLOAD_POLICIES

CUTS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"num_chunks": st.integers(1, 10**6)}),
    st.fixed_dictionaries({"chunk_lengths": st.lists(st.integers(1, 10**6), min_size=1)}),
    st.fixed_dictionaries({"chunk_tokens": st.integers(1, 10**7)}),
)
BUDGETS = st.one_of(
    st.none(),
    st.integers(1000, 2**50),
    st.floats(0, 1, exclude_min=True),
    st.builds("{}{}".format, st.integers(1, 999), st.sampled_from(["KB", "MiB", "GiB", " TB"])),
)
OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "offload": st.sampled_from(["auto", *OFFLOAD_POLICIES.names()]),
        "recompute": st.sampled_from(["auto", "none", "full"]),
        "attention_backend": st.sampled_from(["auto", *ATTENTION_BACKENDS.names()]),
        "micro_batch_size": st.none() | st.integers(1, 64),
        "device_memory": BUDGETS,
        "host_memory": BUDGETS,
        "use_pin_memory": st.booleans(),
        "use_streams": st.booleans(),
        "min_offload_size": st.integers(0, 2**30),
        "loss_tile_tokens": st.just("auto") | st.integers(1, 2**20),
        "return_logits": st.booleans(),
        "show_plan": st.booleans(),
        "show_progress": st.booleans(),
        "log_metrics": st.booleans(),
    },
)


@given(cut=CUTS, others=OTHERS)
def test_round_trips_through_dict_json_and_yaml(
    tmp_path_factory: pytest.TempPathFactory, cut: dict[str, Any], others: dict[str, Any]
) -> None:
    config = SPPOConfig.from_dict(cut | others)
    assert SPPOConfig.from_dict(config.to_dict()) == config
    assert SPPOConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    config.to_yaml(path)
    assert SPPOConfig.from_yaml(path) == config
    assert pickle.loads(pickle.dumps(config)) == config
    for name, value in (cut | others).items():
        assert config.to_dict()[name] == value


def test_is_frozen_and_hashable() -> None:
    config = SPPOConfig(chunk_lengths=[3, 4])  # pyright: ignore[reportArgumentType]
    assert config.chunk_lengths == (3, 4)
    assert hash(config) == hash(SPPOConfig(chunk_lengths=(3, 4)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_chunks = 3  # pyright: ignore[reportAttributeAccessIssue]


def refused(settings: Any) -> str:
    """Return the message with which these settings are refused."""
    with pytest.raises(ConfigError) as caught:
        SPPOConfig.from_dict(settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("num_chunks", "8", ["'8' (str)", "'auto' or a whole number >= 1", "8 without quotes"]),
        ("num_chunks", True, ["True (bool)", "whole number"]),
        ("num_chunks", 0, ["0 (int)", ">= 1", "use 1 or more"]),
        ("num_chunks", -3, ["-3 (int)"]),
        ("num_chunks", 8.0, ["8.0 (float)", "8 without a point"]),
        ("num_chunks", float("nan"), ["nan (float)"]),
        ("num_chunks", None, ["num_chunks is None", "'auto'"]),
        ("num_chunks", "Auto", ["'Auto'", "use 'auto'"]),
        ("chunk_tokens", 0, ["0 (int)"]),
        ("chunk_tokens", "auto", ["'auto' (str)", "None (null in YAML)"]),
        ("chunk_lengths", [4, 0, 4], ["chunk_lengths[1]", "0 (int)", "tokens >= 1"]),
        ("chunk_lengths", [4, True], ["chunk_lengths[1]", "True (bool)"]),
        ("chunk_lengths", ["4"], ["chunk_lengths[0]", "4 without quotes"]),
        ("chunk_lengths", [], ["[] (list)", "list them"]),
        ("chunk_lengths", 512, ["512 (int)", "[512, 512]"]),
        ("chunk_lengths", "512,512", ["'512,512' (str)", "[512, 512]"]),
        ("chunk_lengths", b"ab", ["b'ab' (bytes)"]),
        ("partition", "flop", ["'flop'", "'flops', 'even'", "use 'flops'"]),
        ("partition", 1, ["1 (int)", "'flops', 'even'"]),
        ("offload", "Full", ["'Full'", "use 'full'"]),
        ("offload", False, ["False (bool)", "'auto', 'none', 'full'"]),
        ("recompute", "zzz", ["'zzz'", "choose one of those"]),
        ("attention_backend", "flash_atention_2", ["use 'flash_attention_2'", "'reference'"]),
        ("micro_batch_size", 0, [">= 1"]),
        ("device_memory", 80, ["80 (int)", '"80GiB"', "1.0"]),
        ("device_memory", 1.5, ["1.5 (float)", "fraction"]),
        ("device_memory", 0.0, ["0.0 (float)"]),
        ("device_memory", True, ["True (bool)"]),
        ("device_memory", "80", ["'80' (str)", "unit"]),
        ("device_memory", "80 GiBs", ["use 'GiB'"]),
        ("device_memory", "-1GiB", ["'-1GiB'"]),
        ("host_memory", float("inf"), ["inf (float)"]),
        ("host_memory", [1], ["[1] (list)"]),
        ("use_pin_memory", 1, ["1 (int)", "True or False"]),
        ("use_streams", "yes", ["'yes' (str)", "True or False"]),
        ("min_offload_size", -1, [">= 0"]),
        ("loss_tile_tokens", 0, ["'auto' or a whole number >= 1"]),
        ("return_logits", None, ["None", "True or False"]),
    ],
)
def test_wrong_value_names_field_value_allowed_and_remedy(
    field: str, value: object, parts: list[str]
) -> None:
    message = refused({field: value})
    assert message.startswith(field)
    for part in [*parts, "Allowed: ", "Remedy: "]:
        assert part in message


@pytest.mark.parametrize(
    "settings",
    [
        {"num_chunks": 2, "chunk_tokens": 512},
        {"num_chunks": 2, "chunk_lengths": [5, 5]},
        {"chunk_lengths": [5, 5], "chunk_tokens": 5},
    ],
)
def test_two_ways_to_cut_contradict(settings: dict[str, Any]) -> None:
    message = refused(settings)
    for name in settings:
        assert f"{name}=" in message
    assert "at most one of num_chunks, chunk_lengths, chunk_tokens" in message


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"pp_size": 2, "pp_layers": [3, 3, 2]}, ["3 numbers", "makes 2 stages"]),
        ({"pp_layers": [4, 4]}, ["pp_layers=", "pp_size=1 makes none"]),
        ({"pp_size": 2, "pp_layers": [4, 0]}, ["pp_layers[1]", "a whole number of layers >= 1"]),
    ],
)
def test_layers_of_stages_must_fit(settings: dict[str, Any], parts: list[str]) -> None:
    message = refused(settings)
    for part in [*parts, "Allowed: ", "Remedy: "]:
        assert part in message
    assert SPPOConfig(pp_size=2, pp_layers=[5, 3]).to_dict()["pp_layers"] == [5, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"pp_size": 1}, ["pp_msp='on'", "pp_size=1 makes none"]),
        ({"pp_size": 2, "pp_schedule": "seq1f1b"}, ["pp_schedule='seq1f1b'", "order of its own"]),
        ({"pp_size": 2, "sp_size": 2}, ["sp_size=2", "sp_size=1 with pp_msp='on'"]),
        ({"pp_size": 4, "num_chunks": 3}, ["num_chunks=3", "fewer than pp_size=4"]),
        ({"pp_size": 3, "chunk_lengths": [5, 5]}, ["chunk_lengths=(5, 5)", "2 are fewer"]),
    ],
)
def test_shared_units_need_a_pipeline_of_their_own(
    settings: dict[str, Any], parts: list[str]
) -> None:
    message = refused({"pp_msp": "on", **settings})
    for part in [*parts, "Allowed: ", "Remedy: "]:
        assert part in message
    SPPOConfig(pp_size=4, num_chunks=4, pp_msp="on")
    # As YAML reads it.
    assert SPPOConfig(pp_size=4, pp_msp=True).pp_msp == "on"  # type: ignore[arg-type]
    SPPOConfig(**{**settings, "pp_msp": "off"})


def test_machines_are_crossed_by_sequences_that_ranks_share() -> None:
    message = refused({"sp_across_nodes": True})
    for part in ["sp_across_nodes=True", "sp_size=1 shares none", "Allowed: ", "Remedy: "]:
        assert part in message
    SPPOConfig(sp_size=2, sp_across_nodes=True)


def test_even_partition_contradicts_uneven_lengths() -> None:
    message = refused({"partition": "even", "chunk_lengths": [5, 9]})
    assert "partition='even'" in message
    assert "num_chunks=2" in message
    assert SPPOConfig(partition="even", chunk_lengths=(5, 6)).chunk_lengths == (5, 6)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("chunk_lenghts", "chunk_lengths"),
        ("numchunks", "num_chunks"),
        ("backend", "attention_backend"),
        ("pin_memory", "use_pin_memory"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    message = refused({key: 7})
    assert repr(key) in message
    assert "value 7" in message
    assert f"nearest valid key, {nearest!r}" in message
    assert "Valid keys: num_chunks, " in message


@pytest.mark.parametrize("settings", [[1, 2], "num_chunks", 3])
def test_settings_that_are_no_mapping(settings: object) -> None:
    assert "mapping of names to values" in refused(settings)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("num_chunk: 4\n", ["'num_chunk'", "'num_chunks'"]),
        ("num_chunks: '4'\n", ["4 without quotes"]),
        ("- num_chunks\n- 4\n", ["(list)", "mapping"]),
        ("just words\n", ["(str)", "mapping"]),
        ("num_chunks: [4\n", ["not readable as YAML", "line 2"]),
        ("num_chunks: 4\nnum_chunks: 5\n", ["'num_chunks' is set twice", "line 2"]),
        ("yes: 4\n", ["Unknown setting True"]),
        ("[a, b]: 4\n", ["not readable as YAML"]),
        ("offload: no\n", ["offload is False (bool)", "'none'"]),
        ("!!python/object:os.system {}\n", ["not readable as YAML"]),
    ],
)
def test_bad_yaml_names_the_file_and_the_fault(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        SPPOConfig.from_yaml(path)
    for part in [str(path), "Remedy: ", *parts]:
        assert part in str(caught.value)


def test_yaml_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00num")
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            SPPOConfig.from_yaml(path)


def test_empty_yaml_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing set\n")
    assert SPPOConfig.from_yaml(path) == SPPOConfig()


def test_written_yaml_is_plain(tmp_path: Path) -> None:
    SPPOConfig(chunk_lengths=(3, 4), host_memory="2GiB").to_yaml(tmp_path / "plain.yaml")
    read = yaml.safe_load((tmp_path / "plain.yaml").read_text())
    assert read["chunk_lengths"] == [3, 4]
    assert read["host_memory"] == "2GiB"
    assert list(read) == [field.name for field in dataclasses.fields(SPPOConfig)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"order": "by_layer", "pp_size": 2},
            "order='by_layer' contradicts pp_size=2: a stage must pass a chunk on before",
        ),
        (
            {"disk_memory": "1TiB"},
            "disk_memory='1TiB' is a budget in offload_dir, which is not set",
        ),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_together(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SPPOConfig(**settings)
    for part in (said, "Allowed: ", "Remedy: "):
        assert part in str(caught.value)


def test_replace_checks_anew() -> None:
    config = SPPOConfig(num_chunks=4)
    assert config.replace(num_chunks="auto", chunk_tokens=9).chunk_tokens == 9
    assert config.num_chunks == 4
    with pytest.raises(ConfigError, match="contradict"):
        config.replace(chunk_tokens=9)
    with pytest.raises(ConfigError, match="nearest valid key, 'chunk_tokens'"):
        config.replace(chunk_token=9)


def test_every_field_has_one_help_text() -> None:
    helps = [field_help(field.name) for field in dataclasses.fields(SPPOConfig)]
    assert len(set(helps)) == len(helps)
    assert all(text.endswith(".") and len(text) > 20 for text in helps)
    assert "same work" in field_help("partition")
    with pytest.raises(ConfigError, match="'num_chunks'"):
        field_help("num_chunk")


def test_config_error_is_also_a_value_error() -> None:
    assert issubclass(ConfigError, SPPOError)
    assert issubclass(ConfigError, ValueError)
