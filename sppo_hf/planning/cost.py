"""ModelCost: seconds of every unit of work, from a model's shape and a machine's profile.

The one place that turns FLOPs into seconds; solver, simulator and reports read it. One unit is the
forward or the backward of one decoder layer over one chunk; head and loss of a chunk are another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sppo_hf.planning.activation_modes import SAVED, Saved
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.hardware import Curve, HardwareProfile, curve_for
from sppo_hf.planning.model_profile import LayerProfile
from sppo_hf.planning.model_shape import ModelShape, visible_pairs
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.planning.tile_sizes import loss_tile_tokens

ATTENTION_BACKWARD_FLOPS = 2.5
"""FLOPs of attention's backward over its forward's: five matrix products instead of two."""

UNKNOWN_HOST_UPDATE = 50e9
"""Bytes per second of an optimizer's update in host memory where not measured: a sixth of the
peak of eight channels of DDR5-4800."""

# Every byte that autograd saves was written once and read once in forward; backward reads it and
# reads and writes a gradient of the same size.
_FORWARD_TRAFFIC = 2
_BACKWARD_TRAFFIC = 3

# An adapter's products sum over or give the rank alone, so they take as long as memory takes to
# pass the adapted layer's input and output: 1.5 times their sum in forward (x read; the output read
# and written), 2.5 times in backward. Kernels reach 70 to 75% of memory's rate: with rank 16 on all
# linears of Llama-3.1-8B they took 90 and 137 ms of a step of 3.8 s on an H200 (32,768 tokens).
_ADAPTER_FORWARD_PASSES = 2.2
_ADAPTER_BACKWARD_PASSES = 3.3

# Python's time for a recomputed layer's forward and backward, over a bare forward: measured
# on a CPU with Llama's layer and adapters on all its linears (the bare layer itself is at 2.2).
_HOST_FORWARDS: dict[Saved, float] = {"inputs": 4.1, "matmuls": 8.4, "hidden": 4.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Ratios of measured to predicted times; 1.0 where nothing was measured."""

    forward: float = 1.0
    backward: float = 1.0

    d2h: float = 1.0
    h2d: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Seconds of every unit of one batch, [kinds, chunks] unless stated otherwise.

    Kinds of layers are numbered as in `ModelShape.layer_kinds`.
    """

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    """Backward without recomputation."""

    weight: NDArray[np.float64]
    """The part of backward that computes gradients of weights."""

    recompute: NDArray[np.float64]
    """[kinds, saved, chunks] Recomputation, by what is saved (`SAVED`)."""

    kv_recompute: NDArray[np.float64]
    """Recomputation of K/V from a layer's input."""

    head: NDArray[np.float64]
    """[chunks] Head and loss in training, with their gradients."""

    head_evaluated: NDArray[np.float64]
    """[chunks] Head and loss in evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Seconds of a model's units on one device."""

    shape: ModelShape
    profile: HardwareProfile
    dtype_name: str
    """Dtype of matrix products, such as "bfloat16"."""

    batch_rows: int = 1
    """Rows of a batch; seconds are those of all of them."""

    all_to_all_bytes_per_second: float = math.inf
    """Rate of each sequence-parallel rank (`ModelShape.sp`) in an all-to-all, each way. Seconds are
    those of one rank."""

    shard_bytes_per_second: float = math.inf
    """Rate between the devices over which FSDP2 shards the model (`ModelShape.shards`), each way.
    """

    tile_tokens: int | None = None
    """Tokens per tile of the loss; None for as many as `loss_tile_tokens` gives the device."""

    correction: Correction = Correction()

    # Not copied by `dataclasses.replace`: other fields give other seconds.
    _memo: dict[tuple[object, ...], Any] = field(
        default_factory=dict[tuple[object, ...], Any], init=False, repr=False, compare=False
    )

    @property
    def sp(self) -> int:
        """Number of sequence-parallel ranks that share each unit."""
        return self.shape.sp

    @property
    def loss_tile_tokens(self) -> int:
        """Tokens whose logits are held at once while the loss is computed."""
        if self.tile_tokens is not None:
            return self.tile_tokens
        profile = self.profile
        return loss_tile_tokens(
            self.shape, device_kind=profile.kind, device_bytes=profile.device_bytes
        )

    def with_sequence_parallel(
        self, sp: int, all_to_all_bytes_per_second: float, head_blocks: int | None = None
    ) -> ModelCost:
        """Returns the costs of one of `sp` sequence-parallel ranks, the one with most heads."""
        return replace(
            self,
            shape=replace(self.shape, sp=sp, head_blocks=head_blocks),
            all_to_all_bytes_per_second=all_to_all_bytes_per_second,
        )

    def with_shards(self, shards: int, shard_bytes_per_second: float) -> ModelCost:
        """Returns the costs of one of the devices over which FSDP2 shards the model.

        Accelerate keeps trained weights in float32 where compute is in a narrower dtype.
        """
        shape = self.shape if self.shape.dtype_bytes > 2 else self.shape.with_float32_masters()
        shape = shape.with_shards(shards)
        return replace(self, shape=shape, shard_bytes_per_second=shard_bytes_per_second)

    def gather_seconds(self, layer: int | None) -> float:
        """Seconds in which FSDP2 gathers a layer's weights, trained or not; None: the head's.

        Of n devices each receives (n - 1) / n of them. An embedding is as large as a head.
        """
        return self._sharded_seconds(self.shape.gathered_bytes(layer))

    def reduce_seconds(self, layer: int | None) -> float:
        """Seconds in which FSDP2 reduces and scatters a layer's gradients; None: the head's."""
        return self._sharded_seconds(self.shape.reduced_bytes(layer))

    def _sharded_seconds(self, num_bytes: int) -> float:
        shards = self.shape.shards
        return (shards - 1) / shards * num_bytes / self.shard_bytes_per_second

    def all_to_all_seconds(self, layer: int, tokens: int, *, with_kv: bool = True) -> float:
        """Seconds of a layer's all-to-alls over a chunk, from tokens to heads and back.

        Each rank sends every other one that one's heads of its own tokens' queries, keys and
        values, and gets its own tokens' output back: of `2 Hq + 2 Hkv` heads of C tokens,
        (n - 1) / n^2 where n divides them. Backward sends as much. `tokens` is C. Recomputation
        sends no K/V (`with_kv`). Index keys, and what indexers choose, every other rank gets.
        """
        if self.sp == 1:
            return 0.0
        work, head_blocks = self.shape.layers[layer], self.shape.head_blocks
        heads = work.heads_of(self.sp, head_blocks)
        if with_kv and not work.borrows_keys:
            heads += work.kv_heads_of(self.sp, head_blocks)
        elements = heads * (work.qk_head_size + work.v_head_size) + with_kv * work.index_head_size
        size = elements * self.shape.dtype_bytes + work.chosen_bytes
        sent = self.batch_rows * (self.sp - 1) * self.shape.tokens_per_rank(tokens) * size
        return sent / self.all_to_all_bytes_per_second

    def unit_seconds(self, bounds: Bounds, layer_tile_tokens: int = 0) -> UnitSeconds:
        """Returns the seconds of every unit of a batch, by kind of layer."""
        key = ("units", bounds, layer_tile_tokens)
        if key not in self._memo:
            kinds = sorted(set(self.shape.layer_kinds))
            lengths = [end - start for start, end in bounds]
            tile = layer_tile_tokens

            def table(of: Callable[[int, int, int], float]) -> NDArray[np.float64]:
                return np.array([[of(kind, *chunk) for chunk in bounds] for kind in kinds])

            def recomputed(saved: Saved, layer: int, start: int, end: int) -> float:
                return self.recompute_seconds(layer, end - start, saved, tile, start=start)

            self._memo[key] = UnitSeconds(
                forward=table(lambda i, start, end: self.forward_seconds(i, start, end, tile)),
                backward=table(lambda i, start, end: self.backward_seconds(i, start, end, tile)),
                weight=table(lambda i, start, end: self.weight_seconds(i, end - start)),
                recompute=np.stack([table(partial(recomputed, saved)) for saved in SAVED], axis=1),
                kv_recompute=table(lambda i, start, end: self.kv_recompute_seconds(i, end - start)),
                head=np.array([self.head_seconds(n) for n in lengths]),
                head_evaluated=np.array([self.head_seconds(n, training=False) for n in lengths]),
            )
        return self._memo[key]

    def forward_seconds(self, layer: int, start: int, end: int, tile: int = 0) -> float:
        """Seconds of forward of `layer` over tokens [start, end), which see all before."""
        shape = self.shape.layers[layer]
        key = ("F", self.shape.layer_kinds[layer], start, end, tile)
        if key not in self._memo:
            tokens = end - start
            linear = self._linear_seconds(self.shape.linear_flops_per_token(layer), tokens, tile)
            pairs = self._pairs_flops(shape, start, end)
            index_flops = self.batch_rows * shape.index_flops_per_key * _pairs(shape, start, end)
            pairs += index_flops / self.sp
            attention = pairs / self._rate(self.profile.attention_forward_flops, tokens)
            busy = linear + attention + self._elementwise_seconds(layer, tokens, _FORWARD_TRAFFIC)
            busy += self._adapter_seconds(layer, tokens, _ADAPTER_FORWARD_PASSES)
            seconds = max(busy, self._launches(tokens, tile) * self.profile.launch_seconds)
            exchange = self.all_to_all_seconds(layer, tokens)
            self._memo[key] = seconds * self.correction.forward + exchange
        return self._memo[key]

    def backward_seconds(self, layer: int, start: int, end: int, tile: int = 0) -> float:
        """Seconds of backward of `layer` over tokens [start, end), without recomputation."""
        shape = self.shape.layers[layer]
        key = ("B", self.shape.layer_kinds[layer], start, end, tile)
        if key not in self._memo:
            tokens = end - start
            flops = self.shape.backward_linear_flops_per_token(layer)
            linear = self._linear_seconds(flops, tokens, tile)
            attention = (
                ATTENTION_BACKWARD_FLOPS
                * self._pairs_flops(shape, start, end)
                / self._rate(self.profile.attention_backward_flops, tokens)
            )
            busy = linear + attention + self._elementwise_seconds(layer, tokens, _BACKWARD_TRAFFIC)
            busy += self._adapter_seconds(layer, tokens, _ADAPTER_BACKWARD_PASSES)
            # About two kernels for each of forward's.
            seconds = max(busy, 2 * self._launches(tokens, tile) * self.profile.launch_seconds)
            exchange = self.all_to_all_seconds(layer, tokens)
            self._memo[key] = seconds * self.correction.backward + exchange
        return self._memo[key]

    def weight_seconds(self, layer: int, tokens: int) -> float:
        """The part of `backward_seconds` that computes gradients of weights; attention has none."""
        key = ("W", self.shape.layer_kinds[layer], tokens)
        if key not in self._memo:
            flops = self.shape.backward_linear_flops_per_token(layer)
            flops -= self.shape.layers[layer].input_gradient_flops
            self._memo[key] = self._linear_seconds(flops, tokens) * self.correction.backward
        return self._memo[key]

    def recompute_seconds(
        self, layer: int, tokens: int, saved: Saved, tile: int = 0, *, start: int = 0
    ) -> float:
        """Seconds of recomputing `layer` over `tokens` tokens from `start` on.

        `start` matters only where attention is recomputed.
        """
        if saved == "whole":
            return 0.0
        if saved == "hidden":
            flops = self._pairs_flops(self.shape.layers[layer], start, start + tokens)
            rate = self._rate(self.profile.attention_forward_flops, tokens)
            attention_seconds = flops / rate * self.correction.backward
            return self.recompute_seconds(layer, tokens, "inputs", tile) + attention_seconds
        key = ("R", self.shape.layer_kinds[layer], tokens, saved, tile)
        if key not in self._memo:
            flops = self.shape.recompute_flops_per_token(layer, saved)
            launches = self._launches(tokens, tile)
            if saved == "inputs" and launches > 1:
                flops += self.shape.layers[layer].tiles_recompute_flops
            linear = self._linear_seconds(flops, tokens, tile)
            busy = linear + self._elementwise_seconds(layer, tokens, _FORWARD_TRAFFIC)
            if saved == "inputs" or self.shape.layers[layer].matmuls_recompute_flops:
                busy += self._adapter_seconds(layer, tokens, _ADAPTER_FORWARD_PASSES)
            seconds = max(busy, launches * self.profile.launch_seconds)
            # With short chunks the device waits for Python, which recomputation keeps busier.
            host = _HOST_FORWARDS[saved] * launches * self.profile.launch_seconds
            beside = self.forward_seconds(layer, 0, tokens, tile) / self.correction.forward
            beside += self.backward_seconds(layer, 0, tokens, tile) / self.correction.backward
            rerun_seconds = max(seconds, host - beside) * self.correction.backward
            if saved == "inputs":
                # Queries are exchanged to heads again, and the saved attention output back.
                rerun_seconds += self.all_to_all_seconds(layer, tokens, with_kv=False)
            self._memo[key] = rerun_seconds
        return self._memo[key]

    def kv_recompute_seconds(self, layer: int, tokens: int) -> float:
        """Seconds of recomputing K/V of a chunk: the layer runs up to its attention.

        That is norm, projections (those of queries too) and rotary embedding.
        """
        key = ("K", self.shape.layer_kinds[layer], tokens)
        if key not in self._memo:
            shape = self.shape.layers[layer]
            elements = shape.kv_elements and shape.kv_elements + shape.q_elements
            linear = self._linear_seconds(2 * shape.hidden_size * elements, tokens)
            # Input read, norm written and read; projections written, and rotated in place.
            passed = (3 * shape.hidden_size + 4 * elements) * self.shape.dtype_bytes
            passed *= tokens * self.batch_rows
            seconds = linear + passed / self.profile.memory_bytes_per_second
            seconds = max(seconds, self.profile.launch_seconds) if elements else 0.0
            self._memo[key] = seconds * self.correction.backward
        return self._memo[key]

    def head_seconds(self, tokens: int, *, training: bool = True) -> float:
        """Seconds of head and loss of a chunk; in training with the gradients of both."""
        key = ("H", tokens, training)
        if key not in self._memo:
            products = 1.0 + (1.0 + self.shape.embedding_trained if training else 0.0)
            passes = 6
            if training and self.shape.shards > 1:
                # Under FSDP2 the head runs again in backward, before its gradients are computed.
                products, passes = products + 1.0, passes + 2
            flops = products * self.shape.head_flops_per_token
            # Logits and their gradient pass through memory a few times, in float32; the sum of a
            # trained head's gradient is read and written once a tile.
            rows, wide = self._own_rows(tokens), 4 * self.shape.num_logits
            traffic = passes * wide * rows
            if training and self.shape.embedding_trained:
                traffic += 2 * wide * self.shape.hidden_size * -(-rows // self.loss_tile_tokens)
            seconds = self._linear_seconds(flops, tokens)
            seconds += traffic / self.profile.memory_bytes_per_second
            self._memo[key] = seconds * self.correction.forward
        return self._memo[key]

    def d2h_seconds(self, num_bytes: float, *, both: bool = False) -> float:
        """Seconds of a copy to the host; `both` while another runs the other way."""
        rate = self.profile.both_d2h_bytes_per_second if both else self.profile.d2h_bytes_per_second
        return num_bytes / rate * self.correction.d2h

    def h2d_seconds(self, num_bytes: float, *, both: bool = False) -> float:
        """Seconds of a copy to the device; `both` while another runs the other way."""
        rate = self.profile.both_h2d_bytes_per_second if both else self.profile.h2d_bytes_per_second
        return num_bytes / rate * self.correction.h2d

    @property
    def update_seconds(self) -> float:
        """Seconds of the optimizer's update in host memory; 0 where it runs on the device."""
        resident = self.shape.host_resident
        if resident is None:
            return 0.0
        rate = self.profile.host_update_bytes_per_second or UNKNOWN_HOST_UPDATE
        return resident.update_bytes / rate

    def store_seconds(self, tier: Tier, num_bytes: float) -> float:
        """Seconds of writing from host memory to a tier behind it."""
        return num_bytes / TIERS[tier].store_rate(self.profile)

    def load_seconds(self, tier: Tier, num_bytes: float) -> float:
        """Seconds of reading from a tier behind the host into host memory."""
        return num_bytes / TIERS[tier].load_rate(self.profile)

    def _own_rows(self, tokens: int) -> int:
        """Tokens of a chunk on one rank, over all rows."""
        return self.batch_rows * self.shape.tokens_per_rank(tokens)

    def _pairs_flops(self, shape: LayerProfile, start: int, end: int) -> float:
        flops = self.batch_rows * shape.attention_flops_per_key * _pairs(shape, start, end)
        if self.sp == 1 or not shape.num_heads:
            return flops
        # Where there are more ranks than heads, several divide the queries of one head.
        each = max(1, self.sp // shape.num_heads)
        return flops * shape.heads_of(self.sp, self.shape.head_blocks) / (each * shape.num_heads)

    def _launches(self, tokens: int, tile: int) -> float:
        """Kernels of a layer whose token-wise modules run in tiles, over those of one without.

        Assumes that half of a layer's kernels are in token-wise modules.
        """
        rows = self._own_rows(tokens)
        return (1 + -(-rows // tile)) / 2 if tile and rows > tile else 1.0

    def _linear_seconds(self, flops_per_token: float, tokens: int, tile: int = 0) -> float:
        rows = self._own_rows(tokens)
        at_once = min(rows, tile) if tile else rows
        return flops_per_token * rows / self._rate(self.profile.matmul_flops, at_once)

    def _elementwise_seconds(self, layer: int, tokens: int, traffic: int) -> float:
        size = self._own_rows(tokens) * self.shape.activation_bytes_per_token(layer)
        size += self.batch_rows * self.shape.state_bytes(layer)
        return traffic * size / self.profile.memory_bytes_per_second

    def _adapter_seconds(self, layer: int, tokens: int, passes: float) -> float:
        """Seconds of passing inputs and outputs of a layer's adapted linears through memory.

        On a CPU the rate of matmuls, which is lower, stands for these products too.
        """
        lora = self.shape.lora
        if lora is None or self.profile.kind != "cuda":
            return 0.0
        size = self.shape.dtype_bytes
        if not lora.autocast:
            size = max(size, lora.dtype_bytes)
        elements = self.shape.layers[layer].adapter_weights // lora.rank
        passed = passes * elements * size * self._own_rows(tokens)
        return passed / self.profile.memory_bytes_per_second

    def _rate(self, curves: dict[str, Curve], tokens: int) -> float:
        return curve_for(curves, self.dtype_name).at(tokens)


def _pairs(layer: LayerProfile, start: int, end: int) -> int:
    """Number of (query, visible key) pairs of the queries [start, end)."""
    return visible_pairs(end, layer.window) - visible_pairs(start, layer.window)
