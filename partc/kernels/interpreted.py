"""Triton's interpreter with the rounding of GPUs: without this, it truncates to bf16, where GPUs round to nearest.

NumPy computes the maxima of rows: by itself, the interpreter would call a function for each element.
"""

from __future__ import annotations

import os
from typing import Any


def _rounded(data: Any) -> Any:
    """The upper 16 bits of fp32, rounded to nearest even; NaNs stay NaNs."""
    import numpy

    bits = numpy.ascontiguousarray(data).view("uint32").reshape(data.shape)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return numpy.where(data != data, (bits >> 16) | 0x40, nearest).astype("uint16")


def patch_rounding() -> None:
    """Patch the interpreter in this process; does nothing if kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "rounds"):
        return
    original = builder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        pair = (source.dtype.scalar, target.scalar)
        if pair == (tl.bfloat16, tl.float32):
            data = (source.data.astype("uint32") << 16).view("float32")
        elif pair == (tl.float32, tl.bfloat16):
            data = _rounded(source.data)
        else:
            return original(self, source, target)
        return interpreter.TensorHandle(data, target.scalar)

    splat = builder.create_splat

    def repeat(self: Any, type: Any, one: Any) -> Any:
        """Repeat a number; a boolean keeps its type."""
        if one.data.dtype != bool:
            return splat(self, type, one)
        return interpreter.TensorHandle(numpy.full(type.shape, one.data.reshape(-1)[0]), tl.int1)

    builder.create_splat = repeat
    reduced = interpreter.ReduceOps.apply_impl

    def reduce(self: Any, given: Any) -> Any:
        """Reduce by NumPy where it has the reduction, instead of one call for each element."""
        name = getattr(getattr(self.combine_fn, "fn", None), "__name__", "")
        return self.min_max(given[0], val_reduce_op=numpy.max) if name == "larger" else reduced(self, given)

    interpreter.ReduceOps.apply_impl = reduce
    patched = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        """Convert numbers of one dimension explicitly: NumPy from 2.4 on does not, and Triton 3.6 relies on it."""
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch
    for name in ("cast_impl", "create_fp_ext", "create_fp_trunc"):
        setattr(builder, name, cast)
    builder.create_fp_to_fp = lambda self, source, target, mode: cast(self, source, target)
    builder.rounds = True
