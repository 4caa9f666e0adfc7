"""Collectives in pieces that overlap with pieces of products (Wang et al. 2023, Overlap Communication with Dependent
Computation).

    start all_gather(x)   3 ms  |     start all_gather(x)     3 ms
    wait x                      |     work  linear(x)         6 ms    # with the pieces that are there
    work  linear(x)       8 ms  |     wait x
                                |     work  linear(x)         2 ms

With 4 ranks, a gather overlaps with three quarters of the first product that reads it; the last quarter waits for it. A
sum starts when the first quarter of its product is done, and its own last quarter follows the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.cost.action_timeline import Segment
from partc.ir.attention import Attention
from partc.ir.operations import VIEWS
from partc.ir.program import Op
from partc.rules import has_products

_NOTHING = Segment(seconds=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPiece:
    """Computation of an operation, or the start of a collective or, with `awaited`, the wait for one."""

    op: Op
    segment: Segment = _NOTHING
    started: str = ""
    awaited: str = ""


def in_pieces(run: Sequence[OpPiece], ops: Iterable[Op], ways: Mapping[str, int]) -> Iterator[OpPiece]:
    """The `run` of a graph's operations. A collective over an axis in `ways` is cut into one piece for each rank of the
    axis.
    """
    shown = _shown(ops)
    products: dict[str, int] = {}  # results -> positions in the run
    gathered: dict[str, OpPiece] = {}  # by value: waits that no operation has needed yet
    before: dict[int, list[OpPiece]] = {}  # by position of a product: the waits for its operands
    after: dict[int, OpPiece] = {}  # by position of a product: the sum of its result
    dropped: set[int] = set()
    for index, piece in enumerate(run):
        names = [shown.get(name, name) for name in piece.op.refs()]
        pieced = piece.segment.over in ways
        if pieced and piece.segment.op == "all_gather":
            gathered[piece.started] = piece
        elif piece.awaited in gathered:
            gathered[piece.awaited] = replace(piece, segment=gathered[piece.awaited].segment)
            dropped.add(index)
        elif pieced and piece.segment.op == "reduce_scatter" and names[0] in products:
            after[products[names[0]]] = piece
        elif not piece.segment.op and not piece.awaited and piece.op.name not in VIEWS:
            waits = [gathered.pop(name) for name in names if name in gathered]
            before.setdefault(index, []).extend(waits)
            if has_products(piece.op) and Attention.of(piece.op) is None:
                products.update((value.name, index) for value in piece.op.results)
    sums, places = {id(piece) for piece in after.values()}, {*products.values()}
    for index, piece in enumerate(run):
        waits, sum_after = before.get(index, []), after.get(index)
        if index in dropped:
            continue
        if id(piece) in sums:
            yield replace(piece, segment=_share(piece.segment, 1 / ways[piece.segment.over]))
        elif index in places and (waits or sum_after):
            yield from _product(piece, waits, sum_after, ways)
        else:
            yield from waits
            yield piece
    yield from gathered.values()


def _product(
    piece: OpPiece, waits: Sequence[OpPiece], sum_after: OpPiece | None, ways: Mapping[str, int]
) -> Iterator[OpPiece]:
    overs = [wait.segment.over for wait in waits] + ([sum_after.segment.over] if sum_after else [])
    share = 1 / max(ways[over] for over in overs)
    first, last = (share if sum_after else 0.0), (share if waits else 0.0)
    if sum_after is not None:
        early = f"{sum_after.started} early"
        yield replace(piece, segment=_share(piece.segment, first))
        yield replace(sum_after, started=early, segment=_share(sum_after.segment, 1 - share))
    yield replace(piece, segment=_share(piece.segment, 1 - first - last))
    yield from waits
    if last:
        yield replace(piece, segment=_share(piece.segment, last))
    if sum_after is not None:
        yield OpPiece(op=sum_after.op, awaited=early)


def _share(segment: Segment, share: float) -> Segment:
    return replace(segment, seconds=share * segment.seconds)


def _shown(ops: Iterable[Op]) -> dict[str, str]:
    """For each view and each wait, by its name: the value whose memory it shows."""
    shown: dict[str, str] = {}
    for op in ops:
        if op.name in VIEWS or op.name == "wait":
            source = next(op.refs())
            shown.update((value.name, shown.get(source, source)) for value in op.results)
    return shown
