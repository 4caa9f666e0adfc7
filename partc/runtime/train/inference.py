"""Inference with a forward-only package: writes the results of batches of data into files."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..checkpoint.boxes import Box, pieces, writes_tensor
from ..checkpoint.restore import newest
from ..checkpoint.safetensors import raw, tensor_offsets
from ..comm.comm import Comm
from ..device.sending import to_device
from ..errors import UsageError, shown, tell, writing
from ..execution.executor import run_forward
from ..execution.stage import PipelineStage
from ..layout import Shard
from ..processes.agreement import Together
from .command_line import Parser, a_path, parse
from .data import BatchSource, InOrder, Say
from .data import in_microbatches as cut
from .examples import ExampleRows
from .job import Job
from .rank import Rank
from .tokens import TokenRows
from .train import Task, run

_ALONE = "result"  # the name of a lone tensor
_PASSED_ON = ("--init", "--data", "--data-dtype", "--data-labels", "--seed", "--device", "--attention", "--timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceJob(Job):
    """The job of infer.py: `steps` batches, or all batches of the data if this is 0."""

    out: Path = Path("results")
    checkpoint_of: Path | None = None

    @property
    def start(self) -> int:
        """The first batch, which does not depend on a checkpoint's steps."""
        return 0

    @property
    def shuffles(self) -> bool:
        return False


def main(argv: Sequence[str], root: Path) -> int:
    """Run the package in `root` on batches of data. Returns the exit code."""
    return run(lambda: check(argv, root), Task(prepared=_prepared, work=_infer))


def check(argv: Sequence[str], root: Path) -> InferenceJob:
    """Parse infer.py's command line. Raises UsageError P0521, P0535 and the errors of train.py's command line."""
    parser = Parser(prog="infer.py", description="Run this package forward; one process per rank.")
    add = parser.add_argument
    add("--out", type=a_path, default=Path("results"), metavar="DIR", help="the folder of the results; results")
    add("--batches", type=int, metavar="N", help="batches to run; all of an iterable's or token file's")
    add("--checkpoint", type=a_path, metavar="DIR", help="parameters of the newest checkpoint of a training, or of one")
    add("--init", metavar="FILE", help="parameters of a state dict: safetensors, or a Hugging Face folder")
    add("--data", metavar="FILE", help="a token file, in place of the model file's data")
    add("--data-dtype", metavar="TYPE", help="the type of a .bin file's numbers; uint16")
    add("--data-labels", metavar="WHICH", help="next or same, as for train.py")
    add("--seed", metavar="N", help="the seed of data, and of parameters if none are given; the plan's")
    add("--device", metavar="KIND", help="auto, cpu or cuda")
    add("--attention", metavar="KERNEL", help="the preferred attention kernel on GPUs")
    add("--timeout", metavar="S", help="seconds that a rank waits for another; 600")
    add(
        "--virtual",
        action="store_true",
        help="all ranks in this one process, on the CPU or with --device cuda on one GPU",
    )
    given = parser.parse_args(argv)
    if given.batches is not None and given.batches < 1:
        raise UsageError("P0521", f"--batches {given.batches} is out of range", "give 1 or more", alike=True)
    if given.init is not None and given.checkpoint is not None:
        raise UsageError("P0521", "--init and --checkpoint both give parameters", "leave one out", alike=True)
    words = ["--virtual"] if given.virtual else []
    for option in _PASSED_ON:
        value = getattr(given, option.removeprefix("--").replace("-", "_"))
        words += [] if value is None else [option, value]
    job = parse([*words, "--steps", str(given.batches or 1), "--data-end", "error"], root)
    known = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    known |= {"steps": given.batches or 0, "out": given.out, "checkpoint_of": given.checkpoint}
    return InferenceJob(**known)


def _prepared(job: Job, together: Together, say: Say) -> Job:
    """The job with the checkpoint of its parameters. Raises UsageError P0523 to P0525."""
    assert isinstance(job, InferenceJob)
    old = next(iter(sorted(job.out.glob("batch_*.safetensors"))), None) if together.rank == 0 else None
    if together.broadcast("" if old is None else "occupied"):
        raise UsageError("P0538", f"{job.out} has results already", "name another folder, or remove them", alike=True)
    if job.checkpoint_of is None:
        return job
    found = newest(job.checkpoint_of, together, needed=True, say=say)
    assert found is not None
    found.check_fits(job.plan)
    say(f"parameters of {found.path}")
    return dataclasses.replace(job, checkpoint=found)


