"""Rotary embeddings in every spelling are one operation in each direction, and equal the eager model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partc
from partc.ir.interpreter import evaluate
from partc.ir.program import Graph, Op, Program, Ref, Region, Value
from partc.passes.fuse.rotary import spelled_rotary
from partc.runtime.ops.functional import rotary, rotary_backward
from tests.op_cases import type_of
from tests.passes.test_normalize import Function, check, names, ops
from tests.zoo import SIZES, TOKENS, Model

MODEL = str(Path(__file__).parents[1] / "models" / "rotations.py")
X = {"x": torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))}
Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]


def tables(width: int, size: int = 5) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(size, dtype=torch.float64), torch.arange(1, width + 1) / width)
    return angle.cos(), angle.sin()


def half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def half_by_slices(x: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    return torch.cat((-x[..., h:], x[..., :h]), dim=3)


def neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def neighbours_by_columns(x: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-b, a), -1).view(x.shape)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def neighbour_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, sin * a + cos * b), dim=-1).flatten(3)


def partly(rotation: Rotation) -> Rotation:
    return lambda x, cos, sin: torch.cat((rotation(x[..., :4], cos, sin), x[..., 4:]), -1)


# The function, the columns of its tables, and the arguments of the operation other than tensors.
FORMS: dict[str, tuple[Rotation, int, tuple[int | None, bool]]] = {
    "halves": (lambda x, cos, sin: x * cos + half(x) * sin, 8, (None, False)),
    "halves by slices": (lambda x, cos, sin: (sin * half_by_slices(x)) + (cos * x), 8, (None, False)),
    "halves of broadcast tables": (lambda x, cos, sin: x * cos[None, None] + half(x) * sin[None], 8, (None, False)),
    "neighbours": (lambda x, cos, sin: x * cos + neighbours(x) * sin, 8, (None, True)),
    "columns": (lambda x, cos, sin: x * cos + neighbours_by_columns(x) * sin, 8, (None, True)),
    "pairs of halves": (pairs, 4, (None, False)),
    "pairs of neighbours": (neighbour_pairs, 4, (None, True)),
    "part": (partly(lambda x, cos, sin: x * cos + half(x) * sin), 4, (4, False)),
    "part, neighbours": (partly(lambda x, cos, sin: x * cos + neighbours(x) * sin), 4, (4, True)),
    "part, pairs": (partly(pairs), 2, (4, False)),
}
# Near misses: one detail of a rotation is another, so that none of the operations may be taken for one.
OTHERS: dict[str, tuple[Rotation, int]] = {
    "no sign": (lambda x, cos, sin: x * cos + torch.cat(x.chunk(2, -1)[::-1], -1) * sin, 8),
    "other sign": (lambda x, cos, sin: x * cos + torch.cat((x[..., 4:], -x[..., :4]), -1) * sin, 8),
    "other order": (lambda x, cos, sin: x * cos + torch.cat((-x[..., :4], x[..., 4:]), -1) * sin, 8),
    "unequal parts": (lambda x, cos, sin: x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin, 8),
    "two values": (lambda x, cos, sin: x * cos + half(x.sin()) * sin, 8),
    "parts of two values": (lambda x, cos, sin: x * cos + torch.cat((-x[..., 4:], x.sin()[..., :4]), -1) * sin, 8),
    "difference": (lambda x, cos, sin: x * cos - half(x) * sin, 8),
    "scaled": (lambda x, cos, sin: torch.add(x * cos, half(x) * sin, alpha=2), 8),
    "along the rows": (lambda x, cos, sin: x * cos + torch.cat((-x[..., 1:, :], x[..., :1, :]), 2) * sin, 8),
    "halves put between": (
        lambda x, cos, sin: x * cos + torch.stack((-x[..., 4:], x[..., :4]), -1).flatten(-2) * sin, 8,
    ),
    "neighbours apart": (lambda x, cos, sin: x * cos + torch.cat((-x[..., 1::2], x[..., ::2]), -1) * sin, 8),
    "two sines": (
        lambda x, cos, sin: torch.cat((x[..., :4] * cos - x[..., 4:] * sin, x[..., 4:] * cos + x[..., :4] * cos), -1),
        4,
    ),
    "one number": (lambda x, cos, sin: x * cos[0, 0] + half(x) * 0.5, 8),
}  # fmt: skip


def rotations(program: Program) -> list[Op]:
    return [op for op in ops(program) if op.name == "rotary"]


def traced(rotation: Rotation, width: int) -> Program:
    cos, sin = tables(width)
    return check(Function(lambda m, x: (rotation(x.sin(), cos, sin) * x).cumsum(-1).square().sum()), X)


@pytest.mark.parametrize("name", FORMS)
def test_a_rotation_is_one_operation(name: str) -> None:
    rotation, width, expected = FORMS[name]
    program = traced(rotation, width)
    [op] = rotations(program)
    assert op.args[3:] == expected
    left = names(program)
    assert not {"neg", "cat", "split", "slice", "sub"}.intersection(left[left.index("rotary") :])


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_stays(name: str) -> None:
    assert not rotations(traced(*OTHERS[name]))


def test_a_part_of_another_value_is_not_joined() -> None:
    """The rotation itself is recognised; the elements next to it belong to another value, or to other places."""
    rotation = FORMS["halves"][0]
    rests: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x.sin()[..., 4:], lambda x: x[..., 3:7])
    for rest in rests:
        joined: Rotation = lambda x, cos, sin: torch.cat((rotation(x[..., :4], cos, sin), rest(x)), -1)  # noqa: B023, E731
        program = traced(joined, 4)
        [op] = rotations(program)
        assert op.args[3] is None
        assert "cat" in names(program)[names(program).index("rotary") :]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_functions_have_the_bits_of_what_they_replace(name: str, dtype: torch.dtype) -> None:
    rotation, width, (rotated, interleaved) = FORMS[name]
    torch.manual_seed(2)
    cos, sin = (table.to(dtype) for table in tables(width))
    if width == (rotated or 8):  # both elements of a pair may have their own angle
        cos, sin = cos + torch.rand_like(cos), sin + torch.rand_like(sin)
    x = torch.randn(2, 5, 3, 8, dtype=dtype).transpose(1, 2).requires_grad_()
    expected = rotation(x, cos, sin)
    grad = torch.randn_like(expected)
    [expected_grad] = torch.autograd.grad(expected, x, grad)
    how = (rotated, interleaved)
    with torch.no_grad():
        assert torch.equal(rotary(x, cos, sin, *how), expected)
        assert torch.equal(rotary_backward(grad, cos, sin, *how), expected_grad)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x2x2", pytest.param("dp=2,tp=4", marks=pytest.mark.matrix)])
def test_packages_equal_the_model(mesh: str, tmp_path: Path) -> None:
    """All forms in one model, with sequence parallelism, and tables that are trained."""
    package = partc.compile(MODEL, mesh=mesh, microbatches=2, precision="fp64")
    package.write(tmp_path / "build")
    result = package.verify(steps=2, virtual=True)
    assert result.ok, result.worst
    text = "".join(path.read_text() for path in sorted((tmp_path / "build" / "regions").glob("*.py")))
    forward = "".join(part.partition("_backward(")[0] for part in text.split("_forward("))
    assert not re.search(r"torch\.(cat|stack)| = -", forward)
    assert text.count("functional.rotary(") == text.count("functional.rotary_backward(") == 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "how"),
    [
        ("GPTNeoX", {**SIZES, "rotary_pct": 0.5}, "rotated=4"),
        ("GPTJ", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
         "rotated=4, interleaved=True"),
    ],
)  # fmt: skip
def test_families(kind: str, config: dict[str, Any], how: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        **config,
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": {"GPTNeoX": "gpt_neox"}.get(kind, "gptj"),
    }
    model = Model(name=kind, config=config, options=TOKENS)
    package = partc.compile(
        model.source(tmp_path), mesh="dp=2,tp=2", microbatches=2, precision="fp64", options=model.options
    )
    package.write(tmp_path / "build")
    text = "".join(path.read_text() for path in sorted((tmp_path / "build" / "regions").glob("*.py")))
    for function in ("rotary", "rotary_backward"):
        assert len(re.findall(rf"functional\.{function}\([^()]*, {how}\s*\)", text)) == 2
    result = package.verify(steps=2, virtual=True)
    assert result.ok, result.worst


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("backward", [False, True])
def test_kernels_compute_what_the_operation_does(name: str, backward: bool) -> None:
    """The operations that Triton kernels are made of, run one by one."""
    _, width, how = FORMS[name]
    cos, sin = tables(width)
    given = {"x": torch.randn(2, 3, 5, 8, dtype=torch.float64), "cos": cos, "sin": sin}
    values = tuple(Value(name=each, type=type_of(tensor)) for each, tensor in given.items())
    made = Value(name="y", type=values[0].type)
    op = Op(name="rotary_backward" if backward else "rotary", args=(*map(Ref, given), *how), results=(made,))
    graph = Graph(inputs=values, ops=(op,), outputs=("y",))
    region = Region(name="region", params=(), forward=graph)
    spelled = spelled_rotary(region, {})[0].forward
    assert not {op.name for op in spelled.ops} & {"rotary", "rotary_backward"}
    found, expected = (evaluate(each, given)["y"] for each in (spelled, graph))
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)


@pytest.mark.slow
def test_packages_with_kernels_equal_the_model(tmp_path: Path) -> None:
    package = partc.compile(MODEL, mesh="dp=2", kernels="triton", precision="fp64", options={"batch": 2})
    text = "".join(str(body) for path, body in package.files() if path.startswith("regions/"))
    assert "functional.rotary" not in text
    assert "kernels.rotary(" in text and "kernels.rotary_backward" in text
    assert "slice_backward" not in text
    result = package.verify(steps=1)
    assert result.ok, result.worst
