"""Mixed precision: bf16 or fp16 around matrix products, fp32 for sums and sensitive operations.

    parameter head.weight: f32[13, 8]
    param head.weight: f32[13, 8]
    head = linear(x, head.weight)          # f32[8, 4, 13]
    nll  = cross_entropy(head, labels, …)  # f32[8, 4]
  ->
    parameter head.weight: f32[13, 8]             # the optimizer's
    param head.weight: bf16[13, 8]
    head      = linear(x, head.weight)            # bf16[8, 4, 13]
    head_wide = to(head, <f32>)                   # f32[8, 4, 13]
    nll       = cross_entropy(head_wide, labels, …)  # f32[8, 4]

The operation table assigns each operation `low` (16 bits), `high` (fp32) or `any` (the type of its widest operand);
`casts` overrides it by name. The table follows torch's autocast, except that norms read and write 16 bits and sum in
fp32 inside. A bias, also one of each expert, is added in the precision of its product, as if one operation computed
both. Activations between calls have 16 bits. Single numbers, and values without gradients for weights, such as running
statistics and positions, keep the type of their computation, unless all operations read them in 16 bits. A parameter is
read in 16 bits if some operation wants it so, unless forward changes it or averages it into another one. The
optimizer's copy, and gradients summed over microbatches, stay fp32 (Micikevicius et al. 2018, Mixed Precision Training,
sections 3.1 and 3.3). If a table has sparse gradients, only the rows that a step looks up are cast. Constants, and
values computed once per step, are unchanged.

Operations inside `torch.autocast(…, enabled=False)`, and those on complex numbers, are `wide`: they run in fp32, as
under torch's autocast.

An operation with a number that 16 bits cannot hold runs in fp32, and its result stays fp32. Models mask scores with
the least number of their type, which a trace records as that of fp32. An elementwise operation with a number that
16 bits would round to zero likewise runs in fp32: models add and clamp to such numbers before logarithms and quotients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from partc.errors import PartcError, Source
from partc.ir.expert_products import ExpertMatmul
from partc.ir.gradients import reached
from partc.ir.naming import unique
from partc.ir.operations import VIEWS
from partc.ir.operators import DTYPES
from partc.ir.program import FLOATING, SCAN, Call, DType, DTypeArg, Op, Program, Ref, Region, TensorType, Value
from partc.ir.scans import scan_of
from partc.rules import Precision, is_elementwise, is_matmul, precision_of

_WIDE: DType = "f32"
_VIEWS = VIEWS | {"cat", "repeat"}
# A region, the types of its inputs, its parameters of 16 bits, inputs with numbers beyond, and outputs that keep types.
_Key = tuple[str, tuple[DType, ...], tuple[bool, ...], frozenset[int], frozenset[str]]


def precision(program: Program, *, low: DType | None = None, casts: Mapping[str, Precision] | None = None) -> Program:
    """Set element types and insert casts. `casts` overrides the table's precision of operations, by name.

    Raises PartcError P0216 for a gradient that the model defines itself and that fp16's loss scale would change.
    """
    if low is None:
        return program
    mixed = (op for region in program.regions for op in region.forward.ops if dict(op.attrs).get("mixed"))
    if low == "f16" and (op := next(mixed, None)) is not None:
        raise PartcError(
            "P0216",
            "a backward function or hook gives a gradient that is not proportional to the one it receives, "
            "and fp16 scales the loss",
            help="use bf16, or add the term to the loss",
            source=op.source,
        )
    return _Mixed(program, low, casts or {}).run()


def _beyond(region: Region, low: DType, given: frozenset[int]) -> set[str]:
    """The values of a region with a finite number that this type of 16 bits cannot hold, or that it would round to
    zero; `given` are such inputs.
    """
    limits = torch.finfo(DTYPES[low])
    most, least = limits.max, limits.smallest_normal * limits.eps / 2
    types = region.types(region.forward)
    found = {region.forward.inputs[index].name for index in given}
    for op in region.forward.ops:
        reads = [*op.refs()]
        copies = op.name in _VIEWS or not all(types[name].shape for name in reads)
        numbers = [abs(arg) for arg in op.args if isinstance(arg, float)]
        written = any(most < number < math.inf for number in numbers)
        written = written or (is_elementwise(op.name) and any(0 < number <= least for number in numbers))
        if written or (copies and not found.isdisjoint(reads)):
            found.update(value.name for value in op.results)
    return found


class _Mixed:
    """A walk over the calls in order; a region called with other input types gets a variant."""

    def __init__(self, program: Program, low: DType, casts: Mapping[str, Precision]) -> None:
        self.program = program
        self.low = low
        self.casts = casts
        self.variants: dict[_Key, Region] = {}
        self.beyond: set[str] = set()  # values with numbers that 16 bits cannot hold
        self.tables = {parameter.name for parameter in program.parameters if parameter.sparse}
        self._read_low = {region.name: tuple(dict.fromkeys(self._reads_low(region))) for region in program.regions}
        self.types = {name: type.dtype for name, type in program.value_types().items()}
        self.trained = {parameter.name for parameter in program.parameters if parameter.trainable}
        self.live: set[str] = set()  # activations: values from which gradients reach weights, also frozen ones
        self.updates = {value for _, value in program.updates}
        self.only_low = self._only_low()
        wide = {name for name, _ in program.updates} | {name for call in program.calls for name in self._averaged(call)}
        self.low_parameters = {name for call in program.calls for name in self._wanted_low(call)} - wide

    def run(self) -> Program:
        calls = tuple(map(self._call, self.program.calls))
        values = tuple(
            replace(value, type=replace(value.type, dtype=self.types[value.name])) for value in self.program.values
        )
        regions = tuple(self.variants.values())
        return replace(self.program, calls=calls, regions=regions, values=values, scaled=self.low == "f16")

    def _call(self, call: Call) -> Call:
        region = self.program.region(call.region)
        given = tuple(self.types[name] for name in call.args)
        lows = tuple(name in self.low_parameters for name in call.params)
        over = frozenset(index for index, name in enumerate(call.args) if name in self.beyond)
        beyond = _beyond(region, self.low, over)
        kept = self._kept(call, region)
        key = (region.name, given, lows, over, kept)
        if key not in self.variants:
            taken = {variant.name for variant in self.variants.values()}
            name = unique(region.name, taken)
            mixed = region.phase == "microbatch"
            self.variants[key] = replace(
                self._region(region, given, lows, beyond, kept) if mixed else region, name=name
            )
        variant = self.variants[key]
        made = {**variant.forward.definitions(), **{value.name: value for value in variant.params}}
        for name, output in zip(call.results, variant.forward.outputs, strict=True):
            self.types[name] = made[output].type.dtype
        outputs = zip(call.results, region.forward.outputs, strict=True)
        self.beyond.update(name for name, output in outputs if output in beyond)
        return replace(call, region=variant.name)

    def _region(
        self,
        region: Region,
        given: tuple[DType, ...],
        lows: tuple[bool, ...],
        beyond: set[str],
        kept: frozenset[str],
    ) -> Region:
        inputs = tuple(
            replace(value, type=replace(value.type, dtype=dtype))
            for value, dtype in zip(region.forward.inputs, given, strict=True)
        )
        params = tuple(
            replace(value, type=replace(value.type, dtype=self.low)) if low else value
            for value, low in zip(region.params, lows, strict=True)
        )
        taken = {*region.forward.definitions(), *(value.name for value in params)}
        writer = _CastWriter(self.low, (*inputs, *params), taken, beyond)
        for op, wanted in self._wanted(region):
            writer.operation(op, wanted)
        outputs = tuple(
            name
            if name in kept or name in writer.beyond
            else writer.as_dtype(name, self.low if self._travels(writer.types[name]) else _WIDE)
            for name in region.forward.outputs
        )
        forward = replace(region.forward, inputs=inputs, ops=tuple(writer.ops), outputs=outputs)
        return replace(region, params=params, forward=forward)

    def _wanted(self, region: Region) -> Iterator[tuple[Op, Precision]]:
        """All operations of a region with their precision."""
        params = {value.name for value in region.params}  # and their reshapes
        biases = {value.name for value in region.params if len(value.type.shape) == 1}
        experts = {product.chosen for op in region.forward.ops if (product := ExpertMatmul.of(op))}
        products: set[str] = set()
        for op in region.forward.ops:
            wanted = self.casts.get(op.name) or ("high" if op.wide else precision_of(op.name))
            op = replace(op, wide=False)
            reads = [*op.refs()]
            if op.name == "reshape" and params.issuperset(reads):
                params.add(op.result.name)
            elif is_matmul(op) and wanted == "low":
                products.update(value.name for value in op.results)
            elif op.name in self.casts or len(reads) != 2:
                pass
            elif op.name == "index" and reads[0] in params and reads[1] in experts:
                wanted = "low"
                biases.add(op.result.name)
            elif op.name == "add" and any(a in products and b in biases for a, b in (reads, reads[::-1])):
                wanted = "low"
            yield op, wanted

    def _kept(self, call: Call, region: Region) -> frozenset[str]:
        """The outputs of a call's region that keep the type of their computation: new values of buffers, and values
        that are not activations, unless all of their readers want 16 bits.
        """
        weights = self.trained | self.low_parameters
        roots = [value.name for value, name in zip(region.params, call.params, strict=True) if name in weights]
        roots += [value.name for value, name in zip(region.forward.inputs, call.args, strict=True) if name in self.live]
        live = reached(region.forward, roots)
        results = [*zip(region.forward.outputs, call.results, strict=True)]
        self.live.update(made for out, made in results if out in live)
        exact = {out for out, made in results if out not in live and made not in self.only_low}
        return frozenset(exact.union(out for out, made in results if made in self.updates))

    def _travels(self, type: TensorType) -> bool:
        """Whether a call's result is an activation rather than a loss or a count."""
        return bool(type.shape)

    def _averaged(self, call: Call) -> Iterator[str]:
        """The call's parameters from which forward computes new values of others without the batch, as a teacher's."""
        region = self.program.region(call.region)
        waiting = {out for out, made in zip(region.forward.outputs, call.results, strict=True) if made in self.updates}
        if not waiting:
            return
        own = dict(zip((value.name for value in region.params), call.params, strict=True))
        plain, makers = {*own}, dict[str, Op]()
        for op in region.forward.ops:
            if plain.issuperset(op.refs()):
                plain.update(value.name for value in op.results)
                makers.update((value.name, op) for value in op.results)
        read: set[str] = set()
        while waiting := (waiting & plain) - read:
            read |= waiting
            waiting = {name for value in waiting & makers.keys() for name in makers[value].refs()}
        yield from (own[name] for name in read & own.keys())

    def _wanted_low(self, call: Call) -> Iterator[str]:
        """The call's parameters that some operation reads in 16 bits, directly or through views."""
        for index, table in self._read_low[call.region]:
            if not table or call.params[index] not in self.tables:
                yield call.params[index]

    def _reads_low(self, region: Region) -> Iterator[tuple[int, bool]]:
        """The parameters of a region that an operation reads in 16 bits, by index, and whether as a table."""
        indices = {value.name: index for index, value in enumerate(region.params)}
        for name, op, wanted in self._reads(region, region.params):
            if wanted == "low":
                yield indices[name], op == "embedding"

    def _only_low(self) -> set[str]:
        """The values that every operation reads in 16 bits, directly or through views."""
        reads = {region.name: {*self._reads(region, region.forward.inputs)} for region in self.program.regions}
        found: dict[str, set[Precision]] = {}
        for call in self.program.calls:
            inputs = self.program.region(call.region).forward.inputs
            names = dict(zip((value.name for value in inputs), call.args, strict=True))
            for name, _, wanted in reads[call.region]:
                found.setdefault(names[name], set()).add(wanted)
        return {name for name, wanted in found.items() if wanted == {"low"}}

    def _reads(self, region: Region, given: tuple[Value, ...]) -> Iterator[tuple[str, str, Precision]]:
        """The reads of given fp32 values by operations, directly or through views: value, operation, precision."""
        if region.phase != "microbatch":
            return
        views = {value.name: value.name for value in given if value.type.dtype == _WIDE}
        for op, wanted in self._wanted(region):
            read = [views[name] for name in op.refs() if name in views]
            if op.name in _VIEWS and read:
                views.update((result.name, read[0]) for result in op.results)
            else:
                yield from ((name, op.name, wanted) for name in read)


