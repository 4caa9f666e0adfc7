"""The forms in which normalize writes operations, for the operations of a joint graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from partc.ir.collectives import COLLECTIVES, ROUTED
from partc.ir.fx_calls import operation
from partc.ir.operations import RANDOM, spelling
from partc.ir.operators import DTYPE_NAMES
from partc.ir.parser import parse_graph
from partc.ir.program import SCAN, Arg, DTypeArg, Ref
from partc.torch_private import OpOverload

# Arguments that are attributes in the IR.
NAMED = ("rows", "ring", "order", "sinks", "limits", "keys", "reads", "ordered")
RESHAPES = spelling("reshape")
# Operations that fill a tensor of the operand's shape with a number; None: with their last argument.
_FILLED: Mapping[str, int | None] = {
    "zeros_like": 0, "new_zeros": 0, "ones_like": 1, "new_ones": 1, "full_like": None, "new_full": None, "fill": None,
}  # fmt: skip
_IGNORED_ATTRS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "implicit"})

Args = tuple[Arg, ...]
Attrs = tuple[tuple[str, Arg], ...]
Form = tuple[str, Args, Attrs]


def filling(node: fx.Node) -> object:
    """The number, or the node, with which an operation fills its result; None for other operations."""
    match operation(node):
        case "zeros":
            return 0
        case "full":
            return node.args[-1]
        case name if name in _FILLED:
            number = _FILLED[name]
            return node.args[-1] if number is None else number
    return None


def filled(tensor: torch.Tensor, number: Arg) -> Form:
    """The form of a constant like `tensor`."""
    return "full", (tuple(tensor.shape), number), (("dtype", DTypeArg(DTYPE_NAMES[tensor.dtype])),)


def canonical(node: fx.Node, read: Callable[[Any], Arg]) -> Form:
    """An operation's name, arguments and attributes in the form that normalize produces. `read` gives the IR's form of
    an argument.
    """
    name, args = operation(node), tuple(read(arg) for arg in node.args)
    attrs = tuple((key, read(arg)) for key, arg in node.kwargs.items() if key not in _IGNORED_ATTRS and arg is not None)
    form = _FORMS.get(name)
    if form is None:
        form = _with_named if name.startswith(("attention", "expert_matmul")) else _as_traced
    return form(node, args, attrs)


def _as_traced(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return operation(node), args, attrs


def _with_named(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    """The arguments of NAMED become attributes; those that are empty are left out."""
    assert isinstance(node.target, OpOverload)
    given = dict(zip((argument.name for argument in node.target._schema.arguments), args, strict=False))
    named = [(word, given.pop(word)) for word in NAMED if word in given]
    present = ((word, arg) for word, arg in named if arg not in (None, "", ()))
    return operation(node), tuple(given.values()), (*present, *attrs)


def _constant(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    fixed = _FILLED[operation(node)]
    number = args[-1] if fixed is None else fixed
    return _as_traced(node, args, attrs) if isinstance(number, Ref) else filled(node.meta["val"], number)


def _reshape(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return "reshape", (args[0], tuple(node.meta["val"].shape)), ()


def _permute(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return "permute", (args[0], _permutation(node)), ()


def _parts(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    """A split into parts of given sizes, or a reshape into the only part."""
    parts = node.meta["val"]
    if len(parts) == 1:
        return "reshape", (args[0], tuple(parts[0].shape)), ()
    if operation(node) == "unbind":
        return _as_traced(node, args, attrs)
    dim = _dim(args, 2, parts[0].dim())
    return "split", (args[0], tuple(part.shape[dim] for part in parts), dim), ()


def _cat(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return "cat", (args[0], _dim(args, 1, node.meta["val"].dim())), ()


def _slice(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    """A dimension, bounds inside the tensor, and a step."""
    (source,) = node.all_input_nodes
    shape = source.meta["val"].shape
    given = [arg if isinstance(arg, int) else None for arg in args[1:]]
    dim, start, end, step = (*given, *(0, None, None, 1)[len(given) :])
    assert dim is not None
    first, last, stride = slice(start, end, step).indices(shape[dim % len(shape)])
    return "slice", (args[0], dim % len(shape), first, max(first, last), stride), ()


def _softmax(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return operation(node)[1:], (args[0], _dim(args, 1, node.meta["val"].dim())), ()


def _cast(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return "to", (args[0], dict(attrs)["dtype"]), ()


def _scan(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return SCAN, args, (*attrs[:-1], ("step", parse_graph(str(attrs[-1][1]))))


def _collective(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    row = COLLECTIVES[operation(node)]
    return row.runs_as or operation(node), args[:1], tuple(zip(row.attrs, args[1:-1], strict=True))


def _routed(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return operation(node), args[:-2], (("axis", args[-2]),)


def _spread(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return "div", (args[0], args[2]), ()


def _with_axis(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    """The last argument is an axis, or empty."""
    return operation(node), args[:-1], (("axis", args[-1]),) if args[-1] else ()


def _lookup(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return "embedding_shard", args[:2], (("axis", args[-1]),)  # only its gradient depends on padding


def _lookup_backward(node: fx.Node, args: Args, attrs: Attrs) -> Form:
    return "embedding_shard_backward", args[:3] if args[3] == -1 else args[:4], (("axis", args[-1]),)


_FORMS: Mapping[str, Callable[[fx.Node, Args, Attrs], Form]] = {
    **dict.fromkeys(RANDOM, _with_named),
    **dict.fromkeys(_FILLED, _constant),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(("t", "transpose", "permute"), _permute),
    **dict.fromkeys(spelling("split"), _parts),
    "cat": _cat,
    "slice": _slice,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_to_copy": _cast,
    "mark_grad": lambda node, args, attrs: ("alias", args[:1], ()),
    SCAN: _scan,
    **dict.fromkeys(COLLECTIVES, _collective),
    **dict.fromkeys(ROUTED, _routed),
    "spread": _spread,
    **dict.fromkeys(("cross_entropy", "cross_entropy_backward", "mask_classes"), _with_axis),
    "embedding_shard": _lookup,
    "embedding_shard_backward": _lookup_backward,
}


def _dim(args: Args, place: int, rank: int) -> int:
    """The dimension that an argument names, counted from the front; the first one if the argument is left out."""
    dim = args[place] if place < len(args) else 0
    assert isinstance(dim, int)
    return dim % max(rank, 1)


def _permutation(node: fx.Node) -> tuple[int, ...]:
    rank = node.meta["val"].dim()
    order = list(range(rank))
    match operation(node):
        case "permute":
            given = node.args[1]
            assert isinstance(given, list | tuple)
            return tuple(dim % rank for dim in given if isinstance(dim, int))
        case "transpose":
            a, b = (int(dim) % rank for dim in node.args[1:3])  # type: ignore[arg-type]
        case _:
            a, b = 0, rank - 1
    order[a], order[b] = order[b], order[a]
    return tuple(order)
