"""The values of a program that need a gradient, and the readers that supply it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from partc.ir.naming import gradient_name
from partc.ir.operations import effects
from partc.ir.program import NO_GRAD, SPARSE, Graph, Op, Program, Ref, Region, dependents


def trainable_params(program: Program) -> dict[str, frozenset[str]]:
    """For each region, its parameters (relative names) that are trained in some call."""
    trained = {parameter.name for parameter in program.parameters if parameter.trainable}
    found: dict[str, set[str]] = {region.name: set() for region in program.regions}
    for call in program.calls:
        for value, name in zip(program.region(call.region).params, call.params, strict=True):
            if name in trained and value.type.differentiable:
                found[call.region].add(value.name)
    return {name: frozenset(params) for name, params in found.items()}


def trains(program: Program) -> bool:
    """Whether a gradient of the loss reaches a parameter, in a traced program, which may change tensors in place."""
    region, live = program.regions[0], {*trainable_params(program)[program.regions[0].name]}
    first = {value.name: next(op.refs(), "") for op in region.forward.ops for value in op.results}
    for op in region.forward.ops:
        if not effects(op.name).differentiable or live.isdisjoint(op.refs()):
            continue
        live.update(value.name for value in op.results if value.type.differentiable)
        name = next(op.refs()) if op.name.endswith("_") else ""
        while name:  # a change in place also reaches the tensor whose memory its operand shares
            live.add(name)
            name = first.get(name, "")
    return region.forward.outputs[0] in live


def touched_rows(program: Program, stages: Collection[int]) -> dict[str, list[int]]:
    """For each parameter, the rows that each lookup of a step adds to its sparse gradient, on one rank.

    Ids are assumed to be spread evenly over ranks.
    """
    found: dict[str, list[int]] = {}
    by_region: dict[str, list[tuple[str, int]]] = {}
    for call in program.calls:
        if call.stage not in stages:
            continue
        region = program.region(call.region)
        if region.name not in by_region:
            by_region[region.name] = [*_lookups(program, region)]
        names = {value.name: name for value, name in zip(region.params, call.params, strict=True)}
        for param, count in by_region[region.name]:
            found.setdefault(names[param], []).extend([count] * program.microbatches)
    return found


def _lookups(program: Program, region: Region) -> Iterator[tuple[str, int]]:
    """The parameters of a region with sparse gradients, each with the rows that one run adds."""
    params = {gradient_name(value.name): value.name for value in region.params}
    for graph in {id(graph): graph for graph in region.graphs}.values():
        for op in graph.ops:
            attrs = dict(op.attrs)
            if SPARSE in attrs:
                _, ids, *_ = op.refs()
                axis = attrs.get("axis")
                count = region.types(graph)[ids].local_elements(program.sizes)
                yield params[op.result.name], count if axis is None else -(-count // program.sizes[str(axis)])


def gradient_inputs(program: Program) -> dict[str, frozenset[str]]:
    """For each region, its inputs whose gradient some call returns to an earlier one."""
    trainable = trainable_params(program)
    needs: dict[str, set[str]] = {region.name: set() for region in program.regions}
    lives: dict[tuple[str, int], set[str]] = {}  # by region and the number of its needs; a region's needs only grow
    while True:
        owing: set[str] = set()
        before = sum(map(len, needs.values()))
        for call in program.calls:
            region = program.region(call.region)
            for value, name in zip(region.forward.inputs, call.args, strict=True):
                if name in owing and value.type.differentiable:
                    needs[region.name].add(value.name)
            key = region.name, len(needs[region.name])
            if key not in lives:
                lives[key] = reached(region.forward, needs[region.name] | trainable[region.name])
                taken = {value.name for value in region.backward.inputs} if region.backward else set()
                lives[key] |= {out for out in region.forward.outputs if gradient_name(out) in taken}  # by own gradients
            live = lives[key]
            owing.update(name for name, out in zip(call.results, region.forward.outputs, strict=True) if out in live)
        if sum(map(len, needs.values())) == before:
            return {name: frozenset(inputs) for name, inputs in needs.items()}


def arguments_with_gradients(program: Program) -> frozenset[tuple[str, str, int]]:
    """The arguments of calls that receive a gradient, as (call, argument, stage).

    An argument that is only detached, by its call or by later ones, receives none. In a differentiated region the
    backward graph says so: its forward graph has no `detach` any more, and no gradients that the model defines itself.
    """
    through = {
        (region.name, value.name): _through(region, value.name)
        for region in program.regions
        for value in region.forward.inputs
    }
    wanted, found = {*program.returned}, set()
    for call in reversed(program.calls):
        graph = program.region(call.region).forward
        outputs = {out for out, name in zip(graph.outputs, call.results, strict=False) if name in wanted}
        for value, name in zip(graph.inputs, call.args, strict=True):
            if outputs & through[call.region, value.name]:
                found.add((call.name, name, call.stage))
                wanted.add(name)
    return frozenset(found)


def _through(region: Region, value: str) -> set[str]:
    """The outputs of a region by which an input receives a gradient."""
    if region.backward is None:
        return reached(region.forward, (value,))
    gradient, given = gradient_name(value), {item.name for item in region.backward.inputs}
    if gradient not in region.backward.outputs:
        return set()
    return {
        out
        for out in region.forward.outputs
        if gradient_name(out) not in given or gradient in dependents(region.backward.ops, (gradient_name(out),))
    }


def reached(graph: Graph, roots: Iterable[str]) -> set[str]:
    """The floating-point values whose gradient reaches the roots, the roots included. As in autograd, zeros count."""
    live = set(roots)
    for op in graph.ops:
        if effects(op.name).differentiable and any(name in live for name in op.refs()):
            live.update(value.name for value in op.results if value.type.differentiable)
    return live


def passing(graph: Graph) -> set[str]:
    """The values to which the gradient of the first output, the loss, passes. As in autograd, zeros count."""
    found = {graph.outputs[0]}
    for op in reversed(graph.ops):
        silent = (NO_GRAD, True) in op.attrs or not effects(op.name).differentiable
        if not silent and any(value.name in found for value in op.results):
            found.update(op.refs())
    return found


def without_own_gradients(graph: Graph) -> Graph:
    """The graph without the gradients that the model defines itself, also in the steps of its scans.

    (y,) = own_gradient((value,), (x,), (g,))   ->   readers of y read value; an output y is alias(value)
    """
    same: dict[str, str] = {}
    ops = []
    for op in graph.ops:
        if op.name == "own_gradient":
            pairs = [*zip(op.results, op.renamed(same).refs(), strict=False)]
            same.update((value.name, name) for value, name in pairs)
            ops += [
                Op(name="alias", args=(Ref(name),), results=(value,), source=op.source)
                for value, name in pairs
                if value.name in graph.outputs
            ]
            continue
        attrs = tuple((key, without_own_gradients(x) if isinstance(x, Graph) else x) for key, x in op.attrs)
        ops.append(replace(op.with_operands(same), attrs=attrs))
    return replace(graph, ops=tuple(ops)).without_dead() if tuple(ops) != graph.ops else graph


def input_only(program: Program) -> frozenset[str]:
    """Names of the calls whose results depend on inputs and constants only."""
    trainable = {parameter.name for parameter in program.parameters if parameter.trainable}
    pure_values = set(program.inputs)
    calls = set()
    for call in program.calls:
        if not trainable.intersection(call.params) and pure_values.issuperset(call.args):
            calls.add(call.name)
            pure_values.update(call.results)
    return frozenset(calls)
