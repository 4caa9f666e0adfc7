"""Kernels of rows in Triton's interpreter: norms, softmaxes, their derivatives and sums, against PyTorch in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from partc.codegen.kernels import rows
from partc.ir.interpreter import results_of
from partc.ir.operators import DTYPES
from partc.ir.program import DType, DTypeArg, Graph, Op
from partc.passes.fuse import fuse
from partc.runtime.ops import functional
from tests.kernels.test_kernels import TOLERANCE, program_of, random
from tests.programs import op, value
from tests.triton_runs import Kernels

NORMS = {
    "rms_norm": functional.rms_norm,
    "rms_norm_backward": functional.rms_norm_backward,
    "layer_norm": functional.layer_norm,
    "layer_norm_backward": functional.layer_norm_backward,
    "linear_grad_bias": functional.linear_grad_bias,
}


def plainly(graph: Graph, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every value of a graph, by the functions that packages without kernels call."""
    known = dict(values)
    for one in graph.ops:
        if one.name in NORMS:
            args = [known[arg.name] if hasattr(arg, "name") else arg for arg in one.args]
            made = NORMS[one.name](*args)
            made = made if isinstance(made, tuple) else (made,)
            known.update(zip((item.name for item in one.results), made, strict=True))
        else:
            known.update(results_of(one, known))
    return known


def check(folder: Path, graph: Graph, *, dtype: DType, strided: bool = False, kernels: int = 1) -> None:
    """The results of one kernel (or so many) against fp64; sums down many rows lose one more digit."""
    program = fuse(program_of(graph), kernels="triton")
    after = program.regions[0].forward
    assert sum(bool(item.body) for item in after.ops) == len(after.ops) == kernels
    values = {item.name: random(item.type, seed) for seed, item in enumerate(graph.inputs)}
    if strided:
        values = {name: torch.stack([x, x], -1)[..., 0] for name, x in values.items()}
    made = Kernels(folder / "kernels").run(after, values, {}, {})
    wanted = plainly(graph, {name: x.double() if x.is_floating_point() else x for name, x in values.items()})
    types = {name: item.type for name, item in after.definitions().items()}
    for name in graph.outputs:
        found, right = made[name].double(), wanted[name]
        assert made[name].dtype == DTYPES[types[name].dtype] and found.shape == right.shape, name
        close = 4 * TOLERANCE[dtype]
        torch.testing.assert_close(found, right, rtol=close, atol=close * max(1.0, float(right.abs().max())))


def normed(name: str, shape: tuple[int, ...], along: int, dtype: DType, *, weight: bool = True) -> Graph:
    """A norm of x + y and its derivative, which a model has apart, in one graph each."""
    last, row = shape[len(shape) - along :], (*shape[: len(shape) - along], *(1 for _ in range(along)))
    full = {item: value(item, *shape, dtype=dtype) for item in ("x", "y", "sum", "out", "grad", "back", "grad_x")}
    of_row = {item: value(item, *row, dtype=dtype) for item in ("mean", "rstd")}
    of_column = {item: value(item, *last, dtype=dtype) for item in ("w", "b", "grad_w", "grad_b")}
    w, b = ("w", "b") if weight else (None, None)
    ops = [op("add", "x", "y", makes=full["sum"])]
    if name == "rms_norm":
        forward = (full["out"], of_row["rstd"])
        ops.append(many(op(name, "sum", last, w, 1e-5, makes=full["out"]), *forward))
    elif name == "layer_norm":
        forward = (full["out"], of_row["mean"], of_row["rstd"])
        ops.append(many(op(name, "sum", last, w, b, 1e-5, makes=full["out"]), *forward))
    elif name == "rms_norm_backward":
        made = (full["grad_x"], of_column["grad_w"])
        ops = [many(op(name, "grad", "x", last, w, "rstd", makes=full["grad_x"]), *made)]
        ops.append(op("add", "grad_x", "y", makes=full["back"]))
    else:
        made = (full["grad_x"], of_column["grad_w"], of_column["grad_b"])
        ops = [many(op(name, "grad", "x", last, w, "mean", "rstd", makes=full["grad_x"]), *made)]
        ops.append(op("add", "grad_x", "y", makes=full["back"]))
    made_names = {item.name for one in ops for item in one.results}
    every = {**full, **of_row, **of_column}
    read = dict.fromkeys(name for one in ops for name in one.refs() if name not in made_names)
    outputs = [item.name for item in ops[-1].results]
    outputs += [item.name for item in ops[0].results if item.name != "grad_x" and (weight or item.name == "sum")]
    return Graph(inputs=tuple(every[name] for name in read), ops=tuple(ops), outputs=tuple(dict.fromkeys(outputs)))


