"""Rewrite every region for one rank: insert collectives and make literal sizes local.

    gelu         = gelu(up)
    down_product = linear(gelu, down.weight)
    down         = add(down_product, down.bias)
  ->
    norm_full            = all_gather(norm, dim=1, outer=1, axis="tp")
    up                   = linear(norm_full, up.weight, up.bias)
    gelu                 = gelu(up)
    down_product_partial = linear(gelu, down.weight)
    down_product         = reduce_scatter(down_product_partial, dim=1, …)
    down                 = add(down_product, down.bias)

If an operation needs an operand in another layout, the cheapest chain of reshards produces it, once for all operations
that need the same. Reshards are differentiable; their transposes become the backward pass's collectives. If ranks hold
equal copies of a parameter and use them differently, its gradient must be reduced over these ranks: this is recorded on
the parameter, not inserted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partc.errors import InternalError, PartcError
from partc.ir.collectives import BY_TABLE, ROUTED
from partc.ir.gradients import gradient_inputs, reached, trainable_params
from partc.ir.layout import Layout, Sizes
from partc.ir.mesh import TIME_AXIS
from partc.ir.program import ITEMSIZE, Arg, Op, Program, Ref, Region, TensorType, Value
from partc.passes.sections import written_out
from partc.rules import localize
from partc.rules.tried import rule_of
from partc.sharding.choices import layouts
from partc.sharding.reshard import ReshardStep, plan

_SUFFIX = {
    "all_reduce": "sum",
    "reduce_scatter": "sum",
    "all_gather": "full",
    "unshard": "full",
    "shard": "shard",
    "take": "shard",
}
_REDUCING = frozenset({"all_reduce", "reduce_scatter"})
_SPREADING = frozenset({"put", "spread"})  # reshards of a whole or cut value to a partial one
# Reshards that need no other microbatch; for values without a gradient, also `shard`.
_IN_TIME = frozenset({"settle", "spread", "take"})


def partition(program: Program) -> Program:
    """Insert reshards and record gradient reductions.

    Raises PartcError P0402 if an operation needs the results of other microbatches.
    """
    needs, trainable = gradient_inputs(program), trainable_params(program)
    wanted = _boundaries(program)
    regions = tuple(
        _Local(region, wanted[region.name], program.sizes, needs[region.name] | trainable[region.name]).run()
        for region in program.regions
    )
    reduce = _reductions(program)
    summed = ((item, reduce.get(item.name, ()) if item.trainable else ()) for item in program.parameters)
    parameters = tuple(item if item.reduce == axes else item.replaced(reduce=axes) for item, axes in summed)
    return replace(program, regions=regions, parameters=parameters)


def _boundaries(program: Program) -> dict[str, tuple[Layout, ...]]:
    """For each region, the layouts that readers require of its outputs."""
    types = program.value_types()
    return {call.region: tuple(types[name].layout for name in call.results) for call in program.calls}


def _reductions(program: Program) -> dict[str, tuple[str, ...]]:
    """For each parameter, the mesh axes over which ranks hold equal copies and partial gradients."""
    found: dict[str, set[str]] = {}
    for call in program.calls:
        for name, value in zip(call.params, program.region(call.region).params, strict=True):
            found.setdefault(name, set()).update(value.type.layout.varying)
    return {name: tuple(axis for axis in program.mesh.names if axis in axes) for name, axes in found.items()}


class _Local:
    """Rewrites one region: records the type of every new value, and reshards operands on demand."""

    def __init__(self, region: Region, outputs: tuple[Layout, ...], sizes: Sizes, roots: frozenset[str]) -> None:
        if region.phase == "step":
            region, outputs = _whole_batch(region), tuple(layout.without(TIME_AXIS) for layout in outputs)
            sizes = {**sizes, TIME_AXIS: 1}
        self.region = region
        self.outputs = outputs
        self.sizes = sizes
        self.live = reached(region.forward, roots)
        self.types: dict[str, TensorType] = {
            value.name: value.type for value in (*region.params, *region.forward.inputs)
        }
        self.ops: list[Op] = []
        self.changed: dict[tuple[str, Layout], str] = {}
        self.taken = {*region.forward.definitions(), *self.types}

    def run(self) -> Region:
        for op in self.region.forward.ops:
            self._operation(op)
        makers = self.region.forward.makers()
        names = []
        for name, layout in zip(self.region.forward.outputs, self.outputs, strict=True):
            names.append(self._resharded(name, layout, makers.get(name)))
        graph = replace(self.region.forward, ops=tuple(self.ops), outputs=tuple(names))
        return _with_biases(_with_plain_names(replace(self.region, forward=graph)))

    def _operation(self, op: Op) -> None:
        if op.name == "incoming_gradient":
            self._incoming(op)
            return
        if op.name in ROUTED:
            self._routed(op)
            return
        if op.name in BY_TABLE:
            self.types.update((value.name, value.type) for value in op.results)
            self.ops.append(op)
            return
        types = {name: self.types[name] for name in op.refs()}
        rule = rule_of(op, types)
        found = layouts(op, rule, types, self.sizes)
        if found is None:
            raise InternalError(f"{op.source}: {op.name} was spread in a way its sizes don't allow")
        wanted, made = found
        operands = [self._resharded(name, layout, op) for name, layout in zip(op.refs(), wanted, strict=True)]
        local = op.laid_out(made)
        self.types.update((value.name, value.type) for value in local.results)
        if rule is not None:
            local = localize(local, rule, self.sizes)
        local = local.reading(operands)
        if "ways" in dict(local.attrs):
            operand = Value(name=operands[0], type=self.types[operands[0]])
            self.ops += written_out(local, operand, self.sizes, self._fresh)
        else:
            self.ops.append(local)

    def _routed(self, op: Op) -> None:
        """Rows that travel keep their layout except on the axis over which they travel."""
        moved, *plan = op.refs()
        layout = op.results[0].type.layout
        if plan:
            home = self.types[plan[op.name == "combine"]].layout
            layout = replace(layout, dims=(home.dims[0], *layout.dims[1:]))
        self.types.update((value.name, value.type) for value in op.results)
        self.ops.append(op.reading([self._resharded(moved, layout, op), *plan]))

    def _incoming(self, op: Op) -> None:
        """An incoming gradient has the dual of its result's layout, whatever its readers prefer."""
        (name,) = op.refs()
        owners = (each for each in self.region.forward.ops if each.name == "own_gradient")
        placed = {ref: value for each in owners for ref, value in zip(each.refs(), each.results, strict=False)}
        result = self._resharded(name, placed[name].type.layout, op)
        value = replace(op.result, type=replace(op.result.type, layout=placed[name].type.layout.dual()))
        self.types[value.name] = value.type
        self.ops.append(replace(op, args=(Ref(result),), results=(value,), choices=()))

    def _resharded(self, name: str, layout: Layout, reader: Op | None) -> str:
        """The name of the value in this layout; inserts the reshards if needed."""
        type = self.types[name]
        source, target = type.layout, layout
        if name not in self.live:  # without a gradient, varying and replicated are equivalent
            source, target = replace(source, varying=()), replace(target, varying=())
        if source == target:
            return name
        if (name, target) not in self.changed:
            self.changed[name, target] = self._insert(
                name, type, plan(source, target, sizes=self.sizes, itemsize=ITEMSIZE[type.dtype]), reader
            )
        return self.changed[name, target]

    def _insert(self, name: str, type: TensorType, steps: tuple[ReshardStep, ...], reader: Op | None) -> str:
        last = name
        for step in steps:
            if step.axis == TIME_AXIS and step.op not in _IN_TIME and (step.op != "shard" or name in self.live):
                raise PartcError(
                    "P0402",
                    f"{reader.name if reader else 'the result'} needs {name} of the whole batch,"
                    " but each microbatch makes its own part",
                    help="use --microbatches 1, or compute this value from the inputs alone",
                    source=reader.source if reader else None,
                )
            known = self.changed.get((name, step.result))
            if known is not None:
                last = known
                continue
            made = self._fresh(f"{name}_{_SUFFIX.get(step.op, step.axis)}")
            attrs: tuple[tuple[str, Arg], ...] = (*step.attrs, ("axis", step.axis))
            value = Value(name=made, type=replace(type, layout=step.result))
            self.types[made] = value.type
            if name in self.live:
                self.live.add(made)
            source = reader.source if reader else None
            self.ops.append(Op(name=step.op, args=(Ref(last),), attrs=attrs, results=(value,), source=source))
            self.changed[name, step.result] = last = made
        return last

    def _fresh(self, stem: str) -> str:
        name, count = stem, 1
        while name in self.taken:
            count += 1
            name = f"{stem}{count}"
        self.taken.add(name)
        return name


