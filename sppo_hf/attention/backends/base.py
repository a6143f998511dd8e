"""The interface of attention backends, their masks, and the merge of partial results.

A backend is a stateless pair of functions: attention of one chunk's queries against keys and
values, and its gradient. A `CausalBand` or `Documents` says which query sees which keys; there are
no mask tensors. Where an indexer has chosen, the numbers of the chosen keys are given.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, S keys that a query
may read, H head size.

[Note: why merged values make backward exact]
Where keys are split into parts, backward of a part depends on the other parts in two places only:
the probabilities ``p = exp(s - lse)`` and ``delta = sum(dout * out)``. Given `lse` and `out` of
*all* keys, backward of a part is exactly its share of the whole gradient, with nothing to correct
afterwards. So every backward here takes the merged `(out, lse)` and returns the part's share, and
`merge_into` needs no backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypeAlias, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from sppo_hf.registry import ATTENTION_BACKENDS


@dataclass(frozen=True, slots=True)
class CausalBand:
    """Which keys each query row sees.

    Row ``i`` stands at key position ``q_start + i`` and sees the keys ``j`` with
    ``j <= q_start + i`` and, with a window, ``j > q_start + i - window``. There may be fewer keys
    than ``q_start + C`` (padded queries) or more (later keys, which no row sees). `q_start` may be
    negative: rows before key 0 see no key.
    """

    q_start: int
    """Position of the first query row, in tokens from the first of the given keys."""

    window: int | None = None
    """Number of keys a row sees, its own included, in tokens; None sees all earlier ones."""

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, f"a window of {self.window} tokens"

    def trim(self, num_rows: int, num_keys: int) -> TrimmedBand:
        """Drop the rows that see no key and the keys that no row sees.

        The band that remains has a `q_start` that is never negative, and its `window` is None where
        the window hides nothing.
        """
        row_start = min(max(0, -self.q_start), num_rows)
        row_stop = num_rows if num_keys else row_start
        if self.window is not None:
            row_stop = min(row_stop, num_keys + self.window - 1 - self.q_start)
        if row_stop <= row_start:
            return TrimmedBand(0, 0, 0, 0, CausalBand(0))
        position = self.q_start + row_start
        key_start = 0 if self.window is None else max(0, position - self.window + 1)
        key_stop = min(num_keys, self.q_start + row_stop)
        hides = self.window is not None and self.window < self.q_start + row_stop - key_start
        return TrimmedBand(
            row_start,
            row_stop,
            key_start,
            key_stop,
            CausalBand(position - key_start, self.window if hides else None),
        )


@dataclass(frozen=True, slots=True)
class Extent:
    """Half-open ranges of rows (queries) and keys, in tokens."""

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int

    @property
    def rows(self) -> slice:
        """The rows as a slice."""
        return slice(self.row_start, self.row_stop)

    @property
    def keys(self) -> slice:
        """The keys as a slice."""
        return slice(self.key_start, self.key_stop)

    @property
    def empty(self) -> bool:
        """Whether there are no rows or no keys."""
        return self.row_stop <= self.row_start or self.key_stop <= self.key_start


@dataclass(frozen=True, slots=True)
class TrimmedBand(Extent):
    """The rows that see a key, the keys that a row sees, and the band between them."""

    band: CausalBand


@dataclass(frozen=True, slots=True)
class Documents:
    """The mask of packed documents in one row.

    A document's queries see only its own keys, causally; its last query is at its last key, so a
    document that began in an earlier chunk has more keys than queries.
    """

    num_queries: tuple[int, ...]
    """Queries of each document, in tokens; they sum to C."""

    num_keys: tuple[int, ...]
    """Keys of each document, in tokens; they sum to T."""

    window: int | None = None
    """Number of keys a query sees, its own included; None for all of its document so far."""

    def __iter__(self) -> Iterator[tuple[slice, slice, CausalBand]]:
        """Yield the queries, the keys and the band between them of each document."""
        row = key = 0
        for rows, keys in zip(self.num_queries, self.num_keys, strict=True):
            band = CausalBand(keys - rows, self.window)
            yield slice(row, row + rows), slice(key, key + keys), band
            row, key = row + rows, key + keys


Mask: TypeAlias = CausalBand | Documents
"""Which keys each query sees."""


class Scores(TypedDict):
    """How scores are made, and which of them count."""

    band: Mask
    """Which keys each query sees; `Documents` only where `documents_at_once` says so."""
    scale: float
    """Factor on the scores."""
    softcap: NotRequired[float | None]
    """Cap of ``cap * tanh(score / cap)``, applied after `scale`; None for none."""
    chosen_BCS: NotRequired[Tensor | None]
    """Keys that each query reads of those of the band, int32; numbers that are no key's count for
    nothing. None for all. Only where `AttentionSpec.chosen` says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a model requires of a backend; enough to choose one and to give the reason."""

    device_type: str
    """"cpu", "cuda", ..."""

    dtype: torch.dtype
    """Data type of queries, keys and values."""

    qk_head_size: int
    """Elements per query and key head."""

    v_head_size: int
    """Elements per value head."""

    softcap: bool = False
    """Scores go through ``cap * tanh(score / cap)``."""

    window: bool = False
    """Some layer has a sliding window."""

    gqa_ratio: int = 1
    """Query heads per key/value head."""

    chosen: bool = False
    """An indexer chooses the keys that a query reads of those that it sees."""

    varied: bool = False
    """Rows are packed, padded or of many lengths, so shapes differ from batch to batch; "auto" then
    prefers kernels that do not build a plan for each shape."""

    @classmethod
    def of_layer(
        cls, layer: Any, *, device_type: str, dtype: torch.dtype, softcap: bool
    ) -> AttentionSpec:
        """Return the requirement of a layer: a `LayerProfile`, or what has its sizes."""
        return cls(
            device_type=device_type,
            dtype=dtype,
            qk_head_size=layer.qk_head_size,
            v_head_size=layer.v_head_size,
            softcap=softcap,
            window=layer.window is not None,
            gqa_ratio=layer.num_heads // layer.num_kv_heads,
            chosen=layer.chosen,
        )

    def __str__(self) -> str:
        """Describe the requirement for reasons and errors."""
        sizes = f"head size {self.qk_head_size}"
        if self.v_head_size != self.qk_head_size:
            sizes += f" (values {self.v_head_size})"
        features = [sizes]
        if self.gqa_ratio != 1:
            features.append(f"{self.gqa_ratio} query heads per key head")
        if self.window:
            features.append("sliding window")
        if self.softcap:
            features.append("soft-capped scores")
        if self.chosen:
            features.append("chosen keys")
        if self.varied:
            features.append("varied lengths")
        device = self.device_type.upper()
        return ", ".join([device, str(self.dtype).removeprefix("torch."), *features])


class AttentionOutput(NamedTuple):
    """Result of a forward.

    `out_BNCH` has the dtype of the queries; `lse_BNC` is the natural log-sum-exp of the scaled
    scores, float32 (float64 for float64). A row that saw no key has out 0 and lse -inf.
    """

    out_BNCH: Tensor
    lse_BNC: Tensor


class Gradients(NamedTuple):
    """Result of a backward.

    `dq_BNCH` has the dtype of the queries; `dk_BKTH` and `dv_BKTH` that of the keys, or the wider
    accumulation dtype where the backend returns that. Callers add up the shares of all chunks in
    the accumulation dtype.
    """

    dq_BNCH: Tensor
    dk_BKTH: Tensor
    dv_BKTH: Tensor


class BackwardInputs(NamedTuple):
    """Inputs of a backward: [B, N, C, H], keys and values [B, K, T, H], log-sum-exp [B, N, C].

    Output and log-sum-exp are merged over all keys, if these are only a part of them.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Backend(ABC):
    """One way to compute attention of a chunk's queries against keys and values.

    Any strides are accepted; the value head size may differ from the query/key head size; the
    number of query heads is a multiple of the number of key heads. No call is recorded by autograd.
    """

    name: str
    """Name in the registry and in the setting `attention_backend`."""

    documents_at_once: bool = False
    """Whether one call can take all documents of a row, as a `Documents` mask."""

    plans_each_shape: bool = False
    """Whether the first call with a new shape builds a kernel, which takes about a second."""

    @classmethod
    def variants(cls) -> tuple[Callable[[], Backend], ...]:
        """Return constructors of its variants, preferred first; CUDA uses the first exact one."""
        return (cls,)

    @abstractmethod
    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        """Return why this backend cannot serve `requirement`, as words after its name, or None."""

    @abstractmethod
    def forward(
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, **scores: Unpack[Scores]
    ) -> AttentionOutput:
        """Attend with the chunk's queries; the values' H may differ from the keys'."""

    @abstractmethod
    def backward(self, *given: Tensor, **scores: Unpack[Scores]) -> Gradients:
        """Share of these keys in the gradient, of `BackwardInputs`.

        See [Note: why merged values make backward exact].
        """


