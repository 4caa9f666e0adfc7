"""Rows that masks select stay in their places; loops over experts become products with the matrices of experts.

    eq          = eq(getitem_1, 0)                           # bool[64, 2]
    selected    = selected(eq, 0)                            # i64[128]
    selected_1  = selected(eq, 1)                            # i64[128]
    index       = index(reshape, (selected,))                # f32[128, 16]
    …
    matmul_1    = matmul(silu, select_1)                     # f32[128, 16]
    index_1     = index(unsqueeze, (selected, selected_1))   # f32[128, 1]
    mul         = mul(matmul_1, index_1)                     # f32[128, 16]
    index_add   = index_add(zeros_like, 0, selected, mul)    # f32[64, 16]
    …
    index_add_3 = index_add(index_add_2, 0, selected_6, mul_3)
  ->
    experts     = reshape(getitem_1, (128,))                 # i64[128]
    …
    matmul_1_…  = expert_matmul(silu_…, experts, …)          # f32[128, 16]
    mul_…       = mul(matmul_1_…, …)                         # f32[128, 16]
    …spread     = reshape(mul_…, (64, 2, 16))                # f32[64, 2, 16]
    …sum        = sum(…spread, (1,), False)                  # f32[64, 16]
    index_add_3 = add(zeros_like, …sum)                      # f32[64, 16]

The trace keeps every row of a selection. Where a chain of writes is equal for every expert, `loops` computes each row
once, with the weights of its expert. Elsewhere every row is computed, and rows that the mask leaves out are not written
back. An operation that mixes rows is refused: it would need their number. Random numbers are drawn for all rows, by
place; a single device draws them for the selected rows, by order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc.errors import untraced
from partc.ir.operations import RANDOM
from partc.ir.program import SELECTED, Arg, DTypeArg, Graph, Op, Program, Ref, Region, TensorType
from partc.passes.route.loops import without_loops
from partc.passes.route.rows import RowWriter, dims_of_rows, names_of
from partc.passes.route.writes import Distinct, write_of

_WRITES = frozenset({"index_add", "index_put"})
_SPREAD = frozenset({"reshape", "expand", "permute"})
_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})
_IN_RANGE = _SPREAD | {"to", "floor_divide", "remainder"}  # results for rows outside the mask stay in range


def route(program: Program) -> Program:
    """Rewrite the selections of every region. Raises PartcError P0206 for operations that mix selected rows."""
    if not any(op.name == SELECTED for region in program.regions for op in region.forward.ops):
        return program
    routed = [_routed(region) for region in program.regions]
    draws = any(draws for _, draws in routed)
    return replace(program, regions=tuple(region for region, _ in routed), draws_for_rows=draws)


def _routed(region: Region) -> tuple[Region, bool]:
    """The rewritten region, and whether it draws random numbers for rows that masks select."""
    region = replace(region, forward=_merged(region.forward))
    forward, draws = without_loops(region)
    region = replace(region, forward=forward)
    selections = _Selections(
        RowWriter(types=dict(region.types(region.forward)), taken=_used_names(region)), forward.makers(), draws=draws
    )
    for op in region.forward.ops:
        selections.take(op)
    graph = Graph(inputs=region.forward.inputs, ops=tuple(selections.writer.ops), outputs=region.forward.outputs)
    return replace(region, forward=graph.without_dead()), selections.draws


def _used_names(region: Region) -> set[str]:
    return {*region.forward.definitions(), *(value.name for value in region.params)}


@dataclass(frozen=True, slots=True)
class _SelectedPlace:
    mask: str
    dim: int


@dataclass(slots=True)
class _Selections:
    """The values that hold rows of selections: the mask of each, and the dimension of the rows."""

    writer: RowWriter
    makers: Mapping[str, Op]
    indices: dict[str, _SelectedPlace] = field(default_factory=dict)
    rows: dict[str, tuple[str, int]] = field(default_factory=dict)
    draws: bool = False  # random numbers for rows
    read: set[str] = field(default_factory=set)  # places, and rows with harmless numbers outside their mask
    constants: set[str] = field(default_factory=set)  # tensors filled with one number
    zeros: set[str] = field(default_factory=set)
    same_mask: dict[str, str] = field(default_factory=dict)  # reshaped or converted mask -> the original mask
    outer: dict[str, str] = field(default_factory=dict)  # mask over selected rows -> the mask that selects these

    def take(self, op: Op) -> None:
        w = self.writer
        w.source = op.source
        if op.name == SELECTED:
            self._place(op)
        elif (op.name == "index" and self._read(op)) or (op.name in _WRITES and self._written(op)) or self._added(op):
            return
        elif any(name in self.rows for name in op.refs()):
            mask = self._filled(op)
            if mask is None:
                self._row_by_row(op)
                return
            w.keep(op)
            if self._is_zero(op.args[2]):
                self.outer[op.result.name] = mask
        else:
            w.keep(op)
            first = next(op.refs(), None)
            if first is not None and (op.name == "reshape" or (op.name == "ne" and op.args[1] == 0)):
                self.same_mask[op.result.name] = self.same_mask.get(first, first)
            same = first if op.name in _SPREAD else None  # the operand has the same number everywhere
            if op.name == "full" or same in self.constants:
                self.constants.add(op.result.name)
                if same in self.zeros or (same is None and op.args[1] == 0):
                    self.zeros.add(op.result.name)

    def _place(self, op: Op) -> None:
        """Write `selected(mask, dim)` as the place of every element of the mask along the dimension.

        Of a mask over rows that another mask selects, the first place is the number of the selected row.
        """
        (mask,), dim, made = op.refs(), op.args[1], op.result.name
        assert isinstance(dim, int)
        w, shape, count = self.writer, self.writer.shape(mask), op.result.type.shape[0]
        outer = self.outer.get(mask)
        if outer is not None and dim == 0:
            hit = w.add("ne", (Ref(w.reshape(outer, shape[:1], f"{made}_rows")), 0), shape[:1], "bool", f"{made}_hit")
            hits = w.add("to", (Ref(hit), DTypeArg("i64")), shape[:1], "i64", f"{made}_hits")
            counted = w.add("cumsum", (Ref(hits), 0), shape[:1], "i64", f"{made}_count")
            numbers = w.add("sub", (Ref(counted), 1), shape[:1], "i64", f"{made}_number")
            wide = w.reshape(numbers, (shape[0], *(1 for _ in shape[1:])), f"{made}_wide")
            w.define("reshape", (Ref(w.expand(wide, shape, f"{made}_each")), (count,)), (count,), "i64", made)
        else:
            behind = math.prod(shape[dim + 1 :])
            numbers = w.add("arange", (count,), (count,), "i64", f"{made}_all", dtype=DTypeArg("i64"))
            blocks = w.add("floor_divide", (Ref(numbers), behind), (count,), "i64", f"{made}_block")
            w.define("remainder", (Ref(blocks), shape[dim]), (count,), "i64", made)
        self.indices[made] = _SelectedPlace(mask, dim)
        self.rows[made] = self._original(mask), 0
        self.read.add(made)

    def _original(self, mask: str) -> str:
        """The mask of which this one is a reshaped or converted form: both select the same rows, in the same order."""
        return self.same_mask.get(mask, mask)

    def _selected(self, names: list[str | None]) -> tuple[str, list[int], list[int]] | None:
        """For an index of selected places: their mask, the indexed dimensions, and the mask's dimensions along which
        they run.
        """
        places = [place for place, name in enumerate(names) if name is not None]
        found = [self.indices.get(name) for name in names if name is not None]
        known = [index for index in found if index is not None]
        if not places or len(known) < len(found) or len({index.mask for index in known}) > 1:
            return None
        return known[0].mask, places, [index.dim for index in known]

    def _read(self, op: Op) -> bool:
        x, indices = op.args
        if not isinstance(x, Ref) or not isinstance(indices, tuple):
            return False
        found = self._selected(names_of(indices))
        if found is None or not self._fits(x.name, *found):
            return False
        mask, places, dims = found
        made = self.writer.rows(x.name, places, dims, self.writer.shape(mask), f"{op.result.name}_rows")
        if made is None:
            return False
        value, dim = made
        shape, dtype = op.result.type.shape, op.result.type.dtype
        # Rows outside the mask may hold numbers that are invalid in a lookup, logarithm or quotient.
        harmless = 1 if op.result.type.differentiable else 0
        chosen = self.writer.reshape(mask, (shape[dim],), f"{op.result.name}_mask")
        value = self.writer.only(value, dim, chosen, op.result.name, harmless)
        self.writer.define("reshape", (Ref(value), shape), shape, dtype, op.result.name)
        self.rows[op.result.name] = self._original(mask), dim
        self.read.add(op.result.name)
        return True

    def _fits(self, x: str, mask: str, places: list[int], dims: list[int]) -> bool:
        """Whether x has all rows, or those rows over which the mask runs."""
        held, outer = self.rows.get(x), self.outer.get(mask)
        return held is None or (held == (outer, 0) and (0, 0) in zip(places, dims, strict=True))

    def _written(self, op: Op) -> bool:
        """Write the selected rows back, by addition or assignment; False for other operations."""
        w, write = self.writer, write_of(op, self.makers)
        found = None if write is None else self._selected([*write.places])
        if write is None or write.held or found is None:
            return False
        mask, places, dims = found
        others = [dim for dim in range(len(w.shape(mask))) if dim not in dims]
        once = Distinct(self.makers, w.types).at_most_once(mask, others)
        rows = self._original(mask), 0
        if write.sums and (not once or self.rows.get(write.rows) != rows):  # y[mask] += 1 row for all
            write = replace(write, rows=write.sums, adds=False)
        if self.rows.get(write.rows) != rows:
            return False
        acc, y = Ref(write.into), Ref(write.rows)
        if not self._fits(write.into, mask, places, dims):
            return False
        whole, rest, made = w.shape(mask), w.shape(y.name)[1:], op.result.name
        if w.shape(acc.name) != (*(whole[dim] for dim in dims), *rest):
            return False
        dtype = op.result.type.dtype
        if dims[0] == 0 and mask in self.outer:
            self.rows[made] = self.outer[mask], 0

        def spread(rows: str, rest: tuple[int, ...]) -> str:
            """The rows, summed into the shape of the tensor to which they are written."""
            x = w.reshape(rows, (*whole, *rest), f"{made}_spread")
            if others:
                left = [size for dim, size in enumerate(w.shape(x)) if dim not in others]
                x = w.add("sum", (Ref(x), tuple(others), False), left, w.types[x].dtype, f"{made}_sum")
            kept = [dim for dim in range(len(whole)) if dim in dims]
            order = [kept.index(dim) for dim in dims]
            return w.permute(x, (*order, *range(len(dims), len(dims) + len(rest))), f"{made}_placed")

        chosen = mask
        if not write.adds and not once:
            if w.types[y.name].differentiable:  # torch passes the gradient of a place to all rows written to it
                raise untraced(
                    "a mask may select several rows for one place, and an assignment keeps one of them",
                    help="add the rows with index_add_(0, places, rows), or select by distinct numbers, such as those "
                    "of topk",
                    source=op.source,
                )
            chosen = self._last(mask, others, made)
        kept = spread(w.only(y.name, 0, w.reshape(chosen, (w.shape(y.name)[0],), f"{made}_mask"), f"{made}_kept"), rest)
        if write.adds:
            w.define("add", (acc, Ref(kept)), w.shape(acc.name), dtype, made)
            return True
        hit = w.add("ne", (Ref(mask), 0), whole, "bool", f"{made}_hit") if w.types[mask].dtype != "bool" else mask
        if len(dims) < len(whole):
            hit = w.add("to", (Ref(hit), DTypeArg("i64")), whole, "i64", f"{made}_hits")
        hit = spread(hit, ())
        if len(dims) < len(whole):
            hit = w.add("gt", (Ref(hit), 0), w.shape(hit), "bool", f"{made}_hit")
        hit = w.reshape(hit, (*w.shape(hit), *(1 for _ in rest)), f"{made}_hit")
        w.define("where", (Ref(hit), Ref(kept), acc), w.shape(acc.name), dtype, made)
        return True

    def _added(self, op: Op) -> bool:
        """Add selected rows at places that these rows hold, where the other rows add zero; False for other operations.

        Such places are those of an edge's target, in `out.index_add(0, target[mask], messages)`.
        """
        match op.name, op.args:
            case "index_add" | "scatter_add", (Ref(into), 0, Ref(place), Ref(rows)):
                places = [place]
            case "index_put", (Ref(into), tuple(indices), Ref(rows), True):
                places = [index.name for index in indices if isinstance(index, Ref)]
            case _:
                return False
        held = {self.rows.get(name) for name in (*places, rows)}
        (found,) = held if len(held) == 1 else (None,)
        if into in self.rows or found is None or found[1]:
            return False
        w, safe = self.writer, {}
        for name in (*places, rows):
            if name == rows or name not in self.read:
                chosen = w.reshape(found[0], (w.shape(name)[0],), f"{name}_mask")
                safe[name] = w.only(name, 0, chosen, f"{name}_kept")
        w.keep(op.with_operands(safe))
        return True

    def _last(self, mask: str, dims: Sequence[int], stem: str) -> str:
        """The elements of a mask without those that are followed by another one along these dimensions."""
        w, whole = self.writer, self.writer.shape(mask)
        count = math.prod(whole)
        numbers = w.add("arange", (1, count + 1), (count,), "i64", f"{stem}_order", dtype=DTypeArg("i64"))
        order = w.reshape(numbers, whole, f"{stem}_order")
        hit = w.add("ne", (Ref(mask), 0), whole, "bool", f"{stem}_hit") if w.types[mask].dtype != "bool" else mask
        hits = w.add("mul", (Ref(order), Ref(hit)), whole, "i64", f"{stem}_hits")
        wide = [1 if dim in dims else size for dim, size in enumerate(whole)]
        last = w.add("amax", (Ref(hits), tuple(dims), True), wide, "i64", f"{stem}_last")
        return w.add("eq", (Ref(order), Ref(last)), whole, "bool", f"{stem}_last")

    def _filled(self, op: Op) -> str | None:
        """The mask of an operation that fills the rows that are not selected with a number: where(mask, rows, 0)."""
        if op.name != "where" or len(op.args) != 3 or not isinstance(op.args[1], Ref):
            return None
        condition, rows, number = op.args
        assert isinstance(rows, Ref)
        found = self.rows.get(rows.name)
        is_number = isinstance(number, int | float) or (isinstance(number, Ref) and number.name in self.constants)
        if found is None or not is_number or not isinstance(condition, Ref):
            return None
        mask, dim = found
        wide = tuple(size if place == dim else 1 for place, size in enumerate(self.writer.shape(rows.name)))
        return mask if self._original(condition.name) == mask and self.writer.shape(condition.name) == wide else None

    def _is_zero(self, arg: Arg) -> bool:
        return arg == 0 or (isinstance(arg, Ref) and arg.name in self.zeros)

    def _in_range(self, op: Op) -> Op:
        """A lookup with the place 0 for the rows outside a mask, whose places may be beyond the table."""
        w, safe = self.writer, {}
        for name in op.refs() if op.name in _LOOKUPS else ():
            if name in self.rows and name not in self.read and not w.types[name].differentiable:
                mask, dim = self.rows[name]
                chosen = w.reshape(mask, (w.shape(name)[dim],), f"{name}_mask")
                safe[name] = w.only(name, dim, chosen, f"{name}_kept")
                self.rows[safe[name]] = mask, dim
        return op.with_operands(safe) if safe else op

    def _row_by_row(self, op: Op) -> None:
        op = self._in_range(op)
        held = [self.rows.get(name) for name in op.refs()]
        masks = {mask for found in held if found is not None for mask in (found[0],)}
        dims = None
        if len(masks) == 1:
            rows = [None if found is None else found[1] for found in held]
            dims = dims_of_rows(op, self.writer.types, rows, self.constants)
        if dims is None:
            raise untraced(
                f"{op.name} reads the rows that a mask selects other than row by row, and "
                "their number depends on the values of a tensor",
                help="keep all rows and mask those that do not count",
                source=op.source,
            )
        self.writer.keep(op)
        self.draws |= op.name in RANDOM
        mask = masks.pop()
        if op.name in _IN_RANGE and self.read.issuperset(op.refs()):
            self.read.update(value.name for value in op.results)
        self.rows.update((value.name, (mask, dim)) for value, dim in zip(op.results, dims, strict=True))


def _merged(graph: Graph) -> Graph:
    """Merge equal operations on integers and masks, which have no gradient, so that equal masks become one value.

    Equal operations with gradients stay apart, but count as equal where integers or masks are computed from them, as in
    `x[x[:, 0] > 0]` written twice. Columns of joined places, as in `mask.nonzero()[:, 0]`, become these places.
    """
    known: dict[object, Op] = {}
    joined: dict[str, tuple[list[str], int]] = {}  # matrix -> the vectors behind it, and the dimension of their numbers
    same: dict[str, str] = {}
    equal: dict[str, str] = {}  # value -> the first one that is equal
    shaped: dict[str, str] = {}  # result of a reshape -> the value before all reshapes
    types = graph.types()
    ops: list[Op] = []
    for op in graph.ops:
        op = op.with_operands(same)
        _take_columns(op, types, joined, shaped)
        if op.name == "reshape" and not op.result.type.differentiable:
            first = next(op.refs())
            base = shaped[op.result.name] = shaped.get(first, first)
            if types.get(base) == op.result.type:
                same[op.result.name] = base
                continue
        if op.name == "detach" and not op.result.type.differentiable:
            same[op.result.name] = next(op.refs())
            continue
        if op.name not in RANDOM and op.name != "incoming_gradient" and op.results:
            found = known.setdefault(op.renamed(equal).content, op)
            if found is not op:
                pairs = {new.name: old.name for new, old in zip(op.results, found.results, strict=True)}
                equal.update(pairs)
                if not any(value.type.differentiable for value in op.results):
                    same.update(pairs)
                    continue
        ops.append(op)
    return graph.rewritten(ops, same)


def _take_columns(
    op: Op,
    types: Mapping[str, TensorType],
    joined: dict[str, tuple[list[str], int]],
    shaped: dict[str, str],
) -> None:
    """Note a matrix of joined vectors, and a column of one as a reshape of its vector."""
    match op.name, op.args:
        case "cat", (tuple(parts), int(dim)) if len(op.result.type.shape) == 2:
            names = [part.name for part in parts if isinstance(part, Ref)]
            if all(name in types and types[name].shape[dim : dim + 1] == (1,) for name in names):
                joined[op.result.name] = [shaped.get(name, name) for name in names], dim
        case "permute", (Ref(name), (1, 0)) if name in joined:
            vectors, dim = joined[name]
            joined[op.result.name] = vectors, 1 - dim
        case "slice", (Ref(name), int(dim), int(start), int(end), 1) if name in joined and end == start + 1:
            if dim == joined[name][1]:
                shaped[op.result.name] = joined[name][0][start]
        case "split", (Ref(name), _, int(dim)) if name in joined and len(op.results) == len(joined[name][0]):
            if dim == joined[name][1]:
                shaped.update(zip((value.name for value in op.results), joined[name][0], strict=True))
