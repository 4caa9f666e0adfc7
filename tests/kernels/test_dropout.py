"""Dropout masks that kernels draw equal the runtime's bit for bit on every rank, and are never saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_program, print_region
from partc.ir.verifier import faults_of
from partc.passes.fuse import fuse
from partc.runtime.comm.comm import Axis, Comm
from partc.runtime.random import dropout
from tests.kernels.test_kernels import kernels
from tests.programs import fused_graph
from tests.triton_runs import Kernels

__all__ = ["kernels"]

DROPPED = """
  param w: f32[6, 6]
  forward:
    input x: f32[4, 6]
    h = linear(x, w)  # f32[4, 6]
    y, kept = dropout(h, 0.25, 2, 3)  # f32[4, 6] ; bool[4, 6]
    z = add(y, x)  # f32[4, 6]
    loss = sum(z, (0, 1), False)  # f32[]
    return loss
  saved kept
  backward:
    input grad_loss: f32[]
    input kept: bool[4, 6]
    grad_z = expand(grad_loss, (4, 6))  # f32[4, 6]
    grad_h = dropout_backward(grad_z, kept, 0.25)  # f32[4, 6]
    grad_x = linear_grad_input(grad_h, w)  # f32[4, 6]
    return grad_x
"""


def test_a_mask_is_drawn_where_it_is_read() -> None:
    after = fuse(fused_graph(DROPPED), kernels="triton")
    assert parse(print_program(after)) == after
    assert not list(faults_of(after, {"local"}))
    assert_expected_inline(
        print_region(after.regions[0]),
        """\
region main phase microbatch kernels triton:
  param w: f32[6, 6]
  forward:
    input x: f32[4, 6]
    h    = linear(x, w)                                  # f32[4, 6]
    z    = fused(h, x, kernel="drop_add", strided=(1,))  # f32[4, 6]
    | kept = drawn(0.25, 3)       # bool[4, 6]
    | y    = drop(h, kept, 0.25)  # f32[4, 6]
    | z    = add(y, x)            # f32[4, 6]
    loss = sum(z, (0, 1), False)                         # f32[]
    return loss
  backward:
    input grad_loss: f32[]
    grad_h = fused(grad_loss, kernel="dropout_backward")  # f32[4, 6]
    | kept   = drawn(0.25, 3)                        # bool[4, 6]
    | grad_z = expand(grad_loss, (4, 6))             # f32[4, 6]
    | grad_h = dropout_backward(grad_z, kept, 0.25)  # f32[4, 6]
    grad_x = linear_grad_input(grad_h, w)                 # f32[4, 6]
    return grad_x
""",
    )


LAYOUTS = [
    ("5, 7", 2),
    ("4@dp,mb, 6@tp, 3", 3),
    ("8@dp, 3 · 4@tp, 5", 3),
    ("2 · 6@tp, 4@mb,dp", 2),
    ("32@dp, 3, 8@tp", 1),  # one decision for each example
    ("4, 3221225472@ep", 2),  # places beyond 32 bits, in a small part
]
SIZES = {"dp": 2, "tp": 2, "ep": 2**28}


@pytest.mark.parametrize(("layout", "dims"), LAYOUTS)
def test_masks_are_those_of_the_runtime(kernels: Kernels, layout: str, dims: int) -> None:
    """On the first and on the last rank of a mesh; seeds and steps as large as they get."""
    text = f"""
  forward:
    input x: f32[{layout}]
    y, kept = dropout(x, 0.3, {dims}, 5)  # f32[{layout}] ; bool[1]
    loss = mul(y, 2.0)  # f32[{layout}]
    return loss
