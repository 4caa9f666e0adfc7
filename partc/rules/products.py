"""Rules of lookups and products: gather, index, matmul, einsum, convolution."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

from partc.ir.program import Op, TensorType
from partc.rules.rule import Dims, OpRule, argument, integers, is_ref, make
from partc.rules.shapes import Types, broadcast_dims, dim_index, named_dims

# Products by expert


def expert_matmul(op: Op, types: Types) -> OpRule:
    """x[(g s) i], experts[(g s)], w[(g e) i o] -> [(g s) o]: rows received by `groups` of experts (default 1)."""
    x, _, w = (type.shape for type in types)
    groups = integers(argument(op, 3, "groups", 1))[0]
    sizes = {"g": groups, "s": x[0] // groups, "e": w[0] // groups, "i": w[1], "o": w[2]}
    rows = ("g", "s")
    operands: tuple[Dims, ...] = ((rows, ("i",)), (rows,), (("g", "e"), ("i",), ("o",)))
    return make(
        list(zip(operands, types, strict=True)),
        [(rows, ("o",))],
        sizes,
        blocked={"e"},
        linear=[(0,), (2,)],
        work=[("g", "s", "i", "o")],
    )


def expert_rows(op: Op, types: Types) -> OpRule:
    """experts[(g s)], w[(g e) *d] -> [(g s) *d]: for each row, the row of its expert."""
    experts, w = (type.shape for type in types)
    groups = integers(argument(op, 2, "groups", 1))[0]
    dims, sizes = named_dims(w)
    sizes |= {"g": groups, "s": experts[0] // groups, "e": w[0] // groups}
    rows = ("g", "s")
    operands: tuple[Dims, ...] = ((rows,), (("g", "e"), *dims[1:]))
    return make(list(zip(operands, types, strict=True)), [(rows, *dims[1:])], sizes, blocked={"e"}, linear=[(1,)])


# Lookups


def gather(op: Op, types: Types) -> OpRule:
    """gather(x, dim, index): the gathered dimension of x is whole, the index's may be cut."""
    x, index = types[0].shape, types[1].shape
    dim = dim_index(integers(argument(op, 1, "dim", 0))[0], len(index))
    dims, sizes = named_dims(index)
    sizes.update((f"x{i}", n) for i, n in enumerate(x))
    same = [i != dim and n == index[i] for i, n in enumerate(x)]
    operand = tuple((f"d{i}",) if same[i] else (f"x{i}",) for i in range(len(x)))
    blocked = {f"x{i}" for i in range(len(x))} | {f"d{i}" for i in range(len(x)) if i != dim and not same[i]}
    return make([(operand, types[0]), (dims, types[1])], [dims], sizes, blocked=blocked, linear=[(0,)])


def index_select(op: Op, types: Types) -> OpRule:
    """index_select(x, dim, index)."""
    dims, sizes = named_dims(types[0].shape)
    dim = dim_index(integers(argument(op, 1, "dim", 0))[0], len(dims))
    sizes["i"] = types[1].shape[0] if types[1].shape else 1
    result = (*dims[:dim], ("i",), *dims[dim + 1 :])
    lookup: Dims = (("i",),) if types[1].shape else ()
    return make([(dims, types[0]), (lookup, types[1])], [result], sizes, blocked={f"d{dim}"}, linear=[(0,)])


def index(op: Op, types: Types) -> OpRule | None:
    """index(x, (None, i, j)): the indices broadcast together and replace the dimensions that they index."""
    places = argument(op, 1, "indices")
    if not isinstance(places, tuple) or any(type.dtype == "bool" for type in types[1:]):
        return None
    dims, sizes = named_dims(types[0].shape, "x")
    indexed = [i for i, place in enumerate(places) if is_ref(place)]
    if len(indexed) != len(types) - 1:
        return None
    rank = max(len(type.shape) for type in types[1:])
    kept_before = indexed[0] if indexed == list(range(indexed[0], indexed[0] + len(indexed))) else 0
    kept = [dim for i, dim in enumerate(dims) if i not in indexed]
    broadcast = op.results[0].type.shape[kept_before : kept_before + rank]
    names, more = named_dims(broadcast)
    sizes.update(more)
    lookups = [(broadcast_dims(type.shape, broadcast), type) for type in types[1:]]
    result = (*kept[:kept_before], *names, *kept[kept_before:])
    return make([(dims, types[0]), *lookups], [result], sizes, blocked={f"x{i}" for i in indexed}, linear=[(0,)])


# Products


