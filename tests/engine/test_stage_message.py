"""What one stage packs, the next one unpacks: the same numbers in the same places."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.engine.stages import MessageLayout, _SharedKeys

ROWS, TOKENS, WIDTH = 2, 5, 3


@st.composite
def layouts(draw: st.DrawFn) -> tuple[MessageLayout, int]:
    """A layout, and the first layer of a stage behind the first."""
    layers = draw(st.integers(2, 6))
    kinds = [
        _SharedKeys(name, owner, readers, draw(st.integers(1, 3)), (4, draw(st.integers(1, 4))))
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
def test_what_was_packed_is_unpacked(drawn: tuple[MessageLayout, int], by_name: bool) -> None:
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
    assert layout.is_hidden_alone or message.shape == (ROWS, TOKENS, layout.width(start))
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
def test_keys_of_an_earlier_stage_are_held_once(layers: range) -> None:
    keys = _SharedKeys("full_attention", 1, (2, 3, 5), 1, (4, 4))
    layout = MessageLayout(6, WIDTH, 1, 0, (keys,))
    held = layout.key_holders(layers, {*range(6)})
    # Layer 4 has its own. Of those that read layer 1's, the first of a stage behind it.
    assert held == {0: [0, 1], 2: [2], 3: [3, 4]}[layers.start]
