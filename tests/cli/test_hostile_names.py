"""Names from outside are data: each place accepts them or refuses them with a code, and none is executed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.api import compilation, package
from partc.cli import main
from partc.compilation.options import Options
from partc.frontend.model_files.huggingface import model_source
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.reports.html_report import page
from tests.models.hostile import CONTROLS, NAMES, PAYLOADS

MODEL = Path(__file__).parents[1] / "models" / "hostile.py"


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Every payload would leave a file in the current folder."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("layers", ["--mesh", "1x1x2"]),
        ("stores", ["--mesh", "1x2x1", "--zero", "3"]),
        pytest.param("lists", ["--mesh", "2x1x2", "--microbatches", "2"], marks=pytest.mark.matrix),
        ("lists", ["--mesh", "2x2x1", "--zero", "2", "--schedule", "zero-bubble", "--microbatches", "2"]),
        ("entries", ["--mesh", "2x2x1", "--microbatches", "2"]),
    ],
)
def test_a_model_with_hostile_names_trains_as_on_one_device(place: str, how: list[str]) -> None:
    assert main(["compile", str(MODEL), "-D", f"place={place}", "--precision", "fp64", *how, "-o", "build"]) == 0
    assert main(["verify", "build", "--virtual", "--steps", "2"]) == 0


PLAIN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def model(text: str = ""):
    return Net()

def batch(text: str = ""):
    return {"x": torch.randn(8, 8)}
"""
LONE = ("a\ud800b", "\udfff", "\udc80")  # halves of characters, as a shell's argument may have them


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "net.py"
    path.write_text(PLAIN)
    return path


def given(name: str) -> list[list[str]]:
    """Arguments with a name from outside in every place that a command line has."""
    return [
        ["-D", f"text={name}"],
        ["-D", f"{name}=1"],
        ["--mesh", f"{name}=2"],
        ["--mesh", f"dp={name}"],
        ["--shard", f"{name}=[@tp]"],
        ["--shard", f"*.up.weight={name}"],
        ["--schedule", name],
        ["--zero", f"3@{name}"],
        ["--recompute", name],
        ["--cast", f"{name}=fp32"],
        ["--bucket", name],
        ["--memory-limit", name],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["names", "halves"])
def test_arguments_are_taken_or_refused(name: str, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Error messages contain no character that a terminal would obey."""
    names = NAMES if name == "names" else LONE
    for number, text in enumerate(names):
        for arguments in given(text)[1:]:
            if "--shard" in arguments and number % 16:  # which is read after the trace
                continue
            mesh = [] if "--mesh" in arguments else ["--mesh", "2x1x2"]
            code = main(["compile", str(plain), *mesh, *arguments, "-o", "build"])
            told = capsys.readouterr()
            assert code in (0, 2) and (code == 0 or "error P0" in told.err), arguments
            assert (told.out + told.err).replace("\n", "").isprintable(), arguments


@pytest.mark.parametrize("text", [PAYLOADS[0], PAYLOADS[4], *LONE])
def test_the_text_of_an_option_reaches_the_model_as_it_is(text: str, plain: Path) -> None:
    assert main(["compile", str(plain), "--mesh", "1", "-D", f"text={text}", "-o", "build"]) == 0
    assert json.loads(Path("build/plan.json").read_text())["options"] == {"text": text}


def runs(path: Path) -> list[str]:
    """Yields the calls in an emitted file that only a payload could have written."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call.id for call in calls if isinstance(call, ast.Name) and call.id in ("open", "alert")]


@pytest.mark.sampled
@pytest.mark.parametrize("place", [pytest.param("layers", marks=pytest.mark.matrix), "stores", "lists", "entries"])
def test_what_is_written_has_names_as_text_alone(place: str, tmp_path: Path) -> None:
    """Stages, ranks, kernels with the operations in their docstrings, the page, and the program in every form."""
    options = Options.checked(
        mesh="2x1x2", microbatches=2, precision="fp64", kernels="triton", schedule="1f1b", seed=0, shard=()
    )
    done = compilation(MODEL, None, options, model_options={"place": place})
    for program in (done.after("trace"), done.after("outline"), done.after("annotate"), done.program):
        assert parse(print_program(program, sources=True)) == program
    folder = package(done).write(tmp_path / "build")
    written = [path for name in ("regions", "stages", "ranks", "kernels") for path in (folder / name).glob("*.py")]
    assert len(written) > 6 and not any(map(runs, written))
    assert "<script>alert" not in page(done.program)
    assert (folder / "README.md").read_text().replace("\n", "").isprintable()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [f"{name[:80]}" for name in (*PAYLOADS, *CONTROLS) if "/" not in name and "\0" not in name]
)
def test_files_of_hostile_names(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file, its folder and its package's folder; the traceback of a file's error is told like any other."""
    folder = tmp_path / f"in {name}"
    folder.mkdir()
    path = folder / f"{name}.py"
    path.write_text(PLAIN)
    assert main(["compile", str(path), "--mesh", "1x1x2", "-o", f"{folder}/build"]) == 0
    assert not any(runs(each) for name in ("regions", "stages") for each in Path(folder, "build", name).glob("*.py"))
    path.write_text(PLAIN.replace("self.up(x)", "self.up(x.item())"))
    assert main(["compile", str(path), "--mesh", "1x1x2", "-o", f"{folder}/other"]) == 2
    told = capsys.readouterr()
    assert (told.out + told.err).replace("\n", "").isprintable()


@pytest.mark.parametrize("text", [PAYLOADS[0], PAYLOADS[4]])
def test_classes_of_hostile_names(text: str, tmp_path: Path) -> None:
    """A model given as an object: its package imports the file by the module's name."""
    kind = type(text, (nn.Linear,), {"__module__": "torch.nn"})
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 1))
    try:
        made = partc.compile(model, {"input": torch.randn(8, 4)}, mesh="1x1x2", loss=mean)
    except partc.PartcError as error:
        assert error.code == "P0215"
    else:
        made.write(tmp_path / "build")


def mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = model(**batch).mean()
    return result


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
IMAGES = {
    "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8, "num_channels": 3,
}  # fmt: skip
BARE = {**CONFIG, "architectures": ["LlamaModel"]}
PICTURES = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 6,
    "vision_feature_layer": -1, "text_config": CONFIG, "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 8, "projection_dim": 16,
    },
}  # fmt: skip
GRIDS = {
    **CONFIG, "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "image_token_id": 6,
    "vision_config": {
        "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_channels": 3, "image_size": 16,
    },
}  # fmt: skip
RUN = "__import__('pathlib').Path('executed').touch()"


@pytest.mark.parametrize("config", [CONFIG, IMAGES], ids=["text", "images"])
@pytest.mark.parametrize(
    "value", [RUN, f'"""\n{RUN}\n"""', f"\u2028{RUN}", "\ud800", 10**30, -1, [], {}, None, True, 1e400]
)
def test_configurations_with_text_in_place_of_numbers(config: dict[str, object], value: object) -> None:
    pytest.importorskip("transformers")
    more = {"num_labels": 2, "id2label": None, "_attn_implementation": "sdpa", "max_position_embeddings": 64, "x": 1}
    for key in {**config, **more}:
        Path("config.json").write_text(json.dumps({**config, **more, key: value}))
        try:
            source = model_source("hf:config.json")
        except partc.PartcError as error:
            assert error.code in ("P0231", "P0232")
        else:
            assert "Path" not in {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("config", [BARE, PICTURES, GRIDS], ids=["bare", "pictures", "grids"])
def test_configurations_that_transformers_reads_for_a_batch(config: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    assert model_source(_written(config))
    for value in (RUN, 10**30, 0, []):
        wrong = [{**config, key: value} for key in config]
        inner = config.get("vision_config", {})
        for each in (*wrong, *({**config, "vision_config": {**inner, key: value}} for key in inner)):
            try:
                model_source(_written(each))
            except partc.PartcError as error:
                assert error.code in ("P0231", "P0232")


def _written(config: dict[str, Any]) -> str:
    Path("config.json").write_text(json.dumps(config))
    return "hf:config.json"


def test_a_configuration_with_a_kernel_from_elsewhere_is_refused() -> None:
    """transformers would fetch and run it."""
    pytest.importorskip("transformers")
    for key in ("attn_implementation", "_attn_implementation"):
        for more in (
            {key: "someone/kernels"},
            {key: {"": "someone/kernels"}},
            {"text_config": {key: "someone/kernels"}},
            {"encoder": {"audio": {key: ["someone/kernels"]}}},
            {**PICTURES, "vision_config": {key: "someone/kernels"}},
        ):
            Path("config.json").write_text(json.dumps({**CONFIG, **more}))
            with pytest.raises(partc.PartcError, match="P0231"):
                model_source("hf:config.json")


def test_a_configuration_with_more_entries_than_a_model_has_is_refused() -> None:
    """transformers would make lists of as many entries, also for a part, and for a size that is left out."""
    pytest.importorskip("transformers")
    without = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    for config in ({**without, "num_labels": 10**30}, {**CONFIG, "text_config": {"num_labels": 10**9}}):
        with pytest.raises(partc.PartcError, match="num_labels is more than"):
            model_source(_written(config))


@pytest.mark.slow
def test_tables_of_hostile_actions(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in NAMES:
        Path("table.csv").write_text(f"0F0,{text},0B0\n1F0,1B0\n", encoding="utf-8", newline="")
        command = ["compile", str(plain), "--mesh", "2x1x1", "--schedule", "table.csv", "-o", "build"]
        code = main(command)
        told = capsys.readouterr().err
        assert code in (0, 2) and (code == 0 or "error P04" in told) and told.replace("\n", "").isprintable(), text
