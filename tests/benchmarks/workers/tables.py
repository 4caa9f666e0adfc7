"""A rank of DLRM's own hybrid, by hand: whole tables on ranks, an all-to-all of ids and one of vectors, DDP for the rest.

Each rank has equally many tables, up to one. Adagrad updates the rows that lookups read, and dense weights (fused).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gate import read_task, wait_for_round
from torch import Tensor, nn
from torch.autograd import Function

CPU = torch.device("cpu")


class Exchange(Function):
    """Rows to other ranks; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaving: list[int], coming: list[int]) -> Tensor:
        ctx.sizes = leaving, coming
        out = x.new_empty(sum(coming), *x.shape[1:])
        dist.all_to_all_single(out, x, coming, leaving)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        leaving, coming = ctx.sizes
        (grad,) = grads
        return Exchange.forward(ctx, grad.contiguous(), coming, leaving), None, None


class Tables(nn.Module):
    """The tables of this rank."""

    def __init__(self, tables: nn.ModuleList, rank: int, world: int) -> None:
        super().__init__()
        self.counts = [len(part) for part in torch.arange(len(tables)).tensor_split(world)]
        self.rank, self.world, first = rank, world, sum(self.counts[:rank])
        self.mine = tables[first : first + self.counts[rank]]

    def forward(self, ids: Tensor) -> Tensor:
        """ids[b, t] of this rank's part of the batch, for all tables: [b, t, d]."""
        size, count = ids.shape[0], self.counts[self.rank]
        wanted = Exchange.apply(ids.T.contiguous(), self.counts, [count] * self.world)
        wanted = wanted.view(self.world, count, size)
        found = torch.stack([table(wanted[:, index]) for index, table in enumerate(self.mine)], 1)
        leaving, coming = [count * size] * self.world, [other * size for other in self.counts]
        vectors: Tensor = Exchange.apply(found.flatten(0, 2), leaving, coming)
        return vectors.view(-1, size, vectors.shape[-1]).transpose(0, 1)


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
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(plan["seed"])
    model = data.call_with_options(model_file.model, plan["options"])
    tables = Tables(model.tables, rank, world)
    dense = nn.parallel.DistributedDataParallel(model.dense, gradient_as_bucket_view=True)
    del model
    optimizers = [
        torch.optim.Adagrad(tables.parameters(), lr=1e-3),
        torch.optim.Adagrad(dense.parameters(), lr=1e-3, fused=True),
    ]
    seconds: list[float] = []
    losses: list[float] = []
    for step in range(task.total):
        batch = data.global_batch(model_file, plan["options"], seed=plan["seed"], step=step, dtype=torch.float32)
        wait_for_round(task, step)
        started = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        part = {name: x.chunk(world)[rank] for name, x in batch.items()}
        scores = dense(part["dense"], tables(part["sparse"]))
        total = F.binary_cross_entropy_with_logits(scores, part["clicked"], reduction="sum")
        count = len(batch["clicked"])
        (total * (world / count)).backward()  # DDP averages
        for parameter in tables.parameters():
            parameter.grad._values().div_(world)
        for optimizer in optimizers:
            optimizer.step()
        loss = total.detach() / count
        dist.all_reduce(loss)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    report = {"rank": rank, "peak_bytes": memory.peak_bytes(CPU), "step_seconds": seconds, "losses": losses}
    task.report.mkdir(parents=True, exist_ok=True)
    (task.report / f"rank_{rank:03d}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
