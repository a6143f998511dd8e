"""Checks of launches and training arguments: what SPPO does not combine with raises before step 1.

Every message says what was seen, what is allowed, and what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, DynamoBackend
from packaging.version import Version

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.layouts import FSDP2_TORCH
from sppo_hf.rules import count, show

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments

_REFUSED_AXES = {"tp": "tensor parallelism", "cp": "context parallelism"}
"""Axes of `ParallelismConfig` that must have size 1."""

_SUPPORTED_TYPES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)

_TRL_TRAINERS_ON_SHARED_BATCHES = ("SFT", "DPO", "KTO")
"""Trainers of TRL whose losses need only the log-probabilities of the labels."""

_TRL_TRAINERS_OF_CLASSIFIERS = ("Reward",)
"""Trainers of TRL whose models are not cut into stages, but may share sequences."""

COMPILE_REMEDY = "SPPOPlugin(compile=True) compiles what holds no attention"
"""Advice to users who want torch.compile."""


def check_parallel_sizes(sizes: Mapping[str, object]) -> None:
    """Check the sizes given to a `ParallelismConfig`, and those it takes from the environment.

    Accelerate reads PARALLELISM_CONFIG_<AXIS>_SIZE for every size that is missing or None.

    Raises:
        ConfigError: A size is no whole number of at least 1, or a tensor or context parallel size
            is above 1.
    """
    for axis in ("dp_replicate", "dp_shard", *_REFUSED_AXES):
        field, variable = f"{axis}_size", f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"
        size = sizes.get(field)
        if size is None and variable in os.environ:
            field, size = variable, _parse_size(os.environ[variable])
        if size is None:
            continue
        if axis in _REFUSED_AXES and isinstance(size, int) and size > 1:
            raise ConfigError(
                f"{field}={show(size)} asks for {_REFUSED_AXES[axis]}, which SPPO does not "
                "combine with: it cuts sequences and layers itself. Allowed: dp_shard_size and "
                f"dp_replicate_size, sp_size and pp_size. Remedy: drop {axis}_size (also "
                f"{variable} in the environment)."
            )
        count(1)(field, size)


def sp_size_from_environment() -> int | str:
    """The sequence-parallel size of an `accelerate launch`; 1 where it sets none."""
    return _parse_size(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1"))


def _parse_size(text: str) -> int | str:
    """The whole number that a text says; else the text itself, which later checks show."""
    return int(text) if re.fullmatch(r"\s*[0-9]{1,9}\s*", text) else text


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse launch modes in which SPPO is not exact or not tested.

    Raises:
        ConfigError: The Accelerator runs DeepSpeed, Megatron-LM, FSDP version 1, FSDP2 under a
            PyTorch that is too old for it, FSDP's activation checkpointing, torch.compile or fp8,
            or on an unsupported kind of device.
    """
    kind = accelerator.distributed_type
    if kind not in _SUPPORTED_TYPES:
        raise _unsupported(f"The Accelerator runs {kind.value}", "launch with one of these instead")
    if kind == DistributedType.FSDP:
        if not accelerator.is_fsdp2:
            raise _unsupported(
                "The Accelerator runs FSDP version 1",
                "set fsdp_version: 2 (TrainingArguments: fsdp_config={'version': 2})",
            )
        fsdp_plugin: Any = accelerator.state.fsdp_plugin
        if fsdp_plugin.activation_checkpointing:
            raise _unsupported(
                "FSDP's activation_checkpointing is on, and SPPO recomputes by itself",
                "switch fsdp_activation_checkpointing off and set SPPO's recompute instead",
            )
        if Version(torch.__version__).release < FSDP2_TORCH:
            raise _unsupported(
                f"The Accelerator runs FSDP2 under PyTorch {torch.__version__}, which cannot run "
                "the final norm and the head, one unit of weights, a different number of times",
                "install PyTorch 2.13 or newer, or drop FSDP and set pp_size or use DDP",
            )
    dynamo_plugin: Any = accelerator.state.dynamo_plugin
    if dynamo_plugin.backend != DynamoBackend.NO:
        raise _unsupported(
            f"torch.compile is on (dynamo backend {dynamo_plugin.backend.value})",
            "drop torch_compile (TrainingArguments) or dynamo_backend (Accelerate); instead, "
            f"{COMPILE_REMEDY}",
        )

    if accelerator.mixed_precision == "fp8":
        # A tensor's scale comes from all of its tokens, which would be those of a chunk.
        raise ConfigError(
            "mixed_precision='fp8' scales tensors by their largest element, so a token's result "
            "would depend on the chunk that it is in. Allowed with SPPO: 'no', 'bf16' and 'fp16'. "
            "Remedy: mixed_precision='bf16'."
        )


