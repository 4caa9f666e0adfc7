"""Emitted packages perform the communication that is proved to match, collective by collective on every rank."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.communication.events import CommunicationPlan, Entered, events
from partc.cost.accounting import communication
from partc.ir.collectives import cost
from partc.ir.printer import readable
from tests import prefork
from tests.zoo import MODELS

RECORDED = """
import json, runpy, sys
folder, out, *more = sys.argv[1:]
sys.path.insert(0, folder)
from runtime.comm.virtual import VirtualAxis
found, meet = {}, VirtualAxis.meet

def recorded(self, operation, x, combine):
    rank = self.ranks[self.rank]
    size = 0 if operation == "exchange" else x.numel()  # of as many rows as the data sends
    found.setdefault(rank, []).append([operation.split()[0], self.name, str(x.dtype).removeprefix("torch."), size])
    return meet(self, operation, x, combine)

VirtualAxis.meet = recorded
sys.argv = ["train.py", "--virtual", "--steps", "1", *more]
try:
    runpy.run_path(folder + "/train.py", run_name="__main__")
except SystemExit as stop:
    assert not stop.code
json.dump(found, open(out, "w"))
"""
DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "i64": "int64", "f16": "float16", "u8": "uint8"}


def done(package: Path, out: Path, *arguments: str) -> dict[str, list[list[Any]]]:
    """Every rank's collectives in one step: operation, group, element type, and number of elements."""
    script = out.with_name("recorded.py")
    script.write_text(RECORDED)
    ended = prefork.done([script, package, out, *arguments])
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[list[Any]]] = json.loads(out.read_text())
    return found


