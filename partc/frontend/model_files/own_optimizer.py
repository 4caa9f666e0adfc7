"""The optimizer that a model file's `optimizer(model)` returns, as equivalent options of `train.py`.

`optimizer(model)` returns one of torch's optimizers, or a list of several for different parameters. Parameters in none
of them keep their values, as in eager training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn, optim

from partc.errors import PartcError, first_line
from partc.frontend.model_files.model_file import user_line
from partc.frontend.state.comparable import DEPTH, comparable_copy
from partc.runtime.errors import UsageError
from partc.runtime.optimizer.kinds import KINDS, Kind, option_text
from partc.runtime.optimizer.recipe import DEFAULT, Recipe, UpdateRule, recipe_text
from partc.runtime.torch_private import storage_key
from partc.torch_private import STEP_HOOKS, TorchDispatchMode

Build = Callable[[nn.Module], Any]
_RATE = 1e-3  # train.py's default
_KEPT = UpdateRule(name="sgd", lr_scale=0.0)  # for parameters of no optimizer: a rate of 0, and no state
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptimizer:
    """An optimizer as train.py's --optimizer, --group and --lr name it."""

    optimizer: str
    groups: tuple[str, ...]
    lr: float


def own_optimizer(build: Build, model: nn.Module, path: Path) -> OwnOptimizer:
    """Call `build` with the model, and read the classes, options and groups that it chose.

    Raises PartcError P0551 if it fails, or returns something that options of train.py cannot express.
    """
    tensors, attributes, writes = _tensors(model), _attributes(model), _Writes(model)
    try:
        with writes:
            found = build(model)
    except Exception as error:  # a user's function may raise anything
        raise _refusal(f"optimizer() fails: {type(error).__name__}: {first_line(error)}", path, error) from error
    made = list(found) if isinstance(found, list | tuple) else [found]
    for each in made or [None]:
        if not isinstance(each, optim.Optimizer):
            raise _refusal(f"optimizer() returns a {type(each).__name__} where an optimizer is expected", path)
        if "step" in vars(each) or any(getattr(each, hooks) for hooks in STEP_HOOKS):
            raise PartcError(
                "P0551",
                f"optimizer() changes the step of {type(each).__name__} by a schedule, a hook or another function",
                help="leave it out: packages run torch's own step, and train.py's --lr-schedule changes its rate",
            )
        if each.state and not isinstance(each, optim.Adagrad):  # whose constructor makes its states
            raise _refusal(f"optimizer() gives {type(each).__name__} states, which packages begin anew", path)
    later = _attributes(model)
    changed = writes.names or [name for name, _ in tensors.items() ^ _tensors(model).items()]
    if changed := changed or [name for name in attributes if later.get(name) != attributes[name]]:
        raise PartcError(
            "P0551",
            f"optimizer() changes {min(changed)} of the model",
            help="change modules, and change or freeze weights, in model(), before it returns",
        )
    base = _kind(made[0], path)
    rate = next((rate for rate in (float(made[0].defaults["lr"]), *sorted(_rates(made))[::-1]) if rate > 0), _RATE)
    options = _options(base, made[0].defaults)
    wanted = _rules(made, model, rate, path)
    dims = {name: each.dim() for name, each in model.named_parameters() if each.requires_grad}
    rules = {name: wanted.get(name, _KEPT) for name in dims}
    groups = tuple(_groups(rules, base.name, options))
    result = OwnOptimizer(optimizer=recipe_text(base.name, options), groups=groups, lr=rate)
    _check(result, rules, dims, path)
    return result


class _Writes(TorchDispatchMode):
    """Collects the names of the model's weights and buffers that operations change in place, also by `.data`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        held = (*model.named_parameters(), *model.named_buffers())
        self._names = {storage_key(x): name for name, x in held}
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            x = args[place] if place < len(args) else named.get(argument.name)
            for each in x if isinstance(x, list | tuple) else [x]:
                if written and isinstance(each, Tensor) and storage_key(each) in self._names:
                    self.names.append(self._names[storage_key(each)])
        return func(*args, **named)


def _tensors(model: nn.Module) -> dict[str, tuple[int, bool]]:
    """The memory of each weight and buffer, and whether it is trained."""
    held = (*model.named_parameters(), *model.named_buffers())
    return {name: (storage_key(x), x.requires_grad) for name, x in held}


def _attributes(model: nn.Module) -> dict[str, Any]:
    """The attributes of modules, hooks included, in comparable form."""
    kept: list[Any] = []
    known: dict[int, Any] = {}
    return {
        f"{path}.{name}".lstrip("."): comparable_copy(value, kept, DEPTH, known)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers")
    }


def _rates(made: list[Any]) -> Iterator[float]:
    return (float(group["lr"]) for each in made for group in each.param_groups)


def _kind(made: Any, path: Path) -> Kind:
    for kind in KINDS.values():
        if type(made) is kind.cls:
            return kind
    raise _refusal(f"optimizer() returns {type(made).__name__}, which packages cannot run", path)


def _options(kind: Kind, group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that differ from the defaults of the class."""
    found = {}
    for name, parameter in kind.parameters.items():
        value = group.get(name, parameter.default)
        value = tuple(value) if isinstance(value, list) else value
        if value != parameter.default:
            found[name] = value
    return found


