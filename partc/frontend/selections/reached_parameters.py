"""Parameters that no gradient reaches in a step in which masks select nothing.

    for e in range(experts):
        rows = torch.where(chosen == e)[0]
        if len(rows):
            out[rows] += expert[e](x[rows])
  ->
    eq        = eq(chosen, 0)                              # bool[64]
    reached   = sum(eq)                                    # f32[]
    …
    reach experts.0.weight if reached

Eagerly such a parameter has no gradient, and the optimizer leaves it and its states alone. The traced program returns
the number of elements that each test finds; the pass `reach` has it summed over a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.frontend.selections.empty_selections import Elements
from partc.frontend.selections.selection_tests import TESTED
from partc.ir.naming import unique
from partc.ir.program import Arg, DType, Graph, Op, Program, Ref, TensorType, Value, is_change, needed

COUNT: DType = "f32"


@dataclass(frozen=True, slots=True)
class Reached:
    """The parameters of a region that a gradient reaches only if one of these elements is set."""

    elements: Mapping[str, tuple[Elements, ...]]
    unknown: frozenset[str]  # parameters for which that depends on several tests


def sometimes_reached(
    full: Graph, empty: Graph, parameters: Sequence[str], tested: Mapping[str, Elements | None]
) -> Reached:
    """The parameters that `full` reads, and `empty` does not; `tested` is from `check_empty`."""
    computed = _computed(empty)
    always = {name for op in computed for name in op.refs()}
    made = full.definitions()
    readers = full.readers()
    found: dict[str, tuple[Elements, ...]] = {}
    unknown = set()
    for name in parameters:
        if name in always or name not in readers:
            continue
        tests = [*_decided(name, readers, tested)]
        each = dict.fromkeys(test for test in tests if test is not None)
        if None in tests or not each or any(test.value not in made for test in each):
            unknown.add(name)
        else:
            found[name] = tuple(each)
    return Reached(found, frozenset(unknown))


def _computed(graph: Graph) -> tuple[Op, ...]:
    """The operations that contribute to the results; those that change values count as such."""
    return needed(graph.ops, graph.outputs, removable=lambda op: op.name != TESTED and not is_change(op))


def _decided(
    name: str, readers: Mapping[str, Sequence[Op]], tested: Mapping[str, Elements | None]
) -> Iterator[Elements | None]:
    """The tests of the operations that read a value, or a value that is computed from it in any case."""
    waiting, met = [name], {name}
    while waiting:
        for op in readers.get(waiting.pop(), ()):
            results = [value.name for value in op.results]
            decided = [tested[result] for result in results if result in tested]
            yield from decided
            if not decided:
                waiting.extend(result for result in results if result not in met)
                met.update(results)


def with_counts(program: Program, reached: Reached) -> Program:
    """The program with the numbers of elements that the tests find as further results."""
    (region,), (call,) = program.regions, program.calls
    stored = dict(zip((value.name for value in region.params), call.params, strict=True))
    tests = dict.fromkeys(test for tests in reached.elements.values() for test in tests)
    types = region.types(region.forward)
    taken = {*types, *(value.name for value in program.values)}
    names = {test: unique("reached", taken) for test in tests}
    ops: list[Op] = []
    for op in region.forward.ops:
        ops.append(op)
        if op.name == TESTED:
            for test in tests:
                if test.test is op:
                    ops.extend(_count(test, names[test], types, taken))
    totals: dict[tuple[Elements, ...], str] = {}
    for each in dict.fromkeys(reached.elements.values()):
        total = names[each[0]]
        for test in each[1:]:
            value = Value(name=unique("reached", taken), type=TensorType.replicated(COUNT, ()))
            ops.append(Op(name="add", args=(Ref(total), Ref(names[test])), results=(value,), source=test.test.source))
            total = value.name
        totals[each] = total
    outputs = tuple(dict.fromkeys(totals.values()))
    values = tuple(Value(name=name, type=TensorType.replicated(COUNT, ())) for name in outputs)
    forward = replace(region.forward, ops=tuple(ops), outputs=(*region.forward.outputs, *outputs))
    return replace(
        program,
        regions=(replace(region, forward=forward),),
        calls=(replace(call, results=(*call.results, *outputs)),),
        values=(*program.values, *values),
        reached=tuple((stored[name], totals[each]) for name, each in reached.elements.items()),
    )


def _count(test: Elements, name: str, types: Mapping[str, TensorType], taken: set[str]) -> Iterator[Op]:
    """The operations that count the set elements of a test."""
    mask, type = test.value, types[test.value]

    def op(kind: str, args: tuple[Arg, ...], type: TensorType, made: str) -> Op:
        return Op(name=kind, args=args, results=(Value(name=made, type=type),), source=test.test.source)

    if test.dim is not None:
        part = unique(f"{name}_part", taken)
        type = type.shaped((*type.shape[: test.dim], test.last - test.first, *type.shape[test.dim + 1 :]))
        yield op("slice", (Ref(mask), test.dim, test.first, test.last, 1), type, part)
        mask = part
    if test.equal or type.dtype != "bool":
        found, kind = unique(f"{name}_mask", taken), ("eq", test.first) if test.equal else ("ne", 0)
        yield op(kind[0], (Ref(mask), kind[1]), TensorType.replicated("bool", type.shape), found)
        mask = found
    yield op("sum", (Ref(mask),), TensorType.replicated(COUNT, ()), name)
