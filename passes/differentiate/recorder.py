"""Record the operations that run on tensors without memory, with the names of values, as an fx graph.

torch's own tracers do this for all of Python; a region's operations are known, and need no proxies of tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from partc.torch_private import OpOverload, TorchDispatchMode

_MARK, _MARK_GRAD = torch.ops.partc.mark.default, torch.ops.partc.mark_grad.default
_DEVICE = torch.ops.prim.device.default
# Autograd's zeros without memory, as for piecewise constant operations, are recorded as ordinary zeros.
_ZEROS_WITHOUT_MEMORY, _ZEROS = torch.ops.aten._efficientzerotensor.default, torch.ops.aten.zeros.default


class Recorder(TorchDispatchMode):
    """Records the operations that run in its context, on `given` tensors and on results of recorded operations."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.changes_operands = False  # whether an operation works in place, as a few of autograd's do
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # keeps tensors alive, so that no two have the same id
        self._named: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        for index, tensor in enumerate(given):
            self._record_result(self.graph.placeholder(f"given_{index}"), tensor)

    def named(self, x: Tensor, name: str) -> Tensor:
        """The tensor, dense, as a value with this name; its gradient gets a name too."""
        if not x.is_contiguous():
            x = x.contiguous()
        elif id(x) in self._named:  # a value and its alias have gradients of their own
            x = torch.ops.aten.alias.default(x)
        self._named.add(id(x))
        self._mark(_MARK, x, name)
        if x.requires_grad:
            self._hooks.append(x.register_hook(lambda gradient: self._gradient(gradient, name)))
        return x

    def close(self) -> None:
        """Release the tensors, which are in reference cycles that Python's collector cannot see."""
        for hook in self._hooks:
            hook.remove()

    def _gradient(self, x: Tensor | None, name: str) -> Tensor | None:
        if x is None:  # no gradient, such as that of an unread result of a scan
            return None
        x = x.contiguous()
        self._mark(_MARK_GRAD, x, name)
        return x

    def _mark(self, target: OpOverload, x: Tensor, name: str) -> None:
        self._record_result(self.graph.call_function(target, (self._nodes[id(x)], name)), x)

    def _record_result(self, node: fx.Node, result: Tensor) -> None:
        node.meta["val"] = result
        self._nodes[id(result)] = node
        self._alive.append(result)

    def returns(self, results: Iterable[Tensor | None]) -> fx.Graph:
        """The graph that returns these tensors."""
        self.graph.output([None if x is None else self._nodes[id(x)] for x in results])
        self.graph.eliminate_dead_code()
        return self.graph

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # three of four calls are this query, which would pass through all of torch's dispatcher
            return torch.device("cpu")
        func = _ZEROS if func is _ZEROS_WITHOUT_MEMORY else func
        given = dict(kwargs or {})
        if func.namespace == "aten":
            with self:
                parts = func.decompose(*args, **given)
            if parts is not NotImplemented:
                return parts
        found = func(*args, **given)
        if isinstance(found, Tensor) or (isinstance(found, list | tuple) and any(isinstance(x, Tensor) for x in found)):
            self.changes_operands |= func._schema.is_mutable
            operands = tuple(map(self._operand, args))
            node = self.graph.call_function(func, operands, {key: self._operand(x) for key, x in given.items()})
            if isinstance(found, Tensor):
                self._record_result(node, found)
                return found
            node.meta["val"] = found
            for index, x in enumerate(found):
                if isinstance(x, Tensor):
                    self._record_result(self.graph.call_function(operator.getitem, (node, index)), x)
        return found

    def _operand(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._nodes[id(x)]
        return [self._operand(each) for each in x] if isinstance(x, list | tuple) else x
