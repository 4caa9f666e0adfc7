"""Leave out the rows of experts that no token chooses, where a model computes every expert for every token.

Two facts allow this. The addends of a sum over experts are zero wherever a token has not chosen the expert, for any
weights and tokens, so that their gradients are zero as well (`fixed`). And every operation between the tokens' copies
and the sum computes the elements of an expert from the same expert's, so that the chosen rows can be computed alone
(`only`). A `gather` among the experts' results needs the second fact only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from partc import fuel
from partc.ir.interpreter import results_of
from partc.ir.naming import unique
from partc.ir.operators import DTYPES
from partc.ir.program import Arg, Op, Ref, Region, TensorType, Value
from partc.passes.dense.blocks import (
    EXPERTS,
    Form,
    Label,
    blocks_by_dim,
    form_of,
    labels,
    operand_forms,
    without_experts,
)
from partc.passes.route.rows import RowWriter
from partc.passes.route.writes import Distinct
from partc.rules import is_elementwise
from partc.rules.integer_bounds import IntegerBounds, bounds_of_graph
from partc.rules.local import SHAPES
from partc.rules.rule import argument
from partc.rules.shapes import copies
from partc.rules.tried import rule_of

_SUMS = frozenset({"sum", "einsum", "matmul", "bmm"})
_MOVES = frozenset({"reshape", "permute", "expand", "repeat"})
_ORDERS = frozenset({"reshape", "permute"})
_DIMS = {"slice": 1, "split": 2, "repeat_interleave": 2}  # the positions of these operations' dimensions


class _NotByRowError(Exception):
    """An operation mixes the rows of experts, so that the chosen ones cannot be computed alone."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A tensor with the numbers of each token's chosen experts. The block EXPERTS of its form counts the choices."""

    name: str
    form: Form

    @property
    def count(self) -> int:
        return dict(self.form)[EXPERTS]

    @property
    def tokens(self) -> Form:
        return without_experts(self.form)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a mixture: a sum over experts, or a gather of some experts' results, which has an index.

    `operands` are the operands that have a dimension for experts.
    """

    operands: Mapping[str, Form]
    index: tuple[str, Form] | None = None

    @property
    def experts(self) -> int:
        return next(dict(form)[EXPERTS] for form in self.operands.values())


@dataclass(frozen=True, slots=True)
class _GraphFacts:
    """The types and makers of a graph's values."""

    types: Mapping[str, TensorType]
    makers: Mapping[str, Op]
    bounds: Callable[[], Mapping[str, IntegerBounds]]

    @classmethod
    def of(cls, region: Region) -> _GraphFacts:
        graph, types = region.forward, region.types(region.forward)
        return cls(types, graph.makers(), functools.cache(lambda: bounds_of_graph(graph, types)))

    def counts(self, name: str, form: Form, experts: int) -> bool:
        """Whether each element of a value is the number of its expert."""
        op = self.makers.get(name)
        if op is None or op.name == "arange":
            return op is not None and op.args == (experts,) and form == ((EXPERTS, experts),)
        forms = operand_forms(op, name, form, self.types) if op.name in _MOVES else None
        return forms is not None and self.counts(next(op.refs()), forms[0], experts)


def with_chosen_rows(region: Region) -> Region:
    """The region without rows of experts that no token chooses."""
    while (found := _first(region)) is not None:
        region = found
    return region


