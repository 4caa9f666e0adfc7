"""Values that are contiguous in memory: kernels need no strides for these.

All values between regions are assumed dense until a counterexample is found: a call's results are as dense as its
region makes them, a sum of gradients is as dense as its summands, and received values are dense. Batch entries may be
strided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from partc.ir.collectives import MOVING
from partc.ir.naming import gradient_name
from partc.ir.program import Graph, Op, Program, Ref, Region
from partc.rules import kernels

# Elementwise operations; PyTorch lays out their results like the first operand of that shape.
_ARITHMETIC = frozenset({"add", "sub", "mul", "div"})


def dense(program: Program) -> Mapping[str, frozenset[str]]:
    """For each region, the names of the dense values in all its graphs."""
    loose: dict[str, set[str]] = {region.name: set() for region in program.regions}  # inputs that may be strided
    while True:
        found = {region.name: _dense_in(region, loose[region.name]) for region in program.regions}
        more = False
        for name, inputs in _strided(program, found):
            more = more or not inputs <= loose[name]
            loose[name] |= inputs
        if not more:
            return found


def _strided(program: Program, found: Mapping[str, frozenset[str]]) -> Iterable[tuple[str, set[str]]]:
    """The inputs and gradients of regions for which some call passes a value that is not known to be dense."""
    unknown = set(program.inputs)
    back: set[str] = set()  # program values with a reader that returns a strided gradient
    for call in program.calls:
        region = program.region(call.region)
        unknown.update(
            name
            for name, output in zip(call.results, region.forward.outputs, strict=False)
            if output not in found[region.name]
        )
        made = () if region.backward is None else region.backward.outputs
        for name, value in zip(call.args, region.forward.inputs, strict=True):
            if gradient_name(value.name) in made and gradient_name(value.name) not in found[region.name]:
                back.add(name)
    for call in program.calls:
        region = program.region(call.region)
        yield region.name, {v.name for name, v in zip(call.args, region.forward.inputs, strict=True) if name in unknown}
        outputs = zip(call.results, region.forward.outputs, strict=False)
        yield region.name, {gradient_name(output) for name, output in outputs if name in back}


def _dense_in(region: Region, strided: Collection[str]) -> frozenset[str]:
    shapes = {name: type.shape for graph in region.graphs for name, type in region.types(graph).items()}
    params = {value.name for value in region.params}
    inputs = {value.name for value in region.forward.inputs} - set(strided)
    found = _dense_values(region.forward, shapes, params | inputs)
    if region.backward is not None:
        incoming = {value.name for value in region.backward.inputs} - set(region.saved) - set(strided)
        found |= _dense_values(region.backward, shapes, params | incoming | (found & set(region.saved)))
    if region.weight is not None:
        found |= _dense_values(region.weight, shapes, params | (found & set(region.kept)))
    return frozenset(found)


def _dense_values(graph: Graph, shapes: Mapping[str, tuple[int, ...]], given: Iterable[str]) -> set[str]:
    found = set(given)
    for op in graph.ops:
        if _keeps(op, found, shapes):
            found.update(value.name for value in op.results)
    return found


def _keeps(op: Op, dense: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the operation's results are dense, given its dense operands."""
    first = op.args[0] if op.name in _ARITHMETIC else None
    if isinstance(first, Ref) and first.name in dense and shapes[first.name] == op.result.type.shape:
        return True
    if op.name in kernels.CONTIGUOUS or not any(True for _ in op.refs()):
        return True
    if op.name not in MOVING | {"reshape", "alias", "cat", "sum"} and kernels.kind(op) != "pointwise":
        return False
    return all(name in dense for name in op.refs())
