"""Emitted kernels in Triton's interpreter, against PyTorch operation by operation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import partc
from partc.codegen.kernels.fused import kernel
from partc.codegen.kernels.pointwise import Pointwise
from partc.codegen.kernels.rows import Rows
from partc.codegen.package import kernel_module
from partc.ir.interpreter import evaluate
from partc.ir.mesh import Mesh
from partc.ir.operators import DTYPES
from partc.ir.program import Call, DType, DTypeArg, Graph, Op, Program, Ref, Region, TensorType, Value
from partc.kernels.interpreted import patch_rounding
from partc.passes.fuse import fuse
from tests.cost.test_memory import GPT
from tests.programs import fused_graph, op, value
from tests.triton_runs import Kernels, interpreted

# What is left of fp32 intermediates in a 16-bit result, and of sums in another order.
TOLERANCE: dict[str, float] = {"f64": 1e-13, "f32": 2e-6, "bf16": 1e-2, "f16": 2e-3}


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    return Kernels(tmp_path / "kernels")


def program_of(graph: Graph, *, dense: bool = False) -> Program:
    """One region, whose inputs may be strided in memory: they are the batch's."""
    names = tuple(item.name for item in graph.inputs)
    call = Call(name="main", region="main", params=(), args=names, results=tuple(f"{x}_out" for x in graph.outputs))
    return Program(
        name="one",
        mesh=Mesh.parse("1"),
        inputs=() if dense else names,
        regions=(Region(name="main", params=(), forward=graph),),
        calls=(call,),
    )


def random(type: TensorType, seed: int = 0) -> Tensor:
    """Numbers around 0, half of them negative; for bools and integers, small ones."""
    generator = torch.Generator().manual_seed(seed)
    if type.dtype == "bool":
        return torch.rand(type.shape, generator=generator) < 0.5
    if type.dtype.startswith(("i", "u")):
        return torch.randint(0, 5, type.shape, generator=generator).to(DTYPES[type.dtype])
    return torch.randn(type.shape, generator=generator, dtype=torch.float64).to(DTYPES[type.dtype])


def check(kernels: Kernels, graph: Graph, values: dict[str, Tensor], *, fused: bool = True) -> None:
    """The fused graph in its kernels against the same operations in fp64 on the same inputs."""
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    assert any(op.body for op in after.ops) or not fused
    made = kernels.run(after, values, {}, {})
    wide = {name: x.double() if x.is_floating_point() else x for name, x in values.items()}
    wanted = evaluate(widened(graph), wide)
    types = {name: item.type for name, item in graph.definitions().items()}
    for name in graph.outputs:
        found, right = made[name], wanted[name]
        assert found.shape == right.shape and found.dtype == DTYPES[types[name].dtype], name
        if right.is_floating_point():
            torch.testing.assert_close(
                found.double(), right, rtol=TOLERANCE[types[name].dtype], atol=TOLERANCE[types[name].dtype]
            )
        else:
            assert torch.equal(found, right), name


def widened(graph: Graph) -> Graph:
    """The same with fp64 in place of every floating type that an operation is asked to make."""

    def wide(one: Op) -> Op:
        def arg(item: object) -> object:
            return DTypeArg("f64") if isinstance(item, DTypeArg) and item.name in ("f32", "bf16", "f16") else item

        attrs = tuple((key, arg(item)) for key, item in one.attrs)
        return Op(name=one.name, args=tuple(map(arg, one.args)), attrs=attrs, results=one.results)  # type: ignore[arg-type]

    return Graph(inputs=graph.inputs, ops=tuple(map(wide, graph.ops)), outputs=graph.outputs)


# -- every elementwise operation, in every type --------------------------------------------------

UNARY = {
    "neg": (), "square": (), "abs": (), "exp": (), "exp2": (), "sin": (), "cos": (), "erf": (),
    "tanh": (), "sigmoid": (), "silu": (), "gelu": (), "relu": (), "clamp": (-0.5, 0.25), "pow": (3,),
}  # fmt: skip
POSITIVE = {"reciprocal": (), "log": (), "log2": (), "sqrt": (), "rsqrt": (), "pow": (-0.5,)}
BINARY = ["add", "sub", "rsub", "mul", "maximum", "minimum", "silu_backward", "gelu_backward", "tanh_backward",
          "sigmoid_backward"]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
