"""Multimodal checkpoints as they load, trained on batches of text, and of text with images.

Losses and gradients of every family on text are compared in `test_exactness`; here is what only
multimodal models have: encoders, types of tokens, positions with several axes.
"""

import copy
import gc
import inspect
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from sppo_hf import ConfigError, SPPOConfig
from sppo_hf.engine.attention_interface import is_causal_with
from sppo_hf.engine.convert import convert, get_engine, revert
from sppo_hf.engine.encoded_inputs import as_inputs
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.engine.forward_calls import read_call
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.errors import SPPOError, UnsupportedModelError
from sppo_hf.planning.config_file import check_config, load_config
from sppo_hf.planning.model_profile import Training
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.testing.exactness import compare, float64_everywhere
from sppo_hf.testing.tiny_models import (
    IMAGE_TOKEN,
    add_images,
    add_lora,
    build_tiny_model,
    make_batch,
    tiny_config,
)
from tests.sweeps import ALL, pairs, turn

SETTINGS = SPPOConfig(
    chunk_lengths=(9, 1, 13), recompute="full", min_offload_size=1, show_plan=False
)

pytestmark = pytest.mark.filterwarnings("ignore")  # families warn at their first import


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Convert any family: what the check at conversion would find is found by the test."""
    with family_check_disabled():
        yield


def _encoders(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    named = dict(model.named_parameters())
    return {n: p for n, p in named.items() if "vision" in n or "visual" in n}


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, AutoModelForImageTextToText])
def test_a_checkpoint_trains_as_it_loads_and_is_saved_alike(loader: Any, tmp_path: Path) -> None:
    build_tiny_model("gemma3", dtype=torch.float32).save_pretrained(tmp_path / "before")
    model = loader.from_pretrained(tmp_path / "before").train()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    converted = convert(model, SETTINGS)
    converted(**make_batch()).loss.backward()
    encoders = _encoders(model)
    assert encoders
    assert all(parameter.grad is None for parameter in encoders.values())
    converted.save_pretrained(tmp_path / "after")
    again, info = loader.from_pretrained(tmp_path / "after", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert set(again.state_dict()) == set(model.state_dict())
    revert(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert type(model.forward(**make_batch())).__name__ == "Gemma3CausalLMOutputWithPast"


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        (name, scenario)
        for index, name in enumerate(["gemma3", "qwen3_vl"])
        for scenario in turn(["frozen encoder", "lora", "accumulation"], 2, index)
    ],
)
def test_settings_of_a_user(name: str, scenario: str) -> None:
    model: Any = build_tiny_model(name)
    if scenario == "lora":
        model = add_lora(model)
    elif scenario == "frozen encoder":
        for parameter in _encoders(model).values():
            parameter.requires_grad_(False)
    batch = make_batch(rows=3, tokens=23, padding=(4, 0, 11))
    report = compare(model, batch, SETTINGS, accumulation=2 if scenario == "accumulation" else 1)
    assert report.exact, str(report)


# By grid and by size, in several orders of axes; with DeepStack; with states; with experts.
IMAGES = ("llava", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "smolvlm")
IMAGES += ("glm4v", "qwen2_vl", "qwen3_vl_moe", "paddleocr_vl", "glm46v", "glm_ocr", "glm4v_moe")
ORDERS = ("by_chunk", "by_layer")
KEPT: dict[str, Any] = {
    "recomputed": {"recompute": "full"},
    "offloaded": {"recompute": "none", "offload": "full", "min_offload_size": 1},
    "selected": {"recompute": "selective"},
}


def _with_images(model: Any, *, rows: int = 2, images: int = 3, **options: Any) -> dict[str, Any]:
    return add_images(model, make_batch(rows=rows, tokens=60, **options), images=images)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "order", "kept"),
    pairs(IMAGES, ORDERS, list(KEPT))
    if ALL
    else list(zip(IMAGES[1:5], ORDERS * 2, [*KEPT, "recomputed"], strict=True)),
)
def test_images_are_exact(name: str, order: str, kept: str) -> None:
    """The encoders train too: their gradients are among those that are compared."""
    model = build_tiny_model(name)
    settings: dict[str, Any] = {**KEPT[kept], "order": order, "num_chunks": 5, "show_plan": False}
    batch = _with_images(model, padding=(0, 7))
    report = compare(model, batch, SPPOConfig(**settings))
    assert report.exact, str(report)


class _Masked(TorchDispatchMode):
    """Counts reads and writes of what a mask marks: the host asks the device how much that is."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            self.count += any(x is not None and x.dtype == torch.bool for x in args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("unchecked")
