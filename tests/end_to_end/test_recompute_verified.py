"""Packages with recomputation equal their models in fp64, and hold as many bytes as predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.cost.saved_tensors import most_saved
from partc.package.verify import verify
from tests import prefork
from tests.independent.models import ring_bank
from tests.zoo import MODELS

KINDS = ("selective", "full")
MESHES = {"2": ("1f1b",), "tp=2": ("1f1b",), "2x2x2": ("1f1b", "zero-bubble", "interleaved")}
# What `make test` runs, and what `make test-all` runs; `make models` runs the rest too.
QUICK = ("noisy", "2x2x2", "zero-bubble", "full")
ALWAYS = {
    ("gpt", "2x2x2", "zero-bubble", "full"), ("noisy", "2x2x2", "1f1b", "selective"),
    ("noisy", "2x2x2", "zero-bubble", "full"), ("resnet", "2", "1f1b", "full"),
    ("bert_dropout", "2x2x2", "interleaved", "selective"),
}  # fmt: skip


def _cases() -> list[object]:
    found = []
    for model in ("gpt", "noisy", "resnet", "unet", "mixture", "bert_dropout", "gpt2_dropout", "mixtral", "swin"):
        for mesh, schedules in MESHES.items():
            for schedule in schedules:
                for kind in KINDS:
                    case = (model, mesh, schedule, kind)
                    marks = (pytest.mark.slow,) if case in ALWAYS else (pytest.mark.matrix,)
                    marks = () if case == QUICK else marks
                    found.append(pytest.param(*case, marks=marks, id="-".join(case)))
    return found


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where configurations and the single-device models' runs are kept."""
    return tmp_path_factory.mktemp("recompute")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "schedule", "kind"), _cases())
def test_packages_equal_their_models(
    name: str, mesh: str, schedule: str, kind: str, shared: Path, tmp_path: Path
) -> None:
    model = MODELS[name]
    if model.config:
        pytest.importorskip("transformers")
    package = partc.compile(
        model.source(shared), mesh=mesh, schedule=schedule, microbatches=4, precision="fp64", recompute=kind,
        options=model.options,
    )  # fmt: skip
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True, reference=shared / f"{name}_run")
    assert result.ok and result.worst.rel_err < 1e-11, result.worst


def test_rows_of_a_buffer_that_backward_reads_are_those_of_forward(tmp_path: Path) -> None:
    package = partc.compile(ring_bank.__file__, mesh="dp=2,tp=2", precision="fp64", recompute="full")
    result = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert result.ok, result.worst


@pytest.mark.slow
def test_parameters_in_parts_are_there_for_what_is_made_again(shared: Path, tmp_path: Path) -> None:
    model = MODELS["noisy"]
    package = partc.compile(
        model.source(shared), mesh="2x2x2", microbatches=4, precision="fp64", recompute="full", zero=3
    )
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True, reference=shared / "noisy_run")
    assert result.ok, result.worst


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", pytest.param("zero-bubble", marks=pytest.mark.matrix)])
def test_blocks_that_differ_in_what_they_save(schedule: str, shared: Path, tmp_path: Path) -> None:
    """Two loops over one list of blocks in a stage, each with its random numbers."""
    model = Path(__file__).parents[1] / "models" / "noisy.py"
    sizes = {"depth": 12, "batch": 32}
    given: dict[str, Any] = {"mesh": "2x2x2", "schedule": schedule, "microbatches": 4, "precision": "fp64"}
    most, least = (max(held(partc.compile(model, recompute=kind, options=sizes, **given))) for kind in ("none", "full"))
    budget = (most + 2 * least) // 3
    package = partc.compile(model, recompute=f"{budget}B", options=sizes, **given)
    called = [call.region for call in package.program.calls if call.stage == 0 and call.name.startswith("blocks.")]
    assert len(set(called)) == 2 or schedule != "interleaved"
    assert max(held(package)) <= budget
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True, reference=shared / "deep_noisy_run")
    assert result.ok and result.worst.rel_err < 1e-11, result.worst


def held(package: partc.Package) -> list[int]:
    """The peak memory of each pipeline rank by the account."""
    assert package.memory is not None
    return [rank.peak for rank in package.memory.ranks]


# Runs a package for one step and prints, per rank, the most bytes that its executor held for backward passes.
MEASURE = """
import json, runpy, sys
sys.path.insert(0, sys.argv[1])
sys.argv = ["train.py", "--virtual", "--steps", "1"]
from runtime.execution import executor
peaks = {}

def tensors(value):
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)
    elif hasattr(value, "__dataclass_fields__"):  # what a region saved; backward has deleted some
        yield from tensors([getattr(value, name, None) for name in value.__dataclass_fields__])

def bytes_of(values):
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors(values)}

run = executor.Step.run
def measured(self, action, **options):
    run(self, action, **options)
    held = bytes_of([self.microbatches, [vars(stage) for stage in self.stages.values()]])
    saved = bytes_of(self.saved)
    size = sum(count for where, count in saved.items() if where not in held)
    peaks[id(self.comm)] = max(peaks.get(id(self.comm), 0), size)
executor.Step.run = measured
try:
    runpy.run_path(sys.path[0] + "/train.py", run_name="__main__")
finally:
    print(json.dumps(list(peaks.values())))
"""


def _measured(build: Path) -> list[int]:
    script = build.with_name("measure.py")
    script.write_text(MEASURE)
    done = prefork.done([script, build])
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[int] = json.loads(done.stderr.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param("gpt", {"batch": 8, "seq": 16, "depth": 4}, marks=pytest.mark.slow), ("noisy", {"batch": 8})],
)
def test_a_rank_saves_what_is_said(name: str, options: dict[str, object], shared: Path, tmp_path: Path) -> None:
    sizes: dict[str, list[int]] = {}
    peaks: dict[str, int] = {}
    for kind in ("none", *KINDS):
        package = partc.compile(
            MODELS[name].source(shared), mesh="pp=2", microbatches=4, recompute=kind, options=options
        )
        package.write(tmp_path / kind)
        peaks[kind] = max(held(package))
        sizes[kind] = _measured(tmp_path / kind)
        assert sizes[kind] == list(most_saved(package.program)) == package.report["saved"]
    middle = (peaks["none"] + peaks["full"]) // 2
    package = partc.compile(
        MODELS[name].source(shared), mesh="pp=2", microbatches=4, recompute=f"{middle}B", options=options
    )
    package.write(tmp_path / "budget")
    assert _measured(tmp_path / "budget") == list(most_saved(package.program))
    assert 0.8 * middle < max(held(package)) <= middle
    for more, less in (("none", "selective"), ("selective", "full")):
        assert all(a > b for a, b in zip(sizes[more], sizes[less], strict=True))
