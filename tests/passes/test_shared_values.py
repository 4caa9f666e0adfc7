"""Values that several calls read, such as an encoder's results: they are gathered once, not in every layer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc

WIDTH = 16


class Cross(nn.Module):
    """A decoder's layer: attention to the encoder's results, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        given = self.q(self.norm(x)), self.k(states), self.v(states)
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in given)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Translator(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.table, self.words = nn.Embedding(24, WIDTH), nn.Embedding(24, WIDTH)
        self.encoder, self.end = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Cross() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 24)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.table(source)
        states = self.end(x + self.encoder(x).tanh())
        y = self.words(target)
        for layer in self.decoder:
            y = layer(y, states)
        return F.cross_entropy(self.head(y).transpose(1, 2), target.roll(-1, 1))


def _compiled(mesh: str, depth: int = 3, **more: Any) -> partc.Package:
    torch.manual_seed(0)
    batch = {name: torch.randint(24, (8, 8)) for name in ("source", "target")}
    return partc.compile(Translator(depth), batch, mesh=mesh, precision="fp64", **more)


def _moved(package: partc.Package, depth: int) -> tuple[Counter[str], Counter[str]]:
    """The collectives of a decoder layer, forward and backward."""
    program = package.program
    (layer,) = (region for region in program.regions if len(program.calls_to(region.name)) == depth)
    assert layer.backward is not None
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    forward, backward = (Counter(op.name for op in graph.ops) for graph in (layer.forward, layer.backward))
    return (
        Counter({name: forward[name] for name in names if forward[name]}),
        Counter({name: backward[name] for name in names if backward[name]}),
    )


def test_layers_gather_their_own_input_alone() -> None:
    """Two gathers and two scatters in each direction, as for a layer without an encoder (Korthikanti et al. 2022)."""
    assert _moved(_compiled("tp=2"), 3) == (Counter(all_gather=2, reduce_scatter=2),) * 2


def test_values_of_one_reader_keep_their_parts() -> None:
    """The residual stream is cut along the sequence between layers; the encoder's results are whole."""
    layouts = {value.name: str(value.type.layout) for value in _compiled("tp=2").program.values}
    assert layouts["states"] == "[8, 8, 16] vary(tp)"
    assert {layouts[name] for name in ("words", "out", "out_2", "out_3")} == {"[8, 8@tp, 16]"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("dp=2,tp=2", {"zero": 3, "microbatches": 2, "recompute": "full"}),
        ("pp=2,tp=2", {"microbatches": 4}),
        ("pp=2,tp=2", {"microbatches": 4, "schedule": "zero-bubble"}),
        ("cp=2,tp=2", {}),
    ],
)
def test_packages_train_like_one_device(mesh: str, how: dict[str, Any]) -> None:
    result = _compiled(mesh, **how).verify()
    assert result.ok, result.worst
