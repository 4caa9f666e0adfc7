"""Optimizers whose update reads whole parameters, such as Muon: shards are gathered for the update.

Parameters are gathered one at a time. All ranks that hold parts of a parameter compute its update, and keep their parts
of the parameter and of states in its shape. States of other shapes, such as Adafactor's means of rows, stay whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..layout import Shard, cutting, group_size


class WholeOptimizer:
    """One of torch's optimizers, on whole parameters; it reads `.grad` of this rank's shards.

    `uncut` has the names of the states of each parameter that have other shapes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Tensor],
        shards: Mapping[str, Shard],
        uncut: Mapping[str, Collection[str]],
        comm: Comm,
        sizes: Mapping[str, int],
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._shards = shards
        self._uncut = uncut
        self._comm = comm
        self._sizes = sizes
        self._coordinate = {axis: comm.group((axis,)).rank for axis, size in sizes.items() if size > 1}
        self._states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
        self._rate = 0.0
        names = {id(x): name for name, x in parameters.items()}
        self._groups = [(group, [names[id(x)] for x in group["params"]]) for group in optimizer.param_groups]

    def begin(self, rate: float) -> None:
        self._rate = rate

    def step(self, without: Collection[str] = ()) -> None:
        for group, names in self._groups:
            for name in names:
                if name in without:
                    continue
                self._update(name, {**group, "lr": self._rate * group["lr_scale"]})

    def _update(self, name: str, group: Mapping[str, Any]) -> None:
        mine = self._parameters[name]
        assert mine.grad is not None
        whole = self._assemble(name, mine)
        whole.grad = self._assemble(name, mine.grad)
        uncut, states = self._uncut[name], self._states[name]
        self._optimizer.state.clear()
        self._optimizer.state[whole].update(
            {key: x if key in uncut else self._assemble(name, x) for key, x in states.items()}
        )
        self._optimizer.param_groups[:] = [{**group, "params": [whole]}]
        self._optimizer.step()
        for key, x in self._optimizer.state.pop(whole).items():
            if key in states and key not in uncut:
                states[key].copy_(self._part(name, x))
            else:
                states[key] = x if key in uncut else self._part(name, x)
        self._optimizer.param_groups.clear()  # releases the whole parameter
        mine.copy_(self._part(name, whole))

    def state_of(self, name: str) -> Mapping[str, Tensor]:
        return self._states[name]

    def uncut(self, name: str) -> Collection[str]:
        return self._uncut[name]

    def by_rows(self, name: str) -> Collection[str]:
        return ()

    def restore(self, name: str, key: str, value: Tensor) -> None:
        there = torch.device("cpu") if key == "step" else self._parameters[name].device
        self._states[name][key] = value.to(there)

    def copy_to(self, read: Mapping[str, Tensor]) -> frozenset[str]:
        return frozenset()

    def _assemble(self, name: str, part: Tensor) -> Tensor:
        """A new tensor with the parts of all ranks, in the model's order and without padding."""
        shard = self._shards[name]
        factors = [factor for dim in shard.dims for factor in dim]
        if not cutting(shard.dims) & self._coordinate.keys():
            whole = part.clone()
        else:
            whole = part.reshape([-(-size // group_size(axes, self._sizes)) for size, axes in factors])
            for position, (size, axes) in enumerate(factors):
                for axis in reversed(axes):
                    whole = self._comm.group((axis,)).all_gather(whole, dim=position)
                whole = whole.narrow(position, 0, size)
            whole = whole.reshape(shard.shape).contiguous()
        whole = shard.in_model_order(whole)
        return whole[tuple(map(slice, shard.holds))].contiguous() if shard.holds else whole

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part, as a copy."""
        part = self._shards[name].local(whole, self._sizes, self._coordinate)
        return part if part is whole else part.clone(memory_format=torch.contiguous_format)
