"""Compute logits in chunks of rows; each chunk exists only while its part of the loss is computed.

    head             = linear(x, head.weight)
    nll, nll_lse     = cross_entropy(head, labels, …)
    saved count, head, labels, nll_lse, x
    grad_head        = cross_entropy_backward(grad_nll, head, …)
    grad_x           = linear_grad_input(grad_head, head.weight)
    grad_head.weight = linear_grad_weight(grad_head, x)
  ->
    nll_max, … = linear_cross_entropy(x, head.weight, …, chunks=2)
    nll_lse    = log_sum_exp(nll_max, nll_sums)
    nll        = cross_entropy_rows(nll_lse, …)
    saved count, x, labels, nll_lse
    grad_x, grad_head.weight = linear_cross_entropy_backward(grad_nll, x, …)

Backward repeats the product with the head's weight, a third of the product's total time, and at most one chunk of
logits is in memory (Hsu et al. 2024, Liger Kernel, section 3.2; Wijmans et al. 2025, Cut Your Losses). If an axis cuts
the classes, the chunks consist of each rank's own classes, and the same three numbers a row are combined. Casts, a bias
or a mask of classes, and views and slices of rows may stand between the product and the loss. If the weight is not
trained, `linear_cross_entropy_grad_input` computes the gradient of x alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.errors import PartcError, Source
from partc.ir.layout import Layout, Sizes
from partc.ir.naming import unique
from partc.ir.program import Arg, DTypeArg, Graph, Op, Program, Ref, Region, TensorType, Value
from partc.passes.row_losses import below_own, in_pieces

_PIECES = frozenset({"cross_entropy", "shard_max", "sum_exp", "pick", "smooth_sum"})
_GRADIENTS: Mapping[str, int] = {"linear_grad_input": 0, "linear_grad_weight": 1, "linear_grad_bias": 2, "sum": 2}


def chunk(program: Program, *, loss_chunks: int = 1) -> Program:
    """Rewrite every loss whose logits are the result of a product. Raises PartcError P0418 if none can be rewritten."""
    if loss_chunks == 1:
        return program
    regions, refused = _chunked(program, loss_chunks)
    if regions == program.regions:
        refused = refused or [_Refused("the model has no cross-entropy", None)]
        raise PartcError(
            "P0418",
            f"no loss can be computed in chunks: {'; '.join(dict.fromkeys(each.cause for each in refused))}",
            source=refused[0].source,
            help="leave out --loss-chunks, or give the loss the result of one linear layer",
        )
    return replace(program, regions=regions)


def left_whole(program: Program, *, loss_chunks: int) -> tuple[str, ...]:
    """Notes for the user about losses that `chunk` leaves whole although it rewrites others."""
    _, refused = _chunked(program, loss_chunks) if loss_chunks > 1 else ((), [])
    return tuple(
        f"{f'{each.source}: ' if each.source else ''}"
        f"a loss is computed from whole logits, not in {loss_chunks} chunks: {each.cause}"
        for each in refused
    )


def _chunked(program: Program, chunks: int) -> tuple[tuple[Region, ...], list[_Refused]]:
    refused: list[_Refused] = []
    return tuple(_Losses(region, program.sizes, chunks, refused).region() for region in program.regions), refused


@dataclass(frozen=True, slots=True)
class _Refused:
    cause: str
    source: Source | None


@dataclass(frozen=True, slots=True)
class _Head:
    """A product, the operations between it and a loss, and the uses of the loss's gradient."""

    linear: Op
    path: tuple[Op, ...]  # forward, from the product to the loss
    pieces: tuple[Op, ...]
    gradient: Op
    back: tuple[Op, ...]  # backward, from the loss to the product
    ends: Mapping[int, Op]  # the operations that compute the gradients of input, weight and bias

    @property
    def logits(self) -> str:
        return (self.path[-1] if self.path else self.linear).result.name


