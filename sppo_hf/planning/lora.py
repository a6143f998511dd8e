"""LoRA as planning sees it: which linear layers are adapted, by what rank, in which dtype.

Follows what PEFT's LoRA layers do (`result = base(x) + B(A(x)) * scaling`): the frozen layer keeps
no input for a weight gradient; the adapter casts its input to its own dtype and keeps that copy,
once per adapted layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo_hf.errors import ConfigError
from sppo_hf.rules import show

ALL_LINEAR = "all-linear"

_MOST_RANK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """Adapters of one rank on the linear layers of all decoder layers."""

    rank: int
    """Columns of A, rows of B."""

    targets: str | tuple[str, ...] = ALL_LINEAR
    """Names of the adapted modules (`"q_proj"`), or `"all-linear"`: every linear module of the
    decoder layers. Expert weights, which Transformers keeps as one parameter per layer, and routers
    that are no modules are not among them."""

    dtype_bytes: int = 4
    """Bytes of one adapter element. PEFT makes adapters of a 16-bit model float32
    (`autocast_adapter_dtype`)."""

    autocast: bool = False
    """Whether autocast narrows the adapters' products to the model's dtype. Activations are cast up
    to the adapters' dtype and down again, and the narrow copy is what stays."""

    dropout: float = 0.0
    """LoRA's own dropout; above zero its mask and what it lets through are saved too."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _MOST_RANK:
            raise ConfigError(
                f"LoRA's rank is {show(self.rank)}; it is the inner size of a matrix product, so "
                f"give 1 to {_MOST_RANK:,} (16 is common), or no LoRA at all"
            )
        if isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            raise ConfigError(
                f"LoRA's targets are {self.targets!r}; give {ALL_LINEAR!r} or a tuple of module "
                "names such as ('q_proj', 'v_proj')"
            )

    def adapts(self, name: str) -> bool:
        """Whether a linear module of this name is adapted; the empty name never is.

        A fused module goes by its own name ("qkv_proj").
        """
        return bool(name) and (self.targets == ALL_LINEAR or name in self.targets)
