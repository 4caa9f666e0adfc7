"""Rounding in 16 bits: python -m tests.independent.rounding [--mesh dp=2] [--only GLOB] [--models DIR] [--steps 3].

Every model is trained three times by SGD: in fp64 by a plain loop, in fp32 under torch.autocast by a plain loop, and as
a package in bf16. Printed is the change of all parameters in both low precisions, each relative to that in fp64, and
the parameter at which the package is the worst compared with autocast. A package that computes something in 16 bits
that autocast computes in 32 stands out.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import partc
from partc.errors import PartcError
from tests.independent.plain import Recipe, train
from tests.independent.trainings import MODELS, model_files, packaged
from tests.prefork import Server

_ROUNDING = 0.004  # of bf16; smaller errors of autocast are none to be held to
_SMALL = 1e-3  # parameters with a smaller share of the whole change are left out


@dataclass(frozen=True, slots=True)
class Rounding:
    """Relative errors of the parameters' change, and the parameter at which the package's is the largest in terms of
    autocast's.
    """

    package: float
    autocast: float
    worst: str
    times: float


def rounding(path: Path, mesh: str, recipe: Recipe, server: Server) -> Rounding:
    """The errors of one model. Raises PartcError."""
    package = partc.compile(str(path), mesh=mesh, precision="bf16")
    with tempfile.TemporaryDirectory(prefix="partc-rounding-") as folder:
        ended = packaged(package.write(Path(folder) / "build"), recipe, Path(folder), server).state
    found = {name: torch.view_as_real(x) if x.is_complex() else x for name, x in ended.items()}
    start = train(path, replace(recipe, steps=0), precision="bf16").state
    low, exact = train(path, recipe, precision="bf16").state, train(path, recipe).state
    names = [name for name, x in start.items() if x.is_floating_point()]
    moved = {name: float((exact[name] - start[name].double()).norm()) for name in names}
    whole = _length(moved)
    errors, lows = (
        {name: float((state[name].double() - exact[name]).norm()) for name in names} for state in (found, low)
    )
    times = {
        name: errors[name] / max(lows[name], _ROUNDING * moved[name])
        for name in names
        if moved[name] > max(_SMALL * whole, 1e-9)
    }
    worst = max(times, key=lambda name: times[name], default="")
    return Rounding(_length(errors) / whole, _length(lows) / whole, worst, times.get(worst, 0.0))


def _length(lengths: Mapping[str, float]) -> float:
    return sum(each**2 for each in lengths.values()) ** 0.5


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.independent.rounding", description=__doc__)
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--only", default="*", help="models whose name matches")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of model files")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args(argv)
    recipe = Recipe(optimizer="sgd", lr=0.05, steps=given.steps)
    server, found = Server(), []
    for path in model_files(given.models):
        if not fnmatch.fnmatchcase(path.stem, given.only):
            continue
        try:
            each = rounding(path, given.mesh, recipe, server)
        except PartcError as refusal:
            print(f"{path.stem:24} {refusal.code}", flush=True)
        except Exception as error:  # most often the model's own, which autocast or a batch of fp64 does not suit
            print(f"{path.stem:24} {type(error).__name__}: {str(error).splitlines()[0][:80]}", flush=True)
        else:
            found.append(each)
            place = f"{each.worst} {each.times:.1f} times" if each.times > 1 else ""
            print(f"{path.stem:24} {each.package:.1e} {each.autocast:.1e}  {place}", flush=True)
    server.close()
    if found:
        package, low = (statistics.median(getattr(each, name) for each in found) for name in ("package", "autocast"))
        print(f"\n{len(found)} models: the median error is {package:.1e}, and {low:.1e} under autocast")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
