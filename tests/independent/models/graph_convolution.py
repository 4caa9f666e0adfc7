"""Message passing on one graph per sample: gather at sources, index_add at targets, degrees by hand."""

import torch
from torch import Tensor, nn


class Passing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.message = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = self.message(x).gather(1, source.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        heard = torch.zeros_like(x).scatter_add(1, target.unsqueeze(-1).expand_as(sent), sent)
        return (self.own(x) + heard / 3).relu()


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 8)
        self.layers = nn.ModuleList(Passing(8) for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor, value: Tensor) -> Tensor:
        x = self.into(nodes)
        for layer in self.layers:
            x = layer(x, source, target)
        return nn.functional.smooth_l1_loss(self.out(x.sum(1)).squeeze(-1), value)


def model() -> nn.Module:
    return Graphs()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    edges = torch.randint(0, 7, (2, 16, 12), generator=draw)
    nodes = torch.randn(16, 7, 5, generator=draw)
    return {"nodes": nodes, "source": edges[0], "target": edges[1], "value": nodes.sum((1, 2)) / 5}
