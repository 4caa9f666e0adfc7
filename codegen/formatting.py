"""A formatter of emitted lines: long lines are broken at their brackets, one item per line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from partc.quoting import WIDTH, masked, split_comment, unmasked

_OPEN, _CLOSE = "([{", ")]}"
_INDENT = "    "


def formatted(text: str) -> str:
    """Python source with long lines broken and surplus blank lines removed.

    Every statement of `text` is on one line, or is already broken at a bracket. The result is stable under `ruff
    format`.
    """
    lines: list[str] = []
    for line in map(str.rstrip, text.split("\n")):
        lines.extend(_shortened(line) if len(line) > WIDTH else [line])
    return _limited_blank_lines(lines)


def _shortened(line: str) -> list[str]:
    """The line, divided into several if it is too long; cut only outside of strings."""
    code, contents = masked(line)
    return unmasked("\n".join(_broken(code)), contents).split("\n")


@dataclass(frozen=True, slots=True)
class _Bracket:
    """A bracket pair at depth 0 of a line, by the positions of its two characters."""

    start: int
    end: int
    commas: tuple[int, ...]  # at depth 1


def _scan(code: str) -> tuple[list[_Bracket], list[int]]:
    """Bracket pairs and commas at depth 0 of code whose strings are masked."""
    brackets: list[_Bracket] = []
    top: list[int] = []
    stack: list[int] = []
    inner: list[int] = []
    for index, char in enumerate(code):
        if char in _OPEN:
            stack.append(index)
            if len(stack) == 1:
                inner = []
        elif char in _CLOSE and stack:
            start = stack.pop()
            if not stack:
                brackets.append(_Bracket(start, index, tuple(inner)))
        elif char == "," and len(stack) < 2:
            (inner if stack else top).append(index)
    return brackets, top


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement without its comment."""

    indent: str
    code: str
    brackets: Sequence[_Bracket]  # at depth 0
    commas: Sequence[int]  # at depth 0
    targets: str  # the names to which it assigns; empty if there are none
    value: int  # the start of the value that it returns or assigns; 0 if there is none

    @classmethod
    def of(cls, indent: str, code: str) -> _Statement:
        brackets, commas = _scan(code)
        found = re.match(r"return |([^=()\[\]{}]+?) = ", code)
        targets, value = (found.group(1) or "", found.end()) if found else ("", 0)
        return cls(indent, code, brackets, commas, targets, value)

    def fits_inside(self, text: str) -> bool:
        """Whether a text fits on a line of its own inside brackets of the statement."""
        return len(self.indent) + len(_INDENT) + len(text) <= WIDTH


def _broken(line: str) -> list[str]:
    """The line, broken at its brackets. A trailing comment stays behind the closing bracket, or moves above the
    line.
    """
    indent = line[: len(line) - len(line.lstrip())]
    code, comment = split_comment(line.lstrip())
    code = code.rstrip()
    if not code:
        return [line]
    statement = _Statement.of(indent, code)
    lines = next((lines for way in _WAYS if (lines := way(statement))), [indent + code])
    if not comment:
        return lines
    if len(lines) > 1 and len(lines[-1]) + 2 + len(comment) <= WIDTH:
        return [*lines[:-1], f"{lines[-1]}  {comment}"]
    return [f"{indent}{comment}", *_fitted(indent, code)]


def _deletion(one: _Statement) -> list[str]:
    """`del a, b` with the names in brackets, one per line."""
    if not (one.code.startswith("del ") and one.commas):
        return []
    return _exploded(one.indent, "del (", _items(one.code[4:], [comma - 4 for comma in one.commas]), ")")


def _tuple_value(one: _Statement) -> list[str]:
    """A tuple without brackets that is returned or assigned: in brackets, one item per line."""
    commas = [comma - one.value for comma in one.commas if comma >= one.value]
    if not one.value or all(one.value + comma == len(one.code) - 1 for comma in commas):
        return []
    head, value = one.code[: one.value], one.code[one.value :]
    return _exploded(one.indent, f"{head.rstrip()} (", _items(value, commas), ")")


def _chain(one: _Statement) -> list[str]:
    """An assigned chain of method calls: in brackets, one call per line."""
    links = _links(one.code, one.value, one.brackets) if one.targets else []
    if len(links) < 2:
        return []
    head, value = one.code[: one.value], one.code[one.value :]
    starts = [one.value, *links, len(one.code)]
    calls = [value] if one.fits_inside(value) else [one.code[left:right] for left, right in itertools.pairwise(starts)]
    steps = (step for call in calls for step in _fitted(one.indent + _INDENT, call))
    return [f"{one.indent}{head}(", *steps, f"{one.indent})"]


