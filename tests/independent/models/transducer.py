"""A transducer's loss by hand: packed encoders, projected states, and a lattice of log-probabilities with lengths."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, WIDTH = 6, 8


class Transducer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.GRU(4, WIDTH, batch_first=True, bidirectional=True)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.predict = nn.LSTM(WIDTH, WIDTH, batch_first=True, proj_size=5)
        self.frames, self.labels = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(5, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, frames: Tensor, y: Tensor, count: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, frames, batch_first=True, enforce_sorted=False)
        f, _ = self.encode(packed)
        f, _ = nn.utils.rnn.pad_packed_sequence(f, batch_first=True, total_length=x.shape[1])
        g, _ = self.predict(self.embed(F.pad(y, (1, 0))))
        scores = self.out(torch.tanh(self.frames(f)[:, :, None] + self.labels(g)[:, None])).log_softmax(-1)
        batch, times, labels, _ = scores.shape
        blank = scores[..., 0]
        label = scores[:, :, :-1].gather(-1, y[:, None, :, None].expand(batch, times, labels - 1, 1))[..., 0]
        row = torch.cat([torch.zeros_like(blank[:, :1, 0]), label[:, 0].cumsum(-1)], -1)
        rows = [row]
        for t in range(1, times):
            stay = row + blank[:, t - 1]
            cells = [stay[:, 0]]
            for u in range(1, labels):
                cells.append(torch.logaddexp(stay[:, u], cells[-1] + label[:, t, u - 1]))
            row = torch.stack(cells, -1)
            rows.append(row)
        example = torch.arange(batch)
        end = torch.stack(rows, 1)[example, frames - 1, count] + blank[example, frames - 1, count]
        return -(end / (frames + count)).mean()


def model() -> nn.Module:
    return Transducer()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 5, 4, generator=generator),
        "frames": torch.randint(1, 6, (16,), generator=generator),
        "y": torch.randint(1, CLASSES, (16, 3), generator=generator),
        "count": torch.randint(0, 4, (16,), generator=generator),
    }
