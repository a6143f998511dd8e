"""Layers in tiles: what runs in them, what they hold, and what is left alone."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.cpu_heap import CpuChunkArena
from sppo_hf.engine.recompute import RecomputedLayer
from sppo_hf.engine.sliced_calls import NotTokenWise, token_wise
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.errors import ConfigError
from sppo_hf.planning.plan import Plan
from sppo_hf.testing.exactness import compare, run_batch
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.sweeps import sample, turn

TOKENS, TILE = 24, 6


def _config(**settings: Any) -> SPPOConfig:
    wanted = {"num_chunks": 1, "order": "by_layer", "offload": "none", "layer_tile_tokens": TILE}
    return SPPOConfig(**{**wanted, **settings})


class _MostRows(TorchDispatchMode):
    """Notes how many rows the largest result of a width has; weights have as many as given."""

    def __init__(self, width: int, of_weights: int) -> None:
        super().__init__()
        self._width = width
        self._of_weights = of_weights
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, Tensor) and x.ndim and x.shape[-1] == self._width:
                rows = x.numel() // self._width
                self.most = max(self.most, 0 if rows == self._of_weights else rows)
        return out


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_intermediate_of_an_mlp_has_more_tokens_than_a_tile(recompute: str) -> None:
    # 80 is no other width, and not the number of anything.
    model = build_tiny_model("llama", dtype=torch.float32, intermediate_size=80)
    convert(model, _config(recompute=recompute))
    loss = model(**make_batch(tokens=TOKENS)).loss  # finds out what is token-wise
    with _MostRows(80, of_weights=model.config.hidden_size) as seen:
        loss = model(**make_batch(tokens=TOKENS)).loss
        loss.backward()
    assert seen.most == TILE


@pytest.mark.parametrize(("chunks", "parts"), [(1, [TILE] * 4), (2, [TOKENS // 2] * 2)])
def test_the_final_norm_runs_in_tiles_or_chunks(chunks: int, parts: list[int]) -> None:
    model: Any = build_tiny_model("llama", dtype=torch.float32)
    norm, tokens = model.model.norm, list[int]()

    class NotedRMSNorm(type(norm)):  # type: ignore[misc]
        def forward(self, hidden: Tensor) -> Any:
            tokens.append(hidden.shape[1])
            return super().forward(hidden)

    norm.__class__ = NotedRMSNorm
    convert(model, _config(num_chunks=chunks, recompute="full"))
    model(**make_batch(tokens=TOKENS))  # finds out what is token-wise
    tokens.clear()
    loss = model(**make_batch(tokens=TOKENS)).loss
    assert tokens == parts
    loss.backward()
    assert tokens == parts * 2, "backward runs them again"


def test_a_recomputed_layer_keeps_nothing_of_its_tiles() -> None:
    alive: dict[bool, int] = {}
    for tile in (0, TILE):
        model = build_tiny_model("llama", dtype=torch.float32)
        convert(model, _config(recompute="full", layer_tile_tokens=tile))
        batch = make_batch(tokens=TOKENS)
        model(**batch)
        gc.collect()
        before = _live_bytes()
        loss = model(**batch).loss
        alive[tile > 0] = _live_bytes() - before
        del loss
    assert alive[True] <= alive[False]


def _live_bytes() -> int:
    seen: dict[int, int] = {}
    for x in gc.get_objects():
        if type(x) is Tensor and x.dtype is not torch.uint8:  # not states of generators
            storage = x.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


@pytest.mark.parametrize(
    ("scenario", "recompute"),
    [
        (scenario, recompute)
        for index, scenario in enumerate(
            ["packed", "padded", "by_chunk", "chunks by layer", "first"]
        )
        for recompute in turn(["full", "selective"], 2, index)
    ],
)
def test_exact(scenario: str, recompute: str) -> None:
    model, settings = build_tiny_model("gemma3_text"), dict[str, Any]()
    batch: dict[str, Any] = make_batch(tokens=TOKENS)
    if scenario == "packed":
        model = build_tiny_model("qwen3")
        lengths = (5, 11, 8)
        positions = torch.cat([torch.arange(n) for n in lengths])
        # With a cache, Transformers takes them for one document.
        batch = {**batch, "position_ids": positions[None], "use_cache": False}
    elif scenario == "padded":
        batch = make_batch(rows=4, tokens=TOKENS, padding=(0, 9, 22, 3), left_padding=(6, 0, 0, 9))
    elif scenario == "by_chunk":
        settings = {"num_chunks": 2, "order": "by_chunk", "layer_tile_tokens": 5}
    elif scenario == "chunks by layer":
        settings = {"num_chunks": 2, "layer_tile_tokens": 5}
    else:  # nothing in front of the first adapters needs gradients
        model = add_lora(model)
    report = compare(model, batch, _config(recompute=recompute, **settings))
    assert report.exact, str(report)


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        (family, recompute)
        for family in sample(["llama", "gemma3_text"], 2)
        for recompute in sample(["full", "selective"], 2)
    ]
    # Its layers drop out what the MLP, which runs in tiles, has returned.
    + [("phi", "selective")],
)
def test_dropout_repeats_itself_in_tiles(family: str, recompute: str) -> None:
    """Random numbers of tiles are others than the whole layer's, but the same in both forwards."""
    gradients: list[dict[str, Tensor | None]] = []
    for mode in ("none", recompute):
        dropout = {"resid_pdrop": 0.3} if family == "phi" else {}
        model = add_lora(build_tiny_model(family, num_hidden_layers=2, **dropout)).train()
        adapted: Any
        for adapted in model.modules():
            if hasattr(adapted, "lora_dropout"):
                adapted.lora_dropout["default"] = nn.Dropout(0.3)
        convert(model, _config(recompute=mode))
        torch.manual_seed(5)
        run_batch(model, make_batch(tokens=TOKENS))  # finds out what is token-wise
        torch.manual_seed(5)
        gradients.append(dict(run_batch(model, make_batch(tokens=TOKENS)).by_name))
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-9, atol=1e-12)


