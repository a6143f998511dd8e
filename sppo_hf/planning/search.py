"""Searches around the solver: how to cut a sequence, and how long a sequence can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sppo_hf.planning.activation_modes import KEEP
from sppo_hf.planning.chunk_bounds import Bounds, PrefixCost, auto_bounds, lengthened
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions, Order
from sppo_hf.planning.lowering import compute_seconds
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.policies import uniform_modes
from sppo_hf.planning.solve import (
    BudgetViolation,
    Choices,
    Solution,
    solve,
)

TARGET_TOKENS = (2048, 4096, 8192, 16_384)
"""Chunk lengths that are tried, in tokens: shorter ones make kernels inefficient, longer ones only
take memory (SPPO, section 6: "2K to 16K")."""

# More chunks than this make solving slow and no plan better.
_MOST_CHUNKS = 256
# Ways to cut are solved by increasing compute until so many fit.
_PLANS_COMPARED = 2
_LENGTH_STEP_TOKENS = 1024
_LONGEST_TOKENS = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch that is planned for: all decisions that no search changes."""

    batch_rows: int
    """Rows of the batch."""

    tile_tokens: int
    """Tokens per tile of the loss."""

    layer_tile_tokens: int = 0
    """Tokens per tile of token-wise modules of layers; 0 for whole chunks."""

    training: bool = True
    """Whether a backward follows."""

    accumulates: bool = False
    """Whether gradients of earlier batches exist."""

    return_logits: bool = False
    """Whether logits are returned."""

    staging_bytes: int = 2**30
    """Host memory through which activations pass to and from the disk."""

    def decisions(self, bounds: Bounds, num_layers: int, order: Order = "by_chunk") -> Decisions:
        """Returns decisions that keep all activations, for others to change."""
        return Decisions(
            batch_rows=self.batch_rows,
            bounds=bounds,
            layer_modes=uniform_modes(len(bounds), num_layers, KEEP),
            training=self.training,
            tile_tokens=self.tile_tokens,
            layer_tile_tokens=self.layer_tile_tokens,
            accumulates=self.accumulates,
            return_logits=self.return_logits,
            staging_bytes=self.staging_bytes,
            order=order,
        )


def solve_chunks(
    cost: ModelCost,
    batch: Batch,
    cuts: Sequence[Bounds],
    budgets: Budgets,
    choices: Choices,
    *,
    orders: Sequence[Order] = ("by_chunk",),
    tiles: Sequence[int] = (),
    under_seconds: float = float("inf"),
) -> Solution | BudgetViolation:
    """Returns the fastest plan over several ways to cut a sequence and orders of the grid.

    Args:
        cost: seconds and bytes of every unit.
        batch: the batch.
        cuts: bounds to choose from, at least one.
        budgets: bytes per tier.
        choices: modes and tiers that may be used.
        orders: orders to choose from; the first of equally fast ones is taken.
        tiles: by layer, tile sizes for one chunk over all tokens, an alternative to several chunks.
        under_seconds: see `solve`.
    """
    best: Solution | None = None
    closest: BudgetViolation | None = None
    for order in orders:
        found_plans = 0
        other = best  # what another order has come to is to be beaten
        bases = [batch.decisions(bounds, cost.shape.num_layers, order) for bounds in cuts]
        if order == "by_layer":
            bases += tiled_layers(batch, cuts[0][-1][1], cost.shape.num_layers, tiles)
        for base in sorted(bases, key=lambda base: compute_seconds(base, cost)):
            if found_plans >= _PLANS_COMPARED:
                break
            if other is not None and compute_seconds(base, cost) >= other.step_seconds:
                break
            found = solve(
                cost,
                base,
                budgets,
                choices,
                best=other,
                under_seconds=under_seconds,
            )
            if isinstance(found, BudgetViolation):
                if closest is None or found.missing_bytes < closest.missing_bytes:
                    closest = found
                continue
            found_plans += 1
            if best is None or found.step_seconds < best.step_seconds:
                best = found
    if best is not None:
        return best
    assert closest is not None, "there is at least one way to cut"
    return closest


