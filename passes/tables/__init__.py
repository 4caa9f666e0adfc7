"""Cut embedding tables over the axes over which their gradients would have to be summed.

    parameter embed.weight: f32[16, 8]
    embed = embedding(embed.weight, ids)  # f32[8@dp, 4, 8]
  ->
    parameter embed.weight: f32[16, 8@dp]
    embed = embedding(embed.weight, ids)  # f32[8, 4, 8@dp]

With a cut by rows, every rank looks up the ids of all ranks in its rows; partition gathers the ids and scatters the
sums of the vectors. Or ids travel to the ranks of their rows, and vectors back (exchange.py), if that moves fewer
bytes. With a cut by columns, every rank looks up its columns for the ids of all ranks, and an all-to-all of the vectors
returns whole rows. Backward exchanges the vectors' gradients. A bag is reduced before its vectors are exchanged. No
rank holds a whole table, its gradient or its optimizer state, and nothing as large as the table moves.

A table that only lookups read is cut if the exchange of vectors costs less than sums of its gradient (and ZeRO's
gathers) would, or if its gradient is sparse. With more ranks than devices in a node, a byte of an exchange counts as
eight, since sums cross the links between nodes once for all devices of a node. Of rows and columns on each axis, the
cut that moves the fewest bytes is chosen; an exchange by rows that no other table shares is charged for its copies as
well. Pins decide first. Rows of zeros are added where an axis does not divide them; no id looks them up.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from partc import fuel
from partc.ir.layout import Shard, Sizes
from partc.ir.mesh import holds_weights_whole
from partc.ir.program import Op, Parameter, Program, Region
from partc.passes.tables.choice import Choices
from partc.passes.tables.costs import Costs
from partc.passes.tables.exchange import exchange_groups, exchange_operations
from partc.passes.tables.lookups import COLUMNS, ROWS, Cut, Lookups, cut_type, find, in_place, independent
from partc.passes.tables.sparse import needs_dense_gradients, with_own_parameters, with_sparse
from partc.passes.tables.stacks import Stacks
from partc.rules.updates import DEFAULT, UpdateRule, updates
from partc.sharding.pins import Pin


def tables(
    program: Program,
    *,
    zero: int = 0,
    pins: Sequence[Pin] = (),
    optimizer: str = DEFAULT,
    group: Sequence[str] = (),
    cut_tables: Mapping[str, Cut] | None = None,
    sparse_tables: Collection[str] = (),
    stacks: Sequence[Parameter] = (),
) -> Program:
    """Place tables, and decide which gradients are sparse.

    `cut_tables`, `sparse_tables` and `stacks` are the cuts, the sparse gradients and the stacks of whole tables of a
    training, for its evaluation.

    Raises PartcError P0422 for a sparse gradient that is not possible.
    """
    rules = updates(program, optimizer, group)
    if cut_tables is None:
        placement = _placement(program, zero, pins, rules, densify=True)
    else:
        parameters = tuple(replace(item, sparse=item.name in sparse_tables) for item in program.parameters)
        lookups = find(with_own_parameters(replace(program, parameters=parameters)))
        placement = Stacks(Choices(lookups, Costs(lookups, zero), pins, rules))
    lookups, choices = placement.lookups, placement.choices
    program = lookups.program
    cuts = choices.chosen() if cut_tables is None else cut_tables
    cuts = {name: cut for name, cut in cuts.items() if cut}
    ranks = placement.placed(cuts) if cut_tables is None else placement.placed_as(stacks)
    cuts = {name: cut for name, cut in cuts.items() if name not in ranks}
    program = _cut(lookups, choices.costs, cuts) if cuts and fuel.may_rewrite("embedding tables cut") else program
    return placement.stacked(program, ranks) if ranks and fuel.may_rewrite("whole tables placed") else program


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

    `program` is the pass's input; the bytes are those that a rank sends in a step. Empty for other parameters.
    """
    placement = _placement(program, zero, pins, updates(program, optimizer, group), densify=False)
    lookups, choices, costs = placement.lookups, placement.choices, placement.choices.costs
    slots = lookups.slots.get(name, [])
    if not slots or any(slot not in lookups.of for slot in slots):
        return ()
    type = lookups.parameters[name].type
    options = {cut: (f"{cut_type(type, cut, lookups.sizes)}", costs.moved(name, cut)) for cut in lookups.cuts([name])}
    cuts = choices.chosen()
    chosen, placed = cuts.get(name), placement.placed(cuts).get(name)
    if placed is not None:
        ways = lookups.ways(name)
        first = f"{type} whole on rank {placed[1]} of {ways}", placement.traffic(name) / ways
        return (first, *sorted(options.values(), key=_bytes))
    whole = f"{type}{' in parts' * bool(zero)}", float(costs.whole(name))
    rest = sorted((*(each for cut, each in options.items() if cut != chosen), *([whole] if chosen else [])), key=_bytes)
    return (options[chosen] if chosen else whole, *rest)


