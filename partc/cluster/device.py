"""Devices, with the figures of their data sheets.

Peaks are for dense products with sums in fp32. Figures that vendors state "with sparsity" are halved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from partc.ir.program import DType

DeviceKind = Literal["gpu", "cpu"]

# A package's step of 1,400 launches took 53 ms on an H200, in which kernels ran for 40 ms (docs/benchmarks.md). One
# launch of a compiled kernel of Triton takes the host 9 to 50 microseconds (pull requests 3638 of triton-lang/triton,
# 34838 of vllm-project/vllm), a product by torch 23 (issue 459 of triton-lang/triton).
HOST = 3.8e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator, or the CPU cores of one process."""

    name: str
    memory: int  # bytes
    peak: Mapping[DType, float]  # flops per second of matrix products, by the type of their operands
    bandwidth: float  # bytes per second between the device and its memory, read or written
    cores: int = 1  # multiprocessors: each computes one tile of a product at a time
    launch: float = 3e-6  # seconds from a kernel's end to the start of the next one in a queue
    host: float = HOST  # seconds in which the host issues an operation
    # Seconds that a tile of a matrix product takes to load its first operands and to store its last sums.
    fill: float = 0.0
    kind: DeviceKind = "gpu"
    attention: float = 0.0  # flops per second of fused attention, if measured
    special: float = 0.0  # exponentials per second; 0: bound by memory
    fp8: float = 0.0  # flops per second of products of 8-bit floats; 0 for a device without them
    spread: float = 0.0  # standard deviation of equal devices' rates of products, as a share of their mean
    jitter: float = 0.0  # seconds: the variance of the duration of one second of computation, in seconds squared

    def peak_of(self, dtype: str) -> float:
        """The peak for a type of operands, in flops per second. Types without a peak of their own have that of fp32."""
        return next((rate for name, rate in self.peak.items() if name == dtype), self.peak["f32"])


# Equal GPUs of several clusters differ by 8% in matrix products between the whiskers of a box plot, which are 5.4
# standard deviations apart (Sinha et al. 2022, "Not All GPUs Are Created Equal").
_SPREAD = 0.015
# A multiprocessor computes 16 exponentials a cycle (CUDA C++ Programming Guide, throughput of instructions), at about
# 1.7 GHz; those of Blackwell Ultra compute 32.
_SPECIAL = 16 * 1.7e9
_QUICK_SPECIAL = ("B300", "GB300")
# From H100's products of 4096 x 4096 with 256 to 4096 terms (XLA's table for sm_90, matmul_interpolator_data.h).
# Blackwell has room for two tiles' sums, so that one leaves during the next one's products: 1024 terms reach its best
# rates (Bekman, Machine Learning Engineering, maximum achievable matmul FLOPS).
_FILL, _QUICK_FILL = 1.3e-6, 3e-7
_BLACKWELL = ("B200", "GB200", "B300", "GB300")
_WITHOUT_FP8 = ("V100", "A100", "A10", "RTX3090", "RTXA6000")


def _gpu(
    name: str, gigabytes: float, low: float, single: float, terabytes: float, cores: int, double: float = 0.0
) -> Device:
    """A GPU, with peaks in 10^12 flops per second; `single` is fp32 without TF32, which torch disables by default.

    If the GPU has fp8 products, they are twice as fast as bf16.
    """
    model = name.partition("-")[0]
    peak: dict[DType, float] = {"f16": low * 1e12, "bf16": low * 1e12, "f32": single * 1e12}
    peak["f64"] = (double or single / 32) * 1e12
    fp8 = 0.0 if model in _WITHOUT_FP8 else 2 * low * 1e12
    memory, bandwidth = int(gigabytes * 1e9), terabytes * 1e12
    special = cores * _SPECIAL * (2 if model in _QUICK_SPECIAL else 1)
    fill = _QUICK_FILL if model in _BLACKWELL else _FILL
    return Device(
        name=name, memory=memory, peak=peak, bandwidth=bandwidth, cores=cores, fill=fill, special=special, fp8=fp8,
        spread=_SPREAD,
    )  # fmt: skip


def processor() -> Device:
    """One process on a core of this machine. Its rates are rough; `partc cluster measure` replaces them."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        name="CPU",
        memory=memory,
        peak={"f32": 6e10, "f64": 3e10, "bf16": 3e10, "f16": 3e10},
        bandwidth=8e9,
        launch=1e-6,
        host=4e-6,
        kind="cpu",
    )


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("V100-16GB", 17.2, 125, 15.7, 0.9, 80, 7.8),
        _gpu("V100-32GB", 34.4, 125, 15.7, 0.9, 80, 7.8),
        _gpu("A100-40GB", 42.4, 312, 19.5, 1.555, 108, 19.5),
        _gpu("A100-80GB", 85.1, 312, 19.5, 2.039, 108, 19.5),
        _gpu("H100-80GB", 85.5, 989, 67, 3.35, 132, 67),
        _gpu("H200-141GB", 150.1, 989, 67, 4.8, 132, 67),
        _gpu("B200-180GB", 191.5, 2250, 80, 8.0, 148, 40),
        _gpu("B300-288GB", 288.4, 2250, 80, 8.0, 148, 1.3),
        _gpu("GB200-186GB", 198.0, 2500, 80, 8.0, 148, 40),
        _gpu("GB300-288GB", 288.4, 2500, 80, 8.0, 160, 1.3),
        _gpu("MI300X-192GB", 206.1, 1307, 163, 5.3, 304, 163),
        _gpu("A10-24GB", 24.1, 125, 31.2, 0.6, 72),
        _gpu("L4-24GB", 24.1, 121, 30.3, 0.3, 58),
        _gpu("L40S-48GB", 48.3, 362, 91.6, 0.864, 142),
        _gpu("RTX3090-24GB", 25.4, 71, 35.6, 0.936, 82),
        _gpu("RTX4090-24GB", 25.3, 165, 82.6, 1.008, 128),
        _gpu("RTX5090-32GB", 33.7, 209, 104.8, 1.792, 170),
        _gpu("RTXA6000-48GB", 51.0, 155, 38.7, 0.768, 84),
    )
}
