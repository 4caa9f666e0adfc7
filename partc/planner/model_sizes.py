"""The sizes of a model that limit its plans: weights, experts, and results of matrix products."""

from __future__ import annotations

import math
from collections.abc import Iterator

from partc.ir.expert_products import ExpertMatmul
from partc.ir.program import FLOATING, ITEMSIZE, Program, Region, TensorType
from partc.planner.tables import LOOKUP
from partc.sharding.placements import expert_weights


def looked_up_parameters(program: Program) -> Iterator[str]:
    """The parameters whose rows are looked up."""
    for call in program.calls:
        region = program.region(call.region)
        looked_up = {next(op.refs(), "") for op in region.forward.ops if op.name.startswith(LOOKUP)}
        names = zip(region.params, call.params, strict=True)
        yield from (name for value, name in names if value.name in looked_up)


def largest_product(program: Program) -> int:
    """The bytes of the largest result of a matrix product."""
    return max((size for region in program.regions for size, _ in matrix_products(region)), default=0)


def matrix_products(region: Region) -> Iterator[tuple[int, int]]:
    """Yields the bytes of the result of each matrix product, and its flops."""
    types = region.types(region.forward)
    for op in region.forward.ops if region.phase == "microbatch" else ():
        if op.name in ("linear", "matmul"):
            count = math.prod(op.result.type.shape)
            yield count * ITEMSIZE[op.result.type.dtype], 2 * count * types[next(op.refs())].shape[-1]


def expert_count(program: Program) -> int:
    """The greatest common divisor of all layers' numbers of experts; 0 without experts."""
    found = 0
    for region in program.regions:
        types = region.types(region.forward)
        for op in region.forward.ops:
            if product := ExpertMatmul.of(op):
                found = math.gcd(found, types[product.weights].shape[0])
    return found


def expert_parameters(program: Program) -> Iterator[str]:
    """The parameters that are weights of experts."""
    for call in program.calls:
        region = program.region(call.region)
        weights = expert_weights(region.forward, region.types(region.forward))
        yield from (name for value, name in zip(region.params, call.params, strict=True) if value.name in weights)


def floating_bytes(type: TensorType) -> int:
    """The bytes of a tensor; 0 if its elements are integers."""
    return math.prod(type.shape) * ITEMSIZE[type.dtype] if type.dtype in FLOATING else 0
