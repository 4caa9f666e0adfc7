"""Docstrings say what a thing is: a noun or a verb first, and no sentence that begins with a clause in its place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("partc", "passes", "codegen", "templates")
FORBIDDEN = re.compile(
    r"(What|That which|Those|Of (what|that|those|an?|every|each|all|this)|How (often|many|much)|With (what|that)|"
    r"As (much|many|if)|Which|Such|It)\b"
)
TEMPLATE = re.compile(r'^ *"""(.*?)"""', re.MULTILINE | re.DOTALL)


def _docstrings(path: Path) -> Iterator[str]:
    text = path.read_text()
    if path.suffix == ".jinja":
        yield from TEMPLATE.findall(text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _files() -> list[Path]:
    return sorted(
        path
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".jinja") and not any(parent.is_symlink() for parent in path.parents)
    )


def test_docstrings_begin_with_their_subject() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in _files()
        for text in _docstrings(path)
        if FORBIDDEN.match(text)
    ]
    assert not found, "\n".join(found)


def test_the_pattern_finds_what_it_is_for() -> None:
    """A control: sentences that were in the code, and their successors."""
    before = (
        "What whole numbers that it is given are below.",
        "Of what is kept, that which a rank holds whole.",
        "How many.",
    )
    after = ("Upper bounds of the integer arguments.", "Low-precision copies of trainable parameters.", "Its size.")
    assert all(map(FORBIDDEN.match, before)) and not any(map(FORBIDDEN.match, after))
