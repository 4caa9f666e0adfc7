"""The floating-point operations of a training step, as the basis of hardware utilisation."""

from __future__ import annotations

from partc.ir.program import Call, Graph, Op, Program, Region, TensorType
from partc.rules import flops, resolve

_ATTENTION = ("attention", "attention_dropout")


def model_flops(program: Program) -> int:
    """The flops of one batch, forward and backward, on all ranks together; repeated products count once.

    Counts matrix products and convolutions, as PaLM's MFU does (Chowdhery et al. 2022, appendix B): no recomputation;
    half of causal attention. A product's gradient costs another product for each operand that needs one: none for batch
    entries or frozen weights. Transposed convolutions and operations without a rule do not count. `program` is the
    result of annotate, with shapes of the whole batch.
    """
    regions = {region.name: region for region in program.regions}
    trained: set[str] = {parameter.name for parameter in program.parameters if parameter.trainable}
    found: dict[tuple[str, tuple[bool, ...]], tuple[int, tuple[bool, ...]]] = {}
    total = 0
    for call in program.calls:
        region = regions[call.region]
        if region.phase == "setup":
            continue
        key = call.region, tuple(name in trained for name in (*call.params, *call.args))
        if key not in found:
            found[key] = _of_region(region, call, trained)
        work, learned = found[key]
        total += work * (program.microbatches if program.separate_batches and region.phase == "microbatch" else 1)
        trained.update(name for name, learns in zip(call.results, learned, strict=True) if learns)
    return total


def _of_region(region: Region, call: Call, trained: set[str]) -> tuple[int, tuple[bool, ...]]:
    """The region's flops, and whether each result has a gradient; `trained` are the program's values with one."""
    graph: Graph = region.forward
    types = region.types(graph)
    given = zip((*region.params, *graph.inputs), (*call.params, *call.args), strict=True)
    learning = {value.name for value, name in given if name in trained}
    total = 0
    for op in graph.ops:
        total += _of_op(op, types, learning)
        if any(name in learning for name in op.refs()):
            learning.update(value.name for value in op.results if value.type.dtype.startswith(("f", "bf")))
    return total, tuple(name in learning for name in graph.outputs)


def _of_op(op: Op, types: dict[str, TensorType], learning: set[str]) -> int:
    rule = resolve(op, types) if op.results else None
    forward = 0 if rule is None else flops(op, rule)
    if not forward or rule is None:
        return 0
    learns = [name in learning for name in op.refs()]
    if op.name in _ATTENTION:
        q, k, v = learns[:3]
        return forward + forward * ((q or k) + q + k + v) // 2  # two products: scores by queries and keys, values
    added = {*rule.added, *rule.integral}
    # A product of more than two tensors is computed in pairs; the largest pair decides.
    return forward * (1 + min(2, sum(learn for index, learn in enumerate(learns) if index not in added)))
