"""Budgets as people write them, turned into bytes."""

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.rules import integer, parse_bytes, show, text


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("900MB", 900_000_000),
        ("2 TB", 2 * 10**12),
        ("4096B", 4096),
        (123_456, 123_456),
        (0.5, 500_000),
        (1.0, 1_000_000),
    ],
)
def test_parse_bytes(value: int | float | str, size_bytes: int) -> None:
    assert parse_bytes(value, field="device_memory", total_bytes=1_000_000) == size_bytes


def test_fraction_of_an_unknown_tier_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host_memory is 0\.5.*not known.*Remedy"):
        parse_bytes(0.5, field="host_memory", total_bytes=None)


@pytest.mark.parametrize(
    "value",
    [
        *("", "GiB", "1e3GiB", "9" * 400 + "GiB", "9" * 18 + "TiB", "0.1KB"),
        *(999, 2.0, True, 2**63, 10**4000),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_budget(value: int | float | str) -> None:
    with pytest.raises(ConfigError, match=r"host_memory is .* Allowed: a size with a unit"):
        parse_bytes(value, field="host_memory", total_bytes=10**12)


@pytest.mark.parametrize("word", ["None", "none"])
def test_the_word_none_is_no_folder(word: str) -> None:
    with pytest.raises(ConfigError, match=f"offload_dir is '{word}'.*write null.*./{word}"):
        text("offload_dir", word)
    assert text("offload_dir", f"./{word}") == f"./{word}"


def test_long_values_are_shortened_in_messages() -> None:
    with pytest.raises(ConfigError) as caught:
        integer(1, "auto")("num_chunks", "x" * 10_000)
    assert len(str(caught.value)) < 300


class Endless(list[object]):
    """A list that is never walked to its end."""

    def __iter__(self):
        yield from range(1000)
        raise AssertionError("more was looked at than is shown")


def test_only_the_beginning_of_a_value_is_looked_at() -> None:
    bomb: list[object] = ["x"] * 10
    for _ in range(40):
        bomb = [bomb] * 10
    assert len(show(bomb)) <= 80
    assert len(show(Endless([0] * 10**6))) <= 80
    assert show(10**5000) == "a number of about 5,000 digits"
    assert show([1, "a", {"b": 2.5}]) == "[1, 'a', {'b': 2.5}]"
    assert show("a" * 100) == f"'{'a' * 59}…{'a' * 15}'"


@pytest.mark.parametrize(
    "value",
    ["", " ", "\t\n", "a\0b", "\ud800", "x" * 4097, "é" * 2049, b"a", 5],
    ids=lambda value: ascii(value)[:20],
)
def test_what_is_no_path(value: object) -> None:
    with pytest.raises(ConfigError, match=r"offload_dir is .* Allowed: None.*NUL.*Remedy"):
        text("offload_dir", value)


@pytest.mark.parametrize(
    "value", [2**31, 10**4000, "9" * 5000, 1e300], ids=lambda value: repr(value)[:20]
)
def test_whole_numbers_have_an_end(value: object) -> None:
    with pytest.raises(ConfigError, match=r"num_chunks is .* Allowed: .*Remedy") as caught:
        integer(1, "auto")("num_chunks", value)
    assert len(str(caught.value)) < 300
    assert integer(1, "auto")("num_chunks", 2**31 - 1) == 2**31 - 1
