"""Arguments of a call: its rows, documents, labels and padding, the loss's divisor, refusals."""

import warnings
from typing import Any

import pytest
import torch

from sppo_hf import ConfigError, SPPOConfig
from sppo_hf.attention.segments import RowSpans
from sppo_hf.engine.convert import convert
from sppo_hf.engine.forward_calls import ForwardCall, read_call, read_layout
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.engine.measuring import OperationNames

META = torch.device("meta")


def _call(number: Any) -> ForwardCall:
    model = build_tiny_model("llama")
    ids = torch.arange(8)[None]
    given = {"input_ids": ids, "labels": ids, "num_items_in_batch": number}
    return read_call(find_parts(model), model.forward, (), given)


@pytest.mark.parametrize("number", [7, 7.5])
def test_the_loss_divisor_is_created_on_the_device(number: float) -> None:
    """A copy of it would make the host wait until all of forward has run."""
    call, count = _call(number), torch.zeros((), dtype=torch.int64, device=META)
    with OperationNames() as operations:
        divisor = call.divisor(count)
    assert operations.names == ["aten::full"]
    assert divisor.device == META
    assert divisor.dtype == torch.as_tensor(number).dtype
    here = call.divisor(torch.zeros((), dtype=torch.int64))
    assert here.item() == number
    assert here.shape == ()


def test_a_tensor_keeps_its_dtype_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    to = torch.Tensor.to

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given.append(kwargs)
        return to(self, *args, **kwargs)

    number, count = torch.tensor(7, dtype=torch.int32), torch.zeros((), device=META)
    call, behind = _call(number), _call(number.to(META))
    monkeypatch.setattr(torch.Tensor, "to", noted)
    divisor = call.divisor(count)
    assert (divisor.device, divisor.dtype, divisor.shape) == (META, torch.int32, ())
    behind.divisor(count)
    # From another device the bytes are there only when the copy is over.
    assert given == [{"non_blocking": True}, {"non_blocking": False}]


def test_without_a_number_labels_are_counted() -> None:
    count = torch.tensor(5)
    assert _call(None).divisor(count) is count


IDS = torch.arange(16).view(2, 8)
ENDS = torch.tensor([0, 3, 8])


def _given(**changes: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "labels": IDS, **changes}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (_given(input_ids=IDS.tolist()), r"input_ids is of type list.*torch\.tensor"),
        (_given(input_ids=IDS.numpy()), "input_ids is of type ndarray"),
        (_given(input_ids=IDS[0]), r"input_ids has shape \(8,\).*x\[None\]"),
        (_given(labels=IDS.tolist()), "labels is of type list"),
        (_given(attention_mask=[[1] * 8] * 2), "attention_mask is of type list"),
        (_given(position_ids=torch.arange(8).expand(3, -1)), r"\(3, 8\); allowed is .*\(2, 8\)"),
        (_given(position_ids=torch.arange(8)), r"position_ids has shape \(8,\)"),
        (_given(position_ids=IDS.bool()), "position_ids has dtype torch.bool"),
        (_given(cu_seq_lens_q=ENDS[:0]), r"cu_seq_lens_q has shape \(0,\)"),
        (_given(cu_seq_lens_q=ENDS.float()), "cu_seq_lens_q has .*dtype torch.float32"),
        (_given(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS[None]), r"cu_seq_lens_k has shape \(1, 3\)"),
        (_given(cu_seq_lens_q=[0, 8]), "cu_seq_lens_q is of type list"),
        (_given(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS + 0 * ENDS + (ENDS == 3)), "the same off"),
        (_given(cu_seq_lens_k=ENDS), "cu_seq_lens_k is not cu_seq_lens_q"),
    ],
)
def test_inputs_of_other_types_and_shapes_are_refused(given: dict[str, Any], words: str) -> None:
    model = convert(build_tiny_model("llama"), SPPOConfig(num_chunks=2, show_plan=False)).train()
    with pytest.raises(ConfigError, match=words):
        model(**given)
    model(**_given()).loss.backward()


def _read(**given):
    defaults = {
        "batch_rows": 2, "total_tokens": 6, "attention_mask": None, "position_ids": None,
        "cu_seq_lens": None, "shift_labels_BT": None, "ignore_index": -100,
    }  # fmt: skip
    return read_layout(**{**defaults, **given})


def _right_padded(*lengths):
    return torch.arange(6)[None] < torch.tensor(lengths)[:, None]


