"""Plans drawn at random are exact, whatever the planner decides.

Drawn are: what each layer saves of a chunk (everything, matmuls, the layer's input and attention's
output, or its input alone), and on which tier; in the order by chunk, the tier of K/V and the size
of their blocks; in the order by layer, whether each layer's K/V are kept, offloaded or recomputed;
layers whole or in tiles; and how much may be prefetched. Every second family has adapters and
padding, with `--all` each is without and with them.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, seed
from hypothesis import strategies as st
from torch import Tensor, nn

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.activation_modes import all_modes, mode_of
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import TIERS
from sppo_hf.testing.exactness import Gradients, compare, run_reference
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.engine.forced_plans import change_plans
from tests.sweeps import examples, turn

TOKENS = 23
LENGTHS = ((4, 7, 1, 6, 5), (1, 1, 21), (12, 11), (TOKENS,))
# The families whose layers differ most: norms, sinks, latent attention, experts together and in a
# loop, fused and biased projections, keys of other layers, several residual streams.
SHARING_KEYS = ("gemma4_text-shared-kv", "gemma3n_text")
FAMILIES = (
    *("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe", "phi3", "gpt2", "mixtral"),
    *SHARING_KEYS,
)

# Hypothesis first tries the first of everything: that all matmuls are kept and offloaded.
MODES = sorted(all_modes(), key=lambda mode: mode != mode_of("matmuls", "host"))

DECISIONS = st.fixed_dictionaries(
    {
        "lengths": st.sampled_from(LENGTHS),
        "modes": st.lists(st.sampled_from(MODES), min_size=1, max_size=15),
        "kv": st.one_of(
            st.fixed_dictionaries(
                {
                    "kv_tier": st.sampled_from(list(TIERS)),
                    "kv_block_tokens": st.sampled_from((1, 8, TOKENS)),
                }
            ),
            st.lists(st.sampled_from((*TIERS, "recompute")), min_size=1, max_size=3),
        ),
        "layer_tile_tokens": st.sampled_from((0, 5)),
        "max_pending_d2h_bytes": st.sampled_from((None, 0, 3000, 10**9)),
        "max_prefetch_bytes": st.sampled_from((None, 0, 3000, 10**9)),
    }
)


@functools.cache
def _reference(family: str, lora: bool) -> tuple[nn.Module, dict[str, Tensor], Gradients]:
    model = build_tiny_model(family, dtype=torch.float64)
    if lora:
        model = add_lora(model)
    batch = make_batch(rows=2, tokens=TOKENS, padding=(0, 5) if lora else ())
    return model, batch, run_reference(model, batch)


def _for_shared_keys(drawn: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is never planned where layers read keys of others: that these are not kept."""
    modes = [
        dataclasses.replace(mode, saved="inputs") if mode.saved == "hidden" else mode
        for mode in drawn["modes"]
    ]
    kv = drawn["kv"] if isinstance(drawn["kv"], dict) else ["device"]
    return {**drawn, "modes": modes, "kv": kv}


def _force(patch: pytest.MonkeyPatch, drawn: dict[str, Any]) -> None:
    modes, kv = drawn["modes"], drawn["kv"]

    def forced(plan: Plan) -> Plan:
        rows = tuple(
            tuple(modes[(chunk * plan.num_layers + i) % len(modes)] for i in range(plan.num_layers))
            for chunk in range(plan.num_chunks)
        )
        names = ("max_pending_d2h_bytes", "max_prefetch_bytes", "layer_tile_tokens")
        others = {name: drawn[name] for name in names}
        if isinstance(kv, dict):
            return dataclasses.replace(
                plan, layer_modes=rows, order="by_chunk", kv_modes=(), **others, **kv
            )
        kv_modes = tuple(kv[i % len(kv)] for i in range(plan.num_layers))
        return dataclasses.replace(
            plan, layer_modes=rows, order="by_layer", kv_modes=kv_modes, **others
        )

    change_plans(patch, forced)


def _check(family: str, lora: bool, folder: Path, drawn: dict[str, Any]) -> None:
    model, batch, reference = _reference(family, lora)
    if family in SHARING_KEYS:
        drawn = _for_shared_keys(drawn)
    config = SPPOConfig(
        chunk_lengths=drawn["lengths"],
        min_offload_size=1,
        offload_dir=str(folder),
        offload_checksum=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        _force(patch, drawn)
        report = compare(model, batch, config, reference=reference)
    assert report.exact, f"{drawn}\n{report}"
    layers = model.config.get_text_config().num_hidden_layers
    modes, calls = drawn["modes"], layers * len(drawn["lengths"])
    again = sum(modes[call % len(modes)].saved == "hidden" for call in range(calls))
    assert report.attention_forwards == calls + again


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        (family, lora)
        for index, family in enumerate(FAMILIES)
        for lora in turn([False, True], 2, index)
    ],
)
def test_any_plan_is_exact(
    family: str, lora: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(family)

    # Else all families would get the same examples.
    @seed(FAMILIES.index(family) + len(FAMILIES) * lora)
    @examples(2, whole=8)
    @given(drawn=DECISIONS)
    def check(drawn: dict[str, Any]) -> None:
        _check(family, lora, folder, drawn)

    check()
