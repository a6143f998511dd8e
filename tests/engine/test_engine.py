"""The engine's forward: results of every kind of call, refusals, and what observers hear."""

import contextlib
import gc
import warnings
import weakref

import pytest
import torch
from torch.nn import functional as F

from sppo_hf import BudgetError, ConfigError, SPPOConfig, SPPOError, UnsupportedModelError
from sppo_hf.engine import engine as engine_module
from sppo_hf.engine.convert import convert, get_engine, revert
from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.engine.plan_cache import PlanCache
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.testing.exactness import compare, float64_everywhere
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.noise import add_even_noise
from tests.sweeps import pairs, turn

T = 23


class Listener(StepObserver):
    def __init__(self):
        self.plans, self.units, self.records = [], [], []

    def on_plan(self, plan, model_name):
        self.plans.append((plan, model_name))

    def on_unit(self, direction, chunk, num_chunks):
        self.units.append((direction, chunk, num_chunks))

    def on_record(self, record):
        self.records.append(record)


@pytest.fixture
def model():
    model = build_tiny_model("llama", dtype=torch.float32, num_hidden_layers=2).train()
    # As in the Trainer. With a cache Transformers does not look for packed documents at all.
    model.config.use_cache = False
    return model


@pytest.fixture
def ids():
    torch.manual_seed(3)
    return torch.randint(0, 97, (2, T))


def _config(**settings):
    return SPPOConfig(**{"num_chunks": 3, "show_plan": False, **settings})


def _step(model, **batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def _assert_same(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-6)


def _packed_ids(ids):
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    return {"input_ids": ids[:1], "labels": ids[:1], "position_ids": positions}


def _masked(ids, rows):
    labels = ids.clone()
    labels[rows] = -100
    return {"input_ids": ids, "labels": labels}


BATCHES = {
    "labels": lambda ids: {"input_ids": ids, "labels": ids},
    "shift_labels": lambda ids: {"input_ids": ids, "labels": ids, "shift_labels": ids.flip(1)},
    "num_items int": lambda ids: {"input_ids": ids, "labels": ids, "num_items_in_batch": 77},
    "num_items tensor": lambda ids: {
        "input_ids": ids,
        "labels": ids,
        "num_items_in_batch": torch.tensor(77),
    },
    "ignore_index": lambda ids: {"input_ids": ids, "labels": ids, "ignore_index": int(ids[0, 5])},
    "masked row": lambda ids: _masked(ids, [0]),
    "all masked": lambda ids: _masked(ids, [0, 1]),
    "masked chunk": lambda ids: {
        "input_ids": ids,
        "labels": ids.index_fill(1, torch.arange(8, 17), -100),
    },
    "masked end": lambda ids: {
        "input_ids": ids,
        "labels": ids.index_fill(1, torch.arange(10, T), -100),
    },
    "all masked with num_items": lambda ids: {
        **_masked(ids, [0, 1]),
        "num_items_in_batch": torch.tensor(5),
    },
    "padded": lambda ids: {
        "input_ids": ids,
        "attention_mask": torch.arange(T)[None] < torch.tensor([[9], [T]]),
        "labels": ids.masked_fill(torch.arange(T)[None] >= torch.tensor([[9], [T]]), -100),
    },
    "padded, all short": lambda ids: {
        "input_ids": ids,
        "attention_mask": (torch.arange(T)[None] < torch.tensor([[4], [9]])).long(),
        "labels": ids.masked_fill(torch.arange(T)[None] >= torch.tensor([[4], [9]]), -100),
    },
    "padded, labels on pads": lambda ids: {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": (torch.arange(T)[None] < torch.tensor([[9], [T]])).long(),
    },
    "packed": _packed_ids,
    "packed rows": lambda ids: {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.stack(
            [
                torch.cat([torch.arange(9), torch.arange(14)]),
                torch.cat([torch.arange(20), torch.arange(3)]),
            ]
        ),
    },
    "positions shifted": lambda ids: {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.arange(5, 5 + T)[None],
    },
    "one token": lambda ids: {
        "input_ids": ids[:, :1],
        "labels": ids[:, :1],
        "shift_labels": ids[:, 1:2],
    },
}


SETTINGS = {
    "recompute": {},
    "kept": {"num_chunks": "auto", "chunk_tokens": 5, "recompute": "none"},
    "micro-batches": {"micro_batch_size": 1},
}


@pytest.mark.parametrize(
    ("batch", "settings"),
    [(name, some) for i, name in enumerate(BATCHES) for some in turn(list(SETTINGS), 3, i)],
)
@pytest.mark.filterwarnings("ignore:position_ids restart")
def test_same_as_the_unmodified_model(model, ids, batch, settings):
    inputs, config = BATCHES[batch](ids), SETTINGS[settings]
    if batch == "one token":
        config = {**config, "num_chunks": "auto"}
    expected = _step(model, **inputs)
    convert(model, _config(**config))
    _assert_same(_step(model, **inputs), expected)


def test_packing_by_lengths_is_the_same_as_by_positions(model, ids):
    by_positions = _packed_ids(ids)
    expected = _step(model, **by_positions)
    convert(model, _config())
    offsets = torch.tensor([0, 9, T], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
               "max_length_q": 14, "max_length_k": 14}  # fmt: skip
    _assert_same(_step(model, **by_positions, **lengths), expected)


def test_embeddings_as_inputs_get_their_gradient(model, ids):
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds, labels=ids).loss.backward()
    expected, embeds.grad = embeds.grad, None
    convert(model, _config())
    model(inputs_embeds=embeds, labels=ids).loss.backward()
    torch.testing.assert_close(embeds.grad, expected, rtol=1e-4, atol=1e-7)


