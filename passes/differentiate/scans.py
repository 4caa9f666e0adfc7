"""The derivative of a scan: a scan in the other direction, whose states are the gradients of the states.

Each of its steps computes the forward step again, from the states before it, and then the step's derivative. The
gradients of constants are states too: sums over the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partc.ir.gradients import reached, without_own_gradients
from partc.ir.naming import gradient_name, unique
from partc.ir.printer import print_graph
from partc.ir.program import DTypeArg, Graph, Op, Ref, Region, Value, needed
from partc.ir.scans import Scan, scan_of
from partc.torch_private import below_autograd

# (a step as a region, the inputs that need a gradient, the values that have one) -> the region with its backward graph
Split = Callable[[Region, frozenset[str], set[str]], Region]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivative:
    """A scan and the step of its derivative; without a gradient, `step` is None.

    `forward` also returns the sequences of states before each step, `before`, unless they equal other results. The step
    reads the gradients of `states` and `made`, the values `saved` and constants. It computes the gradients of states,
    of `constants` (summed) and of `elements`. All of these fields hold positions.
    """

    forward: Scan
    before: tuple[int, ...] = ()
    step: Graph | None = None
    states: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    saved_states: tuple[int, ...] = ()
    saved_elements: tuple[int, ...] = ()
    saved_constants: tuple[int, ...] = ()
    constants: tuple[int, ...] = ()
    elements: tuple[int, ...] = ()


def derivative(op: Op, live: set[str], split: Split) -> Derivative:
    """The derivative of a scan for the operands in `live`."""
    scan = scan_of(op)
    roots = {value.name for value, name in zip(scan.step.inputs, op.refs(), strict=True) if name in live}
    while True:
        inside = reached(scan.step, roots)
        more = {v.name for v, name in zip(scan.states, scan.following, strict=True) if name in inside} - roots
        if not more:
            break
        roots |= more
    given = {value.name for value in scan.step.inputs}
    outputs = tuple(name for name in dict.fromkeys(scan.step.outputs) if name in inside and name not in given)
    if not outputs and not roots.intersection(scan.step.outputs):
        return Derivative(forward=replace(scan, step=without_own_gradients(scan.step)))
    region = Region(name="step", params=(), forward=replace(scan.step, outputs=outputs))
    region = split(region, frozenset(roots), inside) if outputs else region
    return _DerivativeBuilder(scan, roots, inside, outputs, region).derivative()


def _with_states(scan: Scan, before: Sequence[int]) -> Scan:
    """The scan, which also returns the sequences of some states before each step."""
    outputs = (*scan.step.outputs, *(scan.states[i].name for i in before))
    return replace(scan, dims=(*scan.dims, *(0 for _ in before)), step=replace(scan.step, outputs=outputs))


class _DerivativeBuilder:
    def __init__(self, scan: Scan, roots: set[str], inside: set[str], outputs: Sequence[str], region: Region) -> None:
        self.scan, self.roots, self.inside, self.outputs, self.region = scan, roots, inside, outputs, region
        backward = region.backward
        graphs = (region.forward, *((backward,) if backward is not None else ()))
        self.types = {name: value.type for graph in graphs for name, value in graph.definitions().items()}
        self.types |= {value.name: value.type for value in scan.step.inputs}
        self.taken = set(self.types)
        self.ops: list[Op] = []

    def derivative(self) -> Derivative:
        scan = self.scan
        states, constants, elements = map(self._with_gradient, (scan.states, scan.fixed, scan.elements))
        made = tuple(i for i, name in enumerate(scan.made) if name in self.inside)
        of_states = [self._value(gradient_name(f"{scan.states[i].name}_next"), scan.states[i]) for i in states]
        sums = [self._value(f"sum_{scan.fixed[i].name}", scan.fixed[i]) for i in constants]
        of_made = [self._value(gradient_name(f"{scan.made[i]}_t"), self._known(scan.made[i])) for i in made]
        incoming: dict[str, list[str]] = {}  # value of the forward step -> its gradients from outside of the step
        for i, value in zip(states, of_states, strict=True):
            incoming.setdefault(scan.following[i], []).append(value.name)
        for i, value in zip(made, of_made, strict=True):
            incoming.setdefault(scan.made[i], []).append(value.name)

        self._differentiate(incoming)
        next_states = [self._gradient(scan.states[i], incoming) for i in states]
        next_sums = [
            self._total([total.name, self._gradient(scan.fixed[i], incoming)], self._value(f"{total.name}_next", total))
            for i, total in zip(constants, sums, strict=True)
        ]
        found = (*next_states, *next_sums, *(self._gradient(scan.elements[i], incoming) for i in elements))
        ops, outputs = self._without_aliases(found)
        read = {*(name for op in ops for name in op.refs()), *outputs}
        kinds = scan.states, scan.elements, scan.fixed
        saved = [tuple(i for i, value in enumerate(values) if value.name in read) for values in kinds]
        again = (values[i] for values, places in zip(kinds, saved, strict=True) for i in places)
        before = tuple(i for i in saved[0] if scan.following[i] not in scan.made)
        return Derivative(
            forward=_with_states(replace(scan, step=without_own_gradients(scan.step)), before),
            before=before,
            step=Graph(inputs=(*of_states, *sums, *of_made, *again), ops=ops, outputs=outputs),
            states=states,
            made=made,
            saved_states=saved[0],
            saved_elements=saved[1],
            saved_constants=saved[2],
            constants=constants,
            elements=elements,
        )

    def _with_gradient(self, values: Sequence[Value]) -> tuple[int, ...]:
        """The positions of the step's inputs that need a gradient."""
        return tuple(i for i, value in enumerate(values) if value.name in self.roots)

    def _differentiate(self, incoming: Mapping[str, list[str]]) -> None:
        """Append the step's operations: those of forward whose results backward reads, and backward itself."""
        backward = self.region.backward
        saved = self.region.saved if backward is not None else ()
        self.ops.extend(needed(self.region.forward.ops, saved, given={value.name for value in self.scan.step.inputs}))
        if backward is not None:
            for name, value in zip(self.outputs, backward.inputs, strict=False):
                self._total(incoming[name], value)
            self.ops.extend(backward.ops)

    def _gradient(self, value: Value, incoming: Mapping[str, list[str]]) -> str:
        """The gradient of an input of the step: from outside of the step, and from the step's backward."""
        backward = self.region.backward
        given = backward.outputs if backward is not None else ()
        found = [*incoming.get(value.name, ())] if value.name not in self.outputs else []
        found += [gradient_name(value.name)] if gradient_name(value.name) in given else []
        return self._total(found, self._value(gradient_name(f"{value.name}_total"), value))

    def _without_aliases(self, found: Sequence[str]) -> tuple[tuple[Op, ...], tuple[str, ...]]:
        """The operations that the outputs `found` need, and the outputs, with aliases replaced by their operands."""
        same: dict[str, str] = {}
        for op in self.ops:
            if op.name == "alias":
                first = next(op.refs())
                same[op.result.name] = same.get(first, first)
        outputs = tuple(same.get(name, name) for name in found)
        return needed([op.renamed(same) for op in self.ops if op.name != "alias"], outputs), outputs

    def _known(self, name: str) -> Value:
        return Value(name=name, type=self.scan.step.definitions()[name].type)

    def _value(self, name: str, like: Value) -> Value:
        return Value(name=unique(name, self.taken), type=like.type.shaped(like.type.shape))

    def _total(self, names: Sequence[str], result: Value) -> str:
        """The name of the sum of some values, which `result` names; a lone value needs no sum."""
        if not names:
            args = (result.type.shape, 0)
            self.ops.append(
                Op(name="full", args=args, attrs=(("dtype", DTypeArg(result.type.dtype)),), results=(result,))
            )
            return result.name
        if len(names) == 1 and result.name not in self.types:
            return names[0]
        if len(names) == 1:
            self.ops.append(Op(name="alias", args=(Ref(names[0]),), results=(result,)))
        last = names[0]
        for index, name in enumerate(names[1:], start=2):
            value = result if index == len(names) else self._value(f"{result.name}_part", result)
            self.ops.append(Op(name="add", args=(Ref(last), Ref(name)), results=(value,)))
            last = value.name
        return result.name


