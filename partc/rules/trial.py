"""Numerical trials of the user's rules: an operator cut in two along every factor, against the whole operator.

    x[b s], y[b] -> []   of a sum over b is right     sum(x[:2]) + sum(x[2:])   =  sum(x)
                         of a mean over b is wrong    mean(x[:2]) + mean(x[2:]) = 2 mean(x)

Each factor that a rule allows to cut, and each group of operands that it declares linear, is tried on small shapes:
results, and gradients if there are any. If the operator rejects small shapes, the shapes of the call are used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partc.errors import PartcError
from partc.ir.interpreter import results_of
from partc.ir.layout import Partial, Placement, Replicated, Shard, Varying
from partc.ir.operators import DTYPES
from partc.ir.program import Arg, Choice, Op, Program, Ref, TensorType
from partc.rules import OpRule, choices, is_users, placements, resolve
from partc.rules.notation import NotationError
from partc.runtime.comm.comm import join, split

AXIS = "trial"
SMALL = (4, 6, 8, 10)
LARGEST = 13  # the most parts into which a factor is cut
MOST = 1 << 18  # the most operand elements for trials on the shapes of a call
KINDS = ("normal", "probability", "sign")
LIMIT = {torch.float64: 1e-8, torch.float32: 1e-3}

Build = Callable[[Op, Mapping[str, TensorType]], OpRule | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A cut that changes the operator's results."""

    factor: str  # "" for operands in which the operator is not linear
    cause: str


def check_rules(program: Program) -> None:
    """Try the user's rules on every call of the program. Raises PartcError P0315 for a wrong rule."""
    tried: set[object] = set()
    for region in program.regions:
        types = region.types(region.forward)
        for op in region.forward.ops:
            key = (op.name, tuple(types[name] for name in op.refs()), str(op.args), str(op.attrs))
            if not is_users(op.name) or key in tried:
                continue
            tried.add(key)
            for fault in trial(op, types, resolve) or ():
                raise PartcError(
                    "P0315", f"the rule of {op.name} is wrong: {fault.cause}", help=_advice(fault), source=op.source
                )


def trial(op: Op, types: Mapping[str, TensorType], build: Build) -> tuple[Fault, ...] | None:
    """The cuts that change results or gradients under the rule that `build` returns; None if no trial could run.

    Raises NotationError or PartcError if the rule does not fit the call.
    """
    rule = build(op, types)
    if rule is None:
        return None
    for shapes in (_small(rule, [types[name].shape for name in op.refs()]), None):
        tried = _Trial.of(op, types, build, shapes)
        if tried is not None:
            return tuple(tried.faults())
    return None


def _advice(fault: Fault) -> str:
    if fault.factor:
        return f'name a factor that must stay whole: blocked="{fault.factor}", or correct the rule'
    return "name the operands in which the operator is linear, groups separated by |, or leave linear= out"


