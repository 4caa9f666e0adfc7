"""The operation table: one sharding rule a line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from partc.errors import PartcError
from partc.ir.program import DType, Op, TensorType
from partc.rules import products, shapes
from partc.rules.notation import Notation, NotationError, bind, parse
from partc.rules.per_example import examples, histogram, recurrent, scatter_add, undivided
from partc.rules.rule import OpRule, argument, is_ref, make
from partc.rules.shapes import Builder, Types, last_dims, whole_dims

Blocked = str | Callable[[Op], str]
Precision = Literal["low", "high", "any"]  # under mixed precision: 16 bits, fp32, or the operands' type


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """A row of the table: the builder of an operation's rule, and the operation's properties."""

    build: Builder
    matmul: bool = False
    user: bool = False
    heavy: bool = False  # too slow to recompute in order to save memory, whatever it reads
    precision: Precision = "any"
    elementwise: bool = False  # each result element depends only on the operands' elements at its place


TABLE: dict[str, OperationRow] = {}
# Operations that differentiation and expansion introduce, with the row whose rule they use.
LOWERED: Mapping[str, str] = {
    "convolution": "conv2d", "native_group_norm": "group_norm", "max_pool2d_with_indices": "max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
    "_unsafe_index": "index", "log_sigmoid_forward": "log_sigmoid", "embedding_shard": "embedding",
    "shard_max": "amax", "sum_exp": "sum", "smooth_sum": "sum", "pick": "gather", "log_sum_exp": "logsumexp",
    "cross_entropy_rows": "cross_entropy", "take": "slice", "put": "pad",
    "attention_bias_backward": "attention_backward", "attention_dropout_backward": "attention_backward",
    "attention_dropout_bias_backward": "attention_backward",
}  # fmt: skip
# Kernels that assume dense operands: the positions of these arguments. torch's composites and derivatives copy them
# first, but regions are differentiated below that level.
DENSE: dict[str, frozenset[int]] = {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NotationRule:
    """A rule in the notation; calling it with an operation binds it to the operation's shapes.

    `slots` are the positions of the first operands in `op.args`; the others are given by name. `work` lists the
    factors of each matrix product in the operation; `*` stands for all factors.
    """

    notation: Notation
    slots: tuple[int, ...]
    blocked: Blocked = ""
    linear: tuple[tuple[str, ...], ...] = ()
    combined: str = ""
    sharded: Mapping[str, str] = field(default_factory=dict)
    ring: tuple[str, ...] = ()
    work: tuple[str, ...] = ()

    def __call__(self, op: Op, types: Types) -> OpRule | None:
        named = (len(op.args),) * (len(self.notation.operands) - len(self.slots))
        slots = zip((*self.slots, *named), self.notation.operands, strict=True)
        present = [k for k, (slot, term) in enumerate(slots) if is_ref(argument(op, slot, term.name))]
        missing = [t.name for k, t in enumerate(self.notation.operands) if k not in present and not t.optional]
        if missing or len(present) != len(types) or len(op.results) != len(self.notation.results):
            raise NotationError(f"{len(types)} operands and {len(op.results)} results do not fit the rule")
        blocked = self.blocked if isinstance(self.blocked, str) else self.blocked(op)
        operands = tuple((type.dtype, type.shape) for type in types)
        return _bound(self, tuple(present), operands, tuple(value.type.shape for value in op.results), blocked)


@lru_cache(maxsize=1 << 14)
def _bound(
    rule: NotationRule,
    present: tuple[int, ...],
    types: tuple[tuple[DType, tuple[int, ...]], ...],
    made: tuple[tuple[int, ...], ...],
    blocked: str,
) -> OpRule:
    """The rule for operands of these types in the `present` places, and results of the shapes `made`."""
    terms = [rule.notation.operands[k] for k in present]
    operands, results, sizes = bind(terms, [shape for _, shape in types], rule.notation.results)
    for shape, dims in zip(made, results, strict=True):
        found = tuple(math.prod(sizes[name] for name in dim) for dim in dims)
        if found != shape:
            raise NotationError(f"the rule makes a result of shape {found}, the call one of {shape}")
    names = blocked.split()
    added = tuple(i for i, term in enumerate(terms) if term.added)
    index = {term.name: i for i, term in enumerate(terms)}
    return make(
        [(dims, TensorType.replicated(*type)) for dims, type in zip(operands, types, strict=True)],
        results,
        sizes,
        blocked={name for name in sizes if name in names or name.rstrip("0123456789") in names},
        linear=[(*(index[name] for name in group if name in index), *added) for group in rule.linear],
        added=added,
        combined=rule.combined.split(),
        sharded=rule.sharded,
        ring=rule.ring,
        work=[tuple(sizes) if product == "*" else product.split() for product in rule.work],
    )


def rule(
    names: str,
    text: str,
    *,
    slots: Sequence[int] | None = None,
    blocked: Blocked = "",
    linear: str = "",
    combined: str = "",
    sharded: Mapping[str, str] | None = None,
    ring: str = "",
    work: str = "",
    heavy: bool = False,
    precision: Precision = "low",
) -> None:
    """Declare operations by the text of their rule; `linear="x|w"` lists the groups of operands that may be Partial."""
    notation = parse(text)
    written = NotationRule(
        notation=notation,
        slots=tuple(slots if slots is not None else range(len(notation.operands))),
        blocked=blocked,
        linear=tuple(tuple(group.split()) for group in linear.split("|") if group.strip()),
        combined=combined,
        sharded=sharded or {},
        ring=tuple(ring.split()),
        work=tuple(part.strip() for part in work.split("+") if part.strip()),
    )
    for name in names.split():
        TABLE[name] = OperationRow(build=written, matmul=bool(work), heavy=heavy, precision=precision)


def build(
    names: str,
    builder: Builder,
    *,
    matmul: bool = False,
    heavy: bool = False,
    precision: Precision = "any",
    elementwise: bool = False,
) -> None:
    """Declare operations whose rule a builder derives from their shapes."""
    for name in names.split():
        TABLE[name] = OperationRow(
            build=builder,
            matmul=matmul,
            heavy=heavy,
            precision="low" if matmul else precision,
            elementwise=elementwise,
        )


def elementwise(names: str, builder: Builder, precision: Precision = "any") -> None:
    """Declare operations whose result elements depend only on the operands' elements at their place."""
    build(names, builder, precision=precision, elementwise=True)


