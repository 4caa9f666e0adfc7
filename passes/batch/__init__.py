"""Distribute the batch over data-parallel ranks (space) and microbatches (time).

    region head phase microbatch:
      param head.weight: f32[13, 8]
      input x: f32[8, 4, 8]
      head    = linear(x, head.weight)    # f32[8, 4, 13]
      nll_sum = sum(nll, (0, 1), False)   # f32[]
  ->
    region head phase microbatch:
      param head.weight: f32[13, 8] vary(dp,mb)
      input x: f32[8@dp,mb, 4, 8]
      head    = linear(x, head.weight)    # f32[8@dp,mb, 4, 13] | {b0@dp b0@mb}
      nll_sum = sum(nll, (0, 1), False)   # f32[] partial(dp,mb) | {d0@dp d0@mb}

The batch dimension is followed through the factors of every operation. Values without it vary, so that their gradients
are summed over the batch once, at the end of a step. A value that needs the whole batch (such as the number of labels
that count) is computed once per step, if it depends on inputs only: inside a region, it first gets a call of its own.
Any other operation that needs the whole batch in the middle of a microbatch is an error. Without microbatches, ranks
share it by another of its factors. Where rows of the examples come from no input, as the positions of OPT do,
operations are cut as their readers are, and so are constants.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from partc.errors import PartcError
from partc.ir.gradients import input_only
from partc.ir.layout import Layout, Partial, Placement, Replicated, Shard, Varying
from partc.ir.mesh import TIME_AXIS
from partc.ir.naming import unique
from partc.ir.operations import RANDOM
from partc.ir.program import FLOATING, Call, Choice, Op, Program, Region, TensorType, Value
from partc.passes.batch.by_readers import cut_as_read, divides, factor_at, with_cut_values
from partc.rules import PARTIAL, OpRule, placements
from partc.rules.tried import rule_of
from partc.sharding.choices import batch_axes

_BAGS = frozenset({"bag_sum", "bag_max"})


def batch(program: Program) -> Program:
    """Choose every operation's factor on the batch axes, and set every value's layout there.

    Raises PartcError P0401 (the batch does not divide), P0402 (an operation needs the whole batch, or a buffer changes
    in every microbatch).
    """
    # The batch is followed even without data parallelism and microbatches, so that no other axis cuts it.
    axes = batch_axes(program.sizes) or (TIME_AXIS,)
    for over in {(), *(region.batch_over for region in program.regions)}:
        check_divisible(program, over)
    _check_updates(program)
    summed: frozenset[str] = frozenset()  # program values that are needed complete, summed over the batch
    while True:
        walk = _Walk(program, axes, summed)
        result = walk.run()
        if program.sizes[TIME_AXIS] > 1:
            for region, value in walk.inside:
                program, made = _called_apart(program, region, value)
                walk.demanded |= made
        if walk.demanded <= summed:
            apart, made = _split_off(program, result, summed) if program.sizes[TIME_AXIS] > 1 else (program, set())
            if apart is program:
                return with_cut_values(result, axes, summed)
            program, walk.demanded = apart, made
        summed |= walk.demanded


def _called_apart(program: Program, name: str, value: str) -> tuple[Program, set[str]]:
    """Compute a value of a region in calls of its own, from inputs and constants.

    Returns the new program and the names of the calls' results; the same program and no names if the value depends on
    anything else, or if it is already dead.
    """
    region = program.region(name)
    if value not in region.forward.definitions():
        return program, set()
    graph = replace(region.forward, outputs=(value,)).without_dead()
    read = {ref for op in graph.ops for ref in op.refs()}
    held = {  # by call: the parameters that the value depends on
        call.name: tuple(each for x, each in zip(region.params, call.params, strict=True) if x.name in read)
        for call in program.calls_to(name)
    }
    fixed = _constants(program).issuperset(each for params in held.values() for each in params)
    apart = None if not fixed or any(op.name in RANDOM for op in graph.ops) else _arguments_apart(program, region, read)
    if apart is None:
        return program, set()
    program, known = apart
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
    calls: list[Call] = []
    taken, names = set(program.value_types()), {call.name for call in program.calls}
    own = unique(f"make_{value}", {each.name for each in program.regions})
    type = graph.definitions()[value].type
    for call in program.calls:
        if call.region != name:
            calls.append(call)
            continue
        given = tuple(known[arg] for x, arg in zip(region.forward.inputs, call.args, strict=True) if x.name in read)
        key = given, held[call.name]
        if key not in found:
            found[key] = unique(value, taken)
            calls.append(Call(name=unique(own, names), region=own, params=key[1], args=key[0], results=(found[key],)))
        calls.append(replace(call, args=(*call.args, found[key])))
    rest = region.forward
    rest = replace(
        rest,
        inputs=(*rest.inputs, Value(name=value, type=type)),
        ops=tuple(part for op in rest.ops for part in _for_other_results(op, value, taken)),
    ).without_dead()
    inputs, params = (tuple(x for x in every if x.name in read) for every in (region.forward.inputs, region.params))
    made = Region(name=own, params=params, forward=replace(graph, inputs=inputs))
    regions = [replace(each, forward=rest) if each.name == name else each for each in program.regions]
    values = (*program.values, *(Value(name=each, type=type) for each in found.values()))
    return replace(program, regions=(made, *regions), calls=tuple(calls), values=values), set(found.values())


def _arguments_apart(program: Program, region: Region, read: Collection[str]) -> tuple[Program, dict[str, str]] | None:
    """Compute the arguments of a region's calls, for the inputs in `read`, from inputs and constants alone.

    Returns the new program and, by argument, the equal value that its calls compute; None if an argument depends on
    anything else.
    """
    known: dict[str, str] = {}
    for call in program.calls_to(region.name):
        for x, arg in zip(region.forward.inputs, call.args, strict=True):
            if x.name in read and arg not in known:
                made = _result_apart(program, arg)
                if made is None:
                    return None
                program, known[arg] = made
    return program, known


def _constants(program: Program) -> frozenset[str]:
    """Parameters that neither the optimizer nor forward changes."""
    changing = {buffer for buffer, _ in program.updates}
    return frozenset(parameter.name for parameter in program.parameters if not parameter.trainable) - changing


def _result_apart(program: Program, name: str) -> tuple[Program, str] | None:
    """A program in which calls make the value `name` from inputs and constants alone, and the value's name there.

    A call that also makes other values, such as embedded words and a mask of the words, gets a second call before
    it that makes the value alone. The result is None if the value depends on anything else.
    """
    if name in program.inputs:
        return program, name
    call = next(call for call in program.calls if name in call.results)
    if call.name in input_only(program):
        return program, name
    region, own = _restricted(program, call, (name,))
    if any(op.name in RANDOM for op in region.forward.ops) or not _constants(program).issuperset(own.params):
        return None
    args = []
    for arg in own.args:
        made = _result_apart(program, arg)
        if made is None:
            return None
        program = made[0]
        args.append(made[1])
    types = program.value_types()
    result = unique(f"{name}_known", {*types})
    region = replace(region, name=unique(f"{region.name}_known", {each.name for each in program.regions}))
    calls = list(program.calls)
    own = replace(
        own, name=unique(f"{call.name}_known", {each.name for each in calls}), region=region.name,
        args=tuple(args), results=(result,),
    )  # fmt: skip
    calls.insert(calls.index(call), own)
    return replace(
        program,
        regions=(region, *program.regions),
        calls=tuple(calls),
        values=(*program.values, Value(name=result, type=types[name])),
    ), result


def _for_other_results(op: Op, value: str, taken: set[str]) -> tuple[Op, ...]:
    """The operation for its results other than `value`, which is computed elsewhere; empty if there are none."""
    if all(result.name != value for result in op.results):
        return (op,)
    if len(op.results) == 1:
        return ()
    unread = unique(f"{value}_unread", taken)
    return (replace(op, results=tuple(replace(r, name=unread) if r.name == value else r for r in op.results)),)


def _restricted_call(program: Program, call: Call, results: tuple[str, ...]) -> tuple[Region, Call]:
    """`_restricted` for a call whose other results are computed apart. Raises PartcError P0402 if it draws numbers."""
    random = next((op for op in program.region(call.region).forward.ops if op.name in RANDOM), None)
    if random is not None:
        raise PartcError(
            "P0402",
            "a call draws random numbers and computes a value from the whole batch",
            help="use --microbatches 1",
            source=random.source,
        )
    return _restricted(program, call, results)


def _restricted(program: Program, call: Call, results: tuple[str, ...]) -> tuple[Region, Call]:
    """A region and call that compute only some of a call's results, under the same names."""
    region = program.region(call.region)
    outputs = dict(zip(call.results, region.forward.outputs, strict=True))
    graph = replace(region.forward, outputs=tuple(outputs[name] for name in results)).without_dead()
    read = {ref for op in graph.ops for ref in op.refs()}.union(graph.outputs)
    args = [pair for pair in zip(graph.inputs, call.args, strict=True) if pair[0].name in read]
    params = [pair for pair in zip(region.params, call.params, strict=True) if pair[0].name in read]
    graph = replace(graph, inputs=tuple(value for value, _ in args))
    return (
        replace(region, params=tuple(value for value, _ in params), forward=graph),
        replace(call, args=tuple(x for _, x in args), params=tuple(x for _, x in params), results=results),
    )


