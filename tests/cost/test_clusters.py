"""Clusters, predictions of plans on them, and the refusals of both."""

from __future__ import annotations

import codecs
import json
import random
import runpy
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partc import passes
from partc.api import compilation
from partc.cli import main
from partc.cluster.cluster import preset, span
from partc.cluster.files import cluster_of
from partc.cluster.variation import expected_maximum
from partc.communication.exchanges import graph_of
from partc.communication.execution import Execution
from partc.compilation.plan import ParallelPlan, decisions, normalised_document
from partc.compilation.plan import read as read_plan
from partc.compilation.simulation import FRAGMENTS, Simulator, prediction, predictions, read_plans, states_of
from partc.cost.accounting import communication
from partc.cost.action_timeline import Segment, TimelineBuilder
from partc.cost.calibration import Calibration, calibration, eight_bit_share, read
from partc.cost.collectives import MEETING, Network
from partc.cost.failures import Failures
from partc.cost.footprint import Footprint
from partc.cost.forecast import Forecast
from partc.cost.pieces import OpPiece, in_pieces
from partc.cost.rates import SAVED_IN_EIGHT_BITS, ClusterRates, product_sizes, tile_share
from partc.cost.roofline import product_flops
from partc.errors import InternalError, PartcError
from partc.ir.collectives import num_blocks
from partc.ir.mesh import Mesh
from partc.ir.program import Action, Op, Program, Ref, TensorType, Value
from partc.planner.lowering import RegionBodies
from partc.rehearsal.rehearsal import rehearse
from partc.rules import resolve

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
PLAIN_GPT = str(Path(__file__).parents[1] / "models" / "gpt.py")
CLICKS = Path(__file__).parents[1] / "benchmarks" / "clicks.py"
MODEL = str(Path(__file__).parents[1] / "models" / "gpt.py")
PLANS: tuple[dict[str, Any], ...] = (
    {"mesh": "pp=2,dp=2,tp=2", "microbatches": 4},
    {"mesh": "pp=2,dp=2,tp=2", "microbatches": 8},
    {"mesh": "pp=2,dp=2,tp=2", "microbatches": 4, "zero": 2, "recompute": "full"},
    {"mesh": "dp=2,pp=2,tp=2", "microbatches": 4, "zero": 1, "schedule": "gpipe"},
    {"mesh": "pp=2,dp=2,tp=2", "microbatches": 4, "schedule": "interleaved", "virtual_stages": 2},
    {"mesh": "dp=4,tp=2", "microbatches": 1, "zero": 1, "recompute": "selective"},
    {"mesh": "dp=4,tp=2", "microbatches": 2, "schedule": "1f1b", "virtual_stages": 1},
    {"mesh": "pp=2,dp=4", "microbatches": 4, "schedule": "zero-bubble", "kernels": "aten"},
    {"mesh": "pp=2,dp=4", "microbatches": 4, "loss_chunks": 4, "options": {"batch": 64, "size": "1b", "depth": 4}},
)


def plan(given: dict[str, Any]) -> ParallelPlan:
    return ParallelPlan(**{"options": {"batch": 64, "depth": 4}} | given)


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    cluster = preset("2x4xA100-80GB")
    return Simulator(GPT, cluster, calibration(cluster))


@pytest.mark.parametrize("given", PLANS, ids=lambda given: str(list(given.values())))
def test_shared_passes_predict_what_a_compile_does(simulator: Simulator, given: dict[str, Any]) -> None:
    """Plans in one simulator share programs; a compile of each alone shares nothing."""
    wanted = plan(given)
    options = wanted.on(simulator.cluster).compile_options()
    alone = compilation(GPT, None, options, model_options=dict(wanted.definitions)).program
    assert simulator.predict(wanted) == prediction(alone, simulator.rates)


def test_predictions_run_all_passes_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    run = passes.run

    def noted(*given: Any, **options: Any) -> tuple[passes.PassResult, ...]:
        steps = run(*given, **options)
        names.extend(step.name for step in steps)
        return steps

    monkeypatch.setattr(passes, "run", noted)
    wanted = ParallelPlan(mesh="pp=2,dp=2", microbatches=2, zero=1, loss_chunks=2)
    simulator = Simulator(GPT, preset("4xH100-80GB"), Calibration())
    simulator.program(wanted)
    assert (passes.FIRST, *names) == passes.before("check")
    bodies = RegionBodies(simulator, calls=6)
    found = bodies.shared(wanted)
    assert found is not None
    names.clear()
    bodies.lowered(wanted, found[0], halves=False)
    assert (*passes.before("stages"), "stages", *names) == passes.before("zero")


