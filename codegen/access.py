"""The statements around a stage's calls: loops, gathers and scatters of units, sums of buckets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from partc.codegen.calls import Run
from partc.codegen.source import Function, Line
from partc.codegen.stage_facts import StageFacts
from partc.codegen.weights import counting_iterable, strings
from partc.communication.descriptions import moved
from partc.ir.folding import item_range, ranges
from partc.ir.program import (
    ActionStatement,
    BodyKind,
    Call,
    Collective,
    GraphKind,
    Subject,
    Verb,
    When,
)
from partc.quoting import literal, literal_template


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The code around a run of calls: the loop, and each call's gathers, scatters and sums before and after it."""

    head: tuple[Line, ...]  # the lines before the calls, up to the loop's first line
    indent: str
    before: tuple[Line, ...]
    p: str
    g: str
    after: tuple[Line, ...]
    tail: tuple[Line, ...]  # the lines after the loop


Item = str | int | None  # the name of a call or bucket, the number of a later action's gather, or None
AHEAD = ("ahead", "beyond")  # the method parameters for gathers of later actions
SCATTERS = ("scattering", "former")  # the attributes for scatters in progress, the last one first
LOCALS = ("unit", "following", "following_2", "coming", "coming_2", "former", *AHEAD)
_VARIABLES: Mapping[tuple[Verb, Subject], str] = {
    ("start", "gather"): "following", ("advance", "gather"): "coming", ("advance", "refresh"): "coming",
    ("advance", "bucket"): "former",
}  # fmt: skip
_METHODS: Mapping[tuple[Verb, Subject], str] = {("start", "gather"): "gather", ("start", "refresh"): "gather"}


@dataclass(frozen=True, slots=True)
class _Column:
    """A statement around each call of a loop; None at calls that lack it."""

    verb: Verb
    subject: Subject
    when: When
    scatter: str  # the attribute that holds the scatter which is advanced or waited for
    statements: tuple[ActionStatement | None, ...]

    @property
    def form(self) -> tuple[Verb, Subject, When, str]:
        """The facts in which all its statements agree."""
        return self.verb, self.subject, self.when, self.scatter

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(None if each is None else each.ahead or each.of for each in self.statements)

    @property
    def only_first(self) -> bool:
        return len(self.statements) > 1 and not any(self.statements[1:])

    @property
    def only_last(self) -> bool:
        return len(self.statements) > 1 and not any(self.statements[:-1])

    def at(self, index: int) -> _Column:
        return replace(self, statements=self.statements[index:][:1])


def access(facts: StageFacts, run: Run, function: Function, kind: GraphKind) -> Access:
    """The code around a run of calls, in the order of its action."""
    calls = run.calls[::-1] if kind in ("B", "I") else run.calls
    writer = _RunWriter(facts, run, calls)
    around = _graph_sections(facts, kind)
    before = _columns([around[call.name][0] for call in calls])
    after = _columns([around[call.name][1] for call in calls])
    alone = next((index for index, each in enumerate(before) if not each.only_first), len(before))
    trailing = next((index for index, each in enumerate(after[::-1]) if not each.only_last), len(after))
    behind = after[len(after) - trailing :]
    parted = facts.exchanges.has_unit(calls[0])
    if parted and ("p" in function.passes or function.gives):
        writer.unit(tuple(call.name for call in calls), "unit")
    single = _RunWriter(facts, replace(run, calls=run.calls[:1]), calls)
    lines = [writer.lines(before[alone:]), writer.lines(after[: len(after) - trailing])]
    here = writer.variables.get(tuple(call.name for call in calls), "")
    loop = writer.loop(function, kind, parted)
    indent = "    " if run.loop else ""
    return Access(
        head=(*single.lines([each.at(0) for each in before[:alone]]), *loop),
        indent=indent,
        before=tuple(indented(lines[0], indent)),
        p=f"{here}.whole" if parted and "p" in function.passes else "p" if run.loop else "",
        g="g" if run.loop else "",
        after=tuple(indented(lines[1], indent)),
        tail=tuple(single.lines([each.at(-1) for each in behind])),
    )


