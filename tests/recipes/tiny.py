"""A tiny random model with its tokenizer, and a few documents, as users have them on disk."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sppo_hf.testing.tiny_models import build_tiny_model
from tests.fakes.tokenizer import byte_tokenizer

SENTENCES = (
    "the loop reads a slice of tokens and keeps what the next slice needs. ",
    "a frame is opened before a layer runs and closed when it has run. ",
    "what is copied out comes back one step before it is needed. ",
)


def save_tiny_model(folder: Path, family: str | None = None) -> Path:
    """A two-layer Llama with grouped heads and a byte tokenizer; random, always the same.

    Or a tiny model of another family, with Transformers' own first weights.
    """
    tokenizer = byte_tokenizer()
    if family is not None:
        model = build_tiny_model(family, vocab_size=len(tokenizer), dtype=torch.float32)
        torch.manual_seed(0)
        type(model)(model.config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def texts(count: int = 12) -> list[str]:
    """Documents that differ, and that have enough in common to be learned from."""
    return [f"note {i}. " + SENTENCES[i % 3] * (3 + i % 4) for i in range(count)]


def save_jsonl(path: Path) -> Path:
    """The documents as a table."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return path


def save_text_folder(folder: Path) -> Path:
    """The documents as a folder of text files."""
    folder.mkdir()
    for index, text in enumerate(texts()):
        (folder / f"note_{index:02}.txt").write_text(text)
    return folder
