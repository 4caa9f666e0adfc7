"""Printed programs parse to equal programs, after every pass."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

import partc
from partc import passes
from partc.api import compilation
from partc.compilation.options import Options
from partc.errors import PartcError, Source
from partc.ir.layout import Layout
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_program, print_region
from partc.ir.program import (
    Action,
    Bucket,
    Call,
    Choice,
    DTypeArg,
    Graph,
    Op,
    Parameter,
    Program,
    Ref,
    Region,
    TensorType,
    Transfer,
    Transport,
    Value,
)
from tests.programs import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}(\.[A-Za-z0-9_]{1,4}){0,2}", fullmatch=True) | st.sampled_from(
    ["0.weight", "None", "inf", "12", "return", "input", "a b"]
)
LAYOUTS = st.sampled_from(
    ["[]", "[4]", "[16@dp,mb, 8]", "[3 · 8@tp, 4]", "[2, 4@dp · 8@tp] partial(tp)", "[0, 5] vary(dp,mb)"]
).map(Layout.parse)
TYPES = st.builds(TensorType, dtype=st.sampled_from(["f32", "f64", "i64", "bool"]), layout=LAYOUTS)
VALUES = st.builds(Value, name=NAMES, type=TYPES)
ARGS = st.recursive(
    st.builds(Ref, NAMES)
    | st.builds(DTypeArg, st.sampled_from(["f32", "bf16"]))
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none()
    | st.text(st.characters(codec="ascii", exclude_characters="\n\r\x0b\x0c\x1c\x1d\x1e"), max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
SOURCES = st.none() | st.builds(
    Source, file=st.just("dir/model.py"), line=st.integers(0, 99), module=st.sampled_from(["", "blocks.0.attn"])
)
CHOICES = st.builds(
    Choice, axis=st.sampled_from(["dp", "tp"]), factor=st.none() | st.just("b0"), outer=st.sampled_from([1, 3])
)
OPS = st.builds(
    Op,
    name=st.sampled_from(["add", "mylib::op", "__and__"]),
    args=st.lists(ARGS, max_size=4).map(tuple),
    attrs=st.lists(st.tuples(st.sampled_from(["dim", "axis"]), ARGS), max_size=2).map(tuple),
    results=st.lists(VALUES, min_size=1, max_size=3).map(tuple),
    choices=st.lists(CHOICES, max_size=2).map(tuple),
    source=SOURCES,
)
NAME_LISTS = st.lists(NAMES, max_size=3).map(tuple)
GRAPHS = st.builds(
    Graph,
    inputs=st.lists(VALUES, max_size=2).map(tuple),
    ops=st.lists(OPS, max_size=3).map(tuple),
    outputs=NAME_LISTS,
)
REGIONS = st.builds(
    Region,
    name=NAMES,
    params=st.lists(VALUES, max_size=2).map(tuple),
    forward=GRAPHS,
    backward=st.none() | GRAPHS,
    saved=NAME_LISTS,
    phase=st.sampled_from(["setup", "step", "microbatch"]),
    kernels=st.sampled_from(["aten", "triton", "inductor"]),
)
PROGRAMS = st.builds(
    Program,
    name=NAMES,
    mesh=st.sampled_from(["2", "2x2x2", "tp=4"]).map(Mesh.parse),
    microbatches=st.integers(1, 8),
    separate_batches=st.booleans(),
    inputs=st.just(("x", "w 2")),
    whole_inputs=st.sampled_from([(), ("w 2",)]),
    values=st.lists(VALUES, max_size=3).map(tuple),
    parameters=st.lists(
        st.builds(
            Parameter,
            name=NAMES,
            type=TYPES,
            trainable=st.booleans(),
            aliases=NAME_LISTS,
            reduce=st.sampled_from([(), ("dp",), ("dp", "tp")]),
            gather=st.sampled_from([(), ("dp",)]),
            buckets=NAME_LISTS,
        ),
        max_size=2,
    ).map(tuple),
    transport=st.builds(
        Transport,
        near=st.sampled_from([(), ("dp",), ("dp", "tp")]),
        wire=st.sampled_from(["", "bf16"]),
        compress=st.sampled_from(["", "int8"]),
    ),
    buckets=st.lists(
        st.builds(
            Bucket,
            name=NAMES,
            stage=st.integers(0, 3),
            over=st.sampled_from([("dp",), ("dp", "tp")]),
            after=st.just("") | NAMES,
            scattered=st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    regions=st.lists(REGIONS, max_size=2).map(tuple),
    calls=st.lists(
        st.builds(
            Call,
            name=NAMES,
            region=NAMES,
            params=NAME_LISTS,
            args=NAME_LISTS,
            results=NAME_LISTS,
            stage=st.integers(0, 3),
        ),
        max_size=2,
    ).map(tuple),
    loss=NAMES,
    results=st.lists(st.tuples(st.just("") | NAMES, NAMES), max_size=2).map(tuple),
    transfers=st.lists(
        st.builds(Transfer, value=NAMES, source=st.integers(0, 3), target=st.integers(0, 3), gradient=st.booleans()),
        max_size=2,
    ).map(tuple),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(PROGRAMS)
def test_any_program_reads_back(program: Program) -> None:
    assert parse(print_program(program, sources=True)) == program


@pytest.mark.parametrize(("example", "mesh"), [("gpt", "2x2x2"), ("mlp", "pp=2"), ("gpt", "1x4x2")])
def test_programs_read_back_after_every_pass(example: str, mesh: str) -> None:
    seen = []
    options = Options.checked(mesh=mesh, microbatches=2, schedule="1f1b", precision="fp32", seed=0, shard=())
    compilation(
        EXAMPLES / f"{example}.py",
        None,
        options,
        model_options={},
        observe=lambda step: seen.append(step.program),
    )
    assert len(seen) > 8
    for program in seen:
        assert parse(print_program(program, sources=True)) == program
        assert parse(print_program(program)) == _without_sources(program)


def _without_sources(program: Program) -> Program:
    def plain(graph: Graph) -> Graph:
        return replace(graph, ops=tuple(replace(op, source=None) for op in graph.ops))

    return replace(program, regions=tuple(region.mapped(plain) for region in program.regions))


def test_a_region_as_people_read_it() -> None:
    package = partc.compile(EXAMPLES / "mlp.py", mesh="2x2", options={"width": 16, "hidden": 32, "batch": 8})
    region = package.program.region("block")
    assert_expected_inline(
        print_region(replace(region, backward=None), sizes=package.program.sizes),
        """\
