"""Making adapters without a warning that is none of the user's doing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Context for PEFT's `get_peft_model` and `from_pretrained`.

    PEFT asks models for `is_gradient_checkpointing`, a name that newer releases of Transformers
    call deprecated. Nothing else is silenced.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield
