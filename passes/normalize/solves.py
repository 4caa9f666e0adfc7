"""Forward substitution by rows as a triangular solve.

    for i in range(1, n):
        row, above = a[..., i, :i], a[..., :i, :i]
        a[..., i, :i] = row + (row[..., None] * above).sum(-2)

Let L be the part of `a` below the diagonal and U the rest. The final `a` is U + X, where X solves (1 - L) X = L + (L U
below the diagonal). Linear attention by chunks writes its inverse in this way (delta rule).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from partc.ir.naming import unique
from partc.ir.program import Arg, Graph, Op, Ref, TensorType


def with_solves(graph: Graph, types: Mapping[str, TensorType]) -> Graph:
    """The graph with one solve in place of each substitution of all rows."""
    reader = _Substitution(graph.makers(), types)
    first: dict[str, str] = {}  # matrix with its rows up to some index substituted -> the original matrix
    rows: dict[str, int] = {}
    ops: list[Op] = []
    taken = {*types, *graph.definitions()}
    for op in graph.ops:
        found = reader.row(op)
        if found is not None and found[1] == rows.get(found[0], 0) + 1:
            before, row = found
            first[op.result.name], rows[op.result.name] = first.get(before, before), row
            if row == op.result.type.shape[-1] - 1 and row > 1 and op.result.type.dtype in ("f32", "f64"):
                ops.extend(_solve(op, first[op.result.name], taken))
                continue
        ops.append(op)
    return replace(graph, ops=tuple(ops)).without_dead()


def _solve(op: Op, matrix: str, taken: set[str]) -> Iterator[Op]:
    def step(name: str, *args: Arg, result: str = "", **attrs: Arg) -> Op:
        value = replace(op.result, name=result or unique(f"{op.result.name}_{name}", taken))
        return Op(name=name, args=args, attrs=tuple(attrs.items()), results=(value,), source=op.source)

    def ref(made: Op) -> Ref:
        return Ref(made.result.name)

    lower, upper = step("tril", Ref(matrix), -1), step("triu", Ref(matrix), 0)
    product = step("matmul", ref(lower), ref(upper))
    below = step("tril", ref(product), -1)
    right, left = step("add", ref(lower), ref(below)), step("neg", ref(lower))
    solved = step("linalg_solve_triangular", ref(left), ref(right), upper=False, unitriangular=True)
    yield from (lower, upper, product, below, right, left, solved)
    yield step("add", ref(solved), ref(upper), result=op.result.name)


@dataclass(frozen=True, slots=True)
class _Substitution:
    """Recognises the operations that substitute one row."""

    makers: Mapping[str, Op]
    types: Mapping[str, TensorType]

    def row(self, op: Op) -> tuple[str, int] | None:
        """The matrix before, and the number of the row that a join replaces in it; None for other operations."""
        rank = len(op.result.type.shape) if len(op.results) == 1 else 0
        if op.name != "cat" or rank < 2 or op.args[1] != rank - 2 or not isinstance(op.args[0], tuple):
            return None
        above, *others = op.args[0]
        part = self._slice(above)
        if part is None or not others or part[1:3] != (rank - 2, 0):
            return None
        matrix, _, _, row = part
        size = op.result.type.shape[-1]
        rest = self._slice(others[1]) if len(others) == 2 else None
        whole = rest == (matrix, rank - 2, row + 1, size) if len(others) == 2 else row == size - 1
        if op.result.type.shape[-2] != size or not whole or len(others) > 2:
            return None
        return (matrix, row) if self._is_new_row(others[0], matrix, row, rank, size) else None

    def _is_new_row(self, part: Arg, matrix: str, row: int, rank: int, size: int) -> bool:
        join = self._maker_named(self._reshaped(part), "cat")
        if join is None or not isinstance(join.args[0], tuple) or len(join.args[0]) != 2:
            return False
        new, kept = join.args[0]
        rest = self._slice(kept)
        if rest is None or rest[1:] != (rank - 2, row, size) or not self._is_row(Ref(rest[0]), matrix, row, rank):
            return False
        total = self._maker_named(new, "add")
        if total is None or len(total.args) != 2:
            return False
        begun, summed = total.args
        sum_op = self._maker_named(summed, "sum")
        product = (
            self._maker_named(sum_op.args[0], "mul")
            if sum_op is not None and sum_op.args[1:] == ((rank - 2,), False)
            else None
        )
        if product is None or not self._begins(begun, matrix, row, rank):
            return False
        column, block = product.args
        shape = self.types[column.name].shape if isinstance(column, Ref) else ()
        square = self._slice(block)
        rows = self._slice(Ref(square[0])) if square is not None else None
        return (
            shape[-2:] == (row, 1)
            and self._begins(self._reshaped(column), matrix, row, rank)
            and square is not None
            and square[1:] == (rank - 1, 0, row)
            and rows == (matrix, rank - 2, 0, row)
        )

    def _begins(self, value: Arg, matrix: str, row: int, rank: int) -> bool:
        """Whether a value is the part of a matrix's row before the diagonal."""
        part = self._slice(value)
        return part is not None and part[1:] == (rank - 2, 0, row) and self._is_row(Ref(part[0]), matrix, row, rank)

    def _is_row(self, value: Arg, matrix: str, row: int, rank: int) -> bool:
        return self._slice(self._reshaped(value)) == (matrix, rank - 2, row, row + 1)

    def _maker_named(self, value: Arg, name: str) -> Op | None:
        op = self.makers.get(value.name) if isinstance(value, Ref) else None
        return op if op is not None and op.name == name and not op.attrs else None

    def _reshaped(self, value: Arg) -> Arg:
        op = self._maker_named(value, "reshape")
        return None if op is None else op.args[0]

    def _slice(self, value: Arg) -> tuple[str, int, int, int] | None:
        op = self._maker_named(value, "slice")
        if op is None or len(op.args) != 5 or op.args[4] != 1 or not isinstance(op.args[0], Ref):
            return None
        dim, first, last = (arg if isinstance(arg, int) else -1 for arg in op.args[1:4])
        return op.args[0].name, dim, first, last
