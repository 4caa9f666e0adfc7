"""The batch pass: constants that have a row for each example are cut as the operations that read them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc

EXAMPLES, LENGTH, HEADS, WIDTH = 36, 5, 2, 8
BATCH = {"ids": torch.randint(11, (EXAMPLES, LENGTH)), "labels": torch.randint(11, (EXAMPLES, LENGTH))}


class Block(nn.Module):
    """Attention with a bias of each example's heads and a learned one of pairs of positions, scaled by a drawn time."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pairs = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH) * 0.1)
        self.scales = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, slopes: Tensor, times: Tensor) -> Tensor:
        x = x * self.scales(times.cos())[:, None]
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=slopes.to(q.dtype) + self.pairs)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Positions(nn.Module):
    """Makes positions, slopes, a probe and times for every example in forward, as OPT, BLOOM, SigLIP and DiT do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.probe, self.times = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.ones(ids.shape).cumsum(1)
        slopes = torch.arange(1, HEADS + 1)[:, None, None] * places[:, None, None, :] / -4
        x = self.words(ids) + self.places(places.long()) + self.probe.repeat(ids.shape[0], LENGTH, 1)
        times = self.times(torch.rand(ids.shape[0], 1))
        for block in self.blocks:
            x = block(x, slopes, times)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("dp=2", 2), ("dp=2", 18), ("dp=2,tp=2", 2), ("dp=2,cp=2", 2), ("pp=2,dp=3", 3)]
)
def test_rows_of_constants_are_cut_as_their_readers_cut_them(mesh: str, microbatches: int) -> None:
    """A rank embedded the positions of the whole batch for each microbatch, and kept the slopes of all examples."""
    torch.manual_seed(0)
    package = partc.compile(Positions(), BATCH, mesh=mesh, microbatches=microbatches, precision="fp64")
    program = package.program
    assert "setup" in {region.phase for region in program.regions}
    parts = {"setup": program.sizes["dp"], "microbatch": microbatches * program.sizes["dp"]}
    whole = []
    for region in program.regions:
        for op in (op for graph in region.graphs for op in graph.ops if region.phase in parts):
            for value in op.results:
                rows = value.type.layout.local_shape(program.sizes)[:1]
                if value.type.shape[:1] == (EXAMPLES,) and rows != (EXAMPLES // parts[region.phase],):
                    whole.append((region.name, str(value)))
    assert not whole, whole
    assert package.verify(steps=2).worst.rel_err < 1e-12


class Pairs(nn.Module):
    """Losses over all pairs of examples: contrast in both directions, pulled and pushed pairs, distances in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Linear(4, 8), nn.Linear(6, 8)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, z: Tensor, kind: Tensor) -> Tensor:
        x, z = F.normalize(self.rows(x), dim=-1), F.normalize(self.columns(z), dim=-1)
        products = self.scale.exp() * x @ z.T
        own = torch.arange(len(x))
        contrast = F.cross_entropy(products, own) + F.cross_entropy(products.T, own)
        same = (kind[None] == kind[:, None]).to(x.dtype) * 2 - 1
        pushed = -F.logsigmoid(same * (products + self.shift)).sum() / len(x)
        apart = torch.cdist(x, z).masked_fill(kind[:, None] == kind, 0).sort(0, descending=True)[0][:5]
        return contrast + pushed + apart.mean() + (x.std(0) - 1).abs().mean()


@pytest.mark.parametrize("mesh", ["dp=2", "dp=4", "dp=2,tp=2", "dp=2,cp=2", "pp=2,dp=2"])
def test_ranks_share_the_pairs_of_examples(mesh: str) -> None:
    """Every rank computed the products of all pairs, in full."""
    torch.manual_seed(0)
    rows = 32
    batch = {"x": torch.randn(rows, 4), "z": torch.randn(rows, 6), "kind": torch.randint(5, (rows,))}
    package = partc.compile(Pairs(), batch, mesh=mesh, precision="fp64")
    program = package.program
    for region in program.regions:
        for graph in region.graphs:
            for value in (value for op in graph.ops for value in op.results):
                shape = value.type.layout.local_shape(program.sizes)
                assert shape.count(rows) < 2, (region.name, value.name, shape)
    assert package.verify(steps=2).worst.rel_err < 1e-10


