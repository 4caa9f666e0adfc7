"""Repeated calls in a trace are copied: the program equals that of the same steps written out line by line."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partc.frontend.trace import Traced, trace_file
from partc.ir.mesh import Mesh
from partc.ir.printer import print_program
from partc.ir.program import Program

STEPS = 9
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.cell = nn.GRUCell(6, 6)
        self.register_buffer("seen", torch.zeros(16, 6))
        self.w = nn.Parameter(torch.randn(6))

    def forward(self, x):
        n, u, ys = {steps}, x * self.w.sin(), []
        h = torch.zeros_like(x[:, 0])
{loop}
{after}
        return h.sum() + sum(y.sum() for y in ys)

def model():
    return Net()

def batch():
    return {{"x": torch.randn(4, {steps} + 2, 6)}}
"""
APPEND = "h = torch.stack(ys, 1)"
ZEROS = "o = torch.zeros_like(u) if t == 0 else o\n"
LOOPS = {  # steps, and what follows
    "affine": ("h = torch.tanh(u[:, t] * h + u[:, t + 1])\nys.append(h)", APPEND),
    "backwards": ("h = u[:, n - t] * h + self.w\nys.insert(0, h)", APPEND),
    "parts": ("h = h * u[:, t : t + 2].sum(1) + u[:, None, t : t + 1, ...].mean((1, 2))\nys.append(h)", APPEND),
    "whole parts": ("h = h + u[:, t : t + 9].sum(1) + u[t % 4 : , 0].sum(0) + u[:, -1 - t]", ""),
    "rows": ("h = h + u[t % 4] [t] + u[t % 4, t]", ""),
    "same place twice": ("h = h + u[:, t % 6, t % 6, None] + u[:, t // 6, t % 6, None]", ""),
    "select": ("h = h * u.select(1, t) + u.narrow(1, t, 2).sum(1) + torch.unbind(u, 1)[t]", ""),
    "weights": ("h = self.first(h).relu() + F.silu(self.second(u[:, t]))\nys.append(h)", APPEND),
    "cell": ("h = self.cell(u[:, t], h)", ""),
    "first step": ("h = u[:, t] if t == 0 else h * self.w + u[:, t]\nys.append(h)", APPEND),
    "numbers": ("h = h * 0.5**t + u[:, t] * (-0.0 if t % 2 else 0.0)", ""),
    "kinds of numbers": ("h = h * (1 if t % 3 == 0 else True if t % 3 == 1 else 1.0) + u[:, t]", ""),
    "types": ("h = h.double() if t == 6 else h\nh = h * u[:, t].to(h.dtype) + u[:, t]", ""),
    "returned operands": ("h = (h.to(h.dtype).contiguous() + u[:, t].float()).expand(4, 6)", ""),
    "several results": ("a, b = (h + u[:, t]).chunk(2, -1)\nh = torch.cat([b, a.exp()], -1)\nys.append(a)", ""),
    "topk": ("v, i = (h + u[:, t]).topk(3)\nh = h.scatter(1, i, v * self.w[:3])", ""),
    "without gradient": (
        "with torch.no_grad():\n    g = h * self.first(u[:, t])\nh = g + u[:, t].detach() * self.w",
        "",
    ),
    "partly without": ("with torch.set_grad_enabled(t != 7):\n    h = self.first(h) + u[:, t]", ""),
    "stopped": ("h = torch.where(self.third(h.detach()) > 0, self.second(u[:, t]), h)", ""),
    "new tensors": ("h = h + h.new_zeros(6) + torch.ones(6) + torch.ones_like(self.first(h)) * u[:, t]", ""),
    "draws": ("h = F.dropout(h + u[:, t] + torch.rand(6), 0.5)", ""),
    "written rows": ("ys.append(u[:, t].exp())\nx[:, t] = self.first(ys[-1])", "h = x"),
    "written": (f"{ZEROS}h = torch.tanh(u[:, t] * h)\no[:, t] = self.first(h)", "h = o * h[:, None]"),
    "written parts": (f"{ZEROS}o[:, t : t + 1, ..., 1:] = self.first(u[:, t : t + 1])[..., 1:]", "h = o"),
    "written twice": (f"{ZEROS}o[:, t % 3] = self.first(u[:, t])\no[t % 2] = o[:, t].sum()", "h = o"),
    "written without gradient": (f"{ZEROS}o[:, t] = self.first(u[:, t]).detach()", "h = o * self.w"),
    "gradients stopped": (f"{ZEROS}with torch.no_grad():\n    o[:, t] = self.first(u[:, t])", "h = o * self.w"),
    "written numbers": (f"{ZEROS}o[:, t] = u[:, t]\no[t % 4] = 0.5", "h = o"),
    "overwritten": (f"{ZEROS}o[:, t] = self.first(u[:, t])", "o[:] = self.second(o.detach())\nh = o"),
    "overwritten in the loop": (f"{ZEROS}o[:] = self.first(u[:, t, None])", "h = o"),
    "written into a view": (f"{ZEROS}o.view(-1)[t] = self.first(u[:, t]).sum()", "h = o"),
    "views of written": (f"{ZEROS}r = o[0]\no[:, t] = self.first(u[:, t])", "h = r * self.w"),
    "other type": (f"{ZEROS}o[:, t] = self.first(u[:, t]).double()", "h = o"),
    "written into a buffer": ("self.seen[t] = u[:, t].mean(0).detach()\nh = h + u[:, t]", "h = h * self.seen.sum()"),
    "rows read and written": ("x[:, t + 1] = self.first(x[:, t]) + x[:, t + 1]", "h = x"),
    "changed in place": ("h = h + u[:, t]\nh.mul_(self.w)\nys.append(h)", APPEND),
    "view changed later": ("ys.append(u[:, t])", "ys[-1].add_(self.second(h))\nh = u"),
    "source changed later": ("ys.append(u[:, t])", "u.add_(self.second(u))\nh = ys[-1]"),
    "view of a view changed later": ("ys.append(u[:, t])", "ys[-2][:2].mul_(self.third.bias)\nh = u"),
    "gradient in forward": ("h = torch.tanh(u[:, t] * self.w + h)", "h = torch.autograd.grad(h.sum(), u)[0]"),
    "hook": ("h = h * self.w + u[:, t]", "h.register_hook(lambda g: g * 2)"),
}