def check_host_placement(accelerator: Accelerator, config: SPPOConfig) -> None:
    """Refuse weights or an optimizer on the host where gradients are needed on the device.

    Raises:
        ConfigError: `weights` or `optimizer` is "host", and the Accelerator runs several processes
            or trains in fp16.
    """
    on_host = [name for name in ("weights", "optimizer") if getattr(config, name) == "host"]
    if not on_host:
        return
    seen = " and ".join(f"{name}='host'" for name in on_host)
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"{seen} with {accelerator.num_processes} processes: gradients would go to the host "
            "before they are reduced. Allowed: one process. Remedy: shard weights and optimizer "
            "over the GPUs with FSDP2 instead, which needs less of each."
        )
    if accelerator.mixed_precision == "fp16":
        raise ConfigError(
            f"{seen} with mixed_precision='fp16', whose gradient scaler works on the device only. "
            "Allowed: 'bf16' or 'no'. Remedy: bf16=True, or load the model in bfloat16."
        )


def check_training_arguments(args: TrainingArguments) -> None:
    """Refuse a Trainer that would bypass the Accelerator.

    Raises:
        ConfigError: One process sees several GPUs, for which the Trainer uses `nn.DataParallel`.
    """
    if args.n_gpu > 1:
        raise _unsupported(
            f"One process sees {args.n_gpu} GPUs, for which the Trainer would use nn.DataParallel",
            "start with `accelerate launch` or `torchrun`, or export CUDA_VISIBLE_DEVICES=0",
        )


def check_shared_launch(accelerator: Accelerator, config: SPPOConfig) -> None:
    """Refuse a launch that cannot run a pipeline, or share sequences.

    Raises:
        ConfigError: It has one process, or a pipeline would use FSDP.
    """
    kind, pp_size, size = accelerator.distributed_type, config.pp_size, config.sharing_ranks
    seen = "a single process" if kind == DistributedType.NO else kind.value
    several = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if pp_size > 1 and kind not in several:
        raise ConfigError(
            f"pp_size={pp_size} and the Accelerator runs {seen}. Allowed: several processes "
            "without FSDP (data-parallel replicas of the pipeline replicate). Remedy: accelerate "
            f"launch --multi_gpu --num_processes {size} (or a multiple), without --use_fsdp; on "
            f"CPUs torchrun --nproc_per_node {size} and use_cpu=True in TrainingArguments."
        )
    if kind == DistributedType.NO:
        raise ConfigError(
            f"sp_size={size} and the Accelerator runs {seen}. Allowed: sp_size "
            "processes or a multiple, with DDP or FSDP2. Remedy: accelerate launch --multi_gpu "
            f"--num_processes {size}; on CPUs torchrun --nproc_per_node {size} and "
            "use_cpu=True in TrainingArguments."
        )


def check_shared_batches(args: TrainingArguments, config: SPPOConfig) -> None:
    """Refuse training arguments that do not work where several ranks get the same batches.

    Raises:
        ConfigError: The batch size is to be searched, tokens are counted by gathering over all
            ranks, embeddings get noise where ranks may share units, or a trainer of TRL would
            generate text or read logits.
    """
    name = "pp_size" if config.pp_size > 1 else "sp_size"
    size = config.sharing_ranks
    trl = [kind.__name__ for kind in type(args).__mro__ if kind.__module__.startswith("trl.")]
    allowed = _TRL_TRAINERS_ON_SHARED_BATCHES
    allowed += _TRL_TRAINERS_OF_CLASSIFIERS * (config.pp_size == 1)
    if trl and not any(f"{one}Config" in trl for one in allowed):
        trainer = trl[0].removesuffix("Config") + "Trainer"
        raise ConfigError(
            f"TRL's {trainer} generates text or reads outputs of whole sequences while it trains, "
            f"which ranks that share batches ({name}={size}) cannot do. Allowed with {name} > 1: "
            f"{', '.join(f'{one}Trainer' for one in allowed)}. Remedy: "
            f"{trainer} with {name}=1."
        )
    if config.pp_size > 1 and args.neftune_noise_alpha and config.pp_msp != "off":
        raise ConfigError(
            f"neftune_noise_alpha={args.neftune_noise_alpha} with pp_msp={config.pp_msp!r}: ranks "
            "that share units may embed tokens without the hook that adds the noise. Allowed: "
            "pp_msp='off'. Remedy: pp_msp='off', or drop neftune_noise_alpha."
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            f"auto_find_batch_size=True with {name}={size}: one rank that runs out of memory "
            "ends the others, so nothing can be tried again. Allowed: False. Remedy: `sppo plan "
            "MODEL --gpus N` says what fits; set per_device_train_batch_size."
        )
    if args.include_num_input_tokens_seen not in (False, None, "no"):
        raise ConfigError(
            f"include_num_input_tokens_seen={args.include_num_input_tokens_seen!r} with {name}="
            f"{size} would count every token {size} times. Allowed: 'no'. Remedy: drop it; "
            "sppo/tokens_per_second counts each once."
        )


def _unsupported(seen: str, remedy: str) -> ConfigError:
    return ConfigError(f"{seen}. Allowed with SPPO: one process, DDP, or FSDP2. Remedy: {remedy}.")
