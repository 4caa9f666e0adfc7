"""Group operations that one kernel computes in one pass over memory.

    grad_bias   = sum(grad_out, (0, 1), False)
    grad_x_1    = matmul_grad_left(grad_out, weight)
    grad_weight = matmul_grad_right(grad_out, x, True)
    grad_x      = add(grad_out, grad_x_1)
  ->
    grad_x_1          = matmul_grad_left(grad_out, weight)
    grad_weight       = matmul_grad_right(grad_out, x, True)
    grad_bias, grad_x = fused(grad_out, grad_x_1, kernel="sum_add", …)
    | grad_bias = sum(grad_out, (0, 1), False)
    | grad_x    = add(grad_out, grad_x_1)

A kernel iterates over the elements of its results, which all have one shape, and computes each from its operands
(partc.rules.kernels lists the possible operations). Views inside a kernel are index expressions: views of its operands
belong to it, and so do views that would copy its results. A kernel with norms, softmaxes or sums iterates over rows: it
may write elements, a number for each row, and sums over all rows (iteration_spaces.py). It holds only few long rows at
a time, as registers would spill otherwise; the derivative of a norm is then two kernels (norm_halves.py, registers.py).
Results that only a `cat` reads are written side by side.

Two groups are joined if that saves time by the roofline: a launch, and the bytes of values that one passes to the other
or that both read. Values that others read, or that are saved, are still written. Values that backward kernels can
compute from their other operands are no longer saved (rematerialize.py), and values that kernels on both sides of a
collective read are made by each (cheaper_reads.py). An operation with a second result for its
derivative is replaced by one without it (single_results.py). No group extends across a matrix product, attention or a
collective: no operation outside a group may depend on one part of it and be read by another.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

from partc.ir.layout import Sizes
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import Kernels, Op, Program, Region
from partc.passes.fuse.cheaper_reads import with_cheaper_reads
from partc.passes.fuse.cross_entropy import with_streaming_kernels
from partc.passes.fuse.dropout import with_drawn_masks
from partc.passes.fuse.groups import fused
from partc.passes.fuse.in_place import mark_overwrites
from partc.passes.fuse.names import named
from partc.passes.fuse.rematerialize import with_fewer_saved
from partc.passes.fuse.rotary import spelled_rotary
from partc.passes.fuse.single_results import with_plain_derivatives
from partc.passes.row_losses import with_shared_weight_sums
from partc.rules.kernels import CHUNKED

Fusions = MutableMapping[tuple[object, ...], Region]


def fuse(program: Program, *, kernels: Kernels = "aten", fusions: Fusions | None = None) -> Program:
    """Set the source of the kernels of the regions that run for every microbatch; with triton, fuse their graphs.

    `fusions` has fused regions of other programs, which are used for equal regions of the same sizes, and receives this
    program's.
    """
    regions = tuple(
        replace(region, kernels=kernels) if region.phase == "microbatch" else region for region in program.regions
    )
    if kernels != "triton":
        return replace(program, regions=regions)
    known = {} if fusions is None else fusions
    sizes = tuple(item for item in program.sizes.items() if item[0] != PIPELINE_AXIS)

    def grouped(region: Region) -> Region:
        found = known.get((region, sizes))
        if found is None:
            found = known[region, sizes] = _grouped(region, program.sizes)
        return found

    done = (grouped(region) if region.phase == "microbatch" else region for region in regions)
    return named(mark_overwrites(replace(program, regions=tuple(map(_chunked, done)))))


def _grouped(region: Region, sizes: Sizes) -> Region:
    region, rotations = spelled_rotary(region, sizes)
    region = with_drawn_masks(with_shared_weight_sums(with_plain_derivatives(region, sizes)))
    region = with_streaming_kernels(with_fewer_saved(region, sizes), sizes)
    return fused(with_cheaper_reads(region, sizes), sizes, rotations)


def _chunked(region: Region) -> Region:
    """The region with chunked losses that run Triton kernels on each chunk's logits."""

    def with_kernel(op: Op) -> Op:
        return replace(op, attrs=(*op.attrs, ("kernels", True))) if op.name in CHUNKED else op

    return region.mapped(lambda graph: replace(graph, ops=tuple(map(with_kernel, graph.ops))))
