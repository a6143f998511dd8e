"""Cases of the pipeline's exactness: models, batches, settings and micro-steps, as plain data.

`pipeline_ranks.py` runs them. A case is a mapping with `name`, `family` and, where they differ from
the default, `layers`, `overrides` (of the model's config), `lora`, `settings` (of SPPOConfig),
`frozen` and, after conversion, `frozen_later` (parts of names), `tokens`, `rows`, `padding`,
`packed`, `labels` (half-open range of tokens that have any), `items` (whether every micro-step is
told the labels of all), `hooks` (with replicas: whether parameters have hooks), `kernel` (a
function of the family's file for which a kernel is installed that fails), `noise` (that of NEFTune,
without chance) and `steps`: one mapping per micro-step, with `scale`, `backward`, `evaluate`,
`reduces`, `frozen` (parts of names, in that step alone) and `loss` ("mean" and "weighed" are made
of log-probabilities that the model's head returns).
"""

from __future__ import annotations

from typing import Any

from sppo_hf.engine.family_guard import PROVED
from sppo_hf.planning.config_file import bypasses_attention_interface
from sppo_hf.testing.tiny_families import FAMILIES
from tests.sweeps import ALL, KINDS, sample, turn

Case = dict[str, Any]

TOKENS = 23
# They begin and end with one token, and grow and shrink between.
UNEVEN = [1, 21, 1]
DELTA_RULE = "torch_chunk_gated_delta_rule"
MIXED = ["sliding_attention", "full_attention"]
_TOKENS_OF_ENCODERS = {"image_token_id": 0, "video_token_id": 1, "audio_token_id": 2}


def _case(name: str, family: str = "llama", **others: Any) -> Case:
    return {"name": name, "family": family, **others}


def _schedules(ranks: int) -> list[Case]:
    """Every schedule, over even and over uneven chunks; of the latter a stage has two layers."""
    one, two = {"layers": ranks}, {"layers": ranks + 1}
    return [
        _case("gpipe", rows=3, settings={"pp_schedule": "gpipe", "num_chunks": 2}, **one),
        _case("gpipe, uneven", settings={"pp_schedule": "gpipe", "chunk_lengths": UNEVEN}, **two),
        _case("1f1b", rows=4, settings={"pp_schedule": "1f1b", "num_chunks": 2}, **one),
        _case("1f1b, whole rows", rows=5, settings={"pp_schedule": "1f1b", "num_chunks": 1}, **one),
        _case("seq1f1b", rows=3, settings={"pp_schedule": "seq1f1b", "num_chunks": 3}, **one),
        _case(
            "seq1f1b, uneven",
            rows=2,
            settings={"pp_schedule": "seq1f1b", "chunk_lengths": UNEVEN},
            **two,
        ),
        _case("zb", rows=3, settings={"pp_schedule": "zb_seq1f1b", "num_chunks": 3}, **one),
        _case(
            "zb, uneven",
            rows=2,
            settings={"pp_schedule": "zb_seq1f1b", "chunk_lengths": UNEVEN, "recompute": "full"},
            **two,
        ),
    ]


def _interleaved(ranks: int) -> list[Case]:
    settings = {"pp_schedule": "interleaved_seq1f1b", "pp_virtual_stages": 2}
    even = {"layers": 2 * ranks}
    return [
        _case("interleaved", rows=3, settings={**settings, "num_chunks": 3}, **even),
        _case(
            "interleaved, tied, uneven",
            "llama-bias-tied",
            rows=2,
            settings={**settings, "chunk_lengths": UNEVEN},
            layers=2 * ranks + 1,
        ),
    ]


