"""Indices in batch entries that refer to rows of the whole batch, such as the two ends of a graph's edges.

    out = x.new_zeros(x.shape).index_add(0, ends, x[starts])      x: 32 rows, of which a microbatch has 8
                                                                  starts, ends: numbers below 32

If each microbatch is a batch of its own, such indices reach beyond its rows. The indices of the example batch are
computed from its integers alone, part by part. So are masks:

    words.masked_scatter(ids == PICTURE, pictures)                pictures: 32 rows in an entry that no part cuts,
                                                                  of which a microbatch has places for 16

Values that are written must fit their places, which torch does not check for tensors without memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from partc.errors import PartcError
from partc.frontend.node_sources import source_of
from partc.torch_private import without_modes

_BY_DIM = (
    "gather", "index_add", "index_copy", "index_fill", "index_select", "scatter", "scatter_add", "scatter_reduce",
)  # fmt: skip
_MASKS = (torch.bool, torch.uint8)


def check_indices(
    exported: ExportedProgram, names: Sequence[str], whole: Sequence[str], parts: Sequence[Mapping[str, Tensor]]
) -> None:
    """Check that all indices in a part of the batch lie inside their tensors, and that every part has places for all
    rows of entries that it reads whole.

    `names` are the entries of the batch, of which no part cuts those of `whole`; `parts` have the values of those that
    are integers.

    Raises PartcError P0402 at the line that reads or writes there.
    """
    entries = dict(zip(exported.graph_signature.user_inputs, names, strict=True))
    read = _entries_read(exported.graph, entries) if parts else {}
    for part in parts:
        known: dict[fx.Node, Any] = {}
        for node in exported.graph.nodes:
            if entries.get(node.name) in part:
                known[node] = part[entries[node.name]]
            elif node.op == "call_function":
                for size, index in _lookups(node):
                    numbers = known.get(index)
                    if isinstance(numbers, Tensor) and numbers.numel() and numbers.max() >= size:
                        raise _refusal(node, int(numbers.max()), size, len(parts))
                if _name(node) == "masked_scatter":
                    _check_places(node, known, read, whole, len(parts))
                _follow(node, known)


def _entries_read(graph: fx.Graph, entries: Mapping[str, str]) -> Mapping[fx.Node, frozenset[str]]:
    """The entries of the batch from which each value is computed."""
    read: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        own = frozenset({entries[node.name]} if node.name in entries else ())
        read[node] = own.union(*map(read.__getitem__, node.all_input_nodes))
    return read


def _check_places(
    node: fx.Node,
    known: Mapping[fx.Node, Any],
    read: Mapping[fx.Node, frozenset[str]],
    whole: Sequence[str],
    parts: int,
) -> None:
    """Check that a mask of one part selects places for all rows of entries that are read whole."""
    x, mask, source = node.args
    if not isinstance(x, fx.Node) or not isinstance(mask, fx.Node) or not isinstance(source, fx.Node):
        return
    selected, entries = known.get(mask), read[source]
    if not isinstance(selected, Tensor) or not entries or not entries <= {*whole} or read[mask] <= {*whole}:
        return
    with without_modes():
        places = int(selected.expand(tuple(x.meta["val"].shape)).sum())
    given = source.meta["val"].numel()
    if places != given:
        raise PartcError(
            "P0402",
            f"each of {parts} microbatches reads the whole entry {min(entries)}, and writes {given} elements computed"
            f" from it to the places of a mask, of which the microbatch has {places}",
            help="compile with --microbatches 1, or a batch in which each entry has a row for each example",
            source=source_of(node),
        )


def check_writes(exported: ExportedProgram, parts: int) -> None:
    """Check that values written at indices fit their places. The trace used one of `parts` parts of the batch.

    Raises PartcError P0206 at the line that writes.
    """
    for node in exported.graph.nodes:
        if _name(node) == "index_put":
            x, indices, values = (fx.node.map_arg(arg, lambda each: each.meta["val"]) for arg in node.args[:3])
            if any(index is not None and index.dtype in _MASKS for index in indices):
                continue  # the number of places is not known
            with without_modes():
                like = torch.empty(x.shape, device="meta")
                places = like[tuple(slice(None) if i is None else torch.empty_like(i, device="meta") for i in indices)]
            try:
                fits = torch.broadcast_shapes(places.shape, values.shape) == places.shape
            except RuntimeError:
                fits = False
            if not fits:
                raise PartcError(
                    "P0206",
                    f"forward writes values of shape {tuple(values.shape)} to places of shape {tuple(places.shape)}",
                    help="take sizes from the shapes of tensors"
                    + (f": each of {parts} microbatches is a batch of its own here" if parts > 1 else ""),
                    source=source_of(node),
                )


def _follow(node: fx.Node, known: dict[fx.Node, Any]) -> None:
    """Compute a node whose operands are known; a change in place makes its operand unknown."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is not None and schema.is_mutable:
        for given in node.all_input_nodes:
            known.pop(given, None)
    elif _name(node) == "expand_as":  # of the other operand, whose values it does not read, only the shape is known
        given = node.all_input_nodes[0]
        if given in known:
            known[node] = known[given].expand(tuple(node.meta["val"].shape))
    elif node.all_input_nodes and all(given in known for given in node.all_input_nodes):
        if schema is not None and (not schema.name.startswith("aten::") or "empty" in schema.name):
            return  # partc's own operators have shapes alone, without values
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        with without_modes():
            try:
                known[node] = target(*args, **kwargs)
            except Exception:  # an operand's sizes differ from the trace
                return


def _name(node: fx.Node) -> str:
    """The name of the operation of a node, in place or not."""
    return str(getattr(node.target, "__name__", "")).partition(".")[0].removesuffix("_")


def _lookups(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The size of each dimension that a node indexes, with the index."""
    name = _name(node)
    given = node.args[0] if node.args else None
    if not isinstance(given, fx.Node) or not isinstance(given.meta.get("val"), Tensor):
        return
    shape = given.meta["val"].shape
    if name == "embedding" and isinstance(node.args[1], fx.Node):
        yield shape[0], node.args[1]
    elif name in _BY_DIM and len(node.args) > 2 and isinstance(node.args[1], int) and isinstance(node.args[2], fx.Node):
        yield shape[node.args[1]] if shape else 1, node.args[2]
    elif name in ("index", "index_put") and isinstance(node.args[1], list | tuple):
        for dim, index in enumerate(node.args[1]):
            if isinstance(index, fx.Node) and index.meta["val"].dtype not in _MASKS:
                yield shape[dim], index
            elif index is not None:
                return  # a mask stands for several dimensions


def _refusal(node: fx.Node, number: int, size: int, parts: int) -> PartcError:
    return PartcError(
        "P0402",
        f"the batch has indices up to {number} of rows of the whole batch; each of {parts} microbatches has {size}",
        help="compile with --microbatches 1, or count rows within each example",
        source=source_of(node),
    )
