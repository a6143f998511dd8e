"""Masks are understood by asking them; what is no causal mask, window or block is refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers import masking_utils as masks

from sppo_hf import UnsupportedModelError
from sppo_hf.attention.segments import BidirectionalSpan
from sppo_hf.engine.attention_interface import (
    MaskFound,
    MaskMeaning,
    _refuse,
    document_positions,
    mask_meaning,
)
from sppo_hf.testing.tiny_models import tiny_config


def test_causal_has_no_window():
    assert mask_meaning(mask_function=masks.causal_mask_function) == MaskMeaning(None)


@pytest.mark.parametrize("window", [1, 2, 8, 4096, 131072])
def test_window_is_read_off_the_mask(window):
    function = masks.sliding_window_causal_mask_function(window)
    assert mask_meaning(mask_function=function) == MaskMeaning(window)


@pytest.mark.parametrize("tokens", [2, 7, 4096, 8192, 65536])
def test_blocks_are_read_off_the_mask(tokens):
    function = masks.chunked_causal_mask_function(tokens, torch.zeros(1, dtype=torch.long))
    assert mask_meaning(mask_function=function) == MaskMeaning(None, local=tokens)


class _Elsewhere(torch.Tensor):
    """A tensor of another device: nothing of the host computes with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if func is torch.Tensor.cpu:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(torch.Tensor)
        raise RuntimeError("Expected all tensors to be on the same device")


@pytest.mark.parametrize("inside", [False, True])
def test_masks_that_hold_tensors_of_a_device_are_asked_on_the_host(inside):
    padding = torch.zeros(1, dtype=torch.long).as_subclass(_Elsewhere)
    function = masks.chunked_causal_mask_function(64, padding)
    if inside:
        function = masks.and_masks(masks.causal_mask_function, function)
    assert mask_meaning(mask_function=function) == MaskMeaning(None, local=64)


def test_a_mask_that_is_asked_on_the_host_keeps_its_default_arguments():
    start = torch.zeros(1, dtype=torch.long).as_subclass(_Elsewhere)

    def function(row, head, query, key, *, window=64):
        return (key <= query) & (key > query - window) & (key >= start)

    assert mask_meaning(mask_function=function) == MaskMeaning(64)


def test_tables_of_image_blocks_without_images_are_not_asked_far_from_zero():
    text = torch.full((2, 5), -1)
    function = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(text))
    assert mask_meaning(mask_function=function) == MaskMeaning(None)


TABLE = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 2], [3, 3, 3, 3, 3, -1, -1, -1]])
"""Images of two rows: of three, two, one and five tokens."""


@pytest.mark.parametrize("window", [None, 2, 8])
@pytest.mark.parametrize("beyond_window", [False, True])
def test_tokens_that_see_each_other_in_both_directions(window, beyond_window):
    """With a window that counts among them, as in Gemma 3, or not, as in Gemma 4 Unified."""
    images = masks.blockwise_overlay(TABLE)
    if window is None:
        function = masks.or_masks(masks.causal_mask_function, images)
    elif beyond_window:
        function = masks.or_masks(masks.sliding_window_causal_mask_function(window), images)
    else:
        both = masks.or_masks(masks.causal_mask_function, images)
        function = masks.and_masks(both, masks.sliding_window_overlay(window))
    found = mask_meaning(mask_function=function)
    hidden = beyond_window and window == 2
    spans = (
        BidirectionalSpan(0, 1, 4, hidden),
        BidirectionalSpan(0, 5, 7, False),
        BidirectionalSpan(1, 0, 5, hidden),
    )
    assert found == MaskMeaning(window, spans=spans)
    assert found.of_rows(1, 2).spans == (BidirectionalSpan(0, 0, 5, hidden),)


@pytest.mark.parametrize("made", [
    # One number for tokens that are apart; a token that nobody sees; within blocks.
    lambda: masks.or_masks(
        masks.causal_mask_function, masks.blockwise_overlay(torch.tensor([[0, 0, -1, 0]]))
    ),
    lambda: masks.and_masks(
        masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(TABLE)),
        lambda b, h, q, k: k != 3,
    ),
    lambda: masks.or_masks(
        masks.chunked_causal_mask_function(64, torch.zeros(2, dtype=torch.long)),
        masks.blockwise_overlay(TABLE),
    ),
], ids=["apart", "not all", "in blocks"])  # fmt: skip
def test_other_masks_of_images_are_refused(made):
    meaning = mask_meaning(mask_function=made(), config=tiny_config("llama"))
    assert isinstance(meaning.refusal, UnsupportedModelError)


def test_a_finished_mask_is_taken_as_it_is():
    made = mask_meaning(mask_function=masks.sliding_window_causal_mask_function(8))
    again = mask_meaning(mask_function=masks.causal_mask_function, attention_mask=made)
    assert again is made


@pytest.mark.parametrize("function", [
    masks.bidirectional_mask_function,
    masks.and_masks(
        masks.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.long)),
        masks.sliding_window_causal_mask_function(64),
    ),
    masks.or_masks(masks.causal_mask_function, lambda b, h, q, k: k == q + 1),
    masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: k % 2 == q % 2),
    masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: k != q),
], ids=["bidirectional", "both", "looks ahead", "every other", "not itself"])  # fmt: skip
def test_other_masks_are_refused_by_whoever_attends_with_them(function):
    meaning = mask_meaning(mask_function=function, config=tiny_config("llama"))
    assert isinstance(meaning.refusal, UnsupportedModelError)
    assert "llama: its attention mask is neither causal" in str(meaning.refusal)


def test_chosen_keys_beside_tokens_that_see_each_other_are_refused():
    mask = MaskMeaning(None, spans=(BidirectionalSpan(0, 2, 5),))
    context = SimpleNamespace(
        attended=SimpleNamespace(times=0), kv=object(), model=SimpleNamespace(name="Model")
    )
    others = {"indices": torch.zeros(1, 5, 2, dtype=torch.int32)}
    with pytest.raises(
        UnsupportedModelError, match=r"Model cannot .* an indexer chooses keys, and"
    ):
        _refuse(context, torch.nn.Identity(), mask, 0.0, others)
    context.attended.times = 0
    _refuse(context, torch.nn.Identity(), mask, 0.0, {"indices": None})


def test_a_model_that_computes_with_its_mask_is_refused():
    meaning = mask_meaning(mask_function=masks.causal_mask_function)
    assert not hasattr(meaning, "to")
    with pytest.raises(UnsupportedModelError, match="its own code reads its attention mask"):
        _ = meaning[:, :, :, :5]
    with pytest.raises(UnsupportedModelError, match="its own code reads its attention mask"):
        _ = meaning.dtype


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("sees_all", [True, False, None], ids=["joins", "parts", "unknown"])
def test_restarts_are_documents_unless_the_model_is_known_to_join_them(axes, sees_all):
    class Base(torch.nn.Module):
        def forward(self, position_ids, **_):
            if sees_all is None:
                raise ValueError("two tokens are too few")
            restarts = (position_ids.diff(dim=-1) != 1).any()
            raise MaskFound(lambda b, h, q, k: (k <= q) & (sees_all or (k == q) | ~restarts))

    model = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(3, 2))
    base = Base()
    parts = SimpleNamespace(causal_lm=model, base=base, decoder=base, configs=(), name="a model")
    positions = torch.tensor([[0, 1, 0]]).repeat(axes, 1, 1)
    given = positions if axes > 1 else positions[0]
    for _ in range(2):  # asked once, known then
        found = document_positions(parts, given)
        if sees_all or (sees_all is None and axes > 1):
            assert found is None
        else:
            assert torch.equal(found, positions[0])
