"""Verification of a program's form. It runs after every pass, so that a broken program is caught at its pass."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from partc.errors import InternalError
from partc.ir.collectives import COLLECTIVES, resized
from partc.ir.layout import Layout, Sizes
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import FLOATING, Graph, Op, Program, Region, TensorType, Value


def verify_program(program: Program, facts: Collection[str], after: str, before: Program | None = None) -> None:
    """Raises InternalError with every fault found, naming the pass.

    Parts that the program has in common with `before`, which is well formed, are not verified again. Both programs have
    local shapes, or none of them has.
    """
    faults = list(faults_of(program, facts, before))
    if faults:
        shown = "\n  ".join(faults[:10])
        more = f"\n  and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise InternalError(f"the program is not well formed after {after}:\n  {shown}{more}")


def faults_of(program: Program, facts: Collection[str] = (), before: Program | None = None) -> Iterator[str]:
    """The faults of the program, one sentence each. `facts` are the properties that the passes so far ensure."""
    if before is None or _context(program) != _context(before):
        yield from _program(program)
    for region in changed_regions(program, before):
        yield from _region(region, program, facts)


def changed_regions(program: Program, before: Program | None) -> tuple[Region, ...]:
    """The regions that `before` does not have."""
    known = {id(region) for region in before.regions} if before and before.sizes == program.sizes else ()
    return tuple(region for region in program.regions if id(region) not in known)


def _context(program: Program) -> tuple[object, ...]:
    """Everything that `_program` reads."""
    signatures = [
        (region.name, region.phase, region.kernels, region.params, region.forward.inputs, _defined_outputs(region))
        for region in program.regions
    ]
    names = program.inputs, program.returned, program.results, program.places
    return (
        program.mesh,
        program.sizes,
        names,
        program.values,
        program.parameters,
        program.buckets,
        bool(program.bodies),
        program.calls,
        program.transfers,
        signatures,
    )


def _defined_outputs(region: Region) -> list[Value]:
    """The outputs of a region that its graph defines."""
    known = region.values(region.forward)
    return [known[name] for name in region.forward.outputs if name in known]


def _program(program: Program) -> Iterator[str]:
    yield from _duplicates("region", [region.name for region in program.regions])
    yield from _duplicates("parameter", [parameter.name for parameter in program.parameters])
    yield from _duplicates("program value", [value.name for value in program.values])
    yield from _duplicates("call", [f"{call.name} to stage {call.stage}" for call in program.calls])
    types = program.value_types()
    for name in program.inputs:
        if name not in types:
            yield f"the batch's entry {name} has no type"
    values = [(id(type), (), name, type) for name, type in types.items()]
    weights = [(id(item.type), item.gather, item.name, item.type) for item in program.parameters]
    distinct = {(key, axes): (name, type) for key, axes, name, type in reversed(values + weights)}  # layers share types
    for (_, axes), (name, type) in reversed(distinct.items()):
        yield from _layout(name, type.layout, program.sizes, axes)
    yield from _calls(program)
    if program.buckets or program.bodies:
        yield from _buckets(program)
    kernels = {region.kernels for region in program.regions if region.phase == "microbatch"}
    if len(kernels) > 1:
        yield f"regions have kernels of several sources: {', '.join(sorted(kernels))}"
    for name in program.returned:
        if name not in types:
            yield f"the loss {name} has no type" if not program.results else f"the result {name} has no type"
        elif types[name].shape and not program.results:
            yield f"the loss {name} has shape {types[name].shape}"
    yield from _transfers(program, types)
    if program.places:
        ranks = program.mesh.axis(PIPELINE_AXIS)
        if len(program.places) != program.stages or set(program.places) != set(range(ranks)):
            yield f"{program.stages} stages have places {program.places} of {ranks}"


def _calls(program: Program) -> Iterator[str]:
    """Calls fit their regions, and their stage has the values that they read: computed or received there, or from the
    batch.

    A call on inputs alone appears in every stage that reads it.
    """
    regions = {region.name: region for region in program.regions}
    parameters = {parameter.name: parameter.type for parameter in program.parameters}
    types = program.value_types()
    known = {(stage, name) for name in program.inputs for stage in range(program.stages)}
    received: dict[str, set[int]] = {}
    for item in program.transfers:
        received.setdefault(item.value, set()).add(item.target)
    results = {region.name: _defined_outputs(region) for region in program.regions}
    seen: set[object] = set()
    for call in program.calls:
        region = regions.get(call.region)
        if region is None:
            yield f"call {call.name} is of a region {call.region} that doesn't exist"
            continue
        place = f"call {call.name} of {region.name}"
        for name in call.args:
            if (call.stage, name) not in known:
                yield f"{place} reads {name} before it is made or received in stage {call.stage}"
        given = (types, call.args), (parameters, call.params), (types, call.results)
        same = (region.name, *[tuple(map(id, map(known_types.get, names))) for known_types, names in given])
        if same not in seen:
            seen.add(same)
            yield from _matched(f"{place}: argument", call.args, types, region.forward.inputs)
            yield from _matched(f"{place}: parameter", call.params, parameters, region.params, cast=FLOATING)
            # Once differentiated, a region's outputs are followed by what it saves.
            yield from _matched(f"{place}: result", call.results, types, results[region.name][: len(call.results)])
        for name in call.results:
            if (call.stage, name) in known:
                yield f"{place} makes {name} a second time"
            known.add((call.stage, name))
            known.update((target, name) for target in received.get(name, ()))
    for name in set(program.returned).difference(name for _, name in known):
        yield f"no call makes the {'result' if program.results else 'loss'} {name}"


def _buckets(program: Program) -> Iterator[str]:
    """Each gradient that is summed over ranks is in one bucket of every stage that sums it."""
    buckets = {bucket.name: (bucket.stage, bucket.over, bucket.scattered) for bucket in program.buckets}
    yield from _duplicates("bucket", [bucket.name for bucket in program.buckets])
    holders, owners = program.holders(), program.owners()
    single = {axis for axis, size in program.sizes.items() if size == 1}
    for item in program.parameters:
        wrong = [name for name in item.buckets if name not in buckets]
        if wrong:
            yield f"{item.name} is in bucket {wrong[0]}, which doesn't exist"
            continue
        over = tuple([axis for axis in item.reduce if axis not in single])
        once = item.gather if item.zero == 1 else ()
        wanted: list[tuple[int, tuple[str, ...], bool]] = []
        if once and item.trainable:
            wanted += [(stage, once, True) for stage in holders.get(item.name, ())]
        if over and item.trainable:
            wanted += [(stage, over, False) for stage in owners.get(item.name, ())]
        found = [buckets[name] for name in item.buckets]
        if found != wanted and sorted(found) != sorted(wanted):
            yield f"the gradient of {item.name} is in buckets {list(item.buckets)}, which are not those of its sums"


def _matched(
    what: str,
    given: Sequence[str],
    types: Mapping[str, TensorType],
    wanted: Sequence[Value],
    cast: Collection[str] = (),
) -> Iterator[str]:
    """The faults of values given to a signature, in number, dtype and shape. Dtypes in `cast` are interchangeable."""
    if len(given) != len(wanted):
        yield f"{what}s are {len(given)}, the region has {len(wanted)}"
    for name, value in zip(given, wanted, strict=False):
        if name not in types:
            yield f"{what} {name} doesn't exist"
            continue
        held, read = types[name], value.type
        same = held.dtype == read.dtype or (held.dtype in cast and read.dtype in cast)
        if not same or held.layout.shape != read.layout.shape:
            yield f"{what} {name} is {held}, the region's {value.name} is {read}"


def _transfers(program: Program, types: Mapping[str, TensorType]) -> Iterator[str]:
    yield from _duplicates("transfer", (f"{item.value} to stage {item.target}" for item in program.transfers))
    for item in program.transfers:
        if item.value not in types:
            yield f"a transfer sends {item.value}, which doesn't exist"
        if not 0 <= item.source < item.target < program.stages:
            yield f"{item.value} is sent from stage {item.source} to {item.target}, of {program.stages}"


def _region(region: Region, program: Program, facts: Collection[str]) -> Iterator[str]:
    params = {value.name: value for value in region.params}
    yield from _duplicates(f"parameter of {region.name}", (value.name for value in region.params))
    yield from _graph(f"{region.name}", region, region.forward, params, program, facts)
    made = {**params, **region.forward.definitions()}
    for name in region.saved:
        if name not in made:
            yield f"{region.name} saves {name}, which it doesn't make"
    if region.backward is not None:
        yield from _graph(f"{region.name}, backward", region, region.backward, params, program, facts)
        if region.weight is not None:
            yield from _graph(f"{region.name}, weight", region, region.weight, params, program, facts)
            if tuple(value.name for value in region.weight.inputs) != region.kept:
                yield f"the weight graph of {region.name} doesn't take what is kept for it"
            if region.backward.outputs[len(region.backward.outputs) - len(region.kept) :] != region.kept:
                yield f"the backward graph of {region.name} doesn't return what is kept for its weights"
        taken = {value.name: value.type for value in region.backward.inputs}
        for name in region.saved:
            if name in made and name not in taken:
                yield f"the backward graph of {region.name} doesn't take {name}, which is saved for it"
            elif name in made and taken[name].shape != made[name].type.shape:
                yield f"{region.name} saves {name} as {made[name].type} and takes it back as {taken[name]}"


def _graph(
    place: str, region: Region, graph: Graph, params: Mapping[str, Value], program: Program, facts: Collection[str]
) -> Iterator[str]:
    sizes = {**program.sizes, "mb": 1} if region.phase == "step" else program.sizes
    types = {name: value.type for name, value in params.items()}
    for value in graph.inputs:
        if value.name in types:
            yield f"{place} has two values called {value.name}"
        types[value.name] = value.type
    for name, type in types.items():
        unsound = list(_layout(f"{place}: {name}", type.layout, sizes))
        yield from unsound
        if unsound:
            types[name] = replace(type, layout=_replicated_layout(type))
    for op in graph.ops:
        where = f"{place}: {op.results[0].name if op.results else op.name} = {op.name}"
        missing = [name for name in op.refs() if name not in types]
        for name in missing:
            yield f"{where} reads {name} before it is made"
        unsound = [
            fault for value in op.results for fault in _layout(f"{place}: {value.name}", value.type.layout, sizes)
        ]
        yield from unsound
        if not missing and not unsound:
            yield from _operation(where, op, types, sizes, facts)
        if op.body:
            yield from _body(where, op)
        for value in op.results:
            if value.name in types:
                yield f"{where} makes {value.name} a second time"
            types[value.name] = (
                value.type if not unsound else replace(value.type, layout=_replicated_layout(value.type))
            )
    for name in graph.outputs:
        if name not in types:
            yield f"{place} returns {name}, which it doesn't make"


def _body(where: str, op: Op) -> Iterator[str]:
    """A kernel's body reads only its arguments, and makes all its results."""
    known: dict[str, TensorType | None] = dict.fromkeys(op.refs())
    for inner in op.body:
        for name in inner.refs():
            if name not in known:
                yield f"{where} reads {name} inside, which is none of its arguments"
        known.update((value.name, value.type) for value in inner.results)
    for value in op.results:
        if known.get(value.name) != value.type:
            yield f"{where} makes {value.name}: {value.type}, and inside {known.get(value.name)}"


