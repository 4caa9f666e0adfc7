"""A cluster as text: its devices, its links, and the constants of their cost model."""

from __future__ import annotations

from collections.abc import Iterator

from partc.cluster.cluster import Cluster
from partc.cluster.device import Device
from partc.cluster.network import Link
from partc.cost.calibration import Calibration
from partc.ir.printer import readable


def _kernels(device: Device) -> Iterator[tuple[str, str]]:
    if device.fill:
        yield "tiles", f"{device.fill * 1e6:g} us to fill and drain"
    if device.special:
        yield "special", f"{device.special / 1e9:,.0f} exponentials (10^9 a second)"


def page(cluster: Cluster, constants: Calibration) -> str:
    """The text that `partc cluster show` prints."""
    device = cluster.device
    peaks = ", ".join(f"{rate / 1e12:g} {name}" for name, rate in sorted(device.peak.items()))
    rows = [
        ("devices", f"{cluster.size:,}: {cluster.nodes:,} nodes of {cluster.devices}"),
        (
            "device",
            f"{device.name}, {readable(device.memory)}, {device.bandwidth / 1e9:,.0f} GB/s, {device.cores} cores",
        ),
        ("peak", f"{peaks} (10^12 flops a second)"),
        ("launch", f"{device.launch * 1e6:g} us between kernels, {device.host * 1e6:g} us of the host for each"),
        *_kernels(device),
        ("spread", f"{device.spread:.2%} between devices, jitter {device.jitter * 1e3:g} ms"),
        ("inside", f"{_link(cluster.inside)}, among {cluster.near}"),
        ("between", _link(cluster.between)),
        ("network", _network(cluster)),
        *((("processors", f"{cluster.processors}, which all devices share"),) if cluster.processors else ()),
        *((name, f"{value:g}") for name, value in _constants(cluster, constants)),
    ]
    return "".join(f"{name:<10} {text}\n" for name, text in rows)


def _constants(cluster: Cluster, constants: Calibration) -> Iterator[tuple[str, float]]:
    for name in constants.__slots__:
        known = cluster.slowdown if name == "slowdown" else None
        yield name, getattr(constants, name) if known is None else known


def _link(link: Link) -> str:
    traits = [
        trait
        for trait, holds in (
            ("switched", link.switched),
            ("switches add", link.reduces),
            ("shared by a node", link.shared),
        )
        if holds
    ]
    words = f"{link.kind}, {link.bandwidth / 1e9:g} GB/s each way, {link.latency * 1e6:g} us"
    return ", ".join((words, *traits))


def _network(cluster: Cluster) -> str:
    found = cluster.topology
    dims = "x".join(map(str, found.dims))
    leaf = f", {found.leaf} nodes below a switch" if found.leaf else ""
    over = f", oversubscribed {found.oversubscription:g} to 1" if found.oversubscription != 1 else ""
    return f"{found.kind}{' ' if dims else ''}{dims}{leaf}{over}"
