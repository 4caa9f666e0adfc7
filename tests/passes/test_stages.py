"""Stage cuts against enumeration, and the stages of buffers that forward changes."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

import partc
from partc.errors import PartcError
from partc.package.verify import verify
from partc.passes.stages import balanced_runs
from partc.schedules.per_stage import expanded, shortened
from tests.frontend.test_trace import line_of
from tests.independent.models import detached_use, old_values, self_distilled, spiking
from tests.models import cumulative_norms, running_centre, written_views


@pytest.mark.parametrize("seed", range(30))
def test_stages_are_balanced_as_enumeration_finds(seed: int) -> None:
    rng = random.Random(seed)
    work = [rng.choice([1.0, 2.5, 4.0, 9.0]) for _ in range(rng.randint(2, 9))]
    count = rng.randint(1, len(work))
    options = []
    for ends in itertools.combinations(range(1, len(work)), count - 1):
        bounds = (0, *ends, len(work))
        sizes = [sum(work[a:b]) for a, b in itertools.pairwise(bounds)]
        options.append((max(sizes), sum(size * size for size in sizes)))
    cuts = balanced_runs(work, count)
    sizes = [sum(work[a:b]) for a, b in cuts]
    assert [a for a, _ in cuts] == [0, *(b for _, b in cuts[:-1])]
    assert (max(sizes), sum(size * size for size in sizes)) == pytest.approx(min(options))


def test_readers_of_a_changing_buffer_are_in_the_stage_that_changes_it(tmp_path: Path) -> None:
    made = partc.compile(running_centre.__file__, mesh="pp=2", microbatches=2, precision="fp64")
    holders = {call.stage for call in made.program.calls if "centre.mean" in call.params}
    assert len(holders) == 1 and len({call.stage for call in made.program.calls}) == 2
    found = verify(made.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok, str(found.worst)


def test_stages_do_not_cut_between_uses_of_a_changing_buffer() -> None:
    with pytest.raises(PartcError) as error:
        partc.compile(running_centre.__file__, mesh="pp=4", microbatches=4)
    assert error.value.code == "P0403" and "share centre.mean" in str(error.value.help)
    assert error.value.source is not None and error.value.source.line == line_of(
        Path(running_centre.__file__), "self.mean.lerp_"
    )


@pytest.mark.parametrize("mesh", ["dp=2", "pp=3"])
def test_layers_after_the_change_of_a_buffer_read_its_old_value(mesh: str, tmp_path: Path) -> None:
    made = partc.compile(old_values.__file__, mesh=mesh, precision="fp64", microbatches=2)
    found = verify(made.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok, str(found.worst)


def test_pipelines_change_buffers_as_early_as_they_can(tmp_path: Path) -> None:
    made = partc.compile(self_distilled.__file__, mesh="pp=2", precision="fp64", microbatches=2)
    stage_of = {name: call.stage for call in made.program.calls for name in call.params if "student" not in name}
    assert set(stage_of.values()) == {0}
    found = verify(made.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok, str(found.worst)


def test_a_stage_that_reads_a_weight_without_a_gradient_adds_zeros(tmp_path: Path) -> None:
    made = partc.compile(detached_use.__file__, mesh="pp=2,dp=2", precision="fp64", microbatches=2, zero=1)
    assert made.program.holders()["edges"] == (0, 1)
    found = verify(made.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok, str(found.worst)


def test_gradients_that_only_the_model_defines_return_to_earlier_stages(tmp_path: Path) -> None:
    made = partc.compile(spiking.__file__, mesh="pp=2", precision="fp64")
    returned = {transfer.value for transfer in made.program.transfers if transfer.gradient}
    assert {"clamp", "clamp_2"} <= returned  # forward has comparisons alone between the last leak and the loss
    found = verify(made.write(tmp_path / "build"), steps=3, virtual=True)
    assert found.ok, str(found.worst)


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_norms_average_statistics_over_all_batches(mesh: str, tmp_path: Path) -> None:
    made = partc.compile(cumulative_norms.__file__, mesh=mesh, precision="fp64", microbatches=2)
    found = verify(made.write(tmp_path / "build"), steps=3, virtual=True)
    assert found.ok, str(found.worst)


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_buffers_that_are_changed_through_views(mesh: str, tmp_path: Path) -> None:
    made = partc.compile(written_views.__file__, mesh=mesh, precision="fp64")
    found = verify(made.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok, str(found.worst)


GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
SMALL = {"batch": 4, "seq": 8}


@pytest.mark.parametrize(
    ("mesh", "schedule", "calls", "recompute"),
    [("pp=2,dp=2", "1f1b", "4,2", "full/none"), ("pp=2", "zero-bubble", "1,2*2,1", "selective/none*2/full")],
)
def test_stages_with_given_calls_equal_the_single_device(
    mesh: str, schedule: str, calls: str, recompute: str, tmp_path: Path
) -> None:
    numbers = [int(word) for word in expanded(calls, ",")]
    made = partc.compile(
        GPT, mesh=mesh, schedule=schedule, virtual_stages=len(numbers) // 2 if len(numbers) > 2 else None, zero=1,
        microbatches=2, precision="fp64", stage_calls=calls, recompute=recompute, options=SMALL,
    )  # fmt: skip
    stages = [call.stage for call in made.program.calls if made.program.region(call.region).phase == "microbatch"]
    assert [stages.count(stage) for stage in range(len(numbers))] == numbers
    saved = {call.stage: len(made.program.region(call.region).saved) for call in made.program.calls}
    kinds = expanded(recompute, "/")
    assert saved[kinds.index("full")] < saved[kinds.index("none")]
    found = verify(made.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok, str(found.worst)


@pytest.mark.parametrize(
    ("stage_calls", "recompute", "said"),
    [
        ("3,2", "none", "5 calls"),
        ("2,2,2", "none", "for 3 stages"),
        ("3,-1", "none", "not numbers"),
        ("0,6", "none", "not numbers"),
        (None, "full/none/none", "for 3 stages"),
    ],
)
def test_decisions_by_stage_that_do_not_fit_are_refused(stage_calls: str | None, recompute: str, said: str) -> None:
    with pytest.raises(PartcError, match=said) as error:
        partc.compile(GPT, mesh="pp=2", stage_calls=stage_calls, recompute=recompute, options=SMALL)
    assert error.value.code == "P0421"


def test_given_calls_do_not_cut_between_uses_of_a_changing_buffer() -> None:
    with pytest.raises(PartcError, match="share a buffer") as error:
        partc.compile(running_centre.__file__, mesh="pp=2", microbatches=2, stage_calls="2,2")
    assert error.value.code == "P0421"


def test_texts_by_stage_are_read_back() -> None:
    for values in (["9", "8", "8", "9"], ["full"], ["softmax,all_gather", "none", "none"]):
        assert expanded(shortened(values, "/"), "/") == values