def test_evaluation_gives_loss_and_no_logits_unless_asked(model, ids):
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids)
        convert(model, _config())
        ours = model(input_ids=ids, labels=ids)
        torch.testing.assert_close(ours.loss, expected.loss)
        assert ours.logits is None
        revert(model)
        convert(model, _config(return_logits=True, micro_batch_size=1))
        asked = model(input_ids=ids, labels=ids)
        torch.testing.assert_close(asked.logits, expected.logits, rtol=1e-4, atol=1e-5)


KEPT = {
    "last": 9,
    "all but the first": -4,
    "more than there are": T + 5,
    "one": 1,
    "positions": torch.tensor([2, 3, 4, 11, 12, 20, -1]),
    "in another order": torch.tensor([12, 3, 20]),
    "mask": torch.arange(T) % 3 > 0,
}


@pytest.mark.parametrize(
    ("kept", "shifted"),
    [(name, shifted) for i, name in enumerate(KEPT) for shifted in turn([False, True], 2, i)],
)
def test_labels_of_the_logits_to_keep(ids, kept, shifted):
    keep = KEPT[kept]
    cut = ids[:, slice(-keep, None) if isinstance(keep, int) else keep]
    inputs = {"input_ids": ids, "labels": cut, "logits_to_keep": keep}
    if shifted:
        inputs["shift_labels"] = cut.flip(1)
    model = build_tiny_model("gemma2", dtype=torch.float64).train()
    report = compare(model, inputs, _config(loss_tile_tokens=5))
    assert report.exact, str(report)


@pytest.mark.parametrize("kept", ["last", "positions"])
def test_returned_logits_follow_logits_to_keep(model, ids, kept):
    keep = KEPT[kept]
    cut = ids[:, slice(-keep, None) if isinstance(keep, int) else keep]
    expected = model(input_ids=ids, labels=cut, logits_to_keep=keep).logits
    convert(model, _config(return_logits=True))
    ours = model(input_ids=ids, labels=cut, logits_to_keep=keep).logits
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_logits_to_keep_without_labels_and_with_a_custom_loss(model, ids):
    expected = model(input_ids=ids, logits_to_keep=5).logits
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().pow(2).mean()
    inputs = {"input_ids": ids, "labels": ids[:, -5:], "logits_to_keep": 5}
    step = _step(model, **inputs)
    convert(model, _config())
    with pytest.warns(UserWarning, match="logits"):
        ours = model(input_ids=ids, logits_to_keep=5).logits
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    with pytest.warns(UserWarning, match="loss of the model's own"):
        _assert_same(_step(model, **inputs), step)


