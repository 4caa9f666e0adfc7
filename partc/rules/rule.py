"""The rule of one operation for given shapes: its factors, and the dimensions that carry them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from partc.errors import InternalError
from partc.ir.program import FLOATING, Arg, Op, Ref, TensorType

Kind = Literal["parallel", "contracted", "blocked"]
Dims = tuple[tuple[str, ...], ...]  # the factors of each dimension, major first; () for a broadcast 1
RING = "ring"  # Choice.factor of an operation that moves operands around the axis in a ring
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """An index of the operation: `parallel` (in all results), `contracted` (summed), or `blocked` (must stay whole)."""

    name: str
    size: int
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """The factors of every dimension of the operands (in the order of `op.refs()`) and of the results.

    `linear` holds groups of operands in which the operation is jointly linear: if exactly the operands of one group are
    Partial, so are the results. `added` are operands that are added to a contraction's sum, such as a bias: if a
    contracted factor is cut, they must be Partial, so that they are added once. `combined` are contracted factors that
    the operation's sharded form (named in `sharded`) reduces itself, so that its results are replicated. `integral`
    operands have no gradient.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: Groups = ()
    added: tuple[int, ...] = ()
    combined: tuple[str, ...] = ()
    sharded: tuple[tuple[str, str], ...] = ()  # factor -> the operation to run where it is cut
    integral: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()  # operands that are gradients; their placements are dual to those of their tensors
    makes_gradients: bool = False  # the results are gradients as well
    unread: tuple[int, ...] = ()  # operands whose values are not read; partial if they lack the cut factor
    ring: tuple[str, ...] = ()  # factors that are cut together if the operation runs as a ring
    normalized: tuple[str, ...] = ()  # blocked factors that may be cut all the same: the pass `norms` writes their sums
    work: tuple[tuple[str, ...], ...] = ()  # one product of factors per matrix product in the operation

    @property
    def flops(self) -> int:
        """The floating-point operations of its matrix products, over global shapes."""
        sizes = {factor.name: factor.size for factor in self.factors}
        return sum(2 * math.prod(sizes[name] for name in product) for product in self.work)

    def factor(self, name: str) -> Factor:
        return next(factor for factor in self.factors if factor.name == name)


def make(
    operands: Sequence[tuple[Dims, TensorType]],
    results: Sequence[Dims],
    sizes: Mapping[str, int],
    *,
    blocked: Collection[str] = (),
    linear: Sequence[Collection[int]] = (),
    added: Sequence[int] = (),
    combined: Sequence[str] = (),
    sharded: Mapping[str, str] | None = None,
    ring: Sequence[str] = (),
    normalized: Collection[str] = (),
    work: Sequence[Sequence[str]] = (),
) -> OpRule:
    """Build a rule from factor names and sizes; the kind of each factor follows from its positions.

    Factors of size 1 are left out. A factor that only some results carry, or that one tensor carries twice, must stay
    whole. `work` holds one product of factors for each matrix product in the operation.
    """
    dims_of = [dims for dims, _ in operands]
    carried = [name for dims in (*dims_of, *results) for dim in dims for name in dim]
    names = [name for name in dict.fromkeys(carried) if sizes[name] != 1]
    stop = set(blocked)

    def kind(name: str) -> Kind:
        times = [sum(dim.count(name) for dim in dims) for dims in results]
        if name in stop or max([*times, *(sum(d.count(name) for d in dims) for dims in dims_of)]) > 1:
            return "blocked"
        if times and all(times):
            return "parallel"
        return "blocked" if any(times) else "contracted"

    def splits(group: Collection[int]) -> bool:
        """Whether the group's operands that are not Partial can be made Partial; integers cannot."""
        dtypes = {operands[i][1].dtype for i in group}
        return dtypes <= FLOATING or (len(group) == 1 and "bool" not in dtypes)

    groups = [tuple(sorted(group)) for group in linear if splits(group)]
    return OpRule(
        factors=tuple(Factor(name, sizes[name], kind(name)) for name in names),
        operands=tuple(_trimmed(dims, names) for dims in dims_of),
        results=tuple(_trimmed(dims, names) for dims in results),
        linear=tuple(group for group in groups if group),
        added=tuple(added),
        combined=tuple(combined),
        sharded=tuple(sorted((sharded or {}).items())),
        ring=tuple(ring) if all(name in names for name in ring) else (),
        normalized=tuple(name for name in names if name in normalized),
        integral=tuple(index for index, (_, type) in enumerate(operands) if type.dtype not in FLOATING),
        work=tuple(tuple(name for name in product if name in names) for product in work),
    )


def _trimmed(dims: Dims, names: Collection[str]) -> Dims:
    return tuple(tuple(name for name in dim if name in names) for dim in dims)


def argument(op: Op, index: int, name: str, default: Arg = None) -> Arg:
    """An argument by position, or by name if it was given by name."""
    if index < len(op.args):
        return op.args[index]
    return dict(op.attrs).get(name, default)


def integers(arg: Arg) -> tuple[int, ...]:
    """One size or several, as a tuple."""
    items = arg if isinstance(arg, tuple) else (arg,)
    return tuple(item for item in items if isinstance(item, int))


def number(arg: Arg) -> int:
    """An argument that is an integer."""
    if not isinstance(arg, int):
        raise InternalError(f"{arg!r} is not an integer")
    return arg


def is_ref(arg: Arg) -> bool:
    return isinstance(arg, Ref)
