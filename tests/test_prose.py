"""Docstrings begin with their subject or verb, and no text uses phrases that need a second reading."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("partc", "passes", "codegen", "templates")
FORBIDDEN = re.compile(
    r"(What|That which|Those|Of (what|that|those|an?|every|each|all|this)|How (often|many|much)|With (what|that)|"
    r"As (much|many|if)|Which|Such|It)\b"
)
_TEXT = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
RIDDLES = re.compile(
    r"\b(that which|those which|the same of|for ever|at one time|nothing is said|wherever it can be|beside|"
    r"(?<!there )is no (?!longer\b|more\b|less\b|other\b|one\b|need\b|larger\b|smaller\b|change\b)\w+)\b",
    re.IGNORECASE,
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


def _tests() -> Iterator[Path]:
    """The files of tests/, without packages."""
    return (path for path in sorted((ROOT / "tests").rglob("*.py")) if "handmade_package" not in path.parts)


def test_docstrings_begin_with_their_subject() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in (*_files(), *_tests())
        for text in _docstrings(path)
        if FORBIDDEN.match(text)
    ]
    assert not found, "\n".join(found)


def _texts(path: Path) -> Iterator[str]:
    """Comments and strings of a Python file; the whole text of any other file."""
    text = path.read_text()
    if path.suffix != ".py":
        yield text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _TEXT and " " in token.string:
            yield token.string


def _pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]


def test_no_text_uses_a_phrase_that_needs_a_second_reading() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()!r} in {text.strip()[:80]!r}"
        for path in (*_files(), *_pages())
        for text in map(_in_one_line, _texts(path))
        for match in RIDDLES.finditer(text)
    ]
    assert not found, "\n".join(found)


def _in_one_line(text: str) -> str:
    return re.sub(r"\s+(# )?", " ", text)


def test_the_patterns_find_what_they_are_for() -> None:
    """A control: sentences that were in the code, and their successors."""
    before = (
        "What whole numbers that it is given are below.",
        "Of what is kept, that which a rank holds whole.",
        "How many.",
    )
    after = ("Upper bounds of the integer arguments.", "Low-precision copies of trainable parameters.", "Its size.")
    assert all(map(FORBIDDEN.match, before)) and not any(map(FORBIDDEN.match, after))
    riddles = (
        "The same of a rank with one stage.",
        "Collectives run beside computation.",
        "Whether it is no part.",
        "a span is a node's wherever it can be",
    )
    plain = ("The seconds of a rank with one stage.", "Collectives overlap with computation.", "There is no part.")
    assert all(map(RIDDLES.search, riddles)) and not any(map(RIDDLES.search, plain))
