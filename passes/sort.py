"""Sort rows by expert once around products with experts, instead of within each of them.

    mixer_2         = expert_matmul(second_4, mixer_chosen_2, mixer.up)                # f32[128, 24]
    mixer_made      = silu(mixer_2)                                                    # f32[128, 24]
    mixer_expert…   = expert_matmul(mixer_made, mixer_chosen_2, mixer.down)            # f32[128, 16]
  ->
    order, places, own = expert_order(mixer_chosen_2, 4)
    second_4_sorted    = permute_rows(second_4, order, places)                         # f32[128, 16]
    mixer_2            = expert_matmul(second_4_sorted, own, mixer.up, ordered=True)   # f32[128, 24]
    mixer_made         = silu(mixer_2)                                                 # f32[128, 24]
    mixer_expert…      = expert_matmul(mixer_made, own, mixer.down, ordered=True)      # f32[128, 16]
    mixer_expert…      = permute_rows(mixer_expert…, places, order)                    # f32[128, 16]

From the first product to the last, every operation computes each row by itself, or is a collective along another
dimension between ranks with the same rows. Each rank sorts its own rows. Rows that travelled over ep are in this order
already. Rows whose number may be beyond the experts, as beyond a capacity, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc import fuel
from partc.ir.collectives import MOVING
from partc.ir.expert_products import ExpertMatmul, ExpertRows
from partc.ir.naming import unique
from partc.ir.operations import RANDOM
from partc.ir.program import Op, Program, Ref, Region, TensorType, Value
from partc.rules import resolve
from partc.rules.integer_bounds import IntegerBounds, bounds_of_graph


def sort(program: Program) -> Program:
    """Rewrite the forward graph of every region; backward graphs are derived from it later."""
    return replace(program, regions=tuple(map(_region, program.regions)))


def _region(region: Region) -> Region:
    types = region.types(region.forward)
    products: dict[str, list[Op]] = {}
    for op in region.forward.ops:
        if ExpertMatmul.of(op) and (chosen := _chosen(op)) is not None:
            products.setdefault(chosen, []).append(op)
    bounds = bounds_of_graph(region.forward, types) if products else {}
    rows = _Rows(region, types)
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
    experts: dict[str, int] = field(default_factory=dict)  # a value with the expert of each row -> number of experts

    def sorted(self) -> Iterator[Op]:
        """Yield the region's operations, those between products on sorted rows."""
        ops = self.region.forward.ops
        between = {chosen: self._between(chosen) for chosen in self.experts}
        inside = {index: chosen for chosen, found in between.items() for index in found}
        readers: dict[str, list[int]] = {}
        for index, op in enumerate(ops):
            for name in op.refs():
                readers.setdefault(name, []).append(index)
        taken = {*self.types}
        orders: dict[str, tuple[str, str, str]] = {}
        here: dict[tuple[str, str], str] = {}  # (value with the experts, value) -> the value in their order
        for index, op in enumerate(ops):
            chosen = inside.get(index)
            if chosen is None:
                yield op
                continue
            if chosen not in orders:
                ordering = self._ordering(chosen, op, taken)
                orders[chosen] = tuple(value.name for value in ordering.results)  # type: ignore[assignment]
                yield ordering
            order, places, own = orders[chosen]
            operands: list[str] = []
            for name in op.refs():
                if name == chosen:
                    operands.append(own)
                elif not self._has_rows(op, name, chosen):
                    operands.append(name)
                else:
                    if (chosen, name) not in here:
                        value = Value(name=unique(f"{name}_sorted", taken), type=self.types[name])
                        here[chosen, name] = value.name
                        yield _permuted(name, value, order, places, op)
                    operands.append(here[chosen, name])
            outside = {
                value.name
                for value in op.results
                if value.name in self.region.forward.outputs
                or any(inside.get(reader) != chosen for reader in readers.get(value.name, ()))
            }
            named = {name: unique(f"{name}_sorted", taken) if name in outside else name for name in _results(op)}
            here.update(((chosen, name), new) for name, new in named.items())
            attrs = (("ordered", True), *op.attrs) if ExpertMatmul.of(op) else op.attrs
            results = tuple(replace(value, name=named[value.name]) for value in op.results)
            yield replace(op.reading(operands), results=results, attrs=attrs)
            for value in op.results:
                if value.name in outside:
                    yield _permuted(named[value.name], value, places, order, op)

    def _ordering(self, chosen: str, op: Op, taken: set[str]) -> Op:
        type = self.types[chosen]
        results = tuple(Value(name=unique(word, taken), type=type) for word in ("order", "places", "own"))
        return Op(name="expert_order", args=(Ref(chosen), self.experts[chosen]), results=results, source=op.source)

    def _between(self, chosen: str) -> frozenset[int]:
        """The products of these rows, and the operations that may be computed on sorted rows between two of them."""
        ops = self.region.forward.ops
        products = {index for index, op in enumerate(ops) if _chosen(op) == chosen}
        first, last = min(products), max(products)
        made = {name for index in products for name in _results(ops[index])}
        behind: list[int] = []
        for index in range(first, len(ops)):
            op = ops[index]
            rows = [name for name in op.refs() if name in made]
            if index in products or not rows or not self._by_row(op, chosen):
                continue
            # Behind the last product, the addition of its bias reads two sorted values for one.
            if index < last or len({*rows}) > 1:
                behind.append(index)
                made.update(_results(op))
        wanted = {name for index in products for name in ops[index].refs()}
        found = {*products}
        for index in reversed(behind):
            rows = [name for name in ops[index].refs() if name in made]
            if index > last or len({*rows}) > 1 or not wanted.isdisjoint(_results(ops[index])):
                found.add(index)
                wanted.update(ops[index].refs())
        return frozenset(found)

    def _by_row(self, op: Op, chosen: str) -> bool:
        """Whether an operation gives the same rows in any order of its rows."""
        if op.name in RANDOM:
            return False
        if op.name in MOVING:
            where = dict(op.attrs)
            same = where.get("axis") not in self.types[chosen].layout.sharded_axes
            return same and (op.name == "all_reduce" or where.get("dim", 0) != 0)
        row = self._row(op)
        return row is not None and all(value.type.layout.dims[0] == self._dim(chosen) for value in op.results)

    def _row(self, op: Op) -> str | None:
        """The factor of the rows: the first dimension of all results, and of the operands that have it."""
        rule = resolve(op, self.types)
        firsts = {dims[:1] for dims in rule.results} if rule is not None else set()
        if rule is None or len(firsts) != 1:
            return None
        (names,) = next(iter(firsts)) or ((),)
        if len(names) != 1 or rule.factor(names[0]).kind != "parallel":
            return None
        carried = [dims for dims in rule.operands if any(names[0] in dim for dim in dims)]
        return names[0] if all(dims[0] == names for dims in carried) else None

    def _has_rows(self, op: Op, name: str, chosen: str) -> bool:
        """Whether an operand of an operation on sorted rows has a row for each of them."""
        if op.name in MOVING:
            return True
        rule = resolve(op, self.types)
        assert rule is not None
        row = rule.results[0][0][0]
        return any(each == name and dims[:1] == ((row,),) for each, dims in zip(op.refs(), rule.operands, strict=True))

    def _dim(self, chosen: str) -> Sequence[object]:
        return self.types[chosen].layout.dims[0]


def _chosen(op: Op) -> str | None:
    """The value with the experts of a product's rows, unless they are sorted already."""
    product = ExpertMatmul.of(op) or ExpertRows.of(op)
    return None if product is None or dict(op.attrs).get("ordered") else product.chosen


def _results(op: Op) -> Iterator[str]:
    return (value.name for value in op.results)


def _permuted(name: str, value: Value, order: str, inverse: str, op: Op) -> Op:
    return Op(name="permute_rows", args=(Ref(name), Ref(order), Ref(inverse)), results=(value,), source=op.source)
