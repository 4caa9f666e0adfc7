"""Group operations that one kernel does in one pass over memory.

    forward:                                     forward:
      gate = linear(x, wg)                         gate = linear(x, wg)
      a    = silu(gate)                            up   = linear(x, wu)
      up   = linear(x, wu)                 ->      h    = fused(gate, up, kernel="silu_mul")
      h    = mul(a, up)                            | a = silu(gate)
      y    = linear(h, wd)                         | h = mul(a, up)
      return y                                     y    = linear(h, wd)
                                                   return y

A kernel goes through the elements of its results, which all have one shape, and computes each from what
it reads (partc.rules.kernels says which operations can be written so). Views inside a kernel are index
expressions: those that lead to what it reads belong to it, and those that would copy what it makes. A
kernel with norms, softmaxes or sums in it goes through rows: it may make an element, a number for each
row, and sums down all of them (partc.passes.fuse_forms). Of long rows it holds few, or it would spill:
the derivative of a norm is two kernels then (partc.passes.fuse_halves, fuse_registers). Two groups
become one where that saves time by the roofline: a kernel's launch, and the bytes of what they hand
over or both read. What others read, or is saved, is still written; what backward kernels can make from
what they read anyway is saved no more (partc.passes.fuse_saved), and what has a second result for its
derivative's sake is spelled without it (partc.passes.fuse_plain). Nothing is grouped across a matrix
product, attention or a collective: a group never waits for what depends on another part of it.
"""

from __future__ import annotations

from dataclasses import replace

from partc.layout import Sizes
from partc.passes.fuse_cross_entropy import streamed
from partc.passes.fuse_dropout import redrawn
from partc.passes.fuse_groups import fused
from partc.passes.fuse_names import named
from partc.passes.fuse_over import over
from partc.passes.fuse_plain import plain
from partc.passes.fuse_saved import lean
from partc.passes.row_losses import totalled
from partc.program import Op, Program, Region
from partc.rules.kernels import CHUNKED


def fuse(program: Program, *, kernels: str = "aten") -> Program:
    """Fuse what runs for every microbatch, if `kernels` are Triton's; leave that to torch.compile, if inductor's."""
    if kernels != "triton":
        return replace(program, compiled=kernels == "inductor")
    regions = tuple(
        _grouped(region, program.sizes) if region.phase == "microbatch" else region for region in program.regions
    )
    return named(over(replace(program, regions=tuple(map(_chunked, regions)), fused=True)))


def _grouped(region: Region, sizes: Sizes) -> Region:
    region = redrawn(totalled(plain(region, sizes)))
    return fused(streamed(lean(region, sizes), sizes), sizes)


def _chunked(region: Region) -> Region:
    """The region with losses in chunks that go through each chunk's logits by kernels."""

    def told(op: Op) -> Op:
        return replace(op, attrs=(*op.attrs, ("kernels", True))) if op.name in CHUNKED else op

    return region.mapped(lambda graph: replace(graph, ops=tuple(map(told, graph.ops))))
