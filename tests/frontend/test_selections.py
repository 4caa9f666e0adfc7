"""Rows that a mask selects, loops over experts, and refusals of related code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc import passes
from partc.errors import PartcError
from partc.frontend.trace import trace_file, trace_model
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.ir.program import Program
from partc.package.verify import verify
from partc.runtime.ops.functional import selected_places
from tests.models import counted_rows, experts, masked_rows, padded_pictures, placed_rows

FILE = Path(experts.__file__)
PICTURES = Path(placed_rows.__file__)
LOOPS = (
    "places", "listed", "skipped", "added", "columns", "by_masks", "any_slot", "put", "hits", "biased", "gated",
    "capacity", "scaled_by_count",
)  # fmt: skip


@cache
def routed_program(style: str) -> Program:
    """Of one layer, in fp64."""
    traced = trace_file(FILE, {"style": style, "depth": "1"}, mesh=Mesh.parse("1x1x2"), precision="fp64")
    return passes.run(traced.program, {}, until="route")[-1].program


def routed(style: str) -> list[str]:
    return [op.name for op in routed_program(style).regions[0].forward.ops]


@pytest.mark.sampled
@pytest.mark.parametrize("style", LOOPS)
def test_a_loop_over_experts_becomes_products_of_all_experts(style: str) -> None:
    ops = routed(style)
    assert ops.count("expert_matmul") == (2 if style in ("biased", "gated") else 3)
    assert "selected" not in ops
    assert ops.count("linear") + ops.count("matmul") == 2  # the router and the head


@pytest.mark.slow
@pytest.mark.parametrize(
    "style",
    [pytest.param(x, marks=pytest.mark.matrix if x in ("added", "any_slot", "gated") else ()) for x in LOOPS[2:]]
    + ["normed", "by_masks_normed", "blended_normed"],
)
def test_loops_train_like_one_device(style: str, tmp_path: Path) -> None:
    made = partc.compile(str(FILE), mesh="dp=2,tp=2", microbatches=2, precision="fp64", options={"style": style})
    found = verify(made.write(tmp_path / "build"), steps=1, virtual=True)
    assert found.ok, str(found.worst)


@cache
def dims_to_sum(shape: tuple[int, ...]) -> list[int]:
    return [dim for dim, _ in enumerate(shape)]


class ByCachedShapes(nn.Module):
    """A function with a cache keyed by shapes, which symbolic sizes bypass, as in einops."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def mean(self, x: Tensor) -> Tensor:
        try:
            dims = dims_to_sum(tuple(x.shape))
        except TypeError:
            dims = dims_to_sum.__wrapped__(x.shape)
        return x.mean(dims)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        rows = h[x[:, 0] > 0]
        return self.mean(rows) + self.mean(rows.sin())


