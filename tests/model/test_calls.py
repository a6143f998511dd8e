"""What a call divides its loss by, without waiting for the device."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf.model.calls import ForwardCall, read_call
from sppo_hf.model.structure import find_parts
from sppo_hf.model.tiny import build_tiny_model

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
def test_a_number_is_filled_in_on_the_device(number: float) -> None:
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
