"""Parameters that no gradient reaches in a step in which masks select nothing, or random numbers drop their layers.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc.frontend.selections.conditional_gradients import Condition, Outcome
from partc.frontend.selections.empty_selections import Elements
from partc.frontend.selections.selection_tests import TESTED
from partc.ir.naming import unique
from partc.ir.program import Arg, DType, Graph, Op, Program, Ref, TensorType, Value, is_change, needed

COUNT: DType = "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The parameters of a region that a gradient reaches only if one of these elements is set, or only if random
    branches have these outcomes.
    """

    elements: Mapping[str, tuple[Elements, ...]] = field(default_factory=dict)
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    def joined(self, graph: Graph, conditions: Mapping[str, Condition]) -> Reached:
        """For the graph that joins the outcomes of branches, under whose outcomes a gradient reaches parameters."""
        tests = {op.args: op for op in graph.ops if op.name == TESTED}
        elements = {
            name: tuple(replace(each, test=tests[each.test.args]) for each in needed)
            for name, needed in self.elements.items()
            if name not in conditions and all(each.test.args in tests for each in needed)
        }
        return Reached(elements=elements, conditions=conditions)


def sometimes_reached(
    full: Graph, empty: Graph, parameters: Sequence[str], tested: Mapping[str, Elements | None]
) -> Reached:
    """The parameters that `full` reads, and `empty` does not; `tested` is from `check_empty`."""
    computed = _computed(empty)
    always = {name for op in computed for name in op.refs()}
    made = full.definitions()
    readers = full.readers()
    found: dict[str, tuple[Elements, ...]] = {}
    for name in parameters:
        if name in always or name not in readers:
            continue
        tests = [*_decided(name, readers, tested)]
        each = dict.fromkeys(test for test in tests if test is not None)
        if None not in tests and each and all(test.value in made for test in each):
            found[name] = tuple(each)
    return Reached(elements=found)


def _computed(graph: Graph) -> tuple[Op, ...]:
    """The operations that contribute to the results; those that change values count as such."""
    return needed(graph.ops, graph.outputs, removable=lambda op: op.name != TESTED and not is_change(op))


def _decided(
    name: str, readers: Mapping[str, Sequence[Op]], tested: Mapping[str, Elements | None]
) -> Iterator[Elements | None]:
    """The tests that decide whether operations run which read a value, or a value that is always computed from it."""
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
    """The program with further results: the numbers of elements that tests find, or of outcomes of random branches."""
    (region,), (call,) = program.regions, program.calls
    stored = dict(zip((value.name for value in region.params), call.params, strict=True))
    tests = dict.fromkeys(test for tests in reached.elements.values() for test in tests)
    types = region.types(region.forward)
    taken = {*types, *(value.name for value in program.values)}
    names = {test: unique("reached", taken) for test in tests}
    outcomes = {each: unique("reached", taken) for each in sorted(_outcomes(reached.conditions.values()))}
    ops: list[Op] = []
    for op in (None, *region.forward.ops):
        made = {value.name for value in op.results} if op else {*types} - {*region.forward.makers()}
        ops += [op] if op else []
        for outcome, name in outcomes.items():
            if outcome[0] in made:
                ops.extend(_occurred(outcome, name, types, taken))
        if op and op.name == TESTED:
            for test in tests:
                if test.test is op:
                    ops.extend(_count(test, names[test], types, taken))

    def combined(kind: str, parts: Sequence[str]) -> str:
        total, *others = parts
        for other in others:
            value = Value(name=unique("reached", taken), type=TensorType.replicated(COUNT, ()))
            ops.append(Op(name=kind, args=(Ref(total), Ref(other)), results=(value,), source=ops[-1].source))
            total = value.name
        return total

    by_tests = {
        tests: combined("add", [names[test] for test in tests]) for tests in dict.fromkeys(reached.elements.values())
    }
    by_outcomes = {
        condition: combined("add", [combined("mul", [outcomes[one] for one in each]) for each in _in_order(condition)])
        for condition in dict.fromkeys(reached.conditions.values())
    }
    outputs = tuple(dict.fromkeys((*by_tests.values(), *by_outcomes.values())))
    values = tuple(Value(name=name, type=TensorType.replicated(COUNT, ())) for name in outputs)
    forward = replace(region.forward, ops=tuple(ops), outputs=(*region.forward.outputs, *outputs))
    return replace(
        program,
        regions=(replace(region, forward=forward),),
        calls=(replace(call, results=(*call.results, *outputs)),),
        values=(*program.values, *values),
        reached=(
            *((stored[name], by_tests[tests]) for name, tests in reached.elements.items()),
            *((stored[name], by_outcomes[condition]) for name, condition in reached.conditions.items()),
        ),
    )


def _in_order(condition: Condition) -> list[list[Outcome]]:
    return sorted(map(sorted, condition))


def _outcomes(conditions: Iterable[Condition]) -> set[Outcome]:
    return {outcome for condition in conditions for conjunction in condition for outcome in conjunction}


def _occurred(outcome: Outcome, name: str, types: Mapping[str, TensorType], taken: set[str]) -> Iterator[Op]:
    """The operations that give 1 if a test of one element has an outcome, else 0."""
    test, value = outcome
    if not value:
        opposite = Value(name=unique(f"{name}_mask", taken), type=TensorType.replicated("bool", types[test].shape))
        yield Op(name="logical_not", args=(Ref(test),), results=(opposite,))
        test = opposite.name
    yield Op(name="sum", args=(Ref(test),), results=(Value(name=name, type=TensorType.replicated(COUNT, ())),))


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
