"""Tables that each lie whole on one rank, as rows of stacked parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partc.errors import PartcError
from partc.ir.naming import unique
from partc.ir.program import Parameter, Program, Region, needed
from partc.passes.tables.choice import Choices
from partc.passes.tables.lookups import Cut, Lookups, in_place, independent
from partc.passes.tables.whole import (
    Exchange,
    Reader,
    TableStack,
    in_one_piece,
    rank_local_reader,
    shape_key,
    stack_name,
    stacked_type,
)
from partc.sharding import table_placement
from partc.sharding.pins import Pin
from partc.sharding.table_placement import WholeTable


@dataclass(frozen=True)
class Stacks:
    """Places tables whole on ranks, and rewrites programs accordingly."""

    choices: Choices

    @property
    def lookups(self) -> Lookups:
        return self.choices.lookups

    def placed(self, cuts: Mapping[str, Cut]) -> dict[str, tuple[Hashable, int]]:
        """The kind and rank of each table that is placed whole, given the cuts of all tables."""
        pins = [pin for pin in self.choices.pins if pin.whole]
        wanted = {name: pin for name in self.lookups.parameters for pin in pins if pin.matches(name)}
        for name, pin in wanted.items():
            if name not in self._readers or (pin.rank is not None and pin.rank >= self.lookups.ways(name)):
                raise self._unplaceable(name, pin)
        candidates = {
            name: found
            for name, found in self._readers.items()
            if name in wanted or (name in cuts and not self.choices.pins_of(name))
        }
        if not candidates:
            return {}
        kinds = {each: number for number, each in enumerate(dict.fromkeys(each for each, _ in candidates.values()))}
        given = [
            WholeTable(
                name=name,
                kind=kinds[alike],
                bytes=self.lookups.parameters[name].type.local_bytes(self.lookups.sizes),
                traffic=self.traffic(name),
                spread=self.choices.costs.spread(name, cuts[name]) if name in cuts else 0.0,
                whole=name in wanted,
                rank=wanted[name].rank if name in wanted else None,
            )
            for name, (alike, _) in candidates.items()
        ]
        ways = self.lookups.ways(next(iter(candidates)))
        ranks = table_placement.best_placement(given, ways, self.choices.costs.starts(ways)).ranks
        # Equal tables swap ranks, so that vectors come in the model's order.
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

    def placed_as(self, stacks: Sequence[Parameter]) -> dict[str, tuple[Hashable, int]]:
        """The kind and rank of each whole table, as in a training."""
        found: dict[str, tuple[Hashable, int]] = {}
        for stack in stacks:
            if len({self._readers[name][0] if name in self._readers else name for name in stack.names}) > 1:
                continue  # evaluation reads these tables differently from the training
            for name, first, _ in stack.members:
                if name in self._readers:
                    found[name] = stack.name, first // (stack.type.shape[0] // self.lookups.ways(name))
        return found

    def stacked(self, program: Program, whole: Mapping[str, tuple[Hashable, int]]) -> Program:
        """The program whose whole tables are rows of stacks, and whose ids and vectors travel together."""
        names = [name for name in self.lookups.slots if name in whole]
        slot, *_ = self.lookups.slots[names[0]]
        region, over, ways = program.region(slot[0]), self.lookups.axes[slot], self.lookups.ways(names[0])
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
            first = self.lookups.parameters[some[0]]
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
                type=stacked_type(first.type, rows, over, self.lookups.sizes),
                holds=(),
                members=tuple(members),
            )
            joined[some[0]] = item
            value = next(each for each in region.params if each.name == self.lookups.slots[some[0]][0][1])
            param = replace(
                value,
                name=unique(stack_name([self.lookups.slots[name][0][1] for name in some], ()), taken),
                type=stacked_type(value.type, rows, over, self.lookups.sizes),
            )
            stacks.append(TableStack(param=param, ranks=tuple(ranked)))
        return _with_stacks(program, region, self._readers, whole, joined, stacks, over, taken)

    @cached_property
    def _readers(self) -> dict[str, tuple[Hashable, Reader]]:
        """The tables that can be whole (sparse, read by one lookup of one region), each with its kind."""
        calls = Counter(call.region for call in self.lookups.program.calls)
        found: dict[Hashable, dict[str, tuple[Hashable, Reader]]] = {}
        for name, slots in self.lookups.slots.items():
            item = self.lookups.parameters[name]
            if len(slots) != 1 or slots[0] not in self.lookups.of or len(self.lookups.of[slots[0]]) != 1:
                continue
            ((region, value),), (lookup,) = slots, self.lookups.of[slots[0]]
            if (
                calls[region] != 1
                or not item.sparse
                or not item.trainable
                or item.aliases
                or item.holds[1:] != item.type.shape[1:] * bool(item.holds)
            ):
                continue
            over, types = self.lookups.axes[slots[0]], self.lookups.types[region]
            first, *inner = types[lookup.ids].layout.normalized(self.lookups.sizes).dims[0]
            made = rank_local_reader(value, lookup.op, lookup.after, types)
            if made is None or not over or inner or first.axes[: len(over)] != over:
                continue
            alike = (shape_key(made, types), self.choices.rules[name])
            found.setdefault((region, first), {})[name] = alike, made
        best: dict[str, tuple[Hashable, Reader]] = {}
        for (region, _), some in found.items():  # type: ignore[misc]
            lookups = {id(each.op): name for name, (_, each) in some.items()}
            forward = self.lookups.program.region(region).forward.ops
            for group in independent(forward, [each.op for _, each in some.values()]):
                names = [lookups[id(op)] for op in group]
                best = max(best, {name: some[name] for name in names}, key=len)
        return best

    def traffic(self, name: str) -> float:
        """The bytes that a rank sends in a step for one slot of the table's kind on every other rank."""
        _, found = self._readers[name]
        types = self.lookups.types[self.lookups.slots[name][0][0]]
        ids, vectors = types[found.ids], found.last.result.type
        each = ids.local_bytes(self.lookups.sizes) + 2 * vectors.local_bytes(self.lookups.sizes)
        return float(each * (self.lookups.ways(name) - 1) * self.lookups.program.microbatches)

    def _rows(self, name: str) -> int:
        """The number of rows in the model."""
        item = self.lookups.parameters[name]
        return (item.holds or item.type.shape)[0]

    def _unplaceable(self, name: str, pin: Pin) -> PartcError:
        if name in self._readers:
            cause = f"{self.lookups.ways(name)} ranks share it"
        else:
            cause = "that needs one lookup that reads it, ids that the batch's axes cut, and a sparse gradient"
        return PartcError(
            "P0302",
            f"--shard {pin.pattern}={pin.text}: {name} cannot be whole on that rank: {cause}",
            help="whole tables have sparse gradients: nn.Embedding(sparse=True), or --group with rowwise_adagrad",
        )


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
    """The program with stacks in place of their tables; `joined` maps their first tables to their parameters."""
    found = [readers[name][1] for name in whole]
    old = [op for each in found for op in (each.op, *(step for step, _ in each.after))]
    tables = {each.table for each in found}
    types = {**region.types(region.forward), **{stack.param.name: stack.param.type for stack in stacks}}
    exchange = Exchange(
        types=types, sizes=program.sizes, taken=taken, source=found[0].op.source, stacks=stacks, over=over
    )
    forward = in_place(region.forward.ops, old, exchange.made())
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
