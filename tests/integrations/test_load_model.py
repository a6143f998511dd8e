"""`SPPOPlugin.load_model`: plain without a pipeline, own stages in one, exact from there on."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from sppo_hf import SPPOPlugin
from sppo_hf.engine.stages import staged_model_of
from sppo_hf.errors import ConfigError
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.integrations.launch import run_ranks

CHECKPOINTS = {
    "llama": {},
    "llama-bias-tied": {},
    "gemma2": {},
    "qwen3_moe": {},
    "llama-deep": {"num_hidden_layers": 5},
}


def test_without_a_pipeline_it_is_from_pretrained(tmp_path):
    build_tiny_model("llama").save_pretrained(tmp_path)
    model = SPPOPlugin().load_model(tmp_path, model_class=LlamaForCausalLM, dtype=torch.float32)
    assert type(model) is LlamaForCausalLM
    assert model.dtype == torch.float32
    assert staged_model_of(model) is None


def test_a_single_process_is_no_pipeline(tmp_path):
    with pytest.raises(ConfigError, match=r"1 process was .*Remedy: accelerate launch"):
        SPPOPlugin(pp_size=2).load_model(tmp_path)


@pytest.mark.process
@pytest.mark.slow
def test_loaded_stages_train_as_the_whole_model(tmp_path):
    for name, changes in CHECKPOINTS.items():
        family = name.removesuffix("-deep")
        build_tiny_model(family, **changes).save_pretrained(tmp_path / name)
    run_ranks("tests.integrations.loading_ranks", {}, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2))
    for case in first["seen"]:
        ours = [rank["seen"][case] for rank in (first, second)]
        assert max(rank["worst"] for rank in ours) < 1e-9, case
        names, both = set(ours[0]["names"]), set(ours[1]["names"])
        assert names | both == set(ours[0]["all"]), case
        tied = case in ("tied", "windows")
        assert names & both == ({"model.embed_tokens.weight"} if tied else set()), case
    for rank in (first, second):
        assert "pp_virtual_stages=2 makes 4" in rank["refused"]
        # The heap keeps holes between what stays (86% was seen), and groups and engines cost some.
        assert rank["freed"] > 0.75
