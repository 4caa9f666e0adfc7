"""Gradient buffers that count as zero: their old content is never read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import partc
from partc.runtime.execution import parts
from partc.runtime.ops import functional
from partc.runtime.ops.accumulation import (
    Gradient,
    add_product,
    add_sums,
    clear,
    complete,
    first_since_clear,
    materialized,
)
from partc.runtime.train import steps
from tests.durable import TIED, same_records, trained

NAN = float("nan")


def _cleared(*shape: int) -> Gradient:
    gradient = Gradient.of(torch.full(shape, NAN))
    clear([gradient])
    return gradient


def test_what_comes_first_is_written_and_the_rest_added() -> None:
    rows, columns = torch.randn(3, 5), torch.randn(5, 4)
    for add in (
        lambda into: into.add_(rows @ columns),
        lambda into: into.add_(rows @ columns, alpha=2),
        lambda into: into.addmm_(rows, columns),
        lambda into: add_product(into, rows, columns),
        lambda into: add_product(into, rows.bfloat16(), columns.bfloat16()),
        lambda into: functional.linear_add_grad_weight(into, rows.t(), columns),
        lambda into: into.index_add_(0, torch.tensor([2, 0]), torch.randn(2, 4)),
    ):
        into, plain = _cleared(3, 4), torch.zeros(3, 4)
        for _ in range(3):
            state = torch.get_rng_state()
            add(into)
            torch.set_rng_state(state)
            add(plain)
        assert torch.equal(into, plain)


@pytest.mark.parametrize("begun_before", [(), (0, 1, 2), (1,)])
def test_sums_of_programs_go_to_several_buffers(begun_before: tuple[int, ...]) -> None:
    """Whether all are written, all added to, or some."""
    parts = torch.randn(3, 7, 8)
    buffers = [_cleared(8), _cleared(2, 4), _cleared(8)]
    wanted = [torch.zeros(8), torch.zeros(2, 4), torch.zeros(8)]
    for number in begun_before:
        for each in (buffers, wanted):
            each[number].add_(torch.ones(each[number].shape))
    for _ in range(2):
        add_sums(buffers, parts)
        for each, total in zip(wanted, parts.sum(1), strict=True):
            each += total.view(each.shape)
    for found, right in zip(buffers, wanted, strict=True):
        torch.testing.assert_close(torch.Tensor(found), right)


def test_what_nothing_was_added_to_is_zero() -> None:
    into = _cleared(2, 2)
    assert first_since_clear(into) and not first_since_clear(into)
    gradients = [_cleared(2), _cleared(3), torch.full((2,), NAN)]
    gradients[0].add_(torch.ones(2))
    clear(gradients[2:])
    complete(gradients)
    assert [x.tolist() for x in gradients] == [[1, 1], [0, 0, 0], [0, 0]]
    assert materialized(_cleared(3)).tolist() == [0, 0, 0]


def test_experts_without_rows_are_zero() -> None:
    into = _cleared(3, 2, 4)
    functional.expert_matmul_add_grad_weight(into, torch.ones(2, 4), torch.tensor([2, 2]), torch.ones(2, 2))
    assert into.sum((1, 2)).tolist() == [0, 0, 16]


def test_what_is_computed_from_one_is_a_plain_tensor() -> None:
    gradient = Gradient.of(torch.ones(2, 2))
    assert {type(x) for x in (gradient * 2, gradient[0], gradient.view(-1), gradient.clone())} == {Tensor}
    assert type(gradient.mul_(2)) is Gradient


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("2x2x2", {}),
        ("pp=2,dp=2", {"zero": 2}),
        ("dp=2", {"zero": 3}),
        ("pp=2,dp=2", {"schedule": "zbv"}),
        ("1", {"kernels": "triton", "loss_chunks": 2}),
    ],
    ids=["2x2x2", "zero 2", "zero 3", "zbv", "kernels"],
)
def test_a_step_never_reads_what_the_last_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str, options: dict[str, str]
) -> None:
    build = tmp_path / "build"
    partc.compile(TIED, mesh=mesh, microbatches=4, precision="fp64", **options).write(build)  # type: ignore[arg-type]
    arguments = ("--steps", 2, "--accumulate", 2, "--clip", 0.5)
    trained(build, *arguments, "--record", tmp_path / "plain")

    def poison(gradients: Iterable[Tensor]) -> None:
        gradients = list(gradients)
        for gradient in gradients:
            assert isinstance(gradient, Gradient)
            gradient.fill_(NAN)
        clear(gradients)

    monkeypatch.setattr(steps, "clear", poison)
    monkeypatch.setattr(parts, "clear", poison)
    trained(build, *arguments, "--record", tmp_path / "poisoned")
    for step in range(2):
        same_records(tmp_path / "plain", tmp_path / "poisoned", step)
