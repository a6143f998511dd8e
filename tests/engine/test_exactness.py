"""The exactness harness: every family x chunkings x modes x scenarios, in real float64.

Invariants 1 to 3 of the design. A cell compares loss and every gradient of the converted model
with the unmodified model's; the tolerance is 1e-9, what is measured is 1e-14.

The families named in `PRODUCT` meet every setting of each axis of the product. Those in `CROSS`,
one of each feature, get every pair of settings of two axes: a cross (one axis varied at a time, at
the hardest setting of the others) runs always, the pairs that it leaves out are `slow`. Settings
drawn together: test_exactness_random.py. Without `--all` only one family has all of the cross; the
others of `CROSS` take turns at a ninth of the cells, those of `PRODUCT` at one each, and each of
those pairs meets one of `CROSS`. All other families of `tiny_families` get three hard cells each,
or must be refused with the reason that is written here; without `--all` two cells where no other
family is like them, and one for every tenth of the rest. Families with states get both modes in
both orders; without `--all` each one of these, by turns.
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from sppo_hf.attention.backends import base
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, is_converted
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.engine.model_parts import find_causal_lm
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.planning.config_file import bypasses_attention_interface
from sppo_hf.planning.plan import Plan
from sppo_hf.testing.exactness import (
    ExactnessReport,
    Gradients,
    compare,
    compare_drift,
    run_batch,
    run_reference,
)
from sppo_hf.testing.tiny_families import FAMILIES
from sppo_hf.testing.tiny_models import (
    add_lora,
    batch_for,
    build_tiny_classifier,
    build_tiny_model,
    make_batch,
)
from tests.engine.forced_plans import change_plans, trace_short_scans
from tests.sweeps import ALL, KINDS, sample, turn

TOKENS = 23

PRODUCT = [
    *("llama", "llama-dynamic-rope", "llama-bias-tied", "mistral", "qwen2", "qwen3"),
    *("gemma2", "gemma3_text", "phi3", "phi3-longrope", "olmo2", "granite", "starcoder2"),
    *("cohere2", "smollm3", "glm4", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3"),
]

# Nothing special, tied weights and biases, rotary tables that know the length, windows, soft caps
# and norms behind blocks, sinks, experts, latent attention.
CROSS = [
    *("llama", "llama-bias-tied", "phi3-longrope", "mistral", "gemma2", "gpt_oss", "qwen3_moe"),
    "deepseek_v3",
]

REFUSED = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), "begin every call with a state"),
    **dict.fromkeys(("rwkv", "xlstm"), "in place over the one before"),
    "recurrent_gemma": "begin every call of several tokens with zeros",
    "minimax": "goes on token by token",
    **dict.fromkeys(
        ("falcon", "bloom", "mpt", "gpt_neo", "stablelm", "biogpt"),
        "bypasses .*AttentionInterface",
    ),
    **{
        name: "bypasses .*AttentionInterface"
        for name in ("gptj", "codegen")  # until Transformers 5.24
        if bypasses_attention_interface(name)
    },
    "opt": "no list of decoder layers",
    "qwen4_exp_text": "an indexer of its own|indexed_attention|sparse_attention",
    **dict.fromkeys(
        ("deepseek_v4", "glm5_next"),
        "an indexer of its own chooses the keys.*index_topk=",
    ),
    "diffllama": "attends twice",
    "doge": "mask",
    "paligemma": "is not causal by itself",
    "t5": "no causal language model",
}

# Heads of Transformers' own for all families and one of GPT-2's; windows, experts.
CLASSIFIERS_OF = [
    *(f"{name} ForSequenceClassification" for name in ("llama", "gpt2", "gemma3_text")),
    "qwen3_moe ForSequenceClassification",
    *("llama ForTokenClassification", "mistral ForTokenClassification"),
    *("llama ForQuestionAnswering", "mixtral ForQuestionAnswering"),
]

# Families of three mixers share the cross, the others have two cells.
MIXERS = ["qwen3_next", "bamba", "lfm2"]
STATES = [
    *("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid"),
    *("falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "mamba2"),
    *("lfm2_moe", "lfm3", "zaya"),
]

# Their mixers and layers are those of `bailing_hybrid`, `qwen3_5_text` and `qwen3_next`, of `bamba`
# and of `lfm2`; the first is met by pipelines.
_AS_OTHERS = {"kimi_linear", "qwen3_5_moe_text", "granitemoehybrid", "lfm2_moe"}

# A family that the installed Transformers does not have yet is no test case.
OTHERS = [name for name, family in FAMILIES.items() if family.model_type in CONFIG_MAPPING_NAMES]
OTHERS = [name for name in OTHERS if name not in {*PRODUCT, *REFUSED, *MIXERS, *STATES}]

# Multimodal models of kinds that are tried in every run; these themselves only with `--all`.
RARE = ("llava", "internvl", "smolvlm", "qwen2_vl", "qwen3_vl_moe", "paddleocr_vl")
RARE += ("glm4v", "glm46v", "glm4v_moe", "glm_ocr")

CHUNKINGS: dict[str, dict[str, Any]] = {
    "1": {"num_chunks": 1},
    "2": {"num_chunks": 2, "partition": "even"},
    # Longer and shorter than a window; of the last token alone, which has no label.
    "uneven": {"chunk_lengths": (1, 13, 8, 1)},
    # As many as a window is long, and more; then a chunk that sees no more than some of them.
    "one-token": {"chunk_lengths": (1,) * 9 + (TOKENS - 9,)},
    # The layer over all tokens, and in it token-wise modules on a few at a time.
    "tiles": {"num_chunks": 1, "layer_tile_tokens": 5},
    # A state before a single token is generation to its mixer.
    "with-states": {"chunk_lengths": (1, 4, 2, 16)},
}


AGAIN = "attention again"
"""A value of `Cell.recompute`: layers are recomputed, every other (layer, chunk) with attention."""


class Cell(NamedTuple):
    """One comparison."""

    chunking: str
    recompute: str
    offload: str
    scenario: str
    order: str = "by_chunk"

    def config(self) -> SPPOConfig:
        """The settings under test."""
        return SPPOConfig(
            **CHUNKINGS[self.chunking],
            recompute="full" if self.recompute == AGAIN else self.recompute,  # type: ignore[arg-type]
            offload=self.offload,  # type: ignore[arg-type]
            order=self.order,  # type: ignore[arg-type]
            min_offload_size=1,
        )


def _cross() -> list[Cell]:
    hardest = [Cell(chunking, "full", "full", "plain") for chunking in CHUNKINGS]
    hardest = [cell for cell in hardest if cell.chunking != "with-states"]
    modes = [
        Cell("uneven", recompute, offload, "plain")
        for recompute, offload in [
            *(("none", "none"), ("none", "full"), ("full", "none"), ("selective", "full")),
        ]
    ]
    scenarios = [
        Cell("uneven", "full", "none", scenario) for scenario in ("lora", "padding", "accumulation")
    ]
    by_layer = [
        Cell("uneven", "full", "none", "accumulation", "by_layer"),
        Cell("uneven", "none", "full", "lora", "by_layer"),
        Cell("tiles", "none", "none", "lora", "by_layer"),
        Cell("tiles", "full", "full", "accumulation", "by_layer"),
    ]
    again = [
        Cell("uneven", AGAIN, "full", "plain"),
        Cell("uneven", AGAIN, "none", "lora", "by_layer"),
    ]
    return hardest + modes + scenarios + by_layer + again


def _each_setting() -> list[Cell]:
    """The fewest cells that have every setting of each axis."""
    return [
        Cell("one-token", "full", "full", "plain"),
        Cell("uneven", "selective", "full", "padding"),
        Cell("uneven", "full", "none", "lora"),
        Cell("2", "none", "full", "accumulation", "by_layer"),
        Cell("1", "full", "none", "plain", "by_layer"),
        Cell("tiles", AGAIN, "full", "lora", "by_layer"),
    ]


def _cross_with_states() -> list[Cell]:
    modes = itertools.product(("none", "full"), ("none", "full"))
    cells = [Cell("with-states", recompute, offload, "plain") for recompute, offload in modes]
    cells += [Cell(chunking, "full", "none", "plain") for chunking in ("1", "2", "tiles")]
    scenarios = ("lora", "padding", "accumulation")
    cells += [Cell("with-states", "full", "none", scenario) for scenario in scenarios]
    cells.append(Cell("with-states", AGAIN, "full", "plain"))
    return [*cells, *(cell._replace(order="by_layer") for cell in (cells[0], cells[-3]))]


def _product() -> list[Cell]:
    """The whole product; each setting of the other axes meets both settings of offload."""
    chunkings = [name for name in CHUNKINGS if name != "with-states"]
    settings = itertools.product(
        chunkings, ("none", "full"), ("plain", "lora", "padding", "accumulation")
    )
    cells = [
        Cell(chunking, recompute, ("none", "full")[index % 2], scenario, order)
        for index, (chunking, recompute, scenario) in enumerate(settings)
        for order in ("by_chunk", "by_layer")
    ]
    return [cell for cell in cells if cell not in _cross()]


@pytest.fixture(autouse=True)
def _short_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_short_scans(monkeypatch)


class Case(NamedTuple):
    """A family in a scenario, and what the unmodified model makes of it."""

    model: torch.nn.Module
    batch: dict[str, torch.Tensor]
    accumulation: int
    reference: Gradients


@functools.lru_cache(maxsize=4)
def _case(family: str, scenario: str) -> Case:
    if family == "llama4" and transformers.__version__ == "5.24.0":
        pytest.skip("the unmodified model raises: its outputs have no image_outputs in 5.24.0")
    family, _, kind = family.partition(" ")
    with warnings.catch_warnings():
        # Some families' modules warn at their first import.
        warnings.simplefilter("ignore")
        model: Any = build_tiny_classifier(family, kind) if kind else build_tiny_model(family)
    batch, accumulation = make_batch(tokens=TOKENS), 1
    if scenario == "lora":
        model = add_lora(model)
    elif scenario == "padding":
        left = (0, 0, 0, 0) if kind == "ForQuestionAnswering" else (6, 0, 0, 11)
        batch = make_batch(rows=4, tokens=TOKENS, padding=(0, 9, 22, 3), left_padding=left)
    elif scenario == "right-padding":
        batch = make_batch(rows=4, tokens=TOKENS, padding=(0, 9, 22, 3))
    elif scenario == "accumulation":
        batch, accumulation = make_batch(rows=3, tokens=TOKENS, padding=(4, 0, 11)), 2
    batch = batch_for(find_causal_lm(model), batch)
    reference = run_reference(model, batch, accumulation=accumulation)
    return Case(model, batch, accumulation, reference)


def _assert_exact(family: str, cell: Cell) -> None:
    case = _case(family, cell.scenario)
    # What the check at conversion would find is found here.
    with family_check_disabled(), pytest.MonkeyPatch.context() as patch:
        if cell.recompute == AGAIN:
            _force_attention_again(patch)
        report = compare(
            case.model,
            case.batch,
            cell.config(),
            accumulation=case.accumulation,
            reference=case.reference,
        )
    assert report.exact, str(report)
    assert report.worst.scale > 0, f"all gradients are zero: {report}"


def _force_attention_again(patch: pytest.MonkeyPatch) -> None:
    def forced(plan: Plan) -> Plan:
        if any(layer.borrows_keys for layer in plan.shape.layers):
            return plan  # never planned so
        modes = tuple(
            tuple(
                dataclasses.replace(mode, saved="hidden") if (chunk + layer) % 2 else mode
                for layer, mode in enumerate(row)
            )
            for chunk, row in enumerate(plan.layer_modes)
        )
        return dataclasses.replace(plan, layer_modes=modes)

    change_plans(patch, forced)


def _in_turn(
    families: Sequence[str], cells: Sequence[Cell], step: int, whole: Sequence[str] = ()
) -> list[Any]:
    """Every `step`-th cell for a family, others for the next one; all for those of `whole`."""
    return [
        pytest.param(family, cell, id=f"{family}-{'/'.join(cell)}")
        for index, family in enumerate(families)
        for cell in (cells if family in whole else turn(cells, step, index))
    ]


@pytest.mark.parametrize(("family", "cell"), _in_turn(CROSS, _cross(), 9, whole=("llama",)))
def test_family_on_the_cross(family: str, cell: Cell) -> None:
    _assert_exact(family, cell)


@pytest.mark.parametrize(
    ("family", "cell"),
    _in_turn([name for name in PRODUCT if name not in CROSS], _each_setting(), 6),
)
def test_family_in_each_setting(family: str, cell: Cell) -> None:
    _assert_exact(family, cell)


@pytest.mark.parametrize(
    ("family", "cell"),
    [
        *_in_turn(CLASSIFIERS_OF, _each_setting(), 6),
        *_in_turn(["qwen3_5_text ForSequenceClassification"], _cross_with_states(), 5),
    ],
)
def test_classifiers(family: str, cell: Cell) -> None:
    _assert_exact(family, cell)


def _pairs_of(cell: Cell) -> set[Any]:
    return set(itertools.combinations(enumerate(cell), 2))


def _pairs() -> list[Cell]:
    """Cells of the product, each the one with most pairs of settings not met before, until none."""
    product = [c._replace(offload=mode) for c in _product() for mode in ("full", "none")]
    met, chosen = set[Any]().union(*map(_pairs_of, _cross())), list[Cell]()
    while cell := max(product, key=lambda c: len(_pairs_of(c) - met)):
        if _pairs_of(cell) <= met:
            break
        met |= _pairs_of(cell)
        chosen.append(cell)
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "cell"),
    [
        pytest.param(family, cell, id=f"{family}-{'/'.join(cell)}")
        for index, cell in enumerate(_pairs())
        for family in turn(CROSS, len(CROSS), index)
    ],
)
def test_family_on_every_pair_of_settings(family: str, cell: Cell) -> None:
    _assert_exact(family, cell)


_KINDS = [name for name in OTHERS if name in KINDS]
_LIKE_OTHERS = sample([name for name in OTHERS if name not in {*KINDS, *RARE}], 10)
_LIKE_OTHERS += sample(RARE, 10)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(n, marks=[pytest.mark.slow] if n in RARE else [])
        for n in (*_KINDS, *_LIKE_OTHERS)
    ],
)
def test_other_families(family: str) -> None:
    _assert_exact(family, Cell("uneven", "none", "full", "padding"))


@pytest.mark.parametrize(
    ("family", "cell"),
    [
        pytest.param(family, cell, id=f"{family}-{'/'.join(cell)}")
        for index, family in enumerate([*_KINDS, *(_LIKE_OTHERS if ALL else ())])
        for cell in turn(
            [
                # Recomputed without unused matmuls, of which adapters have most.
                Cell("uneven", "full", "none", "lora"),
                # Without an attention mask: kernels then get none, and go by what a module says.
                Cell("uneven", AGAIN, "none", "plain", "by_layer"),
            ],
            2,
            index,
        )
    ],
)
def test_other_kinds_of_families_run_again(family: str, cell: Cell) -> None:
    _assert_exact(family, cell)


@pytest.mark.parametrize(
    ("family", "cell"),
    [
        pytest.param(family, cell, id="/".join((family, *cell)))
        for family, step in zip(MIXERS, (2, 2, 3), strict=True)
        for cell in turn(_cross_with_states(), step, MIXERS.index(family))
    ],
)
def test_mixer_on_the_cross(family: str, cell: Cell) -> None:
    _assert_exact(family, cell)


@pytest.mark.parametrize(
    "family",
    [
        name
        for name in STATES
        if FAMILIES[name].model_type in CONFIG_MAPPING_NAMES and (ALL or name not in _AS_OTHERS)
    ],
)
def test_other_families_with_states(family: str) -> None:
    # Its mixers return more than hidden states, so that none can run row by row.
    padding = "right-padding" if family == "zaya" else "padding"
    cells = [
        Cell("with-states", "none", "full", padding, "by_layer"),
        Cell("with-states", "full", "none", padding),
        Cell("with-states", "none", "full", padding),
        Cell("with-states", "full", "none", padding, "by_layer"),
    ]
    for cell in turn(cells, len(cells), STATES.index(family)):
        _assert_exact(family, cell)


@pytest.mark.parametrize(
    "family", [name for name in REFUSED if FAMILIES[name].model_type in CONFIG_MAPPING_NAMES]
)
def test_families_that_cannot_be_exact_are_refused_with_their_reason(family: str) -> None:
    with pytest.raises((UnsupportedModelError, ConfigError), match=REFUSED[family]):
        compare(build_tiny_model(family), make_batch(), SPPOConfig(num_chunks=2))


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        (family, recompute)
        for index, family in enumerate(["llama", "gemma2", "gpt_oss"])
        for recompute in turn(["none", "full"], 2, index)
    ],
)
def test_shift_labels_of_several_rows(family: str, recompute: Any) -> None:
    batch = make_batch(rows=3, tokens=TOKENS, padding=(0, 3, 12))
    labels = batch.pop("labels")
    batch["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    # Transformers computes a loss only where `labels` is given too; `shift_labels` then wins.
    batch["labels"] = labels.roll(3, dims=1)
    report = compare(
        build_tiny_model(family),
        batch,
        SPPOConfig(chunk_lengths=(9, 1, 13), recompute=recompute),
    )
    assert report.exact, str(report)


def test_a_batch_without_any_label_gives_the_same_nan() -> None:
    batch = make_batch(tokens=TOKENS)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    report = compare(build_tiny_model("llama"), batch, SPPOConfig(num_chunks=3))
    assert report.reference_loss != report.reference_loss, "the unmodified loss should be NaN"
    assert report.exact, str(report)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends whose forward ran, one entry a call; not those that only trace."""
    calls: list[str] = []

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapper(self: base.Backend, *args: Any, **kwargs: Any) -> Any:
            calls.append(self.name)
            return forward(self, *args, **kwargs)

        return wrapper

    for backend in _subclasses(base.Backend):
        if "forward" in vars(backend) and backend.__module__.startswith("sppo_hf.attention."):
            monkeypatch.setattr(backend, "forward", counted(vars(backend)["forward"]))
    return calls


