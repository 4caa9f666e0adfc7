"""The parser of the IR's text: the inverse of partc.ir.printer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from partc.errors import PartcError, Source
from partc.ir.folding import Item, Loop, Repeat, item_range, unfolded, unfolded_row
from partc.ir.layout import Layout
from partc.ir.mesh import Mesh
from partc.ir.printer import CALL, NUMBER, WORDS
from partc.ir.program import (
    SCAN,
    Action,
    ActionKind,
    ActionStatement,
    Arg,
    Body,
    BodyKind,
    Bucket,
    Call,
    Choice,
    Collective,
    DType,
    DTypeArg,
    Graph,
    Kernels,
    Op,
    Parameter,
    Phase,
    Program,
    Ref,
    Region,
    Repetition,
    Subject,
    TensorType,
    Transfer,
    Transport,
    Value,
    Verb,
    When,
)
from partc.quoting import unquoted
from partc.runtime.dims import Sectioned
from partc.runtime.first_steps import ABSENT, FirstSteps, FirstValue

_QUOTED = r"`(?:[^`\\]|\\.)*`"
_TOKEN = re.compile(
    rf'\s*(?:(?P<number>{NUMBER.pattern})|(?P<string>"(?:[^"\\]|\\.)*")|<(?P<dtype>\w+)>|(?P<quoted>{_QUOTED})'
    r"|(?P<name>[A-Za-z_0-9][\w.:]*)|(?P<mark>[(),=;]))"
)
_ANY = rf"(?:{_QUOTED}|[A-Za-z_0-9][\w.]*)"
_NAME = f"({_ANY})"
_NAMES = f"((?:{_ANY}(?:, {_ANY})*)?)"
_KINDS = "|".join(sorted(get_args(ActionKind), key=len, reverse=True))
_ACTION = rf"(\d+)({_KINDS})(\d+)?(?:>([\w,]+))?"
_COLLECTIVE = r"(\w+)\((\w+)\[([\d, ]*)\] over ([\w,]+)(?: ([\d,]+))?(?: in (\w+))?\)"
_STATEMENT = (
    rf"(?:({'|'.join(filter(None, get_args(When)))}) )?({'|'.join(get_args(Verb))}) ({'|'.join(get_args(Subject))})"
    rf"(?: (?:ahead (\d)|behind (\d)|\$(\d+)|({_ANY})))?(?: (?:->|<-) (\d+))?(?:: (.*?))?(?:  # [^#]*)?"
)


class _Malformed(Exception):
    """The error in a malformed line."""


def parse(text: str) -> Program:
    """Parse the text of a program. Raises PartcError P0221, with the line, if it is malformed."""
    reader = _TextReader()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            reader.line(line.strip(), indented=line.startswith("    "))
        except (_Malformed, ValueError, KeyError, AttributeError, PartcError) as error:
            raise PartcError(
                "P0221",
                f"the IR does not parse: {error}",
                help="print a program with `partc inspect` to see its form",
                source=Source(file="<ir>", line=number),
            ) from error
    return reader.program()


@dataclass(slots=True)
class _Body:
    """A region under construction."""

    name: str
    phase: Phase
    kernels: Kernels
    batch_over: tuple[str, ...]
    params: list[Value] = field(default_factory=list)
    graphs: dict[str, list[Any]] = field(default_factory=dict)  # title -> inputs, operations, outputs
    saved: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    current: str = ""

    def region(self) -> Region:
        graphs = {
            title: Graph(inputs=tuple(inputs), ops=tuple(ops), outputs=outputs)
            for title, (inputs, ops, outputs) in self.graphs.items()
        }
        return Region(
            name=self.name,
            params=tuple(self.params),
            forward=graphs["forward"],
            backward=graphs.get("backward"),
            saved=self.saved,
            weight=graphs.get("weight"),
            kept=self.kept,
            phase=self.phase,
            kernels=self.kernels,
            batch_over=self.batch_over,
        )


@dataclass(frozen=True, slots=True)
class _Open:
    """A loop over calls being read."""

    slots: tuple[tuple[Item, ...], ...]
    statements: list[ActionStatement]
    uses: list[int | None]


def _flat(items: Iterable[ActionStatement | _Open]) -> Iterator[ActionStatement]:
    for item in items:
        if isinstance(item, ActionStatement):
            yield item
        else:
            yield from unfolded(Loop(item.slots, tuple(item.statements), tuple(item.uses)))


def _slot(text: str) -> tuple[Item, ...]:
    """`$1 in blocks.0 to blocks.6, ahead 1`."""
    found: list[Item] = []
    for match in re.finditer(rf"ahead (\d)|({_ANY})(?: to ({_ANY}))?", text.split(" in ", 1)[1]):
        first, last = _name(match[2] or ""), _name(match[3] or match[2] or "")
        found.extend([int(match[1])] if match[1] else item_range(first, last))
    return tuple(found)


def _collective(text: str) -> Collective | None:
    """`all_reduce(f32[4, 8] over dp,tp)`, or `-` for none."""
    if text == "-":
        return None
    match = _matched(_COLLECTIVE, text)
    dtype: Any = match[2]
    return Collective(
        op=match[1],
        axes=() if match[5] else tuple(match[4].split(",")),
        shape=tuple(map(int, match[3].split(", "))) if match[3] else (),
        dtype=dtype,
        code=match[6] or "",
        places=tuple(map(int, match[5].split(","))) if match[5] else (),
    )


def _action(word: str) -> Action:
    match = _matched(_ACTION, word)
    kind: Any = match[2]
    microbatch = None if match[3] is None else int(match[3])
    ahead = tuple(match[4].split(",")) if match[4] else ()
    return Action(stage=int(match[1]), kind=kind, microbatch=microbatch, ahead=ahead)


def _row(text: str) -> tuple[tuple[Action | Repeat, ...], str]:
    """The items up to the end of the text or of a loop, and the text from there on."""
    items: list[Action | Repeat] = []
    while (text := text.lstrip()) and not text.startswith(")"):
        if (opening := re.match(r"(\d+) \* \(", text)) is None:
            word = _matched(r"[^\s()]+", re.split(r"[\s()]", text, maxsplit=1)[0])[0]
            items.append(_action(word))
            text = text[len(word) :]
            continue
        inner, text = _row(text[opening.end() :])
        closing = re.match(r"\)(?: by (-?\d+))?(?=[\s)]|$)", text)
        if closing is None:
            raise _Malformed("a loop of actions does not end")
        items.append(Repeat(int(opening[1]), int(closing[1] or 1), inner))
        text = text[closing.end() :]
    return tuple(items), text


class _TextReader:
    def __init__(self) -> None:
        self._head: Program | None = None
        self._way = Transport()
        self._flag = ""
        self._first_values: list[FirstValue] = []
        self._parts: dict[str, list[Any]] = {
            key: []
            for key in (
                "inputs", "whole_inputs", "largest", "branches", "values", "results", "parameters", "buckets", "calls",
                "transfers", "updates", "reached", "places", "schedule", "repetitions",
            )
        }  # fmt: skip
        self._bodies: list[_Body] = []
        self._actions: list[tuple[BodyKind, int, list[ActionStatement | _Open]]] = []

    def program(self) -> Program:
        if self._head is None:
            raise PartcError(
                "P0221", "the IR does not parse: it has no program line", help="start with: program NAME …"
            )
        parts: dict[str, Any] = {key: tuple(items) for key, items in self._parts.items()}
        return replace(
            self._head,
            transport=self._way,
            steps=FirstSteps(flag=self._flag, values=tuple(self._first_values)) if self._flag else None,
            regions=tuple(body.region() for body in self._bodies),
            bodies=tuple(
                Body(kind=kind, index=index, statements=tuple(_flat(items))) for kind, index, items in self._actions
            ),
            **parts,
        )

    def line(self, text: str, *, indented: bool = False) -> None:
        self._indented = indented  # a statement without a slot's number belongs to the loop above it
        if text.startswith("| "):
            self._inner(text.removeprefix("| "))
            return
        word = text.split(None, 1)[0].rstrip(":")
        readers: dict[str, Callable[[str], None]] = {
            "program": self._program, "input": self._input, "value": self._value, "parameter": self._parameter,
            "constant": self._parameter, "update": self._update, "reach": self._reach, "result": self._result,
            "call": self._call, "transfer": self._transfer, "places": self._places, "schedule": self._schedule,
            "region": self._region, "param": self._param, "forward": self._graph, "backward": self._graph,
            "weight": self._graph, "saved": self._saved, "kept": self._parse_kept, "return": self._return,
            "action": self._action, "for": self._loop, "repeat": self._repeat, "transport": self._transport,
            "bucket": self._bucket, "largest": self._largest, "branch": self._branch,
            "begun": self._begun, "attribute": self._first_value,
            **dict.fromkeys((*get_args(Verb), *get_args(When)), self._statement),
        }  # fmt: skip
        is_operation = re.match(rf"{_NAME}(, {_NAME})*\s+= \w", text) and word != CALL
        if is_operation:
            self._operation(text)
        elif word in readers:
            readers[word](text)
        else:
            raise _Malformed(f"{text!r} is not a line of the IR")

    def _program(self, text: str) -> None:
        match = _matched(
            rf"program {_NAME} mesh (\S+) microbatches (\d+)( separate)? loss {_NAME}( scaled)?"
            r"(?: draws (\d+)( for rows)?)?",
            text,
        )
        self._head = Program(
            name=_name(match[1]),
            mesh=Mesh.parse(match[2]),
            microbatches=int(match[3]),
            separate_batches=bool(match[4]),
            loss=_name(match[5]),
            scaled=bool(match[6]),
            draws=int(match[7] or 0),
            draws_for_rows=bool(match[8]),
        )

    def _input(self, text: str) -> None:
        if self._bodies and self._bodies[-1].current:
            self._current_ops()[0].append(_declared(text.removeprefix("input ")))
        else:
            match = _matched(rf"input {_NAME}( whole)?", text)
            self._parts["inputs"].append(_name(match[1]))
            self._parts["whole_inputs"].extend([_name(match[1])] if match[2] else [])

    def _largest(self, text: str) -> None:
        match = _matched(rf"largest {_NAME} = (\d+)", text)
        self._parts["largest"].append((_name(match[1]), int(match[2])))

    def _branch(self, text: str) -> None:
        match = _matched(rf"branch {_NAME} = (\d+)", text)
        self._parts["branches"].append((_name(match[1]), int(match[2])))

    def _begun(self, text: str) -> None:
        self._flag = _name(_matched(rf"begun {_NAME}", text)[1])

    def _first_value(self, text: str) -> None:
        match = _matched(
            rf"attribute {_NAME}: (absent|None|True|False|-?\d+), then (a tensor|True|False|-?\d+)( persistent)?", text
        )
        words = {"None": None, "True": True, "False": False, "a tensor": None}
        constant = lambda word: words[word] if word in words else int(word)  # noqa: E731
        self._first_values.append(
            FirstValue(
                name=_name(match[1]),
                before=ABSENT if match[2] == ABSENT else constant(match[2]),
                after=constant(match[3]),
                persistent=bool(match[4]),
            )
        )

    def _value(self, text: str) -> None:
        self._parts["values"].append(_declared(text.removeprefix("value ")))

    def _parameter(self, text: str) -> None:
        pattern = (
            rf"(parameter|constant) {_NAME}: (.*?)(?: aliases\({_NAMES}\))?(?: reduce\(([\w,]+)\))?"
            rf"(?: gather\(([\w,]+)\) zero (\d))?"
            rf"(?: bucket\({_NAMES}\))?(?: holds\(([\d,]+)\))?(?: sectioned\(([^)]*)\))?( sparse)?"
            rf"(?: balance\(([^)]+)\))?( stacked)?"
            rf"(?: tables\((.*?)\))?((?: counts\({_NAMES}\))*)"
        )
        match = _matched(pattern, text)
        self._parts["parameters"].append(
            Parameter(
                name=_name(match[2]),
                type=_type(match[3]),
                trainable=match[1] == "parameter",
                aliases=_names(match[4] or ""),
                reduce=tuple(match[5].split(",")) if match[5] else (),
                gather=tuple(match[6].split(",")) if match[6] else (),
                zero=int(match[7] or 0),
                buckets=_names(match[8] or ""),
                holds=tuple(map(int, match[9].split(","))) if match[9] else (),
                sectioned=_sectioned(match[10]) if match[10] is not None else None,
                sparse=bool(match[11]),
                balance=float(match[12] or 0),
                stacked=bool(match[13]),
                members=_members(match[14] or ""),
                counts=tuple(_names(each[1]) for each in re.finditer(rf" counts\({_NAMES}\)", match[15])),
            )
        )

    def _transport(self, text: str) -> None:
        match = _matched(r"transport(?: near\(([\w,]+)\))?(?: wire\((\w+)\))?(?: compress\((\w+)\))?", text)
        near = tuple(match[1].split(",")) if match[1] else ()
        wire: Any = match[2] or ""
        self._way = Transport(near=near, wire=wire, compress=match[3] or "")

    def _bucket(self, text: str) -> None:
        match = _matched(rf"bucket {_NAME}: (sum|scatter) over ([\w,]+) in stage (\d+)(?: after {_NAME})?", text)
        self._parts["buckets"].append(
            Bucket(
                name=_name(match[1]),
                stage=int(match[4]),
                over=tuple(match[3].split(",")),
                after=_name(match[5]) if match[5] else "",
                scattered=match[2] == "scatter",
            )
        )

    def _call(self, text: str) -> None:
        lists = rf"\({_NAMES}; ?{_NAMES}\) -> ?{_NAMES}"
        match = _matched(rf"call {_NAME} = {_NAME}{lists}(?: stage (\d+))?(?: random (\d+))?", text)
        self._parts["calls"].append(
            Call(
                name=_name(match[1]),
                region=_name(match[2]),
                args=_names(match[3]),
                params=_names(match[4]),
                results=_names(match[5]),
                stage=int(match[6] or 0),
                random=None if match[7] is None else int(match[7]),
            )
        )

    def _transfer(self, text: str) -> None:
        match = _matched(rf"transfer {_NAME} (\d+) -> (\d+)( gradient)?", text)
        self._parts["transfers"].append(
            Transfer(value=_name(match[1]), source=int(match[2]), target=int(match[3]), gradient=bool(match[4]))
        )

    def _update(self, text: str) -> None:
        match = _matched(rf"update {_NAME} = {_NAME}", text)
        self._parts["updates"].append((_name(match[1]), _name(match[2])))

    def _reach(self, text: str) -> None:
        match = _matched(rf"reach {_NAME} if {_NAME}", text)
        self._parts["reached"].append((_name(match[1]), _name(match[2])))

    def _result(self, text: str) -> None:
        match = _matched(rf"result {_NAME} = {_NAME}", text)
        self._parts["results"].append((_name(match[1]), _name(match[2])))

    def _repeat(self, text: str) -> None:
        match = _matched(rf"repeat (\d+): {_NAMES}", text)
        modules, count = _names(match[2]), int(match[1])
        units = tuple(modules[start : start + count] for start in range(0, len(modules), count))
        self._parts["repetitions"].append(Repetition(units))

    def _places(self, text: str) -> None:
        self._parts["places"].extend(int(_matched(r"(\d+)", word)[1]) for word in text.split()[1:])

    def _action(self, text: str) -> None:
        match = _matched(rf"action (\d+)({'|'.join(sorted(get_args(BodyKind), key=len, reverse=True))}):", text)
        kind: Any = match[2]
        self._actions.append((kind, int(match[1]), []))

    def _loop(self, text: str) -> None:
        heads = _matched(r"for (.*):", text)[1]
        item = rf"(?:ahead \d|{_ANY})(?: to {_ANY})?"
        slots = [_slot(found[0]) for found in re.finditer(rf"\$\d+ in {item}(?:, {item})*", heads)]
        self._here_actions().append(_Open(tuple(slots), [], []))

    def _statement(self, text: str) -> None:
        match = _matched(_STATEMENT, text)
        when: Any = match[1] or ""
        verb: Any = match[2]
        subject: Any = match[3]
        statement = ActionStatement(
            verb=verb,
            subject=subject,
            of=_name(match[7]) if match[7] else "",
            collectives=tuple(map(_collective, re.split(r", (?=-|\w+\()", match[9]))) if match[9] else (),
            ahead=int(match[4] or 0),
            behind=int(match[5] or 0),
            peer=None if match[8] is None else int(match[8]),
            when=when,
        )
        items = self._here_actions()
        if match[6] or (items and isinstance(items[-1], _Open) and self._indented):
            loop = items[-1] if items else None
            if not isinstance(loop, _Open):
                raise _Malformed("this stands outside a loop")
            loop.statements.append(statement)
            loop.uses.append(int(match[6]) - 1 if match[6] else None)
        else:
            items.append(statement)

    def _here_actions(self) -> list[ActionStatement | _Open]:
        if not self._actions:
            raise _Malformed("this stands outside an action")
        return self._actions[-1][2]

    def _schedule(self, text: str) -> None:
        items, rest = _row(text.split(":", 1)[1])
        if rest:
            raise _Malformed("a loop of actions ends that did not begin")
        self._parts["schedule"].append(tuple(action for item in items for action in unfolded_row(item)))

    def _region(self, text: str) -> None:
        match = _matched(
            rf"region {_NAME} phase ({'|'.join(get_args(Phase))})(?: kernels ({'|'.join(get_args(Kernels))}))?"
            r"(?: batch\(([a-z0-9_,]+)\))?:",
            text,
        )
        phase, kernels = cast(Phase, match[2]), cast(Kernels, match[3] or "aten")
        over = tuple(match[4].split(",")) if match[4] else ()
        self._bodies.append(_Body(_name(match[1]), phase, kernels, over))

    def _param(self, text: str) -> None:
        self._bodies[-1].params.append(_declared(text.removeprefix("param ")))

    def _graph(self, text: str) -> None:
        body = self._bodies[-1]
        body.current = text.rstrip(":")
        body.graphs[body.current] = [[], [], ()]

    def _saved(self, text: str) -> None:
        self._bodies[-1].saved = _names(text.removeprefix("saved "))

    def _parse_kept(self, text: str) -> None:
        self._bodies[-1].kept = _names(text.removeprefix("kept "))

    def _return(self, text: str) -> None:
        self._current_ops()[2] = _names(text.removeprefix("return").strip())

    def _current_ops(self) -> list[Any]:
        if not self._bodies or not self._bodies[-1].current:
            raise _Malformed("this stands outside a graph")
        return self._bodies[-1].graphs[self._bodies[-1].current]

    def _inner(self, text: str) -> None:
        """Parse a line in the body of the operation above."""
        ops = self._current_ops()[1]
        if not ops:
            raise _Malformed("this stands below no operation")
        if ops[-1].name == SCAN:
            ops[-1] = _with_line(ops[-1], text)
        else:
            ops[-1] = replace(ops[-1], body=(*ops[-1].body, _operation(text.strip())))

    def _operation(self, text: str) -> None:
        self._current_ops()[1].append(_operation(text))


def parse_graph(text: str) -> Graph:
    """Parse the text of a graph by itself. Raises PartcError P0221."""
    graph = Graph(inputs=(), ops=(), outputs=())
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            graph = _extended(graph, line)
        except (_Malformed, ValueError, KeyError) as error:
            source = Source(file="<ir>", line=number)
            raise PartcError("P0221", f"the IR does not parse: {error}", source=source) from error
    return graph


def _with_line(op: Op, text: str) -> Op:
    """A scan with one more line of its step."""
    attrs = dict(op.attrs)
    step = attrs.get("step", Graph(inputs=(), ops=(), outputs=()))
    assert isinstance(step, Graph)
    return replace(op, attrs=tuple({**attrs, "step": _extended(step, text)}.items()))


def _extended(graph: Graph, text: str) -> Graph:
    """A graph with one more line."""
    if text.startswith("| ") and graph.ops:
        return replace(graph, ops=(*graph.ops[:-1], _with_line(graph.ops[-1], text.removeprefix("| "))))
    if text.startswith("input "):
        return replace(graph, inputs=(*graph.inputs, _declared(text.removeprefix("input "))))
    if re.fullmatch(r"return( .*)?", text) and " = " not in text:
        return replace(graph, outputs=_names(text.removeprefix("return").strip()))
    return replace(graph, ops=(*graph.ops, _operation(text)))


def _operation(text: str) -> Op:
    code, _, comment = _split_comment(text)
    line = _matched(rf"{_NAMES} += (.*)", code)
    left, right = line[1], line[2]
    notes = re.split(rf" \| (?=(?:[^`]|{_QUOTED})*$)", comment) if comment else [""]
    types = [_type(part) for part in notes[0].split(" ; ") if part]
    names = _names(left)
    if len(names) != len(types):
        raise _Malformed(f"{len(names)} results with {len(types)} types")
    name, args, attrs = _Call(right.strip()).read()
    choices: tuple[Choice, ...] = ()
    source: Source | None = None
    wide = "wide" in notes[1:]
    for note in notes[1:]:
        if note.startswith("{"):
            choices = tuple(map(_choice, note.strip("{}").split()))
        elif note.startswith("at "):
            match = _matched(rf"at ({_QUOTED}|[^`]*):(\d+) ?({_QUOTED}|\S*)", note)
            source = Source(file=_name(match[1]), line=int(match[2]), module=_name(match[3]))
    results = tuple(Value(name=n, type=type) for n, type in zip(names, types, strict=True))
    return Op(name=name, args=args, attrs=attrs, results=results, choices=choices, source=source, wide=wide)


class _Call:
    """A parser of `name(args, key=value)`."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0

    def read(self) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        kind, name = self._next_token()
        if kind != "name":
            raise _Malformed(f"{name!r} names no operation")
        self._expect("(")
        args: list[Arg] = []
        attrs: list[tuple[str, Arg]] = []
        while self._peek() != ("mark", ")"):
            if self._at + 1 < len(self._tokens) and self._tokens[self._at + 1] == ("mark", "="):
                key = self._next_token()[1]
                self._expect("=")
                attrs.append((key, self._arg()))
            else:
                args.append(self._arg())
            if self._peek() == ("mark", ","):
                self._next_token()
        self._expect(")")
        return name, tuple(args), tuple(attrs)

    def _arg(self) -> Arg:
        kind, text = self._next_token()
        match kind:
            case "number":
                return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
            case "string":
                return str(json.loads(text))
            case "dtype":
                dtype: Any = text
                return DTypeArg(dtype)
            case "quoted":
                return Ref(unquoted(text))
            case "name":
                return WORDS[text] if text in WORDS else Ref(text)
            case _ if text == "(":
                items: list[Arg] = []
                while self._peek() != ("mark", ")"):
                    items.append(self._arg())
                    if self._peek() == ("mark", ","):
                        self._next_token()
                self._expect(")")
                return tuple(items)
        raise _Malformed(f"{text!r} is not an argument")

    def _peek(self) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            raise _Malformed("it ends too early")
        return self._tokens[self._at]

    def _next_token(self) -> tuple[str, str]:
        token = self._peek()
        self._at += 1
        return token

    def _expect(self, mark: str) -> None:
        if self._next_token() != ("mark", mark):
            raise _Malformed(f"{mark!r} is missing")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise _Malformed(f"{text[position:]!r} is not understood")
        yield match.lastgroup, match[match.lastgroup]
        position = match.end()


