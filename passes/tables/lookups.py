"""The lookups of embedding tables in a program, and the ways in which their tables can be cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.ir.layout import Layout, Shard, Sizes
from partc.ir.mesh import TIME_AXIS
from partc.ir.program import FLOATING, Choice, Op, Parameter, Program, Ref, Region, TensorType, Value, needed
from partc.rules import PARTIAL, resolve
from partc.rules.rule import OpRule
from partc.sharding.choices import axis_order, choice_on, layouts

ROWS, COLUMNS = "v", "d"  # factors in the rule of lookups
_BETWEEN = frozenset({"mul", "masked_fill", "where", "to", "alias"})  # operations on vectors before a bag is reduced
_RAGGED = frozenset({"bag_sum", "bag_max"})  # bags of rows that every rank looks up
_REDUCING = frozenset({"sum", "amax"}) | _RAGGED
Slot = tuple[str, str]  # (region, name of its parameter)
Cut = tuple[tuple[str, str], ...]  # axis -> the factor of lookups that it cuts


def slots_of(program: Program) -> dict[str, list[Slot]]:
    """For each parameter of the program, the slots in which calls pass it."""
    slots: dict[str, list[Slot]] = {parameter.name: [] for parameter in program.parameters}
    for call in program.calls:
        for value, name in zip(program.region(call.region).params, call.params, strict=True):
            slots[name].append((call.region, value.name))
    return slots


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup, with the operations up to the reduction of its bags, if any; each with the position of the vectors."""

    op: Op
    after: tuple[tuple[Op, int], ...] = ()

    @property
    def cast(self) -> Op | None:
        """The operation that casts the vectors, if there is one."""
        return self.after[0][0] if self.after and self.after[0][0].name == "to" else None

    @property
    def last(self) -> Op:
        return self.after[-1][0] if self.after else self.op

    @property
    def ids(self) -> str:
        """The name of its ids."""
        _, ids = self.op.refs()
        return ids


@dataclass(frozen=True)
class Lookups:
    """The lookups of a program, and the possible cuts of tables that only lookups read."""

    program: Program
    slots: Mapping[str, Sequence[Slot]]  # by parameter
    parameters: Mapping[str, Parameter]
    of: Mapping[Slot, Sequence[Lookup]]
    types: Mapping[str, Mapping[str, TensorType]]  # by region, of its values
    axes: Mapping[Slot, tuple[str, ...]]  # the axes over which the gradient would be summed

    @property
    def sizes(self) -> Sizes:
        return self.program.sizes

    def alike(self) -> Iterator[list[str]]:
        """Groups of parameters that share slots."""
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

    def ways(self, name: str) -> int:
        """The number of ranks that share a table."""
        return math.prod(self.sizes[axis] for axis in self.axes[self.slots[name][0]])

    def cuts(self, names: Sequence[str]) -> Iterator[Cut]:
        """The possible cuts over all axes over which the gradients would be summed; rows over at most one of them."""
        slots = {slot for name in names for slot in self.slots[name]}
        if not slots or any(slot not in self.of for slot in slots):
            return
        axes = {self.axes[slot] for slot in slots}
        frozen = any(
            not item.trainable or item.type.dtype not in FLOATING or item.aliases
            for item in map(self.parameters.__getitem__, names)
        )
        if frozen or len(axes) != 1 or not (over := next(iter(axes))):
            return
        for factors in itertools.product((ROWS, COLUMNS), repeat=len(over)):
            cut = tuple(zip(over, factors, strict=True))
            if all(self._is_possible(slot, cut) for slot in slots):
                yield cut

    def admits(self, name: str, cut: Cut) -> bool:
        """Whether all lookups in a table allow the cut."""
        slots = self.slots.get(name, [])
        return bool(slots) and all(
            slot in self.of and dict(cut).keys() == {*self.axes[slot]} and self._is_possible(slot, cut)
            for slot in slots
        )

    def _is_possible(self, slot: Slot, cut: Cut) -> bool:
        table = self.types[slot[0]][slot[1]]
        factors = [factor for _, factor in cut]
        rows = factors.count(ROWS)
        if rows > 1 or (rows and any(sub.axes for sub in table.layout.dims[0])):
            return False
        ways = math.prod(self.sizes[axis] for axis, factor in cut if factor == COLUMNS)
        if table.layout.local_shape(self.sizes)[1] % ways:
            return False
        return all(self.recuts(slot, lookup, cut) is not None for lookup in self.of[slot])

    def recuts(self, slot: Slot, lookup: Lookup, cut: Cut) -> list[Op] | None:
        """The lookup and the reduction of its bags with the cut's factors on the axes; None if they do not allow the
        cut.
        """
        types = dict(self.types[slot[0]])
        types[slot[1]] = cut_type(types[slot[1]], cut, self.sizes)
        whole, ops = self._recut(lookup.op, dict(cut), types), list[Op]()
        if whole is None:
            return None
        types[whole.result.name] = whole.result.type
        for op, position in lookup.after:
            rule = resolve(op, types)
            factors = {} if rule is None else {axis: _kept_factor(rule, position, factor) for axis, factor in cut}
            known = {axis: factor for axis, factor in factors.items() if factor is not None}
            changed = self._recut(op, known, types) if len(known) == len(cut) else None
            if changed is None:
                return [whole]
            ops.append(changed)
            types[changed.result.name] = changed.result.type
        return [whole, *ops]

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
        return op.laid_out(found[1])

    def cut_parameter(self, item: Parameter, cut: Cut) -> Parameter:
        """A table cut over the axes. It holds the model's shape, and rows of zeros up to a multiple of the ranks."""
        type = cut_type(item.type, cut, self.sizes)
        return replace(item, type=type, holds=item.holds or (item.type.shape if type.shape != item.type.shape else ()))


