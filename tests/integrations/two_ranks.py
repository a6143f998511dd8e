"""A job of test_distributed.py and others: each rank trains the tiny Llama, one writes what it saw.

    run_job({"kind": "ddp", "settings": {...}, "rows": 2}, ranks=2, folder=tmp_path)

Kinds: "ddp" trains by the Trainer (through a pipeline if the settings say so), "fsdp2" and "raw" by
an Accelerate loop, "refusals" collects what is refused, "scaler" lets one stage overflow,
"predictions" predicts rows. Without `settings` the plugin is left out. Without a launcher's
variables in the environment it is one process.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    gather_object,
)
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer

from sppo_hf import SPPOPlugin
from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.errors import SPPOError
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.testing.exactness import float64_everywhere
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.integrations.training import (
    ROW_TOKENS,
    collate_images,
    let_fsdp_run_on_cpus,
    make_arguments,
    make_model,
    make_rows,
    with_image,
)
from tests.pipeline.fork_server import leave_together


def _lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    with suppress_peft_warnings():
        return get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def _in_4_bits(model: nn.Module, storage: str) -> nn.Module:
    """Quantise the linear layers of a model's decoder layers, as bitsandbytes stores them."""
    if sys.modules.get("bitsandbytes", model) is None:  # of the process that started this one
        del sys.modules["bitsandbytes"]
    import bitsandbytes as bnb

    for layer in model.model.layers:  # type: ignore[union-attr]
        for name, linear in list(layer.named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            made = bnb.nn.Linear4bit(
                *(linear.in_features, linear.out_features, False),
                compute_dtype=torch.float32,
                quant_type="nf4",
                quant_storage=getattr(torch, storage),
            )
            made.load_state_dict(linear.state_dict())
            layer.set_submodule(name, made.to("cpu"))
    return model


def train_with_trainer(job: dict[str, Any], plugin: SPPOPlugin | None) -> dict[str, Any]:
    """Train by the Trainer; `rows` is per rank, `float64` makes all of it in that.

    With "slow_save" the last rank takes its time to write its random state.
    """
    args = make_arguments(
        job["folder"],
        **{
            "parallelism_config": plugin,
            "max_steps": 2,
            "per_device_train_batch_size": job["rows"],
            "per_device_eval_batch_size": job["rows"],
            "eval_strategy": "steps",
            "eval_steps": 2,
            **job.get("arguments", {}),
        },
    )
    model = make_model(tie_word_embeddings=job.get("tied", False))
    model = _lora(model) if job.get("lora") else model
    model = model.double() if job.get("float64") else model
    rows, eval_rows = make_rows(32), make_rows(job.get("eval_rows", 8), seed=2)
    if "eval_labels" in job:
        for row in eval_rows:
            row["labels"] = row["input_ids"].clone()
            row["labels"][: -job["eval_labels"]] = -100
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=eval_rows)
    if job.get("patience"):
        trainer.add_callback(EarlyStoppingCallback(job["patience"]))
    if job.get("slow_save") and args.process_index == args.world_size - 1:
        Trainer._save_rng_state = _write_slowly(Trainer._save_rng_state)  # type: ignore[method-assign]
    with float64_everywhere() if job.get("float64") else nullcontext():
        trainer.train(resume_from_checkpoint=job.get("resume"))
    predicted = trainer.predict(eval_rows).metrics if job.get("predict") else {}
    torch.save(args, Path(job["folder"]) / "training_args.bin")
    return {
        "history": trainer.state.log_history,
        "steps": trainer.state.global_step,
        "predicted_loss": predicted.get("test_loss"),
        "wrapper": type(trainer.model_wrapped).__name__,
        "float64": job.get("float64", False),
        "weights": _sums(trainer.accelerator, trainer.model_wrapped),
        "rank": args.process_index,
    }


def _write_slowly(save: Callable[[Trainer, str], None]) -> Callable[[Trainer, str], None]:
    """Begin the file, and write it when the other ranks have had time to get far ahead."""

    def save_later(trainer: Trainer, output_dir: str) -> None:
        os.makedirs(output_dir, exist_ok=True)
        Path(output_dir, f"rng_state_{trainer.args.process_index}.pth").touch()
        time.sleep(0.3)
        save(trainer, output_dir)

    return save_later


