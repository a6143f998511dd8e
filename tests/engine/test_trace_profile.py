"""Traced profiles against what really runs: saved bytes, products, FLOPs, by family.

Each family of `tiny_families` is converted and runs a step with small sizes, all of them different.
Nine families that stand for the rest run always, three of them with adapters and four under
autocast; of the long tail a sample, in the slow pass.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import device_facts as facts
from sppo_hf.engine import trace_profile
from sppo_hf.engine.convert import convert, get_engine, revert
from sppo_hf.engine.device_facts import model_shape
from sppo_hf.engine.family_guard import PROVED
from sppo_hf.engine.model_parts import CACHE_ARGUMENTS, find_parts, suppress_peft_warnings
from sppo_hf.engine.recompute import SavedTensor
from sppo_hf.engine.selective import SelectiveRecorder
from sppo_hf.engine.stage_messages import MessageLayout
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.planning.activation_modes import Saved, mode_of
from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.model_profile import (
    LoraShape,
    ModelProfile,
    Training,
    find_profile,
    profiles_from_json,
    profiles_to_json,
)
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.testing.tiny_families import FAMILIES, MULTIMODAL
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch, tiny_config
from tests.engine.forced_plans import force_modes, trace_short_scans
from tests.engine.measuring import (
    SETTINGS,
    TOKENS,
    build,
    counted_flops,
    growing_bytes,
    run,
    saved_bytes,
    sized_config,
    to_bfloat16,
)
from tests.planning.shapes import by_hand, known_config, llama_config
from tests.sweeps import ALL, sample, turn

pytestmark = pytest.mark.fake

# Most families are exact to the byte.
TOLERANCE = 0.01
ALWAYS = (
    "llama",
    "gemma3_text",
    "olmo2",
    "phi3",
    "gpt2",
    "cohere",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
)
# Multimodal models have the layers of their text decoder, which are counted here under its name.
# Variants of a family differ from it in nothing that is counted here; phi3's long rotary tables
# have a length of their own. What dbrx saves expert by expert is no multiple of the tokens, by
# which `saved_bytes` knows activations; sizes of dots3_note_text depend on each other.
ACCEPTED = sorted(
    name
    for name, tiny in FAMILIES.items()
    if tiny.model_type in PROVED
    and name not in (*MULTIMODAL, "phi3-longrope", "dbrx", "dots3_note_text")
    and not name.endswith("router-loss")
)
# A router that is float32 in a model made in 16 bits, and is not in one that is cast to them.
OTHER_IN_16_BITS = frozenset({"hunyuan_v1_moe"})
# The same of JetMoE's copies for each expert; and fake tensors have Persimmon's statistics of
# heads in 16 bits where the CPU has them in 32, which is 1.2%.
OTHER_UNDER_AUTOCAST = frozenset({"jetmoe", "persimmon"})
# Its projections between residual streams, outside of the layers, are not counted.
MULTIPLY_BESIDE = frozenset({"gemma3n_text"})
# A layer of plain products, one of Conv1D and one of experts are tried with adapters, every second
# one under autocast, and the others in 16 bits; with `--all` each in all ways.
ADAPTED, UNDER_AUTOCAST = turn(ALWAYS, 4, 0), turn(ALWAYS, 2, 1)
# Met with adapters or under autocast, where the same is counted.
ELSEWHERE = frozenset(() if ALL else ("phi3", "cohere", "gpt_oss"))
NOT_IN_16_BITS = frozenset(() if ALL else (*ADAPTED, *UNDER_AUTOCAST))
HALF = Training(dtype_bytes=2, parameter_bytes=2)


def families(
    without: frozenset[str], *, tail: slice = slice(None), always: Sequence[str] = ALWAYS
) -> list[Any]:
    """Families as parameters of a test; a sample of the long tail, or of a part, is marked slow."""
    names = [name for name in ACCEPTED if name not in without]
    rest = sample([name for name in names if name not in ALWAYS][tail], 48)
    always = [name for name in always if name not in without]
    return [*always, *(pytest.param(name, marks=pytest.mark.slow) for name in rest)]


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small models be traced as large ones are."""
    monkeypatch.setattr(trace_profile, "_TINY_ELEMENTS", 0)


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize("family", families(MULTIPLY_BESIDE | ELSEWHERE))
def test_shape_against_the_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family, torch.float32)
    shape = _check_shape(family, model, monkeypatch)
    _check_parameters(shape, model)
    if family not in OTHER_IN_16_BITS | NOT_IN_16_BITS:
        half = to_bfloat16(model)
        assert _whole_bytes(model_shape(find_parts(half))) == _about(saved_bytes(half)[0])


