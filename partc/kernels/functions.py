"""Functions that kernels are written with. Arguments are fp32 or fp64, and so are results."""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def silu_backward(grad, x):
    part = tl.sigmoid(x)
    return grad * part * (1.0 + x * (1.0 - part))


@triton.jit
def tanh(x):
    """From exponentials; near 0, where those would cancel, Lambert's continued fraction."""
    square = x * x
    fraction = 9.0 + square / (11.0 + square / (13.0 + square / 15.0))
    near = x / (1.0 + square / (3.0 + square / (5.0 + square / (7.0 + square / fraction))))
    small = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - small) / (1.0 + small)
    return tl.where(square < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_backward(grad, x):
    below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327
    return grad * (below + x * density)


@triton.jit
def gelu_tanh(x):
    """Hendrycks and Gimpel 2016, Gaussian Error Linear Units, section 2."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def gelu_tanh_backward(grad, x):
    bent = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return grad * (0.5 * (1.0 + bent) + 0.5 * x * (1.0 - bent * bent) * slope)
