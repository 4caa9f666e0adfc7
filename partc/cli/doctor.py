"""`partc doctor`: the capabilities of this machine, and their consequences."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding. `ok` is None if it is only informative."""

    what: str
    found: str
    meaning: str
    ok: bool | None = None


def findings() -> Iterator[Finding]:
    """Examine everything, the most basic first."""
    yield _python()
    yield _cores()
    if not _present("torch"):
        yield Finding(
            what="torch", found="not installed", meaning="nothing works without it: pip install torch", ok=False
        )
        return
    yield from _torch()
    there = "emitted Triton kernels can run; on a GPU, a package's first run times their configurations"
    yield _optional("triton", there, "packages use torch's own kernels")
    yield _optional(
        "transformers", "hf:PATH/config.json models can be compiled", "no hf: models: pip install 'partc[hf]'"
    )
    yield _shared_memory()


def _python() -> Finding:
    version = platform.python_version()
    ok = tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 10)
    meaning = "partc runs on 3.10 and newer" if ok else "too old: partc needs 3.10 or newer"
    return Finding(
        what="python", found=f"{version} on {platform.system()} {platform.machine()}", meaning=meaning, ok=ok
    )


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    meaning = (
        f"OMP_NUM_THREADS={threads}: every rank uses so many threads"
        if threads
        else "each rank of a local run uses one thread"
    )
    return Finding(what="cores", found=str(count), meaning=meaning)


def _torch() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    version = torch.__version__
    recent = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= (2, 11)
    meaning = "supported" if recent else "too old: partc needs torch 2.11 or newer"
    yield Finding(what="torch", found=version, meaning=meaning, ok=recent)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        names = sorted({torch.cuda.get_device_name(index) for index in range(gpus)})
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield Finding(
            what="GPUs",
            found=f"{gpus} x {', '.join(names)}, {memory:.0f} GiB each",
            meaning=f"packages of up to {gpus} ranks run here, one GPU a rank",
            ok=True,
        )
    else:
        yield Finding(what="GPUs", found="none", meaning="packages run on CPU processes here; compiling needs no GPU")
    gloo = dist.is_available() and dist.is_gloo_available()
    found = _gloo_works() if gloo else "not in this torch"
    yield Finding(
        what="gloo",
        found=found,
        meaning="ranks talk over gloo on CPUs" if found == "works" else "use --virtual: all ranks in one process",
        ok=found == "works",
    )
    nccl = dist.is_available() and dist.is_nccl_available()
    meaning = (
        "ranks talk over NCCL on GPUs"
        if nccl and gpus
        else "not needed without GPUs"
        if not gpus
        else "GPU runs need it"
    )
    yield Finding(
        what="NCCL",
        found="in this torch" if nccl else "not in this torch",
        meaning=meaning,
        ok=bool(nccl) if gpus else None,
    )


def _gloo_works() -> str:
    """Connect a group of one process. This detects a host name that does not resolve, which would break every local
    run.
    """
    import torch
    import torch.distributed as dist

    folder = tempfile.mkdtemp(prefix="partc-doctor-")
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    except Exception as error:
        return f"fails: {str(error).splitlines()[0][:100]}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "works"


def _optional(package: str, there: str, missing: str) -> Finding:
    if not _present(package):
        return Finding(what=package, found="not installed", meaning=missing)
    return Finding(what=package, found=importlib.metadata.version(package), meaning=there, ok=True)


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    ok = free > 64 << 20
    meaning = "enough" if ok else "NCCL uses it between GPUs of one machine: in a container, raise --shm-size"
    return Finding(what="/dev/shm", found=f"{free / 2**20:,.0f} MiB free", meaning=meaning, ok=None if not ok else True)


def _present(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
