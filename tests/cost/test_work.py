"""A step's flops against torch's own counter, which runs the model on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import partc
from partc.cluster.cluster import preset
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.cost.calibration import calibration
from partc.cost.flops import model_work
from partc.runtime.train.data import load_model_file
from tests.zoo import MODELS


def counted(model: nn.Module, batch: dict[str, Tensor], loss: object) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        (loss(model, batch) if callable(loss) else model(**batch)).backward()
    return counter.get_total_flops()


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "mesh"), [("mlp", "2x2x2"), ("crossing", "2"), ("resnet", "2x2"), ("dlrm", "tp=2")])
def test_each_product_counts_once_however_it_is_cut(name: str, mesh: str) -> None:
    package = partc.compile(str(MODELS[name].file), mesh=mesh, microbatches=4, recompute="full", options={"batch": 16})
    file = load_model_file(MODELS[name].file or Path())
    assert package.flops == counted(file.model(), file.batch(batch=16), file.loss)


def test_causal_attention_counts_by_half() -> None:
    file = load_model_file(MODELS["gpt"].file or Path())
    batch, length, width, depth = 16, 32, 64, 4
    scores = 3 * 2 * 2 * batch * length * length * width * depth  # and values; forward, and twice that backward
    package = partc.compile(str(MODELS["gpt"].file), mesh="2x2", options={"batch": batch})
    assert package.flops == counted(file.model(), file.batch(batch=batch), file.loss) - scores // 2


class Frozen(nn.Module):
    """A frozen layer before one that is trained, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        for index in (0, 2):
            self.layers[index].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_what_needs_no_gradient_costs_none() -> None:
    batch = {"x": torch.randn(4, 8)}
    package = partc.compile(Frozen, batch, mesh="1")
    assert package.flops == counted(Frozen(), batch, None) == (3 + 2) * 2 * 4 * 8 * 8


class Attending(nn.Module):
    """Products in sequence, in parallel, and of activations; the last one's result is an operand of none."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.gate, self.last = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x).tanh() * self.gate(x).sigmoid()
        scores = (h @ h.transpose(1, 2)).softmax(-1)
        return x + self.last(scores @ h)  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList(Attending() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x.square().mean()


def test_full_recomputation_repeats_at_least_what_torch_checkpoints_do() -> None:
    batch = {"x": torch.randn(4, 5, 8)}
    leaf = {"x": batch["x"].clone().requires_grad_()}
    repeated = counted(Stack(again=True), leaf, None) - counted(Stack(), leaf, None)
    cluster = preset("8xH100-80GB")
    simulator = Simulator(Stack, cluster, calibration(cluster), batch=batch)
    work = model_work(simulator.annotated(ParallelPlan(mesh="dp=1", precision="fp32")))
    assert (work.once.products, work.again.products) == (counted(Stack(), batch, None), repeated)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.values = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        q, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.queries, self.values))
        return F.scaled_dot_product_attention(q, heads, v, is_causal=True).square().mean()


def test_work_has_results_of_products_and_scores_of_attention() -> None:
    """The batch has no gradient, and half of the scores are masked."""
    cluster = preset("8xH100-80GB")
    simulator = Simulator(Reading, cluster, calibration(cluster), batch={"x": torch.randn(3, 6, 8)})
    once = model_work(simulator.annotated(ParallelPlan(mesh="dp=1", precision="fp32"))).once
    linear, scores = 3 * 6 * 8, 3 * 2 * 6 * 6 // 2
    assert once.results == 2 * (linear + 8 * 8)
    assert once.products == 2 * 2 * (2 * linear * 8)
    assert once.scores == 2 * scores
    product = 2 * scores * 4
    assert (once.attention, once.backward) == (2 * product, 3 * product)  # gradients of weights, queries and values