def tiled_layers(
    batch: Batch, total_tokens: int, num_layers: int, tiles: Sequence[int]
) -> Iterator[Decisions]:
    """Yields plans by layer in one chunk, with token-wise modules in tiles."""
    for tile_tokens in tiles:
        if tile_tokens < total_tokens * batch.batch_rows:
            whole = batch.decisions(((0, total_tokens),), num_layers, "by_layer")
            yield replace(whole, layer_tile_tokens=tile_tokens)


def chunk_cuts(
    cost: ModelCost,
    total_tokens: int,
    partition: str,
    cut: Callable[[int], Bounds] | None = None,
) -> Iterator[Bounds]:
    """Yields bounds by target length, without duplicates.

    Args:
        cost: of the model.
        total_tokens: length of the rows.
        partition: "flops" or "even".
        cut: returns bounds for a target in tokens; `auto_bounds` if None.
    """
    prefix = PrefixCost.of(cost.shape)
    seen: set[Bounds] = set()
    for target in TARGET_TOKENS:
        if total_tokens > _MOST_CHUNKS * target:
            if target != TARGET_TOKENS[-1]:
                continue
            target = -(-total_tokens // _MOST_CHUNKS)
        if cut is not None:
            bounds = cut(target)
        else:
            bounds = auto_bounds(prefix, total_tokens, target_tokens=target, partition=partition)
        bounds = lengthened(bounds, cost.shape)
        if bounds not in seen:
            seen.add(bounds)
            yield bounds


def most_chunks(total_tokens: int) -> int:
    """Returns the most chunks that any of `chunk_cuts` has, give or take one."""
    return min(_MOST_CHUNKS, -(-total_tokens // TARGET_TOKENS[0]))


def longest(missing: Callable[[int], float], *, known_tokens: int = 0) -> int:
    """Returns the largest possible number of tokens, a multiple of 1,024; 0 if none.

    Args:
        missing: bytes missing at a length, see `search_longest`.
        known_tokens: a length that is known to fit.
    """
    return search_longest(
        missing,
        step_tokens=_LENGTH_STEP_TOKENS,
        most_tokens=_LONGEST_TOKENS,
        known_tokens=known_tokens,
    ).longest_tokens


@dataclass(frozen=True, slots=True)
class Found:
    """Result of `search_longest`."""

    longest_tokens: int
    """The longest length that fits; 0 if none does."""

    failed_tokens: int | None
    """The shortest length that does not fit; None if the search ended at its limit."""


def search_longest(
    missing: Callable[[int], float], *, step_tokens: int, most_tokens: int, known_tokens: int = 0
) -> Found:
    """Searches the longest multiple of `step_tokens` that fits.

    Assumes that all lengths below one that fits fit too. Doubles the length until one fails, then
    tries where linear interpolation of the missing amount is zero, or the middle if two such tries
    in a row have not halved the interval. Takes about twice the logarithm of the answer in tries by
    bisection, few by interpolation, twice as many at worst.

    Args:
        missing: tries a length in tokens and returns how much is missing, in any unit: at most 0
            if it fits, and the less the more is free. A bare yes or no is -1 or 1.
        step_tokens: resolution, and the first length tried.
        most_tokens: the longest length tried.
        known_tokens: a length that is known to fit.
    """
    good, bad = known_tokens // step_tokens * step_tokens, None
    at_good, at_bad = 0.0, 0.0
    most_tokens -= most_tokens % step_tokens
    while good < most_tokens:
        tried = min(max(2 * good, step_tokens), most_tokens)
        at_tried = missing(tried)
        if at_tried > 0:
            bad, at_bad = tried, at_tried
            break
        good, at_good = tried, at_tried
    if bad is None:
        return Found(good, None)
    slow = 0
    while bad - good > step_tokens:
        left = bad - good
        share = at_good / (at_good - at_bad) if at_good < 0 and slow < 2 else 0.5
        middle = good + int(share * left) // step_tokens * step_tokens
        middle = min(max(middle, good + step_tokens), bad - step_tokens)
        at_middle = missing(middle)
        if at_middle > 0:
            bad, at_bad = middle, at_middle
        else:
            good, at_good = middle, at_middle
        slow = 0 if 2 * (bad - good) <= left + step_tokens else slow + 1
    return Found(good, bad)
