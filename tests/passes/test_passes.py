"""The runner of passes: their order, their requirements, refusals and reports."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

import partc
from partc import fuel, passes
from partc import settings as environment
from partc.errors import InternalError, PartcError
from partc.ir.gradients import passing
from partc.ir.program import Op, Program, Ref, Region
from partc.passes.simplify import cut_off
from partc.settings import Settings
from tests.programs import tiny

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def append_op(program: Program, name: str) -> Program:
    """The program with one more operation on the first region's last value."""
    region = program.regions[0]
    last = region.forward.ops[-1]
    result = replace(last.result, name=f"{last.result.name}_{name}")
    ops = (*region.forward.ops, Op(name=name, args=(Ref(last.result.name),), results=(result,)))
    changed: Region = replace(region, forward=replace(region.forward, ops=ops))
    return replace(program, regions=(changed, *program.regions[1:]))


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes that are made up here."""

    class Made(passes.Pass):
        @property
        def run(self):  # type: ignore[no-untyped-def]
            return lambda program, **options: append_op(program, self.name)

    made = tuple(
        Made(name=name, label=name.title(), does="", requires=requires, ensures=(name,), optional=name == "second")
        for name, requires in (("first", ("traced",)), ("second", ("first",)), ("third", ("first",)))
    )
    monkeypatch.setattr(passes, "PIPELINE", made)
    monkeypatch.setattr(passes, "NAMES", tuple(entry.name for entry in made))


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Settings for one test: `setting(debug=2)`."""

    def change(**values: object) -> None:
        found = Settings(**values)  # type: ignore[arg-type]
        for module in (environment, passes, fuel):
            monkeypatch.setattr(module, "settings", lambda: found)

    return change


def test_the_list_is_complete_and_in_order() -> None:
    facts = {"traced"}
    for entry in passes.PIPELINE:
        assert set(entry.requires) <= facts, entry.name
        assert {*entry.after} <= {*passes.before(entry.name)}, entry.name
        facts |= set(entry.ensures)
        assert importlib.util.find_spec(f"partc.passes.{entry.name}"), entry.name
    folder = passes.__spec__.submodule_search_locations[0]  # type: ignore[union-attr,index]
    found = [path.relative_to(Path(folder)).with_suffix("") for path in Path(folder).rglob("*.py")]
    texts = [path.read_text() for path in Path(folder).rglob("*.py")]
    modules = {".".join(path.parts).removesuffix(".__init__") for path in found} - {"__init__"}
    assert set(passes.NAMES) <= modules
    for module in modules - set(passes.NAMES):  # a module that is not a pass belongs to one
        above, _, name = f"partc.passes.{module}".rpartition(".")
        spelling = re.compile(rf"from {above}(\.{name} import| import .*\b{name}\b)")
        assert any(spelling.search(text) for text in texts), module
    assert len({entry.label for entry in passes.PIPELINE}) == len(passes.PIPELINE)


def test_the_documentation_lists_the_passes_as_they_are() -> None:
    rows = [line for line in ARCHITECTURE.read_text().splitlines() if line.startswith("| ")]
    table = {cells[0].strip(): cells[1].strip() for row in rows if len(cells := row.strip("| ").split(" | ")) == 2}
    assert {entry.name: table.get(entry.name) for entry in passes.PIPELINE} == {
        entry.name: entry.does for entry in passes.PIPELINE
    }
    assert [name for name in table if name in passes.NAMES] == list(passes.NAMES)


def test_the_runner_times_verifies_and_observes(pipeline: None) -> None:
    seen: list[str] = []
    verified: list[tuple[str, frozenset[str]]] = []
    steps = passes.run(
        tiny(), {}, verify=lambda p, facts, name: verified.append((name, facts)), observe=lambda s: seen.append(s.name)
    )
    assert seen == [step.name for step in steps] == ["first", "second", "third"]
    assert verified[1] == ("second", frozenset({"traced", "first", "second"}))
    assert all(step.seconds >= 0 for step in steps)
    assert steps[0].program is not steps[1].program


def test_it_stops_where_it_is_told(pipeline: None) -> None:
    assert [step.name for step in passes.run(tiny(), {}, until="second")] == ["first", "second"]
    assert passes.run(tiny(), {}, until=passes.FIRST) == ()
    with pytest.raises(PartcError, match="no pass 'fourth'") as failure:
        passes.run(tiny(), {}, until="fourth")
    assert failure.value.code == "P0604"


