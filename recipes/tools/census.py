"""Checks every language model of the installed Transformers: exact, refused, or not tried, and why.

    python recipes/tools/census.py llama mamba  # prints what becomes of each
    python recipes/tools/census.py "llama ForSequenceClassification"  # of a classifier
    python recipes/tools/census.py --write      # all of them; recipes/MODELS.md has the counts
    python recipes/tools/census.py --write --images  # those that take images; and lists of these

The list is Transformers' own: the types of which `AutoModelForCausalLM`,
`AutoModelForImageTextToText` or `AutoModelForMultimodalLM` makes a model, and the classifiers of
these types. "Not tried" are those of which no tiny random model can be built or run. Types that
take images are tried with images, too, if they are exact on text. Takes minutes; the exit code is 1
if any is neither exact nor refused nor not tried.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

from recipes.tools.family_table import CENSUS, ROOT, short_reason, write_page
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.errors import ConfigError
from sppo_hf.planning.config_file import CLASSIFIERS
from sppo_hf.testing.check import CheckResult, ImagesResult, check_config, check_model
from sppo_hf.testing.tiny_families import UNLISTED
from sppo_hf.testing.tiny_models import classifier_class, tiny_config

_TAKE_IMAGES = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
_MULTIMODAL = {
    *_TAKE_IMAGES,
    *getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", ()),
}
TYPES = sorted({*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_MULTIMODAL})
_VARIANTS = [name for name in UNLISTED if "-" in name]
"""Types with settings of some of their checkpoints."""
WITH_IMAGES = sorted({*_MULTIMODAL, *_VARIANTS})
"""Types that may take images."""
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


class Outcome(NamedTuple):
    """What became of one model type."""

    status: str
    """"exact", "text decoder alone", "refused", "not tried" or "not exact"."""
    detail: str
    """The worst error or the reason."""
    images: ImagesResult | None = None
    """With images; None for types that take none."""


def census(names: Iterable[str] = TYPES) -> dict[str, Outcome]:
    """Check model types."""
    # Conversion would check unknown families itself, a second time.
    with family_check_disabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: _outcome(name) for name in names}


def _in_words(images: ImagesResult | None) -> str:
    if images is None:
        return ""
    return f"; with images {images.status} {images.reason or format(images.error, '.0e')}"[:200]


def _outcome(name: str) -> Outcome:
    family, _, kind = name.partition(" ")
    try:
        if kind:
            config = tiny_config(family, num_labels=3)
            model_class = classifier_class(config, kind)
            result = check_config(config, SETTINGS, model_class=model_class)
        else:
            result = check_model(name, SETTINGS, images=True)
    except ConfigError as error:
        return Outcome("not tried", str(error), _untried_images(name, "not tried", ""))
    except _CRASHES as error:
        return Outcome("not exact", f"{type(error).__name__}: {error}")
    print(f"{name}: {result.status}", file=sys.stderr, flush=True)
    images = result.images or _untried_images(name, result.status, result.note)
    return Outcome(*_status_of(result), images)


def _status_of(result: CheckResult) -> tuple[str, str]:
    """Status and detail of an `Outcome`."""
    if result.status == "exact":
        return ("text decoder alone" if result.note else "exact"), f"{result.error:.0e}"
    if result.images is not None and result.images.status == "not exact":
        return result.status, f"with images: {result.images.error:.1e} {result.images.reason}"
    return result.status, result.reason or f"{result.error:.1e} in {result.worst_parameters[:1]}"


def _untried_images(name: str, status: str, note: str) -> ImagesResult | None:
    """What to say of images of a type that takes some but was not tried with them."""
    if name not in _TAKE_IMAGES or (status == "exact" and not note):
        return None
    if status == "refused":
        return ImagesResult(status="refused", reason="on text, too")
    reason = "only its text decoder can be built so small" if note else "nor on text"
    return ImagesResult(status="not tried", reason=reason)


def with_images(found: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """Groups of types with the same outcome with images: status, reason, types, worst error."""
    groups: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for name, (_, _, images) in sorted(found.items()):
        if images is not None:
            reason = re.sub(r"^\w+For\w+:? ", "", short_reason(images.reason))
            groups[images.status, reason][name] = images.error or 0.0
    order = ("exact", "not exact", "refused", "not tried")
    # Reasons of images alone come first.
    by_status = sorted(groups, key=lambda key: (order.index(key[0]), "on text" in key[1], key))
    return [
        {
            "status": status,
            "reason": reason,
            "types": list(groups[status, reason]),
            "worst error": max(groups[status, reason].values()),
        }
        for status, reason in by_status
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*", help="default: all")
    parser.add_argument("--write", action="store_true", help="put the counts into the page")
    parser.add_argument("--images", action="store_true", help="only those that may take images")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    every = WITH_IMAGES if options.images else [*TYPES, *CLASSIFIER_TYPES, *_VARIANTS]
    found = census(options.types or every)
    for name, (status, detail, images) in sorted(found.items(), key=lambda item: item[1][0]):
        print(f"{status}: {name}: {' '.join(detail.split())[:200]}{_in_words(images)}")
    print(dict(Counter(outcome.status for outcome in found.values())))
    if options.write and not options.types:
        path, version = ROOT / CENSUS, transformers.__version__
        known = json.loads(path.read_text(encoding="utf-8"))
        if not options.images:
            for label, names in ((version, TYPES), (f"{version}, classifiers", CLASSIFIER_TYPES)):
                known["counts"][label] = _counts([found[name] for name in names])
        groups = with_images({name: found[name] for name in WITH_IMAGES})
        known["images"] = {"transformers": version, "groups": groups}
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        write_page(ROOT)
    return int(any(outcome.status == "not exact" for outcome in found.values()))


def _counts(found: Sequence[Outcome]) -> dict[str, float]:
    errors = [float(outcome.detail) for outcome in found if _is_exact(outcome.status)]
    return {**Counter(outcome.status for outcome in found), "worst error": max(errors)}


def _is_exact(status: str) -> bool:
    return status in ("exact", "text decoder alone")


if __name__ == "__main__":
    sys.exit(main())