"""
    program = replace(fused_graph(text), mesh=Mesh(axes=tuple(SIZES.items())), microbatches=2)
    region = fuse(program, kernels="triton").regions[0]
    (fused,) = region.forward.ops
    drawn = str(next(op for op in fused.body if op.name == "drawn").result.type.layout)
    type = region.forward.inputs[0].type
    x = torch.ones(type.layout.local_shape(program.sizes))
    for last, seed, step in ((0, 0, 0), (1, 2**63 + 11, 2**40)):
        comm = Comm({name: Axis(last * (size - 1), size) for name, size in SIZES.items()}, {})
        comm.mb, comm.seed, comm.step = Axis(last, 2), seed, step
        right, kept = dropout(x, 0.3, comm.draw(5, ", ".join(layout.split(", ")[:dims])))
        given: dict[str, Any] = {"x": x, "counter_0": comm.counter(5, drawn[1:-1])}
        made = kernels.one(fused, {"x": type}, given, program.sizes)["loss"]
        assert torch.equal(made != 0, kept.expand(x.shape))
        assert not kept.all() and kept.any()
        torch.testing.assert_close(made, right * 2.0, rtol=1e-6, atol=0)


def test_what_was_dropped_is_made_again_from_fewer_bits() -> None:
    """The mask is drawn once in backward, before what reads it there: also what forward would save after dropping."""
    text = """
  param w: bf16[6, 6]
  forward:
    input x: bf16[4, 6]
    h = linear(x, w)  # bf16[4, 6]
    wide = to(h, <f32>)  # f32[4, 6]
    y, kept = dropout(wide, 0.25, 2, 3)  # f32[4, 6] ; bool[4, 6]
    z = mul(y, y)  # f32[4, 6]
    loss = sum(z, (0, 1), False)  # f32[]
    return loss
  saved y, kept
  backward:
    input grad_loss: f32[]
    input y: f32[4, 6]
    input kept: bool[4, 6]
    grad_z = expand(grad_loss, (4, 6))  # f32[4, 6]
    grad_y = mul(grad_z, y)  # f32[4, 6]
    grad_wide = dropout_backward(grad_y, kept, 0.25)  # f32[4, 6]
    grad_h = to(grad_wide, <bf16>)  # bf16[4, 6]
    grad_x = linear_grad_input(grad_h, w)  # bf16[4, 6]
    return grad_x
"""
    after = fuse(fused_graph(text), kernels="triton")
    assert not list(faults_of(after, {"local"}))
    region = after.regions[0]
    assert region.saved == ("h",) and region.backward is not None
    assert [op.name for op in region.backward.ops] == ["fused", "linear_grad_input"]
    kernel = [op.name for op in region.backward.ops[0].body]
    assert sorted(kernel) == sorted(["drawn", "to", "drop", "expand", "mul", "dropout_backward", "to"])


HALVES = """
  param w: f32[6, 6]
  forward:
    input x: f32[4@dp, 6]
    y, kept = dropout(x, 0.25, 2, 3)  # f32[4@dp, 6] ; bool[2, 6]
    z = linear(y, w)  # f32[4@dp, 6]
    loss = sum(z, (0, 1), False)  # f32[]
    return loss
  saved kept
  backward:
    input grad_loss: f32[4@dp, 6]
    input kept: bool[2, 6]
    grad_x = linear_grad_input(grad_loss, w)  # f32[4@dp, 6]
    return grad_x, kept, grad_loss
  kept kept, grad_loss
  weight:
    input kept: bool[2, 6]
    input grad_loss: f32[4@dp, 6]
    grad_y = dropout_backward(grad_loss, kept, 0.25)  # f32[4@dp, 6]
    grad_w = linear_grad_weight(grad_y, grad_loss)  # f32[6, 6]
    return grad_w
"""


def test_halves_of_a_backward_draw_by_themselves() -> None:
    """A mask that one half would hand to the other; one that more than kernels read is handed on as it is drawn."""
    program = replace(fused_graph(HALVES), mesh=Mesh(axes=(("dp", 2), ("tp", 2))))
    after = fuse(program, kernels="triton")
    assert not list(faults_of(after, {"local"}))
    region = after.regions[0]
    assert region.saved == () and region.kept == ("grad_loss",) and region.weight is not None
    assert [op.name for op in region.weight.ops[0].body] == ["drawn", "dropout_backward"]
    handed = HALVES.replace("grad_w = linear_grad_weight(grad_y,", "grad_w = linear_grad_weight(kept,")
    after = fuse(replace(fused_graph(handed), mesh=program.mesh), kernels="triton")
    assert not list(faults_of(after, {"local"}))
    region = after.regions[0]
    assert region.saved == ("kept",) and region.weight is not None and "kept" in region.kept
    assert str(region.weight.definitions()["kept"].type) == "bool[4@dp, 6]"
