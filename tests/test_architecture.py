"""The shape of the code: imports only go down the layers, heavy ones stay late, every package is shipped."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from partc.example_files import FILES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
# A module may import those of its own layer and of the layers above it in this list. Packages stand for
# all their modules, unless a longer name has a line of its own.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("partc", "partc.errors", "partc.entries", "partc.installed", "partc.example_files", "partc.quoting"),
    ("partc.settings", "partc.mesh", "partc.layout", "partc.fuel", "partc.explain"),
    ("partc.program", "partc.pins", "partc.naming", "partc.schedules"),
    (
        "partc.printer",
        "partc.simulate",
        "partc.parser",
        "partc.reshard",
        "partc.rules",
        "partc.verifier",
        "partc.torch_private",
        "partc.runtime",
        "partc.kernels",
    ),
    ("partc.reductions",),
    ("partc.parts",),
    ("partc.turns",),
    (
        "partc.saving",
        "partc.memory",
        "partc.ledger",
        "partc.strides",
        "partc.roofline",
        "partc.sharding",
        "partc.gradients",
        "partc.events",
        "partc.operators",
        "partc.assignment",
        "partc.capturing",
    ),
    ("partc.attentions",),
    ("partc.placing", "partc.joint", "partc.interpret", "partc.symbols", "partc.size_names", "partc.formulas"),
    (
        "partc.modelfile",
        "partc.sources",
        "partc.huggingface",
        "partc.ownbackward",
        "partc.frozen",
        "partc.capture",
        "partc.trace_errors",
        "partc.trace",
        "partc.origin",
    ),
    ("partc.observed", "partc.trial"),
    ("partc.passes",),
    ("partc.templates", "partc.codegen"),
    (
        "partc.accounting",
        "partc.forecast",
        "partc.laid",
        "partc.work",
        "partc.coverage",
        "partc.output",
        "partc.options",
        "partc.lessons",
        "partc.standins",
        "partc.rehearsal",
        "partc.fitting",
        "partc.early",
    ),
    ("partc.launch", "partc.reference", "partc.sampling", "partc.verify", "partc.doctor", "partc.export"),
    (
        "partc.api",
        "partc.wording",
        "partc.comparison",
        "partc.drawing",
        "partc.stacking",
        "partc.report",
        "partc.memory_table",
    ),
    ("partc.formula_table",),
    ("partc.measured", "partc.chrome"),
    ("partc.inspection", "partc.dump", "partc.console", "partc.asked"),
    ("partc.tracing",),
    ("partc.cli", "partc.__main__"),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "partc" else ("partc", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def ours() -> list[Path]:
    """Every module once: the links inside partc/ are not followed."""
    folders = [ROOT / "partc", ROOT / "partc" / "rules", ROOT / "partc" / "schedules", ROOT / "partc" / "runtime"]
    folders += [ROOT / "partc" / "kernels"]
    folders += [ROOT / "passes", ROOT / "codegen", ROOT / "templates"]
    return sorted(path for folder in folders for path in folder.glob("*.py"))


MODULES = {module_name(path): path for path in ours()}


def rank_of(module: str) -> int:
    name = module
    while name not in RANK:
        name = name.rpartition(".")[0]
        assert name not in ("", "partc"), f"{module} is in no layer: add it to LAYERS"
    return RANK[name]


def imports(path: Path, *, late: bool) -> Iterator[tuple[int, str]]:
    """Line and module of each import; `late` tells whether those inside functions count. Type-only ones never do."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]

    def walk(nodes: list[ast.stmt]) -> Iterator[tuple[int, str]]:
        for node in nodes:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    inner = f"{module}.{alias.name}"
                    yield node.lineno, inner if inner in MODULES else module
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if late:
                    yield from walk(node.body)
            else:
                for field in ("body", "orelse", "finalbody"):
                    yield from walk(getattr(node, field, []))
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body)

    yield from walk(ast.parse(path.read_text()).body)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_the_layers(module: str) -> None:
    path = MODULES[module]
    for line, target in imports(path, late=True):
        if target.split(".")[0] == "partc":
            assert rank_of(target) <= rank_of(module), f"{path.name}:{line} imports {target}"


def test_no_import_cycles() -> None:
    graph = {
        name: {target for _, target in imports(path, late=False) if target in MODULES} for name, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, stack: tuple[str, ...]) -> None:
        assert name not in stack, f"a cycle: {' -> '.join((*stack, name))}"
        if name not in done:
            for target in graph[name] - {name}:
                visit(target, (*stack, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_runtime_needs_torch_alone() -> None:
    for path in (ROOT / "partc" / "runtime").glob("*.py"):
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
        "from partc.launch import read_plan; from pathlib import Path; read_plan(Path('tests/handmade_package'))",
        "from partc.passes import PIPELINE",
        "import partc.schedules",
    ],
)
def test_these_import_no_torch(code: str) -> None:
    heavy = "{'torch', 'numpy', 'scipy', 'sympy', 'transformers', 'rich', 'jinja2'}"
    script = f"{code}\nimport sys\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PRIVATE = re.compile(r"\btorch\.(?!ops\.)(\w+\.)*_(?!_)\w+|from torch(\.\w+)* import (.*, )?_\w+")


def test_private_torch_names_stand_in_one_file() -> None:
    """torch._ops.OpOverload and the like: one place to look after an upgrade; the runtime has its own."""
    for path in MODULES.values():
        if path.name != "torch_private.py":
            found = [line for line in path.read_text().splitlines() if PRIVATE.search(line)]
            assert not found, f"{path.relative_to(ROOT)}: {found[0].strip()}"


def test_modules_say_what_they_are() -> None:
    for name, path in MODULES.items():
        text = path.read_text()
        if text.strip():
            docstring = ast.get_docstring(ast.parse(text))
            assert docstring or name.endswith("__main__"), f"{path.relative_to(ROOT)} has no caption"


BANNED = re.compile(r"\b(TODO|FIXME|XXX|HACK|(?i:claude|anthropic|copilot|chatgpt))\b|/work/|/root/|/home/\w+/")


def test_no_words_that_do_not_belong() -> None:
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
            assert not (found := BANNED.search(text)), f"{name}: {found.group(0)}"


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