# How adapters and autocast change a layer has little to do with its family.
@pytest.mark.parametrize(
    "family",
    families(MULTIPLY_BESIDE, tail=slice(0, None if ALL else 0, 3), always=ADAPTED),
)
def test_shape_with_adapters(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    model = build(family, torch.float32, lora=True)
    _check_parameters(_check_shape(family, model, monkeypatch), model)


def test_layers_without_any_adapter_that_keep_nothing() -> None:
    peft = pytest.importorskip("peft")
    model = build_tiny_model("nemotron_h", dtype=torch.float32)  # one layer has attention
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    with suppress_peft_warnings():
        model = peft.get_peft_model(model, lora)
    shape = model_shape(find_parts(model))
    assert min(layer.adapter_weights for layer in shape.layers) == 0
    assert max(layer.adapter_weights for layer in shape.layers) > 0


def _check_shape(family: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> ModelShape:
    shape = model_shape(find_parts(model))
    assert _whole_bytes(shape) == _about(saved_bytes(model)[0])
    _check_flops_and_products(family, shape, model, monkeypatch)
    return shape


def _check_parameters(shape: ModelShape, model: Any) -> None:
    layers = find_parts(model).layers
    for traced, layer in zip(shape.layers, layers, strict=True):
        parameters = sum(p.numel() for p in layer.parameters())
        assert traced.total_weights + traced.adapter_weights == parameters


def _check_flops_and_products(
    family: str, shape: ModelShape, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = range(shape.num_layers)
    kept = _watch_kept_products(monkeypatch)
    whole = _step_flops(model, "whole", monkeypatch)
    # The loss computes the head's gradients in forward, so only their sum can be compared.
    linear = shape.linear_flops_per_token() + shape.backward_linear_flops_per_token()
    scored = sum(layer.index_flops_per_key for layer in shape.layers) * TOKENS  # hidden ones too
    assert linear + scored == _about(whole)
    # Recomputing all but inputs, which is the simpler way, is tried of every second family.
    for saved in ("matmuls", *turn(("inputs",), 2, ACCEPTED.index(family))):
        again = _step_flops(model, saved, monkeypatch) - whole
        expected = sum(shape.recompute_flops_per_token(layer, saved) for layer in layers)
        assert expected == _about(again)
    beside = [
        shape.activation_bytes_per_token(layer, "matmuls") - shape.layers[layer].inputs_bytes
        for layer in layers
    ]
    assert beside == _about([num_bytes / TOKENS for num_bytes in kept])


@pytest.mark.parametrize(
    "family",
    families(OTHER_UNDER_AUTOCAST, tail=slice(1, None, 3), always=UNDER_AUTOCAST),
)
def test_saved_bytes_under_autocast(family: str) -> None:
    model = build(family, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured, _ = saved_bytes(model)
        shape = model_shape(find_parts(model))
    assert (shape.dtype_bytes, shape.parameter_bytes) == (2, 4)
    assert _whole_bytes(shape) == _about(measured)


def test_the_callers_autocast_is_not_the_traces() -> None:
    training = Training(dtype_bytes=2, parameter_bytes=4)  # in bfloat16, whichever the caller's is
    expected = trace_config(tiny_config("phi3"), training)
    with torch.autocast("cpu", dtype=torch.float16):
        assert trace_config(tiny_config("phi3"), training) == expected


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_saved_bytes_of_wide_adapters(family: str) -> None:
    """PEFT's float32 adapters on a 16-bit model, with the Trainer's autocast and without."""
    pytest.importorskip("peft")
    model = to_bfloat16(build(family, torch.float32, lora=True))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    per_token = []
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            shape = model_shape(find_parts(model))
            assert _whole_bytes(shape) == _about(saved_bytes(model)[0])
        per_token.append(shape.activation_bytes_per_token(1))
    assert per_token[1] < 0.9 * per_token[0]


@pytest.mark.parametrize(("family", "more"), [("zaya", True), ("llama", False), ("gemma4", False)])
def test_layers_that_pass_on_more_than_hidden_states_are_seen(family: str, more: bool) -> None:
    """As the runtime sees them, which then goes by chunk."""
    config = tiny_config(family)
    shape = ModelShape.from_profile(
        trace_config(config, Training(dtype_bytes=4, parameter_bytes=4))
    )
    assert (shape.by_layer_refusal is not None) == more
    model = convert(build_tiny_model(family), SPPOConfig(order="by_layer", num_chunks=3))
    ids = torch.arange(3, 27)[None]
    model(input_ids=ids, labels=ids)
    engine = get_engine(model)
    assert engine is not None
    assert (engine.plans._by_chunk_reason != "") == more


@pytest.mark.parametrize("family", ["zamba2", "gemma4", "qwen2_vl"])
def test_adapters_of_modules_whose_names_others_have_too(family: str) -> None:
    pytest.importorskip("peft")
    config, lora = tiny_config(family), LoraShape(rank=4)
    training = Training(dtype_bytes=4, parameter_bytes=4, lora=lora)
    layers = trace_config(config, training).layers
    adapted = find_parts(add_lora(build_tiny_model(family), rank=4)).layers
    for traced, layer in zip(layers, adapted, strict=True):
        adapters = [p.numel() for name, p in layer.named_parameters() if ".lora_" in name]
        assert traced.adapter_weights == sum(adapters) > 0


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "falcon_h1", "mamba2", "lfm2"])
def test_states_are_those_that_transformers_keeps_for_generation(family: str) -> None:
    model = build_tiny_model(family, dtype=torch.float32)
    shape = model_shape(find_parts(model))
    assert shape.has_recurrent_state
    with torch.no_grad():
        output = model.eval()(make_batch(rows=1, tokens=9)["input_ids"], use_cache=True)
    cache = next(output[name] for name in CACHE_ARGUMENTS if name in output)
    for index, layer in enumerate(cache.layers):
        kept = [
            state
            for states in ("conv_states", "recurrent_states")
            for state in getattr(layer, states, {}).values()
            if state is not None
        ]
        assert shape.state_bytes(index) == sum(state.nbytes for state in kept)
        assert (shape.layers[index].num_heads > 0) == (getattr(layer, "keys", None) is not None)


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        ("bamba", (512, 1024)),
        ("lfm2", (512, 1024)),
        *(
            pytest.param(family, lengths, marks=pytest.mark.slow)
            for family, lengths in sample(
                [
                    # Their experts run on the CPU.
                    ("qwen3_next", (256, 512)),
                    ("falcon_h1", (512, 1024)),
                    ("mamba2", (512, 1024)),
                    ("granitemoehybrid", (512, 1024)),
                    ("nemotron_h", (512, 1024)),
                    ("olmo_hybrid", (512, 1024)),
                    ("zamba2", (512, 1024)),
                    ("qwen3_5_text", (512, 1024)),
                ],
                8,
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:sequences of .* are longer")
def test_saved_bytes_of_recurrent_layers(
    family: str, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests' profiles may be of short scans.
    monkeypatch.setattr(facts, "_profiles", {})
    monkeypatch.setattr(facts, "find_profile", lambda *asked: asked[2](*asked[:2]))
    model = convert(build_tiny_model(family, dtype=torch.float32), SETTINGS)
    by_layer = _whole_bytes(model_shape(find_parts(model)))
    assert list(by_layer.values()) == _about(growing_bytes(model, lengths))


@pytest.mark.parametrize("lora", [None, LoraShape(rank=16)])
def test_the_profile_of_llama_equals_the_one_made_by_hand(lora: LoraShape | None) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    training = Training(dtype_bytes=2, parameter_bytes=2, lora=lora)
    config = llama_config(num_hidden_layers=3)
    traced = trace_config(config, training)
    # Autograd's nodes were not counted by hand.
    layers = tuple(replace(layer, graph_nodes=0) for layer in traced.layers)
    assert replace(traced, layers=layers) == by_hand(config, training)


def test_sizes_in_nested_configs_are_found() -> None:
    config = tiny_config("dbrx")
    layer = trace_config(config, HALF).layers[0]
    assert layer.num_heads == config.n_heads
    assert layer.mlp_width == config.ffn_config.moe_top_k * config.ffn_config.ffn_hidden_size


def test_small_layers_of_a_model_that_fits_into_no_memory_are_traced() -> None:
    large = trace_config(tiny_config("llama", vocab_size=2**40), HALF)
    assert large.layers == trace_config(tiny_config("llama"), HALF).layers


def test_a_model_of_fewer_learned_positions_than_are_traced_costs_what_one_of_more_does() -> None:
    traced = [
        trace_config(tiny_config("gpt2", max_position_embeddings=learned), HALF)
        for learned in (1, 24, 1024)
    ]
    sizes = [(profile.outer_weights, profile.layers) for profile in traced]
    width = tiny_config("gpt2").hidden_size
    assert sizes == [(sizes[2][0] - width * few, sizes[2][1]) for few in (1023, 1000, 0)]
    assert [profile.max_positions_tokens for profile in traced] == [1, 24, 1024]


def test_layers_with_different_windows_are_different_kinds() -> None:
    profile = trace_config(tiny_config("gemma3_text"), HALF)
    kinds = tiny_config("gemma3_text").layer_types
    assert [layer.window is None for layer in profile.layers] == [
        kind == "full_attention" for kind in kinds
    ]
    assert len(set(profile.layers)) == 2
    assert len({id(layer) for layer in profile.layers}) == 2


def test_a_loop_over_chosen_experts_is_run_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "sppo_hf.engine.trace_profile"):
        profile = trace_config(sized_config("jetmoe"), HALF)
    assert "is traced on the CPU" in caplog.text
    config = sized_config("jetmoe")
    # Each token meets that many experts, one after the other.
    assert profile.layers[0].mlp_width == config.num_experts_per_tok * config.intermediate_size


def test_profiles_are_linear_in_the_adapters_rank() -> None:
    pytest.importorskip("peft")
    config, rank = load_config("smollm2-135m"), 64
    training = Training(dtype_bytes=2, parameter_bytes=2, lora=LoraShape(rank=rank))
    assert _shipped(config, training) == trace_config(config, training)
    thick = Training(dtype_bytes=2, parameter_bytes=2, lora=LoraShape(rank=576))
    with pytest.raises(AssertionError, match="traced"):
        _shipped(config, thick)


SHIPPED = ("llama-3.1-8b", "qwen3-4b", "gpt-oss-20b", "qwen3-30b-a3b")
SHIPPED += ("llama-3.1-70b",) if ALL else ()  # has the layers of the other Llama
SIZES = [(2, 2), (4, 4), (2, 4)]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(("smollm2-135m", sizes) for sizes in SIZES),
        *(
            pytest.param(name, sizes, marks=pytest.mark.slow)
            for name in SHIPPED
            for sizes in (SIZES if ALL else SIZES[:1])
        ),
    ],
)
def test_shipped_profiles_are_what_is_traced_today(name: str, sizes: tuple[int, int]) -> None:
    config = load_config(name)
    training = Training(dtype_bytes=sizes[0], parameter_bytes=sizes[1])
    shipped, traced = _shipped(config, training), trace_config(config, training)
    assert shipped.outer_weights == traced.outer_weights
    for ours, now in zip(shipped.layers, traced.layers, strict=True):
        assert ours.whole_bytes == _about(now.whole_bytes)
        assert ours.matmuls_bytes == _about(now.matmuls_bytes)
        assert ours.forward_flops == now.forward_flops


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("smollm2-135m", 134_515_008),
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_parameters_of_shipped_models(name: str, parameters: int) -> None:
    assert ModelShape.from_profile(_shipped(load_config(name), HALF)).total_parameters == parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mixtral-8x7b", 46_702_792_704),
        # Without the layer for multi-token prediction, which Transformers does not load.
        ("deepseek-v3", 671_026_419_200),
    ],
)
def test_parameters_of_models_without_a_profile(name: str, parameters: int) -> None:
    shape = ModelShape.from_profile(trace_config(known_config(name), HALF))
    assert shape.total_parameters == pytest.approx(parameters, rel=0.001)


