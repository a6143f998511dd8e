"""The callback takes over exactly the Trainers that have the plugin, and logs where they log."""

import copy
import pickle
import re
import sys

import pytest
import torch
import transformers
from accelerate import Accelerator
from transformers import PrinterCallback, Trainer, TrainerCallback

from sppo_hf import ConfigError, SPPOPlugin, UnsupportedModelError
from sppo_hf.engine.convert import is_converted
from sppo_hf.integrations.accelerator import SPPOAccelerator
from sppo_hf.integrations.callback import SPPOCallback
from tests.integrations.training import (
    VOCABULARY,
    checkpointing,
    is_checkpointing,
    make_arguments,
    make_model,
    make_rows,
)

_PICKLED = pickle.dumps(SPPOPlugin())


def _is_active(trainer: Trainer) -> bool:
    callbacks = trainer.callback_handler.callbacks
    (ours,) = (callback for callback in callbacks if isinstance(callback, SPPOCallback))
    return ours._active


def _trainer(folder, plugin: SPPOPlugin | None, callbacks=None, **changes) -> Trainer:
    args = make_arguments(folder, parallelism_config=plugin, **changes)
    return Trainer(
        make_model(),
        args,
        train_dataset=make_rows(8),
        eval_dataset=make_rows(4, seed=2),
        callbacks=callbacks,
    )


class _Listener(TrainerCallback):
    """A logger such as TensorBoard's: it sees `logs` as they are when its turn comes."""

    def __init__(self) -> None:
        self.entries: list[dict[str, object]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.entries.append(dict(logs))


def test_trainers_in_turn_are_taken_over_only_with_the_plugin(tmp_path):
    plugin = SPPOPlugin(num_chunks=3)
    for with_plugin in (True, False, True, True, False):
        trainer = _trainer(tmp_path, plugin if with_plugin else None)
        assert _is_active(trainer) == with_plugin
        assert isinstance(trainer.accelerator, SPPOAccelerator) == with_plugin
        assert ("save_model" in trainer.__dict__) == with_plugin


def test_trainers_whose_arguments_were_made_first(tmp_path):
    # The Accelerators then share the first one's state, with its plugin in it.
    args = [make_arguments(tmp_path, parallelism_config=p) for p in (SPPOPlugin(), None)]
    first, second = [Trainer(make_model(), a, train_dataset=make_rows(4)) for a in args]
    assert [_is_active(first), _is_active(second)] == [True, False]
    second.train()
    assert not is_converted(second.model)


@pytest.mark.parametrize("by", ["Trainer", "Accelerator"])
def test_a_trainer_whose_accelerator_ignores_the_plugin_is_refused(tmp_path, by):
    args = [make_arguments(tmp_path, parallelism_config=p) for p in (SPPOPlugin(), None)]
    if by == "Trainer":
        Trainer(make_model(), args[1], train_dataset=make_rows(4))
    else:
        Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"SPPOPlugin\(\) is .*without it.*Remedy: make the"):
        Trainer(make_model(), args[0], train_dataset=make_rows(4))
    assert _is_active(_trainer(tmp_path, SPPOPlugin()))


def test_a_trainer_that_makes_its_own_accelerator_is_told_to_pass_the_plugin_on(tmp_path):
    class Own(Trainer):
        passes_on = False

        def create_accelerator_and_postprocess(self):
            given = self.args.parallelism_config if self.passes_on else None
            self.accelerator = Accelerator(cpu=True, parallelism_config=given)
            self.is_deepspeed_enabled = self.is_fsdp_enabled = self.is_tp_enabled = False

    with pytest.raises(ConfigError, match=r"its own Accelerator must pass it args\.parallelism_"):
        Own(make_model(), make_arguments(tmp_path, parallelism_config=SPPOPlugin()))
    Own.passes_on = True
    assert _is_active(Own(make_model(), make_arguments(tmp_path, parallelism_config=SPPOPlugin())))


@pytest.mark.parametrize("make", [SPPOPlugin, lambda: pickle.loads(_PICKLED)])
def test_a_plugin_older_than_the_trainers_module_is_not_ignored(monkeypatch, make):
    name = "transformers.trainer"
    monkeypatch.delattr(transformers, "trainer")
    monkeypatch.delitem(sys.modules, name)
    make()
    assert SPPOCallback in sys.modules[name].DEFAULT_CALLBACKS


def test_a_trainer_that_fails_to_build_leaves_nothing_to_the_next(tmp_path):
    args = make_arguments(tmp_path, parallelism_config=SPPOPlugin())
    try:
        Trainer(None, args)
    except RuntimeError as error:
        kept_alive = error  # as a debugger or a notebook does
    trainer = _trainer(tmp_path, None)
    trainer.train()
    assert not is_converted(trainer.model)
    assert not any(key.startswith("sppo/") for entry in trainer.state.log_history for key in entry)
    del kept_alive


