"""What the commands share: options, the plan request that these make, models by name, output.

Imports the hub's client only where MODEL is a hub id, and torch only for a model that was never
traced.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from difflib import SequenceMatcher
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from sppo_hf.config import MORE_TIERS, SPPOConfig, parse_bytes
from sppo_hf.errors import ConfigError, SPPOError
from sppo_hf.planning.config_file import (
    find_config,
    load_config,
    shipped_models,
    text_config,
)
from sppo_hf.planning.feasibility import DTYPE_BYTES, CastBy, request_for
from sppo_hf.planning.hardware import HardwareProfile, load_profile
from sppo_hf.planning.model_profile import ModelProfile, Training
from sppo_hf.planning.plan import PlanRequest
from sppo_hf.planning.tiers import TIERS
from sppo_hf.rules import read_budget, show

logger = logging.getLogger(__name__)

EXIT_FITS, EXIT_DOES_NOT_FIT, EXIT_BAD_INPUT = 0, 1, 2
DEFAULT_HARDWARE = "h100-80gb"

ASSUMED_HOST_MEMORY = "128GiB"
"""Host memory per device where a profile does not say: about what small GPU servers have."""

PLACEHOLDER_FOLDER = "--disk-memory"
"""Stands for `offload_dir` where only the size of the disk is known."""

MAX_TOKENS = 2**31 - 1
"""Longest row that is planned for."""

_WIDTH = 100
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([KM]?)", re.IGNORECASE)
_TOKENS_PER_UNIT = {"": 1, "K": 1024, "M": 1024**2}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_TIMEOUT_SECONDS = 5.0
_MIN_SIMILARITY = 0.7
"""Least share of letters in common for a name to be suggested."""

Place = Literal["auto", "device", "host"]

# -- options of several commands -------------------------------------------------------------

Hardware = Annotated[
    str | None,
    typer.Option(
        help="A device (h100, a100-40gb, l40s, rtx-4090 ...; a wrong name lists all) or a file of"
        f" `sppo calibrate --output`. \\[default: {DEFAULT_HARDWARE}]",
        show_default=False,
    ),
]
Lora = Annotated[
    int | None,
    typer.Option(help="Rank of LoRA adapters on all linear layers; without it all weights train."),
]
MicroBatchSize = Annotated[int, typer.Option(min=1, max=2**20, help="Rows of a micro-batch.")]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"], typer.Option(help="Dtype of weights and compute.")
]
Partition = Annotated[Literal["auto", "flops", "even"], typer.Option(help="How chunks are cut.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def with_options(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: the fields of a dataclass become options of it.

    typer reads the options of a command from its function's signature. So that commands can share
    options, these are declared once, as `Annotated` fields of a dataclass. The decorated function
    takes the filled dataclass as its first argument; its other parameters are options of its own.

    Args:
        kind: The dataclass.
    """
    hints = get_type_hints(kind, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
        if hasattr(hints[field.name], "__metadata__")
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**values: Any) -> None:
            shared = {option.name: values.pop(option.name) for option in options}
            command(kind(**shared), **values)

        own = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own]
        run.__signature__ = inspect.Signature([*options, *own])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningArguments:
    """Options of `sppo estimate`, and of `sppo plan` among others, as they were typed."""

    model: Annotated[
        str,
        typer.Argument(
            help="A local model folder, a config.json, a shipped name (llama-3.1-8b, llama-3.1-70b,"
            " qwen3-4b, qwen3-30b-a3b, smollm2-135m, gpt-oss-20b), or a hub id.",
            metavar="MODEL",
        ),
    ]
    seq_len: Annotated[
        str, typer.Option(help="Tokens of each row: 131072, 128K (x 1024) or 1M (x 1024 x 1024).")
    ]
    device_memory: Annotated[
        str | None,
        typer.Option(help="Budget on the device, 80GiB, or a share of the profile's, 0.9."),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Budget in host memory, 256GiB. By default most of what a calibrated machine has;"
            f" {ASSUMED_HOST_MEMORY} for each device of a shipped profile, which does not say.",
            show_default=False,
        ),
    ] = None
    disk_memory: Annotated[
        str | None,
        typer.Option(help="Budget on a fast disk, 1TiB; no disk is used by default."),
    ] = None
    more_tiers: Annotated[
        str | None,
        typer.Option(
            help="Budgets of further registered tiers, zip=8GiB; none is used by default."
        ),
    ] = None
    offload_dir: str | None = None
    """An option of `sppo plan` only."""
    images: bool = False
    """An option of `sppo estimate` only."""
    hardware: Hardware = None
    lora: Lora = None
    micro_batch_size: MicroBatchSize = 1
    accumulate: Annotated[
        bool,
        typer.Option(
            "--accumulate",
            help="Gradients are accumulated over batches: backward holds those of two batches.",
        ),
    ] = False
    dtype: Dtype = "bfloat16"
    partition: Partition = "auto"
    num_chunks: Annotated[str, typer.Option(help="Number of chunks, or auto.")] = "auto"
    recompute: Annotated[
        Literal["auto", "none", "selective", "full"] | None,
        typer.Option(help="What backward recomputes. \\[default: auto]"),
    ] = None
    attention_once: Annotated[
        bool,
        typer.Option(
            "--attention-once",
            help="Never recompute attention, not even where nothing fits otherwise.",
        ),
    ] = False
    offload: str = "auto"
    """An option of `sppo plan` only."""
    offload_kv: Annotated[
        Literal["auto", "none", "full"], typer.Option(help="Whether K/V are offloaded too.")
    ] = "auto"
    weights: Annotated[
        Place,
        typer.Option(
            help="Where layers' weights are kept: from the host they are copied when used. auto:"
            " on the host only where not all fits on the device."
        ),
    ] = "auto"
    optimizer: Annotated[
        Place,
        typer.Option(
            help="Where trained weights are updated, and their gradients and optimizer states kept."
        ),
    ] = "auto"

    @property
    def title(self) -> str:
        """The model for a table's title: "Llama-3.1-8B, LoRA rank 16, float16"."""
        path = Path(self.model)
        name = path.parent.name or path.name if path.name == "config.json" else self.model
        name = name if len(name) <= _WIDTH else f"…{name[-_WIDTH:]}"
        lora = "" if self.lora is None else f", LoRA rank {self.lora}"
        lora += ", rows with images" if self.images else ""
        return name + lora + ("" if self.dtype == "bfloat16" else f", {self.dtype}")

    def plan_request(self, *, devices_of_host: int = 1, cast_by: CastBy = "nothing") -> PlanRequest:
        """Read the model's configuration and the hardware profile, and check every value.

        Args:
            devices_of_host: Devices that share the host memory, for what is assumed of it.
            cast_by: What casts float32 adapters.

        Raises:
            ConfigError: A value is refused, or a file is missing or damaged.
            UnsupportedModelError: The engine refuses such models.
        """
        profile = load_profile(self.hardware or DEFAULT_HARDWARE)
        return request_for(
            read_model(self.model),
            self._config(profile, devices_of_host),
            profile=profile,
            total_tokens=parse_tokens(self.seq_len),
            batch_rows=self.micro_batch_size,
            accumulates=self.accumulate,
            images=self.images,
            dtype_name=self.dtype,
            lora_rank=self.lora,
            cast_by=cast_by,
            trace=trace_unknown_model,
        )

    def hardware_note(self, request: PlanRequest, *, devices_of_host: int = 1) -> str:
        """Name in one line the profile that the figures are from, and what is assumed beside it."""
        profile = request.device.profile
        assert profile is not None, "a request from the command line has a profile"
        source = "estimated from public figures" if profile.estimated else "measured"
        if profile.partly_measured:
            source = "measured on one, disk and links estimated from public figures"
        note = f"Hardware: {profile.name}, {source}"
        if self.hardware is None:
            note += "; it is the default, --hardware names another"
        if self._assumed_host_bytes(profile) is not None:
            each = " for each device" if devices_of_host > 1 else ""
            note += (
                f". Host memory: {ASSUMED_HOST_MEMORY}{each} is assumed; --host-memory sets the"
                " machine's"
            )
        if self.images:
            note += ". What the encoders themselves need is not counted"
        if is_quantized(read_model(self.model)):
            note += (
                f". Weights are counted in {self.dtype}: this checkpoint's are quantized, which"
                " takes less memory and more time than is said here"
            )
        return note + "."

    def _assumed_host_bytes(self, profile: HardwareProfile) -> int | None:
        """Host memory to assume for one device; None where command line or profile say it."""
        is_known = self.host_memory is not None or profile.host_bytes is not None
        if is_known or profile.kind == "cpu":
            return None
        return parse_bytes(ASSUMED_HOST_MEMORY, field="--host-memory", total_bytes=None)

    def _config(self, profile: HardwareProfile, devices_of_host: int) -> SPPOConfig:
        # The fixed policies are the paper's: they decide what is offloaded, and recompute nothing.
        recompute = self.recompute or ("auto" if self.offload == "auto" else "none")
        budgets: dict[str, Any] = {
            tier.setting: _parse_budget(
                tier.option, getattr(self, tier.setting), tier.profiled_bytes(profile)
            )
            for tier in TIERS.values()
            if tier.setting != MORE_TIERS
        }
        assumed_bytes = self._assumed_host_bytes(profile)
        if assumed_bytes is not None:
            budgets["host_memory"] = assumed_bytes * devices_of_host
        return SPPOConfig(
            num_chunks=_parse_num_chunks(self.num_chunks),
            partition=self.partition,
            offload=self.offload,
            offload_kv=self.offload_kv,
            weights=self.weights,
            optimizer=self.optimizer,
            recompute=recompute,
            attention_once=self.attention_once,
            **budgets,
            more_tiers=self.more_tiers,
            # Planning writes nothing; it only asks whether there is a disk.
            offload_dir=self.offload_dir
            or (None if self.disk_memory is None else PLACEHOLDER_FOLDER),
        )


