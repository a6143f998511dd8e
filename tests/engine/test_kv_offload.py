"""Keys and values through the offload engine: exact in every mode, ordered, bounded, drained."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sppo_hf.attention.kv_cache import KVStream, LayerKV, StreamedKV
from sppo_hf.config import SPPOConfig
from sppo_hf.engine import kv_offload, plan_cache
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.cpu_heap import CpuChunkArena
from sppo_hf.engine.kv_offload import EngineTransfer
from sppo_hf.offload.copy_streams import StreamCopier, StreamTicket
from sppo_hf.offload.engine import OffloadEngine, make_engine
from sppo_hf.offload.host_memory import HostPool
from sppo_hf.testing.exactness import compare, compare_drift
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.attention.layers import KV_BYTES_PER_TOKEN, Layers
from tests.engine.forced_plans import force_kv
from tests.fakes.device import RaceError
from tests.fakes.operations import OperatingDevice, Operations
from tests.offload.disk_store import DiskStore
from tests.sweeps import ALL, turn

TOKENS = 23
UNEVEN = (1, 4, 17, 1)


def _config(**settings):
    return SPPOConfig(
        **{
            "chunk_lengths": UNEVEN,
            "order": "by_chunk",
            "offload_kv": "full",
            "recompute": "full",
            "offload": "none",
            "min_offload_size": 1,
            "show_plan": False,
            **settings,
        }
    )


def _assert_exact(model, batch, *, accumulation=1, **settings):
    report = compare(model, batch, _config(**settings), accumulation=accumulation)
    assert report.exact, str(report)
    assert report.worst.scale > 0
    return report


# -- exact in every mode --------------------------------------------------------------------------

FAMILIES = ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "phi3"]
FAMILIES += ["llama4_text", "gemma4_text-shared-kv", "gemma3n_text"]
MODES = [("none", "none"), ("none", "full"), ("full", "none"), ("full", "full")]


BLOCKS = (1, 6, TOKENS)


@pytest.mark.parametrize(
    ("family", "block_tokens", "mode"),
    [
        (family, BLOCKS[index % 3], MODES[index % 4])
        for index, family in enumerate(["llama", "llama", *FAMILIES])
    ],
)
def test_families_blocks_and_modes(monkeypatch, family, block_tokens, mode):
    force_kv(monkeypatch, block_tokens=block_tokens)
    model, (recompute, offload) = build_tiny_model(family), mode
    batch = make_batch(rows=3, tokens=TOKENS, padding=(0, 9, 22))
    report = _assert_exact(model, batch, recompute=recompute, offload=offload)
    assert report.attention_forwards == model.config.num_hidden_layers * len(UNEVEN)


@pytest.mark.parametrize(
    ("recompute", "offload", "lengths"),
    [
        ("full", "none", (TOKENS,)),
        ("none", "none", (TOKENS,)),
        ("none", "full", (*(1,) * 9, TOKENS - 9)),
    ],
)
def test_chunkings(recompute, offload, lengths):
    """As `offload_kv="full"` plans it."""
    model = build_tiny_model("gemma2")
    report = _assert_exact(
        model,
        make_batch(rows=2, tokens=TOKENS),
        recompute=recompute,
        offload=offload,
        chunk_lengths=lengths,
    )
    assert report.attention_forwards == model.config.num_hidden_layers * len(lengths)


@pytest.mark.parametrize(
    ("family", "recompute", "offload"),
    [*(("llama", *mode) for mode in MODES), ("mistral", "none", "full")],
)
def test_packed_documents(monkeypatch, family, recompute, offload):
    force_kv(monkeypatch, block_tokens=6)
    model = build_tiny_model(family)
    model.config.use_cache = False  # with a cache Transformers does not look for documents
    batch = make_batch(tokens=TOKENS)
    batch["position_ids"] = torch.cat([torch.arange(9), torch.arange(TOKENS - 9)])[None]
    _assert_exact(model, batch, recompute=recompute, offload=offload)


@pytest.mark.parametrize(("recompute", "offload"), MODES[1:3])
def test_lora_and_accumulation(monkeypatch, recompute, offload):
    force_kv(monkeypatch, block_tokens=6)
    _assert_exact(
        add_lora(build_tiny_model("llama")),
        make_batch(rows=3, tokens=TOKENS, padding=(4, 0, 11)),
        accumulation=2,
        recompute=recompute,
        offload=offload,
    )


def test_frozen_lower_layers(monkeypatch):
    force_kv(monkeypatch, block_tokens=6)
    model = build_tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("model.layers.1.", "lm_head")))
    _assert_exact(model, make_batch(tokens=TOKENS))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_bfloat16_is_no_farther_from_float32_than_the_unmodified_model(monkeypatch, family):
    force_kv(monkeypatch, block_tokens=17)
    experts = {"num_experts": 1, "num_experts_per_tok": 1} if family == "gpt_oss" else {}
    report = compare_drift(
        build_tiny_model(family, dtype=torch.float32, **experts),
        [make_batch(rows=2, tokens=64, seed=seed) for seed in range(2)],
        _config(chunk_lengths=(16, 17, 31)),
    )
    assert report.exact, str(report)


# -- nothing is left offloaded --------------------------------------------------------------------


def _trained(monkeypatch, *, block_tokens=6, **settings):
    force_kv(monkeypatch, block_tokens=block_tokens)
    model = convert(build_tiny_model("llama").train(), _config(**settings))
    engine = get_engine(model)
    assert engine is not None
    engine.plan(1, TOKENS, torch.device("cpu"))  # makes the offload engine
    return model, engine.offload


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_leaves_nothing_offloaded(monkeypatch, recompute):
    model, offload = _trained(monkeypatch, recompute=recompute)
    batch = make_batch(rows=3, tokens=TOKENS, padding=(6, 9, 22))  # whole chunks of padding
    for _ in range(3):
        loss = model(**batch).loss
        assert offload.stats().host_used_bytes > 0
        loss.backward()
        offload.assert_drained()  # while the loss is still held


def test_an_evaluation_streams_and_leaves_nothing_offloaded(monkeypatch):
    model, offload = _trained(monkeypatch)
    batch = make_batch(rows=2, tokens=TOKENS)
    with torch.no_grad():
        loss = model.eval()(**batch).loss
    assert offload.stats().h2d_bytes > 0
    offload.assert_drained()
    plain = build_tiny_model("llama").eval()(**batch).loss
    torch.testing.assert_close(loss.float(), plain.float())


def test_a_dropped_loss_frees_everything(monkeypatch):
    model, offload = _trained(monkeypatch)
    loss = model(**make_batch(tokens=TOKENS)).loss
    assert offload.stats().live_handles > 0
    gc.disable()
    try:
        del loss
        assert offload.stats().live_handles == 0
    finally:
        gc.enable()
    offload.assert_drained()


def test_no_kv_stay_prefetched_for_chunks_of_padding(monkeypatch):
    ahead = []
    end_forward = KVStream.end_forward

    def ended(self):
        ahead.append(len(self._prefetched))
        end_forward(self)
        ahead.append(len(self._prefetched))

    monkeypatch.setattr(KVStream, "end_forward", ended)
    model, _ = _trained(monkeypatch)
    model(**make_batch(tokens=TOKENS, padding=(9,)))
    # Of the first layer's first block, 5 tokens in chunks of 1 and 4: keys and values.
    assert ahead == [4, 0]


@pytest.mark.parametrize(("recompute", "boundaries"), [("none", 1), ("full", 0)])
def test_pending_kv_copies_are_bounded_without_activation_offload(
    monkeypatch, recompute, boundaries
):
    settled = []
    monkeypatch.setattr(EngineTransfer, "settle", lambda self: settled.append(self))
    model, _ = _trained(monkeypatch, recompute=recompute)
    loss = model(**make_batch(tokens=TOKENS)).loss
    units = model.config.num_hidden_layers * len(UNEVEN)
    assert len(settled) == boundaries * units
    loss.backward()
    assert len(settled) >= (boundaries + 1) * units, "in backward none closes"


@pytest.mark.parametrize(
    "family",
    [*FAMILIES, "qwen3", "olmo2", "starcoder2"]
    if ALL
    else ["llama", "deepseek_v3", "phi3", "gemma4_text-shared-kv", "olmo2"],
)
def test_kept_activations_do_not_hold_kv(monkeypatch, family):
    """Autograd saves tensors before rotary and norms, never the inputs of attention."""
    seen = []
    put = StreamedKV.put

    def watched(self, chunk, k, v, **kwargs):
        put(self, chunk, k, v, **kwargs)
        seen.extend(StorageWeakRef(x.untyped_storage()) for x in (self._own.k, self._own.v))

    monkeypatch.setattr(StreamedKV, "put", watched)
    model = convert(build_tiny_model(family), _config(recompute="none"))
    loss = model(**make_batch(tokens=TOKENS)).loss
    config = model.config.get_text_config()
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    assert len(seen) == 2 * own * len(UNEVEN)
    assert all(storage.expired() for storage in seen)
    loss.backward()


def test_streamed_kv_do_not_go_through_the_arena(monkeypatch):
    """They are offloaded; in a slab with those of other layers their memory would not be freed."""
    kinds = []
    keep = CpuChunkArena.keep
    monkeypatch.setattr(
        CpuChunkArena, "keep", lambda self, kind, x: kinds.append(kind) or keep(self, kind, x)
    )
    model, _ = _trained(monkeypatch)
    model(**make_batch(tokens=TOKENS)).loss.backward()
    assert set(kinds) == {"inputs", "outputs", "sums"}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_kv_on_disk(monkeypatch, tmp_path, recompute):
    engines = []

    def with_disk(config, device, plan, copier=None):
        engines.append(
            make_engine(
                device,
                min_offload_elements=1,
                budget_bytes=2**20,
                stores=[DiskStore(tmp_path, slab_bytes=2**20, checksum=True)],
            )
        )
        return engines[-1]

    monkeypatch.setattr(plan_cache, "new_offload_engine", with_disk)
    force_kv(monkeypatch, block_tokens=6, tier="disk")
    _assert_exact(
        build_tiny_model("gemma2"), make_batch(rows=2, tokens=TOKENS), recompute=recompute
    )
    (offload,) = engines
    stats = offload.stats()
    assert stats.disk_write_bytes == stats.d2h_bytes > 0, "keys and sums went there, nothing else"
    assert stats.disk_read_bytes > 0
    offload.assert_drained()
    offload.close()


def test_on_a_cpu_free_heap_is_returned_while_blocks_are_streamed(monkeypatch):
    trims = []
    monkeypatch.setattr(kv_offload, "return_free_heap", lambda: trims.append(1))
    model, offload = _trained(monkeypatch)
    batch = make_batch(tokens=TOKENS)
    model(**batch).loss.backward()
    assert not trims, "so few bytes are not worth it"
    before = offload.stats().h2d_bytes
    monkeypatch.setattr(kv_offload, "TRIM_BYTES", 2**12)
    model(**batch).loss.backward()
    came_back_bytes = offload.stats().h2d_bytes - before
    assert 0 < len(trims) <= came_back_bytes / 2**12


# -- ordered and bounded: every operation and copy on the fake device ----------------------------


def _even(tokens, chunk):
    return tuple((i, i + chunk) for i in range(0, tokens, chunk))


class _OnDevice:
    """Layers of attention, each operation and copy on the fake device; 0 tokens: K/V are kept."""

    def __init__(self, bounds, *, block_tokens, copy_seconds=1.0, windows=(None,)):
        self.device = OperatingDevice(lambda stream, num_bytes: copy_seconds)
        copier = StreamCopier(self.device)
        self.engine = OffloadEngine(copier, HostPool(2**22), min_offload_elements=1)
        self.mover = EngineTransfer(self.engine, tier="host", max_pending_d2h_bytes=None)
        stream = KVStream(self.mover, bounds, rows=None, block_tokens=block_tokens)
        self.stores = [stream.add_layer() if block_tokens else LayerKV(bounds) for _ in range(3)]
        self.layers = Layers(bounds, self.stores, windows=windows)

    def step(self, *, before_backward=lambda: None):
        with Operations(self.device, seconds=0.1) as operations:
            outs = self.layers.forward(after_layer=self.mover.settle)
            before_backward()
            gradients = self.layers.gradients(outs)
        assert operations.count > 100
        return gradients


@pytest.mark.parametrize(
    ("windows", "block_tokens", "copy_seconds"),
    [
        (windows, block_tokens, copy_seconds)
        for index, (windows, block_tokens) in enumerate(
            [((None,), 4), ((9, None), 8), ((None,), 64)]
        )
        for copy_seconds in turn([0.3, 0.0, 50.0], 3, index)
    ],
)
def test_no_race_at_any_speed(windows, block_tokens, copy_seconds):
    bounds = ((0, 4), (4, 5), (5, 9), (9, 16), (16, 20))
    run = _OnDevice(bounds, block_tokens=block_tokens, copy_seconds=copy_seconds, windows=windows)
    plain = Layers(bounds, [LayerKV(bounds) for _ in run.stores], windows=windows)
    expected = plain.gradients(plain.forward())
    torch.testing.assert_close(run.step(), expected, rtol=1e-12, atol=1e-12)
    run.engine.assert_drained()


def test_a_missing_wait_is_detected(monkeypatch):
    """If compute does not wait for copies, it reads a block that is not there yet."""
    monkeypatch.setattr(StreamTicket, "wait", lambda self: None)
    with pytest.raises(RaceError):
        _OnDevice(_even(32, 4), block_tokens=4).step()


def test_the_device_holds_blocks_but_no_sequence():
    """Against keys that stay, the device is spared all K/V and all their sums but a few blocks.

    Sums are as wide as keys here (float64). Per step the stay-at-home store holds K/V and sums of
    3 layers x 16 tokens at once. Streamed, backward holds at most: K/V of two blocks, sums of two
    blocks, the gradient of the block in use; and sums of one on their way out.
    """
    tokens = 16
    stays_bytes = 3 * tokens * KV_BYTES_PER_TOKEN

    def bytes_of_step(block_tokens):
        run = _OnDevice(_even(tokens, 4), block_tokens=block_tokens)
        held: list[int] = []
        run.step(before_backward=lambda: held.append(run.device.device_bytes))
        return held[0], run.device.peak_device_bytes

    held, peak = bytes_of_step(0)
    for block_tokens in (4, tokens):
        block_bytes = block_tokens * KV_BYTES_PER_TOKEN
        held_streamed, peak_streamed = bytes_of_step(block_tokens)
        # After forward all is offloaded but the last chunk of the last two layers, still pending.
        assert held - held_streamed >= stays_bytes - 2 * 4 * KV_BYTES_PER_TOKEN
        assert peak - peak_streamed >= 2 * stays_bytes - 6 * block_bytes


@pytest.mark.parametrize("num_chunks", [2, 4])
def test_streamed_keys_take_the_host_memory_that_was_planned(num_chunks: int) -> None:
    """The first backward of a layer writes sums of gradients before it frees its own keys."""
    settings = {"order": "by_chunk", "offload": "none", "offload_kv": "full"}
    config = SPPOConfig(num_chunks=num_chunks, min_offload_size=1, show_plan=False, **settings)  # type: ignore[arg-type]
    model = convert(build_tiny_model("llama", dtype=torch.float32), config)
    model(**make_batch(tokens=64)).loss.backward()
    engine = get_engine(model)
    assert engine is not None
    (plan,) = engine.plans._plans.values()
    assert engine.offload.stats().host_peak_bytes == plan_cache.offloaded_bytes(plan)
