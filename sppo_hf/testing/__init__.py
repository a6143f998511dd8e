"""The exactness harness: tiny models of any family, compared with and without chunks."""

from sppo_hf.testing.check import CheckResult, check_config, check_model
from sppo_hf.testing.exactness import compare, compare_drift, float64_everywhere
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch

__all__ = [
    "CheckResult",
    "build_tiny_model",
    "check_config",
    "check_model",
    "compare",
    "compare_drift",
    "float64_everywhere",
    "make_batch",
]
