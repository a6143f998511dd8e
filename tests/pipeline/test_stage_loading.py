"""Stages loaded from disk equal those of the whole model, and nothing else is read."""

import json
import logging
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.core_model_loading import spawn_materialize
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from sppo_hf import SPPOConfig
from sppo_hf.engine.model_parts import find_parts, suppress_peft_warnings
from sppo_hf.engine.stages import AbsentLayer, AbsentModule, StageCut, staged_model_of
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.pipeline import convert as loading
from sppo_hf.pipeline.convert import load_stages
from sppo_hf.testing.tiny_models import build_tiny_model

FAMILIES = ["llama", "llama-bias-tied", "gemma2", "gemma3_text", "granite", "gpt2", "qwen3_moe"]
FAMILIES += ["gemma4_text-shared-kv"] if "gemma4_text" in CONFIG_MAPPING_NAMES else []
LAYERS = (range(0, 1), range(1, 2), range(2, 3))


def _save(family, folder, dtype=torch.float64):
    """A tiny model of three layers or more on disk, a file for every few tensors."""
    build_tiny_model(family, dtype=dtype).save_pretrained(folder, max_shard_size="15KB")
    return str(folder)


def _load(folder, *own, kind=AutoModelForCausalLM, **kwargs):
    def cut(parts):
        return StageCut((*LAYERS[:2], range(2, len(parts.layers))), own)

    return load_stages(kind, folder, cut, **kwargs)


