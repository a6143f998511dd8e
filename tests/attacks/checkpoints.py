"""Attacks on checkpoints: damaged, hostile and foreign ones are refused or right, and run nothing.

Two checkpoints are made once, in this process: one of the Trainer's own format, as one process
saves it, and one in the format of a pipeline. A case copies one, changes it, and then verifies,
resumes or exports the copy. Refused means an SPPOError that names the folder or a file in it. Right
means that weights, optimizer and random numbers are those that were saved; where an attacker made
the digests match what was changed, that nothing else happened. Anything that ran is wrong.

Not covered: flipped bytes inside the tensors of a checkpoint that one process saved, in the
Trainer's own format, which has no digests; and what an optimizer says at its next step when an
attacker has changed what it keeps.
"""

import functools
import json
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.distributed import checkpoint as dcp

from sppo_hf import SPPOPlugin
from sppo_hf.errors import SPPOError
from sppo_hf.integrations.checkpoints import export_optimizer
from sppo_hf.pipeline.checkpoint import RankCoords, load_weights, save_weights, saving
from sppo_hf.pipeline.checkpoint_files import (
    MARK_NAME,
    STATE_FOLDER,
    check_complete,
    mark_complete,
    newest_complete,
)
from sppo_hf.pipeline.checkpoint_state import (
    load_random_state,
    load_state,
    random_state,
    save_state,
)
from tests.attacks.outcomes import Case, Outcome, answered_in_process
from tests.integrations.training import make_arguments, make_model, make_rows

STEP = 2
INDEX = f"{STATE_FOLDER}/index.json"
RANK = f"{STATE_FOLDER}/rank-0-0.safetensors"

Change = Callable[[Path, random.Random], None]


class Runs:
    """Makes the canary when it is unpickled by anything that runs what a pickle says."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


# -- what is attacked --------------------------------------------------------------------------


class Originals:
    """The two checkpoints, and what comes of them when they are not attacked."""

    def __init__(self) -> None:
        self._holder = tempfile.TemporaryDirectory(prefix="sppo-attacks-")
        self.folder = Path(self._holder.name)
        trainer = make_trainer(self.folder / "run", STEP, save_strategy="steps", save_steps=STEP)
        trainer.train()
        self.alone = self.folder / "run" / f"checkpoint-{STEP}"
        self.pipeline = self.folder / "pipeline" / f"checkpoint-{STEP}"
        with saving(self.pipeline, RankCoords()):
            save_weights(trainer.model, self.pipeline, max_shard_size="20KB")
            save_state(self.pipeline, trainer.model, [trainer.optimizer], [trainer.lr_scheduler])
            for name in ("trainer_state.json", "training_args.bin", "scheduler.pt"):
                shutil.copy(self.alone / name, self.pipeline / name)
        self.model, self.optimizer, self.scheduler = (
            trainer.model,
            trainer.optimizer,
            trainer.lr_scheduler,
        )
        self.state = self.describe()
        self.losses = {path: resume(path, self.folder / "reference") for path in self.both}

    @property
    def both(self) -> tuple[Path, Path]:
        return self.alone, self.pipeline

    def describe(self) -> str:
        """Everything that a load of the pipeline's checkpoint sets."""
        optimizer = self.optimizer.state_dict()
        moments = {
            (number, key): value.tolist() if isinstance(value, torch.Tensor) else value
            for number, values in optimizer["state"].items()
            for key, value in values.items()
        }
        weights = {name: tensor.tolist() for name, tensor in self.model.state_dict().items()}
        drawn = random_state(self.model)["python"]
        groups, scheduler = optimizer["param_groups"], self.scheduler.state_dict()
        return repr((weights, sorted(moments.items(), key=repr), groups, scheduler, drawn))


@functools.cache
def originals() -> Originals:
    """Made once in a process."""
    return Originals()


def make_trainer(folder: Path, steps: int, **changes: Any) -> Any:
    """A quiet Trainer with SPPO in one process."""
    from transformers import PrinterCallback, Trainer

    forget_plugin()
    args = make_arguments(
        folder,
        parallelism_config=SPPOPlugin({"show_plan": False, "num_chunks": 3}),
        max_steps=steps,
        lr_scheduler_type="constant",
        **changes,
    )
    trainer = Trainer(make_model(num_hidden_layers=1), args, train_dataset=make_rows(8))
    trainer.remove_callback(PrinterCallback)
    return trainer


