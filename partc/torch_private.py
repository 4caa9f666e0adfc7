"""Every private torch name that the compiler uses, to be checked after an upgrade of torch."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy, deepcopy
from traceback import StackSummary
from types import CodeType, SimpleNamespace
from typing import Any

import torch
import torch.fx.proxy as proxies
import torch.utils.checkpoint as checkpoint
from torch._C import DisableTorchFunction as without_overriding
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._export import utils as export_utils
from torch._functorch import apis, eager_transforms
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_functorch
from torch._library import simple_registry
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction as AppliedFunction
from torch.export import _trace as export_traces
from torch.export import exported_program
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnValues
from torch.jit._fuser import optimized_execution
from torch.nn.attention import flex_attention
from torch.nn.modules.adaptive import _ASMoutput as AdaptiveLosses
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from partc.replaced import replaced

# Where modules and weights keep the hooks that see gradients.
GRADIENT_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = ("_global_backward_hooks", "_global_backward_pre_hooks")  # of all modules
FULL_HOOKS = "_is_full_backward_hook"  # whether a module's hooks see the gradients of all operands
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # of one optimizer
# The method of modules that runs hooks and forward; tracers wrap the call around it.
MODULE_CALL = "_call_impl"
# The function behind torch.utils.checkpoint with use_reentrant=False. From torch 2.15 on it is behind another one.
CHECKPOINT = "_checkpoint_without_reentrant_generator"
CHECKPOINT += "_impl" if hasattr(checkpoint, f"{CHECKPOINT}_impl") else ""
# What flex_attention reads in its module: the operation, the check of the device, options of its kernel, the context of
# the compiler, and whether it calls the operation without a compiler.
FLEX_ATTENTION = (
    "flex_attention_hop", "_validate_device", "_apply_kernel_options", "setup_compilation_env",
    "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
)  # fmt: skip
# The functions behind torch.vmap and torch.func's jvp, grad and vjp; jacfwd and jacrev call two of them.
TRANSFORMS = {
    "vmap": (apis, "vmap_impl"),
    "jvp": (eager_transforms, "_jvp_with_argnums"),
    "grad": (eager_transforms, "grad_and_value_impl"),
    "vjp": (eager_transforms, "_vjp_with_argnums"),
}

__all__ = [
    "CHECKPOINT",
    "FLEX_ATTENTION",
    "FULL_HOOKS",
    "GLOBAL_HOOKS",
    "GRADIENT_HOOKS",
    "MODULE_CALL",
    "STEP_HOOKS",
    "TENSOR_HOOKS",
    "TRANSFORMS",
    "AdaptiveLosses",
    "AppliedFunction",
    "BatchNorm",
    "CheckpointFunction",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnValues",
    "InstanceNorm",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TreeSpec",
    "active_modes",
    "aot_export_joint_simple",
    "attributes_kept_by",
    "backward_decompositions",
    "below_autograd",
    "checkpoint",
    "checks",
    "copied_modules",
    "disabled_autocasts_as",
    "fake_stored",
    "graphs_without_code",
    "inside_functorch",
    "kept_tensors_returned",
    "loss_decompositions",
    "norm_decompositions",
    "not_compiling",
    "optimized_execution",
    "outside_functorch",
    "overload_name",
    "python_decompositions",
    "recorded_stacks",
    "said_class",
    "say_class",
    "saying_classes",
    "storage_identity",
    "traced_tensor",
    "tracer",
    "track",
    "transform_traced",
    "tree_flatten",
    "tree_unflatten",
    "unchanged_scores",
    "with_node",
    "without_modes",
    "without_order",
    "without_overriding",
]


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """Torch's mode, which deep copies of its tensors share: a second one would free torch's weak references twice."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeTensorMode":
        return self


def unchanged_scores(score_mod: Callable[..., Any]) -> bool:
    """Whether flex_attention got no function of scores."""
    return score_mod is flex_attention._identity


def fake_stored(mode: FakeTensorMode, like: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A fake tensor on the CPU of the dtype and shape of `like`, a meta tensor; a parameter if `stored` is one.

    `nn.Parameter` would detach it first, at ten times the cost.
    """
    made: torch.Tensor = FakeTensor(mode, like, torch.device("cpu"))
    if isinstance(stored, torch.nn.Parameter):
        made.requires_grad_(stored.requires_grad)._is_param = True
    return made


def traced_tensor(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A fake tensor that the modes of a trace do not see being made."""
    unseen = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)
    with torch._C._DisableTorchDispatch(), torch._C._ExcludeDispatchKeyGuard(unseen):
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, like, device)


def tracer() -> Any:
    """The tracer that records operations; None outside of traces."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


def track(tracer: Any, x: torch.Tensor, node: torch.fx.Node) -> None:
    """Make a node the one that computes a tensor in a trace."""
    tracer.tensor_tracker[x] = proxy_tensor._ProxyTensor(torch.fx.Proxy(node, tracer), None)


def active_modes() -> tuple[Any, ...]:
    """The numbers of active modes of each kind, and the level of torch.func's transforms."""
    return (
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._ops._len_torch_dispatch_stack_pre_dispatch(),
        torch._C._functorch.maybe_current_level(),
    )


