"""Operations with their arguments as Python source, the input of their emitters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from partc.ir import operators
from partc.ir.layout import Sizes
from partc.ir.program import Arg, DType, DTypeArg, Graph, Op, Ref, TensorType
from partc.quoting import literal

DTYPES: Mapping[DType, str] = {name: str(dtype) for name, dtype in operators.DTYPES.items()}  # "torch.float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """An operation's arguments as source, and its properties that emitters need."""

    op: Op
    args: tuple[str, ...]
    items: tuple[tuple[str, ...], ...]  # the items of arguments that are tuples
    attrs: Mapping[str, str]
    types: Mapping[str, TensorType]  # types of the values in scope
    sizes: Sizes
    exclusive: bool = False  # nothing else reads its first operand, so it may be overwritten
    started: bool = False  # a collective with a separate wait
    # The modules and common arguments (comm, p, g, number) that its line reads.
    used: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        op: Op,
        writer: Callable[[int], Callable[[str], str]],
        types: Mapping[str, TensorType],
        sizes: Sizes,
        *,
        shapes: Mapping[int, tuple[str, ...]] | None = None,
        exclusive: bool = False,
        started: bool = False,
    ) -> Operands:
        """The arguments as source. `writer(position)` returns the writer of values at an argument position (-1 for
        attributes); `shapes` replaces the items of tuple arguments.
        """
        written_shapes = shapes or {}
        items = tuple(
            written_shapes.get(index) or tuple(argument_text(item, writer(index)) for item in arg)
            if isinstance(arg, tuple)
            else ()
            for index, arg in enumerate(op.args)
        )
        return cls(
            op=op,
            args=tuple(
                tuple_text(each) if isinstance(arg, tuple) else argument_text(arg, writer(index))
                for index, (arg, each) in enumerate(zip(op.args, items, strict=True))
            ),
            items=items,
            attrs={key: argument_text(value, writer(-1)) for key, value in op.attrs if not isinstance(value, Graph)},
            types=types,
            sizes=sizes,
            exclusive=exclusive,
            started=started,
        )

    def named(self, path: str) -> str:
        """A dotted name that the line reads: of a module, or of comm, p or g."""
        self.used.add(path.partition(".")[0])
        return path

    def dtype(self, dtype: DType) -> str:
        """The name of a dtype."""
        return self.named(DTYPES[dtype])

    def shape(self, index: int) -> tuple[int, ...]:
        """The local shape of a tensor argument."""
        arg = self.op.args[index]
        return self.types[arg.name].layout.local_shape(self.sizes) if isinstance(arg, Ref) else ()

    def whole(self, index: int) -> tuple[int, ...]:
        """The global shape of a tensor argument."""
        arg = self.op.args[index]
        return self.types[arg.name].shape if isinstance(arg, Ref) else ()

    def value(self, name: str) -> str:
        """The value of a text attribute; "" if it is absent."""
        return str(dict(self.op.attrs).get(name, ""))

    @property
    def axis(self) -> str:
        """The axis of a collective."""
        return self.value("axis")

    @property
    def rank(self) -> str:
        """The expression of this rank's coordinate on that axis."""
        return f"{self.named('comm')}.{self.axis}.rank"

    @property
    def ways(self) -> str:
        """The number of ranks on that axis."""
        return str(self.sizes[self.axis])

    def flat(self, index: int) -> str:
        """A tensor argument as a matrix: all dimensions but the last are joined."""
        return self.args[index] if len(self.shape(index)) == 2 else f"{self.args[index]}.flatten(0, -2)"


Emit = Callable[[Operands], str]


def modules(args: Iterable[Arg]) -> Iterator[str]:
    """The modules that arguments read as Python source."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from modules(arg)
        elif isinstance(arg, DTypeArg):
            yield "torch"
        elif isinstance(arg, float) and not math.isfinite(arg):
            yield "math"


def argument_text(arg: Arg, name: Callable[[str], str]) -> str:
    """An argument as Python source; `name` gives the identifiers of values."""
    match arg:
        case Ref():
            return name(arg.name)
        case DTypeArg():
            return DTYPES[arg.name]
        case tuple():
            return tuple_text([argument_text(item, name) for item in arg])
        case float() if not math.isfinite(arg):
            return "math.nan" if math.isnan(arg) else "math.inf" if arg > 0 else "-math.inf"
        case float():
            return repr(arg).replace("e+", "e")
        case str():
            return literal(arg)
    return repr(arg)


def tuple_text(items: Sequence[str]) -> str:
    """A tuple of these items as Python source."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def arguments(args: tuple[str, ...], names: tuple[str, ...], attrs: Mapping[str, str]) -> str:
    """Arguments with the names of a table entry: `dim=` is passed by name, `dim=0` only if it is not 0."""
    parts: list[str] = []
    for index, arg in enumerate(args):
        name, by_name, default = names[index].partition("=") if index < len(names) else ("", "", "")
        if not default or arg != default:
            parts.append(f"{name}={arg}" if by_name else arg)
    return ", ".join((*parts, *(f"{key}={value}" for key, value in attrs.items() if key != "axis")))