def test_graphs_of_scans_grow_with_the_tokens() -> None:
    def nodes(family: str, tokens: int) -> set[float]:
        layers = trace_config(tiny_config(family), HALF).layers
        return {x.graph_nodes + x.graph_nodes_per_1024 * tokens / 1024 for x in layers}

    (llama,) = nodes("llama", 512)
    assert nodes("llama", 1024) == {llama}
    assert 40 < llama < 200
    few, many = (max(nodes("qwen3_5_text", tokens)) for tokens in (512, 1024))
    assert llama < few < many - 50


def test_recurrent_layers_scan_and_convolutions_do_not() -> None:
    scans = {
        family: [layer.scans for layer in trace_config(tiny_config(family), HALF).layers]
        for family in ("lfm2", "qwen3_5_text")
    }
    assert not any(scans["lfm2"])
    assert any(scans["qwen3_5_text"])


@pytest.mark.parametrize("family", ["llama", "gemma3n_text", "gemma4_text"])
def test_message_sizes_are_those_of_the_stages_messages(family: str) -> None:
    config: Any = tiny_config(family)
    profile = trace_config(config, HALF)
    layout = MessageLayout.of(find_parts(build_tiny_model(family)), profile.layers)
    if family == "llama":
        assert profile.message_elements == ()
        return
    widths = [layout.width(layer) for layer in range(len(profile.layers))]
    assert list(profile.message_elements) == widths
    assert min(widths) > getattr(config, "altup_num_inputs", 1) * config.hidden_size
    assert profiles_from_json(profiles_to_json("", (profile,))) == ("", (profile,))


