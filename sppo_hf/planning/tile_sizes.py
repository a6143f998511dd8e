"""Sizes of tiles: of logits, of token-wise modules, of streamed K/V, and of staging memory."""

from __future__ import annotations

from sppo_hf.planning.model_profile import FLOAT32_BYTES
from sppo_hf.planning.model_shape import ModelShape

# Logits at once while one tile's loss is computed, in float32. Larger tiles gain nothing: the
# head's matrix product is already bound by arithmetic.
_LOGITS_TILE_BYTES = {"cpu": 128 * 2**20, "cuda": 256 * 2**20}
# Of a head that trains on a GPU: the sum of its weight's gradient, in float32, passes through
# memory once a tile, which takes as long as the products of 300 tokens on an H100.
_MOST_TRAINED_TILE_BYTES = 2**30
_TRAINED_TILE_SHARE = 64
# One layer's K/V in a block. Larger blocks would save a few sums of partial attention; several
# blocks and their float32 sums are on the device at once, so they are as small as costs nothing.
_KV_BLOCK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
_KV_BLOCK_MULTIPLE_TOKENS = 1024

MAX_COPIED_BYTES = 2**25
"""Most bytes of K/V that a CPU's attention repeats for its backward; see `parallel_heads`. Their
gradients take as much again."""

_WORTH_COPIES = 0.75
"""Copying key heads must reduce the busiest thread's work to this share. A backward with three
copies of each took 1.26 times the processor's time (9 query heads, 3 key heads, 512 queries, 2,048
keys)."""


def loss_tile_tokens(
    shape: ModelShape, *, device_kind: str, device_bytes: int | None = None
) -> int:
    """Returns the tokens per tile of the loss for `loss_tile_tokens="auto"`.

    As many (in multiples of 64) as keep a tile's float32 logits within 128 MiB on a CPU and 256 MiB
    on a GPU: Llama-3's 128K vocabulary gets 512 tokens on a GPU. A head that trains there gets
    1/64 of the device's budget `device_bytes`, if that is more, up to 1 GiB.
    """
    tile_bytes = _LOGITS_TILE_BYTES[device_kind]
    if device_kind == "cuda" and device_bytes is not None and shape.embedding_trained:
        share = min(_MOST_TRAINED_TILE_BYTES, device_bytes // _TRAINED_TILE_SHARE)
        tile_bytes = max(tile_bytes, share)
    tokens = tile_bytes // (shape.num_logits * FLOAT32_BYTES)
    return max(64, tokens // 64 * 64)


INDEX_TILE_BYTES = 2**28
"""Maximum bytes of an indexer's scores at once, of one query at least. Its own code makes another
tensor of that size, and copies all index keys to float32, which takes little time beside this many
products."""


BIAS_BYTES = 2**27
"""Maximum bytes of the bias by which an attention kernel leaves out keys that were not chosen."""


def index_tile_tokens(rows: int, num_heads: int, num_keys: int) -> int:
    """Returns the queries of a row for which an indexer's heads score `num_keys` keys at once."""
    return max(1, INDEX_TILE_BYTES // (rows * num_heads * num_keys * FLOAT32_BYTES))


LAYER_TILES_TOKENS = {"cpu": (512,), "cuda": (2048, 8192)}
"""Tile sizes in tokens for token-wise modules of a layer: longer tiles make no kernel faster,
shorter ones save little beside what a layer holds over all tokens."""


def parallel_heads(rows: int, num_heads: int, num_kv_heads: int, threads: int) -> int:
    """Returns the number of key heads with which a backward of one thread per key head is fastest.

    A repeated head is several copies, each with its share of the query heads; few copies are worth
    it. `num_kv_heads` divide `num_heads`.
    """
    best, least = num_kv_heads, float("inf")
    for copies in range(1, num_heads // num_kv_heads + 1):
        if (num_heads // num_kv_heads) % copies:
            continue
        # The busiest thread's heads, each of a share of the work.
        taken = -(-rows * num_kv_heads * copies // threads) / copies
        if taken < _WORTH_COPIES * least:
            best, least = num_kv_heads * copies, taken
    return best


def kv_block_tokens(
    shape: ModelShape,
    total_tokens: int,
    *,
    batch_rows: int,
    device_kind: str,
    device_bytes: int | None,
) -> int:
    """Returns the tokens per block of K/V that are streamed to the device.

    The whole sequence while one layer's K/V are small, which makes a layer's prefix one block; past
    that, as many (in multiples of 1,024) as have 256 MiB of K/V in a layer on a GPU, 8 MiB on a
    CPU, and 1/64 of the device's budget at most: 65,536 tokens of Llama-3.1-8B in bf16.
    """
    layer_bytes = max(shape.kv_bytes_per_token(i) for i in range(len(shape.layers))) * batch_rows
    most_bytes = _KV_BLOCK_BYTES[device_kind]
    if device_bytes is not None:
        most_bytes = min(most_bytes, device_bytes // 64)
    if not layer_bytes:
        return total_tokens  # no layer has attention
    tokens = most_bytes // layer_bytes
    rounded = tokens // _KV_BLOCK_MULTIPLE_TOKENS * _KV_BLOCK_MULTIPLE_TOKENS
    return min(total_tokens, max(_KV_BLOCK_MULTIPLE_TOKENS, rounded))


def passing_bytes(
    shape: ModelShape, chunk_tokens: int, *, batch_rows: int, block_tokens: int
) -> int:
    """Returns the least staging memory with which a copy and a disk transfer overlap.

    That is two tensors of the largest kind: what a layer saves, K/V of a chunk in one tensor, or
    the float32 sums of a block's key gradients. `block_tokens` is 0 where K/V do not pass.
    """
    own, layers = shape.tokens_per_rank(chunk_tokens), range(len(shape.layers))
    largest = own * max(layer.largest_bytes for layer in shape.layers)
    kv = chunk_tokens * max(map(shape.kv_bytes_per_token, layers))
    sums = max(map(shape.dkv_bytes_per_token, layers))
    return 2 * batch_rows * max(largest, kv, max(block_tokens, 0) * sums)
