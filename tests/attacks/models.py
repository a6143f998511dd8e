"""Model configurations with one field spoilt: type, sign, size, removal, or the whole text.

The judge of a number is simple: whole, above zero, below 2**31, and no text, list or bool. What
`sppo estimate` makes of it goes through the same functions here, without a process of its own.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.errors import SPPOError
from sppo_hf.planning.config_file import load_config, shipped_models
from sppo_hf.planning.feasibility import PlanResult, assess_request, request_for
from sppo_hf.planning.hardware import load_profile
from sppo_hf.reporting.plan_json import answer_to_dict
from tests.attacks.outcomes import Case, answered_in_process

_CONFIGS = (
    *sorted(shipped_models().values()),
    *sorted((Path(__file__).parents[1] / "planning" / "configs").glob("*.json")),
)
_NEEDED = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("intermediate_size", "num_key_value_heads", "head_dim"),
}
_SIZES = (
    *(0, -1, -4, 1, 2, 3, 7, 10**5, 2**31 - 1, 2**31, 10**12, 10**30, 10**4000),
    *("64", "", None, True, False, 64.0, 0.5, 1e308, float("nan"), float("inf"), -0.0),
    *([], [64], [[64]], {}, {"a": 64}),
)
_TEXTS: tuple[Callable[[str], str], ...] = (
    lambda text: text[: len(text) // 2],
    lambda text: "[" * 100_000,
    lambda text: '{"a":' * 5000 + "1" + "}" * 5000,
    lambda text: text.replace("{", "{" + '"x": ' + "9" * 5000 + ",", 1),
    lambda text: text.replace("{", "{" + '"text_config": ' + "{" * 30 + "}" * 30 + ",", 1),
    lambda text: text + " " * (5 * 2**20),
    lambda text: "[" + "[]," * 1_300_000 + "[]]",
    lambda text: "",
    lambda text: "null",
    lambda text: "\ufeff" + text,
    lambda text: text.replace(":", ""),
    lambda text: text * 2,
)


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` configurations, each with one thing wrong, or with none."""
    chosen = random.Random(seed)
    for number in range(count):
        file = chosen.choice(_CONFIGS)
        text = file.read_text(encoding="utf-8")
        fields: dict[str, Any] = json.loads(text)
        if number % 10 == 0:
            kind = chosen.randrange(len(_TEXTS))
            yield _case(f"models: {file.stem}, text {kind}", _TEXTS[kind](text), None, None)
            continue
        owner = fields.get("text_config", fields) if chosen.random() < 0.9 else fields
        name = chosen.choice(sorted(owner))
        if chosen.random() < 0.5:
            name = chosen.choice(sorted(_NEEDED & set(owner)) or sorted(owner))
        if chosen.random() < 0.1:
            del owner[name]
            yield _case(f"models: {file.stem} without {name}", json.dumps(fields), None, None)
            continue
        value = owner[name] = chosen.choice(_SIZES)
        said = f"{value!r:.60}" if not isinstance(value, int) or abs(value) < 10**30 else "huge"
        yield _case(f"models: {file.stem}, {name}={said}", json.dumps(fields), name, value)


def _case(title: str, text: str, name: str | None, value: object) -> Case:
    def attempt():
        with TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(text, encoding="utf-8")
            return answered_in_process(
                lambda: _answer(path),
                refusals=(SPPOError,),
                right=lambda answer: _makes_sense(answer, name, value),
            )

    return Case(title, attempt)


def _answer(path: Path) -> PlanResult:
    """Return the answer of `sppo estimate`."""
    return assess_request(
        request_for(
            load_config(path),
            SPPOConfig(num_chunks=2),  # the longest length is found sooner in few chunks
            profile=load_profile("h100"),
            total_tokens=16_384,
            trace=trace_config,
        )
    )


def _makes_sense(answer: object, name: str | None, value: object) -> bool:
    """Whether an answer may be given for this value, and its numbers are numbers."""
    assert isinstance(answer, PlanResult)
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31
    if name in _NEEDED and not whole and not (value is None and name in _OPTIONAL):
        return False
    json.dumps(answer_to_dict(answer), allow_nan=False)
    predicted = answer.estimate.device.total
    return predicted > 0 and math.isfinite(predicted)


_OPTIONAL = {"num_key_value_heads", "head_dim"}
