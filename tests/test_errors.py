"""Every error that callers can catch has one base, and the package offers all of them."""

import sppo_hf
from sppo_hf import errors


def test_every_error_has_the_common_base_and_a_public_name() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(kinds) == 8
    for kind in kinds:
        assert issubclass(kind, errors.SPPOError)
        assert getattr(sppo_hf, kind.__name__) is kind
        assert kind.__name__ in sppo_hf.__all__


def test_unknown_attribute_is_an_attribute_error() -> None:
    assert not hasattr(sppo_hf, "SPPOPlugins")
