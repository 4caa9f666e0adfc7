"""Sequences outermost where they are gathered and scattered: transposed values, copies, and equal numbers."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from torch import Tensor

import partc
from partc.ir.program import Program
from partc.passes.outermost import outermost
from partc.settings import settings
from tests.durable import imported_from
from tests.zoo import EXAMPLES

MODEL = Path(__file__).parents[1] / "models" / "between.py"


def moved(program: Program) -> dict[str, list[tuple[str, int]]]:
    """Per region, its gathers and scatters in all graphs, with their dimensions."""
    return {
        region.name: [
            (op.name, int(str(dict(op.attrs)["dim"])))
            for graph in region.graphs
            for op in graph.ops
            if op.name in ("all_gather", "reduce_scatter")
        ]
        for region in program.regions
    }


def test_a_block_gathers_and_scatters_what_is_outermost() -> None:
    program = partc.compile(EXAMPLES / "gpt.py", mesh="1x1x2").program
    found = moved(program)
    assert sorted(found["block"]) == [("all_gather", 0)] * 4 + [("reduce_scatter", 0)] * 4
    assert ("all_gather", 1) in found["head"]  # the loss reads logits in their own order
    assert outermost(program) == program


def test_of_a_batch_of_one_nothing_is_transposed() -> None:
    """There the second dimension is outermost already."""
    program = partc.compile(EXAMPLES / "gpt.py", mesh="1x4x2", microbatches=4).program
    assert {dim for _, dim in moved(program)["block"]} == {1}
    assert not any(op.name == "permute" and op.args[1] == (1, 0, 2) for op in program.region("block").forward.ops)


class Copies:
    """Counts what collectives copy besides moving it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, comm: object) -> None:
        self.bytes = 0
        join, split = vars(comm)["join"], vars(comm)["split"]

        def joined(parts: Tensor, dim: int, outer: int) -> Tensor:
            return self._counted(parts, join(parts, dim, outer))

        def cut(x: Tensor, ways: int, dim: int, outer: int) -> Tensor:
            parts = split(x, ways, dim, outer)
            self._counted(parts, parts.contiguous())
            return parts

        axis = vars(comm)["Axis"]
        gather = axis.start_all_gather

        def start(group: object, x: Tensor, *, dim: int, outer: int = 1) -> object:
            self._counted(x, x.contiguous())
            return gather(group, x, dim=dim, outer=outer)

        monkeypatch.setattr(comm, "join", joined)
        monkeypatch.setattr(comm, "split", cut)
        monkeypatch.setattr(axis, "start_all_gather", start)

    def _counted(self, before: Tensor, after: Tensor) -> Tensor:
        self.bytes += after.nbytes if before.data_ptr() != after.data_ptr() else 0
        return after


def copied(package: partc.Package, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    package.write(folder)
    with imported_from(folder), monkeypatch.context() as patch:
        counted = Copies(patch, importlib.import_module("runtime.comm.comm"))
        run = importlib.import_module("runtime.train.train")
        assert run.main(["--virtual", "--steps", "1"], folder) == 0
    return counted.bytes


def test_copies_are_a_rank_s_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks copy a quarter of what they did, with two ranks; the embedding and the head copy the same."""
    program = EXAMPLES / "gpt.py"
    turned = copied(partc.compile(program, mesh="1x1x2"), tmp_path / "turned", monkeypatch)
    monkeypatch.setenv("PARTC_DISABLE", "outermost")
    settings.cache_clear()
    try:
        whole = copied(partc.compile(program, mesh="1x1x2"), tmp_path / "whole", monkeypatch)
    finally:
        monkeypatch.delenv("PARTC_DISABLE")
        settings.cache_clear()
    assert 0 < turned < whole / 2.5


KINDS = {
    "plain": 2, "scale": 2, "turned": 2, "drop": 1, "rows": 1, "batch": 1, "shift": 1, "flat": 2, "halves": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "turned"), KINDS.items())
def test_whatever_stands_between_the_numbers_are_the_same(kind: str, turned: int) -> None:
    """Attention is turned always, and what works on rows in any order: in forward, `turned` pairs of collectives."""
    package = partc.compile(MODEL, options={"kind": kind}, mesh="1x1x2", precision="fp64")
    forward = package.program.region("block").forward
    assert sum(name.endswith("_t") for name in forward.definitions()) == 2 * turned
    assert package.verify(steps=2, virtual=True).ok
