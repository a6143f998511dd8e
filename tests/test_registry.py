"""Registries: names are known before a folder is imported, and an entry is one decorator."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sppo_hf import registry
from sppo_hf.config import SPPOConfig, field_help
from sppo_hf.errors import ConfigError, ScheduleError, SPPOError
from sppo_hf.integrations.plugin import SPPOPlugin
from sppo_hf.planning.policies import register_policy, uniform_modes
from sppo_hf.registry import ATTENTION_BACKENDS, OFFLOAD_POLICIES, SCHEDULES, TIERS, Registry
from sppo_hf.schedule.generate import (
    Size,
    generate,
    interleaved_seq1f1b,
    register_schedule,
    seq1f1b,
)

REGISTRIES = {
    "attention_backend": ATTENTION_BACKENDS,
    "offload": OFFLOAD_POLICIES,
    "pp_schedule": SCHEDULES,
}


@pytest.fixture
def forgets(monkeypatch):
    """Whatever a test registers is gone behind it."""
    for known in REGISTRIES.values():
        monkeypatch.setattr(known, "_added", dict(known._added))
    before = {field: set(known) for field, known in REGISTRIES.items()}
    yield
    for field, known in REGISTRIES.items():
        for name in set(known) - before[field]:
            del known[name]


@pytest.mark.parametrize("known", REGISTRIES.values(), ids=REGISTRIES)
def test_what_is_written_is_what_is_registered(known):
    written = known.names()
    assert len(written) > 2
    assert tuple(known.load()) == written
    for name in written:
        # Decorators add the keywords that were left out.
        assert known._written[name].items() <= known.facts(name).items()
    assert known.names() == written


def test_names_need_no_import_of_torch():
    script = (
        "import sys; from sppo_hf.config import SPPOConfig; "
        "SPPOConfig(attention_backend='cudnn', pp_size=2, pp_schedule='gpipe'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize("field", REGISTRIES)
def test_settings_take_what_is_registered_and_say_so(field):
    for name in REGISTRIES[field].names():
        assert getattr(SPPOConfig(pp_size=2, **{field: name}), field) == name
        assert name in field_help(field)
    with pytest.raises(ConfigError) as caught:
        SPPOConfig(pp_size=2, **{field: "no_such"})
    assert all(name in str(caught.value) for name in REGISTRIES[field].names())


def test_a_schedule_is_one_decorator(forgets):
    @register_schedule("mine")
    def mine(size):
        return seq1f1b(size)

    assert SPPOConfig(pp_size=2, pp_schedule="mine").pp_schedule == "mine"
    size = Size(2, 2, 2)
    assert generate("mine", size) == generate("seq1f1b", size)
    with pytest.raises(ConfigError, match="has one stage on each rank"):
        SPPOConfig(pp_size=2, pp_schedule="mine", pp_virtual_stages=2)
    with pytest.raises(ScheduleError, match=r"Allowed: .*interleaved_seq1f1b, mine, msp"):
        generate("no_such", size)


def test_a_schedule_of_ones_own_may_interleave_and_require_even_chunks(forgets):
    register_schedule("my_interleaved", interleaved=True, even=True)(interleaved_seq1f1b)
    settings = {"pp_size": 2, "pp_schedule": "my_interleaved", "pp_virtual_stages": 2}
    assert SPPOConfig(**settings).pp_virtual_stages == 2
    size = Size(2, 4, 2, 2)
    assert generate("my_interleaved", size) == generate("interleaved_seq1f1b", size)
    with pytest.raises(ScheduleError, match="as many chunks in each"):
        generate("my_interleaved", Size.uneven(2, [1, 2]))
    with pytest.raises(ScheduleError, match="interleaved_seq1f1b, my_interleaved puts several"):
        generate("seq1f1b", size)


def test_a_name_is_taken_once(forgets):
    with pytest.raises(SPPOError, match="was used before"):
        register_policy("full", keeps=False, leaves=True, reason="")(uniform_modes)


def test_a_file_may_have_any_number_of_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_PACKAGE", tmp_path)
    Path(tmp_path / "one.py").write_text(
        '@add("a", rank=1)\nclass A: ...\n\n'
        '@add(\n    "b",\n    text="(x)",\n)\n@other\ndef b(): ...\n'
    )
    Path(tmp_path / "none.py").write_text('add = "@add(c)"\n')
    known = Registry("add", ".")
    # A decorator in the first line has no line before it.
    Path(tmp_path / "two.py").write_text('"""Two."""\n\n@add("c")\nclass C: ...\n')
    assert known.names() == ("a", "b", "c")
    assert known.facts("b") == {"text": "(x)"}
    assert known.facts("d") == {}
    assert known.names_with("rank") == ("a",)


ZIP = """
from sppo_hf.config import SPPOConfig
from sppo_hf.planning.policies import none_modes, register_policy
from sppo_hf.planning.tiers import TierModel, register_tier

SPPOConfig()  # which may ask for the entry points again

@register_tier("zip")
class ZipTier(TierModel):
    called = "compressed memory"

register_policy("zipped", keeps=True, leaves=False, reason="as none")(none_modes)
"""

ARGUMENTS = """
from transformers import HfArgumentParser
from sppo_hf import SPPOArguments

(arguments,) = HfArgumentParser(SPPOArguments).parse_args_into_dataclasses()
print(arguments.to_config().more_tiers)
"""


def _installed(folder: Path, module: str) -> dict[str, str]:
    """The environment of a process that has a package with an entry point of this module."""
    info = folder / "my_zip-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-zip\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sppo_hf]\nzip = {module}\n")
    (folder / "my_zip.py").write_text(ZIP)
    paths = (str(folder), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[1]))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_command_knows_what_installed_packages_register(tmp_path: Path) -> None:
    environment = _installed(tmp_path, "my_zip")
    words = "llama-3.1-8b --seq-len 16K --num-chunks 4 --lora 16 --more-tiers zip=256GiB --json"
    done = _run(environment, "-m", "sppo_hf.cli", "estimate", *words.split())
    assert done.returncode == 0, done.stderr
    assert "zip" in json.loads(done.stdout)["peak_by_cause"]


@pytest.mark.parametrize(
    "read",
    [SPPOConfig.from_yaml, lambda file: SPPOPlugin.from_yaml(file).config],
    ids=["config", "plugin"],
)
def test_settings_know_what_installed_packages_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], SPPOConfig]
) -> None:
    (tmp_path / "sppo.yaml").write_text("more_tiers: zip=8GiB\n")
    _installed(tmp_path, "my_zip")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_imported", set())
    try:
        assert read(tmp_path / "sppo.yaml").more_tiers == "zip=8GiB"
    finally:
        sys.modules.pop("my_zip", None)
        TIERS.remove("zip")
        OFFLOAD_POLICIES.remove("zipped")


def test_options_know_what_installed_packages_register(tmp_path: Path) -> None:
    environment = _installed(tmp_path, "my_zip")
    done = _run(environment, "-c", ARGUMENTS, "--help")
    assert ", zipped." in " ".join(done.stdout.split()), done.stderr
    done = _run(environment, "-c", ARGUMENTS, "--sppo_more_tiers", "zip=8GiB")
    assert done.stdout == "zip=8GiB\n", done.stderr


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    done = _run(_installed(tmp_path, "my_zap"), "-m", "sppo_hf.cli", "config")
    assert done.returncode == 2
    assert "zip = 'my_zap'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
