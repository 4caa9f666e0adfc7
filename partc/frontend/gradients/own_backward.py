"""Gradients that a model defines itself: `torch.autograd.Function`s, and hooks on gradients of tensors.

    y = Double.apply(x)               # backward returns grad * 2
  ->
    y_value = …                       # forward's operations
    grad    = incoming_gradient(y_value)
    twice   = mul(grad, 2)            # backward's operations
    y       = own_gradient((y_value,), (x,), (twice,))

Both functions run once while the model is traced. The operations of backward are part of the graph, so that rules cut
them like all others. `partc.passes.differentiate` later moves them behind the gradient that they read.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from partc.errors import PartcError, Source
from partc.frontend.gradients.inner_gradients import inner_gradient
from partc.frontend.repeats.module_rows import WholeTrace
from partc.frontend.state.generator_states import come_back, keep, returning
from partc.installed import is_machinery, line_of, user_frame
from partc.ir import operators  # noqa: F401 (defines the operators)
from partc.replaced import replaced
from partc.runtime.torch_private import tree_map_only
from partc.torch_private import (
    CHECKPOINT,
    FULL_HOOKS,
    GLOBAL_HOOKS,
    GRADIENT_HOOKS,
    TENSOR_HOOKS,
    AppliedFunction,
    BatchNorm,
    CheckpointFunction,
    InstanceNorm,
    checkpoint,
    inside_functorch,
    tree_flatten,
)

_OWN = "forward computes gradients itself"
Hook = Callable[[Tensor], Tensor | None]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]  # of forward and recomputation


def own_hooks(modules: Mapping[str, nn.Module]) -> Mapping[str, tuple[Hook, ...]]:
    """The hooks on gradients of weights. Raises PartcError P0216 for hooks that wait for an accumulated gradient."""
    hooks, later = TENSOR_HOOKS
    found: dict[int, tuple[str, tuple[Hook, ...]]] = {}
    weights = ((path, *item) for path, module in modules.items() for item in module._parameters.items())
    for path, name, weight in weights:
        if getattr(weight, later, None):
            hook = next(iter(getattr(weight, later).values()))
            raise _refused(f"{path}.{name} has a hook that waits for its accumulated gradient".lstrip("."), hook)
        if held := getattr(weight, hooks, None):
            found.setdefault(id(weight), (f"{path}.{name}".lstrip("."), tuple(held.values())))
    return dict(found.values())


class _NodeWithoutHooks:
    """Stands for a node of the autograd graph, on which a trace would lose hooks."""

    __class__ = property(lambda stand_in: type(stand_in._node))

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise _refused("forward puts a hook on a node of the autograd graph")
        return getattr(self._node, name)


class _GradientOfResult:
    """Stands for the gradient of a module's result, which hooks on the gradients of its operands cannot read in a
    trace.
    """

    def _read(self, *_: Any) -> Any:
        raise _refused("a hook on a module's backward pass reads the gradient of its result")

    __getitem__ = __iter__ = __len__ = _read


@contextmanager
def module_hooks(modules: Mapping[str, nn.Module], parts: int = 1) -> Iterator[None]:
    """A context in which hooks on modules' backward passes are traced as hooks on their operands and results."""
    before, after = GRADIENT_HOOKS[1], GRADIENT_HOOKS[0]
    if hook := next((hook for kind in GLOBAL_HOOKS for hook in getattr(torch.nn.modules.module, kind).values()), None):
        raise _refused("a hook is on the backward pass of all modules", hook)
    stores: list[tuple[nn.Module, dict[str, Any]]] = []
    handles: list[RemovableHandle] = []
    try:
        for name, module in modules.items():
            held = {kind: store for kind in GRADIENT_HOOKS if (store := getattr(module, kind, None))}
            if not held:
                continue
            if after in held and not getattr(module, FULL_HOOKS):
                raise _refused(f"{name or type(module).__name__} has a hook of register_backward_hook")
            stores.append((module, held))
            for kind in held:
                setattr(module, kind, OrderedDict())
            for hook in held.get(after, {}).values():
                changed = lambda grads, hook=hook, module=module: hook(module, grads, _GradientOfResult())  # noqa: E731
                handles.append(module.register_forward_pre_hook(_gradient_hook(changed, hook, parts, results=False)))
            for hook in held.get(before, {}).values():
                changed = lambda grads, hook=hook, module=module: hook(module, grads)  # noqa: E731
                handles.append(module.register_forward_hook(_gradient_hook(changed, hook, parts, results=True)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, held in stores:
            for kind, hooks in held.items():
                setattr(module, kind, hooks)


def _gradient_hook(changed: Callable[..., Any], hook: Any, parts: int, *, results: bool) -> Callable[..., Any]:
    """A forward hook that applies a backward hook to the gradients of a module's operands, or of its results."""

    class Hooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> tuple[Any, ...]:
            return tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in tensors)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            found = changed(grads)
            if found is None:
                raise _refused("a hook reads a gradient without changing it", hook)
            return found if isinstance(found, tuple) else (found,)

    def run(module: nn.Module, args: tuple[Any, ...], *made: Any) -> Any:
        given = made[0] if results else args
        if not isinstance(given, Tensor | tuple):
            raise _refused("a hook is on the backward pass of a module that returns neither a tensor nor a tuple")
        listed = given if isinstance(given, tuple) else (given,)
        if not torch.is_grad_enabled():
            return None
        if not any(isinstance(x, Tensor) and x.requires_grad for x in listed):
            if not results and changed(tuple(None for _ in listed)) is None:
                raise _refused("a hook reads a gradient without changing it", hook)
            return None
        found = _followed(Hooked, listed, {}, [], parts)
        return found if isinstance(given, tuple) else found[0]

    return run


class _Context:
    """The `ctx` of a traced function, with which forward passes values to backward."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Any, ...] = ()
        self.without_gradient: tuple[Tensor, ...] = ()
        self.materialize_grads = True

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        """The saved tensors by their old name."""
        return self.saved_tensors

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.without_gradient = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise _refused("an autograd.Function changes its operands in place")

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


@contextmanager
def following_own_backward(
    modules: Mapping[str, nn.Module], say: Callable[[str], None], parts: int = 1, *, whole: bool = True
) -> Iterator[None]:
    """A context in which autograd functions and hooks are traced; what cannot be traced raises PartcError P0216.

    Calls of `torch.autograd.grad` are recorded; unless the trace is `whole`, they raise WholeTrace.

    The loss of the traced batch is divided by `parts`, and so are gradients that functions add themselves. Calls of
    `torch.utils.checkpoint` are reported to `say`. As in eager mode, reentrant calls return no gradient if no argument
    requires one, and batch norms within calls update their statistics once more, as backward computes them again.
    """
    apply, grad = vars(torch.autograd.Function)["apply"], torch.autograd.grad
    inside: list[_Pairs] = []  # the gradients of weights that each running backward accumulates
    running: list[Callable[[], Any]] = []  # the checkpointed functions that are running

    def own_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            report(sys._getframe(1))
            if any(isinstance(x, Tensor) and x.requires_grad for x in args[2:]):
                with _repeating_changes(lambda: args[0](*args[2:]), modules, running, whole=whole, always=True):
                    return args[0](*args[2:])
            if not whole:  # arguments that modules left out of the trace return may have a gradient
                raise WholeTrace
            with torch.no_grad():
                return args[0](*args[2:])
        if _is_machinery(cls):
            return apply.__func__(cls, *args, **kwargs)
        return _followed(cls, args, kwargs, inside, parts)

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """The function that `Function.apply` calls, also one that a model keeps, as in `double = Double.apply`."""
        if _is_machinery(cls):
            return super(AppliedFunction, cls).apply(*args, **kwargs)
        return own_apply(cls, *args, **kwargs)

    def hooked(x: Tensor, hook: Hook) -> RemovableHandle:
        return register_hook(x, hook, parts)

    def own_backward(
        tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
        grad_variables: Any = None, inputs: Any = None,
    ) -> None:  # fmt: skip
        if not inside:
            raise _refused(_OWN)
        leaves = [*_leaves(tensors)] if inputs is None else [inputs] if isinstance(inputs, Tensor) else [*inputs]
        found = inner(tensors, leaves, grad_tensors, create_graph=create_graph, allow_unused=True)
        for x, g in zip(leaves, found, strict=True):
            if g is not None and isinstance(x, nn.Parameter):
                inside[-1].append((x, g))
            elif g is not None:
                x.grad = g if x.grad is None else x.grad + g

    def own_grad(*args: Any, **kwargs: Any) -> Any:
        if inside_functorch():
            return grad(*args, **kwargs)
        return inner(*args, **kwargs)

    def report(frame: FrameType | None, name: str = "torch.utils.checkpoint") -> None:
        frame = user_frame(frame)
        place = "" if frame is None else f" at {line_of(frame)}"
        say(f"{name}{place} saves no memory by itself: --recompute decides what is computed again.")

    def own_checkpoint(*args: Any, **kwargs: Any) -> Iterator[None]:
        report(sys._getframe(1))
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        function, _, contexts, *_ = given.args
        named = given.arguments["kwargs"]
        again = lambda: function(*given.arguments["args"], **named)  # noqa: E731
        trains = torch.is_grad_enabled() and _trains(function, (*given.arguments["args"], *named.values()))
        with _repeating_changes(again, modules, running, whole=whole, always=False) if trains else nullcontext():
            yield from _unpacked(contexts)

    def own_packing(hooks: saved_tensors_hooks) -> None:
        if isinstance(hooks, save_on_cpu):
            report(sys._getframe(1), "torch.autograd.graph.save_on_cpu")
        elif getattr(hooks.pack_hook, "__globals__", {}).get("__name__", "").split(".")[0] != "torch":
            raise _refused(
                "forward packs the tensors that backward reads (saved_tensors_hooks)",
                help="leave these hooks out: --recompute decides what backward reads and what it computes again",
            )
        enter(hooks)

    def node(x: Tensor) -> Any:
        found = nodes.__get__(x)
        outside = found is None or is_machinery(sys._getframe(1).f_code.co_filename)
        return found if outside else _NodeWithoutHooks(found)

    nodes: Any = Tensor.grad_fn
    enter = saved_tensors_hooks.__enter__
    signature = inspect.signature(getattr(checkpoint, CHECKPOINT))
    inner = inner_gradient(grad, whole)
    with (
        replaced(torch.autograd, grad=own_grad, backward=own_backward),
        replaced(torch.autograd.Function, apply=classmethod(own_apply)),
        replaced(AppliedFunction, apply=classmethod(applied)),
        replaced(Tensor, grad_fn=property(node), register_hook=hooked),
        replaced(saved_tensors_hooks, __enter__=own_packing),
        replaced(checkpoint, **{CHECKPOINT: own_checkpoint}),
    ):
        yield


def _is_machinery(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("torch", "partc")


def _trains(function: Any, args: Sequence[Any]) -> bool:
    """Whether the result of a checkpointed function requires a gradient; True if that is not known."""
    owner = getattr(function, "__self__", function)
    if not isinstance(owner, nn.Module) or any(x.requires_grad for x in owner.parameters()):
        return True
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_flatten(args)[0])


@contextmanager
def _repeating_changes(
    again: Callable[[], Any],
    modules: Mapping[str, nn.Module],
    running: list[Callable[[], Any]],
    *,
    whole: bool,
    always: bool,
) -> Iterator[None]:
    """A context that calls a function `again`, with the same random numbers, if buffers of modules change inside.

    Only these changes remain of the second call. Backward computes a function again `always`, or as far as it reads
    saved tensors, which batch norms are sure to have. `running` has the functions whose contexts surround this one.
    Raises WholeTrace if buffers change and the trace is not `whole`, PartcError P0225 for buffers that backward may not
    change again.
    """
    start, before, nested = keep(-1), _versions(modules), bool(running)
    running.append(again)
    try:
        yield
    finally:
        running.pop()
    after = _versions(modules)
    if after == before:
        return
    if not whole:
        raise WholeTrace
    with returning():
        come_back(start)
        with torch.no_grad():
            again()
    for (path, name), version in _versions(modules).items():
        known = always or (not nested and isinstance(modules[path], BatchNorm | InstanceNorm))
        if version != after.get((path, name)) and not known:  # caches, which are filled once, do not change again
            buffer = f"{path}.{name}".lstrip(".")
            raise PartcError(
                "P0225",
                f"forward changes {buffer} within torch.utils.checkpoint, and backward may change it once more",
                help="change it outside, or leave the checkpoint out: --recompute decides what is computed again",
            )


def _versions(modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], tuple[int, int]]:
    """The identity and version of each buffer, by the path of its module and its name."""
    named = ((path, *item) for path, module in modules.items() for item in module._buffers.items())
    return {(path, name): (id(x), x._version) for path, name, x in named if x is not None}


def _unpacked(contexts: Contexts) -> Iterator[None]:
    """Runs a checkpointed function, between the yield and the end, without hooks on the tensors that backward reads.

    Torch's hooks switch gradients off as they pack a tensor. Inside another checkpoint, the trace would not record that
    they are on again.
    """
    forward, _ = contexts()
    with forward:
        yield


def register_hook(x: Tensor, hook: Hook, parts: int = 1) -> RemovableHandle:
    """Trace a hook on a tensor's gradient; later readers of the tensor read the result of `hook_gradient`."""
    if not x.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    value = x.detach()
    changed = hook(_incoming(value, parts))
    if changed is None:
        raise _refused("a hook reads a gradient without changing it", hook)
    torch.ops.partc.hook_gradient(value, x, fitted_gradient(changed, x, parts))
    return RemovableHandle(OrderedDict())


def _followed(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inside: list[_Pairs], parts: int) -> Any:
    """The results of an autograd function, with the gradients that its backward defines."""
    apart = cls.setup_context is not torch.autograd.Function.setup_context
    if apart:  # forward takes no context, but arguments by name
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args = bound.args
    needs = [isinstance(arg, Tensor) and arg.requires_grad and torch.is_grad_enabled() for arg in args]
    context = _Context(needs)
    given = tuple(
        arg.detach().requires_grad_(needed) if isinstance(arg, Tensor) else arg
        for arg, needed in zip(args, needs, strict=True)
    )
    with torch.no_grad():
        made = cls.forward(*given) if apart else cls.forward(context, *given)
    if apart:
        cls.setup_context(context, given, made)
    weights = {id(x): arg for x, arg in zip(given, args, strict=True) if isinstance(arg, nn.Parameter)}
    held = tree_map_only(Tensor, lambda x: weights.get(id(x), x), vars(context))
    vars(context).update(held)  # backward may differentiate with respect to weights
    results = list(made) if isinstance(made, tuple) else [made]
    flat = {id(x) for x in context.without_gradient}
    carrying = [
        place
        for place, x in enumerate(results)
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and id(x) not in flat
    ]
    results = [x.detach() if isinstance(x, Tensor) else x for x in results]
    if any(needs) and carrying:
        incoming = [torch.zeros_like(x) if isinstance(x, Tensor) else None for x in results]
        for place in carrying:
            incoming[place] = _incoming(results[place], parts)
        for places, found, leaves in _backward(cls, context, incoming, carrying, inside):
            returned = zip(args, found, needs, strict=False)
            pairs = [(arg, g) for arg, g, needed in returned if needed and g is not None]
            pairs = [(arg, fitted_gradient(g, arg, parts)) for arg, g in (*pairs, *leaves)]
            if pairs:
                operands, gradients = map(list, zip(*pairs, strict=True))
                values = [results[place] for place in places]
                owned = torch.ops.partc.own_gradient(values, operands, gradients)
                for place, x in zip(places, owned, strict=True):
                    results[place] = x
    return tuple(results) if isinstance(made, tuple) else results[0]


_Returned = tuple[Tensor | None, ...]
_Pairs = list[tuple[Tensor, Tensor]]


def _backward(
    cls: Any, context: _Context, incoming: Sequence[Tensor | None], carrying: list[int], inside: list[_Pairs]
) -> list[tuple[list[int], _Returned, _Pairs]]:
    """Groups of results, each with the operands' gradients that backward returns for it, and the weights' gradients
    that it accumulates by `torch.autograd.backward`.

    Without materialized gradients, the gradient of a result that the loss does not read is None. A trace only knows at
    its end which results are read. So backward runs once for each result, with None for the others, and the gradients
    are summed. If it fails on None, it runs once with all gradients.
    """

    def run(given: Sequence[Tensor | None], places: list[int]) -> tuple[list[int], _Returned, _Pairs]:
        inside.append([])
        try:
            # Backward runs behind all of forward's draws, and only repeats earlier ones. It records no gradient.
            with returning(), torch.no_grad():
                backward = cls.backward if cls.backward is not torch.autograd.Function.backward else cls.vjp
                found = backward(context, *given)
        finally:
            weights = inside.pop()
        return places, found if isinstance(found, tuple) else (found,), weights

    if len(carrying) > 1 and not context.materialize_grads:
        with suppress(TypeError, AttributeError):
            return [run([x if i == place else None for i, x in enumerate(incoming)], [place]) for place in carrying]
    return [run(incoming, carrying)]


def _leaves(results: Any) -> Iterator[Tensor]:
    """The leaves of the autograd graph behind one or more tensors."""
    waiting: list[Any] = [x.grad_fn for x in ([results] if isinstance(results, Tensor) else results)]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            waiting += [below for below, _ in node.next_functions]


def _incoming(x: Tensor, parts: int) -> Tensor:
    """The incoming gradient of x for the undivided loss of the traced batch."""
    incoming: Tensor = torch.ops.partc.incoming_gradient(x)
    return incoming if parts == 1 else incoming * parts


def fitted_gradient(gradient: Tensor, x: Tensor, parts: int) -> Tensor:
    """A gradient in the tensor's shape and dtype, as autograd requires, divided by `parts` like the loss."""
    gradient = gradient if parts == 1 else gradient / parts
    if gradient.shape != x.shape:
        gradient = gradient.sum_to_size(x.shape)
    return gradient.to(x.dtype).detach()


def _refused(what: str, hook: Any = None, help: str = "use operations that torch differentiates") -> PartcError:
    code = getattr(hook, "__code__", None)
    return PartcError(
        "P0216",
        f"{what}, which partc cannot follow",
        help=help,
        source=None if code is None else Source(file=code.co_filename, line=code.co_firstlineno),
    )
