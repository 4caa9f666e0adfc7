"""The user's pins: `--shard 'blocks.*.attn.wq.weight=[@tp, _]'`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from partc.errors import PartcError
from partc.ir.layout import Placement, Replicated, Shard
from partc.ir.mesh import AXES, PIPELINE_AXIS, TENSOR_AXIS, is_batch_axis, is_tensor_axis
from partc.ir.program import Program, TensorType

_FORMS = ("ring", "gathered")
Entry = tuple[int | None, tuple[str, ...]]  # a sub-dimension's size, if given, and the axes that cut it


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A user's pin: the placement of every value or parameter whose name matches."""

    pattern: str
    text: str
    dims: tuple[tuple[Entry, ...], ...]
    whole: bool = False  # an embedding table that lies whole on one rank: on `rank`, if given
    rank: int | None = None
    form: str = ""  # the form of attention whose rows are cut: "ring" or "gathered"; "": either

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Parse `GLOB=LAYOUT`, `GLOB=LAYOUT ring`, or `GLOB=whole 2`. Raises PartcError P0301."""
        pattern, equals, layout = text.partition("=")
        if not equals or not pattern.strip():
            raise PartcError("P0301", f"--shard {text!r} is not GLOB=LAYOUT", help="for example '*.wq.weight=[@tp, _]'")
        text = layout.strip()
        if whole := re.fullmatch(r"whole(?: ([0-9]{1,9}))?", text):
            rank = int(whole[1]) if whole[1] else None
            return cls(pattern=pattern.strip(), text=text, dims=(), whole=True, rank=rank)
        form = next((form for form in _FORMS if text.endswith(f"] {form}")), "")
        dims = tuple(_dims(text.removesuffix(form).strip()))
        return cls(pattern=pattern.strip(), text=text, dims=dims, form=form)

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)

    def unmatched(self) -> PartcError:
        """The error for a pin that matches nothing."""
        return PartcError(
            "P0303",
            f"--shard {self.pattern!r} matches no value or parameter",
            help="names are those of `partc inspect`: parameters by full name, values as region.value",
        )

    def placement(self, axis: str) -> Placement:
        """The placement of the pin on this axis: `[_, 4096@tp]`, `[3 * 64@tp, _]`, `[_, _]`."""
        found: Placement = Replicated()
        for dim, entries in enumerate(self.dims):
            outer = 1
            for size, axes in entries:
                if axis in axes or (TENSOR_AXIS in axes and is_tensor_axis(axis)):
                    found = Shard(dim, outer)
                outer *= size or 1
        return found

    def decides(self, axis: str) -> bool:
        """Whether the pin restricts placements on this axis: tp always, another axis if the pin names it."""
        return is_tensor_axis(axis) or any(axis in axes for entries in self.dims for _, axes in entries)

    def misfit(self, type: TensorType) -> str | None:
        """The reason why a tensor of this type cannot have the pin's layout; None if it can."""
        if self.whole:
            return None if len(type.shape) == 2 else f"has {len(type.shape)} dimensions"
        if len(self.dims) != len(type.shape):
            return f"has {len(self.dims)} dimensions"
        for dim, (entries, whole) in enumerate(zip(self.dims, type.shape, strict=True)):
            given = 1
            for size, _ in entries:
                given *= size or 1
            if whole % given or (given != whole and all(size is not None for size, _ in entries)):
                return f"has {given} along dimension {dim}"
        return None


def check_pins(program: Program, pins: Sequence[Pin]) -> None:
    """Check pins against the names and shapes of the program, whatever axes the mesh has.

    Raises PartcError P0302 (the shape does not admit the layout) and P0303 (the glob matches nothing).
    """
    known = dict(named_values(program))
    for pin in pins:
        axes = [axis for entries in pin.dims for _, found in entries for axis in found]
        for axis in axes:
            cuts = axis in AXES or axis in program.mesh.sizes or is_batch_axis(axis)
            if axis == PIPELINE_AXIS or not cuts:
                raise PartcError(
                    "P0302",
                    f"--shard {pin.pattern}={pin.text} cuts over {axis!r}",
                    help="a pin places over tp and cp, experts over ep, and an embedding table over dp, too",
                )
            if axes.count(axis) > 1:
                raise PartcError(
                    "P0302", f"--shard {pin.pattern}={pin.text} cuts twice over {axis}", help="cut one dimension"
                )
        matched = [name for name in known if pin.matches(name)]
        if not matched:
            raise pin.unmatched()
        for name in matched:
            reason = pin.misfit(known[name])
            if reason is not None:
                raise PartcError(
                    "P0302",
                    f"--shard pins {name} {known[name].shape} to {pin.text}, which {reason}",
                    help="write one entry per dimension, with _ for dimensions that stay whole",
                )


def named_values(program: Program) -> Iterator[tuple[str, TensorType]]:
    """The names for pins and explanations, with types: parameters and their aliases, program values, values of
    regions.
    """
    for parameter in program.parameters:
        yield from ((name, parameter.type) for name in (parameter.name, *parameter.aliases))
    yield from program.value_types().items()
    for region in program.regions:
        for op in region.forward.ops:
            for value in op.results:
                yield f"{region.name}.{value.name}", value.type


def _dims(layout: str) -> Iterator[tuple[Entry, ...]]:
    match = re.fullmatch(r"\[(.*)\]", layout)
    if not match:
        raise PartcError(
            "P0301", f"layout {layout!r} of --shard does not parse", help="write one entry a dimension: [@tp, _]"
        )
    for part in match.group(1).split(", "):
        entries: list[Entry] = []
        for sub in re.split(r"\s*[·*]\s*", part.strip()):
            piece = re.fullmatch(r"([1-9][0-9]{0,17}|_)?(?:@([a-z][a-z0-9_]*(?:,[a-z][a-z0-9_]*)*))?", sub)
            if not piece or not sub:
                raise PartcError(
                    "P0301", f"layout {layout!r} of --shard does not parse at {sub!r}", help="write sizes, _ or *"
                )
            size = int(piece.group(1)) if piece.group(1) and piece.group(1) != "_" else None
            entries.append((size, tuple((piece.group(2) or "").split(",")) if piece.group(2) else ()))
        yield tuple(entries)
