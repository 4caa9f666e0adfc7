"""Collectives and transfers on three ranks, in threads and in processes, against loops over whole tensors."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from partc.package.launch import local_environment
from partc.runtime.checkpoint.safetensors import load, save
from partc.runtime.comm.comm import Axis, Comm
from partc.runtime.comm.virtual import Deadlock, VirtualComm, World
from tests.prefork import shared

SIZE = 3
GROUPS = {"tp": (0, 1, 2)}


def given(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's operand: small whole numbers, so that every order of summation gives the same."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


# Name -> what a rank does with its axis. Dimensions of odd sizes; `outer` counts as in a strided shard.
CASES: dict[str, Callable[[Axis, int], Tensor]] = {
    "all_reduce": lambda a, r: a.all_reduce(given(r, 5, 7)),
    "all_reduce_strided": lambda a, r: a.all_reduce(given(r, 5, 7).t()),
    "all_reduce_large": lambda a, r: a.all_reduce(given(r, 700, 701)),
    "all_reduce_scalar": lambda a, r: a.all_reduce(given(r)),
    "all_reduce_max": lambda a, r: a.all_reduce(given(r, 5), op="max"),
    "all_reduce_bf16": lambda a, r: a.all_reduce(given(r, 5, dtype=torch.bfloat16)),
    "all_reduce_i64": lambda a, r: a.all_reduce(given(r, 5, dtype=torch.int64)),
    "all_reduce_in_place": lambda a, r: a.all_reduce_(given(r, 5, 7)),
    "all_reduce_in_place_strided": lambda a, r: a.all_reduce_(given(r, 5, 7).t()),
    "all_gather_0": lambda a, r: a.all_gather(given(r, 5, 7), dim=0),
    "all_gather_1": lambda a, r: a.all_gather(given(r, 5, 7, 2), dim=1),
    "all_gather_ones": lambda a, r: a.all_gather(given(r, 5, 1), dim=1),
    "all_gather_outer": lambda a, r: a.all_gather(given(r, 5, 14), dim=1, outer=2),
    "all_gather_bool": lambda a, r: a.all_gather(given(r, 5, 7) > 0, dim=1),
    "all_gather_strided": lambda a, r: a.all_gather(given(r, 5, 7).t(), dim=0),
    "reduce_scatter_0": lambda a, r: a.reduce_scatter(given(r, 6, 5), dim=0),
    "reduce_scatter_1": lambda a, r: a.reduce_scatter(given(r, 5, 9, 2), dim=1),
    "reduce_scatter_outer": lambda a, r: a.reduce_scatter(given(r, 5, 12), dim=1, outer=2),
    "all_to_all": lambda a, r: a.all_to_all(given(r, 6, 5), split_dim=0, concat_dim=1),
    "all_to_all_back": lambda a, r: a.all_to_all(given(r, 5, 6, 2), split_dim=1, concat_dim=0),
    "all_to_all_outer": lambda a, r: a.all_to_all(
        given(r, 6, 12), split_dim=1, split_outer=2, concat_dim=0, concat_outer=3
    ),
    "all_to_all_ones": lambda a, r: a.all_to_all(given(r, 5, 3), split_dim=1, concat_dim=1),
    "all_to_all_same_dim": lambda a, r: a.all_to_all(
        given(r, 18), split_dim=0, split_outer=1, concat_dim=0, concat_outer=6
    ),
    "shift": lambda a, r: a.start_shift(given(r, 5, 7).t()).wait(),
    "take": lambda a, r: a.take(given(0, 5, 12), dim=1, outer=2),
    "put": lambda a, r: a.put(given(r, 5, 4), dim=1, outer=2),
}


def pieces(x: Tensor, dim: int, outer: int) -> list[Tensor]:
    """For each rank, its part of `x`: of every block of `dim`, a third."""
    blocks = [torch.chunk(block, SIZE, dim) for block in torch.chunk(x, outer, dim)]
    return [torch.cat([block[rank] for block in blocks], dim) for rank in range(SIZE)]


def joined(parts: list[Tensor], dim: int, outer: int) -> Tensor:
    blocks = [torch.chunk(part, outer, dim) for part in parts]
    return torch.cat([blocks[rank][i] for i in range(outer) for rank in range(SIZE)], dim)


def wanted(name: str, rank: int) -> Tensor:
    everyone = lambda *shape, **options: [given(r, *shape, **options) for r in range(SIZE)]  # noqa: E731
    total = lambda *shape, **options: sum(everyone(*shape, **options), start=torch.zeros((), dtype=torch.int8))  # noqa: E731
    match name:
        case "all_reduce" | "all_reduce_in_place":
            return total(5, 7)
        case "all_reduce_strided" | "all_reduce_in_place_strided":
            return total(5, 7).t()
        case "all_reduce_large":
            return total(700, 701)
        case "all_reduce_scalar":
            return total()
        case "all_reduce_max":
            return torch.stack(everyone(5)).amax(0)
        case "all_reduce_bf16":
            return total(5, dtype=torch.bfloat16)
        case "all_reduce_i64":
            return total(5, dtype=torch.int64)
        case "all_gather_0":
            return torch.cat(everyone(5, 7), 0)
        case "all_gather_1":
            return torch.cat(everyone(5, 7, 2), 1)
        case "all_gather_ones":
            return torch.cat(everyone(5, 1), 1)
        case "all_gather_outer":
            return joined(everyone(5, 14), 1, 2)
        case "all_gather_bool":
            return torch.cat(everyone(5, 7), 1) > 0
        case "all_gather_strided":
            return torch.cat(everyone(5, 7), 1).t()
        case "reduce_scatter_0":
            return pieces(total(6, 5), 0, 1)[rank]
        case "reduce_scatter_1":
            return pieces(total(5, 9, 2), 1, 1)[rank]
        case "reduce_scatter_outer":
            return pieces(total(5, 12), 1, 2)[rank]
        case "all_to_all":
            return torch.cat([pieces(x, 0, 1)[rank] for x in everyone(6, 5)], 1)
        case "all_to_all_back":
            return torch.cat([pieces(x, 1, 1)[rank] for x in everyone(5, 6, 2)], 0)
        case "all_to_all_outer":
            return joined([pieces(x, 1, 2)[rank] for x in everyone(6, 12)], 0, 3)
        case "all_to_all_ones":
            return torch.cat([pieces(x, 1, 1)[rank] for x in everyone(5, 3)], 1)
        case "all_to_all_same_dim":
            return joined([pieces(x, 0, 1)[rank] for x in everyone(18)], 0, 6)
        case "shift":
            return given((rank - 1) % SIZE, 5, 7).t()
        case "take":
            return pieces(given(0, 5, 12), 1, 2)[rank]
        case "put":
            zero = torch.zeros(5, 4)
            return joined([given(rank, 5, 4) if r == rank else zero for r in range(SIZE)], 1, 2)
    raise AssertionError(name)


def exercise(comm: Comm, rank: int) -> dict[str, Tensor]:
    """Every case; then transfers around the ring of ranks, and gradients summed in one buffer."""
    axis: Axis = comm.tp
    results = {name: case(axis, rank) for name, case in CASES.items()}
    ahead, behind = (rank + 1) % SIZE, (rank - 1) % SIZE
    for turn in range(3):
        comm.send(given(rank, 2, turn + 1), (rank, ahead))
        comm.send(given(rank, 3) > 0, (rank, behind))
    comm.send(given(rank, 4, 5).t(), (rank, ahead))
    for turn in range(3):
        results[f"from_behind_{turn}"] = comm.recv((2, turn + 1), torch.float32, (behind, rank)).wait()
        results[f"from_ahead_{turn}"] = comm.recv((3,), torch.bool, (ahead, rank)).wait()
    results["from_behind_strided"] = comm.recv((5, 4), torch.float32, (behind, rank)).wait()
    comm.drain()
    buffer = given(rank, 30)
    apart = given(rank, 4)
    axis.reduce_gradients([buffer[:6].view(2, 3), buffer[6:13], buffer[20:], apart])
    results["buffer"], results["apart"] = buffer, apart
    comm.barrier()
    return results


def check(results: list[dict[str, Tensor]]) -> None:
    for rank, result in enumerate(results):
        ahead, behind = (rank + 1) % SIZE, (rank - 1) % SIZE
        for name in CASES:
            assert torch.equal(result[name], wanted(name, rank)), (name, rank)
            # Fused kernels take these results as dense (partc.rules.strides).
            assert result[name].is_contiguous() or not name.startswith(("all_gather", "all_to_all")), name
        for turn in range(3):
            assert torch.equal(result[f"from_behind_{turn}"], given(behind, 2, turn + 1))
            assert torch.equal(result[f"from_ahead_{turn}"], given(ahead, 3) > 0)
        assert torch.equal(result["from_behind_strided"], given(behind, 4, 5).t())
        total = given(0, 30) + given(1, 30) + given(2, 30)
        total[13:20] = given(rank, 30)[13:20]
        assert torch.equal(result["buffer"], total)
        assert torch.equal(result["apart"], given(0, 4) + given(1, 4) + given(2, 4))


def links(rank: int) -> dict[tuple[int, int], int]:
    others = [other for other in range(SIZE) if other != rank]
    return {(rank, other): other for other in others} | {(other, rank): other for other in others}


def virtual(world: World, rank: int) -> VirtualComm:
    return VirtualComm(world=world, rank=rank, coordinate={"tp": rank}, groups=GROUPS, links=links(rank))


def test_threads() -> None:
    results: dict[int, dict[str, Tensor]] = {}
    world = World(SIZE)
    world.run(lambda rank: results.update({rank: exercise(virtual(world, rank), rank)}))
    check([results[rank] for rank in range(SIZE)])


@pytest.mark.slow
@pytest.mark.processes
def test_processes(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    output = tmp_path / "output"
    ranks = shared().ranks(SIZE, [__file__, str(tmp_path)], output, {**local_environment(), "PYTHONPATH": path})
    assert ranks.wait() == 0, output.read_text()
    check([load(tmp_path / f"{rank}.safetensors")[0] for rank in range(SIZE)])


def main(folder: Path) -> None:
    from partc.runtime.comm.distributed import DistributedComm
    from partc.runtime.processes.rendezvous import common_store, world
    from partc.runtime.processes.signals import Caught

    timeout, place = datetime.timedelta(seconds=30), world()
    rank = place.rank
    with Caught(checkpoints=False) as caught:
        store = common_store(place, 30.0, caught)
    comm = DistributedComm(
        rank=rank,
        coordinate={"tp": rank},
        groups=GROUPS,
        links=links(rank),
        stages=(rank,),
        world_size=SIZE,
        store=store,
        device=torch.device("cpu"),
        timeout=timeout,
    )
    save(folder / f"{rank}.safetensors", exercise(comm, rank))
    comm.close()


def test_a_group_of_one_does_nothing() -> None:
    x = given(0, 4, 6)
    axis = Axis()
    assert axis.all_reduce(x) is axis.all_gather(x, dim=0) is axis.reduce_scatter(x, dim=1, outer=2) is x
    assert axis.all_to_all(x, split_dim=0, concat_dim=1) is axis.take(x, dim=0) is axis.put(x, dim=0) is x


def test_a_part_of_several_blocks_holds_no_more_than_its_elements() -> None:
    """The part was a view of a copy of the whole tensor."""
    x = given(0, 12, 5)
    part = Axis(rank=1, size=3).take(x, dim=0, outer=2)
    assert torch.equal(part, torch.cat([x[2:4], x[8:10]]))
    assert part.untyped_storage().nbytes() == part.nbytes
    assert Axis(rank=1, size=3).take(x, dim=0).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_an_axis_that_the_mesh_has_not() -> None:
    comm = Comm({"tp": Axis()}, {})
    with pytest.raises(AttributeError, match="no axis 'dp'"):
        _ = comm.dp


def test_collectives_leave_their_operand_alone() -> None:
    def work(rank: int) -> None:
        axis = virtual(world, rank).tp
        x = given(rank, 6, 6)
        axis.all_reduce(x)
        axis.all_gather(x, dim=0).fill_(0)
        axis.reduce_scatter(x, dim=0).fill_(0)
        axis.all_to_all(x, split_dim=0, concat_dim=0).fill_(0)
        assert torch.equal(x, given(rank, 6, 6))

    world = World(SIZE)
    world.run(work)


def test_the_first_failure_stops_every_thread() -> None:
    reached: list[int] = []

    def work(rank: int) -> None:
        axis = virtual(world, rank).tp
        axis.all_reduce(torch.ones(1))
        if rank == 1:
            raise KeyError("oops")
        axis.all_reduce(torch.ones(1))
        reached.append(rank)

    world = World(SIZE)
    with pytest.raises(KeyError, match="oops"):
        world.run(work)
    assert reached == []


@pytest.mark.parametrize(
    ("odd_one", "message"),
    [
        (lambda axis: axis.all_reduce(torch.ones(2)), "disagree: all_reduce sum of float32"),
        (lambda axis: axis.all_reduce(torch.ones(1, dtype=torch.float64)), "disagree: all_reduce sum of float32"),
        (lambda axis: axis.all_gather(torch.ones(1), dim=0), "disagree: all_reduce sum of float32"),
        (lambda axis: None, "every rank waits for another: rank 0 in all_reduce sum of float32.1. over tp"),
    ],
)
def test_mismatches_are_seen(odd_one: Callable[[Axis], object], message: str) -> None:
    def work(rank: int) -> None:
        axis = virtual(world, rank).tp
        odd_one(axis) if rank == 2 else axis.all_reduce(torch.ones(1))

    world = World(SIZE)
    with pytest.raises((RuntimeError, Deadlock), match=message):
        world.run(work)


def test_what_is_received_is_checked() -> None:
    def work(rank: int) -> None:
        comm = virtual(world, rank)
        if rank == 0:
            comm.send(torch.ones(3), (0, 1))
        elif rank == 1:
            comm.recv((4,), torch.float32, (0, 1)).wait()

    world = World(SIZE)
    with pytest.raises(RuntimeError, match=r"rank 1 expects torch.float32\[4\] from rank 0, which sent"):
        world.run(work)


def test_sums_do_not_depend_on_who_comes_last() -> None:
    """Ranks arrive in different orders; a sum of unlike magnitudes is the same bits every time."""

    def sums(order: list[int]) -> list[Tensor]:
        found: dict[int, Tensor] = {}

        def work(rank: int) -> None:
            comm = virtual(world, rank)
            for earlier in order[: order.index(rank)]:
                comm.recv((1,), torch.float32, (earlier, rank)).wait()
            for later in order[order.index(rank) + 1 :]:
                comm.send(torch.ones(1), (rank, later))
            generator = torch.Generator().manual_seed(rank)
            found[rank] = comm.tp.all_reduce(torch.randn(50, generator=generator) * 10.0 ** (3 * rank))

        world = World(SIZE)
        world.run(work)
        return [found[rank] for rank in range(SIZE)]

    first = sums([0, 1, 2])
    assert all(torch.equal(x, first[0]) for x in (*first, *sums([2, 0, 1]), *sums([1, 2, 0])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
