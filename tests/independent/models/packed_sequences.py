"""Packed sequences of lengths that are data: both directions, layers, projections, states given and taken."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.short = nn.LSTM(10, 6, proj_size=4, bias=False, batch_first=True)
        self.gru, self.rnn = nn.GRU(6, 5, bidirectional=True), nn.RNN(10, 5, nonlinearity="relu")
        self.start = nn.Parameter(torch.randn(2, 1, 5))
        self.head = nn.Linear(10, 3)

    def forward(self, ids: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
        x = self.table(ids)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        made, (h, c) = self.lstm(packed)
        last = self.short(made)[1]
        rows, _ = pad_packed_sequence(made, batch_first=True, total_length=ids.shape[1])
        start = self.start.expand(-1, len(ids), -1).contiguous()
        turned, k = self.gru(pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False), start)
        again = self.rnn(turned)[1]
        columns, counts = pad_packed_sequence(turned, total_length=8, padding_value=-1.0)
        ends = sum(each.square().mean() for each in (*last, again, k))
        features = torch.cat([h[-2], h[-1]], 1) + torch.cat([c[0], c[3]], 1) + rows.sum(1) + columns.sum(0)
        return F.cross_entropy(self.head(features), label) + ends * counts.sum() * 0.01


def model() -> nn.Module:
    return Packed()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    ids, label = torch.randint(12, (16, 6), generator=g), torch.randint(3, (16,), generator=g)
    return {"ids": ids, "lengths": torch.randint(1, 7, (16,), generator=g), "label": label}
