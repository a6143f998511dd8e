"""Optimizer, scheduler and random numbers of a run, by torch.distributed.checkpoint.

Everything an optimizer keeps is stored under the *name* of its parameter. Each rank saves what it
holds, replicas sharing the work, and loads by name what it holds then: on another number of stages
or replicas, or on one process.

[Note: whose random numbers]
Every process saves the state of its generators. A process that resumes takes those of the same
place (stage and replica); where there was no such place, those of its replica's first rank; where
there was no such replica, those of the first rank of all. So the same layout draws the same
numbers, and any layout draws the same ones every time it resumes.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sppo_hf.errors import ConfigError
from sppo_hf.model.convert import get_engine
from sppo_hf.model.structure import find_causal_lm
from sppo_hf.runtime.checkpoint import Place, place_of
from sppo_hf.runtime.pipeline_engine import PipelineEngine

STATE_FOLDER = "sppo_optimizer"
"""Folder of a checkpoint. A Trainer without SPPO that finds a folder named after an optimizer and
no optimizer.pt stops, where it would otherwise go on with a fresh optimizer."""

_STATE = "state/"  # state/<number of the optimizer>/<parameter>/<what the optimizer calls it>

Groups = list[dict[str, Any]]
"""Parameter groups of an optimizer: its settings, and under "names" the parameters."""


def save_state(
    folder: str | Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    schedulers: list[Any],
) -> None:
    """Write optimizers, schedulers and random numbers into a checkpoint folder.

    Every process calls this, within `checkpoint.saving`.

    Args:
        folder: The checkpoint's.
        model: Whose parameters the optimizers step.
        optimizers: As the ranks have them, all in the same order and with the same groups.
        schedulers: The same on all ranks.

    Raises:
        ConfigError: An optimizer steps a tensor that is no parameter of the model.
    """
    place = place_of(model)
    target = Path(folder) / STATE_FOLDER
    names = _names(model)
    state: dict[str, Any] = {f"rng/{place.dp_rank}/{place.pp_rank}": random_state(model)}
    groups = []
    for number, optimizer in enumerate(map(unwrapped, optimizers)):
        groups.append(_whole_groups(optimizer, names, model, place))
        for parameter, values in optimizer.state.items():
            name = names[id(parameter)]
            for key, value in values.items():
                state[f"{_STATE}{number}/{name}/{key}"] = value
    state["groups"] = groups
    state["schedulers"] = [scheduler.state_dict() for scheduler in schedulers]
    if place.leads:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    place.wait()
    # Not flattened: what is no tensor is stored as it is.
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    alone = place.everyone is None
    with _no_warning():
        dcp.save(
            state,
            checkpoint_id=target,
            process_group=place.everyone,
            no_dist=alone,
            planner=planner,
        )


def has_state(folder: str | Path) -> bool:
    """Whether `save_state` wrote into this checkpoint."""
    return (Path(folder) / STATE_FOLDER / ".metadata").is_file()


def load_state(
    folder: str | Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    schedulers: list[Any],
) -> None:
    """Read what `save_state` wrote, as far as this process holds its parameters.

    Processes read each for itself and need not wait for each other.

    Raises:
        ConfigError: The optimizers or their groups are other ones.
    """
    stored = _Stored(Path(folder))
    names = _names(model)
    common = stored.read(["groups", "schedulers"])
    counts = (len(optimizers), len(schedulers))
    if (len(common["groups"]), len(common["schedulers"])) != counts:
        raise ConfigError(
            f"{str(folder)!r} holds {len(common['groups'])} optimizers and "
            f"{len(common['schedulers'])} schedulers, but the run has {counts[0]} and {counts[1]}. "
            "Allowed: as many. Remedy: prepare the same optimizers and schedulers as when it was "
            "saved."
        )
    for number, optimizer in enumerate(map(unwrapped, optimizers)):
        ordered = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
        wanted = {name for group in ordered for name in group}
        keys = stored.keys_of(number, wanted)
        values = stored.read(keys.values())
        state: dict[str, dict[str, Any]] = {}
        for (name, key), path in keys.items():
            state.setdefault(name, {})[key] = values[path]
        _give(optimizer, state, common["groups"][number], ordered, folder)
    for scheduler, value in zip(schedulers, common["schedulers"], strict=True):
        scheduler.load_state_dict(value)


def load_plain_optimizer(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Give an optimizer of a cut model what one of the whole model had; all ranks call this.

    Args:
        state: `state_dict()` of an optimizer of the whole model, in groups of the same kind whose
            parameters come in the model's order, as the Trainer makes them.
        model: Cut.
        optimizer: Of this rank's parameters.

    Raises:
        ConfigError: The groups are other ones.
    """
    optimizer = unwrapped(optimizer)
    names = _names(model)
    whole = _whole_groups(optimizer, names, model, place_of(model))
    saved = state["param_groups"]
    if [len(g["params"]) for g in saved] != [len(g["names"]) for g in whole]:
        raise ConfigError(
            f"The optimizer's state has groups of {[len(g['params']) for g in saved]} parameters, "
            f"but the run has {[len(g['names']) for g in whole]}. Allowed: the same groups. "
            "Remedy: train the same parameters, with the same weight decay, as when it was saved."
        )
    by_name = {
        name: state["state"][index]
        for theirs, ours in zip(saved, whole, strict=True)
        for index, name in zip(theirs["params"], ours["names"], strict=True)
        if index in state["state"]
    }
    groups = [{**theirs, "names": ours["names"]} for theirs, ours in zip(saved, whole, strict=True)]
    ordered = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
    _give(optimizer, by_name, groups, ordered, "optimizer.pt")