def _batches(layers: int) -> list[Case]:
    """Rows, padding, packing, tokens without labels, groups of rows."""
    chunks = {"num_chunks": 3}
    pairs = {"micro_batch_size": 2, "chunk_lengths": UNEVEN}
    size = {"layers": layers}
    return [
        _case("one row", rows=1, settings=chunks, **size),
        _case("five rows in pairs", rows=5, settings=pairs, **size),
        _case("padding", rows=3, padding=[0, 9, 20], settings={"chunk_lengths": UNEVEN}, **size),
        _case("padding all rows", rows=2, padding=[9, 12], settings=pairs, **size),
        _case("packed", rows=2, packed=[9, 6, 8], settings=chunks, **size),
        _case("labels in front", rows=2, labels=[0, 4], settings=chunks, **size),
        _case("labels in the middle", rows=2, labels=[7, 11], settings=chunks, **size),
        _case("labels behind", "llama-bias-tied", rows=2, labels=[20, 23], settings=chunks, **size),
        _case(
            "labels behind, zb",
            rows=2,
            labels=[20, 23],
            settings={**chunks, "pp_schedule": "zb_seq1f1b"},
            **size,
        ),
        _case("no labels", rows=2, labels=[0, 0], settings=chunks, **size),
    ]


def _families(layers: int) -> list[Case]:
    """Tied embeddings, windows, multipliers, positions before the layers, experts."""
    # So that one stage has both kinds, or a frozen and a trained layer.
    more = max(3, layers)
    kinds = {"layer_types": [MIXED[index % 2] for index in range(more)]}
    chunks = {"num_chunks": 3}
    zb = {**chunks, "pp_schedule": "zb_seq1f1b"}
    size, mixed = {"layers": layers, "rows": 2}, {"layers": more, "rows": 2}
    return [
        _case("tied", "llama-bias-tied", settings=chunks, **size),
        _case("tied, zb", "llama-bias-tied", settings=zb, **mixed),
        _case("tied, soft caps", "gemma2", settings=chunks, overrides=kinds, **mixed),
        _case("two rotary tables", "gemma3_text", settings=chunks, overrides=kinds, **mixed),
        _case("windows", "mistral", settings={"chunk_lengths": UNEVEN}, **size),
        _case("multipliers", "granite", settings=chunks, **size),
        _case("MLA and multipliers", "minicpm3", settings=zb, **size),
        _case("learned positions", "gpt2", settings=chunks, **size),
        _case("layers without positions", "cohere2", settings=zb, overrides=kinds, **mixed),
        _case("experts", "qwen3_moe", settings=chunks, **size),
        _case("experts, zb", "mixtral", settings=zb, **size),
        _case("dynamic rope", "llama-dynamic-rope", settings=chunks, **size),
        _case("frozen front", frozen=["layers.0.", "embed"], settings=chunks, **mixed),
        _case(
            "frozen for a step",
            steps=[{}, {"frozen": ["layers.0.", "embed"]}, {}],
            settings=chunks,
            **mixed,
        ),
        _case("frozen front, zb", frozen=["layers.0.", "embed"], settings=zb, **mixed),
        _case("frozen end", frozen=[f"layers.{more - 1}.", "lm_head"], settings=chunks, **mixed),
        _case("frozen tied", "llama-bias-tied", frozen=["embed"], settings=zb, **size),
        _case("LoRA", lora=True, settings=chunks, **size),
        _case("LoRA, zb", lora=True, noise=5.0, settings=zb, **size),
        _case("LoRA, tied", "llama-bias-tied", lora=True, settings=chunks, **size),
    ]


def _states() -> list[Case]:
    """States and index keys, which stay on their rank; one family of each mixer."""
    chunks = {"chunk_lengths": [1, 4, 2, 16]}
    # Other cases have several groups of rows.
    together = chunks if ALL else {**chunks, "micro_batch_size": 2}
    zb = {**chunks, "pp_schedule": "zb_seq1f1b"}
    recompute = {**chunks, "recompute": "full", "offload": "full", "min_offload_size": 1}
    return [
        # With a kernel that fails here, which is tried and left.
        _case("gated delta net", "qwen3_next", rows=2, settings=recompute, kernel=DELTA_RULE),
        _case("gated delta net, zb", "qwen3_next", rows=3, padding=[0, 9, 20], settings=zb),
        _case("Mamba2", "bamba", rows=2, settings=together, steps=[{}, {"scale": 2.0}]),
        _case("Mamba2, zb", "bamba", rows=2, settings={**zb, "recompute": "full"}),
        _case("Mamba2 beside attention", "falcon_h1", rows=2, settings=recompute),
        _case("Mamba2 alone", "mamba2", rows=2, settings=zb),
        _case("convolutions", "lfm2", rows=2, labels=[20, 23], settings=recompute),
        _case("convolutions, LoRA", "lfm2", lora=True, rows=2, settings=zb),
        _case("layers of experts alone", "nemotron_h", rows=2, settings=together),
        _case("Kimi delta attention", "kimi_linear", rows=2, padding=[0, 9], settings=recompute),
        _case("an indexer, zb", "deepseek_v32", rows=2, padding=[0, 9], settings=zb),
    ]


