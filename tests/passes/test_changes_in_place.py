"""Changes in place, through views and under no_grad: the normalized program and eager autograd."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
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


def reshaped(m: Any, x: Tensor) -> Tensor:
    """Reshapes that are views by the strides of their operand."""
    h = m.up(x).sin()
    joined, turned, own = h.reshape(-1, 2, 6), h.t().reshape(12, 4, -1).mT, h.contiguous()
    low, high = joined[..., :3], joined[..., 3:]
    low /= 2
    high += low
    turned.add_(1)
    return (own + h.flatten().add_(1).view(-1, 12)).square().mean() + turned.square().mean() + low.sum()  # type: ignore[no-any-return]


def cast_weights(m: Any, x: Tensor) -> Tensor:
    """Routers cast their weights; the model changes other values in place."""
    y = nn.functional.linear(x, m.up.weight.to(torch.float64).type_as(x), m.up.bias.to(x.dtype))
    y[:, 0] = 1
    return y.square().mean()


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


def cast(m: Any, x: Tensor) -> Tensor:
    """A cast to the dtype that a buffer has already is the buffer itself."""
    y = m.up(x)[:, :6] * m.kept.to(x.dtype).add(1).view(6)
    with torch.no_grad():
        m.kept.mul_(0.5).add_(y.mean())
        m.kept.type_as(x)[0].add_(1)
    return (y * m.kept.clone().view(6)).square().mean()  # type: ignore[no-any-return]


def made_without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.up(x) * 1
        h[0] = m.up.bias
        h.view(-1)[3:5].mul_(2)
    return (m.up(x) * h).square().mean()  # type: ignore[no-any-return]


def masks(m: Any, x: Tensor) -> Tensor:
    """Memory that is made under no_grad, or holds no gradient."""
    h = m.up(x)
    mask = torch.zeros_like(h)
    with torch.no_grad():
        k = h.mean(0)
        k.mul_(3)
        k.view(6, 2).add_(1.0)
        mask[h > 0] = 1.0
        with torch.enable_grad():
            q = h * 2
        mask[0].mul_(q[0])
    return (h * k * mask + q).sum()  # type: ignore[no-any-return]


def turned(m: Any, x: Tensor) -> Tensor:
    """A view that takes another shape in place leaves the memory as it is."""
    y = m.up(x) * 1
    view = y[:6, :6]
    view.t_()
    view[0].mul_(2)
    y[7].unsqueeze_(0)
    return (view * torch.arange(6.0)).sum() + (y * torch.arange(12.0)).square().mean()  # type: ignore[no-any-return]


def filled(m: Any, x: Tensor) -> Tensor:
    y = m.up(x).sin()
    y[:, 2:].fill_diagonal_(3.0)
    return (y * torch.arange(12.0)).square().mean()  # type: ignore[no-any-return]


def by_data(m: Any, x: Tensor) -> Tensor:
    """`x.data` is `x.detach()`, and an assignment to it copies."""
    m.kept.data.add_(m.up.weight.data.view(24, 3)[:2]).mul_(0.9)
    before = m.kept * 1
    m.kept.data = m.kept.data * 0.5 + x.data[:2, :3]
    return (m.up(x)[:2, :3] * m.kept + before).square().mean()  # type: ignore[no-any-return]


def numbered(m: Any, x: Tensor) -> Tensor:
    """Integer tensors of no dimension in the index of an assignment."""
    h = m.up(x) * 1
    number = x[:, 0].argmax()
    h[:, number] = 2 * x[:, 0]
    h[number] += 1
    h[-1, number - 8] = x[0, 0]
    h.view(-1, 3, 4)[..., number % 3 - 3, None, 1:] = m.up.weight[0, :3]
    h.view(-1, 3, 4)[number, number % 3] = m.up.bias.mean()
    h[number - 1, 2:4] = 0
    return (h * m.up.bias).square().mean()  # type: ignore[no-any-return]


def constant_masks(m: Any, x: Tensor) -> Tensor:
    h, even = m.up(x) * 1, torch.tensor([True, False] * 6)
    h[:, even] = x * 2
    h[:, ~even] *= m.up.bias[even]
    above = torch.ones(8, 12).triu(1).bool()
    return h[above].square().mean() + h[:, even].sum() + m.kept[torch.eye(2, 3).bool()].sum()  # type: ignore[no-any-return]


VIEWS: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    lambda y, r: y[r.randrange(y.shape[0])] if y.dim() > 1 else y,
    lambda y, r: y[..., r.randrange(2) :: r.randint(1, 2)] if y.shape[-1] > 1 else y,
    lambda y, r: y.transpose(0, -1),
    lambda y, r: y.permute(*range(1, y.dim()), 0),
    lambda y, r: y.movedim(0, -1),
    lambda y, r: y.narrow(0, 1, y.shape[0] - 1) if y.shape[0] > 1 else y,
    lambda y, r: y.unsqueeze(r.randrange(y.dim())),
    lambda y, r: y.diagonal() if y.dim() > 1 else y,
)
CHANGES: tuple[Callable[[Tensor, Tensor, float], object], ...] = (
    lambda y, z, c: y.mul_(c),
    lambda y, z, c: y.add_(z, alpha=c),
    lambda y, z, c: y.copy_(z),
    lambda y, z, c: y.fill_(c),
    lambda y, z, c: y.masked_fill_(z > 0.05, c),
    lambda y, z, c: y.sub_(c).clamp_(max=0.5),
)


def random_changes(seed: int, m: Any, given: Tensor) -> Tensor:
    """Views of views of one tensor, changes of some of them, and reads of all in between."""
    r = random.Random(seed)
    x, w = given.view(2, 4, 6), m.up.weight.view(3, 4, 6)[:2]
    shown, detached, read = [x.sin() * w], [], []
    for _ in range(10):
        y = r.choice(shown)
        if r.random() < 0.6:
            shown.append(r.choice(VIEWS)(y, r))
            detached.append(y.detach())
        else:
            other = r.choice(read) if read else w.mean()
            r.choice(CHANGES)(y, other.mean() * torch.linspace(-1, 1, y.shape[-1], dtype=x.dtype), r.uniform(-2, 2))
        read.append(r.choice([*shown, *detached]) * r.uniform(1, 2))
    return torch.stack(
        [(y * torch.arange(y.numel(), dtype=x.dtype).view(y.shape)).sum() for y in (*shown, *detached, *read)]
    ).sum()


def operators(m: Any, x: Tensor) -> Tensor:
    above, count = x > 0, (x > 1).long()
    seen, last = above, count[:, 2:]
    above |= x < -1
    above[1:] &= x[1:] < 2
    above[:, 0] ^= True
    last ^= 3
    last &= 2
    return (m.up(x)[:, :6] * seen * (count + 1)).square().mean()  # type: ignore[no-any-return]


def lists(m: Any, x: Tensor) -> Tensor:
    """Operations on lists, as torch.optim and moving averages use them."""
    h = m.up(x)
    parts = [each.clone() for each in h.split(4, 1)]
    torch._foreach_mul_(parts, 0.5)
    torch._foreach_addcmul_(parts, [x.clone() for x in parts[::-1]], [h[:, :4], h[:, 4:8], h[:, 8:]], [1.0, 2.0, 3.0])
    parts = torch._foreach_lerp(parts, torch._foreach_add(parts, parts[1:] + parts[:1], alpha=2.0), 0.3)
    with torch.no_grad():
        torch._foreach_copy_([m.kept], [torch.ones(2, 3)])
    return sum(part.sin().mean() for part in parts) + m.kept.sum() + torch._foreach_norm(parts)[1]  # type: ignore[no-any-return]


def inferred(m: Any, x: Tensor) -> Tensor:
    """Inference mode, as a block and a decorator, and gradients again inside it."""
    with torch.inference_mode():
        still = m.up(x).tanh()
        with torch.inference_mode(False):
            alive = m.up(x).sin()
    again = torch.inference_mode()(lambda: m.up(x).exp())()
    return (m.up(x) * still.clone() * again.clone()).mean() + alive.mean()  # type: ignore[no-any-return]


def codebook(m: Any, x: Tensor) -> Tensor:
    """A codebook that is compared, looked up and then moved. Backward reads none of its values, or those of a copy."""
    m.kept.data.copy_(torch.arange(6.0).view(2, 3))
    h = m.up(x)[:, :3]
    chosen = (h @ m.kept.T).argmax(-1)
    near = torch.cdist(h.detach(), m.kept).min(-1).values.mean() + (h - m.kept[chosen]).abs().mean()
    scores = (h @ m.kept.clone().T).square().mean()
    with torch.no_grad():
        m.kept.data.lerp_(h[:2], 0.1)
    return near + scores + (m.kept[chosen] + h - h.detach()).square().mean()  # type: ignore[no-any-return]


FIXED = (
    codebook,
    *(lists, inferred),
    *(parts, narrowed, diagonal, other_views, reshaped, cast_weights, overlapping, in_turns, buffers, cast),
    made_without_gradients,
    *(by_data, numbered, constant_masks, operators),
)
RANDOM = tuple(partial(random_changes, seed) for seed in range(12))


@pytest.mark.sampled
@pytest.mark.parametrize("run", [*FIXED, masks, turned, filled, *RANDOM])
def test_changes_equal_eager_ones(run: Forward) -> None:
    torch.manual_seed(0)
    model, x = Changing(run).double(), torch.randn(8, 6, dtype=torch.float64)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    expected = model(x)
    expected.backward()
    traced = trace_model(lambda: Changing(run), lambda: {"x": x}, name="m", mesh=Mesh.parse("1"), precision="fp64")
    weights = {name: value.requires_grad_() for name, value in state.items()}
    loss = evaluate_program(normalize(traced.program), {"x": x}, weights)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    if loss.requires_grad:  # a change may cover all that depends on weights
        loss.backward()
    for name, value in model.named_parameters():
        mine, theirs = (torch.zeros_like(value) if x.grad is None else x.grad for x in (weights[name], value))
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


class Swapping(nn.Module):
    """Buffers in whose places forward puts each other, and what another one was."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 3)
        for name, value in (("one", 1.0), ("other", 2.0), ("older", 3.0)):
            self.register_buffer(name, torch.full((3,), value))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) + self.one - self.older
        self.older = self.other
        self.one, self.other = self.other + 1, self.one
        self.other.mul_(0.5)
        return h.square().mean()


