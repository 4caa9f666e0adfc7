"""Simplify what is made of constants, and what models spell out by hand.

    ids  = expand(row, (8, 64))                      mask = …                                # not needed
    mask = le(ids_of_keys, ids_of_queries)     ->    a = attention(q, k, v, None, True, None)
    k2   = reshape(expand(reshape(k, …), …), …)
    a    = attention(q, k2, v2, mask, False, None)

A constant that is the same for every example of the batch keeps one row and is broadcast. A mask
made of constants is evaluated: one that hides the future is `is_causal`, one that hides nothing is
none. Keys and values repeated for their group of query heads are passed as they are, and a root
mean square norm or a softmax written out is one operation again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from partc import fuel
from partc.layout import Layout
from partc.passes.activations import gelus
from partc.passes.label_losses import label_losses
from partc.passes.masks import known_masks
from partc.passes.normalize import without_dead
from partc.passes.routing import unsorted_experts
from partc.passes.rows import plain_rows
from partc.passes.softmaxes import softmaxes
from partc.program import Arg, Graph, Op, Program, Ref, Region, TensorType, Value

# Operations that treat examples alike along every dimension but those they name.
_POINTWISE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "__and__",
        "__or__",
        "__xor__",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "logical_and",
        "logical_or",
        "logical_not",
        "where",
        "to",
        "neg",
        "cos",
        "sin",
        "exp",
        "remainder",
        "floor_divide",
        "masked_fill",
        "maximum",
        "minimum",
        "clamp",
        "abs",
    ]
)
_ATTENTION = ("attention", "attention_dropout")
_ALONG = {"slice": 1, "cumsum": 1, "diff": 2, "softmax": 1, "gather": 1}  # position of the dimension they work along


def simplify(program: Program) -> Program:
    """Apply the rewrites to every region and drop what is dead then."""
    return replace(program, regions=tuple(_simplified(region) for region in program.regions))


def _simplified(region: Region) -> Region:
    for rewrite in (
        _plain_indexing,
        unsorted_experts,
        _one_row,
        known_masks,
        _grouped_heads,
        _norms,
        gelus,
        softmaxes,
        plain_rows,
        label_losses,
        _short_chains,
        _once,
    ):
        region = without_dead(rewrite(region))
    return region


def _rebuilt(region: Region, ops: list[Op], same: Mapping[str, str]) -> Region:
    outputs = tuple(same.get(name, name) for name in region.forward.outputs)
    return replace(region, forward=Graph(inputs=region.forward.inputs, ops=tuple(ops), outputs=outputs))


def _plain_indexing(region: Region) -> Region:
    """x[arange(n)[:, None], arange(m)[None, :]] is x, with dimensions of one element between."""
    types = region.types(region.forward)
    counting: dict[str, int] = {}  # values that count 0, 1, … along one dimension: how far
    ops = []
    for op in region.forward.ops:
        first = op.args[0] if op.args else None
        picked: list[Op] = []
        match op.name:
            case "arange" if len(op.args) == 1 and isinstance(first, int):
                counting[op.result.name] = first
            case "add" if isinstance(first, Ref) and first.name in counting and op.args[1] == 0:
                counting[op.result.name] = counting[first.name]
            case "reshape" if isinstance(first, Ref) and first.name in counting:
                if counting[first.name] in op.result.type.shape:
                    counting[op.result.name] = counting[first.name]
            case "index" if isinstance(first, Ref):
                op = _as_reshape(op, types[first.name].shape, types, counting) or op
                picked = _as_gather(op, types, counting)
        ops.extend(picked or [op])
    return _rebuilt(region, ops, {})


def _as_reshape(
    op: Op, shape: tuple[int, ...], types: Mapping[str, TensorType], counting: Mapping[str, int]
) -> Op | None:
    """The reshape that an indexing stands for, if every index counts through its whole dimension in order."""
    indices = op.args[1]
    if not isinstance(indices, tuple) or len(indices) != len(shape):
        return None
    rank, places = len(op.result.type.shape), []
    for size, index in zip(shape, indices, strict=True):
        if not isinstance(index, Ref) or counting.get(index.name) != size:
            return None
        found = types[index.name].shape
        place = [dim + rank - len(found) for dim, extent in enumerate(found) if extent != 1]
        if size != 1 and len(place) != 1:
            return None
        places += place
    if places != sorted(places) or math.prod(op.result.type.shape) != math.prod(shape):
        return None
    return replace(op, name="reshape", args=(op.args[0], op.result.type.shape), attrs=())


def _as_gather(op: Op, types: Mapping[str, TensorType], counting: Mapping[str, int]) -> list[Op]:
    """x[arange(b), j]: of each of the rows, one element along the next dimension."""
    indices = op.args[1]
    if op.name != "index" or not isinstance(indices, tuple) or len(indices) != 2:
        return []
    x, (rows, chosen) = op.args[0], indices
    if not (isinstance(x, Ref) and isinstance(rows, Ref) and isinstance(chosen, Ref)):
        return []
    count, size, *rest = types[x.name].shape
    if counting.get(rows.name) != count or types[rows.name].shape != (count,) or types[chosen.name].shape != (count,):
        return []
    made = op.result.name
    # A negative index counts from the end for an indexing, not for a gather.
    steps: tuple[tuple[str, str, tuple[Arg, ...], tuple[int, ...], str], ...] = (
        ("remainder", f"{made}_index", (chosen, size), (count,), chosen.name),
        (
            "reshape",
            f"{made}_rows",
            (Ref(f"{made}_index"), (count, 1, *(1 for _ in rest))),
            (count, 1, *(1 for _ in rest)),
            chosen.name,
        ),
        ("expand", f"{made}_each", (Ref(f"{made}_rows"), (count, 1, *rest)), (count, 1, *rest), chosen.name),
        ("gather", f"{made}_one", (x, 1, Ref(f"{made}_each")), (count, 1, *rest), x.name),
        ("reshape", made, (Ref(f"{made}_one"), (count, *rest)), (count, *rest), x.name),
    )
    return [
        Op(name=name, args=args, results=(_whole(result, types[like], shape),), source=op.source)
        for name, result, args, shape, like in steps
    ]


def _whole(name: str, like: TensorType, shape: tuple[int, ...]) -> Value:
    return Value(name=name, type=TensorType(dtype=like.dtype, layout=Layout.replicated(shape)))


def _one_row(region: Region) -> Region:
    """Values equal along their first dimension keep one row where every reader broadcasts."""
    types = region.types(region.forward)
    small: dict[str, str] = {}  # value -> its one row
    ops: list[Op] = []

    def row(op: Op, args: tuple[Arg, ...]) -> None:
        shape = (1, *op.result.type.shape[1:])
        type = TensorType(dtype=op.result.type.dtype, layout=Layout.replicated(shape))
        value = Value(name=f"{op.result.name}_row", type=type)
        types[value.name] = type
        small[op.result.name] = value.name
        ops.append(replace(op, args=args, results=(value,)))

    for op in region.forward.ops:
        operands = [name for name in op.refs()]
        rows = [name for name in operands if name in small]
        if op.name == "expand" and (narrow := _narrow(op, types)) is not None:
            row(op, (op.args[0], narrow))
        elif rows and len(op.results) == 1 and _keeps_rows(op, types, small):
            row(op.renamed(small), _with_one_row(op, small))
        elif rows and (op.name in _POINTWISE or op.name in _ATTENTION):
            op = replace(op.renamed(small), results=op.results)
            if _broadcasts(op, types):
                ops.append(op)
                continue
        ops.append(op)
    return _rebuilt(region, _unshadowed(ops), {})


def _narrow(op: Op, types: Mapping[str, TensorType]) -> tuple[int, ...] | None:
    """The sizes of an expand without its copies along the first dimension; None if there are none."""
    operand = types[next(op.refs())].shape
    shape = op.result.type.shape
    copies = len(shape) > 1 and shape[0] > 1 and (len(operand) < len(shape) or operand[0] == 1)
    return (1, *shape[1:]) if copies else None


def _keeps_rows(op: Op, types: Mapping[str, TensorType], small: Mapping[str, str]) -> bool:
    """Whether the result is equal along its first dimension because all operands are."""
    shape = op.result.type.shape
    for name in op.refs():
        operand = types[name].shape
        if name not in small and len(operand) == len(shape) and operand and operand[0] != 1:
            return False
    if op.name in _POINTWISE:
        return True
    if op.name in _ALONG:
        dim = op.args[_ALONG[op.name]]
        return isinstance(dim, int) and dim % len(shape) != 0
    if op.name == "reshape":
        return bool(shape) and shape[0] == types[next(op.refs())].shape[0]
    return op.name == "embedding" and [*op.refs()][1] in small


def _with_one_row(op: Op, small: Mapping[str, str]) -> tuple[Arg, ...]:
    args = op.renamed(small).args
    if op.name == "reshape":
        return (args[0], (1, *op.result.type.shape[1:]))
    return args


def _broadcasts(op: Op, types: Mapping[str, TensorType]) -> bool:
    """Whether the operation gives its whole result though some operands have one row."""
    shapes = [types[name].shape for name in op.refs()]
    if op.name in _ATTENTION:
        return len(shapes) > 3 and shapes[0][0] == op.result.type.shape[0] and shapes[1][0] == shapes[0][0]
    return tuple(torch.broadcast_shapes(*shapes)) == op.result.type.shape


def _unshadowed(ops: list[Op]) -> list[Op]:
    """One definition of each name: a row's operation stands before the whole one that it came from."""
    seen: set[str] = set()
    kept = []
    for op in ops:
        if not any(value.name in seen for value in op.results):
            kept.append(op)
            seen.update(value.name for value in op.results)
    return kept


