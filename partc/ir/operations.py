"""The effects of operations besides their results: shared memory, random numbers, kernels. One line for each kind.

An operation without a line computes new elements from those of its operands, in one kernel. The table has the names of
traced programs as well as those of later ones. Collectives have a table of their own (`partc.ir.collectives`), rules
for cuts another (`partc.rules.table`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from partc.ir.program import Op, TensorType, is_change


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """`memory` says whether the results share the first operand's memory: as a view that the arguments determine
    (`view`), or for some operands only (`some`); `own` results never do.
    """

    memory: Literal["own", "view", "some"] = "own"
    kernels: int = 1  # launched on a GPU by torch 2.11, from a trace on an H200
    keeps: bool = False  # the result has all elements of the first operand, in any order and element type
    spells: str = ""  # the operation of which this name is an alias
    differentiable: bool = True
    draws: bool = False  # draws random numbers; the last argument is the operation's number within its call
    extra: tuple[str, ...] = ()  # further results, which its derivative reads


_NONE = Effects()
_UNTYPED: Mapping[str, TensorType] = {}
TABLE: dict[str, Effects] = {}


def _declare(names: str, **facts: Any) -> None:
    TABLE.update(dict.fromkeys(names.split(), Effects(**facts)))


# Views
_declare("reshape", memory="some", kernels=0, keeps=True)
_declare("permute expand alias wait", memory="view", kernels=0, keeps=True)
_declare("slice split", memory="view", kernels=0)
_declare("detach detach_", memory="view", keeps=True, differentiable=False)
_declare("diagonal unfold real imag", memory="view")
_declare("as_strided", memory="some")
_declare("view _unsafe_view view_as unflatten squeeze unsqueeze", memory="view", keeps=True, spells="reshape")
_declare("flatten reshape_as", memory="some", kernels=0, keeps=True, spells="reshape")
_declare("t T transpose swapaxes numpy_T mT movedim", memory="view", keeps=True, spells="permute")
_declare("expand_as", memory="view", keeps=True, spells="expand")
_declare("broadcast_tensors", memory="some", spells="expand")
_declare("split_with_sizes chunk unbind tensor_split unsafe_split unsafe_chunk", memory="view", spells="split")
_declare("select narrow", memory="view", spells="slice")
# Copies, unless the operand already has the wanted form
_declare("contiguous to type_as", memory="some", keeps=True)
_declare("take", memory="some")
_declare("clone _to_copy lift_fresh_copy", keeps=True)
# Random numbers
_declare("dropout", memory="some", draws=True, extra=("kept",))  # without drops, the result is the operand
_declare("attention_dropout", draws=True, extra=("lse",))
_declare("rand randn drawn", draws=True)
_declare("rand_like randn_like", draws=True, differentiable=False)
# Constants in the form of a tensor
_declare("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty", differentiable=False)
# Functions that also return values for their derivative
_declare("rms_norm", extra=("rstd",))
_declare("layer_norm", extra=("mean", "rstd"))
_declare("attention cross_entropy", extra=("lse",))
_declare("native_group_norm native_batch_norm _native_batch_norm_legit", extra=("mean", "rstd"))
_declare("max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d", extra=("indices",))
_declare("fractional_max_pool2d fractional_max_pool3d", extra=("indices",))
_declare("nll_loss_forward nll_loss2d_forward", extra=("total_weight",))
_declare("log_sigmoid_forward", extra=("buffer",))
_declare("_linalg_det", extra=("lu", "pivots"))
_declare("_ctc_loss", extra=("log_alpha",))
_declare("incoming_gradient linear_sum_assignment", differentiable=False)
# Several kernels
_declare("topk scatter", kernels=2)
_declare("expert_matmul expert_matmul_grad_rows", kernels=3)
_declare("expert_matmul_grad_weight", kernels=4)
_declare("attention_backward", kernels=5)
_declare("sort argsort", kernels=8)
_declare("expert_order", kernels=9)


def effects(name: str) -> Effects:
    """The effects of an operation."""
    return TABLE.get(name, _NONE)


def _names_with(fact: Callable[[Effects], bool]) -> frozenset[str]:
    return frozenset(name for name, each in TABLE.items() if fact(each))


VIEWS = _names_with(lambda each: not each.kernels)
SHOWING = VIEWS | _names_with(lambda each: each.memory == "view")  # the first operand's memory, where nothing copies it
KEEPING = _names_with(lambda each: each.keeps)
RANDOM = _names_with(lambda each: each.draws)


def shares_memory(op: Op, types: Mapping[str, TensorType] = _UNTYPED) -> bool:
    """Whether the results may share memory with the first operand. With its type, a cast is known to copy."""
    memory = effects(op.name).memory
    if memory != "some":
        return memory == "view"
    given = types.get(next(op.refs(), ""))
    return given is None or any(value.type.dtype == given.dtype for value in op.results)


def memory_owner(name: str, made: Mapping[str, Op], types: Mapping[str, TensorType] = _UNTYPED) -> str:
    """The value of a traced graph in whose memory another one is: views and changes in place lead to it."""
    while (op := made.get(name)) is not None and (shares_memory(op, types) or is_change(op)):
        name = next(op.refs())
    return name


def spelling(name: str) -> frozenset[str]:
    """An operation and its other names."""
    return _names_with(lambda each: each.spells == name) | {name}