def test_caches_by_shapes_keep_no_number_of_rows() -> None:
    """The second look into the cache compared two numbers of rows, which was refused."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    found = partc.compile(ByCachedShapes, {"x": x}, mesh="dp=2", precision="fp64").verify(steps=2)
    assert found.ok, found.worst


@pytest.mark.parametrize("style", ["normed", "by_masks_normed", "blended_normed"])
def test_experts_with_norms_of_their_own_compute_all_rows(style: str) -> None:
    ops = routed(style)
    assert "expert_matmul" not in ops and "masked_fill" in ops


@pytest.mark.parametrize("style", ["dropped", pytest.param("dropped_normed", marks=pytest.mark.slow)])
def test_dropouts_of_selected_rows_draw_by_place(style: str, tmp_path: Path) -> None:
    """The loop trains like a model that drops elements of all rows; a comparison with the loop itself is refused."""

    def compiled(style: str, mesh: str, folder: str) -> Path:
        options = {"style": style, "depth": 1}
        return partc.compile(str(FILE), mesh=mesh, precision="fp64", options=options).write(tmp_path / folder)

    reference = tmp_path / "reference"
    assert verify(compiled(f"{style}_by_place", "dp=1", "plain"), steps=2, virtual=True, reference=reference).ok
    package = compiled(style, "dp=2,tp=2", "build")
    with pytest.raises(PartcError, match=r"P0207.*rows that a mask selects"):
        verify(package, steps=2, virtual=True)
    plan = json.loads((package / "plan.json").read_text())
    del plan["draws_for_rows"]
    (package / "plan.json").write_text(json.dumps(plan))
    found = verify(package, steps=2, virtual=True, reference=reference)
    assert found.ok, str(found.worst)


@pytest.mark.parametrize(
    ("style", "words"),
    [
        ("mixed", "other than row by row"),
        ("repeated", "select several rows for one place"),
        ("few_numbers", "select several rows for one place"),
        ("repeated_normed", "select several rows for one place"),
    ],
)
def test_code_that_needs_the_number_of_rows_is_refused(style: str, words: str) -> None:
    with pytest.raises(PartcError) as error:
        routed(style)
    assert error.value.code == "P0206" and words in error.value.cause
    assert error.value.source is not None and "experts.py" in error.value.source.file


@pytest.mark.sampled
@pytest.mark.parametrize(
    "style", [*LOOPS, "normed", "by_masks_normed", "blended_normed", "centred", "sized", "counted", "seen"]
)
def test_routed_graphs_compute_the_loop(style: str) -> None:
    """The rewritten graph against the eager model, also where some experts have no rows."""
    torch.manual_seed(0)
    model = experts.model(style=style, depth=1).double()
    for number in range(2):
        batch = experts.batch()
        if number:  # all tokens are equal, so that most experts are idle
            batch["ids"] = torch.full_like(batch["ids"], 3)
        program = routed_program(style)
        given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        loss = evaluate_program(program, batch, given)
        torch.testing.assert_close(loss, model(**batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("style", [
    "language", "flat", "squares", "summed", "distance", "selected", "logarithms", "nested", "columns",
])  # fmt: skip
def test_losses_of_selected_rows_equal_the_eager_ones(style: str) -> None:
    torch.manual_seed(0)
    model, batch = masked_rows.model(style).double(), masked_rows.batch()
    file = Path(masked_rows.__file__)
    traced = trace_file(file, {"style": style}, mesh=Mesh.parse("1x1x2"), precision="fp64")
    program = passes.run(traced.program, {}, until="route")[-1].program
    assert "selected" not in {op.name for op in program.regions[0].forward.ops}
    loss = evaluate_program(program, batch, dict(model.named_parameters()))
    torch.testing.assert_close(loss, model(**batch), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "mesh"), [("language", "dp=2,tp=2"), ("nested", "pp=2,dp=2"), ("logarithms", "dp=2,tp=2")]
)
def test_losses_of_selected_rows_train_like_one_device(style: str, mesh: str, tmp_path: Path) -> None:
    file = Path(masked_rows.__file__)
    made = partc.compile(str(file), mesh=mesh, microbatches=2, precision="fp64", options={"style": style})
    found = verify(made.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok, str(found.worst)


COUNTED = Path(counted_rows.__file__)


@pytest.mark.parametrize(
    "style",
    [
        "length", "at least one", "item", "tensor and number", "elements", "unpacked", "bytes", "others", "root",
        "as a tensor", "ones", "zeros", "expanded", "expanded as", "repeated rows", "viewed", "kind", "integer", "floating",
    ],
)  # fmt: skip
def test_losses_compute_with_the_number_of_selected_rows(style: str) -> None:
    torch.manual_seed(0)
    model = counted_rows.model(style).double()
    traced = trace_file(COUNTED, {"style": style}, mesh=Mesh.parse("1x1x2"), precision="fp64")
    program = passes.run(traced.program, {}, until="route")[-1].program
    for number in range(3):
        batch = counted_rows.batch()
        batch["x"] = batch["x"].double()
        if number == 2 and style in ("at least one", "item", "tensor and number"):
            batch["labels"].zero_()  # nothing is selected
        loss = evaluate_program(program, batch, dict(model.named_parameters()))
        torch.testing.assert_close(loss, model(**batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "style",
    [
        "shape's elements", "range", "list", "text", "product", "slice", "half", "filled", "full", "clamped",
        "identity", "repeated", "more than three", "as many", "as many as others",
        "threshold", "band", "bits", "a step of many", "key",
    ],
)  # fmt: skip
def test_plain_integers_of_the_number_of_selected_rows_are_refused(style: str) -> None:
    """Code that turns a number of rows into a plain integer is refused, because traces with other integers differ."""
    with pytest.raises(PartcError) as error:
        traced = trace_file(COUNTED, {"style": style}, mesh=Mesh.parse("1x1x2"))
        passes.run(traced.program, {}, until="route")
    assert error.value.code == "P0206"
    assert error.value.source is not None and "counted_rows.py" in error.value.source.file
    line = COUNTED.read_text().splitlines()[(error.value.source.line or 0) - 1]
    assert "return" in line or "number = " in line


class ConstantMasks(nn.Module):
    """Masks whose values are known while the model is traced: all rows, none, a range, scattered and grids."""

    def __init__(self) -> None:
        super().__init__()
        self.languages = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        language = torch.ones(x.shape[0])
        y = torch.zeros_like(x)
        for number, layer in enumerate(self.languages):
            y[language == number] = layer(x[language == number])
        place = torch.arange(6)
        read = y[:, place % 2 == 1].sum(1) + y[:, (place - 2).abs() < 2].square().sum(1)
        read = read + y.view(len(x), 3, 2, 8)[:, (place.view(3, 2) % 3) != 1].sum(1).sin()
        pairs = (y[:, 0] @ y[:, 1].mT).masked_select(mask=~torch.eye(len(x), dtype=torch.bool)).view(len(x), -1)
        read = read + pairs.std(-1, keepdim=True) + y.masked_select(place[:, None] < 2).view(len(x), -1, 8).sum(1)
        copied = y[language == 1]
        copied.mul_(2)
        y[:, place > 3] = 0.5
        y[:, place < 1] *= 2
        return self.head(y + copied).square().mean() + read.square().mean()


def equals_eager(build: Callable[[], nn.Module], batches: Sequence[dict[str, Tensor]]) -> None:
    """The traced program of a model, made for the first batch, computes the eager losses of all."""
    torch.manual_seed(0)
    model = build().double()
    traced = trace_model(build, lambda: batches[0], name="model", mesh=Mesh.parse("1x1x2"), precision="fp64")
    program = passes.run(traced.program, {}, until="route")[-1].program
    for batch in batches:
        loss = evaluate_program(program, batch, dict(model.named_parameters()))
        torch.testing.assert_close(loss, model(**batch), rtol=1e-12, atol=1e-12)


def ensure(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


class Added(nn.Module):
    """Features of pictures that are added to the places that a mask selects, after checks of their number."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.sight, self.head = nn.Embedding(9, 8), nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, words: Tensor, pictures: Tensor) -> Tensor:
        x, found, mask = self.words(words), self.sight(pictures).flatten(0, 1), words == 8
        ensure(x[mask].numel() == found.numel(), "other numbers of features")
        torch._check(int(found.shape[0]) == mask.sum().item())
        y = x.clone()
        y[mask, :] = x[mask, :] * 2 + found
        return self.head(y).square().mean()


def test_plain_rows_are_added_to_selected_ones() -> None:
    """Each example has two places, in different positions in each batch."""
    places = torch.tensor([[0, 3], [1, 2], [2, 4], [3, 4]])
    batches = [
        {"words": torch.randint(8, (4, 5)).scatter(1, some, 8), "pictures": torch.randn(4, 2, 4, dtype=torch.float64)}
        for some in (places, places.flip(0))
    ]
    equals_eager(Added, batches)


