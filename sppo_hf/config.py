"""SPPOConfig: every setting of sppo_hf, checked when it is made, in and out of YAML and dicts.

This file knows what settings there are, and nothing of torch, models or devices. Whether a setting
fits a model, an input or a machine (lengths that sum, budgets that hold, backends that are there)
is decided by the rooms that see those.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import yaml

from sppo_hf.errors import ConfigError
from sppo_hf.reading import MAX_SETTINGS_BYTES, parse_yaml, read_text, write_yaml
from sppo_hf.registry import ATTENTION_BACKENDS, OFFLOAD_POLICIES, SCHEDULES, TIERS, Registry
from sppo_hf.rules import (
    Rule,
    budget,
    choice,
    choice_of,
    count,
    flag,
    integer,
    parse_bytes,
    refuse,
    say,
    show,
    text,
    whole_numbers,
)

__all__ = ["SPPOConfig", "field_help", "parse_bytes"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SPPOConfig:
    """All settings of a run. Immutable; every value is checked here, each by itself and together.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or settings contradict
            each other.
    """

    num_chunks: int | Literal["auto"] = "auto"
    """How many chunks every sequence is cut into; "auto" decides by length and device."""

    chunk_lengths: tuple[int, ...] | None = None
    """The chunks' lengths in tokens, first to last; they must sum to the sequence's length."""

    chunk_tokens: int | None = None
    """Tokens per chunk; the last chunk of a sequence is as short as it needs to be."""

    partition: Literal["auto", "flops", "even"] = "auto"
    """How chunks are cut: "flops" same work, "even" same tokens; "auto" is "even" on one device."""

    order: Literal["auto", "by_layer", "by_chunk"] = "auto"
    """What runs first: all chunks of a layer, or all layers of a chunk, as a pipeline must."""

    offload: str = "auto"
    """What leaves the device: "auto" as the solver decides, "sppo" by the paper's rule."""

    offload_kv: Literal["auto", "none", "full"] = "auto"
    """Whether keys, values and their gradients leave the device too and are streamed back."""

    offload_dir: str | None = None
    """Folder on a fast disk for what host memory cannot hold; None uses no disk."""

    offload_tier: str = "auto"
    """Where saved activations that leave the device go: "auto" is the nearest with room. Keys and
    values go there only where the host has no room."""

    offload_checksum: bool = True
    """Whether bytes that went to disk are checked when they return, by the disk's own threads;
    damage is then an OffloadError and never a wrong gradient."""

    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """What backward computes again instead of keeping all: "selective" elementwise work, "full"
    layers without attention, which "auto" runs again only where nothing fits otherwise."""

    attention_once: bool = False
    """Whether attention never runs again in backward. A batch that fits in no other way is refused
    where the settings name budgets, and warned about where they leave them to the machine."""

    weights: Literal["auto", "device", "host"] = "auto"
    """Where layers' weights rest: on the "host" they come for a layer's forward and backward;
    "auto" takes it where a plan does not fit otherwise. Not with micro_batch_size."""

    optimizer: Literal["auto", "device", "host"] = "auto"
    """Where trained weights rest and are updated, with gradients and optimizer states: on the
    "host" the processor does the optimizer's step; "auto" as with weights, and where those rest."""

    attention_backend: str = "auto"
    """Attention kernel by name; "auto" takes the fastest that is exact for model and device."""

    layer_kernels: Literal["auto", "none"] = "auto"
    """Kernels of norms and gated activations: "auto" takes Liger's on CUDA where it is installed
    and proven equal on this device, "none" the model's own code."""

    compile: bool = False
    """Whether norms and gated MLPs of decoder layers are compiled (torch.compile, in place of
    layer_kernels). Plans then never keep the outputs of matrix products alone. One device."""

    micro_batch_size: int | None = None
    """Rows of the batch that go through the chunks together; None takes all rows at once, and in a
    pipeline one row each."""

    sp_size: int = 1
    """Ranks that share every sequence: each has a part of every chunk's tokens, and in attention a
    part of the heads."""

    sp_across_nodes: bool = False
    """Whether ranks that share a sequence may lie on several machines. Every layer then exchanges
    every chunk's tokens over the network, so a launch that would is refused otherwise."""

    pp_size: int = 1
    """Ranks of a pipeline that the model's layers are spread over; 1 keeps the model whole."""

    pp_schedule: str = "auto"
    """Order of forwards and backwards in a pipeline; "auto" is "seq1f1b", or what a simulation
    finds faster where speeds are known."""

    pp_virtual_stages: int = 1
    """Stages of each rank of a pipeline; above 1 for "interleaved_seq1f1b" alone."""

    pp_msp: Literal["auto", "off", "on"] = "auto"
    """Whether ranks share the units that fill and drain a pipeline (multiplexed sequence
    partitioning): "on" in every training step with the model's own loss; "auto" where speeds are
    known and a simulation finds it faster. Each rank then holds all frozen weights."""

    pp_layers: tuple[int, ...] | None = None
    """Decoder layers of each stage, first to last; None balances the stages."""

    pp_timeout_seconds: int = 600
    """Seconds without a sign of life after which the other ranks of a pipeline end the run."""

    device_memory: int | float | str | None = None
    """Budget on the device: "80GiB", bytes, or a fraction such as 0.9; None takes what is free."""

    host_memory: int | float | str | None = None
    """Budget in host memory: "80GiB", bytes, or a fraction such as 0.5; None takes what is free."""

    disk_memory: int | float | str | None = None
    """Budget in offload_dir: "1TiB", bytes, or a fraction such as 0.5; None takes what is free."""

    hardware: str | None = None
    """Speeds to plan with: a shipped profile ("h100") or a file; None takes what was calibrated."""

    correct_plan: bool = True
    """Whether modes are planned anew, once, with the speeds of the first steps."""

    use_pin_memory: bool = True
    """Whether host copies live in pinned (page-locked) memory, which copies need to overlap."""

    use_streams: bool = True
    """Whether copies run on CUDA streams of their own; False is slower and helps to debug."""

    min_offload_size: int = 1024
    """Tensors with fewer elements than this stay on the device."""

    loss_tile_tokens: int | Literal["auto"] = "auto"
    """Tokens whose logits exist at the same time while the loss is computed."""

    layer_tile_tokens: int | Literal["auto"] = "auto"
    """Tokens on which MLPs, norms and adapters of a layer run at once, inside a chunk; 0: all."""

    return_logits: bool = False
    """Whether the output carries the logits of the whole sequence, which can take gigabytes."""

    show_plan: bool = True
    """Whether a table of the plan is printed before the first step."""

    trace_dir: str | None = None
    """Folder for what every rank did in its last step: `rank0.actions`, and when, as a trace for
    ui.perfetto.dev; None keeps nothing."""

    planned_for: str | None = None
    """What `sppo plan --write` wrote a file's settings for; checked against what is run. Files
    written by hand have none."""

    show_progress: bool = True
    """Whether a step that takes more than a few seconds shows a progress bar of its chunks."""

    log_metrics: bool = True
    """Whether tokens/s, TFLOPS, memory and stalls are added to the Trainer's logs."""

    def __post_init__(self) -> None:
        """Check each setting, then the settings that must agree."""
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule(name, getattr(self, name)))
        _check_one_way_to_cut(self)
        _check_tiles(self)
        _check_pipeline(self)
        _check_places(self)
        _check_offload_tier(self)
        if self.disk_memory is not None and self.offload_dir is None:
            raise ConfigError(
                f"disk_memory={show(self.disk_memory)} is a budget in offload_dir, which is not "
                "set, so that no disk is used. Allowed: disk_memory=None without offload_dir. "
                "Remedy: name a folder on a fast local disk as offload_dir, or drop disk_memory."
            )
        if self.pp_msp == "on":
            _check_multiplexing(self)

    @property
    def sharing_ranks(self) -> int:
        """Ranks that share every batch: those of a pipeline and of its sequences."""
        return self.pp_size * self.sp_size

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "SPPOConfig":
        """Build a config from a mapping of setting names to values; absent ones keep defaults.

        Raises:
            ConfigError: a key is unknown (the message names the nearest valid one), or a value
                is refused.
        """
        if not isinstance(cast(object, settings), Mapping):
            raise ConfigError(
                f"The settings are {say(settings)}, but must be a mapping of names to values. "
                f"Remedy: write one 'name: value' per setting. {_valid_keys()}"
            )
        for key, value in settings.items():
            if key not in _RULES:
                _refuse_key(key, value)
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain JSON types; `from_dict` takes them back unchanged."""
        settings = {name: getattr(self, name) for name in _RULES}
        for name in ("chunk_lengths", "pp_layers"):
            if settings[name] is not None:
                settings[name] = list(settings[name])
        return settings

    @property
    def host_resident(self) -> tuple[bool, bool]:
        """Whether layers' frozen weights, and trained ones with their optimizer, rest on the host.

        "auto" of the optimizer follows the weights: it works where they rest.
        """
        frozen = self.weights == "host"
        return frozen, self.optimizer == "host" or (frozen and self.optimizer == "auto")

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> "SPPOConfig":
        """Read a config from a YAML file of `name: value` lines; an empty file is all defaults.

        Raises:
            ConfigError: the file cannot be read, is no regular file, has more than 128 KiB, is not
                YAML, is not a mapping, says a setting twice, or holds a setting that is refused.
                The message names the file.
        """
        text = read_text(
            path,
            what="settings file",
            max_bytes=MAX_SETTINGS_BYTES,
            remedy="give the path of a YAML file with one 'name: value' per line",
        )
        try:
            settings = parse_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{fspath(path)} is not readable as YAML: {' '.join(str(error).split())}. "
                "Remedy: write one 'name: value' per line; lists look like [512, 512]."
            ) from error
        try:
            return cls.from_dict(cast(Mapping[str, Any], {} if settings is None else settings))
        except ConfigError as error:
            raise ConfigError(f"{fspath(path)}: {error}") from error

    def to_yaml(self, path: str | PathLike[str]) -> None:
        """Write all settings to a YAML file that `from_yaml` reads back to an equal config."""
        with Path(path).open("w", encoding="utf-8") as file:
            write_yaml(self.to_dict(), file)

    @property
    def offload_is_partial(self) -> bool:
        """Whether `offload` is a rule by which some activations leave and others stay."""
        facts = OFFLOAD_POLICIES.facts(self.offload)
        return bool(facts.get("keeps") and facts.get("leaves"))

    def replace(self, **changes: Any) -> "SPPOConfig":
        """Return a copy with some settings changed, checked anew.

        Raises:
            ConfigError: as `from_dict`.
        """
        return self.from_dict({**self.to_dict(), **changes})


PLAN_VERSION = 1
"""Of what `sppo plan --write` writes; another one may mean other things by the same settings."""


def written_plan(field: str, value: object) -> object:
    """Rule for None or what `sppo plan --write` wrote: "plan 1: MODEL; N tokens"."""
    if value is None:
        return None
    found = re.fullmatch(r"plan (\d{1,9}): .{1,500}; \d{1,12} tokens", str(value))
    if not isinstance(value, str) or found is None:
        refuse(
            field,
            value,
            allowed="None, or the line that `sppo plan --write` wrote",
            remedy=f"drop {field}, which settings written by hand do not need",
        )
    if int(found[1]) != PLAN_VERSION:
        raise ConfigError(
            f"{field} is {show(value)}: the file is of version {found[1]} of written plans, which "
            f"another sppo wrote. Allowed: version {PLAN_VERSION}. Remedy: write it again with "
            f"`sppo plan ... --write` of this sppo, or drop {field} if its settings are right."
        )
    return value


@cache
def _helps() -> dict[str, str]:
    """Collect the docstring under each field of SPPOConfig, which Python itself throws away."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(SPPOConfig))).body
    assert isinstance(tree, ast.ClassDef), "the source of a class parses to a class"
    helps: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(below, ast.Expr), f"{field.target.id} has no docstring under it"
            assert isinstance(below.value, ast.Constant), f"{field.target.id} has no docstring"
            helps[field.target.id] = inspect.cleandoc(str(below.value.value))
    return helps


