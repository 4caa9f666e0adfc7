"""Indices in batch entries that refer to rows of the whole batch, such as the two ends of a graph's edges.

    out = x.new_zeros(x.shape).index_add(0, ends, x[starts])      x: 32 rows, of which a microbatch has 8
                                                                  starts, ends: numbers below 32

If each microbatch is a batch of its own, such indices reach beyond its rows. The indices of the example batch are
computed from its integers alone, part by part.
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


def check_indices(exported: ExportedProgram, names: Sequence[str], parts: Sequence[Mapping[str, Tensor]]) -> None:
    """Check that no index of a part of the batch lies outside of its tensor.

    `names` are the entries of the batch, and `parts` have the values of those that are integers.

    Raises PartcError P0402 at the line that reads or writes there.
    """
    entries = dict(zip(exported.graph_signature.user_inputs, names, strict=True))
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
                _follow(node, known)


def _follow(node: fx.Node, known: dict[fx.Node, Any]) -> None:
    """Compute a node whose operands are known; a change in place makes its operand unknown."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is not None and schema.is_mutable:
        for given in node.all_input_nodes:
            known.pop(given, None)
    elif node.all_input_nodes and all(given in known for given in node.all_input_nodes):
        if schema is not None and (not schema.name.startswith("aten::") or "empty" in schema.name):
            return  # partc's own operators have shapes alone, without values
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        with without_modes():
            try:
                known[node] = target(*args, **kwargs)
            except Exception:  # an operand's sizes differ from the trace
                return


def _lookups(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The size of each dimension that a node indexes, with the index."""
    name = getattr(node.target, "__name__", "").partition(".")[0].removesuffix("_")
    given = node.args[0] if node.args else None
    if not isinstance(given, fx.Node) or not isinstance(given.meta.get("val"), Tensor):
        return
    shape = given.meta["val"].shape
    if name == "embedding" and isinstance(node.args[1], fx.Node):
        yield shape[0], node.args[1]
    elif name in _BY_DIM and len(node.args) > 2 and isinstance(node.args[1], int) and isinstance(node.args[2], fx.Node):
        yield shape[node.args[1]], node.args[2]
    elif name in ("index", "index_put") and isinstance(node.args[1], list | tuple):
        for dim, index in enumerate(node.args[1]):
            if isinstance(index, fx.Node) and index.meta["val"].dtype not in (torch.bool, torch.uint8):
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