def test_a_raw_accelerator_adds_no_second_callback(tmp_path):
    plugin = SPPOPlugin(num_chunks=3)
    accelerator = Accelerator(cpu=True, parallelism_config=plugin)
    assert _is_active(_trainer(tmp_path, plugin))
    assert isinstance(accelerator, SPPOAccelerator)


def test_numbers_are_in_the_history_and_reach_later_loggers(tmp_path):
    listener = _Listener()
    trainer = _trainer(
        tmp_path,
        SPPOPlugin(num_chunks=3),
        [listener],
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    training = [entry for entry in trainer.state.log_history if "loss" in entry]
    seen = [entry for entry in listener.entries if "loss" in entry]
    assert len(training) == len(seen) == 2
    for stored, passed in zip(training, seen, strict=True):
        assert stored["sppo/tokens_per_second"] > 0
        assert stored["sppo/tokens_per_second"] == stored["sppo/tokens_per_second_per_device"]
        assert stored["sppo/tflops_per_device"] > 0
        assert stored["sppo/host_rss_bytes"] > 1e6
        assert {k: v for k, v in stored.items() if k != "step"} == passed
        assert "sppo/mfu" not in stored  # no peak is known for a CPU
    others = [entry for entry in trainer.state.log_history if "loss" not in entry]
    assert any("eval_loss" in entry for entry in others)
    assert not any(key.startswith("sppo/") for entry in others for key in entry)


class _Printed(PrinterCallback):
    """A printer of somebody's own."""


@pytest.mark.parametrize("bar", [False, True], ids=["printer", "progress bar"])
def test_the_console_shows_one_summary_and_loggers_get_every_number(tmp_path, capsys, bar):
    before, after = _Listener(), _Listener()
    trainer = _trainer(
        tmp_path, SPPOPlugin(num_chunks=3, show_plan=False), [before], disable_tqdm=not bar
    )
    trainer.add_callback(after)
    trainer.add_callback(_Printed())
    trainer.train()
    shown = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert len(shown) == 8
    for line in shown:
        assert re.search(r"'sppo': '[\d,]+ tokens/s, host [\d.]+ [MG]iB'", line)
        assert "sppo/" not in line
    for listener in (before, after):
        seen = [entry for entry in listener.entries if "loss" in entry]
        assert len(seen) == 4
        assert all("sppo/d2h_bytes" in entry and "sppo" not in entry for entry in seen)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_callback_that_prints_a_summary_can_be_copied_and_pickled(tmp_path, again):
    trainer = _trainer(tmp_path, SPPOPlugin(num_chunks=3, show_plan=False), disable_tqdm=True)
    trainer.train()
    (printer,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, PrinterCallback))
    copied = again(printer)
    assert copied.on_log.args == (copied,)


def test_numbers_can_be_switched_off(tmp_path):
    trainer = _trainer(tmp_path, SPPOPlugin(num_chunks=3, log_metrics=False))
    trainer.train()
    assert not any(key.startswith("sppo/") for entry in trainer.state.log_history for key in entry)


def test_epochs_are_logged_too(tmp_path):
    trainer = _trainer(tmp_path, SPPOPlugin(num_chunks=3), logging_strategy="epoch")
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["sppo/tokens_per_second"] > 0


def test_checkpointing_in_the_arguments_is_taken_over_at_every_train(tmp_path, caplog):
    trainer = _trainer(tmp_path, SPPOPlugin(num_chunks=3), **checkpointing())
    for _ in range(2):
        trainer.train()
        assert not is_checkpointing(trainer.model)
    assert caplog.text.count("recomputes by itself") == 2


def test_data_parallel_is_refused_when_the_trainer_is_made(tmp_path):
    args = make_arguments(tmp_path, parallelism_config=SPPOPlugin())
    args._n_gpu = 2
    with pytest.raises(ConfigError, match=r"nn\.DataParallel"):
        Trainer(make_model(), args)


def test_a_trainer_that_does_not_prepare_its_model_is_refused(tmp_path):
    class Unprepared(Trainer):
        def _wrap_model(self, model, training=True, dataloader=None):
            return torch.nn.Sequential(model)

    args = make_arguments(tmp_path, parallelism_config=SPPOPlugin())
    trainer = Unprepared(make_model(), args, train_dataset=make_rows(4))
    with pytest.raises(ConfigError, match="not prepared by the Accelerator"):
        trainer.train()


def test_training_a_module_without_a_language_model_is_refused(tmp_path):
    class Bigrams(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)

        def forward(self, input_ids, labels):
            logits = self.table(input_ids)[:, :-1].flatten(0, 1)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())}

    args = make_arguments(tmp_path, parallelism_config=SPPOPlugin())
    trainer = Trainer(Bigrams(), args, train_dataset=make_rows(4))
    with pytest.raises(UnsupportedModelError, match="Bigrams is not a Transformers causal"):
        trainer.train()
