"""A store on a disk, as the disk tier makes it, that allocates and writes in one call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sppo_hf.offload.disk import DiskSpace
from sppo_hf.offload.disk_files import StoreFolder
from sppo_hf.offload.store import Extent, Store, Transfer


@dataclass(frozen=True)
class DiskWrite:
    extent: Extent
    ticket: Transfer


class DiskStore(Store):
    space: DiskSpace

    def __init__(
        self,
        directory: str | Path,
        *,
        budget_bytes: int | None = None,
        slab_bytes: int = 2**20,
        threads: int = 2,
        **settings: Any,
    ) -> None:
        folder = StoreFolder(Path(directory))
        space = DiskSpace(folder, slab_bytes=slab_bytes, budget_bytes=budget_bytes)
        space.threads = threads
        super().__init__("disk", space, **settings)

    def write(self, host_bytes: Tensor) -> DiskWrite:
        extent = self.allocate(host_bytes.numel())
        return DiskWrite(extent, self.start_write(extent, host_bytes))
