"""SPPOArguments: every setting of SPPO as a command-line option, for `HfArgumentParser`.

The options are generated from SPPOConfig, so a setting and its help are written in one place.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import yaml

from sppo_hf.config import SPPOConfig, field_help
from sppo_hf.errors import ConfigError
from sppo_hf.registry import import_entry_points
from sppo_hf.rules import show
from sppo_hf.text_files import parse_yaml

if TYPE_CHECKING:
    from sppo_hf.integrations.plugin import SPPOPlugin

_PREFIX = "sppo_"


@dataclasses.dataclass
class _Options:
    """The part of SPPOArguments that is not generated from the settings."""

    sppo_config: str | None = dataclasses.field(
        default=None, metadata={"help": "YAML file with settings of SPPO."}
    )

    def to_config(self) -> SPPOConfig:
        """Return the settings of the file, with the options given on the command line on top.

        Raises:
            ConfigError: The file cannot be read, or a setting is wrong; an option is named as it
                is written on the command line.
        """
        config = (
            SPPOConfig() if self.sppo_config is None else SPPOConfig.from_yaml(self.sppo_config)
        )
        given: dict[str, Any] = {}
        for field in dataclasses.fields(SPPOConfig):
            text = getattr(self, _PREFIX + field.name)
            if text is not None:
                given[field.name] = _read(field.name, text)
        if not given:
            return config
        try:
            return config.replace(**given)
        except ConfigError as error:
            options = ", ".join(f"--{_PREFIX}{name}" for name in given)
            raise ConfigError(f"From the command line ({options}): {error}") from error

    def to_plugin(self) -> SPPOPlugin:
        """Return a plugin for `TrainingArguments.parallelism_config`.

        Raises:
            ConfigError: As `to_config`.
        """
        from sppo_hf.integrations.plugin import SPPOPlugin

        return SPPOPlugin(self.to_config())


def _read(name: str, text: object) -> object:
    """Read an option as YAML would, and "512,512" as a list as well."""
    if not isinstance(text, str):
        return text
    if name == "chunk_lengths" and text.lstrip()[:1].isdigit():
        text = f"[{text}]"
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"--{_PREFIX}{name} {show(text)} cannot be read: {reason}. Allowed: "
            "a value as in a YAML file. Remedy: quote it for the shell."
        ) from error


if TYPE_CHECKING:
    SPPOArguments = _Options
else:
    import_entry_points()  # their names are allowed in settings, and `--help` lists them
    SPPOArguments = dataclasses.make_dataclass(
        "SPPOArguments",
        [
            (
                _PREFIX + field.name,
                str | None,
                dataclasses.field(default=None, metadata={"help": field_help(field.name)}),
            )
            for field in dataclasses.fields(SPPOConfig)
        ],
        bases=(_Options,),
        namespace={"__module__": __name__},
    )
    SPPOArguments.__doc__ = """Settings of SPPO for `HfArgumentParser`.

    `--sppo_config FILE` names a YAML file; `--sppo_<setting> VALUE` overrides one setting of it,
    for every field of `SPPOConfig`. Values are read as in YAML; null stands for None.
    """
