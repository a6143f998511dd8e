"""Grouping: equal neighbours, then alike ones, then by number; nothing lost."""

import pytest

from sppo_hf.planning.activation_modes import KEEP, ActivationMode, all_modes, mode_of
from sppo_hf.planning.decisions import Decisions
from sppo_hf.reporting.plan_tables import ChunkGroup, group_chunks, span, words
from tests.planning.modes import OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD


def decisions(*rows: tuple[ActivationMode, ...]) -> Decisions:
    return Decisions(
        batch_rows=1,
        bounds=tuple((i, i + 1) for i in range(len(rows))),
        layer_modes=rows,
        training=True,
        tile_tokens=1,
    )


def mixed(kept: int) -> tuple[ActivationMode, ...]:
    return (KEEP,) * kept + (OFFLOAD,) * (8 - kept)


def test_equal_neighbours_are_one_group_whatever_their_order_of_layers() -> None:
    made = decisions(mixed(3), tuple(reversed(mixed(3))), mixed(8), mixed(3))
    groups = group_chunks(made, most=10)
    assert [(group.title, group.text) for group in groups] == [
        ("chunks 1-2", "3 kept, 5 to host"),
        ("chunk 3", "8 kept"),
        ("chunk 4", "3 kept, 5 to host"),
    ]


def test_too_many_are_grouped_by_the_modes_that_they_have() -> None:
    made = decisions(*(mixed(kept) for kept in (1, 2, 3, 4, 5)), (RECOMPUTE,) * 8)
    groups = group_chunks(made, most=2)
    assert groups == [
        ChunkGroup(0, 4, {KEEP: (1, 5), OFFLOAD: (3, 7)}),
        ChunkGroup(5, 5, {RECOMPUTE: (8, 8)}),
    ]
    assert groups[0].text == "1-5 kept, 3-7 to host"


@pytest.mark.parametrize(("chunks", "most"), [(64, 16), (65, 16), (7, 3), (5, 5), (1, 1)])
def test_never_more_than_asked_and_every_chunk_once(chunks: int, most: int) -> None:
    made = decisions(*((all_modes()[i % len(all_modes())],) * 2 for i in range(chunks)))
    groups = group_chunks(made, most=most)
    assert len(groups) <= most
    listed = [i for group in groups for i in range(group.first, group.last + 1)]
    assert listed == list(range(chunks))


def test_words_tell_all_modes_apart() -> None:
    assert len({words(mode) for mode in all_modes()}) == len(all_modes()) == 12
    assert words(RECOMPUTE_OFFLOAD) == "full recompute to host"
    assert words(mode_of("matmuls", "disk")) == "selective recompute to disk"


def test_span() -> None:
    assert span(3, 3) == "3"
    assert span(1024, 2048) == "1,024-2,048"
