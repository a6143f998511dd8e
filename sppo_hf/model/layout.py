"""What the rows of a batch look like: lengths, padding, packed documents, labels that count.

One read of a few integers from the device before the first chunk (the only one in the step; the
device is idle then, because the batch has just been copied to it). From it follow which keys each
query sees, which chunks hold no label and which hold nothing but padding.

Follows the unmodified model: right padding by `attention_mask`; packing by `position_ids` that do
not continue (only without an attention mask, as in Transformers) or by `cu_seq_lens_q`. Refuses
left padding, holes and masks of more than two dimensions.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo_hf.attention.pieces import RowSpans
from sppo_hf.errors import ConfigError

# B batch rows, T tokens of the sequence.


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The layout of one batch."""

    batch_rows: int
    total_tokens: int
    rows: tuple[RowSpans, ...] | None
    """Spans per row where they matter to attention; None if plain causal attention is right."""
    used_tokens: int
    """Tokens `[used_tokens, total_tokens)` are padding in every row and have no label."""
    labelled: tuple[bool, ...] | None
    """Per token position: whether any row has a label there. None without labels."""

    def has_label(self, start: int, end: int) -> bool:
        """Whether any position in `[start, end)` counts in the loss."""
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
) -> BatchLayout:
    """Read the layout of a batch.

    Args:
        batch_rows: B.
        total_tokens: T.
        attention_mask: `[B, T]`, nonzero for real tokens, or None.
        position_ids: `[B or 1, T]` as given by the user, or None.
        cu_seq_lens: Cumulative document lengths of a batch of one packed row, or None.
        shift_labels_BT: Labels aligned with the positions that predict them, or None.
        ignore_index: The label that does not count.

    Raises:
        ConfigError: For left padding, holes, wrong shapes.
    """
    labelled_T = None if shift_labels_BT is None else (shift_labels_BT != ignore_index).any(0)
    labelled = None if labelled_T is None else tuple(labelled_T.tolist())
    if cu_seq_lens is not None:
        rows = _packed_by_lengths(cu_seq_lens, batch_rows, total_tokens)
        return BatchLayout(batch_rows, total_tokens, rows, total_tokens, labelled)
    if attention_mask is not None:
        lengths = _padded_lengths(attention_mask, batch_rows, total_tokens)
        _warn_if_packing_is_ignored(position_ids)
        return _padded(lengths, total_tokens, labelled, shift_labels_BT, ignore_index)
    rows = None if position_ids is None else _packed_by_positions(position_ids, batch_rows)
    return BatchLayout(batch_rows, total_tokens, rows, total_tokens, labelled)


def _padded(
    lengths: list[int],
    total_tokens: int,
    labelled: tuple[bool, ...] | None,
    shift_labels_BT: Tensor | None,
    ignore_index: int,
) -> BatchLayout:
    rows = tuple(RowSpans(((0, total_tokens),), length) for length in lengths)
    if all(length == total_tokens for length in lengths):
        return BatchLayout(len(lengths), total_tokens, None, total_tokens, labelled)
    if shift_labels_BT is None or labelled is None:
        return BatchLayout(len(lengths), total_tokens, rows, total_tokens, labelled)
    at = torch.arange(total_tokens, device=shift_labels_BT.device)
    length_B1 = torch.tensor(lengths, device=shift_labels_BT.device)[:, None]
    pads_count = bool(((shift_labels_BT != ignore_index) & (at >= length_B1)).any())
    if pads_count or not any(labelled):
        return BatchLayout(len(lengths), total_tokens, rows, total_tokens, labelled)
    # No real query sees a padded key (they come later), and padded queries reach no label: plain
    # causal attention gives every number that counts, and a tail of padding need not run at all.
    return BatchLayout(len(lengths), total_tokens, None, max(lengths), labelled)


def _padded_lengths(mask: Tensor, batch_rows: int, total_tokens: int) -> list[int]:
    if mask.ndim != 2 or tuple(mask.shape) != (batch_rows, total_tokens):
        raise ConfigError(
            f"attention_mask has shape {tuple(mask.shape)}; chunked sequences take a padding mask "
            f"of shape ({batch_rows}, {total_tokens}): 1 for real tokens, 0 for right padding."
        )
    real_BT = mask != 0
    lengths_B = real_BT.sum(1)
    at = torch.arange(total_tokens, device=mask.device)
    right_B = (real_BT == (at < lengths_B[:, None])).all(1)
    *lengths, all_right = torch.cat([lengths_B, right_B.all()[None].to(lengths_B.dtype)]).tolist()
    if not all_right:
        row = int((~right_B).nonzero()[0, 0])
        kind = "left padding" if not bool(real_BT[row, 0]) else "a hole"
        raise ConfigError(
            f"attention_mask has {kind} in row {row}. Chunked sequences take right padding only: "
            "set tokenizer.padding_side = 'right', or drop the padding."
        )
    return lengths


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


def _warn_if_packing_is_ignored(position_ids: Tensor | None) -> None:
    if position_ids is not None and bool((torch.diff(position_ids, dim=-1) < 0).any()):
        warnings.warn(
            "position_ids restart, but an attention_mask is given: Transformers then lets packed "
            "documents see each other, and so does the chunked model. Leave attention_mask out to "
            "keep packed documents apart.",
            stacklevel=2,
        )
