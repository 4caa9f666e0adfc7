"""Links, and topologies of the network between nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LinkKind = Literal["nvlink", "infinity-fabric", "pcie", "memory", "infiniband", "roce", "tcp"]
TopologyKind = Literal["fat-tree", "ring", "torus", "hypercube", "dragonfly", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A device's connection to the other devices of its node, or to the devices of other nodes."""

    kind: LinkKind
    bandwidth: float  # bytes per second each way, of one device
    latency: float  # seconds of an empty message
    switched: bool = True  # whether any two devices can use their full bandwidth
    reduces: bool = False  # whether switches compute sums
    shared: bool = False  # whether a node's devices share it, so that one of them alone has the bandwidth of all
    spread: float = 1.0  # the share of the bandwidth that concurrent messages to several nodes reach


# Latencies of GPUs' links: one step of a ring with NCCL's protocol for large messages (Simple). Inside a node they are
# those of NCCL's own cost model (hwLat in src/graph/tuning.cc). Between nodes this model has 14 microseconds, while
# all-gathers and reduce-scatters take 60 to 75 more microseconds for each node of 8 than their bytes need: 256 MB on
# 2 to 64 nodes in the best runs of the Ultra-Scale Playbook, 8 GB on 128 nodes in issue 1229 of NVIDIA/nccl.
LATENCY: Mapping[LinkKind, float] = {
    "nvlink": 3.4e-6, "infinity-fabric": 3.4e-6, "pcie": 5.7e-6, "memory": 4e-5, "infiniband": 4e-5,
    "roce": 4e-5, "tcp": 5e-5,
}  # fmt: skip


def link(kind: LinkKind, gigabytes: float, *, switched: bool = True, reduces: bool = False) -> Link:
    return Link(kind=kind, bandwidth=gigabytes * 1e9, latency=LATENCY[kind], switched=switched, reduces=reduces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The network between nodes.

    A node has one link to each neighbour of a ring, torus or hypercube, and its bandwidth is divided among them. In a
    fat tree, a dragonfly and a full network it has one link into the switches.
    """

    kind: TopologyKind = "fat-tree"
    dims: tuple[int, ...] = ()  # nodes along each dimension of a torus, slowest first
    oversubscription: float = 1.0  # of a fat tree: bandwidth into a leaf switch over bandwidth out of it
    leaf: int = 0  # nodes below one leaf switch, or in a group of a dragonfly; 0: all nodes

    def hops(self, nodes: int) -> float:
        """The mean number of links on the path between two of `nodes` nodes, over all pairs."""
        match self.kind:
            case "ring":
                return max(1.0, nodes / 4)
            case "torus":
                return max(1.0, sum(size / 4 for size in self.dims))
            case "hypercube":
                return max(1.0, math.log2(nodes) / 2) if nodes > 1 else 1.0
            case "full":
                return 1.0
            case "dragonfly":
                return 3.0 if self.leaf and nodes > self.leaf else 1.0
            case _:
                return 3.0 if self.leaf and nodes > self.leaf else 1.0

    def ring_share(self, nodes: int, stride: int) -> float:
        """The share of a node's bandwidth that a ring through `nodes` nodes gets, `stride` apart, while other nodes run
        rings too.

        Messages pass through the nodes between two members of the ring, so that `stride` rings share each link.
        """
        match self.kind:
            case "ring":
                return 1 / (2 * stride)
            case "torus":
                inner = 1
                for size in reversed(self.dims):
                    if stride < inner * size:
                        return 1 / (2 * len(self.dims) * max(1, stride // inner))
                    inner *= size
                return 1 / (2 * len(self.dims))
            case "hypercube":
                return 1 / max(1.0, math.log2(max(2, nodes * stride)))
            case _:
                # A ring leaves a switch once, and every ring with nodes below the switch does.
                return self.out_share(nodes * stride, min(stride, self.leaf))

    def spread_share(self, nodes: int, stride: int) -> float:
        """The share of a node's bandwidth if each of `nodes` nodes sends to all others at the same time."""
        match self.kind:
            case "ring" | "torus" | "hypercube":
                return min(1.0, 1 / self.hops(nodes * stride))
            case _:
                # Messages to nodes below the same switch do not leave it.
                out = (nodes - min(nodes - 1, max(1, self.leaf // stride))) / max(1, nodes - 1)
                return self.out_share(nodes * stride, self.leaf * out)

    def out_share(self, extent: int, sending: float) -> float:
        """The share of a node's bandwidth that each of `sending` nodes below a switch gets for messages that leave the
        switch.

        The communicating nodes span `extent` nodes.
        """
        if not self.leaf or extent <= self.leaf or not sending:
            return 1.0
        return min(1.0, self.leaf / (self.oversubscription * sending))