def field_help(name: str) -> str:
    """Return a setting's help text: the docstring under its field, the only place it is written.

    Raises:
        ConfigError: there is no such setting.
    """
    if name not in _RULES:
        _refuse_key(name)
    registry = _REGISTRIES.get(name)
    names = "" if registry is None else f" One of auto, {', '.join(registry.names())}."
    return _helps()[name] + names


_REGISTRIES: dict[str, Registry[Any]] = {
    "attention_backend": ATTENTION_BACKENDS,
    "offload": OFFLOAD_POLICIES,
    "pp_schedule": SCHEDULES,
}
"""Settings whose values other files add to."""


def _on_or_off(name: str, value: object) -> str:
    # YAML reads a bare on as true.
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return str(choice("auto", "off", "on")(name, word))


def _away_tier(name: str, value: object) -> str:
    return str(choice("auto", *(tier for tier in TIERS.names() if tier != "device"))(name, value))


# What may each setting be?
_RULES: dict[str, Rule] = {
    "num_chunks": integer(1, "auto"),
    "chunk_lengths": whole_numbers("tokens", instead=", or use num_chunks or chunk_tokens"),
    "chunk_tokens": integer(1, None),
    "partition": choice("auto", "flops", "even"),
    "order": choice("auto", "by_layer", "by_chunk"),
    "offload": choice_of(_REGISTRIES["offload"]),
    "offload_kv": choice("auto", "none", "full"),
    "offload_dir": text,
    "offload_tier": _away_tier,
    "offload_checksum": flag,
    "recompute": choice("auto", "none", "selective", "full"),
    "attention_once": flag,
    "weights": choice("auto", "device", "host"),
    "optimizer": choice("auto", "device", "host"),
    "attention_backend": choice_of(_REGISTRIES["attention_backend"]),
    "layer_kernels": choice("auto", "none"),
    "compile": flag,
    "micro_batch_size": integer(1, None),
    "sp_size": count(1),
    "sp_across_nodes": flag,
    "pp_size": count(1),
    "pp_schedule": choice_of(_REGISTRIES["pp_schedule"]),
    "pp_virtual_stages": count(1),
    "pp_msp": _on_or_off,
    "pp_layers": whole_numbers("layers"),
    "pp_timeout_seconds": count(1),
    "device_memory": budget,
    "host_memory": budget,
    "disk_memory": budget,
    "hardware": text,
    "correct_plan": flag,
    "use_pin_memory": flag,
    "use_streams": flag,
    "min_offload_size": count(0),
    "loss_tile_tokens": integer(1, "auto"),
    "layer_tile_tokens": integer(0, "auto"),
    "return_logits": flag,
    "show_plan": flag,
    "trace_dir": text,
    "planned_for": written_plan,
    "show_progress": flag,
    "log_metrics": flag,
}


