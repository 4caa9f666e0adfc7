"""ZeRO: the shards of ranks, the times of their communication, and training equal to the single-device model."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import partc
from partc.communication.events import Entered, events
from partc.errors import PartcError
from partc.ir.layout import Layout
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.ir.program import TensorType
from partc.package.verify import verify
from partc.passes.zero import zero
from partc.runtime.layout import Shard
from tests.zoo import MODELS

PROGRAM = """
program net mesh dp=2,tp=2 microbatches 1 loss loss
input x
value x: f32[8@dp, 4]
value loss: f32[] partial(dp)
parameter up.weight: f32[3 · 4@tp, 4] reduce(dp)
parameter norm.weight: f32[5, 4] reduce(dp,tp)
parameter scale: f32[] reduce(dp,tp)
constant table: f32[6, 2]
call net = net(x; up.weight, norm.weight, scale, table) -> loss

region net phase microbatch:
  param up.weight: f32[3 · 4@tp, 4] vary(dp)
  param norm.weight: f32[5, 4] vary(dp,tp)
  param scale: f32[] vary(dp,tp)
  param table: f32[6, 2]
  forward:
    input x: f32[8@dp, 4]
    y = linear(x, up.weight)  # f32[8@dp, 3 · 4@tp]
    loss = sum(y, (0, 1), False)  # f32[] partial(dp)
    return loss
"""


@pytest.mark.parametrize("level", [1, 3])
def test_each_parameter_is_cut_where_it_divides(level: int) -> None:
    parted = print_program(zero(parse(PROGRAM), zero=level, zero_axes=("dp",)))
    lines = [line for line in parted.splitlines() if line.startswith(("program", "parameter", "constant"))]
    if level == 1:
        assert_expected_inline(
            "\n".join(lines),
            """\
program net mesh dp=2,tp=2 microbatches 1 loss loss
parameter up.weight: f32[3 · 4@tp,dp, 4] gather(dp) zero 1
parameter norm.weight: f32[5, 4@dp] reduce(tp) gather(dp) zero 1
parameter scale: f32[] reduce(dp,tp)
constant table: f32[6, 2]""",
        )
    else:
        assert lines[-1] == "constant table: f32[6@dp, 2] gather(dp) zero 3"
    assert print_program(parse(parted)) == parted


def test_parts_may_end_with_spare_elements() -> None:
    """The dimension with the fewest spare elements is cut: 68 columns over 7 ranks leave 2, 30 rows would leave 5."""
    text = PROGRAM.replace("mesh dp=2", "mesh dp=7").replace("8@dp", "14@dp").replace("[5, 4]", "[30, 68]")
    text = text.replace("3 · 4@tp", "3 · 12@tp")
    parted = print_program(zero(parse(text.replace("[6, 2]", "[6]")), zero=3, zero_axes=("dp",)))
    lines = [line for line in parted.splitlines() if line.startswith(("program", "parameter", "constant"))]
    assert_expected_inline(
        "\n".join(lines),
        """\
program net mesh dp=7,tp=2 microbatches 1 loss loss
parameter up.weight: f32[3 · 2@tp · 6@dp, 4] gather(dp) zero 3
parameter norm.weight: f32[30, 68@dp] reduce(tp) gather(dp) zero 3
parameter scale: f32[] reduce(dp,tp)
constant table: f32[6@dp] gather(dp) zero 3""",
    )
    assert print_program(parse(parted)) == parted


@pytest.mark.parametrize(
    ("shape", "ways", "held"),
    [
        ("[4096, 14336]", 48, "[4096, 14336@dp]"),  # 16 spare columns of 14352, against 32 rows of 4128
        ("[4096, 14400]", 48, "[4096, 14400@dp]"),
        ("[7]", 6, "[7@dp]"),
        ("[7]", 48, "[7]"),  # 41 spare elements
        ("[128, 129]", 1000, "[128, 129@dp]"),  # more spare ones, but 16,512 elements are no longer few
        ("[128, 128]", 1000, "[128, 128]"),
        ("[1]", 2, "[1@dp]"),
    ],
)
def test_the_cut_by_its_spare_elements(shape: str, ways: int, held: str) -> None:
    program = parse(PROGRAM.replace("mesh dp=2", f"mesh dp={ways}").replace("8@dp", f"{ways}@dp"))
    given = replace(program.parameter("norm.weight"), type=TensorType(dtype="f32", layout=Layout.parse(shape)))
    parted = zero(replace(program, parameters=(given,)), zero=1, zero_axes=("dp",)).parameters[0]
    assert str(parted.type.layout) == held


def test_rows_of_a_stack_are_never_spare() -> None:
    program = parse(PROGRAM.replace("mesh dp=2", "mesh dp=5").replace("8@dp", "5@dp"))
    layout = Layout.parse("[4, 9]")
    given = replace(program.parameter("norm.weight"), stacked=True, type=TensorType(dtype="f32", layout=layout))
    parted = zero(replace(program, parameters=(given,)), zero=1, zero_axes=("dp",)).parameters[0]
    assert str(parted.type.layout) == "[4, 9@dp]"


def test_a_weight_says_how_it_is_held() -> None:
    from partc.passes.zero import explain

    program = parse(PROGRAM.replace("mesh dp=2", "mesh dp=48").replace("8@dp", "48@dp").replace("[5, 4]", "[5, 34]"))
    parted = zero(program, zero=2, zero_axes=("dp",))
    assert explain(parted, "norm.weight") == (
        "norm.weight is f32[5, 34@dp], in parts over dp=48 (ZeRO 2), each with 1 of 34, where 14 at the end are spare"
    )
    assert explain(parted, "up.weight").endswith("whole on the ranks of dp=48: it has few elements, and its parts would have "
                                                 "more spare ones")  # fmt: skip
    assert explain(parted, "scale") == "scale is f32[], whole on the ranks of dp=48"
    assert explain(program, "norm.weight") == explain(parted, "x") == ""


def test_without_ranks_to_share_nothing_changes() -> None:
    program = parse(PROGRAM)
    assert zero(program) is program
    assert zero(program, zero=3, zero_axes=()) is program


class Tied(nn.Module):
    """Weights in several places: tied, shared by all blocks, frozen, scalar, indivisible, and one in a buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.blocks[1].weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.odd = nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.randn(6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.get_buffer("offset")
        for block in self.blocks:
            x = block(self.block(x)) * self.scale + x
        logits = x @ self.embed.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) + self.odd.square().sum()


