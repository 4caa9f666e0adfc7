"""Code in the style of model libraries, against the eager model: checks, conversions, constants, strides, tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

import partc
from partc.errors import PartcError
from partc.frontend.graph_reader import repeated_part
from partc.frontend.strided_views import SLICED, windows
from partc.frontend.trace import Traced, trace_model
from partc.ir.mesh import Mesh
from tests.prefork import done

ROOT = Path(__file__).parents[2]
Body = Callable[["Net", Tensor], Tensor]
TILES = torch.linspace(-1, 1, 768).view(24, 32).repeat(8, 1)


def table() -> Tensor:
    """A view of a constant in single precision, which modules hold as a plain attribute."""
    return torch.FloatTensor([[float(i * j % 5) for j in range(8)] for i in range(6)]).unsqueeze(0)


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.body, self.places = nn.LayerNorm(8), body, table()
        self.register_buffer("filled", torch.zeros(1), persistent=False)
        self.rates = [float(rate) for rate in torch.linspace(0.5, 1.0, 2)]

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        self.ids = ids
        return F.mse_loss(self.body(self, x), y)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6, 8), "ids": torch.randint(16, (8, 6)), "y": torch.randn(8, 6, 8)}


def traced(body: Body) -> Traced:
    return trace_model(lambda: Net(body), batch, name="net", mesh=Mesh.parse("1"), precision="fp64")


def layer(net: Net, x: Tensor) -> Tensor:
    return x + net.down(F.gelu(net.up(net.norm(x))))


def converting(net: Net, x: Tensor) -> Tensor:
    net.up = net.up.to(net.norm.weight.dtype)
    return layer(net, x) * net.rates[1]


def asking(net: Net, x: Tensor) -> Tensor:
    """Code that leaves something out while it is traced, which it needs."""
    mask = None if torch.compiler.is_compiling() else torch.ones(8, 6, dtype=x.dtype)
    return layer(net, x) * mask[:, :, None]  # type: ignore[index]


def placed(net: Net, x: Tensor) -> Tensor:
    return layer(net, x + net.places.detach().type_as(x))


def counted(net: Net, x: Tensor) -> Tensor:
    size = torch.div(torch.tensor(x.shape[1]), 2, rounding_mode="trunc").item()
    return layer(net, x.view(8, int(size), 2, 8).flatten(1, 2))


def shared(net: Net, x: Tensor) -> Tensor:
    """One table that is read twice, whose rows may be cut."""
    return layer(net, x + net.words(net.ids) + net.words(net.ids.flip(1)))


def sliced(net: Net, x: Tensor) -> Tensor:
    """Every second row, and parts of rows, of values that may be cut."""
    x = layer(net, x)
    x = torch.cat((x[:, 0::2], x[:, 1::2]), 1)
    return layer(net, torch.cat((x[:, :4] * 2, x[:, 4:]), 1))


def windowed(net: Net, x: Tensor) -> Tensor:
    """Overlapping windows, of memory in order and of a transposed view."""
    x = layer(net, x)
    first = x.contiguous().as_strided((8, 2, 4, 8), (48, 16, 8, 1)).sum(1)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    second = turned.as_strided((8, 3, 2, 8), (8, 128, 64, 1)).sum(2)
    return x + F.pad(first, (0, 0, 0, 2)) + F.pad(second, (0, 0, 0, 3))


def told_otherwise(net: Net, x: Tensor) -> Tensor:
    """Code that takes more room while it is exported, and cannot."""
    if torch.compiler.is_exporting() or torch.compiler.is_compiling():
        raise NotImplementedError
    return layer(net, x)


def mapped(net: Net, x: Tensor) -> Tensor:
    """Functions of one example and of one pair of positions, which read weights."""
    places = torch.arange(6)
    seen = torch.vmap(torch.vmap(lambda i, j: j <= i, in_dims=(None, 0)), in_dims=(0, None))(places, places)
    found = torch.func.vmap(lambda rows, mask: layer(net, mask.to(rows.dtype) @ rows), in_dims=(0, None))(x, seen)
    scaled = torch.vmap(lambda row: 2 * torch.tanh(row * torch.tensor(0.5)))(x)  # a number first, and a constant
    return found * scaled + torch.func.jvp(torch.sin, (x,), (found,))[1]


def derived(net: Net, x: Tensor) -> Tensor:
    """Gradients of functions of all examples and of each one, by names that this module has imported."""
    own = lambda row: F.cross_entropy(row, torch.tensor(1)) + F.logsigmoid(row).sum()  # noqa: E731
    inverse = lambda row: torch.linalg.inv(row.outer(row) + torch.eye(8)).sum()  # noqa: E731
    found = vmap(vmap(grad(lambda row: own(row) + inverse(row))))(layer(net, x))
    own_slope = lambda row: F.linear(row.sin(), net.down.weight[:1, :8]).squeeze(-1)  # noqa: E731
    found = found + vmap(vmap(lambda row: torch.func.hessian(own_slope)(row).diagonal()))(x)
    return (
        found + grad(lambda x: layer(net, x).sin().sum())(x) + vmap(grad(lambda rows: layer(net, rows).cos().sum()))(x)
    )


def tiled(net: Net, x: Tensor) -> Tensor:
    """A large constant whose rows repeat for each example."""
    return layer(net, x) + TILES.to(x.dtype).view(8, 24, 32).flatten(1)[:, :48].view(8, 6, 8)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    "body", [converting, asking, placed, counted, shared, sliced, windowed, told_otherwise, mapped, derived, tiled]
)
def test_code_of_libraries_equals_the_eager_model(body: Body) -> None:
    torch.manual_seed(0)
    assert partc.compile(Net(body), batch(), mesh="dp=2,tp=2", precision="fp64").verify(steps=2).ok


@pytest.mark.parametrize(("shape", "size", "stride"), [
    ((8, 5), (3, 4, 5), (10, 5, 1)), ((2, 4, 5), (2, 3, 2, 5), (20, 5, 5, 1)), ((2, 3, 2, 5), (2, 5, 2, 5), (30, 5, 5, 1)),
    ((40,), (7, 2), (2, 1)),
])  # fmt: skip
def test_windows_are_what_as_strided_reads(
    shape: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    x = torch.randn(shape)
    found = windows(x, size, stride, None)
    assert found is not None
    made = x.reshape(found.shape).unfold(found.dim, found.size, found.step).narrow(found.dim, 0, found.count)
    assert torch.equal(made.movedim(-1, found.dim + 1), x.as_strided(size, stride))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1, ::2], lambda x: x.permute(2, 0, 1)[1:, 0], lambda x: x.view(-1)[5:17:3], lambda x: x[..., :1],
        lambda x: x.view(12, 5)[::3], lambda x: x.view(3, 2, 2, 5)[:, 1], lambda x: x[:, None, 2],
    ],
)  # fmt: skip
def test_views_are_slices(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(60.0).view(3, 4, 5)
    seen = view(x)
    place = seen.size(), seen.stride(), seen.storage_offset()
    read, written = SLICED.values()
    assert torch.equal(read(x, *place), seen)
    assert torch.equal(written(x, -seen, *place), x.as_strided_scatter(-seen, *place))


def test_large_constants_are_repetitions_of_a_literal() -> None:
    x = torch.arange(12.0).view(3, 4)
    for constant, part in ((x.repeat(1000, 1), x), (x.repeat(1, 1000), x), (x, x), (x.repeat(1000, 1).cumsum(0), None)):
        found = repeated_part(constant)
        assert found is None if part is None else found is not None and found[0].equal(part)
    program = traced(tiled).program
    assert sum(op.name == "constant" for region in program.regions for op in region.forward.ops) == 1


def test_reads_across_rows_are_no_windows() -> None:
    x = torch.randn(2, 4, 5)
    assert windows(x, (2, 3, 2, 5), (20, 10, 5, 1), None) is None
    assert windows(x, (2, 3, 2, 5), (20, 5, 5, 1), 5) is None
    assert windows(x, (2, 4, 5, 2), (20, 5, 2, 1), None) is None


def overlapping_columns(net: Net, x: Tensor) -> Tensor:
    return layer(net, x.transpose(1, 2).as_strided((8, 6, 8), (1, 2, 3)))


def growing(net: Net, x: Tensor) -> Tensor:
    out = layer(net, x) * net.filled[:, None]
    net.filled = torch.arange(6, dtype=x.dtype) * x.mean()  # read in the next step
    return out


@pytest.mark.parametrize(("body", "code", "cause"), [
    (overlapping_columns, "P0206", "as_strided"), (growing, "P0225", "filled"),
])  # fmt: skip
def test_code_that_packages_cannot_run_is_refused(body: Body, code: str, cause: str) -> None:
    with pytest.raises(PartcError, match=cause) as caught:
        traced(body)
    assert caught.value.code == code


def require(condition: Any, message: str) -> None:
    """A library's own check."""
    if isinstance(condition, Tensor):
        torch._check_tensor_all(condition)
    else:
        torch._check(condition)