def _check_one_way_to_cut(config: SPPOConfig) -> None:
    """Refuse settings that say in more than one way where the chunks end."""
    ways = {
        name: getattr(config, name)
        for name, unset in (("num_chunks", "auto"), ("chunk_lengths", None), ("chunk_tokens", None))
        if getattr(config, name) != unset
    }
    if len(ways) > 1:
        seen = " and ".join(f"{name}={show(value)}" for name, value in ways.items())
        raise ConfigError(
            f"{seen} contradict each other: each alone decides where chunks end. Allowed: at most "
            "one of num_chunks, chunk_lengths, chunk_tokens. "
            f"Remedy: keep one of {', '.join(ways)}."
        )
    tokens = config.chunk_lengths
    if tokens and config.partition == "even" and max(tokens) - min(tokens) > 1:
        raise ConfigError(
            f"partition='even' contradicts chunk_lengths={show(tokens)}, which are not even. "
            f"Allowed: either alone. Remedy: drop partition, or use num_chunks={len(tokens)}."
        )


def _check_tiles(config: SPPOConfig) -> None:
    """Refuse tiles inside layers beside what is not proven with them."""
    tile_tokens = config.layer_tile_tokens
    if tile_tokens in ("auto", 0):
        return
    for name, ranks in (("pp_size", config.pp_size), ("sp_size", config.sp_size)):
        if ranks > 1:
            raise ConfigError(
                f"layer_tile_tokens={tile_tokens} contradicts {name}={ranks}: layers in tiles are "
                f"proven on one device alone. Allowed: layer_tile_tokens='auto' or 0 with {name} "
                "above 1. Remedy: drop one of them."
            )
    if config.compile:
        raise ConfigError(
            f"layer_tile_tokens={tile_tokens} contradicts compile=True: compiled norms and MLPs "
            "run on whole chunks. Allowed: layer_tile_tokens='auto' or 0 with compile. Remedy: "
            "drop one of them."
        )


