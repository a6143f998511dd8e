"""Rows are the documents, token for token; boundaries are where the documents met."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ConfigError
from tests.fakes.tokenizer import END, byte_tokenizer

pytest.importorskip("datasets", reason="needs the extra `recipes`")

from datasets import Dataset

from recipes.packing import IGNORE_INDEX, pack_documents, spread_rows
from tests.sweeps import examples

TOKENIZER = byte_tokenizer()
END_ID = TOKENIZER.convert_tokens_to_ids(END)


def documents(*texts):
    return Dataset.from_dict({"name": [str(i) for i in range(len(texts))], "text": list(texts)})


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def line_of(texts):
    return [token for text in texts for token in [*ids_of(text), END_ID]]


@examples(20, whole=30)
@given(
    texts=st.lists(st.text(st.sampled_from("abc é\n"), max_size=25), min_size=1, max_size=6),
    max_length=st.integers(2, 40),
)
def test_rows_are_the_documents_in_order_with_an_end_behind_each(texts, max_length):
    line = line_of(texts)
    if len(line) < 2:
        return
    rows = pack_documents(documents(*texts), TOKENIZER, max_length=max_length)["input_ids"]

    kept = len(line) // max_length * max_length or len(line)
    assert [token for row in rows for token in row] == line[:kept]
    assert all(len(row) == max_length for row in rows) or len(rows) == 1


@examples(20, whole=30)
@given(
    texts=st.lists(st.text(st.sampled_from("abc"), max_size=25), min_size=1, max_size=6),
    max_length=st.integers(2, 40),
)
def test_boundaries_restart_positions_and_cut_labels(texts, max_length):
    if len(line_of(texts)) < 2:
        return
    rows = pack_documents(documents(*texts), TOKENIZER, max_length=max_length, boundaries=True)

    for row in rows:
        expected, position = [], 0
        for token in row["input_ids"]:
            expected.append(position)
            position = 0 if token == END_ID else position + 1
        assert row["position_ids"] == expected
        assert row["labels"] == [
            IGNORE_INDEX if p == 0 else token
            for p, token in zip(expected, row["input_ids"], strict=True)
        ]


def test_without_boundaries_rows_are_tokens_only():
    rows = pack_documents(documents("abcdef"), TOKENIZER, max_length=3)
    assert rows.column_names == ["input_ids"]


def test_a_remainder_is_kept_only_when_it_is_all_there_is():
    assert len(pack_documents(documents("abc"), TOKENIZER, max_length=100)["input_ids"][0]) == 4
    rows = pack_documents(documents("abcdefgh"), TOKENIZER, max_length=6)["input_ids"]
    assert [len(row) for row in rows] == [6]


def test_a_tokenizer_without_an_end_is_refused():
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ConfigError, match="end-of-sequence"):
        pack_documents(documents("abc"), endless, max_length=4)


def test_too_little_to_predict_is_refused():
    with pytest.raises(ConfigError, match="max_length=1"):
        pack_documents(documents("abc"), TOKENIZER, max_length=1)
    with pytest.raises(ConfigError, match="hold 1 tokens"):
        pack_documents(documents(""), TOKENIZER, max_length=4)


def test_spread_rows_takes_from_the_whole_length():
    rows = Dataset.from_dict({"input_ids": [[i] for i in range(10)]})

    assert [row[0] for row in spread_rows(rows, 3)["input_ids"]] == [0, 3, 6]
    assert len(spread_rows(rows, None)) == len(spread_rows(rows, 11)) == 10
    with pytest.raises(ConfigError, match="count=0"):
        spread_rows(rows, 0)
