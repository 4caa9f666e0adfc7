"""Operands that lie strided in memory: what regions' functions compute of them, against autograd of torch's composite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from partc.codegen.functions import region_code
from partc.codegen.source import Function
from partc.mesh import Mesh
from partc.passes.differentiate import differentiate
from partc.program import Call, Graph, Parameter, Program, Region, Value
from partc.rules.table import DENSE
from partc.runtime import functional
from tests import op_cases
from tests.example_cases import example_cases
from tests.op_cases import Case, case, normal, type_of, whole

warnings.simplefilter("ignore")  # from torch, about the odd arguments of a few cases
MADE_BY_PARTC = frozenset(  # which have no derivative, or whose forward is a bound that only backward completes
    "linear_grad_input linear_grad_bias linear_grad_weight matmul_grad_left matmul_grad_right expert_matmul_grad_rows "
    "attention_backward linear_cross_entropy linear_cross_entropy_backward".split()
)


def without_rules() -> list[Case]:
    """Calls of operations that no rule covers, for what torch makes of them below autograd."""
    volume, image = normal(2, 3, 4, 6, 5), normal(2, 3, 6, 5)
    square = normal(3, 4, 4) + 4 * torch.eye(4, dtype=torch.float64)
    return [
        case("pdist", normal(5, 4)),
        case("adaptive_max_pool3d", volume, [2, 3, 2]),
        case("max_pool3d", volume, [2, 3, 2]),
        case("max_pool3d", volume[0], [2, 3, 2]),
        case("fractional_max_pool2d", image, [2, 2], [3, 2], torch.rand(2, 3, 2, dtype=torch.float64)),
        case("fractional_max_pool3d", volume, [2, 2, 2], [2, 3, 2], torch.rand(2, 3, 3, dtype=torch.float64)),
        case("nll_loss_nd", image.log_softmax(1), whole(3, 2, 6, 5)),
        case("grid_sampler", image, normal(2, 4, 3, 2), 0, 0, False),
        case("linalg_det", square),
        case("linalg_slogdet", square),
        case("linalg_inv", square),
        case("linalg_solve", square, normal(3, 4, 2)),
        case("instance_norm", image, normal(3), normal(3), None, None, True, 0.1, 1e-5, False),
        case("im2col", image, [2, 3], [1, 1], [0, 0], [1, 1]),
        case("nll_loss", normal(6, 4), whole(4, 6)),
        case("smooth_l1_loss", normal(6, 4), normal(6, 4)),
        case("kron", normal(3, 2), normal(2, 4)),
        case("index_put", normal(6, 4), [whole(6, 3)], normal(3, 4)),
        case("lu_solve", normal(3, 4, 2), torch.linalg.lu_factor(square)[0], torch.linalg.lu_factor(square)[1]),
        case("linalg_cholesky", square @ square.mT),
        case("linalg_matrix_exp", square / 9),
        case("renorm", normal(4, 3), 2, 0, 1.0),
        case("replication_pad2d", image, [1, 2, 1, 0]),
        case("reflection_pad1d", normal(2, 3, 6), [2, 1]),
    ]


CASES = [
    found
    for found in (*op_cases.all_cases(), *example_cases(), *without_rules())
    if any(value.type.differentiable for value in found.op.results)
]


def laid(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor in other memory, and tensors that repeat theirs; what lies between elements is no number."""
    between = math.nan if x.is_floating_point() else 0
    dims = range(x.dim())
    if x.dim() > 1:
        yield "transposed", x.permute(*reversed(dims)).contiguous().permute(*reversed(dims))
        yield "first two swapped", x.transpose(0, 1).contiguous().transpose(0, 1)
    if x.dim():
        every = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), between)  # type: ignore[arg-type]
        every[..., ::2] = x
        yield "stepped", every[..., ::2]
        wide = x.new_full((x.shape[0] + 2, *x.shape[1:-1], x.shape[-1] + (3 if x.dim() > 1 else 0)), between)  # type: ignore[arg-type]
        part = wide[1:-1, ..., 1:-2] if x.dim() > 1 else wide[1:-1]
        yield "sliced", part.copy_(x)
        yield "one row", x[:1].expand(x.shape)
        yield "one column", x[..., :1].expand(x.shape)
        yield "one element", x.flatten()[:1].reshape([1] * x.dim()).expand(x.shape)
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
    trainable = case.op.name not in MADE_BY_PARTC
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