def _grouped_heads(region: Region) -> Region:
    """Attention takes grouped keys and values: undo the copies for each query head."""
    types = region.types(region.forward)
    made = {value.name: op for op in region.forward.ops for value in op.results}
    ops = []
    for op in region.forward.ops:
        if op.name in _ATTENTION:
            plain = tuple(_ungrouped(arg, made, types) for arg in op.args[1:3])
            if all(plain) and fuel.allowed("grouped heads", op.source):
                op = replace(op, args=(op.args[0], *(Ref(name) for name in plain if name), *op.args[3:]))
        ops.append(op)
    return _rebuilt(region, ops, {})


def _ungrouped(arg: Arg, made: Mapping[str, Op], types: Mapping[str, TensorType]) -> str | None:
    """k of reshape(expand(reshape(k, [b, g, 1, t, d]), [b, g, r, t, d]), [b, g r, t, d])."""
    chain: list[Op] = []
    name = arg.name if isinstance(arg, Ref) else ""
    for expected in ("reshape", "expand", "reshape"):
        op = made.get(name)
        if op is None or op.name != expected:
            return None
        chain.append(op)
        name = next(op.refs())
    shape = types[name].shape
    if len(shape) != 4:
        return None
    b, g, t, d = shape
    wide = chain[1].result.type.shape
    fits = types[chain[2].result.name].shape == (b, g, 1, t, d) and len(wide) == 5
    return name if fits and wide == (b, g, wide[2], t, d) else None


