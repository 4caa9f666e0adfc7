"""Elementwise kernels on every kind of number: NaN, infinities, zeros, and numbers that round to them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from partc.ir.interpreter import evaluate
from partc.ir.operators import DTYPES
from partc.ir.program import DType, Graph, Op
from partc.passes.fuse import fuse
from tests.kernels.test_kernels import TOLERANCE, kernels, program_of
from tests.programs import op, value
from tests.triton_runs import Kernels

__all__ = ["kernels"]  # the fixture

Arguments = tuple[object, ...]
# Operations of x, of y and of what is told; those that have several sets of arguments are here with each.
OPERATIONS: Mapping[str, tuple[Arguments, ...]] = {
    "leaky_relu": (("x",), ("x", 0.2)), "_prelu_kernel": (("x", "y"),), "elu": (("x",), ("x", 1.3, 1.7, 0.5)),
    "celu": (("x", 1.3),), "softplus": (("x",), ("x", 2.0, 5.0)), "log_sigmoid": (("x",),), "mish": (("x",),),
    "hardtanh": (("x",), ("x", -0.5, 2.1)), "hardsigmoid": (("x",),), "hardswish": (("x",),),
    "threshold": (("x", 0.125, 20.7),), "log1p": (("x",),), "expm1": (("x",),), "floor": (("x",),), "ceil": (("x",),),
    "round": (("x",),), "trunc": (("x",),), "frac": (("x",),), "sign": (("x",),), "sgn": (("x",),),
    "nan_to_num": (("x",), ("x", 0.1), ("x", None, 7.1, -3.3)), "lerp": (("x", "y", 0.3), ("x", "y", 0.7), ("x", "y", "y")),
    "addcmul": (("x", "y", "x"),), "addcdiv": (("x", "x", "y"),), "xlogy": (("x", "y"), ("y", "x")),
    "logaddexp": (("x", "y"), ("x", "x")), "pow": (("x", 4),),
    "clamp": (("x", "y"), ("x", None, "y"), ("x", "y", "x")),
    "clamp_min": (("x", 0.1), ("x", "y")), "clamp_max": (("x", 0.1), ("x", "y")),
}  # fmt: skip
DERIVATIVES: Mapping[str, tuple[Arguments, ...]] = {
    "leaky_relu_backward": (("y", "x", 0.2, False),), "softplus_backward": (("y", "x", 2.0, 5.0), ("y", "x", 1, 20)),
    "elu_backward": (("y", 1.3, 1.7, 0.5, False, "x"), ("y", 1.3, 1.7, 0.5, True, "x")),
    "hardtanh_backward": (("y", "x", -0.5, 2.0),), "hardsigmoid_backward": (("y", "x"),),
    "hardswish_backward": (("y", "x"),), "mish_backward": (("y", "x"),),
}  # fmt: skip
CONDITIONS = ["isnan", "isinf"]
NUMBERS = [
    0.0, -0.0, 1e-3, -1e-3, 1e-6, -1e-6, 0.5, -0.5, 1.5, -1.5, 2.5, 3.0, -3.0, 5.0, -5.0, 19.5, -19.5, 20.5, 41.0,
    -41.0, 88.0, -88.0, 1e-30, -1e-30, 1024.0, -1024.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.25, -0.75, 0.1,
]  # fmt: skip


def many(dtype: DType) -> dict[str, Tensor]:
    """Every pair of such numbers."""
    numbers = torch.tensor(NUMBERS, dtype=torch.float64).to(DTYPES[dtype])
    return {"x": numbers.repeat_interleave(len(numbers)), "y": numbers.repeat(len(numbers))}


def exact(name: str, given: Arguments, dtype: DType, values: Mapping[str, Tensor]) -> Tensor:
    """By PyTorch in fp64, rounded; values that are NaN or infinite, by PyTorch in the type itself."""
    one = op(name, *given, makes=value("o", len(values["x"]), dtype=dtype))
    own, wide = (
        torch.nn.functional.logsigmoid(known["x"])
        if name == "log_sigmoid"
        else evaluate(Graph(inputs=(), ops=(one,), outputs=("o",)), known)["o"]
        for known in (values, {key: x.double() for key, x in values.items()})
    )
    if name == "hardtanh_backward":  # of NaN, PyTorch's derivative is 0 on CPUs and 1 on GPUs
        own = torch.where(values["x"].isnan(), values["y"], own)
    if name == "hardswish_backward":  # and here NaN on CPUs, and the gradient on GPUs
        own = torch.where(values["x"].isnan(), values["x"], own)
    return torch.where(own.isfinite() & ~values["x"].isnan() & (name != "nan_to_num"), wide.to(own.dtype), own)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize("name", [*OPERATIONS, *DERIVATIVES])
def test_every_number_has_its_result(kernels: Kernels, name: str, dtype: DType) -> None:
    values = many(dtype)
    every = (OPERATIONS | DERIVATIVES)[name]  # type: ignore[operator]
    count = len(values["x"])
    ops: list[Op] = []
    for number, given in enumerate(every):
        ops.append(op(name, *given, makes=value(f"o{number}", count, dtype=dtype)))
    ops.append(op("add", "x", 0, makes=value("same", count, dtype=dtype)))
    inputs = tuple(value(item, count, dtype=dtype) for item in ("x", "y") if any(item in given for given in every))
    graph = Graph(inputs=inputs, ops=tuple(ops), outputs=tuple(one.result.name for one in ops))
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    assert len(after.ops) == 1 and after.ops[0].body
    made = kernels.run(after, values, {}, {})
    for number, given in enumerate(every):
        right = exact(name, given, dtype, values)
        torch.testing.assert_close(
            made[f"o{number}"], right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 1e3, equal_nan=True
        )


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_every_probability_has_its_loss_and_slope(kernels: Kernels, dtype: DType) -> None:
    """Also probabilities of 0 and 1, and those that round to them. Numbers that are none have the loss NaN."""
    numbers = torch.tensor([0, 1e-30, 1e-13, 1e-3, 0.3, 0.5, 0.875, 1 - 1e-7, 1 - 1e-13, 1], dtype=torch.float64)
    p, target = torch.cartesian_prod(numbers, numbers).to(DTYPES[dtype]).unbind(1)
    count = len(p)
    ops = (
        op("binary_cross_entropy", "p", "target", None, 0, makes=value("loss", count, dtype=dtype)),
        op("binary_cross_entropy_backward", "loss", "p", "target", None, 0, makes=value("slope", count, dtype=dtype)),
        op("logit", "p", makes=value("logit", count, dtype=dtype)),
    )
    inputs = tuple(value(name, count, dtype=dtype) for name in ("p", "target"))
    graph = Graph(inputs=inputs, ops=ops, outputs=("loss", "slope", "logit"))
    given = {"p": p, "target": target}
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    assert len(after.ops) == 1
    made = kernels.run(after, given, {}, {})
    for name, right in evaluate(graph, {name: x.double() for name, x in given.items()}).items():
        torch.testing.assert_close(made[name].double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    outside = torch.tensor([-1e-30, -0.5, 1.01, 7], dtype=p.dtype).repeat(count // 4)
    assert kernels.run(after, {"p": outside, "target": target}, {}, {})["loss"].isnan().all()


@pytest.mark.parametrize("name", ["log1p", "expm1"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_small_numbers_keep_their_digits(kernels: Kernels, name: str, dtype: DType) -> None:
    """Where 1 + x has lost most of x, and exp(x) - 1 too; in units of the result's last place."""
    size = torch.logspace(-12, 0, 500, dtype=torch.float64).to(DTYPES[dtype])
    x = torch.cat([size, -size[:-1]])
    ops = (
        op(name, "x", makes=value("o", len(x), dtype=dtype)),
        op("add", "x", 0, makes=value("same", len(x), dtype=dtype)),
    )
    graph = Graph(inputs=(value("x", len(x), dtype=dtype),), ops=ops, outputs=("o", "same"))
    made = kernels.run(fuse(program_of(graph), kernels="triton").regions[0].forward, {"x": x}, {}, {})["o"]
    right = getattr(torch, name)(x.double())
    error = ((made.double() - right) / right).abs().max()
    assert error < 4 * torch.finfo(x.dtype).eps


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_conditions_of_every_number(kernels: Kernels, dtype: DType) -> None:
    values = many(dtype)
    count = len(values["x"])
    ops = [op(name, "x", makes=value(name, count, dtype="bool")) for name in CONDITIONS]
    ops.append(op("bitwise_xor", "isnan", "isinf", makes=value("odd", count, dtype="bool")))
    ops.append(op("logical_xor", "x", "isnan", makes=value("either", count, dtype="bool")))
    ops.append(op("bitwise_not", "odd", makes=value("finite", count, dtype="bool")))
    ops.append(op("where", "finite", "x", 0.0, makes=value("o", count, dtype=dtype)))
    outputs = ("isnan", "isinf", "odd", "either", "finite", "o")
    graph = Graph(inputs=(value("x", count, dtype=dtype),), ops=tuple(ops), outputs=outputs)
    made = kernels.run(fuse(program_of(graph), kernels="triton").regions[0].forward, values, {}, {})
    for name, right in evaluate(graph, values).items():
        assert torch.equal(made[name], right), name


def test_integers_divide_as_pytorch_says(kernels: Kernels) -> None:
    x = torch.arange(-20, 20)
    ops = (
        op("remainder", "x", 7, makes=value("rest", 40, dtype="i64")),
        op("fmod", "x", 7, makes=value("signed", 40, dtype="i64")),
        op("bitwise_not", "x", makes=value("turned", 40, dtype="i64")),
        op("bitwise_xor", "x", 12, makes=value("xor", 40, dtype="i64")),
        op("clamp", "x", -3, 5, makes=value("between", 40, dtype="i64")),
    )
    outputs = tuple(one.result.name for one in ops)
    graph = Graph(inputs=(value("x", 40, dtype="i64"),), ops=ops, outputs=outputs)
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    assert len(after.ops) == 1
    made = kernels.run(after, {"x": x}, {}, {})
    for name, right in evaluate(graph, {"x": x}).items():
        assert torch.equal(made[name], right), name