def _split_off(program: Program, walked: Program, summed: frozenset[str]) -> tuple[Program, set[str]]:
    """Give values that are computed once a step calls of their own; returns the program and the names of new values.

    `walked` has the phases of the calls. Values that are not in `summed` are computed in parts, one per microbatch. A
    call that computes both kinds becomes two. If a call that runs once a step reads parts, a further call computes
    NAME_whole for it.
    """
    phases = {region.name: region.phase for region in walked.regions}
    parts = {name for call in walked.calls if phases[call.region] != "setup" for name in call.results} - summed
    once = {call.name for call in walked.calls if phases[call.region] == "step"}
    mixed = {call.name for call in program.calls if call.name in once and not parts.isdisjoint(call.results)}
    read = {name for call in program.calls if call.name in once - mixed for name in call.args if name in parts}
    if not mixed and not read:
        return program, set()
    types, taken = program.value_types(), set(program.value_types())
    names, regions = {call.name for call in program.calls}, {region.name for region in program.regions}
    whole = {name: unique(f"{name}_whole", taken) for name in sorted(read)}
    calls: list[Call] = []
    made: list[Region] = []

    def add(call: Call, results: tuple[str, ...], renamed: Mapping[str, str]) -> None:
        region, own = _restricted_call(program, call, results)
        made.append(replace(region, name=unique(f"{region.name}_apart", regions)))
        calls.append(
            replace(
                own,
                name=unique(f"{call.name}_apart", names),
                region=made[-1].name,
                results=tuple(renamed.get(name, name) for name in results),
            )
        )

    for call in program.calls:
        if call.name in mixed:
            add(call, tuple(name for name in call.results if name in summed), {})
            add(call, tuple(name for name in call.results if name in parts), {})
        else:
            given = whole if call.name in once else {}
            calls.append(replace(call, args=tuple(given.get(name, name) for name in call.args)))
        if again := tuple(name for name in call.results if name in whole):
            add(call, again, whole)
    values = (*program.values, *(Value(name=whole[name], type=types[name]) for name in whole))
    called = {call.region for call in calls}
    kept = tuple(region for region in (*made, *program.regions) if region.name in called)
    return replace(program, regions=kept, calls=tuple(calls), values=values), set(whole.values())


