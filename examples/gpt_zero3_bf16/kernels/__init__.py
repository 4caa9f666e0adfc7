"""The kernels of this package, in Triton. With TRITON_INTERPRET=1 they run on a CPU, slowly, to be checked."""

from .interpreted import rounds
from .adamw import adamw
from .add import add
from .add_rms_norm import add_rms_norm
from .cross_entropy import cross_entropy
from .cross_entropy_backward import cross_entropy_backward
from .embedding_grad import embedding_grad
from .log_sum_exp_cross_entropy_rows import log_sum_exp_cross_entropy_rows
from .mul_neg_add import mul_neg_add
from .mul_neg_add_2 import mul_neg_add_2
from .neg_mul_add import neg_mul_add
from .neg_mul_add_2 import neg_mul_add_2
from .rms_norm import rms_norm
from .rms_norm_backward import rms_norm_backward
from .rms_norm_backward_add import rms_norm_backward_add
from .sgd import sgd
from .silu_mul import silu_mul
from .silu_mul_silu_backward import silu_mul_silu_backward
from .squares import squares
from .sub_exp_mul import sub_exp_mul

rounds()
__all__ = [
    "adamw",
    "add",
    "add_rms_norm",
    "cross_entropy",
    "cross_entropy_backward",
    "embedding_grad",
    "log_sum_exp_cross_entropy_rows",
    "mul_neg_add",
    "mul_neg_add_2",
    "neg_mul_add",
    "neg_mul_add_2",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_add",
    "sgd",
    "silu_mul",
    "silu_mul_silu_backward",
    "squares",
    "sub_exp_mul",
]
