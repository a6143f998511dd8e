"""Builds a contender: random weights on the device, adapters, and the standard Trainer.

It is what a user would write; nothing here measures.

Where there is a choice, all contenders use the same attention kernel: by default the one that
sppo's "auto" takes on this device. The others reach PyTorch's kernels through
scaled_dot_product_attention, which is restricted to that kernel for the run.

The ideal is the base model in one piece, everything kept on the device, and the loss in tiles. It
has what every contender needs (the layers, one attention kernel, a loss that does not hold the
logits of the whole sequence) and nothing else: no hooks, chunks, copies or recomputation. So it is
a bound on speed where it fits; where it does not, `driver.extrapolate` estimates it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import tempfile
from collections.abc import Sequence
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
from sppo_hf.engine.model_parts import find_parts, suppress_peft_warnings
from sppo_hf.integrations.plugin import SPPOPlugin
from sppo_hf.planning.config_file import read_fields
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.tile_sizes import loss_tile_tokens

NAMED = {"cudnn": "cudnn", "flash": "aten_flash", "efficient": "efficient"}
"""Kernels that `--attention` names, and sppo's backends that call them."""

_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "aten_flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel, and the settings with which each contender uses it."""

    name: str
    """Name in the results."""

    attention_backend: str
    """Setting of sppo."""

    attn_implementation: str = "sdpa"
    """Setting of Transformers."""

    sdpa: SDPBackend | None = None
    """The one kernel that scaled_dot_product_attention may use; None leaves it its choice."""

    def in_use(self) -> AbstractContextManager[Any]:
        """Restrict scaled_dot_product_attention to this kernel for the whole process."""
        return contextlib.nullcontext() if self.sdpa is None else sdpa_kernel([self.sdpa])


def choose_kernel(
    choice: str, device: torch.device, shape: ModelShape, dtype: torch.dtype, *, softcap: bool
) -> Kernel:
    """Choose the kernel of a comparison.

    Args:
        choice: "auto", a key of `NAMED`, or "sdpa" for each contender's own default.
        device: Device of the model.
        shape: The model, of which the first layer with attention counts.
        dtype: Dtype of queries, keys and values.
        softcap: Whether the model caps its attention logits.

    Raises:
        ConfigError: A kernel is named on a CPU, which has only one.
    """
    if choice == "sdpa":
        return Kernel("sdpa's choice", "auto")
    if choice in NAMED:
        name = NAMED[choice]
        return Kernel(name, attention_backend=name, sdpa=_SDPA[name])
    # The first layers of hybrids are recurrent.
    with_heads = next((layer for layer in shape.layers if layer.num_kv_heads), None)
    if with_heads is None:
        return Kernel("none", "auto")
    first = AttentionSpec.of_layer(
        with_heads, device_type=device.type, dtype=dtype, softcap=softcap
    )
    windows = any(layer.window is not None for layer in shape.layers)
    name = select_backend("auto", replace(first, window=windows)).backend.name
    implementation = name if name.startswith("flash_attention_") else "sdpa"
    return Kernel(name, name, implementation, _SDPA.get(name))


_IGNORED = -100


