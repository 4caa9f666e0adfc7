"""Costs of graphs that depend on local shapes alone. Programs on several meshes share them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from partc.ir.layout import Sizes
from partc.ir.program import SCAN, Graph, Region, TensorType
from partc.ir.scans import scan_of

_Cost = TypeVar("_Cost")
_Key = tuple[object, ...]


@dataclass(frozen=True)
class LocalCosts:
    """Costs by kind, graph and number of parts: dp=2 and 4 microbatches cut a batch into 8 parts."""

    _cuts: dict[int, tuple[Region, tuple[tuple[str, ...], ...]]] = field(default_factory=dict)
    _known: dict[_Key, Any] = field(default_factory=dict)

    def of(self, kind: object, region: Region, graph: Graph | None, sizes: Sizes, make: Callable[[], _Cost]) -> _Cost:
        """The known cost of a region, or of one of its graphs, at equal local shapes; otherwise the cost that `make`
        computes.
        """
        if id(region) not in self._cuts:  # keeps the region alive, so that its id is not reused
            self._cuts[id(region)] = region, tuple(dict.fromkeys(_axes(region)))
        parts = (math.prod(sizes[axis] for axis in axes) for axes in self._cuts[id(region)][1])
        key = kind, id(region), id(graph), *parts
        if key not in self._known:
            self._known[key] = make()
        found: _Cost = self._known[key]
        return found


def _axes(region: Region) -> Iterator[tuple[str, ...]]:
    """The axes that cut a dimension together."""
    for graph in region.graphs:
        for type in (*region.types(graph).values(), *_inner(graph)):
            yield from (sub.axes for dim in type.layout.dims for sub in dim if sub.axes)


def _inner(graph: Graph) -> Iterator[TensorType]:
    """The types of values inside the steps of scans."""
    for op in graph.ops:
        if op.name == SCAN:
            step = scan_of(op).step
            yield from (value.type for value in step.definitions().values())
            yield from _inner(step)
