"""The results of the single-device model: the reference of `partc verify` for packages that only run forward.

Run as `python -m partc.package.reference_results PACKAGE FOLDER OPTIONS`, with infer.py's options, in a process of its
own. It uses the package's model.py and plan.json, and the whole batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from partc.frontend.results import returned_tensors
from partc.package.launch import refusals_reported
from partc.package.reference import as_one_device, cast_states, single_device_model
from partc.runtime.checkpoint.safetensors import load, save
from partc.runtime.train.data import load_model_file
from partc.runtime.train.entries import of_model
from partc.runtime.train.inference import check
from partc.runtime.train.precision import held_in
from partc.runtime.train.train import batches_of


def main(argv: Sequence[str]) -> int:
    package, folder, *options = argv
    with refusals_reported(Path(folder)):
        _write_results(Path(package), Path(folder), options)
    return 0


def _write_results(package: Path, folder: Path, options: Sequence[str]) -> None:
    """Write the model's results for each batch to a new folder."""
    job = check(options, package)
    module = load_model_file(job.root / "model.py")
    model = single_device_model(module, job.plan, job.seed)
    if job.init is not None:
        model.load_state_dict(load(job.init)[0], strict=False)
    cast_states(model, held_in(job.plan["precision"]))
    model.eval()
    folder.mkdir()
    data = batches_of(job, module, lambda line: None)
    for number in range(job.steps):
        batch = data.batch(number)
        with torch.no_grad(), as_one_device(job.plan):
            found = returned_tensors(module.infer(model, batch) if hasattr(module, "infer") else of_model(model, batch))
        save(folder / f"batch_{number:06d}.safetensors", {name or "result": x for name, x in found.items()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