def check_divisible(program: Program, over: Collection[str] = ()) -> None:
    """Raise PartcError P0401 if the batch does not divide over its axes, and over the further axes `over`."""
    types = program.value_types()
    entries = program.batch_entries
    if not entries:
        raise PartcError(
            "P0401",
            "every entry of the batch is a scalar",
            help="give batch() a tensor whose first dimension is the batch",
        )
    size, ranks, steps = types[entries[0]].shape[0], _batch_parts(program), program.sizes[TIME_AXIS]
    axes = [(axis, program.sizes[axis]) for axis in program.mesh.names if axis in over]
    parts = ranks * steps * math.prod(ways for _, ways in axes)
    if size % parts:
        counts = [(steps, "microbatches"), (ranks, "ranks"), *((ways, f"ranks of {axis}") for axis, ways in axes)]
        into = " x ".join(f"{count} {noun}" for count, noun in counts if count > 1)
        rows = next((rows for name in entries if (rows := types[name].shape[0]) % parts == 0), None)
        other = f"; or put an entry of {rows} rows first in batch(), as {entries[0]!r} counts the examples now"
        raise PartcError(
            "P0401",
            f"a batch of {size} does not divide into {into}",
            help=f"make it a multiple of {parts}, or lower --microbatches{'' if rows is None else other}",
        )