def _subclasses(parent: type) -> Iterator[type]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


# Of plans drawn at random `test_exactness_plans` compares the engine's own count.
@pytest.mark.parametrize(
    ("family", "chunking", "recompute", "offload", "order"),
    [
        ("llama", "uneven", "none", "full", "by_chunk"),
        ("llama", "uneven", "full", "none", "by_chunk"),
        ("llama", "tiles", "full", "none", "by_layer"),
        ("mistral", "1", "full", "none", "by_chunk"),
        ("mistral", "uneven", "none", "none", "by_layer"),
        ("gpt_oss", "one-token", "full", "full", "by_layer"),
    ],
)
def test_attention_runs_forward_once_per_layer_and_chunk(
    forwards: list[str], family: str, chunking: str, recompute: str, offload: str, order: str
) -> None:
    model = build_tiny_model(family, **({} if family == "gpt_oss" else {"num_hidden_layers": 2}))
    cell = Cell(chunking, recompute, offload, "plain", order)
    batch = make_batch(rows=2, tokens=TOKENS)
    converted = convert(model, cell.config())
    run_batch(converted, batch)
    num_chunks = {"1": 1, "tiles": 1, "uneven": 4, "one-token": 10}[chunking]
    assert len(forwards) == model.config.num_hidden_layers * num_chunks
    assert is_converted(converted)


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        (family, recompute)
        for index, family in enumerate(["llama", "mistral", "gemma2", "gpt_oss", "qwen3_moe"])
        for recompute in turn(["none", "full", "selective"], 3, index)
    ],
)
def test_bfloat16_is_no_farther_from_float32_than_the_unmodified_model(
    family: str, recompute: Any
) -> None:
    # Routing is discontinuous: two roundings may pick two experts. One expert of one is no choice.
    experts = family in ("qwen3_moe", "gpt_oss")
    overrides = {"num_experts": 1, "num_experts_per_tok": 1} if experts else {}
    model = build_tiny_model(family, dtype=torch.float32, **overrides)
    report = compare_drift(
        model,
        [make_batch(rows=2, tokens=64, seed=seed) for seed in range(2)],
        SPPOConfig(chunk_lengths=(16, 17, 31), recompute=recompute),
    )
    assert report.unmodified_drift > 1e-3, f"bfloat16 must be visible at all: {report}"
    assert report.exact, str(report)


