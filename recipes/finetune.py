"""Fine-tune a causal language model on long documents, with the standard Trainer.

    python recipes/finetune.py
    python recipes/finetune.py --model_name_or_path DIR --dataset notes.jsonl --max_length 16384
    python recipes/finetune.py --sppo_enabled false          # the same run without sppo_hf

One argument is SPPO's: `parallelism_config`. Without options it trains SmolLM2-135M-Instruct on
the source code of the installed Python packages, offline: 4,096 tokens on a CPU, 65,536 on a GPU.
The exit status is 1 if the held-out loss did not fall, or the saved model differs from the trained
one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from documents import INSTALLED_PACKAGES, Split, load_documents, split_documents
from packing import RightPaddingCollator, pack_documents, spread_rows
from peft import LoraConfig, PeftModel, get_peft_model
from report import loaded_bytes, show, summarise
from smollm2 import DEFAULT_MODEL, load_model, load_tokenizer
from transformers import (
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from sppo_hf import SPPOArguments
from sppo_hf.engine.model_parts import suppress_peft_warnings

ON_GPU = torch.cuda.is_available()


@dataclass
class RecipeArguments:
    """Options of this script, beside those of the Trainer and of SPPO."""

    model_name_or_path: str = field(default=DEFAULT_MODEL, metadata={"help": "Hub id or folder."})
    dataset: str = field(
        default=INSTALLED_PACKAGES,
        metadata={"help": "Hub id, or a local jsonl/parquet/text file or folder of such files."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of a hub dataset."})
    text_column: str | None = field(default=None, metadata={"help": "Column with the text."})
    eval_dataset: str | None = field(
        default=None, metadata={"help": "Held-out documents; default: a tenth of the dataset's."}
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
    """Parse the command line; the Trainer's options have other defaults here."""
    # Parsed twice, because some of these defaults depend on the recipe's own options.
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


def prepare_rows(recipe: RecipeArguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> Split:
    """Return training and held-out rows, of different documents."""
    documents = load_documents(
        recipe.dataset, split=recipe.dataset_split, text_column=recipe.text_column
    )
    if recipe.eval_dataset:
        parts = Split(
            documents,
            load_documents(
                recipe.eval_dataset, split=recipe.dataset_split, text_column=recipe.text_column
            ),
        )
    else:
        parts = split_documents(documents, seed=seed)
    train, held_out = (
        pack_documents(part, tokenizer, max_length=recipe.max_length) for part in parts
    )
    return Split(
        spread_rows(train, recipe.max_train_rows), spread_rows(held_out, recipe.max_eval_rows)
    )


def main(argv: list[str]) -> int:
    recipe, training, sppo = parse(argv)
    set_seed(training.seed)
    folder = Path(training.output_dir)
    saved_to = folder / ("model" if recipe.full_finetune else "adapter")
    half = training.bf16 and not recipe.full_finetune
    load_base = partial(
        load_model,
        dtype=torch.bfloat16 if half else torch.float32,
        max_length=recipe.max_length,
        rope_scaling=recipe.rope_scaling,
    )

    tokenizer = load_tokenizer(recipe.model_name_or_path)
    rows = prepare_rows(recipe, tokenizer, seed=training.seed)
    model = load_base(recipe.model_name_or_path)
    if not recipe.full_finetune:
        rank = recipe.lora_rank
        lora = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        with suppress_peft_warnings():
            model = get_peft_model(model, lora)
    loaded_host_bytes = loaded_bytes(model)

    if recipe.sppo_enabled:
        training.parallelism_config = sppo.to_plugin()  # the one argument that switches SPPO on
    trainer = Trainer(
        model=model,
        args=training,
        data_collator=RightPaddingCollator(pad_token_id=tokenizer.pad_token_id),
        train_dataset=rows.train,
        eval_dataset=rows.held_out,
        processing_class=tokenizer,
    )
    loss_before = trainer.evaluate()["eval_loss"]
    trained = trainer.train()
    loss_after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(saved_to))
    is_main = trainer.is_world_process_zero()
    trainer.accelerator.end_training()  # several processes leave their group together
    if not is_main:
        return 0

    if recipe.full_finetune:
        reloaded = load_base(str(saved_to))
    else:
        with suppress_peft_warnings():
            base = load_base(recipe.model_name_or_path)
            reloaded = PeftModel.from_pretrained(base, str(saved_to))
    report = summarise(
        trainer,
        trained,
        reloaded,
        model=recipe.model_name_or_path,
        dataset=recipe.dataset,
        sppo_enabled=recipe.sppo_enabled,
        loss_before=loss_before,
        loss_after=loss_after,
        loaded_host_bytes=loaded_host_bytes,
        saved_to=str(saved_to),
    )
    show(report, folder)
    return 1 if report.failures() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
