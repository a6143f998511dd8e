"""Backends are chosen, and their kernels built, before the first layer runs, not inside it."""

import threading
import weakref

import pytest
import torch

from sppo_hf import SPPOConfig
from sppo_hf.attention import warm_up
from sppo_hf.attention.backends.aten import AtenFlash, CPUFlash, CuDNN
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.backends.select import Selection
from sppo_hf.attention.segments import RowSpans
from sppo_hf.engine import plan_cache as plans
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.attention.backends.cases import deterministic
from tests.attention.backends.fake_kernels import FakeAten
from tests.engine.forced_plans import force_kv, force_modes
from tests.engine.unplanned import unplanned_shapes
from tests.sweeps import turn


def _choose_by_window(monkeypatch):
    asked = []

    def select(name, requirement):
        asked.append(requirement)
        if requirement.window:
            return Selection(Reference(), "reference: for windows")
        return Selection(CPUFlash(), f"cpu_flash: {requirement}")

    monkeypatch.setattr(plans, "select_backend", select)
    return asked


def test_backends_of_all_layer_kinds_are_chosen_before_the_first_layer_runs(monkeypatch):
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


def test_backends_are_chosen_again_when_determinism_is_enabled(monkeypatch):
    asked = _choose_by_window(monkeypatch)
    model = build_tiny_model("llama", dtype=torch.float32).train()
    convert(model, SPPOConfig(num_chunks=3, show_plan=False))
    ids = torch.randint(0, 97, (1, 24))
    model(input_ids=ids, labels=ids)
    assert len(asked) == 1
    with deterministic("error"):
        model(input_ids=ids, labels=ids)
    assert len(asked) == 2


def test_rows_of_many_lengths_get_a_backend_that_builds_nothing_per_shape(monkeypatch):
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


def thread():
    """This one, or autograd's: on a CPU that has none of its own, but knows what runs in it."""
    return threading.get_ident(), torch._C._current_graph_task_id() != -1


class Planning(FakeAten):
    """Notes what cuDNN keeps its plans by: shapes, strides, mask, and the thread."""

    def __init__(self):
        super().__init__()
        self.step_began, self.before, self.in_step = False, [], []

    def note(self, direction, tensors, causal):
        lie = tuple((tuple(x.shape), x.stride()) for x in tensors)
        calls = self.in_step if self.step_began else self.before
        calls.append((direction, thread()[1], lie, causal))

    def _scaled_dot_product_cudnn_attention(self, q, k, v, *args, **kwargs):
        self.note("forward", (q, k, v), args[4])
        return super()._scaled_dot_product_cudnn_attention(q, k, v, *args, **kwargs)

    def _scaled_dot_product_cudnn_attention_backward(self, dout, q, k, v, *args, **kwargs):
        self.note("backward", (q, k, v), args[-1])
        return super()._scaled_dot_product_cudnn_attention_backward(dout, q, k, v, *args, **kwargs)


class Ready(StepObserver):
    """Notes what is said of kernels."""

    def __init__(self):
        self.said = []

    def on_attention_ready(self, backend, num_shapes, seconds):
        self.said.append((backend, num_shapes))


def train_with(monkeypatch, kernel, family, rows, **settings):
    """A converted model that attends with `kernel`, and a step of `rows` rows of 48 tokens."""
    backend, observer = CuDNN(key_tile=8, aten=kernel), Ready()
    monkeypatch.setattr(plans, "select_backend", lambda *_: Selection(backend, "planning"))
    monkeypatch.setattr(warm_up, "_thread", thread)
    model = build_tiny_model(family, dtype=torch.float32).train()
    # The layers begin after the embedding.
    model.model.embed_tokens.register_forward_pre_hook(
        lambda *_: setattr(kernel, "step_began", True)
    )
    shared = {"min_offload_size": 1, "show_plan": False, "chunk_lengths": (16, 16, 12, 4)}
    convert(model, SPPOConfig(**shared, **settings), observer=observer)

    def step(**batch):
        kernel.step_began = False
        kernel.before.clear()
        kernel.in_step.clear()
        ids = torch.randint(1, 90, (rows, 48))
        model(input_ids=ids, labels=ids, **batch).loss.backward()

    return step, observer


