"""Functions for emitted kernels. Numbers are fp32 or fp64; positions in tensors are integers."""

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
    """From an exponential; near 0, where this would cancel, by the eighth convergent of Lambert's continued
    fraction.
    """
    square = x * x
    above = 2027025.0 + square * (270270.0 + square * (6930.0 + square * 36.0))
    below = 2027025.0 + square * (945945.0 + square * (51975.0 + square * (630.0 + square)))
    small = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - small) / (1.0 + small)
    return tl.where(square < 0.25, x * (above / below), tl.where(x < 0.0, -far, far))


@triton.jit
def log1p(x):
    """Goldberg 1991, What every computer scientist should know about floating-point arithmetic, theorem 4."""
    above = 1.0 + x
    part = above - 1.0  # the part of x that survives in the sum
    return tl.where(part == 0.0, x, tl.where(part == x, tl.log(above), tl.log(above) * (x / part)))


@triton.jit
def expm1(x):
    """Near 0 by Kahan's quotient, in which the error of a rounded exponential cancels."""
    power = tl.exp(x)
    near = tl.where(power == 1.0, x, (power - 1.0) * (x / tl.log(power)))
    return tl.where(tl.abs(x) < 1.0, near, power - 1.0)


@triton.jit
def trunc(x):
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def round(x):
    """Round half to even; a result of zero keeps its sign."""
    low = tl.floor(x)
    rest = x - low
    up = (rest > 0.5) | ((rest == 0.5) & (tl.floor(low * 0.5) * 2.0 != low))
    found = tl.where(up, low + 1.0, low)
    return tl.where(found == 0.0, x * 0.0, found)


@triton.jit
def sign(x):
    # Not from integers: Triton 3.6 compiles a conversion of -1 to bf16 as one of 1.
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(x.dtype)


@triton.jit
def leaky_relu(x, slope):
    return tl.where(x > 0.0, x, x * slope)


@triton.jit
def elu(x, alpha, scale, inner):
    return tl.where(x > 0.0, x * scale, expm1(x * inner) * (alpha * scale))


@triton.jit
def elu_backward(grad, alpha, scale, inner, x):
    return tl.where(x > 0.0, grad * scale, grad * inner * (alpha * scale) * tl.exp(x * inner))


@triton.jit
def softplus(x, beta, threshold):
    return tl.where(x * beta > threshold, x, log1p(tl.exp(x * beta)) / beta)


@triton.jit
def softplus_backward(grad, x, beta, threshold):
    power = tl.exp(x * beta)
    return tl.where(x * beta > threshold, grad, grad * power / (power + 1.0))


@triton.jit
def log_sigmoid(x):
    return tl.where(x > 0.0, 0.0, x) - log1p(tl.exp(-tl.abs(x)))


@triton.jit
def log_add_exp(x, y):
    most = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(x == y, most + 0.6931471805599453, most + log1p(tl.exp(-tl.abs(x - y))))


@triton.jit
def binary_cross_entropy(x, target):
    """Logarithms are clamped to at least -100, as in PyTorch.

    The loss of a number outside of 0 to 1, for which PyTorch raises an error, is NaN.
    """
    log_x, log_rest = tl.log(x), log1p(-x)
    log_x = tl.where(log_x < -100.0, -100.0, log_x)
    log_rest = tl.where(log_rest < -100.0, -100.0, log_rest)
    return (target - 1.0) * log_rest - target * log_x


@triton.jit
def binary_cross_entropy_backward(grad, x, target):
    """The divisor is at least the fp32 number nearest to 1e-12, in fp64 as well, as in PyTorch."""
    spread = (1.0 - x) * x
    return grad * (x - target) / tl.where(spread < 9.999999960041972e-13, 9.999999960041972e-13, spread)


@triton.jit
def mish(x):
    """Misra 2019."""
    return x * tanh(log1p(tl.exp(x)))


@triton.jit
def mish_backward(grad, x):
    part = tanh(log1p(tl.exp(x)))
    return grad * (part + x * tl.sigmoid(x) * (1.0 - part * part))


@triton.jit
def hardsigmoid(x):
    above = tl.where(x < -3.0, 0.0, x + 3.0)
    return tl.where(above > 6.0, 6.0, above) / 6.0


@triton.jit
def hardsigmoid_backward(grad, x):
    """Multiplies by a sixth in fp32, as PyTorch does in fp64 too."""
    return tl.where((x > -3.0) & (x < 3.0), grad * 0.1666666716337204, 0.0)


@triton.jit
def hardswish_backward(grad, x):
    return tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, grad, grad * ((x + 1.5) / 3.0)))


@triton.jit
def lerp(x, y, weight):
    """Linear interpolation, computed from the nearer end."""
    return tl.where(tl.abs(weight) < 0.5, x + weight * (y - x), y - (1.0 - weight) * (y - x))


@triton.jit
def remainder(x, by):
    """The remainder of integers, with the sign of the positive divisor."""
    rest = x % by
    return tl.where(rest < 0, rest + by, rest)


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
    """Hendrycks and Gimpel 2016, Gaussian Error Linear Units, section 2, with (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gelu_tanh_backward(grad, x):
    part = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return grad * (part + x * part * (1.0 - part) * slope)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x):
    """The maximum of each row; propagates NaNs, which `tl.max` skips."""
    return tl.reduce(x, 1, larger, keep_dims=True)


@triton.jit
def kept(counter_ptr, index, below):
    """Whether an element's upper 53 random bits are below `below`; SplitMix64, in signed words, as in
    runtime/random.py.

    `counter_ptr` points to the counter of the tensor's first element; `index` is an element's position in the whole
    tensor.
    """
    word = tl.load(counter_ptr) + index.to(tl.int64) * -7046029254386353131
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    word = word ^ ((word >> 31) & 0x1FFFFFFFF)
    return ((word >> 11) & 0x1FFFFFFFFFFFFF) < below


@triton.jit
def streamed(x, most, total):
    """Update the running maximum and the sum of exponentials relative to it: one exponential for each x."""
    apart = tl.exp(-tl.abs(x - most))
    total = tl.where(x > most, total * apart + 1.0, total + apart)
    return tl.maximum(most, x), total


@triton.jit
def row_loss(lse, picked, ignored):
    return tl.where(ignored, 0.0, lse - picked)


@triton.jit
def smooth_row_loss(lse, picked, ignored, smoothing, logits, classes):
    """Szegedy et al. 2016, Rethinking the Inception architecture, section 7; `logits` is the sum of a row's logits."""
    loss = (lse - picked) * (1.0 - smoothing) + (lse * classes - logits) * (smoothing / classes)
    return tl.where(ignored, 0.0, loss)


@triton.jit
def weighted_row_loss(lse, picked, ignored, weight):
    return tl.where(ignored, 0.0, (lse - picked) * weight)


@triton.jit
def weighted_smooth_row_loss(lse, picked, ignored, weight, smoothing, logits, classes, total):
    """`weight` is the label's weight, `total` the sum of all weights, `logits` the weighted sum of a row's logits."""
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
    """`weight` is the label's weight, `own` that of the class of x, `total` the sum of all weights."""
    grad = tl.where(ignored, 0.0, grad)
    hit = grad * weight * (1.0 - smoothing)
    spread = grad * (smoothing / classes)
    return (hit + spread * total) * tl.exp(x - lse) - tl.where(is_label, hit, 0.0) - spread * own