def _router_losses(layers: int) -> list[Case]:
    """A loss of all stages' routers, which every chunk's backward needs; see `router_loss`."""
    uneven, size = {"chunk_lengths": UNEVEN}, {"layers": layers}
    together = {**uneven, "micro_batch_size": 2}
    zb = {**together, "pp_schedule": "zb_seq1f1b"}
    recompute = {**together, "recompute": "full", "offload": "full", "min_offload_size": 1}
    each = {**uneven, "pp_schedule": "interleaved_seq1f1b", "pp_virtual_stages": 2}
    family, padded = "mixtral-router-loss", {"rows": 2, "padding": [0, 9], **size}
    scaled: list[Case] = [{"scale": 3.0}, {"evaluate": True}, {"scale": 0.5}]
    return [
        _case("padding", family, settings=recompute, **padded),
        _case("zb, accumulation", family, settings=zb, steps=scaled, items=True, **padded),
        _case("gpipe", family, settings={"num_chunks": 3, "pp_schedule": "gpipe"}, **padded),
        # It lets documents see each other.
        _case(
            "one row",
            "gpt_oss-router-loss",
            rows=1,
            packed=[5, 18],
            labels=[7, 11],
            settings=uneven,
        ),
        _case("LoRA", "qwen3_moe-router-loss", lora=True, settings=together, **padded),
        _case(
            "frozen front",
            family,
            frozen=["layers.0.", "embed"],
            settings=zb,
            **{**padded, "layers": max(3, layers)},
        ),
        _case("interleaved", family, rows=1, settings=each, layers=2 * layers),
        # The first stage has no router.
        _case(
            "dense layers in front",
            "qwen3_moe-router-loss",
            overrides={"mlp_only_layers": [0]},
            settings=together,
            **size,
            rows=2,
        ),
    ]


def _beside_hidden_states() -> list[Case]:
    """Per-layer inputs, which the first stage makes, and keys that layers of other stages read."""
    chunks = {"chunk_lengths": UNEVEN}
    zb = {**chunks, "pp_schedule": "zb_seq1f1b"}
    recompute = {**chunks, "recompute": "full", "offload": "full", "min_offload_size": 1}
    away = {**chunks, "recompute": "none", "offload": "full", "offload_kv": "full"}
    each = {**chunks, "pp_schedule": "interleaved_seq1f1b", "pp_virtual_stages": 2}
    family = "gemma4_text-shared-kv"
    return [
        _case("per-layer inputs", "gemma4_text", rows=2, settings=recompute),
        # Later stages ask for embeddings of these tokens, and tiny vocabularies end before them.
        _case("multimodal", "gemma4", rows=2, settings=chunks, overrides=_TOKENS_OF_ENCODERS),
        _case("shared keys", family, rows=2, padding=[0, 9], settings=recompute),
        _case("shared keys, offloaded", family, rows=2, settings={**away, "min_offload_size": 1}),
        _case("shared keys, zb", family, rows=2, labels=[7, 11], settings=zb),
        _case("shared keys, LoRA", family, lora=True, rows=2, settings=chunks),
        _case("shared keys, evaluation", family, steps=[{"evaluate": True}, {}], settings=chunks),
        _case("shared keys, one layer a stage", family, rows=4, settings=each),
        # More than one hidden state of each token.
        _case("streams", "gemma3n_text", rows=2, padding=[0, 9], settings=recompute),
        _case("streams, offloaded, zb", "gemma3n_text", rows=2, settings={**away, **zb}),
        _case("streams, LoRA", "gemma3n_text", lora=True, rows=2, settings=chunks),
    ]


_ALONE = (
    ("family", "overrides", "kernel"),
    ("lora", "frozen", "noise"),
    ("tokens", "padding", "packed", "labels"),
    ("steps", "items"),
)
"""Keys of which the cases that are merged may have the same values, or one some and others none."""
MAX_MERGED_CASES = 4
LAYERS = 3
"""Layers of a tiny Llama."""
_FIXED_COST = 12
"""Cost of building, converting and running a case's model unmodified, in the unit of `_cost`."""


