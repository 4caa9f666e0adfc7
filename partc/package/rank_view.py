"""A single rank of a package, as text: its place on the mesh, its peers, its shards and its schedule."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from partc.errors import PartcError, first_line
from partc.ir.layout import Layout, index_ranges
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.ir.naming import starred
from partc.package.launch import literals, read_plan
from partc.runtime.place import Place
from partc.runtime.plan import order_of


def rank_view(directory: Path, rank: int) -> str:
    """The text of `partc inspect DIR --rank N`. Raises PartcError P0503 and P0610."""
    plan = read_plan(directory)
    mesh = Mesh.parse(plan["mesh"])
    if not 0 <= rank < mesh.size:
        last = mesh.size - 1
        raise PartcError("P0610", f"{directory} has no rank {rank:,}", help=f"its ranks are 0 to {last:,}, of {mesh}")
    try:
        place = Place.of(rank, mesh.sizes, lambda place: literals(directory / f"ranks/pp_{place}.py"))
        return "\n".join(_lines(plan, mesh, place))
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # the literals do not have the expected form
        cause = f"{directory / 'ranks'} does not fit plan.json: {first_line(error)}"
        raise PartcError("P0503", cause, help="compile again: a file has been changed") from None


def _lines(plan: Mapping[str, Any], mesh: Mesh, place: Place) -> Iterator[str]:
    stages = " and ".join(map(str, place.stages))
    yield f"rank {place.rank:,} of {mesh.size:,}: stage{'s' * (len(place.stages) > 1)} {stages}"
    yield f"coordinate: {', '.join(f'{axis}={index}' for axis, index in place.coordinate.items())}"
    for name, members in place.groups.items():
        yield f"group {name}: {', '.join(map(str, members))}"
    for (source, target), other in place.links.items():
        yield f"link from stage {source} to {target}: with rank {other}"
    held = dict(_held_elements(plan, mesh, place))
    if held:
        yield "shards:"
        yield from (f"  {name}{part}" for name, part in held.items())
    for title, schedule in (("schedule", place.schedule), ("evaluation", place.evaluation)):
        if schedule:
            yield f"{title}:"
            yield from textwrap.wrap(schedule, 118, initial_indent="  ", subsequent_indent="  ")


def _held_elements(plan: Mapping[str, Any], mesh: Mesh, place: Place) -> Iterator[tuple[str, str]]:
    """Yields the names of cut parameters, and the elements that the rank holds. The parameters of repeated calls share
    one name with `*`.
    """
    for name, entry in plan["parameters"].items():
        layout, stack = Layout.parse(entry["layout"]), entry.get("stack")
        if stack is not None and "count" in stack:  # a whole table
            (ranges,) = index_ranges(Layout.parse(stack["rows"]), place.coordinate, mesh.sizes)
            if any(start <= stack["row"] < end for start, end in ranges):
                yield name, f"[{', '.join(':' for _ in layout.dims)}]"
            continue
        if stack is not None:
            name = stack["name"]
            layout = replace(layout, dims=(*Layout.parse(stack["rows"]).dims, *layout.dims))
        if not any(mesh.axis(axis) > 1 for axis in layout.sharded_axes):
            continue
        if not {plan["places"][stage] for stage in entry["stages"]} & {place.coordinate.get(PIPELINE_AXIS, 0)}:
            continue
        held = [*index_ranges(layout, place.coordinate, mesh.sizes)]
        if order := order_of(entry):
            dim = order.dim + (stack is not None)
            runs = (run for start, end in held[dim] for run in order.runs(start, end))
            held[dim] = tuple((first, first + count) for first, count in runs)
        parts = [
            ":" if ranges == ((0, size),) else " ".join(f"{start}:{end}" for start, end in ranges)
            for ranges, size in zip(held, layout.shape, strict=True)
        ]
        yield starred(name), f"[{', '.join(parts)}]"
