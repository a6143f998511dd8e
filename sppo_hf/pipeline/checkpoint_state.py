"""Optimizer, scheduler and random state of a run, as safetensors files and a JSON index.

    sppo_optimizer/index.json               settings, numbers, and the file of each tensor
    sppo_optimizer/rank-0-1.safetensors     tensors that replica 0, stage 1 wrote

Optimizer state is stored under the *name* of its parameter. Each rank saves the state of its own
parameters, and replicas divide the work. When resuming, each rank loads by name the state of the
parameters that it then holds, also with another number of stages or replicas or in one process.
Saving needs host memory for one more tensor; loading needs it for the state that this process
holds.

Optimizers whose tensors are sharded (FSDP) or of a subclass of Tensor are refused.

[Note: random state of another layout]
Every process saves the state of its random generators. A process that resumes loads the state of
the same stage and replica; if there was none, that of its replica's first rank; if there was none,
that of the very first rank. So resuming with the same layout continues the same random numbers, and
resuming with another layout gives the same numbers every time.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.model_parts import find_causal_lm
from sppo_hf.errors import ConfigError
from sppo_hf.pipeline.checkpoint import (
    RankCoords,
    names_written_elsewhere,
    rank_coords_of,
    write_file,
)
from sppo_hf.pipeline.checkpoint_files import (
    MARK_NAME,
    STATE_FOLDER,
    TensorFiles,
    decode,
    encode,
    read_json,
    reading,
    write_json,
)
from sppo_hf.pipeline.pipeline_engine import PipelineEngine

_INDEX = "index.json"
_FORMER_INDEX = ".metadata"

Groups = list[dict[str, Any]]
"""Parameter groups of an optimizer: settings, and under "names" the names of the parameters."""


def save_state(
    folder: str | Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    schedulers: list[Any],
) -> None:
    """Write optimizers, schedulers and random state into a checkpoint folder.

    Every process calls this, within `checkpoint.saving`. All ranks must have the same schedulers
    and, in the same order, optimizers with the same groups, for parameters of `model`.

    Raises:
        ConfigError: An optimizer steps a tensor that is not a parameter of the model, or the state
            of an optimizer or scheduler contains an object that could only be stored as code.
        PipelineError: A file could not be written.
    """
    place = rank_coords_of(model)
    target = Path(folder) / STATE_FOLDER
    names = _parameter_names(model)
    file = f"rank-{place.dp_rank}-{place.pp_rank}.safetensors"
    tensors: dict[str, Tensor] = {}

    def keep(path: str, tensor: Tensor) -> str:
        assert path not in tensors, f"{path} is stored twice"
        tensors[path] = tensor
        return file

    part: dict[str, Any] = {"optimizers": []}
    for number, optimizer in enumerate(map(unwrapped, optimizers)):
        groups = _full_groups(optimizer, names, model, place)
        held = {names[id(parameter)]: values for parameter, values in optimizer.state.items()}
        state = {
            name: encode(held[name], f"state/{number}/{name}", keep)
            for name in _names_to_write(held, model, place)
        }
        part["optimizers"].append({"state": state})
        if place.is_first:
            part["optimizers"][number]["groups"] = encode(groups, f"groups/{number}", keep)
    if place.is_first:
        states = [scheduler.state_dict() for scheduler in schedulers]
        part["schedulers"] = encode(states, "schedulers", keep)
    random_path = f"random/{place.dp_rank}/{place.pp_rank}"
    part["random"] = {random_path: encode(random_state(model), random_path, keep)}
    if place.is_first:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    place.barrier()
    write_file(tensors, target / file)
    parts = place.gather_all(part)
    if place.is_first:
        for other in parts:
            part["random"] |= other["random"]
            for own, others in zip(part["optimizers"], other["optimizers"], strict=True):
                own["state"] |= others["state"]
        write_json(part, target / _INDEX)


def has_state(folder: str | Path) -> bool:
    """Whether the folder has state for `load_state`, to be read instead of `optimizer.pt`."""
    target = Path(folder) / STATE_FOLDER
    if (target / _INDEX).is_file():
        return True
    return (target / _FORMER_INDEX).exists() and not (Path(folder) / "optimizer.pt").is_file()


def load_state(
    folder: str | Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    schedulers: list[Any],
) -> None:
    """Load the state that `save_state` wrote, for the parameters that this process holds.

    This is not a collective: each process reads by itself.

    Raises:
        ConfigError: The optimizers or their groups differ from the saved ones, or a file is
            damaged.
    """
    stored = _SavedState(Path(folder))
    names = _parameter_names(model)
    counts = (len(optimizers), len(schedulers))
    saved = (stored.count("optimizers"), stored.count("schedulers"))
    if saved != counts:
        raise ConfigError(
            f"{str(folder)!r} holds {saved[0]} optimizers and {saved[1]} schedulers, but the run "
            f"has {counts[0]} and {counts[1]}. Allowed: as many. Remedy: prepare the same "
            "optimizers and schedulers as when it was saved."
        )
    for number, optimizer in enumerate(map(unwrapped, optimizers)):
        ordered = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
        wanted = {name for group in ordered for name in group}
        with reading(stored.index):
            state, groups = stored.state(number, wanted), stored.groups(number)
            _load_by_name(optimizer, state, groups, ordered, folder)
    with reading(stored.index):
        for scheduler, value in zip(schedulers, stored.schedulers(), strict=True):
            _check_types(scheduler.state_dict(), value)
            if unknown := sorted(set(value) - set(scheduler.state_dict())):
                raise ConfigError(
                    f"A scheduler's state in {str(stored.index)!r} has {unknown[0]!r}, which this "
                    "run's has not. Allowed: the state of the same kind of scheduler. Remedy: "
                    "train with the lr_scheduler_type that it was saved with."
                )
            scheduler.load_state_dict(value)


def load_full_optimizer_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load a full optimizer state into an optimizer of a cut model; all ranks call this.

    `state` is the `state_dict()` of an optimizer of the whole model, with the same groups, whose
    parameters are in the model's order, as the Trainer makes them.

    Raises:
        ConfigError: The groups differ.
    """
    optimizer = unwrapped(optimizer)
    names = _parameter_names(model)
    whole = _full_groups(optimizer, names, model, rank_coords_of(model))
    saved = state["param_groups"]
    if [len(g["params"]) for g in saved] != [len(g["names"]) for g in whole]:
        raise ConfigError(
            f"The optimizer's state has groups of {[len(g['params']) for g in saved]} parameters, "
            f"but the run has {[len(g['names']) for g in whole]}. Allowed: the same groups. "
            "Remedy: train the same parameters, with the same weight decay, as when it was saved."
        )
    pairs = list(zip(saved, whole, strict=True))
    by_name = {
        name: state["state"][index]
        for saved_group, group in pairs
        for index, name in zip(saved_group["params"], group["names"], strict=True)
        if index in state["state"]
    }
    groups = [{**saved_group, "names": group["names"]} for saved_group, group in pairs]
    ordered = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
    _load_by_name(optimizer, by_name, groups, ordered, "optimizer.pt")


