"""Rewrite mixtures that send every token through every expert as products by expert.

    einsum         = einsum("btd,edh->bteh", (layer_norm, …up))               # f32[16, 8, 4, 32]
    silu           = silu(einsum)                                             # f32[16, 8, 4, 32]
    einsum_1       = einsum("bteh,ehd,bte->btd", (silu, …down, softmax))      # f32[16, 8, 16]
  ->
    …each          = reshape(layer_norm, (16, 8, 1, 16))                      # f32[16, 8, 1, 16]
    …each_2        = expand(…each, (16, 8, 4, 16))                            # f32[16, 8, 4, 16]
    …rows          = reshape(…each_2, (512, 16))                              # f32[512, 16]
    experts        = arange(4, dtype=<i64>)                                   # i64[4]
    …
    experts_4      = reshape(experts_3, (512,))                               # i64[512]
    einsum_rows    = expert_matmul(…rows, experts_4, …up)                     # f32[512, 32]
    silu_rows      = silu(einsum_rows)                                        # f32[512, 32]
    einsum_1_rows  = expert_matmul(silu_rows, experts_4, …down)               # f32[512, 16]
    einsum_1_apart = reshape(einsum_1_rows, (16, 8, 4, 16))                   # f32[16, 8, 4, 16]
    einsum_1       = einsum("bted,bte->btd", (einsum_1_apart, softmax))       # f32[16, 8, 16]

A token has one row for each expert, side by side, so that a cut of the batch cuts rows like tokens; `experts` has the
expert of each row. Elementwise operations between two products stay on rows. Batched products of operands other than
copies of tokens, such as products by head, are not mixtures. In an einsum, the weights' first letter stands for
experts. A sum of experts' results, each times its own part of an activation (a dense mask), becomes einsums first. So
do stacks of experts' results that are weighted or chosen by token.

If scores of other experts than a token's choices are zero, only the rows of its choices are computed (`chosen`):

    scatter         = scatter(zeros_like, -1, getitem_1, softmax)              # f32[8, 6, 6]
    einsum          = einsum("btd,edh->bteh", (layer_norm, …up))               # f32[8, 6, 6, 12]
    einsum_1        = einsum("bteh,ehd->bted", (silu, …down))                  # f32[8, 6, 6, 8]
    unsqueeze       = reshape(scatter, (8, 6, 6, 1))                           # f32[8, 6, 6, 1]
    mul             = mul(einsum_1, unsqueeze)                                 # f32[8, 6, 6, 8]
    sum_1           = sum(mul, (2,), False)                                    # f32[8, 6, 8]
  ->
    experts…        = reshape(getitem_1, (96,))                                # i64[96]
    einsum_rows…    = expert_matmul(layer_norm_rows…, experts…, …up)           # f32[96, 12]
    einsum_1_rows…  = expert_matmul(silu_rows…, experts…, …down)               # f32[96, 8]
    unsqueeze_rows… = reshape(softmax, (96, 1))                                # f32[96, 1]
    mul_rows…       = mul(einsum_1_rows…, unsqueeze_rows…)                     # f32[96, 8]
    mul…            = reshape(mul_rows…, (8, 6, 2, 8))                         # f32[8, 6, 2, 8]
    sum_1           = sum(mul…, (2,), False)                                   # f32[8, 6, 8]

Without the axis, only such mixtures are rewritten, and products with matrices that are read for each row, since reading
would copy them:

    index       = index(…up, (getitem_1,))                             # f32[32, 2, 8, 16]
    einsum      = einsum("bekc,bk->bec", (index, reshape))             # f32[32, 2, 16]
  ->
    …each       = reshape(reshape, (32, 1, 8))                         # f32[32, 1, 8]
    …each_each  = expand(…each, (32, 2, 8))                            # f32[32, 2, 8]
    …rows       = reshape(…each_each, (64, 8))                         # f32[64, 8]
    experts     = reshape(getitem_1, (64,))                            # i64[64]
    einsum_rows = expert_matmul(…rows, experts, …up)                   # f32[64, 16]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc import fuel
from partc.ir.naming import unique
from partc.ir.operations import KEEPING, RANDOM
from partc.ir.program import DTypeArg, Graph, Op, Program, Ref, Region, TensorType, Value, needed
from partc.passes.dense.blocks import EXPERTS, Form, Label, form_of, labels, operand_forms
from partc.passes.dense.chosen import products_of_all, with_chosen_rows
from partc.passes.route.loops import LEAST, Lift, Lifted, NotEqualError
from partc.passes.route.rows import RowWriter
from partc.rules import is_elementwise
from partc.rules.integer_bounds import IntegerBounds, bounds_of_graph
from partc.rules.rule import argument, integers

_PARTS = KEEPING | {"slice", "split"}
_COPIES = frozenset({"expand", "repeat"})
_PLACES = frozenset({"topk", "sort", "argsort", "argmax", "max"})  # their last results are indices


def dense(program: Program, *, expert_axes: tuple[str, ...] = ()) -> Program:
    """Rewrite products with chosen matrices in all regions, and dense mixtures: all with `expert_axes`, otherwise those
    of which only chosen experts count.
    """
    return replace(program, regions=tuple(_by_row(region, bool(expert_axes)) for region in program.regions))


def _by_row(region: Region, mixtures: bool) -> Region:
    if mixtures or any(op.name in _PLACES for op in region.forward.ops):
        every = _rewritten(region, mixtures=True)
        chosen = with_chosen_rows(every)
        if mixtures or (chosen is not every and not products_of_all(chosen)):
            return chosen
    return _rewritten(region, mixtures=False)


def _rewritten(region: Region, *, mixtures: bool) -> Region:
    if mixtures:
        region = _without_stacks(_without_sums(region))
    elif not any(map(_reads_rows, region.forward.ops)):
        return region
    rows = _Dense(region, mixtures)
    for op in region.forward.ops:
        rows.take(op)
    for name in region.forward.outputs:
        rows.plain(name)
    graph = replace(region.forward, ops=tuple(rows.writer.ops))
    return replace(region, forward=graph.without_dead())


def _without_sums(region: Region) -> Region:
    """The region with one product of all experts in place of each sum y_0 · gates[0] + y_1 · gates[1] + …."""
    params = {value.name: value.type for value in region.params}
    makers, readers, types, weights = _facts(region)
    for op in reversed(region.forward.ops):
        addends = _addends(op, makers, readers)
        for base in (0, 1):
            kinds = {makers[name].name if name in makers else "" for name in addends[base:]}
            if len(addends) - base < LEAST or len(kinds) > 1 or not fuel.may_rewrite("sum over experts", op.source):
                continue
            lift = _AllExperts(makers, dict(types), params, len(addends) - base, weights=weights)
            lift.writer.source = op.source
            try:
                found = lift.lifted(tuple(addends[base:]))
            except NotEqualError:
                continue
            if found.kind == "stacked" and lift.gated and lift.multiplied:
                region = _with_ops(region, op, lift.summed(found.name, addends[:base], op))
                makers, readers, types, weights = _facts(region)
                break
    return region


def _with_ops(region: Region, op: Op, ops: Sequence[Op]) -> Region:
    """Replace one operation of a region by several."""
    graph = region.forward
    every = [each for other in graph.ops for each in (ops if other is op else (other,))]
    return replace(region, forward=replace(graph, ops=needed(tuple(every), graph.outputs)))


def _without_stacks(region: Region) -> Region:
    """Replace each stack of experts' results, a cat along a dimension of size 1, by one product of all experts."""
    params = {value.name: value.type for value in region.params}
    for op in reversed(region.forward.ops):
        match op.name, op.args:
            case "cat", (parts, int(dim)) if isinstance(parts, tuple):
                names = tuple(part.name for part in parts if isinstance(part, Ref))
            case _:
                continue
        if len(names) < LEAST or len(names) != op.result.type.shape[dim]:
            continue
        rank = len(op.result.type.shape)
        graph, types = region.forward, dict(region.types(region.forward))
        alone = all(types[name].shape[dim] == 1 for name in names)
        if not alone or not _scored(op.result, dim % rank, graph, types):
            continue
        lift = _AllExperts(graph.makers(), types, params, len(names), weights=_of_weights(region))
        lift.writer.source = op.source
        try:
            found = lift.lifted(names)
        except NotEqualError:
            continue
        if found.kind == "stacked" and lift.multiplied and fuel.may_rewrite("stack of experts", op.source):
            region = _with_ops(region, op, lift.joined(found.name, dim % rank, op))
    return region