def matmul(op: Op, types: Types) -> OpRule:
    """matmul(a, b): a [*batch, s, k], b [*batch, k, t], either one a vector; batches broadcast."""
    a, b = types[0].shape, types[1].shape
    batch = len(op.results[0].type.shape) - (len(a) > 1) - (len(b) > 1)
    whole = op.results[0].type.shape[:batch]
    names, sizes = named_dims(whole)
    sizes["k"] = a[-1]
    left: Dims = (*broadcast_dims(a[:-2], whole), ("s",), ("k",)) if len(a) > 1 else (("k",),)
    right: Dims = (*broadcast_dims(b[:-2], whole), ("k",), ("t",)) if len(b) > 1 else (("k",),)
    result = names
    if len(a) > 1:
        sizes["s"], result = a[-2], (*result, ("s",))
    if len(b) > 1:
        sizes["t"], result = b[-1], (*result, ("t",))
    return make([(left, types[0]), (right, types[1])], [result], sizes, linear=[(0,), (1,)], work=[tuple(sizes)])


def matmul_grad_left(op: Op, types: Types) -> OpRule:
    """matmul_grad_left(g, b): g [*batch, s, t], b [*batch, k, t] -> [*batch, s, k]."""
    g, b = types[0].shape, types[1].shape
    whole, names, sizes = _batched(g)
    sizes.update({"s": g[-2], "t": g[-1], "k": b[-2]})
    operands: list[tuple[Dims, TensorType]] = [
        ((*names, ("s",), ("t",)), types[0]),
        ((*broadcast_dims(b[:-2], whole), ("k",), ("t",)), types[1]),
    ]
    return make(operands, [(*names, ("s",), ("k",))], sizes, linear=[(0,), (1,)], work=[tuple(sizes)])


def matmul_grad_right(op: Op, types: Types) -> OpRule:
    """matmul_grad_right(g, a, flat): g [*batch, s, t], a [*batch, s, k] -> [*batch, k, t]; all of `s`, if flat."""
    g, a = types[0].shape, types[1].shape
    whole, names, sizes = _batched(g)
    sizes.update({"s": g[-2], "t": g[-1], "k": a[-1]})
    left = broadcast_dims(a[:-2], whole)
    operands: list[tuple[Dims, TensorType]] = [
        ((*names, ("s",), ("t",)), types[0]),
        ((*left, ("s",), ("k",)), types[1]),
    ]
    result: Dims = (("k",), ("t",)) if argument(op, 2, "flat") is True else (*left, ("k",), ("t",))
    return make(operands, [result], sizes, linear=[(0,), (1,)], work=[tuple(sizes)])


def distances(op: Op, types: Types) -> OpRule:
    """cdist(x, y): x [*batch, s, d], y [*batch, t, d]; batches broadcast, and vectors are whole."""
    a, b = types[0].shape, types[1].shape
    whole = op.results[0].type.shape[:-2]
    names, sizes = named_dims(whole)
    sizes.update({"s": a[-2], "t": b[-2], "d": a[-1]})
    left: Dims = (*broadcast_dims(a[:-2], whole), ("s",), ("d",))
    right: Dims = (*broadcast_dims(b[:-2], whole), ("t",), ("d",))
    return make([(left, types[0]), (right, types[1])], [(*names, ("s",), ("t",))], sizes, blocked={"d"})


def triangular_solve(op: Op, types: Types) -> OpRule:
    """linalg_solve_triangular(a, x): a [*batch, n, n], x [*batch, n, k], or [*batch, k, n] if not `left`.

    The batches broadcast.
    """
    a, x = types[0].shape, types[1].shape
    whole = op.results[0].type.shape[:-2]
    names, sizes = named_dims(whole)
    left = bool(argument(op, 3, "left", True))
    sizes.update({"i": a[-2], "j": a[-1], "k": x[-1] if left else x[-2]})
    last: Dims = (("i",), ("k",)) if left else (("k",), ("i",))
    operands: list[tuple[Dims, TensorType]] = [
        ((*broadcast_dims(a[:-2], whole), ("i",), ("j",)), types[0]),
        ((*broadcast_dims(x[:-2], whole), *last), types[1]),
    ]
    return make(operands, [(*names, *last)], sizes, blocked={"i", "j"}, linear=[(1,)])


def _batched(shape: Sequence[int]) -> tuple[Sequence[int], Dims, dict[str, int]]:
    """All dimensions but the last two, one factor each."""
    names, sizes = named_dims(shape[:-2])
    return shape[:-2], names, sizes