def test_a_model_is_traced_once_for_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Training] = []
    trace = facts.trace_model

    def counting(config: Any, training: Training, make: Any) -> ModelProfile:
        traced.append(training)
        return trace(config, training, make)

    monkeypatch.setattr(facts, "trace_model", counting)
    monkeypatch.setattr(facts, "_profiles", {})
    monkeypatch.setattr(
        facts, "find_profile", lambda config, training, trace: trace(config, training)
    )
    for seed in range(3):
        model = build_tiny_model("llama", seed=seed, dtype=torch.float32, num_attention_heads=2)
        model_shape(find_parts(model))
    assert len(traced) == 1
    with torch.no_grad():
        model_shape(find_parts(build_tiny_model("llama", dtype=torch.bfloat16)))
    assert len(traced) == 2


def test_tracing_changes_nothing_outside() -> None:
    state, config = torch.get_rng_state(), tiny_config("llama")
    before = config.to_dict()
    with torch.no_grad():
        profile = trace_config(config, HALF)
        assert not torch.is_grad_enabled()
    assert profile.layers[0].weight_gradient_flops > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert config.to_dict() == before


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize("family", ["gemma3_text", "jetmoe"])
def test_tracing_leaves_nothing_behind(family: str) -> None:
    """Results that operations save are circles with autograd's nodes, which no collector sees."""

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())

    before = tensors()
    trace_config(tiny_config(family), HALF)
    assert tensors() <= before


