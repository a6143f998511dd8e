"""Numbers that ranks compare before a step; test_failures.py has real ranks that differ."""

import pytest
import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.forward_calls import read_call
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.errors import PipelineError
from sppo_hf.pipeline import agreement
from sppo_hf.pipeline.agreement import (
    call_facts,
    check_agreement,
    check_replicas,
    settings_checksum,
)
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.testing.tiny_models import build_tiny_model

MESH = PipelineMesh(2, 1, 0, 0, torch.device("cpu"))


def _other_rank_says(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    def all_gather(others: list[torch.Tensor], mine: torch.Tensor, group: object) -> None:
        others[0].copy_(mine)
        others[1].copy_(torch.tensor(numbers))

    monkeypatch.setattr(agreement.dist, "all_gather", all_gather)


def test_facts_that_differ_are_named(monkeypatch):
    _other_rank_says(monkeypatch, 2, 64)
    check_agreement(MESH, {"rows": 2, "tokens": 64})
    _other_rank_says(monkeypatch, 2, 48)
    with pytest.raises(PipelineError, match=r"tokens \(48 on rank 1, 64 on rank 0\)") as caught:
        check_agreement(MESH, {"rows": 2, "tokens": 64})
    assert "rows" not in str(caught.value)


def test_own_numbers_of_all_ranks_are_returned(monkeypatch):
    _other_rank_says(monkeypatch, 2, 64, 5, 9)
    assert check_agreement(MESH, {"rows": 2, "tokens": 64}, 7, 9) == [(7, 9), (5, 9)]


def _positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize(
    ("fact", "given", "on_other_rank"),
    [
        # Their sums are equal; which row or document a token is in is not.
        ("input_ids", {}, {"input_ids": torch.tensor([[5, 1, 2, 3, 4, 6, 7, 8]])}),
        ("labels", {}, {"labels": torch.tensor([[5, 1, 2, 3, 4, 6, 7, 8]])}),
        ("position_ids", {"position_ids": _positions(3, 5)}, {"position_ids": _positions(5, 3)}),
        ("position_ids", {}, {"position_ids": _positions(5, 3)}),
        (
            "cu_seq_lens",
            {"cu_seq_lens_q": torch.tensor([0, 2, 5, 8])},
            {"cu_seq_lens_q": torch.tensor([0, 1, 6, 8])},
        ),
        (
            "attention_mask",
            {"attention_mask": torch.tensor([[1] * 6 + [0] * 2])},
            {"attention_mask": torch.tensor([[0] * 2 + [1] * 6])},
        ),
        ("num_items_in_batch", {"num_items_in_batch": 7}, {"num_items_in_batch": 14}),
    ],
)
def test_what_changes_the_gradient_has_a_number(fact, given, on_other_rank):
    model = build_tiny_model("llama")
    ids = torch.arange(1, 9)[None]

    def facts(more: dict[str, object]) -> dict[str, int]:
        batch = {"input_ids": ids, "labels": ids, **more}
        call = read_call(find_parts(model), model.forward, (), batch)
        return call_facts(call, SPPOConfig())

    ours, theirs = facts(given), facts(on_other_rank)
    assert {name for name in ours if ours[name] != theirs[name]} == {fact}


@pytest.mark.parametrize(
    ("order", "numbers", "words", "remedy"),
    [
        ("by_chunk", "6 on rank 0, 2 on rank 1", "every layer once for each chunk", "as many rows"),
        ("by_layer", "3 on rank 0, 1 on rank 1", "head once for each chunk", "no micro_batch_size"),
    ],
)
def test_other_numbers_of_chunks_are_refused_for_what_is_gathered(order, numbers, words, remedy):
    """By layer they count where groups of rows run one after the other, and for the head alone."""
    with pytest.raises(PipelineError, match=f"{words}.*: {numbers}.*num_chunks=3 .*{remedy}"):
        check_replicas({0: (3, 2, 4, 0), 1: (1, 2, 4, 0)}, order=order)


def test_settings_that_must_be_shared_have_a_number():
    numbers = {
        settings_checksum(SPPOConfig(**changes))
        for changes in (
            {"pp_size": 2},
            {"pp_size": 4},
            {"pp_size": 2, "num_chunks": 4},
            {"pp_size": 2, "chunk_lengths": (3, 4)},
            {"pp_size": 2, "partition": "even"},
            {"pp_size": 2, "pp_schedule": "gpipe"},
        )
    }
    assert len(numbers) == 6
    # A rank's memory is its own affair.
    assert settings_checksum(SPPOConfig(device_memory="1GiB")) == settings_checksum(SPPOConfig())
