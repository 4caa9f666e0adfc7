"""The statements around a stage's calls: loops, gathers and scatters of units, sums that start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from typing import Protocol

from partc.codegen.calls import Run
from partc.codegen.source import Function, Line, RegionCode
from partc.codegen.weights import counted, strings
from partc.communication.descriptions import moved
from partc.communication.exchanges import Exchanges, Levels
from partc.ir.program import (
    ActionStatement,
    BodyKind,
    Call,
    GraphKind,
    Phase,
    Program,
    Subject,
    TensorType,
    Transfer,
    Verb,
)
from partc.quoting import literal, literal_template


class Stage(Protocol):
    """The facts about the stage whose methods are written."""

    program: Program
    index: int
    exchanges: Exchanges
    calls: list[Call]
    runs: dict[Phase, list[Run]]
    types: Mapping[str, TensorType]
    codes: dict[str, RegionCode]
    places: dict[str, str]
    sent: list[Transfer]
    received: list[Transfer]
    split: bool

    def attribute(self, run: Run, kind: str = "") -> str: ...
    def started(self, run: Run) -> str: ...
    def late(self) -> str: ...
    def refreshed(self) -> str: ...
    def unit(self, call: str) -> str: ...
    def arguments(
        self, function: Function, run: Run, args: Iterable[str], comm: str, p: str = "", g: str = ""
    ) -> str: ...
    def placed(self, names: Iterable[str]) -> list[str]: ...
    def makes(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The code around a run of calls: the loop, and before and after each call its gathers, scatters and sums."""

    head: tuple[Line, ...]  # the loop's first line, if there is a loop
    indent: str
    before: tuple[Line, ...]
    p: str
    g: str
    after: tuple[Line, ...]


Item = str | int | None  # a call's name, the number of a gather of later actions, or nothing
AHEAD = ("ahead", "beyond")  # the method parameters for gathers of later actions
_VARIABLES: Mapping[tuple[str, str], str] = {
    ("start", "gather"): "following", ("relay", "gather"): "coming", ("relay", "refresh"): "coming",
    ("wait", "scatter"): "former", ("relay", "scatter"): "latest",
}  # fmt: skip
_METHODS: Mapping[tuple[str, str], str] = {
    ("start", "gather"): "gather", ("relay", "gather"): "relay", ("wait", "gather"): "wait",
    ("free", "gather"): "free", ("start", "scatter"): "scatter", ("relay", "scatter"): "relay_scatter",
    ("wait", "scatter"): "settle", ("start", "refresh"): "gather", ("relay", "refresh"): "relay",
    ("wait", "refresh"): "wait",
}  # fmt: skip


