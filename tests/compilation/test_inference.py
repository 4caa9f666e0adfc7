"""Results of packages that only run forward equal those of one device, batch by batch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.ir.mesh import Mesh
from partc.package.launch import RunFailed, local_environment, read_package
from partc.package.verify import verify
from partc.runtime.checkpoint.safetensors import load, save
from tests.durable import trained, whole
from tests.prefork import done, shared

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 36), nn.Linear(36, 16), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 22, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids))))


def model():
    return Net()


def made(seed):
    return {{"ids": torch.randint(23, ({rows}, 5), generator=torch.Generator().manual_seed(seed))}}


def batch():
    return made(0)


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten() % 22)


{data}


{infer}
"""
DATA = "def data(step):\n    return made(100 + step)"
INFER = """def infer(model, batch):
    logits = model(batch["ids"])
    return {{
        "logits": logits,
        "best": (logits.argmax(-1), logits.softmax(-1).amax(-1)),
        "turned": logits[:, 0].t(),
        "joined": logits.flatten(0, 1),
        "mean": logits.mean((0, 1)),
        "scalars": [logits.square().mean(), (logits > 0).sum()],
        "lengths": (batch["ids"] > 3).sum(-1),
    }}"""


def written(folder: Path, *, rows: int = 16, data: str = DATA, infer: str = INFER) -> Path:
    file = folder / "mine.py"
    file.write_text(MODEL.format(rows=rows, data=data, infer=infer.replace("{{", "{").replace("}}", "}")))
    return file


def inferred(package: Path, out: Path, *arguments: object, virtual: bool = True) -> subprocess.CompletedProcess[str]:
    command = [str(package / "infer.py"), "--out", str(out), *map(str, arguments)]
    if virtual:
        return done([*command, "--virtual"], local_environment())
    output = package.with_suffix(".txt")
    size = Mesh.parse(read_package(package)["mesh"]).size
    code = shared().ranks(size, command, output, local_environment()).wait()
    return subprocess.CompletedProcess(command, code, "", output.read_text())


def results(out: Path) -> list[dict[str, Tensor]]:
    return [load(path)[0] for path in sorted(out.iterdir())]


