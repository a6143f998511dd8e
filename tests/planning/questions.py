"""Questions about Llama-3.1-8B with LoRA on half of the shipped H100, for tests of answers."""

from functools import cache
from typing import Any

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.plan import PlanRequest
from sppo_hf.planning.plan_request import PlanResult, question_for, request_plan
from tests.planning.shapes import by_hand, llama_config

GIB = 2**30
TOO_LONG_TOKENS = 524_288
"""More than fits without a disk."""


def question(total_tokens: int, *, disk: bool = False, **settings: Any) -> PlanRequest:
    """40 GiB on the device, 64 GiB in the host, and 64 GiB of disk where asked.

    A small machine, because its limits are found sooner.
    """
    budgets: dict[str, Any] = {"device_memory": 40 * GIB, "host_memory": 64 * GIB}
    if disk:
        budgets |= {"disk_memory": 64 * GIB, "offload_dir": "a disk"}
    return question_for(
        llama_config(),
        SPPOConfig(**{**budgets, **settings}),
        profile=load_profile("h100"),
        total_tokens=total_tokens,
        lora_rank=16,
        trace=by_hand,
    )


@cache
def answer(total_tokens: int) -> PlanResult:
    """The answer to the plain question of a length; answering takes a second or two."""
    return request_plan(question(total_tokens))
