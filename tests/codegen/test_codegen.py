"""Emitted packages train like the model, read like its code, and are reproducible."""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch

import partc
from partc.codegen.calls import runs
from partc.codegen.expressions import expression
from partc.codegen.formatting import formatted
from partc.codegen.functions import region_code
from partc.codegen.lifetimes import deletions
from partc.codegen.names import Names, class_name, emitted_name, region_names
from partc.codegen.operands import Operands
from partc.codegen.package import emit, files
from partc.codegen.views import without_idle_views
from partc.communication.descriptions import comment
from partc.errors import Source
from partc.ir.layout import Layout
from partc.ir.mesh import Mesh
from partc.ir.program import (
    Action,
    Arg,
    Call,
    DTypeArg,
    Graph,
    Op,
    Parameter,
    Program,
    Ref,
    Region,
    TensorType,
    Transfer,
    Value,
)
from partc.package.verify import verify
from partc.passes.actions import actions
from partc.passes.bucket import bucket
from partc.runtime.place import Place, coordinate, members, rank_at

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = (Path(__file__).parents[1] / "handmade_package" / "model.py").read_text()


def tensor(text: str) -> TensorType:
    return TensorType(dtype=text[: text.index("[")], layout=Layout.parse(text[text.index("[") :]))  # type: ignore[arg-type]


def value(name: str, text: str) -> Value:
    return Value(name=name, type=tensor(text))


def op(results: str, name: str, *args: Arg, module: str = "", **attrs: Arg) -> Op:
    """`op("y: f32[4]; z: f32[2]", "split", "x", …)`: strings among the arguments are values."""
    made = tuple(value(*(part.strip() for part in result.split(":"))) for result in results.split(";"))
    read = tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)
    source = Source(file="model.py", line=17, module=module)
    return Op(name=name, args=read, attrs=tuple(attrs.items()), results=made, source=source)


def graph(inputs: str, ops: tuple[Op, ...], outputs: str) -> Graph:
    given = tuple(value(*(part.strip() for part in item.split(":"))) for item in inputs.split(";"))
    return Graph(inputs=given, ops=ops, outputs=tuple(outputs.split()))


# -- the program that tests/handmade_package was written from, with any number of blocks ----------

