"""Sparse gradients of tables, which only have the rows that lookups read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partc.ir.naming import unique
from partc.ir.program import Program, Value
from partc.passes.tables.lookups import Lookups, slots_of
from partc.rules.updates import UpdateRule, refuse_sparse_gradient


def with_sparse(program: Program, rules: Mapping[str, UpdateRule]) -> Program:
    """Keep sparse gradients only for optimizers that update single rows; row-wise optimizers make gradients sparse."""
    read = {name for name, slots in program.derived(slots_of).items() if slots}
    parameters = []
    for item in program.parameters:
        rule = rules[item.name]
        wanted = item.sparse or rule.kind.by_rows
        sparse = wanted and rule.takes_rows and item.trainable and item.name in read and len(item.type.shape) == 2
        if item.trainable and not sparse:
            refuse_sparse_gradient(item.name, rule, "no lookup asks for rows")
        parameters.append(item if sparse == item.sparse else replace(item, sparse=sparse))
    changed = any(new is not old for new, old in zip(parameters, program.parameters, strict=True))
    return replace(program, parameters=tuple(parameters)) if changed else program


def with_own_parameters(program: Program) -> Program:
    """The program in which each lookup of a sparse table has its own region parameter, so that each adds its rows."""
    sparse = {parameter.name for parameter in program.parameters if parameter.sparse}
    owned = {slot: name for name, slots in program.derived(slots_of).items() if name in sparse for slot in slots}
    for region in program.regions:
        readers, taken = region.forward.readers(), {*region.types(region.forward)}
        more: dict[str, list[Value]] = {}
        renamed: dict[str, dict[str, str]] = {}  # region -> result of a lookup -> name of its table
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


def needs_dense_gradients(lookups: Lookups, rules: Mapping[str, UpdateRule]) -> frozenset[str]:
    """The parameters marked sparse whose gradients must be dense: they are summed over ranks, or have other readers
    than lookups.

    Raises PartcError P0422 if the optimizer of one needs a sparse gradient.
    """
    found: set[str] = set()
    for names in lookups.alike() if any(item.sparse for item in lookups.parameters.values()) else ():
        slots = [slot for name in names for slot in lookups.slots[name]]
        alone = all(slot in lookups.of for slot in slots) and not any(lookups.parameters[n].aliases for n in names)
        over = sorted({axis for slot in slots for axis in lookups.axes.get(slot, ())})
        if alone and (not over or any(lookups.cuts(names))):
            continue
        why = f"{' and '.join(over)} cannot cut it" if alone else "other operations than lookups read it"
        for name in names:
            if lookups.parameters[name].sparse:
                refuse_sparse_gradient(name, rules[name], why)
                found.add(name)
    return frozenset(found)
