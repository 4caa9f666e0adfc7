"""The operations of marked calls: equal calls get copies of a record's operations, with their own weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.errors import InternalError, Source
from partc.frontend.repeats.marks import CallMark
from partc.frontend.repeats.module_rows import UnequalError
from partc.ir.naming import unique
from partc.ir.program import Arg, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The operations of a traced call of the module at `path`, and its input and output tensors."""

    ops: tuple[Op, ...]
    path: str
    start: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class RepeatedOps:
    """Reads the marks of a graph in order, while `ops` grows. `taken` are the names of the graph's values."""

    def __init__(self, calls: Mapping[int, CallMark], ops: list[Op], taken: set[str]) -> None:
        self._calls = calls
        self._ops = ops
        self._taken = taken
        self._open: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._spans: dict[int, _Span] = {}
        self._constants = {op.results[0].name: op for op in ops if op.name == "constant"}
        self.copied = 0

    def mark(self, number: int, path: str, tensors: tuple[str, ...], weights: Mapping[str, str]) -> dict[str, str]:
        """Read one mark of a call of the module at `path`; `weights` are the values of the model's weights by name.

        Returns a map from the names of empty output tensors, whose operations are dropped, to the copies. Raises
        UnequalError if the second call of a kind differs from its record.
        """
        call = self._calls[number]
        if call.traced and number not in self._open:
            self._open[number] = (len(self._ops), tensors)
            return {}
        if call.traced:
            start, inputs = self._open[number]
            span = _Span(ops=tuple(self._ops[start:]), path=path, start=start, inputs=inputs, outputs=tensors)
            self._spans[number] = span
            if number != call.record:
                self._compare(call, span, weights)
            return {}
        return self._copied(number, path, tensors, weights)

    def check_leaks(self) -> None:
        """Raise UnequalError if a value inside a repeated record is read outside it and is not an output."""
        repeated = {call.record for number, call in self._calls.items() if number != call.record}
        spans = sorted((span.start, number) for number, span in self._spans.items() if number in repeated)
        inside: dict[str, tuple[int, ...]] = {}
        for _, number in spans:
            span = self._spans[number]
            for value in (value for op in span.ops for value in op.results):
                if value.name not in span.outputs:
                    inside[value.name] = (*inside.get(value.name, ()), number)
        ends = {number: self._spans[number].start + len(self._spans[number].ops) for _, number in spans}
        for index, op in enumerate(self._ops):
            for number in (number for ref in op.refs() for number in inside.get(ref, ())):
                if index >= ends[number]:
                    raise UnequalError(self._calls[number].group)

    def _compare(self, call: CallMark, found: _Span, weights: Mapping[str, str]) -> None:
        record = self._spans[call.record]
        names = self._names(call, record, found.inputs, weights)
        constants = self._constants
        equal = len(record.ops) == len(found.ops)
        for one, other in zip(record.ops, found.ops, strict=False):
            renamed = one.renamed(names)
            fixed = {a: b for a, b in zip(renamed.refs(), other.refs(), strict=False) if a in constants}
            same = all(b in constants and _content(constants[a]) == _content(constants[b]) for a, b in fixed.items())
            renamed = renamed.renamed(fixed)
            types = [value.type for value in one.results] == [value.type for value in other.results]
            equal = equal and same and types and _content(renamed) == _content(other)
            names |= {a.name: b.name for a, b in zip(one.results, other.results, strict=False)}
        equal = equal and tuple(names.get(name, name) for name in record.outputs) == found.outputs
        if not equal:
            raise UnequalError(call.group)

    def _copied(self, number: int, path: str, tensors: Sequence[str], weights: Mapping[str, str]) -> dict[str, str]:
        call = self._calls[number]
        inputs, empty = tensors[: call.inputs], tensors[call.inputs :]
        for name in reversed(empty):
            if self._ops.pop().results[0].name != name:
                raise InternalError(f"{name} is not an empty tensor of a repeated call")
        record = self._spans[call.record]
        names = self._names(call, record, inputs, weights)
        for op in record.ops:
            self.copied += 1
            self._copy_constants(op, names, number)
            for value in op.results:
                names[value.name] = unique(f"{value.name}_{number}", self._taken)
            results = tuple(replace(value, name=names[value.name]) for value in op.results)
            self._ops.append(replace(op.renamed(names), results=results, source=_moved(op.source, record.path, path)))
        made = [record.outputs[index] for index in call.outputs]
        return {name: names.get(output, output) for name, output in zip(empty, made, strict=True)}

    def _copy_constants(self, op: Op, names: dict[str, str], number: int) -> None:
        """Copy the constants too, so that each copy has its own, as in a trace of the call."""
        for ref in op.refs():
            if ref in self._constants and ref not in names:
                made = self._constants[ref]
                names[ref] = unique(f"{ref}_{number}", self._taken)
                self._ops.append(replace(made, results=(replace(made.results[0], name=names[ref]),)))

    def _names(
        self, call: CallMark, record: _Span, inputs: Iterable[str], weights: Mapping[str, str]
    ) -> dict[str, str]:
        """Map the values that the recorded call reads to those of this call."""
        names: dict[str, str] = {}
        for one, other in (*zip(record.inputs, inputs, strict=True), *_values(call.weights, weights)):
            if names.setdefault(one, other) != other:
                raise UnequalError(call.group)
        return names


def _values(pairs: Mapping[str, str], weights: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for one, other in pairs.items():
        if one in weights and other in weights:
            yield weights[one], weights[other]


def _content(op: Op) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    return op.name, op.args, op.attrs


def _moved(source: Source | None, one: str, other: str) -> Source | None:
    """The source of a copied operation: the same line, run by the module at `other` instead of `one`."""
    if source is None or (source.module != one and not source.module.startswith(f"{one}.")):
        return source
    return replace(source, module=other + source.module[len(one) :])
