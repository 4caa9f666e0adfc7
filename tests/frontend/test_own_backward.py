"""Gradients that a model defines itself: the traced functions, and packages against eager training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partc
from partc.errors import PartcError
from partc.frontend.trace import trace_model
from partc.ir.mesh import Mesh
from partc.passes.normalize import normalize
from tests.independent.models import dropped_signs

CLIPPED = """
import torch
from torch import nn

class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, grad): return grad.clamp(-0.004, 0.003)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
    def forward(self, x):
        WHAT
        return self.down(h).square().mean()

def model(): return Net()
def batch(): return {"x": torch.randn(8, 6)}
"""


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


class Square(nn.Module):
    """A width that is the batch's size: dimensions cannot be told by their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.w).sum()  # type: ignore[no-any-return, no-untyped-call]


def test_dimensions_follow_from_operations() -> None:
    traced = trace_model(Square, lambda: {"x": torch.ones(4, 4)}, name="m", mesh=Mesh.parse("1"))
    program = normalize(traced.program)
    (own,) = (op for op in program.regions[0].forward.ops if op.name == "own_gradient")
    assert dict(own.attrs)["dims"] == ((0, 1), (1,))  # the batch needs no gradient


class Tenfold(torch.autograd.Function):
    """In the style with a context of its own, and an argument with a default value."""

    @staticmethod
    def forward(x: Tensor, scale: float = 1.5) -> Tensor:
        return x.detach() * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return 10 * ctx.scale * grad, None


scaled, tenfold = Scaled.apply, Tenfold.apply


class ByAlias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.w = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = tenfold(self.up(x))  # type: ignore[no-untyped-call]
        return tenfold(scaled(h, self.w).tanh(), 0.5).square().mean()  # type: ignore[no-any-return, no-untyped-call]


def test_functions_may_be_applied_by_a_name_of_the_module() -> None:
    """A name such as `double = Double.apply` bypasses replacements of `apply`, and the function's backward was lost."""
    found = partc.compile(ByAlias, {"x": torch.randn(8, 6)}, mesh="dp=2", precision="fp64").verify(steps=2)
    assert found.ok, found.worst


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.w, self.scaled = nn.Linear(6, 4), nn.Parameter(torch.ones(4)), Scaled.apply

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.up(x), self.w).square().mean()  # type: ignore[no-any-return, no-untyped-call]


def test_functions_applied_by_other_names_are_traced_or_refused() -> None:
    """From torch 2.15 on such a name is bound to a function of C, which knows nothing of a trace."""
    try:
        package = partc.compile(ByAttribute, {"x": torch.randn(8, 6)}, mesh="dp=2", precision="fp64")
    except PartcError as error:
        assert error.code == "P0216" and "call Scaled.apply itself" in str(error)
    else:
        assert package.verify(steps=2).ok


class Checkpointed(nn.Module):
    """Reentrant checkpoints pass no gradient on if no argument requires one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(checkpoint(self.first, x, use_reentrant=True))
        return checkpoint(self.third, h, use_reentrant=True).square().mean()  # type: ignore[no-any-return]


class Pair(torch.autograd.Function):
    """Two results, of which an unread one has no gradient, in contrast to one of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        ctx.set_materialize_grads(False)
        return x * w, 2 * x

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        to_x = None if second is None else 2 * second
        if first is None:
            return to_x, None
        return first * w + (0 if to_x is None else to_x), (first * x).sum(0)