LAYERS = {
    "qwen3_vl": ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"],
    "gemma3": ["Gemma3DecoderLayer", "SiglipEncoderLayer"],
}
"""Layers of the decoder and of the encoder that FSDP2 shards by themselves."""


def prepare(job: dict[str, Any]) -> None:
    """Import the code of a family with images, which each rank would do after its fork."""
    if "images" in job:
        with torch.random.fork_rng(devices=[]):
            build_tiny_model(job.get("family", "qwen3_vl"), dtype=torch.float32)


def train_with_accelerate(job: dict[str, Any], plugin: SPPOPlugin | None) -> dict[str, Any]:
    """Train by a raw loop under FSDP2 on several ranks, or plainly on one.

    With "lengths" the rows of a step have these, and with "pads" all ranks pad theirs alike. With
    "images" the model is of the multimodal "family", and of its rows these have an image each; with
    "wraps" FSDP2 wraps the first classes of its layers alone. With "bad" the last rank alone is
    given a first batch that it refuses; if "hooked", a layer has a backward hook.
    """
    sharding = None
    family = job.get("family", "qwen3_vl")
    if job["kind"] == "fsdp2" and PartialState(cpu=True).num_processes > 1:
        let_fsdp_run_on_cpus()
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=LAYERS[family][: job.get("wraps")]
            if "images" in job
            else ["LlamaDecoderLayer"],
            state_dict_type="SHARDED_STATE_DICT",
        )
    on_cpu = job["kind"] == "raw"
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=job.get("precision", "no"),
        fsdp_plugin=sharding,
        parallelism_config=plugin,
    )
    model, rows = _model_and_rows(job, family)
    if job.get("hooked"):
        model.model.layers[1].register_full_backward_hook(lambda *_: None)
    # Of Adam every operation on a sharded tensor would be looked up, which takes a rank longest.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    shares = 1 if plugin is None else plugin.config.sharing_ranks
    # Accelerate's schedules are as long as for one process that reads all rows.
    steps = 4 * accelerator.num_processes // shares
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    history, (gathered, reduced) = [], _note_collectives()
    # Ranks of a pipeline, and of a shared sequence, see the same rows.
    rank, ranks = rank // shares, ranks // shares
    for step in range(2):
        everywhere = rows[step * ranks * job["rows"] : (step + 1) * ranks * job["rows"]]
        if "lengths" in job:
            pairs = zip(everywhere, job["lengths"], strict=True)
            everywhere = [{name: x[:length] for name, x in row.items()} for row, length in pairs]
        picked = everywhere[rank * job["rows"] : (rank + 1) * job["rows"]]
        bad = job.get("bad") if step == 0 and rank == ranks - 1 else None
        batch = _make_batch(picked, job, bad)
        items = sum(int((row["labels"][1:] != -100).sum()) for row in everywhere)
        refusals = (SPPOError, RuntimeError) if "bad" in job else (SPPOError,)
        # Every rank divides by the items of all; gradients are averaged over ranks (or replicas).
        try:
            loss = model(**batch, num_items_in_batch=items).loss * ranks
        except refusals as error:
            said = f"{type(error).__name__}: {error}"
            if "bad" not in job:
                return {"refused": said, "rank": accelerator.process_index}
            history.append({"refused": said})
            continue
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = accelerator.reduce(loss.detach() / ranks, "sum").item() / shares
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        history.append({"loss": total, "grad_norm": norm.item(), "gathered": list(gathered)})
        history[-1] |= {"reduced": list(reduced), "lr": scheduler.get_last_lr()[0]}
        gathered.clear()
        reduced.clear()
    mesh, engine = accelerator.torch_device_mesh, get_engine(accelerator.unwrap_model(model))
    shape = None if engine is None else engine.plans.shape()
    return {
        "history": history,
        "shards": None if shape is None else shape.shards,
        "dtype_bytes": None if shape is None else shape.dtype_bytes,
        "gathered": None if shape is None else shape.gathered_elements,
        "whole_bytes": None if engine is None else engine.parts.whole_bytes(),
        "wrapper": type(model).__name__,
        "mesh": None if mesh is None else list(mesh.mesh_dim_names),
        "weights": _sums(accelerator, model),
        "rank": accelerator.process_index,
    }