class _Losses:
    """The losses of one region."""

    def __init__(self, region: Region, sizes: Sizes, chunks: int, refused: list[_Refused]) -> None:
        self.given = region
        self.sizes = sizes
        self.chunks = chunks
        self.refused = refused
        self.types = region.types(region.forward)
        self.taken = {*self.types, *(region.types(region.backward) if region.backward else ())}
        self.makers = region.forward.makers()
        self.readers = region.forward.readers()
        self.back_readers = region.backward.readers() if region.backward else {}

    def region(self) -> Region:
        region = self.given
        if region.backward is None:
            return region
        forward, backward = region.forward, region.backward
        for name in dict.fromkeys(next(op.refs()) for op in forward.ops if op.name in _PIECES):
            head = self._head(name)
            if head is not None:
                forward, backward = self._rewritten(head, forward, backward)
        if forward is region.forward:
            return region
        own = {value.name for op in backward.ops for value in op.results} | {value.name for value in region.params}
        incoming = tuple(value for value in backward.inputs if value.name not in region.saved)
        own |= {value.name for value in incoming}
        saved = tuple(dict.fromkeys(name for op in backward.ops for name in op.refs() if name not in own))
        values = forward.definitions()
        backward = replace(backward, inputs=(*incoming, *(values[name] for name in saved)))
        return replace(region, forward=forward, backward=backward, saved=saved)

    # -- which losses ---------------------------------------------------------------------------

    def _head(self, logits: str) -> _Head | None:
        """The head that computes some logits; None, with a reason recorded, if it cannot be chunked."""
        pieces = tuple(op for op in self.readers[logits] if op.name in _PIECES)
        if len({op.name for op in pieces}) < len(pieces):
            return self._refuse("several losses read its logits", pieces[-1])
        path: list[Op] = []
        name = logits
        while (maker := self.makers.get(name)) is not None and maker.name != "linear":
            if not self._treats_rows_alike(maker, name):
                return self._refuse(
                    f"{maker.name} stands between it and the product that makes its logits", maker, *pieces
                )
            path.insert(0, maker)
            name = next(maker.refs())
        if maker is None and any(value.name == name for value in self.given.forward.inputs):
            return self._refuse("its logits come from another region, or stage", pieces[0])
        if maker is None:
            return self._refuse("its logits are not the product of a linear layer", pieces[0])
        inside = {id(op) for op in (*path, *pieces)}
        for op in (maker, *path):
            others = [other for other in self.readers.get(op.result.name, ()) if id(other) not in inside]
            if others or op.result.name in self.given.forward.outputs:
                return self._refuse("something else reads its logits too", *others, op, *pieces)
        return self._with_gradients(maker, tuple(path), pieces)

    def _treats_rows_alike(self, op: Op, name: str) -> bool:
        """Whether an operation treats all rows alike, or selects rows."""
        shape = self.types[name].shape
        match op.name:
            case "to" | "mask_classes":
                return True
            case "reshape":
                return self.types[next(op.refs())].shape[-1] == shape[-1]
            case "slice":
                return len(op.args) < 2 or op.args[1] != len(shape) - 1
            case "add":
                return not op.attrs and self._vector(op, shape[-1]) is not None
        return False

    def _vector(self, op: Op, classes: int) -> Ref | None:
        """The vector over classes that an addition adds to logits; None for other additions."""
        second = op.args[1]
        return second if isinstance(second, Ref) and self.types[second.name].shape == (classes,) else None

    def _with_gradients(self, linear: Op, path: tuple[Op, ...], pieces: tuple[Op, ...]) -> _Head | None:
        made = {op.result.name for op in (linear, *path)}
        first = {id(op): op for name in made for op in self.back_readers.get(name, ())}
        if len(first) != 1 or (gradient := next(iter(first.values()))).name != "cross_entropy_backward":
            return self._refuse("several gradients read its logits", linear)
        back: list[Op] = []
        ends: dict[int, Op] = {}
        todo = [gradient.result.name]
        while todo:
            name = todo.pop()
            for op in self.back_readers.get(name, ()):
                end = _GRADIENTS.get(op.name)
                if end is not None and end not in ends and op.args[0] == Ref(name):
                    ends[end] = op
                elif op.name in ("to", "reshape", "slice_backward") and not ends:
                    back.append(op)
                    todo.append(op.result.name)
                else:
                    return self._refuse(f"{op.name} reads the gradient of its logits", linear)
        if 0 not in ends:
            return self._refuse("the input of its head has no gradient", linear)
        if 2 in ends and 1 not in ends:
            return self._refuse("the bias of its head is trained, but not the weight", linear)
        classes = self.types[linear.result.name].shape[-1]
        if 2 in ends and ends[2].result.type.shape != (classes,):
            return self._refuse(f"{ends[2].name} reads the gradient of its logits", linear)
        return _Head(linear, path, pieces, gradient, tuple(back), ends)

    def _refuse(self, cause: str, *ops: Op) -> _Head | None:
        self.refused.append(_Refused(cause, next(self._places(ops), None)))
        return None

    def _places(self, ops: Sequence[Op]) -> Iterator[Source]:
        """The user's lines of these operations, or else of their operands."""
        found = list(ops)
        for op in found:
            if op.source and op.source.line:
                yield op.source
            found += [self.makers[name] for name in [*op.refs()][:1] if name in self.makers]

    # -- in their place -------------------------------------------------------------------------

    def _rewritten(self, head: _Head, forward: Graph, backward: Graph) -> tuple[Graph, Graph]:
        rows, views = self._rows(head)
        bias, sums = self._bias(head)
        gone = {id(op) for op in (head.linear, *head.path, *head.pieces)}
        start = min(index for index, op in enumerate(forward.ops) if any(op is piece for piece in head.pieces))
        losses = self._forward(head, rows, bias)
        ops: list[Op] = []
        for index, op in enumerate(forward.ops):
            if index == start:
                ops += [*views, *sums, *losses.pop(None, ())]
            ops += losses.get(id(op), ()) if id(op) in gone else [op]
        new_forward = replace(forward, ops=tuple(ops))
        gone = {id(op) for op in (head.gradient, *head.back, *head.ends.values())}
        ops = []
        for op in backward.ops:
            if op is head.gradient:
                ops += self._backward(head, rows, bias)
            ops += [] if id(op) in gone else [op]
        return new_forward, replace(backward, ops=tuple(ops))

    def _rows(self, head: _Head) -> tuple[Ref, list[Op]]:
        """The rows that are multiplied, with the leading dimensions of the logits at the loss."""
        x = next(head.linear.refs())
        width = self.types[x].layout.dims[-1]
        views: list[Op] = []
        for op in head.path:
            if op.name not in ("reshape", "slice"):
                continue
            seen = op.result.type.layout
            type = replace(self.types[x], layout=Layout((*seen.dims[:-1], width)))
            value = Value(name=unique(f"{x}_rows", self.taken), type=type)
            args: tuple[Arg, ...] = (Ref(x), *op.args[1:])
            if op.name == "reshape":
                args = (Ref(x), type.layout.local_shape(self.sizes))
            views.append(replace(op, args=args, results=(value,)))
            x = value.name
            self.types[x] = type
        return Ref(x), views

    def _bias(self, head: _Head) -> tuple[Arg, list[Op]]:
        """The sum of all additions to rows of logits, as a vector over classes."""
        classes = self.types[head.linear.result.name].shape[-1]
        added = list(head.linear.args[2:3])
        added += [self._vector(op, classes) for op in head.path if op.name == "add"]
        terms = [arg for arg in added if isinstance(arg, Ref)]
        sums: list[Op] = []
        for op in head.path:
            if op.name == "mask_classes":
                sums += self._mask(op)
                terms.append(Ref(sums[-1].result.name))
        while len(terms) > 1:
            first, second = terms[:2]
            value = Value(name=unique(f"{head.linear.result.name}_bias", self.taken), type=self.types[second.name])
            sums.append(Op(name="add", args=(first, second), results=(value,), source=head.linear.source))
            self.types[value.name] = value.type
            terms[:2] = [Ref(value.name)]
        return (terms[0] if terms else None), sums

    def _mask(self, op: Op) -> list[Op]:
        """A mask of classes as a vector to add."""
        layout = Layout(op.result.type.layout.dims[-1:])
        type = replace(op.result.type, layout=layout)
        zeros, mask = (self._value(f"{op.result.name}_{word}", type) for word in ("zeros", "mask"))
        shape = layout.local_shape(self.sizes)
        self.types[mask.name] = type
        return [
            Op(
                name="full",
                args=(shape, 0.0),
                attrs=(("dtype", DTypeArg(type.dtype)),),
                results=(zeros,),
                source=op.source,
            ),
            replace(op, args=(Ref(zeros.name), *op.args[1:]), results=(mask,)),
        ]

    def _forward(self, head: _Head, rows: Ref, bias: Arg) -> dict[int | None, Sequence[Op]]:
        """The chunked operation, and the replacement of each piece."""
        after: dict[int | None, Sequence[Op]] = {}
        pieces = {op.name: op for op in head.pieces}
        whole = pieces.get("cross_entropy")
        if whole is not None:
            classes = self.types[head.linear.result.name].shape[-1]
            pieces = {op.name: op for op in in_pieces(whole, classes, self.taken)}
            after[id(whole)] = [op for name, op in pieces.items() if name not in _PIECES]
        most, total = pieces["shard_max"].result, pieces["sum_exp"]
        if total.args[1] != Ref(most.name):
            own, after[id(total)] = below_own(total, most.name, self.taken)
            total = own
        smooth = pieces.get("smooth_sum")
        after[None] = (
            Op(
                name="linear_cross_entropy",
                args=(rows, head.linear.args[1], bias, pieces["pick"].args[1], smooth.args[1] if smooth else None),
                attrs=(("chunks", self.chunks), *self._class_axis(head)),
                results=(most, total.result, pieces["pick"].result, *(smooth.results if smooth else ())),
                source=head.linear.source,
            ),
        )
        return after

    def _backward(self, head: _Head, rows: Ref, bias: Arg) -> Iterator[Op]:
        grad, _, labels, lse, *rest = head.gradient.args
        wanted = head.ends[0].result
        views = [op for op in head.back if op.name != "to"]
        made = wanted
        if views:
            made = self._value(f"{wanted.name}_rows", replace(wanted.type, layout=self.types[rows.name].layout))
            made = replace(
                made, type=replace(made.type, layout=replace(made.type.layout, partial=wanted.type.layout.partial))
            )
        yield Op(
            name="linear_cross_entropy_backward" if 1 in head.ends else "linear_cross_entropy_grad_input",
            args=(grad, rows, head.linear.args[1], bias, labels, lse, *rest),
            attrs=(("chunks", self.chunks), *self._class_axis(head)),
            results=(made, *(head.ends[end].result for end in sorted(head.ends) if end)),
            source=head.linear.source,
        )
        yield from self._seen_back(views, made, wanted)

    def _seen_back(self, views: Sequence[Op], made: Value, wanted: Value) -> Iterator[Op]:
        """The gradient of the rows at the loss, as a gradient of the rows at the product."""
        width, partial = wanted.type.layout.dims[-1], wanted.type.layout.partial
        for index, op in enumerate(views):
            layout = Layout((*op.result.type.layout.dims[:-1], width), partial)
            result = wanted
            if index < len(views) - 1:
                result = self._value(f"{wanted.name}_rows", replace(wanted.type, layout=layout))
            yield replace(op, args=(Ref(made.name), layout.local_shape(self.sizes), *op.args[2:]), results=(result,))
            made = result

    def _class_axis(self, head: _Head) -> tuple[tuple[str, Arg], ...]:
        """The axis that cuts the classes."""
        return tuple((key, value) for key, value in head.gradient.attrs if key == "axis")

    def _value(self, name: str, type: TensorType) -> Value:
        return Value(name=unique(name, self.taken), type=type)
