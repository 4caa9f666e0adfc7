"""torch's attention with all of its options: grouped heads, causal and not square, biases from the lower right."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 4)
        self.slope = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 4).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2, 2, 4).permute(2, 0, 3, 1, 4)
        short = q[:, :, 2:]
        one = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        two = F.scaled_dot_product_attention(short, k, v, is_causal=True)
        away = torch.arange(s) - torch.arange(s)[:, None]
        three = F.scaled_dot_product_attention(q, k, v, attn_mask=self.slope * away)
        mask = torch.ones(s, s, dtype=torch.bool).tril(1)
        four = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(b, 4, s, s))
        h = (one + three + four).transpose(1, 2).flatten(2) + F.pad(two, (0, 0, 2, 0)).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.o(h).mean(1), y)


def model() -> nn.Module:
    return Options()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
