"""What every test runs under: one thread per process, as the ranks of local runs have."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read while Triton is imported: kernels are interpreted, unless tests.gpu runs them. What builds them is another process.
os.environ.setdefault("TRITON_INTERPRET", "1")
for name in ("PARTC_DEBUG", "PARTC_FUEL", "PARTC_DISABLE"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def _quick_starts() -> Iterator[None]:
    from tests.prefork import quick_starts

    server = quick_starts()
    yield
    server.close()
