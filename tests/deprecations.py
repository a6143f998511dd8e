"""Deprecated uses that another process printed, where no filter of pytest's can see them."""

import re

# Path and line of the module that Python attributes a warning to, then its class.
_WARNED = re.compile(
    r"^.*/(?:transformers|accelerate|torch|sppo_hf|tests|recipes)/.*:\d+: "
    # PyTorch imports pynvml where it is installed, which is no use of ours.
    r"(?:Future|Deprecation|PendingDeprecation)Warning: (?!The pynvml package is deprecated).*$",
    re.MULTILINE,
)


def assert_no_deprecation(printed: str) -> None:
    """Fail if a process showed its user a deprecation of the libraries below us.

    Args:
        printed: Its output and error output.
    """
    found = _WARNED.findall(printed)
    assert not found, "deprecated use of a library:\n" + "\n".join(found)
