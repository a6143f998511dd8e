"""Which device's random numbers a checkpoint has; the rest is in `test_checkpoint`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sppo_hf.pipeline.checkpoint_state import random_state


def test_random_numbers_are_those_of_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", asked.append)

    def on(*devices: str) -> Any:
        parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
        return SimpleNamespace(parameters=lambda: iter(parameters))

    for devices in (("cuda:1", "cuda:1", "cpu"), ("cpu",), ("cuda:0", "cuda:1")):
        random_state(on(*devices))
    # The current one where the model has none, or several.
    assert asked == [torch.device("cuda", 1), torch.device("cuda"), torch.device("cuda")]
