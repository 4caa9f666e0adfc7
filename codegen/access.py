"""How calls get at parameters and gradients: what loops go over, what is gathered, summed and scattered around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from partc.codegen.calls import Run
from partc.codegen.collectives import moved
from partc.codegen.source import Function, Line, RegionCode
from partc.codegen.weights import counted, strings
from partc.parts import Kind, Parts
from partc.program import Call, Phase, Program, TensorType, Transfer
from partc.quoting import literal, literal_template


class Stage(Protocol):
    """What is known of the stage whose methods are written."""

    program: Program
    index: int
    parts: Parts
    calls: list[Call]
    runs: dict[Phase, list[Run]]
    types: dict[str, TensorType]
    codes: dict[str, RegionCode]
    places: dict[str, str]
    sent: list[Transfer]
    received: list[Transfer]
    split: bool

    def attribute(self, run: Run, kind: str = "") -> str: ...
    def starts(self, run: Run) -> bool: ...
    def started(self, run: Run) -> str: ...
    def arguments(
        self, function: Function, run: Run, args: Iterable[str], comm: str, p: str = "", g: str = ""
    ) -> str: ...
    def placed(self, names: Iterable[str]) -> list[str]: ...
    def makes(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a run of calls gets at parameters and gradients: what a loop goes over, and what surrounds each call."""

    over: tuple[tuple[str, str], ...]  # variable -> the list it runs through
    p: str
    g: str
    notes: tuple[str, ...]
    closing: tuple[Line, ...]


def _counting(run: Run) -> str:
    """The numbers of the calls' first random operations."""
    numbers = [call.random or 0 for call in run.calls]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    even = step > 0 and numbers == list(range(numbers[0], numbers[-1] + 1, step))
    return f"range({numbers[0]}, {numbers[-1] + step}, {step})" if even else str(tuple(numbers))


def _name(run: Run) -> str:
    """A call's name, in a loop or alone."""
    if not run.loop:
        return literal(run.prefix)
    return literal_template(run.prefix, ".{i}") if run.numbers else "name"


def _names(run: Run) -> tuple[str, str]:
    """A variable for it, and what that runs through."""
    return ("i", counted(run.numbers)) if run.numbers else ("name", strings(call.name for call in run.calls))


def access(builder: Stage, run: Run, function: Function, kind: Kind) -> Access:
    """Where ranks hold parts, parameters are gathered and gradients scattered around the call."""
    parts, call, level = builder.parts, run.calls[0], builder.program.zero
    parted = level >= 2 and parts.has_parts(call)
    tables = {"p": builder.attribute(run), "g": builder.attribute(run, "grad ")}
    over: dict[str, str] = {name: name for name in ("p", "g", "number") if name in function.passes}
    if parted and level == 3:
        unit_of = ("unit",) if function.gives else ()
        over = {**dict.fromkeys(unit_of, "p"), **{name: name for name in ("number",) if name in function.passes}}
    elif parted and function.gives:
        over = {**over, "unit": "g"}
    unit = "unit" if run.loop else tables["p" if level == 3 else "g"]
    names = {"p": "p", "g": "g"} if run.loop else {"p": "", "g": ""}
    closing: tuple[Line, ...] = ()
    if function.gives:
        moves = list(parts.after(call, kind))
        note = f"{moved(moves)}, until the next one starts: each rank keeps the sum for its part" if moves else ""
        closing = (Line(code=f"{unit}.scatter(g)", notes=(note,) if note else ()), Line(code="del g"))
    gathered = list(parts.before(call, kind))
    lists = [(name, _counting(run) if of == "number" else tables[of]) for name, of in over.items()]
    if kind == ("W" if builder.split else "B") and builder.starts(run):
        started = builder.started(run)
        said = (f"{started}, which starts once the last microbatch has been through",) if started else ()
        closing = (*closing, Line(code=f"self.sums.start({_name(run)})", notes=said))
        lists = [*([_names(run)] if run.loop else []), *lists]
    return Access(
        over=tuple(lists),
        p="next(whole)" if parts.gathers(call, kind) else names["p"],
        g=names["g"],
        notes=(f"{moved(gathered)}: each rank holds a part",) if gathered else (),
        closing=closing,
    )


def over(run: Run, way: Access, *, backwards: bool = False) -> str:
    """A loop over a run's calls, with what the function takes of their parameters and gradients."""
    lists = [f"reversed({table})" if backwards else table for _, table in way.over]
    if not lists:
        return f"for _ in range({len(run.calls)}):"
    through = f"zip({', '.join(lists)}, strict=True)" if len(lists) > 1 else lists[0]
    return f"for {', '.join(name for name, _ in way.over)} in {through}:"


def units(builder: Stage, runs: Iterable[Run], kind: Kind) -> list[str]:
    """What the calls of a method gather, in their order."""
    found: list[str] = []
    for run in runs:
        if builder.parts.gathers(run.calls[0], kind):
            table = builder.attribute(run)
            backwards = run.loop and kind in ("B", "I")
            found.append(f"*reversed({table})" if backwards else f"*{table}" if run.loop else table)
    return found


def indented(lines: Iterable[Line], indent: str) -> Iterator[Line]:
    return (replace(line, indent=indent) for line in lines)
