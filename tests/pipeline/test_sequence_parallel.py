"""Models whose sequences can be shared, and exchanges of ranks that are threads here.

test_sequence_exactness.py has real collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.sequence_group import local_heads, rank_tokens
from sppo_hf.errors import ConfigError, PipelineError, UnsupportedModelError
from sppo_hf.pipeline import sequence_parallel
from sppo_hf.pipeline.sequence_parallel import (
    SequenceParallelEngine,
    SequenceRanks,
    check_shareable_sequences,
)
from sppo_hf.testing.tiny_families import _STATES, FAMILIES
from sppo_hf.testing.tiny_models import build_tiny_model


@pytest.mark.parametrize(
    "name", [x for x in _STATES if FAMILIES[x].model_type in CONFIG_MAPPING_NAMES]
)
def test_every_family_with_states_is_refused_before_anything_runs(name: str) -> None:
    model = build_tiny_model(name)
    with pytest.raises(UnsupportedModelError) as caught:
        check_shareable_sequences(find_parts(model), 2)
    said = str(caught.value)
    assert said.startswith(type(model).__name__)
    # Some are refused on one rank already.
    alone = "cannot be trained chunk by chunk"
    assert "layers are recurrent or convolutional (" in said or alone in said


def test_layers_with_other_numbers_of_heads_count() -> None:
    heads = {"num_attention_heads_per_layer": [4, 6, 6], "num_key_value_heads": 2}
    parts = find_parts(build_tiny_model("laguna", **heads))
    check_shareable_sequences(parts, 2)
    with pytest.raises(ConfigError, match=r"sp_size=4 does not divide the 2 .*Allowed: 1, 2\. "):
        check_shareable_sequences(parts, 4)


FOUR_CHUNKS = r"3 on rank 0, 4 on rank 1\. .* Remedy: num_chunks=4 "
TWO_GROUPS = r"different numbers of groups: 1 on rank 0, 2 on rank 1\. .*Remedy: as many rows"


@pytest.mark.parametrize(
    ("order", "other", "refused"),
    [
        ("by_chunk", (3, 1, 5, 0), ""),
        ("by_chunk", (1, 3, 2, 0), ""),
        ("by_chunk", (4, 1, 2, 0), FOUR_CHUNKS),
        ("by_layer", (1, 1, 1, 0), ""),
        ("by_layer", (1, 2, 1, 0), TWO_GROUPS),
    ],
)
def test_replicas_that_share_sharded_weights_gather_them_as_often(
    monkeypatch, order, other, refused
):
    """By chunk for each chunk, of which replicas may have other numbers; else by groups of rows."""
    # The other replica has no images, and refuses nothing.
    gathered = (*other, 0, 0)
    monkeypatch.setattr(sequence_parallel, "gather", lambda own, group: {0: own, 1: gathered})
    engine: Any = object.__new__(SequenceParallelEngine)
    vars(engine).update(
        mesh=SimpleNamespace(dp_size=2, replica_control_group=None),
        parts=SimpleNamespace(is_sharded=lambda: True),
        config=SPPOConfig(),
        most_loss_tiles=lambda call, plan, whole_logits: 4,
    )
    call: Any = SimpleNamespace(row_groups=lambda config: [(0, 2)], encoder_inputs={})
    plan: Any = SimpleNamespace(num_chunks=3, order=order)
    if not refused:
        tiles = engine.check_plan(call, plan, whole_logits=False)
        own = 4 if order == "by_chunk" else 1
        assert tiles == max(own, other[2]), "the head is called as often on all"
        return
    with pytest.raises(PipelineError, match=refused):
        engine.check_plan(call, plan, whole_logits=False)


class Threads(SequenceRanks):
    """A rank that is a thread; `group` has what each of them sends, and when all have."""

    def start_all_to_all(
        self, sent: Tensor, sent_lengths: list[int], received_lengths: list[int]
    ) -> Tensor:
        posts, barrier = self.group
        posts[self.rank] = sent.split(sent_lengths)
        barrier.wait(10)
        received = [posts[rank][self.rank] for rank in range(self.size)]
        barrier.wait(10)
        assert [len(part) for part in received] == received_lengths
        return torch.cat(received)


def on_threads(size: int, head_blocks: int | None, work: Callable[[Threads], Any]) -> None:
    group = [()] * size, threading.Barrier(size)
    ranks = [Threads(group, rank, size, head_blocks=head_blocks) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        assert len([*pool.map(work, ranks)]) == size


@pytest.mark.parametrize(
    ("heads", "size", "head_blocks"), [(6, 3, None), (8, 2, 4), (8, 3, 4), (5, 2, 5)]
)
def test_tokens_are_exchanged_for_heads_and_back(
    heads: int, size: int, head_blocks: int | None
) -> None:
    """Seven tokens, and heads in blocks that the ranks cannot always divide evenly."""
    x_BNCH = torch.randn(2, heads, 7, 3, dtype=torch.float64)

    def exchange(ranks: Threads) -> None:
        own_heads = x_BNCH[:, slice(*_ends(local_heads(heads, ranks.rank, size, head_blocks)))]
        own_tokens = x_BNCH[:, :, slice(*rank_tokens(0, 7, ranks.rank, size))]
        for mine, yours, start in (
            (own_tokens, own_heads, lambda x: ranks.start_tokens_to_heads(x, 7)),
            (own_heads, own_tokens, ranks.start_heads_to_tokens),
        ):
            x = mine.clone().requires_grad_()
            running = start(x)
            assert torch.equal(running.pending(), yours)
            received = running.wait()
            assert torch.equal(received, yours)
            received.backward(2 * yours)
            assert x.grad is not None
            assert torch.equal(x.grad, 2 * mine)

    on_threads(size, head_blocks, exchange)


def _ends(heads: range) -> tuple[int, int]:
    return heads.start, heads.stop


def test_all_ranks_have_the_value_of_the_one_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(shared: list[str], source: int, *, group: str) -> None:
        assert (group, source) == ("control", 7)
        shared[0] = "theirs"

    ranks = SequenceRanks("group", 0, 3, control_group="control")
    monkeypatch.setattr(
        sequence_parallel,
        "make_on_all_ranks",
        lambda make, group, *, share: (make(), [share(make()), 1.0, 3.0]),
    )
    monkeypatch.setattr(sequence_parallel.dist, "get_global_rank", lambda group, rank: 6 + rank)
    monkeypatch.setattr(sequence_parallel.dist, "broadcast_object_list", broadcast)
    assert ranks.decide(lambda: "mine", lambda made: float(len(made))) == "theirs"