CASES = [
    ("llama", 1, {"order": "by_chunk", "recompute": "none", "offload": "none"}),
    ("llama", 2, {"order": "by_layer", "recompute": "full", "offload": "full"}),
    ("llama", 3, {"order": "by_chunk", "micro_batch_size": 2}),
    ("gemma3_text", 2, {"order": "by_layer"}),
    ("phi3", 1, {"order": "by_chunk"}),
    ("phi", 1, {"order": "by_layer"}),
    ("llama4_text", 1, {"order": "by_chunk"}),
    ("llama4_text", 2, {"order": "by_layer"}),
]


@pytest.mark.parametrize(("family", "rows", "settings"), CASES)
def test_kernels_build_plans_for_all_shapes_of_a_step_before_it(
    monkeypatch, family, rows, settings
):
    kernel = Planning()
    step, observer = train_with(monkeypatch, kernel, family, rows, **settings)
    step()
    assert {call[:2] for call in kernel.before} == {("forward", False), ("backward", True)}
    assert kernel.in_step
    assert set(kernel.in_step) <= set(kernel.before)
    ((name, num_shapes),) = observer.said
    assert name == "cudnn"
    assert num_shapes > 1
    step()
    assert not kernel.before
    assert len(observer.said) == 1


@pytest.mark.parametrize("own_loss", [False, True])
def test_kernels_build_plans_for_padding_where_it_runs(own_loss):
    """A loss of the model's own gets logits of whole rows, the padding of all rows among them."""
    model = build_tiny_model("llama", dtype=torch.float32).train()
    if own_loss:
        model.loss_function = lambda logits, labels, *_, **__: logits[labels >= 0].mean()
    batch = make_batch(tokens=48, padding=(20,))
    with unplanned_shapes() as unplanned:
        convert(model, SPPOConfig(chunk_lengths=(16, 16, 12, 4), show_plan=False))
        model(**batch).loss.backward()
    assert not unplanned
    assert get_engine(model).counters["attention_forwards"] == model.config.num_hidden_layers * (
        4 if own_loss else 2
    )


@pytest.mark.parametrize(
    ("family", "block_tokens"),
    [
        (family, block_tokens)
        for index, block_tokens in enumerate([20, 1, 48])
        for family in turn(["gemma3_text", "llama4_text"], 2, index)
    ],
)
def test_kernels_build_plans_for_offloaded_kv(monkeypatch, family, block_tokens):
    force_kv(monkeypatch, block_tokens=block_tokens)
    kernel = Planning()
    step, _ = train_with(monkeypatch, kernel, family, 2, order="by_chunk")
    step()
    assert set(kernel.in_step) <= set(kernel.before)


def test_building_plans_for_offloaded_kv_takes_no_memory_for_it():
    transfer = warm_up._ZerosTransfer(torch.device("cpu"))
    keys = torch.ones(1, 5, 2, 3, dtype=torch.bfloat16).transpose(1, 2)
    sent = weakref.ref(keys.untyped_storage())
    handle = transfer.send(keys)
    came = transfer.fetch(handle)
    assert (came.shape, came.stride(), came.dtype) == (keys.shape, keys.stride(), keys.dtype)
    assert not came.any()
    del keys
    assert handle.is_meta
    assert sent() is None


def test_kernels_build_plans_for_recomputed_attention(monkeypatch):
    force_modes(monkeypatch, lambda chunk, layer: mode_of("hidden", "device"))
    kernel = Planning()
    step, _ = train_with(monkeypatch, kernel, "llama", 1, order="by_chunk")
    step()
    assert ("forward", True) in {call[:2] for call in kernel.in_step}
    assert set(kernel.in_step) <= set(kernel.before)


@pytest.mark.parametrize("family", ["llama", "llama4_text"])
def test_kernels_build_plans_for_padding_and_evaluation(monkeypatch, family):
    kernel = Planning()
    step, _ = train_with(monkeypatch, kernel, family, 2, order="by_chunk")
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[1, 20:] = 0
    step(attention_mask=mask)
    assert kernel.in_step
    assert set(kernel.in_step) <= set(kernel.before)


