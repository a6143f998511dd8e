"""Arguments that `sppo estimate` and `sppo plan` share, and the question that they ask.

Only words into values; answering is `sppo_hf.planning.plan_request`. Imports the hub's client only
where MODEL is a hub id, and torch only where nobody has traced the model before.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.errors import ConfigError, SPPOError
from sppo_hf.planning.config_file import find_config, load_config, shipped_models
from sppo_hf.planning.hardware import HardwareProfile, load_profile
from sppo_hf.planning.model_profile import ModelProfile, Training
from sppo_hf.planning.plan import PlanRequest
from sppo_hf.planning.plan_request import question_for
from sppo_hf.registry import OFFLOAD_POLICIES
from sppo_hf.rules import show

logger = logging.getLogger(__name__)

FITS, FITS_NOT, BAD_INPUT = 0, 1, 2
DEFAULT_HARDWARE = "h100-80gb"

ASSUMED_HOST_MEMORY = "128GiB"
"""Of each device of a profile that does not say: about what small GPU servers have."""

UNNAMED_FOLDER = "--disk-memory"
"""Stands for `offload_dir` where only its size is known."""

MOST_TOKENS = 2**31 - 1
"""Longest row that is planned for."""

_WIDTH = 100
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([KM]?)", re.IGNORECASE)
_TOKENS_PER_UNIT = {"": 1, "K": 1024, "M": 1024**2}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Dtype(StrEnum):
    """Dtype of weights and compute; a choice on the command line."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Partition(StrEnum):
    """Setting of `partition`; a choice on the command line."""

    auto = "auto"
    flops = "flops"
    even = "even"


class Recomputed(StrEnum):
    """Setting of `recompute`; a choice on the command line."""

    auto = "auto"
    none = "none"
    selective = "selective"
    full = "full"


class Mode(StrEnum):
    """Setting of `offload_kv`; a choice on the command line."""

    auto = "auto"
    none = "none"
    full = "full"


class Place(StrEnum):
    """Setting of `weights` and `optimizer`; a choice on the command line."""

    auto = "auto"
    device = "device"
    host = "host"


POLICIES = ("auto", *OFFLOAD_POLICIES.names())
"""Values of the setting `offload`."""


