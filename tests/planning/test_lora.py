"""LoRA's settings."""

from typing import Any

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.planning.model_profile import LoraShape


def test_targets_by_name_or_all() -> None:
    some = LoraShape(rank=8, targets=("q_proj", "v_proj"))
    assert some.adapts("q_proj")
    assert not some.adapts("o_proj")
    everything = LoraShape(rank=8)
    assert everything.adapts("o_proj")
    # A product that is no module has no name.
    assert not everything.adapts("")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rank": 0}, "rank is 0"), ({"rank": 8, "targets": "q_proj"}, "'q_proj'; give")],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraShape(**settings)