@pytest.mark.parametrize("read", [(0,), (1,), (0, 1)])
def test_an_unread_result_has_no_gradient(read: tuple[int, ...]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.w = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            results = Pair.apply(x * self.v, self.w)  # type: ignore[no-untyped-call]
            return torch.stack([results[i].square().sum() for i in read]).sum()

    model, x = Net(), torch.randn(6, 4)
    traced = trace_model(Net, lambda: {"x": x}, name="net", mesh=Mesh.parse("1"))
    model(x).backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert {p.name for p in traced.program.parameters if p.trainable} == trained


class OldName(Scaled):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_variables
        return grad * w, (grad * x).sum(0)


def test_saved_tensors_have_their_old_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return OldName.apply(x, self.w).square().sum()  # type: ignore[no-any-return, no-untyped-call]

    (weight,) = trace_model(Net, lambda: {"x": torch.ones(6, 4)}, name="m", mesh=Mesh.parse("1")).program.parameters
    assert weight.trainable


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_of_inputs_trains_nothing() -> None:
    model = Checkpointed()
    model(torch.ones(4, 4)).backward()
    trained = {name for name, x in model.named_parameters() if x.grad is not None}
    traced = trace_model(Checkpointed, lambda: {"x": torch.ones(4, 4)}, name="m", mesh=Mesh.parse("1"))
    assert {p.name for p in traced.program.parameters if p.trainable} == trained


class Nested(nn.Module):
    """A checkpoint inside another one: torch's hooks switch gradients off as they keep the inner one's argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def outer(h: Tensor, *, scale: float) -> Tensor:
            return checkpoint(self.second, h, use_reentrant=False) * scale  # type: ignore[no-any-return]

        h = checkpoint(outer, self.first(x), scale=0.5, use_reentrant=False)
        return self.third(h).square().mean()  # type: ignore[no-any-return]


def nested() -> nn.Module:
    return Nested()


class Normed(nn.Module):
    """Checkpoints a batch norm whose operand has dropout, and the result of `watch`."""

    def __init__(self, watch: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(8))
        self.watch = watch

    def normed(self, h: Tensor) -> Tensor:
        h = self.norm(F.dropout(h, 0.25))
        if self.watch:
            self.seen += h.detach().mean(0)
        return h.relu()

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(checkpoint(self.normed, self.first(x), use_reentrant=False), 0.25)
        return self.last(h).square().mean()  # type: ignore[no-any-return]


def normed() -> nn.Module:
    return Normed(False)


def watched() -> nn.Module:
    return Normed(True)


def test_norms_in_checkpoints_update_their_statistics_twice() -> None:
    """Torch's backward runs them again, with the same dropout."""
    package = partc.compile(normed, {"x": torch.randn(8, 6)}, mesh="dp=2", precision="fp64")
    assert package.verify(steps=2).worst.rel_err < 1e-12


def test_other_changes_in_checkpoints_are_refused() -> None:
    with pytest.raises(PartcError, match="forward changes seen within") as refused:
        partc.compile(watched, {"x": torch.randn(8, 6)}, mesh="dp=2")
    assert refused.value.code == "P0225" and refused.value.source is not None


def test_checkpoints_in_checkpoints_are_trained() -> None:
    package = partc.compile(nested, {"x": torch.randn(8, 4)}, mesh="dp=2,tp=2", precision="fp64")
    assert {p.name for p in package.program.parameters if p.trainable} == {
        name for name, _ in Nested().named_parameters()
    }
    assert package.verify(steps=2).ok


@pytest.mark.parametrize(
    ("what", "mesh", "microbatches"),
    [
        ("h = Clipped.apply(self.up(x))", "1x2x2", 2),
        ("h = self.up(x); h = Clipped.apply(h) + Clipped.apply(h).sin()", "1x2x1", 1),  # equal calls
        ("h = nn.functional.linear(x, Clipped.apply(self.up.weight), self.up.bias)", "1x2x2", 1),
        ("h = nn.functional.linear(x, Clipped.apply(self.up.weight), self.up.bias)", "1x2x1", 2),
        ("h = self.up(x); h.register_hook(lambda grad: grad.clamp(max=0.002))", "2x1x2", 2),
        (
            "h = self.up(x); v = h.clone().detach(); h.register_hook(lambda grad: grad.clamp(max=0.002)); h = h + v",
            "1x2x1",
            1,
        ),
        ("h = self.up(x)", "1x2x2", 1),
    ],
)
def test_a_clip_sees_whole_gradients(what: str, mesh: str, microbatches: int, tmp_path: Path) -> None:
    file = tmp_path / "clipped.py"
    source = CLIPPED.replace("WHAT", what)
    if what == "h = self.up(x)":  # hooks on a module
        source = source.replace(
            "return Net()",
            "net = Net(); net.down.register_full_backward_hook(lambda m, grads, _: (grads[0].clamp(max=0.002),)); "
            "net.up.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,)); return net",
        )
    file.write_text(source)
    package = partc.compile(str(file), mesh=mesh, microbatches=microbatches, precision="fp64")
    result = package.verify(steps=2)
    assert result.ok, result


REVERSED = """
import torch
from torch import nn

class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, grad): return -0.5 * grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
        self.judge = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 1))
    def score(self, x):
        spread = x.std(0, unbiased=False).mean().expand(len(x), 1)
        return self.judge(torch.cat([x, spread], 1)).squeeze(1)
    def forward(self, x, z):
        made = Reversed.apply(self.make(z))
        return (1 - self.score(x)).relu().mean() + (1 + self.score(made)).relu().mean()

def model(): return Net()
def batch(): return {"x": torch.randn(8, 6), "z": torch.randn(8, 6)}
"""


def test_a_reversal_between_regions(tmp_path: Path) -> None:
    """The value that the function returns is its operand; their gradients differ."""
    file = tmp_path / "reversed.py"
    file.write_text(REVERSED)
    package = partc.compile(str(file), mesh="dp=2", precision="fp64")
    assert any("alias" in {op.name for op in region.forward.ops} for region in package.program.regions)
    assert package.verify(steps=2).ok


HOOKED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.up.weight.register_hook(lambda slope: slope.clamp(-0.02, 0.02))
    def forward(self, x):
        h = self.norm(self.up(x)).tanh()
        h.register_hook(lambda slope: (slope * self.norm.weight * 1.5).clamp(-0.003, 0.003))
        y = self.down(h).square().mean()
        of_h, of_w = torch.autograd.grad(y, (h, self.up.weight), create_graph=True)
        alone, = torch.autograd.grad(y, h, create_graph=True)
        return y + of_h.norm() + of_w.square().sum().sqrt() + 9 * alone.norm()

def model(): return Net()
def batch(): return {"x": torch.randn(8, 6)}
"""


@pytest.mark.parametrize(("mesh", "microbatches"), [("1x2x2", 1), ("2x1x1", 2)])
def test_hooks_change_gradients_that_forward_computes(mesh: str, microbatches: int, tmp_path: Path) -> None:
    """Microbatches are batches of their own here, because of the norm."""
    file = tmp_path / "hooked.py"
    file.write_text(HOOKED)
    package = partc.compile(str(file), mesh=mesh, microbatches=microbatches, precision="fp64")
    result = package.verify(steps=2)
    assert result.ok, result


BESIDE = """
import torch
from torch import nn

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, grad): return grad

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(6, 6)
    def forward(self, x, still):
        y = Halved.apply(self.turn(x) + still)
        return y, y.detach()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
    def forward(self, x):
        y, still = x, x
        for layer in self.layers:
            y, still = layer(y, still)
        return (y * still).mean()

