"""Packs documents into rows of tokens as long as the context, and collates rows to batches.

Documents are tokenised, joined with an end-of-sequence token after each, and cut into rows of
`max_length` tokens. Batches are padded on the right only: chunks that are all padding need not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from sppo_hf.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100


def pack_documents(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    boundaries: bool = False,
) -> Dataset:
    """Pack documents into rows of `max_length` tokens.

    A last row that is not full is dropped, unless it is the only one: then it is kept short.
    Cost: every token is held in memory once, in four bytes.

    Args:
        documents: a dataset with a `text` column.
        tokenizer: any Hugging Face tokenizer that has an end-of-sequence token.
        max_length: tokens in a row, at least 2 (a row of one token has nothing to predict).
        boundaries: keep documents apart. Rows then carry `position_ids` that restart at every
            document, and `labels` in which a document's first token is not predicted from the
            document before it.

    Returns:
        A dataset with `input_ids` and, with `boundaries`, `position_ids` and `labels`.

    Raises:
        ConfigError: if `max_length` is too small, the tokenizer has no end-of-sequence token, or
            the documents hold fewer than two tokens.
    """
    if max_length < 2:
        raise ConfigError(f"max_length={max_length}: a row needs at least 2 tokens")
    tokens, positions = _join_tokens(documents, tokenizer)
    if len(tokens) < 2:
        raise ConfigError(f"{len(documents)} documents hold {len(tokens)} tokens; need at least 2")
    columns = {"input_ids": _cut(tokens, max_length)}
    if boundaries:
        row_positions = _cut(positions, max_length)
        # A row that starts inside a document counts from 0 there: its context is not in the row.
        row_positions -= _carried_over(row_positions)
        columns["position_ids"] = row_positions
        starts = row_positions == 0
        columns["labels"] = np.where(starts, IGNORE_INDEX, columns["input_ids"])
    return Dataset.from_dict(columns)


def spread_rows(rows: Dataset, count: int | None) -> Dataset:
    """Return `count` rows, evenly spaced over `rows` and in order; all of them if it has fewer."""
    if count is None or count >= len(rows):
        return rows
    if count < 1:
        raise ConfigError(f"count={count}: at least one row must be taken")
    return rows.select([index * len(rows) // count for index in range(count)])


def _join_tokens(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, np.ndarray]:
    """Return all tokens in one array, and each token's position in its document."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError(
            f"{type(tokenizer).__name__} has no end-of-sequence token to put between documents; "
            "set tokenizer.eos_token"
        )

    def tokenise(batch: dict[str, list[str]]) -> dict[str, Any]:
        # verbose=False: a document longer than the model's usual range is the point here.
        encoded = tokenizer(batch["text"], add_special_tokens=False, verbose=False)
        return {"input_ids": encoded["input_ids"]}

    tokenised = documents.map(
        tokenise, batched=True, batch_size=16, remove_columns=documents.column_names
    )
    parts, positions = [], []
    for ids in tokenised.with_format("numpy")["input_ids"]:
        parts.append(np.append(ids, end).astype(np.int32))
        positions.append(np.arange(len(ids) + 1, dtype=np.int32))
    if not parts:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    return np.concatenate(parts), np.concatenate(positions)


def _cut(tokens: np.ndarray, max_length: int) -> np.ndarray:
    """Cut into rows of `max_length`; the remainder is dropped, unless there is nothing else."""
    num_rows = len(tokens) // max_length
    if num_rows == 0:
        return tokens[None, :].copy()
    return tokens[: num_rows * max_length].reshape(num_rows, max_length).copy()


def _carried_over(row_positions: np.ndarray) -> np.ndarray:
    """Return each row's first position, up to the row's first document start, and 0 after it."""
    inside_first = np.cumsum(row_positions == 0, axis=1) == 0
    return np.where(inside_first, row_positions[:, :1], 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RightPaddingCollator:
    """A data collator for causal language models.

    Rows of one length are stacked and get no `attention_mask`, so that attention can stay plainly
    causal; rows of different lengths are padded on the right and get one.
    """

    pad_token_id: int
    """Token that pads rows; its value has no effect, because mask and labels hide it."""
    pad_to_multiple_of: int | None = None
    """Pad every batch to a multiple of this many tokens."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch.

        Args:
            rows: mappings with `input_ids` and perhaps `labels` (the tokens themselves if absent)
                and `position_ids`, each a flat list of numbers; other keys are refused.

        Returns:
            `input_ids` and `labels` of shape [rows, tokens], `attention_mask` where a row was
            padded, `position_ids` where the rows had them.

        Raises:
            ConfigError: if rows are empty, disagree in their keys or lengths, or would need
                padding while they carry `position_ids`.
        """
        keys = _checked_keys(rows)
        lengths = [len(row["input_ids"]) for row in rows]
        width = max(lengths)
        if self.pad_to_multiple_of:
            width += -width % self.pad_to_multiple_of
        is_padded = any(length < width for length in lengths)
        if is_padded and "position_ids" in keys:
            raise ConfigError(
                f"rows with position_ids have lengths {lengths} and would be padded to {width}: an "
                "attention_mask hides where packed documents begin. Use rows of one length, or "
                "per_device_train_batch_size=1 without pad_to_multiple_of."
            )
        batch = {
            "input_ids": _stack(rows, "input_ids", width, self.pad_token_id),
            "labels": _stack(
                rows, "labels" if "labels" in keys else "input_ids", width, IGNORE_INDEX
            ),
        }
        if is_padded:
            counts = torch.tensor(lengths).unsqueeze(1)
            batch["attention_mask"] = (torch.arange(width) < counts).long()
        if "position_ids" in keys:
            batch["position_ids"] = _stack(rows, "position_ids", width, 0)
        return batch


_KNOWN_KEYS = {"input_ids", "labels", "position_ids"}


def _checked_keys(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    if not rows:
        raise ConfigError("a batch needs at least one row, got none")
    keys = set(rows[0])
    if "input_ids" not in keys or not keys <= _KNOWN_KEYS:
        raise ConfigError(
            f"row 0 has the keys {sorted(keys)}; needed is 'input_ids', allowed beside it are "
            "'labels' and 'position_ids'"
        )
    for index, row in enumerate(rows):
        if set(row) != keys:
            raise ConfigError(f"row {index} has the keys {sorted(row)}, row 0 has {sorted(keys)}")
        lengths = {key: len(row[key]) for key in sorted(keys)}
        if len(set(lengths.values())) != 1 or not lengths["input_ids"]:
            raise ConfigError(f"row {index} must be non-empty and of one length, got {lengths}")
    return keys


def _stack(rows: Sequence[Mapping[str, Any]], key: str, width: int, fill: int) -> Tensor:
    stacked = torch.full((len(rows), width), fill, dtype=torch.long)
    for index, row in enumerate(rows):
        values = torch.as_tensor(row[key], dtype=torch.long)
        stacked[index, : len(values)] = values
    return stacked