def find(program: Program) -> Lookups:
    """The lookups of a program, in parameters that no other operation of a microbatch region reads."""
    lookups: dict[Slot, list[Lookup]] = {}
    types: dict[str, Mapping[str, TensorType]] = {}
    axes: dict[Slot, tuple[str, ...]] = {}
    sizes = program.sizes
    for region in program.regions:
        types[region.name] = region.types(region.forward)
        readers = region.forward.readers()
        for value in region.params:
            ops = readers.get(value.name, ())
            varying = value.type.layout.varying
            several = (name for name, size in sizes.items() if size > 1 and name != TIME_AXIS)
            over = tuple(name for name in several if name in varying)
            alone = region.phase == "microbatch" and value.name not in region.forward.outputs
            if alone and ops and all(_looks_up(op, value, over) for op in ops):
                found = [_with_bag(region, op, over) for op in ops]
                if all(each.last.name in _RAGGED or _are_batched(each.op, over) for each in found):
                    lookups[region.name, value.name] = found
                    axes[region.name, value.name] = over
    parameters = {parameter.name: parameter for parameter in program.parameters}
    return Lookups(program, program.derived(slots_of), parameters, lookups, types, axes)


def calls_of_tables(program: Program) -> Program:
    """The program with only the calls that read tables, and with only their parameters. The cuts of tables depend on no
    others, unless the axis ep is used for tables alone.
    """
    experts = any(op.name == "expert_matmul" for region in program.regions for op in region.forward.ops)
    if program.mesh.expert_axes and not experts:
        return program
    lookups = find(program)
    tables = {name for name, slots in lookups.slots.items() if any(slot in lookups.of for slot in slots)}
    calls = tuple(call for call in program.calls if not tables.isdisjoint(call.params))
    names = {name for call in calls for name in call.params}
    parameters = tuple(item for item in program.parameters if item.name in names)
    return replace(program, calls=calls, parameters=parameters)


def _looks_up(op: Op, table: Value, axes: Sequence[str]) -> bool:
    """Whether an operation looks up rows of a table for ids that all of these axes cut, or none of them."""
    if op.name != "embedding" or op.args[0] != Ref(table.name) or [*op.refs()].count(table.name) > 1:
        return False
    return _are_batched(op, axes) or _uncut(op, axes)


def _are_batched(op: Op, axes: Sequence[str]) -> bool:
    return all(_is_batched(op, axis) for axis in axes)


