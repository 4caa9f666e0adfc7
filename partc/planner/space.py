"""The space of plans: all meshes of a number of ranks, and on each mesh the options that decide speed and memory.

Plans that compile to the same program count once: ZeRO without a data axis, schedules without a pipeline, orders of
axes where all links are alike.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from partc.compilation.plan import ParallelPlan
from partc.cost.saved_tensors import parse_bytes
from partc.errors import PartcError
from partc.ir.mesh import (
    BATCH_AXIS,
    CONTEXT_AXIS,
    EXPERT_AXIS,
    PIPELINE_AXIS,
    TENSOR_AXIS,
    Mesh,
    holds_weights_whole,
    is_tensor_axis,
)
from partc.schedules import SCHEDULES
from partc.schedules.per_stage import RECOMPUTE, expanded, stage_kinds

AXES = (PIPELINE_AXIS, BATCH_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
DECISIONS = (
    *AXES, EXPERT_AXIS, "experts", "order", "microbatches", "schedule", "virtual_stages", "zero", "recompute",
    "nodes", "bucket", "loss_chunks", "stage_calls",
)  # fmt: skip
BALANCED = "balanced"  # stages of equal work in floating-point operations
# Stages of equal predicted seconds that recompute as memory demands; fitted when the plan is compared.
FITTED = "fitted"
# Uses of tp that differ between calls, fitted when the plan is compared: as if computation hid gradients' collectives,
# and as if it did not.
MIXED = ("fitted, hidden", "fitted, exposed")
NODE = "node"  # as ZeRO's span: the neighbours in dp that share a node
FLAT = "none"  # as `nodes`: gradients are summed over all ranks in one collective
MOST_VIRTUAL = 8  # stages on each pipeline rank
CHUNKS = "8"  # chunks of the loss, tried if logits are large and the smallest microbatches do not fit without them
# GPipe takes as long as 1F1B and holds more, so it is only tried on request.
_TRIED = tuple(name for name in SCHEDULES if name != "gpipe")

Fixed = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """The plans with the same mesh, expert parallelism, uses of tp, recomputation, stages and number of loss chunks."""

    base: ParallelPlan
    microbatches: tuple[int, ...]
    schedules: tuple[tuple[str, int | None], ...]  # with virtual stages
    # Of ZeRO, each with the ranks of a node if gradients are first summed inside nodes.
    levels: tuple[tuple[str, int | None], ...]

    def __len__(self) -> int:
        return len(self.microbatches) * len(self.schedules) * len(self.levels)

    def plans(self) -> Iterator[ParallelPlan]:
        # Many plans are made, and `replace` takes twice as long.
        given = {each.name: getattr(self.base, each.name) for each in fields(self.base)}
        for count, (schedule, virtual) in itertools.product(self.microbatches, self.schedules):
            given |= {"microbatches": count, "schedule": schedule, "virtual_stages": virtual}
            for level, nodes in self.levels:
                yield ParallelPlan(**{**given, "zero": int(level) if level.isdecimal() else level, "nodes": nodes})

    def ways(self) -> Iterator[ParallelPlan]:
        """The plans without ZeRO."""
        for count, (schedule, virtual) in itertools.product(self.microbatches, self.schedules):
            yield replace(self.base, microbatches=count, schedule=schedule, virtual_stages=virtual)

    @property
    def least(self) -> ParallelPlan:
        """The plan whose parameters and states take the fewest bytes."""
        schedule, virtual = self.schedules[0]
        return replace(
            self.base,
            microbatches=self.microbatches[-1],
            schedule=schedule,
            virtual_stages=virtual,
            zero=max(int(level[0]) for level, _ in self.levels),
        )


@dataclass(frozen=True, kw_only=True)
class Space:
    """All plans of a model on a number of ranks, with one global batch.

    `calls` is the largest number of pipeline stages, `nodes` the number of groups of ranks that share faster links.
    `sequences` tells whether sequences are long enough for cp, `logits` whether a sample's logits are large. `experts`
    divides the number of experts of each layer; it is 0 without experts. With `per_layer`, tp may cut the batch in some
    calls and weights in the others. `fixed` restricts decisions to the given values, and allows some that are not tried
    by default: cp for short sequences, tp over slower links, GPipe, numbers of virtual stages that are not powers of
    two.
    """

    ranks: int
    batch: int
    calls: int
    nodes: int = 1
    near: int = 0  # ranks that share faster links; 0: all
    sequences: bool = False
    logits: bool = False
    experts: int = 0
    per_layer: bool = False
    fixed: Fixed = field(default_factory=dict)
    base: ParallelPlan = field(default_factory=lambda: ParallelPlan(mesh=""))

    def plans(self) -> Iterator[ParallelPlan]:
        """All plans. Raises PartcError P0812 if a fixed value leaves none."""
        for family in self.families():
            yield from family.plans()

    def families(self) -> Iterator[Family]:
        """Yields all plans, grouped into families. Raises PartcError P0812 if a fixed value leaves none."""
        found = False
        for family in self._families():
            found = True
            yield family
        if not found:
            raise self._empty()

    def has_more_than(self, count: int) -> bool:
        """Whether the space has more plans than `count`."""
        return any(total > count for total in itertools.accumulate(map(len, self._families())))

    def neighbours(self, plan: ParallelPlan) -> Iterator[ParallelPlan]:
        """Yields the plans that differ from `plan` in a single decision, or in the sizes of two axes of the mesh."""
        sizes, kind = sizes_of(plan), SCHEDULES[plan.schedule]
        each = plan.virtual_stages or kind.stages_per_rank
        chosen = {name: (str(size),) for name, size in sizes.items()} | {
            EXPERT_AXIS: (str(experts_of(plan)[0]),),
            "order": ("-".join(Mesh.parse(plan.mesh).names),),
            "microbatches": (str(plan.microbatches),),
            "schedule": (plan.schedule,),
            "zero": (self._level(plan),),
            "nodes": (str(plan.nodes or FLAT),),
            "recompute": (plan.recompute,),
            "bucket": (plan.bucket,),
            "loss_chunks": (str(plan.loss_chunks),),
            "stage_calls": (self._stage_calls(plan),),
        }
        if self._stage_calls(plan) == FITTED:
            del chosen["recompute"]
        if kind.placement == "loop" and sizes[PIPELINE_AXIS] > 1:
            chosen["virtual_stages"] = (str(each),)
        if plan.experts is not None:
            chosen["experts"] = ("-".join(experts_of(plan)[1]),)
        axes = (*itertools.combinations(AXES, 2), (BATCH_AXIS, PIPELINE_AXIS, "microbatches"))
        single = (
            *(("zero", "nodes"), ("recompute", "stage_calls"), ("microbatches",), ("schedule", "virtual_stages")),
            *(("loss_chunks",), ("bucket",)),
        )
        ranks = ((EXPERT_AXIS, "experts"), ("order",), *((*names, "order", "experts") for names in axes))
        for free in (*single, *ranks):
            kept = {name: values for name, values in chosen.items() if name not in free and self._has(name, values[0])}
            allowed = {name: values for name, values in self.fixed.items() if name not in kept}
            yield from replace(self, fixed=kept | allowed)._plans()

    def _stage_calls(self, plan: ParallelPlan) -> str:
        """The value of the decision that gives the plan's stages."""
        given = (plan.stage_calls or BALANCED).replace(",", "-")
        return given if given == BALANCED or given in self.fixed.get("stage_calls", ()) else FITTED

    def _level(self, plan: ParallelPlan) -> str:
        """The value of the decision `zero` that gives the plan's level and span: `3@node` rather than `3@8` if both
        do.
        """
        sizes, order = sizes_of(plan), Mesh.parse(plan.mesh).names
        of_node = plan.span and plan.span == self._in_node(sizes, order)
        text = f"{plan.level}@{NODE}" if of_node else str(plan.zero)
        return text if text in self.fixed.get("zero", (text,)) else str(plan.zero)

    def _has(self, name: str, value: str) -> bool:
        """Whether the space has this value of a decision, on meshes that leave the decision a choice."""
        return name not in self.fixed or (name != "order" and value in self.fixed[name])

    def _plans(self) -> Iterator[ParallelPlan]:
        for family in self._families():
            yield from family.plans()

    def _families(self) -> Iterator[Family]:
        for sizes in self._factors():
            counts, schedules = tuple(self._microbatches(sizes)), tuple(self._schedules(sizes[PIPELINE_AXIS]))
            stages = tuple(self._stages(sizes[PIPELINE_AXIS], schedules))
            chunks = self._allowed("loss_chunks", ("1", CHUNKS) if self.logits else ("1",))
            decided = [*itertools.product(stages, chunks, self._allowed("bucket", (self.base.bucket,)))]
            if not counts or not stages or (self.base.cuda_graphs and sizes[PIPELINE_AXIS] > 1):
                continue
            for order in self._orders(sizes):
                mesh = ",".join(f"{name}={sizes[name]}" for name in order)
                for experts in self._experts(sizes, order):
                    if self.base.cuda_graphs and experts is not None:  # the host reads the numbers of rows
                        continue
                    if not (levels := self._levels(sizes, order, experts)):
                        continue
                    for (recompute, cut, suited), count, bucket in decided:
                        base = replace(
                            self.base,
                            mesh=mesh,
                            experts=experts,
                            recompute=recompute,
                            stage_calls=cut,
                            loss_chunks=int(count),
                            bucket=bucket,
                        )
                        few = int(count) > 1 and "loss_chunks" not in self.fixed
                        some = counts[-1:] if few else counts
                        family = Family(base=base, microbatches=some, schedules=suited, levels=levels)
                        yield family
                        yield from self._mixed(family)

    def _mixed(self, family: Family) -> Iterator[Family]:
        """The family of the plans in which tp cuts the batch of some calls, if there are any."""
        base, sizes = family.base, sizes_of(family.base)
        one_way = base.stage_calls is None and base.recompute in RECOMPUTE
        if not self.per_layer or sizes[TENSOR_AXIS] == 1 or base.experts is not None or not one_way:
            return
        ways = sizes[BATCH_AXIS] * sizes[TENSOR_AXIS]
        counts = tuple(count for count in family.microbatches if self.batch % (ways * count) == 0)
        levels = tuple((level, None) for level in self._allowed("zero", tuple("0123")) if level.isdecimal())
        for uses in MIXED if counts and levels else ():
            mixed = replace(base, batch_over=uses)
            yield Family(base=mixed, microbatches=counts, schedules=family.schedules, levels=levels)

    def _levels(
        self, sizes: Mapping[str, int], order: Sequence[str], experts: str | None
    ) -> tuple[tuple[str, int | None], ...]:
        """ZeRO's levels over all ranks that replicate weights, and over some neighbours in dp (`3@8`).

        Levels over all ranks are also tried with sums inside nodes first, if dp extends beyond a node.
        """
        dp = sizes[BATCH_AXIS]
        if dp * sizes[CONTEXT_AXIS] == 1:
            return (("0", None),)
        found = []
        spans = (f"{level}@{ranks}" for level in range(1, 4) for ranks in divisors(dp)[1:-1])
        for text in self._allowed("zero", (*map(str, range(4)), *spans)):
            level, _, span = text.partition("@")
            ranks = self._in_node(sizes, order) if span == NODE else int(span or dp)
            if ranks == dp and span != NODE:
                found.append(level)
            elif experts is None and ranks and dp % ranks == 0:
                found.append(f"{level}@{ranks}")
        nodes = []
        for text in self._allowed(
            "nodes", (FLAT, str(self.near)) if self.nodes > 1 and self.near and experts is None else (FLAT,)
        ):
            if text == FLAT or (self.ranks % int(text) == 0 and self._in_node(sizes, order, int(text))):
                nodes.append(None if text == FLAT else int(text))
        pairs = itertools.product(dict.fromkeys(found), nodes)
        return tuple((level, count) for level, count in pairs if count is None or "@" not in level)

    def _in_node(self, sizes: Mapping[str, int], order: Sequence[str], near: int = 0) -> int:
        """The number of neighbours in dp that share a node of `near` ranks; 0 if dp lies inside one node, or each node
        has only one of its ranks.
        """
        dp, near = sizes[BATCH_AXIS], near or self.near
        inner = math.prod(sizes[name] for name in order[order.index(BATCH_AXIS) + 1 :]) if dp > 1 else 1
        here = near // inner if self.nodes > 1 and near % inner == 0 else 0
        return here if 1 < here < dp and dp % here == 0 else 0

    def _factors(self) -> Iterator[dict[str, int]]:
        """Yields all choices of the axes' sizes whose product is the number of ranks."""
        for pp in self._sizes(PIPELINE_AXIS, self.ranks):
            if pp > self.calls:
                continue
            for tp in self._sizes(TENSOR_AXIS, self.ranks // pp):
                for cp in self._sizes(CONTEXT_AXIS, self.ranks // pp // tp):
                    dp = self.ranks // pp // tp // cp
                    if self.batch % dp == 0 and self._is_allowed(BATCH_AXIS, dp):
                        yield dict(zip(AXES, (pp, dp, cp, tp), strict=True))

    def _sizes(self, axis: str, ranks: int) -> Iterator[int]:
        for size in divisors(ranks):
            if axis == CONTEXT_AXIS and size > 1 and not self.sequences and axis not in self.fixed:
                continue
            if axis == TENSOR_AXIS and size > (self.near or size) and axis not in self.fixed:
                continue
            if self._is_allowed(axis, size):
                yield size

    def _orders(self, sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
        """Yields the orders of the axes, slowest first. Without nodes all links are alike, and one order suffices."""
        used = tuple(name for name in AXES if sizes[name] > 1) or (BATCH_AXIS,)
        for order in itertools.permutations(used):
            if "order" in self.fixed:
                given = (text.split("-") for text in self.fixed["order"])
                if any(order == tuple(name for name in names if name in used) for names in given):
                    yield order
            elif self.nodes > 1 or order == used:
                yield order

    def _experts(self, sizes: Mapping[str, int], order: Sequence[str]) -> Iterator[str | None]:
        """Yields the ways of cutting experts: over how many ranks, and which axes these ranks come from.

        The last axes give all their ranks; the first of them may give a part. Each named axis gives at least two ranks.
        """
        if self._is_allowed(EXPERT_AXIS, 1) or not self.experts:
            yield None
        if not self.experts:
            return
        named = [name for name in order if name != PIPELINE_AXIS and sizes[name] > 1]
        for count in range(1, len(named) + 1):
            for first, *whole in itertools.combinations(named, count):
                inner = math.prod(sizes[name] for name in whole)
                over = (first, *whole)
                if not self._allows_experts(over):
                    continue
                for part in divisors(sizes[first])[1:]:
                    ways = part * inner
                    if self.experts % ways == 0 and self._is_allowed(EXPERT_AXIS, ways):
                        yield f"{EXPERT_AXIS}={ways}@{','.join(over)}"

    def _allows_experts(self, over: Sequence[str]) -> bool:
        given = self.fixed.get("experts")
        return given is None or any(set(text.split("-")) == set(over) for text in given)

    def _microbatches(self, sizes: Mapping[str, int]) -> Iterator[int]:
        for count in divisors(self.batch // sizes[BATCH_AXIS]):
            if self._is_allowed("microbatches", count):
                yield count

    def _schedules(self, ranks: int) -> Iterator[tuple[str, int | None]]:
        if ranks == 1:
            yield "1f1b", None
            return
        for name in self._allowed("schedule", _TRIED):
            kind = SCHEDULES[name]
            if kind.placement != "loop":
                if kind.stages_per_rank * ranks <= self.calls and "virtual_stages" not in self.fixed:
                    yield name, None
                continue
            for each in range(kind.stages_per_rank, MOST_VIRTUAL + 1):
                if each & (each - 1) and "virtual_stages" not in self.fixed:
                    continue
                if each * ranks <= self.calls and self._is_allowed("virtual_stages", each):
                    yield name, None if each == kind.stages_per_rank else each

    def _stages(
        self, ranks: int, schedules: Sequence[tuple[str, int | None]]
    ) -> Iterator[tuple[str, str | None, tuple[tuple[str, int | None], ...]]]:
        """Yields the ways of recomputing, each with a way of cutting stages and the schedules with that number of
        stages.
        """
        kinds = self._allowed("recompute", RECOMPUTE)
        for given in self._allowed("stage_calls", (BALANCED, FITTED)) if ranks > 1 else (BALANCED,):
            if given == FITTED:
                ways = [kind for kind in kinds if kind in RECOMPUTE]
                if ways and schedules:
                    yield "|".join(ways), FITTED, tuple(schedules)
                continue
            cut = None if given == BALANCED else given.replace("-", ",")
            for kind in kinds:
                numbers = {len(expanded(cut, ",")) if cut else 1, len(stage_kinds(kind))} - {1}
                suited = tuple(each for each in schedules if numbers <= {_stage_count(ranks, *each)})
                if suited:
                    yield kind, cut, suited

    def _allowed(self, name: str, values: Sequence[str]) -> tuple[str, ...]:
        """The values of a decision that are tried: the fixed ones if there are any, else `values`."""
        given = self.fixed.get(name)
        if given is None or values == ("0",):
            return tuple(values)
        return given

    def _is_allowed(self, name: str, size: int) -> bool:
        return name not in self.fixed or str(size) in self.fixed[name]

    def _empty(self) -> PartcError:
        given = ",".join(f"{name}={'|'.join(values)}" for name, values in self.fixed.items())
        if self.base.cuda_graphs:
            asked = f", --fix {given}" if given else ""
            return PartcError(
                "P0812",
                f"no plan for {self.ranks} ranks and a batch of {self.batch} has --cuda-graphs{asked}",
                help="leave out --cuda-graphs, which excludes pp and ep, or give another number of --ranks",
            )
        if not given:
            return PartcError(
                "P0812",
                f"no mesh of {self.ranks} ranks suits a batch of {self.batch} and {self.calls} calls",
                help="give a global batch with more factors, or another number of --ranks",
            )
        return PartcError(
            "P0812",
            f"no plan for {self.ranks} ranks and a batch of {self.batch} has --fix {given}",
            help="the product of the axes is the number of ranks, and dp times microbatches divides the batch",
        )


def divisors(number: int) -> tuple[int, ...]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(dict.fromkeys((*small, *(number // each for each in reversed(small)))))


def parse_fixed(text: str) -> Fixed:
    """Parse `tp=4|8,zero=1`. Raises PartcError P0811."""
    found: dict[str, tuple[str, ...]] = {}
    for part in filter(None, text.split(",")):
        name, sign, value = (word.strip() for word in part.partition("="))
        name = name.replace("-", "_")
        values = tuple(value.split("|"))
        if not sign:
            fault = "is not NAME=VALUE or NAME=VALUE|VALUE"
        elif name not in DECISIONS:
            fault = f"names {name!r}, which is not a decision"
        elif name in found:
            fault = f"fixes {name} a second time"
        else:
            unsuited = [each for each in values if not _suits(name, each)]
            fault = f"has {unsuited[0]!r}, which is not a value of {name}" if unsuited else ""
        if fault:
            raise PartcError(
                "P0811",
                f"--fix {part.strip()!r} {fault}",
                help=f"for example --fix 'tp=4|8,zero=1'; the decisions are {', '.join(DECISIONS)}",
            )
        found[name] = values
    return found


def _suits(name: str, value: str) -> bool:
    if name == "schedule":
        return value in SCHEDULES
    if name == "recompute":
        return parse_bytes(value) is not None or set(stage_kinds(value)) <= {*RECOMPUTE}
    if name == "nodes" and value == FLAT:
        return True
    if name == "bucket":
        return parse_bytes(value) is not None
    if name == "stage_calls":
        return value in (BALANCED, FITTED) or re.fullmatch("[1-9][0-9]{0,5}(-[1-9][0-9]{0,5})+", value) is not None
    if name == "zero":
        return re.fullmatch(f"[0-3]|[1-3]@({NODE}|[2-9]|[1-9][0-9]{{1,6}})", value) is not None
    if name in ("order", "experts"):
        words = value.split("-")
        return set(words) <= set(AXES if name == "order" else AXES[1:]) and len(set(words)) == len(words)
    return value.isascii() and value.isdecimal() and 1 <= int(value) <= 2**30 and str(int(value)) == value


def sizes_of(plan: ParallelPlan) -> Mapping[str, int]:
    """The sizes of all axes of a plan's mesh, before its experts take ranks from them."""
    return _sizes_of(plan.mesh)


def experts_of(plan: ParallelPlan) -> tuple[int, tuple[str, ...]]:
    """The number of ranks over which a plan of the space cuts experts, and the axes that these ranks come from."""
    ways, _, over = (plan.experts or "").removeprefix(f"{EXPERT_AXIS}=").partition("@")
    return int(ways or 1), tuple(filter(None, over.split(",")))


def expert_parts(plan: ParallelPlan) -> int:
    """The number of parts into which the ranks of a pipeline stage cut an expert's weights, without ZeRO."""
    tensor = (size for name, size in mesh_of(plan).axes if is_tensor_axis(name) and name not in expert_axes_of(plan))
    return experts_of(plan)[0] * math.prod(tensor)


def stages_of(plan: ParallelPlan) -> int:
    """The number of pipeline stages of a plan."""
    return _stage_count(sizes_of(plan)[PIPELINE_AXIS], plan.schedule, plan.virtual_stages)


def _stage_count(ranks: int, schedule: str, virtual: int | None) -> int:
    return ranks * (virtual or SCHEDULES[schedule].stages_per_rank) if ranks > 1 else 1


def mesh_of(plan: ParallelPlan) -> Mesh:
    """The mesh of a plan, with separate axes for the experts' ranks and for the ranks over which ZeRO shards."""
    return _mesh_of(plan.mesh, plan.experts, plan.span, plan.nodes)[0]


def inner_axes(plan: ParallelPlan) -> tuple[tuple[str, int], ...]:
    """The axes of a plan's mesh on which layouts depend: all but pp and dp, in order."""
    return tuple(axis for axis in mesh_of(plan).axes if axis[0] not in (PIPELINE_AXIS, BATCH_AXIS))


def expert_axes_of(plan: ParallelPlan) -> tuple[str, ...]:
    """The axes of the mesh over which experts are cut."""
    return _mesh_of(plan.mesh, plan.experts, plan.span, plan.nodes)[1]


def sharded_over(plan: ParallelPlan) -> tuple[str, ...]:
    """The axes of the mesh over which ZeRO shards weights."""
    return _mesh_of(plan.mesh, plan.experts, plan.span, plan.nodes)[2]


@lru_cache(maxsize=4096)
def _mesh_of(
    text: str, experts: str | None, span: int, nodes: int | None
) -> tuple[Mesh, tuple[str, ...], tuple[str, ...]]:
    mesh, over = (Mesh.parse(text), ()) if experts is None else Mesh.parse(text).with_experts(experts)
    if nodes is not None:
        mesh = mesh.cut_at(nodes)
    if span:
        mesh, inner = mesh.with_span(span)
        return mesh, over, inner
    return mesh, over, tuple(filter(holds_weights_whole, mesh.names))


@lru_cache(maxsize=4096)
def _sizes_of(text: str) -> Mapping[str, int]:
    mesh = Mesh.parse(text)
    return {name: mesh.axis(name) for name in AXES}
