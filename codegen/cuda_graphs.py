"""Whether a step of a package can be recorded as CUDA graphs, which run without the host."""

from __future__ import annotations

from dataclasses import dataclass

from partc.errors import PartcError, Source
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import Op, Program

_ASKS = frozenset({"route", "expert_matmul", "expert_matmul_grad_rows", "expert_matmul_grad_weight"})
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
    low = any(value.type.dtype == "f16" for region in program.regions for value in region.params)
    if program.transport.compress and low:
        return Obstacle(
            cause="in fp16, the error feedback of --compress-grads is scaled by the loss scale, a number on the host",
            help="leave out --cuda-graphs or --compress-grads, or use --precision bf16",
        )
    for region in program.regions:
        for graph in region.graphs:
            for op in graph.ops:
                if _reads_device_numbers(op):
                    cause = f"the host has to read operands of {op.name}, such as the number of rows of each expert"
                    return Obstacle(cause=cause, help="leave out --cuda-graphs", source=op.source)
    return None


def _reads_device_numbers(op: Op) -> bool:
    """Whether the operation waits for numbers from the device."""
    if op.name in _ASKS or op.body:
        return op.name in _ASKS or any(map(_reads_device_numbers, op.body))
    import torch

    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    namespace, _, name = op.name.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), name, None)
    if packet is None or name.rstrip("_") in _MASKABLE:
        return False
    return any(tag in getattr(packet, overload).tags for overload in packet.overloads() for tag in tags)
