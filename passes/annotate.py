"""Choose how every operation is spread over the tensor-parallel axis.

    region mlp(x: f32[8, 16, 64]):               region mlp(x: f32[8, 16@tp, 64]):
      up   = linear(x, up.weight)           ->     up   = linear(x, up.weight)      # f32[8, 16, 256@tp]        o@tp
      act  = gelu(up)                              act  = gelu(up)                  # f32[8, 16, 256@tp]        d2@tp
      down = linear(act, down.weight)              down = linear(act, down.weight)  # f32[8, 16, 64] partial(tp)  i@tp

One integer program over the distinct regions, each weighted by its calls, decides every operation's
factor and the placement of every value that crosses calls. First, no matrix product is repeated
and no large weight is replicated, nor moved, where that can be avoided: this is what the axis is for. Embedding
tables are cut by rows, as the output layer is, so that tied and untied models store alike. Then the
bytes communicated (forward, backward and gradient reductions) are minimised; a byte that a rank
computes again counts as a quarter of one sent, so that norms are cut along the sequence; memory
breaks ties. The `--shard` pins restrict the choice and win.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.assignment import Solution, solve
from partc.errors import InternalError, PartcError
from partc.layout import Layout, Placement, Replicated, Varying
from partc.pins import Pin, check_pins
from partc.placing import Places, build, spelled
from partc.program import Choice, Program, Region, TensorType
from partc.sharding import axis_order, tensor_axes
from partc.trial import check_rules

OBJECTIVES: Sequence[Mapping[str, float]] = (
    {"repeated_flops": 1.0},
    {"replicated_weights": 1.0, "moved_weights": 1.0, "table_columns": 0.5},
    {"communication": 1.0, "repeated_bytes": 0.25, "memory": 1e-3, "nesting": 1e-3},
)


def annotate(program: Program, *, pins: Sequence[Pin] = ()) -> Program:
    """Set choices and layouts on the tensor axis. Raises PartcError P0302 and P0303 for a pin that can't be met,
    and P0315 for a rule of the user's that is wrong.
    """
    check_pins(program, pins)
    check_rules(program)
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

    varied = _varied(program, places, solution)

    def region(old: Region) -> Region:
        ops = []
        for index, op in enumerate(old.forward.ops):
            chosen = solution.chosen["op", old.name, index]
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
            slot = ("weight", old.name, value.name)
            stored = places.placement(slot, solution)
            used = Varying() if places.owners[slot] in varied and isinstance(stored, Replicated) else stored
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


def _varied(program: Program, places: Places, solution: Solution) -> set[Hashable]:
    """The weights that some operation, in whatever region, uses differently on each rank.

    Their gradients are partial sums everywhere then, also where another region uses them alike: one
    reduction at the end of the step serves all uses.
    """
    found: set[Hashable] = set()
    for region in program.regions:
        params = {value.name for value in region.params}
        for index, op in enumerate(region.forward.ops):
            wants = solution.chosen["op", region.name, index].wants
            for name, want in zip(op.refs(), wants, strict=True):
                if name in params and isinstance(want, Varying):
                    found.add(places.owners["weight", region.name, name])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A placement that a value could have had, and what the whole step would then cost more."""

    placement: str
    communication: float  # bytes per rank, microbatch and step
    repeated_flops: float
    replicated_weights: float  # bytes
    repeated_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a value or parameter is placed as it is: the choice, then the others from best to worst."""

    name: str
    axis: str
    chosen: Option
    others: tuple[Option, ...]


def explain(program: Program, name: str, *, pins: Sequence[Pin] = ()) -> tuple[Explanation, ...]:
    """What was chosen on each tensor axis for a parameter, a program value or a `region.value`.

    `program` is as annotate takes it. Others are solved anew with the placement forced; what they
    cost is the difference. Raises PartcError P0304 for a name that nothing has.
    """
    found = []
    for axis in tensor_axes(program.sizes):
        places = build(program, axis, pins)
        deciders = places.deciders(name)
        if deciders is None:
            raise PartcError(
                "P0304",
                f"nothing is called {name!r}",
                help="use a parameter's full name, a program value, or region.value",
            )
        node, seen, type = deciders
        best = solve(places.problem, OBJECTIVES)
        if best is None:
            raise InternalError(f"no placement on {axis} satisfies every operation")
        chosen = seen(best.chosen[node])
        alternatives = next(item for item in places.problem.nodes if item.name == node).alternatives
        options = []
        for placement in dict.fromkeys(seen(choice) for choice in alternatives):
            forbid = frozenset((node, choice.label) for choice in alternatives if seen(choice) != placement)
            forced = best if placement == chosen else solve(places.problem, OBJECTIVES, forbid=forbid)
            if forced is not None:
                options.append((placement, _option(spelled(type, placement, axis), forced.totals, best.totals)))
        rank = lambda item: (item.replicated_weights + item.repeated_flops, item.communication, item.repeated_bytes)  # noqa: E731
        others = sorted((option for placement, option in options if placement != chosen), key=rank)
        first = next(option for placement, option in options if placement == chosen)
        found.append(Explanation(name=name, axis=axis, chosen=first, others=tuple(others)))
    return tuple(found)


def _option(placement: str, totals: Mapping[str, float], best: Mapping[str, float]) -> Option:
    more = {
        key: totals.get(key, 0.0) - best.get(key, 0.0)
        for key in ("communication", "repeated_flops", "replicated_weights", "repeated_bytes")
    }
    return Option(placement=placement, **more)
