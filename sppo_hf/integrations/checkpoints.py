"""Checkpoints of pipeline runs, by Trainer or Accelerator, and resuming from them anywhere.

In a pipeline all ranks write and read what they hold. The Trainer's methods are replaced on the
instance (`TrainerMethods`) and call the Trainer's own for everything else. The formats of the files
are in `sppo_hf.pipeline.checkpoint*`.

[Note: rotation comes last]
The Trainer deletes old checkpoints inside `_save_checkpoint`. Here that waits until the new one is
marked as complete, so that a crash at any moment leaves a complete one.

[Note: no optimizer.pt]
A Trainer without SPPO wants the whole optimizer in one file, written by one process that holds all
of it in memory: 64 GB for Adam and 8 billion parameters, and as much again on disk beside the
ranks' own files. So that file is made on request, by `export_optimizer`. A text file next to where
it would be explains this; its name begins with `optimizer.pt`, which the Trainer's error names.

[Note: what is unpickled]
`save_state` and `load_state` leave schedulers, samplers, counters and registered objects to
Accelerate, which unpickles registered objects (`register_for_checkpointing`); that may run code.
Nothing else that is loaded here does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.model_parts import find_causal_lm, patched_attribute
from sppo_hf.engine.stages import staged_model_of
from sppo_hf.errors import ConfigError
from sppo_hf.integrations.trainer import TrainerMethods
from sppo_hf.pipeline.checkpoint import (
    find_damage_together,
    load_weights,
    rank_coords_of,
    save_weights,
    saving,
)
from sppo_hf.pipeline.checkpoint_files import (
    TRAINER_STATE_NAME,
    check_complete,
    newest_complete,
    read_json,
    read_mark,
    reading,
    refuse_other_files,
    writing,
)
from sppo_hf.pipeline.checkpoint_state import (
    has_state,
    load_full_optimizer_state,
    load_random_state,
    load_state,
    read_full_state,
    save_state,
)
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.watchdog import collective_section

logger = logging.getLogger(__name__)

OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME = "optimizer.pt", "scheduler.pt", "scaler.pt"
EXPORT_NOTE_NAME = "optimizer.pt.README.txt"
_EXPORT_NOTE = """\
This checkpoint was saved by a pipeline of sppo_hf. Its optimizer is in sppo_optimizer/, in one file
per rank, and SPPO resumes from it with any number of ranks, also in one process.

A Trainer without SPPO looks for optimizer.pt here. To make it, run this once in this folder, on a
machine whose memory holds the whole optimizer (8 bytes per trained parameter for Adam in float32):

    python -c "from sppo_hf.integrations.checkpoints import export_optimizer; export_optimizer('.')"
