"""Arguments: token counts, models by path and by hub id, and errors that name the remedy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from typer.testing import CliRunner

from sppo_hf.cli import app
from sppo_hf.cli.common import (
    DEFAULT_HARDWARE,
    MAX_TOKENS,
    PlanningArguments,
    echo_json,
    fsdp2_refusal,
    is_quantized,
    nearest_names,
    parse_tokens,
    read_model,
)
from sppo_hf.errors import ConfigError
from sppo_hf.planning.config_file import to_namespace
from sppo_hf.planning.plan import PlanRequest
from tests.cli.configs import TINY, write_config

GIB = 2**30


def typed(model: str, **options: Any) -> PlanningArguments:
    return PlanningArguments(model=model, **{"seq_len": "8K", **options})


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("131072", 131_072),
        ("131,072", 131_072),
        ("128K", 131_072),
        ("128k", 131_072),
        ("1M", 1_048_576),
        ("1.5M", 1_572_864),
        (" 7 ", 7),
    ],
)
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-5", "12G", "K", "1.5", "many", "0.0001K"])
def test_malformed_token_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="128K") as raised:
        parse_tokens(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", ["2147483648", "1000000M", "9" * 400, "9" * 5000])
def test_too_many_tokens_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="1 to 2,147,483,647") as caught:
        parse_tokens(text)
    assert len(str(caught.value)) < 400
    assert parse_tokens("2147483647") == MAX_TOKENS


def test_json_has_no_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    echo_json({"a": [float("nan"), 1.5, {"b": float("inf")}]})
    assert capsys.readouterr().out == '{"a": [null, 1.5, {"b": null}]}\n'


def test_the_plan_request_has_the_typed_options(tmp_path: Path) -> None:
    model = write_config(tmp_path, TINY)
    asked = typed(
        model,
        device_memory="0.5",
        host_memory="64GiB",
        disk_memory="1TiB",
        hardware="h200",
        micro_batch_size=3,
        dtype="float32",
        partition="even",
        num_chunks="4",
        offload_kv="full",
    ).plan_request()
    config = asked.config
    assert asked.total_tokens == 8192
    assert asked.batch_rows == 3
    assert asked.shape.dtype_bytes == 4
    assert asked.device.name == "NVIDIA H200"
    whole = asked.device.memory_bytes["device"]
    assert whole is not None
    assert config.device_memory == whole // 2
    assert config.host_memory == 64 * GIB
    assert config.disk_memory == 1024 * GIB
    assert config.offload_dir is not None
    assert (config.partition, config.num_chunks, config.offload_kv) == ("even", 4, "full")
    assert (config.offload, config.recompute) == ("auto", "auto")


def test_defaults_are_the_default_profile_and_no_disk(tmp_path: Path) -> None:
    arguments = typed(write_config(tmp_path, TINY))
    asked = arguments.plan_request()
    assert asked.device.name == "NVIDIA H100 80GB HBM3"
    assert asked.config.offload_dir is None
    note = arguments.hardware_note(asked)
    assert "estimated" in note
    assert "--hardware" in note
    assert "quantized" not in note
    assert "--hardware" not in typed(arguments.model, hardware="h100").hardware_note(asked)
    assert "measured on one" in note, "an H100's shipped profile"


def test_a_quantized_checkpoint_is_said_to_be_counted_whole(tmp_path: Path) -> None:
    fields = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    arguments = typed(write_config(tmp_path, {**TINY, **fields}))
    note = arguments.hardware_note(arguments.plan_request())
    assert "Weights are counted in bfloat16: this checkpoint's are quantized" in note
    assert is_quantized(to_namespace({"model_type": "gemma3", "text_config": fields}))


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"load_in_4bit": True}, False),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}, False),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "torch.bfloat16"}, True),
        ({"load_in_8bit": True, "bnb_4bit_quant_storage": "bfloat16"}, False),
        ({"quant_method": "gptq", "bits": 4}, False),
        ({"quant_method": "mxfp4"}, True),
        (None, True),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_quantized_weights_that_fsdp2_shards(
    settings: dict[str, Any] | None, allowed: bool, inside: bool
) -> None:
    fields: dict[str, Any] = {"model_type": "gemma3", "quantization_config": settings}
    config = {"model_type": "gemma3", "text_config": fields} if inside else fields
    assert (fsdp2_refusal(to_namespace(config)) == "") == allowed
    # As Transformers has them: a mapping in an object.
    assert (fsdp2_refusal(SimpleNamespace(**fields)) == "") == allowed


def test_lora_trains_the_adapters_alone(tmp_path: Path) -> None:
    model = write_config(tmp_path, TINY)

    def trainable(question: PlanRequest) -> int:
        return question.shape.trainable_parameters

    small, large = (trainable(typed(model, lora=rank).plan_request()) for rank in (8, 16))
    assert large == 2 * small
    assert large < trainable(typed(model).plan_request()) / 2
    with pytest.raises(ConfigError, match="rank"):
        typed(model, lora=0).plan_request()


@pytest.mark.parametrize(
    ("policy", "recompute", "expected"),
    [
        ("auto", None, "auto"),
        ("sppo", None, "none"),
        ("full", None, "none"),
        ("full", "full", "full"),
        ("auto", "none", "none"),
    ],
)
def test_fixed_policies_recompute_nothing_by_default(
    tmp_path: Path, policy: str, recompute: str | None, expected: str
) -> None:
    asked = typed(write_config(tmp_path, TINY), offload=policy, recompute=recompute).plan_request()
    assert (asked.config.offload, asked.config.recompute) == (policy, expected)


def test_titles() -> None:
    assert typed("meta-llama/Llama-3.1-8B").title == "meta-llama/Llama-3.1-8B"
    folder = typed("models/llama/config.json", lora=16, dtype="float16")
    assert folder.title == "llama, LoRA rank 16, float16"


def test_models_by_folder_and_by_file(tmp_path: Path) -> None:
    file = write_config(tmp_path, TINY)
    assert read_model(str(tmp_path)) == read_model(file)
    for missing in (str(tmp_path / "other"), "no/such/folder/here", "other.json", "./llama"):
        with pytest.raises(ConfigError, match="no file or folder"):
            read_model(missing)


def test_a_shipped_name_needs_no_hub() -> None:
    assert read_model("Llama-3.1-8B").hidden_size == 4096  # type: ignore[attr-defined]


def test_a_hub_id_downloads_only_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_config(tmp_path, TINY)
    asked: list[tuple[str, str]] = []

    def download(repo_id: str, filename: str, *, local_files_only: bool) -> str:
        asked.append((repo_id, filename))
        return file

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert isinstance(read_model("meta-llama/Llama-3.1-8B"), SimpleNamespace)
    assert asked == [("meta-llama/Llama-3.1-8B", "config.json")]


_RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.GatedRepoError("gated", response=_RESPONSE), "hf auth login"),
        (errors.RepositoryNotFoundError("404", response=_RESPONSE), "check the name"),
        (ValueError("the client's client"), "path of a config.json"),
        (errors.RemoteEntryNotFoundError("none", response=_RESPONSE), "Transformers' format"),
        (errors.HfHubHTTPError("500 error", response=_RESPONSE), "500 error"),
        (OSError("no route"), "cannot be reached"),
    ],
)
def test_hubs_that_do_not_answer(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(url: str, *, timeout: float) -> str:
        asked.append(timeout)
        raise error

    asked: list[float] = []
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    with pytest.raises(ConfigError, match="meta-llama/Llama-3") as raised:
        read_model("meta-llama/Llama-3.1-8B")
    assert said in str(raised.value)
    # Its client, which would ask for a minute where nobody answers, was not let to.
    assert len(asked) == 1
    assert asked[0] <= 5


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("meta-lama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwn3-4B", "Qwen/Qwen3-4B"),
        ("gemma-3-27b", "google/gemma-3-27b-it"),
    ],
)
def test_a_misspelt_name_gets_suggestions(typed: str, meant: str) -> None:
    assert meant in nearest_names(typed)
    with pytest.raises(ConfigError, match=f"'{typed}'.*{meant}"):
        read_model(typed)


def test_a_name_spelt_as_listed_is_not_suggested_again() -> None:
    assert "Qwen/Qwen3-4B" in nearest_names("Qwen/Qwen3-8B")
    assert "Qwen/Qwen3-8B" not in nearest_names("Qwen/Qwen3-8B")


def test_unlike_names_get_no_suggestions() -> None:
    assert nearest_names("zzz/own-private-thing") == []


def test_offline_for_real() -> None:
    # Tests run with HF_HUB_OFFLINE=1 and an empty cache.
    with pytest.raises(ConfigError, match=r"Remedy: go online \(unset HF_HUB_OFFLINE\), or give"):
        read_model("meta-llama/Llama-3.1-8B")
    with pytest.raises(ConfigError, match="Remedy: check the spelling, or go online"):
        read_model("meta-llama/Llama-3.1-9B")
    with pytest.raises(ConfigError, match="Remedy: go online"):
        read_model("zzz/own-private-thing")


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("estimate", f"[default: {DEFAULT_HARDWARE}]"),
        ("plan", "[default: the profile's, or 25GiB]"),
        ("simulate", "[default: half]"),
        ("calibrate", "[default: bfloat16 and float32]"),
    ],
)
def test_help_shows_defaults_that_are_written_by_hand(command: str, default: str) -> None:
    # Rich takes words in brackets for its own markup.
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400"}).output
    assert default in shown
