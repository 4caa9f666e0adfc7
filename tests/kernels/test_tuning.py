"""The choice of kernel configurations: timed once, stored by GPU, version and source, and equal on all ranks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import partc
from partc.runtime.errors import UsageError
from partc.runtime.processes.agreement import Together
from partc.runtime.torch_private import lone_store
from partc.runtime.train import tuning
from partc.runtime.train.train import main
from partc.runtime.train.tuning import (
    TunableKernel,
    configure_kernels,
    fastest,
    from_given,
    kernels_of,
    read_table,
    run_with,
    tuned_choices,
)
from tests.durable import imported_from
from tests.passes.test_zero import tied
from tests.triton_runs import INTERPRETED

OWN, WIDE, FLAT = ({"BLOCK": block, "num_warps": warps} for block, warps in ((1024, 4), (2048, 8), (512, 4)))
HERE = "NVIDIA H200, Triton 3.7.1"


def kernel(folder: Path, name: str, text: str = "") -> TunableKernel:
    module = ModuleType(name)
    module.__file__ = str(folder / f"{name}.py")
    Path(module.__file__).write_text(text)
    module.CONFIGURATION, module.CANDIDATES = dict(OWN), (OWN, WIDE, FLAT)  # type: ignore[attr-defined]
    return TunableKernel(name, module)


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ((3.0, 1.0, 2.0), WIDE),
        ((3.0, 2.99, 2.98), OWN),  # no reason for another
        ((3.0, math.nan, 2.0), FLAT),
        ((math.nan, math.nan, 2.0), FLAT),
        ((1.0, 2.0, 3.0), OWN),
    ],
)
def test_the_fastest_is_chosen(times: tuple[float, ...], best: dict[str, int]) -> None:
    left = iter(times)
    assert fastest((OWN, WIDE, FLAT), lambda choice: next(left)) == best


class Bench:
    """Blocks of 2048 are fastest for `silu_mul`, of 512 for everything else; says what was timed."""

    def __init__(self) -> None:
        self.timed: list[str] = []

    def __call__(self, kernel: TunableKernel, choice: Mapping[str, int]) -> float:
        self.timed.append(kernel.name)
        best = 2048 if kernel.name == "silu_mul" else 512
        return 1 + abs(math.log2(choice["BLOCK"] / best))


def test_what_spills_is_found_in_what_triton_has_compiled() -> None:
    """The spills of every function of a module on every device; functions that are not Triton's have none."""
    kept, spilling = (SimpleNamespace(n_spills=count) for count in (0, 12))
    function = SimpleNamespace(device_caches={0: ({"a": kept, "b": spilling}, {}, "target")})
    module: Any = SimpleNamespace(_kernel=function, other=SimpleNamespace(device_caches={}), triton=object(), NAME="x")
    assert tuning.spills(module) == 12
    tuning.reload_kernels(module)
    assert tuning.spills(module) == 0 and function.device_caches == {}


def test_each_is_timed_once(tmp_path: Path) -> None:
    kernels = [kernel(tmp_path, name) for name in ("add", "silu_mul")]
    file, said = tmp_path / "tuned.json", list[str]()

    def again(place: str = HERE, among: list[TunableKernel] = kernels) -> tuple[dict[str, Any], list[str]]:
        bench = Bench()
        return tuned_choices(among, file, place, bench, said.append), bench.timed

    right = {"add": FLAT, "silu_mul": WIDE}
    assert again() == (right, ["add"] * 3 + ["silu_mul"] * 3)
    assert len(said) == 1 and "2 kernels" in said[0]
    assert again() == (right, []) and len(said) == 1
    assert again("NVIDIA A100, Triton 3.7.1") == (right, ["add"] * 3 + ["silu_mul"] * 3)
    other = [kernels[0], kernel(tmp_path, "silu_mul", "another source")]
    assert again(among=other) == (right, ["silu_mul"] * 3)
    assert set(json.loads(file.read_text())) == {HERE, "NVIDIA A100, Triton 3.7.1"}
    assert len(json.loads(file.read_text())[HERE]) == 3
    run_with(kernels, right)
    assert kernels[0].module.CONFIGURATION == FLAT