class Ends(nn.Module):
    """Classifies texts by the rows at their marks, of which each text has as many."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 1)

    def forward(self, words: Tensor) -> Tensor:
        x, marks = self.words(words).cumsum(1), words == 8
        counts = marks.sum(1)
        match self.style:
            case "unguarded":
                pass
            case "checked":
                torch._check(torch.unique_consecutive(counts).numel() == 1)
                ensure(x[marks, :].shape[0] // x.shape[0] >= 1, "no mark")
            case _:
                if len(torch.unique_consecutive(counts)) > 1:
                    raise ValueError("unequal numbers of marks")
        rows = x[marks, :].view(x.size(0), -1, x.size(-1))
        match self.style:
            case "first":
                read = rows[:, 0]
            case "part":
                read = rows[:, 1, 2:6].sum(1, keepdim=True)
            case "all":
                read = rows.sum(1)
            case _:
                read = rows[:, -1, :]
        return self.head(read.expand(-1, 8)).square().mean()


def texts_with_marks(*columns: list[list[int]]) -> list[dict[str, Tensor]]:
    """Batches of texts with marks in these columns."""
    return [{"words": torch.randint(8, (4, 5)).scatter(1, torch.tensor(each), 8)} for each in columns]


@pytest.mark.parametrize("style", ["last", "checked", "first", "part"])
def test_rows_at_as_many_marks_are_read_by_number(style: str) -> None:
    pairs = [[0, 3], [1, 2], [2, 4], [3, 4]]
    threes = [[0, 1, 3], [1, 2, 4], [0, 2, 4], [2, 3, 4]]
    equals_eager(lambda: Ends(style), texts_with_marks(pairs, pairs[::-1], threes))


@pytest.mark.parametrize("style", ["unguarded", "all"])
def test_rows_of_texts_need_a_guard_and_a_number(style: str) -> None:
    with pytest.raises(PartcError) as error:
        equals_eager(lambda: Ends(style), texts_with_marks([[0, 3]] * 4))
    assert error.value.code == "P0206"


class Delayed(nn.Module):
    """Turns rows by the delays with the highest scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        scores = y.sin().mean((0, 2))
        best, delays = scores.topk(2)
        turned = [y.roll(-delays[i].item(), dims=1) * best[i] for i in range(2)]
        return (turned[0] + torch.roll(turned[1], (delays[0].item(),), (-1,))).square().mean()


def test_rows_turn_by_numbers_that_depend_on_values() -> None:
    equals_eager(Delayed, [{"x": torch.randn(4, 6, 8, dtype=torch.float64)} for _ in range(3)])


class Spline(nn.Module):
    """Numbers within limits go through a curve with knots, whose first and last one are the limits."""

    def __init__(self) -> None:
        super().__init__()
        self.widths = nn.Linear(3, 24)

    def forward(self, x: Tensor) -> Tensor:
        widths = self.widths(x).view(-1, 3, 8)
        inside = (x >= -1) & (x <= 1)
        y = torch.zeros_like(x)
        y[~inside] = x[~inside]
        if inside.any():
            knots = 2 * F.pad(widths[inside].softmax(-1).cumsum(-1), (1, 0)) - 1
            knots[..., 0] = -1.0
            knots[..., -1] = 1.0
            place = (x[inside][..., None] >= knots).sum(-1, keepdim=True).clamp(1, 8)
            y[inside] = (x[inside] * knots.diff().gather(-1, place - 1)[..., 0]).sin()
        return y.square().mean()


def test_numbers_are_written_into_columns_of_selected_rows() -> None:
    equals_eager(Spline, [{"x": scale * torch.randn(8, 3, dtype=torch.float64)} for scale in (1, 0.1, 100)])


class Written(nn.Module):
    """Writes into constants at places that a mask selects, and at constant ones; the results are masks again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 10)

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        y = self.layer(x)
        row, pairs = k[0], k[:4] > 1
        rows, columns = torch.where(row > 1)[0], torch.where(pairs)[1]
        copied, ones, put = (torch.zeros(10) for _ in range(3))
        matched, numbers = (torch.zeros(10, dtype=torch.int64) for _ in range(2))
        copied[rows] = row[rows].to(copied.dtype)
        ones[rows] = 1.0
        put[torch.arange(10) % 2 == 0] = 1.0
        part = put[2:]
        part[torch.arange(8) > 5] = row[:2].to(part.dtype)
        matched[columns] = k[5][columns]  # a column several times: the last one counts
        numbers.random_(0, 4, generator=torch.Generator().manual_seed(1))
        chosen = torch.zeros(8, 4)
        labels, marked = k[:, 0], torch.where(k[:, 0] > 1)[0]
        chosen[marked, labels[marked]] = 1.0
        chosen[labels == 0, labels[labels == 0] + 1] = 2.0
        z = y.clone()
        z[marked] = -1.0
        z[torch.where(labels < 2)[0], 2] = -2.0
        for number, mask in enumerate((copied > 0, ones > 0, put > 0, matched > 1, numbers > 1)):
            z[:, mask] = number * x.mean()
            z = z + y
        return z.square().mean() + (y[:, :4] * chosen).sum()


def test_writes_into_constants_change_their_values() -> None:
    batches = [{"x": torch.randn(8, 4, dtype=torch.float64), "k": torch.randint(4, (8, 10))} for _ in range(3)]
    equals_eager(Written, batches)


class Cells(nn.Module):
    """Writes at places of selected rows: in columns of a mask, and in cells of a grid that several rows may hit."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.layer, self.other = style, nn.Linear(5, 6), nn.Linear(5, 6)

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        y, z, some = self.layer(x), self.other(x), k > 2  # x: 8 x 4 x 5, k: 8 x 4
        if self.style == "columns":
            y[:, :, some[0].any() & (k[:6, 0] > 1)] = z[:, :, some[0].any() & (k[:6, 0] > 1)]
        elif self.style == "columns of one":
            y[:, some[0]] = z.mean(1, keepdim=True)
        elif self.style == "columns of a vector":
            y[:, some[0]] = z[0, 0]
        elif self.style == "a row for all":
            y[some] = 0.0
            y[k > 2] += self.other.bias
        elif self.style == "equal masks":
            y[y[..., 0] > z[..., 0]] = 2 + z.tanh()[y[..., 0] > z[..., 0]]
        elif self.style == "elements as rows":
            wide = some.unsqueeze(-1).expand_as(y)
            return F.smooth_l1_loss(y[wide].view(-1, 6), z[wide].reshape(-1, 6), reduction="sum") + y[some].sum()
        elif self.style == "rows of rows":
            y, k = y[some[:, 0]], k[some[:, 0]]
            return F.cross_entropy(y.flatten(0, 1), k.flatten(), reduction="sum") + y.flatten(1).amax(1).sum()
        else:
            first, second = some.nonzero(as_tuple=True)
            rows, columns = (k[first, second] * 2 + second) % 3, k[first, second] - 4
            grid = z.new_zeros(8, 3, 5, 2)
            if self.style == "cells":
                grid[first, rows, columns] = 1.0
            elif self.style == "vectors":
                grid[first, rows, columns] = y[first, second, :2].detach()
            elif self.style == "cells by number":
                grid[first, rows, columns, 1] = y[first, second, 0].detach()
            elif self.style == "with gradients":
                grid[first, rows, columns] = y[first, second, :2]
            return (grid * z[:, :3, :5, None]).square().sum() + y.square().mean()
        return y.square().mean()


