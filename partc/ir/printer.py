"""The IR as text: one operation a line, layouts in the types, all of it readable back (partc.ir.parser).

region block phase microbatch:
  input x: f32[16@dp,mb, 2048@tp, 4096]
  param norm1.weight: f32[4096] vary(dp,mb)
  forward:
    norm1      = rms_norm(x, (4096,), norm1.weight, 1e-05)  # f32[16@dp,mb, 2048@tp, 4096] | {d0@dp d1@tp}
    norm1_full = all_gather(norm1, dim=1, axis="tp")        # f32[16@dp,mb, 2048, 4096] vary(tp) | 14.7 MiB over tp
    return norm1_full
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from partc.errors import Source
from partc.ir.collectives import COLLECTIVES, cost, received
from partc.ir.folding import Item, Repeat, folded, folded_row, ranges
from partc.ir.layout import Sizes
from partc.ir.operations import VIEWS
from partc.ir.program import (
    ITEMSIZE,
    Action,
    ActionStatement,
    Arg,
    Bucket,
    Choice,
    DTypeArg,
    Graph,
    Op,
    Parameter,
    Program,
    Ref,
    Region,
    Repetition,
    TensorType,
    Transport,
    Value,
)
from partc.quoting import quoted
from partc.runtime.first_steps import FirstValue

NAME = re.compile(r"[A-Za-z_0-9][\w.]*", re.ASCII)
CALL = "call"  # a call's line, like an operation's, has a name and an equals sign
_PLACE = re.compile(r"[^`|]*")
NUMBER = re.compile(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf)(?![\w.])|nan(?![\w.])")
WORDS: Mapping[str, Arg] = {"None": None, "True": True, "False": False}


def print_program(program: Program, *, sources: bool = False) -> str:
    """All of a program. `sources` adds where each operation comes from."""
    separate = " separate" if program.separate_batches else ""
    draws = f" draws {program.draws}{' for rows' * program.draws_for_rows}" if program.draws else ""
    lines = [
        f"program {written_name(program.name)} mesh {program.mesh} microbatches {program.microbatches}{separate}"
        f" loss {written_name(program.loss)}{' scaled' * program.scaled}{draws}"
    ]
    lines += [f"input {written_name(name)}{' whole' * (name in program.whole_inputs)}" for name in program.inputs]
    lines += [f"largest {written_name(name)} = {number}" for name, number in program.largest]
    lines += [f"branch {written_name(name)} = {line}" for name, line in program.branches]
    if program.steps is not None:
        lines.append(f"begun {written_name(program.steps.flag)}")
        lines += [_first_value(value) for value in program.steps.values]
    lines += [f"value {_declared(value)}" for value in program.values]
    lines += [f"result {written_name(path)} = {written_name(value)}" for path, value in program.results]
    lines += [f"update {written_name(buffer)} = {written_name(value)}" for buffer, value in program.updates]
    lines += [f"reach {written_name(name)} if {written_name(value)}" for name, value in program.reached]
    lines += [_repetition(repetition) for repetition in program.repetitions]
    lines += [_parameter(parameter) for parameter in program.parameters]
    lines += [_transport(program.transport)] if program.transport != Transport() else []
    lines += [_bucket(bucket) for bucket in program.buckets]
    for call in program.calls:
        lists = (call.args, call.params, call.results)
        args, params, results = (", ".join(map(written_name, names)) for names in lists)
        stage = f" stage {call.stage}" if call.stage else ""
        stage += "" if call.random is None else f" random {call.random}"
        lines.append(
            f"call {written_name(call.name)} = {written_name(call.region)}({args}; {params}) -> {results}{stage}"
        )
    for transfer in program.transfers:
        gradient = " gradient" if transfer.gradient else ""
        lines.append(f"transfer {written_name(transfer.value)} {transfer.source} -> {transfer.target}{gradient}")
    lines += [f"places {' '.join(map(str, program.places))}"] if program.places else []
    for body in program.bodies:
        lines += [f"action {body.name}:", *(f"  {line}" for line in _statements(body.statements, program.sizes))]
    lines += [f"schedule {place}: {_row(actions)}" for place, actions in enumerate(program.schedule)]
    for region in program.regions:
        lines += ["", print_region(region, sources=sources, sizes=program.sizes).rstrip("\n")]
    return "\n".join(lines) + "\n"


def _repetition(repetition: Repetition) -> str:
    """`repeat N: …`, with the number of modules in each unit and the modules of all units."""
    modules = ", ".join(written_name(path) for unit in repetition.units for path in unit)
    return f"repeat {len(repetition.units[0])}: {modules}"


def print_region(region: Region, *, sources: bool = False, sizes: Sizes | None = None) -> str:
    """One region. With the axes' `sizes`, collectives say how many bytes a rank sends."""
    kernels = f" kernels {region.kernels}" if region.kernels != "aten" else ""
    over = f" batch({','.join(region.batch_over)})" if region.batch_over else ""
    lines = [f"region {written_name(region.name)} phase {region.phase}{kernels}{over}:"]
    lines += [f"  param {_declared(value)}" for value in region.params]
    params = {value.name: value.type for value in region.params}
    lines += _graph("forward", region.forward, params, sources, sizes)
    if region.saved:
        lines.append(f"  saved {', '.join(map(written_name, region.saved))}")
    if region.backward is not None:
        lines += _graph("backward", region.backward, params, sources, sizes)
    if region.kept:
        lines.append(f"  kept {', '.join(map(written_name, region.kept))}")
    if region.weight is not None:
        lines += _graph("weight", region.weight, params, sources, sizes)
    return "\n".join(lines) + "\n"