def test_shapes_of_rows_that_do_not_recur_are_forgotten(monkeypatch):
    """What comes every time, as an evaluation's rows among packed ones, is remembered."""
    monkeypatch.setattr(warm_up, "MAX_REMEMBERED", 3)
    tried: list[object] = []
    monkeypatch.setattr(warm_up, "_attend_layer", lambda layer, rows, *_: tried.append(rows))
    warm, backend = warm_up.WarmUp(budget_seconds=1.0), CuDNN(key_tile=8, aten=Planning())
    layer = warm_up.LayerAttention(
        **{"num_heads": 2, "num_kv_heads": 1, "qk_head_size": 8, "v_head_size": 8},
        **{"window": None, "softcap": None, "dtype": torch.float32},
    )

    def rows(end):
        spans = (RowSpans(((0, end), (end, 48)), 48),)
        return warm_up.ChunkedRows(
            batch_rows=1, bounds=((0, 48),), chunks=range(1), spans=spans if end else None
        )

    for end in range(1, 20):
        for one in (rows(0), rows(end)):
            warm.run(layer, one, backend, torch.device("cpu"))
    assert tried == [rows(0), *map(rows, range(1, 20))]
    assert len(warm._done) == 3


def test_kernel_plans_are_built_after_memory_ran_out_for_them(monkeypatch):
    kernel = Planning()
    step, _ = train_with(monkeypatch, kernel, "llama", 1, order="by_chunk")
    attend = warm_up._attend_layer

    def run_out(*args):
        monkeypatch.setattr(warm_up, "_attend_layer", attend)
        raise torch.OutOfMemoryError("as injected")

    monkeypatch.setattr(warm_up, "_attend_layer", run_out)
    with pytest.warns(UserWarning, match="this batch runs once more"):
        step()
    assert kernel.in_step
    assert set(kernel.in_step) <= set(kernel.before)


def test_time_to_build_kernel_plans_is_bounded(monkeypatch):
    monkeypatch.setattr(plans, "_WARM_UP_SECONDS", 0.0)
    kernel = Planning()
    step, observer = train_with(monkeypatch, kernel, "llama", 1, order="by_chunk")
    step()
    assert not kernel.before
    assert kernel.in_step
    assert not observer.said


def test_kernels_without_plans_are_not_warmed_up(monkeypatch):
    kernel = Planning()
    monkeypatch.setattr(CuDNN, "plans_each_shape", False)
    step, _ = train_with(monkeypatch, kernel, "llama", 1, order="by_chunk")
    step()
    assert not kernel.before


class Varlen(FakeAten):
    """Notes how many documents came in each call."""

    def __init__(self):
        super().__init__()
        self.documents = []

    def _flash_attention_forward(self, q, k, v, cum_q, cum_k, *args, **kwargs):
        if cum_q is not None:
            self.documents.append(len(cum_q) - 1)
        return super()._flash_attention_forward(q, k, v, cum_q, cum_k, *args, **kwargs)


@pytest.mark.parametrize("order", ["by_chunk", "by_layer"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_documents_in_one_call_are_exact_across_chunks(monkeypatch, family, order):
    """In chunks whose bounds cut documents; the made-up kernel checks lengths and layouts."""
    kernel = Varlen()
    selection = Selection(AtenFlash(aten=kernel), "varlen")
    monkeypatch.setattr(plans, "select_backend", lambda *_: selection)
    model = build_tiny_model(family)
    model.config.use_cache = False  # with a cache Transformers looks for no documents
    batch = make_batch(rows=1, tokens=23)
    batch["position_ids"] = torch.cat([torch.arange(n) for n in (9, 1, 6, 7)])[None]
    config = SPPOConfig(chunk_lengths=(5, 12, 6), order=order, show_plan=False)
    report = compare(model, batch, config)
    assert report.exact, str(report)
    # Only the second chunk has several: the end of the first, two whole ones, one token more.
    assert kernel.documents == [4] * model.config.num_hidden_layers
