"""Tables of costs: the seconds and bytes of every call, for one way of cutting weights and one size of a microbatch.

A region's body depends on the axes that cut weights and sequences (tp and cp), on recomputation, and on a few options
that the simulator knows. The sizes of the batch's axes only scale its local shapes, and cutting the batch over ranks
gives the same shapes as cutting it into microbatches: dp=4 with 2 microbatches equals dp=2 with 4. So one program
serves all plans that share a body.

The simulator itself plays the calls, each graph once. All costs are kept as prefix sums over calls (`Sums`: [0, first,
first two, ...]), so that the cost of a stage is a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, combinations
from typing import Protocol, TypeVar

from partc import passes
from partc.cluster.cluster import Cluster, span
from partc.communication.exchanges import Chains, Exchanges
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import with_batch_axis
from partc.cost.footprint import Footprint
from partc.cost.forecast import Forecast
from partc.cost.local_costs import LocalCosts
from partc.cost.rates import ClusterRates
from partc.cost.simulation import Link
from partc.ir.collectives import MOVING
from partc.ir.mesh import BATCH_AXIS, CONTEXT_AXIS, PIPELINE_AXIS
from partc.ir.program import Call, Graph, GraphKind, Parameter, Program, Transport
from partc.passes.stages import call_links, call_work, cuts, staged_calls
from partc.planner.space import inner_axes, mesh_of, sizes_of

_ROUNDING = 1e-9  # of seconds added up in different orders
LOOKUP = "embedding"  # prefix of the names of operations that look up rows of tables
Sums = tuple[float, ...]
_Table = TypeVar("_Table")
_Cost = TypeVar("_Cost")
Axes = tuple[str, ...]
Moves = Mapping[tuple[str, Axes], Sums]  # bytes of collectives by (op, axes)


@dataclass(frozen=True, slots=True)
class RegionBody:
    """The facts on which the bodies of regions depend, except for the sizes of local batches."""

    number: int
    recompute: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCost:
    """The seconds of a graph, and `moving`: the part of them that further collectives do not slow down.

    These are the seconds during which collectives already run, or all seconds if the device waits for the host.
    """

    seconds: float = 0.0
    moving: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesCost:
    """The costs of the two halves of a call's backward pass. Without halves: the cost of the whole pass, and no
    cost.
    """

    inputs: GraphCost
    weights: GraphCost


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTable:
    """The seconds of the calls that stages share."""

    forward: Sums
    backward: Sums  # of whole backward passes
    inputs: Sums  # of the halves of backward passes
    weights: Sums
    sent: Sums  # of the part of a backward pass before gradients are sent, and of the rest
    rest: Sums
    moving: Sums  # the seconds of a microbatch that further collectives do not slow down
    # The axes over which each call communicates in its forward pass (F), backward pass (B), and halves of that (I, W).
    meeting: Mapping[str, tuple[frozenset[Axes], ...]]
    crossing: tuple[int, ...]  # bytes of the value that the call before a cut passes to the call after it


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomTable:
    """The bytes of the calls that stages share."""

    names: tuple[str, ...]  # of regions
    saved: Sums  # of a microbatch
    alive: tuple[tuple[int, int, int], ...]  # at the same time, in: forward pass, whole backward pass, halves


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTable:
    """Parameters and their exchanges under a level of ZeRO. A parameter counts with the first call that reads it."""

    held: Sums  # bytes of parameters, gradients and states
    updated: Sums  # bytes that the optimizer updates
    gathers: Mapping[Axes, Sums]  # seconds of gathers for a forward pass and a backward pass
    edges: Mapping[Axes, Sums]  # seconds of a gather of each call, which at the ends of a stage may serve two passes
    scatters: Mapping[Axes, Sums]  # seconds of scatters after a backward pass
    late: Mapping[Axes, Sums]  # seconds of those after the half for weights, if there is a pipeline
    refreshed: Mapping[Axes, Sums]  # seconds of gathers of updated parameters, once per step
    sums: Moves  # of gradients, once per step
    around: tuple[tuple[int, int], ...]  # bytes of whole parameters around a call, and of whole gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class CallExchanges:
    """The parameters of a call that no earlier call reads, and the call's exchanges, with the meanings of
    ShareTable.
    """

    held: float
    updated: int
    gathers: Chains  # for a forward or a backward pass, empty if no pass needs them
    passes: int  # the number of passes that need them: 0 to 2
    scatters: Chains
    late: Chains
    refreshed: Chains
    sums: Mapping[tuple[str, tuple[str, ...]], int]
    around: tuple[int, int]


class BodySource(Protocol):
    """The source of the programs from which tables are computed."""

    @property
    def everywhere(self) -> bool:
        """Whether regions are lowered once for all sizes of the batch's parts."""

    def separate_batches(self, plan: ParallelPlan) -> bool:
        """Whether each microbatch of the plan is a batch of its own."""

    def shared(self, plan: ParallelPlan) -> tuple[RegionBody, Program] | None:
        """The plan's program before its stages; None if tables do not hold for the plan."""

    def lowered(self, plan: ParallelPlan, body: RegionBody, *, halves: bool) -> Program:
        """The finished program of a body, with whole backward passes or with halves."""

    def sending_first(self, plan: ParallelPlan, body: RegionBody) -> frozenset[str]:
        """The regions whose backward passes run in two halves on a stage that sends gradients to another rank."""


