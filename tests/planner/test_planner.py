"""Plans: their documents, their space, the search, and `partc plan`."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partc import passes
from partc.cli import main
from partc.cluster.cluster import preset
from partc.compilation.plan import ParallelPlan, read
from partc.compilation.simulation import Prediction, Simulator
from partc.cost.calibration import calibration
from partc.errors import PartcError
from partc.ir.mesh import Mesh
from partc.planner.deadline import TimeUpError, time_limit
from partc.planner.estimates import Estimates
from partc.planner.planning import Planner, Request
from partc.planner.search import Failure, Played, search
from partc.planner.space import Space, divisors, inner_axes, mesh_of, parse_fixed, sizes_of
from partc.planner.stage_fitting import StageNeeds, cuttable, fit, fit_ways, fits, range_sums
from tests.enumeration import Cases, cases, compared

ROUTED = Path(__file__).parents[1] / "models" / "routed.py"
GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("seed", [3, 23, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (15, 25))])
def test_the_best_plan_is_that_of_enumeration(seed: int) -> None:
    result = compared(next(cases(seed)))
    assert result is not None and len(result.errors) < result.plans
    assert result.faults == ()


def test_a_plan_survives_its_document(tmp_path: Path) -> None:
    plan = ParallelPlan(
        mesh="pp=2,dp=4", microbatches=8, schedule="interleaved", virtual_stages=4, zero=1, options={"batch": 64}
    )
    file = tmp_path / "plan.json"
    file.write_text(plan.text)
    assert read(file) == plan
    assert read(file).options == {"batch": 64}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"mesh": true}',
        '{"mesh": "dp=2", "microbatches": 0}',
        '{"mesh": "dp=2", "microbatches": "two"}',
        '{"mesh": "dp=2", "surprise": 1}',
        '{"mesh": "dp=2", "mesh": "dp=4"}',
        '{"mesh": "dp=2", "options": {"a-b": 1}}',
        '{"mesh": "dp=2", "options": {"a": [1]}}',
        '{"mesh": "dp=2", "zero": [1]}',
    ],
)
def test_files_that_are_no_plans_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(PartcError) as caught:
        read(file)
    assert caught.value.code == "P0804"


def test_the_plan_of_a_package_is_told_from_a_planner_s() -> None:
    with pytest.raises(PartcError, match=r"P0804: .* is the plan of a package"):
        read(Path(GPT).parent / "gpt_2x2x2" / "plan.json")


def test_the_space_has_every_mesh_once() -> None:
    space = Space(ranks=12, batch=24, calls=6, nodes=2, fixed=parse_fixed("zero=1,recompute=none,schedule=1f1b"))
    plans = [plan for plan in space.plans() if plan.stage_calls is None]
    assert len({(plan.mesh, plan.microbatches) for plan in plans}) == len(plans)
    meshes = [Mesh.parse(plan.mesh) for plan in plans]
    assert {mesh.size for mesh in meshes} == {12}
    sizes = {tuple(mesh.axis(name) for name in ("pp", "dp", "tp")) for mesh in meshes}
    expected = {
        (pp, dp, 12 // pp // dp) for pp in divisors(12) for dp in divisors(12 // pp) if pp <= 6 and 24 % dp == 0
    }
    assert sizes == expected
    orders = {mesh.names for mesh in meshes if mesh.axis("pp") * mesh.axis("dp") == 6 and len(mesh.names) == 3}
    assert len(orders) == math.factorial(3)
    assert {plan.microbatches for plan in plans if "dp=3" in plan.mesh} == set(divisors(8))


def test_experts_take_ranks_of_every_axis_but_the_pipeline() -> None:
    """Every divisor of the experts' number that the axes' ranks have, once for each set of axes that gives it."""
    few = "zero=1,recompute=none,schedule=1f1b,microbatches=1"
    space = Space(ranks=24, batch=24, calls=2, experts=12, nodes=3, near=8, fixed=parse_fixed(few))
    found = {(plan.mesh, plan.experts) for plan in space.plans()}
    for mesh in {mesh for mesh, _ in found}:
        names = [name for name, size in Mesh.parse(mesh).axes if name != "pp"]
        ways = {
            Mesh.parse(mesh).with_experts(f"ep={count}@{','.join(over)}")
            for number in range(1, len(names) + 1)
            for over in itertools.combinations(names, number)
            for count in divisors(12)
            if math.prod(Mesh.parse(mesh).axis(name) for name in over) % count == 0
            and count % math.prod(Mesh.parse(mesh).axis(name) for name in over[1:]) == 0
            and count > math.prod(Mesh.parse(mesh).axis(name) for name in over[1:])
        }
        taken = [experts for each, experts in found if each == mesh and experts is not None]
        assert {Mesh.parse(mesh).with_experts(text) for text in taken} == ways
        assert len(taken) == len(ways) and (mesh, None) in found
    assert not any(plan.experts for plan in replace(space, experts=0).plans())


_EVERY = 7  # a plan's neighbours differ in one decision: every seventh plan has each kind of them


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "zero=1@2|3@node|2",
            "zero=1|3@2,nodes=4|none,bucket=5MB|25MB",
            "recompute=full/none|none,stage_calls=3-5|fitted|balanced",
        ),
        "schedule=interleaved|zbv,zero=2|3",
        *("order=dp-pp-tp|tp-dp-pp", "tp=2,recompute=full", "ep=2|4,experts=dp-tp"),
    ],
)
def test_neighbours_are_plans_of_the_space(text: str) -> None:
    space = Space(
        ranks=8, batch=8, calls=8, nodes=2, near=4, experts=4 * ("ep" in text.split("=")), fixed=parse_fixed(text)
    )
    plans = dict.fromkeys(space.plans())
    assert all(plans.keys() >= {*space.neighbours(plan)} for plan in [*plans][::_EVERY])


def test_plans_that_compile_alike_are_one() -> None:
    plans = list(Space(ranks=2, batch=2, calls=4).plans())
    alone = [plan for plan in plans if plan.mesh == "tp=2"]
    assert {plan.zero for plan in alone} == {0}
    assert {plan.schedule for plan in plans if "pp" not in plan.mesh} == {"1f1b"}
    assert not any(plan.mesh == "tp=1,dp=2" for plan in plans)


@pytest.mark.parametrize(
    "text",
    [
        "tp",
        "tp=",
        "tp=0",
        "tp=4|",
        "sp=2",
        "tp=2,tp=4",
        "zero=4",
        "order=dp-dp",
        "recompute=x",
        "experts=pp",
        "zero=3@1",
        "zero=0@2",
        "zero=3@dp",
        "nodes=0",
        "bucket=5",
        "stage_calls=4",
        "stage_calls=4-0",
        "recompute=full/x",
    ],
)
def test_decisions_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(PartcError) as caught:
        parse_fixed(text)
    assert caught.value.code == "P0811"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("tp", "'tp' is not NAME=VALUE"),
        ("foo=3", "names 'foo', which is not a decision"),
        ("tp=2,tp=4", "'tp=4' fixes tp a second time"),
        ("tp=2|x", "has 'x', which is not a value of tp"),
    ],
)
def test_refusals_of_decisions_name_the_fault(text: str, fault: str) -> None:
    with pytest.raises(PartcError, match=re.escape(fault)):
        parse_fixed(text)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["plan", GPT, *arguments])
    return code, capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out = run(capsys, *arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    return found | {"exit": code}


SMALL = ("--cluster", "4xH100-80GB", "--batch", "8", "--fix", "recompute=none,zero=0|1,cp=1", "--max-seconds", "300")


@pytest.mark.slow
def test_the_plan_compiles(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    found = document(capsys, *SMALL, "-o", str(file))
    assert found["exit"] == 0 and found["gap"] == 0 and found["complete"]
    best, *others = found["plans"]
    assert all(best["step_seconds"] <= other["step_seconds"] for other in others if other["fits"])
    assert all(other["why"] for other in others)
    assert best["plan"] == found["plan"] == read(file).document()
    assert main(["compile", GPT, "--plan", str(file), "--kernels", "aten", "-o", str(tmp_path / "x")]) == 2
    assert "P0815" in capsys.readouterr().err
    plan = json.loads(file.read_text())
    file.write_text(json.dumps(plan | {"kernels": "aten", "precision": "fp64"}))
    assert main(["compile", GPT, "--plan", str(file), "-o", str(tmp_path / "build")]) == 0
    assert json.loads((tmp_path / "build" / "plan.json").read_text())["mesh"] == found["plan"]["mesh"]
    assert main(["verify", str(tmp_path / "build"), "--virtual", "--steps", "1"]) == 0


@pytest.mark.slow
def test_a_plan_with_experts_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file, build = str(ROUTED), tmp_path / "plan.json", tmp_path / "build"
    given = ("--cluster", "4xCPU", "--precision", "fp64", "--batch", "8", "--fix")
    few = "cp=1,microbatches=2,zero=1,recompute=none,schedule=1f1b"
    assert main(["plan", model, *given, f"ep=4,experts=dp-tp,{few}", "--json", "-o", str(file)]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["experts"] in ("ep=4@dp,tp", "ep=4@tp,dp")
    assert main(["compile", model, "--plan", str(file), "-o", str(build)]) == 0
    assert main(["verify", str(build), "--virtual", "--steps", "1"]) == 0
    auto = ["compile", model, "--mesh", "auto", *given, f"ep=2,pp=2,{few}", "-o", str(tmp_path / "auto")]
    assert main(auto) == 0
    assert Mesh.parse(json.loads((tmp_path / "auto" / "plan.json").read_text())["mesh"]).axis("ep") == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((*SMALL, "--memory", "1MB"), "P0813"),
        (("--cluster", "4xH100-80GB", "--fix", "tp=3"), "P0812"),
        (("--cluster", "4xH100-80GB", "--fix", "tp=x"), "P0811"),
        (("--cluster", "4xH100-80GB", "--ranks", "8"), "P0803"),
        (("--cluster", "4xH100-80GB", "--memory", "much"), "P0004"),
        (("--cluster", "4xH100-80GB", "--global-batch", "many"), "P0814"),
        (("--cluster", "4xH100-80GB", "--global-batch", "1000 tokens"), "P0814"),
        (("--cluster", "4xH100-80GB", "--global-batch", "16", "--batch", "8"), "P0814"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: str) -> None:
    found = document(capsys, *arguments)
    assert (found["exit"], found["error"]["code"] if "error" in found else found.get("code")) == (2, code)


@pytest.fixture(scope="module")
def small() -> Planner:
    cluster = preset("8xH100-80GB")
    options = {"batch": 16, "size": "1b", "depth": 2, "seq": 2048}
    limit = cluster.device.memory
    return Planner(Request(model=GPT, cluster=cluster, ranks=8, limit=limit, options=options, fixed={"cp": ("1",)}))


def test_planners_with_one_simulator_have_the_constants_of_their_own_clusters() -> None:
    def request(cluster: str) -> Request:
        found = preset(cluster)
        return Request(
            model=GPT, cluster=found, ranks=2, limit=found.device.memory, fixed=parse_fixed("tp=2,microbatches=1")
        )

    first, alone = Planner(request("2xRTX4090-24GB")), Planner(request("2xH100-80GB"))
    plan = next(alone.space.plans())
    assert Planner(request("2xH100-80GB"), first.simulator).predicted(plan) == alone.predicted(plan)


def test_plans_have_the_form_of_gradient_sums_that_is_asked_for() -> None:
    """Bounds stay below simulated steps whose gradients are compressed between nodes, which takes less time."""
    cluster = preset("2x1xRTX4090-24GB")
    options: dict[str, Any] = {"batch": 2, "width": 1024, "hidden": 4096, "depth": 1}
    whole = Request(
        model=str(Path(GPT).with_name("mlp.py")), cluster=cluster, ranks=2, limit=cluster.device.memory, options=options,
        fixed=parse_fixed("dp=2,microbatches=1,recompute=none,zero=0|2"),
    )  # fmt: skip
    planner, coded = Planner(whole), Planner(replace(whole, compress_grads="int8", bucket="1MB"))
    for plan, other in zip(coded.space.plans(), planner.space.plans(), strict=True):
        assert (plan.compress_grads, plan.bucket) == ("int8", "1MB") and "--compress-grads int8" in plan.flags
        found = coded.predicted(plan)
        assert Played(plan=plan, bound=coded.bounds.of(plan), prediction=found).holds
        assert found.step_seconds < 0.8 * planner.predicted(other).step_seconds


@pytest.mark.slow
def test_plans_that_are_recorded_leave_the_host_out() -> None:
    """Small layers on a GPU wait for the host. With CUDA graphs they do not, and ranks of pipelines and of cut experts
    cannot be recorded.
    """
    cluster = preset("4xH100-80GB")
    request = Request(
        model=GPT, cluster=cluster, ranks=4, limit=cluster.device.memory, options={"batch": 8},
        fixed=parse_fixed("recompute=none,zero=0|2"),
    )  # fmt: skip
    issued, recorded = Planner(request), Planner(replace(request, cuda_graphs=True))
    plans = [*recorded.space.plans()]
    alone = [plan for plan in issued.space.plans() if sizes_of(plan)["pp"] == 1]
    assert [replace(plan, cuda_graphs=False) for plan in plans] == alone
    for plan, other in zip(plans, alone, strict=True):
        assert plan.flags.split().count("--cuda-graphs") == 1 and plan.compile_options().cuda_graphs
        found = recorded.predicted(plan)
        assert Played(plan=plan, bound=recorded.bounds.of(plan), prediction=found).holds
        assert found.step_seconds < 0.5 * issued.predicted(other).step_seconds


def test_a_plan_that_cannot_be_recorded_is_refused() -> None:
    def refused(cluster: str, **plan: Any) -> PartcError:
        found = preset(cluster)
        with pytest.raises(PartcError) as error:
            Simulator(GPT, found, calibration(found)).predict(ParallelPlan(cuda_graphs=True, **plan))
        assert error.value.code == "P0419"
        return error.value

    assert "is not a GPU" in refused("2xCPU", mesh="dp=2").cause
    assert "pipeline" in refused("2xH100-80GB", mesh="pp=2", microbatches=2).cause
    with pytest.raises(PartcError, match="is not a GPU") as error:
        Request.checked(GPT, "2xCPU", cuda_graphs=True)
    assert error.value.code == "P0419"
    cluster = preset("2xH100-80GB")
    request = Request(model=GPT, cluster=cluster, ranks=2, limit=1, cuda_graphs=True, fixed=parse_fixed("pp=2"))
    with pytest.raises(PartcError, match="--cuda-graphs, --fix pp=2") as error:
        [*Planner(request).space.plans()]
    assert error.value.code == "P0812"


@pytest.mark.slow
def test_tables_agree_with_the_simulation_of_each_plan(small: Planner) -> None:
    """A plan alone is simulated with regions of its own, and its bound stays close below that."""
    every = [*small.plans()]
    usual = [plan for plan in every if not plan.span and plan.stage_calls is None and "/" not in plan.recompute]
    plans = random.Random(5).sample(usual, 8)
    simulator = Simulator(GPT, small.request.cluster, calibration(small.request.cluster))
    ratios = []
    for plan in plans:
        bound, exact = small.bounds.of(plan), simulator.predict(plan)
        assert Played(plan=plan, bound=bound, prediction=small.predicted(plan)).holds
        assert bound.seconds <= 1.01 * exact.step_seconds
        assert bound.bytes == pytest.approx(exact.memory_bytes, rel=0.01)
        ratios.append(exact.step_seconds / bound.seconds)
    assert sorted(ratios)[len(ratios) // 2] < 1.03
    assert max(ratios) < 1.25
    for plan in random.Random(5).sample([plan for plan in every if plan not in {*usual}], 4):
        bound, exact = small.bounds.of(plan), simulator.predict(plan)
        assert exact.step_seconds / 1.25 < bound.seconds <= 1.01 * exact.step_seconds
        assert bound.bytes == pytest.approx(exact.memory_bytes, rel=0.01)


@pytest.mark.parametrize("decided", ["pp=2,tp=4,microbatches=1|4", "dp=2|8,microbatches=2,zero=1|3"])
def test_the_prediction_of_the_best_plan_is_that_of_a_simulation_alone(small: Planner, decided: str) -> None:
    request = replace(small.request, fixed=parse_fixed(f"{decided},schedule=1f1b"))
    best = Planner(request, small.simulator).choice().best
    assert best.prediction == Simulator(GPT, request.cluster, calibration(request.cluster)).predict(best.plan)


@pytest.mark.parametrize(("memory", "calls", "recompute"), [("18GB", "5,3", "none"), ("15GB", "5,3", "full/none")])
def test_fitted_stages_are_predicted_as_by_a_simulation_alone(memory: str, calls: str, recompute: str) -> None:
    """The first stage holds the values of two microbatches, so that it recomputes where memory is short."""
    options = {"batch": 16, "size": "1b", "depth": 6, "seq": 2048}
    decided = "pp=2,microbatches=4,schedule=1f1b,recompute=none|full"
    request = Request.checked(GPT, "2xH100-80GB", memory=memory, fix=decided, options=options)
    best = Planner(request).choice().best
    assert (best.plan.stage_calls, best.plan.recompute) == (calls, recompute) and best.holds
    assert best.prediction == Simulator(GPT, request.cluster, calibration(request.cluster)).predict(best.plan)
    even = Planner(replace(request, fixed=parse_fixed(f"{decided},stage_calls=balanced"))).choice()
    assert best.seconds < 0.9 * even.best.seconds


@pytest.mark.parametrize("seed", range(40))
def test_fitted_stages_are_those_of_enumeration(seed: int) -> None:
    chance = random.Random(seed)
    calls, ways = chance.randint(2, 7), chance.randint(1, 3)
    stages = chance.randint(1, min(calls, 4))
    seconds = [[chance.choice((1, 2, 2.5, 4)) * (1 + 0.3 * way) for _ in range(calls)] for way in range(ways)]
    saved = [[chance.choice((1, 2, 3)) / (1 + way) for _ in range(calls)] for way in range(ways)]
    inside = [[chance.choice((0, 1, 2)) for _ in range(calls)] for _ in range(ways)]
    held = [chance.choice((1, 2)) for _ in range(calls)]
    places = [place for place in range(calls + 1) if place in (0, calls) or chance.random() < 0.8]
    flights, room = [stages - stage for stage in range(stages)], chance.choice((8, 12, 20))

    def sums(values: Sequence[float]) -> Any:
        return np.array([*itertools.accumulate(values, initial=0.0)])

    needs = StageNeeds(
        held=sums(held),
        saved=np.stack([*map(sums, saved)]),
        inside=np.array(inside),
        cuts=[(0, 1)] * stages,
        at=[[stage] for stage in range(stages)],
        rows=[[[(stage, flight)]] for stage, flight in enumerate(flights)],
        room=room,
    )
    allowed = needs.allowed()
    found = fit(cuttable(range_sums(np.stack([*map(sums, seconds)])), places), allowed)
    assert fits(allowed, places) == (found is not None)

    possible = []
    for ends in itertools.combinations(places[1:-1], stages - 1):
        cuts = [*itertools.pairwise((0, *ends, calls))]
        for taken in itertools.product(range(ways), repeat=stages):
            each = [*zip(flights, taken, cuts, strict=True)]
            bytes = [
                sum(held[a:b]) + flight * sum(saved[way][a:b]) + max(inside[way][a:b]) for flight, way, (a, b) in each
            ]
            if max(bytes) <= room:
                takes = [sum(seconds[way][a:b]) for _, way, (a, b) in each]
                possible.append((max(takes), sum(takes)))
    assert (found is None) == (not possible)
    if found is not None:
        starts = (0, *(end for end, _ in found))
        takes = [sum(seconds[way][start:end]) for start, (end, way) in zip(starts, found, strict=False)]
        assert (max(takes), sum(takes)) == pytest.approx(min(possible))


@pytest.mark.parametrize("seed", range(20))
def test_several_stages_of_a_rank_recompute_as_little_as_their_shares_of_its_room_allow(seed: int) -> None:
    chance = random.Random(seed)
    ways, each, ranks = chance.randint(1, 3), chance.randint(2, 3), chance.randint(1, 3)
    stages = each * ranks
    seconds = [[chance.choice((1, 2, 4)) * (1 + 0.3 * way) for _ in range(stages)] for way in range(ways)]
    saved = [[chance.choice((1, 2, 3)) / (1 + way) for _ in range(stages)] for way in range(ways)]
    held, room = [chance.choice((0, 1)) for _ in range(stages)], chance.choice((6, 9, 12))
    at = [[*range(rank, stages, ranks)] for rank in range(ranks)]
    flights = {stage: chance.randint(1, 4) for stage in range(stages)}
    needs = StageNeeds(
        held=np.cumsum([0, *held]),
        saved=np.cumsum([[0, *row] for row in saved], axis=1),
        inside=np.ones((ways, stages)),
        cuts=[*itertools.pairwise(range(stages + 1))],
        at=at,
        rows=[[tuple((stage, flights[stage]) for stage in here), ((here[0], 1),)] for here in at],
        room=room,
    )
    allowed = needs.allowed_ways()

    def bytes(stage: int, way: int) -> float:
        return 1 + held[stage] + flights[stage] * saved[way][stage]

    expected: list[int] = []
    for stage in range(stages):
        share = room * bytes(stage, 0) / sum(bytes(other, 0) for other in at[stage % ranks])
        possible = [way for way in range(ways) if bytes(stage, way) <= share]
        assert [*np.flatnonzero(allowed[:, stage])] == possible
        expected += possible[:1]
    assert fit_ways(np.array(seconds), allowed) == (expected if len(expected) == stages else None)


ROUTES = {"batch": 8, "width": 1024, "hidden": 48, "chosen": 2, "depth": 2, "experts": 6, "seq": 512}


@pytest.mark.slow
def test_predictions_do_not_depend_on_the_plans_before() -> None:
    """Layouts depend on the sizes of the batch's parts, and on the number of stages."""
    cluster = preset("8xH100-80GB")

    def simulator() -> Simulator:
        return Simulator(str(ROUTED), cluster, calibration(cluster))

    shared = simulator()
    for mesh, experts in (("cp=2,pp=2", None), ("tp=2", "ep=2@tp"), ("tp=2,pp=4", None)):
        for count in (8, 2):
            plan = ParallelPlan(mesh=mesh, experts=experts, microbatches=count, kernels="triton", options=ROUTES)
            assert shared.predict(plan) == simulator().predict(plan)