def _operation(
    where: str, op: Op, types: Mapping[str, TensorType], sizes: Sizes, facts: Collection[str]
) -> Iterator[str]:
    """Axes exist, and collectives and views change the number of elements as they should."""
    axis = dict(op.attrs).get("axis")
    if axis is not None and (not isinstance(axis, str) or axis not in sizes):
        yield f"{where} is over an axis {axis!r} that the mesh doesn't have"
        return
    for choice in op.choices:
        if choice.axis not in sizes:
            yield f"{where} is spread over an axis {choice.axis!r} that the mesh doesn't have"
    first = next(op.refs(), None)
    if first is None or len(op.results) != 1:
        return
    before, after = (
        type.local_elements(sizes) if "local" in facts else math.prod(type.shape)
        for type in (types[first], op.result.type)
    )
    ways = sizes[axis] if isinstance(axis, str) else 1
    if op.name not in COLLECTIVES and op.name not in ("reshape", "permute"):
        return
    wanted = resized(op.name, ways, before) if op.name in COLLECTIVES else before
    if after != wanted:
        yield f"{where} makes {after} elements of {before}, not {wanted}"
    if op.result.type.dtype != types[first].dtype:
        yield f"{where} makes {op.result.type.dtype} of {types[first].dtype}"


def _layout(what: str, layout: Layout, sizes: Sizes, gathered: Collection[str] = ()) -> Iterator[str]:
    """Every axis is known, used once, and divides the dimension that it cuts, unless parts are `gathered` over it."""
    if not layout.axes:
        return
    unknown = [axis for axis in layout.axes if axis not in sizes]
    if unknown:
        yield f"{what} has layout {layout}, with an axis {unknown[0]} that the mesh doesn't have"
        return
    for axis in {axis for axis in layout.axes if layout.axes.count(axis) > 1}:
        yield f"{what} has layout {layout}, with {axis} twice"
    for dim in layout.dims:
        for sub in dim:
            if sub.spare(sizes) and not set(sub.axes) <= set(gathered):
                ways = math.prod(sizes[axis] for axis in sub.axes)
                yield f"{what} has layout {layout}: {sub.size} does not divide by {ways}"


def _replicated_layout(type: TensorType) -> Layout:
    """A replicated layout in place of an invalid one, so that verification can continue."""
    return Layout.replicated(type.shape)


def _duplicates(what: str, names: Iterable[str]) -> Iterator[str]:
    names = [*names]
    if len({*names}) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"there are two {what}s {name}"
        seen.add(name)
