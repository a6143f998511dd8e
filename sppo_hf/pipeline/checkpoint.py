"""Checkpoints of a cut model: the context that every save runs in, and the weights.

`saving` marks a folder as incomplete before any rank writes, and as complete when all have
written. Weights are written as an ordinary Hugging Face folder: each rank of the first replica
writes the tensors it holds as safetensors shards, named and laid out as `save_pretrained` would
(experts that are fused in memory but saved one by one, tied weights once), and the first rank adds
index and configuration. Reading is by name, so the number of ranks that wrote does not matter. PEFT
adapters are small: the first rank gathers them and PEFT writes its one file. Optimizers are in
`checkpoint_state`.

[Note: weights are moved into place]
Shards are written into a staging folder inside the checkpoint's, on the same file system, and moved
when all are written. Until then the folder's former weights are whole.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch import distributed as dist
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.model_parts import find_causal_lm
from sppo_hf.errors import ConfigError, PipelineError
from sppo_hf.pipeline.agreement import gather, make_on_all_ranks
from sppo_hf.pipeline.checkpoint_files import (
    Digest,
    TensorFiles,
    find_damage,
    mark_complete,
    mark_incomplete,
    read_json,
    reading,
    refuse_other_files,
    write_tensors,
    writing,
)
from sppo_hf.pipeline.mesh import STORAGE_TIMEOUT, unbound_launch
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.watchdog import collective_section

STAGING = ".sppo-saving"
"""Staging folder inside a checkpoint's; see [Note: weights are moved into place]."""

_open: dict[Path, dict[str, Digest]] = {}
"""Folders that are being saved, with digests (by name) of the files that this process wrote."""


@dataclass(frozen=True, slots=True)
class RankCoords:
    """Coordinates and groups of a process among those that save or load together."""

    pp_rank: int = 0
    dp_rank: int = 0
    pp_size: int = 1
    dp_size: int = 1
    world_group: Any = None
    """All processes, on the CPU; None where there is one process."""
    pp_group: Any = None
    """This pipeline's ranks, on the CPU; None where there is one process."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all processes, which writes what is written once."""
        return self.pp_rank == 0 and self.dp_rank == 0

    @property
    def writes_weights(self) -> bool:
        """Whether this process is of the first replica, which writes the weights."""
        return self.dp_rank == 0

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_group is not None:
            dist.barrier(group=self.world_group)

    def gather(self, value: Any) -> list[Any]:
        """Gather small objects over this pipeline; returns them by pipeline rank, on all of it."""
        return list(gather(value, self.pp_group).values())

    def gather_all(self, value: Any) -> list[Any]:
        """Gather small objects over all processes; returns them by rank, on all of them."""
        return list(gather(value, self.world_group).values())


def rank_coords_of(model: nn.Module) -> RankCoords:
    """Return this process's coordinates in saves and loads of `model`; every process calls this."""
    engine = get_engine(model)
    if not isinstance(engine, PipelineEngine):
        return RankCoords()
    mesh = engine.mesh
    # Ranks that share a sequence hold the same stages, as replicas do.
    return RankCoords(
        mesh.pp_rank,
        mesh.dp_rank * mesh.sp_size + mesh.sp_rank,
        mesh.pp_size,
        mesh.dp_size * mesh.sp_size,
        world_group=_world_group(dist.group.WORLD),
        pp_group=mesh.storage_group,
    )


@functools.cache
def _world_group(world: Any) -> Any:
    """Form a group of all processes of `world`, on the CPU, for numbers and names."""
    # Ranks write different amounts: the first to finish may wait long for the last.
    with unbound_launch():
        return dist.new_group(backend="gloo", timeout=STORAGE_TIMEOUT)


