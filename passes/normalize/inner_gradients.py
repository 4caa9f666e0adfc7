"""Expand `inner_gradient`: gradients that a forward pass computes.

    e = mul(x, tanh)                             e      = mul(x, tanh)
    s = sum(e)                                   s      = sum(e)
    g = inner_gradient((s,), (x,), (ones,))  ->  d_e    = expand(ones, (8,))
                                                 d_x    = mul(d_e, tanh)
                                                 d_tanh = mul(d_e, x)
                                                 …
                                                 g      = add(d_x, d_x_2)

The operations between inputs and outputs are walked backwards. Torch's autograd, run on tensors without memory, yields
the gradient of each as operations. All of these are differentiable: `differentiate` later derives their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from partc.errors import PartcError
from partc.ir import operators
from partc.ir.fx_calls import operation
from partc.ir.naming import unique
from partc.ir.program import HOOK_PARTS, Arg, DTypeArg, Graph, Op, Ref, TensorType, Value
from partc.passes.normalize.inplace import without_mutation
from partc.rules.derivatives import differentiable_derivatives
from partc.torch_private import FakeTensorMode

NAME = "inner_gradient"
_STOPS = frozenset({"detach", "detach_", "incoming_gradient"})
_SAME = frozenset({"detach", "alias", "lift_fresh_copy"})  # the result equals the operand
_NOT_KEPT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
_DROPOUTS = frozenset({"dropout", "feature_dropout"})


def with_inner_gradients(graph: Graph, params: Mapping[str, TensorType]) -> Graph:
    """The graph without `inner_gradient`. Raises PartcError P0216 where torch has no gradient."""
    if not any(op.name == NAME for op in graph.ops):
        return graph
    types = {**params, **graph.types()}
    writer = _Expansion(types=types, taken={*types}, ops=[])
    for op in graph.ops:
        if op.name == NAME:
            writer.expand(op)
        else:
            writer.ops.append(op)
    return replace(graph, ops=tuple(writer.ops))


@dataclass(slots=True)
class _Expansion:
    """Writes the operations of a graph, with gradients expanded."""

    types: MutableMapping[str, TensorType]
    taken: set[str]
    ops: list[Op]

    def expand(self, call: Op) -> None:
        outputs, inputs, seeds = (tuple(_names(arg)) for arg in call.args)
        live = self._live(inputs)
        self._multiply_dropouts(live)
        found: dict[str, str] = {}
        for name, seed in zip(outputs, seeds, strict=True):
            self._join(found, name, seed, call)
        ends: dict[str, str] = {}
        for op in reversed(tuple(self.ops)):
            grads = [found.pop(value.name, None) for value in op.results]
            made = {value.name: grad for value, grad in zip(op.results, grads, strict=True) if grad is not None}
            wanted = [name for name in dict.fromkeys(_followed(op)) if name in live]
            own = op.name == "own_gradient" and (wanted or _is_hook(op))
            passed = {name: self._hooked(op, grad) for name, grad in made.items()} if own else made
            # Torch captures an input's gradient before its hook only where the gradient goes on to another input.
            ends.update((name, grad) for name, grad in (made if wanted else passed).items() if name in inputs)
            if not made or not wanted:
                continue
            following = zip(wanted, passed.values(), strict=True) if own else self._backward(op, made, wanted, call)
            for name, grad in following:
                self._join(found, name, grad, call)
        ends.update((name, grad) for name, grad in found.items() if name in inputs)
        for value, name in zip(call.results, inputs, strict=True):
            source = Ref(ends[name]) if name in ends else None
            if source is None:
                args: tuple[Arg, ...] = (Ref(name), 0.0)
                self.ops.append(Op(name="mul", args=args, results=(value,), source=call.source))
            else:
                self.ops.append(Op(name="alias", args=(source,), results=(value,), source=call.source))

    def _live(self, inputs: Sequence[str]) -> set[str]:
        """The values through which a gradient reaches the inputs."""
        live = {*inputs}
        for op in self.ops:
            if op.name not in _STOPS and not live.isdisjoint(_followed(op)):
                live.update(value.name for value in op.results if value.type.differentiable)
        return live

    def _multiply_dropouts(self, live: set[str]) -> None:
        """Write dropouts as products with a mask, which their gradients read as well."""
        ops: list[Op] = []
        for op in self.ops:
            if op.name not in _DROPOUTS or op.result.name not in live or not (op.args[1] and op.args[2]):
                ops.append(op)
                continue
            type = op.result.type
            ones, mask = (self._value(f"{op.result.name}_{word}", type) for word in ("ones", "mask"))
            full = (type.shape, 1.0)
            dtype = ("dtype", DTypeArg(type.dtype))
            ops.append(Op(name="full", args=full, attrs=(dtype,), results=(ones,), source=op.source))
            ops.append(replace(op, args=(Ref(ones.name), *op.args[1:]), results=(mask,)))
            ops.append(replace(op, name="mul", args=(op.args[0], Ref(mask.name)), attrs=()))
        self.ops = ops

    def _value(self, stem: str, type: TensorType) -> Value:
        value = Value(name=unique(stem, self.taken), type=type)
        self.types[value.name] = type
        return value

    def _join(self, found: dict[str, str], name: str, grad: str, call: Op) -> None:
        """Add a gradient of a value to its earlier ones."""
        if name in found:
            total = self._value(f"d_{name}", self.types[name])
            args = (Ref(found[name]), Ref(grad))
            self.ops.append(Op(name="add", args=args, results=(total,), source=call.source))
            grad = total.name
        found[name] = grad

    def _hooked(self, hook: Op, grad: str) -> str:
        """Write a hook's operations once more, for an inner gradient in place of the loss's.

        The traced operations undo the division of the loss by `parts`; an inner gradient is not divided.
        """
        (result,), _, (changed,) = map(_names, hook.args)
        parts = dict(hook.attrs).get(HOOK_PARTS, 1)
        same: dict[str, str] = {}
        for op in tuple(self.ops):
            if op.name == "incoming_gradient" and [*op.refs()] == [result]:
                same[op.result.name] = self._scaled("div", grad, parts, hook)
            elif changed in (x.name for x in op.results) and op.name == "detach":  # inner gradients are differentiable
                same[changed] = same.get(next(op.refs()), next(op.refs()))
            elif not same.keys().isdisjoint(op.refs()) and op is not hook:
                same.update((x.name, self._value(f"d_{x.name}", x.type).name) for x in op.results)
                self.ops.append(op.renamed(same))
        return self._scaled("mul", same.get(changed, changed), parts, hook)

    def _scaled(self, how: str, name: str, parts: Arg, hook: Op) -> str:
        if parts == 1:
            return name
        made = self._value(f"d_{name}", self.types[name])
        self.ops.append(Op(name=how, args=(Ref(name), parts), results=(made,), source=hook.source))
        return made.name

    def _backward(self, op: Op, made: Mapping[str, str], wanted: Sequence[str], call: Op) -> list[tuple[str, str]]:
        """Write the gradients of an operation's operands, from those of its results."""
        operands = tuple(dict.fromkeys(op.refs()))
        try:
            graph, present = _derivative(
                op,
                tuple((name, self.types[name]) for name in operands),
                tuple(wanted),
                tuple(value.name in made for value in op.results),
            )
        except (RuntimeError, NotImplementedError) as error:
            raise PartcError(
                "P0216",
                f"torch.autograd.grad goes through {op.name}, whose gradient partc cannot trace",
                help="compute it from operations that torch differentiates twice",
                source=op.source,
            ) from error
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        given = (*(made[value.name] for value in op.results if value.name in made), *operands)
        names = dict(zip(places, given, strict=True))
        ends = graph.graph.output_node().args[0]
        targets = {node: f"d_{name}" for node, name in zip(ends, present, strict=True)}  # type: ignore[arg-type]
        written: list[Op] = []
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                names[node] = self._constant(getattr(graph, str(node.target)), call)
            elif node.op == "call_function" and node.target is not getitem and "val" in node.meta:  # no check of values
                written += self._converted(node, names, targets, call)
        made_grads = self._shared(written, tuple(names[node] for node in ends))  # type: ignore[union-attr]
        return [*zip(present, made_grads, strict=True)]

    def _shared(self, derivative: Sequence[Op], outputs: tuple[str, ...]) -> tuple[str, ...]:
        """Write the operations of a derivative that the graph does not have yet; returns the names of its outputs.

        Torch's derivatives change some of their values in place. Before values are shared, these changes become new
        values: others may read the unchanged ones. Of a value with a hook, derivatives read the hooked one.
        """
        own = {value.name for op in derivative for value in op.results}
        read = dict.fromkeys(name for op in derivative for name in op.refs() if name not in own)
        inputs = tuple(Value(name=name, type=self.types[name]) for name in read)
        pure, _ = without_mutation(Graph(inputs=inputs, ops=tuple(derivative), outputs=outputs), {}, ())
        known = {(op.name, op.args, op.attrs): op.results for op in self.ops if op.results}
        hooked = {next(_followed(op)): op.result.name for op in self.ops if _is_hook(op)}
        same: dict[str, str] = {}
        for op in pure.ops:
            same.update((x.name, self._value(x.name, x.type).name) for x in op.results if x.name not in own)
            op = op.renamed(same)
            twin = known.get((op.name, op.args, op.attrs), ())
            if len(twin) == len(op.results):
                same.update(
                    (value.name, hooked.get(other.name, other.name))
                    for value, other in zip(op.results, twin, strict=True)
                )
            else:
                self.ops.append(op)
        return tuple(same.get(name, name) for name in pure.outputs)

    def _constant(self, x: Tensor, call: Op) -> str:
        type = TensorType.replicated(operators.DTYPE_NAMES[x.dtype], tuple(x.shape))
        value = self._value("d_constant", type)
        args = (tuple(x.flatten().tolist()), type.shape)
        attrs = (("dtype", DTypeArg(type.dtype)),)
        self.ops.append(Op(name="constant", args=args, attrs=attrs, results=(value,), source=call.source))
        return value.name

    def _converted(
        self, node: fx.Node, names: dict[fx.Node, str], targets: Mapping[fx.Node, str], call: Op
    ) -> tuple[Op, ...]:
        """The operation of a node, if it computes anything; `names` gets the names of its results."""
        name, args = _spelled(node)
        if name in _SAME:
            names[node] = names[node.args[0]]  # type: ignore[index]
            return ()
        converted = tuple(_argument(arg, names) for arg in args)
        attrs = tuple((key, _argument(arg, names)) for key, arg in node.kwargs.items() if key not in _NOT_KEPT)
        found = node.meta["val"]
        made = found if isinstance(found, tuple | list) else (found,)
        results = tuple(self._value(targets.get(node, f"d_{node.name}"), _type(x)) for x in made)
        names[node] = results[0].name
        if found is made:
            names.update((user, results[user.args[1]].name) for user in node.users)  # type: ignore[index]
        return (Op(name=name, args=converted, attrs=attrs, results=results, source=call.source),)