class Negatives(nn.Module):
    """Queries against the answers of all examples and one hard negative of each: the classes are two batches."""

    def __init__(self, looked_up: bool) -> None:
        super().__init__()
        self.ask, self.answer, self.looked_up = nn.Linear(6, 5), nn.Linear(6, 5), looked_up

    def forward(self, x: Tensor, near: Tensor, far: Tensor) -> Tensor:
        asked, rows = self.ask(x), self.answer(torch.cat([near, far]))
        if self.looked_up:
            return (F.embedding(torch.arange(8), rows) * asked.mean(0)).sum(1).sin().mean()
        return F.cross_entropy(asked @ rows.T, torch.arange(8))


@pytest.mark.parametrize("looked_up", [False, True])
def test_classes_and_tables_of_two_batches_are_no_range_of_rows(looked_up: bool) -> None:
    """A rank took its classes for one range of them. The cut of the rows of a table was wrong as well."""
    batch = {name: torch.randn(8, 6) for name in ("x", "near", "far")}
    package = partc.compile(Negatives(looked_up), batch, mesh="dp=2", precision="fp64")
    assert package.verify(steps=2).worst.rel_err < 1e-12


class Messages(nn.Module):
    """Messages along edges; the weights of those to the same target have a sum of one."""

    def __init__(self) -> None:
        super().__init__()
        self.send = nn.Linear(6, 6)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = self.send(x[source] * x[target])
        weights = sent.sum(1).exp()
        sums = torch.zeros(len(x)).index_add(0, target, weights)
        return x.index_add(0, target, (weights / sums[target])[:, None] * sent)


class Graphs(nn.Module):
    """The graphs of a batch as one, with the places of nodes in it."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.layers = nn.Embedding(11, 6), nn.ModuleList(Messages() for _ in range(2))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        first = torch.arange(x.shape[0])[:, None] * x.shape[1]
        source, target, x = (source + first).flatten(), (target + first).flatten(), self.nodes(x).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, source, target)
        return x.square().mean()


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,cp=2", "pp=2,dp=2"])
def test_calls_of_a_region_keep_the_cuts_of_their_own_results(mesh: str) -> None:
    """The sources of edges, which stay cut, shared a region with the targets, which every rank reads whole."""
    places = {name: torch.randint(5, (8, 9)) for name in ("source", "target")}
    package = partc.compile(Graphs(), {"x": torch.randint(11, (8, 5)), **places}, mesh=mesh, precision="fp64")
    assert package.verify(steps=2).worst.rel_err < 1e-12


class Halves(nn.Module):
    """Pairs of neighbours in two views of half a batch, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        half = len(x) // 2
        x = torch.cat([x[:half] + x[half:], x[half:].sin()])
        pairs = x.view(-1, 2, 8)
        return self.head(self.norm((pairs - pairs.mean(1, keepdim=True)).flatten(0, 1))).square().mean()


@pytest.mark.parametrize(("rows", "mesh", "microbatches"), [(6, "tp=2", 1), (12, "pp=2", 2), (6, "dp=3", 1)])
def test_parts_that_divide_a_batch_need_not_divide_its_groups(rows: int, mesh: str, microbatches: int) -> None:
    """Two views of three rows are three pairs, one of which has a row of each view: the batch was refused."""
    batch = {"x": torch.randn(rows, 4)}
    package = partc.compile(Halves(), batch, mesh=mesh, microbatches=microbatches, precision="fp64")
    assert package.verify(steps=2).worst.rel_err < 1e-12