@dataclass
class Tables:
    """The tables by body, mesh and sizes, each computed when it is first read."""

    bodies: BodySource
    rates: ClusterRates
    cluster: Cluster
    states: int
    _costs_of: LocalCosts = field(default_factory=LocalCosts)
    _operations: LocalCosts = field(default_factory=LocalCosts)  # costs that do not depend on links
    _calls: dict[tuple[object, ...], CallTable] = field(default_factory=dict)
    _rooms: dict[tuple[object, ...], RoomTable] = field(default_factory=dict)
    _shares: dict[tuple[object, ...], ShareTable] = field(default_factory=dict)
    _facts: dict[int, _Facts] = field(default_factory=dict)
    _axes: dict[tuple[RegionBody, bool], Mapping[str, frozenset[str]]] = field(default_factory=dict)
    _exchanged: dict[tuple[object, ...], Sequence[CallExchanges]] = field(default_factory=dict)
    _moves: dict[tuple[object, ...], float] = field(default_factory=dict)
    _sends: dict[tuple[object, ...], float] = field(default_factory=dict)
    _groups: dict[tuple[object, ...], tuple[object, ...]] = field(default_factory=dict)  # groups of ranks, by _links

    def on(self, rates: ClusterRates) -> Tables:
        """The tables of the same programs with other rates."""
        return Tables(bodies=self.bodies, rates=rates, cluster=self.cluster, states=self.states)

    def calls(self, plan: ParallelPlan) -> CallTable | None:
        """The seconds of calls; None, like the other tables, if they are not known to hold for the plan."""
        return self._table(self._calls, plan, (plan.recompute, *_split(plan), *_links(plan)), self._call_table)

    def calls_at_once(self, plan: ParallelPlan) -> CallTable | None:
        """The seconds of calls that compute a rank's whole batch with the bodies of the plan."""
        key = "at once", plan.recompute, sizes_of(plan)[PIPELINE_AXIS] > 1, *_links(plan)
        return self._table(self._calls, plan, key, self._call_table, microbatches=1)

    def room(self, plan: ParallelPlan) -> RoomTable | None:
        return self._table(self._rooms, plan, (plan.recompute, *_split(plan), inner_axes(plan)), self._room_table)

    def shares(self, plan: ParallelPlan) -> ShareTable | None:
        if _links(plan) not in self._groups:
            mesh = mesh_of(plan)
            names = sorted(name for name in mesh.names if name != PIPELINE_AXIS)
            over = (axes for count in range(1, len(names) + 1) for axes in combinations(names, count))
            self._groups[_links(plan)] = (*names, *(span(mesh, axes, self.cluster) for axes in over))
        own = plan.zero, plan.nodes, *self._groups[_links(plan)]
        return self._table(self._shares, plan, own, self._share_table)

    def program(self, plan: ParallelPlan) -> Program:
        """The plan's program before its stages."""
        found = self.bodies.shared(plan)
        assert found is not None
        return found[1]

    def cuts(self, plan: ParallelPlan, count: int) -> tuple[tuple[int, int], ...]:
        """The first call of each stage, and the end of its calls."""
        return self._facts_in(plan).cuts(count)

    def links(self, plan: ParallelPlan) -> Mapping[tuple[int, int], bool]:
        """For each pair of calls of which the second reads a value of the first: whether gradients return."""
        return self._facts_in(plan).links

    def stage_links(self, plan: ParallelPlan, cuts: Sequence[tuple[int, int]]) -> Sequence[Link]:
        """The pairs of stages of which the second reads values of the first, with their gradients."""
        return self._facts_in(plan).stage_links(tuple(cuts))

    def places(self, plan: ParallelPlan) -> tuple[int, ...]:
        """The places between calls where stages may begin and end."""
        return (0, *(end for _, end in self._facts_in(plan).runs))

    def looked_up(self, plan: ParallelPlan) -> Collection[int]:
        """The positions of calls that look up embeddings, whose exchanges depend on the size of the local batch."""
        regions = self.program(plan).regions
        looking = {region.name for region in regions if any(op.name.startswith(LOOKUP) for op in region.forward.ops)}
        return [i for i, call in enumerate(self._facts_in(plan).calls) if call.region in looking]

    def _table(
        self,
        known: dict[tuple[object, ...], _Table],
        plan: ParallelPlan,
        own: tuple[object, ...],
        make: Callable[[ParallelPlan, RegionBody, Program], _Table],
        microbatches: int | None = None,
    ) -> _Table | None:
        found = self.bodies.shared(plan)
        if found is None:
            return None
        body, program = found
        key = (*own, body.number)
        if key not in known:
            count = microbatches or plan.microbatches
            sized = replace(program, mesh=with_batch_axis(mesh_of(plan)), microbatches=count)
            known[key] = make(plan, body, sized)
        return known[key]

    def forecast(self, program: Program) -> Forecast:
        return Forecast(program, self.rates, costs=self._operations)

    def collective(self, plan: ParallelPlan, op: str, axes: tuple[str, ...], size: int) -> float:
        """Seconds of a collective on `size` bytes of each rank."""
        key = *_links(plan), op, axes, size
        if key not in self._moves:
            self._moves[key] = self.rates.collective(op, mesh_of(plan), axes, (), size)
        return self._moves[key]

    def transfer(self, plan: ParallelPlan, source: int, target: int, size: int) -> float:
        """Seconds of a message of `size` bytes between two pipeline ranks."""
        key = *_links(plan), source, target, size
        if key not in self._sends:
            self._sends[key] = self.rates.transfer(mesh_of(plan), (source, target), size)
        return self._sends[key]

    # -- calls ----------------------------------------------------------------------------------

    def _call_table(self, plan: ParallelPlan, body: RegionBody, program: Program) -> CallTable:
        calls = self._facts_of(body, program).calls
        pipelined = mesh_of(plan).axis(PIPELINE_AXIS) > 1
        costs = self._costs(_cost, plan, body, program, halves=False)
        parted = self._costs(_halves, plan, body, program, halves=True) if pipelined else {}
        rows = [costs[call.region] for call in calls]
        halves = [parted.get(call.region) or _joint_halves(costs[call.region]) for call in calls]
        sending = self.bodies.sending_first(plan, body) if pipelined else frozenset()
        apart = [call.region in sending for call in calls]
        types = program.value_types()
        whole = self.bodies.lowered(plan, body, halves=False)
        cut = self.bodies.lowered(plan, body, halves=True) if pipelined else whole
        axes = {
            name: (
                _communication_axes(whole.region(name).forward),
                _communication_axes(whole.region(name).backward),
                _communication_axes(cut.region(name).backward),
                _communication_axes(cut.region(name).weight),
            )
            for name in costs
        }
        meeting = zip(*(axes[call.region] for call in calls), strict=True)
        crossing = [0] * (len(calls) + 1)
        for index in range(1, len(calls)):
            names = {*calls[index - 1].results}.intersection(calls[index].args)
            crossing[index] = max((types[name].local_bytes(program.sizes) for name in names), default=0)
        return CallTable(
            forward=_sums(forward.seconds for forward, _ in rows),
            backward=_sums(backward.seconds for _, backward in rows),
            inputs=_sums(half.inputs.seconds for half in halves),
            weights=_sums(half.weights.seconds for half in halves),
            sent=_sums(
                (half.inputs if each else backward).seconds
                for (_, backward), half, each in zip(rows, halves, apart, strict=True)
            ),
            rest=_sums(half.weights.seconds if each else 0.0 for half, each in zip(halves, apart, strict=True)),
            moving=_sums(forward.moving + backward.moving for forward, backward in rows),
            meeting=dict(zip("FBIW", meeting, strict=True)),
            crossing=tuple(crossing),
        )

    def _room_table(self, plan: ParallelPlan, body: RegionBody, program: Program) -> RoomTable:
        calls = self._facts_of(body, program).calls
        pipelined = mesh_of(plan).axis(PIPELINE_AXIS) > 1
        whole = self._costs(_room, plan, body, program, halves=False)
        parted = self._costs(_room, plan, body, program, halves=True) if pipelined else whole
        return RoomTable(
            names=tuple(call.region for call in calls),
            saved=_sums(whole[call.region][0] for call in calls),
            alive=tuple((*whole[call.region][1:], parted[call.region][2]) for call in calls),
        )

    def _facts_in(self, plan: ParallelPlan) -> _Facts:
        found = self.bodies.shared(plan)
        assert found is not None
        return self._facts_of(*found)

    def _facts_of(self, body: RegionBody, program: Program) -> _Facts:
        if body.number not in self._facts:
            calls, runs = staged_calls(program)
            fresh, alike = _alike(program, calls)
            self._facts[body.number] = _Facts(
                calls=calls,
                runs=runs,
                work=tuple(call_work(program, calls)),
                links=call_links(program, calls),
                fresh=fresh,
                alike=alike,
            )
        return self._facts[body.number]

    def _costs(
        self,
        cost: Callable[[Call, Program, Tables], _Cost],
        plan: ParallelPlan,
        body: RegionBody,
        program: Program,
        *,
        halves: bool,
    ) -> Mapping[str, _Cost]:
        """The cost of each region. Meshes with equal links and equal local shapes share costs."""
        lowered = self.bodies.lowered(plan, body, halves=halves)
        if (body, halves) not in self._axes:
            self._axes[body, halves] = {
                region.name: frozenset(axis for graph in region.graphs for axis in _axes(graph, lowered.sizes))
                for region in lowered.regions
            }
        sized = replace(lowered, mesh=program.mesh, microbatches=program.microbatches)

        def place(axis: str) -> object:
            """The facts about an axis on which costs depend."""
            if self.rates.linkless:
                return sized.sizes[axis], self.rates.links(sized.mesh, (axis,), ())
            return span(sized.mesh, (axis,), self.cluster)

        costs: dict[str, _Cost] = {}
        for call in self._facts_of(body, program).first.values():
            axes = sorted(self._axes[body, halves][call.region])
            kind = cost, *((axis, place(axis)) for axis in axes)
            region, make = lowered.region(call.region), partial(cost, call, sized, self)
            costs[call.region] = self._costs_of.of(kind, region, None, sized.sizes, make)
        return costs

    # -- parameters -----------------------------------------------------------------------------

    def _share_table(self, plan: ParallelPlan, body: RegionBody, program: Program) -> ShareTable:
        sizes = sizes_of(plan)
        halves = plan.level > 1 and sizes[PIPELINE_AXIS] > 1
        key = body.number, plan.zero, plan.nodes, sizes[BATCH_AXIS], sizes[CONTEXT_AXIS], inner_axes(plan), halves
        if key not in self._exchanged:
            lowered = self.bodies.lowered(plan, body, halves=True) if halves else None
            self._exchanged[key] = self._call_exchanges(plan, body, program, lowered)
        found = self._exchanged[key]

        def queues(chains: Chains) -> Mapping[Axes, float]:
            """The seconds of some chains of collectives by axes: collectives over the same axes follow each other."""
            takes: dict[Axes, float] = {}
            for each in (each for one in chains for each in one):
                takes[each.axes] = takes.get(each.axes, 0.0) + self.collective(plan, each.op, each.axes, each.bytes)
            return takes

        edges = [queues(each.gathers) for each in found]
        gathers = [
            {axes: each.passes * takes for axes, takes in edge.items()} for each, edge in zip(found, edges, strict=True)
        ]
        names = dict.fromkeys(key for each in found for key in each.sums)
        return ShareTable(
            held=_sums(each.held for each in found),
            updated=_sums(each.updated for each in found),
            gathers=_by_axes(gathers),
            edges={axes: tuple(each.get(axes, 0.0) for each in edges) for axes in set().union(*edges)},
            scatters=_by_axes([queues(each.scatters) for each in found]),
            late=_by_axes([queues(each.late) for each in found]),
            refreshed=_by_axes([queues(each.refreshed) for each in found]),
            sums={key: _sums(each.sums.get(key, 0) for each in found) for key in names},
            around=tuple(each.around for each in found),
        )

    def _call_exchanges(
        self, plan: ParallelPlan, body: RegionBody, program: Program, halves: Program | None
    ) -> Sequence[CallExchanges]:
        options = plan.compile_options().for_passes
        facts = self._facts_of(body, program)
        program = passes.between("overlap", "zero", facts.few(program), options)
        program = replace(program, transport=Transport(near=options["near"]))
        footprint, exchanges = Footprint(program, self.states), program.derived(Exchanges)
        parted = replace(program, regions=halves.regions).derived(Exchanges) if halves else None
        # For other forms of sums, nothing is counted.
        usual = (plan.grad_reduce, plan.compress_grads) == ("fp32", "none")
        kinds: tuple[GraphKind, ...] = ("F", "B")
        known: dict[int, CallExchanges] = {}
        for index in dict.fromkeys(facts.alike):
            call, own = facts.calls[index], [*map(program.parameter, facts.fresh[index])]
            trained = (item.type.local_bytes(program.sizes) for item in own if item.trainable and not item.sparse)
            times = sum(exchanges.gathers(call, kind) for kind in kinds)
            known[index] = CallExchanges(
                held=sum(map(footprint.lasting, own)),
                updated=sum(trained),
                gathers=exchanges.gather(call.params) if times else (),
                passes=times,
                scatters=exchanges.scatter(call, "B") if usual else (),
                late=parted.scatter(call, "W") if usual and parted else (),
                refreshed=exchanges.gather(item.name for item in own) if program.zero in (1, 2) else (),
                sums=self._summed(exchanges, own) if usual else {},
                around=(footprint.gathered(call), footprint.scattered(call)),
            )
        return [known[index] for index in facts.alike]

    @staticmethod
    def _summed(exchanges: Exchanges, parameters: Iterable[Parameter]) -> Mapping[tuple[str, tuple[str, ...]], int]:
        """The bytes of the sums of gradients, once per step, by operation and axes."""
        found: dict[tuple[str, tuple[str, ...]], int] = {}
        sizes = exchanges.program.sizes
        for item in parameters:
            if not item.trainable or item.sparse or item.zero > 1:
                continue
            if item.zero == 1:
                for each in (each for one in exchanges.reduce_scatters((item,)) for each in one):
                    found[each.op, each.axes] = found.get((each.op, each.axes), 0) + each.bytes
            over = tuple(axis for axis in item.reduce if sizes[axis] > 1)
            size, (near, far) = item.type.local_bytes(sizes), exchanges.program.transport.levels(over)
            if near and far:
                part = size // exchanges.group_size(near)
                moved = {("reduce_scatter", near): size, ("all_reduce", far): part, ("all_gather", near): part}
            else:
                moved = {("all_reduce", over): size} if over else {}
            for kind, bytes in moved.items():
                found[kind] = found.get(kind, 0) + bytes
        return found