def _scored(stacked: Value, dim: int, graph: Graph, types: Mapping[str, TensorType]) -> bool:
    """Whether a reader weights the stacked results by one score per token and expert, or gathers some of them."""
    rank, experts = len(stacked.type.shape), stacked.type.shape[dim]
    for op in graph.readers().get(stacked.name, ()):
        names = [*op.refs()]
        shapes = [types[name].shape for name in names if name != stacked.name]
        match op.name, op.args:
            case "gather", (Ref(name=stacked.name), int(chosen), *_) if chosen % rank == dim:
                return True
            case "mul", _ if shapes:
                wide = (*(1 for _ in range(rank - len(shapes[0]))), *shapes[0])
                return len(wide) == rank and wide[dim] == experts and wide[-1] == 1 != dim - rank + 1
            case (("matmul" | "bmm"), _) if len(shapes) == 1:
                first = names[0] == stacked.name
                scores, last = (shapes[0], dim == rank - 1) if first else (shapes[0][::-1], dim == rank - 2)
                return last and (scores[-2:] == (experts, 1) if first else scores[:2] == (experts, 1))
            case "einsum", _ if len(shapes) == 1 and (terms := _equation(op)[0]):
                letters = dict(zip(names, terms, strict=True))
                own, other = letters.pop(stacked.name, ""), *letters.values()
                return own[dim] in other and own[-1] not in other
    return False