@pytest.mark.slow
def test_the_best_plan_of_a_large_space_is_predicted_with_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partc.planner.planning.OWN_SIZES", 0)
    cluster = preset("2xH100-80GB")
    decided = parse_fixed("tp=2,microbatches=8,ep=2,recompute=none|full")
    planner = Planner(
        Request(model=str(ROUTED), cluster=cluster, ranks=2, limit=cluster.device.memory, options=ROUTES, fixed=decided)
    )
    outcome = planner.choice().outcome
    best = outcome.best
    assert best is not None and best.prediction != planner.predicted(best.plan)
    assert best.prediction == Simulator(str(ROUTED), cluster, calibration(cluster)).predict(best.plan)
    assert best.holds and outcome.bound <= best.seconds

    def predict(simulator: Simulator, plan: ParallelPlan, *, everywhere: bool = False) -> Prediction:
        if plan == best.plan and not everywhere:
            raise PartcError("P0402", "nor is one that does not compile")
        return known(simulator, plan, everywhere=everywhere)

    known = Simulator.predict
    monkeypatch.setattr(Simulator, "predict", predict)
    outcome = Planner(planner.request).choice().outcome
    assert outcome.best is not None and outcome.best.plan != best.plan
    assert any(played.plan == best.plan and played.error for played in outcome.others)


