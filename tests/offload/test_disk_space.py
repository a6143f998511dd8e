"""Extents are disjoint, files grow in number slowly, and a full disk leaves all as it was."""

import errno
import logging
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload import disk
from sppo_hf.offload.disk import DiskExtent, DiskSpace, describe
from sppo_hf.offload.disk_files import BLOCK_BYTES, StoreFolder

SLAB_BYTES = 8 * BLOCK_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StoreFolder]:
    folder = StoreFolder(tmp_path)
    yield folder
    folder.remove()


class FakeFile:
    """A slab file without a file."""

    keeps_name = False

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Nothing to close."""


class FakeFolder:
    path = Path("/nowhere")
    free_bytes = 0
    new_file = FakeFile


def check_disjoint(extents: list[DiskExtent]) -> None:
    runs = sorted((id(e.slab), e.offset, e.offset + e.reserved_bytes) for e in extents)
    for (slab, _, end), (next_slab, start, _) in pairwise(runs):
        assert slab != next_slab or end <= start


@given(
    actions=st.lists(
        st.tuples(st.booleans(), st.one_of(st.integers(1, 3 * SLAB_BYTES), st.integers(1, 30))),
        max_size=50,
    ),
    budget=st.integers(0, 12 * SLAB_BYTES),
)
def test_any_sequence_of_loans(actions: list[tuple[bool, int]], budget: int) -> None:
    space = DiskSpace(FakeFolder(), slab_bytes=SLAB_BYTES, budget_bytes=budget)  # pyright: ignore
    lent: list[DiskExtent] = []
    for is_loan, value in actions:
        if is_loan:
            try:
                lent.append(space.allocate(value))
            except BudgetError:
                assert space.reserved_bytes + value > budget - BLOCK_BYTES
        elif lent:
            space.release(lent.pop(value % len(lent)))
        check_disjoint(lent)
        assert all(e.offset % BLOCK_BYTES == 0 and e.num_bytes <= e.reserved_bytes for e in lent)
        assert space.used_bytes == sum(extent.reserved_bytes for extent in lent)
        assert space.used_bytes <= space.peak_bytes <= space.reserved_bytes <= budget
    for extent in lent:
        space.release(extent)
    assert space.used_bytes == 0


def test_a_large_disk_needs_few_files() -> None:
    space = DiskSpace(FakeFolder(), slab_bytes=2**30, budget_bytes=2**41)  # pyright: ignore
    extents = [space.allocate(2**28) for _ in range(2**13)]
    assert len({id(extent.slab) for extent in extents}) < 70
    assert space.reserved_bytes == space.used_bytes == 2**41
    with pytest.raises(BudgetError):
        space.allocate(1)


def test_a_full_disk_names_the_folder_and_leaves_all_as_it_was(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=100 * SLAB_BYTES)
    first = space.allocate(SLAB_BYTES)
    with monkeypatch.context() as patch:

        def full(*_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(BudgetError, match=r"No space left.*Free some.*offload_dir") as caught:
            space.allocate(5000)
    for seen in (str(folder.path), f"{2 * BLOCK_BYTES} bytes more", "bytes free"):
        assert seen in str(caught.value)
    assert space.used_bytes == space.reserved_bytes == SLAB_BYTES
    assert not list(folder.path.iterdir())
    assert space.allocate(5000).slab is not first.slab
    space.close()


def test_what_is_reserved_is_told_because_nobody_sees_it_in_the_folder(
    folder: StoreFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=disk.__name__)
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=100 * SLAB_BYTES)
    for _ in range(2):
        space.allocate(SLAB_BYTES)
    told = [record.getMessage() for record in caplog.records]
    start = f"disk tier: {2 * SLAB_BYTES} bytes are reserved in {folder.path}, in 2 files"
    assert len(told) == 2
    assert told[1].startswith(f"{start} without names")
    space.close()


def test_a_file_size_limit_is_room_that_there_is_not(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", too_large)
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=SLAB_BYTES)
    with pytest.raises(BudgetError, match="File too large"):
        space.allocate(1)


def test_only_for_want_of_room_is_a_smaller_file_tried(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def broken(descriptor: int, offset: int, num_bytes: int) -> None:
        asked.append(num_bytes)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", broken)
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=SLAB_BYTES)
    with pytest.raises(OffloadError, match="Input/output error"):
        space.allocate(1)
    assert asked == [SLAB_BYTES]


def test_a_nearly_full_disk_gives_what_is_needed(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nearly_full(descriptor: int, offset: int, num_bytes: int) -> None:
        if num_bytes > 3 * BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=100 * SLAB_BYTES)
    space.allocate(2 * BLOCK_BYTES + 1)
    assert space.reserved_bytes == 3 * BLOCK_BYTES
    space.close()


def test_a_disk_that_gives_no_file_is_another_error(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=SLAB_BYTES)
    with pytest.raises(
        OffloadError, match=f"{re.escape(str(folder.path))}.*Read-only.*offload_dir"
    ):
        space.allocate(1)
    assert space.reserved_bytes == 0


def test_an_error_is_described_by_place_cause_and_remedy(folder: StoreFolder) -> None:
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=SLAB_BYTES)
    space.allocate(BLOCK_BYTES)
    extent = space.allocate(10)
    place = f"reading 10 bytes at offset {BLOCK_BYTES} of {extent.slab.file} failed"
    text = describe("reading", extent, OSError(errno.EIO, "Input/output error"), folder)
    assert text.startswith(f"disk tier: {place}: EIO, Input/output error. ")
    assert "check the disk" in text
    text = describe("writing", extent, OSError(errno.EDQUOT, "Disk quota exceeded"), folder)
    assert "lower disk_memory" in text
    space.close()
