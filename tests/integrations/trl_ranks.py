"""A job of test_trl.py for each rank: a trainer of TRL on a tiny model, seen from rank 0.

    {"runs": [{"trainer": "sft", "settings": {"pp_size": 2}, ...}], "out": "result.json"}

Each run trains anew, so that one launch serves several. `settings` are SPPO's (left out: no SPPO),
`arguments` those of the trainer's config, `family` is the model's (left out: a Llama). The trainer
"calls" makes losses of its own instead.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaForSequenceClassification, PreTrainedModel
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer.utils import add_fused_lm_head

from sppo_hf import SPPOPlugin
from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.fakes.tokenizer import byte_tokenizer
from tests.integrations.training import make_model
from tests.pipeline.fork_server import leave_together

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['role'] }}: {{ m['content'] }}{% endif %}\n{% endfor %}"
)


def _words(index: int, count: int) -> str:
    return "".join(chr(97 + (7 * index + 3 * i + i * i) % 26) for i in range(count))


def _dataset(kind: str) -> Dataset:
    prompts = [_words(i, 4 + i) for i in range(8)]
    first = [_words(i + 20, 9 + 2 * i) for i in range(8)]
    second = [_words(i + 40, 21 - i) for i in range(8)]
    rows: list[dict[str, Any]] = []
    for i, (prompt, chosen, rejected) in enumerate(zip(prompts, first, second, strict=True)):
        rows += {
            "text": lambda p=prompt, c=chosen: [{"text": p + c}],
            "completion": lambda p=prompt, c=chosen: [{"prompt": p, "completion": c}],
            "chat": lambda p=prompt, c=chosen: [
                {
                    "messages": [
                        {"role": "user", "content": p},
                        {"role": "assistant", "content": c},
                    ]
                }
            ],
            "dpo": lambda p=prompt, c=chosen, r=rejected: [
                {"prompt": p, "chosen": c, "rejected": r}
            ],
            "kto": lambda p=prompt, c=chosen, i=i: [
                {"prompt": p, "completion": c, "label": bool(i % 3)}
            ],
        }[kind]()
    return Dataset.from_list(rows)


def train(run: dict[str, Any], folder: str, plugin: SPPOPlugin | None) -> dict[str, Any]:
    """Train one run; its log, and the norms of this rank's weights."""
    kind = run["trainer"]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    trainers = {
        "sft": (SFTTrainer, SFTConfig),
        "dpo": (DPOTrainer, DPOConfig),
        "kto": (KTOTrainer, KTOConfig),
        "grpo": (GRPOTrainer, GRPOConfig),
        "reward": (RewardTrainer, RewardConfig),
    }
    trainer_class, config_class = trainers[kind]
    generation = {"num_generations": 2, "max_completion_length": 6} if kind == "grpo" else {}
    settings = {
        **generation,
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "bf16": False,
        "disable_tqdm": True,
        "seed": 7,
        "parallelism_config": plugin,
        **run.get("arguments", {}),
    }
    model = _make_model(run)
    more: dict[str, Any] = {}
    if kind in ("dpo", "kto") and not run.get("lora"):
        more["ref_model"] = _make_model(run)
    if run.get("lora"):
        torch.manual_seed(3)
        more["peft_config"] = LoraConfig(
            target_modules=["q_proj", "v_proj"],
            task_type="SEQ_CLS" if kind == "reward" else "CAUSAL_LM",
            lora_dropout=run.get("dropout", 0.0),
        )
    if kind == "grpo":
        more["reward_funcs"] = lambda completions, **_: [float(len(c) % 5) for c in completions]
        data = Dataset.from_list([{"prompt": _words(i, 4 + i)} for i in range(8)])
    else:
        data = _dataset(run.get("data", {"sft": "text"}.get(kind, kind)))
    if run.get("eval"):
        more["eval_dataset"] = data.select(range(4))
    trainer = trainer_class(
        model=model,
        args=config_class(**settings),
        train_dataset=data,
        processing_class=tokenizer,
        **more,
    )
    trainer.train()
    inner = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    weights = {n: p.detach().double().norm().item() for n, p in inner.named_parameters()}
    return {"history": trainer.state.log_history, "weights": weights}


