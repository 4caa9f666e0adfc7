"""A rank of what torch itself offers for the same model: DDP, FSDP2, tensor parallelism over DTensor, its 1F1B.

torch's context parallelism knows kernels of GPUs only. Its ring, with its order of positions, is called with the CPU's
flash kernel here. Exchanges of heads and of experts' rows are written with torch's functional collectives, as
torchtitan does.

All but the recommender have AdamW fused. All have the same initial weights and batches as the package, and its setting of
the C library's allocator, which helps them as much.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gate import Task, read_task, wait_for_round
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs_ring
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
    """A peer's model on one rank: its optimizers, and a step of forward and backward, which returns the loss or None."""

    optimizers: list[torch.optim.Optimizer]
    step: Callable[[Batch], Tensor | None]


def adamw(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """AdamW, fused, which takes parameters of one kind."""
    every = list(parameters)
    kinds = [[p for p in every if isinstance(p, DTensor) == kind] for kind in (False, True)]
    return [torch.optim.AdamW(kind, lr=1e-3, fused=True) for kind in kinds if kind]


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

    return Peer(optimizers=adamw(model.parameters()), step=step)


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

    return Peer(optimizers=adamw(model.parameters()), step=step)


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

    return Peer(optimizers=adamw(model.parameters()), step=step)


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

    return Peer(optimizers=adamw(part.parameters()), step=step)


class Ring(torch.autograd.Function):
    """torch's ring attention, causal, with the CPU's kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = torchs_ring._templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        found: tuple[Tensor, ...] = torchs_ring._templated_ring_attention_backward(
            *(dist.group.WORLD, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward),
            *(grad, "grad_out", q, k, v, out, lse),
            is_causal=True,
            dropout_p=0.0,
        )
        return found


def ring(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    made: Tensor = Ring.apply(q, k, v)
    return made


def ulysses(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Positions to heads, attention of whole sequences, and back."""
    world = dist.get_world_size()

    def to_heads(x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        parts = x.reshape(b, world, h // world, s, d).transpose(0, 1).reshape(-1)
        got = all_to_all_single_autograd(parts, None, None, dist.group.WORLD)
        return got.view(world, b, h // world, s, d).permute(1, 2, 0, 3, 4).reshape(b, h // world, world * s, d)

    out = attention(*map(to_heads, (q, k, v)), **how)
    b, h, s, d = out.shape
    parts = out.view(b, h, world, s // world, d).permute(2, 0, 1, 3, 4).reshape(-1)
    got = all_to_all_single_autograd(parts, None, None, dist.group.WORLD)
    return got.view(world, b, h, s // world, d).transpose(0, 1).reshape(b, world * h, s // world, d)


attention = F.scaled_dot_product_attention


class Cut(nn.Module):
    """The model for a part of each sequence, whose rotations are given."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.model.embed(ids)
        for block in self.model.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.model.head(self.model.norm(x))
        return logits


def context_parallel(model: Any, rank: int, task: Task, attend: Callable[..., Tensor], order: list[int]) -> Peer:
    """Each rank has some of the equal parts of each sequence; attention reads all of them."""
    world, config = dist.get_world_size(), model.config
    F.scaled_dot_product_attention = attend
    parallel = nn.parallel.DistributedDataParallel(Cut(model), gradient_as_bucket_view=True)
    tables: dict[int, tuple[Tensor, Tensor]] = {}

    def mine(x: Tensor, dim: int) -> Tensor:
        parts = x.chunk(world * len(order), dim)
        return torch.cat([parts[index] for index in order], dim)

    def step(batch: Batch) -> Tensor:
        size = batch["ids"].shape[1]
        if size not in tables:
            rotary = sys.modules["partc_model_file"].rotary
            cos, sin = rotary(size, config.width // config.heads, config.theta)
            tables[size] = mine(cos, 0), mine(sin, 0)
        ids, labels = (mine(batch[name], 1) for name in ("ids", "labels"))
        count = (labels != -100).sum()
        dist.all_reduce(count)
        logits = parallel(ids, *tables[size])
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (nll * (world / count)).backward()  # DDP averages
        loss = nll.detach() / count
        dist.all_reduce(loss)
        return loss

    return Peer(optimizers=adamw(model.parameters()), step=step)


class OwnExperts(nn.Module):
    """The experts of one rank: rows are sorted by expert, travel to the ranks of these, and back."""

    def __init__(self, whole: Any, rank: int) -> None:
        super().__init__()
        self.count, self.world = whole.up.shape[0], dist.get_world_size()
        self.router = whole.router
        self.up, self.down = (nn.Parameter(x.detach().chunk(self.world)[rank].clone()) for x in (whole.up, whole.down))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        sent = chosen.flatten().bincount(minlength=self.count)
        coming = torch.empty_like(sent)
        dist.all_to_all_single(coming, sent)
        away, here = (numbers.view(self.world, -1).sum(1).tolist() for numbers in (sent, coming))
        rows = all_to_all_single_autograd(tokens[order // 2], here, away, dist.group.WORLD)
        numbers = coming.view(self.world, -1)
        experts = torch.arange(numbers.shape[1]).repeat(self.world).repeat_interleave(coming).argsort(stable=True)
        groups = rows[experts].split(numbers.sum(0).tolist())
        found = torch.cat([F.silu(group @ self.up[e]) @ self.down[e] for e, group in enumerate(groups)])
        back = all_to_all_single_autograd(found[experts.argsort()], away, here, dist.group.WORLD)
        chosen_rows = back[order.argsort()].view(*scores.shape, -1)
        return (chosen_rows * scores.unsqueeze(-1)).sum(1).reshape(x.shape)


def expert_parallel(model: Any, rank: int, task: Task) -> Peer:
    """Each rank has half of the batch and of the experts, whose gradients are sums already."""
    world = dist.get_world_size()
    for block in model.blocks:
        block.mlp = OwnExperts(block.mlp, rank)
    own = {name: p for name, p in model.named_parameters() if name.endswith((".mlp.up", ".mlp.down"))}
    model._ddp_params_and_buffers_to_ignore = list(own)
    inner = ddp(model, rank, task)

    def step(batch: Batch) -> Tensor | None:
        loss = inner.step(batch)
        for parameter in own.values():
            assert parameter.grad is not None
            parameter.grad /= world
        return loss

    return Peer(optimizers=inner.optimizers, step=step)


class Exchange(torch.autograd.Function):
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


def whole_tables(model: Any, rank: int, task: Task) -> Peer:
    """DLRM's own hybrid: whole tables on ranks, equally many up to one, and DDP for the rest.

    Adagrad updates the rows that lookups read, and dense weights (fused).
    """
    world = dist.get_world_size()
    tables = Tables(model.tables, rank, world)
    dense = nn.parallel.DistributedDataParallel(model.dense, gradient_as_bucket_view=True)

    def step(batch: Batch) -> Tensor:
        part = {name: x.chunk(world)[rank] for name, x in batch.items()}
        scores = dense(part["dense"], tables(part["sparse"]))
        total = F.binary_cross_entropy_with_logits(scores, part["clicked"], reduction="sum")
        count = len(batch["clicked"])
        (total * (world / count)).backward()  # DDP averages
        for parameter in tables.parameters():
            assert parameter.grad is not None
            parameter.grad._values().div_(world)
        loss = total.detach() / count
        dist.all_reduce(loss)
        return loss

    optimizers = [
        torch.optim.Adagrad(tables.parameters(), lr=1e-3),
        torch.optim.Adagrad(dense.parameters(), lr=1e-3, fused=True),
    ]
    return Peer(optimizers=optimizers, step=step)


PEERS: dict[str, Callable[[nn.Module, int, Task], Peer]] = {
    "ddp": ddp,
    "fsdp2": lambda model, rank, task: fsdp(model, rank, task, again=False),
    "fsdp3": lambda model, rank, task: fsdp(model, rank, task, again=True),
    "tp": lambda model, rank, task: tensor_parallel(model, rank, task, sequences=False),
    "sp": lambda model, rank, task: tensor_parallel(model, rank, task, sequences=True),
    "pp": pipeline,
    "ring": lambda model, rank, task: context_parallel(
        model, rank, task, ring, [rank, 2 * dist.get_world_size() - 1 - rank]
    ),
    "ulysses": lambda model, rank, task: context_parallel(model, rank, task, ulysses, [rank]),
    "ep": expert_parallel,
    "tables": whole_tables,
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
    seconds: list[float] = []
    losses: list[float] = []
    for step in range(task.total):
        batch = data.global_batch(model_file, plan["options"], seed=plan["seed"], step=step, dtype=torch.float32)
        wait_for_round(task, step)
        started = time.perf_counter()
        for optimizer in peer.optimizers:
            optimizer.zero_grad()
        loss = peer.step(batch)
        for optimizer in peer.optimizers:
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
