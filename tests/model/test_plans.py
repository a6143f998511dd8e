"""Plans are made once per batch shape, and anew when gradients turn out to accumulate."""

from sppo_hf.config import SPPOConfig
from sppo_hf.model.convert import convert
from sppo_hf.model.observer import StepObserver
from sppo_hf.model.tiny import add_lora, build_tiny_model, make_batch


class _Plans(StepObserver):
    def __init__(self):
        self.seen = []

    def on_plan(self, plan, model_name):
        self.seen.append(plan)


def _step(model, *, tokens=20, rows=1):
    model(**make_batch(tokens=tokens, rows=rows)).loss.backward()


def _converted(model):
    plans = _Plans()
    settings = SPPOConfig(num_chunks=3, show_plan=False)
    return convert(model.train(), settings, observer=plans), plans.seen


def test_one_plan_per_shape():
    model, seen = _converted(build_tiny_model("llama"))
    for tokens in (20, 24, 20, 24):
        _step(model, tokens=tokens)
        model.zero_grad(set_to_none=True)
    assert [plan.total_tokens for plan in seen] == [20, 24]
    assert not any(plan.accumulates for plan in seen)


def test_gradients_that_are_there_are_planned_for():
    model, seen = _converted(build_tiny_model("llama"))
    for _ in range(3):
        _step(model)
    assert [plan.accumulates for plan in seen] == [False, True], "once, however often"
    once, twice = (plan.estimate.moments[-1].device.gradients for plan in seen)
    assert twice == 2 * once > 0
    model.zero_grad(set_to_none=True)
    _step(model)
    assert len(seen) == 2, "the first batch of a later step fits what was planned"


def test_few_gradients_change_no_plan():
    model, seen = _converted(add_lora(build_tiny_model("llama", vocab_size=50_000)))
    for _ in range(2):
        _step(model)
    (plan,) = seen
    assert plan.estimate.moments[-1].device.gradients < 0.01 * plan.estimate.device.total
