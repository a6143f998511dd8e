"""Reads the small text files that people write: settings, model configurations, hardware profiles.

Whatever a file holds, it is refused or read within a second and a few hundred megabytes: only
regular files are opened, their bytes and the depth of what they hold are bounded, and YAML has no
aliases, with which a few hundred bytes can stand for gigabytes. This file knows no setting and no
format beyond YAML and JSON.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Hashable
from typing import IO, Any, ClassVar, cast

import yaml

from sppo_hf.errors import ConfigError
from sppo_hf.rules import show

MAX_SETTINGS_BYTES = 128 * 2**10
"""Of a YAML text. A file with every setting takes three kilobytes; `chunk_lengths` of ten thousand
chunks, one a line, take ninety."""

MAX_JSON_BYTES = 4 * 2**20
"""Of a JSON text. The largest model configurations, which name every quantised layer, take one."""

_MOST_DEPTH = 32


def read_text(path: str | os.PathLike[str], *, what: str, max_bytes: int, remedy: str = "") -> str:
    """Read a whole file as UTF-8.

    Args:
        path: Of a regular file, or of a link to one. Nothing else is opened: a pipe or a device may
            never end.
        what: What the file should be, for the message: "settings file".
        max_bytes: Largest file that is read.
        remedy: What to do about a file that cannot be read.

    Raises:
        ConfigError: There is no such file, it cannot be read, it is no regular file, it is larger,
            or it is not UTF-8 text.
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
        reason = f"the path is none ({error})"
    said = f" Remedy: {remedy}." if remedy else ""
    raise ConfigError(f"The {what} {show(os.fspath(path))} cannot be read: {reason}.{said}")


def _read_bytes(path: str | os.PathLike[str], max_bytes: int) -> tuple[str, bytes | None]:
    """Return why nothing is read, or what is.

    Raises:
        OSError: The file cannot be opened or read.
        ValueError: The path cannot be one: it holds a NUL, or cannot be encoded.
    """
    # Looked at before it is opened, as opening a pipe waits for its other end.
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
        ConfigError: It is not JSON, nests more than 32 levels, or holds an integer of more digits
            than Python reads. The message is a clause without the file's name.
    """
    try:
        data: object = json.loads(text)
    except RecursionError:
        deep = True
    except ValueError as error:
        raise ConfigError(" ".join(str(error).split())) from error
    else:
        deep = _nests_deeper(data, _MOST_DEPTH)
    if deep:
        raise ConfigError(f"lists and objects nest more than {_MOST_DEPTH} levels")
    return data


def _nests_deeper(data: object, levels: int) -> bool:
    """Whether lists and objects nest deeper; looks one level at a time, without recursion."""
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
    """Read YAML as people mean it: numbers as in version 1.2, no aliases, no key twice.

    `010` is ten and `1:30` and `2020-01-01` are texts, where version 1.1 has 8, 90 and a date.

    Raises:
        yaml.YAMLError: It is not YAML, is too long or too deep, or a value is not what its tag
            says. The message names line and column.
    """
    if len(text) > MAX_SETTINGS_BYTES:
        raise yaml.YAMLError(f"it has more than {MAX_SETTINGS_BYTES:,} characters")
    return yaml.load(text, Loader=_Loader)


def write_yaml(data: object, file: IO[str]) -> None:
    """Write what `parse_yaml` reads back as it was."""
    yaml.dump(data, file, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """YAML without arbitrary objects, aliases, keys that are written twice or raw errors."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node, refusing aliases and depth before anything is built of them."""
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            _fail("aliases (*name) are not read; write the value out", event)
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            _fail(f"lists and mappings nest more than {_MOST_DEPTH} levels", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; one that is not what its tag says is an error with its line."""
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
        """Build a mapping of names, refusing merges and a name that is written twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                _fail("a name must be a text", key)
            if key.value in seen:
                _fail(f"{show(key.value)} is set twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that either version of YAML takes for something else."""


def _fail(problem: str, at: Any) -> None:
    raise yaml.MarkedYAMLError(None, None, problem, at.start_mark)


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 16 if "x" in text else 10)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node))
    # Only these words begin with a point, where Python writes none.
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_PLAIN = {
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
for _name, (_pattern, _first) in _PLAIN.items():
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}",
            re.compile(f"(?:{_pattern})\\Z"),
            ["" if character == "\0" else character for character in _first],
        )
_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