def dense_arguments(names: str, *positions: int) -> None:
    """Declare operations whose arguments at these positions must be dense in memory."""
    for name in names.split():
        DENSE[name] = frozenset(positions)


def register(
    name: str,
    text: str,
    *,
    slots: Sequence[int] | None = None,
    blocked: str = "",
    linear: str = "",
    matmul: bool = False,
) -> None:
    """Add a rule for a user's operator: `register("mylib::op", "x[b d], w[d] -> [b d]")`.

    A factor that no result carries is summed; factors in `blocked` must not be cut. `linear` lists the operands in
    which the operator is linear, in groups separated by `|`. `matmul` says that the operator's work is the product of
    its factors. Raises PartcError P0311 to P0313.
    """
    if name.count("::") != 1:
        raise PartcError("P0311", f"{name!r} names no operator", help="give the library too: mylib::op")
    try:
        notation = parse(text)
    except NotationError as error:
        raise PartcError(
            "P0312",
            f"the rule {text!r} of {name} does not parse: {error}",
            help="write it like x[b i], w[o i] -> [b o]",
        ) from None
    for mark, given, known in (
        ("blocked", blocked.split(), notation.factors),
        ("linear", linear.replace("|", " ").split(), {term.name for term in notation.operands}),
    ):
        for unknown in set(given) - known:
            raise PartcError(
                "P0313", f"{mark}={unknown!r} of {name} is not in its rule", help=f"it has {', '.join(sorted(known))}"
            )
    if slots is not None and len(slots) != len(notation.operands):
        raise PartcError(
            "P0313",
            f"slots of {name} has {len(slots)} positions",
            help=f"its rule has {len(notation.operands)} operands",
        )
    name = name.removeprefix("aten::")  # programs name torch's own operations without it
    rule(name, text, slots=slots, blocked=blocked, linear=linear, work="*" if matmul else "")
    TABLE[name] = OperationRow(build=TABLE[name].build, matmul=matmul, user=True)


