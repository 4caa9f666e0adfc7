"""Forward-only programs, such as the evaluation of a training, on its mesh and with its parameters."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from partc import passes
from partc.compilation.coupling import apart_if_coupled, coupling_sentence
from partc.compilation.options import Options
from partc.errors import PartcError
from partc.frontend.captured_program import Batches
from partc.ir.mesh import is_tensor_axis
from partc.ir.program import Parameter, Program
from partc.passes.tables import table_cut
from partc.rules.layout_check import Verifier
from partc.sharding.pins import Pin

Trace = Callable[[Batches], Program]

# The last passes that run as in a training: over regions, so that composites have the same form, and over parameters,
# so that parts are the same.
_REGIONS, _PARAMETERS = "stages", "zero"


def evaluation(trace: Trace, training: Program, options: Options) -> tuple[Program, tuple[str, ...]]:
    """The finished program of `evaluate` for a finished training, and warnings; `trace` returns its trace.

    Each stage holds the parameters of the training's stage, and is sent others. Raises PartcError P0420 if parameters
    cannot stay where the training has them, and the errors of the trace.
    """
    if training.steps is not None:
        raise PartcError(
            "P0420",
            f"forward sets {training.steps.values[0].name} in the first step, which an evaluation cannot follow",
            help="give it a tensor in the constructor: self.register_buffer(NAME, torch.zeros(SIZE))",
        )
    trained = {name for parameter in training.parameters if parameter.trainable for name in parameter.names}

    def finished(separate: bool) -> Program:
        traced = trace(Batches(microbatches=options.microbatches, separate=separate))
        parameters = tuple(replace(item, trainable=item.name in trained) for item in traced.parameters)
        return _finished(replace(traced, parameters=parameters), training, options)

    program, coupling = apart_if_coupled(finished)
    return program, () if coupling is None else (f"evaluate(): {coupling_sentence(coupling, options.microbatches)}",)


def forward_only(
    traced: Program,
    options: Mapping[str, Any],
    *,
    until: str | None = None,
    observe: passes.Observer = lambda step: None,
) -> tuple[passes.PassResult, ...]:
    """Run the passes for a forward-only program, up to `until`: nothing is trained, saved, summed or updated.

    Raises PartcError P0420 if it draws random numbers.
    """
    known = {
        **options,
        "forward_only": True,
        "recompute": "none",
        "budget": None,
        "loss_chunks": 1,
        "router_bias_rate": 0.0,
        "compress": "",
    }
    known["kernels"] = "aten"
    verify = Verifier()
    steps: tuple[passes.PassResult, ...] = ()
    program, behind = traced, None
    for last, frozen in ((_REGIONS, _without_gradients), (_PARAMETERS, _untrained)):
        early = until is not None and passes.known(until) in (*passes.before(last), last)
        end = until if early else last
        steps += passes.run(program, known, until=end, behind=behind, verify=verify, observe=observe)
        if early:
            return steps
        program, behind = frozen(steps[-1].program), last
    steps += passes.run(program, known, until=until, behind=behind, verify=verify, observe=observe)
    if program.draws:
        help = "make them in batch(), as entries; models are in evaluation mode, without dropout"
        raise PartcError("P0420", "the function draws random numbers, which a forward-only program cannot", help=help)
    return steps


def _without_gradients(program: Program) -> Program:
    transfers = tuple(replace(transfer, gradient=False) for transfer in program.transfers)
    regions = tuple(replace(region, backward=None, saved=()) for region in program.regions)
    return replace(program, transfers=transfers, regions=regions)


def _untrained(program: Program) -> Program:
    return replace(program, parameters=tuple(replace(item, trainable=False, reduce=()) for item in program.parameters))


def _finished(traced: Program, training: Program, options: Options) -> Program:
    model = {name for item in traced.parameters for name in item.names}
    # The training's own counters of rows are no parameters of the model; whole tables are placed by `stacks`.
    pinned = [item for item in training.parameters if not (item.members or model.isdisjoint(item.names))]
    pins = tuple(map(_pin, pinned))
    orders = {item.name: item.sectioned for item in training.parameters if item.sectioned}
    known = {**options.for_passes, "pins": pins, "orders": orders, "held_by": training.holders()}
    known["home"] = training.maker(training.loss).stage
    known["whole"] = frozenset(item.name for item in training.parameters if not item.gather)
    known["cut_tables"] = {item.name: cut for item in training.parameters if (cut := table_cut(item, training.sizes))}
    known["sparse_tables"] = {name for item in training.parameters if item.sparse for name in item.names}
    known["stacks"] = tuple(item for item in training.parameters if item.members)
    try:
        finished = forward_only(traced, known)[-1].program
    except PartcError as error:
        if error.code != "P0302":
            raise
        cause = error.cause.replace("--shard pins", "the training cuts")
        help = f"pin it in the training with --shard NAME=LAYOUT; in evaluate(), {error.help}"
        raise PartcError("P0420", cause, help=help) from error
    _check_shared(finished, training)
    return finished


def _pin(parameter: Parameter) -> Pin:
    """The parameter's placement over tp, as a pin, without the rows that the cut of a table adds later, and without
    the cuts of ZeRO.
    """

    def placed(axis: str) -> bool:
        return is_tensor_axis(axis) and axis not in parameter.gather

    dims = tuple(
        tuple((sub.size, tuple(filter(placed, sub.axes))) for sub in dim)
        if any(placed(axis) for sub in dim for axis in sub.axes)
        else ((None, ()),)
        for dim in parameter.type.layout.dims
    )
    return Pin(pattern=glob.escape(parameter.name), text=str(parameter.type.layout), dims=dims)


def _check_shared(program: Program, training: Program) -> None:
    """Check that each stage of an evaluation holds parts of parameters that it holds in training, and that results are
    where the loss is. Raises PartcError P0420.
    """
    if _home(program) != _home(training):
        raise _moved_error("evaluate() makes a result on another pipeline rank than the loss")
    theirs = {parameter.name: parameter for parameter in training.parameters}
    stages, homes = training.holders(), program.holders()
    for parameter in program.parameters:
        if not homes.get(parameter.name):
            continue
        other = theirs.get(parameter.name)
        if other is None or _part(other) != _part(parameter):
            held = "none" if other is None else str(other.type)
            raise _moved_error(f"{parameter.name} is {parameter.type} in evaluate(), and {held} in the training")
        if not set(homes[parameter.name]) <= set(stages.get(parameter.name, ())):
            cause = f"evaluate() reads {parameter.name}, which the training does not read"
            raise PartcError("P0420", cause, help="read it in the loss, too, or make it an entry of eval_data")


def _home(program: Program) -> int:
    """The pipeline rank that computes the loss, or the results."""
    places = {
        name: program.place(call.stage) for call in program.calls for name in call.results if name in program.returned
    }
    return next(iter(places.values())) if len({*places.values()}) == 1 else -1


def _part(parameter: Parameter) -> tuple[object, ...]:
    layout = replace(parameter.type.layout, varying=())  # varying axes concern sums of gradients alone
    return parameter.type.dtype, layout, parameter.gather, parameter.holds, parameter.sectioned


def _moved_error(cause: str) -> PartcError:
    return PartcError("P0420", cause, help="pin it with --shard, or compute the value as the loss does")
