"""The floating-point operations of a training step, from which hardware utilisation follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from partc.ir.attention import FORWARD
from partc.ir.program import Call, Graph, Op, Program, Region, TensorType
from partc.rules import OpRule, flops, resolve

_OWN = frozenset({"own_gradient", "incoming_gradient"})  # operations of functions whose backward pass the user wrote


@dataclass(frozen=True, slots=True)
class ProductWork:
    """Flops of matrix products and convolutions (`products`), and of fused attention forward and `backward`.

    `results` counts the elements that matrix products write, and `scores` the exponentials of attention: both take time
    besides the flops.
    """

    products: int = 0
    attention: int = 0
    backward: int = 0
    results: int = 0
    scores: int = 0

    def plus(self, other: ProductWork, times: int = 1) -> ProductWork:
        return ProductWork(
            products=self.products + times * other.products,
            attention=self.attention + times * other.attention,
            backward=self.backward + times * other.backward,
            results=self.results + times * other.results,
            scores=self.scores + times * other.scores,
        )


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step, and of the parts of the forward pass that full recomputation repeats (`again`)."""

    once: ProductWork = ProductWork()
    again: ProductWork = ProductWork()

    def plus(self, other: StepWork, times: int = 1) -> StepWork:
        return StepWork(self.once.plus(other.once, times), self.again.plus(other.again, times))


def model_flops(program: Program) -> int:
    """The flops of one batch, forward and backward, on all ranks together; repeated products count once.

    Counts matrix products and convolutions, as PaLM's MFU does (Chowdhery et al. 2022, appendix B): no recomputation,
    and half of causal attention. A product's backward pass costs another product for each operand that needs a
    gradient; batch entries and frozen weights need none. Transposed convolutions and operations without a rule do not
    count. `program` is the result of annotate, with shapes of the whole batch.
    """
    work = model_work(program).once
    return work.products + work.attention + work.backward


def model_work(program: Program) -> StepWork:
    """The flops of `model_flops` by the kind of operation.

    Full recomputation repeats at least the operations that produce an operand which another operand's gradient needs.
    Regions that change buffers, or whose backward pass the user wrote, count nothing as repeated.
    """
    trained: set[str] = {parameter.name for parameter in program.parameters if parameter.trainable}
    found: dict[tuple[str, tuple[bool, ...]], tuple[StepWork, tuple[bool, ...]]] = {}
    total = StepWork()
    for call in program.calls:
        region = program.region(call.region)
        if region.phase == "setup":
            continue
        key = call.region, tuple(name in trained for name in (*call.params, *call.args))
        if key not in found:
            found[key] = _of_region(region, call, trained, again=not program.updates)
        work, learned = found[key]
        each = program.separate_batches and region.phase == "microbatch"
        total = total.plus(work, program.microbatches if each else 1)
        trained.update(name for name, learns in zip(call.results, learned, strict=True) if learns)
    return total


def _of_region(region: Region, call: Call, trained: set[str], *, again: bool) -> tuple[StepWork, tuple[bool, ...]]:
    """The region's work, and whether each result has a gradient; `trained` are the program's values with one."""
    graph: Graph = region.forward
    types = region.types(graph)
    given = zip((*region.params, *graph.inputs), (*call.params, *call.args), strict=True)
    learning = {value.name for value, name in given if name in trained}
    rules = [resolve(op, types) if op.results else None for op in graph.ops]
    once, repeated, needed = ProductWork(), ProductWork(), set[str]()
    for op, rule in zip(graph.ops, rules, strict=True):
        if rule is not None and (forward := _forward(op, rule)) != ProductWork():
            once = once.plus(forward).plus(_backward(op, rule, forward, types, learning))
            needed |= _needed(op, rule, learning)
        if any(name in learning for name in op.refs()):
            learning.update(value.name for value in op.results if value.type.dtype.startswith(("f", "bf")))
    if again and region.phase == "microbatch" and not any(op.name in _OWN for op in graph.ops):
        for op, rule in zip(reversed(graph.ops), reversed(rules), strict=True):
            if any(value.name in needed for value in op.results):
                needed.update(op.refs())
                repeated = repeated.plus(_forward(op, rule) if rule is not None else ProductWork())
    return StepWork(once, repeated), tuple(name in learning for name in graph.outputs)


def _forward(op: Op, rule: OpRule) -> ProductWork:
    work = flops(op, rule)
    if op.name in FORWARD:
        return ProductWork(attention=work, scores=int(scores(work, rule)) if work else 0)
    results = math.prod(op.results[0].type.shape) if work and product_sizes(rule) is not None else 0
    return ProductWork(products=work, results=results)


def _backward(
    op: Op, rule: OpRule, forward: ProductWork, types: Mapping[str, TensorType], learning: set[str]
) -> ProductWork:
    """The work of the gradients of an operation's operands."""
    learns = [name in learning for name in op.refs()]
    if op.name in FORWARD:
        q, k, v = learns[:3]  # of two products: queries by keys, and scores by values
        return ProductWork(
            backward=forward.attention * ((q or k) + q + k + v) // 2, scores=any((q, k, v)) * forward.scores
        )
    added = {*rule.added, *rule.integral}
    factors = [name for index, name in enumerate(op.refs()) if learns[index] and index not in added]
    # A product of more than two tensors is computed in pairs; the largest pair decides.
    results = sum(math.prod(types[name].shape) for name in factors[:2]) if forward.results else 0
    return ProductWork(products=forward.products * min(2, len(factors)), results=results)


def _needed(op: Op, rule: OpRule, learning: set[str]) -> set[str]:
    """The operands of a product that the gradients of its other operands need."""
    added = {*rule.added, *rule.integral}
    factors = [name for index, name in enumerate(op.refs()) if index not in added]
    return {
        name
        for index, name in enumerate(factors)
        if any(other in learning for place, other in enumerate(factors) if place != index)
    }


def scores(work: float, rule: OpRule) -> float:
    """The number of scores in attention of `work` flops: the product of the factors that all of its products share."""
    common = set.intersection(*map(set, rule.work))
    return work * math.prod(factor.size for factor in rule.factors if factor.name in common) / rule.flops


def product_sizes(rule: OpRule) -> tuple[int, int, int, int] | None:
    """The sizes of a product of two matrices, m x k by k x n, and the number of such products; None for other forms.

    Rows that are routed to n experts are n products, with an equal number of rows each.
    """
    matrices = [{name for dim in dims for name in dim} for dims in rule.operands if len(dims) >= 2]
    if len(matrices) < 2 or not rule.results or not rule.work:
        return None
    sizes = {factor.name: factor.size for factor in rule.factors}
    first, second, *_ = matrices
    made = {name for dim in rule.results[0] for name in dim}

    def ways(names: set[str]) -> int:
        return math.prod(sizes[name] for name in names)

    both, experts = first & second, ways(second - first - made)
    m, n, k = ways((first & made) - second), ways((second & made) - first), ways(both - made)
    if m * n * k * ways(both & made) != ways(set(rule.work[0])):
        return None
    return -(-m // experts), n, k, ways(both & made) * experts
