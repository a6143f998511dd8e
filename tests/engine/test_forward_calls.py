"""Divisors of the loss, which the host does not wait for, and refused arguments of a call."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf import ConfigError, SPPOConfig
from sppo_hf.engine.convert import convert
from sppo_hf.engine.forward_calls import ForwardCall, read_call
from sppo_hf.engine.structure import find_parts
from sppo_hf.testing.tiny_models import build_tiny_model

META = torch.device("meta")


class _Operations(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _call(number: Any) -> ForwardCall:
    model = build_tiny_model("llama")
    ids = torch.arange(8)[None]
    given = {"input_ids": ids, "labels": ids, "num_items_in_batch": number}
    return read_call(find_parts(model), model.forward, (), given)


@pytest.mark.parametrize("number", [7, 7.5])
def test_the_loss_divisor_is_created_on_the_device(number: float) -> None:
    """A copy of it would make the host wait until all of forward has run."""
    call, count = _call(number), torch.zeros((), dtype=torch.int64, device=META)
    with _Operations() as operations:
        divisor = call.divisor(count)
    assert operations.names == ["aten::full"]
    assert divisor.device == META
    assert divisor.dtype == torch.as_tensor(number).dtype
    here = call.divisor(torch.zeros((), dtype=torch.int64))
    assert here.item() == number
    assert here.shape == ()


def test_a_tensor_keeps_its_dtype_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    to = torch.Tensor.to

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given.append(kwargs)
        return to(self, *args, **kwargs)

    number, count = torch.tensor(7, dtype=torch.int32), torch.zeros((), device=META)
    call, behind = _call(number), _call(number.to(META))
    monkeypatch.setattr(torch.Tensor, "to", noted)
    divisor = call.divisor(count)
    assert (divisor.device, divisor.dtype, divisor.shape) == (META, torch.int32, ())
    behind.divisor(count)
    # From another device the bytes are there only when the copy is over.
    assert given == [{"non_blocking": True}, {"non_blocking": False}]


def test_without_a_number_labels_are_counted() -> None:
    count = torch.tensor(5)
    assert _call(None).divisor(count) is count


IDS = torch.arange(16).view(2, 8)
ENDS = torch.tensor([0, 3, 8])


def _given(**changes: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "labels": IDS, **changes}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (_given(input_ids=IDS.tolist()), r"input_ids is of type list.*torch\.tensor"),
        (_given(input_ids=IDS.numpy()), "input_ids is of type ndarray"),
        (_given(input_ids=IDS[0]), r"input_ids has shape \(8,\).*x\[None\]"),
        (_given(labels=IDS.tolist()), "labels is of type list"),
        (_given(attention_mask=[[1] * 8] * 2), "attention_mask is of type list"),
        (_given(position_ids=torch.arange(8).expand(3, -1)), r"\(3, 8\); allowed is .*\(2, 8\)"),
        (_given(position_ids=torch.arange(8)), r"position_ids has shape \(8,\)"),
        (_given(position_ids=IDS.bool()), "position_ids has dtype torch.bool"),
        (_given(cu_seq_lens_q=ENDS[:0]), r"cu_seq_lens_q has shape \(0,\)"),
        (_given(cu_seq_lens_q=ENDS.float()), "cu_seq_lens_q has .*dtype torch.float32"),
        (_given(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS[None]), r"cu_seq_lens_k has shape \(1, 3\)"),
        (_given(cu_seq_lens_q=[0, 8]), "cu_seq_lens_q is of type list"),
        (_given(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS + 0 * ENDS + (ENDS == 3)), "the same off"),
        (_given(cu_seq_lens_k=ENDS), "cu_seq_lens_k is not cu_seq_lens_q"),
    ],
)
def test_inputs_of_other_types_and_shapes_are_refused(given: dict[str, Any], words: str) -> None:
    model = convert(build_tiny_model("llama"), SPPOConfig(num_chunks=2, show_plan=False)).train()
    with pytest.raises(ConfigError, match=words):
        model(**given)
    model(**_given()).loss.backward()