def access(builder: Stage, run: Run, function: Function, kind: GraphKind) -> Access:
    """The code around a run of calls, in the order of its action."""
    backwards = kind in ("B", "I")
    calls = run.calls[::-1] if backwards else run.calls
    around = _around(builder, kind)
    columns = list(zip_longest(*(around[call.name] for call in calls)))  # by statement, across the calls
    units = Units(builder)
    names = tuple(call.name for call in calls)
    parted = builder.exchanges.has_unit(calls[0])
    variables: dict[
        tuple[Item, ...], str
    ] = {}  # items across the calls -> the loop's variable, or the expression common to all

    def unit(column: Sequence[ActionStatement | None]) -> str:
        items = tuple(None if each is None else each.ahead or each.of for each in column)
        if items not in variables:
            wanted = "unit" if items == names else _VARIABLES[verb, subject]
            variables[items] = wanted if run.loop else units.one(items[0])
        return variables[items]

    needs_unit = parted and ("p" in function.passes or function.gives)
    if needs_unit:
        variables[names] = "unit" if run.loop else units.one(names[0])
    before: list[Line] = []
    after: list[Line] = []
    sums: list[str] = []
    for column in columns:
        verb, subject = next((each.verb, each.subject) for each in column if each is not None)
        if subject == "sums":
            sums.append("self.sums.relay()" if verb == "relay" else f"self.sums.start({_name(run)})")
            continue
        given = "g" if (verb, subject) == ("start", "scatter") else ""
        code = f"{unit(column)}.{_METHODS[verb, subject]}({given})"
        line = Line(code=code, notes=_notes(builder, (verb, subject), column, kind, names))
        if _precedes(verb, subject):
            before.append(line)
        else:
            after.extend([line, Line(code="del g")] if given else [line])
    if sums:
        started = builder.started(run)
        said = (f"{started}: complete once the last microbatch has been through",) if started else ()
        after.append(Line(code="if last:", notes=said))
        after.extend(Line(code=f"    {code}") for code in sums)
    lists = [(name, units.several(items)) for items, name in variables.items()]
    tables = {"p": builder.attribute(run), "g": builder.attribute(run, "grad "), "number": _counting(run)}
    taken = [name for name in ("p", "g", "number") if name in function.passes and not (name == "p" and parted)]
    lists += [(name, f"reversed({tables[name]})" if backwards else tables[name]) for name in taken]
    if any("{i}" in code or "(name)" in code for code in sums):
        numbers = _names(run)
        lists.insert(0, (numbers[0], f"reversed({numbers[1]})" if backwards else numbers[1]))
    here = variables.get(names, "")
    indent = "    " if run.loop else ""
    return Access(
        head=(Line(code=_loop(lists, len(calls))),) if run.loop else (),
        indent=indent,
        before=tuple(indented(before, indent)),
        p=f"{here}.whole" if parted and "p" in function.passes else "p" if run.loop else "",
        g="g" if run.loop else "",
        after=tuple(indented(after, indent)),
    )


def _around(builder: Stage, kind: GraphKind) -> dict[str, tuple[ActionStatement, ...]]:
    """The statements around the run of each call's graph."""
    found: dict[str, list[ActionStatement]] = {call.name: [] for call in builder.calls}
    waiting: list[ActionStatement] = []
    call = ""
    for each in builder.program.body(kind, builder.index):
        if each.verb == "run":
            call = each.of
            found[call] = waiting
            waiting = []
        elif _precedes(each.verb, each.subject):
            waiting.append(each)
        elif call and each.subject != "value":
            found[call].append(each)
    return {name: tuple(statements) for name, statements in found.items()}


def _precedes(verb: Verb, subject: Subject) -> bool:
    """Whether a statement is emitted before the line that runs its call."""
    return subject == "refresh" or (subject == "gather" and verb != "free")


def settled(builder: Stage, kind: GraphKind) -> Iterator[Line]:
    """The waits for scatters before an action's first call."""
    before = takewhile(lambda each: each.verb == "wait", builder.program.body(kind, builder.index))
    yield from (Line(code=f"{builder.unit(each.of)}.settle()") for each in before if each.subject == "scatter")


@dataclass(frozen=True)
class Units:
    """Expressions for the units of calls."""

    builder: Stage

    def one(self, item: Item) -> str:
        if item is None:
            return "NOTHING"
        if isinstance(item, int):
            return AHEAD[item - 1]
        table, place = self._place(item)
        return table if place is None else f"{table}[{place}]"

    def several(self, items: Sequence[Item]) -> str:
        """An expression for several units, in order."""
        parts: list[str] = []
        at = 0
        while at < len(items):
            item = items[at]
            table, place = self._place(item) if isinstance(item, str) else ("", None)
            end = at + 1
            step = 0
            while place is not None and end < len(items) and (found := self._place_in(table, items[end])) is not None:
                last = self._place_in(table, items[end - 1])
                assert last is not None
                if found - last not in ((1, -1) if not step else (step,)):
                    break
                step, end = found - last, end + 1
            parts.append(self.one(item) if end == at + 1 else self._slice(table, place or 0, end - at, step))
            at = end
        if len(parts) == 1 and parts[0].startswith("*"):
            return parts[0][1:]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"

    def _slice(self, table: str, first: int, count: int, step: int) -> str:
        low = first if step > 0 else first - count + 1
        length = len(next(run for run in self._loops if self.builder.attribute(run) == table).calls)
        high = low + count
        part = table if count == length else f"{table}[{low or ''}:{high if high < length else ''}]"
        return f"*{part}" if step > 0 else f"*reversed({part})"

    def _place(self, name: str) -> tuple[str, int | None]:
        for run in self.builder.runs["microbatch"]:
            for index, call in enumerate(run.calls):
                if call.name == name:
                    return self.builder.attribute(run), index if run.loop else None
        raise KeyError(name)

    def _place_in(self, table: str, item: Item) -> int | None:
        if not isinstance(item, str):
            return None
        other, place = self._place(item)
        return place if other == table else None

    @property
    def _loops(self) -> list[Run]:
        return [run for run in self.builder.runs["microbatch"] if run.loop]


