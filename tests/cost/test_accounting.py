"""Communicated bytes and repeated operations of small plans, against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partc.cost.accounting import communication, replicated_ops
from partc.errors import Source
from partc.ir.mesh import Mesh
from partc.ir.program import Call, Choice, Graph, Parameter, Program, Region, Transfer
from partc.passes.actions import actions
from partc.passes.bucket import bucket
from partc.passes.schedule import schedule
from tests.programs import op, value

F32 = 4


def plan(mesh: str = "pp=2,dp=3,tp=4", microbatches: int = 5) -> Program:
    """Two stages: blocks that gather and reduce over tp, a loss in the last; one weight is tied over both."""
    x = value("x", layout="[30@dp,mb, 8@tp]")
    full = value("full", layout="[30@dp,mb, 8]")
    part = value("part", layout="[30@dp,mb, 8] partial(tp)")
    y = value("y", layout="[30@dp,mb, 8@tp]")
    weight = value("w", layout="[8, 8@tp] vary(dp)")
    gain = value("gain", layout="[8] vary(dp,tp)")
    forward = Graph(
        inputs=(x,),
        ops=(
            op("all_gather", "x", makes=full, dim=1, axis="tp"),
            op("matmul", "full", "w", makes=part),
            op("reduce_scatter", "part", makes=y, dim=1, axis="tp"),
        ),
        outputs=("y",),
    )
    grad, whole = value("grad_y", layout="[30@dp,mb, 8@tp]"), value("grad_full", layout="[30@dp,mb, 8]")
    backward = Graph(
        inputs=(grad,), ops=(op("all_gather", "grad_y", makes=whole, dim=1, axis="tp"),), outputs=("grad_full",)
    )
    block = Region(name="block", params=(weight, gain), forward=forward, backward=backward)
    count_in, count_out = value("n_part", layout="[] partial(dp)"), value("n", layout="[]")
    count = Region(
        name="count",
        params=(),
        forward=Graph(
            inputs=(count_in,), ops=(op("all_reduce", "n_part", makes=count_out, axis="dp"),), outputs=("n",)
        ),
        phase="step",
    )
    return Program(
        name="counted",
        mesh=Mesh.parse(mesh),
        microbatches=microbatches,
        inputs=("x", "n_part"),
        values=(x, count_in, replace(y, name="h"), replace(y, name="loss"), count_out),
        parameters=(
            Parameter(name="w", type=replace(weight.type), trainable=True, reduce=("dp",)),
            Parameter(name="gain", type=gain.type, trainable=True, reduce=("dp", "tp")),
            Parameter(name="frozen", type=gain.type, trainable=False, reduce=("dp",)),
        ),
        regions=(block, count),
        calls=(
            Call(name="b0", region="block", params=("w", "gain"), args=("x",), results=("h",), stage=0),
            Call(name="b1", region="block", params=("w", "frozen"), args=("h",), results=("loss",), stage=1),
            Call(name="n", region="count", params=(), args=("n_part",), results=("n",), stage=1),
        ),
        transfers=(Transfer(value="h", source=0, target=1, gradient=True),),
    )


def written(program: Program) -> Program:
    """The program with its actions."""
    return actions(schedule(bucket(program)))


def test_bytes_of_a_step_by_hand() -> None:
    rows = 30 // 3 // 5
    activation = rows * 8 * F32  # whole in its second dimension
    gathered = activation * 3 // 4
    scattered = activation * 3 // 4
    tp = 5 * (gathered + scattered + gathered)  # five microbatches: forward twice, backward once
    weight = 8 * 8 // 4 * F32
    gain = 8 * F32
    assert communication(written(plan())) == {
        "pp": 5 * (activation // 4) + 2 * weight * 1 // 2,  # received by either stage, and the tied weight's gradient
        "dp": max(2 * weight * 2 // 3, 2 * weight * 2 // 3 + 2 * F32 * 2 // 3),  # the count is stage 1's
        "tp": tp,
        "dp,tp": 2 * gain * 11 // 12,
    }


def test_axes_of_size_one_move_nothing() -> None:
    found = communication(written(replace(plan("pp=2,dp=1,tp=1", 1), microbatches=1)))
    assert found["dp"] == found["tp"] == 0 and found["pp"] > 0


def test_constants_are_not_of_a_step() -> None:
    program = plan()
    setup = replace(program.regions[1], phase="setup")
    assert communication(written(replace(program, regions=(program.regions[0], setup))))["dp"] == 2 * 64 * 2 // 3


def repeated(choices: tuple[Choice, ...], name: str = "linear", mesh: str = "dp=3,tp=4") -> Program:
    x, w, y = value("x", 30, 8), value("w", 6, 8), value("y", 30, 6)
    source = Source(file="m.py", line=4)
    product = replace(op(name, "x", "w", makes=y), choices=choices, source=source)
    region = Region(name="head", params=(w,), forward=Graph(inputs=(x,), ops=(product,), outputs=("y",)))
    return Program(
        name="repeated",
        mesh=Mesh.parse(mesh),
        inputs=("x",),
        values=(x, y),
        parameters=(Parameter(name="w", type=w.type, trainable=True),),
        regions=(region,),
        calls=tuple(Call(name=f"head{i}", region="head", params=("w",), args=("x",), results=("y",)) for i in range(2)),
    )


@pytest.mark.parametrize("named", [(), (Choice(axis="tp", factor=None),)])
def test_a_product_that_an_axis_repeats_is_reported(named: tuple[Choice, ...]) -> None:
    found = replicated_ops(repeated((Choice(axis="dp", factor="b"), *named)))
    assert [(item.op, item.place, item.axis, item.rule, str(item.source)) for item in found] == [
        ("linear", "head.y", "tp", True, "m.py:4")
    ]
    # Two calls of 2 * 30 * 8 * 6, cut over dp; three of tp's four ranks need not have done it.
    assert found[0].flops == 2 * (2 * 30 * 8 * 6) * 3 // 3


def test_an_operation_without_a_rule_is_reported() -> None:
    found = replicated_ops(repeated((), name="mylib::unheard_of"))
    assert {(item.op, item.axis, item.rule) for item in found} == {
        ("mylib::unheard_of", "dp", False),
        ("mylib::unheard_of", "tp", False),
    }


def test_what_is_cut_everywhere_is_not() -> None:
    assert replicated_ops(repeated((Choice(axis="dp", factor="b"), Choice(axis="tp", factor="o")))) == ()
    assert replicated_ops(repeated((), mesh="pp=2")) == ()