@dataclass
class _Facts:
    """The calls that stages share, and the work of each call, by which stages are balanced."""

    calls: Sequence[Call]
    runs: Sequence[tuple[int, int]]  # runs of calls that no stage may cut
    work: tuple[float, ...]
    links: Mapping[tuple[int, int], bool]  # calls of which the second reads the first, and whether gradients return
    fresh: Sequence[tuple[str, ...]]  # the parameters of each call that no earlier call reads
    alike: Sequence[int]  # for each call, the first one of the same region with equal parameters
    _cuts: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    _stage_links: dict[tuple[tuple[int, int], ...], Sequence[Link]] = field(default_factory=dict)

    @cached_property
    def first(self) -> Mapping[str, Call]:
        """A call of each region."""
        return {call.region: call for call in self.calls}

    def few(self, program: Program) -> Program:
        """The program without the calls that are like earlier ones, and without their parameters."""
        same = {call.name for index, call in enumerate(self.calls) if self.alike[index] != index}
        calls = tuple(call for call in program.calls if call.name not in same)
        names = {name for call in calls for name in call.params}
        parameters = tuple(item for item in program.parameters if item.name in names)
        return replace(program, calls=calls, parameters=parameters)

    def cuts(self, count: int) -> tuple[tuple[int, int], ...]:
        """The first call of each stage, and the end of its calls."""
        if count not in self._cuts:
            self._cuts[count] = cuts(self.work, self.runs, count)
        return self._cuts[count]

    def stage_links(self, cuts: tuple[tuple[int, int], ...]) -> Sequence[Link]:
        """The pairs of stages of which the second reads values of the first, and whether gradients return."""
        if cuts not in self._stage_links:
            stage = [number for number, (start, end) in enumerate(cuts) for _ in range(start, end)]
            found: dict[tuple[int, int], bool] = {}
            for (source, target), gradient in self.links.items():
                pair = stage[source], stage[target]
                if pair[0] != pair[1]:
                    found[pair] = found.get(pair, False) or gradient
            self._stage_links[cuts] = tuple((*pair, found[pair]) for pair in sorted(found))
        return self._stage_links[cuts]


