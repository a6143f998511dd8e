"""The final norm keeps its input and nothing else: what it saves would be the widest of all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, revert
from sppo_hf.engine.structure import find_parts
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.testing.tiny_families import FAMILIES
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.sweeps import KINDS, sample

TOKENS, CHUNKS = 64, 4


def unhandled(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """What autograd saves of a forward outside all frames, parameters left out."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return list(found.values())


@pytest.mark.parametrize("trains", [True, False])
def test_nothing_of_float32_waits_outside_the_frames(trains: bool) -> None:
    model = build_tiny_model("llama").to(torch.bfloat16)
    norm = find_parts(model).final_norm()
    assert norm is not None
    norm.requires_grad_(trains)
    ids = torch.randint(model.config.vocab_size, (1, TOKENS))
    config = SPPOConfig(num_chunks=CHUNKS, recompute="full", offload="none")
    convert(model, config)
    shape = (1, TOKENS // CHUNKS, model.config.hidden_size)
    wide = [x for x in unhandled(model, ids) if x.dtype == torch.float32 and x.dim() == len(shape)]
    assert not wide, [(x.shape, x.dtype) for x in wide]
    revert(model)
    assert any(x.dtype == torch.float32 for x in unhandled(model, ids)), "the model itself has some"


def test_it_is_found_by_its_place() -> None:
    found = 0
    kinds = [name for name in FAMILIES if name in KINDS]
    for name in [*kinds, *sample([name for name in FAMILIES if name not in KINDS], 4)]:
        try:
            model = build_tiny_model(name)
            norm = find_parts(model).final_norm()
        except (UnsupportedModelError, ConfigError):  # families that are refused
            continue
        found += 1
        assert norm is not None, name
        assert "norm" in type(norm).__name__.lower()
        inside = {id(m) for layer in find_parts(model).layers for m in layer.modules()}
        assert id(norm) not in inside
    assert found > 10
