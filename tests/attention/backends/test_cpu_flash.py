"""The fused CPU kernel against the oracle, with and without the kernel's own grouped heads."""

import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sppo_hf.attention.backends import adapters
from sppo_hf.attention.backends.aten import CPUFlash
from sppo_hf.attention.backends.base import CausalBand
from sppo_hf.planning.activation_modes import SAVED
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.memory import byte_tables
from sppo_hf.planning.tile_sizes import parallel_heads
from tests.attention.backends.cases import CASES, bands, check, choice
from tests.attention.oracle import make_problem, solve, visible
from tests.planning.shapes import llama_config, shape_of
from tests.sweeps import turn


@pytest.mark.parametrize(
    ("case", "grouped_heads"),
    [(case, x) for index, case in enumerate(CASES) for x in turn([True, False], 2, index)],
)
def test_matches_oracle(case, grouped_heads):
    rows, keys, band = case
    check(CPUFlash(grouped_heads=grouped_heads), band, rows=rows, keys=keys)


@pytest.mark.parametrize("case", CASES)
def test_chosen_keys(case, monkeypatch):
    rows, keys, band = case
    check(CPUFlash(), band, rows=rows, keys=keys, v_head_size=5, chosen=choice(rows, keys))
    monkeypatch.setattr(adapters, "BIAS_BYTES", 2 * keys * 8 * 4)  # four rows at a time
    check(CPUFlash(), band, rows=rows, keys=keys, heads=2, chosen=choice(rows, keys))


def test_chosen_keys_hold_gradients_of_one_call_at_a_time(monkeypatch):
    given = []

    class Watched(CPUFlash):
        def kernel_backward(self, *args, **kwargs):
            assert not any(storage() for storage in given)
            grads = super().kernel_backward(*args, **kwargs)
            given.extend(weakref.ref(x.untyped_storage()) for x in grads)
            return grads

    rows, keys = 9, 20
    monkeypatch.setattr(adapters, "BIAS_BYTES", 2 * keys * 8 * 4)  # four rows at a time
    band = CausalBand(keys - rows)
    check(Watched(), band, rows=rows, keys=keys, chosen=choice(rows, keys))
    assert len(given) >= 3 * 3


@given(
    bands(),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 6)]),
    st.sampled_from([(8, 8), (8, 3), (5, 9), (1, 1)]),
    st.sampled_from([1, 3, 512]),
    st.booleans(),
)
def test_matches_oracle_for_any_band(case, heads, sizes, tile_rows, grouped_heads):
    rows, keys, band = case
    check(
        CPUFlash(grouped_heads=grouped_heads, tile_rows=tile_rows),
        band,
        rows=rows,
        keys=keys,
        heads=heads[0],
        kv_heads=heads[1],
        head_size=sizes[0],
        v_head_size=sizes[1],
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance", "window"),
    [
        (*kind, window)
        for index, kind in enumerate(
            [
                (torch.float64, 1e-10),
                (torch.float32, 1e-5),
                (torch.bfloat16, 2e-2),
                (torch.float16, 2e-3),
            ]
        )
        for window in turn([None, 100, 600], 2, index)
    ],
)
def test_longer_than_a_tile(dtype, tolerance, window):
    check(
        CPUFlash(),
        CausalBand(300, window),
        rows=700,
        keys=1000,
        batch=1,
        head_size=16,
        dtype=dtype,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chunks_are_no_farther_from_the_truth_than_one_call_of_the_kernel(dtype):
    problem = make_problem(rows=512, keys=512, batch=1, head_size=32, dtype=dtype)
    q, k, v, dout = problem
    truth = solve(problem, visible(CausalBand(0), 512, 512), scale=0.2)
    aten = torch.ops.aten
    plain = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=0.2)
    plain_grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, *plain, 0.0, True, scale=0.2
    )
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    outs, dqs = [], []
    for start in range(0, 512, 100):
        rows, keys = slice(start, start + 100), slice(0, start + 100)
        mine = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        band = CausalBand(start)
        out, lse = CPUFlash().forward(*mine, band=band, scale=0.2)
        grads = CPUFlash().backward(dout[:, :, rows], *mine, out, lse, band=band, scale=0.2)
        outs.append(out)
        dqs.append(grads.dq_BNCH)
        dk[:, :, keys] += grads.dk_BKTH
        dv[:, :, keys] += grads.dv_BKTH
    ours = (torch.cat(outs, 2), torch.cat(dqs, 2), dk.to(dtype), dv.to(dtype))
    theirs = (plain[0], *plain_grads)
    exact = (truth.out, truth.dq, truth.dk, truth.dv)
    for one, two, three in zip(ours, theirs, exact, strict=True):
        assert (one.double() - three).norm() <= 1.1 * (two.double() - three).norm()


