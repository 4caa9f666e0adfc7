"""Non-contiguous operands: results of regions' functions against autograd of torch's composite operations."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import partc
from partc.codegen.functions import region_code
from partc.codegen.names import region_names
from partc.codegen.source import Function, Record
from partc.ir.mesh import Mesh
from partc.ir.program import Call, Graph, Op, Parameter, Program, Ref, Region, Value
from partc.passes.differentiate import differentiate
from partc.rules.strides import dense
from partc.rules.table import DENSE
from partc.runtime.comm.comm import Comm
from partc.runtime.ops import functional
from partc.runtime.ops.scan import scan
from tests import op_cases
from tests.example_cases import example_cases
from tests.op_cases import Case, case, normal, type_of, whole

warnings.simplefilter("ignore")  # from torch, about the odd arguments of a few cases
# Operations without a derivative, those that compute nothing, and those whose case is another call than a traced one.
WITHOUT_DERIVATIVE = {
    *("linear_grad_input", "linear_grad_bias", "linear_grad_weight", "matmul_grad_left", "matmul_grad_right"),
    *("expert_matmul_grad_rows", "floor_divide", "new_zeros", "new_ones", "new_full"),
    *("zeros_like", "ones_like", "full_like", "rotary_backward", "attention_sinks_backward", "histc"),
    "times_loss_scale",
}
ELSEWHERE = {
    *("alias", "clone", "contiguous", "detach", "pad", "upsample_bilinear2d", "upsample_bicubic2d", "copysign"),
    *("incoming_gradient", "own_gradient"),  # whose gradients are other operations' results
    *(
        "bag_sum",
        "bag_max",
        "bag_sum_grad",
        "bag_max_grad",
    ),  # whose bags follow one another, and whose equal numbers have one largest
    *("attention_backward", "mask_classes", "linear_cross_entropy", "linear_cross_entropy_backward"),
    "linear_cross_entropy_grad_input",
}


def without_rules() -> list[Case]:
    """Calls of operations that no rule covers, for what torch makes of them below autograd."""
    volume, image = normal(2, 3, 4, 6, 5), normal(2, 3, 6, 5)
    square = normal(3, 4, 4) + 4 * torch.eye(4, dtype=torch.float64)
    return [
        case("pdist", normal(5, 4)),
        case("adaptive_max_pool3d", volume, [2, 3, 2]),
        case("max_pool3d", volume, [2, 3, 2]),
        case("max_pool3d", volume[0], [2, 3, 2]),
        case("nll_loss_nd", image.log_softmax(1), whole(3, 2, 6, 5)),
        case("grid_sampler", image, normal(2, 4, 3, 2), 0, 0, False),
        case("linalg_det", square),
        case("linalg_slogdet", square),
        case("instance_norm", image, normal(3), normal(3), None, None, True, 0.1, 1e-5, False),
        case("im2col", image, [2, 3], [1, 1], [0, 0], [1, 1]),
        case("nll_loss", normal(6, 4), whole(4, 6)),
        case("smooth_l1_loss", normal(6, 4), normal(6, 4)),
        case("kron", normal(3, 2), normal(2, 4)),
        case("index_put", normal(6, 4), [whole(6, 3)], normal(3, 4)),
        case("renorm", normal(4, 3), 2, 0, 1.0),
        case("replication_pad2d", image, [1, 2, 1, 0]),
        case("reflection_pad1d", normal(2, 3, 6), [2, 1]),
    ]


CASES = [
    found
    for found in (*op_cases.all_cases(), *example_cases(), *without_rules())
    if any(value.type.differentiable for value in found.op.results)
    and found.op.name not in ELSEWHERE
    and not (found.op.name == "cross_entropy" and len(found.values) == 3)  # whose weights have no derivative here
    and not (found.op.name == "matmul" and any(x.dim() == 1 for x in found.values.values()))  # which is reshaped first
]


def laid(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor in other memory, and tensors that repeat theirs; the memory between elements holds NaN."""
    between = math.nan if x.is_floating_point() else 0
    dims = range(x.dim())
    if x.dim() > 1:
        yield "transposed", x.permute(*reversed(dims)).contiguous().permute(*reversed(dims))
        yield "first two swapped", x.transpose(0, 1).contiguous().transpose(0, 1)
    if x.dim():
        every = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), between)
        every[..., ::2] = x
        yield "stepped", every[..., ::2]
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), between)
        yield "sliced", wide[..., 1:-2].copy_(x)
        yield "one row", x[:1].expand(x.shape)
        yield "one column", x[..., :1].expand(x.shape)
        one = x.flatten()[:1]
        if one.is_floating_point():
            one = (one * 8).ceil() / 8  # means of it are exact: its deviations are zero in any order of sums
        yield "one element", one.reshape([1] * x.dim()).expand(x.shape)
    if x.dim() == 4:
        yield "channels last", x.contiguous(memory_format=torch.channels_last)
    if x.dim() == 5:
        yield "channels last", x.contiguous(memory_format=torch.channels_last_3d)