def many(one: Op, *results: object) -> Op:
    return Op(name=one.name, args=one.args, attrs=one.attrs, results=results)  # type: ignore[arg-type]


def softmaxed(name: str, shape: tuple[int, ...], dtype: DType) -> tuple[Graph, Graph]:
    """A softmax, or its logarithm, of a scaled x, and its derivative."""
    names = ("x", "y", "scaled", "weights", "g", "back", "out")
    item = {each: value(each, *shape, dtype=dtype) for each in names}
    forward = (op("mul", "x", 0.5, makes=item["scaled"]), op(name, "scaled", -1, makes=item["weights"]))
    backward = (
        op(f"_{name}_backward_data", "g", "y", -1, None, makes=item["back"]),
        op("mul", "back", 0.5, makes=item["out"]),
    )
    return (
        Graph(inputs=(item["x"],), ops=forward, outputs=("weights",)),
        Graph(inputs=(item["g"], item["y"]), ops=backward, outputs=("out",)),
    )


SHAPES = [((3, 5, 37), 1), ((2, 1, 64), 1), ((7, 4, 6), 2), ((130, 8), 1), ((1, 5), 1)]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward"])
@pytest.mark.parametrize(("shape", "along"), SHAPES)
def test_norms_on_odd_shapes(tmp_path: Path, name: str, shape: tuple[int, ...], along: int) -> None:
    check(tmp_path, normed(name, shape, along, "f32"), dtype="f32", strided=along == 2)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(("width", "dtype"), [(9000, "f32"), (16384, "f32"), (16384, "bf16")])
def test_norms_of_wide_rows(tmp_path: Path, name: str, width: int, dtype: DType) -> None:
    """Their derivatives are two kernels: along rows, and down columns. The first takes on what follows."""
    check(tmp_path / "f", normed(name, (3, width), 1, dtype), dtype=dtype)
    check(tmp_path / "b", normed(f"{name}_backward", (3, width), 1, dtype), dtype=dtype, kernels=2)
    check(tmp_path / "w", normed(f"{name}_backward", (3, width), 1, dtype, weight=False), dtype=dtype)


@pytest.mark.parametrize("name", ["rms_norm_backward", "layer_norm_backward"])
@pytest.mark.parametrize("wanted", ["back", "grad_w"])
def test_a_half_of_a_wide_derivative_that_nobody_reads_is_not_made(tmp_path: Path, name: str, wanted: str) -> None:
    graph = replace(normed(name, (3, 9000), 1, "f32"), outputs=(wanted,))
    check(tmp_path, replace(graph, ops=graph.ops[: 2 if wanted == "back" else 1]), dtype="f32")


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward"])
def test_norms_of_rows_that_no_program_holds_are_left_to_pytorch(name: str) -> None:
    ops = fuse(program_of(normed(name, (2, 16385), 1, "f32")), kernels="triton").regions[0].forward.ops
    assert name in [one.name for one in ops]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward"])
@pytest.mark.parametrize("dtype", ["f64", "bf16", "f16"])
def test_norms_in_every_type(tmp_path: Path, name: str, dtype: DType) -> None:
    """Statistics are kept in fp32 where rows have 16 bits."""
    check(tmp_path, normed(name, (4, 3, 24), 1, dtype), dtype=dtype)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward"])
def test_norms_without_weights(tmp_path: Path, name: str) -> None:
    check(tmp_path, normed(name, (4, 24), 1, "f64", weight=False), dtype="f64")