def test_rows_beyond_the_positions_that_a_model_has_learned_are_refused() -> None:
    """Also of a model with fewer positions than the tokens that its layers are traced with."""
    learned = 40
    model = build_tiny_model("gpt2", max_position_embeddings=learned)
    convert(model, SPPOConfig(num_chunks=2, show_plan=False))
    ids = torch.zeros(1, learned + 1, dtype=torch.long)
    with pytest.raises(
        ConfigError, match=rf"position {learned:,}, but wpe has learned {learned:,}"
    ):
        model(input_ids=ids, labels=ids)
    packed = torch.cat([torch.arange(learned), torch.arange(1)])[None]
    model(input_ids=ids, labels=ids, position_ids=packed).loss.backward()


def test_a_model_of_few_learned_positions_is_trained_up_to_these() -> None:
    model = build_tiny_model("gpt2", max_position_embeddings=24)
    batch = make_batch(tokens=24)
    report = compare(model, batch, SPPOConfig(num_chunks=3, show_plan=False))
    assert report.exact, str(report)


@pytest.mark.parametrize("given", [{}, {"use_cache": False}])
def test_a_config_with_which_transformers_looks_for_no_documents_is_named(given) -> None:
    model = build_tiny_model("llama")
    ids, packed = torch.zeros(1, 8, dtype=torch.long), torch.arange(8)[None] % 5
    batch = {"input_ids": ids, "labels": ids, **given}
    model.config.use_cache = True

    def warned(**more: Any) -> list[str]:
        call = read_call(find_parts(model), model.forward, (), {**batch, **more})
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call.layout()
        return [str(one.message) for one in seen if "use_cache" in str(one.message)]

    assert len(warned(position_ids=packed)) == (not given)
    assert not warned(position_ids=torch.arange(8)[None])
    assert not warned(position_ids=packed, attention_mask=torch.ones_like(ids))
    assert not warned(position_ids=packed, attention_mask=(torch.arange(8) < 6).long()[None])
    assert not warned(position_ids=packed, cu_seq_lens_q=torch.tensor([0, 5, 8]))
    model.config.use_cache = False
    assert not warned(position_ids=packed)


def test_full_rows_are_plain():
    layout = _read(attention_mask=torch.ones(2, 6))
    assert (layout.rows, layout.used_tokens, layout.labelled) == (None, 6, None)
    assert layout.has_label(0, 1)


def test_padding_without_labels_on_it_needs_no_mask_and_ends_early():
    labels = torch.zeros(2, 6, dtype=torch.long).masked_fill(~_right_padded(2, 4), -100)
    layout = _read(attention_mask=_right_padded(2, 4), shift_labels_BT=labels)
    assert (layout.rows, layout.used_tokens) == (None, 4)
    assert layout.labelled == (True, True, True, True, False, False)
    assert layout.has_label(3, 6)
    assert not layout.has_label(4, 6)


@pytest.mark.parametrize("labels", [torch.zeros(2, 6, dtype=torch.long), None])
def test_padding_that_counts_keeps_its_spans(labels):
    layout = _read(attention_mask=_right_padded(2, 4), shift_labels_BT=labels)
    assert layout.rows == (RowSpans(((0, 6),), 2), RowSpans(((0, 6),), 4))
    assert layout.used_tokens == 6


def _both_sides(*spans):
    at = torch.arange(6)[None]
    starts, ends = torch.tensor(spans).T[..., None]
    return (at >= starts) & (at < ends)


def test_padding_in_front_is_a_document_of_its_own():
    mask = _both_sides((2, 5), (0, 4))
    # Shifted labels: those of index 1 and before are predicted by padding.
    labels = torch.zeros(2, 6, dtype=torch.long).masked_fill(~mask, -100)
    layout = _read(attention_mask=mask, shift_labels_BT=labels)
    assert layout.rows == (RowSpans(((0, 2), (2, 6)), 5), RowSpans(((0, 6),), 4))
    assert layout.used_tokens == 5
    assert layout.labelled == (True,) * 5 + (False,)


