"""The update of each parameter as the user's options describe it: `sgd:momentum=0.9`, and groups of parameters.

`*.bias,*norm*:weight_decay=0` is a group: patterns of names, and options of the optimizer for these parameters. Besides
the options of its class, a group can have `lr_scale`, a factor of the learning rate, and `optimizer`, another class.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from .balance import BALANCE
from .kinds import EVERY, TRIED, Kind, Value, kind_of, option_text, options_of, refusal, states_of

DEFAULT = "adamw"
_DECAY = "weight_decay"
_FORM = "for example --group '*.bias,*norm*:weight_decay=0' or --group 'embed*:lr_scale=0.1'"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """The update of one parameter: an optimizer, its options, and a factor of the learning rate."""

    name: str
    options: tuple[tuple[str, Value], ...] = ()
    lr_scale: float = 1.0

    @property
    def takes_rows(self) -> bool:
        """Whether it takes sparse gradients, and updates only their rows."""
        return self.kind.rows and not any(value for key, value in self.options if key in self.kind.dense)

    @property
    def kind(self) -> Kind:
        return EVERY[self.name]

    def states(self, dims: int) -> list[str]:
        """The names of the tensors that the optimizer keeps for a parameter with `dims` dimensions."""
        return list(states_of(self.name, self.options, dims))

    def uncut(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shapes of states that differ from the parameter's: single numbers, and means over dimensions."""
        tried = TRIED[: len(shape)]
        return {
            key: tuple(size if mean != 1 else 1 for mean, size in zip(found, shape, strict=False))
            for key, found in states_of(self.name, self.options, len(shape)).items()
            if found != tried
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters whose names match one of the patterns, and their options as text."""

    globs: tuple[str, ...]
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Group:
        globs, found, options = text.rpartition(":")
        if not found or not all(globs.split(",")):
            raise refusal(f"--group {text!r} is not GLOB,...:OPTION=VALUE,...", _FORM)
        return cls(globs=tuple(globs.split(",")), options=_pairs(options))

    def has(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in self.globs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The optimizer of all parameters, and groups with further options; later groups override earlier ones."""

    name: str
    options: Mapping[str, Value]
    groups: tuple[Group, ...] = ()
    balance: Mapping[str, float] = field(default_factory=dict)  # bias of a router -> the size of its update

    @classmethod
    def of(
        cls,
        optimizer: str,
        *,
        weight_decay: float | None = None,
        groups: Sequence[str] = (),
        no_decay: Sequence[str] = (),
        balance: Mapping[str, float] | None = None,
    ) -> Recipe:
        """Read the options of train.py. Raises UsageError P0551."""
        name, options = parse_recipe(optimizer)
        decay: dict[str, Value] = {} if weight_decay is None else {_DECAY: weight_decay}
        spared = [Group(globs=(glob,), options={_DECAY: "0"}) for glob in no_decay]
        return cls(
            name=name,
            options=options_of(kind_of(name), {**options, **decay}),
            groups=(*map(Group.parse, groups), *spared),
            balance=balance or {},
        )

    def __str__(self) -> str:
        """The optimizer without the groups, as `of` reads it."""
        return recipe_text(self.name, self.options)

    def settings(self, name: str, dims: int) -> UpdateRule:
        """The update of a parameter. Muon only updates matrices; AdamW updates the others, with the same weight decay.

        Raises UsageError P0551.
        """
        if name in self.balance:
            return UpdateRule(name=BALANCE, options=(("rate", self.balance[name]),))
        mine: dict[str, str] = {}
        for group in self.groups:
            if group.has(name):
                mine |= group.options
        scale = _factor(mine.pop("lr_scale", "1"))
        kind = kind_of(mine.pop("optimizer", self.name))
        options: dict[str, Value] = {**(self.options if kind.name == self.name else {}), **mine}
        if kind.name == "muon" and dims != 2:
            options = {key: value for key, value in options_of(kind, options).items() if key == _DECAY}
            kind = kind_of(DEFAULT)
        return _settings(kind.name, tuple(sorted(options.items())), scale)

    def all_settings(self, dims: Mapping[str, int]) -> dict[str, UpdateRule]:
        """The update of each parameter, by their numbers of dimensions. Raises UsageError P0551."""
        return {name: self.settings(name, count) for name, count in dims.items()}

    def check(self, dims: Mapping[str, int]) -> None:
        """Raise UsageError P0551 if a group has no parameter, or options that the optimizer of one lacks."""
        for group in self.groups:
            for glob in group.globs:
                if not matching_names(dims, (glob,)):
                    help = "plan.json lists the parameters' names; quote patterns, so that the shell keeps them"
                    raise refusal(f"{glob!r} matches no parameter", help)
        self.all_settings(dims)

    def states(self, dims: Mapping[str, int]) -> list[list[str]]:
        """The distinct sets of states that parameters have."""
        sets = {tuple(settings.states(dims[name])) for name, settings in self.all_settings(dims).items()}
        return [list(states) for states in sorted(sets) if states]


def parse_recipe(text: str) -> tuple[str, dict[str, str]]:
    """Parse `adamw:betas=0.9,0.95,eps=1e-8`: the name and the options. Raises UsageError P0551."""
    name, found, options = text.partition(":")
    return name, _pairs(options) if found else {}


def recipe_text(name: str, options: Mapping[str, Value]) -> str:
    """The text that `parse_recipe` reads."""
    pairs = ",".join(f"{key}={option_text(value)}" for key, value in sorted(options.items()))
    return f"{name}:{pairs}" if pairs else name


def merged_recipe(text: str, given: Mapping[str, str]) -> str:
    """The optimizer's text with further options. Raises UsageError P0551."""
    name, options = parse_recipe(text)
    return recipe_text(name, options_of(kind_of(name), {**options, **given}))


def matching_names(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The names that match one of the patterns."""
    return {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}


@lru_cache
def _settings(name: str, options: tuple[tuple[str, Value], ...], lr_scale: float) -> UpdateRule:
    checked = options_of(kind_of(name), dict(options))
    return UpdateRule(name=name, options=tuple(sorted(checked.items())), lr_scale=lr_scale)


def _pairs(text: str) -> dict[str, str]:
    """Parse `betas=0.9,0.95,eps=1e-8`: a part without `=` belongs to the value before it."""
    found: dict[str, str] = {}
    last = ""
    for part in text.split(","):
        key, assigned, value = part.partition("=")
        if assigned and key:
            last = key.strip().replace("-", "_")
            found[last] = value
        elif last:
            found[last] += f",{part}"
        else:
            raise refusal(f"{part!r} is not OPTION=VALUE", _FORM)
    return found


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise refusal(f"lr_scale={text} is not a factor of the learning rate", "give a number of 0 or more")
    return factor
