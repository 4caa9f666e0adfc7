"""Links between network namespaces carry bytes in both directions at once, at most at their stated bandwidth."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import emulated
from tests.network import BURST, Host, Unavailable, slow_link, switched

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


def exchanged(one: Host, other: Host) -> list[float]:
    """The seconds in which each of two hosts receives what the other one sends."""
    peers = []
    for place, host in enumerate((one, other)):
        command = [*host.prefix, sys.executable, "-c", PEER, str(place), one.address, str(SIZE)]
        peers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        if place == 0:
            assert peers[0].stdout is not None
            assert peers[0].stdout.readline() == "listening\n"
    seconds = [float(peer.communicate(timeout=60)[0].split()[-1]) for peer in peers]
    assert [peer.returncode for peer in peers] == [0, 0]
    return seconds


def test_both_directions_of_the_link_are_as_slow_as_it_says() -> None:
    try:
        with slow_link(BITS) as hosts:
            seconds = exchanged(*hosts)
    except Unavailable as error:
        pytest.skip(f"no network namespaces: {error}")
    least = 8 * (SIZE - BURST) / BITS
    assert all(least * 0.95 < each < 2 * least + 5 for each in seconds)


def test_a_narrow_core_slows_what_passes_it() -> None:
    try:
        with switched(4, BITS, leaf=2, core=BITS // 4) as hosts:
            below, across = exchanged(hosts[0], hosts[1]), exchanged(hosts[1], hosts[2])
    except Unavailable as error:
        pytest.skip(f"no network namespaces: {error}")
    assert min(across) > 4 * 8 * (SIZE - BURST) / BITS * 0.95
    assert max(below) < min(across)


def test_processes_end_with_their_namespaces() -> None:
    """Even if the benchmark fails, and they ignore signals."""
    sleeper = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with pytest.raises((RuntimeError, Unavailable)) as failure, slow_link(BITS) as hosts:
        process = subprocess.Popen([*hosts[0].prefix, sys.executable, "-c", sleeper], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        raise RuntimeError("the benchmark fails")
    if isinstance(failure.value, Unavailable):
        pytest.skip(f"no network namespaces: {failure.value}")
    assert process.wait(timeout=10) == -signal.SIGKILL
    assert _namespaces().isdisjoint(host.prefix[-1] for host in hosts)


def test_without_namespaces_the_benchmark_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["emulated", str(tmp_path), "--only", "measure"])
    with pytest.raises(SystemExit) as failure:
        emulated.main()
    assert failure.value.code == os.EX_UNAVAILABLE
    assert "no command ip" in capsys.readouterr().err


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