Made = TypeVar("Made", bound=type[Backend])


def register_backend(name: str, **auto_rank: int) -> Callable[[Made], Made]:
    """Class decorator: register a backend by name, a value of the setting `attention_backend`.

    `auto_rank` is, by device type (`cuda=3`), its place among the backends that "auto" may take. On
    device types that are not given it is used only if set by name.
    """

    def register(made: Made) -> Made:
        made.name = name
        ATTENTION_BACKENDS.add(name, made.variants(), **auto_rank)
        return made

    return register


def determinism() -> int:
    """Return PyTorch's deterministic mode: 0 off, 1 warn about nondeterminism, 2 raise."""
    return torch.get_deterministic_debug_mode()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over keys and parts: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_forward(q_BNCH: Tensor, v_head_size: int) -> AttentionOutput:
    """Return output 0 and log-sum-exp -inf for every row, as for queries that see no key."""
    num_rows, num_heads, num_tokens, _ = q_BNCH.shape
    # [B, C, N, H] in memory, the layout of the projections.
    out_BNCH = q_BNCH.new_zeros(num_rows, num_tokens, num_heads, v_head_size).transpose(1, 2)
    lse_BNC = q_BNCH.new_full(
        q_BNCH.shape[:3], float("-inf"), dtype=accumulation_dtype(q_BNCH.dtype)
    )
    return AttentionOutput(out_BNCH, lse_BNC)


