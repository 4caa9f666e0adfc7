"""Python identifiers from the model's own names."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

# What emitted functions read besides their own values.
_TAKEN = frozenset(
    [
        "torch",
        "F",
        "Tensor",
        "NamedTuple",
        "Any",
        "math",
        "functional",
        "kernels",
        "comm",
        "Comm",
        "p",
        "g",
        "saved",
        "kept",
        "left",
        "number",
        "self",
        "batch",
        "received",
        "gradients",
        "parameters",
        "Shard",
        "Received",
        "Stage",
        "Saved",
        "zip",
        "reversed",
        "range",
        "float",
        "int",
        "tuple",
        "list",
        "dict",
        "len",
        "print",
    ]
)


def identifier(name: str) -> str:
    """`attn.wq.weight` as `attn_wq_weight`, `0.weight` (of a Sequential) as `m0_weight`; never a keyword.

    None starts with an underscore: fields of a NamedTuple may not.
    """
    text = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "value"
    if text[0].isdigit():
        text = f"m{text}"
    return f"{text}_" if keyword.iskeyword(text) or keyword.issoftkeyword(text) or text in _TAKEN else text


def class_name(name: str) -> str:
    """`layer_norm.2` as `LayerNorm2`."""
    return "".join(part[:1].upper() + part[1:] for part in identifier(name).split("_")) or "Region"


class Names:
    """Identifiers of one scope: equal names give the same identifier, different ones different ones."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._used = set(taken)
        self._given: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._given:
            self._given[name] = self.fresh(identifier(name))
        return self._given[name]

    def fresh(self, wanted: str) -> str:
        """An identifier no one else has: the wanted one, or the first free numbered one."""
        found, number = wanted, 2
        while found in self._used:
            found, number = f"{wanted}_{number}", number + 1
        self._used.add(found)
        return found

    def bind(self, name: str, text: str) -> None:
        """Let `name` be written as this text (a parameter's field, another value's identifier)."""
        self._given[name] = text
