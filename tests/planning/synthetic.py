"""Plans of mixed modes, and their simulated steps, to draw where no solver is asked."""

from dataclasses import fields
from itertools import pairwise

from sppo_hf.planning.activation_modes import KEEP, ActivationMode, mode_of
from sppo_hf.planning.choices import DeviceFacts
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.lowering import estimate, lower
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.plan import Plan
from sppo_hf.schedule.timeline import Timeline
from tests.planning.modes import OFFLOAD, RECOMPUTE
from tests.planning.profiles import PROFILE, changed
from tests.planning.shapes import llama_config, shape_of, tiny_shape

GIB = 2**30
TOKENS = 131_072
DISK = mode_of("whole", "disk")


def mixed_plan(num_chunks: int, layers: int = 32) -> Plan:
    """Early chunks go to the disk and the host, middle ones are recomputed, the last is kept.

    Chunks get shorter along the sequence, as those of equal cost do.
    """
    cuts = [round(TOKENS * (at / num_chunks) ** 0.7) for at in range(num_chunks + 1)]
    decisions = Decisions(
        batch_rows=1,
        bounds=tuple(pairwise(cuts)),
        layer_modes=tuple(_row(chunk, num_chunks, layers) for chunk in range(num_chunks)),
        training=True,
        tile_tokens=512,
    )
    return Plan(
        **{field.name: getattr(decisions, field.name) for field in fields(decisions)},
        shape=tiny_shape(num_hidden_layers=layers),
        device=DeviceFacts(kind="cuda", name="a GPU"),
        backend_name="reference",
        backend_reason="asked for",
        recompute_reason="asked for",
        offload_reason="asked for",
        estimate=estimate(tiny_shape(num_hidden_layers=layers), decisions),
        budgets=Budgets(device=None, host=None, disk=None),
    )


def _row(chunk: int, num_chunks: int, layers: int) -> tuple[ActivationMode, ...]:
    if chunk == num_chunks - 1:
        return (KEEP,) * layers
    disk = layers // 4 if chunk < num_chunks // 4 else 0
    recompute = layers * chunk // (2 * num_chunks)
    rest = layers - disk - recompute
    spread = (
        (DISK,) * disk
        + (OFFLOAD,) * (rest // 2)
        + (mode_of("inputs", "host"),) * (rest - rest // 2)
    )
    return spread + (RECOMPUTE,) * recompute


def simulated(plan: Plan, copy_slowness: float = 1.0) -> Timeline:
    """A plan's step on a model of its size, with the bytes of every tier."""
    shape = shape_of(llama_config(num_hidden_layers=plan.num_layers))
    rates = {
        name: getattr(PROFILE, name) / copy_slowness
        for way in ("d2h", "h2d")
        for name in (f"{way}_bytes_per_second", f"both_{way}_bytes_per_second")
    }
    cost = ModelCost(shape=shape, profile=changed(**rates), dtype_name="bfloat16")
    return lower(plan, cost).simulate(with_bytes=True)
