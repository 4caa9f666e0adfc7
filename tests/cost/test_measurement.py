"""The results of measuring processes and links: a cluster's file, links shared by nodes and messages, shared cores."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from partc.cli import main
from partc.cluster.files import cluster_of
from partc.cluster.measurement import MeasuredRates
from partc.cluster.network import Topology
from partc.cluster.probe import Meeting, Overlap, Sample
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.cost.calibration import calibration
from partc.cost.cores import ROUNDS, BusySpan, paces
from partc.cost.rates import ClusterRates
from partc.cost.simulation import Durations, simulate
from partc.ir.mesh import Mesh
from partc.ir.program import Action, ActionKind
from partc.reports.measurement_page import page
from partc.runtime.comm.distributed import GlooAxis
from partc.runtime.plan import DIRECT
from partc.schedules import SCHEDULES, Compute, compute_order

MODEL = str(Path(__file__).parents[1] / "models" / "gpt.py")
LATENCY = 2e-4
MEGABYTE = 1e6


def samples(links: dict[str, float]) -> Iterator[Sample]:
    """Products at 10^11 flops a second, memory at 10^10 bytes; links by kind in bytes a second."""
    for dtype in ("f32", "f64", "bf16"):
        for side in (64, 256, 1024):
            yield Sample(kind=f"product {dtype}", work=2 * side**3, seconds=5e-6 + 2 * side**3 / 1e11)
    for size in (1 << 20, 1 << 24):
        yield Sample(kind="memory", work=size, seconds=size / 1e10)
    for kind, rate in (("attention", 5e10), ("special", 1e9)):
        for size in (1e6, 1e8):
            yield Sample(kind=kind, work=size, seconds=size / rate)
    yield Sample(kind="launch", work=0, seconds=1e-6)
    for kind, rate in links.items():
        for size in (1 << 10, 1 << 18, 1 << 22):
            yield Sample(kind=kind, work=size, seconds=LATENCY + size / rate)


def rates(links: dict[str, float], *, nodes: int, processes: int = 1, processors: int = 0) -> MeasuredRates:
    return MeasuredRates(
        nodes=nodes,
        processes=processes,
        memory=1 << 30,
        processors=processors,
        samples=tuple(samples(links)),
        overlap=Overlap(products=1.0, exchange=2.0, both=2.25),
    )


def test_measured_nodes_are_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = {"inside": 1e9, "between 1": 5e6, "alone": 1e7, "between 2": 2.5e6}
    file = tmp_path / "c.toml"
    file.write_text(rates(links, nodes=4, processes=2, processors=2).toml())
    found = cluster_of(str(file))
    assert (found.nodes, found.devices, found.processors) == (4, 2, 2)
    assert found.slowdown == pytest.approx(0.25)  # a quarter of a second more than the exchange, for 1 s of products
    assert found.device.peak["f32"] == pytest.approx(1e11, rel=0.01)
    assert (found.device.attention, found.device.special) == (pytest.approx(5e10), pytest.approx(1e9))
    assert found.inside.bandwidth == pytest.approx(1e9, rel=0.05)
    assert found.between.bandwidth == pytest.approx(5e6, rel=0.01)
    assert found.between.latency == pytest.approx(LATENCY, rel=1.1)
    assert found.between.shared and not found.inside.shared
    assert (found.topology.leaf, found.topology.oversubscription) == (2, pytest.approx(2.0, rel=0.01))
    assert main(["cluster", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "shared by a node" in shown and "2, which all devices share" in shown and "0.25" in shown
    file.write_text(rates({"between 1": 5e6, "between 2": 5e6, "spread": 4e6}, nodes=4).toml())
    plain = cluster_of(str(file))
    assert plain.between.spread == pytest.approx(0.8, rel=0.01)
    network, size = ClusterRates(plain, calibration(plain)), 1 << 22
    four, two = (network.collective("all_to_all", Mesh.parse(mesh), ("dp",), (), size) for mesh in ("dp=4", "dp=2"))
    assert four / two == pytest.approx((3 / 4 / 0.8) / (1 / 2), rel=0.01)
    assert (plain.topology, plain.between.shared, plain.processors) == (Topology(), False, 0)


def test_the_lag_at_meetings_is_a_jitter(tmp_path: Path) -> None:
    """Eight processes compute for 16 ms on average and meet 6 ms later than these and a barrier's 1 ms."""
    file = tmp_path / "c.toml"
    meeting = Meeting(products=0.016, barrier=0.001, both=0.023)
    measured = rates({"inside": 1e9, "between 1": 5e6}, nodes=4, processes=2, processors=2)
    file.write_text(replace(measured, meeting=meeting).toml())
    cluster = cluster_of(str(file))
    lag = ClusterRates(cluster, calibration(cluster)).lag(Mesh.parse("dp=8"), ("dp",), ())
    assert lag * math.sqrt(0.016) == pytest.approx(0.006, rel=1e-3)