def _split_comment(text: str) -> tuple[str, str, str]:
    """Split a line at the first # outside a string into code and comment."""
    match = re.match(rf'((?:"(?:[^"\\]|\\.)*"|{_QUOTED}|[^"#`])*)(#?)(.*)', text)
    if match is None:
        raise _Malformed(f"{text!r} is not understood")
    return match[1], match[2], match[3].strip()


def _matched(pattern: str, text: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text)
    if match is None:
        raise _Malformed(f"{text!r} is not understood")
    return match


def _declared(text: str) -> Value:
    match = _matched(rf"{_NAME}: (.*)", text)
    return Value(name=_name(match[1]), type=_type(match[2]))


def _type(text: str) -> TensorType:
    match = _matched(r"(\w+)(\[.*)", text.strip())
    if match[1] not in get_args(DType):
        raise _Malformed(f"{match[1]!r} is not a dtype")
    dtype: Any = match[1]
    return TensorType(dtype=dtype, layout=Layout.parse(match[2]))


def _choice(text: str) -> Choice:
    match = _matched(r"([\w.]+)(?:/(\d+))?@(\w+)", text)
    return Choice(axis=match[3], factor=None if match[1] == "vary" else match[1], outer=int(match[2] or 1))


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(part) for part in re.findall(_ANY, text))


def _sectioned(text: str) -> Sectioned:
    match = _matched(r"(\d+): (\d+) of (\d+(?:\+\d+)*)", text)
    return Sectioned(int(match[1]), int(match[2]), tuple(map(int, match[3].split("+"))))


def _members(text: str) -> tuple[tuple[str, int, int], ...]:
    found = re.findall(rf"({_ANY}) (\d+) (\d+)", text)
    return tuple((_name(name), int(first), int(rows)) for name, first, rows in found)


def _name(text: str) -> str:
    return unquoted(text) if text.startswith("`") else text
