"""`sppo check`: verdict, exit code, JSON, and errors that name the remedy; and a quick start."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from typer.testing import CliRunner

from sppo_hf.cli import app, common
from sppo_hf.errors import ConfigError
from sppo_hf.testing import check as check_module
from sppo_hf.testing.exactness import Gradients
from sppo_hf.testing.tiny_models import IMAGE_TOKEN, build_tiny_classifier, build_tiny_model
from tests.sweeps import ALL


def _check(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["check", *arguments], terminal_width=200)
    return result.exit_code, result.stdout, result.stderr


def _json(*arguments: str) -> tuple[int, Mapping[str, Any]]:
    code, out, _ = _check(*arguments, "--json")
    return code, json.loads(out)


def test_an_exact_family() -> None:
    code, out, _ = _check("llama", "--chunks", "3")
    assert code == 0
    assert "exact" in out
    assert "LlamaForCausalLM" in out
    assert "in 3 chunks" in out
    assert ".weight" in out, "the worst parameter is named"
    assert "with images" not in out


def test_json_says_the_same() -> None:
    code, result = _json("mistral", "--chunks", "9,6,14", "--recompute", "none")
    assert code == 0
    assert result["status"] == "exact"
    assert result["num_chunks"] == 3
    assert result["error"] <= result["allowed"] == 1e-9
    assert len(result["worst_parameters"]) == 5
    assert result["images"] is None


def test_a_refused_family() -> None:
    code, out, _ = _check("mamba")
    assert code == 2
    assert "recurrent" in out


def test_a_model_that_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    real = check_module.compare

    def spoilt(model: Any, batch: Any, config: Any) -> Any:
        zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        return real(model, batch, config, reference=Gradients(1.0, zeros))

    monkeypatch.setattr(check_module, "compare", spoilt)
    code, result = _json("llama")
    assert code == 1
    assert result["status"] == "not exact"


@pytest.mark.parametrize(("dtype", "images"), [("float32", "exact"), ("bfloat16", "not tried")])
def test_lower_precision(dtype: str, images: str) -> None:
    code, result = _json("llava", "--dtype", dtype, "--tokens", "64")
    assert code == 0, result
    assert result["dtype"] == dtype
    assert 1e-9 < result["error"] <= result["allowed"]
    assert result["images"]["status"] == images
    if images == "not tried":
        assert "only in float64 and float32" in result["images"]["reason"]


def test_a_local_model_keeps_its_weights(tmp_path: Path) -> None:
    build_tiny_model("qwen3", dtype=torch.float32).save_pretrained(tmp_path)
    code, result = _json(str(tmp_path))
    assert code == 0, result
    assert result["random_weights"] is False
    assert result["model_class"] == "Qwen3ForCausalLM"


def test_a_classifier_is_checked_as_one(tmp_path: Path) -> None:
    model = build_tiny_classifier("qwen3", "ForSequenceClassification", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for name, is_random in ((tmp_path, False), (tmp_path / "config.json", True)):
        code, result = _json(str(name))
        assert code == 0, result
        assert result["random_weights"] is is_random
        assert result["model_class"] == "Qwen3ForSequenceClassification"


def test_a_large_configuration_is_shrunk(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma2").save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        code, result = _json(str(name))
        assert code == 0, result
        assert result["random_weights"] is True
        assert result["num_parameters"] < 100_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_family"], "no_such_family"),
        (["t5"], "no causal language model"),
        (["/no/such/folder"], "no file or folder"),
        (["llama", "--chunks", "40"], "num_chunks=40"),
        (["llama", "--chunks", "9,9"], "chunk_lengths"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    code, _, err = _check(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    code, result = _json(*arguments)
    assert code == 2
    assert message in result["reason"]


_CANNOT_BE: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "64"}, "hidden_size is '64' (str)"),
    ({"hidden_size": -4}, "hidden_size is -4"),
    ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100000"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"text_config": {"num_hidden_layers": 10**12}}, "text_config.num_hidden_layers is 10000"),
    ({"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
]


@pytest.mark.parametrize(("changes", "message"), _CANNOT_BE)
def test_sizes_that_cannot_be_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **changes}))
    code, _, err = _check(str(tmp_path))
    assert code == 2
    assert message in err
    assert "Remedy: " in err


def test_sizes_that_cannot_be_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    folders = [str(tmp_path / str(number)) for number in range(len(_CANNOT_BE))]
    for folder, (changes, _) in zip(folders, _CANNOT_BE, strict=True):
        Path(folder).mkdir()
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "llama", **changes}))
    script = (
        "import sys; from typer.testing import CliRunner; from sppo_hf.cli import app;"
        f"codes = [CliRunner().invoke(app, ['check', x]).exit_code for x in {folders}];"
        "assert set(codes) == {2}; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("tokens", ["1000000000", "4097"])
def test_lengths_that_are_too_long_are_refused_at_once(tokens: str) -> None:
    code, _, err = _check("llama", "--tokens", tokens)
    assert code == 2
    assert "4096" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama", "--tokens", "2049"], "Allowed: at most 2,048"),
        (["gpt2", "--tokens", "600"], "wpe has learned 512 positions"),
    ],
)
def test_lengths_that_this_model_cannot_run(arguments: list[str], message: str) -> None:
    code, result = _json(*arguments)
    assert code == 2
    assert message in result["reason"]


def test_a_hub_id_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the call that has a short timeout, and without what Transformers prints of its own."""
    asked: list[str] = []

    def download(repo_id: str) -> Path:
        asked.append(repo_id)
        if "absent" in repo_id:
            raise ConfigError("the hub cannot be reached")
        return tmp_path / "config.json"

    build_tiny_model("llama").config.save_pretrained(tmp_path)
    monkeypatch.setattr(common, "model_path", download)
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", lambda *_: pytest.fail("asks again"))
    code, _, err = _check("own/absent")
    assert (code, "the hub cannot be reached" in err) == (2, True)
    monkeypatch.undo()
    monkeypatch.setattr(common, "model_path", download)
    code, result = _json("own/tiny")
    assert (code, result["name"], result["random_weights"]) == (0, "own/tiny", True)
    assert asked == ["own/absent", "own/tiny"]