def test_only_the_best_plan_of_a_search_is_predicted_with_its_own_sizes(small: Planner) -> None:
    """The best plan is final once no other plan can be quicker; a worse prediction makes the next plan the best."""
    quick, worse, slow = itertools.islice(small.space.plans(), 3)
    shared, refined = {quick: 2.0, worse: 1.0, slow: 3.0}, list[ParallelPlan]()
    predictions = {plan: replace(small.predicted(plan), step_seconds=seconds) for plan, seconds in shared.items()}

    def final(plan: ParallelPlan) -> Prediction | Failure:
        refined.append(plan)
        return replace(predictions[plan], step_seconds=4.0) if plan == worse else predictions[plan]

    found = search([], predictions.__getitem__, small.bounds, limit=1 << 60, starts=[slow, quick, worse], refined=final)
    assert refined == [worse, quick] and found.best is not None and found.best.plan == quick
    assert [played.plan for played in found.fitting] == [quick, slow, worse]


def test_a_search_ends_with_a_plan_however_little_time_it_has() -> None:
    choice = Planner(Request.checked(GPT, "2xH100-80GB", max_seconds=1e-9)).choice()
    assert not choice.outcome.complete and 0 < choice.outcome.gap < 1
    assert choice.best.bytes <= choice.request.limit