@pytest.mark.parametrize("order", ["by_chunk", "by_layer"])
def test_bfloat16_sums_over_many_chunks_are_no_farther_from_float32(order: Any) -> None:
    """Weights' gradients are summed over chunks in bfloat16; see recipes/benchmarks/README.md."""
    report = compare_drift(
        build_tiny_model("llama", dtype=torch.float32, num_hidden_layers=2),
        [make_batch(rows=2, tokens=32, seed=seed) for seed in range(2)],
        SPPOConfig(num_chunks=32, order=order, recompute="none"),
    )
    assert report.exact, str(report)


def test_every_setting_and_every_pair_of_them_is_met() -> None:
    every = {*_cross(), *_pairs()}
    assert len(every) == len(_cross()) + len(_pairs())
    # Of what "selective" and attention that runs again meet `test_exactness_plans` has all.
    cells = {cell for cell in every if cell.recompute not in ("selective", AGAIN)}
    for one, other in itertools.combinations(range(len(Cell._fields)), 2):
        met = {(cell[one], cell[other]) for cell in cells}
        assert met == {(ours[one], theirs[other]) for ours in cells for theirs in cells}
    for axis in range(len(Cell._fields)):
        assert {cell[axis] for cell in _each_setting()} == {cell[axis] for cell in every}