def with_node(kind: type[torch.autograd.Function], *given: Any) -> torch.Tensor:
    """The result of an autograd function, past replacements of `torch.autograd.Function.apply`."""
    made: torch.Tensor = super(torch.autograd.Function, kind).apply(*given)  # type: ignore[misc]
    return made


_SAID = "_said_class"  # the attribute of a fake tensor that stands for one of another class


def said_class(x: torch.Tensor) -> type:
    """The class of the tensor for which a fake tensor stands."""
    given: type | None = vars(x).get(_SAID)
    return given or (torch.nn.Parameter if isinstance(x, torch.nn.Parameter) else torch.Tensor)


def say_class(x: torch.Tensor, said: type) -> None:
    """Make a fake tensor stand for one of this class."""
    setattr(x, _SAID, said)


class _StandIn(FakeTensor):
    """A fake tensor that says it has the class of the tensor for which it stands, to the user's code that reads
    `x.__class__` or calls `isinstance`. Torch's own code learns of classes that were given to it.
    """

    _asked_by_user: Callable[[], bool]
    __class__ = property(lambda x: said_class(x) if _SAID in vars(x) or x._asked_by_user() else _StandIn)


_StandIn.__name__ = torch.Tensor.__name__  # which errors of Python show, and the user's code may compare
_set_class: Callable[[Any, type], None] = vars(object)["__class__"].__set__  # also past a property of that name


@contextmanager
def saying_classes(tensors: Iterable[torch.Tensor], asked_by_user: Callable[[], bool]) -> Iterator[None]:
    """A context in which these fake tensors, and those made in it, say to the user's code which classes they stand for.

    `asked_by_user` tells, as a class is read, whether the user's code reads it.
    """
    changed = [weakref.ref(x) for x in tensors]
    for x in changed:
        _set_class(x(), _StandIn)
    plain = FakeTensor.__new__

    def made(kind: type[FakeTensor], *given: Any, **named: Any) -> FakeTensor:
        x = plain(_StandIn if kind is FakeTensor else kind, *given, **named)
        changed.append(weakref.ref(x))
        return x

    _StandIn._asked_by_user = staticmethod(asked_by_user)
    types = (*proxy_tensor.HANDLED_TYPES, _StandIn)
    try:
        with replaced(FakeTensor, __new__=staticmethod(made)), replaced(proxy_tensor, HANDLED_TYPES=types):
            yield
    finally:
        for held in changed:
            if (still := held()) is not None:
                _set_class(still, FakeTensor)


def storage_identity(storage: torch.UntypedStorage) -> int:
    """A number that tells storages apart, also those without memory."""
    return int(storage._cdata)


@contextmanager
def transform_traced() -> Iterator[None]:
    """A context for the trace of a transform, without the modes of an outer trace, which would record its steps too.

    Tensors print as such there: torch formats operands where it looks for an overload, and their usual text reads
    forward derivatives, which fails an assertion of torch within a transform.
    """
    with (
        replaced(torch.Tensor, __repr__=lambda self, **_: "Tensor"),
        replaced(export_utils, _maybe_find_pre_dispatch_tf_mode_for_export=lambda: None),
        without_modes(),
    ):
        yield


def inside_functorch() -> bool:
    """Whether a transform of torch.func is running."""
    return torch._C._functorch.maybe_current_level() is not None


def overload_name(packet: OpOverloadPacket, args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """The overload that a call of the packet with these arguments reaches. Raises RuntimeError if there is none."""
    return torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **options)


@contextmanager
def python_decompositions() -> Iterator[None]:
    """Torch's decompositions in Python.

    None of them chooses oneDNN: its LSTM layer, for an input without a gradient, has no backward pass.
    """
    with torch.backends.mkldnn.flags(enabled=False), enable_python_dispatcher():
        yield


def backward_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Torch's own decompositions of derivatives into differentiable operations."""
    table = core_aten_decompositions()
    return {each: made for each, made in table.items() if isinstance(each, OpOverload) and "_backward" in str(each)}


def norm_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Torch's decompositions of norms, after which the statistics that they return are differentiable."""
    aten = torch.ops.aten
    norms = aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten._native_batch_norm_legit
    table = get_decompositions((*norms, aten._batch_norm_with_update, aten._fused_rms_norm))
    return {each: made for each, made in table.items() if isinstance(each, OpOverload)}


def loss_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Torch's decompositions of losses that return more than the loss."""
    aten = torch.ops.aten
    table = get_decompositions((aten.nll_loss_forward, aten.nll_loss2d_forward, aten.log_sigmoid_forward))
    return {each: made for each, made in table.items() if isinstance(each, OpOverload)}


