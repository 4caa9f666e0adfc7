"""Export to plain PyTorch and import: an exported state dict is the model's own, and training starts from one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.cli import main
from partc.package.export import export
from partc.runtime.checkpoint.given_parameters import INDEX, under_plan_names
from partc.runtime.checkpoint.safetensors import load, save
from partc.runtime.errors import UsageError
from partc.runtime.train.data import global_batch, load_model_file
from partc.runtime.train.init import state_dtypes
from tests.durable import build, losses, train, trained, whole
from tests.models import tied


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package, its training, and what `partc export` makes of its second step."""
    path = tmp_path_factory.mktemp("export")
    package = build(path, "2x2x2")
    trained(package, "--steps", 3, "--save", path / "save", "--save-every", 2, "--metrics", path / "log")
    assert main(["export", str(package), str(path / "save" / "step_00000002"), "--safetensors", str(path / "out")]) == 0
    return path


@pytest.mark.slow
def test_plain_pytorch_loads_it_and_has_the_same_loss(folder: Path) -> None:
    tensors, metadata = load(folder / "out")
    assert metadata == {"format": "pt"}
    torch.manual_seed(1)
    model = tied.model().double()
    model.load_state_dict(tensors)  # every name, and none more
    assert model.head.weight is model.embed.weight
    torch.manual_seed(0)
    initial = tied.model().double()
    assert torch.equal(model.unused.weight, initial.unused.weight)  # the loss doesn't use it
    assert not torch.equal(model.embed.weight, initial.embed.weight)
    module = load_model_file(folder / "2x2x2" / "model.py")
    batch = global_batch(module, {}, seed=0, step=2, dtype=torch.float64)
    model.eval()  # without dropout, so held against a package without it
    trained(
        build(folder, "tp=2", options={"dropout": 0.0}), "--steps", 1, "--init", folder / "out",
        "--metrics", folder / "log.0",
    )  # fmt: skip
    first = global_batch(module, {}, seed=0, step=0, dtype=torch.float64)
    assert losses(folder / "log.0") == pytest.approx([tied.loss(model, first).item()], rel=1e-12)
    assert tied.loss(model, batch).isfinite()


def test_the_newest_and_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(folder / "2x2x2"), str(folder / "save"), "--safetensors", str(tmp_path / "out")]
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["step"] == 3 and said["untrained"] == ["unused.weight", "unused.bias"]
    assert main(arguments) == 2 and "P0601" in capsys.readouterr().err
    assert main([*arguments[:2], str(tmp_path), *arguments[3:-1], str(tmp_path / "other")]) == 2
    assert "P0523" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_training_from_a_state_dict(folder: Path, tmp_path: Path) -> None:
    """On another mesh, with the padding and the strided shards cut anew; out again it is what went in."""
    package = build(folder, "tp=4")
    trained(package, "--steps", 1, "--lr", 0, "--init", folder / "out", "--save", tmp_path / "save")
    begun = whole(tmp_path / "save" / "step_00000001")
    given, _ = load(folder / "out")
    for name in given.keys() & begun.keys():
        assert torch.equal(given[name], begun[name]), name
    # What the loss doesn't use comes out as it was in the file.
    given["unused.bias"] = torch.tensor([3.0, 4.0], dtype=torch.float64)
    save(tmp_path / "changed", given)
    trained(package, "--steps", 1, "--init", tmp_path / "changed", "--save", tmp_path / "again")
    command = ["export", str(package), str(tmp_path / "again"), "--safetensors", str(tmp_path / "out")]
    assert main(command) == 2 and not (tmp_path / "out").exists()  # what a checkpoint names is not read
    assert main([*command, "--init", str(tmp_path / "changed")]) == 0
    assert torch.equal(load(tmp_path / "out")[0]["unused.bias"], given["unused.bias"])


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"bits": 4}


def test_extra_states_are_no_tensors_of_a_file() -> None:
    module = ModuleType("model")
    module.model = lambda: nn.Sequential(WithExtraState(2, 2, bias=False))  # type: ignore[attr-defined]
    assert state_dtypes(module, {}) == {"0.weight": torch.float32}


class WithMetadata(nn.Linear):
    """Adds an entry of its own to the state dict, as the base class of neuraloperator's models does."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(*args, **kwargs), "_metadata": {"version": 1}}


def test_other_objects_of_a_state_dict_are_no_tensors_of_a_file() -> None:
    module = ModuleType("model")
    module.model = lambda: WithMetadata(2, 2, bias=False)  # type: ignore[attr-defined]
    assert state_dtypes(module, {}) == {"weight": torch.float32}


RENAMED = """
import torch
from torch import nn

class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self._register_state_dict_hook(self._rename)

    def _rename(self, module, state, prefix, metadata):
        for name in [*state]:
            state[name.replace("layer.", "")] = state.pop(name)
        state["norm"] = self.layer.weight.detach() * 2

    def forward(self, x):
        return self.layer(x).square().mean()

def model():
    return Wrapped()

def batch():
    return {"x": torch.randn(8, 4)}
