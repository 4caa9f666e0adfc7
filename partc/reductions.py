"""Which gradients a stage sums, with whom, and when: over mesh axes, and with other users of the same weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from partc.program import Parameter, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients whose sum starts after the last backward of one call."""

    after: str
    over: tuple[str, ...]
    scattered: bool
    parameters: tuple[Parameter, ...]  # in order of use


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

    def over(self, parameter: Parameter) -> tuple[str, ...]:
        """What a bucket goes over: the axes that are scattered over, else those that are summed over."""
        return parameter.gather or self.axes(parameter)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order in which their sums start, where several start after one call."""
        found: dict[tuple[str, tuple[str, ...], bool, str], list[Parameter]] = {}
        for parameter in self.trained:
            if parameter.after:
                key = (parameter.after, self.over(parameter), bool(parameter.gather), parameter.type.dtype)
                found.setdefault(key, []).append(parameter)
        return tuple(
            Bucket(after=after, over=over, scattered=scattered, parameters=tuple(parameters))
            for (after, over, scattered, _), parameters in found.items()
        )

    @cached_property
    def scattered(self) -> tuple[Parameter, ...]:
        """What is scattered at the step's end: by every stage what it has summed."""
        return tuple(item for item in self.trained if self.program.zero == 1 and item.gather and not item.after)

    @cached_property
    def left(self) -> Mapping[tuple[str, ...], list[Parameter]]:
        """What is summed at the step's end, by axes."""
        found: dict[tuple[str, ...], list[Parameter]] = {}
        for parameter in self.trained:
            if self.axes(parameter) and (parameter.gather or not parameter.after):
                found.setdefault(self.axes(parameter), []).append(parameter)
        return found

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
        """Axes whose ranks talk to each other: each that the mesh has, and those summed over together."""
        single = ((name,) for name, size in self.program.mesh.axes if size > 1)
        summed = (self.axes(parameter) for parameter in self.trained)
        return tuple(dict.fromkeys((*single, *(axes for axes in summed if axes))))

    def shared(self) -> dict[tuple[int, ...], list[Parameter]]:
        """The weights that each set of pipeline coordinates shares."""
        found: dict[tuple[int, ...], list[Parameter]] = {}
        for parameter in self.trained:
            if self.sharers(parameter):
                found.setdefault(self.sharers(parameter), []).append(parameter)
        return found
