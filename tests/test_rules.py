"""Budgets as people write them, turned into bytes."""

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.rules import integer, parse_bytes


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


@pytest.mark.parametrize("value", ["", "GiB", "1e3GiB", "9" * 400 + "GiB", "0.1KB", 999, 2.0, True])
def test_what_is_no_budget(value: int | float | str) -> None:
    with pytest.raises(ConfigError, match=r"host_memory is .* Allowed: a size with a unit"):
        parse_bytes(value, field="host_memory", total_bytes=10**12)


def test_long_values_are_shortened_in_messages() -> None:
    with pytest.raises(ConfigError) as caught:
        integer(1, "auto")("num_chunks", "x" * 10_000)
    assert len(str(caught.value)) < 300