Model = Annotated[
    str,
    typer.Argument(
        help="A local model folder, a config.json, a shipped name (llama-3.1-8b, llama-3.1-70b,"
        " qwen3-4b, qwen3-30b-a3b, smollm2-135m, gpt-oss-20b), or a hub id.",
        metavar="MODEL",
    ),
]
SeqLen = Annotated[
    str, typer.Option(help="Tokens of each row: 131072, 128K (x 1024) or 1M (x 1024 x 1024).")
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(help="Budget on the device, 80GiB, or a share of the profile's, 0.9."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help="Budget in host memory, 256GiB. By default most of what a calibrated machine has;"
        f" {ASSUMED_HOST_MEMORY} for each device of a shipped profile, which does not say.",
        show_default=False,
    ),
]
Disk = Annotated[
    str | None,
    typer.Option("--disk-memory", help="Budget on a fast disk, 1TiB; no disk is used by default."),
]
OffloadDir = Annotated[
    str | None,
    typer.Option(help="Folder on that disk, for --write; naming it allows the disk, too."),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="A shipped profile (a100, h100, h200) or a file of `sppo calibrate --output`."
        f" [default: {DEFAULT_HARDWARE}]",
        show_default=False,
    ),
]
Lora = Annotated[
    int | None,
    typer.Option(help="Rank of LoRA adapters on all linear layers; without it all weights train."),
]
Rows = Annotated[
    int,
    typer.Option("--micro-batch-size", min=1, max=2**20, help="Rows that go through together."),
]
Accumulate = Annotated[
    bool,
    typer.Option(
        "--accumulate", help="Gradients are accumulated over batches, so backward has two of each."
    ),
]
ComputeDtype = Annotated[Dtype, typer.Option(help="Dtype of weights and compute.")]
Cut = Annotated[Partition, typer.Option(help="How chunks are cut.")]
NumChunks = Annotated[str, typer.Option(help="Number of chunks, or auto.")]
Recompute = Annotated[
    Recomputed | None, typer.Option(help="What backward computes again. [default: auto]")
]
AttentionOnce = Annotated[
    bool,
    typer.Option(
        "--attention-once",
        help="Attention never runs again, not even where nothing fits otherwise.",
    ),
]
OffloadKv = Annotated[Mode, typer.Option(help="Whether K/V leave the device too.")]
Weights = Annotated[
    Place,
    typer.Option(
        help="Where layers' weights rest: from the host they come when used. By auto there"
        " only where not all fits on the device."
    ),
]
Optimizer = Annotated[
    Place, typer.Option(help="Where trained weights are updated, with gradients and states.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


T = TypeVar("T")


def from_options(kind: Callable[..., T], options: Mapping[str, Any]) -> T:
    """Returns the dataclass of a command line.

    Args:
        kind: a dataclass whose fields are called as the parameters of the command's function.
        options: `locals()` at its beginning. What is no field is the command's own business.
    """
    names = inspect.signature(kind).parameters
    return kind(**{name: options[name] for name in names if name in options})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningArguments:
    """The command line as it was typed."""

    model: str
    seq_len: str
    device_memory: str | None
    host_memory: str | None
    disk: str | None
    hardware: str | None
    lora: int | None
    rows: int
    accumulate: bool
    dtype: Dtype
    partition: Partition
    num_chunks: str
    recompute: Recomputed | None
    offload_kv: Mode
    weights: Place
    optimizer: Place
    attention_once: bool = False
    policy: str = "auto"
    offload_dir: str | None = None
    devices_of_host: int = 1
    """Devices that share what is assumed of a host."""

    @property
    def title(self) -> str:
        """The model for a table's title: "Llama-3.1-8B, LoRA rank 16, float16"."""
        path = Path(self.model)
        name = path.parent.name or path.name if path.name == "config.json" else self.model
        name = name if len(name) <= _WIDTH else f"…{name[-_WIDTH:]}"
        parts = [name]
        if self.lora is not None:
            parts.append(f"LoRA rank {self.lora}")
        if self.dtype is not Dtype.bfloat16:
            parts.append(str(self.dtype))
        return ", ".join(parts)

    def question(self) -> PlanRequest:
        """Reads the model's configuration and the profile, and checks every value.

        Raises:
            ConfigError: a value is refused, or a file is missing or damaged.
            UnsupportedModelError: the engine refuses such models.
        """
        profile = load_profile(self.hardware or DEFAULT_HARDWARE)
        return question_for(
            read_model(self.model),
            self._config(profile),
            profile=profile,
            total_tokens=parse_tokens(self.seq_len),
            batch_rows=self.rows,
            accumulates=self.accumulate,
            dtype_name=str(self.dtype),
            lora_rank=self.lora,
            trace=trace_unknown,
        )

    def hardware_note(self, question: PlanRequest) -> str:
        """Says in one line which profile the figures are from."""
        profile = question.device.profile
        assert profile is not None, "a question from the command line has a profile"
        known = "estimated from public figures" if profile.estimated else "measured"
        note = f"Hardware: {profile.name}, {known}"
        if self.hardware is None:
            note += "; it is the default, --hardware names another"
        if self._assumed_host_bytes(profile) is not None:
            share = " for each device" if self.devices_of_host > 1 else ""
            note += (
                f". Host memory: {ASSUMED_HOST_MEMORY}{share} is assumed; --host-memory names the"
                " machine's"
            )
        return note + "."

    def _assumed_host_bytes(self, profile: HardwareProfile) -> int | None:
        """Host memory where neither the command line nor the profile knows it; None if one does."""
        known = self.host_memory is not None or profile.host_bytes is not None
        if known or profile.kind == "cpu":
            return None
        share = parse_bytes(ASSUMED_HOST_MEMORY, field="--host-memory", total_bytes=None)
        return self.devices_of_host * share

    def _config(self, profile: HardwareProfile) -> SPPOConfig:
        recompute = self.recompute
        if recompute is None:
            # The fixed policies are the paper's: they decide what leaves, and recompute nothing.
            automatic = self.policy == "auto"
            recompute = Recomputed.auto if automatic else Recomputed.none
        host_bytes = self._assumed_host_bytes(profile)
        if host_bytes is None:
            host_bytes = _budget("--host-memory", self.host_memory, profile.host_bytes)
        return SPPOConfig(
            num_chunks=_num_chunks(self.num_chunks),
            partition=self.partition.value,
            offload=self.policy,
            offload_kv=self.offload_kv.value,
            weights=self.weights.value,
            optimizer=self.optimizer.value,
            recompute=recompute.value,
            attention_once=self.attention_once,
            device_memory=_budget("--device-memory", self.device_memory, profile.device_bytes),
            host_memory=host_bytes,
            disk_memory=_budget("--disk-memory", self.disk, profile.disk_bytes),
            # Nothing is written now: planning asks only whether there is a disk.
            offload_dir=self.offload_dir or (None if self.disk is None else UNNAMED_FOLDER),
        )


def check_figure(figure: Path | None) -> None:
    """Refuses a picture of no known kind.

    Raises:
        ConfigError: its name does not end as that of a kind.
    """
    from sppo_hf.reporting.figures import ENDINGS

    if figure is not None and figure.suffix.lower() not in ENDINGS:
        raise ConfigError(
            f"--figure is {str(figure)!r}. Allowed: a file that ends in {', '.join(ENDINGS)}, "
            "which says what kind of picture it is. Remedy: use one of these endings."
        )


@contextmanager
def writing(*files: Path | None) -> Iterator[None]:
    """Turns what the system says of a file that cannot be written into a ConfigError.

    Args:
        *files: what may be written, for where the system names none.
    """
    try:
        yield
    except OSError as error:
        path = error.filename or next(filter(None, files))
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Remedy: name a file in a writable folder."
        ) from error


def trace_unknown(config: object, training: Training) -> ModelProfile:
    """Traces a model whose profile is not known; only then are torch and Transformers imported.

    Raises:
        SPPOError: as `sppo_hf.engine.trace_profile.trace_config`.
    """
    from sppo_hf.engine.trace_profile import trace_config

    return trace_config(config, training)


def parse_tokens(text: str) -> int:
    """Reads a number of tokens.

    Args:
        text: "131072", "128K" (K = 1024) or "1M" (M = 1024 x 1024).

    Raises:
        ConfigError: it is none of these, not a whole number above zero, or above `MOST_TOKENS`.
    """
    match = _TOKENS.fullmatch(text.strip().replace("_", "").replace(",", ""))
    tokens = float(match[1]) * _TOKENS_PER_UNIT[match[2].upper()] if match else 0.0
    if not 1 <= tokens <= MOST_TOKENS or not tokens.is_integer():
        raise ConfigError(
            f"--seq-len is {show(text)}. Allowed: a whole number of tokens, 1 to {MOST_TOKENS:,}, "
            "such as 131072, 128K (K = 1024) or 1M (M = 1024 x 1024). Remedy: write one of these."
        )
    return int(tokens)


def read_model(model: str) -> object:
    """Reads the configuration of a model; of a hub id nothing else is downloaded.

    Args:
        model: a path, a shipped name or a hub id; a path that exists comes first.

    Raises:
        ConfigError: there is no such file, folder or repository, or the hub cannot be reached.
    """
    return load_config(model_path(model))


def model_path(model: str) -> Path:
    """Returns the file of a model's configuration, downloaded where MODEL is a hub id.

    Raises:
        ConfigError: as `read_model`.
    """
    path = find_config(model)
    if os.path.exists(path) or os.path.exists(os.path.expanduser(model)):
        return path
    if not _HUB_ID.fullmatch(model) or model.endswith(".json") or model.startswith("."):
        raise ConfigError(
            f"{show(model)} is no file or folder here. Allowed: a model folder with a config.json, "
            f"the path of a config.json, a shipped name ({', '.join(shipped_models())}), or a hub "
            "id such as meta-llama/Llama-3.1-8B. Remedy: check the path."
        )
    return Path(_download(model))


def read_budget(text: str) -> int | float | str:
    """Returns a budget as settings take it: a number of bytes, a share, or a size with a unit."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@contextmanager
def bad_input(as_json: bool, **named: object) -> Iterator[None]:
    """Turns errors for the user into one message on stderr (or a JSON object) and exit code 2."""
    try:
        yield
    except SPPOError as error:
        if as_json:
            echo_json({**named, "status": "bad input", "reason": str(error)})
        else:
            message = Text.assemble(("bad input ", "red"), str(error))
            console(stderr=True).print(message, soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from error


def echo_json(data: object) -> None:
    """Prints one JSON object; NaN and infinities, which JSON does not have, become null."""
    try:
        text = json.dumps(data, allow_nan=False)
    except ValueError:
        # Python reads back what it writes for them, and names them on the way.
        data = json.loads(json.dumps(data), parse_constant=lambda _: None)
        text = json.dumps(data, allow_nan=False)
    typer.echo(text)


def console(*, stderr: bool = False) -> Console:
    """Where tables go; where that is no terminal, they are wide enough for their columns."""
    found = Console(stderr=stderr)
    if not found.is_terminal:
        found.width = max(found.width, _WIDTH)
    return found


def _download(repo_id: str) -> str:
    from huggingface_hub import errors, hf_hub_download

    said = {
        errors.GatedRepoError: (
            "its access is gated",
            f"ask for access at https://huggingface.co/{repo_id} and log in with `hf auth login`",
        ),
        errors.RepositoryNotFoundError: (
            "there is no such repository, or it is private",
            "check the name, or log in with `hf auth login`",
        ),
        errors.LocalEntryNotFoundError: (
            "the hub cannot be reached and the file is not in the cache",
            "go online (unset HF_HUB_OFFLINE), or give the path of a config.json",
        ),
        errors.EntryNotFoundError: (
            "the repository holds no config.json",
            "choose a repository in Transformers' format",
        ),
    }
    try:
        return hf_hub_download(repo_id, "config.json", local_files_only=not _answers(repo_id))
    except (
        *(errors.EntryNotFoundError, errors.HfHubHTTPError, errors.HFValidationError),
        OSError,
    ) as error:
        other = " ".join(str(error).split())[:200], "go online, or give the path of a config.json"
        known = (text for kind, text in said.items() if isinstance(error, kind))
        raise _unreachable(repo_id, *next(known, other)) from error


def _answers(repo_id: str) -> bool:
    """Whether the hub has the configuration; False where it cannot be reached.

    It is asked once: to download what is not in the cache, its client asks again for a minute.

    Raises:
        HfHubHTTPError: the hub's answer is no, and the file is not in the cache.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        get_hf_file_metadata(hf_hub_url(repo_id, "config.json"), timeout=_HUB_SECONDS)
    except errors.HFValidationError:
        raise
    except errors.HfHubHTTPError:
        if not isinstance(try_to_load_from_cache(repo_id, "config.json"), str):
            raise
        return False
    except Exception:
        # What the client's own client raises has changed with its versions.
        logger.info("the hub was not reached", exc_info=True)
        return False
    return True


_HUB_SECONDS = 5.0


def _unreachable(repo_id: str, reason: str, remedy: str) -> ConfigError:
    near = nearest_names(repo_id)
    return ConfigError(
        f"The configuration of {show(repo_id)} cannot be had from the Hugging Face hub: {reason}. "
        "Allowed: a name that --help lists, a local model folder, a config.json, or a hub id. "
        + (f"Known names like it: {', '.join(near)}. " if near else "")
        + f"Remedy: check the spelling, or {remedy}."
    )


def nearest_names(typed: str) -> list[str]:
    """Returns names of shipped models and of the checkpoints of `sppo check --list` like `typed`.

    The best first, at most three.
    """
    listed = resources.files("sppo_hf.cli").joinpath("checkpoints.json").read_text("utf-8")
    names = [*shipped_models(), *(row["name"] for row in json.loads(listed)["checkpoints"])]

    def likeness(name: str) -> float:
        pairs = [(name.lower(), typed.lower())]
        if "/" not in typed:
            pairs.append((name.lower().rpartition("/")[2], typed.lower()))
        return max(SequenceMatcher(None, *pair).ratio() for pair in pairs)

    ranked = sorted(((likeness(name), name) for name in names), key=lambda pair: -pair[0])
    return [name for like, name in ranked[:3] if like >= _ALIKE]


_ALIKE = 0.7
"""Share of letters in common from which on a name may have been meant."""


def _num_chunks(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return text
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0:
        return int(text)
    raise ConfigError(
        f"--num-chunks is {show(text)}. Allowed: a whole number above zero, or auto. Remedy: use "
        "auto, which takes the number of chunks that is fastest."
    )


def _budget(option: str, text: str | None, total_bytes: int | None) -> int | None:
    """A budget in bytes; what is not given is the profile's."""
    if text is None:
        return None
    return parse_bytes(read_budget(text), field=option, total_bytes=total_bytes)