def model(): return Net()
def batch(): return {"x": torch.randn(8, 6)}
"""


def test_a_result_beside_its_own_value_between_regions(tmp_path: Path) -> None:
    """One of the two has a gradient, although both are the value that the function computes."""
    file = tmp_path / "beside.py"
    file.write_text(BESIDE)
    package = partc.compile(str(file), mesh="pp=2", microbatches=2, schedule="zero-bubble", precision="fp64")
    assert all(len(set(region.forward.outputs)) == len(region.forward.outputs) for region in package.program.regions)
    assert package.verify(steps=2).ok


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_weights_are_refused_at_their_line(hook: str, tmp_path: Path) -> None:
    file = tmp_path / "watching.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\ndef watch(x): pass\n\ndef model():\n    made = nn.Linear(6, 1)\n"
        f"    made.weight.{hook}(watch)\n    return made\n\ndef batch(): return {{'input': torch.randn(8, 6)}}\n\n"
        "def loss(model, batch): return model(**batch).mean()\n"
    )
    with pytest.raises(PartcError, match="P0216") as caught:
        partc.compile(str(file), mesh="1")
    assert caught.value.source is not None and caught.value.source.line == 4


def test_hooks_that_a_trace_would_lose_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "packing.py"
    file.write_text(
        "import torch\nfrom torch.autograd import graph\n\ndef model(): return torch.nn.Linear(6, 1)\n\n"
        "def batch(): return {'input': torch.randn(8, 6)}\n\ndef loss(model, batch):\n    with graph.save_on_cpu():\n"
        "        x = model(**batch).sin()\n    with graph.saved_tensors_hooks(torch.round, torch.abs):\n"
        "        return x.exp().mean()\n"
    )
    with pytest.raises(PartcError, match="P0216: forward packs the tensors") as caught:
        partc.compile(str(file), mesh="1")
    assert caught.value.source is not None and caught.value.source.line == 11
    file.write_text(
        file.read_text().replace("    with graph.saved", "    x.grad_fn.register_hook(print)\n    with graph.saved")
    )
    with pytest.raises(PartcError, match="P0216: forward puts a hook on a node") as caught:
        partc.compile(str(file), mesh="1")
    assert caught.value.source is not None and caught.value.source.line == 11
    hook = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    with hook, pytest.raises(PartcError, match="P0216: a hook is on the backward pass of all modules"):
        partc.compile(str(file), mesh="1")


def test_a_pipeline_cuts_between_functions(tmp_path: Path) -> None:
    """A function stays whole although it reads two weights and a stage could begin at either."""
    file = Path(__file__).parents[1] / "independent" / "models" / "reversible.py"
    program = partc.compile(
        str(file), mesh="pp=2", microbatches=4, schedule="interleaved", virtual_stages=2, precision="fp64"
    ).program
    for number in range(3):
        assert [call.params for call in program.calls if f"w.{number}" in call.params] == [
            (f"w.{number}", f"v.{number}")
        ]


@pytest.mark.parametrize(
    ("gradient", "allowed"),
    [
        ("torch.where(grad > -1, grad, 0.0)", False),
        ("torch.where(x > 0, grad, 0.0) * torch.sigmoid(x) + 0.1 * grad", True),
        ("grad.masked_fill(x < 0, 0)", True),
        ("torch.full_like(x, 0.01)", True),
        ("grad + 0.1 * x", False),
        ("grad.clamp(-0.1, 0.1)", False),
        ("torch.where(x > 0, grad, 1.0)", False),
        ("grad / (grad.norm() + 1e-6)", False),
    ],
)
def test_fp16_refuses_gradients_that_a_factor_of_the_loss_would_change(
    gradient: str, allowed: bool, tmp_path: Path
) -> None:
    source = CLIPPED.replace("return grad.clamp(-0.004, 0.003)", f"x, = ctx.saved_tensors; return {gradient}")
    source = source.replace("return x.view_as(x)", "ctx.save_for_backward(x); return x.view_as(x)")
    file = tmp_path / "given.py"
    file.write_text(source.replace("WHAT", "h = Clipped.apply(self.up(x))"))
    if allowed:
        partc.compile(str(file), mesh="1", precision="fp16")
    else:
        with pytest.raises(PartcError) as caught:
            partc.compile(str(file), mesh="1", precision="fp16")
        assert caught.value.code == "P0216" and caught.value.source is not None


class Step(torch.autograd.Function):
    """Its backward calls a function of its own, which records no gradient there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = Bell.apply(grad, ctx.saved_tensors[0])
        return found