def test_left_padding_that_cannot_be_exact_is_refused():
    mask = _both_sides((0, 6), (2, 6))
    given: dict[str, Any] = {"attention_mask": mask}
    labels = torch.zeros(2, 6, dtype=torch.long).masked_fill(~mask, -100)
    labels[1, 1] = 7
    with pytest.raises(
        ConfigError, match=r"left padding in row 1: there are labels.*index 2.*-100"
    ):
        _read(**given, shift_labels_BT=labels)
    labels[1, 1] = -100
    assert _read(**given, shift_labels_BT=labels).rows is not None
    with pytest.raises(ConfigError, match="left padding in row 1: without labels"):
        _read(**given)
    with pytest.raises(ConfigError, match=r"left padding in row 1: why\. Right padding is"):
        _read(**given, shift_labels_BT=labels, left_padding=lambda: "why")


def test_positions_of_padding_are_no_packing(recwarn):
    mask = _both_sides((2, 6), (3, 6))
    labels = torch.full((2, 6), -100)
    positions = (mask.cumsum(1) - 1).masked_fill(~mask, 1)
    _read(attention_mask=mask, shift_labels_BT=labels, position_ids=positions)
    assert not recwarn.list


def test_positions_that_stand_still_are_no_packing(recwarn):
    positions = torch.tensor([[0, 1, 1, 1, 2, 3]])  # as of tokens of one image
    assert _read(attention_mask=torch.ones(2, 6), position_ids=positions).rows is None
    assert not recwarn.list


def test_positions_that_continue_are_one_document():
    assert _read(position_ids=torch.arange(3, 9)[None]).rows is None


def test_positions_that_restart_are_documents_of_every_row():
    layout = _read(position_ids=torch.tensor([[0, 1, 0, 1, 2, 0]]))
    assert layout.rows == (RowSpans(((0, 2), (2, 5), (5, 6)), 6),) * 2


@pytest.mark.parametrize(("family", "joined"), [("gpt_oss", True), ("llama", False)])
def test_models_whose_masks_ignore_positions_join_documents_aloud(family, joined):
    model = build_tiny_model(family)
    model.config.use_cache = False
    ids = torch.arange(12)[None]
    positions = torch.tensor([[*range(5), *range(7)]])
    given = {"input_ids": ids, "labels": ids, "position_ids": positions}
    expected = model(**given).loss
    convert(model, SPPOConfig(num_chunks=2, show_plan=False))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.testing.assert_close(model(**given).loss.float(), expected)
    said = [str(one.message) for one in seen if "position_ids restart" in str(one.message)]
    assert [text.count("return_flash_attn_kwargs=True") for text in said] == [1] * joined
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    apart = model(**given, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets).loss.float()
    assert torch.allclose(apart, expected) is not joined


def test_positions_under_a_mask_are_ignored_aloud():
    with pytest.warns(UserWarning, match="Leave attention_mask out"):
        layout = _read(
            attention_mask=torch.ones(2, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]])
        )
    assert layout.rows is None


def test_offsets_are_documents_and_may_repeat():
    layout = _read(batch_rows=1, cu_seq_lens=torch.tensor([0, 2, 2, 6]))
    assert layout.rows == (RowSpans(((0, 2), (2, 6)), 6),)


@pytest.mark.parametrize("offsets", [[1, 6], [0, 5], [0, 4, 2, 6]])
def test_offsets_that_do_not_fit_are_refused(offsets):
    with pytest.raises(ConfigError, match="rising offsets from 0"):
        _read(batch_rows=1, cu_seq_lens=torch.tensor(offsets))


@pytest.mark.parametrize(("mask", "message"), [
    (~_right_padded(2, 0), "left padding in row 0"),
    (torch.tensor([[1] * 6, [1, 1, 0, 1, 0, 0]]), "padding between real tokens in row 1"),
    (torch.tensor([[1] * 6, [1, 1, 2, 2, 2, 0]]), "other than 0 and 1 in row 1.*example 2"),
    (torch.ones(2, 5), r"shape \(2, 5\).*\(2, 6\)"),
    (torch.ones(2, 1, 6, 6), r"shape \(2, 1, 6, 6\)"),
])  # fmt: skip
def test_other_masks_are_refused(mask, message):
    with pytest.raises(ConfigError, match=message):
        _read(attention_mask=mask)


def test_where_blocks_are_counted_documents_behind_others_begin_at_zero():
    shifted = torch.tensor([[0, 1, 2, 5, 6, 7]])
    assert _read(batch_rows=1, position_ids=shifted).rows is not None
    assert _read(batch_rows=1, position_ids=torch.tensor([[4, 5, 0, 1, 2, 3]]), blocks=True).rows
    with pytest.raises(ConfigError, match=r"begins at position 5.*restart at 0"):
        _read(batch_rows=1, position_ids=shifted, blocks=True)
