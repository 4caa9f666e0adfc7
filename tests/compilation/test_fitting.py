"""A memory budget covers everything that a rank holds; a refusal names options that would help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.cluster.cluster import preset
from partc.compilation import fitting
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.cost.calibration import calibration
from partc.cost.saved_tensors import parse_bytes
from partc.errors import PartcError

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"depth": 6, "batch": 512}


def compiled(mesh: str, **options: Any) -> partc.Package:
    """The smallest example, with more activations than weights."""
    return partc.compile(EXAMPLES / "mlp.py", mesh=mesh, options=SIZES, **options)


def peaks(package: partc.Package) -> list[int]:
    assert package.memory is not None
    return [rank.peak for rank in package.memory.ranks]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1", {}),
        pytest.param("pp=2", {"microbatches": 4}, marks=pytest.mark.matrix),
        pytest.param("pp=2", {"microbatches": 4, "schedule": "zbv"}, marks=pytest.mark.matrix),
    ],
)
def test_no_rank_holds_more_than_a_budget(mesh: str, options: dict[str, Any]) -> None:
    most, least = (max(peaks(compiled(mesh, recompute=kind, **options))) for kind in ("none", "full"))
    for part in (0.1, 0.5):
        budget = int(least + part * (most - least))
        found = max(peaks(compiled(mesh, recompute=f"{budget}B", **options)))
        assert 0.8 * budget < found <= budget
    assert max(peaks(compiled(mesh, recompute=f"{most}B", **options))) <= most


def test_what_a_budget_needs_at_least_is_enough() -> None:
    with pytest.raises(PartcError, match="P0415") as error:
        compiled("1", recompute="2MB")
    enough = re.search(r"--recompute (\S+) or more", str(error.value))
    assert enough is not None
    assert max(peaks(compiled("1", recompute=enough[1]))) <= (parse_bytes(enough[1]) or 0)


def test_a_budget_below_the_weights_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice changes the memory between steps: the two that save most and least suffice."""
    tried: list[object] = []
    rehearsed = fitting.rehearsed
    monkeypatch.setattr(fitting, "rehearsed", lambda each, **how: tried.append(each) or rehearsed(each, **how))
    with pytest.raises(PartcError, match="P0415"):
        compiled("1", recompute="100KB")
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("mesh", "more"),
    [("dp=2", {"zero": 3}), ("pp=2", {"schedule": "zero-bubble"})],
)
def test_a_budget_is_simulated_as_it_is_compiled(mesh: str, more: dict[str, Any]) -> None:
    """The simulator chose saved values for a budget of activations alone; plans by it were then refused (P0415)."""
    how: dict[str, Any] = {"microbatches": 4, "precision": "bf16", "kernels": "triton", **more}
    most, least = (
        max(peaks(partc.compile(EXAMPLES / "gpt.py", mesh=mesh, recompute=kind, **how))) for kind in ("none", "full")
    )
    recompute = f"{(most + least) // 2}B"
    cluster = preset("8xH100-80GB")
    plan = ParallelPlan(mesh=mesh, recompute=recompute, **how)
    simulated = Simulator(str(EXAMPLES / "gpt.py"), cluster, calibration(cluster)).program(plan)
    program = partc.compile(EXAMPLES / "gpt.py", mesh=mesh, recompute=recompute, **how).program
    assert [region.saved for region in simulated.regions] == [region.saved for region in program.regions]
    assert simulated.schedule == program.schedule


@pytest.mark.slow
def test_a_limit_is_kept_or_refused_with_what_would_help() -> None:
    held = max(peaks(compiled("2")))
    assert max(peaks(compiled("2", memory_limit=f"{held}B"))) == held
    with pytest.raises(PartcError, match="P0416") as error:
        compiled("2", memory_limit=f"{held - 1}B")
    assert "each rank holds" in error.value.cause and "activations" in error.value.cause
    helps = dict(re.findall(r"^ +--(\w+) (\S+): .*less, fits$", error.value.help, flags=re.MULTILINE))
    assert {"zero", "recompute", "precision"} <= set(helps)
    assert parse_bytes(helps["recompute"]) is None, "no budget is searched where a kind of recomputation is enough"
    for name in ("zero", "recompute"):
        assert max(peaks(compiled("2", memory_limit=f"{held - 1}B", **{name: helps[name]}))) < held


@pytest.mark.matrix
def test_options_that_only_fit_together() -> None:
    alone = min(max(peaks(compiled("2", zero=3))), max(peaks(compiled("2", recompute="full"))))
    with pytest.raises(PartcError, match="P0416") as error:
        compiled("2", memory_limit=f"{alone // 2}B")
    last = [line for line in error.value.help.splitlines() if line.endswith("fits")]
    assert len(last) == 1 and last[0].count("--") > 1


def test_a_limit_is_a_size() -> None:
    with pytest.raises(PartcError, match="P0004"):
        compiled("1", memory_limit="80")
