"""A rank of what torch itself offers for the same model: DDP, FSDP2, tensor parallelism over DTensor, its 1F1B.

All have AdamW fused, the same initial weights and batches as the package, and its setting of the C
library's allocator, which helps them as much.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gate import Task, read_task, wait_for_round
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

Batch = dict[str, Tensor]
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A model in parallel: what it trains, and a step's forward and backward (the loss, where it is known)."""

    parameters: list[nn.Parameter]
    step: Callable[[Batch], Tensor | None]


def ddp(model: nn.Module, rank: int, task: Task) -> Peer:
    """Each rank has half of the batch. The loss is that of the whole batch, as the package's is."""
    world = dist.get_world_size()
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(batch: Batch) -> Tensor:
        part = {name: x.chunk(world)[rank] for name, x in batch.items()}
        count = (part["labels"] != -100).sum()
        dist.all_reduce(count)
        logits = parallel(part["ids"])
        labels = part["labels"].flatten()
        nll = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
        (nll * (world / count)).backward()  # DDP averages
        loss = nll.detach() / count
        dist.all_reduce(loss)
        return loss

    return Peer(parameters=list(model.parameters()), step=step)


def fsdp(model: Any, rank: int, task: Task, *, again: bool) -> Peer:
    """Each block a unit, as the package has its regions; `again`: gathered anew for backward (ZeRO-3)."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=again)

    def step(batch: Batch) -> Tensor:
        part = {name: x.chunk(world)[rank] for name, x in batch.items()}
        count = (part["labels"] != -100).sum()
        dist.all_reduce(count)
        logits = model(part["ids"])
        nll = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), ignore_index=-100, reduction="sum")
        (nll * (world / count)).backward()  # FSDP averages
        loss = nll.detach() / count
        dist.all_reduce(loss)
        return loss

    return Peer(parameters=list(model.parameters()), step=step)


def tensor_parallel(model: Any, rank: int, task: Task, *, sequences: bool) -> Peer:
    """Columns, then rows; logits stay sharded. `sequences`: what's between is cut along positions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    between = Shard(1) if sequences else Replicate()
    outer: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    inner: dict[str, Any] = {
        **{name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")},
        **{name: RowwiseParallel(output_layouts=between) for name in ("attn.wo", "mlp.down")},
    }
    if sequences:
        whole = Replicate()
        outer["norm"] = SequenceParallel()
        inner |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        inner["attn"] = PrepareModuleInput(
            input_layouts=(between, None, None), desired_input_layouts=(whole, None, None)
        )
        inner["mlp"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,))
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)

    def step(batch: Batch) -> Tensor:
        with loss_parallel():
            logits = model(batch["ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
            loss.backward()
        whole_loss: Tensor = loss.detach().full_tensor()
        return whole_loss

    return Peer(parameters=list(model.parameters()), step=step)


class Part(nn.Module):
    """The blocks of one pipeline stage, with the embedding before the first or the head after the last."""

    def __init__(self, model: Any, rotary: Callable[[int], tuple[Tensor, Tensor]], blocks: range) -> None:
        super().__init__()
        self.rotary = rotary
        self.embed = model.embed if blocks.start == 0 else None
        self.blocks = model.blocks[blocks.start : blocks.stop]
        last = blocks.stop == len(model.blocks)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        cos, sin = self.rotary(x.shape[1])
        for block in self.blocks:
            x = block(x, cos, sin)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipeline(model: Any, rank: int, task: Task) -> Peer:
    """Cut where the package is cut."""
    plan = json.loads((task.package / "plan.json").read_text())
    config, depth = model.config, len(model.blocks)
    cut = sum(plan["parameters"][f"blocks.{i}.norm1.weight"]["stages"] == [0] for i in range(depth))
    model_file = sys.modules["partc_model_file"]
    tables: dict[int, tuple[Tensor, Tensor]] = {}

    def rotary(length: int) -> tuple[Tensor, Tensor]:
        if length not in tables:
            tables[length] = model_file.rotary(length, config.width // config.heads, config.theta)
        return tables[length]

    part = Part(model, rotary, range(cut) if rank == 0 else range(cut, depth))
    microbatches = plan["microbatches"]
    count = torch.ones(())

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return nll / count

    stage = PipelineStage(part, rank, dist.get_world_size(), CPU)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of, scale_grads=False)

    def step(batch: Batch) -> Tensor | None:
        if rank == 0:
            schedule.step(batch["ids"])
            return None
        count.copy_((batch["labels"] != -100).sum())
        losses: list[Tensor] = []
        schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum()

    return Peer(parameters=list(part.parameters()), step=step)


PEERS: dict[str, Callable[[nn.Module, int, Task], Peer]] = {
    "ddp": ddp,
    "fsdp2": lambda model, rank, task: fsdp(model, rank, task, again=False),
    "fsdp3": lambda model, rank, task: fsdp(model, rank, task, again=True),
    "tp": lambda model, rank, task: tensor_parallel(model, rank, task, sequences=False),
    "sp": lambda model, rank, task: tensor_parallel(model, rank, task, sequences=True),
    "pp": pipeline,
}


def main() -> None:
    task = read_task()
    sys.path.insert(0, str(task.package))
    data: Any = importlib.import_module("runtime.train.data")
    memory: Any = importlib.import_module("runtime.device.host_memory")
    memory.keep_freed_memory()
    torch.set_num_threads(1)
    plan = json.loads((task.package / "plan.json").read_text())
    model_file = data.load_model_file(task.package / "model.py")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(plan["seed"])
    peer = PEERS[task.side](data.call_with_options(model_file.model, plan["options"]), rank, task)
    gc.collect()
    kinds = [[p for p in peer.parameters if isinstance(p, DTensor) == kind] for kind in (False, True)]
    optimizers = [torch.optim.AdamW(kind, lr=1e-3, fused=True) for kind in kinds if kind]  # fused takes one kind
    seconds: list[float] = []
    losses: list[float] = []
    for step in range(task.total):
        batch = data.global_batch(model_file, plan["options"], seed=plan["seed"], step=step, dtype=torch.float32)
        wait_for_round(task, step)
        started = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = peer.step(batch)
        for optimizer in optimizers:
            optimizer.step()
        if loss is not None:
            losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    report = {"rank": rank, "peak_bytes": memory.peak_bytes(CPU), "step_seconds": seconds, "losses": losses}
    task.report.mkdir(parents=True, exist_ok=True)
    (task.report / f"rank_{rank:03d}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
