"""An LSTM with projected states, a peephole by hand, layer norms of gates, states that a learned start gives."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=2, proj_size=4, batch_first=True, bias=False)
        self.hidden, self.cell = nn.Parameter(torch.randn(2, 1, 4) * 0.3), nn.Parameter(torch.randn(2, 1, 8) * 0.3)
        self.rnn = nn.RNN(4, 6, nonlinearity="relu")
        self.gates, self.norm = nn.GRUCell(6, 4), nn.LayerNorm(4)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b = x.shape[0]
        h, (_, cell) = self.lstm(x, (self.hidden.repeat(1, b, 1), self.cell.repeat(1, b, 1)))
        h, last = self.rnn(h.transpose(0, 1))
        state = self.norm(cell[-1, :, :4])
        for t in range(h.shape[0]):
            state = self.norm(self.gates(h[t], state))
        return F.mse_loss(self.out(state + last[0, :, :4]).squeeze(-1), y)


def model() -> nn.Module:
    return Projected()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 5, 5, generator=generator)
    return {"x": x, "y": x.mean((1, 2))}
