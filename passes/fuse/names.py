"""Names of kernels: their operations, and a number to distinguish different kernels. Equal kernels share a name."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from partc.ir.layout import Sizes
from partc.ir.printer import argument_text
from partc.ir.program import Arg, Graph, Op, Program, Ref, Region, TensorType
from partc.rules.strides import dense

MOST_WORDS = 4
_TAKEN = frozenset({"functions"})


def named(program: Program) -> Program:
    """Name the kernel of every fused operation, and mark the arguments that may be strided in memory."""
    given: dict[tuple[object, ...], str] = {}
    known = dense(program)

    def graph_named(region: Region, graph: Graph) -> Graph:
        types = region.types(graph)
        return replace(
            graph, ops=tuple(_named(op, types, known[region.name], program.sizes, given) for op in graph.ops)
        )

    return program.mapped(graph_named)


def _named(
    op: Op,
    types: Mapping[str, TensorType],
    dense: Collection[str],
    sizes: Sizes,
    given: dict[tuple[object, ...], str],
) -> Op:
    if not op.body:
        return op
    attrs = dict(op.attrs)
    strided = tuple(place for place, name in enumerate(op.refs()) if name not in dense)
    key = (strided, *_meaning(op, types, sizes))
    if key not in given:
        wanted = str(attrs["kernel"])
        taken = _TAKEN | set(given.values())
        numbered = (f"{wanted}_{number}" for number in range(2, len(given) + 3))
        given[key] = next(name for name in (wanted, *numbered) if name not in taken)
    attrs["kernel"] = given[key]
    return replace(op, attrs=(*attrs.items(), *((("strided", strided),) if strided else ())))


def _meaning(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> tuple[object, ...]:
    """A key that is equal for operations that one kernel can compute: shapes, types and operations, with values
    numbered.
    """
    number: dict[str, int] = {}

    def known(name: str) -> int:
        return number.setdefault(name, len(number))

    def bare(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return ("value", known(arg.name))
        if isinstance(arg, tuple):
            return tuple(map(bare, arg))
        return argument_text(arg)

    def type_of(type: TensorType) -> object:
        return type.dtype, type.layout.local_shape(sizes)

    reads = tuple((known(name), type_of(types[name])) for name in op.refs())
    steps = tuple(
        (
            step.name,
            # An argument of the kernel selects the random numbers; their positions follow from the layout.
            tuple(map(bare, step.args)) if step.name != "drawn" else (step.args[0], str(step.result.type.layout)),
            tuple((key, bare(arg)) for key, arg in step.attrs),
            tuple((known(value.name), type_of(value.type)) for value in step.results),
        )
        for step in op.body
    )
    return op.attrs, reads, steps, tuple(known(value.name) for value in op.results)


def stem(ops: Sequence[Op], rotations: Mapping[str, str]) -> str:
    """The stem of a kernel's name: its computing operations, each once, as in `silu_mul`.

    `rotations` has the rotary embedding that a value belongs to: its plain operations count as one.
    """
    names = (rotations.get(op.results[0].name, op.name) for op in ops if op.name != "to")
    words = dict.fromkeys(re.sub(r"\W+", "_", name).strip("_") for name in names)
    found = "_".join(list(words)[:MOST_WORDS]) or "cast"
    return f"{found}_" if keyword.iskeyword(found) else found
