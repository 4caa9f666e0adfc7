"""An operator of the user's own with a fake and a gradient, saved inputs and an option, with a checkpoint."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@torch.library.custom_op("partc_tests::bent", mutates_args=())
def bent(x: Tensor, power: float) -> Tensor:
    return torch.sign(x) * x.abs().pow(power)


@bent.register_fake
def _(x: Tensor, power: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0])
    ctx.power = inputs[1]


def _back(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
    (x,) = ctx.saved_tensors
    return grad * ctx.power * x.abs().pow(ctx.power - 1), None


bent.register_autograd(_back, setup_context=_keep)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.turn, self.leave = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def inner(self, h: Tensor) -> Tensor:
        return bent(self.turn(h), 1.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = checkpoint(self.inner, self.enter(x), use_reentrant=False)
        return F.cross_entropy(self.leave(h), y)


def model() -> nn.Module:
    return Own()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
