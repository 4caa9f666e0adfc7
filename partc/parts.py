"""What moves between ranks that hold parts of parameters: which calls gather and scatter, when, and how much."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from partc.program import ITEMSIZE, Call, DType, Graph, Parameter, Program, Region
from partc.reductions import Reductions, levels

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective over all that a call's parameters have in common, of `size` elements before or after it.

    Where some of the ranks share a node, it is one of two: what one brings, the other takes.
    """

    op: Literal["all_gather", "reduce_scatter", "all_to_all"]
    axes: tuple[str, ...]
    dtype: str
    size: int  # of the larger end; of what travels, where gradients are scattered in few bits (all_to_all)
    ways: int
    turn: int = 0

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

    def early(self, stage: int, kind: str) -> bool:
        """Whether an action of a stage starts to gather what the one after it reads first."""
        return f"{stage}{kind}" in self.program.early

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

    def after(self, call: Call, kind: Kind) -> Iterator[Move]:
        region = self._regions[call.region]
        local = {value.name: name for value, name in zip(region.params, call.params, strict=True)}
        yield from self._moves("reduce_scatter", (local[name] for name in self.scattered(call, kind)))

    def scattered_sums(self, parameters: Iterable[Parameter]) -> Iterator[Move]:
        """Whole gradients that were summed over a step's microbatches."""
        yield from self._moves("reduce_scatter", (parameter.name for parameter in parameters))

    def kept(self, stage: int) -> Iterator[tuple[Move, ...]]:
        """What every rank keeps whole, call by call: gathered at the start and after the optimizer's update."""
        if self.program.zero in (1, 2):
            for names in self._units(stage):
                yield tuple(self._moves("all_gather", names))

    def gathered_at_end(self, stage: int) -> Iterator[Move]:
        """All of that."""
        for moves in self.kept(stage):
            yield from moves

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
        for turn in range(self.turns):
            for (dtype, axes), size in sizes.items():
                yield from self._turn(op, axes, dtype, size, turn)

    def _turn(
        self, op: Literal["all_gather", "reduce_scatter"], axes: tuple[str, ...], dtype: str, size: int, turn: int
    ) -> Iterator[Move]:
        """Gathered between nodes and then inside, scattered the other way; on one level, all at once."""
        near, far = levels(self.program, axes)
        inside, across = self._ways(near), self._ways(far)
        crosses = not near or (far and (op == "all_gather") == (turn == 0))
        if turn and not (near and far):
            return
        if not crosses:
            yield Move(op=op, axes=near, dtype=dtype, size=size, ways=inside, turn=turn)
        elif op == "reduce_scatter" and self.program.compress:
            from partc.runtime.compression import room

            kind = "bf16" if self.program.compress == "bf16" else "u8"
            coded = across * room(self.program.compress, size // inside // across)
            yield Move(op="all_to_all", axes=far, dtype=kind, size=coded, ways=across, turn=turn)
        else:
            yield Move(op=op, axes=far, dtype=dtype, size=size // inside, ways=across, turn=turn)

    def _ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.program.sizes[axis] for axis in axes)

    @cached_property
    def turns(self) -> int:
        """In how many what is gathered comes: one, or two where some of the ranks share a node."""
        gathered = {parameter.gather for parameter in self.program.parameters if parameter.gather}
        return max((1 + all(levels(self.program, axes)) for axes in gathered), default=1)


def graph_of(region: Region, kind: Kind) -> Graph | None:
    """What a run of this kind is of: B is the whole backward pass, or its first half."""
    return {"F": region.forward, "B": region.backward, "I": region.backward, "W": region.weight}[kind]


def _reads(region: Region, graph: Graph | None) -> bool:
    names = {value.name for value in region.params}
    return graph is not None and any(name in names for op in graph.ops for name in op.refs())
