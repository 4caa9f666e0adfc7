"""Choose what every region saves for its backward pass, and make the rest again there.

    forward:                                     forward:
      h = linear(x, w)                             h = linear(x, w)
      a = gelu(h)                          ->      a = gelu(h)
      y = linear(a, v)                             y = linear(a, v)
      return y                                     return y
    saved a, h, x                                saved h, x
    backward:                                    backward:
      input grad_y, a, h, x                        input grad_y, h, x
                                                   a = gelu(h)
      grad_v = linear_grad_weight(grad_y, a)       grad_v = linear_grad_weight(grad_y, a)
      …                                            …

`none` saves what the backward pass reads. `full` saves a region's inputs alone. `selective` makes
again what is large and quickly made (Korthikanti et al. 2022, Reducing Activation Recomputation):
norms, activations, dropouts, the scores of attention that is spelled out; never a product with a
weight, a lookup, fused attention or a sum over ranks. What a gather makes large it saves in parts and
gathers again (ibid., section 4.2.2), if that is worth the time on the link. What it saves is a
minimum cut. Operations by name, such as `softmax,all_gather`, are made again wherever that saves bytes, and
no others but views. A budget, such as `18GB`, is met on every rank with the least time of recomputation:
see recompute_budget.

An operation that is done again stands right before the first that needs it, so that what it makes
lives shortly. Random operations count by number and draw the same again. Nothing is made again
that reads a buffer which the forward pass changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from partc.layout import Sizes
from partc.mesh import PIPELINE_AXIS
from partc.passes.recompute_budget import check_reach, deal, varied
from partc.passes.recompute_choice import Choice, Point, frontier, least
from partc.program import VIEWS, Graph, Op, Program, Region
from partc.roofline import H100, seconds
from partc.rules import is_cheap
from partc.saving import Time, changed_buffers, flights, held_inputs, memory_of, parse_bytes
from partc.schedules import SCHEDULES, compute_order
from partc.schedules.table import Table

# A byte that is saved is worth as many that are read and written to make it again. A norm's one number a row is not
# worth another norm; all that is as large as what it is made of is.
WORTH = 16


def recompute(
    program: Program,
    *,
    recompute: str = "none",
    kind: str = "1f1b",
    table: Table | None = None,
    times: Sequence[Sequence[Time]] | None = None,
    frontiers: Mapping[str, Sequence[Point]] | None = None,
) -> Program:
    """Rewrite the backward pass of every region whose calls run for each microbatch.

    A budget is of every pipeline rank, at `times` of its step: whoever knows them also knows whether what comes nearest
    is enough. Without them it is of saved values alone, with as many microbatches in flight as the schedule, `kind` or
    `table`, has; raises PartcError P0415 if such a one cannot be met. `frontiers` are the program's, if made already.
    """
    if recompute == "none":
        return program
    budget = parse_bytes(recompute)
    held = held_inputs(program)
    if budget is None:
        done = {
            region.name: remade(region, _kept(region, recompute, held[region.name], fixed, program.sizes))
            for region, fixed in _chosen(program)
        }
        return replace(program, regions=tuple(done.get(region.name, region) for region in program.regions))
    points = frontiers_of(program) if frontiers is None else frontiers
    if times is None:
        ranks = program.mesh.axis(PIPELINE_AXIS)
        rows = table.rows if table else compute_order(SCHEDULES[kind], ranks, program.microbatches, program.stages)
        saving = [[Time(flight=flight) for flight in flights(row)] for row in rows]
        dealt = deal(program, points, saving, budget)
        check_reach(program, points, dealt, saving, budget)
    else:
        dealt = deal(program, points, times, budget)

    def body(region: Region, point: int) -> Region:
        return remade(region, points[region.name][point].saved | held[region.name])

    return varied(program, dealt, body)


def frontiers_of(program: Program) -> dict[str, tuple[Point, ...]]:
    """Of every region whose calls run for each microbatch, what may be saved."""
    held = held_inputs(program)
    return {
        region.name: frontier(timed(region, held[region.name], fixed, program.sizes))
        for region, fixed in _chosen(program)
    }


def _chosen(program: Program) -> Iterator[tuple[Region, frozenset[str]]]:
    """The regions that there is something to decide for, and what they cannot make again."""
    changed = changed_buffers(program)
    for region in program.regions:
        if region.backward is not None and region.phase == "microbatch":
            yield region, _fixed(region, changed.get(region.name, frozenset()))


def _kept(region: Region, kind: str, held: frozenset[str], fixed: frozenset[str], sizes: Sizes) -> frozenset[str]:
    """The values that the forward pass hands to the backward pass."""
    inputs = {value.name for value in region.forward.inputs}
    if kind == "full":
        return frozenset(inputs | fixed)
    if kind != "selective":
        named = {*kind.split(","), *VIEWS}
        again = [op for op in _repeatable(region, fixed) if op.name in named]
        wanted = choice(region, again, lambda op: int(op.name not in VIEWS), held, sizes)
        return least(wanted, worth=len(again) + 1) | held  # a byte less is worth all of them
    types = region.types(region.forward)
    activations = dependents(region.forward.ops, inputs)
    cheap = [op for op in _repeatable(region, fixed) if op.name == "all_gather" or is_cheap(op, activations)]

    def moved(op: Op) -> int:
        if op.name == "all_gather":
            return round(seconds(op, types, sizes) * H100.memory)
        read = (types[name].local_bytes(sizes) for name in op.refs())
        return 1 if op.name in VIEWS else sum(read) + sum(value.type.local_bytes(sizes) for value in op.results)

    return least(choice(region, cheap, moved, held, sizes), worth=WORTH) | held


def timed(region: Region, held: frozenset[str], fixed: frozenset[str], sizes: Sizes) -> Choice:
    """The choice in which every operation may be done again, for its time in nanoseconds."""
    types = region.types(region.forward)

    def nanoseconds(op: Op) -> int:
        return round(1e9 * seconds(op, types, sizes))

    return choice(region, _repeatable(region, fixed), nanoseconds, held, sizes)


def _repeatable(region: Region, fixed: frozenset[str]) -> list[Op]:
    return [op for op in region.forward.ops if fixed.isdisjoint(value.name for value in op.results)]


def choice(
    region: Region, again: Sequence[Op], effort: Callable[[Op], int], held: frozenset[str], sizes: Sizes
) -> Choice:
    """What there is to decide, if only the operations `again` can be done a second time.

    A value costs what the memory behind it does: views of one value are that value. `held` inputs, and all
    that are views of them, are there anyway.
    """
    assert region.backward is not None
    params = {value.name for value in region.params}
    values = region.forward.definitions()
    memory = memory_of(region.forward)
    size = {name: value.type.local_bytes(sizes) for name, value in values.items()}
    return Choice(
        needed=tuple(name for name in region.saved if name not in held),
        bytes={name: 0 if memory[name] in held | params else size[memory[name]] for name in values},
        ops=tuple(tuple(value.name for value in op.results) for op in again),
        reads=tuple(tuple(name for name in dict.fromkeys(op.refs()) if name not in params | held) for op in again),
        effort=tuple(map(effort, again)),
    )


def remade(region: Region, keep: Collection[str]) -> Region:
    """The region with a backward graph that makes for itself whatever it reads besides `keep`.

    A result of an operation that is done again anyway is not saved, even if it is in `keep`.
    """
    assert region.backward is not None
    forward, backward = region.forward, region.backward
    makers = {value.name: index for index, op in enumerate(forward.ops) for value in op.results}
    incoming = tuple(value for value in backward.inputs if value.name not in region.saved)
    # Constants stand in both graphs: they are made where they are needed first.
    twice = set(forward.ops)
    own = [op for op in backward.ops if op not in twice]
    given = {value.name for value in (*incoming, *region.params)} | {value.name for op in own for value in op.results}
    inputs = {value.name for value in forward.inputs}
    again = _needed(forward.ops, makers, (name for op in own for name in op.refs() if name not in given), keep)
    saved_anyway = {value.name for index in again for value in forward.ops[index].results}
    names = _fresh(saved_anyway, {value.name for op in own for value in op.results} | {v.name for v in incoming})
    ops: list[Op] = []
    done: set[int] = set()
    for op in own:
        wanted = [name for name in op.refs() if name not in given and name in saved_anyway]
        first = _needed(forward.ops, makers, wanted, {name for name in keep if name not in saved_anyway})
        ops.extend(forward.ops[index].renamed(names) for index in sorted(first - done))
        done |= first
        ops.append(op.renamed({name: names[name] for name in wanted if name in names}))
    made = {value.name for op in ops for value in op.results} | {value.name for value in (*incoming, *region.params)}
    saved = tuple(dict.fromkeys(name for op in ops for name in op.refs() if name not in made))
    values = forward.definitions()
    assert all(name in inputs or name in keep for name in saved)
    graph = Graph(inputs=(*incoming, *(values[name] for name in saved)), ops=tuple(ops), outputs=backward.outputs)
    return replace(region, saved=saved, backward=graph)


def _needed(ops: tuple[Op, ...], makers: Mapping[str, int], wanted: Iterable[str], keep: Collection[str]) -> set[int]:
    """The operations, by index, that make `wanted` from `keep`, inputs and parameters."""
    found: set[int] = set()
    todo = [name for name in wanted if name not in keep]
    while todo:
        index = makers.get(todo.pop())
        if index is not None and index not in found:
            found.add(index)
            todo.extend(name for name in ops[index].refs() if name not in keep)
    return found


def _fresh(names: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Other names for those that the backward graph uses for something else."""
    found: dict[str, str] = {}
    for name in sorted(set(names).intersection(taken)):
        count = 1
        while f"{name}_again_{count}" in taken:
            count += 1
        found[name] = f"{name}_again_{count}"
    return found


def dependents(ops: Iterable[Op], roots: Iterable[str]) -> set[str]:
    """The roots, and all that is made from them."""
    found = set(roots)
    for op in ops:
        if any(name in found for name in op.refs()):
            found.update(value.name for value in op.results)
    return found


def _fixed(region: Region, changed: frozenset[str]) -> frozenset[str]:
    """The results of operations that read a changing buffer, at first hand or through views of it."""
    stale, found = set(changed), set[str]()
    for op in region.forward.ops:
        if stale.intersection(op.refs()):
            (stale if op.name in VIEWS else found).update(value.name for value in op.results)
    return frozenset(found)
