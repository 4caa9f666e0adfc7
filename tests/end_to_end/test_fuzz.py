"""A bounded, reproducible run of the search in tests/fuzz; `make fuzz` continues with other seeds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz import modules
from tests.fuzz.search import Case, cases, run
from tests.prefork import shared


@pytest.mark.slow
def test_random_programs_equal_their_single_device_models() -> None:
    refusals: list[str] = []

    @settings(max_examples=8, suppress_health_check=list(HealthCheck))
    @given(cases())
    def search(case: Case) -> None:
        refusals.append(run(case))

    search()
    assert refusals.count("") >= len(refusals) / 2, refusals


@pytest.mark.slow
def test_a_printed_case_reads_back() -> None:
    case = Case(
        steps=(("linear", 1),), last=(), repeat=2, width=4, vocabulary=8, ties=1, rows=4, length=3,
        mesh="pp=1,dp=2,tp=2", microbatches=2, schedule="1f1b", shard=("head.weight=[@tp, _]",),
    )  # fmt: skip
    assert Case.read(str(case)) == case


@pytest.mark.slow
def test_gradients_of_the_first_half_of_backward_are_summed_too() -> None:
    """Found by the search: a stage whose gradients of weights all come with those of inputs."""
    line = (
        '{"steps": [["norm", 4], ["keep", 5]], "last": [["norm", 4], ["keep", 5]], "repeat": 7, "width": 8, '
        '"vocabulary": 24, "ties": 4, "rows": 2, "length": 6, "mesh": "pp=4,tp=2,dp=1", "microbatches": 1, '
        '"schedule": "dualpipe-v", "shard": []}'
    )
    assert run(Case.read(line)) == ""


@pytest.mark.slow
def test_random_modules_end_as_plain_pytorch_leaves_them() -> None:
    """A few seeds of the search over the operator table; `make fuzz` goes on from others."""
    ends = [modules.run(modules.draw(seed), shared()) for seed in range(1000, 1006)]
    assert ends.count("holds") >= 3


def test_a_module_of_a_printed_case_is_the_same() -> None:
    case = modules.draw(1000)
    assert modules.Case.read(str(case)) == case and case == modules.draw(1000)


@pytest.mark.slow
def test_weights_whose_gradients_are_constants_on_a_split_schedule() -> None:
    """Found by the search: the half for weights was kept nothing for."""
    case = modules.Case(
        init=("self.p0 = nn.Parameter(torch.randn(4, 4))", "self.p1 = nn.Parameter(torch.randn(4))"),
        body=("v1 = v * self.p1.sign()", "v0 = v1"),
        batch=(
            ("x", "torch.randn(6, 4)"),
            ("i", "torch.randint(10, (6, 7))"),
            ("m", "torch.rand(6, 7) > 0.3"),
        ),
        repeat=5,
        compile={"mesh": "pp=2", "microbatches": 2, "schedule": "zbv"},
        train={"optimizer": "sgd", "lr": 0.01, "weight-decay": 0.0},
    )
    assert modules.run(case, shared()) == "holds"


@pytest.mark.parametrize(("mesh", "eval_every"), [("tp=2,dp=2", 0), ("dp=2,cp=2", 1)])
def test_tables_with_row_wise_updates(mesh: str, eval_every: int) -> None:
    """Found by the search: columns that tp cuts, and an evaluation of tables that lie whole on ranks."""
    case = Case(
        steps=(("mlp", 1),), last=(), repeat=2, width=8, vocabulary=8, ties=0, rows=8, length=4, mesh=mesh,
        microbatches=2, schedule="1f1b", shard=(), eval_every=eval_every, tables=2,
    )  # fmt: skip
    assert run(case) == ""
