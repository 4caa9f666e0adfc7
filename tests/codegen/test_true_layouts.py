"""Layouts in the IR and in comments of emitted code are those of the ranks' tensors."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partc
from partc.errors import InternalError
from partc.ir.layout import Layout
from partc.ir.mesh import Mesh
from partc.ir.operators import DTYPES
from partc.ir.program import Op, Ref, TensorType, Value
from partc.rules.inference import Inferred, inferred, reshaped
from partc.rules.layout_check import Verifier
from tests.prefork import done
from tests.zoo import EXAMPLES, MODELS

SIZES = {"dp": 2, "tp": 4}


def typed(layout: str) -> TensorType:
    return TensorType(dtype="f32", layout=Layout.parse(layout))


@pytest.mark.parametrize(
    ("op", "operands", "local", "expected"),
    [
        (Op(name="linear", args=(Ref("a"), Ref("b"))), ("[8@dp, 16@tp]", "[6, 16@tp]"), (4, 6), "[8@dp, 6] partial(tp)"),
        (Op(name="linear_grad_weight", args=(Ref("a"), Ref("b"))), ("[8@dp, 12@tp]", "[8@dp, 6]"), (3, 6), "[12@tp, 6] partial(dp)"),
        (Op(name="mul", args=(Ref("a"), Ref("b"))), ("[8@dp, 16] partial(tp)", "[16]"), (4, 16), "[8@dp, 16] partial(tp)"),
        (Op(name="permute", args=(Ref("a"), (1, 0))), ("[8@dp, 16@tp]",), (4, 4), "[16@tp, 8@dp]"),
        (Op(name="reshape", args=(Ref("a"), (4, 2, 8))), ("[8@dp, 64@tp]",), (4, 2, 8), "[8@dp, 8@tp, 8]"),
        (Op(name="reduce_scatter", args=(Ref("a"),), attrs=(("dim", 1), ("axis", "tp"))), ("[8@dp, 16] partial(tp)",), (4, 4), "[8@dp, 16@tp]"),
        (Op(name="all_gather", args=(Ref("a"),), attrs=(("dim", 1), ("axis", "tp"))), ("[8@dp, 16@tp]",), (4, 16), "[8@dp, 16]"),
        (Op(name="slice", args=(Ref("a"), 1, 1, 4, 2)), ("[8@dp, 2 · 8@tp]",), (4, 2), "[8@dp, 2 · 4@tp]"),
        (Op(name="cat", args=((Ref("a"), Ref("b")), 0)), ("[8, 16@tp]", "[0, 16@tp]"), (8, 4), "[8, 16@tp]"),
        (Op(name="put", args=(Ref("a"),), attrs=(("dim", 1), ("axis", "tp"))), ("[8, 16@tp]",), (8, 16), "[8, 16] partial(tp)"),
        (Op(name="index_put", args=(Ref("a"), (Ref("b"),), Ref("b"), True)), ("[4]", "[8@dp]"), (4,), "[4] partial(dp)"),
        (Op(name="silu_backward", args=(Ref("a"), Ref("b"))), ("[8@dp, 16@tp]", "[8@dp, 16@tp]"), (4, 4), "[8@dp, 16@tp]"),
        (Op(name="convolution_backward", args=(Ref("a"), Ref("b"), Ref("c"))), ("[8@dp, 2, 6]", "[8@dp, 16, 8]", "[2, 16, 3] partial(tp)"), (4, 16, 8), "[8@dp, 16, 8] partial(tp)"),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)  # fmt: skip
def test_results_are_cut_like_the_factors_they_have(
    op: Op, operands: tuple[str, ...], local: tuple[int, ...], expected: str
) -> None:
    types = {name: typed(layout) for name, layout in zip("abc", operands, strict=False)}
    result = Value(name="y", type=TensorType.replicated("f32", local))
    (found,) = inferred(replace(op, results=(result,)), types, SIZES)
    assert found is not None and found.layout.normalized(SIZES) == Layout.parse(expected)


def test_elements_keep_their_place_in_another_shape() -> None:
    found = reshaped(Layout.parse("[8@dp · 64@tp]"), (4, 16), SIZES)
    assert found is not None and found.layout == Layout.parse("[8@dp, 64@tp]")
    assert reshaped(Layout.parse("[8@dp, 6]"), (3, 8), SIZES) is None


def test_dimensions_of_one_element_take_no_cut_from_their_neighbours() -> None:
    found = reshaped(Layout.parse("[8@dp, 8 · 4@tp, 16]"), (4, 8, 1, 16), SIZES)
    assert found is not None and found.layout == Layout.parse("[8@dp, 8 · 4@tp, 1, 16]")


def test_elements_keep_their_order_in_the_same_local_shape() -> None:
    """A cut may move to the end of the dimension before, but not in front of it."""
    found = reshaped(Layout.parse("[4, 8@dp, 12]"), (4, 4, 12), SIZES)
    assert found is not None and found.layout == Layout.parse("[4, 8@dp, 12]")
    for layout, allowed in (("[4 · 2@dp, 4, 12]", True), ("[8@dp, 4, 12]", False), ("[4, 4 · 2@dp, 12]", False)):
        assert found.allows(Layout.parse(layout), SIZES) is allowed, layout


def test_one_block_of_a_dimension_is_also_a_contribution_to_the_sum_of_blocks() -> None:
    """Gradients of repeated rows, where a rank has one copy of the rows."""
    for found, stated, allowed in (
        ("[8@dp, 4]", "[4, 4] partial(dp)", True),
        ("[4, 4] partial(dp)", "[8@dp, 4]", True),
        ("[8@dp, 4]", "[4, 4]", False),
        ("[4, 4]", "[8@dp, 4]", False),
        ("[8@dp, 4]", "[2, 4] partial(dp)", False),
        ("[16@dp,tp, 4]", "[8@tp, 4] partial(dp)", True),
        ("[16@dp,tp, 4]", "[8@dp, 4] partial(tp)", False),
    ):
        made = Inferred(Layout.parse(found))
        assert made.allows(Layout.parse(stated), SIZES) is allowed, (found, stated)


def test_a_time_step_is_no_row_where_a_rank_has_as_many_of_both(tmp_path: Path) -> None:
    """The values of a frozen recurrent layer are cut over dp where its rows are, whatever the number of a rank's rows."""
    cut = {}
    for rows in (8, 12):
        file = tmp_path / f"recurrent_{rows}.py"
        file.write_text(RECURRENT.format(rows=rows))
        regions = partc.compile(file, mesh="dp=2", precision="fp64").program.regions
        types = [value.type for region in regions for op in region.forward.ops for value in op.results]
        cut[rows] = [str(type.layout).replace(str(rows), "rows") for type in types]
    assert cut[8] == cut[12] and not any("local" in layout for layout in cut[8])