@pytest.mark.parametrize(
    ("batch", "settings"),
    [
        (batch, settings)
        for index, batch in enumerate(
            ["masked chunk", "masked end", "packed", "all masked", "padded, all short", "padded"]
        )
        for settings in turn([{}, {"micro_batch_size": 1}], 2, index)
    ],
)
def test_returned_logits_are_those_of_every_token(model, ids, batch, settings):
    inputs = BATCHES[batch](ids)
    expected = model(**inputs).logits
    convert(model, _config(return_logits=True, loss_tile_tokens=3, **settings))
    ours = model(**inputs)
    torch.testing.assert_close(ours.logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:logits of the whole sequence")
@pytest.mark.parametrize(
    ("keep", "with_loss", "settings"),
    pairs([0, 9], [True, False], [{}, {"micro_batch_size": 1, "order": "by_chunk"}]),
)
def test_returned_logits_carry_gradients(ids, settings, with_loss, keep):
    def gradients(model):
        with float64_everywhere():
            outputs = model(input_ids=ids, labels=ids[:, -keep:], logits_to_keep=keep)
            loss = outputs.logits.logsumexp(-1).pow(2).mean()
            (loss + outputs.loss if with_loss else loss).backward()
        return loss.detach(), [p.grad for p in model.parameters()]

    model, plain = build_tiny_model("gemma2"), build_tiny_model("gemma2")
    plain.set_attn_implementation("eager")
    expected = gradients(plain)
    convert(model, _config(return_logits=True, loss_tile_tokens=3, **settings))
    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


def test_training_without_labels_returns_logits_and_warns_of_their_size(model, ids):
    def loss_of(logits):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    loss_of(model(input_ids=ids).logits).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    convert(model, _config())
    with pytest.warns(UserWarning, match=r"2 x 23 x 97 values, 17\.4 KiB"):
        logits = model(input_ids=ids).logits
    loss_of(logits).backward()
    ours = {n: p.grad for n, p in model.named_parameters()}
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert get_engine(model).counters["attention_forwards"] == 6


def test_the_observer_receives_every_unit_in_order(model, ids):
    listener = Listener()
    convert(model, _config(order="by_chunk"), observer=listener)
    _step(model, input_ids=ids, labels=ids)
    forward = [("forward", chunk, 3) for chunk in range(3)]
    backward = [("backward", chunk, 3) for chunk in (2, 1, 0)]
    assert listener.units == forward + backward
    (record,) = listener.records
    assert record.training
    assert record.tokens == 2 * T
    assert record.num_chunks == 3
    assert record.backward_seconds > 0
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
    assert len(listener.records) == 2
    assert not listener.records[1].training
    assert [name for _, name in listener.plans] == ["LlamaForCausalLM"] * 2


def test_a_step_runs_with_its_device_as_the_current_one(model, ids, monkeypatch):
    """A script may have put its model on another GPU than the current one, where Triton works."""
    current, within = [], []

    @contextlib.contextmanager
    def as_current(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(engine_module, "as_current_device", as_current)
    convert(model, _config())
    model.model.layers[0].mlp.register_forward_hook(lambda *_: within.append(list(current)))
    monkeypatch.setattr(
        PlanCache, "choose_backend", _noting(PlanCache.choose_backend, within, current)
    )
    model(input_ids=ids, labels=ids)
    assert within
    assert all(devices == [ids.device] for devices in within)
    assert not current


def _noting(method, notes, value):
    def noting(*args, **options):
        notes.append(list(value))
        return method(*args, **options)

    return noting


def test_a_record_counts_the_copies_of_its_own_step(model, ids):
    listener = Listener()
    convert(model, _config(offload="full", min_offload_size=1), observer=listener)
    for _ in range(2):
        _step(model, input_ids=ids, labels=ids)
    first, second = (record.offload.d2h_bytes for record in listener.records)
    assert first == second > 0


@pytest.mark.parametrize("settings", [
    {"recompute": "none"}, {"recompute": "full"},
    {"recompute": "full", "offload": "full", "min_offload_size": 1},
    {"recompute": "none", "offload": "full", "min_offload_size": 1},
])  # fmt: skip
def test_a_dropped_forward_frees_everything_at_once(model, ids, settings):
    convert(model, _config(**settings))
    engine = get_engine(model)
    gc.collect()
    gc.disable()
    try:
        kept = []
        handle = model.model.layers[1].self_attn.register_forward_hook(
            lambda _m, _a, output: kept.append(weakref.ref(output[0]))
        )
        output = model(input_ids=ids, labels=ids)
        handle.remove()
        del output
        assert len(kept) == 3
        assert all(reference() is None for reference in kept)
        assert engine.offload.stats().live_handles == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("offload", ["none", "full"])
def test_an_exception_inside_a_layer_leaves_the_next_step_right(model, ids, offload):
    expected = _step(model, input_ids=ids, labels=ids)
    convert(model, _config(offload=offload, min_offload_size=1))
    calls = []

    def explode(_module, _args):
        calls.append(1)
        if len(calls) == 5:  # layer 1 of chunk 1
            raise RuntimeError("boom")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda m, a: explode(m, a))
    calls += [1] * 3
    with pytest.raises(RuntimeError, match="boom"):
        model(input_ids=ids, labels=ids)
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    _assert_same(_step(model, input_ids=ids, labels=ids), expected)
    assert get_engine(model).offload.stats().live_handles == 0


def test_an_exception_in_backward_leaves_the_next_step_right(model, ids):
    expected = _step(model, input_ids=ids, labels=ids)
    convert(model, _config(offload="full", min_offload_size=1))
    loss = model(input_ids=ids, labels=ids).loss
    handle = model.model.layers[1].mlp.register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(RuntimeError("boom"))
    )
    with pytest.raises(RuntimeError, match="boom"):
        loss.backward()
    handle.remove()
    del loss
    _assert_same(_step(model, input_ids=ids, labels=ids), expected)