"""


def test_entries_that_hooks_rename_hold_their_parameters(tmp_path: Path) -> None:
    """As those of torchtune's fused layers."""
    (tmp_path / "model.py").write_text(RENAMED)
    package = partc.compile(str(tmp_path / "model.py"), mesh="dp=2").write(tmp_path / "build")
    trained(package, "--steps", 1, "--save", tmp_path / "saved")
    said: list[str] = []
    export(package, tmp_path / "saved", tmp_path / "out", say=said.append)
    found, _ = load(tmp_path / "out")
    assert {name: x.dim() for name, x in found.items()} == {
        "weight": 2,
        "bias": 1,
        "unused.weight": 2,
        "unused.bias": 1,
    }
    assert said[-1:] == ["the file leaves out norm, which the state dict computes"]


def plan(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "2x2x2" / "plan.json").read_text())
    return found


def state() -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in tied.model().state_dict().items()}


Tensors = dict[str, Tensor]
WRONG: dict[str, Callable[[Tensors], object]] = {
    "it has no 'blocks.1.out.bias', which is f64[16] here": lambda x: x.pop("blocks.1.out.bias"),
    "it has no 'scale', which is f64[] here": lambda x: x.pop("scale"),
    "it has no 'embed.weight', which is": lambda x: (x.pop("embed.weight"), x.pop("head.weight")),
    "its 'blocks.0.qkv.weight' has shape [47, 16], here it is [48, 16]": lambda x: x.update(
        {"blocks.0.qkv.weight": x["blocks.0.qkv.weight"][:47]}
    ),
    "its 'scale' is i64, which f64 here cannot hold exactly": lambda x: x.update(scale=torch.tensor(1)),
    "it has 'more.weight', which the model doesn't": lambda x: x.update({"more.weight": torch.ones(2)}),
}
RIGHT: dict[str, Callable[[Tensors], object]] = {
    "a tied name alone": lambda x: x.pop("embed.weight"),
    "no unused weight": lambda x: x.pop("unused.weight"),
    "narrower": lambda x: x.update({"blocks.0.out.bias": x["blocks.0.out.bias"].bfloat16()}),
    "a buffer that isn't saved": lambda x: x.update(passing=torch.ones(3).double()),
}


@pytest.mark.parametrize("why", WRONG)
def test_files_that_do_not_fit(folder: Path, tmp_path: Path, why: str) -> None:
    tensors, _ = load(folder / "out")
    WRONG[why](tensors)
    save(tmp_path / "x", tensors)
    with pytest.raises(UsageError) as caught:
        under_plan_names(tmp_path / "x", plan(folder), state)
    assert caught.value.code == "P0527" and why in caught.value.cause


@pytest.mark.parametrize("what", RIGHT)
def test_files_that_do(folder: Path, tmp_path: Path, what: str) -> None:
    tensors, _ = load(folder / "out")
    RIGHT[what](tensors)
    save(tmp_path / "x", tensors)
    assert under_plan_names(tmp_path / "x", plan(folder), state).whole("embed.weight").shape == (23, 16)


@pytest.mark.slow
def test_a_large_models_files(folder: Path, tmp_path: Path) -> None:
    tensors, _ = load(folder / "out")
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        save(tmp_path / f"{number}.safetensors", {name: tensors[name] for name in part})
    index = {name: f"{int(name in names[5:])}.safetensors" for name in names}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    for path in (tmp_path, tmp_path / INDEX):
        found = under_plan_names(path, plan(folder), state)
        assert torch.equal(found.whole(names[0]), tensors[names[0]])
        assert torch.equal(found.whole("embed.weight"), tensors["embed.weight"])
    shutil.copy(folder / "out", tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(UsageError, match="not an index"):
        under_plan_names(tmp_path, plan(folder), state)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_is_named(folder: Path, tmp_path: Path, zipped: bool) -> None:
    torch.save({"scale": torch.ones(1)}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UsageError, match=r"torch\.save: .*save_model") as caught:
        under_plan_names(tmp_path / "x.pt", plan(folder), state)
    assert caught.value.code == "P0527"


def test_the_exit_code(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no safetensors")
    done = train(folder / "2x2x2", "--steps", 1, "--init", tmp_path / "x")
    assert done.returncode == 2 and "error P0527" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_transformers_loads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=29, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": ["GPT2LMHeadModel"]})
    )
    package = partc.compile(
        f"hf:{tmp_path}/gpt2/config.json", mesh="2x1x2", options={"batch": 4, "seq": 8}, microbatches=2
    )
    package.write(tmp_path / "build")
    trained(tmp_path / "build", "--steps", 2, "--save", tmp_path / "save", "--lr", 0.01)
    target = tmp_path / "gpt2" / "model.safetensors"
    assert main(["export", str(tmp_path / "build"), str(tmp_path / "save"), "--safetensors", str(target)]) == 0
    model, problems = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2", output_loading_info=True)
    assert not any(problems.values()), problems
    trained(tmp_path / "build", "--steps", 1, "--init", tmp_path / "gpt2", "--metrics", tmp_path / "log")
    module = load_model_file(tmp_path / "build" / "model.py")
    options = json.loads((tmp_path / "build" / "plan.json").read_text())["options"]
    batch = global_batch(module, options, seed=0, step=0, dtype=torch.float32)
    with torch.no_grad():
        assert losses(tmp_path / "log") == pytest.approx([model(**batch).loss.item()], rel=1e-5)