def guarded(net: Net, x: Tensor) -> Tensor:
    require(net.ids < 16, "a word")
    torch._check(x.max().item() < 100)
    require(torch.ones(3) > 0, "constants")
    return layer(net, x)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="guards are found by the columns of instructions")
def branching(net: Net, x: Tensor) -> Tensor:
    return layer(net, x) if x.numpy().sum() > 0 else x


def branching_eagerly(net: Net, x: Tensor) -> Tensor:
    """Code that leaves a branch on values out while it is traced."""
    return layer(net, x) if torch.compiler.is_compiling() or x.sum() > 0 else x


def test_only_code_that_asks_is_traced_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    exports = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **named: exports.append(1) or export(*args, **named))
    with pytest.raises(PartcError, match="P0206"):
        traced(branching)
    assert len(exports) == 2  # the second one without calls left out
    assert "gelu" in {op.name for op in traced(branching_eagerly).program.regions[0].forward.ops}


def test_checks_of_torch_are_guards_at_the_callers_line() -> None:
    assumed = traced(guarded).assumed
    first = guarded.__code__.co_firstlineno + 1
    assert len(assumed) == 2
    assert "`net.ids < 16`" in assumed[0] and f"test_library_code.py:{first})" in assumed[0]
    assert "`x.max().item() < 100`" in assumed[1]


