"""The auxiliary loss of routers, which is no sum over tokens: equal to the unmodified model's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sppo_hf import SPPOConfig, UnsupportedModelError
from sppo_hf.engine import family_guard as guard
from sppo_hf.engine.convert import convert
from sppo_hf.engine.loss import RouterLoss
from sppo_hf.engine.structure import find_parts
from sppo_hf.pipeline.pipeline_engine import refuse_call
from sppo_hf.testing.exactness import compare, float64_everywhere
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch

TOKENS = 23


def _settings(**others: Any) -> SPPOConfig:
    return SPPOConfig(chunk_lengths=(9, 1, 13), min_offload_size=1, show_plan=False, **others)


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "full", "offload": "full"},
        {"recompute": "none", "offload": "full"},
        {"recompute": "full", "offload": "none", "micro_batch_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
def test_modes_and_groups_of_rows(padded: bool, settings: dict[str, Any]) -> None:
    batch = make_batch(rows=3, tokens=TOKENS, padding=(0, 9, 22) if padded else ())
    report = compare(build_tiny_model("mixtral-router-loss"), batch, _settings(**settings))
    assert report.exact, str(report)


@pytest.mark.parametrize("family", ["mixtral-router-loss", "gpt_oss-router-loss"])
def test_tokens_behind_the_last_label_count(family: str) -> None:
    batch = make_batch(rows=2, tokens=TOKENS)
    batch["labels"][:, 5:] = -100
    report = compare(build_tiny_model(family), batch, _settings())
    assert report.exact, str(report)


def test_lora_and_accumulation() -> None:
    batch = make_batch(rows=3, tokens=TOKENS, padding=(4, 0, 11))
    model = add_lora(build_tiny_model("qwen3_moe-router-loss"))
    report = compare(model, batch, _settings(), accumulation=2)
    assert report.exact, str(report)


def test_it_is_returned_as_the_model_returns_it() -> None:
    model = build_tiny_model("mixtral-router-loss")
    batch = make_batch(rows=2, tokens=TOKENS, padding=(0, 5))
    with float64_everywhere():
        expected = model(**batch)
        output = convert(model, _settings())(**batch)
    assert type(output) is type(expected)
    torch.testing.assert_close(output.aux_loss, expected.aux_loss)
    torch.testing.assert_close(output.loss, expected.loss)
    without = model.config.router_aux_loss_coef * expected.aux_loss
    assert without > 0.01 * expected.loss, "it is seen at all"


def test_a_family_that_nobody_proved_is_tried_when_it_is_switched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "_verdicts", {})
    model = convert(build_tiny_model("flex_olmo", dtype=torch.float32), _settings())
    assert not guard._verdicts
    model.config.output_router_logits = True
    model(**make_batch(tokens=TOKENS)).loss.backward()
    assert list(guard._verdicts.values()) == [None]


def test_it_is_also_tried_for_a_proved_family_that_was_not_proved_with_it() -> None:
    """Of which Transformers 5.17 ignores the setting and newer ones do not."""
    model = build_tiny_model("qwen3_vl_moe", dtype=torch.float32)
    model.config.text_config.output_router_logits = True
    assert not guard.is_proved(find_parts(model))


def test_what_cannot_be_exact_is_refused() -> None:
    model = build_tiny_model("mixtral-router-loss", dtype=torch.float32)
    call = _call(model)
    call.head_arguments["fused_lm_head"] = True
    with pytest.raises(UnsupportedModelError, match="output_router_logits = False"):
        refuse_call(find_parts(model), SPPOConfig(pp_size=2), call)
    converted = convert(model, _settings())
    with pytest.raises(UnsupportedModelError, match="output_router_logits = False"):
        converted(input_ids=make_batch(tokens=TOKENS)["input_ids"])
    model.config.output_router_logits = False  # the remedy
    converted(input_ids=make_batch(tokens=TOKENS)["input_ids"])


def test_a_pipeline_adds_up_what_its_stages_found() -> None:
    torch.manual_seed(0)
    logits = [torch.randn(6, 4, requires_grad=True) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    whole, first, second = (
        RouterLoss(4, 2, 0.1, backward_by_chunk=chunked) for chunked in (False, True, True)
    )
    whole.add(tuple(logits), mask, (0, 2), (0, 3))
    value = whole.value()
    assert value is not None
    expected = torch.autograd.grad(0.1 * value, logits)
    # Of two stages, one has two routers and one has one; a third has none.
    sums = [first.add((logits[0],), mask, (0, 2), (0, 3))]
    sums.append(second.add(tuple(logits[1:]), mask, (0, 2), (0, 3)))
    third = RouterLoss(4, 2, 0.1, backward_by_chunk=True)
    seen: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    for one in (first, second, third):
        one.sum_over_ranks(note, torch.device("cpu"))
    for one in (first, second, third):
        one.sum_over_ranks(lambda _: torch.stack(seen).sum(0), torch.device("cpu"))
        torch.testing.assert_close(one.value(), value)
    grads = torch.autograd.grad(sums, logits, [third.gradient()] * 2)
    torch.testing.assert_close(grads, expected)


def _call(model: Any) -> Any:
    from sppo_hf.engine.forward_calls import read_call

    return read_call(find_parts(model), model.forward, (), dict(make_batch(tokens=TOKENS)))