def test_a_wrong_loss_and_wrong_and_missing_gradients_are_seen() -> None:
    """The harness itself can fail."""
    model = build_tiny_model("llama")
    batch = make_batch(tokens=TOKENS)
    reference = run_reference(model, batch)
    scaled, missing = "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"
    grad = reference.by_name[scaled]
    assert grad is not None

    def report_of(factor: float, others: dict[str, torch.Tensor | None]) -> ExactnessReport:
        spoilt = Gradients(reference.loss * factor, {**reference.by_name, **others})
        report = compare(model, batch, SPPOConfig(num_chunks=2), reference=spoilt)
        assert not report.exact
        return report

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = report_of(1.0, {scaled: grad * (1 + 1e-6)})
    assert report.worst.name == scaled
    assert 0.5e-6 < report.error < 2e-6
    assert report_of(1.0, {missing: None}).worst.name == missing
    assert 0.5e-7 < report_of(1 + 1e-7, {}).loss_error < 2e-7


def test_comparing_leaves_the_model_alone() -> None:
    model = build_tiny_model("llama")
    implementation = model.config._attn_implementation
    compare(model, make_batch(tokens=TOKENS), SPPOConfig(num_chunks=2))
    assert not is_converted(model)
    assert model.config._attn_implementation == implementation
    assert all(parameter.grad is None for parameter in model.parameters())
