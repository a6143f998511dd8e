"""The table of family traits against what really runs: saved bytes, products, FLOPs, by family.

Each family of `tiny_families` is converted and runs a step with small sizes, all of them different.
Nine families that stand for the rest run always, the long tail in the slow pass.
"""

from __future__ import annotations

from typing import Any

import pytest

from sppo_hf.model.guard import PROVED
from sppo_hf.model.tiny_families import FAMILIES as TINY
from sppo_hf.model.tiny_families import MULTIMODAL
from sppo_hf.planning.families import FAMILIES, FamilyTraits, traits_of
from sppo_hf.planning.modes import Saved, mode_of
from sppo_hf.planning.shape import ModelShape

pytestmark = pytest.mark.fake

# Twice as strict as promised; most families are exact to the byte.
TOLERANCE = 0.01
ALWAYS = frozenset(("llama gemma3_text olmo2 phi3 gpt2 cohere mixtral deepseek_v3 gpt_oss").split())
# Multimodal models have the layers of their text decoder, which are counted here under its name.
# Variants of a family differ from it in nothing that is counted here; phi3's long rotary tables
# have a length of their own. The sizes of dbrx are in nested settings that planning does not read:
# it takes the family for a dense one.
# Several residual streams, and experts beside a dense layer, have no entry in the table of traits.
UNLISTED = ("gemma3n_text", "gemma4_text-26b-a4b", "llama4_text")
ACCEPTED = sorted(
    name
    for name, tiny in TINY.items()
    if tiny.model_type in PROVED
    and name not in MULTIMODAL
    and name not in ("phi3-longrope", "dbrx", *UNLISTED)
    and not name.endswith("router-loss")
)


def families(names: list[str] = ACCEPTED) -> list[Any]:
    """Families as parameters of a test, the long tail marked slow."""
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in names]


def test_an_unlisted_family_is_the_common_case() -> None:
    assert traits_of("never heard of") == FamilyTraits()
    assert FAMILIES["gemma2"].placement == "both"


def test_every_listed_family_is_accepted_and_differs_from_the_common_case() -> None:
    assert set(FAMILIES) <= {*PROVED, *(tiny.model_type for tiny in TINY.values())}
    assert FamilyTraits() not in FAMILIES.values()


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "falcon_h1", "mamba2", "lfm2"])
def test_states_are_counted_to_the_byte_and_weights_nearly(family: str) -> None:
    """What Transformers keeps for generation is what a chunk gives the next one."""
    torch = pytest.importorskip("torch")
    from sppo_hf.model.tiny import build_tiny_model, make_batch

    model = build_tiny_model(family, dtype=torch.float32)
    shape = ModelShape.from_config(model.config, dtype_bytes=4)
    assert shape.has_states
    with torch.no_grad():
        output = model.eval()(make_batch(rows=1, tokens=9)["input_ids"], use_cache=True)
    cache = output.cache_params if family == "mamba2" else output.past_key_values
    for index, layer in enumerate(cache.layers):
        kept = [
            state
            for states in ("conv_states", "recurrent_states")
            for state in getattr(layer, states, {}).values()
            if state is not None
        ]
        assert shape.state_bytes(index) == sum(state.nbytes for state in kept)
        assert (shape.layers[index].num_heads > 0) == (getattr(layer, "keys", None) is not None)
    weights = sum(p.numel() for p in model.parameters())
    assert shape.total_parameters == pytest.approx(weights, rel=0.03)


