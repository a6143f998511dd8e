"""Evaluation by a Trainer that wants logits, or what its user makes of them, besides the loss.

The plain Trainer collects the logits of every batch for `compute_metrics` and `predict()`, or what
`preprocess_logits_for_metrics` returns for them. Here the model is asked for logits only where the
Trainer uses them, and for no more of them than it keeps.

[Note: token by token]
`preprocess_logits_for_metrics` nearly always treats tokens one by one (an argmax). Then whole
logits need never exist: it is called on each tile of the loss, and the results are joined. That
this gives the same is checked, not assumed: the first batch is evaluated with whole logits as well,
the function is called on them as the plain Trainer calls it, and both results are compared. Where
whole logits do not fit, each tile of the first batch is compared with its own two halves instead.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import reduce
from torch import Tensor

from sppo_hf.engine.engine import Engine
from sppo_hf.engine.logits import LogitsRequest, NotJoinable, join, map_tensors, same
from sppo_hf.engine.model_parts import ROUTER_SWITCH
from sppo_hf.errors import BudgetError, ConfigError
from sppo_hf.integrations.trainer import TrainerMethods
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.planning.memory import OPTIMIZER_BYTES_PER_PARAMETER
from sppo_hf.rules import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer

# B batch rows, M tokens of a tile, T tokens of the sequence, V vocabulary.

logger = logging.getLogger(__name__)

_PADDING = -100
"""Value with which the Trainer pads logits and labels of a rank's shorter rows to gather them."""

_MAX_ROWS_READ = 256
"""Rows of an evaluation dataset that are read before training, to learn their lengths."""