def function(written: Function) -> Any:
    """The emitted function, run as its module would."""
    names = ", ".join(argument.name for argument in written.arguments)
    text = "\n    ".join([f"def {written.name}({names}):", *(line.code for line in written.lines), "pass"])
    scope: dict[str, Any] = {"torch": torch, "F": F, "functional": functional, "math": math}
    exec(text, scope)
    return scope[written.name]


class Emitted:
    """A case's forward and backward as emitted where nothing is known of its operands' memory."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.region = differentiate(program_of(case)).regions[0]
        code = region_code(self.region, {}, "", "", dense=())
        self.fields = {value.name: field.name for value, field in zip(self.region.params, code.fields, strict=True)}
        self.forward, self.backward = code.forward, code.backward
        self.run_forward = function(code.forward)
        self.run_backward = None if code.backward is None else function(code.backward)

    def run(
        self, values: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Results, and the gradients of the operands."""
        held = {
            "comm": SimpleNamespace(device="cpu"),
            "p": SimpleNamespace(**{field: values[name] for name, field in self.fields.items()}),
        }
        inputs = [values[value.name] for value in self.region.forward.inputs]
        found = self.run_forward(*(held[a.name] for a in self.forward.arguments if a.name in held), *inputs)
        made = found if isinstance(found, tuple) else (found,)
        if self.backward is None or self.run_backward is None:
            return made, {}
        *made, saved = made
        into = {name: torch.zeros_like(values[name], memory_format=torch.contiguous_format) for name in self.fields}
        held |= {"g": SimpleNamespace(**{self.fields[name]: x for name, x in into.items()}), "saved": saved}
        held |= {name: x for name, x in grads.items()}
        self.run_backward(*(held[argument.name] for argument in self.backward.arguments))
        return tuple(made), into


def expected(case: Case, values: Mapping[str, Tensor], grads: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """By autograd of the composite, on dense copies."""
    plain = {name: x.clone(memory_format=torch.contiguous_format).requires_grad_(x.is_floating_point()) for name, x in values.items()}
    results = op_cases.run(case.op, plain)
    made = [x for x, value in zip(results, case.op.results, strict=False) if value.type.differentiable]
    wanted = {name: x for name, x in plain.items() if x.requires_grad}
    reached = [(x, g) for x, g in zip(made, grads, strict=True) if x.requires_grad]
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
        groups = [having] if len(having) == 1 else [having, *([name] for name in having)]
        for group in groups:
            yield f"{way}: {' '.join(group)}", dict(case.values) | {name: ways[name][way] for name in group}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_strided_operands_give_what_dense_ones_give(case: Case) -> None:
    emitted = Emitted(case)
    outputs = [x for x, value in zip(case.results, case.op.results, strict=False) if value.type.differentiable]
    for what, values in arrangements(case):
        shapes = [x.shape for x in expected(case, values, outputs)[0]]
        dense = [normal(*shape) for shape in shapes]
        # The gradients that arrive lie in other memory as well.
        for number, grads in enumerate([dense, *zip(*(list(dict(laid(x)).values()) or [x] for x in dense), strict=False)]):
            results, gradients = expected(case, values, [g.contiguous() for g in grads])
            named = {value.name: g for value, g in zip(emitted.region.backward.inputs, grads, strict=False)} if emitted.region.backward else {}
            made, found = emitted.run(values, named)
            for x, y in zip(made, results, strict=False):
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda m: f"{what}, {number}: {m}")
            for name, x in found.items():
                y = gradients[name]
                y = torch.zeros_like(x) if y is None else y
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda m: f"{what}, gradient {number} of {name}: {m}")
