"""Finding and keeping hardware profiles: shipped ones, calibrated ones, and estimates for the rest.

Calibrated profiles lie as JSON under the Hugging Face cache, one file per device name and versions.
Shipped ones are data of the package, `planning/profiles/`, from public figures. For any other
device there are orders of magnitude, so that a plan exists at all until `sppo calibrate` replaces
them; each says of itself that it is an estimate, and on what it rests.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from sppo_hf.errors import ConfigError
from sppo_hf.planning.hardware import (
    PROFILE_FORMAT,
    Curve,
    HardwareProfile,
    profile_from_json,
    profile_to_json,
)
from sppo_hf.planning.json_store import keyed_path, write_whole
from sppo_hf.planning.model_shape import peak_flops
from sppo_hf.reading import read_text
from sppo_hf.rules import show

# Share of a datasheet's dense peak that large matrix products and fused attention reach, by the
# tokens of a chunk; the shape of the shipped profiles' curves.
_MATMUL_SHARE = Curve(((256, 0.15), (512, 0.28), (1024, 0.42), (2048, 0.53), (4096, 0.60)))
_ATTENTION_SHARE = Curve(((256, 0.08), (512, 0.13), (1024, 0.20), (2048, 0.27), (8192, 0.34)))
_BACKWARD_SHARE = 0.68
_FLOAT32_SHARE = 0.05
_UNKNOWN_PEAK_FLOPS = 60e12

_CPU_MATMUL = Curve(((64, 0.6e11), (256, 1.0e11), (1024, 1.2e11)))
_CPU_ATTENTION = Curve(((64, 0.3e11), (256, 0.5e11), (1024, 0.6e11)))


def cpu_estimate(device_name: str) -> HardwareProfile:
    """Some processor: about 1e11 float32 FLOP/s and 10 GB/s, whatever its name says.

    bfloat16 is given float32's rate, right within a factor of a few either way: processors with
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


def cuda_estimate(device_name: str, peak_flops: float | None) -> HardwareProfile:
    """Some accelerator, from its dense bf16 peak where that is known.

    Args:
        device_name: as its driver gives it.
        peak_flops: dense bf16 FLOP/s from its datasheet; None assumes a small card's 60e12.

    Returns:
        Curves that are shares of the peak, shaped like those of the shipped profiles; a byte of
        the device's memory per 500 FLOPs of the peak, at least 0.3e12 bytes/s (few have less);
        copies like PCIe 4.0 x16 where the device is known, and 3.0 x16 where it is not.
    """
    if peak_flops is None:
        source = "conservative estimate of an unknown device; `sppo calibrate` measures"
        peak_flops = _UNKNOWN_PEAK_FLOPS
        copy_bytes_per_second = 11e9
    else:
        source = f"estimate: shares of {peak_flops:.3g} FLOP/s, its datasheet's dense bf16 peak"
        copy_bytes_per_second = 20e9
    matmul = _MATMUL_SHARE.scaled(peak_flops)
    attention = _ATTENTION_SHARE.scaled(peak_flops)

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
        attention_backward_flops=by_dtype(attention.scaled(_BACKWARD_SHARE)),
        memory_bytes_per_second=max(0.3e12, peak_flops / 500),
        launch_seconds=1e-3,
        d2h_bytes_per_second=copy_bytes_per_second,
        h2d_bytes_per_second=copy_bytes_per_second,
        both_d2h_bytes_per_second=0.8 * copy_bytes_per_second,
        both_h2d_bytes_per_second=0.8 * copy_bytes_per_second,
    )


_GIB = 2**30

MOST_PROFILE_BYTES = 2**20
"""Of a profile's file, which takes a few kilobytes."""