def _check_places(config: SPPOConfig) -> None:
    """Refuse weights on the host where layers are walked several times."""
    for name in ("weights", "optimizer"):
        if config.pp_size > 1 and getattr(config, name) == "host":
            raise ConfigError(
                f"{name}='host' contradicts pp_size={config.pp_size}: a pipeline needs its weights "
                f"once for every chunk. Allowed: {name}='auto' or 'device' with pp_size above 1. "
                f"Remedy: drop {name}, or use pp_size=1."
            )
    if config.weights == "host" and config.sp_size > 1:
        raise ConfigError(
            f"weights='host' contradicts sp_size={config.sp_size}: ranks that share sequences go "
            "chunk by chunk, and all weights would come once for every chunk. Allowed: "
            "weights='device', or sp_size=1. Remedy: drop weights; FSDP2 over the same ranks "
            "shards them."
        )
    if config.weights == "host" and config.order == "by_chunk":
        raise ConfigError(
            "weights='host' contradicts order='by_chunk', which would bring all weights once for "
            "every chunk. Allowed: order='auto' or 'by_layer' with weights='host'. Remedy: drop "
            "order."
        )
    if config.weights == "host" and config.micro_batch_size is not None:
        # A weight that has been away has another accumulator in autograd's graph for each of them.
        raise ConfigError(
            f"weights='host' contradicts micro_batch_size={config.micro_batch_size}: all weights "
            "would come once for every group of rows, and hooks on them would see the gradient of "
            "each group by itself. Allowed: weights='auto' or 'device' with micro_batch_size. "
            "Remedy: drop micro_batch_size, and give batches of fewer rows (under a Trainer "
            "per_device_train_batch_size, with more gradient_accumulation_steps)."
        )