@pytest.mark.parametrize("leaf", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("oversubscription", [1.0, 2.0, 3.0])
def test_shares_of_a_tree_are_those_of_its_busiest_link(leaf: int, stride: int, oversubscription: float) -> None:
    """8 nodes; all groups of nodes that are `stride` apart talk concurrently, and every message is a flow."""
    topology, nodes = Topology(leaf=leaf, oversubscription=oversubscription), 8
    groups = [list(range(first, nodes, stride)) for first in range(stride)]

    def share(flows: list[tuple[int, int, float]]) -> float:
        """The share of a node's bandwidth at which its flows go, if `out` of each leaf is the narrowest link."""
        sent = {node: sum(part for source, _, part in flows if source == node) for node in range(nodes)}
        out = [
            sum(part for source, target, part in flows if source // leaf == block != target // leaf)
            for block in range(nodes // leaf)
        ]
        return min(1.0, max(sent.values()) * leaf / oversubscription / max(out)) if max(out) else 1.0

    ring = [(each, group[(place + 1) % len(group)], 1.0) for group in groups for place, each in enumerate(group)]
    assert topology.ring_share(nodes // stride, stride) == pytest.approx(share(ring))
    spread = [(one, other, 1.0) for group in groups for one, other in itertools.permutations(group, 2)]
    assert topology.spread_share(nodes // stride, stride) == pytest.approx(share(spread))


def test_messages_over_a_link_follow_each_other() -> None:
    """Stage 0 makes three values in 3 s, each of which is on its way for 5 s; stage 1 needs 1 s for each."""
    made: tuple[ActionKind, ...] = ("F", "SEND_F")
    read: tuple[ActionKind, ...] = ("RECV_F", "F")
    first = [Action(stage=0, kind=kind, microbatch=index) for index in range(3) for kind in made]
    second = [Action(stage=1, kind=kind, microbatch=index) for kind in read for index in range(3)]
    durations = Durations(forward=1.0, transfer=5.0)
    found = simulate([first, second], [0, 1], durations=durations, links=[(0, 1, False)])
    assert [span.start for span in found.ranks[1]] == [6.0, 11.0, 16.0]
    quick = simulate([first, second], [0, 1], durations=durations, links=[(0, 1, False)], transfers={(0, 1): 0.5})
    assert [span.start for span in quick.ranks[1]] == [1.5, 2.5, 3.5]


def test_a_lone_sender_has_the_whole_link_of_its_node(tmp_path: Path) -> None:
    links = {"inside": 1e9, "between 1": 5 * MEGABYTE, "alone": 10 * MEGABYTE, "between 2": 2.5 * MEGABYTE}
    file = tmp_path / "c.toml"
    file.write_text(rates(links, nodes=4, processes=2).toml())
    found = ClusterRates(cluster_of(str(file)), calibration(cluster_of(str(file))))

    def taken(mesh: str, source: int, target: int) -> float:
        return 10 * MEGABYTE / found.transfer(Mesh.parse(mesh), (source, target), int(10 * MEGABYTE)) / MEGABYTE

    assert taken("pp=8", 1, 2) == pytest.approx(10, rel=0.02)  # one of the node's two ranks sends
    assert taken("pp=4,tp=2", 0, 1) == pytest.approx(5, rel=0.02)  # both do
    assert taken("pp=4,tp=2", 1, 2) == pytest.approx(5, rel=0.02)  # and both out of the leaf, whose link has 10 MB/s
    assert taken("pp=2,dp=4", 0, 1) == pytest.approx(2.5, rel=0.02)  # four ranks share that link
    assert taken("pp=8", 0, 1) > 100


def test_collectives_between_processors_send_directly(tmp_path: Path) -> None:
    """4 ranks on 2 nodes, whose link carries 10 MB/s: bytes that leave a node, over that."""
    file = tmp_path / "c.toml"
    file.write_text(rates({"inside": 1e9, "between 1": 5e6, "alone": 1e7}, nodes=2, processes=2).toml())
    cluster = cluster_of(str(file))
    found, mesh = ClusterRates(cluster, calibration(cluster)), Mesh.parse("dp=4")
    link, size = 10 * MEGABYTE, 4 << 20

    def seconds(op: str, size: int) -> float:
        return found.collective(op, mesh, ("dp",), (), size)

    # Two ranks send to each of the two on the other node: their own part, their part of each, and everything.
    assert seconds("all_gather", size) == pytest.approx(2 * 2 * size / link, rel=0.01)
    assert seconds("reduce_scatter", size) == pytest.approx(2 * 2 * size / 4 / link, rel=0.01)
    assert seconds("all_to_all", size) == pytest.approx(2 * 2 * size / 4 / link, rel=0.01)
    small = DIRECT // 3
    assert seconds("all_reduce", small) == pytest.approx(2 * 2 * small / link, rel=0.01)
    assert seconds("all_reduce", size) == pytest.approx(2 * 3 / 4 * size / link, rel=0.01)  # one edge of gloo's ring


def test_ranks_hear_of_receives_before_tensors() -> None:
    posted: list[str] = []

    class Work:
        def wait(self) -> None:
            pass

    class Group:
        def send(self, *_: Any) -> Work:
            posted.append("send")
            return Work()

        def recv(self, *_: Any) -> Work:
            posted.append("recv")
            return Work()

    axis = GlooAxis(Group(), 0, 3)
    axis.start_all_gather(torch.ones(4), dim=0).wait()
    axis.start_reduce_scatter(torch.ones(6), dim=0).wait()
    assert posted == ["recv", "recv", "send", "send"] * 2


def test_paces_are_those_of_cores_that_are_shared_in_turns() -> None:
    """Against time in small steps, in which all that compute have equal shares of the cores."""
    draw = random.Random(3)
    for cores, ranks in ((1, 1), (2, 1), (2, 2), (3, 2)):
        spans = {}
        for place in range(3):
            now = 0.0
            for index in range(3):
                start = now + draw.randint(0, 3)
                now = start + draw.randint(1, 5)
                spans[place, index] = BusySpan(place=place, start=start, end=now, share=1.0)
        for name, found in paces(spans, ranks, cores).items():
            span, steps = spans[name], 100
            times = [span.start + (span.end - span.start) * (step + 0.5) / steps for step in range(steps)]
            busy = [ranks * sum(each.start <= time < each.end for each in spans.values()) for time in times]
            assert found == pytest.approx(sum(max(1.0, each / cores) for each in busy) / steps, rel=0.05)


def in_small_steps(rows: Sequence[Sequence[Compute]], cores: int, takes: Mapping[str, float]) -> float:
    """The end of a pipeline whose ranks share cores equally at every moment."""
    now, done, at = 0.0, set[tuple[int, str, int]](), [0] * len(rows)
    left = [takes[row[0].kind] for row in rows]

    def ready(rank: int) -> bool:
        if at[rank] == len(rows[rank]):
            return False
        what = rows[rank][at[rank]]
        other = rank - 1 if what.kind == "F" else rank + 1
        return not 0 <= other < len(rows) or (other, what.kind, what.microbatch) in done

    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        busy = [rank for rank in range(len(rows)) if ready(rank)]
        speed = min(1.0, cores / len(busy))
        step = min(left[rank] for rank in busy) / speed
        now += step
        for rank in busy:
            left[rank] -= step * speed
            if left[rank] < 1e-9:
                what = rows[rank][at[rank]]
                done.add((rank, what.kind, what.microbatch))
                at[rank] += 1
                left[rank] = takes[rows[rank][at[rank]].kind] if at[rank] < len(rows[rank]) else 0.0
    return now


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_pipelines_on_few_cores_take_as_long_as_in_small_steps(cores: int, microbatches: int) -> None:
    takes = {"F": 1.0, "B": 2.0}
    rows = compute_order(SCHEDULES["1f1b"], 4, microbatches, 4)
    known: dict[tuple[int, str], float] = {}

    def play(rank: int, what: Action | Compute, _: float) -> float:
        return takes[what.kind] * known.get((rank, str(what)), 4 / cores)

    for _ in range(ROUNDS):
        played = simulate(rows, range(4), play=play)
        spans = {
            (rank, str(span.compute)): BusySpan(place=rank, start=span.start, end=span.end, share=1.0)
            for rank, row in enumerate(played.ranks)
            for span in row
        }
        known = {name: (known.get(name, 4 / cores) + value) / 2 for name, value in paces(spans, 1, cores).items()}
    assert played.makespan == pytest.approx(in_small_steps(rows, cores, takes), rel=0.025)


def test_ranks_that_share_cores_take_as_long_as_their_work(tmp_path: Path) -> None:
    """Links are quick, so that a step of 4 processes on 2 cores takes half of their work, if none is idle."""
    links = {"inside": 1e12}
    options = {"batch": 16, "layers": 4, "hidden": 256, "seq": 64}
    found = {}
    for processors in (0, 1, 2):
        file = tmp_path / f"{processors}.toml"
        file.write_text(rates(links, nodes=1, processes=4, processors=processors).toml().replace("0.25", "0"))
        cluster = cluster_of(str(file))
        simulator = Simulator(MODEL, cluster, calibration(cluster))
        for mesh, microbatches in (("dp=4", 1), ("pp=4", 4), ("pp=4", 8)):
            given = ParallelPlan(
                mesh=mesh, microbatches=microbatches, precision="fp32", kernels="aten", options=options
            )
            found[mesh, microbatches, processors] = simulator.predict(given)
    whole = found["dp=4", 1, 0].step_seconds
    assert found["dp=4", 1, 2].step_seconds == pytest.approx(2 * whole, rel=0.05)
    for microbatches in (4, 8):
        alone, two, one = (found["pp=4", microbatches, processors].step_seconds for processors in (0, 2, 1))
        rows, takes = compute_order(SCHEDULES["1f1b"], 4, microbatches, 4), {"F": 1.0, "B": 2.0}
        unit = alone / in_small_steps(rows, 4, takes)
        assert one == pytest.approx(4 * found["pp=4", microbatches, 0].compute, rel=0.05)
        assert two == pytest.approx(unit * in_small_steps(rows, 2, takes), rel=0.12)


def test_the_page_draws_measured_durations_and_their_residuals() -> None:
    links = {"inside": 1e9, "between 1": 5e6, "alone": 1e7, "between 2": 2.5e6}
    found = rates(links, nodes=4, processes=2, processors=2)
    text = page(found)
    ElementTree.fromstring(
        text.partition("\n")[2]
        .replace('<meta charset="utf-8">', "")
        .replace('<meta name="generator" content="partc">', "")
        .replace('<meta name="viewport" content="width=device-width, initial-scale=1">', "")
    )
    drawn = [sample for sample in found.samples if sample.kind != "launch"]
    assert text.count("<circle") == 2 * len(drawn)
    assert "between 2: " in text and "0.0025 GB/s" in text and "oversubscribed 2 to 1" in text
    hover = re.findall(r"product f32: .* the line ([+-][0-9.]+)%", text)
    assert hover and all(abs(float(each)) < 0.5 for each in hover)  # these samples lie on a line