class TrainerEvaluation(TrainerMethods):
    """The evaluation methods of one Trainer."""

    replaced = ("evaluation_loop", "prediction_step")

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._function: Any = None
        """The user's `preprocess_logits_for_metrics` while an evaluation runs."""
        self._request: LogitsRequest | None = None
        """The request of the batch that was evaluated last."""
        self._verdict: tuple[Any, bool] | None = None
        """A function that was compared on a first batch, and whether it is token by token."""

    # -- before training ---------------------------------------------------------------------

    def before_training(self) -> None:
        """Refuse now what an evaluation hours later would fail for.

        Raises:
            ConfigError: Metrics need logits, and the model runs in a pipeline.
            BudgetError: Metrics need whole logits, and those of a batch do not fit.
        """
        trainer, engine = self._trainer, self._engine()
        if engine is None:
            return
        engine.external_loss_name = self._loss_outside_model()
        wants_logits = trainer.compute_metrics is not None and not trainer.args.prediction_loss_only
        if not wants_logits or trainer.eval_dataset is None:
            return
        if isinstance(engine, PipelineEngine):
            raise self._pipeline_error(engine)
        if engine.parts.is_classifier:
            return  # its logits are small, and returned as without SPPO
        # Without labels for the model, its own forward makes whole logits.
        if engine.external_loss_name or self._overrides("get_eval_dataloader"):
            return
        for labels_BT in self._longest_labels():
            try:
                self._check_logits_fit(engine, *labels_BT.shape)
            except BudgetError:
                function = trainer.preprocess_logits_for_metrics
                if function is None or not self._may_reduce(engine):
                    raise
                if not self._is_token_wise_on_noise(function, engine, labels_BT):
                    raise

    def _loss_outside_model(self) -> str:
        """Name the Trainer's setting that computes the loss from logits; "" if there is none."""
        if self._trainer.compute_loss_func is not None:
            return "compute_loss_func"
        if self._trainer.label_smoother is not None:
            return f"label_smoothing_factor={self._trainer.args.label_smoothing_factor}"
        return ""

    def _longest_labels(self) -> Iterator[Tensor]:
        """Yield for every evaluation dataset the labels `[B, T]` of a batch of its longest rows.

        Random states are restored, and datasets that can be read only once are skipped.
        """
        trainer = self._trainer
        datasets = trainer.eval_dataset
        for dataset in datasets.values() if isinstance(datasets, dict) else (datasets,):
            if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                continue
            try:
                with _random_states_restored():
                    rows = [dataset[i] for i in range(min(len(dataset), _MAX_ROWS_READ))]
                    rows.sort(key=lambda row: -len(row["input_ids"]))
                    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
                    batch = collate(rows[: trainer.args.per_device_eval_batch_size])
            # Whatever a dataset or a collator raises here, the evaluation itself will raise too.
            except Exception:
                logger.debug("no evaluation rows were read before training", exc_info=True)
                continue
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if isinstance(labels, Tensor) and labels.ndim == 2:
                yield labels

    def _is_token_wise_on_noise(self, function: Any, engine: Engine, labels_BT: Tensor) -> bool:
        """Whether a function treats tokens one by one, tried on a few tokens of random logits."""
        device, dtype = self._trainer.accelerator.device, engine.parts.causal_lm.dtype
        labels_1M = labels_BT[:1, :8].to(device)
        vocab = engine.parts.text_config.vocab_size
        with _random_states_restored():
            logits_1MV = torch.randn(*labels_1M.shape, vocab).to(device, dtype)
            try:
                _call_and_compare_halves(function, logits_1MV, labels_1M)
            except NotJoinable:
                return False
        return True

    # -- evaluation --------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, with the user's function for logits called tile by tile where that is exact."""
        trainer = self._trainer
        function = trainer.preprocess_logits_for_metrics
        if function is None or function == self._preprocess:
            return self._kind.evaluation_loop(trainer, *args, **kwargs)
        self._function = function
        trainer.preprocess_logits_for_metrics = self._preprocess
        try:
            return self._kind.evaluation_loop(trainer, *args, **kwargs)
        finally:
            trainer.preprocess_logits_for_metrics = function
            self._function = self._request = None

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Evaluate one batch; the model returns logits if the Trainer wants more than the loss.

        Raises:
            ConfigError: The model runs in a pipeline, the `compute_loss` of a subclass read logits
                that are None, or the function for logits does not treat tokens one by one.
            BudgetError: Whole logits are needed and do not fit.
        """
        step = (self._trainer, model, inputs, prediction_loss_only)
        engine = self._engine()
        self._request = None
        if engine is None or prediction_loss_only:
            with self._explaining_missing_logits(engine):
                return self._kind.prediction_step(*step, ignore_keys=ignore_keys)
        if isinstance(engine, PipelineEngine):
            raise self._pipeline_error(engine)
        engine.external_loss_name = self._loss_outside_model()
        request = engine.logits_request = self._new_request(engine, inputs)
        try:
            result = self._kind.prediction_step(*step, ignore_keys=ignore_keys)
        finally:
            engine.logits_request = None
        if request is not None and request.failure and not request.whole:
            raise ConfigError(
                "preprocess_logits_for_metrics has to run chunk by chunk, because the logits of "
                "whole evaluation batches do not fit or because it did so on the first one, but it "
                f"does not treat tokens one by one: {request.failure}. Allowed: a function whose "
                "result for each token depends on that token's logits and label alone. Remedy: "
                "leave all else to compute_metrics; or a smaller per_device_eval_batch_size and "
                "return_logits=True."
            )
        self._request = request
        return result

    def _new_request(self, engine: Engine, inputs: dict[str, Any]) -> LogitsRequest | None:
        """Decide what the model does with the logits of a batch; None leaves it to the model."""
        labels = inputs.get("labels")
        # Where a label is missing the Trainer calls the model, not its `compute_loss`.
        names = self._trainer.label_names
        computes_loss = bool(names) and all(inputs.get(name) is not None for name in names)
        is_outside = bool(engine.external_loss_name) and computes_loss
        is_classifier = engine.parts.is_classifier
        if not isinstance(labels, Tensor) or labels.ndim != 2 or is_outside or is_classifier:
            return None  # nothing runs chunk by chunk, or the engine refuses it with its own words
        function = self._function
        may_reduce = function is not None and self._may_reduce(engine, inputs)
        is_token_wise = self._verdict[1] if self._verdict and self._verdict[0] == function else None
        if not may_reduce or is_token_wise is False:
            self._check_logits_fit(engine, *labels.shape)
            return LogitsRequest(whole=True, requested_by=self._logits_consumer)
        if is_token_wise:
            return LogitsRequest(whole=False, reduce=self._reduce_tile)
        fits = True
        try:
            self._check_logits_fit(engine, *labels.shape)
        except BudgetError:
            fits = False
        # All ranks decide alike, because the Trainer gathers what they return.
        if not self._on_all_ranks(fits):
            return LogitsRequest(whole=False, reduce=self._reduce_and_compare_halves)
        return LogitsRequest(whole=True, reduce=self._try_to_reduce_tile)

    @property
    def _logits_consumer(self) -> str:
        """The name, in a user's script, of what needs logits."""
        return "predict()" if self._trainer.compute_metrics is None else "compute_metrics"

    def _may_reduce(self, engine: Engine, inputs: Mapping[str, Any] | None = None) -> bool:
        """Whether the function for logits gets these alone, and nothing else reads them.

        A model with a router loss returns that beside them, and the function gets both in a tuple.
        `inputs` are those of the batch; None for batches that are not known yet.
        """
        others_read = engine.config.return_logits or any(
            self._overrides(name) for name in ("prediction_step", "compute_loss")
        )
        asked = (inputs or {}).get(ROUTER_SWITCH)
        alone = not others_read and not engine.parts.has_router_loss(asked)
        return alone and self._trainer.label_names == ["labels"]

    # -- the function for logits -------------------------------------------------------------

    def _reduce_tile(self, logits_1MV: Tensor, labels_1M: Tensor) -> Any:
        """Call the function on a tile, with the values that the plain Trainer would pass."""
        return self._function(self._as_accelerate_returns(logits_1MV), labels_1M)

    def _as_accelerate_returns(self, logits: Tensor) -> Tensor:
        """Cast logits as Accelerate does with a model's outputs: to float32 under autocast."""
        is_autocast = getattr(self._trainer.accelerator, "native_amp", False)
        return logits.float() if is_autocast and logits.dtype.itemsize < 4 else logits

    def _try_to_reduce_tile(self, logits_1MV: Tensor, labels_1M: Tensor) -> Any:
        with _errors_as_not_token_wise():
            return self._reduce_tile(logits_1MV, labels_1M)

    def _reduce_and_compare_halves(self, logits_1MV: Tensor, labels_1M: Tensor) -> Any:
        logits_1MV = self._as_accelerate_returns(logits_1MV)
        return _call_and_compare_halves(self._function, logits_1MV, labels_1M)

    def _preprocess(self, logits: Any, labels: Any) -> Any:
        """Stand in for the Trainer's function: return what the tiles gave, once that is proved."""
        function, request = self._function, self._request
        self._request = None
        if request is None or request.reduce is None or request.logits_tokens == 0:
            return function(logits, labels)
        reduced = None
        with contextlib.suppress(NotJoinable):
            reduced = self._pad_as_gathered(request, logits)
        if not request.whole:
            self._verdict = (function, True)
            return reduced
        expected = function(logits, labels)
        token_wise = not request.failure and reduced is not None and same(reduced, expected)
        self._verdict = (function, self._on_all_ranks(token_wise))
        if not self._verdict[1]:
            logger.warning(
                "preprocess_logits_for_metrics does not treat tokens one by one (%s), so it gets "
                "the logits of whole batches.",
                request.failure or "its parts differ from the whole",
            )
        return expected

    def _pad_as_gathered(self, request: LogitsRequest, padded_logits: Tensor) -> Any:
        """Extend a rank's results to the length of the longest rows of any rank.

        The Trainer has padded this rank's logits to `[B, T, ...]` of the longest. The results are
        there for this rank's own tokens; those of padding are one column, repeated.
        """
        missing = padded_logits.shape[1] - request.logits_tokens
        if request.reduced is None or missing <= 0:
            return request.reduced
        rows, device = padded_logits.shape[0], padded_logits.device
        dtype = request.logits_dtype or torch.float32
        logits_B1V = torch.full((rows, 1, request.vocab_size), _PADDING, device=device).to(dtype)
        labels_B1 = torch.full((rows, 1), _PADDING, device=device)
        column = self._function(self._as_accelerate_returns(logits_B1V), labels_B1)

        def extend(reduced: Tensor, one: Tensor) -> Tensor:
            return torch.cat([reduced, one.expand(-1, missing, *one.shape[2:])], dim=1)

        return map_tensors(extend, request.reduced, column)

    def _on_all_ranks(self, flag: bool) -> bool:
        """Whether a flag is set on all ranks, all of which call this at the same time."""
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return flag
        summed: Any = reduce(torch.tensor(int(flag), device=accelerator.device), reduction="sum")
        return int(summed.item()) == accelerator.num_processes

    # -- refusals ----------------------------------------------------------------------------

    def _check_logits_fit(self, engine: Engine, batch_rows: int, total_tokens: int) -> None:
        """Raise BudgetError where the whole logits of a batch do not fit on the device."""
        trainer = self._trainer
        # The device of the batches; the weights may be on the host.
        device = trainer.accelerator.device
        needed_bytes, budget_bytes = engine.plans.device_bytes_with_logits(
            batch_rows, total_tokens, device
        )
        vocab = engine.parts.text_config.vocab_size
        if getattr(trainer.accelerator, "native_amp", False):
            needed_bytes += 4 * batch_rows * total_tokens * vocab  # Accelerate's float32 copy
        if trainer.is_in_train and not engine.parts.is_sharded():
            needed_bytes += OPTIMIZER_BYTES_PER_PARAMETER * engine.shape().trainable_parameters
        if budget_bytes is None or needed_bytes <= budget_bytes:
            return
        function = "a preprocess_logits_for_metrics"
        if (self._function or trainer.preprocess_logits_for_metrics) is not None:
            function = "another preprocess_logits_for_metrics (this one does not run by parts)"
            if not self._may_reduce(engine):
                function = (
                    "with a Trainer that overrides neither prediction_step nor compute_loss, and "
                    "without return_logits, label_names and output_router_logits, a "
                    "preprocess_logits_for_metrics"
                )
        raise BudgetError(
            f"{self._logits_consumer} needs the logits of whole evaluation batches: {batch_rows} x "
            f"{total_tokens} x {vocab} values, with which an evaluation takes {needed_bytes:,} "
            f"bytes ({format_bytes(needed_bytes)}) on the device; {budget_bytes:,} bytes "
            f"({format_bytes(budget_bytes)}) are in the budget. Remedy: {function} that keeps of "
            "each token what is needed (for one, lambda logits, labels: logits.argmax(-1)), which "
            "then runs chunk by chunk; or a smaller per_device_eval_batch_size, shorter rows, or "
            "prediction_loss_only=True."
        )

    def _pipeline_error(self, engine: Engine) -> ConfigError:
        return ConfigError(
            f"{self._logits_consumer} needs logits, which in a pipeline "
            f"(pp_size={engine.config.pp_size}) are on its last rank alone. Allowed: evaluation of "
            "the loss. Remedy: prediction_loss_only=True in TrainingArguments, or leave "
            "compute_metrics out, and compute metrics from the saved checkpoint in one process."
        )


def _call_and_compare_halves(function: Any, logits_1MV: Tensor, labels_1M: Tensor) -> Any:
    """Call a function on a tile and on its two halves, and return the result for the tile.

    Raises:
        NotJoinable: The halves' results, joined, differ from the tile's, or it raised an error.
    """
    cut = (labels_1M.shape[1] + 1) // 2
    with _errors_as_not_token_wise():
        whole = function(logits_1MV, labels_1M)
        halves = [
            function(logits_1MV[:, part], labels_1M[:, part])
            for part in (slice(0, cut), slice(cut, None))
            if labels_1M[:, part].numel()
        ]
    if not same(join(halves, dim=1), whole):
        raise NotJoinable("its parts differ from the whole")
    return whole


@contextlib.contextmanager
def _errors_as_not_token_wise() -> Iterator[None]:
    """A function that raises on a part of the tokens does not treat them one by one."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise NotJoinable(f"on a part it raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _random_states_restored() -> Iterator[None]:
    """Restore the states of the host's random number generators at the end."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
