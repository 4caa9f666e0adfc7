"""Calls of `torch.utils.checkpoint`, and hooks that pack the tensors which backward reads.

The passes decide about recomputation, so that the trace of a call is the trace of its function. If the function's
second run in eager mode changes buffers, the trace repeats these changes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from partc.errors import PartcError
from partc.frontend.gradients.own_functions import refused
from partc.frontend.repeats.module_rows import WholeTrace
from partc.frontend.state.generator_states import come_back, keep, returning
from partc.installed import line_of, user_frame
from partc.torch_private import CHECKPOINT, BatchNorm, InstanceNorm, checkpoint, tree_flatten

_SIGNATURE = inspect.signature(getattr(checkpoint, CHECKPOINT))


class Checkpoints:
    """The checkpoints of a trace of modules, by path. Each call is reported to `say`.

    If the trace is not `whole`, a call whose effects are not known raises WholeTrace.
    """

    def __init__(self, modules: Mapping[str, nn.Module], say: Callable[[str], None], *, whole: bool) -> None:
        self._modules = modules
        self._say = say
        self._whole = whole
        self._running: list[Callable[[], Any]] = []  # the functions that are running

    def reentrant(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The result of a function in a reentrant call. As in eager mode, it has no gradient if no argument requires
        one.
        """
        self._report(sys._getframe(1))
        if any(isinstance(x, Tensor) and x.requires_grad for x in args):
            with self._repeating_changes(lambda: function(*args), always=True):
                return function(*args)
        if not self._whole:  # arguments that modules left out of the trace return may have a gradient
            raise WholeTrace
        with torch.no_grad():
            return function(*args)

    def around_call(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """A generator around a call that is not reentrant. The call runs without hooks on the tensors that backward
        reads.

        Torch's hooks switch gradients off as they pack a tensor. Inside another checkpoint, the trace would not record
        that they are on again.
        """
        self._report(sys._getframe(1))
        given = _SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        function, contexts, own, named = (given.arguments[name] for name in ("fn", "context_fn", "args", "kwargs"))
        trains = torch.is_grad_enabled() and _trains(function, (*own, *named.values()))
        again = self._repeating_changes(lambda: function(*own, **named), always=False) if trains else nullcontext()
        forward, _ = contexts()
        with again, forward:
            yield

    def check_packing(self, hooks: saved_tensors_hooks) -> None:
        """Report hooks that only move saved tensors. Raises PartcError P0216 for a model's own hooks."""
        if isinstance(hooks, save_on_cpu):
            self._report(sys._getframe(1), "torch.autograd.graph.save_on_cpu")
        elif getattr(hooks.pack_hook, "__globals__", {}).get("__name__", "").split(".")[0] != "torch":
            raise refused(
                "forward packs the tensors that backward reads (saved_tensors_hooks)",
                help="leave these hooks out: --recompute decides what backward reads and what it computes again",
            )

    def _report(self, frame: FrameType | None, name: str = "torch.utils.checkpoint") -> None:
        frame = user_frame(frame)
        place = "" if frame is None else f" at {line_of(frame)}"
        self._say(f"{name}{place} saves no memory by itself: --recompute decides what is computed again.")

    @contextmanager
    def _repeating_changes(self, again: Callable[[], Any], *, always: bool) -> Iterator[None]:
        """A context that calls a function `again`, with the same random numbers, if buffers of modules change inside.

        Only these changes remain of the second call. Backward computes a function again `always`, or as far as it reads
        saved tensors, which batch norms are sure to have. Raises WholeTrace if buffers change and the trace is not
        whole, PartcError P0225 for buffers that backward may not change again.
        """
        start, before, nested = keep(-1), _versions(self._modules), bool(self._running)
        self._running.append(again)
        try:
            yield
        finally:
            self._running.pop()
        after = _versions(self._modules)
        if after == before:
            return
        if not self._whole:
            raise WholeTrace
        with returning():
            come_back(start)
            with torch.no_grad():
                again()
        for (path, name), version in _versions(self._modules).items():
            known = always or (not nested and isinstance(self._modules[path], BatchNorm | InstanceNorm))
            if version != after.get((path, name)) and not known:  # caches, which are filled once, do not change again
                buffer = f"{path}.{name}".lstrip(".")
                raise PartcError(
                    "P0225",
                    f"forward changes {buffer} within torch.utils.checkpoint, and backward may change it once more",
                    help="change it outside, or leave the checkpoint out: --recompute decides what is computed again",
                )


def _trains(function: Any, args: Sequence[Any]) -> bool:
    """Whether the result of a checkpointed function requires a gradient; True if that is not known."""
    owner = getattr(function, "__self__", function)
    if not isinstance(owner, nn.Module) or any(x.requires_grad for x in owner.parameters()):
        return True
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_flatten(args)[0])


def _versions(modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], tuple[int, int]]:
    """The identity and version of each buffer, by the path of its module and its name."""
    named = ((path, *item) for path, module in modules.items() for item in module._buffers.items())
    return {(path, name): (id(x), x._version) for path, name, x in named if x is not None}
