"""Cut embedding tables over the axes over which their gradients would be sums.

    param table.weight: f32[4096, 8] vary(dp)             param table.weight: f32[4096@dp, 8]
    x = embedding(table.weight, ids)  # f32[16@dp, 8]  ->  x = embedding(table.weight, ids)  # f32[16, 8] partial(dp)

By rows, every rank looks up the ids of all ranks in its rows; partition gathers the ids and scatters the sums of the
vectors. Or ids travel to the ranks of their rows, and vectors back (see exchange.py), whichever moves fewer bytes. By
columns, every rank looks up its columns for the ids of all ranks, and an all-to-all of the vectors returns
whole rows. Backward exchanges the vectors' gradients. A bag is reduced before its vectors are exchanged. No rank holds
a whole table, its gradient or its optimizer state, and nothing as large as the table moves.

A table that only lookups read is cut if the exchange of vectors costs less than sums of its gradient (and ZeRO's
gathers) would, or if its gradient is sparse. Among more ranks than a node has, a byte of an exchange counts as eight,
since sums pass the links between nodes once for all devices of a node. Of rows and columns on each axis, the cut that
moves the fewest bytes is chosen; an exchange by rows that no other table shares is charged for its copies as well. Pins
decide first. Rows of zeros are added where an axis does not divide them; no id looks them up.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partc import fuel
from partc.errors import PartcError
from partc.ir.layout import Layout, Replicated, Shard, Sizes
from partc.ir.mesh import TIME_AXIS, holds_weights_whole
from partc.ir.naming import unique
from partc.ir.program import (
    FLOATING,
    ITEMSIZE,
    Choice,
    Op,
    Parameter,
    Program,
    Ref,
    Region,
    TensorType,
    Value,
    needed,
)
from partc.passes.tables.exchange import exchanged, together
from partc.passes.tables.whole import (
    Exchange,
    Reader,
    TableStack,
    in_one_piece,
    kind,
    reader,
    stack_name,
    stacked_type,
)
from partc.rules import PARTIAL, resolve
from partc.rules.rule import OpRule
from partc.rules.updates import DEFAULT, UpdateRule, dense, updates
from partc.sharding.choices import axis_order, choice_on, layouts, placed_axes
from partc.sharding.pins import Pin
from partc.sharding.placements import expert_weights
from partc.sharding.reshard import plan
from partc.sharding.table_placement import WholeTable, placed

_ROWS, _COLUMNS = "v", "d"  # the factors of lookups' rule
_COPIES = 0.5  # of an exchange by rows: four copies of the vectors, of which a byte costs an eighth of one that is sent
_START = 1 << 17  # bytes that a link of 25 GB/s carries in the 5 us until a message starts
_LARGE = 1 << 26  # bytes of a table; smaller ones are gathered with the other parameters of their call
_NODE = 8  # devices of a node: a ring's bytes leave a node once, those of an exchange once for each of its devices
_BETWEEN = frozenset({"mul", "masked_fill", "where", "to", "alias"})  # operations on vectors before a bag is reduced
_RAGGED = frozenset({"bag_sum", "bag_max"})  # of rows that every rank looks up
_REDUCING = frozenset({"sum", "amax"}) | _RAGGED
Slot = tuple[str, str]  # a region and the name of one of its parameters
Cut = tuple[tuple[str, str], ...]  # axis -> the factor of lookups that it cuts


def tables(
    program: Program,
    *,
    zero: int = 0,
    pins: Sequence[Pin] = (),
    optimizer: str = DEFAULT,
    group: Sequence[str] = (),
    cut_tables: Mapping[str, Cut] | None = None,
    stacks: Sequence[Parameter] = (),
) -> Program:
    """Place tables, and decide which gradients are sparse.

    `cut_tables` and `stacks` are a training's cuts and its stacks of whole tables, for its evaluation.

    Raises PartcError P0422 for a sparse gradient that cannot be had.
    """
    rules = updates(program, optimizer, group)
    program = _apart(_with_sparse(program, rules))
    found = _Tables(program, zero, pins, rules)
    if cut_tables is None and (whole := found.summed()):
        parameters = (replace(item, sparse=False) if item.name in whole else item for item in program.parameters)
        found = _Tables(replace(program, parameters=tuple(parameters)), zero, pins, rules)
        program = found.program
    cuts = found.chosen() if cut_tables is None else cut_tables
    cuts = {name: cut for name, cut in cuts.items() if cut}
    ranks = found.whole(cuts) if cut_tables is None else found.placed_as(stacks)
    cuts = {name: cut for name, cut in cuts.items() if name not in ranks}
    program = found.cut(cuts) if cuts and fuel.allowed("embedding tables cut") else program
    return found.stacked(program, ranks) if ranks and fuel.allowed("whole tables placed") else program


def explain(
    program: Program,
    name: str,
    *,
    zero: int = 0,
    pins: Sequence[Pin] = (),
    optimizer: str = DEFAULT,
    group: Sequence[str] = (),
) -> tuple[tuple[str, float], ...]:
    """The layouts that a table can have over the axes of the batch, the chosen one first, and the bytes of each.

    `program` is as the pass takes it, and the bytes are those that a rank sends in a step. Empty for other parameters.
    """
    rules = updates(program, optimizer, group)
    program = _apart(_with_sparse(program, rules))
    found = _Tables(program, zero, pins, rules)
    slots = found.slots.get(name, [])
    if not slots or any(slot not in found.lookups for slot in slots):
        return ()
    type = found.parameters[name].type
    options = {cut: (f"{found._type(type, cut)}", found._moved(name, cut)) for cut in found._cuts([name])}
    cuts = found.chosen()
    chosen, placed = cuts.get(name), found.whole(cuts).get(name)
    if placed is not None:
        ways = found.ways(name)
        first = f"{type} whole on rank {placed[1]} of {ways}", found.slot(name) / ways
        return (first, *sorted(options.values(), key=_bytes))
    whole = f"{type}{' in parts' * bool(zero)}", float(found._whole(name))
    rest = sorted((*(each for cut, each in options.items() if cut != chosen), *([whole] if chosen else [])), key=_bytes)
    return (options[chosen] if chosen else whole, *rest)


def _bytes(option: tuple[str, float]) -> float:
    return option[1]


def table_cut(parameter: Parameter, sizes: Sizes) -> Cut:
    """The cut of a table in a finished program, over the axes that hold other weights whole; empty for others."""
    layout, over = parameter.type.layout, [axis for axis in sizes if holds_weights_whole(axis)]
    if len(parameter.type.shape) != 2:
        return ()
    found = {axis: layout.placement(axis) for axis in over if axis not in parameter.gather}
    dims = {axis: where.dim for axis, where in found.items() if isinstance(where, Shard)}
    return tuple((axis, (_ROWS, _COLUMNS)[dim]) for axis, dim in dims.items())


def _with_sparse(program: Program, rules: Mapping[str, UpdateRule]) -> Program:
    """Leave sparse gradients to parameters whose optimizer updates single rows, and add them where it is by rows."""
    read = {name for name, slots in _slots(program).items() if slots}
    parameters = []
    for item in program.parameters:
        rule = rules[item.name]
        wanted = item.sparse or rule.kind.by_rows
        sparse = wanted and rule.takes_rows and item.trainable and item.name in read and len(item.type.shape) == 2
        if item.trainable and not sparse:
            dense(item.name, rule, "no lookup asks for rows")
        parameters.append(item if sparse == item.sparse else replace(item, sparse=sparse))
    return replace(program, parameters=tuple(parameters))


def _apart(program: Program) -> Program:
    """The program with a parameter of the region for each lookup of a sparse table, so that each adds its rows."""
    sparse = {parameter.name for parameter in program.parameters if parameter.sparse}
    owned = {slot: name for name, slots in _slots(program).items() if name in sparse for slot in slots}
    for region in program.regions:
        readers, taken = region.forward.readers(), {*region.types(region.forward)}
        more: dict[str, list[Value]] = {}
        renamed: dict[str, dict[str, str]] = {}  # result of a lookup -> the name of its table
        for value in region.params:
            ops = readers.get(value.name, ()) if (region.name, value.name) in owned else ()
            for op in ops[1:]:
                copy = replace(value, name=unique(value.name, taken))
                more.setdefault(value.name, []).append(copy)
                renamed[op.results[0].name] = {value.name: copy.name}
        if not renamed:
            continue
        forward = tuple(
            op.renamed(renamed[op.results[0].name]) if op.results and op.results[0].name in renamed else op
            for op in region.forward.ops
        )
        added = [(index, copy) for index, value in enumerate(region.params) for copy in more.get(value.name, ())]
        changed = replace(
            region,
            params=(*region.params, *(copy for _, copy in added)),
            forward=replace(region.forward, ops=forward),
        )
        calls = tuple(
            replace(call, params=(*call.params, *(call.params[index] for index, _ in added)))
            if call.region == region.name
            else call
            for call in program.calls
        )
        regions = tuple(changed if other is region else other for other in program.regions)
        program = replace(program, regions=regions, calls=calls)
    return program


def _slots(program: Program) -> dict[str, list[Slot]]:
    regions = {region.name: region for region in program.regions}
    slots: dict[str, list[Slot]] = {parameter.name: [] for parameter in program.parameters}
    for call in program.calls:
        for value, name in zip(regions[call.region].params, call.params, strict=True):
            slots[name].append((call.region, value.name))
    return slots


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A lookup, and the operations that reduce its bags, if it has bags: each with the position of the vectors."""

    op: Op
    after: tuple[tuple[Op, int], ...] = ()

    @property
    def cast(self) -> Op | None:
        """The operation that casts the vectors that were looked up."""
        return self.after[0][0] if self.after and self.after[0][0].name == "to" else None

    @property
    def last(self) -> Op:
        return self.after[-1][0] if self.after else self.op


