"""`find_mismatch` accepts right backends and finds each kind of wrong kernel."""

from dataclasses import replace

import pytest
import torch

from sppo_hf.attention.backends.aten import AtenFlash, CPUFlash, CuDNN, Efficient
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.flash_attn import FlashAttention2, FlashAttention4
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.backends.select import find_mismatch
from tests.attention.backends.fake_kernels import FakeAten, FakeFlash2, FakeFlash4Early
from tests.sweeps import turn

CPU = torch.device("cpu")


def requirement(**changes):
    settings = {"device_type": "cpu", "dtype": torch.float32, "qk_head_size": 16, "v_head_size": 16}
    return AttentionSpec(**settings | changes)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(backend, dtype, id=f"{backend.name}-{dtype}")
        for index, backend in enumerate(
            [Reference(), CPUFlash(), AtenFlash(aten=FakeAten()), CuDNN(aten=FakeAten())]
        )
        for dtype in turn(
            [torch.float64, torch.float32, torch.bfloat16, torch.float16], 2, index // 2
        )
    ],
)
def test_right_backends_pass(backend, dtype):
    for changes in ({}, {"window": True, "gqa_ratio": 3}, {"v_head_size": 8}):
        asked = requirement(dtype=dtype, **changes)
        assert find_mismatch(backend, asked, CPU) is None


def test_another_default_device_refuses_nothing():
    """As after torch.set_default_device("cuda"), where the drawn numbers are still the host's."""
    with torch.device("meta"):
        assert find_mismatch(CPUFlash(), requirement(), CPU) is None
        assert find_mismatch(Reference(), requirement(window=True), CPU) is None


def test_efficient_and_soft_caps_pass():
    assert find_mismatch(Efficient(aten=FakeAten()), requirement(gqa_ratio=2), CPU) is None
    asked = requirement(softcap=True, window=True)
    assert find_mismatch(FlashAttention2(interface=FakeFlash2), asked, CPU) is None


def test_chosen_keys_pass_where_they_are_kept_to():
    asked = requirement(chosen=True, v_head_size=8)
    for backend in (Reference(), CPUFlash(), Efficient(aten=FakeAten())):
        assert find_mismatch(backend, asked, CPU) is None
        assert find_mismatch(backend, replace(asked, dtype=torch.bfloat16), CPU) is None
    assert find_mismatch(ReadsAll(), asked, CPU).startswith("differs from the reference in")
    assert "though it cannot leave out keys" in find_mismatch(CuDNN(aten=FakeAten()), asked, CPU)
    assert "has not chosen" in AtenFlash().reason_unsupported(
        replace(asked, device_type="cuda", dtype=torch.bfloat16)
    )


class ReadsAll(Reference):
    """Ignores what was chosen."""

    def forward(self, *tensors, **scores):
        return super().forward(*tensors, **scores | {"chosen_BCS": None})


def test_a_kernel_that_aligns_its_mask_elsewhere_is_found():
    found = find_mismatch(AtenFlash(aten=TopLeftAten()), requirement(), CPU)
    assert found.startswith("differs from the reference in output")


class TopLeftAten(FakeAten):
    """Aligns its mask at the top left."""

    def _flash_attention_forward(self, q, k, v, *args, **kwargs):
        rows, keys = q.shape[1], k.shape[1]
        if rows < keys:
            k, v = k[:, :rows], v[:, :rows]
            args = (args[0], args[1], rows, rows, *args[4:])
        return super()._flash_attention_forward(q, k, v, *args, **kwargs)


class OwnLse(Reference):
    """Its backward ignores merged values."""

    def backward(self, dout, q, k, v, out, lse, **settings):
        return super().backward(dout, q, k, v, *self.forward(q, k, v, **settings), **settings)


class BaseTwoLse(Reference):
    """Its log-sum-exp is to base 2."""

    def forward(self, q, k, v, **settings):
        attended = super().forward(q, k, v, **settings)
        return attended._replace(lse_BNC=attended.lse_BNC / 0.6931)


class NoGradient(Reference):
    """Leaves NaN in a gradient."""

    def backward(self, dout, q, k, v, out, lse, **settings):
        grads = super().backward(dout, q, k, v, out, lse, **settings)
        return grads._replace(dv_BKTH=grads.dv_BKTH * float("nan"))


@pytest.mark.parametrize(
    ("backend", "found"),
    [(OwnLse(), "dQ"), (BaseTwoLse(), "log-sum-exp"), (NoGradient(), "dV (relative error nan)")],
)
def test_wrong_backends_are_found(backend, found):
    mismatch = find_mismatch(backend, requirement(), CPU)
    assert mismatch.startswith(f"differs from the reference in {found}")


