"""Checks every language model of the installed Transformers: exact, refused, or not tried, and why.

    python recipes/tools/census.py llama mamba  # prints what becomes of each
    python recipes/tools/census.py "llama ForSequenceClassification"  # of a classifier
    python recipes/tools/census.py --write      # all of them; recipes/MODELS.md has the counts

The list is Transformers' own: the types of which `AutoModelForCausalLM`,
`AutoModelForImageTextToText` or `AutoModelForMultimodalLM` makes a model, and the classifiers of
these types. "Not tried" are those of which no tiny random model can be built or run. Takes minutes;
the exit code is 1 if any is neither exact nor refused nor not tried.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import transformers
from transformers.models.auto import modeling_auto

from recipes.tools.family_table import CENSUS, ROOT, write_page
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.errors import ConfigError
from sppo_hf.planning.config_file import CLASSIFIERS
from sppo_hf.testing.check import check_config, check_model
from sppo_hf.testing.tiny_models import classifier_class, tiny_config

TYPES = sorted(
    {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", ()),
    }
)
CLASSIFIER_TYPES = [
    f"{name} {kind}"
    for kind in CLASSIFIERS
    for name in getattr(transformers, f"AutoModel{kind}")._model_mapping._model_mapping
    if name in TYPES
]
SETTINGS = SPPOConfig(
    # A chunk of one token comes first, where models with states may have it.
    chunk_lengths=(1, 9, 5, 8, 6),
    recompute="full",
    min_offload_size=1,
    show_plan=False,
)

# What Transformers' own code raises on tiny configurations.
_CRASHES = (TypeError, RuntimeError, AttributeError, LookupError, AssertionError, ValueError)


def census(names: Iterable[str] = TYPES) -> dict[str, tuple[str, str]]:
    """Check model types.

    Returns:
        For each, "exact", "text decoder alone", "refused", "not tried" or "not exact", and the
        worst error or the reason.
    """
    # Conversion would check unknown families itself, a second time.
    with family_check_disabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: _outcome(name) for name in names}


def _outcome(name: str) -> tuple[str, str]:
    family, _, kind = name.partition(" ")
    try:
        if kind:
            config = tiny_config(family, num_labels=3)
            model_class = classifier_class(config, kind)
            result = check_config(config, SETTINGS, model_class=model_class)
        else:
            result = check_model(name, SETTINGS)
    except ConfigError as error:
        return "not tried", str(error)
    except _CRASHES as error:
        return "not exact", f"{type(error).__name__}: {error}"
    print(f"{name}: {result.status}", file=sys.stderr, flush=True)
    if result.status == "exact":
        return ("text decoder alone" if result.note else "exact"), f"{result.error:.0e}"
    return result.status, result.reason or f"{result.error:.1e} in {result.worst_parameters[:1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*", help="default: all")
    parser.add_argument("--write", action="store_true", help="put the counts into the page")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = census(options.types or [*TYPES, *CLASSIFIER_TYPES])
    for name, (status, detail) in sorted(found.items(), key=lambda item: item[1][0]):
        print(f"{status}: {name}: {' '.join(detail.split())[:200]}")
    print(dict(Counter(status for status, _ in found.values())))
    if options.write and not options.types:
        path, version = ROOT / CENSUS, transformers.__version__
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for label, names in ((version, TYPES), (f"{version}, classifiers", CLASSIFIER_TYPES)):
            known[label] = _counts([found[name] for name in names])
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        write_page(ROOT)
    return int(any(status == "not exact" for status, _ in found.values()))


def _counts(found: Sequence[tuple[str, str]]) -> dict[str, float]:
    errors = [float(detail) for status, detail in found if _is_exact(status)]
    return {**Counter(status for status, _ in found), "worst error": max(errors)}


def _is_exact(status: str) -> bool:
    return status in ("exact", "text decoder alone")


if __name__ == "__main__":
    sys.exit(main())
