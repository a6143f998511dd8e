"""What decisions say of themselves."""

from sppo_hf.planning.activation_modes import KEEP
from tests.planning.modes import OFFLOAD
from tests.planning.situations import decided


def test_sizes_follow_from_bounds_and_modes() -> None:
    what = decided(((0, 5), (5, 8)), ((KEEP, OFFLOAD, KEEP), (KEEP, KEEP, KEEP)))
    assert what.total_tokens == 8
    assert what.num_chunks == 2
    assert what.num_layers == 3
    assert what.chunk_lengths == (5, 3)
    assert what.mode(1, 0) == OFFLOAD
    assert what.mode(0, 1) == KEEP
