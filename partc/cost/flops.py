"""The floating-point operations of a training step, as the basis of hardware utilisation."""

from __future__ import annotations

from dataclasses import dataclass

from partc.ir.attention import FORWARD
from partc.ir.program import Call, Graph, Op, Program, Region
from partc.rules import OpRule, flops, resolve

_OWN = frozenset({"own_gradient", "incoming_gradient"})  # of functions with a backward pass of the user's own


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Flops of matrix products and convolutions, and of fused attention; those of `again` are parts of the forward
    pass that full recomputation computes twice.
    """

    products: int = 0
    attention: int = 0
    products_again: int = 0
    attention_again: int = 0

    def plus(self, other: StepFlops, times: int = 1) -> StepFlops:
        return StepFlops(
            self.products + times * other.products,
            self.attention + times * other.attention,
            self.products_again + times * other.products_again,
            self.attention_again + times * other.attention_again,
        )


def model_flops(program: Program) -> int:
    """The flops of one batch, forward and backward, on all ranks together; repeated products count once.

    Counts matrix products and convolutions, as PaLM's MFU does (Chowdhery et al. 2022, appendix B): no recomputation;
    half of causal attention. A product's gradient costs another product for each operand that needs one: none for batch
    entries or frozen weights. Transposed convolutions and operations without a rule do not count. `program` is the
    result of annotate, with shapes of the whole batch.
    """
    work = model_work(program)
    return work.products + work.attention


def model_work(program: Program) -> StepFlops:
    """The flops of `model_flops` by the kind of operation.

    Recomputed are at least the operations of a region from which an operand of its products follows that the gradient
    of another operand needs. Nothing is said of regions that change buffers or have gradients of the user's own.
    """
    trained: set[str] = {parameter.name for parameter in program.parameters if parameter.trainable}
    found: dict[tuple[str, tuple[bool, ...]], tuple[StepFlops, tuple[bool, ...]]] = {}
    total = StepFlops()
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


def _of_region(region: Region, call: Call, trained: set[str], *, again: bool) -> tuple[StepFlops, tuple[bool, ...]]:
    """The region's work, and whether each result has a gradient; `trained` are the program's values with one."""
    graph: Graph = region.forward
    types = region.types(graph)
    given = zip((*region.params, *graph.inputs), (*call.params, *call.args), strict=True)
    learning = {value.name for value, name in given if name in trained}
    rules = [resolve(op, types) if op.results else None for op in graph.ops]
    total, needed = StepFlops(), set[str]()
    for op, rule in zip(graph.ops, rules, strict=True):
        forward = flops(op, rule) if rule is not None else 0
        if forward and rule is not None:
            total = total.plus(_of_kind(op, _of_op(op, rule, forward, learning)))
            needed |= _needed(op, rule, learning)
        if any(name in learning for name in op.refs()):
            learning.update(value.name for value in op.results if value.type.dtype.startswith(("f", "bf")))
    if again and region.phase == "microbatch" and not any(op.name in _OWN for op in graph.ops):
        for op, rule in zip(reversed(graph.ops), reversed(rules), strict=True):
            if any(value.name in needed for value in op.results):
                needed.update(op.refs())
                work = _of_kind(op, flops(op, rule) if rule is not None else 0)
                total = total.plus(StepFlops(products_again=work.products, attention_again=work.attention))
    return total, tuple(name in learning for name in graph.outputs)


def _of_kind(op: Op, work: int) -> StepFlops:
    return StepFlops(attention=work) if op.name in FORWARD else StepFlops(products=work)


def _needed(op: Op, rule: OpRule, learning: set[str]) -> set[str]:
    """The operands of a product that the gradients of its other operands need."""
    added = {*rule.added, *rule.integral}
    factors = [name for index, name in enumerate(op.refs()) if index not in added]
    return {
        name
        for index, name in enumerate(factors)
        if any(other in learning for place, other in enumerate(factors) if place != index)
    }


def _of_op(op: Op, rule: OpRule, forward: int, learning: set[str]) -> int:
    learns = [name in learning for name in op.refs()]
    if op.name in FORWARD:
        q, k, v = learns[:3]
        return forward + forward * ((q or k) + q + k + v) // 2  # two products: scores by queries and keys, values
    added = {*rule.added, *rule.integral}
    # A product of more than two tensors is computed in pairs; the largest pair decides.
    return forward * (1 + min(2, sum(learn for index, learn in enumerate(learns) if index not in added)))
