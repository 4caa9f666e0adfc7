"""An estimate of a step's peak memory from the program alone, quick enough to compare many plans.

The memory account itself (partc/rehearsal/) runs the emitted code. The estimate adds up the bytes that ranks hold
throughout a step, the values saved for microbatches in flight, and the largest set of values inside a call that are
alive at the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice

from partc.communication.exchanges import Exchanges, graph_of
from partc.cost.local_costs import LocalCosts
from partc.cost.saved_tensors import (
    held_inputs,
    memory_of,
    microbatches_in_flight,
    saved_bytes,
    saved_in_eight_bits,
)
from partc.ir.collectives import collectives_of, num_blocks
from partc.ir.gradients import touched_rows
from partc.ir.layout import Sizes
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.naming import gradient_name
from partc.ir.program import ITEMSIZE, SPARSE, Call, Graph, GraphKind, Op, Parameter, Program, Region, TensorType

_KINDS: tuple[GraphKind, ...] = ("F", "B", "I", "W")
_STATES = 2  # of AdamW, in the parameter's type


@dataclass(frozen=True)
class Footprint:
    """The estimated peaks of a scheduled program's ranks.

    `states` is the number of tensors that the optimizer keeps for a parameter. `eight_bits` are the products for
    weights' gradients that run in fp8, and save their operands in fp8. An element of a gradient has at most `gradient`
    bytes, an element of a parameter or of a state at most `weight`. The share `offload` of saved values waits in the
    host's memory.
    """

    program: Program
    states: float = _STATES
    costs: LocalCosts = field(default_factory=LocalCosts, compare=False)
    eight_bits: frozenset[str] = frozenset()
    gradient: int = ITEMSIZE["f64"]
    weight: int = ITEMSIZE["f64"]
    offload: float = 0.0

    @property
    def peak(self) -> int:
        """The peak of the rank that holds most, in bytes."""
        return max(self.of(place) for place in range(self.program.mesh.axis(PIPELINE_AXIS)))

    def of(self, place: int) -> int:
        """The peak of each rank at a pipeline coordinate, in bytes."""
        row = self.program.schedule[place]
        saved = max(
            (sum(count * self._saved(stage) for stage, count in mix) for mix in microbatches_in_flight(row)), default=0
        )
        return (
            self.held(place)
            + round((1 - self.offload) * saved)
            + max((self._call_workspace(stage) for stage in self.program.stages_at(place)), default=0)
        )

    def held(self, place: int) -> int:
        """The bytes of parameters, gradients and optimizer states, and of parameters that stay whole in addition to
        their parts.
        """
        return int(sum(map(self.lasting, self.program.parameters_at(place)))) + self._rows(place)

    def _rows(self, place: int) -> int:
        """The bytes of sparse gradients: the numbers and the values of the rows that a step looks up."""
        total = 0
        for name, counts in touched_rows(self.program, self.program.stages_at(place)).items():
            type, sizes = self.program.parameter(name).type, self.program.sizes
            row = type.local_bytes(sizes) // type.layout.local_shape(sizes)[0]
            total += sum(counts) * (row + ITEMSIZE["i64"])
        return total

    def lasting(self, parameter: Parameter) -> float:
        """The bytes that a rank holds throughout a step for a parameter, its gradient and its optimizer states."""
        each = ITEMSIZE[parameter.type.dtype]
        own = parameter.type.local_bytes(self.program.sizes) / each
        whole = self._whole_elements(parameter)
        total = own * min(each, self.weight)
        if parameter.trainable:
            total += own * min(each, self.weight) * self.states
            if parameter.zero == 1:
                total += whole * min(each, self.gradient)  # the gradient is accumulated whole
            if not parameter.sparse and not self._taken_over(parameter):
                total += own * min(each, self.gradient)
        parted = parameter.name in self._exchanges.converted
        if parted and parameter.zero < 3:
            total += whole * ITEMSIZE[self._exchanges.read_dtypes[parameter.name]]
        return total

    def _taken_over(self, parameter: Parameter) -> bool:
        """Whether the gradient of the rank's part reuses the memory of the whole gradient
        (executor.gradient_memory).
        """
        once = len(self._holders[parameter.name]) == 1
        return parameter.zero == 1 and once and all(self.program.sizes[axis] == 1 for axis in parameter.reduce)

    def _saved(self, stage: int) -> int:
        """The bytes that a stage saves for one microbatch. A value that one call passes to the next is saved once."""
        if stage not in self._stages:
            self._stages[stage] = sum(self.saved_by_region[call.region] for call in self._calls(stage))
        return self._stages[stage]

    def _calls(self, stage: int) -> Iterator[Call]:
        for call in self.program.calls_of(stage):
            if self.program.region(call.region).phase == "microbatch":
                yield call

    @cached_property
    def saved_by_region(self) -> Mapping[str, int]:
        """The bytes that one call of each region saves for one microbatch."""
        held, sizes = held_inputs(self.program), self.program.sizes

        def saved(region: Region) -> int:
            if self.eight_bits:
                return saved_in_eight_bits(region, held[region.name], sizes, self.eight_bits)
            return saved_bytes(region, held[region.name], sizes)

        return {
            region.name: self.costs.of(held[region.name], region, None, sizes, partial(saved, region))
            for region in self.program.regions
        }

    def _call_workspace(self, stage: int) -> int:
        """The most bytes that a call of the stage holds besides saved values, with the parameters gathered around
        it.
        """
        regions = {call.region: call for call in self._calls(stage)}
        most = 0
        for name, call in regions.items():
            gathered = self.gathered(call) * 2  # the next call's parameters arrive meanwhile
            gradients = self.scattered(call)
            for kind in _KINDS:
                alive = self.alive(name, kind)
                most = max(most, alive + gathered + (gradients if kind != "F" else 0))
        return most

    def gathered(self, call: Call) -> int:
        """Bytes of a call's unsharded parameters if ZeRO gathers them for it."""
        if self.program.zero < 3:
            return 0
        return sum(
            self._gathered_bytes(name, ITEMSIZE[self._exchanges.read_dtypes[name]])
            for name in call.params
            if name in self._exchanges.converted
        )

    def scattered(self, call: Call) -> int:
        """The bytes of unsharded gradients around a call if ZeRO scatters them: its own, and an equal amount of the
        call before.
        """
        if self.program.zero < 2:
            return 0
        names = (name for name in call.params if name in self._exchanges.converted)
        return 2 * sum(
            self._gathered_bytes(name, min(ITEMSIZE[self.program.parameter(name).type.dtype], self.gradient))
            for name in names
        )

    def _gathered_bytes(self, name: str, each: int) -> int:
        parameter = self.program.parameter(name)
        return self._whole_elements(parameter) * each if parameter.gather else 0

    def _whole_elements(self, parameter: Parameter) -> int:
        """The number of a parameter's elements that calls read, without the padding of its parts."""
        return math.prod(parameter.type.layout.without(*parameter.gather).local_shape(self.program.sizes))

    def alive(self, region: str, kind: GraphKind) -> int:
        """The most bytes of a graph's values that are alive at the same time, besides saved values."""
        key = region, kind
        if key not in self._known_peaks:
            found = self.program.region(region)
            graph, sizes = graph_of(found, kind), self.program.sizes
            self._known_peaks[key] = (
                0
                if graph is None
                else self.costs.of(kind, found, graph, sizes, partial(_most_alive, found, graph, kind, sizes))
            )
        return self._known_peaks[key]

    @cached_property
    def _known_peaks(self) -> dict[tuple[str, GraphKind], int]:
        return {}

    @cached_property
    def _stages(self) -> dict[int, int]:
        return {}

    @cached_property
    def _exchanges(self) -> Exchanges:
        return self.program.derived(Exchanges)

    @cached_property
    def _holders(self) -> Mapping[str, tuple[int, ...]]:
        return self.program.holders()


