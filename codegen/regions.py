"""The regions of a program as code: one module each, whatever stages call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partc.codegen.calls import location, runs
from partc.codegen.functions import region_code
from partc.codegen.names import region_names
from partc.codegen.source import RegionCode
from partc.communication.exchanges import Exchanges
from partc.ir.gradients import input_only
from partc.ir.naming import listed
from partc.ir.program import Call, Phase, Program, Region
from partc.rules.strides import dense

_PHASES: dict[Phase, str] = {
    "setup": "A constant of the model",
    "step": "Counted over the batch, once per step",
    "microbatch": "Made from the batch alone",
}
_UNWEIGHTED = "Made from values of earlier calls, without parameters"


def region_codes(program: Program) -> dict[str, RegionCode]:
    """The code of every region that some stage calls, by the region's name, in the order of the calls."""
    exchanges = program.derived(Exchanges)
    names = tuple(dict.fromkeys(call.region for call in program.calls))
    called = region_names(names)
    contiguous = dense(program)
    titles, pure = _titles(program), input_only(program)
    codes = {}
    for name in names:
        region, here = program.region(name), program.calls_to(name)
        title = _PHASES[region.phase] if here[0].name in pure else _UNWEIGHTED
        title = listed(titles[name]) if region.params else title
        codes[name] = region_code(
            region,
            program.sizes,
            here[0].name,
            f"{title}{location(region)}.",
            called[name],
            _updated(program, region, here[0]),
            returned=_read(program, here),
            gives=program.zero >= 2 and exchanges.has_unit(here[0]),
            dense=contiguous[name],
            compiled=region.kernels == "inductor",
        )
    return codes


def _titles(program: Program) -> Mapping[str, Sequence[str]]:
    """Titles of the calls of each region, in runs, whatever their stage."""
    whole = replace(program, transfers=())
    found: dict[str, list[str]] = {}
    for phase in _PHASES:
        for run in runs(whole, [call for call in program.calls if program.region(call.region).phase == phase]):
            found.setdefault(run.region.name, []).append(run.title)
    return found


def _updated(program: Program, region: Region, call: Call) -> dict[int, str]:
    """Map positions of outputs that are next values of buffers to the buffers' names in the region."""
    local = {name: value.name for name, value in zip(call.params, region.params, strict=True)}
    buffers = {value: buffer for buffer, value in program.updates}
    return {index: local[buffers[name]] for index, name in enumerate(call.results) if name in buffers}


def _read(program: Program, calls: Sequence[Call]) -> frozenset[int]:
    """The positions of results that another call, another stage or the caller of the program reads."""
    needed = {name for call in program.calls for name in call.args} | set(program.returned)
    return frozenset(index for call in calls for index, name in enumerate(call.results) if name in needed)
