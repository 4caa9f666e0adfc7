"""Bugs that other frameworks shipped, injected into packages: the comparison with the single device finds each.

A mutant is a package with one line of its runtime or of a stage changed. Mutants of experts, long sequences and tables
are in the tests of these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.errors import PartcError
from partc.package.launch import RunFailed
from partc.package.verify import verify
from tests.pairwise import Row
from tests.passes.test_events import done

MODELS = Path(__file__).parents[1] / "independent" / "models"
UPDATE, SUMS, STEP = "runtime/optimizer/update.py", "runtime/execution/sums.py", "runtime/execution/executor.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A line of a file of a package and its replacement, with the training that shows the difference."""

    file: str
    line: str
    becomes: str
    options: Row
    model: str = "used_twice"
    arguments: tuple[str, ...] = ()


TENSOR: Row = {"mesh": "dp=2,tp=2", "precision": "fp64"}
BATCH: Row = {"mesh": "dp=2", "precision": "fp64"}
MUTANTS = {
    "the gradient norm counts copies of a parameter twice": Mutant(
        file=UPDATE, line="self._gradients.squares(names) / copies", becomes="self._gradients.squares(names)",
        options=TENSOR,
    ),
    "the gradient norm leaves a parameter out": Mutant(
        file=UPDATE, line="self._gradients.squares(names) / copies",
        becomes="self._gradients.squares(names[1:]) / copies", options=TENSOR,
    ),
    "the gradient norm is that of the ranks of one axis": Mutant(
        file=UPDATE, line="        for name in self._axes:\n", becomes="        for name in self._axes[1:]:\n",
        options={**TENSOR, "zero": 1},
    ),
    "the loss is divided by the number of ranks once more": Mutant(
        file=STEP, line="loss = comm.group((axis,)).all_reduce(loss)",
        becomes="loss = comm.group((axis,)).all_reduce(loss) / comm.group((axis,)).size", options=BATCH,
    ),
    "each rank keeps the loss of its own part": Mutant(
        file=STEP, line="loss = comm.group((axis,)).all_reduce(loss)", becomes="pass", options=BATCH,
    ),
    "the last gradient of a bucket is never summed": Mutant(
        file=SUMS, line="and self._axes_of(shards[name]) == self.over)",
        becomes="and self._axes_of(shards[name]) == self.over)[:-1]", options=BATCH,
    ),
    "a parameter without a gradient decays": Mutant(
        file="stages/stage_0.py", line='"detached.weight": Shard("f64[8, 8]", trainable=False)',
        becomes='"detached.weight": Shard("f64[8, 8]")', options=BATCH, model="no_gradient",
        arguments=("--weight-decay", "0.1"),
    ),
    "the gradient of a parameter of two stages is that of one": Mutant(
        file=STEP, line="comm.pipeline(ranks).reduce_gradients(gradients)", becomes="pass",
        options={"mesh": "pp=2", "microbatches": 2, "precision": "fp64"},
    ),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_not_the_single_device_model(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    build = compiled(mutant.model, mutant.options).write(tmp_path / "build")
    assert equal(build, mutant, tmp_path / "reference")
    change(build / mutant.file, mutant.line, mutant.becomes)
    assert not equal(build, mutant, tmp_path / "reference")


def test_gradients_are_summed_once_for_all_accumulated_batches(tmp_path: Path) -> None:
    """ZeRO 1 that sums at every batch ends at the same numbers: only the collectives tell."""
    build = compiled("used_twice", {**BATCH, "zero": 1}).write(tmp_path / "build")

    def scatters(batches: int) -> int:
        found = done(build, tmp_path / f"{batches}.json", "--accumulate", str(batches))
        return sum(operation == "reduce_scatter" for operation, *_ in found["0"])

    once = scatters(1)
    assert once and scatters(3) == once
    change(
        build / STEP, "_play(step, actions, batch, first=first, last=last)", "_play(step, actions, batch, first=first)"
    )
    assert scatters(3) == 3 * once


def test_a_tied_table_counts_once(tmp_path: Path) -> None:
    """Flops are those of the operations, so that a parameter read twice is worked on twice, and held once."""
    source = (MODELS / "used_twice.py").read_text()
    untied = tmp_path / "untied.py"
    untied.write_text(re.sub(r"\n *self\.again\.weight = self\.mix\.weight", "", source))
    tied, apart = (partc.compile(str(path), mesh="dp=2") for path in (MODELS / "used_twice.py", untied))
    assert tied.flops == apart.flops
    held = [{name for name in package.program.holders()} for package in (tied, apart)]
    assert held[1] - held[0] == {"again.weight"}


def change(file: Path, line: str, becomes: str) -> None:
    text = file.read_text()
    assert text.count(line) == 1
    file.write_text(text.replace(line, becomes))


def equal(build: Path, mutant: Mutant, reference: Path) -> bool:
    """Whether a package trains, and ends where the single-device model does."""
    try:
        return verify(build, virtual=True, arguments=mutant.arguments, reference=reference).ok
    except (PartcError, RunFailed):
        return False


def compiled(model: str, options: Row) -> Any:
    return partc.compile(str(MODELS / f"{model}.py"), **options)
