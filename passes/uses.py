"""Let an axis of weights or sequences cut the batch of some calls: regions of their own, and changes of layout between.

    call blocks.0 = block(embed; blocks.0.…) -> out
    call blocks.1 = block(out; blocks.1.…) -> out_2
    call head = head(out_2, labels, count; head.weight) -> loss
  ->
    call blocks.0 = block_batched(embed; blocks.0.…) -> out
    call change_out = change(out; ) -> out_changed
    call blocks.1 = block(out_changed; blocks.1.…) -> out_2
    call head = head(out_2, labels, count; head.weight) -> loss

With `--batch-over 'tp=embed,blocks.0'` the pass `annotate` cuts the batch of `embed` and `block_batched` over tp, and
their weights are whole. Consecutive calls of a region pass values on in one layout. A region `change` has no operation:
its input and its result are the same value in two layouts, and the pass `partition` inserts the collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partc.errors import PartcError
from partc.ir.gradients import input_only
from partc.ir.naming import unique
from partc.ir.program import Call, Graph, Program, Region, TensorType, Value
from partc.sharding.uses import BatchUse

_Axes = tuple[str, ...]


def uses(program: Program, *, batch_over: Sequence[BatchUse] = ()) -> Program:
    """Split regions by the axes that cut their calls' batch, and insert calls that change layouts between them.

    Raises PartcError P0306 for a glob that matches no call.
    """
    over = _over(program, batch_over)
    if not any(over.values()):
        return program
    return _with_changes(_split(program, over), over)


def _over(program: Program, batch_over: Sequence[BatchUse]) -> dict[str, _Axes]:
    """The axes that cut the batch of each call, besides those of the batch itself; calls on inputs alone have none."""
    pure = input_only(program)
    names = [call.name for call in program.calls if call.name not in pure]
    found: dict[str, _Axes] = {call.name: () for call in program.calls}
    for use in batch_over:
        matched: set[str] = set()
        for name in names:
            if globs := use.matched(name):
                matched.update(globs)
                found[name] = (*found[name], use.axis)
        for glob in use.globs:
            if glob not in matched:
                raise PartcError(
                    "P0306",
                    f"--batch-over {use.axis}={glob} matches no call",
                    help=f"the calls are {', '.join(names[:8])}{' …' * (len(names) > 8)}",
                )
    return found


def _split(program: Program, over: Mapping[str, _Axes]) -> Program:
    """The program with one region for each body and each way of cutting its batch."""
    taken = {region.name for region in program.regions}
    own: dict[tuple[str, _Axes], Region] = {}
    for region in program.regions:
        ways = dict.fromkeys(over[call.name] for call in program.calls_to(region.name))
        for axes in ways:
            name = unique(f"{region.name}_batched", taken) if axes and len(ways) > 1 else region.name
            own[region.name, axes] = replace(region, name=name, batch_over=axes)
    calls = tuple(replace(call, region=own[call.region, over[call.name]].name) for call in program.calls)
    return replace(program, regions=tuple(own.values()), calls=calls)


def _with_changes(program: Program, over: Mapping[str, _Axes]) -> Program:
    """The program in which a value passes through a call of its own between calls whose batch is cut differently."""
    types, pure = program.value_types(), input_only(program)
    made = {name: over[call.name] for call in program.calls if call.name not in pure for name in call.results}
    taken, names = set(types), {call.name for call in program.calls}
    region_names = {region.name for region in program.regions}
    changed: dict[tuple[str, _Axes], str] = {}
    regions: dict[tuple[TensorType, _Axes, _Axes], Region] = {}
    calls: list[Call] = []
    values: list[Value] = []
    for call in program.calls:
        args = []
        for name in call.args:
            source, target = made.get(name, over[call.name]), over[call.name]
            if source == target or call.name in pure:
                args.append(name)
                continue
            if (name, target) not in changed:
                type = types[name]
                if (type, source, target) not in regions:
                    graph = Graph(inputs=(Value(name="x", type=type),), ops=(), outputs=("x",))
                    region = Region(name=unique("change", region_names), params=(), forward=graph)
                    regions[type, source, target] = region
                result = changed[name, target] = unique(f"{name}_changed", taken)
                values.append(Value(name=result, type=type))
                own = unique(f"change_{name}", names)
                region = regions[type, source, target]
                calls.append(Call(name=own, region=region.name, params=(), args=(name,), results=(result,)))
            args.append(changed[name, target])
        calls.append(replace(call, args=tuple(args)))
    return replace(
        program,
        regions=(*program.regions, *regions.values()),
        calls=tuple(calls),
        values=(*program.values, *values),
    )
