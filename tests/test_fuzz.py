"""The search of tests/fuzz, bounded and always the same; `make fuzz` goes on from other seeds."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.fuzz.search import Case, cases, run


@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_random_programs_equal_their_single_device_models(case: Case) -> None:
    run(case)


def test_a_printed_case_reads_back() -> None:
    case = Case(
        steps=(("linear", 1),), last=(), repeat=2, width=4, vocabulary=8, ties=1, rows=4, length=3,
        mesh="pp=1,dp=2,tp=2", microbatches=2, schedule="1f1b", shard=("head.weight=[@tp, _]",),
    )  # fmt: skip
    assert Case.read(str(case)) == case


def test_gradients_of_the_first_half_of_backward_are_summed_too() -> None:
    """Found by the search: a stage whose gradients of weights all come with those of inputs."""
    line = (
        '{"steps": [["norm", 4], ["keep", 5]], "last": [["norm", 4], ["keep", 5]], "repeat": 7, "width": 8, '
        '"vocabulary": 24, "ties": 4, "rows": 2, "length": 6, "mesh": "pp=4,tp=2,dp=1", "microbatches": 1, '
        '"schedule": "dualpipe-v", "shard": []}'
    )
    assert run(Case.read(line)) == ""
