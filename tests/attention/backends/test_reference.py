"""The reference against the oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.attention.backends.base import CausalBand
from sppo_hf.attention.backends.reference import Reference
from tests.attention.backends.cases import CASES, bands, check, choice, run
from tests.attention.oracle import make_problem
from tests.sweeps import examples, turn


@pytest.mark.parametrize(
    ("case", "softcap"),
    [(case, x) for index, case in enumerate(CASES) for x in turn([None, 2.0], 2, index)],
)
def test_matches_oracle(case, softcap):
    rows, keys, band = case
    check(Reference(), band, rows=rows, keys=keys, softcap=softcap)


@pytest.mark.parametrize("case", CASES[::2])
def test_chosen_keys(case):
    rows, keys, band = case
    for tile_bytes in (500, 1 << 20):
        check(Reference(tile_bytes), band, rows=rows, keys=keys, chosen=choice(rows, keys))


@examples(15, whole=100)
@given(bands(), st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 6)]), st.sampled_from([2, 8, 11]))
def test_matches_oracle_in_any_tiling(case, heads, v_head_size):
    rows, keys, band = case
    sizes = {"heads": heads[0], "kv_heads": heads[1], "v_head_size": v_head_size}
    for tile_bytes in (1, 500, 1 << 20):
        check(Reference(tile_bytes), band, rows=rows, keys=keys, **sizes)


def test_more_rows_than_a_tile():
    check(Reference(), CausalBand(50, 100), rows=300, keys=350)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_lower_precision(dtype, tolerance):
    check(Reference(), CausalBand(30, 20), rows=40, keys=70, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_narrows_nothing(dtype):
    """A kernel does not see autocast either; these products would be rounded to bfloat16."""
    problem, band = make_problem(rows=40, keys=70, dtype=dtype), CausalBand(30, 20)
    expected = run(Reference(), problem, band, scale=0.4, softcap=2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(Reference(), problem, band, scale=0.4, softcap=2.0)
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


def test_scores_never_exceed_the_tile():
    """64 rows see 4096 keys: 2 x 4 x 64 x 4096 x 8 bytes are 16.8 MB of scores in one piece."""
    tile_bytes = 1 << 18
    problem = make_problem(rows=64, keys=4096)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.bmm.default:
                largest = max(largest, result.nbytes)
            return result

    with Watch():
        run(Reference(tile_bytes), problem, CausalBand(4032), scale=0.4, softcap=None)
    # The gradient of the keys of a tile is as large as the tile's keys, which is smaller still.
    assert 0 < largest <= tile_bytes