def _check_updates(program: Program) -> None:
    if not program.updates or program.microbatches == 1 or program.separate_batches:
        return
    buffer, made = program.updates[0]
    raise PartcError(
        "P0402",
        f"forward updates {buffer} once for each microbatch",
        help="use --microbatches 1",
        source=program.source_of(made),
    )


def _batch_parts(program: Program) -> int:
    return math.prod(program.sizes[axis] for axis in batch_axes(program.sizes) if axis != TIME_AXIS)


class _Walk:
    """One walk over the calls in order; regions called with other placements become variants."""

    def __init__(self, program: Program, axes: tuple[str, ...], summed: frozenset[str]) -> None:
        self.program = program
        self.axes = axes
        self.summed = summed
        self.demanded: set[str] = set()
        self.inside: dict[tuple[str, str], None] = {}  # (region, value) that must be complete over the batch
        self.names = {region.name for region in program.regions}
        # By region, placements of arguments, fixed placements of results, and whether it runs once per step.
        self.variants: dict[tuple[str, object, object, bool], tuple[Region, tuple[Placement, ...]]] = {}
        self.values: dict[str, Placement] = {}
        self.pure = input_only(program)
        self.updates = {value for _, value in program.updates}
        types = program.value_types()
        self.scalars = {name for name in program.returned if not types[name].shape}
        self.batch = types[program.batch_entries[0]].shape[0]

    def run(self) -> Program:
        entries = set(self.program.batch_entries)
        for name in self.program.inputs:
            whole = name not in entries or (name in self.summed and _is_list(self.program.step_input(name)))
            self.values[name] = Varying() if whole else Shard(0)
        calls = tuple(self._call(call) for call in self.program.calls)
        values = tuple(
            replace(value, type=self._typed(value.type, self.values[value.name], value.name, None))
            for value in self.program.values
        )
        return replace(
            self.program, calls=calls, regions=tuple(region for region, _ in self.variants.values()), values=values
        )

    def _call(self, call: Call) -> Call:
        region = self.program.region(call.region)
        given = tuple(self.values[name] for name in call.args)
        fixed = tuple(self._fixed(name, call) for name in call.results)
        step = any(name in self.summed for name in call.results) and call.name in self.pure
        step = step and not self.program.separate_batches
        key = (region.name, given, fixed, step)
        if key not in self.variants:
            met = any(name == region.name for name, *_ in self.variants)
            name = unique(region.name, self.names) if met else region.name
            self.variants[key] = self._region(replace(region, name=name), given, call, step)
        variant, given_back = self.variants[key]
        for name, own, placement in zip(call.results, fixed, given_back, strict=True):
            self.values[name] = own or placement
        return replace(call, region=variant.name)

    def _fixed(self, name: str, call: Call) -> Placement | None:
        """The placement of a call's result that does not depend on the region; None if it does."""
        if name in self.updates or (name in self.summed and call.name in self.pure):
            return Varying()
        return Partial() if name in self.scalars else None

    def _region(
        self, region: Region, given: tuple[Placement, ...], call: Call, step: bool
    ) -> tuple[Region, tuple[Placement, ...]]:
        """The region with its choices, and the placements of its outputs."""
        if region.phase == "setup":
            return region, (Replicated(),) * len(region.forward.outputs)
        placed: dict[str, Placement] = dict(zip((v.name for v in region.forward.inputs), given, strict=True))
        placed.update((value.name, Varying()) for value in region.params)
        types = region.forward.types()
        types.update((value.name, value.type) for value in region.params)
        arguments = dict(zip((v.name for v in region.forward.inputs), call.args, strict=True))
        ops: list[Op] = []
        complete = self._complete(region, types, dict(placed), call, arguments)
        for op in region.forward.ops:
            rule = rule_of(op, types)
            read = [Varying() if name in complete else placed[name] for name in op.refs()]
            self._check_bags(op, read)
            choices, whole = self._choices(op, rule, read, arguments)
            if not step:
                self.inside.update(((call.region, name), None) for name in whole if name not in arguments)
            op = replace(op, choices=choices)
            made = self._results(op, rule)
            placed.update((value.name, placement) for value, placement in zip(op.results, made, strict=True))
            results = tuple(
                replace(value, type=self._typed(value.type, placement, value.name, op))
                for value, placement in zip(op.results, made, strict=True)
            )
            ops.append(replace(op, results=results))
        if not step:
            ops = cut_as_read(ops, types, dict.fromkeys(region.forward.outputs), self.axes, self.program.sizes)
        typed = lambda value: replace(value, type=self._typed(value.type, placed[value.name], value.name, None))  # noqa: E731
        forward = replace(region.forward, inputs=tuple(map(typed, region.forward.inputs)), ops=tuple(ops))
        phase = "step" if step else region.phase
        variant = replace(region, params=tuple(map(typed, region.params)), forward=forward, phase=phase)
        return variant, tuple(placed[name] for name in region.forward.outputs)

    def _complete(
        self,
        region: Region,
        types: Mapping[str, TensorType],
        placed: dict[str, Placement],
        call: Call,
        arguments: Mapping[str, str],
    ) -> frozenset[str]:
        """The sums over the batch that some reader needs complete; every reader then reads the result of one
        collective.

        Otherwise the difference of two equal sums might not be zero: one would be complete, and the other a sum of
        differences over ranks, which rounds differently. Views and multiples of a complete sum are complete, too.
        """
        if self.program.sizes[TIME_AXIS] > 1:
            return frozenset()  # sums over microbatches are complete at the end of a step
        updated = (x for x, name in zip(region.forward.outputs, call.results, strict=True) if name in self.updates)
        needed: set[str] = set()
        made: dict[str, str] = {}  # result of a linear operation -> its only partial operand, if that is no larger
        elements = {name: math.prod(type.shape) for name, type in types.items()}
        for op in region.forward.ops:
            rule, names = rule_of(op, types), [*op.refs()]
            given = [placed[name] for name in names]
            unread = rule.unread if rule is not None else ()
            partial = {x for i, x in enumerate(names) if isinstance(given[i], Partial) and i not in unread}
            choices, _ = self._choices(op, rule, given, arguments)
            if not (choices[0].factor or "").startswith(PARTIAL):
                needed |= partial
            elif len(partial) == 1 and elements[only := partial.pop()] <= elements[op.results[0].name]:
                made.update((value.name, only) for value in op.results)
            results = self._results(replace(op, choices=choices), rule)
            placed.update((value.name, placement) for value, placement in zip(op.results, results, strict=True))
        needed.update(name for name in updated if isinstance(placed[name], Partial))
        for name in [*needed]:
            while name in made:
                needed.add(name := made[name])
        return frozenset(needed)

    def _choices(
        self, op: Op, rule: OpRule | None, given: list[Placement], arguments: Mapping[str, str]
    ) -> tuple[tuple[Choice, ...], tuple[str, ...]]:
        """The choices on the batch axes: the factor that carries the batch, a partial sum that passes through, or none.
        And the values that the operation needs complete.
        """
        if rule is not None and (copies := self._copies(op, rule)) is not None:
            return tuple(Choice(axis=axis, factor=copies) for axis in self.axes), ()
        cut = [(index, placement) for index, placement in enumerate(given) if isinstance(placement, Shard)]
        unread = rule.unread if rule is not None else ()
        partial = [
            index for index, placement in enumerate(given) if isinstance(placement, Partial) and index not in unread
        ]
        names = list(op.refs())
        if rule is not None and cut and (carrier := self._carrier(rule, cut)) is not None:
            self.demanded.update(arguments[names[index]] for index in partial if names[index] in arguments)
            whole = tuple(names[index] for index in partial)
            return tuple(Choice(axis=axis, factor=carrier[0], outer=carrier[1]) for axis in self.axes), whole
        if not cut and partial and rule is not None:
            group = next((i for i, members in enumerate(rule.linear) if set(partial) <= set(members)), None)
            if group is not None:
                return tuple(Choice(axis=axis, factor=f"{PARTIAL}{group}") for axis in self.axes), ()
        for index in (*(index for index, _ in cut), *partial):
            if names[index] in arguments:
                self.demanded.add(arguments[names[index]])
        results = tuple(value.name for value in op.results) if cut or partial else ()
        return tuple(Choice(axis=axis, factor=None) for axis in self.axes), results

    def _carrier(self, rule: OpRule, cut: Sequence[tuple[int, Shard]]) -> tuple[str, int] | None:
        """The factor that carries the batch, and its `outer`: all operands that are cut are cut there.

        With one microbatch, ranks also share operations that read the whole batch, such as the products of all pairs of
        examples. The factor is then the one of the largest operands that are cut, or else the outermost of the first
        result. Other operands are gathered.
        """
        factors = {factor.name: factor for factor in rule.factors}
        sizes = self.program.sizes
        made = [name for dim in rule.results[0] for name in dim]
        found: dict[tuple[str, int] | None, int] = {}
        for index, placement in cut:
            at = factor_at(rule.operands[index], rule, placement)
            elements = math.prod(factors[name].size for dim in rule.operands[index] for name in dim)
            found[at] = found.get(at, 0) + elements
        place = {name: index for index, name in enumerate(made)}
        carried = sorted(filter(None, found), key=lambda at: (-found[at], place.get(at[0], len(made))))
        if sizes[TIME_AXIS] == 1:
            carried += [(name, 1) for name in made if factors[name].kind == "parallel"]
        elif len(found) > 1:
            return None
        return next((at for at in carried if divides(rule, *at, self.axes, sizes)), None)

    def _check_bags(self, op: Op, given: list[Placement]) -> None:
        """Raise PartcError P0402 if a list of ids is taken for the batch, although bags are its examples."""
        if op.name in _BAGS and op.result.type.shape[0] != self.batch and isinstance(given[0], Shard):
            first = self.program.batch_entries[0]
            raise PartcError(
                "P0402",
                f"bags begin at offsets in {first!r}, which counts as a batch of {self.batch} examples",
                help="the first entry of batch() gives the number of examples: put one before the ids that has "
                f"{op.result.type.shape[0]} rows, a row for each bag",
                source=op.source,
            )

    def _copies(self, op: Op, rule: OpRule) -> str | None:
        """The batch factor of an operation whose operands are equal on all ranks: each rank computes its own examples.

        Such are an expand that copies one row for every example, and bags, which are sums or maxima of rows.
        """
        shape = op.results[0].type.shape if op.name == "expand" or op.name in _BAGS else ()
        if not shape or shape[0] != self.batch or not rule.results[0][0]:
            return None
        factor = rule.results[0][0][0]
        carried = any(factor in names for dims in rule.operands for names in dims)
        return None if carried and op.name == "expand" else factor

    def _results(self, op: Op, rule: OpRule | None) -> tuple[Placement, ...]:
        if rule is None:
            return tuple(Varying() for _ in op.results)
        return placements(op, rule, op.choices[0])[1]

    def _typed(self, type: TensorType, placement: Placement, name: str, op: Op | None) -> TensorType:
        if isinstance(placement, Varying) and type.dtype not in FLOATING:
            placement = Replicated()
        layout = Layout.build(type.shape, dict.fromkeys(self.axes, placement), self.program.sizes)
        if layout is None:
            dim = placement.dim if isinstance(placement, Shard) else 0
            raise PartcError(
                "P0401",
                f"dimension {dim} of {name} ({type.shape[dim]}) does not divide over {' x '.join(self.axes)}",
                help="use a batch that divides, or fewer microbatches",
                source=op.source if op else None,
            )
        return replace(type, layout=layout)


def _is_list(type: TensorType) -> bool:
    """Whether a batch entry is a list of integers, such as offsets, that may be replicated on all ranks."""
    return len(type.shape) == 1 and type.dtype not in FLOATING
