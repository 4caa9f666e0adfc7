"""Cross-entropy as one kernel that reads the logits once.

    wide = to(logits, <f32>)                            most, own, picked = fused(logits, labels, …)
    most = shard_max(wide)                              | wide   = to(logits, <f32>)
    top  = all_reduce(most, op="max", axis="tp")        | most   = shard_max(wide)
    part = sum_exp(wide, top)                     ->    | own    = sum_exp(wide, most)
    …                                                   | picked = pick(wide, labels, axis="tp")
    picked = pick(wide, labels, axis="tp")              top    = all_reduce(most, op="max", axis="tp")
                                                        below  = sub(most, top)
                                                        factor = exp(below)
                                                        part   = mul(own, factor)

Each rank sums exponentials relative to its own maximum (Milakov and Gimelshein 2018, Online normalizer calculation for
softmax, algorithm 3), and the sum is then scaled to the maximum of all ranks, one number a row: the collectives stay
the same. Without an axis the same kernel also computes the losses of rows. Elementwise operations on the logits belong
to the kernel, so that neither logits in fp32 nor their softmax are ever in memory. Log-sum-exps of rows, and softmaxes
of rows that no program can hold whole, are computed in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import replace

from partc import fuel
from partc.ir.layout import Layout, Sizes
from partc.ir.naming import unique
from partc.ir.program import FLOATING, Graph, Op, Ref, Region, TensorType, Value, needed
from partc.passes.fuse.composites import spelled_out
from partc.passes.fuse.iteration_spaces import MOST_COLUMNS
from partc.passes.row_losses import below_own, in_pieces, log_sum_exp
from partc.rules import kernels
from partc.rules.rule import integers

_DIMENSION = {  # the position of the argument `dim`
    "softmax": 1, "log_softmax": 1, "logsumexp": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2,
}  # fmt: skip


def with_streaming_kernels(region: Region, sizes: Sizes) -> Region:
    """The region with streaming kernels in its graphs, each at the place of its first operation."""
    return region.mapped(lambda graph: _Streams(graph, region.types(graph), region.read_outside(graph), sizes).graph())


class _Streams:
    """The streamed logits of one graph."""

    def __init__(self, graph: Graph, types: Mapping[str, TensorType], kept: Collection[str], sizes: Sizes) -> None:
        self.types = dict(types)
        self.taken = set(self.types)
        self.sizes = sizes
        self.sums: dict[str, Value] = {}  # logits -> the log-sum-exps of their rows that a loss computes
        ops = tuple(step for op in graph.ops for step in self._spelled(op))
        self.original = replace(graph, ops=ops)
        self.kept = kept
        self.makers = self.original.makers()
        self.types.update((value.name, value.type) for op in ops for value in op.results)
        self.place = {id(op): index for index, op in enumerate(ops)}
        self.readers = self.original.readers()

    def graph(self) -> Graph:
        """The graph with one kernel for every stream of logits."""
        instead: dict[int, tuple[Op, ...]] = {}
        for name, pieces in self._losses():
            if fuel.may_rewrite("stream of logits", pieces[0].source):
                instead.update(self._stream(name, pieces))
        ops = [step for op in self.original.ops for step in instead.get(id(op), (op,))]
        return replace(self.original, ops=needed(ops, self.kept, removable=lambda op: kernels.kind(op) is not None))

    def _spelled(self, op: Op) -> Iterator[Op]:
        """Losses of whole rows in the same pieces as sharded losses; a z-loss reads their sums."""
        logits = next(op.refs(), "")
        if op.name == "cross_entropy" and not dict(op.attrs).get("axis"):
            self.sums[logits] = op.results[1]
            yield from in_pieces(op, self.types[logits].shape[-1], self.taken)
        elif not self._along_rows(op):
            yield op
        elif op.name == "logsumexp" and (logits in self.sums or self._is_long(logits)):
            known = yield from self._log_sum_exp(op, logits)
            yield replace(op, name="reshape", args=(known, op.result.type.layout.local_shape(self.sizes)))
        elif not self._is_long(logits):
            yield op
        elif op.name in ("softmax", "log_softmax"):
            yield from self._softmax(op, logits)
        else:
            yield from spelled_out(op, self.types, self.sizes, self.taken)

    def _softmax(self, op: Op, logits: str) -> Iterator[Op]:
        """A softmax from the log-sum-exps of its rows, or its logarithm."""
        known = yield from self._log_sum_exp(op, logits)
        layout = Layout((*op.result.type.layout.dims[:-1], *Layout.replicated((1,)).dims))
        column = replace(self._named(op, "lse"), type=replace(op.result.type, layout=layout))
        below = op.result if op.name == "log_softmax" else self._named(op, "below")
        args = (known, layout.local_shape(self.sizes))
        yield Op(name="reshape", args=args, results=(column,), source=op.source)
        yield Op(name="sub", args=(Ref(logits), Ref(column.name)), results=(below,), source=op.source)
        if below is not op.result:
            yield Op(name="exp", args=(Ref(below.name),), results=op.results, source=op.source)

    def _log_sum_exp(self, op: Op, logits: str) -> Generator[Op, None, Ref]:
        """The log-sum-exp of each row: that of an existing loss, or a new one."""
        if logits not in self.sums:
            rows = Layout(self.types[logits].layout.dims[:-1])
            made = replace(self._named(op, "rows"), type=replace(op.result.type, layout=rows))
            yield from log_sum_exp(op, logits, made, self.taken)
            self.sums[logits] = made
        return Ref(self.sums[logits].name)

    def _named(self, op: Op, word: str) -> Value:
        return replace(op.result, name=unique(f"{op.result.name}_{word}", self.taken))

    def _along_rows(self, op: Op) -> bool:
        """Whether the operation is a softmax or a part of one, along the last dimension, in fp32 or fp64."""
        if op.name not in _DIMENSION or op.attrs:
            return False
        type = self.types[next(op.refs())]
        rank = len(type.shape) - 1
        last = rank > 0 and integers(op.args[_DIMENSION[op.name]]) in ((-1,), (rank,))
        return last and type.dtype == op.result.type.dtype in ("f32", "f64")

    def _is_long(self, logits: str) -> bool:
        """Whether the rows are too long to be held whole by a program."""
        shape = self.types[logits].layout.local_shape(self.sizes)
        return shape[-1] > MOST_COLUMNS and 0 not in shape

    def _losses(self) -> Iterator[tuple[str, list[Op]]]:
        """Logits, each with the operations of one kernel; losses of the same logits share it."""
        found: dict[str, list[list[Op]]] = {}
        for op in self.original.ops:
            if op.name in kernels.STREAMED:
                losses = found.setdefault(next(op.refs()), [[]])
                if any(other.name == op.name for other in losses[-1]):
                    losses.append([])
                losses[-1].append(op)
        return ((name, pieces) for name, losses in found.items() for pieces in losses)

    def _stream(self, name: str, pieces: list[Op]) -> Iterator[tuple[int, tuple[Op, ...]]]:
        """The replacements of the operations on some logits."""
        shape = self.types[name].layout.local_shape(self.sizes)
        if len(shape) < 2 or 0 in shape or self.types[name].dtype not in FLOATING:
            return
        prologue = self._prologue(name, pieces)
        first = min(self.place[id(op)] for op in pieces)
        own, after = self._own_sums(name, pieces)
        body = [*prologue, *own]
        body += self._epilogue({value.name for op in body for value in op.results})
        inside = {id(op) for op in (*pieces, *body)}
        made = {value.name: value for op in body for value in op.results}
        outside = [
            *(op for op in self.original.ops if id(op) not in inside),
            *(op for ops in after.values() for op in ops),
        ]
        read = {item for op in outside for item in op.refs()} | set(self.kept)
        still = {value.name for op in prologue for value in op.results}
        results = tuple(value for item, value in made.items() if item in read and item not in still)
        done = needed(body, {value.name for value in results})
        reads = dict.fromkeys(item for op in done for item in op.refs() if item not in made)
        if not results or any(item in self.makers and self.place[id(self.makers[item])] > first for item in reads):
            return  # labels are computed between the pieces
        kernel = Op(
            name="fused",
            args=tuple(map(Ref, reads)),
            attrs=(("kernel", "cross_entropy"),),
            results=results,
            source=pieces[0].source,
            body=tuple(done),
        )
        for op in (*pieces, *body):
            if id(op) in self.place and not any(op is other for other in prologue):
                yield id(op), after.get(id(op), ())
        start = self.original.ops[first]
        yield id(start), (kernel, *after.get(id(start), ()))

    def _own_sums(self, name: str, pieces: list[Op]) -> tuple[list[Op], dict[int, tuple[Op, ...]]]:
        """The pieces relative to this rank's own maximum, and the operations that rescale sums to the global
        maximum.
        """
        found = [op for op in pieces if op.name != "sum_exp"]
        tops = [op for op in found if op.name == "shard_max"]
        after: dict[int, tuple[Op, ...]] = {}
        for op in pieces:
            if op.name != "sum_exp":
                continue
            if not tops:
                most = Value(name=unique(f"{op.result.name}_max", self.taken), type=op.result.type)
                tops.append(Op(name="shard_max", args=(Ref(name),), results=(most,), source=op.source))
                found.append(tops[0])
            if op.args[1] == Ref(tops[0].result.name):
                found.append(op)
                continue
            own, after[id(op)] = below_own(op, tops[0].result.name, self.taken)
            found.append(own)
        return found, after

    def _prologue(self, name: str, pieces: list[Op]) -> list[Op]:
        """The elementwise operations that make the logits, if nothing else reads their results; casts and views in any
        case.
        """
        size = self.types[name].local_elements(self.sizes)
        inside = {id(op) for op in pieces}
        found: list[Op] = []
        todo = [name]
        while todo:
            op = self.makers.get(todo.pop(0))
            if op is None or id(op) in inside:
                continue
            kind = kernels.kind(op)
            free = kind in ("view", "constant") or op.name == "to"
            alone = len(op.results) == 1 and self.types[op.result.name].local_elements(self.sizes) == size
            alone = alone and op.result.name not in self.kept
            alone = alone and all(id(reader) in inside for reader in self.readers[op.result.name])
            if free or (kind == "pointwise" and alone):
                inside.add(id(op))
                found.append(op)
                todo.extend(op.refs())
        return sorted(found, key=lambda op: self.place[id(op)])

    def _epilogue(self, known: set[str]) -> list[Op]:
        """The losses of rows, if the kernel contains all their operands."""
        found = []
        for op in self.original.ops:
            if op.name in ("log_sum_exp", "cross_entropy_rows") and kernels.kind(op) == "pointwise":
                given = [name for name in op.refs() if name in known]
                whole = [arg.name for arg in (*op.args[2:4], *op.args[8:]) if isinstance(arg, Ref)]
                if given and {*op.refs()} - known <= set(whole):
                    found.append(op)
                    known.add(op.result.name)
        return found