def test_no_chunk_asks_how_many_tokens_are_of_images() -> None:
    """DeepStack adds to the hidden states of three layers, in Transformers at a mask."""
    model = build_tiny_model("qwen3_vl")
    batch = _with_images(model)
    counts = []
    for chunks in (2, 5):
        settings: dict[str, Any] = {"order": "by_chunk", "num_chunks": chunks}
        convert(model, SPPOConfig(**settings, show_plan=False))(
            **batch
        ).loss.backward()  # planned and traced
        with _Masked() as masked:
            model(**batch).loss.backward()
        counts.append(masked.count)
        revert(model)
    assert counts[0] == counts[1] > 0, "the encoders' own alone"


# With a window that counts within an image, in all layers or in some, and with one that does not.
BOTH_WAYS = ("gemma3", "gemma4-bidirectional", "gemma4_unified", "shieldgemma2")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "order", "kept"),
    pairs(BOTH_WAYS, ORDERS, list(KEPT))
    if ALL
    else list(zip(BOTH_WAYS[:3], ("by_layer", *ORDERS), KEPT, strict=True)),
)
def test_tokens_of_an_image_see_each_other_in_both_directions(
    name: str, order: str, kept: str
) -> None:
    """Chunks that would end within an image end beside it."""
    model = build_tiny_model(name)
    batch = _with_images(model, rows=1, images=2)
    image = batch["input_ids"][0] == IMAGE_TOKEN
    assert image[2:4].all()
    length = int(image.sum()) // 2
    lengths = (3, length + 1, length, 56 - 2 * length)
    assert image[2 * length + 4 - 1 : 2 * length + 4 + 1].all()
    settings: dict[str, Any] = {**KEPT[kept], "order": order, "chunk_lengths": lengths}
    report = compare(model, batch, SPPOConfig(**settings, show_plan=False))
    assert report.exact, str(report)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("side", ["padding", "left_padding"])
def test_padding_of_the_type_of_images_is_not_seen(side: str) -> None:
    """An image next to padding, to which a collator has given the image's type."""
    model = build_tiny_model("gemma4_unified")
    batch = _with_images(model, images=1, **{side: (12, 0)})
    (types,) = (x for name, x in batch.items() if name.endswith("token_type_ids"))
    types[0, 45:] = types[0, :14] = 1
    report = compare(model, batch, SETTINGS.replace(chunk_lengths=None, num_chunks=3))
    assert report.exact, str(report)


@pytest.mark.parametrize(
    "settings",
    [
        {"order": "by_layer"},
        {"offload": "full", "offload_kv": "full", "min_offload_size": 1},
        {"micro_batch_size": 1},
    ],
)
def test_rows_whose_images_leave_no_place_between_chunks_run_one_by_one(
    settings: dict[str, Any],
) -> None:
    model = build_tiny_model("gemma3")
    # Images at 1 to 5 and at 3 to 7, so that no chunk of both rows can end between 1 and 7.
    batch = _with_images(model, left_padding=(0, 2))
    chunks = SPPOConfig(chunk_lengths=(2, 2, 2, 54), show_plan=False, **settings)
    report = compare(model, batch, chunks)
    assert report.exact, str(report)


def test_an_image_that_is_longer_than_chunks_is_refused() -> None:
    model = build_tiny_model("gemma3", dtype=torch.float32)
    batch = _with_images(model)
    convert(model, SETTINGS.replace(chunk_lengths=(1, 1, 1, 1, 56)))
    told = r"60 tokens in 5 chunks: tokens 1 to 5 see each other in both .*hold all 4\. Set fewer"
    with pytest.raises(ConfigError, match=told):
        model(**batch)
    convert(revert(model), SETTINGS.replace(chunk_lengths=None, num_chunks=3))
    model(**batch).loss.backward()  # the remedy