@pytest.mark.slow
def test_a_search_without_a_result_says_why_its_plans_do_not_compile() -> None:
    request = Request.checked(
        str(ROUTED.with_name("contrastive.py")), "2xCPU", precision="fp32", fix="loss_chunks=2", max_seconds=1e-9
    )
    choice = Planner(request).choice()
    assert choice.outcome.best is None and not choice.outcome.complete
    assert "those that were tried do not compile: P0418" in choice.nothing_fits().cause


@pytest.mark.parametrize(
    ("model", "bodies"),
    [(GPT, 1), (str(ROUTED.with_name("packed.py")), 3), (str(ROUTED.with_name("contrastive.py")), 4)],
)
def test_regions_are_lowered_once_for_all_parts_of_the_batch(model: str, bodies: int) -> None:
    """Also for whole batches, unless the model has further calls where microbatches cut its batch, or couples its
    examples.
    """
    cluster = preset("4xH100-80GB")
    shared, alone = (Simulator(model, cluster, calibration(cluster)) for _ in range(2))
    found = set()
    for mesh, count in (("dp=2", 2), ("dp=2", 1), ("pp=2", 1), ("pp=2", 4)):
        plan = ParallelPlan(mesh=mesh, microbatches=count)
        found.add(shared.differentiated(plan)[0])
        assert shared.predict(plan, everywhere=True) == alone.predict(plan)
    assert len(found) == bodies


