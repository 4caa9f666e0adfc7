"""Cut experts over the axis ep: rows travel to the ranks of their experts, and back.

    param mixer.up: f32[4, 16, 24] vary(ep)
    param mixer.down: f32[4, 24, 16] vary(ep)
    mixer           = expert_matmul(second_4, mixer_chosen_2, mixer.up)         # f32[128@ep, 24]
    mixer_made      = silu(mixer)                                               # f32[128@ep, 24]
    mixer_expert…   = expert_matmul(mixer_made, mixer_chosen_2, mixer.down)     # f32[128@ep, 16]
  ->
    param mixer.up: f32[4@ep, 16, 24]
    param mixer.down: f32[4@ep, 24, 16]
    order, grouped, own, counts = route(mixer_chosen_2, 4, False, 0.0, axis="ep")
    second_4_here   = dispatch(second_4, order, grouped, counts, axis="ep")     # f32[128@ep, 16]
    mixer           = expert_matmul(second_4_here, own, mixer.up, groups=2)     # f32[128@ep, 24]
    mixer_made      = silu(mixer)                                               # f32[128@ep, 24]
    mixer_expert…   = expert_matmul(mixer_made, own, mixer.down, groups=2)      # f32[128@ep, 16]
    mixer_expert…   = combine(mixer_expert…, order, grouped, counts, axis="ep") # f32[128@ep, 16]

Outside, ep cuts the batch. From the first product by expert to the last, each row is computed by itself, so that it may
be on any rank. Between them a value's first dimension is `2@ep · 64@dp,mb`: the rows of each rank's experts. Their
number depends on the data; the layout has its mean. Rows come back to their places before those of a token are added,
so that the sums do not depend on ep. Scores that multiply rows between two products travel to them.

In a model without such products, ep cuts batched ones, whose operands both have a dimension for experts, as behind
one-hot dispatch or expert choice: `einsum("becd,edh->bech", (z, up))` has `b@ep` outside and `e@ep` here. `partition`
inserts the all-to-alls.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from partc.errors import PartcError
from partc.ir.capacity import Capacity
from partc.ir.expert_products import ExpertMatmul, ExpertRows
from partc.ir.layout import Layout, Shard, Sizes, SubDim
from partc.ir.naming import unique
from partc.ir.operations import RANDOM
from partc.ir.program import Choice, Op, Parameter, Program, Ref, Region, TensorType, Value
from partc.passes.tables.lookups import COLUMNS, ROWS, find
from partc.rules import OpRule, placements, resolve
from partc.rules.rule import argument, integers
from partc.sharding.choices import axis_order, choice_on, layouts, weight_axes
from partc.sharding.pins import Pin

_GROUPS, _ROWS = "g", "s"  # factors in the rule of expert_matmul


def experts(
    program: Program,
    *,
    expert_axes: tuple[str, ...] = (),
    pins: Sequence[Pin] = (),
    expert_capacity: Capacity | None = None,
    expert_rows: float | None = None,
) -> Program:
    """Cut all experts. Raises PartcError P0107 if there are none or some cannot be cut, and P0302.

    With several axes, rows travel over one after the other. With `expert_capacity`, rows without an expert stay. The
    memory account assumes `expert_rows` times the mean number of rows.
    """
    how = (expert_capacity is not None, expert_rows or 0.0)
    given = program
    axes = [axis for axis in axis_order(program.sizes) if axis in expert_axes]
    for number, axis in enumerate(axes):
        program = _cut(program, axis, frozenset(axes[:number]), how)
    for before, after in zip(given.parameters, program.parameters, strict=True):
        if before.type != after.type:
            _check_pins(after, axes, pins)
    return program


def _check_pins(weight: Parameter, axes: Sequence[str], pins: Sequence[Pin]) -> None:
    """Check that pins over the experts' axes cut a weight of experts by experts. Raises PartcError P0302."""
    for pin in pins:
        named = {axis for entries in pin.dims for _, found in entries for axis in found}
        for axis in named.intersection(axes) if pin.matches(weight.name) else ():
            if pin.placement(axis) != weight.type.layout.placement(axis):
                raise PartcError(
                    "P0302",
                    f"--shard pins {weight.name} {weight.type.shape} to {pin.text}, and {axis} cuts it by experts",
                    help=f"write @{axis} at its first dimension, or take {axis} out of --experts",
                )