def _graph_sections(facts: StageFacts, kind: GraphKind) -> dict[str, tuple[list[_Column], list[_Column]]]:
    """For each call, the statements before and after its graph runs, as columns of a single call."""
    found: dict[str, tuple[list[_Column], list[_Column]]] = {call.name: ([], []) for call in facts.calls}
    waiting: list[_Column] = []
    call = ""
    # Scatters in progress, the last one first: those of earlier actions by number, others by name.
    under_way: list[Item] = [1, 2]
    for each in facts.body(kind):
        if each.subject == "value" or each.when in ("early", "late"):
            continue
        if each.verb == "run":
            call = each.of
            found[call][0].extend(waiting)
            waiting = []
            continue
        column = _Column(each.verb, each.subject, each.when, _attribute(each, under_way), (each,))
        if not call or each.subject == "refresh" or (each.subject == "gather" and each.verb != "free"):
            waiting.append(column)
        else:
            found[call][1].append(column)
    return found


def _attribute(each: ActionStatement, under_way: list[Item]) -> str:
    """The attribute that holds a statement's scatter; updates `under_way`."""
    if each.subject != "scatter":
        return ""
    if each.verb == "start":
        under_way.insert(0, each.of)
        return ""
    index = under_way.index(each.behind or each.of)
    if each.verb == "wait":
        del under_way[index]
    return SCATTERS[index]


def _columns(lists: Sequence[Sequence[_Column]]) -> list[_Column]:
    """The statements of several calls as columns, in an order that fits all calls."""
    found: list[tuple[_Column, dict[int, ActionStatement | None]]] = []  # with the statements by call
    for number in sorted(range(len(lists)), key=lambda number: -len(lists[number])):
        at = 0
        for column in lists[number]:
            place = next((index for index in range(at, len(found)) if found[index][0].form == column.form), None)
            if place is None:
                place = at
                found.insert(place, (column, {}))
            found[place][1][number] = column.statements[0]
            at = place + 1
    return [replace(column, statements=tuple(map(by_call.get, range(len(lists))))) for column, by_call in found]


class _RunWriter:
    """Writes the statements around a run, and collects the variables of its loop."""

    def __init__(self, facts: StageFacts, run: Run, calls: Sequence[Call]) -> None:
        self.facts, self.run, self.calls = facts, run, calls
        self.units = Units(facts)
        self.variables: dict[tuple[Item, ...], str] = {}  # items across the calls -> variable, or common expression
        self.names: dict[tuple[str, ...], str] = {}  # names of buckets across the calls -> variable
        self.counts = False  # whether lines read the call's index or name

    def unit(self, items: tuple[Item, ...], wanted: str) -> str:
        if items not in self.variables:
            again = f"{wanted}_2" if wanted in self.variables.values() else wanted
            self.variables[items] = again if self.run.loop else self.units.one(items[0])
        return self.variables[items]

    def lines(self, columns: Sequence[_Column]) -> list[Line]:
        """The lines of columns; consecutive lines under the same condition share an `if`."""
        found: list[Line] = []
        written = [(self._condition(each), each) for each in columns]
        for condition, together in groupby(written, key=lambda item: item[0]):
            indent = "    " if condition else ""
            found.extend([Line(code=f"if {condition}:")] if condition else [])
            found.extend(line for _, each in together for line in indented(self._statement(each), indent))
        return found

    def _condition(self, column: _Column) -> str:
        """`last`, or `last and i in (2, 5)` for the sums that start after some calls of a loop."""
        if column.subject != "bucket" or all(column.statements):
            return column.when
        chosen = [call for call, each in zip(self.calls, column.statements, strict=True) if each is not None]
        if self._prefix(column) is None:
            return f"{column.when} and {self._names(column)}"
        self.counts = True
        numbers = dict(zip((call.name for call in self.run.calls), self.run.numbers or (), strict=False))
        words = [str(numbers.get(call.name, literal(call.name))) for call in chosen]
        variable = "i" if self.run.numbers else "name"
        several = f"in ({', '.join(words)})"
        return f"{column.when} and {variable} {f'== {words[0]}' if len(words) == 1 else several}"

    def _prefix(self, column: _Column) -> str | None:
        """The prefix that turns a call's name into the bucket's, if it is the same for all calls; else None."""
        pairs = [(call.name, each.of) for call, each in zip(self.calls, column.statements, strict=True) if each]
        found = {of.removesuffix(name) if f".{of}".endswith(f".{name}") else None for name, of in pairs}
        return found.pop() if len(found) == 1 else None

    def _names(self, column: _Column) -> str:
        names = tuple("" if each is None else each.of for each in column.statements)
        return self.names.setdefault(names, _VARIABLES.get((column.verb, column.subject), "bucket"))

    def _bucket(self, column: _Column) -> str:
        """The expression of a bucket's name."""
        if not self.run.loop:
            each = column.statements[0]
            assert each is not None
            return literal(each.of)
        prefix = self._prefix(column)
        if prefix is None:
            return self._names(column)
        self.counts = True
        if self.run.numbers:
            return literal_template(prefix + self.run.prefix, ".{i}")
        return literal_template(prefix, "{name}") if prefix else "name"

    def _statement(self, column: _Column) -> Iterator[Line]:
        verb, subject = column.verb, column.subject
        notes = _notes(self.facts, column, tuple(call.name for call in self.calls))
        if subject == "bucket":
            yield Line(code=f"self.sums[{self._bucket(column)}].{verb}()", notes=notes)
        elif subject == "scatter" and verb != "start":
            yield Line(code=f"self.{column.scatter}.{verb}()", notes=notes)
        elif subject == "scatter":
            unit = self.unit(column.items, "unit")
            yield Line(code=start_scatter(self.facts, f"{unit}.scatter(g)"), notes=notes)
            yield Line(code="del g")
        else:
            here = column.items == tuple(call.name for call in self.calls)
            unit = self.unit(column.items, "unit" if here else _VARIABLES.get((verb, subject), "unit"))
            yield Line(code=f"{unit}.{_METHODS.get((verb, subject), verb)}()", notes=notes)

    def loop(self, function: Function, kind: GraphKind, parted: bool) -> list[Line]:
        """The first line of the loop; empty if the run is a single call."""
        if not self.run.loop:
            return []
        backwards = kind in ("B", "I")
        lists = [(name, self.units.several(items)) for items, name in self.variables.items()]
        lists += [(variable, name_tuple(names)) for names, variable in self.names.items()]
        params, gradients = self.facts.attribute(self.run), self.facts.attribute(self.run, "grad ")
        tables = {"p": params, "g": gradients, "number": _counting(self.run)}
        taken = [name for name in ("p", "g", "number") if name in function.passes and not (name == "p" and parted)]
        lists += [(name, f"reversed({tables[name]})" if backwards else tables[name]) for name in taken]
        if self.counts:
            numbers = (
                ("i", counting_iterable(self.run.numbers)) if self.run.numbers else ("name", strings(_called(self.run)))
            )
            lists.insert(0, (numbers[0], f"reversed({numbers[1]})" if backwards else numbers[1]))
        uses = frozenset({"NOTHING"} if any(None in items for items in self.variables) else ())
        return [Line(code=_loop(lists, len(self.calls)), uses=uses)]


