"""The kernels of a package: the Triton source of all fused operations of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from partc.codegen.kernels.cross_entropy import cross_entropy
from partc.codegen.kernels.embedding import embedding, sorting_workspace
from partc.codegen.kernels.kernel import Kernel, kernel_name
from partc.codegen.kernels.pointwise import pointwise
from partc.codegen.kernels.rows import launch_workspace, rows
from partc.ir.layout import Sizes
from partc.ir.program import DType, Op, Program, TensorType
from partc.rules.kernels import STREAMED, TABLES


def kernels(program: Program) -> Iterator[Kernel]:
    """All kernels, each once, by name; equal operations share one."""
    done: set[str] = set()
    for region in program.regions:
        for graph in region.graphs:
            types = region.types(graph)
            for op in graph.ops:
                if op.body and kernel_name(op) not in done:
                    done.add(kernel_name(op))
                    yield kernel(op, types, program.sizes)


def kernel(op: Op, types: Mapping[str, TensorType], sizes: Sizes, *, rounding: bool = False) -> Kernel:
    """The kernel of a fused operation; `rounding` rounds after every elementwise operation, for tests."""
    if op.body[0].name in TABLES:
        return embedding(op, types, sizes)
    if any(step.name in STREAMED for step in op.body):
        return cross_entropy(op, types, sizes)
    if "along" in dict(op.attrs):
        return rows(op, types, sizes)
    return pointwise(op, types, sizes, rounding=rounding)


def held_beside(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> Sequence[tuple[tuple[int, ...], DType]]:
    """The shapes and types of the memory that a launch needs besides its arguments and results."""
    if op.body[0].name in TABLES:
        return sorting_workspace(op, types, sizes)
    return launch_workspace(op, types, sizes) if "along" in dict(op.attrs) else ()
