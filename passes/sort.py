"""Sort rows by expert once around a layer's expert products, instead of within each product.

    mixer           = expert_matmul(second_4, mixer_chosen_2, mixer.up)                # f32[128, 24]
    mixer_made      = silu(mixer)                                                      # f32[128, 24]
    mixer_expert…   = expert_matmul(mixer_made, mixer_chosen_2, mixer.down)            # f32[128, 16]
  ->
    order, places, own = expert_order(mixer_chosen_2, 4)
    second_4_sorted    = permute_rows(second_4, order, places)                         # f32[128, 16]
    mixer              = expert_matmul(second_4_sorted, own, mixer.up, ordered=True)   # f32[128, 24]
    mixer_made         = silu(mixer)                                                   # f32[128, 24]
    mixer_expert…      = expert_matmul(mixer_made, own, mixer.down, ordered=True)      # f32[128, 16]
    mixer_expert…      = permute_rows(mixer_expert…, places, order)                    # f32[128, 16]

Only operations that treat each row independently, and collectives along other dimensions between ranks with the same
rows, work on sorted rows. Lookups by expert, such as those of biases, are made in the sorted order. Each rank sorts its
own rows. Rows exchanged over ep arrive sorted. Rows are left unsorted if a row's expert number may be out of range, as
it is for rows beyond a capacity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from partc import fuel
from partc.ir.collectives import MOVING
from partc.ir.expert_products import ExpertMatmul, ExpertRows
from partc.ir.layout import Sizes
from partc.ir.naming import unique
from partc.ir.operations import RANDOM
from partc.ir.program import Op, Program, Ref, Region, TensorType, Value
from partc.rules import OpRule, resolve_lowered
from partc.rules.integer_bounds import IntegerBounds, bounds_of_graph


def sort(program: Program) -> Program:
    """Rewrite the forward graph of every region; backward graphs are derived from it later."""
    return replace(program, regions=tuple(_region(region, program.sizes) for region in program.regions))


def _region(region: Region, sizes: Sizes) -> Region:
    types = region.types(region.forward)
    products: dict[str, list[Op]] = {}
    for op in region.forward.ops:
        if (product := _product(op)) is not None:
            products.setdefault(product.chosen, []).append(op)
    bounds = bounds_of_graph(region.forward, types) if products else {}
    rows = _Rows(region, types, sizes)
    for chosen, ops in products.items():
        experts = min(types[[*op.refs()][-1]].shape[0] for op in ops)
        valid = chosen in bounds and bounds[chosen] in IntegerBounds(0, experts - 1)
        if valid and fuel.may_rewrite("sorted rows", ops[0].source):
            rows.experts[chosen] = experts
    return replace(region, forward=replace(region.forward, ops=tuple(rows.sorted()))) if rows.experts else region


@dataclass(slots=True)
class _Rows:
    """The rows of a region that are sorted, by the value that has their experts."""

    region: Region
    types: Mapping[str, TensorType]
    sizes: Sizes
    experts: dict[str, int] = field(default_factory=dict)  # a value with the expert of each row -> number of experts

    def sorted(self) -> Iterator[Op]:
        """Yield the region's operations, those between products on sorted rows."""
        graph = self.region.forward
        ops = [*map(self._lookup, graph.ops)]
        inside = {index: chosen for chosen in self.experts for index in self._between(ops, chosen)}
        # For each operation, its operands, each with the value whose experts sort it; None if it is unsorted.
        operands = [self._operands(op, inside.get(index)) for index, op in enumerate(ops)]
        wanted: dict[str, set[str | None]] = {name: {None} for name in graph.outputs}
        for name, by in chain(*operands):
            wanted.setdefault(name, set()).add(by)
        taken = {*self.types}
        orders: dict[str, tuple[str, str, str]] = {}
        here: dict[tuple[str, str], str] = {}  # (value, value with the experts) -> the value in their order
        for index, op in enumerate(ops):
            chosen = inside.get(index)
            if chosen is None:
                yield graph.ops[index]
                continue
            if chosen not in orders:
                ordering = self._ordering(chosen, op, taken)
                orders[chosen] = tuple(value.name for value in ordering.results)  # type: ignore[assignment]
                here[chosen, chosen] = orders[chosen][2]
                yield ordering
            order, places, _ = orders[chosen]
            for name, by in operands[index]:
                if by is not None and (name, by) not in here:
                    value = Value(name=unique(f"{name}_sorted", taken), type=self.types[name])
                    here[name, by] = value.name
                    yield _permuted(name, value, order, places, op)
            outside = {name for name in _results(op) if wanted.get(name, set()) - {chosen}}
            named = {name: unique(f"{name}_sorted", taken) if name in outside else name for name in _results(op)}
            here.update(((name, chosen), new) for name, new in named.items())
            attrs = (("ordered", True), *op.attrs) if ExpertMatmul.of(op) else op.attrs
            results = tuple(replace(value, name=named[value.name]) for value in op.results)
            reads = [name if by is None else here[name, by] for name, by in operands[index]]
            yield replace(op.reading(reads), results=results, attrs=attrs)
            for value in op.results:
                if value.name in outside:
                    yield _permuted(named[value.name], value, places, order, op)

    def _lookup(self, op: Op) -> Op:
        """The lookup of each row's expert that `op` is, or `op` itself."""
        match op.name, op.args:
            case "index", (Ref(name=table), (Ref(name=chosen),)) if chosen in self.experts:
                return replace(op, name="expert_rows", args=(Ref(chosen), Ref(table)), choices=())
        return op

    def _operands(self, op: Op, chosen: str | None) -> tuple[tuple[str, str | None], ...]:
        """The operands of an operation, and the value by whose experts each is sorted."""
        rows = self._rows(op, chosen) if chosen is not None else None
        return tuple((name, chosen if rows and rows[place] else None) for place, name in enumerate(op.refs()))

    def _ordering(self, chosen: str, op: Op, taken: set[str]) -> Op:
        type = self.types[chosen]
        results = tuple(Value(name=unique(word, taken), type=type) for word in ("order", "places", "own"))
        return Op(name="expert_order", args=(Ref(chosen), self.experts[chosen]), results=results, source=op.source)

    def _between(self, ops: Sequence[Op], chosen: str) -> frozenset[int]:
        """The products of these rows, and the operations that may be computed on sorted rows between two of them."""
        products = {index for index, op in enumerate(ops) if (product := _product(op)) and product.chosen == chosen}
        last = max(products)
        made: dict[str, bool] = {}  # a value of sorted rows -> whether it depends on a product
        behind: dict[int, bool] = {}  # an operation on sorted rows -> whether it joins several, of which one does
        for index, op in enumerate(ops):
            lookup = ExpertRows.of(op)
            if index in products:
                made.update(dict.fromkeys(_results(op), True))
                continue
            if lookup is not None and lookup.chosen == chosen:
                behind[index] = False
                made.update(dict.fromkeys(_results(op), False))
                continue
            rows = self._rows(op, chosen) if any(name in made for name in op.refs()) else None
            read = {name for name, row in zip(op.refs(), rows or (), strict=False) if row and name in made}
            # Behind the last product, the addition of its bias reads two sorted values for one.
            if len(read) > 1 or (read and (index < last or len([*op.refs()]) == 1)):
                depends = any(made[name] for name in read)
                behind[index] = depends and len(read) > 1
                made.update(dict.fromkeys(_results(op), depends))
        wanted = {name for index in products for name in ops[index].refs()}
        found = {*products}
        for index in reversed(behind):
            if behind[index] or not wanted.isdisjoint(_results(ops[index])):
                found.add(index)
                wanted.update(ops[index].refs())
        return frozenset(found)

    def _rows(self, op: Op, chosen: str) -> tuple[bool, ...] | None:
        """For each operand, whether it has a row for each row of the results; None if the order of rows matters."""
        product = ExpertMatmul.of(op)
        if op.name in RANDOM or (product is not None and product.chosen != chosen):
            return None
        if op.name in MOVING:
            where = dict(op.attrs)
            same = where.get("axis") not in self.types[chosen].layout.sharded_axes
            return (True,) if same and (op.name == "all_reduce" or where.get("dim", 0) != 0) else None
        rule = self._rule(op)
        firsts = {dims[:1] for dims in rule.results} if rule is not None else set()
        if rule is None or len(firsts) != 1:
            return None
        (names,) = next(iter(firsts)) or ((),)
        if len(names) != 1 or rule.factor(names[0]).kind != "parallel":
            return None
        if any(value.type.layout.dims[0] != self.types[chosen].layout.dims[0] for value in op.results):
            return None
        rows = tuple(dims[:1] == (names,) for dims in rule.operands)
        among = any(names[0] in dim for dims, row in zip(rule.operands, rows, strict=True) for dim in dims[row:])
        return None if among else rows

    def _rule(self, op: Op) -> OpRule | None:
        """The rule of an operation for the sizes of a rank."""
        results = tuple(replace(value, type=value.type.local(self.sizes)) for value in op.results)
        return resolve_lowered(
            replace(op, results=results), {name: self.types[name].local(self.sizes) for name in op.refs()}
        )


def _product(op: Op) -> ExpertMatmul | None:
    """The product of rows that an operation computes, unless they are in order already."""
    return None if dict(op.attrs).get("ordered") else ExpertMatmul.of(op)


def _results(op: Op) -> Iterator[str]:
    return (value.name for value in op.results)


def _permuted(name: str, value: Value, order: str, inverse: str, op: Op) -> Op:
    return Op(name="permute_rows", args=(Ref(name), Ref(order), Ref(inverse)), results=(value,), source=op.source)