def _independent(ops: Sequence[Op], lookups: Sequence[Op]) -> Iterator[tuple[Op, ...]]:
    """The lookups in groups, none of which reads ids that depend on another lookup of its group."""
    level: dict[str, int] = {}
    ours, groups = {op.results[0].name for op in lookups}, dict[int, list[Op]]()
    for op in ops:
        found = max((level.get(name, 0) for name in op.refs()), default=0)
        if op.results and op.results[0].name in ours:
            groups.setdefault(found, []).append(op)
            found += 1
        level.update((value.name, found) for value in op.results)
    return (tuple(group) for _, group in sorted(groups.items()))


def _in_place(ops: Sequence[Op], old: Sequence[Op], new: Sequence[Op]) -> tuple[Op, ...]:
    """The operations with new ones in place of the first of the old; whatever those read precedes them."""
    gone = {id(op) for op in old}
    start = next(index for index, op in enumerate(ops) if id(op) in gone)
    rest = [op for op in ops[start:] if id(op) not in gone]
    made = {value.name for op in old for value in op.results}
    before = needed(rest, (name for op in old for name in op.refs() if name not in made))
    first = {id(op) for op in before}
    return (*ops[:start], *before, *new, *(op for op in rest if id(op) not in first))


def _uncut(op: Op, axes: Sequence[str]) -> bool:
    """Whether every rank of these axes does the operation as a whole."""
    return all(choice is not None and choice.factor is None for choice in (choice_on(op, axis) for axis in axes))


