"""SPPOPlugin as an object: made, compared, stored, logged, and attached to Accelerators."""

import copy
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig

from sppo_hf import ConfigError, SPPOConfig, SPPOPlugin, UnsupportedModelError
from sppo_hf.engine.convert import is_converted
from sppo_hf.integrations.accelerator import SPPOAccelerator
from tests.integrations.training import make_arguments, make_model


class _MyAccelerator(Accelerator):
    """Stands for the subclasses that other libraries make."""

    def greeting(self) -> str:
        return "mine"

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        self.prepared_by_me = True
        return super().prepare_model(model, device_placement, evaluation_mode)


def test_settings_come_from_keywords_a_config_or_both():
    config = SPPOConfig(num_chunks=4)
    assert SPPOPlugin(num_chunks=4).config == config
    assert SPPOPlugin(config).config == config
    assert SPPOPlugin({"num_chunks": 4}).config == config
    assert SPPOPlugin(config, num_chunks=8).config.num_chunks == 8
    assert isinstance(SPPOPlugin(), ParallelismConfig)


def test_a_wrong_setting_is_refused_with_the_nearest_key():
    with pytest.raises(ConfigError, match="num_chunks"):
        SPPOPlugin(num_chunk=4)


def test_sizes_of_parallelism_config_are_taken():
    plugin = SPPOPlugin(num_chunks=2, dp_shard_size=2, dp_replicate_size=3)
    assert plugin.total_size == 6
    assert plugin.to_json()["dp_shard_size"] == 2


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("said", "started", "then"),
    [(None, False, "32"), ("8", False, "8"), (None, True, None)],
    ids=["nobody said anything", "the user did", "CUDA has started"],
)
def test_each_stream_gets_a_queue_before_cuda_starts(monkeypatch, said, started, then):
    # First set, so that it is put back however it ends.
    monkeypatch.setenv(QUEUES, said or "")
    if said is None:
        monkeypatch.delenv(QUEUES)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    SPPOPlugin()
    assert os.environ.get(QUEUES) == then


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_sizes_that_cut_the_sequence_or_layers_are_refused(axis):
    with pytest.raises(ConfigError, match=f"{axis}_size=2"):
        SPPOPlugin(**{f"{axis}_size": 2})


def test_the_class_instead_of_a_plugin_is_named():
    with pytest.raises(ConfigError, match=r"class SPPOPlugin.*Remedy: .*SPPOPlugin\(\)"):
        Accelerator(parallelism_config=SPPOPlugin)


def test_from_yaml_reads_the_file(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("chunk_tokens: 512\n")
    assert SPPOPlugin.from_yaml(tmp_path / "a.yaml").config.chunk_tokens == 512


def test_from_env_reads_the_named_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.yaml").write_text("chunk_tokens: 512\n")
    monkeypatch.setenv("SPPO_CONFIG", str(tmp_path / "a.yaml"))
    assert SPPOPlugin.from_env().config.chunk_tokens == 512


def test_from_env_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SPPO_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="SPPO_CONFIG is not set"):
        SPPOPlugin.from_env()
    monkeypatch.setenv("SPPO_CONFIG", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"SPPO_CONFIG=.*none\.yaml"):
        SPPOPlugin.from_env()


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(SPPOPlugin(num_chunks=4, dp_shard_size=2)) == (
        "SPPOPlugin(num_chunks=4, dp_shard_size=2)"
    )


def test_json_is_plain_and_holds_every_setting():
    stored = SPPOPlugin(chunk_lengths=(3, 5), device_memory="80GiB").to_json()
    assert json.loads(json.dumps(stored)) == stored
    assert set(SPPOConfig().to_dict()) <= set(stored)
    assert stored["chunk_lengths"] == [3, 5]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_is_equal_and_carries_nothing_of_the_launch(clone):
    plugin = SPPOPlugin(num_chunks=4)
    # What attaching to two processes leaves behind; the mesh stands for one that cannot be pickled.
    plugin._set_size("dp_replicate", 2)
    plugin.device_mesh = lambda: None
    twin = clone(plugin)
    assert twin == plugin
    assert twin.device_mesh is None
    assert twin.total_size == 1
    assert twin.observer is not plugin.observer


def test_plugins_differ_by_settings_and_by_sizes():
    assert SPPOPlugin(num_chunks=4) != SPPOPlugin(num_chunks=8)
    assert SPPOPlugin(num_chunks=4) != SPPOPlugin(num_chunks=4, dp_shard_size=2)
    assert SPPOPlugin(num_chunks=4) != "SPPOPlugin"