@pytest.mark.parametrize(
    ("model", "options", "plans"),
    [
        (GPT, {"size": "1b", "depth": 2}, (("dp=4,tp=2", None), ("dp=2,tp=4", None))),
        (
            str(ROUTED),
            {"experts": 8, "batch": 32},
            (("dp=8", "ep=2@dp"), ("dp=8", "ep=4@dp"), ("pp=2,dp=4", "ep=4@dp")),
        ),
    ],
)
def test_regions_are_lowered_once_for_all_widths_with_equal_layouts(
    model: str, options: dict[str, str | int], plans: tuple[tuple[str, str | None], ...]
) -> None:
    cluster = preset("8xH100-80GB")
    constants = calibration(cluster)
    shared = Simulator(model, cluster, constants)
    found = set()
    for mesh, experts in plans:
        plan = ParallelPlan(mesh=mesh, experts=experts, microbatches=2, kernels="triton", options=options)
        found.add(shared.differentiated(plan)[0])
        near, alone = (each.predict(plan, everywhere=True) for each in (shared, Simulator(model, cluster, constants)))
        # Collectives that start early pass other operations where sizes differ.
        assert near.step_seconds == pytest.approx(alone.step_seconds, rel=5e-3)
        assert near.memory_bytes == pytest.approx(alone.memory_bytes, rel=1e-3)
    assert len(found) == 1