# Products
rule("linear", "x[*b i], w[o i], +bias?[o] -> [*b o]", linear="x|w", work="*")
rule(
    "attention attention_dropout",
    "q[b (g r) s d], k[b g t d], v[b g t e], ~mask?[b (g r) s t], sinks?[(g r)], limits?[b s n], keys?[b m] "
    "-> [b (g r) s e]",
    slots=range(4),
    blocked="t d e n m",
    ring="s t",
    work="b g r s t d + b g r s t e",
    heavy=True,
)
build("expert_matmul", products.expert_matmul, matmul=True, heavy=True)
build("expert_rows", products.expert_rows)
rule("expert_places", "experts[b n] -> [b n]", blocked="n")
rule("selected_places", "mask[b n] -> [b n]", blocked="n")
rule("dot", "x[k], y[k] -> []", linear="x|y", work="*")
rule("outer", "x[i], y[j] -> [i j]", linear="x|y")
build("matmul mm bmm mv", products.matmul, matmul=True)
build("einsum", products.einsum, matmul=True)
build("conv1d conv2d conv3d", products.convolution, matmul=True, heavy=True)
# Gradients of products
rule("linear_grad_input", "g[*b o], w[o i] -> [*b i]", linear="g|w", work="*")
rule("linear_grad_weight", "g[*b o], x[*b i] -> [o i]", linear="g|x", work="*")
rule("linear_grad_bias", "g[*b o] -> [o]", linear="g")
rule(
    "linear_cross_entropy",
    "x[*b i], w[o i], bias?[o], labels[*b], weight?[o] -> [*b]",
    blocked="i o",
    work="*",
    heavy=True,
)
rule(
    "linear_cross_entropy_backward",
    "grad[*b], x[*b i], w[o i], bias?[o], labels[*b], lse[*b], weight?[c] -> [*b i]",
    blocked="i o c",
    work="* + * + *",  # logits are made again
    heavy=True,
)
rule(
    "linear_cross_entropy_grad_input",
    "grad[*b], x[*b i], w[o i], bias?[o], labels[*b], lse[*b], weight?[c] -> [*b i]",
    blocked="i o c",
    work="* + *",
    heavy=True,
)
build("matmul_grad_left", products.matmul_grad_left, matmul=True)
build("matmul_grad_right", products.matmul_grad_right, matmul=True)
rule(
    "attention_backward",
    "grad[b (g r) s e], q[b (g r) s d], k[b g t d], v[b g t e], ~mask?[b (g r) s t], out[b (g r) s e], lse[b (g r) s], "
    "limits?[b s n], keys?[b m] -> [b (g r) s d], [b g t d], [b g t e]",
    slots=range(7),
    blocked="r s t d e n m",
    work="b g r s t d + b g r s t d + b g r s t d + b g r s t e + b g r s t e",  # the scores are made again
    heavy=True,
)
rule(
    "attention_sinks_backward",
    "grad[b h s e], out[b h s e], lse[b h s], sinks[h] -> [h]",
    linear="grad|out",
    precision="high",
)
rule("expert_matmul_grad_rows", "g[s o], experts[s], w[e i o] -> [s i]", blocked="e", work="s i o", heavy=True)

# Random numbers: each depends on its element's global position
build("dropout", shapes.unary_linear)
build("rand_like randn_like", shapes.pointwise)
build("rand randn", shapes.constant)

