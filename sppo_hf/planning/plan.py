"""The Plan: every decision about one batch shape, made before it runs, with its reasons.

`make_plan` turns settings, a model's shape and a device's facts into chunk bounds, a mode per
(layer, chunk), and a memory estimate, and refuses what cannot fit. It knows nothing of torch or of
how anything is carried out. A Plan is a value: the engine, the tables and the tests read the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.planning.memory import MemoryEstimate, check_budget, estimate, loss_tile_tokens
from sppo_hf.planning.modes import KEEP, FrameMode, Tier, mode_of
from sppo_hf.planning.partition import Bounds, chunk_bounds
from sppo_hf.planning.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What planning needs to know of the machine; collected by rooms that may import torch."""

    kind: str
    """"cpu" or "cuda"."""

    name: str
    """As the driver gives it, or the processor's name."""

    device_memory_bytes: int | None = None
    """Memory of the device in bytes (of the machine, for a CPU); None where unknown."""

    host_memory_bytes: int | None = None
    """Host memory in bytes that this process may use; None where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one batch shape is run."""

    total_tokens: int
    """Tokens of each row, padding included."""

    batch_rows: int
    """Rows of the batch."""

    bounds: Bounds
    """Half-open (start, end) of each chunk, in tokens."""

    num_layers: int
    """Decoder layers."""

    layer_modes: tuple[tuple[FrameMode, ...], ...]
    """`layer_modes[chunk][layer]`. All alike for now; a solver fills it in chunk by chunk."""

    training: bool
    """Whether a backward follows. If not, no frame is kept and modes mean nothing."""

    tile_tokens: int
    """Tokens whose logits exist at once while the loss is computed."""

    device: DeviceFacts
    """Where it runs."""

    backend_name: str
    """Attention backend."""

    backend_reason: str
    """Why this backend."""

    recompute_reason: str
    """Why frames are recomputed or not."""

    offload_reason: str
    """Why frames go to the host or not."""

    estimate: MemoryEstimate
    """Predicted bytes."""

    device_budget_bytes: int | None = None
    """What the device may hold: the config's budget, else its memory, else unknown."""

    host_budget_bytes: int | None = None
    """The same for host memory."""

    kv_tier: Tier = "device"
    """Where keys, values and their gradient sums wait while no attention reads them."""

    kv_block_tokens: int = 0
    """Most tokens whose keys and values come back at once; a longer chunk is a block of its own.
    At least `total_tokens` means layer by layer. Means nothing while `kv_tier` is "device"."""

    warnings: tuple[str, ...] = ()
    """What a user should know before the first step; nothing here stops it."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self.bounds)

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Tokens per chunk."""
        return tuple(end - start for start, end in self.bounds)

    def mode(self, layer: int, chunk: int) -> FrameMode:
        """Returns what becomes of the frame of (layer, chunk)."""
        return self.layer_modes[chunk][layer]


def make_plan(
    config: SPPOConfig,
    shape: ModelShape,
    *,
    device: DeviceFacts,
    backend_name: str,
    backend_reason: str,
    batch_rows: int,
    total_tokens: int,
    training: bool,
) -> Plan:
    """Decides how a batch of `batch_rows` rows of `total_tokens` tokens is run.

    Raises:
        ConfigError: the settings do not fit this length.
        BudgetError: the device's budget cannot hold weights and gradients, or the host's cannot
            hold what `offload="full"` sends there.
    """
    bounds = chunk_bounds(config, shape, total_tokens, device_kind=device.kind)
    tile = config.loss_tile_tokens
    tile_tokens = loss_tile_tokens(shape, device_kind=device.kind) if tile == "auto" else tile
    budgets = _Budgets.read(config, device)
    _check_standing_bytes(config, shape, budgets, training=training)

    last = len(bounds) - 1 if _keeps_last(config, device, len(bounds)) else None

    def of_chunk(mode: FrameMode, chunk: int) -> FrameMode:
        return KEEP if chunk == last else mode

    def predict(mode: FrameMode) -> MemoryEstimate:
        return estimate(
            shape,
            batch_rows=batch_rows,
            bounds=bounds,
            mode=lambda layer, chunk: of_chunk(mode, chunk),
            training=training,
            tile_tokens=tile_tokens,
            return_logits=config.return_logits,
        )

    recompute, recompute_reason = _choose_recompute(config)
    if last is not None:
        recompute_reason += "; the last chunk is kept, for its backward comes at once"
    offload, offload_reason = _choose_offload(config, device)
    mode = _uniform(recompute=recompute, offload=offload)
    predicted = predict(mode)
    if config.offload == "auto" and predicted.host.total > budgets.host_limit:
        offload_reason = (
            f"auto: {predicted.host.total / 2**30:.1f} GiB would not fit the host's "
            f"{budgets.host_limit / 2**30:.1f} GiB"
        )
        mode = _uniform(recompute=recompute, offload=False)
        predicted = predict(mode)
    _check_host_bytes(config, budgets, predicted)
    return Plan(
        total_tokens=total_tokens,
        batch_rows=batch_rows,
        bounds=bounds,
        num_layers=shape.num_layers,
        layer_modes=tuple(
            (of_chunk(mode, chunk),) * shape.num_layers for chunk in range(len(bounds))
        ),
        training=training,
        tile_tokens=tile_tokens,
        device=device,
        backend_name=backend_name,
        backend_reason=backend_reason,
        recompute_reason=recompute_reason,
        offload_reason=offload_reason,
        estimate=predicted,
        device_budget_bytes=budgets.device,
        host_budget_bytes=budgets.host,
        kv_tier=_kv_tier(config, device),
        kv_block_tokens=total_tokens,
        warnings=_warnings(shape, predicted, budgets, total_tokens, mode),
    )


