"""Rows to a batch: padding on the right, labels that ignore it.

Knows of tensors and nothing of models. Left padding is not offered on purpose: chunks that hold
nothing but padding on the right need not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sppo_hf.data.packing import IGNORE_INDEX
from sppo_hf.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RightPaddingCollator:
    """A data collator for causal language models.

    Rows of one length are stacked and get no `attention_mask`, so that attention can stay plainly
    causal; rows of different lengths are padded on the right and get one.
    """

    pad_token_id: int
    """The token that fills a row; its value is never looked at, since mask and labels hide it."""
    pad_to_multiple_of: int | None = None
    """Pad every batch to a multiple of this many tokens."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Makes one batch.

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