X, H, ROWS = "f64[8@dp,mb, 6]", "f64[8@dp,mb, 10@tp]", "f64[8@dp,mb, 1]"
BLOCK = Region(
    name="block",
    params=(
        value("norm.weight", "f64[6]"),
        value("norm.bias", "f64[6]"),
        value("up.weight", "f64[10@tp, 6]"),
        value("up.bias", "f64[10@tp]"),
        value("down.weight", "f64[6, 10@tp]"),
        value("down.bias", "f64[6]"),
    ),
    forward=graph(
        f"x: {X}",
        (
            op(
                f"norm: {X}; mean: {ROWS}; rstd: {ROWS}",
                "layer_norm",
                *("x", (6,), "norm.weight", "norm.bias", 1e-5),
                module="blocks.0.norm",
            ),
            op(f"up: {H}", "linear", "norm", "up.weight", "up.bias", module="blocks.0.up"),
            op(f"gelu: {H}", "gelu", "up", module="blocks.0"),
            op(f"down_part: {X} partial(tp)", "linear", "gelu", "down.weight", module="blocks.0.down"),
            op(f"down_sum: {X}", "all_reduce", "down_part", axis="tp", module="blocks.0.down"),
            op(f"down: {X}", "add", "down_sum", "down.bias", module="blocks.0.down"),
            op(f"y: {X}", "add", "x", "down", module="blocks.0"),
        ),
        "y",
    ),
    saved=("x", "norm", "mean", "rstd", "up", "gelu"),
    backward=graph(
        f"grad_y: {X}; x: {X}; norm: {X}; mean: {ROWS}; rstd: {ROWS}; up: {H}; gelu: {H}",
        (
            op("grad_down.bias: f64[6]", "linear_grad_bias", "grad_y"),
            op("grad_down.weight: f64[6, 10@tp]", "linear_grad_weight", "grad_y", "gelu"),
            op(f"grad_gelu: {H}", "linear_grad_input", "grad_y", "down.weight", module="blocks.0.down"),
            op(f"grad_up: {H}", "gelu_backward", "grad_gelu", "up", module="blocks.0"),
            op("grad_up.bias: f64[10@tp]", "linear_grad_bias", "grad_up"),
            op("grad_up.weight: f64[10@tp, 6]", "linear_grad_weight", "grad_up", "norm"),
            op(f"grad_norm_part: {X} partial(tp)", "linear_grad_input", "grad_up", "up.weight", module="blocks.0.up"),
            op(f"grad_norm: {X}", "all_reduce", "grad_norm_part", axis="tp", module="blocks.0.up"),
            op(
                f"grad_inner: {X}; grad_norm.weight: f64[6]; grad_norm.bias: f64[6]",
                "layer_norm_backward",
                *("grad_norm", "x", (6,), "norm.weight", "mean", "rstd"),
                module="blocks.0.norm",
            ),
            op(f"grad_x: {X}", "add", "grad_y", "grad_inner"),
        ),
        "grad_x grad_norm.weight grad_norm.bias grad_up.weight grad_up.bias grad_down.weight grad_down.bias",
    ),
)
LOGITS, ROW, PART = "f64[8@dp,mb, 14@tp]", "f64[8@dp,mb]", "f64[8@dp,mb] partial(tp)"
HEAD = Region(
    name="head",
    params=(value("weight", "f64[14@tp, 6]"),),
    forward=graph(
        f"x: {X}; labels: i64[8@dp,mb]; count: f64[]",
        (
            op(f"logits: {LOGITS}", "linear", "x", "weight", module="head"),
            op(f"most: {PART}", "shard_max", "logits"),
            op(f"largest: {ROW}", "all_reduce", "most", op="max", axis="tp"),
            op(f"sums_part: {PART}", "sum_exp", "logits", "largest"),
            op(f"sums: {ROW}", "all_reduce", "sums_part", axis="tp"),
            op(f"picked_part: {PART}", "pick", "logits", "labels", axis="tp"),
            op(f"picked: {ROW}", "all_reduce", "picked_part", axis="tp"),
            op(f"lse: {ROW}", "log_sum_exp", "largest", "sums"),
            op(f"nll: {ROW}", "cross_entropy_rows", "lse", "picked", "labels", None, -100, 0.0, None, 14),
            op("total: f64[] partial(dp,mb)", "sum", "nll"),
            op("loss: f64[] partial(dp,mb)", "div", "total", "count"),
        ),
        "loss",
    ),
    saved=("x", "logits", "labels", "lse", "count"),
    backward=graph(
        f"grad_loss: f64[]; x: {X}; logits: {LOGITS}; labels: i64[8@dp,mb]; lse: {ROW}; count: f64[]",
        (
            op("grad_total: f64[]", "div", "grad_loss", "count"),
            op(f"grad_nll: {ROW}", "expand", "grad_total", (2,)),
            op(
                f"grad_logits: {LOGITS}",
                "cross_entropy_backward",
                *("grad_nll", "logits", "labels", "lse", None, -100, 0.0),
                axis="tp",
            ),
            op("grad_weight: f64[14@tp, 6]", "linear_grad_weight", "grad_logits", "x", module="head"),
            op(f"grad_x_part: {X} partial(tp)", "linear_grad_input", "grad_logits", "weight", module="head"),
            op(f"grad_x: {X}", "all_reduce", "grad_x_part", axis="tp", module="head"),
        ),
        "grad_x grad_weight",
    ),
)
COUNT = Region(
    name="count",
    params=(),
    phase="step",
    forward=graph(
        "labels: i64[8@dp]",
        (
            op("counted: bool[8@dp]", "ne", "labels", -100),
            op("ones: f64[8@dp]", "to", "counted", DTypeArg("f64")),
            op("count_part: f64[] partial(dp)", "sum", "ones"),
            op("count: f64[]", "all_reduce", "count_part", axis="dp"),
        ),
        "count",
    ),
)