@pytest.mark.parametrize("packed_by", ["position_ids", "cu_seq_lens"])
def test_packed_images_whose_tokens_see_each_other_are_refused(packed_by: str) -> None:
    """Transformers looks for images at other tokens then: in layers with a window, not in all."""
    model = build_tiny_model("gemma3", dtype=torch.float32)
    batch = _with_images(model, rows=1, images=2)
    if packed_by == "position_ids":
        batch["position_ids"] = torch.cat([torch.arange(40), torch.arange(20)])[None]
    else:
        ends = torch.tensor([0, 40, 60], dtype=torch.int32)
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        batch |= {"max_length_q": 40, "max_length_k": 40}
    convert(model, SETTINGS.replace(chunk_lengths=None, num_chunks=3))
    remedy = r"for images that is neither causal nor .*leave token_type_ids, pixel_values out"
    with pytest.raises(UnsupportedModelError, match=remedy):
        model(**batch, use_cache=False)


_SCENARIOS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "left padding": {"left_padding": (5, 0)},
    "rows by themselves": {"padding": (4, 0)},
    "lora": {},
    "frozen encoder": {},
    "packed": {"rows": 1},
    "one-token chunks": {"rows": 1},
}


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        (name, scenario)
        for index, name in enumerate(["qwen3_vl", "mistral3", "gemma3"])
        for scenario in turn(list(_SCENARIOS), 4, index)
        if name != "gemma3" or scenario not in ("packed", "one-token chunks")  # refused
    ],
)
def test_images_with_settings_of_a_user(name: str, scenario: str) -> None:
    model: Any = build_tiny_model(name)
    batch = _with_images(model, **_SCENARIOS[scenario])
    settings = SETTINGS.replace(chunk_lengths=None, num_chunks=4)
    if scenario == "lora":
        model = add_lora(model)
    elif scenario == "frozen encoder":
        for parameter in _encoders(model).values():
            parameter.requires_grad_(False)
    elif scenario == "packed":
        # Documents with an image each; what a row counts is left to the caller.
        batch["use_cache"] = False
        batch["position_ids"] = torch.cat([torch.arange(40), torch.arange(20)])[None]
    elif scenario == "rows by themselves":
        settings = settings.replace(micro_batch_size=1)
    elif scenario == "one-token chunks":
        settings = settings.replace(num_chunks="auto", chunk_lengths=(1, 1, 1, 56, 1))
    report = compare(model, batch, settings)
    assert report.exact, str(report)


@pytest.mark.parametrize("trained", [False, True])
def test_encoders_run_again_only_if_they_train(trained: bool) -> None:
    """What they would save is not kept until then: their layers' inputs, for one."""
    model = build_tiny_model("qwen3_vl", dtype=torch.float32)
    for parameter in _encoders(model).values():
        parameter.requires_grad_(trained)
    batch = _with_images(convert(model, SETTINGS.replace(chunk_lengths=None, num_chunks=3)))
    runs: list[torch.Tensor] = []
    part = model.model.visual.blocks[1].mlp
    part.register_forward_pre_hook(lambda _, args: runs.append(args[0]))
    seen = weakref.WeakSet[torch.Tensor]()
    loss = model(**batch).loss
    seen.update(runs)
    runs.clear()
    gc.collect()
    assert not list(seen), "held until backward"
    loss.backward()
    # Once for all that the layers need, and each layer by itself for its own backward.
    assert len(runs) == (2 if trained else 0)
    found = [p.grad is not None for p in _encoders(model).values()]
    assert all(found) if trained else not any(found)


@pytest.mark.parametrize("grad", [False, True])
def test_images_in_evaluation_and_without_labels(grad: bool) -> None:
    """A loss of the caller's own, from logits of whole rows; and the standard one in evaluation."""
    plain = build_tiny_model("qwen3_vl")
    batch = _with_images(plain)
    model = convert(copy.deepcopy(plain), SETTINGS.replace(chunk_lengths=None, num_chunks=3))
    with float64_everywhere():
        if grad:
            del batch["labels"]
            ours, theirs = model(**batch).logits, plain(**batch).logits
            ours.square().mean().backward()
            theirs.square().mean().backward()
            pairs_of = zip(model.parameters(), plain.parameters(), strict=True)
            assert all(torch.allclose(p.grad, q.grad, atol=1e-9) for p, q in pairs_of)
        else:
            with torch.no_grad():
                ours, theirs = (m.eval()(**batch).loss for m in (model, plain))
    assert torch.allclose(ours, theirs, atol=1e-10)


