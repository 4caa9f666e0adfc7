"""Split backward passes into gradients of inputs, for which an earlier stage waits, and gradients of weights.

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
Under all other schedules of partc, a stage that returns gradients runs the second part right after it has sent them:
the transfer overlaps with the gradients of weights, and the earlier stage starts sooner. If stages that keep whole
passes call the region too, it becomes two. Operations that the gradients of inputs need, collectives included, run in
the first part, together with gradients of weights that they yield.
"""

from __future__ import annotations

from dataclasses import replace

from partc.errors import InternalError
from partc.ir.collectives import COLLECTIVES
from partc.ir.layout import Sizes
from partc.ir.naming import gradient_name, unique
from partc.ir.program import Graph, Program, Region, needed


def split(
    program: Program, *, halves: bool = False, zero: int = 0, budget: int | None = None, as_written: bool = False
) -> Program:
    """Give regions with trained parameters a weight graph: all of them if the schedule runs the `halves` separately.

    Otherwise, regions of stages that return gradients get one where this costs neither memory nor overlap with
    collectives. Backward passes stay whole under ZeRO 2 and 3, which scatter all gradients of a call together, under a
    memory `budget`, which assumes whole passes, and in a user's schedule, which is executed `as_written`.
    """
    if halves:
        return replace(program, regions=tuple(map(_split, program.regions)))
    return program if zero >= 2 or budget is not None or as_written else _sending_first(program)


def _sending_first(program: Program) -> Program:
    returning = {item.target for item in program.sent if item.gradient}
    taken = {region.name for region in program.regions}
    renamed: dict[str, str] = {}
    regions: list[Region] = []
    for region in program.regions:
        stages = {call.stage for call in program.calls_to(region.name)}
        halves = _split(region) if stages & returning else region
        if not worthwhile(halves, program.sizes):
            regions.append(region)
        elif stages <= returning:
            regions.append(halves)
        else:
            renamed[region.name] = unique(region.name, taken)
            regions += [region, replace(halves, name=renamed[region.name])]
    calls = (
        replace(call, region=renamed.get(call.region, call.region)) if call.stage in returning else call
        for call in program.calls
    )
    return replace(program, regions=tuple(regions), calls=tuple(calls))


def worthwhile(region: Region, sizes: Sizes) -> bool:
    """Whether the backward pass has no collectives to hide, and its second half reads no more bytes than the whole."""
    if region.weight is None or region.backward is None:
        return False
    types = {value.name: value.type for graph in region.graphs for value in graph.definitions().values()}
    kept, saved = (sum(types[name].local_bytes(sizes) for name in names) for names in (region.kept, region.saved))
    return kept <= saved and not any(op.name in COLLECTIVES for op in region.backward.ops)


def _split(region: Region) -> Region:
    if region.backward is None:
        return region
    if region.weight is not None:
        raise InternalError(f"{region.name} is split already")
    graph = region.backward
    of_inputs = {gradient_name(value.name) for value in region.forward.inputs}
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
    if not kept:  # the gradients of weights are constants
        return region
    values = graph.definitions()
    return replace(
        region,
        backward=Graph(inputs=graph.inputs, ops=first, outputs=(*now, *kept)),
        weight=Graph(inputs=tuple(values[name] for name in kept), ops=rest, outputs=later),
        kept=kept,
    )
