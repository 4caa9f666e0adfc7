"""What every test runs under: one thread per process, as the ranks of local runs have."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_INTERPRET"] = "1"  # read while Triton is imported; what compiles kernels is a process of its own
for name in ("PARTC_DEBUG", "PARTC_FUEL", "PARTC_DISABLE"):
    os.environ.pop(name, None)
