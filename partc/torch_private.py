"""Every private torch name that partc uses, so that a torch upgrade has one place to look."""

from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# Where modules and weights keep the hooks that see gradients.
GRADIENT_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

__all__ = [
    "GRADIENT_HOOKS",
    "TENSOR_HOOKS",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "aot_export_joint_simple",
    "below_autograd",
]
