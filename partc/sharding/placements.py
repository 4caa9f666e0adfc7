"""The integer program of the annotate pass: all legal distributions of every operation over one axis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.errors import PartcError
from partc.ir.attention import ROWS, Attention
from partc.ir.expert_products import ExpertMatmul
from partc.ir.gradients import gradient_inputs, input_only, reached, trainable_params
from partc.ir.layout import Layout, Partial, Placement, Replicated, Shard, Sizes, Varying
from partc.ir.mesh import PIPELINE_AXIS, cuts_batch, holds_weights_whole
from partc.ir.operations import VIEWS, effects
from partc.ir.program import FLOATING, ITEMSIZE, Choice, Graph, Op, Parameter, Program, Region, TensorType
from partc.rules import RING, Cuts, OpRule, choices, factor_cuts, flops, is_matmul, kernels, propagate_cuts
from partc.rules.tried import rule_of
from partc.sharding import reshard
from partc.sharding.assignment import Alternative, Node, Price, Problem, Solution, Wire
from partc.sharding.choices import axis_order, layouts, placed_axes, weight_axes
from partc.sharding.disjoint_sets import DisjointSets
from partc.sharding.pins import Pin

Slot = tuple[
    str, ...
]  # ("value", name) | ("parameter", name) | ("in" | "out", region, index) | ("weight", region, name)
# A table may be replicated if it is smaller than this share of a pipeline stage and than this number of bytes.
_LARGE_SHARE, LARGE_BYTES = 0.01, 1 << 26
# Floating-point operations that a device computes while a link moves a byte: an H100 has 6e14 flops and 3e11 bytes a
# second.
_FLOPS_PER_BYTE = 2000.0
_AWAITED = 10  # a sum inside a norm counts as this many collectives, because nothing overlaps with it
_ILLEGAL = "which no operation or size allows"
_SEEN = 0.05  # the share of a ring's bytes that products do not hide


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The integer program's problem, and the node that decides each placement."""

    problem: Problem
    owners: Mapping[Slot, Hashable]
    forbid: frozenset[tuple[Hashable, Hashable]]  # attention by heads, if its rows are reordered
    inside: Mapping[str, tuple[Hashable, int, TensorType]]  # "region.value" -> (node, result, type)
    types: Mapping[str, TensorType]  # types of program values and parameters

    def deciders(self, name: str) -> tuple[Hashable, Callable[[Alternative], Placement], TensorType] | None:
        """The node that decides a name's placement, a function from the node's alternatives to that placement, and the
        type; None if unknown.
        """
        for kind in ("parameter", "value"):
            if (kind, name) in self.owners:
                return self.owners[kind, name], lambda choice: choice.makes[0], self.types[name]
        if name in self.inside:
            node, output, type = self.inside[name]
            return node, lambda choice: choice.makes[output], type
        return None

    def placement(self, slot: Slot, solution: Solution) -> Placement:
        """The placement of a value that crosses calls, in the solution."""
        owner = self.owners[slot]
        chosen = solution.chosen[owner]
        label = chosen.label
        assert isinstance(label, Shard | Replicated | Varying | Partial)
        return label


def build(program: Program, axis: str, pins: Sequence[Pin], *, expert_axes: tuple[str, ...] = ()) -> Places:
    """All alternatives of all regions on `axis`, given the choices already made on the batch axes.

    `expert_axes` cut the rows of products by expert, which will travel; other weight axes cut the matrices of these
    products.
    """
    by_matrix = bool(expert_axes) and axis not in expert_axes and not holds_weights_whole(axis)
    return _PlacementProgram(program, axis, pins, by_rows=axis in expert_axes, by_matrix=by_matrix).build()


def _most_repeated(program: Program) -> float:
    """The least number of bytes of a table that is too large to be replicated."""
    stored = sum(map(_stored, program.parameters))
    return min(_LARGE_SHARE * stored / program.mesh.axis(PIPELINE_AXIS), LARGE_BYTES)


