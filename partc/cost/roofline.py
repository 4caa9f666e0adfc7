"""The duration of an operation on one rank: the slower of its arithmetic and its traffic, on a named machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from partc.ir.collectives import MOVING, cost, num_blocks
from partc.ir.layout import Sizes
from partc.ir.operations import VIEWS
from partc.ir.program import ITEMSIZE, SPARSE, DType, Op, TensorType
from partc.rules import OpRule, flops, has_products, resolve_lowered


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The rates that a rank reaches (not those of the data sheet): an H100 on NVLink. Only their ratios matter."""

    flops: Mapping[DType, float]  # of matrix products, per second
    memory: float = 2.6e12  # bytes per second, read or written
    link: float = 3.0e11  # bytes per second that a rank receives in a collective
    start: float = 4e-6  # seconds until a kernel runs
    meeting: float = 2e-5  # seconds until all ranks have entered a collective


_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
EXPERTS_GRADIENT = "expert_matmul_grad_weight"  # of rows [s, o], rows' experts, and inputs [s, i]: [experts, i, o]
_LOOKUPS = frozenset({"embedding", "embedding_shard"})
H100 = Machine(flops={"f64": 5e13, "f32": 3e14, "bf16": 6e14, "f16": 6e14})


def seconds(op: Op, types: Mapping[str, TensorType], sizes: Sizes, machine: Machine = H100) -> float:
    """The seconds of one run of an operation with local shapes; views take none."""
    if op.name in VIEWS:
        return 0.0
    axis = dict(op.attrs).get("axis")
    if op.name in MOVING and isinstance(axis, str):
        moved = cost(op.name, sizes[axis], types[next(op.refs())].local_bytes(sizes))
        return machine.meeting + moved / machine.link if sizes[axis] > 1 else 0.0
    shapes = {name: types[name].local(sizes) for name in op.refs()}
    results = [value.type.local(sizes) for value in op.results]
    visits = num_blocks(op, sizes)
    flops, _ = product_flops(op, shapes, results, visits)
    work = flops / machine.flops.get(results[0].dtype, machine.flops["f32"]) if results else 0.0
    return visits * machine.start + max(visits * traffic(op, shapes, results) / machine.memory, work)


def traffic(op: Op, shapes: Mapping[str, TensorType], results: Sequence[TensorType]) -> int:
    """The bytes that an operation reads and writes. Of an embedding table, only rows that it looks up or updates
    count.
    """
    read, made = [*shapes.values()], [*results]
    if op.name in _LOOKUPS:
        read[0] = made[0]
    elif SPARSE in dict(op.attrs):
        made = read[:1]
    return sum(math.prod(type.shape) * ITEMSIZE[type.dtype] for type in (*read, *made))


def product_flops(
    op: Op, shapes: Mapping[str, TensorType], results: Sequence[TensorType], parts: int = 1
) -> tuple[float, OpRule | None]:
    """The floating-point operations of the matrix products in `op` on local shapes, and the rule of `op`.

    `parts` is the number of blocks of keys and values that a rank sees in ring attention.
    """
    if op.name in _CONVOLUTIONS:
        return _convolved(op, shapes, results), None
    if op.name == EXPERTS_GRADIENT:
        return 2.0 * math.prod(next(iter(shapes.values())).shape) * results[0].shape[1], None
    if not has_products(op):
        return 0.0, None
    made = tuple(replace(value, type=type) for value, type in zip(op.results, results, strict=True))
    rule = resolve_lowered(replace(op, results=made), shapes)
    return (float(flops(op, rule, parts=parts)) if rule is not None else 0.0), rule


def _convolved(op: Op, shapes: Mapping[str, TensorType], results: Sequence[TensorType]) -> float:
    """The floating-point operations of a convolution, or of its gradients.

    Each result (of a transposed convolution: each input) is multiplied with a filter's weights. The gradient of the
    inputs and the gradient of the weights each cost the same.
    """
    names = list(op.refs())
    backward = op.name == "convolution_backward"
    inputs, weight = (shapes[name].shape for name in names[backward : backward + 2])
    outputs = shapes[names[0]].shape if backward else results[0].shape
    transposed = any(arg is True for arg in op.args)
    wanted = op.args[-1] if backward else (True,)  # gradients of inputs, weights, bias
    times = sum(flag is True for flag in wanted[:2]) if isinstance(wanted, tuple) else 2
    return 2.0 * times * math.prod(inputs if transposed else outputs) * math.prod(weight[1:])