def _small(rule: OpRule, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The operands' shapes with small factors, of different sizes as far as possible."""
    sizes = dict(zip((factor.name for factor in rule.factors), itertools.cycle(SMALL), strict=False))
    made = []
    for dims, shape in zip(rule.operands, shapes, strict=True):
        made.append(
            tuple(
                math.prod(sizes[name] for name in dim) if dim else size for dim, size in zip(dims, shape, strict=True)
            )
        )
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    operands: tuple[Tensor, ...]
    whole: tuple[Tensor, ...]
    roots: tuple[int, ...]  # the operands that have gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """An operator that runs on some operands, with its rule for their shapes."""

    op: Op
    rule: OpRule
    draws: tuple[_Draw, ...]

    @classmethod
    def of(
        cls, op: Op, types: Mapping[str, TensorType], build: Build, shapes: Sequence[tuple[int, ...]] | None
    ) -> _Trial | None:
        """None if the operator does not run on these shapes, or is not deterministic."""
        known = [types[name] for name in op.refs()]
        shapes = [type.shape for type in known] if shapes is None else shapes
        if sum(map(math.prod, shapes)) > MOST:
            return None
        for dtype in (torch.float64, torch.float32):
            draws = tuple(_draws(op, [t.shaped(s) for t, s in zip(known, shapes, strict=True)], dtype))
            if not draws:
                continue
            made = draws[0].whole
            results = tuple(
                replace(value, type=value.type.shaped(tuple(x.shape)))
                for value, x in zip(op.results, made, strict=True)
            )
            fitted = replace(op, results=results, choices=())
            given = {name: type.shaped(shape) for name, type, shape in zip(op.refs(), known, shapes, strict=True)}
            try:
                rule = build(fitted, given)
            except (PartcError, NotationError):
                return None
            return None if rule is None else cls(op=fitted, rule=rule, draws=draws)
        return None

    def faults(self) -> Iterator[Fault]:
        for choice, n in self._cuts():
            cause = next(filter(None, (self._mismatch(choice, n, draw) for draw in self.draws)), "")
            if cause:
                yield Fault(factor="" if _linear(choice) else str(choice.factor), cause=cause)

    def _cuts(self) -> Iterator[tuple[Choice, int]]:
        """Every choice, with the number of parts into which its factor divides."""
        sizes = {factor.name: factor.size for factor in self.rule.factors}
        for n in range(2, LARGEST + 1):
            for choice in choices(self.op, self.rule, AXIS, n):
                smallest = min((m for m in range(2, n + 1) if sizes.get(str(choice.factor), 2) % m == 0), default=0)
                if choice.factor is not None and smallest == n:
                    yield choice, n

    def _mismatch(self, choice: Choice, n: int, draw: _Draw) -> str:
        asked, made = placements(self.op, self.rule, choice)
        held = [_placed(x, placement, n) for x, placement in zip(draw.operands, asked, strict=True)]
        leaves = [
            [x.detach().clone().requires_grad_(index in draw.roots) for x in each] for index, each in enumerate(held)
        ]
        try:
            parts = [_run(self.op, [each[rank] for each in leaves]) for rank in range(n)]
        except Exception as error:
            return f"{_cut(choice, n)}, it fails: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"
        for number, (expected, placement) in enumerate(zip(draw.whole, made, strict=True)):
            found = _reassembled([part[number].detach() for part in parts], placement)
            wrong = _difference(found, expected)
            if wrong:
                mean = isinstance(placement, Partial) and found is not None and not _difference(found / n, expected)
                which = f"result {number}" if len(draw.whole) > 1 else "the result"
                why = ": it is a mean over that factor, and parts of a mean do not sum to it" if mean else ""
                return f"{_cut(choice, n)}, {which} is {wrong}{why}"
        return self._wrong_gradient(choice, n, draw, asked, made, leaves, parts)

    def _wrong_gradient(
        self,
        choice: Choice,
        n: int,
        draw: _Draw,
        asked: Sequence[Placement],
        made: Sequence[Placement],
        leaves: Sequence[Sequence[Tensor]],
        parts: Sequence[tuple[Tensor, ...]],
    ) -> str:
        roots = draw.roots
        plain = [x.detach().clone().requires_grad_(index in roots) for index, x in enumerate(draw.operands)]
        outputs = _run(self.op, plain)
        live = [number for number, x in enumerate(outputs) if x.requires_grad]
        if not live or not all(parts[0][number].requires_grad for number in live):
            return ""
        generator = torch.Generator().manual_seed(1)
        arriving = [torch.rand(outputs[k].shape, generator=generator, dtype=torch.float64).to(outputs[k]) for k in live]
        expected = _gradients([outputs[k] for k in live], [plain[i] for i in roots], arriving)
        sent = [_placed(grad, _dual(made[k]), n) for k, grad in zip(live, arriving, strict=True)]
        found = [
            _gradients([part[k] for k in live], [leaves[i][rank] for i in roots], [each[rank] for each in sent])
            for rank, part in enumerate(parts)
        ]
        for place, index in enumerate(roots):
            whole = _reassembled([gradients[place] for gradients in found], _dual(asked[index]))
            wrong = _difference(whole, expected[place])
            if wrong:
                return f"{_cut(choice, n)}, the gradient of operand {index} is {wrong}"
        return ""


def _gradients(outputs: Sequence[Tensor], roots: Sequence[Tensor], arriving: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(outputs, roots, arriving, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(roots, found, strict=True)]


def _draws(op: Op, types: Sequence[TensorType], dtype: torch.dtype) -> Iterator[_Draw]:
    """Operands of several kinds that the operator accepts, with its deterministic results.

    Operands may have to be normal numbers, signs or probabilities. If there are few operands, every combination is
    tried.
    """
    numbers = [index for index, type in enumerate(types) if type.differentiable]
    mixed = (
        itertools.product(KINDS, repeat=len(numbers))
        if len(numbers) <= 3
        else ((kind,) * len(numbers) for kind in KINDS)
    )
    for kinds in mixed:
        chosen = dict(zip(numbers, kinds, strict=True))
        operands = tuple(_numbers(type, chosen.get(i), dtype, i) for i, type in enumerate(types))
        try:
            whole, again = _run(op, operands), _run(op, operands)
        except Exception:  # operators reject shapes and numbers by any exception
            continue
        if all(not _difference(x, y) for x, y in zip(whole, again, strict=True)):
            yield _Draw(
                operands=operands, whole=whole, roots=tuple(i for i in numbers if _differentiable(op, operands, i))
            )


def _differentiable(op: Op, operands: Sequence[Tensor], index: int) -> bool:
    """Whether the operator has a derivative with respect to an operand; torch refuses some, such as labels."""
    given = [x.detach().clone().requires_grad_(place == index) for place, x in enumerate(operands)]
    try:
        outputs = [x for x in _run(op, given) if x.requires_grad]
        if outputs:
            _gradients(outputs, [given[index]], [torch.ones_like(x) for x in outputs])
        return bool(outputs)
    except RuntimeError:
        return False


def _linear(choice: Choice) -> bool:
    return str(choice.factor).startswith("partial")


def _cut(choice: Choice, n: int) -> str:
    return "of operands that are sums of two parts" if _linear(choice) else f"cut in {n} along {choice.factor}"


def _numbers(type: TensorType, kind: str | None, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of a kind; integers are indices into the smallest dimension."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "normal":
        return torch.randn(type.shape, generator=generator, dtype=dtype)
    if kind == "probability":
        return torch.rand(type.shape, generator=generator, dtype=dtype) * 0.9 + 0.05
    drawn = torch.randint(2, type.shape, generator=generator)
    return (drawn * 2 - 1).to(dtype) if kind == "sign" else drawn.to(DTYPES[type.dtype])


def _run(op: Op, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the operator with operands by position: one value may be read twice."""
    count = itertools.count()

    def numbered(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(str(next(count)))
        return tuple(map(numbered, arg)) if isinstance(arg, tuple) else arg

    args = tuple(map(numbered, op.args))
    attrs = tuple((name, numbered(arg)) for name, arg in op.attrs)
    made = results_of(replace(op, args=args, attrs=attrs), {str(i): x for i, x in enumerate(operands)})
    return tuple(made[value.name] for value in op.results)


def _placed(x: Tensor, placement: Placement, n: int) -> list[Tensor]:
    """The shards of n ranks."""
    if isinstance(placement, Shard):
        return list(split(x, n, placement.dim, placement.outer))
    if isinstance(placement, Partial):
        generator = torch.Generator().manual_seed(2)
        parts = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for _ in range(n - 1)]
        return [*parts, x - sum(parts[1:], parts[0])]
    return [x] * n


def _reassembled(held: Sequence[Tensor], placement: Placement) -> Tensor | None:
    """The whole tensor from the ranks' shards; None if replicated shards differ."""
    if isinstance(placement, Shard):
        return join(torch.stack(list(held)), placement.dim, placement.outer)
    if isinstance(placement, Partial):
        return sum(held[1:], held[0])
    return held[0] if not any(_difference(x, held[0]) for x in held) else None


def _dual(placement: Placement) -> Placement:
    """The placement of the gradient of a tensor with this placement."""
    if isinstance(placement, Partial):
        return Replicated()
    return Partial() if isinstance(placement, Varying) else placement


def _difference(found: Tensor | None, expected: Tensor) -> str:
    """The first difference between two tensors; "" if they are equal to rounding."""
    if found is None:
        return "different on each rank, and should be equal"
    if found.shape != expected.shape:
        return f"of shape {tuple(found.shape)} where the whole gives {tuple(expected.shape)}"
    if not expected.is_floating_point():
        equal = found == expected
    else:
        limit = LIMIT.get(expected.dtype, 1e-2)
        equal = torch.isclose(found, expected, rtol=limit, atol=limit, equal_nan=True)
    if bool(equal.all()):
        return ""
    place = tuple(int(i) for i in (~equal).nonzero()[0])
    at = f" at {list(place)}" if place else ""
    return f"{found[place].item():.6g}{at} where the whole gives {expected[place].item():.6g}"
