"""Join small sums over one axis that do not read each other into one all-reduce, which saves a latency.

    a_sum = all_reduce(a, axis="tp")        both      = cat((a, b), 0)
    b_sum = all_reduce(b, axis="tp")   ->   both_sum  = all_reduce(both, axis="tp")
                                            a_sum, b_sum = split(both_sum, (4, 4), 0)

Sums are joined if they have equal shapes and the later one does not depend on the first. Small operations between them
that read the first one follow the joined sum. The joined tensor stays below the size at which the runtime changes its
algorithm, so that ranks add in the same order as without joining.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from partc import fuel
from partc.ir.collectives import MOVING
from partc.ir.layout import Sizes, SubDim
from partc.ir.naming import unique
from partc.ir.program import Graph, Op, Ref, TensorType, Value
from partc.runtime.plan import DIRECT


def with_joined_sums(graph: Graph, params: Mapping[str, TensorType], sizes: Sizes) -> Graph:
    """The graph with its small sums joined."""
    types = {**params, **graph.types()}
    taken = {*types}
    instead: dict[int, list[Op]] = {}
    for group, readers in _groups(graph, types, sizes):
        instead.update((id(op), []) for op in (*group[:-1], *readers))
        instead[id(group[-1])] = [*_joined_ops(group, types, sizes, taken), *readers]
    return replace(graph, ops=tuple(new for op in graph.ops for new in instead.get(id(op), [op])))


def _groups(graph: Graph, types: Mapping[str, TensorType], sizes: Sizes) -> Iterator[tuple[list[Op], list[Op]]]:
    """Groups of sums to join, ordered by the last sum of each, and the operations that then follow that sum."""
    group: list[Op] = []
    readers: list[Op] = []  # of the group's results
    between = 0  # those of them before the last sum
    late: set[str] = set()  # the results of all these
    for op in graph.ops:
        reads, is_sum = not late.isdisjoint(op.refs()), _is_small_sum(op, types, sizes)
        joins = (
            is_sum
            and not reads
            and bool(group)
            and _compatible(group[0], op, types)
            and _fits([*group, op], types, sizes)
        )
        waits = reads and not is_sum and _is_small(op, types, sizes)
        if group and not joins and (is_sum or (reads and not waits)):
            yield from _allowed_groups(group, readers[:between])
            group, readers, between, late = [], [], 0, set()
        if is_sum:
            group.append(op)
            between = len(readers)
        elif waits:
            readers.append(op)
        if is_sum or waits:
            late.update(value.name for value in op.results)
    yield from _allowed_groups(group, readers[:between])


def _allowed_groups(group: list[Op], readers: list[Op]) -> Iterator[tuple[list[Op], list[Op]]]:
    if len(group) > 1 and fuel.may_rewrite("overlap", group[-1].source):
        yield group, readers


def _is_small(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> bool:
    """Whether an operation computes on this rank, on tensors no larger than those that are joined."""
    names = (*op.refs(), *(value.name for value in op.results))
    return op.name not in MOVING and all(types[name].local_bytes(sizes) <= DIRECT for name in names)


def _is_small_sum(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> bool:
    attrs = dict(op.attrs)
    axis = attrs.pop("axis", None)
    return op.name == "all_reduce" and not attrs and sizes[str(axis)] > 1 and bool(types[next(op.refs())].shape)


def _compatible(a: Op, b: Op, types: Mapping[str, TensorType]) -> bool:
    one, other = next(a.refs()), next(b.refs())
    return a.attrs == b.attrs and types[one] == types[other]


def _fits(group: list[Op], types: Mapping[str, TensorType], sizes: Sizes) -> bool:
    """Whether the joined tensor is small enough that every rank sends all of it to every other rank."""
    others = sizes[str(dict(group[0].attrs)["axis"])] - 1
    return others * sum(types[next(op.refs())].local_bytes(sizes) for op in group) <= DIRECT


def _joined_ops(group: list[Op], types: Mapping[str, TensorType], sizes: Sizes, taken: set[str]) -> Iterator[Op]:
    stem = "_and_".join(op.result.name for op in group)
    parts = tuple(next(op.refs()) for op in group)
    rows = types[parts[0]].layout.local_shape(sizes)[0]
    source = group[0].source

    def new_value(type: TensorType, suffix: str) -> Value:
        first, *rest = type.layout.dims
        layout = replace(type.layout, dims=((SubDim(len(group)), *first), *rest))
        return Value(name=unique(f"{stem}{suffix}", taken), type=replace(type, layout=layout.normalized(sizes)))

    both, total = new_value(types[parts[0]], "_partial"), new_value(group[0].result.type, "")
    yield Op(name="cat", args=(tuple(map(Ref, parts)), 0), results=(both,), source=source)
    yield replace(group[0], args=(Ref(both.name),), results=(total,))
    lengths = (rows,) * len(group)
    yield Op(name="split", args=(Ref(total.name), lengths, 0), results=tuple(op.result for op in group), source=source)