def test_settings_survive_in_training_arguments(tmp_path: Path):
    plugin = SPPOPlugin(num_chunks=4)
    args = make_arguments(tmp_path, parallelism_config=plugin)
    assert args.to_dict()["parallelism_config"]["num_chunks"] == 4
    assert json.loads(args.to_json_string())["parallelism_config"] == plugin.to_json()
    assert "'num_chunks': 4" in args.to_sanitized_dict()["parallelism_config"]
    assert copy.deepcopy(args).parallelism_config == plugin
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert loaded.parallelism_config == plugin


def test_attaching_makes_the_accelerator_convert():
    accelerator = Accelerator(cpu=True, parallelism_config=SPPOPlugin(num_chunks=4))
    assert type(accelerator) is SPPOAccelerator
    assert is_converted(accelerator.prepare(make_model()))


def test_attaching_keeps_what_a_subclass_does():
    accelerator = _MyAccelerator(cpu=True, parallelism_config=SPPOPlugin(num_chunks=4))
    assert isinstance(accelerator, SPPOAccelerator)
    assert isinstance(accelerator, _MyAccelerator)
    assert accelerator.greeting() == "mine"
    assert is_converted(accelerator.prepare(make_model()))
    assert accelerator.prepared_by_me


def test_one_plugin_serves_several_accelerators():
    plugin = SPPOPlugin(num_chunks=4)
    for twin in (plugin, plugin, copy.deepcopy(plugin)):
        accelerator = Accelerator(cpu=True, parallelism_config=twin)
        assert type(accelerator) is SPPOAccelerator


def test_a_second_plugin_in_the_process_is_refused_rather_than_ignored():
    Accelerator(cpu=True, parallelism_config=SPPOPlugin(num_chunks=4))
    with pytest.raises(ConfigError, match=r"num_chunks=4.*num_chunks=8"):
        Accelerator(cpu=True, parallelism_config=SPPOPlugin(num_chunks=8))


def test_an_accelerator_made_without_the_plugin_stays_plain():
    Accelerator(cpu=True, parallelism_config=SPPOPlugin(num_chunks=4))
    plain = Accelerator(cpu=True)
    assert type(plain) is Accelerator
    assert not is_converted(plain.prepare(make_model()))


def test_a_plugin_comes_after_an_accelerator_without_one():
    earlier = Accelerator(cpu=True)
    SPPOPlugin(num_chunks=2)  # made, but given to no Accelerator
    plugin = SPPOPlugin(num_chunks=4)
    assert type(Accelerator(cpu=True)) is Accelerator
    accelerator = Accelerator(cpu=True, parallelism_config=plugin)
    assert is_converted(accelerator.prepare(make_model()))
    assert accelerator.parallelism_config is plugin
    assert not is_converted(earlier.prepare(make_model()))


def test_convert_and_revert_without_accelerate():
    plugin = SPPOPlugin(num_chunks=4)
    model = make_model()
    before = dict(vars(model))
    assert plugin.convert(model) is model
    assert is_converted(model)
    assert plugin.convert(model) is model
    assert plugin.revert(model) is model
    assert not is_converted(model)
    assert vars(model).keys() == before.keys()
    assert plugin.revert(model) is model


def test_a_model_that_was_reverted_inside_of_a_wrapper_is_converted_again():
    model = SPPOPlugin(num_chunks=2).convert(make_model())
    chunked = model.forward
    model.forward = lambda *args, **kwargs: chunked(*args, **kwargs)
    plugin = SPPOPlugin(num_chunks=4)
    plugin.revert(model)
    assert not is_converted(model)
    assert is_converted(plugin.convert(model))


def test_converting_a_module_without_a_language_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear is not a Transformers causal language"):
        SPPOPlugin().convert(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("given", ["meta-llama/Llama-3.1-8B", None, type(make_model())])
def test_converting_what_is_no_model_is_refused(given):
    with pytest.raises(ConfigError, match=r"\. Remedy: load it first"):
        SPPOPlugin().convert(given)


def test_converting_with_other_settings_is_refused():
    model = SPPOPlugin(num_chunks=4).convert(make_model())
    with pytest.raises(ConfigError, match=r"num_chunks=4 \(now 8\)"):
        SPPOPlugin(num_chunks=8).convert(model)
    accelerator = Accelerator(cpu=True, parallelism_config=SPPOPlugin(num_chunks=8))
    with pytest.raises(ConfigError, match=r"num_chunks=4 \(now 8\)"):
        accelerator.prepare(model)
