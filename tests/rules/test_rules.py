"""Rules against execution: operands are cut in every legal way, run on virtual ranks, combined and compared."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from partc.errors import PartcError
from partc.ir.layout import Layout, Partial, Placement, Replicated, Shard, Sizes, Varying
from partc.ir.operations import RANDOM
from partc.ir.program import Arg, Choice, Graph, Op, Ref, TensorType, Value
from partc.rules import (
    OpRule,
    choices,
    factor_cuts,
    fits,
    flops,
    is_matmul,
    localize,
    placements,
    propagate_cuts,
    register,
    resolve,
)
from partc.rules.notation import NotationError, parse
from partc.rules.rule import Dims
from partc.rules.shapes import common_factors
from partc.rules.table import TABLE
from partc.runtime.positions import Positions, Stretches
from tests import op_cases
from tests.example_cases import example_cases
from tests.op_cases import Case
from tests.virtual_ops import Coordinate, Shards, assemble, coordinates, named, shard

warnings.simplefilter("ignore")  # from torch, about the odd arguments of a few cases
CASES = [*op_cases.all_cases(), *example_cases()]
CUTS = (2, 3, 4)  # tried on every factor, whether or not a graph would ask for them


def rule_of(case: Case) -> OpRule:
    rule = resolve(case.op, case.types)
    assert rule is not None
    return rule


def legal(case: Case, rule: OpRule, axis: str, n: int) -> tuple[Choice, ...]:
    return choices(case.op, rule, axis, n, {factor.name: CUTS for factor in rule.factors})


def spread_layouts(
    case: Case, rule: OpRule, chosen: Sequence[Choice | None], sizes: Sizes
) -> tuple[list[Layout], list[Layout]] | None:
    """Layouts of operands and results when every axis has its choice; None where sizes don't divide."""
    shapes = [case.values[name].shape for name in case.op.refs()]
    made_shapes = [value.type.shape for value in case.op.results]
    asked: list[dict[str, Placement]] = [{} for _ in shapes]
    made: list[dict[str, Placement]] = [{} for _ in made_shapes]
    if not fits(rule, [choice for choice in chosen if choice is not None], sizes):
        return None
    for axis, choice in zip(sizes, chosen, strict=True):
        wants, gives = placements(case.op, rule, choice)
        for where, placement in zip((*asked, *made), (*wants, *gives), strict=True):
            where[axis] = placement
    layouts = [Layout.build(s, p, sizes) for s, p in zip((*shapes, *made_shapes), (*asked, *made), strict=True)]
    if any(layout is None for layout in layouts):
        return None
    found = [layout for layout in layouts if layout is not None]
    return found[: len(shapes)], found[len(shapes) :]


def by_position(op: Op) -> Op:
    """The operation reading its operands as 0, 1, ...: one value may be wanted in two layouts."""
    return op.reading(map(str, itertools.count()))


def execute(op: Op, operands: Sequence[Shards], sizes: Sizes) -> list[Shards]:
    """Every rank's results of a local operation."""
    results: list[Shards] = [{} for _ in op.results]
    made: tuple[Tensor, ...]
    for coordinate in coordinates(sizes):
        values = {str(i): shards[coordinate] for i, shards in enumerate(operands)}
        if op.name == "embedding_shard":
            made = (_embedding_shard(values["0"], values["1"], place_on(op, coordinate, sizes)),)
        elif "rows" in dict(op.attrs):
            places = {axis: (index, sizes[axis]) for axis, index in named(coordinate, sizes).items()}
            made = (_attention_rows(op, values, Positions.parse(str(dict(op.attrs)["rows"])).of_rank(places)),)
        elif op.name == "mask_classes_shard":
            logits, classes = op.args
            assert isinstance(classes, int)
            here = classes - place_on(op, coordinate, sizes) * values["0"].shape[-1]
            made = op_cases.run(replace(op, name="mask_classes", args=(logits, here)), values)
        elif op.name == "cross_entropy_shard":
            position = list(sizes).index(str(dict(op.attrs)["axis"]))
            group = [
                c
                for c in operands[0]
                if c[:position] + c[position + 1 :] == coordinate[:position] + coordinate[position + 1 :]
            ]
            values["0"] = torch.cat([operands[0][member] for member in sorted(group)], -1)
            made = op_cases.run(replace(op, name="cross_entropy"), values)
        else:
            made = op_cases.run(op, values)
        for shards, tensor in zip(results, made, strict=True):
            shards[coordinate] = tensor
    return results


