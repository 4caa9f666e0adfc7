"""Masks from index arithmetic: the symbolic form of a matrix has the elements that torch computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import partc
from partc.api import compilation
from partc.compilation.options import Options
from partc.errors import PartcError
from partc.frontend.state.constant_buffers import Recipes
from partc.ir import operators
from partc.ir.interpreter import results_of
from partc.ir.program import Arg, DTypeArg, Op, Ref, TensorType, Value
from partc.passes.simplify.limits import LimitWriter, limits_of
from partc.passes.simplify.masks import Constants, Seen, structure
from partc.passes.simplify.matrices import band
from partc.rules import flops, resolve
from partc.runtime.ops.attention import within


@dataclass(slots=True)
class Graph:
    """Operations with the results that torch computes."""

    ops: dict[str, Op] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, *args: Arg) -> Ref:
        def value(arg: Arg) -> Any:
            if isinstance(arg, Ref):
                return self.made[arg.name]
            if isinstance(arg, DTypeArg):
                return operators.DTYPES[arg.name]
            return [value(item) for item in arg] if isinstance(arg, tuple) else arg

        result = operators.resolve(name)(*map(value, args))
        type = TensorType.replicated(operators.DTYPE_NAMES[result.dtype], result.shape)
        ref = Ref(f"x{len(self.ops)}")
        self.ops[ref.name] = Op(name=name, args=args, results=(Value(name=ref.name, type=type),))
        self.made[ref.name] = result
        return ref


SIZES = st.integers(2, 9)
COMPARISONS = st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"])


@st.composite
def positions(draw: st.DrawFn, graph: Graph, s: int, t: int) -> Ref:
    """Integers of a row or a column: counts, shifted, scaled, divided, reversed."""
    along = draw(st.booleans())
    x = graph("arange", s if along else t)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(["add", "sub", "mul", "floor_divide", "rsub", "neg", "to"]))
        number = draw(st.integers(1, 4))
        more = () if name == "neg" else (DTypeArg("f32"),) if name == "to" else (number,)
        x = graph(name, x, *more)
    return graph("reshape", x, (1, s, 1) if along else (1, 1, t))


@st.composite
def booleans(draw: st.DrawFn, graph: Graph, s: int, t: int, depth: int) -> Ref:
    """Booleans [s, t]: comparisons of positions or of distances, triangles, their combinations."""
    kind = draw(
        st.sampled_from(["compare", "distance", "triangle", *(["both", "not", "turn", "part"] if depth else [])])
    )
    if kind in ("both", "not"):
        x = draw(booleans(graph, s, t, depth - 1))
        if kind == "not":
            return graph("logical_not", x)
        name = draw(st.sampled_from(["logical_and", "logical_or", "logical_xor", "__and__", "mul", "eq"]))
        return graph(name, x, draw(booleans(graph, s, t, depth - 1)))
    if kind == "turn":
        return graph("permute", draw(booleans(graph, t, s, depth - 1)), (0, 2, 1))
    if kind == "part":
        x = draw(booleans(graph, s + 2, t + 3, depth - 1))
        down, across = draw(st.integers(0, 2)), draw(st.integers(0, 3))
        return graph("slice", graph("slice", x, 1, down, down + s), 2, across, across + t)
    if kind == "triangle":
        whole = graph("full", (1, s, t), draw(st.sampled_from([0.0, 1.0, -math.inf])))
        part = graph(draw(st.sampled_from(["tril", "triu"])), whole, draw(st.integers(-3, 3)))
        return graph(draw(COMPARISONS), part, draw(st.sampled_from([0.0, 1.0])))
    a, b = draw(positions(graph, s, t)), draw(positions(graph, s, t))
    if kind == "compare":
        x = graph(draw(COMPARISONS), a, b)
    else:
        x = graph(draw(st.sampled_from(["sub", "add"])), a, b)
        x = graph("abs", x) if draw(st.booleans()) else x
        x = graph(draw(COMPARISONS), x, draw(st.integers(-3, 6)))
    return graph("expand", x, (1, s, t))


@pytest.mark.slow
@given(st.data(), SIZES, SIZES)
@settings(max_examples=400)
def test_symbolic_matrices_equal_those_that_torch_computes(data: st.DataObject, s: int, t: int) -> None:
    graph = Graph()
    mask = data.draw(booleans(graph, s, t, 3))
    if data.draw(st.booleans()):
        mask = graph("masked_fill", graph("full", (1, s, t), 0.0), mask, data.draw(st.sampled_from([-math.inf, 1.0])))
    constants = Constants(graph.ops, whole=0)
    found = constants.value(mask.name)
    assert found is not None
    dense = found if isinstance(found, Tensor) else found.dense()
    assert torch.equal(dense.expand(1, s, t).to(graph.made[mask.name].dtype), graph.made[mask.name])


@given(SIZES, SIZES, st.integers(-2, 10), st.integers(-2, 10), st.booleans())
@settings(max_examples=200)
def test_structures_are_those_of_the_elements(s: int, t: int, before: int, after: int, mirror: bool) -> None:
    """Whatever is called causal or a window has those elements."""
    runs = band(s, t, before, after)
    runs = runs.mirrored() if mirror else runs
    seen, rows, columns = runs.dense(), torch.arange(s)[:, None], torch.arange(t)
    wanted = (columns <= rows + after) & (columns >= rows - before)
    assert torch.equal(seen, wanted.flip(1) if mirror else wanted)
    found = structure(runs)
    if found is None:
        near = {w for w in range(1, s + 1) if s == t and torch.equal(seen, (rows - columns).abs() < w)}
        assert not bool(seen.all()) and not near
        assert s != t or not torch.equal(seen, columns <= rows)
    else:
        distance = (rows - columns).abs()
        read = (columns <= rows) if found.causal else torch.ones(s, t, dtype=torch.bool)
        assert torch.equal(seen, read & (distance < found.window) if found.window else read)


LONG = 1 << 20
FORMS = {
    "j <= i": Seen(True, 0),
    "(j <= i) & (j > i - 4096)": Seen(True, 4096),
    "(i - j).abs() <= 64": Seen(False, 65),
    "((i - j) >= 0) & ((i - j) < 1000)": Seen(True, 1000),
    "torch.ones(s, s, dtype=torch.bool).tril()": Seen(True, 0),
    "torch.triu(torch.full((s, s), float('-inf')), 1)": Seen(True, 0),
    "(torch.triu(torch.ones(s, s)) == 1).transpose(0, 1)": Seen(True, 0),
    "torch.zeros(1, 1, s, s).masked_fill(j > i, torch.finfo(torch.float32).min)": Seen(True, 0),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "wanted"), FORMS.items(), ids=FORMS)
def test_a_million_positions(form: str, wanted: Seen, tmp_path: Path) -> None:
    """No matrix of the sequence's square is left in the program."""
    program = _compiled(tmp_path, form, length=LONG)
    [attention] = [op for region in program.regions for op in region.forward.ops if op.name == "attention"]
    assert attention.args[3] is None and attention.args[4] is wanted.causal
    assert attention.args[6:] == ((wanted.window,) if wanted.window else ())
    shapes = [v.type.shape for r in program.regions for op in r.forward.ops for v in op.results]
    assert all(shape.count(LONG) < 2 for shape in shapes)