class LastWords(nn.Module):
    """The feature of one word of each example, by two vectors of places; the first example's, by one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        y = self.layer(x)
        words = y[torch.arange(len(x)), k.argmax(-1)]
        return F.cross_entropy(words @ y[torch.arange(1), 0].T + y[torch.arange(1)].mean(), k[:, 0])


def test_vectors_of_one_place_run_along_with_others() -> None:
    """`arange(1)` was a slice in an index with another tensor."""
    equals_eager(LastWords, [{"x": torch.randn(1, 4, 5, dtype=torch.float64), "k": torch.zeros(1, 4).long()}])


class Relations(nn.Module):
    """Messages along the edges of each kind, added at the places that the edges have; places of no kind are beyond."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.layers, self.last = style, nn.ModuleList(nn.Linear(5, 6) for _ in range(3)), nn.Linear(6, 1)

    def forward(self, x: Tensor, edges: Tensor, kind: Tensor) -> Tensor:
        source, target = edges
        out = x.new_zeros(len(x), 6)
        for number, layer in enumerate(self.layers):
            some = kind == number
            if "guarded" in self.style and not some.any():
                continue
            given, place = layer(x[source[some]]), target[some] * 2 % 9
            if "scattered" in self.style:
                out.scatter_add_(0, place[:, None].expand_as(given), given.sin() if number else given)
            elif "put" in self.style:
                out.index_put_((place,), given, accumulate=True)
            elif "mean" in self.style:
                count = torch.zeros(len(x)).to(x.dtype).index_add(0, place, torch.ones(len(place)).to(x.dtype))
                out = out + torch.zeros_like(out).index_add_(0, place, given) / count.clamp(min=1)[:, None]
            else:
                out.index_add_(0, place, given)
        return self.last(out.tanh()).square().mean()  # type: ignore[no-any-return]


RELATIONS = [
    {
        "x": torch.randn(8, 5, dtype=torch.float64),
        "edges": torch.where(kind < 3, torch.randint(4, (2, 12)), 99),
        "kind": kind,
    }
    for kind in (torch.arange(12) % 4, torch.full((12,), 3), torch.zeros(12, dtype=torch.int64))
]


@pytest.mark.parametrize("style", ["added", "guarded", "guarded, scattered", "put", "mean"])
def test_selected_rows_are_added_at_places_that_they_hold(style: str) -> None:
    equals_eager(lambda: Relations(style), RELATIONS)


CELLS = [
    {"x": torch.randn(8, 4, 5, dtype=torch.float64), "k": k}
    for k in (torch.arange(32).reshape(8, 4) % 5, torch.zeros(8, 4, dtype=torch.int64), torch.full((8, 4), 4))
]


@pytest.mark.parametrize(
    "style",
    [
        *("columns", "columns of one", "columns of a vector", "a row for all", "equal masks", "elements as rows"),
        *("rows of rows", "cells", "vectors"),
    ],
)
def test_columns_and_cells_of_selected_rows(style: str) -> None:
    """A mask selects some, none or all rows. With all, several rows hit each cell: the last one counts."""
    equals_eager(lambda: Cells(style), CELLS)


@pytest.mark.parametrize("style", ["cells by number", "with gradients"])
def test_other_writes_into_cells_are_refused(style: str) -> None:
    with pytest.raises(PartcError) as error:
        equals_eager(lambda: Cells(style), CELLS)
    assert error.value.code == "P0206" and error.value.source is not None


@pytest.mark.slow
@pytest.mark.parametrize("style", ["columns", "elements as rows", "cells", "vectors"])
def test_columns_and_cells_train_like_one_device(style: str) -> None:
    torch.manual_seed(0)
    found = partc.compile(Cells(style), CELLS[0], mesh="dp=2,tp=2", precision="fp64").verify(steps=2)
    assert found.ok, str(found.worst)


def test_constant_masks_are_places() -> None:
    equals_eager(ConstantMasks, [{"x": torch.randn(8, 6, 8, dtype=torch.float64)}])


