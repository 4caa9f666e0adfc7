"""Cut backward passes in two: gradients of inputs, which an earlier stage waits for, and gradients of weights.

    backward:                                    backward:
      input grad_y, x                              input grad_y, x
      grad_x = matmul(grad_y, w)           ->      grad_x = matmul(grad_y, w)
      grad_w = linear_grad_weight(grad_y, x)       return grad_x, grad_y, x     kept grad_y, x
      return grad_x, grad_w                      weight:
                                                   input grad_y, x
                                                   grad_w = linear_grad_weight(grad_y, x)
                                                   return grad_w

Schedules without bubbles run the second part whenever nothing else is to be done (Qi et al. 2023,
Zero Bubble Pipeline Parallelism). What the gradients of the inputs need anyway, collectives
included, is done in the first part only; gradients of weights that fall out there stay there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from partc.errors import InternalError
from partc.program import Graph, Op, Program, Region


def split(program: Program, *, halves: bool = False) -> Program:
    """Give every region with trained parameters a weight graph, if the schedule runs the `halves` apart."""
    return replace(program, regions=tuple(map(_split, program.regions))) if halves else program


def _split(region: Region) -> Region:
    if region.backward is None:
        return region
    if region.weight is not None:
        raise InternalError(f"{region.name} is split already")
    graph = region.backward
    of_inputs = {f"grad_{value.name}" for value in region.forward.inputs}
    first = _needed(graph.ops, [name for name in graph.outputs if name in of_inputs])
    made = {value.name for op in first for value in op.results}
    now = tuple(name for name in graph.outputs if name in of_inputs or name in made)
    later = tuple(name for name in graph.outputs if name not in now)
    if not later:
        return region
    done = set(map(id, first))
    rest = _needed(tuple(op for op in graph.ops if id(op) not in done), later)
    own = {value.name for op in rest for value in op.results} | {value.name for value in region.params}
    kept = tuple(dict.fromkeys(name for op in rest for name in op.refs() if name not in own))
    if not first:
        kept = tuple(value.name for value in graph.inputs)
    if not kept:  # gradients of weights that are constants
        return region
    values = graph.definitions()
    return replace(
        region,
        backward=Graph(inputs=graph.inputs, ops=first, outputs=(*now, *kept)),
        weight=Graph(inputs=tuple(values[name] for name in kept), ops=rest, outputs=later),
        kept=kept,
    )


def _needed(ops: tuple[Op, ...], wanted: Iterable[str]) -> tuple[Op, ...]:
    """The operations, in order, that make `wanted`."""
    live = set(wanted)
    found = []
    for op in reversed(ops):
        if any(value.name in live for value in op.results):
            found.append(op)
            live.update(op.refs())
    return tuple(reversed(found))
