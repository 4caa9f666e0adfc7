"""Pictures of a program as data: the positions of boxes, lines and bars that templates draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from partc.cost.simulation import Timeline
from partc.ir.layout import Sizes
from partc.ir.printer import collective_bytes, print_operation
from partc.ir.program import Graph, Op, Region, TensorType

WIDE, HIGH, GAP_X, GAP_Y = 214, 34, 26, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBox:
    """An operation, input or output of a drawn graph."""

    x: float
    y: float
    kind: Literal["input", "param", "op", "move", "output"]
    title: str
    note: str
    hover: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A line from one box to another. `text` is the layout of the value that flows along it; each value is labelled
    once.
    """

    path: str
    text: str
    labelled: bool
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    width: float
    height: float
    boxes: tuple[NodeBox, ...]
    lines: tuple[Edge, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A computation on the timeline, in percent of the picture's width. `second` marks every other stage of a rank."""

    left: float
    width: float
    kind: str
    second: bool
    microbatch: int
    hover: str


def draw(region: Region, graph: Graph, sizes: Sizes) -> Drawing:
    """Place operations in layers. Each operation is below everything that it reads; each layer is ordered by its
    readers.
    """
    types = region.types(graph)
    makers: dict[str, int] = {value.name: index for index, value in enumerate(graph.inputs)}
    nodes: list[tuple[str, Op | None]] = [(value.name, None) for value in graph.inputs]
    edges: list[tuple[int, int, str]] = []
    for op in graph.ops:
        index = len(nodes)
        nodes.append((", ".join(value.name for value in op.results), op))
        edges += [(makers[name], index, name) for name in dict.fromkeys(op.refs()) if name in makers]
        makers.update((value.name, index) for value in op.results)
    for name in dict.fromkeys(graph.outputs):
        if name in makers:
            edges.append((makers[name], len(nodes), name))
            nodes.append((f"return {name}", None))
    places = _placed(len(nodes), edges)
    boxes = tuple(
        _box(title, op, index < len(graph.inputs), *places[index], types, sizes)
        for index, (title, op) in enumerate(nodes)
    )
    first = {name: index for index, (_, _, name) in reversed(list(enumerate(edges)))}
    lines = tuple(
        _line(boxes[a], boxes[b], str(types[name]), labelled=first[name] == index)
        for index, (a, b, name) in enumerate(edges)
    )
    width = max((box.x + WIDE for box in boxes), default=0) + GAP_X
    height = max((box.y + HIGH for box in boxes), default=0) + GAP_Y
    return Drawing(width=width, height=height, boxes=boxes, lines=lines)


def _placed(count: int, edges: list[tuple[int, int, str]]) -> list[tuple[float, float]]:
    layer = [0] * count
    for a, b, _ in edges:
        layer[b] = max(layer[b], layer[a] + 1)
    readers: dict[int, list[int]] = {}
    above: dict[int, list[int]] = {}
    for a, b, _ in edges:
        readers.setdefault(a, []).append(b)
        above.setdefault(b, []).append(a)
    for index in range(count):  # inputs are placed directly above their first reader
        if index not in above and index in readers:
            layer[index] = max(0, min(layer[reader] for reader in readers[index]) - 1)
    rows: dict[int, list[int]] = {}
    for index in range(count):
        rows.setdefault(layer[index], []).append(index)
    column = {index: float(position) for row in rows.values() for position, index in enumerate(row)}
    for _ in range(6):
        for neighbours in (above, readers):
            for row in rows.values():
                mean = {
                    i: sum(column[n] for n in neighbours[i]) / len(neighbours[i]) if i in neighbours else column[i]
                    for i in row
                }
                for position, index in enumerate(sorted(row, key=lambda i: (mean[i], i))):
                    column[index] = max(float(position), mean[index]) if len(row) == 1 else float(position)
    return [(GAP_X + column[i] * (WIDE + GAP_X), GAP_Y / 2 + layer[i] * (HIGH + GAP_Y)) for i in range(count)]


def _box(
    title: str, op: Op | None, is_input: bool, x: float, y: float, types: Mapping[str, TensorType], sizes: Sizes
) -> NodeBox:
    if op is None:
        kind: Literal["input", "output"] = "input" if is_input else "output"
        name = title.removeprefix("return ")
        return NodeBox(x=x, y=y, kind=kind, title=title, note=str(types[name]), hover=f"{name}: {types[name]}")
    moved = collective_bytes(op, types, sizes)
    source = f"\n{op.source}" if op.source and op.source.line else ""
    return NodeBox(
        x=x,
        y=y,
        kind="move" if moved else "op",
        title=title,
        note=f"{op.name} {moved}".strip(),
        hover=f"{print_operation(op)}\n{'; '.join(str(v.type) for v in op.results)}{source}",
    )


def _line(a: NodeBox, b: NodeBox, text: str, *, labelled: bool) -> Edge:
    x1, y1, x2, y2 = a.x + WIDE / 2, a.y + HIGH, b.x + WIDE / 2, b.y
    bend = max(16.0, (y2 - y1) / 2)
    path = f"M{x1:.1f},{y1:.1f} C{x1:.1f},{y1 + bend:.1f} {x2:.1f},{y2 - bend:.1f} {x2:.1f},{y2:.1f}"
    return Edge(path=path, text=text, labelled=labelled, x=x1, y=y1 + 13)


def bars(step: Timeline, length: float) -> tuple[tuple[Bar, ...], ...]:
    """The bars of a timeline's computations, rank by rank, for a picture as wide as `length`."""
    stages = [sorted({span.compute.stage for span in line}) for line in step.ranks]
    return tuple(
        tuple(
            Bar(
                left=100 * span.start / length,
                width=100 * (span.end - span.start) / length,
                kind=span.compute.kind,
                second=mine.index(span.compute.stage) % 2 == 1,
                microbatch=span.compute.microbatch,
                hover=f"{span.compute}: {span.start:g} to {span.end:g}",
            )
            for span in line
        )
        for line, mine in zip(step.ranks, stages, strict=True)
    )
