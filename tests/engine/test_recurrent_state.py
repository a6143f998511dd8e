"""States of recurrent and convolutional layers, from chunk to chunk and within packed rows.

That families are exact is in `test_exactness.py` (one device) and `tests/pipeline` (pipelines).
Here are the states themselves, packed documents, lengths drawn at random, and what is refused.
"""

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from sppo_hf.attention.segments import RowSpans
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.engine.model_parts import mixers_of
from sppo_hf.engine.recurrent_state import LayerStates, documents_in_chunk
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.planning.activation_modes import ActivationMode, Saved
from sppo_hf.testing.exactness import (
    Gradients,
    compare,
    float64_everywhere,
    parameter_errors,
    run_batch,
)
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.engine.forced_plans import force_modes, trace_short_scans
from tests.sweeps import examples, turn

MIXERS = ["qwen3_next", "bamba", "lfm2"]
TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def _short_traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor is a family checked when it is converted: what that finds is found here."""
    trace_short_scans(monkeypatch)
    with family_check_disabled():
        yield


def settings_of(*lengths: int, **others: Any) -> SPPOConfig:
    return SPPOConfig(chunk_lengths=lengths, **others)


def in_turn(families: list[str]) -> Any:
    """Each family with one of two settings of `recompute`, or with both."""
    cases = [
        (family, recompute)
        for index, family in enumerate(families)
        for recompute in turn(["full", "none"], 2, index)
    ]
    return pytest.mark.parametrize(("family", "recompute"), cases)


@pytest.mark.parametrize("lengths", [(5, 2, 3), (1, 6), (2, 2, 2)])
@pytest.mark.parametrize("kernel", [2, 4])
def test_convolutions_are_kept_as_transformers_keeps_them(
    lengths: tuple[int, ...], kernel: int
) -> None:
    config = build_tiny_model("lfm2").config
    theirs, before = DynamicCache(config=config), {}
    for length in lengths:
        x_BEC = torch.randn(2, 3, length)
        states = LayerStates(before)
        seen = states.write_conv(("conv", 0, 0), x_BEC, kernel)
        before = states.after
        with torch.no_grad():
            expected = theirs.update_conv_state(x_BEC, 0, conv_kernel_size=kernel)
        assert torch.equal(seen, expected)
        assert torch.equal(before["conv", 0, 0], theirs.layers[0].conv_states[0])
        assert before["conv", 0, 0].untyped_storage().nbytes() == before["conv", 0, 0].nbytes


def test_a_state_is_read_as_a_copy_with_its_graph() -> None:
    state = torch.ones(2, 3, requires_grad=True)
    states = LayerStates({("recurrent", 4, 0): state * 2})
    read = states.read(("recurrent", 4, 0))
    assert read is not None
    read.add_(1)  # as a kernel might
    assert states.before["recurrent", 4, 0].eq(2).all()
    read.sum().backward()
    assert state.grad is not None
    assert state.grad.eq(2).all()


def test_documents_of_a_chunk_are_counted_from_its_start() -> None:
    rows = (RowSpans(((0, 4), (4, 5), (5, 12)), 12), RowSpans(((0, 12),), 12))
    assert documents_in_chunk(rows, 3, 9) == (
        ((0, 1, True), (1, 2, False), (2, 6, False)),
        ((0, 6, True),),
    )
    assert documents_in_chunk(rows[1:], 3, 9) is None
    assert documents_in_chunk(None, 0, 9) is None


def test_layers_know_their_mixers_and_whether_they_attend() -> None:
    model = build_tiny_model("nemotron_h")
    engine = get_engine(convert(model, settings_of(3, 20)))
    assert engine is not None
    kinds = model.config.layers_block_type
    parts = engine.parts
    assert parts.attending_layers() == {i for i, k in enumerate(kinds) if k == "full_attention"}
    seen = [bool(mixers_of(layer)) for layer in parts.layers]
    assert seen == [kind == "linear_attention" for kind in kinds]


# Modes "whole" and "inputs" of MIXERS are compared in test_exactness.py.
@pytest.mark.parametrize(
    ("family", "saved", "offload"),
    [
        *(
            (family, "matmuls", offload)
            for index, family in enumerate(MIXERS)
            for offload in turn([False, True], 2, index)
        ),
        *(
            (family, saved, offload)
            for index, family in enumerate(("kimi_linear", "falcon_h1"))
            for saved, offload in turn(
                [("whole", True), ("matmuls", True), ("inputs", False)], 3, index
            )
        ),
    ],
)
def test_every_mode_is_exact(
    monkeypatch: pytest.MonkeyPatch, family: str, saved: Saved, offload: bool
) -> None:
    mode = ActivationMode(saved, "host" if offload else "device")
    force_modes(monkeypatch, lambda chunk, layer: mode)
    report = compare(
        build_tiny_model(family),
        make_batch(rows=2, tokens=23, padding=(0, 7)),
        settings_of(5, 2, 9, 7, offload="full", min_offload_size=1),
    )
    assert report.exact, str(report)


@in_turn(["qwen3_next", "mamba2"])
def test_keys_may_wait_elsewhere_in_layers_that_have_some(family: str, recompute: Any) -> None:
    report = compare(
        build_tiny_model(family),
        make_batch(rows=2, tokens=23),
        settings_of(5, 2, 9, 7, recompute=recompute, offload_kv="full", min_offload_size=1),
    )
    assert report.exact, str(report)


@in_turn([*MIXERS, "mamba2", "kimi_linear"])
def test_gradients_of_states_are_those_of_a_whole_run(family: str, recompute: Any) -> None:
    """Labels in the last chunk alone: what reaches the first embeddings went through the states.

    Of a model without attention, through nothing else.
    """
    batch = make_batch(tokens=23)
    batch["labels"][:, :17] = -100
    grads: list[torch.Tensor] = []
    for chunked in (False, True):
        model = build_tiny_model(family)
        x = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        if chunked:
            convert(model, settings_of(4, 9, 3, 7, recompute=recompute))
        with float64_everywhere():
            model(inputs_embeds=x, labels=batch["labels"]).loss.backward()
        assert x.grad is not None
        grads.append(x.grad)
    theirs, ours = grads
    assert theirs[:, :4].abs().max() > 1e-6 * theirs.abs().max(), "nothing reaches the first chunk"
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    first = theirs[:, :4]
    assert (ours[:, :4] - first).abs().max() <= TOLERANCE * first.abs().max()


def packed(*lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Rows of documents of these lengths, as positions that begin anew."""
    batch = make_batch(rows=len(lengths), tokens=sum(lengths[0]))
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    # What the last token of a document predicts is of the next one, so it has no label.
    labels = batch["labels"].clone()
    for row, documents in enumerate(lengths):
        labels[row, list(itertools.accumulate(documents))[:-1]] = -100
    return {**batch, "labels": labels, "position_ids": torch.stack(positions)}


