"""`sppo plan ... --write DIR`: the files with which a run does what was planned.

`accelerate.yaml` says how many processes there are, `sppo.yaml` what each of them does; all that an
answer decides stands there, so that nothing is decided anew. Imports no torch.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sppo_hf.cli.common import PlanningArguments
from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import RECOMPUTE_BY_SAVED
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cluster import ClusterPlan, ClusterQuestion
from sppo_hf.planning.pipeline_cost import PipelineCost
from sppo_hf.planning.plan import Plan, PlanRequest, make_plan, planned_for
from sppo_hf.planning.tiers import HOST
from sppo_hf.reading import write_yaml
from sppo_hf.schedule.generate import MSP, Size, generate

_ACCELERATE, _SPPO = "accelerate.yaml", "sppo.yaml"

# Listed with --json: about three seconds, and 3 MB. A unit has about so many.
_MOST_ACTIONS = 300_000
_KINDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run: its settings, processes and rows."""

    config: SPPOConfig
    """The settings of every process."""

    title: str
    """Model, length and devices, for whoever opens the files."""

    processes: int = 1
    """Of all machines."""

    machines: int = 1
    """As many processes on each."""

    batch_rows: int = 1
    """Rows that a process is given at once."""

    accumulated: int = 1
    """Batches of a step."""

    dtype_name: str = "bfloat16"
    """Dtype of the compute."""

    @property
    def arguments(self) -> str:
        """What the training script must be told."""
        said = f"per_device_train_batch_size {self.batch_rows}"
        if self.accumulated > 1:
            said += f", gradient_accumulation_steps {self.accumulated}"
        return said

    def command(self, folder: Path) -> str:
        """Returns what starts it."""
        words = ["accelerate launch", f"--config_file {folder / _ACCELERATE}"]
        if self.machines > 1:
            words.append("--machine_rank 0 --main_process_ip ADDRESS_OF_THE_FIRST")
        return " ".join([*words, f"-m sppo_hf.run --config {folder / _SPPO} train.py"])

    def write(self, folder: Path) -> None:
        """Writes both files.

        Raises:
            ConfigError: the folder has other files of these names, or cannot be written to.
        """
        texts = {_ACCELERATE: self._accelerate(folder), _SPPO: self._sppo()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                path = folder / name
                if path.exists() and path.read_text(encoding="utf-8") != text:
                    raise ConfigError(
                        f"--write is {str(folder)!r}, which has another {name}. Allowed: a folder "
                        f"without {_ACCELERATE} and {_SPPO}, or with the same ones. Remedy: name "
                        "another folder, or remove them."
                    )
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--write is {str(folder)!r}, which cannot be used: "
                f"{getattr(error, 'strerror', None) or error}. Remedy: name a folder that can be "
                "written to."
            ) from error

    def _accelerate(self, folder: Path) -> str:
        several = self.processes > 1
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(self.dtype_name, "no")
        settings: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU" if several else "NO",
            "mixed_precision": precision,
            "num_machines": self.machines,
            "num_processes": self.processes,
        }
        if self.machines > 1:
            settings |= {
                "machine_rank": 0,
                "main_process_ip": "127.0.0.1",
                "main_process_port": 29500,
                "rdzv_backend": "static",
                "same_network": True,
            }
        head = f"# {self.title}. Start{' on each machine' if self.machines > 1 else ''}:\n"
        return head + f"# {self.command(folder)}\n" + _yaml(settings)

    def _sppo(self) -> str:
        plain = SPPOConfig().to_dict()
        chosen = {
            name: value for name, value in self.config.to_dict().items() if value != plain[name]
        }
        return f"# {self.title}.\n# The training script's: {self.arguments}.\n" + _yaml(chosen)


def launch_of_plan(arguments: PlanningArguments, question: PlanRequest, plan: Plan) -> Launch:
    """Returns the run of one device's plan: its chunks, and the settings that were asked for.

    Which layers leave or are recomputed the run decides as the plan did, from the same settings.
    """
    config = question.config
    return Launch(
        config=config.replace(
            **{"host_memory": None, **_given(arguments, config)},
            **_cut(plan.bounds),
            planned_for=planned_for(question.shape, question.total_tokens),
            num_chunks="auto",
            partition="auto",
        ),
        title=f"{arguments.title}, {question.total_tokens:,} tokens, one device",
        batch_rows=question.batch_rows,
        dtype_name=str(arguments.dtype),
    )


