"""The texts of `partc inspect`: a program after any pass, the changes of a pass, the reasons for a layout."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc import passes
from partc.errors import PartcError
from partc.ir.printer import print_program, print_region
from partc.ir.program import Program

if TYPE_CHECKING:
    from partc.api import Compilation

EXPLAINED = "zero"  # the last pass whose layouts are explained
_FLAGS = {
    "after": "--after", "region": "--region", "diff": "--diff", "sources": "--sources", "provenance": "--provenance",
    "name": "--explain", "schedules": "--schedules", "html": "--html", "rank": "--rank",
}  # fmt: skip
# Views other than the program's text -> the options that each accepts.
_VIEWS: Mapping[str, tuple[str, ...]] = {
    "rank": (), "schedules": (), "html": (), "name": (), "provenance": ("after", "region"),
}  # fmt: skip


def check_one_view(given: Mapping[str, Any]) -> None:
    """Check that the options of `partc inspect` select only one view. Raises PartcError P0004."""
    asked = [name for name in _FLAGS if given[name] is not None and given[name] is not False]
    for view in (name for name in asked if name in _VIEWS):
        other = next((name for name in asked if name not in (view, *_VIEWS[view])), None)
        if other is not None:
            help = f"give one of them: {_FLAGS[view]} is a separate view"
            raise PartcError("P0004", f"{_FLAGS[view]} and {_FLAGS[other]} are given", help=help)


def last_pass(*, after: str | None, name: str | None, html: Path | None) -> str | None:
    """The last pass to run; None for all. Raises PartcError P0604."""
    if name is not None:
        return EXPLAINED
    return None if html is not None or after is None else passes.known(after)


def text(done: Compilation, *, after: str | None, region: str | None, diff: bool, sources: bool) -> str:
    """The program after a pass, or the lines that the pass changed. Raises PartcError P0605."""
    last = after or passes.NAMES[-1]
    now = program_text(done.after(last), region=region, sources=sources)
    if not diff:
        return now
    order = (passes.FIRST, *passes.NAMES)
    before = order[max(order.index(last) - 1, 0)]
    was = program_text(done.after(before), region=region, sources=sources, missing_ok=True)
    lines = difflib.unified_diff(was.splitlines(), now.splitlines(), f"before {last}", f"after {last}", lineterm="")
    return "\n".join(lines) or f"{last} changed nothing"


def program_text(
    program: Program, *, region: str | None = None, sources: bool = False, missing_ok: bool = False
) -> str:
    """The IR as text, of the program or of one region. Raises PartcError P0605."""
    if region is None:
        return print_program(program, sources=sources)
    found = next((item for item in program.regions if item.name == region), None)
    if found is not None:
        return print_region(found, sources=sources, sizes=program.sizes)
    if missing_ok:
        return ""
    raise PartcError(
        "P0605",
        f"there is no region {region!r}",
        help=f"after this pass there are {', '.join(item.name for item in program.regions)}",
    )


def value_origins(done: Compilation, *, region: str | None) -> str:
    """Every value of the program with the pass that created it, in the program's order."""
    made = passes.provenance(done.traced, done.steps)
    lines = []
    for item in done.program.regions:
        names = [value.name for graph in item.graphs for op in graph.ops for value in op.results]
        if region in (None, item.name):
            lines += [f"{made[f'{item.name}.{name}']:<14} {item.name}.{name}" for name in names]
    return "\n".join(lines)


def layout_explanation(done: Compilation, name: str) -> str:
    """The chosen layout of a value or weight, and the additional cost of every alternative."""
    from partc.passes.annotate import explain

    stacks = {each: item.name for item in done.after("stack").parameters for each in item.names}
    name = stacks.get(name, name)
    found = explain(done.after("batch"), name, pins=done.options.pins, expert_axes=done.options.expert_axes)
    further = [text for text in (_table(done, name) or _experts(done, name), _parts(done, name)) if text]
    if further and not found:
        return "\n\n".join(further)
    if not found:
        return f"{name} is whole on every rank: the mesh has no axis that cuts tensors"
    blocks = []
    for item in found:
        lines = [f"{item.name} is {item.chosen.placement} over {item.axis}"]
        for option in item.others:
            lines.append(f"  instead {option.placement}: {_cost(option)}")
        if not item.others:
            lines.append("  nothing else is legal")
        blocks.append("\n".join(lines))
    return "\n\n".join((*blocks, *further))


def _parts(done: Compilation, name: str) -> str:
    """A description of a weight's parts under ZeRO; empty without ZeRO and for other values."""
    from partc.passes.zero import explain

    return explain(done.after("zero"), name)


def _experts(done: Compilation, name: str) -> str:
    """The experts of a rank, and the bytes of rows that travel to them; empty for other weights."""
    from partc.communication.descriptions import moved_bytes
    from partc.ir.printer import readable

    program, axes = done.after("experts"), done.options.expert_axes
    item = next((item for item in program.parameters if item.name == name), None)
    if item is None or not item.type.layout.dims:
        return ""
    over = [axis for axis in axes if axis in item.type.layout.dims[0][0].axes]
    calls = [call for call in program.calls if name in call.params]
    regions = [program.region(call.region) for call in calls]
    moves = [op for region in regions for op in region.forward.ops if op.name == "dispatch"]
    if not over or not moves:
        return ""
    sent = {
        axis: sum(moved_bytes(op, region.types(region.forward), program.sizes)
                  for region in regions for op in region.forward.ops
                  if op.name == "dispatch" and dict(op.attrs)["axis"] == axis)
        for axis in over
    }  # fmt: skip
    count, every = item.type.shape[0], math.prod(program.sizes[axis] for axis in over)
    lines = [f"{name} is {item.type}: a rank has {count // every} of {count} experts, as --experts and ep say"]
    lines += [f"  rows come over {axis}: {readable(size)} in each microbatch" for axis, size in sent.items()]
    return "\n".join(lines)


def _table(done: Compilation, name: str) -> str:
    """The layout of an embedding table over the axes of the batch, and the alternatives; empty for other values."""
    from partc.ir.printer import readable
    from partc.passes.tables import explain

    options = done.options
    how = {"zero": options.zero, "pins": options.pins, "optimizer": options.optimizer, "group": options.group}
    found = explain(done.after("annotate"), name, **how)  # type: ignore[arg-type]
    lines = [f"{layout}: {readable(int(sent))} sent by each rank in a step" for layout, sent in found]
    return "\n".join((f"{name} is {lines[0]}", *(f"  instead {line}" for line in lines[1:]))) if lines else ""


def _cost(option: object) -> str:
    """The additional cost per step, in words."""
    from partc.ir.printer import readable

    kinds = (
        ("communication", "sent by each rank"),
        ("repeated_bytes", "computed again by each rank"),
        ("replicated_weights", "of weights held by every rank"),
    )
    parts = []
    for field, words in kinds:
        more = float(getattr(option, field))
        if abs(more) >= 1:
            parts.append(f"{readable(int(abs(more)))} {'more' if more > 0 else 'less'} {words}")
    repeated = float(getattr(option, "repeated_flops"))  # noqa: B009
    if abs(repeated) >= 1:
        parts.append(f"{abs(repeated):,.0f} {'more' if repeated > 0 else 'fewer'} flops repeated")
    return ", ".join(parts) or "costs the same"