def _cut(program: Program, axis: str, earlier: frozenset[str], how: tuple[bool, float]) -> Program:
    """Cut all experts over an axis, after the axes `earlier` have cut them into parts."""
    tables = axis not in weight_axes(program.sizes)  # tables may be cut instead of experts
    held = tables and any(axis in item.type.layout.sharded_axes for item in program.parameters)
    regions = [_Experts(region, axis, earlier, program, how) for region in program.regions]
    if not any(found.weights for found in regions) and not held:
        regions = [_BatchedExperts(region, axis, earlier, program, how) for region in program.regions]
    params = {found.region.name: [found.weights.get(value.name) for value in found.region.params] for found in regions}
    slots: dict[str, set[Layout | None]] = {item.name: set() for item in program.parameters}
    for call in program.calls:
        for name, layout in zip(call.params, params[call.region], strict=True):
            slots[name].add(layout)
    for name, found_cut in slots.items():
        if len(found_cut) > 1:
            raise PartcError(
                "P0107",
                f"{axis} cannot cut the experts of {name}, which other calls read in another way",
                help=f"leave {axis} out of the mesh",
            )
    if not any(found.weights for found in regions) and not held:
        pin = _table_pin(program, axis) if tables else ""
        raise PartcError(
            "P0107",
            f"no experts in a form that {axis}={program.sizes[axis]} can cut were found in the model",
            help="docs/experts.md names these forms; "
            + (f"--shard '{pin}' cuts an embedding table; " if pin else "")
            + "without experts, give the ranks to dp",
        )
    parameters = tuple(
        replace(item, type=replace(item.type, layout=layout))
        for item in program.parameters
        for layout in (next(iter(slots[item.name]), None) or item.type.layout,)
    )
    return replace(program, parameters=parameters, regions=tuple(found.cut() for found in regions))


def _table_pin(program: Program, axis: str) -> str:
    """A pin that cuts an embedding table over an axis; empty if no table can be cut."""
    lookups = find(program)
    texts = {ROWS: f"[@{axis}, _]", COLUMNS: f"[_, @{axis}]"}
    cuts = ((name, dict(cut)) for name in lookups.slots for cut in lookups.cuts([name]))
    return next((f"{glob.escape(name)}={texts[cut[axis]]}" for name, cut in cuts if axis in cut), "")


def expert_layout(type: TensorType, axis: str, place: Shard, sizes: Sizes) -> Layout | None:
    """The layout of a weight in which each rank holds its own experts; None if the axis does not divide their
    number.
    """
    return Layout.build(type.shape, {**type.layout.placements(axis_order(sizes)), axis: place}, sizes)


def _read(op: Op) -> ExpertMatmul | ExpertRows | None:
    return ExpertMatmul.of(op) or ExpertRows.of(op)


def _with_lookups(region: Region, types: Mapping[str, TensorType]) -> Iterator[Op]:
    """The operations, with `index` by the experts of products as a lookup in their weights."""
    found = [(product, op) for op in region.forward.ops if (product := ExpertMatmul.of(op))]
    products = {product.chosen: op for product, op in found}
    count = {product.chosen: types[product.weights].shape[0] for product, _ in found}

    def lookup(op: Op) -> Op:
        match op.name, op.args:
            case "index", (Ref(name=table), (Ref(name=experts),)) if types[table].shape[0] == count.get(experts):
                found = replace(op, name="expert_rows", args=(Ref(experts), Ref(table)), attrs=())
                old, new = resolve(op, types), resolve(found, types)
                if old is None or new is None:
                    return op
                named = dict(zip(sum(old.results[0], ()), sum(new.results[0], ()), strict=True))
                choices = {
                    each.axis: replace(each, factor=named.get(each.factor or "", each.factor)) for each in op.choices
                }
                # Expert numbers that are equal for all tokens are replicated; the rows to which lookups are added are
                # not.
                rows = {each.axis: each for each in products[experts].choices if each.factor == _ROWS}
                return replace(found, choices=tuple((choices | rows).values()))
        return op

    return map(lookup, region.forward.ops)


