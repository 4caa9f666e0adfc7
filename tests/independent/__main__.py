"""The whole harness as a table: python -m tests.independent [--only GLOB] [--setting GLOB] [--torchrun] [--workers N].

Every model of tests/independent/models on every setting: `=` where the package's end is the plain loop's, a code where
the compiler refuses the model on that mesh, an error otherwise. Exit code 1 where anything differs.

`--models DIR` takes the model files of another folder. `--drawn 0:20` takes settings drawn at random instead: mesh,
schedule, ZeRO, recomputation, optimizer and its options.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.independent.trainings import MODELS, SETTINGS, Outcome, drawn_setting, model_files, row


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.independent", description=__doc__)
    parser.add_argument("--only", default="*", help="models whose name matches")
    parser.add_argument("--setting", default="*", help="settings whose name matches")
    parser.add_argument("--torchrun", action="store_true", help="start ranks by torchrun: slower by its imports")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of model files")
    parser.add_argument("--drawn", metavar="FIRST:LAST", help="seeds of settings drawn at random, LAST excluded")
    given = parser.parse_args(argv)
    seeds = range(*map(int, given.drawn.split(":"))) if given.drawn else None
    settings = SETTINGS if seeds is None else tuple(map(drawn_setting, seeds))
    settings = tuple(setting for setting in settings if fnmatch.fnmatchcase(setting.name, given.setting))
    files = [path for path in model_files(given.models) if fnmatch.fnmatchcase(path.stem, given.only)]
    run = partial(row, settings=settings, torchrun=given.torchrun)
    print("\t".join(["model", *(setting.name for setting in settings)]), flush=True)
    outcomes: list[Outcome] = []
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        for found in pool.imap(run, files):
            print("\t".join([found[0].model, *map(cell, found)]), flush=True)
            outcomes += found
    wrong = [outcome for outcome in outcomes if not outcome.ok]
    refused = [outcome for outcome in outcomes if outcome.refused]
    equal = len(outcomes) - len(wrong) - len(refused)
    print(
        f"\n{len(files)} models on {len(settings)} settings: {equal} equal, {len(refused)} refused, {len(wrong)} wrong"
    )
    for outcome in wrong:
        print(f"\n{outcome.model} on {outcome.setting}: {outcome.error:.1e} {outcome.where}")
    return 1 if wrong else 0


def cell(outcome: Outcome) -> str:
    if outcome.refused:
        return outcome.refused
    return f"= {outcome.error:.0e}" if outcome.ok else f"WRONG {outcome.error:.0e}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