class ConstantsOfMasks(nn.Module):
    """SimCLR's pairs: elements that a constant mask selects from a constant are the next mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.normalize(self.layer(x), dim=1)
        labels, own = torch.arange(4).repeat(2), torch.eye(8, dtype=torch.bool)
        pairs = (labels[None] == labels[:, None]).float()[~own].view(8, -1).bool()
        scores = (y @ y.T)[~own].view(8, -1)
        near, far = scores[pairs].view(8, -1), scores.masked_select(mask=~pairs).view(8, -1)
        return F.cross_entropy(torch.cat([near, far], 1) / 0.1, torch.zeros(8, dtype=torch.int64))


def test_constants_that_masks_select_are_constants() -> None:
    equals_eager(ConstantsOfMasks, [{"x": torch.randn(8, 4, dtype=torch.float64)}])


@pytest.mark.parametrize("style", padded_pictures.STYLES)
def test_pictures_that_a_mask_selects_are_counted_as_eagerly(style: str) -> None:
    torch.manual_seed(0)
    batches = [padded_pictures.batch(*given) for given in (("3333",), ("0132",), ("2000",), ("0132", "3210"))]
    batches = [{name: x.double() if x.is_floating_point() else x for name, x in each.items()} for each in batches]
    equals_eager(lambda: padded_pictures.model(style), batches)


def test_places_for_more_pictures_than_there_are_show_in_the_loss() -> None:
    build = lambda: padded_pictures.model("in their order")  # noqa: E731
    traced = trace_model(build, padded_pictures.batch, name="model", mesh=Mesh.parse("1x1x2"), precision="fp64")
    program = passes.run(traced.program, {}, until="route")[-1].program
    for places, finite in (("0131", True), ("0133", False)):
        batch = padded_pictures.batch("0132", places)
        assert evaluate_program(program, batch, dict(build().named_parameters())).isfinite() == finite


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "style", "places", "microbatches"),
    [
        ("dp=2,tp=2", "by example", "0132", 2),
        ("dp=2,tp=2", "in their order", "3210", 1),
        ("pp=2,tp=2", "first rows", "0132", 2),
    ],
)
def test_models_with_padded_pictures_train_like_one_device(
    mesh: str, style: str, places: str, microbatches: int, tmp_path: Path
) -> None:
    given: Any = {"options": {"style": style, "places": places}, "microbatches": microbatches}
    made = partc.compile(padded_pictures.__file__, mesh=mesh, precision="fp64", **given)
    found = verify(made.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok, str(found.worst)


class Branches(nn.Module):
    """Branches on whether a mask selects anything. Rows of `flags` and of `other` differ."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, flags: Tensor, other: Tensor) -> Tensor:
        y = x.clone()
        match self.style:
            case "left out":  # where it hides nothing
                mask = None if not flags.any() else flags
                scores = self.body(x) @ x.T
                if mask is not None:
                    scores = scores.view(1, 8, 8).masked_fill(mask[None, None], float("-inf")).view(8, 8)
                y = scores.softmax(-1).nan_to_num() @ x
            case "where" if flags.any():
                y = torch.where(flags[:, None], self.body(x), y)
            case "where not" if flags.sum() > 0:
                y = torch.where(~flags[:, None], y, self.body(x))
            case "computed again" if (flags > 0).any():
                y[flags > 0] = self.body(x[flags > 0])
            case "subset" if flags.any():
                y[flags & other] = self.body(x[flags & other])
            case "elements" if x[flags].numel() > 0:
                y[flags] = self.body(x[flags])
            case "one row":
                if flags.any():
                    y[flags] = self.body.bias
                y[other] = self.body(x)[:1]
            case "one row elsewhere" if flags.any():
                y[other] = self.body.bias
            case "both" if flags.any() and other.any():
                y[flags & other] = self.body(x[flags & other])
            case "checked":
                if len(x[flags]) > 6 or x[flags].shape[0] != flags.sum():
                    raise ValueError("too many rows")
                y[flags] = self.body(x[flags])
            case "in turn":
                if flags.any():
                    y[flags] = self.body(x[flags])
                if other.any():
                    y[other] = y[other] * 2
            case "other rows" if flags.any():
                y[other] = self.body(x[other])
            case "more rows" if flags.any():
                y[flags | other] = self.body(x[flags | other])
            case "rows of one of two" if flags.any() and other.any():
                y[flags] = self.body(x[flags])
            case "not alone" if flags.sum().item() - 1:
                y[flags] = self.body(x[flags])
            case "after a change":
                rows = flags.clone()
                if rows.any():
                    rows |= other
                    y[rows] = self.body(x[rows])
            case "filled elsewhere" if flags.any():
                y = y.masked_fill(other[:, None], 0.0)
            case "stored":  # one outcome of two tests decides about the rows of the other
                some = bool(flags.any())
                if other.any() and some:
                    y[other] = self.body(x[other])
            case "remembered":
                factor = 1
                if flags.any():
                    factor = 2
                if other.any():
                    y[other] = self.body(x[other]) * factor
            case "after a change by a view":
                rows = flags.clone()
                last = rows[2:]
                if rows.any():
                    last |= other[2:]
                    y[rows] = self.body(x[rows])
            case "caught":
                try:
                    if not flags.any():
                        raise ValueError("no rows")
                except ValueError:
                    y = y * 3
            case "while":
                rows = flags
                while True:
                    if not rows.any():
                        break
                    y[rows] = self.body(x[rows])
                    rows = rows & (y.mean(1) > 0)
            case "same twice":
                if flags.any():
                    z = self.body(x[flags])
                if flags.any():
                    y[flags] = z
        return self.head(y).square().mean()


def flagged(flags: Tensor, other: Tensor) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8, dtype=torch.float64), "flags": flags, "other": other}


@pytest.mark.parametrize(
    "style", [
        "left out", "where", "where not", "computed again", "subset", "elements", "both", "in turn", "checked",
        "same twice", "one row", "one row elsewhere", "other rows", "more rows", "after a change", "filled elsewhere",
        "stored", "after a change by a view", "rows of one of two", "caught",
    ],
)  # fmt: skip
def test_branches_on_empty_masks_change_nothing(style: str) -> None:
    some, none = torch.arange(8) % 3 == 0, torch.zeros(8, dtype=torch.bool)
    batches = [flagged(some, ~some.roll(1)), flagged(none, some), flagged(some, none), flagged(none, none)]
    equals_eager(lambda: Branches(style), batches)


@pytest.mark.parametrize("style", ["not alone", "remembered", "while"])
def test_other_branches_on_masks_are_refused(style: str) -> None:
    some = torch.arange(8) % 3 == 0
    with pytest.raises(PartcError) as error:
        equals_eager(lambda: Branches(style), [flagged(some, ~some)])
    assert error.value.code == "P0206" and error.value.source is not None
    assert "test_selections.py" in error.value.source.file


