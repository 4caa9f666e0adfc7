"""The operands of products by expert, by name."""

from __future__ import annotations

from dataclasses import dataclass

from partc.ir.program import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatmul:
    """`expert_matmul(rows, chosen, weights)`: each row times the matrix of its expert."""

    rows: str
    chosen: str  # the number of each row's expert
    weights: str  # [experts, ...]

    @classmethod
    def of(cls, op: Op) -> ExpertMatmul | None:
        """The product that an operation computes; None if it is not an expert_matmul."""
        if op.name != "expert_matmul":
            return None
        rows, chosen, weights = op.refs()
        return cls(rows=rows, chosen=chosen, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """`expert_rows(chosen, weights)`: for each row the values of its expert."""

    chosen: str
    weights: str

    @classmethod
    def of(cls, op: Op) -> ExpertRows | None:
        if op.name != "expert_rows":
            return None
        chosen, weights = op.refs()
        return cls(chosen=chosen, weights=weights)
