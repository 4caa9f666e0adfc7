"""Functions that kernels are written with. Numbers are fp32 or fp64, places in tensors integers."""

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


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x):
    """Of each row; what isn't a number passes, which `tl.max` skips."""
    return tl.reduce(x, 1, larger, keep_dims=True)


@triton.jit
def kept(counter_ptr, index, below):
    """Whether an element's upper 53 bits are below this; SplitMix64, in signed words, as in runtime/random.py.

    `counter` is the word of the first element here, `index` says how far behind it another is in the whole tensor.
    """
    word = tl.load(counter_ptr) + index.to(tl.int64) * -7046029254386353131
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    word = word ^ ((word >> 31) & 0x1FFFFFFFF)
    return ((word >> 11) & 0x1FFFFFFFFFFFFF) < below


@triton.jit
def streamed(x, most, total):
    """The largest of all x so far, and the sum of exponentials below it: one exponential for each x."""
    apart = tl.exp(-tl.abs(x - most))
    total = tl.where(x > most, total * apart + 1.0, total + apart)
    return tl.maximum(most, x), total


@triton.jit
def row_loss(lse, picked, ignored):
    return tl.where(ignored, 0.0, lse - picked)


@triton.jit
def smooth_row_loss(lse, picked, ignored, smoothing, logits, classes):
    """Szegedy et al. 2016, Rethinking the Inception architecture, section 7; `logits` is the sum of a row's."""
    loss = (lse - picked) * (1.0 - smoothing) + (lse * classes - logits) * (smoothing / classes)
    return tl.where(ignored, 0.0, loss)


@triton.jit
def weighted_row_loss(lse, picked, ignored, weight):
    return tl.where(ignored, 0.0, (lse - picked) * weight)


@triton.jit
def weighted_smooth_row_loss(lse, picked, ignored, weight, smoothing, logits, classes, total):
    """`weight` is the label's, `total` that of all classes, `logits` the sum of a row's, each times its class's."""
    loss = (lse - picked) * weight * (1.0 - smoothing) + (lse * total - logits) * (smoothing / classes)
    return tl.where(ignored, 0.0, loss)


@triton.jit
def cross_entropy_backward(grad, x, lse, ignored, is_label):
    """The row's gradient times softmax - one-hot."""
    grad = tl.where(ignored, 0.0, grad)
    return grad * tl.exp(x - lse) - tl.where(is_label, grad, 0.0)


@triton.jit
def smooth_cross_entropy_backward(grad, x, lse, ignored, is_label, smoothing, classes):
    grad = tl.where(ignored, 0.0, grad)
    hit = tl.where(is_label, grad * (1.0 - smoothing), 0.0)
    return grad * tl.exp(x - lse) - hit - grad * (smoothing / classes)


@triton.jit
def weighted_smooth_cross_entropy_backward(grad, x, lse, ignored, is_label, weight, smoothing, classes, total, own):
    """`weight` is the label's, `own` that of the class of x, `total` that of all."""
    grad = tl.where(ignored, 0.0, grad)
    hit = grad * weight * (1.0 - smoothing)
    spread = grad * (smoothing / classes)
    return (hit + spread * total) * tl.exp(x - lse) - tl.where(is_label, hit, 0.0) - spread * own
