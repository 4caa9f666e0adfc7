"""The peak flops per second of a device, the basis of a model's utilisation."""

from __future__ import annotations

import time

import torch

from .sending import finish

# Dense matrix products, in 10^12 flops per second; fp32 without TF32, which torch disables by default. From NVIDIA's
# data sheets (SXM if there are several forms), halved where they state the rate "with sparsity".
_TERAFLOPS: tuple[tuple[str, dict[torch.dtype, float]], ...] = (
    ("H200", {torch.bfloat16: 989, torch.float16: 989, torch.float32: 67, torch.float64: 67}),
    ("H100 PCIe", {torch.bfloat16: 756, torch.float16: 756, torch.float32: 51, torch.float64: 51}),
    ("H100 NVL", {torch.bfloat16: 835, torch.float16: 835, torch.float32: 60, torch.float64: 60}),
    ("H100", {torch.bfloat16: 989, torch.float16: 989, torch.float32: 67, torch.float64: 67}),
    ("A100", {torch.bfloat16: 312, torch.float16: 312, torch.float32: 19.5, torch.float64: 19.5}),
    ("L40S", {torch.bfloat16: 362, torch.float16: 362, torch.float32: 91.6}),
    ("L4", {torch.bfloat16: 121, torch.float16: 121, torch.float32: 30.3}),
    ("A10", {torch.bfloat16: 125, torch.float16: 125, torch.float32: 31.2}),
    ("V100", {torch.float16: 125, torch.float32: 15.7, torch.float64: 7.8}),
    ("T4", {torch.float16: 65, torch.float32: 8.1}),
)
_SIDE, _SECONDS = 768, 0.2


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """The peak of a GPU by its driver's name ("NVIDIA H100 80GB HBM3"), in flops per second."""
    words = name.replace("-", " ").split()
    for device, speeds in _TERAFLOPS:
        if all(word in words for word in device.split()):
            speed = speeds.get(dtype)
            return None if speed is None else speed * 1e12
    return None


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The best of several products of square matrices, in flops per second, with the threads of training."""
    side = _SIDE if device.type == "cpu" else 8192
    x = torch.randn(side, side, device=device).to(dtype)
    best, until = float("inf"), time.monotonic() + _SECONDS
    while time.monotonic() < until or best == float("inf"):
        finish(device)
        start = time.perf_counter()
        x @ x
        finish(device)
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def peak(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """The peak of one device, and its source."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = known_peak(name, dtype)
        if found is not None:
            return found, f"{name}'s data sheet"
    return measured_peak(device, dtype), "measured by a matrix product"