class _CastWriter:
    """Rewrites a region's operations, with casts for operands of other types."""

    def __init__(self, low: DType, given: tuple[Value, ...], taken: set[str], beyond: set[str]) -> None:
        self.low = low
        self.beyond = beyond  # values with numbers that 16 bits cannot hold
        self.types = {value.name: value.type for value in given}
        self.taken = taken
        self.sources: dict[str, Source | None] = {}
        self.ops: list[Op] = []
        self.cast: dict[tuple[str, DType], str] = {}

    def operation(self, op: Op, wanted: Precision) -> None:
        """Add an operation in the precision that its kind and operands determine."""
        if op.name == "own_gradient":
            self._own_gradient(op)
            return
        if op.name == SCAN:
            self._scan(op)
            return
        if op.name == "embedding" and wanted == "low" and self.types[next(op.refs())].dtype == _WIDE:
            self._lookup(op)
            return
        operands = [name for name in op.refs() if self.types[name].dtype in FLOATING]
        fixed = any(isinstance(arg, DTypeArg) for arg in (*op.args, *(value for _, value in op.attrs)))
        # A single number takes the type of the other operand, as in torch.
        tensors = [name for name in operands if self.types[name].shape] or operands
        mixed = {self.types[name].dtype for name in tensors} & {self.low, _WIDE}
        beyond = not self.beyond.isdisjoint(value.name for value in op.results)
        dtype: DType | None = None
        if wanted == "low" and operands:
            dtype = self.low
        elif (wanted == "high" and operands) or len(mixed) > 1 or (beyond and mixed):
            dtype = _WIDE
        elif mixed:
            (dtype,) = mixed
        if dtype is not None and not (fixed and op.name == "to"):
            cast = operands if wanted != "any" else tensors
            op = op.renamed({name: self.as_dtype(name, dtype) for name in cast})
        if dtype is not None and not fixed:
            op = replace(op, results=tuple(self._typed(value, dtype) for value in op.results))
        self._add(op)

    def _lookup(self, op: Op) -> None:
        """Cast the rows that a step looks up instead of the table."""
        rows = replace(op.result, name=unique(f"{op.result.name}_wide", self.taken))
        self._add(replace(op, results=(rows,)))
        result = self._typed(op.result, self.low)
        self._add(Op(name="to", args=(Ref(rows.name), DTypeArg(self.low)), results=(result,), source=op.source))

    def _scan(self, op: Op) -> None:
        """Keep the model's types in a scan, because its states are sums over time."""
        inputs = (value.type.dtype for value in scan_of(op).step.inputs)
        self._add(op.renamed({name: self.as_dtype(name, dtype) for name, dtype in zip(op.refs(), inputs, strict=True)}))

    def _own_gradient(self, op: Op) -> None:
        """Cast each gradient to the type of its operand, and each result to the type of the value that it equals.

        A gradient that depends on no incoming one is multiplied by fp16's loss scale here.
        """
        given, operands, gradients = (tuple(ref.name for ref in each) for each in op.args)  # type: ignore[union-attr]
        if self.low == "f16":
            alone = dict(op.attrs).get("alone", ())
            assert isinstance(alone, tuple)
            gradients = tuple(
                self._scaled(name, op) if index in alone else name for index, name in enumerate(gradients)
            )
        cast = tuple(
            Ref(self.as_dtype(gradient, self.types[operand].dtype))
            for operand, gradient in zip(operands, gradients, strict=True)
        )
        results = tuple(
            replace(value, type=replace(value.type, dtype=self.types[name].dtype))
            for name, value in zip(given, op.results, strict=True)
        )
        self._add(replace(op, args=(*op.args[:2], cast), results=results))

    def _scaled(self, gradient: str, op: Op) -> str:
        made = replace(self.types[gradient], dtype=_WIDE)
        value = Value(name=unique(f"{gradient}_scaled", self.taken), type=made)
        wide = self.as_dtype(gradient, _WIDE)
        self._add(Op(name="times_loss_scale", args=(Ref(wide),), results=(value,), source=op.source))
        return value.name

    def as_dtype(self, name: str, dtype: DType) -> str:
        """The value's name in this type, after a cast if needed."""
        type = self.types[name]
        if type.dtype == dtype or type.dtype not in (self.low, _WIDE):
            return name
        if (name, dtype) not in self.cast:
            made = unique(f"{name}_{'wide' if dtype == _WIDE else dtype}", self.taken)
            value = Value(name=made, type=replace(type, dtype=dtype))
            source = self.sources.get(name)
            self._add(Op(name="to", args=(Ref(name), DTypeArg(dtype)), results=(value,), source=source))
            self.cast[name, dtype] = made
        return self.cast[name, dtype]

    def _add(self, op: Op) -> None:
        self.ops.append(op)
        for value in op.results:
            self.types[value.name] = value.type
            self.sources[value.name] = op.source

    @staticmethod
    def _typed(value: Value, dtype: DType) -> Value:
        return value if value.type.dtype != _WIDE else replace(value, type=replace(value.type, dtype=dtype))
