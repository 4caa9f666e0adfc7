"""Whether two versions of partc make packages that train to the same bits: python -m tests.same_bits record|compare FILE.

`record` compiles every package of a list, trains it for three steps and writes digests of its losses, its whole
parameters and its ranks' checkpoints to FILE; `compare` does the same and prints what differs. Both must run on one
machine: other kernels of PyTorch make other last bits. Only the public interface is used, so that this file and
tests/pairwise.py, copied into the checkout of another version, run there too: partc.compile, train.py, partc export.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import partc
from partc.errors import PartcError
from tests.pairwise import Row, pairwise
from tests.prefork import Server

ROOT = Path(__file__).parents[1]
MODELS = {
    "gpt": "examples/gpt.py",
    "tied": "tests/models/tied.py",
    "unet": "tests/models/unet.py",
    "translation": "tests/models/translation.py",
}
OPTIONS = {
    "gpt": {"seq": 16, "batch": 32},
    "tied": {"depth": 4, "batch": 32},
    "unet": {"batch": 32},
    "translation": {"batch": 32},
}
# Meshes, each with the number of ranks of a node that cuts its dp axis in two.
NODES = {
    "pp=2,dp=2": 2,
    "pp=2,dp=2,tp=2": 2,
    "pp=2,dp=4": 2,
    "pp=2,dp_out=2,dp_in=2": 2,
    "dp=2,tp=2": 2,
    "pp=4,dp=2": 1,
}
EXTRA: Sequence[Row] = tuple(
    {
        "mesh": mesh,
        "schedule": "1f1b",
        "model": model,
        "zero": zero,
        "recompute": recompute,
        "sums": "whole",
        "precision": precision,
        "bucket": "4KiB",
        "loss_chunks": 1,
        "training": "--clip 0.1",
    }
    for mesh, model, zero, recompute, precision in (
        ("dp=4", "tied", 3, "selective", "bf16"),
        ("tp=4", "gpt", 0, "softmax,all_gather", "fp32"),
        ("tp=2", "translation", 0, "3MB", "fp64"),
    )
)
SUMS: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "nodes": {"nodes": True},
    "nodes int8": {"nodes": True, "compress_grads": "int8"},
    "bf16": {"grad_reduce": "bf16", "compress_grads": "bf16"},
}
COLUMNS: Mapping[str, Sequence[Any]] = {
    "mesh": tuple(NODES),
    "schedule": ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipe-v"),
    "model": tuple(MODELS),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "sums": tuple(SUMS),
    "precision": ("fp64", "fp32", "bf16", "fp16"),
    "bucket": ("25MB", "4KiB"),
    "loss_chunks": (1, 2),
    "training": ("", "--optimizer sgd --clip 0.1", "--accumulate 2 --weight-decay 0.1"),
}
STEPS = 3
PROCESSES = 4  # packages for more ranks run as virtual ranks of one process


class Failed(Exception):
    """A command that ended with an error, and its output."""


def packages() -> dict[str, Row]:
    """Every package by its name. The loss of the U-Net, which has no matrix product before it, has no chunks."""

    def excluded(row: Row) -> bool:
        return row.get("model") == "unet" and row.get("loss_chunks") == 2

    return {" ".join(map(str, row.values())): row for row in (*pairwise(COLUMNS, excluded), *EXTRA)}


def record(only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each package whose name matches, and its digests."""
    server = Server()
    try:
        for name, row in packages().items():
            if fnmatchcase(name, only):
                with tempfile.TemporaryDirectory(prefix="partc-same-bits-") as folder:
                    yield name, _made(row, Path(folder), server)
    finally:
        server.close()


def _made(row: Row, folder: Path, server: Server) -> dict[str, Any]:
    sums = dict(SUMS[row["sums"]])
    if sums.pop("nodes", False):
        sums["nodes"] = NODES[row["mesh"]]
    given = {key: row[key] for key in ("mesh", "schedule", "zero", "recompute", "precision", "bucket", "loss_chunks")}
    start = time.process_time()
    try:
        package = partc.compile(
            str(ROOT / MODELS[row["model"]]), microbatches=8, options=OPTIONS[row["model"]], **given, **sums
        )
        build = package.write(folder / "build")
    except PartcError as refusal:
        return {"refused": refusal.code}
    seconds = time.process_time() - start
    ranks = prod(int(axis.rpartition("=")[2]) for axis in row["mesh"].split(","))
    save, log, end = folder / "save", folder / "log.jsonl", folder / "end.safetensors"
    train = [str(build / "train.py"), "--steps", STEPS, "--save", save, "--metrics", log, *row["training"].split()]
    _run([train] * ranks if ranks <= PROCESSES else [[*train, "--virtual"]], folder, server)
    _run([["-m", "partc", "export", build, save, "--safetensors", end]], folder, server)
    saved = {f"{path.name} {key}": x for path in save.rglob("*.safetensors") for key, x in load_file(path).items()}
    return {
        "losses": [json.loads(line)["loss"] for line in log.read_text().splitlines()],
        "parameters": digest(load_file(end)),
        "checkpoints": digest(saved),
        "compile_seconds": round(seconds, 3),
    }


def _run(commands: Sequence[Sequence[object]], folder: Path, server: Server) -> None:
    """Python commands at once, each a rank of one job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": len(commands), "LOCAL_WORLD_SIZE": len(commands), "MASTER_ADDR": "127.0.0.1"}
    running = []
    for rank, command in enumerate(commands):
        own = {**job, "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank} if len(commands) > 1 else {}
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in own.items()}}
        running.append(server.start([str(word) for word in command], folder / f"output_{rank}.txt", variables))
    codes = [process.wait() for process in running]
    if any(codes):
        said = [(folder / f"output_{rank}.txt").read_text()[-2000:] for rank, code in enumerate(codes) if code]
        raise Failed("\n".join(said))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names, types, shapes and bits, in the order of names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The entries that differ, compile times aside."""
    names = [name for name in {**before, **after} if name != "compile_seconds"]
    return [name for name in names if before.get(name) != after.get(name)]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same_bits", description=__doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="*", help="packages whose name matches")
    given = parser.parse_args(argv)
    known = json.loads(given.file.read_text()) if given.action == "compare" else {}
    found, wrong, times = {}, 0, []
    for name, made in record(given.only):
        found[name] = made
        if given.action == "record":
            print(name, made.get("refused", made.get("losses")), flush=True)
        elif name not in known:
            print(f"NOT RECORDED {name}", flush=True)
            wrong += 1
        else:
            differ = differences(known[name], made)
            wrong += bool(differ)
            print(f"DIFFERS in {', '.join(differ)}: {name}" if differ else f"same {name}", flush=True)
            if "compile_seconds" in made and "compile_seconds" in known[name]:
                times.append(made["compile_seconds"] / known[name]["compile_seconds"])
    if given.action == "record":
        given.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} packages, {sum('refused' in made for made in found.values())} refused")
        return 0
    print(f"{len(found)} packages, {wrong} not the same")
    if times:
        print(f"compile time, median of the ratios to the recorded processor time: {statistics.median(times):.3f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
