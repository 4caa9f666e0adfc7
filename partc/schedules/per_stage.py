"""Decisions that differ by stage, as text: `9,8*2,9` are the numbers of calls, `full*2/none*6` ways of recomputing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, groupby

MOST_EQUAL = 10**6  # stages that follow each other


def expanded(text: str, separator: str) -> list[str]:
    """The values by stage; `8*2` stands for two of 8."""
    words = (
        re.fullmatch(r"(.*?)(?:\*([1-9][0-9]{0,5}))?", word.strip(), flags=re.DOTALL) for word in text.split(separator)
    )
    return list(chain.from_iterable([word[1]] * int(word[2] or 1) for word in words if word is not None))


def shortened(values: Iterable[object], separator: str) -> str:
    """The text that `expanded` reads, with equal neighbours as one."""
    found = ((value, len(list(equal))) for value, equal in groupby(map(str, values)))
    return separator.join(value if number == 1 else f"{value}*{number}" for value, number in found)


def stage_kinds(recompute: str) -> Sequence[str]:
    """The ways of recomputing by stage; one for all stages, if the text gives no more."""
    return expanded(recompute, "/")