def _model_and_rows(job: dict[str, Any], family: str) -> tuple[nn.Module, list[Any]]:
    model: nn.Module = make_model(tie_word_embeddings=job.get("tied", False))
    if "storage" in job:
        model = _in_4_bits(make_model(hidden_size=64), job["storage"])
    rows = make_rows(32)
    if "images" in job:
        model = build_tiny_model(family, dtype=torch.float32)
        rows = [with_image(model, row, index in job["images"]) for index, row in enumerate(rows)]
    return (_lora(model) if job.get("lora") else model), rows


def _make_batch(
    rows: list[dict[str, torch.Tensor]], job: dict[str, Any], bad: str | None
) -> dict[str, torch.Tensor]:
    """A rank's batch.

    A bad one lacks labels, is one image, packs documents around images, or has images that the
    encoder cannot read.
    """
    if "lengths" in job:
        return _pad(rows, whole=job.get("pads", False))
    batch = collate_images(rows)
    if bad == "labels":
        batch["labels"] = batch["labels"][:, 1:]
    elif bad == "image":
        (name,) = (name for name in batch if name.endswith("token_type_ids"))
        batch[name] = torch.ones_like(batch[name])
    elif bad == "pixels":
        batch["pixel_values"] = batch["pixel_values"][:, :1]
    elif bad == "packed":
        batch["position_ids"] = (torch.arange(ROW_TOKENS) % 12)[None]
    return batch


def _pad(rows: list[dict[str, torch.Tensor]], *, whole: bool) -> dict[str, torch.Tensor]:
    """A batch of rows that are padded to the longest of them, or to `whole` rows."""
    lengths = torch.tensor([len(row["labels"]) for row in rows])
    tokens = ROW_TOKENS if whole else int(lengths.max())
    batch = {"attention_mask": (torch.arange(tokens) < lengths[:, None]).long()}
    for name, value in (("input_ids", 0), ("labels", -100)):
        padded = [nn.functional.pad(r[name], (0, tokens - len(r[name])), value=value) for r in rows]
        batch[name] = torch.stack(padded)
    return batch


