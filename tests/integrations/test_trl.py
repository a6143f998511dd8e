"""TRL's SFTTrainer, unchanged but for one argument: it puts a head of its own on the model."""

import pytest
import torch

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
        eval_dataset=Dataset.from_list(rows),
        compute_metrics=lambda prediction: {"ids": float(prediction.predictions.sum())},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    keys = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    logs = [{k: log[k] for k in keys} for log in trainer.state.log_history if "loss" in log]
    metrics = trainer.evaluate()
    return logs, {k: metrics[k] for k in ("eval_loss", "eval_entropy", "eval_ids")}, model


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