class Passing(nn.Module):
    """Equal layers, of which each tells the next ones, in a Python value, whether a mask had rows."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.body = style, nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor, some: Any) -> tuple[Tensor, Any]:
        y = x.clone()
        if mask.any():
            y[mask] = self.body(x[mask]) * (2.0 if some and self.style != "read behind" else 0.5)
            if self.style == "listed":
                some.append(1)
            else:
                some = self.style != "alone"
        return y, some


class Layers(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.layers = style, nn.ModuleList(Passing(style) for _ in range(3))

    def forward(self, x: Tensor, flags: Tensor, other: Tensor) -> Tensor:
        some: Any = [] if self.style == "listed" else False
        for layer, mask in zip(self.layers, (flags, other, flags | other), strict=True):
            x, some = layer(x, mask, some if self.style != "read behind" else False)
        if self.style == "read behind" and some and other.any():
            x = x.clone()
            x[other] = x[other] * 3
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("style", ["returned", "listed", "read behind", "alone"])
def test_outcomes_that_layers_pass_on(style: str) -> None:
    some, none = torch.arange(8) % 3 == 0, torch.zeros(8, dtype=torch.bool)
    batches = [flagged(some, ~some), flagged(none, some), flagged(some, none), flagged(none, none)]
    equals_eager(lambda: Layers(style), batches)


class Distant(nn.Module):
    """Sixteen tests, of which the last one reads the outcome of the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor, flags: Tensor, other: Tensor) -> Tensor:
        outcomes = [
            bool((flags & (x[:, 0] > 0)).any()),
            bool((flags & (x[:, 0] > 1)).any()),
            bool((flags & (x[:, 0] > 2)).any()),
            bool((flags & (x[:, 0] > 3)).any()),
            bool((flags & (x[:, 0] > 4)).any()),
            bool((flags & (x[:, 0] > 5)).any()),
            bool((flags & (x[:, 0] > 6)).any()),
            bool((flags & (x[:, 0] > 7)).any()),
            bool((flags & (x[:, 0] > 8)).any()),
            bool((flags & (x[:, 0] > 9)).any()),
            bool((flags & (x[:, 0] > 10)).any()),
            bool((flags & (x[:, 0] > 11)).any()),
            bool((flags & (x[:, 0] > 12)).any()),
            bool((flags & (x[:, 0] > 13)).any()),
            bool((flags & (x[:, 0] > 14)).any()),
        ]
        y = x.clone()
        if (other & (x[:, 7] > 0)).any():
            rows = other & (x[:, 7] > 0)
            y[rows] = self.body(x[rows]) * (2.0 if outcomes[3] else 0.5)
        return y.square().mean()


@pytest.mark.slow
def test_outcomes_of_distant_tests_are_told_apart() -> None:
    some = torch.arange(8) % 3 == 0
    with pytest.raises(PartcError) as error:
        equals_eager(Distant, [flagged(some, ~some)])
    assert error.value.code == "P0206"


