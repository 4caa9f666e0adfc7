"""The structure of the code: imports go down the layers, heavy imports are late, and every package is shipped."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from partc.frontend.model_files.example_files import FILES
from partc.ir.collectives import COLLECTIVES
from partc.ir.operations import TABLE as EFFECTS
from partc.rules.table import LOWERED
from partc.rules.table import TABLE as RULES
from tests.tree import (
    LAYERS,
    MODULES,
    ROOT,
    RUNTIME,
    SAME_CONCEPT,
    cycles,
    imports,
    module_name,
    ours,
    place,
    repeated_classes,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.mark.parametrize(("above", "layers"), [("partc", LAYERS), ("partc.runtime", RUNTIME)])
def test_imports_go_down_the_layers(above: str, layers: tuple[str, ...]) -> None:
    below = {module: path for module, path in MODULES.items() if f"{module}.".startswith(f"{above}.")}
    folders = {module.removeprefix(f"{above}.").partition(".")[0] for module, path in below.items() if module != above}
    assert {
        name for name in folders if f"{above}.{name}" not in below or below[f"{above}.{name}"].stem == "__init__"
    } <= {*layers}
    for module, path in below.items():
        for line, target in imports(path, late=True):
            if target in below:
                assert place(target, layers, above) <= place(module, layers, above), f"{path}:{line} imports {target}"


def test_tests_stand_in_folders_of_the_layers() -> None:
    """Tests of whole trainings are in `tests/end_to_end/`; tests of the tree and of the pages stand next to the folders."""
    assert {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} <= {*LAYERS, "end_to_end"}


def test_no_import_cycles() -> None:
    """Neither between modules nor between the folders and files of one folder."""
    assert not cycles()


def test_class_names_are_unique() -> None:
    assert set(repeated_classes()) <= SAME_CONCEPT


def test_a_file_defines_each_function_once() -> None:
    """A second definition takes the place of the first, whose callers no linter warns."""
    for path in sorted({*ROOT.glob("tests/**/*.py"), *MODULES.values()}):
        defined = [
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.decorator_list
        ]
        assert len(defined) == len({*defined}), (
            f"{path}: {sorted({name for name in defined if defined.count(name) > 1})}"
        )


def test_the_runtime_needs_torch_alone() -> None:
    for path in (ROOT / "partc" / "runtime").rglob("*.py"):
        for line, target in imports(path, late=True):
            top = target.split(".")[0]
            allowed = top == "torch" or target.startswith("partc.runtime") or top in sys.stdlib_module_names
            assert allowed, f"{path.name}:{line} imports {target}"
        assert "import partc" not in path.read_text() and "from partc" not in path.read_text()


@pytest.mark.parametrize(
    "code",
    [
        "import partc",
        "from partc import Mesh, PartcError",
        "import partc.cli",
        "import partc.passes",
        "from partc.cli import main; main(['--help'])",
        "from partc.cli import main; main(['compile', '--help'])",
        "from partc.cli import main; main(['explain', 'P0103'])",
        "from partc.cli import main; main(['compile', 'no.py', '--mesh', '2xx2'])",
        "from partc.package.launch import read_plan; from pathlib import Path; read_plan(Path('tests/handmade_package'))",
        "from partc.passes import PIPELINE",
        "import partc.schedules",
    ],
)
def test_these_import_no_torch(code: str) -> None:
    heavy = "{'torch', 'numpy', 'highspy', 'sympy', 'transformers', 'rich', 'jinja2'}"
    script = f"{code}\nimport sys\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_single_device_run_imports_no_tracer() -> None:
    """Importing the tracer would take longer than importing PyTorch, in every verification."""
    script = "import sys, partc.package.reference; sys.exit('torch._functorch.aot_autograd' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


PRIVATE = re.compile(r"\btorch\.(?!ops\.)(\w+\.)*_(?!_)\w+|from torch(\.\w+)* import (.*, )?_\w+")


# Files that are tables over operations, and the lists of at least six operations that other files have: what a pass
# can follow, which no other pass asks for.
_TABLES = (
    "partc/rules/",
    "partc/frontend/",
    "partc/ir/operations.py",
    "partc/ir/collectives.py",
    "codegen/expressions.py",
)
_LISTS = {
    "partc/cost/rates.py": 1,
    "passes/differentiate/joint.py": 2,
    "passes/normalize/__init__.py": 1,
    "passes/outline/value_names.py": 1,
    "passes/sequences.py": 2,
    "passes/simplify/masks.py": 4,
}


def test_facts_about_operations_stand_in_tables() -> None:
    """No file lists the operations of a kind: the tables of `ir.operations`, `ir.collectives` and `rules` have facts."""
    names = {*COLLECTIVES, *EFFECTS, *RULES, *LOWERED}
    found = Counter[str]()
    for path in MODULES.values():
        where = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            words = [each.value for each in getattr(node, "elts", ()) if isinstance(each, ast.Constant)]
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                words = [*node.value.split()]
            if sum(word in names for word in words) >= max(6, 0.7 * len(words)) and not where.startswith(_TABLES):
                found[where] += 1
    assert found == Counter(_LISTS)


def test_private_torch_names_stand_in_one_file() -> None:
    """torch._ops.OpOverload and the like: one place to look after an upgrade; the runtime has its own."""
    for path in MODULES.values():
        if path.name != "torch_private.py":
            found = [line for line in path.read_text().splitlines() if PRIVATE.search(line)]
            assert not found, f"{path.relative_to(ROOT)}: {found[0].strip()}"


def test_ranks_register_no_operations() -> None:
    """Torch looks for the line of each, which takes a noticeable part of a rank's start."""
    ours = (path for name, path in MODULES.items() if name.startswith("partc.runtime"))
    assert not [path for path in ours if "torch.library" in path.read_text()]


