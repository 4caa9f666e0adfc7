"""The examples in passes' docstrings: the left column is in the program before the pass, the right column after it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from partc import passes
from partc.api import compilation
from partc.compilation.options import Options
from partc.ir.printer import print_program

MODELS = Path(__file__).parents[1] / "models"
ARROW = re.compile(r" {2,}->  ")


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model of tests/models is compiled for an example, and the model's options."""

    model: str = "stack"
    how: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


# The cases of each pass, one for each example in its docstring.
CASES: dict[str, tuple[Case, ...]] = {
    "normalize": (Case(),),
    "route": (Case(model="routed"),),
    "scan": (Case(model="loops"),),
    "simplify": (Case(options={"masked": True}),),
    "capacity": (Case(model="routed", how={"expert_capacity": "1.25@sequence"}),),
    "pad": (Case(how={"mesh": "tp=2"}),),
    "heads": (Case(how={"mesh": "tp=2"}, options={"grouped": True}),),
    "extend": (Case(model="sequences", how={"mesh": "cp=2"}),),
    "zigzag": (Case(model="sequences", how={"mesh": "cp=2"}),),
    "dense": (
        Case(model="mixture", how={"mesh": "ep=2"}),
        Case(model="chosen"),
        Case(model="written_experts", options={"style": "einsum"}),
    ),
    "balance": (Case(model="balanced", how={"router_bias_rate": 0.001}, options={"kinds": "bias"}),),
    "reach": (Case(model="left_out"),),
    "outline": (Case(),),
    "stack": (Case(model="experts"),),
    "precision": (Case(how={"precision": "bf16"}),),
    "uses": (Case(how={"mesh": "tp=2", "batch_over": "tp=embed,blocks.0"}),),
    "sections": (Case(model="fused", how={"mesh": "tp=2"}),),
    "batch": (Case(how={"mesh": "dp=2", "microbatches": 2}),),
    "annotate": (Case(how={"mesh": "tp=2"}),),
    "tables": (Case(how={"mesh": "dp=2", "shard": ("embed.weight=[_, @dp]",)}, options={"words": 16}),),
    "norms": (Case(how={"mesh": "tp=2"}, options={"inner": True}),),
    "experts": (Case(model="routed", how={"mesh": "ep=2"}),),
    "partition": (Case(how={"mesh": "tp=2"}),),
    "outermost": (Case(how={"mesh": "tp=2"}),),
    "zero": (
        Case(how={"mesh": "dp=2,tp=2", "zero": 3}),
        Case(how={"mesh": "dp=2,tp=2", "zero": 3}, options={"width": 7}),
    ),
    "stages": (Case(how={"mesh": "pp=2"}),),
    "sort": (Case(model="routed"),),
    "differentiate": (Case(),),
    "expand": (Case(how={"mesh": "tp=2"}),),
    "chunk": (Case(how={"loss_chunks": 2}),),
    "recompute": (Case(how={"recompute": "selective"}),),
    "trim": (Case(model="fused", options={"how": "rotary", "seq": 4096}),),
    "split": (Case(how={"mesh": "pp=2", "schedule": "zero-bubble"}),),
    "bias": (Case(options={"turned": True}),),
    "narrow": (Case(model="balanced", how={"precision": "bf16"}),),
    "fuse": (Case(how={"kernels": "triton"}, options={"turned": True}),),
    "wide": (Case(model="bags", how={"precision": "bf16"}),),
    "overlap": (Case(how={"mesh": "tp=2"}),),
    "schedule": (Case(how={"mesh": "pp=2", "microbatches": 2}),),
}
# Passes over statements, whose examples are the texts of their own tests.
ELSEWHERE = {"bucket", "actions", "prefetch", "check"}


def examples(docstring: str) -> list[tuple[list[str], list[str]]]:
    """The lines before and after the arrow, in each indented paragraph of a docstring that has one."""
    paragraphs = (text.splitlines() for text in docstring.split("\n\n") if text.startswith("    "))
    return [columns(lines) for lines in paragraphs if "  ->" in lines or any(map(ARROW.search, lines))]


def columns(paragraph: list[str]) -> tuple[list[str], list[str]]:
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


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, cases in CASES.items() for number in range(len(cases))]
)
def test_an_example_is_what_the_pass_does(name: str, number: int) -> None:
    case = CASES[name][number]
    how = {"mesh": "1", "microbatches": 1, "schedule": "1f1b", "precision": "fp32", "seed": 0, "shard": (), **case.how}
    model = str(MODELS / f"{case.model}.py")
    done = compilation(model, None, Options.checked(**how), model_options=case.options, until=name)
    names = (passes.FIRST, *passes.NAMES)
    before, after = (print_program(done.after(each)) for each in (names[names.index(name) - 1], name))
    left, right = examples(docstring_of(name))[number]
    assert left and right and before != after
    assert not list(missing(left, before)), before
    assert not list(missing(right, after)), after
    assert list(missing(right, before)), "the example shows nothing that the pass does"


def test_every_example_is_executed() -> None:
    for entry in passes.PIPELINE:
        if entry.name not in ELSEWHERE:
            assert len(CASES[entry.name]) == len(examples(docstring_of(entry.name))) > 0, entry.name


def test_an_example_that_is_not_so_is_found() -> None:
    program = (
        'y_full = all_gather(y, dim=1, axis="tp")  # f32[8, 4]\nz      = gelu(y_full)                      # f32[8, 4]'
    )
    assert not list(missing(["y_full = all_gather(y, …)", "…", "z = gelu(y_full)  # f32[8, 4]"], program))
    for wrong in (["z = gelu(y)"], ["z = gelu(y_full)  # f32[8]"], ["z = gelu(y_full)", "y_full = all_gather(y, …)"]):
        assert list(missing(wrong, program)), wrong