def read_plain_state(folder: str | Path, number: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """What one process without SPPO would have saved; needs memory for all of it.

    Returns:
        `state_dict()` of optimizer `number` of the whole model, and those of the schedulers.
    """
    stored = _Stored(Path(folder))
    common = stored.read(["groups", "schedulers"])
    groups = common["groups"][number]
    order = [name for group in groups for name in group["names"]]
    keys = stored.keys_of(number, set(order))
    values = stored.read(keys.values())
    index = {name: position for position, name in enumerate(order)}
    state: dict[int, dict[str, Any]] = {}
    for (name, key), path in keys.items():
        state.setdefault(index[name], {})[key] = values[path]
    plain = [
        {**{k: v for k, v in g.items() if k != "names"}, "params": [index[n] for n in g["names"]]}
        for g in groups
    ]
    return {"state": dict(sorted(state.items())), "param_groups": plain}, common["schedulers"]


# -- random numbers ---------------------------------------------------------------------------


def random_state(model: nn.Module) -> dict[str, Any]:
    """The state of this process's generators; on CUDA, of the device that `model` is on."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state(_cuda_device(model))
    return state


def load_random_state(folder: str | Path, model: nn.Module) -> None:
    """Set this process's generators; see [Note: whose random numbers]."""
    place = place_of(model)
    stored = _Stored(Path(folder))
    own = [(place.dp_rank, place.pp_rank), (place.dp_rank, 0), (0, 0)]
    path = next(p for p in (f"rng/{dp}/{pp}" for dp, pp in own) if p in stored.kinds)
    state = stored.read([path])[path]
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"], _cuda_device(model))


def _cuda_device(model: nn.Module) -> torch.device:
    """The device that `model` is on; the current one if it is on none."""
    devices = {parameter.device for parameter in model.parameters()}
    found = [device for device in devices if device.type == "cuda"]
    return found[0] if len(found) == 1 else torch.device("cuda")


# -- names and groups -------------------------------------------------------------------------


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, out of an Accelerator's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner  # type: ignore[no-any-return]


def _names(model: nn.Module) -> dict[int, str]:
    """Names of the parameters held here, by their ids."""
    return {id(p): name for name, p in find_causal_lm(model).named_parameters()}


def _whole_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], model: nn.Module, place: Place
) -> Groups:
    """The groups as an optimizer of the whole model would have them."""
    held = []
    for group in optimizer.param_groups:
        if unknown := [p for p in group["params"] if id(p) not in names]:
            raise ConfigError(
                f"The optimizer steps {len(unknown)} tensors that are no parameters of the model, "
                f"one of shape {list(unknown[0].shape)}. Allowed: parameters of the causal "
                "language model. Remedy: make the optimizer of the prepared model's parameters."
            )
        held.append([names[id(p)] for p in group["params"]])
    engine = get_engine(model)
    everything = names.values()
    if isinstance(engine, PipelineEngine):
        everything = engine.staged.all_names
    position = {name: index for index, name in enumerate(everything)}
    whole = []
    for number, group in enumerate(optimizer.param_groups):
        found = {name for part in place.gather(held[number]) for name in part}
        # Groups of one process keep the order in which they were made.
        ordered = sorted(found, key=position.__getitem__) if place.pp_size > 1 else held[number]
        settings = {key: value for key, value in group.items() if key != "params"}
        whole.append({**settings, "names": ordered})
    return whole


