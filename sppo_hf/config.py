"""SPPOConfig: every setting of sppo_hf, checked when it is made, in and out of YAML and dicts.

Only the settings themselves are checked here. Whether a setting fits a model, a batch or a machine
(chunk lengths that must sum, budgets that must hold, kernels that must be installed) is checked
where those are known.
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
from typing import Any, Literal, NamedTuple, NoReturn, cast, get_args

import yaml

from sppo_hf.errors import ConfigError
from sppo_hf.registry import (
    ATTENTION_BACKENDS,
    OFFLOAD_POLICIES,
    SCHEDULES,
    TIERS,
    Registry,
    import_entry_points,
)
from sppo_hf.rules import (
    Rule,
    budget,
    choice,
    choice_of,
    count,
    flag,
    integer,
    parse_bytes,
    read_budget,
    refuse,
    show,
    show_typed,
    text,
    whole_numbers,
)
from sppo_hf.text_files import MAX_SETTINGS_BYTES, parse_yaml, read_text, to_yaml

__all__ = ["SPPOConfig", "field_help", "parse_bytes"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SPPOConfig:
    """All settings of a run. Immutable; every value is checked here, each by itself and together.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or settings contradict
            each other.
    """

    num_chunks: int | Literal["auto"] = "auto"
    """Number of chunks that every sequence is cut into: "auto" or a whole number from 1. "auto"
    chooses by sequence length and device. Set at most one of num_chunks, chunk_lengths and
    chunk_tokens."""

    chunk_lengths: tuple[int, ...] | None = None
    """Length of every chunk in tokens, first to last, as a list such as [512, 512, 300]. The
    lengths must sum to the sequence length. None leaves the cut to num_chunks or chunk_tokens."""

    chunk_tokens: int | None = None
    """Length of a chunk in tokens, a whole number from 1; the last chunk of a sequence is shorter
    where it must be. None leaves the cut to num_chunks."""

    partition: Literal["auto", "flops", "even"] = "auto"
    """How sequences are cut: "even" makes all chunks equally long, "flops" gives all the same work,
    so that later chunks, which see more keys, are shorter. "auto" is "flops" in a pipeline and with
    offload "sppo", else "even", or "flops" where nothing fits with "even"."""

    order: Literal["auto", "by_layer", "by_chunk"] = "auto"
    """Order of work on one device: "by_layer" runs all chunks of a layer before the next layer and
    so holds keys and values of one layer at a time, "by_chunk" runs all layers of a chunk before
    the next chunk. "auto" takes the faster one that fits, and where speeds are not known, or on a
    CPU, the one with less memory. Pipelines always go by chunk."""

    offload: str = "auto"
    """Which saved activations are offloaded from the device: "none" keeps all, "full" offloads all,
    "sppo" offloads as much of each chunk as its compute time can hide (the paper's rule), "auto"
    lets the solver decide by (layer, chunk)."""

    offload_kv: Literal["auto", "none", "full"] = "auto"
    """Whether keys, values and their gradients are offloaded too and streamed back when attention
    needs them: "none" keeps them on the device, "full" offloads those of all layers, "auto"
    offloads them where they do not fit on the device otherwise."""

    offload_dir: str | None = None
    """Folder on a fast local disk for offloaded bytes that do not fit into host memory. None uses
    no disk."""

    offload_tier: str = "auto"
    """Tier that saved activations are offloaded to, by name. "auto" uses the nearest one with free
    space. Keys and values go beyond host memory only where that is full. Tiers other than "host"
    need offload_dir or, if they have no settings of their own, more_tiers."""

    offload_checksum: bool = True
    """Whether bytes read back from disk, or another tier behind host memory, are compared with
    their checksum, on the threads that read them. Damaged bytes then raise an OffloadError instead
    of giving a wrong gradient."""

    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """What backward recomputes instead of keeping it: "none" nothing; "selective" elementwise work,
    while results of matrix products are kept; "full" whole layers except their attention, whose
    output is kept. "auto" chooses by (layer, chunk), and recomputes attention as well only where
    nothing else fits."""

    attention_once: bool = False
    """Whether attention must never be recomputed in backward. A batch that does not fit without it
    is then refused if memory budgets are set, and warned about if they are left to the machine."""

    weights: Literal["auto", "device", "host"] = "auto"
    """Where the weights of decoder layers are kept: "device", or "host", from where each layer's
    weights are copied to the device for its forward and its backward. "auto" keeps them on the
    device unless no plan fits. "host" cannot be combined with pp_size or sp_size above 1, order
    "by_chunk" or micro_batch_size."""

    optimizer: Literal["auto", "device", "host"] = "auto"
    """Where trained weights, their gradients and optimizer states are kept and updated: "device",
    or "host", where the CPU runs the optimizer step. "auto" follows weights, and moves them to the
    host also where no plan fits otherwise. "host" is not available in a pipeline."""

    attention_backend: str = "auto"
    """Attention kernel, by name. "auto" takes the fastest one that supports the model and agrees
    with the reference kernel on this device."""

    layer_kernels: Literal["auto", "none"] = "auto"
    """Kernels of norms, gated activations and rotary embedding: "auto" uses Liger's on CUDA where
    they are installed and proved equal on this device, and LoRA's second product and the sum with
    the base layer's are one matmul; "none" keeps the model's own code."""

    compile: bool = False
    """Whether torch.compile compiles norms and gated MLPs of decoder layers, instead of
    layer_kernels. One device only, and not with recompute "selective"."""

    micro_batch_size: int | None = None
    """Rows of a batch that go through the chunks together, a whole number from 1. None takes all
    rows at once, and in a pipeline one row at a time."""

    sp_size: int = 1
    """Number of ranks that share every sequence (sequence parallelism): each holds a part of every
    chunk's tokens and, inside attention, a part of the heads. 1 shares none."""

    sp_across_nodes: bool = False
    """Whether ranks that share a sequence may be on several machines. Every layer then exchanges
    the tokens of every chunk over the network, so such a launch is refused unless this is set."""

    pp_size: int = 1
    """Number of pipeline ranks that the decoder layers are distributed over. 1 keeps the model on
    one device."""

    pp_schedule: str = "auto"
    """Order of forwards and backwards in a pipeline. "auto" is "seq1f1b", or the schedule that a
    simulation finds fastest where the speeds of the devices are known."""

    pp_virtual_stages: int = 1
    """Number of pipeline stages on each rank; more than 1 only with pp_schedule
    "interleaved_seq1f1b"."""

    pp_msp: Literal["auto", "off", "on"] = "auto"
    """Whether ranks share the units of work at the beginning and end of a pipeline step, when some
    would be idle (multiplexed sequence partitioning). "on" does so in every training step that uses
    the model's own loss, "auto" where speeds are known and a simulation finds it faster. Every rank
    then holds all frozen weights."""

    pp_layers: tuple[int, ...] | None = None
    """Number of decoder layers in each pipeline stage, first to last, as a list such as [9, 8, 8,
    7]. None balances the stages."""

    pp_timeout_seconds: int = 600
    """Seconds without a sign of life from a rank after which the other ranks end the run."""

    device_memory: int | float | str | None = None
    """Memory budget on the device: a size such as "80GiB", bytes, or a fraction of the device such
    as 0.9. None uses what is free."""

    host_memory: int | float | str | None = None
    """Budget of host memory for offloaded bytes: a size such as "80GiB", bytes, or a fraction of
    the host's memory such as 0.5. None allows most of what is free, of which "auto" takes less
    where that costs at most a hundredth of a step."""

    disk_memory: int | float | str | None = None
    """Budget on the disk of offload_dir: a size such as "1TiB", bytes, or a fraction of the disk
    such as 0.5. None uses what is free."""

    more_tiers: str | None = None
    """Registered tiers without settings of their own that bytes may be offloaded to, each with its
    budget as in disk_memory: "zip=8GiB, far=0.5", or only its name for what the machine has. None
    uses none."""

    hardware: str | None = None
    """Speeds to plan with: the name of a device such as "h100" or "rtx-4090", or the path of a JSON
    file written by `sppo calibrate`. None uses what was calibrated on this machine, else public
    figures of the same device, else a rough estimate."""

    correct_plan: bool = True
    """Whether the plan is made anew, once, with the speeds that the first steps measured."""

    use_pin_memory: bool = True
    """Whether offloaded bytes are kept in pinned (page-locked) host memory. Copies overlap with
    compute only with it. CUDA only."""

    use_streams: bool = True
    """Whether copies run on CUDA streams of their own. False is slower, and helps to debug."""

    min_offload_size: int = 1024
    """Smallest tensor, in elements, that is offloaded; smaller ones are kept on the device."""

    loss_tile_tokens: int | Literal["auto"] = "auto"
    """Number of tokens whose logits exist at the same time while the loss is computed: "auto" or a
    whole number from 1. Smaller tiles need less memory and more kernel launches."""

    layer_tile_tokens: int | Literal["auto"] = "auto"
    """Number of tokens that MLPs, norms and adapters of a layer process at once inside a chunk:
    "auto", a whole number from 1, or 0 for the whole chunk. One device only."""

    return_logits: bool = False
    """Whether the model's output carries the logits of the whole sequence, which can take
    gigabytes."""

    show_plan: bool = True
    """Whether a table of the plan is printed before the first step."""

    trace_dir: str | None = None
    """Folder in which every rank records its last step: its actions as text (`rank0.actions`), and
    their times as a trace for ui.perfetto.dev. None records nothing."""

    planned_for: str | None = None
    """Model and sequence length that `sppo plan --write` made these settings for; checked against
    what is run. Leave it out of files written by hand."""

    show_progress: bool = True
    """Whether a step that takes more than a few seconds shows a progress bar of its chunks."""

    log_metrics: bool = True
    """Whether tokens/s, TFLOPS, memory and stalls are added to the Trainer's logs."""

    def __post_init__(self) -> None:
        """Check each setting, then the settings that must agree."""
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule(name, getattr(self, name)))
        _check_chunks(self)
        _check_offload(self)
        for conflict in _CONFLICTS:
            conflict.check(self)
        _check_ranks(self)
        if self.pp_msp == "on":
            _check_multiplexing(self)

    @property
    def sharing_ranks(self) -> int:
        """Number of ranks that share every batch: pipeline ranks times sequence ranks."""
        return self.pp_size * self.sp_size

    @property
    def one_chunk(self) -> bool:
        """Whether every layer is called for all tokens of a sequence at once."""
        return self.num_chunks == self.sp_size == 1

    @property
    def host_resident(self) -> tuple[bool, bool]:
        """Whether frozen layer weights, and trained ones with their optimizer, are on the host.

        "auto" for the optimizer follows the weights.
        """
        frozen = self.weights == "host"
        return frozen, self.optimizer == "host" or (frozen and self.optimizer == "auto")

    @property
    def offload_is_partial(self) -> bool:
        """Whether `offload` names a rule that offloads some activations and keeps others."""
        facts = OFFLOAD_POLICIES.facts(self.offload)
        return bool(facts.get("keeps") and facts.get("leaves"))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "SPPOConfig":
        """Build a config from a mapping of setting names to values; absent ones keep defaults.

        Raises:
            ConfigError: a key is unknown (the message names the nearest valid one), or a value
                is refused.
        """
        if not isinstance(cast(object, settings), Mapping):
            raise ConfigError(
                f"The settings are {show_typed(settings)}, but must be a mapping of names to "
                f"values. Remedy: write one 'name: value' per setting. {_valid_keys()}"
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

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> "SPPOConfig":
        """Read a config from a YAML file of `name: value` lines; an empty file is all defaults.

        Raises:
            ConfigError: the file cannot be read, is not a regular file, has more than 128 KiB, is
                not YAML or not a mapping, sets a name twice, or holds a setting that is refused.
                The message names the file.
        """
        import_entry_points()  # their names are allowed in settings
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
        Path(path).write_text(to_yaml(self.to_dict()), encoding="utf-8")

    def replace(self, **changes: Any) -> "SPPOConfig":
        """Return a copy with some settings changed, checked anew.

        Raises:
            ConfigError: as `from_dict`.
        """
        return self.from_dict({**self.to_dict(), **changes})


PLAN_VERSION = 1
"""Version of the files that `sppo plan --write` writes. The same settings may mean something else
in a file of another version."""


def _plan_stamp(field: str, value: object) -> object:
    """Rule for None or the stamp of `sppo plan --write`: "plan 1: MODEL; N tokens"."""
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
def _field_docstrings() -> dict[str, str]:
    """Collect the docstring under each field of SPPOConfig, which Python itself throws away."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(SPPOConfig))).body
    assert isinstance(tree, ast.ClassDef), "the source of a class parses to a class"
    helps: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(below, ast.Expr), f"{field.target.id} has no docstring under it"
            assert isinstance(below.value, ast.Constant), f"{field.target.id} has no docstring"
            helps[field.target.id] = " ".join(str(below.value.value).split())
    return helps


def field_help(name: str) -> str:
    """Return a setting's help text, in one line: the docstring under its field.

    Raises:
        ConfigError: there is no such setting.
    """
    if name not in _RULES:
        _refuse_key(name)
    registry = _REGISTRIES.get(name)
    names = "" if registry is None else f" One of auto, {', '.join(registry.names())}."
    return _field_docstrings()[name] + names


_REGISTRIES: dict[str, Registry[Any]] = {
    "attention_backend": ATTENTION_BACKENDS,
    "offload": OFFLOAD_POLICIES,
    "pp_schedule": SCHEDULES,
}
"""Settings whose allowed values are the names in a registry."""


def _on_or_off(name: str, value: object) -> str:
    # YAML reads a bare `on` as True.
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return str(choice("auto", "off", "on")(name, word))


def _offload_tier(name: str, value: object) -> str:
    return str(choice("auto", *(tier for tier in TIERS.names() if tier != "device"))(name, value))


MORE_TIERS = "more_tiers"
"""Setting with the budgets of tiers that have no settings of their own."""


def read_tiers(text: str | None) -> dict[str, int | float | str | None]:
    """Return the tiers that `more_tiers` names, with their budgets."""
    found: dict[str, int | float | str | None] = {}
    for part in text.split(",") if text else ():
        name, _, size = (word.strip() for word in part.partition("="))
        found[name] = read_budget(size) if size else None
    return found


def write_tiers(budgets: Mapping[str, int | float | str | None]) -> str | None:
    """Return the value of `more_tiers` from which `read_tiers` reads these."""
    return ", ".join(n if size is None else f"{n}={size}" for n, size in budgets.items()) or None


def _more_tiers(field: str, value: object) -> object:
    known = [t for t in TIERS.names() if TIERS.facts(t).get("setting", MORE_TIERS) == MORE_TIERS]
    written = cast("str | None", text(field, value))
    for name, size in read_tiers(written).items():
        if name not in known:
            names = ", ".join(map(repr, known)) or "none, for no such tier is registered"
            allowed = f"names of registered tiers without settings of their own: {names}"
            remedy = (
                "import the module that registers the tier first (sppo_hf/README.md), or drop it"
            )
            refuse(field, value, allowed=allowed, remedy=remedy)
        budget(f"{field} ({name})", size)
    return written


_OWN_RULES: dict[str, Rule] = {
    **{name: choice_of(registry) for name, registry in _REGISTRIES.items()},
    "chunk_lengths": whole_numbers("tokens", instead=", or use num_chunks or chunk_tokens"),
    "layer_tile_tokens": integer(0, "auto"),
    "min_offload_size": count(0),
    "more_tiers": _more_tiers,
    "offload_tier": _offload_tier,
    "planned_for": _plan_stamp,
    "pp_layers": whole_numbers("layers"),
    "pp_msp": _on_or_off,
}
"""Checks of settings whose type alone does not say what is allowed."""

_RULES_BY_TYPE: dict[Any, Rule] = {
    bool: flag,
    int: count(1),
    int | None: integer(1, None),
    int | Literal["auto"]: integer(1, "auto"),
    str | None: text,
    int | float | str | None: budget,
}

_RULES: dict[str, Rule] = {
    field.name: _OWN_RULES.get(field.name)
    or _RULES_BY_TYPE.get(field.type)
    or choice(*get_args(field.type))
    for field in dataclasses.fields(SPPOConfig)
}
"""The check of each setting by itself, in the order of the fields."""


class _Conflict(NamedTuple):
    """Two settings that exclude each other."""

    settings: Mapping[str, object]
    """The value of both that does; `...` stands for all values but zero, False and the default."""

    reason: str
    allowed: str = "either alone"
    remedy: str = "drop one of them"

    def check(self, config: SPPOConfig) -> None:
        """Raise ConfigError if `config` has both."""
        values = {name: getattr(config, name) for name in self.settings}
        for name, excluded in self.settings.items():
            unset = not values[name] or values[name] == _DEFAULTS[name]
            if unset if excluded is ... else values[name] != excluded:
                return
        _refuse_both(values, self.reason, allowed=self.allowed, remedy=self.remedy)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SPPOConfig)}

_CONFLICTS = (
    *(
        _Conflict(
            {"layer_tile_tokens": ..., name: ...},
            "layers in tiles are proved exact on one device only",
            allowed=f"layer_tile_tokens='auto' or 0 with {name} above 1",
        )
        for name in ("pp_size", "sp_size")
    ),
    _Conflict(
        {"layer_tile_tokens": ..., "compile": True},
        "compiled norms and MLPs run on whole chunks",
        allowed="layer_tile_tokens='auto' or 0 with compile",
    ),
    _Conflict(
        {"compile": True, "recompute": "selective"},
        "matrix products inside compiled code cannot be saved one by one",
        allowed="recompute='auto', 'none' or 'full' with compile",
    ),
    _Conflict(
        {"compile": True, "pp_size": ...},
        "compiled parts are not proved exact in a pipeline",
        remedy="drop compile",
    ),
    _Conflict(
        {"offload_tier": ..., "offload": "none"},
        "nothing is offloaded to that tier",
        allowed="offload_tier='auto' with offload='none'",
    ),
    *(
        _Conflict(
            {name: "host", "pp_size": ...},
            "a pipeline needs its weights once for every chunk",
            allowed=f"{name}='auto' or 'device' with pp_size above 1",
            remedy=f"drop {name}, or use pp_size=1",
        )
        for name in ("weights", "optimizer")
    ),
    _Conflict(
        {"weights": "host", "sp_size": ...},
        "ranks that share sequences go chunk by chunk, and all weights would be copied once for "
        "every chunk",
        allowed="weights='device', or sp_size=1",
        remedy="drop weights; FSDP2 over the same ranks shards them",
    ),
    _Conflict(
        {"weights": "host", "order": "by_chunk"},
        "all weights would be copied once for every chunk",
        allowed="order='auto' or 'by_layer' with weights='host'",
        remedy="drop order",
    ),
    # A weight that was moved has another accumulator in autograd's graph for each group.
    _Conflict(
        {"weights": "host", "micro_batch_size": ...},
        "all weights would be copied once for every group of rows, and hooks on them would see the "
        "gradient of each group by itself",
        allowed="weights='auto' or 'device' with micro_batch_size",
        remedy="drop micro_batch_size, and give batches of fewer rows (under a Trainer "
        "per_device_train_batch_size, with more gradient_accumulation_steps)",
    ),
    _Conflict(
        {"order": "by_layer", "pp_size": ...},
        "a stage must pass a chunk on before it has seen the next one, so a pipeline goes chunk by "
        "chunk",
        allowed="order='auto' or 'by_chunk' with pp_size above 1",
        remedy="drop order, or use pp_size=1",
    ),
    *(
        _Conflict(
            {"pp_msp": "on", name: ...},
            reason,
            allowed=f"{name}={_DEFAULTS[name]!r} with pp_msp='on'",
            remedy=f"drop {name}, or pp_msp='off'",
        )
        for name, reason in (
            ("pp_schedule", "it is an order of its own"),
            ("sp_size", "it divides sequences by itself"),
        )
    ),
)


def _refuse_both(
    settings: Mapping[str, object], reason: str, *, allowed: str, remedy: str
) -> NoReturn:
    """Raise for two settings that exclude each other."""
    first, second = (f"{name}={show(value)}" for name, value in settings.items())
    raise ConfigError(
        f"{first} contradicts {second}: {reason}. Allowed: {allowed}. Remedy: {remedy}."
    )


def _check_chunks(config: SPPOConfig) -> None:
    """Refuse settings that say in more than one way where chunks end, or that contradict it."""
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
    lengths = config.chunk_lengths
    if lengths and config.partition == "even" and max(lengths) - min(lengths) > 1:
        _refuse_both(
            {"partition": "even", "chunk_lengths": lengths},
            "these lengths are not even",
            allowed="either alone",
            remedy=f"drop partition, or use num_chunks={len(lengths)}",
        )


def _check_offload(config: SPPOConfig) -> None:
    """Refuse settings of a tier that is not used, or that needs another setting."""
    tier = config.offload_tier
    needs = "" if tier == "auto" else TIERS.facts(tier).get("needs", MORE_TIERS)
    has = getattr(config, needs) if needs else tier
    if has is None or (needs == MORE_TIERS and tier not in read_tiers(has)):
        raise ConfigError(
            f"offload_tier={tier!r} needs {needs}, but that is {show(has)}. Allowed: "
            f"offload_tier='auto' or 'host' without it. Remedy: set {needs}, or drop offload_tier."
        )
    if config.disk_memory is not None and config.offload_dir is None:
        raise ConfigError(
            f"disk_memory={show(config.disk_memory)} is a budget in offload_dir, which is not set, "
            "so that no disk is used. Allowed: disk_memory=None without offload_dir. Remedy: name "
            "a folder on a fast local disk as offload_dir, or drop disk_memory."
        )


def _check_ranks(config: SPPOConfig) -> None:
    """Refuse settings of several ranks that need others."""
    if config.sp_across_nodes and config.sp_size == 1:
        raise ConfigError(
            "sp_across_nodes=True needs ranks that share sequences, but sp_size=1 shares none. "
            "Allowed: sp_across_nodes=False with sp_size=1. Remedy: set sp_size to the number of "
            "ranks that share a sequence, or drop sp_across_nodes."
        )
    interleaved = SCHEDULES.names_with("interleaved")
    if config.pp_virtual_stages > 1 and config.pp_schedule not in interleaved:
        _refuse_both(
            {
                "pp_virtual_stages": config.pp_virtual_stages,
                "pp_schedule": config.pp_schedule,
            },
            "this schedule has one stage on each rank",
            allowed="more than one stage on a rank with "
            f"pp_schedule={' or '.join(map(repr, interleaved))} only",
            remedy="choose that schedule, or drop pp_virtual_stages",
        )
    stages = config.pp_size * config.pp_virtual_stages
    if config.pp_size > 1 and config.pp_layers and len(config.pp_layers) != stages:
        raise ConfigError(
            f"pp_layers={show(config.pp_layers)} has {len(config.pp_layers)} numbers, but "
            f"pp_size={config.pp_size} x pp_virtual_stages={config.pp_virtual_stages} makes "
            f"{stages} stages. Allowed: the layers of each stage, first to last. Remedy: give "
            f"{stages} numbers, or drop pp_layers."
        )
    unset = {"pp_schedule": "auto", "pp_virtual_stages": 1, "pp_layers": None}
    for name, default in unset.items():
        if config.pp_size == 1 and getattr(config, name) != default:
            _refuse_without_pipeline(name, getattr(config, name), allowed=show(default))


def _check_multiplexing(config: SPPOConfig) -> None:
    """Refuse shared units (`pp_msp`) without a pipeline, or with fewer chunks than ranks."""
    if config.pp_size == 1:
        _refuse_without_pipeline("pp_msp", "on", allowed="'auto' or 'off'")
    chunks = len(config.chunk_lengths or ()) or config.num_chunks
    if chunks != "auto" and chunks < config.pp_size:
        name = "chunk_lengths" if config.chunk_lengths else "num_chunks"
        _refuse_both(
            {"pp_msp": "on", name: getattr(config, name)},
            "ranks share the first and the last chunks of each stage, and "
            f"{chunks} are fewer than pp_size={config.pp_size}",
            allowed="as many chunks as ranks, or more",
            remedy="use more chunks, or pp_msp='off'",
        )


def _refuse_without_pipeline(name: str, value: object, *, allowed: str) -> NoReturn:
    """Raise for a setting of pipelines on one device."""
    raise ConfigError(
        f"{name}={show(value)} needs a pipeline, but pp_size=1 makes none. Allowed: "
        f"{name}={allowed} with pp_size=1. Remedy: set pp_size to the number of ranks that share "
        f"the model, or drop {name}."
    )


def _refuse_key(key: object, value: object = None) -> NoReturn:
    """Raise for a setting that does not exist."""
    seen = f"Unknown setting {show(key)}" + ("" if value is None else f" (value {show(value)})")
    nearest = difflib.get_close_matches(show(key), _RULES, n=1, cutoff=0)[0]
    raise ConfigError(f"{seen}. Remedy: use the nearest valid key, {nearest!r}. {_valid_keys()}")


def _valid_keys() -> str:
    """List the settings that exist."""
    return f"Valid keys: {', '.join(_RULES)}."
