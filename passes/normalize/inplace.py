"""Functionalize in-place operations.

    y = relu(x)                    y   = relu(x)
    add_(y, b)              ->     y_2 = add(y, b)
    z = mul(y, 2)                  z   = mul(y_2, 2)

Later readers of the changed tensor read the new value. A changed view (a slice, a transpose) is put back into its
tensor. The last value of a buffer is the first value of the next microbatch. A change is refused if another view of the
memory is read afterwards, if it reaches a buffer by a view that may be a copy, and if it reaches an input or a
parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partc.errors import PartcError
from partc.ir.program import Graph, Op, Ref, TensorType, Value

# Operations whose result may share memory with their first operand.
_VIEW_NAMES = (
    "view _unsafe_view reshape flatten unflatten squeeze unsqueeze view_as permute t T transpose swapaxes numpy_T mT"
    " movedim expand expand_as split split_with_sizes chunk unbind tensor_split select slice contiguous alias detach to"
    " type_as dropout diagonal unfold as_strided broadcast_tensors narrow real imag"
)
_VIEWS = frozenset(_VIEW_NAMES.split())
_FUNCTIONAL = {"normal_": "normal_functional"}  # normal makes a tensor of means and deviations
_SCATTERS = {"slice": "slice_scatter", "select": "select_scatter"}
_RESHAPES = frozenset({"view", "_unsafe_view", "squeeze", "unsqueeze"})  # reshape and flatten may copy
_TRANSPOSES = frozenset({"transpose", "swapaxes", "t", "T", "numpy_T", "mT", "permute"})
_SAME = frozenset({"detach", "alias"})


def without_mutation(graph: Graph, buffers: Mapping[str, TensorType]) -> tuple[Graph, dict[str, str]]:
    """The graph without in-place operations, and the final names of `buffers`.

    Raises PartcError P0212.
    """
    if not any(_mutates(op) for op in graph.ops):
        return graph, {}
    last = _last_reads(graph)
    types = {**buffers, **{name: value.type for name, value in graph.definitions().items()}}
    storage: dict[str, str] = {}  # view -> the value whose memory it shows
    parts: dict[str, Op] = {}  # slices and rows of other values -> their operations
    inside = {value.name for op in graph.ops for value in op.results} | set(buffers)
    current: dict[str, str] = {}  # changed value -> its current name
    ops: list[Op] = []

    def changed(name: str, now: str) -> None:
        current[name] = now
        current.update((old, now) for old, new in list(current.items()) if new == name)

    for index, op in enumerate(graph.ops):
        first = next(op.refs(), None)
        if not _mutates(op) or first is None:
            if op.name in _VIEWS and first is not None:
                storage.update((value.name, storage.get(first, first)) for value in op.results)
            if op.name in _SCATTERS or op.name in _RESHAPES or op.name in _TRANSPOSES:
                parts[op.result.name] = op
            elif op.name in _SAME and first is not None and storage.get(first, first) in buffers:
                parts[op.result.name] = op  # elsewhere a gradient flows past the change
            ops.append(replace(op.renamed(current), results=op.results))
            continue
        whole = _wholes(first, parts)
        root = storage.get(first, first)
        known = {first, *whole}
        kept = {root} if root in buffers and not known & {root, current.get(root, root)} else set()
        _check(op, known, index, storage, last | dict.fromkeys(kept, len(graph.ops)), inside)
        storage[op.result.name] = root
        ops.append(replace(op.renamed(current), name=_functional(op.name), results=op.results))
        before = {name: current.get(name, name) for name in whole}
        changed(first, op.result.name)
        part, now = first, op.result.name
        for name in whole:
            made = Value(name=f"{op.result.name}_in_{name}", type=types[name])
            put = _put_back(parts[part], Ref(before[name]), Ref(now), made)
            if put is not None:
                ops.append(replace(put, source=op.source))
                now = made.name
            changed(name, now)
            part = name
    done = replace(graph, ops=tuple(ops), outputs=tuple(current.get(name, name) for name in graph.outputs))
    return done, {name: current[name] for name in buffers if name in current}


def _put_back(view: Op, before: Ref, now: Ref, made: Value) -> Op | None:
    """The operation that makes a whole tensor of its value before a change and of a changed view; None if it is one."""
    if view.name in _SCATTERS:
        return Op(name=_SCATTERS[view.name], args=(before, now, *view.args[1:]), results=(made,))
    if view.name in _RESHAPES:
        return Op(name="reshape", args=(now, made.type.shape), results=(made,))
    if view.name == "permute":
        order = view.args[1]
        assert isinstance(order, tuple)
        dims = [dim % len(order) for dim in order if isinstance(dim, int)]
        return Op(name="permute", args=(now, tuple(map(dims.index, range(len(dims))))), results=(made,))
    if view.name in _TRANSPOSES:  # its own inverse
        return Op(name=view.name, args=(now, *view.args[1:]), results=(made,))
    return None


def _functional(name: str) -> str:
    """The functional form of an in-place operation."""
    return _FUNCTIONAL.get(name, name.removesuffix("_"))


def _wholes(name: str, parts: Mapping[str, Op]) -> list[str]:
    """The tensors that contain a value, from the inside out."""
    found = []
    while name in parts:
        name = next(parts[name].refs())
        found.append(name)
    return found


def _mutates(op: Op) -> bool:
    return op.name.endswith("_") and not op.name.startswith("_") and "::" not in op.name and op.name != "detach_"


def _last_reads(graph: Graph) -> dict[str, int]:
    """The position of each value's last read; the graph's outputs are read after everything."""
    found = {name: index for index, op in enumerate(graph.ops) for name in op.refs()}
    return found | dict.fromkeys(graph.outputs, len(graph.ops))


def _check(
    op: Op, known: set[str], index: int, storage: Mapping[str, str], last: Mapping[str, int], inside: set[str]
) -> None:
    """Refuse a change that reaches a value which is not `known` to change."""
    target = next(op.refs())
    root = storage.get(target, target)
    if root not in inside:
        raise PartcError(
            "P0212",
            f"{op.name} changes an input or a parameter in place",
            help=f"use {op.name.removesuffix('_')} and the value it returns",
            source=op.source,
        )
    shared = {name for name, base in storage.items() if base == root} | {root}
    if any(last.get(name, -1) > index for name in shared - known - {op.result.name}):
        raise PartcError(
            "P0212",
            f"{op.name} changes a tensor in place of which a view, or the base, is read afterwards",
            help=f"use {op.name.removesuffix('_')} and the value it returns; build parts with torch.cat or torch.where",
            source=op.source,
        )
