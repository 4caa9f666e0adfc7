"""Clusters described in TOML files, which are read as untrusted data.

    name = "lab"
    nodes = 4
    devices = 8
    device = "A100-80GB"          # a preset; or a table with memory, peak, bandwidth, ...

    [inside]
    kind = "nvlink"
    gigabytes = 300               # a second, each way, of one device

    [between]
    kind = "infiniband"
    gigabytes = 25

    [network]
    kind = "fat-tree"
    leaf = 2
    oversubscription = 2.0

Omitted fields have the values of the device's preset.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from partc.cluster.cluster import MOST_DEVICES, Cluster, preset
from partc.cluster.device import HOST, Device
from partc.cluster.network import LATENCY, Link, LinkKind, Topology, TopologyKind
from partc.errors import PartcError
from partc.ir.program import DType
from partc.runtime.documents import Malformed, Natural, Positive, at_least, at_most, contents, decoded, more_than

# Beyond these bounds, durations or their sums would not be finite.
_Rate = Annotated[float, at_least(1.0), at_most(1e24)]  # a second
_Gigabytes = Annotated[float, at_least(1e-6), at_most(1e12)]  # a second
_Seconds = Annotated[float, at_least(0), at_most(3600)]


@dataclass(frozen=True, kw_only=True)
class _DeviceTable:
    name: str
    memory: Positive
    peak: dict[DType, _Rate]
    bandwidth: _Rate
    cores: Positive = 1
    launch: _Seconds = 3e-6
    host: _Seconds = HOST
    fill: _Seconds = 0.0
    kind: str = "gpu"
    attention: Annotated[float, at_least(0), at_most(1e24)] = 0.0
    special: Annotated[float, at_least(0), at_most(1e24)] = 0.0
    fp8: Annotated[float, at_least(0), at_most(1e24)] = 0.0
    spread: Annotated[float, at_least(0), at_most(1)] = 0.0
    jitter: _Seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class _LinkTable:
    kind: LinkKind
    gigabytes: _Gigabytes
    latency: _Seconds | None = None
    switched: bool = True
    reduces: bool = False
    shared: bool = False
    spread: Annotated[float, more_than(0), at_most(1)] = 1.0


@dataclass(frozen=True, kw_only=True)
class _NetworkTable:
    kind: TopologyKind = "fat-tree"
    dims: tuple[Positive, ...] = ()
    oversubscription: Annotated[float, at_least(1), at_most(1e6)] = 1.0
    leaf: Natural = 0


@dataclass(frozen=True, kw_only=True)
class _ClusterTable:
    nodes: Positive
    devices: Positive
    device: str | _DeviceTable
    name: str = ""
    inside: _LinkTable | None = None
    between: _LinkTable | None = None
    network: _NetworkTable = field(default_factory=_NetworkTable)
    domain: Natural = 0
    processors: Natural = 0
    slowdown: Annotated[float, at_least(0), at_most(10)] | None = None


def cluster_of(spec: str) -> Cluster:
    """The cluster that a preset's text or a TOML file describes. Raises PartcError P0801 and P0802."""
    if not spec.lower().endswith(".toml"):
        return preset(spec)
    path = Path(spec)
    try:
        table = decoded(_ClusterTable, toml(path))
        return _cluster(table, path)
    except Malformed as error:
        raise PartcError("P0801", f"{spec} {error}", help="see `partc explain P0801` for the fields") from None


def toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file. Raises Malformed."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(contents(path, largest=1 << 20).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, Malformed) else Malformed(f"is not TOML: {error}") from None


def _cluster(table: _ClusterTable, path: Path) -> Cluster:
    if table.nodes * table.devices > MOST_DEVICES:
        raise Malformed(f"has {table.nodes * table.devices:,} devices, more than {MOST_DEVICES:,}")
    if isinstance(table.device, str):
        try:
            found = preset(f"{table.nodes}x{table.devices}x{table.device}")
        except PartcError as error:
            raise PartcError(error.code, f"{path}: {error.cause}", help=error.help) from None
    else:
        if table.inside is None or table.between is None:
            raise Malformed("describes a device of its own, and needs the tables inside and between for its links")
        found = preset(f"{table.nodes}x{table.devices}xH100-80GB")
        found = replace(found, device=_device(table.device), domain=0)
    topology = Topology(**{each.name: getattr(table.network, each.name) for each in dataclasses.fields(Topology)})
    _check(topology, table)
    return replace(
        found,
        name=table.name or path.stem,
        inside=found.inside if table.inside is None else _link(table.inside),
        between=found.between if table.between is None else _link(table.between),
        topology=topology,
        domain=table.domain or found.domain,
        processors=table.processors,
        slowdown=table.slowdown,
    )


def _device(table: _DeviceTable) -> Device:
    if "f32" not in table.peak:
        raise Malformed("has no device.peak.f32")
    if table.kind not in ("gpu", "cpu"):
        raise Malformed(f"has device.kind {table.kind!r}, which is none of gpu, cpu")
    values = {each.name: getattr(table, each.name) for each in dataclasses.fields(Device)}
    return Device(**values)


def _link(table: _LinkTable) -> Link:
    latency = LATENCY[table.kind] if table.latency is None else table.latency
    return Link(
        kind=table.kind,
        bandwidth=table.gigabytes * 1e9,
        latency=latency,
        switched=table.switched,
        reduces=table.reduces,
        shared=table.shared,
        spread=table.spread,
    )


def _check(topology: Topology, table: _ClusterTable) -> None:
    """Raise Malformed if a description contradicts itself."""
    if topology.kind == "torus":
        if math.prod(topology.dims) != table.nodes or len(topology.dims) not in (2, 3):
            raise Malformed(
                f"has a torus of {'x'.join(map(str, topology.dims)) or 'no'} nodes, and nodes = {table.nodes}"
            )
    elif topology.dims:
        raise Malformed(f"gives network.dims, which a {topology.kind} does not have")
    if topology.kind == "hypercube" and table.nodes & (table.nodes - 1):
        raise Malformed(f"has a hypercube of {table.nodes} nodes, which is not a power of 2")
    if topology.kind not in ("fat-tree", "dragonfly") and (topology.leaf or topology.oversubscription != 1):
        raise Malformed(f"gives network.leaf or network.oversubscription, which a {topology.kind} does not have")
    if topology.leaf and (topology.leaf > table.nodes or table.nodes % topology.leaf):
        raise Malformed(f"has {topology.leaf} nodes below each switch, which do not divide its {table.nodes} nodes")
    if topology.oversubscription != 1 and not topology.leaf:
        raise Malformed("is oversubscribed, and needs network.leaf: the nodes below each switch")
    if table.domain and (table.domain % table.devices or table.domain > table.nodes * table.devices):
        raise Malformed(f"has domain = {table.domain}, which is not made of whole nodes of {table.devices}")


def document(cluster: Cluster) -> dict[str, Any]:
    """The cluster as JSON."""
    return {**dataclasses.asdict(cluster), "size": cluster.size}
