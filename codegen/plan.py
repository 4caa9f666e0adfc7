"""plan.json: every decision in a form for other tools; its schema is templates/plan.schema.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from partc.codegen.cuda_graphs import obstacle
from partc.communication.descriptions import NAMES, moved_bytes
from partc.cost.memory import Account
from partc.ir.index_limit import IndexLimit
from partc.ir.layout import Layout, SubDim
from partc.ir.program import Graph, Parameter, Program, Region, TensorType
from partc.ir.routers import routers
from partc.runtime.dims import Sectioned
from partc.runtime.plan import FORMAT

_HALVES = re.compile("[\ud800-\udfff]")  # of surrogate pairs, which UTF-8 does not have


def plan(
    program: Program,
    *,
    options: Mapping[str, Any],
    seed: int,
    precision: str,
    command: Mapping[str, Any] | None = None,
    flops: int = 0,
    memory: Account | None = None,
    constants: Mapping[str, str] | None = None,
    limits: Mapping[str, Sequence[IndexLimit]] | None = None,
    planned: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document. `flops` are the floating-point operations for one batch, over all ranks.

    `command` holds the user's other options, so that the compile can be repeated.
    """
    from partc.codegen.attentions import documents  # loads torch

    uncaptured = obstacle(program)
    found = [*routers(program)]
    rounds = _rounding(program, precision)
    return {
        "partc": FORMAT,
        "name": program.name,
        "mesh": str(program.mesh),
        "microbatches": program.microbatches,
        "precision": precision,
        **({"rounds": rounds} if rounds else {}),
        "seed": seed,
        "draws": program.draws,
        **({"draws_for_rows": True} if program.draws_for_rows else {}),
        **({"branches": program.branches} if program.draws and program.branches else {}),
        **({} if program.steps is None else {"first_steps": program.steps.document}),
        "repeated": program.separate_batches,
        "flops": flops,
        "zero": program.zero,
        "updates": [buffer for buffer, _ in program.updates],
        "options": dict(options),
        "command": dict(command or {}),
        **({"planned": dict(planned)} if planned else {}),
        "stages": program.stages,
        "places": [program.place(stage) for stage in range(program.stages)],
        "inputs": _inputs(program, limits or {}),
        **({"constants": dict(constants)} if constants else {}),
        "parameters": _parameters(program),
        **({"results": _results(program)} if program.results else {}),
        "regions": {region.name: _region(region, program) for region in program.regions},
        "calls": _calls(program),
        "transfers": _transfers(program),
        "attention": documents(program),
        **({"routers": [asdict(router) for router in found]} if found else {}),
        "schedule": {str(index): " ".join(map(str, actions)) for index, actions in enumerate(program.schedule)},
        **({} if uncaptured is None else {"uncaptured": uncaptured.cause}),
        **({} if memory is None else {"memory": memory.document()}),
    }


def _inputs(program: Program, limits: Mapping[str, Sequence[IndexLimit]]) -> dict[str, Any]:
    """The entries of a batch; `limits` has the limits of those that are indices."""
    largest = dict(program.largest)
    return {
        name: {
            **_typed(program.step_input(name), program),
            **({"indices": [_index_limit(each) for each in limits[name]]} if name in limits else {}),
            **({"largest": largest[name]} if name in largest else {}),
        }
        for name in program.inputs
    }


def _index_limit(limit: IndexLimit) -> dict[str, Any]:
    """A limit without the fields that have their defaults."""
    return {each.name: x for each in fields(limit) if (x := getattr(limit, each.name)) != each.default}


def _parameters(program: Program) -> dict[str, Any]:
    """The model's parameters, each row of a stack by its own name; counters of rows are no parameters of the model."""
    holders = program.holders()
    counters = (each for each in program.parameters if each.counts)
    counted = {name: [each.name, at] for each in counters for at, names in enumerate(each.counts) for name in names}
    return {
        name: {
            **_parameter_entry(parameter, row, program),
            "trainable": parameter.trainable,
            **({"balance": parameter.balance} if parameter.balance else {}),
            **({"counted": counted[name]} if name in counted else {}),
            "reduce": [axis for axis in parameter.reduce if program.sizes[axis] > 1],
            "gather": list(parameter.gather),
            "stages": list(holders.get(parameter.name, ())),
            "aliases": list(parameter.aliases),
        }
        for parameter in program.parameters
        if not parameter.counts
        for row, name in enumerate(parameter.names)
    }


def _results(program: Program) -> dict[str, Any]:
    """The results of a forward pass, each with the pipeline rank that computes it."""
    types = program.value_types()
    return {
        path: {**_typed(types[name], program), "place": _pipeline_rank(name, program)} for path, name in program.results
    }


def _calls(program: Program) -> list[dict[str, Any]]:
    return [
        {
            "name": call.name,
            "region": call.region,
            "stage": call.stage,
            "reads": list(call.args),
            "makes": list(call.results),
        }
        for call in program.calls
    ]


