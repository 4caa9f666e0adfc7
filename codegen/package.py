"""The files of a package."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partc.codegen import plan as plans
from partc.codegen.collectives import NAMES, local_bytes, readable_bytes
from partc.codegen.formatting import formatted
from partc.codegen.ranks import rank_codes
from partc.codegen.stages import StageCode, stage_code
from partc.memory import Account
from partc.parts import Parts
from partc.program import Program
from partc.quoting import environment
from partc.saving import most_saved

if TYPE_CHECKING:
    import jinja2

    from partc.codegen.kernel import Kernel
    from partc.codegen.written import Written


def render(
    program: Program,
    *,
    model_source: str,
    options: Mapping[str, Any],
    seed: int,
    precision: str,
    report: Sequence[str] = (),
    command: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Every file of the package by its relative path. Equal arguments give equal bytes."""
    return dict(
        files(
            program,
            model_source=model_source,
            options=options,
            seed=seed,
            precision=precision,
            report=report,
            command=command,
        )
    )


def files(
    program: Program,
    *,
    model_source: str,
    options: Mapping[str, Any],
    seed: int,
    precision: str,
    report: Sequence[str] = (),
    command: Mapping[str, Any] | None = None,
    flops: int = 0,
    modules: Sequence[StageModule] | None = None,
    memory: Account | None = None,
) -> Iterator[tuple[str, str]]:
    """The same one by one, so that a package of many ranks never stands in memory.

    `report` holds sentences for the README: what a reader should know about this plan. `modules` are the stages',
    where they are made already; `memory` is the account of what ranks hold.
    """
    modules = stage_modules(program) if modules is None else modules
    stages = [module.code for module in modules]
    plan = plans.plan(
        program, options=options, seed=seed, precision=precision, command=command, flops=flops, memory=memory
    )
    ranks = program.mesh.size
    yield "plan.json", plans.written(plan)
    yield "README.md", _readme(program, stages, plan, report)
    yield "train.py", _template("train.py.jinja").render(ranks=ranks)
    yield "model.py", model_source
    for module in modules:
        yield f"stages/stage_{module.index}.py", module.text
    rank_template = _template("rank.py.jinja")
    for rank in rank_codes(program):
        yield f"ranks/rank_{rank.rank:03d}.py", rank_template.render(rank=rank, ranks=ranks)
    yield from _kernels(program)
    yield from _runtime()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModule:
    """An emitted module: `functions` has the region of each."""

    index: int
    code: StageCode
    text: str
    functions: Mapping[str, str]


def stage_modules(program: Program) -> tuple[StageModule, ...]:
    """Those of all stages."""
    return tuple(_stage_module(program, index) for index in range(program.stages))


def stage_module(program: Program, index: int) -> str:
    """The text of one stage's module."""
    return _stage_module(program, index).text


def _stage_module(program: Program, index: int) -> StageModule:
    code = stage_code(program, index)
    text = _template("stage.py.jinja").render(stage=code, stages=program.stages, mesh=str(program.mesh))
    regions = dict.fromkeys(call.region for call in program.calls if call.stage == index)
    functions = {
        function.name: region for region, (_, made) in zip(regions, code.units, strict=True) for function in made
    }
    return StageModule(index=index, code=code, text=formatted(text), functions=functions)


def _readme(program: Program, stages: list[StageCode], plan: Mapping[str, Any], report: Sequence[str]) -> str:
    count = sum(_count(entry["shape"]) for entry in plan["parameters"].values() if entry["trainable"])
    return _template("README.md.jinja").render(
        name=program.name,
        mesh=str(program.mesh),
        ranks=program.mesh.size,
        microbatches=program.microbatches,
        precision=plan["precision"],
        recompute=plan["command"].get("recompute", "none"),
        saved=readable_bytes(max(most_saved(program), default=0)),
        seed=plan["seed"],
        parameters=f"{count:,} trained",
        stages=[{"title": stage.title, "sends": ", ".join(entry.key for entry in stage.sends)} for stage in stages],
        communication=list(_communication(program, plan)),
        report=report,
        kernels=program.fused,
        graphs=plan["command"].get("cuda_graphs", False),
    )