def _alike(program: Program, calls: Sequence[Call]) -> tuple[Sequence[tuple[str, ...]], Sequence[int]]:
    """For each call: the names of the parameters that no earlier call reads, and the index of the first call of the
    same region with equal parameters.
    """
    microbatch = {region.name for region in program.regions if region.phase == "microbatch"}
    outside = {name for call in program.calls if call.region not in microbatch for name in call.params}
    outside.update(buffer for buffer, _ in program.updates)
    left = {item.name for item in program.parameters}

    def facts(name: str) -> tuple[object, ...]:
        item = program.parameter(name)
        marks = item.trainable, item.sparse, item.stacked, bool(item.balance or item.counts), item.zero
        return name in left, name in outside, id(item.type), *marks, item.gather, item.reduce

    fresh: list[tuple[str, ...]] = []
    alike: list[int] = []
    known: dict[tuple[object, ...], int] = {}
    for index, call in enumerate(calls):
        names = dict.fromkeys(call.params)
        key = call.region, *map(call.params.index, call.params), *map(facts, names)
        alike.append(known.setdefault(key, index))
        fresh.append(tuple(name for name in names if name in left))
        left -= names.keys()
    return fresh, alike


def _cost(call: Call, program: Program, tables: Tables) -> tuple[GraphCost, GraphCost]:
    """The costs of a call forward and backward."""
    forecast = tables.forecast(program)
    return graph_cost(call, "F", forecast), graph_cost(call, "B", forecast)