def _check_pipeline(config: SPPOConfig) -> None:
    """Refuse settings of several ranks that need others."""
    if config.sp_across_nodes and config.sp_size == 1:
        raise ConfigError(
            "sp_across_nodes=True is of sequences that ranks share, but sp_size=1 shares none. "
            "Allowed: sp_across_nodes=False with sp_size=1. Remedy: set sp_size to the number of "
            "ranks that share a sequence, or drop sp_across_nodes."
        )
    if config.sp_size > 1 and config.order == "by_layer":
        raise ConfigError(
            f"order='by_layer' contradicts sp_size={config.sp_size}: ranks that share a sequence "
            "exchange the tokens of one chunk after the other. Allowed: order='auto' or 'by_chunk' "
            "with sp_size above 1. Remedy: drop order, or use sp_size=1."
        )
    if config.pp_size > 1 and config.order == "by_layer":
        raise ConfigError(
            f"order='by_layer' contradicts pp_size={config.pp_size}: a stage must pass a chunk on "
            "before it has seen the next one, so a pipeline goes chunk by chunk. Allowed: "
            "order='auto' or 'by_chunk' with pp_size above 1. Remedy: drop order, or use pp_size=1."
        )
    if config.compile and config.recompute == "selective":
        raise ConfigError(
            "compile=True contradicts recompute='selective': what sees matrix products does not "
            "run beside compiled code. Allowed: recompute='auto', 'none' or 'full' with compile. "
            "Remedy: drop one of them."
        )
    if config.pp_size > 1 and config.compile:
        raise ConfigError(
            f"compile=True contradicts pp_size={config.pp_size}: compiled parts are not proven in "
            "a pipeline. Allowed: either alone. Remedy: drop compile."
        )
    seen = f"pp_virtual_stages={config.pp_virtual_stages}"
    interleaved = SCHEDULES.names_with("interleaved")
    if config.pp_virtual_stages > 1 and config.pp_schedule not in interleaved:
        raise ConfigError(
            f"{seen} contradicts pp_schedule={config.pp_schedule!r}, which puts one stage on a "
            f"rank. Allowed: more than one with pp_schedule={' or '.join(map(repr, interleaved))} "
            "alone. Remedy: choose that schedule, or drop pp_virtual_stages."
        )
    stages = config.pp_size * config.pp_virtual_stages
    if config.pp_size > 1 and config.pp_layers and len(config.pp_layers) != stages:
        raise ConfigError(
            f"pp_layers={show(config.pp_layers)} has {len(config.pp_layers)} numbers, but "
            f"pp_size={config.pp_size} x pp_virtual_stages={config.pp_virtual_stages} makes "
            f"{stages} stages. Allowed: the layers of each stage, first to last. Remedy: give "
            f"{stages} numbers, or drop pp_layers."
        )
    for name, unset in (("pp_schedule", "auto"), ("pp_virtual_stages", 1), ("pp_layers", None)):
        value = getattr(config, name)
        if config.pp_size == 1 and value != unset:
            raise ConfigError(
                f"{name}={show(value)} is of a pipeline, but pp_size=1 makes none. Allowed: "
                f"{name}={show(unset)} with pp_size=1. Remedy: set pp_size to the number of ranks "
                f"that share the model, or drop {name}."
            )


