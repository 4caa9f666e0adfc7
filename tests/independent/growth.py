"""Tensors of a rank that grow with the batch: python -m tests.independent.growth [--mesh dp=2,tp=2] [--only GLOB].

Every model is compiled twice: with its batch, and with twice the examples on twice the data-parallel ranks. A rank has
equal work in both programs. Each operation whose local shape differs is printed, with both shapes: a rank computes
something there for the whole batch. Compare the programs' texts where one has other operations than the other.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import partc
from partc.errors import PartcError
from partc.ir.mesh import Mesh
from partc.ir.program import Program
from tests.independent.plain import examples, load, over_tensors
from tests.independent.trainings import MODELS, model_files

Shapes = tuple[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class Growth:
    """Operations whose local shapes differ with the larger batch: their names and shapes before and after."""

    before: tuple[Shapes, ...]
    after: tuple[Shapes, ...]

    @property
    def elements(self) -> int:
        """The elements that a rank has more of with the larger batch."""
        count = lambda found: sum(torch.Size(shape).numel() for _, shapes in found for shape in shapes)  # noqa: E731
        return count(self.after) - count(self.before)


def growth(path: Path, mesh: str, **options: Any) -> Growth:
    """The operations of a rank that change where batch and data-parallel ranks both double. Raises PartcError."""
    module = load(path)
    sys.modules[module.__name__] = module
    small, large = Mesh.parse(mesh), Mesh.parse(mesh)
    large = replace(large, axes=tuple((name, size * (2 if name == "dp" else 1)) for name, size in large.axes))
    batch = module.data(0)
    found: list[Counter[Shapes]] = []
    for grid, given in ((small, batch), (large, _twice(batch))):
        package = partc.compile(module.model, given, mesh=grid, loss=getattr(module, "loss", None), **options)
        found.append(_shapes(package.program))
    before, after = found
    return Growth(tuple((before - after).elements()), tuple((after - before).elements()))


def _twice(batch: Any) -> Any:
    rows = examples(batch)
    return over_tensors(lambda x: torch.cat([x, x]) if x.dim() and x.shape[0] == rows else x, batch)


def _shapes(program: Program) -> Counter[Shapes]:
    return Counter(
        (op.name, tuple(value.type.layout.local_shape(program.sizes) for value in op.results))
        for region in program.regions
        for graph in region.graphs
        for op in graph.ops
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.independent.growth", description=__doc__)
    parser.add_argument("--only", default="*", help="models whose name matches")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of model files")
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--microbatches", type=int, default=1)
    given = parser.parse_args(argv)
    grown = 0
    for path in model_files(given.models):
        if not fnmatch.fnmatchcase(path.stem, given.only):
            continue
        try:
            found = growth(path, given.mesh, microbatches=given.microbatches)
        except PartcError as refusal:
            print(f"{path.stem}\t{refusal.code}", flush=True)
            continue
        if found.before or found.after:
            grown += 1
            print(f"{path.stem}\t{found.elements:+d} elements", flush=True)
            for sign, shapes in (("-", found.before), ("+", found.after)):
                for name, local in shapes[:8]:
                    print(f"\t{sign} {name} {', '.join(map(str, local))}", flush=True)
    print(f"{grown} models have tensors that grow")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
