"""The files of a package."""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from partc.codegen import plan as plans
from partc.codegen.formatting import formatted
from partc.codegen.places import place_codes
from partc.codegen.regions import region_codes
from partc.codegen.source import RegionCode
from partc.codegen.stages import StageCode, stage_code
from partc.communication.descriptions import NAMES, coded
from partc.communication.exchanges import Exchanges
from partc.cost.memory import Account
from partc.cost.saved_tensors import most_saved
from partc.ir.collectives import received
from partc.ir.index_limit import IndexLimit
from partc.ir.printer import readable
from partc.ir.program import SCAN, Collective, Program, Subject
from partc.quoting import environment
from partc.runtime.plan import launches

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    import jinja2

    from partc.codegen.kernels.fixed import FixedKernels
    from partc.codegen.kernels.kernel import Kernel


EVALUATION = "evaluation/"  # the folder of the evaluation's program
# The script of a package by whether it only runs forward: its name, purpose, module, and options for a first run.
SCRIPTS = {
    False: ("train.py", "Trains this package", "train", "--steps 20"),
    True: ("infer.py", "Runs this package forward", "inference", "--init model.safetensors --out results"),
}


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
    modules: Modules | None = None,
    memory: Account | None = None,
    constants: Mapping[str, str] | None = None,
    limits: Mapping[str, Sequence[IndexLimit]] | None = None,
    evaluation: Program | None = None,
    planned: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, str]]:
    """The files of the package one by one, as (path, text). Equal arguments give equal texts.

    `report` holds sentences for the README about this plan. `modules` are the program's, if they exist already;
    `memory` is the account of the ranks' memory. `constants` are the entries of the batch that are not tensors.
    `limits` has the limits of its integers that are indices. `planned` is the prediction for a plan that partc has
    chosen.
    """
    modules = emit(program) if modules is None else modules
    stages = [module.code for module in modules.stages]
    plan = plans.plan(
        program,
        options=options,
        seed=seed,
        precision=precision,
        command=command,
        flops=flops,
        memory=memory,
        constants=constants,
        limits=limits,
        planned=planned,
    )
    ranks = program.mesh.size
    yield "plan.json", plans.plan_text(plan)
    yield "README.md", _readme(program, stages, plan, report)
    script, does, module, more = SCRIPTS[bool(program.results)]
    launch = f"{launches(ranks, plan['command'].get('nodes'), script)[0]} {more}"
    yield script, _template("train.py.jinja").render(launch=launch, does=does, module=module)
    yield "model.py", model_source
    yield from ((module.path, module.text) for module in modules.regions)
    yield from ((module.path, module.text) for module in modules.stages)
    if evaluation is not None:
        evaluated = emit(evaluation, folder=EVALUATION)
        yield from ((module.path, module.text) for module in evaluated.regions)
        yield from ((module.path, module.text) for module in evaluated.stages)
    of_place = _template("place.py.jinja")
    for place in place_codes(program, evaluation):
        yield f"ranks/pp_{place.place}.py", formatted(of_place.render(place=place))
    yield from _kernels(program)
    yield from _runtime(program, *([evaluation] if evaluation is not None else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionModule:
    """An emitted module of `regions/`."""

    region: str
    code: RegionCode
    text: str
    folder: str = ""  # within the package, with a slash

    @property
    def path(self) -> str:
        return f"{self.folder}regions/{self.code.module}.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModule:
    """An emitted module of `stages/`."""

    index: int
    code: StageCode
    text: str
    folder: str = ""

    @property
    def path(self) -> str:
        return f"{self.folder}stages/stage_{self.index}.py"


class StageModules(Sequence[StageModule]):
    """The emitted modules of all stages, each written on request."""

    def __init__(self, program: Program, codes: Mapping[str, RegionCode], folder: str) -> None:
        self._exchanges, self._codes, self._folder = program.derived(Exchanges), codes, folder
        self._written: dict[int, StageModule] = {}

    def __len__(self) -> int:
        return self._exchanges.program.stages

    @overload
    def __getitem__(self, index: int) -> StageModule: ...
    @overload
    def __getitem__(self, index: slice) -> list[StageModule]: ...
    def __getitem__(self, index: int | slice) -> StageModule | list[StageModule]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index not in self._written:
            program = self._exchanges.program
            code = stage_code(self._exchanges, index, self._codes, self._folder.replace("/", "."))
            text = _template("stage.py.jinja").render(stage=code, stages=program.stages, mesh=str(program.mesh))
            self._written[index] = StageModule(index=index, code=code, text=formatted(text), folder=self._folder)
        return self._written[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """The emitted modules of a program's regions and stages."""

    regions: tuple[RegionModule, ...]
    stages: StageModules


def emit(program: Program, *, folder: str = "") -> Modules:
    """The modules of all regions and stages, in a folder of the package."""
    codes = region_codes(program)
    of_region = _template("region.py.jinja")
    return Modules(
        regions=tuple(
            RegionModule(
                region=name,
                code=code,
                text=formatted(of_region.render(region=code, mesh=str(program.mesh))),
                folder=folder,
            )
            for name, code in codes.items()
        ),
        stages=StageModules(program, codes, folder),
    )


def _readme(program: Program, stages: list[StageCode], plan: Mapping[str, Any], report: Sequence[str]) -> str:
    forward = bool(program.results)
    script, _, _, first = SCRIPTS[forward]
    numbers = [math.prod(entry["shape"]) for entry in plan["parameters"].values() if entry["trainable"] or forward]
    return _template("README.md.jinja").render(
        name=program.name,
        mesh=str(program.mesh),
        ranks=program.mesh.size,
        launches=launches(program.mesh.size, plan["command"].get("nodes"), script),
        forward=forward,
        script=script,
        first=first,
        microbatches=program.microbatches,
        precision=plan["precision"],
        recompute=plan["command"].get("recompute", "none"),
        saved=readable(max(most_saved(program), default=0)),
        seed=plan["seed"],
        parameters=f"{sum(numbers):,} {'numbers, buffers included' if forward else 'trained'}",
        stages=[{"title": stage.title, "sends": ", ".join(entry.key for entry in stage.sends)} for stage in stages],
        communication=list(_communication(program, plan)),
        report=report,
        kernels=program.kernels == "triton",
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
    yield from _exchanges(program)


def _exchanges(program: Program) -> Iterator[dict[str, str]]:
    """Exchanges around a call of each region, and in sum the exchanges of each step."""
    sizes: dict[tuple[str, str, str], int] = {}
    first: dict[tuple[str, str], str] = {}
    for place, of, what, collective in _exchanged(program):
        name = f"{NAMES[collective.op]} of {what} {coded(collective)}".rstrip()
        if first.setdefault((place, what), of) == of:
            key = place, name, ", ".join(collective.axes) or collective.group
            sizes[key] = sizes.get(key, 0) + received(collective, program.sizes)
    yield from (_row(*key, size) for key, size in sizes.items())


_MOVED: Mapping[Subject, str] = {
    "gather": "parameters", "refresh": "parameters", "scatter": "gradients", "bucket": "gradients",
    "shared": "shared gradients",
}  # fmt: skip


def _exchanged(program: Program) -> Iterator[tuple[str, str, str, Collective]]:
    """Each exchange as (label of the place, call or "" for once per step, what travels, collective)."""
    regions = {call.name: call.region for call in program.calls}
    bodies = [body for body in program.bodies if body.kind != "INIT"]
    for body in sorted(bodies, key=lambda body: (body.kind == "END", body.index)):
        step = f"each step, {'pipeline rank' if body.kind == 'END' else 'stage'} {body.index}"
        for each in body.statements:
            around = each.subject in ("gather", "scatter")
            place, of = (f"around {regions[each.of]}", f"{each.of} {body.kind}") if around and each.of else (step, "")
            for collective in each.collectives if each.subject in _MOVED else ():
                if collective is not None:
                    yield place, of, _MOVED[each.subject], collective


def _row(place: str, what: str, axis: str, size: int) -> dict[str, str]:
    return {"place": place, "what": what, "axis": axis, "size": readable(size)}


def kernel_module(kernel: Kernel | FixedKernels) -> str:
    """The text of one kernel's module."""
    return formatted(_template(f"kernels/{kernel.template}.py.jinja").render(kernel=kernel))


def _kernels(program: Program) -> Iterator[tuple[str, str]]:
    """The kernels that stages call, and those that update parameters and compress gradients."""
    if program.kernels != "triton":
        return
    from partc.codegen.kernels.fixed import fixed_modules
    from partc.codegen.kernels.fused import kernels

    fused = tuple(kernels(program))
    others = tuple(fixed_modules(program))
    every: list[Kernel | FixedKernels] = [*fused, *others]
    for kernel in every:
        yield f"kernels/{kernel.name}.py", kernel_module(kernel)
    for name in ("functions", "interpreted", "scratch"):
        shared = importlib.resources.files("partc.kernels").joinpath(f"{name}.py")
        yield f"kernels/{name}.py", shared.read_text(encoding="utf-8")
    names = sorted([*(kernel.name for kernel in fused), *(each.name for each in others if each.alone)])
    modules = [each.name for each in others if not each.alone]
    yield "kernels/__init__.py", _template("kernels/__init__.py.jinja").render(names=names, modules=modules)


def _runtime(*programs: Program) -> Iterator[tuple[str, str]]:
    """The runtime library, unchanged. train.py imports all but three of its modules, directly or indirectly."""
    graphs = [graph for program in programs for region in program.regions for graph in region.graphs]
    needed = {
        "runtime/ops/compiled.py": any(program.kernels == "inductor" for program in programs),
        "runtime/ops/scan.py": any(op.name == SCAN for graph in graphs for op in graph.ops),
        "runtime/train/inference.py": bool(programs[0].results),
    }
    for path, text in _sources("runtime", importlib.resources.files("partc.runtime")):
        if needed.get(path, True):
            yield path, text


def _sources(path: str, folder: Traversable) -> Iterator[tuple[str, str]]:
    """The Python files of a folder and of those below it, by their paths."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            yield f"{path}/{entry.name}", entry.read_text(encoding="utf-8")
        elif entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(f"{path}/{entry.name}", entry)


def _template(name: str) -> jinja2.Template:
    return environment().get_template(name)