def _graph(
    title: str, graph: Graph, params: Mapping[str, TensorType], sources: bool, sizes: Sizes | None
) -> Iterator[str]:
    yield f"  {title}:"
    yield from (f"    input {_declared(value)}" for value in graph.inputs)
    types = {**params, **graph.types()}
    left = [", ".join(written_name(value.name) for value in op.results) for op in graph.ops]
    right = [print_operation(op) for op in graph.ops]
    notes = [_notes(op, types, sources, sizes) for op in graph.ops]
    wide = min(max(map(len, left), default=0), 32)
    column = min(max((max(len(a), wide) + len(b) for a, b in zip(left, right, strict=True)), default=0), 96)
    for op, names, expression, note in zip(graph.ops, left, right, notes, strict=True):
        yield f"    {f'{names:<{wide}} = {expression}':<{column + 3}}  # {note}".rstrip()
        yield from (f"    | {line}" for line in (*_body(op, sources), *_steps(op, sources)))
    yield f"    return {', '.join(map(written_name, graph.outputs))}".rstrip()


def _body(op: Op, sources: bool) -> Iterator[str]:
    """The operations of one kernel, below the line of the fused operation."""
    left = [", ".join(written_name(value.name) for value in inner.results) for inner in op.body]
    right = [print_operation(inner) for inner in op.body]
    wide, column = (max(map(len, texts), default=0) for texts in (left, right))
    for inner, names, expression in zip(op.body, left, right, strict=True):
        yield f"{names:<{wide}} = {expression:<{column}}  # {_notes(inner, {}, sources, None)}".rstrip()


def _steps(op: Op, sources: bool) -> Iterator[str]:
    """The graphs among an operation's attributes: one step of a scan, below its line."""
    for graph in (arg for _, arg in op.attrs if isinstance(arg, Graph)):
        yield from print_graph(graph, sources=sources).splitlines()


