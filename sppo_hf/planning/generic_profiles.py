"""Rough hardware profiles for devices that were neither calibrated nor are shipped.

Orders of magnitude, so that a plan exists at all; `sppo calibrate` replaces them. Each says of
itself that it is an estimate, and on what it rests.
"""

from __future__ import annotations

from sppo_hf.planning.hardware import Curve, HardwareProfile

# Share of a datasheet's dense peak that large matrix products and fused attention reach, by the
# tokens of a chunk; the shape of the shipped profiles' curves.
_MATMUL_SHARE = Curve(((256, 0.15), (512, 0.28), (1024, 0.42), (2048, 0.53), (4096, 0.60)))
_ATTENTION_SHARE = Curve(((256, 0.08), (512, 0.13), (1024, 0.20), (2048, 0.27), (8192, 0.34)))
_BACKWARD_SHARE = 0.68
_FLOAT32_SHARE = 0.05
_UNKNOWN_PEAK_FLOPS = 60e12

_CPU_MATMUL = Curve(((64, 0.6e11), (256, 1.0e11), (1024, 1.2e11)))
_CPU_ATTENTION = Curve(((64, 0.3e11), (256, 0.5e11), (1024, 0.6e11)))


def cpu_estimate(device_name: str) -> HardwareProfile:
    """Some processor: about 1e11 float32 FLOP/s and 10 GB/s, whatever its name says.

    bfloat16 is given float32's rate, right within a factor of a few either way: processors with
    instructions for it are faster, others convert.
    """
    backward = _CPU_ATTENTION.scaled(0.8)
    return HardwareProfile(
        name=device_name,
        kind="cpu",
        estimated=True,
        source="rough estimate of a few cores: 1e11 float32 FLOP/s; `sppo calibrate` measures",
        matmul_flops={"float32": _CPU_MATMUL, "bfloat16": _CPU_MATMUL},
        attention_forward_flops={"float32": _CPU_ATTENTION, "bfloat16": _CPU_ATTENTION},
        attention_backward_flops={"float32": backward, "bfloat16": backward},
        memory_bytes_per_second=10e9,
        launch_seconds=0.3e-3,
        d2h_bytes_per_second=5e9,
        h2d_bytes_per_second=5e9,
        both_d2h_bytes_per_second=2.5e9,
        both_h2d_bytes_per_second=2.5e9,
    )


def cuda_estimate(device_name: str, peak_flops: float | None) -> HardwareProfile:
    """Some accelerator, from its dense bf16 peak where that is known.

    Args:
        device_name: as its driver gives it.
        peak_flops: dense bf16 FLOP/s from its datasheet; None assumes a small card's 60e12.

    Returns:
        Curves that are shares of the peak, shaped like those of the shipped profiles; a byte of
        the device's memory per 500 FLOPs of the peak, at least 0.3e12 bytes/s (few have less);
        copies like PCIe 4.0 x16 where the device is known, and 3.0 x16 where it is not.
    """
    if peak_flops is None:
        source = "conservative estimate of an unknown device; `sppo calibrate` measures"
        peak_flops = _UNKNOWN_PEAK_FLOPS
        copy_bytes_per_second = 11e9
    else:
        source = f"estimate: shares of {peak_flops:.3g} FLOP/s, its datasheet's dense bf16 peak"
        copy_bytes_per_second = 20e9
    matmul = _MATMUL_SHARE.scaled(peak_flops)
    attention = _ATTENTION_SHARE.scaled(peak_flops)

    def by_dtype(curve: Curve) -> dict[str, Curve]:
        single = curve.scaled(_FLOAT32_SHARE)
        return {"bfloat16": curve, "float16": curve, "float32": single}

    return HardwareProfile(
        name=device_name,
        kind="cuda",
        estimated=True,
        source=source,
        matmul_flops=by_dtype(matmul),
        attention_forward_flops=by_dtype(attention),
        attention_backward_flops=by_dtype(attention.scaled(_BACKWARD_SHARE)),
        memory_bytes_per_second=max(0.3e12, peak_flops / 500),
        launch_seconds=1e-3,
        d2h_bytes_per_second=copy_bytes_per_second,
        h2d_bytes_per_second=copy_bytes_per_second,
        both_d2h_bytes_per_second=0.8 * copy_bytes_per_second,
        both_h2d_bytes_per_second=0.8 * copy_bytes_per_second,
    )
