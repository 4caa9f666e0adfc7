"""The layers of experts of a program, found by the values that choose the expert of each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from partc.ir.expert_products import ExpertMatmul
from partc.ir.mesh import TIME_AXIS
from partc.ir.program import Op, Program, Region
from partc.runtime.plan import PlanRouter


def choices(region: Region) -> Mapping[str, Op]:
    """Map each value that holds the expert of each row to its first reader. Values from other ranks are left out."""
    found: dict[str, Op] = {}
    ordering = ("route", "expert_order")
    brought = {value.name for op in region.forward.ops if op.name in ordering for value in op.results}
    for op in region.forward.ops:
        if op.name in ordering:
            found.setdefault(next(op.refs()), op)
        elif (product := ExpertMatmul.of(op)) is not None:
            found.setdefault(product.chosen, op)
    return {name: op for name, op in found.items() if name not in brought}


def routers(program: Program) -> Iterator[PlanRouter]:
    """The layers in the order in which stages run them."""
    first = {call.region: call.name for call in reversed(program.calls)}
    chosen_in = {region.name: choices(region) for region in program.regions}
    for call in program.calls:
        if not chosen_in[call.region]:
            continue
        region = program.region(call.region)
        types = region.types(region.forward)
        for chosen, op in chosen_in[call.region].items():
            product, module = ExpertMatmul.of(op), op.module
            inside = module.removeprefix(first[call.region])
            own = f"{call.name}{inside}" if inside != module or module == "" else module
            over = tuple(axis for sub in types[chosen].layout.dims[0] for axis in sub.axes)
            yield PlanRouter(
                name=own,
                experts=int(str(op.args[1])) if product is None else types[product.weights].shape[0],
                over=tuple(axis for axis in over if axis != TIME_AXIS and program.sizes.get(axis, 1) > 1),
                stage=call.stage,
            )