def run(op: Op, found: Derivative, values: dict[str, Any]) -> list[Tensor]:
    """Run a scan on tensors without values, so that its derivative is traced when gradients pass."""
    scan = found.forward
    starts, sequences, constants = (
        [values[name] for name in names] for names in (scan.starts, scan.sequences, scan.constants)
    )
    count = len(op.results)
    if found.step is None:
        return call(starts, sequences, constants, scan)

    class Loop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
            ctx.set_materialize_grads(False)
            with below_autograd():
                ctx.results = tuple(call(starts, sequences, constants, scan))
            ctx.mark_non_differentiable(*(x for x in ctx.results if not x.is_floating_point()))
            return ctx.results  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return _backward(found, (starts, sequences, constants), ctx.results, grads)

    return list(Loop.apply(*starts, *sequences, *constants))[:count]


def call(starts: list[Tensor], sequences: list[Tensor], constants: list[Tensor], scan: Scan) -> list[Tensor]:
    """The operator on the scan's operands."""
    return torch.ops.partc.scan(  # type: ignore[no-any-return]
        starts,
        sequences,
        constants,
        length=scan.length,
        dims=list(scan.dims),
        reverse=scan.reverse,
        step=print_graph(scan.step),
    )


def _backward(
    found: Derivative, groups: Sequence[list[Tensor]], results: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of all operands."""
    scan, step = found.forward, found.step
    assert step is not None
    starts, sequences, constants = groups
    count = len(starts)

    def gradient(index: int) -> Tensor:
        known = grads[index]
        return torch.zeros_like(results[index]) if known is None else known

    begun = [gradient(i) for i in found.states]
    begun += [torch.zeros_like(constants[i]) for i in found.constants]
    read = [gradient(count + i) for i in found.made]
    dims = [scan.dims_made[i] for i in found.made]
    for i in found.saved_states:
        x, dim = _states_before(found, i, starts, results)
        read.append(x)
        dims.append(dim)
    read += [sequences[i] for i in found.saved_elements]
    dims += [scan.dims_read[i] for i in (*found.saved_elements, *found.elements)]
    back = Scan(
        starts=(),
        sequences=("",) * len(read),
        constants=(),
        length=scan.length,
        dims=tuple(dims),
        reverse=not scan.reverse,
        step=step,
    )
    made = iter(call(begun, read, [constants[i] for i in found.saved_constants], back))
    of_states = dict(zip(found.states, made, strict=False))
    of_constants = dict(zip(found.constants, made, strict=False))
    of_elements = dict(zip(found.elements, made, strict=False))
    return (
        *(of_states.get(i) for i in range(len(starts))),
        *(of_elements.get(i) for i in range(len(sequences))),
        *(of_constants.get(i) for i in range(len(constants))),
    )


def _states_before(
    found: Derivative, state: int, starts: Sequence[Tensor], results: Sequence[Tensor]
) -> tuple[Tensor, int]:
    """The values of a state before each step, as one tensor, and the tensor's time dimension."""
    scan = found.forward
    if state in found.before:
        return results[len(results) - len(found.before) + found.before.index(state)], 0
    place = scan.made.index(scan.following[state])
    dim = scan.dims_made[place]
    first, after = starts[state].unsqueeze(dim), results[len(starts) + place]
    most = after.narrow(dim, 1 if scan.reverse else 0, scan.length - 1)
    return torch.cat([most, first] if scan.reverse else [first, most], dim), dim
