"""What emitted modules are made of: statements, functions, and all that is said about a region."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One statement, what is said above it, and the layout of what it makes."""

    code: str
    layout: str = ""
    notes: tuple[str, ...] = ()
    indent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A parameter of a function, or a field of a tuple."""

    name: str
    type: str
    layout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function of a stage module."""

    name: str
    doc: str
    arguments: tuple[Argument, ...]
    returns: str
    lines: tuple[Line, ...]
    gives: bool = False  # whether it returns gradients of parameters, after those of inputs

    @property
    def passes(self) -> frozenset[str]:
        """Which of comm, p, g and number it takes."""
        return frozenset(argument.name for argument in self.arguments) & {"comm", "p", "g", "number"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCode:
    """All that a stage module says about one region."""

    constant: str  # the name of the table of its parameters
    params_class: str  # "" where it has no parameters
    fields: tuple[Argument, ...]
    forward: Function
    backward: Function | None  # None, too, where gradients of weights are all there is, and are made apart
    weight: Function | None
    gradient_inputs: tuple[int, ...]  # positions of the inputs whose gradients backward returns
    gradient_outputs: tuple[int, ...]  # positions of the outputs whose gradients backward takes

    @property
    def differentiated(self) -> bool:
        return self.backward is not None or self.weight is not None