# Norms, losses, lookups
build("rms_norm layer_norm", shapes.normalized, precision="low")  # these sum in fp32 inside
build("group_norm", products.group_norm, precision="high")
build("rotary rotary_backward", shapes.rotary)
rule("embedding", "w[v d], ids[*b] -> [*b d]", sharded={"v": "embedding_shard"}, heavy=True)
TABLE["embedding"] = replace(TABLE["embedding"], build=products.lookup(TABLE["embedding"].build))
rule("bag_sum", "x[n d], starts[b], ends[b] -> [b d]", blocked="n", linear="x", heavy=True, precision="high")
rule("bag_max", "x[n d], starts[b], ends[b] -> [b d]", blocked="n", heavy=True, precision="high")
build("bag_sum_grad", products.bag_rows, heavy=True, precision="high")
rule(
    "bag_max_grad", "g[b d], x[n d], starts[b], ends[b] -> [n d]", blocked="n", linear="g", heavy=True, precision="high"
)
rule("bucketize", "x[*d], boundaries[n] -> [*d]", blocked="n", precision="any")
rule("mask_classes", "logits[*b v] -> [*b v]", sharded={"v": "mask_classes_shard"})
rule(
    "cross_entropy",
    "logits[*b v], labels[*b], weight?[w] -> [*b]",  # labels index the weights, so every rank needs all of them
    blocked="w",
    combined="v",
    sharded={"v": "cross_entropy_shard"},
    precision="high",
)

# Along dimensions
build("sum", shapes.reduction, precision="high")
build("count_nonzero", shapes.reduction)
build("mean prod var std logsumexp", shapes.whole_reduction(), precision="high")
build("amax amin max min argmax argmin any all", shapes.whole_reduction())
build("norm linalg_vector_norm", shapes.whole_reduction(2), precision="high")
build("softmax log_softmax logcumsumexp", whole_dims(1), precision="high")
build("_softmax_backward_data _log_softmax_backward_data", whole_dims(2), precision="high")
build("sort argsort cummax cummin", whole_dims(1))
build("cumsum", whole_dims(1, linear=True), precision="high")
build("cumprod", whole_dims(1), precision="high")
build("topk", whole_dims(2))
build("flip", whole_dims(1, "dims", linear=True))
build("fourier", shapes.fourier, heavy=True, precision="high")
build("roll", whole_dims(2, "dims", linear=True, default=()))
rule("tril triu", "x[*b i j] -> [*b i j]", blocked="i j", linear="x", precision="any")
build("max_pool1d", last_dims(1))
build("avg_pool1d adaptive_avg_pool1d", last_dims(1, linear=True))
build("max_pool2d adaptive_max_pool2d", last_dims(2))
build("avg_pool2d adaptive_avg_pool2d", last_dims(2, linear=True))
build("max_pool3d adaptive_max_pool3d", last_dims(3))
build("avg_pool3d", last_dims(3, linear=True), precision="high")  # CPUs have no kernel for 16 bits
build("adaptive_avg_pool3d", last_dims(3, linear=True))
build("upsample_bilinear2d upsample_bicubic2d upsample_nearest2d _upsample_nearest_exact2d", last_dims(2, linear=True))
build("constant_pad_nd pad", shapes.pad)
build("diff", shapes.diff)

# Gradients that a model gives itself
build("incoming_gradient", shapes.incoming_gradient)
build("own_gradient", shapes.own_gradient_rule)
rule("times_loss_scale", "x[*d] -> [*d]", linear="x", precision="any")

# Views
build("reshape", shapes.reshape)
build("permute", shapes.permute)
build("expand", shapes.expand)
build("split", shapes.split)
build("cat", shapes.cat)
build("slice_scatter", shapes.slice_scatter)
build("slice", shapes.slice_)
build("repeat", shapes.repeat)
build("repeat_interleave", shapes.repeat_interleave)

# Indexing
build("gather", products.gather)
build("index_select", products.index_select)
build("index", products.index)

# Only the batch may be cut
for _dims in (1, 2, 3):
    build(f"conv_transpose{_dims}d", examples(0, least=2 + _dims), heavy=True, precision="low")