def _addends(op: Op, makers: Mapping[str, Op], readers: Mapping[str, Sequence[Op]]) -> list[str]:
    """The summands of a chain of additions, in order."""
    found: list[str] = []
    while op.name == "add" and len(names := [*op.refs()]) == 2 and not op.attrs:
        found.append(names[1])
        before = makers.get(names[0])
        if before is None or before.name != "add" or len(readers[names[0]]) > 1:
            found.append(names[0])
            break
        op = before
    return found[::-1]


def _facts(
    region: Region,
) -> tuple[Mapping[str, Op], Mapping[str, Sequence[Op]], Mapping[str, TensorType], set[str]]:
    """The makers, readers and types of values, and the values that depend on parameters alone."""
    graph = region.forward
    return graph.makers(), graph.readers(), region.types(graph), _of_weights(region)


def _letters(
    op: Op, types: Mapping[str, TensorType]
) -> tuple[tuple[str, ...], tuple[tuple[str | None, ...], ...], tuple[str, ...]] | None:
    """For a product of two operands: these, the letters of their dimensions, and the letters of its result.

    A dimension without a letter is broadcast. None for other operations.
    """
    names = tuple(op.refs())
    shapes = [types[name].shape for name in names]
    rank = len(op.results[0].type.shape)
    if op.name in ("matmul", "bmm") and len(names) == 2 and min(map(len, shapes)) > 1:
        batch = [chr(ord("a") + dim) for dim in range(rank - 2)]
        given = [
            tuple(
                None if size == 1 < whole else letter
                for size, letter, whole in zip(
                    shape[:-2], batch[rank - len(shape) :], op.result.type.shape[rank - len(shape) :], strict=False
                )
            )
            for shape in shapes
        ]
        return names, ((*given[0], "x", "y"), (*given[1], "y", "z")), (*batch, "x", "z")
    terms, out = _equation(op)
    if len(terms) == 2 and all(len(set(term)) == len(term) for term in terms):
        left, right = terms
        return names, (tuple(left), tuple(right)), tuple(out)
    return None


def _equation(op: Op) -> tuple[list[str], str]:
    """The letters of an einsum's operands, and of its result; none for other operations."""
    if op.name != "einsum" or not isinstance(text := op.args[0], str) or "->" not in text or "." in text:
        return [], ""
    given, out = text.replace(" ", "").split("->")
    return given.split(","), out


def _lookup(op: Op | None) -> tuple[str, str] | None:
    """The table and the indices of a lookup of rows; None for other operations."""
    match op:
        case (
            Op(name="index", args=(Ref(table), (Ref(chosen),)))
            | Op(name="index_select", args=(Ref(table), 0, Ref(chosen)))
        ):
            return table, chosen
    return None


def _reads_rows(op: Op) -> bool:
    """Whether an operation looks up a matrix for each of several indices."""
    return _lookup(op) is not None and len(op.result.type.shape) > 2