def read_full_state(folder: str | Path) -> tuple[dict[str, Any], list[Any]]:
    """Return the state that one process without SPPO would have saved; all of it is in memory.

    Returns:
        `state_dict()` of the first optimizer for the whole model, and those of all schedulers.

    Raises:
        ConfigError: A file is damaged.
    """
    stored = _SavedState(Path(folder))
    with reading(stored.index):
        groups, schedulers = stored.groups(0), stored.schedulers()
        order = [name for group in groups for name in group["names"]]
        state = stored.state(0, set(order))
    index = {name: position for position, name in enumerate(order)}
    plain = [
        {**{k: v for k, v in g.items() if k != "names"}, "params": [index[n] for n in g["names"]]}
        for g in groups
    ]
    by_number = {index[name]: values for name, values in state.items()}
    return {"state": dict(sorted(by_number.items())), "param_groups": plain}, schedulers


# -- random numbers ---------------------------------------------------------------------------


def random_state(model: nn.Module) -> dict[str, Any]:
    """Return the state of this process's generators; on CUDA, of the device that `model` is on."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state(_cuda_device(model))
    return state


def load_random_state(folder: str | Path, model: nn.Module) -> None:
    """Set this process's generators; see [Note: random state of another layout].

    Raises:
        ConfigError: A file is damaged.
    """
    place = rank_coords_of(model)
    stored = _SavedState(Path(folder))
    own = [(place.dp_rank, place.pp_rank), (place.dp_rank, 0), (0, 0)]
    with reading(stored.index):
        state = stored.random(own)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.random.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"], _cuda_device(model))


def _cuda_device(model: nn.Module) -> torch.device:
    """Return the CUDA device that `model` is on; the current one if it is on none or several."""
    devices = {parameter.device for parameter in model.parameters()}
    found = [device for device in devices if device.type == "cuda"]
    return found[0] if len(found) == 1 else torch.device("cuda")


# -- names and groups -------------------------------------------------------------------------


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside an Accelerator's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner  # type: ignore[no-any-return]


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in find_causal_lm(model).named_parameters()}


def _names_to_write(
    held: Mapping[str, Mapping[str, Any]], model: nn.Module, place: RankCoords
) -> list[str]:
    """Return the names of the parameters in `held` whose state this process writes."""

    def size(name: str) -> int:
        return sum(v.nbytes for v in held[name].values() if isinstance(v, Tensor))

    # Replicas hold the same state. They take turns from the largest parameter down, so that each
    # writes about as many bytes.
    own = sorted(set(held) - names_written_elsewhere(model), key=lambda name: (-size(name), name))
    return sorted(own[place.dp_rank :: place.dp_size])


def _full_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], model: nn.Module, place: RankCoords
) -> Groups:
    """Return the groups that an optimizer of the whole model would have."""
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
    all_names = names.values()
    if isinstance(engine, PipelineEngine):
        all_names = engine.staged.all_names
    position = {name: index for index, name in enumerate(all_names)}
    whole = []
    for number, group in enumerate(optimizer.param_groups):
        found = {name for part in place.gather(held[number]) for name in part}
        # In one process, groups keep their order of parameters.
        ordered = sorted(found, key=position.__getitem__) if place.pp_size > 1 else held[number]
        settings = {key: value for key, value in group.items() if key != "params"}
        whole.append({**settings, "names": ordered})
    return whole


def _load_by_name(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, dict[str, Any]],
    groups: Groups,
    ordered: list[list[str]],
    folder: str | Path,
) -> None:
    """Load state by parameter name, through the optimizer's own `load_state_dict`."""
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
    index = {name: at for at, name in enumerate(name for names in ordered for name in names)}
    settings = []
    for group, names, own in zip(groups, ordered, optimizer.param_groups, strict=True):
        saved = {k: v for k, v in group.items() if k not in ("names", "params")}
        _check_types(own, saved)
        # Settings that the saved optimizer did not have keep their current value.
        settings.append({**own, **saved, "params": [index[name] for name in names]})
    values = {index[name]: value for name, value in state.items() if name in index}
    optimizer.load_state_dict({"state": values, "param_groups": settings})


