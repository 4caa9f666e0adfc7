"""Shards of which some ranks share a node: gathered and scattered inside nodes and between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.cost.accounting import communication
from partc.ir.mesh import Mesh
from partc.runtime.comm.comm import Pending
from partc.runtime.comm.virtual import VirtualAxis, VirtualComm, World
from partc.runtime.execution.parts import Parts
from partc.runtime.layout import Shard
from tests.passes.test_zero import ids_batch, tied

NODES = {"dp_out": 2, "dp_mid": 2, "dp_in": 3}
GATHER = ("dp_out", "dp_mid", "dp_in")
LAYOUTS = {
    "rows": "[24@dp_out,dp_mid,dp_in, 5]",
    "strided": "[3 · 12@dp_out,dp_mid,dp_in, 2]",
    "columns": "[2, 7, 12@dp_out,dp_mid,dp_in]",
    "several": "[2, 5 · 24@dp_out,dp_mid,dp_in · 1, 3]",
    "spare rows": "[26@dp_out,dp_mid,dp_in, 3]",  # three in each of twelve parts: the ninth ends with one, three have none
    "spare strided": "[3 · 14@dp_out,dp_mid,dp_in · 2, 2]",
    "spare columns": "[2, 5, 11@dp_out,dp_mid,dp_in]",
    "few": "[2@dp_out,dp_mid,dp_in]",
}


def on_ranks(work: Any, sizes: dict[str, int] = NODES) -> None:
    mesh = Mesh(tuple(sizes.items()))
    world = World(mesh.size)
    names = [axes for start in range(len(mesh.names)) for axes in _runs(mesh.names[start:])]

    def rank(number: int) -> None:
        groups = {",".join(axes): mesh.group(number, axes) for axes in names}
        work(VirtualComm(world=world, rank=number, coordinate=mesh.coordinate(number), groups=groups, links={}), number)

    world.run(rank)


def _runs(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [names[: end + 1] for end in range(len(names))]


def random(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _ended(pending: Pending[Any]) -> Any:
    """The result of an exchange of one level or two."""
    pending.advance()
    return pending.wait()


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("near", [(), ("dp_in",), ("dp_mid", "dp_in"), GATHER])
def test_parts_of_any_layout_come_together_and_apart(
    near: tuple[str, ...], many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against layouts alone: the whole is the whole, and every rank has its own part of the sum."""
    monkeypatch.setattr(VirtualAxis, "moves_many", many)  # as on GPUs, and as over gloo
    shards = {name: Shard(f"f64{text}", gather=GATHER) for name, text in LAYOUTS.items()}
    shards["whole"] = Shard("f64[4]", reduce=GATHER)
    mesh = Mesh(tuple(NODES.items()))
    whole = {name: random(1, shard.shape) for name, shard in shards.items()}
    gradients = [{name: random(2 + rank, x.shape) for name, x in whole.items()} for rank in range(mesh.size)]
    summed = {name: sum(each[name] for each in gradients) for name in whole}

    def work(comm: VirtualComm, number: int) -> None:
        place = mesh.coordinate(number)
        held = {name: shard.local(whole[name], NODES, place).clone() for name, shard in shards.items()}
        own = {name: torch.zeros_like(x) for name, x in held.items()}
        parts = Parts(comm, shards, held, own, near=near)
        for names in (list(shards), *([name] for name in shards)):
            found = _ended(parts.gather(names))
            assert all(torch.equal(x, whole[name]) for name, x in zip(names, found, strict=True))
        kept = parts.keep(lambda *fields: fields, *shards)
        for x in held.values():
            x.mul_(2)
        kept.gather()
        kept.advance()
        kept.wait()
        parts.refresh()
        assert all(torch.equal(x, whole[name] * 2) for name, x in zip(shards, kept.whole, strict=True))
        scattered = (("rows", "columns"), ("strided",), ("several", "whole"))
        for names in (*scattered, ("spare columns", "few", "spare rows"), ("spare strided",)):
            _ended(parts.unit(None, *names).scatter([gradients[number][name] for name in names]))
        for _ in range(2):  # sums of two steps: spare elements stay zero
            sums = parts.sums(*LAYOUTS)
            for name, x in zip(LAYOUTS, sums, strict=True):
                assert x is not None and x.is_contiguous()
                x.add_(gradients[number][name], alpha=0.5)
            _ended(parts.scatter_sums("spare rows", "few"))
            _ended(parts.scatter_sums(*(name for name in LAYOUTS if name not in ("spare rows", "few"))))
        for name in LAYOUTS:
            want = shards[name].local(summed[name] * 2, NODES, place)
            torch.testing.assert_close(own[name], want, rtol=1e-13, atol=1e-13)
        assert torch.equal(own["whole"], gradients[number]["whole"])

    on_ranks(work)