@pytest.mark.parametrize(
    "damage",
    [
        "not JSON", "[1]", "\udcff", '{"NVIDIA H200, Triton 3.7.1": 3}', '{"NVIDIA H200, Triton 3.7.1": {KEY: 3}}',
        '{"NVIDIA H200, Triton 3.7.1": {KEY: {"BLOCK": 4096, "num_warps": 4}}}',
        '{"NVIDIA H200, Triton 3.7.1": {KEY: {"BLOCK": 1024, "num_warps": 5}}}',
        '{"NVIDIA H200, Triton 3.7.1": {KEY: {"BLOCK": 1024, "num_warps": true}}}',
        '{"NVIDIA H200, Triton 3.7.1": {KEY: {"num_warps": 4}}}',
        '{"NVIDIA H200, Triton 3.7.1": {KEY: {"BLOCK": 1024, "num_warps": 4, "WIDTH": 3}}}',
    ],
)  # fmt: skip
def test_what_is_damaged_is_said_and_made_again(tmp_path: Path, damage: str) -> None:
    here, file, said = kernel(tmp_path, "add"), tmp_path / "tuned.json", list[str]()
    file.write_bytes(damage.replace("KEY", json.dumps(here.key)).encode(errors="surrogateescape"))
    assert tuned_choices([here], file, HERE, Bench(), said.append) == {"add": FLAT}
    assert len(said) == 2 and str(file) in said[0]
    bench = Bench()
    assert tuned_choices([here], file, HERE, bench, said.append) == {"add": FLAT} and not bench.timed and len(said) == 2


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    said: list[str] = []
    assert tuned_choices([kernel(tmp_path, "add")], tmp_path / "gone" / "tuned.json", HERE, Bench(), said.append)
    assert "cannot be written" in said[-1]


def test_a_users_file(tmp_path: Path) -> None:
    kernels, said = [kernel(tmp_path, name) for name in ("add", "silu_mul")], list[str]()
    file = tmp_path / "mine.json"
    staged = {"BLOCK": 512, "num_warps": 1, "num_stages": 4}
    file.write_text(json.dumps({HERE: {"add": staged, "of another model": {"BLOCK": 3}}}))
    assert from_given(kernels, file, HERE, said.append) == {"add": staged} and not said
    assert from_given(kernels, file, "another GPU", said.append) == {} and "another GPU" in said[0]
    file.write_text(json.dumps({HERE: {"add": {"BLOCK": 300, "num_warps": 4}}}))
    with pytest.raises(UsageError, match=r"P0532.*cannot run so"):
        from_given(kernels, file, HERE, said.append)
    for text in ("[]", "{", '{"a": 3}'):
        file.write_text(text)
        with pytest.raises(UsageError, match="P0532"):
            read_table(file)


def test_all_ranks_run_with_what_the_first_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(tuning, "gpu_and_triton", lambda device: HERE)
    monkeypatch.setattr(tuning, "Clocked", lambda device: bench)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    store = lone_store()
    (tmp_path / "bad.json").write_text(json.dumps({HERE: {"add": {"BLOCK": 3, "num_warps": 4}}}))
    for rank in (0, 1):
        package = ModuleType(f"kernels_of_rank_{rank}")
        package.__all__ = ["add"]  # type: ignore[attr-defined]
        here = kernel(tmp_path, "add")
        monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setitem(sys.modules, f"{package.__name__}.add", here.module)
        together = Together(store, rank, 2)
        configure_kernels(package, tmp_path, torch.device("cpu"), together, file=None, say=lambda line: None)
        assert here.module.CONFIGURATION == FLAT
        with pytest.raises(UsageError, match="P0532"):
            configure_kernels(
                package, tmp_path, torch.device("cpu"), together, file=tmp_path / "bad.json", say=lambda line: None
            )
    assert bench.timed == ["add"] * 3


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = partc.compile(tied, {"ids": torch.randint(16, (4, 4))}, mesh="1").write(tmp_path / "b")
    with imported_from(package):
        assert main(["--virtual", "--tuned", str(tmp_path / "none.json")], package) == 2
    assert "error P0532" in capsys.readouterr().err


