"""HardwareProfile: speeds and memory sizes of a machine, as JSON, and how one is found.

Rates are per second and per device; curves give a rate by the tokens of a chunk, because small
chunks are slower. In JSON a profile has one key per field (a curve is an object from tokens to
rate) and `format`, the version of this layout.

Profiles are searched in this order: measured by `sppo calibrate` and stored under the Hugging Face
cache, one file per device name and versions; shipped with the package (`planning/profiles/`), from
public figures or in part measured; shares of the figures in a datasheet (`DATASHEETS`); rough
guesses. All but the first are marked as estimates.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

from sppo_hf.errors import ConfigError
from sppo_hf.planning.json_store import cache_path, write_atomically
from sppo_hf.rules import show
from sppo_hf.text_files import parse_json, read_text

_GIB = 2**30

UNKNOWN_LINK = 25 * 2.0**30
"""Bytes per second between devices if a profile has no rate: that of a 200 Gbit/s network."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate by tokens, linear in the logarithm of tokens between points and flat outside."""

    points: tuple[tuple[int, float], ...]
    """(tokens, rate), tokens strictly increasing."""

    def __post_init__(self) -> None:
        """Refuse an invalid curve.

        Raises:
            ConfigError: there is no point, tokens do not increase from 1 up, or a rate is not a
                number above zero.
        """
        tokens = [point[0] for point in self.points]
        rising = all(low < high for low, high in pairwise(tokens))
        if not tokens or tokens[0] < 1 or not rising:
            raise ConfigError(
                f"A curve has points at {show(tokens)} tokens. Allowed: at least one point, tokens "
                "strictly increasing, the first at least 1. Remedy: sort them, each one once."
            )
        for at, rate in self.points:
            if not (rate > 0 and math.isfinite(rate)):
                raise ConfigError(
                    f"A curve has the rate {rate} at {at} tokens. Allowed: numbers above zero. "
                    "Remedy: leave the point out, or measure it again."
                )

    def at(self, tokens: float) -> float:
        """Returns the rate for a chunk of `tokens` tokens."""
        index = bisect_right(self.points, (tokens, math.inf))
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (low, low_rate), (high, high_rate) = self.points[index - 1], self.points[index]
        share = math.log(tokens / low) / math.log(high / low)
        return low_rate + share * (high_rate - low_rate)

    def scaled(self, factor: float) -> Curve:
        """Returns the curve with every rate times `factor`."""
        return Curve(tuple((tokens, rate * factor) for tokens, rate in self.points))


# For a dtype that a profile does not list: the dtypes from whose rate it is estimated, with the
# ratio. The 16-bit dtypes run on the same units. float64 has half of float32's rate on processors
# and on the accelerators that this package is for.
_STANDS_FOR: dict[str, tuple[tuple[str, float], ...]] = {
    "bfloat16": (("float16", 1.0), ("float32", 1.0)),
    "float16": (("bfloat16", 1.0), ("float32", 1.0)),
    "float32": (("bfloat16", 0.1), ("float16", 0.1)),
    "float64": (("float32", 0.5), ("bfloat16", 0.05), ("float16", 0.05)),
}


