"""README.md and docs/ are true: links, commands, code, paths, quotes and pictures agree with the tree."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from markdown_it import MarkdownIt

from partc.cli import cli
from tests.documentation import PAGES, PICTURES, ROOT, Example, pictures, refreshed
from tests.tree import LAYERS

PARSER = MarkdownIt("commonmark").enable("table")
FOLDERS = ("partc/", "passes/", "codegen/", "templates/", "tests/", "examples/", "docs/", ".ci/")
# Options of torchrun and SLURM.
OTHERS = {"--standalone", "--nproc-per-node", "--max-restarts", "--master-port", "--rdzv-endpoint", "--gpus-per-task"}


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _links(page: Path) -> Iterator[str]:
    for token in PARSER.parse(page.read_text()):
        for child in token.children or ():
            for key in ("href", "src"):
                if key in child.attrs:
                    yield str(child.attrs[key])


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub form them."""
    tokens = PARSER.parse(page.read_text())
    titles = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def _blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The language and the text of every block of code."""
    for token in PARSER.parse(page.read_text()):
        if token.type == "fence":
            yield token.info.strip(), token.content
        elif token.type == "code_block":
            yield "sh", token.content


def _spans(page: Path) -> Iterator[str]:
    for token in PARSER.parse(page.read_text()):
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def _commands(page: Path) -> Iterator[list[str]]:
    """The commands in a page's shell blocks, as words without comments."""
    for language, text in _blocks(page):
        if language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield words


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example.made(tmp_path_factory.mktemp("documentation"))


@pytest.fixture(scope="module")
def train_options(example: Example) -> set[str]:
    """The options of an emitted train.py."""
    train = [sys.executable, str(example.folder / "build" / "train.py"), "--help"]
    text = subprocess.run(train, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", [*PAGES, ROOT / "examples" / "README.md"], ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if page.parent == ROOT / "docs":
            assert target.resolve().is_relative_to(ROOT / "docs"), f"{link} leaves the site"
        assert not anchor or anchor in _anchors(target), link


def test_the_site_has_every_page_once() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in _links(ROOT / "README.md")}
    missing = {f"docs/{page.name}" for page in PAGES if page.parent == ROOT / "docs"} - linked
    assert missing == {"docs/index.md"}  # the site's own entrance


def test_tables_have_no_escaped_bars() -> None:
    """GitHub shows `a\\|b` in a table's code as a|b, Python-Markdown with the backslash."""
    for page in PAGES:
        assert not re.search(r"^\|.*\\\|", page.read_text(), re.MULTILINE), page.name


def test_python_blocks_are_python() -> None:
    blocks = [(page, text) for page in PAGES for language, text in _blocks(page) if language == "python"]
    whole = [(page, text) for page, text in blocks if "…" not in text and "quote:" not in text]
    assert len(whole) >= 3
    for page, text in whole:
        if f"-->\n```python\n{text}" not in page.read_text():
            compile(text, str(page), "exec")


def test_the_python_interface_is_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [text for language, text in _blocks(ROOT / "docs" / "getting-started.md") if language == "python"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert (tmp_path / "build" / "train.py").exists()


def infer_options() -> set[str]:
    source = (ROOT / "partc" / "runtime" / "train" / "inference.py").read_text()
    return set(re.findall(r'add\(\s*"(--[a-z-]+)"', source))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_parse(page: Path, train_options: set[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    settings = (ROOT / "partc" / "settings.py").read_text()
    for words in _commands(page):
        while variable := re.match("([A-Z_]+)=", words[0]):
            assert f'"{variable[1]}"' in settings, words
            words = words[1:]
        if words[0] == "partc":
            command = cli.commands[words[1]]
            with click.Context(command, info_name=words[1]) as context:
                command.make_parser(context).parse_args(words[2:])
        elif words[0] == "make":
            assert any(word in targets for word in words[1:]), words
        elif any(word.endswith("train.py") for word in words):
            given = {word for word in words if word.startswith("--")} - OTHERS
            assert given <= train_options, words
        elif any(word.endswith("infer.py") for word in words):
            assert {word for word in words if word.startswith("--")} - OTHERS <= infer_options(), words
        else:
            assert words[0] in ("pip", "python", "pytest"), words
    for span in _spans(page):
        if match := re.match(r"(partc|make) ([a-z]+)", span):
            assert match[2] in (cli.commands if match[1] == "partc" else targets), span


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_options_exist(page: Path, train_options: set[str]) -> None:
    known = {option for command in cli.commands.values() for item in command.params for option in item.opts}
    folders = [ROOT / "tests" / name for name in ("benchmarks", "gpu", "independent")]
    scripts = [ROOT / "tests" / "enumeration.py", *(path for folder in folders for path in folder.glob("*.py"))]
    others = set(re.findall(r"\"(--[a-z][\w-]*)\"", "".join(path.read_text() for path in scripts)))
    texts = [*_spans(page), *(text for language, text in _blocks(page) if language == "sh")]
    named = {option for text in texts for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    assert named <= known | others | train_options | infer_options() | OTHERS | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_paths_exist(page: Path) -> None:
    for span in _spans(page):
        for word in span.split():
            if word.startswith(FOLDERS) and re.fullmatch(r"[\w./-]+", word):
                assert (ROOT / word).exists(), word


def test_the_layers_are_those_of_the_tree() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Layers")[2]
    rows = re.findall(r"^\| `(?:partc/)?(\w+)/` \|", text, re.MULTILINE)
    assert rows == [name for name in LAYERS if name not in ("", "api", "__main__")]


def test_quotes_are_what_the_compiler_prints_now(example: Example) -> None:
    for page in PAGES:
        assert page.read_text() == refreshed(page.read_text(), example), f"{page.name}: run make refresh"


def test_pictures_are_what_the_compiler_draws_now(example: Example) -> None:
    drawn = pictures(example)
    assert {path.name for path in PICTURES.iterdir()} == set(drawn)
    for name, text in drawn.items():
        assert (PICTURES / name).read_text() == text, f"{name}: run make refresh"