# -- reading ---------------------------------------------------------------------------------


def parse_tokens(text: str) -> int:
    """Parse a number of tokens: "131072", "128K" (K = 1024) or "1M" (M = 1024 x 1024).

    Raises:
        ConfigError: It is no such text, no whole number above zero, or above `MAX_TOKENS`.
    """
    match = _TOKENS.fullmatch(text.strip().replace("_", "").replace(",", ""))
    tokens = float(match[1]) * _TOKENS_PER_UNIT[match[2].upper()] if match else 0.0
    if not 1 <= tokens <= MAX_TOKENS or not tokens.is_integer():
        raise ConfigError(
            f"--seq-len is {show(text)}. Allowed: a whole number of tokens, 1 to {MAX_TOKENS:,}, "
            "such as 131072, 128K (K = 1024) or 1M (M = 1024 x 1024). Remedy: write one of these."
        )
    return int(tokens)


def _parse_num_chunks(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return text
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0:
        return int(text)
    raise ConfigError(
        f"--num-chunks is {show(text)}. Allowed: a whole number above zero, or auto. Remedy: use "
        "auto, which takes the number of chunks that is fastest."
    )


def _parse_budget(option: str, text: str | None, total_bytes: int | None) -> int | None:
    """A budget in bytes, of which a share is of `total_bytes`; None where none was given."""
    if text is None:
        return None
    return parse_bytes(read_budget(text), field=option, total_bytes=total_bytes)


def check_figure(figure: Path | None) -> None:
    """Refuse a file name whose ending names no kind of picture.

    Raises:
        ConfigError: It is such a name.
    """
    from sppo_hf.reporting.figures import ENDINGS

    if figure is not None and figure.suffix.lower() not in ENDINGS:
        raise ConfigError(
            f"--figure is {str(figure)!r}. Allowed: a file that ends in {', '.join(ENDINGS)}, "
            "which says what kind of picture it is. Remedy: use one of these endings."
        )


def is_quantized(config: object) -> bool:
    """Whether a checkpoint's weights are quantized (to 4 bits, say), which no plan here counts."""
    return any(getattr(c, "quantization_config", None) for c in (config, text_config(config)))


def fsdp2_refusal(config: object) -> str:
    """Why FSDP2 is not planned for a checkpoint, as a sentence; "" where it is.

    Of bitsandbytes' weights Accelerate leaves integers whole on every device; other methods were
    not tried. MXFP4 is not trained, but loaded as 16 bits.
    """
    fields = [_quantization(c) for c in (config, text_config(config))]
    found = next(filter(None, fields), None)
    if found is None or found.get("quant_method") == "mxfp4":
        return ""
    storage = str(found.get("bnb_4bit_quant_storage")).removeprefix("torch.")
    if found.get("load_in_4bit") and storage in DTYPE_BYTES:
        return ""
    return (
        "FSDP2 was left out: this checkpoint's weights are quantized, and of such weights only "
        "bitsandbytes' 4 bits in a floating dtype (bnb_4bit_quant_storage: bfloat16) are known to "
        "be sharded."
    )


def _quantization(config: object) -> Mapping[str, Any] | None:
    """Settings of a configuration's quantized weights, if it has any."""
    found: Any = getattr(config, "quantization_config", None)
    if found is None or isinstance(found, Mapping):
        return found
    return vars(found)


def read_model(model: str) -> object:
    """Read the configuration of a model; no weights are read or downloaded.

    Args:
        model: A path, a shipped name or a hub id; a path that exists comes first.

    Raises:
        ConfigError: There is no such file, folder or repository, or the hub cannot be reached.
    """
    return load_config(model_path(model))


def model_path(model: str) -> Path:
    """Return the path of a model's configuration, downloaded where MODEL is a hub id."""
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


def _download(repo_id: str) -> str:
    from huggingface_hub import errors, hf_hub_download

    reasons = {
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
        return hf_hub_download(repo_id, "config.json", local_files_only=not _has_config(repo_id))
    except (
        *(errors.EntryNotFoundError, errors.HfHubHTTPError, errors.HFValidationError),
        OSError,
    ) as error:
        other = " ".join(str(error).split())[:200], "go online, or give the path of a config.json"
        known = (text for kind, text in reasons.items() if isinstance(error, kind))
        raise _unreachable(repo_id, *next(known, other)) from error


def _has_config(repo_id: str) -> bool:
    """Whether the hub has a repository's config.json; False where it cannot be reached.

    One request with a short timeout comes first, because the client's download of a file that is
    not in the cache retries for a minute.

    Raises:
        HfHubHTTPError: The hub has no such file, and it is not in the cache.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        get_hf_file_metadata(hf_hub_url(repo_id, "config.json"), timeout=_HUB_TIMEOUT_SECONDS)
    except errors.HFValidationError:
        raise
    except errors.HfHubHTTPError:
        if not isinstance(try_to_load_from_cache(repo_id, "config.json"), str):
            raise
        return False
    except Exception:
        # Which errors of its HTTP library the client lets through depends on its version.
        logger.info("the hub was not reached", exc_info=True)
        return False
    return True


def _unreachable(repo_id: str, reason: str, remedy: str) -> ConfigError:
    near = () if repo_id in _known_names() else nearest_names(repo_id)
    return ConfigError(
        f"The configuration of {show(repo_id)} cannot be had from the Hugging Face hub: {reason}. "
        "Allowed: a name that --help lists, a local model folder, a config.json, or a hub id. "
        + (f"Known names like it: {', '.join(near)}. " if near else "")
        + f"Remedy: {'check the spelling, or ' if near else ''}{remedy}."
    )


def _known_names() -> list[str]:
    """Return the names of shipped models and of well-known checkpoints."""
    listed = resources.files("sppo_hf.cli").joinpath("checkpoints.json").read_text("utf-8")
    return [*shipped_models(), *(row["name"] for row in json.loads(listed)["checkpoints"])]


def nearest_names(typed: str) -> list[str]:
    """Return up to three names of shipped models and known checkpoints like `typed`, best first.

    A name that was typed as it is listed is not among them: it needs no correction.
    """

    def similarity(name: str) -> float:
        pairs = [(name.lower(), typed.lower())]
        if "/" not in typed:
            pairs.append((name.lower().rpartition("/")[2], typed.lower()))
        return max(SequenceMatcher(None, *pair).ratio() for pair in pairs)

    ranked = sorted(
        ((similarity(name), name) for name in _known_names()), key=lambda pair: -pair[0]
    )
    near = [name for score, name in ranked if score >= _MIN_SIMILARITY and name != typed]
    return near[:3]


def trace_unknown_model(config: object, training: Training) -> ModelProfile:
    """Trace a model without a stored profile, with torch and Transformers, imported only here."""
    from sppo_hf.engine.trace_profile import trace_config

    return trace_config(config, training)


# -- output ----------------------------------------------------------------------------------


@contextmanager
def bad_input(as_json: bool, **named: object) -> Iterator[None]:
    """Turn SPPO's errors into one message on stderr (or a JSON object) and exit code 2.

    Args:
        as_json: Whether the command prints JSON.
        **named: Further entries of that object.
    """
    try:
        yield
    except SPPOError as error:
        if as_json:
            echo_json({**named, "status": "bad input", "reason": str(error)})
        else:
            message = Text.assemble(("bad input ", "red"), str(error))
            console(stderr=True).print(message, soft_wrap=True)
        raise typer.Exit(EXIT_BAD_INPUT) from error


def echo_json(data: object) -> None:
    """Print one JSON object; NaN and infinities, which JSON does not have, become null."""
    try:
        text = json.dumps(data, allow_nan=False)
    except ValueError:
        # Python writes NaN and Infinity by name, and has the reader of JSON replace them.
        data = json.loads(json.dumps(data), parse_constant=lambda _: None)
        text = json.dumps(data, allow_nan=False)
    typer.echo(text)


def console(*, stderr: bool = False) -> Console:
    """Return a console; one that is no terminal is wide enough for the tables' columns."""
    made = Console(stderr=stderr)
    if not made.is_terminal:
        made.width = max(made.width, _WIDTH)
    return made


@contextmanager
def writing(*files: Path | None) -> Iterator[None]:
    """Turn an OSError about a file that cannot be written into a ConfigError.

    Args:
        *files: The files that are written here, for errors that name none.
    """
    try:
        yield
    except OSError as error:
        path = error.filename or next(filter(None, files))
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Remedy: name a file in a writable folder."
        ) from error
