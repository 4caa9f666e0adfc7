"""Machines that a slow link joins, as network namespaces of this machine.

    with slow_link(400_000_000) as hosts:
        subprocess.Popen([*hosts[0].prefix, "torchrun", ...], env={**os.environ, **hosts[0].environment})

Each namespace has one end of a pair of virtual Ethernet devices. A token bucket on either end limits the bits a second
that leave it, so both directions carry the full rate at the same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

BURST = 64 * 1024  # bytes that leave at once after a pause, far fewer than a step moves
QUEUE = "100ms"  # how long a packet may stand before the bucket; a longer queue drops it


class Unavailable(Exception):
    """This machine gives no network namespaces; the text is the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a process runs: the words before its command, and what its environment has to say."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def slow_link(bits: int) -> Iterator[tuple[Host, Host]]:
    """Two hosts and a link of so many bits a second between them. Raises Unavailable."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"no command {tool} (Debian: apt-get install iproute2)")
    names = [f"partc-{os.getpid()}-{place}" for place in range(2)]
    devices = [f"pc{os.getpid()}.{place}" for place in range(2)]
    with ExitStack() as after:
        for name in names:
            _run("ip", "netns", "add", name)
            after.callback(_deleted, name)
        _run("ip", "link", "add", devices[0], "netns", names[0], "type", "veth", "peer", devices[1], "netns", names[1])
        hosts = []
        for place, (name, device) in enumerate(zip(names, devices, strict=True)):
            address, inside = f"10.199.0.{place + 1}", ("ip", "netns", "exec", name)
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", name, "link", "set", device, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            limit = ("rate", f"{bits}bit", "burst", str(BURST), "latency", QUEUE)
            _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limit)
            hosts.append(Host(address=address, prefix=inside, environment={"GLOO_SOCKET_IFNAME": device}))
        yield hosts[0], hosts[1]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _deleted(name: str) -> None:
    """A namespace takes its devices with it."""
    with suppress(Unavailable):
        _run("ip", "netns", "delete", name)
