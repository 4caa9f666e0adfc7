"""The slow link of two network namespaces: it carries bytes, in both directions at once, no faster than it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.network import BURST, Unavailable, slow_link

BITS = 80_000_000
SIZE = 4_000_000  # bytes: 0.4 s on the link
PEER = """
import socket, sys, threading, time
place, address, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
listener = socket.create_server((address, 7000)) if place == 0 else None
if listener is not None:
    print("listening", flush=True)
    link, _ = listener.accept()
else:
    link = socket.create_connection((address, 7000))
started = time.perf_counter()
sending = threading.Thread(target=link.sendall, args=(bytes(size),))
sending.start()
arrived = 0
while arrived < size:
    arrived += len(link.recv(1 << 16))
print(time.perf_counter() - started, flush=True)
sending.join()
link.recv(1) if place else link.close()
"""


def test_both_directions_of_the_link_are_as_slow_as_it_says() -> None:
    try:
        with slow_link(BITS) as hosts:
            peers = []
            for place, host in enumerate(hosts):
                command = [*host.prefix, sys.executable, "-c", PEER, str(place), hosts[0].address, str(SIZE)]
                peers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                if place == 0:
                    assert peers[0].stdout is not None
                    assert peers[0].stdout.readline() == "listening\n"
            seconds = [float(peer.communicate(timeout=60)[0].split()[-1]) for peer in peers]
            assert [peer.returncode for peer in peers] == [0, 0]
    except Unavailable as error:
        pytest.skip(f"no network namespaces: {error}")
    least = 8 * (SIZE - BURST) / BITS
    assert all(least * 0.95 < each < 2 * least + 5 for each in seconds)


def test_the_namespaces_are_gone_afterwards() -> None:
    try:
        with slow_link(BITS) as hosts:
            names = [host.prefix[-1] for host in hosts]
            assert set(names) <= _namespaces()
    except Unavailable as error:
        pytest.skip(f"no network namespaces: {error}")
    assert _namespaces().isdisjoint(names)


def _namespaces() -> set[str]:
    found = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return {line.split()[0] for line in found.stdout.splitlines()}