def test_chunks_of_a_million_positions_are_examples(tmp_path: Path) -> None:
    program = _compiled(tmp_path, "(j <= i) & (j // 8192 == i // 8192)", length=LONG)
    [attention] = [op for region in program.regions for op in region.forward.ops if op.name == "attention"]
    assert attention.args[3] is None and attention.args[4] is True
    assert attention.results[0].type.shape == (LONG // 8192, 2, 8192, 4)
    shapes = [v.type.shape for r in program.regions for op in r.forward.ops for v in op.results]
    assert all(shape.count(LONG) < 2 for shape in shapes)


LIMITED = {
    "(j <= i) | (j < 1000)": 0.5,
    "(j <= i) & ((i - j < 4096) | (j < 4))": 4098 / LONG,
    "(j <= i) & (j // 30000 == i // 30000)": 15000 / LONG,
    "(j <= i) & (x[:, None, :, :1].long() == x[:, None, None, :, 0].long())": 0.5,
    "((j <= i) | (x[:, None, None, :, 0] > 0))": 1.0,
}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("form", "share"), LIMITED.items(), ids=["prefix", "sinks", "chunks", "documents", "shown"])
def test_other_masks_of_a_million_positions_are_limits(form: str, share: float, tmp_path: Path) -> None:
    """The work of constant masks is counted; of documents no more is known than that they are causal."""
    program = _compiled(tmp_path, form, length=LONG)
    (region,) = program.regions
    [attention] = [op for op in region.forward.ops if op.name == "attention"]
    assert attention.args[3] is None and "limits" in dict(attention.attrs)
    shapes = [v.type.shape for op in region.forward.ops for v in op.results]
    assert all(shape.count(LONG) < 2 for shape in shapes)
    types = region.types(region.forward)
    rule = resolve(attention, types)
    assert rule is not None and flops(attention, rule) / rule.flops == pytest.approx(share, rel=0.02)


