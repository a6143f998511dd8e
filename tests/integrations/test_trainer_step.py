"""A Trainer's step: memory that runs out in backward, losses that read what is not there, garbage.

The first is planned anew once, else it is an error; the second is told what to do. Full collections
pass over what lives through training, and over nothing after it.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerCallback

from sppo_hf import ConfigError, SPPOPlugin, StepObserver
from sppo_hf.attention.backends.aten import CPUFlash
from sppo_hf.engine.convert import get_engine
from sppo_hf.errors import BudgetError
from sppo_hf.integrations import trainer as trainer_module
from sppo_hf.offload.host_memory import HostPoolFull
from tests.integrations.training import make_arguments, make_model, make_rows

BUDGET = 64 * 2**20
LESS = int(0.95 * BUDGET)
BACKWARDS = 2 * 4
"""Calls of attention's backward in a step: layers times chunks."""


class Plans(StepObserver):
    """Notes the device budgets of the plans for training."""

    def __init__(self) -> None:
        self.budgets: list[int | None] = []
        self.losses: list[weakref.ref[torch.Tensor]] = []

    def on_unit(self, direction: str, chunk: int, num_chunks: int) -> None:
        """See that nothing of an earlier step is left when the next one begins."""
        if (direction, chunk) == ("forward", 0):
            assert all(loss() is None for loss in self.losses)

    def on_plan(self, plan: Any, model_name: str) -> None:
        if plan.training:
            self.budgets.append(plan.budgets.device)


