"""A contender put together: random weights on the device, adapters, and the standard Trainer.

What a user would write, once for every contender; nothing here measures.

The attention kernel is the same for every contender where there is a choice: "auto" is what our
engine's "auto" takes on this device, laid upon the others too. These reach PyTorch's kernels
through scaled_dot_product_attention, narrowed down to one of them for the run.

The ideal: the base model in one piece, everything kept, and the loss in tiles. It has what no
contender can do without (the layers, one attention kernel, a loss that does not hold logits of the
whole sequence) and nothing else: no hooks, no chunks, no copies, no recomputation. So it is a bound
on speed where it fits, and where it does not, `extrapolate` says what it would take.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments
from transformers.modeling_outputs import CausalLMOutputWithPast

from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.select import select_backend
from sppo_hf.cli.benchmark.contenders import Contender, parse
from sppo_hf.cli.benchmark.results import Job
from sppo_hf.cli.common import model_path
from sppo_hf.engine.loss import ChunkedLoss, ModelHead, divide_loss
from sppo_hf.engine.structure import find_parts, suppress_peft_warnings
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.integrations.plugin import SPPOPlugin
from sppo_hf.planning.config_file import read_fields
from sppo_hf.planning.model_profile import LoraShape, Training, find_profile
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.tile_sizes import loss_tile_tokens

NAMED = {"cudnn": "cudnn", "flash": "aten_flash", "efficient": "efficient"}
"""Kernels that can be asked for, and our backends that call them."""

_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "aten_flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """How everyone gets the same kernel."""

    name: str
    """For the results."""

    ours: str
    """Our setting `attention_backend`."""

    theirs: str = "sdpa"
    """Transformers' setting `attn_implementation`."""

    sdpa: SDPBackend | None = None
    """What scaled_dot_product_attention is narrowed down to; None leaves it its choice."""

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Narrows scaled_dot_product_attention down for the whole process."""
        with contextlib.nullcontext() if self.sdpa is None else sdpa_kernel([self.sdpa]):
            yield


def choose_kernel(
    choice: str, device: torch.device, shape: ModelShape, dtype: torch.dtype, *, softcap: bool
) -> Kernel:
    """Finds the kernel of a comparison.

    Args:
        choice: "auto", a key of `NAMED`, or "sdpa": everyone's own default.
        device: where the model is.
        shape: the model; its first layer's heads count.
        dtype: of queries, keys and values.
        softcap: whether the model caps its attention logits.

    Raises:
        ConfigError: a kernel is named on a CPU, where there is one only.
    """
    if choice == "sdpa":
        return Kernel("sdpa's choice", ours="auto")
    if choice in NAMED:
        return Kernel(NAMED[choice], ours=NAMED[choice], sdpa=_SDPA[NAMED[choice]])
    first = AttentionSpec.of_layer(
        shape.layers[0], device_type=device.type, dtype=dtype, softcap=softcap
    )
    windows = any(layer.window is not None for layer in shape.layers)
    requirement = replace(first, window=windows)
    name = select_backend("auto", requirement).backend.name
    theirs = name if name.startswith("flash_attention_") else "sdpa"
    return Kernel(name, ours=name, theirs=theirs, sdpa=_SDPA.get(name))


_IGNORED = -100


def make_ideal(model: nn.Module, *, tile_tokens: int) -> nn.Module:
    """Gives a model the ideal's forward, in place and for good.

    Returns:
        The same model; it takes `input_ids` `[B, T]` and `labels` `[B, T]` and returns a loss.

    Raises:
        UnsupportedModelError: the engine refuses such models.
    """
    parts = find_parts(model)
    causal_lm: Any = parts.causal_lm
    original = causal_lm.forward
    head = ModelHead(parts, original)

    @functools.wraps(original)
    def forward(
        input_ids: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        output = parts.base(input_ids=input_ids, use_cache=False, return_dict=True)
        head.output_class = type(output)
        loss = ChunkedLoss(head.logits, parts.head_parameters(), tile_tokens=tile_tokens)
        shifted_BT = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        total = loss.add(output.last_hidden_state, shifted_BT, last=True)
        count = (shifted_BT != _IGNORED).sum().to(total.device)
        divisor = count
        if num_items_in_batch is not None:
            divisor = torch.as_tensor(num_items_in_batch, device=count.device)
        return CausalLMOutputWithPast(loss=divide_loss(total, count, divisor))

    causal_lm.forward = forward
    return model


# Adapters' outputs are scaled by alpha / rank.
_ALPHA_PER_RANK = 2


def model_config(job: Job) -> Any:
    """Returns the model's configuration, with `layers` decoder layers if the job says so.

    Raises:
        ConfigError: it cannot be read.
    """
    known = dict(read_fields(model_path(job.model)))
    if job.layers is not None:
        known["num_hidden_layers"] = job.layers
        if known.get("layer_types"):
            known["layer_types"] = known["layer_types"][: job.layers]
    config = AutoConfig.for_model(**known)
    config.use_cache = False
    return config


def model_shape(job: Job, config: Any) -> ModelShape:
    """Returns the model in numbers, for FLOPs: the same for all contenders.

    Raises:
        UnsupportedModelError: a size is missing.
    """
    lora = None
    if job.lora_rank is not None:
        adapter_bytes = getattr(torch, job.lora_dtype).itemsize
        lora = LoraShape(rank=job.lora_rank, dtype_bytes=adapter_bytes)
    size = 2 if job.autocast else getattr(torch, job.dtype).itemsize
    training = Training(dtype_bytes=size, parameter_bytes=size, lora=lora)
    return ModelShape.from_profile(find_profile(config, training, trace_config))


def build_model(job: Job, config: Any, kernel: Kernel) -> nn.Module:
    """Makes the model with random weights on the device, in training mode, LoRA around it.

    The same seed on the same device gives all contenders the same weights.
    """
    if parse(job.contender).base == "unsloth":
        return _unsloth_model(job, config)
    torch.manual_seed(job.seed)
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, job.dtype), attn_implementation=kernel.theirs
        )
    if job.lora_rank is not None:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=job.lora_rank,
            lora_alpha=_ALPHA_PER_RANK * job.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        in_float32 = job.lora_dtype == "float32"
        with suppress_peft_warnings():
            model = get_peft_model(model, lora, autocast_adapter_dtype=in_float32)
    return model.train()


def _unsloth_model(job: Job, config: Any) -> nn.Module:
    """Makes the model as Unsloth's users do, who load it from a folder.

    Unsloth rewrites Transformers' classes when it is imported, which a worker does here: nobody
    else is in its process.
    """
    from unsloth import FastLanguageModel  # type: ignore[import-not-found]

    torch.manual_seed(job.seed)
    dtype = getattr(torch, job.dtype)
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(job.device):
            made = AutoModelForCausalLM.from_config(config, dtype=dtype)
        made.save_pretrained(folder)
        _tokenizer(config.vocab_size).save_pretrained(folder)
        del made
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            model_name=folder, max_seq_length=job.total_tokens, dtype=dtype, load_in_4bit=False
        )
    assert job.lora_rank is not None, "without adapters it is skipped"
    return FastLanguageModel.get_peft_model(
        model,
        r=job.lora_rank,
        lora_alpha=_ALPHA_PER_RANK * job.lora_rank,
        target_modules=[
            *("q_proj", "k_proj", "v_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        ],
        use_gradient_checkpointing="unsloth",
        random_state=job.seed,
    ).train()


def make_trainer(
    job: Job,
    model: nn.Module,
    kernel: Kernel,
    shape: ModelShape,
    *,
    contender: Contender,
    plugin: SPPOPlugin | None,
    num_steps: int,
    callbacks: Sequence[TrainerCallback],
    folder: str,
) -> Trainer:
    """Makes the Trainer of a contender."""
    if contender.tiled:
        kind = torch.device(job.device).type
        make_ideal(model, tile_tokens=loss_tile_tokens(shape, device_kind=kind))
    settings: dict[str, Any] = dict(
        output_dir=folder,
        max_steps=num_steps,
        per_device_train_batch_size=1,
        optim="adamw_torch",
        bf16=job.autocast,
        use_cpu=job.device == "cpu",
        dataloader_pin_memory=job.device != "cpu",
        use_liger_kernel=contender.liger,
        parallelism_config=plugin,
        seed=job.seed,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        **_checkpointing(contender, device=job.device),
    )
    if contender.base == "alst":
        tile_mlps(model)
        settings["deepspeed"] = _zero_3(job)
    rows = RandomRows(num_steps, job.total_tokens, vocab_size=shape.vocab_size, seed=job.seed)
    if contender.base == "trl-long":
        return _sft_trainer(model, rows, settings, list(callbacks), vocab_size=shape.vocab_size)
    kind = _TRLTrainer if contender.base == "trl-offload" else Trainer
    return kind(
        model=model, args=Arguments(**settings), train_dataset=rows, callbacks=list(callbacks)
    )


def _sft_trainer(
    model: Any, rows: RandomRows, settings: dict[str, Any], callbacks: list[Any], *, vocab_size: int
) -> Trainer:
    """TRL's own trainer, whose loss is computed in chunks of tokens by default."""
    from datasets import Dataset as Rows
    from trl import SFTConfig, SFTTrainer

    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for index in range(len(rows)):
        tokens = rows[index]["input_ids"].tolist()
        columns["input_ids"].append(tokens)
        columns["labels"].append(tokens)
    prepared = {"skip_prepare_dataset": True}  # it is tokens already
    return SFTTrainer(
        model=model,
        args=SFTConfig(**settings, max_length=None, dataset_kwargs=prepared),
        train_dataset=Rows.from_dict(columns),
        processing_class=_tokenizer(vocab_size),
        callbacks=callbacks,
    )


