"""Whether a step of a package can be recorded as CUDA graphs, in which the host cannot take part."""

from __future__ import annotations

from dataclasses import dataclass

from partc.errors import PartcError, Source
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import Op, Program

_ASKS = frozenset({"route", "expert_matmul", "expert_matmul_grad_rows", "expert_matmul_grad_weight"})
_MASKABLE = frozenset({"index", "index_put"})  # tagged for their masks alone, which have no shape to compile with


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """A reason against it, and a remedy."""

    cause: str
    help: str
    source: Source | None = None

    def error(self) -> PartcError:
        return PartcError("P0419", f"--cuda-graphs: {self.cause}", help=self.help, source=self.source)


def obstacle(program: Program) -> Obstacle | None:
    """The first obstacle; None if there is none."""
    if program.mesh.axis(PIPELINE_AXIS) > 1:
        return Obstacle(
            cause="pipeline ranks send to each other when the host says so, in the order of its schedule",
            help="leave out --cuda-graphs, or use a mesh without pp",
        )
    if program.kernels == "inductor":
        return Obstacle(
            cause="what torch.compile makes of regions decides on the host when to compile again",
            help="leave out --cuda-graphs, or add --kernels triton or --kernels aten",
        )
    low = any(value.type.dtype == "f16" for region in program.regions for value in region.params)
    if program.transport.compress and low:
        return Obstacle(
            cause="what --compress-grads leaves out is scaled as the loss of an fp16 model, by a number of the host's",
            help="leave out --cuda-graphs or --compress-grads, or use --precision bf16",
        )
    for region in program.regions:
        for graph in region.graphs:
            for op in graph.ops:
                if _asks(op):
                    cause = f"the host has to know what {op.name} is given: how many rows each expert has, for example"
                    return Obstacle(cause=cause, help="leave out --cuda-graphs", source=op.source)
    return None


def _asks(op: Op) -> bool:
    """Whether the operation waits for numbers from the device."""
    if op.name in _ASKS or op.body:
        return op.name in _ASKS or any(map(_asks, op.body))
    import torch

    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    namespace, _, name = op.name.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), name, None)
    if packet is None or name.rstrip("_") in _MASKABLE:
        return False
    return any(tag in getattr(packet, overload).tags for overload in packet.overloads() for tag in tags)
