"""Models whose sequences can be shared; test_sequence_exactness.py checks the collectives."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.structure import find_parts
from sppo_hf.errors import ConfigError, PipelineError, UnsupportedModelError
from sppo_hf.pipeline import sequence_parallel
from sppo_hf.pipeline.sequence_parallel import SequenceParallelEngine, check_shareable_sequences
from sppo_hf.testing.tiny_families import _STATES, FAMILIES
from sppo_hf.testing.tiny_models import build_tiny_model


@pytest.mark.parametrize(
    "name", [x for x in _STATES if FAMILIES[x].model_type in CONFIG_MAPPING_NAMES]
)
def test_every_family_with_states_is_refused_before_anything_runs(name: str) -> None:
    model = build_tiny_model(name)
    with pytest.raises(UnsupportedModelError) as caught:
        check_shareable_sequences(find_parts(model), 2)
    said = str(caught.value)
    assert said.startswith(type(model).__name__)
    # Some are refused on one rank already.
    alone = "cannot be trained chunk by chunk"
    assert "layers are recurrent or convolutional (" in said or alone in said


def test_layers_with_other_numbers_of_heads_count() -> None:
    heads = {"num_attention_heads_per_layer": [4, 6, 6], "num_key_value_heads": 2}
    parts = find_parts(build_tiny_model("laguna", **heads))
    check_shareable_sequences(parts, 2)
    with pytest.raises(ConfigError, match=r"sp_size=4 does not divide the 2 .*Allowed: 1, 2\. "):
        check_shareable_sequences(parts, 4)


@pytest.mark.parametrize(
    ("other", "agrees"), [((3, 1, 5), True), ((1, 3, 2), True), ((4, 1, 2), False)]
)
def test_replicas_that_share_sharded_weights_run_as_many_chunks(monkeypatch, other, agrees):
    """FSDP2 gathers weights for each chunk; by length, replicas may have other numbers of them."""
    monkeypatch.setattr(sequence_parallel, "gather", lambda own, group: {0: own, 1: other})
    engine: Any = SimpleNamespace(
        mesh=SimpleNamespace(dp_size=2, replica_control_group=None),
        parts=SimpleNamespace(is_sharded=lambda: True),
        config=SPPOConfig(),
        most_loss_tiles=lambda call, plan, whole_logits: 4,
    )
    call: Any = SimpleNamespace(row_groups=lambda config: [(0, 2)])
    plan: Any = SimpleNamespace(num_chunks=3)
    if agrees:
        tiles = SequenceParallelEngine.check_plan(engine, call, plan, whole_logits=False)
        assert tiles == max(4, other[2]), "the head is called as often on all"
        return
    seen = r"3 on rank 0, 4 on rank 1\. .* Remedy: num_chunks=4 "
    with pytest.raises(PipelineError, match=seen):
        SequenceParallelEngine.check_plan(engine, call, plan, whole_logits=False)
