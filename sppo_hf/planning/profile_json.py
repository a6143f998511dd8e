"""HardwareProfile as JSON, in and out; what is wrong with a file is said by file and field.

The format is flat: one key per field of `HardwareProfile`, a curve as an object from tokens to its
rate, and `format`, the version of this layout. Knows nothing of where profiles are kept.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from sppo_hf.errors import ConfigError
from sppo_hf.planning.hardware import Curve, HardwareProfile
from sppo_hf.reading import parse_json
from sppo_hf.rules import show

PROFILE_FORMAT = 1
"""Version of the layout and of what its figures mean; a profile of another one is not used."""

_REMEDY = "Remedy: run `sppo calibrate` to write a new one, or mend the file after a shipped one."
_KINDS = ("cpu", "cuda")
# Wide around every machine, and narrow enough that no quotient of theirs overflows.
_LEAST_RATE, _MOST_RATE = 1e-12, 1e24
_RATES = f"a number above zero, {_LEAST_RATE:g} to {_MOST_RATE:g}"
_MOST_WHOLE = 2**63 - 1


def profile_to_dict(profile: HardwareProfile) -> dict[str, Any]:
    """The profile in plain JSON types; `profile_from_dict` takes them back unchanged."""
    data: dict[str, Any] = {"format": PROFILE_FORMAT}
    for field in dataclasses.fields(HardwareProfile):
        value = getattr(profile, field.name)
        if field.type == "dict[str, Curve]":
            curves = cast(Mapping[str, Curve], value)
            value = {
                dtype: {str(tokens): rate for tokens, rate in curve.points}
                for dtype, curve in curves.items()
            }
        data[field.name] = value
    return data


def profile_to_json(profile: HardwareProfile) -> str:
    """The profile as indented JSON text, ending in a newline."""
    return json.dumps(profile_to_dict(profile), indent=2) + "\n"


def profile_from_json(text: str, *, where: str) -> HardwareProfile:
    """Read a profile.

    Args:
        text: JSON as `profile_to_json` writes it.
        where: name of the file, for messages.

    Raises:
        ConfigError: it is not JSON, or as `profile_from_dict`.
    """
    try:
        data = parse_json(text)
    except ConfigError as error:
        raise ConfigError(f"{where} is not readable as JSON: {error}. {_REMEDY}") from error
    return profile_from_dict(data, where=where)


def profile_from_dict(data: object, *, where: str) -> HardwareProfile:
    """Make a profile of plain JSON types.

    Args:
        data: as `profile_to_dict` returns it.
        where: name of the file, for messages.

    Raises:
        ConfigError: another format version, an unknown or missing key, or a value that is not what
            its field holds. The message names the file, the field and the remedy.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where} holds no JSON object, but {show(data)}. {_REMEDY}")
    values = dict(cast(dict[str, object], data))
    version = values.pop("format", None)
    if version != PROFILE_FORMAT:
        raise ConfigError(
            f"{where}: format={show(version)}. Allowed: {PROFILE_FORMAT}, the one this version "
            f"of sppo_hf reads. {_REMEDY}"
        )
    fields = {field.name: field for field in dataclasses.fields(HardwareProfile)}
    for key, value in values.items():
        if key not in fields:
            nearest = difflib.get_close_matches(key[:100], fields, n=1, cutoff=0)[0]
            raise ConfigError(
                f"{where}: unknown field {show(key)} (value {show(value)}). Allowed: "
                f"{', '.join(fields)}. Remedy: use the nearest, {nearest!r}, or drop it."
            )
    checked: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            allowed, read = _READERS[str(field.type)]
            checked[name] = _read(where, name, values[name], allowed, read)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: the field {name!r} is missing. {_REMEDY}")
    if checked["kind"] not in _KINDS:
        raise _refusal(where, "kind", checked["kind"], " or ".join(map(repr, _KINDS)))
    return HardwareProfile(**checked)


def _read(
    where: str, name: str, value: object, allowed: str, read: Callable[[object], object]
) -> object:
    """`value` as its field holds it.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return read(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {name}: {error}") from error
    except (TypeError, ValueError) as error:
        raise _refusal(where, name, value, allowed) from error


def _refusal(where: str, name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{where}: {name}={show(value)}. Allowed: {allowed}. {_REMEDY}")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if not _LEAST_RATE <= value <= _MOST_RATE:
        raise ValueError
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    if not 0 <= value <= _MOST_WHOLE:
        raise ValueError
    return value


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError
    return cast(dict[str, object], value)


def _curves(value: object) -> dict[str, Curve]:
    curves = {
        dtype: Curve(
            tuple((_whole(int(tokens)), _rate(rate)) for tokens, rate in _mapping(points).items())
        )
        for dtype, points in _mapping(value).items()
    }
    if not curves:
        raise ValueError
    return curves


def _texts(value: object) -> dict[str, str]:
    return {key: _text(text) for key, text in _mapping(value).items()}


def _or_none(read: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: None if value is None else read(value)


# By a field's annotation: what is allowed, and how it is read.
_READERS: dict[str, tuple[str, Callable[[object], object]]] = {
    "str": ("a text", _text),
    "str | None": ("a text or null", _or_none(_text)),
    "bool": ("true or false", _flag),
    "float": (_RATES, _rate),
    "float | None": (f"{_RATES}, or null", _or_none(_rate)),
    "int | None": ("a whole number below 2**63, or null", _or_none(_whole)),
    "dict[str, Curve]": (
        'an object of curves by dtype, each from tokens to rate: {"bfloat16": {"1024": 4e14}}',
        _curves,
    ),
    "dict[str, str]": ("an object of texts", _texts),
}
