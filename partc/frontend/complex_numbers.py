"""Complex tensors of a traced model as pairs of real numbers: `x[..., 0]` is the real part, `x[..., 1]` the imaginary.

    mul = mul(view_as_complex, freqs)     # complex64[16, 32, 4, 8], complex64[32, 1, 8]
  ->
    mul = stack((sub(mul(a, c), mul(b, d)), add(mul(b, c), mul(a, d))), -1)  # f32[16, 32, 4, 8, 2]

`view_as_complex` and `view_as_real` then disappear. The derivatives of this real arithmetic equal torch's complex
autograd, in which the gradient of a complex tensor is the gradient of its pair.

`REWRITES` has one function for each operation. Complex operands are `Pair`s, a complex result is returned as a `Pair`,
and the trace records the operations that the function runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from partc.errors import PartcError
from partc.frontend.model_precision import computing_in
from partc.ir.operators import resolve
from partc.torch_private import tree_flatten


@dataclass(frozen=True, slots=True)
class Pair:
    """A complex tensor as a real one; the last dimension holds the real and the imaginary part."""

    parts: Tensor

    @property
    def real(self) -> Tensor:
        return self.parts.select(-1, 0)

    @property
    def imag(self) -> Tensor:
        return self.parts.select(-1, 1)

    @property
    def rank(self) -> int:
        return self.parts.dim() - 1

    @property
    def conjugate(self) -> Pair:
        return as_pair(self.real, -self.imag)


Operand = Pair | Tensor | complex | float | int
Rewritten = Pair | Tensor | Sequence[Pair | Tensor]
Rewrite = Callable[..., Rewritten]


# Transforms of half of a symmetric spectrum to real numbers, whose operand may be real as well.
_TO_REAL = frozenset(f"fft_{kind}{dims}" for kind in ("irfft", "hfft") for dims in ("", "2", "n"))


def is_complex(node: fx.Node, name: str) -> bool:
    """Whether an operation has a complex operand or result, or takes its real operand for complex numbers."""
    if name in _TO_REAL:
        return True
    found = [node.meta.get("val"), *(other.meta.get("val") for other in node.all_input_nodes)]
    flat = [item for value in found for item in (value if isinstance(value, tuple | list) else (value,))]
    return any(isinstance(item, Tensor) and item.is_complex() for item in flat)


def real_operations(node: fx.Node, name: str) -> fx.GraphModule:
    """The real operations in place of a complex one: a graph with its tensor operands as inputs, in order.

    Raises PartcError P0209 for an operation that has no rewrite.
    """
    rewrite = REWRITES.get(name) or _in_place(name)
    if rewrite is None:
        raise PartcError(
            "P0209",
            f"{name} of complex tensors is not supported",
            help="write it with real tensors: torch.view_as_real gives the real and imaginary parts",
        )
    operands = node.all_input_nodes
    like = node.meta["val"]

    def run(*tensors: Tensor) -> Any:
        known = dict(zip(operands, tensors, strict=True))

        def converted(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return Pair(known[arg]) if arg.meta["val"].is_complex() else known[arg]
            if isinstance(arg, list | tuple):
                return [converted(item) for item in arg]
            return arg

        kwargs = {key: converted(arg) for key, arg in node.kwargs.items() if arg is not None}
        for key in ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "implicit"):
            kwargs.pop(key, None)
        try:
            found = rewrite(like, *map(converted, node.args), **kwargs)
        except TypeError as error:
            raise PartcError(
                "P0209",
                f"{name} of complex tensors is not supported with these arguments",
                help="write it with real tensors: torch.view_as_real gives the real and imaginary parts",
            ) from error
        return [
            each.parts if isinstance(each, Pair) else each for each in (found if isinstance(found, list) else [found])
        ]

    modes = (getattr(other.meta["val"], "fake_mode", None) for other in operands)
    mode = next(filter(None, modes), None) or like.fake_mode
    with mode:
        fakes = [_of_parts(other.meta["val"]) for other in operands]
    # Integers times numbers have the default dtype, which differs after the trace.
    every, _ = tree_flatten((like, [other.meta["val"] for other in operands]))
    tensors = [x for x in every if isinstance(x, Tensor)]
    held = next((x for x in tensors if x.is_complex()), tensors[0]).dtype.to_real()
    with computing_in(held):
        body: fx.GraphModule = make_fx(run, pre_dispatch=True)(*fakes)
    for inner in body.graph.nodes:
        for key in ("stack_trace", "nn_module_stack"):
            if key in node.meta:
                inner.meta[key] = node.meta[key]
    return body


def _in_place(name: str) -> Rewrite | None:
    """The rewrite of an operation that changes its first operand: the functional one, copied into the pair."""
    functional = REWRITES.get(name.removesuffix("_"))
    if functional is None or not name.endswith("_"):
        return None

    def rewrite(like: Tensor, x: Pair, *args: Any, **kwargs: Any) -> Pair:
        found = functional(like, x, *args, **kwargs)
        assert isinstance(found, Pair)
        return Pair(x.parts.copy_(found.parts))

    return rewrite


def _of_parts(value: Tensor) -> Tensor:
    shape, dtype = value.shape, value.dtype
    return torch.empty((*shape, 2), dtype=dtype.to_real()) if value.is_complex() else torch.empty(shape, dtype=dtype)


def as_pair(real: Tensor, imag: Tensor) -> Pair:
    return Pair(torch.stack((real, imag), -1))


def _as_pair(x: Operand, like: Tensor) -> Pair:
    """An operand as a pair of the result's precision."""
    if isinstance(x, Pair):
        return x
    if isinstance(x, Tensor):
        real = x.to(like.dtype.to_real())
        return as_pair(real, torch.zeros_like(real))
    number = complex(x)
    return as_pair(*(torch.full((), part, dtype=like.dtype.to_real()) for part in (number.real, number.imag)))


