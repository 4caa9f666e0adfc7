"""Parameters that no gradient reaches in a step, such as those of experts without rows.

Autograd leaves their `.grad` None, and torch's optimizers leave them and their states as they are: without decay,
momentum or a further step. Packages compute zeros for them, and count over all ranks and microbatches whether any
operation has read them; the counts are gradients of counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Reach:
    """The counts of a rank that holds the parameters `names`.

    `plan` has the plan's entries of parameters, `gradients` the gradients of all counters.
    """

    def __init__(
        self, names: Iterable[str], plan: Mapping[str, Mapping[str, Any]], gradients: Mapping[str, Tensor]
    ) -> None:
        self._counted: dict[str, tuple[str, int]] = {
            name: plan[name]["counted"] for name in names if "counted" in plan[name]
        }
        self._counts = {name: gradients[name] for name, _ in self._counted.values()}

    def __bool__(self) -> bool:
        """Whether some steps may leave out parameters."""
        return bool(self._counted)

    def unreached(self) -> frozenset[str]:
        """The parameters that no gradient reaches in this step. Waits for the device."""
        if not self._counts:
            return frozenset()
        sizes = [len(each) for each in self._counts.values()]
        found = torch.cat([*self._counts.values()]).cpu().split(sizes)
        counts = dict(zip(self._counts, (each.tolist() for each in found), strict=True))
        return frozenset(name for name, (counter, place) in self._counted.items() if not counts[counter][place])