def _is_batched(op: Op, axis: str) -> bool:
    """Whether the axis cuts a factor of the operation's result."""
    cut = choice_on(op, axis)
    placed = op.result.type.layout.placement(axis) if len(op.results) == 1 else None
    return cut is not None and cut.factor is not None and isinstance(placed, Shard)


def _uncut(op: Op, axes: Sequence[str]) -> bool:
    """Whether the operation is not cut over any of these axes."""
    return all(choice is not None and choice.factor is None for choice in (choice_on(op, axis) for axis in axes))


def _with_bag(region: Region, op: Op, axes: Sequence[str]) -> Lookup:
    """The lookup, with the chain of sole readers up to the operation that reduces its bags."""
    readers, found = region.forward.readers(), list[tuple[Op, int]]()
    vectors = op.result
    while True:
        cast = tuple(found[:1]) if found and found[0][0].name == "to" else ()
        reading = readers.get(vectors.name, ())
        if len(reading) != 1 or vectors.name in region.forward.outputs:
            return Lookup(op, cast)
        (reader,) = reading
        names = list(reader.refs())
        known = reader.name in _BETWEEN or _reduces(reader, vectors)
        cut = _are_batched(reader, axes) or (reader.name in _BETWEEN and _uncut(reader, axes))
        if not known or names.count(vectors.name) > 1 or not cut:
            return Lookup(op, cast)
        found.append((reader, names.index(vectors.name)))
        if reader.name in _REDUCING:
            return Lookup(op, tuple(found))
        if reader.result.type.shape != vectors.type.shape:
            return Lookup(op, cast)
        vectors = reader.result


def _reduces(op: Op, vectors: Value) -> bool:
    """Whether an operation reduces dimensions other than the columns."""
    return op.name in _REDUCING and op.result.type.shape[-1:] == vectors.type.shape[-1:]


def columns(op: Op) -> tuple[Choice, ...]:
    """The choices of the axes that cut the columns of a lookup."""
    return tuple(choice for choice in op.choices if choice.factor == COLUMNS)


def _kept_factor(rule: OpRule, position: int, factor: str) -> str | None:
    """The factor under which an operation on vectors keeps them cut by columns, or partial for a cut by rows; else
    None.
    """
    if factor == ROWS:
        return next((f"{PARTIAL}{i}" for i, group in enumerate(rule.linear) if tuple(group) == (position,)), None)
    names = rule.operands[position][-1]
    return names[-1] if names else None


def cut_type(type: TensorType, cut: Cut, sizes: Sizes) -> TensorType:
    """The type of a table cut over the axes, with rows added as needed."""
    where = type.layout.placements(axis_order(sizes))
    rows, *others = type.shape
    for axis, factor in cut:
        where[axis] = Shard(0 if factor == ROWS else 1)
        rows = -(-rows // sizes[axis]) * sizes[axis] if factor == ROWS else rows
    layout = Layout.build((rows, *others), where, sizes)
    assert layout is not None  # rows are padded, and the columns divide
    return replace(type, layout=layout)


def independent(ops: Sequence[Op], lookups: Sequence[Op]) -> Iterator[tuple[Op, ...]]:
    """Divide lookups into groups in which no ids depend on another lookup of the group."""
    level: dict[str, int] = {}
    ours, groups = {op.results[0].name for op in lookups}, dict[int, list[Op]]()
    for op in ops:
        found = max((level.get(name, 0) for name in op.refs()), default=0)
        if op.results and op.results[0].name in ours:
            groups.setdefault(found, []).append(op)
            found += 1
        level.update((value.name, found) for value in op.results)
    return (tuple(group) for _, group in sorted(groups.items()))


def in_place(ops: Sequence[Op], old: Sequence[Op], new: Sequence[Op]) -> tuple[Op, ...]:
    """The operations with `new` in place of the first of `old`; operations that `new` reads are moved before it."""
    gone = {id(op) for op in old}
    start = next(index for index, op in enumerate(ops) if id(op) in gone)
    rest = [op for op in ops[start:] if id(op) not in gone]
    made = {value.name for op in old for value in op.results}
    before = needed(rest, (name for op in old for name in op.refs() if name not in made))
    first = {id(op) for op in before}
    return (*ops[:start], *before, *new, *(op for op in rest if id(op) not in first))