def find_damage_together(folder: Path) -> str | None:
    """Call `find_damage` with the files divided among all processes; every process calls this.

    Raises:
        ConfigError: The checkpoint was written in a later format.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return find_damage(folder)
    share = dist.get_rank(), dist.get_world_size()
    _, found = make_on_all_ranks(
        lambda: find_damage(folder, share=share),
        _world_group(dist.group.WORLD),
        share=lambda damage: damage,
    )
    return next((damage for damage in found if damage is not None), None)


@contextlib.contextmanager
def saving(folder: str | Path, place: RankCoords) -> Iterator[Path]:
    """Context of a save: marks `folder` as incomplete, and as complete when all ranks leave it.

    Every process enters this; entered again inside, for the same folder, it does nothing. The
    folder is on a file system that all ranks see.

    Raises:
        PipelineError: The ranks do not see the same folder, or the disk refused to write.
        RankLostError: Another rank was lost.
    """
    folder = Path(folder).absolute()
    if folder in _open:
        yield folder
        return
    digests = _open.setdefault(folder, {})
    try:
        with collective_section(f"saving {folder.name}"), writing(folder):
            existing = mark_incomplete(folder) if place.is_first else {}
            place.barrier()
            if not folder.is_dir():
                raise PipelineError(
                    f"Rank {place.pp_rank} of replica {place.dp_rank} does not see "
                    f"{str(folder)!r}, which rank 0 has made. Allowed: folders on a file system "
                    "that all nodes share, because ranks write one checkpoint together. Remedy: "
                    "another output_dir."
                )
            yield folder
            written = place.gather_all(digests)
            if place.is_first:
                layout = {"pp_size": place.pp_size, "dp_size": place.dp_size}
                found = {name: digest for part in written for name, digest in part.items()}
                mark_complete(folder, {"layout": layout}, existing=existing, digests=found)
            place.barrier()
    finally:
        del _open[folder]


def write_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file, inside `saving`, and keep its digest for the mark.

    Raises:
        ConfigError: A tensor is of a kind that safetensors files cannot hold.
        PipelineError: The file could not be written.
    """
    digest = write_tensors(tensors, path)
    for folder, digests in _open.items():
        if path.absolute().is_relative_to(folder):
            parts = path.absolute().relative_to(folder).parts
            digests["/".join(part for part in parts if part != STAGING)] = digest


# -- weights --------------------------------------------------------------------------------

_FILE = "adapter_model.safetensors"


def wraps_adapters(model: nn.Module) -> bool:
    """Whether `model` is a PEFT model, of which only the adapters are saved."""
    with contextlib.suppress(ImportError):
        from peft import PeftModel

        return isinstance(model, PeftModel)
    return False


def save_adapters(model: Any, folder: Path, place: RankCoords) -> None:
    """Write all adapters so that `PeftModel.from_pretrained` loads them.

    Every rank of the pipeline calls this. The folder exists; adapters with another name than
    "default" get folders in it, as in PEFT.
    """
    from peft import get_peft_model_state_dict

    own: dict[str, dict[str, Tensor]] = {}
    for name in model.peft_config:
        state = get_peft_model_state_dict(model, model.state_dict(), adapter_name=name)
        own[name] = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    parts = place.gather(own)
    if not place.is_first:
        return
    # PEFT writes configurations and card; its tensors, of this stage only, are overwritten.
    type(model).save_pretrained(model, folder)
    for name in model.peft_config:
        whole = {key: value for part in parts for key, value in part[name].items()}
        write_file(whole, _folder_of(folder, name) / _FILE)


