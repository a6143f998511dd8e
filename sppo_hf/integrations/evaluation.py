"""What a Trainer's evaluation needs besides the loss: logits, or what its user makes of them.

The plain Trainer collects the logits of every batch for `compute_metrics` and `predict()`, or what
`preprocess_logits_for_metrics` makes of them. Two methods of the one Trainer that made the
Accelerator are replaced on the *instance*, so that the model is asked for logits exactly where the
Trainer wants them, and for no more of them than it will keep.

[Note: token by token]
`preprocess_logits_for_metrics` nearly always treats tokens one by one (an argmax), and then whole
logits need never exist: it is called on each tile of the loss, and what it returns is joined. That
this is the same is not taken for granted: the Trainer's first batch is evaluated with whole logits
as well, the function is called on them as the plain Trainer calls it, and both results are
compared. Where whole logits do not fit, each tile of the first batch is compared with its own two
parts instead.
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
from sppo_hf.engine.logits import LogitsRequest, NotTokenWise, join, map_tensors, same
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
"""What the Trainer pads logits and labels of a shorter rank with, before it gathers them."""

_ROWS_READ = 256
"""Rows of an evaluation dataset that are read before training, to know how long they are."""


class TrainerEvaluation(TrainerMethods):
    """What one Trainer does differently in evaluation."""

    replaced = ("evaluation_loop", "prediction_step")

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._function: Any = None
        self._request: LogitsRequest | None = None
        self._verdict: tuple[Any, bool] | None = None

    # -- before training ---------------------------------------------------------------------

    def before_training(self) -> None:
        """Refuse what an evaluation hours later would fail for, and name who wants whole logits.

        Raises:
            ConfigError: Metrics need logits, and the model runs in a pipeline.
            BudgetError: Metrics need whole logits, and those of a batch do not fit.
        """
        trainer, engine = self._trainer, self._engine()
        if engine is None:
            return
        engine.external_loss_name = self._loss_outside()
        wants_logits = trainer.compute_metrics is not None and not trainer.args.prediction_loss_only
        if not wants_logits or trainer.eval_dataset is None:
            return
        if isinstance(engine, PipelineEngine):
            self._refuse_pipeline(engine)
        # Without labels for the model, the model's own forward makes whole logits.
        if engine.external_loss_name or self._overrides("get_eval_dataloader"):
            return
        for labels_BT in self._longest_labels():
            try:
                self._check_room(engine, *labels_BT.shape)
            except BudgetError:
                function = trainer.preprocess_logits_for_metrics
                if function is None or not self._may_reduce(engine):
                    raise
                if not self._is_token_wise_on_noise(function, engine, labels_BT):
                    raise

    def _loss_outside(self) -> str:
        """What in the Trainer's arguments computes the loss from logits, "" for nothing."""
        if self._trainer.compute_loss_func is not None:
            return "compute_loss_func"
        if self._trainer.label_smoother is not None:
            return f"label_smoothing_factor={self._trainer.args.label_smoothing_factor}"
        return ""

    def _longest_labels(self) -> Iterator[Tensor]:
        """Labels `[B, T]` of an evaluation batch, of rows as long as any, for every dataset.

        Reading must change nothing: random numbers are put back, and what can only be read once is
        left alone.
        """
        trainer = self._trainer
        datasets = trainer.eval_dataset
        for dataset in datasets.values() if isinstance(datasets, dict) else (datasets,):
            if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                continue
            try:
                with _same_random_numbers():
                    rows = [dataset[i] for i in range(min(len(dataset), _ROWS_READ))]
                    rows.sort(key=lambda row: -len(row["input_ids"]))
                    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
                    batch = collate(rows[: trainer.args.per_device_eval_batch_size])
            # Whatever a dataset or a collator raises, the evaluation itself will say it.
            except Exception:
                logger.debug("no evaluation rows were read before training", exc_info=True)
                continue
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if isinstance(labels, Tensor) and labels.ndim == 2:
                yield labels

    def _is_token_wise_on_noise(self, function: Any, engine: Engine, labels_BT: Tensor) -> bool:
        """Whether a function treats tokens one by one, tried on a few of random logits."""
        device, dtype = self._trainer.accelerator.device, engine.parts.causal_lm.dtype
        labels_1M = labels_BT[:1, :8].to(device)
        vocab = engine.parts.text_config.vocab_size
        with _same_random_numbers():
            logits_1MV = torch.randn(*labels_1M.shape, vocab).to(device, dtype)
            try:
                self._in_two_parts(function, logits_1MV, labels_1M)
            except NotTokenWise:
                return False
        return True

    # -- evaluation --------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; the function for logits gets them when the model makes them."""
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
            ConfigError: The model runs in a pipeline, a `compute_loss` of a subclass missed logits,
                or the function for logits turns out not to treat tokens one by one after all.
            BudgetError: Whole logits are needed and do not fit.
        """
        step = (self._trainer, model, inputs, prediction_loss_only)
        engine = self._engine()
        self._request = None
        if engine is None or prediction_loss_only:
            with self._explaining_missing_logits(engine):
                return self._kind.prediction_step(*step, ignore_keys=ignore_keys)
        if isinstance(engine, PipelineEngine):
            self._refuse_pipeline(engine)
        engine.external_loss_name = self._loss_outside()
        request = engine.logits_request = self._new_request(engine, inputs)
        try:
            result = self._kind.prediction_step(*step, ignore_keys=ignore_keys)
        finally:
            engine.logits_request = None
        if request is not None and request.failure and not request.whole:
            self._refuse_parts(engine, request)
        self._request = request
        return result

    def _new_request(self, engine: Engine, inputs: dict[str, Any]) -> LogitsRequest | None:
        """What the model is to do with the logits of a batch."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or labels.ndim != 2 or engine.external_loss_name:
            return None  # nothing is run chunk by chunk, or it is refused by its own name
        function = self._function
        reducible = function is not None and self._may_reduce(engine)
        known = self._verdict[1] if self._verdict and self._verdict[0] == function else None
        if not reducible or known is False:
            self._check_room(engine, *labels.shape)
            return LogitsRequest(whole=True, requested_by=self._asked_by)
        if known:
            return LogitsRequest(whole=False, reduce=self._reduce)
        fits = True
        try:
            self._check_room(engine, *labels.shape)
        except BudgetError:
            fits = False
        # What ranks gather must have one form, whatever the length of their rows.
        if not self._on_all_ranks(fits):
            return LogitsRequest(whole=False, reduce=self._reduce_in_two_parts)
        return LogitsRequest(whole=True, reduce=self._try_to_reduce)

    @property
    def _asked_by(self) -> str:
        """Who wants logits, in a script's words."""
        return "predict()" if self._trainer.compute_metrics is None else "compute_metrics"

    def _may_reduce(self, engine: Engine) -> bool:
        """Whether nobody but the function for logits looks at the logits of an evaluation."""
        looked_at = engine.config.return_logits or any(
            self._overrides(name) for name in ("prediction_step", "compute_loss")
        )
        return not looked_at and self._trainer.label_names == ["labels"]

    # -- the function for logits -------------------------------------------------------------

    def _reduce(self, logits_1MV: Tensor, labels_1M: Tensor) -> Any:
        """Call the function on a tile, with the numbers that the plain Trainer would give it."""
        return self._function(self._as_the_trainer_sees(logits_1MV), labels_1M)

    def _as_the_trainer_sees(self, logits: Tensor) -> Tensor:
        # Under autocast Accelerate makes float32 of what a model returns.
        amp = getattr(self._trainer.accelerator, "native_amp", False)
        return logits.float() if amp and logits.dtype.itemsize < 4 else logits

    def _try_to_reduce(self, logits_1MV: Tensor, labels_1M: Tensor) -> Any:
        """Call the function on a tile; that it cannot take one is an answer."""
        try:
            return self._reduce(logits_1MV, labels_1M)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise NotTokenWise(f"on a part it raised {type(error).__name__}: {error}") from error

    def _reduce_in_two_parts(self, logits_1MV: Tensor, labels_1M: Tensor) -> Any:
        return self._in_two_parts(self._function, self._as_the_trainer_sees(logits_1MV), labels_1M)

    def _in_two_parts(self, function: Any, logits_1MV: Tensor, labels_1M: Tensor) -> Any:
        """Call the function on a tile and on two parts of it."""
        cut = (labels_1M.shape[1] + 1) // 2
        try:
            whole = function(logits_1MV, labels_1M)
            parts = [
                function(logits_1MV[:, part], labels_1M[:, part])
                for part in (slice(0, cut), slice(cut, None))
                if labels_1M[:, part].numel()
            ]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise NotTokenWise(f"on a part it raised {type(error).__name__}: {error}") from error
        if not same(join(parts, dim=1), whole):
            raise NotTokenWise("its parts differ from the whole")
        return whole

    def _preprocess(self, logits: Any, labels: Any) -> Any:
        """Stand-in for the Trainer's function: hands out what the tiles gave."""
        function, request = self._function, self._request
        self._request = None
        if request is None or request.reduce is None or request.logits_tokens == 0:
            return function(logits, labels)
        reduced = None
        with contextlib.suppress(NotTokenWise):
            reduced = self._with_padding(request, logits)
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

    def _with_padding(self, request: LogitsRequest, padded: Tensor) -> Any:
        """What the function makes of the logits of a rank whose rows other ranks' are longer than.

        It is there for this rank's tokens; the model's output is padded to the T of the longest,
        `[B, T, ...]`.
        """
        missing = padded.shape[1] - request.logits_tokens
        if request.reduced is None or missing <= 0:
            return request.reduced
        rows, device = padded.shape[0], padded.device
        dtype = request.logits_dtype or torch.float32
        logits_B1V = torch.full((rows, 1, request.vocab_size), _PADDING, device=device).to(dtype)
        labels_B1 = torch.full((rows, 1), _PADDING, device=device)
        column = self._function(self._as_the_trainer_sees(logits_B1V), labels_B1)

        def extend(reduced: Tensor, one: Tensor) -> Tensor:
            return torch.cat([reduced, one.expand(-1, missing, *one.shape[2:])], dim=1)

        return map_tensors(extend, request.reduced, column)

    # -- room and refusals -------------------------------------------------------------------

    def _on_all_ranks(self, flag: bool) -> bool:
        """Whether a flag is set on all ranks; all of them ask at the same time."""
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return flag
        summed: Any = reduce(torch.tensor(int(flag), device=accelerator.device), reduction="sum")
        return int(summed.item()) == accelerator.num_processes

    def _check_room(self, engine: Engine, batch_rows: int, total_tokens: int) -> None:
        """Raises BudgetError where whole logits of a batch do not fit."""
        trainer = self._trainer
        # Where batches go; weights may rest on the host.
        device = trainer.accelerator.device
        need, budget = engine.plans.device_bytes_with_logits(batch_rows, total_tokens, device)
        vocab = engine.parts.text_config.vocab_size
        values = batch_rows * total_tokens * vocab
        if getattr(trainer.accelerator, "native_amp", False):
            need += 4 * values
        if trainer.is_in_train and not engine.parts.is_sharded():
            need += OPTIMIZER_BYTES_PER_PARAMETER * engine.shape().trainable_parameters
        if budget is None or need <= budget:
            return
        function = "a preprocess_logits_for_metrics"
        if (self._function or trainer.preprocess_logits_for_metrics) is not None:
            function = "another preprocess_logits_for_metrics (this one does not run by parts)"
            if not self._may_reduce(engine):
                function = (
                    "with a Trainer that overrides neither prediction_step nor compute_loss, and "
                    "without return_logits and label_names, a preprocess_logits_for_metrics"
                )
        raise BudgetError(
            f"{self._asked_by} needs the logits of whole evaluation batches: {batch_rows} x "
            f"{total_tokens} x {vocab} values, with which an evaluation takes {need:,} bytes "
            f"({format_bytes(need)}) on the device; {budget:,} bytes ({format_bytes(budget)}) are "
            f"in the budget. Remedy: {function} that keeps of each token what is needed (for one, "
            "lambda logits, labels: logits.argmax(-1)), which then runs chunk by chunk; or a "
            "smaller per_device_eval_batch_size, shorter rows, or prediction_loss_only=True."
        )

    def _refuse_parts(self, engine: Engine, request: LogitsRequest) -> None:
        raise ConfigError(
            "preprocess_logits_for_metrics has to run chunk by chunk, because the logits of whole "
            "evaluation batches do not fit or because it did so on the first one, but it does not "
            f"treat tokens one by one: {request.failure}. Allowed: a function whose result for "
            "each token depends on that token's logits and label alone. Remedy: leave all else to "
            "compute_metrics; or a smaller per_device_eval_batch_size and return_logits=True."
        )

    def _refuse_pipeline(self, engine: Engine) -> None:
        raise ConfigError(
            f"{self._asked_by} needs logits, which in a pipeline (pp_size={engine.config.pp_size}) "
            "are on its last rank alone. Allowed: evaluation of the loss. Remedy: "
            "prediction_loss_only=True in TrainingArguments, or leave compute_metrics out, and "
            "compute metrics from the saved checkpoint in one process."
        )


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Put the random numbers of the host back to where they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
