"""The proof that a loop or a branch does nothing where a mask selects nothing.

    for e in range(experts):                      with the body                without it
        rows = torch.where(chosen == e)[0]        rows = selected(eq, 0)
        if len(rows):                             x_0  = index(x, (rows,))
            out[rows] += expert(x[rows])          …
                                                  index_put_(out, (rows,), y)
        count = count + 1                         add(count, 1)                add(count, 1)

A package always runs the body, for it does not know the number of rows. That is right if the body only writes selected
rows. Two traces show it, one in which every test finds something and one in which none does: the operations of the
second are those of the first without some, and none of those writes anything but selected rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from partc.errors import PartcError, Source
from partc.ir.program import SELECTED, Graph, Op, Ref

_VIEWS = frozenset(
    {
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "permute", "t",
    "transpose", "expand", "expand_as", "split", "split_with_sizes", "chunk", "unbind", "select", "slice", "alias",
    "detach", "diagonal", "narrow",
})  # fmt: skip
_WRITES = frozenset({"index_add", "index_add_", "index_put", "index_put_"})


def check_empty(full: Graph, empty: Graph, test: Source) -> None:
    """Check that the operations which `empty` lacks only write selected rows.

    `test` is the first test. Raises PartcError P0206.
    """
    check = _Alignment(makers=full.makers(), test=test)
    check.same.update((mine.name, its.name) for mine, its in zip(full.inputs, empty.inputs, strict=True))
    rest = iter(full.ops)
    for wanted in empty.ops:
        for op in rest:
            if check.pairs(op, wanted):
                break
            check.leave_out(op)
        else:
            raise check.refusal(wanted)
    for op in rest:
        check.leave_out(op)
    if [check.there(name) for name in full.outputs] != list(empty.outputs):
        raise check.refusal(full.ops[-1])


@dataclass(slots=True)
class _Alignment:
    """The values of the second trace in place of those of the first."""

    makers: Mapping[str, Op]
    test: Source
    same: dict[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    def there(self, name: str) -> str:
        """The value that the second trace has in place of one; "" for those that it lacks. States have one name."""
        while name in self.missing:
            op = self.makers[name]
            if not self._writes_rows(op):
                return ""
            name = next(op.refs())
        return self.same.get(name, name)

    def pairs(self, op: Op, wanted: Op) -> bool:
        if _form(op) != _form(wanted) or [*map(self.there, op.refs())] != [*wanted.refs()]:
            return False
        self.same.update((mine.name, its.name) for mine, its in zip(op.results, wanted.results, strict=True))
        return True

    def leave_out(self, op: Op) -> None:
        self.missing.update(value.name for value in op.results)
        target = op.args[0] if op.args else None
        if not op.name.endswith("_") or op.name.endswith("__") or not isinstance(target, Ref):
            return
        if self._writes_rows(op):
            return
        name = target.name
        while name in self.missing and self.makers[name].name in _VIEWS:
            name = next(self.makers[name].refs())
        if name not in self.missing:
            raise self.refusal(op)

    def _writes_rows(self, op: Op) -> bool:
        if op.name not in _WRITES:
            return False
        places = op.args[2:3] if "add" in op.name else op.args[1]
        names = [place.name for place in places if isinstance(place, Ref)] if isinstance(places, tuple) else []
        return bool(names) and all(map(self._is_place, names))

    def _is_place(self, name: str) -> bool:
        op = self.makers.get(name)
        while op is not None and op.name == "detach":
            op = self.makers.get(next(op.refs()))
        return op is not None and op.name == SELECTED

    def refusal(self, op: Op) -> PartcError:
        return PartcError(
            "P0206",
            "the model does not trace: a branch depends on the values of a tensor, and where a mask selects "
            f"nothing it changes {op.name}",
            help="let such a branch only write the selected rows, or choose with torch.where",
            source=self.test,
        )


def _form(op: Op) -> tuple[Any, ...]:
    plain = op.renamed(dict.fromkeys(op.refs(), ""))
    return op.name, plain.args, plain.attrs, [value.type for value in op.results], op.source