def test_tests_use_public_names_of_partc() -> None:
    """Of its modules and classes: in imports, as attributes, and where a test replaces something."""
    private = re.compile(r"_(?!_|fields\b)")  # named tuples have _fields
    for path in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(path.read_text())
        ours: set[str] = set()
        found: list[tuple[int, str]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "partc":
                ours |= {name.asname or name.name for name in node.names}
                found += [(node.lineno, name.name) for name in node.names if private.match(name.name)]
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name) if owner in ours:
                    found += [(node.lineno, name)] if private.match(name) else []
                case ast.Call(args=[ast.Name(id=owner) | ast.Attribute(attr=owner), ast.Constant(value=str(name)), *_]):
                    found += [(node.lineno, name)] if owner in ours and private.match(name) else []
                case ast.Constant(value=str(text)) if re.fullmatch(r"partc(\.\w+)*\._[a-zA-Z]\w*", text):
                    found.append((node.lineno, text))
        assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_the_runtime_names_the_overloads_that_it_calls() -> None:
    """A call without one tries all, and on a GPU waits to write operands into messages that nobody reads."""
    for path in (ROOT / "partc/runtime").rglob("*.py"):
        assert not re.findall(r"\baten\.\w+\(.*", path.read_text()), path


def test_modules_say_what_they_are() -> None:
    for name, path in MODULES.items():
        text = path.read_text()
        if text.strip():
            docstring = ast.get_docstring(ast.parse(text))
            assert docstring or name.endswith("__main__"), f"{path.relative_to(ROOT)} has no caption"


UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|/(root|home/\w+)/")  # or true of one machine only


_WRITES = re.compile(r"""\.write_(?:text|bytes)\(|open\([^)]*["'][wx]b?["']""")
# Files in folders that get their names when complete, in temporary folders, and one that several ranks write.
_PARTS = {
    "checkpoint.py", "inference.py", "launch.py", "log.py", "measurement.py", "output.py", "trace.py", "whole_files.py",
}  # fmt: skip


def test_files_are_written_as_a_whole() -> None:
    assert {path.name for path in MODULES.values() if _WRITES.search(path.read_text())} <= _PARTS


def test_integer_programs_are_solved_in_one_place() -> None:
    """The place that keeps the solver's text off standard output, where a command writes its JSON."""
    found = [path.name for path in MODULES.values() if re.search(r"\b(highspy|milp|linprog)\b", path.read_text())]
    assert found == ["integer_program.py"]


def test_nothing_unfinished_and_no_folders_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and path != Path(__file__):
            try:
                text = path.read_text()
            except UnicodeDecodeError:
                continue
            assert not (found := UNFINISHED.search(text)), f"{name}: {found.group(0)}"


def packaging() -> dict[str, object]:
    settings: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return settings


def test_the_package_list_matches_the_tree() -> None:
    settings = packaging()
    folders = [ROOT / "partc", ROOT / "passes", ROOT / "codegen", ROOT / "templates"]
    found = {module_name(path) for folder in folders for path in folder.rglob("__init__.py") if path in ours()}
    assert set(settings["packages"]) == found  # type: ignore[call-overload]
    for package, folder in settings["package-dir"].items():  # type: ignore[attr-defined]
        assert module_name(ROOT / folder / "__init__.py") == package
        link = ROOT / "partc" / folder
        assert folder == "partc" or (link.is_symlink() and link.resolve() == ROOT / folder)


@pytest.mark.parametrize("name", ["passes", "codegen"])
def test_the_top_level_names_are_refused(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert f"import partc.{name}, not {name}" in done.stderr


@pytest.mark.slow
def test_the_wheel_holds_everything_and_nothing_at_the_top(tmp_path: Path) -> None:
    """Built by setuptools itself, in a copy, without a network."""
    copy = tmp_path / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    pytest.importorskip("setuptools", minversion="77")
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, copy / name
        if source.exists() and not name.startswith("tests/"):
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                target.symlink_to(source.readlink())
            else:
                target.write_bytes(source.read_bytes())
    script = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"partc"}
    assert {f"{module.replace('.', '/')}" for module in MODULES} <= {
        name.removesuffix(".py").removesuffix("/__init__") for name in names
    }
    templates = {
        f"partc/templates/{path.name}" for path in (ROOT / "templates").iterdir() if path.suffix in (".jinja", ".json")
    }
    assert templates <= names
    assert "partc/py.typed" in names
    assert {f"partc/examples/{name}" for name in FILES} <= names