def _halves(call: Call, program: Program, tables: Tables) -> HalvesCost:
    forecast = tables.forecast(program)
    return HalvesCost(inputs=graph_cost(call, "I", forecast), weights=graph_cost(call, "W", forecast))


def _joint_halves(cost: tuple[GraphCost, GraphCost]) -> HalvesCost:
    return HalvesCost(inputs=cost[1], weights=GraphCost())


def graph_cost(call: Call, kind: GraphKind, forecast: Forecast) -> GraphCost:
    """The forecast seconds of one of a call's graphs, and those in which a collective moves bytes."""
    played = forecast.call(call, kind)
    moving, until = 0.0, 0.0
    for start, end in sorted((piece.start, piece.end) for piece in played.pieces if piece.segment.op):
        moving += max(0.0, end - max(start, until))
        until = max(until, end)
    waits = played.seconds <= forecast.issued(call, kind) * (1 + _ROUNDING)
    return GraphCost(seconds=played.seconds, moving=played.seconds if waits else moving)


def _room(call: Call, program: Program, tables: Tables) -> tuple[int, int, int]:
    """The bytes that a call saves, and the most bytes alive at the same time in its forward pass and in its other
    passes.
    """
    footprint = Footprint(program, tables.states)
    forward, *backward = (footprint.alive(call.region, kind) for kind in ("F", "B", "I", "W"))
    return footprint.saved_by_region[call.region], forward, max(backward)