def test_a_check_that_fails_on_constants_raises(recwarn: pytest.WarningsRecorder) -> None:
    def failing(net: Net, x: Tensor) -> Tensor:
        require(torch.zeros(3) > 0, "constants")
        return layer(net, x)

    with pytest.raises(PartcError) as caught:
        traced(failing)
    assert caught.value.code == "P0206"
    assert not any("assigned during export" in str(said.message) for said in recwarn)


@pytest.mark.slow
def test_packages_below_other_folders_of_the_search_path_are_installed(tmp_path: Path) -> None:
    """`pip install --target` fills such folders. Their files belong into no package."""
    (tmp_path / "lib" / "blocks-1.dist-info").mkdir(parents=True)
    (tmp_path / "lib" / "blocks-1.dist-info" / "RECORD").write_text("blocks.py,,\n")
    (tmp_path / "lib" / "blocks.py").write_text("from torch import nn\nBlock = nn.Linear\n")
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom blocks import Block\n\ndef model():\n    return Block(4, 1)\n\n"
        "def batch():\n    return {'input': torch.randn(4, 4)}\n\n"
        "def loss(model, batch):\n    return model(**batch).sum()\n"
    )
    ended = done(
        ["-m", "partc", "compile", model, "--mesh", "2", "-o", tmp_path / "build"],
        {"PYTHONPATH": f"{ROOT}:{tmp_path / 'lib'}"},
    )
    assert ended.returncode == 0, ended.stderr
    assert not list((tmp_path / "build").rglob("blocks.py"))