def _at_bracket(one: _Statement) -> list[str]:
    """Code broken at its last pair of brackets, or at a definition's first one: the contents on one line, or one clause
    of a comprehension or one item per line.
    """
    indent, code = one.indent, one.code
    full = [each for each in one.brackets if each.end > each.start + 1 and len(indent) + each.start < WIDTH]
    if not full:
        return []
    bracket = full[0] if code.startswith(("def ", "class ")) else full[-1]
    head, inside, tail = code[: bracket.start + 1], code[bracket.start + 1 : bracket.end], code[bracket.end :]
    is_call = bracket.start > 0 and re.match(r"[\w\])]", code[bracket.start - 1]) is not None
    if is_call and one.fits_inside(inside) and not inside.endswith(","):
        return [indent + head, f"{indent}{_INDENT}{inside}", *_fitted(indent, tail)]
    clauses = _clauses(inside)
    if len(clauses) > 1:
        parts = [inside] if one.fits_inside(inside) else clauses
        lines = [line for each in parts for line in _fitted(indent + _INDENT, each)]
        return [indent + head, *lines, *_fitted(indent, tail)]
    if not is_call and not bracket.commas and head.endswith("("):  # a trailing comma would turn it into a tuple
        return [indent + head, *_fitted(indent + _INDENT, inside), *_fitted(indent, tail)]
    return _exploded(indent, head, _items(inside, [comma - bracket.start - 1 for comma in bracket.commas]), tail)


def _several_targets(one: _Statement) -> list[str]:
    """`a, b = value` with the targets in brackets, one per line."""
    if "," not in one.targets:
        return []
    targets = [target.strip() for target in one.targets.split(",") if target.strip()]
    lines = _exploded(one.indent, "(", targets, f") = {one.code[one.value :]}")
    return [*lines[:-1], *_fitted(one.indent, lines[-1].lstrip())]


def _long_value(one: _Statement) -> list[str]:
    """A returned or assigned value in brackets: on one line, or one term per line."""
    value = one.code[one.value :]
    if not one.value or len(one.indent) + len(one.code) <= WIDTH or " " not in value:
        return []
    lines = [f"{one.indent}{_INDENT}{term}" for term in ([value] if one.fits_inside(value) else _terms(value))]
    return [f"{one.indent}{one.code[: one.value]}(", *lines, f"{one.indent})"]


# The ways to break a statement, the preferred ones first. A way that does not apply returns no lines.
_WAYS = (_deletion, _tuple_value, _chain, _at_bracket, _several_targets, _long_value)


def _links(code: str, start: int, brackets: Sequence[_Bracket]) -> list[int]:
    """The positions of the method calls in a chain, if the code from `start` is one chain; else empty."""
    after = [bracket for bracket in brackets if bracket.start >= start]
    bounds = [start, *(at for bracket in after for at in (bracket.start, bracket.end + 1)), len(code)]
    between = [code[left:right] for left, right in zip(bounds[::2], bounds[1::2], strict=True)]
    if not all(re.fullmatch(r"[\w.]*", text) for text in between):
        return []
    return [bracket.end + 1 for bracket in after if code[bracket.end + 1 : bracket.end + 2] == "."]


def _terms(code: str) -> list[str]:
    """The terms of a sum, or the factors of a product without brackets, each with the operator before it."""
    for operators in (r" (?=[+-] )", r" (?=(?:\*|//?|@|%) )"):
        terms = re.split(operators, code)
        if len(terms) > 1:
            return terms
    return [code]


def _clauses(code: str) -> list[str]:
    """The element, `for` and `if` clauses of a comprehension; other code as a whole."""
    brackets, _ = _scan(code)
    hidden = [range(bracket.start, bracket.end) for bracket in brackets]
    found = [match.start() for match in re.finditer(r" (?:for|if) ", code)]
    bounds = [at for at in found if not any(at in inside for inside in hidden)]
    if not bounds or not code[bounds[0] :].startswith(" for "):
        return [code]
    return [code[left:right].strip() for left, right in itertools.pairwise([0, *bounds, len(code)])]


def _fitted(indent: str, code: str) -> list[str]:
    return [indent + code] if len(indent) + len(code) <= WIDTH else _broken(indent + code)


def _items(text: str, commas: list[int]) -> list[str]:
    bounds = [-1, *commas, len(text)]
    items = [text[left + 1 : right].strip() for left, right in itertools.pairwise(bounds)]
    return [item for item in items if item]


def _exploded(indent: str, head: str, items: list[str], tail: str) -> list[str]:
    alone = len(items) == 1 and (" for " in items[0] or items[0].startswith("*") or head.endswith("["))
    comma = "" if alone else ","
    lines = [indent + head]
    for item in items:
        lines.extend(_fitted(indent + _INDENT, f"{item}{comma}"))
    return [*lines, *_fitted(indent, tail)]


def _limited_blank_lines(lines: list[str]) -> str:
    """At most two blank lines in a row at the top level, one elsewhere; none at the ends."""
    result: list[str] = []
    blanks = 0
    for line in lines:
        if not line:
            blanks += 1
            continue
        if result:
            result.extend([""] * min(blanks, 2 if not line.startswith(" ") else 1))
        blanks = 0
        result.append(line)
    return "\n".join(result) + "\n"
