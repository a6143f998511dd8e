"""Where a rank stands while a checkpoint is written, and the frame that every save runs in.

What is written is the business of `checkpoint_weights` and `checkpoint_state`; here is who writes,
how ranks wait for each other, and when a folder counts as complete.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist

from sppo_hf.engine.convert import get_engine
from sppo_hf.errors import ConfigError, PipelineError
from sppo_hf.pipeline.checkpoint_files import (
    Digest,
    find_damage,
    mark_complete,
    mark_incomplete,
    write_tensors,
    writing,
)
from sppo_hf.pipeline.mesh import STORAGE_TIMEOUT, PipelineMesh
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.watchdog import collective_section

STAGING = ".sppo-saving"
"""Folder inside a checkpoint's for files that are moved out of it when all are written."""

_open: dict[Path, dict[str, Digest]] = {}
"""Folders that are being saved, and digests of the files that this process has written there."""


@dataclass(frozen=True, slots=True)
class RankCoords:
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
        return _gather_over(self.pipeline, value)

    def gather_all(self, value: Any) -> list[Any]:
        """Gather small objects over all processes; the list comes to each of them."""
        return _gather_over(self.everyone, value)


def rank_coords_of(model: nn.Module) -> RankCoords:
    """Where this process stands in saves and loads of `model`; every process calls this."""
    engine = get_engine(model)
    return rank_coords_in(engine.mesh) if isinstance(engine, PipelineEngine) else RankCoords()


def rank_coords_in(mesh: PipelineMesh) -> RankCoords:
    """Where this process stands in saves and loads of a pipeline run."""
    # Ranks that share a sequence hold the same stages, as replicas do.
    return RankCoords(
        mesh.pp_rank,
        mesh.dp_rank * mesh.sp_size + mesh.sp_rank,
        mesh.pp_size,
        mesh.dp_size * mesh.sp_size,
        everyone=_all_processes(dist.group.WORLD),
        pipeline=mesh.storage,
    )


@functools.cache
def _all_processes(world: Any) -> Any:
    """All processes of `world`, on the CPU: saves gather numbers and names, which are there."""
    # Ranks write different amounts; the first to be done waits for the last for as long as a disk
    # may take.
    return dist.new_group(backend="gloo", timeout=STORAGE_TIMEOUT)


def _gather_over(group: Any, value: Any) -> list[Any]:
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def find_damage_together(folder: Path) -> str | None:
    """`find_damage`, with the reading of files shared by all processes; every process calls this.

    Raises:
        ConfigError: The checkpoint was written in a later format.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return find_damage(folder)
    group = _all_processes(dist.group.WORLD)
    lacks: str | ConfigError | None
    try:
        lacks = find_damage(folder, share=(dist.get_rank(), dist.get_world_size()))
    except ConfigError as error:
        lacks = error
    found = next((seen for seen in _gather_over(group, lacks) if seen is not None), None)
    if isinstance(found, ConfigError):
        raise found
    return found


@contextlib.contextmanager
def saving(folder: str | Path, place: RankCoords) -> Iterator[Path]:
    """Mark `folder` as incomplete, and as complete when all ranks have come to the end.

    Every process enters this. Inside itself, for the same folder, it does nothing. The folder is on
    a file system that all ranks see.

    Raises:
        PipelineError: The ranks do not see the same folder, or the disk refused to write.
        RankLostError: Another rank was lost.
    """
    with collective_section(f"saving {Path(folder).name}"), _marked(folder, place) as folder:
        yield folder


@contextlib.contextmanager
def _marked(folder: str | Path, place: RankCoords) -> Iterator[Path]:
    folder = Path(folder).absolute()
    if folder in _open:
        yield folder
        return
    digests = _open.setdefault(folder, {})
    try:
        with writing(folder):
            before = mark_incomplete(folder) if place.leads else {}
            place.wait()
            if not folder.is_dir():
                raise PipelineError(
                    f"Rank {place.pp_rank} of replica {place.dp_rank} does not see "
                    f"{str(folder)!r}, which rank 0 has made. Allowed: folders on a file system "
                    "that all nodes share, because ranks write one checkpoint together. Remedy: "
                    "another output_dir."
                )
            yield folder
            written = place.gather_all(digests)
            if place.leads:
                layout = {"pp_size": place.pp_size, "dp_size": place.dp_size}
                found = {name: digest for part in written for name, digest in part.items()}
                mark_complete(folder, {"layout": layout}, before=before, digests=found)
            place.wait()
    finally:
        del _open[folder]


def write_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file, inside `saving`, and note its digest for the mark.

    Raises:
        ConfigError: A tensor is of a kind that safetensors files cannot hold.
        PipelineError: The file could not be written.
    """
    digest = write_tensors(tensors, path)
    for folder, digests in _open.items():
        if path.absolute().is_relative_to(folder):
            parts = path.absolute().relative_to(folder).parts
            digests["/".join(part for part in parts if part != STAGING)] = digest