@dataclass(frozen=True)
class _Chain:
    """The operations on rows from the first to the last product with the same choice of experts.

    Products are products with the experts' matrices, and lookups of a row for each expert.
    """

    chosen: str
    ops: tuple[int, ...]
    products: tuple[int, ...]


class _Experts:
    """The chains of a region, the weights that only they read, and the operations that derive these from parameters."""

    def __init__(
        self, region: Region, axis: str, earlier: frozenset[str], program: Program, how: tuple[bool, float]
    ) -> None:
        self.how = how  # whether rows may stay, and the assumed rows as a multiple of the mean
        self.region = region
        self.axis = axis
        self.earlier = earlier
        self.sizes = program.sizes
        self.ways = program.sizes[axis]
        self.types = region.types(region.forward)
        self.ops = [*_with_lookups(region, self.types)]
        self.rules: dict[int, OpRule] = {}
        self.weights: dict[str, Layout] = {}  # weight -> its layout with each rank's experts
        self.views: dict[int, Choice] = {}  # operations on weights
        self.plans: dict[str, tuple[str, ...]] = {}  # choice of experts -> the results of its `route`
        self.here: dict[
            tuple[str, str], str
        ] = {}  # (choice of experts, value) -> the value at the ranks of its experts
        self.taken: set[str] = set()  # names of values
        self.makers = {value.name: index for index, op in enumerate(self.ops) for value in op.results}
        self.readers: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            for name in op.refs():
                self.readers.setdefault(name, []).append(index)
        chosen: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            if product := _read(op):
                chosen.setdefault(product.chosen, []).append(index)
        self.chained: set[int] = set()  # operations that belong to a chain already; each belongs to one only
        self.chains = tuple(chain for name, products in chosen.items() for chain in self._chains(name, products))
        self._check_readers({index for chain in self.chains for index in chain.products})

    def _check_readers(self, known: set[int]) -> None:
        """Check that nothing else reads the experts' weights."""
        known |= {*self.views}
        made = {value.name for index in self.views for value in self.ops[index].results}
        for name in self.weights.keys() | made:
            for index in self.readers[name]:
                if index not in known:
                    raise self._refused(self.ops[index], f"{self.ops[index].name} reads {name} as well")

    def _chains(self, chosen: str, products: Sequence[int]) -> Iterator[_Chain]:
        """Divide products into chains. Rows return to their places where an operation between mixes them."""
        start = 0
        for end in range(1, len(products) + 1):
            if end == len(products) or not all(
                self._by_row(index, chosen) for index in self._products_and_between(products[start : end + 1])
            ):
                yield self._chain(chosen, tuple(products[start:end]))
                start = end

    def _products_and_between(self, products: Sequence[int]) -> list[int]:
        """The products, and the operations between the first and the last that read results of products."""
        behind: set[int] = set()
        made: set[str] = set()
        for index in range(products[0], products[-1] + 1):
            if index in products or not made.isdisjoint(self.ops[index].refs()):
                behind.add(index)
                made.update(value.name for value in self.ops[index].results)
        wanted: set[str] = set()
        between: list[int] = []
        for index in range(products[-1], products[0] - 1, -1):
            op = self.ops[index]
            if index in products or (index in behind and any(value.name in wanted for value in op.results)):
                between.append(index)
                wanted.update(op.refs())
        return between

    def _chain(self, chosen: str, products: tuple[int, ...]) -> _Chain:
        between = self._products_and_between(products)
        made = {value.name for index in between for value in self.ops[index].results}
        # Results in other dtypes or shapes, by the operations that made them.
        forms: dict[str, tuple[int, ...]] = dict.fromkeys(made, ())
        for index in range(products[0], len(self.ops)):
            op = self.ops[index]
            if index in between or not forms.keys() >= set(op.refs()):
                continue
            makers = (*dict.fromkeys(each for name in op.refs() for each in forms[name]), index)
            if op.name in ("to", "reshape"):
                forms[op.result.name] = makers
            # The bias of the last product: the addition reads two values of the chain, and no other rows.
            elif len(set(op.refs())) > 1 and all(self._by_row(each, chosen) for each in makers):
                between += [each for each in makers if each not in between]
                forms.update((value.name, ()) for value in op.results)
        for index in between:
            if not self._by_row(index, chosen):
                raise self._refused(self.ops[index], f"{self.ops[index].name} does not compute each row by itself")
        between = [index for index in between if index not in self.chained]
        self.chained.update(between)
        self._align(between, products)
        for index in products:
            product = _read(self.ops[index])
            assert product is not None
            if self._experts_per_rank(product.weights) % self.ways:
                count, axes = self.types[product.weights].shape[0], (*sorted(self.earlier), self.axis)
                over = ", ".join(f"{axis}={self.sizes[axis]}" for axis in axes)
                raise self._refused(self.ops[index], f"{count} experts do not divide over {over}")
            self._record_weight(product.weights, index, Shard(0))
        return _Chain(chosen, tuple(sorted(between)), products)

    def _align(self, between: Sequence[int], products: Sequence[int]) -> None:
        """Uncut operations on axes that cut their rows but not those of the first product with matrices.

        Rows that have travelled stay where they are until they return: their numbers differ between ranks.
        """
        first = next((index for index in products if ExpertMatmul.of(self.ops[index])), products[0])
        cut = {each.axis for each in self.ops[first].choices if each.factor in (_GROUPS, _ROWS)}
        for index in between:
            op = self.ops[index]
            row = self._row(self.rules[index], op)
            whole = lambda each, row=row: each.factor == row and each.axis not in cut  # noqa: E731
            choices = (replace(each, factor=None, outer=1) if whole(each) else each for each in op.choices)
            self.ops[index] = replace(op, choices=tuple(choices))

    def _by_row(self, index: int, chosen: str) -> bool:
        """Whether an operation computes each row separately, on rows that the axis cuts; its rule is recorded.

        A product by another choice of experts does not: it needs its rows on the ranks of its own experts.
        """
        op = self.ops[index]
        product = _read(op)
        if product is not None and product.chosen != chosen:
            return False
        rule = resolve(op, self.types)
        choice = choice_on(op, self.axis)
        row = self._row(rule, op)
        if rule is None or row is None or op.name in RANDOM or choice is None or choice.factor != row:
            return False
        self.rules[index] = rule
        return True

    def _row(self, rule: OpRule | None, op: Op) -> str | None:
        """The factor of the rows: the first dimension of all results; None if they differ."""
        firsts = {dims[:1] for dims in rule.results} if rule is not None else set()
        if rule is None or len(firsts) != 1:
            return None
        ((names, *_),) = firsts or {((),)}
        alone = len(names) == 1 or (_read(op) is not None and names == (_GROUPS, _ROWS))
        if not alone or rule.factor(names[-1]).kind != "parallel":
            return None
        carried = [dims for dims in rule.operands if any(names[-1] in dim for dim in dims)]
        return names[-1] if all(dims[0] == names for dims in carried) else None

    def _record_weight(self, name: str, reader: int, place: Shard) -> None:
        """Record a weight with the position of its experts, and the operations that derive it from parameters."""
        maker = self.makers.get(name)
        if maker is None and any(value.name == name for value in self.region.params):
            layout = expert_layout(self.types[name], self.axis, place, self.sizes)
            if layout is None or self.weights.setdefault(name, layout) != layout:
                raise self._refused(self.ops[reader], f"its experts lie in {name} in two ways")
            return
        choice = self._choice(maker, name, place) if maker is not None else None
        if maker is None or choice is None or self.views.setdefault(maker, choice) != choice:
            joined = maker is not None and self.ops[maker].name == "cat"
            raise self._refused(
                self.ops[reader],
                f"its matrices {name} are not a parameter with a dimension for experts",
                "experts in modules need equal types, all trained or none, and names that count from 0"
                if joined
                else "experts are those of a parameter, or of reshapes, permutations and elementwise operations on it",
            )
        rule = self.rules[maker]
        for ref, asked in zip(self.ops[maker].refs(), placements(self.ops[maker], rule, choice)[0], strict=True):
            if isinstance(asked, Shard):
                self._record_weight(ref, maker, asked)

    def _choice(self, maker: int, name: str, place: Shard) -> Choice | None:
        """The choice under which the axis cuts the result of an operation on weights at this place."""
        op = self.ops[maker]
        rule = resolve(op, self.types)
        if rule is None or op.name in RANDOM:
            return None
        self.rules[maker] = rule
        before = 1
        for factor in map(rule.factor, rule.results[[value.name for value in op.results].index(name)][place.dim]):
            outer, rest = divmod(place.outer, before)
            if factor.kind == "parallel" and not rest and outer < factor.size:
                return Choice(axis=self.axis, factor=factor.name, outer=outer)
            before *= factor.size
        return None

    def _experts_per_rank(self, weight: str) -> int:
        """The number of experts whose weights a rank holds."""
        return self.types[weight].layout.local_shape(self.sizes)[0]

    def _refused(self, op: Op, cause: str, help: str = "") -> PartcError:
        return PartcError(
            "P0107",
            f"{self.axis} cannot cut the experts of {self.region.name}: {cause}",
            help=help or f"leave {self.axis} out of the mesh, or write the experts as docs/experts.md shows",
            source=op.source,
        )

    def _params(self) -> tuple[Value, ...]:
        """The parameters with the experts' layouts, which are recorded."""
        params = tuple(
            replace(value, type=replace(value.type, layout=self.weights.get(value.name, value.type.layout)))
            for value in self.region.params
        )
        self.types |= {value.name: value.type for value in params}
        return params

    def cut(self) -> Region:
        """The region with rows that travel."""
        if not self.chains:
            return self.region
        params = self._params()
        inside = {index: chain for chain in self.chains for index in chain.ops}
        self.taken = {*self.types}
        ops: list[Op] = []
        for index, op in enumerate(self.ops):
            if index in self.views:
                ops.append(self._view(index))
            elif index not in inside:
                ops.append(op)
            else:
                ops.extend(self._moved(index, inside[index]))
        return replace(self.region, params=params, forward=replace(self.region.forward, ops=tuple(ops)))

    def _view(self, index: int) -> Op:
        """An operation on the weights of this rank's experts."""
        op = self.ops[index]
        kept = tuple(each for each in op.choices if each.axis != self.axis)
        return self._typed(replace(op, choices=(*kept, self.views[index])), self.rules[index])

    def _typed(self, op: Op, rule: OpRule | None) -> Op:
        """The operation with result layouts that follow from its choices."""
        op = op.laid_out(self._layouts(op, rule)[1])
        self.types.update((value.name, value.type) for value in op.results)
        return op

    def _moved(self, index: int, chain: _Chain) -> Iterator[Op]:
        """Yield an operation on the rows that have travelled to this rank's experts.

        The movements of its operands come before it, those of its results after it.
        """
        op = self.ops[index]
        rule: OpRule | None = self.rules[index]
        row = self._row(rule, op)
        cut = [each for each in op.choices if each.factor == row and self.sizes.get(each.axis, 1) > 1]
        product = _read(op) is not None
        home, back = self._layouts(op, rule)
        returned = {value.name: value for value in op.laid_out(back).results}
        op = replace(op, choices=tuple(self._with_major_axis(each, cut, product=product) for each in op.choices))
        if product:
            before = integers(argument(op, len(op.args), "groups", 1))[0]
            op = replace(op, attrs=(("groups", before * self.ways),))
            rule = resolve(op, self.types)
        wanted, _ = self._layouts(op, rule)
        if chain.chosen not in self.plans:
            at = [*op.refs()].index(chain.chosen)
            yield self._plan(op, chain.chosen, home[at], wanted[at])
        plan = self.plans[chain.chosen]
        inside = {value.name for each in chain.ops for value in self.ops[each].results}
        operands: list[str] = []
        for name, layout, dims in zip(op.refs(), wanted, self.rules[index].operands, strict=True):
            if not dims or row not in dims[0]:
                operands.append(name)
                continue
            if product and name == chain.chosen:
                operands.append(plan[2])
                continue
            if name not in inside and (chain.chosen, name) not in self.here:
                yield self._arriving(name, layout, chain.chosen, op)
            operands.append(self.here.get((chain.chosen, name), name))
            if name in inside and self.types[operands[-1]].layout.dims[0] != layout.dims[0]:
                raise self._refused(op, f"operations cut the rows of {name} in several ways")
        leaving = {value.name for value in op.results if self._leaves(value.name, chain)}
        named = {name: unique(f"{name}_here", self.taken) for name in leaving}
        self.here.update(((chain.chosen, name), new) for name, new in named.items())
        results = tuple(replace(value, name=named.get(value.name, value.name)) for value in op.results)
        yield self._typed(replace(op.reading(operands), results=results), rule)
        for name, new in named.items():
            yield self._movement("combine", new, plan, returned[name], op)

    def _arriving(self, name: str, layout: Layout, chosen: str, op: Op) -> Op:
        """The movement of an operand's rows to the ranks of their experts."""
        type = replace(self.types[name], layout=layout)
        value = Value(name=unique(f"{name}_here", self.taken), type=type)
        self.here[chosen, name] = value.name
        return self._movement("dispatch", name, self.plans[chosen], value, op)

    def _layouts(self, op: Op, rule: OpRule | None) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The layouts of the operands, and of the results, under the operation's choices."""
        found = layouts(op, rule, self.types, self.sizes)
        if found is None:
            raise self._refused(op, f"the rows of {op.results[0].name} do not divide")
        return found

    def _with_major_axis(self, choice: Choice, cut: list[Choice], *, product: bool) -> Choice:
        """The choice on rows after the axis has become their major cut."""
        if choice not in cut or choice.axis in self.earlier:
            return choice
        if choice.axis == self.axis:
            return replace(choice, factor=_GROUPS if product else choice.factor, outer=1)
        mine = next(each for each in cut if each.axis == self.axis)
        before = choice.outer // self.ways if choice.outer > mine.outer else choice.outer
        return replace(choice, outer=before if product else self.ways * before)

    def _leaves(self, name: str, chain: _Chain) -> bool:
        outside = any(index not in chain.ops for index in self.readers.get(name, ()))
        return outside or name in self.region.forward.outputs

    def _plan(self, op: Op, chosen: str, home: Layout, rows: Layout) -> Op:
        """The `route` operation for a choice of experts, which plans how its rows travel."""
        product = _read(op)
        assert product is not None
        count = self._experts_per_rank(product.weights) * self.ways
        axes = tuple(axis for sub in home.dims[0] for axis in sub.axes)
        every = math.prod(self.sizes[axis] for axis in axes)
        counts = Layout(((SubDim(2 * every, axes),), (SubDim(count),)))
        types = {"order": home, "grouped": rows, "own": rows, "counts": counts}
        results = tuple(
            Value(name=unique(word, self.taken), type=TensorType(dtype="i64", layout=layout))
            for word, layout in types.items()
        )
        self.types.update((value.name, value.type) for value in results)
        self.plans[chosen] = tuple(value.name for value in results)
        attrs = (("axis", self.axis),)
        return Op(name="route", args=(Ref(chosen), count, *self.how), attrs=attrs, results=results, source=op.source)

    def _movement(self, name: str, moved: str, plan: tuple[str, ...], result: Value, op: Op) -> Op:
        order, grouped, _, counts = plan
        args = (Ref(moved), Ref(order), Ref(grouped), Ref(counts))
        self.types[result.name] = result.type
        return Op(name=name, args=args, attrs=(("axis", self.axis),), results=(result,), source=op.source)


