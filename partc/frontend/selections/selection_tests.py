"""Tests whether masks select anything: a trace chooses their outcomes, and its graph records them."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from partc.errors import PartcError, Source, untraced
from partc.frontend import torch_call
from partc.frontend.by_tensor import ByTensor
from partc.frontend.statements import enclosing_nodes
from partc.installed import is_machinery, line_of, user_frame

# The mark of a test whether tensors are zero, in the elements `first` to `last - 1` or in all, its line and outcome. A
# loop's iterations carry the loop's depth; the mark at the end of a loop has no tensors.
TESTED = "selection_tested"
MOST_TESTS = 32  # tests after which a `while` loop counts as endless
_library = torch.library.Library("partc", "FRAGMENT")
_library.define(f"{TESTED}(Tensor[] tested, int first, int last, int loop, str line, bool outcome) -> ()")
_library.impl(TESTED, lambda tested, first, last, loop, line, outcome: None, "CompositeExplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.partc.selection_tested.default)
_OWN = (str(Path(__file__).parent), torch_call.__file__)  # their frames lie between a model's code and a test
_Elements = tuple[int, int, int]  # (version of a mask, first element, last element)


@dataclass(frozen=True, slots=True)
class Iterations:
    """The places of a mask's elements; the model may iterate over them, or index with them as with `tensor`."""

    tensor: Tensor
    _tests: SelectionTests
    _mask: Tensor
    _places: Sequence[Any] | None  # None if only constants would be known
    _sources: Sequence[Source]

    def __iter__(self) -> Iterator[Any]:
        if self._places is None:
            raise _unlisted(next(iter(self._sources), None))
        return self._tests.iterations(self._mask, self._places, self._sources)


class SelectionTests:
    """The tests of one trace. `frame` is the running frame of the model's code."""

    def __init__(
        self,
        selects: Callable[[int], bool],
        call: Callable[[], int],
        guard: Callable[[FrameType | None], bool | None],
        branch: Callable[[Tensor], bool],
        joined: Collection[str],
    ) -> None:
        """`selects` returns the outcome of a test, given its number within its `call`. `guard` returns the outcome of a
        test in a frame if its other outcome only raises. On the lines `joined`, a test is a `branch`.
        """
        self.sources: list[Source] = []
        self.frame: FrameType | None = None
        self._selects, self._call, self._guard = selects, call, guard
        self._branch, self._joined = branch, joined
        self._loops = 0  # the number of running loops over places
        self._outcomes: ByTensor[dict[_Elements, bool]] = ByTensor()
        self._numbers: Counter[int] = Counter()  # the number of tests in each call
        self._in_while = 0

    def nonempty(self, tested: Tensor, first: int = -1, last: int = -1) -> bool:
        """Whether a mask selects anything, or whether one of its elements `first` to `last - 1` is set, in this trace.

        The graph records the test.
        """
        self._in_while += any(isinstance(node, ast.While) for node in enclosing_nodes(self.frame))
        if self._in_while > MOST_TESTS:
            raise _endless_loop(next(self.source(), None))
        line = str(next(self.source(), ""))
        if first == -1 and line in self._joined:
            return self._branch(tested)
        self.sources.extend(self.source())
        outcome = self._outcome(tested, first, last)
        torch.ops.partc.selection_tested.default([tested.detach()], first, last, 0, line, outcome)
        return outcome

    def _outcome(self, tested: Tensor, first: int, last: int) -> bool:
        """The outcome of a test. Tests of the same elements of one mask have the same outcome."""
        known = self._outcomes.get(tested)
        if known is None:
            known = self._outcomes[tested] = {}
        key = tested._version, first, last
        if key not in known:
            call = self._call()
            known[key] = self._selects(self._numbers[call])
            self._numbers[call] += 1
        return known[key]

    def parts(self, counts: Tensor, first: int, last: int) -> list[int]:
        """The parts `first` to `last - 1` without those that tests have found empty."""
        known = self._outcomes.get(counts) or {}
        return [part for part in range(first, last) if known.get((counts._version, part, part + 1), True)]

    @property
    def most(self) -> int:
        """The largest number of different tests in one call."""
        return max(self._numbers.values(), default=0)

    def iterations(self, mask: Tensor, places: Sequence[Any], sources: Sequence[Source]) -> Iterator[Any]:
        """Iterate over the places of a mask's elements, with a recorded test for each."""
        line = str(next(iter(sources), ""))
        if line in self._joined:
            yield from (place for element, place in zip(mask, places, strict=True) if self._branch(element))
            return
        self.sources.extend(sources)
        self._loops += 1
        loop = self._loops
        try:
            for number, place in enumerate(places):
                outcome = self._outcome(mask, number, number + 1)
                torch.ops.partc.selection_tested.default([mask.detach()], number, number + 1, loop, line, outcome)
                if outcome:
                    yield place
        finally:
            torch.ops.partc.selection_tested.default([], -1, -1, loop, "", True)
            self._loops -= 1

    def source(self) -> Iterator[Source]:
        """Yield the model's running line, if it is known."""
        frame = user_frame(self.frame)
        if frame is not None:
            yield line_of(frame)

    def compares_inside_torch(self) -> bool:
        """Whether a function of torch compares two numbers."""
        self.frame = caller_frame()
        return self.inside_torch()

    def passed(self) -> bool | None:
        """The outcome under which a guard that compares two numbers does not raise; None for other comparisons."""
        return self._guard(caller_frame())

    def inside_torch(self) -> bool:
        """Whether code of torch is running."""
        return self.frame is not None and is_machinery(self.frame.f_code.co_filename)


def caller_frame() -> FrameType | None:
    """The innermost frame outside of this folder and of the calls that it runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return frame


def _endless_loop(source: Source | None) -> PartcError:
    return untraced(
        "a loop goes on as long as a mask selects something",
        help="repeat it a fixed number of times, with torch.where for the rows that are done",
        source=source,
    )


def _unlisted(source: Source | None) -> PartcError:
    return untraced(
        "a loop runs over the places at which a mask of several dimensions is set",
        help="loop over the elements of a dimension, and choose with torch.where",
        source=source,
    )
