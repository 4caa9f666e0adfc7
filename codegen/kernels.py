"""The kernels of a package: what every fused operation of a program is written as, in Triton."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from partc.codegen.cross_entropy import cross_entropy
from partc.codegen.embedding import embedding, working
from partc.codegen.kernel import Kernel, kernel_name
from partc.codegen.pointwise import pointwise
from partc.codegen.rows import parts, rows
from partc.layout import Sizes
from partc.program import DType, Op, Program, TensorType
from partc.rules.kernels import STREAMED, TABLES


def kernels(program: Program) -> Iterator[Kernel]:
    """Every kernel once, by name; operations that are alike share one."""
    done: set[str] = set()
    for region in program.regions:
        for graph in region.graphs:
            types = {value.name: value.type for value in (*region.params, *graph.definitions().values())}
            for op in graph.ops:
                if op.body and kernel_name(op) not in done:
                    done.add(kernel_name(op))
                    yield kernel(op, types, program.sizes)


def kernel(op: Op, types: Mapping[str, TensorType], sizes: Sizes, *, rounding: bool = False) -> Kernel:
    """Of a fused operation; `rounding` after every elementwise operation is for tests."""
    if op.body[0].name in TABLES:
        return embedding(op, types, sizes)
    if any(step.name in STREAMED for step in op.body):
        return cross_entropy(op, types, sizes)
    if "along" in dict(op.attrs):
        return rows(op, types, sizes)
    return pointwise(op, types, sizes, rounding=rounding)


def held_beside(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> Sequence[tuple[tuple[int, ...], DType]]:
    """Shapes and types of what a launch holds besides its arguments and results."""
    if op.body[0].name in TABLES:
        return working(op, types, sizes)
    return parts(op, types, sizes) if "along" in dict(op.attrs) else ()
