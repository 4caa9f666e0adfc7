"""A reference interpreter: runs the IR with plain torch, operation by operation, as the oracle of tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partc.ir.operators import torch_arguments, torch_operator
from partc.ir.program import SCAN, Graph, Op, Program
from partc.ir.scans import scan_of
from partc.runtime.ops import bags
from partc.runtime.ops.assignment import linear_sum_assignment


def evaluate(graph: Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The graph's outputs by name. `values` holds its inputs and parameters.

    Layouts are ignored: shapes are global, as before the partition pass.
    """
    known = dict(values)
    for op in graph.ops:
        known.update(results_of(op, known))
    return {name: known[name] for name in graph.outputs}


def evaluate_program(program: Program, batch: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """The loss of a whole batch, before the partition pass; parameters go by the names in `program.parameters`."""
    known = dict(batch)
    for call in program.calls:
        region = program.region(call.region)
        inputs = {value.name: known[name] for value, name in zip(region.forward.inputs, call.args, strict=True)}
        params = {value.name: parameters[name] for value, name in zip(region.params, call.params, strict=True)}
        made = evaluate(region.forward, inputs | params)
        known.update(zip(call.results, (made[name] for name in region.forward.outputs), strict=True))
    return known[program.loss]


def results_of(op: Op, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The results of one operation, by name."""
    if op.body:
        inside = dict(known)
        for inner in op.body:
            inside.update(results_of(inner, inside))
        return {value.name: inside[value.name] for value in op.results}
    if op.name == SCAN:
        return _scanned(op, known)
    args, attrs = torch_arguments(op, known)
    found = _COMPOSITES[op.name](*args, **attrs) if op.name in _COMPOSITES else torch_operator(op.name)(*args, **attrs)
    results = found if isinstance(found, tuple | list) else (found,)
    return {value.name: result for value, result in zip(op.results, results, strict=True)}


def _scanned(op: Op, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The results of a scan, one step after the other."""
    scan = scan_of(op)
    states = [known[name] for name in scan.starts]
    fixed = [known[name] for name in scan.constants]
    rows: list[list[Tensor]] = []
    for t in reversed(range(scan.length)) if scan.reverse else range(scan.length):
        elements = [known[name].select(dim, t) for name, dim in zip(scan.sequences, scan.dims_read, strict=True)]
        given = zip((value.name for value in scan.step.inputs), (*states, *elements, *fixed), strict=True)
        inside = dict(given)
        for inner in scan.step.ops:
            inside.update(results_of(inner, inside))
        states = [inside[name] for name in scan.following]
        rows.append([inside[name] for name in scan.made])
    if scan.reverse:
        rows.reverse()
    made = [torch.stack(each, dim) for each, dim in zip(zip(*rows, strict=True), scan.dims_made, strict=True)]
    return {value.name: x for value, x in zip(op.results, (*states, *made), strict=True)}


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window: int = 0,
    sinks: Tensor | None = None,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
    reads: tuple[int, ...] = (),
) -> Tensor:
    """Attention with every step spelled out; each head of k and v serves a group of heads of q.

    Rows that read no position are zero.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if window:
        ahead = torch.arange(scores.shape[-2])[:, None] - torch.arange(scores.shape[-1])
        scores = scores.masked_fill(ahead.abs() >= window, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if limits is not None:
        at = torch.arange(k.shape[2])[None] if keys is None else keys
        passed = (limits[:, :, None] <= at[:, None, :, None]).sum(-1)
        scores = scores.masked_fill(passed.unsqueeze(1) % 2 == 0, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    shares = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    return shares[..., : v.shape[-2]] @ v


def _cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None, ignore: int, smoothing: float) -> Tensor:
    """The loss of each row, over the last dimension."""
    flat = F.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        weight,
        ignore_index=ignore,
        label_smoothing=smoothing,
        reduction="none",
    )
    return flat.reshape(labels.shape)


def _fourier(x: Tensor, dims: list[int], inverse: bool) -> Tensor:
    for dim in dims:
        turns = torch.outer(*(torch.arange(x.shape[dim], dtype=x.dtype),) * 2) * (2 * math.pi / x.shape[dim])
        cos, sin = turns.cos(), turns.sin() if inverse else -turns.sin()
        real, imag = x.movedim(dim, -2).unbind(-1)
        x = torch.stack((real @ cos - imag @ sin, real @ sin + imag @ cos), -1).movedim(-2, dim)
    return x


def _route(experts: Tensor, count: int, stay: bool, most: float, axis: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in the order of their experts, all of which are on this device."""
    order = experts.argsort(stable=True)
    return order, torch.arange(len(order)), experts[order], torch.bincount(experts, minlength=count).repeat(2, 1)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, rotated: int | None, interleaved: bool) -> Tensor:
    rotated = x.shape[-1] if rotated is None else rotated
    half = rotated // 2
    first = torch.arange(half) * (2 if interleaved else 1)
    second = first + (1 if interleaved else half)
    where = (first, second) if cos.shape[-1] == rotated else (torch.arange(half),) * 2
    out = x.clone()
    out[..., first] = x[..., first] * cos[..., where[0]] - x[..., second] * sin[..., where[0]]
    out[..., second] = x[..., second] * cos[..., where[1]] + x[..., first] * sin[..., where[1]]
    return out