def tile_mlps(model: nn.Module) -> None:
    """Let DeepSpeed compute gated MLPs in tiles of as many tokens as the model is wide."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # type: ignore[import-not-found]
        TiledMLP,
    )

    for module in model.modules():
        children = {name for name, _ in module.named_children()}
        if not {"gate_proj", "up_proj", "down_proj"} <= children:
            continue
        own = type(module).forward
        trained = [p for p in module.parameters() if p.requires_grad]

        def forward(
            x: Tensor, module: Any = module, own: Any = own, trained: Any = trained
        ) -> Tensor:
            shards = max(1, math.ceil(x.shape[-2] / x.shape[-1]))
            return TiledMLP.apply(own, module, x, shards, trained)

        module.__dict__["forward"] = forward


def _zero_3(job: Job) -> dict[str, Any]:
    """DeepSpeed's settings, for a process that is the only one of its launch."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        os.environ.setdefault(name, value)
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        # Else its own Adam for processors is compiled first.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": job.dtype == "bfloat16" or job.autocast},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }


def _tokenizer(vocab_size: int) -> Any:
    """One that no text ever passes: libraries ask it for its special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(min(vocab_size, 16))}
    inner = Tokenizer(models.WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="t0", eos_token="t1", pad_token="t2"
    )


def make_plugin(job: Job, contender: Contender, kernel: Kernel) -> SPPOPlugin | None:
    """Returns the plugin of a contender that is ours; None for the others.

    Raises:
        ConfigError: a budget is no budget, or the hardware profile cannot be read.
    """
    if contender.offload is None:
        return None
    return SPPOPlugin(
        offload=contender.offload,
        attention_backend=kernel.ours,
        device_memory=job.device_memory,
        host_memory=job.host_memory,
        hardware=job.hardware,
        show_plan=False,
        show_progress=False,
        log_metrics=False,
    )


class RandomRows(Dataset[dict[str, Tensor]]):
    """Rows of random tokens, each its own label; the same seed gives the same rows."""

    def __init__(self, num_rows: int, total_tokens: int, *, vocab_size: int, seed: int) -> None:
        self._num_rows = num_rows
        self._total_tokens = total_tokens
        self._vocab_size = vocab_size
        self._seed = seed

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._seed * self._num_rows + index)
        tokens = torch.randint(self._vocab_size, (self._total_tokens,), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}


class _TRLTrainer(Trainer):
    """The standard Trainer with TRL's offloading around a training step, where SFTTrainer has it.

    Around the whole step: TRL forgets what it offloaded when the context ends, and backward runs
    in the step too.
    """

    _offloading: AbstractContextManager[Any] | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One step within the context, which needs the prepared model and so is made late."""
        if self._offloading is None:
            from trl.models.activation_offloading import get_act_offloading_ctx_manager

            assert self.model is not None, "a Trainer that trains has a model"
            # SFTTrainer takes the defaults too, and SFTConfig checkpoints unless told not to.
            self._offloading = get_act_offloading_ctx_manager(self.model)
        with self._offloading:
            return super().training_step(*args, **kwargs)


def _checkpointing(contender: Contender, *, device: str) -> dict[str, Any]:
    """Arguments of the Trainer, under the names that the installed Transformers has."""
    if not contender.checkpoints:
        return {}
    known = {field.name for field in fields(Arguments)}
    word = "activation" if "activation_checkpointing" in known else "gradient"
    settings: dict[str, Any] = {"use_reentrant": False}
    if contender.offloads_checkpoints and device != "cpu":
        settings["offload"] = True
    return {f"{word}_checkpointing": True, f"{word}_checkpointing_kwargs": settings}
