"""Any text is the same text again, wherever it is written."""

from __future__ import annotations

import ast

from hypothesis import given
from hypothesis import strategies as st

from partc.codegen.formatting import formatted
from partc.codegen.names import region_names
from partc.quoting import (
    block_literal,
    comment,
    docstring,
    identifier,
    literal,
    literal_template,
    markdown,
    masked,
    quoted,
    shown,
    unmasked,
    unquoted,
)

TEXTS = st.text(st.characters() | st.sampled_from("\"'\\`{}#\n\r\t\0\u2028\ud800(),= |")) | st.sampled_from(
    ['"""', "a for b in c if d", "'''", "\\N{BELL}", "a, b = c"]
)


@given(TEXTS)
def test_literals_have_the_text_as_their_value(text: str) -> None:
    assert ast.literal_eval(literal(text)) == text
    assert eval(literal_template(text, ".{i}.{name}"), {"i": 3, "name": "w"}) == f"{text}.3.w"
    assert ast.literal_eval(f"({block_literal(text)})") == f"\n{text}\n"
    assert unquoted(quoted(text, "`")) == text


@given(TEXTS)
def test_what_people_read_stays_on_its_line(text: str) -> None:
    assert shown(text).isprintable() and markdown(text).isprintable()
    assert ast.parse(f'"""of {docstring(text)}"""\n{comment(text, prefix="# ")}\nx = 1 # {shown(text)}\n').body[1:]
    assert len(ast.parse(f'def f():\n    """of {docstring(f"{text} " * 40, 4)}"""\n    x = 1').body[0].body) == 2  # type: ignore[attr-defined]
    assert identifier(text).isidentifier() and not identifier(text).startswith("_")


@given(TEXTS, TEXTS)
def test_lines_are_broken_outside_of_strings(text: str, other: str) -> None:
    code = f"x = {'f' * 90}({literal(text)}, [{literal(other)}, y], {literal(text + other)})  # {shown(other)}"
    assert unmasked(*masked(code)) == code
    assert ast.dump(ast.parse(formatted(f"{code}\n"))) == ast.dump(ast.parse(code))


def test_regions_of_one_module_share_no_name() -> None:
    found = region_names(["a b", "a_b", "a-b", "A_B", "stage", "Stage", "f", "F", "block", "block_forward", "class"])
    every = [name for names in found.values() for name in set(names.every)]
    assert len(set(every)) == len(every) and all(map(str.isidentifier, every))
