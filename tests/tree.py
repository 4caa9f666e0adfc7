"""Facts about the tree, from imports and definitions: `python -m tests.tree` prints them, test_architecture.py holds them."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The folders of partc/ from the lowest layer to the highest: a module imports from its own folder and from lower ones.
# "" stands for the files next to folders.
LAYERS = (
    "runtime", "kernels", "", "ir", "schedules", "rules", "sharding", "communication", "cluster", "cost", "frontend", "passes",
    "templates", "codegen", "rehearsal", "package", "compilation", "planner", "api", "reports", "cli", "__main__",
)  # fmt: skip
# The layers of partc/runtime.
RUNTIME = ("", "device", "processes", "comm", "ops", "execution", "optimizer", "checkpoint", "train")


# Classes of packages that are the runtime side of a noun of the IR, under its name: packages cannot import the IR.
SAME_CONCEPT = frozenset({"Action", "Bucket", "Parts", "Shard", "Stage"})


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "partc" else ("partc", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def ours() -> list[Path]:
    """Every module once: the links inside partc/ are not followed."""
    files = (path for folder in ("partc", "passes", "codegen", "templates") for path in (ROOT / folder).rglob("*.py"))
    links = tuple(link for link in (ROOT / "partc").iterdir() if link.is_symlink())
    return sorted(path for path in files if not any(path.is_relative_to(link) for link in links))


MODULES = {module_name(path): path for path in ours()}


def place(module: str, layers: tuple[str, ...], above: str) -> int:
    """The layer of a module below the package `above`."""
    name = module.removeprefix(above).removeprefix(".").partition(".")[0]
    return layers.index(name if name in layers else "")


def imports(path: Path, *, late: bool) -> Iterator[tuple[int, str]]:
    """Line and module of each import; `late` tells whether those inside functions count. Type-only ones never do."""
    return ((line, module) for line, module, inside in _imports(path) if late or not inside)


@cache
def _imports(path: Path) -> tuple[tuple[int, str, bool], ...]:
    """Line and module of each import, and whether it is inside a function."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]

    def walk(nodes: list[ast.stmt], inside: bool) -> Iterator[tuple[int, str, bool]]:
        for node in nodes:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name, inside) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    inner = f"{module}.{alias.name}"
                    yield node.lineno, inner if inner in MODULES else module, inside
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from walk(node.body, True)
            else:
                for field in ("body", "orelse", "finalbody"):
                    yield from walk(getattr(node, field, []), inside)
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body, inside)

    return tuple(walk(ast.parse(path.read_text()).body, False))


@cache
def graph() -> Mapping[str, frozenset[str]]:
    """The modules that each module imports when it loads."""
    return {
        name: frozenset(target for _, target in imports(path, late=False) if target in MODULES and target != name)
        for name, path in MODULES.items()
    }


def cycles() -> list[str]:
    """Import cycles between modules, and between the folders and files of one folder: one for each depth at most."""
    found = []
    for depth in range(2, 2 + max(name.count(".") for name in MODULES)):
        joined: dict[str, set[str]] = defaultdict(set)
        for name, targets in graph().items():
            here = _cut(name, depth)
            joined[here] |= {_cut(target, depth) for target in targets} - {here}
        if cycle := _cycle(joined):
            found.append(" -> ".join(cycle))
    return found


def _cut(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])


def _cycle(joined: Mapping[str, set[str]]) -> tuple[str, ...]:
    done: set[str] = set()

    def visit(name: str, stack: tuple[str, ...]) -> tuple[str, ...]:
        if name in stack:
            return (*stack[stack.index(name) :], name)
        found: tuple[str, ...] = ()
        if name not in done:
            done.add(name)
            found = next(filter(None, (visit(target, (*stack, name)) for target in sorted(joined[name]))), ())
        return found

    return next(filter(None, (visit(name, ()) for name in sorted(joined))), ())


def longest_chain() -> tuple[str, ...]:
    """The longest chain of modules of which each imports the next."""

    @cache
    def below(name: str) -> tuple[str, ...]:
        return (name, *max((below(target) for target in sorted(graph()[name])), key=len, default=()))

    return max((below(name) for name in sorted(MODULES)), key=len)


def repeated_classes() -> dict[str, list[str]]:
    """Names that several modules give to classes, with the modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return {name: modules for name, modules in sorted(found.items()) if len(modules) > 1}


def main() -> None:
    files, lines = Counter[str](), Counter[str]()
    for path in MODULES.values():
        folder = str(path.parent.relative_to(ROOT))
        files[folder] += 1
        lines[folder] += len(path.read_text().splitlines())
    print("files  lines  folder")
    for folder in sorted(files):
        print(f"{files[folder]:5}  {lines[folder]:5}  {folder}")
    print(f"{files.total():5}  {lines.total():5}  in all")
    tops = Counter[str]()
    for folder, count in lines.items():
        tops[folder.split("/")[0]] += count
    print("lines: " + ", ".join(f"{top} {count}" for top, count in tops.items()))
    chain = longest_chain()
    print(f"longest import chain ({len(chain)}): {' -> '.join(chain)}")
    print(f"import cycles: {'; '.join(cycles()) or 'none'}")
    repeated = repeated_classes()
    print(f"names of more than one class: {len(repeated) or 'none'}")
    for name, modules in repeated.items():
        print(f"  {name}: {', '.join(modules)}{'  (one concept)' if name in SAME_CONCEPT else ''}")


if __name__ == "__main__":
    main()