def load_adapters(model: Any, folder: Path) -> None:
    """Read the adapters' tensors that this process holds, in place.

    Raises:
        ConfigError: An adapter, or a tensor of it, is not in the folder, or its file is damaged.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    same = (
        "Allowed: checkpoints of a model with the same adapters. Remedy: build the model with the "
        "adapters that were saved."
    )
    for name in model.peft_config:
        file = _folder_of(folder, name) / _FILE
        if not file.is_file():
            raise ConfigError(
                f"{str(file)!r} is missing, so the adapter {name!r} cannot be read. {same}"
            )
        with reading(file):
            refuse_other_files(file)
            saved = load_file(file)
        own = set(get_peft_model_state_dict(model, model.state_dict(), adapter_name=name))
        if missing := sorted(own - set(saved)):
            raise ConfigError(
                f"{str(file)!r} lacks {len(missing)} tensors that this rank holds, among them "
                f"{missing[:3]}. {same}"
            )
        with reading(file):
            set_peft_model_state_dict(model, {key: saved[key] for key in own}, adapter_name=name)


def _folder_of(folder: Path, adapter: str) -> Path:
    return folder if adapter == "default" else folder / adapter


MAX_SHARD_SIZE = "50GB"
"""Default of `save_pretrained`."""

_WEIGHTS = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def save_weights(
    model: nn.Module, folder: str | Path, *, max_shard_size: int | str = MAX_SHARD_SIZE
) -> None:
    """Write a cut model, or its adapters, so that plain `from_pretrained` loads the folder.

    Every process of the launch calls this. The folder is on a file system that all ranks see;
    former weights in it are replaced. A file has at most `max_shard_size` bytes, as a number or
    with a unit ("5GB"); a larger tensor gets a file of its own.

    Raises:
        PipelineError: The ranks do not see the same folder.
        ConfigError: The model is quantized and has no adapters.
    """
    place = rank_coords_of(model)
    with saving(folder, place) as target:
        staging = target / STAGING
        if place.is_first:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
        place.barrier()
        if place.writes_weights:
            if wraps_adapters(model):
                save_adapters(model, staging, place)
            else:
                _write_shards(model, staging, place, max_shard_size)
        place.barrier()
        if place.is_first:
            _move_into_place(staging, target)
        place.barrier()


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Read the tensors that this process holds, in place, of a folder of safetensors.

    The model is whole or cut, bare or in PEFT; `save_weights` or `save_pretrained` wrote it.

    Raises:
        ConfigError: The folder lacks weights, they have other shapes, or a file is damaged.
    """
    folder = Path(folder)
    if wraps_adapters(model):
        load_adapters(model, folder)
        return
    causal_lm = find_causal_lm(model)
    own = causal_lm.state_dict()
    unread = set(own) - set(causal_lm._keys_to_ignore_on_save or ())
    files = _files_by_name(folder)
    changes: list[WeightTransform] = get_model_conversion_mapping(causal_lm)
    renamings = [entry for entry in changes if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in changes if isinstance(entry, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    mappings: dict[str, Any] = {}
    readers = TensorFiles(folder)
    # Converters stack what they are given in the order in which it comes.
    for name in sorted(files, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, causal_lm.base_model_prefix, own
        )
        if target not in own and name in own:
            target, pattern = name, None
        if target not in own:
            continue
        fresh = deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(name, target)
        mapping = mappings.setdefault(target, fresh)
        mapping.add_tensor(
            target, name, pattern or name, functools.partial(readers.read, files[name], name)
        )
    for first, mapping in mappings.items():
        with reading(folder):
            converted = mapping.convert(first, model=causal_lm, config=causal_lm.config)
        for target, value in converted.items():
            _copy(own, target, value[0] if isinstance(value, list) else value, folder)
            unread.discard(target)
    filled = {own[name].data_ptr() for name in set(own) - unread}
    missing = sorted(name for name in unread if own[name].data_ptr() not in filled)
    if missing:
        raise ConfigError(
            f"{str(folder)!r} lacks {len(missing)} of the {len(own)} tensors that this rank holds, "
            f"among them {missing[:3]}. Allowed: checkpoints of the same model. Remedy: resume "
            "from a checkpoint of this model, or start it from this folder by from_pretrained."
        )


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the full state dict on the first rank, on the CPU, and an empty one on all others.

    Every process calls this. The first rank needs host memory for the whole model.
    """
    place = rank_coords_of(model)
    own = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    if not place.writes_weights:
        return {}
    ties = _names_by_storage(own)
    held = place.gather(
        {first: (names, own[first].dtype, own[first].shape) for first, names in ties.items()}
    )
    whole: dict[str, Any] = {}
    for rank, described in enumerate(held):
        for first, (names, dtype, shape) in described.items():
            if first not in whole:
                value = own[first].cpu().contiguous() if rank == place.pp_rank else None
                value = _send_to_first(value, dtype, shape, rank, place)
                whole[first] = value if place.is_first else None
            whole |= dict.fromkeys(names, whole[first])
    return whole if place.is_first else {}


# -- writing ---------------------------------------------------------------------------------


def _write_shards(
    model: nn.Module, staging: Path, place: RankCoords, max_shard_size: int | str
) -> None:
    causal_lm = find_causal_lm(model)
    if getattr(causal_lm, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"{type(causal_lm).__name__} is quantized and has no adapters, so there is nothing to "
            "save that was trained. Remedy: train adapters (PEFT); they are saved by themselves."
        )
    state = causal_lm.state_dict()
    for name in causal_lm._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, causal_lm)
    others = names_written_elsewhere(causal_lm)
    parameters = sum(p.numel() for name, p in causal_lm.named_parameters() if name not in others)
    state = {name: tensor for name, tensor in state.items() if name not in others}
    state = revert_weight_conversion(causal_lm, state)  # as they are saved
    pattern = SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors")
    split = split_torch_state_dict_into_shards(
        state, filename_pattern=pattern, max_shard_size=max_shard_size
    )
    counts = place.gather(len(split.filename_to_tensors))
    weight_map = {}
    for number, names in enumerate(
        split.filename_to_tensors.values(), sum(counts[: place.pp_rank])
    ):
        file = f"model-{number + 1:05d}-of-{sum(counts):05d}.safetensors"
        file = SAFE_WEIGHTS_NAME if sum(counts) == 1 else file
        shard = {name: state.pop(name).contiguous() for name in names}
        write_file(shard, staging / file)
        weight_map |= dict.fromkeys(names, file)
    size = split.metadata["total_size"]
    written = place.gather((weight_map, size, parameters))
    if not place.is_first:
        return
    # What `save_pretrained` writes beside the weights.
    causal_lm.config.dtype = str(causal_lm.dtype).split(".")[1]
    causal_lm.config.architectures = [type(causal_lm).__name__]
    causal_lm.config.save_pretrained(staging)
    if causal_lm.can_generate():
        causal_lm.generation_config.save_pretrained(staging)
    if sum(counts) > 1:
        index = {
            "metadata": {
                "total_parameters": sum(n for _, _, n in written),
                "total_size": sum(n for _, n, _ in written),
            },
            "weight_map": {name: file for names, _, _ in written for name, file in names.items()},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (staging / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def names_written_elsewhere(model: nn.Module) -> frozenset[str]:
    """Return the names of this rank's tied parameters that the first stage's rank writes."""
    engine = get_engine(model)
    if isinstance(engine, PipelineEngine) and not engine.staged.cut.has_first:
        return engine.staged.shared_names
    return frozenset()


def _move_into_place(staging: Path, target: Path) -> None:
    staged = {str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file()}
    weights = {name for name in staged if name.endswith(".safetensors")}
    index = staging / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if listed != weights:
            raise PipelineError(
                f"Of the {len(listed)} files that the ranks wrote for {str(target)!r}, rank 0 sees "
                f"{len(weights)}. Allowed: folders on a file system that all nodes share, because "
                "ranks write one checkpoint together. Remedy: another output_dir."
            )
    for path in target.iterdir():
        if _WEIGHTS.fullmatch(path.name) and path.name not in staged:
            path.unlink()
    # The index comes last: the files that it lists are there.
    for name in sorted(staged, key=lambda name: name == SAFE_WEIGHTS_INDEX_NAME):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(target / name)
    shutil.rmtree(staging)


def _names_by_storage(state: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names that each tensor has, by the first of them."""
    first_names: dict[tuple[int, torch.Size], str] = {}
    ties: dict[str, list[str]] = {}
    for name, tensor in state.items():
        first = first_names.setdefault((tensor.data_ptr(), tensor.shape), name)
        # Tensors without elements all lie at address 0.
        first = first if tensor.numel() else name
        ties.setdefault(first, []).append(name)
    return ties


def _send_to_first(
    value: Tensor | None, dtype: torch.dtype, shape: torch.Size, rank: int, place: RankCoords
) -> Tensor | None:
    """Send a tensor of `rank` to the first rank of the pipeline."""
    if rank == 0:
        return value
    group = place.pp_group
    if place.pp_rank == rank:
        assert value is not None, "the rank that holds a tensor sends it"
        dist.send(value.view(-1).view(torch.uint8), group=group, group_dst=0)
    elif place.pp_rank == 0:
        value = torch.empty(shape, dtype=dtype, device="cpu")
        dist.recv(value.view(-1).view(torch.uint8), group=group, group_src=rank)
    return value


# -- reading ---------------------------------------------------------------------------------


def _files_by_name(folder: Path) -> dict[str, str]:
    """Return the name of the file that each tensor of a folder is in."""
    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(
                f"{str(index)!r} has no weight_map. Allowed: files as they were saved. Remedy: it "
                "is damaged; resume from another checkpoint."
            )
        return {str(name): str(file) for name, file in weight_map.items()}
    if single.is_file():
        with reading(single), safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SAFE_WEIGHTS_NAME)
    raise ConfigError(
        f"{str(folder)!r} holds neither {SAFE_WEIGHTS_INDEX_NAME} nor {SAFE_WEIGHTS_NAME}. "
        "Allowed: folders with weights in safetensors. Remedy: name a checkpoint-N folder of the "
        "run."
    )


@torch.no_grad()
def _copy(own: Mapping[str, Tensor], name: str, value: Tensor, folder: Path) -> None:
    if name not in own:
        return
    if own[name].shape != value.shape:
        raise ConfigError(
            f"{name} has shape {list(value.shape)} in {str(folder)!r} and {list(own[name].shape)} "
            "in the model. Allowed: checkpoints of the same model. Remedy: build the model from "
            "the checkpoint's configuration."
        )
    own[name].copy_(value)
