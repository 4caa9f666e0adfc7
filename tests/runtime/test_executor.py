"""A step's actions over three separate stages, with values that skip a stage, under schedules of all kinds."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from partc.runtime.comm.comm import Comm
from partc.runtime.comm.virtual import VirtualComm, World
from partc.runtime.execution.executor import acknowledged_by, gradient_memory, parse_schedule, run_step
from partc.runtime.execution.stage import PipelineStage
from partc.runtime.execution.sums import Bucket
from partc.runtime.layout import Received, Shard
from partc.runtime.train.data import global_batch, local_batch

MICROBATCHES = 4
ROWS = 3


class Product(PipelineStage):
    """Every stage: y = (sum of what it receives, or the input) * w. Stage 0's value goes to both others."""

    parameters = {"w": Shard("f64[5]")}  # noqa: RUF012

    def __init__(self, comm: Comm, parameters: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        super().__init__(comm, parameters, gradients)
        self.w, self.grad_w = parameters["w"], gradients["w"]
        self.reduced = 0
        self.alive: list[weakref.ref[Tensor]] = []
        self.most_alive = 0

    def prepare(self, batch: dict[str, Tensor]) -> None:
        self.whole_batch = batch

    def forward(self, batch: dict[str, Tensor], received: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        x = sum(received.values(), batch.get("x", torch.zeros(ROWS, 5, dtype=torch.float64))).clone()
        self.alive.append(weakref.ref(x))
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self.alive))
        y = x * self.w
        return {"loss": y.sum(), **{name: y for name in self.sends}}, x

    def backward(self, saved: Tensor, gradients: dict[str, Tensor], last: bool) -> dict[str, Tensor]:
        grad_y = sum(gradients.values(), torch.zeros(ROWS, 5, dtype=torch.float64))
        grad_y = torch.ones_like(grad_y) if self.loss else grad_y
        self.grad_w.add_((grad_y * saved).sum(0))
        return {name: grad_y * self.w for name in self.receives}

    def reduce_gradients(self, last: bool) -> None:
        self.reduced += 1


def received(source: int) -> Received:
    return Received(source=source, shape=(ROWS, 5), dtype="f64")


class First(Product):
    inputs = {"x": Shard("f64[12@mb, 5]")}  # noqa: RUF012
    sends = {"a": (1, 2)}  # noqa: RUF012
    gradients_from = {"a": (1, 2)}  # noqa: RUF012


class Second(Product):
    receives = {"a": received(0)}  # noqa: RUF012
    sends = {"b": (2,)}  # noqa: RUF012
    gradients_from = {"b": (2,)}  # noqa: RUF012


class Third(Product):
    receives = {"a": received(0), "b": received(1)}  # noqa: RUF012
    loss = "loss"


def gpipe(stage: int) -> str:
    receive, send = stage > 0, stage < 2
    words = []
    for m in range(MICROBATCHES):
        words += [f"{stage}RECV_F{m}"] * receive + [f"{stage}F{m}"] + [f"{stage}SEND_F{m}"] * send
    for m in range(MICROBATCHES):
        words += [f"{stage}RECV_B{m}"] * send + [f"{stage}B{m}"] + [f"{stage}SEND_B{m}"] * receive
    return " ".join([*words, f"{stage}REDUCE_GRAD"])


def one_forward_one_backward(stage: int) -> str:
    receive, send = stage > 0, stage < 2
    forward = [
        [f"{stage}RECV_F{m}"] * receive + [f"{stage}F{m}"] + [f"{stage}SEND_F{m}"] * send for m in range(MICROBATCHES)
    ]
    backward = [
        [f"{stage}RECV_B{m}"] * send + [f"{stage}B{m}"] + [f"{stage}SEND_B{m}"] * receive for m in range(MICROBATCHES)
    ]
    warm = 2 - stage
    order = forward[:warm]
    for m in range(MICROBATCHES):
        order += [*forward[warm + m : warm + m + 1], backward[m]]
    return " ".join([*(word for words in order for word in words), f"{stage}REDUCE_GRAD"])


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "alive"), [(gpipe, [4, 4, 4]), (one_forward_one_backward, [3, 2, 1])])
def test_three_stages(schedule: Any, alive: list[int]) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(5, dtype=torch.float64) for _ in range(3)]
    x = torch.randn(12, 5, dtype=torch.float64)
    losses: dict[int, Tensor | None] = {}
    stages: dict[int, Product] = {}

    def work(rank: int) -> None:
        others = [other for other in range(3) if other != rank]
        links = {(rank, other): other for other in others} | {(other, rank): other for other in others}
        comm = VirtualComm(world=world, rank=rank, coordinate={"pp": rank}, groups={}, links=links)
        kind = (First, Second, Third)[rank]
        gradients = gradient_memory(kind.parameters, {"w": weights[rank]}).gradients
        stage = stages[rank] = kind(comm, {"w": weights[rank]}, gradients)
        batch, pieces = local_batch({"x": x}, stage.inputs, {"pp": 3}, {"pp": rank}, MICROBATCHES, torch.device("cpu"))
        comm.clock.start(torch.device("cpu"))
        with torch.no_grad():
            losses[rank] = run_step({rank: stage}, comm, parse_schedule(schedule(rank)), batch, pieces)
        done = comm.clock.stop()
        assert [each.name for each in done if each.kind == "work"][1:][: len(schedule(rank).split())] == schedule(
            rank
        ).split()
        inside = [each for each in done if each.kind in ("send", "recv")]
        assert [each.within.lstrip("012").rstrip("0123") for each in inside] == [
            f"{'SEND_' * (each.name == 'send')}{'F' if each.over.split()[1] < each.over.split()[2] else 'B'}"
            for each in inside
        ]

    gc.collect()
    world = World(3)
    world.run(work)
    w = [weight.clone().requires_grad_() for weight in weights]
    a = x * w[0]
    expected = ((a + a * w[1]) * w[2]).sum()
    expected.backward()
    assert losses[0] is losses[1] is None
    torch.testing.assert_close(losses[2], expected.detach(), rtol=1e-12, atol=1e-12)
    for rank in range(3):
        torch.testing.assert_close(stages[rank].grad_w, w[rank].grad, rtol=1e-12, atol=1e-12)
        assert stages[rank].reduced == 1
        assert torch.equal(stages[rank].whole_batch.get("x", x), x)
    assert [stages[rank].most_alive for rank in range(3)] == alive
    assert not any(mailbox for mailbox in world.mailboxes.values())


