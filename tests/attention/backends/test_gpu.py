"""Every CUDA backend against the reference in float64; skipped without a GPU."""

import pytest
import torch

from sppo_hf.attention.backends.base import CausalBand, Requirement
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.backends.select import AUTO_ORDER, select_backend
from sppo_hf.errors import ConfigError
from tests.attention.backends.cases import run
from tests.attention.oracle import Problem, make_problem

pytestmark = pytest.mark.gpu

SHAPES = (
    (333, 333, 0),  # first chunk
    (257, 1021, 764),  # later chunk
    (1, 100, 99),  # one token
    (130, 300, 200),  # padded queries
)


@pytest.mark.parametrize("window", [None, 120], ids=["", "window"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "softcap"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("sizes", [(64, 64), (96, 96), (128, 128), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", AUTO_ORDER["cuda"])
def test_matches_reference(name, dtype, sizes, heads, kv_heads, softcap, window):
    requirement = Requirement(
        device_type="cuda",
        dtype=dtype,
        qk_head_size=sizes[0],
        v_head_size=sizes[1],
        softcap=softcap is not None,
        window=window is not None,
        gqa_ratio=heads // kv_heads,
    )
    try:
        backend = select_backend(name, requirement).backend
    except ConfigError as error:
        pytest.skip(str(error))
    tolerance = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    scale = sizes[0] ** -0.5
    for rows, keys, q_start in SHAPES:
        band = CausalBand(q_start, window)
        problem = make_problem(
            rows=rows,
            keys=keys,
            heads=heads,
            kv_heads=kv_heads,
            head_size=sizes[0],
            v_head_size=sizes[1],
            dtype=dtype,
            device="cuda",
        )
        actual = run(backend, problem, band, scale=scale, softcap=softcap)
        wide = Problem(*(x.double() for x in problem))
        expected = run(Reference(), wide, band, scale=scale, softcap=softcap)
        for label, ours, theirs in zip(actual._fields, actual, expected, strict=True):
            error = (ours.double() - theirs).norm() / theirs.norm()
            assert error <= tolerance, f"{label} of {rows} rows, {keys} keys: {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_auto_finds_a_fused_kernel(dtype):
    requirement = Requirement(device_type="cuda", dtype=dtype, qk_head_size=128, v_head_size=128)
    assert select_backend("auto", requirement).backend.name != "reference"