@pytest.mark.parametrize(("kind", "near"), [("bf16", ("dp_in",)), ("int8", ("dp_in",)), ("int8", ())])
def test_what_a_scatter_leaves_out_the_next_ones_make_up_for(kind: str, near: tuple[str, ...]) -> None:
    """The sum over steps of what arrives is the exact one but for what the last step left out, whatever travels together."""
    sizes, steps = {"dp_out": 2, "dp_in": 2}, 30
    shards = {
        "a": Shard("f64[8@dp_out,dp_in, 40]", gather=("dp_out", "dp_in")),
        "b": Shard("f64[3 · 100@dp_out,dp_in]", gather=("dp_out", "dp_in")),
    }
    mesh = Mesh(tuple(sizes.items()))
    given = [[{name: random(step * 4 + rank, shard.shape) for name, shard in shards.items()} for rank in range(4)]
             for step in range(steps)]  # fmt: skip
    exact = {name: sum(each[name] for ranks in given for each in ranks) for name in shards}

    def work(comm: VirtualComm, number: int) -> None:
        place = mesh.coordinate(number)
        held = {name: torch.zeros(shard.local_shape(sizes), dtype=torch.float64) for name, shard in shards.items()}
        once, total, alone = ({name: torch.zeros_like(x) for name, x in held.items()} for _ in range(3))
        parts = Parts(comm, shards, held, total, near=near, compress=kind)
        for step in range(steps):
            if step % 3:
                _ended(parts.scatter(given[step][number]))
            else:
                for name, x in given[step][number].items():
                    _ended(parts.scatter({name: x}))
            forgetful = Parts(comm, shards, held, alone, near=near, compress=kind)
            _ended(forgetful.scatter(given[step][number]))
        first = Parts(comm, shards, held, once, near=near, compress=kind)
        _ended(first.scatter(given[0][number]))
        for name, shard in shards.items():
            one = (once[name] - shard.local(sum(each[name] for each in given[0]), sizes, place)).norm()
            left = (total[name] - shard.local(exact[name], sizes, place)).norm()
            assert one > 0 and left < 2 * one
            assert (alone[name] - shard.local(exact[name], sizes, place)).norm() > 3 * one

    on_ranks(work, sizes)


class TwoMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).square().sum()  # type: ignore[no-any-return]


def two_matrices() -> nn.Module:
    return TwoMatrices()


@pytest.mark.parametrize(
    ("options", "gathers", "scatters", "crossing"),
    [
        ({"zero": 1}, 1, 1, 128),
        ({"zero": 2}, 1, 2, 128),
        ({"zero": 3}, 1, 2, 128),  # one call reads all, in every action
        ({"zero": 2, "compress_grads": "bf16"}, 1, 2, 64),
        ({"zero": 3, "compress_grads": "int8"}, 1, 2, 256 + 4),  # a block of 256 and its scale, for 32 numbers
    ],
)
def test_an_eighth_of_what_is_gathered_crosses_to_each_of_eight_ranks(
    options: dict[str, Any], gathers: int, scatters: int, crossing: int
) -> None:
    """1024 bytes on two nodes of four: from the other node one part of eight comes, and from this one three quarters."""
    package = partc.compile(two_matrices, {"x": torch.randn(16, 8)}, mesh="8", nodes=4, microbatches=2, **options)
    moved = communication(package.program)
    assert moved["dp_out"] == gathers * 128 + scatters * crossing
    assert moved["dp_in"] == (gathers + scatters) * 768


CASES = [
    ("8", {"nodes": 4, "zero": 3}),
    ("pp=2,dp=4", {"nodes": 2, "zero": 2, "schedule": "zbv"}),
    ("dp_a=2,dp_b=2,dp_c=2", {"nodes": 4, "zero": 1, "bucket": "0B"}),
]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("mesh", "options"), CASES)
def test_parts_over_nodes_train_like_the_whole(mesh: str, options: dict[str, Any]) -> None:
    package = partc.compile(tied, ids_batch(), mesh=mesh, microbatches=2, precision="fp64", **options)
    result = package.verify(steps=2)
    assert result.ok and result.worst.rel_err < 1e-13, result.worst