class Hits(nn.Module):
    """Loops over the experts that tokens chose. `other` is a mask of four experts that says nothing of tokens."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.experts, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1)

    def forward(self, x: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
        out = x.clone()
        one = F.one_hot(chosen, 4)  # of tokens and slots
        here = one.permute(2, 0, 1).bool()
        match self.style:
            case "marked":
                for e in here.flatten(1).any(1).nonzero():
                    rows, _ = torch.where(here[e].squeeze(0))
                    out.index_add_(0, rows, self.experts[int(e)](x[rows]))
            case "compared":
                for e in one.sum((0, 1)).ne(0).nonzero().flatten().tolist():
                    rows, _ = torch.where(chosen == e)
                    out.index_add_(0, rows, self.experts[e](x[rows]))
            case "counted":
                for (e,) in torch.bincount(chosen.flatten(), minlength=4).nonzero().tolist():
                    rows = torch.where(chosen[:, 1] == e)[0]
                    out[rows] += self.experts[e](x[rows])
            case "distinct":  # numbers below a bound
                for e in (chosen % 4).unique().tolist():
                    rows, _ = torch.where(chosen % 4 == e)
                    out.index_add_(0, rows, self.experts[e](x[rows]))
            case "distinct places":
                slot = one.flatten(1).argmax(1) % 4
                for e in torch.unique(slot.to(torch.int32), sorted=False):
                    out[slot == e] += self.experts[int(e)](x[slot == e])
            case "distinct and counted":
                found, counts = torch.unique(one.topk(1).indices.flatten(), return_counts=True)
                for e in found.tolist():
                    rows, _ = torch.where(chosen == e)
                    out.index_add_(0, rows, self.experts[e](x[rows]) / counts.sum())
            case "twice":
                first, last = (one[:, slot].amax(0) for slot in range(2))
                for e in torch.where(first)[0]:
                    rows = torch.where(one[:, 0, e])[0]
                    if len(rows):
                        out[rows] += self.experts[int(e)](x[rows])
                for e in torch.where(last > 0)[0]:
                    out[one[:, 1, e] > 0] = self.experts[int(e)](x[one[:, 1, e] > 0])
            case "full":  # experts take three tokens
                taken = (one * (one.cumsum(0) <= 3)).permute(2, 1, 0)
                for e in torch.greater(taken.sum((-1, -2)), 0).nonzero():
                    _, rows = torch.where(taken[e].squeeze(0))
                    out.index_add_(0, rows, self.experts[int(e)](x[rows]))
            case "shifted":
                shifted = F.one_hot(chosen + 1, 5)[..., 1:]
                for e in shifted.sum((0, 1)).nonzero().flatten():
                    rows = torch.where(shifted[:, 0, e])[0]
                    out[rows] += self.experts[int(e)](x[rows])
            case "unrelated":
                for e in other.nonzero():
                    rows, _ = torch.where(here[e].squeeze(0))
                    out.index_add_(0, rows, self.experts[int(e)](x[rows]))
            case "crowded":  # experts of one token are left out
                for e in (one.sum((0, 1)) > 1).nonzero():
                    rows, _ = torch.where(here[e].squeeze(0))
                    out.index_add_(0, rows, self.experts[int(e)](x[rows]))
            case "next":
                for e in here.any(-1).any(-1).nonzero().flatten().tolist():
                    rows, _ = torch.where(chosen == (e + 1) % 4)
                    out.index_add_(0, rows, self.experts[e](x[rows]))
            case "other slot":
                for e in one[:, 0].sum(0).nonzero().flatten().tolist():
                    rows = torch.where(chosen[:, 1] == e)[0]
                    out[rows] += self.experts[e](x[rows])
            case "other dimension":
                for token in here.any(0).any(1).nonzero().flatten().tolist():
                    rows, _ = torch.where(here[token % 4])
                    out.index_add_(0, rows, self.experts[token % 4](x[rows]))
            case "changed":
                hit = here.flatten(1).any(1)
                one[:, 0] = one[:, 0].roll(1, 1)
                for e in hit.nonzero().flatten().tolist():
                    rows, _ = torch.where(one[..., e])
                    out.index_add_(0, rows, self.experts[e](x[rows]))
            case "rounded":
                for e in (one.sum((0, 1)) / 2).int().nonzero().flatten().tolist():
                    rows, _ = torch.where(here[e])
                    out.index_add_(0, rows, self.experts[e](x[rows]))
            case "numbered":
                for number, e in enumerate(here.flatten(1).any(1).nonzero().flatten().tolist()):
                    rows, _ = torch.where(here[e])
                    out.index_add_(0, rows, self.experts[e](x[rows]) * (number + 1))
            case "first":
                for e in here.flatten(1).any(1).nonzero().flatten().tolist():
                    rows, _ = torch.where(here[e])
                    out.index_add_(0, rows, self.experts[e](x[rows]))
                    break
            case "first two":
                for _, e in zip(range(2), here.flatten(1).any(1).nonzero().flatten().tolist(), strict=False):
                    rows, _ = torch.where(here[e])
                    out.index_add_(0, rows, self.experts[e](x[rows]))
            case "after the last":
                before = 0
                for e in range(4):
                    rows = torch.where(chosen[:, 0] == e)[0]
                    if len(rows):
                        out[rows] += self.experts[e](x[rows]) * (e - before)
                        before = e
            case "reversed":
                for e in reversed(other.nonzero().flatten().tolist()):
                    rows, _ = torch.where(here[e])
                    out.index_add_(0, rows, self.experts[e](x[rows]))
            case "listed":
                for e in list(other.nonzero().flatten()):
                    rows, _ = torch.where(here[e])
                    out.index_add_(0, rows, self.experts[int(e)](x[rows]))
            case "pairs":
                for e, f in (other[:, None] & other).nonzero():
                    rows, _ = torch.where(here[e])
                    out.index_add_(0, rows, self.experts[0](x[rows]) * f)
            case "before":  # a test before the branch, of another mask
                some = bool(other.any())
                assert here.any()
                y = x * 2
                if some:
                    out[here[0, :, 0]] = y[here[0, :, 0]]
        return self.head(out).square().mean()


def choices(*experts: int) -> dict[str, Tensor]:
    """A batch whose tokens choose only some experts, and one of them once."""
    chosen = torch.tensor([experts[0]] * 15 + [experts[-1]])[torch.randperm(16)].view(8, 2)
    return {"x": torch.randn(8, 8, dtype=torch.float64), "chosen": chosen, "other": torch.arange(4) % 2 == 0}


@pytest.mark.parametrize(
    "style",
    [
        "marked", "compared", "counted", "distinct", "distinct places", "distinct and counted", "twice", "full",
        "shifted", "before",
    ],
)  # fmt: skip
def test_loops_over_chosen_experts_leave_out_the_others(style: str) -> None:
    equals_eager(lambda: Hits(style), [choices(0, 1), choices(3, 1), choices(2), choices(1, 0)])


@pytest.mark.parametrize(
    "style",
    [
        "unrelated", "crowded", "next", "other slot", "other dimension", "changed", "rounded", "numbered", "first",
        "first two",
    ],
)  # fmt: skip
def test_other_loops_over_places_are_branches(style: str) -> None:
    equals_eager(lambda: Hits(style), [choices(0, 1), choices(3, 1), choices(2), choices(1, 0)])


@pytest.mark.parametrize("style", ["reversed", "listed", "pairs", "after the last"])
def test_loops_over_places_in_another_order_are_refused(style: str) -> None:
    with pytest.raises(PartcError) as error:
        equals_eager(lambda: Hits(style), [choices(0, 1), choices(3, 1)])
    assert error.value.code == "P0206" and error.value.source is not None
    assert "test_selections.py" in error.value.source.file


class InnerTest(nn.Module):
    """Two weights, one of them behind two tests that do not depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
        mask, every = chosen[:, 0] == 1, chosen[:, 1] == 0
        x = x.clone()
        if mask.any():
            x[mask] = self.outer(x[mask])
            if every.any():
                both = mask & every
                x[both] = x[both] + self.inner(x[both])
        return self.head(x).square().mean()


@pytest.mark.parametrize(
    ("made", "counted"),
    [
        (lambda: Hits("marked"), 8), (lambda: Hits("none"), 0), (InnerTest, 2),
    ],
)  # fmt: skip
def test_weights_that_no_example_reaches_are_counted_or_named(made: Callable[[], nn.Module], counted: int) -> None:
    found = trace_model(made, lambda: choices(0, 1), name="m", mesh=Mesh.parse("1"))
    assert len(found.program.reached) == counted
    assert parse(print_program(found.program)).reached == found.program.reached
    named = [line for line in found.assumed if "inner.weight and 1 more" in line and "test_selections.py" in line]
    assert len(found.assumed) == len(named) == (made is InnerTest)


class AdaptiveLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(16, 40, [10, 20], div_value=2.0, head_bias=True)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(x, labels).loss + self.loss(x[0], labels[0]).output


def test_clusters_of_classes_compute_all_rows() -> None:
    every, few = torch.randint(40, (12,)), torch.randint(9, (12,))
    equals_eager(AdaptiveLoss, [{"x": torch.randn(12, 16, dtype=torch.float64), "labels": x} for x in (every, few)])


