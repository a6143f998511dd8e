"""PEFT adapters of a cut model: saved by PEFT itself, with all stages' tensors, and read back.

Adapters are small, so the first rank gathers them and writes one file, as PEFT has it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from sppo_hf.errors import ConfigError
from sppo_hf.runtime.checkpoint import Place, write_file
from sppo_hf.runtime.checkpoint_files import reading, refuse_other_files

_FILE = "adapter_model.safetensors"


def wraps_adapters(model: nn.Module) -> bool:
    """Whether `model` is a PEFT model, of which the adapters alone are saved."""
    with contextlib.suppress(ImportError):
        from peft import PeftModel

        return isinstance(model, PeftModel)
    return False


def save_adapters(model: Any, folder: Path, place: Place) -> None:
    """Write all adapters so that `PeftModel.from_pretrained` loads them.

    Every rank of the pipeline calls this.

    Args:
        model: A PEFT model, cut.
        folder: Exists; an adapter that is not named "default" gets a folder in it, as PEFT does.
        place: This process.
    """
    from peft import get_peft_model_state_dict

    own: dict[str, dict[str, Tensor]] = {}
    for name in model.peft_config:
        state = get_peft_model_state_dict(model, model.state_dict(), adapter_name=name)
        own[name] = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    parts = place.gather(own)
    if not place.leads:
        return
    # Configurations and the card are PEFT's own; of the tensors it finds this stage's here.
    type(model).save_pretrained(model, folder)
    for name in model.peft_config:
        whole = {key: value for part in parts for key, value in part[name].items()}
        write_file(whole, _folder_of(folder, name) / _FILE)


def load_adapters(model: Any, folder: Path) -> None:
    """Read the adapters' tensors that this process holds, in place.

    Raises:
        ConfigError: An adapter, or a tensor of it, is not in the folder, or its file is damaged.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    for name in model.peft_config:
        file = _folder_of(folder, name) / _FILE
        if not file.is_file():
            raise ConfigError(
                f"{str(file)!r} is missing, so the adapter {name!r} cannot be read. Allowed: "
                "checkpoints of a model with the same adapters. Remedy: build the model with the "
                "adapters that were saved."
            )
        with reading(file):
            refuse_other_files(file)
            saved = load_file(file)
        own = set(get_peft_model_state_dict(model, model.state_dict(), adapter_name=name))
        if missing := sorted(own - set(saved)):
            raise ConfigError(
                f"{str(file)!r} lacks {len(missing)} tensors that this rank holds, among them "
                f"{missing[:3]}. Allowed: checkpoints of a model with the same adapters. Remedy: "
                "build the model with the adapters that were saved."
            )
        with reading(file):
            set_peft_model_state_dict(model, {key: saved[key] for key in own}, adapter_name=name)


def _folder_of(folder: Path, adapter: str) -> Path:
    return folder if adapter == "default" else folder / adapter