def _rotary_backward(grad: Tensor, cos: Tensor, sin: Tensor, rotated: int | None, interleaved: bool) -> Tensor:
    x = torch.zeros_like(grad)
    return torch.func.vjp(lambda x: _rotary(x, cos, sin, rotated, interleaved), x)[1](grad)[0]  # type: ignore[no-any-return]


def _split(x: Tensor, sizes: Sequence[int], dim: int, ways: int = 1) -> tuple[Tensor, ...]:
    parts = x.unflatten(dim, (ways, -1)).split([size // ways for size in sizes], dim + 1)
    return tuple(part.flatten(dim, dim + 1) for part in parts)


_COMPOSITES: Mapping[str, Callable[..., Any]] = {
    "linear": lambda x, w, b=None: F.linear(x, w, b),
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "mask_classes": lambda x, classes: torch.cat([x[..., :classes], torch.full_like(x[..., classes:], -math.inf)], -1),
    "fourier": _fourier,
    "incoming_gradient": lambda y: torch.zeros_like(y),
    "times_loss_scale": lambda x: x,
    "own_gradient": lambda results, operands, gradients, **_: results,
    "rms_norm": F.rms_norm,
    "layer_norm": lambda x, shape, w, b, eps: F.layer_norm(x, shape, w, b, eps),
    "rotary": _rotary,
    "rotary_backward": _rotary_backward,
    "dropout_backward": lambda grad, kept, p: grad * kept / (1 - p),
    "drop": lambda x, kept, p: x * kept / (1 - p),
    "reshape": lambda x, sizes: x.reshape(sizes),
    "split": _split,
    "to": lambda x, dtype: x.to(dtype),
    "route": _route,
    "dispatch": lambda x, order, grouped, counts, axis: x[order],
    "combine": lambda x, order, grouped, counts, axis: x[order.argsort()],
    "expert_order": lambda experts, count: (
        order := experts.argsort(stable=True),
        order.argsort(),
        experts[order],
    ),
    "permute_rows": lambda x, order, inverse, copies=1: x[order // copies],
    "linear_sum_assignment": linear_sum_assignment,
    "selected_places": lambda mask, count: (mask.cumsum(1) - 1).clamp_min(0),
    "divide_rows": lambda x, counts, shares: x.split(counts[1].view(-1, len(shares)).sum(0).tolist()),
    "join_rows": lambda parts, counts, shares: torch.cat(parts),
    **{name: getattr(bags, name) for name in ("bag_max", "bag_max_grad", "bag_sum", "bag_sum_grad")},
    "expert_rows": lambda experts, w, groups=1: w[experts],
    "expert_matmul": lambda x, experts, w, groups=1, ordered=False: torch.einsum("si,sio->so", x, w[experts]),
    "sum": lambda x, dims, keepdim=False, dtype=None: x.sum(dims, keepdim, dtype=dtype) if dims else x,
    "full": lambda sizes, fill, dtype: torch.full(sizes, fill, dtype=dtype),
    "tensor": lambda values, sizes, dtype: torch.tensor(values, dtype=dtype).reshape(sizes),
}