class OverflowingAten(FakeAten):
    """exp(-lse) overflows in half a tile of keys that does not exist, and NaN gets into dQ."""

    def _scaled_dot_product_cudnn_attention_backward(
        self, dout, q, k, v, out, lse, *args, **kwargs
    ):
        dq, dk, dv = super()._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, *args, **kwargs
        )
        causal = args[-1]
        if k.shape[2] % 128 == 64 and not causal:
            lse = lse.squeeze(-1) if lse.dim() == 4 else lse
            dq = dq + (0.0 * torch.exp(-lse.float())).unsqueeze(-1).to(dq.dtype)
        return dq, dk, dv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [16, 128, 256])
def test_half_a_tile_of_keys_is_not_given_to_a_kernel_that_overflows_there(dtype, head_size):
    asked = requirement(dtype=dtype, qk_head_size=head_size, v_head_size=head_size, window=True)
    assert find_mismatch(CuDNN(aten=OverflowingAten()), asked, CPU) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [16, 128, 256])
def test_an_overflow_at_low_scores_is_found(dtype, head_size):
    backend = CuDNN(key_tile=1, aten=OverflowingAten())
    asked = requirement(dtype=dtype, qk_head_size=head_size, v_head_size=head_size)
    mismatch = find_mismatch(backend, asked, CPU)
    assert mismatch == (
        "differs from the reference in dQ (relative error nan) "
        "for 64 queries at 192 of 192 keys, scores about -120"
    )


class CountingAten(FakeAten):
    """Counts the plans that the real kernel would build: one for each shape, layout and mask."""

    def __init__(self):
        super().__init__()
        self.plans = set()

    def _scaled_dot_product_cudnn_attention(self, q, k, v, *args, **kwargs):
        self.plans.add((q.shape, q.stride(), k.shape, k.stride(), args[3]))
        return super()._scaled_dot_product_cudnn_attention(q, k, v, *args, **kwargs)


def test_a_kernel_that_plans_each_shape_is_asked_for_few():
    """Each plan takes about a second, forward and backward, in every process."""
    aten = CountingAten()
    assert find_mismatch(CuDNN(aten=aten), requirement(gqa_ratio=2), CPU) is None
    causal = [plan[-1] for plan in aten.plans]
    assert 0 < causal.count(True) <= 2
    assert 0 < causal.count(False) <= 3


class KeepingScores(Reference):
    """Remembers the scores and log-sum-exps of its calls."""

    def __init__(self):
        super().__init__()
        self.found = []

    def forward(self, q, k, v, **settings):
        attended = super().forward(q, k, v, **settings)
        self.found.append([q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT, None])
        return attended

    def backward(self, dout, q, k, v, out, lse, **settings):
        self.found[-1][1] = lse
        return super().backward(dout, q, k, v, out, lse, **settings)


@pytest.mark.parametrize(("head_size", "dtype"), [(8, torch.float32), (256, torch.float16)])
def test_low_scores_are_low_and_as_spread_as_others(head_size, dtype):
    backend = KeepingScores()
    asked = requirement(dtype=dtype, qk_head_size=head_size, v_head_size=head_size, gqa_ratio=2)
    assert find_mismatch(backend, asked, CPU) is None
    scaled = [(scores.float() * head_size**-0.5, lse) for scores, lse in backend.found]
    low = [(scores, lse) for scores, lse in scaled if scores.mean() < -100]
    assert [tuple(scores.shape[2:]) for scores, _ in low] == [(64, 192)] * 2
    for scores, lse in low:
        assert -121 < scores.mean() < -119
        assert 0.7 < scores.std(-1).mean() < 1.5
        assert lse.max() < -95  # exp(88.8) is past float32


def test_capped_scores_are_never_low():
    backend = KeepingScores()
    assert find_mismatch(backend, requirement(softcap=True), CPU) is None
    # Scores of -120 under a cap have gradients of 0, next to which any rounding is large.
    assert all(scores.mean() > -50 for scores, _ in backend.found)


def test_a_refusal_of_the_kernel_is_told():
    refusing = AtenFlash(aten=FakeAten(grouped_heads=False))
    mismatch = find_mismatch(refusing, requirement(gqa_ratio=2), CPU)
    assert "raised RuntimeError" in mismatch
    assert "as many key heads" in mismatch
    early = FlashAttention4(interface=FakeFlash4Early)
    assert "does not know window_size_left" in find_mismatch(early, requirement(window=True), CPU)


def test_the_users_random_numbers_stay():
    state = torch.get_rng_state()
    find_mismatch(Reference(), requirement(), CPU)
    assert torch.equal(torch.get_rng_state(), state)
