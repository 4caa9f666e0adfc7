"""Wrong command lines, configurations and folders: a coded error, exit code 2, and nothing written or lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from partc.cli import cli, main
from tests.prefork import done

ROOT = Path(__file__).parents[2]
MODEL = """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 1)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).sum()

def model(width: int = 12, flag: bool = False, rate: float = 1.0):
    return Net()

def batch(batch: int = 8):
    return {"x": torch.randn(batch, 8)}
"""

# Arguments after `compile net.py`, and the code.
ARGUMENTS: list[tuple[list[str], str]] = [
    *[(["--mesh", mesh], code) for code, meshes in {
        "P0101": ["", " ", "-1", "2x", "x2", "2xx2", "axx", "2.5", "1e3", "٢", "tp=٢", "dp", "dp=", "dp=x", "dp=-2",
                  "dp=2,,tp=2", "dp=2,", "DP=2", "dp=2;import os", "dp=2 tp=2", "dp:2"],
        "P0102": ["2x2x2x2"],
        "P0103": ["foo=2", "mb=2", "zp=2", "dp=2,zz=2"],
        "P0104": ["0", "2x0", "dp=0", "dp=2,dp=2", "99999999999", "9" * 5000, "tp=1048577", "1024x1024x2"],
        "P0401": ["3", "16"],
        "P0403": ["pp=9"],
    }.items() for mesh in meshes],
    *[(["--mesh", "2x2", "--shard", pin], code) for code, pins in {
        "P0301": ["nonsense", "=", "=[@tp, _]", "up.weight", "up.weight=", "up.weight=[", "up.weight=@tp",
                  "up.weight=[tp, _]", "up.weight=[@tp _]", "up.weight=[@tp,_]", "up.weight=[0@tp, _]",
                  "up.weight=[-1@tp, _]", "up.weight=[@tp, _] partial(tp)", "up.weight=[@tp, ]", "up.weight=[]"],
        "P0302": ["up.weight=[@tp]", "up.weight=[@tp, _, _]", "up.weight=[@zz, _]", "up.weight=[@dp, _]",
                  "up.weight=[@pp, _]", "up.weight=[@tp, @tp]", "up.weight=[5@tp, _]", "up.weight=[12@tp, 7]",
                  "up.weight=[7 * _@tp, _]", "down.weight=[@tp, _]", "*=[@tp, _]"],
        "P0303": ["nothing=[@tp, _]", "Up.weight=[@tp, _]"],
    }.items() for pin in pins],
    (["--mesh", "tp=2", "--shard", "up.weight=[@tp, _]", "--shard", "up.weight=[_, @tp]"], "P0302"),
    (["--mesh", "2", "--shard", "nothing=[@tp, _]"], "P0303"),
    *[(["--mesh", "2", "--recompute", kind], "P0404") for kind in ("", "some", "Full", "-1", "none,full", "18", "1e9B")],
    *[(["--mesh", "pp=2", "--recompute", budget], "P0415") for budget in ("0B", "3B", "0.001KiB")],
    *[(["--mesh", "2", "--microbatches", count], code) for count, code in {
        "0": "P0405", "-3": "P0405", "3": "P0401", "9" * 20: "P0401", "1.5": "P0001", "x": "P0001", "": "P0001",
    }.items()],
    *[(["--mesh", "pp=2", "--schedule", name], code) for name, code in {
        "zigzag": "P0404", "": "P0404", "1F1B": "P0404", "../../etc/passwd": "P0404", "x.csv": "P0407", ".csv": "P0407",
    }.items()],
    *[(["--mesh", "2", "-D", text], code) for text, code in {
        "x": "P0003", "=3": "P0003", "1a=3": "P0003", "width": "P0003", "width;import os=3": "P0003",
        "nope=1": "P0204", "class=3": "P0204", "width=": "P0204", "width=many": "P0204", "width=1.5": "P0204",
        "flag=maybe": "P0204", "rate=x": "P0204", "batch=0": "P0205", "batch=-2": "P0205",
    }.items()],
    (["--mesh", "2", "-D", "width=4", "-D", "width=8"], "P0003"),
    (["--mesh", "2", "-D", "batch=4", "--batch", "8"], "P0003"),
    (["--mesh", "2", "--batch", "0"], "P0004"),
    (["--mesh", "2", "--batch", "-1"], "P0004"),
    (["--mesh", "2", "--batch", "x"], "P0001"),
    (["--mesh", "2", "--seed", "x"], "P0001"),
    (["--mesh", "2", "--seed", "-1"], "P0004"),
    (["--mesh", "2", "--seed", str(2**64)], "P0004"),
    (["--mesh", "2", "--precision", "fp8"], "P0001"),
    (["--mesh", "2", "--virtual-stages", "0"], "P0406"),
    (["--mesh", "2", "--virtual-stages", "2"], "P0406"),
    (["--mesh", "pp=2", "--schedule", "interleaved", "--virtual-stages", "-1"], "P0406"),
    (["--mesh", "2", "--dump-after", "nope"], "P0604"),
    (["--mesh", "2", "--nope"], "P0001"),
    ([], "P0001"),
    *[(["--mesh", "2", "-o", output], code) for output, code in {
        "foreign": "P0601", "file": "P0601", "file/below": "P0602", ".": "P0601", "": "P0001", "/": "P0601",
        "loop": "P0001", "loop/below": "P0001", "dangling": "P0601", "a" * 300: "P0001", "a\0b": "P0001",
        "/proc/none/build": "P0602", "/dev/null": "P0601",
    }.items()],
]  # fmt: skip

# A model's path, and the code.
PATHS = {
    "nothing.py": "P0201", "foreign": "P0201", "loop": "P0201", "dangling": "P0201", "": "P0201", "a\0b.py": "P0201",
    "x" * 300 + ".py": "P0201", "hf:": "P0231", "hf:foreign": "P0231", "hf:nothing/config.json": "P0231",
    "hf:" + "x" * 300: "P0231", "binary.py": "P0202", "latin.py": "P0202", "text.txt": "P0202", "empty.py": "P0203",
}  # fmt: skip

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip

# A configuration's text, or what differs from a right one, and the code.
CONFIGURATIONS: list[tuple[str | bytes | dict[str, Any], str]] = [
    ("", "P0231"), ("{", "P0231"), ("[1]", "P0231"), ('"x"', "P0231"), ("null", "P0231"), (b"\xff\xfe", "P0231"),
    ("{}", "P0231"),
    ({"architectures": 3}, "P0231"), ({"architectures": [3]}, "P0231"),
    ({"architectures": "LlamaForCausalLM"}, "P0231"), ({"max_position_embeddings": "long"}, "P0231"),
    ({"max_position_embeddings": -1}, "P0231"), ({"text_config": 3}, "P0231"), ({"vision_config": 3}, "P0231"),
    ({"id2label": 7}, "P0231"), ({"image_size": [3, 4, 5]}, "P0231"), ({"image_size": "4"}, "P0231"),
    ({"architectures": [], "model_type": "zz"}, "P0232"), ({"architectures": ["ZzForCausalLM"]}, "P0232"),
    ({"architectures": ["Zz"]}, "P0232"), ({"architectures": ["x; import osForCausalLM"]}, "P0232"),
    ({"model_type": 3}, "P0231"), ({"num_attention_heads": 5}, "P0205"), ({"hidden_size": -4}, "P0205"),
    ({"hidden_size": "big"}, "P0205"), ({"hidden_size": 32.5}, "P0205"), ({"hidden_size": 2**70}, "P0205"),
    ({"vocab_size": "many"}, "P0231"), ({"hidden_act": "zzz"}, "P0205"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "P0206"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a model file, and things that nobody may touch."""
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n" + MODEL.encode())
    (tmp_path / "text.txt").write_text(MODEL)
    (tmp_path / "empty.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, and every link as what it points to. Python's own caches don't count."""
    found = {}
    for path in folder.rglob("*"):
        if "__pycache__" not in path.parts and (path.is_symlink() or path.is_file()):
            name = str(path.relative_to(folder))
            found[name] = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
    return found


def refused(arguments: list[str], code: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; what it said."""
    before = contents(folder)
    capsys.readouterr()
    assert main(arguments) == 2, capsys.readouterr()
    out, err = capsys.readouterr()
    assert f"error {code}: " in err
    assert "Traceback" not in out + err
    if "--json" in arguments:
        assert json.loads(out)["error"]["code"] == code
    assert contents(folder) == before
    return err


@pytest.mark.parametrize(("arguments", "code"), ARGUMENTS, ids=lambda x: " ".join(x)[:60] if isinstance(x, list) else x)
def test_wrong_arguments(arguments: list[str], code: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["compile", "net.py", *arguments, "--json"], code, folder, capsys)


@pytest.mark.parametrize(("path", "code"), PATHS.items(), ids=lambda x: x[:30])
def test_wrong_model_paths(path: str, code: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["compile", path, "--mesh", "2", "--json"], code, folder, capsys)


def test_text_that_is_not_utf8_is_placed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["compile", "latin.py", "--mesh", "2"], "P0202", folder, capsys).startswith("latin.py:1: ")


@pytest.mark.parametrize(("given", "code"), CONFIGURATIONS, ids=lambda x: str(x)[:50])
def test_wrong_configurations(
    given: str | bytes | dict[str, Any], code: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    text = json.dumps(LLAMA | given) if isinstance(given, dict) else given
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(["compile", "hf:config.json", "--mesh", "2", "--json"], code, folder, capsys)


# Packages: what happened to one, the command, the code.


def planned(**changes: Any) -> Callable[[Path], None]:
    """A plan with other entries; None leaves one out."""

    def change(package: Path) -> None:
        path = package / "plan.json"
        plan = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in plan.items() if value is not None}))

    return change


def lacks(name: str) -> Callable[[Path], None]:
    return lambda package: (package / name).unlink()


PLANS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no plan": (lacks("plan.json"), "P0503"),
    "a truncated plan": (lambda p: (p / "plan.json").write_text((p / "plan.json").read_text()[:100]), "P0503"),
    "an empty plan": (lambda p: (p / "plan.json").write_text(""), "P0503"),
    "a list": (lambda p: (p / "plan.json").write_text("[]"), "P0503"),
    "no entries": (lambda p: (p / "plan.json").write_text("{}"), "P0503"),
    "no text": (lambda p: (p / "plan.json").write_bytes(b"\xff\xfe"), "P0503"),
    "deep nesting": (lambda p: (p / "plan.json").write_text("[" * 100_000), "P0503"),
    "another version": (planned(partc=99), "P0503"),
    "a version in words": (planned(partc="one"), "P0503"),
    "no mesh": (planned(mesh=None), "P0503"),
    "a mesh that is a number": (planned(mesh=3), "P0503"),
    "a mesh that is none": (planned(mesh="zz"), "P0503"),
    "no parameters": (planned(parameters=None), "P0503"),
    "parameters that are a number": (planned(parameters=3), "P0503"),
    "no seed": (planned(seed=None), "P0503"),
    "a seed that is true": (planned(seed=True), "P0503"),
    "an unknown precision": (planned(precision="fp8"), "P0503"),
}  # fmt: skip
PARTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a mesh with more ranks": (planned(mesh="dp=4"), "P0503"),
    "a place is missing": (lacks("ranks/pp_0.py"), "P0503"),
    "a stage is missing": (lacks("stages/stage_0.py"), "P0503"),
    "train.py is missing": (lacks("train.py"), "P0503"),
    "model.py is missing": (lacks("model.py"), "P0503"),
    "the runtime is missing": (lambda p: shutil.rmtree(p / "runtime"), "P0503"),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    (folder / "net.py").write_text(MODEL)
    assert main(["compile", str(folder / "net.py"), "--mesh", "2", "-o", str(folder / "build")]) == 0
    return folder / "build"


@pytest.mark.parametrize("wrong", [*PLANS, *PARTS])
def test_wrong_packages(wrong: str, package: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command that reads them; inspect compiles again, from the plan and the model."""
    shutil.copytree(package, folder / "build")
    change, code = (PLANS | PARTS)[wrong]
    change(folder / "build")
    for command, *options in (["verify", "--virtual"], ["run"], *([["inspect"]] if wrong in PLANS else [])):
        refused([command, "build", *options], code, folder, capsys)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["verify", "nothing"], "P0503"),
        (["verify", "net.py"], "P0503"),
        (["run", "loop"], "P0001"),
        (["run", "a\0b"], "P0001"),
        (["verify", "foreign"], "P0503"),
        (["inspect", "foreign"], "P0503"),
        (["inspect", "nothing.py", "--mesh", "2"], "P0201"),
        (["inspect", "nothing"], "P0201"),
        (["inspect", "net.py"], "P0603"),
        (["inspect", "build", "--mesh", "4"], "P0603"),
        (["inspect", "build", "-D", "width=3"], "P0603"),
        (["inspect", "build", "--after", "zz"], "P0604"),
        (["inspect", "build", "--region", "zz"], "P0605"),
        (["inspect", "build", "--html", "foreign"], "P0602"),
        (["inspect", "build", "--html", "file"], "P0601"),
        (["inspect", "build", "--html", "no/such/folder.html"], "P0602"),
        (["inspect", "build", "--durations", "F=1"], "P0412"),
        (["inspect", "build", "--schedules", "--durations", "F=x"], "P0412"),
        (["verify", "build", "--steps", "0"], "P0504"),
        (["verify", "build", "--steps", "x"], "P0001"),
        (["run", "build", "--steps", "-1"], "P0504"),
        (["run", "build", "--lrr", "3"], "P0535"),
        (["run", "build", "--lr", "x"], "P0535"),
        (["run", "build", "--cuda-graphs"], "P0533"),
        (["run", "build", "--save-every", "0"], "P0521"),
        (["compile", "net.py", "--mesh", "2", "-o", "build/ranks"], "P0601"),
        (["explain", "P9999"], "P0002"),
        (["fly"], "P0001"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else x,
)
def test_wrong_commands(
    arguments: list[str], code: str, package: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(package, folder / "build")
    refused(arguments, code, folder, capsys)


@pytest.mark.parametrize("path", ["a\0b", "a" * 300, "loop", "loop/below", f"{'b/' * 3000}c", ""])
def test_paths_that_no_file_can_have(path: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        ["trace", path],
        ["export", path, "saved", "--safetensors", "out"],
        ["export", "build", path, "--safetensors", "out"],
        ["replan", "build", "--cluster", "4xCPU", "--checkpoint", path, "-o", "out"],
        ["plan", "net.py", "--cluster", "4xCPU", "-o", path],
        ["cluster", "fit", path, "--cluster", "4xCPU", "-o", "out.toml"],
    ):
        refused(line, "P0001", folder, capsys)
    for command in ("memory", "inspect"):  # MODEL|DIR
        refused([command, path], "P0201", folder, capsys)


def test_every_path_of_the_command_line_is_checked() -> None:
    def parameters(command: click.Command) -> list[click.Parameter]:
        below = command.commands.values() if isinstance(command, click.Group) else ()
        return [*command.params, *(each for inner in below for each in parameters(inner))]

    kinds = {each.name: each.type.name for each in parameters(cli)}
    assert "Path" not in kinds.values() and {"output", "plans", "checkpoint"} <= kinds.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latin.py", "nothing.py"])
def test_in_a_process_of_its_own(name: str, folder: Path) -> None:
    before = contents(folder)
    ended = done(["-m", "partc", "compile", name, "--mesh", "2"], {**os.environ, "PYTHONPATH": str(ROOT)}, cwd=folder)
    assert ended.returncode == 2
    assert "error P020" in ended.stderr and "Traceback" not in ended.stderr
    assert contents(folder) == before