def _attention_rows(op: Op, values: Mapping[str, Tensor], rows: Stretches) -> Tensor:
    """The rows of a whole attention, whose other queries are zero."""
    q, total = values["0"], max(run.stop for run in rows)
    where = torch.cat([torch.arange(*run[:2]) for run in rows])
    whole = q.new_zeros(*q.shape[:2], total, q.shape[-1]).index_copy(2, where, q)
    values = {**values, "0": whole}
    if "3" in values and values["3"].dim() > 1 and values["3"].shape[-2] > 1:
        mask = values["3"]
        spread = torch.zeros(*mask.shape[:-2], total, mask.shape[-1], dtype=mask.dtype)
        values["3"] = spread.index_copy(-2, where, mask)
    sinks = tuple(item for item in op.attrs if item[0] == "sinks")
    return op_cases.run(replace(op, attrs=sinks), values)[0][:, :, where]


def place_on(op: Op, coordinate: Coordinate, sizes: Sizes) -> int:
    return named(coordinate, sizes)[str(dict(op.attrs)["axis"])]


def _embedding_shard(table: Tensor, ids: Tensor, rank: int) -> Tensor:
    local = ids - rank * table.shape[0]
    outside = (local < 0) | (local >= table.shape[0])
    return table[local.masked_fill(outside, 0)].masked_fill(outside.unsqueeze(-1), 0)


def check(case: Case, rule: OpRule, chosen: Sequence[Choice | None], sizes: Sizes) -> bool:
    """Values, and gradients where there are any, of one way to spread a case. False where it doesn't fit."""
    found = spread_layouts(case, rule, chosen, sizes)
    if found is None:
        return False
    wanted, made = found
    results = tuple(
        replace(value, type=replace(value.type, layout=layout))
        for value, layout in zip(case.op.results, made, strict=True)
    )
    op = replace(case.op, results=results, choices=tuple(choice for choice in chosen if choice is not None))
    local = by_position(localize(op, rule, sizes))
    operands = [case.values[name] for name in case.op.refs()]
    held = [shard(x, layout, sizes) for x, layout in zip(operands, wanted, strict=True)]
    differentiable = [x.is_floating_point() for x in operands]
    for shards, follows in zip(held, differentiable, strict=True):
        for coordinate, tensor in shards.items():
            shards[coordinate] = tensor.detach().clone().requires_grad_(follows)
    outputs = execute(local, held, sizes)
    for shards, layout, expected in zip(outputs, made, case.results, strict=True):
        together = assemble({c: x.detach() for c, x in shards.items()}, layout, sizes)
        assert together.dtype == expected.dtype
        limit = 1e-6 if expected.dtype == torch.float32 else 1e-12  # a sum cast to f32 is rounded in its parts
        assert torch.allclose(together, expected, rtol=limit, atol=limit, equal_nan=True), f"{chosen}: values differ"
    if local.name != "cross_entropy_shard":  # its ranks exchange values, and so gradients
        _check_gradients(case, held, wanted, outputs, made, sizes)
    return True


def _check_gradients(
    case: Case, held: list[Shards], wanted: list[Layout], outputs: list[Shards], made: list[Layout], sizes: Sizes
) -> None:
    """Local backward passes, from gradients placed as the results' say, give gradients placed as the operands' say."""
    leaves = [case.values[name].detach().clone() for name in case.op.refs()]
    for leaf in leaves:
        leaf.requires_grad_(leaf.is_floating_point())
    whole = op_cases.run(by_position(case.op), {str(i): leaf for i, leaf in enumerate(leaves)})
    live = [i for i, tensor in enumerate(whole) if tensor.requires_grad]
    follows = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    if not live or not follows:
        return
    tangents = [torch.randint(-3, 4, whole[i].shape).to(whole[i].dtype) for i in live]
    expected = torch.autograd.grad([whole[i] for i in live], [leaves[i] for i in follows], tangents, allow_unused=True)
    incoming = [shard(t, made[i].dual(), sizes, seed=7) for i, t in zip(live, tangents, strict=True)]
    gradients: list[Shards] = [{} for _ in follows]
    for coordinate in coordinates(sizes):
        local = torch.autograd.grad(
            [outputs[i][coordinate] for i in live],
            [held[i][coordinate] for i in follows],
            [tangent[coordinate] for tangent in incoming],
            allow_unused=True,
        )
        for shards, index, gradient in zip(gradients, follows, local, strict=True):
            shards[coordinate] = torch.zeros_like(held[index][coordinate]) if gradient is None else gradient
    for shards, index, gradient in zip(gradients, follows, expected, strict=True):
        together = assemble(shards, wanted[index].dual(), sizes)
        gradient = torch.zeros_like(together) if gradient is None else gradient
        assert torch.allclose(together, gradient, rtol=1e-10, atol=1e-10, equal_nan=True), f"operand {index}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_choice_computes_the_same(case: Case) -> None:
    rule = rule_of(case)
    for n in (2, 3):
        for choice in legal(case, rule, "a", n):
            assert check(case, rule, [choice], {"a": n}), f"{choice} is said to be legal and does not fit"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_choices_on_two_axes_are_independent(case: Case) -> None:
    rule = rule_of(case)
    sizes = {"a": 2, "b": 3}
    pairs = list(itertools.product((None, *legal(case, rule, "a", 2)), (None, *legal(case, rule, "b", 3))))
    random.Random(str(case)).shuffle(pairs)
    taken = 0
    for first, second in pairs:
        both = first and second and first.factor == second.factor and first.factor in dict(rule.sharded)
        taken += 0 if both else check(case, rule, [first, second], sizes)
        if taken == 8:
            break
    assert taken


