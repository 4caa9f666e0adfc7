"""A cluster: equal nodes of equal devices, their links, and the network between nodes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from partc.cluster.device import DEVICES, Device, processor
from partc.cluster.network import Link, Topology, link
from partc.errors import PartcError
from partc.ir.mesh import Mesh

MOST_DEVICES = 2**20
FLAT = Topology()  # a fat tree without oversubscription


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` nodes with `devices` devices each. Devices of one domain are connected by `inside`, all others by
    `between`.

    A domain is a node, or several nodes that share switches (72 GPUs of GB200 NVL72).
    """

    name: str
    nodes: int
    devices: int
    device: Device
    inside: Link
    between: Link
    topology: Topology = FLAT
    domain: int = 0
    processors: int = 0  # if devices are processes: the cores that all of them share; 0: each has its own core
    # Measured additional share of computation's time during a collective; None: the device's default.
    slowdown: float | None = None

    @property
    def size(self) -> int:
        return self.nodes * self.devices

    @property
    def near(self) -> int:
        """The number of devices in a domain."""
        return self.domain or self.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """The placement of a group: `members` ranks, of which `near` share each domain; its domains are `stride` apart."""

    members: int
    near: int
    stride: int = 1

    @property
    def domains(self) -> int:
        return -(-self.members // self.near)


def span(mesh: Mesh, axes: Iterable[str], cluster: Cluster) -> GroupSpan:
    """The placement of a group over some axes. The ranks of the mesh's last axis are neighbours."""
    wanted = set(axes)
    strides: dict[str, int] = {}
    stride = 1
    for name, size in reversed(mesh.axes):
        strides[name] = stride
        stride *= size
    near, step = 1, math.inf
    members = math.prod(mesh.axis(name) for name in wanted)
    for name in reversed(mesh.names):
        size = mesh.axis(name)
        if name not in wanted or size == 1:
            continue
        inside = min(size, max(1, cluster.near // strides[name]))
        near *= inside
        if inside < size:
            step = min(step, strides[name] * inside / cluster.near)
    return GroupSpan(members=members, near=min(near, members), stride=1 if step is math.inf else max(1, int(step)))


# Links by device: inside a node, and to other nodes (bandwidth of one device each way, in 10^9 bytes per second).
_LINKS: Mapping[str, tuple[Link, Link]] = {
    "V100": (link("nvlink", 150, switched=False), link("infiniband", 6.25)),
    "A100": (link("nvlink", 300), link("infiniband", 25)),
    "H100": (link("nvlink", 450, reduces=True), link("infiniband", 50)),
    "H200": (link("nvlink", 450, reduces=True), link("infiniband", 50)),
    "B200": (link("nvlink", 900, reduces=True), link("infiniband", 50)),
    "B300": (link("nvlink", 900, reduces=True), link("infiniband", 100)),
    "GB200": (link("nvlink", 900, reduces=True), link("infiniband", 50)),
    "GB300": (link("nvlink", 900, reduces=True), link("infiniband", 100)),
    "MI300X": (link("infinity-fabric", 448, switched=False), link("roce", 50)),
    "A10": (link("pcie", 32), link("tcp", 3.1)),
    "L4": (link("pcie", 32), link("tcp", 3.1)),
    "L40S": (link("pcie", 32), link("roce", 12.5)),
    "RTX3090": (link("pcie", 32), link("tcp", 1.25)),
    "RTX4090": (link("pcie", 32), link("tcp", 1.25)),
    "RTX5090": (link("pcie", 64), link("tcp", 1.25)),
    "RTXA6000": (link("pcie", 32), link("tcp", 1.25)),
    "CPU": (link("memory", 1.5), link("tcp", 0.5)),
}
_DOMAINS = {"GB200": 72, "GB300": 72}  # devices that share switches, beyond a node
_SPEC = re.compile(r"(?:(\d{1,7})x)?(?:(\d{1,7})x)?([A-Za-z][A-Za-z0-9]*(?:-\d+GB)?)")
_FORM = "for example 8xH100-80GB, 16x8xA100-80GB (nodes x devices), 4xCPU, or a file.toml"


def preset(spec: str) -> Cluster:
    """The cluster that a text such as `8xH100-80GB` or `16x8xA100-80GB` names. Raises PartcError P0801 and P0802."""
    found = _SPEC.fullmatch(spec.strip())
    if found is None:
        raise PartcError("P0801", f"cluster {spec!r} does not parse", help=_FORM)
    counts = [int(text) for text in found.groups()[:2] if text is not None]
    device = _device(found[3])
    nodes, devices = (1, *counts)[-2:] if counts else (1, 1)
    if not 1 <= nodes * devices <= MOST_DEVICES:
        raise PartcError(
            "P0801", f"cluster {spec!r} has {nodes * devices:,} devices", help=f"give 1 to {MOST_DEVICES:,}"
        )
    model = device.name.partition("-")[0]
    inside, between = _LINKS[model]
    domain = _DOMAINS.get(model, 0)
    return Cluster(
        name=spec.strip(),
        nodes=nodes,
        devices=devices,
        device=device,
        inside=inside,
        between=between,
        domain=min(domain, nodes * devices) if domain > devices and domain % devices == 0 else 0,
    )


def _device(name: str) -> Device:
    """A device by its full name, or by its model, which stands for the variant with the most memory."""
    if name.upper() == "CPU":
        return processor()
    whole = {key.upper(): device for key, device in DEVICES.items()}
    same = [device for key, device in whole.items() if key.partition("-")[0] == name.upper()]
    found = whole.get(name.upper()) or max(same, key=lambda device: device.memory, default=None)
    if found is None:
        raise PartcError(
            "P0802", f"there is no device {name!r}", help=f"known are {', '.join(DEVICES)} and CPU; or {_FORM}"
        )
    return found


def fitted(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster. Raises PartcError P0803 if it has fewer devices than a mesh of `ranks` ranks needs."""
    if ranks > cluster.size:
        raise PartcError(
            "P0803",
            f"a mesh of {ranks:,} ranks needs more than the {cluster.size:,} devices of {cluster.name}",
            help="give a smaller mesh, or more nodes",
        )
    return cluster


def resized(cluster: Cluster, nodes: int) -> Cluster:
    """The cluster with another number of nodes."""
    return replace(cluster, nodes=nodes)
