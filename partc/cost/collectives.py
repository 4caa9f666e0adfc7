"""The duration of collectives and sends on a cluster: latency and bandwidth terms of the algorithms.

With n members, an operand of b bytes on each rank, bandwidth B, and latency a of one step of the algorithm:

    ring       all-gather (n-1)(a + b/B), reduce-scatter (n-1)(a + b/nB), all-reduce 2(n-1)(a + b/nB)
    tree       all-reduce 2 log2(n) a + 2 b/B
    switches   all-reduce 2 a + b/eB, where switches compute sums with an efficiency e
    two levels inside domains, then between their members of equal rank; each level by its best algorithm
    pairwise   all-to-all: the part for the own domain, concurrently with the part for others
    by domain  rows of experts: each token's row goes once to a domain with some of its experts, then on to each of them

Between CPUs the emitted programs send everything directly: each member of an all-gather sends its operand to all
others, as in an all-to-all. Sums of more than DIRECT bytes are gloo's ring.

A ring through several domains leaves a domain as often as it has members there, each time over another device's link.
The quickest algorithm counts, since NCCL chooses by a table of the same kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from partc.cluster.cluster import Cluster, GroupSpan
from partc.cluster.network import Link
from partc.cost.calibration import Calibration
from partc.runtime.plan import DIRECT

# Seconds until all ranks of a collective have entered it and its kernel runs: NCCL's base latency of a ring.
MEETING = 8e-6
# NCCL's own figure for the efficiency of sums in NVLink's switches (nvlsEfficiency in src/graph/tuning.cc).
IN_SWITCHES = 0.85
_PAIRWISE = frozenset({"all_to_all", "dispatch", "combine", "exchange"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The links of a cluster at the rates that collectives reach."""

    cluster: Cluster
    constants: Calibration

    @property
    def inside(self) -> float:
        return self.cluster.inside.bandwidth * self.constants.inside

    @property
    def between(self) -> float:
        return self.cluster.between.bandwidth * self.constants.between

    def collective(self, op: str, span: GroupSpan, size: int, choices: int = 1) -> float:
        """Seconds of a collective on `size` bytes of each rank.

        `choices` is the number of experts of each token; if it is more than one, a token's row goes to each domain
        once.
        """
        n = span.members
        if n <= 1:
            return 0.0
        if self.cluster.device.kind == "cpu":
            return self._directly(op, span, size)
        if op == "shift":  # one message crosses to the next domain over one device's link
            return self.send(size, near=span.domains == 1)
        if op in _PAIRWISE:
            return MEETING + self._pairwise(span, size, choices)
        if op == "all_gather":
            return MEETING + self._gathered(span, size * n)
        if op == "reduce_scatter":
            return MEETING + self._gathered(span, size)
        return MEETING + self._summed(span, size)

    def send(self, size: int, *, near: bool, share: float = 1.0) -> float:
        """Seconds of one message to one other device: over a near link, or with `share` of the bandwidth between
        nodes.
        """
        link, rate = (self.cluster.inside, self.inside) if near else (self.cluster.between, self.between * share)
        meeting = MEETING if self.cluster.device.kind == "gpu" else 0.0
        return meeting + link.latency + size / rate

    def _directly(self, op: str, span: GroupSpan, size: int) -> float:
        """Seconds of a collective between CPUs. The latency of their links is that of a whole exchange over gloo."""
        n = span.members
        if op == "shift":
            rate, _ = self._ring(span)
            return (self.cluster.inside if span.domains == 1 else self.cluster.between).latency + size / rate
        if op == "all_gather" or (op == "all_reduce" and size * (n - 1) <= DIRECT):
            return self._pairwise(span, size * n)
        if op != "all_reduce":
            return self._pairwise(span, size)
        rate, latency = self._ring(span)
        return 2 * latency + 2 * size * (n - 1) / n / rate

    def _ring(self, span: GroupSpan) -> tuple[float, float]:
        """The bandwidth of a ring over the group, and the summed latencies of its steps."""
        link, far = self.cluster.inside, self.cluster.between
        if span.domains == 1:
            rate = self.inside if link.switched or span.members >= self.cluster.near else self._unswitched(span.near)
            return rate, (span.members - 1) * link.latency
        share = self.cluster.topology.ring_share(span.domains, span.stride)
        out = self.between * share * span.near
        rate = out if span.near == 1 else min(self.inside, out)
        steps = span.domains * far.latency + (span.members - span.domains) * link.latency
        return rate, steps

    def _unswitched(self, members: int) -> float:
        """The part of a device's links that leads to the other members."""
        return self.inside * (members - 1) / max(1, self.cluster.near - 1)

    def _gathered(self, span: GroupSpan, total: int) -> float:
        """Seconds of an all-gather, or a reduce-scatter, of `total` bytes."""
        n = span.members
        rate, latency = self._ring(span)
        ring = latency + total * (n - 1) / n / rate
        if span.domains == 1 or span.near == 1:
            return ring
        far, near = self._levels(span)
        apart = self._gathered(far, total // span.near) + self._gathered(near, total)
        return min(ring, apart)

    def _summed(self, span: GroupSpan, size: int) -> float:
        n = span.members
        rate, latency = self._ring(span)
        found = [2 * latency + 2 * size * (n - 1) / n / rate]
        link: Link = self.cluster.inside if span.domains == 1 else self.cluster.between
        steps = math.ceil(math.log2(n)) if span.domains == 1 else math.ceil(math.log2(span.domains)) + span.near - 1
        found.append(2 * steps * link.latency + 2 * size / rate)
        if link.reduces and span.domains == 1:
            found.append(2 * link.latency + size / (IN_SWITCHES * rate))
        if span.domains > 1 and span.near > 1:
            far, near = self._levels(span)
            found.append(2 * self._gathered(near, size) + self._summed(far, size // span.near))
        return min(found)

    def _levels(self, span: GroupSpan) -> tuple[GroupSpan, GroupSpan]:
        return (
            GroupSpan(members=span.domains, near=1, stride=span.stride),
            GroupSpan(members=span.near, near=span.near),
        )

    def _pairwise(self, span: GroupSpan, size: int, choices: int = 1) -> float:
        """Seconds of an all-to-all. A token's `choices` are spread evenly over domains; its row goes once to each
        chosen domain.
        """
        n, near = span.members, span.near
        link, far = self.cluster.inside, self.cluster.between
        within = size * (near - 1) / n / self.inside + (near - 1) * link.latency
        if span.domains == 1:
            return within
        share = self.cluster.topology.spread_share(span.domains, span.stride)
        share = min(share, far.spread) if span.domains > 2 else share
        # Messages to several devices travel concurrently: each further one only adds the time to issue it.
        leaving = size * (n - near) / n
        if choices > 1:
            leaving = size / choices * (span.domains - 1) * (1 - (1 - 1 / span.domains) ** choices)
            within = size * (near - 1) / near / self.inside + (near - 1) * link.latency
        across = leaving / (self.between * share) + far.latency + (n - near) * 1e-6
        return max(within, across)
