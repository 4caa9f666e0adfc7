"""Rows of equal modules, most of which a trace leaves out.

    layers.0 … layers.125  ->  layers.0, layers.1, layers.2 and layers.125 are traced; layers.3 to layers.124 are not

A row is planned where a container has consecutive equal modules, or equal units of up to eight modules. While the model
is traced, the units between the third and the last have no weights, and their calls return the results of the third
unit. Outside of forward they have no submodules either, so that an export skips them. `repeats.Repeats` compares each
call with that of the third unit, and every read of a missing weight ends the trace: the model is then traced without
the row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from partc.ir.naming import is_number
from partc.ir.program import Repetition
from partc.ir.repetitions import KEPT

LONGEST = 8  # the most modules in a unit: Jamba and MiniMax-01 have one layer of attention in eight
FEWEST = KEPT + 3  # the fewest units in a row


class UnequalError(Exception):
    """The modules of `group`, or of the rows in the container at this path, are not equal.

    The model has to be traced again without this group or row.
    """

    def __init__(self, group: int | str) -> None:
        super().__init__(group)
        self.group = group


class WholeTrace(Exception):
    """Raised by code that needs all calls of all modules, in a trace that leaves some out."""


def container_of(row: Repetition) -> str:
    return row.units[0][0].rpartition(".")[0]


def left_out(row: Repetition) -> tuple[tuple[str, ...], ...]:
    """The units that a trace leaves out."""
    return row.units[KEPT:-1]


class ModuleRows:
    """The rows of a model for one trace."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        groups: Mapping[int, int],
        weights: Mapping[str, Mapping[str, str]],
        excluded: Collection[int | str] | None,
    ) -> None:
        self._modules = modules
        uses = Counter(weights.get("", {}).values())
        self._tied = {name for name, count in uses.items() if count > 1}
        self._groups, self._weights = groups, weights
        found = () if excluded is None else tuple(self._rows_of("", modules[""], excluded))
        self.all: tuple[Repetition, ...] = found
        tops = [modules[path] for row in found for unit in left_out(row) for path in unit]
        inside = {id(part) for top in tops for part in top.modules()}
        self.left_out = frozenset(path for path, module in modules.items() if id(module) in inside)
        self.running = False  # whether forward is running
        self._parts: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []

    def _rows_of(self, path: str, module: nn.Module, excluded: Collection[int | str]) -> Iterator[Repetition]:
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        below = {name: f"{path}.{name}" if path else name for name, _ in children}
        alone = path in excluded
        kinds = [None if alone else self._kind(name, child, excluded) for name, child in children]
        index = 0
        while index < len(children):
            size, units = _longest(kinds, index)
            names = [below[name] for name, _ in children[index : index + size * units]]
            row = Repetition(tuple(tuple(names[start : start + size]) for start in range(0, len(names), size)))
            if units and all(map(self._owns_weights, (p for u in row.units for p in u))):
                yield row
                index += size * units
            else:
                yield from self._rows_of(below[children[index][0]], children[index][1], excluded)
                index += 1

    def _kind(self, name: str, module: nn.Module, excluded: Collection[int | str]) -> Any:
        """A key that is equal for modules that are probably equal; None for modules that cannot be in a row."""
        group = self._groups.get(id(vars(module)))
        if group is None or group in excluded or not is_number(name):
            return None
        attributes = tuple(
            (name, value if value.__class__ in (bool, str) else value.__class__)
            for part in module.modules()
            for name, value in vars(part).items()
            if name[:1] != "_"
        )
        return group, attributes

    def _owns_weights(self, path: str) -> bool:
        """Whether the module shares no weights with others."""
        return all(
            name == f"{path}.{below}" and name not in self._tied for below, name in self._weights.get(path, {}).items()
        )

    @contextmanager
    def absent(self) -> Iterator[None]:
        """A context in which left-out modules have no weights, and no submodules except in `with_parts`."""
        tops = [(self._modules[path], container_of(row)) for row in self.all for unit in left_out(row) for path in unit]
        kept = [
            (part, store, vars(part)[store], row)
            for top, row in tops
            for part in top.modules()
            for store in ("_parameters", "_buffers")
        ]
        self._parts = [(top, vars(top)["_modules"]) for top, _ in tops]
        for part, store, weights, row in kept:
            vars(part)[store] = _Absent(weights, row, self)
        self._hide()
        try:
            yield
        finally:
            self._show()
            for part, store, weights, _ in kept:
                vars(part)[store] = weights

    @contextmanager
    def with_parts(self) -> Iterator[None]:
        """A context in which left-out modules have their submodules."""
        self._show()
        try:
            yield
        finally:
            self._hide()

    def _show(self) -> None:
        for module, parts in self._parts:
            vars(module)["_modules"] = parts

    def _hide(self) -> None:
        for module, _ in self._parts:
            vars(module)["_modules"] = {}

    def with_left_out(self, names: frozenset[str]) -> frozenset[str]:
        """The names of weights, with the corresponding names in the left-out modules."""
        like = {
            template: [unit[place] for unit in left_out(row)]
            for row in self.all
            for place, template in enumerate(row.units[KEPT - 1])
        }
        return names | {
            other + name.removeprefix(path)
            for name in names
            for path, others in like.items()
            if name.startswith(f"{path}.")
            for other in others
        }


def _longest(kinds: list[Any], index: int) -> tuple[int, int]:
    """The row of the most modules that begins at this index, as (modules in a unit, number of units); 0 units if there
    is none.
    """
    found = 1, 0
    for size in range(1, LONGEST + 1):
        unit = kinds[index : index + size]
        units = 1
        while None not in unit and kinds[index + units * size : index + (units + 1) * size] == unit:
            units += 1
        if units >= FEWEST and size * units > math.prod(found):
            found = size, units
    return found


class _Absent(dict[str, Any]):
    """Replaces the weights of a left-out module: empty, and an error if forward reads it."""

    def __init__(self, weights: Mapping[str, Any], row: str, rows: ModuleRows) -> None:
        super().__init__()
        self._names, self._row, self._rows = frozenset(weights), row, rows

    def _read(self) -> None:
        if self._rows.running and self._names:
            raise UnequalError(self._row)

    def __contains__(self, name: object) -> bool:
        if name in self._names:
            self._read()
        return super().__contains__(name)


def _reading(method: str) -> Callable[..., Any]:
    def read(weights: _Absent, *given: Any) -> Any:
        weights._read()
        return getattr(dict, method)(weights, *given)

    return read


for _method in ("__getitem__", "__iter__", "__len__", "get", "keys", "values", "items"):
    setattr(_Absent, _method, _reading(_method))
