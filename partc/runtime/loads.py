"""The rows of each expert that the tokens of a rank choose in a step, by layer.

Forward functions of regions count rows with `comm.loads.count(chosen)`; a stage runs them in the order of the plan's
`routers`. Recomputation counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .clock import Clock
from .errors import UsageError, tell
from .plan import PlanRouter


class Loads:
    """The loads of a rank's layers since the last `clear`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._routers: tuple[PlanRouter, ...] = ()
        self._counted = False
        self._found: dict[PlanRouter, Tensor] = {}  # the number of rows of each expert, then of rows without an expert
        self._turns: Iterator[PlanRouter] = iter(())
        self._layer = ""
        self._device = torch.device("cpu")
        self._told: set[str] = set()
        self.rows: dict[str, list[int]] = {}  # layer -> rows of each expert on all ranks, from the last `spreads`

    def expect(
        self, routers: Iterable[PlanRouter], stages: Iterable[int], device: torch.device, *, counted: bool
    ) -> None:
        """Announce the layers of all stages. If `counted`, rows are counted in those of this rank's `stages`."""
        self._routers, self._counted, self._device = tuple(routers), counted, device
        self._found = {
            router: torch.zeros(router.experts + 1, dtype=torch.float64, device=device)
            for router in self._routers
            if router.stage in stages
        }

    def clear(self) -> None:
        """Begin a step."""
        self._clock.rows = ""
        for found in self._found.values():
            found.zero_()

    def enter(self, stage: int) -> None:
        """Begin the forward pass of a stage."""
        self._turns = iter([router for router in self._found if router.stage == stage])
        self._layer = ""

    def count(self, chosen: Tensor) -> None:
        """Count the rows of the stage's next layer, if counts are wanted."""
        router = next(self._turns, None)
        if router is not None:
            self._layer = router.name
            if self._counted:
                self._found[router].add_(chosen.float().histc(router.experts + 1, 0, router.experts))

    def note_received(self, rows: int, mean: int, most: float) -> None:
        """Note how many rows this rank's experts receive; warn once per layer if they exceed `most` times the
        `mean`.
        """
        if not self._layer or rows <= (most or 1) * mean:
            return
        said = f"{rows} rows came for this rank's experts of {self._layer}, where the mean is {mean}"
        self._clock.rows = said
        if most and self._layer not in self._told:
            self._told.add(self._layer)
            limit = f"the memory account has {most:g} times the mean (--expert-rows)"
            tell(f"{self._clock.doing}: {said}; {limit}")

    def unknown(self, number: int, count: int) -> UsageError:
        """The error for a row whose expert, or an id whose row of the table, does not exist."""
        return UsageError(
            "P0552",
            f"a row of {self._layer or 'a layer'} is for number {number}, and its {count} experts (of a table: parts "
            f"of its rows) count from 0, in {self._clock.doing}",
            "check the choice of experts, or the ids of the lookup, in the model's forward",
            exit_code=1,
        )

    def spreads(self, summed: Callable[[Tensor, str], Tensor], *, pipeline: bool) -> dict[str, float]:
        """For each layer, over all ranks: the largest load divided by the mean, the share of experts without rows, and
        the share of rows without an expert. All ranks must call it; `summed` sums a tensor over an axis.
        """
        if not self._routers:
            return {}
        sizes = [router.experts + 1 for router in self._routers]
        every = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)
        parts = every.split(sizes)
        for router, part in zip(self._routers, parts, strict=True):
            if router in self._found:
                part.copy_(self._found[router])
        for over in sorted({router.over for router in self._routers}):
            mine = [part for router, part in zip(self._routers, parts, strict=True) if router.over == over]
            joined = torch.cat(mine)
            for axis in over:
                joined = summed(joined, axis)
            for part, total in zip(mine, joined.split([len(part) for part in mine]), strict=True):
                part.copy_(total)
        if pipeline:
            every.copy_(summed(every, "pp"))
        found = dict(_by_name(self._routers, every.cpu().split(sizes)))
        self.rows = {name: part[:-1].long().tolist() for name, part in found.items()}
        return {
            f"load/{name}/{word}": round(value, 6)
            for name, part in found.items()
            for word, value in zip(("largest", "empty", "dropped"), _spread(part), strict=True)
        }


def _by_name(routers: Sequence[PlanRouter], loads: Sequence[Tensor]) -> Iterable[tuple[str, Tensor]]:
    """The load of each layer. Several stages may count a layer; their loads are equal."""
    return {router.name: load for router, load in zip(routers, loads, strict=True)}.items()


def _spread(load: Tensor) -> tuple[float, float, float]:
    rows, none = load[:-1], load[-1].item()
    kept, every = rows.sum().item(), load.sum().item()
    largest = rows.max().item() * len(rows) / kept if kept else 0.0
    return largest, rows.eq(0).double().mean().item(), none / every if every else 0.0
