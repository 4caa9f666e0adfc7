"""Comments above the lines of a backward function that recompute forward values."""

from __future__ import annotations

from partc.cost.saved_tensors import memory_of
from partc.ir.layout import Sizes
from partc.ir.printer import readable
from partc.ir.program import Graph, Op, Region


def recompute_comments(graph: Graph, region: Region, sizes: Sizes) -> dict[str, str]:
    """Map the first result of each stretch of recomputed operations to its comment.

    Bytes are those of values that are read outside the stretch: without recomputation they would have been saved. Views
    of saved values take no memory and get no comment.
    """
    made = {value.name: op.name for op in region.forward.ops for value in op.results}
    again = [op for op in graph.ops if _is_again(op, made)]
    done = set(map(id, again))
    read = {name for op in graph.ops if id(op) not in done for name in op.refs()}
    owner = memory_of(graph)
    values = graph.definitions()
    found: dict[str, str] = {}
    counted = {value.name for value in (*graph.inputs, *region.params)}
    stretch: list[Op] = []
    for op in graph.ops:
        if id(op) in done:
            stretch.append(op)
            continue
        wanted = {owner[value.name] for item in stretch for value in item.results if value.name in read} - counted
        if wanted:
            size = sum(values[name].type.local_bytes(sizes) for name in wanted)
            found[stretch[0].results[0].name] = f"recomputed: {readable(size)} that forward did not save"
        counted |= wanted
        stretch = []
    return found


def _is_again(op: Op, made: dict[str, str]) -> bool:
    return any(made.get(value.name) == op.name for value in op.results) and any(True for _ in op.refs())
