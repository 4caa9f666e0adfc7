"""The example in each pass's docstring is what the pass does: both columns stand in the program before it and after it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partc import passes
from partc.api import compilation
from partc.compilation.options import Options
from partc.ir.printer import print_program

STACK = str(Path(__file__).parent / "models" / "stack.py")
ARROW = re.compile(r" {2,}->  ")
# How tests/models/stack.py is compiled for each pass, and its options.
HOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "normalize": ({}, {}),
    "simplify": ({}, {"masked": True}),
    "pad": ({"mesh": "tp=2"}, {}),
    "heads": ({"mesh": "tp=2"}, {"grouped": True}),
    "outline": ({}, {}),
    "precision": ({"precision": "bf16"}, {}),
    "batch": ({"mesh": "dp=2", "microbatches": 2}, {}),
    "annotate": ({"mesh": "tp=2"}, {}),
    "partition": ({"mesh": "tp=2"}, {}),
    "outermost": ({"mesh": "tp=2"}, {}),
    "stages": ({"mesh": "pp=2"}, {}),
    "differentiate": ({}, {}),
    "expand": ({"mesh": "tp=2"}, {}),
    "chunk": ({"loss_chunks": 2}, {}),
    "recompute": ({"recompute": "selective"}, {}),
    "split": ({"mesh": "pp=2", "schedule": "zero-bubble"}, {}),
    "bias": ({}, {"turned": True}),
    "fuse": ({"kernels": "triton"}, {"turned": True}),
}
# Passes over communication or of loops, whose examples are the expected texts of their own tests.
ELSEWHERE = {
    "route", "capacity", "dense", "balance", "scan", "extend", "zigzag", "stack", "tables", "experts", "zero", "overlap", "bucket", "schedule",
    "actions", "prefetch",
    "check",
}  # fmt: skip


def columns(docstring: str) -> tuple[list[str], list[str]]:
    """The lines before and after the arrow, in the docstring's first indented paragraph."""
    paragraph = next(text for text in docstring.split("\n\n") if text.startswith("    ")).splitlines()
    if "  ->" in paragraph:  # one above the other
        return paragraph[: paragraph.index("  ->")], paragraph[paragraph.index("  ->") + 1 :]
    found = next(match for line in paragraph if (match := ARROW.search(line)))
    left = [line[: found.start() if ARROW.search(line) else found.end()] for line in paragraph]
    right = [line[found.end() :] for line in paragraph]
    return [line for line in left if line.strip()], [line for line in right if line.strip()]


def plain(line: str) -> str:
    """Without alignment and indentation."""
    return re.sub(r"\s+", " ", line).strip()


def matches(said: str, line: str) -> bool:
    """Whether a line of a program is what a docstring says; `…` is anything, and a type that it leaves out too."""
    operation, _, type_ = plain(said).partition(" # ")
    shown, _, shown_type = plain(line).partition(" # ")
    pattern = ".*".join(map(re.escape, operation.split("…")))
    if re.fullmatch(pattern, shown) is None:
        return False
    return not re.match(r"\w+\[", type_) or type_ in (shown_type, shown_type.partition(" | ")[0])


def missing(said: list[str], program: str) -> Iterator[str]:
    """The lines of an example that do not come in the program, in the example's order."""
    lines = iter(program.splitlines())
    for wanted in said:
        if plain(wanted) != "…" and not any(matches(wanted, line) for line in lines):
            yield wanted
            return


@functools.cache
def docstring_of(name: str) -> str:
    folder = Path(passes.__path__[0])
    file = folder / f"{name}.py" if (folder / f"{name}.py").exists() else folder / name / "__init__.py"
    return ast.get_docstring(ast.parse(file.read_text())) or ""


@pytest.mark.parametrize("name", HOW)
def test_an_example_is_what_the_pass_does(name: str) -> None:
    given, options = HOW[name]
    how = {"mesh": "1", "microbatches": 1, "schedule": "1f1b", "precision": "fp32", "seed": 0, "shard": (), **given}
    done = compilation(STACK, None, Options.checked(**how), model_options=options, until=name)
    names = (passes.FIRST, *passes.NAMES)
    before, after = (print_program(done.after(each)) for each in (names[names.index(name) - 1], name))
    left, right = columns(docstring_of(name))
    assert left and right and before != after
    assert not list(missing(left, before)), before
    assert not list(missing(right, after)), after
    assert list(missing(right, before)), "the example shows nothing that the pass does"


def test_every_pass_has_an_example() -> None:
    assert {entry.name for entry in passes.PIPELINE} == {*HOW, *ELSEWHERE}
    for name in ELSEWHERE:
        assert "\n    " in docstring_of(name), name


def test_an_example_that_is_not_so_is_found() -> None:
    program = (
        'y_full = all_gather(y, dim=1, axis="tp")  # f32[8, 4]\nz      = gelu(y_full)                      # f32[8, 4]'
    )
    assert not list(missing(["y_full = all_gather(y, …)", "…", "z = gelu(y_full)  # f32[8, 4]"], program))
    for wrong in (["z = gelu(y)"], ["z = gelu(y_full)  # f32[8]"], ["z = gelu(y_full)", "y_full = all_gather(y, …)"]):
        assert list(missing(wrong, program)), wrong
