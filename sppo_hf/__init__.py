"""Exact fine-tuning of Hugging Face causal language models, chunk by chunk along the sequence.

`import sppo_hf` stays cheap: it imports neither torch nor Transformers. The public names below are
looked up in their own modules the first time that they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ConfigError",
    "OffloadError",
    "PipelineError",
    "RankLostError",
    "SPPOArguments",
    "SPPOConfig",
    "SPPOError",
    "SPPOPlugin",
    "ScheduleError",
    "StepObserver",
    "StepRecord",
    "UnsupportedModelError",
    "__version__",
]

if TYPE_CHECKING:
    from sppo_hf.config import SPPOConfig
    from sppo_hf.engine.step_observer import StepObserver, StepRecord
    from sppo_hf.errors import (
        BudgetError,
        ConfigError,
        OffloadError,
        PipelineError,
        RankLostError,
        ScheduleError,
        SPPOError,
        UnsupportedModelError,
    )
    from sppo_hf.integrations.arguments import SPPOArguments
    from sppo_hf.integrations.plugin import SPPOPlugin

_MODULES = {
    "SPPOArguments": "sppo_hf.integrations.arguments",
    "SPPOConfig": "sppo_hf.config",
    "SPPOPlugin": "sppo_hf.integrations.plugin",
    "StepObserver": "sppo_hf.engine.step_observer",
    "StepRecord": "sppo_hf.engine.step_observer",
}
"""Modules of the public names; all others are exceptions."""


def __getattr__(name: str) -> object:
    """Import the module that a public name lives in, on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'sppo_hf' has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES.get(name, "sppo_hf.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names too, so that completion finds them."""
    return sorted({*globals(), *__all__})
