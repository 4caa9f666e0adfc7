"""The parts of emitted modules: statements, functions, and the code of a region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partc.quoting import WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One statement, the comments above it, and the layout of the value that it computes."""

    code: str
    layout: str = ""
    notes: tuple[str, ...] = ()
    uses: frozenset[str] = frozenset()  # the modules that it reads, and comm, p, g or number if it reads them
    indent: str = ""
    binds: bool = False  # whether it assigns results of an operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A parameter of a function, or a field of a class."""

    name: str
    type: str
    layout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function of a region's module."""

    name: str
    doc: str
    arguments: tuple[Argument, ...]
    returns: str
    lines: tuple[Line, ...]
    gives: bool = False  # whether it returns gradients of parameters, after those of inputs
    steps: tuple[Function, ...] = ()  # the step functions of its scans
    step: bool = False  # whether it is the step function of a scan

    @property
    def uses(self) -> frozenset[str]:
        """The modules that it reads, and comm, p, g or number if it reads them."""
        return frozenset().union(*(line.uses for line in self.lines), *(step.uses for step in self.steps))

    @property
    def passes(self) -> frozenset[str]:
        """The arguments among comm, p, g and number that the function takes."""
        return frozenset(argument.name for argument in self.arguments) & {"comm", "p", "g", "number"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A class of tensors by name."""

    name: str
    fields: tuple[Argument, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCode:
    """The module of one region."""

    module: str  # its name: "block" for regions/block.py
    constant: str  # the name of the table of its parameters in a stage's module
    params: Record | None
    saved: Record | None  # tensors that forward saves for backward
    kept: Record | None  # tensors that the backward of inputs keeps for gradients of weights
    forward: Function
    backward: Function | None
    weight: Function | None
    stored: frozenset[int]  # positions of the outputs that forward stores in buffers and doesn't return
    compiled: bool  # whether torch.compile makes kernels of the functions
    has_local: bool  # whether some value has a `local` layout
    gradient_inputs: tuple[int, ...]  # positions of the inputs whose gradients backward returns
    gradient_outputs: tuple[int, ...]  # positions of the outputs whose gradients backward takes

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions that exist: forward, backward, weight."""
        return tuple(function for function in (self.forward, self.backward, self.weight) if function is not None)

    @property
    def uses(self) -> frozenset[str]:
        """The modules that its functions read, and comm."""
        return frozenset().union(*(function.uses for function in self.functions))

    @property
    def printed(self) -> tuple[Function, ...]:
        """All functions of the module, each after its step functions."""
        return tuple(each for function in self.functions for each in (*function.steps, function))

    @property
    def imports(self) -> tuple[list[str], list[str]]:
        """The module's sorted import lines: (standard library, others)."""
        uses = self.uses
        standard = {
            "import math": "math" in uses,
            "from dataclasses import dataclass": self.saved is not None or self.kept is not None,
            "from functools import partial": "partial" in uses,
            "from typing import NamedTuple": self.params is not None,
        }
        others = {
            "import kernels": "kernels" in uses,
            "import torch": "torch" in uses,
            "from runtime.comm.comm import Comm": "comm" in uses,
            "from runtime.ops import functional": "functional" in uses,
            "from runtime.ops.compiled import compiled": self.compiled,
            "from runtime.ops.scan import scan": "scan" in uses,
            "from torch import Tensor": True,
            "from torch.nn import functional as F": "F" in uses,
        }
        return [line for line, needed in standard.items() if needed], [
            line for line, needed in others.items() if needed
        ]

    @property
    def imported(self) -> tuple[str, ...]:
        """The names that stages import, sorted like import lines."""
        return (*([self.params.name] if self.params else []), *sorted(function.name for function in self.functions))


def imported(module: str, names: Sequence[str]) -> str:
    """An import of names from a module, on several lines if one is too short."""
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= WIDTH else f"from {module} import (\n    {f',{chr(10)}    '.join(names)},\n)"