def test_a_batch_of_text_between_batches_with_images() -> None:
    """Plans differ: embeddings of whole rows are held for images only."""
    plain = build_tiny_model("qwen3_vl")
    mixed = [_with_images(plain), make_batch(rows=2, tokens=60), _with_images(plain, images=1)]
    model = convert(copy.deepcopy(plain), SETTINGS.replace(chunk_lengths=None, num_chunks=3))
    with float64_everywhere():
        for batch in mixed:
            losses = [m(**batch).loss for m in (model, plain)]
            assert torch.allclose(*losses, atol=1e-10)
            for loss in losses:
                loss.backward()
    grads = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(p.grad, q.grad, atol=1e-9) for p, q in grads)
    planned = [p.shape.encoded_token_bytes for p in get_engine(model).plans._plans.values()]
    # Two tensors are added in layers; gradients of slices are summed beside their sum.
    held = 3 * plain.config.text_config.hidden_size * 8
    assert sorted(set(planned)) == [(0, 0), (held, 2 * held)]


def test_images_that_are_added_in_layers_chosen_by_number() -> None:
    """Granite 4 Vision names layers in two fields, and passes what is added by their numbers."""
    model: Any = build_tiny_model(
        "granite4_vision",
        text_config={"model_type": "granite4_vision_text"},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "image_size": 64,
            "patch_size": 16,
        },
        qformer_config={"hidden_size": 64, "encoder_hidden_size": 64, "num_attention_heads": 1},
        downsample_rate="1/2",
        deepstack_layer_map=[[-1, 0], [-2, 2]],
        spatial_target_layers=[1],
        image_grid_pinpoints=[[64, 64], [128, 64]],
    )
    model.config.image_token_id = 3
    batch: dict[str, Any] = make_batch(rows=2, tokens=40)
    batch["input_ids"][batch["input_ids"] == 3] = 4
    batch["input_ids"][0, 2:12] = 3
    batch["pixel_values"] = torch.randn(1, 2, 3, 64, 64, dtype=torch.float64)
    batch["image_sizes"] = torch.tensor([[64, 64]])
    settings = SETTINGS.replace(chunk_lengths=None, num_chunks=4)
    report = compare(model, batch, settings)
    assert report.exact, str(report)
    convert(model, settings)(**batch)
    (plan,) = get_engine(model).plans._plans.values()
    held = (1 + 3) * model.config.text_config.hidden_size * 8
    assert plan.shape.encoded_token_bytes == (held, 2 * held)


def test_other_inputs_are_refused_by_name() -> None:
    model = convert(build_tiny_model("qwen3_vl", dtype=torch.float32), SETTINGS)
    told = r"audio_features is not read by its Qwen3VLModel.*leave audio_features out"
    with pytest.raises(SPPOError, match=told):
        model(**make_batch(), audio_features=torch.zeros(1))
    model(**make_batch()).loss.backward()  # the remedy


PLACEHOLDER = 5
"""Stands for a part of a video or a sound."""