def _split(plan: ParallelPlan) -> tuple[object, ...]:
    """The ranks and the microbatches over which the batch is cut, and whether there is a pipeline."""
    sizes = sizes_of(plan)
    return sizes[BATCH_AXIS], plan.microbatches, sizes[PIPELINE_AXIS] > 1


def _links(plan: ParallelPlan) -> tuple[str, str | None, int, int | None]:
    """The decisions of a plan that place ranks on links."""
    return plan.mesh, plan.experts, plan.span, plan.nodes


def _axes(graph: Graph, names: Collection[str]) -> Iterator[str]:
    """Yields the axes, of these names, in the attributes of operations: of collectives, of rings of attention, and of
    operations that move nothing, such as parts by rank.
    """
    for op in graph.ops:
        yield from (value for _, value in op.attrs if isinstance(value, str) and value in names)


def _communication_axes(graph: Graph | None) -> frozenset[Axes]:
    """The axes over which a graph communicates."""
    moving = (dict(op.attrs).get("axis") for op in graph.ops if op.name in MOVING) if graph else ()
    return frozenset((axis,) for axis in moving if isinstance(axis, str))


def _by_axes(each: Sequence[Mapping[Axes, float]]) -> Mapping[Axes, Sums]:
    return {axes: _sums(takes.get(axes, 0.0) for takes in each) for axes in sorted(set().union(*each))}


def _sums(each: Iterable[float]) -> Sums:
    return tuple(accumulate(each, initial=0))