def with_rows(head: Region, rows: int) -> Region:
    """The head with the local number of rows where its backward spells it out."""
    assert head.backward is not None
    ops = tuple(replace(o, args=(o.args[0], (rows,))) if o.name == "expand" else o for o in head.backward.ops)
    return replace(head, backward=replace(head.backward, ops=ops))


def row(text: str) -> tuple[Action, ...]:
    """Stage 0 or 1 of a schedule from words like F0 and RECV_B1."""
    stage, *words = text.split()
    kinds = [(word.rstrip("0123456789"), word[len(word.rstrip("0123456789")) :]) for word in words]
    return tuple(Action(stage=int(stage), kind=k, microbatch=int(m) if m else None) for k, m in kinds)  # type: ignore[arg-type]


def classifier(blocks: int, mesh: str) -> Program:
    parsed = Mesh.parse(mesh)
    last = parsed.axis("pp") - 1
    cut = blocks // 2 if last else 0
    parameters = [
        Parameter(name=f"blocks.{i}.{v.name}", type=v.type, trainable=True, reduce=("dp",))
        for i in range(blocks)
        for v in BLOCK.params
    ]
    parameters.append(Parameter(name="head.weight", type=HEAD.params[0].type, trainable=True, reduce=("dp",)))
    names = ["x", *(f"blocks_{i}" for i in range(blocks))]
    calls = [
        Call(name="count", region="count", params=(), args=("labels",), results=("count",), stage=last),
        *(
            Call(
                name=f"blocks.{i}",
                region="block",
                params=tuple(f"blocks.{i}.{v.name}" for v in BLOCK.params),
                args=(names[i],),
                results=(names[i + 1],),
                stage=last if i >= cut else 0,
            )
            for i in range(blocks)
        ),
        Call(
            name="head",
            region="head",
            params=("head.weight",),
            args=(names[-1], "labels", "count"),
            results=("loss",),
            stage=last,
        ),
    ]
    values = [value(name, X) for name in names]
    values += [value("labels", "i64[8@dp,mb]"), value("count", "f64[]"), value("loss", "f64[] partial(dp,mb)")]
    schedule = (
        (
            "0 F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1 REDUCE_GRAD",
            "1 RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1 REDUCE_GRAD",
        )
        if last
        else ("0 F0 B0 F1 B1 REDUCE_GRAD",)
    )
    program = Program(
        name="classifier",
        mesh=parsed,
        microbatches=2,
        inputs=("x", "labels"),
        values=tuple(values),
        parameters=tuple(parameters),
        regions=(COUNT, BLOCK, with_rows(HEAD, 8 // parsed.axis("dp") // 2)),
        calls=tuple(calls),
        transfers=(Transfer(value=names[cut], source=0, target=1, gradient=True),) if last else (),
        schedule=tuple(map(row, schedule)),
    )
    return actions(bucket(program))


def emitted(program: Program, blocks: int = 2) -> dict[str, str]:
    source = MODEL.replace("range(2)", f"range({blocks})")
    return dict(files(actions(bucket(program)), model_source=source, options={}, seed=0, precision="fp64"))


def write(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(("blocks", "mesh"), [(5, "2x2x2"), (2, "pp=1,dp=2,tp=2"), (3, "pp=2,dp=1,tp=1")])
def test_package_trains_like_the_model(tmp_path: Path, blocks: int, mesh: str) -> None:
    result = verify(write(tmp_path, emitted(classifier(blocks, mesh), blocks)), steps=2, virtual=True)
    assert result.ok, result.worst


def test_emitted_modules_read_as_agreed() -> None:
    modules = emit(classifier(4, "2x2x2"))
    assert [module.path for module in modules.regions] == [f"regions/{n}.py" for n in ("count", "block", "head")]
    for module in (*modules.regions, *modules.stages):
        path = GOLDEN / f"classifier_{module.path.rpartition('/')[2]}.txt"
        if os.environ.get("EXPECTTEST_ACCEPT"):
            GOLDEN.mkdir(exist_ok=True)
            path.write_text(module.text)
        assert module.text == path.read_text()


def test_everything_emitted_is_formatted(tmp_path: Path) -> None:
    """Also the imports of a stage with sectioned parameters, whose lines are joined by the template."""
    write(tmp_path / "classifier", emitted(classifier(5, "2x2x2")))
    partc.compile(ROOT / "tests" / "models" / "fused.py", mesh="dp=2,tp=2").write(tmp_path / "fused")
    found = [
        tmp_path / name / part
        for name in ("classifier", "fused")
        for part in ("regions", "stages", "ranks", "train.py")
    ]
    assert "Sectioned" in (tmp_path / "fused" / "stages" / "stage_0.py").read_text()
    for how in (["format", "--check", "--diff"], ["check", "--select", "I,F,E,W,B,UP"]):
        check = [sys.executable, "-m", "ruff", *how, "--isolated", "--line-length", "120", *map(str, found)]
        done = subprocess.run(check, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_two_processes_emit_the_same_bytes() -> None:
    code = (
        f"import runpy, hashlib; m = runpy.run_path({str(Path(__file__))!r});"
        "texts = {k: v for k, v in m['emitted'](m['classifier'](4, '2x2x2')).items() if not k.startswith('runtime/')};"
        "print(hashlib.sha256(repr(texts).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_plan_follows_its_schema() -> None:
    schema = json.loads((ROOT / "templates" / "plan.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    plan = json.loads(emitted(classifier(4, "2x2x2"))["plan.json"])
    jsonschema.validate(plan, schema)
    assert plan["stages"] == 2 and plan["parameters"]["blocks.2.up.weight"]["stages"] == [1]
    handmade = json.loads((Path(__file__).parents[1] / "handmade_package" / "plan.json").read_text())
    assert handmade["parameters"] == {
        name: entry for name, entry in json.loads(emitted(classifier(2, "2x2x2"))["plan.json"])["parameters"].items()
    }


def test_stage_modules_do_not_depend_on_the_number_of_ranks() -> None:
    names = {name for name, _ in files(classifier(4, "2x32x1"), model_source="", options={}, seed=0, precision="fp64")}
    assert sum(name.startswith("stages/") for name in names) == 2
    assert {name for name in names if name.startswith("ranks/")} == {"ranks/pp_0.py", "ranks/pp_1.py"}


def test_a_rank_derives_its_groups_from_a_short_module_of_literals() -> None:
    program = classifier(4, "2x2x2")
    texts = emitted(program)
    assert len(texts["ranks/pp_1.py"].splitlines()) < 20
    modules: list[dict[str, Any]] = [{}, {}]
    for place, found in enumerate(modules):
        exec(texts[f"ranks/pp_{place}.py"], found)
    place = Place.of(5, program.mesh.sizes, lambda place: SimpleNamespace(**modules[place]))
    assert place.coordinate == {"pp": 1, "dp": 0, "tp": 1} and place.stages == (1,)
    assert place.groups == {"pp": (1, 5), "dp": (5, 7), "tp": (4, 5)} and place.links == {(0, 1): 1, (1, 0): 1}
    assert place.schedule == " ".join(map(str, program.schedule[1])) and [*place.schedules] == [0]


@pytest.mark.parametrize("spec", ["tp=2,pp=3,dp_out=2,dp_in=2", "dp=3", "pp=2,tp=5"])
def test_groups_of_ranks_are_those_of_the_mesh(spec: str) -> None:
    mesh = Mesh.parse(spec)
    sizes, groups = mesh.sizes, [*itertools.combinations(mesh.names, 1), *itertools.combinations(mesh.names, 2)]
    for rank in range(mesh.size):
        here = coordinate(rank, sizes)
        assert here == mesh.coordinate(rank) and rank_at(here, sizes) == rank
        for axes in groups:
            assert members(",".join(axes), here, sizes) == mesh.group(rank, axes)


# -- loops, skips, tied weights ------------------------------------------------------------------


JOIN = Region(
    name="join",
    params=(),
    forward=graph(f"x: {X}; skip: {X}", (op(f"y: {X}", "add", "x", "skip"),), "y"),
    backward=graph(
        f"grad_y: {X}",
        (op(f"grad_x: {X}", "alias", "grad_y"), op(f"grad_skip: {X}", "alias", "grad_y")),
        "grad_x grad_skip",
    ),
)


def with_skip(program: Program) -> Program:
    """blocks.3 reads the sum of what blocks.2 and blocks.0 make."""
    join = Call(name="join", region="join", params=(), args=("blocks_2", "blocks_0"), results=("joined",))
    last = replace(program.calls[4], args=("joined",))
    calls = (*program.calls[:4], replace(join, stage=last.stage), last, *program.calls[5:])
    transfers = program.transfers
    if transfers:
        transfers = (Transfer(value="blocks_0", source=0, target=1, gradient=True), *transfers)
    values = (*program.values, value("joined", X))
    return replace(program, calls=calls, regions=(*program.regions, JOIN), transfers=transfers, values=values)


@pytest.mark.parametrize("mesh", ["pp=1,dp=2,tp=2", "pp=2,dp=2,tp=1"])
def test_gradients_of_a_value_read_twice_are_added(tmp_path: Path, mesh: str) -> None:
    program = with_skip(classifier(4, mesh))
    here = [call for call in program.calls if call.stage == 0 and call.region != "count"]
    assert [len(run.calls) for run in runs(program, here)][:2] == ([1, 2] if mesh.startswith("pp=1") else [1, 1])
    texts = emitted(program, 4)
    texts["model.py"] = texts["model.py"].replace(
        "for block in self.blocks:\n            x = block(x)",
        "b = self.blocks\n        first = b[0](x)\n        x = b[3](b[2](b[1](first)) + first)",
    )
    assert "b[3](b[2]" in texts["model.py"]
    result = verify(write(tmp_path, texts), steps=1, virtual=True)
    assert result.ok, result.worst


def test_tied_parameters_are_reduced_over_their_stages() -> None:
    program = classifier(2, "pp=2,dp=1,tp=1")
    tied = "blocks.0.up.bias"
    calls = [
        replace(c, params=(*c.params[:3], tied, *c.params[4:])) if c.name == "blocks.1" else c for c in program.calls
    ]
    texts = emitted(replace(program, calls=tuple(calls)))
    for stage in range(2):
        assert '(0, 1): ("blocks.0.up.bias",),' in texts[f"stages/stage_{stage}.py"]
        assert "shared=(0, 1)" in texts[f"stages/stage_{stage}.py"]
    assert 'GROUPS = ("pp", "pp 0,1")' in texts["ranks/pp_1.py"]
    sizes = {"tp": 2, "pp": 3, "dp": 2}
    assert members("pp 0,2", coordinate(7, sizes), sizes) == (7, 11)


# -- pieces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = f(a)", "x = f(a)"),
        (f"x = f({'a' * 60}, {'b' * 60})", f"x = f(\n    {'a' * 60},\n    {'b' * 60},\n)"),
        (f"x = f({'a' * 50}, {'b' * 50}, c)  # f32[4]", f"x = f(\n    {'a' * 50}, {'b' * 50}, c\n)  # f32[4]"),
        (f"x = {'a' * 60} + {'b' * 52}  # f32[4]", f"# f32[4]\nx = {'a' * 60} + {'b' * 52}"),
        (f"total = {'a' * 60} + {'b' * 53}", f"total = (\n    {'a' * 60} + {'b' * 53}\n)"),
        (f"x = {'a' * 60} - {'b' * 60}", f"x = (\n    {'a' * 60}\n    - {'b' * 60}\n)"),
        (f"x = {'a' * 60} // {'b' * 60}", f"x = (\n    {'a' * 60}\n    // {'b' * 60}\n)"),
        (f"x = f({'a' * 60}, {'b' * 52}).g(c)", f"x = f(\n    {'a' * 60}, {'b' * 52}\n).g(c)"),
        (f"x = {'a' * 112}.f(b).g(c)", f"x = {'a' * 112}.f(\n    b\n).g(c)"),
        (f"del {'a' * 60}, {'b' * 60}", f"del (\n    {'a' * 60},\n    {'b' * 60},\n)"),
        (f"{'a' * 60}, {'b' * 60} = f(c)", f"(\n    {'a' * 60},\n    {'b' * 60},\n) = f(c)"),
        (f"return {'a' * 60}, {'b' * 60}", f"return (\n    {'a' * 60},\n    {'b' * 60},\n)"),
        (f'd = {{"{"k" * 60}": "{"v" * 60}"}}', f'd = {{\n    "{"k" * 60}": "{"v" * 60}",\n}}'),
    ],
)
def test_long_lines_break_as_a_formatter_breaks_them(line: str, expected: str, tmp_path: Path) -> None:
    assert formatted(line) == f"{expected}\n"
    (tmp_path / "line.py").write_text(formatted(line))
    check = [sys.executable, "-m", "ruff", "format", "--check", "--line-length", "120", str(tmp_path)]
    assert subprocess.run(check, capture_output=True).returncode == 0


def test_a_broken_line_means_the_same() -> None:
    line = f"y = load({'x' * 60} + ({'a' * 30} + {'b' * 30}) * {'c' * 30}, mask={'m' * 20})\n"
    assert len(line) > 120
    assert ast.dump(ast.parse(formatted(line))) == ast.dump(ast.parse(line))


def test_names_are_identifiers_and_never_shadow() -> None:
    assert emitted_name("attn.wq.weight") == "attn_wq_weight"
    assert [emitted_name(name) for name in ("lambda", "torch", "3d", "F")] == ["lambda_", "torch_", "m3d", "F_"]
    assert class_name("layer_norm.2") == "LayerNorm2"
    names = Names(("x",))
    assert [names["x"], names["a.b"], names["a_b"], names["a.b"]] == ["x_2", "a_b", "a_b_2", "a_b"]


SIZES = {"dp": 2, "tp": 2, "mb": 2}


@pytest.mark.parametrize(
    ("written", "operation"),
    [
        ("x * -2.0", op("y: f32[4, 6]", "mul", "x", -2.0)),
        ("x.mT", op("y: f32[6, 4]", "permute", "x", (1, 0))),
        ("x.reshape(2, 12)", op("y: f32[2, 12]", "reshape", "x", (2, 12))),
        ("x.reshape(24)", op("y: f32[24]", "reshape", "x", (24,))),
        ("x[:, 2:5]", op("y: f32[4, 3]", "slice", "x", 1, 2, 5, 1)),
        ("x[1:]", op("y: f32[3, 6]", "slice", "x", 0, 1, 9223372036854775807, 1)),
        ("x.sum(dim=(0,), keepdim=True)", op("y: f32[1, 6]", "sum", "x", (0,), True)),
        ("torch.ops.aten.add.Tensor(x, x, alpha=2)", op("y: f32[4, 6]", "add", "x", "x", alpha=2)),
        ("torch.ops.mylib.twist.default(x, 3)", op("y: f32[4, 6]", "mylib::twist", "x", 3)),
        ("torch.scatter(x, 1, i, x)", op("y: f32[4, 6]", "scatter", "x", 1, "i", "x")),
        ("torch.ops.aten.index_fill.int_Tensor(x, 0, i, x)", op("y: f32[4, 6]", "index_fill", "x", 0, "i", "x")),
        ("torch.arange(0, 4, dtype=torch.int64, device=comm.device)", op("y: i64[4]", "arange", 0, 4, dtype=DTypeArg("i64"))),
        ("comm.tp.all_gather(x, dim=1)", op("y: f32[4, 12]", "all_gather", "x", dim=1, outer=1, axis="tp")),
        ("comm.tp.take(x, dim=1, outer=3)", op("y: f32[4, 3]", "take", "x", dim=1, outer=3, axis="tp")),
        ("functional.attention(x, x, x, is_causal=True)", op("y: f32[4, 6]", "attention", "x", "x", "x", None, True, None)),
        ("x.masked_fill(m, -math.inf)", op("y: f32[4, 6]", "masked_fill", "x", "m", float("-inf"))),
    ],
)  # fmt: skip
def test_operations_are_written_as_a_person_would(written: str, operation: Op) -> None:
    types = {"x": tensor("f32[4, 6]"), "m": tensor("bool[4, 6]"), "i": tensor("i64[4, 6]")}
    with torch.library._scoped_library("mylib", "FRAGMENT") as library:
        library.define("twist(Tensor x, int turns) -> Tensor")
        assert expression(Operands.of(operation, lambda position: str, types, SIZES)) == written


def test_views_that_cancel_are_gone() -> None:
    before = graph(
        "x: f32[8@dp, 6, 4]",
        (
            op("a: f32[8@dp, 24]", "reshape", "x", (4, 24)),
            op("b: f32[8@dp, 6, 4]", "reshape", "a", (4, 6, 4)),
            op("c: f32[8@dp, 4, 6]", "permute", "b", (0, 2, 1)),
            op("d: f32[8@dp, 6, 4]", "permute", "c", (0, 2, 1)),
            op("y: f32[8@dp, 6, 4]", "exp", "d"),
        ),
        "y",
    )
    after = without_idle_views(before, SIZES)
    assert [operation.name for operation in after.ops] == ["exp"]
    assert list(after.ops[0].refs()) == ["x"]


def test_only_what_raises_the_peak_is_deleted() -> None:
    chain = graph(
        "x: f32[1024]",
        (
            op("a: f32[1024]", "exp", "x"),
            op("small: f32[1]", "sum", "a"),
            op("b: f32[1024]", "mul", "x", "small"),
            op("c: f32[1024]", "mul", "b", "small"),
            op("y: f32[1]", "sum", "c"),
        ),
        "y",
    )
    assert deletions(chain, keep=("x", "y"), sizes=SIZES) == {1: ("a",)}


def test_a_collective_says_what_moves_and_why() -> None:
    block = graph(
        "x: f32[8, 6@tp, 4]",
        (
            op("whole: f32[8, 6, 4]", "all_gather", "x", dim=1, outer=1, axis="tp"),
            op("q: f32[8, 6, 10@tp]", "linear", "whole", "wq", module="attn.wq"),
            op("k: f32[8, 6, 10@tp]", "linear", "whole", "wk", module="attn.wk"),
            op("y: f32[8, 6, 4] partial(tp)", "linear", "q", "wo", module="attn.wo"),
            op("z: f32[8, 6@tp, 4]", "reduce_scatter", "y", dim=1, outer=1, axis="tp"),
        ),
        "z k",
    )
    types = {name: v.type for name, v in block.definitions().items()}
    label = lambda operation: operation.source.module if operation.source else ""  # noqa: E731
    said = [comment(operation, block, types, SIZES, label) for operation in block.ops]
    assert said[0] == "all-gather 384 B over tp: attn.wq and attn.wk need all of dim 1"
    assert said[4] == (
        "reduce-scatter 384 B over tp: each rank has a part of the sum in attn.wo and keeps its share of dim 1"
    )


@pytest.mark.parametrize(("sight", "sizes"), [("unfold", (0, 4, 1)), ("diagonal", ()), ("detach", ())])
def test_a_sum_over_ranks_never_overwrites_what_another_name_shows(sight: str, sizes: tuple[int, ...]) -> None:
    """The operand of the all-reduce shares memory with a value that is read later."""
    ops = (
        op("h: f32[4, 4]", "exp", "x"),
        op("seen: f32[4, 4]", sight, "h", *sizes),
        op("whole: f32[4, 4]", "all_reduce", "seen", axis="tp"),
        op("out: f32[4, 4]", "add", "whole", "h"),
    )
    graph = Graph(inputs=(value("x", "f32[4, 4]"),), ops=ops, outputs=("out",))
    alone = Region(name="one", params=(), forward=graph)
    code = region_code(alone, {"tp": 2}, "", "", region_names(["one"])["one"])
    text = "\n".join(line.code for line in code.forward.lines)
    assert "tp.all_reduce(" in text and "all_reduce_(" not in text