def _norms(region: Region) -> Region:
    """w · x · rsqrt(mean(x²) + eps), written out, is rms_norm(x, w)."""
    types = region.types(region.forward)
    made = {value.name: op for op in region.forward.ops for value in op.results}
    ops = []
    for op in region.forward.ops:
        found = _rms_norm(op, made, types) if op.name == "mul" else None
        ops.append(found if found is not None and fuel.allowed("rms_norm", op.source) else op)
    return _rebuilt(region, ops, {})


def _rms_norm(op: Op, made: Mapping[str, Op], types: Mapping[str, TensorType]) -> Op | None:
    names = [*op.refs()]
    if len(names) != 2:
        return None
    for weight, scaled in (names, names[::-1]):
        product = made.get(scaled)
        if weight in made or product is None or product.name != "mul" or len(types[weight].shape) != 1:
            continue
        for x, root in ((a, b) for a, b in (tuple(product.refs()), tuple(product.refs())[::-1])):
            eps = _mean_square(root, x, made)
            if eps is not None and types[weight].shape == types[x].shape[-1:]:
                return replace(op, name="rms_norm", args=(Ref(x), types[weight].shape, Ref(weight), eps), attrs=())
    return None


def _mean_square(name: str, x: str, made: Mapping[str, Op]) -> float | None:
    """eps, if `name` is rsqrt(mean(x²) + eps) over x's last dimension."""
    root = made.get(name)
    if root is None or root.name != "rsqrt":
        return None
    shifted = made.get(next(root.refs()))
    if shifted is None or shifted.name != "add" or len(shifted.args) != 2 or not isinstance(shifted.args[1], float):
        return None
    mean = made.get(next(shifted.refs()))
    total = made.get(next(mean.refs())) if mean is not None and mean.name == "div" else None
    square = made.get(next(total.refs())) if total is not None and total.name == "sum" else None
    if mean is None or total is None or square is None or square.name != "pow" or square.args != (Ref(x), 2):
        return None
    rank = len(square.result.type.shape)
    right = total.args[1:] == ((rank - 1,), True) and mean.args[1] == square.result.type.shape[-1]
    return shifted.args[1] if right else None


def _short_chains(region: Region) -> Region:
    """A reshape of a reshape reads what the first one read; one that gives the shape that was there is dropped."""
    types = region.types(region.forward)
    made: dict[str, Op] = {}
    same: dict[str, str] = {}
    ops = []
    for op in region.forward.ops:
        op = replace(op.renamed(same), results=op.results)
        if op.name == "reshape":
            base = next(op.refs())
            while base in made and made[base].name == "reshape":
                base = next(made[base].refs())
            if types[base].shape == op.result.type.shape:
                same[op.result.name] = base
                continue
            op = replace(op, args=(Ref(base), *op.args[1:]))
        made.update((value.name, op) for value in op.results)
        ops.append(op)
    return _rebuilt(region, ops, same)


def _once(region: Region) -> Region:
    """What depends on no input and is made twice are made once: bodies that each shape the same table share it."""
    bound = {value.name for value in region.forward.inputs}
    known: dict[tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]], Op] = {}
    same: dict[str, str] = {}
    ops = []
    for op in region.forward.ops:
        op = replace(op.renamed(same), results=op.results)
        if bound.isdisjoint(op.refs()):
            key = (op.name, op.args, op.attrs)
            if key in known and _key_types(known[key]) == _key_types(op):
                same.update((new.name, old.name) for new, old in zip(op.results, known[key].results, strict=True))
                continue
            known[key] = op
        else:
            bound.update(value.name for value in op.results)
        ops.append(op)
    return _rebuilt(region, ops, same)


def _key_types(op: Op) -> tuple[TensorType, ...]:
    return tuple(value.type for value in op.results)
