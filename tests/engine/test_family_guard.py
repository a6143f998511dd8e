"""Unproved families are tried before the first step; the list of proved ones is complete."""

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaMLP

from sppo_hf import ConfigError, SPPOConfig, UnsupportedModelError
from sppo_hf.engine import family_guard as guard
from sppo_hf.engine.convert import convert, is_converted
from sppo_hf.planning.config_file import bypasses_attention_interface
from sppo_hf.testing.tiny_families import FAMILIES, MULTIMODAL
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch, tiny_config
from tests.engine.forced_plans import trace_short_scans
from tests.engine.test_exactness import MIXERS, REFUSED, STATES

QUIET = SPPOConfig(num_chunks=2, show_plan=False)


@pytest.fixture(autouse=True)
def unknown_llama(monkeypatch):
    """Make llama an unproved family that was not tried yet."""
    monkeypatch.setattr(guard, "PROVED", guard.PROVED - {"llama"})
    monkeypatch.setattr(guard, "_verdicts", {})


def test_every_proved_family_is_in_the_harness_and_not_refused_there():
    # Those with states are tried whenever they come: many settings change what goes along.
    others = {*REFUSED, *MIXERS, *STATES}
    here = CONFIG_MAPPING_NAMES.keys()  # older releases of Transformers have fewer
    proved = [n for n, f in FAMILIES.items() if n not in others and f.model_type in here]
    tested = {FAMILIES[name].model_type for name in proved}
    # A multimodal model may hold text decoders of many families; each is trusted by its own name.
    tested |= {tiny_config(n).get_text_config().model_type for n in proved if n in MULTIMODAL}
    # GPT-J and CodeGen: refused before Transformers 5.24.
    proved_here = {n for n in guard.PROVED & here if not bypasses_attention_interface(n)}
    # Llama 4 as a whole does not run under Transformers 5.24, with which the list was made.
    remedy = "python recipes/tools/family_table.py --write FAMILY"
    assert proved_here | {"llama", "llama4"} == tested | {"llama4"}, remedy


def test_an_unknown_family_is_checked_once(monkeypatch):
    model = convert(build_tiny_model("llama"), QUIET)
    assert is_converted(model)
    assert list(guard._verdicts.values()) == [""]
    monkeypatch.setattr(guard, "_try_tiny_model", lambda *_: pytest.fail("tried twice"))
    convert(build_tiny_model("llama"), QUIET)


def test_an_unknown_family_is_tried_on_the_cpu_and_no_device_is_seeded(monkeypatch, recwarn):
    model = build_tiny_model("llama")
    # PyTorch calls it though there is no GPU; its generators would be none of what is restored.
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("seeds a user's GPU"))
    monkeypatch.setattr("sppo_hf.testing.tiny_models._counted", set())
    before = torch.get_rng_state()
    with torch.device("meta"):  # as `torch.set_default_device("cuda")` would have it elsewhere
        convert(model, QUIET)
    assert list(guard._verdicts.values()) == [""]
    assert not recwarn.list
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unknown_family_that_is_not_exact_is_refused(monkeypatch):
    original = LlamaMLP.forward
    # What a token gets depends on the tokens beside it, as in a convolution over the sequence.
    monkeypatch.setattr(
        LlamaMLP, "forward", lambda self, x: original(self, x + x.mean(1, keepdim=True))
    )
    model = build_tiny_model("llama")
    with pytest.raises(
        UnsupportedModelError, match=r"tiny random llama model was not exact.*error"
    ):
        convert(model, QUIET)
    assert not is_converted(model)
    assert "forward" not in model.__dict__