def _notes(
    builder: Stage,
    statement: tuple[Verb, Subject],
    column: Sequence[ActionStatement | None],
    kind: GraphKind,
    names: tuple[str, ...],
) -> tuple[str, ...]:
    """The collectives that a statement starts for these calls, as a comment."""
    calls = {call.name: call for call in builder.calls}
    here = [calls[each.of] for each in column if each is not None and each.of]
    match statement:
        case "start", "gather":
            texts = [_moved(builder, builder.exchanges.gather(call.params)) for call in here]
            said = "while this call runs" if tuple(each and each.of for each in column) != names else ""
        case "start", "scatter":
            texts = [_moved(builder, builder.exchanges.scatter(call, kind)) for call in here]
            said = "until the next one starts: each rank keeps its part of the sum"
        case _:
            return ()
    unique = [text for text in dict.fromkeys(texts) if text]
    more = f"; other calls: {', '.join(unique[1:])}" if unique[1:] else ""
    return (f"{', '.join(filter(None, (unique[0], said)))}{more}",) if unique else ()


def _moved(builder: Stage, levels: Levels) -> str:
    return moved(levels, builder.program.sizes) if levels else ""


def refreshed(builder: Stage, kind: BodyKind) -> Iterator[Line]:
    """The gathers of parameters that stay whole. In INIT each one is waited for before the next one starts."""
    verbs: dict[str, list[str]] = {}
    for each in builder.program.body(kind, builder.index):
        verbs.setdefault(each.of, []).append(_METHODS[each.verb, each.subject])
    units = Units(builder)
    if len(verbs) < 3 or len({*map(tuple, verbs.values())}) > 1:
        yield from (Line(code=f"{units.one(name)}.{verb}()") for name, each in verbs.items() for verb in each)
        return
    yield Line(code=f"for unit in {units.several([*verbs])}:")
    yield from (Line(code=f"    unit.{verb}()") for verb in next(iter(verbs.values())))


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
    """A variable for the call's name, and the list of its values."""
    return ("i", counted(run.numbers)) if run.numbers else ("name", strings(call.name for call in run.calls))


def _loop(lists: Sequence[tuple[str, str]], count: int) -> str:
    """A loop over calls, with the variables of each."""
    if not lists:
        return f"for _ in range({count}):"
    through = f"zip({', '.join(table for _, table in lists)}, strict=True)" if len(lists) > 1 else lists[0][1]
    return f"for {', '.join(name for name, _ in lists)} in {through}:"


def opens(builder: Stage, kind: BodyKind) -> list[str]:
    """The units that an action gathers first, as many as earlier actions start ahead."""
    units = Units(builder)
    waits = [
        each for each in builder.program.body(kind, builder.index) if (each.verb, each.subject) == ("wait", "gather")
    ]
    return [units.one(each.of) for each in waits[: builder.exchanges.levels]]


def indented(lines: Iterable[Line], indent: str) -> Iterator[Line]:
    return (replace(line, indent=line.indent + indent) for line in lines)
