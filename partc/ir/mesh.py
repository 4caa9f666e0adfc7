"""The device mesh: named axes over ranks, slowest axis first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from partc.errors import PartcError

PIPELINE_AXIS = "pp"
TENSOR_AXIS = "tp"
BATCH_AXIS = "dp"
CONTEXT_AXIS = "cp"  # cuts sequences; weights are whole
EXPERT_AXIS = "ep"  # cuts experts, and the batch outside them
TIME_AXIS = "mb"  # microbatches: the batch's axis in time, never part of a mesh

_DEFAULT_NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("pp", "dp", "tp")}
AXES = (PIPELINE_AXIS, BATCH_AXIS, EXPERT_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
_CUT = (BATCH_AXIS, CONTEXT_AXIS, TENSOR_AXIS)  # axes that may be split into pieces

MOST_RANKS = 2**20  # every rank has a module file


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes as (name, size), slowest first: ranks of the last axis are neighbours."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, spec: str) -> Mesh:
        """Parse `8`, `4x8`, `2x4x8` or `pp=2,dp=4,tp=8`. Raises PartcError P0101 to P0104."""
        text = spec.strip()
        if re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
            sizes = [_size(part, spec) for part in text.split("x")]
            if len(sizes) not in _DEFAULT_NAMES:
                raise PartcError(
                    "P0102",
                    f"mesh {spec!r} has {len(sizes)} unnamed axes",
                    help="up to three sizes are named by position (pp x dp x tp); name more: pp=2,dp=4,tp=8",
                )
            axes = tuple(zip(_DEFAULT_NAMES[len(sizes)], sizes, strict=True))
        else:
            axes = tuple(cls._parse_named(part, spec) for part in text.split(","))
        return cls._checked(axes, spec)

    @staticmethod
    def _parse_named(part: str, spec: str) -> tuple[str, int]:
        match = re.fullmatch(r"\s*([a-z_][a-z0-9_]*)\s*=\s*([0-9]+)\s*", part)
        if not match:
            raise PartcError(
                "P0101",
                f"mesh {spec!r} does not parse at {part.strip()!r}",
                help="write sizes (8, 4x8, 2x4x8) or names, slowest first: pp=2,dp=4,tp=8",
            )
        return match.group(1), _size(match.group(2), spec)

    @classmethod
    def _checked(cls, axes: tuple[tuple[str, int], ...], spec: str) -> Mesh:
        names = [name for name, _ in axes]
        for name, size in axes:
            if name not in AXES and not re.fullmatch(rf"({'|'.join(_CUT)})_[a-z0-9]+(_{EXPERT_AXIS})?", name):
                raise PartcError(
                    "P0103",
                    f"mesh {spec!r} names an unknown axis {name!r}",
                    help=f"the axes are {', '.join(AXES)}, and pieces of {', '.join(_CUT)}: dp_out, dp_in",
                )
            if size < 1:
                raise PartcError(
                    "P0104", f"mesh {spec!r} gives axis {name!r} size {size}", help="sizes are 1 or larger"
                )
        if len(set(names)) != len(names):
            raise PartcError("P0104", f"mesh {spec!r} names an axis twice", help="give each axis one size")
        if math.prod(size for _, size in axes) > MOST_RANKS:
            raise _too_large(spec)
        return cls(axes)

    @property
    def sizes(self) -> Mapping[str, int]:
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    def axis(self, name: str) -> int:
        """The size of an axis; 1 if the mesh lacks it."""
        return self.sizes.get(name, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each axis."""
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate; missing axes count as 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` on these axes only, in mesh order."""
        members = [self.coordinate(rank)]
        for name in (name for name in self.names if name in axes):
            members = [{**place, name: index} for place in members for index in range(self.axis(name))]
        return tuple(self.rank(place) for place in members)

    def inside(self, count: int) -> tuple[str, ...]:
        """The axes whose ranks share a node of `count` ranks, without axes of size 1."""
        found: list[str] = []
        stride = 1
        for name, size in reversed(self.axes):
            stride *= size
            if size > 1 and stride <= count:
                found.append(name)
        return tuple(reversed(found))

    def cut_at(self, count: int) -> Mesh:
        """The mesh with the batch axis that spans several nodes of `count` ranks cut in two: dp_out and dp_in.

        Raises PartcError P0105 if a node does not hold whole rows of ranks.
        """
        if count < 1 or (self.size % count and count % self.size):
            raise PartcError(
                "P0105", f"{self.size} ranks do not fill nodes of {count}", help="give a divisor of the mesh's size"
            )
        axes: list[tuple[str, int]] = []
        stride = 1
        for name, size in reversed(self.axes):
            here, stride = count // stride, stride * size
            if not 1 < here < size or not is_batch_axis(name) or name.endswith(EXPERT_AXIS):
                axes.append((name, size))
                continue
            if size % here:
                raise PartcError(
                    "P0105",
                    f"nodes of {count} ranks cut axis {name} of size {size} after {here}, which does not divide it",
                    help="choose sizes whose products are whole nodes",
                )
            part = "_" if name == BATCH_AXIS else ""
            axes += [(f"{name}{part}in", here), (f"{name}{part}out", size // here)]
        return Mesh._checked(tuple(reversed(axes)), str(self))

    def with_experts(self, spec: str) -> tuple[Mesh, tuple[str, ...]]:
        """The mesh with experts cut over some of its ranks, and the axes of these ranks: `ep=4@dp`, `ep=4@dp=2,tp=2`.

        Among axes without a number, the last ones of the mesh give as many ranks as divide, and the others the rest.
        The ranks that an axis gives are neighbours along it: `ep=4@dp` of dp=8 is dp=2,ep=4, and `ep=2@tp` of tp=4 is
        tp=2,tp_ep=2. `ep,cp` names whole axes. Raises PartcError P0106.
        """
        ways, taken = self._given_to_experts(spec)
        if ways is None:
            return self, tuple(name for name in self.names if name in taken and self.axis(name) > 1)
        left = ways // max(1, math.prod(filter(None, taken.values())))
        for name in (name for name in reversed(self.names) if taken.get(name) == 0):
            taken[name] = math.gcd(left, self.axis(name))
            left //= taken[name]
        if math.prod(taken.values()) != ways or not ways or any(self.axis(name) % taken[name] for name in taken):
            sizes = " x ".join(f"{name}={self.axis(name)}" for name in taken)
            raise _experts(spec, f"does not divide {sizes}", "give a divisor of the axes' sizes")
        axes: list[tuple[str, int]] = []
        over: list[str] = []
        for name, size in self.axes:
            part = taken.get(name, 1)
            if part == 1:
                axes.append((name, size))
            elif part == size and not is_batch_axis(name):
                axes.append((name, size))
                over.append(name)
            else:
                piece = EXPERT_AXIS if is_batch_axis(name) and EXPERT_AXIS not in over else f"{name}_{EXPERT_AXIS}"
                axes += [(name, size // part), (piece, part)]
                over.append(piece)
        return Mesh._checked(tuple(axes), spec), tuple(over)

    def _given_to_experts(self, spec: str) -> tuple[int | None, dict[str, int]]:
        """The ranks that cut experts, and how many each axis gives: 0 for any number. None for whole axes."""
        axis = "[a-z_0-9]+(?:=[0-9]{1,7})?"
        match = re.fullmatch(rf"(?:ep=([0-9]{{1,7}})@)?({axis}(?:,{axis})*)", spec.strip())
        if not match or (match[1] is None and "=" in match[2]):
            raise _experts(spec, "does not parse", "write the number of ranks and their axes: ep=4@dp, ep=4@dp=2,tp=2")
        taken = {name: int(size or 0) for name, _, size in (part.partition("=") for part in match[2].split(","))}
        possible = ", ".join(name for name in self.names if name != PIPELINE_AXIS) or "none"
        for name in taken:
            if name not in self.names or name == PIPELINE_AXIS:
                raise _experts(spec, f"takes ranks of {name!r}, which does not cut rows", f"{self} has {possible}")
        if len(taken) < match[2].count(",") + 1:
            raise _experts(spec, "names an axis twice", f"{self} has {possible}, each to be named once")
        if match[1] is not None and EXPERT_AXIS in self.names:
            raise _experts(spec, f"comes on top of ep={self.axis(EXPERT_AXIS)} in the mesh", "leave one of them out")
        return int(match[1]) if match[1] is not None else None, taken

    def with_span(self, ranks: int) -> tuple[Mesh, tuple[str, ...]]:
        """The mesh with an axis for `ranks` neighbours of the batch's axes, and the axes that ZeRO then shards over.

        Of dp=8, 4 are dp_in of dp_out=2,dp_in=4. Raises PartcError P0413.
        """
        axes: list[tuple[str, int]] = []
        over: list[str] = []
        left = ranks
        for name, size in reversed(self.axes):
            if not is_batch_axis(name) or left == 1 or size == 1:
                axes.append((name, size))
            elif left % size == 0:
                axes.append((name, size))
                over.append(name)
                left //= size
            elif size % left == 0 and not name.endswith(EXPERT_AXIS):
                part = "_" if name == BATCH_AXIS else ""
                axes += [(f"{name}{part}in", left), (f"{name}{part}out", size // left)]
                over.append(f"{name}{part}in")
                left = 1
            else:
                break
        if left != 1 or ranks < 2:
            raise PartcError(
                "P0413",
                f"ZeRO over {ranks} neighbours of the batch's axes does not fit the mesh {self}",
                help="give a divisor of dp of 2 or more",
            )
        mesh = Mesh._checked(tuple(reversed(axes)), str(self))
        return mesh, tuple(name for name in mesh.names if name in over or _is_piece(name, CONTEXT_AXIS))

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes over which experts are cut by default."""
        return tuple(name for name, size in self.axes if name == EXPERT_AXIS and size > 1)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


def holds_weights_whole(name: str) -> bool:
    """Whether the ranks along an axis hold equal weights, unless ZeRO cuts them: dp, its pieces, cp, and ep where there
    are no experts.
    """
    return is_batch_axis(name) or _is_piece(name, CONTEXT_AXIS)


def is_tensor_axis(name: str) -> bool:
    """Whether the ranks along an axis hold different parts of weights: tp, or a piece of it."""
    return _is_piece(name, TENSOR_AXIS)


def _is_piece(name: str, axis: str) -> bool:
    return name == axis or name.startswith(f"{axis}_")


def is_batch_axis(name: str) -> bool:
    """Whether the ranks along an axis hold different examples: dp, or a piece of it (dp_in, or ep)."""
    return name == EXPERT_AXIS or _is_piece(name, BATCH_AXIS)


def cuts_batch(name: str) -> bool:
    """Whether an axis of layouts cuts the batch: over ranks, or over microbatches."""
    return name == TIME_AXIS or is_batch_axis(name)


def _experts(spec: str, cause: str, help: str) -> PartcError:
    return PartcError("P0106", f"--experts {spec} {cause}", help=help)


def _size(text: str, spec: str) -> int:
    if len(text.lstrip("0")) > len(str(MOST_RANKS)):
        raise _too_large(spec)
    return int(text)


def _too_large(spec: str) -> PartcError:
    shown = spec if len(spec) <= 60 else f"{spec[:57]}..."
    return PartcError("P0104", f"mesh {shown!r} has more than {MOST_RANKS:,} ranks", help="give a smaller one")
