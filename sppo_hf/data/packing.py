"""Documents to rows of tokens that are all as long as the context.

Documents are tokenised, joined with an end-of-sequence token behind each, and cut into rows of
`max_length` tokens. Nothing here knows of models, chunks or batches; what belongs to which split
has been decided before, document by document, in `documents.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset

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
    """Packs documents into rows of `max_length` tokens.

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
    """`count` rows taken evenly from the whole of `rows`, in order; all of them if it has fewer."""
    if count is None or count >= len(rows):
        return rows
    if count < 1:
        raise ConfigError(f"count={count}: at least one row must be taken")
    return rows.select([index * len(rows) // count for index in range(count)])


def _join_tokens(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, np.ndarray]:
    """All tokens in a line, and each token's position in its own document."""
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
    """Rows of `max_length`; the remainder goes, unless it is all there is."""
    num_rows = len(tokens) // max_length
    if num_rows == 0:
        return tokens[None, :].copy()
    return tokens[: num_rows * max_length].reshape(num_rows, max_length).copy()


def _carried_over(row_positions: np.ndarray) -> np.ndarray:
    """What to subtract up to each row's first document start: the row's first position."""
    inside_first = np.cumsum(row_positions == 0, axis=1) == 0
    return np.where(inside_first, row_positions[:, :1], 0)
