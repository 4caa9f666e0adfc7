"""Mixtures of experts that sort their tokens, rewritten to keep tokens in their original order.

    s, perm = sort(experts)                       r = expand(reshape(x, (t, 1, h)), (t, k, h))
    g       = index(x, (perm // k,))              y = expert_matmul(reshape(r, (t k, h)), experts, w)
    y       = grouped_mm(g, w, counts)      ->    z = mul(y, scores)
    z       = mul(y, index(scores, (perm,)))
    out     = index(z, (inverse of perm,))        out is z

Sorting by expert is an implementation detail of grouped products. It mixes examples, so that no batch could be cut
across it. Between the sort and its inverse everything works row by row, in any order of rows. `expert_matmul`
multiplies each row by the matrix of its expert, and sorts internally.

Sorted expert numbers may also be written as `repeat_interleave(counts)` with the counts of the unsorted ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc import fuel
from partc.ir.program import Arg, DTypeArg, Op, Ref, Region, TensorType, Value
from partc.passes.route.rows import RowWriter, dims_of_rows
from partc.passes.route.writes import Distinct

_GROUPED = frozenset({"partc_any::grouped_mm", "transformers::grouped_mm_fallback"})


def unsorted_experts(region: Region) -> Region:
    """Rewrite every sort by expert whose whole path to its inverse is understood; leave others unchanged."""
    types, graph = region.types(region.forward), region.forward
    rest = list(reversed(graph.ops))
    last: dict[str, int] = {}  # the number of operations behind a value's last reader
    for behind, op in enumerate(rest):
        for name in op.refs():
            last.setdefault(name, behind)
    last.update(dict.fromkeys(graph.outputs, -1))
    same: dict[str, str] = {}
    makers = graph.makers()
    ops: list[Op] = []
    while rest:
        op = _reading(same, rest.pop())
        if op.name in ("sort", "argsort") and len(op.results[0].type.shape) == 1 and not _descends(op):
            attempt = _Unsorting(op, types, last, same, makers)
            taken = attempt.run(rest)
            if taken is not None and fuel.may_rewrite("unsorted experts", op.source):
                del rest[len(rest) - taken :]
                for behind, kept in enumerate(reversed(attempt.ops), len(rest)):
                    last.update((name, min(behind, last.get(name, behind))) for name in kept.refs())
                for old, new in attempt.same.items():
                    last[new] = min(last.get(old, len(rest)), last.get(new, len(rest)))
                same |= attempt.same
                rest += reversed(attempt.ops)
                continue
        ops.append(op)
    return replace(region, forward=graph.rewritten(ops, same))


def numbered_groups(region: Region) -> Region:
    """Replace grouped products of rows in another order than that of a known sort.

    y = grouped_mm(x, w, ends)  ->  groups = sum(ge(rows, ends), (1,)); y = expert_matmul(x, groups, w)
    """
    graph = region.forward
    if not any(op.name in _GROUPED for op in graph.ops):
        return region
    w = RowWriter(types=dict(region.types(graph)), taken={*graph.definitions(), *(x.name for x in region.params)})
    for op in graph.ops:
        operands = _operands(op)
        if operands is None:
            w.keep(op)
            continue
        x, matrices, ends = operands
        w.source = op.source
        (groups,), count = w.shape(ends.name), w.shape(x.name)[0]
        rows = w.add("arange", (count,), (count,), "i64", "rows", dtype=DTypeArg("i64"))
        behind = (Ref(w.reshape(rows, (count, 1), "rows")), ends)
        ended = w.add("ge", behind, (count, groups), "bool", "ended_groups")
        ended = w.add("to", (Ref(ended), DTypeArg("i64")), (count, groups), "i64", "ended_groups")
        numbers = w.add("sum", (Ref(ended), (1,), False), (count,), "i64", "groups")
        w.keep(replace(op, name="expert_matmul", args=(x, Ref(numbers), matrices), attrs=()))
    return replace(region, forward=replace(graph, ops=tuple(w.ops)))


def _operands(op: Op) -> tuple[Ref, Ref, Ref] | None:
    """The rows, matrices and ends of groups of a grouped product without a bias; None for other operations."""
    if op.name not in _GROUPED:
        return None
    given: dict[str, Arg] = dict(zip(("x", "w", "offs", "bias", "dtype"), op.args, strict=False)) | dict(op.attrs)
    x, w, ends = given["x"], given["w"], given.get("offs")
    plain = given.get("bias") is None and given.get("dtype") is None
    return (x, w, ends) if plain and isinstance(x, Ref) and isinstance(w, Ref) and isinstance(ends, Ref) else None


def _reading(same: Mapping[str, str], op: Op) -> Op:
    """The operation with renamed operands; most have none."""
    if same.keys().isdisjoint(op.refs()):
        return op
    return op.with_operands(same)


def _descends(op: Op) -> bool:
    return bool(dict(op.attrs).get("descending", False)) or any(arg is True for arg in op.args[1:])


class _NotUnderstood(Exception):
    """An operation mixes sorted rows, or reads them in an unknown way."""


@dataclass(slots=True)
class _Unsorting:
    """One sort by expert, with facts about the values that depend on it."""

    sort: Op
    types: Mapping[str, TensorType]
    last: Mapping[str, int]  # value -> index behind its last reader; -1 for outputs
    known: Mapping[str, str]  # values that earlier rewrites replaced
    makers: Mapping[str, Op]
    rows: dict[str, str] = field(default_factory=dict)  # value in sorted order -> the value in original order
    every: dict[str, int] = field(default_factory=dict)  # perm // k, or its columns -> k
    numbers: set[str] = field(default_factory=set)  # the sorted expert numbers, also cast for counting
    counts: set[str] = field(default_factory=set)
    inverse: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)  # tensors into which the inverse permutation is written
    same: dict[str, str] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def run(self, rest: Sequence[Op]) -> int | None:
        """Rewrite the operations after the sort, up to the last that depends on it.

        Returns their number; None if a reader is not understood.
        """
        self.numbers.update(value.name for value in self.sort.results[:-1])
        taken, until = 0, len(rest)
        try:
            until = self._end(self.sort, until)
            while until < len(rest) - taken:
                taken += 1
                op = _reading(self.known, rest[-taken])
                if not self._concerns(op):
                    self.ops.append(_reading(self.same, op))
                elif any(name in self.same for name in op.refs()) or not self._rewrite_reader(op):
                    return None
                else:
                    until = self._end(op, until)
        except _NotUnderstood:
            return None
        return taken

    def _end(self, op: Op, until: int) -> int:
        """The index behind the last reader of sorted rows. Raises _NotUnderstood if they are an output."""
        ends = [self.last.get(value.name, until) for value in op.results if value.name not in self.same]
        if -1 in ends:
            raise _NotUnderstood
        return min([until, *ends])

    @property
    def _perm(self) -> str:
        return self.sort.results[-1].name

    @property
    def _experts(self) -> Ref:
        return Ref(next(self.sort.refs()))

    @property
    def _length(self) -> int:
        return self.sort.results[0].type.shape[0]

    def _concerns(self, op: Op) -> bool:
        known = (self.rows, self.every, self.numbers, self.counts, self.inverse, self.fresh, (self._perm,))
        return any(name in names for name in op.refs() for names in known) or self._lists_numbers(op)

    def _rewrite_reader(self, op: Op) -> bool:
        """Rewrite one reader of the sort's results; False if it is not understood."""
        if len(op.results) == 1 and self._is_bookkeeping(op):
            return True
        if op.name == "index":
            return self._index(op)
        if op.name == "gather":
            return self._gather(op)
        if op.name in _GROUPED:
            return self._product(op)
        if op.name == "expert_matmul":
            return self._product_of_parts(op)
        if op.name in ("index_add", "index_copy", "scatter_add"):
            return self._put_back(op)
        if op.name == "index_put":
            return self._put_in_place(op)
        if op.name == "empty_like":  # reads no rows
            self.ops.append(op.with_operands(self.rows))
            return True
        return self._row_by_row(op)

    def _is_bookkeeping(self, op: Op) -> bool:
        """Whether the operation only counts tokens or inverts the order."""
        names, made = list(op.refs()), op.result.name
        match op.name:
            case "floor_divide" | "div" if names == [self._perm] and isinstance(op.args[1], int):
                if op.name == "div" and dict(op.attrs).get("rounding_mode") not in ("trunc", "floor"):
                    return False
                self.every[made] = op.args[1]
            case "reshape" | "expand" if op.result.type.shape[0] == self._length and (
                names[0] in self.every or names == [self._perm]
            ):
                self.every[made] = self.every.get(names[0], 1)
            case "repeat_interleave" if self._lists_numbers(op):
                self.numbers.add(made)
            case "to" if names[0] in self.numbers:
                self.numbers.add(made)
            case "histc" | "bincount" if names == [next(iter(names))] and names[0] in self.numbers:
                self.counts.add(made)
            case "scatter_add" if names[1] in self.numbers and names[2] not in self.rows:  # bincount
                self.counts.add(made)
            case "cumsum" | "to" if names[0] in self.counts:
                self.counts.add(made)
            case "empty_like" | "zeros_like" if names == [self._perm]:
                self.fresh.add(made)
            case "argsort" if names == [self._perm]:
                self.inverse.add(made)
            case "index_put" if names[0] in self.fresh and names[1:2] == [self._perm]:
                self.inverse.add(made)
            case _:
                return False
        return True

    def _lists_numbers(self, op: Op) -> bool:
        """Whether the operation repeats each expert's number once for each of its rows."""
        counts = next(op.refs(), "")
        return op.name == "repeat_interleave" and len(op.args) == 1 and (
            counts in self.counts or self._source(self._counted(counts)) == self._source(self._experts.name)
        )  # fmt: skip

    def _ends_groups(self, name: str) -> bool:
        """Whether a value is the cumulative sum of the counts of expert numbers."""
        op = self._maker(name)
        counted = self._counted(next(op.refs())) if op is not None and op.name == "cumsum" else ""
        return self._source(counted) == self._source(self._experts.name)

    def _source(self, name: str) -> str:
        """The value behind operations that keep the order of elements."""
        while (op := self.makers.get(name)) is not None and op.name in ("reshape", "to", "detach"):
            name = next(op.refs())
        return name

    def _maker(self, name: str) -> Op | None:
        """The operation that computed a value, behind casts."""
        op = self.makers.get(name)
        while op is not None and op.name == "to":
            op = self.makers.get(next(op.refs()))
        return op

    def _counted(self, name: str) -> str:
        """The value whose numbers 0, 1, … are counted in `name`; "" if `name` holds no such counts."""
        op = self._maker(name)
        match op:
            case Op(name="scatter_add", args=(Ref(zeros), 0, Ref(numbers), Ref(ones))):
                return numbers if self._is_full(zeros, 0) and self._is_full(ones, 1) else ""
            case Op(name="sum", args=(Ref(marks), dims, *_)):
                rank = len(self.types[marks].shape)
                return self._marked(marks) if dims == tuple(range(rank - 1)) else ""
            case Op(name="histc" | "bincount", args=(Ref(numbers), *_)):
                return numbers
        return ""

    def _marked(self, name: str) -> str:
        """The numbers whose one-hot encoding a value is, row by row; "" for other values."""
        op = self._maker(name)
        last = len(self.types[name].shape) - 1
        match op:
            case Op(name="scatter", args=(Ref(zeros), dim, Ref(numbers), 1)) if dim in (last, -1):
                distinct = Distinct(self.makers, self.types).numbers(numbers, last)
                return numbers if distinct and self._is_full(zeros, 0) else ""
            case Op(name="eq", args=(Ref(column), Ref(places))):
                all_places = self.makers.get(places)
                counts_up = all_places is not None and all_places.name == "arange" and len(all_places.args) == 1
                return column if counts_up and self.types[column].shape[-1] == 1 else ""
        return ""

    def _is_full(self, name: str, value: int) -> bool:
        op = self.makers.get(name)
        return op is not None and op.name == "full" and op.args[1] == value

    def _product_of_parts(self, op: Op) -> bool:
        """Rewrite a product of sorted rows with known expert numbers; False for other operations."""
        x, numbers, w = op.args
        if not (isinstance(x, Ref) and isinstance(numbers, Ref) and isinstance(w, Ref)):
            return False
        if x.name not in self.rows or numbers.name not in self.numbers or w.name in self.rows:
            return False
        self._keep(replace(op, args=(Ref(self.rows[x.name]), self._experts, w)))
        return True

    def _put_back(self, op: Op) -> bool:
        """Rewrite writes or additions of sorted rows to their original places or tokens; False for other operations."""
        into, dim, index, rows = op.args[:4]
        if dim != 0 or dict(op.attrs).get("alpha", 1) != 1 or not isinstance(into, Ref) or into.name in self.rows:
            return False
        if not isinstance(index, Ref) or not isinstance(rows, Ref) or rows.name not in self.rows:
            return False
        found, type = self.rows[rows.name], op.result.type
        if index.name == self._perm and type.shape[0] == self._length:
            if op.name == "index_copy":
                self.same[op.result.name] = found
                return True
        elif index.name in self.every and op.name == self._reads(index.name, "index_add", "scatter_add"):
            times, rest = self.every[index.name], type.shape[1:]
            if type.shape[0] * times != self._length:
                return False
            for name, args, shape in (
                ("reshape", ((type.shape[0], times, *rest),), (type.shape[0], times, *rest)),
                ("sum", ((1,), False), type.shape),
            ):
                made = f"{op.result.name}_{name}"
                value = Value(name=made, type=TensorType.replicated(type.dtype, shape))
                self.ops.append(Op(name=name, args=(Ref(found), *args), results=(value,), source=op.source))
                found = made
        else:
            return False
        self.ops.append(replace(op, name="add", args=(into, Ref(found)), attrs=()))
        return True

    def _put_in_place(self, op: Op) -> bool:
        """Rewrite an assignment of all sorted rows to their original places in another tensor; False for others."""
        match op.args:
            case (Ref(into), (Ref(index),), Ref(rows), *accumulate) if index == self._perm and rows in self.rows:
                if any(accumulate) or into in self.rows or op.result.type.shape != self.types[rows].shape:
                    return False
                self.same[op.result.name] = self.rows[rows]
                return True
        return False

    def _reads(self, index: str, rows: str, elements: str) -> str:
        """The name `rows` or, if the index has a column for each element, `elements`: how an operation reads the
        index.
        """
        return rows if len(self.types[index].shape) == 1 else elements

    def _gather(self, op: Op) -> bool:
        """Rewrite a gather of whole rows, whose index has a column for each element; False for others."""
        source, dim, index = op.args[:3]
        if not isinstance(source, Ref) or not isinstance(index, Ref) or dim != 0 or source.name in self.rows:
            return False
        shape = self.types[source.name].shape
        if index.name not in self.every or len(shape) != 2 or op.result.type.shape[1] != shape[1]:
            return False
        self.rows[op.result.name] = self._repeated(op, source.name, self.every[index.name])
        return True

    def _index(self, op: Op) -> bool:
        indices = op.args[1]
        if not isinstance(op.args[0], Ref) or not isinstance(indices, tuple) or len(indices) != 1:
            return False
        source, index = op.args[0].name, indices[0]
        if not isinstance(index, Ref):
            return False
        if index.name == self._perm and source not in self.rows:
            self.rows[op.result.name] = source
        elif index.name in self.every and source not in self.rows:
            self.rows[op.result.name] = self._repeated(op, source, self.every[index.name])
        elif index.name in self.numbers and source not in self.rows:
            self._keep(replace(op, args=(op.args[0], (self._experts,))))  # a bias of each row's expert
        elif index.name in self.rows and source not in self.rows:
            self._keep(replace(op, args=(op.args[0], (Ref(self.rows[index.name]),))))  # a lookup for each row
        elif index.name in self.inverse and source in self.rows:
            self.same[op.result.name] = self.rows[source]
        else:
            return False
        return True

    def _repeated(self, op: Op, source: str, times: int) -> str:
        """Write the result as `source` with every row repeated `times` times, consecutively."""
        count, *rest = self.types[source].shape
        if count * times != self._length:
            raise _NotUnderstood
        dtype = self.types[source].dtype
        made = op.result.name
        steps: tuple[tuple[str, str, tuple[int, ...]], ...] = (
            ("reshape", f"{made}_one", (count, 1, *rest)),
            ("expand", f"{made}_each", (count, times, *rest)),
            ("reshape", made, (count * times, *rest)),
        )
        for name, result, shape in steps:
            value = Value(name=result, type=TensorType.replicated(dtype, shape))
            self.ops.append(Op(name=name, args=(Ref(source), shape), results=(value,), source=op.source))
            source = result
        return made

    def _product(self, op: Op) -> bool:
        operands = _operands(op)
        if operands is None:
            return False
        x, w, ends = operands
        if x.name not in self.rows or w.name in self.rows:
            return False
        if ends.name not in self.counts and not self._ends_groups(ends.name):
            return False
        args = (Ref(self.rows[x.name]), self._experts, w)
        self._keep(replace(op, name="expert_matmul", args=args, attrs=()))
        return True

    def _row_by_row(self, op: Op) -> bool:
        names = list(op.refs())
        facts = (self.every, self.numbers, self.counts, self.inverse, self.fresh, (self._perm,))
        if any(name in known for name in names for known in facts):
            return False
        dims = dims_of_rows(op, self.types, [0 if name in self.rows else None for name in names])
        if dims is None or any(dims):
            return False
        self._keep(op.with_operands(self.rows))
        return True

    def _keep(self, op: Op) -> None:
        self.ops.append(op)
        self.rows.update((value.name, value.name) for value in op.results)