def make_ideal(model: nn.Module, *, tile_tokens: int) -> nn.Module:
    """Replace a model's forward by the ideal's, for good.

    Returns:
        The same model; it takes `input_ids` `[B, T]` and `labels` `[B, T]` and returns a loss.

    Raises:
        UnsupportedModelError: The engine refuses such models.
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
        divisor = count if num_items_in_batch is None else num_items_in_batch
        divisor = torch.as_tensor(divisor, device=count.device)
        return CausalLMOutputWithPast(loss=divide_loss(total, count, divisor))

    causal_lm.forward = forward
    return model


_ALPHA_PER_RANK = 2

# The ideal's forward has a loss of its own, and Liger's would take the forward's place.
_WITHOUT_LOSS = {"fused_linear_cross_entropy": False}


def model_config(job: Job) -> Any:
    """Return the model's configuration, with the job's number of layers if it has one.

    Raises:
        ConfigError: It cannot be read.
    """
    known = dict(read_fields(model_path(job.model)))
    if job.layers is not None:
        known["num_hidden_layers"] = job.layers
        if known.get("layer_types"):
            known["layer_types"] = known["layer_types"][: job.layers]
    config = AutoConfig.for_model(**known)
    config.use_cache = False
    return config


def build_model(job: Job, config: Any, kernel: Kernel) -> nn.Module:
    """Build the model with random weights on the device, with LoRA if the job has a rank.

    On the same device, all contenders get the same weights from a seed.
    """
    if parse(job.contender).base == "unsloth":
        return _unsloth_model(job, config)
    torch.manual_seed(job.seed)
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, job.dtype), attn_implementation=kernel.attn_implementation
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
    """Load the model from a folder as Unsloth's users do.

    Unsloth rewrites Transformers' classes when it is imported; a worker runs nothing else.
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
    """Make the Trainer of a contender."""
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
        liger_kernel_config=_WITHOUT_LOSS if contender.liger and contender.tiled else None,
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
    """Make TRL's trainer, which computes the loss in chunks of tokens by default."""
    from datasets import Dataset as Rows
    from trl import SFTConfig, SFTTrainer

    tokens = [rows[index]["input_ids"].tolist() for index in range(len(rows))]
    prepared = {"skip_prepare_dataset": True}  # it is tokens already
    return SFTTrainer(
        model=model,
        args=SFTConfig(**settings, max_length=None, dataset_kwargs=prepared),
        train_dataset=Rows.from_dict({"input_ids": tokens, "labels": tokens}),
        processing_class=_tokenizer(vocab_size),
        callbacks=callbacks,
    )


def tile_mlps(model: nn.Module) -> None:
    """Let DeepSpeed compute gated MLPs in tiles of as many tokens as the hidden size."""
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
    """Return DeepSpeed's settings for ZeRO-3, and set the environment of a single process."""
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
        # Without this it compiles its own CPU Adam first.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": job.dtype == "bfloat16" or job.autocast},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }


def _tokenizer(vocab_size: int) -> Any:
    """Make a tokenizer without use for text; libraries read its special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(min(vocab_size, 16))}
    inner = Tokenizer(models.WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="t0", eos_token="t1", pad_token="t2"
    )


def make_plugin(job: Job, contender: Contender, kernel: Kernel) -> SPPOPlugin | None:
    """Return the plugin of an sppo contender; None for the others.

    Raises:
        ConfigError: A budget is malformed, or the hardware profile cannot be read.
    """
    if contender.offload is None:
        return None
    return SPPOPlugin(
        offload=contender.offload,
        attention_backend=kernel.attention_backend,
        device_memory=job.device_memory,
        host_memory=job.host_memory,
        hardware=job.hardware,
        show_plan=False,
        show_progress=False,
        log_metrics=False,
    )


class RandomRows(Dataset[dict[str, Tensor]]):
    """Rows of random tokens, which are their own labels; a seed always gives the same rows."""

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
    """The standard Trainer with TRL's offloading around each training step, as in SFTTrainer.

    The context must contain backward, because TRL forgets what it offloaded when it ends.
    """

    _offloading: AbstractContextManager[Any] | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run a step in the context, which is made here because it needs the prepared model."""
        if self._offloading is None:
            from trl.models.activation_offloading import get_act_offloading_ctx_manager

            assert self.model is not None, "a Trainer that trains has a model"
            # With the defaults, like SFTTrainer.
            self._offloading = get_act_offloading_ctx_manager(self.model)
        with self._offloading:
            return super().training_step(*args, **kwargs)


def _checkpointing(contender: Contender, *, device: str) -> dict[str, Any]:
    """Return the Trainer's arguments for checkpointing, by the installed Transformers' names."""
    if not contender.checkpoints:
        return {}
    known = {field.name for field in fields(Arguments)}
    word = "activation" if "activation_checkpointing" in known else "gradient"
    settings: dict[str, Any] = {"use_reentrant": False}
    if contender.offloads_checkpoints and device != "cpu":
        settings["offload"] = True
    return {f"{word}_checkpointing": True, f"{word}_checkpointing_kwargs": settings}