def products_of_all(region: Region) -> Mapping[str, int]:
    """The results of products that have a row for each token and expert, and the number of experts."""
    facts, found = _GraphFacts.of(region), dict[str, int]()
    for op in region.forward.ops:
        if op.name == "expert_matmul":
            _, numbers, weights = op.refs()
            (rows,), (experts, *_) = facts.types[numbers].shape, facts.types[weights].shape
            form = form_of((rows // experts, experts), ("tokens", EXPERTS))
            if rows % experts == 0 and facts.counts(numbers, form, experts):
                found[op.result.name] = experts
    return found


def _first(region: Region) -> Region | None:
    """The region with the first sum or gather rewritten that can be; None if there is none."""
    graph, dense, facts = region.forward, products_of_all(region), _GraphFacts.of(region)
    behind = {*dense}
    for op in graph.ops if dense else ():
        if behind.isdisjoint(op.refs()):
            continue
        behind.update(value.name for value in op.results)
        for end in _ends(op, facts.types):
            if end.experts not in dense.values():
                continue
            made = _ChosenRows(facts, end.experts).rewritten(op, end)
            if made is None or not fuel.may_rewrite("experts that no token chooses", op.source):
                continue
            ops = tuple(each for other in graph.ops for each in (made if other is op else (other,)))
            changed = replace(region, forward=replace(graph, ops=ops).without_dead())
            if len(products_of_all(changed)) < len(dense):
                return changed
    return None


def _ends(op: Op, types: Mapping[str, TensorType]) -> Iterator[_End]:
    """The possible ends of mixtures that an operation may be, one for each dimension that may count experts."""
    names = [*op.refs()]
    if op.name == "gather":
        (shape, chosen), dim = (types[name].shape for name in names), argument(op, 1, "dim")
        if isinstance(dim, int) and math.prod(shape) * chosen[dim] == math.prod(chosen) * shape[dim]:
            dims = [EXPERTS if place == dim % len(shape) else str(place) for place in range(len(shape))]
            yield _End({names[0]: form_of(shape, dims)}, (names[1], form_of(chosen, dims)))
    if op.name in _SUMS and len({*names}) == len(names) and (rule := rule_of(op, types)) is not None:
        for summed in (factor for factor in rule.factors if factor.kind == "contracted"):
            blocks = {factor.name: (factor.name, factor.size) for factor in rule.factors}
            blocks[summed.name] = EXPERTS, summed.size
            forms = (tuple(blocks[each] for dim in dims for each in dim) for dims in rule.operands)
            yield _End({name: form for name, form in zip(names, forms, strict=True) if EXPERTS in labels(form)})


def _counts_places(op: Op, dim: int) -> bool:
    """Whether arguments of an operation count the places of a dimension of its results."""
    if op.name in ("conv1d", "conv2d", "conv3d"):
        return dim == 1  # the number of groups
    along = argument(op, _DIMS[op.name], "dim", 0) if op.name in _DIMS else None
    return isinstance(along, int) and along % len(op.results[0].type.shape) == dim


@dataclass(slots=True)
class _ChosenRows:
    """Follows rows from a sum over experts back to the copies of the tokens."""

    facts: _GraphFacts
    experts: int
    writer: RowWriter = field(init=False)
    choice: _Choice = field(init=False)
    multiplied: bool = False  # whether a product by expert was met
    _fixed: dict[tuple[str, Form], tuple[float, _Choice] | None] = field(default_factory=dict)
    _only: dict[tuple[str, Form], str] = field(default_factory=dict)
    _written: dict[tuple[str, tuple[Form, ...]], list[str]] = field(default_factory=dict)
    _reshapes: dict[str, str] = field(default_factory=dict)  # the operands of reshapes

    def __post_init__(self) -> None:
        types = dict(self.facts.types)
        self.writer = RowWriter(types=types, taken=set(types))

    def rewritten(self, op: Op, end: _End) -> tuple[Op, ...] | None:
        """The operations in place of a sum or a gather; None if every expert counts, or most of them."""
        w = self.writer
        w.source = op.source
        if end.index is not None:
            choice = self._gathering(*end.index)
        else:
            zeros = [each for each in (self.fixed(*operand) for operand in end.operands.items()) if each is not None]
            choice = next((choice for number, choice in zeros if number == 0 and self._once(choice)), None)
        if choice is None or 2 * choice.count > self.experts:
            return None
        if not all({*choice.tokens} <= {*form} for form in end.operands.values()):
            return None
        self.choice = choice
        try:
            names = {name: self.only(name, form) for name, form in end.operands.items()}
        except _NotByRowError:
            return None
        if not self.multiplied:
            return None
        if end.index is None:
            w.keep(op.reading(names.get(name, name) for name in op.refs()))
        else:
            made = op.result
            args = (Ref(*names.values()), made.type.shape)
            w.define("reshape", args, made.type.shape, made.type.dtype, made.name)
        return tuple(w.ops)

    def _gathering(self, name: str, form: Form) -> _Choice | None:
        """The choice that a gather's index repeats for every feature."""
        while (op := self.facts.makers.get(name)) is not None and op.name in _MOVES:
            forms = operand_forms(op, name, form, self.writer.types)
            if forms is None:
                return None
            (name,), (form,) = op.refs(), forms
        return _Choice(name, form) if EXPERTS in labels(form) else None

    def _once(self, choice: _Choice) -> bool:
        """Whether no token chooses an expert twice."""
        blocks = blocks_by_dim(self.writer.shape(choice.name), choice.form)
        places = [dim for dim, here in enumerate(blocks or ()) if EXPERTS in labels(here)]
        distinct = Distinct(self.facts.makers, self.facts.types)
        return choice.count == 1 or (len(places) == 1 and distinct.numbers(choice.name, places[0]))

    def fixed(self, name: str, form: Form) -> tuple[float, _Choice] | None:
        """The number that a value has wherever a token has not chosen the expert, whatever the weights and tokens are,
        and the choice.
        """
        if (name, form) not in self._fixed:
            op = self.facts.makers.get(name)
            known = op is not None and EXPERTS in labels(form)
            self._fixed[name, form] = self._found(op, name, form) if op is not None and known else None
        return self._fixed[name, form]

    def _found(self, op: Op, name: str, form: Form) -> tuple[float, _Choice] | None:
        if op.name in ("scatter", "scatter_add"):
            return self._scattered(op, form)
        if op.name == "softmax":
            blocks = blocks_by_dim(op.result.type.shape, form)
            dim = argument(op, 1, "dim")
            if blocks is not None and isinstance(dim, int) and EXPERTS in labels(blocks[dim]):
                below = self.fixed(next(op.refs()), form)
                return (0.0, below[1]) if below is not None and below[0] == -math.inf else None
        forms = operand_forms(op, name, form, self.writer.types)
        if forms is None:
            return None
        given = [self.fixed(*operand) for operand in zip(op.refs(), forms, strict=True)]
        numbers = [None if each is None else each[0] for each in given]
        known = [number for number in numbers if number is not None]
        match op.name, numbers:
            case (("eq" | "ne"), [_, _]):
                return self._compared(op, forms)
            case (("sum" | "any" | "amax"), [0]):
                return self._over_choices(given[0], labels(form))
            case (("mul" | "logical_and" | "bitwise_and"), _) if 0 in numbers and math.prod(known) == 0:  # no 0 · ∞
                return given[numbers.index(0)]
            case "add", _ if sum(known) == -math.inf:  # no ∞ − ∞
                return given[numbers.index(-math.inf)]
            case (("div" | "expert_matmul"), [0, None, *_]):
                return given[0]
            case "masked_fill", [_, 1] if isinstance(op.args[2], int | float):
                return self._with(given[1], float(op.args[2]))
            case "where", [0 | 1 as number, *_]:
                return self._with(given[0], self._filled(op.args[2 if number == 0 else 1]))
        if None in given or len({choice for _, choice in filter(None, given)}) != 1:
            return None
        return self._with(given[0], self._computed(op, name, known))

    @staticmethod
    def _with(found: tuple[float, _Choice] | None, number: float | None) -> tuple[float, _Choice] | None:
        return None if found is None or number is None else (number, found[1])

    def _computed(self, op: Op, name: str, numbers: Sequence[float]) -> float | None:
        """The result of an operation whose operands are filled with these numbers; None if its elements differ."""
        if op.name in _MOVES or op.name in ("slice", "split"):
            return numbers[0]
        if op.name == "cat":
            return numbers[0] if len({*numbers}) == 1 else None
        if not is_elementwise(op.name) and op.name not in ("to", "detach"):
            return None
        types = (self.writer.types[each].dtype for each in op.refs())
        known = {
            each: torch.tensor([number], dtype=DTYPES[dtype])
            for each, number, dtype in zip(op.refs(), numbers, types, strict=True)
        }
        return float(results_of(op, known)[name])

    def _filled(self, arg: Arg) -> float | None:
        """The number with which a tensor is filled; None for other tensors."""
        while isinstance(arg, Ref):
            op = self.facts.makers.get(arg.name)
            if op is None or op.name not in {*_MOVES, "to", "full"}:
                return None
            arg = op.args[1 if op.name == "full" else 0]
        return float(arg) if isinstance(arg, int | float) else None

    def _scattered(self, op: Op, form: Form) -> tuple[float, _Choice] | None:
        """The number of a filled tensor into which `scatter` writes at the chosen experts."""
        base, dim, index = op.args[0], op.args[1], op.args[2]
        blocks, number = blocks_by_dim(op.result.type.shape, form), self._filled(base)
        if number is None or blocks is None or not isinstance(dim, int) or not isinstance(index, Ref):
            return None
        chosen = self.writer.shape(index.name)
        dim %= len(chosen)
        places = [place for place, here in enumerate(blocks) if EXPERTS in labels(here)]
        if places != [dim] or len(blocks[dim]) != 1 or chosen[:dim] != op.result.type.shape[:dim]:
            return None
        if chosen[dim + 1 :] != op.result.type.shape[dim + 1 :]:
            return None
        return number, _Choice(index.name, _with_count(form, EXPERTS, chosen[dim]))

    def _compared(self, op: Op, forms: Sequence[Form]) -> tuple[float, _Choice] | None:
        """The outcome of a comparison of a token's one choice with the number of each expert."""
        names = [*op.refs()]
        for counted, chosen in ((0, 1), (1, 0)):
            name, form = names[chosen], forms[chosen]
            known = self.facts.bounds().get(name)
            valid = known is not None and known in IntegerBounds(0, self.experts - 1)
            if (
                valid
                and EXPERTS not in labels(form)
                and self.facts.counts(names[counted], forms[counted], self.experts)
            ):
                return float(op.name == "ne"), _Choice(name, (*form, (EXPERTS, 1)))
        return None

    @staticmethod
    def _over_choices(given: tuple[float, _Choice] | None, kept: Collection[Label]) -> tuple[float, _Choice] | None:
        """The zero that a sum over features, or over a token's choices, makes of zeros."""
        assert given is not None
        number, choice = given
        gone = [block for block in choice.tokens if block[0] not in kept]
        if not gone:
            return given
        if len(gone) > 1 or choice.count > 1:
            return None
        ((label, _),) = gone
        form = tuple((EXPERTS if each == label else each, size) for each, size in choice.tokens)
        return number, _Choice(choice.name, form)

    def only(self, name: str, form: Form) -> str:
        """Write the elements of a value that belong to chosen experts. Raises _NotByRowError."""
        if EXPERTS not in labels(form):
            return name
        key = name, form
        if key not in self._only:
            self._only[key] = self._written_only(name, form)
        return self._only[key]

    def _written_only(self, name: str, form: Form) -> str:
        if self.facts.counts(name, form, self.experts):
            return self._laid(self.choice.name, self.choice.form, name, form)
        source, before = self._source(name, form)
        if source != name:
            made = self.only(source, before)
            return self._laid(made, _with_count(before, EXPERTS, self.choice.count), name, form)
        op = self.facts.makers.get(name)
        alone = {*without_experts(form)} <= {*self.choice.tokens}
        if op is not None and (not alone or (is_elementwise(op.name) and len([*op.refs()]) == 1)):
            forms = operand_forms(op, name, form, self.writer.types)
            if forms is not None:
                return self._again(op, name, forms, form)
        if {*without_experts(form)} != {*self.choice.tokens}:
            raise _NotByRowError
        return self._gathered(name, form)

    def _source(self, name: str, form: Form) -> tuple[str, Form]:
        """The value behind the reshapes and permutations that made this one, and its form."""
        op = self.facts.makers.get(name)
        forms = None if op is None or op.name not in _ORDERS else operand_forms(op, name, form, self.writer.types)
        if op is None or forms is None or len(labels(forms[0])) < len(forms[0]):
            return name, form
        return self._source(next(op.refs()), forms[0])

    def _again(self, op: Op, name: str, forms: Sequence[Form], form: Form) -> str:
        """Write an operation on the chosen rows of its operands, and return the name of one result."""
        w, key = self.writer, (op.results[0].name, tuple(forms))
        if key not in self._written:
            self.multiplied |= op.name == "expert_matmul"
            names = [self.only(*operand) for operand in zip(op.refs(), forms, strict=True)]
            place = self._place(name, form)
            if _counts_places(op, place):
                raise _NotByRowError
            shapes = [self._of_chosen(value.type.shape, place) for value in op.results]
            if op.name in _MOVES and math.prod(w.shape(names[0])) == math.prod(shapes[0]):
                self._written[key] = [self._reshaped(names[0], shapes[0], f"{name}_chosen")]  # no copies
            else:
                self._written[key] = self._kept(op, names, shapes)
        return self._written[key][[value.name for value in op.results].index(name)]

    def _kept(self, op: Op, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[str]:
        """Write an operation with other operands and sizes."""
        w, results = self.writer, list[Value]()
        for value, shape in zip(op.results, shapes, strict=True):
            type = TensorType.replicated(value.type.dtype, shape)
            results.append(Value(name=unique(f"{value.name}_chosen", w.taken), type=type))
        again = replace(op.reading(names), results=tuple(results))
        if op.name in SHAPES:
            place = SHAPES[op.name]
            again = replace(again, args=(*again.args[:place], shapes[0], *again.args[place + 1 :]))
        elif op.name == "repeat":
            again = replace(again, args=(again.args[0], copies(w.shape(names[0]), shapes[0])))
        w.keep(again)
        return [value.name for value in results]

    def _reshaped(self, name: str, shape: Sequence[int], stem: str) -> str:
        """Write a reshape. A reshape of a reshape reads the first operand."""
        made = self._reshapes.get(name, name)
        found = self.writer.reshape(made, shape, stem)
        if found != made:
            self._reshapes[found] = made
        return found

    def _place(self, name: str, form: Form) -> int:
        """The dimension with the experts."""
        blocks = blocks_by_dim(self.writer.shape(name), form)
        return next(dim for dim, here in enumerate(blocks or ()) if EXPERTS in labels(here))

    def _of_chosen(self, shape: Sequence[int], place: int) -> tuple[int, ...]:
        """A shape with the chosen experts in place of all."""
        return (*shape[:place], shape[place] // self.experts * self.choice.count, *shape[place + 1 :])

    def _gathered(self, name: str, form: Form) -> str:
        """Write the elements that a value with one for each token and expert has at the choices."""
        w, op, count = self.writer, self.facts.makers.get(name), self.choice.count
        if op is not None and op.name == "scatter" and isinstance(op.args[3], Ref) and not op.attrs:
            found = self._scattered(op, form)
            alike = w.shape(op.args[3].name) == w.shape(self.choice.name)  # torch reads a part of a larger source
            if alike and found is not None and found[1] == self.choice and self._once(self.choice):
                return self._laid(op.args[3].name, self.choice.form, name, form)
        order = (*self.choice.tokens, (EXPERTS, self.experts))
        tokens = math.prod(size for _, size in self.choice.tokens)
        whole = self._reshaped(self._moved(name, form, order), (tokens, self.experts), f"{name}_by_token")
        chosen = self._moved(self.choice.name, self.choice.form, (*self.choice.tokens, (EXPERTS, count)))
        index = self._reshaped(chosen, (tokens, count), f"{self.choice.name}_by_token")
        dtype = w.types[name].dtype
        found_name = w.add("gather", (Ref(whole), 1, Ref(index)), (tokens, count), dtype, f"{name}_chosen")
        return self._laid(found_name, (*self.choice.tokens, (EXPERTS, count)), name, form)

    def _laid(self, name: str, before: Form, whole: str, form: Form) -> str:
        """Write a value with one element for each choice in the form of another with one for each expert."""
        moved = self._moved(name, before, _with_count(form, EXPERTS, self.choice.count))
        shape = self._of_chosen(self.writer.shape(whole), self._place(whole, form))
        return self._reshaped(moved, shape, f"{whole}_chosen")

    def _moved(self, name: str, before: Form, after: Form) -> str:
        """Write a value with one dimension for each block, in another order. Raises _NotByRowError."""
        if len(labels(before)) < len(before) or len(before) != len(after) or {*before} != {*after}:
            raise _NotByRowError
        apart = self._reshaped(name, [size for _, size in before], f"{name}_apart")
        order = [before.index(block) for block in after]
        wide = [dim for dim in order if before[dim][1] > 1]
        if wide == sorted(wide):
            return self._reshaped(apart, [size for _, size in after], f"{name}_t")
        return self.writer.permute(apart, order, f"{name}_t")


def _with_count(form: Form, label: Label, count: int) -> Form:
    return tuple((each, count if each == label else size) for each, size in form)
