"""Plain training of the single-device model: the reference of `partc verify`.

Run as `python -m partc.package.reference PACKAGE FOLDER SETTINGS [VALUES]` in a process of its own. It uses the
package's model.py and plan.json, autograd, torch's optimizers and the whole batch, and no other emitted file.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.overrides import TorchFunctionMode

from partc.errors import PartcError, first_line
from partc.frontend.model_precision import computing_in
from partc.frontend.state.first_steps import step_of, with_buffers
from partc.frontend.state.flags import is_flag
from partc.frontend.trace_errors import innermost_user_line
from partc.frontend.traceable_forms.masked_spans import traceable_spans
from partc.package.launch import refusals_reported
from partc.package.loads import LoadCounts
from partc.package.sampling import BranchSampling, BranchTests, Sampling, shorter_outcomes
from partc.runtime.checkpoint.safetensors import load, save
from partc.runtime.first_steps import FirstSteps
from partc.runtime.layout import DTYPES
from partc.runtime.optimizer.kinds import kind_of, options_of
from partc.runtime.optimizer.recipe import Group, parse_recipe
from partc.runtime.train.data import Tokens, call_with_options, load_model_file, seeded_outside_torch, source
from partc.runtime.train.entries import batches_of_parts, entries, of_model, rebuilt_batch
from partc.runtime.train.plain_tensors import Members, with_registered_tensors
from partc.runtime.train.precision import as_real, dtype_held, held_in

DATA = ("data", "data_dtype", "data_labels", "data_end")  # options of train.py that choose the batches
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: Sequence[str]) -> int:
    package, folder, settings, *values = argv
    with refusals_reported(Path(folder)):
        train(Path(package), Path(folder), Path(values[0]) if values else None, **json.loads(settings))
    return 0


def train(package: Path, folder: Path, values: Path | None, *, steps: int, seed: int, **recipe: Any) -> None:
    """Write the initial parameters to `folder` as step 0, then loss, gradients and parameters of every step.

    Gradients are written before clipping, parameters after the update. Parameters without a gradient have no entry.
    The names of parameters that forward itself has changed are written with the loss.
    With `values`, a step starts from the parameters and buffers that this folder has for the step before.
    """
    plan: dict[str, Any] = json.loads((package / "plan.json").read_text())
    module = load_model_file(package / "model.py")
    model = single_device_model(module, plan, seed)
    cast_states(model, held_in(plan["precision"]))
    names = list(model.named_parameters(remove_duplicate=False))
    given = {name: recipe.pop(name) for name in DATA if name in recipe}
    tokens = Tokens(given["data"], given["data_dtype"], given["data_labels"]) if given.get("data") else None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    rates = balanced_biases(plan)
    trained = dict(model.named_parameters()) | {name: tensors[name] for name in rates}
    update = ReferenceUpdate(trained, steps=steps, balance=rates, **recipe)
    again = given.get("data_end") != "error"
    data = source(module, plan, seed=seed, dtype=held_in(plan["precision"]), again=again, tokens=tokens)
    save(folder / "step_0000.safetensors", _state(model), {})
    branches: _Branches | None = None
    for step in range(steps):
        if values is not None and step:
            _set_state(model, load(values / f"step_{step:04d}.safetensors")[0])
        model.zero_grad(set_to_none=True)
        numbers = range(step * update.accumulate, (step + 1) * update.accumulate)
        total = 0.0
        counts = LoadCounts({name: tensors[name] for name in rates})
        before = {name: _moments(x) for name, x in names}
        for number in numbers:
            parts = _microbatches(data.batch(number), plan)
            if branches is None:
                branches = _branches(module, model, plan, parts[0])
            total += _backward(module, model, plan, parts, branches, seed, number, counts) / update.accumulate
        for name, x in names:
            counted = "counted" in plan["parameters"].get(name, {})
            if x.grad is None and branches is not None and name in branches.trained and not counted:
                x.grad = torch.zeros_like(x)
        _average_gradients(model, update.accumulate * len(parts))
        recorded = _gradients(names)
        for name, received in counts.loads.items():
            bias = tensors[name]
            recorded[f"gradient/{name}"] = bias.grad = received.to(bias.dtype).view_as(bias) / update.accumulate
        changed = [name for name, x in names if _moments(x) != before[name]]
        update.step()
        written = {"loss": repr(total), "changed": json.dumps(changed)}
        save(folder / f"step_{step + 1:04d}.safetensors", recorded | _state(model), written)


def _average_gradients(model: nn.Module, shares: int) -> None:
    """Divide the gradients, which are sums over as many batches; a weight with two names is divided once."""
    for x in model.parameters():
        if x.grad is not None:
            # The gradient of sgn and similar operations has no memory to write to.
            x.grad = x.grad.clone() if shares == 1 else x.grad / shares


def _gradients(names: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of parameters as the files have them; of sparse ones, also the numbers of their rows."""
    found: dict[str, Tensor] = {}
    for name, x in names:
        if x.grad is not None and x.grad.is_sparse:
            x.grad = x.grad.coalesce()
            found |= {f"rows/{name}": x.grad.indices()[0], f"gradient/{name}": x.grad.to_dense()}
        elif x.grad is not None:
            found[f"gradient/{name}"] = as_real(x.grad).clone()
    return found