@dataclass(frozen=True, slots=True)
class _Budgets:
    """Bytes a tier may use: what the config says, else what the machine has, else None."""

    device: int | None
    host: int | None

    @classmethod
    def read(cls, config: SPPOConfig, facts: DeviceFacts) -> _Budgets:
        def of(value: int | float | str | None, field: str, total: int | None) -> int | None:
            return total if value is None else parse_bytes(value, field=field, total_bytes=total)

        return cls(
            of(config.device_memory, "device_memory", facts.device_memory_bytes),
            of(config.host_memory, "host_memory", facts.host_memory_bytes),
        )

    @property
    def host_limit(self) -> float:
        """The host's budget, without end where unknown."""
        return float("inf") if self.host is None else self.host


def _check_standing_bytes(
    config: SPPOConfig, shape: ModelShape, budgets: _Budgets, *, training: bool
) -> None:
    # Only a budget that the user named is a reason to refuse: without one, the weights are already
    # where they are, or sharded over devices in a way that is not visible here.
    if config.device_memory is None or budgets.device is None:
        return
    what = "weights and gradients" if training else "the weights"
    check_budget(
        "device",
        what,
        need_bytes=shape.weight_bytes + (shape.gradient_bytes if training else 0),
        have_bytes=budgets.device,
        remedy="Raise device_memory, train fewer parameters (LoRA has almost no gradients), or load"
        " the model in a smaller dtype or quantised. No choice of chunks changes these bytes.",
    )


def _check_host_bytes(config: SPPOConfig, budgets: _Budgets, predicted: MemoryEstimate) -> None:
    # As above: what the machine merely has is warned about, what the user named is held.
    if config.host_memory is None or budgets.host is None:
        return
    check_budget(
        "host",
        "what offload='full' sends there",
        need_bytes=predicted.host.total,
        have_bytes=budgets.host,
        remedy="Raise host_memory, set recompute='full' (less to send) or offload='none', or "
        "shorten the sequences.",
    )


def _uniform(*, recompute: bool, offload: bool) -> FrameMode:
    return mode_of("skeleton" if recompute else "whole", "host" if offload else "device")


def _choose_recompute(config: SPPOConfig) -> tuple[bool, str]:
    if config.recompute == "auto":
        return True, "auto: least memory, and attention is never run again"
    return config.recompute == "full", "set by the user"


def _keeps_last(config: SPPOConfig, device: DeviceFacts, num_chunks: int) -> bool:
    # Its backward comes at once, so keeping it costs one chunk's frames at one moment and saves a
    # recomputation. On a GPU a chunk is many times longer; whether it fits is for a solver to say.
    automatic = config.recompute == config.offload == "auto"
    return automatic and device.kind == "cpu" and num_chunks > 1


def _choose_offload(config: SPPOConfig, device: DeviceFacts) -> tuple[bool, str]:
    if config.offload != "auto":
        return config.offload == "full", "set by the user"
    if device.kind == "cpu":
        return False, "auto: on a CPU the host's memory is the device's"
    return True, "auto: copies overlap with compute on their own streams"


def _kv_tier(config: SPPOConfig, device: DeviceFacts) -> Tier:
    if config.offload_kv != "full":
        return "device"
    return "disk" if device.kind == "cpu" and config.offload_dir is not None else "host"


def _warnings(
    shape: ModelShape,
    predicted: MemoryEstimate,
    budgets: _Budgets,
    total_tokens: int,
    mode: FrameMode,
) -> tuple[str, ...]:
    found: list[str] = []
    limit = shape.max_positions_tokens
    if limit is not None and total_tokens > limit:
        found.append(
            f"sequences of {total_tokens:,} tokens are longer than the {limit:,} positions this "
            "model was made for; expect poor quality unless its rotary scaling is changed"
        )
    for tier, total, budget in (
        ("device", predicted.device.total, budgets.device),
        ("host", predicted.host.total, budgets.host),
    ):
        if budget is not None and total > budget:
            found.append(
                f"predicted {tier} peak {total / 2**30:.1f} GiB is over the "
                f"{budget / 2**30:.1f} GiB there are ({_largest_cause(predicted, tier)}); "
                + _remedy(mode, tier)
            )
    return tuple(found)


def _largest_cause(predicted: MemoryEstimate, tier: str) -> str:
    cause, size = max(getattr(predicted, tier).items(), key=lambda item: item[1])
    return f"most of it {cause}, {size / 2**30:.1f} GiB"


def _remedy(mode: FrameMode, tier: str) -> str:
    if tier == "device" and not mode.recompute:
        return "recompute='full' holds less"
    if tier == "device" and not mode.offload:
        return "shorter sequences, or offload='full' where the host has room, hold less"
    if tier == "host" and not mode.recompute:
        return "recompute='full' sends less"
    return "shorter chunks or shorter sequences hold less"
