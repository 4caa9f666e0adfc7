"""Choose the distribution of every operation over the axes cp and tp.

    up_product   = linear(norm, up.weight)    # f32[8, 4, 32]
    gelu         = gelu(up)                   # f32[8, 4, 32]
    down_product = linear(gelu, down.weight)  # f32[8, 4, 8]
  ->
    up_product   = linear(norm, up.weight)    # f32[8, 4, 32@tp] | {b0@mb o@tp}
    gelu         = gelu(up)                   # f32[8, 4, 32@tp] | {d0@mb d2@tp}
    down_product = linear(gelu, down.weight)  # f32[8, 4, 8] partial(tp) | {b0@mb i@tp}

One integer program over the distinct regions, each weighted by the number of its calls, decides every operation's
factor and the placement of every value that crosses calls. Its objectives, in order:

1. No matrix product is repeated, and no large weight is replicated or moved, where this can be avoided. Embedding
tables are cut by rows like the output layer, so that tied and untied models are stored alike.

2. The fewest bytes are communicated (forward, backward and gradient reductions). A byte that ranks compute redundantly
counts as a quarter of a byte sent, so that norms are cut along the sequence. Values that stay within one kernel are not
counted: the results of experts that tp cuts are scaled and added up by token before they are summed over the ranks.
Values that cross calls count once more where they are whole. Each collective also costs a hundredth of the bytes of the
largest value that crosses calls, which stands for its latency. A small value is therefore gathered once, before it is
split.

3. The least memory is used.

Over cp weights stay whole, so that repeating no matrix product means that sequences are cut. Attention changes to heads
and back (Jacobs et al. 2023, DeepSpeed-Ulysses, section 3).

A value that several calls read, such as an encoder's results, may be whole and vary over the ranks: it is gathered
once, and the calls' gradients are added up before they are summed over the ranks.

The `--shard` pins restrict the choice and take precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial

from partc.errors import InternalError, PartcError
from partc.ir.attention import Attention
from partc.ir.layout import Layout, Placement, Replicated, Shard, Varying
from partc.ir.mesh import holds_weights_whole
from partc.ir.program import Choice, Program, Region, TensorType
from partc.rules import RING
from partc.rules.trial import check_rules
from partc.sharding.assignment import Alternative, Solution, solve
from partc.sharding.choices import axis_order, placed_axes
from partc.sharding.nesting import inside_weight_axes
from partc.sharding.pins import Pin, check_pins, named_values
from partc.sharding.placements import Places, build, placement_text

OBJECTIVES: Sequence[Mapping[str, float]] = (
    {"repeated_flops": 1.0},
    {"replicated_weights": 1.0, "moved_weights": 1.0, "table_columns": 0.5},
    {"communication": 1.0, "collectives": 0.01, "repeated_bytes": 0.25, "memory": 1e-3, "nesting": 1e-3},
)
_NAMES = "use a parameter's full name, a program value, or region.value"


def annotate(program: Program, *, pins: Sequence[Pin] = (), expert_axes: tuple[str, ...] = ()) -> Program:
    """Set choices and layouts on the axes cp and tp; `expert_axes` cut the rows of experts, which later travel over
    these axes.

    Raises PartcError P0302 and P0303 for a pin that cannot be met, and P0315 for a wrong rule of the user.
    """
    check_pins(program, pins)
    check_rules(program)
    for axis in placed_axes(program.sizes):
        places = build(program, axis, pins, expert_axes=expert_axes)
        solution = solve(places.problem, OBJECTIVES, forbid=places.forbid)
        if solution is None:
            raise InternalError(f"no placement on {axis} satisfies every operation")
        if holds_weights_whole(axis):
            solution = inside_weight_axes(program, axis, places, solution)
        program = _written(program, axis, places, solution)
    return program


def _written(program: Program, axis: str, places: Places, solution: Solution) -> Program:
    """The program with the solution's choices and layouts."""

    made: dict[tuple[int, Placement], TensorType] = {}  # by the old type, because equal layers share types

    def typed(type: TensorType, placement: Placement) -> TensorType:
        if (id(type), placement) not in made:
            made[id(type), placement] = placed(type, placement)
        return made[id(type), placement]

    def placed(type: TensorType, placement: Placement) -> TensorType:
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
            p.replaced(type=typed(p.type, places.placement(("parameter", p.name), solution)))
            for p in program.parameters
        ),
    )