def merge_partials(first: AttentionOutput, second: AttentionOutput) -> AttentionOutput:
    """Merge attention over two disjoint sets of keys, in float32 (float64 for float64).

    The output has the dtype of the first. Rows that saw no key in either have output 0 and
    log-sum-exp -inf.
    """
    out_BNCH = first.out_BNCH.to(accumulation_dtype(first.out_BNCH.dtype), copy=True)
    lse_BNC = first.lse_BNC.clone()
    merge_into(out_BNCH, lse_BNC, second)
    return AttentionOutput(out_BNCH.to(first.out_BNCH.dtype), lse_BNC)


def merge_into(out_BNCH: Tensor, lse_BNC: Tensor, other: AttentionOutput) -> None:
    """Merge attention over further keys into `(out_BNCH, lse_BNC)`, in place.

    `out_BNCH` has the accumulation dtype; both may be strided views.
    """
    other_lse_BNC = other.lse_BNC.to(lse_BNC.dtype)
    merged_BNC = torch.logaddexp(lse_BNC, other_lse_BNC)
    # -inf minus -inf is NaN; a row without keys on both sides gets weight 0.
    anchor_BNC = merged_BNC.masked_fill(merged_BNC == float("-inf"), 0.0)
    weight_BNC1 = (other_lse_BNC - anchor_BNC).exp_().unsqueeze(-1).to(out_BNCH.dtype)
    # The weights of both sides sum to one, so this is an interpolation: one pass, with half the
    # error of two products, whose rounded weights do not sum to one.
    out_BNCH.lerp_(other.out_BNCH.to(out_BNCH.dtype), weight_BNC1)
    lse_BNC.copy_(merged_BNC)


def chosen_mask(chosen_BcS: Tensor, keys: slice) -> Tensor:
    """Return which of `keys` are among the chosen ones, `[B, c, t]`."""
    num_keys = keys.stop - keys.start
    places_BcS = chosen_BcS.long() - keys.start
    # One place more takes all numbers of other keys.
    places_BcS.masked_fill_((places_BcS < 0) | (places_BcS >= num_keys), num_keys)
    shape = (*chosen_BcS.shape[:2], num_keys + 1)
    mask_Bct = torch.zeros(shape, dtype=torch.bool, device=chosen_BcS.device)
    return mask_Bct.scatter_(-1, places_BcS, True)[..., :num_keys]


HALF_DTYPES = (torch.float16, torch.bfloat16)


def missing_kernel(
    requirement: AttentionSpec,
    device_type: str,
    dtypes: tuple[torch.dtype, ...],
    *,
    largest_head_size: int | None = None,
    softcap: bool = False,
    chosen: bool = False,
) -> str | None:
    """Return why a kernel cannot serve the requirement, for `Backend.reason_unsupported`.

    The kernel runs on one device type ("cpu" or "cuda"); `largest_head_size` None is unlimited.
    """
    dtype = str(requirement.dtype).removeprefix("torch.")
    head_size = max(requirement.qk_head_size, requirement.v_head_size)
    if requirement.device_type != device_type:
        here = {"cpu": "the CPU", "cuda": "CUDA"}[device_type]
        return f"runs on {here}, not on {requirement.device_type}"
    if requirement.dtype not in dtypes:
        return f"has no kernel for {dtype}"
    if largest_head_size is not None and head_size > largest_head_size:
        return f"has no kernel for head size {head_size}, only up to {largest_head_size}"
    if requirement.chosen and not chosen:
        return "cannot leave out keys that an indexer has not chosen"
    return "cannot soft-cap scores" if requirement.softcap and not softcap else None