"""


def is_cut(model: nn.Module | None) -> bool:
    """Whether `model` runs in a pipeline, so that this rank holds only a part of it."""
    return model is not None and isinstance(get_engine(model), PipelineEngine)


class TrainerCheckpoints(TrainerMethods):
    """The methods of one Trainer that save and load."""

    replaced = (
        *("train", "save_model", "_save_checkpoint", "_save_optimizer_and_scheduler"),
        *("_save_rng_state", "_load_from_checkpoint", "_load_best_model"),
        *("_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler"),
    )

    @property
    def _in_pipeline(self) -> bool:
        return is_cut(self._trainer.model)

    @collective_section()
    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train; `resume_from_checkpoint=True` takes the newest complete checkpoint.

        Raises:
            ConfigError: The named checkpoint is incomplete, or all are; or one of its files is
                damaged.
        """
        if resume_from_checkpoint is True:
            found = _newest_checkpoint(Path(self._trainer.args.output_dir))
            resume_from_checkpoint = True if found is None else str(found)
        elif resume_from_checkpoint:
            check_complete(Path(resume_from_checkpoint), find_damage_together)
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            _check_trainer_state(Path(resume_from_checkpoint) / TRAINER_STATE_NAME)
        if getattr(self._trainer, "_tp_size", 1) > 1:
            # TRL divides gathered token counts by it, but `gather_for_metrics` counts each once.
            self._trainer._tp_size = 1
        return self._kind.train(self._trainer, resume_from_checkpoint, *args, **kwargs)

    # -- saving ------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; in a pipeline every process calls this."""
        trainer = self._trainer
        folder = trainer.args.output_dir if output_dir is None else output_dir
        if not self._in_pipeline:
            with collective_section(f"saving {Path(folder).name}"):
                self._kind.save_model(trainer, output_dir, _internal_call=_internal_call)
            return
        with saving(folder, rank_coords_of(trainer.model)):
            save_weights(trainer.model, folder)
            # Tokenizer, arguments, and whatever a subclass adds, without the weights.
            with patched_attribute("save_pretrained", {trainer.model: lambda *_, **__: None}):
                self._kind.save_model(trainer, folder, _internal_call=True)
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, and delete old ones after that; see [Note: rotation comes last]."""
        from transformers.trainer_utils import rotate_checkpoints

        trainer = self._trainer
        args, state = trainer.args, trainer.state
        name = f"checkpoint-{state.global_step}"
        run_folder = trainer._get_output_dir(trial=trial)
        if not self._in_pipeline:
            if trainer.is_fsdp_enabled:
                # Each rank notes the best checkpoint if its folder is there when the model has been
                # saved. FSDP makes it later, so some ranks might see it, and these alone load it.
                os.makedirs(os.path.join(run_folder, name), exist_ok=True)
            with collective_section(f"saving {name}"):
                self._kind._save_checkpoint(trainer, model, trial)
            return
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            folder = os.path.join(run_folder, name)
            with saving(folder, rank_coords_of(trainer.model)):
                self._kind._save_checkpoint(trainer, model, trial)
        finally:
            args.save_total_limit = limit
        if args.should_save:
            rotate_checkpoints(
                output_dir=run_folder,
                save_total_limit=limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer = self._trainer
        if not self._in_pipeline:
            self._kind._save_optimizer_and_scheduler(trainer, output_dir)
            return
        save_state(output_dir, trainer.model, [trainer.optimizer], [trainer.lr_scheduler])
        if trainer.args.should_save:
            # A Trainer without SPPO that finds this file fails for want of optimizer.pt; without
            # it, it would silently go on with a fresh optimizer.
            state = trainer.lr_scheduler.state_dict()
            torch.save(state, os.path.join(output_dir, SCHEDULER_NAME))
            Path(output_dir, EXPORT_NOTE_NAME).write_text(_EXPORT_NOTE, encoding="utf-8")

    def _save_rng_state(self, output_dir: str) -> None:
        if not self._in_pipeline:
            self._kind._save_rng_state(self._trainer, output_dir)
            # One rank writes the Trainer's state next, which stands for the mark of a complete
            # checkpoint: not before all have written theirs.
            self._trainer.accelerator.wait_for_everyone()

    # -- loading -----------------------------------------------------------------------------

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load weights into a whole model or a cut one."""
        trainer = self._trainer
        model = model or trainer.model
        assert model is not None, "a Trainer that resumes has a model"
        from_pipeline = read_mark(Path(resume_from_checkpoint)) is not None
        if not is_cut(model) and (not from_pipeline or trainer.is_fsdp_enabled):
            with _naming_damaged_file(resume_from_checkpoint):
                self._kind._load_from_checkpoint(trainer, resume_from_checkpoint, model)
            return
        logger.info("Loading model from %s.", resume_from_checkpoint)
        load_weights(model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        trainer = self._trainer
        if not self._in_pipeline:
            self._kind._load_best_model(trainer)
            return
        best = trainer.state.best_model_checkpoint
        logger.info("Loading best model from %s (score: %s).", best, trainer.state.best_metric)
        load_weights(trainer.model, best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both, from a checkpoint of any number of ranks, with or without a pipeline."""
        trainer = self._trainer
        if checkpoint is not None and has_state(checkpoint):
            if trainer.is_fsdp_enabled:
                raise ConfigError(
                    f"{checkpoint!r} was saved by a pipeline, and FSDP shards this run's "
                    "optimizer. Allowed: resuming in a pipeline, in one process, or under DDP. "
                    "Remedy: drop FSDP, or resume the weights alone (save_only_model)."
                )
            load_state(checkpoint, trainer.model, [trainer.optimizer], [trainer.lr_scheduler])
            return
        plain = None if checkpoint is None else os.path.join(checkpoint, OPTIMIZER_NAME)
        if plain is None or not self._in_pipeline or not os.path.isfile(plain):
            with _naming_damaged_file(checkpoint):
                self._kind._load_optimizer_and_scheduler(trainer, checkpoint)
            return
        with reading(plain):
            state = torch.load(plain, map_location="cpu", weights_only=True)
            load_full_optimizer_state(state, trainer.model, trainer.optimizer)
        scheduler = os.path.join(str(checkpoint), SCHEDULER_NAME)
        with reading(scheduler):
            trainer.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the random states; `checkpoint_state.py` says of which rank."""
        if checkpoint is None or not has_state(checkpoint):
            args = self._trainer.args
            name = f"rng_state_{args.process_index}" if args.world_size > 1 else "rng_state"
            with reading(os.path.join(str(checkpoint), f"{name}.pth")):
                self._kind._load_rng_state(self._trainer, checkpoint)
        else:
            load_random_state(checkpoint, self._trainer.model)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with reading(os.path.join(str(checkpoint), SCALER_NAME)):
            self._kind._load_scaler(self._trainer, checkpoint)


def export_optimizer(folder: str | Path) -> None:
    """Add `optimizer.pt` and `scheduler.pt` to a pipeline's checkpoint, in one process.

    A Trainer without SPPO can then resume from it; see [Note: no optimizer.pt]. Needs host memory
    for the whole optimizer.

    Args:
        folder: A `checkpoint-N` of a pipeline run.

    Raises:
        ConfigError: The folder is torn or damaged, or holds no optimizer of a pipeline.
        PipelineError: A file could not be written.
    """
    folder = Path(folder)
    check_complete(folder)
    if not has_state(folder):
        raise ConfigError(
            f"{str(folder)!r} holds no optimizer that a pipeline saved. Allowed: checkpoint-N "
            "folders of runs with pp_size > 1 and without save_only_model. Remedy: none is needed "
            "if the folder has optimizer.pt."
        )
    optimizer, schedulers = read_full_state(folder)
    if not schedulers:
        raise ConfigError(
            f"{str(folder)!r} holds no scheduler. Allowed: checkpoint-N folders that a Trainer "
            "saved. Remedy: load it by Accelerator.load_state, which needs no optimizer.pt."
        )
    for value, name in ((optimizer, OPTIMIZER_NAME), (schedulers[0], SCHEDULER_NAME)):
        fresh = folder / f"{name}.new"
        with writing(folder / name):
            try:
                torch.save(value, fresh)
                fresh.replace(folder / name)
            finally:
                fresh.unlink(missing_ok=True)
    (folder / EXPORT_NOTE_NAME).unlink(missing_ok=True)


def refuse_partial_save(model: nn.Module) -> None:
    """Make `save_pretrained` of a cut model, and of its PEFT wrapper, refuse to write a part."""
    for module in {id(m): m for m in (model, find_causal_lm(model))}.values():
        if hasattr(module, "save_pretrained"):
            module.__dict__["save_pretrained"] = types.MethodType(_save_pretrained, module)


def _save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_cut(self):
        return type(self).save_pretrained(self, *args, **kwargs)
    if kwargs.get("state_dict") is None:
        raise ConfigError(
            f"{type(self).__name__}.save_pretrained would write the part of the model that this "
            "rank of the pipeline holds. Allowed: saves by all ranks together. Remedy: "
            "trainer.save_model(folder) or accelerator.save_model(model, folder), on every rank."
        )
    # A given state dict holds the whole model's weights, from Accelerator.get_state_dict.
    staged = staged_model_of(find_causal_lm(self))
    with contextlib.nullcontext() if staged is None else staged.whole_ties():
        return type(self).save_pretrained(self, *args, **kwargs)


@contextlib.contextmanager
def _naming_damaged_file(folder: str | None) -> Iterator[None]:
    """Name the damaged file when the Trainer fails to read one of its checkpoints."""
    try:
        yield
    except Exception:
        for path in sorted(Path(folder).iterdir()) if folder and os.path.isdir(folder) else ():
            if path.suffix in (".safetensors", ".json", ".pt"):
                with reading(path):
                    refuse_other_files(path)
                    _read_whole(path)
        raise


def _read_whole(path: Path) -> None:
    """Read a file that a Trainer loads when it resumes; raises whatever reading it raises."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            file.keys()
    elif path.suffix == ".json":
        read_json(path)
    elif path.name in (OPTIMIZER_NAME, SCHEDULER_NAME):
        torch.load(path, map_location="cpu", weights_only=True)


def _check_trainer_state(path: Path) -> None:
    """Refuse a file of the Trainer's state that the Trainer cannot read."""
    from transformers import TrainerState

    if path.exists():
        read_json(path)
        with reading(path):
            TrainerState.load_from_json(str(path))


def _newest_checkpoint(run_folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, with a warning about newer incomplete ones.

    None where there is no checkpoint at all.
    """
    newest, incomplete = newest_complete(run_folder, find_damage_together)
    if incomplete:
        reasons = "; ".join(f"{str(folder)!r}: {reason}" for folder, reason in incomplete.items())
        if newest is None:
            raise ConfigError(
                f"No checkpoint in {str(run_folder)!r} is complete ({reasons}). Allowed: resuming "
                "from complete ones. Remedy: delete the torn ones and start anew."
            )
        warnings.warn(
            f"Torn checkpoints are passed over ({reasons}); resuming from {str(newest)!r}, the "
            "newest complete one.",
            stacklevel=3,
        )
    return newest


def save_pipeline_state(accelerator: Any, save: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Save the state of a pipeline run; every process calls this.

    Args:
        accelerator: The SPPOAccelerator.
        save: Accelerate's own `save_state`, which makes the folder and writes all but models and
            optimizers.
        *args: Of `save`.
        **kw: Of `save`.

    Returns:
        The folder.

    Raises:
        ConfigError: More than one model was prepared.
    """
    with _without_model_and_optimizers(accelerator) as (model, optimizers):
        folder = save(*args, **kw)
    with saving(folder, rank_coords_of(model)):
        save_weights(model, folder)
        save_state(folder, model, optimizers, [])
    return folder


def load_pipeline_state(
    accelerator: Any, load: Callable[..., Any], input_dir: str | None, *args: Any, **kw: Any
) -> None:
    """Load what `save_pipeline_state` or Accelerate's own `save_state` wrote.

    Args:
        accelerator: The SPPOAccelerator.
        load: Accelerate's own `load_state`.
        input_dir: The folder; None takes the newest of those that Accelerate names automatically.
        *args: Of `load`.
        **kw: Of `load`.

    Raises:
        ConfigError: The folder is incomplete or damaged, or holds another model or optimizers.
    """
    folder = (
        Path(os.path.expanduser(input_dir))
        if input_dir
        else _newest_named_automatically(accelerator)
    )
    if folder is None or not folder.is_dir():
        load(input_dir, *args, **kw)  # raises Accelerate's own error
        return
    if read_mark(folder) is not None:
        check_complete(folder, find_damage_together)
    with _without_model_and_optimizers(accelerator) as (model, optimizers):
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
            load_full_optimizer_state(state, model, optimizer)


@contextlib.contextmanager
def _without_model_and_optimizers(accelerator: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Hide the model and the optimizers from Accelerate, which would save those of rank 0 alone.

    Yields:
        The unwrapped model and the optimizers.
    """
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


def _newest_named_automatically(accelerator: Any) -> Path | None:
    """Return the newest complete `checkpoint_N` of an Accelerator's project folder, if any."""
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    folder = Path(accelerator.project_dir) / "checkpoints"
    numbered = [p for p in folder.glob("checkpoint_*") if p.name.rpartition("_")[2].isdigit()]
    for found in sorted(numbered, key=lambda p: int(p.name.rpartition("_")[2]), reverse=True):
        # What Accelerate itself saved has no mark.
        if read_mark(found) is None or find_damage_together(found) is None:
            return found
    return None