def _varied(program: Program, places: Places, solution: Solution) -> set[Hashable]:
    """The weights that some operation, in any region, uses differently on each rank.

    Their gradients are then partial sums everywhere, also in a region that uses them alike on all ranks: one reduction
    at the end of the step serves all uses.
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
    """An alternative placement of a value, and the additional cost of a step with it."""

    placement: str
    communication: float  # bytes per rank, microbatch and step
    repeated_flops: float
    replicated_weights: float  # bytes
    repeated_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The options for the placement of a value or parameter: the chosen one, then the others from best to worst."""

    name: str
    axis: str
    chosen: Option
    others: tuple[Option, ...]


def explain(
    program: Program, name: str, *, pins: Sequence[Pin] = (), expert_axes: tuple[str, ...] = ()
) -> tuple[Explanation, ...]:
    """The placement of a parameter, a program value or a `region.value` on cp and tp, with alternatives.

    `program` is annotate's input. Each alternative is solved again with the placement forced; its cost is the
    difference. Raises PartcError P0304 for an unknown name.
    """
    owners = {alias: parameter.name for parameter in program.parameters for alias in parameter.aliases}
    names = dict(named_values(program))
    if name not in names:
        close = [each for each in names if each.endswith(f".{name}")][:3] or get_close_matches(name, names, 3)
        help = f"did you mean {' or '.join(close)}?" if close else _NAMES
        raise PartcError("P0304", f"nothing is called {name!r}", help=help)
    found = []
    for axis in placed_axes(program.sizes):
        places = build(program, axis, pins, expert_axes=expert_axes)
        deciders = places.deciders(owners.get(name, name))
        assert deciders is not None
        node, seen, type = deciders
        best = solve(places.problem, OBJECTIVES, forbid=places.forbid)
        if best is None:
            raise InternalError(f"no placement on {axis} satisfies every operation")
        kind = partial(_kind, seen, _attention(program, node) and holds_weights_whole(axis))
        chosen = kind(best.chosen[node])
        alternatives = next(item for item in places.problem.nodes if item.name == node).alternatives
        options = []
        for key in dict.fromkeys(map(kind, alternatives)):
            forbid = frozenset((node, choice.label) for choice in alternatives if kind(choice) != key)
            forced = best if key == chosen else solve(places.problem, OBJECTIVES, forbid=forbid)
            if forced is not None:
                placement, form = key
                text = f"{placement_text(type, placement, axis)}{form and f' {form}'}"
                options.append((key, _option(text, forced.totals, best.totals)))
        rank = lambda item: (item.replicated_weights + item.repeated_flops, item.communication, item.repeated_bytes)  # noqa: E731
        others = sorted((option for key, option in options if key != chosen), key=rank)
        first = next(option for key, option in options if key == chosen)
        found.append(Explanation(name=name, axis=axis, chosen=first, others=tuple(others)))
    return tuple(found)


def _attention(program: Program, node: Hashable) -> bool:
    """Whether a node of the integer program is an attention operation."""
    match node:
        case ("op", str(region), int(index)):
            return Attention.of(program.region(region).forward.ops[index]) is not None
    return False


def _kind(seen: Callable[[Alternative], Placement], attends: bool, choice: Alternative) -> tuple[Placement, str]:
    """An alternative's placement of the value, and the form of the attention that computes it, as in pins."""
    placement = seen(choice)
    placement = Replicated() if isinstance(placement, Varying) else placement
    if not attends or not isinstance(placement, Shard) or not isinstance(choice.label, tuple):
        return placement, ""
    rows = "gathered" if placement.dim == 2 else "(heads)" if placement.dim == 1 else ""
    return placement, RING if choice.label[0] == RING else rows


def _option(placement: str, totals: Mapping[str, float], best: Mapping[str, float]) -> Option:
    more = {
        key: totals.get(key, 0.0) - best.get(key, 0.0)
        for key in ("communication", "repeated_flops", "replicated_weights", "repeated_bytes")
    }
    return Option(placement=placement, **more)
