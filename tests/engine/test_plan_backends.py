"""Backends are chosen while a plan is made, for every kind of layer, not inside the first layer."""

import torch

from sppo_hf import SPPOConfig
from sppo_hf.attention.backends.cpu_flash import CPUFlash
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.backends.select import Selection
from sppo_hf.engine import plan_cache as plans
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.attention.backends.cases import deterministic


def _choose_by_window(monkeypatch):
    asked = []

    def select(name, requirement):
        asked.append(requirement)
        if requirement.window:
            return Selection(Reference(), "reference: for windows")
        return Selection(CPUFlash(), f"cpu_flash: {requirement}")

    monkeypatch.setattr(plans, "select_backend", select)
    return asked


def test_every_kind_of_layer_is_asked_for_before_the_first_runs(monkeypatch):
    asked = _choose_by_window(monkeypatch)
    model = build_tiny_model("gemma3_text", dtype=torch.float32).train()
    convert(model, SPPOConfig(num_chunks=3, show_plan=False))
    plan = get_engine(model).plan(1, 24, torch.device("cpu"))
    before = len(asked)
    assert {requirement.window for requirement in asked} == {False, True}
    # In the order of the layers; the first of this model's has a window.
    assert plan.backend_name == "reference, cpu_flash"
    assert plan.backend_reason.startswith("reference: for windows\ncpu_flash: CPU, float32")
    ids = torch.randint(0, 97, (1, 24))
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(asked) == before, "the layers asked for what was chosen already"


def test_layers_of_one_kind_have_one_reason(monkeypatch):
    asked = _choose_by_window(monkeypatch)
    model = build_tiny_model("llama", dtype=torch.float32).train()
    convert(model, SPPOConfig(num_chunks=3, show_plan=False))
    plan = get_engine(model).plan(1, 24, torch.device("cpu"))
    assert len(asked) == 1
    assert plan.backend_name == "cpu_flash"
    assert plan.backend_reason == f"cpu_flash: {asked[0]}"


def test_layers_ask_again_once_determinism_is_asked_for(monkeypatch):
    asked = _choose_by_window(monkeypatch)
    model = build_tiny_model("llama", dtype=torch.float32).train()
    convert(model, SPPOConfig(num_chunks=3, show_plan=False))
    ids = torch.randint(0, 97, (1, 24))
    model(input_ids=ids, labels=ids)
    assert len(asked) == 1
    with deterministic("error"):
        model(input_ids=ids, labels=ids)
    assert len(asked) == 2


def test_rows_of_many_lengths_ask_for_what_builds_nothing_per_shape(monkeypatch):
    asked = _choose_by_window(monkeypatch)
    model = build_tiny_model("llama", dtype=torch.float32).train()
    convert(model, SPPOConfig(num_chunks=2, show_plan=False))
    for tokens in (8, 9, 10, 8, 9, 10):
        ids = torch.randint(0, 97, (1, tokens))
        model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():  # evaluation sets may have any lengths
        for tokens in (11, 12, 13):
            model(input_ids=ids[:, :1].expand(1, tokens), labels=ids[:, :1].expand(1, tokens))
    assert [requirement.varied for requirement in asked] == [False]
    ids = torch.randint(0, 97, (1, 14))
    model(input_ids=ids, labels=ids).loss.backward()
    assert [requirement.varied for requirement in asked] == [False, True]