def _with_stacks(
    program: Program,
    region: Region,
    readers: Mapping[str, tuple[Hashable, Reader]],
    whole: Collection[str],
    joined: Mapping[str, Parameter],
    stacks: Sequence[TableStack],
    over: tuple[str, ...],
    taken: set[str],
) -> Program:
    """The program with stacks in place of their tables; `joined` has their parameters by their first tables."""
    found = [readers[name][1] for name in whole]
    old = [op for each in found for op in (each.op, *(step for step, _ in each.after))]
    tables = {each.table for each in found}
    types = {**region.types(region.forward), **{stack.param.name: stack.param.type for stack in stacks}}
    exchange = Exchange(
        types=types, sizes=program.sizes, taken=taken, source=found[0].op.source, stacks=stacks, over=over
    )
    forward = _in_place(region.forward.ops, old, exchange.made())
    forward = needed(in_one_piece(forward, exchange), region.forward.outputs)
    params = (*(value for value in region.params if value.name not in tables), *(stack.param for stack in stacks))
    changed = replace(region, params=params, forward=replace(region.forward, ops=forward))
    names = [item.name for item in joined.values()]
    return replace(
        program,
        parameters=tuple(
            joined.get(item.name, item) for item in program.parameters if item.name in joined or item.name not in whole
        ),
        calls=tuple(
            replace(call, params=(*(name for name in call.params if name not in whole), *names))
            if call.region == region.name
            else call
            for call in program.calls
        ),
        regions=tuple(changed if each.name == region.name else each for each in program.regions),
    )