@contextmanager
def checks(changed: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    """A context in which `changed` replaces the function behind torch._check and its variants: (error type, condition,
    message).
    """
    names = "_check_with", "_check_tensor_all_with"
    with replaced(torch, **{name: changed(getattr(torch, name)) for name in names}):
        yield


@contextmanager
def lists(listed: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """A context in which `listed(x)` replaces x.tolist() for tensors without memory, unless it returns None."""
    plain = FakeTensor.tolist

    def tolist(x: FakeTensor) -> Any:
        found = listed(x)
        return plain(x) if found is None else found

    with replaced(FakeTensor, tolist=tolist):
        yield


@contextmanager
def not_compiling() -> Iterator[set[CodeType]]:
    """A context in which torch.compiler.is_compiling() and is_exporting() return False. Its value is the code that has
    asked so far, except for two places in torch whose traces do not depend on the answer.
    """
    asked: set[CodeType] = set()
    # Both ask in every trace, whether a tensor outlives it and whether operations get a note.
    own = (FakeTensor.__init__.__code__, getattr(torch._dynamo.disable(lambda: None), "__code__", None))

    def no() -> bool:
        if (code := sys._getframe(1).f_code) not in own:
            asked.add(code)
        return False

    with replaced(torch.compiler, is_compiling=no, is_exporting=no):
        yield asked


@contextmanager
def without_order() -> Iterator[None]:
    """Trace the checks of linear algebra as operations without effects.

    Newer releases of torch keep the order of these checks by a token, which becomes an extra input and output of the
    graph.
    """
    holder = simple_registry.singleton.find("aten::_linalg_check_errors").effect
    before = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(before)


@contextmanager
def recorded_stacks(stack: Callable[[], StackSummary]) -> Iterator[None]:
    """A context in which tracers record `stack()` with each operation.

    By default they look up the lines of all frames, torch's included, and then leave out those outside of modules.
    """
    traceback = SimpleNamespace(extract=lambda: SimpleNamespace(summary=stack))
    unfiltered = replaced(proxies.TracerBase, _filter_traceback_frames=lambda tracer, frames: frames)
    with replaced(proxies, CapturedTraceback=traceback), unfiltered:
        yield


@contextmanager
def disabled_autocasts_as(mark: Callable[[bool], None]) -> Iterator[None]:
    """A context in which an autocast that is disabled only calls `mark`, with whether it begins. `torch.export` would
    record it as a call of a submodule, and forget which operations inside it ran under no_grad.
    """
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def begin(region: torch.autocast) -> Any:
        if region._enabled:
            return enter(region)
        mark(True)
        return region

    def end(region: torch.autocast, *error: Any) -> Any:
        if region._enabled:
            return leave(region, *error)
        mark(False)
        return None

    with replaced(torch.autocast, __enter__=begin, __exit__=end):
        yield


@contextmanager
def copied_modules() -> Iterator[None]:
    """A context in which a copy of a module that has several names in the model is a module without a name.

    An export shows such modules to forward as stand-ins, and searches for the name of each stand-in that is called.
    """
    with replaced(
        proxy_tensor._AttrProxy,
        __copy__=lambda module: copy(module.get_base()),
        __deepcopy__=lambda module, known: deepcopy(module.get_base(), known),
    ):
        yield


@contextmanager
def attributes_kept_by(kept: Callable[[torch.nn.Module], AbstractContextManager[None]]) -> Iterator[None]:
    """A context in which exports run the model's forward inside `kept(model)`, in place of torch's own context that
    restores attributes.
    """
    with replaced(export_traces, _detect_attribute_assignment=kept):
        yield


@contextmanager
def graphs_without_code() -> Iterator[None]:
    """A context in which graph modules generate and compile the code of their graphs when they are first called.

    An export changes its graph modules twenty times, and by default compiles them each time, but calls none.
    """
    compiled: Any = GraphModule.recompile

    def postponed(module: Any) -> None:
        def forward(module: Any, *args: Any, **named: Any) -> Any:
            compiled(module)
            return module.forward(*args, **named)

        type(module).forward = forward  # the class has this one instance
        if (tree := getattr(module.graph._codegen, "pytree_info", None)) is not None:
            module._in_spec, module._out_spec = tree.in_spec, tree.out_spec

    with replaced(GraphModule, recompile=postponed):
        yield


@contextmanager
def kept_tensors_returned() -> Iterator[None]:
    """A context in which operations of an exported graph may return tensors of an earlier trace, as `x.to(device)` does
    for a tensor that a cache has kept. These have the fake mode of that trace.
    """
    shape_env: Any = exported_program._get_shape_env

    def of_inputs(module: GraphModule) -> Any:
        inputs = (node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder")
        mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
        return shape_env(module) if mode is None else mode.shape_env

    with replaced(exported_program, _get_shape_env=of_inputs):
        yield
