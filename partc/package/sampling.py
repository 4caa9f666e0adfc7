"""Random operations of the single-device model, with numbers drawn by element position as in packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partc.errors import PartcError
from partc.frontend.branches.random_tests import TESTS, RandomTests
from partc.installed import tested_place
from partc.runtime.random import Draw, dropout, stream
from partc.runtime.torch_private import TorchDispatchMode


class Sampling(TorchDispatchMode):
    """Replaces torch's generator while a model runs eagerly; random operations are numbered in order.

    The count is kept as the seed of torch's CPU generator. Code that runs a part of the model again, such as activation
    checkpointing in backward, first restores that generator, and so draws the same numbers. A dropout counts as one
    draw, as in torch: only its position in the order matters.
    """

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()
        self.seed = seed
        self.step = step
        self.drawn = 0  # the number of random operations, final when the run ends; repeated ones are counted once
        self._before = torch.default_generator.get_state()

    def __enter__(self) -> Sampling:
        self._before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(0)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.drawn = torch.default_generator.initial_seed()
        torch.default_generator.set_state(self._before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rule = _RANDOM.get(func._schema.name.removeprefix("aten::"))
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
        if given.get("generator") not in (None, torch.default_generator):  # a generator of the model's own
            return func(*args, **(kwargs or {}))
        if rule is not None:
            return rule(self, func, given)
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(names, given) and _makes_tensors(func):
            raise PartcError(
                "P0207",
                f"the single device runs {func._schema.name}, which draws in a way that no package can",
                help="make it of torch.rand, torch.randn and dropouts",
            )
        return func(*args, **(kwargs or {}))

    def draw(self, shape: Sequence[int], device: torch.device) -> Draw:
        """The numbers of the next random operation."""
        number = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(number + 1)
        return Draw.everything(stream(self.seed, self.step, number), shape, device)

    def skip(self, count: int) -> None:
        """Skip the numbers of `count` random operations that do not run."""
        torch.default_generator.manual_seed(torch.default_generator.initial_seed() + count)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTests:
    """Tests that are branches, besides those of random numbers: of flags, buffers that forward changes, by module and
    name; and of values, by the function and the line of the test.
    """

    flags: Sequence[tuple[nn.Module, str]] = ()
    lines: frozenset[tuple[str, int]] = frozenset()


class BranchSampling(TorchFunctionMode):
    """Gives random operations after a branch the same numbers for both outcomes, as in packages.

    A package runs both outcomes of such a branch. `shorter` has the number of random operations that an outcome lacks,
    by the number of random operations before the branch. `branches` says which tests are branches.
    """

    def __init__(self, sampling: Sampling, shorter: Mapping[int, Mapping[bool, int]], branches: BranchTests) -> None:
        super().__init__()
        self._sampling = sampling
        self._shorter = shorter
        self._branches = branches
        self._drawn = RandomTests()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "item" and self._drawn.is_uniform(args[0]):
            return self._drawn.number(args[0])
        if name in TESTS and (test := self._drawn.of(args[0])) is not None and not test.is_certain:
            return self.branch(args[0], test.below)
        if name in (*TESTS, "item") and any(args[0] is part._buffers[flag] for part, flag in self._branches.flags):
            return self.branch(args[0], True)
        if name in TESTS and self._branches.lines and tested_place(sys._getframe(1)) in self._branches.lines:
            return self.branch(args[0], False)
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self._drawn.follow(name, args, kwargs, made)
        return made

    def branch(self, test: Tensor, below: bool) -> bool:
        passed = bool(test)
        self._sampling.skip(self._shorter[torch.default_generator.initial_seed()][passed == below])
        return passed


class BranchCount(BranchSampling):
    """Takes the same outcome of every branch, and counts the random operations before it."""

    def __init__(self, sampling: Sampling, below: bool, branches: BranchTests) -> None:
        super().__init__(sampling, {}, branches)
        self._below = below  # whether all numbers are below their limits
        self.before: list[int] = []  # the number of random operations before each branch

    def branch(self, test: Tensor, below: bool) -> bool:
        self.before.append(torch.default_generator.initial_seed())
        return self._below == below


def shorter_outcomes(run: Callable[[], Any], branches: BranchTests) -> dict[int, dict[bool, int]]:
    """For each branch of `run`, how many fewer random operations each outcome draws than the outcome that draws more.

    A branch's key is its position: the number of random operations before it, with the longer outcome of every earlier
    branch. True is the outcome for numbers below the limit. Raises PartcError P0207 if a branch decides whether another
    one is reached.
    """
    behind: list[list[int]] = []
    first = 0
    for all_below in (False, True):
        with Sampling(0, 0) as sampling, BranchCount(sampling, all_below, branches) as count:
            run()
        if not count.before:
            return {}
        first = count.before[0]
        behind.append([end - start for start, end in pairwise((*count.before, sampling.drawn))])
    if len(behind[0]) != len(behind[1]):
        raise PartcError(
            "P0207",
            "a branch decides whether another one is reached: the package draws the random numbers of both, a single "
            "device only those that it reaches, so that the two cannot be compared",
            help="verify the model without these branches",
        )
    found: dict[int, dict[bool, int]] = {}
    for above, below in zip(*behind, strict=True):
        found[first] = {False: max(above, below) - above, True: max(above, below) - below}
        first += max(above, below)
    return found


Given = dict[str, Any]
Rule = Callable[[Sampling, Any, Given], Any]


def _bernoulli(sampling: Sampling, func: Any, given: Given) -> Tensor:
    x = given["self"]
    p = given.get("p", 0.5 if func._schema.name.endswith("_") else None)
    result = (sampling.draw(x.shape, x.device).uniform(torch.float64) < (x if p is None else p)).to(x.dtype)
    return _given_back(func, x, result)


def _uniform(sampling: Sampling, func: Any, given: Given) -> Tensor:
    x, low, high = given["self"], given.get("from", 0.0), given.get("to", 1.0)
    u = sampling.draw(x.shape, x.device).uniform(x.dtype)
    return _given_back(func, x, u * (high - low) + low)


def _normal(sampling: Sampling, func: Any, given: Given) -> Tensor:
    x, mean, std = given["self"], given.get("mean", 0.0), given.get("std", 1.0)
    return _given_back(func, x, sampling.draw(x.shape, x.device).normal(x.dtype) * std + mean)


def _normal_of(sampling: Sampling, func: Any, given: Given) -> Tensor:
    """The results of normal(mean, std), for numbers or tensors."""
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors)) if tensors else given["size"]
    device = tensors[0].device if tensors else given.get("device") or torch.device("cpu")
    dtype = tensors[0].dtype if tensors else given.get("dtype") or torch.get_default_dtype()
    numbers: Tensor = sampling.draw(shape, device).normal(dtype) * std + mean
    return numbers


def _exponential(sampling: Sampling, func: Any, given: Given) -> Tensor:
    x = given["self"]
    return _given_back(func, x, (_exponentials(sampling, x.shape, x.device) / given.get("lambd", 1.0)).to(x.dtype))


def _exponentials(sampling: Sampling, shape: Sequence[int], device: torch.device) -> Tensor:
    u = sampling.draw(shape, device).uniform(torch.float64)
    return (1 - u).log().neg()


def _multinomial(sampling: Sampling, func: Any, given: Given) -> Tensor:
    weights: Tensor = given["self"].double()
    count: int = given["num_samples"]
    if given.get("replacement"):
        waited = _exponentials(sampling, (*weights.shape[:-1], count, weights.shape[-1]), weights.device)
        return (weights.unsqueeze(-2) / waited).argmax(-1)
    keys = weights / _exponentials(sampling, weights.shape, weights.device)
    return keys.argmax(-1, keepdim=True) if count == 1 else keys.topk(count, -1).indices


def _rrelu(sampling: Sampling, func: Any, given: Given) -> Tensor:
    """The results of rrelu. The multiplier of each element is stored in `noise`, for the backward pass."""
    x: Tensor = given["self"]
    lower, upper = given.get("lower", 1 / 8), given.get("upper", 1 / 3)
    if not given.get("training", False):
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slope = sampling.draw(x.shape, x.device).uniform(x.dtype) * (upper - lower) + lower
    noise: Tensor = given["noise"].copy_(torch.where(x <= 0, slope, 1))
    return x * noise


def _rule_like(kind: str) -> Rule:
    def rule(sampling: Sampling, func: Any, given: Given) -> Tensor:
        x = given["self"]
        draw = sampling.draw(x.shape, x.device)
        found: Tensor = getattr(draw, kind)(given.get("dtype") or x.dtype)
        return found

    return rule


def _rule_new(kind: str) -> Rule:
    def rule(sampling: Sampling, func: Any, given: Given) -> Tensor:
        draw = sampling.draw(given["size"], given.get("device") or torch.device("cpu"))
        found: Tensor = getattr(draw, kind)(given.get("dtype") or torch.get_default_dtype())
        return found

    return rule


def _randint(sampling: Sampling, func: Any, given: Given) -> Tensor:
    x = given.get("self")
    shape, device = (x.shape, x.device) if x is not None else (given["size"], given.get("device"))
    low, high = given.get("low", 0), given["high"]
    u = sampling.draw(shape, device or torch.device("cpu")).uniform(torch.float64)
    whole: Tensor = (u * (high - low)).floor() + low
    return whole.to(given.get("dtype") or (x.dtype if x is not None else torch.int64))


def _randperm(sampling: Sampling, func: Any, given: Given) -> Tensor:
    device = given.get("device") or torch.device("cpu")
    return sampling.draw((given["n"],), device).uniform(torch.float64).argsort(0)


def _native_dropout(sampling: Sampling, func: Any, given: Given) -> tuple[Tensor, Tensor]:
    x = given["input"]
    if given.get("train") is False or not given["p"]:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    return dropout(x, given["p"], sampling.draw(x.shape, x.device))


def _draws(names: Sequence[str], given: Given) -> bool:
    """Whether this call draws random numbers: attention only does with dropout."""
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def _makes_tensors(func: Any) -> bool:
    return any(isinstance(found.type, torch.TensorType) for found in func._schema.returns)


def _given_back(func: Any, x: Tensor, result: Tensor) -> Tensor:
    """The result; written into `x` if the operation is in place."""
    return x.copy_(result) if func._schema.name.endswith("_") else result


_RANDOM: Mapping[str, Rule] = {
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
    "uniform": _uniform,
    "uniform_": _uniform,
    "normal_": _normal,
    "normal": _normal_of,
    "normal_functional": _normal,
    "exponential_": _exponential,
    "multinomial": _multinomial,
    "rrelu_with_noise": _rrelu,
    "rand_like": _rule_like("uniform"),
    "randn_like": _rule_like("normal"),
    "rand": _rule_new("uniform"),
    "randn": _rule_new("normal"),
    "randint": _randint,
    "randint_like": _randint,
    "randperm": _randperm,
    "native_dropout": _native_dropout,
}