def einsum(op: Op, types: Types) -> OpRule | None:
    equation = argument(op, 0, "equation")
    if not isinstance(equation, str) or "->" not in equation:
        return None
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    others = [len(t.shape) - len(term) + 3 if "..." in term else 0 for term, t in zip(terms, types, strict=True)]
    rest = "".join(sorted(set(string.ascii_letters) - set(equation)))[: max(others)]  # the dimensions in `...`
    terms = [term.replace("...", rest[len(rest) - count :]) for term, count in zip(terms, others, strict=True)]
    right = right.replace("...", rest)
    if any(len(set(term)) != len(term) for term in (*terms, right)):
        return None
    named = [(name, n) for term, t in zip(terms, types, strict=True) for name, n in zip(term, t.shape, strict=True)]
    sizes = dict(named)
    if any(sizes[name] != n for name, n in named):
        return None  # a dimension of 1 broadcasts
    operands = [(tuple((name,) for name in term), type) for term, type in zip(terms, types, strict=True)]
    groups = [(i,) for i in range(len(types))]
    work = [tuple(sizes)] if len(types) > 1 else []
    return make(operands, [tuple((name,) for name in right)], sizes, linear=groups, work=work)


def convolution(op: Op, types: Types) -> OpRule | None:
    """conv1d to conv3d(x[b c ...], w[o c ...], bias[o], ..., groups): spatial dimensions are whole.

    With groups, channels are (g c) and (g o), and whole groups may be cut.
    """
    x, w, made = types[0].shape, types[1].shape, op.results[0].type.shape
    if len(x) != len(w):
        return None
    groups = integers(argument(op, 6, "groups", 1))[0]
    sizes = {"b": x[0], "g": groups, "c": w[1], "o": w[0] // groups}
    before, more_before = named_dims(x[2:], "x")
    kernel, more_kernel = named_dims(w[2:], "k")
    after, more_after = named_dims(made[2:], "p")
    space = {**more_before, **more_kernel, **more_after}
    sizes.update(space)
    operands: list[tuple[Dims, TensorType]] = [
        ((("b",), ("g", "c"), *before), types[0]),
        ((("g", "o"), ("c",), *kernel), types[1]),
    ]
    operands += [((("g", "o"),), type) for type in types[2:]]
    added = tuple(range(2, len(types)))
    # If c or o were cut inside the groups, the literal number of groups would be wrong for a rank's part.
    blocked = {*space, *(("c", "o") if groups > 1 else ())}
    return make(
        operands,
        [(("b",), ("g", "o"), *after)],
        sizes,
        blocked=blocked,
        linear=[(0, *added), (1, *added)],
        added=added,
        work=[("b", "g", "o", "c", *more_kernel, *more_after)],
    )


def group_norm(op: Op, types: Types) -> OpRule:
    """group_norm(x[b c ...], groups, w[c], bias[c]): samples may be cut, normalized dimensions may not."""
    dims, sizes = named_dims(types[0].shape)
    weights = [((dims[1],), type) for type in types[1:]]
    blocked = {name for name in sizes if name != "d0"}
    return make([(dims, types[0]), *weights], [dims], sizes, blocked=blocked)


def bag_rows(op: Op, types: Types) -> OpRule:
    """g[b d], starts[b], ends[b] -> [n d]: the gradients of all rows, from those of their bags."""
    (bags, width), count = types[0].shape, integers(argument(op, 3, "count"))[0]
    operands: tuple[Dims, ...] = (("b",), ("d",)), (("b",),), (("b",),)
    sizes = {"b": bags, "d": width, "n": count}
    return make(list(zip(operands, types, strict=True)), [(("n",), ("d",))], sizes, blocked={"n"}, linear=[(0,)])


def lookup(plain: Callable[[Op, Types], OpRule | None]) -> Callable[[Op, Types], OpRule | None]:
    """w[(g v) d], ids[(g s)] -> [(g s) d]: ids received by `groups` of rows; without groups, the rule of a plain
    lookup.
    """

    def rule(op: Op, types: Types) -> OpRule | None:
        groups = integers(argument(op, 3, "groups", 1))[0]
        if groups == 1:
            return plain(op, types)
        w, ids = (type.shape for type in types)
        sizes = {"g": groups, "s": ids[0] // groups, "v": w[0] // groups, "d": w[1]}
        operands: tuple[Dims, ...] = ((("g", "v"), ("d",)), (("g", "s"),))
        result: Dims = (("g", "s"), ("d",))
        return make(list(zip(operands, types, strict=True)), [result], sizes, blocked={"v"})

    return rule