def test_layouts_are_chosen_once_for_all_numbers_of_pipeline_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has more than a hundredth of the weights of every stage, so that it is cut on each mesh."""
    ran: list[str] = []
    apply = passes.apply_pass
    monkeypatch.setattr(passes, "apply_pass", lambda entry, *given: ran.append(entry.name) or apply(entry, *given))
    cluster = preset("2x8xH100-80GB")
    simulator = Simulator(GPT, cluster, calibration(cluster))
    for mesh, programs in (("dp=2,tp=2", 1), ("pp=2,dp=2,tp=2", 1), ("pp=4,dp=2,tp=2", 1), ("dp=2,tp=4", 2)):
        simulator.differentiated(ParallelPlan(mesh=mesh, microbatches=2))
        assert ran.count("annotate") == programs, mesh


@pytest.mark.slow
def test_a_plan_with_one_microbatch_is_predicted_and_bounded_as_it_is_simulated_alone() -> None:
    """Its layouts may differ from those of several microbatches, whose derivatives it shares where they do not."""
    cluster = preset("8xH100-80GB")
    decided = parse_fixed("pp=2,tp=4,ep=4,microbatches=1|2,schedule=dualpipe-v,recompute=none,stage_calls=balanced")
    request = Request(
        model=str(ROUTED), cluster=cluster, ranks=8, limit=cluster.device.memory, fixed=decided, global_batch="16"
    )
    planner = Planner(request)
    *_, several, one = sorted(planner.space.plans(), key=lambda plan: -plan.microbatches)
    planner.bounds.of(several)
    alone = Simulator(request.model, cluster, calibration(cluster)).predict(one)
    assert one.microbatches == 1 and planner.predicted(one) == alone
    assert Played(plan=one, bound=planner.bounds.of(one), prediction=alone).holds


def test_a_plan_that_fits_is_looked_for_until_the_time_is_up(small: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.chain([0.0], itertools.repeat(20.0))  # half of the time has passed before the first plan
    monkeypatch.setattr("partc.planner.search.time.perf_counter", lambda: next(clock))
    *others, last = plans = list(itertools.islice(small.space.plans(), 3))
    known = {last: small.predicted(last)} | dict.fromkeys(others, Failure(error="it does not compile"))
    found = search([], known.__getitem__, small.bounds, limit=1 << 60, starts=plans, max_seconds=40.0)
    assert found.best is not None and found.best.plan == last


def test_the_time_limit_ends_a_prediction_that_is_under_way(small: Planner) -> None:
    quick, endless, *_ = small.space.plans()
    family = next(small.space.families())

    def simulated(plan: ParallelPlan) -> Prediction | Failure:
        while plan == endless:
            small.bounds.simple(plan)
        return small.predicted(plan)

    small.predicted(quick)
    known, starts = small.bounds, [quick, endless]
    found = search([family], simulated, known, limit=1 << 60, starts=starts, max_seconds=1.0, patient=True)
    assert found.best is not None and found.best.plan == quick and not found.complete
    assert found.bound == pytest.approx(known.simple(family.least).seconds)


def test_the_time_limit_leaves_the_code_of_others_and_their_timers_alone() -> None:
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 60.0)
    try:
        with pytest.raises(TimeUpError), time_limit(float("inf")), time_limit(0.02):
            end = time.perf_counter() + 0.1
            while time.perf_counter() < end:  # this module is none of partc's
                pass
            while True:
                parse_fixed("tp=4")
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
        assert 50 < signal.setitimer(signal.ITIMER_REAL, 0)[0] < 60
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.perf_counter() >= end


def test_the_first_plan_is_the_customary_one(small: Planner) -> None:
    """Nothing binds a small model on one node: no pipeline, and parameters held whole."""
    first = next(small.starting_plans())
    assert sizes_of(first)["pp"] == 1 and first.level < 2 and first.schedule == "1f1b"


def test_estimates_of_experts_count_all_ranks_of_an_axis() -> None:
    """Sequences are gathered over all of tp, also where experts take a piece; states of experts are cut by spans."""
    mixture = Planner(Request(model=str(ROUTED), cluster=preset("2x8xH100-80GB"), ranks=16, limit=80 << 30))
    whole = ParallelPlan(mesh="dp=4,tp=4", zero=1, precision="bf16", options={})
    piece = replace(whole, experts="ep=2@tp")
    assert mixture.estimates.tensor_seconds(piece) == pytest.approx(mixture.estimates.tensor_seconds(whole))
    spread, near = (mixture.estimates.bytes(replace(whole, zero=zero)) for zero in ("3", "3@2"))
    assert spread < near


def test_the_first_bound_on_memory_has_the_largest_product(small: Planner) -> None:
    """The logits, which the ranks of a stage hold between them."""
    (plan,) = (
        each
        for each in small.space.plans()
        if (each.mesh, each.microbatches, each.zero, each.recompute) == ("pp=2,dp=4", 1, 3, "full")
        and (each.schedule, each.virtual_stages, each.loss_chunks) == ("1f1b", None, 1)
    )
    bound, logits = small.bounds.simple(plan), 16 * 2048 * 128256 * 2 // 4
    assert logits <= bound.bytes <= small.predicted(plan).memory_bytes
    assert small.bounds.simple(replace(plan, microbatches=2)).bytes < bound.bytes


def test_plans_near_the_best_one_that_have_its_regions_are_tried_first(small: Planner) -> None:
    plan = next(each for each in small.space.plans() if each.mesh == "pp=2,dp=2,tp=2" and each.microbatches == 4)

    def lowered_anew(each: ParallelPlan) -> bool:
        return each.recompute != plan.recompute or inner_axes(each) != inner_axes(plan) or each.microbatches == 1

    near = small.nearest(plan)
    assert not any(map(lowered_anew, near[:8])) and any(map(lowered_anew, near[8:]))


def test_exchanges_slow_no_call_that_waits_for_its_host() -> None:
    """In short calls the host takes longer than the device, and gradients are scattered meanwhile."""
    options = {"batch": 12, "width": 1024, "hidden": 4096, "chosen": 2, "depth": 3, "experts": 4, "seq": 16}
    fix = "cp=2,ep=1,zero=2,recompute=selective,microbatches=6"
    planner = Planner(Request.checked(str(ROUTED), "2xA100-40GB", options=options, fix=fix))
    (plan,) = planner.plans()
    assert Played(plan=plan, bound=planner.bounds.of(plan), prediction=planner.predicted(plan)).holds


@pytest.mark.slow
@pytest.mark.parametrize(
    "fix",
    [
        "pp=2,dp=2,microbatches=2|4,recompute=none,zero=0|1,schedule=1f1b",
        # Kernels keep more for the gradients of weights than the operations did for the whole backward pass.
        "pp=4,microbatches=1,recompute=none,zero=0,schedule=interleaved,virtual_stages=4,stage_calls=balanced",
    ],
)
def test_bounds_of_models_with_batch_norms_are_near_their_steps(fix: str) -> None:
    """Each of their microbatches is a batch of its own."""
    planner = Planner(Request.checked(str(ROUTED.with_name("unet.py")), "4xA100-40GB", global_batch="8", fix=fix))
    plans = [*planner.plans()]
    for plan in plans:
        bound, found = planner.bounds.of(plan), planner.predicted(plan)
        assert Played(plan=plan, bound=bound, prediction=found).holds
        assert bound.seconds > 0.8 * found.step_seconds


def test_the_bound_of_a_mesh_counts_the_time_in_which_its_pipeline_fills(small: Planner) -> None:
    """A rank waits longer for the first microbatch, the fewer there are."""
    wanted = parse_fixed("pp=4,dp=2,recompute=none,schedule=1f1b|zero-bubble,virtual_stages=1,zero=0")
    family, _ = replace(small.space, fixed=wanted).families()
    known = small.bounds.simple(family.least)
    bounds = {
        count: small.bounds.of_family(replace(family, microbatches=(count,)), known).seconds
        for count in family.microbatches
    }
    assert bounds[1] > 1.1 * bounds[8]
    assert small.bounds.of_family(family, known).seconds == min(bounds.values())
    for plan in replace(family, microbatches=(1, 8)).plans():
        assert bounds[plan.microbatches] <= small.bounds.wide(plan, known).seconds <= small.predicted(plan).step_seconds


def test_orders_of_axes_share_a_bound_without_collectives() -> None:
    cluster = preset("2x4xH100-80GB")
    options = {"batch": 16, "size": "1b", "depth": 3, "seq": 512}
    decided = parse_fixed("pp=2,tp=2,dp=2,recompute=none,stage_calls=balanced,microbatches=2")
    limit = cluster.device.memory
    planner = Planner(Request(model=GPT, cluster=cluster, ranks=8, limit=limit, options=options, fixed=decided))
    families = [*planner.space.families()]
    shared, own = set(), []
    for family in families:
        known = planner.bounds.simple(family.least)
        first = planner.bounds.of_all_orders(family, known)
        own.append(planner.bounds.of_family(family, known).seconds)
        assert known.seconds < first.seconds <= own[-1]
        shared.add(first.seconds)
    assert len(families) == 6 and len(shared) == 1 and max(own) > 1.05 * min(own)


def test_the_common_bound_of_orders_is_above_no_plan_whose_layouts_depend_on_the_order() -> None:
    options: dict[str, bool | int | float | str] = {"batch": 8, "size": "tiny", "depth": 3, "seq": 2048}
    fix = "tp=3,cp=2,recompute=full,order=tp-dp-cp-pp|cp-tp-pp-dp,zero=1,microbatches=1"
    planner = Planner(Request.checked(GPT, "1x6xV100-16GB", options=options, fix=fix))
    for family in planner.space.families():
        common = planner.bounds.of_all_orders(family, planner.bounds.simple(family.least)).seconds
        assert all(common <= planner.predicted(plan).step_seconds for plan in family.plans())


def test_calls_with_attention_over_a_ring_take_the_time_of_the_ring_s_links() -> None:
    """In one order the ring lies inside a node, in the other one between nodes; the layouts are the same."""
    options: dict[str, bool | int | float | str] = {"batch": 8, "size": "tiny", "depth": 2, "seq": 16384}
    tables = Planner(Request.checked(GPT, "2x4xCPU", options=options)).bounds.tables
    plans = [ParallelPlan(mesh=mesh, kernels="aten", options=options) for mesh in ("pp=2,cp=2,tp=2", "cp=2,tp=2,pp=2")]
    near, far = map(tables.calls, plans)
    assert near is not None and far is not None and far.forward[-1] > near.forward[-1]
    assert far == tables.on(tables.rates).calls(plans[1])


def test_the_bound_of_a_mesh_needs_one_program_for_all_numbers_of_microbatches(
    small: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    differentiated = small.simulator.differentiated

    def noted(plan: ParallelPlan, **given: bool) -> Any:
        asked.append(plan.microbatches)
        return differentiated(plan, **given)

    monkeypatch.setattr(small.simulator, "differentiated", noted)
    planner = Planner(small.request, small.simulator)
    wanted = parse_fixed("pp=2,dp=2,tp=2,recompute=full,schedule=interleaved|1f1b,stage_calls=balanced")
    (family,) = replace(planner.space, fixed=wanted).families()
    assert set(family.microbatches) == {1, 2, 4, 8}
    planner.bounds.of_family(family, planner.bounds.simple(family.least))
    assert len({count for count in asked if count > 1}) == 1


def test_links_do_not_change_the_seconds_of_calls_whose_collectives_take_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neighbours along cp are two or four in a node."""
    tables = Planner(Request.checked(GPT, "4x8xH100-80GB")).bounds.linkless
    near, far = (ParallelPlan(mesh=mesh, microbatches=2) for mesh in ("pp=2,cp=8,tp=2", "cp=8,pp=2,tp=2"))
    found = tables.calls_at_once(near)
    monkeypatch.setattr("partc.planner.tables.graph_cost", None)
    assert found is not None and tables.calls_at_once(far) == found