def large_parts(program: Program) -> frozenset[tuple[TensorType, int]]:
    """The types of tables, each with the numbers of parts, for one or several of them, that may be replicated.

    Layouts depend on the number of pipeline ranks only through these.
    """
    most = math.prod(program.sizes[axis] for axis in weight_axes(program.sizes))
    if most == 1:
        return frozenset()
    small = _most_repeated(program)
    params = {region.name: [value.name for value in region.params] for region in program.regions}
    read = {
        (region.name, params[region.name].index(name))
        for region in program.regions
        for name in _looked_up(region) | _transformed(region, _weights(region))
        if name in params[region.name]
    }
    tables = {name for call in program.calls for index, name in enumerate(call.params) if (call.region, index) in read}
    types = {item.type: _stored(item) for item in program.parameters if item.name in tables}
    counts = Counter(item.type for item in program.parameters if item.type in types)
    found = {
        (type, min(most, math.ceil(count * bytes / small)))
        for type, bytes in types.items()
        for count in range(1, counts[type] + 1)
    }
    return frozenset(found)


def _looked_up(region: Region) -> set[str]:
    """The tables whose rows the region looks up by number."""
    return {next(op.refs()) for op in region.forward.ops if op.name == "embedding"}


def _transformed(region: Region, weights: Mapping[str, str]) -> set[str]:
    """The parameters that the region multiplies by other parameters alone, such as tables of relative positions.

    `weights` has the values that are computed from one parameter alone, with that parameter.
    """
    products = (op for op in region.forward.ops if is_matmul(op) and weights.keys() >= {*op.refs()})
    return {weights[next(op.refs())] for op in products}


def _weights(region: Region) -> dict[str, str]:
    """Each parameter, and each value that is computed from one parameter alone, with that parameter."""
    found = {value.name: value.name for value in region.params}
    for op in region.forward.ops:
        if len(read := {found.get(name) for name in op.refs()}) == 1 and (only := read.pop()) is not None:
            found.update((value.name, only) for value in op.results)
    return found


