"""One kernel for everyone, by name or by what ours would take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from sppo_hf.cli.benchmark import kernels
from sppo_hf.cli.benchmark.kernels import Kernel, choose_kernel
from sppo_hf.planning.config_file import load_config
from tests.planning.shapes import shape_of

CUDA = torch.device("cuda")


def choose(choice: str, device: torch.device = CUDA) -> Kernel:
    shape = shape_of(load_config("llama-3.1-8b"))
    return choose_kernel(choice, device, shape, torch.bfloat16, softcap=False)


def test_named_kernels() -> None:
    kernel = choose("cudnn")
    assert (kernel.ours, kernel.theirs) == ("cudnn", "sdpa")
    assert kernel.sdpa == SDPBackend.CUDNN_ATTENTION
    assert choose("flash").ours == "aten_flash"
    assert choose("efficient").sdpa == SDPBackend.EFFICIENT_ATTENTION
    assert choose("sdpa") == Kernel("sdpa's choice", ours="auto")


@pytest.mark.parametrize(
    ("taken", "theirs", "sdpa"),
    [
        ("aten_flash", "sdpa", SDPBackend.FLASH_ATTENTION),
        ("flash_attention_3", "flash_attention_3", None),
        ("reference", "sdpa", None),
    ],
)
def test_auto_is_what_ours_takes(
    monkeypatch: pytest.MonkeyPatch, taken: str, theirs: str, sdpa: SDPBackend | None
) -> None:
    asked = []

    def select(name: str, requirement: object) -> SimpleNamespace:
        asked.append((name, requirement))
        return SimpleNamespace(backend=SimpleNamespace(name=taken))

    monkeypatch.setattr(kernels, "select_backend", select)
    assert choose("auto") == Kernel(taken, ours=taken, theirs=theirs, sdpa=sdpa)
    ((name, requirement),) = asked
    assert (name, requirement.qk_head_size, requirement.gqa_ratio) == ("auto", 128, 4)
    assert not requirement.window


def test_on_a_cpu_there_is_one_only() -> None:
    cpu = torch.device("cpu")
    assert choose("auto", cpu) == Kernel("cpu_flash", ours="cpu_flash")


def test_others_are_narrowed_down_for_the_run() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with Kernel("flash", ours="aten_flash", sdpa=SDPBackend.FLASH_ATTENTION).in_use():
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    with Kernel("sdpa's choice", ours="auto").in_use():
        assert torch.backends.cuda.math_sdp_enabled()
