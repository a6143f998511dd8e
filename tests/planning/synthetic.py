"""Plans and simulated steps with round numbers, to draw where no planner is asked."""

from dataclasses import dataclass
from itertools import pairwise

from sppo_hf.planning.modes import KEEP, OFFLOAD, RECOMPUTE, FrameMode, mode_of
from sppo_hf.planning.moments import MemoryEstimate, Moment
from sppo_hf.planning.plan import DeviceFacts, Plan
from sppo_hf.planning.programme import Budgets
from sppo_hf.planning.tier_bytes import TierBytes
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.simulate import Change, simulate
from sppo_hf.schedule.timeline import Timeline

GIB = 2**30
TOKENS = 131_072
DISK = mode_of("whole", "disk")
NOTHING = TierBytes()
EMPTY = Moment(name="made up", chunk=0, device=NOTHING, host=NOTHING, disk=NOTHING)


def mixed_plan(num_chunks: int, layers: int = 32) -> Plan:
    """Early chunks go to the disk and the host, middle ones are recomputed, the last is kept.

    Chunks get shorter along the sequence, as those of equal cost do.
    """
    cuts = [round(TOKENS * (at / num_chunks) ** 0.7) for at in range(num_chunks + 1)]
    return Plan(
        batch_rows=1,
        bounds=tuple(pairwise(cuts)),
        layer_modes=tuple(_row(chunk, num_chunks, layers) for chunk in range(num_chunks)),
        training=True,
        tile_tokens=512,
        device=DeviceFacts(kind="cuda", name="a GPU"),
        backend_name="reference",
        backend_reason="asked for",
        recompute_reason="asked for",
        offload_reason="asked for",
        estimate=MemoryEstimate(moments=(EMPTY,)),
        budgets=Budgets(device=None, host=None, disk=None),
    )


def _row(chunk: int, num_chunks: int, layers: int) -> tuple[FrameMode, ...]:
    if chunk == num_chunks - 1:
        return (KEEP,) * layers
    disk = layers // 4 if chunk < num_chunks // 4 else 0
    recompute = layers * chunk // (2 * num_chunks)
    rest = layers - disk - recompute
    spread = (
        (DISK,) * disk
        + (OFFLOAD,) * (rest // 2)
        + (mode_of("skeleton", "host"),) * (rest - rest // 2)
    )
    return spread + (RECOMPUTE,) * recompute


@dataclass(frozen=True)
class Step:
    """What `simulate` asks of a plan, made up: seconds and bytes grow with a chunk's tokens."""

    plan: Plan
    copy_slowness: float = 1.0

    def tokens(self, action: Action) -> int:
        return self.plan.chunk_lengths[action.unit]

    def mode(self, action: Action) -> FrameMode:
        return self.plan.mode(action.layer or 0, action.unit)

    def frame_bytes(self, action: Action) -> int:
        return self.tokens(action) * (12_000 if self.mode(action).recompute else 120_000)

    def seconds(self, action: Action) -> float:
        """Compute by chunk, since partition "flops" balances it; copies by bytes."""
        if action.kind in "FB":
            per_chunk = 16.0 / self.plan.num_chunks / self.plan.num_layers
            return per_chunk * (1.0 if action.kind == "F" else 2.2)
        rate = {"D": 50e9, "H": 50e9, "S": 5e9, "L": 6e9}[action.kind]
        return self.copy_slowness * self.frame_bytes(action) / rate

    def after(self, action: Action) -> list[Action]:
        to_disk = self.mode(action).tier == "disk"
        needed = {"D": "F", "S": "D", "L": "S", "H": "L" if to_disk else "D"}.get(action.kind)
        if action.kind == "B" and self.mode(action).offload:
            needed = "H"
        found = [] if needed is None else [action._replace(kind=needed)]
        if action.kind in "HL":
            # Not before the backward of the chunk after the next.
            behind = action.unit + 2
            if behind < self.plan.num_chunks:
                found.append(action._replace(kind="B", unit=behind))
        return found

    def changes(self, action: Action) -> list[Change]:
        size = self.frame_bytes(action)
        kv = self.tokens(action) * 4096
        to_disk = self.mode(action).tier == "disk"
        work = self.tokens(action) * 200_000
        if action.kind == "F":
            return [
                Change("device", "kv", kv, "end"),
                Change("device", "frames", size),
                Change("device", "chunk_workspace", work),
                Change("device", "chunk_workspace", -work, "end"),
            ]
        if action.kind == "B":
            return [
                Change("device", "kv", -kv, "end"),
                Change("device", "frames", -size, "end"),
                Change("device", "chunk_workspace", work),
                Change("device", "chunk_workspace", -work, "end"),
            ]
        below = "staging" if to_disk else "frames"
        return {
            "D": [Change("host", below, size), Change("device", "frames", -size, "end")],
            "H": [Change("device", "frames", size), Change("host", below, -size, "end")],
            "S": [Change("disk", "frames", size), Change("host", below, -size, "end")],
            "L": [Change("host", below, size), Change("disk", "frames", -size, "end")],
        }[action.kind]

    def simulate(self) -> Timeline:
        chunks, layers = self.plan.num_chunks, self.plan.num_layers
        forward = [
            Action("F", 0, chunk, layer) for chunk in range(chunks) for layer in range(layers)
        ]
        backward = [action._replace(kind="B") for action in reversed(forward)]
        gone = [action for action in forward if self.mode(action).offload]
        to_disk = [action for action in gone if self.mode(action).tier == "disk"]
        return simulate(
            {
                "compute": forward + backward,
                "D2H": [action._replace(kind="D") for action in gone],
                "H2D": [action._replace(kind="H") for action in reversed(gone)],
                "disk write": [action._replace(kind="S") for action in to_disk],
                "disk read": [action._replace(kind="L") for action in reversed(to_disk)],
            },
            seconds=self.seconds,
            after=self.after,
            changes=self.changes,
            standing=[
                Change("device", "weights", 15 * GIB),
                Change("device", "gradients", 2 * GIB),
            ],
        )
