"""Padding on the right, and what the collator refuses."""

import pytest
import torch

from sppo_hf.errors import ConfigError

pytest.importorskip("datasets", reason="needs the extra `recipes`")

from recipes.packing import RightPaddingCollator

collate = RightPaddingCollator(pad_token_id=9)


def test_rows_of_one_length_are_stacked_without_a_mask():
    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}])

    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["input_ids"].dtype == torch.long


def test_shorter_rows_are_padded_on_the_right_and_hidden_from_loss_and_attention():
    batch = collate([{"input_ids": [1]}, {"input_ids": [4, 9, 6]}])

    assert batch["input_ids"].tolist() == [[1, 9, 9], [4, 9, 6]]
    # A real token that equals the pad token keeps its label.
    assert batch["labels"].tolist() == [[1, -100, -100], [4, 9, 6]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]


def test_given_labels_are_kept():
    batch = collate([{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3], "labels": [3]}])
    assert batch["labels"].tolist() == [[-100, 2], [3, -100]]


def test_padding_to_a_multiple():
    batch = RightPaddingCollator(pad_token_id=0, pad_to_multiple_of=4)([{"input_ids": [1] * 5}])

    assert batch["input_ids"].shape == (1, 8)
    assert batch["attention_mask"].sum() == 5


def test_positions_of_packed_rows_are_passed_on():
    row = {"input_ids": [1, 2, 3], "labels": [-100, 2, -100], "position_ids": [0, 1, 0]}
    batch = collate([row, row])

    assert batch["position_ids"].tolist() == [[0, 1, 0]] * 2
    assert "attention_mask" not in batch


def test_packed_rows_are_never_padded():
    rows = [
        {"input_ids": [1, 2], "position_ids": [0, 0]},
        {"input_ids": [1], "position_ids": [0]},
    ]
    with pytest.raises(ConfigError, match=r"\[2, 1\].*per_device_train_batch_size=1"):
        collate(rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([{"labels": [1]}], "needed is 'input_ids'"),
        ([{"input_ids": [1], "text": ["a"]}], "'text'"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], "row 1 has the keys"),
        ([{"input_ids": [1, 2], "labels": [1]}], "row 0 must be"),
        ([{"input_ids": []}], "row 0 must be non-empty"),
    ],
)
def test_what_cannot_be_a_batch_is_refused(rows, message):
    with pytest.raises(ConfigError, match=message):
        collate(rows)
