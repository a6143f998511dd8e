"""What SPPO does not combine with, refused by name before the first step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, DynamoBackend

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.rules import count, show

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments

_FORBIDDEN_SIZES = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
}
_ALLOWED_TYPES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)
_TRL_IN_PIPELINE = ("SFT", "DPO", "KTO")
"""Trainers of TRL whose losses need nothing but log-probabilities of labels."""
_SEVERAL = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_ALLOWED_WORDS = "one process, DDP, or FSDP2"
COMPILED_PARTS = "SPPOPlugin(compile=True) compiles what holds no attention"
"""What works in place of compiling the model."""


def refuse_sizes(given: Mapping[str, object]) -> None:
    """Refuse parallel sizes that are none, and those that would cut what SPPO needs whole.

    Of fields of Accelerate's `ParallelismConfig` that are missing or None, Accelerate takes the
    environment's.

    Raises:
        ConfigError: A size is no whole number of at least 1, or a tensor or context parallel size
            is above 1.
    """
    for axis in ("dp_replicate", "dp_shard", *_FORBIDDEN_SIZES):
        field, variable = f"{axis}_size", f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"
        size = given.get(field)
        if size is None and variable in os.environ:
            field, size = variable, _number(os.environ[variable])
        if size is None:
            continue
        if axis in _FORBIDDEN_SIZES and isinstance(size, int) and size > 1:
            raise ConfigError(
                f"{field}={show(size)} asks for {_FORBIDDEN_SIZES[axis]}, which SPPO does not "
                "combine with: it cuts sequences and layers itself. Allowed: dp_shard_size and "
                f"dp_replicate_size, sp_size and pp_size. Remedy: drop {axis}_size (also "
                f"{variable} in the environment)."
            )
        count(1)(field, size)


def environment_sp_size() -> int | str:
    """The size that an accelerate launch gives in the environment; 1 where none is."""
    return _number(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1"))


def _number(text: str) -> int | str:
    """The number that a text is; the text itself if it is none, for a message."""
    return int(text) if re.fullmatch(r"\s*[0-9]{1,9}\s*", text) else text


def refuse_accelerator(accelerator: Accelerator) -> None:
    """Refuse launch modes that SPPO is not exact or not tested in.

    Raises:
        ConfigError: The Accelerator runs DeepSpeed, Megatron-LM, FSDP version 1, FSDP's activation
            checkpointing, torch.compile, or on a kind of device that is not supported.
    """
    kind = accelerator.distributed_type
    if kind not in _ALLOWED_TYPES:
        _refuse(f"The Accelerator runs {kind.value}", "launch with one of these instead")
    if kind == DistributedType.FSDP:
        if not accelerator.is_fsdp2:
            _refuse(
                "The Accelerator runs FSDP version 1",
                "set fsdp_version: 2 (TrainingArguments: fsdp_config={'version': 2})",
            )
        fsdp: Any = accelerator.state.fsdp_plugin
        if fsdp.activation_checkpointing:
            _refuse(
                "FSDP's activation_checkpointing is on, and SPPO recomputes by itself",
                "switch fsdp_activation_checkpointing off and set SPPO's recompute instead",
            )
    dynamo: Any = accelerator.state.dynamo_plugin
    backend = dynamo.backend
    if backend != DynamoBackend.NO:
        _refuse(
            f"torch.compile is on (dynamo backend {backend.value})",
            "drop torch_compile (TrainingArguments) or dynamo_backend (Accelerate); instead, "
            f"{COMPILED_PARTS}",
        )


def refuse_host_weights(accelerator: Accelerator, config: SPPOConfig) -> None:
    """Refuse weights or an optimizer on the host where several processes or a scaler need them.

    Raises:
        ConfigError: `weights` or `optimizer` is "host", and the Accelerator runs several processes
            or trains in fp16.
    """
    places = [
        f"{name}='host'" for name in ("weights", "optimizer") if getattr(config, name) == "host"
    ]
    if not places:
        return
    seen = " and ".join(places)
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"{seen} with {accelerator.num_processes} processes: gradients would leave for the "
            "host before they are reduced. Allowed: one process. Remedy: shard weights and "
            "optimizer over the GPUs with FSDP2 instead, which needs less of each."
        )
    if accelerator.mixed_precision == "fp16":
        raise ConfigError(
            f"{seen} with mixed_precision='fp16', whose gradient scaler works on the device alone. "
            "Allowed: 'bf16' or 'no'. Remedy: bf16=True, or load the model in bfloat16."
        )


_ON_DEVICE_ALONE = (
    "bitsandbytes",
    "apex",
    "torchao",
    "transformer_engine",
    "deepspeed.ops.adam.fused",
)


def move_if_it_fits(
    move: Callable[[Any, Any], object], model: torch.nn.Module, device: Any
) -> None:
    """Move a model to a GPU unless its weights alone are more than that holds.

    What is too large is put on the host when it is prepared, if it may rest there.
    """
    device = torch.device(device)
    if device.type == "cuda":
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        if held > torch.cuda.mem_get_info(device)[1]:
            return
    move(model, device)


_STATES: dict[str, float] = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), 2.0),
    **{"Adagrad": 1.0, "Adafactor": 0.0},
}
"""What torch's optimizers keep of each parameter, in sizes of the parameter."""


