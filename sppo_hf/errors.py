"""The exceptions that sppo_hf raises for its callers.

A message says what was seen, what is allowed and what to do about it. Violated invariants inside
the package are `assert`s with a sentence, never one of these.
"""


class SPPOError(Exception):
    """Base of every error that sppo_hf raises on purpose."""


class ConfigError(SPPOError, ValueError):
    """A setting has a wrong name, type or value, or contradicts another setting or the input."""


class UnsupportedModelError(SPPOError):
    """The model cannot be run chunk by chunk exactly, so it is refused before the first step."""


class BudgetError(SPPOError):
    """A run needs more bytes than the budget of a memory tier."""


class ScheduleError(SPPOError):
    """A schedule is malformed, or asks for something before it exists."""


class OffloadError(SPPOError):
    """A copy between memory tiers failed, or the memory for it could not be allocated."""


class PipelineError(SPPOError):
    """A rank of a pipeline failed, or the ranks do not agree on what they run."""


class RankLostError(PipelineError):
    """Another rank failed, ended or was lost, so this one cannot go on."""


def first_line(error: Exception) -> str:
    """Return the class and the beginning of the message of another library's error, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"