def test_a_model_that_fails_without_chunks_too_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise IndexError("of nobody's making")

    monkeypatch.setattr(check_module, "compare", fails)
    monkeypatch.setattr(check_module, "run_reference", fails)
    code, result = _json("llama", "--tokens", "60")
    assert code == 2
    assert "the unmodified LlamaForCausalLM cannot run 60 tokens" in result["reason"]


def test_a_model_that_fails_in_chunks_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise IndexError("of nobody's making")

    monkeypatch.setattr(check_module, "compare", fails)
    code, result = _json("llama")
    assert code == 2
    assert result["status"] == "refused"
    assert "fails in chunks" in result["reason"]
    assert "of nobody's making" in result["reason"]


def test_a_multimodal_model_is_checked_whole(tmp_path: Path) -> None:
    """Given by its type: the tests below."""
    AutoConfig.for_model("gemma3").save_pretrained(tmp_path)
    code, result = _json(str(tmp_path))
    assert code == 0, result
    assert result["model_class"] == "Gemma3ForConditionalGeneration"
    assert not result["note"]
    assert result["num_parameters"] < 100_000


@pytest.mark.filterwarnings("ignore")  # families warn at their first import
@pytest.mark.parametrize(
    ("name", "options", "status", "reason"),
    [
        # By default: `test_images_have_one_line`, too.
        *([("llava", (), "exact", "")] if ALL else []),
        # They have a length of their own, to which the given chunks would not fit.
        ("llava", ("--chunks", "9,6,14"), "exact", ""),
        ("chameleon", (), "refused", "holds images or sound"),
    ],
)
def test_images_are_tried_where_a_model_takes_some(
    name: str, options: tuple[str, ...], status: str, reason: str
) -> None:
    """And if they are refused, the model is still exact."""
    code, result = _json(name, *options)
    assert (code, result["status"]) == (0, "exact"), result
    assert result["images"]["status"] == status
    assert reason in result["images"]["reason"]
    assert (result["images"]["error"] is not None) == (status == "exact")


def test_images_have_one_line() -> None:
    _, out, _ = _check("llava")
    assert out.count("with images") == 1
    assert re.search(r"with images +│ exact: \d\.\d\de-1\d", out)


def test_gradients_that_are_wrong_with_images_alone_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = check_module.compare

    def spoilt(model: Any, batch: Any, config: Any) -> Any:
        if "pixel_values" not in batch:
            return real(model, batch, config)
        ids = batch["input_ids"][0] == IMAGE_TOKEN
        assert ids[config.chunk_lengths[0] - 1 : config.chunk_lengths[0] + 1].all(), "cut in two"
        zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        return real(model, batch, config, reference=Gradients(1.0, zeros))

    monkeypatch.setattr(check_module, "compare", spoilt)
    code, result = _json("llava")
    assert code == 1
    assert result["status"] == result["images"]["status"] == "not exact"
    assert result["images"]["reason"].startswith("in ")
    assert result["error"] < 1e-9, "of text"


@pytest.mark.parametrize(
    ("outcome", "reason"), [(None, "does not depend"), (IndexError("of its own"), "of its own")]
)
def test_images_that_the_unmodified_model_does_not_read_are_not_tried(
    outcome: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> Gradients:
        if outcome is not None:
            raise outcome
        return Gradients(1.0, {})

    monkeypatch.setattr(check_module, "run_reference", run)
    code, result = _json("llava")
    assert (code, result["status"]) == (0, "exact")
    assert result["images"]["status"] == "not tried"
    assert reason in result["images"]["reason"]


def test_chunks_that_are_no_numbers() -> None:
    code, _, err = _check("llama", "--chunks", "x")
    assert code == 2
    assert "--chunks" in err


def test_the_list_names_what_is_exact_and_what_is_refused() -> None:
    code, out, _ = _check("--list")
    assert code == 0
    assert "soft caps, mixed windows" in out, "gemma2"
    assert "its attention bypasses" in out, "falcon"
    assert "predicted, not measured" in out
    assert "openai/gpt-oss-20b" in out


def test_neither_a_model_nor_the_list() -> None:
    code, _, err = _check()
    assert code == 2
    assert "--list" in err
