"""Steps as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is the Trace Event Format (Duca and Sinclair 2016) as a JSON object: complete events (X), metadata (M), and
flows (s, f) from sends to their receivers, with times in microseconds.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from partc.cost.action_timeline import ActionTimeline
from partc.cost.forecast import Forecast, Scale
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.package.recorded_steps import Measured
from partc.runtime.clock import Interval
from partc.runtime.train.step_times import Split

COMPUTE, COMMUNICATION = 0, 1  # threads of a process
_THREADS = {COMPUTE: "compute", COMMUNICATION: "communication"}
_PREDICTED = 1_000_000  # process ids of predicted ranks begin here
_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|F|B|I|W)(\d*)")
# The purposes of collectives outside the schedule's actions, for places whose names do not tell.
_OTHERS = {
    ("the update", "all_reduce"): "the norm of the whole model's gradient",
    ("the update", "all_gather"): "every rank keeps the updated parameters whole",
    ("the loss's reduction", "all_reduce"): "the loss of the whole batch",
    ("the sum of shared weights' gradients", "all_reduce"): "stages that share weights sum their gradients",
}

Event = dict[str, Any]


def document(forecast: Forecast | None, measured: Measured | None, mesh: Mesh | None) -> str:
    """The text of a trace: the measured ranks, with the prediction above each pipeline coordinate and its basis in
    `otherData`.
    """
    events = list(_measured(measured, forecast, mesh)) if measured is not None else []
    about: dict[str, Any] = {"producer": "partc"}
    if measured is not None:
        about["clock"] = (
            "one machine's monotonic clock" if measured.one_machine else "each machine's time of day: as equal as they"
        )
        about["measured"] = summary(*measured.split)
    if forecast is not None:
        starts = [measured.span(step)[0] for step in measured.steps] if measured is not None else [0]
        first = min(starts)
        for start in starts:
            events.extend(_predicted(forecast, (start - first) / 1e3))
        events.extend(_predicted_names(forecast, measured is not None))
        about["predicted"] = summary(*predicted_split(forecast))
        about["prediction"] = basis_sentence(forecast, measured)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, ensure_ascii=False)


def basis_sentence(forecast: Forecast, measured: Measured | None) -> str:
    """The basis of a prediction, in one sentence."""
    if measured is None:
        return f"durations are those of {forecast.rates.basis}"
    return (
        f"durations are those of {forecast.rates.basis}, computation times {forecast.scale.compute:.3g} and "
        f"communication times {forecast.scale.communication:.3g}, so that each is as much in total as was measured: "
        "their shares, their order and all waiting are predicted"
    )


def summary(seconds: float, parts: Split) -> dict[str, float]:
    return {"seconds": seconds, **parts._asdict()}


def predicted_split(forecast: Forecast) -> tuple[float, Split]:
    """The seconds of the predicted step, and how they split on average."""
    return forecast.seconds, Split(*forecast.split())


def calibrated(forecast: Forecast, measured: Measured, mesh: Mesh) -> Forecast:
    """The forecast with total computation and total communication scaled to the measurement.

    The measured time of a collective is how long the last rank to arrive waited in it, if the wait follows the start
    immediately. Transfers count if the receiver was ready before the sender. So waiting for other ranks is not mistaken
    for slow communication.
    """
    work = sum(
        (1 if each.kind == "work" else -1) * (each.end - each.start)
        for rank in measured.ranks
        for step in rank.values()
        for each in step
        if each.kind != "aside"
    )
    together: dict[tuple[object, ...], list[Interval]] = {}
    for rank, steps in enumerate(measured.ranks):
        for step, intervals in steps.items():
            for key, each in _collectives(intervals):
                group = _group(mesh, rank, each.over)
                together.setdefault((step, *key, group), []).append(each)
    awaited = [(sent, got) for _, _, sent, got in measured.messages if got.start < sent.start < got.end]
    ranks = mesh.size // len(forecast.places) * len(measured.steps)  # ranks at one pipeline coordinate, times steps
    compute = ranks * sum(span.inside.compute for place in forecast.places for span in place)
    moving = sum(got.end - sent.start for sent, got in awaited)
    communication = sum(forecast.transfer(int(sent.over.split()[1])) for sent, _ in awaited)
    for times in together.values():
        last = min(times, key=lambda each: each.end - each.start)
        if last.start - last.posted <= last.end - last.start:  # else the message may have arrived long before
            moving += last.end - last.start
            communication += forecast.collective(last.name, last.over, last.bytes)
    return forecast.scaled(
        Scale(
            compute=work / 1e9 / compute if compute else 1.0,
            communication=moving / 1e9 / communication if communication and moving else 1.0,
        )
    )


def _collectives(intervals: Sequence[Interval]) -> Iterator[tuple[tuple[str, str, int], Interval]]:
    """Yields the collectives, with keys that are unique within a step: (action, axes, index)."""
    seen: dict[tuple[str, str], int] = {}
    for each in sorted((each for each in intervals if each.kind == "collective"), key=lambda each: each.posted):
        key = each.within, each.over
        seen[key] = seen.get(key, 0) + 1
        yield (*key, seen[key]), each


def _group(mesh: Mesh, rank: int, over: str) -> tuple[object, ...]:
    """A key common to the ranks that meet in a collective: their coordinates on the other axes."""
    axes = (PIPELINE_AXIS,) if over.startswith(f"{PIPELINE_AXIS} ") else tuple(over.split(","))
    return over, *((axis, place) for axis, place in mesh.coordinate(rank).items() if axis not in axes)


def _measured(measured: Measured, forecast: Forecast | None, mesh: Mesh | None) -> Iterator[Event]:
    first = min(measured.span(step)[0] for step in measured.steps)
    for rank, steps in enumerate(measured.ranks):
        place = "" if mesh is None else f" ({', '.join(f'{axis} {at}' for axis, at in mesh.coordinate(rank).items())})"
        yield from _names(rank, f"rank {rank}{place}", 2 * rank + 1)
        for step, intervals in steps.items():
            reasons = (
                {}
                if forecast is None
                else _reasons(intervals, forecast, forecast.program.mesh.coordinate(rank).get(PIPELINE_AXIS, 0))
            )
            for index, each in enumerate(intervals):
                yield _slice(each, rank, first, step, reasons.get(index, ""))
    for number, (sender, receiver, sent, got) in enumerate(measured.messages):
        left = sender, COMMUNICATION, (sent.start + sent.end - 2 * first) / 2e3
        yield from _flow(f"measured {number}", left, (receiver, COMMUNICATION, (got.end - first) / 1e3))


def _slice(each: Interval, rank: int, first: int, step: int, why: str) -> Event:
    args: dict[str, Any] = {"step": step}
    match = _ACTION.fullmatch(each.within or each.name)
    if match:
        args |= {"stage": int(match[1])} | ({"microbatch": int(match[3])} if match[3] else {})
    if each.kind in ("work", "aside"):
        thread = COMMUNICATION if match and match[2] not in ("F", "B", "I", "W") else COMPUTE
        name = each.name
    else:
        thread, name = COMMUNICATION, f"{each.name} {each.over}".removesuffix(" all links")
        args |= {"bytes": each.bytes, "within": each.within}
        if each.kind == "collective":
            args["axis"] = each.over
        if each.start > each.posted:
            args["started_before_us"] = (each.start - each.posted) / 1e3
        if why:
            args["why"] = why
    return _complete(name, each.kind, rank, thread, (each.start - first) / 1e3, (each.end - each.start) / 1e3, args)


def _reasons(intervals: Sequence[Interval], forecast: Forecast, place: int) -> dict[int, str]:
    """The purposes of collectives, for actions that start as many collectives as the plan has."""
    places = sorted((each.start, each.name) for each in intervals if each.kind in ("work", "aside"))
    by_action: dict[tuple[float, str], list[int]] = {}
    for index, each in enumerate(intervals):
        if each.kind == "collective":
            at = bisect_right(places, each.posted, key=lambda place: place[0]) - 1
            by_action.setdefault(places[max(0, at)], []).append(index)
    found: dict[int, str] = {}
    for (_, name), indices in by_action.items():
        match = _ACTION.fullmatch(name)
        found.update((index, _OTHERS.get((name, intervals[index].name), name)) for index in indices if not match)
        indices.sort(key=lambda index: intervals[index].posted)
        made = [(intervals[index].name, intervals[index].over) for index in indices]
        plans = [forecast.once(place)] if name == "prepare" else []
        if match:
            number = int(match[3]) if match[3] else None
            plans += [forecast.action(int(match[1]), match[2], number, updates=updates) for updates in (False, True)]
        for planned in (plan.collectives for plan in plans):
            if made == [(part.segment.op, part.segment.over) for part in planned]:
                found.update((index, part.why) for index, part in zip(indices, planned, strict=True))
    return found


def _predicted(forecast: Forecast, begin: float) -> Iterator[Event]:
    """Yields the events of a predicted step that starts `begin` microseconds after the start of the trace."""
    drawn: dict[str, tuple[int, float, float]] = {}  # process, start, end
    for place, spans in enumerate(forecast.places):
        process = _PREDICTED + place
        for span in spans:
            args = {"predicted": True}
            start, length = begin + span.start * 1e6, span.inside.seconds * 1e6
            yield _complete(span.name, "work", process, COMPUTE, start, length, args)
            yield from _moves(span.inside, span.name, process, start)
            drawn[span.name] = process, start, start + length
    for number, (stage, source, target) in enumerate(forecast.arrivals()):
        (process, _, at), (other, arrival, _) = drawn[source], drawn[target]
        length = forecast.transfer(stage) * 1e6
        yield _complete(f"send to {target}", "send", process, COMMUNICATION, at, length, {"predicted": True})
        yield from _flow(f"predicted {begin:.3f} {number}", (process, COMMUNICATION, at), (other, COMPUTE, arrival))


def _moves(inside: ActionTimeline, within: str, process: int, start: float) -> Iterator[Event]:
    for piece in inside.pieces:
        segment = piece.segment
        if segment.op:
            args = {
                "predicted": True, "axis": segment.over, "bytes": segment.bytes, "within": within, "why": piece.why,
            }  # fmt: skip
            at, length = start + piece.start * 1e6, segment.seconds * 1e6
            yield _complete(f"{segment.op} {segment.over}", "collective", process, COMMUNICATION, at, length, args)


def _predicted_names(forecast: Forecast, beside: bool) -> Iterator[Event]:
    mesh = forecast.program.mesh
    for place in range(len(forecast.places)):
        ranks = [rank for rank in range(mesh.size) if mesh.coordinate(rank).get(PIPELINE_AXIS, 0) == place]
        name = f"predicted: {PIPELINE_AXIS} {place}" if len(forecast.places) > 1 else "predicted"
        yield from _names(_PREDICTED + place, name, 2 * ranks[0] if beside else place)


def _names(process: int, name: str, order: int) -> Iterator[Event]:
    def metadata(kind: str, thread: int, **args: object) -> Event:
        return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args}

    yield metadata("process_name", COMPUTE, name=name)
    yield metadata("process_sort_index", COMPUTE, sort_index=order)
    for thread, text in _THREADS.items():
        yield metadata("thread_name", thread, name=text)
        yield metadata("thread_sort_index", thread, sort_index=thread)


def _complete(
    name: str, kind: str, process: int, thread: int, start: float, length: float, args: Mapping[str, Any]
) -> Event:
    return {
        "ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread, "ts": round(start, 3),
        "dur": round(length, 3), "args": dict(args),
    }  # fmt: skip


def _flow(identity: str, source: tuple[int, int, float], target: tuple[int, int, float]) -> Iterator[Event]:
    """An arrow between the slices around two points, each given as process, thread and time."""
    for phase, (process, thread, at) in (("s", source), ("f", target)):
        event = {"ph": phase, "name": "transfer", "cat": "transfer", "id": identity, "pid": process, "tid": thread}
        yield event | {"ts": round(at, 3)} | ({"bp": "e"} if phase == "f" else {})
