"""Classifiers: what a call may look like, and what is planned for heads over whole rows.

Their gradients are compared in test_exactness.py, on several ranks in pipeline/.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.device_facts import model_profile
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.stages import StageCut, StagedModel
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_models import (
    batch_for,
    build_tiny_classifier,
    build_tiny_model,
    make_batch,
    model_from_config,
)

CHUNKS = SPPOConfig(num_chunks=3, show_plan=False)
ROWS, TOKENS = 2, 23


@pytest.fixture
def unchecked():
    """Convert any family: what the check at conversion would find is found by the test."""
    with family_check_disabled():
        yield


def _convert(kind, **settings):
    model = build_tiny_classifier("llama", kind, dtype=torch.float32)
    return convert(model, SPPOConfig(num_chunks=3, show_plan=False, **settings))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "overrides",
    [
        {"num_labels": 1},  # a regression, and reward models
        {"problem_type": "multi_label_classification"},
        {"problem_type": "regression", "num_labels": 1},
    ],
)
def test_each_loss_of_rows_is_exact(overrides):
    model = build_tiny_classifier("llama", "ForSequenceClassification", **overrides)
    batch = batch_for(model, make_batch(rows=3, padding=(0, 4, 2)))
    report = compare(model, batch, CHUNKS)
    assert report.exact, str(report)


@pytest.mark.usefixtures("unchecked")
def test_embeddings_and_positions_may_be_given():
    model = build_tiny_classifier("llama", "ForSequenceClassification")
    batch = batch_for(model, make_batch(rows=1))
    embeddings = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    positions = torch.arange(TOKENS)[None] + 3
    report = compare(
        model, {"inputs_embeds": embeddings, "position_ids": positions, **batch}, CHUNKS
    )
    assert report.exact, str(report)


@pytest.mark.usefixtures("unchecked")
def test_experts_have_no_loss_of_routers_beside_a_classifiers():
    model = build_tiny_classifier("qwen3_moe", "ForSequenceClassification")
    model.config.output_router_logits = True
    settings = SPPOConfig(num_chunks=3, order="by_layer", layer_tile_tokens=5, show_plan=False)
    report = compare(model, batch_for(model, make_batch(rows=2, padding=(0, 4))), settings)
    assert report.exact, str(report)


def test_outputs_are_the_models_own():
    model = _convert("ForSequenceClassification")
    batch = batch_for(model, make_batch(rows=ROWS, padding=(0, 4)))
    plain = build_tiny_classifier("llama", "ForSequenceClassification", dtype=torch.float32)
    plain.config.pad_token_id = 0
    output = model(**batch)
    torch.testing.assert_close(output.logits, plain(**batch).logits)
    loss, logits = model(**batch, return_dict=False)
    assert loss == output.loss
    assert torch.equal(logits, output.logits)
    del batch["labels"]
    output = model(**batch)
    assert output.loss is None
    assert output.logits.requires_grad, (
        "a loss may be computed from them, as TRL's RewardTrainer does"
    )
    forwards = get_engine(model).counters["attention_forwards"]
    model.eval()
    torch.testing.assert_close(model(**batch).logits, plain.eval()(**batch).logits)
    assert get_engine(model).counters["attention_forwards"] == forwards, "the model's own forward"


def test_padding_on_the_left_is_refused_where_the_loss_reads_it():
    spans, tokens = _convert("ForQuestionAnswering"), _convert("ForTokenClassification")
    batch = make_batch(rows=ROWS, tokens=TOKENS, left_padding=(0, 7))
    with pytest.raises(ConfigError, match="looks for the span at all positions"):
        spans(**batch_for(spans, batch))
    labelled = batch_for(tokens, batch)
    loss = tokens(**labelled).loss
    loss.backward()
    assert tokens(**labelled, ignore_index=0).loss == loss, "Transformers' loss does not read it"
    with pytest.raises(ConfigError, match="without labels returns logits of all positions"):
        tokens(**{name: value for name, value in labelled.items() if name != "labels"})
    labelled["labels"][1, 2] = 0
    with pytest.raises(ConfigError, match=r"there are labels at padding \(set them to -100\)"):
        tokens(**labelled)


def test_padding_on_the_left_is_refused_where_a_row_has_no_other_token():
    model = _convert("ForSequenceClassification")
    batch = batch_for(model, make_batch(rows=ROWS, tokens=TOKENS, left_padding=(0, 7)))
    batch["input_ids"][1] = 0
    with pytest.raises(ConfigError, match=r"row 1: all tokens of a row are the padding token"):
        model(**batch)
    batch["attention_mask"][1] = 0
    plain = build_tiny_classifier("llama", "ForSequenceClassification", dtype=torch.float32)
    plain.config.pad_token_id = 0
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


class _Pooling(torch.nn.Module):
    """Mixes all tokens of a row, padding among them."""

    def forward(self, states):
        return states[..., :3] + states[..., :3].mean(1, keepdim=True)


def test_padding_on_the_left_is_refused_below_a_head_that_a_user_put_in():
    model = build_tiny_classifier("llama", "ForSequenceClassification")
    model.score = _Pooling()
    right = batch_for(model, make_batch(rows=ROWS, padding=(0, 7)))
    report = compare(model, right, CHUNKS)
    assert report.exact, str(report)
    left = batch_for(model, make_batch(rows=ROWS, left_padding=(0, 7)))
    with pytest.raises(ConfigError, match=r"_Pooling\) in the head may read padding, too"):
        convert(model, CHUNKS)(**left)


def test_encoders_are_refused_at_conversion():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = ModernBertConfig(vocab_size=97, num_hidden_layers=2, pad_token_id=0, **sizes)
    with pytest.raises(UnsupportedModelError, match="bidirectional attention"):
        convert(ModernBertForSequenceClassification(config), CHUNKS)


def test_a_classifier_is_not_cut_into_stages():
    model = build_tiny_classifier("llama", "ForSequenceClassification")
    names = [name for name, _ in model.named_parameters()]
    cut = StageCut((range(1), range(1, 3)), (0,))
    with pytest.raises(UnsupportedModelError, match=r"its head is a classifier's.*pp_size=1"):
        StagedModel(find_parts(model), cut)
    assert [name for name, _ in model.named_parameters()] == names


def test_plans_count_its_head_and_the_hidden_states_of_whole_rows():
    def planned(model):
        settings = SPPOConfig(num_chunks=3, order="by_chunk", show_plan=False)
        engine = get_engine(convert(model, settings))
        return engine.plan(ROWS, TOKENS, torch.device("cpu"))

    # Of one configuration, and so of one profile if that were found by it alone.
    language = planned(build_tiny_model("llama", dtype=torch.float32, num_labels=3))
    classifier = planned(
        build_tiny_classifier("llama", "ForSequenceClassification", dtype=torch.float32)
    )
    shape, width = classifier.shape, classifier.shape.hidden_size
    assert (language.shape.num_logits, shape.num_logits) == (97, 3)
    assert language.shape.weight_bytes - shape.weight_bytes == 4 * width * (97 - 3)
    assert shape.head_flops_per_token == 2 * width * 3


class _ConvolvedForSequenceClassification(LlamaForSequenceClassification):
    """A head without matrices."""

    def __init__(self, config):
        super().__init__(config)
        self.score = None
        self.mix = torch.nn.Conv1d(config.hidden_size, config.num_labels, 3, padding=1)

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        states = self.model(input_ids, attention_mask=attention_mask, **kwargs)[0]
        real = torch.ones_like(states[..., 0]) if attention_mask is None else attention_mask
        mixed = self.mix((states * real[..., None]).transpose(1, 2))
        logits = (mixed * real[:, None]).mean(-1)
        loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits)


def _compare_own(model_class):
    config = build_tiny_classifier("llama", "ForSequenceClassification").config
    model = model_from_config(config, model_class=model_class)
    batch = batch_for(model, make_batch(rows=3, padding=(0, 4, 2)))
    return compare(model, batch, CHUNKS)


def test_a_head_may_have_no_matrices():
    report = _compare_own(_ConvolvedForSequenceClassification)
    assert report.exact, str(report)


class _BareForSequenceClassification(LlamaForSequenceClassification):
    """Takes what it needs alone, and returns a tuple."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        states = self.model(input_ids, attention_mask=attention_mask)[0]
        logits = self.score(states[:, -1])
        loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return loss, logits