def _whole_batch(region: Region) -> Region:
    """The region with whole batches: a region that runs once per step sees all microbatches of its rank at once."""
    still = lambda value: replace(value, type=replace(value.type, layout=value.type.layout.without(TIME_AXIS)))  # noqa: E731
    ops = tuple(
        replace(
            op,
            choices=tuple(choice for choice in op.choices if choice.axis != TIME_AXIS),
            results=tuple(map(still, op.results)),
        )
        for op in region.forward.ops
    )
    forward = replace(region.forward, inputs=tuple(map(still, region.forward.inputs)), ops=ops)
    return replace(region, params=tuple(map(still, region.params)), forward=forward)


def _with_plain_names(region: Region) -> Region:
    """Rename a partial value whose only reader completes it, so that the complete sum has the plain name:
    `down_partial`, then `down`.
    """
    graph = region.forward
    uses = _uses(region)
    made = {value.name for op in graph.ops for value in op.results}
    names: dict[str, str] = {}
    for op in graph.ops:
        source = next(op.refs(), None)
        if op.name not in _REDUCING or source is None or source not in made:
            continue
        alone = uses[source] == 1 and source not in names.values()
        plain = op.result.name == f"{source}_sum" and f"{source}_partial" not in graph.definitions()
        if alone and plain:
            names[source], names[op.result.name] = f"{source}_partial", source
    return replace(region, forward=graph.rewritten((op.renamed(names) for op in graph.ops), names))


