"""The proof over schedules: with each, packages train like the single-device model, to 1e-12 in fp64."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import partc
from partc.package.verify import verify
from partc.schedules import SCHEDULES, Compute, compute_order, stage_ranks
from tests.passes.test_schedule_pass import random_rows

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
NEW = [name for name in SCHEDULES if name not in ("gpipe", "1f1b")]  # test_models has those two

# What `make test` runs, and what `make test-all` runs; `make models` runs the rest too.
QUICK = {("2x2x2", "zbv", 2), ("pp=4", "zero-bubble", 5)}
ALWAYS = {*(("pp=4", name, 5) for name in NEW), ("2x2x2", "zbv", 2)}


def _cases() -> list[object]:
    found = []
    for mesh, counts in {"pp=2": (1, 2, 3, 8), "pp=4": (1, 4, 5, 12), "2x2x2": (1, 2, 4), "dp=2,pp=4": (4,)}.items():
        for name in SCHEDULES:
            for count in counts:
                marks = (pytest.mark.slow,) if (mesh, name, count) in ALWAYS else (pytest.mark.matrix,)
                marks = () if (mesh, name, count) in QUICK else marks
                found.append(pytest.param(mesh, name, count, marks=marks, id=f"{mesh}-{name}-{count}"))
    return found


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the single-device models' runs are kept."""
    return tmp_path_factory.mktemp("schedules")


def _verified(folder: Path, reference: Path, source: Path = GPT, **given: object) -> partc.Program:
    package = partc.compile(source, precision="fp64", **given)  # type: ignore[arg-type]
    package.write(folder / "build")
    result = verify(folder / "build", steps=2, virtual=True, reference=reference)
    assert result.ok and result.worst.rel_err < 1e-12, result.worst
    assert result.compared > 2 * len(package.program.parameters)
    return package.program


def _words(compute: Compute, split: frozenset[int]) -> tuple[str, ...]:
    """The actions of a computation: whole backward passes of split stages run as halves, one after the other."""
    halves = ("I", "W") if compute.kind == "B" and compute.stage in split else (compute.kind,)
    return tuple(f"{compute.stage}{kind}{compute.microbatch}" for kind in halves)


@pytest.mark.sampled
@pytest.mark.parametrize(("mesh", "name", "microbatches"), _cases())
def test_every_schedule(mesh: str, name: str, microbatches: int, shared: Path, tmp_path: Path) -> None:
    options = {"depth": 8, "seq": 8, "batch": 4 * microbatches}
    program = _verified(
        tmp_path, shared / f"gpt_{microbatches}", mesh=mesh, schedule=name, microbatches=microbatches, options=options
    )
    ranks = program.mesh.axis("pp")
    order = compute_order(SCHEDULES[name], ranks, microbatches, program.stages)
    run = [[str(action) for action in row if action.kind in ("F", "B", "I", "W")] for row in program.schedule]
    assert run == [[word for compute in row for word in _words(compute, program.split_stages)] for row in order]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name", "virtual_stages", "mesh"),
    [
        ("crossing", "interleaved", 2, "2x2x2"),
        pytest.param("crossing", "zero-bubble", 3, "pp=2", marks=pytest.mark.slow),
        pytest.param("skips", "interleaved", 3, "pp=2", marks=pytest.mark.slow),
        ("skips", "dualpipe-v", None, "pp=3"),
        pytest.param("crossing", "interleaved", 3, "pp=2", marks=pytest.mark.matrix),
        pytest.param("crossing", "zbv", None, "pp=3", marks=pytest.mark.matrix),
        pytest.param("crossing", "dualpipe-v", None, "pp=3", marks=pytest.mark.matrix),
        pytest.param("skips", "interleaved", 2, "2x2x2", marks=pytest.mark.matrix),
        pytest.param("skips", "zero-bubble", 3, "pp=2", marks=pytest.mark.matrix),
        pytest.param("skips", "zbv", None, "pp=3", marks=pytest.mark.matrix),
    ],
)
def test_values_that_skip_stages(
    model: str, name: str, virtual_stages: int | None, mesh: str, shared: Path, tmp_path: Path
) -> None:
    """Long skips, also between stages of one rank; tied, shared and frozen weights; penalties."""
    source = Path(__file__).parents[1] / "models" / f"{model}.py"
    program = _verified(
        tmp_path, shared / model, source,
        mesh=mesh, schedule=name, virtual_stages=virtual_stages, microbatches=4, options={"batch": 24},
    )  # fmt: skip
    assert program.stages == program.mesh.axis("pp") * (virtual_stages or 2)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(2, 12))])
def test_random_tables(seed: int, shared: Path, tmp_path: Path) -> None:
    """Random stages on random ranks, in a random order that can run."""
    rng = random.Random(seed)
    ranks, microbatches = rng.choice([2, 3]), rng.choice([2, 3])
    places = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 6 - ranks)))]
    rng.shuffle(places)
    rows = random_rows(places, microbatches, rng, in_order=seed % 2 == 0)
    table = tmp_path / "mine.csv"
    table.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    program = _verified(
        tmp_path, shared / f"table_{microbatches}",
        mesh=f"pp={ranks}", schedule=str(table), microbatches=microbatches,
        options={"depth": 8, "seq": 8, "batch": 2 * microbatches},
    )  # fmt: skip
    assert program.stages == len(places)
    assert [program.place(stage) for stage in range(program.stages)] == places


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    ["zero-bubble", "dualpipe-v", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("interleaved", "zbv"))],
)
def test_real_processes(name: str, tmp_path: Path) -> None:
    options = {"depth": 4, "seq": 8, "batch": 8}
    package = partc.compile(GPT, mesh="pp=2", schedule=name, microbatches=4, precision="fp64", options=options)
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2)
    assert result.ok and result.worst.rel_err < 1e-12, result.worst
    program = package.program
    places = stage_ranks(SCHEDULES[name], 2, program.stages)
    assert tuple(program.place(stage) for stage in range(program.stages)) == places