def _is_real(x: Operand) -> bool:
    return not isinstance(x, Pair) and not isinstance(x, complex)


def _factor(x: Operand) -> Any:
    """A real operand as a factor of both parts."""
    return x.unsqueeze(-1) if isinstance(x, Tensor) else x


def _mul(like: Tensor, x: Operand, y: Operand) -> Pair:
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Pair) and _is_real(other):
            return Pair(one.parts * _factor(other))
    a, b = _parts(x)
    c, d = _parts(y)
    if b is None or d is None:  # a real tensor and a complex number
        return as_pair(a * c, b * c if d is None else a * d)
    return as_pair(a * c - b * d, b * c + a * d)


def _parts(x: Operand) -> tuple[Any, Any]:
    """The real and the imaginary part; the latter is None for a real tensor."""
    if isinstance(x, Pair):
        return x.real, x.imag
    if isinstance(x, Tensor):
        return x, None
    number = complex(x)
    return number.real, number.imag


def _div(like: Tensor, x: Operand, y: Operand) -> Pair:
    if isinstance(x, Pair) and _is_real(y):
        return Pair(x.parts / _factor(y))
    below = _as_pair(y, like)
    over = _mul(like, x, below.conjugate)
    return Pair(over.parts / below.parts.square().sum(-1, keepdim=True))


def _sum_of(sign: int) -> Rewrite:
    def rewrite(like: Tensor, x: Operand, y: Operand, alpha: Operand = 1) -> Pair:
        more = y if alpha == 1 else _mul(like, _as_pair(y, like), alpha)
        left, right = _as_pair(x, like).parts, _as_pair(more, like).parts
        return Pair(left + right if sign > 0 else left - right)

    return rewrite


def _on_parts(change: Callable[..., Tensor]) -> Rewrite:
    """The same operation on both parts."""
    return lambda like, x, *args, **kwargs: Pair(change(x.parts, *args, **kwargs))


def _on_each_part(change: Callable[..., Tensor]) -> Rewrite:
    """The same operation on the real and the imaginary part separately, each in the complex tensor's shape."""
    return lambda like, x, *args, **kwargs: as_pair(change(x.real, *args, **kwargs), change(x.imag, *args, **kwargs))


def _reshape(like: Tensor, x: Pair, *_: Any, **__: Any) -> Pair:
    return Pair(x.parts.reshape(*like.shape, 2))


def _dim(x: Pair, dim: int) -> int:
    return dim % max(x.rank, 1)


