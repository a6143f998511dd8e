"""Fine-tune a causal language model on long documents, with the standard Trainer.

    python recipes/finetune.py
    python recipes/finetune.py --model_name_or_path DIR --dataset notes.jsonl --max_length 16384
    python recipes/finetune.py --sppo_enabled false          # the same run without sppo_hf

Only one argument is ours: `parallelism_config`. Without options it trains SmolLM2-135M-Instruct on
the source code of the installed Python packages, offline: 4,096 tokens on a CPU, 65,536 on a GPU.
Exit status 1 says that the held-out loss did not fall, or that what was saved is not what was
trained.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from documents import Split, load_documents, split_documents
from options import RecipeArguments, parse
from packing import RightPaddingCollator, pack_documents, spread_rows
from peft import LoraConfig, PeftModel, get_peft_model
from report import host_bytes, show, summarise
from smollm2 import load_model, load_tokenizer
from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

from sppo_hf.engine.structure import suppress_peft_warnings


def prepare_rows(recipe: RecipeArguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> Split:
    """Training and held-out rows; documents are held out whole, before they are cut to rows."""
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
    loaded_host_bytes = host_bytes()

    if recipe.sppo_enabled:
        training.parallelism_config = sppo.to_plugin()  # the one argument that is ours
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
