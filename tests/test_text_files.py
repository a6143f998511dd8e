"""Files that people write: what is read, and what is refused before it costs time or memory."""

import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ConfigError
from sppo_hf.text_files import MAX_SETTINGS_BYTES, parse_json, parse_yaml, read_text, to_yaml


def read(path: str | os.PathLike[str]) -> str:
    return read_text(path, what="settings file", max_bytes=1000, remedy="give another")


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("näme: 1\r\n", encoding="utf-8", newline="")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert read(tmp_path / "link") == "näme: 1\r\n"


def test_what_is_no_small_text_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 1001)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    wrong: dict[str | Path, str] = {
        tmp_path / "pipe": "pipe",
        "/dev/zero": "device",
        tmp_path: "folder",
        tmp_path / "large": "more than 1,000 bytes",
        tmp_path / "binary": "UTF-8",
        tmp_path / "absent": "No such file",
        "x" * 5000: "name too long",
        "a\0b": "null (byte|character)",
        "\ud800": "surrogates",
    }
    for path, reason in wrong.items():
        with pytest.raises(ConfigError, match=f"(?i)settings file .*{reason}.*Remedy") as caught:
            read(path)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("1_000", 1000),
        ("0x10", 16),
        ("-3", -3),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("1:30", "1:30"),
        ("2020-13-45", "2020-13-45"),
        ("2020-01-01", "2020-01-01"),
        ("yes", True),
        ("null", None),
        ("", None),
        ("80GiB", "80GiB"),
        ("&name 4", 4),
    ],
)
def test_yaml_is_read_as_people_mean_it(text: str, value: object) -> None:
    assert parse_yaml(text) == value


# "\x85" and its like end a line in YAML; PyYAML writes them so that it reads others back.
@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]))
    | st.floats(-1e9, 1e9)
)
def test_what_is_written_is_read_back(value: object) -> None:
    data = [value, "010", "1e3", "1:30", "2020-01-01", "=", "yes", 8]
    assert parse_yaml(to_yaml(data)) == data


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: !!int foo", "'foo' is no int"),
        ("a: !!int ''", "is no int"),
        ("a: !!float foo", "is no float"),
        ("a: !!bool foo", "is no bool"),
        ("a: !!timestamp foo", "is no timestamp"),
        ("a: !!timestamp 2020-13-45", "is no timestamp"),
        ("a: " + "9" * 5000, "is no int"),
        ("a: " + "[" * 5000, "more than 32 levels"),
        ("a: " + "{b: " * 5000, "more than 32 levels"),
        ("a: [&b [x], *b]", "aliases"),
        ("? [a]\n: b", "a name must be a text"),
        ("!!merge a: {b: c}", "a name must be a text"),
        ("a: 1\na: 2", "'a' is set twice"),
        ("a: !!python/name:os.system", "constructor"),
    ],
)
def test_every_error_of_yaml_names_its_line(text: str, reason: str) -> None:
    with pytest.raises(yaml.YAMLError, match=rf"(?s){reason}.*line \d+"):
        parse_yaml(text)


def test_yaml_takes_neither_long_nor_growing_texts() -> None:
    lines = ", ".join(f"&a{i} [{f'*a{i - 1}, ' * 9}]" for i in range(1, 40))
    start = time.monotonic()
    for text in (f"[&a0 x, {lines}]", "x" * (MAX_SETTINGS_BYTES + 1), "[" * MAX_SETTINGS_BYTES):
        with pytest.raises(yaml.YAMLError):
            parse_yaml(text)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("9" * 5000, "digits"),
        ("[" * 100_000, "more than 32 levels"),
        ('{"a":' * 33 + "1" + "}" * 33, "more than 32 levels"),
    ],
)
def test_json_is_refused_in_words(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_json(text)


def test_json_is_read() -> None:
    assert parse_json('{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}
    assert parse_json("[" * 32 + "]" * 32)
