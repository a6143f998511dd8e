"""The one signature every attention backend has, and the words its callers use.

A backend is a stateless pair of functions: attention of the queries of one chunk against keys and
values, and its gradient. What is visible to which query is said by a `CausalBand` or `Documents`,
never by a mask tensor.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, H head size.

[Note: why merged values make backward exact]
Softmax over keys that were split into parts needs the parts only in two places: the probabilities
``p = exp(s - lse)`` and ``delta = sum(dout * out)``. Given `lse` and `out` of *all* keys, the
backward of a part is exactly that part's share of the whole backward; nothing has to be corrected
afterwards. So every backward here takes the merged `(out, lse)` and returns the part's share, and
`merge_into` needs no counterpart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from sppo_hf.registry import ATTENTION_BACKENDS


@dataclass(frozen=True, slots=True)
class CausalBand:
    """Which keys each query row sees.

    Row ``i`` stands at key position ``q_start + i`` and sees the keys ``j`` with
    ``j <= q_start + i`` and, under a window, ``j > q_start + i - window``. There may be fewer keys
    than ``q_start + C`` (padded queries) or more (later keys, seen by nobody). `q_start` may be
    negative: rows before key 0 see nothing.
    """

    q_start: int
    """Position of the first query row, in tokens, counted in the keys handed over."""

    window: int | None = None
    """Number of keys a row sees, its own included, in tokens; None sees all earlier ones."""

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, f"a window of {self.window} tokens"

    def trim(self, num_rows: int, num_keys: int) -> TrimmedBand:
        """Cut away rows that see no key and keys that no row sees, of so many query rows and keys.

        Returns:
            The ranges that are left, and the band in their own coordinates. Its `q_start` is never
            negative, and its `window` is None where the window hides nothing.
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
        """Those rows."""
        return slice(self.row_start, self.row_stop)

    @property
    def keys(self) -> slice:
        """Those keys."""
        return slice(self.key_start, self.key_stop)

    @property
    def empty(self) -> bool:
        """True if there are no rows, or no keys."""
        return self.row_stop <= self.row_start or self.key_stop <= self.key_start


@dataclass(frozen=True, slots=True)
class TrimmedBand(Extent):
    """The rows that see a key, the keys that a row sees, and the band between them."""

    band: CausalBand


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents side by side in one row, in tokens.

    A document's queries see its own keys and no other's; its last query stands at its last key, so
    a document that began in an earlier chunk has more keys than queries.
    """

    num_queries: tuple[int, ...]
    """Of each document; they sum to the queries at hand."""

    num_keys: tuple[int, ...]
    """Of each document; they sum to the keys at hand."""

    window: int | None = None
    """Number of keys a query sees, its own included; None for all of its document so far."""

    def __iter__(self) -> Iterator[tuple[slice, slice, CausalBand]]:
        """Of each document: its queries, its keys, and which of these they see."""
        row = key = 0
        for rows, keys in zip(self.num_queries, self.num_keys, strict=True):
            band = CausalBand(keys - rows, self.window)
            yield slice(row, row + rows), slice(key, key + keys), band
            row, key = row + rows, key + keys


Mask: TypeAlias = CausalBand | Documents
"""Which keys each query sees."""


class AttendingLayer(Protocol):
    """What a layer with attention says of it."""

    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def qk_head_size(self) -> int:
        """Elements per query and key head."""
        ...

    @property
    def v_head_size(self) -> int:
        """Elements per value head."""
        ...

    @property
    def window(self) -> int | None:
        """Of a sliding window, in tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a model asks of a backend; enough to choose one and to say why."""

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

    varied: bool = False
    """Rows are packed, padded or of many lengths, so shapes differ from batch to batch.

    A wish, which "auto" heeds."""

    @classmethod
    def of_layer(
        cls, layer: AttendingLayer, *, device_type: str, dtype: torch.dtype, softcap: bool
    ) -> AttentionSpec:
        """What a layer with attention asks."""
        return cls(
            device_type=device_type,
            dtype=dtype,
            qk_head_size=layer.qk_head_size,
            v_head_size=layer.v_head_size,
            softcap=softcap,
            window=layer.window is not None,
            gqa_ratio=layer.num_heads // layer.num_kv_heads,
        )

    def __str__(self) -> str:
        """The requirement in words, for reasons and errors."""
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
    accumulation dtype where the backend has them so. They are summands anyway: callers add up the
    shares of all chunks, in the accumulation dtype.
    """

    dq_BNCH: Tensor
    dk_BKTH: Tensor
    dv_BKTH: Tensor


