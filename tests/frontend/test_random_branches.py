"""Branches on random numbers, such as dropped layers, in every spelling, against the eager model."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.frontend.trace import trace_model
from partc.ir.mesh import Mesh

WIDTH = 12


class Layer(nn.Module):
    """A layer with a dropout, whose random numbers follow those of the branch before it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Dropping(Layer):
    """A layer that decides itself."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(1) < 0.4:
            return x
        return super().forward(x)


def skipped(net: Net, x: Tensor) -> Tensor:
    """Two branches on one test, as in decoders of Hugging Face."""
    for layer in net.layers:
        skip = net.training and torch.rand([]) < 0.4
        if not skip:
            x = layer(x)
        if skip:
            continue
    return x


def survived(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        if torch.rand(1).item() <= 0.6:
            x = layer(x)
    return x


def by_flag(net: Net, x: Tensor) -> Tensor:
    """Results in tuples, of which one is not read, as Hugging Face writes it; the numbers are drawn at once."""
    states: list[Tensor] = [x]
    numbers = torch.rand(len(net.layers))
    for index, layer in enumerate(net.layers):
        drop = bool(numbers[index] < 0.4)
        results: tuple[Tensor | None, ...] = (None, None)
        if not drop:
            results = (layer(x), layer.up(x))
        if results[0] is not None:
            x = results[0]
        states.append(x)
    return torch.stack(states).sum(0)


def summed(net: Net, x: Tensor) -> Tensor:
    """Layers that add up their terms in place, also through a view."""
    for layer in net.layers[:3]:
        if torch.rand(()) < 0.5:
            terms = torch.zeros_like(x)
            terms += layer.down(layer.up(x))
            terms[:, 1:].add_(layer.norm(x)[:, 1:])
            x = terms + x
    return x


def within(net: Net, x: Tensor) -> Tensor:
    for layer in net.dropping:
        x = layer(x)
    return x


def single(net: Net, x: Tensor) -> Tensor:
    if not torch.rand(()) >= 0.5:
        x = net.layers[0](x)
    return net.layers[1](x)


def normed(net: Net, x: Tensor) -> Tensor:
    """A layer with statistics of batches that is dropped again and again, and a count of its calls in a view of a
    buffer.
    """
    for _ in range(4):
        if torch.rand(()) < 0.5:
            x = net.statistics(x)
            net.calls[0].add_(1)
    return x + net.calls


def changing(net: Net, x: Tensor) -> Tensor:
    return net.layers[0](x * 2 if torch.rand(()) < 0.5 else x + 1)


def selecting(net: Net, x: Tensor) -> Tensor:
    """A layer for the rows of a mask, which a branch on a random number changes."""
    if torch.rand(()) < 0.5:
        x = net.layers[0](x)
    out, chosen = x.clone(), x[:, 0] * net.head.weight[0, 0] > 0
    if len(rows := torch.where(chosen)[0]):
        out[rows] = net.layers[1].norm(x[rows])
    return out


class Net(nn.Module):
    calls: Tensor

    def __init__(self, body: Callable[[Net, Tensor], Tensor] = skipped) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.dropping = nn.ModuleList(Dropping() for _ in range(3))
        self.head, self.body = nn.Linear(WIDTH, 4), body
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(F.dropout(self.body(self, x), 0.1, self.training)), y)


@functools.lru_cache(maxsize=4)
def positions(count: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, count)


def by_values(net: Net, x: Tensor) -> Tensor:
    """Branches on values, of which the outcomes draw differently often; a cache is filled in the first step."""
    x = x + positions(WIDTH)
    for place, layer in enumerate(net.layers):
        x = layer(x) if x[:, place].sum() > 0 else x + F.dropout(F.dropout(x, 0.2), 0.1)
    return x


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, WIDTH), "y": torch.randn(8, 4)}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("body", "mesh"),
    [
        (skipped, "pp=2,dp=2,tp=2"),
        (survived, "dp=2,tp=2"),
        (by_flag, "tp=2"),
        (summed, "dp=2,tp=2"),
        (within, "pp=3,dp=2"),
        (single, "dp=2"),
        (normed, "dp=2"),
        (changing, "dp=2"),
        (selecting, "dp=2"),
        (by_values, "dp=2"),
    ],
)
def test_layers_that_a_random_number_drops(body: Callable[[Net, Tensor], Tensor], mesh: str) -> None:
    """The reference runs the model eagerly: a dropped layer neither runs nor draws there."""
    torch.manual_seed(0)
    microbatches = 2 if "pp" in mesh else 1
    package = partc.compile(Net(body), batch(), mesh=mesh, microbatches=microbatches, precision="fp64")
    found = package.verify(steps=4)
    assert found.ok and len(set(found.losses)) == 4


class Terms(nn.Module):
    """Two terms of the loss, each of which a random number leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, 4) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.first(x), y)
        if torch.rand(()) < 0.5:
            loss = loss + self.second(x).square().mean()
        if torch.rand(()) < 0.5:
            loss = loss + self.third(x).sin().mean()
        return loss


@pytest.mark.slow
def test_terms_of_the_loss_that_a_random_number_drops() -> None:
    assert partc.compile(Terms(), batch(), mesh="dp=2", precision="fp64").verify(steps=4).ok


def test_layers_with_sums_in_place_are_left_alone_where_they_are_dropped() -> None:
    traced = trace_model(lambda: Net(summed), batch, name="net", mesh=Mesh.parse("1"), precision="fp64")
    parts = ("up.weight", "down.bias", "norm.weight")
    assert {f"layers.{i}.{part}" for i in range(3) for part in parts} <= {name for name, _ in traced.program.reached}
    assert not traced.assumed


@pytest.mark.slow
def test_numbers_of_a_dropped_layer_decide() -> None:
    """A number below the limit keeps the input of the layer: the other way round the choices would be swapped."""
    traced = trace_model(lambda: Net(skipped), batch, name="net", mesh=Mesh.parse("1"), precision="fp64")
    ops = {value.name: op for op in traced.program.regions[0].forward.ops for value in op.results}
    choices = [op for op in ops.values() if op.name == "where"]
    assert len(choices) == 5
    for op in choices:
        test, dropped, kept = op.refs()
        limit = ops[next(ops[test].refs())]
        assert limit.name == "lt" and limit.args[1] == 0.4
        assert ops[kept].name == "add" and (dropped == "x" or ops[dropped].name == "where")


def counting(net: Net, x: Tensor) -> Tensor:
    count = 0
    for layer in net.layers:
        if torch.rand(()) < 0.5:
            x, count = layer(x), count + 1
    return x / (count + 1)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (counting, "it changes"),
    ],
)
def test_other_changes_by_random_numbers_are_refused(body: Callable[[Net, Tensor], Tensor], cause: str) -> None:
    with pytest.raises(PartcError, match=cause) as caught:
        trace_model(lambda: Net(body), batch, name="net", mesh=Mesh.parse("1"), precision="fp64")
    assert caught.value.code == "P0206" and caught.value.source is not None
    assert caught.value.source.file.endswith("test_random_branches.py")
