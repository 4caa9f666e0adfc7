"""The verifier finds every way in which a program can be broken, and names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from partc.errors import InternalError
from partc.ir.program import Bucket, Call, Choice, Graph, Op, Parameter, Program, Ref, Region, Transfer
from partc.ir.verifier import faults_of, verify_program
from tests.programs import op, tiny, value


def graph(program: Program, **changes: object) -> Program:
    region = program.regions[0]
    return replace(program, regions=(replace(region, forward=replace(region.forward, **changes)),))  # type: ignore[arg-type]


def ops(program: Program, *new: Op) -> Program:
    return graph(program, ops=(*program.regions[0].forward.ops, *new))


def region(program: Program, **changes: object) -> Program:
    return replace(program, regions=(replace(program.regions[0], **changes),))  # type: ignore[arg-type]


def call(program: Program, **changes: object) -> Program:
    return replace(program, calls=(replace(program.calls[0], **changes),))  # type: ignore[arg-type]


def summed(program: Program, *buckets: str) -> Parameter:
    """The program's weight, of which ranks along tp have parts of the gradient."""
    return replace(program.parameters[0], reduce=("tp",), buckets=buckets)


def test_whole_programs_have_no_faults() -> None:
    assert list(faults_of(tiny())) == []
    verify_program(tiny("2x2x2"), {"local"}, "nothing")