@cache
def shipped_profiles() -> Mapping[str, HardwareProfile]:
    """The profiles that come with the package, by file name without ".json" ("h100-80gb")."""
    folder = resources.files("sppo_hf.planning").joinpath("profiles")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return {
        file.name.removesuffix(".json"): profile_from_json(
            file.read_text(encoding="utf-8"), where=f"shipped profile {file.name}"
        )
        for file in files
    }


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """The profile that a user names.

    Args:
        name_or_path: a shipped profile in any case, in short or in full ("h100", "H100-80GB",
            "NVIDIA H100 80GB HBM3"), "cpu" for a rough processor, or the path of a JSON file.

    Raises:
        ConfigError: no profile has that name and no file that path (the message says the nearest
            name), or the file is refused, see `profile_from_dict`.
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
    names = ["cpu", *shipped]
    nearest = difflib.get_close_matches(text.lower()[:100], names, n=1, cutoff=0)[0]
    raise ConfigError(
        f"hardware={show(text)} is neither a shipped profile nor a file. Allowed: "
        f"{', '.join(names)}, or the path of a JSON file. Remedy: use the nearest name, "
        f"{nearest!r}, or run `sppo calibrate` on the machine and drop the setting."
    )


def profile_for(device_name: str, kind: str, versions: Mapping[str, str]) -> HardwareProfile:
    """The best profile at hand for a device of this machine.

    Returns:
        What was calibrated for this device and these versions; else a shipped profile of the same
        model, recognised by the words of its name; else a rough estimate. The last two have
        `estimated` set and this device's name; `device_bytes` follows the name where that says a
        size ("A100-SXM4-40GB").

    Raises:
        ConfigError: the calibrated profile's file is damaged.
    """
    stored = stored_profile(device_name, kind, versions)
    if stored is not None:
        return stored
    if kind != "cuda":
        return cpu_estimate(device_name)
    peak = peak_flops(device_name)
    words = _words(device_name)
    for name, profile in shipped_profiles().items():
        # The peak tells variants apart that share a word: an H100 PCIe is no H100 SXM.
        if name.partition("-")[0].upper() in words and peak == peak_flops(profile.name):
            size = re.search(r"\b(\d+)GB\b", device_name.upper())
            device_bytes = profile.device_bytes
            if size is not None and size[1] not in re.findall(r"\d+", profile.name):
                device_bytes = int(size[1]) * _GIB
            return dataclasses.replace(profile, name=device_name, device_bytes=device_bytes)
    return cuda_estimate(device_name, peak)


def stored_profile(
    device_name: str, kind: str, versions: Mapping[str, str]
) -> HardwareProfile | None:
    """The profile calibrated here for this device and exactly these versions, or None.

    Raises:
        ConfigError: its file is damaged.
    """
    path = profile_path(device_name, kind, versions)
    return _read_file(path) if path.is_file() else None


def save_profile(profile: HardwareProfile, path: str | os.PathLike[str] | None = None) -> Path:
    """Write a profile, whole or not at all, replacing an older one of the same device and versions.

    By default that is under the Hugging Face cache.

    Returns:
        The file written.

    Raises:
        ConfigError: the file cannot be written; the message names it.
    """
    target = (
        profile_path(profile.name, profile.kind, profile.versions) if path is None else Path(path)
    )
    try:
        write_whole(target, profile_to_json(profile))
    except OSError as error:
        raise ConfigError(
            f"The hardware profile {os.fspath(target)!r} cannot be written: {error.strerror}. "
            "Remedy: name a writable file (--output), or set HF_HOME to a writable folder."
        ) from error
    return target


def profile_path(device_name: str, kind: str, versions: Mapping[str, str]) -> Path:
    """Where the calibrated profile of a device and versions lies, whether or not it exists."""
    key = [PROFILE_FORMAT, device_name, kind, sorted(versions.items())]
    return keyed_path("hardware", device_name, key)


def _read_file(path: Path) -> HardwareProfile:
    """Read a profile's file."""
    text = read_text(
        path,
        what="hardware profile",
        most_bytes=MOST_PROFILE_BYTES,
        remedy="give the path of a JSON file that `sppo calibrate --output` wrote, or a shipped "
        "name",
    )
    return profile_from_json(text, where=os.fspath(path))


def _words(device_name: str) -> set[str]:
    return set(re.split(r"[\s\-_/]+", device_name.upper()))
