"""Every torch name that the runtime uses and torch doesn't promise to keep: one place to look after an upgrade."""

from __future__ import annotations

import datetime
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _disabled_torch_function_impl as without_overrides
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import Store
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "all_gather_base",
    "clone_store",
    "connected_store",
    "foreach_add_",
    "foreach_copy_",
    "lone_store",
    "process_group",
    "recompile_limit",
    "reduce_scatter_base",
    "storage_key",
    "tree_flatten",
    "tree_map_only",
    "without_modes",
    "without_overrides",
]

foreach_add_, foreach_copy_ = torch._foreach_add_, torch._foreach_copy_  # many tensors in one launch


def process_group(store: Store, rank: int, size: int, device: torch.device, timeout: datetime.timedelta) -> Any:
    """Connect to the others of a group: the classes are those that `new_group` makes."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def connected_store(address: str, port: int, size: int, timeout: datetime.timedelta, *, master: bool) -> Store:
    """A store of several processes, which `master` holds; whoever comes later finds it there."""
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, size, master, timeout, wait_for_workers=False, multi_tenant=True
    )
    return store


def clone_store(store: Any) -> Store:
    """Another connection to the same store, for another thread."""
    clone: Store = store.clone()
    return clone


def lone_store() -> Store:
    """The store of a world of one."""
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    return store


def all_gather_base(group: Any, whole: Tensor, part: Tensor) -> Any:
    return group._allgather_base(whole, part)


def reduce_scatter_base(group: Any, part: Tensor, whole: Tensor) -> Any:
    return group._reduce_scatter_base(part, whole)


def without_modes() -> AbstractContextManager[Any]:
    """Run operations for real, inside a recording."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def storage_key(x: Tensor) -> int:
    """The identity of the memory behind a tensor, real or fake."""
    return int(x.untyped_storage()._cdata)


def recompile_limit(most: int) -> None:
    """How many variants of a function torch.compile makes before it gives up."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(most, dynamo.recompile_limit)
    dynamo.accumulated_recompile_limit = max(most, dynamo.accumulated_recompile_limit)