def _communication(program: Program, plan: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Rows of the README's table: per run of a region, per microbatch between stages, per step for gradients."""
    for name, region in plan["regions"].items():
        for part in ("forward", "backward"):
            for collective in region[part]:
                yield _row(f"{name}, {part}", NAMES[collective["op"]], collective["axis"], collective["bytes"])
    for transfer in plan["transfers"]:
        if not transfer["bytes"]:
            continue
        there = "there and its gradient back" if transfer["gradient"] else "there"
        stages = f"stage {transfer['source']} to {transfer['target']}"
        yield _row("each microbatch", f"{transfer['value']}, {there}", stages, transfer["bytes"])
    reduced: dict[tuple[int, tuple[str, ...]], int] = {}
    owners = program.owners()
    for parameter in program.parameters:
        entry = plan["parameters"][parameter.name]
        for stage in owners.get(parameter.name, ()) if entry["reduce"] and entry["trainable"] else ():
            key = (stage, tuple(entry["reduce"]))
            reduced[key] = reduced.get(key, 0) + local_bytes(parameter.type, program.sizes)
    yield from _parts(program)
    for (stage, axes), size in reduced.items():
        ways = 1
        for axis in axes:
            ways *= program.sizes[axis]
        yield _row(
            f"each step, stage {stage}", "all-reduce of gradients", ", ".join(axes), 2 * size * (ways - 1) // ways
        )


def _parts(program: Program) -> Iterator[dict[str, str]]:
    """What ranks hold in parts: for each region's calls, and the sum of what is done once per step."""
    parts = Parts(program)
    sizes: dict[tuple[str, str, tuple[str, ...]], int] = {}
    first: dict[str, str] = {}
    for call, place, move in (move for stage in range(program.stages) for move in parts.of_step(stage)):
        key = (place, move.op, move.axes)
        if first.setdefault(place, call) == call:
            sizes[key] = sizes.get(key, 0) + move.received
    for (place, op, axes), size in sizes.items():
        what = "parameters" if op == "all_gather" else "gradients"
        yield _row(place, f"{NAMES[op]} of {what}", ", ".join(axes), size)


def _row(place: str, what: str, axis: str, size: int) -> dict[str, str]:
    return {"place": place, "what": what, "axis": axis, "size": readable_bytes(size)}


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def kernel_module(kernel: Kernel | Written) -> str:
    """The text of one kernel's module."""
    return formatted(_template(f"kernels/{kernel.template}.py.jinja").render(kernel=kernel))


def _kernels(program: Program) -> Iterator[tuple[str, str]]:
    """What the stages call in place of several operations; and what updates parameters and sends their gradients."""
    if not program.fused:
        return
    from partc.codegen.kernels import kernels
    from partc.codegen.written import written

    fused = tuple(kernels(program))
    others = tuple(written(program))
    every: list[Kernel | Written] = [*fused, *others]
    for kernel in every:
        yield f"kernels/{kernel.name}.py", kernel_module(kernel)
    for name in ("functions", "interpreted", "scratch"):
        shared = importlib.resources.files("partc.kernels").joinpath(f"{name}.py")
        yield f"kernels/{name}.py", shared.read_text(encoding="utf-8")
    names = sorted([*(kernel.name for kernel in fused), *(each.name for each in others if each.alone)])
    modules = [each.name for each in others if not each.alone]
    yield "kernels/__init__.py", _template("kernels/__init__.py.jinja").render(names=names, modules=modules)


def _runtime() -> Iterator[tuple[str, str]]:
    """The runtime library, copied as it is."""
    folder = importlib.resources.files("partc.runtime")
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            yield f"runtime/{entry.name}", entry.read_text(encoding="utf-8")


def _template(name: str) -> jinja2.Template:
    return environment().get_template(name)
