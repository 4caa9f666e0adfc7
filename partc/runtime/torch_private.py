"""All private torch names that the runtime uses, to be checked after an upgrade of torch."""

from __future__ import annotations

import datetime
import errno
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _disabled_torch_function_impl as without_overrides
from torch._C._distributed_c10d import AllgatherOptions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import Store
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "all_gather_base",
    "all_gather_many",
    "all_reduce",
    "all_to_all_base",
    "clone_store",
    "connected_store",
    "foreach_add_",
    "foreach_copy_",
    "lone_store",
    "nccl_settings",
    "process_group",
    "recompile_limit",
    "reduce_scatter_base",
    "reduce_scatter_many",
    "send_and_receive",
    "storage_key",
    "tree_flatten",
    "tree_map_only",
    "without_modes",
    "without_overrides",
]

LOOPBACK = "127.0.0.1"
_WAITING = 1024  # the most connections that wait to be accepted

foreach_add_, foreach_copy_ = torch._foreach_add_, torch._foreach_copy_  # many tensors in one launch


# Defaults of NCCL's groups, unless the user's environment sets them.
_NCCL_SETTINGS = {
    # watchdog.py reports lost ranks by name; torch's own watchdog would kill the process before that.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # NCCL's signal to write dumps has a name in the ranks' store that outlives restarts.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Each link has its own group, so that its transfers do not wait for others.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
# Receives that are posted ahead hold the GPU, so a communicator has to connect completely when it is created.
_NCCL_PIPELINE = {"NCCL_RUNTIME_CONNECT": "0"}


def nccl_settings(environment: MutableMapping[str, str], *, pipeline: bool) -> None:
    """Set NCCL's environment; must be called before the first group is created, which reads it."""
    for name, value in (_NCCL_SETTINGS | (_NCCL_PIPELINE if pipeline else {})).items():
        environment.setdefault(name, value)


def process_group(
    store: Store, rank: int, size: int, device: torch.device, timeout: datetime.timedelta, *, most_blocks: int = 0
) -> Any:
    """Connect to the other ranks of a group, with the classes that `new_group` uses.

    On GPUs its kernels use at most `most_blocks` multiprocessors, unless that is 0.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        if most_blocks:
            options.config.max_ctas = most_blocks
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)
        return group
    if not on_one_machine(os.environ):
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    settings = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    settings._timeout = timeout
    settings._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return dist.ProcessGroupGloo(store, rank, size, settings)


def on_one_machine(environment: Mapping[str, str]) -> bool:
    """Whether all ranks are on this machine and the user names no network interface, so that loopback suffices."""
    if "GLOO_SOCKET_IFNAME" in environment:
        return False
    here = environment.get("LOCAL_WORLD_SIZE")
    reached = environment.get("MASTER_ADDR") in (LOOPBACK, "localhost")
    return reached if here is None else here == environment.get("WORLD_SIZE")


def _loopback(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(_WAITING)
    except OSError as error:
        listener.close()
        name = errno.errorcode.get(error.errno or 0, "")
        raise dist.DistNetworkError(f"{name}: {error.strerror}") from None
    return listener


def connected_store(address: str, port: int, size: int, timeout: datetime.timedelta, *, master: bool) -> Store:
    """A store of several processes, hosted by `master`; others connect to it.

    A store on the loopback interface listens there only; torch's own listens on all interfaces.
    """
    own: dict[str, Any] = {}
    if master and address == LOOPBACK:
        own["master_listen_fd"] = _loopback(port).detach()
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, size, master, timeout, wait_for_workers=False, multi_tenant=True, **own
    )
    return store


def clone_store(store: Any) -> Store:
    """Another connection to the same store, for another thread."""
    clone: Store = store.clone()
    return clone


def lone_store() -> Store:
    """The store of a world of one rank."""
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    return store


def all_reduce(group: Any, x: Tensor, op: Any, *, overlaps: bool) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, overlaps
    return group.allreduce([x], options)


def all_gather_base(group: Any, whole: Tensor, part: Tensor, *, overlaps: bool) -> Any:
    options = AllgatherOptions()
    options.asyncOp = overlaps
    return group._allgather_base(whole, part, options)


def reduce_scatter_base(group: Any, part: Tensor, whole: Tensor, *, overlaps: bool) -> Any:
    options = dist.ReduceScatterOptions()
    options.asyncOp = overlaps
    return group._reduce_scatter_base(part, whole, options)


def all_gather_many(group: Any, wholes: Sequence[Tensor], parts: Sequence[Tensor], *, overlaps: bool) -> Any:
    """Several all-gathers in one launch."""
    group._start_coalescing()
    for whole, part in zip(wholes, parts, strict=True):
        all_gather_base(group, whole, part, overlaps=overlaps)
    return group._end_coalescing()


def reduce_scatter_many(group: Any, parts: Sequence[Tensor], wholes: Sequence[Tensor], *, overlaps: bool) -> Any:
    """Several reduce-scatters in one launch."""
    group._start_coalescing()
    for part, whole in zip(parts, wholes, strict=True):
        reduce_scatter_base(group, part, whole, overlaps=overlaps)
    return group._end_coalescing()


def all_to_all_base(
    group: Any, into: Tensor, x: Tensor, *, overlaps: bool, received: Sequence[int] = (), sent: Sequence[int] = ()
) -> Any:
    """An all-to-all: of equal parts, or of `sent[i]` rows to rank i and `received[i]` rows from it."""
    options = dist.AllToAllOptions()
    options.asyncOp = overlaps
    return group.alltoall_base(into, x, list(received), list(sent), options)


def send_and_receive(group: Any, x: Tensor, target: int, into: Tensor, source: int) -> list[Any]:
    """A receive and a send that start together; GPUs fuse them, so that neither waits for the other."""
    if x.is_cuda:
        group._start_coalescing()
    work = [group.recv([into], source, 0), group.send([x], target, 0)]
    return [group._end_coalescing()] if x.is_cuda else work


def without_modes() -> AbstractContextManager[Any]:
    """A context in which operations run for real, inside a recording."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def storage_key(x: Tensor) -> int:
    """The identity of the memory behind a tensor, real or fake."""
    return int(x.untyped_storage()._cdata)


def recompile_limit(most: int) -> None:
    """Set the number of variants of a function after which torch.compile stops compiling it."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(most, dynamo.recompile_limit)
    dynamo.accumulated_recompile_limit = max(most, dynamo.accumulated_recompile_limit)
