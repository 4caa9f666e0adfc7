"""The operands and options of an attention operation by name, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partc.ir.program import Arg, Op, Ref
from partc.runtime.positions import Orders, Positions

FORWARD = frozenset({"attention", "attention_dropout"})
_BACKWARD = frozenset(f"{name}{bias}_backward" for name in FORWARD for bias in ("", "_bias"))
_OPERANDS = ("q", "k", "v", "mask")
_OPTIONS = ("causal", "scale", "window", "dropout", "draw")
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(FORWARD, (*_OPERANDS, *_OPTIONS)),
    **dict.fromkeys(_BACKWARD, ("gradient", *_OPERANDS, "result", "lse", *_OPTIONS)),
}
ROWS, HEADS = 2, 1  # dimensions of q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] and the result [b, h, s, e]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """softmax(scale * q @ k.T + mask) @ v, or its derivative; operands are names of values, "" if absent."""

    q: str
    k: str
    v: str
    mask: str = ""
    causal: bool = False  # rows read no later positions
    window: int = 0  # positions at this distance or farther are not read; 0: no window
    drops: bool = False
    backward: bool = False
    learned: bool = False  # the mask has a gradient
    sinks: str = ""  # one more score for each head: it enters the softmax's sum but has no value
    limits: str = ""
    keys: str = ""
    reads: tuple[int, ...] = ()  # the numbers of scores that early and late rows read, and the number of all scores
    by_rows: bool = False  # cp cuts rows instead of heads
    zigzag: int = 0  # the number of parts of the rows' zigzag order; 0: rows are in order
    rows: Positions | None = None  # positions of this rank's queries
    ring: str = ""  # the axis along which keys and values travel in a ring
    orders: Orders | None = None  # the order of positions by which dropout numbers its random draws

    @classmethod
    def of(cls, op: Op) -> Attention | None:
        """The attention that an operation computes; None if it computes none."""
        signature = SIGNATURES.get(op.name)
        if signature is None:
            return None
        given: dict[str, Arg] = dict(zip(signature, op.args, strict=False)) | dict(op.attrs)
        names = {key: arg.name for key, arg in given.items() if isinstance(arg, Ref)}
        operands = {key: names[key] for key in (*_OPERANDS, "sinks", "limits", "keys") if key in names}
        reads, window, zigzag = given.get("reads", ()), given.get("window", 0), given.get("zigzag", 0)
        assert isinstance(reads, tuple) and isinstance(window, int) and isinstance(zigzag, int)
        return cls(
            **operands,
            causal=given.get("causal") is True,
            window=window,
            drops="dropout" in op.name,
            backward=op.name in _BACKWARD,
            learned="_bias_" in op.name,
            reads=tuple(number for number in reads if isinstance(number, int)),
            by_rows=given.get("by_rows") is True,
            zigzag=zigzag,
            rows=Positions.parse(str(given["rows"])) if "rows" in given else None,
            ring=str(given.get("ring", "")),
            orders=Orders.parse(str(given["order"])) if "order" in given else None,
        )
