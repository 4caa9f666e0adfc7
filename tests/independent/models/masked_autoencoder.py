"""A masked autoencoder: patches kept by the order of given noise, mask tokens put back, a loss on the hidden ones."""

import torch
from torch import Tensor, nn


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(12, 16)
        self.place = nn.Parameter(torch.randn(1, 9, 16) * 0.2)
        self.first, self.hidden = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.randn(1, 1, 16) * 0.2)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encode = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decode = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, 12)

    def forward(self, picture: Tensor, noise: Tensor) -> Tensor:
        b = picture.shape[0]
        x = picture.reshape(b, 3, 3, 2, 3, 2).permute(0, 2, 4, 3, 5, 1).reshape(b, 9, 12)
        order = noise.argsort(1)
        back = order.argsort(1)
        keep = order[:, :4]
        h = (self.patch(x) + self.place).gather(1, keep[..., None].repeat(1, 1, 16))
        h = self.encode(torch.cat([self.first.expand(b, -1, -1), h], 1))
        whole = torch.cat([h[:, 1:], self.hidden.repeat(b, 5, 1)], 1)
        whole = whole.gather(1, back[..., None].expand(-1, -1, 16)) + self.place
        seen = self.head(self.decode(torch.cat([h[:, :1], whole], 1))[:, 1:])
        target = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt()
        mask = torch.ones(b, 9).scatter(1, keep, 0.0)
        return ((seen - target).square().mean(-1) * mask).sum() / mask.sum()


def model() -> nn.Module:
    return Masked()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"picture": torch.rand(16, 3, 6, 6, generator=generator), "noise": torch.rand(16, 9, generator=generator)}