def program_of(case: Case) -> Program:
    """One region, one operation; its numbers are parameters, so that all of them have gradients."""
    values = [Value(name=name, type=type_of(x)) for name, x in case.values.items()]
    params = tuple(value for value in values if value.type.differentiable)
    inputs = tuple(value for value in values if not value.type.differentiable)
    outputs = tuple(value.name for value in case.op.results if value.type.differentiable)
    region = Region(name="one", params=params, forward=Graph(inputs=inputs, ops=(case.op,), outputs=outputs))
    call = Call(
        name="one",
        region="one",
        params=tuple(value.name for value in params),
        args=tuple(value.name for value in inputs),
        results=outputs,
    )
    trainable = case.op.name not in WITHOUT_DERIVATIVE
    return Program(
        name="one",
        mesh=Mesh.parse("1"),
        inputs=call.args,
        values=(*inputs, *case.op.results),
        parameters=tuple(Parameter(name=value.name, type=value.type, trainable=trainable) for value in params),
        regions=(region,),
        calls=(call,),
        loss=outputs[0],
    )


def signs_of(program: Program) -> Program:
    """The program with a `sgn` after each result, so that its operation receives gradients of zeros."""
    (region,) = program.regions
    (op,) = region.forward.ops
    before = {value.name: f"{value.name}_before" for value in op.results if value.type.differentiable}
    signs = (Op(name="sgn", args=(Ref(before[x.name]),), results=(x,)) for x in op.results if x.name in before)
    forward = replace(region.forward, ops=(op.renamed(before), *signs))
    return replace(program, regions=(replace(region, forward=forward),))


def record(written: Record) -> type:
    """The emitted class."""
    return make_dataclass(written.name, [field.name for field in written.fields], slots=True)


def function(written: Function, records: Mapping[str, type] | None = None, *, inside: bool = False) -> Any:
    """The emitted function, run as its module would; with `inside`, it returns all that it makes."""
    names = ", ".join(argument.name for argument in written.arguments)
    lines = [line.code for line in written.lines if not inside or not line.code.startswith(("del ", "return "))]
    text = "\n    ".join([f"def {written.name}({names}):", *lines, "return locals()" if inside else "pass"])
    steps = {step.name: function(step) for step in written.steps}
    modules = {"torch": torch, "F": F, "functional": functional, "math": math, "scan": scan, "partial": partial}
    scope: dict[str, Any] = {**modules, **steps, **(records or {})}
    exec(text, scope)
    return scope[written.name]