def print_graph(graph: Graph, *, sources: bool = False) -> str:
    """A graph by itself: inputs, operations, outputs."""
    lines = [f"input {_declared(value)}" for value in graph.inputs]
    for op in graph.ops:
        names = ", ".join(written_name(value.name) for value in op.results)
        lines.append(f"{names} = {print_operation(op)}  # {_notes(op, {}, sources, None)}".rstrip())
        lines += [f"| {line}" for line in _steps(op, sources)]
    return "\n".join((*lines, f"return {', '.join(map(written_name, graph.outputs))}")) + "\n"


def print_operation(op: Op) -> str:
    """The right-hand side of an operation's line."""
    attrs = [f"{key}={argument_text(arg)}" for key, arg in op.attrs if not isinstance(arg, Graph)]
    return f"{op.name}({', '.join([*map(argument_text, op.args), *attrs])})"


def _notes(op: Op, types: Mapping[str, TensorType], sources: bool, sizes: Sizes | None) -> str:
    """Types of the results, then choices, bytes and source, where there are any."""
    parts = [" ; ".join(str(value.type) for value in op.results)]
    if op.choices:
        parts.append(f"{{{' '.join(map(_choice, op.choices))}}}")
    if op.wide:
        parts.append("wide")
    if sizes is not None:
        parts.append(collective_bytes(op, types, sizes))
    if sizes is not None and op.body:
        together, apart = fused_bytes(op, types, sizes)
        parts.append(f"{readable(together)} in place of {readable(apart)}")
    if sources and op.source is not None:
        parts.append(written_source(op.source))
    return " | ".join(part for part in parts if part)