def _most_alive(region: Region, graph: Graph, kind: GraphKind, sizes: Sizes) -> int:
    """The most bytes of a graph's values that are alive at the same time.

    Values saved for the backward pass do not count, nor do gradients that are added to buffers; saved values that a
    backward pass has read for the last time make room.
    """
    forward, memory, saved = kind == "F", memory_of(graph), set(region.saved)
    last = {memory.get(name, name): index for index, op in enumerate(graph.ops) for name in op.refs()}
    last |= {memory.get(name, name): len(graph.ops) for name in graph.outputs}
    kept = {memory.get(name, name) for name in saved} if forward else set()
    added = {gradient_name(value.name) for value in region.params} if not forward else set()
    freed: Counter[int] = Counter()  # operation -> the bytes that it is the last to read
    alive = 0
    for value in graph.inputs if not forward else ():
        size = value.type.local_bytes(sizes)
        alive += size if value.name not in saved else 0
        freed[last.get(value.name, len(graph.ops))] += size
    peak, types = alive, region.types(graph)
    for index, op in enumerate(graph.ops):
        before = alive
        for value in op.results:
            name = value.name
            if memory[name] == name and name not in kept and not (name in added and _adds(op)):
                size = value.type.local_bytes(sizes)
                alive += size
                freed[last.get(name, index)] += size
        peak = max(peak, alive, before + _ring_workspace(op, types, sizes))
        alive -= freed[index]
    return peak


def _ring_workspace(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> int:
    """The bytes that ring attention holds before it has results; 0 for any other operation.

    It holds the keys and values of two ranks, of which one pair is arriving; the gradients of three, since sent
    gradients stay until the next ones are computed; and the sums of the queries' rows in fp32.
    """
    if num_blocks(op, sizes) == 1:
        return 0
    moved = [each.bytes for each in islice(collectives_of(op, types, sizes), 2)]
    gradients = 3 * moved[1] if op.name.endswith("_backward") else 0
    return 2 * moved[0] + gradients + math.prod(op.results[0].type.layout.local_shape(sizes)) * ITEMSIZE["f32"]


def _adds(op: Op) -> bool:
    """Whether the product that computes a gradient adds to the buffer directly, without a result of its own."""
    return op.name in ("linear_grad_weight", "matmul_grad_right") or SPARSE in dict(op.attrs)