def test_schedules_are_read_whole() -> None:
    text = "0RECV_F0 0F0 0SEND_F0 12RECV_B10 12B10 12SEND_B10 1REDUCE_GRAD"
    assert " ".join(map(str, parse_schedule(text))) == text
    for wrong in ("0G0", "F0", "0f0", "0F0,0B0"):
        with pytest.raises(ValueError, match="not an action"):
            parse_schedule(wrong)


def test_values_tell_which_gradients_have_been_used() -> None:
    actions = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0B1 2I0 0B2 0F3 0SEND_F3 2SEND_F1 2I1 0B3"
    assert acknowledged_by(parse_schedule(actions)) == {(0, 2): (0,), (0, 3): (1, 2), (2, 1): (0,)}


def test_gradients_reduced_alike_lie_together() -> None:
    shards = {
        "a": Shard("f32[3]", reduce=("dp",)),
        "b": Shard("f32[2, 2]", reduce=("dp", "tp")),
        "c": Shard("f32[5]", reduce=("dp",)),
        "tied": Shard("f32[4]", reduce=("dp",), shared=(0, 1)),
        "buffer": Shard("f32[4]", trainable=False),
    }
    parameters = {name: torch.ones(shard.shape) for name, shard in shards.items()}
    gradients, buffers, _ = gradient_memory(shards, parameters)
    assert list(gradients) == ["a", "b", "c", "tied"]
    assert sorted(buffer.numel() for buffer in buffers.values()) == [4, 4, 8]
    assert list(buffers) == [("a", "c"), ("b",), ("tied",)]
    assert gradients["c"].data_ptr() == gradients["a"].data_ptr() + 12
    assert all(gradients[name].shape == parameters[name].shape for name in gradients)


def test_batches_repeat_and_differ_by_step() -> None:
    class Module:
        @staticmethod
        def batch(rows: int = 4) -> dict[str, Tensor]:
            return {"x": torch.randn(rows, 2), "y": torch.randint(9, (rows,))}

    torch.manual_seed(5)
    before = torch.get_rng_state()
    make = lambda step, seed=0: global_batch(Module, {"rows": 6, "depth": 3}, seed=seed, step=step, dtype=torch.float64)  # type: ignore[arg-type]  # noqa: E731
    assert torch.equal(make(1)["x"], make(1)["x"])
    assert make(1)["x"].shape == (6, 2) and make(1)["x"].dtype == torch.float64 and make(1)["y"].dtype == torch.int64
    assert not torch.equal(make(1)["x"], make(2)["x"])
    assert not torch.equal(make(1)["x"], make(1, 1)["x"])
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_of_parts_take_over_the_memory_of_their_sums() -> None:
    table = {
        "w": Shard("f32[6@dp, 2]", gather=("dp",)),
        "spare": Shard("f32[5@dp]", gather=("dp",)),
        "column": Shard("f32[2, 4@dp]", gather=("dp",)),
        "summed": Shard("f32[4@dp]", gather=("dp",), reduce=("tp",)),
    }
    both = {"tied": Shard("f32[4@dp]", gather=("dp",))}
    bucket = Bucket(over=("dp",), names=("w", "spare", "column", "summed"), scatter=True)
    again = Bucket(over=("dp",), names=("tied",), scatter=True)
    stages: list[Any] = [
        SimpleNamespace(parameters=table | both, buckets={"once": bucket, "again": again}),
        SimpleNamespace(parameters=both, buckets={"again": again}),
        SimpleNamespace(parameters={}, buckets={}),
    ]
    shards, sizes = table | both, {"dp": 2, "tp": 2}
    parameters = {name: torch.ones(shard.local_shape(sizes)) for name, shard in shards.items()}
    gradients, buffers, sums = gradient_memory(shards, parameters, stages, sizes)
    assert {name: tuple(x.shape) for name, x in sums.items()} == {"w": (6, 2), "spare": (5,), "column": (2, 4)}
    memory = {x.untyped_storage().data_ptr() for x in (*sums.values(), *(gradients[name] for name in sums))}
    assert len(memory) == 1
    assert list(buffers) == [("w", "spare", "column"), ("summed",), ("tied",)]
    assert buffers["w", "spare", "column"].numel() == 6 + 3 + 4
    for number, x in enumerate(sums.values()):
        x.fill_(number)
    assert [float(x.sum()) for x in sums.values()] == [0.0, 5.0, 16.0]
