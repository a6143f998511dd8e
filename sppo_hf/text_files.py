"""Bounded reading of small text files: settings, model configurations, hardware profiles.

Any file is read or refused within a second and a few hundred megabytes of memory: only regular
files are opened, their size and nesting depth are limited, and YAML aliases, with which a few
hundred bytes can expand to gigabytes, are refused.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Hashable
from typing import Any, ClassVar, cast

import yaml

from sppo_hf.errors import ConfigError
from sppo_hf.rules import show

MAX_SETTINGS_BYTES = 128 * 2**10
"""Largest YAML file. A file with all settings has 3 KB; `chunk_lengths` of ten thousand chunks, one
a line, has 90 KB."""

MAX_JSON_BYTES = 4 * 2**20
"""Largest JSON file. The largest model configurations, which list every quantised layer, have 1
MB."""

_MAX_DEPTH = 32


def read_text(path: str | os.PathLike[str], *, what: str, max_bytes: int, remedy: str = "") -> str:
    """Read a whole file as UTF-8.

    Args:
        path: a regular file or a link to one; pipes and devices, which may never end, are refused.
        what: what the file should be, for the message, such as "settings file".
        max_bytes: largest file that is read.
        remedy: what to do about a file that cannot be read, for the message.

    Raises:
        ConfigError: the file is missing, unreadable, not regular, too large, or not UTF-8.
    """
    try:
        reason, data = _read_bytes(path, max_bytes)
        if data is not None:
            return data.decode("utf-8")
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = f"it is not a possible path ({error})"
    advice = f" Remedy: {remedy}." if remedy else ""
    raise ConfigError(f"The {what} {show(os.fspath(path))} cannot be read: {reason}.{advice}")


def _read_bytes(path: str | os.PathLike[str], max_bytes: int) -> tuple[str, bytes | None]:
    """Return the content, or None with the reason why the file was not read.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: the path contains a NUL or cannot be encoded.
    """
    # Before opening the file, because opening a pipe waits for its other end.
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        return "it is a folder", None
    if not stat.S_ISREG(mode):
        return "it is a pipe, a socket or a device, not a regular file", None
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        data = cast("bytes | None", file.read(max_bytes + 1))
    if data is None:
        return "reading it would wait for data", None
    if len(data) > max_bytes:
        return f"it has more than {max_bytes:,} bytes", None
    return "", data


def parse_json(text: str) -> object:
    """Read JSON; a repeated key keeps its last value.

    Raises:
        ConfigError: the text is not JSON, nests more than 32 levels, or has an integer of more
            digits than Python reads. The message is a clause without the file's name.
    """
    try:
        data: object = json.loads(text)
    except RecursionError:
        deep = True
    except ValueError as error:
        raise ConfigError(" ".join(str(error).split())) from error
    else:
        deep = _nests_deeper(data, _MAX_DEPTH)
    if deep:
        raise ConfigError(f"lists and objects nest more than {_MAX_DEPTH} levels")
    return data


def _nests_deeper(data: object, levels: int) -> bool:
    """Return whether lists and objects nest more than `levels` deep, without recursion."""
    level = [data]
    for _ in range(levels + 1):
        found: list[object] = []
        for item in level:
            if isinstance(item, dict):
                found += cast("dict[str, object]", item).values()
            elif isinstance(item, list):
                found += cast("list[object]", item)
        level = found
    return bool(level)


def parse_yaml(text: str) -> object:
    """Read YAML with numbers as in version 1.2, and without aliases or repeated keys.

    `010` is ten, and `1:30` and `2020-01-01` are texts, where version 1.1 reads 8, 90 and a date.

    Raises:
        yaml.YAMLError: the text is not YAML, is too long or too deep, or a value does not match its
            tag. The message names line and column.
    """
    if len(text) > MAX_SETTINGS_BYTES:
        raise yaml.YAMLError(f"it has more than {MAX_SETTINGS_BYTES:,} characters")
    return yaml.load(text, Loader=_Loader)


def to_yaml(data: object) -> str:
    """Return YAML that `parse_yaml` reads back unchanged."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False)
    return text


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses arbitrary objects, aliases and repeated keys with a YAMLError."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node; refuse aliases and deep nesting before objects are built."""
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            _fail("aliases (*name) are not read; write the value out", event)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            _fail(f"lists and mappings nest more than {_MAX_DEPTH} levels", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; report one that does not match its tag with its line."""
        try:
            return super().construct_object(node, deep=deep)
        except yaml.YAMLError:
            raise
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
            name = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                None, None, f"{show(node.value)} is no {name}", node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping of names; refuse merges and repeated names."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                _fail("a name must be a text", key)
            if key.value in seen:
                _fail(f"{show(key.value)} is set twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes texts which either version of YAML reads as another type."""


def _fail(problem: str, at: Any) -> None:
    raise yaml.MarkedYAMLError(None, None, problem, at.start_mark)


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 16 if "x" in text else 10)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node))
    # Python spells these words without the point.
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (
        r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        "yYnNtTfFoO",
    ),
    "int": (r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        "-+.0123456789",
    ),
}
for _name, (_pattern, _first) in _SCALARS.items():
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}",
            re.compile(f"(?:{_pattern})\\Z"),
            ["" if character == "\0" else character for character in _first],
        )
_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