region block phase microbatch:
  param norm.weight: f32[16] vary(dp)
  param norm.bias: f32[16] vary(dp)
  param up.weight: f32[32@tp, 16] vary(dp)
  param up.bias: f32[32@tp] vary(dp)
  param down.weight: f32[16, 32@tp] vary(dp)
  param down.bias: f32[16@tp] vary(dp)
  forward:
    input x: f32[8@dp, 16@tp]
    x_full                     = all_gather(x, dim=1, outer=1, axis="tp")                         # f32[8@dp, 16] | 128 B over tp
    norm, norm_mean, norm_rstd = layer_norm(x_full, (16,), norm.weight, norm.bias, 1e-05)         # f32[8@dp, 16] ; f32[8@dp, 1] ; f32[8@dp, 1]
    up                         = linear(norm, up.weight, up.bias)                                 # f32[8@dp, 32@tp]
    hidden                     = gelu(up)                                                         # f32[8@dp, 32@tp]
    down_product_partial       = linear(hidden, down.weight)                                      # f32[8@dp, 16] partial(tp)
    down_product               = reduce_scatter(down_product_partial, dim=1, outer=1, axis="tp")  # f32[8@dp, 16@tp] | 128 B over tp
    down                       = add(down_product, down.bias)                                     # f32[8@dp, 16@tp]
    out                        = add(x, down)                                                     # f32[8@dp, 16@tp]
    return out
  saved hidden, up, norm, x_full, norm_mean, norm_rstd
