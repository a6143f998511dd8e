"""Where the bytes of a step go: per tier, by cause, at the moment the device holds most.

Knows nothing of torch or of budgets in a config. Every figure is a prediction from the shape; the
two that are assumptions rather than consequences say so (`optimizer`, `workspace`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from sppo_hf.errors import BudgetError
from sppo_hf.planning.modes import FrameMode
from sppo_hf.planning.partition import Bounds
from sppo_hf.planning.shape import FLOAT32_BYTES, ModelShape

# The assumption behind `optimizer`: AdamW with both moments in float32.
OPTIMIZER_BYTES_PER_PARAMETER = 8
# One frame drains to the host (or comes back) while the next one is computed (or used).
_FRAMES_IN_FLIGHT = 2
# Logits at once while one tile's loss is computed, in float32. Larger tiles gain nothing: the
# head's matrix product is already bound by arithmetic.
_LOGITS_TILE_BYTES = {"cpu": 128 * 2**20, "cuda": 256 * 2**20}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """Bytes on one tier, by cause."""

    weights: int = 0
    """All parameters."""

    gradients: int = 0
    """Gradients of the trainable parameters, in their own dtype."""

    optimizer: int = 0
    """An assumption: AdamW, two float32 states per trainable parameter."""

    kv: int = 0
    """Keys and values of the chunks so far, all layers."""

    dkv: int = 0
    """Gradient accumulators of earlier chunks' keys and values, float32."""

    frames: int = 0
    """What backward needs of layers that are neither dropped nor gone to the other tier."""

    skeletons: int = 0
    """What recomputation starts from: layer input, attention output, log-sum-exp."""

    logits_tile: int = 0
    """Logits and their gradient while one tile of the loss is computed."""

    chunk_workspace: int = 0
    """An estimate: the live layer's temporaries, and frames on their way between tiers."""

    @property
    def total(self) -> int:
        """Sum over all causes."""
        return sum(value for _, value in self.items())

    def items(self) -> Iterator[tuple[str, int]]:
        """Yields (cause, bytes) in the order of the fields."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Predicted bytes per tier at the moment the device holds most."""

    device: TierBytes
    """On the accelerator; in ordinary memory when the CPU computes."""

    host: TierBytes
    """What was offloaded, at its own peak."""

    moment: str
    """When the device's peak is reached, in words."""


