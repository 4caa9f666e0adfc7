"""Virtual machines joined by slow links, as network namespaces of this machine.

    with slow_link(400_000_000) as hosts:
        subprocess.Popen([*hosts[0].prefix, "torchrun", ...], env={**os.environ, **hosts[0].environment})

Each namespace has one end of a pair of virtual Ethernet devices; the other end is a port of a switch, which is a bridge
in a namespace of its own. A token bucket on either end limits the bits a second that leave it, so both directions carry
the full rate at the same time. `switched` can put a second switch behind a narrow link: an oversubscribed core.

No packet is dropped: connections have less in flight than a bucket's queue holds, as on links with flow control.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

BURST = 16 * 1024  # bytes that leave at once after a pause, far fewer than a step moves
QUEUE = 1 << 26  # bytes that may stand before a bucket
FLIGHT = 1 << 22  # bytes of a connection that are under way at most
_SETTINGS = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_wmem": f"4096 {FLIGHT} {FLIGHT}",
    "tcp_rmem": f"4096 {FLIGHT} {FLIGHT}",
}
_OWN = re.compile(r"partc-(\d+)-\w+")


class Unavailable(Exception):
    """This machine gives no network namespaces; the text is the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a process runs: the words before its command, and what its environment has to say."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def slow_link(bits: int) -> AbstractContextManager[tuple[Host, ...]]:
    """Two hosts and a link of so many bits a second between them. Raises Unavailable."""
    return switched(2, bits)


@contextmanager
def switched(nodes: int, bits: int, *, leaf: int = 0, core: int = 0) -> Iterator[tuple[Host, ...]]:
    """Hosts that reach a switch by links of so many bits a second. Raises Unavailable.

    With `leaf`, each switch has so many hosts, and a link of `core` bits a second leads from each to the next.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"no command {tool} (Debian: apt-get install iproute2)")
    _sweep()
    own, middle = f"partc-{os.getpid()}", f"partc-{os.getpid()}-switch"
    leaf = leaf or nodes
    with ExitStack() as after:
        for name in (middle, *(f"{own}-{place}" for place in range(nodes))):
            _run("ip", "netns", "add", name)
            after.callback(_deleted, name)
        bridges = [f"leaf{number}" for number in range(-(-nodes // leaf))]
        for bridge in bridges:
            _run("ip", "-n", middle, "link", "add", bridge, "type", "bridge")
            _run("ip", "-n", middle, "link", "set", bridge, "up")
        for number in range(len(bridges) - 1):
            ends = (f"core{number}a", f"core{number}b")
            _run("ip", "-n", middle, "link", "add", ends[0], "type", "veth", "peer", ends[1])
            for end, bridge in zip(ends, bridges[number : number + 2], strict=True):
                _port(middle, end, bridge, core)
        hosts = []
        for place in range(nodes):
            name, device, port = f"{own}-{place}", f"pc{os.getpid()}.{place}", f"port{place}"
            _run("ip", "-n", middle, "link", "add", port, "type", "veth", "peer", device, "netns", name)
            _port(middle, port, bridges[place // leaf], bits)
            address, inside = f"10.199.0.{place + 1}", ("ip", "netns", "exec", name)
            for setting, value in _SETTINGS.items():
                _run(*inside, "sysctl", "-qw", f"net.ipv4.{setting}={value}")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", name, "link", "set", device, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _shape(name, device, bits)
            hosts.append(Host(address=address, prefix=inside, environment={"GLOO_SOCKET_IFNAME": device}))
        yield tuple(hosts)


def _port(middle: str, device: str, bridge: str, bits: int) -> None:
    _run("ip", "-n", middle, "link", "set", device, "master", bridge)
    _run("ip", "-n", middle, "link", "set", device, "up")
    _shape(middle, device, bits)


def _shape(name: str, device: str, bits: int) -> None:
    limit = ("rate", f"{bits}bit", "burst", str(BURST), "limit", str(QUEUE))
    _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limit)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _deleted(name: str) -> None:
    """A namespace takes its devices with it, once no process is left in it."""
    with suppress(Unavailable):
        for _ in range(50):
            found = _run("ip", "netns", "pids", name).split()
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            if not found:
                break
            time.sleep(0.1)
        _run("ip", "netns", "delete", name)


def _sweep() -> None:
    """Delete the namespaces of earlier processes that were killed."""
    for line in _run("ip", "netns", "list").splitlines():
        found = _OWN.fullmatch(line.split()[0])
        if found is not None and not os.path.exists(f"/proc/{found[1]}"):
            _deleted(found[0])