def _of_weights(region: Region) -> set[str]:
    """The values that depend on parameters alone."""
    found = {value.name for value in region.params}
    for op in region.forward.ops:
        if op.name not in RANDOM and [*op.refs()] and found.issuperset(op.refs()):
            found.update(value.name for value in op.results)
    return found


@dataclass(slots=True)
class _AllExperts(Lift):
    """The operations of all experts at once, on all tokens."""

    weights: set[str] = field(default_factory=set)
    gated: bool = False  # each expert has its own gate, a part of one activation
    multiplied: bool = False

    def _numbered(self, ops: Sequence[Op], operands: Sequence[Lifted]) -> Lifted:
        made = Lift._numbered(self, ops, operands)
        self.gated |= operands[0].name not in self.weights
        return made

    def _stacked(self, op: Op, result: Value, operands: Sequence[Lifted]) -> Lifted:
        if op.name not in ("linear", "matmul"):
            return Lift._stacked(self, op, result, operands)
        w, (x, weights) = self.writer, operands
        if weights.kind != "stacked" or len(w.shape(weights.name)) != 3:
            raise NotEqualError
        self.multiplied = True
        tokens = "abcdfgh"[: len(result.type.shape) - 1]
        left = f"e{tokens}i" if x.kind == "stacked" else f"{tokens}i"
        equation = f"{left},{'eoi' if op.name == 'linear' else 'eio'}->e{tokens}o"
        args = (equation, (Ref(x.name), Ref(weights.name)))
        shape = (self.count, *result.type.shape)
        return Lifted("stacked", w.add("einsum", args, shape, result.type.dtype, f"{result.name}_of_experts"))

    def joined(self, name: str, dim: int, last: Op) -> list[Op]:
        """The operations that compute all experts' results along `dim`. The last one defines the result of the
        stack.
        """
        w, made = self.writer, last.result
        count, *rest = w.shape(name)
        alone = w.reshape(name, (count, *rest[:dim], *rest[dim + 1 :]), f"{made.name}_alone")
        order = (*range(1, dim + 1), 0, *range(dim + 1, len(rest)))
        w.define("permute", (Ref(alone), order), made.type.shape, made.type.dtype, made.name)
        return w.ops

    def summed(self, name: str, base: Sequence[str], last: Op) -> list[Op]:
        """The operations of all experts and the sum of their results, which defines the result of the last addition."""
        w, made = self.writer, last.result
        w.source = last.source
        args = (Ref(name), (0,), False)
        if not base:
            w.define("sum", args, made.type.shape, made.type.dtype, made.name)
            return w.ops
        total = w.add("sum", args, w.shape(name)[1:], made.type.dtype, f"{made.name}_sum")
        w.define("add", (Ref(base[0]), Ref(total)), made.type.shape, made.type.dtype, made.name)
        return w.ops