def tied() -> nn.Module:
    return Tied()


def ids_batch() -> dict[str, Tensor]:
    return {"ids": torch.randint(16, (16, 4))}


def _batch(mesh: str) -> dict[str, Tensor]:
    """Four examples for each rank of the batch and microbatch."""
    ways = math.prod(size for axis, size in Mesh.parse(mesh).axes if axis.startswith("dp"))
    return {"ids": torch.randint(16, (8 * ways, 4))}


QUICK = {("1", "2"), ("2", "2x2x2"), ("3", "pp=2,dp=2")}
ALWAYS = {("1", "2x2x2"), ("2", "pp=2,dp=2"), ("3", "2"), ("3", "dp_out=2,dp_in=2,tp=2")}


def _marks(level: str, mesh: str) -> tuple[pytest.MarkDecorator, ...]:
    """`make test` runs every level, `make test-all` every level on two meshes and more."""
    if (level, mesh) in QUICK:
        return ()
    return (pytest.mark.slow,) if (level, mesh) in ALWAYS else (pytest.mark.matrix,)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("level", "mesh", "microbatches", "schedule"),
    [
        pytest.param(level, *case, marks=_marks(level, case[0]))
        for level in ("1", "2", "3")
        for case in (("2", 1, "1f1b"), ("2x2x2", 4, "zero-bubble"), ("pp=2,dp=2", 4, "zbv"),
                     ("dp_out=2,dp_in=2,tp=2", 2, "1f1b"))
    ] + [
        pytest.param(level, *case, marks=pytest.mark.slow)
        for level, *case in (("1", "5", 2, "1f1b"), ("2", "pp=2,dp=3", 2, "zbv"), ("3", "dp=3,tp=2", 2, "1f1b"))
    ] + [
        pytest.param(level, *case, marks=pytest.mark.matrix)
        for level in ("1", "2", "3")
        for case in (("2x2", 2, "1f1b"), ("pp=2,dp=2", 4, "interleaved"))
    ],
)  # fmt: skip
def test_parts_train_like_the_whole(level: str, mesh: str, microbatches: int, schedule: str) -> None:
    package = partc.compile(
        tied, _batch(mesh), mesh=mesh, microbatches=microbatches, schedule=schedule, precision="fp64", zero=level
    )
    assert package.program.zero == int(level)
    result = package.verify(steps=2)
    assert result.ok, result.worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", ["dp_in", *(pytest.param(axes, marks=pytest.mark.matrix) for axes in ("dp_out", "dp_out,dp_in"))]
)
@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_hybrid_sharding(axes: str, level: int) -> None:
    package = partc.compile(
        tied, ids_batch(), mesh="pp=1,dp_out=2,dp_in=4,tp=1", precision="fp64", zero=f"{level}@{axes}", microbatches=2
    )
    cut = package.program.parameter("embed.weight")
    assert cut.gather == tuple(axes.split(","))
    assert set(cut.reduce) == {"dp_out", "dp_in"} - set(cut.gather)
    result = package.verify(steps=2)
    assert result.ok, result.worst


@pytest.mark.parametrize(
    ("mesh", "ranks", "cut", "axes"),
    [
        ("8", 4, "dp_out=2,dp_in=4", ("dp_in",)),
        ("pp=2,dp=6,tp=2", 3, "pp=2,dp_out=2,dp_in=3,tp=2", ("dp_in",)),
        ("dp=8", 8, "dp=8", ("dp",)),
        ("dp_out=2,dp_in=4", 4, "dp_out=2,dp_in=4", ("dp_in",)),
        ("dp_out=2,dp_in=4", 2, "dp_out=2,dp_inout=2,dp_inin=2", ("dp_inin",)),
        ("dp=4,cp=2", 2, "dp_out=2,dp_in=2,cp=2", ("dp_in", "cp")),
        ("dp=2,ep=4", 4, "dp=2,ep=4", ("ep",)),
        ("dp=2,ep=4", 8, "dp=2,ep=4", ("dp", "ep")),
    ],
)
def test_parts_over_neighbours(mesh: str, ranks: int, cut: str, axes: tuple[str, ...]) -> None:
    found, over = Mesh.parse(mesh).with_span(ranks)
    assert (str(found), over) == (cut, axes)


