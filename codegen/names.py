"""Python identifiers from the model's own names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from partc import quoting

# Names that emitted functions read besides their own values.
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
        "Sectioned",
        "Received",
        "Stage",
        "Saved",
        "Values",
        "Parts",
        "Sums",
        "Bucket",
        "compiled",
        "partial",
        "scan",
        "next",
        "zip",
        "reversed",
        "range",
        "float",
        "int",
        "tuple",
        "list",
        "dict",
        "dataclass",
        "len",
        "print",
    ]
)


def emitted_name(name: str) -> str:
    """`attn.wq.weight` as `attn_wq_weight`, `0.weight` (of a Sequential) as `m0_weight`; never a keyword.

    None starts with an underscore: fields of a NamedTuple may not.
    """
    text = quoting.identifier(name)
    return f"{text}_" if text in _TAKEN else text


def class_name(name: str) -> str:
    """`layer_norm.2` as `LayerNorm2`."""
    return "".join(part[:1].upper() + part[1:] for part in emitted_name(name).split("_")) or "Region"


class Names:
    """The identifiers of one scope: a bijection from names to identifiers."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._used = set(taken)
        self._given: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._given:
            self._given[name] = self.fresh(emitted_name(name))
        return self._given[name]

    def fresh(self, wanted: str) -> str:
        """An unused identifier: the wanted one, or the first free numbered one."""
        found, number = wanted, 2
        while found in self._used:
            found, number = f"{wanted}_{number}", number + 1
        self._used.add(found)
        return found

    def bind(self, name: str, text: str) -> None:
        """Write `name` as this text, such as a parameter's field or another value's identifier."""
        self._given[name] = text


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionNames:
    """The identifiers of a region's parts: "block" for block_forward, BlockParams and BLOCK."""

    stem: str
    title: str
    constant: str

    @property
    def params(self) -> str:
        return f"{self.title}Params"

    @property
    def saved(self) -> str:
        return f"{self.title}Saved"

    @property
    def kept(self) -> str:
        return f"{self.title}Kept"

    @property
    def forward(self) -> str:
        return f"{self.stem}_forward"

    @property
    def backward(self) -> str:
        return f"{self.stem}_backward"

    @property
    def backward_input(self) -> str:
        return f"{self.stem}_backward_input"

    @property
    def backward_weight(self) -> str:
        return f"{self.stem}_backward_weight"

    @property
    def every(self) -> tuple[str, ...]:
        functions = (self.forward, self.backward, self.backward_input, self.backward_weight)
        return (self.stem, self.params, self.saved, self.kept, self.constant, *functions)


_LONGEST_STEM = 100  # a stem is also a file name, and file systems limit names to 255 bytes


def region_names(regions: Iterable[str]) -> dict[str, RegionNames]:
    """Identifiers for the regions of a program, distinct even if file names ignore case."""
    found: dict[str, RegionNames] = {}
    taken = set(_TAKEN)
    for region in regions:
        stem, number = emitted_name(region)[:_LONGEST_STEM], 1
        names = _region_names(stem)
        while not taken.isdisjoint(names.every):
            number += 1
            names = _region_names(f"{stem}_{number}")
        taken.update(names.every)
        found[region] = names
    return found


def _region_names(stem: str) -> RegionNames:
    constant = stem.upper()
    constant = f"{constant}_TABLE" if constant == stem else constant
    return RegionNames(stem=stem, title=class_name(stem), constant=constant)
