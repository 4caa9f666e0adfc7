"""The optimizers by name: their classes, their options, and the states that they keep."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, optim

from ..errors import UsageError
from .balance import BALANCE, Balance
from .lion import Lion
from .rows import Adagrad, RowwiseAdagrad, SparseAdam

Value = bool | int | float | str | tuple[float | None, ...] | None
Options = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A class of optimizers.

    The update of an element reads only that element, unless the class is `whole` (it reads the whole parameter) or
    `by_rows` (it reads the element's row). `fused`: the class has a kernel that reads and writes each tensor once;
    `together`: it needs the states of all parameters, or of none.
    `own` is the class that packages use in place of torch's.

    Sparse gradients only have the rows that lookups read. `sparse` optimizers only take sparse gradients. `rows`
    optimizers take them if the options in `dense` are 0, and then update only these rows; `of_rows` is the class for
    this.
    """

    name: str
    cls: Any  # a subclass of torch.optim.Optimizer; constructors differ
    whole: bool = False
    fused: bool = False
    together: bool = False
    own: Any = None
    sparse: bool = False
    rows: bool = False
    by_rows: bool = False
    of_rows: Any = None
    dense: tuple[str, ...] = ()

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The options that a user can give."""
        every = list(inspect.signature(self.cls).parameters.values())[1:]
        return {each.name: each for each in every if each.name not in ("lr", *_MEANS)}

    @property
    def undecorated(self) -> Any:
        """The class without the guards of its methods against torch.compile.

        At their first call the guards import the compiler, which takes nearly a second on every rank.
        """
        return self._undecorated(self.own or self.cls)

    def for_gradients(self, *, sparse: bool) -> Any:
        """The class for sparse or dense gradients."""
        return self._undecorated(self.of_rows) if sparse and self.of_rows else self.undecorated

    @staticmethod
    def _undecorated(cls: Any) -> Any:
        methods = {name: inspect.unwrap(getattr(cls, name)) for name in ("step", "add_param_group")}
        return type(cls.__name__, (cls,), methods)

    def implementation(self, *, sparse: bool = False, partly: bool = False) -> dict[str, bool]:
        """The arguments that choose an implementation: one with the fewest temporary tensors.

        Gradients may be `sparse`; if steps update parameters `partly`, some have no states yet.
        """
        if self.fused and not sparse and not (partly and self.together):
            return {"fused": True}
        return {"foreach": False} if "foreach" in inspect.signature(self.cls).parameters else {}


TRIED = (2, 3, 5, 7, 11, 13)  # the shape of a parameter for trials, by which means over dimensions can be told apart
_MEANS = ("foreach", "fused", "capturable", "differentiable")
_ELEMENTWISE = (
    Kind(name="adadelta", cls=optim.Adadelta), 
    Kind(name="adagrad", cls=optim.Adagrad, of_rows=Adagrad, rows=True, dense=("weight_decay",)),
    Kind(name="adam", cls=optim.Adam, fused=True), Kind(name="adamax", cls=optim.Adamax),
    Kind(name="adamw", cls=optim.AdamW, fused=True), Kind(name="asgd", cls=optim.ASGD), Kind(name="lion", cls=Lion),
    Kind(name="nadam", cls=optim.NAdam), Kind(name="radam", cls=optim.RAdam), Kind(name="rmsprop", cls=optim.RMSprop),
    Kind(name="rprop", cls=optim.Rprop),
    Kind(name="sgd", cls=optim.SGD, fused=True, together=True, rows=True,
         dense=("momentum", "weight_decay", "dampening")),
    Kind(name="rowwise_adagrad", cls=RowwiseAdagrad, rows=True, by_rows=True),
    Kind(name="sparseadam", cls=optim.SparseAdam, own=SparseAdam, rows=True, sparse=True),
)  # fmt: skip
_WHOLE = (
    Kind(name="adafactor", cls=optim.Adafactor, whole=True), Kind(name="muon", cls=optim.Muon, whole=True),
)  # fmt: skip
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (*_ELEMENTWISE, *_WHOLE)}
# Including updates that users cannot choose.
EVERY: Mapping[str, Kind] = {**KINDS, BALANCE: Kind(name=BALANCE, cls=Balance, whole=True)}

_EIGHT = "keeps moments of 8 bits in blocks that shards would cut elsewhere, in tensors that checkpoints do not know"
# Optimizers that packages cannot run -> the reason.
REFUSED: Mapping[str, str] = {
    "lbfgs": "evaluates the loss several times in a step",
    "adam8bit": _EIGHT, "adamw8bit": _EIGHT, "lion8bit": _EIGHT,
}  # fmt: skip


def kind_of(name: str) -> Kind:
    """The class of this name. Raises UsageError P0551."""
    if name in KINDS:
        return KINDS[name]
    help = f"choose from {', '.join(sorted(KINDS))}"
    raise refusal(f"the optimizer {name!r} {REFUSED.get(name, 'is unknown')}", help)


def options_of(kind: Kind, given: Mapping[str, Value]) -> dict[str, Value]:
    """Options with the types of the class; texts are read. Raises UsageError P0551."""
    known = kind.parameters
    found = {}
    for name, value in given.items():
        key = name.replace("-", "_")
        if key not in known:
            raise refusal(f"the optimizer {kind.name} has no option {name!r}", f"it takes {options_text(kind)}")
        found[key] = _read(kind, known[key], value) if isinstance(value, str) else value
    try:
        dimensions = 2 if kind.whole else 1
        kind.undecorated([torch.zeros((2,) * dimensions)], **found)
    except (ValueError, TypeError, RuntimeError) as error:
        raise refusal(f"the optimizer {kind.name}: {error}", f"it takes {options_text(kind)}") from None
    return found


def options_text(kind: Kind) -> str:
    """`betas=0.9,0.999, eps=1e-08`: the options of a class with their defaults."""
    return ", ".join(f"{name}={option_text(each.default)}" for name, each in kind.parameters.items())


def option_text(value: Value) -> str:
    """The value as `options_of` reads it."""
    if isinstance(value, tuple):
        return ",".join(map(option_text, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def refusal(cause: str, help: str) -> UsageError:
    return UsageError("P0551", cause, help, alike=True)


def _read(kind: Kind, parameter: inspect.Parameter, text: str) -> Value:
    default = parameter.default
    wrong = refusal(
        f"{parameter.name}={text} is not a value for the optimizer {kind.name}", f"it takes {options_text(kind)}"
    )
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise wrong
        return text.lower() == "true"
    if default is None:
        return None if text == "none" else text
    try:
        if isinstance(default, tuple):
            parts = text.split(",")
            if len(parts) != len(default):
                raise wrong
            return tuple(None if part == "none" else _finite(part) for part in parts)
        return int(text) if parameter.annotation in (int, "int") else _finite(text)
    except ValueError:
        raise wrong from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


@lru_cache
def states_of(name: str, options: tuple[tuple[str, Value], ...], dims: int) -> Mapping[str, tuple[int, ...]]:
    """The shapes of the states after a step, for a parameter with the first `dims` sizes of `TRIED`."""
    kind, parameter = EVERY[name], torch.ones(TRIED[:dims])
    parameter.grad = torch.ones_like(parameter)
    made = kind.undecorated([parameter], lr=0.0, **dict(options))
    with torch.no_grad():
        made.step()
    return {key: tuple(x.shape) for key, x in sorted(made.state[parameter].items()) if isinstance(x, Tensor)}