@pytest.mark.parametrize("shape", [(3, 5, 37), (70, 16)])
def test_sums_over_many_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Fewer programs than tiles: each sums several, and values that belong to no row are read once."""
    monkeypatch.setattr(rows, "TILE", 64)
    monkeypatch.setattr(rows, "PROGRAMS", 3)
    for number, name in enumerate(("rms_norm_backward", "layer_norm_backward")):
        check(tmp_path / str(number), normed(name, shape, 1, "f64"), dtype="f64")


@pytest.mark.parametrize("columns", [1000, 33_554_432, 1 << 29])
@pytest.mark.parametrize("summing", [True, False])
def test_grids_are_those_of_cuda(columns: int, summing: bool) -> None:
    """At most 65,535 programs along the second dimension, as a sum over the batch of a [s, h] gradient may want."""
    found = rows.tiling(4, columns, whole=False, summing=summing)
    assert found.across <= 65_535 and found.wide * found.across >= columns and found.high >= 1


@pytest.mark.parametrize(("programs", "keep"), [(264, True), (2, False)])
def test_a_bias_is_summed_where_its_gradient_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: int, keep: bool
) -> None:
    """No row is held whole: columns are dealt to programs. Rows that aren't there would count, were they not masked."""
    monkeypatch.setattr(rows, "PROGRAMS", programs)
    monkeypatch.setattr(rows, "TILE", 256)
    shape = (3, 17, 200)
    ops = (
        op("sigmoid_backward", "g", "x", makes=value("part", *shape)),
        op("sub", "part", 0.5, makes=value("back", *shape)),
        op("sum", "back", (0, 1), True, makes=value("bias", 1, 1, 200))
        if keep
        else op("linear_grad_bias", "back", makes=value("bias", 200)),
    )
    graph = Graph(inputs=(value("g", *shape), value("x", *shape)), ops=ops, outputs=("back", "bias"))
    check(tmp_path, graph, dtype="f32")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 4, 19), "f64"), ((3, 4, 19), "f32"), ((3, 4, 19), "bf16"),
        ((1, 2, 9000), "f32"), ((1, 2, 16384), "f32"), ((1, 2, 16384), "bf16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_and_its_derivative(tmp_path: Path, name: str, shape: tuple[int, ...], dtype: DType) -> None:
    forward, backward = softmaxed(name, shape, dtype)
    check(tmp_path / "f", forward, dtype=dtype)
    program = fuse(program_of(backward), kernels="triton").regions[0].forward
    assert len(program.ops) == 1
    values = {item.name: random(item.type, seed) for seed, item in enumerate(backward.inputs)}
    values["y"] = getattr(values["y"], name)(-1)
    made = Kernels(tmp_path / "b").run(program, values, {}, {})["out"]
    y, g = values["y"].double(), values["g"].double()
    right = y * (g - (g * y).sum(-1, keepdim=True)) if name == "softmax" else g - y.exp() * g.sum(-1, keepdim=True)
    torch.testing.assert_close(made.double(), 0.5 * right, rtol=4 * TOLERANCE[dtype], atol=TOLERANCE[dtype])


STATISTICS: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
    "mean": (((1, 2), True), {}),
    "var": (((-1,),), {"correction": 0, "keepdim": True}),
    "std": (((1, 2),), {"correction": 1, "keepdim": True}),
    "linalg_vector_norm": ((2.0, (-1,), True), {}),
    "logsumexp": (((-1,), True), {}),
    "amin": (((2,), True), {}),
    "amax": (((1, 2), True), {}),
    "log_softmax": ((-1,), {}),
}


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_of_rows(tmp_path: Path, name: str, dtype: DType) -> None:
    """Tolerances of a kernel's results, by the operations that it fuses."""
    args, attrs = STATISTICS[name]
    shape = (3, 4, 19)
    one = (3, 1, 1) if (1, 2) in args else shape if name == "log_softmax" else (3, 4, 1)
    item = {"s": value("s", *one, dtype=dtype)} | {x: value(x, *shape, dtype=dtype) for x in ("x", "y", "twice", "out")}
    ops = (
        op("add", "x", "y", makes=item["twice"]),
        op(name, "twice", *args, makes=item["s"], **attrs),
        op("sub", "twice", "s", makes=item["out"]),
    )
    check(tmp_path, Graph(inputs=(item["x"], item["y"]), ops=ops, outputs=("out", "s")), dtype=dtype)


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
def test_the_derivative_of_logarithms_of_softmaxes(tmp_path: Path, dtype: DType) -> None:
    item = {name: value(name, 3, 19, dtype=dtype) for name in ("g", "y", "half", "out")}
    wide = DTypeArg("f64")
    ops = (
        op("mul", "y", 0.5, makes=item["half"]),
        op("_log_softmax_backward_data", "g", "half", 1, wide, makes=item["out"]),
    )
    check(tmp_path, Graph(inputs=(item["g"], item["y"]), ops=ops, outputs=("out",)), dtype=dtype)