class BackwardInputs(NamedTuple):
    """What a kernel's backward is given; output and log-sum-exp are merged over all keys."""

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
    """What it is registered as."""

    documents_at_once: bool = False
    """Whether it takes all documents of a row, one row at a time, in one call."""

    plans_each_shape: bool = False
    """Whether a kernel is built, which takes long, for every shape that has not come before."""

    @classmethod
    def variants(cls) -> tuple[Callable[[], Backend], ...]:
        """Makers of this backend, the preferred one first; on CUDA the first exact one is taken."""
        return (cls,)

    @abstractmethod
    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        """Say in a few words why this backend cannot serve `requirement`; None if it can."""

    @abstractmethod
    def forward(
        self,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        *,
        band: Mask,
        scale: float,
        softcap: float | None = None,
    ) -> AttentionOutput:
        """Attend.

        Args:
            q_BNCH: queries of the chunk.
            k_BKTH: keys.
            v_BKTH: values; H may differ from the keys'.
            band: which keys each query sees; `Documents` only where `documents_at_once` says so.
            scale: factor on the scores.
            softcap: cap of ``cap * tanh(score / cap)``, applied after `scale`; None for none.

        Returns:
            Output and log-sum-exp of every row.
        """

    @abstractmethod
    def backward(
        self,
        dout_BNCH: Tensor,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        out_BNCH: Tensor,
        lse_BNC: Tensor,
        *,
        band: Mask,
        scale: float,
        softcap: float | None = None,
    ) -> Gradients:
        """Share of these keys in the gradient. See [Note: why merged values make backward exact].

        Output and log-sum-exp are merged over all keys, if these are only a part of them; all else
        is as in `forward`.

        Returns:
            Gradients of queries, keys and values; the queries' is this part's summand.
        """


Made = TypeVar("Made", bound=type[Backend])


def register_backend(name: str, **auto_rank: int) -> Callable[[Made], Made]:
    """Class decorator: the backend can be asked for by name, and perhaps taken by "auto".

    Args:
        name: value of the setting `attention_backend`.
        auto_rank: by device type (`cuda=3`), its place among the backends that "auto" may take; a
            device type that is not named leaves it to who asks by name.
    """

    def register(made: Made) -> Made:
        made.name = name
        ATTENTION_BACKENDS.add(name, made.variants(), **auto_rank)
        return made

    return register


def determinism() -> int:
    """What the user told PyTorch of operations whose results vary from run to run.

    0 to run them, 1 to run them with a warning, 2 to refuse them.
    """
    return torch.get_deterministic_debug_mode()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sums over keys and pieces are kept: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_forward(q_BNCH: Tensor, v_head_size: int) -> AttentionOutput:
    """Output 0 and log-sum-exp -inf for every row: what queries that see no key get."""
    num_rows, num_heads, num_tokens, _ = q_BNCH.shape
    # In memory [B, C, N, H], as projections give queries and take outputs.
    out_BNCH = q_BNCH.new_zeros(num_rows, num_tokens, num_heads, v_head_size).transpose(1, 2)
    lse_BNC = q_BNCH.new_full(
        q_BNCH.shape[:3], float("-inf"), dtype=accumulation_dtype(q_BNCH.dtype)
    )
    return AttentionOutput(out_BNCH, lse_BNC)


def merge_partials(first: AttentionOutput, second: AttentionOutput) -> AttentionOutput:
    """Attention over the union of two disjoint sets of keys.

    Returns:
        Output (dtype of the first output) and log-sum-exp over both. Rows that saw no key in
        either have output 0 and log-sum-exp -inf. The sum runs in float32 (float64 for float64);
        one temporary of that dtype and the output's size is alive meanwhile.
    """
    out_BNCH = first.out_BNCH.to(accumulation_dtype(first.out_BNCH.dtype), copy=True)
    lse_BNC = first.lse_BNC.clone()
    merge_into(out_BNCH, lse_BNC, second)
    return AttentionOutput(out_BNCH.to(first.out_BNCH.dtype), lse_BNC)


def merge_into(out_BNCH: Tensor, lse_BNC: Tensor, other: AttentionOutput) -> None:
    """Merge `other`, over keys that were not counted yet, into `(out_BNCH, lse_BNC)` in place.

    The output is in the accumulation dtype; both may be strided views.
    """
    other_lse_BNC = other.lse_BNC.to(lse_BNC.dtype)
    merged_BNC = torch.logaddexp(lse_BNC, other_lse_BNC)
    # -inf minus -inf is NaN; a row that neither side has seen stays at weight 0.
    anchor_BNC = merged_BNC.masked_fill(merged_BNC == float("-inf"), 0.0)
    weight_BNC1 = (other_lse_BNC - anchor_BNC).exp_().unsqueeze(-1).to(out_BNCH.dtype)
    # The weights of both sides sum to one, so this is their mean: one pass, and with half the error
    # of two products, whose rounded weights do not sum to one.
    out_BNCH.lerp_(other.out_BNCH.to(out_BNCH.dtype), weight_BNC1)
    lse_BNC.copy_(merged_BNC)


HALF_DTYPES = (torch.float16, torch.bfloat16)


def missing_kernel(
    requirement: AttentionSpec,
    device_type: str,
    dtypes: tuple[torch.dtype, ...],
    *,
    largest_head_size: int | None = None,
    softcap: bool = False,
) -> str | None:
    """Why a kernel cannot do what is asked, for `Backend.reason_unsupported`; None if it can.

    It runs on one device type ("cpu" or "cuda"); a `largest_head_size` of None is any.
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
    return "cannot soft-cap scores" if requirement.softcap and not softcap else None