def test_a_layout_that_its_operands_do_not_make_is_refused() -> None:
    program = partc.compile(MODELS["gpt"].source(EXAMPLES), mesh="1x2x2", microbatches=2).program
    Verifier()(program, frozenset({"local"}), "schedule")
    index = next(i for i, region in enumerate(program.regions) if region.name == "block")
    backward = program.regions[index].backward
    assert backward is not None
    wrong = next(
        i for i, op in enumerate(backward.ops) if op.name == "linear_grad_input" and op.result.type.layout.axes
    )
    op = backward.ops[wrong]
    local = replace(op, results=(replace(op.result, type=op.result.type.local(program.sizes)),))
    graph = replace(backward, ops=(*backward.ops[:wrong], local, *backward.ops[wrong + 1 :]))
    regions = list(program.regions)
    regions[index] = replace(regions[index], backward=graph)
    with pytest.raises(InternalError, match=f"{op.result.name} = linear_grad_input is"):
        Verifier()(replace(program, regions=tuple(regions)), frozenset({"local"}), "schedule")


RECURRENT = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(10, 10), nn.RNN(10, 5, batch_first=True, bidirectional=True).requires_grad_(False))

def batch():
    return {{"x": torch.randn({rows}, 4, 10)}}

def loss(model, batch):
    return model(batch["x"])[0].square().mean()
"""
RUN = """
import runpy, sys, threading
from pathlib import Path
import torch
root, steps = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(root))
from runtime.comm import virtual
place, seen, counts = threading.local(), {}, {}

def note(line, name, value):
    if isinstance(value, torch.Tensor):
        rank = getattr(place, "rank", 0)
        turn = counts[rank, line] = counts.get((rank, line), 0) + 1
        seen[line, name, turn, rank] = value.detach().clone()

def run(self, work, before=virtual.World.run):
    def here(number):
        place.rank = number
        work(number)
    before(self, here)

virtual.World.run = run
import builtins
builtins.note_layout = note
sys.argv = ["train.py", "--virtual", "--steps", steps, "--no-tuning"]
try:
    runpy.run_path(str(root / "train.py"), run_name="__main__")
except SystemExit as done:
    assert not done.code