build("pixel_shuffle pixel_unshuffle im2col", examples(0, least=4))
build("col2im", examples(0, least=3))
build("prelu", examples(0))
build(
    "upsample_nearest1d upsample_linear1d upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact3d",
    examples(0),
)
build(
    "matrix_exp linalg_matrix_exp linalg_svdvals linalg_svd linalg_qr linalg_eigh linalg_eigvalsh linalg_cholesky "
    "linalg_inv inverse linalg_det det linalg_slogdet slogdet logdet linalg_pinv",
    examples(0, least=3),
    heavy=True,
    precision="high",
)
build("linear_sum_assignment", undivided, precision="high")
build("linalg_solve_triangular", products.triangular_solve, heavy=True, precision="high")
build("cdist", products.distances, heavy=True, precision="high")
build("bilinear", examples(0, 1, least=2), heavy=True, precision="high")
build("pairwise_distance", examples(0, 1), precision="high")
build("cosine_similarity", examples(0, 1, dims=((2, "dim", 1),)), precision="high")
build("unfold", examples(0, dims=((1, "dimension", 0),)))
build("diagonal", examples(0, dims=((2, "dim1", 0), (3, "dim2", 1))))
build("diagonal_scatter", examples(0, 1, dims=((3, "dim1", 0), (4, "dim2", 1))))
build("diag_embed", examples(0, dims=((2, "dim1", -2), (3, "dim2", -1)), of_result=True))
build("var_mean std_mean", examples(0, dims=((1, "dim", 0),)), precision="high")
build("scatter scatter_reduce", examples(0, 1, 2, dims=((1, "dim", 0),)), heavy=True)
build("scatter_add", scatter_add, heavy=True)
build("histc", histogram, heavy=True)
build("index_add index_copy", examples(0, 2, dims=((1, "dim", 0),)), heavy=True)
build("lstm gru rnn_tanh rnn_relu", recurrent, heavy=True, precision="low")

# Constants
build("full zeros ones empty new_full new_zeros new_ones new_empty scalar_tensor", shapes.constant)
build("arange eye linspace", shapes.positional)

# Elementwise
elementwise("add sub rsub", shapes.additive)
elementwise("mul", shapes.product)
elementwise("div", shapes.quotient)
elementwise("neg", shapes.unary_linear)
elementwise("to", shapes.cast)
elementwise("where", shapes.where)
elementwise("masked_fill", shapes.masked_fill)
elementwise(
    "__and__ __or__ __xor__ abs addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp "
    "clamp_max clamp_min copysign elu eq floor floor_divide fmod ge gelu gt hardsigmoid hardswish hardtanh isfinite "
    "isinf isnan le leaky_relu lerp logical_and logical_not logical_or logical_xor lt maximum minimum mish nan_to_num "
    "ne relu relu6 remainder round selu sigmoid sign silu tanh threshold trunc",
    shapes.pointwise,
)
elementwise(
    "acos acosh asin asinh atan atan2 atanh binary_cross_entropy cos cosh digamma erf erfc erfinv exp exp2 expm1 "
    "lgamma log log10 log1p log2 log_sigmoid logaddexp logit pow reciprocal rsqrt sin sinh softplus sqrt square tan "
    "xlogy",
    shapes.pointwise,
    precision="high",
)
build("alias clone contiguous detach wait", shapes.unary_linear)
build("empty_like full_like ones_like zeros_like", shapes.pointwise)

# Memory formats that kernels require
dense_arguments("native_group_norm", 0, 1, 2)
dense_arguments("native_group_norm_backward", 0, 1, 2, 3, 4)
dense_arguments("native_layer_norm_backward", 3, 4)
dense_arguments("_embedding_bag _embedding_bag_forward_only", 1, 2)
dense_arguments("_embedding_bag_backward", 1, 2, 3, 4, 5)
dense_arguments("_embedding_bag_per_sample_weights_backward", 2, 3, 4)
dense_arguments("nll_loss2d_backward", 1)
dense_arguments(
    "max_pool3d max_pool3d_with_indices", 0
)  # strided 4-d operands may be mistaken for channels-last images
dense_arguments("max_pool3d_with_indices_backward", 0, 1)
dense_arguments("adaptive_max_pool3d_backward", 2)
dense_arguments("fractional_max_pool2d_backward fractional_max_pool3d_backward", 4)
dense_arguments("_pdist_forward", 0)
dense_arguments("_pdist_backward", 1, 3)
# For a dense operand they factor its transpose, and their derivatives rely on that.
dense_arguments("_linalg_det _linalg_slogdet", 0)
dense_arguments("as_strided as_strided_copy as_strided_scatter", 0)