def test_left_padding_of_an_unknown_family_is_tried_once_for_several_rows_and_for_one(monkeypatch):
    """As a trainer that generates does: first without gradients, in 16 bits, anywhere in a run."""
    model = convert(build_tiny_model("llama", dtype=torch.float32), QUIET)
    batch = make_batch(rows=3, tokens=23, left_padding=(5, 0, 9))
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        model(**batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert [key.partition(" rows")[0] for _, key in guard._verdicts][1:] == ["2"]
    model(**{name: x[:1] for name, x in batch.items()})
    assert [key.partition(" rows")[0] for _, key in guard._verdicts][1:] == ["2", "1"]
    assert set(guard._verdicts.values()) == {""}
    monkeypatch.setattr(guard, "_try_tiny_model", lambda *_, **__: pytest.fail("tried twice"))
    model(**batch).loss.backward()


def test_left_padding_that_is_not_exact_is_refused_in_words(monkeypatch):
    if "zaya" not in CONFIG_MAPPING:
        pytest.skip("this Transformers has no Zaya")
    model = convert(build_tiny_model("zaya"), QUIET)
    batch = make_batch(rows=2, tokens=23, left_padding=(0, 5))
    said = r"left padding in row 1: packed documents .* a mixer returns .*padding_side = 'right'"
    with pytest.raises(ConfigError, match=said):
        model(**batch)
    monkeypatch.setattr(guard, "_try_tiny_model", lambda *_, **__: pytest.fail("tried twice"))
    with pytest.raises(ConfigError, match=said):
        model(**batch)


class _MixingMLP(LlamaMLP):
    """Gives a token what depends on the tokens beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x.mean(1, keepdim=True))


class _OwnLlama(LlamaForCausalLM):
    """A user's subclass that runs Transformers' code."""


class _MixingLlama(LlamaForCausalLM):
    """A user's subclass that cannot run chunk by chunk."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = _MixingMLP(config)


class _UnbuildableLlama(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig, needed: int) -> None:
        super().__init__(config)


def test_a_users_subclass_of_a_proved_family_is_tried(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(guard, "_verdicts", {})
    config = tiny_config("llama")
    assert is_converted(convert(_OwnLlama(config), QUIET))
    assert list(guard._verdicts.values()) == [""]
    mixing = _MixingLlama(config)
    with pytest.raises(UnsupportedModelError, match=r"_MixingLlama .*was not exact when it was tr"):
        convert(mixing, QUIET)
    assert not is_converted(mixing)
    same_name = type("_OwnLlama", (_MixingLlama,), {"__module__": __name__})
    with pytest.raises(UnsupportedModelError, match=r"_OwnLlama .*was not exact"):
        convert(same_name(config), QUIET)
    with pytest.warns(UserWarning, match=r"_UnbuildableLlama, model type 'llama', is not among"):
        convert(_UnbuildableLlama(config, 1), QUIET)


def test_a_family_that_ignores_its_states_is_refused(monkeypatch):
    """It is found by trying it; the table of reasons only says so earlier."""
    monkeypatch.setattr("sppo_hf.engine.model_parts.STATE_REASONS", {})
    # Its scan is a loop over the tokens, which takes a minute to trace at the usual lengths.
    trace_short_scans(monkeypatch, (16, 32))
    with pytest.raises(UnsupportedModelError, match=r"was not exact when it was tried"):
        convert(build_tiny_model("jamba"), SPPOConfig(chunk_lengths=(8, 15), show_plan=False))


def test_a_refusal_of_the_tiny_model_is_said_once():
    """It is a whole sentence about the same class, with a remedy of its own."""
    with pytest.raises(UnsupportedModelError) as refused:
        convert(build_tiny_model("paligemma"), QUIET)
    said = str(refused.value)
    assert "GemmaAttention is not causal by itself" in said
    assert said.count("chunk by chunk") == said.count("Train it without sppo_hf") == 1


def test_a_family_without_a_tiny_model_gives_a_warning(monkeypatch):
    monkeypatch.setattr(guard, "_state", guard.threading.local())
    monkeypatch.setattr("sppo_hf.testing.check.model_from_config", _cannot)
    with pytest.warns(UserWarning, match="not among the families that were proved exact"):
        model = convert(build_tiny_model("llama", dtype=torch.float32), QUIET)
    with pytest.raises(ConfigError, match=r"left padding in row 0: no tiny llama .*too exotic"):
        model(**make_batch(rows=1, tokens=23, left_padding=(5,)))


def _cannot(*_, **__):
    raise ConfigError("too exotic")