@pytest.mark.parametrize("lora", [False, True], ids=["dense", "lora"])
@pytest.mark.parametrize("family", families())
def test_shape_against_the_model(family: str, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if lora:
        pytest.importorskip("peft")
    from tests.planning.measuring import build, saved_bytes, to_bfloat16

    model, adapters = build(family, torch.float32, lora=lora)
    shape = ModelShape.from_config(model.config, dtype_bytes=4, lora=adapters)
    # Biases are not counted; in models this small they weigh up to a percent.
    parameters = list(model.parameters())
    assert shape.total_parameters == _about(sum(p.numel() for p in parameters))
    assert _whole_frames(shape) == _about(saved_bytes(model)[0])
    _check_flops_and_products(shape, model, monkeypatch)
    if lora:
        # Exact, because PEFT gives none of its adapters a bias.
        trained = [p for p in parameters if p.requires_grad]
        assert shape.trainable_parameters == sum(p.numel() for p in trained)
    half = ModelShape.from_config(model.config, dtype_bytes=2, lora=adapters)
    assert _whole_frames(half) == _about(saved_bytes(to_bfloat16(model))[0])


def _check_flops_and_products(
    shape: ModelShape, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.planning.measuring import TOKENS

    layers = range(shape.num_layers)
    kept = _watch_kept_products(monkeypatch)
    whole = _step_flops(model, "whole", monkeypatch)
    # The loss computes the head's gradients in forward, so only their sum can be compared.
    linear = shape.linear_flops_per_token() + shape.backward_linear_flops_per_token()
    assert linear == _about(whole)
    for saved in ("products", "skeleton"):
        again = _step_flops(model, saved, monkeypatch) - whole
        expected = sum(shape.recompute_flops_per_token(layer, saved) for layer in layers)
        assert expected == _about(again)
    beside = [
        shape.frame_bytes_per_token(layer, "products") - shape.skeleton_bytes_per_token(layer)
        for layer in layers
    ]
    assert beside == _about([num_bytes / TOKENS for num_bytes in kept])


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_frame_bytes_of_wide_adapters(family: str) -> None:
    """PEFT's float32 adapters on a 16-bit model, with the Trainer's autocast and without."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    from sppo_hf.model.facts import model_shape
    from sppo_hf.model.structure import find_parts
    from tests.planning.measuring import build, saved_bytes, to_bfloat16

    model = to_bfloat16(build(family, torch.float32, lora=True)[0])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    frames = []
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            shape = model_shape(find_parts(model))
            assert _whole_frames(shape) == _about(saved_bytes(model)[0])
        frames.append(shape.frame_bytes_per_token(1))
    assert frames[1] < 0.9 * frames[0]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "mixtral"])
def test_frame_bytes_under_autocast(family: str) -> None:
    torch = pytest.importorskip("torch")
    from tests.planning.measuring import build, saved_bytes

    model, _ = build(family, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured, _ = saved_bytes(model)
    shape = ModelShape.from_config(model.config, dtype_bytes=2, parameter_bytes=4)
    assert _whole_frames(shape) == _about(measured)


def _whole_frames(shape: ModelShape) -> dict[int, int]:
    return {layer: shape.frame_bytes_per_token(layer) for layer in range(shape.num_layers)}


def _about(measured: Any) -> Any:
    return pytest.approx(measured, rel=TOLERANCE)


def _step_flops(model: Any, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> float:
    """Matrix products of one step per token, with all frames in one mode on the device."""
    from sppo_hf.model.convert import convert, revert
    from tests.model.forced_plans import force_modes
    from tests.planning.measuring import SETTINGS, TOKENS, counted_flops, run

    with monkeypatch.context() as patch:
        force_modes(patch, lambda chunk, layer: mode_of(saved, "device"))
        convert(revert(model), SETTINGS)
        if saved == "skeleton":
            run(model).backward()  # finds the products that nobody needs
        with counted_flops() as counter:
            run(model).backward()
    convert(revert(model), SETTINGS)
    return counter.get_total_flops() / TOKENS


def _watch_kept_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, layer by layer, the bytes of products that a frame keeps."""
    from sppo_hf.model.products import ProductRecorder

    kept: list[int] = []
    stop = ProductRecorder.stop

    def watched(self: ProductRecorder) -> Any:
        products = stop(self)
        tensors = [p.holder._tensor for p in products if p.holder is not None]
        kept.append(sum(x.numel() * x.element_size() for x in tensors))
        return products

    monkeypatch.setattr(ProductRecorder, "stop", watched)
    return kept
