"""The command line of `finetune.py`: its own options, and the Trainer's and SPPO's beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from documents import INSTALLED_PACKAGES
from smollm2 import DEFAULT_MODEL
from transformers import HfArgumentParser, TrainingArguments

from sppo_hf import SPPOArguments

ON_GPU = torch.cuda.is_available()


@dataclass
class RecipeArguments:
    """What this script can be told beside the Trainer's and SPPO's own options."""

    model_name_or_path: str = field(default=DEFAULT_MODEL, metadata={"help": "Hub id or folder."})
    dataset: str = field(
        default=INSTALLED_PACKAGES,
        metadata={"help": "Hub id, or a local jsonl/parquet/text file or folder of such files."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of a hub dataset."})
    text_column: str | None = field(default=None, metadata={"help": "Column with the text."})
    eval_dataset: str | None = field(
        default=None, metadata={"help": "Held-out documents; default: 10% of the dataset's."}
    )
    max_length: int = field(
        default=65_536 if ON_GPU else 4_096, metadata={"help": "Tokens in a row."}
    )
    max_train_rows: int = field(default=64, metadata={"help": "Rows to choose training from."})
    max_eval_rows: int = field(default=2, metadata={"help": "Held-out rows."})
    rope_scaling: str = field(
        default="auto",
        metadata={
            "choices": ["auto", "none", "yarn"],
            "help": "Beyond the model's rotary range: auto stretches plain rotary by YaRN.",
        },
    )
    full_finetune: bool = field(default=False, metadata={"help": "All weights, not LoRA."})
    lora_rank: int = field(default=16, metadata={"help": "Rank of the LoRA adapters."})
    sppo_enabled: bool = field(default=True, metadata={"help": "false: the unmodified model."})


def parse(argv: list[str]) -> tuple[RecipeArguments, TrainingArguments, SPPOArguments]:
    """Reads the command line; an option of the Trainer has its usual name and our default."""
    # Read twice, because some of the Trainer's defaults depend on the recipe's own options.
    own = HfArgumentParser(RecipeArguments, add_help=False, allow_abbrev=False)
    recipe, _ = own.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    parser = HfArgumentParser(
        (RecipeArguments, TrainingArguments, SPPOArguments), allow_abbrev=False
    )
    parser.set_defaults(
        output_dir="outputs/finetune",
        max_steps=20 if ON_GPU else 4,
        learning_rate=5e-5 if recipe.full_finetune else 1e-3,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        bf16=ON_GPU and torch.cuda.is_bf16_supported(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        prediction_loss_only=True,
        dataloader_pin_memory=ON_GPU,
    )
    return parser.parse_args_into_dataclasses(argv)