def _is_hook(op: Op) -> bool:
    return op.name == "own_gradient" and HOOK_PARTS in dict(op.attrs)


def _followed(op: Op) -> Iterator[str]:
    """The operands whose gradients come from those of an operation's results."""
    return _names(op.args[1]) if op.name == "own_gradient" else op.refs()


def _names(arg: Arg) -> Iterator[str]:
    assert isinstance(arg, tuple)
    return (item.name for item in arg if isinstance(item, Ref))


def _type(x: Tensor) -> TensorType:
    return TensorType.replicated(operators.DTYPE_NAMES[x.dtype], tuple(x.shape))


def _spelled(node: fx.Node) -> tuple[str, tuple[Any, ...]]:
    """An operation's name in the IR, and its arguments: convolutions have names by their dimensions."""
    name, args = operation(node), node.args
    if name != "convolution":
        return name, args
    x, w, bias, stride, padding, dilation, transposed, more, groups = args
    dims = len(w.meta["val"].shape) - 2  # type: ignore[union-attr]
    if transposed:
        return f"conv_transpose{dims}d", (x, w, bias, stride, padding, more, groups, dilation)
    return f"conv{dims}d", (x, w, bias, stride, padding, dilation, groups)


def _argument(arg: Any, names: Mapping[fx.Node, str]) -> Arg:
    if isinstance(arg, fx.Node):
        return Ref(names[arg])
    if isinstance(arg, torch.dtype):
        return DTypeArg(operators.DTYPE_NAMES[arg])
    if isinstance(arg, list | tuple):
        return tuple(_argument(item, names) for item in arg)
    if isinstance(arg, torch.device | torch.layout | torch.memory_format):
        return None
    given: Arg = arg
    return given