def loss_tile_tokens(shape: ModelShape, *, device_kind: str) -> int:
    """Returns the tokens per tile of the loss for `loss_tile_tokens="auto"`.

    As many (in multiples of 64) as keep a tile's float32 logits within 128 MiB on a CPU and 256 MiB
    on a GPU: Llama-3's 128K vocabulary gets 512 tokens on a GPU.
    """
    tokens = _LOGITS_TILE_BYTES[device_kind] // (shape.vocab_size * FLOAT32_BYTES)
    return max(64, tokens // 64 * 64)


def estimate(
    shape: ModelShape,
    *,
    batch_rows: int,
    bounds: Bounds,
    mode: Callable[[int, int], FrameMode],
    training: bool,
    tile_tokens: int,
    return_logits: bool = False,
) -> MemoryEstimate:
    """Predicts the bytes of one forward (and backward, when training) on one device.

    Walks the chunks. After forward of chunk i the device holds K/V and kept frames (or skeletons)
    of chunks 0..i. Backward of chunk i starts with those and the dK/dV accumulators of chunks 0..i
    (none for the last chunk: nobody has written them) and ends with the frames and accumulators
    of chunks 0..i-1. Between start and end both change linearly, so the peak is at one of them.

    Args:
        shape: the model.
        batch_rows: rows of the batch; all bytes but weights, gradients and optimizer scale with it.
        bounds: chunk bounds in tokens.
        mode: what becomes of the frame of (layer, chunk).
        training: whether a backward follows; if not, nothing but K/V outlives a chunk.
        tile_tokens: tokens whose logits exist at once in the loss.
        return_logits: whether the output carries the logits of the whole sequence.
    """
    total_tokens = bounds[-1][1]
    kept = _frames_by_chunk(shape, bounds, mode, batch_rows) if training else None
    logits = _logits_bytes(shape, batch_rows, total_tokens, tile_tokens, return_logits)
    standing = TierBytes(
        weights=shape.weight_bytes,
        gradients=shape.gradient_bytes if training else 0,
        optimizer=OPTIMIZER_BYTES_PER_PARAMETER * shape.trainable_parameters if training else 0,
    )
    best: tuple[int, TierBytes, str] | None = None
    for chunk, what, kv_tokens, dkv_tokens, framed in _moments(bounds, training):
        moment = TierBytes(
            weights=standing.weights,
            gradients=standing.gradients,
            optimizer=standing.optimizer,
            kv=batch_rows * shape.kv_bytes_per_token() * kv_tokens,
            dkv=batch_rows * shape.dkv_bytes_per_token() * dkv_tokens,
            frames=sum(kept.device_frames[:framed]) if kept else 0,
            skeletons=sum(kept.device_skeletons[:framed]) if kept else 0,
            logits_tile=logits,
            chunk_workspace=batch_rows * _workspace_bytes(shape, bounds[chunk], training=training)
            + (kept.in_flight[chunk] if kept else 0),
        )
        if best is None or moment.total > best[0]:
            best = moment.total, moment, f"{what} of chunk {chunk + 1} of {len(bounds)}"
    assert best is not None, "a sequence has at least one chunk"
    host = TierBytes(
        frames=sum(kept.host_frames) if kept else 0,
        skeletons=sum(kept.host_skeletons) if kept else 0,
    )
    return MemoryEstimate(device=best[1], host=host, moment=best[2])


def check_budget(tier: str, what: str, *, need_bytes: int, have_bytes: int, remedy: str) -> None:
    """Raises when bytes that cannot be avoided exceed a tier's budget.

    Raises:
        BudgetError: names the tier, what needs how much, how much there is, and the remedy.
    """
    if need_bytes > have_bytes:
        raise BudgetError(
            f"{tier} memory cannot hold {what}: {need_bytes:,} bytes ({need_bytes / 2**30:.2f} GiB)"
            f" needed, {have_bytes:,} bytes ({have_bytes / 2**30:.2f} GiB) in the budget, "
            f"{need_bytes - have_bytes:,} bytes missing. {remedy}"
        )


@dataclass(frozen=True, slots=True)
class _ChunkFrames:
    """Bytes per chunk, summed over layers, where they wait for backward."""

    device_frames: list[int]
    device_skeletons: list[int]
    host_frames: list[int]
    host_skeletons: list[int]
    in_flight: list[int]


def _frames_by_chunk(
    shape: ModelShape, bounds: Bounds, mode: Callable[[int, int], FrameMode], batch_rows: int
) -> _ChunkFrames:
    num_chunks = len(bounds)
    result = _ChunkFrames(*([0] * num_chunks for _ in range(5)))
    frame = [shape.frame_bytes_per_token(layer) for layer in range(shape.num_layers)]
    skeleton = [shape.skeleton_bytes_per_token(layer) for layer in range(shape.num_layers)]
    for chunk, (start, end) in enumerate(bounds):
        rows_tokens = batch_rows * (end - start)
        for layer in range(shape.num_layers):
            choice = mode(layer, chunk)
            waits = rows_tokens * (skeleton if choice.recompute else frame)[layer]
            in_flight = _FRAMES_IN_FLIGHT * waits if choice.offload else 0
            if choice.recompute:
                (result.host_skeletons if choice.offload else result.device_skeletons)[chunk] += (
                    waits
                )
                # Backward rebuilds the whole frame of the layer it is in.
                in_flight += rows_tokens * frame[layer]
            else:
                (result.host_frames if choice.offload else result.device_frames)[chunk] += waits
            result.in_flight[chunk] = max(result.in_flight[chunk], in_flight)
    return result


def _moments(bounds: Bounds, training: bool) -> Iterator[tuple[int, str, int, int, int]]:
    """Yields (chunk, name, K/V tokens, dK/dV tokens, chunks whose frames are held)."""
    last = len(bounds) - 1
    if not training:
        for chunk, (_, end) in enumerate(bounds):
            yield chunk, "forward", end, 0, 0
        return
    for chunk in range(last, -1, -1):
        start, end = bounds[chunk]
        yield chunk, "start of backward", end, 0 if chunk == last else end, chunk + 1
        yield chunk, "end of backward", end, start, chunk


def _logits_bytes(
    shape: ModelShape, batch_rows: int, total_tokens: int, tile_tokens: int, return_logits: bool
) -> int:
    """One tile in the model's dtype, in float32, and its gradient; plus all logits if asked for."""
    tile = min(tile_tokens, batch_rows * total_tokens)
    per_token = shape.vocab_size * (shape.dtype_bytes + 2 * max(FLOAT32_BYTES, shape.dtype_bytes))
    whole = batch_rows * total_tokens * shape.vocab_size * shape.dtype_bytes if return_logits else 0
    return tile * per_token + whole


def _workspace_bytes(shape: ModelShape, bound: tuple[int, int], *, training: bool) -> int:
    """Temporaries of the busiest layer for one row of one chunk, the frame itself left out.

    The MLP holds about two intermediates in forward and four with their gradients in backward,
    beside two or four full-width tensors; attention holds q, its output and (in backward) their
    gradients, and one layer's whole prefix of K/V (or dK/dV of one call) once more.
    """
    start, end = bound
    copies = 4 if training else 2
    most = 0
    for layer in set(shape.layers):
        full_width = copies * layer.hidden_size
        mlp = copies * layer.mlp_width + full_width
        attention = (copies // 2) * (layer.q_elements + layer.attention_output_elements)
        prefix = layer.kv_elements * end
        most = max(most, (end - start) * max(mlp, attention + full_width) + prefix)
    return most * shape.dtype_bytes
