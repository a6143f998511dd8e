"""Cutting a sequence into chunks: where the bounds are, and what a prefix costs.

Cost here is forward FLOPs, which is proportional to backward's and so balances both. Lengths and
positions are in tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.model_shape import ModelShape

Bounds = tuple[tuple[int, int], ...]

# What num_chunks="auto" aims at. On a GPU 2K to 16K tokens keep kernels efficient (2K chunks were
# measured to cost up to 40% of the throughput) while the saved activations of a running layer stay
# small beside its K/V; 8K is the middle. A CPU is busy with far fewer rows, and there memory is the
# point.
TARGET_CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}

TARGET_TOKENS = (2048, 4096, 8192, 16_384)
"""Chunk lengths that a search tries, in tokens: shorter ones make kernels inefficient, longer ones
only take memory (SPPO, section 6: "2K to 16K")."""

# A search uses no more chunks than this: more make solving slow and no plan better.
_MOST_CHUNKS = 256

# Rows of a GPU kernel's tile.
_TILE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """Forward FLOPs of the first x tokens of a sequence, and its inverse.

    The marginal cost of the token at position x is `linear + sum_layers c * min(x, window)`: linear
    between windows, so the cost is a quadratic between breakpoints and can be inverted exactly.
    """

    starts: tuple[float, ...]
    """Positions where the slope changes: 0 and each window."""

    costs: tuple[float, ...]
    """Cost of the prefix that ends at each start."""

    rates: tuple[float, ...]
    """Marginal cost per token at each start."""

    slopes: tuple[float, ...]
    """Growth of the marginal cost per token after each start."""

    @classmethod
    def of(cls, shape: ModelShape) -> PrefixCost:
        """Builds the curve of a model: all layers and the head."""
        per_window: dict[int | None, int] = {}
        for layer in shape.layers:
            growth = layer.attention_flops_per_key
            per_window[layer.window] = per_window.get(layer.window, 0) + growth
        windows = sorted(w for w in per_window if w is not None)
        starts, costs = [0.0], [0.0]
        rates, slopes = [float(shape.linear_flops_per_token())], [float(sum(per_window.values()))]
        for window in windows:
            length = window - starts[-1]
            costs.append(costs[-1] + rates[-1] * length + slopes[-1] * length**2 / 2)
            rates.append(rates[-1] + slopes[-1] * length)
            slopes.append(slopes[-1] - per_window[window])
            starts.append(float(window))
        return cls(tuple(starts), tuple(costs), tuple(rates), tuple(slopes))

    def upto(self, tokens: float) -> float:
        """Returns the FLOPs of the first `tokens` tokens."""
        i = bisect_right(self.starts, tokens) - 1
        length = tokens - self.starts[i]
        return self.costs[i] + self.rates[i] * length + self.slopes[i] * length**2 / 2

    def tokens_for(self, cost: float) -> float:
        """Returns the prefix length whose FLOPs are `cost`: the inverse of `upto`."""
        i = bisect_right(self.costs, cost) - 1
        rest, rate, slope = cost - self.costs[i], self.rates[i], self.slopes[i]
        # The form of the quadratic's root that stays exact as the slope goes to zero.
        return self.starts[i] + 2 * rest / (rate + math.sqrt(rate**2 + 2 * slope * rest))


def chunk_bounds(
    config: SPPOConfig,
    shape: ModelShape,
    total_tokens: int,
    *,
    device_kind: str = "cpu",
    stages: int = 1,
    target_tokens: int | None = None,
) -> Bounds:
    """Cuts a sequence as the config asks.

    Rows of `total_tokens` are padded. Chunks of `target_tokens`, or what suits the device, are what
    num_chunks="auto" aims at; for `stages` see `partition_of`.

    Returns:
        Half-open (start, end) pairs in order, none empty, that cover [0, total_tokens).

    Raises:
        ConfigError: `chunk_lengths` do not sum to `total_tokens`, or there are more chunks than
            tokens, or one of a single token where `lengthened` forbids it.
    """
    assert total_tokens >= 1, f"a sequence has at least one token, got {total_tokens}"
    partition = partition_of(config, stages=stages)
    if config.chunk_lengths is not None:
        return _explicit_bounds(config, config.chunk_lengths, total_tokens, shape)
    if config.chunk_tokens is not None:
        ends = [*range(config.chunk_tokens, total_tokens, config.chunk_tokens), total_tokens]
        return lengthened(_pairs(ends), shape)
    if config.num_chunks == "auto":
        target = target_tokens or TARGET_CHUNK_TOKENS[device_kind]
        curve = PrefixCost.of(shape)
        bounds = auto_bounds(curve, total_tokens, target_tokens=target, partition=partition)
        return lengthened(bounds, shape)
    if config.num_chunks > total_tokens:
        raise ConfigError(
            f"num_chunks={config.num_chunks} is more than the {total_tokens:,} tokens of this "
            f"batch. Allowed here: 1 to {total_tokens:,}. Set num_chunks='auto' or "
            "chunk_tokens=<tokens>, which fit any length."
        )
    return counted_bounds(shape, total_tokens, config.num_chunks, partition)


def names_cut(config: SPPOConfig) -> bool:
    """Whether the settings leave no choice of the number of chunks."""
    return config.num_chunks != "auto" or bool(config.chunk_lengths or config.chunk_tokens)


def counted_bounds(shape: ModelShape, total_tokens: int, num_chunks: int, partition: str) -> Bounds:
    """Returns the bounds of `num_chunks` chunks, by `partition` ("even" or "flops")."""
    if partition == "even":
        return lengthened(even_bounds(total_tokens, num_chunks), shape)
    return lengthened(balanced_bounds(PrefixCost.of(shape), total_tokens, num_chunks), shape)


def lengthened(bounds: Bounds, shape: ModelShape) -> Bounds:
    """Moves the starts of chunks of one token back by one where the model carries states.

    A single token with a state before it is a step of generation to such models' code, which
    computes no gradients there; the first chunk has no state before it.

    Raises:
        ConfigError: there are more chunks than that leaves tokens for.
    """
    if not shape.has_recurrent_state:
        return bounds
    starts = [start for start, _ in bounds]
    end = bounds[-1][1]
    for index in range(len(starts) - 1, 0, -1):
        starts[index] = min(starts[index], end - 2)
        end = starts[index]
    if end < 1:
        raise ConfigError(
            f"{bounds[-1][1]:,} tokens in {len(bounds)} chunks: this model's layers carry a state, "
            "so chunks behind the first have at least 2 tokens. Set fewer chunks (num_chunks, or a "
            "larger chunk_tokens)."
        )
    return _pairs([*starts[1:], bounds[-1][1]])


def moved_out_of(bounds: Bounds, spans: Iterable[tuple[int, int]]) -> Bounds:
    """Moves bounds out of spans of tokens, by as few tokens as can be: no chunk ends within one.

    Of overlapping spans, as those of several rows may be, a bound leaves all. The number of chunks
    stays: ranks that gather weights for every chunk wait for each other.

    Raises:
        ConfigError: a chunk would have no tokens left.
    """
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    total = bounds[-1][1]
    # The fewest tokens by which all bounds so far have moved, and where they then are, by the last.
    best: list[tuple[int, tuple[int, ...]]] = [(0, (0,))]
    full = (0, 0)
    for bound, _ in bounds[1:]:
        around = next((span for span in joined if span[0] < bound < span[1]), None)
        full = around or full
        longer: list[tuple[int, tuple[int, ...]]] = []
        for place in around or (bound,):
            before = [(tokens, places) for tokens, places in best if places[-1] < place < total]
            if before:
                tokens, places = min(before)
                longer.append((tokens + abs(bound - place), (*places, place)))
        if not longer:
            start, end = full
            raise ConfigError(
                f"{total:,} tokens in {len(bounds)} chunks: tokens {start:,} to {end:,} see each "
                "other in both directions (those of an image, or of images in several rows side "
                f"by side), so a chunk has to hold all {end - start:,}. Set fewer chunks "
                "(num_chunks, or a larger chunk_tokens), or micro_batch_size=1."
            )
        best = longer
    return _pairs([*min(best)[1][1:], total])


def partition_of(config: SPPOConfig, *, stages: int = 1) -> Literal["flops", "even"]:
    """Returns the setting `partition`, "auto" resolved.

    In a pipeline chunks of unequal work leave ranks idle, and the paper's rule of offloading counts
    on equal work. On one device neither is so, the longest chunk decides the peak, and kernels are
    built once for each length: there lengths are equal.
    """
    if config.partition != "auto":
        return config.partition
    return "flops" if stages > 1 or config.offload_is_partial else "even"


def partitions_of(config: SPPOConfig) -> tuple[Literal["flops", "even"], ...]:
    """Returns what a search on one device may cut by; the later where nothing fits by the earlier.

    The last chunk has the most keys, so the least memory needs it to be short, as equal work makes
    it.
    """
    first = partition_of(config)
    return (first, "flops") if config.partition == "auto" and first == "even" else (first,)


def even_bounds(total_tokens: int, num_chunks: int) -> Bounds:
    """Cuts into chunks of the same number of tokens, give or take one rounding step.

    Where that step is a kernel's tile only the last chunk differs, so that there are two lengths at
    most to build kernels for.
    """
    step = rounding_tokens(total_tokens, num_chunks)
    length = math.ceil(total_tokens / num_chunks / step) * step
    if step == _TILE_TOKENS and (num_chunks - 1) * length < total_tokens:
        return _pairs([*(length * (i + 1) for i in range(num_chunks - 1)), total_tokens])
    ends = [total_tokens * (i + 1) / num_chunks for i in range(num_chunks)]
    return _pairs(_rounded(ends, total_tokens, step))


def balanced_bounds(
    cost: PrefixCost, total_tokens: int, num_chunks: int, *, round_to_tokens: int | None = None
) -> Bounds:
    """Cuts into chunks of the same FLOPs, so lengths fall: later tokens see more keys.

    Boundaries solve `F(x_i) = i * F(S) / N`. With F(x) = a x + c x^2 / 2 that is
    `x_i = (-a + sqrt(a^2 + 2 c F(S) i / N)) / c`; windows make F (`cost`) piecewise so. Of S tokens
    are made N chunks, at most S. Bounds are rounded to a multiple, or to one by chunk length.
    """
    whole = cost.upto(total_tokens)
    ends = [cost.tokens_for(whole * (i + 1) / num_chunks) for i in range(num_chunks)]
    if round_to_tokens is None:
        round_to_tokens = rounding_tokens(total_tokens, num_chunks)
    return _pairs(_rounded(ends, total_tokens, round_to_tokens))


@lru_cache(maxsize=256)
def auto_bounds(
    cost: PrefixCost, total_tokens: int, *, target_tokens: int, partition: str
) -> Bounds:
    """Cuts into about `total_tokens / target_tokens` chunks, none far from the target.

    Balanced FLOPs alone would make the first of 128 chunks of a million tokens 70K long, and the
    activations of the longest chunk are what memory has to hold. So lengths stay between a quarter
    of the target and twice the target; inside that range FLOPs are equal.
    """
    num_chunks = max(1, (total_tokens + target_tokens // 2) // target_tokens)
    if num_chunks == 1 or partition == "even":
        return even_bounds(total_tokens, num_chunks)
    shortest, longest = target_tokens // 4, target_tokens * 2

    def ends_at(quota: float) -> list[float]:
        ends: list[float] = []
        here = 0.0
        for _ in range(num_chunks):
            there = cost.tokens_for(cost.upto(here) + quota)
            here += min(max(there - here, shortest), longest)
            ends.append(here)
        return ends

    # The end of the last chunk grows with the quota: bisect until it is the end of the sequence.
    low, high = 0.0, cost.upto(total_tokens)
    ends = ends_at(high / num_chunks)
    for _ in range(60):
        if abs(ends[-1] - total_tokens) < 0.5:
            break
        middle = (low + high) / 2
        ends = ends_at(middle)
        low, high = (middle, high) if ends[-1] < total_tokens else (low, middle)
    return _pairs(_rounded(ends, total_tokens, rounding_tokens(total_tokens, num_chunks)))


def chunk_cuts(shape: ModelShape, total_tokens: int, partition: str) -> Iterator[Bounds]:
    """Yields the bounds that a search tries, one for each of `TARGET_TOKENS`, without duplicates.

    Targets that would give more than `_MOST_CHUNKS` chunks are left out, but for the longest one,
    in whose place that many chunks are tried. `partition` is "flops" or "even".
    """
    prefix = PrefixCost.of(shape)
    seen: set[Bounds] = set()
    for target in TARGET_TOKENS:
        if total_tokens > _MOST_CHUNKS * target:
            if target != TARGET_TOKENS[-1]:
                continue
            target = -(-total_tokens // _MOST_CHUNKS)
        bounds = auto_bounds(prefix, total_tokens, target_tokens=target, partition=partition)
        bounds = lengthened(bounds, shape)
        if bounds not in seen:
            seen.add(bounds)
            yield bounds


def most_chunks(total_tokens: int) -> int:
    """Returns the most chunks that any of `chunk_cuts` has, give or take one."""
    return min(_MOST_CHUNKS, -(-total_tokens // TARGET_TOKENS[0]))


def rounding_tokens(total_tokens: int, num_chunks: int) -> int:
    """Returns the multiple that bounds are rounded to.

    Rows that fill a GPU kernel's tile; short chunks would lose their balance to such a step.
    """
    mean_tokens = total_tokens / num_chunks
    if mean_tokens >= 8 * _TILE_TOKENS:
        return _TILE_TOKENS
    return 16 if mean_tokens >= 256 else 1


def _explicit_bounds(
    config: SPPOConfig, lengths: tuple[int, ...], total_tokens: int, shape: ModelShape
) -> Bounds:
    if sum(lengths) != total_tokens:
        written = ""
        if config.planned_for is not None:
            written = (
                " They are those of a written plan: for other rows write it again, with `sppo plan "
                f"MODEL --seq-len {total_tokens} --write`."
            )
        raise ConfigError(
            f"chunk_lengths sum to {sum(lengths):,} tokens ({len(lengths)} chunks), but the rows "
            f"of this batch are {total_tokens:,} tokens long. Both must be equal: pad or pack "
            f"every batch to {sum(lengths):,} tokens, or set chunk_tokens=<tokens> or num_chunks, "
            f"which follow each batch's length (evaluation batches included).{written}"
        )
    if shape.has_recurrent_state and 1 in lengths[1:]:
        raise ConfigError(
            f"chunk_lengths={lengths}: chunk {lengths.index(1, 1)} has one token. Allowed behind "
            "the first chunk are 2 tokens or more: this model's layers carry a state, and a single "
            "token with a state is a step of generation to their code. Lengthen it by a token."
        )
    return _pairs(list(accumulate(lengths)))


def _rounded(ends: list[float], total_tokens: int, multiple: int) -> list[int]:
    """Rounds ends to `multiple`, strictly increasing, the last one exactly `total_tokens`."""
    rounded = [round(end / multiple) * multiple for end in ends]
    rounded[-1] = total_tokens
    for i, end in enumerate(rounded):
        rounded[i] = max(end, rounded[i - 1] + 1 if i else 1)
    rounded[-1] = total_tokens
    for i in range(len(rounded) - 2, -1, -1):
        rounded[i] = min(rounded[i], rounded[i + 1] - 1)
    return rounded


def _pairs(ends: list[int]) -> Bounds:
    return tuple(zip([0, *ends[:-1]], ends, strict=True))