torch.save(seen, root / "seen.pt")
"""
TYPE = re.compile(r"# (each )?([a-z]+\d+|bool)(\[.*)$")
NAMED = re.compile(r"(\w+): ([a-z]+\d+|bool)(\[[^\]]*\](?: (?:partial|vary|local)\([^)]*\))*)")


def commented(lines: list[str], node: ast.Assign) -> dict[str, tuple[str, str]]:
    """The types in the comments of an assignment, by the variables: behind it, or above it if they are several."""
    assert node.end_lineno is not None
    target = node.targets[0]
    names = [each.id for each in getattr(target, "elts", [target]) if isinstance(each, ast.Name) and each.id != "_"]
    if comment := TYPE.search(lines[node.end_lineno - 1]):
        return {name: (comment[2], comment[3]) for name in (names if comment[1] else names[:1])}
    above = list(itertools.takewhile(lambda line: line.strip().startswith("#"), reversed(lines[: node.lineno - 1])))
    said = " ".join(line.strip(" #") for line in reversed(above))
    return {name: (dtype, layout) for name, dtype, layout in NAMED.findall(said) if name in names}


def noted(path: Path) -> dict[str, tuple[str, str]]:
    """Have a region's functions tell each value that has a comment; the comments by place in the file."""
    text = path.read_text()
    lines = text.split("\n")
    found: dict[str, tuple[str, str]] = {}
    after: dict[int, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and node.end_lineno is not None and node.col_offset == 4:
            for name, type in commented(lines, node).items():
                key = f"{path.stem}:{node.end_lineno} {name}"
                found[key] = type
                told = f"    note_layout({key!r}, {name!r}, {name})"
                after[node.end_lineno] = "\n".join(filter(None, (after.get(node.end_lineno), told)))
    path.write_text(
        "\n".join(
            text for number, line in enumerate(lines, 1) for text in (line, after.get(number)) if text is not None
        )
    )
    return found


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pipeline, data and tensors": ("gpt", {"mesh": "2x2x2", "microbatches": 2}),
    "zero 3, bf16, recomputed": ("gpt", {"mesh": "1x2x2", "zero": 3, "precision": "bf16", "recompute": "selective"}),
    "kernels": ("gpt", {"mesh": "1x1x2", "kernels": "triton"}),
    "halves of backward": ("gpt2_dropout", {"mesh": "2x1x2", "microbatches": 2, "schedule": "zero-bubble"}),
    "experts": ("mixture", {"mesh": "1x2x2"}),
    "convolutions": ("resnet", {"mesh": "1x2x2"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_comments_of_emitted_values_are_what_ranks_see(name: str, tmp_path: Path) -> None:
    """Local shapes follow from them; values are equal on the ranks of axes that they do not name."""
    model, options = CASES[name]
    source = MODELS[model]
    package = partc.compile(source.source(tmp_path), options=source.options, **options)
    folder = package.write(tmp_path / "build")
    mesh: Mesh = package.program.mesh
    comments = {key: found for path in (folder / "regions").glob("*.py") for key, found in noted(path).items()}
    (tmp_path / "run.py").write_text(RUN)
    ended = done([tmp_path / "run.py", folder, 1])
    assert ended.returncode == 0, ended.stderr[-3000:]
    seen: dict[tuple[str, str, int, int], Tensor] = torch.load(folder / "seen.pt")
    assert len({key[0] for key in seen}) > 20
    once = {region.name for region in package.program.regions if region.phase == "step"}
    groups: dict[tuple[str, str, int, Any], dict[int, Tensor]] = defaultdict(dict)
    for (line, value, turn, rank), x in seen.items():
        dtype, text = comments[line]
        layout = Layout.parse(text)
        sizes = {**package.program.sizes, **({"mb": 1} if line.partition(":")[0] in once else {})}
        assert tuple(x.shape) == layout.local_shape(sizes), f"{line} {value}: {tuple(x.shape)} is not {text}"
        assert DTYPES[dtype] == x.dtype, f"{line} {value}"
        place = mesh.coordinate(rank)
        apart = {
            axis: index
            for axis, index in place.items()
            if axis == "pp" or axis in (*layout.sharded_axes, *layout.partial)
        }
        groups[line, value, turn, tuple(apart.items())][rank] = x
    compared = 0
    for (line, value, *_), held in groups.items():
        for (_, a), (_, b) in itertools.pairwise(held.items()):
            compared += 1
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{line} {value} is not equal on ranks {list(held)}"
    assert compared > 0


def test_convolutions_whose_operands_all_have_one_local_shape(tmp_path: Path) -> None:
    """A gate over channels, as SE networks have: 8 images of 8 of 32 channels, and 8 x 8 of its kernels' elements."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv, self.last = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 1)\n"
        "        self.down, self.up = nn.Conv2d(32, 8, 1, bias=False), nn.Conv2d(8, 32, 1, bias=False)\n"
        "    def forward(self, x):\n"
        "        x = self.conv(x)\n"
        "        gate = self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()\n"
        "        return self.last(x * gate).square().mean()\n\n"
        "def model(): return Net()\n"
        "def batch(): return {'x': torch.randn(8, 3, 6, 6)}\n"
    )
    assert partc.compile(tmp_path / "net.py", mesh="tp=4", precision="fp64").verify(steps=1).ok
