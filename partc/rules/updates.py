"""The update of each parameter of a program, as the options of a compile describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from partc.errors import PartcError
from partc.ir.program import Program
from partc.runtime.errors import UsageError
from partc.runtime.optimizer.recipe import DEFAULT, Recipe, UpdateRule

__all__ = ["DEFAULT", "UpdateRule", "refuse_sparse_gradient", "updates"]


def updates(program: Program, optimizer: str, group: Sequence[str]) -> Mapping[str, UpdateRule]:
    """The update of each parameter. Raises PartcError P0551."""
    rates = tuple((item.name, item.balance) for item in program.parameters if item.balance)
    try:
        found = _settings(optimizer, tuple(group), rates, tuple(model_dims(program).items()))
    except UsageError as error:
        raise PartcError(error.code, error.cause, help=error.help) from None
    return {item.name: found[item.names[0]] for item in program.parameters}


@lru_cache(maxsize=8)
def _settings(
    optimizer: str, group: tuple[str, ...], rates: tuple[tuple[str, float], ...], dims: tuple[tuple[str, int], ...]
) -> Mapping[str, UpdateRule]:
    return Recipe.of(optimizer, groups=group, balance=dict(rates)).all_settings(dict(dims))


def model_dims(program: Program) -> dict[str, int]:
    """The numbers of dimensions of the model's own parameters."""
    return {name: len(item.type.shape) - item.stacked for item in program.parameters for name in item.names}


def refuse_sparse_gradient(name: str, rule: UpdateRule, why: str) -> None:
    """Note that a gradient cannot be sparse. Raises PartcError P0422 if its optimizer takes only sparse ones."""
    if rule.kind.sparse:
        raise PartcError(
            "P0422",
            f"{rule.name} needs a sparse gradient, and that of {name} is dense: {why}",
            help="give this parameter another optimizer with --group; tables with sparse gradients are made by "
            "nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True)",
        )