def plain(package: Path) -> tuple[ModuleType, nn.Module]:
    """The package's model file, and its model with weights of its own, in evaluation mode."""
    spec = importlib.util.spec_from_file_location("plain_model", package / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(7)
    return module, module.model().double().eval()


def flat(found: object, path: str = "") -> dict[str, Tensor]:
    if isinstance(found, Tensor):
        return {path: found}
    items = found.items() if isinstance(found, dict) else enumerate(found)  # type: ignore[arg-type, var-annotated]
    return {key: x for name, item in items for key, x in flat(item, f"{path}.{name}" if path else str(name)).items()}


def equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(mine) == set(theirs)
    for name, x in theirs.items():
        torch.testing.assert_close(mine[name], x, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


CASES = {
    "dp=2,tp=2": {"mesh": "dp=2,tp=2", "microbatches": 2},
    "pp=2,tp=2": {"mesh": "pp=2,tp=2", "microbatches": 4},
    "pp=2,dp=2, interleaved, zero 3": {"mesh": "pp=2,dp=2", "microbatches": 2, "zero": 3, "schedule": "interleaved"},
    "one rank": {"mesh": "1", "microbatches": 4},
}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_results_equal_those_of_one_device(tmp_path: Path, case: str) -> None:
    given = partc.compile(written(tmp_path), precision="fp64", forward_only=True, **CASES[case])  # type: ignore[arg-type]
    package = given.write(tmp_path / "build")
    module, model = plain(package)
    save(tmp_path / "w.safetensors", model.state_dict())
    ended = inferred(package, tmp_path / "out", "--batches", 2, "--init", tmp_path / "w.safetensors")
    assert ended.returncode == 0, ended.stderr
    found = results(tmp_path / "out")
    assert len(found) == 2
    for step, mine in enumerate(found):
        with torch.no_grad():
            equal(mine, flat(module.infer(model, module.data(step))))
    schema = json.loads((Path(partc.__file__).parent / "templates" / "plan.schema.json").read_text())
    jsonschema.validate(json.loads((package / "plan.json").read_text()), schema)
    assert given.memory is not None and not given.memory.worst.categories.get("gradients")
    assert given.memory.worst.host == 0  # it writes no checkpoint


@pytest.mark.slow
def test_a_checkpoint_of_a_training_on_another_mesh(tmp_path: Path) -> None:
    file = written(tmp_path, data="data = [made(100 + step) for step in range(3)]", infer="")
    training = partc.compile(file, mesh="dp=2", precision="fp64").write(tmp_path / "training")
    trained(training, "--steps", 2, "--save", tmp_path / "save")
    package = partc.compile(file, mesh="tp=2", precision="fp64", forward_only=True).write(tmp_path / "build")
    ended = inferred(package, tmp_path / "out", "--checkpoint", tmp_path / "save")
    assert ended.returncode == 0, ended.stderr
    module, model = plain(package)
    model.load_state_dict(whole(next((tmp_path / "save").glob("step_*"))), strict=False)
    found = results(tmp_path / "out")
    assert len(found) == 3
    for mine, batch in zip(found, module.data, strict=True):
        with torch.no_grad():
            equal(mine, {"result": model(**batch)})
    again = inferred(package, tmp_path / "out")
    assert again.returncode == 2 and "P0538" in again.stderr


@pytest.mark.slow
def test_ends_of_data(tmp_path: Path) -> None:
    uneven = "data = [made(1), made(2), {'ids': made(3)['ids'][:7]}]"
    package = partc.compile(written(tmp_path, data=uneven), mesh="dp=2", forward_only=True).write(tmp_path / "build")
    ended = inferred(package, tmp_path / "out")
    assert ended.returncode == 2 and "P0543" in ended.stderr and len(results(tmp_path / "out")) == 2
    tokens = torch.arange(16 * 5 * 2 + 12) % 23
    (tmp_path / "t.bin").write_bytes(tokens.to(torch.int16).numpy().tobytes())
    ended = inferred(package, tmp_path / "rows", "--data", tmp_path / "t.bin")
    assert ended.returncode == 0 and "the last 2 rows" in ended.stderr
    lengths = torch.cat([each["lengths"] for each in results(tmp_path / "rows")])
    assert torch.equal(lengths, (tokens[:160].view(32, 5) > 3).sum(-1))
    endless = partc.compile(written(tmp_path), mesh="dp=2", forward_only=True).write(tmp_path / "endless")
    stopped = inferred(endless, tmp_path / "none")
    assert stopped.returncode == 2 and "P0521" in stopped.stderr


@pytest.mark.parametrize(
    ("infer", "code"),
    [
        ("def infer(model, batch):\n    return model(batch['ids']) + torch.rand(())", "P0420"),
        ("def infer(model, batch):\n    return {'logits': model(batch['ids']), 'other': object()}", "P0206"),
        ("def infer(model, batch):\n    return {'ids': batch['ids'], 'logits': model(batch['ids'])}", "P0208"),
        ("def infer(model, batch):\n    x = model(batch['ids'])\n    return x - x.amax(0)", "P0402"),
    ],
)
def test_functions_that_cannot_be_compiled(tmp_path: Path, infer: str, code: str) -> None:
    with pytest.raises(PartcError) as refused:
        partc.compile(written(tmp_path, infer=infer), mesh="dp=2", microbatches=2, forward_only=True)
    assert refused.value.code == code


def test_verify_compares_results(tmp_path: Path) -> None:
    package = partc.compile(written(tmp_path), mesh="dp=2", precision="fp64", forward_only=True).write(tmp_path / "b")
    found = verify(package, steps=1, virtual=True)
    assert found.ok and found.compared == 9 and found.worst.kind == "result"
    region = package / "regions" / "head.py"
    region.write_text(region.read_text().replace("def head(", "def wrong(", 1) + WRONG)
    assert not verify(package, steps=1, virtual=True).ok
    with pytest.raises(PartcError, match=r"P0504.*run 9 batches, and the comparison 1"):
        verify(package, steps=1, virtual=True, arguments=["--batches", "9"])


@pytest.mark.slow
@pytest.mark.processes
def test_verify_says_why_ranks_stop(tmp_path: Path) -> None:
    """The data have fewer batches than it asks for. Of torchrun's own traceback it shows nothing."""
    path = written(tmp_path, data="def data():\n    yield made(0)")
    package = partc.compile(path, mesh="dp=2", forward_only=True).write(tmp_path / "b")
    with pytest.raises(RunFailed, match=r"P0544: data of the model file ends after 1 batch\b") as stopped:
        verify(package, steps=2)
    assert "Traceback" not in str(stopped.value)


WRONG = """

def head(comm, p, *args):
    logits, *others = wrong(comm, p, *args)
    return (logits * (1 + 1e-9), *others)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_real_ranks_write_the_same_files(tmp_path: Path) -> None:
    given = partc.compile(written(tmp_path), mesh="pp=2,tp=2", microbatches=2, forward_only=True)
    package = given.write(tmp_path / "build")
    for real in (False, True):
        ended = inferred(package, tmp_path / f"out{real}", "--batches", 2, virtual=not real)
        assert ended.returncode == 0, ended.stderr
    files = [[path.read_bytes() for path in sorted((tmp_path / f"out{real}").iterdir())] for real in (False, True)]
    assert files[0] == files[1] and len(files[0]) == 2


def test_layers_whose_results_are_not_read_are_left_out(tmp_path: Path) -> None:
    unread = 'def infer(model, batch):\n    x = model.embed(batch["ids"])\n    model.norm(x)\n    return model.head(x)'
    package = partc.compile(written(tmp_path, infer=unread), mesh="dp=2,tp=2", precision="fp64", forward_only=True)
    assert package.verify(steps=1).ok
    assert not any(name.startswith("norm") for call in package.program.calls for name in call.params)
