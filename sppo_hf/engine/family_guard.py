"""Check at conversion that a model's family is exact, if the project's tests do not cover it.

Families in `PROVED` are compared with the unmodified model in this project's tests. For any other,
for classifiers, and for a user's own model class, conversion builds a tiny random model and
compares loss and all gradients in float64, once per process (about a second). A model that is not
exact is refused; if no tiny model can be built, conversion warns and says how to check it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.mixer_kernels import torch_code_alone
from sppo_hf.engine.model_parts import ROUTER_SWITCH, ModelParts
from sppo_hf.errors import ConfigError, UnsupportedModelError

_LISTED = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))

PROVED = frozenset(name for row in _LISTED["families"] for name in row["proved"])
"""Model types whose tiny models are exact in `tests/engine/test_exactness.py`.

`recipes/tools/family_table.py --write` lists them: without those that have states, of which many
settings change what goes along."""

_ROUTER_LOSS = "-router-loss"

PROVED_ROUTER_LOSS = frozenset(
    row["name"].removesuffix(_ROUTER_LOSS)
    for row in _LISTED["families"]
    if row["name"].endswith(_ROUTER_LOSS) and row["proved"]
)
"""Model types whose auxiliary router loss is exact in these tests, too."""


WITHOUT_ROUTER_LOSS = (
    "set model.config.output_router_logits = False and leave that argument out of calls (under "
    "TRL: router_aux_loss_coef=0.0 in its arguments)"
)
"""How to train a model with experts without the loss of its routers."""


def is_proved(parts: ModelParts) -> bool:
    """Whether tests cover the family; for a multimodal model, also that of its text decoder.

    They do not cover a user's subclass, nor every family's classifier, whatever its model type.
    """
    if not parts.is_stock or parts.is_classifier:
        return False
    if parts.has_router_loss() and parts.model_type not in PROVED_ROUTER_LOSS:
        return False
    return {parts.model_type, parts.text_config.model_type} <= PROVED


def check_router_loss(parts: ModelParts, asked_for: bool) -> None:
    """Call `check_family` if a call asks for a router loss that was off at conversion.

    Raises:
        UnsupportedModelError: as `check_family` does, or the model has no such loss.
    """
    if asked_for and not hasattr(parts.text_config, ROUTER_SWITCH):
        raise UnsupportedModelError(
            f"{parts.name} was called with output_router_logits=True, but has no loss of routers: "
            "its config has no such setting. Leave the argument out."
        )
    if asked_for and not (parts.is_stock and parts.model_type in PROVED_ROUTER_LOSS):
        check_family(parts, router_loss=True)


# By the class itself: a notebook may define another one of the same name.
_verdicts: dict[tuple[type, str], str] = {}
_state = threading.local()


@contextlib.contextmanager
def family_check_disabled() -> Iterator[None]:
    """Context in which this thread converts any family, to compare it with the unmodified one."""
    before = getattr(_state, "checking", False)
    _state.checking = True
    try:
        yield
    finally:
        _state.checking = before


def is_checking() -> bool:
    """Whether this thread is in `family_check_disabled`."""
    return getattr(_state, "checking", False)


def check_family(parts: ModelParts, *, router_loss: bool = False) -> None:
    """Refuse a model if its family is not covered by tests and a tiny model of it is not exact.

    With `router_loss`, the tiny model has one even where the model's config has it off.

    Raises:
        UnsupportedModelError: A tiny model of the family is not exact; says by how much.
    """
    if is_checking() or (is_proved(parts) and not router_loss):
        return
    config = _own_config(parts)
    if router_loss:
        config = copy.deepcopy(config)
        config.get_text_config(decoder=True).output_router_logits = True
    key = parts.model_class, str(config.to_diff_dict())
    if key not in _verdicts:
        try:
            _verdicts[key] = _try_tiny_model(parts, config)
        except ConfigError as error:
            _verdicts[key] = ""
            warnings.warn(
                f"{parts.name}, model type {parts.model_type!r}, is not among the families that "
                f"were proved exact, and no tiny model of it could be built to find out ({error}). "
                "Compare a few steps with and without SPPOPlugin before you rely on it.",
                stacklevel=2,
            )
    reason = _verdicts[key]
    if not reason:
        return
    if router_loss or parts.has_router_loss():
        raise UnsupportedModelError(
            f"{parts.name} cannot be trained chunk by chunk with a loss of its routers "
            f"(output_router_logits=True): {reason}. Remedy: {WITHOUT_ROUTER_LOSS}; or train it "
            "without sppo_hf."
        )
    raise UnsupportedModelError(
        f"{parts.name} cannot be trained chunk by chunk: {reason}. Train it without sppo_hf, "
        "or choose a family that `sppo check --list` names."
    )


def left_padding_reason(parts: ModelParts, rows: int) -> str:
    """Return why rows of a batch may not begin with padding; "" where they may.

    Of a family that tests do not cover, a tiny model is tried, once per process: mixers that keep
    padding out of their states are exact, and may do so in batches of several rows only.
    """
    if is_proved(parts) or is_checking():
        return ""
    config, rows = _own_config(parts), min(rows, 2)
    key = parts.model_class, f"{rows} rows of {config.to_diff_dict()}"
    if key not in _verdicts:
        try:
            _verdicts[key] = _try_tiny_model(parts, config, left_padded_rows=rows)
        except ConfigError as error:
            _verdicts[key] = f"no tiny {parts.model_type} could be built to try it ({error})"
    return _verdicts[key]


_built: dict[tuple[type, str], frozenset[type] | None] = {}


def built_classes(parts: ModelParts) -> frozenset[type] | None:
    """Classes of the modules that the model's class builds: those of a tiny model.

    None if no tiny model can be built; empty for Transformers' own code, which builds its own.
    """
    if parts.is_stock:
        return frozenset()
    key = parts.model_class, str(_own_config(parts).to_diff_dict())
    if key not in _built:
        # Imported at run time, because the harness is in a folder above this one.
        tiny_model = importlib.import_module("sppo_hf.testing.check").tiny_model
        try:
            model = tiny_model(_own_config(parts), model_class=parts.model_class)
        except ConfigError:
            _built[key] = None
        else:
            _built[key] = frozenset(map(type, model.modules()))
    return _built[key]


def _own_config(parts: ModelParts) -> PreTrainedConfig:
    return parts.causal_lm.config if parts.is_multimodal else parts.text_config


def _try_tiny_model(
    parts: ModelParts, config: PreTrainedConfig, *, left_padded_rows: int = 0
) -> str:
    """Return why a tiny model of `config` is refused or not exact; "" where it is exact.

    A call may be the first to need this, whatever it runs in: no gradients, autocast.

    Raises:
        ConfigError: It cannot be built.
    """
    # Imported at run time, because the harness is in a folder above this one.
    check_config = importlib.import_module("sppo_hf.testing.check").check_config

    settings = SPPOConfig(num_chunks=4, show_plan=False, show_progress=False)
    with (
        family_check_disabled(),
        torch_code_alone(parts),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        usual = parts.is_stock and not parts.is_classifier
        model_class = None if usual else parts.model_class
        result = check_config(
            config, settings, model_class=model_class, left_padded_rows=left_padded_rows
        )
    if result.status == "exact":
        return ""
    if result.status == "refused":
        # What it begins and ends with the refusal of the model itself says.
        reason = re.sub(r"^\S+ cannot (be trained|run) chunk by chunk: ", "", result.reason)
        return reason.removesuffix(" Train it without sppo_hf.").rstrip(".")
    worst = result.worst_parameters[0][0] if result.worst_parameters else "the loss"
    return (
        f"a tiny random {parts.model_type} model was not exact when it was tried just now (error "
        f"{result.error:.1e} in {worst}, at most {result.allowed:.0e} is allowed)"
    )