def curve_for(curves: Mapping[str, Curve], dtype_name: str) -> Curve:
    """Returns the curve of a dtype, or an estimate from that of a related one.

    Returns:
        `curves[dtype_name]` if it is listed. Otherwise: for a 16-bit dtype the other 16-bit dtype's
        curve, for float64 half of float32's, for float32 a tenth of a 16-bit dtype's (tensor cores
        are that much faster), and for an unknown dtype the slowest curve listed.
    """
    if dtype_name in curves:
        return curves[dtype_name]
    for other, factor in _STANDS_FOR.get(dtype_name, ()):
        if other in curves:
            return curves[other].scaled(factor)
    return min(curves.values(), key=lambda curve: curve.points[-1][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Speeds and sizes of one machine, from the point of view of one of its devices."""

    name: str
    """Name of the device from its driver, or of the processor."""

    kind: str
    """"cpu" or "cuda"."""

    estimated: bool
    """Whether figures are public ones or guesses; False if they were measured on this machine."""

    source: str
    matmul_flops: dict[str, Curve]
    """FLOP/s of the linear layers by dtype name ("bfloat16") and tokens."""

    attention_forward_flops: dict[str, Curve]
    """FLOP/s of attention forward (visible pairs only counted) by dtype name and chunk tokens."""

    attention_backward_flops: dict[str, Curve]
    """FLOP/s of attention backward by dtype name and chunk tokens; a backward counts as 2.5 times
    the forward's FLOPs."""

    memory_bytes_per_second: float
    """Bandwidth of the device's memory, which bounds elementwise work."""

    launch_seconds: float
    """Minimum time of one layer's forward with few tokens: kernel launches and Python."""

    d2h_bytes_per_second: float
    """Rate of copies to pinned host memory while nothing else is copied."""

    h2d_bytes_per_second: float
    """Rate of copies from pinned host memory to the device while nothing else is copied."""

    both_d2h_bytes_per_second: float
    """Rate of copies to the host while others run the other way."""

    both_h2d_bytes_per_second: float
    """Rate of copies to the device while others run the other way."""

    node_bytes_per_second: float | None = None
    """Rate from one device to another of the same node, each way; None if unknown."""

    network_bytes_per_second: float | None = None
    """Rate from one device to one of another node, each way, while all other devices do the same;
    None if unknown."""

    host_update_bytes_per_second: float | None = None
    """Rate at which an optimizer's update reads and writes host memory, with AdamW's fused kernel
    and all threads; None if not measured."""

    disk_write_bytes_per_second: float | None = None
    """Rate of writes to the disk of `offload_dir`; None if not measured."""

    disk_read_bytes_per_second: float | None = None
    """Rate of reads from the disk of `offload_dir`; None if not measured."""

    device_bytes: int | None = None
    """Memory of the device; for a CPU that of the machine."""

    host_bytes: int | None = None
    """Host memory that this process may use, with limits of control groups."""

    pinned_bytes: int | None = None
    """Host memory that this process may lock (RLIMIT_MEMLOCK); None for no limit."""

    disk_bytes: int | None = None
    """Free bytes on the disk of `offload_dir`."""

    offload_dir: str | None = None
    """Folder whose disk was measured; None if none was."""

    numa_node: int | None = None
    """NUMA node of the device; None if there is only one node or it is unknown."""

    layer_kernels: bool | None = None
    """Whether Liger's kernels can run there; None if unknown, as on a machine that was not
    measured. Plans then count what layers save without them, which is more."""

    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Versions of torch, CUDA and the driver with which a profile was measured; it is reused only
    with the same versions."""

    @property
    def partly_measured(self) -> bool:
        """Whether it is a shipped profile whose main figures were measured on such a device."""
        return self.estimated and self.source.startswith("Measured")


PROFILE_FORMAT = 1
"""Version of the file's layout and of the meaning of its figures; other versions are not read."""

_REMEDY = "Remedy: run `sppo calibrate` to write a new one, or mend the file after a shipped one."
_KINDS = ("cpu", "cuda")
# Limits of rates: wide enough for every machine, and narrow enough that no quotient overflows.
_LEAST_RATE, _MOST_RATE = 1e-12, 1e24
_RATES = f"a number above zero, {_LEAST_RATE:g} to {_MOST_RATE:g}"
_MOST_WHOLE = 2**63 - 1


def profile_to_dict(profile: HardwareProfile) -> dict[str, Any]:
    """Returns the profile in plain JSON types; the inverse of `profile_from_dict`."""
    data: dict[str, Any] = {"format": PROFILE_FORMAT}
    for each in dataclasses.fields(HardwareProfile):
        value = getattr(profile, each.name)
        if each.type == "dict[str, Curve]":
            curves = cast(Mapping[str, Curve], value)
            value = {
                dtype: {str(tokens): rate for tokens, rate in curve.points}
                for dtype, curve in curves.items()
            }
        data[each.name] = value
    return data


def profile_to_json(profile: HardwareProfile) -> str:
    """Returns the profile as indented JSON text that ends in a newline."""
    return json.dumps(profile_to_dict(profile), indent=2) + "\n"


def profile_from_json(text: str, *, where: str) -> HardwareProfile:
    """Read a profile from JSON text; `where` names its source in errors.

    Raises:
        ConfigError: the text is not JSON, or `profile_from_dict` refuses it.
    """
    try:
        data = parse_json(text)
    except ConfigError as error:
        raise ConfigError(f"{where} is not readable as JSON: {error}. {_REMEDY}") from error
    return profile_from_dict(data, where=where)


def profile_from_dict(data: object, *, where: str) -> HardwareProfile:
    """Make a profile from plain JSON types; `where` names their source in errors.

    Raises:
        ConfigError: the format version differs, a key is unknown or missing, or a value has a wrong
            type or range. The message names the file, the field and the remedy.
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
    fields = {each.name: each for each in dataclasses.fields(HardwareProfile)}
    for key, value in values.items():
        if key not in fields:
            nearest = difflib.get_close_matches(key[:100], fields, n=1, cutoff=0)[0]
            raise ConfigError(
                f"{where}: unknown field {show(key)} (value {show(value)}). Allowed: "
                f"{', '.join(fields)}. Remedy: use the nearest, {nearest!r}, or drop it."
            )
    checked: dict[str, Any] = {}
    for name, each in fields.items():
        if name in values:
            allowed, read = _READERS[str(each.type)]
            checked[name] = _read(where, name, values[name], allowed, read)
        elif each.default is each.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: the field {name!r} is missing. {_REMEDY}")
    if checked["kind"] not in _KINDS:
        raise _refusal(where, "kind", checked["kind"], " or ".join(map(repr, _KINDS)))
    return HardwareProfile(**checked)


def _read(
    where: str, name: str, value: object, allowed: str, read: Callable[[object], object]
) -> object:
    """Convert a JSON value to that of field `name`; refuse it with what is `allowed`."""
    try:
        return read(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {name}: {error}") from error
    except (TypeError, ValueError) as error:
        raise _refusal(where, name, value, allowed) from error


def _refusal(where: str, name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{where}: {name}={show(value)}. Allowed: {allowed}. {_REMEDY}")


def _reader(kind: Any, fits: Callable[[Any], bool] = lambda value: True) -> Callable[[object], Any]:
    """Returns a function that reads values of a type that fit; a bool is no number."""

    def read(value: object) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError
        if not fits(value):
            raise ValueError
        return value

    return read


_text, _flag, _mapping = _reader(str, bool), _reader(bool), _reader(dict)
_number = _reader((int, float), lambda value: _LEAST_RATE <= value <= _MOST_RATE)
_whole = _reader(int, lambda value: 0 <= value <= _MOST_WHOLE)


def _rate(value: object) -> float:
    return float(_number(value))


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


# For each annotation of a field: a description of allowed values, and a function that reads one.
_READERS: dict[str, tuple[str, Callable[[object], object]]] = {
    "str": ("a text", _text),
    "str | None": ("a text or null", _or_none(_text)),
    "bool": ("true or false", _flag),
    "bool | None": ("true, false or null", _or_none(_flag)),
    "float": (_RATES, _rate),
    "float | None": (f"{_RATES}, or null", _or_none(_rate)),
    "int | None": ("a whole number below 2**63, or null", _or_none(_whole)),
    "dict[str, Curve]": (
        'an object of curves by dtype, each from tokens to rate: {"bfloat16": {"1024": 4e14}}',
        _curves,
    ),
    "dict[str, str]": ("an object of texts", _texts),
}


class Datasheet(NamedTuple):
    """Public figures of a device model."""

    peak_flops: float
    """Dense bf16 FLOP/s of its tensor cores with float32 accumulation: half of a figure that is
    printed with sparsity. Real kernels do not reach it."""

    device_gib: float
    """GiB of memory that drivers report: of GDDR with error correction 1/16 less than is built
    in."""

    memory_bytes_per_second: float
    """Peak bandwidth of its memory."""

    copy_bytes_per_second: float
    """Rate of copies to or from pinned host memory: of PCIe x16, or of a chip-to-chip link."""

    node_bytes_per_second: float | None = None
    """80% of NVLink's (Infinity Fabric's) rate to another device, each way; None without one."""

    takes_cudnn: bool = False
    """Whether PyTorch takes cuDNN's attention there: with compute capability 9.0 and 10.0."""


_PCIE_4, _PCIE_5 = 25e9, 52e9
_CHIP_LINK = 300e9  # of 450e9 each way of NVLink-C2C, the slower of both ways in published tests

DATASHEETS: dict[str, Datasheet] = {
    "A100": Datasheet(312e12, 79.1, 2.04e12, _PCIE_4, 2.4e11),
    "A800": Datasheet(312e12, 79.1, 2.04e12, _PCIE_4, 1.6e11),
    "A30": Datasheet(165e12, 23.5, 0.93e12, _PCIE_4),
    "A40": Datasheet(150e12, 44.4, 0.70e12, _PCIE_4),
    "A10": Datasheet(125e12, 22.0, 0.60e12, _PCIE_4),
    "A10G": Datasheet(70e12, 22.0, 0.60e12, _PCIE_4),
    "H100": Datasheet(989e12, 79.1, 3.35e12, _PCIE_5, 3.6e11, takes_cudnn=True),
    "H100 PCIE": Datasheet(756e12, 79.1, 2.04e12, _PCIE_5, takes_cudnn=True),
    "H100 NVL": Datasheet(835e12, 93.1, 3.94e12, _PCIE_5, takes_cudnn=True),
    "H800": Datasheet(989e12, 79.1, 3.35e12, _PCIE_5, 1.6e11, takes_cudnn=True),
    "H20": Datasheet(148e12, 95.0, 4.00e12, _PCIE_5, 3.6e11, takes_cudnn=True),
    "H200": Datasheet(989e12, 139.7, 4.80e12, _PCIE_5, 3.6e11, takes_cudnn=True),
    "H200 NVL": Datasheet(835e12, 139.7, 4.80e12, _PCIE_5, takes_cudnn=True),
    "GH200": Datasheet(989e12, 94.5, 4.00e12, _CHIP_LINK, takes_cudnn=True),
    "B200": Datasheet(2250e12, 178.3, 8.00e12, _PCIE_5, 7.2e11, takes_cudnn=True),
    "GB200": Datasheet(2500e12, 184.0, 8.00e12, _CHIP_LINK, 7.2e11, takes_cudnn=True),
    "L4": Datasheet(121e12, 22.0, 0.30e12, _PCIE_4),
    "L20": Datasheet(119e12, 44.4, 0.86e12, _PCIE_4),
    "L40": Datasheet(181e12, 44.4, 0.86e12, _PCIE_4),
    "L40S": Datasheet(362e12, 44.4, 0.86e12, _PCIE_4),
    "RTX 3090": Datasheet(71e12, 23.6, 0.94e12, _PCIE_4),
    "RTX 4080": Datasheet(97e12, 15.7, 0.72e12, _PCIE_4),
    "RTX 4090": Datasheet(165e12, 23.6, 1.01e12, _PCIE_4),
    "RTX 5080": Datasheet(112e12, 15.5, 0.96e12, _PCIE_5),
    "RTX 5090": Datasheet(209e12, 31.4, 1.79e12, _PCIE_5),
    "RTX A5000": Datasheet(111e12, 23.6, 0.77e12, _PCIE_4),
    "RTX A6000": Datasheet(155e12, 47.4, 0.77e12, _PCIE_4),
    "RTX 6000 ADA": Datasheet(364e12, 47.4, 0.96e12, _PCIE_4),
    "RTX PRO 6000": Datasheet(504e12, 94.9, 1.79e12, _PCIE_5),
    "MI300X": Datasheet(1307e12, 191.9, 5.30e12, _PCIE_5, 5.1e10),
}
"""By the words of a driver's name that tell the model."""

# Words in names of devices that contain a listed name but are slower, or only a slice of it.
_OTHER_DEVICES = frozenset({"LAPTOP", "D", "MIG", "MAX"})


def datasheet(device_name: str) -> Datasheet | None:
    """Returns the public figures of a device by its driver's name for it; None if unknown.

    Whole words are compared ("A10" is neither "A100" nor "A10G"); the most specific entry wins.
    """
    words = _words(device_name)
    if words & _OTHER_DEVICES:
        return None
    known = [name for name in DATASHEETS if set(name.split()) <= words]
    return DATASHEETS[max(known, key=len)] if known else None


def peak_flops(device_name: str) -> float | None:
    """Returns the dense bf16 FLOP/s of a device by its driver's name for it; None if unknown."""
    sheet = datasheet(device_name)
    return None if sheet is None else sheet.peak_flops


# Shares of a datasheet's dense peak that large matmuls and fused attention reach, by the tokens of
# a chunk, where nothing better is known (`_MEASURED`). Those of attention are what FlashAttention 2
# reaches on Hopper (published: 329 to 365 of 989e12). It is what runs on Ampere and Ada, for which
# cuDNN's kernel is not PyTorch's choice, and on consumer Blackwell (12.0). It was made for Ampere
# and reaches more there, 61% of an A100's peak by public figures, which are in that one's profile;
# of the cards with GDDR there are none to rely on, so they keep the lower share.
_MATMUL_SHARE = Curve(((256, 0.15), (512, 0.28), (1024, 0.42), (2048, 0.53), (4096, 0.60)))
_ATTENTION_SHARE = Curve(((256, 0.08), (512, 0.13), (1024, 0.20), (2048, 0.27), (8192, 0.34)))
_BACKWARD_SHARE = 0.68
_FLOAT32_SHARE = 0.05
_MEMORY_SHARE = 0.85
_UNKNOWN_PEAK_FLOPS = 60e12

_MEASURED = "h200"
"""Shipped profile whose speeds of matmuls and of cuDNN's attention were measured. Their shares of
the peak stand for those of devices on which PyTorch takes that kernel, and of matmuls on devices
with the same peak, which have the same chip."""

_CPU_MATMUL = Curve(((64, 0.6e11), (256, 1.0e11), (1024, 1.2e11)))
_CPU_ATTENTION = Curve(((64, 0.3e11), (256, 0.5e11), (1024, 0.6e11)))


def cpu_estimate(device_name: str) -> HardwareProfile:
    """Returns a guess for any processor: about 1e11 float32 FLOP/s and 10 GB/s.

    bfloat16 has float32's rate, which is right within a factor of a few: processors with
    instructions for it are faster, others convert.
    """
    backward = _CPU_ATTENTION.scaled(0.8)
    return HardwareProfile(
        name=device_name,
        kind="cpu",
        estimated=True,
        source="rough estimate of a few cores: 1e11 float32 FLOP/s; `sppo calibrate` measures",
        matmul_flops={"float32": _CPU_MATMUL, "bfloat16": _CPU_MATMUL},
        attention_forward_flops={"float32": _CPU_ATTENTION, "bfloat16": _CPU_ATTENTION},
        attention_backward_flops={"float32": backward, "bfloat16": backward},
        memory_bytes_per_second=10e9,
        launch_seconds=0.3e-3,
        d2h_bytes_per_second=5e9,
        h2d_bytes_per_second=5e9,
        both_d2h_bytes_per_second=2.5e9,
        both_h2d_bytes_per_second=2.5e9,
    )


def cuda_estimate(device_name: str) -> HardwareProfile:
    """Returns a guess for any accelerator, from its datasheet if the model is known.

    Returns:
        A profile whose curves are shares of the peak, shaped like those of the shipped profiles. Of
        an unknown model a small card's 60e12 FLOP/s, 0.3e12 bytes/s and PCIe 3.0 x16 are assumed.
    """
    sheet = datasheet(device_name)
    if sheet is None:
        source = "conservative estimate of an unknown device; `sppo calibrate` measures"
        peak, memory, copies, node = _UNKNOWN_PEAK_FLOPS, 0.3e12, 11e9, None
    else:
        peak, copies = sheet.peak_flops, sheet.copy_bytes_per_second
        source = (
            f"Estimate from its datasheet, not measured: shares of {peak:.3g} dense bf16 FLOP/s"
        )
        memory = _MEMORY_SHARE * sheet.memory_bytes_per_second
        # Without a link of their own devices send through the host's memory.
        node = sheet.node_bytes_per_second or copies / 2
    matmul, attention = _MATMUL_SHARE.scaled(peak), _ATTENTION_SHARE.scaled(peak)
    backward = attention.scaled(_BACKWARD_SHARE)
    if sheet is not None and sheet.takes_cudnn:
        measured, dtype_name = shipped_profiles()[_MEASURED], "bfloat16"
        share = peak / DATASHEETS[_MEASURED.upper()].peak_flops
        attention = measured.attention_forward_flops[dtype_name].scaled(share)
        backward = measured.attention_backward_flops[dtype_name].scaled(share)
        source += f", of which attention reaches what it does on {measured.name}"
        if share == 1:
            matmul = measured.matmul_flops[dtype_name]

    def by_dtype(curve: Curve) -> dict[str, Curve]:
        single = curve.scaled(_FLOAT32_SHARE)
        return {"bfloat16": curve, "float16": curve, "float32": single}

    return HardwareProfile(
        name=device_name,
        kind="cuda",
        estimated=True,
        source=source,
        matmul_flops=by_dtype(matmul),
        attention_forward_flops=by_dtype(attention),
        attention_backward_flops=by_dtype(backward),
        memory_bytes_per_second=memory,
        launch_seconds=1e-3,
        d2h_bytes_per_second=copies,
        h2d_bytes_per_second=copies,
        both_d2h_bytes_per_second=0.8 * copies,
        both_h2d_bytes_per_second=0.8 * copies,
        node_bytes_per_second=node,
        device_bytes=None if sheet is None else int(sheet.device_gib * _GIB),
    )


MOST_PROFILE_BYTES = 2**20
"""Largest profile file that is read, in bytes; profiles take a few kilobytes."""


@cache
def shipped_profiles() -> Mapping[str, HardwareProfile]:
    """Returns the profiles shipped with the package, by file name without ".json" ("h100-80gb")."""
    folder = resources.files("sppo_hf.planning").joinpath("profiles")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return {
        file.name.removesuffix(".json"): profile_from_json(
            file.read_text(encoding="utf-8"), where=f"shipped profile {file.name}"
        )
        for file in files
    }


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """Returns the profile that a user names.

    Args:
        name_or_path: a shipped profile by its short or full name in any case ("h100", "H100-80GB",
            "NVIDIA H100 80GB HBM3"), another device of `DATASHEETS` ("rtx-4090", "NVIDIA L40S",
            "a100-40gb"), "cpu" for a guess of a processor, or the path of a JSON file.

    Raises:
        ConfigError: there is no such profile or file (the message has the most similar name), or
            `profile_from_dict` refuses the file.
    """
    text = os.fspath(name_or_path)
    shipped = {
        alias: profile
        for name, profile in shipped_profiles().items()
        for alias in (name, name.partition("-")[0], profile.name.lower())
    }
    if text.lower() in shipped:
        return shipped[text.lower()]
    if text.lower() == "cpu":
        return cpu_estimate("cpu")
    if text.endswith(".json") or os.path.exists(text):
        return _read_file(Path(text))
    together = {_letters_and_digits(name): name for name in DATASHEETS}
    device_name = together.get(_letters_and_digits(text), text)
    if datasheet(device_name) is not None:
        return _public_profile(device_name)
    names = ["cpu", *(name.lower().replace(" ", "-") for name in DATASHEETS)]
    nearest = difflib.get_close_matches(text.lower()[:100], names, n=1, cutoff=0)[0]
    raise ConfigError(
        f"hardware={show(text)} is neither a known device nor a file. Allowed: "
        f"{', '.join(names)}, or the path of a JSON file. Remedy: use the nearest name, "
        f"{nearest!r}, or run `sppo calibrate` on the machine and drop the setting."
    )


def profile_for(device_name: str, kind: str, versions: Mapping[str, str]) -> HardwareProfile:
    """Returns the best available profile for a device of this machine.

    Returns:
        The calibrated profile of this device and these versions; else a shipped profile of the same
        model, recognised by the words of its name; else an estimate from its datasheet, or a rough
        guess. All but the first have `estimated` set and this device's name, and of a shipped one
        `device_bytes` is the size in that name, if there is one ("A100-SXM4-40GB").

    Raises:
        ConfigError: the calibrated profile's file is damaged.
    """
    stored = stored_profile(device_name, kind, versions)
    if stored is not None:
        return stored
    return _public_profile(device_name) if kind == "cuda" else cpu_estimate(device_name)


def _public_profile(device_name: str) -> HardwareProfile:
    """Returns the shipped profile of the same model, else `cuda_estimate`'s."""
    peak, words = peak_flops(device_name), _words(device_name)
    for name, profile in shipped_profiles().items():
        # Variants that share a word differ in their peak: an H100 PCIe is not an H100 SXM.
        if name.partition("-")[0].upper() in words and peak == peak_flops(profile.name):
            size = re.search(r"\b(\d+)GB\b", device_name.upper())
            device_bytes = profile.device_bytes
            if size is not None and size[1] not in re.findall(r"\d+", profile.name):
                device_bytes = int(size[1]) * _GIB
            return dataclasses.replace(profile, name=device_name, device_bytes=device_bytes)
    return cuda_estimate(device_name)


def stored_profile(
    device_name: str, kind: str, versions: Mapping[str, str]
) -> HardwareProfile | None:
    """Returns the profile calibrated for this device with exactly these versions; None if none.

    Raises:
        ConfigError: the profile's file is damaged.
    """
    path = profile_path(device_name, kind, versions)
    return _read_file(path) if path.is_file() else None


def save_profile(profile: HardwareProfile, path: str | os.PathLike[str] | None = None) -> Path:
    """Write a profile atomically, replacing an older one of the same device and versions.

    Without a path it is written to the default place under the Hugging Face cache.

    Raises:
        ConfigError: the file cannot be written; the message names it.
    """
    target = (
        profile_path(profile.name, profile.kind, profile.versions) if path is None else Path(path)
    )
    try:
        write_atomically(target, profile_to_json(profile))
    except OSError as error:
        raise ConfigError(
            f"The hardware profile {os.fspath(target)!r} cannot be written: {error.strerror}. "
            "Remedy: name a writable file (--output), or set HF_HOME to a writable folder."
        ) from error
    return target


def profile_path(device_name: str, kind: str, versions: Mapping[str, str]) -> Path:
    """Returns the path of the calibrated profile of a device, whether or not it exists."""
    key = [PROFILE_FORMAT, device_name, kind, sorted(versions.items())]
    return cache_path("hardware", device_name, key)


def _read_file(path: Path) -> HardwareProfile:
    text = read_text(
        path,
        what="hardware profile",
        max_bytes=MOST_PROFILE_BYTES,
        remedy="give the path of a JSON file that `sppo calibrate --output` wrote, or a shipped "
        "name",
    )
    return profile_from_json(text, where=os.fspath(path))


def _letters_and_digits(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


def _words(device_name: str) -> set[str]:
    return set(re.split(r"[\s\-_/]+", device_name.upper()))
