"""The exchanges of an emitted Stage outside its calls: those once per step, and those between its actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from partc.codegen.access import (
    AHEAD,
    SCATTERS,
    indented,
    name_tuple,
    opening_units,
    refresh_lines,
    said_of,
    two_scatters,
)
from partc.codegen.source import Line
from partc.codegen.stage_facts import StageFacts
from partc.ir.folding import Loop, folded
from partc.ir.program import ActionStatement, BodyKind
from partc.quoting import literal

_FIRST = "Parameters that each action gathers first. An earlier action starts these gathers."
_METHODS: Mapping[str, BodyKind] = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


@dataclass(frozen=True)
class StageEnds:
    facts: StageFacts

    def init(self) -> list[Line]:
        """The gathers of parameters that stay whole and never change, and the attributes of exchanges."""
        scatters = any(each.subject == "scatter" for each in self.facts.body("REDUCE_GRAD"))
        attributes = SCATTERS[: 1 + two_scatters(self.facts)] if scatters else ()
        pending = [Line(code=f"self.{name} = DONE", uses=frozenset({"DONE"})) for name in attributes]
        return [*refresh_lines(self.facts, "INIT"), *pending, *self._first_units()]

    def _first_units(self) -> list[Line]:
        """The table of the units that actions gather first."""
        found = {kind: opening_units(self.facts, kind) for kind in _METHODS.values()}
        rows = [f'    "{kind}": ({", ".join(units)},),' for kind, units in found.items() if units]
        table = [Line(code="self.first_units = {", notes=(_FIRST,)), *(Line(code=row) for row in rows), Line(code="}")]
        return table if rows else []

    @property
    def lookahead(self) -> int:
        """The gathers of later actions that an action starts; 0 if none does."""
        return self.facts.exchanges.levels if any(opening_units(self.facts, kind) for kind in _METHODS.values()) else 0

    def ahead(self) -> dict[str, str]:
        """The methods' parameters for gathers of later actions."""
        typed = "".join(f", {name}: Unit" for name in AHEAD[: self.facts.exchanges.levels])
        return {method: typed if opening_units(self.facts, kind) else "" for method, kind in _METHODS.items()}

    def reduce(self) -> list[Line]:
        """The waits and sums after a stage's last backward pass."""
        lines: list[Line] = []
        for when, statements in groupby(self.facts.body("REDUCE_GRAD"), key=lambda each: each.when):
            lines.extend([Line(code=f"if {when}:")] if when else [])
            lines.extend(indented(self._sums(list(statements)), "    " if when else ""))
        return lines

    def _sums(self, statements: Sequence[ActionStatement]) -> Iterator[Line]:
        bare = [replace(each, collectives=()) for each in statements]
        at = 0
        for item in folded(bare):
            each_turn, turns = (item.statements, len(item.slots[0])) if isinstance(item, Loop) else ((item,), 1)
            end = at + turns * len(each_turn)
            if isinstance(item, Loop) and len(item.slots) == 1 and len(set(item.slots[0])) == turns:
                yield Line(code=f"for name in {name_tuple([str(name) for name in item.slots[0]])}:")
                for offset, each in enumerate(each_turn):
                    notes = said_of(self.facts, statements[at + offset : end : len(each_turn)])
                    yield Line(code=f"self.sums[name].{each.verb}()", notes=notes, indent="    ")
            else:
                yield from map(self._sum, statements[at:end])
            at = end

    def _sum(self, each: ActionStatement) -> Line:
        if each.subject == "scatter":
            return Line(code=f"self.{SCATTERS[each.behind - 1]}.{each.verb}()")
        return Line(code=f"self.sums[{literal(each.of)}].{each.verb}()", notes=said_of(self.facts, [each]))

    def refresh(self) -> list[Line]:
        """The gathers of parameters that stay whole, at the start of a step."""
        gathers = list(refresh_lines(self.facts, "REFRESH"))
        notes = said_of(self.facts, self.facts.body("REFRESH"), "as each rank has updated a part")
        return [replace(line, notes=notes if index == 0 else ()) for index, line in enumerate(gathers)]

    @property
    def refreshes(self) -> bool:
        """Whether the first forward pass waits for parameters that stay whole."""
        return any(each.when == "first" for each in self.facts.body("F"))