def _permute(like: Tensor, x: Pair, dims: Sequence[int]) -> Pair:
    return Pair(x.parts.permute(*(_dim(x, dim) for dim in dims), x.rank))


def _reversed(like: Tensor, x: Pair) -> Pair:
    return Pair(x.parts.permute(*reversed(range(x.rank)), x.rank))


def _transpose(like: Tensor, x: Pair, a: int, b: int) -> Pair:
    return Pair(x.parts.transpose(_dim(x, a), _dim(x, b)) if x.rank > 1 else x.parts)


def _on_dimension(call: Callable[..., Any], position: int = 0) -> Rewrite:
    """An operation along one dimension, whose number is this argument after the tensor."""

    def rewrite(like: Any, x: Pair, *args: Any, dim: int | None = None, **kwargs: Any) -> Rewritten:
        given = [*args]
        if dim is not None or len(given) <= position:
            given.insert(position, 0 if dim is None else dim)
        given[position] = _dim(x, given[position])
        found = call(x.parts, *given, **kwargs)
        return [Pair(part) for part in found] if isinstance(found, tuple | list) else Pair(found)

    return rewrite


def _joined(call: Callable[[list[Tensor], int], Tensor], more: int) -> Rewrite:
    def rewrite(like: Tensor, tensors: Sequence[Operand], dim: int = 0) -> Pair:
        found = [_as_pair(x, like) for x in tensors]
        return Pair(call([x.parts for x in found], dim % (found[0].rank + more)))

    return rewrite


def _reduced(call: Callable[[Tensor, list[int], bool], Tensor]) -> Rewrite:
    def rewrite(
        like: Tensor, x: Pair, dim: Sequence[int] | int | None = None, keepdim: bool = False, dtype: Any = None
    ) -> Pair:
        dims = [dim] if isinstance(dim, int) else [*(dim or range(x.rank))]
        return Pair(call(x.parts, [_dim(x, each) for each in dims], keepdim))

    return rewrite


def _bilinear(call: Callable[[Any, Any], Tensor]) -> Rewrite:
    """A complex product as four real ones."""

    def rewrite(like: Tensor, x: Operand, y: Operand) -> Pair:
        (a, b), (c, d) = _parts(x), _parts(y)
        if b is None:
            return as_pair(call(a, c), call(a, d))
        if d is None:
            return as_pair(call(a, c), call(b, c))
        return as_pair(call(a, c) - call(b, d), call(b, c) + call(a, d))

    return rewrite


def _linear(like: Tensor, x: Pair, weight: Pair, bias: Pair | None = None) -> Rewritten:
    product = _bilinear(torch.nn.functional.linear)(like, x, weight)
    return product if bias is None else _sum_of(1)(like, product, bias)


def _einsum(like: Tensor, equation: str, tensors: Sequence[Operand], path: Any = None) -> Rewritten:
    if len(tensors) != 2:
        raise PartcError(
            "P0209", "einsum of other than two complex tensors is not supported", help="multiply two at a time"
        )
    return _bilinear(lambda a, b: torch.einsum(equation, a, b))(like, *tensors)


def _tensordot(like: Tensor, x: Operand, y: Operand, dims: Sequence[int], others: Sequence[int]) -> Rewritten:
    return _bilinear(lambda a, b: torch.tensordot(a, b, (dims, others)))(like, x, y)


def _addmm(like: Tensor, bias: Pair, x: Pair, y: Pair) -> Rewritten:
    return _sum_of(1)(like, bias, _bilinear(torch.matmul)(like, x, y))


def _abs(like: Tensor, x: Pair) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x.parts, 2, -1)
    return found


def _angle(like: Tensor, x: Pair) -> Tensor:
    return torch.atan2(x.imag, x.real)


def _polar(like: Tensor, radius: Tensor, angle: Tensor) -> Pair:
    return as_pair(radius * angle.cos(), radius * angle.sin())


def _exp(like: Tensor, x: Pair) -> Pair:
    return _polar(like, x.real.exp(), x.imag)


def _log(like: Tensor, x: Pair) -> Pair:
    return as_pair(_abs(like, x).log(), _angle(like, x))


