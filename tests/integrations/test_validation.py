"""Combinations that SPPO refuses, and that each refusal names what was seen and the remedy."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, DynamoBackend
from transformers import TrainingArguments

from sppo_hf import ConfigError, SPPOConfig
from sppo_hf.integrations.validation import (
    check_accelerator,
    check_parallel_sizes,
    check_shared_batches,
    check_shared_launch,
    check_training_arguments,
)


def _accelerator(
    kind: DistributedType,
    *,
    version: int = 2,
    checkpointing: bool = False,
    dynamo: str = "NO",
    precision: str = "bf16",
) -> SimpleNamespace:
    """Stand in for Accelerators that cannot be made on this machine."""
    state = SimpleNamespace(
        fsdp_plugin=SimpleNamespace(activation_checkpointing=checkpointing),
        dynamo_plugin=SimpleNamespace(backend=DynamoBackend(dynamo)),
    )
    fsdp2 = kind == DistributedType.FSDP and version == 2
    return SimpleNamespace(
        distributed_type=kind, is_fsdp2=fsdp2, state=state, mixed_precision=precision
    )


@pytest.mark.parametrize(
    "kind",
    [
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
        DistributedType.FSDP,
    ],
)
def test_supported_launch_types_are_accepted(kind, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0a0+1234567")
    assert check_accelerator(_accelerator(kind)) is None  # raises for those below


@pytest.mark.parametrize(
    "kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA]
)
def test_other_engines_are_refused_by_name(kind):
    with pytest.raises(ConfigError, match=rf"{kind.value}.*DDP, or FSDP2.*Remedy"):
        check_accelerator(_accelerator(kind))


@pytest.mark.parametrize(
    ("sizes", "processes"),
    [({"pp_size": 2}, 2), ({"sp_size": 2}, 2), ({"pp_size": 2, "sp_size": 3}, 6)],
)
def test_a_single_process_is_told_how_many_share_a_batch(sizes, processes):
    with pytest.raises(ConfigError, match=rf"--num_processes {processes}\b.*node {processes} "):
        check_shared_launch(_accelerator(DistributedType.NO), SPPOConfig(**sizes))


def test_fsdp_version_one_is_refused():
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        check_accelerator(_accelerator(DistributedType.FSDP, version=1))


def test_checkpointing_by_fsdp_is_refused():
    with pytest.raises(ConfigError, match="fsdp_activation_checkpointing"):
        check_accelerator(_accelerator(DistributedType.FSDP, checkpointing=True))


def test_fsdp2_of_an_old_pytorch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    with pytest.raises(ConfigError, match=r"FSDP2 under PyTorch 2\.12\.1.*PyTorch 2\.13 or newer"):
        check_accelerator(_accelerator(DistributedType.FSDP))


def test_torch_compile_is_refused():
    with pytest.raises(ConfigError, match="INDUCTOR"):
        check_accelerator(_accelerator(DistributedType.NO, dynamo="INDUCTOR"))


def test_fp8_is_refused():
    with pytest.raises(ConfigError, match=r"'fp8'.*Remedy: mixed_precision='bf16'"):
        check_accelerator(_accelerator(DistributedType.NO, precision="fp8"))


def test_data_parallel_is_refused():
    check_training_arguments(SimpleNamespace(n_gpu=1))
    with pytest.raises(ConfigError, match=r"2 GPUs.*nn\.DataParallel.*accelerate launch"):
        check_training_arguments(SimpleNamespace(n_gpu=2))


def test_sizes_of_one_are_accepted(monkeypatch):
    sizes = {"dp_replicate_size": 4, "dp_shard_size": 2, "tp_size": 1, "cp_size": None}
    check_parallel_sizes(sizes)
    with pytest.raises(ConfigError, match="context parallelism"):
        check_parallel_sizes({**sizes, "cp_size": 2})
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ConfigError, match="PARALLELISM_CONFIG_CP_SIZE=2 asks for context"):
        check_parallel_sizes(sizes)


@pytest.mark.parametrize("size", [-1, 0, "x", "2", 1.5, True, 10**40])
def test_invalid_sizes_are_refused_by_name(size):
    with pytest.raises(ConfigError, match=r"dp_shard_size is .* whole number >= 1.*Remedy"):
        check_parallel_sizes({"dp_shard_size": size})


def test_sizes_of_the_environment_are_checked_too(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", " 2 ")
    check_parallel_sizes({})
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "x")
    with pytest.raises(ConfigError, match="PARALLELISM_CONFIG_DP_REPLICATE_SIZE is 'x'"):
        check_parallel_sizes({})


@pytest.mark.parametrize(
    ("name", "fits"),
    [("SFT", True), ("DPO", True), ("KTO", True), ("GRPO", False), ("RLOO", False)],
)
def test_trainers_of_trl_that_a_pipeline_cannot_run_are_refused_by_name(name, fits):
    settings = {"auto_find_batch_size": False, "include_num_input_tokens_seen": "no"}
    settings |= {"neftune_noise_alpha": None}
    theirs = type(f"{name}Config", (), {"__module__": "trl.trainer", **settings})
    args = type("MyArguments", (theirs,), {})()  # a script may add fields of its own
    if fits:
        check_shared_batches(args, SPPOConfig(pp_size=2))
        return
    with pytest.raises(ConfigError, match=rf"TRL's {name}Trainer.*SFTTrainer.*pp_size=1"):
        check_shared_batches(args, SPPOConfig(pp_size=2))


def test_noise_on_embeddings_needs_stages_that_run_their_own_units(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, neftune_noise_alpha=5.0)
    for shared in ("auto", "on"):
        with pytest.raises(ConfigError, match=r"neftune_noise_alpha=5\.0 .*Remedy: pp_msp='off'"):
            check_shared_batches(args, SPPOConfig(pp_size=2, pp_msp=shared))
    check_shared_batches(args, SPPOConfig(pp_size=2, pp_msp="off"))
    check_shared_batches(args, SPPOConfig(sp_size=2))
