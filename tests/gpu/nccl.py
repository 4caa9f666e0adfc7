"""The requests of partc to torch's NCCL groups, on a group of one GPU, in a process that is killed if it hangs.

Every call of `runtime/comm/distributed.py` that one GPU can make: options, eager connection, collectives in both streams,
a recording with a collective in it, its reset, and the shutdown after that.
"""

from __future__ import annotations

import datetime

import torch

from partc.runtime.comm.distributed import LINK_BLOCKS, NcclAxis
from partc.runtime.device.cuda_graphs import recording
from partc.runtime.torch_private import lone_store, nccl_settings, process_group


def main() -> None:
    import os

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    nccl_settings(os.environ, pipeline=True)
    limit = datetime.timedelta(seconds=60)
    axes = []
    for most in (0, LINK_BLOCKS):
        group = process_group(lone_store(), 0, 1, device, limit, most_blocks=most)
        axes.append(NcclAxis(group, 0, 1))
        axes[-1].connect(device, link=False)
    print("connected", flush=True)
    x = torch.arange(12.0, device=device).view(1, 12)
    for axis in (axes[0], axes[0].at_once):
        for operation, right in (("raw_all_gather", x[None]), ("raw_reduce_scatter", x[0]), ("raw_all_to_all", x)):
            assert torch.equal(getattr(axis, operation)(x).wait().view(-1), right.reshape(-1)), operation
        assert torch.equal(axis.raw_all_reduce(x.clone(), "sum").wait(), x)
        assert torch.equal(axis.raw_exchange_rows(x.view(-1, 2), [6], [6]).wait().view(1, -1), x)
        assert torch.equal(axis.raw_shift(x).wait(), x)
    rows = [torch.arange(4.0, device=device).view(4, 1) + number for number in range(3)]
    wholes = [torch.empty_like(row) for row in rows]
    axes[0].raw_all_gather_many(rows, wholes).wait()
    parts = [torch.empty_like(row) for row in rows]
    axes[0].raw_reduce_scatter_many(rows, parts).wait()
    assert all(torch.equal(row, x) for row, x in zip([*rows, *rows], [*wholes, *parts], strict=True))
    print("collectives", flush=True)
    with torch.no_grad(), recording(True, device) as make:
        assert make is not None
        total, graph = x.clone(), make()
        for axis in (axes[0], axes[0].at_once):
            axis.raw_all_reduce(total, "sum").wait()
        torch.cuda.current_stream().synchronize()
        made = graph.capture(
            lambda: axes[0].raw_all_reduce(total, "sum").wait() + axes[0].at_once.raw_all_gather(x).wait()[0]
        )
        graph.replay()
        graph.replay()
        assert torch.equal(made, 2 * x)
    print("recorded", flush=True)
    for axis in axes:
        axis.disconnect()
    print("shut down", flush=True)


if __name__ == "__main__":
    main()
