"""Where a rank stands while a checkpoint is written, and the frame that every save runs in.

What is written is the business of `checkpoint_weights` and `checkpoint_state`; here is who writes,
how ranks wait for each other, and when a folder counts as complete.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist

from sppo_hf.errors import PipelineError
from sppo_hf.model.convert import get_engine
from sppo_hf.runtime.checkpoint_marks import mark_complete, mark_incomplete
from sppo_hf.runtime.mesh import STORAGE_TIMEOUT, PipelineMesh
from sppo_hf.runtime.pipeline_engine import PipelineEngine
from sppo_hf.runtime.watchdog import explaining

_open: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Place:
    """A process among those that save or load together."""

    pp_rank: int = 0
    dp_rank: int = 0
    pp_size: int = 1
    dp_size: int = 1
    everyone: Any = None
    """Group of all processes, on the CPU; None where there is one process."""
    pipeline: Any = None
    """Group of this pipeline's, on the CPU; None where there is one process."""

    @property
    def leads(self) -> bool:
        """Whether this is the first of all processes, which writes what is written once."""
        return self.pp_rank == 0 and self.dp_rank == 0

    @property
    def writes_weights(self) -> bool:
        """Whether this is of the first replica, which writes the weights."""
        return self.dp_rank == 0

    def wait(self) -> None:
        """Wait for all processes."""
        if self.everyone is not None:
            dist.barrier(group=self.everyone)

    def gather(self, value: Any) -> list[Any]:
        """Gather small objects over this pipeline; the list, by rank, comes to all of it."""
        if self.pipeline is None:
            return [value]
        values: list[Any] = [None] * self.pp_size
        dist.all_gather_object(values, value, group=self.pipeline)
        return values


def place_of(model: nn.Module) -> Place:
    """Where this process stands in saves and loads of `model`; every process calls this."""
    engine = get_engine(model)
    return place_in(engine.mesh) if isinstance(engine, PipelineEngine) else Place()


def place_in(mesh: PipelineMesh) -> Place:
    """Where this process stands in saves and loads of a pipeline run."""
    return Place(
        mesh.pp_rank,
        mesh.dp_rank,
        mesh.pp_size,
        mesh.dp_size,
        everyone=_everyone(mesh),
        pipeline=mesh.storage,
    )


@functools.cache
def _everyone(mesh: PipelineMesh) -> Any:
    """All processes, on the CPU: saves gather numbers and names, which are there."""
    # Ranks write different amounts; the first to be done waits for the last for as long as a disk
    # may take.
    return dist.new_group(backend="gloo", timeout=STORAGE_TIMEOUT)


@contextlib.contextmanager
def saving(folder: str | Path, place: Place) -> Iterator[Path]:
    """Mark `folder` as incomplete, and as complete when all ranks have come to the end.

    Every process enters this. Inside itself, for the same folder, it does nothing.

    Args:
        folder: On a file system that all ranks see.
        place: This process.

    Raises:
        PipelineError: The ranks do not see the same folder.
        RankLostError: Another rank was lost.
    """
    with explaining(f"saving {Path(folder).name}"), _marked(folder, place) as folder:
        yield folder


@contextlib.contextmanager
def _marked(folder: str | Path, place: Place) -> Iterator[Path]:
    folder = Path(folder).absolute()
    if folder in _open:
        yield folder
        return
    _open.add(folder)
    try:
        if place.leads:
            mark_incomplete(folder)
        place.wait()
        if not folder.is_dir():
            raise PipelineError(
                f"Rank {place.pp_rank} of replica {place.dp_rank} does not see {str(folder)!r}, "
                "which rank 0 has made. Allowed: folders on a file system that all nodes share, "
                "because ranks write one checkpoint together. Remedy: another output_dir."
            )
        yield folder
        place.wait()
        if place.leads:
            layout = {"pp_size": place.pp_size, "dp_size": place.dp_size}
            mark_complete(folder, {"layout": layout})
        place.wait()
    finally:
        _open.discard(folder)


def write_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file, and see that it is on the disk."""
    save_file(tensors, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())