class _BatchedExperts(_Experts):
    """Products whose operands each have a dimension for experts, and the operations between two of them."""

    def __init__(
        self, region: Region, axis: str, earlier: frozenset[str], program: Program, how: tuple[bool, float]
    ) -> None:
        super().__init__(region, axis, earlier, program, how)
        self.inside: dict[int, str] = {}  # operations, and the factors that the axis cuts
        self.derived = {value.name for value in region.params}  # parameters, and values made of them alone
        for op in self.ops:
            if [*op.refs()] and self.derived.issuperset(op.refs()):
                self.derived.update(value.name for value in op.results)
        for index, op in enumerate(self.ops):
            rule = resolve(op, self.types)
            factor = self._experts_of(op, rule) if rule is not None else None
            if rule is not None and factor is not None:
                self.inside[index], self.rules[index] = factor, rule
        products = [*self.inside]
        for index in self._between():
            self.inside[index] = self._carried[index]
        for index, factor in self.inside.items():
            for name, dims in zip(self.ops[index].refs(), self.rules[index].operands, strict=True):
                dim = _dim(dims, factor)
                mine = index in products or self.inside.keys() >= {*self.readers[name]}
                if name in self.derived and dim is not None and mine:
                    self._record_weight(name, index, Shard(dim))
        self._check_readers({*self.inside})

    def _experts_of(self, op: Op, rule: OpRule) -> str | None:
        """The factor of a product's experts: of a weight, of another operand and of the result.

        The weight has a matrix of each expert. The channels of a depthwise convolution are no experts.
        """
        if not rule.work or op.name in RANDOM:
            return None
        read: dict[bool, set[str]] = {True: set(), False: set()}  # the factors of weights, and of other operands
        for name, dims in zip(op.refs(), rule.operands, strict=True):
            read[name in self.derived].update(chain.from_iterable(dims))
        made = {*chain.from_iterable(rule.results[0])}
        if not (read[True] & made) - read[False] or not (read[True] & read[False]) - made:
            return None
        for factor in rule.factors:
            held = [_dim(dims, factor.name) is not None for dims in rule.operands]
            weights = [name in self.derived for name in op.refs()]
            pairs = {*zip(held, weights, strict=True)}
            whole = factor.kind == "parallel" and factor.size > 1 and factor.size % self.ways == 0
            if whole and {(True, True), (True, False)} <= pairs and _dim(rule.results[0], factor.name) is not None:
                return factor.name
        return None

    def _between(self) -> list[int]:
        """The operations that carry experts from a product to another one."""
        cut: dict[str, int] = {}  # values behind products -> their dimensions of experts
        self._carried: dict[int, str] = {}
        for index, op in enumerate(self.ops):
            factor = self.inside.get(index) or self._carries(index, cut)
            if factor is not None:
                for value, dims in zip(op.results, self.rules[index].results, strict=True):
                    cut[value.name] = _dim(dims, factor) or 0
        wanted: set[str] = set()
        found = []
        for index in reversed(range(len(self.ops))):
            between = index in self._carried and not wanted.isdisjoint(value.name for value in self.ops[index].results)
            if between:
                found.append(index)
            if between or index in self.inside:
                wanted.update(self.ops[index].refs())
        return found

    def _carries(self, index: int, cut: Mapping[str, int]) -> str | None:
        """The factor that is the dimension of experts in all operands and results of an operation; None without one."""
        op = self.ops[index]
        rule = resolve(op, self.types) if not cut.keys().isdisjoint(op.refs()) and op.name not in RANDOM else None
        if rule is None:
            return None
        dims = [operand[cut[name]] for name, operand in zip(op.refs(), rule.operands, strict=True) if name in cut]
        factor = dims[0][0] if len({*dims}) == 1 and len(dims[0]) == 1 else ""
        if (
            not factor
            or rule.factor(factor).kind != "parallel"
            or any(_dim(made, factor) is None for made in rule.results)
        ):
            return None
        self.rules[index], self._carried[index] = rule, factor
        return factor

    def cut(self) -> Region:
        """The region with products and operations between them cut by experts."""
        if not self.inside:
            return self.region
        params = self._params()
        ops: list[Op] = []
        for index, op in enumerate(self.ops):
            if index in self.views:
                ops.append(self._view(index))
            elif index in self.inside:
                kept = tuple(each for each in op.choices if each.axis != self.axis)
                choice = Choice(axis=self.axis, factor=self.inside[index])
                ops.append(self._typed(replace(op, choices=(*kept, choice)), self.rules[index]))
            else:
                ops.append(op)
        return replace(self.region, params=params, forward=replace(self.region.forward, ops=tuple(ops)))


def _dim(dims: Sequence[tuple[str, ...]], factor: str) -> int | None:
    """The dimension that consists of this factor alone; None if there is none."""
    return dims.index((factor,)) if (factor,) in dims else None
