"""Which gradients a stage sums, with whom, and when: over mesh axes, and with other users of the same weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from partc.program import ITEMSIZE, Parameter, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients whose sum starts after the last backward of one call."""

    after: str
    over: tuple[str, ...]
    scattered: bool
    parameters: tuple[Parameter, ...]  # in order of use


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """A collective that is a sum of gradients, or part of one: of `size` elements that each rank brings."""

    op: str
    axes: tuple[str, ...]
    dtype: str
    size: int

    def received(self, ways: int) -> int:
        """Bytes that one rank receives, by ring algorithms."""
        whole = self.size * ITEMSIZE[self.dtype]
        match self.op:
            case "all_reduce":
                return 2 * whole * (ways - 1) // ways
            case "all_gather":
                return whole * (ways - 1)
            case _:
                return whole * (ways - 1) // ways


@dataclass(frozen=True)
class Reductions:
    """Of several stages on one rank that use a weight, the last sums its gradient."""

    program: Program
    stage: int

    @cached_property
    def owners(self) -> Mapping[str, tuple[int, ...]]:
        return self.program.owners()

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """Trained parameters of this stage, in order of use."""
        parameters = {parameter.name: parameter for parameter in self.program.parameters}
        calls = [call for call in self.program.calls if call.stage == self.stage]
        here = dict.fromkeys(name for call in calls for name in call.params)
        return tuple(parameters[name] for name in here if parameters[name].trainable)

    def axes(self, parameter: Parameter) -> tuple[str, ...]:
        """Axes over which this stage sums a gradient."""
        if not parameter.trainable or self.stage not in self.owners[parameter.name]:
            return ()
        return tuple(axis for axis in parameter.reduce if self.program.sizes[axis] > 1)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All that is scattered or summed once per step: scattered first, where several start at one time.

        With ZeRO 1 every stage scatters what it has summed itself.
        """
        found: dict[tuple[bool, str, tuple[str, ...], str], list[Parameter]] = {}
        for parameter in self.trained:
            scattered = self.program.zero == 1 and bool(parameter.gather)
            if scattered:
                found.setdefault((True, parameter.after, parameter.gather, parameter.type.dtype), []).append(parameter)
            if self.axes(parameter):
                after = "" if scattered else parameter.after
                found.setdefault((False, after, self.axes(parameter), parameter.type.dtype), []).append(parameter)
        return tuple(
            Bucket(after=after, over=over, scattered=scattered, parameters=tuple(parameters))
            for (scattered, after, over, _), parameters in sorted(found.items(), key=lambda item: not item[0][0])
        )

    def levels(self, over: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes inside nodes and those between them."""
        return levels(self.program, over)

    def sums(self, dtype: str, size: int, over: tuple[str, ...]) -> tuple[Sum, ...]:
        """What the sum of a piece of memory over some axes consists of, one after the other."""
        near, far = self.levels(over)
        wire, compress = self.program.wire or dtype, self.program.compress
        if not far or not (near or compress):
            return (Sum(op="all_reduce", axes=over, dtype=wire, size=size),)
        found: list[Sum] = []
        if near:
            ways = self._ways(near)
            size = -(-size // ways) * ways
            found.append(Sum(op="reduce_scatter", axes=near, dtype=wire, size=size))
            size //= ways
        if compress:
            from partc.runtime.compression import room

            ways = self._ways(far)
            each = room(compress, -(-size // ways))
            kind = "bf16" if compress == "bf16" else "u8"
            found.append(Sum(op="all_to_all", axes=far, dtype=kind, size=ways * each))
            found.append(Sum(op="all_gather", axes=far, dtype=kind, size=each))
        else:
            found.append(Sum(op="all_reduce", axes=far, dtype=wire, size=size))
        if near:
            found.append(Sum(op="all_gather", axes=near, dtype=wire, size=size))
        return tuple(found)

    def _ways(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.program.sizes[axis] for axis in axes)

    def pieces(self, parameters: Collection[Parameter]) -> list[tuple[str, int]]:
        """Element type and length of each piece of memory that their gradients make up.

        Gradients that are summed over the same axes lie side by side in order of use; those of weights
        that several pipeline ranks share lie apart, each by itself.
        """
        names = {parameter.name for parameter in parameters}
        holders = self.program.holders()
        found: list[tuple[str, int]] = []
        beside: dict[tuple[tuple[str, ...], str], bool] = {}  # whether the gradient that lies before is one of these
        for parameter in self.trained:
            here = [stage for stage in holders[parameter.name] if self.program.place(stage) == self._place]
            chosen = parameter.name in names
            key = (parameter.reduce, parameter.type.dtype)
            alone = bool(self.sharers(parameter)) or here[0] != self.stage  # it lies where its first stage has it
            if chosen and beside.get(key) and not alone:
                found[-1] = (found[-1][0], found[-1][1] + parameter.type.local_elements(self.program.sizes))
            elif chosen:
                found.append((parameter.type.dtype, parameter.type.local_elements(self.program.sizes)))
            if chosen or not alone:
                beside[key] = chosen and not alone
        return found

    @property
    def _place(self) -> int:
        return self.program.place(self.stage)

    def sharers(self, parameter: Parameter) -> tuple[int, ...]:
        """Pipeline coordinates whose ranks sum a gradient of theirs; none where one alone has it."""
        owners = self.owners[parameter.name]
        if not parameter.trainable or self.stage not in owners or len(owners) == 1:
            return ()
        return tuple(sorted(map(self.program.place, owners)))

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Axes whose ranks talk to each other: each that the mesh has, and those summed or gathered over together."""
        single = ((name,) for name, size in self.program.mesh.axes if size > 1)
        summed = [self.axes(parameter) for parameter in self.trained]
        here = {name for call in self.program.calls if call.stage == self.stage for name in call.params}
        gathered = [parameter.gather for parameter in self.program.parameters if parameter.name in here]
        several = (level for axes in (*summed, *gathered) for level in (axes, *self.levels(axes)))
        return tuple(dict.fromkeys((*single, *(axes for axes in several if axes))))

    def shared(self) -> dict[tuple[int, ...], list[Parameter]]:
        """The weights that each set of pipeline coordinates shares."""
        found: dict[tuple[int, ...], list[Parameter]] = {}
        for parameter in self.trained:
            if self.sharers(parameter):
                found.setdefault(self.sharers(parameter), []).append(parameter)
        return found


def levels(program: Program, over: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes inside nodes and those between them."""
    return tuple(axis for axis in over if axis in program.near), tuple(a for a in over if a not in program.near)