def forget_plugin() -> None:
    """Let the process's next Accelerator have another plugin."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# -- what is done with a checkpoint ------------------------------------------------------------


def resume(checkpoint: Path, scratch: Path) -> float:
    """Train one step more; the loss of it."""
    trainer = make_trainer(scratch, STEP + 1)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    finally:
        forget_plugin()
    return next(e["loss"] for e in reversed(trainer.state.log_history) if "loss" in e)


def load(checkpoint: Path) -> str:
    """Verify and load, as a rank does."""
    mine = originals()
    check_complete(checkpoint)
    load_weights(mine.model, checkpoint)
    load_state(checkpoint, mine.model, [mine.optimizer], [mine.scheduler])
    load_random_state(checkpoint, mine.model)
    return mine.describe()


def export(checkpoint: Path) -> list[bool]:
    """Make optimizer.pt; whether it is the optimizer's state."""
    export_optimizer(checkpoint)
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    expected = originals().optimizer.state_dict()["state"]
    return [
        torch.equal(torch.as_tensor(state["state"][number][key]), torch.as_tensor(value))
        for number, values in expected.items()
        for key, value in values.items()
    ]


# -- what is done to it ------------------------------------------------------------------------


def flip(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = dice.randrange(len(data))
    for at in range(start, min(len(data), start + dice.choice([1, 64]))):
        data[at] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def flip_header(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(12)] ^= 0xFF
    path.write_bytes(data)


def cut(path: Path, dice: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: dice.choice([0, 1, 7, 8, 9, len(data) // 2, len(data) - 1])])


def delete(path: Path, dice: random.Random) -> None:
    path.unlink()


def pipe(path: Path, dice: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def code(path: Path, dice: random.Random) -> None:
    """A pickle, a pickle in torch's envelope, or a checkpoint of torch's with one in it."""
    payload, kind = Runs(path.parents[3] / "canary"), dice.choice(["pickle", "torch", "legacy"])
    if kind == "pickle":
        path.write_bytes(pickle.dumps(payload))
    else:
        torch.save({"state": payload}, path, _use_new_zipfile_serialization=kind == "torch")


def former_format(folder: Path, dice: random.Random) -> None:
    """Optimizer state in torch.distributed.checkpoint's format, with code in one of its files."""
    target, payload = folder / STATE_FOLDER, Runs(folder.parents[1] / "canary")
    shutil.rmtree(target)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {"groups": [payload], "schedulers": [payload], "rng/0/0": payload}
    dcp.save(state, checkpoint_id=target, no_dist=True, planner=planner)
    if dice.random() < 0.5:
        (target / ".metadata").write_bytes(pickle.dumps(payload))
    if dice.random() < 0.5:
        (folder / MARK_NAME).unlink()
        return
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in target.rglob("*")}
    (folder / MARK_NAME).write_text(json.dumps({"complete": True, "files": files}))


HOSTILE_NAMES = ["../../../../etc/passwd", "/etc/passwd", "x" * 6000, "", "a\0b", "..", 7, None]
HOSTILE_VALUES = [
    *(None, [], {}, "text", -1, 10**400, 1e308, True, [[]], {"!tensor": "/dev/zero"}),
    *({"!tensor": "rank-9-9.safetensors"}, {"!reduce": ["os.system", "true"]}, {"!tuple": 1}),
    *({"!dict": [[[], 1]]}, {"!float": "nan"}, {"!dtype": "Tensor"}, "x" * 6000),
]


def hostile_mark(folder: Path, dice: random.Random) -> None:
    mark = json.loads((folder / MARK_NAME).read_text())
    what = dice.choice(["name", "files", "entry", "format", "bomb", "text", "large"])
    if what == "name":
        mark["files"][str(dice.choice(HOSTILE_NAMES))] = dice.choice([None, [5, "00000000"], 5])
    elif what == "files":
        mark["files"] = dice.choice(HOSTILE_VALUES)
    elif what == "entry":
        mark["files"][INDEX] = dice.choice([[1], [1, 2], ["1", "2"], {}, "x", [10**30, "0"]])
    elif what == "format":
        mark["format"] = dice.choice([3, 10**30, -1, "2", None, 2.5])
    text = json.dumps(mark)
    if what == "bomb":
        text = dice.choice(["[", '{"a":']) * dice.choice([1000, 1_000_000])
    elif what == "text":
        text = dice.choice(["", "null", "\xff", text[:-5], "NaN", "1" * 5000])
    elif what == "large":
        text = text + " " * 70_000_000
    (folder / MARK_NAME).write_text(text, encoding="latin-1")


def hostile_index(folder: Path, dice: random.Random) -> None:
    """One value in an index replaced; digests as if it had been saved so."""
    path = folder / dice.choice([INDEX, INDEX, INDEX, "model.safetensors.index.json"])
    value: Any = json.loads(path.read_text())
    at, key = value, None
    for _ in range(dice.randrange(1, 9)):
        if isinstance(at, dict | list) and at:
            holder, key = at, dice.choice(list(at) if isinstance(at, dict) else range(len(at)))
            at = holder[key]
    holder[key] = dice.choice([*HOSTILE_VALUES, *HOSTILE_NAMES])
    if dice.random() < 0.2:
        del holder[key]
    path.write_text(json.dumps(value))
    remake_mark(folder)


def remake_mark(folder: Path) -> None:
    """Digests of what is there now, as an attacker would make them."""
    mark_complete(folder, {"layout": {"pp_size": 1, "dp_size": 1}})


PIPELINE_FILES = [
    *(INDEX, RANK, "model.safetensors.index.json", "model-00001-of-", "model-00002-of-"),
    *("trainer_state.json", "config.json", "scheduler.pt", "training_args.bin", MARK_NAME),
]
ALONE_FILES = [
    *("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
    *("trainer_state.json", "training_args.bin", "config.json"),
]


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` attacks; every third resumes by a Trainer, which takes longest."""
    dice = random.Random(seed)
    for number in range(count):
        yield (_of_one_process if number % 3 == 0 else _of_a_pipeline)(
            random.Random(dice.getrandbits(32)), number
        )


def _of_one_process(dice: random.Random, number: int) -> Case:
    name = dice.choice(ALONE_FILES)
    change = dice.choice([cut, delete, pipe, endless, code, flip_header])
    if name == "config.json" and change is flip_header:
        change = cut
    use = "newest" if dice.random() < 0.2 else "resume"
    label = f"checkpoints {number}: {use}, of one process, {change.__name__} {name}"

    def attempt() -> tuple[Outcome, str]:
        with Copy("alone") as copy:
            change(copy.path / name, dice)
            # What is absent, or cannot run, is as if it had not been saved: a fresh optimizer.
            return copy.judge(use, exact=False)

    return Case(label, attempt)


def _of_a_pipeline(dice: random.Random, number: int) -> Case:
    use = dice.choices(["load", "export", "newest", "resume"], [8, 4, 2, 3])[0]
    kinds = ["file", "file", "remade", "mark", "former", "index"]
    what = dice.choice(kinds[: -1 if use == "resume" else None])
    prefix = dice.choice(PIPELINE_FILES)
    changes = [cut, delete, pipe, endless, code, flip, flip_header]
    change = dice.choice(changes)
    label = f"checkpoints {number}: {use}, of a pipeline, {what}"
    if what in ("file", "remade"):
        label += f", {change.__name__} {prefix}"

    def attempt() -> tuple[Outcome, str]:
        with Copy("pipeline") as copy:
            if what in ("file", "remade"):
                change(next(copy.path.glob(f"{prefix}*")), dice)
                if what == "remade" and prefix != MARK_NAME and change not in (pipe, endless):
                    remake_mark(copy.path)
            else:
                by_name = {"mark": hostile_mark, "index": hostile_index, "former": former_format}
                by_name[what](copy.path, dice)
            # Who flips a bit of the mark may hit its layout, and of the configuration, anything.
            seen = use != "newest" or prefix not in (MARK_NAME, "config.json")
            return copy.judge(use, exact=what == "file" and seen)

    return Case(label, attempt)


class Copy:
    """A copy of a checkpoint in a run's folder, beside a whole one of an earlier step."""

    def __init__(self, which: str) -> None:
        self._original: Path = getattr(originals(), which)

    def __enter__(self) -> "Copy":
        self._folder = Path(tempfile.mkdtemp(prefix="sppo-attack-"))
        self.path = self._folder / "run" / f"checkpoint-{STEP}"
        self.whole = self._folder / "run" / "checkpoint-1"
        for target in (self.path, self.whole):
            shutil.copytree(self._original, target)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)

    def judge(self, use: str, *, exact: bool) -> tuple[Outcome, str]:
        """Use the checkpoint; anything that ran is wrong, and so is another result."""
        expected: Any
        ask: Callable[[], Any]
        if use == "load":
            ask, expected = lambda: load(self.path), originals().state
        elif use == "export":
            ask, expected = lambda: set(export(self.path)), {True}
        elif use == "newest":
            ask, expected = lambda: newest_complete(self.path.parent)[0], self.whole
        else:
            ask = lambda: resume(self.path, self._folder / "out")  # noqa: E731
            expected = originals().losses[self._original]
        outcome, seen = answered_in_process(
            ask,
            refusals=(SPPOError,),
            right=lambda answer: not exact or answer == expected,
        )
        if outcome is Outcome.RAW and "Can't find a valid checkpoint at" in seen:
            outcome = Outcome.REFUSED  # Transformers' own sentence
        if outcome is Outcome.REFUSED and str(self.path) not in seen:
            outcome = Outcome.RAW
        if (self._folder / "canary").exists():
            outcome = Outcome.WRONG
        return outcome, seen[:300]
