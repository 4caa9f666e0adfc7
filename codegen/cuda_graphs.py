"""Whether a step of a package can be recorded as CUDA graphs, which run without the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partc.errors import PartcError, Source
from partc.ir.layout import Sizes
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import Op, Program, TensorType

_PRODUCTS = frozenset({"expert_matmul", "expert_matmul_grad_rows", "expert_matmul_grad_weight"})
_EVEN = 8  # torch's grouped product needs rows that start at multiples of 16 bytes: 8 numbers of 16 bits
# Torch tags them as data-dependent only because of masks, which do not occur here.
_MASKABLE = frozenset({"index", "index_put"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """A reason against CUDA graphs, and a remedy."""

    cause: str
    help: str
    source: Source | None = None

    def error(self) -> PartcError:
        return PartcError("P0419", f"--cuda-graphs: {self.cause}", help=self.help, source=self.source)


def obstacle(program: Program) -> Obstacle | None:
    """The first obstacle in a program; None if it can be recorded."""
    if program.mesh.axis(PIPELINE_AXIS) > 1:
        return Obstacle(
            cause="the host decides when pipeline ranks send to each other, in the order of the schedule",
            help="leave out --cuda-graphs, or use a mesh without pp",
        )
    if program.kernels == "inductor":
        return Obstacle(
            cause="functions compiled by torch.compile decide on the host when to compile again",
            help="leave out --cuda-graphs, or add --kernels triton or --kernels aten",
        )
    if program.transport.compress and program.scaled:
        return Obstacle(
            cause="in fp16, the error feedback of --compress-grads is scaled by the loss scale, a number on the host",
            help="leave out --cuda-graphs or --compress-grads, or use --precision bf16",
        )
    for region in program.regions:
        for graph in region.graphs:
            types = region.types(graph)
            for op in graph.ops:
                if _reads_device_numbers(op, types, program.sizes):
                    cause = f"the host has to read operands of {op.name}, such as the number of rows of each expert"
                    more = f", or use --precision bf16 and widths that {_EVEN} divides" * (op.name in _PRODUCTS)
                    return Obstacle(cause=cause, help=f"leave out --cuda-graphs{more}", source=op.source)
    return None


def check_recordable(program: Program) -> None:
    """Check that a program's steps can be recorded. Raises PartcError P0419."""
    if (found := obstacle(program)) is not None:
        raise found.error()


def _reads_device_numbers(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> bool:
    """Whether the operation waits for numbers from the device."""
    if op.body:
        inside = {**types, **{value.name: value.type for step in op.body for value in step.results}}
        return any(_reads_device_numbers(step, inside, sizes) for step in op.body)
    if op.name in _PRODUCTS:
        return not _is_one_kernel(op, types, sizes)
    if op.name in ("route", "linear_sum_assignment"):
        return True
    import torch

    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    namespace, _, name = op.name.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), name, None)
    if packet is None or name.rstrip("_") in _MASKABLE:
        return False
    return any(tag in getattr(packet, overload).tags for overload in packet.overloads() for tag in tags)


def _is_one_kernel(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> bool:
    """Whether torch's grouped product computes all experts (`fits_grouped_product` of runtime/ops/experts.py)."""
    factors = [types[name] for name in op.refs() if types[name].differentiable]
    widths = [size for type in factors for size in type.layout.local_shape(sizes)[1:]]
    return all(type.dtype == "bf16" for type in factors) and all(size % _EVEN == 0 for size in widths)