def _with_places(runs: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Two rows of 60 tokens with placeholders in runs, (first, tokens), a token later in the other.

    Placeholders have no labels.
    """
    batch = make_batch(rows=2, tokens=60)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["input_ids"][batch["input_ids"] == PLACEHOLDER] += 1
    for begin, tokens in runs:
        for row in range(2):
            batch["input_ids"][row, begin + row : begin + row + tokens] = PLACEHOLDER
    batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == PLACEHOLDER, -100)
    return batch


def _check_is_read_exactly(
    model: Any, batch: dict[str, Any], content: str, settings: dict[str, Any]
) -> None:
    """The plain model reads `content`, and chunks have its loss and gradients."""
    with torch.no_grad():
        losses = [
            model(**{**batch, content: scale * batch[content]}).loss.item() for scale in (1, 2)
        ]
    assert losses[0] != losses[1]
    lengths = (9, 1, 13, 37)
    report = compare(model, batch, SPPOConfig(chunk_lengths=lengths, show_plan=False, **settings))
    assert report.exact, str(report)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("order", "kept"), [("by_chunk", "recomputed"), ("by_layer", "offloaded")])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_videos(family: str, order: str, kept: str) -> None:
    model: Any = build_tiny_model(family)
    model.config.video_token_id = PLACEHOLDER
    frames, patches, size = 2, 16, model.config.vision_config.patch_size
    # Qwen3-VL has text between frames, which says when they are.
    text = 3 if family == "qwen3_vl" else 0
    batch = _with_places([(4 + frame * (4 + text), 4) for frame in range(frames)])
    batch["mm_token_type_ids"] = 2 * (batch["input_ids"] == PLACEHOLDER).long()
    batch["video_grid_thw"] = torch.tensor([[frames, 4, 4]] * 2)
    pixels = torch.randn(2 * frames * patches, 3 * 2 * size**2, dtype=torch.float64)
    batch["pixel_values_videos"] = pixels
    _check_is_read_exactly(model, batch, "pixel_values_videos", {"order": order, **KEPT[kept]})


# Settings of the encoder, and how many tokens 32 frames of sound have.
SOUND: dict[str, tuple[dict[str, int], int]] = {
    "voxtral": (
        {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2}
        | {"num_attention_heads": 4},
        4,
    ),
    "qwen2_audio": (
        {"d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 4},
        8,
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("order", "kept"), [("by_chunk", "offloaded"), ("by_layer", "recomputed")])
@pytest.mark.parametrize("family", SOUND)
def test_sound(family: str, order: str, kept: str) -> None:
    encoder, tokens = SOUND[family]
    config = AutoConfig.for_model(
        family,
        text_config=tiny_config(family).text_config.to_dict(),
        audio_config={**encoder, "num_mel_bins": 16, "max_source_positions": 16},
        audio_token_id=PLACEHOLDER,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForMultimodalLM.from_config(config, dtype=torch.float64)
    batch: dict[str, Any] = _with_places([(5, tokens)])
    batch["input_features"] = torch.randn(2, 16, 32, dtype=torch.float64)
    if "feature_attention_mask" in inspect.signature(model.forward).parameters:
        batch["feature_attention_mask"] = torch.ones(2, 32, dtype=torch.long)
    _check_is_read_exactly(model, batch, "input_features", {"order": order, **KEPT[kept]})


@pytest.mark.usefixtures("unchecked")
def test_one_token_for_a_whole_sound_is_refused() -> None:
    """Qwen2-Audio makes longer rows of such batches, for which there are no labels."""
    model = build_tiny_model("qwen2_audio", dtype=torch.float32)
    convert(model, SETTINGS.replace(chunk_lengths=None, num_chunks=3))
    batch = make_batch(rows=2, tokens=40)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["input_ids"][batch["input_ids"] == 5] = 6
    sound: dict[str, Any] = {
        "input_features": torch.randn(1, 128, 3000),
        "feature_attention_mask": (torch.arange(3000) < 60).long()[None],
    }
    model.config.audio_token_id = 5
    batch["input_ids"][0, 2] = 5
    with pytest.raises(ConfigError, match=r"makes 2 rows of 54 tokens.*a token for every feature"):
        model(**batch, **sound)
    batch["input_ids"][0, 2:17] = 5
    model(**batch, **sound).loss.backward()  # the remedy


@pytest.mark.usefixtures("unchecked")
def test_images_beside_the_embeddings_are_refused() -> None:
    """Mllama's text decoder embeds tokens itself, and attends to images in layers of its own."""
    vision = {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96}
    model: Any = build_tiny_model("mllama", dtype=torch.float32, vision_config=vision)
    convert(model, SETTINGS)
    side, tiles = model.config.vision_config.image_size, model.config.vision_config.max_num_tiles
    images = {
        "pixel_values": torch.randn(1, 1, tiles, 3, side, side),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
    }
    with pytest.raises(ConfigError, match="beside the tokens, not in their embeddings"):
        model(**make_batch(tokens=23), **images)


def test_what_is_as_long_as_the_rows_by_chance_is_not_sliced() -> None:
    model = build_tiny_model("qwen3_vl", dtype=torch.float32)
    call = read_call(find_parts(model), model.forward, (), _with_images(model))
    states = torch.zeros(2, 60, 32)
    assert as_inputs(call, {"inputs_embeds": states, "per_layer_inputs": states}).tokens
    with pytest.raises(ConfigError, match=r"is given image_states .* cannot be sliced"):
        as_inputs(call, {"inputs_embeds": states, "image_states": states})
    kinds = {"mm_token_type_ids": states[..., 0]}
    assert as_inputs(call, {"inputs_embeds": states, **kinds}).tokens.keys() >= kinds.keys()


def test_rows_without_a_mask() -> None:
    """Positions then say which tokens see each other, and a model counts them for images."""
    model = build_tiny_model("gemma4")
    batch = _with_images(model)
    assert "attention_mask" not in batch
    report = compare(model, batch, SETTINGS.replace(chunk_lengths=None, num_chunks=3))
    assert report.exact, str(report)
    call = read_call(find_parts(model), model.forward, (), batch)
    positions = torch.cat([torch.arange(20), torch.arange(25, 65)])
    seen = {"inputs_embeds": torch.zeros(2, 60, 32), "position_ids": positions}
    with pytest.raises(ConfigError, match=r"several packed documents\. Remedy: give an attention"):
        as_inputs(call, seen)


@pytest.mark.parametrize("without", ["a token of the image", "types of tokens"])
def test_errors_of_the_model_are_its_own(without: str) -> None:
    """Of a batch that does not fit together, as without chunks; and the next batch runs."""
    model = build_tiny_model("qwen3_vl", dtype=torch.float32)
    batch, plain = _with_images(model), copy.deepcopy(model)
    convert(model, SETTINGS.replace(chunk_lengths=None, num_chunks=3))
    wrong = dict(batch)
    if without == "types of tokens":
        del wrong["mm_token_type_ids"]
    else:
        wrong["input_ids"] = batch["input_ids"].clone()
        wrong["input_ids"][0, 1] = 7
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        plain(**wrong)
    with pytest.raises(type(theirs.value)) as ours:
        model(**wrong)
    assert str(ours.value) == str(theirs.value)
    model(**batch).loss.backward()


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("gemma3", "token_type_ids", 0),
        ("gemma4", "mm_token_type_ids", 0),
        ("qwen3_vl", "mm_token_type_ids", 0),
    ],
)
def test_token_types_of_text_change_nothing(name: str, argument: str, value: int) -> None:
    batch = make_batch(tokens=23)
    batch[argument] = torch.full_like(batch["input_ids"], value)
    report = compare(build_tiny_model(name), batch, SETTINGS)
    assert report.exact, str(report)


