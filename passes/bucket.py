"""Decide when the sums of gradients over ranks start: in buckets, during the backward pass.

    parameter embed.weight: f32[256, 64] reduce(dp)  ->  parameter embed.weight: f32[256, 64] reduce(dp) bucket(embed)
    parameter blocks.0.w: f32[64, 64] reduce(dp)         parameter blocks.0.w: f32[64, 64] reduce(dp) bucket(embed)
    parameter blocks.1.w: f32[64, 64] reduce(dp)         parameter blocks.1.w: f32[64, 64] reduce(dp) bucket(blocks.1)
    parameter head.weight: f32[256, 64] reduce(dp)       parameter head.weight: f32[256, 64] reduce(dp) bucket(blocks.1)
                                                         bucket embed: sum over dp in stage 0 after embed
                                                         bucket blocks.1: sum over dp in stage 0 after blocks.1

A gradient is complete when the last microbatch has passed the backward of the last call that uses its parameter.
Gradients that are summed over the same axes collect in a bucket. Its sum starts right after the call that completes it
(Li et al. 2020, PyTorch Distributed, section 3.2.3), and is waited for at the step's end. ZeRO 1 scatters buckets in
the same way, where whole gradients count towards the size; ZeRO 2 and 3 scatter gradients after every microbatch.
Compressed gradients collect only with those of parameters that the same axes cut. Gradients of weights that several
stages share are summed at the step's end: if several stages of a rank use a weight, by the last of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from partc.communication.exchanges import Exchanges, GradientSums, gradients_of, graph_of
from partc.ir.layout import Sizes
from partc.ir.naming import unique
from partc.ir.program import Bucket, Call, DType, GraphKind, Parameter, Program, Transport

BUCKET = 25_000_000  # the least number of bytes in a bucket
_PART = 1_000_000  # the least bytes of a scattered bucket for each rank; smaller parts are bound by latency


def bucket(
    program: Program,
    *,
    bucket: int = BUCKET,
    halves: bool = False,
    near: tuple[str, ...] = (),
    wire: DType | Literal[""] = "",
    compress: str = "",
) -> Program:
    """Set the buckets of gradients and the program's `transport`.

    With `halves`, every backward pass runs in two parts, and gradients of parameters are complete after the second.
    """
    items = program.parameters
    moved = {axis for item in items for axis in (*item.reduce, *item.gather)}
    summed = any(item.trainable and (item.reduce or item.gather) for item in items)
    inside = tuple(axis for axis in program.mesh.names if axis in near and axis in moved)
    transport = Transport(near=inside, wire=wire if summed else "", compress=compress if summed else "")
    buckets: list[Bucket] = []
    taken: set[str] = set()
    of: dict[str, tuple[str, ...]] = {}
    exchanges = program.derived(Exchanges)
    for stage in range(program.stages):
        early = program.zero < 2
        split = halves or stage in program.split_stages
        after = dict(_of_stage(program, stage, bucket, split, transport)) if early else {}
        for each, names in _together_in(exchanges.sums(stage), after, transport):
            name = each.after or f"stage.{stage}"
            name = f"{'_'.join(each.over)}.{name}" if name in taken else name
            buckets.append(replace(each, name=unique(name, taken)))
            of.update((name, (*of.get(name, ()), buckets[-1].name)) for name in names)
    chosen = [(item, of.get(item.name, ())) for item in items]
    parameters = tuple([item if item.buckets == names else item.replaced(buckets=names) for item, names in chosen])
    return replace(program, parameters=parameters, transport=transport, buckets=tuple(buckets))


def _together_in(
    sums: GradientSums, after: Mapping[str, str], transport: Transport
) -> Iterator[tuple[Bucket, list[str]]]:
    """The buckets of a stage with their parameters: first the scattered ones, which every stage that uses a weight has,
    then the summed ones.
    """
    found: dict[tuple[bool, tuple[str, ...], str, str, frozenset[str]], list[str]] = {}
    for parameter in sums.trained:
        scattered, last, dtype = parameter.zero == 1, after.get(parameter.name, ""), parameter.type.dtype
        apart = transport.apart(parameter)
        if scattered:
            found.setdefault((True, parameter.gather, last, dtype, apart), []).append(parameter.name)
        if over := sums.axes(parameter):
            found.setdefault((False, over, "" if scattered else last, dtype, apart), []).append(parameter.name)
    for key in sorted(found, key=lambda key: not key[0]):
        scattered, over, last, *_ = key
        yield Bucket(name="", stage=sums.stage, over=over, after=last, scattered=scattered), found[key]


def _of_stage(
    program: Program, stage: int, bucket: int, halves: bool, transport: Transport
) -> Iterator[tuple[str, str]]:
    """The parameters that only this stage uses, each with the call that completes its bucket."""
    holders = program.holders()
    waiting: dict[tuple[object, ...], list[str]] = {}
    call = ""
    for call, names in _completed(program, stage, halves):
        for name in names:
            key = _bucket_key(program.parameter(name), program.sizes, transport)
            if key and holders[name] == (stage,):
                waiting.setdefault(key, []).append(name)
        for key, found in list(waiting.items()):
            if _is_full([program.parameter(name) for name in found], program.sizes, bucket):
                yield from ((name, call) for name in waiting.pop(key))
    yield from ((name, call) for names in waiting.values() for name in names)


def _is_full(parameters: Sequence[Parameter], sizes: Sizes, bucket: int) -> bool:
    """Whether a bucket has reached its size; scattered gradients are counted whole."""
    ways = math.prod(sizes[axis] for axis in parameters[0].gather)
    part = sum(parameter.type.local_bytes(sizes) for parameter in parameters)
    return part >= max(bucket / ways, min(bucket, _PART))


def _bucket_key(parameter: Parameter, sizes: Sizes, transport: Transport) -> tuple[object, ...]:
    """The key of a gradient's bucket; empty for a gradient that is not summed over ranks."""
    over = parameter.gather or tuple(axis for axis in parameter.reduce if sizes[axis] > 1)
    key = bool(parameter.gather), over, parameter.type.dtype, transport.apart(parameter)
    return key if parameter.trainable and over else ()


def _completed(program: Program, stage: int, split: bool) -> Iterator[tuple[str, list[str]]]:
    """Calls in the order of their backward passes, each with the parameters whose gradients it completes.

    Separate graphs for gradients of weights run after all other backward graphs.
    """
    calls = program.calls_of(stage)
    runs: Mapping[GraphKind, Sequence[Call]] = {"I": calls[::-1], "W": calls} if split else {"B": calls[::-1]}
    *_, last = runs
    order = [call.name for call in runs[last] if graph_of(program.region(call.region), last) is not None]
    first = next(iter(order), "")
    completing: dict[str, str] = {}  # parameter -> the call that completes its gradient
    for kind, played in runs.items():
        for call in played:
            names = gradients_of(program.region(call.region), call, kind)
            completing.update(dict.fromkeys(names, call.name if kind == last else first))
    completed: dict[str, list[str]] = {}
    for name, maker in completing.items():
        completed.setdefault(maker, []).append(name)
    for maker in order:
        yield maker, completed.get(maker, [])
