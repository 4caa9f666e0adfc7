"""Log-probabilities of labels as cross-entropies of rows, without another tensor as large as the logits.

    p   = log_softmax(x, -1)                         nll  = cross_entropy(x, labels, None, -100, 0.0)
    one = gather(p, -1, reshape(labels, (8, 1)))  -> one  = reshape(neg(nll), (8, 1))
    nll = cross_entropy(p, labels, …)             -> nll  = cross_entropy(x, labels, …)

The log-sum-exp of log-probabilities is 0, so their cross-entropy equals that of the original logits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace

from partc import fuel
from partc.ir.naming import unique
from partc.ir.program import Arg, DType, Op, Ref, Region, TensorType, Value

_NEVER = -100  # the ignored label; `gather` never reads it


def label_losses(region: Region) -> Region:
    """Replace gathers from log-probabilities and their cross-entropies; their operands may become dead."""
    return _LabelLosses(region).region()


@dataclass(slots=True)
class _LabelLosses:
    given: Region
    types: dict[str, TensorType] = field(default_factory=dict)
    made: Mapping[str, Op] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def region(self) -> Region:
        graph = self.given.forward
        self.types = self.given.types(graph)
        self.taken = set(self.types)
        self.made = graph.makers()
        ops = tuple(step for op in graph.ops for step in self._rewritten(op))
        return replace(self.given, forward=replace(graph, ops=ops))

    def _rewritten(self, op: Op) -> Iterator[Op]:
        if op.name == "cross_entropy" and fuel.may_rewrite("label loss", op.source):
            yield from self._of_logits(op)
        elif op.name == "gather" and not op.attrs and fuel.may_rewrite("label loss", op.source):
            yield from self._picked(op)
        else:
            yield op

    def _of_logits(self, op: Op) -> Iterator[Op]:
        """A cross-entropy of (possibly permuted) log-probabilities as one of logits; other operations unchanged."""
        name = next(op.refs())
        maker = self.made.get(name)
        order = maker.args[1] if maker is not None and maker.name == "permute" else None
        source = self._normalized(next(maker.refs()) if maker is not None and order is not None else name)
        rank = len(self.types[name].shape)
        if source is None or source[1] != (order[-1] if isinstance(order, tuple) else rank - 1):
            yield op
            return
        logits = Ref(source[0])
        if isinstance(order, tuple):
            shape = self.types[name].shape
            logits = yield from self._write(op, "permute", (logits, order), shape, self.types[name].dtype)
        yield replace(op, args=(logits, *op.args[1:]))

    def _picked(self, op: Op) -> Iterator[Op]:
        """A gather of one log-probability per row as a cross-entropy; other operations unchanged."""
        table, dim, index = op.args
        assert isinstance(table, Ref) and isinstance(dim, int) and isinstance(index, Ref)
        source, (shape, dtype) = self._normalized(table.name), (op.result.type.shape, op.result.type.dtype)
        dim %= max(1, len(shape))
        whole = self.types[table.name].shape
        one = (*whole[:dim], 1, *whole[dim + 1 :])
        if source is None or source[1] != dim or shape != one:
            yield op
            return
        logits, rows = Ref(source[0]), (*shape[:dim], *shape[dim + 1 :])
        if dim != len(shape) - 1:
            order = (*(other for other in range(len(shape)) if other != dim), dim)
            logits = yield from self._write(op, "permute", (logits, order), tuple(whole[at] for at in order), dtype)
        labels = yield from self._write(op, "reshape", (index, rows), rows, self.types[index.name].dtype)
        nll = yield from self._write(op, "cross_entropy", (logits, labels, None, _NEVER, 0.0), rows, dtype)
        found = yield from self._write(op, "neg", (nll,), rows, dtype)
        yield replace(op, name="reshape", args=(found, shape))

    def _write(
        self, op: Op, name: str, args: tuple[Arg, ...], shape: tuple[int, ...], dtype: DType
    ) -> Generator[Op, None, Ref]:
        type = TensorType.replicated(dtype, shape)
        value = Value(name=unique(f"{op.result.name}_{name}", self.taken), type=type)
        yield Op(name=name, args=args, results=(value,), source=op.source)
        return Ref(value.name)

    def _normalized(self, name: str) -> tuple[str, int] | None:
        """The logits behind log-probabilities, and the dimension of their classes."""
        op = self.made.get(name)
        if op is None or op.name != "log_softmax" or op.attrs or not isinstance(op.args[1], int):
            return None
        source = next(op.refs())
        same = self.types[source].dtype == op.result.type.dtype and len(self.types[source].shape) > 1
        return (source, op.args[1] % len(self.types[source].shape)) if same else None