def states_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """What an optimizer keeps once it has made a step; None of one that is not known."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return None
    total = 0.0
    for group in optimizer.param_groups:
        share = _STATES.get(kind.__name__)
        if kind.__name__ == "SGD":
            share = float(bool(group["momentum"]))
        if share is None:
            return None
        share += bool(group.get("amsgrad"))
        total += share * sum(parameter.nbytes for parameter in group["params"])
    return int(total)


def why_on_device(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> str:
    """Why weights that an optimizer updates cannot rest on the host; "" where they can.

    For settings that leave it open: what `refuse_host_weights` refuses, and besides optimizers of
    which it is not known what they keep.
    """
    if accelerator.num_processes > 1:
        return f"{accelerator.num_processes} processes reduce gradients on their devices"
    if accelerator.mixed_precision == "fp16":
        return "the gradient scaler of mixed_precision='fp16' works there alone"
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__name__}"
    if _on_device_alone(optimizer):
        return f"{name} works on a GPU alone"
    if states_bytes(optimizer) is None:
        return f"it is not known what {name} keeps (optimizer='host' puts it on the host)"
    return ""


def use_fused_kernel(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's Adam and AdamW update host memory with their fused kernel, unless told otherwise.

    It passes over memory once, where the default goes over each parameter about ten times. Others,
    DeepSpeed's CPUAdam among them, have a kernel of their own, or none.
    """
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        for group in optimizer.param_groups:
            said = (group.get(name) for name in ("fused", "foreach"))
            bound = group.get("differentiable") or group.get("capturable")
            usual = all(p.device.type == "cpu" and p.is_floating_point() for p in group["params"])
            if all(value is None for value in said) and usual and not bound:
                group["fused"] = True


def _on_device_alone(optimizer: torch.optim.Optimizer) -> bool:
    capturable = any(group.get("capturable") for group in optimizer.param_groups)
    return capturable or type(optimizer).__module__.startswith(_ON_DEVICE_ALONE)


def refuse_device_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot work in host memory.

    Raises:
        ConfigError: Its kernels are for GPUs alone, or it was told to be capturable.
    """
    if _on_device_alone(optimizer):
        kind = type(optimizer)
        capturable = any(group.get("capturable") for group in optimizer.param_groups)
        why = "capturable=True" if capturable else f"{kind.__module__}.{kind.__name__}"
        raise ConfigError(
            f"The optimizer cannot live on the host: {why} works on a GPU alone. Allowed with "
            "optimizer='host': torch's optimizers (optim='adamw_torch_fused' is the fastest) and "
            "DeepSpeed's CPUAdam. Remedy: choose one of these, or optimizer='device'."
        )


def refuse_arguments(args: TrainingArguments) -> None:
    """Refuse a Trainer that would bypass the Accelerator.

    Raises:
        ConfigError: Several GPUs are visible to one process, for which the Trainer takes
            `nn.DataParallel`.
    """
    if args.n_gpu > 1:
        _refuse(
            f"One process sees {args.n_gpu} GPUs, for which the Trainer would use nn.DataParallel",
            "start with `accelerate launch` or `torchrun`, or export CUDA_VISIBLE_DEVICES=0",
        )


def refuse_for_pipeline(accelerator: Accelerator, pp_size: int) -> None:
    """Refuse launches in which a pipeline cannot run.

    Raises:
        ConfigError: One process, or FSDP.
    """
    kind = accelerator.distributed_type
    if kind not in _SEVERAL:
        raise ConfigError(
            f"pp_size={pp_size} and the Accelerator runs {kind.value}. Allowed: several processes "
            "without FSDP (data-parallel replicas of the pipeline replicate). Remedy: accelerate "
            f"launch --multi_gpu --num_processes {pp_size} (or a multiple), without --use_fsdp; on "
            f"CPUs torchrun --nproc_per_node {pp_size} and use_cpu=True in TrainingArguments."
        )


def refuse_for_shared_sequences(accelerator: Accelerator, sp_size: int) -> None:
    """Refuse launches in which no ranks can share a sequence.

    Raises:
        ConfigError: One process.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        raise ConfigError(
            f"sp_size={sp_size} and the Accelerator runs a single process. Allowed: sp_size "
            "processes or a multiple, with DDP or FSDP2. Remedy: accelerate launch --multi_gpu "
            f"--num_processes {sp_size}; on CPUs torchrun --nproc_per_node {sp_size} and "
            "use_cpu=True in TrainingArguments."
        )


def refuse_for_sharing_ranks(args: TrainingArguments, config: SPPOConfig) -> None:
    """Refuse what the Trainer cannot do over ranks that share batches.

    Raises:
        ConfigError: Batch sizes are to be searched, tokens counted by gathering over all ranks, or
            TRL is to generate or to read logits.
    """
    name = "pp_size" if config.pp_size > 1 else "sp_size"
    size = config.pp_size * config.sp_size
    trl = [kind.__name__ for kind in type(args).__mro__ if kind.__module__.startswith("trl.")]
    if trl and not any(f"{name}Config" in trl for name in _TRL_IN_PIPELINE):
        trainer = trl[0].removesuffix("Config") + "Trainer"
        raise ConfigError(
            f"TRL's {trainer} generates text or reads logits of whole sequences while it trains, "
            f"which ranks that share batches ({name}={size}) cannot do. Allowed with {name} > 1: "
            f"{', '.join(f'{trl}Trainer' for trl in _TRL_IN_PIPELINE)}. Remedy: {trainer} with "
            f"{name}=1."
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


def _refuse(seen: str, remedy: str) -> None:
    raise ConfigError(f"{seen}. Allowed with SPPO: {_ALLOWED_WORDS}. Remedy: {remedy}.")
