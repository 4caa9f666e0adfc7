"""Which gradients a stage sums, and with whom: over mesh axes, and with other users of the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from partc.program import Parameter, Program


@dataclass(frozen=True)
class Reductions:
    """Of several stages on one rank that use a weight, the first sums its gradient."""

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
