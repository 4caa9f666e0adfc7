"""State that a trace would silently freeze: changes outside the graph, and random draws, in forward.

    def forward(self, x):
        self.calls += 1                       # harmless: nothing that is traced reads it
        return x * self.calls                 # refused: every step of a package would multiply by the first number

A model is traced a second time if its first trace changed attributes, globals or random states, or if the user's code
names clocks or random numbers. If both traces give the same graph, the change is harmless. Tensors that forward keeps
are caches if they consist of constants.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from partc.errors import PartcError
from partc.frontend.state.change_sources import change_source, refusal
from partc.frontend.state.later_traces import LaterTraces, attributes_restored, places_of
from partc.frontend.state.other_numbers import TRIES, is_generator, other_numbers
from partc.frontend.state.set_by_data import check_data
from partc.frontend.state.snapshots import State
from partc.frontend.state.state_watch import StateWatch
from partc.frontend.state.stateful_code import CLOCKS, may_keep_state
from partc.frontend.state.trace_comparison import effects_signature, first_difference
from partc.frontend.state.value_places import ValuePlaces, value_places
from partc.replaced import all_replaced

SHIFT = 200_451.37  # seconds by which a second trace sets clocks ahead: another hour and another weekday


def check(
    exported: torch.export.ExportedProgram,
    watch: StateWatch,
    again: Callable[[], torch.export.ExportedProgram],
    assume: Callable[[str], None],
    *,
    kept: bool,
    tried: Set[tuple[str, str]] = frozenset(),
    stops: tuple[type[Exception], ...] = (),
) -> None:
    """Refuse changes and random draws in forward that affect the trace; list draws that do not, as assumptions. Raises
    PartcError P0225.

    `again` traces once more. It is called only if something has changed, or if a package may be built from the trace
    (`kept`) and the code names clocks or random numbers, or may keep state. Where no package is built from the trace,
    changes of state that another trace has `tried` do not count. An error among `stops` means that the model has to be
    captured in another way.
    """
    state, first = watch.state, dict(watch.changes)
    if state is None:
        return
    for change in first.values():
        seeds = change.key == ("torch", "generator")
        if change.always or (seeds and draws_random_numbers(exported)):
            raise refusal(change, state)
    if kept:
        check_data(state.modules)
    changed = first.keys() if kept else first.keys() - tried
    if not changed and not (kept and may_keep_state(state.modules)):
        return
    plain, known = effects_signature(exported), {*exported.graph_signature.inputs_to_buffers.values()}
    stores = (vars(each) for each in (*watch.model.modules(), *state.modules))
    generators = [value for store in stores for value in [*store.values()] if is_generator(value)]
    drawn = [key for key in first if key[0] in ("random", "numpy.random")]
    begun: ValuePlaces | None = None
    for attempt in range(1, 1 + TRIES):
        with attributes_restored(watch.model):
            watch.go_on()
            begun = value_places(places_of(watch, first.values()))
            try:
                with other_times(state, attempt), other_numbers(attempt, generators) as moved:
                    other = effects_signature(again(), known)
            except (PartcError, AssertionError):  # the export meets a tensor that the first trace kept
                other = ()
        settled = not any(
            change.tensors or watch.has_tensors(key) for key, change in watch.changes.items() if key in first
        )
        if (node := first_difference(plain, other, filled=settled)) is not None:
            still = [change for key, change in first.items() if key in watch.changes] or list(first.values())
            source = node.source if other else None
            # An object may have several names, of which the user's lines change one.
            located = (change for change in still if change_source(change, state) is not None)
            raise refusal(next(located, next(iter(still), None)), state, source)
        if not drawn and not moved:
            break
    for change in map(first.__getitem__, drawn):
        line = change_source(change, state)
        where = "" if line is None else f" ({line})"
        drawing = f"Packages draw nothing from Python's {change.key[0]} module"
        assume(f"{drawing}: {TRIES} traces with other numbers were equal{where}.")
    assert begun is not None
    traces = LaterTraces(
        plain=plain, known=known, watch=watch, again=again, changes=[*first.values()], stops=stops,
        ends=(*watch.ends,), contents=watch.contents,
    )  # fmt: skip
    for sentence in traces.check(begun):
        assume(sentence)


def draws_random_numbers(exported: torch.export.ExportedProgram) -> bool:
    """Whether the graph draws random numbers."""
    nodes = (node for module in exported.graph_module.modules() for node in getattr(module, "graph", fx.Graph()).nodes)
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in nodes)


@contextmanager
def other_times(state: State, seed: int) -> Iterator[None]:
    """A context with shifted clocks."""
    originals = {name: getattr(time, name) for name in CLOCKS}
    shifted = {name: _shifted_clock(clock, SHIFT * seed, name) for name, clock in originals.items()}
    places: list[tuple[Any, str]] = [(time, name) for name in CLOCKS]
    by_identity = {id(clock): name for name, clock in originals.items()}
    for home in state.modules:
        places += [(home, name) for name, value in vars(home).items() if id(value) in by_identity]
    clocks = [(home, name, shifted[by_identity[id(getattr(home, name))]]) for home, name in places]
    with all_replaced(clocks):
        yield


def _shifted_clock(clock: Any, shift: float, name: str) -> Any:
    by = int(shift * 1e9) if name.endswith("_ns") else shift
    return lambda: clock() + by