def start_scatter(facts: StageFacts, scatter: str) -> str:
    """The statement that stores a new scatter, and moves the previous one if two are in progress at a time."""
    new = f"self.{SCATTERS[0]}"
    return f"self.{SCATTERS[1]}, {new} = {new}, {scatter}" if two_scatters(facts) else f"{new} = {scatter}"


def two_scatters(facts: StageFacts) -> bool:
    """Whether two scatters of a stage are in progress at a time."""
    kinds: tuple[BodyKind, ...] = ("B", "I", "W", "REDUCE_GRAD")
    return any(each.behind == 2 for kind in kinds for each in facts.body(kind))


@dataclass(frozen=True)
class Units:
    """Expressions for the units of calls."""

    facts: StageFacts

    def one(self, item: Item) -> str:
        if item is None:
            return "NOTHING"
        if isinstance(item, int):
            return AHEAD[item - 1]
        table, place = self._places[item]
        return table if place is None else f"{table}[{place}]"

    def several(self, items: Sequence[Item]) -> str:
        """An expression for several units, in order; adjacent units of a list become a slice."""
        groups: list[list[Item]] = []
        for item in items:
            if groups and self._continues(groups[-1], item):
                groups[-1].append(item)
            else:
                groups.append([item])
        parts = [self.one(group[0]) if len(group) == 1 else self._slice(group) for group in groups]
        if len(parts) == 1 and parts[0].startswith("*"):
            return parts[0][1:]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"

    def _continues(self, group: Sequence[Item], item: Item) -> bool:
        """Whether the item is the next unit of a list, in the direction of the group."""
        step = self._step(group[-1], item)
        return step != 0 and (len(group) == 1 or step == self._step(group[0], group[1]))

    def _step(self, item: Item, next_: Item) -> int:
        """1 or -1 if the second unit comes directly after or before the first in a list, else 0."""
        (table, place), (other, index) = self._place(item), self._place(next_)
        if table != other or place is None or index is None or abs(index - place) != 1:
            return 0
        return index - place

    def _slice(self, group: Sequence[Item]) -> str:
        table, _ = self._place(group[0])
        low, *_, high = sorted(place for _, place in map(self._place, group) if place is not None)
        count = next(len(run.calls) for run in self._loops if self.facts.attribute(run) == table)
        part = table if len(group) == count else f"{table}[{low or ''}:{high + 1 if high + 1 < count else ''}]"
        return f"*{part}" if self._step(group[0], group[1]) > 0 else f"*reversed({part})"

    @cached_property
    def _places(self) -> Mapping[str, tuple[str, int | None]]:
        found: dict[str, tuple[str, int | None]] = {}
        for run in self.facts.runs["microbatch"]:
            table = self.facts.attribute(run)
            found |= {call.name: (table, index if run.loop else None) for index, call in enumerate(run.calls)}
        return found

    def _place(self, item: Item) -> tuple[str, int | None]:
        return self._places[item] if isinstance(item, str) else ("", None)

    @property
    def _loops(self) -> list[Run]:
        return [run for run in self.facts.runs["microbatch"] if run.loop]