BROKEN: dict[str, tuple[Callable[[Program], Program], str]] = {
    "use before definition": (
        lambda p: graph(p, ops=p.regions[0].forward.ops[::-1]),
        "main: loss = sum reads y before it is made",
    ),
    "a name twice in a graph": (
        lambda p: ops(p, op("neg", "y", makes=value("y", 6, 7))),
        "main: y = neg makes y a second time",
    ),
    "a parameter's name taken": (
        lambda p: graph(p, inputs=(value("w", 6, 5),)),
        "main has two values called w",
    ),
    "an output that is nowhere": (lambda p: graph(p, outputs=("lost",)), "main returns lost, which it doesn't make"),
    "no such region": (lambda p: call(p, region="other"), "call main is of a region other that doesn't exist"),
    "an argument that is nowhere": (
        lambda p: call(p, args=("z",)),
        "reads z before it is made or received in stage 0",
    ),
    "too few arguments": (lambda p: call(p, args=()), "call main of main: arguments are 0, the region has 1"),
    "a parameter that is nowhere": (lambda p: call(p, params=("v",)), "call main of main: parameter v doesn't exist"),
    "a parameter of another shape": (
        lambda p: region(p, params=(value("w", 7, 4),)),
        "call main of main: parameter w is f32[7, 5], the region's w is f32[7, 4]",
    ),
    "an argument of another dtype": (
        lambda p: graph(p, inputs=(value("x", 6, 5, dtype="bf16"),)),
        "call main of main: argument x is f32[6, 5], the region's x is bf16[6, 5]",
    ),
    "a result made twice": (
        lambda p: replace(
            p, calls=(*p.calls, Call(name="b", region="main", params=("w",), args=("x",), results=("loss",)))
        ),
        "call b of main makes loss a second time",
    ),
    "a gradient in no bucket": (
        lambda p: replace(p, buckets=(Bucket(name="b", stage=0, over=("tp",)),), parameters=(summed(p),)),
        "the gradient of w is in buckets [], which are not those of its sums",
    ),
    "a bucket over other axes": (
        lambda p: replace(p, buckets=(Bucket(name="b", stage=0, over=("dp",)),), parameters=(summed(p, "b"),)),
        "the gradient of w is in buckets ['b'], which are not those of its sums",
    ),
    "a bucket that is nowhere": (
        lambda p: replace(p, buckets=(Bucket(name="b", stage=0, over=("tp",)),), parameters=(summed(p, "c"),)),
        "w is in bucket c, which doesn't exist",
    ),
    "kernels of several sources": (
        lambda p: replace(p, regions=(p.regions[0], replace(p.regions[0], name="other", kernels="triton"))),
        "regions have kernels of several sources: aten, triton",
    ),
    "no loss": (lambda p: replace(p, loss="gain"), "the loss gain has no type"),
    "an axis that is nowhere": (
        lambda p: ops(p, op("neg", "y", makes=value("n", layout="[6@ep, 7]"))),
        "main: n has layout [6@ep, 7], with an axis ep that the mesh doesn't have",
    ),
    "an axis twice": (
        lambda p: ops(p, op("neg", "y", makes=value("n", layout="[6@tp, 8@tp]"))),
        "main: n has layout [6@tp, 8@tp], with tp twice",
    ),
    "a cut that doesn't divide": (
        lambda p: ops(p, op("neg", "y", makes=value("n", layout="[6, 7@tp]"))),
        "main: n has layout [6, 7@tp]: 7 does not divide by 2",
    ),
    "a collective over nothing": (
        lambda p: ops(p, op("all_reduce", "y", makes=value("n", 6, 7), axis="ep")),
        "main: n = all_reduce is over an axis 'ep' that the mesh doesn't have",
    ),
    "a gather that doesn't grow": (
        lambda p: ops(p, op("all_gather", "y", makes=value("n", 6, 7), dim=0, axis="tp")),
        "main: n = all_gather makes 42 elements of 42, not 84",
    ),
    "a scatter that doesn't shrink": (
        lambda p: ops(p, op("reduce_scatter", "y", makes=value("n", 6, 7), dim=0, axis="tp")),
        "main: n = reduce_scatter makes 42 elements of 42, not 21",
    ),
    "a collective that casts": (
        lambda p: ops(p, op("all_reduce", "y", makes=value("n", 6, 7, dtype="f64"), axis="tp")),
        "main: n = all_reduce makes f64 of f32",
    ),
    "a view that loses elements": (
        lambda p: ops(p, op("reshape", "y", (6, 6), makes=value("n", 6, 6))),
        "main: n = reshape makes 36 elements of 42, not 42",
    ),
    "a choice over nothing": (
        lambda p: ops(p, replace(op("neg", "y", makes=value("n", 6, 7)), choices=(Choice(axis="cp", factor=None),))),
        "main: n = neg is spread over an axis 'cp' that the mesh doesn't have",
    ),
    "saved but not made": (lambda p: region(p, saved=("ghost",)), "main saves ghost, which it doesn't make"),
    "saved but not taken": (
        lambda p: region(p, saved=("y",), backward=Graph(inputs=(), ops=(), outputs=())),
        "the backward graph of main doesn't take y, which is saved for it",
    ),
    "a transfer backwards": (
        lambda p: replace(p, transfers=(Transfer(value="x", source=1, target=0, gradient=True),)),
        "x is sent from stage 1 to 0, of 1",
    ),
    "a value of another stage": (
        lambda p: replace(
            p,
            regions=(
                *p.regions,
                Region(name="id", params=(), forward=Graph(inputs=(value("a"),), ops=(), outputs=("a",))),
            ),
            values=(*p.values, value("again")),
            calls=(*p.calls, Call(name="id", region="id", params=(), args=("loss",), results=("again",), stage=1)),
        ),
        "call id of id reads loss before it is made or received in stage 1",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_programs_are_found(name: str) -> None:
    breaks, expected = BROKEN[name]
    program = breaks(tiny("tp=2"))
    faults = list(faults_of(program, {"local"}))
    assert any(expected in fault for fault in faults), faults
    with pytest.raises(InternalError, match="not well formed after breaking"):
        verify_program(program, {"local"}, "breaking")
    whole = tiny("tp=2")
    assert list(faults_of(whole, before=whole)) == []
    assert list(faults_of(program, {"local"}, before=whole)) == faults


def test_what_has_been_verified_is_not_verified_again() -> None:
    broken = ops(tiny(), op("neg", "lost", makes=value("v", 1)))
    assert list(faults_of(broken)) and list(faults_of(replace(broken, draws=1), before=broken)) == []


def test_many_faults_are_cut_short() -> None:
    many = [Op(name="neg", args=(Ref(f"lost{i}"),), results=(value(f"v{i}", 1),)) for i in range(15)]
    with pytest.raises(InternalError, match="and 5 more"):
        verify_program(ops(tiny(), *many), (), "breaking")