def source(folder: Path, body: str, after: str, *, unrolled: bool, steps: int = STEPS) -> Path:
    folder.mkdir()
    if unrolled:
        loop = "".join(f"t = {step}\n{body}\n" for step in range(steps))
    else:
        loop = f"for t in range(n):\n{textwrap.indent(body, '    ')}"
    indented = (textwrap.indent(each, " " * 8) for each in (loop, after))
    text = MODEL.format(steps=steps, **dict(zip(("loop", "after"), indented, strict=True)))
    (folder / "net.py").write_text(text)
    return folder / "net.py"


def traced(path: Path) -> Traced:
    return trace_file(path, {}, mesh=Mesh.parse("1"))


def without_lines(program: Program) -> str:
    (region,) = program.regions
    ops = tuple(replace(op, source=None) for op in region.forward.ops)
    return print_program(replace(program, regions=(replace(region, forward=replace(region.forward, ops=ops)),)))


@pytest.mark.parametrize("name", LOOPS)
def test_copied_calls_equal_traced_ones(name: str, tmp_path: Path) -> None:
    body, after = LOOPS[name]
    loop, lines = (traced(source(tmp_path / str(flag), body, after, unrolled=flag)) for flag in (False, True))
    assert without_lines(loop.program) == without_lines(lines.program)


def test_the_number_of_traced_operations_does_not_grow_with_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    plain = torch.fx.Tracer.create_proxy

    def counted(*given: Any, **named: Any) -> Any:
        counts[-1] += 1
        return plain(*given, **named)

    monkeypatch.setattr(torch.fx.Tracer, "create_proxy", counted)
    for steps in (8, 64):
        counts.append(0)
        traced(source(tmp_path / str(steps), *LOOPS["affine"], unrolled=False, steps=steps))
    assert counts[0] == counts[1]