def planned(plan: CommunicationPlan, rank: int) -> list[list[Any]]:
    return [
        [event.op, event.group, DTYPES[event.dtype], 0 if event.op == "exchange" else math.prod(event.shape)]
        for event in plan.events_of(rank)
        if isinstance(event, Entered)
    ]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt", "2x2x2", {"bucket": "40KB"}),
        pytest.param("gpt", "2x2x2", {}, marks=pytest.mark.matrix),
        ("gpt", "2x2x2", {"zero": 1, "bucket": "0B"}),
        ("gpt", "2x2x2", {"zero": 2, "precision": "bf16"}),
        ("gpt", "2x2x2", {"zero": 3, "schedule": "zero-bubble", "recompute": "full"}),
        ("gpt", "2x2x2", {"zero": 3, "batch_over": "tp=blocks.1-2", "recompute": "full"}),
        ("gpt2", "pp=2,dp_out=2,dp_in=2", {"zero": "3@dp_in", "recompute": "selective"}),
        ("mixtral", "2x2x2", {"zero": 1, "schedule": "zbv"}),
        ("mixtral", "pp=2,ep=2,dp=2", {"zero": 2, "schedule": "zbv"}),
        ("mixtral", "ep=2,dp=2,tp=2", {"zero": 3, "recompute": "full"}),
        # Its tied weight has two stages of one rank.
        pytest.param("gpt2", "2x2x1", {"schedule": "zbv", "bucket": "10KB"}, marks=pytest.mark.matrix),
        ("gpt2", "2x2x1", {"schedule": "zbv", "bucket": "10KB", "zero": 1}),
        ("gpt", "1x4x2", {"nodes": 4, "bucket": "40KB"}),
        ("gpt", "2x4x1", {"nodes": 2, "bucket": "40KB", "compress_grads": "int8"}),
        ("gpt", "1x4x1", {"nodes": 2, "zero": "2@dp_in", "compress_grads": "bf16", "grad_reduce": "bf16"}),
        ("gpt", "2x4x1", {"nodes": 2, "zero": 3, "schedule": "zero-bubble"}),
        ("gpt", "1x4x1", {"nodes": 2, "zero": 1, "bucket": "40KB", "compress_grads": "int8"}),
        ("gpt2", "pp=2,dp=4", {"nodes": 2, "zero": 2, "schedule": "zbv"}),
        ("gpt", "pp=2,dp=4", {"nodes": 2, "zero": 2, "schedule": "zero-bubble"}),
        ("gpt", "dp=2,cp=4", {"shard": ("block.attn_heads=[_, _, @cp, _] ring",), "recompute": "full"}),
        pytest.param("resnet", "2", {"zero": 2, "precision": "bf16"}, marks=pytest.mark.matrix),
        ("resnet", "2", {"zero": 3, "precision": "bf16"}),  # norms' weights are read in fp32
    ],
)
def test_packages_do_what_was_proved(name: str, mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = MODELS[name]
    if model.config:
        pytest.importorskip("transformers")
    package = partc.compile(
        model.source(tmp_path), mesh=mesh, microbatches=2, options=model.options, **options
    )  # fmt: skip
    found = done(package.write(tmp_path / "build"), tmp_path / "done.json")
    plan = events(package.program)
    for rank in range(package.program.mesh.size):
        assert found[str(rank)] == planned(plan, rank), rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"), [("dp_out=2,dp_in=3", {"zero": 2, "nodes": 3}), ("pp=2,dp=3", {"zero": 1, "bucket": "1KB"})]
)
def test_spare_elements_travel_as_was_proved(mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = Path(__file__).parents[2] / "examples" / "gpt.py"
    package = partc.compile(model, mesh=mesh, microbatches=2, options={"batch": 24, "depth": 2}, **options)
    assert any(item.gather and item.type.shape[0] % 3 for item in package.program.parameters)
    found = done(package.write(tmp_path / "build"), tmp_path / "done.json")
    plan = events(package.program)
    for rank in range(package.program.mesh.size):
        assert found[str(rank)] == planned(plan, rank), rank


SAID = re.compile(r"(all-reduce|reduce-scatter|all-gather|all-to-all) ([\d.]+ \w+) (?:in (\w+) )?over (\w+(?:,\w+)*)")
CODES = {"uint8": "int8", "bfloat16": "bf16", "float16": "fp16"}
ITEM = {"float32": 4, "bfloat16": 2, "uint8": 1}


@pytest.mark.sampled
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("nodes", [None, 2])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("compress", ["none", "int8"])
def test_what_users_read_is_what_runs(zero: int, nodes: int | None, wire: str, compress: str, tmp_path: Path) -> None:
    """The README's rows and the comments of the stage name the bytes of the recorded events, as the account does.

    A batch of a single microbatch on dp alone, so that all collectives are exchanges of a step, but for the counts.
    """
    sums = {"nodes": nodes, "grad_reduce": wire, "compress_grads": compress}
    model = Path(__file__).parents[2] / "examples" / "gpt.py"
    package = partc.compile(model, mesh="dp=4", zero=zero, **sums)
    build = package.write(tmp_path / "build")
    sizes = package.program.sizes
    rows: Counter[tuple[str, str, str]] = Counter()
    each: set[tuple[str, str, str, str]] = set()
    axes: Counter[str] = Counter()
    for op, group, dtype, elements in done(build, tmp_path / "done.json")["0"]:
        received = cost(op, math.prod(sizes[axis] for axis in group.split(",")), elements * ITEM[dtype])
        if elements > 1:
            row = op.replace("_", "-"), CODES.get(dtype, ""), group
            rows[row] += received
            each.add((*row, readable(received)))
            axes[group] += received
    found = {(name, code, group): readable(size) for (name, code, group), size in rows.items()}
    readme = (build / "README.md").read_text()
    pattern = r"\| each step, stage 0 \| ([\w-]+) of \w+(?: in (\w+))? \| ([\w, ]+) \| (.+) \|"
    assert {(op, code, over.replace(", ", ",")): size for op, code, over, size in re.findall(pattern, readme)} == found
    assert _said((build / "stages" / "stage_0.py").read_text()) == each
    counted = {axis: 4 * 2 * (sizes[axis] - 1) // sizes[axis] for axis in sizes if axis.startswith("dp")}
    accounted = {axis: size for axis, size in communication(package.program).items() if size}
    assert accounted == {axis: axes[axis] + counted.get(axis, 0) for axis in {*axes, *counted}}


def _said(stage: str) -> set[tuple[str, str, str, str]]:
    """The exchanges in the comments of a stage: operation, code, axes and bytes."""
    comments = re.findall(r"(?:^ *# .*\n)+", stage, re.MULTILINE)
    said = (each for comment in comments for each in SAID.findall(re.sub(r"\s*\n? *# ", " ", comment)))
    return {(op, code, over, size) for op, size, code, over in said}
