"""The kernels of this package, in Triton. With TRITON_INTERPRET=1 they run on a CPU, slowly, to be checked."""

from .interpreted import patch_rounding
from .adamw import adamw
from .add import add
from .add_rms_norm import add_rms_norm
from .cross_entropy import cross_entropy
from .cross_entropy_backward import cross_entropy_backward
from .embedding_grad import embedding_grad
from .log_sum_exp_cross_entropy_rows import log_sum_exp_cross_entropy_rows
from .rms_norm import rms_norm
from .rms_norm_backward import rms_norm_backward
from .rms_norm_backward_add import rms_norm_backward_add
from .rotary import rotary
from .rotary_2 import rotary_2
from .rotary_backward import rotary_backward
from .rotary_backward_2 import rotary_backward_2
from .sgd import sgd
from .silu_mul import silu_mul
from .silu_mul_silu_backward import silu_mul_silu_backward
from .squares import squares
from .sub_exp_mul import sub_exp_mul

patch_rounding()
__all__ = [
    "adamw",
    "add",
    "add_rms_norm",
    "cross_entropy",
    "cross_entropy_backward",
    "embedding_grad",
    "log_sum_exp_cross_entropy_rows",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_add",
    "rotary",
    "rotary_2",
    "rotary_backward",
    "rotary_backward_2",
    "sgd",
    "silu_mul",
    "silu_mul_silu_backward",
    "squares",
    "sub_exp_mul",
]
