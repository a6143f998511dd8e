"""`save_state` and `load_state` of an Accelerator in a pipeline run.

Models and optimizers are written and read by `sppo_hf.runtime`; schedulers, samplers, counters and
registered objects stay Accelerate's business. Of these, Accelerate unpickles the registered objects
(`register_for_checkpointing`), which may run code; nothing else does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sppo_hf.errors import ConfigError
from sppo_hf.runtime.checkpoint import place_of, saving, torn_for_all
from sppo_hf.runtime.checkpoint_files import reading
from sppo_hf.runtime.checkpoint_marks import read_mark, refuse_torn
from sppo_hf.runtime.checkpoint_state import (
    has_state,
    load_plain_optimizer,
    load_random_state,
    load_state,
    save_state,
)
from sppo_hf.runtime.checkpoint_weights import load_weights, save_weights


def save_pipeline_state(accelerator: Any, save: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Save everything into a folder; every process calls this.

    Args:
        accelerator: Has one prepared model, cut.
        save: Accelerate's own `save_state`, which makes the folder and returns it.
        *args: For `save`.
        **kw: For `save`.

    Raises:
        ConfigError: More than one model was prepared.
    """
    with _taken_out(accelerator) as (model, optimizers):
        folder = save(*args, **kw)
    with saving(folder, place_of(model)):
        save_weights(model, folder)
        save_state(folder, model, optimizers, [])
    return folder


def load_pipeline_state(
    accelerator: Any, load: Callable[..., Any], input_dir: str | None, *args: Any, **kw: Any
) -> None:
    """Load what `save_pipeline_state` or Accelerate's own `save_state` wrote.

    Args:
        accelerator: Has one prepared model, cut.
        load: Accelerate's own `load_state`.
        input_dir: The folder; None for the newest of those that are named automatically.
        *args: For `load`.
        **kw: For `load`.

    Raises:
        ConfigError: The folder is torn or damaged, or holds another model or other optimizers.
    """
    folder = Path(os.path.expanduser(input_dir)) if input_dir else _newest(accelerator)
    if folder is None or not folder.is_dir():
        load(input_dir, *args, **kw)  # which says what is wrong
        return
    if read_mark(folder) is not None:
        refuse_torn(folder, torn_for_all)
    with _taken_out(accelerator) as (model, optimizers):
        load(str(folder), *args, **kw)
    load_weights(model, folder)
    if has_state(folder):
        load_state(folder, model, optimizers, [])
        load_random_state(folder, model)
        return
    for number, optimizer in enumerate(optimizers):
        name = f"optimizer_{number}.bin" if number else "optimizer.bin"
        with reading(folder / name):
            state = torch.load(folder / name, map_location="cpu", weights_only=True)
            load_plain_optimizer(state, model, optimizer)


@contextlib.contextmanager
def _taken_out(accelerator: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Hide the model and the optimizers, which Accelerate would save from the first rank alone."""
    models, optimizers = accelerator._models, accelerator._optimizers
    if len(models) != 1:
        raise ConfigError(
            f"{len(models)} models are prepared, and the state of a pipeline run holds one. "
            "Allowed: one model per Accelerator with pp_size > 1. Remedy: prepare the others by "
            "another Accelerator, or save them by hand."
        )
    accelerator._models, accelerator._optimizers = [], []
    try:
        yield accelerator.unwrap_model(models[0]), optimizers
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers


def _newest(accelerator: Any) -> Path | None:
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    folder = Path(accelerator.project_dir) / "checkpoints"
    numbered = [p for p in folder.glob("checkpoint_*") if p.name.rpartition("_")[2].isdigit()]
    for found in sorted(numbered, key=lambda p: int(p.name.rpartition("_")[2]), reverse=True):
        # What Accelerate itself saved has no mark.
        if read_mark(found) is None or torn_for_all(found) is None:
            return found
    return None
