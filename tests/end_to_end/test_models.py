"""The proof over models and meshes: packages train like the single-device model, to 1e-10 in fp64."""

from __future__ import annotations

from pathlib import Path

import pytest

import partc
from partc.package.verify import verify
from tests.zoo import EXAMPLES, MODELS

MESHES = ("2", "tp=2", "pp=2", "2x2", "2x2x2", "1x4x2", "2x1x4")

PROVED = ("gpt", "mlp", "llama", "gpt2", "bert", "vit")

# What `make test` runs of every model, and what `make test-all` runs; `make models` runs the rest too.
QUICK = {("tp=2", 1, "1f1b"), ("2x2x2", 4, "1f1b")}


def _cases() -> list[object]:
    """Every model on every mesh, with 1 and 4 microbatches, and both schedules where they differ."""
    found = []
    for model in PROVED:
        for mesh in MESHES:
            cases = [(mesh, 1, "1f1b"), (mesh, 4, "1f1b")]
            if partc.Mesh.parse(mesh).axis("pp") > 1:
                cases.append((mesh, 4, "gpipe"))
            for case in cases:
                often = case in QUICK or (model == "gpt" and case[1] == 4)
                marks = [] if often else [pytest.mark.matrix]
                if case not in QUICK and not (model == "gpt" and case[1:] == (4, "1f1b")):
                    marks.append(pytest.mark.slow)
                found.append(pytest.param(model, *case, marks=marks, id="-".join(map(str, (model, *case)))))
    return found


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where configurations and the single-device models' runs are kept."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("model", "mesh", "microbatches", "schedule"), _cases())
def test_package_equals_single_device(
    model: str, mesh: str, microbatches: int, schedule: str, shared: Path, tmp_path: Path
) -> None:
    entry = MODELS[model]
    if entry.config:
        pytest.importorskip("transformers")
    package = partc.compile(
        entry.source(shared),
        mesh=mesh,
        microbatches=microbatches,
        schedule=schedule,
        precision="fp64",
        options=entry.options,
    )
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True, reference=shared / f"{model}_run")
    assert result.ok, result.worst
    assert result.compared > 2 * len(package.program.parameters)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [("2", 1), ("tp=2", 1), ("pp=2", 4), pytest.param("2x2x2", 4, marks=pytest.mark.slow)],
)
def test_real_processes(mesh: str, microbatches: int, tmp_path: Path) -> None:
    package = partc.compile(EXAMPLES / "gpt.py", mesh=mesh, microbatches=microbatches, precision="fp64")
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2)
    assert result.ok, result.worst


@pytest.mark.slow
def test_fp32_is_as_close_as_rounding_allows(tmp_path: Path) -> None:
    partc.compile(EXAMPLES / "gpt.py", mesh="2x2x2", microbatches=4).write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True)
    assert result.ok, result.worst


@pytest.mark.slow
def test_sixty_four_ranks(tmp_path: Path) -> None:
    partc.compile(EXAMPLES / "gpt.py", mesh="2x8x4", microbatches=2, precision="fp64").write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=1, virtual=True)
    assert result.ok, result.worst


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        ("tp=2", 1),
        ("pp=2,tp=3", 2),
        ("pp=3,dp=2,tp=2", 4),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in (("4x2", 3), ("pp=6,dp=2", 4))),
    ],
)
def test_everything_awkward(mesh: str, microbatches: int, shared: Path, tmp_path: Path) -> None:
    """Names of a Sequential's parameters; a weight used alike by ranks in one region and differently in another."""
    source = Path(__file__).parents[1] / "models" / "crossing.py"
    package = partc.compile(source, mesh=mesh, microbatches=microbatches, precision="fp64")
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True, reference=shared / "crossing_run")
    assert result.ok, result.worst
