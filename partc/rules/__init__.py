"""Sharding rules of operations, and the placements that a choice of factor implies."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from partc.errors import InternalError, PartcError
from partc.ir.attention import Attention
from partc.ir.layout import Partial, Placement, Replicated, Shard, Sizes, Varying
from partc.ir.mesh import holds_weights_whole
from partc.ir.program import FLOATING, SCAN, Choice, Graph, Op, TensorType
from partc.rules import local, scans
from partc.rules import strided_cuts as _cuts
from partc.rules.notation import NotationError
from partc.rules.rule import RING, Dims, Factor, OpRule
from partc.rules.strided_cuts import Cuts, factor_cuts
from partc.rules.table import DENSE, LOWERED, TABLE, OperationRow, Precision, register

__all__ = [
    "LOWERED",
    "RING",
    "Cuts",
    "Factor",
    "OpRule",
    "Precision",
    "choices",
    "demands_dense",
    "factor_cuts",
    "fits",
    "flops",
    "has_products",
    "is_cheap",
    "is_elementwise",
    "is_matmul",
    "is_users",
    "localize",
    "operations",
    "placements",
    "precision_of",
    "propagate_cuts",
    "register",
    "resolve",
    "resolve_lowered",
]

PARTIAL = "partial"  # Choice.factor "partial0": a Partial value passes through the first linear group


def resolve(op: Op, types: Mapping[str, TensorType]) -> OpRule | None:
    """The rule of an operation for these shapes; None if it has none and must run on replicated operands."""
    entry = TABLE.get(op.name)
    if entry is None or any(0 in value.type.shape for value in op.results):
        return None
    operands = tuple(types[name] for name in op.refs())
    try:
        return entry.build(op, operands)
    except (IndexError, ZeroDivisionError):
        if all(type.shape for type in operands):
            raise
        return None  # the row names a dimension, and a number has none
    except NotationError as error:
        if not entry.user:
            return None
        raise PartcError(
            "P0314",
            f"the rule of {op.name} does not fit this call: {error}",
            help="correct the rule, or its slots (the positions of its tensor arguments)",
            source=op.source,
        ) from None


def resolve_lowered(op: Op, types: Mapping[str, TensorType]) -> OpRule | None:
    """The rule of an operation that compiling introduced, taken from the row in LOWERED.

    If results beyond the first are statistics, the rule covers the first result only.
    """
    named = op if op.name in TABLE else replace(op, name=LOWERED.get(op.name, op.name))
    ranks = [len(types[name].shape) for name in op.refs()]
    for results in (op.results, op.results[:1]):
        try:
            rule = resolve(replace(named, results=results), types)
        except (PartcError, ValueError, IndexError, ZeroDivisionError):
            continue  # its arguments or shapes do not fit this row
        if rule is None or [len(dims) for dims in rule.operands] != ranks:
            continue
        if [len(dims) for dims in rule.results] == [len(value.type.shape) for value in results]:
            return rule
    return None


TABLE[SCAN] = OperationRow(build=scans.scans(resolve_lowered), heavy=True, precision="high")


def localize(op: Op, rule: OpRule | None, sizes: Sizes) -> Op:
    """The same operation on local shards; see `partc.rules.local`."""
    return scans.localized(op, sizes, resolve_lowered) if op.name == SCAN else local.localize(op, rule, sizes)


def choices(
    op: Op,
    rule: OpRule,
    axis: str,
    n: int,
    cuts: Mapping[str, Collection[int]] | None = None,
    *,
    normalized: bool = False,
) -> tuple[Choice, ...]:
    """All ways to distribute the operation over an axis of size `n`; replication is not among them.

    `cuts` gives additional values of `outer` for each factor (see `factor_cuts`). With `normalized`, the dimensions
    over which a norm sums may be cut as well.
    """
    found = [Choice(axis=axis, factor=None)]
    sharded = dict(rule.sharded)
    taken = {choice.factor for choice in op.choices if choice.axis != axis}
    for factor in rule.factors:
        whole = factor.kind == "blocked" and not (normalized and factor.name in rule.normalized)
        if whole or (factor.name in sharded and factor.name in taken):
            continue
        outers = {1} if factor.name in sharded else {1, *(cuts or {}).get(factor.name, ())}
        found += [
            Choice(axis=axis, factor=factor.name, outer=outer)
            for outer in sorted(outers)
            if factor.size % (outer * n) == 0
        ]
    if rule.ring and holds_weights_whole(axis) and {*rule.ring, RING}.isdisjoint(taken):
        outers = {1, *(cuts or {}).get(rule.ring[0], ())}
        found += [
            Choice(axis=axis, factor=RING, outer=outer) for outer in sorted(outers) if _goes_around(rule, n * outer)
        ]
    if RING in taken:
        found = [choice for choice in found if choice.factor not in rule.ring]
    found += [Choice(axis=axis, factor=f"{PARTIAL}{index}") for index in range(len(rule.linear))]
    return tuple(found)


def _goes_around(rule: OpRule, n: int) -> bool:
    """Whether queries, keys and values are cut into equal parts."""
    sizes = {rule.factor(name).size for name in rule.ring}
    return len(sizes) == 1 and sizes.pop() % n == 0


def fits(rule: OpRule, chosen: Sequence[Choice], sizes: Sizes) -> bool:
    """Whether every factor is divisible by the product of the axes that cut it.

    A layout alone cannot tell this for a factor that is never the minor one of a dimension.
    """
    for factor in rule.factors:
        ways: dict[int, int] = {}
        for choice in chosen:
            if choice.factor == factor.name or (choice.factor == RING and factor.name in rule.ring):
                ways[choice.outer] = ways.get(choice.outer, 1) * sizes[choice.axis]
        bounds = sorted({1, *ways, factor.size} - {0})  # every part of an empty dimension is empty
        if any(end % (start * ways.get(start, 1)) for start, end in pairwise(bounds)):
            return False
    return True


def placements(op: Op, rule: OpRule, choice: Choice | None) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """The placements on an axis that the choice requires of operands and implies for results."""
    required, made = _placements(op, rule, choice)
    required = tuple(_dual(each) if index in rule.gradients else each for index, each in enumerate(required))
    return required, tuple(map(_dual, made)) if rule.makes_gradients else made


def _dual(placement: Placement) -> Placement:
    """The placement of the gradient of a tensor that is placed in this way."""
    match placement:
        case Varying():
            return Partial()
        case Partial():
            return Replicated()
    return placement


def _placements(op: Op, rule: OpRule, choice: Choice | None) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    if choice is None:
        return (Replicated(),) * len(rule.operands), (Replicated(),) * len(rule.results)
    if choice.factor is None:
        return _alike_results(op, rule, [Varying() for _ in rule.operands], Varying())
    if choice.factor == RING:
        cuts = [replace(choice, factor=name) for name in rule.ring]
        rows = [[_shard(dims, rule, cut) for cut in cuts] for dims in (*rule.operands, *rule.results)]
        found: list[Placement] = [next((placed for placed in each if placed), Varying()) for each in rows]
        return _invariant_without_gradient(found[: len(rule.operands)], rule), tuple(found[len(rule.operands) :])
    if choice.factor.startswith(PARTIAL):
        group = rule.linear[int(choice.factor.removeprefix(PARTIAL))]
        summed: list[Placement] = [Partial() if at in group else Varying() for at in range(len(rule.operands))]
        return _alike_results(op, rule, summed, Partial())
    factor = rule.factor(choice.factor)
    everywhere = factor.kind == "parallel" or factor.name in rule.normalized  # in every result
    if factor.kind == "blocked" and not everywhere:
        raise InternalError(f"{op.name} cannot be cut along {factor.name}")
    combined = factor.name in rule.combined
    others: Placement = Replicated() if combined else Varying()
    sums = rule.added if factor.kind == "contracted" else rule.unread
    asked = [
        _shard(dims, rule, choice) or (Partial() if index in sums else others)
        for index, dims in enumerate(rule.operands)
    ]
    if everywhere:
        return _invariant_without_gradient(asked, rule), tuple(_cut(dims, rule, choice) for dims in rule.results)
    return _alike_results(op, rule, asked, Replicated() if combined else Partial())


def _alike_results(
    op: Op, rule: OpRule, asked: list[Placement], made: Placement
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """The placements of operands, and of results that are all placed as `made`; integers do not vary."""
    results = (
        Replicated() if isinstance(made, Varying) and value.type.dtype not in FLOATING else made for value in op.results
    )
    return _invariant_without_gradient(asked, rule), tuple(results)


def _invariant_without_gradient(asked: list[Placement], rule: OpRule) -> tuple[Placement, ...]:
    """Replace Varying by Replicated for operands without a gradient."""
    return tuple(
        Replicated() if index in rule.integral and isinstance(placement, Varying) else placement
        for index, placement in enumerate(asked)
    )


def _shard(dims: Dims, rule: OpRule, choice: Choice) -> Shard | None:
    """The placement of a tensor with these dimensions under the choice; None if the choice does not cut it."""
    for dim, names in enumerate(dims):
        if choice.factor in names:
            before = math.prod(rule.factor(name).size for name in names[: names.index(choice.factor)])
            return Shard(dim, before * choice.outer)
    return None


def _cut(dims: Dims, rule: OpRule, choice: Choice) -> Shard:
    found = _shard(dims, rule, choice)
    if found is None:
        raise InternalError(f"parallel factor {choice.factor} is missing from a result")
    return found


def flops(op: Op, rule: OpRule, *, parts: int = 1) -> int:
    """The floating-point operations of the matrix products in the operation; 0 without products.

    Shapes are global, or local to a rank; `parts` is the number of blocks of keys and values that visit the rank.
    """
    attention, whole = Attention.of(op), rule.flops * parts
    if attention is None:
        return whole
    if reads := attention.reads:
        return whole * (reads[0] + reads[1]) // reads[2]
    if window := attention.window:
        t = rule.factor("t").size * parts
        ahead = window * t - window * (window - 1) // 2  # scores of a row's own position and of those before
        return whole * (ahead if attention.causal else 2 * ahead - t) // (t * t)
    return whole // 2 if attention.causal else whole


def is_matmul(op: Op) -> bool:
    entry = TABLE.get(op.name)
    return entry is not None and entry.matmul


def has_products(op: Op) -> bool:
    """Whether an operation, which compiling may have introduced, has matrix products."""
    entry = TABLE.get(op.name) or TABLE.get(LOWERED.get(op.name, ""))
    return entry is not None and (entry.matmul or op.name == SCAN)


def is_elementwise(name: str) -> bool:
    """Whether each element of the result comes from the elements at its place in the operands."""
    entry = TABLE.get(name)
    return entry is not None and entry.elementwise


def is_users(name: str) -> bool:
    """Whether the operation's rule was registered by the user."""
    entry = TABLE.get(name)
    return entry is not None and entry.user


def is_cheap(op: Op, activations: Collection[str]) -> bool:
    """Whether recomputing the operation is cheap: no lookup, no product with a weight, no fused attention.

    `activations` are the values that depend on a call's inputs. Collectives and unknown operations are not cheap.
    """
    entry = TABLE.get(LOWERED.get(op.name, op.name))
    if entry is None or entry.user or entry.heavy:
        return False
    return not entry.matmul or all(name in activations for name in op.refs())


def demands_dense(op: Op, position: int) -> bool:
    """Whether the kernel reads this argument as dense memory. Operators of other libraries are assumed to do so."""
    return "::" in op.name or position in DENSE.get(op.name, ())


def precision_of(name: str) -> Precision:
    """The precision of an operation under mixed precision; operations without a rule run in fp32."""
    entry = TABLE.get(name)
    return "high" if entry is None else entry.precision


def operations() -> tuple[str, ...]:
    """The names of all operations with a rule."""
    return tuple(TABLE)


def propagate_cuts(graph: Graph, types: Mapping[str, TensorType], halved: Collection[int] = ()) -> Cuts:
    """For each value and dimension, the `outer` values at which a cut is contiguous for some operation."""
    return _cuts.propagate_cuts(graph, types, resolve, halved)
