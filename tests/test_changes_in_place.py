"""Changes in place, through views and under no_grad: the normalized program beside eager autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partc.errors import PartcError
from partc.frontend.trace import trace_model
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from partc.passes.normalize import normalize

Forward = Callable[[Any, Tensor], Tensor]


class Changing(nn.Module):
    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.run, self.up = run, nn.Linear(6, 12)
        self.register_buffer("kept", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def parts(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    first, second = x.chunk(2, -1)
    first.mul_(2.0)
    second += 1
    for number, part in enumerate(x.split(4, -1)):
        part.add_(number * 0.1)
    for number, part in enumerate(x.view(-1, 3, 2).unbind(1)):
        part.mul_(number + 1)
    for number, part in enumerate(torch.tensor_split(x, 4, -1)):
        part.add_(number)
    return m.up(x).square().mean()  # type: ignore[no-any-return]


def narrowed(m: Any, x: Tensor) -> Tensor:
    h = m.up(x) * 1.0
    h.narrow(1, 2, 3).clamp_(-1, 1)
    h.narrow(1, -2, 2).mul_(3)
    return h.square().mean()  # type: ignore[no-any-return]


def diagonal(m: Any, x: Tensor) -> Tensor:
    h = m.up(x).view(-1, 3, 4).clone()
    h[:, :, :3].diagonal(dim1=1, dim2=2).zero_()
    h.select(1, 0)[:, 3] = 5.0
    h.transpose(1, 2)[:, 0] += m.up(x)[:, :3]
    return h.square().mean()  # type: ignore[no-any-return]


def other_views(m: Any, x: Tensor) -> Tensor:
    """Views of a tensor that another view, or the tensor itself, changes afterwards."""
    y = m.up(x).sin()
    part = y[:, 2:5]
    turned, corner, wide = part.t(), y.diagonal(), y[:, :1].expand(-1, 3)
    part.mul_(2)
    y[:, 0].add_(1)
    y.mul_(3)
    return (turned[0] * part[:, 1]).sum() + y.sum() + corner.square().sum() + wide.square().sum()  # type: ignore[no-any-return]


def overlapping(m: Any, x: Tensor) -> Tensor:
    y = m.up(x) * 1
    first, second = y[2:4], y[3:6]
    first.add_(second.sum())
    second.mul_(2)
    return (first * 3).sum() + second.sum() + y.square().sum()  # type: ignore[no-any-return]


def in_turns(m: Any, x: Tensor) -> Tensor:
    y = m.up(x) * 1
    view, same = y.unsqueeze(0), y.mul_(2)
    y[1] = 0
    view[0, 2] = 7
    y += 1
    y.view(-1)[3:7].add_(1)
    return (view.squeeze(0) * y * same).sum()  # type: ignore[no-any-return]


def buffers(m: Any, x: Tensor) -> Tensor:
    """Weights that are written into a buffer under no_grad get no gradient from its readers."""
    with torch.no_grad():
        first, second = m.kept
        first.mul_(0.5).add_(m.up(x).mean())
        second += m.up.weight.square().mean()
        one, other = m.kept.split(1)
        one.add_(other * 0.1)
        m.kept[0] = m.up(x).mean(0)[:3]
    return (m.up(x)[:, :3] * (m.kept.clone()[0] + m.kept.sum(0))).square().mean()  # type: ignore[no-any-return]


def made_without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.up(x) * 1
        h[0] = m.up.bias
        h.view(-1)[3:5].mul_(2)
    return (m.up(x) * h).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "run", [parts, narrowed, diagonal, other_views, overlapping, in_turns, buffers, made_without_gradients]
)
def test_changes_equal_eager_ones(run: Forward) -> None:
    torch.manual_seed(0)
    model, x = Changing(run).double(), torch.randn(8, 6, dtype=torch.float64)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    expected = model(x)
    expected.backward()
    traced = trace_model(lambda: Changing(run), lambda: {"x": x}, name="m", mesh=Mesh.parse("1"), precision="fp64")
    weights = {name: value.requires_grad_() for name, value in state.items()}
    loss = evaluate_program(normalize(traced.program), {"x": x}, weights)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, value in model.named_parameters():
        torch.testing.assert_close(weights[name].grad, value.grad, rtol=1e-12, atol=1e-12)


def past_the_gradient(m: Any, x: Tensor) -> Tensor:
    h = m.up(x) * 1
    with torch.no_grad():
        h[0] = 3
    return h.square().mean()  # type: ignore[no-any-return]


def copied(m: Any, x: Tensor) -> Tensor:
    """A reshape may be a view or a copy."""
    h = m.up(x).sin()
    h.flatten().add_(1)
    return h.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [past_the_gradient, copied])
def test_changes_that_are_refused(run: Forward) -> None:
    with pytest.raises(PartcError) as caught:
        normalize(
            trace_model(lambda: Changing(run), lambda: {"x": torch.ones(8, 6)}, name="m", mesh=Mesh.parse("1")).program
        )
    assert caught.value.code == "P0212"
    assert caught.value.source is not None and caught.value.source.file.endswith("test_changes_in_place.py")