def _rules(made: list[Any], model: nn.Module, rate: float, path: Path) -> dict[str, UpdateRule]:
    """The update of each parameter in the optimizers, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, UpdateRule] = {}
    for each in made:
        kind = _kind(each, path)
        for group in each.param_groups:
            options = tuple(sorted(_options(kind, group).items()))
            rule = UpdateRule(name=kind.name, options=options, lr_scale=float(group["lr"]) / rate)
            for parameter in group["params"]:
                if id(parameter) not in names:
                    shape = list(parameter.shape)
                    raise _refusal(f"optimizer() updates a tensor {shape} that is not a parameter of the model", path)
                name = names[id(parameter)]
                if name in found:
                    raise _refusal(f"two of the optimizers update {name}", path)
                found[name] = rule
    return found


def _groups(rules: Mapping[str, UpdateRule], base: str, options: Mapping[str, Any]) -> Iterator[str]:
    """One group for each update that differs from the optimizer's own."""
    members: dict[UpdateRule, list[str]] = {}
    for name, rule in rules.items():
        members.setdefault(rule, []).append(name)
    for rule, names in members.items():
        own = dict(rule.options)
        texts = {}
        if rule.name != base:
            texts = {"optimizer": rule.name, **{name: option_text(value) for name, value in own.items()}}
        else:
            for name, parameter in KINDS[base].parameters.items():
                value = own.get(name, parameter.default)
                if value != options.get(name, parameter.default):
                    texts[name] = option_text(value)
        if rule.lr_scale != 1:
            texts["lr_scale"] = repr(rule.lr_scale)
        if texts:
            others = [name for name, other in rules.items() if other != rule]
            yield f"{','.join(_patterns(names, others))}:{','.join(f'{k}={v}' for k, v in texts.items())}"


def _patterns(names: list[str], others: list[str]) -> Iterator[str]:
    """Patterns, as few as possible, that match the names and none of the others, such as `layers.*.weight`."""
    left = names
    for count in (0, 1):  # `*` for all numbers in a name, or for the first one
        known: dict[str, list[str]] = {}
        for name in left:
            known.setdefault(_NUMBER.sub("*", _quoted(name), count=count), []).append(name)
        alike = {pattern: members for pattern, members in known.items() if len(members) > 1}
        found = [pattern for pattern in alike if not any(fnmatchcase(other, pattern) for other in others)]
        yield from found
        matched = {name for pattern in found for name in alike[pattern]}
        left = [name for name in left if name not in matched]
    yield from map(_quoted, left)


def _quoted(name: str) -> str:
    """A pattern that matches the name, with `?` for characters that are special in --group."""
    return re.sub(r"[,:]", "?", re.sub(r"[*?\[]", r"[\g<0>]", name))


def _check(found: OwnOptimizer, rules: Mapping[str, UpdateRule], dims: Mapping[str, int], path: Path) -> None:
    """Raise PartcError P0551 unless the options give each parameter the update that optimizer() gives it."""
    try:
        recipe = Recipe.of(found.optimizer, groups=found.groups)
        said = recipe.all_settings(dims)
    except UsageError as error:
        raise _refusal(f"optimizer() chooses options that train.py does not take: {error.cause}", path) from error
    for name, rule in rules.items():
        mine = said[name]
        same = mine.name == rule.name and math.isclose(mine.lr_scale, rule.lr_scale, rel_tol=1e-12)
        if not same or _options(mine.kind, dict(mine.options)) != dict(rule.options):
            raise _refusal(f"the update that optimizer() chooses for {name} cannot be expressed by --group", path)


def _refusal(cause: str, path: Path, error: BaseException | None = None) -> PartcError:
    return PartcError(
        "P0551",
        cause,
        help=f"return one of {', '.join(sorted(kind.cls.__name__ for kind in KINDS.values()))}, or a list of them; "
        f"or leave optimizer() out and choose with --optimizer and --group ({DEFAULT} is the default)",
        source=None if error is None else user_line(error, path),
    )