def test_dropout_inside_layers_repeats_in_recomputation(ids):
    def gradients(recompute):
        model = build_tiny_model(
            "gpt2", dtype=torch.float32, resid_pdrop=0.3, attn_pdrop=0.0, embd_pdrop=0.3
        ).train()
        convert(model, _config(recompute=recompute))
        torch.manual_seed(5)
        result = _step(model, input_ids=ids, labels=ids)
        return result, torch.rand(1)

    (kept, after_kept), (again, after_again) = gradients("none"), gradients("full")
    _assert_same(again, kept)
    assert torch.equal(after_kept, after_again)  # recomputation leaves the random state alone


def test_second_backward_is_a_clear_error(model, ids):
    convert(model, _config())
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    with pytest.raises(SPPOError, match=r"through a chunked loss\. .* one backward per forward"):
        loss.backward()


def test_second_derivatives_are_a_clear_error(model, ids):
    convert(model, _config())
    loss = model(input_ids=ids, labels=ids).loss
    with pytest.raises(SPPOError, match="leave create_graph out"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_bfloat16_autocast_is_close_to_the_unmodified_model(model, ids):
    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = step()
    convert(model, _config())
    ours = step()
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-2, atol=1e-2)
    assert (ours[1] - expected[1]).norm() < 0.03 * expected[1].norm()