def _transfers(program: Program) -> list[dict[str, Any]]:
    """The values that one stage hands to another; `bytes` is 0 if both are on one rank."""
    types = program.value_types()
    return [
        {
            "value": transfer.value,
            "source": transfer.source,
            "target": transfer.target,
            "gradient": transfer.gradient,
            "bytes": types[transfer.value].local_bytes(program.sizes) if program.travels(transfer) else 0,
        }
        for transfer in program.transfers
    ]


def _rounding(program: Program, precision: str) -> str:
    """The lowest precision in which the model computes, if an fp32 or fp64 package computes anything below; else ""."""
    made = {value.type.dtype for region in program.regions for op in region.forward.ops for value in op.results}
    own = "bf16" if "bf16" in made else "fp16" if "f16" in made else ""
    return own if precision in ("fp32", "fp64") else ""


def _pipeline_rank(name: str, program: Program) -> int:
    """The pipeline rank that computes a value."""
    return program.place(program.maker(name).stage)


def _parameter_entry(parameter: Parameter, row: int, program: Program) -> dict[str, Any]:
    """The plan's entry for a model parameter: its shape and layout, and its rows if it is in a stack."""
    if parameter.members:
        _, first, count = parameter.members[row]
        stacked, *columns = parameter.type.layout.dims
        alone = replace(parameter.type.layout, dims=((SubDim(count),), *columns))
        table = replace(parameter.type, layout=alone)
        held = _layout(Layout((stacked,)), program)
        return {
            "shape": list(table.shape),
            **_typed(table, program),
            "stack": {"name": parameter.name, "rows": held, "row": first, "count": count},
        }
    order = parameter.sectioned
    if not parameter.stacked:
        shape = list(parameter.holds or parameter.type.shape)
        return {"shape": shape, **_typed(parameter.type, program), **_ordered(order)}
    rows, *dims = parameter.type.layout.dims
    own = replace(parameter.type, layout=replace(parameter.type.layout, dims=tuple(dims)))
    return {
        "shape": list(own.shape),
        **_typed(own, program),
        **_ordered(order and order.of_row),
        "stack": {"name": parameter.name, "rows": _layout(Layout((rows,)), program), "row": row},
    }


def _ordered(order: Sectioned | None) -> dict[str, Any]:
    return {"sectioned": order._asdict()} if order else {}


def _typed(type: TensorType, program: Program) -> dict[str, str]:
    return {"dtype": type.dtype, "layout": _layout(type.layout, program)}


def _layout(layout: Layout, program: Program) -> str:
    texts = program.derived(_LayoutTexts)
    if id(layout) not in texts.known:  # of the program: equal layers share layouts
        texts.known[id(layout)] = layout, str(layout.without(*texts.single))
    return texts.known[id(layout)][1]


@dataclass(frozen=True)
class _LayoutTexts:
    """The layouts of a program as texts, without axes of size 1."""

    program: Program
    known: dict[int, tuple[Layout, str]] = field(default_factory=dict)

    @cached_property
    def single(self) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.program.sizes.items() if size == 1)


def _region(region: Region, program: Program) -> dict[str, Any]:
    return {
        "phase": region.phase,
        "values": {
            value.name: f"{value.type.dtype}{_layout(value.type.layout, program)}"
            for value in region.forward.definitions().values()
        },
        "saved": list(region.saved),
        "forward": _collectives(region.forward, region, program),
        "backward": [item for graph in region.graphs[1:] for item in _collectives(graph, region, program)],
    }


def _collectives(graph: Graph, region: Region, program: Program) -> list[dict[str, Any]]:
    """The communication of one run of the graph, in order; bytes are those that one rank receives."""
    types = region.types(graph)
    return [
        {"op": op.name, "axis": dict(op.attrs)["axis"], "bytes": moved_bytes(op, types, program.sizes)}
        for op in graph.ops
        if op.name in NAMES and moved_bytes(op, types, program.sizes)
    ]


def plan_text(plan: Mapping[str, Any]) -> str:
    """The plan as JSON with one line for each parameter, call and value, so that plans can be diffed."""
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", f"{_written(plan, 0)}\n")


def _written(value: Any, depth: int) -> str:
    flat = json.dumps(value, ensure_ascii=False)
    deep = isinstance(value, dict | list) and any(isinstance(item, dict | list) and item for item in _items(value))
    if not deep and (len(flat) <= 120 or depth > 1):
        return flat
    pad = "  " * (depth + 1)
    if isinstance(value, dict):
        inside = [f"{pad}{json.dumps(key)}: {_inner(item, depth)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inside) + "\n" + "  " * depth + "}"
    return "[\n" + ",\n".join(f"{pad}{_inner(item, depth)}" for item in value) + "\n" + "  " * depth + "]"


def _inner(value: Any, depth: int) -> str:
    flat = json.dumps(value, ensure_ascii=False)
    return flat if depth > 0 and len(flat) <= 200 else _written(value, depth + 1)


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)
