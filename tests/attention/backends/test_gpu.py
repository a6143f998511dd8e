"""Every backend in its own precision against the reference in float64: on CUDA, and on the CPU.

The CPU runs the same body with what it has, so that the body is known to work where there is no
GPU. Sinks are added outside of backends: see `tests/attention/test_gpu.py`.
"""

import pytest
import torch

from sppo_hf.attention.backends.base import AttentionSpec, Backend, CausalBand
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.backends.select import (
    AUTO_ORDER,
    BACKENDS,
    _autotuned,
    find_backend,
    select_backend,
)
from tests.attention.backends.cases import choice, run
from tests.attention.backends.usable import usable_backend
from tests.attention.oracle import Problem, make_problem
from tests.sweeps import turn

SHAPES = (
    (333, 333, 0),  # first chunk
    (257, 1021, 764),  # later chunk
    (1, 100, 99),  # one token
    (130, 300, 200),  # padded queries
    (64, 4160, 4096),  # a long prefix
)
TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
ON_CPU = [
    name
    for name, variants in BACKENDS.items()
    if not variants[0]().reason_unsupported(
        AttentionSpec(device_type="cpu", dtype=torch.float32, qk_head_size=64, v_head_size=64)
    )
]
"""All registered backends that run on a CPU; on CUDA all are tried, and skipped where they say so.
"""


def check(
    name, device, dtype, *, sizes, heads, kv_heads, softcap, window, num_chosen=None, shapes=SHAPES
):
    """Forward and backward of the named backend; skips what it says it cannot do.

    With `num_chosen` a query reads so many of its keys.
    """
    requirement = AttentionSpec(
        device_type=device,
        dtype=dtype,
        qk_head_size=sizes[0],
        v_head_size=sizes[1],
        softcap=softcap is not None,
        window=window is not None,
        gqa_ratio=heads // kv_heads,
        chosen=num_chosen is not None,
    )
    backend = usable_backend(name, requirement)
    scale = sizes[0] ** -0.5
    for rows, keys, q_start in shapes:
        band = CausalBand(q_start, window)
        problem = make_problem(
            rows=rows,
            keys=keys,
            heads=heads,
            kv_heads=kv_heads,
            head_size=sizes[0],
            v_head_size=sizes[1],
            dtype=dtype,
            device=device,
        )
        scores = {"scale": scale, "softcap": softcap}
        if num_chosen is not None:
            scores["chosen"] = choice(rows, keys, num_chosen=num_chosen).to(device)
        actual = run(backend, problem, band, **scores)
        wide = Problem(*(x.double() for x in problem))
        expected = run(Reference(), wide, band, **scores)
        for label, ours, theirs in zip(actual._fields, actual, expected, strict=True):
            assert ours.device.type == device
            # The log-sum-exp of a row that reads no key.
            ours, theirs = (x.double().nan_to_num(nan=1e9, neginf=0.0) for x in (ours, theirs))
            error = (ours - theirs).norm() / theirs.norm()
            assert error <= TOLERANCE[dtype], f"{label} of {rows} rows, {keys} keys: {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 120], ids=["", "window"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "softcap"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("sizes", [(64, 64), (96, 96), (128, 128), (256, 256), (192, 128)], ids=str)
@DTYPES
@pytest.mark.parametrize("name", list(BACKENDS))
def test_on_cuda(name, dtype, sizes, heads, kv_heads, softcap, window):
    check(
        name,
        "cuda",
        dtype,
        sizes=sizes,
        heads=heads,
        kv_heads=kv_heads,
        softcap=softcap,
        window=window,
    )


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("name", list(BACKENDS))
def test_chosen_keys_on_cuda(name, dtype):
    settings = {"sizes": (192, 128), "heads": 4, "kv_heads": 4, "softcap": None, "window": None}
    check(name, "cuda", dtype, num_chosen=60, **settings)


@pytest.mark.parametrize("name", ON_CPU)
def test_chosen_keys_on_the_cpu(name):
    settings = {"sizes": (64, 96), "heads": 4, "kv_heads": 2, "softcap": None, "window": None}
    check(name, "cpu", torch.bfloat16, num_chosen=60, shapes=SHAPES[:4], **settings)


@pytest.mark.parametrize(
    ("name", "dtype", "window", "softcap"),
    [
        (name, dtype, *settings)
        for name in ON_CPU
        for index, dtype in enumerate(TOLERANCE)
        for settings in turn([(None, None), (120, None), (120, 3.0)], 2, index)
    ],
)
def test_on_the_cpu(name, dtype, softcap, window):
    check(
        name,
        "cpu",
        dtype,
        sizes=(64, 96),
        heads=4,
        kv_heads=2,
        softcap=softcap,
        window=window,
        shapes=SHAPES[1:4],
    )


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(
    "features", [{}, {"window": True}, {"gqa_ratio": 4}, {"chosen": True}], ids=str
)
def test_auto_takes_a_fused_kernel_and_says_how_fast_it_is(dtype, features, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    _autotuned.cache_clear()
    # cuBLAS keeps 32 MiB from its first product on, which is one of those for checking.
    square = torch.ones(1, 8, 8, dtype=torch.float64, device="cuda")
    torch.bmm(square, square)
    torch.cuda.synchronize()
    requirement = AttentionSpec(
        device_type="cuda", dtype=dtype, qk_head_size=128, v_head_size=128, **features
    )
    torch.cuda.empty_cache()
    reserved, state = torch.cuda.memory_reserved(), torch.cuda.get_rng_state()
    selection = select_backend("auto", requirement)
    assert selection.backend.name != "reference"
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_reserved() <= reserved + 2**25  # small blocks of what was checked
    found = [find_backend(name, requirement) for name in AUTO_ORDER["cuda"]]
    able = [backend for backend in found if isinstance(backend, Backend)]
    if len(able) > 1:
        # Its own speed first, then those of all others that finished.
        assert selection.reason.startswith(f"{selection.backend.name}: ")
        assert " TFLOPS at 4K x " in selection.reason
        assert list((tmp_path / "sppo_hf" / "attention").iterdir())
    assert select_backend("auto", requirement) == selection
