"""Parameters that every call concatenates become the rows of one parameter.

    parameter mixtures.0.experts.0.gate.weight: f32[24, 16]
    parameter mixtures.0.experts.1.gate.weight: f32[24, 16]
    …
    reshape_4     = reshape(experts.0.gate.weight, (1, 24, 16))                    # f32[1, 24, 16]
    …
    cat           = cat((reshape_4, reshape_5, reshape_6, reshape_7), 0)           # f32[4, 24, 16]
    cat_2         = permute(cat, (0, 2, 1))                                        # f32[4, 16, 24]
    expert_matmul = expert_matmul(reshape_3, chosen_6, cat_2)                      # f32[128, 24]
  ->
    parameter `mixtures.0.experts.*.gate.weight`: f32[4, 24, 16] stacked
    …
    cat_2         = permute(`experts.*.gate.weight`, (0, 2, 1))                    # f32[4, 16, 24]
    expert_matmul = expert_matmul(reshape_3, chosen_6, cat_2)                      # f32[128, 24]

Experts in separate modules are concatenated like this. The rows of one parameter can be cut over ranks, and are never
copied. Optimizers, checkpoints and plan.json have the model's own parameters: `Parameter.names`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from partc import fuel
from partc.ir.program import Op, Parameter, Program, Region, TensorType, Value
from partc.runtime.place import stacked_names


def stack(program: Program) -> Program:
    """Stack the parameters of every region whose calls allow it."""
    for name in [region.name for region in program.regions]:
        for found in tuple(_side_by_side(program.region(name))):
            stacks = _stacks(program, program.region(name), found)
            if stacks is not None and fuel.may_rewrite("parameters stacked"):
                program = _stacked(program, name, found, stacks)
    return program


@dataclass(frozen=True, slots=True, kw_only=True)
class _SideBySide:
    """A concatenation of a region's parameters: their names, and the name of the stack."""

    rows: tuple[str, ...]
    name: str
    type: TensorType
    result: str
    dropped: frozenset[str]  # results of the operations that join the rows


def _side_by_side(region: Region) -> Iterator[_SideBySide]:
    params = {value.name: value.type for value in region.params}
    makers, readers = region.forward.makers(), region.forward.readers()
    for op in region.forward.ops:
        if op.name != "cat" or op.args[1] != 0:
            continue
        parts = [*op.refs()]
        rows = [_row(name, makers.get(name), params) for name in parts]
        names = [name for name in rows if name is not None]
        alone = all(len(readers[name]) == 1 for name in (*names, *parts))
        outside = {*parts, *names, op.result.name}.isdisjoint(region.forward.outputs)
        name = _name(names)
        if len(names) == len(parts) == len({*names}) and alone and outside and name is not None:
            dropped = frozenset((*parts, op.result.name))
            yield _SideBySide(rows=tuple(names), name=name, type=op.result.type, result=op.result.name, dropped=dropped)


def _row(name: str, maker: Op | None, params: dict[str, TensorType]) -> str | None:
    """The parameter of which a value is the reshape to a single row; None for other values."""
    if maker is None or maker.name != "reshape":
        return None
    (source,) = maker.refs()
    row = source in params and maker.result.type.shape == (1, *params[source].shape)
    return source if row else None


def _name(names: Sequence[str]) -> str | None:
    """The common name, with `*` in place of the numbers 0, 1, …; None if the names differ otherwise."""
    first = names[0] if len(names) > 1 else ""
    for place, letter in enumerate(first if "*" not in first else ""):
        name = f"{first[:place]}*{first[place + 1 :]}"
        if letter == "0" and stacked_names(name, len(names)) == tuple(names):
            return name
    return None


def _stacks(program: Program, region: Region, found: _SideBySide) -> dict[str, tuple[str, ...]] | None:
    """Map the name of each stack to the parameters that are its rows, for all calls; None if the calls don't allow
    it.
    """
    reads = Counter(name for call in program.calls for name in call.params)
    parameters = {item.name: item for item in program.parameters}
    updated = {buffer for buffer, _ in program.updates}
    at = [[value.name for value in region.params].index(name) for name in found.rows]
    stacks: dict[str, tuple[str, ...]] = {}
    for call in program.calls:
        if call.region != region.name:
            continue
        names = tuple(call.params[index] for index in at)
        name, items = _name(names), [parameters[each] for each in names]
        alike = len({replace(item, name="") for item in items}) == 1
        plain = not (items[0].aliases or items[0].sparse or items[0].holds or items[0].balance)
        if name is None or name in parameters or not alike or not plain or not updated.isdisjoint(names):
            return None
        if any(reads[each] > 1 for each in names):
            return None
        stacks[name] = names
    return stacks


def _stacked(program: Program, region: str, found: _SideBySide, stacks: dict[str, tuple[str, ...]]) -> Program:
    first = {names[0]: name for name, names in stacks.items()}
    rows = {each for names in stacks.values() for each in names}

    def joined(item: Parameter) -> Parameter:
        shape = (len(stacks[first[item.name]]), *item.type.shape)
        return replace(item, name=first[item.name], type=item.type.shaped(shape), stacked=True)

    return replace(
        program,
        parameters=tuple(
            joined(item) if item.name in first else item
            for item in program.parameters
            if item.name not in rows or item.name in first
        ),
        calls=tuple(
            replace(
                call, params=tuple(first.get(name, name) for name in call.params if name in first or name not in rows)
            )
            for call in program.calls
        ),
        regions=tuple(_with_stack(each, found) if each.name == region else each for each in program.regions),
    )


def _with_stack(region: Region, found: _SideBySide) -> Region:
    params = tuple(
        Value(name=found.name, type=found.type) if value.name == found.rows[0] else value
        for value in region.params
        if value.name not in found.rows[1:]
    )
    names = {found.result: found.name}
    ops = tuple(
        op.with_operands(names) for op in region.forward.ops if not (op.results and op.results[0].name in found.dropped)
    )
    return replace(region, params=params, forward=replace(region.forward, ops=ops))