@given(st.data(), SIZES, SIZES)
@settings(max_examples=100)
def test_limits_are_those_of_the_elements(data: st.DataObject, s: int, t: int) -> None:
    graph = Graph()
    runs = Constants(graph.ops, whole=0).seen(data.draw(booleans(graph, s, t, 2)).name)
    assert runs is not None
    writing = LimitWriter(set(), None)
    attrs = limits_of(runs, writing)
    if attrs is None:
        assert runs.changes.shape[1] > 7 or not runs.changes.shape[1]
        return
    known: dict[str, Tensor] = {}
    for op in writing.ops:
        known.update(results_of(op, known))
    (_, limits), (_, reads) = attrs
    assert isinstance(limits, Ref)
    assert torch.equal(within(known[limits.name], None, t + 2)[0, 0, :, :t], runs.dense())
    assert not within(known[limits.name], None, t + 2)[..., t:].any(), "positions that are added later"
    counts = runs.dense().sum(1)
    assert reads == (int(counts[: s // 2].sum()), int(counts[s // 2 :].sum()), s * t)


MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, filled=None):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 2, 4).permute(2, 0, 3, 1, 4)
        i, j = torch.arange(s)[:, None], torch.arange(s)
        mask = {mask}
        y = {attend}
        return self.out(y.transpose(1, 2).reshape(b, s, 8)).square().sum()


def model():
    return Model()


def batch(batch: int = 4, length: int = 12):
    return {{"x": torch.randn(batch, length, 8){more}}}
"""
FILLED = ', "filled": torch.arange(length) < torch.randint(4, length, (batch, 1))'


def _written(
    folder: Path, mask: str, more: str = "", attend: str = "F.scaled_dot_product_attention(q, k, v, mask)"
) -> Path:
    file = folder / "masked.py"
    file.write_text(MODEL.format(mask=mask, more=more, attend=attend))
    return file


def _compiled(folder: Path, mask: str, length: int) -> Any:
    file = _written(folder, mask)
    options = {"length": length, "batch": 1}
    checked = Options.checked(mesh="1", microbatches=1, schedule="1f1b", precision="fp32", seed=0, shard=())
    return compilation(str(file), None, checked, model_options=options, until="simplify").after("simplify")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mask", "more", "told"),
    [
        ("(j <= i) & (j > i - 3)", "", "is_causal=True, window=3"),
        ("(i - j).abs() < 2", "", "window=2"),
        ("(j <= i) & (j // 4 == i // 4)", "", "is_causal=True"),
        ("(j <= i) & filled[:, None, None, :]", FILLED, "mask=mask, is_causal=True"),
        ("(j <= i) & (i - j < 5) & filled[:, None, None, :]", FILLED, "mask=mask, is_causal=True, window=5"),
    ],
    ids=["window", "near", "chunks", "padding", "window and padding"],
)
def test_packages_with_masks_equal_their_model(mask: str, more: str, told: str, tmp_path: Path) -> None:
    file = _written(tmp_path, mask, more)
    package = partc.compile(str(file), mesh="dp=2,tp=2", microbatches=2)
    written = "".join(str(text) for path, text in package.files() if path.startswith("regions/"))
    assert told in " ".join(written.split())
    assert package.verify(steps=1).ok


@pytest.mark.parametrize(
    ("mask", "more"),
    [
        ("((j <= i) | filled[:, None, None, :])", FILLED),
        pytest.param("(j <= i) & ((i - j < 4) | (j < 2))", "", marks=pytest.mark.slow),
        pytest.param(
            "((j <= i) & (i - j < 6) & (filled[:, :, None] == filled[:, None, :]))[:, None]",
            FILLED,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["prefix", "sinks", "documents"],
)
def test_other_masks_equal_one_device_where_sequences_are_cut(mask: str, more: str, tmp_path: Path) -> None:
    found = partc.compile(str(_written(tmp_path, mask, more)), mesh="cp=4", precision="fp64").verify(steps=1)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


def test_grouped_heads_in_chunks_equal_one_device(tmp_path: Path) -> None:
    attend = "F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], mask, enable_gqa=True)"
    file = _written(tmp_path, "(j <= i) & (j // 3 == i // 3)", attend=attend)
    package = partc.compile(str(file), mesh="dp=2,tp=2", precision="fp64")
    text = "".join(str(text) for path, text in package.files() if path.startswith("regions/"))
    assert "is_causal=True" in " ".join(text.split()), text
    result = package.verify(steps=2)
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10


SINKS = "torch.cat([(q @ k.mT * 0.3).masked_fill(~mask, -torch.inf), {}], -1).softmax(-1)"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mask", "attend"),
    [
        ("torch.where(j <= i, 0.0, -torch.inf)", "((q / 2) @ k.mT * 0.3 + mask).softmax(-1) @ v"),
        ("(j > i) | (j < i - 4)", "(q @ k.mT / 2).masked_fill(mask, -torch.inf).softmax(-1) @ v"),
        ("j <= i", "F.dropout(torch.where(mask, q @ k.mT, -torch.inf).softmax(-1), 0.3) @ v"),
        ("None", "(q @ k.mT).softmax(-1) @ v"),
        (
            "j <= i",
            "(torch.where(mask, (q @ k.mT).masked_fill(i - j > 4, -torch.inf), -torch.inf) / 2).softmax(-1) @ v",
        ),
        ("j <= i", f"{SINKS.format('self.out.bias[:2].view(1, 2, 1, 1).expand(b, 2, s, 1)')}[..., :-1] @ v"),
        ("None", "torch.cat([q.new_zeros(b, 2, s, 1), q @ k.mT], -1).softmax(-1)[..., 1:] @ v"),
        ("None", "((a := q @ k.mT) - a.amax(-1, keepdim=True)).softmax(-1) @ v"),
        ("j <= i", "(q @ k.mT / 2 + j * self.out.bias[:2, None, None]).masked_fill(~mask, -torch.inf).softmax(-1) @ v"),
        (
            "(x.sum(-1) > 4)[:, None, None]",
            "F.dropout((q @ k.mT).masked_fill(mask, torch.finfo(q.dtype).min).softmax(-1), 0.3) @ v",
        ),
        (
            "torch.where(j <= i, 0.0, -torch.inf)",
            "(torch.baddbmm((j * torch.tensor([0.5, 0.25])[:, None, None]).repeat(b, 1, 1), q.reshape(2 * b, s, 4), "
            "k.reshape(2 * b, s, 4).mT, alpha=0.5).view(b, 2, s, s) + mask).softmax(-1).view(2 * b, s, s)"
            ".bmm(v.reshape(2 * b, s, 4)).view(b, 2, s, 4)",
        ),
        ("torch.where(j <= i, 0.0, -1.0)", "(q @ k.mT + mask * 0.5).softmax(-1) @ v"),
    ],
    ids=[
        "added",
        "filled",
        "dropped",
        "open",
        "two around a factor",
        "sinks",
        "off by one",
        "shifted",
        "slopes",
        "padding",
        "one dimension of heads",
        "numbers",
    ],
)
def test_attention_that_is_written_out_makes_no_scores(mask: str, attend: str, tmp_path: Path) -> None:
    package = partc.compile(str(_written(tmp_path, mask, attend=attend)), mesh="dp=2,tp=2", microbatches=2)
    assert "functional.attention" in "".join(str(text) for path, text in package.files() if path.startswith("regions/"))
    assert package.verify(steps=1).ok


@pytest.mark.sampled
@pytest.mark.parametrize(
    "attend",
    [
        "(w := (q @ k.mT + mask).softmax(-1)) @ v + w.sum()",  # the weights are read
        "(q @ k.mT + mask + torch.arange(s)).softmax(-1) @ v",  # two masks without a structure
        "((q @ k.mT + mask) * 2).softmax(-1) @ v",
        "(q @ k.mT).masked_fill(j > i, -3.0).softmax(-1) @ v",
        "(q @ k.mT + mask).softmax(-2) @ v",
        "(q @ k.mT + q @ q.mT).softmax(-1) @ v",  # scores of their own
        "torch.cat([q @ k.mT, q.sum(-1, keepdim=True)], -1).softmax(-1)[..., :-1] @ v",  # a score of each row
        "torch.cat([q @ k.mT, q.new_zeros(b, 2, s, 1)], -1).softmax(-1)[..., 1:] @ v",  # not what was joined
        "((a := q @ k.mT) - a.amax(-2, keepdim=True)).softmax(-1) @ v",
    ],
)
def test_other_products_with_weights_stay(attend: str, tmp_path: Path) -> None:
    file = _written(tmp_path, "torch.where(j <= i, 0.0, -1.0)", attend=attend)
    package = partc.compile(str(file), mesh="tp=2")
    assert "functional.attention" not in "".join(
        str(text) for path, text in package.files() if path.startswith("regions/")
    )
    assert package.verify(steps=1).ok


class Buffered(nn.Module):
    """nanoGPT's attention: the mask is a slice of a buffer, made for the longest sequence."""

    def __init__(self, longest: int, changes: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.changes = nn.Linear(16, 48), nn.Linear(16, 16), changes
        self.register_buffer("bias", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, 4).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        if self.changes:
            self.bias.mul_(1)
        scores = (q @ k.transpose(-2, -1)) * 0.5
        scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v + self.seen
        return self.out(y.transpose(1, 2).reshape(b, t, c)).square().mean()


def buffered() -> nn.Module:
    return Buffered(12)


def buffered_widely() -> nn.Module:
    return Buffered(40000)


def buffered_and_changed() -> nn.Module:
    return Buffered(12, changes=True)


def test_masks_in_buffers_are_known_at_any_size() -> None:
    batch = {"x": torch.randn(4, 8, 16)}
    made = partc.compile(buffered_widely, batch, mesh="tp=2", precision="fp64")
    products = [op for region in made.program.regions for op in region.forward.ops if op.name.startswith("attention")]
    assert [op.args[3:5] for op in products] == [(None, True)]


@pytest.mark.slow
def test_masks_in_buffers_equal_the_single_device() -> None:
    batch = {"x": torch.randn(4, 8, 16)}
    assert partc.compile(buffered, batch, mesh="dp=2,tp=2", precision="fp64").verify(steps=2).ok


def test_a_mask_that_forward_changes_is_refused() -> None:
    with pytest.raises(PartcError) as error:
        partc.compile(buffered_and_changed, {"x": torch.randn(4, 8, 16)}, mesh="tp=2")
    assert error.value.code == "P0225" and "bias" in error.value.cause


def _constructed(write: Callable[[Tensor], object], *, viewed: bool = False) -> Callable[[], Tensor]:
    """Makes a causal mask, which something is then written to."""

    def build() -> Tensor:
        mask = torch.tril(torch.ones(4, 4))
        seen = mask.view(1, 1, 4, 4)
        write(mask)
        return seen if viewed else mask

    return build


@pytest.mark.parametrize(
    "build",
    [
        _constructed(lambda mask: mask.__setitem__((slice(None), 0), 1)),
        _constructed(lambda mask: mask.__setitem__((slice(None), 0), 1), viewed=True),
        _constructed(lambda mask: mask[0].zero_()),
        _constructed(lambda mask: mask.data.fill_(1)),
        _constructed(lambda mask: mask.view(-1).data.fill_(1)),
        _constructed(lambda mask: setattr(mask, "data", torch.ones(4, 4))),
        _constructed(lambda mask: torch.ones(4, 4, out=mask)),
        _constructed(lambda mask: mask.masked_fill_(mask == 0, 2)),
    ],
)
def test_masks_that_the_constructor_writes_to_stay_buffers(build: Callable[[], Tensor]) -> None:
    assert recipes(_constructed(lambda mask: mask.sum())) == ["bias"] and recipes(build) == []


def recipes(build: Callable[[], Tensor]) -> list[str]:
    noted = Recipes()
    with noted, torch.device("meta"):
        model = nn.Module()
        model.register_buffer("bias", build())
    return list(noted.masks({"": model}))


def _holes() -> Tensor:
    """A mask that is written to by every means, also through views."""
    mask = torch.ones(6, 6, dtype=torch.bool).fill_diagonal_(0)
    rows, row = torch.arange(3), mask[4]
    mask[0, 3:5] = False
    mask[rows, rows + 3] = False
    row[1] = False
    mask.view(-1)[7] = True
    torch.logical_not(mask, out=mask)
    return mask ^ torch.eye(6, dtype=torch.bool)


def _drawn() -> Tensor:
    numbers = torch.zeros(6)
    numbers.uniform_()
    return numbers > 0.5


def _behind_autograd() -> Tensor:
    mask = torch.zeros(6, dtype=torch.bool)
    mask.data.fill_(True)
    return mask


def _by_numpy() -> Tensor:
    mask = torch.zeros(6, dtype=torch.bool, device="cpu")
    mask.numpy()[2] = True
    return mask


@pytest.mark.parametrize(
    ("build", "known"), [(_holes, True), (_drawn, False), (_behind_autograd, False), (_by_numpy, False)]
)
def test_values_of_constants_follow_writes(build: Callable[[], Tensor], known: bool) -> None:
    noted, model = Recipes(), nn.Module()
    with torch.device("meta"), noted:
        model.register_buffer("bias", build(), persistent=False)
    found = noted.numbers({"": model})
    assert list(found) == ["bias"] * known and all(torch.equal(x, build()) for x in found.values())


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: nn.Buffer(torch.tril(torch.ones(4, 4)), persistent=False), ["bias"]),
        (lambda: torch.empty(4, 4).copy_(torch.ones(4, 4).triu()), ["bias"]),
        (lambda: torch.bitwise_xor(*(torch.ones(4, 4, dtype=torch.bool).tril(k) for k in (0, -2))), ["bias"]),
        (lambda: torch.empty(4, 4).copy_(torch.ones(4, 1).tril()), []),
        (lambda: torch.ones(4, 4).tril().copy_(torch.rand(4, 4)), []),
        (lambda: (mask := torch.ones(4, 4).tril()).copy_(mask.clone().fill_(2)), []),
    ],
)
def test_copies_of_masks_are_masks(build: Callable[[], Tensor], found: list[str]) -> None:
    assert recipes(build) == found
