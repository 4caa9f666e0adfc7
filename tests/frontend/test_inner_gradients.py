"""`torch.autograd.grad` inside forward: the traced program's loss and gradients against eager autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import partc.errors
from partc.frontend.trace import trace_model
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from partc.passes.normalize import normalize
from tests.independent.plain import doubles

grad = torch.autograd.grad


class Net(nn.Module):
    """Parts whose backward passes differ, and a loss over them."""

    def __init__(self, loss: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)
        self.norm, self.group = nn.LayerNorm(8), nn.GroupNorm(2, 4)
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="zeros")
        self.deep = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.table = nn.Embedding(5, 6)
        self.heads = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.loss(self, x, ids)


def _penalty(of: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """The mean square of a function's slope at x, in addition to its value."""

    def loss(net: Any, x: Tensor, ids: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        y = of(net, x)
        (slope,) = grad(y.sum(), x, create_graph=True)
        return slope.square().mean() + y.sin().mean()

    return loss


def _images(net: Any, x: Tensor) -> Tensor:
    h = net.conv(x.repeat(1, 6)[:, :32].view(-1, 2, 4, 4))
    return net.deep(F.elu(net.group(h))).flatten(1)  # type: ignore[no-any-return]


def _second(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    """A heat equation's residual: the slope of a slope."""
    x = x.clone().requires_grad_()
    u = net.down(net.up(x).tanh())
    slope = grad(u, x, torch.ones_like(u), create_graph=True)[0]
    curve = grad(slope[:, 0].sum(), x, create_graph=True)[0]
    return (slope[:, 1] - 0.1 * curve[:, 0]).square().mean()  # type: ignore[no-any-return]


def _adversarial(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    """A fast step on embeddings, of which the gradient is a constant."""
    h = net.table(ids)
    logits = lambda z: net.up(z.mean(1))[:, :5]  # noqa: E731
    (step,) = grad(F.cross_entropy(logits(h), ids[:, 0]), h)
    return F.cross_entropy(logits(h + 0.1 * step.sign() + step), ids[:, 0])


def _inner_step(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    """A model-agnostic inner step on two weights."""
    loss = lambda w, b, z: F.mse_loss(F.linear(z, w, b).relu().sum(-1), z[:, 0])  # noqa: E731
    w, b = net.up.weight, net.up.bias
    of_w, of_b = grad(loss(w, b, x[:4]), (w, b), create_graph=True)
    return loss(w - 0.1 * of_w, b - 0.1 * of_b, x[4:])


def _copied(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    """An inner step on a copy of a layer, whose weights are no longer the model's."""
    fast = copy.deepcopy(net.up)
    for weight, slope in zip(
        fast.parameters(), grad(net.down(fast(x)).square().mean(), fast.parameters()), strict=True
    ):
        with torch.no_grad():
            weight.sub_(0.1 * slope)
    return F.mse_loss(net.up(x), fast(x)) + net.down(fast(x)).square().mean()


def _unused(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    found = grad(net.up(x).exp().sum(), [x, net.down.weight], create_graph=True, allow_unused=True)
    assert found[1] is None
    return found[0].square().sum()  # type: ignore[no-any-return]


def _named(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = net.down(net.up(x).sigmoid()).sum()
    found = grad(y, [*net.up.parameters()], create_graph=True)
    return sum(each.square().sum() for each in found) + y  # type: ignore[return-value]


def _of_matrices(h: Tensor) -> Tensor:
    a = h.view(8, 2, 4) @ h.view(8, 2, 4).mT + torch.eye(2)
    whole = torch.linalg.inv(a) + torch.linalg.cholesky(a) + torch.linalg.solve(a, h.view(8, 4, 2).mT @ h.view(8, 4, 2))
    return whole.sum((1, 2)) + torch.linalg.det(a) + torch.linalg.slogdet(a)[1]


def _kernels(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    """An inner step on the kernels of a transposed convolution, and of one in groups."""
    run = lambda w, v: F.conv_transpose2d(F.conv2d(h, w, groups=2, padding=1).tanh(), v, stride=2, groups=2)  # noqa: E731
    h, w, v = x.repeat(1, 6)[:, :32].view(-1, 2, 4, 4), net.deep.weight, net.deep.weight[..., :2] + 0
    w = w[:, :1]
    of_w, of_v = grad(run(w, v).square().mean(), (w, v), create_graph=True)
    return run(w - of_w, v - of_v).square().mean()  # type: ignore[no-any-return]


def _self_attention(net: Any, x: Tensor) -> Tensor:
    h = x.view(4, 2, 6)
    return net.heads(h, h, h, need_weights=False)[0]  # type: ignore[no-any-return]


def _written(net: Any, x: Tensor) -> Tensor:
    """Slices of a tensor, of one that reads the operand, and of a flat view, changed in place; a product of rows in
    another order.
    """
    y, out = net.up(x), torch.ones(8, 8)
    out[:, ::2].mul_(y[:, ::2])
    out[1:3].mul_(y[2:4])
    y = y * 2
    y.view(-1)[3:7] *= 2
    y.transpose(0, 1)[0].mul_(3)
    return out + y + net.down(out.view(2, 4, 8).transpose(0, 1)).view(8, 1)  # type: ignore[no-any-return]


def _by_transforms(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    slope, value = torch.func.grad_and_value(lambda z: _written(net, z).sin().sum())(x)
    turn = torch.func.jvp(lambda z: _written(net, z).quantile(0.3, 1), (x,), (slope,))[1]
    return slope.square().mean() + value + turn.square().mean()


def _kept(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    """A mask and magnitudes that gradients compute as well, and then change in place."""
    x = x.detach().requires_grad_(True)
    h = net.up(x)
    positive, size = h >= 0, h.abs()
    slopes = grad(h.clamp(0, 0.3).sum() + h.norm(p=3.5, dim=1).sum(), x, create_graph=True)[0]
    return slopes.square().mean() + (positive * h + size.sqrt()).mean()


def _weighed(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Two losses, weighed by how much each changes the last kernel, as VQGAN does: their gradients share parts."""
    images = x.repeat(1, 6)[:, :32].view(-1, 2, 4, 4)
    made = net.conv(images)
    near, far = made.square().mean(), (made - 1).abs().mean()
    slopes = [grad(loss, net.conv.weight, retain_graph=True)[0].norm() for loss in (near, far)]
    return near + (slopes[0] / (slopes[1] + 1e-4)).clamp(0, 1e4).detach() * far


LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "activations": _penalty(lambda net, x: net.down(F.gelu(F.silu(F.softplus(net.up(x)))))),
    "norms": _penalty(lambda net, x: F.rms_norm(net.norm(net.up(x)), [8], None, 1e-5)),
    "images": _penalty(_images),
    "attention": _penalty(_self_attention),
    "indices": _penalty(lambda net, x: torch.cat([net.up(x)[:, 1:3], x.gather(1, x.detach().argsort(1)), x[1:2].T.expand(6, 8).T], 1).log_softmax(1)),
    "extremes": _penalty(lambda net, x: net.up(x).amax(1) + x.prod(1) + x.norm(dim=1) + x.cumsum(1)[:, 2]),
    "loop": _penalty(lambda net, x: torch.stack([x[:, i] * net.up(x)[:, i].cos() for i in range(3)], 1).logsumexp(1)),
    "saved values": _penalty(lambda net, x: F.logsigmoid(net.up(x)) + F.cosine_similarity(net.up(x), x[:, :1])[:, None]),
    "matrices": _penalty(lambda net, x: _of_matrices(net.up(x))),
    "turned kernels": _kernels,
    "second": _second,
    "adversarial": _adversarial,
    "inner step": _inner_step,
    "copies of weights": _copied,
    "unused": _unused,
    "parameters": _named,
    "weights of losses": _weighed,
    "values that gradients change": _kept,
    "changes in place within transforms": _by_transforms,
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_inside_forward(name: str) -> None:
    torch.manual_seed(0)
    x, ids = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 5, (8, 3))
    net = Net(LOSSES[name]).double()
    with doubles(), sdpa_kernel(SDPBackend.MATH):  # the only kernel with a second derivative
        expected = net(x.clone(), ids)
        expected.backward()
    traced = trace_model(
        lambda: Net(LOSSES[name]), lambda: {"x": x, "ids": ids}, name="m", mesh=Mesh.parse("1"), precision="fp64"
    )
    program = normalize(traced.program)
    assert not any(op.name == "inner_gradient" for op in program.regions[0].forward.ops)
    weights = {key: value.detach().clone().requires_grad_() for key, value in net.named_parameters()}
    loss = evaluate_program(program, {"x": x, "ids": ids}, weights)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    trained = {parameter.name for parameter in program.parameters if parameter.trainable}
    assert trained == {key for key, value in net.named_parameters() if value.grad is not None}
    for key, value in net.named_parameters():
        if value.grad is not None:
            mine = torch.zeros_like(value) if weights[key].grad is None else weights[key].grad
            torch.testing.assert_close(mine, value.grad, rtol=1e-10, atol=1e-12)


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def test_gradients_through_an_autograd_function_are_refused() -> None:
    loss = _penalty(lambda net, x: Negated.apply(net.up(x)))  # type: ignore[no-untyped-call]
    batch = {"x": torch.ones(8, 6), "ids": torch.zeros(8, 3, dtype=torch.long)}
    with pytest.raises(partc.errors.PartcError) as caught:
        trace_model(lambda: Net(loss), lambda: batch, name="m", mesh=Mesh.parse("1"))
    assert caught.value.code == "P0216"