@dataclass(frozen=True, slots=True)
class _ByRow:
    """A value by row, [tokens · experts, …]; in its original form, experts are one dimension among those of tokens.

    `chosen` has the numbers of each token's experts; without it, each token has a row for every expert.
    """

    name: str
    tokens: tuple[int, ...]
    experts: int
    place: int
    chosen: str = ""

    @property
    def leading(self) -> tuple[int, ...]:
        return (*self.tokens[: self.place], self.experts, *self.tokens[self.place :])

    @property
    def order(self) -> tuple[int, ...]:
        """The leading dimensions of [tokens, experts, …] in the value's own order."""
        found = [*range(len(self.tokens))]
        found.insert(self.place, len(self.tokens))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The operands and letters of an einsum that multiplies tokens by the weights of experts."""

    weights: str
    x: str  # the operand with the tokens
    others: tuple[str, ...]  # all operands except the weights
    letters: Mapping[str, str]  # of each operand
    out: str
    expert: str
    inner: str  # the letter over which the product sums
    outer: str
    copied: bool  # whether every expert reads every token; otherwise x has a row for each expert

    @property
    def rest(self) -> tuple[str, ...]:
        """The operands that the product does not read."""
        return tuple(name for name in self.others if name != self.x)

    @property
    def tokens(self) -> str:
        return self.letters[self.x].replace(self.inner, "").replace(self.expert, "")


@dataclass(slots=True)
class _Dense:
    """Rewrites the operations of a region, with values of tokens and experts in rows."""

    region: Region
    mixtures: bool  # whether products of all tokens with all experts are rewritten, too
    writer: RowWriter = field(init=False)
    makers: Mapping[str, Op] = field(init=False)
    weights: set[str] = field(init=False)  # values that depend on parameters alone
    bounds: dict[str, IntegerBounds] = field(init=False)
    rows: dict[str, _ByRow] = field(default_factory=dict)
    numbers: dict[tuple[int, int, str], str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # values in rows that also exist in their original form

    def __post_init__(self) -> None:
        types = dict(self.region.types(self.region.forward))
        self.writer = RowWriter(types=types, taken=set(types))
        self.makers = self.region.forward.makers()
        self.weights = _of_weights(self.region)
        self.bounds = bounds_of_graph(self.region.forward, types)

    def take(self, op: Op) -> None:
        """Write an operation, on rows if it is a product by expert or works on rows."""
        self.writer.source = op.source
        mixture = self.mixtures and (self._product(op) or self._einsum(op))
        if mixture or self._chosen_product(op) or self._row_by_row(op):
            return
        for name in op.refs():
            self.plain(name)
        self.writer.keep(op)

    def plain(self, name: str) -> None:
        """Write a value in its original form, for readers that do not work on rows."""
        w, found = self.writer, self.rows.get(name)
        if found is None or name in self.written:
            return
        self.written.add(name)
        rest = w.shape(found.name)[1:]
        apart = w.reshape(found.name, (*found.tokens, found.experts, *rest), f"{name}_apart")
        order = (*found.order, *(len(found.order) + dim for dim in range(len(rest))))
        w.define("permute", (Ref(apart), order), (*found.leading, *rest), w.types[name].dtype, name)

    def _product(self, op: Op) -> bool:
        """Write matmul(x [experts, tokens, in], weights [experts, in, out]) by row; False for other products."""
        if op.name not in ("matmul", "bmm"):
            return False
        w, (x, weights) = self.writer, op.refs()
        if len(w.shape(x)) != 3 or len(w.shape(weights)) != 3 or weights not in self.weights or x in self.weights:
            return False
        mixture = x in self.rows or self._copied(x, 0)
        if not mixture or not fuel.may_rewrite("dense experts", op.source):
            return False
        self.rows[op.result.name] = self._multiplied(self._by_row(x, 0, 1), weights, op)
        return True

    def _einsum(self, op: Op) -> bool:
        """Write an einsum of tokens and the weights of experts: the product by row, and the sum of the rest."""
        one = self._mixture(op)
        if one is None or not fuel.may_rewrite("dense experts", op.source):
            return False
        w, letters, table = self.writer, one.letters, one.letters[one.weights]
        if one.copied:
            count = w.shape(one.weights)[table.index(one.expert)]
            rows = self._spread(one.x, letters[one.x], one.tokens + one.inner, count)
        else:
            rows = self._by_row(one.x, letters[one.x].index(one.expert), len(one.tokens))
        order = [table.index(each) for each in (one.expert, one.inner, one.outer)]
        made = self._multiplied(rows, w.permute(one.weights, order, f"{one.weights}_t"), op)
        plain = one.out.replace(one.expert, "") == f"{one.tokens}{one.outer}" and one.out.endswith(one.outer)
        if not one.rest and one.expert in one.out and plain:
            self.rows[op.result.name] = replace(made, place=one.out.index(one.expert))
            return True
        made = replace(made, place=len(made.tokens))
        whole = w.reshape(made.name, (*made.leading, *w.shape(made.name)[1:]), f"{op.result.name}_apart")
        for name in one.rest:
            self.plain(name)
        terms = [f"{one.tokens}{one.expert}{one.outer}", *(letters[name] for name in one.rest)]
        equation = f"{','.join(terms)}->{one.out}"
        w.keep(replace(op, args=(equation, (Ref(whole), *map(Ref, one.rest))), attrs=()))
        return True

    def _mixture(self, op: Op) -> _Mixture | None:
        """An einsum as a product by expert; None if it is not one."""
        terms, out = _equation(op)
        if not terms:
            return None
        names = [*op.refs()]
        letters = dict(zip(names, terms, strict=True))
        weights = next((name for name in names if name in self.weights and len(letters[name]) == 3), "")
        others = tuple(name for name in names if name != weights)
        if not weights or len(letters) < len(names) or not self.weights.isdisjoint(others):
            return None
        readers = {each: [name for name in others if each in letters[name]] for each in letters[weights]}
        inner = [each for each in letters[weights] if each not in out and len(readers[each]) == 1]
        outer = [each for each in letters[weights] if each in out and not readers[each]]
        for i, o in itertools.product(inner, outer):
            (x,), (expert,) = readers[i], {*letters[weights]} - {i, o} or {""}
            copied = expert not in letters[x] and letters[weights][0] == expert
            place = letters[x].find(expert)
            held = letters[x][-1] == i and place >= 0 and self._has_row_of_each(x, place)
            if (expert in out or readers.get(expert)) and (copied or held):
                return _Mixture(weights, x, others, letters, out, expert, i, o, copied)
        return None

    def _has_row_of_each(self, x: str, place: int) -> bool:
        """Whether a value has a row for each token and expert, with the experts' dimension at `place`."""
        return self.rows[x].place == place if x in self.rows else self._copied(x, place)

    def _chosen_product(self, op: Op) -> bool:
        """Write matmul(x, w[chosen]), with a matrix for each row or group of rows, as a product by expert."""
        found = _letters(op, self.writer.types)
        if found is None:
            return False
        (names, given, out), w = found, self.writer
        for x, weights in ((0, 1), (1, 0)):
            index, order = self._beneath_permutes(names[weights])
            chosen = self._choice_of(index)
            if index is None or not chosen or None in given[weights]:
                continue
            letters = [str(letter) for _, letter in sorted(zip(order, given[weights], strict=True))]
            ahead, matrix = letters[:-2], letters[-2:]
            inner = [each for each in matrix if each in given[x] and each not in out]
            outer = [each for each in matrix if each not in given[x] and each in out]
            picked = index.result.type.shape
            sizes = dict(zip(given[x], w.shape(names[x]), strict=True)) | dict(zip(letters, picked, strict=True))
            known = [*ahead, *inner, *(each for each in given[x] if sizes[each] == 1)]
            if len(inner) != 1 or len(outer) != 1 or not set(given[x]) <= {None, *known} or not set(ahead) <= set(out):
                continue
            if not fuel.may_rewrite("chosen matrices", op.source):
                return False
            leading = picked[:-2]
            form = _ByRow("", leading[:-1], leading[-1], len(leading) - 1, chosen)
            rows = self._rows_of(names[x], given[x], (*ahead, *inner), form, sizes)
            table = w.permute(
                next(index.refs()),
                (0, *(1 + matrix.index(each) for each in (*inner, *outer))),
                f"{op.result.name}_matrices",
            )
            made = self._multiplied(replace(form, name=rows), table, op)
            rest = [each for each in out if each not in ahead]
            shape = (math.prod(leading), *(sizes[each] for each in rest))
            made = replace(made, name=w.reshape(made.name, shape, f"{op.result.name}_rows"))
            if [*out] == [*ahead, *rest]:
                self.rows[op.result.name] = made
                return True
            apart = w.reshape(made.name, (*leading, *shape[1:]), f"{op.result.name}_apart")
            turn = tuple([*ahead, *rest].index(each) for each in out)
            w.define("permute", (Ref(apart), turn), op.result.type.shape, op.result.type.dtype, op.result.name)
            return True
        return False

    def _rows_of(
        self, x: str, letters: Sequence[str | None], order: Sequence[str], form: _ByRow, sizes: Mapping[str | None, int]
    ) -> str:
        """The rows of x, with a copy for each expert of a token if x has none."""
        w, held = self.writer, self.rows.get(x)
        shape = (math.prod(form.leading), sizes[order[-1]])
        if [each for each in letters if each in order] == [*order]:
            if held is not None and replace(held, name="") == form:
                return w.reshape(held.name, shape, f"{x}_rows")
            self.plain(x)
            return w.reshape(x, shape, f"{x}_rows")
        self.plain(x)
        kept = [each for each in letters if each in order]
        x = w.reshape(x, [sizes[each] for each in kept], f"{x}_alone")
        inner = [each for each in order if each in kept]
        x = w.permute(x, [kept.index(each) for each in inner], f"{x}_t")
        x = w.reshape(x, [sizes[each] if each in kept else 1 for each in order], f"{x}_each")
        x = w.expand(x, [sizes[each] for each in order], f"{x}_each")
        return w.reshape(x, shape, f"{x}_rows")

    def _beneath_permutes(self, name: str) -> tuple[Op | None, tuple[int, ...]]:
        """The operation behind the permutations that made a value, and the order in which they put its dimensions."""
        order = tuple(range(len(self.writer.shape(name))))
        while (op := self.makers.get(name)) is not None and op.name == "permute":
            (name,) = op.refs()
            turn = integers(argument(op, 1, "dims", None))
            order = tuple(turn[dim] for dim in order)
        return op, order

    def _choice_of(self, op: Op | None) -> str:
        """The indices by which an operation reads matrices, if they are chosen by scores, or certain to be numbers of
        matrices, as `ids % experts`; "" for others.
        """
        lookup = _lookup(op)
        if lookup is None or lookup[0] not in self.weights or len(self.writer.shape(lookup[0])) != 3:
            return ""
        table, chosen = lookup
        name = chosen
        known = self.bounds.get(name)
        if known is not None and known in IntegerBounds(0, self.writer.shape(table)[0] - 1):
            return chosen
        while (made := self.makers.get(name)) is not None and made.name in _PARTS:
            name = next(made.refs())
        return chosen if made is not None and made.name in _PLACES and made.results[-1].name == name else ""

    def _looked_up(self, name: str, form: _ByRow) -> str | None:
        """A lookup in a table for the chosen experts, such as their biases, by row; None for other values."""
        w, op, shape = self.writer, self.makers.get(name), self.writer.shape(name)
        while op is not None and op.name == "reshape" and w.shape(next(op.refs()))[: len(form.leading)] == form.leading:
            op = self.makers.get(next(op.refs()))
        lookup = _lookup(op)
        if lookup is None or lookup[1] != form.chosen:
            return None
        table, _ = lookup
        numbers, rest = self._numbers(form), w.shape(table)[1:]
        sizes = (math.prod(form.leading), *rest)
        found = w.add("index", (Ref(table), (Ref(numbers),)), sizes, w.types[table].dtype, f"{name}_rows")
        return w.reshape(found, (*sizes[:1], *shape[len(form.leading) :]), f"{name}_rows")

    def _spread(self, x: str, letters: str, order: str, experts: int) -> _ByRow:
        """The tokens of x, with a copy for each expert."""
        w = self.writer
        self.plain(x)
        x = w.permute(x, [letters.index(each) for each in order], f"{x}_t")
        *tokens, width = w.shape(x)
        each = w.expand(w.reshape(x, (*tokens, 1, width), f"{x}_each"), (*tokens, experts, width), f"{x}_each")
        rows = w.reshape(each, (math.prod(tokens) * experts, width), f"{x}_rows")
        return _ByRow(rows, tuple(tokens), experts, len(tokens))

    def _multiplied(self, x: _ByRow, weights: str, op: Op) -> _ByRow:
        w, count = self.writer, math.prod(x.tokens) * x.experts
        args = (Ref(x.name), Ref(self._numbers(x)), Ref(weights))
        shape = (count, w.shape(weights)[2])
        made = w.add("expert_matmul", args, shape, op.result.type.dtype, f"{op.result.name}_rows")
        return replace(x, name=made)

    def _copied(self, name: str, experts: int) -> bool:
        """Whether a value has copies of each token along the dimension `experts`; its last dimension has features."""
        shape = self.writer.shape(name)
        names = [str(dim) for dim in range(len(shape))]
        return self._has_copies(name, form_of(shape, [*names[:experts], EXPERTS, *names[experts + 1 :]]), names[-1])

    def _has_copies(self, name: str, form: Form, features: Label) -> bool:
        """Whether elementwise operations and copies make a value of tokens that are without the experts' block."""
        op = self.makers.get(name)
        if op is None or not (op.name in KEEPING or op.name in _COPIES or is_elementwise(op.name)):
            return False
        forms = operand_forms(op, name, form, self.writer.types)
        if forms is None:
            return False
        tokens = [
            (name, form)
            for name, form in zip(op.refs(), forms, strict=True)
            if features in labels(form) and name not in self.weights
        ]
        return bool(tokens) and all(
            EXPERTS not in labels(form) or self._has_copies(name, form, features) for name, form in tokens
        )

    def _by_row(self, name: str, place: int, tokens: int) -> _ByRow:
        """A value by row whose leading dimensions are those of tokens, with the experts' dimension at `place`."""
        w, found = self.writer, self.rows.get(name)
        if found is None:
            self.written.add(name)
            shape = w.shape(name)
            sizes = [shape[dim] for dim in range(tokens + 1) if dim != place]
            order = [*(dim for dim in range(tokens + 1) if dim != place), place, *range(tokens + 1, len(shape))]
            rest = shape[tokens + 1 :]
            transposed = w.permute(name, order, f"{name}_t")
            rows = w.reshape(transposed, (math.prod(sizes) * shape[place], *rest), f"{name}_rows")
            found = self.rows[name] = _ByRow(rows, tuple(sizes), shape[place], place)
        return found

    def _numbers(self, form: _ByRow) -> str:
        """The expert of each row."""
        w, experts, count = self.writer, form.experts, math.prod(form.leading)
        key = (count // experts, experts, form.chosen)
        if key not in self.numbers:
            if form.chosen:
                self.plain(form.chosen)
                each = form.chosen
            else:
                counted = w.add("arange", (experts,), (experts,), "i64", "experts", dtype=DTypeArg("i64"))
                each = w.expand(w.reshape(counted, (1, experts), "experts"), key[:2], "experts")
            self.numbers[key] = w.reshape(each, (count,), "experts")
        return self.numbers[key]

    def _row_by_row(self, op: Op) -> bool:
        """Write an operation that works on each row by itself; False for others."""
        held = [self.rows[name] for name in op.refs() if name in self.rows and name not in self.written]
        forms = {replace(each, name="") for each in held}
        if len(forms) != 1 or op.name in RANDOM:
            return False
        (form,) = forms
        leading, count = form.leading, math.prod(form.leading)
        at = {"slice": 1, "split": 2}.get(op.name)
        dim = op.args[at] if at is not None else len(leading)
        known = at is not None or op.name in ("reshape", "to", "detach") or is_elementwise(op.name)
        if not known or not isinstance(dim, int) or dim < len(leading):
            return False
        if any(value.type.shape[: len(leading)] != leading for value in op.results):
            return False
        names = [self._operand(name, form, len(op.results[0].type.shape), op) for name in op.refs()]
        if any(name is None for name in names):
            return False
        lifted = op.reading([name for name in names if name is not None])
        args = lifted.args
        if op.name == "reshape":
            args = (args[0], (count, *op.result.type.shape[len(leading) :]))
        elif at is not None:
            args = (*args[:at], dim - len(leading) + 1, *args[at + 1 :])
        results = []
        for value in op.results:
            type = TensorType.replicated(value.type.dtype, (count, *value.type.shape[len(leading) :]))
            results.append(Value(name=unique(f"{value.name}_rows", self.writer.taken), type=type))
            self.rows[value.name] = replace(form, name=results[-1].name)
        self.writer.keep(replace(lifted, args=args, results=tuple(results)))
        return True

    def _operand(self, name: str, form: _ByRow, rank: int, op: Op) -> str | None:
        """An operand by row; None if it has no such form."""
        w, shape, ahead = self.writer, self.writer.shape(name), len(form.leading)
        if shape[:ahead] == form.leading and (len(shape) == rank or op.name == "reshape"):
            if form.chosen and name not in self.rows:
                return self._looked_up(name, form) or self._by_row(name, form.place, len(form.tokens)).name
            found = self._by_row(name, form.place, len(form.tokens))
            return found.name if replace(found, name="") == form else None
        alone = tuple(form.experts if dim == form.place else 1 for dim in range(ahead))
        shape = (*(1 for _ in range(rank - len(shape))), *shape)
        if shape[:ahead] == alone and name in self.weights and not form.chosen:  # a bias of each expert
            own = w.reshape(name, (form.experts, *shape[ahead:]), f"{name}_own")
            numbers = self._numbers(form)
            sizes = (w.shape(numbers)[0], *shape[ahead:])
            return w.add("index", (Ref(own), (Ref(numbers),)), sizes, w.types[name].dtype, f"{name}_own")
        return w.reshape(name, shape[ahead:], f"{name}_one") if math.prod(shape[:ahead]) == 1 else None