def run_documents_alone(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Gradients:
    """The unmodified model on one document at a time, as if each were the only one."""
    items = (batch["labels"][:, 1:] != -100).sum()
    loss = 0.0
    with float64_everywhere():
        for row, positions in enumerate(batch["position_ids"]):
            starts = [*positions.eq(0).nonzero()[:, 0].tolist(), len(positions)]
            for start, end in itertools.pairwise(starts):
                ids, labels = (
                    batch[name][row : row + 1, start:end] for name in ("input_ids", "labels")
                )
                output = model(input_ids=ids, labels=labels, num_items_in_batch=items)
                if output.loss.isfinite():
                    output.loss.backward()
                    loss += output.loss.item()
    return Gradients(loss, {name: p.grad for name, p in model.named_parameters()})


ATTENDING = {"qwen3_next": 1, "bamba": 1, "lfm2": 1, "falcon_h1": 3, "zamba2": 1, "kimi_linear": 1}
"""Decoder layers with attention."""


@in_turn(list(ATTENDING))
def test_no_state_leaks_from_one_packed_document_into_the_next(family: str, recompute: Any) -> None:
    """Documents begin inside chunks and at their starts, are cut by two of them, have one token.

    In row 0 the second chunk begins with the last token of a document.
    """
    batch = packed((9, 1, 6, 7), (8, 2, 13))
    theirs = run_documents_alone(build_tiny_model(family), batch)
    converted = convert(build_tiny_model(family), settings_of(8, 2, 8, 5, recompute=recompute))
    ours = run_batch(converted, batch)
    worst = parameter_errors(ours, theirs)[0]
    assert worst.error <= TOLERANCE, worst
    assert abs(ours.loss - theirs.loss) <= TOLERANCE * theirs.loss
    engine = get_engine(converted)
    assert engine is not None
    assert engine.counters["attention_forwards"] == 4 * ATTENDING[family]
    # The unmodified torch code does let states leak: this is no comparison with it.
    model = build_tiny_model(family)
    with float64_everywhere():
        leaked = model(**batch).loss.item()
    assert abs(leaked - theirs.loss) > 1e-6


def test_packed_rows_are_refused_where_a_mixer_returns_queries_and_keys() -> None:
    if "zaya" not in CONFIG_MAPPING_NAMES:
        pytest.skip("not in this release of Transformers")
    model = convert(build_tiny_model("zaya"), settings_of(4, 5))
    with pytest.raises(UnsupportedModelError, match=r"cannot be kept apart.*a mixer returns tuple"):
        run_batch(model, packed((3, 6)))


def test_mixers_are_as_they_were_after_packed_rows() -> None:
    model = convert(build_tiny_model("lfm2"), settings_of(4, 5))
    run_batch(model, packed((3, 6)))
    assert all("forward" not in vars(mixer) for mixer in mixers_of(model))


@in_turn(["qwen3_next", "bamba"])
def test_labels_on_padding_meet_the_unmodified_models_zeros(family: str, recompute: Any) -> None:
    batch = make_batch(rows=3, tokens=23, padding=(0, 9, 3))
    batch["labels"] = batch["input_ids"].clone()
    report = compare(build_tiny_model(family), batch, settings_of(5, 2, 9, 7, recompute=recompute))
    assert report.exact, str(report)


@pytest.mark.parametrize("family", MIXERS)
def test_states_are_gone_after_a_step(family: str) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    write = LayerStates.write_conv

    def watched(self: LayerStates, key: Any, x: torch.Tensor, kernel: int | None) -> torch.Tensor:
        result = write(self, key, x, kernel)
        seen.append(weakref.ref(self.after[key]))
        return result

    model = convert(build_tiny_model(family), settings_of(5, 9, 9, recompute="full"))
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LayerStates, "write_conv", watched)
            run_batch(model, make_batch(tokens=23))
        assert seen
        assert not any(ref() is not None for ref in seen)
    finally:
        gc.enable()