def _shards(folder):
    """Names of tensors by file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    names = {}
    for name, file in index.items():
        names.setdefault(folder / file, []).append(name)
    return names


@pytest.fixture
def warned(caplog):
    """Log records of Transformers, which keeps them from the root logger."""
    logger = transformers_logging.get_logger("transformers")
    # Others in this process may have asked for less.
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING)
    yield caplog
    logger.removeHandler(caplog.handler)
    transformers_logging.set_verbosity(verbosity)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["mapped", "read"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_the_whole_models(family, dtype, tmp_path, warned):
    folder = _save(family, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    parameters, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    found = set()
    for own in [(0,), (1,), (2,)]:
        model = _load(folder, *own, dtype=dtype)
        assert type(model) is type(whole)
        assert staged_model_of(model).cut.own == own
        mine = dict(model.named_parameters())
        for name, tensor in [*mine.items(), *model.named_buffers()]:
            theirs = parameters[name] if name in mine else buffers[name]
            assert tensor.device.type == "cpu", name
            assert tensor.dtype == theirs.dtype, name
            assert torch.equal(tensor, theirs), name
        assert sum(name in mine for name in parameters) < len(parameters)
        found |= set(mine)
    assert found == set(parameters)
    assert "LOAD REPORT" not in warned.text


def test_files_are_mapped_unless_their_tensors_change(tmp_path, monkeypatch):
    folder, found = _save("llama", tmp_path), []

    def noted(*given):
        found.append(original(*given))
        return found[-1]

    original = loading._open_slices
    monkeypatch.setattr(loading, "_open_slices", noted)
    for dtype in (torch.float64, torch.float32):
        _load(folder, 0, dtype=dtype)
    # Experts are joined to one tensor, whatever their type.
    _load(_save("qwen3_moe", tmp_path), 0, dtype=torch.float64)
    mapped, read, joined = found
    assert mapped is None
    assert "lm_head.weight" in read
    assert "lm_head.weight" in joined


def test_loaded_stages_are_those_of_one_rank_and_its_settings(tmp_path):
    parts = find_parts(_load(_save("llama", tmp_path), 1))
    settings = SPPOConfig(pp_size=3)
    assert loading.staged_model(parts, settings, 1) is staged_model_of(parts.causal_lm)
    with pytest.raises(ConfigError, match=r"Allowed: a model that was loaded by the same rank"):
        loading.staged_model(parts, settings, 2)
    with pytest.raises(ConfigError, match=r"of 3, but pp_size=2 .* makes 2"):
        loading.staged_model(parts, SPPOConfig(pp_size=2), 1)


@pytest.mark.parametrize("family", ["llama-bias-tied", "gemma2", "gpt2"])
def test_ends_of_a_tied_model_hold_the_embedding(family, tmp_path):
    folder = _save(family, tmp_path)
    first, middle, last = (_load(folder, own) for own in range(3))
    name = next(iter(staged_model_of(first).shared_names))
    for model in (first, last):
        assert staged_model_of(model).shared_names == {name}
        assert name in dict(model.named_parameters())
    assert last.get_output_embeddings().weight is last.get_input_embeddings().weight
    assert name not in dict(middle.named_parameters())
    for model in (first, middle, last):
        names = set(model.state_dict())
        model.tie_weights()  # as resizing the vocabulary does
        assert set(model.state_dict()) == names


def test_two_stages_of_one_rank(tmp_path):
    model = _load(_save("llama", tmp_path), 0, 2)
    layers = model.model.layers
    assert [isinstance(layer, AbsentLayer) for layer in layers] == [False, True, False]
    assert model.lm_head.weight.shape == (97, 32)


def test_files_of_other_stages_are_not_read(tmp_path):
    folder = _save("llama", tmp_path)
    expected = _load(folder, 1).state_dict()
    spoilt = 0
    for file, names in _shards(tmp_path).items():
        if any(name.startswith("model.layers.1.") for name in names):
            continue
        # A hole of the same size: reading it gives zeros, and no number of ours is zero.
        with safe_open(file, "pt") as opened:
            tensors = {name: torch.zeros_like(opened.get_tensor(name)) for name in names}
        save_file(tensors, file, metadata={"format": "pt"})
        spoilt += 1
    assert spoilt > 3
    for name, tensor in _load(folder, 1).state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert not _load(folder, 0).model.embed_tokens.weight.any(), "the test spoils what it means to"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_every_tensor_of_a_stage_is_read_once_and_no_other(family, tmp_path, monkeypatch):
    folder = _save(family, tmp_path)
    read = []

    class Slice:
        def __init__(self, name, inner):
            self.name, self.inner = name, inner

        def __getitem__(self, index):
            read.append(self.name)
            return self.inner[index]

        def __getattr__(self, name):
            return getattr(self.inner, name)

    class File:
        def __init__(self, *args, **kwargs):
            self.inner = safe_open(*args, **kwargs)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.inner.__exit__(None, None, None)

        def offset_keys(self):
            return self.inner.offset_keys()

        def get_slice(self, name):
            return Slice(name, self.inner.get_slice(name))

    monkeypatch.setattr("sppo_hf.pipeline.convert.safe_open", File)
    _load(folder, 1, dtype=torch.float32)
    stored = [name for names in _shards(tmp_path).values() for name in names]
    assert sorted(read) == sorted(name for name in stored if name.startswith("model.layers.1."))


@pytest.mark.parametrize("before", [None, "0"])
def test_the_switch_that_keeps_from_reading_ahead_is_put_back(before, tmp_path, monkeypatch):
    switch = "HF_DEACTIVATE_ASYNC_LOAD"
    folder = _save("qwen3_moe", tmp_path)
    monkeypatch.delenv(switch, raising=False)
    if before is not None:
        monkeypatch.setenv(switch, before)
    seen = []
    monkeypatch.setattr("transformers.core_model_loading.spawn_materialize", _noting(seen, switch))
    _load(folder, 1)
    assert set(seen) == {"1"}
    assert os.environ.get(switch) == before


def _noting(seen, switch):
    def spawn(pool, *args, **kwargs):
        assert pool is None
        seen.append(os.environ.get(switch))
        return spawn_materialize(pool, *args, **kwargs)

    return spawn


def test_a_tensor_that_is_missing(tmp_path):
    folder = _save("llama", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    _rewrite(tmp_path, lambda tensors: tensors.pop(name, None))
    _load(folder, 0)
    with pytest.raises(ConfigError, match=rf"lacks 1 tensors .*{name}.*Remedy"):
        _load(folder, 1)


def test_a_tensor_that_nobody_knows_is_reported_by_its_stage(tmp_path, warned):
    folder = _save("llama", tmp_path)

    def add(tensors):
        if "model.layers.1.mlp.up_proj.weight" in tensors:
            tensors["model.layers.1.mlp.odd"] = torch.ones(2, dtype=torch.float64)

    _rewrite(tmp_path, add)
    _load(folder, 0)
    assert "UNEXPECTED" not in warned.text
    _load(folder, 1)
    assert "model.layers.1.mlp.odd" in warned.text


def _rewrite(folder, change):
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
    index_file.write_text(json.dumps(index))


def test_a_model_class_and_arguments_of_from_pretrained(tmp_path):
    model = _load(
        _save("llama", tmp_path),
        1,
        kind=LlamaForCausalLM,
        attn_implementation="eager",
        rms_norm_eps=0.25,
        device_map="cpu",
    )
    assert type(model) is LlamaForCausalLM
    assert model.config._attn_implementation == "eager"
    assert model.model.layers[1].input_layernorm.variance_epsilon == 0.25
    assert isinstance(model.lm_head, AbsentModule)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    ],
    ids=["all-linear", "list", "modules_to_save"],
)
def test_adapters_have_the_names_that_they_have_on_the_whole_model(settings, tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    folder = _save("llama", tmp_path)
    with suppress_peft_warnings():
        whole = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
    trained = {name for name, p in whole.named_parameters() if p.requires_grad}
    found = []
    for own in range(3):
        with suppress_peft_warnings():
            model = peft.get_peft_model(_load(folder, own), lora)
        mine = [name for name, p in model.named_parameters() if p.requires_grad]
        assert all(f".layers.{own}." in name or own == 2 for name in mine)
        found += mine
    assert sorted(found) == sorted(trained)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"device_map": "auto"}, "device_map='auto' spreads"),
        ({"device_map": {"model": 0, "lm_head": 1}}, "spreads a model over devices"),
        ({"device_map": {"": "disk"}}, "spreads a model over devices"),
        ({"tp_plan": "auto"}, "tp_plan='auto' shards"),
        ({"output_loading_info": True}, "output_loading_info=True"),
        ({"ignore_mismatched_sizes": True}, "random weights"),
        ({"kind": object}, "AutoModelForCausalLM"),
    ],
)
def test_arguments_that_contradict(kwargs, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        _load(str(tmp_path), 0, **kwargs)


def test_stages_that_do_not_fit(tmp_path):
    folder = _save("llama", tmp_path)
    with pytest.raises(ConfigError, match="has 3"):
        load_stages(
            AutoModelForCausalLM, folder, lambda parts: StageCut((range(2), range(2, 5)), (0,))
        )


def test_a_model_that_cannot_be_cut(tmp_path):
    build_tiny_model("mamba").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        _load(str(tmp_path), 0)
