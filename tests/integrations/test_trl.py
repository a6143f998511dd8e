"""TRL's SFTTrainer, unchanged but for one argument: it puts a head of its own on the model."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from sppo_hf import SPPOPlugin
from sppo_hf.model.convert import get_engine, is_converted
from sppo_hf.model.tiny import build_tiny_model
from tests.fakes.tokenizer import byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's own making

trl = pytest.importorskip("trl", reason="needs the extra `trl`")
Dataset = pytest.importorskip("datasets").Dataset


def _train(tmp_path, plugin, **settings):
    model = build_tiny_model("llama", dtype=torch.float32, vocab_size=258)
    rows = [{"input_ids": [(7 * i + j) % 97 for j in range(20 + 3 * i)]} for i in range(6)]
    args = trl.SFTConfig(
        output_dir=str(tmp_path),
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
    trainer = trl.SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    keys = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    return [{k: log[k] for k in keys} for log in trainer.state.log_history if "loss" in log], model


def _rewarded(tmp_path, plugin):
    """Two steps of GRPO; the reward comes from a model that scores whole sequences."""
    torch.manual_seed(0)
    # The reference of the KL term is loaded by the policy's name.
    build_tiny_model("llama", dtype=torch.float32, vocab_size=258).save_pretrained(tmp_path / "it")
    policy = LlamaForCausalLM.from_pretrained(tmp_path / "it")
    tokenizer = byte_tokenizer()
    config = copy.deepcopy(policy.config)
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    judge = LlamaForSequenceClassification(config)
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


def test_grpo_with_a_reward_model_that_cannot_be_converted(tmp_path):
    expected, _, _ = _rewarded(tmp_path, None)
    ours, policy, judge = _rewarded(tmp_path, SPPOPlugin(num_chunks=3, show_plan=False))
    assert is_converted(policy)
    assert get_engine(judge) is None
    assert len(ours) == len(expected) == 2
    assert any(log["grad_norm"] > 0 for log in expected)
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("packing", [False, True])
def test_the_same_run_with_and_without_the_plugin(tmp_path, packing):
    settings = {"packing": True, "max_length": 40} if packing else {}
    expected, _ = _train(tmp_path, None, **settings)
    ours, model = _train(tmp_path, SPPOPlugin(num_chunks=3, show_plan=False), **settings)
    assert is_converted(model)
    assert get_engine(model).counters["attention_forwards"] >= 3 * 3 * 3
    assert len(ours) == len(expected) == 3
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