def test_seconds_of_an_operation_are_computed_once_for_equal_local_shapes(
    small: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = small.simulator.annotated(small.space.base).regions[-1]
    op = next(op for op in region.forward.ops if op.name == "linear")
    rates, types = replace(small.simulator.rates), region.types(region.forward)
    first = rates.operation(op, types, {})
    monkeypatch.setattr("partc.cost.rates.ClusterRates.device_seconds", None)
    assert rates.operation(replace(op, source=None), types, {}) == first > 0


def test_zero_cuts_the_parameters_of_each_kind_of_call_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    apply = passes.apply_pass
    monkeypatch.setattr(
        passes,
        "apply_pass",
        lambda entry, program, *given: (
            counts.append(len(program.parameters) if entry.name == "zero" else 0) or apply(entry, program, *given)
        ),
    )
    most = []
    for depth in (4, 8):
        planner = Planner(Request.checked(GPT, "8xH100-80GB", options={"depth": depth}))
        tables, counts[:] = planner.bounds.tables, []
        shares = tables.shares(ParallelPlan(mesh="dp=8", zero=3, options={"depth": depth}))
        assert shares is not None and len(shares.held) == depth + 3  # the embedding, the head, and the sum of nothing
        most.append(max(counts))
    assert most[0] == most[1] > 0


def test_orders_of_axes_share_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plans to be tried are found in no time in spaces of many orders."""
    request = Request(model=GPT, cluster=preset("2x4xH100-80GB"), ranks=8, limit=80 << 30, options={"batch": 8})
    planner = Planner(request)
    wanted = parse_fixed("pp=2,dp=2,tp=2,recompute=none,stage_calls=balanced")
    families = [*replace(planner.space, fixed=wanted).families()]
    found = planner.promise(families[0])
    monkeypatch.setattr(Estimates, "seconds", None)
    assert len(families) == 6 and {*map(planner.promise, families)} == {found}


@pytest.mark.slow
def test_the_bound_on_memory_depends_on_the_order_of_axes_that_cut_sequences() -> None:
    few = "zero=3,recompute=full,microbatches=12,schedule=zero-bubble,virtual_stages=1"
    given = parse_fixed(f"pp=2,cp=2,tp=2,{few},order=pp-cp-tp|pp-tp-cp")
    options: dict[str, Any] = {"batch": 12, "size": "1b", "depth": 5, "seq": 64}
    planner = Planner(Request(model=GPT, cluster=preset("8xCPU"), ranks=8, limit=1 << 40, options=options, fixed=given))
    plans = list(planner.plans())
    predicted = {plan: planner.predicted(plan).memory_bytes for plan in plans}
    assert len({*predicted.values()}) == len(plans) == 2
    for plan in sorted(plans, key=lambda plan: -predicted[plan]):
        assert planner.bounds.of(plan).bytes <= predicted[plan]


def test_a_search_may_be_restricted_to_parts_over_nodes() -> None:
    given = parse_fixed("zero=3@node,dp=4,microbatches=1,recompute=none")
    cluster, options = preset("2x2xA100-40GB"), {"batch": 4}
    planner = Planner(Request(model=GPT, cluster=cluster, ranks=4, limit=1 << 40, options=options, fixed=given))
    assert planner.choice().best.plan.zero == "3@2"


def test_parts_over_neighbours_are_plans() -> None:
    """Spans are numbers of ranks that divide dp, and those in a node, where dp spans nodes."""
    given = parse_fixed("recompute=none,microbatches=1,pp=1,zero=0|3@node")
    space = Space(ranks=16, batch=32, calls=2, nodes=4, near=4, fixed=given)
    spans = {(plan.mesh, str(plan.zero)) for plan in space.plans() if plan.span}
    assert spans == {("dp=16", "3@4"), ("dp=8,tp=2", "3@2"), ("tp=2,dp=8", "3@4")}
    plans = dict.fromkeys(space.plans())
    assert all(plans.keys() >= {*space.neighbours(plan)} for plan in [*plans][::_EVERY])
    for mesh, zero in spans:
        options = ParallelPlan(mesh=mesh, zero=zero, kernels="aten").compile_options()
        assert options.mesh.size == 16 and options.zero_axes == ("dp_in",)
        assert options.mesh.inside(4)[0] == "dp_in"
    chosen = replace(
        space, fixed=parse_fixed("zero=1@2|3@8,recompute=none,microbatches=1,schedule=1f1b,tp=1|2,pp=1,order=dp-tp")
    )
    assert {(plan.mesh, plan.zero) for plan in chosen.plans()} == {
        ("dp=16", "1@2"), ("dp=16", "3@8"), ("dp=8,tp=2", "1@2"), ("dp=8,tp=2", 3)
    }  # fmt: skip
    plans = set(chosen.plans())
    assert all(plans.issuperset(chosen.neighbours(plan)) for plan in plans)
    alone = parse_fixed("recompute=none,microbatches=1,pp=1,tp=2")
    tried = {plan.zero for plan in Space(ranks=16, batch=32, calls=2, nodes=4, near=4, fixed=alone).plans()}
    assert tried == {0, 1, 2, 3, "1@2", "2@2", "3@2", "1@4", "2@4", "3@4"}


@pytest.mark.slow
def test_sums_inside_nodes_first_are_plans() -> None:
    """Where dp has ranks inside a node and further ones; bounds count each level of the sums."""
    few = "zero=0|1|3,recompute=none,microbatches=1,schedule=1f1b,stage_calls=balanced"
    space = Space(ranks=8, batch=32, calls=4, nodes=2, near=4, fixed=parse_fixed(few))
    meshes = {plan.mesh for plan in space.plans() if plan.nodes == 4}
    assert meshes == {"dp=8", "dp=4,tp=2", "dp=4,pp=2"}
    options: dict[str, Any] = {"batch": 8, "size": "1b", "depth": 2, "seq": 256}
    given = parse_fixed(f"{few},tp=1|2,nodes=2")
    cluster = preset("2x2xRTX4090-24GB")
    planner = Planner(Request(model=GPT, cluster=cluster, ranks=4, limit=1 << 40, options=options, fixed=given))
    for plan in planner.plans():
        played = Played(plan=plan, bound=planner.bounds.of(plan), prediction=planner.predicted(plan))
        assert played.holds and played.error is None
        if plan.nodes:
            assert mesh_of(plan).names[:2] == ("dp_out", "dp_in") and "--nodes 2" in plan.flags


def test_losses_are_computed_in_chunks_where_nothing_else_makes_a_plan_fit() -> None:
    options: dict[str, Any] = {"batch": 2, "size": "1b", "depth": 2, "seq": 8192}
    request = Request.checked(GPT, "2xRTX4090-24GB", fix="pp=1,tp=1,zero=0,recompute=full", options=options)
    planner = Planner(request)
    (whole,) = (plan for plan in planner.plans(1 << 40) if plan.microbatches == 1)
    holds = planner.predicted(whole).memory_bytes
    chunked = planner.choice(limit=holds - 1).best
    assert chunked.plan == replace(whole, loss_chunks=8) and chunked.bytes < holds < 2 * chunked.bytes
    assert planner.choice(limit=holds).best.plan == whole
    assert not any(plan.loss_chunks > 1 for plan in planner.plans(holds))


@pytest.mark.slow
def test_the_best_span_is_that_of_enumeration() -> None:
    options: dict[str, Any] = {"batch": 12, "width": 4096, "hidden": 8190, "depth": 2}
    cluster = preset("2x6xH100-80GB")
    request = Request(
        model=str(Path(GPT).with_name("mlp.py")), cluster=cluster, ranks=12, limit=cluster.device.memory, options=options,
        fixed=parse_fixed("zero=1@3|2@2|3|3@2|3@6,recompute=none,schedule=1f1b,microbatches=1|2,tp=1|2"),
    )  # fmt: skip
    result = compared(Cases(request=request, shares=(0.1, 0.6), seed=0), most=400)
    assert result is not None and result.plans > 20
    assert result.faults == ()


def test_stages_wait_for_those_that_they_read_from() -> None:
    """Two stages compute weights from parameters alone, so that no earlier stage sends them a value."""
    fix = "pp=2,tp=2,microbatches=1,recompute=full,zero=0,schedule=interleaved,stage_calls=balanced"
    planner = Planner(Request.checked(str(ROUTED.with_name("decompositions.py")), "4xA100-40GB", fix=fix))
    for plan in planner.plans():
        assert Played(plan=plan, bound=planner.bounds.of(plan), prediction=planner.predicted(plan)).holds
