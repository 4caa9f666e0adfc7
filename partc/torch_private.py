"""Every private torch name that partc uses, so that a torch upgrade has one place to look."""

from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["FakeTensorMode", "aot_export_joint_simple"]
