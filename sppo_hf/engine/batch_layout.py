"""The layout of a batch: row lengths, padding, packed documents, labels.

It is read from the device once, a few integers before the first chunk (the only such read in a
step; the device is idle then, because the batch has just been copied to it). It tells which keys
each query sees, which chunks have no label and which are padding alone.

As in the unmodified model, padding is given by `attention_mask`, packing by `position_ids` that
restart (without an attention mask only, as in Transformers) or by `cu_seq_lens_q`. Masks with
padding between real tokens or of more than two dims, and left padding with labels, are refused.

[Note: left padding]
Padding on the left is treated as a document of its own before the row's: real tokens do not see it,
and what its queries see does not matter as long as nothing is predicted there. The unmodified model
counts positions from the first column, padding included, and so does the chunked one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sppo_hf.attention.segments import RowSpans
from sppo_hf.errors import ConfigError

# B batch rows, T tokens of the sequence.


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The layout of one batch."""

    batch_rows: int
    total_tokens: int
    rows: tuple[RowSpans, ...] | None
    """Documents and padding per row; None if plain causal attention gives the same."""
    used_tokens: int
    """Tokens `[used_tokens, total_tokens)` are padding in every row and have no label."""
    labelled: tuple[bool, ...] | None
    """For each token position, whether any row has a label there; None without labels."""

    def spans(self, start: int, end: int) -> tuple[RowSpans, ...] | None:
        """Return documents and padding of rows `[start, end)`; None as in `rows`."""
        return None if self.rows is None else self.rows[start:end]

    def has_label(self, start: int, end: int) -> bool:
        """Whether any position in `[start, end)` has a label, or no labels are given."""
        return self.labelled is None or any(self.labelled[start:end])


def read_layout(
    *,
    batch_rows: int,
    total_tokens: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    shift_labels_BT: Tensor | None,
    ignore_index: int,
    left_padding: bool = False,
    blocks: bool = False,
) -> BatchLayout:
    """Read the layout of a batch of B rows of T tokens.

    Args:
        batch_rows: B.
        total_tokens: T.
        attention_mask: `[B, T]`, nonzero for real tokens, or None.
        position_ids: `[B or 1, T]` as given by the caller, or None.
        cu_seq_lens: Cumulative document lengths of a batch of one packed row, or None.
        shift_labels_BT: Labels aligned with the positions that predict them, or None.
        ignore_index: The label that is not counted.
        left_padding: Whether rows may begin with padding: the model is known to count positions
            from the first column, whatever the mask is.
        blocks: Whether layers attend within blocks of tokens (Llama 4). The model counts blocks by
            positions, chunked attention from a document's first token.

    Raises:
        ConfigError: A mask has padding between real tokens or a wrong shape, left padding cannot be
            exact, or with `blocks` a later document of a row does not begin at position 0.
    """
    labelled_T = None if shift_labels_BT is None else (shift_labels_BT != ignore_index).any(0)
    labelled = None if labelled_T is None else tuple(labelled_T.tolist())
    if cu_seq_lens is not None:
        rows = _packed_by_lengths(cu_seq_lens, batch_rows, total_tokens)
        return BatchLayout(batch_rows, total_tokens, rows, total_tokens, labelled)
    if attention_mask is not None:
        spans = _real_spans(attention_mask, batch_rows, total_tokens)
        if any(start for start, _ in spans):
            _refuse_left_padding(spans, shift_labels_BT, ignore_index, known=left_padding)
        _warn_if_packing_is_ignored(position_ids, attention_mask)
        return _padded(spans, total_tokens, labelled, shift_labels_BT, ignore_index)
    rows = None if position_ids is None else _packed_by_positions(position_ids, batch_rows)
    if blocks and rows is not None and position_ids is not None:
        _refuse_shifted_documents(position_ids)
    return BatchLayout(batch_rows, total_tokens, rows, total_tokens, labelled)


def _padded(
    spans: list[tuple[int, int]],
    total_tokens: int,
    labelled: tuple[bool, ...] | None,
    shift_labels_BT: Tensor | None,
    ignore_index: int,
) -> BatchLayout:
    rows = tuple(
        RowSpans(_spans([0, start] if start else [0], total_tokens), end) for start, end in spans
    )
    layout = BatchLayout(len(spans), total_tokens, rows, total_tokens, labelled)
    if all(span == (0, total_tokens) for span in spans):
        return replace(layout, rows=None)
    if shift_labels_BT is None or labelled is None:
        return layout
    at = torch.arange(total_tokens, device=shift_labels_BT.device)
    end_B1 = torch.tensor([end for _, end in spans], device=shift_labels_BT.device)[:, None]
    pads_count = bool(((shift_labels_BT != ignore_index) & (at >= end_B1)).any())
    if pads_count or not any(labelled):
        return layout
    # Right padding comes after all real queries, and its own queries have no label: without left
    # padding, plain causal attention gives every number that counts. Tokens that are padding in all
    # rows need not run.
    has_left_padding = any(start for start, _ in spans)
    used_tokens = max(end for _, end in spans)
    return replace(layout, rows=rows if has_left_padding else None, used_tokens=used_tokens)


