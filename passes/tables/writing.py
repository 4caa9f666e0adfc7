"""Writes the operations that replace lookups, with layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from partc.errors import InternalError, Source
from partc.ir.layout import Layout, Shard, Sizes
from partc.ir.naming import unique
from partc.ir.program import Arg, Choice, DType, Op, Ref, TensorType, Value
from partc.rules import OpRule, resolve
from partc.rules.rule import Dims
from partc.sharding.choices import axis_order, layouts


@dataclass(kw_only=True)
class Writing:
    """Operations under construction. `types` has the values that they may read, and receives their results."""

    types: dict[str, TensorType]
    sizes: Sizes
    taken: set[str]
    source: Source | None
    ops: list[Op] = field(default_factory=list)

    def plain(
        self,
        name: str,
        args: tuple[Arg, ...],
        made: str,
        shape: tuple[int, ...],
        dtype: DType,
        *,
        attrs: tuple[tuple[str, Arg], ...] = (),
        read: Layout | None = None,
        keep: Ref | None = None,
        more: tuple[Choice, ...] = (),
        new: bool = True,
    ) -> Ref:
        """Write an operation under the layout of one operand (the last, or `keep`), or under the layout `read` of
        it; `more` are the choices for axes that do not cut this operand.
        """
        names = [unique(made, self.taken) if new else made]
        (ref,) = self.several(name, args, names, [shape], dtype, attrs, read, keep, more)
        return ref

    def several(
        self,
        name: str,
        args: tuple[Arg, ...],
        made: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: DType,
        attrs: tuple[tuple[str, Arg], ...] = (),
        read: Layout | None = None,
        keep: Ref | None = None,
        more: tuple[Choice, ...] = (),
    ) -> Sequence[Ref]:
        values = tuple(
            Value(name=each, type=TensorType.replicated(dtype, shape)) for each, shape in zip(made, shapes, strict=True)
        )
        op = Op(name=name, args=args, attrs=attrs, results=values)
        rule = resolve(op, self.types)
        if rule is None:
            raise InternalError(f"{name} has no rule")
        refs = [*op.refs()]
        place = len(refs) - 1 if keep is None else refs.index(keep.name)
        rows = refs[place]
        layout = read or self.types[rows].layout
        op = replace(op, choices=(*self._following(layout, rule.operands[place], rule), *more))
        found = layouts(op, rule, self.types, self.sizes)
        if found is None:
            raise InternalError(f"{name} of {self.types[rows]} is cut in a way that its sizes do not allow")
        op = op.laid_out(found[1])
        self.add(op)
        return [Ref(value.name) for value in op.results]

    def add(self, op: Op) -> None:
        self.types.update((value.name, value.type) for value in op.results)
        self.ops.append(replace(op, source=self.source))

    def _following(self, layout: Layout, dims: Dims, rule: OpRule) -> Iterator[Choice]:
        """The choices under which an operand has a layout; an axis nests inside earlier ones that cut the same
        sub-dimension.
        """
        left = {factor.name: factor.size for factor in rule.factors}
        for axis in axis_order(self.sizes):
            placed = layout.placement(axis)
            if isinstance(placed, Shard):
                before = 1
                for name in dims[placed.dim]:
                    after = before * rule.factor(name).size
                    if placed.outer < after and left[name] % self.sizes[axis] == 0:
                        yield Choice(axis=axis, factor=name, outer=max(1, placed.outer // before))
                        left[name] //= self.sizes[axis]
                        break
                    before = after