class Bell(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        return grad * torch.exp(-x.abs())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class Steps(nn.Module):
    """A loop over time that calls such a function. Its results are read with a gradient, or detached."""

    def __init__(self, length: int, stopped: bool) -> None:
        super().__init__()
        self.up, self.beside, self.down = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.length, self.stopped = length, stopped

    def forward(self, x: Tensor) -> Tensor:
        h, state, rows = self.up(x), torch.zeros_like(x[:, 0]), []
        for t in range(self.length):
            state = 0.9 * state + h[:, t]
            spikes = Step.apply(state)
            state = state - spikes
            rows.append(spikes)
        spikes = torch.stack(rows, 1)
        return self.down(self.beside(x) * (spikes.detach() if self.stopped else spikes)).square().mean()


class Decayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _decayed(x.unbind(1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _decayed(grad.unbind(1)[::-1]).flip(1)


def _decayed(rows: Sequence[Tensor]) -> Tensor:
    state, made = torch.zeros_like(rows[0]), []
    for row in rows:
        state = 0.9 * state + row
        made.append(state)
    return torch.stack(made, 1)


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = Decayed.apply(self.up(x))
        return self.down(h).square().mean()


def loop_in_backward() -> nn.Module:
    return Backwards()


def loop() -> nn.Module:
    return Steps(10, False)


def stopped_loop() -> nn.Module:
    return Steps(10, True)


def stopped_steps() -> nn.Module:
    return Steps(2, True)


@pytest.mark.parametrize("build", [loop, loop_in_backward, stopped_loop, stopped_steps])
def test_functions_in_loops_and_behind_stopped_gradients(build: Callable[[], nn.Module]) -> None:
    batch = {"x": torch.randn(8, 2 if build is stopped_steps else 10, 6)}
    made = partc.compile(build, batch, mesh="pp=2", microbatches=2, precision="fp64")
    scans = any(op.name == "scan" for region in made.program.regions for op in region.forward.ops)
    assert scans == (build is not stopped_steps)
    assert made.verify(steps=2).ok


def test_functions_in_branches_that_share_their_ends() -> None:
    """A choice between outcomes is in front of a whole function, and draws behind it keep their numbers."""
    assert partc.compile(dropped_signs.__file__, mesh="dp=2", precision="fp64").verify(steps=4).ok


class Tiled(torch.autograd.Function):
    """Attention by tiles, which computes the weights again for the gradients."""

    @staticmethod
    @torch.no_grad()
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, size: int) -> Tensor:
        out, sums = torch.zeros_like(q), torch.zeros(*q.shape[:-1], 1)
        masks = [part.split(size, -1) for part in mask.split(size, -2)]
        for qs, outs, total, row in zip(
            q.split(size, -2), out.split(size, -2), sums.split(size, -2), masks, strict=True
        ):
            for ks, vs, seen in zip(k.split(size, -2), v.split(size, -2), row, strict=True):
                p = (qs @ ks.mT).exp().masked_fill_(~seen, 0.0)
                outs.add_(p @ vs)
                total.add_(p.sum(-1, keepdim=True))
            outs.div_(total)
        ctx.size, ctx.masks = size, masks
        ctx.save_for_backward(q, k, v, out, sums.log())
        return out

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        size, saved = ctx.size, ctx.saved_tensors
        dq, dk, dv = map(torch.zeros_like, saved[:3])
        rows = zip(*(x.split(size, -2) for x in (saved[0], saved[3], saved[4], grad, dq)), ctx.masks, strict=True)
        for q, out, logs, g, dqs, row in rows:
            for k, v, dks, dvs, seen in zip(*(x.split(size, -2) for x in (*saved[1:3], dk, dv)), row, strict=True):
                p = (q @ k.mT - logs).exp().masked_fill_(~seen, 0.0)
                dvs.add_(p.mT @ g)
                ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True))
                dqs.add_(ds @ k)
                dks.add_(ds.mT @ q)
        return dq, dk, dv, None, None


class ByTiles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 6, 6, dtype=torch.bool).tril()
        for layer in self.layers:
            h = layer(x)
            x = x + Tiled.apply(h[..., :8], h[..., 8:16], h[..., 16:], mask, 3)
        return x.square().mean()


def test_names_within_functions_differ_from_those_of_their_results() -> None:
    assert partc.compile(ByTiles, {"x": torch.randn(4, 6, 8)}, mesh="dp=2", precision="fp64").verify(steps=2).ok


class Through(torch.autograd.Function):
    """Calls a closure, which backward calls again to differentiate with respect to the tensors that it has captured."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *read: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x, *read)
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            y = ctx.function(ctx.saved_tensors[0])
        return None, *torch.autograd.grad(y, ctx.saved_tensors, grad)


class WithScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, scales = self.layer(x), self.scale(x).tanh()
        made: Tensor = Through.apply(lambda y: (y * scales).sin(), h, scales)
        return made.square().mean()


def test_backward_may_call_a_closure_of_forward_again() -> None:
    assert partc.compile(WithScales, {"x": torch.randn(8, 6)}, mesh="dp=2,tp=2", precision="fp64").verify(steps=2).ok