def _infer(
    job: Job, rank: Rank, comm: Comm, data: BatchSource, model_file: ModuleType, device: torch.device, *rest: object
) -> None:
    assert isinstance(job, InferenceJob)
    clock = comm.clock
    end = _end(job, data, say=rank.number == 0)
    with torch.no_grad():
        stages: dict[int, PipelineStage] = {
            number: stage(comm, rank.parameters, {}) for number, stage in rank.stage_classes.items()
        }
        clock.entering("setup")
        for stage in stages.values():
            stage.setup()
        number = 0
        while end is None or number < end:
            clock.entering("data")
            try:
                part = data.part(number, rank.inputs, job.sizes, rank.place.coordinate)
            except UsageError as error:
                if job.steps or not number or error.code != "P0544":
                    raise
                break
            local = {name: to_device(x, device) for name, x in part.items()}
            microbatches = cut(local, rank.inputs, job.sizes, job.plan["microbatches"])
            found = run_forward(stages, comm, rank.actions, local, microbatches, job.sizes)
            clock.entering("the writing of results")
            _write(job, job.out / f"batch_{number:06d}.safetensors", found, rank, comm)
            number += 1
    rank.done = job.steps
    if rank.number == 0:
        print(shown(f"{number} batch{'es' * (number != 1)} in {job.out}"), flush=True)


def _end(job: InferenceJob, data: BatchSource, *, say: bool) -> int | None:
    """The number of batches; None for all batches of an iterable. Raises UsageError P0521 if the data has no end."""
    if job.steps or isinstance(data, InOrder):
        return job.steps or None
    if isinstance(data, ExampleRows):
        return data.count
    if not isinstance(data, TokenRows):
        raise UsageError("P0521", "the batches of data(step) or batch() have no end", "give --batches N", alike=True)
    count, left = divmod(data.count, data.rows)
    if left and say:
        tell(f"the last {left} rows of {job.data} fill no batch of {data.rows}: they are left out")
    return count


def _write(job: Job, path: Path, found: Mapping[str, Tensor], rank: Rank, comm: Comm) -> None:
    """Write the results of a batch into one file. Every rank writes its parts; of equal parts, one rank writes.

    The file gets its name when it is complete.
    """
    plan = job.plan["results"]
    shards = {name: Shard(entry["dtype"] + entry["layout"]) for name, entry in plan.items()}
    unfinished, place = path.with_name(path.name + ".part"), rank.place.coordinate
    with writing(path, rank.number):
        starts, header = tensor_offsets({name or _ALONE: (shard.dtype, shard.shape) for name, shard in shards.items()})
        if rank.number == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                file.write(header)
                file.truncate(starts[""])
        comm.barrier()
        mine = {
            name: value
            for name, value in found.items()
            if writes_tensor(name, shards[name].cut, job.sizes, place, [plan[name]["place"]])
        }
        if mine:
            with unfinished.open("r+b") as file:
                for name, value in mine.items():
                    shard = shards[name]
                    for piece in pieces(shard.dims, shard.shape, job.sizes, place):
                        part = value.detach().cpu()[piece.here.slices].contiguous()
                        for start, run in _runs(part, piece.whole, shard.shape):
                            os.pwrite(file.fileno(), raw(run), starts[name or _ALONE] + start * value.element_size())
        comm.barrier()
        if rank.number == 0:
            unfinished.replace(path)


def _runs(part: Tensor, box: Box, shape: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """The runs of a box's elements that are contiguous in the whole tensor: (index of the first element, values)."""
    whole = next((dim for dim in reversed(range(len(shape))) if box.sizes[dim] != shape[dim]), 0)
    inner = math.prod(shape[whole + 1 :])
    ahead = [range(start, start + size) for start, size in zip(box.offsets[:whole], box.sizes[:whole], strict=True)]
    stretches = part.reshape(math.prod(box.sizes[:whole]), -1)
    for index, stretch in zip(itertools.product(*ahead), stretches, strict=True):
        start = 0
        for place, size in zip((*index, *box.offsets[whole : whole + 1]), shape, strict=False):
            start = start * size + place
        yield start * inner, stretch