""",
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("program x mesh 2 microbatches 1 loss loss\nwhat is this", 2),
        ("program x mesh 2 microbatches 1 loss loss\nvalue x: f31[2]", 2),
        ("program x mesh 2", 1),
        ("program x mesh 2 microbatches 1 loss loss\n\nregion a phase microbatch:\n  forward:\n    y = add(x, # f32[2]", 5),
        ("program x mesh 2 microbatches 1 loss loss\n\nregion a phase microbatch:\n  forward:\n    y = add(x)  # f32[2] ; f32[2]", 5),
    ],
)  # fmt: skip
def test_malformed_text_names_its_line(text: str, line: int) -> None:
    with pytest.raises(PartcError) as error:
        parse(text)
    assert error.value.code == "P0221"
    assert error.value.source is not None and error.value.source.line == line


def _rows(depth: int) -> st.SearchStrategy[Sequence[Action]]:
    """Schedule rows in which blocks of actions repeat with later microbatches, and blocks of those."""
    action = st.builds(
        Action,
        stage=st.integers(0, 1),
        kind=st.sampled_from(["F", "B", "SEND_F"]),
        microbatch=st.integers(0, 2),
        ahead=st.sampled_from([(), ("1F",)]),
    )
    action = action | st.just(Action(stage=0, kind="UNSHARD"))
    if depth == 0:
        return st.lists(action, max_size=4)
    inner = _rows(depth - 1)
    return st.lists(st.builds(_repeated, inner, st.integers(1, 6), st.integers(0, 3)), max_size=3).map(_joined)


def _repeated(row: Sequence[Action], times: int, by: int) -> Sequence[Action]:
    return [
        action if action.microbatch is None else replace(action, microbatch=action.microbatch + turn * by)
        for turn in range(times)
        for action in row
    ]


def _joined(rows: Sequence[Sequence[Action]]) -> Sequence[Action]:
    return [action for row in rows for action in row]


@settings(max_examples=100)
@given(st.lists(_rows(2).map(tuple), max_size=2).map(tuple))
def test_any_schedule_reads_back(schedule: tuple[tuple[Action, ...], ...]) -> None:
    program = replace(tiny(), schedule=schedule)
    assert parse(print_program(program)) == program


@pytest.mark.parametrize("text", ["3 * (0F0", "3 * 0F0)", "0F0)", "3 * (0F0)0B0", "3 * (2 * (0F0)"])
def test_loops_of_actions_are_closed(text: str) -> None:
    with pytest.raises(PartcError, match="P0221"):
        parse(f"{print_program(tiny())}\nschedule 0: {text}\n")


@pytest.fixture(scope="module")
def traced() -> Mapping[int, Program]:
    """Traces of the example by depth."""
    found = {}
    for depth in (16, 32):
        options = Options.checked(mesh="2x2x1", microbatches=1, schedule="1f1b", precision="fp32", seed=0, shard=())
        given = {"depth": str(depth), "batch": "1024"}
        found[depth] = compilation(EXAMPLES / "gpt.py", None, options, model_options=given, until="trace").traced
    return found


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 3), ("interleaved", 1), ("zero-bubble", 3)])
def test_texts_of_stages_grow_with_neither_microbatches_nor_depth(
    traced: Mapping[int, Program], schedule: str, zero: int
) -> None:
    texts = []
    for depth, microbatches in ((16, 128), (32, 512)):
        options = Options.checked(
            mesh="2x2x1", microbatches=microbatches, schedule=schedule, zero=zero, precision="fp32", seed=0, shard=()
        )
        program = replace(traced[depth], microbatches=microbatches)
        program = passes.run(program, options.for_passes, until="prefetch")[-1].program
        plain = replace(program, regions=())
        text = print_program(plain)
        assert parse(text) == plain
        texts.append([line for line in text.splitlines() if re.match("action |  |schedule ", line)])
        assert len(texts[-1]) <= 60 * program.stages
    few, many = texts
    assert [len(line.split()) for line in few if line[0] == "s"] == [
        len(line.split()) for line in many if line[0] == "s"
    ]
    assert [line for line in few if line[0] == "a"] == [line for line in many if line[0] == "a"]
    assert len(few) == len(many)