def _notes(facts: StageFacts, column: _Column, calls: tuple[str, ...]) -> tuple[str, ...]:
    """The collectives that a statement starts at these calls, as a comment."""
    said = ""
    if (column.verb, column.subject) == ("start", "gather") and column.items != calls:
        said = "while this call runs"
    elif (column.verb, column.subject) == ("start", "scatter"):
        said = "while the next call runs: each rank keeps its shard of the sum"
    return said_of(facts, (each for each in column.statements if each is not None), said)


def said_of(facts: StageFacts, statements: Iterable[ActionStatement], said: str = "") -> tuple[str, ...]:
    """The collectives that statements start, as comments; `said` is added to the first one."""
    texts = (_moved(facts, each.collectives) for each in statements)
    unique = list(dict.fromkeys(filter(None, texts)))
    more = f"; other calls: {', '.join(unique[1:])}" if unique[1:] else ""
    return (f"{', '.join(filter(None, (unique[0], said)))}{more}",) if unique else ()


def _moved(facts: StageFacts, collectives: Iterable[Collective | None]) -> str:
    return moved((each for each in collectives if each is not None), facts.program.sizes)


def refresh_lines(facts: StageFacts, kind: BodyKind) -> Iterator[Line]:
    """The gathers of parameters that stay whole. In INIT each one is waited for before the next one starts."""
    statements: dict[str, list[ActionStatement]] = {}
    for each in facts.body(kind):
        statements.setdefault(each.of, []).append(each)
    verbs = {name: [_METHODS.get((s.verb, s.subject), s.verb) for s in found] for name, found in statements.items()}
    units = Units(facts)
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


def _called(run: Run) -> Iterator[str]:
    return (call.name for call in run.calls)


def name_tuple(names: Sequence[str]) -> str:
    """An expression for several names, in order; consecutively numbered names become a comprehension."""
    parts: list[str] = []
    for first, last in ranges(names):
        several = list(map(str, item_range(first, last)))
        if len(several) < 3:
            parts.extend(map(literal, several))
            continue
        low, high = (int(re.sub(r".*\D", "", str(each))) for each in (first, last))
        numbers = f"range({low}, {high + 1})" if low < high else f"range({low}, {high - 1}, -1)"
        parts.append(f"*({literal_template(str(first).removesuffix(str(low)), '{i}')} for i in {numbers})")
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def _loop(lists: Sequence[tuple[str, str]], count: int) -> str:
    """A loop over calls, with the variables of each."""
    if not lists:
        return f"for _ in range({count}):"
    through = f"zip({', '.join(table for _, table in lists)}, strict=True)" if len(lists) > 1 else lists[0][1]
    return f"for {', '.join(name for name, _ in lists)} in {through}:"


def opening_units(facts: StageFacts, kind: BodyKind) -> list[str]:
    """The units that an action gathers first and whose gathers earlier actions start."""
    units = Units(facts)
    early = (each for each in facts.body(kind) if each.when == "early")
    return [units.one(each.of) for each in early if each.verb == "start"]


def indented(lines: Iterable[Line], indent: str) -> Iterator[Line]:
    return (replace(line, indent=line.indent + indent) for line in lines)