def _real_spans(mask: Tensor, batch_rows: int, total_tokens: int) -> list[tuple[int, int]]:
    """Return `(start, end)` of each row's real tokens; `(0, 0)` for a row of padding alone."""
    if mask.ndim != 2 or tuple(mask.shape) != (batch_rows, total_tokens):
        raise ConfigError(
            f"attention_mask has shape {tuple(mask.shape)}; chunked sequences take a padding mask "
            f"of shape ({batch_rows}, {total_tokens}): 1 for real tokens, 0 for padding. Documents "
            "packed into a row need no mask: leave it out and let position_ids restart at 0 with "
            "every document."
        )
    real_BT = mask != 0
    at = torch.arange(total_tokens, device=mask.device)
    start_B = real_BT.int().argmax(1)
    end_B = start_B + real_BT.sum(1)
    whole_B = (real_BT == ((at >= start_B[:, None]) & (at < end_B[:, None]))).all(1)
    starts, ends, whole = torch.stack([start_B, end_B, whole_B.to(end_B.dtype)]).tolist()
    if not all(whole):
        raise ConfigError(
            f"attention_mask has padding between real tokens in row {whole.index(0)}. Chunked "
            "sequences take rows whose real tokens are contiguous: drop the padding in between."
        )
    return list(zip(starts, ends, strict=True))


def _refuse_left_padding(
    spans: list[tuple[int, int]], shift_labels_BT: Tensor | None, ignore_index: int, *, known: bool
) -> None:
    """Refuse left padding where it cannot be known to be exact."""
    row = next(index for index, (start, _) in enumerate(spans) if start)
    reason = ""
    if shift_labels_BT is None:
        reason = "without labels it is not known that nothing is predicted there"
    elif not known:
        reason = "it is exact only for the families that `sppo check --list` names"
    else:
        at = torch.arange(shift_labels_BT.shape[1], device=shift_labels_BT.device)
        start_B1 = torch.tensor([start for start, _ in spans], device=at.device)[:, None]
        counts_B = ((shift_labels_BT != ignore_index) & (at < start_B1)).any(1)
        if bool(counts_B.any()):
            row = int(counts_B.nonzero()[0, 0])
            reason = (
                f"there are labels that padding would have to predict (the first real token is at "
                f"index {spans[row][0]}; set its label to {ignore_index})"
            )
    if reason:
        raise ConfigError(
            f"attention_mask has left padding in row {row}: {reason}. Right padding is always "
            "fine: set tokenizer.padding_side = 'right', or drop the padding."
        )


def _packed_by_positions(position_ids: Tensor, batch_rows: int) -> tuple[RowSpans, ...] | None:
    breaks = (torch.diff(position_ids, dim=-1) != 1).nonzero().tolist()
    if not breaks:
        return None
    total = position_ids.shape[-1]
    starts: list[list[int]] = [[0] for _ in range(position_ids.shape[0])]
    for row, before in breaks:
        starts[row].append(before + 1)
    rows = tuple(RowSpans(_spans(row, total), total) for row in starts)
    return rows * batch_rows if len(rows) == 1 else rows


def _refuse_shifted_documents(position_ids: Tensor) -> None:
    """Refuse a document after another one of the same row whose positions do not begin at 0."""
    begins = torch.diff(position_ids, dim=-1) != 1
    firsts = position_ids[:, 1:][begins]
    if bool((firsts != 0).any()):
        seen = int(firsts[firsts != 0][0])
        raise ConfigError(
            f"position_ids has a document in the middle of a row that begins at position {seen}. "
            "This model attends within blocks of tokens, which are counted from position 0. "
            "Allowed: packed documents that each begin at 0. Remedy: let position_ids restart at 0 "
            "with every document."
        )


def _packed_by_lengths(
    cu_seq_lens: Tensor, batch_rows: int, total_tokens: int
) -> tuple[RowSpans, ...]:
    ends = cu_seq_lens.tolist()
    if batch_rows != 1 or ends[0] != 0 or ends[-1] != total_tokens or ends != sorted(ends):
        raise ConfigError(
            f"cu_seq_lens_q={ends[:4]}...{ends[-1:]} with a batch of {batch_rows} x {total_tokens} "
            "tokens; packed documents take one row and rising offsets from 0 to its length."
        )
    starts = sorted(set(ends[:-1]) - {total_tokens})
    return (RowSpans(_spans(starts, total_tokens), total_tokens),)


def _spans(starts: list[int], total: int) -> tuple[tuple[int, int], ...]:
    return tuple(zip(starts, [*starts[1:], total], strict=True))


def _warn_if_packing_is_ignored(position_ids: Tensor | None, mask: Tensor) -> None:
    if position_ids is None:
        return
    real_BT = mask != 0  # positions of padding do not matter
    both_real = real_BT[:, 1:] & real_BT[:, :-1]
    if bool(((torch.diff(position_ids, dim=-1) < 0) & both_real).any()):
        warnings.warn(
            "position_ids restart, but an attention_mask is given: Transformers then lets packed "
            "documents see each other, and so does the chunked model. Leave attention_mask out to "
            "keep packed documents apart.",
            stacklevel=2,
        )
