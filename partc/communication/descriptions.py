"""Comments of collectives: the collective, its bytes, its axis and its readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from partc.communication.execution import StatementRun
from partc.ir.collectives import COLLECTIVES, collectives_of, received
from partc.ir.layout import Partial, Sizes
from partc.ir.naming import listed
from partc.ir.operations import VIEWS
from partc.ir.printer import readable
from partc.ir.program import Collective, Graph, Op, Program, TensorType

NAMES: Mapping[str, str] = {name: row.title for name, row in COLLECTIVES.items() if row.title}
_LOW = {"bf16": "bf16", "f16": "fp16"}  # low-precision element types and their names in comments
# Operations that the search for a value's readers and makers looks through.
_VIEWS = VIEWS | {"to"}
_TRANSPARENT = _VIEWS | {"add", "sub", "neg", "cat"}


def moved_bytes(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> int:
    """The bytes that one rank receives in an operation, with ring algorithms; 0 for one without collectives."""
    return sum(received(each, sizes) for each in collectives_of(op, types, sizes))


def comment(
    op: Op,
    graph: Graph,
    types: Mapping[str, TensorType],
    sizes: Sizes,
    label: Callable[[Op], str],
    *,
    apart: bool = False,
) -> str:
    """One sentence without a full stop; empty for an operation that is not a collective.

    `apart`: the collective is waited for later.
    """
    axis = dict(op.attrs).get("axis")
    if op.name not in NAMES or not isinstance(axis, str) or sizes[axis] == 1:
        return ""
    size = readable(moved_bytes(op, types, sizes))
    why = reason(op, graph, types, label)
    return f"{NAMES[op.name]} {size} over {axis}{', while what follows runs' * apart}: {why}"


def reason(op: Op, graph: Graph, types: Mapping[str, TensorType], label: Callable[[Op], str]) -> str:
    """The reason for a collective: the operations that make parts of a sum, or those that read the result."""
    attrs, read = dict(op.attrs), _readers(op.result.name, graph)
    makers = listed(label(maker) for maker in _makers(next(op.refs()), str(attrs["axis"]), graph, types))
    readers = listed(map(label, read))
    result, partial = readers or "the result", f"each rank has a part of the sum in {makers or 'this value'}"
    needs = f"{result} {'need' if ' and ' in readers else 'needs'} all of dim"
    match op.name:
        case "all_reduce" if attrs.get("op") == "max":
            return f"the largest of every rank's, for {result}"
        case "all_reduce":
            return partial
        case "reduce_scatter":
            return f"{partial} and keeps its share of dim {attrs['dim']}"
        case "all_gather":
            return f"{needs} {attrs['dim']}"
        case "dispatch" if any(reader.name == "divide_rows" for reader in read):
            return "rows travel to the ranks of their rows of all tables"
        case "dispatch":
            owners = "rows of the table" if any(reader.name.startswith("embedding") for reader in read) else "experts"
            return f"rows travel to the ranks of their {owners}, for {result}"
        case "combine":
            return f"rows of {makers or 'the experts'} return to their places"
        case _:
            return f"{needs} {attrs['concat_dim']} for a share of dim {attrs['split_dim']}"


def moved(collectives: Iterable[Collective], sizes: Sizes) -> str:
    """`reduce-scatter 53.0 KiB over dp_in and all-reduce 9.1 KiB in bf16 over dp`: the bytes that a rank receives."""
    found: dict[tuple[str, str], int] = {}
    for each in collectives:
        key = NAMES[each.op], f"{coded(each)}over {each.group}"
        found[key] = found.get(key, 0) + received(each, sizes)
    return listed(f"{name} {readable(size)} {over}" for (name, over), size in found.items())


def coded(collective: Collective) -> str:
    """`in int8 ` or `in bf16 ` if the collective is compressed or in low precision; else empty."""
    code = collective.code or _LOW.get(collective.dtype)
    return f"in {code} " if code else ""


def _makers(name: str, axis: str, graph: Graph, types: Mapping[str, TensorType]) -> list[Op]:
    """The operations whose results first became partial over the axis."""
    makers = graph.makers()
    found: dict[int, Op] = {}
    todo, seen = [name], set[str]()
    while todo:
        op = makers.get(todo.pop())
        if op is None or id(op) in found:
            continue
        earlier = [ref for ref in op.refs() if ref in types and isinstance(types[ref].layout.placement(axis), Partial)]
        if not earlier and op.name in _TRANSPARENT:
            earlier = list(op.refs())
        if earlier:
            todo.extend(ref for ref in earlier if ref not in seen)
            seen.update(earlier)
        else:
            found[id(op)] = op
    return _in_order(found, graph)


def _readers(name: str, graph: Graph) -> list[Op]:
    """The operations that read a value, directly or through views."""
    readers = graph.readers()
    found: dict[int, Op] = {}
    names = [name]
    for each in names:
        for op in readers.get(each, ()):
            if op.name in _VIEWS:
                names += (value.name for value in op.results)
            else:
                found[id(op)] = op
    return _in_order(found, graph)


def _in_order(found: Mapping[int, Op], graph: Graph) -> list[Op]:
    """Operations of a graph, by identity, in its order."""
    return [op for op in graph.ops if id(op) in found] if len(found) > 1 else [*found.values()]


def purpose(program: Program, step: StatementRun) -> str:
    """The purpose of the collectives that a step starts."""
    of = step.statement.of
    match step.statement.subject:
        case "gather":
            return f"{of} needs its parameters whole"
        case "refresh":
            return "every rank keeps the updated parameters whole"
        case "scatter":
            return f"{of}: each rank keeps its part of the gradients"
        case "shared":
            return "stages that share weights sum their gradients"
        case "bucket" if after := program.bucket(of).after:
            return f"gradients that are complete after {after}"
        case "bucket":
            return "gradients that are summed at the step's end"
        case _:
            return f"the {'result' if program.results else 'loss'} of the whole batch"
