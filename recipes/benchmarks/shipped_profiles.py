"""Traces the model profiles that are shipped with the package, into `planning/model_profiles`.

    python recipes/benchmarks/shipped_profiles.py

Run it when a model is added to `planning/models`, or when a new Transformers computes one
differently, which `tests/engine/test_trace_profile.py` detects. Takes seconds, and no weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sppo_hf.planning
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.planning.config_file import load_config, shipped_models
from sppo_hf.planning.model_profile import LoraShape, Training, config_digest, profiles_to_json

# Profiles of other ranks are interpolated linearly from two.
PLAIN = (None, LoraShape(rank=8), LoraShape(rank=16))
AUTOCAST = (LoraShape(rank=8, autocast=True), LoraShape(rank=16, autocast=True))
TRAININGS = {(2, 2): (*PLAIN, *AUTOCAST), (4, 4): PLAIN, (2, 4): (None, *AUTOCAST)}
"""Trainings by (bytes of an element in matmuls, bytes of a weight): bf16, float32, autocast."""
WITH_KERNELS = ((2, 2), (2, 4))
"""Those that are shipped with Liger's kernels too."""
GATHERED = tuple(
    Training(dtype_bytes=2, parameter_bytes=2, lora=LoraShape(rank=rank, dtype_bytes=2))
    for rank in (8, 16)
)
"""Adapters as FSDP2 gathers them, under which layers have no kernels."""


def main() -> None:
    """Write one file for each model."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    folder = Path(sppo_hf.planning.__file__).with_name("model_profiles")
    for name in shipped_models():
        config = load_config(name)
        trainings = [
            Training(dtype_bytes=size, parameter_bytes=wide, lora=lora, layer_kernels=kernels)
            for (size, wide), adapters in TRAININGS.items()
            for kernels in (False, True)[: 1 + ((size, wide) in WITH_KERNELS)]
            for lora in adapters
        ]
        profiles = tuple(trace_config(config, one) for one in (*trainings, *GATHERED))
        text = profiles_to_json(config_digest(config), profiles)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