def test_every_operation_of_the_table_is_run() -> None:
    covered = {case.op.name for case in CASES}
    # The values of some are anything, and a wait belongs to a collective.
    assert set(TABLE) - covered == {"empty", "new_empty", "empty_like", "wait"} | RANDOM & set(TABLE)


# Views: the factors of a reshape, for any shapes that have the same number of elements.


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two factorisations of one number, with ones strewn in; boundaries often don't nest."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), min_size=1, max_size=5))
    return _grouped(draw, primes), _grouped(draw, draw(st.permutations(primes)))


def _grouped(draw: st.DrawFn, primes: list[int]) -> list[int]:
    shape, size = [], 1
    for prime in primes:
        size *= prime
        if draw(st.booleans()):
            shape.append(size)
            size = 1
    shape.append(size)
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return shape


@given(reshapes())
def test_reshape_factors(shapes: tuple[list[int], list[int]]) -> None:
    given_shape, wanted = shapes
    operand, result, sizes, blocked = common_factors(given_shape, wanted)
    for shape, dims in ((given_shape, operand), (wanted, result)):
        assert [math.prod(sizes[name] for name in dim) for dim in dims] == shape
    free = [name for name in sizes if name not in blocked]
    for dims in (operand, result):
        assert [name for dim in dims for name in dim if name in free] == free
    x = torch.arange(math.prod(given_shape))
    for name in free:  # cutting a factor in the operand, or in the result, keeps the same elements in the same order
        for index in range(sizes[name]):
            left = _picked(x.reshape(given_shape), operand, sizes, name, index)
            assert torch.equal(left, _picked(x.reshape(wanted), result, sizes, name, index))


def _picked(x: Tensor, dims: Dims, sizes: Mapping[str, int], name: str, index: int) -> Tensor:
    names = [factor for dim in dims for factor in dim]
    return x.reshape([sizes[factor] for factor in names]).select(names.index(name), index).flatten()


@given(reshapes())
def test_nested_reshapes_leave_nothing_uncut(shapes: tuple[list[int], list[int]]) -> None:
    given_shape, _ = shapes
    flat = [math.prod(given_shape)]
    for pair in ((given_shape, flat), (flat, given_shape)):
        assert common_factors(*pair)[3] == frozenset()


# The notation


def test_notation() -> None:
    notation = parse("q[b (g r) s d], +bias?[*n], ~mask[s t] -> [b *n], [g]")
    q, bias, mask = notation.operands
    assert (q.name, q.dims, q.optional, q.added, q.broadcast) == (
        "q",
        (("b",), ("g", "r"), ("s",), ("d",)),
        False,
        False,
        False,
    )
    assert (bias.dims, bias.optional, bias.added) == ((("*n",),), True, True)
    assert mask.broadcast
    assert [term.dims for term in notation.results] == [(("b",), ("*n",)), (("g",),)]
    assert notation.factors == {"b", "g", "r", "s", "d", "n", "t"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x[b]", "no `->`"),
        ("x[b] -> ", "no result"),
        ("x[b] y[c] -> [b]", "comma"),
        ("x[b, c] -> [b]", "cannot read"),
        ("x[*b *c] -> [*b]", "more than one starred"),
        ("x[b (c *d)] -> [b]", "cannot read"),
        ("x b -> [b]", "cannot read"),
        ("x[partial0] -> [partial0]", "may not be called"),
        ("x[b] -> +y[b]", "takes no mark"),
    ],
)
def test_notation_that_does_not_parse(text: str, said: str) -> None:
    with pytest.raises(NotationError, match=said):
        parse(text)
    with pytest.raises(PartcError, match=said) as caught:
        register("mylib::op", text)
    assert caught.value.code == "P0312"