def _stored(parameter: Parameter) -> int:
    return math.prod(parameter.type.shape) * ITEMSIZE[parameter.type.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegionFacts:
    """A region with the facts about it that the alternatives of its operations depend on."""

    region: Region
    types: Mapping[str, TensorType]
    live: set[str]  # the values with a gradient
    cuts: Cuts
    experts: frozenset[str]  # the weights by whose rows products are cut


class _PlacementProgram:
    def __init__(self, program: Program, axis: str, pins: Sequence[Pin], *, by_rows: bool, by_matrix: bool) -> None:
        self.program = program
        self.by_rows = by_rows  # whether the rows of products by expert are cut
        self.by_matrix = by_matrix  # whether their matrices are cut instead, if these divide
        self.axis = axis
        self.pins = [(pin, pin.placement(axis)) for pin in pins if pin.decides(axis)]
        self.sizes: Sizes = program.sizes
        self.n = self.sizes[axis]
        self.calls = {r.name: len(program.calls_to(r.name)) for r in program.regions}
        self.owners = _merged_slots(program)
        self.shared = self._shared_values()
        # Types of the values that cross calls, by owner.
        self.outside = {self.owners["value", value.name]: value.type for value in program.values}
        cut = {
            item.name
            for item in program.parameters
            if any(pin.matches(item.name) and isinstance(placement, Shard) for pin, placement in self.pins)
        }
        calls = input_only(program)
        # Regions without weights are cheap: they are replicated, unless a pin cuts a buffer that they read.
        self.pure = {c.region for c in program.calls if c.name in calls and cut.isdisjoint(c.params)}
        self.needs = gradient_inputs(program)
        self.trainable = trainable_params(program)
        self.small = _most_repeated(program)
        crossing = [type for type in program.value_types().values() if type.dtype in FLOATING]
        self.largest = max(map(self._bytes, crossing), default=0.0)  # of the values that cross calls
        ops = [op for region in program.regions for op in region.forward.ops if _is_ordered(op)]
        # Lengths of sequences with an early and a late half.
        self.halved = {op.results[0].type.shape[ROWS] for op in ops}
        self.forbid: set[tuple[Hashable, Hashable]] = set()
        self.nodes: list[Node] = []
        self.wires: list[Wire] = []
        self.writers: dict[Hashable, int] = {}  # value that crosses calls -> the number of regions that compute it
        self.states: dict[Hashable, dict[Placement, None]] = {}
        self.crossing: dict[Hashable, tuple[TensorType, bool]] = {}
        self.multiplied: set[Hashable] = set()
        self.transformed: set[Hashable] = set()  # weights that are multiplied by other weights alone
        self.travelled: set[Hashable] = set()  # weights of experts, to whose ranks rows travel over this axis
        self.looked_up: set[Hashable] = set()
        self.pins_met: set[str] = set()
        self.unwritten: frozenset[str] = frozenset()  # of the region whose operations are priced

    def _shared_values(self) -> set[Hashable]:
        """The values that several calls read, such as an encoder's results: if these calls use them differently on each
        rank, they are gathered once, and their gradients are added up before one reduction.
        """
        readers = Counter(name for call in self.program.calls for name in dict.fromkeys(call.args))
        names = {value.name for value in self.program.values}
        alone: set[Slot] = {("value", name) for name in names if readers[name] < 2 or name in self.program.returned}
        alone |= {slot for slot in self.owners if slot[0] == "parameter"}
        return {self.owners["value", name] for name in names} - {self.owners[slot] for slot in alone}

    def build(self) -> Places:
        for region in self.program.regions:
            self._add_region(region)
        self._add_crossing_values()
        for pin, _ in self.pins:
            if pin.pattern not in self.pins_met:
                raise pin.unmatched()
        types = {**self.program.value_types(), **{p.name: p.type for p in self.program.parameters}}
        inside = {
            f"{region.name}.{value.name}": (("op", region.name, index), output, value.type)
            for region in self.program.regions
            for index, op in enumerate(region.forward.ops)
            for output, value in enumerate(op.results)
        }
        problem = Problem(nodes=tuple(self.nodes), wires=tuple(self.wires))
        return Places(problem=problem, owners=self.owners, forbid=frozenset(self.forbid), inside=inside, types=types)

    # Regions: one node per operation, one wire per value computed inside.

    def _add_region(self, region: Region) -> None:
        graph = region.forward
        types = graph.types()
        types.update((value.name, value.type) for value in region.params)
        live = reached(graph, self.needs[region.name] | self.trainable[region.name])
        cuts = propagate_cuts(graph, types, self.halved)
        self.unwritten = _unwritten(graph)
        slots: dict[str, Slot] = {value.name: ("in", region.name, str(i)) for i, value in enumerate(graph.inputs)}
        slots.update((value.name, ("weight", region.name, value.name)) for value in region.params)
        owners = {name: self._cross(slot, types[name], name in live) for name, slot in slots.items()}
        wanted = self._wanted_bytes(region, types)
        readers: dict[str, list[tuple[Hashable, int]]] = {}
        made: dict[str, tuple[Node, int]] = {}
        experts = expert_weights(graph, types) if self.by_rows else frozenset()
        self.travelled.update(owners[name] for name in experts if name in owners)
        weights = _weights(region)
        self.transformed |= {owners[name] for name in _transformed(region, weights)}
        self.looked_up |= {owners[name] for name in _looked_up(region) if name in owners}
        facts = _RegionFacts(region=region, types=types, live=live, cuts=cuts, experts=experts)
        for index, op in enumerate(graph.ops):
            node = self._operation(facts, index, op)
            self.nodes.append(node)
            made.update((value.name, (node, output)) for output, value in enumerate(op.results))
            alone = weights.keys() >= {*op.refs()}  # no activation is read
            for position, name in enumerate(op.refs()):
                readers.setdefault(name, []).append((node.name, position))
                if is_matmul(op) and name in weights and (position > 0 or not alone):
                    self.multiplied.add(owners[weights[name]])
                if name in owners:
                    self._offer(owners[name], [choice.wants[position] for choice in node.alternatives])  # type: ignore[misc]
        for index, name in enumerate(graph.outputs):
            slot = ("out", region.name, str(index))
            owner = self._cross(slot, self.outside.get(self.owners[slot], types[name]), name in live)
            readers.setdefault(name, []).append((owner, self.writers.get(owner, 0)))
            self.writers[owner] = self.writers.get(owner, 0) + 1
            if name in made:
                node, output = made[name]
                self._offer(owner, [choice.makes[output] for choice in node.alternatives])  # type: ignore[misc]
        params = {value.name for value in region.params}
        for name, found in readers.items():
            source, output = (made[name][0].name, made[name][1]) if name in made else (owners[name], 0)
            within = name in self.unwritten
            size = min(self._bytes(types[name]), wanted.get(name, math.inf))
            change = self._change(
                types[name], size, self.calls[region.name], live=name in live, weight=name in params, within=within
            )
            wire = Wire(name=(region.name, name), source=source, output=output, readers=tuple(found), change=change)
            self.wires.append(wire)

    def _operation(self, facts: _RegionFacts, index: int, op: Op) -> Node:
        """The node of an operation. Raises PartcError P0107 if its rows do not divide over the ranks of experts."""
        rule, name = rule_of(op, facts.types), facts.region.name
        given = self._choices(facts, op, rule)
        alternatives: dict[tuple[Hashable, ...], Alternative] = {}
        for choice in given:
            found = self._alternative(facts, op, rule, choice)
            if found is not None:
                alternatives.setdefault((found.wants, found.makes), found)
        if not alternatives and None not in given:
            count = op.result.type.layout.local_shape(self.sizes)[0]
            raise PartcError(
                "P0107",
                f"{self.axis} cannot cut the experts of {name}: their {count} rows of a microbatch do not "
                f"divide over the {self.n} ranks of {self.axis}",
                help="use a batch or a sequence that divides, or fewer microbatches, or fewer ranks for experts",
                source=op.source,
            )
        kept = list(alternatives.values())
        for position, value in enumerate(op.results):
            kept = self._pinned(f"{name}.{value.name}", value.type, kept, _result(position))
        node = Node(name=("op", name, index), alternatives=tuple(kept))
        if rule is not None and holds_weights_whole(self.axis) and _is_ordered(op):
            others = [each for each in kept if _factor(each) not in (RING, *rule.ring)]
            self.forbid |= {(node.name, each.label) for each in others if len(others) < len(kept)}
        return node

    def _choices(self, facts: _RegionFacts, op: Op, rule: OpRule | None) -> list[Choice | None]:
        """The choices of an operation on this axis. Only products of experts whose rows are cut have no choice in which
        all ranks compute the same.
        """
        repeated: list[Choice | None] = [None]
        if any(name in facts.live for name in op.refs()):
            repeated.append(Choice(axis=self.axis, factor=None))
        if rule is None or not facts.experts.isdisjoint(value.name for value in op.results):
            return repeated
        spread: Sequence[Choice] = ()
        if facts.region.name not in self.pure:
            batch = {  # dimensions that the batch axes cut are excluded, except for rows that travel
                (choice.factor, choice.outer) for choice in op.choices if not facts.experts and cuts_batch(choice.axis)
            }
            along = not holds_weights_whole(self.axis)
            every = choices(op, rule, self.axis, self.n, factor_cuts(op, rule, facts.cuts), normalized=along)
            spread = [choice for choice in every if (choice.factor, choice.outer) not in batch or choice.factor is None]
            if self.axis in facts.region.batch_over:
                spread = [replace(choice, axis=self.axis) for choice in op.choices if cuts_batch(choice.axis)][:1]
        if not facts.experts.isdisjoint(op.refs()):
            rows = {name for dims in rule.results for name in dims[0][-1:]}
            return [choice for choice in spread if choice.factor in rows]
        if self.by_matrix and op.name == "expert_matmul":
            spread = [choice for choice in spread if choice.factor in ("i", "o")] or spread
        return [*repeated, *spread]

    def _alternative(
        self, facts: _RegionFacts, op: Op, rule: OpRule | None, choice: Choice | None
    ) -> Alternative | None:
        chosen = op if choice is None else replace(op, choices=(*op.choices, choice))
        found = layouts(chosen, rule, facts.types, self.sizes)
        if found is None:
            return None
        names, live = [*op.refs()], facts.live
        wants = tuple(self._axis_placement(layout, name in live) for layout, name in zip(found[0], names, strict=True))
        makes = tuple(
            self._axis_placement(layout, v.name in live) for layout, v in zip(found[1], op.results, strict=True)
        )
        label = None if choice is None else (choice.factor, choice.outer)
        price = self._price(facts, op, rule, choice, found[1], makes)
        return Alternative(label=label, wants=wants, makes=makes, price=price)

    def _axis_placement(self, layout: Layout, live: bool) -> Placement:
        """The placement on this axis; Varying counts as Replicated for values without a gradient."""
        placement = layout.placement(self.axis)
        return Replicated() if isinstance(placement, Varying) and not live else placement

    def _price(
        self,
        facts: _RegionFacts,
        op: Op,
        rule: OpRule | None,
        choice: Choice | None,
        made: tuple[Layout, ...],
        makes: tuple[Placement, ...],
    ) -> Price:
        times = self.calls[facts.region.name]
        spare = 1 - 1 / self.n
        repeated = choice is None or choice.factor is None or choice.factor.startswith("partial")
        size = [self._bytes(value.type) for value in op.results]
        price = {
            "memory": times * sum(b / (self.n if isinstance(p, Shard) else 1) for b, p in zip(size, makes, strict=True))
        }
        if rule is not None and repeated and is_matmul(op):
            price["repeated_flops"] = times * flops(op, rule) * spare
        elif repeated and op.name not in VIEWS and op.results:
            written = (b for b, value in zip(size, op.results, strict=True) if value.name not in self.unwritten)
            price["repeated_bytes"] = times * sum(written) * spare
        if op.name == "cross_entropy" and not repeated and not any(isinstance(placement, Shard) for placement in makes):
            price["communication"] = times * 3 * 2 * spare * sum(size)  # a maximum, a sum and a pick, all reduced
        if rule is not None and choice is not None and choice.factor in rule.normalized:
            sums = self._sums_price(op, rule, any(value.name in facts.live for value in op.results))
            price |= {name: times * amount for name, amount in sums.items()}
        if rule is not None and choice is not None and choice.factor in (RING, *rule.ring):
            price["communication"] = times * self._rows_price(op, rule, choice, facts.types)
        subs = (sub for layout in made for dim in layout.dims for sub in dim)
        if any(set(sub.axes) > {self.axis} and self.axis in sub.axes for sub in subs):
            price["nesting"] = times * sum(size)
        return price

    def _sums_price(self, op: Op, rule: OpRule, live: bool) -> Price:
        """The price of a norm whose rows are cut: its sums in the forward pass, and as many in the backward pass."""
        made = op.results[0].type
        whole = [dim for dim, names in enumerate(rule.results[0]) if not {*names} & {*rule.normalized}]
        local = made.layout.local_shape(self.sizes)
        rows = math.prod(local[dim] for dim in whole) * max(4, ITEMSIZE[made.dtype])
        sums = len(effects(op.name).extra) * (2 if live else 1)  # one for each statistic
        return {
            "communication": sums * 2 * (1 - 1 / self.n) * rows,
            "collectives": sums * _AWAITED * self.largest,
        }

    def _rows_price(self, op: Op, rule: OpRule, choice: Choice, types: Mapping[str, TensorType]) -> float:
        """The bytes of a ring that products do not hide, and the price of unequal work under a causal mask."""
        made = op.results[0].type
        share = math.prod(made.layout.local_shape(self.sizes)) / math.prod(made.shape)
        hiding = _hiding(flops(op, rule) * share / self.n)
        attention = Attention.of(op)
        assert attention is not None
        even = not attention.causal or attention.window or (attention.zigzag and choice.outer == 2)
        uneven = 0.0 if even else hiding * (1 - 1 / self.n)
        if choice.factor != RING:
            return uneven
        sent = [self._bytes(types[name]) * _per_ring(types[name], self.n) for name in (attention.k, attention.v)]
        return uneven + max(sum(sent) - hiding, _SEEN * sum(sent))

    def _bytes(self, type: TensorType) -> float:
        """The bytes of a rank's part per microbatch, before this axis cuts it."""
        return math.prod(type.layout.local_shape(self.sizes)) * ITEMSIZE[type.dtype]

    def _wanted_bytes(self, region: Region, types: Mapping[str, TensorType]) -> dict[str, float]:
        """The bytes of the largest part of each value that an operation or another call reads, before this axis cuts
        it. A value that earlier axes cut for all its readers moves after these cuts.
        """
        found: dict[str, float] = {}
        if self.axis == placed_axes(self.sizes)[0]:
            return found
        for op in region.forward.ops:
            read = layouts(op, rule_of(op, types), types, self.sizes)
            for position, name in enumerate(op.refs()):
                layout = types[name].layout if read is None else read[0][position]
                size = self._bytes(replace(types[name], layout=layout))
                found[name] = max(found.get(name, 0.0), size)
        for index, name in enumerate(region.forward.outputs):
            outside = self.outside.get(self.owners["out", region.name, str(index)], types[name])
            found[name] = max(found.get(name, 0.0), self._bytes(outside))
        return found

    def _change(
        self, type: TensorType, moved: float, times: int, *, live: bool, weight: bool, within: bool
    ) -> Callable[[Hashable, Hashable], Price | None]:
        """A function from (made, wanted) to the price of a value's change of placement, in bytes sent per microbatch.
        In each of `times` calls, `moved` bytes change their placement.

        A weight's gradient is reduced once per step; everything else moves for every microbatch. A weight that is added
        to a partial sum, such as a bias, stays in its place: the other ranks add zeros. `within`: the value stays
        within a kernel, unless it is a partial sum that is reduced.
        """
        size = moved * times

        def price(source: Hashable, target: Hashable) -> Price | None:
            if source != target and isinstance(target, Partial) and type.dtype not in FLOATING:
                return None
            forward, backward = reshard.traffic(source, target, self.n)
            once = weight and isinstance(source, Replicated) and isinstance(target, Varying)
            back = 0.0 if not live else 1 / self.program.microbatches if once else 1.0
            sent = {
                "communication": size * (forward.bytes + back * backward.bytes),
                "collectives": times * self.largest * (forward.collectives + back * backward.collectives),
            }
            if within and isinstance(source, Partial) and source != target:
                sent["repeated_bytes"] = size * (1 - 1 / self.n)
            moves = weight and not once and not isinstance(target, Partial)
            return sent | {"moved_weights": size} if moves else sent

        return price

    # Values that cross calls, and parameters: one node each, shared by every call that touches them.

    def _offer(self, owner: Hashable, placements: Sequence[Placement]) -> None:
        for placement in placements:
            if not isinstance(placement, Varying) or owner in self.shared:
                self.states[owner][placement] = None

    def _cross(self, slot: Slot, type: TensorType, live: bool) -> Hashable:
        owner = self.owners[slot]
        self.states.setdefault(owner, {Replicated(): None})
        known = self.crossing.get(owner)
        self.crossing[owner] = (type, live or (known is not None and known[1]))
        return owner

    def _add_crossing_values(self) -> None:
        names: dict[Hashable, list[str]] = {}
        weights: dict[Hashable, int] = {}
        for value in self.program.values:
            names.setdefault(self.owners["value", value.name], []).append(value.name)
        for parameter in self.program.parameters:
            owner = self.owners["parameter", parameter.name]
            names.setdefault(owner, []).extend((parameter.name, *parameter.aliases))
            weights[owner] = weights.get(owner, 0) + 1
            self._cross(("parameter", parameter.name), parameter.type, parameter.trainable)
        for name in self.program.inputs:
            self._cross(("value", name), self.program.value_types()[name], False)
        scalars = (name for name in self.program.returned if not self.program.value_types()[name].shape)
        whole = {self.owners["value", name] for name in (*self.program.inputs, *scalars)}
        by_examples = self._read_by_examples()
        whole |= set(weights) if holds_weights_whole(self.axis) else self.travelled | by_examples
        unsummed = {*weights, *(self.owners["value", name] for name in self.program.returned)}
        read = {wire.source for wire in self.wires}
        crossings = Counter(self.owners["value", value.name] for value in self.program.values)
        for owner, (type, live) in self.crossing.items():
            allowed = list(self.states[owner])
            if owner in unsummed:
                allowed = [state for state in allowed if not isinstance(state, Partial)]
            if owner in whole:
                allowed = [Replicated()]
            elif owner in weights and owner not in read:  # any layout is allowed
                pinned = (state for pin, state in self.pins if any(map(pin.matches, names[owner])))
                allowed = [*dict.fromkeys([*allowed, *pinned])]
            alternatives = [
                Alternative(
                    label=state,
                    wants=(state,) * self.writers.get(owner, 0),
                    makes=(state,),
                    price=self._storage_price(owner, type, state, weights.get(owner, 0), crossings[owner] * live),
                )
                for state in allowed
                if self._fits(type, state)
            ]
            for name in names.get(owner, ()):
                if owner in self.travelled:  # the pass `experts` checks their pins
                    self.pins_met.update(pin.pattern for pin, _ in self.pins if pin.matches(name))
                    continue
                cut_batch = f"but --batch-over lets {self.axis} cut the batch in every call that reads it"
                why = cut_batch if owner in by_examples else _ILLEGAL
                alternatives = self._pinned(name, type, alternatives, lambda choice: choice.makes[0], why)
            self.nodes.append(Node(name=owner, alternatives=tuple(alternatives)))

    def _read_by_examples(self) -> set[Hashable]:
        """The weights that are only read by regions whose batch the axis cuts."""
        read: dict[str, list[bool]] = {}
        for call in self.program.calls:
            over = self.axis in self.program.region(call.region).batch_over
            for name in call.params:
                read.setdefault(name, []).append(over)
        return {self.owners["parameter", name] for name, over in read.items() if all(over)}

    def _storage_price(
        self, owner: Hashable, type: TensorType, state: Placement, weights: int, activations: int
    ) -> Price:
        """The price of storing this many weights or values that cross calls. Where activations are whole, every rank
        reads all of them, sends all of them to the next stage, and holds all of them for recomputation.
        """
        size = self._bytes(type)
        price = {"memory": max(weights, 1) * size / (self.n if isinstance(state, Shard) else 1)}
        if activations and not isinstance(state, Shard):
            price["repeated_bytes"] = activations * size * (1 - 1 / self.n)
        large = owner in self.multiplied or weights * size > self.small
        if holds_weights_whole(self.axis):
            return price
        if owner in self.looked_up | self.transformed | self.multiplied and large and not isinstance(state, Shard):
            price["replicated_weights"] = weights * size
        if owner in self.looked_up and isinstance(state, Shard) and state.dim != 0:
            price["table_columns"] = weights * size
        return price

    def _fits(self, type: TensorType, state: Placement) -> bool:
        where = {axis: type.layout.placement(axis) for axis in axis_order(self.sizes)}
        return Layout.build(type.shape, {**where, self.axis: state}, self.sizes) is not None

    def _pinned(
        self,
        name: str,
        type: TensorType,
        found: list[Alternative],
        seen: Callable[[Alternative], Hashable],
        why: str = _ILLEGAL,
    ) -> list[Alternative]:
        """The alternatives that satisfy the pin on this name; `why` ends the message if there are none."""
        for pin, placement in self.pins:
            if pin.matches(name):
                self.pins_met.add(pin.pattern)
                form = pin.form if holds_weights_whole(self.axis) else ""
                left = [choice for choice in found if seen(choice) == placement and _has_form(choice, form)]
                if not left:
                    legal = sorted({placement_text(type, seen(choice), self.axis) for choice in found})
                    raise PartcError(
                        "P0302",
                        f"--shard pins {name} {type.shape} to {pin.text}, {why}",
                        help=f"legal layouts: {'; '.join(legal)}",
                    )
                found = left
        return found


def expert_weights(graph: Graph, types: Mapping[str, TensorType]) -> frozenset[str]:
    """The weights of products and lookups by expert, and the values of which they are views."""
    products = [product for op in graph.ops if (product := ExpertMatmul.of(op))]
    chosen = {product.chosen: types[product.weights].shape[0] for product in products}
    lookups = [
        op
        for op in graph.ops
        if op.name == "index" and (refs := [*op.refs()])[1:] and types[refs[0]].shape[0] == chosen.get(refs[1])
    ]
    makers = graph.makers()
    wanted = [*(product.weights for product in products), *(next(op.refs()) for op in lookups)]
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.add(name)
            wanted += makers[name].refs() if name in makers else ()
    return frozenset(found)


def _unwritten(graph: Graph) -> frozenset[str]:
    """The values that stay within a kernel: results of elementwise operations and sums that one elementwise operation,
    sum or norm alone reads, perhaps as a view.
    """
    readers = graph.readers()
    outputs = {*graph.outputs}

    def reader(name: str) -> Op | None:
        """The only operation that reads a value; None if others do, or calls."""
        found = readers.get(name, [])
        if name in outputs or len(found) != 1:
            return None
        (op,) = found
        return reader(op.result.name) if op.name in VIEWS and len(op.results) == 1 else op

    def stays(op: Op) -> bool:
        if len(op.results) != 1 or kernels.kind(op) not in ("pointwise", "reduction"):
            return False
        found = reader(op.result.name)
        return found is not None and kernels.kind(found) in ("pointwise", "reduction", "composite")

    return frozenset(op.result.name for op in graph.ops if stays(op))


def _hiding(flops: float) -> float:
    """The bytes that a link moves during attention's products; backward has five products for two in forward (Dao
    2023).
    """
    return 3.5 * flops / _FLOPS_PER_BYTE


def _per_ring(type: TensorType, n: int) -> float:
    """The bytes that a ring sends per byte of whole keys: forward, backward, and for their gradients in fp32."""
    return 2 * (1 - 1 / n) + max(4, ITEMSIZE[type.dtype]) / ITEMSIZE[type.dtype]


def prefers_rows(q: TensorType, k: TensorType, v: TensorType, flops: float, n: int) -> bool:
    """Whether attention moves fewer bytes by rows, gathered or around a ring, than by heads."""
    wide = [math.prod(type.shape) * ITEMSIZE[type.dtype] for type in (q, k, v)]
    keys = wide[1] + wide[2]
    results = wide[0] * v.shape[-1] / q.shape[-1]
    sent = keys * _per_ring(k, n)
    ring = max(sent - _hiding(flops / n), _SEEN * sent)
    spare = 2 * (1 - 1 / n)
    return min(keys * spare, ring) < (keys + wide[0] + results) * spare / n


def _has_form(choice: Alternative, form: str) -> bool:
    """Whether attention takes this form; empty: any."""
    return not form or (_factor(choice) == RING) == (form == "ring")


def _factor(choice: Alternative) -> Hashable:
    """The factor that an alternative of an operation cuts."""
    return choice.label[0] if isinstance(choice.label, tuple) else None


def _is_ordered(op: Op) -> bool:
    """Whether the operation is attention with rows in an order that makes equal parts over cp equal work."""
    attention = Attention.of(op)
    return attention is not None and attention.zigzag > 0


def _result(position: int) -> Callable[[Alternative], Hashable]:
    return lambda choice: choice.makes[position]


def placement_text(type: TensorType, placement: Hashable, axis: str) -> str:
    """A placement on one axis in the notation of pins."""
    entries = ["_"] * len(type.shape)
    if isinstance(placement, Shard):
        entries[placement.dim] = f"@{axis}" if placement.outer == 1 else f"{placement.outer} * _@{axis}"
    return f"[{', '.join(entries)}]"


def _merged_slots(program: Program) -> Mapping[Slot, Hashable]:
    """The slots whose placements must agree: calls pass values and parameters without changing their layouts."""
    sets: DisjointSets[Slot] = DisjointSets()
    for slot in (*(("value", v.name) for v in program.values), *(("parameter", p.name) for p in program.parameters)):
        sets.of(slot)
    for call in program.calls:
        region = program.region(call.region)
        pairs: list[tuple[Slot, Slot]] = []
        pairs += ((("value", name), ("in", region.name, str(i))) for i, name in enumerate(call.args))
        pairs += ((("value", name), ("out", region.name, str(i))) for i, name in enumerate(call.results))
        pairs += (
            (("parameter", name), ("weight", region.name, value.name))
            for name, value in zip(call.params, region.params, strict=True)
        )
        for a, b in pairs:
            sets.join(a, b)
    for buffer, next_value in program.updates:
        sets.join(("parameter", buffer), ("value", next_value))
    return sets.representatives()