def collective_bytes(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> str:
    """The bytes that a rank sends in a collective, and the axis; empty for other operations."""
    operand, axis = types.get(next(op.refs(), "")), dict(op.attrs).get("axis")
    if op.name not in COLLECTIVES or operand is None or not isinstance(axis, str) or axis not in sizes:
        return ""
    size = math.prod(operand.layout.local_shape(sizes)) * ITEMSIZE[operand.dtype]
    sent = cost(op.name, sizes[axis], size)
    return f"{readable(sent)} over {axis}" if sent else ""


def fused_bytes(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> tuple[int, int]:
    """The bytes that a fused kernel reads and writes, and the sum over its operations run one by one (views: 0)."""
    inner = {**types, **{value.name: value.type for step in op.body for value in step.results}}

    def moved(step: Op) -> int:
        values = [*(inner[name] for name in dict.fromkeys(step.refs())), *(value.type for value in step.results)]
        return 0 if step.name in VIEWS else sum(type.local_bytes(sizes) for type in values)

    return moved(op), sum(map(moved, op.body))


def readable(size: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _choice(choice: Choice) -> str:
    outer = f"/{choice.outer}" if choice.outer != 1 else ""
    return f"{'vary' if choice.factor is None else choice.factor}{outer}@{choice.axis}"


def _declared(value: Value) -> str:
    return f"{written_name(value.name)}: {value.type}"


def _statements(statements: Sequence[ActionStatement], sizes: Sizes) -> Iterator[str]:
    for item in folded(statements):
        if isinstance(item, ActionStatement):
            yield _statement(item, written_name(item.of) if item.of else "", sizes)
            continue
        heads = (f"${number} in {_listed(slot)}" for number, slot in enumerate(item.slots, start=1))
        yield f"for {'; '.join(heads)}:"
        for statement, slot in zip(item.statements, item.uses, strict=True):
            name = f"${slot + 1}" if slot is not None else ""
            yield f"  {_statement(replace(statement, ahead=0), name, sizes)}"


def _statement(statement: ActionStatement, name: str, sizes: Sizes) -> str:
    """A statement, with the bytes that a rank receives in each of its collectives."""
    moved = (readable(received(each, sizes)) for each in statement.collectives if each is not None)
    return "  # ".join(filter(None, (statement.text(name), ", ".join(moved))))


def _listed(items: Sequence[Item]) -> str:
    """`blocks.0 to blocks.6, ahead 1`."""

    def item_text(item: Item) -> str:
        return f"ahead {item}" if isinstance(item, int) else written_name(item)

    return ", ".join(item_text(a) if a == b else f"{item_text(a)} to {item_text(b)}" for a, b in ranges(items))


def _row(actions: Sequence[Action]) -> str:
    return " ".join(map(_row_item, folded_row(actions)))


def _row_item(item: Action | Repeat) -> str:
    if isinstance(item, Action):
        return str(item)
    by = f" by {item.by}" if item.by != 1 else ""
    return f"{item.times} * ({' '.join(map(_row_item, item.items))}){by}"


def _parameter(parameter: Parameter) -> str:
    aliases = f" aliases({', '.join(map(written_name, parameter.aliases))})" if parameter.aliases else ""
    reduce = f" reduce({','.join(parameter.reduce)})" if parameter.reduce else ""
    gather = f" gather({','.join(parameter.gather)}) zero {parameter.zero}" if parameter.gather else ""
    buckets = f" bucket({', '.join(map(written_name, parameter.buckets))})" if parameter.buckets else ""
    holds = f" holds({','.join(map(str, parameter.holds))})" if parameter.holds else ""
    order = f" sectioned({parameter.sectioned})" if parameter.sectioned else ""
    sparse = " sparse" if parameter.sparse else ""
    balance = f" balance({parameter.balance!r})" if parameter.balance else ""
    stacked = " stacked" if parameter.stacked else ""
    tables = ", ".join(f"{written_name(name)} {first} {rows}" for name, first, rows in parameter.members)
    members = f" tables({tables})" if tables else ""
    kind = "parameter" if parameter.trainable else "constant"
    counts = "".join(f" counts({', '.join(map(written_name, names))})" for names in parameter.counts)
    facts = f"{aliases}{reduce}{gather}{buckets}{holds}{order}{sparse}{balance}{stacked}{members}{counts}"
    return f"{kind} {written_name(parameter.name)}: {parameter.type}{facts}"


def _first_value(value: FirstValue) -> str:
    """`attribute layers.0.state: None, then a tensor`."""
    after = "a tensor" if value.is_tensor else value.after
    return f"attribute {written_name(value.name)}: {value.before}, then {after}{' persistent' * value.persistent}"


def _transport(transport: Transport) -> str:
    near = f" near({','.join(transport.near)})" if transport.near else ""
    wire = f" wire({transport.wire})" if transport.wire else ""
    compress = f" compress({transport.compress})" if transport.compress else ""
    return f"transport{near}{wire}{compress}"


def _bucket(bucket: Bucket) -> str:
    """`bucket embed: sum over dp,tp in stage 0 after embed`."""
    after = f" after {written_name(bucket.after)}" if bucket.after else ""
    kind = "scatter" if bucket.scattered else "sum"
    return f"bucket {written_name(bucket.name)}: {kind} over {','.join(bucket.over)} in stage {bucket.stage}{after}"


def argument_text(arg: Arg) -> str:
    """An argument as text."""
    match arg:
        case Ref():
            return written_name(arg.name)
        case DTypeArg():
            return f"<{arg.name}>"
        case tuple():
            return f"({', '.join(map(argument_text, arg))}{',' if len(arg) == 1 else ''})"
        case str():
            return json.dumps(arg)
    return repr(arg)


def written_name(name: str) -> str:
    """A name as it is, or between backticks where it would read as something else."""
    plain = NAME.fullmatch(name) and name not in WORDS and name != CALL and not NUMBER.fullmatch(name)
    return name if plain else quoted(name, "`")


def written_source(source: Source) -> str:
    """`at model.py:31 blocks.0`: a file and a module that would read as something else stand between backticks."""
    file = source.file if _PLACE.fullmatch(source.file) and source.file.isprintable() else quoted(source.file, "`")
    plain = not re.search(r"[\s`|]", source.module) and source.module.isprintable()
    return f"at {file}:{source.line} {source.module if plain else quoted(source.module, '`')}".rstrip()