def test_rounding_to_tf32_is_token_wise_where_it_is_allowed() -> None:
    class Rounded(nn.Module):
        """Other kernels for few tokens may multiply otherwise."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * (1 + 2e-4 * (x.shape[1] < 8))

    layer, hidden = nn.Sequential(Rounded()), torch.zeros(1, TOKENS, 32)
    with pytest.raises(NotTokenWise):
        token_wise(layer, hidden)
    matmuls = torch.backends.mkldnn.matmul
    before, matmuls.fp32_precision = matmuls.fp32_precision, "tf32"
    try:
        assert [part.name for part in token_wise(layer, hidden)] == ["0"]
    finally:
        matmuls.fp32_precision = before


def test_what_is_token_wise() -> None:
    model: Any = add_lora(build_tiny_model("mixtral"))
    layer: Any = next(m for m in model.modules() if type(m).__name__ == "MixtralDecoderLayer")
    hidden = torch.randn(1, 3, model.config.hidden_size, dtype=torch.float64)
    found = {part.name for part in token_wise(layer, hidden)}
    adapted = {name for name in found if name.startswith("self_attn.")}
    assert found - adapted == {"mlp", "input_layernorm", "post_attention_layernorm"}
    assert adapted, "adapters have temporaries; products of plain linear layers have none"
    layer.mlp.gate.register_forward_hook(lambda *_: None)
    hooked = {part.name for part in token_wise(layer, hidden)}
    assert "mlp" not in hooked, "hooks of others see calls over all tokens"


def test_nothing_within_a_compiled_module_runs_in_tiles() -> None:
    model: Any = add_lora(build_tiny_model("llama"))
    layer: Any = next(m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer")
    hidden = torch.randn(1, 3, model.config.hidden_size, dtype=torch.float64)
    assert any(part.name == "mlp" for part in token_wise(layer, hidden))
    layer.mlp._compiled_call_impl = layer.mlp._call_impl  # what `layer.mlp.compile()` sets
    names = {part.name for part in token_wise(layer, hidden)}
    assert names, "other modules do"
    assert not any(name.startswith("mlp") for name in names)


class _Capacity(nn.Module):
    """An MLP that drops the tokens that come too late."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        early = torch.arange(x.shape[1]) < max(2, x.shape[1] // 2)
        return self.mlp(x) * early[:, None]