def _placement(
    program: Program, zero: int, pins: Sequence[Pin], rules: Mapping[str, UpdateRule], *, densify: bool
) -> Stacks:
    """The choices for a program's tables. With `densify`, gradients that would be sums over ranks become dense."""
    lookups = find(with_own_parameters(with_sparse(program, rules)))
    if densify and (whole := needs_dense_gradients(lookups, rules)):
        parameters = (
            replace(item, sparse=item.sparse and item.name not in whole) for item in lookups.program.parameters
        )
        lookups = find(replace(lookups.program, parameters=tuple(parameters)))
    return Stacks(Choices(lookups, Costs(lookups, zero), pins, rules))


def _bytes(option: tuple[str, float]) -> float:
    return option[1]


def table_cut(parameter: Parameter, sizes: Sizes) -> Cut:
    """The cut of a table in a finished program, over axes along which other weights are whole; empty for other
    parameters.
    """
    layout, over = parameter.type.layout, [axis for axis in sizes if holds_weights_whole(axis)]
    if len(parameter.type.shape) != 2:
        return ()
    found = {axis: layout.placement(axis) for axis in over if axis not in parameter.gather}
    dims = {axis: where.dim for axis, where in found.items() if isinstance(where, Shard)}
    return tuple((axis, (ROWS, COLUMNS)[dim]) for axis, dim in dims.items())


def _cut(lookups: Lookups, costs: Costs, cuts: Mapping[str, Cut]) -> Program:
    cuts = {name: cut for name, cut in cuts.items() if lookups.admits(name, cut)}
    by_slot = {slot: cut for name, cut in cuts.items() for slot in lookups.slots[name]}
    parameters = tuple(
        lookups.cut_parameter(item, cuts[item.name]) if item.name in cuts else item
        for item in lookups.program.parameters
    )
    regions = tuple(
        _region(lookups, costs, region, {name: cut for (each, name), cut in by_slot.items() if each == region.name})
        for region in lookups.program.regions
    )
    return replace(lookups.program, parameters=parameters, regions=regions)


def _region(lookups: Lookups, costs: Costs, region: Region, cuts: Mapping[str, Cut]) -> Region:
    if not cuts:
        return region
    params = tuple(
        replace(value, type=cut_type(value.type, cuts[value.name], lookups.sizes)) if value.name in cuts else value
        for value in region.params
    )
    changed: dict[str, tuple[Op, ...]] = {}
    types = {**lookups.types[region.name], **{value.name: value.type for value in params}}
    exchanging: dict[str, list[Op]] = {}
    casts: dict[str, Op] = {}
    for name, cut in cuts.items():
        for lookup in lookups.of[region.name, name]:
            slot = region.name, name
            if costs.exchanges(slot, lookup, cut):
                exchanging.setdefault(cut[0][0], []).append(lookup.op)
                casts |= {lookup.op.result.name: lookup.cast} if lookup.cast else {}
                continue
            recut = lookups.recuts(slot, lookup, cut)
            assert recut is not None
            changed |= {op.result.name: (op,) for op in recut}
    steps = [changed.get(op.results[0].name, (op,)) if op.results else (op,) for op in region.forward.ops]
    forward = tuple(itertools.chain.from_iterable(steps))
    taken = {*lookups.types[region.name]}
    for axis, ops in exchanging.items():
        for some in exchange_groups(ops, casts, types, lookups.sizes):
            for few in independent(forward, some):
                old = (*few, *(casts[op.result.name] for op in few if op.result.name in casts))
                forward = in_place(forward, old, exchange_operations(few, casts, axis, types, lookups.sizes, taken))
    return replace(region, params=params, forward=replace(region.forward, ops=forward))