def _sin(like: Tensor, x: Pair) -> Pair:
    return as_pair(x.real.sin() * x.imag.cosh(), x.real.cos() * x.imag.sinh())


def _cos(like: Tensor, x: Pair) -> Pair:
    return as_pair(x.real.cos() * x.imag.cosh(), -x.real.sin() * x.imag.sinh())


def _sinh(like: Tensor, x: Pair) -> Pair:
    return as_pair(x.real.sinh() * x.imag.cos(), x.real.cosh() * x.imag.sin())


def _cosh(like: Tensor, x: Pair) -> Pair:
    return as_pair(x.real.cosh() * x.imag.cos(), x.real.sinh() * x.imag.sin())


def _pow(like: Tensor, x: Pair, exponent: Operand) -> Pair:
    if isinstance(exponent, int) and 0 < exponent <= 8:
        found = x
        for _ in range(exponent - 1):
            found = _mul(like, found, x)
        return found
    raise PartcError(
        "P0209", "pow of complex tensors is supported for the exponents 1 to 8", help="write exp(log(x) * exponent)"
    )


def _cast(like: Tensor, x: Operand, *_: Any, **__: Any) -> Rewritten:
    if like.is_complex():
        return Pair(_as_pair(x, like).parts.to(like.dtype.to_real()))
    assert isinstance(x, Pair)
    return x.real.to(like.dtype)


def _where(like: Tensor, condition: Tensor, x: Operand, y: Operand) -> Pair:
    return Pair(torch.where(condition.unsqueeze(-1), _as_pair(x, like).parts, _as_pair(y, like).parts))


def _masked_fill(like: Tensor, x: Pair, mask: Tensor, number: Operand) -> Pair:
    return _where(like, mask, number, x)


def _empty(like: Tensor, *_: Any, **__: Any) -> Pair:
    return Pair(torch.empty((*like.shape, 2), dtype=like.dtype.to_real()))


def _filled(number: int | None) -> Rewrite:
    """zeros, ones, full, and their variants that take the shape of a tensor."""

    def rewrite(like: Tensor, *args: Any, **_: Any) -> Pair:
        value = number if number is not None else args[1]
        filled = _as_pair(value, like).parts
        return Pair(filled.expand(*like.shape, 2))

    return rewrite


def _index(like: Tensor, x: Pair, indices: Sequence[Tensor | None]) -> Pair:
    return Pair(torch.ops.aten.index(x.parts, list(indices)))


def _index_put(
    like: Tensor, x: Pair, indices: Sequence[Tensor | None], values: Operand, accumulate: bool = False
) -> Pair:
    given = _as_pair(values, like).parts
    return Pair(torch.ops.aten.index_put(x.parts, list(indices), given, accumulate))


