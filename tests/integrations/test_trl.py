"""TRL's trainers, unchanged but for one argument: they put a head of their own on the model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    BertForSequenceClassification,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from sppo_hf import ConfigError, SPPOConfig, SPPOPlugin
from sppo_hf.engine.convert import get_engine, is_converted
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.integrations.validation import check_shared_batches
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.fakes.tokenizer import byte_tokenizer
from tests.integrations.launch import run_ranks
from tests.sweeps import ALL, sample

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's own making

trl = pytest.importorskip("trl", reason="needs the extra `trl`")
Dataset = pytest.importorskip("datasets").Dataset


def _three_steps(folder, plugin, **settings):
    """Arguments of `SFTTrainer`."""
    return trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        bf16=False,
        parallelism_config=plugin,
        **settings,
    )


def _logged(trainer):
    keys = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    return [{k: log[k] for k in keys} for log in trainer.state.log_history if "loss" in log]


def _train(tmp_path, plugin, **settings):
    model = build_tiny_model("llama", dtype=torch.float32, vocab_size=258)
    rows = [{"input_ids": [(7 * i + j) % 97 for j in range(20 + 3 * i)]} for i in range(6)]
    trainer = trl.SFTTrainer(
        model=model,
        args=_three_steps(tmp_path, plugin, **settings),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        compute_metrics=lambda prediction: {"ids": float(prediction.predictions.sum())},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    metrics = trainer.evaluate()
    return (
        _logged(trainer),
        {k: metrics[k] for k in ("eval_loss", "eval_entropy", "eval_ids")},
        model,
    )


def _rewarded(tmp_path, plugin, judge_class):
    """Two steps of GRPO; the reward comes from a model that scores whole sequences."""
    torch.manual_seed(0)
    # The reference of the KL term is loaded by the policy's name.
    build_tiny_model("llama", dtype=torch.float32, vocab_size=258).save_pretrained(tmp_path / "it")
    policy = LlamaForCausalLM.from_pretrained(tmp_path / "it")
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    labels = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    judge = judge_class(
        judge_class.config_class(vocab_size=258, num_hidden_layers=1, **sizes, **labels)
    )
    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        beta=0.04,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        bf16=False,
        seed=3,
        parallelism_config=plugin,
    )
    trainer = trl.GRPOTrainer(
        model=policy,
        reward_funcs=judge,
        reward_processing_classes=tokenizer,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"count to {i}: "} for i in range(8)]),
        processing_class=tokenizer,
    )
    trainer.train()
    keys = ("loss", "grad_norm", "reward", "kl")
    logs = [{k: log[k] for k in keys} for log in trainer.state.log_history if "loss" in log]
    return logs, policy, judge


# A reward model that can be converted and one that cannot.
@pytest.mark.parametrize(
    "judge_class", sample([LlamaForSequenceClassification, BertForSequenceClassification], 2)
)
def test_grpo_with_a_reward_model(tmp_path, judge_class):
    expected, _, _ = _rewarded(tmp_path, None, judge_class)
    plugin = SPPOPlugin(num_chunks=3, show_plan=False)
    ours, policy, judge = _rewarded(tmp_path, plugin, judge_class)
    assert is_converted(policy)
    assert is_converted(judge) == (judge_class is LlamaForSequenceClassification)
    assert len(ours) == len(expected) == 2
    assert any(log["grad_norm"] > 0 for log in expected)
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("packing", [False, True])
def test_the_same_run_with_and_without_the_plugin(tmp_path, packing):
    settings = {"packing": True, "max_length": 40} if packing else {}
    expected, expected_metrics, _ = _train(tmp_path, None, **settings)
    ours, metrics, model = _train(tmp_path, SPPOPlugin(num_chunks=3, show_plan=False), **settings)
    assert is_converted(model)
    assert get_engine(model).counters["attention_forwards"] >= 3 * 3 * 3
    assert len(ours) == len(expected) == 3
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    assert metrics == pytest.approx(expected_metrics, rel=1e-3)


ONE_DEVICE = {
    "assistant": {
        "trainer": "sft",
        "data": "chat",
        "arguments": {"assistant_only_loss": True},
    },
    "preferences": {"trainer": "dpo", "lora": True},
    "desirable": {"trainer": "kto"},
    "rewards": {"trainer": "reward", "data": "dpo", "eval": True},
    "rewards, LoRA": {"trainer": "reward", "data": "dpo", "lora": True},
    # Two prompts of two lengths in every batch: the shorter one's rows begin with padding.
    # `return_logits` has no say in what TRL's head returns.
    "generated": {
        "trainer": "grpo",
        "settings": {"return_logits": True},
        "arguments": {"per_device_train_batch_size": 4, "num_generations": 2},
    },
    # Recurrent layers, whose states begin behind that padding.
    "generated, recurrent": {
        "trainer": "grpo",
        "family": "qwen3_5_text",
        "arguments": {"per_device_train_batch_size": 4, "num_generations": 2},
    },
    # Experts: each trainer asks for the routers' loss in its own way.
    "experts": {
        "trainer": "sft",
        "family": "mixtral",
        "arguments": {"router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2},
    },
    "experts, preferences": {
        "trainer": "dpo",
        "family": "qwen3_moe",
        "lora": True,
        "arguments": {"router_aux_loss_coef": 0.5},
    },
    # The reference model's config has it on as well, so it computes one that is not used.
    "experts, desirable": {
        "trainer": "kto",
        "family": "gpt_oss-router-loss",
        "arguments": {"router_aux_loss_coef": 0.5},
    },
    "experts, generated": {
        "trainer": "grpo",
        "family": "olmoe",
        "arguments": {
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "router_aux_loss_coef": 0.5,
        },
    },
}


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in ONE_DEVICE if "experts" not in name),
        *sample([name for name in ONE_DEVICE if "experts" in name], 2),
    ],
)
def test_trainers_on_one_device(tmp_path, name):
    from tests.integrations.trl_ranks import train

    run = ONE_DEVICE[name]
    plain = train(run, str(tmp_path), None)["history"]
    plugin = SPPOPlugin(num_chunks=3, show_plan=False, **run.get("settings", {}))
    with family_check_disabled():  # what it would find is found here
        ours = train(run, str(tmp_path), plugin)["history"]
    steps = [(mine, other) for mine, other in zip(ours, plain, strict=True) if "loss" in other]
    assert len(steps) == 2
    assert max(other["grad_norm"] for _, other in steps) > 0.01
    for mine, other in steps:
        assert "sppo/step_seconds" in mine
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-5)
        assert mine["num_tokens"] == other["num_tokens"]
        assert ("aux_loss" in other) == ("experts" in name)
        if "aux_loss" in other:
            assert mine["aux_loss"] == pytest.approx(other["aux_loss"], rel=1e-5)


def _trained_on_images(
    folder: str, plugin: SPPOPlugin | None
) -> tuple[list[dict[str, float]], float]:
    """Three steps of Gemma 3 on one or two images a row, given as files are: by its processor."""
    tokenizer = byte_tokenizer()
    words = {"image": "<image>", "boi": "<start>", "eoi": "<end of image>"}
    tokenizer.add_special_tokens({"additional_special_tokens": [*words.values()]})
    for name, word in words.items():
        setattr(tokenizer, f"{name}_token", word)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(word))
    model = build_tiny_model("gemma3", dtype=torch.float32)
    torch.manual_seed(0)  # of the embeddings of new words
    model.resize_token_embeddings(len(tokenizer))
    model.config.image_token_id = tokenizer.image_token_id
    side = model.config.vision_config.image_size
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": side, "width": side}),
        tokenizer,
        image_seq_length=model.config.mm_tokens_per_image,
    )
    drawn = np.random.default_rng(0)
    rows = [
        {
            "images": [
                Image.fromarray(drawn.integers(0, 255, (2 * side, side, 3), dtype=np.uint8))
                for _ in range(count)
            ],
            "text": "see <start> " * count + "and tell" * index,
        }
        for index, count in enumerate([1, 2, 1, 2, 1, 1], start=1)
    ]
    trainer = trl.SFTTrainer(
        model=model,
        args=_three_steps(folder, plugin, max_length=None, remove_unused_columns=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
    )
    trainer.train()
    return _logged(trainer), trainer.evaluate(Dataset.from_list(rows))["eval_loss"]


def test_images(tmp_path: Path) -> None:
    plain, plain_loss = _trained_on_images(str(tmp_path), None)
    plugin = SPPOPlugin(num_chunks=3, offload="full", min_offload_size=1, show_plan=False)
    ours, loss = _trained_on_images(str(tmp_path), plugin)
    assert len(plain) == 3
    for mine, other in zip(ours, plain, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    assert loss == pytest.approx(plain_loss, rel=1e-5)


PIPELINE = {"pp_size": 2, "num_chunks": 2}
TRAINED = {
    "completions": {
        "trainer": "sft",
        "data": "completion",
        "eval": True,
        "arguments": {"eval_strategy": "steps", "eval_steps": 1},
    },
    "assistant": {
        "trainer": "sft",
        "data": "chat",
        "arguments": {"assistant_only_loss": True, "gradient_accumulation_steps": 2},
    },
    "packed, dft": {
        "trainer": "sft",
        "arguments": {"packing": True, "max_length": 40, "loss_type": "dft"},
    },
    "preferences": {"trainer": "dpo", "model": {"tie_word_embeddings": True}},
    "preferences, LoRA": {"trainer": "dpo", "lora": True},
    "desirable": {
        "trainer": "kto",
        "model": {"num_hidden_layers": 4},
        "settings": {"pp_schedule": "interleaved_seq1f1b", "pp_virtual_stages": 2},
    },
    "experts": {
        "trainer": "sft",
        "family": "mixtral",
        "eval": True,
        "arguments": {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "router_aux_loss_coef": 0.5,
            "gradient_accumulation_steps": 2,
        },
    },
    "experts, preferences": {
        "trainer": "dpo",
        "family": "qwen3_moe",
        "lora": True,
        "arguments": {"router_aux_loss_coef": 0.5},
    },
}
MERGED = {
    "assistant, packed, dft": {
        "trainer": "sft",
        "data": "chat",
        "arguments": {
            **TRAINED["packed, dft"]["arguments"],
            **TRAINED["assistant"]["arguments"],
        },
    },
    "desirable, tied": {
        **TRAINED["desirable"],
        "model": {**TRAINED["desirable"]["model"], **TRAINED["preferences"]["model"]},
    },
    "experts, preferences": TRAINED["experts, preferences"],
    "experts, completions": {**TRAINED["experts"], "data": "completion"},
}
"""Fewer runs, which have all that is special in these."""
RUNS = TRAINED if ALL else MERGED
OTHERS = [
    *([{"trainer": "calls"}] if ALL else []),
    {
        "trainer": "calls",
        "model": {"num_hidden_layers": 4},
        "settings": {"pp_schedule": "interleaved_seq1f1b", "pp_virtual_stages": 2},
    },
]
REWARDS = {
    **ONE_DEVICE["rewards"],
    "arguments": {"eval_strategy": "steps", "eval_steps": 1, "gradient_accumulation_steps": 2},
}


def _on_two_ranks(runs: list[dict], folder: Path) -> list[dict]:
    folder.mkdir()
    out = folder / "result.json"
    job = {"runs": runs, "out": str(out)}
    run_ranks("tests.integrations.trl_ranks", job, 2, folder, timeout_seconds=180)
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", ["GRPO", "Reward"])
def test_trainers_that_stages_cannot_run_are_refused(tmp_path, kind):
    args = getattr(trl, f"{kind}Config")(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    allowed = rf"SFTTrainer, DPOTrainer, KTOTrainer\. Remedy: {kind}Trainer with pp_size=1"
    with pytest.raises(ConfigError, match=rf"^TRL's {kind}Trainer generates .*{allowed}"):
        check_shared_batches(args, SPPOConfig(pp_size=2))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_two_ranks_train_as_one_process_does(tmp_path):
    """Two stages, in one launch with losses that callers make; and a shared sequence."""
    from tests.integrations.trl_ranks import train

    (tmp_path / "plain").mkdir()
    plain = {name: train(run, str(tmp_path / "plain"), None) for name, run in RUNS.items()}
    stages = [
        {**run, "settings": {**PIPELINE, **run.get("settings", {})}}
        for run in (*RUNS.values(), *OTHERS)
    ]
    found = _on_two_ranks(stages, tmp_path / "stages")
    for name, ours in zip(RUNS, found, strict=False):
        _assert_same_run(ours, plain[name])
    _assert_losses_of_callers(found[len(RUNS) :])

    # What is left out has experts as the preferences do, and is evaluated as rewards are.
    runs = {name: run for name, run in RUNS.items() if ALL or name != "experts, completions"}
    runs["rewards"] = REWARDS
    plain["rewards"] = train(REWARDS, str(tmp_path / "plain"), None)
    shared = [{**run, "settings": {"sp_size": 2, "num_chunks": 2}} for run in runs.values()]
    found = _on_two_ranks(shared, tmp_path / "sequences")
    for name, ours in zip(runs, found, strict=True):
        _assert_same_run(ours, plain[name])


def _assert_same_run(ours: dict, plain: dict) -> None:
    assert len(ours["history"]) == len(plain["history"]) >= 3
    compared = 0
    for mine, theirs in zip(ours["history"], plain["history"], strict=True):
        assert mine.keys() >= {key for key in theirs if not key.startswith("eval_runtime")}
        for key, expected in theirs.items():
            # Rewards are differences of sums of log-probabilities, which are about 100.
            near = {"grad_norm": 2e-5, "rewards": 1e-3, "kl": 1e-4, "logits": 1e-3}
            if not key.endswith(("runtime", "per_second")):
                rel = near.get(key.partition("/")[0], 1e-5)
                assert mine[key] == pytest.approx(expected, rel=rel, abs=1e-6), key
                compared += key in ("loss", "grad_norm", "entropy", "num_tokens", "eval_loss")
    assert compared >= 4 * 2
    assert 0 < len(ours["weights"]) <= len(plain["weights"])
    for key, norm in ours["weights"].items():
        assert norm == pytest.approx(plain["weights"][key], rel=1e-5), key


def _assert_losses_of_callers(runs: list[dict]) -> None:
    for found in runs:
        # The same sums, in whatever order gradients become known, and the same dropout.
        assert found.pop("mean") == 0.0
        assert found.pop("weighed") == 0.0
        assert found.pop("no label") == 0.0
        assert found.keys() == {"plain mean", "plain twice"}
        assert max(found.values()) < 1e-5
