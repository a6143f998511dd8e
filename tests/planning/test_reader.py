"""What is read off configs themselves."""

from types import SimpleNamespace

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.planning.reader import rotary_limit_tokens, text_config
from sppo_hf.planning.refusals import check_config
from tests.planning.shapes import llama_config


def test_text_config_of_a_multimodal_one() -> None:
    inner = llama_config()
    assert text_config(SimpleNamespace(text_config=inner)) is inner
    assert text_config(inner) is inner


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 4096),
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16_384),
        ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, None),
    ],
)
def test_rotary_limit(rope: dict[str, object] | None, limit: int | None) -> None:
    config = llama_config(max_position_embeddings=4096, rope_parameters=rope)
    assert rotary_limit_tokens(config) == limit


@pytest.mark.parametrize("value", [0, -4, "64", True, 64.0, [64], {}, 2**31])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "head_dim"])
def test_a_size_that_is_none_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .* Allowed: a whole number.*Remedy"):
        check_config(llama_config(**{name: value}))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -2.0, 0])
def test_a_rotary_factor_that_is_none_is_refused(factor: float) -> None:
    rope = {"original_max_position_embeddings": 8192, "factor": factor}
    with pytest.raises(ConfigError, match=r"rope_parameters is .*factor"):
        rotary_limit_tokens(llama_config(rope_parameters=rope))