def _rolled(like: Tensor, x: Pair, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Pair:
    along = [dims] if isinstance(dims, int) else list(dims)
    if not along:
        return Pair(x.parts.flatten(0, -2).roll(shifts, 0).view(x.parts.shape))
    return Pair(x.parts.roll(shifts, [_dim(x, dim) for dim in along]))


def _shifted(sign: int) -> Rewrite:
    """fftshift and ifftshift: the zero frequency to the middle, and back."""

    def rewrite(like: Tensor, x: Pair, dim: int | Sequence[int] | None = None) -> Pair:
        dims = range(x.rank) if dim is None else [dim] if isinstance(dim, int) else dim
        along = [_dim(x, each) for each in dims]
        shifts = [size // 2 if sign > 0 else (size + 1) // 2 for size in (x.parts.shape[each] for each in along)]
        return Pair(x.parts.roll(shifts, along))

    return rewrite


def _padded(like: Tensor, x: Pair, pads: Sequence[int], *mode: Any) -> Pair:
    return Pair(torch.nn.functional.pad(x.parts, [0, 0, *pads], *mode))


def _rows_padded(
    like: Tensor, rows: Sequence[Pair], batch_first: bool = False, value: float = 0.0, side: str = "right"
) -> Pair:
    pad = torch.nn.utils.rnn.pad_sequence
    return as_pair(*(pad([*part], batch_first, number, side) for part, number in (
        ((x.real for x in rows), value), ((x.imag for x in rows), 0.0)
    )))  # fmt: skip


def _real(like: Tensor, x: Operand) -> Tensor:
    return x.real if isinstance(x, Pair) else x  # type: ignore[return-value]


def _fourier(dims: int | None, *, inverse: bool, real: bool = False) -> Rewrite:
    """torch.fft's transforms over one, two or all dimensions; `real`: to or from half of a symmetric spectrum."""

    def rewrite(like: Tensor, x: Operand, size: Any = None, dim: Any = None, norm: str | None = None) -> Rewritten:
        value = _as_pair(x, like)
        rank = value.rank
        sizes = [size] if isinstance(size, int) else size
        over = [dim] if isinstance(dim, int) else dim
        if over is None:
            count = dims or (len(sizes) if sizes is not None else rank)
            over = list(range(rank - count, rank))
        over = [each % rank for each in over]
        whole = [value.parts.shape[each] for each in over] if sizes is None else list(sizes)
        last = over[-1]
        if real and inverse:
            if sizes is None or sizes[-1] == -1:
                whole[-1] = like.shape[last]
            given = whole[-1] // 2 + 1
            value = _resized(value, over, [*whole[:-1], given])
            # The other half of the spectrum is the conjugate: a real result is twice the real part of this half.
            once = _span(value.parts, last, 0, 1)
            twice = _span(value.parts, last, 1, (whole[-1] + 1) // 2) * 2
            middle = [_span(value.parts, last, given - 1, given)] if whole[-1] % 2 == 0 else []
            value = Pair(torch.cat([once, twice, *middle], last))
        value = _resized(value, over, whole)
        scale = {"forward": 0 if inverse else 1, "ortho": 2, "backward": 1 if inverse else 0}[norm or "backward"]
        count = math.prod(whole)
        found = Pair(resolve("fourier")(value.parts, over, inverse))
        if scale:
            found = Pair(found.parts / (count if scale == 1 else math.sqrt(count)))
        if real and inverse:
            return found.real
        if real:
            return Pair(_span(found.parts, last, 0, whole[-1] // 2 + 1))
        return found

    return rewrite


def _hermitian(dims: int | None, *, inverse: bool) -> Rewrite:
    """The transforms of a signal that is symmetric in time: those of the conjugate in the other direction, whose
    division by the number of elements they do not have.
    """
    other = _fourier(dims, inverse=not inverse, real=True)
    norms = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}

    def rewrite(like: Tensor, x: Operand, size: Any = None, dim: Any = None, norm: str | None = None) -> Rewritten:
        if not inverse:
            return other(like, _as_pair(x, like).conjugate, size, dim, norms[norm])
        found = other(like, x, size, dim, norms[norm])
        assert isinstance(found, Pair)
        return found.conjugate

    return rewrite


def _transforms() -> Iterator[tuple[str, Rewrite]]:
    """The rewrites of torch.fft's transforms, by name."""
    for end, dims in (("", 1), ("2", 2), ("n", None)):
        for start, inverse in (("", False), ("i", True)):
            yield f"fft_{start}fft{end}", _fourier(dims, inverse=inverse)
            yield f"fft_{start}rfft{end}", _fourier(dims, inverse=inverse, real=True)
            yield f"fft_{start}hfft{end}", _hermitian(dims, inverse=inverse)


def _short_time(
    like: Tensor,
    x: Operand,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Pair:
    """torch.stft: the spectra of windows of a signal, [..., frequency, window]."""
    frames = _as_pair(x, like).parts.unfold(-2, n_fft, hop_length or n_fft // 4).transpose(-1, -2)
    window = _whole_window(window, win_length, n_fft, frames.dtype)
    real = not isinstance(x, Pair) and onesided is not False
    transform = _fourier(1, inverse=False, real=real)
    spectra = transform(like, Pair(frames * window[:, None]), norm="ortho" if normalized else None)
    assert isinstance(spectra, Pair)
    return Pair(spectra.parts.transpose(-2, -3))


def _short_time_inverse(
    like: Tensor,
    x: Pair,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Rewritten:
    """torch.istft: the sum of overlapping windows, divided by the sum of the squared windows there."""
    hop, count = hop_length or n_fft // 4, x.parts.shape[-2]
    real = x.parts.shape[-3] != n_fft if onesided is None else onesided
    window = _whole_window(window, win_length, n_fft, x.parts.dtype)
    transform = _fourier(1, inverse=True, real=real)
    spectra = Pair(x.parts.transpose(-2, -3))
    frames = transform(like, spectra, n_fft, norm="ortho" if normalized else None)
    start = n_fft // 2 if center else 0
    size = n_fft + hop * (count - 1)
    end = size - start if length is None else min(start + length, size)

    def overlapped(values: Tensor) -> Tensor:
        """The sums of overlapping windows [..., window, n_fft] at each place of the result."""
        columns = values.reshape(-1, count, n_fft).transpose(1, 2)
        sums = torch.nn.functional.fold(columns, (1, size), (1, n_fft), stride=(1, hop))
        return _span(sums.reshape(*values.shape[:-2], size), -1, start, end)

    weight = overlapped(window.square().expand(1, count, n_fft)).reshape(-1)
    missing = [0, 0 if length is None else start + length - end]

    def part(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(overlapped(values * window) / weight, missing)

    if not isinstance(frames, Pair):
        return part(frames)  # type: ignore[arg-type]
    return as_pair(part(frames.real), part(frames.imag)) if return_complex else part(frames.real)


def _whole_window(window: Tensor | None, length: int | None, n_fft: int, dtype: torch.dtype) -> Tensor:
    """The window, with zeros on both sides up to the size of the transform."""
    length = length or n_fft
    before = (n_fft - length) // 2
    if window is None:
        window = torch.ones(length, dtype=dtype)
    return torch.nn.functional.pad(window, [before, n_fft - length - before])


def _resized(x: Pair, dims: Sequence[int], sizes: Sequence[int]) -> Pair:
    """The pair with each dimension cut or zero-padded to its size."""
    parts = x.parts
    for dim, size in zip(dims, sizes, strict=True):
        size = parts.shape[dim] if size == -1 else size
        if size < parts.shape[dim]:
            parts = _span(parts, dim, 0, size)
        elif size > parts.shape[dim]:
            more = [0] * (2 * (parts.dim() - dim))
            more[-1] = size - parts.shape[dim]
            parts = torch.nn.functional.pad(parts, more)
    return Pair(parts)


def _span(x: Tensor, dim: int, start: int, end: int) -> Tensor:
    found: Tensor = torch.ops.aten.slice(x, dim, start, end)
    return found


def _owned(
    like: Sequence[Tensor], results: list[Operand], operands: list[Operand], gradients: list[Operand]
) -> list[Pair | Tensor]:
    plain = ([x.parts if isinstance(x, Pair) else x for x in each] for each in (results, operands, gradients))
    found = resolve("own_gradient")(*plain)
    return [Pair(x) if isinstance(given, Pair) else x for given, x in zip(results, found, strict=True)]


def _identity(like: Tensor, x: Operand, *_: Any, **__: Any) -> Rewritten:
    return x  # type: ignore[return-value]


def _shared_rewrite(names: str, rewrite: Rewrite) -> dict[str, Rewrite]:
    return dict.fromkeys(names.split(), rewrite)


REWRITES: Mapping[str, Rewrite] = {
    # Between real and complex tensors
    "view_as_real": lambda like, x: x.parts,
    "view_as_complex": lambda like, x: Pair(x),
    "complex": lambda like, real, imag: as_pair(real, imag),
    "polar": _polar,
    "real": _real,
    "imag": lambda like, x: x.imag,
    "abs": _abs,
    "angle": _angle,
    **_shared_rewrite("to _to_copy type_as", _cast),
    # Arithmetic
    "add": _sum_of(1),
    "sub": _sum_of(-1),
    "rsub": lambda like, x, y, alpha=1: _sum_of(-1)(like, y, x, alpha),
    "mul": _mul,
    "div": _div,
    "neg": _on_parts(torch.neg),
    **_shared_rewrite("conj _conj conj_physical", lambda like, x: x.conjugate if isinstance(x, Pair) else x),
    **_shared_rewrite("resolve_conj resolve_neg contiguous clone alias lift_fresh_copy", _identity),
    "detach": _on_parts(torch.detach),
    "exp": _exp,
    "log": _log,
    "pow": _pow,
    "square": lambda like, x: _mul(like, x, x),
    "reciprocal": lambda like, x: _div(like, 1.0, x),
    "sqrt": lambda like, x: _exp(like, _mul(like, _log(like, x), 0.5)),
    "sin": _sin,
    "cos": _cos,
    "sinh": _sinh,
    "cosh": _cosh,
    "tan": lambda like, x: _div(like, _sin(like, x), _cos(like, x)),
    "tanh": lambda like, x: _div(like, _sinh(like, x), _cosh(like, x)),
    "sigmoid": lambda like, x: _div(
        like, 1.0, as_pair(1.0 + (-x.real).exp() * x.imag.cos(), -(-x.real).exp() * x.imag.sin())
    ),
    "linalg_vector_norm": lambda like, x, *given, **named: torch.linalg.vector_norm(_abs(like, x), *given, **named),
    "where": _where,
    "masked_fill": _masked_fill,
    # Products and sums
    **_shared_rewrite("matmul mm bmm mv dot", _bilinear(torch.matmul)),
    "outer": _bilinear(torch.outer),
    "kron": _bilinear(torch.kron),
    "vdot": lambda like, x, y: _bilinear(torch.dot)(like, x.conjugate if isinstance(x, Pair) else x, y),
    "linear": _linear,
    "addmm": _addmm,
    "einsum": _einsum,
    "tensordot": _tensordot,
    "sum": _reduced(torch.sum),
    "mean": _reduced(torch.mean),
    "cumsum": _on_dimension(torch.cumsum),
    # Views
    **_shared_rewrite("view reshape _unsafe_view view_as reshape_as flatten unflatten unsqueeze squeeze", _reshape),
    "permute": _permute,
    **_shared_rewrite("transpose swapaxes", _transpose),
    **_shared_rewrite("t numpy_T", _reversed),
    "mT": lambda like, x: _transpose(like, x, -2, -1),
    **_shared_rewrite("mH matrix_H adjoint", lambda like, x: _transpose(like, x.conjugate, -2, -1)),
    **{
        name: _on_each_part(getattr(torch, name))
        for name in ("tril", "triu", "diagonal", "diag_embed", "gather", "repeat_interleave", "tile")
    },
    **_shared_rewrite("expand expand_as", lambda like, x, *_, **__: Pair(x.parts.expand(*like.shape, 2))),
    "slice": _on_dimension(torch.ops.aten.slice),
    "select": _on_dimension(torch.select),
    "narrow": _on_dimension(lambda x, dim, start, length: _span(x, dim, start, start + length)),
    "unbind": _on_dimension(torch.unbind),
    **_shared_rewrite("split split_with_sizes", _on_dimension(torch.split, 1)),
    "chunk": _on_dimension(torch.chunk, 1),
    **_shared_rewrite("cat concat concatenate", _joined(torch.cat, 0)),
    "stack": _joined(torch.stack, 1),
    "flip": lambda like, x, dims: Pair(x.parts.flip([_dim(x, dim) for dim in dims])),
    "index_select": _on_dimension(torch.index_select),
    "index": _index,
    "index_put": _index_put,
    "roll": _rolled,
    "repeat": lambda like, x, times: Pair(x.parts.repeat([*times, 1])),
    **_shared_rewrite("pad constant_pad_nd", _padded),
    "pad_sequence": _rows_padded,
    **_shared_rewrite("empty empty_like empty_strided new_empty", _empty),
    **_shared_rewrite("zeros new_zeros zeros_like", _filled(0)),
    **_shared_rewrite("ones new_ones ones_like", _filled(1)),
    **_shared_rewrite("full new_full full_like fill", _filled(None)),
    "zero": _filled(0),
    "copy": lambda like, x, source: Pair(_as_pair(source, like).parts.expand(*like.shape, 2)),
    # Gradients that a model defines itself
    "incoming_gradient": lambda like, x: Pair(resolve("incoming_gradient")(x.parts)),
    "own_gradient": _owned,
    # Fourier transforms
    "fft_fftshift": _shifted(1),
    "fft_ifftshift": _shifted(-1),
    **dict(_transforms()),
    "stft": _short_time,
    "istft": _short_time_inverse,
}
