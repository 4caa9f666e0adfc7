"""Sums of gradients over nodes: inside them first, and in fewer bits between them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import partc
from partc.errors import PartcError
from partc.ir.mesh import Mesh
from partc.package.verify import verify
from partc.runtime.comm.compression import BLOCK, Compressed, decode, encode, room
from partc.runtime.comm.virtual import VirtualComm, World
from partc.runtime.execution.sums import Bucket, Sums
from partc.runtime.layout import Shard

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"


@given(
    size=st.integers(1, 3 * BLOCK),
    ways=st.integers(1, 3),
    kind=st.sampled_from(["bf16", "int8"]),
    seed=st.integers(0, 99),
)
def test_what_travels_is_close_and_as_long_as_it_says(size: int, ways: int, kind: str, seed: int) -> None:
    x = torch.randn(ways, size, generator=torch.Generator().manual_seed(seed))
    coded = encode(kind, x)
    assert coded.shape == (ways, room(kind, size))
    error = (decode(kind, coded, size) - x).abs()
    largest = float(x.abs().max())
    assert error.max() <= (largest / 254 * 1.001 if kind == "int8" else largest / 256)
    assert torch.equal(decode(kind, encode(kind, torch.zeros(ways, size)), size), torch.zeros(ways, size))


def _world(work: Any, coordinate: dict[str, int]) -> None:
    mesh = Mesh(tuple(coordinate.items()))
    world = World(mesh.size)

    def rank(number: int) -> None:
        names = [*((name,) for name in mesh.names), mesh.names]
        groups = {",".join(each): mesh.group(number, each) for each in names}
        comm = VirtualComm(world=world, rank=number, coordinate=mesh.coordinate(number), groups=groups, links={})
        work(comm, number)

    world.run(rank)


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_sum_inside_nodes_and_then_between_them_is_the_sum(size: int) -> None:
    given = [torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def work(comm: VirtualComm, number: int) -> None:
        x = given[number].clone()
        shards = {"w": Shard(f"f64[{size}]", reduce=("dp_out", "dp_in"))}
        buckets = {"all": Bucket(over=("dp_out", "dp_in"), names=("w",))}
        sums = Sums(comm, shards, {"w": x}, buckets, near=("dp_in",))
        sums["all"].start()
        sums["all"].advance()
        sums["all"].advance()
        sums["all"].wait()
        torch.testing.assert_close(x, sum(given), rtol=1e-14, atol=1e-14)

    _world(work, {"dp_out": 2, "dp_in": 3})


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_what_a_step_leaves_out_the_next_ones_make_up_for(kind: str) -> None:
    """The sum over steps of what arrives is that of what was sent, but for what the last step left out."""
    steps, size = 30, 500
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(steps, 4, size, generator=generator) * torch.logspace(-3, 0, size)
    exact = given.double().sum(1)

    def work(comm: VirtualComm, number: int) -> None:
        compressed = Compressed(kind, comm.group(("dp",)), size)
        arrived, alone = [], []
        for step in range(steps):
            arrived.append(_ran(compressed.sum(given[step, number])).double())
            alone.append(_ran(Compressed(kind, comm.group(("dp",)), size).sum(given[step, number])).double())
        one = (alone[0] - exact[0]).norm()
        assert 0 < one < 0.02 * exact[0].norm()
        assert (torch.stack(arrived).sum(0) - exact.sum(0)).norm() < 2 * one
        assert (torch.stack(alone).sum(0) - exact.sum(0)).norm() > 3 * one

    _world(work, {"dp": 4})


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_an_overflow_is_seen_and_leaves_nothing_behind(kind: str) -> None:
    """And what is left out of scaled gradients is that part of unscaled ones."""

    def work(comm: VirtualComm, number: int) -> None:
        x = torch.linspace(-1, 1, 300)
        sound, shaken = (Compressed(kind, comm.group(("dp",)), 300) for _ in range(2))
        first = _ran(sound.sum(x)), _ran(shaken.sum(x * 1024, 1024.0)) / 1024
        assert torch.equal(*first)
        spoilt = _ran(shaken.sum(torch.full((300,), torch.inf if number else 1.0)))
        assert not spoilt.isfinite().all()
        assert _ran(shaken.sum(x)).isfinite().all()

    _world(work, {"dp": 2})


def _ran(sum: Any) -> Tensor:
    pending = next(sum)
    while True:
        try:
            pending = sum.send(pending.wait())
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("mesh", "count", "cut", "inside"),
    [
        ("8", 4, "dp_out=2,dp_in=4", ("dp_in",)),
        ("2x4x2", 4, "pp=2,dp_out=2,dp_in=2,tp=2", ("dp_in", "tp")),
        ("2x4x2", 8, "pp=2,dp=4,tp=2", ("dp", "tp")),
        ("2x4x2", 1, "pp=2,dp=4,tp=2", ()),
        ("dp_out=2,dp_in=4", 2, "dp_out=2,dp_inout=2,dp_inin=2", ("dp_inin",)),
        ("1x2x8", 4, "pp=1,dp=2,tp=8", ()),
        ("2", 8, "dp=2", ("dp",)),
    ],
)
def test_nodes_cut_an_axis_of_the_batch(mesh: str, count: int, cut: str, inside: tuple[str, ...]) -> None:
    found = Mesh.parse(mesh).cut_at(count)
    assert str(found) == cut and found.inside(count) == inside
    assert found.size == Mesh.parse(mesh).size == math.prod(size for _, size in found.axes)


@pytest.mark.parametrize(
    ("mesh", "options", "code"),
    [
        ("8", {"nodes": 3}, "P0105"),
        ("6", {"nodes": 0}, "P0105"),
        ("12x1", {"nodes": 4, "zero": "1@dp"}, "P0413"),
        ("2", {"compress_grads": "fp8"}, "P0404"),
        ("2", {"grad_reduce": "fp64"}, "P0404"),
        ("2", {"bucket": "a lot"}, "P0404"),
    ],
)
def test_wrong_sums(mesh: str, options: dict[str, Any], code: str) -> None:
    with pytest.raises(PartcError) as error:
        partc.compile(GPT, mesh=mesh, **options)
    assert error.value.code == code


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "options", "exact"),
    [
        ("1x4x2", {"nodes": 4, "bucket": "40KB", "precision": "fp64"}, True),
        ("4", {"nodes": 2, "zero": 1, "precision": "fp64"}, True),
        ("dp_out=2,dp_in=2", {"zero": 3, "precision": "fp64"}, True),
        ("1x4x1", {"nodes": 2, "bucket": "40KB", "compress_grads": "int8"}, False),
        ("2", {"zero": 2, "compress_grads": "int8"}, False),
        ("1x4x1", {"nodes": 2, "zero": "3@dp_in", "compress_grads": "bf16", "grad_reduce": "bf16"}, False),
    ],
)
def test_packages_sum_over_nodes(mesh: str, options: dict[str, Any], exact: bool, tmp_path: Path) -> None:
    partc.compile(GPT, mesh=mesh, microbatches=2, **options).write(tmp_path / "build")
    result = verify(tmp_path / "build", virtual=True, steps=3)
    assert result.ok, result.worst
    assert (result.worst.rel_err < 1e-12) == exact
