"""Questions about a fourth of Llama-3.1-8B with LoRA on a small H100, for tests of answers."""

from dataclasses import replace
from functools import cache
from typing import Any

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.feasibility import PlanResult, assess_request, request_for
from sppo_hf.planning.hardware import Curve, HardwareProfile, load_profile
from sppo_hf.planning.plan import PlanRequest
from tests.planning.shapes import by_hand, llama_config

GIB = 2**30
_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def _tflops(*rates: float) -> dict[str, Curve]:
    return {"bfloat16": Curve(tuple(zip(_TOKENS, (rate * 1e12 for rate in rates), strict=True)))}


H100: HardwareProfile = replace(
    load_profile("h100"),
    matmul_flops=_tflops(150, 250, 380, 500, 620, 660, 670),
    attention_forward_flops=_tflops(80, 140, 220, 290, 345, 370, 380),
    attention_backward_flops=_tflops(54.4, 95.2, 150, 197, 235, 252, 258),
)
"""With FlashAttention-2, whatever speed the shipped one has: answers are near its limits."""

TOO_LONG_TOKENS = 524_288
"""More than fits without a disk."""


def question(
    total_tokens: int, *, disk: bool = False, layers: int = 8, **settings: Any
) -> PlanRequest:
    """12 GiB on the device, 16 GiB in the host, and 16 GiB of disk where asked.

    A small machine, because its limits are found sooner.
    """
    budgets: dict[str, Any] = {"device_memory": 12 * GIB, "host_memory": 16 * GIB}
    if disk:
        budgets |= {"disk_memory": 16 * GIB, "offload_dir": "a disk"}
    return request_for(
        llama_config(num_hidden_layers=layers),
        SPPOConfig(**{**budgets, **settings}),
        profile=H100,
        total_tokens=total_tokens,
        lora_rank=16,
        trace=by_hand,
    )


@cache
def answer(total_tokens: int) -> PlanResult:
    """The answer to the plain question of a length; answering takes a second or two."""
    return assess_request(question(total_tokens))
