"""Count the rows of each expert for its router's bias, which an update after the step moves towards equal loads.

    constant layers.0.bias: f32[4]
    …
    add                = add(softmax, …bias)                          # f32[32, 4]
    getitem, getitem_1 = topk(add, 2)
    experts            = reshape(getitem_1, (64,))                    # i64[64]
    matmul_…           = expert_matmul(reshape_rows_3, experts, …up)  # f32[64, 12]
  ->
    parameter layers.0.bias: f32[4] balance(0.001)
    …
    …bias_2            = detach(…bias)                                # f32[4]
    add                = add(softmax, …bias_2)                        # f32[32, 4]
    getitem, getitem_1 = topk(add, 2)
    experts            = reshape(getitem_1, (64,))                    # i64[64]
    …value             = detach(reshape_rows_3)                       # f32[64, 8]
    …gradient          = incoming_gradient(…value)                    # f32[64, 8]
    numbers            = to(experts, <f32>)                           # f32[64]
    load               = histc(numbers, 4, 0, 3)                      # f32[4]
    …counted           = own_gradient((…value,), (reshape_rows_3, …bias), (…gradient, load), …)
    matmul_…           = expert_matmul(…counted, experts, …up)        # f32[64, 12]

The load is the gradient of the bias: like all gradients it is summed over ranks and microbatches once a step, and
recomputation does not repeat it. `runtime/optimizer/balance.py` is its update. A router's bias is not trained, has one
number for each expert, and is added to the scores by which experts are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from partc.errors import PartcError
from partc.ir.expert_products import ExpertMatmul
from partc.ir.naming import COUNTED
from partc.ir.operations import KEEPING
from partc.ir.program import FLOATING, DTypeArg, Graph, Program, Ref, Region
from partc.ir.repetitions import KEPT
from partc.passes.route.rows import RowWriter

_PRODUCTS = frozenset({"linear", "matmul", "bmm"})


def balance(program: Program, *, router_bias_rate: float = 0.0) -> Program:
    """Count the rows of all routers with a bias. Raises PartcError P0108 if there are none."""
    if not router_bias_rate:
        return program
    (region,), (call,) = program.regions, program.calls
    stored = dict(zip((value.name for value in region.params), call.params, strict=True))
    fixed = {
        value.name: math.prod(value.type.shape)
        for value in region.params
        if value.type.dtype in FLOATING and not program.parameter(stored[value.name]).trainable
    }
    counted = _Counting(region, fixed)
    graph = counted.run()
    found = {stored[name] for name in counted.biases}
    if not found:
        raise PartcError(
            "P0108",
            "--router-bias-rate has no bias to move: no buffer with a number for each expert is added to the scores "
            "by which experts are chosen",
            help="leave the option out",
        )
    for buffer, _ in program.updates:
        if buffer in found:
            raise PartcError(
                "P0108",
                f"forward updates {buffer} itself, and --router-bias-rate would do it again",
                help="leave the option out, or the update in forward",
            )
    found |= {name for each in program.repetitions for name in _of_all_units(each.units, found)}
    parameters = tuple(
        replace(item, trainable=True, balance=router_bias_rate) if item.name in found else item
        for item in program.parameters
    )
    return replace(program, parameters=parameters, regions=(replace(region, forward=graph),))


def _of_all_units(units: Sequence[Sequence[str]], found: set[str]) -> Iterator[str]:
    """The biases of units that the trace leaves out: the names that correspond to the last traced unit's."""
    for place, path in enumerate(units[KEPT - 1]):
        for name in found:
            if name.startswith(f"{path}."):
                yield from (paths[place] + name.removeprefix(path) for paths in units)


class _Counting:
    """The operations of a region, with the loads of experts as gradients of their routers' biases."""

    def __init__(self, region: Region, fixed: Mapping[str, int]) -> None:
        self._graph = region.forward
        self._fixed = fixed
        self._makers = region.forward.makers()
        types = dict(region.types(region.forward))
        self._writer = RowWriter(types=types, taken=set(types))
        self.biases: set[str] = set()

    def run(self) -> Graph:
        w = self._writer
        same: dict[str, str] = {}
        routed = self._routed()
        self.biases = {bias for bias, _ in routed.values()}
        for op in self._graph.ops:
            w.source = op.source
            for bias in self.biases.intersection(op.refs()) - same.keys():  # other readers contribute no gradient
                same[bias] = w.add("detach", (Ref(bias),), w.shape(bias), w.types[bias].dtype, bias)
            if (product := ExpertMatmul.of(op)) and product.chosen in routed:
                bias, count = routed.pop(product.chosen)
                rows = same.get(product.rows, product.rows)
                same[product.rows] = self._with_load(rows, bias, product.chosen, count)
            w.keep(op.with_operands(same))
        return self._graph.rewritten(w.ops, same)

    def _routed(self) -> dict[str, tuple[str, int]]:
        """Map each choice of experts to its bias and the number of experts."""
        found: dict[str, tuple[str, int]] = {}
        for op in self._graph.ops:
            if product := ExpertMatmul.of(op):
                count = self._writer.shape(product.weights)[0]
                bias = self._bias(product.chosen, count) if product.chosen not in found else None
                if bias is not None:
                    found[product.chosen] = bias, count
        return found

    def _bias(self, chosen: str, count: int) -> str | None:
        """The bias that is added to the scores of a choice among `count` experts; None if there is none."""
        waiting, met = [chosen], {chosen}
        while waiting:
            op = self._makers.get(waiting.pop())
            if op is None or op.name in _PRODUCTS:
                continue
            for name in op.refs():
                if op.name == "add" and self._fixed.get(self._unviewed(name)) == count:
                    return self._unviewed(name)
                if name not in met:
                    met.add(name)
                    waiting.append(name)
        return None

    def _unviewed(self, name: str) -> str:
        while (op := self._makers.get(name)) is not None and op.name in KEEPING:
            name = next(op.refs())
        return name

    def _with_load(self, rows: str, bias: str, chosen: str, count: int) -> str:
        """The rows as the result of an `own_gradient` that gives the bias the load of `chosen` as its gradient."""
        w = self._writer
        shape, type, held = w.shape(rows), w.types[rows], w.types[bias]
        value = w.add("detach", (Ref(rows),), shape, type.dtype, f"{rows}_value")
        gradient = w.add("incoming_gradient", (Ref(value),), shape, type.dtype, f"{rows}_gradient")
        numbers = w.add("to", (Ref(chosen), DTypeArg(held.dtype)), w.shape(chosen), held.dtype, "numbers")
        load = w.add("histc", (Ref(numbers), count, 0, count - 1), (count,), held.dtype, "load")
        if held.shape != (count,):
            load = w.reshape(load, held.shape, "load")
        dims = tuple(range(len(shape)))
        own = tuple(range(len(shape), len(shape) + len(held.shape)))
        args = ((Ref(value),), (Ref(rows), Ref(bias)), (Ref(gradient), Ref(load)))
        return w.add("own_gradient", args, shape, type.dtype, f"{rows}{COUNTED}", dims=(dims, dims, own))
