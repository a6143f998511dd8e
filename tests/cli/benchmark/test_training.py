"""Models as they are asked for: dtype, adapters, layers, and the same weights for everyone."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from sppo_hf.cli.benchmark import training as kernels
from sppo_hf.cli.benchmark.contenders import parse
from sppo_hf.cli.benchmark.driver import model_shape
from sppo_hf.cli.benchmark.results import Job
from sppo_hf.cli.benchmark.training import (
    Kernel,
    RandomRows,
    build_model,
    choose_kernel,
    make_plugin,
    make_trainer,
    model_config,
    tile_mlps,
)
from sppo_hf.errors import ConfigError
from sppo_hf.planning.config_file import load_config
from tests.cli.benchmark.tiny import tiny_job
from tests.planning.shapes import shape_of

KERNEL = Kernel("cpu_flash", attention_backend="cpu_flash")


def build(folder: Path, **changes: Any) -> torch.nn.Module:
    job = tiny_job(folder, **changes)
    return build_model(job, model_config(job), KERNEL)


def test_the_same_weights_for_everyone(tmp_path: Path) -> None:
    first, second = (build(tmp_path, contender=name).state_dict() for name in ("plain", "ideal"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build(tmp_path, seed=1).state_dict()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16"])
def test_dtypes(tmp_path: Path, lora_dtype: str) -> None:
    pytest.importorskip("peft")
    model = build(tmp_path, dtype="bfloat16", lora_rank=2, lora_dtype=lora_dtype)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2, "two matrices on each of seven linear layers"
    assert {str(p.dtype) for p in trained.values()} == {f"torch.{lora_dtype}"}
    frozen = {p.dtype for name, p in model.named_parameters() if name not in trained}
    assert frozen == {torch.bfloat16}
    job = tiny_job(tmp_path, dtype="bfloat16", lora_rank=2, lora_dtype=lora_dtype)
    shape = model_shape(job, model_config(job))
    assert shape.trainable_parameters == sum(p.numel() for p in trained.values())
    assert shape.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())


def test_fewer_layers(tmp_path: Path) -> None:
    model: Any = build(tmp_path, layers=1)
    assert len(model.model.layers) == 1
    assert model.training


def test_rows_are_random_and_repeat() -> None:
    rows = RandomRows(3, 16, vocab_size=50, seed=4)
    assert len(rows) == 3
    assert torch.equal(rows[1]["input_ids"], rows[1]["labels"])
    assert torch.equal(rows[1]["labels"], RandomRows(3, 16, vocab_size=50, seed=4)[1]["labels"])
    assert not torch.equal(rows[0]["labels"], rows[1]["labels"])
    assert int(torch.stack([row["labels"] for row in (rows[0], rows[2])]).max()) < 50


def trainer_of(job: Job, model: torch.nn.Module) -> Any:
    return make_trainer(
        job,
        model,
        KERNEL,
        model_shape(job, model_config(job)),
        contender=parse(job.contender),
        plugin=None,
        num_steps=job.steps,
        callbacks=[],
        folder=str(Path(job.model).parent / "out"),
    )


def test_the_long_context_recipe_of_trl_trains_the_same_rows(tmp_path: Path) -> None:
    """TRL's loss in chunks equals the plain loss; on a CPU, so without its offloading."""
    pytest.importorskip("trl")
    losses = []
    for name in ("checkpointing", "trl-long"):
        job = tiny_job(tmp_path, name, steps=2)
        model: Any = build_model(job, model_config(job), KERNEL)
        seen: list[float] = []
        model.register_forward_hook(lambda *args, seen=seen: seen.append(float(args[-1].loss)))
        trainer = trainer_of(job, model)
        trainer.train()
        assert type(trainer).__name__ == {"trl-long": "SFTTrainer"}.get(name, "Trainer")
        losses.append(seen[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("contender", "given"),
    [
        ("ideal+liger", {"fused_linear_cross_entropy": False}),
        ("plain+liger", None),
        ("ideal", None),
    ],
)
def test_the_ideals_loss_is_not_ligers(
    contender: str, given: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger's loss would put a forward of its own in the place of the ideal's."""
    job = tiny_job(tmp_path, contender)
    found: list[Any] = []

    def noted(**settings: Any) -> Any:
        found.append(settings)
        return SimpleNamespace()

    monkeypatch.setattr(kernels, "Trainer", noted)
    monkeypatch.setattr(kernels, "Arguments", SimpleNamespace)
    trainer_of(job, build_model(job, model_config(job), KERNEL))
    (arguments,) = (settings["args"] for settings in found)
    assert arguments.use_liger_kernel == contender.endswith("+liger")
    assert arguments.liger_kernel_config == given


class TiledMLP(torch.autograd.Function):
    """DeepSpeed's: runs a function tile by tile, and again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Any, module: Any, x: Any, shards: int, trained: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.function, ctx.module, ctx.shards = function, module, shards
        with torch.no_grad():
            return torch.cat([function(module, tile) for tile in x.chunk(shards, dim=-2)], dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            tiles = leaf.chunk(ctx.shards, dim=-2)
            for tile, grad in zip(tiles, grads[0].chunk(ctx.shards, dim=-2), strict=True):
                ctx.function(ctx.module, tile).backward(grad)
        return None, None, leaf.grad, None, None


def test_deepspeeds_tiles_are_put_around_every_mlp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(tmp_path, "alst")
    place = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    monkeypatch.setitem(sys.modules, place, SimpleNamespace(TiledMLP=TiledMLP))
    for part in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.sequence_parallel"):
        monkeypatch.setitem(sys.modules, part, SimpleNamespace())
    config = model_config(job)
    model: Any = build_model(job, config, KERNEL)
    ids = torch.arange(3 * config.hidden_size)[None] % config.vocab_size
    gradients = []
    for tiled in (False, True):
        if tiled:
            tile_mlps(model)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)
    assert sum("forward" in m.__dict__ for m in model.modules()) == config.num_hidden_layers


def test_settings_reach_the_plugin(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, device_memory=0.5, host_memory="3GiB", hardware="h100")
    plugin = make_plugin(job, parse("sppo-sppo"), KERNEL)
    assert plugin is not None
    config = plugin.config
    assert (config.offload, config.attention_backend) == ("sppo", "cpu_flash")
    assert (config.device_memory, config.host_memory) == (0.5, "3GiB")
    assert (config.hardware, config.show_plan) == ("h100", False)
    assert make_plugin(job, parse("plain"), KERNEL) is None
    with pytest.raises(ConfigError, match="device_memory"):
        make_plugin(job.replace(device_memory="much"), parse("sppo-auto"), KERNEL)


CUDA = torch.device("cuda")


def choose(choice: str, device: torch.device = CUDA) -> Kernel:
    shape = shape_of(load_config("llama-3.1-8b"))
    return choose_kernel(choice, device, shape, torch.bfloat16, softcap=False)


def test_named_kernels() -> None:
    kernel = choose("cudnn")
    assert (kernel.attention_backend, kernel.attn_implementation) == ("cudnn", "sdpa")
    assert kernel.sdpa == SDPBackend.CUDNN_ATTENTION
    assert choose("flash").attention_backend == "aten_flash"
    assert choose("efficient").sdpa == SDPBackend.EFFICIENT_ATTENTION
    assert choose("sdpa") == Kernel("sdpa's choice", attention_backend="auto")


@pytest.mark.parametrize(
    ("taken", "theirs", "sdpa"),
    [
        ("aten_flash", "sdpa", SDPBackend.FLASH_ATTENTION),
        ("flash_attention_3", "flash_attention_3", None),
        ("reference", "sdpa", None),
    ],
)
def test_auto_is_the_kernel_of_sppo(
    monkeypatch: pytest.MonkeyPatch, taken: str, theirs: str, sdpa: SDPBackend | None
) -> None:
    asked = []

    def select(name: str, requirement: object) -> SimpleNamespace:
        asked.append((name, requirement))
        return SimpleNamespace(backend=SimpleNamespace(name=taken))

    monkeypatch.setattr(kernels, "select_backend", select)
    assert choose("auto") == Kernel(
        taken, attention_backend=taken, attn_implementation=theirs, sdpa=sdpa
    )
    ((name, requirement),) = asked
    assert (name, requirement.qk_head_size, requirement.gqa_ratio) == ("auto", 128, 4)
    assert not requirement.window


def test_a_cpu_has_one_kernel() -> None:
    cpu = torch.device("cpu")
    assert choose("auto", cpu) == Kernel("cpu_flash", attention_backend="cpu_flash")


def test_the_kernel_is_for_the_first_layer_with_attention() -> None:
    """Hybrids begin with recurrent layers."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    shape = shape_of(load_config("llama-3.1-8b"))
    recurrent = dataclasses.replace(shape.layers[0], num_heads=0, num_kv_heads=0)
    hybrid = dataclasses.replace(shape, layers=(recurrent, *shape.layers[1:]))
    kernel = choose_kernel("auto", cpu, hybrid, dtype, softcap=False)
    assert kernel == Kernel("cpu_flash", attention_backend="cpu_flash")
    nowhere = dataclasses.replace(shape, layers=(recurrent,))
    kernel = choose_kernel("auto", cpu, nowhere, dtype, softcap=False)
    assert kernel == Kernel("none", attention_backend="auto")


def test_scaled_dot_product_attention_is_restricted_for_the_run() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with Kernel("flash", attention_backend="aten_flash", sdpa=SDPBackend.FLASH_ATTENTION).in_use():
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    with Kernel("sdpa's choice", attention_backend="auto").in_use():
        assert torch.backends.cuda.math_sdp_enabled()