@pytest.mark.parametrize(
    ("family", "training"),
    [
        # Grouped products, which torch has in 16 bits only; keys of other layers; states.
        ("qwen3_moe", Training(dtype_bytes=8, parameter_bytes=8, lora=LoraShape(rank=4))),
        ("gemma4_text-shared-kv", Training(dtype_bytes=2, parameter_bytes=4)),
        ("bamba", HALF),
    ],
)
def test_tiny_models_are_traced_with_memory_alike(
    family: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    if training.lora is not None:
        pytest.importorskip("peft")
    trace_short_scans(monkeypatch)
    replaced: list[Any] = []
    make = trace_profile._make_fake
    monkeypatch.setattr(trace_profile, "_make_fake", lambda x: (replaced.append(x), make(x)))
    profiles = [trace_config(tiny_config(family), training)]
    assert not replaced
    monkeypatch.setattr(trace_profile, "_TINY_ELEMENTS", 0)
    profiles.append(trace_config(tiny_config(family), training))
    assert replaced
    assert profiles[0] == profiles[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 5}, "attention of this model"),
        ({"hidden_size": None}, "no 'llama' model can be made"),
        ({"model_type": "from the future"}, "from the future.*update it"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    ],
)
def test_settings_that_make_no_model_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trace_config(llama_config(**{"num_hidden_layers": 2, **changes}), HALF)


def test_a_model_that_the_engine_refuses_is_not_traced() -> None:
    with pytest.raises(UnsupportedModelError, match="zeros"):
        trace_config(tiny_config("mamba"), HALF)


def _shipped(config: object, training: Training) -> ModelProfile:
    def refuse(*_: object) -> ModelProfile:
        raise AssertionError("this would have to be traced")

    return find_profile(config, training, refuse)


def _whole_bytes(shape: ModelShape) -> dict[int, int]:
    return {layer: shape.activation_bytes_per_token(layer) for layer in range(shape.num_layers)}


def _about(measured: Any) -> Any:
    return pytest.approx(measured, rel=TOLERANCE)


def _step_flops(model: Any, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> float:
    """FLOPs of matmuls in one step per token, with all layers in one mode on the device."""
    with monkeypatch.context() as patch:
        force_modes(patch, lambda chunk, layer: mode_of(saved, "device"))
        convert(revert(model), SETTINGS)
        if saved == "inputs":
            run(model).backward()  # finds unused matmuls
        with counted_flops() as counter:
            run(model).backward()
    convert(revert(model), SETTINGS)
    return counter.get_total_flops() / TOKENS


def _watch_kept_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, layer by layer, the bytes of matmuls that are kept."""
    kept: list[int] = []
    stop = SelectiveRecorder.stop

    def watched(self: SelectiveRecorder) -> Any:
        products = stop(self)
        # Tracing records products too, of other holders.
        holders = (p.output for p in products)
        tensors: list[Any] = [x._tensor for x in holders if type(x) is SavedTensor]
        if tensors:
            kept.append(sum(x.numel() * x.element_size() for x in tensors))
        return products

    monkeypatch.setattr(SelectiveRecorder, "stop", watched)
    return kept