def run_out_at(monkeypatch: pytest.MonkeyPatch, *calls: int, error: Exception) -> None:
    """Raise at these calls of attention's backward, counted from 1."""
    original, counted = CPUFlash.backward, [0]

    def backward(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        if counted[0] in calls:
            # A new one, for an error holds the frames that it went through.
            raise type(error)(str(error))
        return original(*args, **kwargs)

    monkeypatch.setattr(CPUFlash, "backward", backward)


OUT = torch.OutOfMemoryError("CUDA out of memory. As injected")


class NotesLosses(Trainer):
    """Notes the losses, which hold their graphs, without holding them."""

    losses: list[weakref.ref[torch.Tensor]]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(weakref.ref(loss))
        return loss


def train(folder: Any, **changes: Any) -> tuple[Trainer, Plans]:
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = SPPOPlugin(
        num_chunks=4,
        attention_backend="cpu_flash",
        device_memory=BUDGET,
        correct_plan=False,
        show_plan=False,
    )
    plans = Plans()
    plugin.observer.subscribe(plans)
    settings = {"max_steps": 3, "parallelism_config": plugin, **changes}
    callbacks = settings.pop("callbacks", None)
    trainer = NotesLosses(
        make_model(),
        make_arguments(folder, **settings),
        train_dataset=make_rows(24),
        callbacks=callbacks,
    )
    plans.losses = trainer.losses = []
    trainer.train()
    return trainer, plans


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("call", [1, BACKWARDS])
def test_a_failed_first_backward_is_repeated_with_less_memory(tmp_path, monkeypatch, call) -> None:
    expected, plans = train(tmp_path)
    assert plans.budgets == [BUDGET]
    run_out_at(monkeypatch, call, error=OUT)
    with pytest.warns(UserWarning, match="memory ran out in the first backward of a plan"):
        ours, plans = train(tmp_path)
    assert plans.budgets == [BUDGET, LESS]
    torch.testing.assert_close(weights(ours), weights(expected), rtol=1e-6, atol=1e-7)
    losses = [[e["loss"] for e in one.state.log_history if "loss" in e] for one in (ours, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_first_backward_without_room_on_the_host_is_repeated(tmp_path, monkeypatch) -> None:
    """Sums of gradients of keys and values may be offloaded in backward."""
    run_out_at(monkeypatch, 1, error=HostPoolFull("offloading needs 8 bytes more in one piece"))
    with pytest.warns(UserWarning, match="the host's memory ran out in the first backward"):
        _, plans = train(tmp_path)
    assert plans.budgets == [BUDGET, BUDGET], "the device's budget is as it was"


@pytest.mark.parametrize(
    ("calls", "error", "changes"),
    [
        ((BACKWARDS + 1,), OUT, {}),
        ((BACKWARDS + 1,), OUT, {"gradient_accumulation_steps": 2}),
        ((1, 2), OUT, {}),
        ((1,), RuntimeError("shapes do not fit"), {}),
    ],
    ids=["a later step", "onto gradients", "a second time", "another error"],
)
@pytest.mark.filterwarnings("ignore:the device's memory ran out")
def test_steps_that_are_not_repeated(tmp_path, monkeypatch, calls, error, changes) -> None:
    run_out_at(monkeypatch, *calls, error=error)
    with pytest.raises(type(error), match=str(error)):
        train(tmp_path, **changes)


class FitsFewRows(Trainer):
    """A Trainer whose batches fit no plan if they have more than so many rows."""

    most_rows = 2

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = len(inputs["input_ids"])
        self.tried = [*getattr(self, "tried", ()), rows]
        if rows > self.most_rows:
            raise BudgetError(f"no plan fits {rows} rows")
        return super().training_step(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("most_rows", [2, 0])
def test_a_search_for_a_batch_size_goes_on_where_no_plan_fits(tmp_path, caplog, most_rows) -> None:
    args = make_arguments(
        tmp_path,
        parallelism_config=SPPOPlugin(num_chunks=2, show_plan=False),
        auto_find_batch_size=True,
        per_device_train_batch_size=4,
        max_steps=1,
    )
    trainer = FitsFewRows(make_model(), args, train_dataset=make_rows(4))
    trainer.most_rows = most_rows
    fits = most_rows > 0
    with contextlib.nullcontext() if fits else pytest.raises(BudgetError, match="fits 1 rows"):
        trainer.train()
    assert trainer.tried == [4, 3, 2, 1][: 3 if fits else 4]
    assert "auto_find_batch_size: 3 rows do not fit. no plan fits 3 rows" in caplog.messages


class ReadsLogits(Trainer):
    """Makes a loss of its own out of logits, of a call with labels or without."""

    read: Callable[[Any], torch.Tensor] = staticmethod(lambda outputs: outputs.logits)
    keep_labels = True

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs["labels"] if self.keep_labels else inputs.pop("labels")
        logits = self.read(model(**inputs))[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def reads_logits(folder: Any, *, plain: bool = False, **changes: Any) -> ReadsLogits:
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None if plain else SPPOPlugin(num_chunks=4, show_plan=False, **changes)
    args = make_arguments(folder, max_steps=1, optim="sgd", parallelism_config=plugin)
    rows = make_rows(4)
    return ReadsLogits(make_model(), args, train_dataset=rows, eval_dataset=rows)


@pytest.mark.parametrize(
    "read",
    [
        lambda outputs: outputs.logits,
        lambda outputs: outputs.get("logits"),
        lambda outputs: outputs["logits"],
        lambda outputs: outputs[1],
    ],
    ids=["attribute", "get", "key", "index"],
)
@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_a_loss_that_reads_missing_logits_gets_a_remedy(tmp_path, read, call) -> None:
    trainer = reads_logits(tmp_path)
    trainer.read = read
    with pytest.raises(ConfigError, match=r"ReadsLogits.compute_loss.*labels.*return_logits=True"):
        getattr(trainer, call)()


@pytest.mark.filterwarnings("ignore:logits of the whole sequence")
@pytest.mark.parametrize("remedy", ["labels taken out", "return_logits"])
def test_both_remedies_for_missed_logits_train_as_the_plain_model(tmp_path, remedy) -> None:
    expected = reads_logits(tmp_path, plain=True)
    ours = reads_logits(tmp_path, return_logits=remedy == "return_logits")
    ours.keep_labels = remedy == "return_logits"
    for trainer in (expected, ours):
        trainer.train()
    torch.testing.assert_close(weights(ours), weights(expected), rtol=1e-6, atol=1e-7)


def test_other_errors_of_a_loss_are_left_as_they_are(tmp_path) -> None:
    def fails(outputs: Any) -> torch.Tensor:
        raise TypeError("of the user's own")

    trainer = reads_logits(tmp_path)
    trainer.read = fails
    with pytest.raises(TypeError, match="of the user's own"):
        trainer.train()


def test_errors_outside_of_a_loss_are_left_as_they_are(tmp_path) -> None:
    class PreparesNothing(ReadsLogits):
        def _prepare_inputs(self, inputs: Any) -> Any:
            nothing: Any = None
            return nothing["input_ids"]

    trainer = reads_logits(tmp_path)
    trainer.__class__ = PreparesNothing
    with pytest.raises(TypeError, match="'NoneType' object is not subscriptable"):
        trainer.train()


def test_gradients_of_a_wrapper_keep_its_step_from_being_repeated(tmp_path) -> None:
    """Parameters around the language model, such as PEFT's prompts, which the engine cannot see."""
    trainer, _ = train(tmp_path)
    step = trainer.training_step.__self__
    wrapper = torch.nn.Module()
    wrapper.module, wrapper.prompt = trainer.model, torch.nn.Parameter(torch.ones(1))
    engine = get_engine(trainer.model)
    trainer.model.lm_head.weight.grad = torch.ones_like(trainer.model.lm_head.weight)
    assert step._can_be_repeated(engine, wrapper), "the engine looks at those"
    wrapper.prompt.grad = torch.ones(1)
    assert not step._can_be_repeated(engine, wrapper)


class Garbage:
    """Stands for `gc` in the Trainer's step: collections of all that is imported take seconds."""

    def __init__(self) -> None:
        """Begin with nothing frozen."""
        self.frozen, self.collected, self.enabled = 0, 0, True

    def isenabled(self) -> bool:
        return self.enabled

    def collect(self) -> None:
        self.collected += 1

    def freeze(self) -> None:
        self.frozen += 1000

    def unfreeze(self) -> None:
        self.frozen = 0

    def get_freeze_count(self) -> int:
        return self.frozen


class Collections(TrainerCallback):
    """Notes after each step how many objects are frozen, and how many a full collection visits."""

    def __init__(self, garbage: Garbage | None = None, fails_after: int | None = None) -> None:
        self.visited: list[int] = []
        self.frozen: list[int] = []
        self._garbage = garbage
        self._fails_after = fails_after

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._garbage is None:
            self.visited.append(len(gc.get_objects()))
        self.frozen.append((self._garbage or gc).get_freeze_count())
        if len(self.frozen) == self._fails_after:
            raise OUT


@pytest.fixture
def _nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()  # as `conftest.py` did, for all tests that follow


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> Garbage:
    made = Garbage()
    monkeypatch.setattr(trainer_module, "gc", made)
    return made


class TestFrozenObjects:
    @pytest.mark.usefixtures("_nothing_frozen")
    def test_full_collections_pass_over_what_lives_through_training(self, tmp_path) -> None:
        seen = Collections()
        trainer, _ = train(tmp_path, callbacks=[seen])
        first, *later = seen.visited
        assert len(later) == 2
        assert all(num_visited < first / 20 for num_visited in later), seen.visited
        assert gc.get_freeze_count() == 0
        model = weakref.ref(trainer.model)
        del trainer, seen
        gc.collect()
        assert model() is None

    def test_nothing_stays_frozen_after_an_error(self, tmp_path, garbage) -> None:
        seen = Collections(garbage, fails_after=2)
        with pytest.raises(torch.OutOfMemoryError):
            train(tmp_path, callbacks=[seen])
        assert seen.frozen[-1] > 0
        assert garbage.frozen == 0
        assert garbage.collected == 1

    def test_each_try_of_a_batch_size_frees_what_the_last_one_left(self, tmp_path, garbage) -> None:
        seen = Collections(garbage, fails_after=2)
        train(tmp_path, callbacks=[seen], auto_find_batch_size=True)
        assert [num_frozen > 0 for num_frozen in seen.frozen] == [False, True, False, True, True]

    def test_what_the_process_froze_itself_stays_frozen(self, tmp_path, garbage) -> None:
        garbage.frozen = 10
        seen = Collections(garbage)
        train(tmp_path, callbacks=[seen])
        assert (*seen.frozen, garbage.frozen) == (10,) * 4

    def test_a_process_that_does_not_collect_is_left_alone(self, tmp_path, garbage) -> None:
        garbage.enabled = False
        seen = Collections(garbage)
        train(tmp_path, callbacks=[seen])
        assert not any(seen.frozen)
        assert not garbage.collected