class ConstantLengths(nn.Module):
    """Lengths of documents that are constants: repeated, found, and made unique while the model is traced."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([2, 3, 1])
        document = torch.repeat_interleave(torch.arange(3), lengths)
        place = torch.arange(6) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        y = torch.cat([part.softmax(1) for part in x.split(lengths.tolist(), 1)], 1) * (place + document)[:, None]
        found, count = torch.unique(document, return_counts=True)
        kept = y[:, torch.nonzero(document != 1)[:, 0]].square().mean() * torch.tensor([lengths.max(), 1]).sum()
        return kept + y[:, torch.where(document == 1)[0]].sum() * found.sum() + (y[:, :3] * count[:, None]).mean()


def test_constant_lengths_are_constants() -> None:
    equals_eager(ConstantLengths, [{"x": torch.randn(8, 6, 8, dtype=torch.float64)}])


class PlacedRows(nn.Module):
    """Features of pictures at the places of texts that a mask marks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(8, 6), nn.Linear(4, 6)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        x = self.words(ids)
        x[ids == 7] = self.body(features).view(-1, 6)
        return (x * torch.arange(6)).square().mean()


def test_rows_are_assigned_in_the_order_of_a_mask() -> None:
    places = [torch.randperm(5) for _ in range(3)]
    batches = [{"ids": torch.where(order < 2, 7, order).expand(4, 5), "features": torch.randn(4, 2, 4, dtype=torch.float64)}
               for order in places]  # fmt: skip
    equals_eager(PlacedRows, batches)


@pytest.mark.parametrize(("mesh", "counts"), [("dp=2,tp=2", "2" * 8), ("dp=2,pp=2", "2" * 8), ("dp=2", "03140314")])
def test_pictures_take_their_places_in_texts(mesh: str, counts: str, tmp_path: Path) -> None:
    made = partc.compile(str(PICTURES), mesh=mesh, microbatches=2, precision="fp64", options={"counts": counts})
    assert not made.warnings
    assert made.coverage.ops == 1
    found = verify(made.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok, str(found.worst)


def test_examples_with_other_numbers_of_places_are_refused() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    assert selected_places(mask, 2).tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    mask[1, 2] = True
    with pytest.raises(RuntimeError, match="has to select 2 elements"):
        selected_places(mask, 2)


def packed(rows: Tensor) -> dict[str, Tensor]:
    ids = torch.arange(5).expand(8, 5).masked_fill(torch.arange(5) < 2, 7)
    return {"ids": ids, "features": rows}


class RowsInOrder(PlacedRows):
    """The examples depend on each other, so that each microbatch is a batch of its own."""

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        return super().forward(ids, features) + self.words(ids).flatten(1).cumsum(0).square().mean()


@pytest.mark.slow
def test_packed_rows_of_all_examples_are_refused_where_a_batch_has_places_for_some() -> None:
    """Each microbatch would read the rows of the first examples. An entry with a row for each example is cut."""
    rows = torch.randn(8, 2, 4, dtype=torch.float64)
    given: dict[str, Any] = {"mesh": "pp=2", "precision": "fp64"}
    assert partc.compile(RowsInOrder, packed(rows), microbatches=2, **given).verify(steps=2).ok
    assert partc.compile(RowsInOrder, packed(rows.flatten(0, 1)), **given).verify(steps=2).ok
    assert partc.compile(PlacedRows, packed(rows.flatten(0, 1)), microbatches=2, **given).verify(steps=2).ok
    with pytest.raises(PartcError, match=r"reads the whole entry features, and writes 96 .* has 48") as error:
        partc.compile(RowsInOrder, packed(rows.flatten(0, 1)), microbatches=2, **given)
    assert error.value.code == "P0402" and error.value.source is not None
    assert error.value.source.file == __file__


class Narrowed(nn.Module):
    """Places of a mask's elements, from which further masks over the selected elements choose some."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.body = style, nn.Linear(8, 8)

    def forward(self, x: Tensor, flags: Tensor, other: Tensor) -> Tensor:
        scores = self.body(x)
        made = torch.zeros_like(scores)
        if self.style == "rows":
            row = torch.where(flags)[0]
            kept = scores[row]
            some = kept[:, 0] > 0
            made[row[some]] = kept[some] * 2
            return made.square().mean() + scores.mean()
        row, column = torch.where(x > 0)
        kept = scores[row, column]
        some = kept > 0
        row, column, kept = row[some], column[some], kept[some]
        if self.style == "added":
            made[row, column] += kept * 2
        elif self.style == "read":
            made = made + (x[row, column] * kept).sum()
        elif self.style == "three":
            some = x[row, column] > 0.5
            made[row[some], column[some]] = kept[some].sin()
        elif self.style == "number":
            made[row, column] = 3.0
            made = made * scores
        else:
            made[row, column] = kept
        return made.square().mean() + scores.mean()


@pytest.mark.parametrize("style", ["rows", "elements", "added", "read", "three", "number"])
def test_masks_choose_among_places_that_a_mask_has_found(style: str) -> None:
    some, none = torch.arange(8) % 3 == 0, torch.zeros(8, dtype=torch.bool)
    batches = [flagged(some, ~some), flagged(none, some), flagged(~none, some)]
    batches[1]["x"] = -batches[1]["x"].abs()
    equals_eager(lambda: Narrowed(style), batches)


class AddedInLayers(nn.Module):
    """Rows of pictures, packed over all examples, are added at their places after each layer."""

    drops = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.words, self.seen, self.drop = nn.Embedding(9, 8), nn.Linear(4, 8), nn.Dropout(self.drops)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        places, rows = ids == 7, self.seen(features)
        x = self.drop(self.words(ids))
        for layer in self.layers:
            x = layer(x)
            added = x[places] + rows
            x = x.clone()
            x[places] = added
        return (x * torch.arange(8)).square().mean()


class AddedAndDropped(AddedInLayers):
    drops = 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kind"), [("dp=2,pp=2", AddedInLayers), ("dp=2,tp=2", AddedAndDropped)])
def test_packed_rows_are_added_in_every_layer(mesh: str, kind: type[nn.Module]) -> None:
    """The call that embeds the words also makes the places, and each microbatch has to know those of the whole batch."""
    torch.manual_seed(0)
    rows = torch.randn(8 * 2, 4, dtype=torch.float64)
    made = partc.compile(kind, packed(rows), mesh=mesh, microbatches=2, precision="fp64")
    assert not made.warnings
    assert made.verify(steps=2).ok
