"""A training script that knows nothing of SPPO, for the tests of `sppo plan --write`.

    train_planned.py CONFIG TOKENS ROWS ACCUMULATED OUTPUT

Trains a model with random weights for a step on the CPU, on rows of TOKENS tokens, and writes last
what it was wrapped in to OUTPUT/wrapper.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from tests.integrations.training import make_arguments

if __name__ == "__main__":
    tokens, rows, accumulated = map(int, sys.argv[2:5])
    fields = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    ids = torch.arange(tokens) % fields["vocab_size"]
    args = make_arguments(
        sys.argv[5],
        max_steps=1,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulated,
    )
    rows_of_all = [{"input_ids": ids, "labels": ids}] * (8 * rows * accumulated)
    trainer = Trainer(model, args, train_dataset=rows_of_all)
    trainer.train()
    Path(sys.argv[5], "wrapper").write_text(type(trainer.model_wrapped).__name__)