def test_chunks_of_one_token_are_lengthened() -> None:
    model = convert(build_tiny_model("lfm2"), SPPOConfig(chunk_tokens=11))
    run_batch(model, make_batch(tokens=23))
    engine = get_engine(model)
    assert engine is not None
    plan = engine.plan(1, 23, torch.device("cpu"))
    assert plan.bounds == ((0, 11), (11, 21), (21, 23))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"chunk_lengths": (8, 1, 14)}, "chunk 1 has one token.*2 tokens or more"),
        ({"chunk_tokens": 1}, "at least 2 tokens.*larger chunk_tokens"),
        ({"num_chunks": 23}, "at least 2 tokens.*fewer chunks"),
    ],
)
def test_chunks_of_one_token_that_cannot_be_lengthened_are_refused(
    wanted: dict[str, Any], said: str
) -> None:
    model = convert(build_tiny_model("bamba"), SPPOConfig(**wanted))
    with pytest.raises(ConfigError, match=said):
        run_batch(model, make_batch(tokens=23))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]], str, str]:
    """Chunk lengths of at least two tokens but the first, padding of each row, modes."""
    first = draw(st.integers(1, 9))
    lengths = (first, *draw(st.lists(st.integers(2, 11), max_size=4)))
    rows = draw(st.integers(1, 3))
    padding = tuple(draw(st.integers(0, sum(lengths) - 1)) for _ in range(rows))
    most = [sum(lengths) - 1 - length for length in padding]
    left = tuple(draw(st.integers(0, length)) for length in most) if draw(st.booleans()) else ()
    modes = tuple(draw(st.sampled_from(["none", "full"])) for _ in range(2))
    return lengths, {"padding": padding, "left_padding": left}, *modes


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXERS)
@given(case=cases())
@examples(2, whole=12)
def test_any_lengths_rows_and_padding(family: str, case: Any) -> None:
    lengths, padding, recompute, offload = case
    report = compare(
        build_tiny_model(family),
        make_batch(rows=len(padding["padding"]), tokens=sum(lengths), **padding),
        settings_of(*lengths, recompute=recompute, offload=offload, min_offload_size=1),
    )
    assert report.exact, f"{report} {case}"


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXERS)
@given(data=st.data())
@examples(2, whole=8)
def test_any_packed_documents(family: str, data: st.DataObject) -> None:
    row = data.draw(
        st.lists(st.integers(1, 9), min_size=2, max_size=5).filter(lambda x: sum(x) > 3)
    )
    tokens = sum(row)
    ends = data.draw(st.lists(st.integers(2, tokens - 2), max_size=3, unique=True).map(sorted))
    edges = [0, *ends, tokens]
    lengths = [end - start for start, end in itertools.pairwise(edges)]
    if 1 in lengths[1:]:
        return
    batch = packed(tuple(row))
    theirs = run_documents_alone(build_tiny_model(family), batch)
    ours = run_batch(convert(build_tiny_model(family), settings_of(*lengths)), batch)
    if theirs.loss:
        assert parameter_errors(ours, theirs)[0].error <= TOLERANCE, (row, lengths)
