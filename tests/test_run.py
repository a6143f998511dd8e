"""sppo_hf.run: a script that was never changed trains chunk by chunk; all else is its own.

By `accelerate launch`: tests/recipes/test_configs.py.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState

import sppo_hf.run
from sppo_hf import SPPOPlugin
from sppo_hf.planning.machine import request_expandable_segments, set_max_connections
from sppo_hf.run import main, plugin_by_default
from tests.integrations.launch import run_ranks
from tests.sweeps import ALL

ROOT = Path(__file__).parents[1]

# Knows nothing of SPPO; reports what it saw to the file that its only argument names.
UNCHANGED = """
import json, sys
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from neighbour import HERE

if __name__ == "__main__":
    out = sys.argv.pop(1)
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128))
    rows = [{"input_ids": (torch.arange(24) * (i + 1)) % 64} for i in range(16)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train()
    if args.process_index == 0:
        json.dump({
            "argv": sys.argv, "neighbour": HERE, "name": __name__,
            "history": trainer.state.log_history,
            "settings": args.to_dict()["parallelism_config"],
        }, open(out, "w"))
    if torch.distributed.is_initialized():
        for _ in range(20):  # not waited for: Gloo's threads still hold them when the script ends
            torch.distributed.all_reduce(torch.ones(3), async_op=True)
"""
RAW = """
import json, sys
from accelerate import Accelerator
json.dump(type(Accelerator(cpu=True)).__name__, open(sys.argv[1], "w"))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "somewhere else"
    folder.mkdir()
    (folder / "neighbour.py").write_text("HERE = 'beside the script'\n")
    path = folder / "train.py"
    path.write_text(UNCHANGED)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "sppo.yaml"
    path.write_text("num_chunks: 3\n")
    return path


def _words(script: Path, out: Path) -> list[str]:
    options = "--use_cpu --max_steps 3 --logging_steps 1 --report_to none --save_strategy no"
    folder = ["--output_dir", str(out.parent / "out"), "--disable_tqdm", "true", "--seed", "3"]
    return [str(script), str(out), *options.split(), *folder]


def _run(command: list[str], tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "SPPO_CONFIG"}
    return subprocess.run(
        command,
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=100,
    )


def _run_forked(argv: list[str], tmp_path: Path, **job: Any) -> str:
    """What a rank printed that ran a script as `_run` does, but was forked, which is sooner."""
    run_ranks("tests.recipes.script_ranks", {**job, "argv": argv}, 1, tmp_path)
    return (tmp_path / "rank0.log").read_text()


def _losses(result: dict) -> list[float]:
    return [entry["loss"] for entry in result["history"] if "loss" in entry]


@pytest.mark.process
def test_an_unchanged_script_trains_the_same_with_the_plugin(script, settings, tmp_path):
    ours, plain = tmp_path / "ours.json", tmp_path / "plain.json"
    with_sppo = ["--config", str(settings), *_words(script, ours)]
    assert "SPPO plan" in _run_forked(with_sppo, tmp_path, module="sppo_hf.run")
    assert "SPPO plan" not in _run_forked(_words(script, plain), tmp_path)
    ours, plain = json.loads(ours.read_text()), json.loads(plain.read_text())
    assert ours["settings"]["num_chunks"] == 3
    assert plain["settings"] is None
    assert len(_losses(plain)) == 3
    assert _losses(ours) == pytest.approx(_losses(plain), abs=1e-4)
    for name in ("argv", "neighbour", "name"):
        assert ours[name] == plain[name]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("started", [False, *([True] if ALL else [])])
def test_it_runs_on_two_ranks(script, settings, tmp_path, started):
    """Forked or by torchrun, with the script as a module: each has the -m of its own."""
    out = tmp_path / "ours.json"
    words = _words(script, out)[1:]
    argv = ["--config", str(settings), "-m", script.stem, *words]
    if started:
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
        done = _run([sys.executable, *launch, "-m", "sppo_hf.run", *argv], script.parent)
        assert done.returncode == 0, done.stderr
        printed = done.stderr
    else:
        job = {"module": "sppo_hf.run", "argv": argv, "finalized": True}
        run_ranks("tests.recipes.script_ranks", job, 2, script.parent)
        printed = "".join((script.parent / f"rank{rank}.log").read_text() for rank in range(2))
    assert printed.count("SPPO plan") == 1  # from the main process alone
    ours = json.loads(out.read_text())
    assert ours["argv"] == [str(script), *words[1:]]
    assert (ours["neighbour"], ours["name"]) == ("beside the script", "__main__")
    entry = ours["history"][0]
    one = entry["sppo/tokens_per_second_per_device"]
    assert entry["sppo/tokens_per_second"] == pytest.approx(2 * one)


@pytest.mark.process
def test_the_variable_names_the_settings_for_a_raw_accelerator(settings, tmp_path, monkeypatch):
    script, out = tmp_path / "raw.py", tmp_path / "raw.json"
    script.write_text(RAW)
    monkeypatch.setenv("SPPO_CONFIG", str(settings))
    _run_forked([str(script), str(out)], tmp_path, module="sppo_hf.run")
    assert json.loads(out.read_text()) == "SPPOAccelerator"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "sppo.yaml", "none.py"], r"none\.py' does not exist"),
        (["--config", "sppo.yaml", "."], r"'\.' is a directory"),
        (["--config", "none.yaml", "train.py"], r"none\.yaml.*cannot be read"),
        (["--config", "wrong.yaml", "train.py"], r"wrong\.yaml: .*'num_chunks'"),
        (["--config", "sppo.yaml"], "program"),
        (["nowhere"], r"'nowhere' does not exist, nor does such a command.*-m"),
        (["-m", "nowhere.train"], r"there is no module 'nowhere\.train'"),
        (["-m", "train.py"], r"there is no module 'train\.py'; it is a file, so leave -m out"),
        (["-m", "bare"], r"'bare' is a package that has no __main__"),
        (["-m", ".train"], r"there is no module '\.train'"),
    ],
)
def test_mistakes_are_named_before_anything_runs(words, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("raise AssertionError('the script ran')")
    (tmp_path / "sppo.yaml").write_text("num_chunks: 3\n")
    (tmp_path / "wrong.yaml").write_text("num_chunk: 3\n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPPO_CONFIG", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "usage: python -m sppo_hf.run" in error
    assert re.search(said, error), error


def test_the_scripts_own_arguments_and_exit_status_are_its_own(tmp_path, capfd):
    (tmp_path / "sppo.yaml").write_text("num_chunks: 3\n")
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(5)\n")
    path, argv = list(sys.path), list(sys.argv)
    words = ["--config", str(tmp_path / "sppo.yaml"), str(script), "--config", "its own", "-m"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 5
    assert capfd.readouterr().out.strip() == "['--config', 'its own', '-m']"
    assert (sys.path, sys.argv) == (path, argv)


def test_a_variable_that_names_nothing_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPPO_CONFIG", "")
    (tmp_path / "train.py").write_text("raise AssertionError('the script ran')")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "train.py")])
    error = capsys.readouterr().err
    assert re.search(r"SPPO_CONFIG is empty.*--config FILE", error), error


