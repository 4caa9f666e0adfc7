"""Choose the values that every region saves for its backward pass, and recompute the others there.

    saved gelu, up, norm, x, …                                   saved up, x
    backward:                                                    backward:
      input grad_out: …                                            input grad_out: …
      input gelu: …                                          ->    input up: …
      input up: …                                                  gelu             = gelu(up)
      grad_down.weight = linear_grad_weight(grad_out, gelu)        grad_down.weight = linear_grad_weight(grad_out, gelu)
      grad_up          = gelu_backward(grad_gelu, up)              grad_up          = gelu_backward(grad_gelu, up)
                                                                   norm, …          = layer_norm(x, …)

`none` computes nothing again. It saves sequences that tensor parallelism gathers as shards, and gathers them again
during the backward pass's products (Korthikanti et al. 2022, Reducing Activation Recomputation, section 4.2.2), if the
saved bytes are worth the time on the link: sequences of some megabytes are. `full` saves only a region's inputs.
`selective` recomputes values that are large and cheap (ibid.): all gathered values that are worth it, norms,
activations, dropouts, the scores of written-out attention; never a product with a weight, a lookup, fused attention or
a sum over ranks. The saved values are a minimum cut. Operations given by name, such as `softmax,all_gather`, are
recomputed wherever that saves bytes; of the others only views are. The name of a module, such as `mlp`, stands for all
operations in it. `full*2/none*6` has a way for each of eight stages.
A budget, such as `18GB`, is met on every rank with the least time of recomputation: see recompute/budget.py.

A recomputed operation runs right before its first reader, so that its results live briefly. Random operations are
numbered and draw the same numbers again. Operations that read a buffer which the forward pass changes are never
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from partc.cost.roofline import H100, seconds
from partc.cost.saved_tensors import (
    Time,
    changed_buffers,
    held_inputs,
    memory_of,
    parse_bytes,
    saved_bytes,
)
from partc.errors import PartcError
from partc.ir.collectives import MOVING
from partc.ir.layout import Sizes
from partc.ir.mesh import is_tensor_axis
from partc.ir.operations import VIEWS, shares_memory
from partc.ir.program import Graph, Op, Program, Region, dependents
from partc.passes.recompute.budget import assign_points, slots, with_points
from partc.passes.recompute.choice import Point, SavingProblem, efficient, frontier, least_saved
from partc.rules import LOWERED, is_cheap, operations
from partc.schedules.per_stage import RECOMPUTE, stage_kinds

# Saving one byte is worth this many bytes of memory traffic. Saving a norm's one number per row does not justify
# another norm; saving a value as large as its operands does.
WORTH = 16


def recompute(
    program: Program,
    *,
    recompute: str = "none",
    times: Sequence[Sequence[Time]] = (),
    frontiers: Mapping[str, Sequence[Point]] | None = None,
) -> Program:
    """Rewrite the backward pass of every region whose calls run for each microbatch.

    A budget applies to every pipeline rank, at the `times` of its step; the caller checks whether the closest choice
    suffices. `frontiers` are those of the program, if computed already.
    """
    budget = parse_bytes(recompute)
    held = held_inputs(program)
    if budget is None:
        fixed = {region.name: names for region, names in _chosen(program)}
        kinds = stage_kinds(recompute)
        _check_names(program, kinds)
        ways = tuple(dict.fromkeys(kinds))

        def way(region: Region, index: int) -> Region:
            return with_recomputation(
                region, _saved(region, ways[index], held[region.name], fixed[region.name], program.sizes)
            )

        counts = slots(program, fixed)
        dealt = {slot: {ways.index(kinds[slot[0] if len(kinds) > 1 else 0]): count} for slot, count in counts.items()}
        return with_points(program, dealt, way)
    points = frontiers_of(program) if frontiers is None else frontiers
    dealt = assign_points(program, points, times, budget)

    def body(region: Region, point: int) -> Region:
        return with_recomputation(region, points[region.name][point].saved | held[region.name])

    return with_points(program, dealt, body)


def frontiers_of(program: Program) -> dict[str, tuple[Point, ...]]:
    """For every region whose calls run for each microbatch, the efficient choices of saved values."""
    held = held_inputs(program)
    return {
        region.name: _frontier(region, held[region.name], fixed, program.sizes) for region, fixed in _chosen(program)
    }


def _frontier(region: Region, held: frozenset[str], fixed: frozenset[str], sizes: Sizes) -> tuple[Point, ...]:
    """The efficient choices with the bytes that their regions save. The problem counts each view of a memory, of which
    a region saves one.
    """
    found = frontier(timed_problem(region, held, fixed, sizes))
    bodies = (with_recomputation(region, point.saved | held) for point in found)
    saved = [saved_bytes(body, held, sizes) for body in bodies]
    return efficient([replace(point, bytes=bytes) for point, bytes in zip(found, saved, strict=True)])


def _chosen(program: Program) -> Iterator[tuple[Region, frozenset[str]]]:
    """The regions whose saved values are to be chosen, each with the values that it cannot recompute."""
    changed = changed_buffers(program)
    for region in program.regions:
        if region.backward is not None and region.phase == "microbatch":
            yield region, _fixed(region, changed.get(region.name, frozenset()))


def _check_names(program: Program, kinds: Sequence[str]) -> None:
    """Check that every name in `kinds` is that of an operation or of a module. Raises PartcError P0404."""
    known = {*RECOMPUTE, *operations(), *LOWERED, *MOVING}
    names = {name for kind in kinds for name in kind.split(",")} - known
    modules = (
        {name for region in program.regions for op in region.forward.ops for name in _modules(op)} if names else {}
    )
    for name in sorted(names.difference(modules)):
        close = ", ".join(get_close_matches(name, (*known, *modules), 3))
        raise PartcError(
            "P0404", f"there is no operation or module {name!r} to recompute", help=close and f"the nearest: {close}"
        )


def _modules(op: Op) -> Sequence[str]:
    """The names of the modules that an operation belongs to, the outermost first."""
    return op.module.split(".")


def _saved(region: Region, kind: str, held: frozenset[str], fixed: frozenset[str], sizes: Sizes) -> frozenset[str]:
    """The values that the forward pass saves for the backward pass."""
    inputs = {value.name for value in region.forward.inputs}
    if kind == "full":
        return frozenset(inputs | fixed)
    if kind not in RECOMPUTE:
        named = set(kind.split(","))
        again = [op for op in _repeatable(region, fixed) if op.name in VIEWS or named & {op.name, *_modules(op)}]
        wanted = restricted_problem(region, again, lambda op: int(op.name not in VIEWS), held, sizes)
        return least_saved(wanted, worth=len(again) + 1) | held  # one byte less is worth recomputing all of them
    types = region.types(region.forward)
    if kind == "none":
        cheap = _gathers_over_tp(_repeatable(region, fixed))
        if not cheap:
            return frozenset(region.saved)
    else:
        activations = dependents(region.forward.ops, inputs)
        cheap = [op for op in _repeatable(region, fixed) if op.name == "all_gather" or is_cheap(op, activations)]

    def moved(op: Op) -> int:
        if op.name == "all_gather":
            return round(seconds(op, types, sizes) * H100.memory)
        read = (types[name].local_bytes(sizes) for name in op.refs())
        return 1 if op.name in VIEWS else sum(read) + sum(value.type.local_bytes(sizes) for value in op.results)

    return least_saved(restricted_problem(region, cheap, moved, held, sizes), worth=WORTH) | held


def _gathers_over_tp(ops: Iterable[Op]) -> list[Op]:
    """The gathers over tp, and the views of their results."""
    found: list[Op] = []
    gathered: set[str] = set()
    for op in ops:
        gathers = op.name == "all_gather" and is_tensor_axis(str(dict(op.attrs)["axis"]))
        if gathers or (op.name in VIEWS and not gathered.isdisjoint(op.refs())):
            found.append(op)
            gathered.update(value.name for value in op.results)
    return found


def timed_problem(region: Region, held: frozenset[str], fixed: frozenset[str], sizes: Sizes) -> SavingProblem:
    """The problem in which every operation may be recomputed, with its time in nanoseconds as effort."""
    types = region.types(region.forward)

    def nanoseconds(op: Op) -> int:
        return round(1e9 * seconds(op, types, sizes))

    return restricted_problem(region, _repeatable(region, fixed), nanoseconds, held, sizes)


def _repeatable(region: Region, fixed: frozenset[str]) -> list[Op]:
    return [op for op in region.forward.ops if fixed.isdisjoint(value.name for value in op.results)]


def restricted_problem(
    region: Region, again: Sequence[Op], effort: Callable[[Op], int], held: frozenset[str], sizes: Sizes
) -> SavingProblem:
    """The problem in which only the operations in `again` can be recomputed.

    A value costs the bytes of the memory behind it, so all views of a value count as that value. `held` inputs and
    their views exist anyway.
    """
    assert region.backward is not None
    params = {value.name for value in region.params}
    values = region.forward.definitions()
    memory = memory_of(region.forward)
    size = {name: value.type.local_bytes(sizes) for name, value in values.items()}
    return SavingProblem(
        needed=tuple(name for name in region.saved if name not in held),
        bytes={name: 0 if memory[name] in held | params else size[memory[name]] for name in values},
        ops=tuple(tuple(value.name for value in op.results) for op in again),
        reads=tuple(tuple(name for name in dict.fromkeys(op.refs()) if name not in params | held) for op in again),
        effort=tuple(map(effort, again)),
    )


def with_recomputation(region: Region, keep: Collection[str]) -> Region:
    """The region with a backward graph that recomputes all values that it reads except `keep`.

    If an operation is recomputed anyway, none of its results is saved, even if in `keep`.
    """
    if set(region.saved).issubset(keep):
        return region
    assert region.backward is not None
    forward, backward = region.forward, region.backward
    makers = {value.name: index for index, op in enumerate(forward.ops) for value in op.results}
    incoming = tuple(value for value in backward.inputs if value.name not in region.saved)
    # Both graphs have constants, at their first use.
    twice = set(forward.ops)
    own = [op for op in backward.ops if op not in twice]
    computed = {value.name for op in own for value in op.results}
    given = {value.name for value in (*incoming, *region.params)}
    own_values = computed | given
    again = _needed(forward.ops, makers, (name for op in own for name in op.refs() if name not in own_values), keep)
    recomputed = {value.name for index in again for value in forward.ops[index].results}
    names = _fresh(recomputed, computed | {value.name for value in incoming})
    kept = set(keep) - recomputed
    ops: list[Op] = []
    done: set[int] = set()
    for op in own:
        wanted = [name for name in op.refs() if name in recomputed and name not in own_values]
        first = _needed(forward.ops, makers, wanted, kept) - done
        ops.extend(forward.ops[index].renamed(names) for index in sorted(first))
        done |= first
        ops.append(op.renamed({name: names[name] for name in wanted if name in names}))
    available = given | {value.name for op in ops for value in op.results}
    saved = tuple(dict.fromkeys(name for op in ops for name in op.refs() if name not in available))
    inputs = {value.name for value in forward.inputs}
    values = forward.definitions()
    assert all(name in inputs or name in keep for name in saved)
    graph = Graph(inputs=(*incoming, *(values[name] for name in saved)), ops=tuple(ops), outputs=backward.outputs)
    return replace(region, saved=saved, backward=graph)


def _needed(ops: tuple[Op, ...], makers: Mapping[str, int], wanted: Iterable[str], keep: Collection[str]) -> set[int]:
    """The operations, by index, that compute `wanted` from `keep`, inputs and parameters."""
    found: set[int] = set()
    todo = [name for name in wanted if name not in keep]
    while todo:
        index = makers.get(todo.pop())
        if index is not None and index not in found:
            found.add(index)
            todo.extend(name for name in ops[index].refs() if name not in keep)
    return found


def _fresh(names: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """New names for values whose names the backward graph already uses."""
    found: dict[str, str] = {}
    for name in sorted(set(names).intersection(taken)):
        count = 1
        while f"{name}_again_{count}" in taken:
            count += 1
        found[name] = f"{name}_again_{count}"
    return found


def _fixed(region: Region, changed: frozenset[str]) -> frozenset[str]:
    """The results of operations that read a changing buffer, directly or through views."""
    stale, found, types = set(changed), set[str](), region.types(region.forward)
    for op in region.forward.ops:
        if stale.intersection(op.refs()):
            (stale if shares_memory(op, types) else found).update(value.name for value in op.results)
    return frozenset(found)