class _Tables:
    """The lookups of a program, and the parameters that they alone read."""

    def __init__(self, program: Program, zero: int, pins: Sequence[Pin], rules: Mapping[str, UpdateRule]) -> None:
        self.program = program
        self.rules = rules
        self.sizes = program.sizes
        self.zero = zero
        self.pins = pins
        self.slots = _slots(program)
        self.parameters = {parameter.name: parameter for parameter in program.parameters}
        self.lookups: dict[Slot, list[_Lookup]] = {}
        self.types: dict[str, Mapping[str, TensorType]] = {}
        self.axes: dict[Slot, tuple[str, ...]] = {}
        for region in program.regions:
            self.types[region.name] = region.types(region.forward)
            readers = region.forward.readers()
            for value in region.params:
                ops = readers.get(value.name, ())
                varying = value.type.layout.varying
                several = (name for name, size in self.sizes.items() if size > 1 and name != TIME_AXIS)
                axes = tuple(name for name in several if name in varying)
                alone = region.phase == "microbatch" and value.name not in region.forward.outputs
                if alone and ops and all(self._looks_up(op, value, axes) for op in ops):
                    found = [self._with_bag(region, op, axes) for op in ops]
                    if all(each.last.name in _RAGGED or self._are_batched(each.op, axes) for each in found):
                        self.lookups[region.name, value.name] = found
                        self.axes[region.name, value.name] = axes

    @cached_property
    def experts(self) -> frozenset[Slot]:
        """The weights of products by expert."""
        found = ((each.name, expert_weights(each.forward, self.types[each.name])) for each in self.program.regions)
        return frozenset((region, weight) for region, weights in found for weight in weights)

    @cached_property
    def forced(self) -> bool:
        """Whether an axis for experts is for tables: there are no experts, and tables are most of the model."""
        names = {op.name for region in self.program.regions for op in region.forward.ops}
        if not self.program.mesh.expert_axes or "expert_matmul" in names:
            return False
        read = {name for name, slots in self.slots.items() if slots and self.lookups.keys() >= {*slots}}
        elements = {name: math.prod(item.type.shape) for name, item in self.parameters.items()}
        return 2 * sum(elements[name] for name in read) > sum(elements.values())

    def _looks_up(self, op: Op, table: Value, axes: Sequence[str]) -> bool:
        """Whether an operation looks up rows of a table for ids that all these axes cut, or none."""
        if op.name != "embedding" or op.args[0] != Ref(table.name) or [*op.refs()].count(table.name) > 1:
            return False
        return self._are_batched(op, axes) or _uncut(op, axes)

    def _are_batched(self, op: Op, axes: Sequence[str]) -> bool:
        return all(self._is_batched(op, axis) for axis in axes)

    def _is_batched(self, op: Op, axis: str) -> bool:
        """Whether the axis cuts a factor of the operation's result."""
        cut = choice_on(op, axis)
        placed = op.result.type.layout.placement(axis) if len(op.results) == 1 else None
        return cut is not None and cut.factor is not None and isinstance(placed, Shard)

    def _with_bag(self, region: Region, op: Op, axes: Sequence[str]) -> _Lookup:
        """The lookup with the operations up to the one that reduces its bags, each of which alone reads the last."""
        readers, found = region.forward.readers(), list[tuple[Op, int]]()
        vectors = op.result
        while True:
            cast = tuple(found[:1]) if found and found[0][0].name == "to" else ()
            reading = readers.get(vectors.name, ())
            if len(reading) != 1 or vectors.name in region.forward.outputs:
                return _Lookup(op, cast)
            (reader,) = reading
            names = list(reader.refs())
            known = reader.name in _BETWEEN or self._reduces(reader, vectors)
            cut = self._are_batched(reader, axes) or (reader.name in _BETWEEN and _uncut(reader, axes))
            if not known or names.count(vectors.name) > 1 or not cut:
                return _Lookup(op, cast)
            found.append((reader, names.index(vectors.name)))
            if reader.name in _REDUCING:
                return _Lookup(op, tuple(found))
            if reader.result.type.shape != vectors.type.shape:
                return _Lookup(op, cast)
            vectors = reader.result

    @staticmethod
    def _reduces(op: Op, vectors: Value) -> bool:
        """Whether an operation reduces dimensions, and not that of the columns."""
        return op.name in _REDUCING and op.result.type.shape[-1:] == vectors.type.shape[-1:]

    def chosen(self) -> dict[str, Cut]:
        """The cut of each table. The calls of a region are alike: the tables of one slot are cut alike, or none is."""
        found: dict[str, Cut] = {}
        for names in self._alike():
            cuts = [each for each in self._cuts(names) if all(self._pinned(name, each) for name in names)]
            pinned = any(self._pins(name) for name in names)
            if not cuts and not pinned:
                continue
            sparse = any(self.parameters[name].sparse for name in names)
            if any(self.rules[name].kind.by_rows for name in names):  # whose states are whole along columns
                cuts = [each for each in cuts if _ROWS in dict(each).values()] or cuts
            alone = self._is_alone(names)
            costs = {cut: sum((self._spread if alone else self._moved)(name, cut) for name in names) for cut in cuts}
            best = min(costs, key=lambda cut: costs[cut], default=None)
            if pinned and best is None:
                raise self._unpinnable(names)
            if best is not None and (sparse or pinned or self.forced or all(self._saves(name, best) for name in names)):
                found |= dict.fromkeys(names, best)
        return found

    def _is_alone(self, names: Sequence[str]) -> bool:
        """Whether no other table that could be cut is read in the same regions, so that none shares an exchange."""
        regions = {region for name in names for region, _ in self.slots[name]}
        return not any(
            self.lookups.keys() >= {*slots}
            and (self._is_large(name) or self.parameters[name].sparse)
            and not regions.isdisjoint(region for region, _ in slots)
            for name, slots in self.slots.items()
            if name not in names
        )

    def _alike(self) -> Iterator[list[str]]:
        """The parameters that share slots."""
        readers: dict[Slot, list[str]] = {}
        for name, slots in self.slots.items():
            for slot in slots:
                readers.setdefault(slot, []).append(name)
        seen: set[str] = set()
        for first, slots in self.slots.items():
            if not slots or first in seen:
                continue
            group = {first: None}
            left, met = [first], set[Slot]()
            while left:
                for slot in {*self.slots[left.pop()]} - met:
                    met.add(slot)
                    left += [name for name in readers[slot] if name not in group]
                    group |= dict.fromkeys(readers[slot])
            seen |= group.keys()
            yield [name for name in self.slots if name in group] if len(group) > 1 else [first]

    def _cuts(self, names: Sequence[str]) -> Iterator[Cut]:
        """The possible cuts over all axes over which the gradients would be sums; the rows over one axis at most."""
        slots = {slot for name in names for slot in self.slots[name]}
        if not slots or any(slot not in self.lookups for slot in slots):
            return
        axes = {self.axes[slot] for slot in slots}
        frozen = any(
            not item.trainable or item.type.dtype not in FLOATING or item.aliases
            for item in map(self.parameters.__getitem__, names)
        )
        if frozen or len(axes) != 1 or not (over := next(iter(axes))):
            return
        for factors in itertools.product((_ROWS, _COLUMNS), repeat=len(over)):
            cut = tuple(zip(over, factors, strict=True))
            if all(self._is_possible(slot, cut) for slot in slots):
                yield cut

    def _is_possible(self, slot: Slot, cut: Cut) -> bool:
        table = self.types[slot[0]][slot[1]]
        factors = [factor for _, factor in cut]
        rows = factors.count(_ROWS)
        if rows > 1 or (rows and any(sub.axes for sub in table.layout.dims[0])):
            return False
        ways = math.prod(self.sizes[axis] for axis, factor in cut if factor == _COLUMNS)
        if table.layout.local_shape(self.sizes)[1] % ways:
            return False
        return all(self._recuts(slot, lookup, cut) is not None for lookup in self.lookups[slot])

    def _recuts(self, slot: Slot, lookup: _Lookup, cut: Cut) -> list[Op] | None:
        """The lookup, and the reduction of its bags where the cut allows it, with other factors on the axes."""
        types = dict(self.types[slot[0]])
        types[slot[1]] = self._type(types[slot[1]], cut)
        whole, ops = self._recut(lookup.op, dict(cut), types), list[Op]()
        if whole is None:
            return None
        types[whole.result.name] = whole.result.type
        for op, position in lookup.after:
            rule = resolve(op, types)
            factors = {} if rule is None else {axis: self._through(rule, position, factor) for axis, factor in cut}
            known = {axis: factor for axis, factor in factors.items() if factor is not None}
            changed = self._recut(op, known, types) if len(known) == len(cut) else None
            if changed is None:
                return [whole]
            ops.append(changed)
            types[changed.result.name] = changed.result.type
        return [whole, *ops]

    @staticmethod
    def _through(rule: OpRule, position: int, factor: str) -> str | None:
        """The choice under which an operation on vectors keeps them cut by columns, or partial for a cut by rows."""
        if factor == _ROWS:
            return next((f"{PARTIAL}{i}" for i, group in enumerate(rule.linear) if tuple(group) == (position,)), None)
        names = rule.operands[position][-1]
        return names[-1] if names else None

    def _recut(self, op: Op, factors: Mapping[str, str], types: Mapping[str, TensorType]) -> Op | None:
        """The operation with other factors on the axes. Time still cuts each rank's own part of the batch."""
        choices = list(op.choices)
        for axis, factor in factors.items():
            batch = choice_on(op, axis)
            assert batch is not None
            choices = [
                Choice(axis=axis, factor=factor)
                if choice is batch
                else replace(choice, outer=choice.outer * self.sizes[axis])
                if choice.axis == TIME_AXIS and choice.factor == batch.factor is not None
                else choice
                for choice in choices
            ]
        op = replace(op, choices=tuple(choices))
        found = layouts(op, resolve(op, types), types, self.sizes)
        if found is None:
            return None
        return replace(op, results=(replace(op.result, type=replace(op.result.type, layout=found[1][0])),))

    def _moved(self, name: str, cut: Cut) -> float:
        """The bytes that a rank sends in a step to exchange ids and vectors."""
        pairs = ((slot, lookup) for slot in self.slots[name] for lookup in self.lookups[slot])
        found = (min(self._gathered(*pair, cut), self._exchanged(*pair, cut)) for pair in pairs)
        return sum(found) * self.program.microbatches

    def _exchanges(self, slot: Slot, lookup: _Lookup, cut: Cut) -> bool:
        """Whether ids travel to the ranks of their rows, rather than to all ranks."""
        return self._exchanged(slot, lookup, cut) < self._gathered(slot, lookup, cut)

    def _gathered(self, slot: Slot, lookup: _Lookup, cut: Cut) -> int:
        """The bytes that a rank sends in a microbatch if all ranks look up all ids."""
        total, types = 0, dict(self.types[slot[0]])
        types[slot[1]] = self._type(types[slot[1]], cut)
        ops = self._recuts(slot, lookup, cut)
        assert ops is not None
        for op in ops:
            found = layouts(op, resolve(op, types), types, self.sizes)
            assert found is not None
            for ref, wanted in zip(op.refs(), found[0], strict=True):
                if types[ref].dtype not in FLOATING:
                    total += self._bytes(types[ref].layout, wanted, types[ref], gradient=False)
            types[op.result.name] = op.result.type
        before = self.types[slot[0]][ops[-1].result.name]
        return total + self._bytes(ops[-1].result.type.layout, before.layout, before, gradient=True)

    def _exchanged(self, slot: Slot, lookup: _Lookup, cut: Cut) -> float:
        """The bytes that a rank sends in a microbatch if each rank looks up the ids of its own rows."""
        types, op = self.types[slot[0]], lookup.op
        ids = types[[*op.refs()][1]]
        masked = any(each.name == "masked_fill" for each, _ in lookup.after)
        padded = len(op.args) > 2 and not masked  # the row without a gradient is on one rank
        ((axis, factor), *others) = cut
        home = ids.layout.sharded_axes
        if (
            padded
            or others
            or factor != _ROWS
            or axis not in home
            or any(sub.axes for sub in types[slot[1]].layout.dims[0])
        ):
            return math.inf
        vectors = (lookup.cast or op).result.type.local_bytes(self.sizes)
        return (ids.local_bytes(self.sizes) + 2 * vectors) * (self.sizes[axis] - 1) / self.sizes[axis]

    def _bytes(self, source: Layout, target: Layout, type: TensorType, *, gradient: bool) -> int:
        if not gradient:
            source, target = replace(source, varying=()), replace(target, varying=())
        steps = plan(source, target, sizes=self.sizes, itemsize=ITEMSIZE[type.dtype], needs_grad=gradient)
        return sum(step.forward + step.backward for step in steps)

    def _saves(self, name: str, cut: Cut) -> bool:
        """Whether a table is large, and exchanging its vectors costs less in a step than summing and gathering it.

        Sums share their messages with those of other gradients; vectors travel in messages of their own.
        """
        lookups = sum(len(self.lookups[slot]) for slot in self.slots[name])
        ranks = math.prod(self.sizes[axis] for axis, _ in cut)
        started = 2 * _START * (ranks - 1) * lookups * self.program.microbatches
        moved = self._moved(name, cut) * (_NODE if ranks > _NODE else 1)
        return self._is_large(name) and moved + started < self._whole(name)

    def _is_large(self, name: str) -> bool:
        return self.parameters[name].type.local_bytes(self.sizes) >= _LARGE

    def _whole(self, name: str) -> int:
        """The bytes that a rank sends in a step for a table that is not cut: of its gradient, and of ZeRO's gathers."""
        times = self.program.microbatches
        return self.parameters[name].type.local_bytes(self.sizes) * {0: 2, 1: 2, 2: 1 + times, 3: 3 * times}[self.zero]

    def _pins(self, name: str) -> list[Pin]:
        """The pins that name one of the table's axes."""
        if not self.pins:
            return []
        over = {axis for axis, size in self.sizes.items() if size > 1} - {*placed_axes(self.sizes)}
        if not self.experts.isdisjoint(self.slots[name]):  # the pass that cuts them checks these pins
            over -= {*self.program.mesh.expert_axes}
        return [
            pin
            for pin in self.pins
            if pin.matches(name) and any(axis in over for entries in pin.dims for _, axes in entries for axis in axes)
        ]

    def _pinned(self, name: str, cut: Cut) -> bool:
        """Whether the pins of a table allow the cut."""
        dims = {_ROWS: 0, _COLUMNS: 1}
        wanted = ((pin.placement(axis), factor) for pin in self._pins(name) for axis, factor in cut)
        return all(isinstance(found, Replicated) or found == Shard(dims[factor]) for found, factor in wanted)

    def _unpinnable(self, names: Sequence[str]) -> PartcError:
        name = next(name for name in names if self._pins(name))
        (pin, *_) = self._pins(name)
        return PartcError(
            "P0302",
            f"--shard {pin.pattern}={pin.text}: {name} is no table that can be cut so",
            help="over dp and cp, rows or columns of tables are cut that lookups alone read, rows over one axis; "
            "columns must be a multiple of the axis",
        )

    def summed(self) -> frozenset[str]:
        """The parameters whose gradients were to be sparse, and would be sums over ranks, or are not of lookups alone.

        Raises PartcError P0422 if the optimizer of one takes no other gradient.
        """
        found: set[str] = set()
        for names in self._alike() if any(item.sparse for item in self.parameters.values()) else ():
            slots = [slot for name in names for slot in self.slots[name]]
            alone = all(slot in self.lookups for slot in slots) and not any(self.parameters[n].aliases for n in names)
            over = sorted({axis for slot in slots for axis in self.axes.get(slot, ())})
            if alone and (not over or any(self._cuts(names))):
                continue
            why = f"{' and '.join(over)} cannot cut it" if alone else "other operations than lookups read it"
            for name in names:
                if self.parameters[name].sparse:
                    dense(name, self.rules[name], why)
                    found.add(name)
        return frozenset(found)

    def cut(self, cuts: Mapping[str, Cut]) -> Program:
        cuts = {name: cut for name, cut in cuts.items() if self._can(name, cut)}
        by_slot = {slot: cut for name, cut in cuts.items() for slot in self.slots[name]}
        parameters = tuple(
            replace(item, type=self._type(item.type, cuts[item.name]), holds=self._holds(item, cuts[item.name]))
            if item.name in cuts
            else item
            for item in self.program.parameters
        )
        regions = tuple(
            self._region(region, {name: cut for (each, name), cut in by_slot.items() if each == region.name})
            for region in self.program.regions
        )
        return replace(self.program, parameters=parameters, regions=regions)

    def _can(self, name: str, cut: Cut) -> bool:
        """Whether the program reads a table by lookups that admit the cut."""
        slots = self.slots.get(name, [])
        return bool(slots) and all(
            slot in self.lookups and dict(cut).keys() == {*self.axes[slot]} and self._is_possible(slot, cut)
            for slot in slots
        )

    def _region(self, region: Region, cuts: Mapping[str, Cut]) -> Region:
        if not cuts:
            return region
        params = tuple(
            replace(value, type=self._type(value.type, cuts[value.name])) if value.name in cuts else value
            for value in region.params
        )
        changed: dict[str, tuple[Op, ...]] = {}
        types = {**self.types[region.name], **{value.name: value.type for value in params}}
        exchanging: dict[str, list[Op]] = {}
        casts: dict[str, Op] = {}
        for name, cut in cuts.items():
            for lookup in self.lookups[region.name, name]:
                slot = region.name, name
                if self._exchanges(slot, lookup, cut):
                    exchanging.setdefault(cut[0][0], []).append(lookup.op)
                    casts |= {lookup.op.result.name: lookup.cast} if lookup.cast else {}
                    continue
                ops = self._recuts(slot, lookup, cut)
                assert ops is not None
                changed |= {op.result.name: (op,) for op in ops}
        steps = [changed.get(op.results[0].name, (op,)) if op.results else (op,) for op in region.forward.ops]
        forward = tuple(itertools.chain.from_iterable(steps))
        taken = {*self.types[region.name]}
        for axis, lookups in exchanging.items():
            for some in together(lookups, casts, types, self.sizes):
                for few in _independent(forward, some):
                    old = (*few, *(casts[op.result.name] for op in few if op.result.name in casts))
                    forward = _in_place(forward, old, exchanged(few, casts, axis, types, self.sizes, taken))
        return replace(region, params=params, forward=replace(region.forward, ops=forward))

    def ways(self, name: str) -> int:
        """The number of ranks that share a table."""
        return math.prod(self.sizes[axis] for axis in self.axes[self.slots[name][0]])

    def slot(self, name: str) -> float:
        """The bytes that a rank sends in a step for a slot of the table's kind: one of each other rank."""
        _, found = self._readers[name]
        types = self.types[self.slots[name][0][0]]
        ids, vectors = types[[*found.op.refs()][1]], found.last.result.type
        each = ids.local_bytes(self.sizes) + 2 * vectors.local_bytes(self.sizes)
        return float(each * (self.ways(name) - 1) * self.program.microbatches)

    @cached_property
    def _readers(self) -> dict[str, tuple[Hashable, Reader]]:
        """The tables that can be whole: sparse ones of one region, which one lookup reads, each with its kind."""
        calls = Counter(call.region for call in self.program.calls)
        found: dict[Hashable, dict[str, tuple[Hashable, Reader]]] = {}
        for name, slots in self.slots.items():
            item = self.parameters[name]
            if len(slots) != 1 or slots[0] not in self.lookups or len(self.lookups[slots[0]]) != 1:
                continue
            ((region, value),), (lookup,) = slots, self.lookups[slots[0]]
            if (
                calls[region] != 1
                or not item.sparse
                or not item.trainable
                or item.aliases
                or item.holds[1:] != item.type.shape[1:] * bool(item.holds)
            ):
                continue
            over, types = self.axes[slots[0]], self.types[region]
            first, *inner = types[[*lookup.op.refs()][1]].layout.normalized(self.sizes).dims[0]
            made = reader(value, lookup.op, lookup.after, types)
            if made is None or not over or inner or first.axes[: len(over)] != over:
                continue
            alike = (kind(made, types), self.rules[name])
            found.setdefault((region, first), {})[name] = alike, made
        best: dict[str, tuple[Hashable, Reader]] = {}
        for (region, _), some in found.items():  # type: ignore[misc]
            lookups = {id(each.op): name for name, (_, each) in some.items()}
            forward = self.program.region(region).forward.ops
            for group in _independent(forward, [each.op for _, each in some.values()]):
                names = [lookups[id(op)] for op in group]
                best = max(best, {name: some[name] for name in names}, key=len)
        return best

    def whole(self, cuts: Mapping[str, Cut]) -> dict[str, tuple[Hashable, int]]:
        """The kind and the rank of each table that is whole, where others are cut in these ways."""
        wanted = {name: pin for name in self.parameters for pin in self.pins if pin.whole and pin.matches(name)}
        for name, pin in wanted.items():
            if name not in self._readers or (pin.rank is not None and pin.rank >= self.ways(name)):
                raise self._unplaceable(name, pin)
        candidates = {
            name: found
            for name, found in self._readers.items()
            if name in wanted or (name in cuts and not self._pins(name))
        }
        if not candidates:
            return {}
        kinds = {each: number for number, each in enumerate(dict.fromkeys(each for each, _ in candidates.values()))}
        given = [
            WholeTable(
                name=name,
                kind=kinds[alike],
                bytes=self.parameters[name].type.local_bytes(self.sizes),
                traffic=self.slot(name),
                spread=self._spread(name, cuts[name]) if name in cuts else 0.0,
                whole=name in wanted,
                rank=wanted[name].rank if name in wanted else None,
            )
            for name, (alike, _) in candidates.items()
        ]
        ranks = placed(given, self.ways(next(iter(candidates)))).ranks
        # Equal tables change places, so that vectors come in the model's order.
        equal: dict[WholeTable, list[str]] = {}
        for table in given:
            if table.name in ranks:
                equal.setdefault(replace(table, name=""), []).append(table.name)
        ordered = {
            name: rank
            for names in equal.values()
            for name, rank in zip(names, sorted(ranks[name] for name in names), strict=True)
        }
        return {name: (candidates[name][0], ordered[name]) for name in ranks}

    def _spread(self, name: str, cut: Cut) -> float:
        """The bytes that a rank sends in a step for a table that is cut, and its share of those that it copies."""
        copied = 0.0
        for slot in self.slots[name]:
            for lookup in self.lookups[slot]:
                if self._exchanges(slot, lookup, cut):
                    copied += _COPIES * (lookup.cast or lookup.op).result.type.local_bytes(self.sizes)
        return self._moved(name, cut) + copied * self.program.microbatches

    def placed_as(self, stacks: Sequence[Parameter]) -> dict[str, tuple[Hashable, int]]:
        """The kind and the rank of the whole tables of a training."""
        found: dict[str, tuple[Hashable, int]] = {}
        for stack in stacks:
            if len({self._readers[name][0] if name in self._readers else name for name in stack.names}) > 1:
                continue  # evaluation reads these tables otherwise than training does
            for name, first, _ in stack.members:
                if name in self._readers:
                    found[name] = stack.name, first // (stack.type.shape[0] // self.ways(name))
        return found

    def stacked(self, program: Program, whole: Mapping[str, tuple[Hashable, int]]) -> Program:
        """The program whose whole tables are rows of stacks, and whose ids and vectors travel together."""
        names = [name for name in self.slots if name in whole]
        ((name, _), *_) = self.slots[names[0]]
        region, over, ways = program.region(name), self.axes[self.slots[names[0]][0]], self.ways(names[0])
        types = {**region.types(region.forward)}
        taken, held = {*types}, {item.name for item in program.parameters}
        joined: dict[str, Parameter] = {}
        stacks: list[TableStack] = []
        for alike in dict.fromkeys(found for found, _ in whole.values()):
            some = [name for name in names if whole[name][0] == alike]
            by_rank = [[name for name in some if whole[name][1] == rank] for rank in range(ways)]
            heights = [sum(map(self._rows, here)) for here in by_rank]
            slots = max(map(len, by_rank))
            rows = max(height + (len(here) < slots) for height, here in zip(heights, by_rank, strict=True))
            first = self.parameters[some[0]]
            label = stack_name(some, held)
            held.add(label)
            members: list[tuple[str, int, int]] = []
            ranked: list[tuple[tuple[Reader, int], ...]] = []
            for rank, here in enumerate(by_rank):
                sizes = [*map(self._rows, here)]
                starts = [sum(sizes[:index]) for index in range(len(here))]
                members += [
                    (name, rank * rows + start, size) for name, start, size in zip(here, starts, sizes, strict=True)
                ]
                ranked.append(tuple((self._readers[name][1], start) for name, start in zip(here, starts, strict=True)))
            item = replace(
                first,
                name=label,
                type=stacked_type(first.type, rows, over, self.sizes),
                holds=(),
                members=tuple(members),
            )
            joined[some[0]] = item
            value = next(each for each in region.params if each.name == self.slots[some[0]][0][1])
            param = replace(
                value,
                name=unique(stack_name([self.slots[name][0][1] for name in some], ()), taken),
                type=stacked_type(value.type, rows, over, self.sizes),
            )
            stacks.append(TableStack(param=param, ranks=tuple(ranked)))
        return _with_stacks(program, region, self._readers, whole, joined, stacks, over, taken)

    def _rows(self, name: str) -> int:
        """The rows that the model has."""
        item = self.parameters[name]
        return (item.holds or item.type.shape)[0]

    def _unplaceable(self, name: str, pin: Pin) -> PartcError:
        if name in self._readers:
            cause = f"{self.ways(name)} ranks share it"
        else:
            cause = (
                "it is no table that one lookup reads, for ids that the axes of the batch cut, with a sparse gradient"
            )
        return PartcError(
            "P0302",
            f"--shard {pin.pattern}={pin.text}: {name} cannot be whole there: {cause}",
            help="whole tables have sparse gradients: nn.Embedding(sparse=True), or --group with rowwise_adagrad",
        )

    def _type(self, type: TensorType, cut: Cut) -> TensorType:
        """The table cut over the axes, with as many rows as that needs."""
        where = type.layout.placements(axis_order(self.sizes))
        rows, *others = type.shape
        for axis, factor in cut:
            where[axis] = Shard(0 if factor == _ROWS else 1)
            rows = -(-rows // self.sizes[axis]) * self.sizes[axis] if factor == _ROWS else rows
        layout = Layout.build((rows, *others), where, self.sizes)
        assert layout is not None  # rows are padded, and the columns divide
        return replace(type, layout=layout)

    def _holds(self, parameter: Parameter, cut: Cut) -> tuple[int, ...]:
        padded = self._type(parameter.type, cut).shape != parameter.type.shape
        return parameter.holds or (parameter.type.shape if padded else ())