SEEN = """
import json, os, sys
import __main__
class Here: pass
if __name__ == "__main__":
    spec = __spec__ and __spec__.name
    names = [__name__, __package__, spec, __file__, __main__.Here is Here]
    made = None
    if "MAKE" in os.environ:
        from accelerate import Accelerator
        made = type(Accelerator(cpu=True)).__name__
    with open(os.environ["OUT"], "w") as out:
        json.dump([sys.argv, sys.path[0], names, made], out)
    if sys.argv[-1] == "fail":
        raise KeyError("of its own")
    sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "owned" / "deep"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").touch()
    (folder / "train.py").write_text(SEEN)
    (folder / "broken.py").write_text("import owned.nothing_of_this_name\n")
    return folder.parents[1]


@pytest.mark.process
def test_a_module_is_run_as_the_interpreter_runs_it(package):
    """With default settings: there is no --config."""
    words, seen = ["owned.deep.train", "-m", "--config", "its own", "0"], package / "seen.json"
    done = _run([sys.executable, "-m", *words], package, OUT=str(seen))
    assert done.returncode == 0, done.stderr
    *plain, _ = json.loads(seen.read_text())
    job = {"module": "sppo_hf.run", "argv": ["-m", *words]}
    job["environment"] = {"OUT": str(seen), "MAKE": "one"}
    run_ranks("tests.recipes.script_ranks", job, 1, package)
    *ours, made = json.loads(seen.read_text())
    assert ours == plain
    assert made == "SPPOAccelerator"


def test_errors_and_the_exit_status_of_a_module_are_its_own(package, monkeypatch):
    monkeypatch.chdir(package)
    monkeypatch.delenv("SPPO_CONFIG", raising=False)
    monkeypatch.setenv("OUT", str(package / "seen.json"))
    path, argv, running = list(sys.path), list(sys.argv), sys.modules["__main__"]
    try:
        with pytest.raises(SystemExit) as ended:
            main(["-m", "owned.deep.train", "7"])
        assert ended.value.code == 7
        with pytest.raises(KeyError, match="of its own"):
            main(["-m", "owned.deep.train", "fail"])
        with pytest.raises(ModuleNotFoundError, match=r"owned\.nothing_of_this_name"):
            main(["-m", "owned.deep.broken"])
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "owned"]:
            del sys.modules[name]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert (sys.path, sys.argv, sys.modules["__main__"]) == (path, argv, running)


class Command:
    """An installed command, as its package would describe it."""

    def __init__(self, run):
        self.load = lambda: run


@pytest.mark.parametrize(("returned", "status"), [(None, None), (0, None), (3, 3), ("why", "why")])
def test_an_installed_command_is_found_by_name(monkeypatch, returned, status):
    seen = []

    def command():
        seen.append(list(sys.argv))
        return returned

    def find(*, group, name):
        assert group == "console_scripts"
        return [Command(command)] if name == "learn" else []

    said = []
    monkeypatch.setattr(sppo_hf.run, "entry_points", find)
    monkeypatch.setattr(sppo_hf.run.logger, "warning", lambda text, *_: said.append(text))
    monkeypatch.delenv("SPPO_CONFIG", raising=False)
    if status is None:
        assert main(["learn", "--fast"]) == 0
    else:
        with pytest.raises(SystemExit) as ended:
            main(["learn", "--fast"])
        assert ended.value.code == status
    assert seen == [["learn", "--fast"]]
    # It trained nothing here, which must not pass in silence.
    assert len(said) == 1
    assert "SPPO was not used" in said[0]


# Starts a script in another process, as the commands of TRL, Axolotl and ms-swift do.
# Its first argument says how; the script and its arguments are the others.
STARTER = """
import os, subprocess, sys
how, *words = sys.argv[1:]
python = [sys.executable]
if how == "exec":
    print("marker:", os.environ["SPPO_RUN_MARKER"], flush=True)
    os.execv(python[0], python + words)
