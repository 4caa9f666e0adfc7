"""Split backward passes: gradients of inputs, which an earlier stage waits for, and gradients of weights.

    backward:
      …
      grad_gelu        = linear_grad_input(grad_out, down.weight)
      grad_down.weight = linear_grad_weight(grad_out, gelu)
      grad_up          = gelu_backward(grad_gelu, up)
      …
      return grad_x, …, grad_down.weight, …
  ->
    backward:
      …
      grad_gelu = linear_grad_input(grad_out, down.weight)
      grad_up   = gelu_backward(grad_gelu, up)
      …
      return grad_x, …
    kept grad_out, …
    weight:
      input grad_out: …
      …
      grad_down.weight = linear_grad_weight(grad_out, gelu)
      …

Zero-bubble schedules run the second part when a rank would be idle (Qi et al. 2023, Zero Bubble Pipeline Parallelism).
Operations that the gradients of inputs need, collectives included, run in the first part; gradients of weights that
these operations yield stay there.
"""

from __future__ import annotations

from dataclasses import replace

from partc.errors import InternalError
from partc.ir.program import Graph, Program, Region, needed


def split(program: Program, *, halves: bool = False) -> Program:
    """Give every region with trained parameters a weight graph, if the schedule runs the `halves` separately."""
    return replace(program, regions=tuple(map(_split, program.regions))) if halves else program


def _split(region: Region) -> Region:
    if region.backward is None:
        return region
    if region.weight is not None:
        raise InternalError(f"{region.name} is split already")
    graph = region.backward
    of_inputs = {f"grad_{value.name}" for value in region.forward.inputs}
    first = needed(graph.ops, [name for name in graph.outputs if name in of_inputs])
    made = {value.name for op in first for value in op.results}
    now = tuple(name for name in graph.outputs if name in of_inputs or name in made)
    later = tuple(name for name in graph.outputs if name not in now)
    if not later:
        return region
    done = set(map(id, first))
    rest = needed(tuple(op for op in graph.ops if id(op) not in done), later)
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
