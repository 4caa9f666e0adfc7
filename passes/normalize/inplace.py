"""Functionalize in-place operations.

    y = relu(x)                    y   = relu(x)
    add_(y, b)              ->     y_2 = add(y, b)
    z = mul(y, 2)                  z   = mul(y_2, 2)

Later readers of the changed tensor read the new value. A changed view (a slice, a part of a split, a transpose) is put
back into its tensor, and other views that are read afterwards are made again. The last value of a buffer is the first
value of the next microbatch. A change is refused if a view that may be a copy is read afterwards, if it reaches a
buffer by such a view, and if it reaches an input or a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from partc.errors import PartcError
from partc.ir.program import NO_GRAD, Graph, Op, Ref, TensorType, Value, is_change

# Operations whose result may share memory with their first operand.
_VIEW_NAMES = (
    "view _unsafe_view reshape flatten unflatten squeeze unsqueeze view_as permute t T transpose swapaxes numpy_T mT"
    " movedim expand expand_as split split_with_sizes chunk unbind tensor_split select slice contiguous alias detach to"
    " type_as dropout diagonal unfold as_strided broadcast_tensors narrow real imag"
)
_VIEWS = frozenset(_VIEW_NAMES.split())
_FUNCTIONAL = {"normal_": "normal_functional"}  # normal makes a tensor of means and deviations
_SCATTERS = {"slice": "slice_scatter", "select": "select_scatter", "diagonal": "diagonal_scatter"}
_SPLITS = frozenset({"split", "split_with_sizes", "chunk", "unbind", "tensor_split"})
_RESHAPES = frozenset({"view", "_unsafe_view", "squeeze", "unsqueeze"})  # reshape and flatten may copy
_TRANSPOSES = frozenset({"transpose", "swapaxes", "t", "T", "numpy_T", "mT", "permute"})
_SAME = frozenset({"detach", "alias"})
# Views that are no copies, and can be made again of a changed tensor.
_AGAIN = frozenset({*_SCATTERS, *_SPLITS, *_RESHAPES, *_TRANSPOSES, *_SAME, "narrow", "expand", "expand_as", "unfold"})


def without_mutation(graph: Graph, buffers: Mapping[str, TensorType]) -> tuple[Graph, dict[str, str]]:
    """The graph without in-place operations, and the final names of `buffers`.

    Raises PartcError P0212.
    """
    if not any(is_change(op) for op in graph.ops):
        return graph, {}
    last = _last_reads(graph)
    types = {**buffers, **{name: value.type for name, value in graph.definitions().items()}}
    storage: dict[str, str] = {}  # view -> the value whose memory it shows
    parts: dict[str, Op] = {}  # slices and rows of other values -> their operations
    inside = {value.name for op in graph.ops for value in op.results} | set(buffers)
    current: dict[str, str] = {}  # changed value -> its current name
    origin: dict[str, str] = {}  # a changed tensor under each of its names -> its first name
    views: dict[str, Op] = {}  # views that can be made again -> their operations
    ops: list[Op] = []

    def changed(name: str, now: str) -> None:
        current[name] = now
        current.update((old, now) for old, new in list(current.items()) if new == name)

    def same(name: str) -> str:
        return origin.get(name, name)

    for index, op in enumerate(graph.ops):
        first = next(op.refs(), None)
        if not is_change(op) or first is None:
            if op.name in _VIEWS and first is not None:
                storage.update((value.name, storage.get(first, first)) for value in op.results)
            if op.name in _AGAIN:
                views.update((value.name, op) for value in op.results)
            if op.name in _SPLITS or op.name == "narrow":
                parts.update(_parts(op, types))
            elif op.name in _SCATTERS or op.name in _RESHAPES or op.name in _TRANSPOSES:
                parts[op.result.name] = op
            elif op.name in _SAME and first is not None and storage.get(first, first) in buffers:
                parts[op.result.name] = op  # elsewhere a gradient flows past the change
            ops.append(replace(op.renamed(current), results=op.results))
            continue
        whole = _wholes(first, parts)
        root = storage.get(first, first)
        names = {name: [each for each in (*origin, name) if same(each) == same(name)] for name in (first, *whole)}
        known = {each for group in names.values() for each in group}
        kept = {root} if root in buffers and not known & {root, current.get(root, root)} else set()
        later = {name for name, place in last.items() if place > index} | kept
        stale = _stale(op, known, later, storage, views, inside)
        storage[op.result.name] = root
        if first in parts:  # the result is the changed part itself
            parts[op.result.name] = replace(parts[first], results=(op.result,))
            views[op.result.name] = parts[op.result.name]
        written = replace(op.renamed(current), name=_functional(op.name), results=op.results)
        if (NO_GRAD, True) in op.attrs:
            value = replace(op.result, name=f"{op.result.name}_written")
            attrs = tuple(item for item in op.attrs if item[0] != NO_GRAD)
            ops.append(replace(written, attrs=attrs, results=(value,)))
            written = Op(name="detach", args=(Ref(value.name),), results=op.results, source=op.source)
        ops.append(written)
        before = {name: current.get(name, name) for name in whole}
        for each in names[first]:
            changed(each, op.result.name)
        part, now = first, op.result.name
        for name in whole:
            made = Value(name=f"{op.result.name}_in_{name}", type=types[name])
            put = _put_back(parts[part], Ref(before[name]), Ref(now), made)
            if put is not None:
                ops.append(replace(put, source=op.source))
                now = made.name
            for each in names[name]:
                changed(each, now)
            part = name
        origin.update({first: same(first), op.result.name: same(first)})
        for view in dict.fromkeys(id(views[name]) for name in stale):
            again = next(each for each in views.values() if id(each) == view)
            seen = tuple(replace(value, name=f"{op.result.name}_seen_{value.name}") for value in again.results)
            ops.append(replace(again.renamed(current), results=seen))
            for value, made in zip(again.results, seen, strict=True):
                if value.name in stale:
                    changed(value.name, made.name)
    done = replace(graph, ops=tuple(ops), outputs=tuple(current.get(name, name) for name in graph.outputs))
    return done, {name: current[name] for name in buffers if name in current}


def _put_back(view: Op, before: Ref, now: Ref, made: Value) -> Op | None:
    """The operation that makes a whole tensor of its value before a change and of a changed view; None if it is one."""
    if view.name in _SCATTERS:
        return Op(name=_SCATTERS[view.name], args=(before, now, *view.args[1:]), attrs=view.attrs, results=(made,))
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


def _last_reads(graph: Graph) -> dict[str, int]:
    """The position of each value's last read; the graph's outputs are read after everything."""
    found = {name: index for index, op in enumerate(graph.ops) for name in op.refs()}
    return found | dict.fromkeys(graph.outputs, len(graph.ops))


def _parts(op: Op, types: Mapping[str, TensorType]) -> Iterator[tuple[str, Op]]:
    """Each result of a split as a slice of its operand, or a row."""
    whole = op.args[0]
    assert isinstance(whole, Ref)
    rank = len(types[whole.name].shape)
    place = 1 if op.name in ("unbind", "narrow") else 2
    given = op.args[place] if len(op.args) > place else dict(op.attrs).get("dim", 0)
    start = op.args[2] if op.name == "narrow" else 0
    assert isinstance(given, int) and isinstance(start, int)
    dim = given % rank
    start += types[whole.name].shape[dim] if start < 0 else 0
    for number, value in enumerate(op.results):
        if op.name == "unbind":
            yield value.name, replace(op, name="select", args=(whole, dim, number), attrs=(), results=(value,))
            continue
        end = start + value.type.shape[dim]
        yield value.name, replace(op, name="slice", args=(whole, dim, start, end, 1), attrs=(), results=(value,))
        start = end


def _stale(
    op: Op,
    known: set[str],
    later: set[str],
    storage: Mapping[str, str],
    views: Mapping[str, Op],
    inside: set[str],
) -> list[str]:
    """The views of changed memory that are read later and not `known` to change, in the order in which they are made.

    Raises PartcError P0212 for those that cannot be made again.
    """
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
    apart = {value.name for value in views[target].results} if target in views else set()  # the other parts
    needed: set[str] = set()
    for name in (shared & later) - known - {op.result.name} - apart:
        while name not in known:
            needed.add(name)
            if name not in views:
                raise PartcError(
                    "P0212",
                    f"{op.name} changes a tensor in place of which a view, or the base, is read afterwards",
                    help=f"use {op.name.removesuffix('_')} and the value it returns; build parts with torch.cat or "
                    "torch.where",
                    source=op.source,
                )
            name = next(views[name].refs())
    return [name for name in views if name in needed]