_LONG = {"seq": 1024, "hidden": 1024, "heads": 16, "layers": 2, "vocab": 512, "batch": 64}
_ALIKE: tuple[tuple[str, tuple[ParallelPlan, ...]], ...] = (
    (  # sequences that are gathered again, and shorter ones that are saved
        MODEL,
        tuple(
            ParallelPlan(mesh="dp=2,tp=4", microbatches=count, options=_LONG, recompute=kind)
            for count in (1, 32)
            for kind in ("none", "selective")
        ),
    ),
    (  # equal ranks, with products cut by tp or experts cut by ep
        str(Path(MODEL).with_name("mixture.py")),
        tuple(ParallelPlan(mesh="tp=4", experts=experts, precision="fp32") for experts in (None, "ep=4@tp")),
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plans"), _ALIKE, ids=("gathers", "experts"))
def test_predictions_do_not_depend_on_earlier_ones(model: str, plans: tuple[ParallelPlan, ...]) -> None:
    cluster = preset("8xH100-80GB")
    shared = Simulator(model, cluster, calibration(cluster))
    found = [shared.predict(plan) for plan in plans]
    for plan, known in zip(plans, found, strict=True):
        assert Simulator(model, cluster, calibration(cluster)).predict(plan) == known
    assert len({each.memory_bytes for each in found}) == len(plans)


def test_the_order_of_plans_does_not_matter() -> None:
    """Of plans that share costs or layouts, and that differ in products' precision, pieces or microbatches."""
    plain = ParallelPlan(mesh="dp=2,tp=4", options=_LONG)
    others: tuple[dict[str, Any], ...] = ({"precision": "fp8"}, {"tp_overlap": True}, {"microbatches": 4, "zero": 1})
    plans = [plain, *(replace(plain, **given) for given in others)]
    cluster = preset("8xH100-80GB")
    onwards, back = (Simulator(MODEL, cluster, calibration(cluster)) for _ in range(2))
    found = [onwards.predict(plan) for plan in plans]
    assert [back.predict(plan) for plan in reversed(plans)] == found[::-1]
    assert len({each.step_seconds for each in found}) == len(plans)


@pytest.mark.parametrize("given", PLANS[:4], ids=lambda given: str(list(given.values())))
def test_the_footprint_is_close_to_the_account(simulator: Simulator, given: dict[str, Any]) -> None:
    wanted = plan(given)
    options = wanted.on(simulator.cluster).compile_options()
    alone = compilation(GPT, None, options, model_options=dict(wanted.definitions)).program
    assert Footprint(alone).peak == pytest.approx(rehearse(alone).worst.peak, rel=0.15)


def test_the_footprint_has_the_keys_and_values_that_go_around() -> None:
    """In the backward pass of attention, in which this model's memory is at its peak."""
    small = {"batch": 4, "layers": 1, "seq": 16384, "vocab": 64}
    wanted = ParallelPlan(mesh="cp=4", kernels="triton", options=small)
    options = wanted.compile_options()
    program = compilation(PLAIN_GPT, None, options, model_options=dict(wanted.definitions)).program
    account = rehearse(program).worst
    assert any(item.name == "shift" for item in account.alive)
    assert Footprint(program).peak == pytest.approx(account.peak, rel=0.1)


def test_sparse_gradients_are_predicted_as_the_rows_that_a_step_looks_up() -> None:
    """A step takes as long with tables of a hundred times the rows; of the memory, tables and one state grow."""
    cluster = preset("4xA100-80GB")
    clicks, simulator = str(CLICKS), Simulator(str(CLICKS), cluster, calibration(cluster))
    found = []
    for rows in (4_000, 400_000):
        given = {"batch": 512, "tables": 3, "rows": rows, "width": 32}
        wanted = ParallelPlan(mesh="dp=4", optimizer="adagrad", precision="fp32", options=given)
        options = wanted.on(cluster).compile_options()
        alone = compilation(clicks, None, options, model_options=dict(wanted.definitions)).program
        account = rehearse(alone, optimizer="adagrad").worst.peak
        assert Footprint(alone, states_of("adagrad")).peak == pytest.approx(account, rel=0.15)
        found.append(simulator.predict(wanted))
    few, many = found
    assert many.step_seconds == pytest.approx(few.step_seconds)
    assert many.memory_bytes - few.memory_bytes == pytest.approx(2 * 3 * 396_000 * 32 * 4 / 4, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches", "limit"), [("pp=64,dp=32,tp=8", 256, 5), ("pp=125,dp=200,tp=4", 250, 20)]
)
def test_large_clusters_are_simulated_in_seconds(mesh: str, microbatches: int, limit: float) -> None:
    """16,384 and 100,000 ranks, in CPU seconds after the compile. The step's own parts are a bound from below: stages
    in a row fill and drain, and the slowest computes all microbatches.
    """
    ranks = Mesh.parse(mesh).size
    cluster = preset(f"{ranks // 8}x8xH100-80GB")
    simulator = Simulator(MODEL, cluster, calibration(cluster))
    options = {"layers": 125, "batch": 200 * microbatches * 32, "seq": 32}
    program = simulator.program(ParallelPlan(mesh=mesh, microbatches=microbatches, zero=1, options=options))
    start = time.process_time()
    found = prediction(program, simulator.rates)
    assert time.process_time() - start < limit
    forecast = Forecast(program, simulator.rates)
    stages = range(program.stages)
    once = [sum(forecast.action(stage, kind, 0).seconds for kind in "FB") for stage in stages]
    assert found.step_seconds >= max(once) * (microbatches - 1) + sum(once) - max(once)
    assert found.step_seconds <= 1.5 * (max(once) * (microbatches + program.stages))


CONVOLUTIONS = """
import torch
from torch import Tensor, nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2)
        self.third = nn.ConvTranspose2d(16, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))

def model(): return Stack()
def batch(): return {"x": torch.randn(4, 3, 33, 33)}
def loss(model, batch): return model(batch["x"]).square().mean()
"""


def test_products_of_convolutions_and_experts_are_counted(tmp_path: Path) -> None:
    """The backward passes too: convolutions against torch's own count, experts by hand."""
    from torch.utils.flop_counter import FlopCounterMode

    file = tmp_path / "convolutions.py"
    file.write_text(CONVOLUTIONS)
    simulator = Simulator(str(file), preset("1x2xH100-80GB"), Calibration())
    program = simulator.program(ParallelPlan(mesh="dp=1", precision="fp32", kernels="aten"))
    found = 0.0
    for region in program.regions:
        for graph in filter(None, (graph_of(region, kind) for kind in ("F", "B"))):
            types = region.types(graph)
            for op in graph.ops:
                shapes = {name: types[name].local(program.sizes) for name in op.refs()}
                found += product_flops(op, shapes, [value.type.local(program.sizes) for value in op.results])[0]
    given = SimpleNamespace(**runpy.run_path(str(file)))
    with FlopCounterMode(display=False) as counter:
        given.loss(given.model(), given.batch()).backward()
    assert found == counter.get_total_flops()
    rows, experts, wide, high = 4096, 8, 256, 512
    types = {"g": _matrix(rows, wide), "e": _matrix(rows), "x": _matrix(rows, high)}
    result = Value(name="grad_w", type=_matrix(experts, high, wide))
    gradient = Op(name="expert_matmul_grad_weight", args=(*map(Ref, types), experts), results=(result,))
    assert product_flops(gradient, types, [result.type])[0] == 2 * rows * wide * high
    rates = ClusterRates(preset("8xH100-80GB"), Calibration())
    each = Op(
        name="linear_grad_weight", args=(Ref("g"), Ref("x")), results=(replace(result, type=_matrix(wide, high)),)
    )
    dense = {"g": _matrix(rows * experts, wide), "x": _matrix(rows * experts, high)}
    assert rates.operation(gradient, types, {}) > 0.1 * rates.operation(each, dense, {})


@pytest.mark.parametrize("seq", [512, 16384])
def test_attention_of_cut_sequences_has_the_flops_of_whole_ones(seq: int) -> None:
    """Short sequences are gathered; the keys and values of long ones go around the ranks."""
    simulator = Simulator(GPT, preset("1x4xH100-80GB"), Calibration())

    def attended(mesh: str) -> tuple[list[float], Forecast]:
        program = simulator.program(ParallelPlan(mesh=mesh, options={"batch": 4, "depth": 1, "seq": seq}))
        found = []
        for region in program.regions:
            for graph in filter(None, (graph_of(region, kind) for kind in ("F", "B"))):
                types = region.types(graph)
                for op in (op for op in graph.ops if op.name.startswith("attention")):
                    shapes = {name: types[name].local(program.sizes) for name in op.refs()}
                    results = [value.type.local(program.sizes) for value in op.results]
                    found.append(product_flops(op, shapes, results, num_blocks(op, program.sizes))[0])
        return found, Forecast(program, simulator.rates)

    (whole, alone), (cut, ring) = attended("dp=1"), attended("cp=4")
    assert [4 * each for each in cut] == whole and len(whole) == 2
    assert ring.split()[0] > alone.split()[0] / 4
    shifts = [piece.segment for span in ring.places[0] for piece in span.inside.pieces if piece.segment.op == "shift"]
    # Keys and values: 3 shifts forward, and again backward with 4 of their gradients in fp32.
    assert [each.bytes for each in shifts] == ([] if seq == 512 else _shifts(ring.program))
    crossing = communication(ring.program)["cp"]
    assert sum(each.bytes for each in shifts) <= crossing


def _shifts(program: Program) -> list[int]:
    """The bytes of keys and values that go around, and of their gradients, in order."""
    (keys,) = {
        types[name].local_bytes(program.sizes)
        for region in program.regions
        for types in [region.types(region.forward)]
        for op in region.forward.ops
        if op.name == "attention"
        for name in list(op.refs())[1:2]
    }
    pair, gradients = 2 * keys, 4 * keys
    return [pair] * 3 + [pair, gradients] * 3 + [gradients]


def test_a_program_in_bf16_has_no_products_at_the_rate_of_fp32() -> None:
    """Nor do losses in chunks, whose backward products also read gradients of rows in fp32."""
    plan = ParallelPlan(mesh="dp=2,tp=2", precision="bf16", loss_chunks=2, options={"batch": 16, "depth": 2})
    cluster = preset("4xH100-80GB")
    program = Simulator(GPT, cluster, Calibration()).program(plan)
    slow = replace(cluster, device=replace(cluster.device, peak=cluster.device.peak | {"f32": 1.0}))
    usual, slower = (prediction(program, ClusterRates(each, Calibration())) for each in (cluster, slow))
    assert usual == slower


def test_products_in_eight_bits_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A linear layer by hand: nearly twice the rate, and its input cast first. Devices without fp8 refuse it."""
    cluster, constants = preset("8xH100-80GB"), Calibration(streaming=1.0)
    types = {"x": _matrix(8192, 4096), "w": _matrix(16384, 4096)}
    made = Value(name="y", type=_matrix(8192, 16384))
    product = Op(name="linear", args=(Ref("x"), Ref("w")), results=(made,))
    usual, eight = (ClusterRates(cluster, constants, fp8).operation(product, types, {}) for fp8 in (False, True))
    device = cluster.device
    launch, casts = device.launch, 4 * 8192 * 4096 / device.bandwidth
    sizes = (8192, 16384, 4096, 1)  # tiles fill and drain as long as in bf16
    peaks = device.peak["bf16"], eight_bit_share(device) * device.fp8
    bf16, fp8 = (rate * tile_share(sizes, device, rate) for rate in peaks)
    assert (eight - launch - casts) * fp8 == pytest.approx((usual - launch) * bf16, rel=1e-3)
    assert 1.6 < fp8 / bf16 < 2
    file = tmp_path / "plans.jsonl"
    lines = [{"mesh": "dp=2", "precision": name, "options": {"batch": 16, "depth": 2}} for name in ("bf16", "fp8")]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = simulated(capsys, "--cluster", "2xH100-80GB", "--plans", file, "--scale", "--failures", "mtbf=1e4")["plans"]
    assert [each["error"] for each in found] == [None, None] and found[1]["memory_bytes"] < found[0]["memory_bytes"]
    refused = simulated(capsys, "--cluster", "2xA100-80GB", "--plans", file)["plans"][1]["error"]
    assert refused["code"] == "P0404" and "A100" in refused["cause"]


def test_inputs_of_products_in_eight_bits_are_saved_in_eight_bits() -> None:
    """A layer by hand: two norms and the MLP's hidden values. Attention's result is saved in 16 bits, too."""
    options = {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 128, "batch": 8}
    wanted = ParallelPlan(mesh="dp=2,tp=2", precision="bf16", options=options)
    program = Simulator(PLAIN_GPT, preset("4xH100-80GB"), Calibration()).program(wanted)
    usual, eight = Footprint(program), Footprint(program, eight_bits=SAVED_IN_EIGHT_BITS)
    rows, hidden, heads, wide = 4 * 32, 64, 2 * 16, 128
    less = rows * (2 * hidden + wide - heads)
    assert usual.saved_by_region["block"] - eight.saved_by_region["block"] == less
    assert usual.held(0) == eight.held(0)


@pytest.mark.parametrize(
    ("gather", "product", "scatter", "seconds"),
    [
        (3.0, 8.0, 0.0, 8.0),  # the gather has ended before the product's last quarter
        (8.0, 2.0, 0.0, 8.5),  # which waits for it
        (0.0, 8.0, 4.0, 9.0),  # the sum's last quarter follows
        (3.0, 8.0, 3.0, 8.75),
        (0.0, 2.0, 8.0, 8.5),
    ],
)
def test_collectives_run_in_pieces_beside_products(
    gather: float, product: float, scatter: float, seconds: float
) -> None:
    def op(name: str, made: str, *read: str) -> Op:
        return Op(name=name, args=tuple(map(Ref, read)), results=(Value(name=made, type=_matrix(8, 8)),))

    def moved(op: Op, seconds: float) -> list[OpPiece]:
        made = op.results[0].name
        segment = Segment(seconds=seconds, op=op.name, over="tp")
        return [OpPiece(op=op, segment=segment, started=made), OpPiece(op=op, awaited=made)] if seconds else []

    ops = [
        op("all_gather", "g", "x"),
        op("linear", "y", "g", "w"),
        op("permute", "t", "y"),
        op("reduce_scatter", "s", "t"),
    ]
    work = [
        OpPiece(op=each, segment=Segment(seconds=took)) for each, took in zip(ops[1:3], (product, 0.0), strict=True)
    ]
    builder = TimelineBuilder()
    for piece in in_pieces([*moved(ops[0], gather), *work, *moved(ops[3], scatter)], ops, {"tp": 4}):
        if piece.awaited:
            builder.wait(piece.awaited)
        elif piece.started:
            builder.start(piece.started, piece.segment)
        else:
            builder.work(piece.segment.seconds)
    found = builder.built()
    assert found.seconds == pytest.approx(seconds) and found.compute == pytest.approx(product)
    assert not found.pending and sum(each.segment.seconds for each in found.collectives) == pytest.approx(
        gather + scatter
    )


@pytest.mark.parametrize(("name", "word"), [("tp_overlap", "tp_comm_overlap"), ("dp_overlap", "overlap_grad_reduce")])
def test_plans_may_predict_other_overlap(simulator: Simulator, name: str, word: str) -> None:
    plan = ParallelPlan(mesh="dp=2,tp=4", zero=3, precision="bf16", options={"batch": 16, "depth": 4})
    apart, beside = (simulator.predict(replace(plan, **{name: flag})) for flag in (False, True))  # type: ignore[arg-type]
    assert beside.exposed < apart.exposed and beside.memory_bytes == apart.memory_bytes
    assert beside.compute == pytest.approx(apart.compute, rel=0.1)  # computation during collectives is slower
    unusual = not getattr(plan, name)
    other = replace(plan, **{name: unusual})  # type: ignore[arg-type]
    assert getattr(ParallelPlan.of(normalised_document({"mesh": "tp=2", word: unusual})), name) is unusual
    for emit in (other.compile_options, lambda: decisions(other)):
        with pytest.raises(PartcError, match=f"the plan has {name}"):
            emit()


def test_plans_may_predict_rows_that_go_to_a_node_once() -> None:
    """A token has two experts, on four nodes: it leaves its node 2 · 3/4 = 1.5 times by expert, and 1.31 times by node."""
    cluster = preset("4x2xH100-80GB")
    routed = Simulator(str(Path(__file__).parents[1] / "models" / "routed.py"), cluster, calibration(cluster))
    options = {"batch": 8, "experts": 8, "chosen": 2, "width": 1024, "seq": 4096}
    plan = ParallelPlan(mesh="dp=8", experts="ep=8@dp", options=options)
    each, once = (routed.predict(replace(plan, ep_by_node=flag)) for flag in (False, True))
    assert (each.compute, each.memory_bytes) == (pytest.approx(once.compute, rel=0.1), once.memory_bytes)
    moved = [found.causes["dispatch over ep"] for found in (once, each)]
    assert moved[0] / moved[1] == pytest.approx(3 * (1 - (3 / 4) ** 2) / 1.5, rel=0.05)
    with pytest.raises(PartcError, match="the plan has ep_by_node"):
        replace(plan, ep_by_node=True).compile_options()


def test_plans_may_predict_other_attention() -> None:
    """On Hopper FlashAttention-2 takes 1.6 times as long as the kernel that packages prefer, in both passes."""
    options = {"layers": 1, "hidden": 256, "heads": 2, "seq": 16384, "vocab": 128, "batch": 4}
    plan = ParallelPlan(mesh="dp=1", options=options)
    cluster = preset("1xH100-80GB")
    gpt = Simulator(PLAIN_GPT, cluster, calibration(cluster))
    usual, flash, triton = (gpt.predict(replace(plan, attention=name)) for name in ("auto", "flash-2", "triton"))  # type: ignore[arg-type]
    assert 1.3 * usual.compute < flash.compute < 1.6 * usual.compute and triton.compute > 1.3 * flash.compute
    assert usual.memory_bytes == flash.memory_bytes
    for word in ("FA2", "flash_attention_2", "Flash"):
        assert ParallelPlan.of(normalised_document({"mesh": "dp=1", "attention": word})).attention == "flash-2"
    with pytest.raises(PartcError, match="the plan has attention"):
        replace(plan, attention="flash-2").compile_options()


def test_megatrons_names_of_recomputation_are_read() -> None:
    def read(recompute: object) -> str:
        return ParallelPlan.of(normalised_document({"mesh": "dp=1", "recompute": recompute})).recompute

    assert read(["core_attn", "layernorm"]) == "attention,rms_norm,layer_norm"
    assert read("moe, shared_experts") == "experts,shared_experts" and read("full*2/none") == "full*2/none"
    assert read(True) == "full" and read("core_attn") == "attention" and read([]) == "none"


def _matrix(*shape: int) -> TensorType:
    return TensorType.replicated("bf16", shape)


def test_plans_may_predict_saved_values_at_the_host(simulator: Simulator) -> None:
    plan = ParallelPlan(mesh="pp=2,dp=2", microbatches=2, options={"batch": 16, "depth": 4})
    usual, quarter, none = (simulator.predict(replace(plan, offload=share)) for share in (0.0, 0.25, 1.0))
    less, most = (usual.memory_bytes - found.memory_bytes for found in (quarter, none))
    assert less > 0 and most <= 4 * less * 1.01  # another rank may then hold the most
    assert none.step_seconds == usual.step_seconds
    with pytest.raises(PartcError, match="the plan has offload"):
        replace(plan, offload=0.5).compile_options()
    with pytest.raises(PartcError, match="more than 1"):
        ParallelPlan.of({"mesh": "dp=2", "offload": 2})


def test_plans_may_predict_gradients_in_bf16(simulator: Simulator) -> None:
    """A rank then holds 2 bytes less for each parameter, and sums move 2 bytes for each; nothing else changes."""
    plan = ParallelPlan(mesh="dp=4", precision="bf16", options={"batch": 16, "depth": 4})
    usual, half = simulator.predict(plan), simulator.predict(replace(plan, gradients="bf16"))
    program = simulator.program(plan)
    elements = sum(parameter.type.local_bytes(program.sizes) for parameter in program.parameters) / 4
    assert usual.memory_bytes - half.memory_bytes == pytest.approx(2 * elements * (1 + FRAGMENTS), rel=0.01)
    assert half.step_seconds < usual.step_seconds
    exact = replace(plan, precision="fp64")
    less = simulator.predict(exact).memory_bytes - simulator.predict(replace(exact, gradients="bf16")).memory_bytes
    assert less == pytest.approx(6 * elements * (1 + FRAGMENTS), rel=0.01)
    assert ParallelPlan.of(normalised_document({"mesh": "dp=2", "grad_reduce_in_fp32": False})).gradients == "bf16"
    eight = replace(plan, precision="fp8")
    assert eight.sums_in_bf16 and eight.emitted.grad_reduce == "bf16"
    assert not replace(eight, gradients="fp32").sums_in_bf16 and not plan.sums_in_bf16
    assert eight.overlaps_tp and not plan.overlaps_tp and not replace(eight, tp_overlap=False).overlaps_tp
    assert eight.sends_by_node and not plan.sends_by_node and not replace(eight, ep_by_node=False).sends_by_node
    replace(plan, gradients="fp32", tp_overlap=False, ep_by_node=False).compile_options()  # packages are so
    with pytest.raises(PartcError, match="the plan has gradients"):
        replace(plan, gradients="bf16").compile_options()
    with pytest.raises(PartcError, match="fp8"):
        ParallelPlan.of({"mesh": "dp=2", "gradients": "fp8"})


def test_plans_may_predict_weights_in_bf16(simulator: Simulator) -> None:
    """The weight and both states of AdamW then have 2 bytes less each; weights in 64 bits have 6 bytes less."""
    program = simulator.program(ParallelPlan(mesh="dp=4", options={"batch": 16, "depth": 4}))
    elements = sum(parameter.type.local_bytes(program.sizes) for parameter in program.parameters) / 4
    for precision, saved in (("bf16", 2), ("fp64", 6)):
        plan = ParallelPlan(mesh="dp=4", precision=precision, options={"batch": 16, "depth": 4})
        less = simulator.predict(plan).memory_bytes - simulator.predict(replace(plan, weights="bf16")).memory_bytes
        assert less == pytest.approx(3 * saved * elements * (1 + FRAGMENTS), rel=0.01)


def test_bubbles_are_those_of_the_schedules(simulator: Simulator) -> None:
    """GPipe's and 1F1B's bubble is (p-1)/(m+p-1) of a step of equal stages without communication; interleaving divides
    it by the number of virtual stages.
    """
    from partc.cost.simulation import Durations, simulate
    from partc.schedules import SCHEDULES, compute_order, stage_ranks

    for p, m in ((2, 4), (4, 8), (4, 16)):
        for kind, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
            stages = p * virtual
            rows = compute_order(SCHEDULES[kind], p, m, stages)
            places = stage_ranks(SCHEDULES[kind], p, stages)
            found = simulate(rows, places, durations=Durations(forward=1, backward=2).shared(1 / virtual))
            idle = 3 * (p - 1) / virtual
            assert found.makespan == pytest.approx(3 * m + idle)


def test_collectives_by_hand() -> None:
    cluster = preset("4x8xA100-80GB")
    network = Network(cluster=cluster, constants=Calibration(inside=1.0, between=1.0))
    mesh = Mesh.parse("dp=4,tp=8")
    tp, dp = span(mesh, ["tp"], cluster), span(mesh, ["dp"], cluster)
    assert (tp.members, tp.near, dp.members, dp.near, dp.stride) == (8, 8, 4, 1, 1)
    size = 1 << 28
    a, b = cluster.inside.latency, cluster.inside.bandwidth
    assert network.collective("all_gather", tp, size) == pytest.approx(MEETING + 7 * a + 7 * size / b)
    assert network.collective("reduce_scatter", tp, size) == pytest.approx(MEETING + 7 * a + 7 * size / 8 / b)
    ring = 2 * (7 * a + 7 * size / 8 / b)
    tree = 2 * 3 * a + 2 * size / b
    assert network.collective("all_reduce", tp, size) == pytest.approx(MEETING + min(ring, tree))
    assert network.collective("all_reduce", tp, 8) == pytest.approx(MEETING + 6 * a, rel=1e-3)
    a, b = cluster.between.latency, cluster.between.bandwidth
    assert network.collective("all_gather", dp, size) == pytest.approx(MEETING + 4 * a + 3 * size / b)
    # All 32 devices in one group: eight rails of links leave each node.
    whole = span(mesh, ["dp", "tp"], cluster)
    assert (whole.members, whole.near) == (32, 8)
    assert network.collective("all_gather", whole, size) >= 31 * size / (8 * b)


def test_axes_lie_on_links_by_rank_order() -> None:
    cluster = preset("4x8xH100-80GB")
    near = {
        (spec, axis): span(Mesh.parse(spec), [axis], cluster).near
        for spec in ("pp=2,dp=4,tp=4", "tp=4,dp=4,pp=2")
        for axis in ("pp", "dp", "tp")
    }
    for (spec, axis), found in near.items():
        mesh = Mesh.parse(spec)
        group = mesh.group(0, (axis,))
        assert found == sum(rank < 8 for rank in group), (spec, axis)
    assert preset("18x4xGB200").near == 72


def test_tiles_and_waves() -> None:
    device = preset("1xA100-80GB").device
    peak = device.peak["bf16"]
    tile = 2 * 256 * 128 * 8192 / (peak / 108)
    full = tile_share((256 * 108, 128, 8192, 1), device, peak)
    assert full == pytest.approx(tile / (tile + device.fill))
    more, exact = (tile_share((256 * tiles, 128, 1024, 1), device, peak) for tiles in (109, 108))
    assert more < 0.95 * exact
    assert tile_share((16, 16, 8192, 1), device, peak) < 0.02


def test_short_sums_are_far_from_the_peak_of_quick_devices() -> None:
    """H100's products of 4096 x 4096 with 256, 512 and 2048 terms, as shares of those with 4096 (XLA's table, sm_90)."""
    device = preset("1xH100-80GB").device
    shares = [tile_share((4096, 4096, k, 4), device, device.peak["bf16"]) for k in (256, 512, 2048, 4096)]
    measured = (504, 620, 763, 793)
    assert [share / shares[-1] for share in shares] == pytest.approx([rate / 793 for rate in measured], rel=0.05)


def test_heads_of_few_features_wait_for_exponentials() -> None:
    """The same products in twice as many heads have twice as many scores, and take longer."""
    rates = ClusterRates(preset("1xH100-80GB"), Calibration())
    durations = []
    for heads, features in ((16, 128), (32, 64)):
        shape = (4, heads, 8192, features)
        made = Value(name="y", type=_matrix(*shape))
        op = Op(name="attention", args=(Ref("q"), Ref("k"), Ref("v")), results=(made,))
        durations.append(rates.operation(op, dict.fromkeys("qkv", _matrix(*shape)), {}))
    assert 1.1 < durations[1] / durations[0] < 1.4


@pytest.mark.parametrize(("rows", "share"), [(128, 1.0), (512, 1.0), (8192, 0.53)])
def test_causal_attention_on_processors_computes_whole_blocks_of_keys(rows: int, share: float) -> None:
    """Each block of torch's kernel has 512 keys: shares of the time without a mask."""
    cluster = preset("1xCPU")
    rates = ClusterRates(replace(cluster, device=replace(cluster.device, attention=5e10)), Calibration())
    shape = (2, 4, rows, 64)
    made = Value(name="y", type=TensorType.replicated("f32", shape))
    plain = Op(name="attention", args=(Ref("q"), Ref("k"), Ref("v"), None, False, None), results=(made,))
    causal = replace(plain, args=(Ref("q"), Ref("k"), Ref("v"), None, True, None))
    times = [rates.operation(op, dict.fromkeys("qkv", made.type), {}) for op in (causal, plain)]
    assert times[0] / times[1] == pytest.approx(share, rel=0.01)


def test_rows_of_experts_are_products_of_their_own() -> None:
    types = {
        name: TensorType.replicated(dtype, shape)
        for name, dtype, shape in (("x", "bf16", (4096, 512)), ("to", "i64", (4096,)), ("w", "bf16", (8, 512, 256)))
    }
    made = Value(name="y", type=TensorType.replicated("bf16", (4096, 256)))
    op = Op(name="expert_matmul", args=(Ref("x"), Ref("to"), Ref("w")), results=(made,))
    rule = resolve(op, types)
    assert rule is not None and product_sizes(rule) == (512, 256, 512, 8)


def test_a_collective_continues_until_a_later_action_waits_for_it() -> None:
    """1 s of the sum runs during the first action's work, 1 s while the rank is idle, 2 s of 4 are waited for."""
    first = TimelineBuilder()
    first.start("sum", Segment(seconds=4.0, op="all_reduce", over="dp"))
    first.work(1.0)
    left = first.built()
    assert left.seconds == 1.0 and left.carried == 3.0
    second = TimelineBuilder(pending=left.pending, idle=1.0)
    second.wait("sum")
    assert second.built().seconds == pytest.approx(2.0)


def test_the_last_backward_pass_waits_for_no_sums(simulator: Simulator) -> None:
    """Its gradient for the previous stage would come as late as the sums of each stage's gradients."""
    program = simulator.program(plan({"mesh": "pp=2,dp=2,tp=2", "microbatches": 4, "zero": 1, "bucket": "1KiB"}))
    (last,) = (
        steps
        for action, steps in Execution(program, 1).step()
        if isinstance(action, Action) and (action.kind, action.microbatch) == ("B", 3)
    )
    sums = [step.statement.verb for step in last if step.statement.subject == "bucket"]
    assert len(sums) > 1 and {*sums} == {"start"}


def test_overlap_slows_both_sides() -> None:
    """4 s of computation during a collective of 2 s, each half as quick while both run: 2 x 2 s, then 2 s alone."""
    builder = TimelineBuilder(slowdown=1.0)
    builder.start("sum", Segment(seconds=2.0, op="all_reduce", over="dp"))
    builder.work(4.0)
    builder.wait("sum")
    assert builder.now == pytest.approx(6.0)
    exposed = TimelineBuilder(slowdown=1.0)
    exposed.start("sum", Segment(seconds=3.0, op="all_reduce", over="dp"))
    exposed.work(1.0)
    exposed.wait("sum")
    assert exposed.now == pytest.approx(2.0 + 2.0) and exposed.waited == {"all_reduce over dp": pytest.approx(2.0)}


def test_a_collective_waits_for_its_slowest_rank() -> None:
    """Ranks meet after 4 s and after 1 s of computation: the slowest comes 2 and 1 lags late, in the root of the time."""
    builder = TimelineBuilder()
    for work, end in ((4.0, 4.0 + 1.0 + 2 * 0.5), (1.0, 6.0 + 1.0 + 1.0 + 0.5)):
        builder.work(work)
        builder.start(work, Segment(seconds=1.0, op="all_reduce", over="tp", lag=0.5))
        builder.wait(work)
        assert builder.now == pytest.approx(end)


def test_the_slowest_of_more_devices_is_slower() -> None:
    """Expected maxima of normal variables, against the means of samples; products take the time of the slowest."""
    draw = random.Random(0)
    for count in (2, 8, 64):
        sampled = statistics.fmean(max(draw.gauss(0, 1) for _ in range(count)) for _ in range(4000))
        assert expected_maximum(count) == pytest.approx(sampled, abs=0.05)
    slowest = [ClusterRates(preset(spec), Calibration()).slowest for spec in ("1xH100", "8xH100", "64x8xH100")]
    assert slowest == pytest.approx([1.0, 1.0215, 1.0456], abs=1e-3)
    mesh = Mesh.parse("dp=8,tp=2")
    device = replace(preset("16xH100").device, jitter=1e-4)
    rates = ClusterRates(replace(preset("16xH100"), device=device), Calibration())
    assert rates.lag(mesh, ("dp",), ()) == pytest.approx(0.01 * expected_maximum(8))


def test_collectives_on_the_same_links_share_them() -> None:
    """Two sums of 2 s between nodes take 4 s together; a concurrent one inside a node takes its own time."""
    builder = TimelineBuilder()
    for axis, links in (("dp", ("between",)), ("pp", ("inside", "between")), ("tp", ("inside",)), ("ep", ())):
        builder.start(axis, Segment(seconds=2.0, op="all_reduce", over=axis, links=links))
    ends = {}
    for axis in ("ep", "dp", "tp", "pp"):
        builder.wait(axis)
        ends[axis] = builder.now
    assert ends == {axis: pytest.approx(when) for axis, when in (("ep", 2.0), ("dp", 4.0), ("tp", 4.0), ("pp", 4.0))}


def test_axes_use_the_links_that_their_groups_pass() -> None:
    cluster = preset("4x8xH100-80GB")
    rates, mesh = ClusterRates(cluster, Calibration()), Mesh.parse("pp=2,dp=4,tp=4")
    assert rates.links(mesh, ("tp",), ()) == ("inside",)
    assert rates.links(mesh, ("dp",), ()) == ("inside", "between")
    assert rates.links(mesh, ("pp",), (0, 1)) == ("between",)


def test_a_step_is_its_parts(simulator: Simulator) -> None:
    for given in PLANS:
        found = simulator.predict(plan(given))
        assert found.compute + found.exposed + found.bubble == pytest.approx(found.step_seconds)
        assert found.compute > 0 and found.memory_bytes > 0


def test_slower_links_and_devices_never_help() -> None:
    slow, quick = preset("2x4xA100-80GB"), preset("2x4xH100-80GB")
    program = Simulator(GPT, slow, Calibration()).program(plan(PLANS[0]))
    times = [Forecast(program, ClusterRates(cluster, Calibration())).seconds for cluster in (slow, quick)]
    assert times[0] > times[1]


def simulated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["simulate", GPT, "--json", *map(str, arguments)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"schedule": "1F1B"}, {"schedule": "1f1b"}),
        ({"schedule": "GPipe"}, {"schedule": "gpipe"}),
        ({"schedule": "AFAB"}, {"schedule": "gpipe"}),
        ({"schedule": "ZB-H1"}, {"schedule": "zero-bubble"}),
        ({"schedule": "zb"}, {"schedule": "zero-bubble"}),
        ({"schedule": "zero_bubble"}, {"schedule": "zero-bubble"}),
        ({"schedule": "ScheduleZBVZeroBubble"}, {"schedule": "zbv"}),
        ({"schedule": "DualPipeV", "virtual_stages": 2}, {"schedule": "dualpipe-v", "virtual_stages": 2}),
        ({"schedule": "Interleaved1F1B", "virtual_stages": 3}, {"schedule": "interleaved", "virtual_stages": 3}),
        ({"schedule": "1f1b", "virtual_stages": 3}, {"schedule": "interleaved", "virtual_stages": 3}),
        ({"schedule": "interleaved", "virtual_stages": 1}, {"schedule": "1f1b", "virtual_stages": 1}),
        ({"schedule": "interleaved"}, {"schedule": "interleaved"}),
        ({"precision": "bfloat16"}, {"precision": "bf16"}),
        ({"precision": "float32"}, {"precision": "fp32"}),
        ({"precision": "torch.float16"}, {"precision": "fp16"}),
        ({"precision": "FP8", "kernels": "Triton", "optimizer": "AdamW", "compress_grads": "BF16"}, {"precision": "fp8", "kernels": "triton", "optimizer": "adamw", "compress_grads": "bf16"}),
        ({"mesh": {"pp": 2, "DP": 4.0}}, {"mesh": "pp=2,dp=4"}),
        ({"mesh": [2, 4, 8]}, {"mesh": "2x4x8"}),
        ({"mesh": 8}, {"mesh": "8"}),
        ({"mesh": {"pp": "2", "dp": "4"}}, {"mesh": "pp=2,dp=4"}),
        ({"mesh": "PP2 DP4"}, {"mesh": "pp=2,dp=4"}),
        ({"mesh": "pp:2, dp:4"}, {"mesh": "pp=2,dp=4"}),
        ({"mesh": "dp_out=2,dp_in=4"}, {"mesh": "dp_out=2,dp_in=4"}),
        ({"precision": "bf16-mixed"}, {"precision": "bf16"}),
        ({"precision": "MXFP8"}, {"precision": "fp8"}),
        ({"microbatches": "4", "options": {"batch": None}}, {"microbatches": 4}),
        ({"mesh": "DP=4, TP=2"}, {"mesh": "dp=4, tp=2"}),
        ({"zero": "ZeRO-3"}, {"zero": "3"}),
        ({"zero": "stage 3@8"}, {"zero": "3@8"}),
        ({"recompute": True}, {"recompute": "full"}),
        ({"recompute": "Selective"}, {"recompute": "selective"}),
        ({"microbatches": 4.0, "zero": 1.0, "options": {"batch": 8.0, "dropout": 0.5}}, {"microbatches": 4, "zero": 1, "options": {"batch": 8, "dropout": 0.5}}),
        ({"virtual_stages": None, "schedule": None, "zero": None}, {}),
        ({"schedule": "dualpipe"}, {"schedule": "dualpipe"}),  # unknown names stay, and are refused later
    ],
)  # fmt: skip
def test_plans_may_be_spelled_as_other_programs_do(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert ParallelPlan.of(normalised_document({"mesh": "dp=2"} | given)) == ParallelPlan.of({"mesh": "dp=2"} | meant)


def test_a_plan_to_compile_is_spelled_as_one_to_simulate(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"mesh": {"pp": 2, "dp": 4}, "microbatches": 2.0, "schedule": "1F1B", "zero": null}')
    assert [read_plan(file)] == list(read_plans(file))


def test_a_bad_line_changes_no_other_lines(tmp_path: Path) -> None:
    """Only line feeds end lines, also within texts of JSON; a text that is not UTF-8, or too long, is its line's."""
    good = '{"mesh": "dp=2"}'
    odd = '{"mesh": "dp=2\u2028\x85"}', '{"mesh": "dp=2", "name": "a\u2028b"}'
    long = '{"mesh": "' + "x" * 100_000 + '"}'
    lines = [good.encode(), *(line.encode() for line in odd), b'{"mesh": "\xff"}', long.encode(), good.encode() + b"\r"]
    file = tmp_path / "plans.jsonl"
    file.write_bytes(codecs.BOM_UTF8 + b"\n".join(lines))
    first, mesh, name, byte, longest, last = read_plans(file)
    assert isinstance(first, ParallelPlan) and first == last and mesh == first
    assert [type(each) for each in (name, byte, longest)] == [PartcError] * 3
    assert "line 3" in str(name) and "not UTF-8" in str(byte) and len(str(longest)) < 500


def test_plans_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        '{"mesh": "dp=2,tp=2", "microbatches": 2, "options": {"batch": 16, "depth": 2}}',
        '{"mesh": "dp=2,tp=2", "unknown": 1}',
        '{"mesh": "dp=2,tp=2", "microbatches": 3, "options": {"batch": 16, "depth": 2}}',
        '{"mesh": "dp=64"}',
        "no json",
        '{"mesh": "dp=2", "options": {"batch": 16, "none": 2}}',
        '{"mesh": "pp=2,dp=2", "microbatches": 2, "options": {"batch": 16, "depth": 2}}',
    ]
    file = tmp_path / "plans.jsonl"
    file.write_text("\n".join(lines))
    found = simulated(capsys, "--cluster", "4xH100-80GB", "--plans", file)["plans"]
    codes = [each["error"] and each["error"]["code"] for each in found]
    assert codes[0] is codes[6] is None and codes[1] == codes[4] == "P0804"
    assert (codes[2], codes[3]) == ("P0401", "P0803") and codes[5] is not None
    assert {"step_seconds", "memory_bytes", "fits", "compute", "exposed", "bubble", "error"} <= set(found[0])
    assert found[1]["step_seconds"] is None and found[0]["fits"] is True
    slower = tmp_path / "slow.toml"
    slower.write_text("products = 0.01\nstreaming = 0.01\n")
    again = simulated(capsys, "--cluster", "4xH100-80GB", "--plans", file, "--calibration", slower)["plans"]
    assert again[0]["step_seconds"] > found[0]["step_seconds"]

    def fails(*_: object, **__: object) -> None:
        raise InternalError("broken")

    monkeypatch.setattr(Simulator, "program", fails)
    broken = simulated(capsys, "--cluster", "4xH100-80GB", "--plans", file)["plans"]
    assert broken[0]["error"]["code"] == "P0806" and "broken" in broken[0]["error"]["cause"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("nodes = 2", "P0801"),
        ('nodes = 2\ndevices = 4\ndevice = "Z9"', "P0802"),
        ('nodes = 2\ndevices = 4\ndevice = "A100"\nmore = 1', "P0801"),
        ('nodes = 2\ndevices = 4\ndevice = "A100"\n[network]\nkind = "torus"\ndims = [2, 2]', "P0801"),
        ('nodes = 6\ndevices = 4\ndevice = "A100"\n[network]\nkind = "hypercube"', "P0801"),
        ('nodes = 6\ndevices = 4\ndevice = "A100"\n[network]\noversubscription = 2.0', "P0801"),
        ('nodes = 6\ndevices = 4\ndevice = "A100"\n[network]\nleaf = 4', "P0801"),
        ('nodes = 1\ndevices = 4\ndevice = "A100"\n[between]\nkind = "tcp"\ngigabytes = -1', "P0801"),
        ('nodes = 1048576\ndevices = 1048576\ndevice = "A100"', "P0801"),
        ("nodes = 1\ndevices = 1\n[device]\nname = 'x'\nmemory = 1\npeak = {f32 = 1}\nbandwidth = 1", "P0801"),
        ("= 3", "P0801"),
    ],
)
def test_files_that_contradict_themselves(text: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(PartcError) as failure:
        cluster_of(str(file))
    assert failure.value.code == code


def test_a_cluster_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(
        'nodes = 8\ndevices = 4\ndevice = "A100-40GB"\n[between]\nkind = "roce"\ngigabytes = 12.5\n'
        '[network]\nkind = "fat-tree"\nleaf = 4\noversubscription = 4.0\n'
    )
    cluster = cluster_of(str(file))
    assert (cluster.size, cluster.name, cluster.device.name) == (32, "lab", "A100-40GB")
    network = Network(cluster=cluster, constants=Calibration())
    below = span(Mesh.parse("pp=4,dp=2,tp=4"), ["dp"], cluster)
    across = span(Mesh.parse("dp=2,pp=4,tp=4"), ["dp"], cluster)  # the nodes of each group lie below different switches
    size = 1 << 28
    assert network.collective("all_gather", across, size) > 3.99 * network.collective("all_gather", below, size)
    once = span(
        Mesh.parse("dp=8,tp=4"), ["dp"], cluster
    )  # a ring that leaves a switch once, with a quarter of its links
    assert network.collective("all_gather", once, size) < 7.1 * network.collective("all_gather", below, size)
    assert main(["cluster", "show", str(file)]) == 0
    out = capsys.readouterr().out
    assert "8 nodes of 4" in out and "oversubscribed 4 to 1" in out
    assert main(["cluster", "show", "16x8xH100-80GB"]) == 0
    page = capsys.readouterr().out
    assert "1.3 us to fill and drain" in page and "3,590 exponentials" in page
    assert main(["cluster", "show", "16x8xA100-80GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size"] == 128


@pytest.mark.parametrize(
    ("spec", "code"), [("8x", "P0801"), ("0xH100", "P0801"), ("8xZ100", "P0802"), ("none.toml", "P0801")]
)
def test_texts_of_no_cluster(spec: str, code: str) -> None:
    with pytest.raises(PartcError) as failure:
        cluster_of(spec)
    assert failure.value.code == code


def test_constants_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text in ("products = 3.0", "speed = 1", "products = 'x'", "products"):
        file.write_text(text)
        with pytest.raises(PartcError) as failure:
            read(file, Calibration())
        assert failure.value.code == "P0805"


def test_a_model_that_no_plan_can_use_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = tmp_path / "plans.jsonl"
    plans.write_text('{"mesh": "dp=2"}\n{"mesh": "dp=0"}\n')
    assert main(["simulate", str(tmp_path / "none.py"), "--cluster", "8xH100-80GB", "--plans", str(plans)]) == 2
    assert "P0201" in capsys.readouterr().err


def test_optimizers_keep_states() -> None:
    assert [states_of(text) for text in ("adamw", "sgd", "sgd:momentum=0.9")] == [2, 0, 1]


@pytest.mark.slow
def test_a_measured_machine_is_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    assert main(["cluster", "measure", "-o", str(file), "--processes", "2"]) == 0
    cluster = cluster_of(str(file))
    assert (cluster.size, cluster.device.kind) == (2, "cpu")
    rates = (*cluster.device.peak.values(), cluster.device.bandwidth, cluster.inside.bandwidth, cluster.inside.latency)
    assert min(rates) > 0 and cluster.device.peak["f32"] > 1e8
    capsys.readouterr()
    assert main(["cluster", "measure", "-o", str(file), "--processes", "0"]) == 2
    monkeypatch.setattr("partc.cluster.measurement.sys.executable", "/bin/false")
    assert main(["cluster", "measure", "-o", str(file)]) == 2
    assert "P0807" in capsys.readouterr().err


def test_work_under_failures_is_that_of_a_random_run() -> None:
    """Segments of work and a checkpoint, played with random failures, which a restart follows."""
    import random

    given = Failures(mtbf=100.0, checkpoint=60.0, restart=300.0)
    devices = 64
    interval = given.best_interval(devices)
    draw, mean = random.Random(1), given.mtbf * 3600 / devices
    now, segments = 0.0, 4000
    for _ in range(segments):
        while (failure := draw.expovariate(1 / mean)) < interval + given.checkpoint:
            now += failure + given.restart
        now += interval + given.checkpoint
    assert given.effective(1.0, devices) == pytest.approx(now / (segments * interval), rel=0.02)
    best = given.share(devices, interval)
    assert best > max(given.share(devices, interval * other) for other in (0.8, 1.25))
    assert given.effective(1.0, 1) < given.effective(1.0, 64) < given.effective(1.0, 1024)


@pytest.mark.slow
def test_scale_factors_and_failures_of_plans(simulator: Simulator) -> None:
    plans = [plan({"mesh": mesh, "microbatches": 64 // ranks}) for ranks, mesh in ((1, "dp=1"), (4, "dp=4"))]
    plans.append(plan({"mesh": "pp=2,tp=4", "microbatches": 64}))
    found = list(predictions(simulator, plans, scale=True, failures=Failures()))
    factors = [each["scale_factor"] for each in found]
    assert factors[0] == pytest.approx(1.0)
    assert 1 > factors[1] > factors[2] > 0
    assert all(each["effective_seconds"] > each["step_seconds"] for each in found)
    never = next(predictions(simulator, plans[:1], failures=Failures(mtbf=1e-9)))
    assert never["effective_seconds"] is None and never["step_seconds"] == found[0]["step_seconds"]
    # One device makes the values that depend on the whole batch once, four devices each for their part.
    assert factors[1] == pytest.approx(found[0]["step_seconds"] / (4 * found[1]["step_seconds"]), rel=0.01)


@pytest.mark.parametrize("text", ("mtbf=0", "rate=1", "mtbf", "restart=-1", "mtbf=many"))
def test_failures_that_cannot_be_read(text: str) -> None:
    with pytest.raises(PartcError) as failure:
        Failures.parse(text)
    assert failure.value.code == "P0808"


@pytest.mark.parametrize(
    ("line", "code"),
    [({"zero": -1}, "P0404"), ({"mesh": "dp=64"}, "P0803"), ({"model": "no.py"}, "P0201"), ({"zero": []}, "P0804"),
     ({"step_seconds": "1"}, "P0809"), ({"step_seconds": 1e300}, "P0809"), (None, "P0809")],
)  # fmt: skip
def test_a_fit_names_the_line_of_a_wrong_run(
    line: dict[str, Any] | None, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs.jsonl"
    run = {"mesh": "dp=4", "model": MODEL, "step_seconds": 1.0, "options": {"layers": 1}}
    runs.write_text(f"\n{json.dumps(line and run | line)}\n")
    assert main(["cluster", "fit", str(runs), "--cluster", "8xH100-80GB", "-o", str(tmp_path / "c.toml")]) == 2
    said = capsys.readouterr().err
    assert f"{runs}:2" in said and code in said


@pytest.mark.slow
def test_a_fit_finds_the_constants_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs are predictions under other constants, which the fit has to find; those on which no run depends stay."""
    spec = "2x4xA100-80GB"
    cluster = cluster_of(spec)
    known = calibration(cluster)
    other = replace(known, products=0.5 * known.products, between=0.5 * known.between)
    lines = []
    for mesh, batch, width in (("dp=4", 64, 512), ("dp=4", 64, 1024), ("dp=8", 8, 1024), ("dp=8", 16, 512)):
        options = {"batch": batch, "layers": 2, "hidden": width, "seq": 1024, "vocab": 4096}
        given = ParallelPlan(mesh=mesh, kernels="aten", options=options)
        seconds = Simulator(MODEL, cluster, other).predict(given).step_seconds
        lines.append(json.dumps(given.document() | {"model": MODEL, "step_seconds": seconds}))
    runs, output = tmp_path / "runs.jsonl", tmp_path / "c.toml"
    runs.write_text("\n".join(lines))
    assert main(["cluster", "fit", str(runs), "--cluster", spec, "-o", str(output)]) == 0
    found = read(output, Calibration())
    assert found.products == pytest.approx(other.products, rel=0.1)
    assert found.between == pytest.approx(other.between, rel=0.2)
    assert "mean error" in capsys.readouterr().out
    for text in ("", "[]", '{"mesh": "dp=4"}', '{"seconds": 1.0}', "no json"):
        runs.write_text(text)
        assert main(["cluster", "fit", str(runs), "--cluster", spec, "-o", str(output)]) == 2
        assert "P0809" in capsys.readouterr().err
