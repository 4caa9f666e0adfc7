"""What moves between ranks that hold parts of parameters: which calls gather and scatter, when, and how much."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from partc.program import ITEMSIZE, Call, DType, Graph, Parameter, Program, Region
from partc.reductions import Reductions

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective over all that a call's parameters have in common: `size` elements of the whole."""

    op: Literal["all_gather", "reduce_scatter"]
    axes: tuple[str, ...]
    dtype: str
    size: int
    ways: int

    @property
    def received(self) -> int:
        """Bytes that one rank receives."""
        return self.size // self.ways * (self.ways - 1) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Parts:
    """The parted parameters of a program, seen from its calls."""

    program: Program

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """Those that calls don't read as they are held: in parts, or in other bits."""
        return {
            parameter.name: parameter
            for parameter in self.program.parameters
            if parameter.gather or self.read.get(parameter.name, parameter.type.dtype) != parameter.type.dtype
        }

    @cached_property
    def read(self) -> Mapping[str, DType]:
        """What calls read parameters in."""
        return {
            name: value.type.dtype
            for call in self.program.calls
            for name, value in zip(call.params, self._regions[call.region].params, strict=True)
        }

    @cached_property
    def _regions(self) -> Mapping[str, Region]:
        return {region.name: region for region in self.program.regions}

    def gathers(self, call: Call, kind: Kind) -> bool:
        """Whether a call gets whole parameters just for this run, to give them up again after it."""
        region = self._regions[call.region]
        return self.program.zero == 3 and self.has_parts(call) and _reads(region, graph_of(region, kind))

    def scattered(self, call: Call, kind: Kind) -> tuple[str, ...]:
        """The region's parameters whose gradients are scattered right after this run."""
        if self.program.zero < 2 or kind == "F" or not self.has_parts(call):
            return ()
        region = self._regions[call.region]
        graph = graph_of(region, kind)
        made = set(graph.outputs) if graph is not None else set()
        return tuple(value.name for value in region.params if f"grad_{value.name}" in made)

    def runs(self, stage: int, kind: str) -> tuple[tuple[Kind, list[Call]], ...]:
        """What an action of a stage consists of: runs of its calls, in their order."""
        calls = [call for call in self.program.calls if call.stage == stage]
        calls = [call for call in calls if self._regions[call.region].phase == "microbatch"]
        found: dict[str, tuple[tuple[Kind, list[Call]], ...]] = {
            "F": (("F", calls),),
            "I": (("I", calls[::-1]),),
            "W": (("W", calls),),
            "B": (("B", calls[::-1]), ("W", calls)),
        }
        return found[kind]

    @cached_property
    def completing(self) -> Kind:
        """The run that gradients of parameters are complete after: the second half, where backward has two."""
        return "W" if any(region.weight is not None for region in self.program.regions) else "B"

    def before(self, call: Call, kind: Kind) -> Iterator[Move]:
        """What has to have been gathered for it."""
        if self.gathers(call, kind):
            yield from self._moves("all_gather", call.params)

    def ahead(self, calls: Sequence[Call], kind: Kind) -> tuple[tuple[Move, ...], ...]:
        """What starts when a stage begins to run these calls, and then right before each: the next one's gather."""
        started: list[tuple[Move, ...]] = [()] * (len(calls) + 1)
        last = 0
        for index, call in enumerate(calls):
            if self.gathers(call, kind):
                started[last] = tuple(self.before(call, kind))
                last = index + 1
        return tuple(started)

    def after(self, call: Call, kind: Kind) -> Iterator[Move]:
        region = self._regions[call.region]
        local = {value.name: name for value, name in zip(region.params, call.params, strict=True)}
        yield from self._moves("reduce_scatter", (local[name] for name in self.scattered(call, kind)))

    def scattered_sums(self, parameters: Iterable[Parameter]) -> Iterator[Move]:
        """Whole gradients that were summed over a step's microbatches."""
        yield from self._moves("reduce_scatter", (parameter.name for parameter in parameters))

    def gathered_at_end(self, stage: int) -> Iterator[Move]:
        """After the optimizer's update (and at the start): what every rank keeps whole."""
        if self.program.zero in (1, 2):
            for names in self._units(stage):
                yield from self._moves("all_gather", names)

    def of_step(self, stage: int) -> Iterator[tuple[str, str, Move]]:
        """All that a stage's ranks do: the call (none for what is done once per step), where in it, and what."""
        for call in self.program.calls:
            region = self._regions[call.region]
            if call.stage != stage or region.phase != "microbatch":
                continue
            runs: tuple[tuple[Kind, Graph | None, str], ...] = (
                ("F", region.forward, "forward"),
                ("B", region.backward, "backward"),
                ("W", region.weight, "backward"),
            )
            for kind, graph, place in runs:
                for move in (*self.before(call, kind), *self.after(call, kind)) if graph is not None else ():
                    yield call.name, f"{region.name}, {place}", move
        reductions = Reductions(self.program, stage)
        scattered = [bucket.parameters for bucket in reductions.buckets if bucket.scattered]
        once = [move for parameters in scattered for move in self.scattered_sums(parameters)]
        for move in (*once, *self.gathered_at_end(stage)):
            yield "", f"each step, stage {stage}", move

    def _units(self, stage: int) -> Iterator[list[str]]:
        """The parameters of each call, without those that an earlier one had."""
        seen: set[str] = set()
        for call in self.program.calls:
            if call.stage == stage and self._regions[call.region].phase == "microbatch":
                yield [name for name in call.params if name not in seen]
                seen.update(call.params)

    def has_parts(self, call: Call) -> bool:
        """Whether it, or another call of its region in its stage, reads what isn't held so: they are written alike."""
        return (call.stage, call.region) in self._parted

    @cached_property
    def _parted(self) -> frozenset[tuple[int, str]]:
        calls = self.program.calls
        return frozenset(
            (call.stage, call.region) for call in calls if any(name in self.parameters for name in call.params)
        )

    def _moves(self, op: Literal["all_gather", "reduce_scatter"], names: Iterable[str]) -> Iterator[Move]:
        sizes: dict[tuple[str, tuple[str, ...]], int] = {}
        for parameter in (self.parameters[name] for name in names if name in self.parameters):
            whole = parameter.type.layout.without(*parameter.gather).local_shape(self.program.sizes)
            summed = self.program.wire or parameter.type.dtype
            key = (self.read[parameter.name] if op == "all_gather" else summed, parameter.gather)
            if parameter.gather and (op == "all_gather" or parameter.trainable):
                sizes[key] = sizes.get(key, 0) + math.prod(whole)
        for (dtype, axes), size in sizes.items():
            ways = math.prod(self.program.sizes[axis] for axis in axes)
            yield Move(op=op, axes=axes, dtype=dtype, size=size, ways=ways)


def graph_of(region: Region, kind: Kind) -> Graph | None:
    """What a run of this kind is of: B is the whole backward pass, or its first half."""
    return {"F": region.forward, "B": region.backward, "I": region.backward, "W": region.weight}[kind]


def _reads(region: Region, graph: Graph | None) -> bool:
    names = {value.name for value in region.params}
    return graph is not None and any(name in names for op in graph.ops for name in op.refs())
