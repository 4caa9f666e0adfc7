"""partc inspect and --dump-after: the program after any pass, the changes of a pass, and the reasons for a layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partc import passes
from partc.api import compilation
from partc.cli import compile_options, main
from partc.cli.dump import Dump
from partc.cli.inspection import program_text, text
from partc.compilation.options import Options
from partc.errors import PartcError
from partc.ir.parser import parse

ROOT = Path(__file__).parents[2]
MLP = str(ROOT / "examples" / "mlp.py")
TIED = str(ROOT / "tests" / "models" / "tied.py")
REDUCTION = re.compile(r"all_reduce|reduce_scatter")  # of the second product's parts, whatever is chosen besides
SMALL = ["-D", "depth=3", "-D", "width=12", "-D", "hidden=20", "-D", "batch=12"]
MESH = ["--mesh", "2x1x2", "--microbatches", "3", "--shard", "head.weight=[_, _]"]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["inspect", MLP, *MESH, *SMALL, *arguments]) == 0
    return capsys.readouterr().out


def test_the_finished_program_is_shown_and_parses(capsys: pytest.CaptureFixture[str]) -> None:
    whole = shown(capsys)
    program = parse(whole)
    assert program.mesh.sizes == {"pp": 2, "dp": 1, "tp": 2} and program.microbatches == 3
    assert program.schedule and program.transfers
    assert program_text(program) == whole


@pytest.mark.parametrize("name", [passes.FIRST, *passes.NAMES])
def test_after_every_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = parse(shown(capsys, "--after", name))
    order = (passes.FIRST, *passes.NAMES)
    assert (len(program.regions) > 1) == (order.index(name) >= order.index("outline"))
    assert bool(program.schedule) == (name in ("schedule", "actions", "prefetch", "check"))


def test_one_region_with_sources(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "--after", "partition", "--region", "block", "--sources")
    assert found.startswith("region block") and found.count("\nregion ") == 0
    assert "mlp.py:" in found and REDUCTION.search(found)
    assert main(["inspect", MLP, *MESH, *SMALL, "--region", "nonesuch"]) == 2
    err = capsys.readouterr().err
    assert "error P0605: there is no region 'nonesuch'" in err and "block" in err


def test_the_diff_of_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "--after", "partition", "--diff").splitlines()
    assert found[:2] == ["--- before partition", "+++ after partition"]
    assert any(line.startswith("+") and REDUCTION.search(line) for line in found)
    assert not any(line.startswith("-") and REDUCTION.search(line) for line in found)
    assert shown(capsys, "--after", "check", "--diff") == "check changed nothing\n"


def test_provenance_names_passes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--provenance", "--region", "block").splitlines()
    made = {name: entry for entry, name in (line.split() for line in lines)}
    assert all(name.startswith("block.") for name in made)
    assert made["block.hidden"] == "outline"
    assert set(made.values()) == {"outline", "partition", "differentiate", "overlap"}


def test_explain_says_what_else_would_have_cost(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "--explain", "blocks.0.up.weight").splitlines()
    assert found[0].startswith("blocks.0.up.weight is [") and found[0].endswith("over tp")
    assert all(line.startswith("  instead [") for line in found[1:]) and len(found) > 1
    assert main(["inspect", MLP, *MESH, *SMALL, "--explain", "blocks.0.sideways"]) == 2
    assert "error P0304" in capsys.readouterr().err


def test_unknown_names_are_refused_without_axes_that_cut_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    how = ["inspect", MLP, "--mesh", "2", "--explain"]
    assert main([*how, "blocks.0.up.weight"]) == 0 and "whole on every rank" in capsys.readouterr().out
    assert main([*how, "blocks.0.sideways"]) == 2
    assert "error P0304" in capsys.readouterr().err


def test_a_tied_weight_is_explained_by_each_name(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("embed.weight", "head.weight"):
        assert main(["inspect", TIED, "--mesh", "tp=2", "--explain", name]) == 0
        assert capsys.readouterr().out.startswith(f"{name} is [")


@pytest.mark.parametrize(
    "options",
    [("--rank", "0", "--html", "x.html"), ("--explain", "x", "--after", "trace"), ("--schedules", "--region", "block")],
)
def test_one_view_at_a_time(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", MLP, *MESH, *options]) == 2
    assert "error P0004" in capsys.readouterr().err


def test_the_page_is_written_over_a_page_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    for _ in range(2):
        assert str(path) in shown(capsys, "--html", str(path))
    assert "<html" in path.read_text() and "block" in path.read_text()
    (tmp_path / "mine.html").write_text("<html>my own</html>")
    for name, code in (("mine.html", "P0601"), ("missing/page.html", "P0602")):
        assert main(["inspect", MLP, *MESH, *SMALL, "--html", str(tmp_path / name)]) == 2
        assert f"error {code}" in capsys.readouterr().err
    assert (tmp_path / "mine.html").read_text() == "<html>my own</html>"


def test_a_package_is_inspected_by_compiling_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "build"
    assert main(["compile", MLP, *MESH, *SMALL, "--schedule", "gpipe", "-o", str(folder)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    found = parse(capsys.readouterr().out)
    assert found.microbatches == 3 and found.mesh.sizes == {"pp": 2, "dp": 1, "tp": 2}
    assert " ".join(map(str, found.schedule[0])).startswith("0F0 0SEND_F0 0F1")  # gpipe: all forwards first
    assert found.parameter("head.weight").type.layout.sharded_axes == ()
    assert found.parameter("blocks.2.up.weight").type.layout.sharded_axes == ("tp",)


def test_dumps_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "build-dump").write_text("mine")
    with pytest.raises(PartcError, match="build-dump was not written by partc") as held:
        Dump.of(["all"], tmp_path / "build")
    options = Options.checked(mesh="2", microbatches=1, schedule="1f1b", precision="fp32", seed=0, shard=())
    dump = Dump(folder=tmp_path / "build-dump", names=frozenset(("trace",)))
    with pytest.raises(PartcError, match="cannot be written: File exists") as refused:
        compilation(MLP, None, options, model_options={}, observe=dump.observe, until="trace")
    assert (held.value.code, refused.value.code) == ("P0601", "P0602")


def test_dumps_are_numbered_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, dumps = tmp_path / "build", tmp_path / "build-dump"
    arguments = ["compile", MLP, *MESH, *SMALL, "-o", str(output)]
    assert main([*arguments, "--dump-after", "annotate", "--dump-after", "trace"]) == 0
    annotated = f"{1 + passes.NAMES.index('annotate'):02d}-annotate.txt"
    assert sorted(path.name for path in dumps.iterdir()) == ["00-trace.txt", annotated]
    assert main([*arguments, "--dump-after", "all"]) == 0
    names = sorted(path.name for path in dumps.iterdir())
    assert names == [f"{number:02d}-{name}.txt" for number, name in enumerate((passes.FIRST, *passes.NAMES))]
    assert parse((dumps / annotated).read_text()).regions
    (dumps / "mine.txt").write_text("")
    with pytest.raises(PartcError) as failure:
        Dump.of(["all"], output)
    assert failure.value.code == "P0601"
    capsys.readouterr()


def test_text_of_a_compilation_that_stopped_early() -> None:
    options = Options.checked(mesh="tp=2", microbatches=1, schedule="1f1b", precision="fp32", seed=0, shard=())
    done = compilation(MLP, None, options, model_options={"depth": 2}, until="outline")
    assert [step.name for step in done.steps] == list(passes.NAMES[: passes.NAMES.index("outline") + 1])
    changed = text(done, after="outline", region="block", diff=True, sources=False)
    assert all(line[:1] in "+-@" for line in changed.splitlines())
    assert text(done, after="trace", region=None, diff=True, sources=False) == "trace changed nothing"


def test_a_package_without_axes_for_zero_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "build"
    assert main(["compile", MLP, "--mesh", "tp=2", *SMALL, "--zero", "2", "-o", str(folder)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(folder), "--after", "zero"]) == 0
    assert capsys.readouterr().out.startswith("program model mesh tp=2 ")


_MESHES = ("8", "2x4", "pp=2,tp=2", "pp=2,dp=4,cp=2", "dp=2,cp=2,tp=2", "dp=4,ep=2", "ep=4", "tp=4", "dp_out=2,dp_in=4")
_RECORDED = {
    "virtual_stages": st.just(2),
    "zero": st.sampled_from(("1", "2", "3", "3@2", "2@4", "1@dp", "3@cp")),
    "recompute": st.sampled_from(("full", "18GB", "mm")),
    "casts": st.just(("softmax=fp32",)),
    "bucket": st.just("1KiB"),
    "nodes": st.just(2),
    "experts": st.sampled_from(("ep=2@dp", "ep=2@cp", "ep=2@tp")),
    "grad_reduce": st.just("bf16"),
    "compress_grads": st.just("int8"),
    "loss_chunks": st.just(2),
    "expert_capacity": st.just("1.25@sequence"),
    "expert_rows": st.just(1.5),
    "optimizer": st.sampled_from(("adamw", "sgd:momentum=0.9")),
    "group": st.just(("*bias:weight_decay=0",)),
    "lr": st.just(0.1),
    "eval_every": st.just(3),
    "forward_only": st.just(True),
    "shard": st.just(("*.w=[@tp, _]",)),
}


@settings(max_examples=150)
@given(
    mesh=st.sampled_from(_MESHES),
    schedule=st.sampled_from(("1f1b", "interleaved", "zbv")),
    precision=st.sampled_from(("fp32", "bf16")),
    drawn=st.fixed_dictionaries({}, optional=_RECORDED),
)
def test_a_package_records_all_options(mesh: str, schedule: str, precision: str, drawn: dict[str, object]) -> None:
    try:
        options = Options.checked(
            **{"mesh": mesh, "microbatches": 4, "schedule": schedule, "precision": precision, "seed": 7, "shard": ()}
            | drawn
        )
    except PartcError:
        return
    plan: dict[str, object] = {name: str(getattr(options, name)) for name in ("mesh", "precision")}
    plan |= {"microbatches": options.microbatches, "seed": options.seed, "options": {}}
    plan["command"] = json.loads(json.dumps(options.command))
    assert compile_options.of_record(plan, Path("build"), {})[0] == options