if how == "torchrun":
    python += "-m torch.distributed.run --standalone --nproc_per_node 2".split()
if how == "launch":
    python += "-m accelerate.commands.launch --cpu --num_processes 1".split()
if how == "isolated":
    python += ["-E"]
sys.exit(subprocess.call(python + words))
"""
STARTED = """
import json, os, sys
from accelerate import Accelerator
from transformers import TrainingArguments
arguments = TrainingArguments(output_dir="out", use_cpu=True)  # forgets earlier Accelerators
accelerator = Accelerator(cpu=True)
configs = accelerator.state.parallelism_config, arguments.parallelism_config
if accelerator.is_main_process:
    chunks = [config and config.config.num_chunks for config in configs]
    out = {"kind": type(accelerator).__name__, "chunks": chunks}
    out |= {"hidden": os.environ.get("HIDDEN"), "marker": os.environ.get("SPPO_RUN_MARKER")}
    out |= {"ranks": accelerator.num_processes, "argv": sys.argv}
    json.dump(out, open(sys.argv[1], "w"))
sys.exit(int(sys.argv[2]))
"""
# Take the place of packages that need seconds to be imported, in a process that is started.
STAND_INS = {
    "accelerate/__init__.py": """
import sys
from types import SimpleNamespace
from accelerate.accelerator import Accelerator
from sppo_hf.config import SPPOConfig
class SPPOPlugin:
    @classmethod
    def from_yaml(cls, path):
        plugin = cls()
        plugin.config = SPPOConfig.from_yaml(path)
        return plugin
sys.modules["sppo_hf.integrations.plugin"] = SimpleNamespace(SPPOPlugin=SPPOPlugin)
""",
    "accelerate/accelerator.py": """
import os
from types import SimpleNamespace
class Accelerator:
    def __init__(self, cpu, parallelism_config=None):
        self.state = SimpleNamespace(parallelism_config=parallelism_config)
        self.num_processes = int(os.environ.get("WORLD_SIZE", 1))
        self.is_main_process = os.environ.get("RANK", "0") == "0"
