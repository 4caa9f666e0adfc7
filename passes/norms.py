"""Write out the norms whose rows are cut, with sums over the ranks.

    inner          = rms_norm(gelu, (32,), inner.weight, 1e-06)  # f32[8, 4, 32@tp]
  ->
    inner_square   = mul(gelu, gelu)                             # f32[8, 4, 32@tp]
    inner_mean_sum = sum(inner_square, (2,), True)               # f32[8, 4, 1] partial(tp)
    inner_mean     = mul(inner_mean_sum, 0.03125)                # f32[8, 4, 1]
    inner_var      = add(inner_mean, 1e-06)                      # f32[8, 4, 1]
    inner_rstd     = rsqrt(inner_var)                            # f32[8, 4, 1]
    inner_unit     = mul(gelu, inner_rstd)                       # f32[8, 4, 32@tp]
    inner          = mul(inner_unit, inner.weight)               # f32[8, 4, 32@tp]

Norms of whole queries and keys before these are divided into heads, and norms of the hidden values of a feed-forward
layer, read values that tp cuts along the rows. Each rank adds up its part of a row; one number a row is then summed
over the ranks, instead of moving the row. A layer norm needs two such sums, one after the other, because its variance
is that of the centred values. All is computed in fp32 if the values have 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from partc.errors import InternalError
from partc.ir.layout import Shard, Sizes, Varying
from partc.ir.naming import unique
from partc.ir.program import Choice, DType, DTypeArg, Op, Program, Ref, Region, TensorType, Value
from partc.passes.fuse.composites import epsilon, spelled_out
from partc.rules import OpRule, placements, resolve
from partc.sharding.choices import layouts

_Types = Mapping[str, TensorType]


def norms(program: Program) -> Program:
    """Replace each norm that cuts a normalized dimension, in forward graphs."""
    return replace(program, regions=tuple(_written(region, program.sizes) for region in program.regions))


def _written(region: Region, sizes: Sizes) -> Region:
    types = dict(region.types(region.forward))
    taken = {*types}
    ops: list[Op] = []
    for op in region.forward.ops:
        rule = resolve(op, types) if op.choices else None
        if rule is None or not any(choice.factor in rule.normalized for choice in op.choices):
            ops.append(op)
            continue
        for operand, part in _parts(op, types, taken):
            ops.append(_placed(part, _choices(op, rule, operand), types, sizes))
            types[part.result.name] = ops[-1].result.type
    return replace(region, forward=replace(region.forward, ops=tuple(ops)))


def _parts(op: Op, types: _Types, taken: set[str]) -> Iterator[tuple[int, Op]]:
    """The norm's operations, with unsharded results. Each comes with the number of an operand of the norm that has the
    same dimensions. Operands of other types, and values of 16 bits, are cast around them.
    """
    made, x = op.result, next(op.refs())
    dtype: DType = "f32" if made.type.dtype in ("bf16", "f16") else made.type.dtype
    if op.name == "rms_norm" and op.args[3] is None:
        op = replace(op, args=(*op.args[:3], epsilon(types[x].dtype)))
    cast: dict[str, str] = {}
    for number, name in enumerate(op.refs()):
        if types[name].dtype != dtype:
            cast[name] = unique(f"{name}_wide", taken)
            yield number, _cast(op, name, types[name].shape, dtype, cast[name])
    plain = {cast.get(name, name): TensorType.replicated(dtype, types[name].shape) for name in op.refs()}
    result = made.name if made.type.dtype == dtype else unique(f"{made.name}_wide", taken)
    op = replace(op.renamed(cast), results=(_value(result, dtype, made.type.shape),), choices=())
    for part in spelled_out(op, plain, {}, taken):
        yield 0, part
    if result != made.name:
        yield 0, _cast(op, result, made.type.shape, made.type.dtype, made.name)


def _value(name: str, dtype: DType, shape: tuple[int, ...]) -> Value:
    return Value(name=name, type=TensorType.replicated(dtype, shape))


def _cast(op: Op, name: str, shape: tuple[int, ...], dtype: DType, made: str) -> Op:
    return Op(name="to", args=(Ref(name), DTypeArg(dtype)), results=(_value(made, dtype, shape),), source=op.source)


def _choices(op: Op, rule: OpRule, operand: int) -> Iterator[Choice]:
    """The norm's choices for an elementwise operation on one of its operands, or on values of its shape."""
    for choice in op.choices:
        match placements(op, rule, choice)[0][operand]:
            case Shard(dim=dim, outer=outer):
                yield Choice(axis=choice.axis, factor=f"d{dim}", outer=outer)
            case Varying():
                yield Choice(axis=choice.axis, factor=None)


def _placed(op: Op, chosen: Iterator[Choice], types: _Types, sizes: Sizes) -> Op:
    """The operation with the choices that its dimensions allow: statistics of rows have none along the rows."""
    rule = resolve(op, types)
    factors = {None, *(factor.name for factor in rule.factors)} if rule is not None else {None}
    op = replace(op, choices=tuple(choice for choice in chosen if choice.factor in factors))
    found = layouts(op, rule, types, sizes)
    if found is None:
        raise InternalError(f"{op.name} cannot be cut like the norm that it belongs to")
    return op.laid_out(found[1])
