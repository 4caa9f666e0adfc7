"""Integers that tensors hold, such as drawn or best places, as indices, starts of slices, shifts and factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.frontend.trace import trace_model
from partc.ir.mesh import Mesh

WIDTH = 8


class Net(nn.Module):
    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(WIDTH, WIDTH), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.layer(x))


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 12, WIDTH)}


def best(h: Tensor) -> Tensor:
    return h.mean((0, 1)).argmax()


def cropped(h: Tensor) -> Tensor:
    """A random part of each sequence, as in an augmentation."""
    start = torch.randint(0, 7, (1,)).item()
    part = h[:, start : start + 5]  # type: ignore[misc]
    return (part * torch.arange(5)[:, None]).square().mean()


def rolled(h: Tensor) -> Tensor:
    shifts = h.mean((0, 2)).topk(2).indices
    return sum((h.roll(shifts=-int(shifts[i]), dims=1) * torch.arange(12)[:, None]).sin() for i in range(2)).mean()


def picked(h: Tensor) -> Tensor:
    """Places before and behind others, which keep their order."""
    place = int(best(h))
    assert isinstance(place, int) and type(place) is int
    one, two = h[..., place], h[1, :, place - WIDTH, None] * h[0, place]
    return one.square().mean() + two.mean() + (h.narrow(2, place // 2, 3) * torch.arange(3)).square().mean()


def scaled(h: Tensor) -> Tensor:
    number = best(h).item()
    return (h * number).square().mean() / (number + 1) if number > 3 else h.sin().mean() * number


def ragged(h: Tensor) -> Tensor:
    """Parts whose lengths are data: up to a place, from a place, between two places, and counted from the end."""
    lengths = (h.detach().mean(2) > 0).sum(1) + 1
    means = torch.stack([rows[:length].mean(0) for rows, length in zip(h, lengths, strict=True)])
    spread = sum(h[i, lengths[i] - 1 :].var() + h[i, -lengths[i] :, 2].amax() for i in range(4))
    return means.std() + spread + h[2, : lengths[2]].logsumexp(0).sum() + h[:, : int(lengths[3])].square().mean()


def unchanged(h: Tensor) -> Tensor:
    """A loop that ends when its values stay as they are."""
    for _ in range(3):
        further = (h * 0.5).tanh()
        if torch.allclose(further, h, atol=0.9):
            break
        h = further
    return h.square().mean() if torch.equal(h, h.abs()) else h.mean()


@pytest.mark.slow
@pytest.mark.parametrize(("step", "mesh"), [(ragged, "dp=2,tp=2"), (ragged, "pp=2"), (unchanged, "dp=2")])
def test_parts_end_at_unknown_places(step: Callable[[Tensor], Tensor], mesh: str) -> None:
    torch.manual_seed(0)
    found = partc.compile(Net(step), batch(), mesh=mesh, precision="fp64").verify(steps=3)
    assert found.ok, str(found.worst)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "mesh"), [(cropped, "dp=2,tp=2"), (rolled, "tp=2"), (picked, "dp=2"), (scaled, "dp=2,tp=2")]
)
def test_integers_of_tensors_are_places_and_factors(step: Callable[[Tensor], Tensor], mesh: str) -> None:
    torch.manual_seed(0)
    found = partc.compile(Net(step), batch(), mesh=mesh, precision="fp64").verify(steps=3)
    assert found.ok, str(found.worst)


def changed(h: Tensor) -> Tensor:
    """The part is a view, which eager code changes with its tensor."""
    start = int(best(h))
    h[:, start : start + 2].mul_(2)
    return h.square().mean()


def added(h: Tensor) -> Tensor:
    part = h[:, int(best(h))]
    part += 1
    return h.square().mean()


def divided(h: Tensor) -> Tensor:
    """An integer that is equal in further traces if it follows from the integers there."""
    return (h.sin(), h.cos())[int(best(h)) // 100].mean()


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "changed": changed,
    "added": added,
    "divided": divided,
    "assigned": lambda h: h.clone().__setitem__((0, slice(int(best(h)), int(best(h)) + 2)), 0),
    "a size": lambda h: torch.zeros(int(best(h))).sum() * h.mean(),
    "a list": lambda h: [h.sin(), h.cos(), h.exp(), h.tanh(), h.relu(), h.square()][int(best(h)) % 6].mean(),
    "a loop": lambda h: sum(h.sin().mean() for _ in range(int(best(h)))),
    "a dimension": lambda h: h.sum(int(best(h)) // 8).mean(),
    "a diagonal": lambda h: h[0].tril(int(best(h))).mean(),
}


@pytest.mark.parametrize("step", REFUSED.values(), ids=REFUSED)
def test_other_uses_of_unknown_integers_are_refused(step: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(PartcError) as error:
        trace_model(lambda: Net(step), batch, name="net", mesh=Mesh.parse("1"), precision="fp64")
    assert error.value.code == "P0206"