def _check_types(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse saved settings whose type differs from that of the run's."""
    compatible: list[Any] = [(bool, int, float, Tensor), (list, tuple)]
    for name, value in saved.items():
        current = own.get(name)
        types = next((types for types in compatible if isinstance(current, types)), type(current))
        if value is not None and current is not None and not isinstance(value, types):
            raise ValueError(f"{name} is {repr(value)[:40]} and {repr(current)[:40]} in this run")


class _SavedState:
    """Saved state of a checkpoint folder, read in parts, on the CPU.

    Methods are called within `reading`, as damaged files make them raise anything.

    Raises:
        ConfigError: A file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        target = folder / STATE_FOLDER
        self.index = target / _INDEX
        """Path of the index, which error messages name."""
        if not self.index.exists() and (target / _FORMER_INDEX).exists():
            raise ConfigError(
                f"{str(target)!r} is of a format that could run code when it is read, so this "
                "version does not read it. Allowed: checkpoints of format 2. Remedy: if you trust "
                "it, call export_optimizer(folder) in the version of sppo_hf that wrote it, once; "
                "this version then reads optimizer.pt. Or delete this folder, and scheduler.pt and "
                f"{MARK_NAME} beside it, to go on with the weights and a fresh optimizer."
            )
        self._about = read_json(self.index)
        self._files = TensorFiles(target)
        with reading(self.index):
            lists = [self._about["optimizers"], self._about["schedulers"]]
            fit = all(isinstance(value, list) for value in lists) and all(
                isinstance(self._about["optimizers"][number]["state"], dict)
                and isinstance(self._about["optimizers"][number]["groups"], list)
                for number in range(len(lists[0]))
            )
            if not fit or not isinstance(self._about["random"], dict):
                raise ValueError("it is no index of optimizers")

    def count(self, kind: str) -> int:
        """Return the number of "optimizers" or "schedulers"."""
        return len(self._about[kind])

    def _decode(self, stored: Any, path: str) -> Any:
        return decode(stored, path, self._files.read)

    def groups(self, number: int) -> Groups:
        groups = self._decode(self._about["optimizers"][number]["groups"], f"groups/{number}")
        for group in groups:
            names = group.get("names") if isinstance(group, dict) else None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"the groups of optimizer {number} are none")
        return groups

    def state(self, number: int, names: set[str]) -> dict[str, dict[str, Any]]:
        """Return an optimizer's state for the parameters `names`, by name."""
        stored = self._about["optimizers"][number]["state"]
        found = {
            name: self._decode(value, f"state/{number}/{name}")
            for name, value in stored.items()
            if name in names
        }
        if not all(isinstance(values, dict) for values in found.values()):
            raise ValueError(f"the state of optimizer {number} is none")
        return found

    def schedulers(self) -> list[dict[str, Any]]:
        states = self._decode(self._about["schedulers"], "schedulers")
        if not all(isinstance(state, dict) for state in states):
            raise ValueError("the states of the schedulers are none")
        return states

    def random(self, places: list[tuple[int, int]]) -> dict[str, Any]:
        """Return the random state of the first of these (replica, stage) that was saved."""
        paths = [f"random/{dp}/{pp}" for dp, pp in places]
        path = next(path for path in paths if path in self._about["random"])
        return self._decode(self._about["random"][path], path)