def _moments(x: Tensor) -> tuple[str, str]:
    """Two sums that show whether a tensor has changed. They are text, so that NaN equals itself."""
    wide = as_real(x.detach()).double()
    return repr(wide.sum().item()), repr(wide.square().sum().item())


def _state(model: nn.Module) -> dict[str, Tensor]:
    found = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {f"parameter/{name}": as_real(x.detach()) for name, x in found}


def _set_state(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, x in _state(model).items():  # views of the model's memory
        if name in values:
            x.copy_(values[name])


def balanced_biases(plan: Mapping[str, Any]) -> dict[str, float]:
    """The routers' biases that a package updates after each step, with the size of the update."""
    return {name: entry["balance"] for name, entry in plan["parameters"].items() if "balance" in entry}


def single_device_model(module: Any, plan: Mapping[str, Any], seed: int) -> nn.Module:
    """The single-device model; its plain tensors are buffers where the package has them as such."""
    names = {name.rpartition(".")[2] for name in plan["parameters"]}
    torch.manual_seed(seed)
    with seeded_outside_torch(seed):
        model: nn.Module = call_with_options(module.model, plan["options"])
    steps = FirstSteps.of_plan(plan)
    if steps is not None:
        shapes = {name: (entry["shape"], DTYPES[entry["dtype"]]) for name, entry in plan["parameters"].items()}
        with_buffers(model, steps, shapes)
    return with_registered_tensors(model, names.__contains__)  # type: ignore[no-any-return]


def cast_states(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers to `dtype`. `Module.to` would drop the imaginary parts of complex tensors."""
    for x in (*model.parameters(), *model.buffers()):
        x.data = x.data.to(dtype_held(x.dtype, dtype))


class _Lion(torch.optim.Optimizer):
    """Lion, as in Chen et al. 2023, algorithm 2, line by line."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._betas, self._decay, self._sign = betas, weight_decay, -1.0 if maximize else 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (first, second), rate = self._betas, self.param_groups[0]["lr"]
        for x in self.param_groups[0]["params"]:
            if x.grad is not None:
                g, m = self._sign * x.grad, self.state[x].get("m", torch.zeros_like(x))
                update = torch.sign(first * m + (1 - first) * g)
                x.copy_(x - rate * (update + self._decay * x))
                self.state[x]["m"] = second * m + (1 - second) * g


class _RowwiseAdagrad(torch.optim.Optimizer):
    """FBGEMM's EXACT_ROWWISE_ADAGRAD on all rows, with one sum of mean squares for each row."""

    def __init__(
        self, params: list[Tensor], lr: float, eps: float = 1e-8, initial_accumulator_value: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._eps, self._first = eps, initial_accumulator_value

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rate = self.param_groups[0]["lr"]
        for x in self.param_groups[0]["params"]:
            if x.grad is not None:
                g = x.grad.to_dense() if x.grad.is_sparse else x.grad
                dims = tuple(range(1, x.dim()))
                square = (g * g).mean(dims, keepdim=True) if dims else g * g
                self.state[x]["m"] = self.state[x].get("m", torch.full_like(square, self._first)) + square
                x.copy_(x - rate * g / (self.state[x]["m"].sqrt() + self._eps))


_CLASSES: Mapping[str, Any] = {
    "lion": _Lion, "rowwise_adagrad": _RowwiseAdagrad,
    **{name.lower(): found for name, found in vars(torch.optim).items() if isinstance(found, type)},
}  # fmt: skip
_SPARSE = ("adagrad", "sgd", "sparseadam")  # torch's classes for sparse gradients
_DENSE = ("momentum", "weight_decay", "dampening")  # options with which these classes need dense gradients


class ReferenceUpdate:
    """The update by torch's own optimizer, clipping and schedule, with train.py's options. Parameters without `grad` do
    not change.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        steps: int,
        optimizer: str,
        lr: float,
        weight_decay: float | None = None,
        no_decay: Sequence[str] = (),
        group: Sequence[str] = (),
        clip: float | None = None,
        accumulate: int = 1,
        lr_schedule: str = "constant",
        warmup: int = 0,
        min_lr: float = 0.0,
        balance: Mapping[str, float] | None = None,
    ) -> None:
        """`balance` has the update sizes of routers' biases. Their gradients hold the loads of experts."""
        self.accumulate = accumulate
        self._clip = clip
        self._biases = [(parameters[name], rate) for name, rate in (balance or {}).items()]
        parameters = {name: x for name, x in parameters.items() if name not in (balance or {})}
        self._parameters = list(parameters.values())
        name, base = parse_recipe(optimizer)
        common = {} if weight_decay is None else {"weight_decay": str(weight_decay)}
        groups = [*map(Group.parse, group), *(Group(globs=(glob,), options={"weight_decay": "0"}) for glob in no_decay)]
        self._optimizers: list[tuple[float, torch.optim.Optimizer]] = []  # one for each parameter
        self._dense: list[Tensor] = []  # parameters whose optimizers need dense gradients
        self._pairs = {x: nn.Parameter(as_real(x.detach())) for x in parameters.values() if x.is_complex()}
        for path, given in parameters.items():
            x = self._pairs.get(given, given)
            mine = {key: value for each in groups if each.has(path) for key, value in each.options.items()}
            scale, own = float(mine.pop("lr_scale", "1")), mine.pop("optimizer", name)
            options = {**base, **common, **mine} if own == name else mine
            if own == "muon" and x.dim() != 2:
                own, options = "adamw", {key: value for key, value in options.items() if key == "weight_decay"}
            typed = options_of(kind_of(own), options)
            self._optimizers.append((scale, _CLASSES[own]([x], lr=lr, **typed)))
            if own not in _SPARSE or any(typed.get(key) for key in _DENSE):
                self._dense.append(x)
        self._clocked = torch.optim.SGD([torch.zeros(())], lr=lr)
        self._schedule = _schedule(self._clocked, lr_schedule, lr, steps, warmup, min_lr)

    def step(self) -> None:
        """Clip the gradients and update the parameters."""
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_([_with_rows(x) for x in self._parameters], self._clip)
        for x in self._dense:
            if x.grad is not None and x.grad.is_sparse:
                x.grad = x.grad.to_dense()
        self.passed(updated=True)

    def passed(self, *, updated: bool) -> None:
        """End a step. A step with overflowing gradients updates nothing, but its learning rate passes."""
        for x, pair in self._pairs.items():
            pair.grad = None if x.grad is None else as_real(x.grad)
        with torch.no_grad():
            for bias, rate in self._biases if updated else ():
                assert bias.grad is not None
                missing = bias.grad.double().mean() - bias.grad.double()
                bias += rate * (missing / bias.grad.amax()).round(decimals=6).sign()
        for scale, optimizer in self._optimizers if updated else ():
            optimizer.param_groups[0]["lr"] = self._clocked.param_groups[0]["lr"] * scale
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if the first step has no update
            self._schedule.step()


def _with_rows(x: Tensor) -> Tensor:
    """A parameter with the gradient of `x`: a dense one, or its rows in the same memory."""
    if x.grad is None or not x.grad.is_sparse:
        return x
    x.grad = x.grad.coalesce()
    rows = torch.zeros_like(x.grad._values())
    rows.grad = x.grad._values()
    return rows


def _schedule(
    optimizer: torch.optim.Optimizer, decline: str, lr: float, steps: int, warmup: int, least: float
) -> lr_scheduler.LRScheduler:
    """A linear warm-up to `lr`, and the decline to `least`, the rate of the last step."""
    peak = max(warmup - 1, 0)
    down = max(1, steps - 1 - peak)
    rising = lr_scheduler.LinearLR(optimizer, 1 / max(warmup, 1), 1.0, peak)
    falling: lr_scheduler.LRScheduler = lr_scheduler.ConstantLR(optimizer, 1.0)
    if decline == "cosine":
        falling = lr_scheduler.CosineAnnealingLR(optimizer, down, eta_min=least)
    elif decline == "linear":
        falling = lr_scheduler.LinearLR(optimizer, 1.0, least / lr, down)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's SequentialLR uses a deprecated call
        return lr_scheduler.SequentialLR(optimizer, [rising, falling], [peak])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branches:
    """The branches of a model, and the parameters that get a gradient in some outcome."""

    shorter: Mapping[int, Mapping[bool, int]]
    tests: BranchTests
    trained: frozenset[str]


def _branches(module: Any, model: nn.Module, plan: dict[str, Any], batch: Any) -> _Branches:
    """Run both outcomes of all branches, and restore the model's buffers."""
    if not plan["draws"]:
        return _Branches(shorter={}, tests=BranchTests(), trained=frozenset())
    before = [
        (part, name, x, x.clone(), x._version)
        for part in model.modules()
        for name, x in part._buffers.items()
        if x is not None
    ]
    trained: set[str] = set()

    def run() -> None:
        with as_one_device(plan):
            loss_of(module, model, plan, batch).backward()
        trained.update(name for name, x in model.named_parameters(remove_duplicate=False) if x.grad is not None)

    tests = BranchTests(lines=frozenset((name, line) for name, line in plan.get("branches", ())))
    shorter = shorter_outcomes(run, tests)
    flags = [
        (part, name)
        for part, name, x, old, version in before
        if is_flag(x) and (part._buffers[name] is not x or x._version != version or not x.equal(old))
    ]
    if flags:
        tests = replace(tests, flags=flags)
        shorter = shorter_outcomes(run, tests)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for part, name, x, old, _ in before:
            part._buffers[name] = x.copy_(old)
    return _Branches(shorter=shorter, tests=tests, trained=frozenset(trained))


def _backward(
    module: Any,
    model: nn.Module,
    plan: dict[str, Any],
    parts: Sequence[Any],
    branches: _Branches,
    seed: int,
    number: int,
    counts: LoadCounts,
) -> float:
    """Add the gradients of the losses of a batch's parts, and return the mean of these losses."""
    total = 0.0
    with Sampling(seed, number) as sampling:
        for index, part in enumerate(parts):
            moved = {index * plan["draws"] + key: value for key, value in branches.shorter.items()}
            drawing = BranchSampling(sampling, moved, branches.tests)
            with as_one_device(plan), drawing, counts:
                loss = loss_of(module, model, plan, part)
            loss.backward()
            total += loss.item() / len(parts)
    if sampling.drawn != plan["draws"] * len(parts):
        raise PartcError(
            "P0207",
            f"the model drew random numbers {sampling.drawn} times on a device, the package {plan['draws']} times",
            help="draw with torch's own random functions, the same number of times in every step",
        )
    return total


_BATCH_NORMS = frozenset({torch.batch_norm, torch.instance_norm, F.batch_norm, F.instance_norm})


class _DenseBatchNorms(TorchFunctionMode):
    """Gives batch norms dense operands and dense gradients.

    Torch 2.13 computes wrong gradients on CPUs for images one element wide or high, if only one of the two is in the
    channels-last format.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _BATCH_NORMS:
            return func(*args, **kwargs)
        given = {**dict(zip(("input",), args, strict=False)), **kwargs}
        made = func(given.pop("input").contiguous(), *args[1:], **given)
        if made.requires_grad:
            made.register_hook(Tensor.contiguous)
        return made


@contextmanager
def as_one_device(plan: Mapping[str, Any]) -> Iterator[None]:
    """A context for the model's own code: in the package's precision, with torch's mixed precision in place of partc's.

    Raises PartcError P0553 for an exception of the model.
    """
    precision = plan["precision"]
    mixed = torch.autocast("cpu", AUTOCAST[precision]) if precision in AUTOCAST else nullcontext()
    try:
        with computing_in(held_in(precision)), mixed, _DenseBatchNorms(), _flexible_attention():
            yield
    except PartcError:
        raise
    except Exception as error:
        raise _stopped(plan, error) from error


def _flexible_attention() -> AbstractContextManager[None]:
    """A context in which flex_attention has a gradient on CPUs, for models that import it."""
    if "torch.nn.attention.flex_attention" not in sys.modules:
        return nullcontext()
    from partc.frontend.traceable_forms.flex_attention import flexible_attention

    return flexible_attention()


def _stopped(plan: Mapping[str, Any], error: Exception) -> PartcError:
    """The error for an exception of the model's own code."""
    how, help = "", "packages do not run checks of values: correct the model, or its batch"
    if plan["precision"] in AUTOCAST:
        how = f" under torch.autocast in {plan['precision']}"
        help = "compile with --precision fp64, and verify that package"
    elif plan.get("repeated"):
        how = f" on one of {plan['microbatches']} microbatches, which are batches of their own"
        help = "compile with --microbatches 1, or a batch in which each entry has a row for each example"
    cause = f"the model stops{how}: {type(error).__name__}: {first_line(error)}"
    return PartcError("P0553", cause, help=help, source=innermost_user_line(error))


def _microbatches(batch: Any, plan: dict[str, Any]) -> list[Any]:
    """The parts of the batch: the whole batch, or its microbatches if the plan treats each as a separate batch."""
    if not plan["repeated"]:
        return [batch]
    count = plan["microbatches"]
    tensors = {name: x for name, x in entries(batch).items() if isinstance(x, Tensor) and x.dim()}
    rows = next(x.shape[0] for x in tensors.values())
    cut = {name: x.chunk(count) for name, x in tensors.items() if x.shape[0] == rows}
    forms = batches_of_parts(batch, rows, count)
    return [
        rebuilt_batch(form, {name: pieces[index] for name, pieces in cut.items()}) for index, form in enumerate(forms)
    ]


def loss_of(module: Any, model: nn.Module, plan: Mapping[str, Any], batch: Any) -> Tensor:
    """The model file's loss: its own function, or the model's result, or that object's `.loss`."""
    members, steps = Members.of(model), FirstSteps.of_plan(plan)
    first = nullcontext() if steps is None else step_of(model, steps)
    with traceable_spans(model.modules()), first:  # the same draws as in the package
        result = module.loss(model, batch) if hasattr(module, "loss") else of_model(model, batch)
    members.take()
    if not isinstance(result, Tensor):
        result = result["loss"] if isinstance(result, Mapping) else result.loss
    assert isinstance(result, Tensor)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