def test_a_prefix_that_is_read_in_both_directions_is_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PaliGemma's types of tokens mean another thing than other models': 0 is such a prefix."""
    parts = find_parts(build_tiny_model("paligemma"))
    assert not is_causal_with(parts, "token_type_ids", 0)
    assert is_causal_with(parts, "token_type_ids", 1)
    # Asked with every batch, when weights may rest on the host: the answer is remembered.
    monkeypatch.setattr(parts.base, "forward", None)
    assert is_causal_with(parts, "token_type_ids", 1)


def _positions(axes: int, restarts: bool) -> torch.Tensor:
    """`[axes, 2, 23]`, or `[2, 23]` for no axes: text, or a picture's time, height and width."""
    text = torch.arange(23) % 9 if restarts else torch.arange(23)
    rows = torch.stack([text, text])
    if axes == 0:
        return rows
    picture = torch.stack([rows, rows // 2, rows // 3])
    return torch.cat([rows[None], picture]) if axes == 4 else picture


@pytest.mark.parametrize(
    ("name", "axes", "restarts"), pairs(["qwen3_vl", "qwen2_5_vl"], [0, 3, 4], [False, True])
)
def test_positions_of_several_axes(name: str, axes: int, restarts: bool) -> None:
    """Packed documents are kept apart where the model does so: Qwen2.5-VL only by a fourth axis."""
    batch: dict[str, Any] = {**make_batch(rows=2, tokens=23), "use_cache": False}
    batch["position_ids"] = _positions(axes, restarts)
    report = compare(build_tiny_model(name), batch, SETTINGS)
    assert report.exact, str(report)


def test_positions_of_other_shapes_are_refused() -> None:
    batch = make_batch(rows=2, tokens=23)
    batch["position_ids"] = _positions(3, restarts=False)
    llama = convert(build_tiny_model("llama"), SETTINGS)
    with pytest.raises(ConfigError, match=r"position_ids has shape \(3, 2, 23\)"):
        llama(**batch)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_planning_reads_what_training_runs(name: str, tmp_path: Path) -> None:
    model = build_tiny_model(name, dtype=torch.float32)
    model.config.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    check_config(config)
    parts = find_parts(model)
    shape = ModelShape.from_profile(
        trace_config(config, Training(dtype_bytes=4, parameter_bytes=4))
    )
    assert shape.num_layers == len(parts.layers)
    ends = {*parts.decoder.parameters(), *parts.head_parameters()}
    decoder = sum(parameter.numel() for parameter in ends)
    assert shape.trainable_parameters == pytest.approx(decoder, rel=0.1)
    assert shape.total_parameters > shape.trainable_parameters, "encoders take memory too"