def _note_collectives() -> tuple[list[str], list[str]]:
    """The first weight of every group that FSDP2 gathers, and of those that it reduces."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    def note(name: str) -> list[str]:
        seen: list[str] = []
        collect = getattr(_fsdp_param_group, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen.append(args[0][0]._param_fqn)
            return collect(*args, **kwargs)

        setattr(_fsdp_param_group, name, counted)
        return seen

    return note("foreach_all_gather"), note("foreach_reduce")


def collect_refusals(job: dict[str, Any], plugin: SPPOPlugin | None) -> dict[str, Any]:
    """Do with a pipeline what it cannot do, and note the errors."""
    accelerator = Accelerator(cpu=True, parallelism_config=plugin)
    model = accelerator.prepare(make_model())
    ids = make_rows(1)[0]["input_ids"][None]
    dispatching = Accelerator(
        cpu=True,
        parallelism_config=plugin,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=True),
    )

    def make_trainer(**arguments: Any) -> Trainer:
        args = make_arguments(job["folder"], parallelism_config=plugin, **arguments)
        return Trainer(make_model(), args, train_dataset=make_rows(4))

    assert plugin is not None
    calls = {
        "generate": lambda: model.generate(ids, max_new_tokens=2),
        "logits": lambda: model(ids),
        "hidden": lambda: model(ids, labels=ids, output_hidden_states=True),
        "copy": lambda: copy.deepcopy(model),
        "dispatch": lambda: dispatching.prepare(DataLoader(range(4))),
        "search": lambda: make_trainer(auto_find_batch_size=True),
        "count": lambda: make_trainer(include_num_input_tokens_seen="all"),
        "reverted": lambda: plugin.revert(model)(ids, labels=ids),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except SPPOError as error:
            said[name] = f"{type(error).__name__}: {error}"
    # Ranks that nobody seeded still shuffle alike, and metrics that are no tensors count once.
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(16), batch_size=2, shuffle=True))
    orders = gather_object([batch.tolist() for batch in loader])
    metrics = accelerator.gather_for_metrics(["a", "b"], use_gather_object=True)
    objects = [torch.arange(3), torch.tensor(7)]
    tensors = accelerator.gather_for_metrics(objects, use_gather_object=True)
    return {
        "said": said,
        "orders": orders,
        "metrics": metrics,
        "tensors": [tensor.tolist() for tensor in tensors],
        "rank": accelerator.process_index,
    }


def overflow_one_stage(job: dict[str, Any], plugin: SPPOPlugin | None) -> dict[str, Any]:
    """Scale gradients as for float16; the last rank's overflow in the second of three steps."""
    accelerator = Accelerator(cpu=True, parallelism_config=plugin)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = {name: x[None] for name, x in make_rows(1)[0].items()}
    sums, scales, losses = [], [], []
    for step in range(3):
        loss = model(**batch).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        if step == 1 and accelerator.process_index == accelerator.num_processes - 1:
            next(p for p in model.parameters() if p.grad is not None).grad.fill_(torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        local = sum(p.detach().abs().sum() for p in model.parameters())
        sums.append(accelerator.gather(local[None]).tolist())
        scales.append(accelerator.gather(torch.tensor([accelerator.scaler.get_scale()])).tolist())
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine)
    return {
        "sums": sums,
        "scales": scales,
        "losses": losses,
        "unscaled": engine.loss_gradient._unscaled,
        "rank": accelerator.process_index,
    }


def _sums(accelerator: Accelerator, model: nn.Module) -> dict[str, float]:
    sums = {}
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        sums[name] = whole.detach().double().abs().sum().item()
    return sums


def predict(job: dict[str, Any], plugin: SPPOPlugin | None) -> dict[str, Any]:
    """Predict rows of other lengths on each rank, by functions for logits and without one."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["labels"]) for row in rows)
        batch = {}
        for name, padding in (("input_ids", 0), ("labels", -100)):
            padded = [nn.functional.pad(r[name], (0, longest - len(r[name])), value=padding)
                      for r in rows]  # fmt: skip
            batch[name] = torch.stack(padded)
        return batch

    def token_wise(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return logits.argmax(-1), logits.log_softmax(-1).amax(-1)

    def on_one_rank(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mean = logits.mean(1, keepdim=True) if PartialState().process_index else 0
        return (logits - mean).log_softmax(-1).amax(-1)

    rows = [{k: v[: 24 - 3 * (i % 5)] for k, v in row.items()} for i, row in
            enumerate(make_rows(7))]  # fmt: skip
    seen: dict[str, Any] = {"rank": PartialState(cpu=True).process_index}
    for function in (token_wise, on_one_rank, None):
        AcceleratorState._reset_state()
        trainer = Trainer(
            make_model(),
            make_arguments(job["folder"], parallelism_config=plugin),
            data_collator=collate,
            preprocess_logits_for_metrics=function,
        )
        found = trainer.predict(rows).predictions
        found = found if isinstance(found, tuple) else (found,)
        name = getattr(function, "__name__", "whole")
        seen[name] = [[list(x.shape), float(abs(x).sum())] for x in found]
    return seen


def main(job: dict[str, Any]) -> None:
    """Run a job."""
    settings = job.get("settings")
    plugin = None if settings is None else SPPOPlugin({"show_plan": False, **settings})
    train = {
        "ddp": train_with_trainer,
        "fsdp2": train_with_accelerate,
        "raw": train_with_accelerate,
        "refusals": collect_refusals,
        "scaler": overflow_one_stage,
        "predictions": predict,
    }[job["kind"]]
    result = train(job, plugin)
    if result["rank"] == 0:
        Path(job["out"]).write_text(json.dumps(result))
    leave_together()