def _check_offload_tier(config: SPPOConfig) -> None:
    """Refuse a tier behind the host without a folder for it."""
    if config.offload_tier not in ("auto", "host") and config.offload_dir is None:
        raise ConfigError(
            f"offload_tier={config.offload_tier!r} needs a folder, but offload_dir is None. "
            "Allowed: offload_tier='auto' or 'host' without one. Remedy: set offload_dir to a "
            "folder on a fast disk, or drop offload_tier."
        )
    if config.offload_tier != "auto" and config.offload == "none":
        raise ConfigError(
            f"offload_tier={config.offload_tier!r} says where what is offloaded goes, but "
            "offload='none' offloads nothing. Allowed: offload_tier='auto' with offload='none'. "
            "Remedy: drop one of them."
        )


def _check_multiplexing(config: SPPOConfig) -> None:
    """Refuse settings that units shared by ranks do not go with."""
    chunks = len(config.chunk_lengths or ()) or config.num_chunks
    against = {
        "pp_schedule": (config.pp_schedule != "auto", "'auto'", "it is an order of its own"),
        "sp_size": (config.sp_size > 1, "1", "it divides sequences by itself"),
    }
    for name, (refused, allowed, reason) in against.items():
        if refused:
            raise ConfigError(
                f"pp_msp='on' contradicts {name}={show(getattr(config, name))}: {reason}. Allowed: "
                f"{name}={allowed} with pp_msp='on'. Remedy: drop {name}, or pp_msp='off'."
            )
    if config.pp_size == 1:
        raise ConfigError(
            "pp_msp='on' is of a pipeline, but pp_size=1 makes none. Allowed: pp_msp='auto' or "
            "'off' with pp_size=1. Remedy: set pp_size to the number of ranks that share the "
            "model, or drop pp_msp."
        )
    if chunks != "auto" and chunks < config.pp_size:
        name = "chunk_lengths" if config.chunk_lengths else "num_chunks"
        raise ConfigError(
            f"pp_msp='on' contradicts {name}={show(getattr(config, name))}: ranks share the first "
            f"and the last chunks of each stage, and {chunks} are fewer than pp_size="
            f"{config.pp_size}. Allowed: as many chunks as ranks, or more. Remedy: more chunks, or "
            "pp_msp='off'."
        )


def _refuse_key(key: object, value: object = None) -> NoReturn:
    """Raise for a setting that does not exist."""
    seen = f"Unknown setting {show(key)}" + ("" if value is None else f" (value {show(value)})")
    nearest = difflib.get_close_matches(show(key), _RULES, n=1, cutoff=0)[0]
    raise ConfigError(f"{seen}. Remedy: use the nearest valid key, {nearest!r}. {_valid_keys()}")


def _valid_keys() -> str:
    """List the settings that exist."""
    return f"Valid keys: {', '.join(_RULES)}."
