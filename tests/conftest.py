"""What every test runs under: one thread per process, as the ranks of local runs have."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read while Triton is imported: kernels are interpreted, unless tests.gpu runs them. What builds them is another process.
os.environ.setdefault("TRITON_INTERPRET", "1")
for name in ("PARTC_DEBUG", "PARTC_FUEL", "PARTC_DISABLE"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def _quick_starts() -> Iterator[None]:
    """`verify` in one process starts its two from a server that has torch imported; torchrun starts its own."""
    import partc.verify
    from partc.launch import local_environment
    from tests.prefork import Server

    plain, server = partc.verify._start, Server()

    def start(command: list[str], output: Path, variables: Mapping[str, str]) -> Any:
        alone = "--virtual" in command or "partc.reference" in command
        if not alone or os.environ.get("PARTC_TESTS_FORK") == "0":
            return plain(command, output, variables)
        return server.start(command[1:], output, {**local_environment(), **variables})

    partc.verify._start = start
    yield
    partc.verify._start = plain
    server.close()
