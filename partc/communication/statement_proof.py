"""The proof that statements have exactly the exchanges that the types of parameters and gradients need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from partc.communication.exchanges import Chains, Exchanges, in_turn
from partc.errors import InternalError
from partc.ir.program import ActionStatement, Collective, GraphKind

Key = tuple[Any, ...]  # (subject, stage, name) of an exchange; for a scatter also the graph that computed the gradients


class StatementProof:
    """Checks the statements of the ranks at one pipeline coordinate as they run. Raises InternalError."""

    def __init__(self, exchanges: Exchanges, place: int) -> None:
        self._exchanges, self._place = exchanges, place
        # Exchange that has started -> its collectives.
        self._needed: dict[Key, tuple[tuple[Collective | None, ...], ...]] = {}

    def exchange(self, each: ActionStatement, key: Key, done: int) -> None:
        """Check the collectives of a statement; `done` counts the advances of its exchange."""
        if key not in self._needed:
            self._needed[key] = in_turn(self._chains(key))
        needed = self._needed[key]
        if each.verb == "wait" and done + 1 < len(needed):
            raise InternalError(f"{each} comes before the last of {len(needed)} collectives")
        if each.verb != "wait" and each.collectives != (needed[done] if done < len(needed) else ()):
            raise InternalError(f"the collectives of {each} differ from those that its types need")

    def _chains(self, key: Key) -> Chains:
        """The collectives of an exchange, from the types of its parameters or gradients."""
        subject, stage, name, *kind = key
        match subject:
            case "gather":
                return self._exchanges.gather(self._exchanges.program.call(stage, name).params)
            case "refresh":
                return self._exchanges.gather(self._exchanges.whole_copies(stage)[name])
            case "scatter":
                return self._exchanges.scatter(self._exchanges.program.call(stage, name), *kind)
            case "bucket":
                return self._exchanges.bucket_collectives(self._exchanges.program.bucket(name))
            case "shared":
                return self._exchanges.shared_sums(self._place)[name]
            case _:
                return self._exchanges.result_sums(self._place)[name]

    def step(self) -> None:
        """Check that a step has started every exchange that it needs, apart from gathers for calls."""
        missing = [key for key in self._keys() if key not in self._needed]
        if missing:
            subject, _, of, *_ = missing[0]
            raise InternalError(f"{subject} {of} does not start in a step")

    def _keys(self) -> Iterator[Key]:
        program = self._exchanges.program
        stages = program.stages_at(self._place)
        yield from (("bucket", bucket.stage, bucket.name) for bucket in program.buckets if bucket.stage in stages)
        yield from (("shared", self._place, name) for name in self._exchanges.shared_sums(self._place))
        yield from (("result", self._place, path) for path in self._exchanges.result_sums(self._place))
        kinds: tuple[GraphKind, ...] = ("B", "I", "W")
        for stage, kind in ((stage, kind) for stage in stages for kind in kinds if kind in program.kinds(stage)):
            calls = (call for call in program.calls_of(stage) if self._exchanges.scatters(call, kind))
            yield from (("scatter", stage, call.name, kind) for call in calls)
        for stage in stages if not program.results else ():
            kept = self._exchanges.whole_copies(stage)
            yield from (("refresh", stage, name) for name, names in kept.items() if self._exchanges.gather(names))