class _DictForSequenceClassification(_BareForSequenceClassification):
    def forward(self, input_ids, attention_mask=None, labels=None):
        loss, logits = super().forward(input_ids, attention_mask, labels)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize(
    "model_class", [_BareForSequenceClassification, _DictForSequenceClassification]
)
def test_a_forward_of_the_users_own_takes_and_returns_what_it_likes(model_class):
    report = _compare_own(model_class)
    assert report.exact, str(report)


class _Reward(LlamaForSequenceClassification):
    """Has scores alone, as RewardTrainer takes them: Transformers finds no loss by this name."""


def test_a_subclass_may_have_any_name():
    config = build_tiny_classifier("llama", "ForSequenceClassification").config
    config.num_labels, config.pad_token_id = 1, 0
    plain = model_from_config(config, model_class=_Reward, dtype=torch.float32)
    ours = copy.deepcopy(plain)
    with pytest.warns(UserWarning, match="no tiny model of it could be built"):
        ours = convert(ours, CHUNKS)
    batch = make_batch(rows=2, padding=(0, 4))
    del batch["labels"]
    for model in (plain, ours):
        chosen, rejected = model(**batch).logits
        (chosen - rejected).square().sum().backward()
    assert get_engine(ours).counters["attention_forwards"] == 3 * 3
    for name, parameter in plain.named_parameters():
        grad = ours.get_parameter(name).grad
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


class _Copies(TorchDispatchMode):
    """Counts the tensors of a shape that are put together."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.count += tuple(output.shape) == self.shape
        return output


def test_the_hidden_states_of_whole_rows_are_copied_once():
    model = _convert("ForTokenClassification", order="by_chunk")
    batch = batch_for(model, make_batch(rows=ROWS, tokens=TOKENS))
    with _Copies((ROWS, TOKENS, model.config.hidden_size)) as copies:
        model(**batch)
    assert copies.count == 1


def test_a_language_model_of_the_same_configuration_has_its_own_profile():
    sizes = {"num_labels": 3, "intermediate_size": 52}  # of no other test: profiles are stored
    model = build_tiny_classifier("llama", "ForSequenceClassification", **sizes)
    model_profile(find_parts(model))
    profile = model_profile(find_parts(build_tiny_model("llama", **sizes)))
    # Embedding, final norm and head, which commands that only plan take from there.
    assert profile.outer_weights == 2 * 97 * 32 + 32