class _Plans(StepObserver):
    def __init__(self) -> None:
        self.seen: list[Plan] = []

    def on_plan(self, plan: Plan, model_name: str) -> None:
        self.seen.append(plan)


def test_a_module_that_mixes_tokens_ends_tiles_with_a_line_in_the_plan() -> None:
    model = build_tiny_model("llama")
    layer: Any = model.model.layers[1]
    layer.mlp = _Capacity(layer.mlp)
    with pytest.warns(UserWarning, match="layer_tile_tokens: 0, because mlp .* on a part"):
        report = compare(model, make_batch(tokens=TOKENS), _config(recompute="full"))
    assert report.exact, str(report)
    plans = _Plans()
    convert(model, _config(recompute="full"), observer=plans)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            model(**make_batch(tokens=TOKENS))
    assert [plan.layer_tile_tokens for plan in plans.seen] == [TILE, 0]
    assert any("because mlp" in line for line in plans.seen[1].warnings)


def test_nothing_is_left_on_the_model_or_in_the_offload_engine() -> None:
    model = build_tiny_model("llama")
    convert(model, _config(recompute="selective", offload="full", min_offload_size=1))
    loss = model(**make_batch(tokens=TOKENS)).loss
    assert not any("forward" in part.__dict__ for part in model.model.layers.modules())
    engine = get_engine(model)
    assert engine is not None
    assert engine.offload.stats().live_handles > 0
    gc.disable()
    try:
        del loss
        assert engine.offload.stats().live_handles == 0, "something waits for the collector"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "others",
    [{"pp_size": 2, "order": "auto"}, {"sp_size": 2, "order": "auto"}, {"compile": True}],
)
def test_settings_that_contradict_tiles_are_refused(others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"layer_tile_tokens=6 contradicts {next(iter(others))}"):
        _config(**others)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "cohere"])
def test_what_is_rebuilt_is_what_the_profile_says(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    rebuilt: dict[str, int] = {}
    check = RecomputedLayer._check_repeated

    def noted(saved: RecomputedLayer, again: list[Tensor]) -> None:
        check(saved, again)
        storages = {x.data_ptr(): x for x in map(Tensor.untyped_storage, again)}
        rebuilt[saved.label] = sum(x.nbytes() for key, x in storages.items() if key not in others)

    monkeypatch.setattr(RecomputedLayer, "_check_repeated", noted)
    # Slabs of all layers would count as one layer's.
    monkeypatch.setattr(CpuChunkArena, "keep", lambda _self, _kind, tensor: tensor.detach())
    sizes: list[dict[str, int]] = []
    for tile in (0, TILE):
        model = build_tiny_model(family, dtype=torch.float32)
        others = {p.untyped_storage().data_ptr() for p in model.parameters()}
        convert(model, _config(recompute="full", layer_tile_tokens=tile))
        rebuilt.clear()
        model(**make_batch(tokens=TOKENS)).loss.backward()
        sizes.append(dict(rebuilt))
    engine = get_engine(model)
    assert engine is not None
    layer = engine.plans.shape().layers[1]
    assert layer.tiled_bytes > 0
    one = "layer 1, chunk 0"
    less = sizes[0][one] - sizes[1][one]
    assert less == pytest.approx(layer.tiled_bytes * TOKENS, abs=4 * layer.hidden_size * 4), (
        "but for what is made of the weights of four norms"
    )
    inputs = layer.hidden_size * 4 * TOKENS  # of which a tile is a part
    tiles = (size for label, size in sizes[1].items() if label.startswith(f"{one}, "))
    assert max(tiles) - inputs == layer.tile_bytes * TILE
