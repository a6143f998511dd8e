"""The kinds of error that sppo_hf raises for its callers; it knows nothing of anything else.

A message says what was seen, what is allowed and what to do about it. Broken promises inside the
package are `assert`s with a sentence, never one of these.
"""


class SPPOError(Exception):
    """Base of every error that sppo_hf raises on purpose."""


class ConfigError(SPPOError, ValueError):
    """A setting has a wrong name, type or value, or contradicts another setting or the input."""


class UnsupportedModelError(SPPOError):
    """The model cannot be run chunk by chunk exactly, so it is refused before the first step."""


class BudgetError(SPPOError):
    """The bytes that a run needs do not fit into a tier's budget."""


class ScheduleError(SPPOError):
    """A schedule is malformed, or asks for something before it exists."""


class OffloadError(SPPOError):
    """A copy between tiers, or the memory it needs, could not be set up."""


class PipelineError(SPPOError):
    """A rank of a pipeline failed, or the ranks do not agree on what they run."""


class RankLostError(PipelineError):
    """Another rank failed, ended or was lost, so this one cannot go on."""


def first_line(error: Exception) -> str:
    """An error of another library in one line: its class and the beginning of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"
