"""The text form of decisions by stage: numbers of calls as in `9,8*2,9`, ways of recomputing as in `full*2/none*6`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, groupby

RECOMPUTE = ("none", "selective", "full")  # ways of recomputing with a name of their own


def expanded(text: str, separator: str) -> list[str]:
    """The values by stage; `8*2` stands for 8 twice."""
    words = (
        re.fullmatch(r"(.*?)(?:\*([1-9][0-9]{0,5}))?", word.strip(), flags=re.DOTALL) for word in text.split(separator)
    )
    return list(chain.from_iterable([word[1]] * int(word[2] or 1) for word in words if word is not None))


def shortened(values: Iterable[object], separator: str) -> str:
    """The text that `expanded` reads, with equal neighbours combined."""
    found = ((value, len(list(equal))) for value, equal in groupby(map(str, values)))
    return separator.join(value if number == 1 else f"{value}*{number}" for value, number in found)


def stage_kinds(recompute: str) -> Sequence[str]:
    """The ways of recomputing by stage; a single one stands for all stages."""
    return expanded(recompute, "/")