class Emitted:
    """A region's forward and backward functions, as emitted when the strides of its operands are unknown."""

    def __init__(self, program: Program, *, inside: bool = False) -> None:
        self.program = differentiate(program)
        self.region = self.program.regions[0]
        code = region_code(self.region, {}, "", "", region_names(["one"])["one"])
        fields = code.params.fields if code.params else ()
        self.fields = {value.name: field.name for value, field in zip(self.region.params, fields, strict=True)}
        self.forward, self.backward = code.forward, code.backward
        records = {} if code.saved is None else {code.saved.name: record(code.saved)}
        self.run_forward = function(code.forward, records, inside=inside)
        self.run_backward = None if code.backward is None else function(code.backward)

    def held(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """Arguments by name."""
        params = SimpleNamespace(**{field: values[name] for name, field in self.fields.items()})
        inputs = {value.name: values[value.name] for value in self.region.forward.inputs}
        return {"comm": Comm({}, {}), "p": params, **inputs}

    def run(
        self, values: Mapping[str, Tensor], grads: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Results, and the gradients of the operands."""
        held = self.held(values)
        found = self.run_forward(*(held[argument.name] for argument in self.forward.arguments))
        made = found if isinstance(found, tuple) else (found,)
        if self.backward is None or self.run_backward is None:
            return made, {}
        made, saved = made[: len(self.region.forward.outputs)], made[len(self.region.forward.outputs) :]
        into = {name: torch.zeros_like(values[name], memory_format=torch.contiguous_format) for name in self.fields}
        held |= {
            "g": SimpleNamespace(**{self.fields[name]: x for name, x in into.items()}),
            "saved": next(iter(saved), None),
        }
        arriving = {value.name for value in self.region.backward.inputs} - set(self.region.saved)  # type: ignore[union-attr]
        outputs = zip(self.region.forward.outputs, grads, strict=True)
        held |= {f"grad_{name}": grad for name, grad in outputs if f"grad_{name}" in arriving}
        self.run_backward(*(held[argument.name] for argument in self.backward.arguments))
        return tuple(made), into


def expected(case: Case, values: Mapping[str, Tensor], grads: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """By autograd of the composite, on dense copies."""
    plain = {
        name: x.clone(memory_format=torch.contiguous_format).requires_grad_(x.is_floating_point())
        for name, x in values.items()
    }
    results = op_cases.run(case.op, plain)
    made = [x for x, value in zip(results, case.op.results, strict=False) if value.type.differentiable]
    wanted = {name: x for name, x in plain.items() if x.requires_grad}
    reached = [(x, g) for x, g in zip(made, grads, strict=False) if x.requires_grad]
    found: tuple[Any, ...] = (None,) * len(wanted)
    if reached and wanted:
        found = torch.autograd.grad(
            [x for x, _ in reached], list(wanted.values()), [g for _, g in reached], allow_unused=True
        )
    return [x.detach() for x in made], dict(zip(wanted, found, strict=True))


def arrangements(case: Case) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """All operands strided in one way, and each by itself."""
    ways = {name: dict(laid(x)) for name, x in case.values.items()}
    for way in dict.fromkeys(way for found in ways.values() for way in found):
        having = [name for name in ways if way in ways[name]]
        groups = [having] if len(having) == 1 or len(having) > 4 else [having, *([name] for name in having)]
        for group in groups:
            yield f"{way}: {' '.join(group)}", dict(case.values) | {name: ways[name][way] for name in group}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_strided_operands_give_what_dense_ones_give(case: Case) -> None:
    emitted = Emitted(program_of(case))
    plain = expected(case, case.values, [])[0]
    shapes = [x.shape for x in plain]
    error = 1e-6 if torch.float32 in {x.dtype for x in plain} else 1e-10
    arriving = [normal(*shape) for shape in shapes]
    # The gradients that arrive lie in other memory as well: one way after the other.
    ways = itertools.cycle([arriving, *zip(*(list(dict(laid(x)).values()) or [x] for x in arriving), strict=False)])
    for what, values in arrangements(case):
        grads = next(ways)
        try:
            results, gradients = expected(case, values, [g.contiguous() for g in grads])
        except torch.linalg.LinAlgError:  # of a matrix that repeats its elements and is singular
            continue
        if not all(x.isfinite().all() for x in (*results, *(y for y in gradients.values() if y is not None))):
            continue  # a mask that hides everything, a matrix of one row
        made, found = emitted.run(values, grads)
        for x, y in zip(made, results, strict=False):
            assert_close(x, y, f"{what}: result", error)
        for name, x in found.items():
            y = gradients[name]
            assert_close(x, torch.zeros_like(x) if y is None else y, f"{what}: gradient of {name}", error)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.values and case.op.name not in WITHOUT_DERIVATIVE], ids=str
)
def test_gradients_of_zeros_give_zeros(case: Case) -> None:
    results, gradients = expected(case, case.values, [torch.zeros_like(x) for x in expected(case, case.values, [])[0]])
    made, found = Emitted(signs_of(program_of(case))).run(case.values, results)
    for x, y in zip(made, results, strict=False):
        assert_close(x, y.sgn(), "result", 0)
    for name, x in found.items():
        y = gradients[name]
        if y is None or y.isfinite().all():  # the logarithm of a negative number has no derivative
            assert not x.any(), name


def assert_close(x: Tensor, y: Tensor, what: str, error: float) -> None:
    torch.testing.assert_close(x, y, rtol=error, atol=error, equal_nan=True, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_taken_for_dense_is_dense(case: Case) -> None:
    emitted = Emitted(program_of(case), inside=True)
    claimed = dense(emitted.program)["one"]
    held = emitted.held(case.values)
    made = emitted.run_forward(*(held[argument.name] for argument in emitted.forward.arguments))
    results = [value.name for op in emitted.region.forward.ops for value in op.results]
    tensors = {name: x for name in results if isinstance(x := made.get(name), Tensor)}
    assert tensors
    assert [name for name, x in tensors.items() if name in claimed and not x.is_contiguous()] == []


def test_positions_of_dense_operands_are_those_of_tensors() -> None:
    for name, positions in DENSE.items():
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            arguments = getattr(packet, overload)._schema.arguments
            kinds = {position: str(arguments[position].type) for position in positions}
            assert all("Tensor" in kind for kind in kinds.values()), f"{name}: {kinds}"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("groups", "tp=2"), ("groups", "dp=2"), ("mean", "1"), ("bags", "pp=2"), ("volumes", "1"), ("volumes", "tp=2")],
)
def test_strided_values_of_models(kind: str, mesh: str) -> None:
    path = Path(__file__).parents[1] / "models" / "strided.py"
    package = partc.compile(path, None, mesh=mesh, precision="fp64", options={"kind": kind})
    assert package.verify(virtual=True).ok