def test_a_span_is_an_axis_that_the_mesh_might_name() -> None:
    given = {"x": torch.randn(8, 6)}
    spanned = partc.compile(one_block, given, mesh="4", zero="3@2")
    named = partc.compile(one_block, given, mesh="dp_out=2,dp_in=2", zero="3@dp_in")
    assert print_program(spanned.program) == print_program(named.program)
    assert spanned.program.parameter("first.weight").gather == ("dp_in",)


IN_PARTS = {("gpt", "2x2x2", "1f1b"): (1, 3), ("noisy", "2x2", "1f1b"): (2,), ("mixtral", "2x2x2", "zbv"): (3,)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "schedule", "level"),
    [
        pytest.param(*case, level, marks=() if level in always else (pytest.mark.matrix,))
        for case, always in IN_PARTS.items()
        for level in (1, 2, 3)
    ],
)
def test_families_in_parts(name: str, mesh: str, schedule: str, level: int, tmp_path: Path) -> None:
    model = MODELS[name]
    if model.config:
        pytest.importorskip("transformers")
    package = partc.compile(
        model.source(tmp_path), mesh=mesh, microbatches=4, schedule=schedule, precision="fp64", zero=level,
        options=model.options,
    )  # fmt: skip
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True)
    assert result.ok, result.worst


@pytest.mark.slow
def test_real_processes(tmp_path: Path) -> None:
    package = partc.compile(tied, ids_batch(), mesh="pp=1,dp=2,tp=2", precision="fp64", zero=3, microbatches=2)
    result = verify(package.write(tmp_path / "build"), steps=2)
    assert result.ok, result.worst


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_what_ranks_hold(level: int) -> None:
    """The optimizer's parts are a dp-th of all, rounded up; nothing is lost and nothing held twice."""
    program = partc.compile(tied, ids_batch(), mesh="4", zero=level).program
    held = Counter[str]()
    for rank in range(4):
        for parameter in program.parameters:
            shard = Shard(str(parameter.type))
            local = shard.local_shape(program.sizes)
            held[parameter.name] += math.prod(local)
            assert shard.local(torch.zeros(shard.shape), program.sizes, Mesh.parse("4").coordinate(rank)).shape == local
    for parameter in program.parameters:
        whole = math.prod(parameter.type.shape)
        spare = {"embed.weight": 0}.get(parameter.name, -parameter.type.shape[0] % 4 if parameter.type.shape else 0)
        rows = whole // parameter.type.shape[0] if parameter.type.shape else 0
        parted = level and parameter.gather
        assert held[parameter.name] == (whole + spare * rows if parted else 4 * whole)
    parts = {parameter.name for parameter in program.parameters if parameter.gather}
    assert parts >= {"embed.weight", "block.0.weight", "odd"} if level else not parts
    assert "scale" not in parts


@pytest.mark.parametrize(
    ("level", "gathers", "scatters"),
    [(0, {}, {}), (1, {"refresh": 1}, {"B": 1}), (2, {"refresh": 1}, {"B": 2}),
     (3, {"UNSHARD": 1}, {"B": 2})],  # what all actions read is gathered once, as the step begins
)  # fmt: skip
def test_when_parts_move(level: int, gathers: dict[str, int], scatters: dict[str, int]) -> None:
    """One collective per region, direction and microbatch at most: not one for each parameter."""
    program = partc.compile(one_block, {"x": torch.randn(8, 6)}, mesh="2", zero=level, microbatches=2).program
    found: dict[str, Counter[str]] = {"all_gather": Counter(), "reduce_scatter": Counter()}
    for event in events(program).events_of(0):
        if isinstance(event, Entered) and event.op in found:
            found[event.op][event.action.removeprefix("0").rstrip("01")] += 1
    assert (found["all_gather"], found["reduce_scatter"]) == (gathers, scatters)


class OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().sum()  # type: ignore[no-any-return]


def one_block() -> nn.Module:
    return OneBlock()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("given", "mesh", "code"),
    [
        ("4", "2", "P0404"),
        ("full", "2", "P0404"),
        ("3@tp", "2x2", "P0413"),
        ("2@", "2", "P0413"),
        ("1@dp_in", "2", "P0413"),
        ("3@3", "2", "P0413"),
        ("3@4", "2", "P0413"),
        ("3@1", "2", "P0413"),
        ("3@2", "tp=2", "P0413"),
        ("3@2", "dp=1,ep=4", "P0413"),
    ],
)
def test_wrong_levels(given: Any, mesh: str, code: str) -> None:
    with pytest.raises(PartcError) as error:
        partc.compile(one_block, {"x": torch.randn(8, 6)}, mesh=mesh, zero=given)
    assert error.value.code == code