def merge_cases(cases: list[Case]) -> list[Case]:
    """Fewer cases, which have all that is special in these: those that fit are one; or all.

    Where they fit into several, they go where they make the least work, and stay alone where that
    is less: steps, rows and chunks multiply. A case in which nothing is trained stays alone, too:
    it would hide what others compare.
    """
    if ALL:
        return cases
    found: list[tuple[Case, ...]] = []
    for case in cases:
        added: dict[int, float] = {}
        for index, others in enumerate(found):
            if (merged := _merged((*others, case))) is not None:
                before = _merged(others)
                assert before is not None, "they fit so far"
                added[index] = _cost(merged) - _cost(before)
        index = min(added, key=lambda one: added[one], default=None)
        if index is None or added[index] > _cost(case):
            found.append((case,))
        else:
            found[index] = (*found[index], case)
    return [case for case in map(_merged, found) if case is not None]


def _cost(case: Case) -> float:
    """About what a case takes: layers of all units of all steps, and what it takes besides."""
    settings = case.get("settings", {})
    chunks = len(settings.get("chunk_lengths", ())) or settings.get("num_chunks", 3)
    rows = -(-case.get("rows", 2) // settings.get("micro_batch_size", 1))
    units = rows * (chunks if isinstance(chunks, int) else 4)
    steps = case.get("steps", [{}])
    # Losses of the caller's may take two passes.
    passes = sum(1 + ("loss" in step) for step in steps)
    # Adapters are as many operations as the layers that have them,
    # and other families' layers are more than Llama's.
    modules = case.get("layers", LAYERS) * (1 + case.get("lora", False))
    modules *= 1.0 if case["family"].startswith("llama") else 1.6
    return _FIXED_COST + modules * units * passes


def _merged(cases: tuple[Case, ...]) -> Case | None:
    """All cases in one; None where they contradict each other."""
    if len(cases) == 1:
        return cases[0]
    if len(cases) > MAX_MERGED_CASES or not all(map(_trains, cases)):
        return None
    parts = [_of_one(cases, keys) for keys in _ALONE]
    parts += [_layers(cases), _rows(cases), _settings(cases)]
    both: Case = {"name": " + ".join(case["name"] for case in cases), "family": "llama"}
    both |= {"hooks": cases[0]["hooks"]} if "hooks" in cases[0] else {}
    for part in parts:
        if part is None:
            return None
        both |= part
    return both


def _of_one(cases: tuple[Case, ...], keys: tuple[str, ...]) -> Case | None:
    own = [{key: case[key] for key in keys if case.get(key, "llama") != "llama"} for case in cases]
    own = [special for index, special in enumerate(own) if special and special not in own[:index]]
    return None if len(own) > 1 else own[0] if own else {}


def _layers(cases: tuple[Case, ...]) -> Case | None:
    """Return the number of layers for all cases, None if they differ; some families fix theirs."""
    counts = [case.get("layers", LAYERS) for case in cases if case["family"] == "llama"]
    for case in cases:
        if case["family"] != "llama":
            own = case.get("layers", LAYERS)
            fits = max(counts, default=own) <= own
            return None if not fits else {"layers": own} if "layers" in case else {}
    return {"layers": max(counts)}


def _rows(cases: tuple[Case, ...]) -> Case | None:
    """Return the number of rows for all cases, by default two; None if they need different ones."""
    padded = {case.get("rows", 2) for case in cases if "padding" in case}
    wanted = {case.get("rows", 2) for case in cases} - {2} | padded
    return None if len(wanted) > 1 else {"rows": max(wanted, default=2)}


def _settings(cases: tuple[Case, ...]) -> Case | None:
    all_of_them = [setting for case in cases for setting in case.get("settings", {}).items()]
    settings = dict(all_of_them)
    if any(settings[name] != value for name, value in all_of_them):
        return None
    return None if {"num_chunks", "chunk_lengths"} <= settings.keys() else {"settings": settings}


def _trains(case: Case) -> bool:
    """Whether a case's last step has gradients."""
    last = case.get("steps", [{}])[-1]
    trains = last.get("backward", True) and not last.get("evaluate")
    return trains and case.get("labels") != [0, 0]


def kinds(index: int) -> set[str]:
    """Every second kind of family: pipelines meet those of index 0, shared sequences of 1."""
    return set(turn([name for name in FAMILIES if name in KINDS], 2, index))


def every_family() -> list[Case]:
    """A case of each family that is proved exact on one device and can be cut.

    Without `--all` of every second kind of family, if no other case has it.
    """
    # They ask for the embedding of an image token, which tiny ones do not have.
    uncut = {"gemma4", "gemma4_unified"}
    uncut |= {"llama4"}
    uncut |= {"glm_moe_dsa", "hy_v4", "mistral_large4"}  # layers return a choice of keys
    uncut |= {n for n, f in FAMILIES.items() if bypasses_attention_interface(f.model_type)}
    schedules = ("seq1f1b", "zb_seq1f1b")
    names = [n for n, f in FAMILIES.items() if f.model_type in PROVED and n not in uncut]
    if not ALL:
        others = {case["family"] for size in (2, 3, 4) for case in all_cases(size, 1)}
        names = [name for name in names if name in kinds(0) - others]
    return [
        _case(
            name,
            name,
            rows=1 if name.endswith("router-loss") or not (ALL or index % 4 < 2) else 2,
            settings={"num_chunks": 3, "pp_schedule": schedules[index % 2]},
        )
        for index, name in enumerate(names)
    ]


def _activation_modes(layers: int) -> list[Case]:
    """Cases of offloaded, recomputed and kept saved tensors."""
    size = {"layers": layers, "rows": 2}
    plans: dict[str, Case] = {
        "offload": {"offload": "full"},
        "offload all": {"offload": "full", "offload_kv": "full", "recompute": "none"},
        "keep": {"offload": "none", "recompute": "none"},
        "recompute": {"offload": "none", "recompute": "full"},
        "paper's rule": {"offload": "sppo", "hardware": "h100"},
        "offload, zb": {"offload": "full", "recompute": "none", "pp_schedule": "zb_seq1f1b"},
        "recompute, zb": {"offload": "full", "recompute": "full", "pp_schedule": "zb_seq1f1b"},
        "selective": {"offload": "full", "recompute": "selective"},
    }
    padded = {"chunk_lengths": UNEVEN, "min_offload_size": 1, "offload": "full"}
    return [
        *(
            _case(name, settings={"chunk_lengths": UNEVEN, "min_offload_size": 1, **plan}, **size)
            for name, plan in plans.items()
        ),
        _case("offload, padding", padding=[9, 12], settings=padded, **size),
        _case("simulated", settings={"num_chunks": "auto", "hardware": "h100"}, **size),
    ]


def _micro_steps(layers: int, *, family: str = "llama") -> list[Case]:
    """Cases of accumulation, hooks and the like around `loss.backward()`."""
    common: Case = {"layers": layers, "rows": 2, "settings": {"num_chunks": 3}}
    lists: dict[str, list[Case]] = {
        "accumulation": [{}, {}],
        "scaled": [{"scale": 3.0}],
        "changed scale": [{"scale": 2.0}, {"scale": 0.5}, {"scale": 0.5}],
        "forgotten": [{}, {"backward": False}, {}],
        "only forgotten": [{"backward": False}],
        "evaluation between": [{}, {"evaluate": True}, {}],
        "evaluation": [{"evaluate": True}],
    }
    cases = [
        _case(name, family, steps=steps, items=name == "accumulation", **common)
        for name, steps in lists.items()
    ]
    settings = {"num_chunks": 3, "pp_schedule": "zb_seq1f1b"}
    zb = {**common, "settings": settings, "items": True}
    return [*cases, _case("accumulation, zb", family, steps=[{"scale": 2.0}, {}], **zb)]


def _replicas() -> list[Case]:
    """Two pipelines: gradients averaged over them, once per optimizer step."""
    common: Case = {"layers": 2, "rows": 2, "settings": {"num_chunks": 3}}
    held = {"reduces": False}
    return [
        _case("plain", **common),
        _case("tied", "llama-bias-tied", **common),
        _case("averaged every time", steps=[{}], **common),
        _case("accumulation", steps=[held, {}], items=True, **common),
        _case("accumulation, tied", "llama-bias-tied", steps=[held, {}], **common),
        _case("changed scale", steps=[{**held, "scale": 2.0}, {"scale": 0.5}], **common),
        _case(
            "changed scale, tied",
            "llama-bias-tied",
            steps=[{**held, "scale": 3.0}, {"scale": 0.5}],
            **common,
        ),
        _case("scaled", steps=[{"scale": 3.0}], **common),
        _case("forgotten", steps=[{"backward": False}, {}], **common),
        _case("evaluation", steps=[{"evaluate": True}], **common),
        _case("experts", "qwen3_moe", **common),
        _case("LoRA", lora=True, **common),
        _case("hooks, tied", "llama-bias-tied", steps=[held, {}], hooks=True, **common),
    ]


def _caller_losses(layers: int, held: dict[str, bool]) -> list[Case]:
    """Losses that the caller makes of log-probabilities; `held` marks all steps but the last."""
    common: Case = {"layers": layers, "rows": 2, "settings": {"num_chunks": 3}}
    mean, weighed = {"loss": "mean"}, {"loss": "weighed"}
    forgotten, evaluated = {**weighed, "backward": False}, {**weighed, "evaluate": True}
    several = [{**mean, "scale": 3.0}, forgotten, evaluated, {**weighed, "scale": 0.5}]
    if ALL:
        several = [several[0], weighed, forgotten, evaluated, {**mean, "scale": 0.5}, mean]
    three = several if ALL else [several[0], evaluated, weighed]
    two = [{**mean, "scale": 3.0}, weighed]
    other = {"pp_schedule": "zb_seq1f1b", "chunk_lengths": UNEVEN, "micro_batch_size": 2}
    zb = {**common, "settings": other, "padding": [0, 9, 20], "rows": 3}

    def case(name: str, *args: Any, steps: list[Case], **others: Any) -> Case:
        steps = [*({**step, **held} for step in steps[:-1]), steps[-1]]
        return _case(name, *args, steps=steps, **{**common, **others})

    # One meets all that may happen between two losses, the others what a model or a batch changes.
    each = several if ALL else two
    together = common["settings"] if ALL else {**common["settings"], "micro_batch_size": 2}
    return [
        case("mean", steps=[mean]),
        case("weighed", steps=[weighed]),
        case("one, then the other", steps=three if held else several),
        case("beside the model's own", steps=[{}, mean, weighed]),
        case("tied", "llama-bias-tied", steps=each),
        case("zb", steps=three, **zb),
        case("packed", steps=each, packed=[9, 6, 8], settings=together),
        case("few labels", "gemma2", steps=each, labels=[7, 11], layers=3, settings=together),
        case("no labels", steps=[mean, mean], labels=[0, 0]),
        case("LoRA", lora=True, steps=each, settings=together),
    ]


def _named(group: str, cases: list[Case]) -> list[Case]:
    return [{**case, "name": f"{group}: {case['name']}"} for case in cases]


def _sampled(cases: list[Case], pp_size: int, replicas: int) -> list[Case]:
    """Those of the cross and `_ALSO`, and of the others every third one; or all."""
    fast = FAST[pp_size, replicas]
    others = sample([case for case in cases if case["name"] not in fast], 3)
    return [case for case in cases if case["name"] in (*fast, *_ALSO) or case in others]


def all_cases(pp_size: int, replicas: int) -> list[Case]:
    """Everything for pipelines of `pp_size` ranks, or without `--all` a sample of it."""
    layers = pp_size
    schedules = _named("schedule", [*_schedules(pp_size), *_interleaved(pp_size)])
    if replicas > 1:
        # A replica's order is that of one pipeline; what follows it differs between schedules.
        cases = [case for case in schedules if case["name"] in _FOLLOWED_BY_REPLICAS]
        own = _named("own loss", _caller_losses(layers, {"reduces": False}))
        cases += [case for case in own if case["name"] in _FOLLOWED_BY_REPLICAS]
        return _sampled([*cases, *_named("replicas", _replicas())], pp_size, replicas)
    # Three have a first, a middle and a last stage, and four do what three do; `every_family` runs
    # on two.
    families = _named("family", _families(layers))
    steps = _named("step", _micro_steps(layers))
    if pp_size == 2:
        cases = [case for i, case in enumerate(families) if i % 2 or case["name"] in FAST[2, 1]]
        cases += _named("own loss", _caller_losses(layers, {}))
        cases += _named("states", _states())
        cases += _named("router loss", _router_losses(layers))
        cases += _named("beside", _beside_hidden_states())
        cases += _named("batch", _batches(layers))
        cases += _named("modes", _activation_modes(layers))
        tied = _named("step, tied", _micro_steps(layers, family="llama-bias-tied"))
        if ALL:
            return [*schedules, *cases, *steps, *tied[::3], tied[-1]]
        steps[5] = tied[5]  # evaluation between
        # Three ranks have each schedule with even chunks, the cross or replicas with uneven ones.
        uneven = [case for case in schedules if case["name"] in (*FAST[2, 1], _WHOLE_ROWS)]
        sampled = _sampled([*cases, *steps, tied[0]], pp_size, replicas)
        return [*uneven, *(case for case in sampled if case["name"] not in _IN_OTHERS)]
    if pp_size == 3:
        cases = families[::2] if ALL else families[::6]
        mixers = {"gated delta net, zb"}
        if ALL:
            mixers |= {"gated delta net", "Mamba2", "Mamba2, zb", "convolutions"}
            mixers |= {"Kimi delta attention"}
        cases += _named("states", [case for case in _states() if case["name"] in mixers])
        beside = _beside_hidden_states()
        cases += _named("beside", [*beside[2:5], beside[-2]] if ALL else beside[4:5])
        # The one that is not met by two ranks.
        cases += _named("router loss", _router_losses(layers)[0 if ALL else 2 : 3 : 2])
        return [*sample(schedules, 2), *cases, *steps[: 3 if ALL else 1]]
    if ALL:
        return [*schedules, *families[1::4], *steps[:3]]
    return [schedules[6], families[3]]


_WHOLE_ROWS = "schedule: 1f1b, whole rows"
_FOLLOWED_BY_REPLICAS = (
    *("schedule: 1f1b", "schedule: seq1f1b, uneven", "schedule: zb, uneven"),
    "schedule: interleaved, tied, uneven",
    *("own loss: one, then the other", "own loss: tied", "own loss: zb", "own loss: no labels"),
    "own loss: LoRA",
)
_IN_OTHERS = ("own loss: tied", "step: scaled")
"""Names of those of which two ranks have all in "few labels", of Gemma 2, and "changed scale"."""
_ALSO = (
    *("states: Mamba2, zb", "states: Kimi delta attention", "states: an indexer, zb"),
    *("beside: shared keys, offloaded", "beside: streams, offloaded, zb"),
)
"""Names of the only ones of their kind."""
FAST = {
    (2, 1): (
        *("schedule: gpipe, uneven", "schedule: 1f1b", "schedule: seq1f1b"),
        *("schedule: seq1f1b, uneven", "schedule: zb, uneven"),
        *("schedule: interleaved, tied, uneven", "family: tied, zb", "family: two rotary tables"),
        *("family: learned positions", "family: experts, zb", "family: LoRA, zb"),
        *("batch: five rows in pairs", "batch: padding", "batch: packed"),
        *("batch: labels in the middle", "family: frozen front, zb", "family: frozen for a step"),
        *("modes: selective", "modes: offload, padding", "modes: simulated"),
        *("modes: offload all", "step: changed scale", "step: forgotten", "step: evaluation"),
        *("own loss: zb", "own loss: few labels"),
        *("states: gated delta net", "beside: shared keys", "router loss: padding"),
    ),
    (2, 2): (
        *("replicas: tied", "replicas: accumulation", "replicas: changed scale"),
        *("replicas: evaluation", "replicas: hooks, tied", "own loss: tied"),
    ),
}
"""Names of those that run always, by (ranks of a pipeline, replicas)."""


def fast_cases(pp_size: int, replicas: int) -> list[Case]:
    """A cross through `all_cases`."""
    wanted = FAST[pp_size, replicas]
    cases = [case for case in all_cases(pp_size, replicas) if case["name"] in wanted]
    assert len(cases) == len(wanted), "a name in FAST is no case"
    return cases