@pytest.mark.parametrize("threads", [2, 8])
def test_backward_with_work_for_every_thread(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    used, back = [], torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def noted(dout, q, k, *others, **settings):
        used.append((q.shape[1], k.shape[1]))
        return back(dout, q, k, *others, **settings)

    name = "_scaled_dot_product_flash_attention_for_cpu_backward"
    monkeypatch.setattr(torch.ops.aten, name, noted)
    check(CPUFlash(grouped_heads=True), CausalBand(3), rows=4, keys=7, batch=1, heads=6, kv_heads=1)
    assert {keys for _, keys in used} == {2 if threads == 2 else 6}


@pytest.mark.parametrize(
    ("heads", "threads", "best"),
    [
        ((1, 9, 3), 1, 3),
        ((1, 9, 3), 2, 3),  # five of nine thirds instead of two of three: not worth the copies
        ((1, 9, 3), 8, 9),
        ((2, 9, 3), 3, 3),
        ((1, 32, 8), 2, 8),
        ((1, 32, 8), 16, 16),
        ((1, 4, 4), 16, 4),
    ],
)
def test_key_heads_are_repeated_where_threads_would_wait(heads, threads, best):
    assert parallel_heads(*heads, threads) == best


class Peak(TorchDispatchMode):
    """Measures the peak bytes of the tensors that operations make."""

    def __init__(self):
        super().__init__()
        self.held, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.held:
                    self.held[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.held.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self.held.values()))
        return made


@pytest.mark.parametrize(("rows", "keys"), [(1, 4096), (2, 1024), (1, 20_000)])
def test_repeated_heads_take_the_memory_that_plans_count(monkeypatch, rows, keys):
    problem = make_problem(
        rows=8, keys=keys, batch=rows, heads=8, kv_heads=2, head_size=64, dtype=torch.float32
    )
    config = llama_config(hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
    shape = shape_of(config, dtype_bytes=4)
    decisions = Decisions(
        batch_rows=rows,
        bounds=((0, keys - 8), (keys - 8, keys)),
        layer_modes=(),
        training=True,
        tile_tokens=1,
    )
    most, counted = {}, {}
    for threads in (1, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        band, backend = CausalBand(keys - 8), CPUFlash(grouped_heads=True)
        q, k, v, dout = problem
        attended = backend.forward(q, k, v, band=band, scale=1.0)
        with Peak() as peak:
            backend.backward(dout, q, k, v, *attended, band=band, scale=1.0)
        most[threads] = peak.most
        tables = byte_tables(replace(shape, cpu_threads=threads), decisions, "cpu")
        counted[threads] = int(tables.workspace_backward[0, SAVED.index("whole"), -1])
    more = counted[16] - counted[1]
    # Keys and values of 8 heads in place of 2, and their gradients; none where that is too much.
    copies = rows * keys * 8 * 128 * 4
    assert more == (2 * copies if copies <= 2**25 else 0)
    # The sums of the gradients, which are there in both, and of these the ones that are summed.
    assert abs(most[16] - most[1] - more) <= copies / 4


def test_strides_without_dense_heads():
    """The kernel reads every head as if it were dense, so a backend must copy other heads."""
    q, k = torch.randn(2, 1, 3, 8, 5, dtype=torch.float64).transpose(3, 4).unbind()
    band = CausalBand(0)
    ours = CPUFlash().forward(q, k, k, band=band, scale=1.0)
    dense = CPUFlash().forward(q.contiguous(), *[k.contiguous()] * 2, band=band, scale=1.0)
    assert not q.is_contiguous()
    assert torch.equal(ours.out_BNCH, dense.out_BNCH)
