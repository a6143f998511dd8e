"""The contenders by name, and which of them this environment can run.

What a contender does to a model and its Trainer is in `training.py`. Imports no torch.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.util import find_spec

from sppo_hf.errors import ConfigError

CHECKPOINTING, IDEAL = "checkpointing", "ideal"
TODAY = "checkpointing-default"
"""Plain `gradient_checkpointing`, with the attention kernel that PyTorch chooses."""

BASES: dict[str, str] = {
    "plain": "the standard Trainer, nothing else",
    CHECKPOINTING: "the Trainer's gradient (activation) checkpointing",
    TODAY: "the same, whatever kernel scaled_dot_product_attention takes by itself",
    "checkpointing-offload": "the same with offload=True: layer inputs wait in pinned host memory",
    "trl-offload": "TRL's activation offloading around each step, with checkpointing as SFTConfig",
    "trl-long": "TRL's long-context guide: SFTTrainer, loss in chunks, checkpointing with offload",
    "unsloth": "Unsloth's FastLanguageModel and its own checkpointing; for adapters",
    "alst": "DeepSpeed's ALST on one GPU: ZeRO-3, MLPs in tiles, checkpointing with offload, the"
    " ideal's loss",
    "accelerate-cp": "Accelerate's context parallelism, which takes several GPUs",
    "sppo-none": "ours, offload='none'",
    "sppo-full": "ours, offload='full'",
    "sppo-sppo": "ours, offload='sppo'",
    "sppo-auto": "ours, offload='auto'",
    IDEAL: "base model plus tiled head and loss, everything kept, no hooks: a bound, not a choice",
}
"""Names of contenders and their descriptions; `EXTRAS` has the suffixes that names may carry."""

LIGER, TILED = "+liger", "+tiled"
THEIRS = ("plain", CHECKPOINTING, "checkpointing-offload", "trl-offload")
OURS = ("sppo-none", "sppo-full", "sppo-sppo", "sppo-auto")
EXTRAS: dict[str, tuple[str, ...]] = {
    LIGER: (*THEIRS, *OURS, IDEAL),
    # Logits of the whole sequence exhaust the memory of the others first; with the ideal's loss it
    # is their activations, which are what is compared. "plain" with it would be the ideal.
    TILED: (CHECKPOINTING, TODAY, "checkpointing-offload", "trl-offload"),
}
"""Suffixes, Liger's kernels or the ideal's loss in tiles, and the names that may carry them."""

DEFAULTS = (
    *THEIRS,
    "trl-long",
    "unsloth",
    "alst",
    "accelerate-cp",
    TODAY,
    *(name + LIGER for name in THEIRS),
    *(name + TILED for name in EXTRAS[TILED]),
    *OURS,
    IDEAL,
    IDEAL + LIGER,
)

# They fail on a CPU, because they pin memory or ask for the accelerator's name.
_NEEDS_ACCELERATOR = ("checkpointing-offload", "trl-offload", "trl-long", "unsloth", "alst")


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of training, by name."""

    base: str
    """A key of `BASES`."""

    extra: str = ""
    """A key of `EXTRAS`, or ""."""

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.base + self.extra

    @property
    def offloads_checkpoints(self) -> bool:
        """Whether the inputs of checkpointed layers are offloaded to pinned host memory."""
        return self.base in ("checkpointing-offload", "trl-long", "alst")

    @property
    def liger(self) -> bool:
        """Whether Liger's kernels replace the model's own."""
        return self.extra == LIGER

    @property
    def tiled(self) -> bool:
        """Whether it computes the loss in tiles, as the ideal does."""
        return self.base in (IDEAL, "alst") or self.extra == TILED

    @property
    def checkpoints(self) -> bool:
        """Whether it uses the Trainer's gradient checkpointing, with or without more."""
        return self.base.startswith((CHECKPOINTING, "trl-", "alst"))

    @property
    def offload(self) -> str | None:
        """The setting `offload` of an sppo contender; None for the others."""
        return self.base.removeprefix("sppo-") if self.base in OURS else None

    def unavailable(self, *, lora: bool, device: str) -> str | None:
        """Return why this contender cannot run here; None if it can.

        Args:
            lora: Whether adapters are trained.
            device: "cuda" or "cpu".
        """
        if self.base == "accelerate-cp":
            return "it spreads a row over several GPUs, and a contender here has one"
        if device == "cpu" and self.base in _NEEDS_ACCELERATOR:
            return "it runs on an accelerator only, and there is none"
        needed = {
            "liger-kernel": self.liger,
            # Its kernels are Triton's, which comes with PyTorch's builds for GPUs.
            "triton": self.liger,
            "trl": self.base in ("trl-offload", "trl-long"),
            "unsloth": self.base == "unsloth",
            "deepspeed": self.base == "alst",
            "peft": lora,
        }
        if self.base == "unsloth" and not lora:
            return "its fast paths are for adapters"
        for package, is_needed in needed.items():
            if is_needed and find_spec(package.replace("-", "_")) is None:
                return f"{package} is not installed"
        return None


def parse(name: str) -> Contender:
    """Return the contender of a name such as "checkpointing+liger".

    Raises:
        ConfigError: There is none of that name.
    """
    base, plus, rest = name.strip().partition("+")
    extra = plus + rest
    if base not in BASES or (extra and base not in EXTRAS.get(extra, ())):
        near = difflib.get_close_matches(name, [*BASES, *DEFAULTS], n=1, cutoff=0)[0]
        more = "; ".join(f"{extra} behind {', '.join(names)}" for extra, names in EXTRAS.items())
        raise ConfigError(
            f"--contenders names {name!r}. Allowed: {', '.join(BASES)}; {more}. Remedy: use the "
            f"nearest name, {near!r}."
        )
    return Contender(base, extra)


def parse_list(text: str) -> tuple[str, ...]:
    """Return the names of a list such as "plain,sppo-auto", each once, in the given order.

    Args:
        text: Names with commas between them, or "all" for `DEFAULTS`.

    Raises:
        ConfigError: A name is unknown, or there is none.
    """
    if text.strip() == "all":
        return DEFAULTS
    names = [parse(part).name for part in text.split(",") if part.strip()]
    if not names:
        raise ConfigError(
            "--contenders is empty. Allowed: names with commas between them, or all. Remedy: "
            "leave the option out."
        )
    return tuple(dict.fromkeys(names))
