"""Rounding in 16 bits: python -m tests.independent.rounding [--mesh dp=2] [--precision bf16] [--seed 0] [--steps 3]
[--only GLOB] [--models DIR].

Every model is trained three times by SGD: in fp64 by a plain loop, in fp32 under torch.autocast by a plain loop, and as
a package in 16 bits. Printed is the change of all parameters in both low precisions, each relative to that in fp64, and
the parameter at which the package is the worst compared with autocast. A package that computes something in 16 bits
that autocast computes in 32 stands out. In fp16, both are compared with loops in fp64 that skip the same steps. A model
that selects by value, such as by a maximum, amplifies the rounding of one number: its error varies widely with the seed.
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
from typing import Literal

import torch
from torch import Tensor

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


def rounding(
    path: Path,
    mesh: str,
    recipe: Recipe,
    server: Server,
    *,
    precision: Literal["bf16", "fp16"] = "bf16",
    seed: int = 0,
) -> Rounding:
    """The errors of one model. Raises PartcError."""
    package = partc.compile(str(path), mesh=mesh, precision=precision, seed=seed)
    with tempfile.TemporaryDirectory(prefix="partc-rounding-") as folder:
        found = packaged(package.write(Path(folder) / "build"), recipe, Path(folder), server)
    start = train(path, replace(recipe, steps=0), seed=seed, precision=precision).state
    low = train(path, recipe, seed=seed, precision=precision)
    exact = {each: train(path, recipe, seed=seed, skip=each).state for each in {found.skipped, low.skipped}}
    names = [name for name, x in start.items() if x.is_floating_point()]
    moved = {name: float((exact[found.skipped][name] - start[name].double()).norm()) for name in names}
    whole = _length(moved)
    if not whole:
        raise ValueError("every step is skipped, or no parameter changes")
    errors, lows = (
        {name: _error(each.state[name], exact[each.skipped][name]) for name in names} for each in (found, low)
    )
    times = {
        name: errors[name] / max(lows[name], _ROUNDING * moved[name])
        for name in names
        if moved[name] > max(_SMALL * whole, 1e-9)
    }
    worst = max(times, key=lambda name: times[name], default="")
    return Rounding(_length(errors) / whole, _length(lows) / whole, worst, times.get(worst, 0.0))


def _error(low: Tensor, exact: Tensor) -> float:
    return float(((torch.view_as_real(low) if low.is_complex() else low).double() - exact).norm())


def _length(lengths: Mapping[str, float]) -> float:
    return sum(each**2 for each in lengths.values()) ** 0.5


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.independent.rounding", description=__doc__)
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp16"])
    parser.add_argument("--seed", type=int, default=0)
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
            each = rounding(path, given.mesh, recipe, server, precision=given.precision, seed=given.seed)
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
