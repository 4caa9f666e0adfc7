"""An ensemble whose members' weights are stacked and mapped over by torch.func."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Member(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.sin(self.a(x)))


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        members = [Member() for _ in range(4)]
        weights, _ = torch.func.stack_module_state(members)
        self.weights = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(x) for name, x in weights.items()})
        self.names = {name.replace(".", "_"): name for name in weights}
        self.shape = [Member().requires_grad_(False).to("meta")]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        named = {self.names[key]: value for key, value in self.weights.items()}
        each = torch.func.vmap(lambda w: torch.func.functional_call(self.shape[0], w, (x,)))(named)
        apart = each.var(0).mean()
        return F.cross_entropy(each.log_softmax(-1).logsumexp(0), y) - 0.1 * apart


def model() -> nn.Module:
    return Ensemble()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 5, generator=generator), "y": torch.randint(0, 3, (16,), generator=generator)}