""",
    "transformers/__init__.py": "from transformers.training_args import TrainingArguments",
    "transformers/training_args.py": """
from dataclasses import dataclass
@dataclass
class TrainingArguments:
    output_dir: str
    use_cpu: bool
    parallelism_config: object = None
    def __post_init__(self):
        pass
""",
}


def _started(folder: Path, *, stand_ins: bool) -> Path:
    """The script that is started, beside the packages that it imports in place of the real ones."""
    path = folder / "program" / "started.py"
    path.parent.mkdir()
    path.write_text(STARTED)
    for name, text in STAND_INS.items() if stand_ins and not ALL else ():
        (path.parent / name).parent.mkdir(exist_ok=True)
        (path.parent / name).write_text(text)
    return path


@pytest.fixture
def starter(tmp_path, monkeypatch) -> Path:
    """A script that starts others, in a shell with a `sitecustomize` of its own."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import os\nos.environ['HIDDEN'] = 'was run'\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{hidden}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The compiler, which PEFT's imports ask for, takes what is started two seconds.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    # What `main` adds; it stays.
    request_expandable_segments(os.environ)
    set_max_connections(os.environ)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = tmp_path / "starter.py"
    path.write_text(STARTER)
    return path


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("subprocess", 0),
        ("isolated", 0),
        ("subprocess", 3),
        pytest.param("torchrun", 0, marks=pytest.mark.slow),
        *([pytest.param("launch", 0, marks=pytest.mark.slow)] if ALL else []),
    ],
)
def test_processes_that_a_program_starts_inherit_the_plugin(
    how, status, starter, settings, monkeypatch
):
    said, folder, real = [], starter.parent, ALL or (how, status) == ("subprocess", 0)
    monkeypatch.setattr(sppo_hf.run.logger, "warning", lambda text, *_: said.append(text))
    before = dict(os.environ)
    started, out = _started(folder, stand_ins=not real), folder / "seen.json"
    command = ["--config", os.path.relpath(settings), str(starter), how]
    command += [str(started), str(out), str(status)]
    if status:
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == status
    else:
        assert main(command) == 0
    assert dict(os.environ) == before
    assert not list((folder / "temporary").iterdir())
    seen = json.loads(out.read_text())
    assert seen["argv"] == [str(started), str(out), str(status)]
    assert seen["ranks"] == (2 if how == "torchrun" else 1)
    if how == "isolated":  # it ignores the environment, and this must not pass in silence
        assert (seen["kind"], seen["chunks"]) == ("Accelerator", [None, None])
        assert len(said) == 1
        assert "SPPO was not used" in said[0]
    else:
        kind = "SPPOAccelerator" if real else "Accelerator"
        assert (seen["kind"], seen["chunks"]) == (kind, [3, 3])
        assert seen["hidden"] == "was run"
        assert not said


@pytest.mark.process
def test_what_replaces_the_program_inherits_the_plugin(starter, settings):
    folder, out = starter.parent, starter.parent / "seen.json"
    started = _started(folder, stand_ins=True)
    words = ["--config", settings.name, starter.name, "exec", str(started), str(out), "0"]
    environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    printed = _run_forked(words, folder, module="sppo_hf.run", environment=environment)
    seen = json.loads(out.read_text())
    assert (seen["chunks"], seen["marker"], seen["hidden"]) == ([3, 3], "", "was run")
    (marker,) = re.findall("marker: (.+)", printed)
    assert not Path(marker).exists()


def test_what_a_script_passes_itself_is_respected(tmp_path, monkeypatch):
    from accelerate import ParallelismConfig
    from transformers import TrainingArguments

    own, theirs, default = SPPOPlugin(num_chunks=9), ParallelismConfig(), SPPOPlugin(num_chunks=3)
    untouched = TrainingArguments.__post_init__

    def given(config):
        args = TrainingArguments(str(tmp_path), use_cpu=True, parallelism_config=config)
        return args.parallelism_config

    said = []
    # Not caplog: a script that another test ran may have set logging up in its own way.
    monkeypatch.setattr(sppo_hf.run.logger, "warning", lambda text, *_: said.append(text))
    with plugin_by_default(default):
        assert given(None) is default
        assert given(own) is own
        assert not said
        assert given(theirs) is theirs
        assert len(said) == 1
        assert "stays out of it" in said[0]
    assert given(None) is None
    assert TrainingArguments.__post_init__ is untouched
