"""Choose how every operation is spread over the tensor-parallel axis.

    region mlp(x: f32[8, 16, 64]):               region mlp(x: f32[8, 16@tp, 64]):
      up   = linear(x, up.weight)           ->     up   = linear(x, up.weight)      # f32[8, 16, 256@tp]        o@tp
      act  = gelu(up)                              act  = gelu(up)                  # f32[8, 16, 256@tp]        d2@tp
      down = linear(act, down.weight)              down = linear(act, down.weight)  # f32[8, 16, 64] partial(tp)  i@tp

One integer program over the distinct regions, each weighted by its calls, decides every operation's
factor and the placement of every value that crosses calls. First, no matrix product is repeated
and no large weight is replicated where that can be avoided: this is what the axis is for. Then the
bytes communicated (forward, backward and gradient reductions) are minimised; a byte that a rank
computes again counts as a quarter of one sent, so that norms are cut along the sequence; memory
breaks ties. The `--shard` pins restrict the choice and win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partc.assignment import Solution, solve
from partc.errors import InternalError
from partc.layout import Layout, Placement, Replicated, Varying
from partc.pins import Pin
from partc.placing import Places, build
from partc.program import Choice, Program, Region, TensorType
from partc.sharding import axis_order, tensor_axes

OBJECTIVES: Sequence[Mapping[str, float]] = (
    {"repeated_flops": 1.0, "replicated_weights": 1.0},
    {"communication": 1.0, "repeated_bytes": 0.25, "memory": 1e-3, "nesting": 1e-3},
)


def annotate(program: Program, *, pins: Sequence[Pin] = ()) -> Program:
    """Set choices and layouts on the tensor axis. Raises PartcError P0302 for a pin that can't be met."""
    for axis in tensor_axes(program.sizes):
        places = build(program, axis, pins)
        solution = solve(places.problem, OBJECTIVES)
        if solution is None:
            raise InternalError(f"no placement on {axis} satisfies every operation")
        program = _written(program, axis, places, solution)
    return program


def _written(program: Program, axis: str, places: Places, solution: Solution) -> Program:
    """The program with the solution's choices and layouts."""

    def typed(type: TensorType, placement: Placement) -> TensorType:
        where = {name: type.layout.placement(name) for name in axis_order(program.sizes)}
        layout = Layout.build(type.shape, {**where, axis: placement}, program.sizes)
        if layout is None:
            raise InternalError(f"{type} cannot be placed {placement} on {axis}")
        return replace(type, layout=layout)

    def region(old: Region) -> Region:
        varied: set[str] = set()
        ops = []
        for index, op in enumerate(old.forward.ops):
            chosen = solution.chosen["op", old.name, index]
            varied.update(n for n, want in zip(op.refs(), chosen.wants, strict=True) if isinstance(want, Varying))
            makes = zip(op.results, chosen.makes, strict=True)
            results = tuple(replace(value, type=typed(value.type, made)) for value, made in makes)  # type: ignore[arg-type]
            added = () if chosen.label is None else (Choice(axis=axis, factor=chosen.label[0], outer=chosen.label[1]),)  # type: ignore[index]
            ops.append(replace(op, results=results, choices=(*op.choices, *added)))
        inputs = tuple(
            replace(value, type=typed(value.type, places.placement(("in", old.name, str(i)), solution)))
            for i, value in enumerate(old.forward.inputs)
        )
        params = []
        for value in old.params:
            stored = places.placement(("weight", old.name, value.name), solution)
            used = Varying() if value.name in varied and isinstance(stored, Replicated) else stored
            params.append(replace(value, type=typed(value.type, used)))
        return replace(old, params=tuple(params), forward=replace(old.forward, inputs=inputs, ops=tuple(ops)))

    return replace(
        program,
        regions=tuple(map(region, program.regions)),
        values=tuple(
            replace(value, type=typed(value.type, places.placement(("value", value.name), solution)))
            for value in program.values
        ),
        parameters=tuple(
            replace(p, type=typed(p.type, places.placement(("parameter", p.name), solution)))
            for p in program.parameters
        ),
    )
