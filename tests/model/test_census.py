"""Every language model of the installed Transformers: exact, refused with a reason, or not tried.

The list is Transformers' own: the types of which `AutoModelForCausalLM`,
`AutoModelForImageTextToText` or `AutoModelForMultimodalLM` makes a model. "Not tried" are those of
which no tiny random model can be built or run; the message says why. `--log-cli-level=INFO` shows
the table.
"""

import logging
import warnings
from collections import Counter

import pytest
from transformers.models.auto import modeling_auto

from sppo_hf import ConfigError, SPPOConfig
from sppo_hf.model import guard
from sppo_hf.model.check import check_model

log = logging.getLogger(__name__)

TYPES = sorted(
    {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
)
SETTINGS = SPPOConfig(
    chunk_lengths=(5, 9, 1, 8, 6), recompute="full", min_offload_size=1, show_plan=False
)

# Their tiny models are not exact, which conversion finds out (`guard`) and refuses.
REFUSED_WHEN_TRIED: set[str] = set()


def _outcome(name: str) -> tuple[str, str]:
    try:
        result = check_model(name, SETTINGS)
    except ConfigError as error:
        return "not tried", str(error)
    if result.status == "exact":
        return ("text decoder alone" if result.note else "exact"), f"{result.error:.0e}"
    return result.status, result.reason or f"{result.error:.1e} in {result.worst_parameters[:1]}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # families warn at their first import
def test_every_type_is_exact_or_refused_or_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard._state, "checking", True, raising=False)  # tried here, not twice
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = {name: _outcome(name) for name in TYPES}
    for name, (status, detail) in sorted(outcomes.items(), key=lambda item: item[1][0]):
        log.info("%s: %s: %s", status, name, " ".join(detail.split())[:200])
    counts = Counter(status for status, _ in outcomes.values())
    log.info("%s", counts)
    wrong = {name for name, (status, _) in outcomes.items() if status == "not exact"}
    assert wrong <= REFUSED_WHEN_TRIED, {name: outcomes[name] for name in wrong}
    assert all(detail for _, detail in outcomes.values()), "whatever is not exact says why"
    assert counts["exact"] >= 90, counts
