"""Ranks of one machine listen on the loopback interface alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from partc.runtime.torch_private import on_one_machine
from tests.runtime.test_death import by_hand, package, wait_for_steps

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listening(process: int) -> list[str]:
    """The addresses that a process listens on, as the kernel writes them."""
    mine = {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel's tables are Linux's")
def test_what_ranks_started_by_hand_listen_on(tmp_path: Path) -> None:
    """Rank 0 has the ranks' store, and every rank a socket of gloo's for each of its peers."""
    processes = by_hand(package(tmp_path, dp=1), 2, tmp_path)
    try:
        wait_for_steps(tmp_path / "log")
        found = [listening(process.pid) for process in processes]
        assert all(found) and {address for each in found for address in each} <= LOOPBACK, found
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "node7"}, True),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost"}, False),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}, True),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.7"}, False),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "GLOO_SOCKET_IFNAME": "eth1"}, False),
    ],
)
def test_which_ranks_are_on_one_machine(environment: dict[str, str], expected: bool) -> None:
    assert on_one_machine(environment) is expected
