"""Count in a step whether a gradient reaches the parameters that some steps leave out.

    reach blocks.0.experts.0.up.weight if reached_2
    …
    reach blocks.0.experts.1.up.weight if reached_3
    …
    eq_1      = eq(getitem_1, 0)                                       # bool[32, 2]
    eq_1_f32  = to(eq_1, <f32>)                                        # f32[32, 2]
    reached_2 = sum(eq_1_f32, (0, 1), False)                           # f32[]
    …
    linear_2_product_of_experts = expert_matmul(reshape_rows_3, experts, …)
  ->
    parameter blocks.0.experts.0.up.weight.reached: f32[4] counts(…) counts(…) counts(…) counts(…)
    …
    reshape_rows_3_value        = detach(reshape_rows_3)                        # f32[64, 8]
    reshape_rows_3_gradient     = incoming_gradient(reshape_rows_3_value)       # f32[64, 8]
    numbers                     = to(getitem_1, <f32>)                          # f32[32, 2]
    counts                      = histc(numbers, 4, 0, 3)                       # f32[4]
    reshape_rows_3_counted      = own_gradient((reshape_rows_3_value,), (reshape_rows_3, …_reached), …)
    linear_2_product_of_experts = expert_matmul(reshape_rows_3_counted, experts, …)

The counts are the gradient of a parameter that only exists for them: like all gradients they are summed over ranks and
microbatches once a step, and recomputation does not repeat them. Where a count is 0, the optimizer leaves the parameter
and its states as they are, as torch's optimizers do with parameters without a gradient (`runtime/optimizer/reach.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from partc.errors import InternalError, PartcError
from partc.ir.expert_products import ExpertMatmul
from partc.ir.gradients import passing
from partc.ir.naming import COUNTED, unique
from partc.ir.operations import RANDOM
from partc.ir.program import DTypeArg, Op, Parameter, Program, Ref, TensorType, Value
from partc.ir.repetitions import Unfolding
from partc.passes.route.rows import RowWriter


def reach(program: Program, *, forward_only: bool = False, compress: str = "") -> Program:
    """Count whether gradients reach the parameters in `program.reached`.

    Raises PartcError P0423 if gradients are compressed, which would round counts.
    """
    if not program.reached:
        return program
    if compress and not forward_only:
        raise PartcError(
            "P0423",
            f"a step may leave out {program.reached[0][0]}, and --compress-grads would round the number of its rows",
            help="leave out --compress-grads, or use --grad-reduce bf16: its sums of counts are 0 only without rows",
        )
    (region,), (call,) = program.regions, program.calls
    made = dict(zip(call.results, region.forward.outputs, strict=True))
    counted = {name: made[value] for name, value in program.reached}
    dropped = {value for _, value in program.reached}
    kept = [(name, value) for name, value in made.items() if name not in dropped]
    graph = replace(region.forward, outputs=tuple(value for _, value in kept))
    program = replace(
        program,
        reached=(),
        values=tuple(value for value in program.values if value.name not in dropped),
        calls=(replace(call, results=tuple(name for name, _ in kept)),),
        regions=(replace(region, forward=graph),),
    )
    if forward_only:
        return replace(program, regions=(replace(region, forward=graph.without_dead()),))
    return _Counters(program, counted).run()


class _Counters:
    """Adds counters to a program of one region; `counted` maps parameters to the values that count them.

    Parameters that the same operations read have one counter, which is a parameter of the calls of all these
    operations. The last of them has the counts. If these are computed from its result, as where the result of a layer
    decides whether it is used, a later operation has them.
    """

    def __init__(self, program: Program, counted: Mapping[str, str]) -> None:
        self._program, self._counted = program, counted
        (self._region,), (call,) = program.regions, program.calls
        self._inside = {name: value.name for value, name in zip(self._region.params, call.params, strict=True)}
        types = dict(self._region.types(self._region.forward))
        self._writer = RowWriter(types=types, taken=set(types))
        self._makers = self._region.forward.makers()
        self._same: dict[str, str] = {}  # value -> the same value with counts
        self._late = {id(op) for op in self._region.forward.ops}  # the operations that are not written yet

    def run(self) -> Program:
        w, graph = self._writer, self._region.forward
        readers = self._readers()
        counters = {place: self._counter(names) for place, names in readers.items()}
        at: dict[int, list[tuple[str, Sequence[str]]]] = {}  # operation -> counters, and their counts if they are here
        for places, (inside, item) in counters.items():
            for place in places:
                counts = [self._counted[names[0]] for names in item.counts] if place == places[-1] else []
                at.setdefault(place, []).append((inside, counts))
        for op in graph.ops:
            product = ExpertMatmul.of(op)
            if product is None:
                self._write(op)
            w.source = op.source
            value = product.rows if product else next((x.name for x in op.results if x.type.differentiable), "")
            for inside, given in at.get(id(op), ()):
                self._same[value] = self._counting(self._same.get(value, value), inside, given)
            self._write(op)
        forward = graph.rewritten(w.ops, self._same).without_dead()
        (call,), added = self._program.calls, [item for _, item in counters.values()]
        params = [Value(name=inside, type=item.type) for inside, item in counters.values()]
        return replace(
            self._program,
            parameters=(*self._program.parameters, *added, *self._of_other_units(added)),
            calls=(replace(call, params=(*call.params, *(item.name for item in added))),),
            regions=(replace(self._region, params=(*self._region.params, *params), forward=forward),),
        )

    def _readers(self) -> dict[tuple[int, ...], list[str]]:
        """The parameters by the operations that read them. Of several that choose experts alike, the first product."""
        products = {product.chosen: op for op in reversed(self._region.forward.ops) if (product := ExpertMatmul.of(op))}
        found: dict[tuple[int, ...], list[str]] = {}
        for name in self._counted:
            places = dict[int, None]()
            for op in self._computing(self._inside[name]):
                places[id(next((products[ref] for ref in op.refs() if ref in products), op))] = None
                last = op
            if places and self._depends(self._counted[name], last):
                places[id(self._behind(self._counted[name], last))] = None
            found.setdefault(tuple(places), []).append(name)
        return found

    def _computing(self, name: str) -> list[Op]:
        """The operations that compute with a parameter and other values than parameters; without any, the last one
        that computes with it.
        """
        weights, found, last = {name}, list[Op](), list[Op]()
        for op in self._region.forward.ops:
            if weights.isdisjoint(op.refs()) or self._passing.isdisjoint(value.name for value in op.results):
                continue
            if self._of_weights.issuperset(op.refs()):
                weights.update(value.name for value in op.results)
                last = [op]
            else:
                found.append(op)
        return found or last

    @cached_property
    def _passing(self) -> set[str]:
        return passing(self._region.forward)

    def _depends(self, value: str, op: Op) -> bool:
        """Whether a value is computed from the results of an operation."""
        made, waiting, met = {x.name for x in op.results}, [value], {value}
        while waiting:
            name = waiting.pop()
            if name in made:
                return True
            read = {*self._makers[name].refs()} - met if name in self._makers else set()
            waiting.extend(read)
            met |= read
        return False

    def _behind(self, count: str, op: Op) -> Op:
        """The first operation behind `op`, on the way of its gradient, from which a count is not computed."""
        behind = {value.name for value in op.results}
        for later in self._region.forward.ops:
            results = {value.name for value in later.results if value.type.differentiable}
            if behind.isdisjoint(later.refs()) or self._passing.isdisjoint(results):
                continue
            behind |= results
            if not self._depends(count, later):
                return later
        raise InternalError(f"{count}, which counts gradients of a parameter, is computed from the loss")

    def _counter(self, names: Sequence[str]) -> tuple[str, Parameter]:
        """A counter of parameters, and its name in the region."""
        w = self._writer
        groups: dict[str, list[str]] = {}  # count -> parameters
        for name in names:
            groups.setdefault(self._counted[name], []).append(name)
        inside = unique(f"{self._inside[names[0]]}_reached", w.taken)
        stored = unique(f"{names[0]}.reached", {item.name for item in self._program.parameters})
        w.types[inside] = TensorType.replicated(w.types[next(iter(groups))].dtype, (len(groups),))
        return inside, Parameter(
            name=stored, type=w.types[inside], trainable=True, counts=tuple(map(tuple, groups.values()))
        )

    @cached_property
    def _of_weights(self) -> set[str]:
        """The values that depend on parameters alone."""
        found = {value.name for value in self._region.params}
        for op in self._region.forward.ops:
            if op.name not in RANDOM and found.issuperset(op.refs()):
                found.update(value.name for value in op.results)
        return found

    def _counting(self, value: str, counter: str, counts: Sequence[str]) -> str:
        """The value as the result of an `own_gradient` that gives a counter these counts, or zeros without any."""
        w, type = self._writer, self._writer.types[value]
        for count in counts:
            self._write(self._makers.get(count))
        detached = w.add("detach", (Ref(value),), type.shape, type.dtype, f"{value}_value")
        gradient = w.add("incoming_gradient", (Ref(detached),), type.shape, type.dtype, f"{value}_gradient")
        dims, own = tuple(range(len(type.shape))), (len(type.shape),)
        args = ((Ref(detached),), (Ref(value), Ref(counter)), (Ref(gradient), Ref(self._counts(counts, counter))))
        stem = f"{value}{COUNTED}"
        return w.add("own_gradient", args, type.shape, type.dtype, stem, dims=(dims, dims, own), whole=own)

    def _write(self, op: Op | None) -> None:
        """Write an operation of the graph, behind those that compute its operands, unless it is written."""
        if op is None or id(op) not in self._late:
            return
        self._late.remove(id(op))
        for name in op.refs():
            self._write(self._makers.get(name))
        self._writer.keep(op.with_operands(self._same))

    def _counts(self, alone: Sequence[str], counter: str) -> str:
        """The counts as one tensor, in the type of the counter."""
        w = self._writer
        dtype, shape = w.types[counter].dtype, w.shape(counter)
        if not alone:
            return w.add("full", (shape, 0), shape, dtype, "counts", dtype=DTypeArg(dtype))
        chosen = {self._chosen(name, number) for number, name in enumerate(alone)}
        if len(alone) > 1 and len(chosen) == 1 and (numbers := chosen.pop()):
            wide = w.add("to", (Ref(numbers), DTypeArg(dtype)), w.shape(numbers), dtype, "numbers")
            return w.add("histc", (Ref(wide), len(alone), 0, len(alone) - 1), shape, dtype, "counts")
        parts = [w.reshape(name, (1,), "count") for name in alone]
        return w.add("cat", (tuple(map(Ref, parts)), 0), shape, dtype, "counts") if len(parts) > 1 else parts[0]

    def _chosen(self, count: str, number: int) -> str:
        """The value of which a count has the elements that equal `number`; "" for other counts."""
        total = self._makers.get(count)
        wide = self._makers.get(next(total.refs())) if total is not None and total.name == "sum" else None
        mask = self._makers.get(next(wide.refs())) if wide is not None and wide.name == "to" else None
        if mask is None or mask.name != "eq" or mask.args[1] != number or isinstance(mask.args[1], bool):
            return ""
        return next(mask.refs())

    def _of_other_units(self, counters: Sequence[Parameter]) -> Iterator[Parameter]:
        """The counters of units that the trace leaves out: those that correspond to the last traced unit's."""
        for repetition in self._program.repetitions:
            unfolding = Unfolding(self._program, repetition)
            for paths in unfolding.left_out:
                for item in counters:
                    counts = tuple(tuple(unfolding.moved(name, paths) for name in names) for names in item.counts)
                    if counts != item.counts:
                        yield replace(item, name=unfolding.moved(item.name, paths), counts=counts)
