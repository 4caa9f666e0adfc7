"""The durations of operations, collectives, sends and updates on a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from partc.cluster.cluster import Cluster, GroupSpan, span
from partc.cluster.device import Device
from partc.cluster.variation import expected_maximum
from partc.cost.calibration import AttentionKernel, Calibration, attention_times, eight_bit_share
from partc.cost.collectives import Network
from partc.cost.flops import ProductWork, product_sizes, scores
from partc.cost.roofline import EXPERTS_GRADIENT, H100, Machine, product_flops, seconds, traffic
from partc.ir.attention import Attention
from partc.ir.collectives import MOVING, cost, num_blocks
from partc.ir.layout import Sizes
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.ir.operations import VIEWS
from partc.ir.program import ITEMSIZE, SCAN, Op, TensorType
from partc.ir.scans import scan_of


class Rates(Protocol):
    """The durations of operations and communication on some hardware, in seconds."""

    @property
    def basis(self) -> str:
        """The source of the durations, in words."""

    @property
    def slowdown(self) -> float:
        """The additional time of computation while a collective runs concurrently, as a share."""

    @property
    def host(self) -> float:
        """The seconds in which the host issues an operation, concurrently with the device."""

    @property
    def cores(self) -> int:
        """The cores that all ranks share, or 0 if each has its own."""

    @property
    def pieces(self) -> bool:
        """Whether collectives over weights' axes run in pieces that overlap with pieces of the adjacent products."""

    @property
    def waits(self) -> bool:
        """Whether ranks wait for each collective around graphs as soon as it starts, so that nothing overlaps with
        it.
        """

    def operation(self, op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> float:
        """The seconds of an operation with local shapes, without any collective."""

    def collective(
        self, op: str, mesh: Mesh, axes: Sequence[str], places: Sequence[int], size: int, choices: int = 1
    ) -> float:
        """The seconds of a collective on `size` bytes of each rank, over axes, or over coordinates on the pipeline
        axis.

        `choices` is the number of experts of each token, if the collective moves rows to experts.
        """

    def links(self, mesh: Mesh, axes: Sequence[str], places: Sequence[int]) -> tuple[str, ...]:
        """The links that a collective uses, and whose bandwidth it shares with others."""

    def lag(self, mesh: Mesh, axes: Sequence[str], places: Sequence[int]) -> float:
        """The expected lag of the group's slowest rank after a second of computation; it grows with the square root of
        time.
        """

    def transfer(self, mesh: Mesh, places: tuple[int, int], size: int) -> float:
        """The seconds of a message between two coordinates on the pipeline axis."""

    def streamed(self, traffic: float) -> float:
        """The seconds in which a kernel, such as an optimizer's update, reads and writes `traffic` bytes in total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRates:
    """Durations by the roofline of one machine, whose devices are all equally far apart."""

    machine: Machine = H100
    slowdown: float = 0.0
    host: float = 0.0
    cores: int = 0
    pieces: bool = False
    waits: bool = False

    @property
    def basis(self) -> str:
        return "an H100's arithmetic, memory and NVLink (partc/cost/roofline.py)"

    def operation(self, op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> float:
        return seconds(op, types, sizes, self.machine)

    def collective(
        self, op: str, mesh: Mesh, axes: Sequence[str], places: Sequence[int], size: int, choices: int = 1
    ) -> float:
        ways = len(places) or math.prod(mesh.axis(axis) for axis in axes)
        return self.machine.meeting + cost(op, ways, size) / self.machine.link if ways > 1 else 0.0

    def links(self, mesh: Mesh, axes: Sequence[str], places: Sequence[int]) -> tuple[str, ...]:
        return ()

    def lag(self, mesh: Mesh, axes: Sequence[str], places: Sequence[int]) -> float:
        return 0.0

    def transfer(self, mesh: Mesh, places: tuple[int, int], size: int) -> float:
        return self.machine.meeting + size / self.machine.link

    def streamed(self, traffic: float) -> float:
        return self.machine.start + traffic / self.machine.memory


ROOFLINE = RooflineRates()

INSIDE, BETWEEN = "inside", "between"  # the links inside a domain, and the links between domains

# Tiles of matrix products, and the share of the rate of the largest tile that their operands' reuse allows.
_TILES = ((256, 128, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 64, 0.65))
_ATTENTION = "attention"
# Elementwise functions with an exponential, which CPUs compute more slowly than their memory moves the operands.
_SPECIAL = frozenset(
    {"gelu", "silu", "sigmoid", "tanh", "exp", "erf", "softplus", "softmax", "log_softmax", "cross_entropy", "sum_exp"}
)
# Fused attention: the backward pass computes five products and adds to queries' gradients, at this share of the forward
# pass's rate; the rows at a sequence's start and on the diagonal leave as many rows' work unused (Shah et al. 2024,
# FlashAttention-3, figures 5 and 6: FlashAttention-2 at 1k to 16k rows). The exponential of each score is computed
# concurrently with its products, which take less time if heads have fewer features.
_BACKWARD = 0.75
_EDGE = 256
# PyTorch's kernel for CPUs computes scores of this many keys at once: under a causal mask, the block on the diagonal is
# computed whole (torch 2.13, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
_CPU_KEYS = 512
# Gradients of weights are added to buffers, which are read and written in addition to the product's operands.
_ADDS = frozenset({"linear_grad_weight", "matmul_grad_right", EXPERTS_GRADIENT})


# The products that run in fp8 where rates do, and the operands that are cast for them and for the gradients: each is
# read in 16 bits, and written in 8 bits as it is and transposed. The others have been cast before.
_EIGHT_BITS: Mapping[str, int] = {
    "linear": 1, "linear_grad_input": 1, "linear_grad_weight": 0, "expert_matmul": 1, "expert_matmul_grad_rows": 1,
    EXPERTS_GRADIENT: 0,
}  # fmt: skip
# Of these, the products that read operands which the forward pass has cast and saved.
SAVED_IN_EIGHT_BITS = frozenset(name for name, casts in _EIGHT_BITS.items() if not casts)


@dataclass(frozen=True)
class ClusterRates:
    """The durations on the devices and links of a cluster.

    The flags describe the program: linear products run in fp8 (`fp8`); fused attention is computed by the kernel
    `attention`; collectives run in pieces that overlap with products (`pieces`); gathers and sums of parameters overlap
    with nothing (`waits`); each token's row goes only once to a node of its experts (`by_node`). An element of a
    gradient has at most `gradient` bytes, an element of a parameter or of an optimizer state at most `weight`.

    With `filled`, every wave of tiles is assumed to occupy all cores. An operation on 1/n of a batch then takes at
    least 1/n of its time on the whole batch, which partly empty waves would not guarantee. With `linkless`, collectives
    take no time. With `recorded`, steps are replayed from CUDA graphs, and the host issues nothing.
    """

    cluster: Cluster
    constants: Calibration
    fp8: bool = False
    attention: AttentionKernel = "auto"
    pieces: bool = False
    waits: bool = False
    by_node: bool = False
    gradient: int = ITEMSIZE["f64"]
    weight: int = ITEMSIZE["f64"]
    filled: bool = False
    linkless: bool = False
    recorded: bool = False

    @property
    def basis(self) -> str:
        return f"the cluster {self.cluster.name}"

    @property
    def slowdown(self) -> float:
        return self.constants.slowdown if self.cluster.slowdown is None else self.cluster.slowdown

    @property
    def host(self) -> float:
        return self.cluster.device.host if self.cluster.device.kind == "gpu" and not self.recorded else 0.0

    @property
    def cores(self) -> int:
        return self.cluster.processors

    @cached_property
    def network(self) -> Network:
        return Network(cluster=self.cluster, constants=self.constants)

    def operation(self, op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> float:
        if op.name in VIEWS or op.name in MOVING or not op.results:
            return 0.0
        if op.name == SCAN:
            scan = scan_of(op)
            inner = {**types, **scan.step.types()}
            return scan.length * sum(self.operation(each, inner, sizes) for each in scan.step.ops)
        visits = num_blocks(op, sizes)
        used = (*(types[name] for name in op.refs()), *(value.type for value in op.results))
        local = tuple((type.dtype, type.layout.local_shape(sizes)) for type in used)
        key = op.name, op.args, op.attrs, visits, local
        if key not in self._seconds:
            shapes = {name: types[name].local(sizes) for name in op.refs()}
            results = [value.type.local(sizes) for value in op.results]
            computed = self.device_seconds(op, shapes, results, visits)
            self._seconds[key] = visits * self.cluster.device.launch + computed
        return self._seconds[key]

    @cached_property
    def _seconds(self) -> dict[tuple[object, ...], float]:
        """The seconds of operations, by the facts on which they depend."""
        return {}

    def device_seconds(self, op: Op, shapes: Mapping[str, TensorType], results: list[TensorType], visits: int) -> float:
        """The seconds that a device computes an operation on local shapes; does not count its launches."""
        device = self.cluster.device
        size = traffic(op, shapes, results) * visits
        if op.name in _ADDS:
            size += 2 * math.prod(results[0].shape) * min(ITEMSIZE["f32"], self.gradient)
        moved = size / (device.bandwidth * self.constants.streaming)
        if device.special and op.name.removesuffix("_backward") in _SPECIAL:
            moved = max(moved, max(math.prod(type.shape) for type in (*shapes.values(), *results)) / device.special)
        work, rule = product_flops(op, shapes, results, visits)
        if not work:
            return moved
        floats = [type for type in (*shapes.values(), *results) if type.dtype.startswith(("f", "bf"))]
        dtype = max(floats, key=lambda type: math.prod(type.shape)).dtype if floats else results[0].dtype
        peak, casts = device.peak_of(dtype) / self.slowest, 0.0
        if self.fp8 and op.name in _EIGHT_BITS and ITEMSIZE[results[0].dtype] == 2:
            cast = sum(math.prod(type.shape) for type in list(shapes.values())[: _EIGHT_BITS[op.name]])
            peak = eight_bit_share(device) * device.fp8 / self.slowest
            casts = 4 * cast / (device.bandwidth * self.constants.streaming)
        if op.name.startswith(_ATTENTION):
            kept = _attention_share(op, shapes, results, device, filled=self.filled)
            if device.attention:
                return max(moved, work / (device.attention * kept))
            backward = op.name.endswith("_backward")
            share = self.constants.attention * (_BACKWARD if backward else 1.0)
            exponentials = scores(work, rule) / device.special if device.special and rule is not None else 0.0
            times = attention_times(self.cluster, self.attention)[backward]
            return max(moved, times * (work / (peak * share) + exponentials) / kept)
        sizes = _experts_sizes(shapes, results) if op.name == EXPERTS_GRADIENT else None
        if rule is not None:
            sizes = product_sizes(rule)
        share = 1.0 if sizes is None or device.kind == "cpu" else tile_share(sizes, device, peak, filled=self.filled)
        return casts + max(moved, work / (peak * self.constants.products * share))

    def least(self, work: ProductWork, peak: float) -> float:
        """The least seconds in which one device computes products and attention, with products at `peak` flops a
        second.
        """
        device, constants = self.cluster.device, self.constants
        high, wide, _ = _TILES[0]
        tiles = work.results / (high * wide * device.cores)
        seconds = (work.products / peak + tiles * device.fill) / constants.products
        if device.attention:
            return seconds + (work.attention + work.backward) / device.attention
        exponentials = work.scores / device.special if device.special else 0.0
        return seconds + (work.attention + work.backward / _BACKWARD) / (peak * constants.attention) + exponentials

    def collective(
        self, op: str, mesh: Mesh, axes: Sequence[str], places: Sequence[int], size: int, choices: int = 1
    ) -> float:
        if self.linkless:
            return 0.0
        group = self._span(mesh, tuple(axes), tuple(places))
        return self.network.collective(op, group, size, choices if self.by_node else 1)

    def links(self, mesh: Mesh, axes: Sequence[str], places: Sequence[int]) -> tuple[str, ...]:
        group = self._span(mesh, tuple(axes), tuple(places))
        used = {INSIDE: group.near > 1, BETWEEN: group.domains > 1}
        return tuple(name for name, uses in used.items() if uses)

    def lag(self, mesh: Mesh, axes: Sequence[str], places: Sequence[int]) -> float:
        jitter = self.cluster.device.jitter
        return math.sqrt(jitter) * expected_maximum(self._span(mesh, tuple(axes), tuple(places)).members)

    @cached_property
    def slowest(self) -> float:
        """The expected time of a product on the slowest of the cluster's devices, as a multiple of the mean. In a step,
        all other devices wait for it.
        """
        return 1 + self.cluster.device.spread * expected_maximum(self.cluster.size)

    def _span(self, mesh: Mesh, axes: tuple[str, ...], places: tuple[int, ...]) -> GroupSpan:
        key = mesh, axes, places
        if key not in self._spans:
            found = span(mesh, axes, self.cluster)
            if places:
                near = sum(1 for place in places if self._share_domain(mesh, places[0], place))
                found = GroupSpan(members=len(places), near=near)
            self._spans[key] = found
        return self._spans[key]

    @cached_property
    def _spans(self) -> dict[tuple[Mesh, tuple[str, ...], tuple[int, ...]], GroupSpan]:
        return {}

    def _share_domain(self, mesh: Mesh, one: int, other: int) -> bool:
        """Whether two coordinates on the pipeline axis lie in one domain."""
        first, second = (mesh.rank({PIPELINE_AXIS: place}) for place in (one, other))
        return first // self.cluster.near == second // self.cluster.near

    def transfer(self, mesh: Mesh, places: tuple[int, int], size: int) -> float:
        near = self._share_domain(mesh, *places)
        return self.network.send(size, near=near, share=1.0 if near else self._sending(mesh, *places))

    def _sending(self, mesh: Mesh, source: int, target: int) -> float:
        """The share of a device's bandwidth between nodes that a message to another pipeline coordinate gets.

        All ranks of the coordinate send at the same time: through the link of their node, if its devices share one, and
        out of the switch of their node.
        """
        first, stride = mesh.rank({PIPELINE_AXIS: source}), mesh.rank({PIPELINE_AXIS: 1})
        apart = (target - source) * stride
        cluster = self.cluster

        def leaving(devices: int) -> int:
            """The number of senders in the first rank's block of `devices` devices whose targets are outside of it."""
            block = range(first // devices * devices, min(first // devices * devices + devices, mesh.size))
            mine = (rank for rank in block if rank // stride % mesh.axis(PIPELINE_AXIS) == source)
            return sum(1 for rank in mine if (rank + apart) // devices != rank // devices)

        below = cluster.topology.leaf * cluster.devices
        share = cluster.devices / leaving(cluster.devices) if cluster.between.shared else 1.0
        out = leaving(below) if below else 0
        return min(share, below / (cluster.topology.oversubscription * out)) if out else share

    def streamed(self, traffic: float) -> float:
        device = self.cluster.device
        return device.launch + traffic / (device.bandwidth * self.constants.streaming)


def _attention_share(
    op: Op, shapes: Mapping[str, TensorType], results: Sequence[TensorType], device: Device, *, filled: bool
) -> float:
    """The share of its rate on long sequences that fused attention reaches with queries [..., rows, features].

    One block of 128 rows of one head is computed on each core of a GPU, in waves.
    """
    queries = next(iter(shapes.values())).shape if not op.name.endswith("_backward") else results[0].shape
    if len(queries) < 3:
        return 1.0
    *heads, rows, _ = queries
    if device.kind == "cpu":
        attention = Attention.of(op)
        halved = attention is not None and attention.causal and not attention.window and not attention.reads
        return max(0.5, rows / (rows + _CPU_KEYS)) if halved else 1.0  # a causal mask halves the counted work
    blocks = math.prod(heads) * math.ceil(rows / 128)
    waves = 1.0 if filled else blocks / (math.ceil(blocks / device.cores) * device.cores)
    return waves * rows / (rows + _EDGE)


def _experts_sizes(shapes: Mapping[str, TensorType], results: Sequence[TensorType]) -> tuple[int, int, int, int]:
    """The sizes of the products that compute the gradients of experts' weights, in the form of `product_sizes`."""
    experts, m, n = results[0].shape
    rows = next(iter(shapes.values())).shape[0]
    return m, n, -(-rows // experts), experts


def tile_share(sizes: tuple[int, int, int, int], device: Device, peak: float, *, filled: bool = False) -> float:
    """The share of a device's `peak` that `count` products [m, k] x [k, n] reach; `sizes` is (m, n, k, count).

    Tiles of the result are dealt to cores in waves; the last wave, and tiles at the edges, are partly empty. Of several
    kernels with different tiles, the quickest counts. A product with few tiles is cut along k as well. With `filled`,
    no tile is empty.
    """
    m, n, k, count = sizes
    high, wide, _ = _TILES[0]
    busy = 2 * high * wide * k / (peak / device.cores)
    summed = busy / (busy + device.fill)
    if filled:
        return summed
    best = 0.0
    for rows, columns, rate in _TILES:
        for high, wide in ((rows, columns), (columns, rows)):
            tiles = math.ceil(m / high) * math.ceil(n / wide) * count
            waves = math.ceil(tiles / device.cores)
            full = m * n * count / (waves * device.cores * high * wide)
            if waves == 1 and k > 2048:  # split k: other cores compute parts of the sum
                full = max(full, min(0.9, full * min(k // 1024, max(1, device.cores // tiles))))
            best = max(best, rate * full)
    return best * summed
