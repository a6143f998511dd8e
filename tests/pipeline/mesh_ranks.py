"""A job for each of four ranks: the groups of a launch that is bound to a device."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from sppo_hf.pipeline.checkpoint import _world_group
from sppo_hf.pipeline.mesh import PipelineMesh, make_mesh, with_unit_groups

USES = ("all_reduce", "all_to_all_single", "broadcast", "reduce", "send", "recv")


def groups_of(mesh: PipelineMesh) -> dict[str, Any]:
    """Return the groups of this rank that carry tensors, by name."""
    found = {
        "pipeline": mesh.pp_group,
        "ends": mesh.embedding_group,
        "sequence": mesh.sp_group,
        "replicas": mesh.replica_group,
        **{f"link {link}": group for link, group in mesh.links.items()},
        **{f"set {ranks}": group for ranks, group in mesh.unit_groups.items()},
    }
    return {name: group for name, group in found.items() if group is not None}


def main(job: dict[str, Any]) -> None:
    """Form the groups of several meshes, and check how each was used."""
    dist.init_process_group("gloo")
    launch: Any = dist.group.WORLD
    device, cpu = torch.device("cuda", 0), torch.device("cpu")
    launch.bound_device_id = device
    used: Counter[tuple[str, Any]] = Counter()

    def counted(name: str) -> Any:
        carry_out = getattr(dist, name)

        def use(*args: Any, **kwargs: Any) -> Any:
            used[name, kwargs["group"]] += 1
            return carry_out(*args, **kwargs)

        return mock.patch.object(dist, name, use)

    for name in USES:
        counted(name).start()
    for pp_size, sp_size in ((2, 1), (1, 2), (2, 2), (4, 1)):
        mesh = make_mesh(pp_size, cpu, timeout_seconds=20, sp_size=sp_size)
        if pp_size == 4:
            mesh = with_unit_groups(mesh, timeout_seconds=20)
        assert launch.bound_device_id == device
        for name, group in groups_of(mesh).items():
            kinds = {kind for kind, where in used if where is group}
            if name.startswith("link"):
                assert kinds in ({"send"}, {"recv"}), (name, kinds)
                continue
            # Without replicas the ranks of a sequence are those that hold the same stages.
            shares_tokens = group is mesh.sp_group or name.startswith("set")
            assert ("all_to_all_single" in kinds) == shares_tokens, (name, kinds)
            assert ({"broadcast", "reduce"} <= kinds) == name.startswith("set"), (name, kinds)
            assert "all_reduce" in kinds, (name, kinds)
    everyone = _world_group(launch)
    assert dist.get_world_size(everyone) == 4
    dist.barrier(group=everyone)
    os._exit(0)