def test_a_pass_out_of_order_is_a_bug(pipeline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PIPELINE", passes.PIPELINE[::-1])
    with pytest.raises(InternalError, match="pass third needs first"):
        passes.run(tiny(), {})


def test_optional_passes_can_be_left_out(pipeline: None, setting) -> None:  # type: ignore[no-untyped-def]
    setting(disabled=("second",))
    assert [step.name for step in passes.run(tiny(), {})] == ["first", "third"]
    setting(disabled=("first",))
    with pytest.raises(PartcError) as failure:
        passes.run(tiny(), {})
    assert failure.value.code == "P0702" and "second" in failure.value.help


def test_a_required_pass_cannot_be_left_out(
    pipeline: None,
    setting,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Facts that a left-out pass ensures do not hold."""
    facts: list[frozenset[str]] = []
    setting(disabled=("second",))
    passes.run(tiny(), {}, verify=lambda program, given, name: facts.append(given))
    assert facts[-1] == {"traced", "first", "third"}
    first, second, third = passes.PIPELINE
    monkeypatch.setattr(passes, "PIPELINE", (first, second, replace(third, requires=("second",))))
    with pytest.raises(PartcError, match="leave out 'second': 'third' requires second") as failure:
        passes.run(tiny(), {})
    assert failure.value.code == "P0702"


def test_provenance_names_the_pass_that_made_a_value(pipeline: None) -> None:
    found = passes.provenance(tiny(), passes.run(tiny(), {}))
    assert found["main.y"] == found["main.loss"] == passes.FIRST
    assert found["main.loss_first_second"] == "second"
    assert found["main.loss_first_second_third"] == "third"


def test_debug_levels(pipeline: None, setting, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    passes.run(tiny(), {})
    assert capsys.readouterr().err == ""
    setting(debug=1)
    passes.run(tiny(), {})
    told = capsys.readouterr().err
    assert [line.split()[0] for line in told.splitlines()] == ["first", "second", "third"]
    setting(debug=2)
    passes.run(tiny(), {})
    assert "third +1" in capsys.readouterr().err


def test_fuel_caps_rewrites(setting, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    fuel.restart()
    assert all(fuel.may_rewrite("fold") for _ in range(5))
    setting(fuel=2, debug=5)
    fuel.restart()
    assert [fuel.may_rewrite("fold", "main.y") for _ in range(4)] == [True, True, False, False]
    assert fuel.num_requested() == 4
    told = capsys.readouterr().err.splitlines()
    assert told[1].split() == ["rewrite", "2", "fold", "at", "main.y"] and told[3].endswith("(no fuel)")


def test_settings_are_read_from_the_environment() -> None:
    assert Settings.read({}) == Settings()
    found = Settings.read({"PARTC_DEBUG": "3", "PARTC_FUEL": "17", "PARTC_DISABLE": "fuse, recompute"})
    assert found == Settings(debug=3, fuel=17, disabled=("fuse", "recompute"))
    with pytest.raises(PartcError) as failure:
        Settings.read({"PARTC_DEBUG": "loud"})
    assert failure.value.code == "P0701"


class Counted:
    """Names of the rewrites of a compile, by a fuel that counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        allowed = fuel.may_rewrite

        def counted(rewrite: str, place: object = "") -> bool:
            self.names.append(rewrite)
            return allowed(rewrite, place)

        monkeypatch.setattr(fuel, "may_rewrite", counted)


@pytest.mark.slow
def test_packages_train_alike_with_any_amount_of_fuel(setting, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Every optional rewrite costs fuel, those of `fuse` and `overlap` included; all are exact."""
    model = Path(__file__).parents[1] / "models" / "noisy.py"
    counted = Counted(monkeypatch)

    def compiled() -> partc.Package:
        return partc.compile(model, mesh="2x1x2", microbatches=2, kernels="triton", precision="fp64")

    whole = compiled()
    assert {"kernel", "overlap", "drawn mask"} <= {*counted.names}
    for amount in (0, len(counted.names) // 2):
        setting(fuel=amount)
        package = compiled()
        left = sum(
            op.name == "fused" for region in package.program.regions for graph in region.graphs for op in graph.ops
        )
        assert (left == 0) == (amount == 0)
        assert package.verify(steps=1).ok
    assert whole.verify(steps=1).ok


def test_gradients_are_followed_as_often_for_many_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[str] = []
    monkeypatch.setattr(cut_off, "passing", lambda graph: walked.append("") or passing(graph))  # type: ignore[func-returns-value]
    (region,) = tiny().regions
    (weight,) = region.params
    many = replace(region, params=(weight, *(replace(weight, name=f"w{i}") for i in range(8))))
    cut_off.with_cut_off_parameters(many, many.forward, frozenset(value.name for value in many.params))
    assert len(walked) == 2