def test_statistics_of_rows_of_infinities(tmp_path: Path) -> None:
    x = torch.tensor([[-torch.inf] * 5, [torch.inf, 1, 2, 3, -torch.inf], [1, 2, 3, -torch.inf, 0.5], [0.0] * 5])
    ops = (
        op("alias", "x", makes=value("a", 4, 5)),
        op("logsumexp", "a", (-1,), True, makes=value("lse", 4, 1)),
        op("log_softmax", "a", -1, makes=value("logs", 4, 5)),
        op("amin", "a", (1,), True, makes=value("least", 4, 1)),
        op("linalg_vector_norm", "a", 2, (1,), True, makes=value("norm", 4, 1)),
    )
    graph = Graph(inputs=(value("x", 4, 5),), ops=ops, outputs=("lse", "logs", "least", "norm"))
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    made = Kernels(tmp_path / "k").run(after, {"x": x}, {}, {})
    for name, right in plainly(graph, {"x": x}).items():
        if name in graph.outputs:
            torch.testing.assert_close(made[name], right, equal_nan=True)


def test_rows_that_attend_to_nothing_are_what_pytorch_says(tmp_path: Path) -> None:
    x = torch.full((2, 5), -torch.inf)
    x[0, 2] = 1.0
    ops = (op("alias", "x", makes=value("a", 2, 5)), op("softmax", "a", -1, makes=value("y", 2, 5)))
    graph = Graph(inputs=(value("x", 2, 5),), ops=ops, outputs=("y",))
    made = Kernels(tmp_path / "k").run(fuse(program_of(graph), kernels="triton").regions[0].forward, {"x": x}, {}, {})
    torch.testing.assert_close(made["y"], x.softmax(-1), equal_nan=True)


@pytest.mark.parametrize("keep", [False, True])
def test_log_sum_exps_of_infinities_are_infinite(tmp_path: Path, keep: bool) -> None:
    x = torch.randn(4, 6)
    x[0, 2], x[1], x[2, 1] = torch.inf, -torch.inf, torch.nan
    made = value("y", 4, 1) if keep else value("y", 4)
    ops = (op("neg", "x", makes=value("a", 4, 6)), op("logsumexp", "a", (1,), keep, makes=made))
    after = fuse(program_of(Graph(inputs=(value("x", 4, 6),), ops=ops, outputs=("y",))), kernels="triton")
    graph = after.regions[0].forward
    assert any(one.body for one in graph.ops) and "logsumexp" not in {one.name for one in graph.ops}
    found = Kernels(tmp_path / "k").run(graph, {"x": -x}, {}, {})["y"]
    torch.testing.assert_close(found, x.logsumexp(1, keepdim=keep), equal_nan=True)


@pytest.mark.parametrize("columns", [5, 8])
def test_the_largest_of_a_row_with_what_is_no_number_is_none(tmp_path: Path, columns: int) -> None:
    x = torch.randn(3, columns)
    x[0, 2], x[1, 3] = torch.nan, torch.inf
    ops = (op("neg", "x", makes=value("a", 3, columns)), op("amax", "a", (1,), True, makes=value("y", 3, 1)))
    graph = Graph(inputs=(value("x", 3, columns),), ops=ops, outputs=("y",))
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    assert any(one.body for one in after.ops)
    made = Kernels(tmp_path / "k").run(after, {"x": x}, {}, {})
    torch.testing.assert_close(made["y"], (-x).amax(1, keepdim=True), equal_nan=True)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_sums_along_wide_rows_hold_what_registers_do(tmp_path: Path, dtype: DType) -> None:
    """Three rows that are read after the second sum are too many: two kernels."""
    x, y, z, a, b, c, d, e = (value(name, 3, 10000, dtype=dtype) for name in "xyzabcde")
    most, total = (value(name, 3, 1, dtype=dtype) for name in ("most", "total"))
    ops = (
        op("add", "x", "y", makes=z),
        op("mul", "z", 0.5, makes=a),
        op("amax", "a", (1,), True, makes=most),
        op("sub", "a", "most", makes=b),
        op("exp", "b", makes=c),
        op("sum", "c", (1,), True, makes=total),
        op("div", "c", "total", makes=d),
        op("mul", "d", "y", makes=e),
    )
    check(tmp_path / "few", Graph(inputs=(x, y), ops=ops, outputs=("d",)), dtype=dtype)
    check(tmp_path / "many", Graph(inputs=(x, y), ops=ops, outputs=("a", "e")), dtype=dtype, kernels=2)


