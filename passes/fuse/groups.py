"""The choice of fused groups: neighbours are joined while that saves time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from partc import fuel
from partc.cost.roofline import H100
from partc.ir.layout import Sizes
from partc.ir.program import RAGGED, SPARSE, Graph, Op, Ref, Region, Value, needed
from partc.ir.ragged import ragged_rows
from partc.passes.fuse.composites import in_fp32, spelled_out
from partc.passes.fuse.iteration_spaces import Form, columns, fits, form, is_short_sum
from partc.passes.fuse.names import stem
from partc.passes.fuse.norm_halves import HALVES, with_norm_halves
from partc.passes.fuse.registers import fits_registers, is_long
from partc.rules import kernels

MOST_TENSORS = 24  # the most tensors that one kernel reads and writes
MOST_ROWS = 14  # the same for a kernel that holds whole rows
MOST_OPS = 64
_WORTH = frozenset({"cross_entropy_backward", "rms_norm_grad_weight", "layer_norm_grad_weight"})


def fused(region: Region, sizes: Sizes, rotations: Mapping[str, str]) -> Region:
    """The region with fused operations in place of each group. `rotations` has the rotary embeddings of values."""
    region = in_fp32(region)
    params = {value.name: value for value in region.params}
    ragged = ragged_rows(region)

    def fused_graph(graph: Graph) -> Graph:
        work = _Work(graph, params, region.read_outside(graph), sizes, ragged, rotations)
        work.join()
        return replace(graph, ops=work.ordered())

    return region.mapped(fused_graph)


@dataclass(frozen=True, slots=True)
class _KernelGroup:
    """Operations by index, their operands from outside (behind views), and their results that others read."""

    members: frozenset[int]
    reads: frozenset[str]
    makes: frozenset[str]
    bytes: int
    form: Form | None = None


class _Work:
    """The growing groups of one graph.

    The number of rows of `ragged` values depends on the data: elementwise operations on the same rows are fused, and
    their kernel receives the number.
    """

    def __init__(
        self,
        graph: Graph,
        params: Mapping[str, Value],
        kept: Collection[str],
        sizes: Sizes,
        ragged: Set[str],
        rotations: Mapping[str, str],
    ) -> None:
        values = {**params, **graph.definitions()}
        self.shapes = {name: value.type.layout.local_shape(sizes) for name, value in values.items()}
        self.bytes = {name: value.type.local_bytes(sizes) for name, value in values.items()}
        self.types = {name: value.type for name, value in values.items()}
        graph = with_norm_halves(graph, self.types, self.shapes, kept)
        self.ops = graph.ops
        self.sizes = sizes
        self.kept = kept
        self.ragged = ragged
        self.rotations = rotations
        self.makers = {value.name: index for index, op in enumerate(graph.ops) for value in op.results}
        self.forms = [self._form(op) for op in graph.ops]
        self.kinds = [self._kind(op, form) for op, form in zip(graph.ops, self.forms, strict=True)]
        self.columns = frozenset[str]().union(*map(columns, graph.ops, self.forms))
        self.roots = [self._behind_views(op.refs()) for op in graph.ops]
        self.readers: dict[str, set[int]] = {}
        for index, kind in enumerate(self.kinds):
            for name in self.roots[index] if kind not in ("view", "constant") else ():
                self.readers.setdefault(name, set()).add(index)
        self.outside = self._read_as_views()
        done = ("pointwise", "gather", "reduction", "composite")
        self.groups = {index: self._group({index}) for index, kind in enumerate(self.kinds) if kind in done}
        # Operation -> the key of its group, or its own index.
        self.place = {index: index for index in range(len(graph.ops))}

    def _form(self, op: Op) -> Form | None:
        if kernels.kind(op) not in ("reduction", "composite"):
            return None
        return form(op, lambda name: self.shapes[name], lambda name: self.types[name].dtype)

    def _kind(self, op: Op, form: Form | None) -> kernels.Kind | None:
        empty = any(0 in self.shapes[name] for name in (*op.refs(), *(value.name for value in op.results)))
        kind = None if empty or not self._keeps_rows(op) else kernels.kind(op)
        if kind in ("reduction", "composite") and form is None:
            return "gather" if is_short_sum(op, self.shapes[next(op.refs())]) else None
        return kind

    def _keeps_rows(self, op: Op) -> bool:
        """Whether each row of ragged results depends on the same row of ragged operands, and on operands without rows;
        or the operation has no ragged values.
        """
        made = {value.name for value in op.results}
        ragged = self.ragged & {*op.refs(), *made}
        if not ragged:
            return True
        rows, *columns = self.shapes[op.results[0].name] or (1,)
        # A kernel does not index dimensions of size 1, and this number of rows is only a mean.
        if rows == 1 or not made <= ragged or any(self.shapes[name][:1] != (rows,) for name in ragged):
            return False
        if kernels.kind(op) == "view":
            return op.name != "permute" and ragged >= {*op.refs()}
        shapes = {name: self.shapes[name] for name in op.refs()}
        return kernels.kind(op) == "pointwise" and all(
            len(shape) == 1 + len(columns) if name in ragged else len(shape) <= len(columns) or shape[0] == 1
            for name, shape in shapes.items()
        )

    def _behind_views(self, names: Iterable[str]) -> frozenset[str]:
        """The values behind views; constants are left out."""
        found: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            index = self.makers.get(name)
            kind = None if index is None else self.kinds[index]
            if kind == "view" and index is not None:
                todo.extend(self.ops[index].refs())
            elif kind != "constant":
                found.add(name)
        return frozenset(found)

    def _read_as_views(self) -> set[str]:
        """Values that the graph's own outputs read through views."""
        found: set[str] = set()
        for name in self.kept:
            index = self.makers.get(name)
            found |= {name} if index is None else {name, *self._view_roots(index)}
        return found

    def _view_roots(self, index: int) -> frozenset[str]:
        return self.roots[index] if self.kinds[index] == "view" else frozenset()

    def _group(self, members: Collection[int]) -> _KernelGroup:
        made = {value.name for index in members for value in self.ops[index].results}
        reads = frozenset(name for index in members for name in self.roots[index]) - made
        makes = frozenset(
            name for name in made if name in self.outside or not self.readers.get(name, set()) <= set(members)
        )
        forms = [form for index in members if (form := self.forms[index]) is not None]
        found = next((form for form in forms if form.whole), forms[0] if forms else None)
        return _KernelGroup(frozenset(members), reads, makes, sum(self.bytes[name] for name in (*reads, *makes)), found)

    def join(self) -> None:
        """Repeatedly join the two groups that save the most time."""
        # Pair of groups -> seconds saved by joining; None: cannot be joined.
        saved: dict[tuple[int, int], float | None] = {}
        while True:
            pairs = self._neighbours()
            saved |= {pair: self._saved(*pair) for pair in pairs if pair not in saved}
            gains = {pair: seconds for pair in pairs if (seconds := saved[pair]) is not None}
            if not gains:
                return
            a, b = max(gains, key=lambda pair: gains[pair])
            if not self._convex(a, b):
                saved[a, b] = None
                continue
            self.groups[a] = self._group(self.groups[a].members | self.groups[b].members)
            del self.groups[b]
            self.place.update(dict.fromkeys(self.groups[a].members, a))
            saved = {pair: seconds for pair, seconds in saved.items() if a not in pair and b not in pair}

    def _neighbours(self) -> list[tuple[int, int]]:
        """Ordered pairs of groups in which one reads the other's results, or that read a common value."""
        by_value: dict[str, list[int]] = {}
        for key in sorted(self.groups):
            for name in sorted(self.groups[key].reads | self.groups[key].makes):
                by_value.setdefault(name, []).append(key)
        pairs = {(a, b) for keys in by_value.values() for i, a in enumerate(keys) for b in keys[i + 1 :]}
        return sorted(pairs)

    def _saved(self, a: int, b: int) -> float | None:
        """The seconds that one kernel saves over two; None if one kernel is impossible or slower."""
        one, two = self.groups[a], self.groups[b]
        if not self._on_same_rows(one, two):
            return None
        both = self._group(one.members | two.members)
        most = MOST_ROWS if both.form else MOST_TENSORS
        if len(both.members) > MOST_OPS or len(both.reads) + len(both.makes) > most or not both.reads:
            return None
        if not (self._rows(both, both.form) and self._has_room(both, both.form) if both.form else self._elements(both)):
            return None
        saved = H100.start + (one.bytes + two.bytes - both.bytes) / H100.memory
        return saved if saved > 0 else None

    def _on_same_rows(self, one: _KernelGroup, two: _KernelGroup) -> bool:
        """Whether two groups have no ragged values, or a common one."""
        first, second = (self.ragged & (group.reads | group.makes) for group in (one, two))
        return not (first or second) or not first.isdisjoint(second)

    def _elements(self, group: _KernelGroup) -> bool:
        """Whether one iteration over elements covers all results of a group."""
        return len({self.shapes[name] for name in group.makes}) == 1

    def _rows(self, group: _KernelGroup, form: Form) -> bool:
        """Whether a group with sums can run row by row: all shapes are rows, and no view mixes them."""
        inside = {value.name for index in group.members for value in self.ops[index].results}
        for index in group.members:
            own = self.forms[index]
            if self.kinds[index] == "gather" or (own is not None and own.with_(form) is None):
                return False
            op = self.ops[index]
            made = [value.name for value in op.results if value.name not in self.columns]
            if not all(fits(self.shapes[name], form) for name in made):
                return False
            if not all(self._of_rows(name, inside, form) for name in op.refs()):
                return False
        return True

    def _has_room(self, group: _KernelGroup, form: Form) -> bool:
        """Whether a program has enough registers for the long rows that it holds."""
        if not is_long(form):
            return True
        steps = self._spelled(group.members)
        shapes = {value.name: value.type.layout.local_shape(self.sizes) for step in steps for value in step.results}
        return fits_registers(steps, group.makes, form, {**self.shapes, **shapes}, self._behind_views)

    def _of_rows(self, name: str, inside: Set[str], form: Form) -> bool:
        """Whether an operand lies in the rows that a group iterates over.

        Inside the group, views are only allowed on values with one number for each row: expands, or reshapes that
        insert or drop dimensions of size 1.
        """
        if name in inside:
            return name not in self.columns
        index = self.makers.get(name)
        if index is None or inside.isdisjoint(self._view_roots(index)):
            return True
        op, shape = self.ops[index], self.shapes[name]
        if op.name == "expand" and shape == form.shape:
            (name,) = op.refs()
            shape = self.shapes[name]
        return shape == form.statistic and self._is_statistic(name, inside, form)

    def _is_statistic(self, name: str, inside: Set[str], form: Form) -> bool:
        """Whether a value inside the group has one number for each row, up to dimensions of size 1."""
        if name in inside:
            return self.shapes[name] == form.statistic and name not in self.columns
        op = self.ops[self.makers[name]] if name in self.makers else None
        if (
            op is None
            or op.name != "reshape"
            or _nontrivial_dims(self.shapes[name]) != _nontrivial_dims(form.statistic)
        ):
            return False
        return self._is_statistic(next(op.refs()), inside, form)

    def _convex(self, a: int, b: int) -> bool:
        """Whether no outside operation depends on one of two groups while the other depends on it."""
        return not any(self._reaches(start, goal) for start, goal in ((a, b), (b, a)))

    def _reaches(self, start: int, goal: int) -> bool:
        """Whether a path leads from `start` to `goal` through at least one other operation or group."""
        todo = [key for key in self._readers_of(start) if key != goal]
        seen = set(todo)
        while todo:
            for key in self._readers_of(todo.pop()):
                if key == goal:
                    return True
                if key not in seen and key != start:
                    seen.add(key)
                    todo.append(key)
        return False

    def _readers_of(self, key: int) -> set[int]:
        """The operations and groups that read this one's results."""
        makes = self.groups[key].makes if key in self.groups else {value.name for value in self.ops[key].results}
        return {self.place[index] for name in makes for index in self.readers.get(name, ())} - {key}

    def ordered(self) -> tuple[Op, ...]:
        """The graph's operations, with each group as one fused operation right after its last operand."""
        tails = {key: self._tail(group) for key, group in self.groups.items()}
        several = {key: group for key, group in self.groups.items() if self._is_kernel(group, tails[key])}
        joins = self._joins(several, tails)
        units: dict[int, Op] = {
            key: self._bracket(group, tails[key], joins.get(key, ())) for key, group in several.items()
        }
        inside = {
            index for key, group in several.items() for index in (*group.members, *tails[key], *joins.get(key, ()))
        }
        units.update((index, op) for index, op in enumerate(self.ops) if index not in inside)
        units.update(
            (key, table_gradient_kernel(op, self.shapes)) for key, op in units.items() if op.name in kernels.TABLES
        )
        last = {key: max(several[key].members) if key in several else key for key in units}
        made = {value.name: key for key, op in units.items() for value in op.results}
        found: list[Op] = []
        done: set[int] = set()

        def emit(key: int) -> None:
            if key in done:
                return
            done.add(key)
            for name in units[key].refs():
                if name in made:
                    emit(made[name])
            found.append(units[key])

        for key in sorted(units, key=lambda key: last[key]):
            emit(key)
        # Views and constants inside kernels are no longer read outside.
        return needed(found, self.kept, removable=lambda op: kernels.kind(op) in ("view", "constant"))

    def _is_kernel(self, group: _KernelGroup, tail: Collection[int]) -> bool:
        """Whether the group becomes a kernel. Halves of a norm's derivative only exist in kernels, even without
        fuel.
        """
        first = self.ops[min(group.members)]
        if any(self.ops[index].name in HALVES for index in group.members):
            return True
        return bool(tail or self._is_worth(group)) and fuel.may_rewrite("kernel", first.source)

    def _is_worth(self, group: _KernelGroup) -> bool:
        """Whether a kernel pays: several operations, or one that PyTorch computes in several."""
        if len(group.members) > 1:
            return True
        (index,) = group.members
        made = (self.makers.get(name) for name in self.ops[index].refs())
        if any(maker is not None and self.ops[maker].name == "drawn" for maker in made):
            return True
        alone = group.form is not None and (group.form.whole or self.ops[index].name in _WORTH)
        return alone and self.kinds[index] == "composite"

    def _tail(self, group: _KernelGroup) -> tuple[int, ...]:
        """The permutation and reshape that are a result's only readers: the kernel then writes in their order."""
        name, found = next(iter(group.makes), ""), list[int]()
        for kind in ("permute", "reshape"):
            readers = [index for index, op in enumerate(self.ops) if name in op.refs()]
            free = group.form is None and name not in self.ragged
            only = len(group.makes) == 1 and name not in self.kept and len(readers) == 1 and free
            if not only or self.ops[readers[0]].name != kind:
                return ()
            found.append(readers[0])
            name = self.ops[readers[0]].result.name
        # Another kernel includes these views, so their operand must be in memory.
        return (
            ()
            if any(kind for op, kind in zip(self.ops, self.kinds, strict=True) if name in op.refs())
            else tuple(found)
        )

    def _joins(self, several: Mapping[int, _KernelGroup], tails: Mapping[int, Collection[int]]) -> dict[int, list[int]]:
        """For each kernel the joins of results that no other operation outside reads: it writes these side by side."""
        readers: dict[str, set[int]] = {}
        for index, op in enumerate(self.ops):
            for name in op.refs():
                readers.setdefault(name, set()).add(index)
        found: dict[int, list[int]] = {}
        for index, op in enumerate(self.ops):
            if op.name != "cat" or self.kinds[index] != "view":
                continue
            names, dim = kernels.cat_operands(op)
            keys = {self.place[self.makers[name]] if name in self.makers else -1 for name in names}
            key = next(iter(keys))
            if len(keys) > 1 or key not in several or tails[key]:
                continue
            group = several[key]
            alone = all(readers[name] - group.members == {index} and name not in self.kept for name in names)
            alike = len({*names}) == len(names) and len({self.shapes[name] for name in names}) == 1
            # Another kernel would read the parts themselves, as it reads through views.
            read = any(self.place[reader] in several for reader in self._readers_through_views(index, readers))
            fits = alone and alike and not read and self._is_beside(names[0], dim, group.form)
            if fits and fuel.may_rewrite("results side by side", op.source):
                found.setdefault(key, []).append(index)
        return found

    def _readers_through_views(self, view: int, readers: Mapping[str, Set[int]]) -> Iterator[int]:
        """The operations that read a view, directly or through further views."""
        for index in readers.get(self.ops[view].results[0].name, ()):
            if self.kinds[index] == "view":
                yield from self._readers_through_views(index, readers)
            else:
                yield index

    def _is_beside(self, name: str, dim: int, form: Form | None) -> bool:
        """Whether a kernel of this form can write equal parts of this shape side by side along a dimension."""
        shape = self.shapes[name]
        if dim % len(shape) == 0 and name in self.ragged:
            return False
        if form is None:
            return True
        return shape == form.shape != form.statistic and math.prod(shape[dim:]) == math.prod(form.column)

    def _bracket(self, group: _KernelGroup, tail: Collection[int] = (), joins: Collection[int] = ()) -> Op:
        """A group as one fused operation, with the views of its operands, `tail`, and the joins of its results."""
        chosen = {*group.members, *tail, *joins}
        todo = [name for index in group.members for name in self.ops[index].refs()]
        while todo:
            index = self.makers.get(todo.pop())
            if index is not None and index not in chosen and self.kinds[index] in ("view", "constant"):
                chosen.add(index)
                todo.extend(self.ops[index].refs())
        body = self._spelled(chosen)
        made = {value.name for op in body for value in op.results}
        reads = dict.fromkeys(name for op in body for name in op.refs() if name not in made)
        makes = {self.ops[max(tail)].result.name} if tail else group.makes
        for index in joins:
            makes = makes - {*self.ops[index].refs()} | {self.ops[index].result.name}
        results = tuple(value for index in sorted(chosen) for value in self.ops[index].results if value.name in makes)
        source = self.ops[max(group.members)].source
        words = (("kernel", stem([self.ops[index] for index in sorted(group.members)], self.rotations)),)
        along = (("along", group.form.along),) if group.form else ()
        # The argument whose rows the kernel counts.
        rows = tuple((RAGGED, place) for place, name in enumerate(reads) if name in self.ragged)[:1]
        return Op(
            name="fused",
            args=tuple(map(Ref, reads)),
            attrs=(*words, *along, *rows),
            results=results,
            source=source,
            body=body,
        )

    def _spelled(self, chosen: Collection[int]) -> tuple[Op, ...]:
        """Operations as kernels spell them."""
        taken = set(self.shapes)
        return tuple(
            step for index in sorted(chosen) for step in spelled_out(self.ops[index], self.types, self.sizes, taken)
        )


def _nontrivial_dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size > 1)


def table_gradient_kernel(op: Op, shapes: Mapping[str, tuple[int, ...]]) -> Op:
    """The gradient of a table as a separate kernel, which sorts the indices."""
    grad, ids, *more = op.args
    scaled = op.name == "embedding_dense_backward" and len(more) > 2 and more[2]
    fits = not scaled and SPARSE not in dict(op.attrs)
    fits = fits and all(isinstance(arg, Ref) and 0 not in shapes[arg.name] for arg in (grad, ids))
    if not fits or not fuel.may_rewrite("kernel", op.source):
        return op
    return Op(
        name="fused",
        args=(grad, ids),
        attrs=(("kernel", "embedding_grad"),),
        results=op.results,
        source=op.source,
        body=(op,),
    )
