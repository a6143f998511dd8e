"""Stages cut out of a model: what stays, under which names, what is freed, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.attention_interface import document_positions, is_causal_with
from sppo_hf.engine.model_parts import CAPTURES, find_causal_lm, find_parts
from sppo_hf.engine.stage_messages import MessageLayout, _SharedKV
from sppo_hf.engine.stages import AbsentLayer, StageCut, StagedModel
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.pipeline.convert import choose_cut, staged_model
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model
from tests.integrations.training import switch_checkpointing_on
from tests.sweeps import turn

THREE = (range(0, 1), range(1, 3), range(3, 4))
TIED = ("llama-bias-tied", "gemma2", "gpt2")
FAMILIES = (
    *("llama", "mistral", "gemma3_text", "granite", "cohere2", "gpt_neox", "phi3"),
    *("qwen3_moe", "minicpm3", *TIED),
)


def build(family: str = "llama", *, lora: bool = False) -> nn.Module:
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    mixed = family in ("gemma2", "gemma3_text", "cohere2")
    model = build_tiny_model(family, num_hidden_layers=4, **(kinds if mixed else {}))
    return add_lora(model) if lora else model


def cut(model: nn.Module, *own: int, layers: tuple[range, ...] = THREE) -> StagedModel:
    return StagedModel(find_parts(model), StageCut(layers, own))


def names(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in find_causal_lm(model).named_parameters()}


# What PEFT says of fused layers.
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set", "ignore:The following .*_pattern keys")
@pytest.mark.parametrize(
    ("family", "lora"),
    [(name, lora) for i, name in enumerate(FAMILIES) for lora in turn([False, True], 2, i)],
)
def test_stages_divide_the_parameters_and_keep_their_names(family: str, lora: bool) -> None:
    whole = build(family, lora=lora)
    tied = family in TIED or family in ("gemma3_text", "cohere2", "minicpm3")
    held: dict[str, tuple[int, ...]] = {}
    for stage in range(3):
        model = build(family, lora=lora)
        staged = cut(model, stage)
        mine = names(model)
        twice = mine.keys() & held.keys()
        assert twice == (staged.shared_names if stage == 2 else set())
        held |= mine
        assert staged.shared_names <= mine.keys() or stage == 1
        assert bool(staged.shared_names) == tied
        assert type(find_causal_lm(model)) is type(find_causal_lm(whole))
        layers = find_parts(model).layers
        assert len(layers) == 4
        for index, layer in enumerate(layers):
            here = index in THREE[stage]
            assert isinstance(layer, AbsentLayer) != here
            assert any(True for _ in layer.parameters()) == here
    assert held == names(whole)


@pytest.mark.parametrize("family", TIED)
def test_a_tied_embedding_stays_on_the_last_stage_as_well(family: str) -> None:
    whole = build(family)
    matrix = whole.get_input_embeddings().weight
    (shared,) = (name for name, p in whole.named_parameters() if p is matrix)
    for stage in (0, 1, 2):
        model = build(family)
        staged = cut(model, stage)
        assert staged.shared_names == {shared}
        assert (shared in names(model)) == (stage != 1)
    assert model.get_output_embeddings().weight is model.get_parameter(shared)
    assert torch.equal(model.get_parameter(shared), matrix)


def test_both_ends_on_one_rank_and_all_stages() -> None:
    model = build("llama-bias-tied")
    cut(model, 0, 2)
    absent = [isinstance(layer, AbsentLayer) for layer in find_parts(model).layers]
    assert absent == [False, True, True, False]
    assert {n.split(".")[1] for n in names(model)} == {"embed_tokens", "layers", "norm"}
    model = build("llama-bias-tied")
    before = names(model)
    cut(model, 0, 1, 2)
    assert names(model) == before


def test_what_is_not_kept_is_freed() -> None:
    model = build("llama-bias-tied")
    parts = find_parts(model)
    gone = [*parts.layers[0].parameters(), *parts.layers[3].parameters()]
    gone += [*model.model.embed_tokens.parameters(), *model.model.norm.parameters()]
    kept = [*parts.layers[1].parameters(), *parts.layers[2].parameters()]
    lost, held = [weakref.ref(p) for p in gone], [weakref.ref(p) for p in kept]
    staged = cut(model, 1)
    del parts, gone, kept
    gc.collect()
    assert [ref() for ref in lost] == [None] * len(lost)
    assert all(ref() is not None for ref in held)
    assert staged.parts.causal_lm is model


def test_absent_layers_keep_attributes_that_models_read() -> None:
    model = build("gemma2")
    for index, layer in enumerate(find_parts(model).layers):
        layer.kind_of_attention = f"kind {index}"
    cut(model, 1)
    kinds = [layer.kind_of_attention for layer in find_parts(model).layers]
    assert kinds == [f"kind {index}" for index in range(4)]
    hidden = torch.randn(2, 3, 32)
    assert find_parts(model).layers[0](hidden, "mask", position_ids=None) is hidden


def test_layers_that_are_absent_are_not_recomputed() -> None:
    model = build()
    switch_checkpointing_on(model)
    staged = cut(model, 0, 2)
    for stage in (0, 2):
        with staged.running(stage):
            model.model(torch.zeros(1, 3, dtype=torch.long))
    # Switched on again by a Trainer, in what is left.
    switch_checkpointing_on(model)
    hidden = torch.randn(1, 3, 32, requires_grad=True)
    assert find_parts(model).layers[1](hidden) is hidden


def test_absent_ends_return_their_input() -> None:
    model = build()
    cut(model, 1)
    embedded = model.get_input_embeddings()(torch.zeros(2, 3, dtype=torch.long))
    assert embedded.shape == (2, 3, 32)
    assert embedded.dtype == torch.float64
    assert not embedded.any()
    hidden = torch.randn(2, 3, 32)
    assert model.model.norm(hidden) is hidden
    assert model.lm_head(hidden) is hidden


def test_one_stage_runs_at_a_time() -> None:
    model = build()
    staged = cut(model, 0, 2)
    whole = model.model.layers
    ran: list[int] = []
    for index in (0, 3):
        whole[index].register_forward_hook(lambda *_, index=index: ran.append(index))
    for stage, layer in ((0, 0), (2, 3)):
        with staged.running(stage):
            model.model(torch.zeros(1, 3, dtype=torch.long))
            assert len(model.model.layers) == 4
        assert ran == [layer]
        ran.clear()
        assert model.model.layers is whole
    # Names and checkpoints are those of the whole, whatever happens while a stage runs.
    with pytest.raises(ValueError, match="stop"), staged.running(0):
        raise ValueError("stop")
    assert model.model.layers is whole


@pytest.mark.parametrize(
    "layers",
    [
        (range(0, 2), range(3, 4)),
        (range(0, 2), range(2, 2), range(2, 4)),
        (range(0, 2), range(2, 5)),
        (range(2, 4), range(0, 2)),
        (range(0, 3), range(2, 4)),
    ],
    ids=["gap", "empty", "too many layers", "order", "twice"],
)
def test_stages_that_do_not_cover_the_layers_are_refused(layers: tuple[range, ...]) -> None:
    model = build()
    with pytest.raises(ConfigError, match=r"stages hold layers .* LlamaForCausalLM has 4.*Remedy"):
        cut(model, 0, layers=layers)
    assert not any(isinstance(layer, AbsentLayer) for layer in find_parts(model).layers)


@pytest.mark.parametrize(("pp_size", "virtual"), [(5, 1), (3, 2)])
def test_more_stages_than_layers_are_refused(pp_size: int, virtual: int) -> None:
    schedule = "interleaved_seq1f1b" if virtual > 1 else "auto"
    config = SPPOConfig(pp_size=pp_size, pp_virtual_stages=virtual, pp_schedule=schedule)
    with pytest.raises(ConfigError) as caught:
        choose_cut(find_parts(build()), config, 0)
    said = str(caught.value)
    assert f"pp_size={pp_size} x pp_virtual_stages={virtual} makes {pp_size * virtual}" in said
    assert "4 layers" in said
    assert "Remedy" in said


@pytest.mark.parametrize(
    ("family", "said"),
    [("zamba2", "layer 0 takes the embeddings, too"), ("zaya", "layer 0 returns more than hidden")],
)
def test_layers_that_exchange_more_than_hidden_states_are_refused(family: str, said: str) -> None:
    parts = find_parts(build_tiny_model(family))
    with pytest.raises(UnsupportedModelError, match=f"{said}.*pp_size=1"):
        choose_cut(parts, SPPOConfig(pp_size=2), pp_rank=0)


def share_between_layers(model: nn.Module, first: int, second: int) -> None:
    layers = find_parts(model).layers
    layers[second].mlp.up_proj.weight = layers[first].mlp.up_proj.weight


def test_weights_that_stages_share_are_refused_where_they_train() -> None:
    model = build()
    share_between_layers(model, 1, 3)
    with pytest.raises(UnsupportedModelError, match=r"layers 1 and 3 share model\.layers\.1\."):
        cut(model, 1)
    find_parts(model).layers[1].mlp.up_proj.weight.requires_grad_(False)
    cut(model, 1)
    model = build()
    share_between_layers(model, 1, 2)
    cut(model, 1)  # they are of one stage


def test_adapters_that_share_weights_are_refused_in_a_model_that_was_cut_before() -> None:
    model = build()
    cut(model, 1)
    share_between_layers(model, 1, 2)
    with pytest.raises(UnsupportedModelError, match="layers 1 and 2 share"):
        staged_model(find_parts(model), SPPOConfig(pp_size=3), 1)


def test_layers_of_stages_can_be_set() -> None:
    parts = find_parts(build())
    chosen = choose_cut(parts, SPPOConfig(pp_size=3, pp_layers=(2, 1, 1)), 1)
    assert chosen.layers == (range(0, 2), range(2, 3), range(3, 4))
    assert chosen.own == (1,)
    with pytest.raises(ConfigError, match=r"pp_layers=\[1, 1\] are 2 layers, but .* has 4.*Remedy"):
        choose_cut(parts, SPPOConfig(pp_size=2, pp_layers=(1, 1)), 0)


def test_ranks_take_stages_in_turn() -> None:
    config = SPPOConfig(pp_size=2, pp_virtual_stages=2, pp_schedule="interleaved_seq1f1b")
    parts = find_parts(build())
    for rank, own in ((0, (0, 2)), (1, (1, 3))):
        chosen = choose_cut(parts, config, rank)
        assert chosen.own == own
        assert [layer for stage in chosen.layers for layer in stage] == [0, 1, 2, 3]
        assert (chosen.has_first, chosen.has_last) == (rank == 0, rank == 1)
        assert chosen.own_layers == frozenset(own)


def test_encoders_are_with_the_first_stage() -> None:
    model = build_tiny_model("gemma3")
    layers = len(find_parts(model).layers)
    seen = []
    for stage in range(2):
        other = copy.deepcopy(model)
        cut(other, stage, layers=(range(1), range(1, layers)))
        seen.append([name for name in names(other) if "vision" in name])
    assert seen == [[name for name in names(model) if "vision" in name], []]
    assert seen[0]


def test_altup_projections_are_on_the_first_and_last_stage() -> None:
    model = build_tiny_model("gemma3n_text")
    parts = find_parts(model)
    count = len(parts.layers)
    halves = (range(2), range(2, count))
    ends = ("altup_projections", "altup_unembed_projections", "embed_tokens_per_layer")
    here = []
    for stage in range(2):
        other = copy.deepcopy(model)
        StagedModel(find_parts(other), StageCut(halves, (stage,)))
        here.append([any(f".{end}." in name for name in names(other)) for end in ends])
    assert here == [[True, False, True], [False, True, False]]


@pytest.mark.parametrize(
    ("family", "axes", "apart"),
    [("gpt_oss", 1, False), ("llama", 1, True), ("gemma4_text", 1, True), ("qwen2_vl", 4, True)],
)
def test_all_stages_answer_for_documents_as_the_whole_model_does(
    family: str, axes: int, apart: bool
) -> None:
    model = build_tiny_model(family)
    count = len(find_parts(model).layers)
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    given = positions.repeat(axes, 1, 1) if axes > 1 else positions
    for stage in (None, 0, 1):
        other = copy.deepcopy(model)
        if stage is not None:
            cut(other, stage, layers=(range(1), range(1, count)))
        parts = find_parts(other)
        assert (document_positions(parts, given) is not None) == apart, stage
        assert is_causal_with(parts, "token_type_ids", 0), stage


def test_asking_for_documents_hooks_no_layers() -> None:
    # Transformers hooks routers once, and those of a borrowed stage are not in the model here.
    model = build_tiny_model("mixtral-router-loss")
    parts = find_parts(model)
    document_positions(parts, torch.tensor([[0, 1, 0]]))
    assert not getattr(parts.base, CAPTURES, False)
    assert not any(module._forward_hooks for module in model.modules())


ROWS, TOKENS, WIDTH = 2, 5, 3


@st.composite
def layouts(draw: st.DrawFn) -> tuple[MessageLayout, int]:
    """A layout, and the first layer of a stage behind the first."""
    layers = draw(st.integers(2, 6))
    kinds = [
        _SharedKV(name, owner, readers, draw(st.integers(1, 3)), (4, draw(st.integers(1, 4))))
        for name in ("full_attention", "sliding_attention")[: draw(st.integers(0, 2))]
        for owner in [draw(st.integers(0, layers - 2))]
        for readers in [tuple(range(draw(st.integers(owner + 1, layers - 1)), layers))]
    ]
    layout = MessageLayout(
        num_layers=layers,
        hidden_size=WIDTH,
        num_streams=draw(st.integers(1, 3)),
        per_layer_size=draw(st.sampled_from([0, 2])),
        shared=tuple(kinds),
    )
    return layout, draw(st.integers(1, layers - 1))


@given(drawn=layouts(), by_name=st.booleans())
def test_unpacking_a_message_restores_its_tensors(
    drawn: tuple[MessageLayout, int], by_name: bool
) -> None:
    layout, start = drawn
    streams, size = layout.num_streams, layout.per_layer_size
    shape = (ROWS, TOKENS, WIDTH)
    hidden = torch.rand(streams, *shape) if streams > 1 else torch.rand(shape)
    own = [torch.rand(ROWS, TOKENS, size) for _ in range(start, layout.num_layers)] if size else []
    sent = [k for k in layout.shared if k.owner < start]  # the last layer reads all of them
    states: dict[Any, Any] = {
        keys.name if by_name else keys.owner: tuple(
            torch.rand(ROWS, keys.num_heads, TOKENS, width) for width in keys.sizes
        )
        for keys in sent
    }
    if not by_name and len({keys.owner for keys in sent}) < len(sent):
        return  # a layer has keys of one kind

    message = layout.pack(start, hidden, own, states)
    assert layout.is_hidden_only or message.shape == (ROWS, TOKENS, layout.width(start))
    found = layout.unpack(start, message)
    assert torch.equal(found.hidden, hidden)
    if size:
        inputs = found.arguments["per_layer_inputs"]
        assert inputs.shape == (ROWS, TOKENS, layout.num_layers, size)
        for layer, given_to in enumerate(own, start):
            assert torch.equal(inputs[:, :, layer], given_to)
    for keys in sent:
        for state, theirs in zip(
            states[keys.name if by_name else keys.owner], found.shared[keys.name], strict=True
        ):
            assert torch.equal(theirs, state)
    assert {*found.shared} == {name for keys in sent for name in (keys.name, keys.owner)}


@pytest.mark.parametrize("layers", [range(0, 2), range(2, 4), range(3, 6)])
def test_kv_of_an_earlier_stage_is_stored_once(layers: range) -> None:
    keys = _SharedKV("full_attention", 1, (2, 3, 5), 1, (4, 4))
    layout = MessageLayout(6, WIDTH, 1, 0, (keys,))
    held = layout.kv_layers(layers, {*range(6)})
    # Layer 4 has its own. Of those that read layer 1's, the first of a stage behind it.
    assert held == {0: [0, 1], 2: [2], 3: [3, 4]}[layers.start]