def tensor(*shape: int, dtype: str = "f32") -> TensorType:
    return TensorType.replicated(dtype, shape)  # type: ignore[arg-type]


def call(name: str, *args: Arg, results: Sequence[TensorType]) -> Op:
    made = tuple(Value(name=f"r{i}", type=type) for i, type in enumerate(results))
    return Op(name=name, args=args, results=made)


@pytest.fixture
def table() -> Iterator[None]:
    """Rules registered in a test are gone after it."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


@pytest.mark.usefixtures("table")
def test_a_users_rule() -> None:
    register("mylib::gate", "x[*b i], w[o i], g[*b] -> [*b o], [*b]", linear="x | w", matmul=True)
    types = {"x": tensor(4, 6, 8), "w": tensor(10, 8), "g": tensor(4, 6)}
    op = call("mylib::gate", Ref("x"), Ref("w"), Ref("g"), results=[tensor(4, 6, 10), tensor(4, 6)])
    rule = resolve(op, types)
    assert rule is not None and is_matmul(op)
    kinds = {factor.name: (factor.size, factor.kind) for factor in rule.factors}
    # `o` is in one of two results: neither a sum nor a share of the other
    assert kinds == {"b0": (4, "parallel"), "b1": (6, "parallel"), "i": (8, "contracted"), "o": (10, "blocked")}
    assert rule.linear == ((0,), (1,))
    assert flops(op, rule) == 2 * 4 * 6 * 8 * 10
    asked, made = placements(op, rule, Choice(axis="tp", factor="i"))
    assert (asked, made) == ((Shard(2), Shard(1), Varying()), (Partial(), Partial()))


@pytest.mark.usefixtures("table")
def test_a_users_rule_with_tensors_among_other_arguments() -> None:
    register("mylib::scale", "x[b d], w[d] -> [b d]", slots=(0, 2), blocked="d")
    op = call("mylib::scale", Ref("x"), 1e-5, Ref("w"), results=[tensor(4, 6)])
    rule = resolve(op, {"x": tensor(4, 6), "w": tensor(6)})
    assert rule is not None
    assert [choice.factor for choice in choices(op, rule, "tp", 2)] == [None, "b"]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("name", "marks", "code"),
    [
        ("gate", {}, "P0311"),
        ("mylib::gate", {"blocked": "z"}, "P0313"),
        ("mylib::gate", {"linear": "y"}, "P0313"),
        ("mylib::gate", {"slots": (0, 1)}, "P0313"),
    ],
)
def test_marks_that_do_not_fit_a_users_rule(name: str, marks: dict[str, Any], code: str) -> None:
    with pytest.raises(PartcError) as caught:
        register(name, "x[b d] -> [b d]", **marks)
    assert caught.value.code == code


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("shape", "result"), [((4, 6, 2), (4, 6, 2)), ((4, 6), (4, 7)), ((4, 6), (6, 4))], ids=["rank", "size", "order"]
)
def test_a_users_rule_that_does_not_fit_the_call(shape: tuple[int, ...], result: tuple[int, ...]) -> None:
    register("mylib::same", "x[b d] -> [b d]")
    op = call("mylib::same", Ref("x"), results=[tensor(*result)])
    with pytest.raises(PartcError) as caught:
        resolve(op, {"x": tensor(*shape)})
    assert caught.value.code == "P0314"


# Choices and what they mean


def test_operations_without_a_rule() -> None:
    op = call("bernoulli", Ref("x"), results=[tensor(4)])
    assert resolve(op, {"x": tensor(4)}) is None
    assert not is_matmul(op)


def test_a_bias_is_added_once() -> None:
    types = {"x": tensor(4, 6, 8), "w": tensor(10, 8), "b": tensor(10)}
    op = call("linear", Ref("x"), Ref("w"), Ref("b"), results=[tensor(4, 6, 10)])
    rule = resolve(op, types)
    assert rule is not None
    asked, made = placements(op, rule, Choice(axis="tp", factor="i"))
    assert (asked, made) == ((Shard(2), Shard(1), Partial()), (Partial(),))


def test_grouped_query_heads_are_cut_in_groups() -> None:
    types = {"q": tensor(2, 8, 4, 16), "k": tensor(2, 4, 4, 16), "v": tensor(2, 4, 4, 16)}
    op = call("attention", Ref("q"), Ref("k"), Ref("v"), None, True, None, results=[tensor(2, 8, 4, 16)])
    rule = resolve(op, types)
    assert rule is not None
    found = {(c.factor, c.outer): placements(op, rule, c) for c in choices(op, rule, "tp", 2)}
    assert set(found) == {(None, 1), ("b", 1), ("g", 1), ("r", 1), ("s", 1)}
    assert found["g", 1] == ((Shard(1), Shard(1), Shard(1)), (Shard(1),))
    assert found["r", 1] == ((Shard(1, 4), Varying(), Varying()), (Shard(1, 4),))
    assert flops(op, rule) == 2 * 2 * 8 * 4 * 4 * 16


def test_a_vocabulary_is_cut_over_one_axis_only() -> None:
    types = {"w": tensor(12, 6), "ids": tensor(4, dtype="i64")}
    op = call("embedding", Ref("w"), Ref("ids"), results=[tensor(4, 6)])
    op = replace(op, choices=(Choice(axis="tp", factor="v"),))
    rule = resolve(op, types)
    assert rule is not None
    assert "v" not in {choice.factor for choice in choices(op, rule, "dp", 2)}
    local = localize(op, rule, {"dp": 2, "tp": 2})
    assert (local.name, local.attrs) == ("embedding_shard", (("axis", "tp"),))
    assert localize(op, rule, {"dp": 2, "tp": 1}).name == "embedding"
    asked, made = placements(op, rule, Choice(axis="tp", factor="v"))
    assert (asked, made) == ((Shard(0), Replicated()), (Partial(),))


def test_groups_of_channels_divide_over_all_axes_together() -> None:
    """6 groups of 2 channels: 12 divides by 2 x 2, and yet no rank would have whole groups."""
    case = op_cases.case("conv1d", op_cases.normal(2, 12, 4), op_cases.normal(12, 2, 1), None, [1], [0], [1], 6)
    rule = rule_of(case)
    chosen = [Choice(axis=axis, factor="g") for axis in ("a", "b")]
    assert fits(rule, chosen, {"a": 2, "b": 3})
    assert check(case, rule, chosen, {"a": 2, "b": 3})
    assert not fits(rule, chosen, {"a": 2, "b": 2})


# Strided cuts that a graph asks for


def test_a_fused_projection_is_cut_in_each_of_its_parts() -> None:
    """GPT-2: one product makes q, k and v, which are split and seen as heads."""
    x, w = Value(name="x", type=tensor(2, 4, 24)), Value(name="w", type=tensor(72, 24))
    parts = tuple(Value(name=name, type=tensor(2, 4, 24)) for name in "qkv")
    graph = Graph(
        inputs=(x, w),
        ops=(
            Op(name="linear", args=(Ref("x"), Ref("w")), results=(Value(name="y", type=tensor(2, 4, 72)),)),
            Op(name="split", args=(Ref("y"), (24, 24, 24), 2), results=parts),
            Op(name="reshape", args=(Ref("q"), (2, 4, 6, 4)), results=(Value(name="h", type=tensor(2, 4, 6, 4)),)),
        ),
        outputs=("h",),
    )
    types = {name: value.type for name, value in graph.definitions().items()}
    cuts = propagate_cuts(graph, types)
    assert cuts["w"] == (frozenset({1, 3, 18}), frozenset({1}))  # 18 = 3 * 6: inside every head
    assert cuts["y"][2] == {1, 3, 18}
    assert cuts["v"][2] == {1, 6}  # q's heads are seen through the split
    linear = graph.ops[0]
    rule = resolve(linear, types)
    assert rule is not None
    found = factor_cuts(linear, rule, cuts)
    assert found["o"] == {1, 3, 18}
    assert Choice(axis="tp", factor="o", outer=3) in choices(linear, rule, "tp", 2, found)
    assert Choice(axis="tp", factor="o", outer=18) not in choices(linear, rule, "tp", 3, found)


def test_cuts_are_bounded() -> None:
    """A long chain of views of one dimension asks for few cuts all the same."""
    size, ops, shapes = 2**16, [], [[2**k, 2 ** (16 - k)] for k in range(1, 16)]
    for index, shape in enumerate(shapes):
        made = Value(name=f"y{index}", type=tensor(*shape))
        ops.append(Op(name="reshape", args=(Ref("x"), tuple(shape)), results=(made,)))
    graph = Graph(inputs=(Value(name="x", type=tensor(size)),), ops=tuple(ops), outputs=("y0",))
    cuts = propagate_cuts(graph, {"x": tensor(size)})
    assert 1 in cuts["x"][0] and len(cuts["x"][0]) <= 12


def test_the_table_needs_no_torch() -> None:
    code = "import sys, partc.rules, partc.sharding.reshard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
