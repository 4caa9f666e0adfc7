"""Operations that return their operand itself, such as `x.to(x.dtype)` and `x.contiguous()` of a contiguous tensor.

After such an operation, a trace reads its result wherever the code reads the operand.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from partc.ir.fx_calls import named_arguments, operation

# They return their operand if it has the wanted form, or if they drop nothing.
_RETURNING = frozenset({
    "to", "type_as", "contiguous", "flatten", "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    "resolve_conj", "resolve_neg", "real", "positive", "atleast_1d", "atleast_2d", "atleast_3d", "sum_to_size",
})  # fmt: skip


def returned(node: fx.Node) -> fx.Node:
    """The node whose tensor the user's code holds: the operand, if the operation returned that one itself."""
    while (operand := _operand(node)) is not None and _form(node) == _form(operand):
        node = operand
    return node


def _operand(node: fx.Node) -> fx.Node | None:
    """The operand that an operation returns if it has the wanted form."""
    if node.target is operator.getitem:
        made: Any = node.args[0]
        return made.args[0][node.args[1]] if operation(made) == "broadcast_tensors" else None
    if operation(node) not in _RETURNING:
        return None
    return None if named_arguments(node).get("copy") else node.all_input_nodes[0]


def _form(node: Any) -> tuple[Any, ...]:
    x: Tensor = node.meta["val"]
    return x.dtype, x.device, x.shape, x.stride()