def _give(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, dict[str, Any]],
    groups: Groups,
    ordered: list[list[str]],
    folder: str | Path,
) -> None:
    """Load by name, through the optimizer's own `load_state_dict`."""
    if len(groups) != len(ordered):
        raise ConfigError(
            f"{str(folder)!r} has {len(groups)} parameter groups, but the run's optimizer has "
            f"{len(ordered)}. Allowed: the same groups. Remedy: make the optimizer as when it was "
            "saved."
        )
    for number, (group, names) in enumerate(zip(groups, ordered, strict=True)):
        if foreign := sorted(set(names) - set(group["names"])):
            raise ConfigError(
                f"Group {number} of the optimizer's state in {str(folder)!r} has no {foreign[0]!r} "
                f"({len(foreign)} are missing). Allowed: the same groups. Remedy: train the same "
                "parameters, with the same weight decay, as when it was saved."
            )
    index: dict[str, int] = {}
    for names in ordered:
        for name in names:
            index[name] = len(index)
    settings = [
        {
            **{k: v for k, v in g.items() if k not in ("names", "params")},
            "params": [index[name] for name in names],
        }
        for g, names in zip(groups, ordered, strict=True)
    ]
    values = {index[name]: value for name, value in state.items() if name in index}
    optimizer.load_state_dict({"state": values, "param_groups": settings})


class _Stored:
    """What a checkpoint folder holds, read in parts."""

    def __init__(self, folder: Path) -> None:
        self._reader = dcp.FileSystemReader(folder / STATE_FOLDER)
        self.kinds = self._reader.read_metadata().state_dict_metadata

    def keys_of(self, number: int, names: set[str]) -> dict[tuple[str, str], str]:
        """Paths of what optimizer `number` keeps of parameters, by (parameter, key)."""
        found = {}
        prefix = f"{_STATE}{number}/"
        for path in self.kinds:
            if path.startswith(prefix):
                name, _, key = path.removeprefix(prefix).rpartition("/")
                if name in names:
                    found[name, key] = path
        return found

    def read(self, paths: Any) -> dict[str, Any]:
        """Read by path, onto the CPU."""
        into: dict[str, Any] = {}
        for path in paths:
            kind = self.kinds[path]
            if isinstance(kind, TensorStorageMetadata):
                into[path] = torch.empty(kind.size, dtype=kind.properties.dtype)
            else:
                into[path] = None
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _no_warning():
            dcp.load(into, storage_reader=self._reader, no_dist=True, planner=planner)
        return into


@contextlib.contextmanager
def _no_warning() -> Iterator[None]:
    """Keep quiet that one process reads or writes alone, which is what is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