def summed(number: int, x: str, shape: tuple[int, ...], how: str) -> Iterator[Op]:
    """Sums of rows, as they are spelled forward, and as they come in derivatives."""
    kept = value(f"t{number}", *shape[:-1], 1, dtype="f64")
    short = value(f"s{number}", *shape[:-1], dtype="f64")
    if how == "dropped":
        yield op("sum", x, (len(shape) - 1,), False, makes=short)
        yield op("reshape", short.name, (*shape[:-1], 1), makes=kept)
    else:
        yield op("sum", x, (len(shape) - 1,), True, makes=kept)
    if how == "expanded":
        back = value(f"b{number}", *shape[:-1], 1, dtype="f64")
        yield op("reshape", kept.name, shape[:-1], makes=short)
        yield op("reshape", short.name, (*shape[:-1], 1), makes=back)
        yield op("expand", back.name, shape, makes=value(f"e{number}", *shape, dtype="f64"))


@st.composite
def chains(draw: st.DrawFn) -> tuple[Graph, int]:
    """Elementwise operations before, between and after norms, softmaxes and sums, on one shape."""
    shape = draw(st.sampled_from([(3, 7), (2, 3, 16), (5, 33), (2, 40, 4)]))
    known = ["x", "y"]
    ops: list[Op] = []
    for number in range(draw(st.integers(2, 8))):
        made = value(f"v{number}", *shape, dtype="f64")
        a, b = (draw(st.sampled_from(known)) for _ in range(2))
        name = draw(
            st.sampled_from(
                ["add", "mul", "sub", "tanh", "softmax", "log_softmax", "rms_norm", "layer_norm", "sum", "amax"]
            )
        )
        rstd = value(f"r{number}", *shape[:-1], 1, dtype="f64")
        if name in ("add", "mul", "sub"):
            ops.append(op(name, a, b, makes=made))
        elif name == "tanh":
            ops.append(op(name, a, makes=made))
        elif name == "amax":
            most = value(f"t{number}", *shape[:-1], 1, dtype="f64")
            ops.append(op(name, a, (len(shape) - 1,), True, makes=most))
            ops.append(op("sub", most.name, b, makes=made))
        elif name in ("softmax", "log_softmax"):
            ops.append(op(name, a, -1, makes=made))
        elif name == "rms_norm":
            ops.append(many(op(name, a, shape[-1:], "w", 1e-5, makes=made), made, rstd))
        elif name == "layer_norm":
            mean = value(f"m{number}", *shape[:-1], 1, dtype="f64")
            ops.append(many(op(name, a, shape[-1:], "w", None, 1e-5, makes=made), made, mean, rstd))
        else:
            ops += summed(number, a, shape, draw(st.sampled_from(["kept", "dropped", "expanded"])))
            ops.append(op("mul", ops[-1].result.name, b, makes=made))
        known.append(made.name)
    outputs = draw(st.lists(st.sampled_from(known[2:]), min_size=1, max_size=3, unique=True))
    inputs = (*(value(name, *shape, dtype="f64") for name in ("x", "y")), value("w", shape[-1], dtype="f64"))
    needed: list[Op] = []
    live = set(outputs)
    for one in reversed(ops):
        if live.intersection(item.name for item in one.results):
            needed.append(one)
            live.update(one.refs())
    return Graph(inputs=inputs, ops=tuple(reversed(needed)), outputs=tuple(outputs)), draw(st.sampled_from([32, 4096]))


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(drawn=chains())
def test_random_chains_equal_pytorch(tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Graph, int]) -> None:
    graph, tile = drawn
    values = {item.name: random(item.type, seed) for seed, item in enumerate(graph.inputs)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "TILE", tile)
        after = fuse(program_of(graph), kernels="triton").regions[0].forward
        folder = tmp_path_factory.mktemp("chain")
        known = dict(values)
        loaded = Kernels(folder)
        types = {name: item.type for name, item in after.definitions().items()}
        for one in after.ops:
            known.update(loaded.one(one, types, known, {}) if one.body else plainly(_only(one), known))
    right = plainly(graph, values)
    for name in graph.outputs:
        torch.testing.assert_close(known[name], right[name], rtol=1e-12, atol=1e-12)


def _only(one: Op) -> Graph:
    return Graph(inputs=(), ops=(one,), outputs=())
