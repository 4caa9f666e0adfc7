"""The placement solver against enumeration of every assignment."""

import itertools
import os
import random

import highspy
import numpy as np
import pytest

from partc.sharding.assignment import Alternative, Node, Problem, Wire, solve
from partc.sharding.integer_program import LinearConstraints, solve_integer_program


def _random_problem(seed: int) -> Problem:
    """A few operations in a line with skips; placements are letters, changes have random prices or none."""
    rng = random.Random(seed)
    letters = "RSTP"[: rng.randint(2, 4)]
    nodes, wires = [], []
    readers: dict[int, list[tuple[int, int]]] = {}
    for index in range(rng.randint(2, 5)):
        sources = rng.sample(range(index), k=min(index, rng.randint(1, 2)))
        alternatives = tuple(
            Alternative(
                label=label,
                wants=tuple(rng.choice(letters) for _ in sources),
                makes=(rng.choice(letters),),
                price={"work": rng.choice([0, 0, 3, 10]), "bytes": rng.random()},
            )
            for label in range(rng.randint(1, 4))
        )
        nodes.append(Node(name=index, alternatives=alternatives))
        for position, source in enumerate(sources):
            readers.setdefault(source, []).append((index, position))
    prices = {(a, b): rng.choice([None, 0.0, 1.0, 2.5, 7.0]) for a in letters for b in letters}

    def change(source: object, target: object) -> dict[str, float] | None:
        price = prices[source, target]  # type: ignore[index]
        return None if price is None else {"bytes": price}

    for source, found in readers.items():
        wires.append(Wire(name=source, source=source, output=0, readers=tuple(found), change=change))
    return Problem(nodes=tuple(nodes), wires=tuple(wires))


def _price(problem: Problem, picks: dict) -> dict[str, float] | None:
    """Totals of an assignment; each change of a value is paid once however many read it."""
    total = {"work": 0.0, "bytes": 0.0}
    for choice in picks.values():
        for key, amount in choice.price.items():
            total[key] += amount
    for wire in problem.wires:
        made = picks[wire.source].makes[wire.output]
        for wanted in {picks[reader].wants[index] for reader, index in wire.readers} - {made}:
            price = wire.change(made, wanted)
            if price is None:
                return None
            total["bytes"] += price["bytes"]
    return total


@pytest.mark.parametrize("seed", range(60))
def test_solver_finds_what_enumeration_finds(seed: int) -> None:
    problem = _random_problem(seed)
    names = [node.name for node in problem.nodes]
    totals = []
    for combination in itertools.product(*(node.alternatives for node in problem.nodes)):
        priced = _price(problem, dict(zip(names, combination, strict=True)))
        if priced is not None:
            totals.append((priced["work"], priced["bytes"]))
    solution = solve(problem, ({"work": 1.0}, {"bytes": 1.0}))
    if not totals:
        assert solution is None
        return
    work, sent = min(totals)
    assert solution is not None
    priced = _price(problem, dict(solution.chosen))
    assert priced is not None
    assert priced["work"] == pytest.approx(work)
    assert priced["bytes"] == pytest.approx(sent, abs=1e-5)
    assert solution.totals["bytes"] == pytest.approx(priced["bytes"], abs=1e-5)


def test_forbidden_alternatives_are_avoided() -> None:
    cheap = Alternative(label="cheap", makes=("R",), price={"bytes": 1.0})
    dear = Alternative(label="dear", makes=("R",), price={"bytes": 2.0})
    problem = Problem(nodes=(Node(name="only", alternatives=(cheap, dear)),), wires=())
    objective = ({"bytes": 1.0},)
    assert solve(problem, objective).chosen["only"] == cheap
    assert solve(problem, objective, forbid=frozenset({("only", "cheap")})).chosen["only"] == dear
    assert solve(problem, objective, forbid=frozenset({("only", "cheap"), ("only", "dear")})) is None


def test_objectives_that_can_be_zero_need_no_program_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    run = "partc.sharding.assignment.solve_integer_program"
    monkeypatch.setattr(run, lambda *a, **given: ran.append(1) or solve_integer_program(*a, **given))
    prices = ({"work": 1.0, "bytes": 1.0}, {"bytes": 3.0}, {"bytes": 2.0, "moved": 1.0})
    choices = tuple(Alternative(label=label, makes=("R",), price=price) for label, price in enumerate(prices))
    objectives = ({"work": 1.0}, {"moved": 1.0}, {"bytes": 1.0})
    for alternatives, best, programs in ((choices, 1, 1), (choices[::2], 2, 2), (choices[:1], 0, 2)):
        ran.clear()
        found = solve(Problem(nodes=(Node(name="only", alternatives=alternatives),), wires=()), objectives)
        assert found is not None and found.chosen["only"].label == best
        assert len(ran) == programs


def test_text_of_the_solver_is_not_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = highspy.Highs.run
    monkeypatch.setattr(highspy.Highs, "run", lambda solver: os.write(1, b"debugging") and run(solver))
    rows = [LinearConstraints.dense(np.array([[2.0, 1.0]]), 3.0, np.inf)]
    found = solve_integer_program(np.array([1.0, 1.0]), rows, integral=[1, 1], upper=9.0, options={})
    assert found.values.tolist() in ([1.0, 1.0], [2.0, 0.0])
    print("{}")
    said = capfd.readouterr()
    assert (said.out, said.err) == ("{}\n", "debugging")
