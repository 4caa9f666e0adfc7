"""Cross-entropy as one kernel that goes through the logits once.

    wide = to(logits, <f32>)                            most, own, picked = fused(logits, labels, …)
    most = shard_max(wide)                              | wide   = to(logits, <f32>)
    top  = all_reduce(most, op="max", axis="tp")        | most   = shard_max(wide)
    part = sum_exp(wide, top)                     ->    | own    = sum_exp(wide, most)
    …                                                   | picked = pick(wide, labels, axis="tp")
    picked = pick(wide, labels, axis="tp")              top    = all_reduce(most, op="max", axis="tp")
                                                        below  = sub(most, top)
                                                        factor = exp(below)
                                                        part   = mul(own, factor)

Exponentials are summed below each rank's own maximum (Milakov and Gimelshein 2018, Online normalizer calculation
for softmax, algorithm 3), and that sum is scaled to the maximum of all ranks, one number a row: the collectives are
the same. Without an axis the losses of rows come out of the same kernel. What is done to each logit before belongs
to the kernel, so that neither logits in fp32 nor their softmax are ever in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from partc.layout import Sizes
from partc.naming import unique
from partc.passes.row_losses import below_own, in_pieces
from partc.program import FLOATING, Graph, Op, Ref, Region, TensorType, Value
from partc.rules import kernels


def streamed(region: Region, sizes: Sizes) -> Region:
    """The region with such kernels in its graphs, each where the first of its operations was."""
    params = {value.name: value.type for value in region.params}

    def rewritten(graph: Graph, also: Collection[str]) -> Graph:
        return _Streams(graph, params, {*graph.outputs, *also}, sizes).graph()

    return replace(
        region,
        forward=rewritten(region.forward, region.saved),
        backward=region.backward and rewritten(region.backward, ()),
        weight=region.weight and rewritten(region.weight, ()),
    )


class _Streams:
    """One graph."""

    def __init__(self, graph: Graph, params: Mapping[str, TensorType], kept: Collection[str], sizes: Sizes) -> None:
        self.types = {**params, **{name: value.type for name, value in graph.definitions().items()}}
        self.taken = set(self.types)
        ops = tuple(step for op in graph.ops for step in self._spelled(op))
        self.original = replace(graph, ops=ops)
        self.kept = kept
        self.sizes = sizes
        self.makers = {value.name: op for op in ops for value in op.results}
        self.types.update((value.name, value.type) for op in ops for value in op.results)
        self.place = {id(op): index for index, op in enumerate(ops)}
        self.readers: dict[str, list[Op]] = {}
        for op in ops:
            for name in op.refs():
                self.readers.setdefault(name, []).append(op)

    def graph(self) -> Graph:
        """The graph with every stream of logits in one kernel."""
        instead: dict[int, tuple[Op, ...]] = {}
        for name, pieces in self._losses():
            instead.update(self._stream(name, pieces))
        ops = [step for op in self.original.ops for step in instead.get(id(op), (op,))]
        return replace(self.original, ops=tuple(self._read(ops)))

    def _spelled(self, op: Op) -> Iterator[Op]:
        """Losses of whole rows in the pieces that sharded ones are made of."""
        if op.name != "cross_entropy" or dict(op.attrs).get("axis"):
            yield op
            return
        logits = next(op.refs())
        yield from in_pieces(op, self.types[logits].shape[-1], self.taken)

    def _losses(self) -> Iterator[tuple[str, list[Op]]]:
        """Logits, with the operations of one kernel: one of each, where several losses read the same logits."""
        found: dict[str, list[list[Op]]] = {}
        for op in self.original.ops:
            if op.name in kernels.STREAMED:
                losses = found.setdefault(next(op.refs()), [[]])
                if any(other.name == op.name for other in losses[-1]):
                    losses.append([])
                losses[-1].append(op)
        return ((name, pieces) for name, losses in found.items() for pieces in losses)

    def _stream(self, name: str, pieces: list[Op]) -> Iterator[tuple[int, tuple[Op, ...]]]:
        """What stands in place of the operations on some logits."""
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
        done = _needed(body, {value.name for value in results})
        reads = dict.fromkeys(item for op in done for item in op.refs() if item not in made)
        if not results or any(item in self.makers and self.place[id(self.makers[item])] > first for item in reads):
            return  # labels that are made between the pieces
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
        """The pieces below this rank's own maximum, and what scales a sum that was below another."""
        found = [op for op in pieces if op.name != "sum_exp"]
        tops = [op for op in found if op.name == "shard_max"]
        after: dict[int, tuple[Op, ...]] = {}
        for op in pieces:
            if op.name != "sum_exp":
                continue
            if not tops:
                local = replace(op.result.type, layout=replace(op.result.type.layout, partial=()))
                most = Value(name=unique(f"{op.result.name}_max", self.taken), type=local)
                tops.append(Op(name="shard_max", args=(Ref(name),), results=(most,), source=op.source))
                found.append(tops[0])
            if op.args[1] == Ref(tops[0].result.name):
                found.append(op)
                continue
            own, after[id(op)] = below_own(op, tops[0].result.name, self.taken)
            found.append(own)
        return found, after

    def _prologue(self, name: str, pieces: list[Op]) -> list[Op]:
        """What is done to each logit before, where nothing else reads it; casts and views in any case."""
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
        """Losses of rows, where all that they are made of is in the kernel."""
        found = []
        for op in self.original.ops:
            if op.name in ("log_sum_exp", "cross_entropy_rows") and kernels.kind(op) == "pointwise":
                given = [name for name in op.refs() if name in known]
                whole = [arg.name for arg in (*op.args[2:4], *op.args[8:]) if isinstance(arg, Ref)]
                if given and {*op.refs()} - known <= set(whole):
                    found.append(op)
                    known.add(op.result.name)
        return found

    def _read(self, ops: list[Op]) -> list[Op]:
        """Without what only kernels read, which do it themselves."""
        needed = set(self.kept)
        found: list[Op] = []
        for op in reversed(ops):
            if kernels.kind(op) is None or not needed.isdisjoint(value.name for value in op.results):
                needed.update(op.refs())
                found.append(op)
        return found[::-1]


def _needed(ops: list[Op], wanted: set[str]) -> list[Op]:
    """Those that lead to something wanted, in order."""
    needed = set(wanted)
    found: list[Op] = []
    for op in reversed(ops):
        if not needed.isdisjoint(value.name for value in op.results):
            needed.update(op.refs())
            found.append(op)
    return found[::-1]
