"""The single-device model, trained plainly: what `partc verify` holds a package against.

Run as `python -m partc.reference PACKAGE FOLDER STEPS SETTINGS`, a process of its own: it uses
the package's model.py and plan.json, autograd and the whole batch, and nothing else that was emitted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import PartcError
from partc.runtime.data import call_with_options, global_batch, load_model_file
from partc.runtime.precision import computing_in, held_in
from partc.runtime.tensors import save
from partc.sampling import Sampling

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: Sequence[str]) -> int:
    package, folder, steps, settings = argv
    train(Path(package), Path(folder), steps=int(steps), **json.loads(settings))
    return 0


def train(
    package: Path,
    folder: Path,
    *,
    steps: int,
    optimizer: str,
    lr: float,
    clip: float | None = None,
    accumulate: int = 1,
) -> None:
    """Write every step's loss, gradients (before clipping) and parameters (after the update) to `folder`."""
    plan: dict[str, Any] = json.loads((package / "plan.json").read_text())
    module = load_model_file(package / "model.py")
    torch.manual_seed(plan["seed"])
    model: nn.Module = call_with_options(module.model, plan["options"])
    model.to(held_in(plan["precision"]))
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    update = kind(trained, lr=lr) if trained else None
    names = list(model.named_parameters(remove_duplicate=False))
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        numbers = range(step * accumulate, (step + 1) * accumulate)
        total = sum(_backward(module, model, plan, number, accumulate) for number in numbers)
        recorded = {f"gradient/{name}": x.grad.clone() for name, x in names if x.grad is not None}
        if update is not None:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(trained, clip)
            update.step()
        recorded |= {f"parameter/{name}": x.detach() for name, x in names}
        recorded |= {f"parameter/{name}": x for name, x in model.named_buffers(remove_duplicate=False)}
        save(folder / f"step_{step:04d}.safetensors", recorded, {"loss": repr(total)})


def _backward(module: Any, model: nn.Module, plan: dict[str, Any], number: int, accumulate: int) -> float:
    """Add the gradients of a batch's part of the step's loss, which is returned."""
    batch = global_batch(module, plan["options"], seed=plan["seed"], step=number, dtype=held_in(plan["precision"]))
    parts = _microbatches(batch, plan)
    total = 0.0
    with Sampling(plan["seed"], number) as sampling:
        for part in parts:
            with computing_in(held_in(plan["precision"])), _mixed(plan["precision"]):
                loss = loss_of(module, model, part) / (len(parts) * accumulate)
            loss.backward()
            total += loss.item()
    if sampling.drawn != plan["draws"] * len(parts):
        raise PartcError(
            "P0207",
            f"the model drew random numbers {sampling.drawn} times on a device, the package {plan['draws']} times",
            help="draw with torch's own random functions, the same number of times in every step",
        )
    return total


def _mixed(precision: str) -> torch.autocast:
    """torch's own mixed precision, where the package has partc's."""
    return torch.autocast("cpu", AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST)


def _microbatches(batch: dict[str, Tensor], plan: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The whole batch; or its microbatches, one after the other, where the plan takes each for a batch of its own."""
    if not plan["repeated"]:
        return [batch]
    count = plan["microbatches"]
    rows = next(x.shape[0] for x in batch.values() if x.dim())
    cut = {name: x.chunk(count) for name, x in batch.items() if x.dim() and x.shape[0] == rows}
    return [{**batch, **{name: pieces[index] for name, pieces in cut.items()}} for index in range(count)]


def loss_of(module: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model file's loss: its own function, or what the model returns, or that object's `.loss`."""
    result = module.loss(model, batch) if hasattr(module, "loss") else model(**batch)
    if not isinstance(result, Tensor):
        result = result.loss
    assert isinstance(result, Tensor)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