REFUSED = {
    "lengths that do not sum": (
        {"num_chunks": "auto", "chunk_lengths": [4, 5]}, {}, ConfigError, "9.*23"),
    "more chunks than tokens": ({"num_chunks": 24}, {}, ConfigError, "24.*23"),
    "budget below the weights": ({"device_memory": "2KB"}, {}, BudgetError, "device"),
    "left padding": ({}, {"attention_mask": torch.arange(T)[None].repeat(2, 1) > 3},
                     ConfigError, "left padding in row 0.*padding_side"),
    "hole": ({}, {"attention_mask": torch.arange(T)[None].repeat(2, 1) != 3},
             ConfigError, "padding between real tokens in row 0"),
    "4D mask": ({}, {"attention_mask": torch.ones(2, 1, T, T)}, ConfigError,
                r"\(2, 1, 23, 23\).*let position_ids restart at 0"),
    "labels of another shape": ({}, {"labels": torch.ones(2, 5, dtype=torch.long)},
                                ConfigError, r"labels has shape \(2, 5\)"),
    "hidden states": ({}, {"output_hidden_states": True}, ConfigError, "output_hidden_states"),
    "logits_to_keep, labels not cut": ({}, {"logits_to_keep": 2}, ConfigError,
                                       "logits_to_keep selects 2 of 23.*drop logits_to_keep"),
    "logits_to_keep twice": ({}, {"logits_to_keep": torch.tensor([3, 5, 3]),
                                  "labels": torch.ones(2, 3, dtype=torch.long)},
                             ConfigError, "selects a token twice"),
    "logits_to_keep of rows": ({}, {"logits_to_keep": torch.ones(2, T, dtype=torch.bool)},
                               ConfigError, "mask labels with -100"),
    "not installed": ({"attention_backend": "flash_attention_2"}, {}, ConfigError, "cpu_flash"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_the_first_chunk(model, ids, case):
    settings, extra, kind, message = REFUSED[case]
    listener = Listener()
    convert(model, _config(**settings), observer=listener)
    with pytest.raises(kind, match=message):
        model(**{"input_ids": ids, "labels": ids, **extra})
    assert not listener.units


@pytest.mark.parametrize("field", ["output_hidden_states", "output_attentions"])
def test_outputs_enabled_in_the_config_are_refused_like_keywords(field, ids):
    model = build_tiny_model("llama", dtype=torch.float32, attn_implementation="eager").train()
    setattr(model.config, field, True)
    convert(model, _config())
    with pytest.raises(ConfigError, match=f"Remedy: set model.config.{field} = False"):
        model(input_ids=ids, labels=ids)
    model(input_ids=ids, labels=ids, **{field: False}).loss.backward()  # the keyword decides
    setattr(model.config, field, False)
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize(
    ("trained", "order", "family"),
    pairs([False, True], ["by_chunk", "by_layer"], ["gpt2", "gemma3_text"]),
)
def test_noise_on_embeddings_is_as_strong_as_that_of_the_whole_sequence(trained, order, family):
    model = build_tiny_model(family)
    add_even_noise(model, 5.0)
    model.get_input_embeddings().requires_grad_(trained)  # of these a CPU embeds all at once
    batch = make_batch(rows=3, tokens=T, padding=(0, 9, 4))
    mostly_padding = make_batch(rows=3, tokens=T, padding=(14, 15, 16))
    config = _config(chunk_lengths=(9, 1, 13), num_chunks="auto", order=order, micro_batch_size=2)
    for each in (mostly_padding, batch):
        report = compare(model, each, config)
        assert report.exact, str(report)
    with torch.no_grad():
        assert abs(model.eval()(**batch).loss - report.loss) > 1e-3, "without noise"


def test_noise_on_embeddings_that_peft_has_wrapped_since():
    peft = pytest.importorskip("peft")
    model = build_tiny_model("llama")
    add_even_noise(model, 5.0)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    with suppress_peft_warnings():
        model = peft.get_peft_model(model, lora).double()
    # Without a gradient a CPU embeds chunk by chunk, too.
    model.get_input_embeddings().requires_grad_(False)
    report = compare(model, make_batch(rows=2, tokens=T), _config(order="by_chunk"))
    assert report.exact, str(report)


def test_attention_dropout_is_refused_in_training(model, ids):
    model.config.attention_dropout = 0.1
    convert(model, _config())
    with pytest.raises(UnsupportedModelError, match=r"attention_dropout=0.1.*Set it to 0\.0"):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_adapters_that_begin_within_the_sequence_are_refused_while_active(model, ids, training):
    peft = pytest.importorskip("peft")
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "init_lora_weights": False}
    invoked = peft.LoraConfig(**settings, alora_invocation_tokens=[int(ids[0, 4])])
    convert(model, _config())
    with suppress_peft_warnings():
        wrapped = peft.get_peft_model(model, invoked).train(training)
    with pytest.raises(UnsupportedModelError, match="'default' has alora_invocation_tokens"):
        wrapped(input_ids=ids, labels=ids)
    with wrapped.disable_adapter():
        wrapped(input_ids=ids, labels=ids)
    wrapped.add_adapter("whole", peft.LoraConfig(**settings))
    wrapped.set_adapter("whole")
    wrapped(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize(
    ("make_config", "reason"),
    [
        (lambda peft, of: peft.LilyConfig(**of), "is Lily's, whose router averages"),
        (
            lambda peft, of: peft.LoraConfig(**of, monteclora_config=peft.MontecloraConfig()),
            "has a monteclora_config",
        ),
        (
            lambda peft, of: peft.LoraConfig(**of, velora_config=peft.VeloraConfig(num_groups=4)),
            "has velora_config.init_type='batch_average'",
        ),
        (
            lambda peft, of: peft.PolyConfig(**of, r=2, n_tasks=2, n_skills=2),
            "is Poly's, whose router draws",
        ),
        (lambda peft, of: peft.LoHaConfig(**of, rank_dropout=0.5), "has rank_dropout=0.5"),
        (lambda peft, of: peft.LoKrConfig(**of, module_dropout=0.1), "has module_dropout=0.1"),
    ],
    ids=["lily", "monteclora", "velora", "poly", "loha", "lokr"],
)
def test_adapters_that_read_all_tokens_of_a_call_are_refused(model, ids, make_config, reason):
    peft = pytest.importorskip("peft")
    try:
        config = make_config(peft, {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]})
    except AttributeError:
        pytest.skip("this PEFT has no such adapter")
    convert(model, _config())
    with suppress_peft_warnings():
        wrapped = peft.get_peft_model(model, config).train()
    with pytest.raises(UnsupportedModelError, match=f"adapter 'default' {reason}"):
        wrapped(input_ids=ids, labels=ids)
    with wrapped.disable_adapter():
        wrapped(input_ids=ids, labels=ids)


def test_longer_than_the_rotary_range_only_warns(ids):
    model = build_tiny_model("llama", dtype=torch.float32, max_position_embeddings=16).train()
    convert(model, _config())
    message = "23 tokens are longer than the 16 positions.*packed documents of at most 16 tokens"
    with pytest.warns(UserWarning, match=message):
        model(input_ids=ids, labels=ids).loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough: a second warning would be raised
        model(input_ids=ids, labels=ids).loss.backward()


DEFAULT_DEVICE_WAYS = [
    {"recompute": "full", "offload": "full", "offload_kv": "full", "order": "by_chunk"},
    {"recompute": "selective", "order": "by_layer", "layer_tile_tokens": 4},
    {"num_chunks": 2, "weights": "host"},
]


@pytest.mark.parametrize("settings", DEFAULT_DEVICE_WAYS)
def test_another_default_device_changes_nothing(model, ids, settings):
    """As after torch.set_default_device("cuda"); whatever is made on "meta" cannot be read."""
    mask, positions = torch.ones_like(ids), torch.arange(T) % 15
    mask[1, 20:] = 0
    batches = [
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids, "labels": ids, "attention_mask": mask},
        {"input_ids": ids[:1], "labels": ids[:1], "position_ids": positions[None]},
    ]
    expected = [_step(model, **batch) for batch in batches]
    with torch.device("meta"):
        convert(model, _config(min_offload_size=1, **settings))
        found = [_step(model, **batch) for batch in batches]
    for (our_loss, ours), (their_loss, theirs) in zip(found, expected, strict=True):
        torch.testing.assert_close(our_loss, their_loss)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
