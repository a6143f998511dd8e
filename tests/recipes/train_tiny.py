"""A training script that knows nothing of SPPO, for the tests of recipes/configs.

    train_tiny.py FOLDER ROWS_PER_DEVICE LAYERS|FAMILY

Trains a Llama of so many layers, or a tiny model of FAMILY, for two steps on the CPU; rank 0 writes
its log to FOLDER/history.json, and last what the model was wrapped in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import Trainer

from sppo_hf.testing.tiny_models import build_tiny_model
from tests.integrations.training import make_arguments, make_model, make_rows

if __name__ == "__main__":
    folder, rows = Path(sys.argv[1]), int(sys.argv[2])
    args = make_arguments(folder, max_steps=2, per_device_train_batch_size=rows)
    if sys.argv[3].isdigit():
        sizes = {"num_attention_heads": 8, "num_key_value_heads": 4}
        model = make_model(num_hidden_layers=int(sys.argv[3]), **sizes)
    else:
        model = build_tiny_model(sys.argv[3], dtype=torch.float32)
    trainer = Trainer(model, args, train_dataset=make_rows(32))
    trainer.train()
    if args.process_index == 0:
        wrapper = {"wrapper": type(trainer.model_wrapped).__name__}
        (folder / "history.json").write_text(json.dumps([*trainer.state.log_history, wrapper]))