def _make_model(run: dict[str, Any]) -> PreTrainedModel:
    of: dict[str, Any] = {"vocab_size": 258, "pad_token_id": 257, **run.get("model", {})}
    if run["trainer"] == "reward":
        torch.manual_seed(0)
        return LlamaForSequenceClassification(make_model(**of, num_labels=1).config)
    if family := run.get("family"):
        torch.manual_seed(0)
        return build_tiny_model(family, dtype=torch.float32, **of)
    return make_model(**of)


def _model_with_head(run: dict[str, Any]) -> torch.nn.Module:
    model = make_model(vocab_size=258, **run.get("model", {}))
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    torch.manual_seed(3)
    targets = ["q_proj", "down_proj"]
    lora = LoraConfig(target_modules=targets, lora_dropout=0.4, init_lora_weights=False)
    with suppress_peft_warnings():
        return get_peft_model(model, lora)


def call(run: dict[str, Any], plugin: SPPOPlugin) -> dict[str, float]:
    """Several losses of a head of TRL's, under dropout, computed in one pass and in two.

    Returns:
        By name, the largest difference of this rank's gradients, as a part of the largest gradient.
    """
    PartialState(cpu=True)
    model = plugin.convert(_model_with_head(run))
    plain = _model_with_head(run).eval()
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine)
    ids = torch.arange(2 * 21).view(2, 21) * 7 % 256
    labels = ids.masked_fill(ids % 3 == 0, -100)
    weights = torch.linspace(0.1, 3.0, 2 * 20).view(2, 20)

    def mean(out: Any) -> Tensor:
        return -out.log_probs.sum() / 64

    def weighed(out: Any) -> Tensor:
        return (weights * out.log_probs.sigmoid() + 0.1 * out.entropy).sum()

    def grads(loss: Any, *, uniform: bool, of: Any = model, given: Tensor = labels) -> Any:
        engine.loss_is_uniform = uniform
        of.zero_grad()
        torch.manual_seed(5)
        loss(of, given).backward()
        after = torch.rand(())  # dropout must leave the random state as one forward leaves it
        found = {n: p.grad.clone() for n, p in of.named_parameters() if p.grad is not None}
        return {**found, "random state": after}

    def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        assert all(torch.isfinite(x).all() for x in one.values())
        return max(float((one[n] - other[n]).abs().max() / other[n].abs().max()) for n in one)

    def once(make: Any) -> Any:
        return lambda of, given: make(of(input_ids=ids, labels=given, fused_lm_head=True))

    def twice(of: Any, given: Tensor) -> Tensor:
        first = of(input_ids=ids, labels=given, fused_lm_head=True)
        second = of(input_ids=ids.flip(0), labels=given, fused_lm_head=True)
        return (weighed(first) - mean(second)) ** 2

    found = {
        # One pass and two, with the same dropout.
        "mean": differ(grads(once(mean), uniform=True), grads(once(mean), uniform=False)),
        # A pass that was for nothing, and none.
        "weighed": differ(grads(once(weighed), uniform=True), grads(once(weighed), uniform=False)),
    }
    nothing = grads(once(mean), uniform=True, given=torch.full_like(labels, -100))
    del nothing["random state"]
    found["no label"] = max(float(g.abs().max()) for g in nothing.values())
    model.eval()
    for name, loss in (("plain mean", once(mean)), ("plain twice", twice)):
        found[name] = differ(grads(loss, uniform=True), grads(loss, uniform=True, of=plain))
    return found


def main(job: dict[str, Any]) -> None:
    """Run a job."""
    warnings.simplefilter("ignore")
    results = []
    for run in job["runs"]:
        settings = run.get("settings")
        plugin = None if settings is None else SPPOPlugin({"show_plan": False, **settings})
        if run["trainer"] == "calls":
            assert plugin is not None
            results.append(call(run, plugin))
        else:
            results.append(train(run, job["folder"], plugin))
    if int(os.environ.get("RANK", "0")) == 0:
        Path(job["out"]).write_text(json.dumps(results))
    leave_together()
