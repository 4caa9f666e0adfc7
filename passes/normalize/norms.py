"""Batch and instance norms in plain operations, so that their statistics can be sums over ranks.

    y = batch_norm(x, w, b, rm, rv, True, 0.1, 1e-5)  ->  mean = sum(x, (0, 2, 3), True) / n
                                                          c    = x - mean
                                                          d    = x - mean.detach()
                                                          var  = sum(d * d, (0, 2, 3), True) / n
                                                          y    = c * rsqrt(var + 1e-5) * w + b
                                                          rm.copy_(0.9 * rm + 0.1 * mean)
                                                          rv.copy_(0.9 * rv + 0.1 * n / (n - 1) * var)

The variance passes no gradient to the mean, because deviations add up to zero. In backward, the two sums over ranks
are then independent, and `overlap` joins them. `differentiate` merges the equal values c and d. Where forward computes
gradients itself, d is c, since the gradient of the variance depends on the mean.

Running statistics use the unbiased variance (Ioffe and Szegedy 2015, algorithm 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from partc.ir.program import Arg, Graph, Op, Ref, TensorType, Value
from partc.passes.normalize.inner_gradients import NAME as INNER_GRADIENT


def plain_norms(graph: Graph, types: dict[str, TensorType]) -> Graph:
    """The graph with every batch_norm and instance_norm spelled out. `types` are those of its parameters."""
    if not any(op.name in ("batch_norm", "instance_norm") for op in graph.ops):
        return graph
    known = types | graph.types()
    twice = any(op.name == INNER_GRADIENT for op in graph.ops)
    ops: list[Op] = []
    for op in graph.ops:
        ops.extend(_Norm(op, known, twice).spelled() if op.name in ("batch_norm", "instance_norm") else (op,))
    return replace(graph, ops=tuple(ops))


@dataclass(slots=True)
class _Norm:
    """One norm: x, weight, bias, running mean, running variance, whether it uses x's own statistics, momentum, eps."""

    op: Op
    types: dict[str, TensorType]
    twice: bool  # whether its gradient may have a gradient
    ops: list[Op] = field(default_factory=list)

    def spelled(self) -> list[Op]:
        x, weight, bias, mean, var, training, momentum, eps = self.op.args[:8]
        assert isinstance(x, Ref) and isinstance(eps, float) and isinstance(momentum, float)
        shape = self.types[x.name].shape
        channels = (1, shape[1], *(1 for _ in shape[2:]))
        whole = self.types[x.name]
        each = self.op.name == "instance_norm"
        if training:
            dims = tuple(dim for dim in range(len(shape)) if dim != 1 and not (each and dim == 0))
            count = math.prod(shape[dim] for dim in dims)
            small = tuple(1 if dim in dims else size for dim, size in enumerate(shape))
            total = self.add("sum", (x, dims, True), "sum", small)
            found = self.add("div", (total, count), "mean", small)
            centered = self.add("sub", (x, found), "centered", shape)
            apart = centered
            if not self.twice:
                apart = self.add("sub", (x, self.add("detach", (found,), "held", small)), "apart", shape)
            squares = self.add("mul", (apart, apart), "squares", shape)
            spread = self.add("div", (self.add("sum", (squares, dims, True), "spread", small), count), "var", small)
            if isinstance(mean, Ref) and isinstance(var, Ref):
                self.track(mean, found, momentum, 1.0)
                self.track(var, spread, momentum, count / max(count - 1, 1))
        else:
            centered = self.add("sub", (x, self.add("reshape", (mean, channels), "mean", channels)), "centered", shape)
            spread = self.add("reshape", (var, channels), "var", channels)
            small = channels
        scale = self.add("rsqrt", (self.add("add", (spread, eps), "shifted", small),), "rstd", small)
        y = self.add("mul", (centered, scale), "unit", shape)
        for name, operand, stem in (("mul", weight, "scaled"), ("add", bias, "biased")):
            if operand is not None:
                y = self.add(name, (y, self.add("reshape", (operand, channels), f"{stem}_by", channels)), stem, shape)
        self.ops[-1] = replace(self.ops[-1], results=(replace(self.op.result, type=whole),))
        return self.ops

    def track(self, running: Ref, found: Ref, momentum: float, correction: float) -> None:
        """running = (1 - momentum) * running + momentum * correction * found, averaged over instances."""
        size = self.types[running.name].shape
        shape = self.types[found.name].shape
        found = self.add("detach", (found,), f"{running.name}_found", shape)
        if shape[0] > 1:
            one = (1, *shape[1:])
            total = self.add("sum", (found, (0,), True), f"{running.name}_all", one)
            found = self.add("div", (total, shape[0]), f"{running.name}_each", one)
        flat = self.add("reshape", (found, size), f"{running.name}_flat", size)
        part = self.add("mul", (flat, momentum * correction), f"{running.name}_part", size)
        old = self.add("mul", (running, 1 - momentum), f"{running.name}_old", size)
        new = self.add("add", (old, part), f"{running.name}_new", size)
        self.add("copy_", (running, new), f"{running.name}_kept", size)

    def add(self, name: str, args: tuple[Arg, ...], stem: str, shape: tuple[int, ...]) -> Ref:
        dtype = self.op.result.type.dtype
        value = Value(name=f"{self.op.result.name}_{stem}", type=TensorType.replicated(dtype, shape))
        self.types[value.name] = value.type
        self.ops.append(Op(name=name, args=args, results=(value,), source=self.op.source))
        return Ref(value.name)
