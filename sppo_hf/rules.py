"""Checks of single settings, one rule per kind of value, and how values appear in messages.

A rule takes a setting's name and value and returns the value to store, or raises ConfigError with
what was seen, what is allowed and the remedy. Which setting has which rule is in `config.py`.
"""

import difflib
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import Literal, NoReturn, cast

from sppo_hf.errors import ConfigError
from sppo_hf.registry import Registry

Rule = Callable[[str, object], object]

_BYTES_PER_UNIT = {
    **{"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}
_BYTES_TEXT = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")
# Beyond every count of tokens, ranks, seconds or bytes, and within what torch and the system take.
_MAX_BYTES = 2**63 - 1
_MAX_COUNT = 2**31 - 1
# Longest path that Linux takes, in bytes.
_MAX_TEXT_BYTES = 4096
# A smaller integer is most likely a size whose unit was forgotten.
_MIN_BUDGET_BYTES = 1000
_BUDGET_FORMS = (
    'a size with a unit such as "80GiB" or "900MB", a whole number of bytes '
    f"(at least {_MIN_BUDGET_BYTES}, below 8 EiB), or a fraction above 0.0 and at most 1.0"
)


def parse_bytes(value: int | float | str, *, field: str, total_bytes: int | None) -> int:
    """Turn a budget as users write it into bytes.

    Args:
        value: "80GiB" (also B, KB, MB, GB, TB, KiB, MiB, TiB), a whole number of bytes, or a
            fraction of the tier as a float in (0, 1].
        field: name of the setting, for the message.
        total_bytes: size of the whole tier, for fractions; None if it is not known.

    Returns:
        Whole bytes, rounded down.

    Raises:
        ConfigError: the value is none of these, or is a fraction and `total_bytes` is None.
    """
    size = _read_budget(field, value)
    if isinstance(size, int):
        return size
    if total_bytes is None:
        refuse(
            field,
            value,
            allowed="a size in bytes here, because the size of the whole tier is not known",
            remedy='write a size with a unit, such as "80GiB"',
        )
    return int(size * total_bytes)


def format_bytes(size_bytes: int) -> str:
    """Write bytes with a binary unit and three digits: "512 B", "1.50 KiB", "12.3 GiB"."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 999.5 or unit == "TiB":
            break
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{decimals}f} {unit}"


def integer(minimum: int, word: Literal["auto"] | None) -> Rule:
    """Rule for a whole number of at least `minimum`, or else `word` ("auto" or None)."""
    allowed = (
        f"{'None (null in YAML)' if word is None else repr(word)} or a whole number >= {minimum}"
    )

    def rule(field: str, value: object) -> object:
        if value is word or (isinstance(value, str) and value == word):
            return value
        return _whole_number(field, value, minimum=minimum, allowed=allowed)

    return rule


def count(minimum: int) -> Rule:
    """Rule for a whole number of at least `minimum`, and nothing else."""
    return lambda field, value: _whole_number(
        field, value, minimum=minimum, allowed=f"a whole number >= {minimum}"
    )


def _whole_number(field: str, value: object, *, minimum: int, allowed: str) -> int:
    """Check one whole number; bool and digits in quotes are not numbers."""
    number = _as_int(value)
    if number is not None:
        if number > _MAX_COUNT:
            allowed += f" and <= {_MAX_COUNT:,}"
            refuse(field, number, allowed=allowed, remedy=f"use a smaller number, or drop {field}")
        if number >= minimum:
            return number
        refuse(field, number, allowed=allowed, remedy=f"use {minimum} or more, or drop {field}")
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,10}\s*", value):
        refuse(field, value, allowed=allowed, remedy=f"write {int(value)} without quotes")
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_COUNT:
        refuse(field, value, allowed=allowed, remedy=f"write {int(value)} without a point")
    if isinstance(value, str) and "'auto'" in allowed:
        refuse(field, value, allowed=allowed, remedy=nearest_remedy(value, ("auto",)))
    refuse(field, value, allowed=allowed, remedy=f"give a number, or drop {field}")


def _as_int(value: object) -> int | None:
    """Return an integer of any integer type as int; None for all else, and for bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def choice(*names: str) -> Rule:
    """Rule for one of the given words."""

    def rule(field: str, value: object) -> object:
        if isinstance(value, str) and value in names:
            return value
        allowed = "one of " + ", ".join(map(repr, names))
        refuse(field, value, allowed=allowed, remedy=nearest_remedy(value, names))

    return rule


def choice_of(registry: Registry[object]) -> Rule:
    """Rule for "auto" or a name that is in the registry when the value is checked."""
    return lambda field, value: choice("auto", *registry.names())(field, value)


def flag(field: str, value: object) -> object:
    """Rule for True or False; 0, 1 and "yes" are refused rather than guessed at."""
    if isinstance(value, bool):
        return value
    refuse(field, value, allowed="True or False", remedy="write true or false without quotes")


def text(field: str, value: object) -> object:
    """Rule for None or a text that is a possible path; path objects become text.

    The word "None" is refused: in a YAML file or an option it is a text, and would be a folder.
    """
    if value is None:
        return None
    if isinstance(value, str | PathLike):
        written = cast("str | bytes", fspath(cast("str | PathLike[str]", value)))
        if written in ("None", "none"):  # what a YAML file or an option was to say with it
            refuse(
                field,
                written,
                allowed="None (null in YAML, and in options), or a text other than that word",
                remedy=f"write null, or drop {field}; a file or folder of that name is ./{written}",
            )
        if isinstance(written, str) and _can_be_path(written):
            return written
    refuse(
        field,
        cast("object", value),
        allowed=f"None (null in YAML) or a text of at most {_MAX_TEXT_BYTES:,} bytes in UTF-8, "
        "neither blank nor with a NUL in it",
        remedy=f"give one, or drop {field}",
    )


def _can_be_path(written: str) -> bool:
    if len(written) > _MAX_TEXT_BYTES or "\0" in written or not written.strip():
        return False
    try:
        return len(written.encode()) <= _MAX_TEXT_BYTES
    except UnicodeEncodeError:
        return False


def whole_numbers(unit: str, *, instead: str = "") -> Rule:
    """Rule for None, or a list or tuple of whole numbers, each >= 1.

    Args:
        unit: what is counted, for messages, such as "tokens".
        instead: end of the remedy in messages, such as ", or use num_chunks".
    """
    allowed = f"None (null in YAML) or a list of whole numbers of {unit}, each >= 1"

    def check(field: str, value: object) -> object:
        if value is None:
            return None
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            remedy = f"write a list such as [512, 512]{instead}"
            refuse(field, value, allowed=allowed, remedy=remedy)
        items = cast(Sequence[object], value)
        if not items:
            refuse(field, items, allowed=allowed, remedy=f"list them, or drop {field}")
        each = f"a whole number of {unit} >= 1"
        return tuple(
            _whole_number(f"{field}[{index}]", item, minimum=1, allowed=each)
            for index, item in enumerate(items)
        )

    return check


def budget(field: str, value: object) -> object:
    """Rule for a memory budget; a size with a unit is kept as the user wrote it."""
    if value is None:
        return None
    size = _read_budget(field, value)
    return value if isinstance(value, str) else size


def read_budget(text: str) -> int | float | str:
    """Return a budget as settings take it: a number of bytes, a share, or a size with a unit."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _read_budget(field: str, value: object) -> int | float:
    """Return bytes as an int, or a fraction of the tier as a float in (0, 1]."""
    number = _as_int(value)
    if number is not None:
        if _MIN_BUDGET_BYTES <= number <= _MAX_BYTES:
            return number
        if number > _MAX_BYTES:
            refuse(field, number, allowed=_BUDGET_FORMS, remedy="use less, or 1.0 for all of it")
        remedy = f'if a unit was meant, write "{number}GiB"; for all of the tier write 1.0'
        refuse(field, value, allowed=_BUDGET_FORMS, remedy=remedy)
    if isinstance(value, float) and 0 < value <= 1:
        return float(value)
    if isinstance(value, str) and (match := _BYTES_TEXT.fullmatch(value)):
        unit = match[2].upper()
        if unit not in _BYTES_PER_UNIT:
            remedy = nearest_remedy(match[2], ("B", "KB", "MB", "GB", "TB", "MiB", "GiB", "TiB"))
            refuse(field, value, allowed=_BUDGET_FORMS, remedy=remedy)
        size_bytes = math.floor(float(match[1]) * _BYTES_PER_UNIT[unit])
        if _MIN_BUDGET_BYTES <= size_bytes <= _MAX_BYTES:
            return size_bytes
    remedy = 'write a size with its unit, such as "80GiB", or a fraction such as 0.9'
    refuse(field, value, allowed=_BUDGET_FORMS, remedy=remedy)


def refuse(field: str, value: object, *, allowed: str, remedy: str) -> NoReturn:
    """Raise ConfigError for a value that is not allowed."""
    raise ConfigError(f"{field} is {show_typed(value)}. Allowed: {allowed}. Remedy: {remedy}.")


def nearest_remedy(value: object, names: Sequence[str]) -> str:
    """Return a remedy that names the allowed word most similar to the given value."""
    by_folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(show(value).strip("'").casefold(), by_folded, n=1, cutoff=0.5)
    return f"use {by_folded[near[0]]!r}" if near else "choose one of those"


def show_typed(value: object) -> str:
    """Return a value and its type for a message, where "8" and 8 would look alike."""
    return "None" if value is None else f"{show(value)} ({type(value).__name__})"


def show(value: object) -> str:
    """Return the repr of a value, shortened to 80 characters; reads only part of large values."""
    text = _BRIEF.repr(value)
    return text if len(text) <= 80 else f"{text[:60]}…{text[-16:]}"


class _Brief(reprlib.Repr):
    """`repr` that stops early in nested, long or large values."""

    def __init__(self) -> None:
        super().__init__()
        # Above what `show` prints, so that short values are complete.
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 30
        self.maxstring = self.maxlong = self.maxother = 200

    def repr_str(self, x: str, level: int) -> str:
        """Return both ends of a text."""
        return repr(x if len(x) <= self.maxstring else f"{x[:100]}…{x[-100:]}")

    def repr_int(self, x: int, level: int) -> str:
        """Return the number, or the count of its digits where Python refuses to print it."""
        if abs(x) < 10**self.maxlong:
            return repr(x)
        return f"a number of about {round(x.bit_length() * math.log10(2)):,} digits"


_BRIEF = _Brief()
