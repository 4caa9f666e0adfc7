"""Give every change in place a value of its own.

    y = relu(x)                    y   = relu(x)
    add_(y, b)              ->     y_2 = add(y, b)
    z = mul(y, 2)                  z   = mul(y_2, 2)

Whoever reads the changed tensor afterwards reads the new value. Where a view shares its memory and
is read afterwards too, or where an input, a parameter or a buffer is changed, that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partc.errors import PartcError
from partc.program import Graph, Op

# Operations whose result may share memory with their first operand.
_VIEW_NAMES = (
    "view _unsafe_view reshape flatten unflatten squeeze unsqueeze view_as permute t T transpose swapaxes numpy_T mT"
    " movedim expand expand_as split split_with_sizes chunk unbind tensor_split select slice contiguous alias detach to"
    " type_as dropout diagonal unfold as_strided broadcast_tensors narrow real imag"
)
_VIEWS = frozenset(_VIEW_NAMES.split())


def without_mutation(graph: Graph) -> Graph:
    """The same graph without operations that change their first operand. Raises PartcError P0212."""
    if not any(_mutates(op) for op in graph.ops):
        return graph
    last = _last_reads(graph)
    storage: dict[str, str] = {}  # view -> the value whose memory it shows
    inside = {value.name for op in graph.ops for value in op.results}
    current: dict[str, str] = {}  # changed value -> what it is now
    ops = []
    for index, op in enumerate(graph.ops):
        first = next(op.refs(), None)
        if _mutates(op) and first is not None:
            _check(op, first, index, storage, last, inside)
            storage[op.result.name] = storage.get(first, first)
            op = replace(op.renamed(current), name=op.name.removesuffix("_"), results=op.results)
            current[first] = op.result.name
            current.update((old, op.result.name) for old, new in list(current.items()) if new == first)
        else:
            if op.name in _VIEWS and first is not None:
                storage.update((value.name, storage.get(first, first)) for value in op.results)
            op = replace(op.renamed(current), results=op.results)
        ops.append(op)
    return replace(graph, ops=tuple(ops), outputs=tuple(current.get(name, name) for name in graph.outputs))


def _mutates(op: Op) -> bool:
    return op.name.endswith("_") and not op.name.startswith("_") and "::" not in op.name and op.name != "detach_"


def _last_reads(graph: Graph) -> dict[str, int]:
    """Where each value is read last; the graph's outputs are read after everything."""
    found = {name: index for index, op in enumerate(graph.ops) for name in op.refs()}
    return found | dict.fromkeys(graph.outputs, len(graph.ops))


def _check(
    op: Op, target: str, index: int, storage: Mapping[str, str], last: Mapping[str, int], inside: set[str]
) -> None:
    root = storage.get(target, target)
    if root not in inside:
        raise PartcError(
            "P0212",
            f"{op.name} changes an input, a parameter or a buffer in place",
            help=f"use {op.name.removesuffix('_')} and the value it returns",
            source=op.source,
        )
    shared = {name for name, base in storage.items() if base == root} | {root}
    if any(last.get(name, -1) > index for name in shared - {target, op.result.name}):
        raise PartcError(
            "P0212",
            f"{op.name} changes a tensor in place of which a view, or the base, is read afterwards",
            help=f"use {op.name.removesuffix('_')} and the value it returns; build parts with torch.cat or torch.where",
            source=op.source,
        )
