"""The constants of the cost model: the shares of the data sheets' rates that programs reach, by device.

Each constant is a share of a rate in the data sheet, or a ratio of times; its comment says which. The constants of
A100, H100 and Blackwell are fitted, between plausible bounds, to published training runs
(tests/benchmarks/published.py); other devices take those of the most similar device. Shares in training are about 0.8
of the shares that a kernel reaches alone (H100: 0.80 in products), since clocks fall under load. Blackwell, which has
more operations for each watt, keeps 0.7 of its 0.78. GB300 may use more power than GB200 (1.4 kW, 1.2 kW).

Attention is computed by the kernel that packages prefer on the device: FlashAttention-2 on A100, cuDNN's on H100 and
Blackwell. A100's published runs are of 2021 to 2023, most of them with Triton's kernel of the first FlashAttention, so
that the constant lies below the 0.54 of FlashAttention-2. On Hopper FlashAttention-2 reaches 0.45 of the peak alone,
and cuDNN's kernel is 1.6 times as quick (Shah et al. 2024, FlashAttention-3, figures 5 and 6). On B200 cuDNN's is 2.1
times as quick as Triton's (Zadouri et al. 2026, FlashAttention-4): it computes exponentials during products, so that
the share, which counts them apart, is higher.
`partc simulate --calibration FILE` overrides the constants, in TOML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from partc.cluster.cluster import Cluster
from partc.cluster.device import Device
from partc.cluster.files import toml
from partc.errors import PartcError
from partc.runtime.documents import Malformed, at_least, at_most, decoded, more_than

Share = Annotated[float, more_than(0), at_most(1.5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Six constants of a kind of device."""

    products: Share = 0.75  # of the peak, in large matrix products
    attention: Share = 0.5  # of the peak, in the products of fused attention, without its exponentials
    streaming: Share = 0.8  # of the memory's bandwidth, in kernels that compute elementwise or along rows
    inside: Share = 0.75  # of the bandwidth of links inside a node, in large collectives
    between: Share = 0.75  # of the bandwidth of links between nodes, in large collectives
    # Added to the time of computation while a collective runs concurrently.
    slowdown: Annotated[float, at_least(0), at_most(10)] = 0.1


_A100 = Calibration(products=0.68, attention=0.46, streaming=0.8, inside=0.7, between=0.85, slowdown=0.15)
_H100 = Calibration(products=0.67, attention=0.58, streaming=0.8, inside=0.75, between=0.85, slowdown=0.2)
_BLACKWELL = replace(_H100, products=0.56, attention=0.76)
# By the device's model. A process on a CPU reaches the rates that are measured there.
KNOWN: Mapping[str, Calibration] = {
    "V100": replace(_A100, attention=0.35),
    "A100": _A100,
    "H100": _H100,
    "H200": _H100,
    "B200": _BLACKWELL,
    "GB200": _BLACKWELL,
    "B300": _BLACKWELL,
    "GB300": replace(_BLACKWELL, products=0.65),
    "MI300X": replace(_H100, products=0.5, attention=0.3),
    "CPU": Calibration(products=1.0, attention=0.5, streaming=1.0, inside=1.0, between=1.0),
}


AttentionKernel = Literal["auto", "cudnn", "flash-3", "flash-2", "triton"]
# The times of attention kernels forward and backward, as multiples of the time of the kernel that packages prefer. On
# Hopper, FlashAttention-2 takes 1.6 times as long as cuDNN's (Shah et al. 2024). Triton's kernel of the first
# FlashAttention takes 1.3 to 1.5 times as long as FlashAttention-2 forward, and twice as long backward (Dao 2023,
# FlashAttention-2, section 4.1). On Blackwell, both are kernels for older devices (Zadouri et al. 2026). The constants
# of older devices are those of runs with any of these kernels.
_HOPPER: Mapping[AttentionKernel, tuple[float, float]] = {"flash-2": (1.6, 1.6), "triton": (2.2, 3.2)}
_BLACKWELL_FLASH: Mapping[AttentionKernel, tuple[float, float]] = {"flash-2": (2.1, 2.1), "triton": (2.1, 2.1)}
_ATTENTION: Mapping[str, Mapping[AttentionKernel, tuple[float, float]]] = {
    "H100": _HOPPER, "H200": _HOPPER,
    **dict.fromkeys(("B200", "GB200", "B300", "GB300"), _BLACKWELL_FLASH),
}  # fmt: skip


def attention_times(cluster: Cluster, kernel: AttentionKernel) -> tuple[float, float]:
    """The time of an attention kernel, forward and backward, as multiples of the time of the preferred one."""
    return _ATTENTION.get(cluster.device.name.partition("-")[0], {}).get(kernel, (1.0, 1.0))


# The share of the peak that products of 8-bit operands reach alone, as a multiple of the share that those of 16-bit
# operands reach: 0.709 and 0.803 on H100, 0.734 and 0.803 on H200, whose power limits the clock. On B200 (0.763 and
# 0.776) and GB200 (0.723 and 0.729) they differ little (Bekman, Machine Learning Engineering, maximum achievable matmul
# FLOPS).
_EIGHT_BITS: Mapping[str, float] = {"H100": 0.88, "H200": 0.91}


def eight_bit_share(device: Device) -> float:
    """The share of the peak that products in fp8 reach, as a multiple of the share that those in bf16 reach."""
    return _EIGHT_BITS.get(device.name.partition("-")[0], 1.0)


def calibration(cluster: Cluster) -> Calibration:
    """The constants of a cluster's devices."""
    return KNOWN.get(cluster.device.name.partition("-")[0], Calibration())


def read(path: Path, known: Calibration) -> Calibration:
    """`known` with the constants of a TOML file in place of its own. Raises PartcError P0805 for a file that does not
    parse.
    """
    try:
        found = toml(path)
        values = decoded(Calibration, found)
    except Malformed as error:
        raise PartcError("P0805", f"{path} {error}", help="for example: products = 0.7") from None
    return replace(known, **{name: getattr(values, name) for name in found})