def launch_of_layout(
    arguments: PlanningArguments,
    question: ClusterQuestion,
    base: SPPOConfig,
    plan: ClusterPlan,
    *,
    written: bool,
) -> Launch:
    """Returns the run of a layout: every decision of it as a setting.

    Files (`written`) name a folder where there is a disk.
    """
    layout = plan.layout
    # Of what a node has, what each of its processes may take.
    local = min(layout.devices, question.gpus_per_node)
    given = {
        name: value // local if name in ("host_memory", "disk_memory") else value
        for name, value in _given(arguments, base, written=written).items()
        # Each stage of a pipeline would plan for its own peak, as if all were at theirs at once.
        if layout.stages == 1 or name not in ("host_memory", "disk_memory")
    }
    settings: dict[str, Any] = {
        **given,
        **_cut(plan.bounds),
        "planned_for": planned_for(question.cost.shape, question.total_tokens),
        "recompute": RECOMPUTE_BY_SAVED[layout.saved],
        "offload": layout.offload,
        "offload_kv": "none" if layout.kv_tier == "device" else "full",
    }
    pipeline = layout.stages > 1
    if pipeline:
        settings |= {
            "pp_size": layout.stages,
            "pp_virtual_stages": layout.virtual,
            "pp_layers": [len(held) for held in plan.layers],
        }
        shares = layout.schedule == MSP
        settings |= {"pp_msp": "on"} if shares else {"pp_schedule": layout.schedule}
    if layout.frame_tier != HOST:
        settings["offload_tier"] = layout.frame_tier
    elif layout.offload != "none" and base.offload_dir is not None:
        settings["offload_tier"] = HOST
    processes = layout.stages * layout.replicas * layout.sp
    machines = max(1, -(-processes // question.gpus_per_node))
    if layout.sp > 1:
        settings["sp_size"] = layout.sp
        # The launcher starts as many processes on each machine.
        if machines > 1 and processes // machines % layout.sp:
            settings["sp_across_nodes"] = True
    rows = question.rows // layout.replicas
    return Launch(
        config=SPPOConfig.from_dict(settings),
        title=f"{arguments.title}, {question.total_tokens:,} tokens, {processes} devices",
        processes=processes,
        machines=machines,
        # Rows of a batch pass a pipeline one after the other; a device takes one at a time.
        batch_rows=rows if pipeline else 1,
        accumulated=1 if pipeline else rows,
        dtype_name=str(arguments.dtype),
    )


def actions_of_layout(
    question: ClusterQuestion, single: PlanRequest, launch: Launch, plan: ClusterPlan
) -> list[list[str]] | None:
    """Returns what every rank of one replica does, all rows of it; the others do the same.

    A single stage is a device of its own, whose program lists single layers and one row. None where
    there are more actions than are worth listing.
    """
    layout = plan.layout
    if layout.stages == 1:
        shared = layout.sp > 1
        config = launch.config
        request = replace(
            single,
            # As `sppo_hf.engine.plan_cache` does for ranks that share sequences.
            config=config.replace(order="by_chunk") if shared else config,
            shape=replace(single.shape, sp=layout.sp),
            total_tokens=question.total_tokens,
            batch_rows=1,
            accumulates=launch.accumulated > 1,
            # Of several processes none has its weights on the host by itself.
            on_host=False,
        )
        made = make_plan(request)
        return [[str(action) for action in made.program().actions] for _ in range(layout.sp)]
    rows = question.rows // layout.replicas
    if _KINDS * rows * layout.num_chunks * layout.stages * layout.virtual > _MOST_ACTIONS:
        return None
    schedule = generate(
        layout.schedule, Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    )
    costs = PipelineCost(
        schedule,
        question.cost,
        plan.bounds,
        saved=layout.saved,
        offload=layout.offload,
        frame_tier=layout.frame_tier,
        kv_tier=layout.kv_tier,
    )
    listed = costs.lowered(schedule, reduce=layout.replicas > 1).texts()
    return [texts for texts in listed for _ in range(layout.sp)]


def _given(
    arguments: PlanningArguments, config: SPPOConfig, *, written: bool = True
) -> Mapping[str, Any]:
    """Machine and budgets of the command line, where they were named."""
    given: dict[str, Any] = {
        "device_memory": config.device_memory,
        # What was assumed of a machine is not a setting of it.
        "host_memory": None if arguments.host_memory is None else config.host_memory,
        "hardware": arguments.hardware,
    }
    if config.offload_dir is not None:
        if written and arguments.offload_dir is None:
            raise ConfigError(
                "--write was given with --disk-memory, but without a folder on that disk. "
                "Allowed: with --offload-dir, or without a disk. Remedy: add --offload-dir DIR."
            )
        given |= {"offload_dir": config.offload_dir, "disk_memory": config.disk_memory}
    return {name: value for name, value in given.items() if value is not None}


def _cut(bounds: Bounds) -> Mapping[str, Any]:
    return {"chunk_lengths": [end - start for start, end in bounds]}


def _yaml(settings: Mapping[str, Any]) -> str:
    file = io.StringIO()
    write_yaml(settings, file)
    return file.getvalue()
