"""Earlier traces are reused if nothing has changed, and only then."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from partc.frontend import trace_cache
from partc.frontend.captured_program import Batches
from partc.frontend.trace import Traced
from partc.frontend.trace import trace_file as traced_anew
from partc.ir.mesh import Mesh
from partc.settings import Settings

MODEL = """
import json
from pathlib import Path

import torch
from torch import nn

from {helper} import activation

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.last = nn.Linear(width, json.loads((Path(__file__).parent / "sizes.json").read_text())["last"])

    def forward(self, x):
        return self.last(activation(self.first(x))).square().mean()

def model(width: int = 16):
    return Net(width)

def batch():
    return {{"x": torch.zeros(4, 8)}}
"""
HELPER = "import torch\n\ndef activation(x):\n    return torch.{name}(x)\n"


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Traced, bool]]:
    """Traces a model file in tmp_path; says whether the trace is an earlier one."""
    anew: list[str] = []
    before = trace_cache.trace_loaded

    def counted(*args: object, **kwargs: object) -> Traced:
        anew.append("")
        return before(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(trace_cache, "trace_loaded", counted)
    monkeypatch.setattr(trace_cache, "settings", lambda: Settings(cache=str(tmp_path / "cache")))

    def found(
        folder: Path = tmp_path,
        mesh: str = "1x2x2",
        batches: Batches = Batches(microbatches=2),  # noqa: B008
        precision: str = "fp32",
        **options: str,
    ) -> tuple[Traced, bool]:
        anew.clear()
        path, how = folder / "net.py", {"mesh": Mesh.parse(mesh), "batches": batches, "precision": precision}
        result = trace_cache.trace_file(path, options, **how)  # type: ignore[arg-type]
        earlier = not anew
        assert result == traced_anew(path, options, **how)  # type: ignore[arg-type]
        return result, earlier

    helper = f"helper_{tmp_path.name}"
    _write(tmp_path, MODEL.format(helper=helper), {f"{helper}.py": HELPER.format(name="relu")}, last=4)
    return found


def _write(folder: Path, model: str, modules: dict[str, str], *, last: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(model)
    (folder / "sizes.json").write_text(json.dumps({"last": last}))
    for name, text in modules.items():
        (folder / name).write_text(text)


def test_a_model_is_traced_once(traced: Callable[..., tuple[Traced, bool]]) -> None:
    assert [traced()[1], traced()[1], traced(mesh="1x4x1", batches=Batches(microbatches=4))[1]] == [False, True, True]


def test_other_options_precisions_and_batches_are_traced(traced: Callable[..., tuple[Traced, bool]]) -> None:
    traced()
    apart = Batches(microbatches=2, separate=True)
    others = [traced(width="32"), traced(precision="bf16"), traced(batches=apart)]
    assert not any(earlier for _, earlier in others)
    assert traced(width="32")[1] and traced(width="16")[1] is False  # an option that is given stands in the package


def test_another_source_is_traced(traced: Callable[..., tuple[Traced, bool]], tmp_path: Path) -> None:
    traced()
    path = tmp_path / "net.py"
    path.write_text(path.read_text().replace("square", "abs"))
    assert "abs" in {op.name for op in traced()[0].program.regions[0].forward.ops}


OWN = """
import torch

@torch.library.custom_op("{name}::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

@twice.register_fake
def _(x):
    return torch.empty_like(x)
"""


def test_a_trace_whose_operations_are_unknown_is_made_anew(
    traced: Callable[..., tuple[Traced, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that only model() imports have not defined them yet, where another process reads a trace."""
    name = f"own_{tmp_path.name}"
    text = f"import {name}\n" + MODEL.format(helper=f"helper_{tmp_path.name}")
    text = text.replace("activation(self.first(x))", f"torch.ops.{name}.twice(self.first(x))")
    (tmp_path / "net.py").write_text(text)
    (tmp_path / f"{name}.py").write_text(OWN.format(name=name))
    assert [traced()[1], traced()[1]] == [False, True]
    monkeypatch.setattr(trace_cache, "resolve", lambda op: getattr(torch.ops.absent, op))
    assert not traced()[1]


def test_a_file_that_the_model_reads_is_part_of_it(traced: Callable[..., tuple[Traced, bool]], tmp_path: Path) -> None:
    traced()
    (tmp_path / "sizes.json").write_text(json.dumps({"last": 12}))
    result, earlier = traced()
    assert not earlier and {p.name: p.type.shape for p in result.program.parameters}["last.bias"] == (12,)
    assert traced()[1]


def test_modules_of_the_user_are_part_of_the_key(
    traced: Callable[..., tuple[Traced, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced()
    helper = next(tmp_path.glob("helper_*.py"))
    helper.write_text(HELPER.format(name="tanh"))
    monkeypatch.delitem(__import__("sys").modules, helper.stem)
    result, earlier = traced()
    assert not earlier and "tanh" in {op.name for op in result.program.regions[0].forward.ops}


@pytest.mark.parametrize(
    "damage", [lambda text: text[:200], lambda text: text.replace("f32[", "f32[1, ", 1), lambda text: "[" * 100_000]
)
def test_a_damaged_entry_is_written_again(
    damage: Callable[[str], str], traced: Callable[..., tuple[Traced, bool]], tmp_path: Path
) -> None:
    traced()
    (entry,) = (tmp_path / "cache").glob("*.json")
    entry.write_text(damage(entry.read_text()))
    assert [traced()[1], traced()[1]] == [False, True]


def test_a_model_that_reads_the_environment_is_traced_in_each(
    traced: Callable[..., tuple[Traced, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.py"
    text = path.read_text().replace("width: int = 16", 'width: int = int(__import__("os").environ["WIDTH"])')
    path.write_text(text)
    monkeypatch.setenv("WIDTH", "24")
    traced()
    monkeypatch.setenv("WIDTH", "40")
    assert traced()[1] is False


def test_the_oldest_entries_go_first(
    traced: Callable[..., tuple[Traced, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_cache, "MOST_ENTRIES", 2)
    for width in ("8", "16", "24"):
        traced(width=width)
    assert len(list((tmp_path / "cache").glob("*"))) == 2
    assert traced(width="24")[1] and not traced(width="8")[1]


def test_without_a_folder_nothing_is_kept(
    traced: Callable[..., tuple[Traced, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_cache, "settings", lambda: replace(Settings(), cache=""))
    traced()
    assert not (tmp_path / "cache").exists()