def test_every_candidate_makes_the_same(tmp_path: Path) -> None:
    """Every kernel of a package runs on the memory on which it is timed."""
    batch = {"ids": torch.randint(16, (4, 4))}
    built = partc.compile(tied, batch, mesh="2", kernels="triton", compress_grads="int8", precision="fp64")
    package = built.write(tmp_path / "b")
    short = [package / "kernels" / f"{name}.py" for name in ("adamw", "sgd", "squares", "int8")]
    for path in short:
        path.write_text(path.read_text().replace("16777216", "20000").replace("4194304", "5000"))
    with imported_from(package):
        import importlib

        kernels = kernels_of(importlib.import_module("kernels"))
        assert {"adamw", "squares", "int8", "cross_entropy", "embedding_grad"} <= {each.name for each in kernels}
        several = 0
        for each in kernels:
            assert each.candidates[0] == each.module.CONFIGURATION and each.allows(each.candidates[0])
            right = made(each, each.candidates[0])
            for choice in each.candidates[1:]:
                several += 1
                for mine, theirs in zip(made(each, choice), right, strict=True):
                    torch.testing.assert_close(mine, theirs, equal_nan=True)
        assert several > 2 * len(kernels)


@pytest.mark.slow
def test_loops_over_tiles_make_the_same_in_every_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of programs, smaller tiles and loads ahead: rows are as many, and sums the same to rounding."""
    import importlib

    monkeypatch.setattr("partc.codegen.kernels.rows.SUMMED", 64)
    monkeypatch.setattr("partc.codegen.kernels.rows.PROGRAMS", 3)
    built = partc.compile(Path(__file__).parents[1] / "models/tied.py", mesh="1", kernels="triton", precision="fp64")
    package = built.write(tmp_path / "b")
    with imported_from(package):
        kernels = kernels_of(importlib.import_module("kernels"))
        looped = [each for each in kernels if "PROGRAMS" in each.candidates[0]]
        assert looped and all(len({each["PROGRAMS"] for each in one.candidates}) == 3 for one in looped)
        for each in looped:
            right = made(each, each.candidates[0])
            for choice in each.candidates[1:]:
                for mine, theirs in zip(made(each, choice), right, strict=True):
                    torch.testing.assert_close(mine, theirs, equal_nan=True)


def made(kernel: TunableKernel, choice: Mapping[str, int]) -> list[Tensor]:
    """The results of a launch and its arguments, which it may overwrite."""
    torch.manual_seed(0)
    launch: Callable[[], Any] = kernel.module.trial(torch.device("cpu" if INTERPRETED else "cuda"))
    kernel.run_with(choice)
    if hasattr(kernel.module, "INTERPRETED"):
        kernel.module.INTERPRETED.update(choice)
    found = launch()
    given = launch.__closure__[0].cell_contents if launch.__closure__ else ()
    return [x for x in (*(found if isinstance(found, tuple) else (found,)), *given) if isinstance(x, Tensor)]


@pytest.mark.skipif(INTERPRETED, reason="takes a GPU")
def test_a_gpu_times_them(tmp_path: Path) -> None:
    built = partc.compile(tied, {"ids": torch.randint(16, (4, 4))}, mesh="1", kernels="triton", precision="fp32")
    package = built.write(tmp_path / "b")
    with imported_from(package):
        import importlib

        kernels, said = importlib.import_module("kernels"), list[str]()
        for _ in range(2):
            together = Together(lone_store(), 0, 1)
            configure_kernels(kernels, package / "kernels", torch.device("cuda"), together, file=None, say=said.append)
        assert len(said) == 1
        kept = json.loads((package / "kernels" / tuning.FILE).read_text())
        assert len(kept[tuning.gpu_and_triton(torch.device("cuda"))]) == len(kernels_of(kernels))