class Counting(nn.Module):
    """A counter beyond the integers of fp32, which no part of a sum over ranks may be divided from."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 3)
        self.register_buffer("seen", torch.tensor(2**24 + 1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += (x > 0).sum()
        return self.up(x).square().mean() * (1 + self.seen % 3)


class Clamped(nn.Module):
    """Trained weights that forward changes: whole, by parts, by data, and in the constructor's way of max_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.table = nn.Embedding(5, 6, max_norm=0.7)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            same = self.scale.clamp_(0, 0.5)
            self.up.weight.mul_(0.9).sub_(0.1 * self.down.weight.mean())
            self.up.bias[2:4] = x.mean()
        self.down.weight.data = self.down.weight.data / self.down.weight.norm(dim=1, keepdim=True)
        h = self.up(x).tanh() * same + self.table((x[:, 0] > 0).long() + 1)
        return self.down(h).square().mean() - self.scale + self.up.bias[1:3].square().sum()


class Exchanged(nn.Module):
    """Trained weights that forward puts in each other's places, or sets to a number: none is made of its old value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(6, 3))
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            kept = self.one.clone()
            self.one.copy_(self.other)
            self.other.copy_(kept)
        nn.init.constant_(self.last.bias, 0.25)
        return (self.last(x @ self.one).tanh() + 0.5 * x @ self.other).square().mean()


@pytest.mark.slow
def test_exchanged_weights_on_a_pipeline() -> None:
    torch.manual_seed(0)
    package = partc.compile(Exchanged(), {"x": torch.randn(8, 6)}, mesh="pp=2", microbatches=2, precision="fp64")
    assert package.verify(steps=3).ok


@pytest.mark.slow
@pytest.mark.parametrize("model", [Swapping, Counting, Clamped])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_next_values(model: type[nn.Module], precision: str) -> None:
    torch.manual_seed(0)
    package = partc.compile(model(), {"x": torch.randn(8, 6)}, mesh="dp=2,tp=3", zero=3, precision=precision)
    result = package.verify(steps=3)
    assert result.ok, result.worst


class PastTheGradient(nn.Module):
    """Changes that autograd does not see: gradients pass by them."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.up = by, nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * 1
        first = h[:, :3]
        if self.by == "no_grad":
            with torch.no_grad():
                h[0] = 3
                h.T[1].mul_(2)
                h.movedim(0, 1)[2] -= 0.5
                h.tensor_split(2, 1)[0].mul_(0.7)
                h.to(h.dtype).add_(0.1)
                h.contiguous().clamp_(-2, 2)
        elif self.by == "data":
            h.data.masked_fill_(x[:, :1] > 0, -1e9)
            h = h.softmax(0)
        else:
            targets = h.softmax(-1).detach()
            targets[:, 0] = 0.0  # no backward pass runs through this softmax
            h = h + 0.1 * targets * h.mean()
            h.detach()[:, 4:6].add_(1)
            h.detach().copy_(h.detach() * x.mean())
        return h.square().mean() + first.tanh().mean()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["no_grad", "data", "detach"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2"])
def test_gradients_pass_by_changes_that_autograd_does_not_see(by: str, mesh: str) -> None:
    torch.manual_seed(0)
    microbatches = 2 if mesh == "pp=2" and by not in ("data", "detach") else 1
    model = PastTheGradient(by)
    package = partc.compile(model, {"x": torch.randn(8, 6)}, mesh=mesh, microbatches=microbatches, precision="fp64")
    result = package.verify(steps=2)
    assert result.ok, result.worst


class MasksTogether(nn.Module):
    """Masks that are combined under no_grad. The name of `__and__` ends in an underscore, but it changes no operand."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h, positive = self.up(x), x > 0
        with torch.no_grad():
            both, either, one = positive & (x < 0.5), positive | (x < -1), positive ^ (x > 1)
        return (h * both + 2 * h * either + 3 * h * one).square().mean()


@pytest.mark.slow
def test_masks_are_combined_under_no_grad() -> None:
    result = partc.compile(MasksTogether(), {"x": torch.randn(8, 6)}, mesh="dp=2", precision="fp64").verify(steps=2)
    assert result.ok, result.worst


def past_a_view(view: Callable[[Tensor], Tensor], m: Any, x: Tensor) -> Tensor:
    h = m.up(x) * 1
    with torch.no_grad():
        view(h).mul_(2)
    return h.square().mean()  # type: ignore[no-any-return]


def saved_by_its_maker(m: Any, x: Tensor) -> Tensor:
    """The backward pass of relu reads its result, which is changed by then."""
    h = m.up(x).relu()
    h.data.sub_(0.1)
    return h.square().mean()  # type: ignore[no-any-return]


def saved_by_a_reader(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    squares = h * h
    h.data.mul_(0.5)
    return (squares + h).mean()  # type: ignore[no-any-return]


def assigned(m: Any, x: Tensor) -> Tensor:
    """A view that was made before keeps the old values."""
    h = m.up(x)
    first = h[:, :3]
    h.data = h.data.clamp(-0.3, 0.3)
    return h.square().mean() + first.sum()  # type: ignore[no-any-return]


def by_a_weight(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    h.detach().mul_(m.up.bias)
    return h.square().mean()  # type: ignore[no-any-return]


def saved_buffer(m: Any, x: Tensor) -> Tensor:
    """Backward computes the gradient of the product's other operand from the buffer, which has changed by then."""
    h = m.up(x)
    found = (h[:, :3] @ m.kept.T).square().mean()
    with torch.no_grad():
        m.kept.data.copy_(h[:2, :3])
    return found  # type: ignore[no-any-return]


def saved_weight(m: Any, x: Tensor) -> Tensor:
    found = m.up(m.up(x)[:, :6]).square().mean()
    m.up.weight.data.clamp_(-0.1, 0.1)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "run",
    [
        saved_buffer,
        saved_weight,
        saved_by_its_maker,
        saved_by_a_reader,
        assigned,
        by_a_weight,
        partial(past_a_view, lambda h: h.unfold(1, 3, 3)),
    ],
)
def test_changes_that_are_refused(run: Forward) -> None:
    with pytest.raises(PartcError) as caught:
        normalize(
            trace_model(lambda: Changing(run), lambda: {"x": torch.ones(8, 6)}, name="m", mesh=Mesh.parse("1")).program
        )
    assert caught.value.code == "P0212"
    assert caught.value.source is not None and caught.value.source.file.endswith("test_changes_in_place.py")


def test_a_change_of_the_batch_is_told() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.up(x.clamp_(0, 1)).sum()  # type: ignore[no-any-return]

    found = trace_model(lambda: Changing(forward), lambda: {"x": torch.ones(8, 6)}, name="m", mesh=Mesh.parse("1"))
    assert any("entry x is changed" in sentence for sentence in found.assumed)