def _with_biases(region: Region) -> Region:
    """Join `add(linear(x, w), bias)` if no reduction stands between: one kernel computes both.

    Of a partial sum, a rank's bias may be its part of a parameter between zeros.
    """
    graph, uses = region.forward, _uses(region)
    biases = {value.name for value in region.params if len(value.type.shape) == 1}
    biases |= {op.result.name for op in graph.ops if op.name in _SPREADING and not biases.isdisjoint(op.refs())}
    products: Mapping[str, Op] = {
        op.result.name: op
        for op in graph.ops
        if op.name == "linear" and len(op.args) == 2 and uses[op.result.name] == 1
    }
    joined: dict[str, Op] = {}
    dropped: set[str] = set()
    for op in graph.ops:
        match op.name, op.args:
            case "add", (Ref(name=product), Ref(name=bias)) if product in products and bias in biases:
                joined[op.result.name] = replace(
                    products[product], args=(*products[product].args, Ref(bias)), results=op.results
                )
                dropped.add(product)
    ops = tuple(
        joined.get(op.results[0].name, op) if op.results else op
        for op in graph.ops
        if not (op.results and op.results[0].name in dropped)
    )
    return replace(region, forward=replace(graph, ops=ops))


def _uses(region: Region) -> dict[str, int]:
    uses = dict.fromkeys(region.forward.definitions(), 0)
    uses.update(dict.fromkeys((value.name for value in region.params), 0))
    for name in (*(name for op in region.forward.ops for name in op.refs()), *region.forward.outputs):
        uses[name] += 1
    return uses