def test_every_elementwise_operation(kernels: Kernels, dtype: DType) -> None:
    """All of them in one kernel, on an odd number of elements, large and tiny ones among them."""
    shape = (3, 1, 37)

    def item(name: str) -> Value:
        return value(name, *shape, dtype=dtype)

    ops = [op("abs", "x", makes=item("size")), op("add", "size", 0.125, makes=item("positive"))]
    for name, args in UNARY.items():
        ops.append(op(name, "x", *args, makes=item(f"un_{name}")))
    for name, args in POSITIVE.items():
        ops.append(op(name, "positive", *args, makes=item(f"pos_{name}")))
    for name in BINARY:
        ops.append(op(name, "x", "y", makes=item(f"bin_{name}")))
    ops.append(op("div", "x", "positive", makes=item("quotient")))
    ops.append(op("add", "x", "y", makes=item("scaled"), alpha=3))
    ops.append(op("gelu", "x", makes=item("bent"), approximate="tanh"))
    ops.append(op("gelu_backward", "y", "x", makes=item("bent_back"), approximate="tanh"))
    ops.append(op("threshold_backward", "y", "x", 0, makes=item("passed")))
    graph = Graph(inputs=(item("x"), item("y")), ops=tuple(ops), outputs=tuple(one.result.name for one in ops))
    x, y = random(item("x").type, 1), random(item("y").type, 2)
    x.view(-1)[:6] = torch.tensor([0.0, 1e-3, -1e-3, 8.0, -8.0, 1e-6]).to(x.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partc.passes.fuse.groups.MOST_TENSORS", 100)
        check(kernels, graph, {"x": x, "y": y})


def test_comparisons_and_bools(kernels: Kernels) -> None:
    text = """
  forward:
    input x: f32[5, 7]
    input y: f32[7]
    input n: i64[5, 7]
    input b: bool[5, 1]
    less = lt(x, y)  # bool[5, 7]
    same = eq(n, 2)  # bool[5, 7]
    half = gt(n, 1.5)  # bool[5, 7]
    both = logical_and(less, b)  # bool[5, 7]
    any = bitwise_or(both, same)  # bool[5, 7]
    none = logical_not(any)  # bool[5, 7]
    chosen = where(none, x, y)  # f32[5, 7]
    masked = masked_fill(chosen, half, -inf)  # f32[5, 7]
    count = to(none, <i64>)  # i64[5, 7]
    more = add(n, count)  # i64[5, 7]
    wide = to(more, <f64>)  # f64[5, 7]
    third = mul(wide, 0.1)  # f64[5, 7]
    less_third = where(less, third, 0.3)  # f64[5, 7]
    kept = dropout_backward(x, less, 0.25)  # f32[5, 7]
    positive = relu(y)  # f32[7]
    there = to(positive, <bool>)  # bool[7]
    counted = to(there, <f32>)  # f32[7]
    odd = to(n, <bool>)  # bool[5, 7]
    loss = linear(masked, more)  # f32[5, 5]
    return loss
  saved masked, more, third, kept, any, less_third, counted, odd
"""
    region = fused_graph(text).regions[0]
    graph = Graph(inputs=region.forward.inputs, ops=region.forward.ops[:-1], outputs=region.saved)
    values = {item.name: random(item.type, seed) for seed, item in enumerate(graph.inputs)}
    values["x"][0, 0] = torch.nan
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    made = kernels.run(after, values, {}, {})
    for name, right in evaluate(graph, values).items():
        torch.testing.assert_close(
            made[name], right, rtol=1e-15 if right.dtype == torch.float64 else 1e-6, atol=0, equal_nan=True
        )


def test_not_a_number_passes_through(kernels: Kernels) -> None:
    x = value("x", 9)
    names = ["relu", "maximum", "minimum", "clamp"]
    args: dict[str, tuple[object, ...]] = {"maximum": ("x", "y"), "minimum": ("y", "x"), "clamp": ("x", -1.0, 1.0)}
    ops = tuple(op(name, *args.get(name, ("x",)), makes=value(f"o_{name}", 9)) for name in names)
    graph = Graph(inputs=(x, value("y", 9)), ops=ops, outputs=tuple(one.result.name for one in ops))
    values = {"x": torch.tensor([torch.nan, *[1.0] * 7, torch.inf]), "y": torch.zeros(9)}
    made = kernels.run(fuse(program_of(graph), kernels="triton").regions[0].forward, values, {}, {})
    for name, right in evaluate(graph, values).items():
        torch.testing.assert_close(made[name], right, rtol=0, atol=0, equal_nan=True)


# -- views and memory ----------------------------------------------------------------------------

ROTATED = """
  forward:
    input x: f32[2, 5, 24]
    input cos: f32[5, 8]
    input sin: f32[5, 8]
    heads = reshape(x, (2, 5, 3, 8))  # f32[2, 5, 3, 8]
    q = permute(heads, (0, 2, 1, 3))  # f32[2, 3, 5, 8]
    low, high = split(q, (4, 4), 3)  # f32[2, 3, 5, 4] ; f32[2, 3, 5, 4]
    turned = neg(high)  # f32[2, 3, 5, 4]
    other = cat((turned, low), 3)  # f32[2, 3, 5, 8]
    a = mul(q, cos)  # f32[2, 3, 5, 8]
    b = mul(other, sin)  # f32[2, 3, 5, 8]
    loss = add(a, b)  # f32[2, 3, 5, 8]
    return loss
"""
PADDED = """
  forward:
    input g: f32[3, 4]
    input h: f32[3, 6]
    a = slice_backward(g, (3, 10), 1, 2, 6, 1)  # f32[3, 10]
    b = slice_backward(h, (3, 10), 1, -6, 10, 1)  # f32[3, 10]
    c = add(a, b)  # f32[3, 10]
    d = expand(c, (2, 3, 10))  # f32[2, 3, 10]
    e = slice(d, 2, 1, 10, 3)  # f32[2, 3, 3]
    f = exp(e)  # f32[2, 3, 3]
    loss = mul(f, 2.0)  # f32[2, 3, 3]
    return loss
"""
MERGED = """
  forward:
    input x: f32[2, 3, 5, 4]
    input y: f32[5, 4]
    s = add(x, y)  # f32[2, 3, 5, 4]
    t = permute(s, (0, 2, 1, 3))  # f32[2, 5, 3, 4]
    loss = reshape(t, (10, 12))  # f32[10, 12]
    return loss
"""


COMBINED = """
  forward:
    input x: f32[42, 37]
    input places: i64[42]
    input order: i64[42]
    input w: f32[42, 1]
    input residual: f32[14, 37]
    rows = permute_rows(x, places, order)  # f32[42, 37]
    weighted = mul(rows, w)  # f32[42, 37]
    each = reshape(weighted, (14, 3, 37))  # f32[14, 3, 37]
    summed = sum(each, (1,))  # f32[14, 37]
    loss = add(summed, residual)  # f32[14, 37]
    return loss
"""


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_the_results_of_a_tokens_experts_are_gathered_and_added_in_one_kernel(kernels: Kernels, dtype: DType) -> None:
    graph = fused_graph(COMBINED.replace("f32", dtype)).regions[0].forward
    values = {item.name: random(item.type, seed) for seed, item in enumerate(graph.inputs)}
    values["places"] = torch.randperm(42)
    values["order"] = values["places"].argsort()
    check(kernels, graph, values)
    (fused,) = fuse(program_of(graph), kernels="triton").regions[0].forward.ops
    assert "order" not in fused.refs()
    built = kernel(fused, {name: item.type for name, item in graph.definitions().items()}, {})
    assert isinstance(built, Pointwise) and built.below == 42  # tuning numbers rows that exist


ROW_SUM = "    rows = sum(c, (2,), True)  # f32[3, 4, 1]\n"
BESIDE = """
  forward:
    input x: f32[3, 4, 5]
    input y: f32[5]
    a = sin(x)  # f32[3, 4, 5]
    b = mul(a, y)  # f32[3, 4, 5]
    c = exp(b)  # f32[3, 4, 5]
{sum}    d = mul(c, x)  # f32[3, 4, 5]
    loss = cat((c, d), {dim})  # f32[{shape}]
    return loss, rows
"""


@pytest.mark.parametrize(("dim", "shape"), [(0, "6, 4, 5"), (1, "3, 8, 5"), (2, "3, 4, 10")])
@pytest.mark.parametrize("along", [True, False])
@pytest.mark.parametrize("dtype", ["f64", "bf16"])
def test_results_are_written_side_by_side(kernels: Kernels, dim: int, shape: str, along: bool, dtype: DType) -> None:
    text = BESIDE.format(dim=dim, shape=shape, sum=ROW_SUM if along else "")
    text = text.replace("mul(c, x)", "mul(c, rows)") if along else text.replace(", rows", "")
    graph = fused_graph(text.replace("f32", dtype)).regions[0].forward
    check(kernels, graph, {item.name: random(item.type, seed) for seed, item in enumerate(graph.inputs)}, fused=False)
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    # A kernel of rows writes them beside each other along the last dimensions, but not one row behind another.
    assert [each.name for each in after.ops] == (["fused"] if dim == 2 or not along else ["fused", "cat"])


@pytest.mark.parametrize("last", [0, 1])
def test_joined_results_that_end_beyond_32_bits_count_in_64(last: int) -> None:
    count = NEAR // 2 + last * 4096 - 4096
    x, y, z, joined = (value(name, 1, count) for name in ("x", "y", "z", "joined"))
    joined = value("joined", 2, count)
    cat = Op(name="cat", args=((Ref("y"), Ref("z")), 0), results=(joined,))
    graph = Graph(inputs=(x,), ops=(op("neg", "x", makes=y), op("exp", "x", makes=z), cat), outputs=("joined",))
    after = fuse(program_of(graph, dense=True), kernels="triton").regions[0].forward
    (fused,) = after.ops
    built = kernel(fused, {key: found.type for key, found in after.definitions().items()}, {})
    assert isinstance(built, Pointwise) and built.long is bool(last)


def test_a_row_that_all_elements_read_is_one_number(kernels: Kernels) -> None:
    graph = (
        fused_graph("""
  forward:
    input x: f32[7]
    input places: i64[7]
    input y: f32[37]
    rows = permute_rows(x, places, places)  # f32[7]
    one = slice(rows, 0, 3, 4, 1)  # f32[1]
    loss = add(one, y)  # f32[37]
    return loss
""")
        .regions[0]
        .forward
    )
    values = {item.name: random(item.type, seed) for seed, item in enumerate(graph.inputs)}
    check(kernels, graph, values | {"places": torch.randperm(7)})


def test_only_short_sums_are_added_element_by_element() -> None:
    for size, alone in ((8, False), (9, True)):
        x, y, z, w = value("x", 4, size, 5), value("y", 4, size, 5), value("z", 4, 5), value("w", 4, 5)
        total = Op(name="sum", args=(Ref("y"), (1,)), results=(z,))
        graph = Graph(inputs=(x,), ops=(op("exp", "x", makes=y), total, op("neg", "z", makes=w)), outputs=("w",))
        after = fuse(program_of(graph), kernels="triton").regions[0].forward
        assert ("sum" in [each.name for each in after.ops]) is alone


@pytest.mark.parametrize("text", [ROTATED, PADDED, MERGED])
@pytest.mark.parametrize("memory", ["dense", "transposed", "strided", "broadcast"])
def test_views_and_any_memory(kernels: Kernels, text: str, memory: str) -> None:
    graph = fused_graph(text).regions[0].forward
    values = {item.name: random(item.type, seed) for seed, item in enumerate(graph.inputs)}
    lay = {
        "dense": lambda x: x,
        "transposed": lambda x: x.mT.contiguous().mT,
        "strided": lambda x: torch.stack([x, x], -1)[..., 0],
        "broadcast": lambda x: x[:1].expand(x.shape),
    }[memory]
    check(kernels, graph, {name: lay(x) for name, x in values.items()})


@interpreted
def test_a_rounding_kernel_is_equal_to_the_bit(kernels: Kernels) -> None:
    """With a rounding after every operation, as PyTorch does it, not one bit differs; GPUs fuse products and sums."""
    graph = fused_graph(ROTATED.replace("f32", "bf16")).regions[0].forward
    values = {item.name: random(item.type, seed) for seed, item in enumerate(graph.inputs)}
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    exact, fast = (kernels.run(after, values, {}, {}, rounding=rounding)["loss"] for rounding in (True, False))
    assert torch.equal(exact, evaluate(graph, values)["loss"])
    assert not torch.equal(fast, exact)  # which keeps more bits in between


def test_packages_round_where_the_interpreter_would_cut_bits_off(kernels: Kernels) -> None:
    graph = (
        fused_graph("""
  forward:
    input x: f32[1000]
    y = neg(x)  # f32[1000]
    z = to(y, <bf16>)  # bf16[1000]
    loss = mul(z, 1.0)  # bf16[1000]
    return loss
""")
        .regions[0]
        .forward
    )
    patch_rounding()
    x = random(graph.inputs[0].type)
    made = kernels.run(fuse(program_of(graph), kernels="triton").regions[0].forward, {"x": x}, {}, {})["loss"]
    assert torch.equal(made, -x.bfloat16())
    package = partc.compile(GPT, mesh="1", options={"depth": 1}, kernels="triton")
    (text,) = (text for path, text in package.files() if path == "kernels/__init__.py")
    assert "\npatch_rounding()\n" in str(text)


# -- random graphs -------------------------------------------------------------------------------

SHAPES = [(), (1,), (3,), (2, 3), (4, 1), (2, 1, 3), (2, 4, 3), (5, 2, 2, 3)]


KINDS = [
    "unary", "binary", "binary", "reshape", "permute", "slice", "expand", "cat", "beside", "flag", "sum", "gather",
]  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A few inputs and up to a dozen operations on whatever is there, views among them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(draw(st.integers(1, 3))):
        shapes[f"x{number}"] = draw(st.sampled_from(SHAPES))
    inputs = tuple(value(name, *shape) for name, shape in shapes.items())
    orders: dict[str, int] = {}
    ops: list[Op] = []
    for number in range(draw(st.integers(2, 12))):
        name = draw(st.sampled_from(sorted(shapes)))
        shape = shapes[name]
        kind = draw(st.sampled_from(KINDS))
        made = f"v{number}"
        args: tuple[object, ...]
        if kind == "unary":
            kind, args, result = draw(st.sampled_from(["sin", "tanh", "neg", "sigmoid"])), (name,), shape
        elif kind == "flag":
            flag = Value(name=f"{made}_flag", type=TensorType.replicated("bool", shape))
            positive = Value(name=f"{made}_positive", type=TensorType.replicated("f32", shape))
            ops.append(op("relu", name, makes=positive))
            ops.append(op("to", positive.name, DTypeArg("bool"), makes=flag))
            kind, args, result = "to", (flag.name, DTypeArg("f32")), shape
        elif kind == "binary":
            other = draw(st.sampled_from(sorted(shapes)))
            try:
                result = tuple(torch.broadcast_shapes(shape, shapes[other]))
            except RuntimeError:
                other, result = name, shape
            kind, args = draw(st.sampled_from(["add", "mul", "sub", "maximum"])), (name, other)
        elif kind == "reshape":
            sizes = list(shape)
            count = int(torch.Size(shape).numel())
            choices = [(count,), (1, count), (count, 1), tuple(reversed(sizes))]
            result = draw(st.sampled_from(choices))
            args = (name, result)
        elif kind == "permute":
            order = tuple(draw(st.permutations(range(len(shape)))))
            args, result = (name, order), tuple(shape[dim] for dim in order)
        elif kind == "slice" and shape:
            dim = draw(st.integers(0, len(shape) - 1))
            start = draw(st.integers(0, shape[dim] - 1))
            end, step = draw(st.integers(start + 1, shape[dim])), draw(st.integers(1, 2))
            result = (*shape[:dim], -(-(end - start) // step), *shape[dim + 1 :])
            args = (name, dim, start, end, step)
        elif kind == "expand":
            result = (2, *(3 if size == 1 else size for size in shape))
            args = (name, result)
        elif kind == "sum" and len(shape) > 1:
            dim, keep = draw(st.integers(0, len(shape) - 2)), draw(st.booleans())
            result = (*shape[:dim], *((1,) if keep else ()), *shape[dim + 1 :])
            args = (name, (dim,), keep)
        elif kind == "gather" and shape:
            orders.setdefault(f"order{shape[0]}", shape[0])
            kind, args, result = "permute_rows", (name, f"order{shape[0]}", f"order{shape[0]}"), shape
        elif kind == "beside" and shape:
            parts = tuple(
                Value(name=f"{made}_{unary}", type=TensorType.replicated("f32", shape))
                for unary in ("sin", "tanh", "neg")
            )[draw(st.integers(0, 1)) :]
            ops += (op(part.name.rpartition("_")[2], name, makes=part) for part in parts)
            dim = draw(st.integers(0, len(shape) - 1))
            kind, args = "cat", (tuple(Ref(part.name) for part in parts), dim)
            result = (*shape[:dim], len(parts) * shape[dim], *shape[dim + 1 :])
        elif kind == "cat" and shape:
            dim = draw(st.integers(0, len(shape) - 1))
            args = ((Ref(name), Ref(name)), dim)
            result = (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
        else:
            kind, args, result = "neg", (name,), shape
        if torch.Size(result).numel() > 500:
            continue
        shapes[made] = result
        given_args = tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)
        type = TensorType.replicated("f32", result)
        ops.append(Op(name=kind, args=given_args, results=(Value(name=made, type=type),)))  # type: ignore[arg-type]
    outputs = draw(st.lists(st.sampled_from(sorted(shapes)), min_size=1, max_size=4, unique=True))
    last = [ops[-1].result.name] if ops else []
    inputs += tuple(value(name, size, dtype="i64") for name, size in orders.items())
    return Graph(inputs=inputs, ops=tuple(ops), outputs=tuple(dict.fromkeys([*last, *outputs])))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graph=graphs(), strided=st.booleans())
def test_random_graphs_equal_pytorch(kernels: Kernels, graph: Graph, strided: bool) -> None:
    orders = {item.name: torch.randperm(item.type.shape[0]) for item in graph.inputs if item.type.dtype == "i64"}
    values = {item.name: random(item.type, seed) for seed, item in enumerate(graph.inputs)} | orders
    if strided:
        values = {name: torch.stack([x, x], -1)[..., 0] for name, x in values.items()}
    check(kernels, graph, values, fused=False)


NEAR = 2**31  # where 32 bits end


@pytest.mark.parametrize("count", [NEAR - 1, NEAR - 100, NEAR - 1024, NEAR - 4095, NEAR - 4097, NEAR // 2 + 1])
def test_blocks_that_end_beyond_32_bits_count_in_64(count: int) -> None:
    """A masked block's values beyond its elements must not influence the result."""
    x, y, z = (value(name, count) for name in "xyz")
    graph = Graph(inputs=(x,), ops=(op("neg", "x", makes=y), op("exp", "y", makes=z)), outputs=("z",))
    after = fuse(program_of(graph, dense=True), kernels="triton").regions[0].forward
    (fused,) = after.ops
    built = kernel(fused, {key: found.type for key, found in after.definitions().items()}, {})
    ends = [-(-count // each["BLOCK"]) * each["BLOCK"] for each in built.candidates]
    assert isinstance(built, Pointwise) and built.long == (count > NEAR - 4097)
    assert built.long or max(ends) <= NEAR


@pytest.mark.parametrize("rows", [NEAR // 8 + 1, NEAR // 6 - 1, NEAR // 8 - 5, NEAR // 16])
def test_tiles_that_end_beyond_32_bits_count_in_64(rows: int) -> None:
    """Rows of 6 are held in 8 columns, and the last tile has rows that are not there."""
    x, y, z = (value(name, rows, 6) for name in "xyz")
    graph = Graph(inputs=(x,), ops=(op("mul", "x", 0.5, makes=y), op("softmax", "y", -1, makes=z)), outputs=("z",))
    after = fuse(program_of(graph, dense=True), kernels="triton").regions[0].forward
    (fused,) = after.ops
    built = kernel(fused, {key: found.type for key, found in after.definitions().items()}, {})
    assert isinstance(built, Rows)
    tiles = built.tiling
    last = (tiles.programs * tiles.steps * tiles.high - 1) * 6 + tiles.wide - 1
    assert built.long or last < NEAR
    assert built.long == (rows > NEAR // 16)
    text = kernel_module(built)
    assert ("tl.program_id(0).to(tl.int64)" in text) == built.long, "before it is multiplied"