@cache
def _derivative(
    op: Op, operands: tuple[tuple[str, TensorType], ...], wanted: tuple[str, ...], given: tuple[bool, ...]
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """The graph that maps gradients of results, and operands, to gradients of the `wanted` operands; and the names of
    those that have one.
    """
    present: list[str] = []

    def run(grads: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        values = {name: x.detach() for (name, _), x in zip(operands, tensors, strict=True)}
        with torch.enable_grad():
            for name in wanted:
                values[name].requires_grad_()
            made = _forward(op, values)
            results = [x for x, has in zip(made, given, strict=False) if has]
            pairs = [(x, grad) for x, grad in zip(results, grads, strict=True) if x.requires_grad]
            if not pairs:
                return []
            ends, arriving = zip(*pairs, strict=True)
            found = torch.autograd.grad(
                ends, [values[name] for name in wanted], arriving, allow_unused=True, create_graph=True
            )
        present[:] = [name for name, x in zip(wanted, found, strict=True) if x is not None]
        return [x for x in found if x is not None]

    with FakeTensorMode(allow_non_fake_inputs=True):
        empty = lambda type: torch.empty(type.shape, dtype=operators.DTYPES[type.dtype])  # noqa: E731
        tensors = [empty(type) for _, type in operands]
        grads = [empty(value.type) for value, has in zip(op.results, given, strict=True) if has]
        graph = make_fx(run, decomposition_table=differentiable_derivatives())(grads, tensors)
    graph.graph.eliminate_dead_code()
    return graph, tuple(present)


# -- decompositions -------------------------------------------------------------------------------


def _forward(op: Op, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
    args, attrs = operators.torch_arguments(op, values)
    # Takes precedence over partc's operator of that name.
    torchs = getattr(torch.ops.aten, op.name, None) or operators.resolve(op.name)
    made = _PARTS.get(op.name, torchs)(*args, **attrs)
    return made if isinstance(made, tuple | list) else (made,)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *_: bool,
) -> Tensor:  # fmt: skip
    dims = [*range(x.dim() - len(shape), x.dim())]
    centered = x - x.mean(dims, keepdim=True)
    made = centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    dims = [*range(x.dim() - len(shape), x.dim())]
    made = x * (x.square().mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return made if weight is None else made * weight


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: bool
) -> Tensor:
    made = _layer_norm(x.reshape(x.shape[0], groups, -1), [math.prod(x.shape[1:]) // groups], eps=eps).reshape(x.shape)
    shape = (-1, *(1 for _ in x.shape[2:]))
    made = made if weight is None else made * weight.reshape(shape)
    return made if bias is None else made + bias.reshape(shape)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if dropout_p:
        raise NotImplementedError
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        kept = attn_mask.dtype == torch.bool
        scores = torch.where(attn_mask, scores, -math.inf) if kept else scores + attn_mask
    return F.softmax(scores, -1) @ v


# Operations whose own gradients have no second derivative, or no rule.
_PARTS: Mapping[str, Callable[..., Any]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "scaled_dot_product_attention": _attention,
    "log_sigmoid": lambda x: -F.softplus(-x),
}
